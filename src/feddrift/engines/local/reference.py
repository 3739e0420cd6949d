"""The executable specification: Algorithm 1 in plain loops, one client, one model, one step at a time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from feddrift import rng
from feddrift.data import Stream
from feddrift.engines.conditions.conditions import IDEAL, Conditions
from feddrift.engines.local import optim, sampling
from feddrift.engines.local.engine import InProcess, InProcessWorker
from feddrift.engines.sparse_weights import Entries
from feddrift.engines.worker import Work
from feddrift.models import in_place_of, params_of
from feddrift.nets import check_fits
from feddrift.nets.external import check_traceable
from feddrift.nets.losses import batch_loss, masked
from feddrift.nets.perceptron import compute_gradient, deep, linear, perceptron
from feddrift.nets.voting import log_probabilities
from feddrift.trees import split, tree_map, trunk_of, unsplit
from feddrift.types import Floats, Ints, Local, Models, Net, Params, Updates


@lru_cache(maxsize=16)
def _gradient(net: Net) -> Any:
    """Return a function for the gradient of a minibatch's loss: perceptrons in NumPy, other nets compiled by JAX."""
    if net.apply in (linear, perceptron, deep):
        return compute_gradient
    import jax  # here, since it takes a while

    def loss(params: Params, mask: Any, x: Any, y: Any, n: Any) -> Any:
        with jax.default_matmul_precision("float32"):
            return batch_loss(net, params, mask, x, y, n)

    return jax.jit(jax.grad(loss))


class Reference(InProcess):
    """Obvious and slow; what the simulator must agree with."""

    def __init__(self, stream: Stream, net: Net, local: Local, seed: int, conditions: Conditions = IDEAL) -> None:
        check_traceable(net)
        check_fits(net, stream.x.shape[1:], stream.n_classes)
        super().__init__(stream, net, local, seed, conditions)
        self.gradient = _gradient(net)

    def worker(self, tau: int) -> ReferenceWorker:
        return ReferenceWorker(self, tau)

    def logits(self, models: Models, rows: Ints, net: Net | None = None) -> Iterator[npt.NDArray[np.float32]]:
        import jax

        if not len(rows):
            return
        logits = []
        for m in range(len(models)):
            params = params_of(models, m)
            mask = None if models.mask is None else np.asarray(models.mask[m], dtype=np.float32)
            with jax.default_matmul_precision("float32"):
                logits.append(np.asarray(masked(net or self.net, params, mask, self.stream.x[rows])))
        yield np.stack(logits)


