"""FedDrift and FedDrift-Eager, one decision at a time, on losses written by hand."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

import feddrift as fd
from feddrift.algorithms.feddrift.method import FedDrift, FedDriftEager
from feddrift.algorithms.feddrift.variant_c import FedDriftC
from feddrift.errors import ConfigError
from feddrift.memory import LINEAR, window
from feddrift.testing import FakeFederation
from tests.support.fake_federation import NO_DRIFT, list_model_ids, make_loss_table, run_algorithm


def test_clients_may_start_with_a_model_each_and_merge_from_the_next_step_on() -> None:
    """Clients 0 and 2 are alike: their models are near each other, and far from that of client 1."""
    near = {"loss": lambda c, i: 0.1 if c % 2 == i % 2 else 0.8, "cross": lambda i, j: 0.1 if i % 2 == j % 2 else 0.9}
    first, second = run_algorithm(FedDrift(delta=0.1, first="each"), [near, near])
    assert first.models.ids == (0, 1, 2) and list_model_ids(first.votes, first.models) == [0, 1, 2]
    np.testing.assert_array_equal(first.w[0], np.eye(3))
    assert [(e.kind, e.model) for e in first.events] == [("created", 1), ("created", 2)] and first.next_id == 3
    assert [(e.model, e.cause["into"]) for e in second.events if e.kind == "merged"] == [(2, 0)]
    assert list_model_ids(second.votes, second.models) == [0, 1, 0] and not second.drifted.any()  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="FedDrift-C starts with one model"):
        FedDriftC(first="each")


def test_without_drift_nothing_happens() -> None:
    last = run_algorithm(FedDrift(delta=0.1), [NO_DRIFT] * 4)[-1]
    assert last.models.ids == (0,) and last.w.shape == (4, 3, 1) and np.asarray(last.w).all()
    assert not last.events and not last.drifted.any()  # type: ignore[union-attr]


def test_a_rise_of_exactly_delta_is_not_a_drift_and_slightly_more_is() -> None:
    worlds = [NO_DRIFT, {"loss": make_loss_table({0: [0.1, 0.2, 0.2001]})}]
    last = run_algorithm(FedDrift(delta=0.1), worlds)[-1]
    assert last.drifted.tolist() == [False, False, True]  # type: ignore[union-attr]
    assert last.models.ids == (0, 1) and list_model_ids(last.votes, last.models) == [0, 0, 1]


def test_drifted_clients_are_isolated_by_feddrift_and_share_a_model_with_eager() -> None:
    worlds = [NO_DRIFT, {"loss": make_loss_table({0: [0.1, 0.5, 0.5]})}]
    alone, together = (
        run_algorithm(FedDrift(delta=0.1), worlds)[-1],
        run_algorithm(FedDriftEager(delta=0.1), worlds)[-1],
    )
    assert list_model_ids(alone.votes, alone.models) == [0, 1, 2]
    assert list_model_ids(together.votes, together.models) == [0, 1, 1]
    np.testing.assert_array_equal(alone.w[1], np.eye(3))
    assert [e.cause["clients"] for e in alone.events] == [[1], [2]]
    assert together.events[0].cause == {"clients": [1, 2], "error": 0.5, "reference": 0.1, "delta": 0.1, "from": 0}


OUTLIER = {"loss": make_loss_table({0: [0.1, 0.1, 0.6]})}


@pytest.mark.parametrize("algorithm", [FedDrift, FedDriftEager])
def test_in_quarantine_an_outlier_leaves_no_model_behind(algorithm: Any) -> None:
    after = {"loss": make_loss_table({0: [0.1, 0.1, 0.1], 1: [0.05, 0.4, 0.4]})}
    plain, careful = (
        run_algorithm(algorithm(delta=0.1, quarantine=q), [NO_DRIFT, OUTLIER, after]) for q in (False, True)
    )
    assert plain[1].models.ids == careful[1].models.ids == (0, 1) and careful[1].waiting == (1,)
    assert list_model_ids(careful[1].votes, careful[1].models) == [0, 0, 1]  # its own client may use it at once
    assert list_model_ids(plain[2].votes, plain[2].models) == [1, 0, 0]  # somebody else took to it
    last = careful[2]
    assert last.models.ids == (0,) and list_model_ids(last.votes, last.models) == [0, 0, 0] and last.waiting == ()
    assert [(e.kind, e.model, e.cause["reason"]) for e in last.events] == [
        ("retired", 1, "the next data did not confirm the drift")
    ]
    assert last.w.model[1].tolist() == [0, 0, -1]  # the outlier trains nothing


@pytest.mark.parametrize("algorithm", [FedDrift, FedDriftEager])
def test_in_quarantine_a_drift_is_confirmed_by_the_next_data(algorithm: Any) -> None:
    after = {"loss": make_loss_table({0: [0.1, 0.6, 0.6], 1: [0.6, 0.1, 0.1]})}
    last = run_algorithm(algorithm(delta=0.1, quarantine=True), [NO_DRIFT, OUTLIER, after])[-1]
    assert last.models.ids == (0, 1) and list_model_ids(last.votes, last.models) == [0, 1, 1] and last.waiting == ()


def test_a_model_in_quarantine_waits_for_its_client_alone() -> None:
    """Its client has no news: nobody else may use it, nothing merges with it, it stays."""
    counts = np.full((3, 3), 100)
    counts[2, 2] = 0
    silent = {"loss": make_loss_table({0: [0.2] * 3, 1: [0.1] * 3}), "counts": counts, "cross": lambda i, j: 0.0}
    last = run_algorithm(FedDrift(delta=0.3, quarantine=True), [NO_DRIFT, OUTLIER, silent])[-1]
    assert last.models.ids == (0, 1) and list_model_ids(last.votes, last.models) == [0, 0, 1] and last.waiting == (1,)


def test_a_model_of_several_clients_needs_no_quarantine() -> None:
    worlds = [NO_DRIFT, {"loss": make_loss_table({0: [0.1, 0.5, 0.5]})}]
    assert run_algorithm(FedDriftEager(delta=0.1, quarantine=True), worlds)[-1].waiting == ()
    assert run_algorithm(FedDrift(delta=0.1, quarantine=True), worlds)[-1].waiting == (1, 2)


def test_a_new_model_copies_the_best_or_is_initialised() -> None:
    worlds = [NO_DRIFT, {"loss": make_loss_table({0: [0.1, 0.5, 0.1]})}]
    warm, fresh = (run_algorithm(FedDrift(delta=0.1, init_=i), worlds)[-1] for i in ("warm", "fresh"))
    # the fake's training adds one per step: model 0 was trained twice, a copy once before and once after
    assert warm.models.params["a"].tolist() == [[2.0], [2.0]]
    assert fresh.models.params["a"].tolist() == [[2.0], [1.0]]


def test_the_first_reference_is_the_untrained_model() -> None:
    """So a weak drift at time 2 cannot be seen: the untrained model was no better."""
    worlds = [{"loss": lambda c, i: 0.5}, {"loss": lambda c, i: 0.55}, {"loss": lambda c, i: 0.7}]
    states = run_algorithm(FedDrift(delta=0.1), worlds)
    assert [int(s.drifted.sum()) for s in states] == [0, 0, 3]  # type: ignore[union-attr]
    np.testing.assert_allclose(states[0].reference, 0.5)


def test_the_reference_is_overwritten_even_by_an_alarm() -> None:
    """So a second drift right after an alarm cannot be seen."""
    worlds = [NO_DRIFT, {"loss": lambda c, i: 0.5}, {"loss": lambda c, i: 0.55}]
    states = run_algorithm(FedDrift(delta=0.1), worlds)
    np.testing.assert_allclose(states[1].reference, 0.5)
    assert not states[2].drifted.any()  # type: ignore[union-attr]


def test_a_client_joins_the_best_existing_model_and_ties_go_to_the_lowest() -> None:
    worlds = [
        NO_DRIFT,
        {"loss": make_loss_table({0: [0.1, 0.1, 0.5]})},
        {"loss": make_loss_table({0: [0.4, 0.2, 0.9], 1: [0.1, 0.2, 0.1]})},
    ]
    last = run_algorithm(FedDrift(delta=0.2), worlds)[-1]
    assert list_model_ids(last.votes, last.models) == [1, 0, 1]


def test_random_ties_use_both_and_repeat_by_seed() -> None:
    worlds = [NO_DRIFT, {"loss": make_loss_table({0: [0.5] + [0.1] * 19})}, {"loss": lambda c, i: 0.1}]
    one, two = (run_algorithm(FedDrift(delta=0.2, ties="random"), worlds, n_clients=20)[-1] for _ in range(2))
    chosen = list_model_ids(one.votes, one.models)
    assert set(chosen) == {0, 1} and chosen == list_model_ids(two.votes, two.models)


def test_close_models_merge_the_step_after_and_new_ones_do_not() -> None:
    apart = {"loss": make_loss_table({0: [0.1, 0.5, 0.5]}), "cross": lambda i, j: 0.1}
    later = {"loss": make_loss_table({0: [0.1, 0.9, 0.9], 1: [0.9, 0.1, 0.2], 2: [0.9, 0.2, 0.1]}),
             "cross": lambda i, j: 0.1 if i == j or {i, j} == {1, 2} else 0.6}  # fmt: skip
    states = run_algorithm(FedDrift(delta=0.1), [NO_DRIFT, apart, later])
    assert states[1].models.ids == (0, 1, 2)  # within delta of each other, yet created only now
    assert states[2].models.ids == (0, 1)
    assert [(e.kind, e.model, e.cause) for e in states[2].events] == [("merged", 2, {"into": 1, "distance": 0.0})]
    assert list_model_ids(states[2].votes, states[2].models) == [0, 1, 1]
    np.testing.assert_array_equal(states[2].w[1], [[1, 0], [0, 1], [0, 1]])  # histories united


def test_merge_delta_is_delta_unless_given() -> None:
    close = {
        "loss": make_loss_table({0: [0.1, 0.9, 0.1], 1: [0.9, 0.1, 0.9]}),
        "cross": lambda i, j: 0.0 if i == j else 0.15,
    }
    worlds = [NO_DRIFT, {"loss": make_loss_table({0: [0.1, 0.5, 0.1]})}, close]
    assert len(run_algorithm(FedDrift(delta=0.1), worlds)[-1].models) == 2
    assert len(run_algorithm(FedDrift(delta=0.2), worlds)[-1].models) == 1
    assert len(run_algorithm(FedDrift(delta=0.1, merge_delta=0.15), worlds)[-1].models) == 1


def test_the_distances_see_the_new_assignments_but_not_the_isolated() -> None:
    algorithm = FedDrift(delta=0.1)
    worlds = [NO_DRIFT, {"loss": make_loss_table({0: [0.1, 0.5, 0.1]})}]
    state = run_algorithm(algorithm, worlds)[-1]
    fed = FakeFederation(2, 3, loss=make_loss_table({0: [0.1, 0.9, 0.5], 1: [0.9, 0.1, 0.9]}))
    algorithm.step(state, fed)
    np.testing.assert_array_equal(fed.last_cross_evaluation[2], [[1, 0], [0, 1], [0, 0]])
    assert fed.requests == ["evaluate error", "cross_evaluate error", "train"]


def test_a_client_without_new_data_keeps_identity_and_reference_and_its_history_still_trains() -> None:
    counts = np.array([[100, 100, 100], [100, 100, 100], [100, 0, 100]])
    worlds = [NO_DRIFT, {"loss": make_loss_table({0: [0.1, 0.5, 0.1]})}, {"loss": lambda c, i: 0.1, "counts": counts}]
    states = run_algorithm(FedDrift(delta=0.1), worlds)
    last = states[-1]
    assert list_model_ids(last.votes, last.models) == [0, 1, 0]
    assert last.reference.tolist() == [0.1, 0.5, 0.1] and not last.drifted.any()  # type: ignore[union-attr]
    assert last.w[2, 1].tolist() == [0, 1]


def test_a_client_that_joins_late_is_scored_by_all_models_and_raises_no_alarm() -> None:
    late = [np.array([[100, 100, 0]]), np.array([[100, 100, 0], [100, 100, 0]]),
            np.array([[100, 100, 0], [100, 100, 0], [100, 100, 100]])]  # fmt: skip
    worlds = [{**NO_DRIFT, "counts": late[0]}, {"loss": make_loss_table({0: [0.1, 0.5, 0.1]}), "counts": late[1]},
              {"loss": make_loss_table({0: [0.1, 0.9, 0.9], 1: [0.9, 0.1, 0.6]}), "counts": late[2]}]  # fmt: skip
    last = run_algorithm(FedDrift(delta=0.1), worlds)[-1]
    assert list_model_ids(last.votes, last.models) == [0, 1, 1] and not last.drifted.any()  # type: ignore[union-attr]


def test_window_forgets_data_and_unused_models() -> None:
    worlds = [NO_DRIFT, {"loss": lambda c, i: 0.5},
              {"loss": make_loss_table({0: [0.1] * 3, 1: [0.9] * 3, 2: [0.9] * 3, 3: [0.9] * 3})}]  # fmt: skip
    states = run_algorithm(FedDrift(delta=0.1, memory=window(1)), worlds)
    assert states[1].models.ids == (1, 2, 3) and not states[1].w[0].any()  # all left model 0
    assert [(e.kind, e.model) for e in states[1].events if e.kind == "retired"] == [("retired", 0)]
    assert run_algorithm(FedDrift(delta=0.1), worlds)[2].votes[:, 0].all()  # with all memory, model 0 is found again


def test_feddrift_c_keeps_one_of_the_new_models_and_forgets_the_others_data() -> None:
    worlds = [NO_DRIFT, {"loss": make_loss_table({0: [0.1, 0.5, 0.5]})}, {"loss": lambda c, i: 0.5}]
    states = run_algorithm(FedDriftC(delta=0.1), worlds)
    assert states[1].models.ids == (0, 1, 2) and list_model_ids(states[1].votes, states[1].models) == [0, 1, 2]
    gone = ({1, 2} - set(states[2].models.ids)).pop()
    kept = 3 - gone
    assert [(e.kind, e.model, e.cause["kept"]) for e in states[2].events if e.kind == "retired"] == [
        ("retired", gone, kept)
    ]
    assert states[2].w[1].sum(axis=1).tolist() == [1.0] + [float(c == kept) for c in (1, 2)]
    # client 0 rises from 0.1 to 0.5; the other two were already there, and only redetect compares with 0.1
    assert states[2].drifted.tolist() == [True, False, False]  # type: ignore[union-attr]
    again = run_algorithm(FedDriftC(delta=0.1, redetect=True), worlds)[2]
    assert again.drifted.tolist() == [True, gone == 1, gone == 2]  # type: ignore[union-attr]


def test_a_full_house_reuses_the_longest_unused_model() -> None:
    """Models 0, 1, 2 in turn; at time 3 nobody's best is 0 or 1, and 0 has been idle longer."""
    worlds: list[dict[str, Any]] = [
        NO_DRIFT,
        {"loss": lambda c, i: 0.3},
        {"loss": make_loss_table({0: [0.9] * 3, 1: [0.5] * 3})},
        {"loss": make_loss_table({0: [0.99] * 3, 1: [0.95] * 3, 2: [0.8] * 3})},
    ]
    states = run_algorithm(FedDriftEager(delta=0.1, max_models=3), worlds)
    assert [s.models.ids for s in states] == [(0,), (0, 1), (0, 1, 2), (1, 2, 3)]
    assert [(e.kind, e.model) for e in states[3].events] == [("retired", 0), ("created", 3)]
    np.testing.assert_array_equal(states[3].w[0], np.zeros((3, 3)))  # what model 0 knew is forgotten


