"""The condition `route`: clients choose by their inputs whose vote counts, where labels have shown that this pays.

After every time step clients tell the moments, by class, of a random projection of their new inputs, and the server
adds them up for each model in use. The means of its classes are a model's centres, and inputs go to the model whose
centres are nearer than those of the client's own (see `Router`).

The gate: on its new data, whose labels are there, each client counts the mistakes of the model that it had before and
those of the choice by inputs, with centres that know nothing of these very data, and among models that have not learned
from them: the one that it uses now is there as it was before, if it was. Only the counts leave it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from feddrift.models import join, take, unused_id
from feddrift.router import Per, Router, Routing, Sums
from feddrift.types import Event, Models, Moments, Projection, State, Votes

if TYPE_CHECKING:
    from feddrift.engines.server.federation import TimeStep

SIZE = 32  # numbers that an input is projected to
MARGIN = 2.0  # standard errors by which the data of another model must be nearer
MOST_MODELS = 32  # to choose from; with more, as where many clients found models at once, nothing is chosen yet
ROUNDING = 1e-9  # of a sum of squares; what varies less is constant

Data = Mapping[int, Sums]  # by the id of a model


def without_route(state: State) -> State:
    """The state as its algorithm made it."""
    return state if state.routing is None else replace(state, router=None, routing=None)


def with_route(before: State, after: State, fed: TimeStep, per: Per) -> State:
    """The state after a time step with what the condition adds to it; an algorithm's own router stands."""
    shared = np.flatnonzero(Votes.of(after.votes).used & ~after.models.private)
    if after.router is not None:
        return after
    if not len(shared):  # nothing to choose now, but what was learned stays
        return replace(after, routing=before.routing)
    past = before.routing or Routing(Projection(_words(fed), SIZE))
    any_model = replace(take(after.models, shared[:1], [after.models.ids[shared[0]]]), mask=None)
    cells = _sums(fed.moments(any_model, "input", "class", past.project))
    data, used, had = _merged(past.data, after), _in_use(after), _renamed(_in_use(before), after)
    for c, cell in cells.items():
        data[used[c]] = _plus(data.get(used[c]), cell)
    now = replace(past, data=data)
    if len(before.w):  # there was a test
        now = _judged(now, cells, before, after, used, had, fed, per)
    events = after.events if now.pays == past.pays else (*after.events, _decision(now, after))
    router = _router(now, data, _places(after.models), per, len(after.models)) if now.pays else None
    return replace(after, router=router, routing=now, events=events)


def _judged(
    now: Routing, cells: Data, before: State, after: State, used: Mapping[int, int], had: Mapping[int, int],
    fed: TimeStep, per: Per,
) -> Routing:  # fmt: skip
    """With what the choice by inputs would have saved on the newest cells, which it does not know."""
    entered = sorted({used[c] for c in cells if used[c] != had[c]} & set(_places(before.models)))
    stack, former = _with_former(after.models, before.models, entered)
    routers = dict[int, Router]()
    own_votes = Votes.of(after.votes)
    voters = own_votes.model.copy()
    weights = own_votes.weight.copy()
    position = {i: m for m, i in enumerate(stack.ids)}
    for c, cell in cells.items():
        if had[c] not in position:
            continue
        places, data = _places(after.models), dict(now.data)
        data[used[c]] = _minus(data[used[c]], cell)
        if had[c] != used[c]:
            voters[c] = -1
            weights[c] = 0.0
            voters[c, 0] = position[had[c]]
            weights[c, 0] = 1.0
            places.pop(used[c], None)  # it has learned from these very rows
            places |= {i: m for i, m in former.items() if i == used[c]}
        router = _router(now, {i: sums for i, sums in data.items() if sums[0].any()}, places, per, len(stack))
        if router is not None and had[c] in data:
            routers[c] = router
    if not routers:
        return now
    clients = np.array(sorted(routers))
    votes = Votes(voters, weights, len(stack))
    counts = fed.reroute(stack, votes, after.ballot, routers)[clients]
    heard = counts[:, 0] > 0
    stayed = np.array([had[c] == used[c] for c in clients.tolist()])
    return replace(
        now,
        saved=np.concatenate([now.saved, (counts[:, 1] - counts[:, 2])[heard]]),
        rows=np.concatenate([now.rows, counts[heard, 0]]),
        stayed=np.concatenate([now.stayed, stayed[heard]]),
    )


