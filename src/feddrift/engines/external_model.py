"""Engine for models of other frameworks that train themselves: one client after the other, in plain loops."""

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
from feddrift.engines.worker import TrainingPlan
from feddrift.errors import ConfigError
from feddrift.models import get_params
from feddrift.nets import check_fits
from feddrift.nets.external import Arrays, ExternalNet
from feddrift.types import Ints, Local, Models, Net, Updates


def make_simulator(stream: Stream, net: Net, local: Local, seed: int, conditions: Conditions = IDEAL) -> InProcess:
    """Return an engine whose clients are in this process, the default engine.

    Nets train in a program that is vectorised with JAX; models of other frameworks train one after the other.

    Args:
        stream: The data of all clients.
        net: The model.
        local: The settings of local training.
        seed: The seed of all random draws.
        conditions: Participation, outages and attacks.
    """
    if isinstance(net, ExternalNet):
        return ExternalModelEngine(stream, net, local, seed, conditions)
    return Simulator(stream, net, local, seed, conditions)


class ExternalModelEngine(InProcess):
    """Engine that trains and scores with the model of another framework, on the same minibatches as other engines."""

    def __init__(
        self, stream: Stream, net: ExternalNet, local: Local, seed: int, conditions: Conditions = IDEAL
    ) -> None:
        check_fits(net, stream.x.shape[1:], stream.n_classes)
        super().__init__(stream, net, local, seed, conditions)
        self.model = net.model

    def worker(self, tau: int) -> ExternalModelWorker:
        return ExternalModelWorker(self, tau)

    def logits(self, models: Models, rows: Ints, net: Net | None = None) -> Iterator[npt.NDArray[np.float32]]:
        if len(rows):
            x = self.stream.x[rows]
            logits = [
                np.asarray(self.model.logits(get_params(models, m), _apply_mask(models, m, x)))
                for m in range(len(models))
            ]
            yield np.stack(logits).astype(np.float32)


class ExternalModelWorker(InProcessWorker):
    """Worker whose models train themselves: a model has its own optimiser, without a state between rounds."""

    engine: ExternalModelEngine

    def save(self) -> None:
        return None

    def load(self, saved: None) -> None:
        pass

    def updates(self, models: Models, plan: TrainingPlan, round: int, local: Local) -> Updates:
        if local.pull is not None:
            raise ConfigError("a model with init, logits and fit trains itself: a pull needs a Net or a PyTorch module")
        self.engine.lane_rounds += plan.n_lanes
        trained = [
            self._fit_model(c, m, models, self._draw_batches(c, m, models, plan.data, round, local), local.lr)
            for c, m in zip(plan.client.tolist(), plan.model.tolist(), strict=True)
        ]
        return plan.updates([np.stack(arrays) for arrays in zip(*trained, strict=True)])

    def _fit_model(self, c: int, m: int, models: Models, batches: Iterator[tuple[Any, Any]], lr: float) -> Arrays:
        before = [np.array(array) for array in get_params(models, m)]
        where = f"the model's fit at client {self.known.clients[c]}, tau={self.tau}"
        try:
            after = [np.asarray(array) for array in self.engine.model.fit(before, batches, lr)]
        except Exception as error:  # the model's code may raise any exception
            raise ConfigError(f"{where}, failed: {type(error).__name__}: {error}") from error
        if [array.shape for array in after] != [array.shape for array in before]:
            raise ConfigError(f"{where}, must give arrays of the shapes that it was given")
        return after

    def _draw_batches(
        self, c: int, m: int, models: Models, w: Entries, round: int, local: Local
    ) -> Iterator[tuple[Any, Any]]:
        """Yield K minibatches of the data that w gives to model m at client c."""
        weights = np.zeros(w.shape[0])
        selected = (w.c == c) & (w.m == m)
        weights[w.t[selected]] = w.value[selected]
        lane = self.build_lane(c, models.ids[m : m + 1], weights[:, None], local)
        cumulative = sampling.compute_cumulative_chances(weights, lane.mass)
        key = rng.derive_key(self.engine.seed, "batch", self.tau, c, models.family[m])
        for step in range(local.steps):
            words = sampling.derive_step_words(key, np.uint32(round), np.uint32(step))
            t, first = (int(drawn) for drawn in sampling.pick_cells(words, cumulative, lane.counts, np))
            rows = lane.tables[t] if local.by_class else self.select_training_rows(t, c, models.ids[m], local)
            n = int(lane.counts[t])
            batch = rows[(first + np.arange(min(local.batch, n))) % n]
            yield _apply_mask(models, m, self.engine.stream.x[batch]), self.engine.stream.y[batch]


def _apply_mask(models: Models, m: int, x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the inputs with the mask of model m applied."""
    return x if models.mask is None else x * models.mask[m].astype(np.float32)
