"""FedDrift-Auto, in the making: one method, no setting that depends on the data.

    feddrift run --stream air-quality --algorithm experiments.auto:Auto

K are the shared models, each cell of data belongs to one of them (its home). At each client private models learn beside
them: F, a copy of its K that learns from the client's own cells of this home; L, its own model over time, from all of
its cells. A BEATS b: one-sided sign test on the rows that only one of them gets right; z: the same in standard errors.
R is the number of rounds, short = R / 4.

    judge   on the new data, before any training:
              which team would have been best so far: K, K + F, or K + F + L (pooled over clients)?
              a client that raised an alarm last time: did the votes of whom acted on it (else the trial's new model)
              do better than those of whom stayed? good or bad at 5 %; bad and acted on: it goes back.
              a trial without an alarm in which the new model is worse beyond doubt (z < -4): half a bad
            trust = (good + 2) / (good + bad + 3)
    try     clients whose error rises (z > 1), or whom another K serves better, train privately, short rounds each, on
            either half of the new data, judged on the other half:
              stay    K of home on the own cells of home and the half,
              new     the best K on the half alone,
              fresh   a fresh model on it
            the alternative is the best K if that is another one and nobody new BEATS it, else new or fresh
            alarm: the alternative over stay (and over K of home, if it is a K) by z > 2.33, or its error rose by
            z > 2.33 and z > -1
            acted on if trust > 1/2 or it is plain: the alternative has less than half of stay's mistakes
    act     switch to the best K, or found: founders train candidates for short rounds on half of their data, and found
            together if of neither its own is better than the other's by z > 0.84; a head on the parent's trunk, if the
            net has one, is enough unless the whole model is better by z > 0.84
            models merge that are alike: no more than 2 standard errors of a batch apart on all their data, and neither
            better than the other by z > 2 on its members' new data
    train   K on the cells (Algorithm 1)
    home    F: short rounds, L: R / 2 rounds. They vote as the team that was best so far;
            where an alarm was acted on just now, with trust, and the two halves of stay with 1 - trust

Still missing: private models of trials have no events (`check_algorithm` refuses that), and decisions no words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from feddrift import cluster
from feddrift.algorithms.trunk import merge_families
from feddrift.cluster import Clustering
from feddrift.models import join, mix, put, take
from feddrift.trees import has_trunk
from feddrift.types import Bools, Clusters, Event, Federation, Floats, Holds, Ints, Models, State, Tournament

FOLDS: tuple[Holds, ...] = ("last", "first")
STAY, NEW, FRESH, TUNED, OWN = 0, 2, 4, 6, 7  # kinds of private models; those of trials are two, one for each fold
KIND = 2**20  # ids of private models are (kind + 1) * KIND + client
HEADS = 2**30  # ids of heads on trial

AGAINST_STAY, AGAINST_NEW, AGAINST_BEST, AGAINST_HOME, AGAINST_FRESH = range(5)  # contestants of a trial


@dataclass(frozen=True, repr=False)
class AutoState(State):
    """What the method remembers besides the clusters."""

    w: Clusters
    good: float = 0.0  # alarms that paid
    bad: float = 0.0
    helped: tuple[float, float] = (0.0, 0.0)  # how much K + F, and K + F + L, would have gained over K, so far
    born: int = 1
    reference: Floats = field(kw_only=True, metadata={"newcomer": np.nan})  # [c], K's error on the last data
    size: Ints = field(kw_only=True, metadata={"newcomer": 0})  # [c], on how many rows
    came_from: Ints = field(kw_only=True, metadata={"newcomer": -1})  # [c], the id of the K it left just now
    tried: Bools = field(kw_only=True, metadata={"newcomer": False})  # [c], who held a trial


@dataclass(frozen=True)
class Scene:
    """The shared models, whose every past cell is, and how they do on the new data."""

    models: Models
    home: Clusters
    at: Ints  # [c], the model of each client
    error: Floats  # [c, m]
    events: tuple[Event, ...] = ()

    def without(self, gone: Ints, reason: str) -> Scene:
        """The scene without the models at these positions, which nobody is at."""
        if not len(gone):
            return self
        kept = ~np.isin(np.arange(len(self.models)), gone)
        now = Clustering(self.models, self.home).drop(gone, reason)
        at = (np.cumsum(kept) - 1)[self.at]
        return Scene(now.models, now.w, at, self.error[:, kept], self.events + now.events)


@dataclass(frozen=True)
class Decision:
    """What the trials of a time step led to."""

    tried: Bools  # [c]
    alarmed: Bools
    acted: Bools
    target: Ints  # [c], the model that a client is to have; that of a founder is still its old one
    founders: tuple[tuple[int, bool], ...]  # clients, and whether they begin afresh
    trials: tuple[Models, ...]  # the private models of the trials


@dataclass(frozen=True)
class FedDriftAuto:
    """The method; its fields are chances, standard errors, and shares of R, the same for all data."""

    short: float = 0.25
    long: float = 0.5
    look: float = 1.0
    alarm: float = 2.33
    least: float = -1.0
    doubt: float = 1.645
    alike: float = 0.84
    merge: float = 2.0

    def init(self, fed: Federation) -> AutoState:
        n = fed.n_clients
        nobody, nothing = np.zeros(n, dtype=bool), np.zeros(n, dtype=np.int64)
        votes = np.ones((n, 1))
        return AutoState(
            fed.fresh(),
            cluster.nobody(n),
            votes,
            "soft",
            reference=np.full(n, np.nan),
            size=nothing,
            came_from=nothing - 1,
            tried=nobody,
        )

    def step(self, state: State, fed: Federation) -> AutoState:
        assert isinstance(state, AutoState)
        at = np.flatnonzero(~state.models.private)
        shared = take(state.models, at, [state.models.ids[m] for m in at])
        home = Clusters(state.w.model.copy(), len(shared))
        scene = Scene(shared, home, newest_home(home), fed.evaluate(shared))
        scored = ~np.isnan(scene.error[:, 0])
        good, bad, helped = state.good, state.bad, state.helped
        if fed.tau:
            helped = self._helped(state, scene, scored, fed)
            scene, good, bad = self._judge(state, scene, scored, fed)
        trust = (good + 2) / (good + bad + 3)
        decision = self._try(state, scene, scored, trust, fed)
        now, born, events = self._act(state, scene, decision, fed)
        models = fed.train(now.models, now.w)
        at_home = newest_home(now.w)
        tuned, own = self._at_home(state, models, now.w, at_home, fed)
        everything = models
        for more in (tuned, own, *decision.trials):
            everything = join(everything, more)
        votes = self._votes(everything, at_home, helped, np.where(decision.acted, trust, 1.0))
        was_home = np.where(scored, scene.error[np.arange(fed.n_clients), decision.target], state.reference)
        was_home[[c for c, _ in decision.founders]] = np.nan
        return AutoState(
            everything,
            Clusters(now.w.model, len(everything)),
            votes,
            "soft",
            events=scene.events + events,
            drifted=decision.alarmed,
            good=good,
            bad=bad,
            helped=helped,
            born=born,
            reference=was_home if fed.tau else np.full(fed.n_clients, np.nan),  # an untrained model says nothing
            size=np.where(scored, fed.counts[-1], state.size),
            came_from=np.where(decision.acted, np.asarray(scene.models.ids)[scene.at], -1),
            tried=decision.tried,
        )

    # judge

    def _helped(self, state: AutoState, scene: Scene, scored: Bools, fed: Federation) -> tuple[float, float]:
        """How much the teams with private models would have gained over K alone, in all."""
        place = {i: m for m, i in enumerate(state.models.ids)}
        teams = np.full((3, fed.n_clients, 3), -1)
        for c in np.flatnonzero(scored):
            if private_id(TUNED, c) in place:
                team = self._team(place, scene, c)
                for k in range(3):
                    teams[k, c, : k + 1] = team[: k + 1]
        result = fed.contest(state.models, teams)
        judged = result.rows > 0
        wrong, rows = result.wrong[judged], result.rows[judged]
        gain = [float(((wrong[:, 0, 0] - wrong[:, k, k]) / rows).sum()) for k in (1, 2)]
        return state.helped[0] + gain[0], state.helped[1] + gain[1]

    def _team(self, place: dict[int, int], scene: Scene, c: int) -> list[int]:
        """K, F and L of a client, as positions in the whole stack, in which shared models come first."""
        return [place[scene.models.ids[scene.at[c]]], place[private_id(TUNED, c)], place[private_id(OWN, c)]]

    def _judge(self, state: AutoState, scene: Scene, scored: Bools, fed: Federation) -> tuple[Scene, float, float]:
        """Whether the last step's alarms have paid; those that were acted on and did not are undone."""
        place = {i: m for m, i in enumerate(state.models.ids)}
        size, judged = team_size(state.helped), scored & state.tried
        good, bad = state.good, state.bad
        if not judged.any():
            return scene, good, bad
        teams = np.full((2, fed.n_clients, 4), -1)
        for c in np.flatnonzero(judged):
            stay, new = ([place[private_id(kind + fold, c)] for fold in range(2)] for kind in (STAY, NEW))
            voters = self._team(place, scene, c)[:size]
            contestants = voters, new
            if (old := int(state.came_from[c])) >= 0:
                left = [place[old]] if old in place else []
                contestants = (left + stay if size > 1 else left or stay), voters
            for k, team in enumerate(contestants):
                teams[k, c, : len(team)] = team
        result = fed.contest(state.models, teams)
        home, at = scene.home.model.copy(), scene.at.copy()
        alarmed = state.drifted if state.drifted is not None else np.zeros(fed.n_clients, dtype=bool)
        for c in np.flatnonzero(judged & (result.rows > 0)):
            z = ahead(result.wrong[c], 1, 0)
            if not alarmed[c]:
                bad += 0.5 * (z < -4)
            elif z > self.doubt:
                good += 1
            elif z < -self.doubt:
                bad += 1
                if (old := int(state.came_from[c])) in scene.models.ids:
                    at[c] = scene.models.ids.index(old)
                    home[-1, c] = at[c] if home[-1, c] >= 0 else -1
        scene = replace(scene, home=Clusters(home, scene.home.n_models), at=at)
        unused = np.setdiff1d(np.arange(len(scene.models)), np.append(home[home >= 0], at))
        return scene.without(unused, "the alarm that it was made for did not pay"), good, bad

    # try

    def _try(self, state: AutoState, scene: Scene, scored: Bools, trust: float, fed: Federation) -> Decision:
        n, rows = fed.n_clients, fed.counts[-1]
        best, _ = cluster.best_models(scene.error, scene.at)
        rise = np.nan_to_num(self._rise(state, scene.error[np.arange(n), scene.at], rows), nan=0.0)
        tried = scored & (fed.tau > 0) & (rows > 1) & ((rise > self.look) | (best != scene.at))
        alarmed, acted, target = np.zeros(n, dtype=bool), np.zeros(n, dtype=bool), scene.at.copy()
        if not tried.any():
            return Decision(tried, alarmed, acted, target, (), ())
        trials, result = self._hold_trials(scene, best, tried, fed)
        founders = []
        for c in np.flatnonzero(tried & (result.rows > 0)):
            wrong = result.wrong[c]
            new = AGAINST_FRESH if cluster.beats(wrong, AGAINST_FRESH, AGAINST_NEW) else AGAINST_NEW
            switch = best[c] != scene.at[c] and not cluster.beats(wrong, new, AGAINST_BEST)
            z = ahead(wrong, AGAINST_BEST if switch else new, AGAINST_STAY)
            if switch:
                z = min(z, ahead(wrong, AGAINST_BEST, AGAINST_HOME))
            up = ahead(wrong, AGAINST_BEST, AGAINST_HOME) if switch else rise[c]
            alarmed[c] = z > self.alarm or (up > self.alarm and z > self.least)
            mistakes = np.diag(wrong)
            plain = z > self.alarm and 2 * mistakes[AGAINST_BEST if switch else new] < mistakes[AGAINST_STAY]
            acted[c] = alarmed[c] and (plain or (trust > 0.5 and fed.tau > 1))
            if acted[c] and switch:
                target[c] = best[c]
            elif acted[c]:
                founders.append((int(c), new == AGAINST_FRESH))
        return Decision(tried, alarmed, acted, target, tuple(founders), tuple(trials))

    def _rise(self, state: AutoState, error: Floats, rows: Ints) -> Floats:
        """By how many standard errors each client's model does worse than on the data before."""
        before, n = state.reference, np.maximum(state.size, 1)
        variance = error * (1 - error) / np.maximum(rows, 1) + before * (1 - before) / n
        return np.asarray((error - before) / np.maximum(np.sqrt(variance), 1e-9))

    def _hold_trials(self, scene: Scene, best: Ints, who: Bools, fed: Federation) -> tuple[list[Models], Tournament]:
        """The private models of all trials, and their mistakes on the halves that they were not trained on."""
        clients, n = np.flatnonzero(who), fed.n_clients
        place = np.full(n, -1)
        place[clients] = np.arange(len(clients))
        past = np.where((scene.home.model == scene.at) & who, place, -1)  # the own cells of this home
        with_past, alone = (
            Clusters(np.concatenate([rows, place[None]]), len(clients)) for rows in (past, np.full_like(past, -1))
        )
        kept: list[Models] = []
        total = Tournament.nobody(n, 5)
        for fold, holds in enumerate(FOLDS):
            local = replace(fed.local, hold_out=0.5, holds=holds)
            stay, new, fresh = (
                fed.train(private(source, at, kind + fold, clients), w, self._rounds(self.short, fed), local)
                for kind, source, at, w in (
                    (STAY, scene.models, scene.at[clients], with_past),
                    (NEW, scene.models, best[clients], alone),
                    (FRESH, fed.fresh(), np.zeros_like(clients), alone),
                )
            )
            stack, k = join(join(join(scene.models, stay), new), fresh), len(scene.models)
            teams = np.full((5, n, 1), -1)
            for contestant, at in {
                AGAINST_STAY: k + np.arange(len(clients)),
                AGAINST_NEW: k + len(clients) + np.arange(len(clients)),
                AGAINST_BEST: best[clients],
                AGAINST_HOME: scene.at[clients],
                AGAINST_FRESH: k + 2 * len(clients) + np.arange(len(clients)),
            }.items():
                teams[contestant, clients, 0] = at
            result = fed.contest(stack, teams, local)
            total = Tournament(total.rows + result.rows, total.wrong + result.wrong)
            kept += [stay, new]
        return kept, total

    # act

    def _act(
        self, state: AutoState, scene: Scene, decision: Decision, fed: Federation
    ) -> tuple[Clustering, int, tuple[Event, ...]]:
        """The clusters after switches, foundings and merges, how many ids are given, and what happened."""
        n_old, founders = len(scene.models), [c for c, _ in decision.founders]
        D, allowance = self._distances(scene, decision, fed)
        home = np.where(fed.counts[-1] > 0, decision.target, -1)
        home[founders] = -1
        now = Clustering(scene.models, scene.home).assign(home)
        born, events = state.born, tuple[Event, ...]()
        seen = decision.acted & (state.drifted if state.drifted is not None else False) & (state.came_from < 0)
        if fed.tau > 1:  # who alarmed before, and was not believed, had these data then already
            moved = np.flatnonzero(seen & (now.w.model[-2] >= 0) & (decision.target != scene.at))
            now.w.model[-2, moved] = decision.target[moved]
        if founders:
            groups, newborn = self._found(decision.founders, scene, born, fed)
            now = now.add(newborn, groups)
            for k, group in enumerate(groups):
                believed = [c for c in group if fed.tau > 1 and seen[c] and now.w.model[-2, c] >= 0]
                now.w.model[-2, believed] = n_old + k
            born += len(groups)
            reason = "new data contradict old ones"
            events = tuple(
                Event("created", i, {"clients": list(group), "reason": reason})
                for i, group in zip(newborn.ids, groups, strict=True)
            )
        if n_old > 1:
            apart = np.full((len(now.models),) * 2, np.inf)
            apart[:n_old, :n_old] = D
            if has_trunk(scene.models):
                now = merge_families(now, apart, 1.0, allowance, "error", fed)
            else:
                models, w, merged = cluster.merge_closest(now.models, now.w, apart, fed.counts, 1.0)
                now = Clustering(models, w, merged)
        return now, born, events + now.events

    def _distances(self, scene: Scene, decision: Decision, fed: Federation) -> tuple[Floats, float]:
        """How far apart models are, 1 being what may merge, and a standard error of a batch."""
        m, n = len(scene.models), fed.n_clients
        if m < 2:
            return np.full((m, m), np.inf), 0.0
        L = fed.cross_evaluate(scene.models, cluster.assign(scene.home, np.full(n, -1)), "error")
        rows = fed.counts[-1]
        batch = float(np.median(rows[rows > 0])) if rows.any() else 1.0
        own = np.diag(L)
        e = np.maximum.outer(own, own)
        D = cluster.distances(L)
        with np.errstate(invalid="ignore"):
            D = np.where(np.isfinite(D), D / np.maximum(self.merge * np.sqrt(2 * e * (1 - e) / batch), 1e-12), np.inf)
        result = fed.contest(scene.models, np.repeat(np.arange(m)[:, None, None], n, axis=1))
        belongs = (result.rows > 0) & ~np.isin(np.arange(n), [c for c, _ in decision.founders])
        for i in range(m):
            wrong = result.wrong[belongs & (decision.target == i)].sum(axis=0)
            for j in range(m):
                if i != j:
                    D[i, j] = max(D[i, j], ahead(wrong, i, j) / self.merge)
        mean = float(np.nanmean(own)) if np.isfinite(own).any() else 0.5
        return np.maximum(D, D.T), math.sqrt(mean * (1 - mean) / batch)

    def _found(
        self, founders: Sequence[tuple[int, bool]], scene: Scene, born: int, fed: Federation
    ) -> tuple[list[list[int]], Models]:
        """New models and the clients of each: founders whose candidates serve each other share one."""
        clients, m = [c for c, _ in founders], len(founders)
        best, _ = cluster.best_models(scene.error, scene.at)
        newborn = take(scene.models, best[clients], range(born, born + m))
        for k, (_, fresh) in enumerate(founders):
            newborn = put(newborn, k, fed.fresh()) if fresh else newborn
        local = replace(fed.local, hold_out=0.5)
        candidates = fed.train(newborn, new_data(fed, [[c] for c in clients]), self._rounds(self.short, fed), local)
        teams = np.full((m, fed.n_clients, 1), -1)
        teams[:, clients, 0] = np.arange(m)[:, None]
        wrong = fed.contest(candidates, teams, local).wrong[clients]
        better = np.array([[ahead(wrong[a], a, b) for b in range(m)] for a in range(m)])  # a's own, at its client
        D = np.maximum(better, better.T)
        np.fill_diagonal(D, np.inf)
        pairs, into = cluster.Pairs(D), np.arange(m)
        while m > 1 and (closest := pairs.closest())[2] <= self.alike:
            pairs.unite(closest[0], closest[1])
            into[into == closest[1]] = closest[0]
        left, group = np.unique(into, return_inverse=True)
        groups = [[clients[k] for k in np.flatnonzero(group == g)] for g in range(len(left))]
        share = (group == np.arange(len(left))[:, None]).astype(np.float64)
        own = mix(candidates, share / share.sum(axis=1, keepdims=True), range(born, born + len(left)))
        return groups, self._rooted(groups, own, scene, best, fed) if has_trunk(scene.models) else own

    def _rooted(self, groups: Sequence[list[int]], own: Models, scene: Scene, best: Ints, fed: Federation) -> Models:
        """Where a head on the parent's trunk does as well as a whole model, that."""
        m, local = len(groups), replace(fed.local, hold_out=0.5)
        parents = best[[group[0] for group in groups]]
        families = [scene.models.family[parent] for parent in parents]
        heads = take(scene.models, parents, range(HEADS, HEADS + m), families)
        rounds = self._rounds(self.short, fed)
        heads = fed.train(heads, new_data(fed, groups), rounds, replace(local, trains="head"))
        teams = np.full((2, fed.n_clients, 1), -1)
        for k, group in enumerate(groups):
            teams[:, group, 0] = np.array([[k], [m + k]])
        stack = join(own, heads)
        result = fed.contest(stack, teams, local)
        enough = [ahead(result.wrong[group].sum(axis=0), 0, 1) < self.alike for group in groups]
        at = [m + k if head else k for k, head in enumerate(enough)]
        return take(
            stack, at, own.ids, [f if head else i for f, i, head in zip(families, own.ids, enough, strict=True)]
        )

    # home

    def _at_home(
        self, state: AutoState, models: Models, w: Clusters, at_home: Ints, fed: Federation
    ) -> tuple[Models, Models]:
        """F, from K anew, on the own cells of this home; and L, as it was, on all own cells."""
        n, who = fed.n_clients, np.arange(fed.n_clients)
        own_cells = Clusters(np.where(w.model == at_home, who, -1), n)
        tuned = fed.train(private(models, at_home, TUNED, who), own_cells, self._rounds(self.short, fed))
        before = {i: m for m, i in enumerate(state.models.ids)}
        old = [before[private_id(OWN, c)] for c in range(n) if private_id(OWN, c) in before]
        stack = join(models, take(state.models, old, [state.models.ids[m] for m in old])) if old else models
        place = {i: m for m, i in enumerate(stack.ids)}
        starts = np.array([place.get(private_id(OWN, c), at_home[c]) for c in range(n)])
        own = private(stack, starts, OWN, who)
        return tuned, fed.train(own, Clusters(np.tile(who, (fed.tau + 1, 1)), n), self._rounds(self.long, fed))

    def _votes(self, models: Models, at_home: Ints, helped: tuple[float, float], trust: Floats) -> Floats:
        """The team that was best so far; where an alarm was acted on just now, those who stayed have 1 - trust."""
        n, size = len(at_home), team_size(helped)
        place, votes = {i: m for m, i in enumerate(models.ids)}, np.zeros((len(at_home), len(models)))
        for c in range(n):
            votes[c, [at_home[c], place[private_id(TUNED, c)], place[private_id(OWN, c)]][:size]] = trust[c] / size
            if trust[c] < 1:
                votes[c, [place[private_id(STAY + fold, c)] for fold in range(2)]] = (1 - trust[c]) / 2
        return votes

    def _rounds(self, share: float, fed: Federation) -> int:
        return max(1, round(share * fed.local.rounds))


