"""FedDrift-Auto: each part on counts written by hand, and the whole algorithm on small streams."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import feddrift as fd
from feddrift import rng
from feddrift.algorithms.auto import method, new_clusters, private_models, trials
from feddrift.algorithms.auto.method import FedDriftAuto
from feddrift.algorithms.auto.private_models import OWN, TUNED, get_private_id
from feddrift.algorithms.auto.review import find_current_assignment
from feddrift.algorithms.auto.trials import Trial
from feddrift.clustering import Clustering
from feddrift.data import Stream
from feddrift.engines import engine as find_engine
from feddrift.engines.server.engine import Engine
from feddrift.models import join
from feddrift.nets import default_net
from feddrift.simulation import Step, run_steps
from feddrift.streams import STREAMS
from feddrift.testing import FakeFederation, small_stream
from feddrift.types import Clusters, Federation, Ints, Local, Models, Tournament, Weights
from tests.golden import hashes

LEARN = Local(rounds=8, steps=10, batch=50, lr=0.05)
SWAP = np.array([[0] * 6] * 3 + [[0, 0, 0, 1, 1, 1]] * 4)  # the labels of the last three clients swap at time 3
CALM = np.zeros_like(SWAP)


def trial(ahead: float = 0.0, rise: float = 0.0, switch: bool = False) -> Trial:
    return Trial(switch, False, 200, 30, 10, ahead, rise, halves_mistakes=False)


def alarms(*found: Trial, scored: int = 10) -> list[int]:
    method = FedDriftAuto()
    return trials.raise_alarms(
        dict(enumerate(found)), scored, method.false_discovery_rate, method.switch_z, method.not_worse_z
    )


# alarms


def test_one_client_needs_strong_evidence_and_many_need_less() -> None:
    strong, middling, none = trial(2.1), trial(1.3), trial(-3.0)  # chances of 0.018, 0.097 and almost 1
    assert alarms(strong, *[none] * 9) == [0]  # 0.018 <= 0.2 * 1 / 10
    assert alarms(middling, *[none] * 9) == []  # 0.097 > 0.02
    assert alarms(*[middling] * 4, *[none] * 6) == []  # 0.097 > 0.08
    assert alarms(*[middling] * 6, *[none] * 4) == list(range(6))  # 0.097 <= 0.12
    assert alarms(middling, scored=1) == [0] and alarms(strong, scored=20) == []  # who holds no trial counts as well


def test_a_weaker_one_is_carried_by_those_that_are_stronger() -> None:
    ranks = [trial(z) for z in (3.0, 2.9, 1.5, -3.0)]  # 1.5: a chance of 0.067 <= 0.2 * 3 / 8
    assert alarms(*ranks, scored=8) == [0, 1, 2] and alarms(*ranks, scored=10) == [0, 1]


def test_another_shared_model_has_a_level_of_its_own() -> None:
    weak, enough = trial(1.27, rise=9.0, switch=True), trial(1.29, switch=True)
    assert alarms(weak, enough, scored=1000) == [1]
    assert alarms(*[enough] * 5, trial(1.3)) == [0, 1, 2, 3, 4]  # they carry no founder


def test_evidence_is_the_largest_of_lead_rise_and_both_combined() -> None:
    assert trial(3.0, rise=0.0).compute_evidence_z(-1.0) == 3.0
    assert trial(0.0, rise=3.0).compute_evidence_z(-1.0) == 3.0
    assert trial(2.0, rise=2.0).compute_evidence_z(-1.0) == pytest.approx(4 / math.sqrt(2))
    assert trial(-2.0, rise=3.0).compute_evidence_z(-1.0) == pytest.approx(
        1 / math.sqrt(2)
    )  # behind: a rise alone says nothing


@pytest.mark.parametrize(
    ("held", "says"),
    [
        (
            trial(4.0),
            r"^the new data contradict the old data: of 200 .* alone, 10 only by .* old and new data \(p < 0.0001\)$",
        ),
        (trial(0.0, rise=2.33), r"^its error rose \(p = 0.01\), and of 200 new rows, 30 are predicted correctly only"),
        (trial(1.645, rise=9.0, switch=True), r"^another shared model fits .* 30 are .* only .* \(p = 0.05\)$"),
    ],
)
def test_a_trial_reports_its_evidence(held: Trial, says: str) -> None:
    assert re.search(says, held.describe(-1.0))


# private models


def team_models(n_clients: int = 2, shared: tuple[float, ...] = (0.0, 100.0)) -> Models:
    """Shared models, then tuned (10 and the client) and own (20 and the client) of each."""
    clients = np.arange(n_clients)
    models = Models({"a": np.array(shared)[:, None]}, tuple(range(len(shared))))
    for kind, value in ((TUNED, 10.0), (OWN, 20.0)):
        ids = tuple(get_private_id(kind, c) for c in clients)
        models = join(models, Models({"a": (value + clients)[:, None]}, ids, owner=tuple(range(n_clients))))
    return models


@pytest.mark.parametrize(
    ("helped", "size"), [((0.0, 0.0), 3), ((0.2, 0.2), 3), ((0.2, 0.1), 2), ((0.0, -0.1), 2), ((-0.1, -0.1), 1)]
)
def test_the_team_that_would_have_been_best_votes(helped: private_models.EnsembleGain, size: int) -> None:
    assert private_models.choose_ensemble_size(helped) == size


@pytest.mark.parametrize(("size", "at"), [(1, [1]), (2, [1, 3]), (3, [1, 3, 5])])
def test_votes_go_to_a_clients_own_team_and_sum_to_one(size: int, at: list[int]) -> None:
    shares = private_models.share_votes_equally(team_models(), np.array([0, 1]), size)
    np.testing.assert_allclose(np.asarray(shares).sum(axis=1), 1)
    assert np.flatnonzero(shares[1]).tolist() == at and len(set(shares[1, at])) == 1
    assert np.flatnonzero(shares[0]).tolist() == [0, 2, 4][:size]


def make_tournament(*wrong: tuple[int, int, int], rows: tuple[int, ...]) -> Tournament:
    return Tournament(np.array(rows), np.array([np.diag(mistakes) for mistakes in wrong]))


def test_gains_are_shares_summed_over_clients_that_took_part() -> None:
    result = make_tournament((10, 5, 8), (4, 6, 2), (9, 9, 9), rows=(100, 20, 0))
    assert private_models.sum_ensemble_gain(result) == pytest.approx((0.05 - 0.1, 0.02 + 0.1))
    assert private_models.sum_ensemble_gain(Tournament.empty(2, 3)) == (0.0, 0.0)


class Learners(FakeFederation):
    """The fake with private models that only learn where their clients are in reach."""

    def train(self, models: Models, w: Weights, rounds: Any = None, local: Any = None) -> Models:
        super().train(models, w, rounds, local)
        learns = [self.reachable[owner] for owner in models.owner]
        return replace(models, params={"a": models.params["a"] + np.array(learns, dtype=float)[:, None]})


def test_the_first_gain_is_measured_on_rows_that_private_models_have_not_seen() -> None:
    asked: list[Ints] = []

    def run_contest(models: Models, teams: Ints) -> Tournament:
        asked.append(teams)
        return make_tournament((10, 5, 20), (10, 10, 10), rows=(100, 100))

    fed = Learners(0, 2, run_contest=run_contest)
    shared = Models({"a": np.array([[0.0], [100.0]])}, (0, 1))
    gain = private_models.measure_first_gain(shared, Clusters(np.array([[0, 1]]), 2), np.array([0, 1]), (2, 4), fed)
    assert gain == pytest.approx((0.05, -0.1))
    assert asked[0][:, 1].tolist() == [[1, -1, -1], [1, 3, -1], [1, 3, 5]] and fed.trained[2].hold_out == 0.5


def test_a_client_out_of_reach_keeps_its_private_models() -> None:
    fed = Learners(1, 2)
    fed.reachable[1] = False
    everything, shared = team_models(), [0, 1]
    before = private_models.select_by_id(everything, [i for i in everything.ids if i not in shared])
    w = Clusters(np.array([[0, 1], [0, 1]]), 2)
    private = private_models.train_private_models(
        before, private_models.select_by_id(everything, shared), w, np.array([0, 1]), (2, 4), fed
    )
    learnt = dict(zip(private.ids, private.params["a"][:, 0].tolist(), strict=True))
    assert learnt == {
        get_private_id(TUNED, 0): 1.0,  # anew from the shared model
        get_private_id(OWN, 0): 21.0,  # goes on
        get_private_id(TUNED, 1): 11.0,
        get_private_id(OWN, 1): 21.0,
    }
    assert private.owner == (0, 1, 0, 1)


def test_a_client_that_never_trained_follows_its_shared_model() -> None:
    fed = Learners(0, 2)
    fed.reachable[1] = False
    shared = private_models.select_by_id(team_models(), [0, 1])
    private = private_models.train_private_models(
        None, shared, Clusters(np.array([[0, 1]]), 2), np.array([0, 1]), (2, 4), fed
    )
    assert private.params["a"][:, 0].tolist() == [1.0, 100.0, 1.0, 100.0]


# new models


def train_models(concepts: Ints, assigned: list[int]) -> tuple[Federation, Clustering]:
    """Return the federation at the last time step but one, and models trained on these clients' data until then."""
    stream, tau = small_stream(concepts, size=200), len(concepts) - 2
    engine = find_engine("simulator")(stream, default_net(stream), LEARN, 0)
    fed = engine.at(tau - 1)
    n = max(assigned) + 1
    w = Clusters(np.tile(assigned, (tau, 1)), n)
    models = fed.train(fed.fresh(n), w, 3 * LEARN.rounds)
    return engine.at(tau), Clustering(models, w)


