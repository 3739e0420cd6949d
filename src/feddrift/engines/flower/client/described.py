"""Moments over the network: the question, a client's answer, and what the server reads of it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, get_args

import numpy as np

from feddrift.engines.flower.client.routers import read_projection
from feddrift.engines.flower.messages import About, Describe
from feddrift.engines.flower.model_parts import Body
from feddrift.engines.flower.serialization import Refused
from feddrift.engines.local.engine import InProcess
from feddrift.engines.worker import Question
from feddrift.nets import layer_width
from feddrift.types import Layer, Models, Moments, Projection


def asking(question: Question, models: list[Body]) -> Describe:
    """The request of a question about these models."""
    project: Any = question.project
    if isinstance(project, Projection):
        project = asdict(project)
    elif project is not None:
        project = np.asarray(project, dtype=np.float64).tolist()
    return Describe(models, question.layer, question.by, project, question.square)


def answer(engine: InProcess, task: About, request: Describe, models: Models) -> Body:
    """What a client says: counts, and zeros in place of moments without rows."""
    if request.layer not in get_args(Layer):
        raise Refused(f"it asks for the layer {str(request.layer)[:40]!r}, legal are {', '.join(get_args(Layer))}")
    if request.by not in ("all", "class"):
        raise Refused(f"it asks for moments by {str(request.by)[:40]!r}, legal are all and class")
    if not engine.stream.counts[task.tau, task.index]:
        raise Refused("it asks for moments of data that this client does not hold")
    layer: Any = request.layer
    width, by = layer_width(engine.net, layer, task.features, task.n_classes), request.by
    question = Question(layer, by, _projection(request.project, width), bool(request.square))  # type: ignore[arg-type]
    moments = engine.worker(task.tau).describe(models, np.array([task.index]), question)
    body = {name: np.nan_to_num(getattr(moments, name)[0]).tolist() for name in ("mean", "std")}
    return {"count": moments.count[0].tolist(), **body}


def _projection(project: Any, width: int) -> Any:
    read = read_projection(project)
    if isinstance(read, np.ndarray) and (read.ndim != 2 or len(read) != width):
        raise Refused(f"it projects {len(project)} numbers of a layer that has {width}")
    return read


def read(body: Body, shape: tuple[int, int, int], n: int, square: bool) -> Moments:
    """The answer: of each model and class, which have n rows together, mean and deviation; [1, m, k, d].

    A client that is not to describe its data says no counts: then it is as if it had no rows.
    """
    if body["count"] is None:
        return Moments.nobody(1, *shape)
    count, (mean, std) = np.array(body["count"]), (np.array(body[name], dtype=np.float64) for name in ("mean", "std"))
    if count.shape != shape[:2] or count.dtype.kind != "i" or (count < 0).any() or (count.sum(axis=1) != n).any():
        raise Refused(f"expected counts of shape {shape[:2]}, each model's adding up to {n}")
    if mean.shape != shape or std.shape != shape or not np.isfinite([mean, std]).all() or (std < 0).any():
        raise Refused(f"expected finite means and deviations of shape {shape}")
    none = (count == 0)[..., None]
    mean, std = np.where(none, np.nan, mean), np.where(none if square else True, np.nan, std)
    return Moments(count[None].astype(np.int64), mean[None], std[None])
