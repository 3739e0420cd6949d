"""FedDrift-Auto: one method, no setting that depends on the data.

Shared models are clusters; every cell of data belongs to one, its home. At each client private models learn beside them
(at_home.py). R is the number of rounds, short = R / 4. The numbers below are chances and standard errors (z), the same
for all data.

    judge   on the new data, before any training, at the clients that held a trial last time:
              an alarm was acted on: did the votes of now do better than those of whom stayed?
              an alarm was not acted on: would a model of the then new data alone have done better than its votes?
              good or bad at 5 %; bad and acted on: the client goes back
              no alarm, but new looked as good as stay: half a bad where new is now worse beyond doubt (z < -4)
            trust = (good + 2) / (good + bad + 3)
            which team would have been best so far: the shared model, with tuned, with tuned and own? (at the first
            time step half of the data tell)
    try     clients whose error rises (z > 1) or is compared for the first time, or whom another shared model serves
            better, hold a trial (conflict.py)
            alarm: another shared model is ahead by z > 1.28; or a model of the new data alone is needed, at a rate of
            false alarms of at most 20 % (Benjamini and Hochberg over the clients of this time step)
            acted on if trust > 1/2, from the third time step on; at once if it is plain: z > 4 and half the mistakes
    act     switch, or found (founding.py): together where of neither its own candidate is better by z > 0.84; as a head
            on the parent's trunk unless the whole model is better
            models merge that are no more than 2 standard errors apart, on all their data and on their members' new ones
    train   the shared models on their cells (the paper's Algorithm 1): the traffic of this method
    home    tuned: short rounds, own: R / 2 rounds, nothing sent

What was tried and what each part is worth: docs/auto.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from feddrift import clustering
from feddrift.algorithms.auto import new_clusters, private_models, trials
from feddrift.algorithms.auto.private_models import NEW, OWN, STAY, TUNED, Gain, positions, private_id
from feddrift.algorithms.auto.trials import Trial
from feddrift.algorithms.feddrift.detection import TOO_SOON
from feddrift.clustering import Clustering
from feddrift.models import join
from feddrift.types import Bools, Clusters, Event, Federation, Floats, Ints, Models, State, Tournament, Votes

LONELY = 3  # time steps that a model of one client's data is kept for others


@dataclass(frozen=True, repr=False)
class AutoState(State):
    """What the method remembers besides the clusters."""

    w: Clusters
    good: float = 0.0  # alarms that paid
    bad: float = 0.0
    helped: Gain = (0.0, 0.0)  # what tuned, and tuned and own, would have gained over the shared model
    born: int = 1  # the next id
    error: Floats = field(kw_only=True, metadata={"newcomer": np.nan})  # [c], of the home's model on the last data
    rows: Ints = field(kw_only=True, metadata={"newcomer": 0})  # [c], how many these were
    left: Ints = field(kw_only=True, metadata={"newcomer": -1})  # [c], the id of the model that it left just now
    looked: Bools = field(kw_only=True, metadata={"newcomer": False})  # [c], whose trial the next data judge


@dataclass(frozen=True)
class Scene:
    """The shared models, whose every past cell is, and how they do on the new data."""

    now: Clustering
    at: Ints  # [c], the position of each client's model
    mistakes: Tournament  # of all shared models on the new data
    good: float
    bad: float
    helped: Gain

    @property
    def models(self) -> Models:
        return self.now.models

    @property
    def scored(self) -> Bools:
        """[c], who has new data and is in reach."""
        return np.asarray(self.mistakes.rows > 0)

    @property
    def error(self) -> Floats:
        """[c, m], NaN for who is not scored."""
        wrong, rows = np.diagonal(self.mistakes.wrong, axis1=1, axis2=2), self.mistakes.rows[:, None]
        return np.asarray(np.divide(wrong, rows, out=np.full(wrong.shape, np.nan), where=rows > 0))

    @property
    def best(self) -> Ints:
        """[c], the position of the model that serves each client best; its own for who is not scored."""
        return clustering.best_models(self.error, self.at)[0]

    @property
    def trust(self) -> float:
        """How likely an alarm is to pay."""
        return (self.good + 2) / (self.good + self.bad + 3)

    @property
    def track_record(self) -> str:
        return f"{self.good:g} alarms have paid so far, {self.bad:g} have not"


@dataclass(frozen=True)
class Decisions:
    """What the trials of a time step led to."""

    alarmed: Bools  # [c]
    acted: Bools
    looked: Bools
    target: Ints  # [c], the position of the model that a client is to have; that of a founder is still its old one
    founders: list[int]
    trials: dict[int, Trial]
    private: list[Models]  # the private models of the trials
    events: tuple[Event, ...]


@dataclass(frozen=True)
class FedDriftAuto:
    """Split on conflict, trust by outcome, and let private models vote where that has helped."""

    short: float = 0.25  # shares of R
    long: float = 0.5
    look: float = 1.0  # standard errors
    switch: float = 1.28
    least: float = -1.0
    doubt: float = 1.645
    beyond: float = 4.0
    alike: float = 0.84
    merge: float = 2.0
    false: float = 0.2  # share of false alarms

    def init(self, fed: Federation) -> AutoState:
        n = fed.n_clients
        private_models.check_client_count(n)
        unknown, none = np.full(n, np.nan), np.zeros(n, dtype=np.int64)
        return AutoState(
            fed.fresh(), clustering.nobody(n), Votes.for_one_model(none, 1), "soft",
            error=unknown, rows=none, left=none - 1, looked=np.zeros(n, dtype=bool),
        )  # fmt: skip

    def step(self, state: State, fed: Federation) -> AutoState:
        assert isinstance(state, AutoState)
        private_models.check_client_count(fed.n_clients)  # clients may have joined
        scene = self._judged(state, fed)
        decided = self._decide(state, scene, fed)
        now, born, held = self._act(state, scene, decided, fed)
        home = newest_home(now.w)
        models = fed.train(now.models, _at_most_two(now, home, fed.counts))
        rounds = self._rounds(self.short, fed), self._rounds(self.long, fed)
        helped = scene.helped if fed.tau else private_models.first_gain(models, now.w, home, rounds, fed)
        ids = [private_id(kind, c) for kind in (TUNED, OWN) for c in range(fed.n_clients)]
        before = private_models.only(state.models, ids) if fed.tau else None
        models = join(models, private_models.learn(before, models, now.w, home, rounds, fed), *decided.private)
        compared = scene.scored & ~held  # an alarm that was held back, and is right, comes again
        known = np.where(compared, scene.error[np.arange(fed.n_clients), decided.target], state.error)
        known[[c for c in decided.founders if not held[c]]] = np.nan
        return AutoState(
            models,
            Clusters(now.w.model, len(models)),
            private_models.votes(models, home, private_models.team_size(helped)),
            "soft",
            events=now.events,
            drifted=decided.alarmed,
            good=scene.good,
            bad=scene.bad,
            helped=helped,
            born=born,
            error=known if fed.tau else np.full(fed.n_clients, np.nan),  # an untrained model says nothing
            rows=np.where(compared, fed.counts[-1], state.rows),
            left=np.where(decided.acted & ~held, np.asarray(scene.models.ids)[scene.at], -1),
            looked=decided.looked,
        )

    def _rounds(self, share: float, fed: Federation) -> int:
        return max(1, round(share * fed.local.rounds))

    # judge

    def _judged(self, state: AutoState, fed: Federation) -> Scene:
        """How the shared models do on the new data, after what these say about the last decisions."""
        shared = [i for i, owner in zip(state.models.ids, state.models.owner, strict=True) if owner < 0]
        now = Clustering(private_models.only(state.models, shared), Clusters(state.w.model.copy(), len(shared)))
        everyone = np.repeat(np.arange(len(shared))[:, None, None], fed.n_clients, axis=1)
        at, mistakes = newest_home(now.w), fed.contest(now.models, everyone)
        scene = Scene(now, at, mistakes, state.good, state.bad, state.helped)
        if not fed.tau or not scene.scored.any():
            return scene
        judged = scene.scored & state.looked
        alarmed = judged & (state.drifted if state.drifted is not None else False)
        result = fed.contest(state.models, self._teams(state, scene, judged, alarmed, fed))
        gain = private_models.gained(result)
        helped = state.helped[0] + gain[0], state.helped[1] + gain[1]
        events = self._gate_told(state.helped, helped, now)
        good, bad, home, at = state.good, state.bad, now.w.model.copy(), at.copy()
        for c in np.flatnonzero(judged & (result.rows > 0)):
            z = trials.ahead(result.wrong[c], 4, 3)
            if not alarmed[c]:
                bad += 0.5 * (z < -self.beyond)
            elif z > self.doubt:
                good += 1
            elif z < -self.doubt:
                bad += 1
                if (old := int(state.left[c])) in now.models.ids:
                    why = f"the alarm of the last time step did not pay ({trials.chance(-z)}): back from model"
                    reason = f"{why} {now.models.ids[at[c]]} to model {old}"
                    at[c] = now.models.ids.index(old)
                    home[-1, c] = at[c]
                    events.append(Event("decided", old, {"clients": [int(c)], "reason": reason}))
        now = replace(now, w=Clusters(home, now.w.n_models)).tell(events)
        scene = replace(scene, now=now, at=at, good=good, bad=bad, helped=helped)
        return _without_unused(scene)

    def _teams(self, state: AutoState, scene: Scene, judged: Bools, alarmed: Bools, fed: Federation) -> Ints:
        """The contestants of the new data: the three teams that might vote, then staying and acting."""
        place, size = positions(state.models), private_models.team_size(state.helped)
        teams = np.full((5, fed.n_clients, 3), -1)
        for c in np.flatnonzero(scene.scored):
            shared = place[scene.models.ids[scene.at[c]]]
            whole = private_models.team(place, shared, c) if private_id(TUNED, c) in place else []
            contestants = [whole[:k] for k in (1, 2, 3)] + [[shared], [shared]]
            if judged[c] and whole:
                stay, new = ([place[private_id(kind + half, c)] for half in range(2)] for kind in (STAY, NEW))
                contestants[3:] = [whole[:size] if alarmed[c] else stay, new]
                if (old := int(state.left[c])) >= 0:
                    before = [place[old]] if old in place else []
                    contestants[3:] = [before + stay if size > 1 else before or stay, whole[:size]]
            for k, members in enumerate(contestants):
                teams[k, c, : len(members)] = members
        return teams

    def _gate_told(self, before: Gain, after: Gain, now: Clustering) -> list[Event]:
        """The event of private models that begin or cease to vote."""
        old, new = private_models.team_size(before), private_models.team_size(after)
        if old == new:
            return []
        who = {1: "the shared models vote alone", 2: "tuned copies vote", 3: "tuned copies and own models vote"}[new]
        reason = f"from now on {who}: that would have been best so far"
        return [Event("decided", now.models.ids[0], {"clients": [], "reason": reason})]

    # try

    def _decide(self, state: AutoState, scene: Scene, fed: Federation) -> Decisions:
        n, rows, models = fed.n_clients, fed.counts[-1], scene.models
        best = scene.best
        rise = trials.risen(scene.error[np.arange(n), scene.at], rows, state.error, state.rows)
        reason = (rise > self.look) | np.isnan(rise) | (best != scene.at)
        who = scene.scored & (fed.tau > 0) & (rows > 1) & reason
        trial_of, private = dict[int, Trial](), list[Models]()
        if who.any():
            rounds = self._rounds(self.short, fed)
            trial_of, private = trials.hold(models, scene.now.w, scene.at, best, rise, who, rounds, fed)
        raised = set(trials.alarms(trial_of, int(scene.scored.sum()), self.false, self.switch, self.least))
        alarmed, acted, looked = (np.zeros(n, dtype=bool) for _ in range(3))
        target, events, founders = scene.at.copy(), list[Event](), list[int]()
        for c, trial in trial_of.items():
            alarmed[c] = c in raised
            looked[c] = alarmed[c] or trial.ahead > self.least
            plain = trial.ahead > self.beyond and trial.halves
            acted[c] = alarmed[c] and (plain or (scene.trust > 0.5 and fed.tau > 1))
            if acted[c] and trial.switch:
                target[c] = best[c]
            elif acted[c]:
                founders.append(c)
            if alarmed[c] and (trial.switch or not acted[c]):
                events.append(self._alarm_told(trial, c, scene, int(target[c]), bool(acted[c]), fed.tau))
        kept = [private_id(kind + half, c) for kind in (STAY, NEW) for half in range(2) for c in np.flatnonzero(looked)]
        private = [kept_ones for stack in private if len((kept_ones := private_models.only(stack, kept)).ids)]
        return Decisions(alarmed, acted, looked, target, founders, trial_of, private, tuple(events))

    def _alarm_told(self, trial: Trial, c: int, scene: Scene, target: int, acted: bool, tau: int) -> Event:
        """The event of an alarm that founds no model."""
        old, new = scene.models.ids[scene.at[c]], scene.models.ids[target]
        done = f"it moves from model {old} to model {new}"
        if not acted:
            early = "it is too early to know whether alarms pay"
            done = f"not acted on: {early if tau < 2 else scene.track_record}"
        return Event("decided", new, {"clients": [c], "reason": f"{trial.words(self.least)}; {done}"})

    # act

    def _act(
        self, state: AutoState, scene: Scene, decided: Decisions, fed: Federation
    ) -> tuple[Clustering, int, Bools]:
        """The clusters after switches, foundings and merges, the next id, and [c] who would have founded but does not.

        Who may not found by itself may still found together with one who may: that makes no model more.
        """
        members, born = decided.target.copy(), state.born
        wants = np.isin(np.arange(fed.n_clients), decided.founders)
        may, events = fed.allowed(wants), list(decided.events)
        held, newborn = wants, None
        if may.any():
            fresh = [decided.trials[c].fresh for c in decided.founders]
            rounds, best = self._rounds(self.short, fed), scene.best
            newborn = new_clusters.found(
                decided.founders, fresh, may, scene.models, best, born, rounds, self.alike, fed
            )
            held = wants & ~np.isin(np.arange(fed.n_clients), [c for group in newborn.groups for c in group])
            members[wants & ~held] = -1
        for c in np.flatnonzero(held).tolist():
            cause = new_clusters.WAITS if may[c] else TOO_SOON
            reason = f"{decided.trials[c].words(self.least)}; not acted on: {cause}"
            events.append(Event("decided", scene.models.ids[scene.at[c]], {"clients": [c], "reason": reason}))
        now = scene.now.assign(members).tell(events)
        if newborn is not None:
            now = now.add(newborn.models, newborn.groups).tell(self._births(newborn, decided.trials))
            born += len(newborn.groups)
        return new_clusters.merge_alike(now, scene.now, scene.mistakes, members, self.merge, fed), born, held

    def _births(self, newborn: new_clusters.Newborn, trials: dict[int, Trial]) -> list[Event]:
        events = []
        for i, family, group, parent in zip(
            newborn.models.ids, newborn.models.family, newborn.groups, newborn.parents, strict=True
        ):
            reason = trials[group[0]].words(self.least)
            together = f"; {len(group)} clients found it together" if len(group) > 1 else ""
            start: dict[str, Any] = {"start": "fresh"} if parent is None else {"from": parent}
            trunk = {"family": family} if family != i else {}
            events.append(Event("created", i, {"clients": list(group), "reason": reason + together, **start, **trunk}))
        return events


def newest_home(w: Clusters) -> Ints:
    """[c], the model that each client's newest data went to; 0 before it had any."""
    home = np.zeros(w.model.shape[1], dtype=np.int64)
    for row in w.model:
        home = np.where(row >= 0, row, home)
    return home