def test_clients_whose_candidates_serve_each_other_found_one_model() -> None:
    fed, clusters = train_models(SWAP[:5], [0] * 6)
    best = np.zeros(6, dtype=np.int64)
    allowed = np.ones(6, dtype=bool)
    created = new_clusters.create_clusters(
        [2, 3, 4, 5], [False, True, True, True], allowed, clusters.models, best, 7, 40, FedDriftAuto().group_z, fed
    )
    assert created.groups == [[2], [3, 4, 5]] and created.models.ids == (7, 8)
    assert created.parents == [0, None]
    error = fed.evaluate(created.models)
    assert (error[3:, 1] < 0.2).all() and (error[:3, 1] > 0.8).all()


def test_of_many_founders_some_are_compared_and_the_others_join_their_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of four are drawn: one of each concept, or both of the swapped one, which may not fit the others."""
    fed, clusters = train_models(SWAP[:5], [0] * 6)
    best = np.zeros(6, dtype=np.int64)
    allowed = np.ones(6, dtype=bool)
    monkeypatch.setattr(new_clusters, "MAX_COMPARED", 2)
    created = new_clusters.create_clusters(
        [2, 3, 4, 5], [False, True, True, True], allowed, clusters.models, best, 7, 40, 0.84, fed
    )
    drawn = np.sort(rng.permutation(fed.key("founders"), 4)[:2]) + 2
    assert {group[0] for group in created.groups} <= set(drawn.tolist())  # those that were drawn come first
    for group in created.groups:
        assert set(group) <= {2} or set(group) <= {3, 4, 5}
    in_a_group = {c for group in created.groups for c in group}
    assert {3, 4, 5} <= in_a_group and (2 in in_a_group) == (2 in drawn)
    assert created.models.ids == tuple(range(7, 7 + len(created.groups)))
    assert created.parents == [0 if group[0] == 2 else None for group in created.groups]


def test_shared_models_never_get_the_ids_of_private_models() -> None:
    assert get_private_id(0, 0) == private_models.IDS_PER_KIND == 2**20
    fed = FakeFederation(2, 1, run_contest=lambda _, teams: Tournament.empty(1, len(teams)))
    allowed = np.ones(1, dtype=bool)
    best = np.zeros(1, dtype=np.int64)
    last = new_clusters.create_clusters([0], [False], allowed, fed.fresh(), best, 2**20 - 1, 1, 0.84, fed)
    assert last.models.ids == (2**20 - 1,)
    with pytest.raises(fd.ConfigError, match="at most 1048576 shared models, got 1048577: start a new run, or"):
        new_clusters.create_clusters([0], [False], allowed, fed.fresh(), best, 2**20, 1, 0.84, fed)


def test_no_client_scores_more_candidates_than_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new_clusters, "MAX_COMPARED", 3)
    n_contestants = []

    def run_contest(models: Models, teams: Ints) -> Tournament:
        """Each client has mistakes with candidates other than its own: no candidate fits another client."""
        n_contestants.append(len(teams))
        n_clients, k = teams.shape[1], len(teams)
        wrong = np.zeros((n_clients, k, k), dtype=np.int64)
        for c in range(n_clients):
            own = [i for i in range(k) if teams[i, c, 0] >= 0 and models.ids[teams[i, c, 0]] == 100 + c]
            for i in set(range(k)) - set(own):
                wrong[c, i, i] = 30
        return Tournament(np.full(n_clients, 100), wrong)

    fed = FakeFederation(2, 8, run_contest=run_contest)
    allowed = np.ones(8, dtype=bool)
    best = np.zeros(8, dtype=np.int64)
    created = new_clusters.create_clusters(range(8), [False] * 8, allowed, fed.fresh(), best, 100, 1, 0.84, fed)
    assert len(created.groups) == 3 and all(len(group) == 1 for group in created.groups)  # five are delayed
    assert max(n_contestants) <= 4  # three candidates, or the averages of three groups and a client's own


@pytest.mark.parametrize(("concepts", "left"), [([0] * 6, (0,)), ([0, 0, 0, 1, 1, 1], (0, 1))])
def test_models_of_one_concept_merge_and_models_of_swapped_labels_do_not(concepts: list[int], left: Any) -> None:
    assigned = np.array([0, 0, 0, 1, 1, 1])
    fed, before = train_models(np.tile(concepts, (5, 1)), assigned.tolist())
    mistakes = fed.contest(before.models, np.repeat(np.arange(2)[:, None, None], 6, axis=1))
    merged = new_clusters.merge_similar(
        before.assign_new_data(assigned), before, mistakes, assigned, FedDriftAuto().merge_z, fed
    )
    assert merged.models.ids == left
    assert [(e.kind, e.model, e.cause["unit"]) for e in merged.events] == [("merged", 1, "standard errors")] * (
        2 - len(left)
    )


def test_models_that_differ_on_the_new_data_of_their_members_do_not_merge() -> None:
    """Even if they do not differ on all of their data."""
    models = Models({"a": np.zeros((2, 1))}, (0, 1))
    before = Clustering(models, Clusters(np.array([[0, 1]]), 2))
    assigned = np.array([0, 1])
    clusters = before.assign_new_data(assigned)
    fed = FakeFederation(1, 2, cross=lambda i, j: 0.1)
    for lost, left in ((2, (0,)), (20, (0, 1))):
        wrong = np.array([[[10, 10], [10, 10 + lost]], [[10, 10], [10, 10]]])
        merged = new_clusters.merge_similar(
            clusters, before, Tournament(np.array([100, 100]), wrong), assigned, 2.0, fed
        )
        assert merged.models.ids == left


def test_no_client_trains_more_than_two_trunks() -> None:
    models = Models(
        {"a": np.zeros((4, 1)), "t": np.zeros((3, 1))}, (0, 1, 2, 3), family=(0, 1, 2, 2), trunk={"a": False, "t": True}
    )
    w = Clusters(np.array([[0, 0], [1, -1], [1, 0], [2, 2], [3, 3]]), 4)
    trains = method.limit_trunks_per_client(Clustering(models, w), find_current_assignment(w), np.full((5, 2), 10))
    assert trains.model.T.tolist() == [[-1, 1, 1, 2, 3], [0, -1, 0, 2, 3]]  # 2 and 3 share a trunk


def test_clients_are_assigned_to_the_model_of_their_newest_data() -> None:
    assert find_current_assignment(Clusters(np.array([[0, 2, -1], [1, -1, -1]]), 3)).tolist() == [1, 2, 0]


# whole


def run_method(stream: Stream, name: str = "FedDrift-Auto", **options: Any) -> list[Step]:
    return list(fd.run(stream, name, local=LEARN, **options))


def list_shared_ids(step: Step) -> list[int]:
    """The id of each client's shared model."""
    assert isinstance(step.state.w, Clusters)
    return [step.state.models.ids[m] for m in find_current_assignment(step.state.w)]


