"""Executable specification of local training: Algorithm 1 in plain loops over clients, models and steps."""

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
from feddrift.engines.worker import TrainingPlan
from feddrift.models import get_params, substitute_models
from feddrift.nets import check_fits
from feddrift.nets.external import check_traceable
from feddrift.nets.losses import batch_loss, compute_logits
from feddrift.nets.perceptron import apply_deep, apply_linear, apply_perceptron, compute_gradient
from feddrift.nets.voting import log_softmax
from feddrift.trees import join_trunk_and_head, mark_trunk, split_trunk_and_head, tree_map
from feddrift.types import Floats, Ints, Local, Models, Net, Params, Updates


@lru_cache(maxsize=16)
def _make_gradient(net: Net) -> Any:
    """Return a function for the gradient of a minibatch's loss: perceptrons in NumPy, other nets compiled by JAX."""
    if net.apply in (apply_linear, apply_perceptron, apply_deep):
        return compute_gradient
    import jax  # here, since importing JAX takes a while

    def loss(params: Params, mask: Any, x: Any, y: Any, n: Any) -> Any:
        with jax.default_matmul_precision("float32"):
            return batch_loss(net, params, mask, x, y, n)

    return jax.jit(jax.grad(loss))


class Reference(InProcess):
    """Slow engine whose code is easy to read; the other engines must return the same results."""

    def __init__(self, stream: Stream, net: Net, local: Local, seed: int, conditions: Conditions = IDEAL) -> None:
        check_traceable(net)
        check_fits(net, stream.x.shape[1:], stream.n_classes)
        super().__init__(stream, net, local, seed, conditions)
        self.gradient = _make_gradient(net)

    def worker(self, tau: int) -> ReferenceWorker:
        return ReferenceWorker(self, tau)

    def logits(self, models: Models, rows: Ints, net: Net | None = None) -> Iterator[npt.NDArray[np.float32]]:
        import jax

        if not len(rows):
            return
        logits = []
        for m in range(len(models)):
            params = get_params(models, m)
            mask = None if models.mask is None else np.asarray(models.mask[m], dtype=np.float32)
            with jax.default_matmul_precision("float32"):
                logits.append(np.asarray(compute_logits(net or self.net, params, mask, self.stream.x[rows])))
        yield np.stack(logits)


