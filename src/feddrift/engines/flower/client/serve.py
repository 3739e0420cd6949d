"""The model a client uses now, from its own disk: no server, no network.

from feddrift.engines.flower.client.serve import current
model = current("clients/a")
model.predict(x)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from feddrift.engines.flower import model_parts
from feddrift.engines.flower.client.client_toml import settings_of
from feddrift.engines.flower.client.routers import read_router
from feddrift.engines.flower.client.store import Store
from feddrift.errors import ConfigError, DataError
from feddrift.exported_models import Predictor
from feddrift.nets import imported, net_for
from feddrift.streams.folder import listed


@dataclass(frozen=True)
class Serving(Predictor):
    """The models that a client uses."""

    tau: int = 0  # the time step they were trained in last


def current(folder: str | Path, experiment: str | None = None) -> Serving:
    """The model that the client of this folder uses now; it must be told which experiment if there are several."""
    root = Path(folder)
    settings = settings_of(root)
    experiments = sorted(path.name for path in (root / "store").glob("*") if path.is_dir())
    if experiment is None and len(experiments) > 1:
        raise ConfigError(f"{root} took part in several experiments, name one of: {', '.join(experiments)}")
    if not experiments and experiment is None:
        raise DataError(f"{root} has no model yet: no time step is done")
    store = Store(root / "store", experiment or experiments[0], settings["name"])
    serving = store.serving
    if serving is None:
        raise DataError(f"{root} has no model yet: no time step of {experiment or experiments[0]} is done")
    features, n_classes = tuple(serving["features"]), serving["n_classes"]
    net = net_for(imported(settings.get("model"), root), features, n_classes)
    models = model_parts.assembled(net, serving["models"], store.part)
    names = root / settings.get("data", "data") / "classes.txt"
    classes = listed(names) if names.exists() else range(n_classes)
    votes = np.array(serving["votes"], dtype=np.float64)
    router = read_router(serving["router"], models) if "router" in serving else None
    return Serving(net, models, votes, serving["ballot"], features, tuple(classes), router=router, tau=serving["tau"])
