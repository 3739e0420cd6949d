"""The limits of `defend="robust"`, false updates and false data: by hand, and on every engine."""

from __future__ import annotations

import logging
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import feddrift as fd
from feddrift import clustering
from feddrift.averaging import MAX_LENGTH_RATIO, MAX_PARAMETER, average_updates, limit_lengths
from feddrift.data import Stream
from feddrift.engines.conditions.byzantine import ByzantineBehaviour
from feddrift.engines.conditions.conditions import Conditions
from feddrift.engines.conditions.robust import (
    LEFT_OUT_SHARE,
    MAX_WEIGHT_RATIO,
    cap_counts,
    choose_average,
    compare_with_best,
)
from feddrift.errors import ConfigError
from feddrift.models import take
from feddrift.reports.event_text import build_run_command
from feddrift.runs import record
from feddrift.runs.config import RunConfig
from feddrift.runs.poison import ByzantineClients, parse_poison, poison_stream
from feddrift.runs.recorded_run import RecordedRun
from feddrift.simulation import Step, run_steps
from feddrift.testing import small_stream
from feddrift.trees import tree_leaves
from feddrift.types import Local, Models, Updates
from tests.support.cli import QUICK_OPTIONS, run_feddrift
from tests.support.engines import EACH_ENGINE, ENGINE_NAMES, assert_same, make_engine

CALM = np.zeros((6, 4), dtype=np.int64)  # nothing drifts
SPLIT = np.array([[0] * 5] * 2 + [[1, 1, 0, 0, 0]] * 3)  # two of five clients drift at time 2
LEARN = Local(rounds=5, steps=20, batch=10, lr=0.05)
ATTACKS = (
    Conditions(garbage=(1,)),
    *(Conditions(lies=parse_poison(f"{kind}:1", 4).behaviour) for kind in ("reverse", "collude", "stale")),
)
W = np.ones((2, 4, 1))


def defend(conditions: Conditions) -> Conditions:
    return replace(conditions, defend="robust")


def make_even_stream(concepts: Any = CALM, size: int = 20) -> Stream:
    return small_stream(concepts, size)


def get_rows(params: Any) -> Any:
    """Return [row, parameter] of parameters with a leading axis of rows."""
    leaves = [np.asarray(leaf) for leaf in tree_leaves(params)]
    return np.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], axis=1)


# counts


@given(
    honest=st.lists(st.integers(1, 10_000), min_size=2, max_size=20),
    claims=st.lists(st.integers(1, 10**15), max_size=19),
)
def test_a_minority_of_claims_is_limited_by_honest_counts(honest: list[int], claims: list[int]) -> None:
    claims = claims[: len(honest) - 1]
    n = len(honest) + len(claims)
    counts = cap_counts(np.array([honest + claims]), np.ones(n, dtype=bool), "robust")[0]
    few = len(claims) <= max(1, int(LEFT_OUT_SHARE * n))
    limit = max(honest) * (1 if few else MAX_WEIGHT_RATIO)
    assert counts.max() <= limit and counts[len(honest) :].sum() <= len(claims) * limit
    assert (counts[: len(honest)] <= honest).all() and (counts >= 1).all()
    assert (counts <= cap_counts(np.array([honest + claims]), np.ones(n, dtype=bool))[0]).all()  # the first version


def test_counts_by_hand() -> None:
    everybody = np.ones(10, dtype=bool)
    even = np.array([[50] * 7 + [10**9] * 3, [50] * 7 + [1, 60, 10**15]])
    assert cap_counts(even, everybody, "robust").tolist() == [[50] * 10, [50] * 7 + [1, 50, 50]]
    assert cap_counts(even, everybody)[0].tolist() == [50] * 7 + [250] * 3
    uneven = np.array([[10] * 5 + [20, 30, 40, 50, 60], [10] * 6 + [90] * 4])
    assert cap_counts(uneven, everybody, "robust").tolist() == [[10] * 5 + [20, 30, 30, 30, 30], [10] * 6 + [50] * 4]
    for n, capped in ((1, [9]), (2, [3, 3]), (3, [3, 3, 3])):
        assert cap_counts(np.array([[9, 3, 3][:n]]), everybody[:n], "robust").tolist() == [capped]