def test_a_full_house_whose_models_are_all_chosen_makes_no_room() -> None:
    full = run_algorithm(FedDrift(delta=0.1, max_models=1), [NO_DRIFT, {"loss": lambda c, i: 0.5}])[1]
    assert full.models.ids == (0,) and full.w[1].all() and full.drifted.all()  # type: ignore[union-attr]
    some = run_algorithm(FedDrift(delta=0.1, max_models=2), [NO_DRIFT, {"loss": lambda c, i: 0.5}])[1]
    assert list_model_ids(some.votes, some.models) == [1, 0, 0]  # room for one: the first in line


def test_metric_loss_reaches_every_question() -> None:
    algorithm = FedDrift(delta=2.0, metric="loss")
    state = run_algorithm(algorithm, [NO_DRIFT, {"loss": make_loss_table({0: [0.1, 5.0, 0.1]})}])[-1]
    fed = FakeFederation(2, 3)
    algorithm.step(state, fed)
    assert fed.requests == ["evaluate loss", "cross_evaluate loss", "train"]


def test_eager_starts_from_the_best_model_of_the_first_drifted_client() -> None:
    """Client 1 is served best by model 1, client 2 by model 0; both drift."""
    worlds: list[dict[str, Any]] = [
        NO_DRIFT,
        {"loss": make_loss_table({0: [0.1, 0.4, 0.1]})},  # model 1 for client 1
        {"loss": make_loss_table({0: [0.1, 0.9, 0.5], 1: [0.9, 0.6, 0.9]})},
    ]
    last = run_algorithm(FedDriftEager(delta=0.1), worlds)[-1]
    assert list_model_ids(last.votes, last.models) == [0, 2, 2]
    assert last.events[0].cause["from"] == 1