def _at_most_two(now: Clustering, home: Ints, counts: Ints) -> Clusters:
    """The data that train: of no client more than two trunks, that of its home and the one it has most other data for.

    So nobody sends more than twice what it would send for one model.
    """
    family = np.asarray(now.models.family)
    cells = np.where(now.w.model >= 0, family[now.w.model], -1)
    trains = now.w.model.copy()
    for c in range(cells.shape[1]):
        mine = family[home[c]]
        others = {f: counts[cells[:, c] == f, c].sum() for f in np.unique(cells[:, c]) if f >= 0 and f != mine}
        if len(others) > 1:
            most = max(others, key=lambda f: others[f])
            trains[~np.isin(cells[:, c], [mine, most]), c] = -1
    return Clusters(trains, now.w.n_models)


def _without_unused(scene: Scene) -> Scene:
    """The scene without models that nobody is at and that no two clients have data of: what such a model knows, the
    private model of the client that left it knows as well."""
    data = scene.now.w.model
    lonely = [
        m for m in range(len(scene.models))
        if m not in scene.at and m not in data[-LONELY:] and (data == m).any(axis=0).sum() < 2
    ]  # fmt: skip
    if not lonely:
        return scene
    kept = ~np.isin(np.arange(len(scene.models)), lonely)
    mistakes = replace(scene.mistakes, wrong=scene.mistakes.wrong[:, kept][:, :, kept])
    now = scene.now.drop(np.array(lonely), "nobody is at it, and at most one client ever was")
    return replace(scene, now=now, at=(np.cumsum(kept) - 1)[scene.at], mistakes=mistakes)
