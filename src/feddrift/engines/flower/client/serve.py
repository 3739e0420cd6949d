"""Predictions with the models that a client uses now, read from its own disk without server and network.

>>> from feddrift.engines.flower.client.serve import current  # doctest: +SKIP
>>> current("clients/a").predict(x)  # doctest: +SKIP
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from feddrift.engines.flower import model_parts
from feddrift.engines.flower.client.client_toml import read_client_toml
from feddrift.engines.flower.client.routers import read_router
from feddrift.engines.flower.client.store import Store
from feddrift.errors import ConfigError, DataError
from feddrift.exported_models import Predictor
from feddrift.nets import build_client_net, import_model
from feddrift.streams.folder import read_class_list


@dataclass(frozen=True)
class Serving(Predictor):
    """Models that a client uses now."""

    tau: int = 0  # time step in which they were trained


def current(folder: str | Path, experiment: str | None = None) -> Serving:
    """Load the models that a client uses now.

    Args:
        folder: The client's folder.
        experiment: The experiment, if the client took part in several.

    Raises:
        ConfigError: The client took part in several experiments, and none is given.
        DataError: The client has no model yet.
    """
    root = Path(folder)
    settings = read_client_toml(root)
    experiments = sorted(path.name for path in (root / "store").glob("*") if path.is_dir())
    if experiment is None and len(experiments) > 1:
        raise ConfigError(f"{root} took part in several experiments: choose one of {', '.join(experiments)}")
    if not experiments and experiment is None:
        raise DataError(f"{root} has no model yet: no time step has ended")
    store = Store(root / "store", experiment or experiments[0], settings["name"])
    serving = store.serving
    if serving is None:
        raise DataError(f"{root} has no model yet: no time step of {experiment or experiments[0]} has ended")
    features = tuple(serving["features"])
    n_classes = serving["n_classes"]
    net = build_client_net(import_model(settings.get("model"), root), features, n_classes)
    models = model_parts.assemble_models(net, serving["models"], store.read_part)
    class_file = root / settings.get("data", "data") / "classes.txt"
    classes = read_class_list(class_file) if class_file.exists() else range(n_classes)
    votes = np.array(serving["votes"], dtype=np.float64)
    router = read_router(serving["router"], models) if "router" in serving else None
    return Serving(net, models, votes, serving["ballot"], features, tuple(classes), router=router, tau=serving["tau"])
