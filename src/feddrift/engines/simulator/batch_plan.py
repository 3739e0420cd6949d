"""Conversion of a training plan to padded arrays: lanes, their rows and probabilities, and their shares in averages."""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt

from feddrift import rng
from feddrift.averaging import compute_shares, sum_lane_sizes
from feddrift.engines.local import sampling
from feddrift.engines.local.engine import InProcessWorker
from feddrift.engines.simulator.lanes import Lanes, concatenate_orders, pad_rows
from feddrift.engines.simulator.moments import next_power_of_two
from feddrift.engines.worker import TrainingPlan
from feddrift.types import Floats, Ints, Local, Models

RowOrder = npt.NDArray[np.int32]  # positions of rows in the stream


def build_lanes(
    worker: InProcessWorker, models: Models, plan: TrainingPlan, local: Local, size: int, order: RowOrder
) -> tuple[Lanes, RowOrder, Ints]:
    """Convert a training plan to padded arrays.

    Args:
        worker: The worker that has the data.
        models: The models.
        plan: The pairs of clients and models, and their data.
        local: The settings of local training.
        size: The padded number of lanes.
        order: All rows, with the cells of the plan shuffled; not used if clients train on bootstraps or tables.

    Returns:
        The lanes, the order of rows that `Lanes.starts` refers to, and [pair] the position of each pair among the flat
        heads [lane * head].
    """
    w = plan.data
    stream = worker.engine.stream
    _, first_pair = np.unique(plan.lane, return_index=True)  # of each lane
    n_lanes = len(first_pair)
    client = plan.client[first_pair]
    by_lane = np.argsort(plan.lane, kind="stable")
    slot = np.empty_like(by_lane)  # [pair], the position of its head in the lane
    slot[by_lane] = np.arange(len(by_lane)) - np.searchsorted(plan.lane[by_lane], plan.lane[by_lane])
    n_heads = next_power_of_two(int(slot.max()) + 1)
    pairs = plan.lane * n_heads + slot
    # Empty slots repeat the first model and are never drawn.
    model = np.repeat(plan.model[first_pair][:, None], n_heads, axis=1)
    model[plan.lane, slot] = plan.model
    weights = np.zeros((n_lanes, stream.n_steps, n_heads))  # all time steps, so that the shape does not change
    pair_codes = plan.model * stream.n_clients + plan.client  # ascending
    pair_of_entry = np.searchsorted(pair_codes, w.m * stream.n_clients + w.c)
    weights[plan.lane[pair_of_entry], w.t, slot[pair_of_entry]] = w.value
    counts = np.repeat(sampling.count_training_rows(stream.counts[:-1, client].T, local.hold_out), n_heads, axis=1)
    starts: Ints = np.repeat(stream.starts[:-1, client].T, n_heads, axis=1)
    mass: Ints | Floats = counts
    if local.holds == "first":
        starts = starts + np.repeat(stream.counts[:-1, client].T, n_heads, axis=1) - counts
    if local.by_class:
        starts, counts, mass, order = _build_tables(
            worker, models, plan, pair_of_entry, pairs, shape=weights.shape, local=local
        )
    elif local.bags:
        starts, order = _draw_bootstraps(worker, client, np.asarray(models.ids)[model], weights)
    family = np.asarray(models.family)[plan.model[first_pair]]
    key = rng.derive_key(worker.engine.seed, "batch", worker.tau, client, family)
    trunk, trunk_size = sum_lane_sizes(models, plan.model, plan.lane, plan.size)
    head_share = np.zeros(size * n_heads, dtype=np.float32)
    head_share[pairs] = compute_shares(plan.model, plan.size)
    padded_pairs = np.zeros(size * n_heads, dtype=np.int32)
    padded_pairs[: len(pairs)] = pairs
    pad = partial(pad_rows, size=size)  # padding repeats the first lane and is never averaged
    pull = local.pull
    lanes = Lanes(
        trunk=pad(trunk.astype(np.int32)),
        model=pad(model.astype(np.int32)),
        key=(pad(key[0]), pad(key[1])),
        cumulative=pad(sampling.compute_cumulative_chances(weights.reshape(n_lanes, -1), mass)),
        counts=pad(counts.astype(np.int32)),
        starts=pad(starts.astype(np.int32)),
        trunk_share=pad(compute_shares(trunk, trunk_size).astype(np.float32)),
        head_share=head_share,
        pair=padded_pairs,
        n_lanes=np.int32(n_lanes),
        n_pairs=np.int32(len(pairs)),
        pull=None if pull is None else pad(np.array([pull.get_client_weight(int(c)) for c in client], np.float32)),
    )
    return lanes, order, pairs


def _draw_bootstraps(worker: InProcessWorker, client: Ints, ids: Ints, w: Floats) -> tuple[Ints, RowOrder]:
    """Draw a bootstrap of each cell of each lane.

    Args:
        worker: The worker that has the data.
        client: [lane], the client of each lane.
        ids: [lane, head], the id of each model.
        w: [lane, t, head], the weights of the cells.

    Returns:
        [lane, cell], the position at which each bootstrap begins, and all bootstraps in one array.
    """
    starts: Ints = np.zeros(w.shape, dtype=np.int64)
    order: list[Ints] = []
    end = 0
    for lane, t, h in np.argwhere(w * worker.engine.stream.counts[:-1, client].T[:, :, None] > 0):
        order.append(worker.bootstrap_cell(int(t), int(client[lane]), int(ids[lane, h])))
        starts[lane, t, h] = end
        end += len(order[-1])
    return starts.reshape(len(client), -1), concatenate_orders(order)


def _build_tables(
    worker: InProcessWorker, models: Models, plan: TrainingPlan, pair_of_entry: Ints, pairs: Ints,
    shape: tuple[int, ...], local: Local,
) -> tuple[Ints, Ints, Floats, RowOrder]:  # fmt: skip
    """Build a table for each cell of each lane: see `sampling.SamplingTables`.

    Args:
        worker: The worker that has the data.
        models: The models.
        plan: The pairs of clients and models, and their data.
        pair_of_entry: The pair of each entry of `plan.data`.
        pairs: [pair], the position of each pair among the flat heads.
        shape: The number of lanes, of times, and of heads in each lane.
        local: The settings of local training.

    Returns:
        [lane, cell], the position at which each table begins, its length, and its mass; and all tables in one array.
    """
    w = plan.data
    n_lanes, _, n_heads = shape
    starts = np.zeros(shape, dtype=np.int64)
    counts = np.ones(shape, dtype=np.int64)
    mass = np.zeros(shape)
    order: list[Ints] = []
    end = 0
    by_pair = np.lexsort((w.t, pair_of_entry))
    entries_of_pair = np.split(by_pair, np.searchsorted(pair_of_entry[by_pair], np.arange(1, len(pairs))))
    for c, m, pair, entries in zip(plan.client, plan.model, pairs, entries_of_pair, strict=True):
        tables = worker.build_tables(int(c), models.ids[m], w.t[entries], w.value[entries], local)
        cells = pair // n_heads, w.t[entries], pair % n_heads
        starts[cells] = end + np.cumsum(tables.sizes) - tables.sizes
        counts[cells] = tables.sizes
        mass[cells] = tables.mass
        order.append(tables.rows)
        end += len(tables.rows)
    return (
        starts.reshape(n_lanes, -1),
        counts.reshape(n_lanes, -1),
        mass.reshape(n_lanes, -1),
        concatenate_orders(order),
    )