@pytest.mark.parametrize("name", EACH_ENGINE)
def test_a_claim_has_no_effect_among_clients_with_equal_counts(name: str, caplog: pytest.LogCaptureFixture) -> None:
    stream = make_even_stream()
    claims = Conditions(lies=ByzantineBehaviour(claims=(2,)))
    with caplog.at_level(logging.INFO):
        honest, false = (make_engine(name, stream, conditions=defend(c)).at(1) for c in (Conditions(), claims))
    assert "client 2 reports 20000000 rows and counts as 20, as other large clients" in caplog.text
    assert false.counts.tolist() == honest.counts.tolist() and false.received[2] == 20_000_000
    assert_same(false.train(false.fresh(), W).params, honest.train(honest.fresh(), W).params)
    teams = np.arange(2)[:, None, None].repeat(4, axis=1)
    results = [fed.contest(fed.fresh(2, distinct=True), teams) for fed in (honest, false)]
    np.testing.assert_array_equal(results[0].rows, results[1].rows)
    np.testing.assert_array_equal(results[0].wrong, results[1].wrong)
    assert false.confusion(false.fresh()).sum(axis=(1, 2, 3)).tolist() == [20] * 4


# updates


def make_updates(rows: Any, model: Any, n_models: int = 1) -> tuple[Models, Updates]:
    values = np.asarray(rows, dtype=np.float32)
    models = Models({"a": np.zeros((n_models, values.shape[1]), dtype=np.float32)}, tuple(range(n_models)))
    return models, Updates({"a": values}, np.arange(len(values)), np.asarray(model), np.ones(len(values)))


@pytest.mark.parametrize(
    ("rows", "model", "lengths"),
    [
        ([[3.0], [-60.0], [4.0]], [0, 0, 0], [3, 8, 4]),  # twice the median of 3, 4 and 60
        ([[3.0], [-60.0]], [0, 0], [3, 6]),  # of two lengths the smaller one
        ([[3.0], [0.0], [5.0], [6.0]], [0, 0, 1, 1], [3, 0, 5, 6]),  # the other model has a majority of the lengths
        ([[3.0], [-60.0], [5.0], [6.0]], [0, 0, 1, 1], [3, 10, 5, 6]),  # 5: the median of the round
        ([[90.0]], [0], [90]),  # alone: nothing to compare with
        ([[np.nan], [2.0], [-9.0]], [0, 0, 0], [np.nan, 2, 4]),
        ([[2 * MAX_PARAMETER], [2.0], [-9.0]], [0, 0, 0], [2 * MAX_PARAMETER, 2, 4]),  # left out by the average
    ],
)
def test_lengths_by_hand(rows: Any, model: Any, lengths: Any) -> None:
    models, updates = make_updates(rows, np.array(model), 2)
    found = limit_lengths(models, updates).params["a"]
    np.testing.assert_allclose(np.abs(found[:, 0]), lengths, rtol=1e-6)
    assert (
        np.sign(found[:, 0])[np.isfinite(found[:, 0])] == np.sign(np.array(rows)[np.isfinite(found[:, 0]), 0])
    ).all()


vectors = st.lists(st.floats(-1e9, 1e9, width=32), min_size=3, max_size=3)


@given(
    honest=st.lists(st.lists(st.floats(-10, 10, width=32), min_size=3, max_size=3), min_size=2, max_size=6),
    false=st.lists(vectors, max_size=5),
)
def test_a_minority_moves_no_model_further_than_honest_clients_do(honest: Any, false: Any) -> None:
    """Each parameter stays between those of honest clients, and no update is longer than twice the longest of them."""
    false = false[: len(honest) - 1]
    models, updates = make_updates(honest + false, np.zeros(len(honest + false), dtype=int))
    limited = limit_lengths(models, updates)
    longest = np.linalg.norm(honest, axis=1).max()
    assert (np.linalg.norm(limited.params["a"], axis=1) <= MAX_LENGTH_RATIO * longest * (1 + 1e-5) + 1e-6).all()
    found = average_updates(models, limited, "median").params["a"][0]
    of_honest = limited.params["a"][: len(honest)]
    if len(false) < len(honest) - 1:  # an odd or larger majority: the middle two values are between honest ones
        assert (found >= of_honest.min(axis=0) - 1e-3).all() and (found <= of_honest.max(axis=0) + 1e-3).all()