class ReferenceWorker(InProcessWorker):
    """Worker that trains one client after the other."""

    engine: Reference

    def __init__(self, engine: Reference, tau: int) -> None:
        super().__init__(engine, tau)
        # Moments and number of steps, by client, kind ("trunk" or "head"), and id of the family or model. Entries of
        # the kind "look" contain the last loss on held-out rows instead.
        self.moments: dict[tuple[int, str, int], tuple[optim.OptimizerMoments, int]] = {}

    def save(self) -> Any:
        return self.moments

    def load(self, saved: Any) -> None:
        self.moments = dict(saved)

    def updates(self, models: Models, plan: TrainingPlan, round: int, local: Local) -> Updates:
        self.engine.lane_rounds += plan.n_lanes
        trunks: list[Any] = []  # [lane]
        heads: list[Any] = [None] * len(plan.client)  # [pair]
        for lane in range(plan.n_lanes):
            pairs = np.flatnonzero(plan.lane == lane)
            c = int(plan.client[pairs[0]])
            trunk, lane_heads = self.local_update(models, c, plan.model[pairs], plan.data, round, local)
            trunks.append(trunk)
            for pair, head in zip(pairs, lane_heads, strict=True):
                heads[pair] = head
        trunk_stacks = [np.stack(leaves) for leaves in zip(*trunks, strict=True)]
        head_stacks = [np.stack(leaves) for leaves in zip(*heads, strict=True)]
        in_trunk = mark_trunk(self.engine.net, models.params)
        return plan.updates(join_trunk_and_head(trunk_stacks, head_stacks, in_trunk))

    def local_update(
        self, models: Models, c: int, members: Ints, w: Entries, round: int, local: Local
    ) -> tuple[list[Any], list[list[Any]]]:
        """Run LocalUpdate of Algorithm 1 for the models of one family at one client.

        Each of the K steps draws data that w gives to one of the models, and trains the trunk and that model's head;
        the other heads and their moments do not change.

        Args:
            models: The models before the round.
            c: The client.
            members: The positions of the models.
            w: The entries of w to train on.
            round: The number of the round in this time step, from 0.
            local: The settings of local training.

        Returns:
            The arrays of the trained trunk, and those of the head of each member.
        """
        stream = self.engine.stream
        in_trunk = mark_trunk(self.engine.net, models.params)
        family = models.family[members[0]]
        ids = [models.ids[m] for m in members]
        parts = [split_trunk_and_head(tree_map(np.asarray, get_params(models, m)), in_trunk) for m in members]
        trunk = parts[0][0]
        heads = [head for _, head in parts]
        anchors = parts
        if local.pull is not None and local.pull.to is not None:
            targets = substitute_models(models, local.pull.to)
            anchors = [split_trunk_and_head(tree_map(np.asarray, get_params(targets, m)), in_trunk) for m in members]
        weights = np.zeros(w.shape[::2])
        weights[w.t[w.c == c], w.m[w.c == c]] = w.value[w.c == c]
        weights = weights[:, members]
        lane = self.build_lane(c, ids, weights, local)
        cumulative = sampling.compute_cumulative_chances(weights.reshape(-1), lane.mass)  # over pairs (t, head)
        key = rng.derive_key(self.engine.seed, "batch", self.tau, c, family)
        if local.patience:
            validation_rows, row_weights, interval = self.prepare_validation(c, weights, lane, local)
        for step in range(local.steps):
            words = sampling.derive_step_words(key, np.uint32(round), np.uint32(step))
            cell, first = sampling.pick_cells(words, cumulative, lane.counts, np)
            t, h = divmod(int(cell), len(members))
            n = int(lane.counts[cell])
            if int(cell) not in lane.tables:
                lane.tables[int(cell)] = self.select_training_rows(t, c, ids[h], local)
            batch = lane.tables[int(cell)][(first + np.arange(local.batch)) % n]
            mask = None if models.mask is None else np.asarray(models.mask[members[h]], dtype=np.float32)
            params = join_trunk_and_head(trunk, heads[h], in_trunk)
            grads = self.engine.gradient(params, mask, stream.x[batch], stream.y[batch], n)
            trunk_grads, head_grads = split_trunk_and_head(tree_map(np.asarray, grads), in_trunk)
            if local.pull is not None:
                weight = np.float32(local.pull.get_client_weight(c))
                trunk_grads = optim.add_pull(trunk_grads, trunk, anchors[h][0], weight)
                head_grads = optim.add_pull(head_grads, heads[h], anchors[h][1], weight)
            if local.trains != "head":
                trunk = self._update_part((c, "trunk", family), trunk, trunk_grads, local)
            if local.trains != "trunk":
                heads[h] = self._update_part((c, "head", ids[h]), heads[h], head_grads, local)
            if local.patience and (step + 1) % interval == 0:
                masks = None if models.mask is None else models.mask[members].astype(np.float32)
                lane_models = [join_trunk_and_head(trunk, head, in_trunk) for head in heads]
                loss = self._compute_validation_loss(validation_rows, row_weights, lane_models, masks)
                last_loss = self.moments.get((c, "look", family), ({"loss": np.float32(np.nan)}, 0))[0]["loss"]
                self.moments[c, "look", family] = {"loss": loss}, 0
                if sampling.should_stop_early(last_loss, loss, local.patience, (step + 1) // interval):
                    break
        return trunk, heads

    def _compute_validation_loss(self, rows: Ints, weight: Floats, lane_models: list[Params], masks: Any) -> Any:
        """Return the loss of models on rows with weights [model, row]; 0 without rows, as in the compiled program."""
        if not len(rows):
            return np.float32(0)
        import jax

        x = self.engine.stream.x[rows]
        y = self.engine.stream.y[rows]
        loss = np.float32(0)
        for h, params in enumerate(lane_models):
            with jax.default_matmul_precision("float32"):
                logits = np.asarray(compute_logits(self.engine.net, params, None if masks is None else masks[h], x))
            log_probability = np.take_along_axis(log_softmax(logits), y[:, None], axis=1)[:, 0]
            loss -= (log_probability * weight[h].astype(np.float32)).sum()
        return loss

    def _update_part(self, name: tuple[int, str, int], params: list[Any], grads: list[Any], local: Local) -> list[Any]:
        """Take one step of the optimiser for the trunk or the head of this name, and return its parameters."""
        moments, steps = self.moments.get(name) or (optim.init_moments(params), 0)
        params, moments = optim.apply_gradients(local, params, grads, moments, np.asarray(steps + 1, dtype=np.float32))
        self.moments[name] = moments, steps + 1
        return params
