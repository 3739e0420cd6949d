"""Simulator, the default engine: all lanes train at once, in one compiled `program` for rounds and local steps.

On a CPU, `native.kernel` trains small perceptrons instead, with the same arguments and results.

A lane is a client that trains the models of one family: a trunk and one or several heads. Each local step trains the
trunk and one of the heads.

Lanes and models are padded to sizes that depend on their number alone. A changing number of models therefore seldom
needs another compilation, and a resumed run repeats the bits of an uninterrupted one. The numbers of rounds and of
tiles with lanes, and the step size, are arguments of the program: R calls of one round run the same code as one call of
R rounds. Trained parameters stay on the device until they are read (`_internal.device_arrays`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from feddrift import rng
from feddrift.data import Stream
from feddrift.engines.conditions.conditions import IDEAL, Conditions
from feddrift.engines.local.engine import InProcess, InProcessWorker
from feddrift.engines.simulator.batch_plan import RowOrder, build_lanes
from feddrift.engines.simulator.lanes import (
    Devices,
    Lanes,
    pad_lane_count,
    pad_model_count,
    pad_models,
    runs_on_cpu,
)
from feddrift.engines.simulator.moments import OptimizerStateStore, PartName, name_parts
from feddrift.engines.simulator.validation_plan import ValidationPlan, build_validation_plan
from feddrift.engines.sparse_weights import Entries
from feddrift.engines.worker import TrainingPlan, concatenate_updates, run_rounds_sequentially
from feddrift.models import substitute_models, take
from feddrift.nets import check_fits
from feddrift.nets.external import check_traceable
from feddrift.nets.perceptron import apply_linear, apply_perceptron
from feddrift.trees import join_trunk_and_head, mark_trunk, split_trunk_and_head, tree_leaves, tree_map
from feddrift.types import Bools, Floats, Ints, Local, Metric, Models, Net, Params, Updates

if TYPE_CHECKING:
    from feddrift.engines.simulator.device import SimulatorDevice

log = logging.getLogger(__name__)

MAX_TILE_LANES = 16  # lanes that train at a time, or more if they have few parameters:
MAX_TILE_PARAMETERS = 1 << 22  # parameters of all lanes of a tile with more lanes
MAX_BLOCK_VALUES = 1 << 20  # numbers in the inputs of a block of rows, which is scored at a time; on a GPU four times
MIN_BLOCK_ROWS = 32
MAX_BLOCK_ROWS = 1024  # on a GPU four times as many
MODELS_PER_CALL = 8  # if each block of rows has a separate model
BLOCKS_PER_CALL = 64
# Cells that are shuffled in Python if native code is not loaded; loading takes as long as shuffling 20 times as many.
MAX_CELLS_WITHOUT_NATIVE = 500


class Simulator(InProcess):
    """Engine that is vectorised over lanes with JAX, on the CPU or a GPU."""

    def __init__(self, stream: Stream, net: Net, local: Local, seed: int, conditions: Conditions = IDEAL) -> None:
        check_traceable(net)
        check_fits(net, stream.x.shape[1:], stream.n_classes)
        if net.apply not in (apply_linear, apply_perceptron):
            _log_compilation(net, stream.name)
        super().__init__(stream, net, local, seed, conditions)
        self.native = runs_on_cpu()  # whether native code trains small perceptrons
        self.devices = Devices.find_all()

    @cached_property
    def device(self) -> SimulatorDevice:
        """Storage of models and updates for the compiled program."""
        # Imported here, since importing JAX takes a while.
        from feddrift.engines.simulator.compilation_cache import enable_compilation_cache
        from feddrift.engines.simulator.device import SimulatorDevice

        enable_compilation_cache(self.programs)
        return SimulatorDevice(self.devices)

    def choose_tile(self, params: Params) -> int:
        """Return the number of lanes that train at a time: the clients of a round, or an equal share of them.

        The lanes of a single model then fill their tiles. For large models a few lanes use a device fully; small models
        need many.

        Args:
            params: The parameters of a stack of models.
        """
        n = max(1, math.ceil(self.conditions.participation * self.stream.n_clients))
        model_size = sum(int(np.prod(leaf.shape[1:])) for leaf in tree_leaves(params))
        max_lanes = max(MAX_TILE_LANES, MAX_TILE_PARAMETERS // model_size)
        return self.devices.round_up(-(-n // -(-n // max_lanes)))

    @cached_property
    def data(self) -> tuple[Any, Any]:
        """Inputs and labels of the stream, on every device."""
        return self.devices.put_arrays(self.stream.x), self.devices.put_arrays(self.stream.y)

    def find_kernel(self, params: Params) -> Any:
        """Return the module with native code if it supports these models, else None."""
        if not self.native:
            return None
        from feddrift.engines.native import kernel

        return kernel if kernel.supports_net(self.net, params) else None

    def shuffle_cells(self, keys: rng.Words, starts: Ints, counts: Ints, order: npt.NDArray[np.int32]) -> None:
        if not self.native and len(counts) <= MAX_CELLS_WITHOUT_NATIVE:
            return super().shuffle_cells(keys, starts, counts, order)
        from feddrift.engines.native import kernel

        return (kernel.shuffle_cells if kernel.is_available() else super().shuffle_cells)(keys, starts, counts, order)

    def worker(self, tau: int) -> SimulatorWorker:
        return SimulatorWorker(self, tau)

    def logits(self, models: Models, rows: Ints, net: Net | None = None) -> Iterator[npt.NDArray[np.float32]]:
        kernel = self.find_kernel(models.params) if net is None else None
        if kernel is None:
            return self._run_logits_program(models, rows, net)
        return kernel.compute_logits(self.net, models, self.stream, rows)  # type: ignore[no-any-return]

    def _run_logits_program(self, models: Models, rows: Ints, net: Net | None) -> Iterator[npt.NDArray[np.float32]]:
        """Yield the result of `logits`, computed by the compiled program."""
        from feddrift.engines.simulator import program

        stacks = self.device.put_models(models, pad_model_count(len(models)))  # once for all blocks
        previous = None  # the device computes a block while the caller uses the one before
        n = np.int32(len(models))
        size = self.devices.round_up(self._block_rows)
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            block = np.zeros(size, dtype=np.int32)
            block[: len(part)] = part
            block_arguments = n, self.data[0], self.devices.put_arrays(block, shard=True)
            current = len(part), program.compute_all_logits(net or self.net, *stacks, *block_arguments)
            if previous is not None:
                yield np.asarray(previous[1])[: len(models), : previous[0]]
            previous = current
        if previous is not None:
            yield np.asarray(previous[1])[: len(models), : previous[0]]

    def _compute_assigned_logits(self, models: Models, rows: Ints, model_of_row: Ints) -> npt.NDArray[np.float32]:
        """Return the logits [row, class] of each row from the model at the position model_of_row[row]."""
        from feddrift.engines.simulator import program

        logits = np.zeros((len(rows), self.stream.n_classes), dtype=np.float32)
        if not len(rows):
            return logits
        used, counts = np.unique(model_of_row, return_counts=True)
        rows_by_model = np.split(np.argsort(model_of_row, kind="stable"), np.cumsum(counts)[:-1])
        # If compiling takes long, blocks have few sizes: powers of 4, chosen for the model with the most rows.
        growth = 2 if self.devices.one_cpu else 4
        previous: tuple[list[Ints], Any] | None = None  # the device computes a call while the host prepares the next

        def store_logits(block_positions: list[Ints], block_logits: Any) -> None:
            for positions, block in zip(block_positions, np.asarray(block_logits), strict=False):
                logits[positions] = block[: len(positions)]

        for start in range(0, len(used), MODELS_PER_CALL):
            part = used[start : start + MODELS_PER_CALL]
            voters = take(models, part, [models.ids[m] for m in part])
            stacks, trunk_rows, head_rows = self.device.locate_models(voters, MODELS_PER_CALL)
            size = MIN_BLOCK_ROWS
            largest = counts[start : start + MODELS_PER_CALL].max() if self.devices.one_cpu else counts.max()
            while size < min(int(largest), self._block_rows):
                size *= growth
            size = min(size, self._block_rows)
            blocks = [
                (m, model_rows[begin : begin + size])
                for m, model_rows in enumerate(rows_by_model[start : start + MODELS_PER_CALL])
                for begin in range(0, len(model_rows), size)
            ]
            for first in range(0, len(blocks), BLOCKS_PER_CALL):
                block_positions = [positions for _, positions in blocks[first : first + BLOCKS_PER_CALL]]
                model = np.zeros(BLOCKS_PER_CALL, dtype=np.int64)
                model[: len(block_positions)] = [m for m, _ in blocks[first : first + BLOCKS_PER_CALL]]
                table = np.zeros((BLOCKS_PER_CALL, size), dtype=np.int32)
                for b, positions in enumerate(block_positions):
                    table[b, : len(positions)] = rows[positions]
                mask = None if voters.mask is None else voters.mask[model].astype(np.float32)
                model_arguments = self.devices.put_arrays((trunk_rows[model], head_rows[model], mask))
                block_logits = program.compute_block_logits(
                    self.net, stacks, *model_arguments, np.int32(len(block_positions)), self.data[0],
                    self.devices.put_arrays(table),
                )  # fmt: skip
                if previous is not None:
                    store_logits(*previous)
                previous = block_positions, block_logits
        if previous is not None:
            store_logits(*previous)
        return logits

    @cached_property
    def _block_rows(self) -> int:
        """Number of rows that are scored at a time: a power of two, smaller for large inputs."""
        factor = 1 if self.native else 4  # a GPU is faster with few calls
        n = factor * MAX_BLOCK_VALUES // max(1, math.prod(self.stream.x.shape[1:]))
        return min(factor * MAX_BLOCK_ROWS, max(MIN_BLOCK_ROWS, 1 << max(0, n.bit_length() - 1)))

    def compute_head_inputs(self, models: Models, rows: Ints) -> Iterator[npt.NDArray[np.float32]]:
        kernel = self.find_kernel(models.params)
        if kernel is None:
            return super().compute_head_inputs(models, rows)
        return kernel.compute_hidden(self.net, models, self.stream, rows)  # type: ignore[no-any-return]

    def compute_member_logits(self, models: Models, rows: Ints, sizes: Ints, teams: Ints) -> npt.NDArray[np.float32]:
        kernel = self.find_kernel(models.params)
        if kernel is None and self.devices.mesh is None:
            logits = np.zeros((teams.shape[1], len(rows), self.stream.n_classes), dtype=np.float32)
            members = np.repeat(teams, sizes, axis=0).T  # [k, row]
            k, row = np.nonzero(members >= 0)
            logits[k, row] = self._compute_assigned_logits(models, rows[row], members[k, row])
            return logits
        if kernel is None:
            return super().compute_member_logits(models, rows, sizes, teams)
        return np.asarray(kernel.compute_member_logits(self.net, models, self.stream, rows, sizes, teams))

    def sum_scores(self, models: Models, rows: Ints, sizes: Ints, metric: Metric) -> Floats:
        kernel = self.find_kernel(models.params)
        if kernel is None or models.mask is not None or metric != "error":
            return super().sum_scores(models, rows, sizes, metric)
        return np.asarray(kernel.count_mistakes(self.net, models, self.stream, rows, sizes))

    def find_mistakes(self, models: Models, rows: Ints, sizes: Ints, model_of_cell: Ints) -> Bools:
        kernel = self.find_kernel(models.params)
        if kernel is None and self.devices.mesh is None:
            predicted = self._compute_assigned_logits(models, rows, np.repeat(model_of_cell, sizes)).argmax(axis=1)
            return np.asarray(predicted != self.stream.y[rows])
        if kernel is None or models.mask is not None:
            return super().find_mistakes(models, rows, sizes, model_of_cell)
        return np.asarray(kernel.find_mistakes(self.net, models, self.stream, rows, sizes, model_of_cell))


class SimulatorWorker(InProcessWorker):
    """Worker that trains all lanes of a round at once."""

    engine: Simulator

    def __init__(self, engine: Simulator, tau: int) -> None:
        super().__init__(engine, tau)
        self.order = np.zeros(len(engine.stream.y), dtype=np.int32)  # the rows of cells, shuffled before first use
        self.is_shuffled: Bools = np.zeros(self.known.counts.shape, dtype=bool)  # [t, c], the cells with shuffled rows
        self.trunk_moments = OptimizerStateStore(engine.devices)
        self.head_moments = OptimizerStateStore(engine.devices)
        self.last_losses: dict[PartName, float] = {}  # by trunk, its held-out loss at the last check (Local.patience)

    def save(self) -> Any:
        return self.trunk_moments.export_state(), self.head_moments.export_state(), list(self.last_losses.items())

    def load(self, saved: Any) -> None:
        self.trunk_moments.restore_state(saved[0])
        self.head_moments.restore_state(saved[1])
        self.last_losses = dict(saved[2]) if len(saved) > 2 else {}  # older checkpoints have none

    def rounds(self, models: Models, plan: TrainingPlan, first: int, last: int, local: Local) -> tuple[Models, Ints]:
        if local.patience and not self._find_kernel(models, local):
            return run_rounds_sequentially(self, models, plan, first, last, local)
        params, _, _, left_out = self._run_rounds(models, plan, first, last, local)
        if self._find_kernel(models, local):
            return replace(models, params=self._copy_to_host(params, len(models.families), len(models))), left_out
        return self.engine.device.wrap_models(models, params), left_out

    def updates(self, models: Models, plan: TrainingPlan, round: int, local: Local) -> Updates:
        if local.patience and not self._find_kernel(models, local):
            return self._train_with_early_stopping(models, plan, round, local)
        _, trained, pairs, _ = self._run_rounds(models, plan, round, round + 1, local)
        lanes = np.arange(plan.n_lanes)
        if self._find_kernel(models, local):
            return plan.updates(self._copy_to_host(trained, lanes, pairs))
        return plan.updates(self.engine.device.wrap_updates(models, trained, lanes, pairs))

    def _run_rounds(
        self, models: Models, plan: TrainingPlan, first: int, last: int, local: Local
    ) -> tuple[Params, Params, Ints, Ints]:
        """Run the rounds first..last - 1.

        Returns:
            The parameters of the models, and those of the lanes before the last average, both padded; [pair] the
            position of each pair among the flat heads; and [lane] the number of rounds whose average left the lane out.
        """
        engine = self.engine
        n = plan.n_lanes
        engine.lane_rounds += n * (last - first)
        kernel = self._find_kernel(models, local)
        tile = engine.choose_tile(models.params)
        size = pad_lane_count(n) if kernel else engine.devices.choose_capacity(n, tile, models.params)
        lanes, order, pairs = self._build_lanes(models, plan, local, size)
        trunk_names, head_names = name_parts(models, plan, lanes, pairs)
        limits = np.uint32(first), np.uint32(last)
        validation = None
        if kernel:
            validation = ValidationPlan.make_empty(int(lanes.n_lanes))
            if local.patience:
                validation = build_validation_plan(self, models, plan, lanes.model.shape, self.last_losses, local)
            params, _, mask = pad_models(models, pad_model_count(len(models)))
            data = engine.stream.x, engine.stream.y
            run = partial(kernel.run_rounds, validation=validation)
        else:
            from feddrift.engines.simulator import program

            params, _, mask = engine.device.put_models(models, pad_model_count(len(models)))
            data = engine.data
            pull_params = self._get_pull_params(models, local)
            run = partial(program.run_rounds, engine.devices, tile, pull_params=pull_params)
        moments = self._get_moments(params, trunk_names, head_names)
        trained, lane_params, trunk_moments, head_moments, left_out = run(
            engine.net, local, params, mask, *moments, lanes, *data, order, *limits
        )
        self._store_moments(params, trunk_names, head_names, trunk_moments, head_moments)
        if validation is not None and local.patience:
            self._store_losses(trunk_names, validation.last_loss)
        return trained, lane_params, pairs, np.asarray(left_out)[: int(lanes.n_lanes)]

    def _train_with_early_stopping(self, models: Models, plan: TrainingPlan, round: int, local: Local) -> Updates:
        """Run one round in which lanes may stop early, for as many clients at a time as fit into memory."""
        from feddrift.engines.simulator import early_stopping
        from feddrift.engines.simulator.program import get_static_options

        engine = self.engine
        clients = np.unique(plan.client)
        params, _, mask = engine.device.put_models(models, pad_model_count(len(models)))
        max_lanes_per_client = int(np.bincount(plan.client[np.unique(plan.lane, return_index=True)[1]]).max())
        n_clients = max(1, engine.devices.count_fitting_lanes(params) // max_lanes_per_client)
        if len(clients) > n_clients:
            groups = (clients[begin : begin + n_clients] for begin in range(0, len(clients), n_clients))
            parts = (plan.select(np.isin(np.arange(plan.data.shape[1]), group)) for group in groups)
            return concatenate_updates(
                models, plan, [self._train_with_early_stopping(models, part, round, local) for part in parts]
            )
        engine.lane_rounds += plan.n_lanes
        size = engine.devices.round_up(pad_lane_count(plan.n_lanes))
        lanes, order, pairs = self._build_lanes(models, plan, local, size)
        trunk_names, head_names = name_parts(models, plan, lanes, pairs)
        moments = self._get_moments(params, trunk_names, head_names)
        validation = build_validation_plan(self, models, plan, lanes.model.shape, self.last_losses, local)
        sharded = engine.devices.put_arrays((*moments, lanes, validation), shard=True)
        (trunks, heads, trunk_moments, head_moments), last_losses = early_stopping.run_local_round(
            engine.net, get_static_options(local), params, mask, *sharded, *engine.data,
            engine.devices.put_arrays(order), np.uint32(round), np.float32(local.lr),
            self._get_pull_params(models, local),
        )  # fmt: skip
        self._store_moments(params, trunk_names, head_names, trunk_moments, head_moments)
        self._store_losses(trunk_names, last_losses)
        trained = join_trunk_and_head(trunks, heads, mark_trunk(engine.net, params))
        return plan.updates(engine.device.wrap_updates(models, trained, np.arange(plan.n_lanes), pairs))

    def _find_kernel(self, models: Models, local: Local) -> Any:
        """Return the module with native code if it supports these models and settings, else None."""
        return None if local.pull is not None else self.engine.find_kernel(models.params)  # native code has no pull

    def _get_pull_params(self, models: Models, local: Local) -> Params:
        """Return the parameters that models are pulled to, padded; None: those at the beginning of a round."""
        if local.pull is None or local.pull.to is None:
            return None
        targets = substitute_models(models, local.pull.to)
        return self.engine.device.put_stacks(targets, pad_model_count(len(models)))

    def _store_losses(self, names: list[PartName | None], losses: Any) -> None:
        """Store the held-out losses of the last check."""
        self.last_losses |= {name: float(loss) for name, loss in zip(names, np.asarray(losses), strict=True) if name}

    def _get_moments(
        self, params: Params, trunk_names: list[PartName | None], head_names: list[PartName | None]
    ) -> tuple[Any, Any]:
        """Return the moments of the trunks and heads with these names."""
        trunk, head = split_trunk_and_head(params, mark_trunk(self.engine.net, params))
        max_rows = self.engine.devices.count_fitting_lanes(params)
        return (
            self.trunk_moments.get_moments(trunk_names, trunk, max_rows),
            self.head_moments.get_moments(head_names, head, max_rows),
        )

    def _store_moments(
        self,
        params: Params,
        trunk_names: list[PartName | None],
        head_names: list[PartName | None],
        trunk_moments: Any,
        head_moments: Any,
    ) -> None:
        max_rows = self.engine.devices.count_fitting_lanes(params) // 2  # training needs the other half
        self.trunk_moments.store_moments(trunk_names, trunk_moments, max_rows)
        self.head_moments.store_moments(head_names, head_moments, max_rows)

    def _build_lanes(self, models: Models, plan: TrainingPlan, local: Local, size: int) -> tuple[Lanes, RowOrder, Ints]:
        order = self.order if local.bags else self._shuffle_used_cells(plan.data)
        return build_lanes(self, models, plan, local, size, order)

    def _shuffle_used_cells(self, w: Entries) -> RowOrder:
        """Return the order of rows after shuffling the cells with an entry in w."""
        stream = self.engine.stream
        is_used = np.zeros_like(self.is_shuffled)
        is_used[w.t, w.c] = True
        t, c = np.nonzero(is_used & ~self.is_shuffled)
        keys = rng.derive_key(self.engine.seed, "shuffle", self.tau, t, c)
        self.engine.shuffle_cells(keys, stream.starts[t, c], self.known.counts[t, c], self.order)
        self.is_shuffled |= is_used
        return self.order

    def shuffle_cell(self, t: int, c: int) -> Ints:
        if not self.is_shuffled[t, c]:
            return super().shuffle_cell(t, c)
        return self.order[self.engine.stream.rows(t, c)].astype(np.int64)

    def _copy_to_host(self, params: Params, trunks: int | Ints, heads: int | Ints) -> Params:
        """Return rows of padded stacks on the host, where selecting rows needs no compilation.

        Args:
            params: The stacks.
            trunks: The rows of the trunks; a number n means the first n rows.
            heads: The rows of the heads.
        """

        def select_rows(leaf: Any, rows: int | Ints) -> Any:
            return np.asarray(leaf)[:rows] if isinstance(rows, int) else np.asarray(leaf)[rows]

        in_trunk = mark_trunk(self.engine.net, params)
        return tree_map(lambda leaf, shared: select_rows(leaf, trunks if shared else heads), params, in_trunk)


@cache  # once for each net and stream
def _log_compilation(net: Net, stream: str) -> None:
    log.info("compiling the net for %s: seconds, and again for many more models, unless it is in the cache", stream)
