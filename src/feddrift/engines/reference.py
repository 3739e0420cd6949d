"""The executable specification: Algorithm 1 in plain loops, one client, one model, one step at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from feddrift import optim, rng, sampling
from feddrift.engines.base import Engine, TimeStep
from feddrift.models import averaged, tree_map
from feddrift.nets import batch_loss, masked
from feddrift.types import Floats, Ints, Local, Models, Net, Params, Stream, Updates


class Reference(Engine):
    """Obvious and slow; what the simulator must agree with."""

    def __init__(self, stream: Stream, net: Net, local: Local, seed: int) -> None:
        super().__init__(stream, net, local, seed)

        def loss(params: Params, mask: Any, x: Any, y: Any, n: Any) -> Any:
            with jax.default_matmul_precision("float32"):
                return batch_loss(net, params, mask, x, y, n)

        self.gradient = jax.jit(jax.grad(loss))

    def at(self, tau: int) -> ReferenceStep:
        return ReferenceStep(self, tau)

    def logits(self, models: Models, rows: Ints) -> Iterator[npt.NDArray[np.float32]]:
        if not len(rows):
            return
        found = []
        for m in range(len(models)):
            params = tree_map(lambda leaf: leaf[m], models.params)  # noqa: B023
            mask = None if models.mask is None else models.mask[m]
            with jax.default_matmul_precision("float32"):
                found.append(np.asarray(masked(self.net, params, mask, self.stream.x[rows])))
        yield np.stack(found)


class ReferenceStep(TimeStep):
    """One time step of the reference engine."""

    def __init__(self, engine: Reference, tau: int) -> None:
        super().__init__(engine, tau)
        self.engine = engine
        self.moments: dict[tuple[int, int], tuple[optim.Moments, int]] = {}  # by (client, model id), with steps taken

    def _train(self, models: Models, lanes: Updates, w: Floats, rounds: int, local: Local) -> Models:
        for i in range(rounds):
            models = averaged(models, self._round(models, lanes, w, self.round + i, local))
        return models

    def _local_updates(self, models: Models, lanes: Updates, w: Floats, local: Local) -> Updates:
        return self._round(models, lanes, w, self.round, local)

    def _round(self, models: Models, lanes: Updates, w: Floats, round: int, local: Local) -> Updates:
        done = []
        for c, m in zip(lanes.client, lanes.model, strict=True):
            params = tree_map(lambda leaf: np.asarray(leaf[m]), models.params)  # noqa: B023
            mask = None if models.mask is None else np.asarray(models.mask[m], dtype=np.float32)
            done.append(self._local_update(int(c), models.ids[m], params, mask, w[:, c, m], round, local))
        return replace(lanes, params=tree_map(lambda *leaves: np.stack(leaves), *done))

    def _local_update(
        self, c: int, model_id: int, params: Params, mask: Any, w: Floats, round: int, local: Local
    ) -> Params:
        """LocalUpdate of Algorithm 1: K steps on minibatches of the data that w gives to this model."""
        stream = self.engine.stream
        cumulative = sampling.chances(w, self.counts[:, c])
        key = rng.derive(self.engine.seed, "batch", self.tau, c, model_id)
        moments, taken = self.moments.get((c, model_id)) or (optim.start(params), 0)
        for step in range(local.steps):
            words = sampling.step_words(key, np.uint32(round), np.uint32(step))
            t, first = sampling.pick(words, cumulative, self.counts[:, c], np)
            n = int(self.counts[t, c])
            rows = self._bag(int(t), c, model_id) if local.bags else self._shuffled(int(t), c)
            batch = rows[(first + np.arange(local.batch)) % n]
            grads = self.engine.gradient(params, mask, stream.x[batch], stream.y[batch], n)
            grads = tree_map(np.asarray, grads)
            taken += 1
            params, moments = optim.update(local, params, grads, moments, np.asarray(taken, dtype=np.float32))
        self.moments[c, model_id] = moments, taken
        return params