@pytest.mark.parametrize("conditions", ATTACKS, ids=["garbage", "reverse", "collude", "stale"])
@pytest.mark.parametrize("name", EACH_ENGINE)
def test_the_average_is_the_median_of_limited_updates(name: str, conditions: Conditions) -> None:
    stream = make_even_stream()
    plain, robust = (make_engine(name, stream, conditions=c).at(1) for c in (conditions, defend(conditions)))
    models = plain.fresh()
    sent = plain.local_updates(models, W)
    limited = limit_lengths(models, sent)
    expected = average_updates(models, limited, "median")
    assert robust.local.average == "median" and plain.local.average == "mean"
    assert_same(robust.local_updates(models, W).params, limited.params, atol=1e-6)
    robust = make_engine(name, stream, conditions=defend(conditions)).at(1)
    assert_same(robust.train(models, W, rounds=1).params, expected.params, atol=1e-6)


def test_a_rule_that_the_user_chose_stays() -> None:
    assert choose_average(Local(average="trimmed")).average == "trimmed"
    fed = make_engine("reference", make_even_stream(), conditions=Conditions(defend="robust")).at(1)
    explicit = fed.local_updates(fed.fresh(), W, Local(rounds=1, steps=1))
    assert len(explicit.client) == 4


@pytest.mark.parametrize("name", EACH_ENGINE)
def test_false_updates_are_what_their_kind_says(name: str) -> None:
    stream = make_even_stream()

    def send(**lies: Any) -> tuple[Any, Any]:
        conditions = Conditions(lies=ByzantineBehaviour(**lies))
        fed = make_engine(name, stream, conditions=conditions).at(1)
        models = fed.fresh()
        updates = fed.local_updates(models, W)
        return get_rows(updates.params), get_rows(average_updates(models, updates).params)[0]

    start = get_rows(make_engine(name, stream).at(1).fresh().params)[0]
    honest, _ = send()
    reverse, _ = send(reverse=(1,), reverse_factor=3.0)
    stale, _ = send(stale=(1, 3))
    np.testing.assert_allclose(reverse[1], start - 3 * (honest[1] - start), atol=1e-5)
    np.testing.assert_allclose(stale[[1, 3]], [start, start], atol=1e-6)
    for rows in (reverse, stale):
        np.testing.assert_allclose(rows[[0, 2]], honest[[0, 2]], atol=1e-6)
    for clients in ((1,), (1, 3)):
        collude, mean = send(collude=clients)
        others = np.delete(honest, clients, axis=0)
        np.testing.assert_allclose(mean, start - (others.mean(axis=0) - start), atol=1e-4)
        assert (collude[list(clients)] == collude[clients[0]]).all()
    alone, mean = send(collude=(0, 1, 2, 3))  # nobody to work against
    np.testing.assert_allclose(alone, honest, atol=1e-6)


@pytest.mark.parametrize("name", ["simulator", "reference"])
def test_private_models_are_trained_honestly_and_with_the_mean(name: str) -> None:
    stream = make_even_stream()
    conditions = defend(Conditions(garbage=(0,), lies=ByzantineBehaviour(reverse=(1,))))
    trained = []
    for c in (Conditions(), conditions):
        fed = make_engine(name, stream, conditions=c).at(1)
        private = take(fed.fresh(), [0, 0], [5, 6], [5, 6], [0, 1])
        w = np.zeros((2, 4, 2))
        w[:, 0, 0] = w[:, 1, 1] = 1
        trained.append(fed.train(private, w).params)
    assert_same(*trained)


def test_rounds_with_a_part_of_the_clients_use_the_median() -> None:
    conditions = Conditions(participation=0.75, garbage=(1,))
    largest = []
    for c in (conditions, defend(conditions)):
        fed = make_engine("simulator", make_even_stream(), LEARN, conditions=c).at(1)
        largest.append(np.abs(get_rows(fed.train(fed.fresh(), W).params)).max())
    assert largest[1] < largest[0] / 2


# merges


@given(
    L=st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=3, max_size=3),
    false=st.lists(st.floats(0, 1), min_size=3, max_size=3),
)
def test_false_scores_cannot_merge_what_is_worse_for_honest_clients(L: Any, false: Any) -> None:
    """Model 0 has data of Byzantine clients, who report any scores; model 1 has data of honest ones."""
    table = np.array(L)
    table[:, 0] = false
    distance = clustering.compute_distances(compare_with_best(table))[0, 1]
    assert table[0, 1] - table[1, 1] <= 2 * distance + 1e-9


