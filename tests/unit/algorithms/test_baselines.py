"""The baselines, one time step at a time, with numbers that can be checked on paper."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import feddrift as fd
from feddrift import clustering
from feddrift.algorithms import ALGORITHMS
from feddrift.algorithms.baselines.adaptive import AdaptiveFedAvg, AdaptiveState
from feddrift.algorithms.baselines.aue import AUE
from feddrift.algorithms.baselines.cfl import CFL
from feddrift.algorithms.baselines.driftsurf import DriftSurf, SurfState
from feddrift.algorithms.baselines.ifca import IFCA
from feddrift.algorithms.baselines.kue import KUE, compute_kappa, draw_mask
from feddrift.engines.local import sampling
from feddrift.memory import ALL, EXPONENTIAL, LINEAR, window
from feddrift.testing import FakeFederation
from feddrift.types import Local, Models, Updates, Weights
from tests.support.fake_federation import list_model_ids


def play(algorithm: Any, worlds: list[dict[str, Any]], n_clients: int = 2) -> list[Any]:
    feds = [FakeFederation(tau, n_clients, **world) for tau, world in enumerate(worlds)]
    state, states = algorithm.init(feds[0]), []
    for fed in feds:
        state = algorithm.step(state, fed)
        states.append(state)
    return states


def test_all_22_names_of_the_paper_are_there_and_a_few_more() -> None:
    private = {"Local", "Local-W", "FineTuned", "FineTuned-W", "Majority"}
    later = {"FairFedDrift", "FedRC", "FedEM", "FLUX", "FEROMA", "FedRep", "Flash", "FedCCFA-Heads"}
    more = {"FedDrift-Auto", "FedDrift-Trunk", "Oracle-Trunk"} | private | later
    assert sorted(set(ALGORITHMS) - more) == sorted(
        ["Oblivious", "DriftSurf", "KUE", "AUE", "AUE-PC", "Window", "Window-2", "Weighted-Linear", "Weighted-Exp",
         "Adaptive-FedAvg", "IFCA", "IFCA-W", "IFCA(T)", "CFL", "CFL-W", "FedDrift-Eager", "FedDrift-Eager-W",
         "FedDrift", "FedDrift-W", "FedDrift-C", "Oracle", "Oracle-W"]
    )  # fmt: skip


def test_the_catalogue_composes_the_named_streams() -> None:
    memories = {name: getattr(entry.cls(**entry.fixed), "memory", None) for name, entry in ALGORITHMS.items()}
    assert {name for name, memory in memories.items() if memory == window(1)} == {
        "Window", "CFL-W", "IFCA-W", "FedDrift-Eager-W", "FedDrift-W", "Oracle-W", "Local-W", "FineTuned-W",
        "Flash", "FedRC", "FedEM",
    }  # fmt: skip
    assert memories["Window-2"] == window(2) and memories["Weighted-Linear"] == LINEAR
    assert memories["Weighted-Exp"] == EXPONENTIAL
    assert {name for name, memory in memories.items() if memory == ALL} == {
        "Oblivious", "CFL", "IFCA", "IFCA(T)", "FedDrift-Eager", "FedDrift", "FedDrift-C", "Oracle",
        "FedDrift-Trunk", "Oracle-Trunk", "Local", "FineTuned", "Majority", "FairFedDrift", "FedRep",
    }  # fmt: skip


def test_default_thresholds_are_the_papers() -> None:
    drift = {"sine": 0.10, "circle": 0.04, "sea": 0.04, "mnist": 0.10, "fmow": 0.06, "own": 0.05}
    surf = {"sine": 0.10, "circle": 0.05, "sea": 0.02, "mnist": 0.10, "fmow": 0.04, "own": 0.05}
    base = fd.stream("sine-2")
    for family in drift:
        stream = replace(base, family=family)
        for name in ("FedDrift", "FedDrift-W", "FedDrift-C", "FedDrift-Eager", "FedDrift-Eager-W", "FedDrift-Trunk"):
            assert fd.algorithm(name, stream).delta == drift[family]  # type: ignore[attr-defined]
        assert fd.algorithm("DriftSurf", stream).delta == surf[family]  # type: ignore[attr-defined]


def test_tables_are_tested_without_a_threshold_unless_one_is_given() -> None:
    table = replace(fd.stream("sine-2"), family="table")
    for name in ("FedDrift", "FedDrift-W", "FedDrift-C", "FedDrift-Eager", "FedDrift-Trunk"):
        assert fd.algorithm(name, table).test == "two-sample"  # type: ignore[attr-defined]
        assert fd.algorithm(name, table, delta=0.1).test == "threshold"  # type: ignore[attr-defined]
        assert fd.algorithm(name, table, metric="loss").test == "threshold"  # type: ignore[attr-defined]
        assert fd.algorithm(name, table, test="proportional", delta=0.1).test == "proportional"  # type: ignore[attr-defined]
        assert fd.algorithm(name, fd.stream("sine-2")).test == "threshold"  # type: ignore[attr-defined]


def make_window() -> Any:
    """An algorithm by a function."""
    return fd.algorithm("Window")


def test_a_function_may_make_an_algorithm() -> None:
    assert fd.algorithm(f"{__name__}:make_window", fd.stream("sine-2")) == fd.algorithm("Window")


def test_defaults_follow_the_stream() -> None:
    sine, sea, circle = (fd.stream(name) for name in ("sine-2", "sea-4", "circle-2"))
    found = [fd.algorithm("DriftSurf", s).delta for s in (sine, circle, sea)]  # type: ignore[attr-defined]
    assert found == [0.10, 0.05, 0.02] and fd.algorithm("DriftSurf").delta == 0.05  # type: ignore[attr-defined]
    rates = [fd.algorithm("Adaptive-FedAvg", s).lr for s in (sine, sea)]  # type: ignore[attr-defined]
    assert rates == [0.1, 0.01]
    assert [fd.algorithm("IFCA", s).n_models for s in (sine, sea)] == [2, 4]  # type: ignore[attr-defined]


# Adaptive-FedAvg


def test_adaptive_rate_by_hand() -> None:
    start = AdaptiveState(Models({}, ()), np.zeros((0, 1, 1)), np.ones((1, 1)), rate=0.1)
    one = start.update_rate(np.array([2.0, 0.0]), start=0.1)
    # mean 1, 0 -> corrected 2, 0; variance 0.5 * mean(4, 0) = 1 -> corrected 2; first ratio 1 -> rate 0.1 / 1
    assert one.variance == 1.0 and one.rate == 0.1
    two = one.update_rate(np.array([2.0, 2.0]), start=0.1)
    # deviation from (2, 0): mean(0, 4) = 2, variance 0.5 + 1 = 1.5 -> corrected 2; ratio 1; rate 0.1 * 1 / 2
    assert two.variance == 1.5
    np.testing.assert_allclose(two.rate, 0.05)
    three = two.update_rate(np.array([2.0, 2.0]), start=0.1)
    # mean was (1.5, 1) / 0.75 = (2, 4/3): deviation mean(0, 4/9) = 2/9; variance 0.75 + 1/9; ratio 0.4921
    ratio = (0.75 + 1 / 9) / 0.875 / 2
    np.testing.assert_allclose(three.rate, 0.1 * ((0.375 + 0.5 * ratio) / 0.875) / 3)


def test_adaptive_changes_the_rate_four_rounds_before_the_end() -> None:
    fed = FakeFederation(0, 2, local=Local(rounds=10))
    algorithm = AdaptiveFedAvg(lr=0.2)
    state = algorithm.step(algorithm.init(fed), fed)
    assert fed.requests == ["train rounds=6 lr=0.2", f"train rounds=4 lr={state.rate:g}"]
    _, w, local = fed.trained
    assert local.optimizer == "sgd" and local.weight_decay == 0 and w.shape == (1, 2, 1)
    later = FakeFederation(2, 2)
    algorithm.step(state, later)
    assert later.trained[1][:, 0, 0].tolist() == [0, 0, 1]  # the newest data only
    short = FakeFederation(0, 2, local=Local(rounds=1))
    algorithm.step(algorithm.init(short), short)
    assert short.requests == ["train rounds=1 lr=0.2", f"train rounds=0 lr={state.rate:g}"]


def test_adaptive_never_leaves_the_constant_predictor_of_circle() -> None:
    stream = fd.stream("circle-2")
    steps = fd.run(stream, fd.algorithm("Adaptive-FedAvg", stream), local=Local(rounds=10, lr=1e-2))
    accuracy = 100 * np.array([s.accuracy for s in steps])
    assert stream.concepts is not None
    omitting = accuracy[stream.concepts[:-1] == stream.concepts[1:]].mean()
    assert round(omitting, 2) == 86.26 and round(accuracy.mean(), 2) == 85.60


# DriftSurf


def surf(*accuracies: dict[int, float]) -> list[SurfState]:
    """States after steps in which the model with id i has this accuracy; models not named: 0.9."""
    worlds = [{"loss": lambda c, i, a=a: 1 - a.get(i, 0.9)} for a in accuracies]
    return play(DriftSurf(delta=0.1), worlds)


def test_driftsurf_starts_with_two_models_and_stays_calm() -> None:
    states = surf({}, {}, {0: 0.81, 1: 0.81})
    assert all(s.models.ids == (0, 1) and not s.reactive and s.votes[:, 0].all() for s in states)
    assert states[1].best == 0.9 and states[2].best == 0.9  # a drop of 0.09 is within delta
    assert states[2].w.sum(axis=(0, 1)).tolist() == [6, 6]


def test_driftsurf_reacts_compares_twice_and_keeps_the_better() -> None:
    states = surf({}, {}, {0: 0.7, 1: 0.7}, {0: 0.6, 2: 0.8}, {0: 0.65, 2: 0.85}, {2: 0.86})
    assert states[2].reactive and states[2].models.ids == (0, 2) and states[2].votes[:, 0].all()
    assert states[2].drifted.all() and not states[3].drifted.any()  # type: ignore[union-attr]
    assert states[2].w[:, 0].tolist() == [[1, 0], [1, 0], [1, 1]]  # the reactive model sees only the new data
    assert states[3].votes[:, 1].all()  # the better predicts
    np.testing.assert_allclose(states[4].compared, [[0.6, 0.8], [0.65, 0.85]])
    assert not states[4].reactive and states[4].models.ids == (2,) and states[4].best == 0.85
    assert states[5].models.ids == (2, 3) and states[5].w[:, 0].tolist() == [[0, 0]] * 2 + [[1, 0]] * 3 + [[1, 1]]


def test_driftsurf_keeps_the_old_model_when_the_new_one_is_not_better() -> None:
    states = surf({}, {}, {0: 0.7, 1: 0.7}, {0: 0.6, 2: 0.7}, {0: 0.65, 2: 0.5})
    assert states[4].models.ids == (0,) and states[4].best == 0.9 and np.asarray(states[4].votes).tolist() == [[1], [1]]


def test_driftsurf_also_reacts_when_the_stable_model_is_better_by_half_delta() -> None:
    assert surf({}, {}, {0: 0.86, 1: 0.92})[2].reactive
    assert not surf({}, {}, {0: 0.86, 1: 0.90})[2].reactive


# AUE


def test_aue_by_hand() -> None:
    """Guessing costs 0.25 with two classes: weights 1/0.5, 1/0.75 and, for the newest, 1/0.25."""
    brier = {0: 0.5, 1: 0.25, 2: 0.9}
    states = play(AUE(n_models=3), [{"loss": lambda c, i: brier[i]}] * 3)
    np.testing.assert_allclose(states[0].votes, [[1.0]] * 2)
    raw = np.array([1 / 0.75, 1 / 0.5, 1 / 0.25])
    np.testing.assert_allclose(states[2].votes, np.tile(raw / raw.sum(), (2, 1)))
    assert states[2].models.ids == (0, 1, 2) and states[2].ballot == "hard"
    assert states[2].w[:, 0].tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]  # each on all data since its creation


def test_aue_forgets_its_oldest_and_pc_weighs_per_client() -> None:
    worlds = [{"loss": lambda c, i: 0.5 if c == i % 2 else 0.0}] * 4
    pooled, own = play(AUE(n_models=2), worlds)[-1], play(AUE(n_models=2, per_client=True), worlds)[-1]
    assert pooled.models.ids == (2, 3) and own.models.ids == (2, 3)
    np.testing.assert_allclose(pooled.votes[0], pooled.votes[1])
    np.testing.assert_allclose(pooled.votes[0], np.array([2, 4]) / 6)  # brier 0.25 on average
    np.testing.assert_allclose(own.votes, [np.array([4 / 3, 4]) / (16 / 3), np.array([4, 4]) / 8])


def test_aue_as_released_shifts_the_weights() -> None:
    brier = {0: 0.5, 1: 0.25, 2: 0.9}
    votes = [s.votes[0] for s in play(AUE(n_models=3, as_released=True), [{"loss": lambda c, i: brier[i]}] * 3)]
    np.testing.assert_allclose(votes[0], [1])
    np.testing.assert_allclose(votes[1], [0, 1])  # of two, only the newest
    np.testing.assert_allclose(votes[2], np.array([0, 1 / 0.75, 4]) / (1 / 0.75 + 4))


# KUE


def test_kappa_by_hand() -> None:
    counts = np.array([[[45, 15], [25, 15]], [[50, 0], [0, 50]], [[50, 0], [50, 0]], [[0, 0], [0, 0]]])
    # agreement 0.6, chance 0.7 * 0.6 + 0.3 * 0.4 = 0.54
    np.testing.assert_allclose(compute_kappa(counts), [0.06 / 0.46, 1, 0, 0])


def confusions(*right: int) -> Any:
    """One client; model m gets right[m] of 50 in each of two classes right."""
    return np.array([[[[r, 50 - r], [50 - r, r]] for r in right]])


def test_kue_votes_by_kappa_and_replaces_the_worst_by_a_better_candidate() -> None:
    worlds: list[dict[str, Any]] = [
        {"confusions": confusions(40, 30, 20)},
        {"confusions": confusions(40, 30, 20, 35)},  # the candidate, last, beats model 2
        {"confusions": confusions(40, 30, 35, 5)},  # this one does not
    ]
    states = play(KUE(n_models=3), worlds, n_clients=1)
    np.testing.assert_allclose(states[0].votes, [[0.6, 0.2, 0]])  # 80, 60 and 40 % right: kappa 0.6, 0.2, -0.2
    assert states[1].models.ids == (0, 1, 3)
    np.testing.assert_allclose(states[1].votes, [[0.6, 0.2, 0.4]])
    assert states[2].models.ids == (0, 1, 3) and states[2].ballot == "soft"
    np.testing.assert_array_equal(states[2].models.mask, states[2].masks)
    assert states[2].w[:, 0].tolist() == [[0] * 3, [0] * 3, [1] * 3]  # the newest data only


def test_kue_keeps_its_models_when_the_candidate_only_ties() -> None:
    worlds: list[dict[str, Any]] = [{"confusions": confusions(25, 25, 25)}, {"confusions": confusions(25, 25, 25, 25)}]
    last = play(KUE(n_models=3), worlds, n_clients=1)[-1]
    assert last.models.ids == (0, 1, 2) and last.events == ()
    np.testing.assert_allclose(last.votes, [[1, 1, 1]])  # nobody is better than chance


def test_kue_trains_on_masked_bags_of_the_newest_data() -> None:
    fed = FakeFederation(0, 1, confusions=confusions(40, 30))
    algorithm = KUE(n_models=2)
    algorithm.step(algorithm.init(fed), fed)
    models, _, local = fed.trained
    assert local.bags and models.mask is not None and models.mask.shape == (2, 4)


def test_bags_draw_by_poisson_weights() -> None:
    """Two stages: about exp(-1) of the rows have no weight, and of the others some are missed by the n draws."""
    n = 20_000
    drawn = np.bincount(sampling.draw_bootstrap(0, 1, 2, 3, 4, n), minlength=n)
    assert drawn.sum() == n
    # P(never drawn) = E[exp(-weight)] with weight ~ Poisson(1): exp(exp(-1) - 1)
    np.testing.assert_allclose((drawn == 0).mean(), np.exp(np.exp(-1) - 1), atol=0.01)
    assert not np.array_equal(sampling.draw_bootstrap(0, 1, 2, 3, 4, 50), sampling.draw_bootstrap(0, 1, 2, 3, 5, 50))


def test_driftsurf_waits_while_no_client_has_new_data() -> None:
    counts = np.full((3, 2), 100)
    counts[2] = 0
    after = np.concatenate([counts, [[100, 100]]])
    worlds: list[dict[str, Any]] = [{"loss": lambda c, i: 0.15}] * 2 + [{"counts": counts}]
    worlds.append({"loss": lambda c, i: 0.15, "counts": after})
    states = play(DriftSurf(delta=0.1), worlds)
    np.testing.assert_allclose([s.best for s in states], [0, 0.85, 0.85, 0.85])
    assert not states[3].reactive and states[3].models.ids == (0, 1)


def test_driftsurf_remembers_no_more_than_its_window() -> None:
    worlds: list[dict[str, Any]] = [{"loss": lambda c, i: 0.1}] * 4
    assert play(DriftSurf(delta=0.1, window=2), worlds)[-1].w[:, 0, 0].tolist() == [0, 0, 1, 1]


def test_aue_pc_client_without_news_follows_the_others() -> None:
    counts = np.array([[100, 100], [100, 0]])
    worlds: list[dict[str, Any]] = [{}, {"loss": lambda c, i: 0.25 * (1 - i), "counts": counts}]
    votes = play(AUE(per_client=True), worlds)[-1].votes
    np.testing.assert_allclose(votes[0], np.array([2, 4]) / 6)
    np.testing.assert_allclose(votes[1], votes[0])


def test_kue_as_released_leaves_the_worst_out_and_widens_its_mask() -> None:
    worlds: list[dict[str, Any]] = [{"confusions": confusions(20, 40, 30)}, {"confusions": confusions(40, 30, 20)}]
    states = play(KUE(n_models=2, as_released=True), worlds, n_clients=1)
    np.testing.assert_allclose(states[0].votes, [[0, 0.6, 0.2]])  # model 0 is out at first, whatever its kappa
    assert states[0].models.mask is None and states[0].worst == 0
    assert (states[1].masks[0] >= states[0].masks[0]).all()
    np.testing.assert_array_equal(states[1].masks[1:], states[0].masks[1:])
    assert states[1].worst == 2
    np.testing.assert_allclose(states[1].votes, [[0.6, 0.2, 0]])
    assert states[1].models.params["a"].tolist() == [[1], [2], [2]]  # model 0 started over


def test_masks_keep_between_one_and_all_features() -> None:
    sizes = [int(draw_mask(FakeFederation(t, 1), k).sum()) for t in range(20) for k in range(10)]
    assert set(sizes) == {1, 2, 3, 4}
    assert min(sizes.count(n) for n in (1, 2, 3, 4)) > 25  # each r is as likely


# CFL


def make_opposed_updates(models: Models, w: Weights) -> Updates:
    """Clients 0 and 1 pull up, clients 2 and 3 down, by ten; before that all pull together by twenty."""
    lanes = [(c, m) for m in range(len(models)) for c in range(4) if w[-1, c, m]]
    together = float(models.params["a"][0, 0]) == 0
    pull = [20.0, 20.0, 20.0, 20.0] if together else [10.0, 10.0, -10.0, -10.0]
    params = np.array([[models.params["a"][m, 0] + pull[c]] for c, m in lanes])
    c, m = np.array(lanes).T
    return Updates({"a": params}, c, m, np.ones(len(lanes)))


def test_cfl_splits_a_cluster_that_pulls_apart() -> None:
    fed = FakeFederation(0, 4, local=Local(rounds=2), lanes=make_opposed_updates)
    algorithm = CFL(gamma=0.1)
    state = algorithm.step(algorithm.init(fed), fed)
    # round 1: mean move 20, the largest so far, averaged to 20; round 2: mean 0 < 2, longest 10 < 12: no split
    assert state.models.ids == (0,) and state.largest == 20
    wide = FakeFederation(0, 4, local=Local(rounds=2), lanes=lambda m, w: _doubled(make_opposed_updates(m, w), m))
    state = algorithm.step(algorithm.init(wide), wide)
    # now the second moves are 20: longest 20 > 12, cosine -1 across: sqrt((1 + 1) / 2) = 1 > 0.1, split
    assert state.models.ids == (0, 1) and list_model_ids(state.votes, state.models) == [0, 0, 1, 1]
    assert state.models.params["a"].tolist() == [[0.0], [0.0]]  # both start over, nothing is averaged
    assert state.events[0].cause == {"from": 0, "clients": [2, 3], "round": 1}
    capped = CFL(gamma=0.1, max_models=1)
    assert capped.step(capped.init(wide), wide).models.ids == (0,)


def _doubled(updates: Updates, models: Models) -> Updates:
    old = models.params["a"][updates.model]
    moves = updates.params["a"] - old
    return Updates({"a": old + np.where(old == 0, moves, 2 * moves)}, updates.client, updates.model, updates.size)


def test_cfl_moves_the_whole_history_and_its_window_none() -> None:
    state = CFL().init(FakeFederation(0, 2))
    fed = FakeFederation(2, 2, local=Local(rounds=1), lanes=lambda m, w: Updates(
        {"a": np.ones((2, 1))}, np.array([0, 1]), np.array([0, 0]), np.ones(2)))  # fmt: skip
    assert CFL().step(state, fed).w[:, 0, 0].tolist() == [1, 1, 1]
    assert CFL(memory=window(1)).step(state, fed).w[:, 0, 0].tolist() == [0, 0, 1]


def test_bipartition_by_hand() -> None:
    similarity = np.array([[1, 0.5, -0.6], [0.5, 1, -0.2], [-0.6, -0.2, 1]])
    assert clustering.split_cluster(similarity, 0.7).tolist() == [2]  # type: ignore[union-attr]  # sqrt(1.2 / 2) = 0.775
    assert clustering.split_cluster(similarity, 0.8) is None
    assert clustering.split_cluster(np.ones((2, 2)), 0.0) is None  # alike: sqrt(0) is not above 0
    assert clustering.split_cluster(np.full((3, 3), -0.5), 0.1) is not None  # ties do not keep a cluster together


# IFCA


def test_ifca_starts_on_one_model_and_then_chooses() -> None:
    worlds: list[dict[str, Any]] = [{"loss": lambda c, i: 0.1 * (1 - i)}, {"loss": lambda c, i: abs(c - i) / 2}]
    once = play(IFCA(n_models=2, every_round=False), worlds)
    assert list_model_ids(once[0].votes, once[0].models) == [0, 0]  # though model 1 is better
    assert list_model_ids(once[1].votes, once[1].models) == [0, 1]
    fed = FakeFederation(1, 2, local=Local(rounds=3), loss=worlds[1]["loss"])
    IFCA(n_models=2).step(once[0], fed)
    assert fed.requests == ["evaluate error", *["train rounds=1", "evaluate error"] * 3]
    windowed = IFCA(n_models=2, every_round=False, memory=window(1)).step(once[0], fed)
    assert not windowed.w[0].any() and windowed.w[1].tolist() == [[1, 0], [0, 1]]


def test_ifca_w_learns_the_true_clustering_of_sine() -> None:
    stream = fd.stream("sine-2")
    steps = list(fd.run(stream, fd.algorithm("IFCA-W", stream), local=Local(rounds=20)))
    models = np.array([s.model for s in steps])
    np.testing.assert_array_equal(models, stream.concepts[:-1])  # type: ignore[index]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: AUE(n_models=0), "AUE.n_models must be at least 1, got 0"),
        (lambda: KUE(n_models=0), "KUE.n_models must be at least 1, got 0"),
        (lambda: CFL(gamma=2), r"CFL.gamma must be in \[0, 1\], got 2"),
        (lambda: CFL(max_models=0), "CFL.max_models must be at least 1 or none, got 0"),
        (lambda: IFCA(n_models=0), "IFCA.n_models must be at least 1, got 0"),
        (lambda: DriftSurf(delta=-1), r"DriftSurf.delta must be in \[0, 1\], got -1"),
        (lambda: AdaptiveFedAvg(lr=0), "AdaptiveFedAvg.lr must be above 0 and at most 1e6, got 0"),
        (lambda: AdaptiveFedAvg(lr=1e300), "AdaptiveFedAvg.lr must be above 0 and at most 1e6, got 1e\\+300"),
    ],
)
def test_settings_out_of_range(make: Any, sentence: str) -> None:
    with pytest.raises(fd.ConfigError, match=sentence):
        make()


@pytest.mark.parametrize(
    ("name", "given", "sentence"),
    [
        ("FedDrift", {"name": "x"}, "unknown setting of FedDrift 'name'"),  # a TypeError before
        ("FedDrift", {"stream": "x"}, "unknown setting of FedDrift 'stream'"),  # an AttributeError
        ("Oracle", {"name": "x"}, "Oracle has no settings, got 'name'"),
        ("FedDrift", {"max_models": True}, "FedDrift.max_models must be a number, got True"),  # taken for 1
        ("DriftSurf", {"delta": False}, "DriftSurf.delta must be a number, got False"),
        ("IFCA", {"n_models": "9" * 19}, "IFCA.n_models must be at most 1000000, got '9"),
        ("KUE", {"n_models": 10**5000}, "at most 1000000, got a number of thousands of digits"),  # a ValueError
        ("CFL", {"gamma": -(10**5000)}, "CFL.gamma must be a number, got a number of thousands of digits"),
    ],
)
def test_settings_that_mean_nothing(name: str, given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(fd.ConfigError, match=sentence):
        fd.algorithm(name, **given)
