"""The default engine: all active (client, model) lanes at once, rounds and local steps inside one compiled program.

Lanes and models are padded to buckets that depend on their number alone, so a changing number of models seldom
compiles anew and a resumed run repeats the bits of an unbroken one. The number of rounds is an argument of the
program, not a part of it: R calls of one round run the very code of one call of R rounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from feddrift import optim, rng, sampling
from feddrift.engines.base import Engine, TimeStep
from feddrift.models import averaging, tree_map
from feddrift.nets import batch_loss, masked
from feddrift.types import Floats, Ints, Local, Models, Net, Params, Stream, Updates

SCORE_BLOCK = 1024  # rows scored by one call of the compiled program


def lane_bucket(n: int) -> int:
    """The padded number of lanes: the next of 1, 2, 3, 4, 6, 8, 12, 16, 24, ...

    >>> [lane_bucket(n) for n in (1, 5, 10, 13, 17, 25)]
    [1, 6, 12, 16, 24, 32]
    """
    power = 1 << (n - 1).bit_length()
    return power * 3 // 4 if power >= 4 and n <= power * 3 // 4 else power


def model_bucket(n: int) -> int:
    """The padded number of models: 8, 16, 32, ...; coarse, since a model without lanes costs next to nothing."""
    return max(8, 1 << (n - 1).bit_length())


class Simulator(Engine):
    """Vectorised over lanes with JAX, on the CPU or a GPU."""

    def __init__(self, stream: Stream, net: Net, local: Local, seed: int) -> None:
        super().__init__(stream, net, local, seed)
        self.x, self.y = jnp.asarray(stream.x), jnp.asarray(stream.y)

    def at(self, tau: int) -> SimulatorStep:
        return SimulatorStep(self, tau)

    def logits(self, models: Models, rows: Ints) -> Iterator[npt.NDArray[np.float32]]:
        padded = _padded(models)
        ahead = None  # the device works on a block while the host takes in the one before
        for start in range(0, len(rows), SCORE_BLOCK):
            block = np.zeros(SCORE_BLOCK, dtype=np.int32)
            part = rows[start : start + SCORE_BLOCK]
            block[: len(part)] = part
            now = len(part), _logits(self.net, *padded, self.x, block)
            if ahead is not None:
                yield np.asarray(ahead[1])[: len(models), : ahead[0]]
            ahead = now
        if ahead is not None:
            yield np.asarray(ahead[1])[: len(models), : ahead[0]]


@dataclass(frozen=True)
class _Lanes:
    """The arrays that describe padded lanes to the compiled program."""

    model: Any  # [lane]
    key: rng.Words  # [lane] each
    cumulative: Any  # [lane, t]
    counts: Any  # [lane, t]
    starts: Any  # [lane, t], first row of the cell in `order`
    share: Any  # [lane], of its model's average
    n: Any  # how many lanes are real


jax.tree_util.register_dataclass(
    _Lanes, data_fields=["model", "key", "cumulative", "counts", "starts", "share", "n"], meta_fields=[]
)


class SimulatorStep(TimeStep):
    """One time step of the simulator."""

    def __init__(self, engine: Simulator, tau: int) -> None:
        super().__init__(engine, tau)
        self.engine = engine
        order = np.arange(len(engine.stream.y), dtype=np.int32)
        for t, c in np.argwhere(self.counts > 0):
            order[engine.stream.rows(t, c)] = self._shuffled(t, c)
        self.order = jnp.asarray(order)
        # Moments of every lane trained in this time step, as one stack, and where each lane lies in it.
        self.held: dict[tuple[int, int], int] = {}
        self.moments: tuple[optim.Moments, Any] | None = None

    def _train(self, models: Models, lanes: Updates, w: Floats, rounds: int, local: Local) -> Models:
        params, _ = self._run(models, lanes, w, rounds, local)
        return replace(models, params=_fetch(params, len(models)))

    def _local_updates(self, models: Models, lanes: Updates, w: Floats, local: Local) -> Updates:
        _, updates = self._run(models, lanes, w, 1, local)
        return replace(lanes, params=_fetch(updates, len(lanes.client)))

    def _run(self, models: Models, lanes: Updates, w: Floats, rounds: int, local: Local) -> tuple[Params, Params]:
        """The models after these rounds, and the lanes as they were before the last average."""
        described, order = self._describe(models, lanes, w, local)
        moments, taken = self._recall(models, lanes, len(described.model))
        params, updates, moments, taken = _rounds(
            self.engine.net, local, *_padded(models), moments, taken, described,
            self.engine.x, self.engine.y, order, np.uint32(self.round), np.uint32(self.round + rounds),
        )  # fmt: skip
        self._keep(models, lanes, moments, taken)
        return params, updates

    def _describe(self, models: Models, lanes: Updates, w: Floats, local: Local) -> tuple[_Lanes, Any]:
        """The lanes as padded arrays, and the order of rows that their starts point into."""
        stream, n = self.engine.stream, len(lanes.client)
        size = lane_bucket(n)
        wide = np.zeros((n, stream.n_steps))  # the full length of time, so that no step compiles anew
        wide[:, : self.tau + 1] = w[:, lanes.client, lanes.model].T
        counts = stream.counts[:-1, lanes.client].T
        ids = np.asarray(models.ids)[lanes.model]
        key = rng.derive(self.engine.seed, "batch", self.tau, lanes.client, ids)
        starts: Ints = stream.starts[:-1, lanes.client].T
        order: Any = self.order
        if local.bags:
            starts, order = self._bags(lanes, ids, wide)
        pad = partial(_pad_rows, size=size)  # idle lanes repeat the first and are never averaged
        described = _Lanes(
            model=pad(lanes.model.astype(np.int32)),
            key=(pad(key[0]), pad(key[1])),
            cumulative=pad(sampling.chances(wide, counts)),
            counts=pad(counts.astype(np.int32)),
            starts=pad(starts.astype(np.int32)),
            share=pad(averaging(lanes, len(models)).sum(axis=0).astype(np.float32)),
            n=np.int32(n),
        )
        return described, order

    def _bags(self, lanes: Updates, ids: Ints, w: Floats) -> tuple[Ints, npt.NDArray[np.int32]]:
        """Where each lane's bootstrap of each cell begins, and all of them in one row."""
        starts: Ints = np.zeros(w.shape, dtype=np.int64)
        order: list[Ints] = []
        end = 0
        for lane, t in np.argwhere((w > 0) & (self.engine.stream.counts[:-1, lanes.client].T > 0)):
            order.append(self._bag(int(t), int(lanes.client[lane]), int(ids[lane])))
            starts[lane, t] = end
            end += len(order[-1])
        room = np.zeros(1 << (end - 1).bit_length(), dtype=np.int32)  # seldom a new shape
        room[:end] = np.concatenate(order)
        return starts, room

    def _recall(self, models: Models, lanes: Updates, size: int) -> tuple[optim.Moments, Any]:
        """The moments of these lanes, zero for those that train for the first time in this time step."""
        if self.moments is None:

            def lane(leaf: Any) -> Any:
                return np.zeros((size, *leaf.shape[1:]), dtype=leaf.dtype)

            return optim.start(tree_map(lane, models.params)), np.zeros(size, dtype=np.float32)
        names = self._names(models, lanes)
        moments, taken = self.moments
        if list(self.held) == names and len(taken) == size:
            return moments, taken
        known = np.array([self.held.get(name, -1) for name in names] + [-1] * (size - len(names)))

        def gather(leaf: Any) -> Any:  # on the host: lanes come and go in many shapes
            rows = np.asarray(leaf)[np.maximum(known, 0)]
            rows[known < 0] = 0
            return rows

        return tree_map(gather, moments), gather(taken)

    def _keep(self, models: Models, lanes: Updates, moments: optim.Moments, taken: Any) -> None:
        names = self._names(models, lanes)
        if self.moments is not None and set(self.held) - set(names):  # lanes that rest in this call keep theirs
            rest = [name for name in self.held if name not in set(names)]
            at = np.array([self.held[name] for name in rest])
            n = len(names)

            def joined(new: Any, old: Any) -> Any:
                return np.concatenate([np.asarray(new)[:n], np.asarray(old)[at]])

            moments, taken = tree_map(joined, moments, self.moments[0]), joined(taken, self.moments[1])
            names = names + rest
        self.held = {name: i for i, name in enumerate(names)}
        self.moments = moments, taken

    @staticmethod
    def _names(models: Models, lanes: Updates) -> list[tuple[int, int]]:
        return [(int(c), models.ids[m]) for c, m in zip(lanes.client, lanes.model, strict=True)]


