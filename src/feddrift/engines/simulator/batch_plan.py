"""Work as the arrays that training reads: who trains what, from which rows, with which chances, and for which share."""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt

from feddrift import rng
from feddrift.averaging import lane_sizes, shares
from feddrift.engines.local import sampling
from feddrift.engines.local.engine import InProcessWorker
from feddrift.engines.simulator.lanes import Lanes, joined, pad_rows
from feddrift.engines.simulator.moments import power_of_two
from feddrift.engines.worker import Work
from feddrift.types import Floats, Ints, Local, Models

Order = npt.NDArray[np.int32]  # rows of the stream


def arranged(
    worker: InProcessWorker, models: Models, work: Work, local: Local, size: int, order: Order
) -> tuple[Lanes, Order, Ints]:
    """The lanes as arrays of this size, the order of rows that their starts point to, and where each pair lies.

    `order` has all rows, shuffled within each cell at work unless clients train on bags.
    """
    w, stream, steps = work.data, worker.engine.stream, worker.engine.stream.n_steps
    _, first = np.unique(work.lane, return_index=True)
    n, client = len(first), work.client[first]
    by_lane = np.argsort(work.lane, kind="stable")
    slot = np.empty_like(by_lane)
    slot[by_lane] = np.arange(len(by_lane)) - np.searchsorted(work.lane[by_lane], work.lane[by_lane])
    heads = power_of_two(int(slot.max()) + 1)
    pairs = work.lane * heads + slot
    model = np.repeat(work.model[first][:, None], heads, axis=1)  # an empty slot repeats the first, never drawn
    model[work.lane, slot] = work.model
    wide = np.zeros((n, steps, heads))  # the full length of time, so that no step compiles anew
    of_pair = work.model * stream.n_clients + work.client  # in order
    pair = np.searchsorted(of_pair, w.m * stream.n_clients + w.c)
    wide[work.lane[pair], w.t, slot[pair]] = w.value
    counts = np.repeat(sampling.trained_rows(stream.counts[:-1, client].T, local.hold_out), heads, axis=1)
    starts: Ints = np.repeat(stream.starts[:-1, client].T, heads, axis=1)
    mass: Ints | Floats = counts
    if local.holds == "first":
        starts = starts + np.repeat(stream.counts[:-1, client].T, heads, axis=1) - counts
    if local.by_class:
        starts, counts, mass, order = _tables(worker, models, work, pair, pairs, size=(n, steps, heads), local=local)
    elif local.bags:
        starts, order = _bags(worker, client, np.asarray(models.ids)[model], wide)
    key = rng.derive(worker.engine.seed, "batch", worker.tau, client, np.asarray(models.family)[work.model[first]])
    trunk, behind = lane_sizes(models, work.model, work.lane, work.size)
    head_share = np.zeros(size * heads, dtype=np.float32)
    head_share[pairs] = shares(work.model, work.size)
    added = np.zeros(size * heads, dtype=np.int32)
    added[: len(pairs)] = pairs
    pad = partial(pad_rows, size=size)  # idle lanes repeat the first and are never averaged
    described = Lanes(
        trunk=pad(trunk.astype(np.int32)),
        model=pad(model.astype(np.int32)),
        key=(pad(key[0]), pad(key[1])),
        cumulative=pad(sampling.chances(wide.reshape(n, -1), mass)),
        counts=pad(counts.astype(np.int32)),
        starts=pad(starts.astype(np.int32)),
        trunk_share=pad(shares(trunk, behind).astype(np.float32)),
        head_share=head_share,
        pair=added,
        n_lanes=np.int32(n),
        n_pairs=np.int32(len(pairs)),
        pull=None if (pull := local.pull) is None else pad(np.array([pull.on(int(c)) for c in client], np.float32)),
    )
    return described, order, pairs


def _bags(worker: InProcessWorker, client: Ints, ids: Ints, w: Floats) -> tuple[Ints, Order]:
    """Where each lane's bootstrap of each cell begins, and all of them in one row."""
    starts: Ints = np.zeros(w.shape, dtype=np.int64)
    order: list[Ints] = []
    end = 0
    for lane, t, h in np.argwhere(w * worker.engine.stream.counts[:-1, client].T[:, :, None] > 0):
        order.append(worker.bag(int(t), int(client[lane]), int(ids[lane, h])))
        starts[lane, t, h] = end
        end += len(order[-1])
    return starts.reshape(len(client), -1), joined(order)


def _tables(
    worker: InProcessWorker, models: Models, work: Work, pair: Ints, places: Ints, size: tuple[int, int, int],
    local: Local,
) -> tuple[Ints, Ints, Floats, Order]:  # fmt: skip
    """Where each cell's table begins, its length and mass [lane, cell], and all of them in one row.

    `pair` [entry of w] says which pair each is of, `places` [pair] where that lies among lanes and heads.
    """
    w, (n, _, heads) = work.data, size
    starts, counts = np.zeros(size, dtype=np.int64), np.ones(size, dtype=np.int64)
    mass, order, end = np.zeros(size), list[Ints](), 0
    entries = np.lexsort((w.t, pair))
    of_pair = np.split(entries, np.searchsorted(pair[entries], np.arange(1, len(places))))
    for c, m, place, mine in zip(work.client, work.model, places, of_pair, strict=True):
        tables = worker.tables(int(c), models.ids[m], w.t[mine], w.value[mine], local)
        at = place // heads, w.t[mine], place % heads
        starts[at] = end + np.cumsum(tables.sizes) - tables.sizes
        counts[at], mass[at] = tables.sizes, tables.mass
        order.append(tables.rows)
        end += len(tables.rows)
    return starts.reshape(n, -1), counts.reshape(n, -1), mass.reshape(n, -1), joined(order)