def make_noisy_stream(concepts: Ints, seed: int = 0) -> Stream:
    """The small stream with every tenth label wrong."""
    stream = small_stream(concepts, size=200, seed=seed)
    wrong = np.random.default_rng(seed).random(len(stream.y)) < 0.1
    return replace(stream, y=np.where(wrong, 1 - stream.y, stream.y).astype(stream.y.dtype))


SEEDS = range(5)  # up to 20 % of alarms may be false: what is said of one seed is chance


@pytest.fixture(scope="module")
def swapped() -> list[list[Step]]:
    return [run_method(make_noisy_stream(SWAP, seed)) for seed in SEEDS]


def test_swapped_labels_are_found_at_once_where_they_are(swapped: list[list[Step]]) -> None:
    others = []
    for steps in swapped:
        assert steps[3].drifted[3:].all()
        for step in steps[3:]:
            ids = list_shared_ids(step)
            assert not set(ids[:3]) & set(ids[3:])
            others += ids[:3]
        assert len(set(ids[3:])) == 1  # one new model in the end
        assert (steps[4].accuracy > 0.7).all()
    assert np.mean(np.array(others) == 0) > 0.8


def test_decisions_are_explained_with_numbers(swapped: list[list[Step]]) -> None:
    for steps in swapped:
        created = [event for event in steps[3].events if event.kind == "created"]
        assert {3, 4, 5} <= {c for event in created for c in event.cause["clients"]}
    told = [e for steps in swapped for step in steps for e in step.events if e.kind in ("created", "decided")]
    assert {event.kind for event in told} == {"created", "decided"}
    for event in told:
        assert not event.cause["clients"] or re.search(r"\bp [<=] 0\.\d", event.cause["reason"]), event