def _pad_rows(rows: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    return np.concatenate([rows, np.repeat(rows[:1], size - len(rows), axis=0)])


def _padded(models: Models) -> tuple[Params, Any]:
    """Parameters and masks with copies of the first model behind them."""
    size = model_bucket(len(models))
    mask = None if models.mask is None else _pad_rows(models.mask.astype(np.float32), size)
    return tree_map(lambda leaf: _pad_rows(leaf, size), models.params), mask


def _fetch(params: Params, n: int) -> Params:
    """The first n of a padded stack, on the host: surgery there costs no compilation."""
    return tree_map(lambda leaf: np.asarray(leaf)[:n], params)


@partial(jax.jit, static_argnums=0)
def _logits(net: Net, params: Params, mask: Any, x: Any, rows: Any) -> Any:
    with jax.default_matmul_precision("float32"):
        return jax.vmap(partial(masked, net), in_axes=(0, None if mask is None else 0, None))(params, mask, x[rows])


def _local_round(
    net: Net, local: Local, params: Params, mask: Any, moments: optim.Moments, taken: Any, lanes: _Lanes,
    x: Any, y: Any, order: Any, round: Any,
) -> tuple[Params, optim.Moments, Any]:  # fmt: skip
    """K local steps of every lane, from its model's parameters."""
    start: Params = tree_map(lambda leaf: leaf[lanes.model], params)
    steps = jnp.arange(local.steps, dtype=jnp.uint32)
    words = sampling.step_words((lanes.key[0][:, None], lanes.key[1][:, None]), round, steps[None])  # [lane, step]
    t, first = sampling.pick(words, lanes.cumulative[:, None], lanes.counts[:, None], jnp)
    n = jnp.take_along_axis(lanes.counts, t, axis=1)
    at = (first[..., None] + jnp.arange(local.batch)) % n[..., None]
    rows = order[jnp.take_along_axis(lanes.starts, t, axis=1)[..., None] + at]  # [lane, step, B]
    sees = None if mask is None else mask[lanes.model]
    gradient = jax.grad(partial(batch_loss, net))

    def local_update(
        begin: Params, sees: Any, begin_moments: optim.Moments, begin_taken: Any, lane_rows: Any, sizes: Any
    ) -> Any:
        def step(carry: Any, drawn: Any) -> Any:
            now, lane_moments, done = carry
            batch, size = drawn
            grads = gradient(now, sees, x[batch], y[batch], size)
            done = done + 1
            return (*optim.update(local, now, grads, lane_moments, done), done), None

        return jax.lax.scan(step, (begin, begin_moments, begin_taken), (lane_rows, sizes))[0]

    with jax.default_matmul_precision("float32"):
        over_lanes = jax.vmap(local_update, in_axes=(0, None if mask is None else 0, 0, 0, 0, 0))
        result: tuple[Params, optim.Moments, Any] = over_lanes(start, sees, moments, taken, rows, n)
    return result


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=(4, 5))
def _rounds(
    net: Net, local: Local, params: Params, mask: Any, moments: optim.Moments, taken: Any, lanes: _Lanes,
    x: Any, y: Any, order: Any, first: Any, last: Any,
) -> tuple[Params, Params, optim.Moments, Any]:  # fmt: skip
    """Algorithm 1 for the rounds first..last-1: the models, the lanes before the last average, their moments."""

    def one(round: Any, carry: Any) -> Any:
        models, _, lane_moments, done = carry
        updates, lane_moments, done = _local_round(
            net, local, models, mask, lane_moments, done, lanes, x, y, order, round
        )
        return _averaged(models, updates, lanes), updates, lane_moments, done

    begin = params, tree_map(lambda leaf: leaf[lanes.model], params), moments, taken
    result: tuple[Params, Params, optim.Moments, Any] = jax.lax.fori_loop(first, last, one, begin)
    return result


def _averaged(models: Params, updates: Params, lanes: _Lanes) -> Params:
    """`models.averaged`, to the same bits: products first, then sums lane by lane, which no compiler fuses."""
    has_lanes = jnp.zeros(len(jax.tree.leaves(models)[0]), dtype=bool).at[lanes.model].set(True)

    def per_row(values: Any, like: Any) -> Any:
        return values.reshape(-1, *[1] * (like.ndim - 1))

    parts = tree_map(lambda u: per_row(lanes.share, u) * u, updates)
    begin = tree_map(lambda old: jnp.where(per_row(has_lanes, old), 0, old), models)

    def add(lane: Any, sums: Params) -> Params:
        return tree_map(lambda s, p: s.at[lanes.model[lane]].add(p[lane], mode="promise_in_bounds"), sums, parts)

    return jax.lax.fori_loop(0, lanes.n, add, begin)
