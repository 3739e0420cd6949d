"""Routing, the condition `route`: inputs choose the voting model once labels have shown that this saves mistakes.

After each time step, clients send statistics by class of a random projection of their new inputs. The server sums them
for each model in use; the means of its classes are the centres of a model. An input is routed to another model if the
centres of that model are nearer than those of the client's model (see `Router`).

Routing is on if it has saved mistakes: each client counts, on its new, labelled data, the mistakes of the model that it
used before, and those of the model that inputs choose. Neither the centres nor the models of this comparison contain
these data: the model that the client uses now is compared as it was before the time step. The client sends only counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from feddrift.models import join, take, unused_id
from feddrift.router import ClassSums, Per, Router, Routing
from feddrift.types import Event, Models, Moments, Projection, State, Votes

if TYPE_CHECKING:
    from feddrift.engines.server.federation import TimeStep

PROJECTED_FEATURES = 32  # length of the random projection of an input
MARGIN_Z = 2.0  # standard errors by which the centres of another model must be nearer
MAX_ROUTED_MODELS = 32  # inputs are not routed if there are more models, for example after many clients created one
RELATIVE_ROUNDING = 1e-9  # share of the sum of squares below which a projected feature is constant

ModelSums = Mapping[int, ClassSums]  # by the id of a model


def update_routing(
    old_state: State, new_state: State, routing: Routing | None, fed: TimeStep, per: Per
) -> tuple[State, Routing | None]:
    """Update the condition after a time step.

    Args:
        old_state: The state before the time step.
        new_state: The state after it. If the algorithm set a router of its own, that remains and the condition ends.
        routing: The data of the condition before the time step; None at the first.
        fed: The federation of the time step.
        per: The rows from which inputs choose the voting model.

    Returns:
        The state with the router of the condition, and the data of the condition after the time step.
    """
    if new_state.router is not None:
        return new_state, None
    shared = np.flatnonzero(Votes.of(new_state.votes).used & ~new_state.models.private)
    if not len(shared):  # nothing to choose from now, but the sums of earlier steps are still valid
        return new_state, routing
    routing = routing or Routing(Projection(_derive_projection_key(fed), PROJECTED_FEATURES))
    any_model = replace(take(new_state.models, shared[:1], [new_state.models.ids[shared[0]]]), mask=None)
    new_sums = _compute_client_sums(fed.moments(any_model, "input", "class", routing.project))
    data = _merge_sums(routing.data, new_state)
    used = _find_used_models(new_state)
    used_before = _follow_merges(_find_used_models(old_state), new_state)
    for c, sums in new_sums.items():
        data[used[c]] = _add_sums(data.get(used[c]), sums)
    updated = replace(routing, data=data)
    if len(old_state.w):  # there was a test
        updated = _measure_savings(updated, new_sums, old_state, new_state, used, used_before, fed, per)
    events = new_state.events
    if updated.pays != routing.pays:
        events = (*events, _make_decision_event(updated, new_state))
    router = None
    if updated.pays:
        router = _build_router(updated, data, _find_shared_positions(new_state.models), per, len(new_state.models))
    return replace(new_state, router=router, events=events), updated


def _measure_savings(
    routing: Routing,
    new_sums: Mapping[int, ClassSums],
    old_state: State,
    new_state: State,
    used: Mapping[int, int],
    used_before: Mapping[int, int],
    fed: TimeStep,
    per: Per,
) -> Routing:
    """Add the mistakes on the new rows that routing would have saved, with centres and models without these rows.

    Args:
        routing: The data of the condition with the sums of the new rows.
        new_sums: By client, the sums of its new rows.
        old_state: The state before the time step.
        new_state: The state after it.
        used: By client, the id of the model that it uses.
        used_before: By client, the id of the model that it used before, after the merges of this time step.
        fed: The federation of the time step.
        per: The rows from which inputs choose.
    """
    newly_used = {used[c] for c in new_sums if used[c] != used_before[c]}
    ids = sorted(newly_used & set(_find_shared_positions(old_state.models)))
    stack, former = _append_former_models(new_state.models, old_state.models, ids)
    routers = dict[int, Router]()
    own_votes = Votes.of(new_state.votes)
    voters = own_votes.model.copy()
    weights = own_votes.weight.copy()
    stack_position = {i: m for m, i in enumerate(stack.ids)}
    for c, sums in new_sums.items():
        if used_before[c] not in stack_position:
            continue
        positions = _find_shared_positions(new_state.models)
        data = dict(routing.data)
        data[used[c]] = _subtract_sums(data[used[c]], sums)
        if used_before[c] != used[c]:
            voters[c] = -1
            weights[c] = 0.0
            voters[c, 0] = stack_position[used_before[c]]
            weights[c, 0] = 1.0
            positions.pop(used[c], None)  # it was trained on these rows
            positions |= {i: m for i, m in former.items() if i == used[c]}
        with_rows = {i: model_sums for i, model_sums in data.items() if model_sums[0].any()}
        router = _build_router(routing, with_rows, positions, per, len(stack))
        if router is not None and used_before[c] in data:
            routers[c] = router
    if not routers:
        return routing
    clients = np.array(sorted(routers))
    votes = Votes(voters, weights, len(stack))
    counts = fed.reroute(stack, votes, new_state.ballot, routers)[clients]
    replied = counts[:, 0] > 0
    stayed = np.array([used_before[c] == used[c] for c in clients.tolist()])
    return replace(
        routing,
        saved=np.concatenate([routing.saved, (counts[:, 1] - counts[:, 2])[replied]]),
        rows=np.concatenate([routing.rows, counts[replied, 0]]),
        stayed=np.concatenate([routing.stayed, stayed[replied]]),
    )


def _find_shared_positions(models: Models) -> dict[int, int]:
    """Return the position of each shared model, by its id."""
    return {i: m for m, i in enumerate(models.ids) if not models.private[m]}


def _append_former_models(models: Models, old_models: Models, ids: Sequence[int]) -> tuple[Models, dict[int, int]]:
    """Append the old models with these ids; return all models, and the positions of the appended ones."""
    if not ids:
        return models, {}
    first = max(unused_id(models), unused_id(old_models))
    new_ids = [first + k for k in range(len(ids))]
    former = take(old_models, [_find_shared_positions(old_models)[i] for i in ids], new_ids)
    return join(models, former), {i: len(models) + k for k, i in enumerate(ids)}


def _build_router(
    routing: Routing, data: ModelSums, positions: Mapping[int, int], per: Per, n_models: int
) -> Router | None:
    """Build a router with a centre for each class of each model at these positions.

    Returns:
        The router; None if there is a single model, or more than `MAX_ROUTED_MODELS`.
    """
    models = [i for i in positions if i in data]
    if not 2 <= len(models) <= MAX_ROUTED_MODELS:
        return None
    parts = [data[i] for i in models]
    count, total, squares = (np.concatenate([sums[k] for sums in parts]) for k in range(3))
    votes = np.zeros((len(models), n_models))
    votes[np.arange(len(models)), [positions[i] for i in models]] = 1.0
    votes = np.repeat(votes, len(parts[0][0]), axis=0)
    has_rows = count > 0
    n = count[has_rows, None]
    within = (squares[has_rows] - total[has_rows] ** 2 / n).sum(axis=0)
    varies = within > RELATIVE_ROUNDING * squares.sum(axis=0)
    scale = np.where(varies, np.sqrt(n.sum() / np.where(varies, within, 1.0)), 0.0)
    return Router(
        per, total[has_rows] / n * scale, votes[has_rows], project=routing.project, scale=scale, margin=MARGIN_Z
    )


def _make_decision_event(routing: Routing, new_state: State) -> Event:
    if routing.pays:
        reason = "from now on the inputs choose the model: the labels show that this makes fewer mistakes"
    else:
        reason = "the inputs no longer choose the model: the labels do not show that this makes fewer mistakes"
    numbers = {"mistakes_saved": int(routing.saved.sum()), "rows": int(routing.rows.sum())}
    return Event("decided", new_state.models.ids[0], {"clients": [], "reason": reason, **numbers})


def _derive_projection_key(fed: TimeStep) -> tuple[int, int]:
    first, second = fed.key("projection")
    return int(first), int(second)


def _compute_client_sums(moments: Moments) -> dict[int, ClassSums]:
    """Return the sums of the new rows of each client that has some."""
    count, mean, std = (getattr(moments, name)[:, 0] for name in ("count", "mean", "std"))
    mean, std = (np.where(count[..., None] > 0, value, 0.0) for value in (mean, std))
    total = count[..., None] * mean
    squares = count[..., None] * (mean**2 + std**2)
    return {c: (count[c], total[c], squares[c]) for c in np.flatnonzero(count.any(axis=1)).tolist()}


def _add_sums(a: ClassSums | None, b: ClassSums) -> ClassSums:
    return b if a is None else (a[0] + b[0], a[1] + b[1], a[2] + b[2])


def _subtract_sums(a: ClassSums, b: ClassSums) -> ClassSums:
    return a[0] - b[0], a[1] - b[1], a[2] - b[2]


def _find_used_models(state: State) -> dict[int, int]:
    """Return, by client, the id of the model with its heaviest vote."""
    return {c: state.models.ids[m] for c, m in enumerate(state.votes.argmax(axis=1).tolist())}


def _follow_merges(used: Mapping[int, int], new_state: State) -> dict[int, int]:
    """Replace the ids of models that merged in this time step by those that they merged into."""
    current = dict(used)
    for event in new_state.events:
        if event.kind == "merged":
            current = {c: event.cause["into"] if i == event.model else i for c, i in current.items()}
    return current


def _merge_sums(data: ModelSums, new_state: State) -> dict[int, ClassSums]:
    """Return the sums of the remaining models; those of models that merged into a model are added to its own."""
    merged: dict[int, ClassSums] = {}
    current = _follow_merges({i: i for i in data}, new_state)
    for i, sums in data.items():
        if current[i] in new_state.models.ids:
            merged[current[i]] = _add_sums(merged.get(current[i]), sums)
    return merged