def test_a_model_that_is_bad_everywhere_merges_with_none() -> None:
    L = np.array([[0.5, 0.5, np.nan], [0.1, 0.1, np.nan], [0.3, 0.3, np.nan]])
    assert clustering.compute_distances(L)[0, 1] == 0
    better = compare_with_best(L)
    assert clustering.compute_distances(better)[0, 1] == pytest.approx(0.4)
    assert np.isnan(better[:, 2]).all()
    by_class = np.stack([L, L + 0.1], axis=-1)
    np.testing.assert_allclose(compare_with_best(by_class)[..., 1], compare_with_best(L + 0.1))


@pytest.mark.parametrize("name", EACH_ENGINE)
def test_only_the_second_version_compares_with_the_best_model(name: str) -> None:
    stream = make_even_stream()
    w = np.ones((2, 4, 2))
    tables = []
    for version in (True, "robust"):
        fed = make_engine(name, stream, conditions=Conditions(defend=version)).at(1)
        models = fed.fresh(2, distinct=True)
        tables.append(fed.cross_evaluate(models, w))
        each = fed.cross_evaluate(models, w, per_client=True)
        np.testing.assert_allclose(tables[0], np.median(each, axis=2))
    np.testing.assert_allclose(tables[1], compare_with_best(tables[0]))


# decisions


def run_method(algorithm: str, conditions: Conditions, name: str = "simulator", concepts: Any = SPLIT) -> list[Step]:
    stream = make_even_stream(concepts, 30)
    engine = make_engine(name, stream, LEARN, 0, conditions)
    engine.n_steps = stream.n_steps
    settings = {"delta": 0.2} if algorithm == "FedDrift" else {}
    return list(run_steps(engine, fd.algorithm(algorithm, stream, **settings)))


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["FedDrift", "FedDrift-Auto"])
def test_engines_decide_alike_with_false_updates(algorithm: str) -> None:
    lies = ByzantineBehaviour(reverse=(4,), collude=(2,), claims=(4,))
    conditions = Conditions(garbage=(1,), lies=lies, defend="robust")
    names = [name for name in ("simulator", "reference", "flower") if name in ENGINE_NAMES]
    first, *others = [run_method(algorithm, conditions, name) for name in names]
    assert any(step.drifted.any() for step in first)
    for other in others:
        for a, b in zip(first, other, strict=True):
            assert a.model.tolist() == b.model.tolist() and a.drifted.tolist() == b.drifted.tolist()
            assert [(e.kind, e.model) for e in a.events] == [(e.kind, e.model) for e in b.events]
            np.testing.assert_allclose(a.sent, b.sent)
            if not a.state.models.private.any():
                assert_same(a.state.models.params, b.state.models.params, atol=0.01)


def test_no_more_is_sent_than_without_limits() -> None:
    plain, robust = (run_method("FedDrift", c) for c in (Conditions(), Conditions(defend="robust")))
    for a, b in zip(plain, robust, strict=True):
        assert a.model.tolist() == b.model.tolist()
        np.testing.assert_array_equal(a.sent, b.sent)


@pytest.mark.parametrize("kind", ["garbage", "reverse", "collude"])
def test_one_client_with_false_updates_no_longer_ruins_the_others(kind: str) -> None:
    lies = Conditions(garbage=(0,)) if kind == "garbage" else Conditions(lies=parse_poison(f"{kind}:0", 4).behaviour)
    accuracy = {}
    for version in (False, True, "robust"):
        steps = run_method("Oblivious", replace(lies, defend=version), concepts=CALM)
        accuracy[version] = np.mean([step.accuracy[1:] for step in steps[1:]])
    assert accuracy["robust"] > max(accuracy[False], accuracy[True]) + 0.1


# false data


def test_one_class_is_relabelled() -> None:
    stream = fd.stream("sea-2")
    changed = poison_stream(stream, ByzantineClients(relabel=(3,)))
    assert changed.cell(4, 3)[1].min() == 1 and (changed.cell(4, 2)[1] == stream.cell(4, 2)[1]).all()
    back = poison_stream(stream, ByzantineClients(relabel=(3,), relabelled_classes=(1, 0)))
    assert back.cell(4, 3)[1].max() == 0 and (stream.y >= 0).all() and stream.cell(4, 3)[1].max() == 1
    with pytest.raises(ConfigError, match="two different classes of 0 to 1, got from=0 and to=2"):
        poison_stream(stream, ByzantineClients(relabel=(3,), relabelled_classes=(0, 2)))


