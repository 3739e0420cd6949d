"""Worker for clients on other machines: each request is an exchange of messages, and each reply is checked.

A client whose reply is missing or refused does not take part in the rest of the time step: its models are carried
over, and averages are computed without it. A model without any reply does not change.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from feddrift._internal.device_arrays import SHARED_ROWS
from feddrift.engines.flower import messages, model_parts
from feddrift.engines.flower.client import feature_statistics
from feddrift.engines.flower.client.routers import pack_router
from feddrift.engines.flower.messages import (
    Contest,
    Evaluate,
    EvaluateReply,
    RawParts,
    Request,
    Reroute,
    Train,
    Trial,
    pack_entries,
)
from feddrift.engines.flower.model_parts import Body, Part
from feddrift.engines.flower.server.exchange import WaitingRules
from feddrift.engines.local import sampling
from feddrift.engines.sparse_weights import Entries
from feddrift.engines.worker import (
    CellScores,
    FederationInfo,
    StatisticsRequest,
    TrainingPlan,
    Worker,
    concatenate_updates,
    run_rounds_sequentially,
)
from feddrift.models import get_params, take
from feddrift.nets import get_layer_width
from feddrift.trees import join_trunk_and_head, map_trunk_and_head, mark_trunk, split_trunk_and_head
from feddrift.types import (
    Ballot,
    Floats,
    Ints,
    Local,
    Metric,
    Models,
    Moments,
    Net,
    Parting,
    Router,
    Start,
    Tournament,
    Updates,
    Votes,
)

MAX_SHARED_WAIT_SECONDS = 3.0  # maximum time in one exchange that others wait for a client that trains alone

OutgoingRequest = tuple[Request, dict[str, Part]]  # a request, and all parts of the models that it names
ReplyReader = Callable[[int, Body, RawParts], Any]  # reads the reply of client c, or raises InvalidMessageError


class Transport(Protocol):
    """Part of the engine that the worker uses: its connection to the clients."""

    net: Net
    waiting: WaitingRules

    def send_requests(
        self, tau: int, requests: Mapping[int, OutgoingRequest], read_reply: ReplyReader, round: int | None
    ) -> dict[int, Any]:
        """Send requests of one kind, and return the checked replies by client."""
        ...

    def wait_for_quorum(self, tau: int, reachable: set[int], where: str, end: float) -> set[int]:
        """Wait until a quorum can be reached, and return the clients that can be reached again.

        Args:
            tau: The time step.
            reachable: The clients that can be reached.
            where: The exchange that waits, for messages.
            end: The deadline, a value of `time.monotonic()`.

        Raises:
            QuorumError: The deadline has passed.
        """
        ...


class Remote(Worker):
    """The clients in one time step."""

    def __init__(self, transport: Transport, tau: int, known: FederationInfo) -> None:
        self.transport = transport
        self.tau = tau
        self.known = known
        # By client, parts of the model, and metric with division: the number of rows and the sum of their scores, of
        # the newest data and of the stored data of each time step.
        self._scores: dict[tuple[int, str, str], tuple[Any, dict[int, Any]]] = {}
        # By family that one client trains alone: the first round that is not done yet.
        self._rounds_done: dict[int, int] = {}

    def save(self) -> dict[str, Any]:  # the optimiser's moments are stored by the clients
        return {
            "reachable": self.known.reachable,
            "counts": self.known.counts,
            "ahead": list(self._rounds_done.items()),
        }

    def load(self, saved: dict[str, Any]) -> None:
        self.known.reachable = self.known.reachable & saved["reachable"]
        self.known.counts = saved["counts"]  # the replies in the journal refer to these
        self._rounds_done = dict(saved.get("ahead", []))  # older checkpoints do not contain it

    def score(
        self, models: Models, cells: Ints, metric: Metric, max_rows: int | None = None, by: Parting | None = None
    ) -> Iterator[CellScores]:
        """Score the newest data, or with `max_rows` stored cells. One request returns the scores of both."""
        names = self._fetch_scores(np.unique(cells[:, 1]), models, metric, by)
        question = f"{metric} by {by}"
        which = np.flatnonzero(self.known.reachable[cells[:, 1]])
        if not len(which):
            return
        parts = () if by is None else (self.known.n_classes,)
        sums: Floats = np.zeros((len(models), len(which), *parts))
        sizes: Ints = np.zeros((len(which), *parts), dtype=np.int64)
        for k, (t, c) in enumerate(cells[which].tolist()):
            for m, name in enumerate(names):
                new, stored = self._scores[c, name, question]
                sizes[k], sums[m, k] = new if max_rows is None else stored[t]
        yield which, sums, sizes

    def confusion(self, models: Models, clients: Ints) -> Ints:
        n = self.known.n_classes
        counts = np.zeros((len(clients), len(models), n, n), dtype=np.int64)
        specs, parts = model_parts.describe_models(self.transport.net, models)

        def read_reply(c: int, body: Body, raw: RawParts) -> Ints:
            return messages.read_confusion(body, counts.shape[1:], int(self.known.counts[self.tau, c]))

        requests: dict[int, OutgoingRequest] = {int(c): (Evaluate("confusion", specs), parts) for c in clients}
        for c, confusion in self._send_requests(requests, read_reply).items():
            counts[np.searchsorted(clients, c)] = confusion
        return counts

    def describe(self, models: Models, clients: Ints, question: StatisticsRequest) -> Moments:
        net = self.transport.net
        known = self.known
        width = get_layer_width(net, question.layer, known.features, known.n_classes)
        parts, size = question.shape(width, known.n_classes)
        moments = Moments.empty(len(clients), len(models), parts, size)
        specs, model_arrays = model_parts.describe_models(net, models)

        def read_reply(c: int, body: Body, raw: RawParts) -> Moments:
            n = int(known.counts[self.tau, c])
            return feature_statistics.read_reply(body, (len(models), parts, size), n, question.square)

        request = feature_statistics.build_request(question, specs)
        requests: dict[int, OutgoingRequest] = {int(c): (request, model_arrays) for c in clients}
        for c, reply in self._send_requests(requests, read_reply).items():
            for name in ("count", "mean", "std"):
                getattr(moments, name)[np.searchsorted(clients, c)] = getattr(reply, name)[0]
        return moments

    def reroute(self, models: Models, votes: Floats | Votes, ballot: Ballot, routers: Mapping[int, Router]) -> Ints:
        counts = np.zeros((len(votes), 3), dtype=np.int64)
        requests = dict[int, OutgoingRequest]()
        all_votes = Votes.of(votes)
        for c, router in routers.items():
            voted = all_votes.model[c][all_votes.weight[c] > 0]
            used = np.union1d(voted, np.flatnonzero(router.votes.any(axis=0)))
            own_router = replace(router, votes=router.votes[:, used])
            used_models, own_votes, body = pack_router(
                take(models, used, [models.ids[m] for m in used]), all_votes.of_client(c, used), own_router
            )
            specs, parts = model_parts.describe_models(self.transport.net, used_models)
            requests[c] = Reroute(specs, own_votes.tolist(), ballot, body), parts

        def read_reply(c: int, body: Body, raw: RawParts) -> list[int]:
            return messages.read_reroute_reply(body, int(self.known.counts[self.tau, c]))

        for c, reply in self._send_requests(requests, read_reply).items():
            counts[c] = reply
        return counts

    def updates(self, models: Models, plan: TrainingPlan, round: int, local: Local) -> Updates:
        net = self.transport.net
        specs, parts = model_parts.describe_models(net, models)
        template = model_parts.init_template(net)
        is_trunk = mark_trunk(net, template)
        trunk_shapes, head_shapes = (model_parts.list_shapes(part) for part in split_trunk_and_head(template, is_trunk))
        plans: dict[int, TrainingPlan] = {}  # by client; the numbers of its lanes and pairs name the parts of its reply
        requests: dict[int, OutgoingRequest] = {}
        due = np.array([self._rounds_done.get(family, 0) <= round for family in models.family], dtype=bool)
        plan = plan.select(self.known.reachable, due)
        sharing_clients = _find_sharing_clients(models, plan)
        max_more = max(0, plan.until - round - 1)
        within = MAX_SHARED_WAIT_SECONDS if sharing_clients else self.transport.waiting.train / 2
        for c in np.unique(plan.client).tolist():
            plans[c] = plan.select(np.arange(len(self.known.clients)) == c)
            own_specs = [specs[m] for m in plans[c].model]
            request = Train(round, {}, own_specs, pack_entries(plans[c].data, plans[c].model))
            if max_more and c not in sharing_clients:
                request = replace(request, more=max_more, within=within)
            requests[c] = self._complete_train_request(request, c, plans[c].model, local, parts)

        def read_reply(c: int, body: Body, raw: RawParts) -> tuple[int, list[list[Part]]]:
            trunks = [trunk_shapes] * plans[c].n_lanes if local.trains != "head" and trunk_shapes else []
            heads = [head_shapes] * len(plans[c].model) if local.trains != "trunk" and head_shapes else []
            return messages.read_train_reply(body, raw, round, trunks, heads, 0 if c in sharing_clients else max_more)

        updates = []
        for c, (more, (trunks, heads)) in self._send_requests(requests, read_reply, round).items():
            self._rounds_done |= {models.family[m]: round + 1 + more for m in plans[c].model if more}
            first = np.unique(plans[c].lane, return_index=True)[1]  # [lane]; a client numbers lanes by their first pair
            if trunks:
                trunks = [trunks[k] for k in np.argsort(np.argsort(first))]
            else:
                positions = plans[c].model[first].tolist()
                trunks = [split_trunk_and_head(get_params(models, m), is_trunk)[0] for m in positions]
            heads = heads or [split_trunk_and_head(get_params(models, m), is_trunk)[1] for m in plans[c].model.tolist()]
            stacked = [[np.stack(rows) for rows in zip(*part, strict=True)] for part in (trunks, heads)]
            updates.append(plans[c].updates(join_trunk_and_head(stacked[0], stacked[1], is_trunk)))
        return concatenate_updates(models, plan, updates)

    def rounds(self, models: Models, plan: TrainingPlan, first: int, last: int, local: Local) -> tuple[Models, Ints]:
        if models.private[plan.model].any():
            return self._train_private(models, plan, first, last, local), np.zeros(plan.n_lanes, dtype=np.int64)
        return run_rounds_sequentially(self, models, plan, first, last, local)

    def _complete_train_request(
        self, request: Train, c: int, positions: Ints, local: Local, parts: dict[str, Part]
    ) -> OutgoingRequest:
        """Add the settings of local training and the targets of a pull to a request, and select its parts of models.

        Args:
            request: The request.
            c: The client.
            positions: The positions of its models.
            local: The settings of local training.
            parts: By name, the parts of these and other models.
        """
        request = replace(request, local=replace(local, pull=None).to_dict())
        if local.pull is not None:
            request = replace(request, pull=local.pull.get_client_weight(c))
            targets = local.pull.to
            if targets is not None:
                specs, target_parts = model_parts.describe_models(self.transport.net, targets)
                request = replace(request, to=[specs[m % len(specs)] for m in positions.tolist()])
                parts = parts | target_parts
        return request, _select_parts([*request.models, *request.to], parts)

    def _train_private(self, models: Models, plan: TrainingPlan, first: int, last: int, local: Local) -> Models:
        """Let each owner train and store its own models; the result contains only the labels of their new versions."""
        specs, parts = model_parts.describe_models(self.transport.net, models)
        label = model_parts.make_version_label(self.tau, last)
        requests = dict[int, OutgoingRequest]()
        plans = dict[int, TrainingPlan]()
        for c in np.unique(plan.client[self.known.reachable[plan.client]]).tolist():
            plans[c] = plan.select(np.arange(len(self.known.clients)) == c)
            own_specs = [specs[m] for m in plans[c].model]
            w = pack_entries(plans[c].data, plans[c].model)
            request = Train(first, {}, own_specs, w, last - first, label)
            requests[c] = self._complete_train_request(request, c, plans[c].model, local, parts)

        def read_reply(c: int, body: Body, raw: RawParts) -> object:
            return messages.read_train_reply(body, raw, first, [], [])

        replies = self._send_requests(requests, read_reply, first)
        trained = np.array([int(m) for c in replies for m in plans[c].model], dtype=int)
        labels = np.array(models.held, dtype=np.int64)
        labels[trained] = label
        params = map_trunk_and_head(SHARED_ROWS.clear_rows, models, trained, models.trunk_index[trained])
        return replace(models, params=params, held=tuple(labels.tolist()))

    def trial(self, models: Models, older: Entries, parent: Ints, starts: Sequence[Start], local: Local) -> Tournament:
        tournament = Tournament.empty(len(parent), len(starts))
        specs, parts = model_parts.describe_models(self.transport.net, models)

        def read_reply(c: int, body: Body, raw: RawParts) -> tuple[int, Ints]:
            return messages.read_tournament_reply(body, len(starts), 1, int(self.known.counts[self.tau, c]))

        requests: dict[int, OutgoingRequest] = {}
        for c in np.flatnonzero(parent >= 0).tolist():
            w = pack_entries(older.select(older.c == c))
            requests[c] = Trial(specs, int(parent[c]), list(starts), local.to_dict(), w), parts
        for c, (rows, wrong) in self._send_requests(requests, read_reply).items():
            tournament.rows[c] = rows
            tournament.wrong[c] = wrong
        return tournament

    def contest(self, models: Models, teams: Ints, held_by: Local | None) -> Tournament:
        """Send each client the models of its own teams, numbered from 0, and count their common mistakes."""
        tournament = Tournament.empty(teams.shape[1], len(teams))
        specs, parts = model_parts.describe_models(self.transport.net, models)
        n_rows = self.known.counts[self.tau]
        if held_by is not None:
            n_rows = n_rows - sampling.count_training_rows(n_rows, held_by.hold_out)

        def read_reply(c: int, body: Body, raw: RawParts) -> tuple[int, Ints]:
            return messages.read_tournament_reply(body, len(teams), int(n_rows[c]), int(n_rows[c]))

        requests: dict[int, OutgoingRequest] = {}
        for c in np.flatnonzero((teams >= 0).any(axis=2).all(axis=0)).tolist():
            used = np.unique(teams[:, c][teams[:, c] >= 0])
            own_teams = [np.searchsorted(used, team[team >= 0]).tolist() for team in teams[:, c]]
            own_specs = [specs[m] for m in used]
            request = Contest(own_specs, own_teams, None if held_by is None else held_by.to_dict())
            requests[c] = request, _select_parts(own_specs, parts)
        for c, (rows, wrong) in self._send_requests(requests, read_reply).items():
            tournament.rows[c] = rows
            tournament.wrong[c] = wrong
        return tournament

    def _fetch_scores(self, clients: Ints, models: Models, metric: Metric, by: Parting | None) -> list[str]:
        """Request the scores that these clients have not sent yet, and return the models' names in `_scores`."""
        specs, parts = model_parts.describe_models(self.transport.net, models)
        names = [f"{spec['trunk']} {spec['head']} {spec['mask']}" for spec in specs]
        unscored_by_client: dict[int, list[int]] = {}
        question = f"{metric} by {by}"
        n_parts = None if by is None else self.known.n_classes
        for c in clients.tolist():
            unscored = [m for m, name in enumerate(names) if (c, name, question) not in self._scores]
            unscored_by_client |= {c: unscored} if unscored else {}

        def read_reply(c: int, body: Body, raw: RawParts) -> EvaluateReply:
            counts = self.known.counts[: self.tau + 1, c]
            return EvaluateReply.from_body(body, counts, len(unscored_by_client[c]), metric, n_parts)

        requests: dict[int, OutgoingRequest] = {}
        for c, unscored in unscored_by_client.items():
            own_specs = [specs[m] for m in unscored]
            requests[c] = Evaluate(metric, own_specs, by), _select_parts(own_specs, parts)
        for c, reply in self._send_requests(requests, read_reply).items():
            for k, m in enumerate(unscored_by_client[c]):
                cells = {t: (size, sums[k]) for t, (size, sums) in reply.stored.items()}
                new = None if reply.new is None else (reply.new[0], reply.new[1][k])
                self._scores[c, names[m], question] = new, cells
        return names

    def _send_requests(
        self, requests: Mapping[int, OutgoingRequest], read_reply: ReplyReader, round: int | None = None
    ) -> dict[int, Any]:
        """Send requests and return the checked replies.

        Clients without a valid reply are unreachable until the next time step. If fewer than a quorum remain, wait for
        clients that come back, and repeat their requests.
        """
        replies: dict[int, Any] = {}
        waiting = dict(requests)
        end = 0.0
        rules = self.transport.waiting
        reachable = self.known.reachable
        while waiting:
            replies |= self.transport.send_requests(self.tau, waiting, read_reply, round)
            failed = [c for c in waiting if c not in replies]
            reachable[failed] = False
            if not failed or reachable.sum() >= rules.quorum:
                break
            kind = messages.KIND_BY_REQUEST[type(waiting[failed[0]][0])]
            where = kind + ("" if round is None else f" of round {round}")
            end = end or time.monotonic() + rules.patience
            back = self.transport.wait_for_quorum(self.tau, set(np.flatnonzero(reachable).tolist()), where, end)
            reachable[list(back)] = True
            waiting = {c: requests[c] for c in back if c in requests}
        return dict(sorted(replies.items()))


def _find_sharing_clients(models: Models, plan: TrainingPlan) -> set[int]:
    """Find the clients that share a family with another one, so that each of their rounds needs an average."""
    family = models.trunk_index[plan.model]
    pairs = np.unique(np.stack([family, plan.client]), axis=1)
    shared = np.bincount(pairs[0], minlength=len(models.families)) > 1
    return set(plan.client[shared[family]].tolist())


def _select_parts(specs: list[Body], parts: Mapping[str, Part]) -> dict[str, Part]:
    """Select the parts of these models; parts of private models are missing."""
    return {name: parts[name] for name in model_parts.collect_part_names(specs) if name in parts}