def _places(models: Models) -> dict[int, int]:
    """The position of each shared model, by its id."""
    return {i: m for m, i in enumerate(models.ids) if not models.private[m]}


def _with_former(models: Models, before: Models, ids: Sequence[int]) -> tuple[Models, dict[int, int]]:
    """The models and, behind them, those of these ids as they were before; and where each of these stands."""
    if not ids:
        return models, {}
    first = max(unused_id(models), unused_id(before))
    names = [first + k for k in range(len(ids))]
    former = take(before, [_places(before)[i] for i in ids], names)
    return join(models, former), {i: len(models) + k for k, i in enumerate(ids)}


def _router(now: Routing, data: Data, places: Mapping[int, int], per: Per, n_models: int) -> Router | None:
    """A centre for each class of each of the models at these places; None where there is nothing to choose."""
    models = [i for i in places if i in data]
    if not 2 <= len(models) <= MOST_MODELS:
        return None
    parts = [data[i] for i in models]
    count, total, squares = (np.concatenate([sums[k] for sums in parts]) for k in range(3))
    votes = np.zeros((len(models), n_models))
    votes[np.arange(len(models)), [places[i] for i in models]] = 1.0
    votes = np.repeat(votes, len(parts[0][0]), axis=0)
    seen, n = count > 0, count[count > 0, None]
    within = (squares[seen] - total[seen] ** 2 / n).sum(axis=0)
    varies = within > ROUNDING * squares.sum(axis=0)
    scale = np.where(varies, np.sqrt(n.sum() / np.where(varies, within, 1.0)), 0.0)
    return Router(per, total[seen] / n * scale, votes[seen], project=now.project, scale=scale, margin=MARGIN)


def _decision(now: Routing, after: State) -> Event:
    reason = "inputs choose the model from now on" if now.pays else "inputs choose the model no more"
    numbers = {"mistakes_saved": int(now.saved.sum()), "rows": int(now.rows.sum())}
    return Event(
        "decided", after.models.ids[0], {"clients": [], "reason": f"{reason}, labels have shown why", **numbers}
    )


def _words(fed: TimeStep) -> tuple[int, int]:
    first, second = fed.key("projection")
    return int(first), int(second)


def _sums(moments: Moments) -> dict[int, Sums]:
    """By client: the sums of its new rows, where it has any."""
    count, mean, std = (getattr(moments, name)[:, 0] for name in ("count", "mean", "std"))
    mean, std = (np.where(count[..., None] > 0, value, 0.0) for value in (mean, std))
    total, squares = count[..., None] * mean, count[..., None] * (mean**2 + std**2)
    return {c: (count[c], total[c], squares[c]) for c in np.flatnonzero(count.any(axis=1)).tolist()}


def _plus(sums: Sums | None, cell: Sums) -> Sums:
    return cell if sums is None else (sums[0] + cell[0], sums[1] + cell[1], sums[2] + cell[2])


def _minus(sums: Sums, cell: Sums) -> Sums:
    return sums[0] - cell[0], sums[1] - cell[1], sums[2] - cell[2]


def _in_use(state: State) -> dict[int, int]:
    """By client: the id of the model with its heaviest vote."""
    return {c: state.models.ids[m] for c, m in enumerate(state.votes.argmax(axis=1).tolist())}


def _renamed(used: Mapping[int, int], after: State) -> dict[int, int]:
    """The same after the merges of this step."""
    names = dict(used)
    for event in after.events:
        if event.kind == "merged":
            names = {c: event.cause["into"] if i == event.model else i for c, i in names.items()}
    return names


def _merged(data: Data, after: State) -> dict[int, Sums]:
    """The sums of the models that are left, each with those that merged into it."""
    left: dict[int, Sums] = {}
    names = _renamed({i: i for i in data}, after)
    for i, sums in data.items():
        if names[i] in after.models.ids:
            left[names[i]] = _plus(left.get(names[i]), sums)
    return left
