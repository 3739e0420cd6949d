"""TimeStep: the server's part of a time step, the same for all engines."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, final, get_args

import numpy as np

from feddrift import rng
from feddrift.averaging import average_updates, limit_lengths
from feddrift.engines.conditions.conditions import Conditions
from feddrift.engines.conditions.idle_models import find_badly_served_clients
from feddrift.engines.conditions.robust import (
    AlarmFilter,
    RobustWorker,
    choose_average,
    compare_with_best,
    compute_client_median,
)
from feddrift.engines.conditions.unsupported_models import SharingLimits, find_holders, limit_sharing
from feddrift.engines.server.cross_evaluation import compute_cross_evaluation, get_part_axes
from feddrift.engines.server.feature_statistics import check_layer_width
from feddrift.engines.server.traffic import Traffic
from feddrift.engines.sparse_weights import Entries, iterate_groups
from feddrift.engines.worker import (
    MAX_SCORED_ROWS,
    StatisticsRequest,
    TrainingPlan,
    Worker,
    find_nonfinite_lanes,
    score_cells,
)
from feddrift.errors import ConfigError
from feddrift.models import init_models, restore_untrained_part, take
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
    State,
    Tournament,
    Updates,
    Votes,
    Weights,
)

log = logging.getLogger(__name__)


@final
class TimeStep:
    """The Federation of a time step.

    Args:
        worker: The clients.
        tau: The time step.
        net: The model.
        local: The default settings of local training.
        seed: The seed of the run.
        conditions: The conditions of the run.
        store: Moves models to the place where the server of this engine stores them.
    """

    def __init__(
        self, worker: Worker, tau: int, net: Net, local: Local, seed: int, conditions: Conditions,
        store: Callable[[Models], Models] = lambda models: models,
    ) -> None:  # fmt: skip
        self.worker = worker
        self.tau = tau
        self._defends_averages = conditions.defend == "robust"
        self.local = choose_average(local) if self._defends_averages else local
        self._net = net
        self._seed = seed
        self._conditions = conditions
        self._store = store
        self.round = 0  # rounds trained so far
        self.idle_models: frozenset[int] = frozenset()  # ids of models that only badly served clients score
        self.sharing: SharingLimits | None = None  # the models that only some clients receive; None: all receive all
        self.alarm_filter: AlarmFilter | None = None  # decides which alarms are accepted; None: all
        self._traffic = Traffic(self.n_clients)
        self._losses: dict[int, Floats] = {}  # by id of a model: [c], its error before any training

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
        """[c], the number of new rows that each client reports."""
        worker = self.worker.worker if isinstance(self.worker, RobustWorker) else self.worker
        return np.asarray(worker.known.counts[self.tau])

    @property
    def sent(self) -> Floats:
        """[c], number of models sent to and from each client; a trunk or head counts by its share of the parameters."""
        return self._traffic.sent

    @property
    def sent_scoring(self) -> Floats:
        """[c], the part of `sent` that was sent for scoring, not for training."""
        return self._traffic.sent_scoring

    def get_losses(self, ids: Ints) -> Floats:
        """Return [c], the error of model ids[c] on the new data of client c before any training; NaN if not scored."""
        by_client = [self._losses.get(int(i)) for i in ids]
        return np.array([np.nan if loss is None else loss[c] for c, loss in enumerate(by_client)])

    def key(self, purpose: str, *names: int | Ints) -> rng.Words:
        return rng.derive_key(self._seed, purpose, self.tau, *names)

    def fresh(self, n: int = 1, distinct: bool = False) -> Models:
        return self._store(init_models(self._net, self._seed, n, distinct))

    def allowed(self, alarms: Bools) -> Bools:
        return alarms.copy() if self.alarm_filter is None else self.alarm_filter.accept(alarms)

    def limit_sharing(self, state: State, served: Floats | None) -> None:
        """Find the models that only some clients receive in this time step, and these clients (`share_from`).

        Args:
            state: The state before the time step.
            served: `SharingLimits.served` of the last time step.
        """
        holders = find_holders(state, self.counts, self._conditions.share_from)
        models = _take_positions(state.models, np.flatnonzero(~state.models.private & ~self._find_idle(state.models)))
        clients = self._find_scoring_clients()
        supported = np.flatnonzero(~np.isin(models.ids, list(holders)))
        self._traffic.add_scoring(clients, _take_positions(models, supported))
        self.sharing = limit_sharing(self.worker, models, holders, clients, self.tau, served)

    def find_receivers(self, models: Models) -> Bools:
        receivers: Bools = np.ones((self.n_clients, len(models)), dtype=bool)
        for m in np.flatnonzero(models.private):
            receivers[:, m] = np.arange(self.n_clients) == models.owner[m]
        if self.sharing is not None:
            for m in np.flatnonzero(self._find_unsupported_models(models)):
                receivers[:, m] = self.sharing.find_receivers(models.ids[m])
        return receivers

    def evaluate(self, models: Models, metric: Metric = "error", by: Parting | None = None) -> Floats:
        _check_metric(metric)
        loss = np.full((self.n_clients, len(models), *get_part_axes(by, self.worker.known)), np.nan)
        for subset, positions, clients in self._assign_scorers(models):
            cells = np.stack([np.full_like(clients, self.tau), clients], axis=1)
            for scored, sums, sizes in score_cells(self.worker, subset, cells, metric, None, by):
                with np.errstate(invalid="ignore"):  # 0 / 0 for a part without rows
                    loss[np.ix_(clients[scored], positions)] = np.swapaxes(sums / sizes, 0, 1)
        loss = np.where(np.isfinite(loss), loss, np.nan)
        if self.round == 0 and by is None:
            self._losses = dict(zip(models.ids, loss.T.copy(), strict=True)) | self._losses
        return loss

    def confusion(self, models: Models) -> Ints:
        counts = np.zeros((self.n_clients, len(models), self.n_classes, self.n_classes), dtype=np.int64)
        for subset, positions, clients in self._assign_scorers(models):
            counts[np.ix_(clients, positions)] = self.worker.confusion(subset, clients)
        return counts

    def moments(
        self,
        models: Models,
        layer: Layer,
        by: Literal["all", "class"] = "all",
        project: Floats | Projection | None = None,
        square: bool = True,
    ) -> Moments:
        request = StatisticsRequest(layer, by, project, square)
        width = check_layer_width(self._net, self.worker.known, layer, by, project)
        n_parts, size = request.shape(width, self.n_classes)
        moments = Moments.empty(self.n_clients, len(models), n_parts, size)
        projection_size = 0 if project is None or isinstance(project, Projection) else width * size
        for subset, positions, clients in self._assign_scorers(models):
            reply_size = len(subset) * n_parts * ((1 + square) * size + 1)
            self._traffic.add_numbers(clients, projection_size + reply_size, subset)
            reply = self.worker.describe(subset, clients, request)
            for name in ("count", "mean", "std"):
                getattr(moments, name)[np.ix_(clients, positions)] = getattr(reply, name)
        return moments

    def cross_evaluate(
        self,
        models: Models,
        w: Weights | Entries,
        metric: Metric = "error",
        by: Parting | None = None,
        per_client: bool = False,
    ) -> Floats:
        _check_metric(metric)
        parts = get_part_axes(by, self.worker.known)
        _forbid_private_models(models, "cross_evaluate")
        entries = Entries.of(w, (self.tau + 1, self.n_clients, len(models)))
        idle = self._find_idle(models)
        idle[entries.m[entries.t == self.tau]] = False  # models with new data are in use again
        if idle.any():  # an idle model is not compared with others
            client_axis = (self.n_clients,) if per_client else ()
            L = np.full((len(models), len(models), *client_axis, *parts), np.nan)
            active = np.flatnonzero(~idle)
            entries = entries.select(~idle[entries.m])
            m = np.searchsorted(active, entries.m)
            entries = Entries(entries.t, entries.c, m, entries.value, (*entries.shape[:2], len(active)))
            L[np.ix_(active, active)] = self.cross_evaluate(
                _take_positions(models, active), entries, metric, by, per_client
            )
            return L
        entries = entries.select((self.counts[entries.t, entries.c] > 0) & self.reachable[entries.c])
        use_median = self._conditions.defend and not per_client
        client_axis = (self.n_clients,) if per_client or use_median else ()
        L = np.full((len(models), len(models), *client_axis, *parts), np.nan)
        for positions, clients in self._group_by_receivers(models):
            part = _take_positions(models, positions)
            sent = entries if clients is None else entries.select(np.isin(entries.c, clients))
            if not len(sent.t) and clients is not None:
                continue
            self._traffic.add_scoring(np.unique(sent.c), part)
            score = partial(score_cells, self.worker, part, metric=metric, max_rows=MAX_SCORED_ROWS, by=by)
            L[positions] = compute_cross_evaluation(
                score, len(part), sent, self.counts, parts, per_client or use_median
            )
        if use_median:
            L = compute_client_median(L)
        return compare_with_best(L) if self._defends_averages and not per_client else L

    def local_updates(self, models: Models, w: Weights | Entries, local: Local | None = None) -> Updates:
        _forbid_private_models(models, "local_updates")
        entries = self._select_training_entries(models, w)
        local = self._choose_local(local)
        self._check_local(models, local)
        plan = TrainingPlan.of(models, self._draw_participants(entries), self.counts)
        if len(plan.client):
            self._traffic.add_training(models, plan, 1, local)
            updates = self.worker.updates(models, plan, self.round, local)
            if self._conditions.alters_updates:
                updates = self._conditions.alter_updates(models, updates, partial(self.key, "garbage", self.round))
            if self._defends_averages:
                updates = limit_lengths(models, updates)
            self._warn_not_finite(models, plan, find_nonfinite_lanes(models, plan, updates))
        else:
            updates = plan.updates(map_trunk_and_head(lambda leaf, _: leaf[:0], models, None, None))
        self.round += len(entries.t) > 0
        return updates

    def train(
        self,
        models: Models,
        w: Weights,
        rounds: int | None = None,
        local: Local | None = None,
        remaining_rounds: int | None = None,
    ) -> Models:
        """Train as in `Federation`; `remaining_rounds` is the number of rounds on the same data, including these."""
        local = self._choose_local(local)
        self._check_local(models, local)
        rounds = local.rounds if rounds is None else rounds
        entries = self._select_training_entries(models, w)
        if not len(entries.t) or not rounds:
            return models
        trained = models
        if self._check_private(models, entries):  # trained by its owner alone, and not sent
            trained = self._run_rounds(trained, entries, rounds, local)
        elif local.average != "mean" or self._conditions.alters_updates:  # the server needs every update
            for _ in range(rounds):
                trained = average_updates(trained, self.local_updates(trained, entries, local), local.average)
        elif self._conditions.participation < 1:
            for _ in range(rounds):
                trained = self._run_rounds(trained, self._draw_participants(entries), 1, local)
        else:
            trained = self._run_rounds(trained, entries, rounds, local, remaining_rounds)
        return self._store(restore_untrained_part(models, trained, local.trains))

    def tournament(self, models: Models, w: Weights, parent: Ints, starts: Sequence[Start]) -> Tournament:
        _forbid_private_models(models, "tournament")
        older = Entries.of(w, (self.tau, self.n_clients, len(models)))
        if parent.shape != (self.n_clients,):
            raise ValueError(f"a tournament needs a parent for each of {self.n_clients} clients, got {parent.shape}")
        if models.mask is not None:
            raise ValueError("a tournament is not possible between models that see different inputs")
        takes_part = (parent >= 0) & (self.counts[self.tau] > 1) & self.reachable
        if not takes_part.any():
            return Tournament.empty(self.n_clients, len(starts))
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
        if self._find_unsupported_models(models).any():
            receives = np.column_stack([self.find_receivers(models), np.zeros(self.n_clients, dtype=bool)])
            teams = np.where(receives[np.arange(self.n_clients)[:, None], teams], teams, -1)
        if held_by is not None and not held_by.hold_out:
            raise ConfigError("held_by must hold something out: give it the hold_out that the models were trained with")
        n_rows = self.counts[self.tau] - (held_by is not None)  # a single row cannot be held out
        takes_part = (teams >= 0).any(axis=2).all(axis=0) & (n_rows > 0) & self.reachable
        if not len(teams) or not takes_part.any():
            return Tournament.empty(self.n_clients, len(teams))
        teams = np.where(takes_part[:, None], teams, -1)
        self._count_team_traffic(models, teams)
        return self.worker.contest(models, teams, held_by and replace(held_by, pull=None))

    def reroute(self, models: Models, votes: Floats | Votes, ballot: Ballot, routers: Mapping[int, Router]) -> Ints:
        """Compare routers with the votes of their clients on new data.

        Returns:
            [c, 3]: at clients with a router, the number of new rows, the mistakes of votes[c], and those of the router.
        """
        routers = {c: router for c, router in sorted(routers.items()) if c in self._find_scoring_clients()}
        for c, router in routers.items():
            self._count_router_traffic(np.array([c]), models, router, votes[c], 3)
        return self.worker.reroute(models, votes, ballot, routers)

    def send_router(self, models: Models, router: Router) -> None:
        """Send the router to all reachable clients, with the models that it chooses from."""
        self._count_router_traffic(np.flatnonzero(self.reachable), models, router, np.zeros(len(models)), 0)

    def _count_router_traffic(
        self, clients: Ints, models: Models, router: Router, votes: Floats, reply_size: int
    ) -> None:
        voters = (router.votes.any(axis=0) | (votes > 0)) & ~models.private
        self._traffic.add_scoring(clients, _take_positions(models, np.flatnonzero(voters)))
        if router.model is not None:
            self._traffic.add_scoring(clients, router.model)
        self._traffic.add_numbers(clients, router.size + reply_size, models)

    def _count_team_traffic(self, models: Models, teams: Ints) -> None:
        """Count the shared models that are sent to the clients where they compete."""
        is_sent = np.append(~models.private, False)  # the last item is for -1: no model
        members = np.nonzero(is_sent[teams])
        pairs = np.unique(teams[members] * self.n_clients + members[1])
        model_of_pair, clients = np.divmod(pairs, self.n_clients)
        for m, positions in iterate_groups(model_of_pair):
            self._traffic.add_scoring(clients[positions], take(models, [m], [models.ids[m]]))

    def progress(self) -> dict[str, Any]:
        """Return the state that the rest of this time step depends on, for a checkpoint."""
        progress = {"round": self.round, "losses": list(self._losses.items()), "moments": self.worker.save()}
        if self.sharing is not None:
            progress["sharing"] = {"candidates": self.sharing.candidates, "served": self.sharing.served}
        return progress | self._traffic.save()

    def restore(self, progress: dict[str, Any]) -> None:
        """Restore a state that `progress` returned."""
        self.round = progress["round"]
        self._losses = dict(progress["losses"])
        if self.sharing is not None:
            self.sharing = replace(self.sharing, **progress["sharing"])
        self._traffic.load(progress)
        self.worker.load(progress if "reachable" in progress else progress["moments"])  # of version 0.1

    def _run_rounds(
        self, models: Models, entries: Entries, rounds: int, local: Local, remaining_rounds: int | None = None
    ) -> Models:
        until = self.round + max(rounds, remaining_rounds or 0)
        plan = replace(TrainingPlan.of(models, entries, self.counts), until=until)
        if len(plan.client):
            self._traffic.add_training(models, plan, rounds, local)
            before = models
            models, left_out = self.worker.rounds(models, plan, self.round, self.round + rounds, local)
            self._warn_not_finite(before, plan, left_out)
        self.round += rounds
        return models

    def _warn_not_finite(self, models: Models, plan: TrainingPlan, rounds: Ints) -> None:
        """Warn about clients whose updates contained NaN or infinity, with the number of rounds."""
        for lane in np.flatnonzero(rounds):
            pairs = np.flatnonzero(plan.lane == lane)
            name = self.worker.known.clients[plan.client[pairs[0]]]
            ids = ", ".join(str(models.ids[m]) for m in plan.model[pairs])
            text = "tau=%d: client %s sent updates of model %s that are not finite or absurd, left out of %d rounds"
            log.warning(text, self.tau, name, ids, rounds[lane])

    def _draw_participants(self, entries: Entries) -> Entries:
        """Return the entries of the clients that take part in the next round."""
        if self._conditions.participation == 1:
            return entries
        drawn = self._conditions.draw_participants(self.reachable, self.key("participation", self.round))
        return entries.select(drawn[entries.c])

    def _find_scoring_clients(self) -> Ints:
        """Return the reachable clients with new data, the only ones that can score models."""
        return np.flatnonzero(self.reachable & (self.counts[self.tau] > 0))

    def _assign_scorers(self, models: Models) -> Iterator[tuple[Models, Ints, Ints]]:
        """Yield groups of models, their positions, and the clients that score them.

        All clients with new data score shared models. Only its owner scores a private model, only its receivers score
        an unsupported one, and only badly served clients score idle models, which come last.
        """
        clients = self._find_scoring_clients()
        owner = np.array(models.owner, dtype=np.int64)
        idle = self._find_idle(models)
        unsupported = self._find_unsupported_models(models)
        active = np.flatnonzero(~idle & ~unsupported)
        can_score = np.isin(np.arange(self.n_clients), clients)
        for group, places in iterate_groups(owner[active] + 1):  # 0: shared
            positions = active[places]
            if group == 0:
                part = _take_positions(models, positions)
                self._traffic.add_scoring(clients, part)
                yield part, positions, clients
            elif can_score[group - 1]:
                yield _take_positions(models, positions), positions, np.array([group - 1])
        if unsupported.any():
            limited = np.flatnonzero(unsupported & ~idle)
            for places, receivers in self._group_by_receivers(_take_positions(models, limited)):
                scorers = clients if receivers is None else np.intersect1d(clients, receivers)
                if len(scorers):
                    part = _take_positions(models, limited[places])
                    self._traffic.add_scoring(scorers, part)
                    yield part, limited[places], scorers
        if idle.any():
            shared = np.flatnonzero((owner < 0) & ~idle & ~unsupported)
            if len(shared):
                clients = find_badly_served_clients(self.worker, _take_positions(models, shared), clients, self.tau)
            if len(clients):
                positions = np.flatnonzero(idle)
                part = _take_positions(models, positions)
                self._traffic.add_scoring(clients, part)
                yield part, positions, clients

    def _group_by_receivers(self, models: Models) -> Iterator[tuple[Ints, Ints | None]]:
        """Yield positions of models with the same receivers, and these clients; None: all clients."""
        unsupported = self._find_unsupported_models(models)
        if not unsupported.all() or not len(models):
            yield np.flatnonzero(~unsupported), None
        if unsupported.any():
            limited = np.flatnonzero(unsupported)
            receivers = self.find_receivers(models)[:, limited]
            distinct, group_of_model = np.unique(receivers, axis=1, return_inverse=True)
            for group, places in iterate_groups(group_of_model.reshape(-1)):
                yield limited[places], np.flatnonzero(distinct[:, group])

    def _find_unsupported_models(self, models: Models) -> Bools:
        """Return [m], true for unsupported models."""
        if self.sharing is None:
            return np.zeros(len(models), dtype=bool)
        return np.isin(models.ids, list(self.sharing.holders)) & ~models.private

    def _find_idle(self, models: Models) -> Bools:
        """Return [m], true for idle models."""
        if not self.idle_models:
            return np.zeros(len(models), dtype=bool)
        return np.isin(models.ids, list(self.idle_models)) & ~models.private

    def _choose_local(self, local: Local | None) -> Local:
        """Return the settings of local training, with the average of the condition `defend`."""
        if local is None:
            return self.local
        return choose_average(local) if self._defends_averages else local

    def _check_local(self, models: Models, local: Local) -> None:
        if local.trains == "trunk" and not has_trunk(models):
            raise ConfigError("trains='trunk' needs a net with a trunk and a head, this one has only one of them")
        if local.pull is None:
            return
        if np.ndim(local.pull.weight) and np.shape(local.pull.weight) != (self.n_clients,):
            shape = np.shape(local.pull.weight)
            raise ConfigError(f"a pull needs one weight, or one for each of {self.n_clients} clients, got {shape}")
        target = local.pull.to
        if target is not None:
            _forbid_private_models(target, "a pull")
            if len(target) not in (1, len(models)):
                raise ConfigError(f"a pull is to one model, or to one for each of {len(models)}, got {len(target)}")

    def _check_private(self, models: Models, entries: Entries) -> bool:
        """Return whether all these entries are for private models.

        Raises:
            ConfigError: If a private model has data of another client, or both private and shared models have data.
        """
        owner = np.array(models.owner, dtype=np.int64)[entries.m]
        private = owner >= 0
        if (private & (owner != entries.c)).any():
            raise ConfigError("a private model trains on its owner's data only")
        if private.any() and not private.all():
            raise ConfigError("private and shared models are trained apart: two calls of train")
        return bool(private.all())

    def _select_training_entries(self, models: Models, w: Weights | Entries) -> Entries:
        """Return the entries of reachable clients for models whose family is in use at tau."""
        entries = Entries.of(w, (self.tau + 1, self.n_clients, len(models)))
        family = models.trunk_index
        entries = entries.select(self.reachable[entries.c])
        in_use = np.isin(family[entries.m], family[entries.m[entries.t == self.tau]])
        return entries.select(in_use & (self.counts[entries.t, entries.c] > 0))


def _take_positions(models: Models, positions: Ints) -> Models:
    if len(positions) == len(models):
        return models
    return take(models, positions, [models.ids[m] for m in positions])


def _forbid_private_models(models: Models, subject: str) -> None:
    if models.private.any():
        raise ConfigError(f"{subject} needs shared models: leave out private ones")


def _check_metric(metric: str) -> None:
    if metric not in get_args(Metric):
        raise ConfigError(f"metric must be error, loss or brier, got {metric!r}")
