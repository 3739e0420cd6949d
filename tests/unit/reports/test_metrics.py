"""Metrics computed by hand, and their invariants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from feddrift.reports import metrics, summary
from feddrift.runs.record import Record
from tests.support.records import make_header, make_merge_event, write_record

Cells = npt.NDArray[np.bool_]


def column(*values: int) -> Cells:
    """One client's flags over time."""
    return np.array(values, dtype=bool)[:, None]


def run(out: Path, concepts: list[list[int]], columns: dict[str, Any], events: Any = (), **changes: Any) -> Record:
    """A record with these true concepts [T + 1][c]."""
    head = make_header(len(concepts) - 1, len(concepts[0]), concepts=concepts, **changes)
    return write_record(out, head, columns, events)


def test_each_change_is_credited_with_its_first_alarm() -> None:
    changed = column(0, 0, 1, 0, 0, 0, 1, 0)
    alarms = column(0, 1, 0, 1, 1, 0, 0, 0)  # too early, one step late, again; the second change is missed
    found = metrics.score_detector(alarms, changed, np.ones_like(changed))
    assert metrics.compute_delays(alarms, changed, np.ones_like(changed)).tolist() == [1, -1]
    assert (found.changes, found.alarms, found.hits) == (2, 3, 1)
    assert found.precision == pytest.approx(1 / 3) and found.recall == 0.5
    assert found.delay == (1 + 3) / 2  # the missed one counts as three steps


def test_an_alarm_after_the_next_change_is_one_for_that() -> None:
    changed = column(0, 1, 1, 0, 0)
    assert metrics.compute_delays(column(0, 0, 1, 0, 0), changed, np.ones_like(changed)).tolist() == [-1, 0]


def test_an_alarm_that_comes_too_late_is_false() -> None:
    changed, late = column(0, 1, 0, 0, 0, 0), column(0, 0, 0, 0, 1, 0)
    found = metrics.score_detector(late, changed, np.ones_like(changed))
    assert found.hits == 0 and found.precision == 0
    assert metrics.score_detector(late, changed, np.ones_like(changed), max_delay=3).delay == 3


def test_a_coin_by_hand() -> None:
    changed = column(0, 1, 0)  # two tosses can hit it
    coin = metrics.score_coin(0.5, changed, column(0, 1, 1))
    assert (coin.alarms, coin.hits) == (1, 0.75) and coin.precision == coin.recall == 0.75
    assert coin.delay == 0.5 * 0 + 0.25 * 1 + 0.25 * 3


flags = array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=7).flatmap(
    lambda shape: st.tuples(arrays(np.bool_, shape), arrays(np.bool_, shape), arrays(np.bool_, shape))
)


@given(flags, st.integers(0, 3))
def test_no_detector_beats_the_truth_and_dummies_are_what_they_are(three: tuple[Cells, Cells, Cells], w: int) -> None:
    alarms, changed, cells = three
    changed = changed & cells  # a change shows in data
    perfect, always = (metrics.score_detector(a, changed, cells, w) for a in (changed, cells))
    never, found = (metrics.score_detector(a, changed, cells, w) for a in (np.zeros_like(cells), alarms))
    assert found.hits <= min(found.alarms, found.changes) and always.alarms == always.cells
    if changed.any():
        assert (perfect.precision, perfect.recall, perfect.delay) == (1.0, 1.0, 0.0)
        assert (always.recall, always.delay) == (1.0, 0.0)
        assert always.precision == changed.sum() / cells.sum()  # the base rate
        assert (never.precision, never.recall, never.delay) == (None, 0.0, w + 1)
        assert found.delay is not None and 0 <= found.delay <= w + 1
    for rate, same in ((0.0, never), (1.0, always)):
        coin = metrics.score_coin(rate, changed, cells, w)
        assert (coin.alarms, coin.hits, coin.delay) == (same.alarms, same.hits, same.delay)