class ReferenceWorker(InProcessWorker):
    """Clients one after the other, in plain loops."""

    engine: Reference

    def __init__(self, engine: Reference, tau: int) -> None:
        super().__init__(engine, tau)
        # Moments and steps taken, by client, trunk or head, and the id of the family or model; also the last look.
        self.moments: dict[tuple[int, str, int], tuple[optim.Moments, int]] = {}

    def save(self) -> Any:
        return self.moments

    def load(self, saved: Any) -> None:
        self.moments = dict(saved)

    def updates(self, models: Models, work: Work, round: int, local: Local) -> Updates:
        self.engine.lane_rounds += work.n_lanes
        trunks: list[Any] = []  # [lane]
        heads: list[Any] = [None] * len(work.client)  # [pair]
        for lane in range(work.n_lanes):
            pairs = np.flatnonzero(work.lane == lane)
            c = int(work.client[pairs[0]])
            trunk, trained = self.local_update(models, c, work.model[pairs], work.data, round, local)
            trunks.append(trunk)
            for pair, head in zip(pairs, trained, strict=True):
                heads[pair] = head
        trunk, head = ([np.stack(part) for part in zip(*parts, strict=True)] for parts in (trunks, heads))
        return work.updates(unsplit(trunk, head, trunk_of(self.engine.net, models.params)))

    def local_update(
        self, models: Models, c: int, members: Ints, w: Entries, round: int, local: Local
    ) -> tuple[list[Any], list[list[Any]]]:
        """LocalUpdate of Algorithm 1 for the models of one family: K steps, each on data that w gives to one of them.

        A step trains the trunk and that model's head; every other head and its moments rest.
        """
        stream, shape = self.engine.stream, trunk_of(self.engine.net, models.params)
        family, ids = models.family[members[0]], [models.ids[m] for m in members]
        parts = [split(tree_map(np.asarray, params_of(models, m)), shape) for m in members]
        trunk, heads = parts[0][0], [head for _, head in parts]
        to = parts
        if local.pull is not None and local.pull.to is not None:
            others = in_place_of(models, local.pull.to)
            to = [split(tree_map(np.asarray, params_of(others, m)), shape) for m in members]
        weights = np.zeros(w.shape[::2])
        weights[w.t[w.c == c], w.m[w.c == c]] = w.value[w.c == c]
        lane = self.lane(c, ids, weights[:, members], local)
        cumulative = sampling.chances(weights[:, members].reshape(-1), lane.mass)  # over pairs (t, head)
        key = rng.derive(self.engine.seed, "batch", self.tau, c, family)
        if local.patience:
            held, held_weight, every = self.looks(c, weights[:, members], lane, local)
        for step in range(local.steps):
            words = sampling.step_words(key, np.uint32(round), np.uint32(step))
            cell, first = sampling.pick(words, cumulative, lane.counts, np)
            t, h = divmod(int(cell), len(members))
            n = int(lane.counts[cell])
            if int(cell) not in lane.tables:
                lane.tables[int(cell)] = self.trained(t, c, ids[h], local)
            batch = lane.tables[int(cell)][(first + np.arange(local.batch)) % n]
            mask = None if models.mask is None else np.asarray(models.mask[members[h]], dtype=np.float32)
            params = unsplit(trunk, heads[h], shape)
            grads = self.engine.gradient(params, mask, stream.x[batch], stream.y[batch], n)
            of_trunk, of_head = split(tree_map(np.asarray, grads), shape)
            if local.pull is not None:
                weight = np.float32(local.pull.on(c))
                of_trunk = optim.pulled(of_trunk, trunk, to[h][0], weight)
                of_head = optim.pulled(of_head, heads[h], to[h][1], weight)
            if local.trains != "head":
                trunk = self._updated((c, "trunk", family), trunk, of_trunk, local)
            if local.trains != "trunk":
                heads[h] = self._updated((c, "head", ids[h]), heads[h], of_head, local)
            if local.patience and (step + 1) % every == 0:
                masks = None if models.mask is None else models.mask[members].astype(np.float32)
                loss = self._looked(held, held_weight, [unsplit(trunk, head, shape) for head in heads], masks)
                before = self.moments.get((c, "look", family), ({"loss": np.float32(np.nan)}, 0))[0]["loss"]
                self.moments[c, "look", family] = {"loss": loss}, 0
                if sampling.enough(before, loss, local.patience, (step + 1) // every):
                    break
        return trunk, heads

    def _looked(self, rows: Ints, weight: Floats, heads: list[Params], masks: Any) -> Any:
        """The loss on held-out rows, by their weights [head, row]; of none 0, as the compiled program has it."""
        if not len(rows):
            return np.float32(0)
        import jax

        x, y, net = self.engine.stream.x[rows], self.engine.stream.y[rows], self.engine.net
        loss = np.float32(0)
        for h, params in enumerate(heads):
            with jax.default_matmul_precision("float32"):
                logits = np.asarray(masked(net, params, None if masks is None else masks[h], x))
            true = np.take_along_axis(log_probabilities(logits), y[:, None], axis=1)[:, 0]
            loss -= (true * weight[h].astype(np.float32)).sum()
        return loss

    def _updated(self, name: tuple[int, str, int], params: list[Any], grads: list[Any], local: Local) -> list[Any]:
        moments, steps = self.moments.get(name) or (optim.start(params), 0)
        params, moments = optim.update(local, params, grads, moments, np.asarray(steps + 1, dtype=np.float32))
        self.moments[name] = moments, steps + 1
        return params