def test_a_backdoor_is_in_every_second_row_of_its_clients() -> None:
    stream = fd.stream("sea-2")
    changed = poison_stream(stream, ByzantineClients(backdoor=(3,)))
    for c in (2, 3):
        x, y = changed.cell(4, c)
        true_x, true_y = stream.cell(4, c)
        assert (x[1::2] == true_x[1::2]).all() and (y[1::2] == true_y[1::2]).all() and (x[:, 1:] == true_x[:, 1:]).all()
        if c == 3:
            assert (x[::2, 0] > 1.9 * stream.x.max()).all() and (y[::2] == 1).all()
        else:
            assert (x == true_x).all() and (y == true_y).all()
    assert poison_stream(stream, ByzantineClients()) is stream


# options


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("relabel:0,3:to=1:from=0", "relabel:0,3:to=1"),
        ("relabel:1:from=2:to=0", "relabel:1:from=2:to=0"),
        ("reverse:0:factor=20", "reverse:0"),
        ("stale:1+reverse:0:factor=3+collude:2,1", "reverse:0:factor=3+collude:1,2+stale:1"),
        ("reverse:0+claims:0:factor=5", "claims:0:factor=5+reverse:0"),
        ("backdoor:2+flip:1", "flip:1+backdoor:2"),
    ],
)
def test_new_kinds_of_poison_are_read_and_written(text: str, canonical: str) -> None:
    found = parse_poison(text, 4)
    assert str(found) == canonical and parse_poison(canonical, 4) == found


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("relabel:0:from=1:to=1", "relabel needs two different classes, got from=1 and to=1"),
        ("relabel:0:from=a", "classes by their numbers, such as from=1, got 'a'"),
        ("relabel:0:from=1:from=2", "from=0 and to=1, each once, got 'from=2'"),
        ("relabel:0:factor=2", "relabel may have from=0 and to=1, each once, got 'factor=2'"),
        ("reverse:0:factor=0", r"reverse: factor must be in 1..1e9, got 0"),
        ("reverse:0:factor=inf", "the factor of reverse is a number such as factor=20, got 'inf'"),
        ("stale:0:factor=2", "stale has no options, got 'factor=2'"),
        ("collude", "poison is one or more of"),
        ("backdoor:4", "clients are 0 to 3, got 4"),
    ],
)
def test_invalid_new_kinds_are_reported(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_poison(text, 4)


@pytest.mark.parametrize("value", ["robus", "", 2, 1.5, None, ["robust"], "Robust"])
def test_invalid_values_of_defend_are_reported(value: Any) -> None:
    problem = r"defend must be robust, true \(the limits of version 0.3\) or false, got "
    with pytest.raises(ConfigError, match=problem):
        RunConfig.from_values(stream="sine-2", algorithm="FedDrift", defend=value)
    with pytest.raises(ConfigError, match=problem):
        Conditions(defend=value)
    with pytest.raises(ConfigError, match=problem):
        fd.run("sine-2", "FedDrift", defend=value)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], None), (["--defend"], True), (["--defend", "true"], True), (["--defend=robust"], "robust"),
        (["--defend", "robust"], "robust"), (["--defend", "--batch", "40"], True), (["--defend", "false"], None),
    ],
)  # fmt: skip
def test_the_option_needs_no_value(
    words: list[str], expected: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["run", "--stream", "sine-2", "--algorithm", "Oblivious", "--out", str(tmp_path), *QUICK_OPTIONS, *words]
    code, _, err = run_feddrift(capsys, *command)
    assert code == 0, err
    (run,) = record.read_all(tmp_path)
    assert run.header["overrides"].get("defend") == expected
    repeated, _ = build_run_command(run.header)
    assert ("--defend" in repeated) is (expected is not None)
    code, _, err = run_feddrift(capsys, *shlex.split(repeated)[1:], "--out", str(tmp_path))
    assert code == 0 and len(record.read_all(tmp_path)) == 1, err  # the same run


def test_the_version_is_recorded(tmp_path: Path) -> None:
    stream = fd.stream("sine-2")
    for value, expected in ((False, {}), (True, {"defend": True}), ("robust", {"defend": "robust"})):
        config = RunConfig.from_values(stream="sine-2", algorithm="FedDrift", defend=value)
        assert config.list_overrides(stream) == expected and config.build_conditions(stream).defend == value
    config = RunConfig.from_values(stream="sine-2", algorithm="FedDrift", defend="robust", rounds=1)
    run = RecordedRun(config, tmp_path)
    assert len(list(run)) == 10
    header = record.read(run.path).header
    assert header["overrides"]["defend"] == "robust" and header["local"]["average"] == "mean"