@pytest.mark.slow
@given(flags, st.floats(0.05, 0.95), st.integers(0, 2**32 - 1))
def test_the_coin_expects_what_coins_get(three: tuple[Cells, Cells, Cells], rate: float, seed: int) -> None:
    _, changed, cells = three
    changed = changed & cells
    tosses = np.random.default_rng(seed).random((400, *cells.shape)) < rate
    coin, found = metrics.score_coin(rate, changed, cells), [metrics.score_detector(a, changed, cells) for a in tosses]
    n = max(1, int(changed.sum()))
    assert np.mean([f.hits for f in found]) == pytest.approx(coin.hits, abs=6 * np.sqrt(n / 4 / 400))


def test_a_merge_is_not_a_switch_and_a_step_back_is(tmp_path: Path) -> None:
    concepts = [[0, 0, 0]] * 5
    model = [[0, 0, 0], [0, 1, 2], [0, 1, 1], [0, 0, 3]]
    record = run(tmp_path, concepts, {"model": model}, [make_merge_event(2, 2, 1), make_merge_event(3, 1, 3)])
    assert metrics.find_switches(record).astype(int).tolist() == [[0, 0, 0], [0, 1, 1], [0, 0, 0], [0, 1, 0]]


def test_recovery_counts_losses_from_the_drift_on(tmp_path: Path) -> None:
    concepts = [[0, 0]] * 3 + [[1, 0]] * 4
    accuracy = [[0.8, 0.5], [0.9, 0.5], [0.2, 0.5], [0.6, 0.5], [0.85, 0.5], [0.95, 0.5]]
    record = run(tmp_path / "run", concepts, {"accuracy": accuracy})
    assert (
        summary.find_concept_changes(record)[3].tolist() == [True, False]
        and summary.find_concept_changes(record).sum() == 1
    )
    (own,) = metrics.cut_windows(record.rows.accuracy, record, 3, 3)
    np.testing.assert_allclose(own, [np.nan, 0.8, 0.9, 0.2, 0.6, 0.85, 0.95])
    assert metrics.sum_accuracy_loss(record) == pytest.approx([0.65 + 0.25 + 0 - 0.1])  # the level before is 0.85
    better = run(tmp_path / "oracle", concepts, {"accuracy": [[0.9, 0.9]] * 2 + [[0.3, 0.9]] + [[0.9, 0.9]] * 3})
    assert metrics.sum_accuracy_loss(record, better) == pytest.approx([0.1 + 0.3 + 0.05 - 0.05])
    assert metrics.sum_accuracy_loss(better, better) == pytest.approx([0.0])  # nothing is lost to itself


def test_a_second_change_ends_the_recovery_of_the_first(tmp_path: Path) -> None:
    concepts = [[0], [0], [1], [0], [0]]
    record = run(tmp_path, concepts, {"accuracy": [[0.9], [0.1], [0.2], [0.8]]})
    np.testing.assert_allclose(metrics.cut_windows(record.rows.accuracy, record, 1, 2), [
        [0.9, 0.1, np.nan, np.nan],
        [np.nan, 0.2, 0.8, np.nan],
    ])  # fmt: skip
    assert np.isnan(metrics.sum_accuracy_loss(record)).tolist() == [False, True]  # no level before the second


def test_changes_show_when_data_come(tmp_path: Path) -> None:
    concepts, tested = [[0], [0], [1], [1], [1]], [[5], [0], [5], [5]]  # nothing at time 2, when the concept changes
    record = run(tmp_path, concepts, {"tested": tested, "accuracy": [[0.9], [None], [0.9], [0.9]]})
    assert summary.find_concept_changes(record)[:, 0].tolist() == [False, False, False, True]
    assert metrics.find_scored_cells(record)[:, 0].tolist() == [False, True, False, True]


def test_equal_concepts_are_no_change(tmp_path: Path) -> None:
    record = run(tmp_path, [[0], [2], [1], [1]], {}, same={"2": 0})
    assert summary.find_concept_changes(record)[:, 0].tolist() == [False, False, True]
    assert metrics.count_concepts(record).tolist() == [1, 1, 1]