def test_traffic_is_at_most_about_twice_that_of_one_model(swapped: list[list[Step]]) -> None:
    one = np.sum([step.sent.sum() for step in run_method(make_noisy_stream(SWAP), "Oblivious")])
    for steps in swapped:
        assert one < np.sum([step.sent.sum() for step in steps]) < 2 * one


def test_without_drift_nearly_all_stay_together_and_lose_nothing() -> None:
    apart, lost = [], []
    for seed in SEEDS:
        stream = make_noisy_stream(CALM, seed)
        steps, one = run_method(stream), run_method(stream, "Oblivious")
        apart += [home != 0 for step in steps for home in list_shared_ids(step)]
        lost.append(one[-1].accuracy.mean() - steps[-1].accuracy.mean())
    assert np.mean(apart) < 0.1 and np.mean(lost) < 0.01


def make_seasonal_stream(seed: int) -> Stream:
    """One rule that is no straight line; in every other time step the inputs of half of the clients come from where
    it bends the other way."""
    draw = np.random.default_rng(seed)

    def cell(t: int, c: int) -> tuple[Any, Any]:
        x = draw.random((200, 2))
        x[:, 0] += c > 2 and t % 2
        along = x[:, 0] - 1
        return x, (x[:, 1] > 0.5 + 0.5 * along * np.abs(along)).astype(int)

    return Stream.from_arrays([[cell(t, c) for c in range(6)] for t in range(7)], name="seasonal", n_classes=2)