def private_id(kind: int, c: int | np.integer[Any]) -> int:
    """The id of a client's private model of a kind."""
    return (kind + 1) * KIND + int(c)


def private(models: Models, at: Ints, kind: int, clients: Ints) -> Models:
    """Private copies of the models at these positions, one for each client."""
    ids = [private_id(kind, c) for c in clients]
    return take(models, at, ids, ids, clients.tolist())


def new_data(fed: Federation, groups: Sequence[Sequence[int]]) -> Clusters:
    """The newest data of each group's clients, and nothing else, train its model."""
    model = np.full((fed.tau + 1, fed.n_clients), -1)
    for k, group in enumerate(groups):
        model[-1, list(group)] = k
    return Clusters(model, len(groups))


def newest_home(w: Clusters) -> Ints:
    """[c], the model that each client's newest data went to; 0 before it had any."""
    home = np.zeros(w.model.shape[1], dtype=np.int64)
    for row in w.model:
        home = np.where(row >= 0, row, home)
    return home


def team_size(helped: tuple[float, float]) -> int:
    """How many of K, F and L vote: the team that would have gained most, the larger of equals."""
    tuned, both = helped
    return 3 if both >= max(tuned, 0.0) else 2 if tuned >= 0 else 1


def ahead(wrong: Ints, a: int, b: int) -> float:
    """By how many standard errors a is better than b, on the rows that only one of them gets right.

    >>> ahead(np.array([[3, 3], [3, 12]]), 0, 1)
    3.0
    """
    won, lost = int(wrong[b, b] - wrong[a, b]), int(wrong[a, a] - wrong[a, b])
    return (won - lost) / math.sqrt(max(1, won + lost))
