"""Bring your own model: any framework, as long as its parameters are a list of arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from feddrift import plugins, rng
from feddrift.data import Stream
from feddrift.engines import sampling
from feddrift.engines.entries import Entries
from feddrift.engines.in_process import InProcess, InProcessWorker
from feddrift.engines.worker import Work
from feddrift.errors import ConfigError
from feddrift.models import one
from feddrift.nets import built_in
from feddrift.nets.perceptron import usual
from feddrift.types import Ints, Local, Models, Net, Updates

Arrays = list[npt.NDArray[Any]]


class OwnModel(Protocol):
    """What a framework must do."""

    def init(self, seed: int) -> Arrays:
        """New parameters."""
        ...

    def logits(self, params: Arrays, x: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Scores [n, class]; the highest is the prediction, and their softmax the probabilities."""
        ...

    def fit(self, params: Arrays, batches: Iterable[tuple[Any, Any]], lr: float) -> Arrays:
        """The parameters after a step on each of these minibatches (x, y); what it is given must stay as it is."""
        ...


def net_of(model: OwnModel) -> Net:
    """The same as a Net, for a server: it has no trunk, and nothing in it needs to be JAX."""
    return Net(
        lambda key: [np.asarray(array) for array in model.init(int(key[0]) % 2**31)],
        lambda params, x: model.logits(params, x),
    )


def imported(name: str | None, folder: Path) -> Net | OwnModel | str | None:
    """What a settings file names as its model: a net that is built in stays a name."""
    return name if name is None or built_in(name, (1,), 2) is not None else plugins.load("model", name, folder)


def net_for(model: Net | OwnModel | str | None, features: tuple[int, ...], n_classes: int) -> Net:
    """A model as a net for such inputs; by default a perceptron with one hidden layer."""
    if model is None:
        return usual(features, n_classes)
    if isinstance(model, str):
        net = built_in(model, features, n_classes)
        if net is None:
            raise ConfigError(f"a model by name is linear or mlp: and the sizes of hidden layers, got '{model}'")
        return net
    return model if isinstance(model, Net) else net_of(model)


class Own(InProcess):
    """Trains and scores with a model of your own; minibatches are drawn as everywhere."""

    def __init__(self, stream: Stream, model: OwnModel, local: Local, seed: int) -> None:
        super().__init__(stream, net_of(model), local, seed)
        self.model = model

    def worker(self, tau: int) -> OwnWorker:
        return OwnWorker(self, tau)

    def logits(self, models: Models, rows: Ints) -> Iterator[npt.NDArray[np.float32]]:
        if len(rows):
            x = self.stream.x[rows]
            found = [np.asarray(self.model.logits(one(models, m), x)) for m in range(len(models))]
            yield np.stack(found).astype(np.float32)


class OwnWorker(InProcessWorker):
    """The clients' work; the optimiser's memory, if any, is the model's own affair and lasts for a round."""

    engine: Own

    def save(self) -> None:
        return None

    def load(self, saved: None) -> None:
        pass

    def updates(self, models: Models, work: Work, round: int, local: Local) -> Updates:
        trained = []
        for c, m in zip(work.client.tolist(), work.model.tolist(), strict=True):
            batches = self._batches(c, m, models, work.data, round, local)
            after = self.engine.model.fit([np.array(array) for array in one(models, m)], batches, local.lr)
            trained.append([np.asarray(array) for array in after])
        return work.updates([np.stack(arrays) for arrays in zip(*trained, strict=True)])

    def _batches(
        self, c: int, m: int, models: Models, w: Entries, round: int, local: Local
    ) -> Iterator[tuple[Any, Any]]:
        """K minibatches of the data that w gives to this model."""
        counts = sampling.trained_rows(self.known.counts[:, c], local.hold_out)
        given, here = np.zeros(len(counts)), (w.c == c) & (w.m == m)
        given[w.t[here]] = w.value[here]
        cumulative = sampling.chances(given, counts)
        key = rng.derive(self.engine.seed, "batch", self.tau, c, models.family[m])
        for step in range(local.steps):
            words = sampling.step_words(key, np.uint32(round), np.uint32(step))
            t, first = (int(drawn) for drawn in sampling.pick(words, cumulative, counts, np))
            rows = self.bag(t, c, models.ids[m]) if local.bags else self.shuffled(t, c)
            n = int(counts[t])
            batch = rows[(first + np.arange(min(local.batch, n))) % n]
            yield self.engine.stream.x[batch], self.engine.stream.y[batch]
