"""Models of other frameworks, which train themselves: one client after the other, slow and honest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from feddrift import rng
from feddrift.data import Stream
from feddrift.engines.conditions.conditions import IDEAL, Conditions
from feddrift.engines.local import sampling
from feddrift.engines.local.engine import InProcess, InProcessWorker
from feddrift.engines.simulator.simulator import Simulator
from feddrift.engines.sparse_weights import Entries
from feddrift.engines.worker import Work
from feddrift.errors import ConfigError
from feddrift.models import params_of
from feddrift.nets import check_fits
from feddrift.nets.external import Arrays, OwnNet
from feddrift.types import Ints, Local, Models, Net, Updates


def simulated(stream: Stream, net: Net, local: Local, seed: int, conditions: Conditions = IDEAL) -> InProcess:
    """All clients in this process: vectorised with JAX, or one by one where the model is of another framework."""
    if isinstance(net, OwnNet):
        return Own(stream, net, local, seed, conditions)
    return Simulator(stream, net, local, seed, conditions)


class Own(InProcess):
    """Trains and scores with a model of your own; minibatches are drawn as everywhere."""

    def __init__(self, stream: Stream, net: OwnNet, local: Local, seed: int, conditions: Conditions = IDEAL) -> None:
        check_fits(net, stream.x.shape[1:], stream.n_classes)
        super().__init__(stream, net, local, seed, conditions)
        self.model = net.model

    def worker(self, tau: int) -> OwnWorker:
        return OwnWorker(self, tau)

    def logits(self, models: Models, rows: Ints, net: Net | None = None) -> Iterator[npt.NDArray[np.float32]]:
        if len(rows):
            x, n = self.stream.x[rows], len(models)
            scores = [np.asarray(self.model.logits(params_of(models, m), _seen(models, m, x))) for m in range(n)]
            yield np.stack(scores).astype(np.float32)


class OwnWorker(InProcessWorker):
    """The clients' work; the optimiser, what it remembers (for a round) and when it has enough are the model's own
    affair."""

    engine: Own

    def save(self) -> None:
        return None

    def load(self, saved: None) -> None:
        pass

    def updates(self, models: Models, work: Work, round: int, local: Local) -> Updates:
        if local.pull is not None:
            raise ConfigError("a model with init, logits and fit trains itself: a pull needs a Net or a PyTorch module")
        self.engine.lane_rounds += work.n_lanes
        trained = [
            self._fit(c, m, models, self._batches(c, m, models, work.data, round, local), local.lr)
            for c, m in zip(work.client.tolist(), work.model.tolist(), strict=True)
        ]
        return work.updates([np.stack(arrays) for arrays in zip(*trained, strict=True)])

    def _fit(self, c: int, m: int, models: Models, batches: Iterator[tuple[Any, Any]], lr: float) -> Arrays:
        before = [np.array(array) for array in params_of(models, m)]
        where = f"the model's fit at client {self.known.clients[c]}, tau={self.tau}"
        try:
            after = [np.asarray(array) for array in self.engine.model.fit(before, batches, lr)]
        except Exception as error:  # whatever the model's own code says
            raise ConfigError(f"{where}, failed: {type(error).__name__}: {error}") from error
        if [array.shape for array in after] != [array.shape for array in before]:
            raise ConfigError(f"{where}, must give arrays of the shapes that it was given")
        return after

    def _batches(
        self, c: int, m: int, models: Models, w: Entries, round: int, local: Local
    ) -> Iterator[tuple[Any, Any]]:
        """K minibatches of the data that w gives to this model."""
        weights, mine = np.zeros(w.shape[0]), (w.c == c) & (w.m == m)
        weights[w.t[mine]] = w.value[mine]
        lane = self.lane(c, models.ids[m : m + 1], weights[:, None], local)
        cumulative = sampling.chances(weights, lane.mass)
        key = rng.derive(self.engine.seed, "batch", self.tau, c, models.family[m])
        for step in range(local.steps):
            words = sampling.step_words(key, np.uint32(round), np.uint32(step))
            t, first = (int(drawn) for drawn in sampling.pick(words, cumulative, lane.counts, np))
            rows = lane.tables[t] if local.by_class else self.trained(t, c, models.ids[m], local)
            n = int(lane.counts[t])
            batch = rows[(first + np.arange(min(local.batch, n))) % n]
            yield _seen(models, m, self.engine.stream.x[batch]), self.engine.stream.y[batch]


def _seen(models: Models, m: int, x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """What model m sees of inputs."""
    return x if models.mask is None else x * models.mask[m].astype(np.float32)