def test_a_season_is_not_a_conflict() -> None:
    apart = []
    for seed in SEEDS:
        steps = run_method(make_seasonal_stream(seed))
        apart += [home != 0 for step in steps for home in list_shared_ids(step)]
        turned, still = (np.mean([step.accuracy[who] for step in steps[::2]]) for who in (slice(3, 6), slice(3)))
        assert turned < still - 0.02  # it is felt all the same
    assert np.mean(apart) < 0.1


def decisions(steps: list[Step]) -> list[Any]:
    """What was decided, without the numbers."""
    return [
        (list_shared_ids(step), step.state.models.ids, step.drifted.tolist(), [(e.kind, e.model) for e in step.events])
        for step in steps
    ]


BRIEF = Local(rounds=4, steps=10, batch=25, lr=0.1)
SHORT = np.array([[0, 0, 0], [0, 0, 0], [0, 1, 1], [0, 1, 1], [0, 1, 1]])


@pytest.mark.parametrize("kind", ["reference", "flower"])
def test_every_engine_decides_alike(kind: str) -> None:
    stream = small_stream(SHORT, size=60)
    net = default_net(stream)
    if kind == "flower":
        pytest.importorskip("flwr", reason="the extra 'flower' is not installed")
        from tests.support.flower import InProcessFlower

        engine: Engine = InProcessFlower(stream, net, BRIEF, 0)
        engine.n_steps = stream.n_steps
    else:
        engine = find_engine(kind)(stream, net, BRIEF, 0)
    simulator = find_engine("simulator")(stream, net, BRIEF, 0)
    simulated, other = (decisions(list(run_steps(each, FedDriftAuto()))) for each in (simulator, engine))
    assert simulated == other and any("created" in dict(events) for *_, events in simulated)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # what is killed closes no files
