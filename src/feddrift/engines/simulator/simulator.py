"""The default engine: all active lanes at once, rounds and local steps inside one compiled `program`.

On a CPU, small perceptrons train in `kernel` instead, with the same arguments and results.

A lane is a client at work on one family: a trunk and one or several heads, one of which each local step trains.

Lanes and models are padded to buckets that depend on their number alone, so a changing number of models seldom
compiles anew and a resumed run repeats the bits of an unbroken one. The number of rounds is an argument of the
program, not a part of it: R calls of one round run the very code of one call of R rounds. So are the number of tiles
that lanes fill, and the step size. What was trained stays on the device until somebody reads it (`resident`).
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
from feddrift.engines.simulator.batch_plan import Order, arranged
from feddrift.engines.simulator.lanes import (
    Devices,
    Lanes,
    lane_bucket,
    model_bucket,
    on_cpu,
    padded,
)
from feddrift.engines.simulator.moments import MomentStore, Name, names_of
from feddrift.engines.simulator.validation_plan import Looks, looks_of
from feddrift.engines.sparse_weights import Entries
from feddrift.engines.worker import Work, gathered, in_turn
from feddrift.models import in_place_of, take
from feddrift.nets import check_fits
from feddrift.nets.external import check_traceable
from feddrift.nets.perceptron import linear, perceptron
from feddrift.trees import leaves, split, tree_map, trunk_of, unsplit
from feddrift.types import Bools, Floats, Ints, Local, Metric, Models, Net, Params, Updates

if TYPE_CHECKING:
    from feddrift.engines.simulator.device import OnDevice

log = logging.getLogger(__name__)

TILE = 16  # lanes that train at a time, at most,
TILE_VALUES = 1 << 22  # unless their models are so small that all parameters together are fewer than these
SCORE_VALUES = 1 << 20  # numbers in the inputs that one call of the compiled program scores, on a GPU four times these,
SCORE_BLOCK = 32, 1024  # but so many rows at least, and at most
MODELS_PER_CALL, BLOCKS_PER_CALL = 8, 64  # where each block of rows has a model of its own
FEW_CELLS = 500  # to shuffle at a time: for twenty times as many loading native code would take as long


class Simulator(InProcess):
    """Vectorised over lanes with JAX, on the CPU or a GPU."""

    def __init__(self, stream: Stream, net: Net, local: Local, seed: int, conditions: Conditions = IDEAL) -> None:
        check_traceable(net)
        check_fits(net, stream.x.shape[1:], stream.n_classes)
        if net.apply not in (linear, perceptron):
            _tell_that_it_compiles(net, stream.name)
        super().__init__(stream, net, local, seed, conditions)
        self.native = on_cpu()  # whether small perceptrons are left to native code
        self.devices = Devices.here()

    @cached_property
    def device(self) -> OnDevice:
        """Where the compiled program keeps models and updates."""
        from feddrift.engines.simulator.compilation_cache import (
            keep_programs,  # here, since JAX takes a while to import
        )
        from feddrift.engines.simulator.device import OnDevice

        keep_programs(self.programs)
        return OnDevice(self.devices)

    def tile(self, params: Params) -> int:
        """How many lanes the compiled program trains at a time: as many as clients take part in a round, or a share.

        So a single model fills its tiles. Of large models a few keep the device busy, of small ones it takes many.
        """
        n = max(1, math.ceil(self.conditions.participation * self.stream.n_clients))
        most = max(TILE, TILE_VALUES // sum(int(np.prod(leaf.shape[1:])) for leaf in leaves(params)))
        return self.devices.evenly(-(-n // -(-n // most)))

    @cached_property
    def data(self) -> tuple[Any, Any]:
        """x and y, on every device."""
        return self.devices.put(self.stream.x), self.devices.put(self.stream.y)

    def kernel(self, params: Params) -> Any:
        """The native code, where it does for these models."""
        if not self.native:
            return None
        from feddrift.engines.native import kernel

        return kernel if kernel.applies(self.net, params) else None

    def shuffle(self, keys: rng.Words, starts: Ints, counts: Ints, order: npt.NDArray[np.int32]) -> None:
        if not self.native and len(counts) <= FEW_CELLS:
            return super().shuffle(keys, starts, counts, order)
        from feddrift.engines.native import kernel

        return (kernel.shuffle if kernel.ready() else super().shuffle)(keys, starts, counts, order)

    def worker(self, tau: int) -> SimulatorWorker:
        return SimulatorWorker(self, tau)

    def logits(self, models: Models, rows: Ints, net: Net | None = None) -> Iterator[npt.NDArray[np.float32]]:
        kernel = self.kernel(models.params) if net is None else None
        if kernel is None:
            return self._compiled_logits(models, rows, net)
        return kernel.logits(self.net, models, self.stream, rows)  # type: ignore[no-any-return]

    def _compiled_logits(self, models: Models, rows: Ints, net: Net | None) -> Iterator[npt.NDArray[np.float32]]:
        """Yield what `logits` does, from the program that XLA compiled."""
        from feddrift.engines.simulator import program

        given = self.device.given(models, model_bucket(len(models)))  # once, not with every block
        ahead = None  # the device works on a block while the host takes in the one before
        n, size = np.int32(len(models)), self.devices.evenly(self._block)
        for start in range(0, len(rows), size):
            block = np.zeros(size, dtype=np.int32)
            part = rows[start : start + size]
            block[: len(part)] = part
            asked = n, self.data[0], self.devices.put(block, deal=True)
            now = len(part), program.logits(net or self.net, *given, *asked)
            if ahead is not None:
                yield np.asarray(ahead[1])[: len(models), : ahead[0]]
            ahead = now
        if ahead is not None:
            yield np.asarray(ahead[1])[: len(models), : ahead[0]]

    def _assigned_logits(self, models: Models, rows: Ints, model_of_row: Ints) -> npt.NDArray[np.float32]:
        """Return the logits [row, class] of each row from the model at the position model_of_row[row]."""
        from feddrift.engines.simulator import program

        logits = np.zeros((len(rows), self.stream.n_classes), dtype=np.float32)
        if not len(rows):
            return logits
        used, counts = np.unique(model_of_row, return_counts=True)
        by_model = np.split(np.argsort(model_of_row, kind="stable"), np.cumsum(counts)[:-1])
        # Where compiling takes long, blocks have few sizes: that of the model with the most rows, to a power of 4.
        growth = 2 if self.devices.one_cpu else 4
        ahead: tuple[list[Ints], Any] | None = None  # the device works on a call while the host prepares the next

        def take_in(places: list[Ints], scored: Any) -> None:
            for at, block in zip(places, np.asarray(scored), strict=False):
                logits[at] = block[: len(at)]

        for start in range(0, len(used), MODELS_PER_CALL):
            part = used[start : start + MODELS_PER_CALL]
            voters = take(models, part, [models.ids[m] for m in part])
            stacks, of_trunk, of_head = self.device.located(voters, MODELS_PER_CALL)
            size = SCORE_BLOCK[0]
            largest = counts[start : start + MODELS_PER_CALL].max() if self.devices.one_cpu else counts.max()
            while size < min(int(largest), self._block):
                size *= growth
            size = min(size, self._block)
            blocks = [
                (m, of_model[begin : begin + size])
                for m, of_model in enumerate(by_model[start : start + MODELS_PER_CALL])
                for begin in range(0, len(of_model), size)
            ]
            for first in range(0, len(blocks), BLOCKS_PER_CALL):
                places = [at for _, at in blocks[first : first + BLOCKS_PER_CALL]]
                model = np.zeros(BLOCKS_PER_CALL, dtype=np.int64)
                model[: len(places)] = [m for m, _ in blocks[first : first + BLOCKS_PER_CALL]]
                table = np.zeros((BLOCKS_PER_CALL, size), dtype=np.int32)
                for b, at in enumerate(places):
                    table[b, : len(at)] = rows[at]
                mask = None if voters.mask is None else voters.mask[model].astype(np.float32)
                given = self.devices.put((of_trunk[model], of_head[model], mask))
                scored = program.block_logits(
                    self.net, stacks, *given, np.int32(len(places)), self.data[0], self.devices.put(table)
                )
                if ahead is not None:
                    take_in(*ahead)
                ahead = places, scored
        if ahead is not None:
            take_in(*ahead)
        return logits

    @cached_property
    def _block(self) -> int:
        """How many rows are scored at a time: a power of two, fewer where inputs are large."""
        times = 1 if self.native else 4  # a GPU is better off with few calls
        fits = times * SCORE_VALUES // max(1, math.prod(self.stream.x.shape[1:]))
        return min(times * SCORE_BLOCK[1], max(SCORE_BLOCK[0], 1 << max(0, fits.bit_length() - 1)))

    def hidden(self, models: Models, rows: Ints) -> Iterator[npt.NDArray[np.float32]]:
        kernel = self.kernel(models.params)
        if kernel is None:
            return super().hidden(models, rows)
        return kernel.hidden(self.net, models, self.stream, rows)  # type: ignore[no-any-return]

    def member_logits(self, models: Models, rows: Ints, sizes: Ints, teams: Ints) -> npt.NDArray[np.float32]:
        kernel = self.kernel(models.params)
        if kernel is None and self.devices.mesh is None:
            found = np.zeros((teams.shape[1], len(rows), self.stream.n_classes), dtype=np.float32)
            member, row = np.nonzero(np.repeat(teams, sizes, axis=0).T >= 0)
            model_of_row = np.repeat(teams, sizes, axis=0).T[member, row]
            found[member, row] = self._assigned_logits(models, rows[row], model_of_row)
            return found
        if kernel is None:
            return super().member_logits(models, rows, sizes, teams)
        return np.asarray(kernel.member_logits(self.net, models, self.stream, rows, sizes, teams))

    def sums(self, models: Models, rows: Ints, sizes: Ints, metric: Metric) -> Floats:
        kernel = self.kernel(models.params)
        if kernel is None or models.mask is not None or metric != "error":
            return super().sums(models, rows, sizes, metric)
        return np.asarray(kernel.mistakes(self.net, models, self.stream, rows, sizes))

    def wrong(self, models: Models, rows: Ints, sizes: Ints, which: Ints) -> Bools:
        kernel = self.kernel(models.params)
        if kernel is None and self.devices.mesh is None:
            predicted = self._assigned_logits(models, rows, np.repeat(which, sizes)).argmax(axis=1)
            return np.asarray(predicted != self.stream.y[rows])
        if kernel is None or models.mask is not None:
            return super().wrong(models, rows, sizes, which)
        return np.asarray(kernel.wrong(self.net, models, self.stream, rows, sizes, which))


class SimulatorWorker(InProcessWorker):
    """All clients at once."""

    engine: Simulator

    def __init__(self, engine: Simulator, tau: int) -> None:
        super().__init__(engine, tau)
        self.order = np.zeros(len(engine.stream.y), dtype=np.int32)  # each cell's rows, shuffled when first used
        self.in_order: Bools = np.zeros(self.known.counts.shape, dtype=bool)  # the cells whose rows are
        self.trunks, self.heads = MomentStore(engine.devices), MomentStore(engine.devices)
        self.looked: dict[Name, float] = {}  # the held-out loss at the last look: see Local.patience

    def save(self) -> Any:
        return self.trunks.saved(), self.heads.saved(), list(self.looked.items())

    def load(self, saved: Any) -> None:
        self.trunks.restore(saved[0])
        self.heads.restore(saved[1])
        self.looked = dict(saved[2]) if len(saved) > 2 else {}  # older checkpoints have none

    def rounds(self, models: Models, work: Work, first: int, last: int, local: Local) -> tuple[Models, Ints]:
        if local.patience and not self._native(models, local):
            return in_turn(self, models, work, first, last, local)
        params, _, _, left_out = self._run(models, work, first, last, local)
        if self._native(models, local):
            return replace(models, params=self._fetch(params, len(models.families), len(models))), left_out
        return self.engine.device.models(models, params), left_out

    def updates(self, models: Models, work: Work, round: int, local: Local) -> Updates:
        if local.patience and not self._native(models, local):
            return self._patient(models, work, round, local)
        _, trained, pairs, _ = self._run(models, work, round, round + 1, local)
        lanes = np.arange(work.n_lanes)
        if self._native(models, local):
            return work.updates(self._fetch(trained, lanes, pairs))
        return work.updates(self.engine.device.updates(models, trained, lanes, pairs))

    def _run(
        self, models: Models, work: Work, first: int, last: int, local: Local
    ) -> tuple[Params, Params, Ints, Ints]:
        """The models after these rounds, the lanes as they were before the last average, where each pair lies, and in
        how many rounds a lane was left out of it."""
        self.engine.lane_rounds += work.n_lanes * (last - first)
        engine, kernel, looks = self.engine, self._native(models, local), None
        tile = engine.tile(models.params)
        size = lane_bucket(work.n_lanes) if kernel else engine.devices.places(work.n_lanes, tile, models.params)
        described, order, pairs = self._arranged(models, work, local, size)
        lane_names, pair_names = names_of(models, work, described, pairs)
        limits = np.uint32(first), np.uint32(last)
        if kernel:
            looks = Looks.none(int(described.n_lanes))
            if local.patience:
                looks = looks_of(self, models, work, described.model.shape, self.looked, local)
            params, _, mask = padded(models, model_bucket(len(models)))
            data, run = (engine.stream.x, engine.stream.y), partial(kernel.rounds, looks=looks)
        else:
            from feddrift.engines.simulator import program

            params, _, mask = engine.device.given(models, model_bucket(len(models)))
            data, run = engine.data, partial(program.rounds, engine.devices, tile, to=self._pulled_to(models, local))
        moments = self._recall(params, lane_names, pair_names)
        trained, updates, of_trunk, of_head, refused = run(
            engine.net, local, params, mask, *moments, described, *data, order, *limits
        )
        self._keep(params, lane_names, pair_names, of_trunk, of_head)
        if looks is not None and local.patience:
            self._look_back(lane_names, looks.before)
        return trained, updates, pairs, np.asarray(refused)[: int(described.n_lanes)]

    def _patient(self, models: Models, work: Work, round: int, local: Local) -> Updates:
        """`updates` of lanes that may stop early; as many clients at a time as there is room for."""
        from feddrift.engines.simulator import early_stopping
        from feddrift.engines.simulator.program import compiled_for

        engine, clients = self.engine, np.unique(work.client)
        params, _, mask = engine.device.given(models, model_bucket(len(models)))
        widest = int(np.bincount(work.client[np.unique(work.lane, return_index=True)[1]]).max())
        at_once = max(1, engine.devices.room(params) // widest)
        if len(clients) > at_once:
            shares = (clients[begin : begin + at_once] for begin in range(0, len(clients), at_once))
            mine = (work.select(np.isin(np.arange(work.data.shape[1]), share)) for share in shares)
            return gathered(models, work, [self._patient(models, part, round, local) for part in mine])
        engine.lane_rounds += work.n_lanes
        size = engine.devices.evenly(lane_bucket(work.n_lanes))
        described, order, pairs = self._arranged(models, work, local, size)
        lane_names, pair_names = names_of(models, work, described, pairs)
        moments = self._recall(params, lane_names, pair_names)
        looks = looks_of(self, models, work, described.model.shape, self.looked, local)
        (trunks, heads, of_trunk, of_head), last = early_stopping.local_round(
            engine.net, compiled_for(local), params, mask, *engine.devices.put((*moments, described, looks), deal=True),
            *engine.data, engine.devices.put(order), np.uint32(round), np.float32(local.lr),
            self._pulled_to(models, local),
        )  # fmt: skip
        self._keep(params, lane_names, pair_names, of_trunk, of_head)
        self._look_back(lane_names, last)
        trained = unsplit(trunks, heads, trunk_of(engine.net, params))
        return work.updates(engine.device.updates(models, trained, np.arange(work.n_lanes), pairs))

    def _native(self, models: Models, local: Local) -> Any:
        """The native code, where it does for these models, trained like this: it knows no pull."""
        return None if local.pull is not None else self.engine.kernel(models.params)

    def _pulled_to(self, models: Models, local: Local) -> Params:
        """The parameters that models are pulled to, padded as they are; None: to what a round begins with."""
        to = None if local.pull is None else local.pull.to
        return None if to is None else self.engine.device.given(in_place_of(models, to), model_bucket(len(models)))[0]

    def _look_back(self, names: list[Name | None], losses: Any) -> None:
        """Keep the held-out losses of the last look."""
        self.looked |= {name: float(loss) for name, loss in zip(names, np.asarray(losses), strict=True) if name}

    def _recall(self, params: Params, lanes: list[Name | None], pairs: list[Name | None]) -> tuple[Any, Any]:
        """The moments of trunks and heads of these names."""
        trunk, head = split(params, trunk_of(self.engine.net, params))
        room = self.engine.devices.room(params)
        return self.trunks.recall(lanes, trunk, room), self.heads.recall(pairs, head, room)

    def _keep(
        self, params: Params, lanes: list[Name | None], pairs: list[Name | None], trunks: Any, heads: Any
    ) -> None:
        """Keep the moments of trunks and heads under these names."""
        room = self.engine.devices.room(params) // 2  # training needs the rest
        self.trunks.keep(lanes, trunks, room)
        self.heads.keep(pairs, heads, room)

    def _arranged(self, models: Models, work: Work, local: Local, size: int) -> tuple[Lanes, Order, Ints]:
        order = self.order if local.bags else self._shuffle(work.data)
        return arranged(self, models, work, local, size, order)

    def _shuffle(self, w: Entries) -> Order:
        """The order of rows, in which all cells that w names are shuffled."""
        stream, due = self.engine.stream, np.zeros_like(self.in_order)
        due[w.t, w.c] = True
        t, c = np.nonzero(due & ~self.in_order)
        keys = rng.derive(self.engine.seed, "shuffle", self.tau, t, c)
        self.engine.shuffle(keys, stream.starts[t, c], self.known.counts[t, c], self.order)
        self.in_order |= due
        return self.order

    def shuffled(self, t: int, c: int) -> Ints:
        if not self.in_order[t, c]:
            return super().shuffled(t, c)
        return self.order[self.engine.stream.rows(t, c)].astype(np.int64)

    def _fetch(self, params: Params, trunks: int | Ints, heads: int | Ints) -> Params:
        """The first ones, or these, of padded stacks, on the host: surgery there costs no compilation."""

        def rows(leaf: Any, which: int | Ints) -> Any:
            return np.asarray(leaf)[:which] if isinstance(which, int) else np.asarray(leaf)[which]

        return tree_map(
            lambda leaf, shared: rows(leaf, trunks if shared else heads), params, trunk_of(self.engine.net, params)
        )


@cache  # once for each net
def _tell_that_it_compiles(net: Net, stream: str) -> None:
    log.info("compiling the net for %s: seconds, and again when the models become many, unless it was kept", stream)
