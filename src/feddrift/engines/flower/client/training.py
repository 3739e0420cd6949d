"""Local training at a client, on request of the server."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np

from feddrift.engines.flower import model_parts
from feddrift.engines.flower.client.policy import Policy
from feddrift.engines.flower.client.request_log import RequestEntry
from feddrift.engines.flower.client.store import Store
from feddrift.engines.flower.messages import MAX_MODEL_ID, MAX_SIZE, RequestContext, Train, unpack_entries
from feddrift.engines.flower.model_parts import Body, Part
from feddrift.engines.flower.serialization import InvalidMessageError, check_int, check_numbers
from feddrift.engines.local.engine import InProcess, InProcessWorker
from feddrift.engines.sparse_weights import Entries
from feddrift.engines.worker import TrainingPlan, Worker
from feddrift.models import get_params
from feddrift.trees import map_trunk_and_head, mark_trunk, split_trunk_and_head
from feddrift.types import Local, Models, Params, Pull

MAX_SECONDS = 1e6  # maximum time that a request may allow for further rounds


def handle_train(
    engine: InProcess,
    store: Store,
    context: RequestContext,
    request: Train,
    models: Models,
    targets: Models | None,
    policy: Policy,
    entry: RequestEntry,
) -> tuple[Body, dict[str, Part]]:
    """Train models, and store the optimiser's moments.

    Args:
        engine: The client's data and net.
        store: The client's store.
        context: The context of the request.
        request: The request.
        models: The models to train.
        targets: The models towards which they are pulled, if the request names any.
        policy: The limits of what the server may request.
        entry: The entry of the request in the log.

    Returns:
        The reply, and the trained parts of models, without those of private models, which are stored.

    Raises:
        InvalidMessageError: The request is not valid, or would reveal a private model.
        RequestRefusedError: The policy does not allow it.
    """
    local = Local(**request.local)
    round = int(request.round)
    if request.pull is not None:
        weight = check_numbers([request.pull], 1, np.finfo(np.float64).max, False)[0]
        local = replace(local, pull=Pull(weight, targets))
    check_int(request.keep, 0, MAX_MODEL_ID)
    revealed = [] if request.keep else request.models  # trained models are sent, and resemble the targets of a pull
    names = model_parts.collect_part_names([*revealed, *request.to])
    if any(name.startswith(model_parts.PRIVATE_PREFIX) for name in names):
        raise InvalidMessageError("it requests a private model, which never leaves this client")
    w = unpack_entries(request.w, context.index, (context.tau + 1, context.n_clients, len(models)))
    n_rows = engine.stream.counts[w.t, w.c]
    if not (len(n_rows) and all(n_rows > 0)):
        raise InvalidMessageError("it requests training on data that this client does not have")
    if not (np.isfinite(w.value) & (w.value > 0)).all():
        raise InvalidMessageError("it gives data a weight that is not a number above 0")
    entry.rows = int(engine.stream.counts[np.unique(w.t), context.index].sum())
    if not request.keep:  # private models are not sent
        policy.check_local_steps(local)
        worker = engine.worker(context.tau)
        assert isinstance(worker, InProcessWorker)
        for m in np.unique(w.m).tolist():
            cells = w.select(w.m == m)
            policy.check_rows(*find_effective_rows(worker, context.index, models.ids[m], cells, local))
    before = store.read_optimizer_before(context.tau, round)

    def create_worker() -> Worker:
        worker = engine.worker(context.tau)
        if before is not None:
            worker.load(before)
        return worker

    worker = create_worker()
    plan = TrainingPlan.of(models, w, engine.stream.counts)
    more = 0
    parts: dict[str, Part] = {}
    if request.keep:
        last = round + check_int(request.rounds, 1, MAX_SIZE)
        _store_private_models(engine, store, worker.rounds(models, plan, round, last, local)[0], plan, request.keep)
        after = worker.save()
    else:
        params, after, more = _run_several_rounds(worker, models, plan, local, request)
        if params is None:
            worker = create_worker()
            params = worker.updates(models, plan, round, local).params
            after = worker.save()
        parts = _split_trained_parts(engine, params, plan, local)
    store.write_optimizer({"tau": context.tau, "round": round, "before": before, "after": after})
    return {"round": round, "more": more}, parts


def _run_several_rounds(
    worker: Worker, models: Models, plan: TrainingPlan, local: Local, request: Train
) -> tuple[Params | None, Any, int]:
    """Run all rounds that this client may run before it replies.

    It stops before a round whose result is not finite, since averages leave such results out. The server sees that
    result when it requests that round alone.

    Returns:
        The parameters, the optimiser's moments, and the number of rounds after the first. The parameters are None if
        only one round was requested, or the result of the first one is not finite.
    """
    round = int(request.round)
    max_more = check_int(request.more, 0, MAX_SIZE)
    within = check_numbers([request.within], 1, MAX_SECONDS, False)[0]
    done = 0
    moments = None
    end = time.monotonic() + within
    while max_more and done <= max_more and (not done or time.monotonic() < end):
        trained, left_out = worker.rounds(models, plan, round + done, round + done + 1, local)
        if left_out.any():
            break
        models = trained
        moments = worker.save()
        done += 1
    if not done:
        return None, None, 0
    lanes = np.unique(plan.lane, return_index=True)[1]
    trunks = models.trunk_index[plan.model[lanes]]
    params = map_trunk_and_head(lambda leaf, rows: np.asarray(leaf)[rows], models, plan.model, trunks)
    return params, moments, done - 1


def _split_trained_parts(engine: InProcess, params: Params, plan: TrainingPlan, local: Local) -> dict[str, Part]:
    """Return the trained parts by the names that the server expects."""
    trunk, head = split_trunk_and_head(params, mark_trunk(engine.net, params))
    parts: dict[str, Part] = {}
    if local.trains != "trunk":
        parts |= {f"head-{k}": [leaf[k] for leaf in head] for k in range(len(plan.model)) if head}
    if local.trains != "head":
        parts |= {f"trunk-{k}": [leaf[k] for leaf in trunk] for k in range(plan.n_lanes) if trunk}
    return parts


def _store_private_models(engine: InProcess, store: Store, trained: Models, plan: TrainingPlan, label: int) -> None:
    """Store private models under this version label, and delete later versions.

    There are some if the server restarted from an older checkpoint.
    """
    parts = dict[str, Part]()
    for m in sorted(set(plan.model.tolist())):
        params = get_params(trained, m)
        for kind, part in zip(
            ("trunk", "head"), split_trunk_and_head(params, mark_trunk(engine.net, params)), strict=True
        ):
            if part:
                parts[model_parts.name_private_part(trained.ids[m], label, kind)] = [np.asarray(leaf) for leaf in part]
    ids = {trained.ids[m] for m in plan.model}
    store.drop_parts(model_parts.find_later_private_parts(store.list_parts(), ids, label))
    store.put_parts(parts)


def find_effective_rows(worker: InProcessWorker, c: int, model_id: int, w: Entries, local: Local) -> tuple[float, int]:
    """Compute how many rows of a client determine an update.

    Args:
        worker: The worker of the client.
        c: The client.
        model_id: The id of the model.
        w: The weights of the client's cells for this model, all positive.
        local: The settings of local training.

    Returns:
        One divided by the largest share of a row in the drawn examples, and the smallest number of distinct rows of a
        cell from which examples are drawn; both are 0 if none are drawn.
    """
    if local.by_class:
        tables = worker.build_tables(c, model_id, w.t, w.value, local)
        cells = np.split(tables.rows, np.cumsum(tables.sizes)[:-1])
        mass = tables.mass
    else:
        cells = [worker.select_training_rows(int(t), c, model_id, local) for t in w.t]
        mass = np.array([len(cell) for cell in cells], dtype=np.float64)
    chance = w.value / w.value.max() * mass  # scaled, so that the sum cannot overflow
    if not chance.any():
        return 0.0, 0
    chance /= chance.sum()
    largest_share = 0.0
    min_rows_per_cell = np.iinfo(np.int64).max
    for rows, cell_chance in zip(cells, chance.tolist(), strict=True):
        if not len(rows):  # `even` takes the newest rows of each class, perhaps none of this cell
            continue
        _, places = np.unique(rows, return_counts=True)
        most_places = int(places.max(initial=0)) if local.by_class else 1  # a bootstrap repeats rows by chance
        largest_share = max(largest_share, cell_chance * most_places / max(1, len(rows)))
        min_rows_per_cell = min(min_rows_per_cell, len(places))
    return 1 / largest_share, min_rows_per_cell