def test_a_killed_run_resumes_as_if_it_had_not_been_killed() -> None:
    assert hashes.outcome("resumed/FedDrift-Auto") == hashes.outcome("simulator/FedDrift-Auto")


def test_no_part_knows_streams_or_the_truth() -> None:
    families = {name.partition("-")[0].lower() for name in STREAMS}
    assert {"sine", "circle", "mnist"} <= families
    for module in (method, trials, new_clusters, private_models):
        words = set(re.findall(r"[a-z]+", Path(str(module.__file__)).read_text().lower()))
        assert not words & (families | {"concepts", "concept", "stream", "streams"}), module.__name__


def test_more_clients_than_ids_of_private_models_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert get_private_id(TUNED, private_models.IDS_PER_KIND - 1) < get_private_id(OWN, 0)
    with pytest.raises(fd.ConfigError, match="private models for at most 1048576 clients, got 1048577: choose another"):
        private_models.check_client_count(2**20 + 1)
    monkeypatch.setattr(private_models, "IDS_PER_KIND", 3)
    method = FedDriftAuto()
    state = method.init(FakeFederation(0, n_clients=3))
    with pytest.raises(fd.ConfigError, match="at most 3 clients, got 4"):
        method.init(FakeFederation(0, n_clients=4))
    with pytest.raises(fd.ConfigError, match="at most 3 clients, got 4"):
        method.step(state, FakeFederation(1, n_clients=4))
