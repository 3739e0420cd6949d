"""Training over the network: a client's answer to Train."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np

from feddrift.engines.flower import model_parts
from feddrift.engines.flower.client.store import Store
from feddrift.engines.flower.messages import MAX_ID, MAX_SIZE, About, Train, entries_of
from feddrift.engines.flower.model_parts import Body, Part
from feddrift.engines.flower.serialization import Refused, numbers, whole
from feddrift.engines.local.engine import InProcess
from feddrift.engines.worker import Work, Worker
from feddrift.models import params_of
from feddrift.trees import map_trunk_and_head, split, trunk_of
from feddrift.types import Local, Models, Params, Pull

LONGEST = 1e6  # seconds


def answer(
    engine: InProcess, store: Store, task: About, request: Train, models: Models, to: Models | None
) -> tuple[Body, dict[str, Part]]:
    """What a client says, and the parts of models that it has trained, unless it keeps them."""
    local, round = Local(**request.local), int(request.round)
    if request.pull is not None:
        local = replace(local, pull=Pull(numbers([request.pull], 1, np.finfo(np.float64).max, False)[0], to))
    whole(request.keep, 0, MAX_ID)
    shown = [] if request.keep else request.models  # what is trained is sent; so is, nearly, what it is pulled to
    if any(name.startswith(model_parts.PRIVATE) for name in model_parts.named([*shown, *request.to])):
        raise Refused("it asks for a private model, which never leaves this client")
    w = entries_of(request.w, task.index, (task.tau + 1, task.n_clients, len(models)))
    behind = engine.stream.counts[w.t, w.c]
    if not (len(behind) and all(behind > 0)):
        raise Refused("it asks for training on data that this client does not hold")
    before = store.moments_before(task.tau, round)

    def begun() -> Worker:
        worker = engine.worker(task.tau)
        if before is not None:
            worker.load(before)
        return worker

    worker, work, more = begun(), Work.of(models, w, engine.stream.counts), 0
    parts: dict[str, Part] = {}
    if request.keep:
        last = round + whole(request.rounds, 1, MAX_SIZE)
        _keep(engine, store, worker.rounds(models, work, round, last, local)[0], work, request.keep)
        after = worker.save()
    else:
        params, after, more = _at_once(worker, models, work, local, request)
        if params is None:
            worker = begun()
            params = worker.updates(models, work, round, local).params
            after = worker.save()
        parts = _named(engine, params, work, local)
    store.put_moments({"tau": task.tau, "round": round, "before": before, "after": after})
    return {"round": round, "more": more}, parts


def _at_once(
    worker: Worker, models: Models, work: Work, local: Local, request: Train
) -> tuple[Params | None, Any, int]:
    """All rounds that may be done before the server is told; the parameters, the moments, how many beyond the first.

    As with every average, a round with numbers that are not finite counts for nothing: the one before it is the last,
    and the server gets to see it when it asks for that round alone. None: already the first is such, or is alone.
    """
    round, most = int(request.round), whole(request.more, 0, MAX_SIZE)
    within = numbers([request.within], 1, LONGEST, False)[0]
    done, moments, end = 0, None, time.monotonic() + within
    while most and done <= most and (not done or time.monotonic() < end):
        trained, left_out = worker.rounds(models, work, round + done, round + done + 1, local)
        if left_out.any():
            break
        models, moments, done = trained, worker.save(), done + 1
    if not done:
        return None, None, 0
    lanes = np.unique(work.lane, return_index=True)[1]
    trunks = models.trunk_index[work.model[lanes]]
    params = map_trunk_and_head(lambda leaf, which: np.asarray(leaf)[which], models, work.model, trunks)
    return params, moments, done - 1


def _named(engine: InProcess, params: Params, work: Work, local: Local) -> dict[str, Part]:
    """What was trained, under the names that the server expects."""
    trunk, head = split(params, trunk_of(engine.net, params))
    parts: dict[str, Part] = {}
    if local.trains != "trunk":
        parts |= {f"head-{k}": [leaf[k] for leaf in head] for k in range(len(work.model)) if head}
    if local.trains != "head":
        parts |= {f"trunk-{k}": [leaf[k] for leaf in trunk] for k in range(work.n_lanes) if trunk}
    return parts


def _keep(engine: InProcess, store: Store, trained: Models, work: Work, label: int) -> None:
    """Store private models under this label; later ones, of a time that is taken up again, go."""
    kept = dict[str, Part]()
    for m in sorted(set(work.model.tolist())):
        params = params_of(trained, m)
        for kind, part in zip(("trunk", "head"), split(params, trunk_of(engine.net, params)), strict=True):
            if part:
                kept[model_parts.private_name(trained.ids[m], label, kind)] = [np.asarray(leaf) for leaf in part]
    store.drop_parts(model_parts.later_private(store.parts(), {trained.ids[m] for m in work.model}, label))
    store.put_parts(kept)
