"""Routers as plain values in messages; the model whose layer a router uses is sent with the other models."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import numpy as np

from feddrift.engines.flower.messages import MAX_SIZE
from feddrift.engines.flower.model_parts import Body
from feddrift.engines.flower.serialization import InvalidMessageError, check_int
from feddrift.errors import ConfigError
from feddrift.models import join, take, unused_id
from feddrift.results import Projection
from feddrift.router import Router
from feddrift.types import Floats, Models


def pack_router(models: Models, votes: Floats, router: Router) -> tuple[Models, Floats, Body]:
    """Pack a router for a message.

    Args:
        models: The models that the client votes for, and those that the router may choose.
        votes: [m], the client's votes.
        router: The router.

    Returns:
        The models to send, which include the router's own; the votes for these; and the router as plain values.
    """
    position = None  # of the router's own model
    if router.model is not None:
        position = len(models)
        models = join(models, take(router.model, [0], [unused_id(models)]))
        votes = np.append(votes, 0.0)
        router = replace(router, votes=np.pad(router.votes, ((0, 0), (0, len(models) - position))))
    project: Any = router.project
    body = {
        "per": router.per,
        "of": router.of,
        "layer": router.layer,
        "margin": router.margin,
        "model": position,
        "project": asdict(project) if isinstance(project, Projection) else _to_lists(project),
        **{name: _to_lists(getattr(router, name)) for name in ("centre", "votes", "low", "scale")},
    }
    return models, votes, body


def read_router(body: Body, models: Models) -> Router:
    """Read and check a router that `pack_router` packed.

    Args:
        body: The router as plain values.
        models: The models that were sent with it.

    Raises:
        InvalidMessageError: The content is not valid.
    """
    project = read_projection(body["project"])
    centre, votes, low, scale = (np.array(body[name], dtype=np.float64) for name in ("centre", "votes", "low", "scale"))
    if votes.ndim != 2 or votes.shape[1] != len(models):
        raise InvalidMessageError(f"its router must vote for {len(models)} models, got votes of shape {votes.shape}")
    position = body["model"]
    model = None
    if position is not None:
        model = take(models, [check_int(position, 0, len(models) - 1)], [models.ids[position]])
    try:
        return Router(
            per=body["per"],
            centre=centre,
            votes=votes,
            of=body["of"],
            project=project,
            low=low,
            scale=scale,
            margin=body["margin"],
            model=model,
            layer=body["layer"],
        )
    except ConfigError as error:
        raise InvalidMessageError(str(error)) from None


def read_projection(project: Any) -> Any:
    """Read a projection of rows: the key and size of a random matrix, a matrix, or None."""
    if isinstance(project, dict):
        words = [check_int(word, 0, 2**32 - 1) for word in project["key"]]
        return Projection((words[0], words[1]), check_int(project["size"], 1, MAX_SIZE))
    return None if project is None else np.array(project, dtype=np.float64)


def _to_lists(value: Any) -> Any:
    return None if value is None else np.asarray(value, dtype=np.float64).tolist()