def test_feddrift_c_draws_among_the_new_models() -> None:
    kept = set()
    for tau in range(1, 12):  # the draw is keyed by time
        quiet = [NO_DRIFT] * tau
        worlds = [*quiet, {"loss": make_loss_table({0: [0.1, 0.5, 0.5]})}, {"loss": lambda c, i: 0.5}]
        ids = run_algorithm(FedDriftC(delta=0.1), worlds)[-1].models.ids
        kept |= {1, 2} & set(ids)
    assert kept == {1, 2}


def test_feddrift_c_client_without_news_falls_back_on_the_oldest_model() -> None:
    counts = np.full((3, 3), 100)
    counts[2, 1:] = 0
    worlds = [NO_DRIFT, {"loss": make_loss_table({0: [0.1, 0.5, 0.5]})}, {"loss": lambda c, i: 0.1, "counts": counts}]
    last = run_algorithm(FedDriftC(delta=0.1), worlds)[-1]
    kept = ({1, 2} & set(last.models.ids)).pop()
    assert list_model_ids(last.votes, last.models) == [0, *(c if c == kept else 0 for c in (1, 2))]


def test_fading_memories_weigh_by_age_once() -> None:
    last = run_algorithm(FedDrift(delta=0.1, memory=LINEAR), [NO_DRIFT] * 4)[-1]
    assert last.w[:, 0, 0].tolist() == [1, 2, 3, 4]