def test_clients_clusters_and_traffic(tmp_path: Path) -> None:
    concepts = [[0, 0, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]
    record = run(
        tmp_path,
        concepts,
        {
            "accuracy": [[0.9, None, 0.7, 0.4], [0.7, None, 0.5, 0.6]],
            "tested": [[5, 0, 5, 5], [5, 0, 5, 5]],
            "model": [[0, 0, 0, 0], [0, 0, 1, 2]],
            "drift": [[False] * 4, [False, False, True, True]],
            "models_sent": [[10] * 4, [20, 20, 30, 30]],
        },
        [{"t": 1, "event": "created", "model": m, "cause": {}} for m in (1, 2)],
    )
    found = metrics.compute_metrics(record)
    assert found.worst == pytest.approx(0.5) and found.mean == pytest.approx(0.19 / 0.3)
    assert found.tenth == pytest.approx(0.52)  # of 0.5, 0.6, 0.8: a fifth of the way from the first to the second
    assert found.spare == 0.5 and found.sent == {"first": 1.0, "drift": 2.5}
    assert found.ari is not None and found.nmi is not None and found.ari < 1 and found.nmi < 1
    assert found.alarms is not None and (found.alarms.precision, found.alarms.recall, found.alarms.delay) == (1, 1, 0)
    assert found.alarms.cells == 3  # client 1 received nothing
    assert metrics.compute_metrics(record, record).lost_to_oracle == 0


def test_without_truth_only_what_needs_none(tmp_path: Path) -> None:
    found = metrics.compute_metrics(write_record(tmp_path, make_header(3, 2)))
    assert found.alarms is None and found.noticed is None and not found.dummies
    assert found.lost is None and found.ari is None and found.spare is None
    assert found.worst == pytest.approx(0.9) and found.sent == {"first": 1.0, "quiet": 1.0}


def test_a_run_before_its_first_step(tmp_path: Path) -> None:
    found = metrics.compute_metrics(write_record(tmp_path, make_header(3, 2), steps=0))
    assert found.mean is None and found.worst is None and found.alarms is None and found.sent == {}


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=12))
def test_mutual_information_does_not_depend_on_names_or_order(pairs: list[tuple[int, int]]) -> None:
    a, b = np.array(pairs).T
    value = metrics.mutual_information(a, b)
    assert 0 <= value <= 1 and value == pytest.approx(metrics.mutual_information(b, 10 - a))
    assert metrics.mutual_information(a, a) == pytest.approx(1)
    if len(np.unique(a)) > 1:
        assert metrics.mutual_information(a, np.zeros_like(a)) == pytest.approx(0)


def test_bytes_are_reported_by_purpose(tmp_path: Path) -> None:
    columns = {"models_sent": [[10, 12], [10, 14]], "sent_scoring": [[0, 2], [0, 4]]}
    found = metrics.compute_metrics(write_record(tmp_path, make_header(2, 2, model_bytes=100), columns))
    assert found.bytes_sent == {"training": 4000.0, "scoring": 600.0}
    assert metrics.compute_metrics(write_record(tmp_path / "older", make_header(2, 2))).bytes_sent == {}


def test_traffic_is_relative_to_the_joined_clients(tmp_path: Path) -> None:
    columns = {
        "received": [[5, 0], [5, 0], [5, 5]],
        "tested": [[5, 0], [5, 5], [5, 5]],
        "models_sent": [[10, 0], [10, 0], [10, 10]],
    }
    record = write_record(tmp_path, make_header(3, 2), columns)
    assert metrics.compute_relative_traffic(record).tolist() == [1, 1, 1]
    assert summary.summarise_run(record).models_sent_ratio == 1
    assert summary.has_joined(record).tolist() == [[True, False], [True, False], [True, True]]


def test_a_client_out_of_reach_at_first_had_its_concept_all_the_same(tmp_path: Path) -> None:
    """Its change counts; traffic counts it from when it could first be used."""
    columns = {"received": [[5, 0], [5, 0], [5, 5]], "models_sent": [[10, 0], [10, 0], [10, 10]]}
    record = run(tmp_path, [[0, 0], [0, 1], [0, 1], [0, 1]], columns)
    assert summary.find_concept_changes(record).tolist() == [[False, False], [False, True], [False, False]]
    assert metrics.compute_relative_traffic(record).tolist() == [1, 1, 1]
