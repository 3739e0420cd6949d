"""The server's side of a time step, once for all engines: who is in reach, from w to work, L from sums, averages."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, final, get_args

import numpy as np

from feddrift import rng
from feddrift.averaging import averaged
from feddrift.engines.conditions.conditions import Conditions
from feddrift.engines.conditions.idle_models import badly_served
from feddrift.engines.conditions.robust import Guarded, middle
from feddrift.engines.server.cross_evaluation import axis_of, crossed
from feddrift.engines.server.feature_statistics import checked_width
from feddrift.engines.server.traffic import Traffic
from feddrift.engines.sparse_weights import Entries, by_group
from feddrift.engines.worker import SCORE_ROWS, Question, Scored, Work, Worker, lanes_left_out
from feddrift.errors import ConfigError
from feddrift.models import fresh, only_trained, take
from feddrift.trees import has_trunk, map_trunk_and_head
from feddrift.types import (
    Ballot,
    Bools,
    Floats,
    Ints,
    Layer,
    Local,
    Metric,
    Models,
    Moments,
    Net,
    Parting,
    Projection,
    Router,
    Start,
    Tournament,
    Updates,
    Votes,
    Weights,
)

log = logging.getLogger(__name__)


@final
class TimeStep:
    """The Federation at time tau; it lives as long as the optimiser's moments do: one time step."""

    def __init__(
        self, worker: Worker, tau: int, net: Net, local: Local, seed: int, conditions: Conditions,
        store: Callable[[Models], Models] = lambda models: models,
    ) -> None:  # fmt: skip
        self.worker, self.tau, self.local = worker, tau, local
        self._net, self._seed, self._conditions = net, seed, conditions
        self._store = store  # puts models where this engine's server stores them
        self.round = 0  # rounds trained so far
        self.resting: frozenset[int] = frozenset()  # ids of models that only badly served clients are sent to score
        self.quiet: Bools = np.zeros(self.n_clients, dtype=bool)  # [c], whose alarms are not acted on now
        self.alarms: Bools = np.zeros(self.n_clients, dtype=bool)  # [c], who raised one that would have been
        self._traffic = Traffic(self.n_clients)
        self._losses: dict[int, Floats] = {}  # by the id of a model: [c], how it did before anything was trained

    @property
    def n_clients(self) -> int:
        return len(self.worker.known.clients)

    @property
    def n_classes(self) -> int:
        return self.worker.known.n_classes

    @property
    def n_groups(self) -> int:
        return self.worker.known.n_groups

    @property
    def features(self) -> tuple[int, ...]:
        return self.worker.known.features

    @property
    def counts(self) -> Ints:
        return self.worker.known.counts

    @property
    def reachable(self) -> Bools:
        return self.worker.known.reachable

    @property
    def concepts(self) -> Ints | None:
        return self.worker.known.concepts

    @property
    def received(self) -> Ints:
        """[c], how many new rows each client says it has."""
        behind = self.worker.worker if isinstance(self.worker, Guarded) else self.worker
        return np.asarray(behind.known.counts[self.tau])

    @property
    def sent(self) -> Floats:
        """[c], models to and from each client so far; a trunk or a head alone is the part of a model that it is."""
        return self._traffic.sent

    @property
    def sent_scoring(self) -> Floats:
        """[c], the part of `sent` that was scored and not trained."""
        return self._traffic.sent_scoring

    def losses(self, ids: Ints) -> Floats:
        """[c], how the model with this id scored on the client's new data before any training; NaN if not asked."""
        by_client = [self._losses.get(int(i)) for i in ids]
        return np.array([np.nan if loss is None else loss[c] for c, loss in enumerate(by_client)])

    def key(self, purpose: str, *names: int | Ints) -> rng.Words:
        return rng.derive(self._seed, purpose, self.tau, *names)

    def fresh(self, n: int = 1, distinct: bool = False) -> Models:
        return self._store(fresh(self._net, self._seed, n, distinct))

    def allowed(self, alarms: Bools) -> Bools:
        self.alarms = self.alarms | alarms
        return np.asarray(alarms & ~self.quiet)

    def evaluate(self, models: Models, metric: Metric = "error", by: Parting | None = None) -> Floats:
        _check(metric)
        loss = np.full((self.n_clients, len(models), *axis_of(by, self.worker.known)), np.nan)
        for scored, positions, clients in self._scorers(models):
            cells = np.stack([np.full_like(clients, self.tau), clients], axis=1)
            for which, sums, sizes in self._scored(scored, cells, metric, None, by):
                with np.errstate(invalid="ignore"):  # a part without rows: 0 / 0
                    loss[np.ix_(clients[which], positions)] = np.swapaxes(sums / sizes, 0, 1)
        loss = np.where(np.isfinite(loss), loss, np.nan)
        if self.round == 0 and by is None:
            self._losses = dict(zip(models.ids, loss.T.copy(), strict=True)) | self._losses
        return loss

    def confusion(self, models: Models) -> Ints:
        counts = np.zeros((self.n_clients, len(models), self.n_classes, self.n_classes), dtype=np.int64)
        for scored, positions, clients in self._scorers(models):
            counts[np.ix_(clients, positions)] = self.worker.confusion(scored, clients)
        return counts

    def moments(
        self,
        models: Models,
        layer: Layer,
        by: Literal["all", "class"] = "all",
        project: Floats | Projection | None = None,
        square: bool = True,
    ) -> Moments:
        question = Question(layer, by, project, square)
        width = checked_width(self._net, self.worker.known, layer, by, project)
        parts, size = question.shape(width, self.n_classes)
        moments = Moments.nobody(self.n_clients, len(models), parts, size)
        sent_down = 0 if project is None or isinstance(project, Projection) else width * size
        for asked, positions, clients in self._scorers(models):
            self._traffic.tell(clients, sent_down + len(asked) * parts * ((1 + square) * size + 1), asked)
            answer = self.worker.describe(asked, clients, question)
            for name in ("count", "mean", "std"):
                getattr(moments, name)[np.ix_(clients, positions)] = getattr(answer, name)
        return moments

    def _scored(
        self, models: Models, cells: Ints, metric: Metric, most: int | None, by: Parting | None
    ) -> Iterator[Scored]:
        given = (models, cells, metric, most)  # an engine of somebody's own may know of no parts
        return self.worker.score(*given) if by is None else self.worker.score(*given, by)

    def cross_evaluate(
        self,
        models: Models,
        w: Weights | Entries,
        metric: Metric = "error",
        by: Parting | None = None,
        per_client: bool = False,
    ) -> Floats:
        _check(metric)
        parts = axis_of(by, self.worker.known)
        _check_shared(models, "cross_evaluate")
        entries = Entries.of(w, (self.tau + 1, self.n_clients, len(models)))
        asleep = self._asleep(models)
        asleep[entries.m[entries.t == self.tau]] = False  # woken, and chosen
        if asleep.any():  # no distance to any other
            each = (self.n_clients,) if per_client else ()
            L, awake = np.full((len(models), len(models), *each, *parts), np.nan), np.flatnonzero(~asleep)
            entries = entries.select(~asleep[entries.m])
            m, shape = np.searchsorted(awake, entries.m), (*entries.shape[:2], len(awake))
            entries = Entries(entries.t, entries.c, m, entries.value, shape)
            L[np.ix_(awake, awake)] = self.cross_evaluate(_part(models, awake), entries, metric, by, per_client)
            return L
        entries = entries.select((self.counts[entries.t, entries.c] > 0) & self.reachable[entries.c])
        self._traffic.score(np.unique(entries.c), models)
        agree = self._conditions.defend and not per_client
        score = partial(self._scored, models, metric=metric, most=SCORE_ROWS, by=by)
        L = crossed(score, entries, self.counts, parts, per_client or agree)
        return middle(L) if agree else L

    def local_updates(self, models: Models, w: Weights | Entries, local: Local | None = None) -> Updates:
        _check_shared(models, "local_updates")
        used, local = self._entries_in_use(models, w), local or self.local
        self._check_local(models, local)
        work = Work.of(models, self._drawn(used), self.counts)
        if len(work.client):
            self._traffic.train(models, work, 1, local)
            updates = self.worker.updates(models, work, self.round, local)
            updates = self._conditions.received(models, updates, partial(self.key, "garbage", self.round))
            self._warn_not_finite(models, work, lanes_left_out(models, work, updates))
        else:
            updates = work.updates(map_trunk_and_head(lambda leaf, _: leaf[:0], models, None, None))
        self.round += len(used.t) > 0
        return updates

    def train(
        self, models: Models, w: Weights, rounds: int | None = None, local: Local | None = None, of: int | None = None
    ) -> Models:
        """As in `Federation`; these rounds are the first `of` so many, which all follow, on the same data."""
        local = local or self.local
        self._check_local(models, local)
        rounds = local.rounds if rounds is None else rounds
        entries = self._entries_in_use(models, w)
        if not len(entries.t) or not rounds:
            return models
        trained = models
        if self._all_private(models, entries):  # nobody else takes part, looks or lies
            trained = self._rounds(trained, entries, rounds, local)
        elif local.average != "mean" or self._conditions.garbage:  # the server looks at every update
            for _ in range(rounds):
                trained = averaged(trained, self.local_updates(trained, entries, local), local.average)
        elif self._conditions.participation < 1:
            for _ in range(rounds):
                trained = self._rounds(trained, self._drawn(entries), 1, local)
        else:
            trained = self._rounds(trained, entries, rounds, local, of)
        return self._store(only_trained(models, trained, local.trains))

    def tournament(self, models: Models, w: Weights, parent: Ints, starts: Sequence[Start]) -> Tournament:
        _check_shared(models, "tournament")
        older = Entries.of(w, (self.tau, self.n_clients, len(models)))
        if parent.shape != (self.n_clients,):
            raise ValueError(f"a tournament needs a parent for each of {self.n_clients} clients, got {parent.shape}")
        if models.mask is not None:
            raise ValueError("models that see different inputs hold no tournament")
        takes_part = (parent >= 0) & (self.counts[self.tau] > 1) & self.reachable
        if not takes_part.any():
            return Tournament.nobody(self.n_clients, len(starts))
        older = older.select(takes_part[older.c] & (self.counts[older.t, older.c] > 0))
        return self.worker.trial(
            models, older, np.where(takes_part, parent, -1), starts, replace(self.local, pull=None)
        )

    def contest(self, models: Models, teams: Ints, held_by: Local | None = None) -> Tournament:
        if teams.ndim != 3 or teams.shape[1] != self.n_clients or teams.dtype.kind != "i":
            raise ValueError(f"teams must be whole numbers [k, {self.n_clients} clients, i], got {teams.shape}")
        if not ((teams >= -1) & (teams < len(models))).all():
            raise ValueError(f"teams must be positions of {len(models)} models, or -1")
        owner = np.append(np.array(models.owner, dtype=np.int64), -1)[teams]
        if ((owner >= 0) & (owner != np.arange(self.n_clients)[:, None])).any():
            raise ConfigError("a private model competes at its owner only: give other clients -1")
        if held_by is not None and not held_by.hold_out:
            raise ConfigError("held_by must hold something out: give it the hold_out that the models were trained with")
        n_rows = self.counts[self.tau] - (held_by is not None)  # of a single row nothing can be held out
        takes_part = (teams >= 0).any(axis=2).all(axis=0) & (n_rows > 0) & self.reachable
        if not len(teams) or not takes_part.any():
            return Tournament.nobody(self.n_clients, len(teams))
        teams = np.where(takes_part[:, None], teams, -1)
        self._send_teams(models, teams)
        return self.worker.contest(models, teams, held_by and replace(held_by, pull=None))

    def reroute(self, models: Models, votes: Floats | Votes, ballot: Ballot, routers: Mapping[int, Router]) -> Ints:
        """[c, 3], at the clients with a router: their new rows, the mistakes of votes[c] on them, and of its choice."""
        routers = {c: router for c, router in sorted(routers.items()) if c in self._new_data()}
        for c, router in routers.items():
            self._send_router(np.array([c]), models, router, votes[c], 3)
        return self.worker.reroute(models, votes, ballot, routers)

    def serve(self, models: Models, router: Router) -> None:
        """Clients in reach get what they need to choose by their inputs."""
        self._send_router(np.flatnonzero(self.reachable), models, router, np.zeros(len(models)), 0)

    def _send_router(self, clients: Ints, models: Models, router: Router, votes: Floats, answer: int) -> None:
        voters = (router.votes.any(axis=0) | (votes > 0)) & ~models.private
        self._traffic.score(clients, _part(models, np.flatnonzero(voters)))
        if router.model is not None:
            self._traffic.score(clients, router.model)
        self._traffic.tell(clients, router.size + answer, models)

    def _send_teams(self, models: Models, teams: Ints) -> None:
        """Shared models go to the clients where they compete, unless they are there already."""
        _, client, _ = found = np.nonzero(np.append(~models.private, False)[teams])  # -1: none
        pairs = np.unique(teams[found] * self.n_clients + client)
        of_pair, clients = np.divmod(pairs, self.n_clients)
        for m, at in by_group(of_pair):
            self._traffic.score(clients[at], take(models, [m], [models.ids[m]]))

    def progress(self) -> dict[str, Any]:
        """What the rest of this time step depends on, for a checkpoint: `restore` is the way back."""
        own = {"round": self.round, "losses": list(self._losses.items()), "moments": self.worker.save()}
        return own | self._traffic.save()

    def restore(self, progress: dict[str, Any]) -> None:
        """Go on where the time step was when `progress` gave this."""
        self.round, self._losses = progress["round"], dict(progress["losses"])
        self._traffic.load(progress)
        self.worker.load(progress if "reachable" in progress else progress["moments"])  # of 0.1: all in one

    def _rounds(self, models: Models, entries: Entries, rounds: int, local: Local, of: int | None = None) -> Models:
        work = replace(Work.of(models, entries, self.counts), until=self.round + max(rounds, of or 0))
        if len(work.client):
            self._traffic.train(models, work, rounds, local)
            before = models
            models, left_out = self.worker.rounds(models, work, self.round, self.round + rounds, local)
            self._warn_not_finite(before, work, left_out)
        self.round += rounds
        return models

    def _warn_not_finite(self, models: Models, work: Work, rounds: Ints) -> None:
        """Warn about clients whose updates contained NaN or infinity, with the number of rounds."""
        for lane in np.flatnonzero(rounds):
            pairs = np.flatnonzero(work.lane == lane)
            name = self.worker.known.clients[work.client[pairs[0]]]
            ids = ", ".join(str(models.ids[m]) for m in work.model[pairs])
            what = "tau=%d: client %s sent updates of model %s that are not finite or absurd, left out of %d rounds"
            log.warning(what, self.tau, name, ids, rounds[lane])

    def _drawn(self, entries: Entries) -> Entries:
        """The data of the clients that take part in the next round."""
        if self._conditions.participation == 1:
            return entries
        drawn = self._conditions.drawn(self.reachable, self.key("participation", self.round))
        return entries.select(drawn[entries.c])

    def _new_data(self) -> Ints:
        """The clients in reach that have new data, the only ones that can be scored."""
        return np.flatnonzero(self.reachable & (self.counts[self.tau] > 0))

    def _scorers(self, models: Models) -> Iterator[tuple[Models, Ints, Ints]]:
        """Models, their positions, and who scores them: shared ones all with new data, private ones their owner.

        Those at rest come last, for those whom the others serve badly.
        """
        clients, owner = self._new_data(), np.array(models.owner, dtype=np.int64)
        asleep = self._asleep(models)
        awake, scores = np.flatnonzero(~asleep), np.isin(np.arange(self.n_clients), clients)
        for group, places in by_group(owner[awake] + 1):  # 0: shared
            at, c = awake[places], group - 1
            if c < 0:
                part = _part(models, at)
                self._traffic.score(clients, part)
                yield part, at, clients
            elif scores[c]:
                yield _part(models, at), at, np.array([c])
        if asleep.any():
            at, awake = np.flatnonzero(asleep), np.flatnonzero((owner < 0) & ~asleep)
            if len(awake):
                clients = badly_served(self.worker, _part(models, awake), clients, self.tau)
            if len(clients):
                part = _part(models, at)
                self._traffic.score(clients, part)
                yield part, at, clients

    def _asleep(self, models: Models) -> Bools:
        return np.isin(models.ids, list(self.resting)) & ~models.private

    def _check_local(self, models: Models, local: Local) -> None:
        if local.trains == "trunk" and not has_trunk(models):
            raise ConfigError("trains='trunk' needs a net with a trunk and a head, this one has only one of them")
        if local.pull is None:
            return
        if np.ndim(local.pull.weight) and np.shape(local.pull.weight) != (self.n_clients,):
            n = np.shape(local.pull.weight)
            raise ConfigError(f"a pull needs one weight, or one for each of {self.n_clients} clients, got {n}")
        if (to := local.pull.to) is not None:
            _check_shared(to, "a pull")
            if len(to) not in (1, len(models)):
                raise ConfigError(f"a pull is to one model, or to one for each of {len(models)}, got {len(to)}")

    def _all_private(self, models: Models, entries: Entries) -> bool:
        """Whether these are data for private models, each its owner's own; both kinds at once are refused."""
        owner = np.array(models.owner, dtype=np.int64)[entries.m]
        private = owner >= 0
        if (private & (owner != entries.c)).any():
            raise ConfigError("a private model trains on its owner's data only")
        if private.any() and not private.all():
            raise ConfigError("private and shared models are trained apart: two calls of train")
        return bool(private.all())

    def _entries_in_use(self, models: Models, w: Weights | Entries) -> Entries:
        """The data in reach for models whose family is in use at tau."""
        w, on = Entries.of(w, (self.tau + 1, self.n_clients, len(models))), models.trunk_index
        w = w.select(self.reachable[w.c])
        return w.select(np.isin(on[w.m], on[w.m[w.t == self.tau]]) & (self.counts[w.t, w.c] > 0))


def _part(models: Models, at: Ints) -> Models:
    return models if len(at) == len(models) else take(models, at, [models.ids[m] for m in at])


def _check_shared(models: Models, verb: str) -> None:
    if models.private.any():
        raise ConfigError(f"{verb} is about models that clients share: leave out private ones")


def _check(metric: str) -> None:
    if metric not in get_args(Metric):
        raise ConfigError(f"metric must be error, loss or brier, got {metric!r}")