def test_settings_out_of_range_are_refused_in_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"FedDrift.delta must be in \[0, 1\] for metric='error', got 4.0"):
        FedDrift(delta=4.0)
    with pytest.raises(ConfigError, match="merge_delta must be at least 0 and finite for metric='loss', got inf"):
        FedDrift(metric="loss", merge_delta=float("inf"))
    with pytest.raises(ConfigError, match="redetect is a setting of FedDrift-C only"):
        FedDrift(redetect=True)
    with pytest.raises(ConfigError, match="FedDriftEager.max_models must be at least 1 or none, got 0"):
        FedDriftEager(max_models=0)
    with pytest.raises(ConfigError, match="nan"):
        FedDrift(delta=float("nan"))


def test_the_warning_waits_for_the_first_scores_of_a_trained_model(caplog: pytest.LogCaptureFixture) -> None:
    counts = [np.full((t + 1, 3), 100) for t in range(4)]
    for table_ in counts[1:]:
        table_[1] = 0
    with caplog.at_level(logging.WARNING):
        run_algorithm(FedDrift(delta=0.02), [{**NO_DRIFT, "counts": n} for n in counts])
    assert len(caplog.records) == 1


def test_a_delta_within_the_noise_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        run_algorithm(FedDrift(delta=0.02), [NO_DRIFT] * 4)
    assert [r.getMessage() for r in caplog.records] == [
        "delta=0.02 is below two standard errors (0.0600) of an error measured on 100 examples: expect false alarms"
    ]
    caplog.clear()
    run_algorithm(FedDrift(delta=0.07), [NO_DRIFT] * 4)
    assert not caplog.records


@pytest.mark.parametrize(("name", "settings", "warned"), [
    ("FedDrift", {}, True), ("FedDrift", {"max_models": 50}, False), ("FedDrift-Eager", {}, False),
])  # fmt: skip
def test_many_clients_without_a_limit_of_models_get_a_cost_warning(
    name: str, settings: dict[str, Any], warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("feddrift.algorithms.feddrift.method.MIN_CLIENTS_FOR_WARNING", 10)
    stream = fd.stream("sine-2")
    next(fd.run(stream, fd.algorithm(name, stream, **settings), local=fd.Local(rounds=1, steps=1)))
    told = [record.getMessage() for record in caplog.records if "max_models" in record.getMessage()]
    assert [text.partition(":")[0] for text in told] == ["FedDrift has no max_models"] * warned
