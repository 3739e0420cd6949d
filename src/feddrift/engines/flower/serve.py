"""The model a client uses now, from its own disk: no server, no network.

from feddrift.engines.flower.serve import current
model = current("clients/a")
model.predict(x)
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from feddrift.engines.flower import parts as model_parts
from feddrift.engines.flower.own import imported_net
from feddrift.engines.flower.store import Store
from feddrift.errors import ConfigError, DataError
from feddrift.models import one
from feddrift.nets.voting import poll
from feddrift.streams.folder import listed
from feddrift.types import Ballot, Models, Net


@dataclass(frozen=True)
class Serving:
    """One or several models that vote."""

    tau: int  # the time step they were trained in last
    models: Models
    votes: tuple[float, ...]  # [m]
    ballot: Ballot
    net: Net
    classes: tuple[int | str, ...]

    def predict(self, x: npt.ArrayLike) -> npt.NDArray[Any]:
        """The class of each input x[n, ...]."""
        return np.asarray(np.array(self.classes)[self.scores(x).argmax(axis=1)])

    def scores(self, x: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """The votes [n, class]: shares of the classes, or probabilities where the models vote with these."""
        masks = [None] * len(self.votes) if self.models.mask is None else self.models.mask
        voters = ((vote, one(self.models, m), masks[m]) for m, vote in enumerate(self.votes))
        return poll(self.net, voters, self.ballot, np.asarray(x, dtype=np.float32)) / sum(self.votes)


def current(folder: str | Path, experiment: str | None = None) -> Serving:
    """The model that the client of this folder uses now; it must be told which experiment if there are several."""
    root = Path(folder)
    try:
        settings = tomllib.loads((root / "client.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {root / 'client.toml'}: {error}") from None
    found = sorted(path.name for path in (root / "store").glob("*") if path.is_dir())
    if experiment is None and len(found) > 1:
        raise ConfigError(f"{root} took part in several experiments, name one of: {', '.join(found)}")
    if not found and experiment is None:
        raise DataError(f"{root} has no model yet: no time step is done")
    store = Store(root / "store", experiment or found[0], settings["name"])
    serving = store.serving
    if serving is None:
        raise DataError(f"{root} has no model yet: no time step of {experiment or found[0]} is done")
    net = imported_net(settings.get("model"), root, tuple(serving["features"]), serving["n_classes"])
    models = model_parts.assembled(net, serving["models"], store.part)
    names = root / settings.get("data", "data") / "classes.txt"
    classes = listed(names) if names.exists() else range(serving["n_classes"])
    return Serving(serving["tau"], models, tuple(serving["votes"]), serving["ballot"], net, tuple(classes))
