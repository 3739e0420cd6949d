"""Clients at the other end of a network, as a Worker: every question is an exchange, every answer checked.

A client that misses an exchange, or answers with something that cannot be used, sits out the rest of the time step:
its identity is carried over, averages are formed without it, and a model without any reply stays as it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from feddrift._internal.device_arrays import SHARED_ROWS
from feddrift.engines.flower import messages, model_parts
from feddrift.engines.flower.client import described
from feddrift.engines.flower.client.routers import sent_with
from feddrift.engines.flower.messages import (
    Contest,
    Evaluate,
    Raw,
    Request,
    Reroute,
    Scores,
    Train,
    Trial,
    slice_of,
)
from feddrift.engines.flower.model_parts import Body, Part
from feddrift.engines.flower.server.exchange import WaitingRules
from feddrift.engines.local import sampling
from feddrift.engines.sparse_weights import Entries
from feddrift.engines.worker import Known, Question, Scored, Work, Worker, gathered, in_turn
from feddrift.models import params_of, take
from feddrift.nets import layer_width
from feddrift.trees import map_trunk_and_head, split, trunk_of, unsplit
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

SHORT = 3.0  # seconds that clients of common models may wait in one exchange for one that trains alone

Asked = tuple[Request, dict[str, Part]]  # a request, and all parts of the models that it names
Check = Callable[[int, Body, Raw], Any]  # what a client's reply says, or Refused


class Line(Protocol):
    """The way to the clients."""

    net: Net
    waiting: WaitingRules

    def ask(self, tau: int, requests: Mapping[int, Asked], check: Check, round: int | None) -> dict[int, Any]:
        """One exchange: the checked replies by client."""
        ...

    def wait_for(self, tau: int, reachable: set[int], where: str, end: float) -> set[int]:
        """Wait until a quorum can be reached again, or time is up; who has come back."""
        ...


class Remote(Worker):
    """One time step over the network."""

    def __init__(self, line: Line, tau: int, known: Known) -> None:
        self.line, self.tau, self.known = line, tau, known
        # By client, model and what was asked: how many rows and their sum, of the new batch and by stored cell.
        self._scores: dict[tuple[int, str, str], tuple[Any, dict[int, Any]]] = {}
        self._ahead: dict[int, int] = {}  # by family, the round before which all are done: one client trained it alone

    def save(self) -> dict[str, Any]:  # moments are where the training is
        return {
            "reachable": self.known.reachable,
            "counts": self.known.counts,
            "ahead": list(self._ahead.items()),
        }

    def load(self, saved: dict[str, Any]) -> None:
        self.known.reachable = self.known.reachable & saved["reachable"]
        self.known.counts = saved["counts"]  # what the known answers are about
        self._ahead = dict(saved.get("ahead", []))  # older checkpoints have none

    def score(
        self, models: Models, cells: Ints, metric: Metric, most: int | None = None, by: Parting | None = None
    ) -> Iterator[Scored]:
        """Cells without a `most` are of the newest data, all others are stored: Evaluate asks for both at once."""
        names, what = self._have_scored(np.unique(cells[:, 1]), models, metric, by), f"{metric} by {by}"
        which = np.flatnonzero(self.known.reachable[cells[:, 1]])
        if not len(which):
            return
        parts = () if by is None else (self.known.n_classes,)
        sums: Floats = np.zeros((len(models), len(which), *parts))
        sizes: Ints = np.zeros((len(which), *parts), dtype=np.int64)
        for k, (t, c) in enumerate(cells[which].tolist()):
            for m, name in enumerate(names):
                new, stored = self._scores[c, name, what]
                sizes[k], sums[m, k] = new if most is None else stored[t]
        yield which, sums, sizes

    def confusion(self, models: Models, clients: Ints) -> Ints:
        n = self.known.n_classes
        counts = np.zeros((len(clients), len(models), n, n), dtype=np.int64)
        specs, parts = model_parts.described(self.line.net, models)

        def check(c: int, body: Body, raw: Raw) -> Ints:
            return messages.read_confusion(body, counts.shape[1:], int(self.known.counts[self.tau, c]))

        asked = {int(c): (Evaluate("confusion", specs), parts) for c in clients}
        for c, of_client in self._ask(asked, check).items():
            counts[np.searchsorted(clients, c)] = of_client
        return counts

    def describe(self, models: Models, clients: Ints, question: Question) -> Moments:
        net, known = self.line.net, self.known
        width = layer_width(net, question.layer, known.features, known.n_classes)
        parts, size = question.shape(width, known.n_classes)
        moments = Moments.nobody(len(clients), len(models), parts, size)
        specs, model_arrays = model_parts.described(net, models)

        def check(c: int, body: Body, raw: Raw) -> Moments:
            n = int(known.counts[self.tau, c])
            return described.read(body, (len(models), parts, size), n, question.square)

        asked = {int(c): (described.asking(question, specs), model_arrays) for c in clients}
        for c, answer in self._ask(asked, check).items():
            for name in ("count", "mean", "std"):
                getattr(moments, name)[np.searchsorted(clients, c)] = getattr(answer, name)[0]
        return moments

    def reroute(self, models: Models, votes: Floats | Votes, ballot: Ballot, routers: Mapping[int, Router]) -> Ints:
        counts, asked = np.zeros((len(votes), 3), dtype=np.int64), dict[int, Asked]()
        own_votes = Votes.of(votes)
        for c, router in routers.items():
            voted = own_votes.model[c][own_votes.weight[c] > 0]
            used = np.union1d(voted, np.flatnonzero(router.votes.any(axis=0)))
            chosen = replace(router, votes=router.votes[:, used])
            voters, own, body = sent_with(
                take(models, used, [models.ids[m] for m in used]), own_votes.of_client(c, used), chosen
            )
            specs, parts = model_parts.described(self.line.net, voters)
            asked[c] = Reroute(specs, own.tolist(), ballot, body), parts

        def check(c: int, body: Body, raw: Raw) -> list[int]:
            return messages.read_rerouted(body, int(self.known.counts[self.tau, c]))

        for c, answer in self._ask(asked, check).items():
            counts[c] = answer
        return counts

    def updates(self, models: Models, work: Work, round: int, local: Local) -> Updates:
        net = self.line.net
        specs, parts = model_parts.described(net, models)
        like = model_parts.like(net)
        shape = trunk_of(net, like)
        trunk_shapes, head_shapes = (model_parts.shapes(part) for part in split(like, shape))
        mine: dict[int, Work] = {}  # by client; its lanes and pairs, counted from 0, name the parts of its reply
        asked: dict[int, Asked] = {}
        due = np.array([self._ahead.get(family, 0) <= round for family in models.family], dtype=bool)
        work = work.select(self.known.reachable, due)
        together, at_once = _with_others(models, work), max(0, work.until - round - 1)
        within = SHORT if together else self.line.waiting.train / 2
        for c in np.unique(work.client).tolist():
            mine[c] = work.select(np.arange(len(self.known.clients)) == c)
            own_specs = [specs[m] for m in mine[c].model]
            request = Train(round, {}, own_specs, slice_of(mine[c].data, mine[c].model))
            if at_once and c not in together:
                request = replace(request, more=at_once, within=within)
            asked[c] = self._told(request, c, mine[c].model, local, parts)

        def check(c: int, body: Body, raw: Raw) -> tuple[int, list[list[Part]]]:
            trunks = [trunk_shapes] * mine[c].n_lanes if local.trains != "head" and trunk_shapes else []
            heads = [head_shapes] * len(mine[c].model) if local.trains != "trunk" and head_shapes else []
            return messages.read_trained(body, raw, round, trunks, heads, 0 if c in together else at_once)

        replies = []
        for c, (more, (trunks, heads)) in self._ask(asked, check, round).items():
            self._ahead |= {models.family[m]: round + 1 + more for m in mine[c].model if more}
            first = np.unique(mine[c].lane, return_index=True)[1]  # [lane]; a client counts its lanes as they come
            if trunks:
                trunks = [trunks[k] for k in np.argsort(np.argsort(first))]
            else:
                trunks = [split(params_of(models, m), shape)[0] for m in mine[c].model[first].tolist()]
            heads = heads or [split(params_of(models, m), shape)[1] for m in mine[c].model.tolist()]
            stacked = [[np.stack(rows) for rows in zip(*part, strict=True)] for part in (trunks, heads)]
            replies.append(mine[c].updates(unsplit(stacked[0], stacked[1], shape)))
        return gathered(models, work, replies)

    def rounds(self, models: Models, work: Work, first: int, last: int, local: Local) -> tuple[Models, Ints]:
        if models.private[work.model].any():
            return self._train_private(models, work, first, last, local), np.zeros(work.n_lanes, dtype=np.int64)
        return in_turn(self, models, work, first, last, local)

    def _told(self, request: Train, c: int, members: Ints, local: Local, parts: dict[str, Part]) -> Asked:
        """The request with how client c trains these models, and where they are pulled; and all parts of models."""
        request = replace(request, local=replace(local, pull=None).plain())
        if local.pull is not None:
            request = replace(request, pull=local.pull.on(c))
            if (to := local.pull.to) is not None:
                specs, more = model_parts.described(self.line.net, to)
                request = replace(request, to=[specs[m % len(specs)] for m in members.tolist()])
                parts = parts | more
        return request, _parts_of([*request.models, *request.to], parts)

    def _train_private(self, models: Models, work: Work, first: int, last: int, local: Local) -> Models:
        """Each owner trains its own models and keeps them: what remains here is the name of the new version."""
        specs, parts = model_parts.described(self.line.net, models)
        label, asked, mine = model_parts.label_of(self.tau, last), dict[int, Asked](), dict[int, Work]()
        for c in np.unique(work.client[self.known.reachable[work.client]]).tolist():
            mine[c] = work.select(np.arange(len(self.known.clients)) == c)
            own_specs, w = [specs[m] for m in mine[c].model], slice_of(mine[c].data, mine[c].model)
            request = Train(first, {}, own_specs, w, last - first, label)
            asked[c] = self._told(request, c, mine[c].model, local, parts)

        def check(c: int, body: Body, raw: Raw) -> object:
            return messages.read_trained(body, raw, first, [], [])

        answered = self._ask(asked, check, first)
        trained = np.array([int(m) for c in answered for m in mine[c].model], dtype=int)
        held = np.array(models.held, dtype=np.int64)
        held[trained] = label
        params = map_trunk_and_head(SHARED_ROWS.without_values, models, trained, models.trunk_index[trained])
        return replace(models, params=params, held=tuple(held.tolist()))

    def trial(self, models: Models, older: Entries, parent: Ints, starts: Sequence[Start], local: Local) -> Tournament:
        tournament = Tournament.nobody(len(parent), len(starts))
        specs, parts = model_parts.described(self.line.net, models)

        def check(c: int, body: Body, raw: Raw) -> tuple[int, Ints]:
            return messages.read_tournament(body, len(starts), 1, int(self.known.counts[self.tau, c]))

        asked: dict[int, Asked] = {}
        for c in np.flatnonzero(parent >= 0).tolist():
            w = slice_of(older.select(older.c == c))
            asked[c] = Trial(specs, int(parent[c]), list(starts), local.plain(), w), parts
        for c, (rows, wrong) in self._ask(asked, check).items():
            tournament.rows[c], tournament.wrong[c] = rows, wrong
        return tournament

    def contest(self, models: Models, teams: Ints, held_by: Local | None) -> Tournament:
        """Each client gets the models of its own teams, which are numbered from 0 in its message."""
        tournament = Tournament.nobody(teams.shape[1], len(teams))
        specs, parts = model_parts.described(self.line.net, models)
        n_rows = self.known.counts[self.tau]
        if held_by is not None:
            n_rows = n_rows - sampling.trained_rows(n_rows, held_by.hold_out)

        def check(c: int, body: Body, raw: Raw) -> tuple[int, Ints]:
            return messages.read_tournament(body, len(teams), int(n_rows[c]), int(n_rows[c]))

        asked: dict[int, Asked] = {}
        for c in np.flatnonzero((teams >= 0).any(axis=2).all(axis=0)).tolist():
            used = np.unique(teams[:, c][teams[:, c] >= 0])
            own_teams = [np.searchsorted(used, team[team >= 0]).tolist() for team in teams[:, c]]
            own_specs = [specs[m] for m in used]
            request = Contest(own_specs, own_teams, None if held_by is None else held_by.plain())
            asked[c] = request, _parts_of(own_specs, parts)
        for c, (rows, wrong) in self._ask(asked, check).items():
            tournament.rows[c], tournament.wrong[c] = rows, wrong
        return tournament

    def _have_scored(self, clients: Ints, models: Models, metric: Metric, by: Parting | None) -> list[str]:
        """Have these clients score what they have not scored yet; the names under which the models' scores are kept."""
        specs, parts = model_parts.described(self.line.net, models)
        names = [f"{spec['trunk']} {spec['head']} {spec['mask']}" for spec in specs]
        lacking: dict[int, list[int]] = {}
        what, n_parts = f"{metric} by {by}", None if by is None else self.known.n_classes
        for c in clients.tolist():
            unscored = [m for m, name in enumerate(names) if (c, name, what) not in self._scores]
            lacking |= {c: unscored} if unscored else {}

        def check(c: int, body: Body, raw: Raw) -> Scores:
            return Scores.read(body, self.known.counts[: self.tau + 1, c], len(lacking[c]), metric, n_parts)

        asked: dict[int, Asked] = {}
        for c, unscored in lacking.items():
            own_specs = [specs[m] for m in unscored]
            asked[c] = Evaluate(metric, own_specs, by), _parts_of(own_specs, parts)
        for c, scores in self._ask(asked, check).items():
            for k, m in enumerate(lacking[c]):
                cells = {t: (size, sums[k]) for t, (size, sums) in scores.stored.items()}
                new = None if scores.new is None else (scores.new[0], scores.new[1][k])
                self._scores[c, names[m], what] = new, cells
        return names

    def _ask(self, asked: Mapping[int, Asked], check: Check, round: int | None = None) -> dict[int, Any]:
        """An exchange; who fails in it is out of reach until the next time step, unless a quorum needs it back."""
        replies: dict[int, Any] = {}
        waiting, end, rules, reachable = dict(asked), 0.0, self.line.waiting, self.known.reachable
        while waiting:
            replies |= self.line.ask(self.tau, waiting, check, round)
            lost = [c for c in waiting if c not in replies]
            reachable[lost] = False
            if not lost or reachable.sum() >= rules.quorum:
                break
            kind = messages.KIND_OF[type(waiting[lost[0]][0])]
            where = f"{kind}" + ("" if round is None else f" of round {round}")
            end = end or time.monotonic() + rules.patience
            back = self.line.wait_for(self.tau, set(np.flatnonzero(reachable).tolist()), where, end)
            reachable[list(back)] = True
            waiting = {c: asked[c] for c in back if c in asked}
        return dict(sorted(replies.items()))


def _with_others(models: Models, work: Work) -> set[int]:
    """The clients that share a family with another one, so that each of their rounds needs an average."""
    family = models.trunk_index[work.model]
    pairs = np.unique(np.stack([family, work.client]), axis=1)
    shared = np.bincount(pairs[0], minlength=len(models.families)) > 1
    return set(work.client[shared[family]].tolist())


def _parts_of(specs: list[Body], parts: Mapping[str, Part]) -> dict[str, Part]:
    return {name: parts[name] for name in model_parts.named(specs) if name in parts}
