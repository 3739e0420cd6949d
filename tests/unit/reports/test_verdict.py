"""Verdicts on comparisons: the best method, noise, alarms, and the majority class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from feddrift.reports.verdict import Gain, _format_gain, find_common_alarms, find_verdicts
from feddrift.runs.record import Record, select_score
from feddrift.scores import ACCURACY
from tests.support.records import make_header, write_record

NO_ALARMS = "FedDrift raised no alarm"


def write_runs(
    out: Path, accuracies: Mapping[str, Sequence[float]], stream: str = "own", **columns: Any
) -> list[Record]:
    """Write one run for each seed of each algorithm, with this accuracy in all of its four cells."""
    records = []
    for algorithm, values in accuracies.items():
        settings = {"delta": 0.1, "test": "threshold"} if algorithm.startswith("FedDrift") else {}
        for seed, value in enumerate(values):
            header = make_header(algorithm=algorithm, settings=settings, seed=seed, stream=stream)
            cells = {"accuracy": [[value] * 2] * 2, **columns}
            records.append(write_record(out / f"{stream}-{algorithm}-{seed}", header, cells))
    return records


def write_alarm_run(out: Path, drift: Sequence[Any], events: Sequence[dict[str, Any]] = (), **columns: Any) -> Record:
    header = make_header(n_steps=len(drift), algorithm="FedDrift-Auto", settings={})
    return write_record(out, header, {"drift": drift, **columns}, events)


def test_a_clear_gain_names_the_interval_and_fine_tuning(tmp_path: Path) -> None:
    runs = {"FedDrift": (0.80, 0.81, 0.82), "Oblivious": (0.70, 0.72, 0.71), "FineTuned": (0.74, 0.75, 0.77)}
    (text,) = find_verdicts(write_runs(tmp_path, runs))
    assert text == (
        "FedDrift gains 10.0 points [7.5, 12.5] over one shared model (Oblivious). Fine-tuning alone (FineTuned) gains "
        f"4.3 points [0.5, 8.1], clearly less than FedDrift. {NO_ALARMS} in 3 runs."
    )


def test_differences_within_noise_are_no_gain(tmp_path: Path) -> None:
    runs = {"FedDrift": (0.72, 0.70, 0.73), "Oblivious": (0.71, 0.71, 0.71)}
    (text,) = find_verdicts(write_runs(tmp_path, runs))
    assert text.startswith("No method beats one shared model (Oblivious) by more than noise here: the best, FedDrift, ")
    assert (
        "differs by 0.7 points [-3.1, 4.5]" in text
        and "About 23 seeds would be enough to tell whether FedDrift is better." in text
    )


def test_a_method_that_never_differs_from_one_shared_model_is_equal(tmp_path: Path) -> None:
    (text,) = find_verdicts(write_runs(tmp_path, {"FedDrift": (0.7, 0.72), "Oblivious": (0.7, 0.72)}))
    assert text.startswith(
        "One shared model (Oblivious) is enough here: FedDrift, the best of the other methods, is equal"
    )


def test_a_method_that_is_behind_within_noise_asks_for_no_more_seeds(tmp_path: Path) -> None:
    runs = {"FedDrift": (0.71, 0.70, 0.72), "Oblivious": (0.72, 0.71, 0.7201)}
    (text,) = find_verdicts(write_runs(tmp_path, runs))
    assert text.startswith(
        "One shared model (Oblivious) is enough here: FedDrift, the best of the other methods, differs "
    )
    assert "by -0.7" in text and "would be enough to tell" not in text


def test_a_limit_that_is_not_zero_is_not_shown_as_zero(tmp_path: Path) -> None:
    runs = {"FedDrift": (0.7000, 0.7002, 0.7001), "Oblivious": (0.7003, 0.7003, 0.7003)}
    (text,) = find_verdicts(write_runs(tmp_path, runs))
    assert "loses" not in text or "[0.00," not in text
    assert _format_gain(Gain(-0.026, -0.05, -0.002, 3), ACCURACY) == "loses 0.026 points [0.002, 0.050]"


def test_one_shared_model_can_be_best(tmp_path: Path) -> None:
    runs = {"FedDrift": (0.60, 0.61, 0.60), "Oblivious": (0.70, 0.71, 0.71), "FineTuned": (0.65, 0.66, 0.66)}
    (text,) = find_verdicts(write_runs(tmp_path, runs))
    assert text.startswith(
        "One shared model (Oblivious) is best: FineTuned, the best of the other methods, loses 5.00 "
    )


def test_one_seed_is_not_enough(tmp_path: Path) -> None:
    (text,) = find_verdicts(write_runs(tmp_path, {"FedDrift": (0.8,), "Oblivious": (0.7,)}))
    assert text == (
        "One seed is not enough to tell which method is best: in this one, FedDrift has 80.0 % and one shared model "
        f"(Oblivious) 70.0 %. Run 5 seeds (`--seeds 0-4`). {NO_ALARMS}."
    )


def test_methods_that_are_equally_good_are_named(tmp_path: Path) -> None:
    runs = {"FedDrift": (0.8, 0.82, 0.81), "IFCA": (0.81, 0.8, 0.81), "Oblivious": (0.7, 0.72, 0.71)}
    (text,) = find_verdicts(write_runs(tmp_path, runs))
    assert "IFCA is within noise of FedDrift." in text


def test_seeds_of_the_method_in_question_are_compared(tmp_path: Path) -> None:
    """IFCA with one lucky seed is not the best method."""
    runs = {"FedDrift": (0.8, 0.82, 0.81), "IFCA": (0.99,), "Oblivious": (0.7, 0.72, 0.71, 0.2)}
    (text,) = find_verdicts(write_runs(tmp_path, runs))
    assert text.startswith("FedDrift gains 10.00 points [10.00, 10.00] over one shared model")
    assert "IFCA" not in text


@pytest.mark.parametrize(
    ("runs", "sentence"),
    [
        ({"FedDrift": (0.8,)}, "Nothing to compare FedDrift with: add `--algorithm Oblivious`"),
        (
            {"FineTuned": (0.8,)},
            "Nothing to compare FineTuned with: add `--algorithm Oblivious` to learn whether one shared model does as "
            "well.",
        ),
        ({"FedDrift": (0.8,), "IFCA": (0.7,)}, "One seed is not enough to tell which method is best: run 5 seeds"),
        ({"FedDrift": (0.8, 0.82), "IFCA": (0.7, 0.72)}, "FedDrift is best and gains 10"),
        ({"FedDrift": (0.8, 0.7), "IFCA": (0.7, 0.72)}, "FedDrift has the best mean, but IFCA is within noise of it"),
        (
            {"Oblivious": (0.8,), "Oracle": (0.9,)},
            "Only baselines were run: add `--algorithm FedDrift-Auto`, the default method.",
        ),
    ],
)
def test_without_one_shared_model(tmp_path: Path, runs: Mapping[str, Sequence[float]], sentence: str) -> None:
    (text,) = find_verdicts(write_runs(tmp_path, runs))
    assert text.startswith(sentence)


def test_scores_where_lower_is_better(tmp_path: Path) -> None:
    runs = {"FedDrift": (0.1, 0.1, 0.1), "Oblivious": (0.2, 0.2, 0.2)}
    records = []
    for algorithm, loss in (("FedDrift", 0.3), ("Oblivious", 0.5)):
        one = {algorithm: runs[algorithm]}
        records += write_runs(tmp_path, one, log_loss=[[loss, loss + 0.01]] * 2)
    (text,) = find_verdicts(select_score(records, "log_loss"))
    assert text.startswith("FedDrift gains 0.2000 of log loss [0.2000, 0.2000] over one shared model (Oblivious).")


def test_each_stream_has_a_verdict(tmp_path: Path) -> None:
    runs = {"FedDrift": (0.8,), "Oblivious": (0.7,)}
    both = write_runs(tmp_path, runs, "a") + write_runs(tmp_path, runs, "b")
    assert [text.partition(":")[0] for text in find_verdicts(both)] == ["a", "b"]
    assert find_verdicts([]) == []


def test_alarms_are_counted(tmp_path: Path) -> None:
    reason = "the new model is ahead; not acted on: it is too early to know whether alarms pay"
    ignored = {"t": 1, "event": "decided", "model": 0, "cause": {"clients": [0], "reason": reason}}
    review = {"reason": "the new data were compared", "alarms": 1, "confirmed": 1, "contradicted": 0}
    reviewed = {"t": 2, "event": "decided", "model": 0, "cause": {"clients": [], **review}}
    run = write_alarm_run(tmp_path, [[False, False], [True, True], [False, False]], [ignored, reviewed])
    (text,) = find_verdicts([run])
    assert text.endswith(
        "FedDrift-Auto raised 2 alarms and acted on 1 of them; later data confirmed 1 and contradicted 0."
    )
    reviewed = {**reviewed, "cause": {"clients": [], **review, "alarms": 2}}
    run = write_alarm_run(tmp_path / "open", [[False, False], [True, True], [False, False]], [ignored, reviewed])
    assert find_verdicts([run])[0].endswith("later data confirmed 1, contradicted 0 and left 1 undecided.")
    run = write_alarm_run(tmp_path / "none", [[False, False], [True, False]], [ignored])
    assert find_verdicts([run])[0].endswith("FedDrift-Auto raised 1 alarm and did not act on it.")
    run = write_alarm_run(tmp_path / "all", [[False, False], [True, True]])
    assert find_verdicts([run])[0].endswith("FedDrift-Auto raised 2 alarms and acted on all of them.")


def test_alarms_with_a_common_cause_are_counted(tmp_path: Path) -> None:
    shift = {"what": "mean", "name": "temperature", "before": 12.0, "after": 21.0, "distance": 0.4, "common": True}
    common = {"since": 0, "rows": [90, 90], "moved": [shift], "more": 0}
    own = {**common, "moved": [shift, {**shift, "name": "dust", "common": False}]}
    run = write_alarm_run(tmp_path, [[False, False], [True, True]], shifts=[[None, None], [common, own]])
    assert find_common_alarms(run) == [(1, 0)]
    (text,) = find_verdicts([run])
    assert text.endswith("At 1 of them the data changed as at most clients, for example with a season.")
    run = write_alarm_run(tmp_path / "all", [[False, False], [True, True]], shifts=[[None, None], [common, common]])
    assert find_verdicts([run])[0].endswith(
        "At all of them the data changed as at most clients, for example with a season."
    )


def test_accuracy_near_the_majority_class_names_a_score_that_separates(tmp_path: Path) -> None:
    records = []
    for algorithm, accuracy, balanced in (("FedDrift", 0.805, 0.7), ("Oblivious", 0.8, 0.5)):
        for seed in range(3):
            values = {"auc": [[balanced + 0.01 * seed] * 2] * 2, "majority": [[0.8] * 2] * 2}
            header = make_header(algorithm=algorithm, seed=seed, stream="own")
            cells = {"accuracy": [[accuracy + 0.001 * seed] * 2] * 2, **values}
            records.append(write_record(tmp_path / f"{algorithm}{seed}", header, cells))
    (text,) = find_verdicts(records)
    assert text.endswith(
        "The accuracy of FedDrift (80.6 %) is close to that of always naming each client's most frequent class "
        "(80.0 %); AUC separates the methods better (`feddrift report DIR --score auc`)."
    )


def test_near_the_majority_class_it_says_that_no_score_separates(tmp_path: Path) -> None:
    runs = {"FedDrift": (0.80, 0.81, 0.80), "Oblivious": (0.81, 0.80, 0.80)}
    (text,) = find_verdicts(write_runs(tmp_path, runs, majority=[[0.8] * 2] * 2))
    assert text.startswith(
        "No method is better than always naming each client's most frequent class (80.0 %): the best, FedDrift, has an "
        "accuracy of 80.3 %; no other score separates the methods. "
    )


def test_near_the_majority_class_one_shared_model_can_be_the_best(tmp_path: Path) -> None:
    runs = {"FedDrift": (0.79, 0.80, 0.79), "Oblivious": (0.81, 0.80, 0.80)}
    (text,) = find_verdicts(write_runs(tmp_path, runs, majority=[[0.8] * 2] * 2))
    assert "(80.0 %): the best, one shared model (Oblivious), has an accuracy of 80.3 %; no other score " in text


def test_a_method_below_the_majority_class_is_named(tmp_path: Path) -> None:
    runs = {"FedDrift": (0.6, 0.61), "Oblivious": (0.5, 0.52)}
    (text,) = find_verdicts(write_runs(tmp_path, runs, majority=[[0.8] * 2] * 2))
    assert text.startswith(
        "No method is better than always naming each client's most frequent class (80.0 %): the best, FedDrift, has an "
        "accuracy of 60.5 %. FedDrift gains 9.5 points "
    )


def test_needed_seeds() -> None:
    assert Gain(1.0, 0.5, 1.5, 5).count_needed_seeds() == 4
    assert Gain(0.01, -1.0, 1.02, 5).count_needed_seeds() is None
    assert Gain(1.0, None, None, 1).count_needed_seeds() is None
