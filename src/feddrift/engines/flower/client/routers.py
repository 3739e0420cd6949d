"""Routers over the network: as plain values, with the model that describes inputs as one more of the models sent."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import numpy as np

from feddrift.engines.flower.messages import MAX_SIZE
from feddrift.engines.flower.model_parts import Body
from feddrift.engines.flower.serialization import Refused, whole
from feddrift.errors import ConfigError
from feddrift.models import join, take, unused_id
from feddrift.results import Projection
from feddrift.router import Router
from feddrift.types import Floats, Models


def sent_with(models: Models, votes: Floats, router: Router) -> tuple[Models, Floats, Body]:
    """The models to send with a router, a client's votes for them, and the router as plain values."""
    describer = None
    if router.model is not None:
        describer, n = len(models), len(models)
        models = join(models, take(router.model, [0], [unused_id(models)]))
        votes, router = (
            np.append(votes, 0.0),
            replace(router, votes=np.pad(router.votes, ((0, 0), (0, len(models) - n)))),
        )
    project: Any = router.project
    body = {
        "per": router.per,
        "of": router.of,
        "layer": router.layer,
        "margin": router.margin,
        "model": describer,
        "project": asdict(project) if isinstance(project, Projection) else _plain(project),
        **{name: _plain(getattr(router, name)) for name in ("centre", "votes", "low", "scale")},
    }
    return models, votes, body


def read_router(body: Body, models: Models) -> Router:
    """The router that `sent_with` made this of, checked."""
    project = read_projection(body["project"])
    centre, votes, low, scale = (np.array(body[name], dtype=np.float64) for name in ("centre", "votes", "low", "scale"))
    if votes.ndim != 2 or votes.shape[1] != len(models):
        raise Refused(f"its router must vote for {len(models)} models, got votes of shape {votes.shape}")
    at = body["model"]
    model = None if at is None else take(models, [whole(at, 0, len(models) - 1)], [models.ids[at]])
    try:
        kinds = body["per"], centre, votes, body["of"]
        return Router(*kinds, project, low, scale, body["margin"], model, body["layer"])
    except ConfigError as error:
        raise Refused(str(error)) from None


def read_projection(project: Any) -> Any:
    """What rows are projected by: a key from which it is drawn, a matrix, or nothing."""
    if isinstance(project, dict):
        words = [whole(word, 0, 2**32 - 1) for word in project["key"]]
        return Projection((words[0], words[1]), whole(project["size"], 1, MAX_SIZE))
    return None if project is None else np.array(project, dtype=np.float64)


def _plain(value: Any) -> Any:
    return None if value is None else np.asarray(value, dtype=np.float64).tolist()
