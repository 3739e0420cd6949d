"""Feature statistics over the network: the request, the client's reply, and the server's check of the reply."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, get_args

import numpy as np

from feddrift.engines.flower.client.policy import MIN_GROUP_ROWS, choose_sent_groups
from feddrift.engines.flower.client.routers import read_projection
from feddrift.engines.flower.messages import Describe, RequestContext
from feddrift.engines.flower.model_parts import Body
from feddrift.engines.flower.serialization import InvalidMessageError
from feddrift.engines.local.engine import InProcess
from feddrift.engines.worker import StatisticsRequest
from feddrift.nets import get_layer_width
from feddrift.types import Layer, Models, Moments, Projection


def build_request(question: StatisticsRequest, models: list[Body]) -> Describe:
    """Build the request for these statistics of models."""
    project: Any = question.project
    if isinstance(project, Projection):
        project = asdict(project)
    elif project is not None:
        project = np.asarray(project, dtype=np.float64).tolist()
    return Describe(models, question.layer, question.by, project, question.square)


def handle_describe(
    engine: InProcess, context: RequestContext, request: Describe, models: Models, min_rows: int
) -> Body:
    """Compute a client's reply: counts, means and deviations, which are zero for classes with too few rows.

    Args:
        engine: The client's data and net.
        context: The context of the request.
        request: The request.
        models: Its models.
        min_rows: The minimum number of rows of a class, and of the rows that are not described.

    Raises:
        InvalidMessageError: The request is not valid.
    """
    if request.layer not in get_args(Layer):
        raise InvalidMessageError(
            f"it requests the layer {str(request.layer)[:40]!r}, legal are {', '.join(get_args(Layer))}"
        )
    if request.by not in ("all", "class"):
        raise InvalidMessageError(f"it requests moments by {str(request.by)[:40]!r}, legal are all and class")
    if not engine.stream.counts[context.tau, context.index]:
        raise InvalidMessageError("it requests moments of data that this client does not have")
    layer: Any = request.layer
    width = get_layer_width(engine.net, layer, context.features, context.n_classes)
    project = _read_checked_projection(request.project, width)
    question = StatisticsRequest(layer, request.by, project, bool(request.square))  # type: ignore[arg-type]
    moments = engine.worker(context.tau).describe(models, np.array([context.index]), question)
    sent = np.array([choose_sent_groups(counts, min_rows) for counts in moments.count[0].tolist()])  # [m, k]
    body = {
        name: np.where(sent[..., None], np.nan_to_num(getattr(moments, name)[0]), 0.0).tolist()
        for name in ("mean", "std")
    }
    return {"count": np.where(sent, moments.count[0], 0).tolist(), **body}


def _read_checked_projection(project: Any, width: int) -> Any:
    """Read a projection, and check that it fits a layer of this width."""
    projection = read_projection(project)
    if isinstance(projection, np.ndarray) and (projection.ndim != 2 or len(projection) != width):
        raise InvalidMessageError(f"it projects {len(project)} numbers of a layer that has {width}")
    return projection


def read_reply(body: Body, shape: tuple[int, int, int], n: int, square: bool) -> Moments:
    """Read and check a client's reply.

    Args:
        body: The body. A client that does not permit statistics replies without counts.
        shape: The number of models, of classes or 1, and the length of a mean.
        n: The number of the client's rows; classes with few rows may be missing.
        square: Whether the reply contains deviations.

    Returns:
        The moments [1, m, k, d] of this client, without rows if it sent no counts.

    Raises:
        InvalidMessageError: The content is not valid.
    """
    if body["count"] is None:
        return Moments.empty(1, *shape)
    count = np.array(body["count"])
    mean, std = (np.array(body[name], dtype=np.float64) for name in ("mean", "std"))
    are_counts = count.shape == shape[:2] and count.dtype.kind == "i" and not (count < 0).any()
    n_left_out = n - count.sum(axis=-1)  # rows of classes with few rows
    if not are_counts or not np.isin(n_left_out, [0, n, *range(MIN_GROUP_ROWS, n)]).all():
        raise InvalidMessageError(f"expected counts of shape {shape[:2]}, each model's adding up to {n}")
    if mean.shape != shape or std.shape != shape or not np.isfinite([mean, std]).all() or (std < 0).any():
        raise InvalidMessageError(f"expected finite means and deviations of shape {shape}")
    without_rows = (count == 0)[..., None]
    mean = np.where(without_rows, np.nan, mean)
    std = np.where(without_rows if square else True, np.nan, std)
    return Moments(count[None].astype(np.int64), mean[None], std[None])
