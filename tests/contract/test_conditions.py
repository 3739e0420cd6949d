"""Absent, alternating, late, diverging and Byzantine clients, on every engine and for every algorithm."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import feddrift as fd
from feddrift import algorithms, rng
from feddrift.algorithms.feddrift.detection import DriftState
from feddrift.averaging import average_updates
from feddrift.engines.conditions.conditions import Conditions
from feddrift.engines.local.engine import InProcess
from feddrift.errors import ConfigError, DataError
from feddrift.runs.config import read_trace
from feddrift.runs.poison import ByzantineClients, parse_poison, poison_stream
from feddrift.simulation import add_newcomers, run_steps
from feddrift.types import Clusters, Local, Models, State, Updates
from tests.support.engines import (
    EACH_ENGINE,
    IN_PROCESS_ENGINES,
    LOCAL,
    SLOW_ENGINES,
    assert_same,
    draw_weights,
    make_engine,
    make_uneven_stream,
    mark_slow,
    mark_variants_slow,
)


@pytest.mark.parametrize("name", EACH_ENGINE)
def test_rounds_with_a_draw_are_the_same_one_by_one(name: str) -> None:
    stream, conditions = make_uneven_stream(), Conditions(participation=0.5)
    at_once, one_by_one = (make_engine(name, stream, conditions=conditions).at(2) for _ in range(2))
    w, trained = draw_weights(2, stream, 2), one_by_one.fresh(2)
    for _ in range(3):
        trained = one_by_one.train(trained, w, rounds=1)
    assert_same(at_once.train(at_once.fresh(2), w, rounds=3).params, trained.params)
    np.testing.assert_array_equal(at_once.sent, one_by_one.sent)


@pytest.mark.parametrize("name", EACH_ENGINE)
def test_a_participant_trains_as_if_alone(name: str) -> None:
    stream = make_uneven_stream()
    some, everybody = (
        make_engine(name, stream, conditions=Conditions(participation=0.5)).at(2),
        make_engine(name, stream).at(2),
    )
    w = np.ones((3, 4, 1))
    a, b = some.local_updates(some.fresh(), w), everybody.local_updates(everybody.fresh(), w)
    assert len(a.client) == 2 and len(b.client) == 4
    for x, y in zip(jax.tree.leaves(a.params), jax.tree.leaves(b.params), strict=True):
        np.testing.assert_allclose(x, y[a.client], atol=1e-6)


@pytest.mark.parametrize("name", mark_slow(IN_PROCESS_ENGINES, *SLOW_ENGINES))  # a real client takes no such data in
def test_a_client_that_diverges_spoils_nothing(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """The others' average is what it would be without it; what it alone trains stays as it was."""
    stream = make_uneven_stream()
    poisoned = replace(stream, x=stream.x.copy())
    for t in range(3):
        poisoned.x[stream.rows(t, 1)] = np.nan
    w = np.zeros((3, 4, 2))
    w[:, 1, 0] = w[:, :, 1] = 1
    sick, well = make_engine(name, poisoned).at(2), make_engine(name, stream).at(2)
    trained = sick.train(sick.fresh(2), w)
    assert_same(
        jax.tree.map(lambda leaf: leaf[0], trained.params), jax.tree.map(lambda leaf: leaf[0], sick.fresh(2).params)
    )
    w[:, 1] = 0
    expected = well.train(well.fresh(2), w)
    for x, y in zip(jax.tree.leaves(trained.params), jax.tree.leaves(expected.params), strict=True):
        np.testing.assert_allclose(x[1], y[1], atol=1e-6)
    assert "client 1 sent updates of model 0 that are not finite" in caplog.text


@pytest.mark.parametrize("name", EACH_ENGINE)
@pytest.mark.parametrize("rule", ["median", "trimmed", "clipped"])
def test_robust_rules_hold_against_one_in_four(name: str, rule: Any) -> None:
    stream = make_uneven_stream()
    w, size = np.ones((3, 4, 1)), []
    for conditions in (Conditions(), Conditions(garbage=(2,))):
        fed = make_engine(name, stream, replace(LOCAL, average=rule), conditions=conditions).at(2)
        size.append(max(abs(leaf).max() for leaf in jax.tree.leaves(fed.train(fed.fresh(), w, rounds=3).params)))
    plain = make_engine(name, stream, conditions=Conditions(garbage=(2,))).at(2)
    spoilt = max(abs(leaf).max() for leaf in jax.tree.leaves(plain.train(plain.fresh(), w, rounds=3).params))
    assert size[1] < 2 * size[0] < spoilt


def one_parameter(values: list[float], size: list[float]) -> tuple[Models, Updates]:
    n = len(values)
    stack = Models({"b": np.zeros((1, 1), dtype=np.float32)}, ids=(0,))
    params = {"b": np.array(values, dtype=np.float32)[:, None]}
    return stack, Updates(params, np.arange(n), np.zeros(n, dtype=np.int64), np.array(size))


@pytest.mark.parametrize(
    ("rule", "values", "expected"),
    [
        ("mean", [1, 2, 6], 3.0),
        ("mean", [1, np.nan, 5], 3.0),
        ("median", [1, 2, 60], 2.0),
        ("median", [1, 2, 4, 60], 3.0),
        ("trimmed", [-50, 1, 3, 70], 2.0),
        ("trimmed", [1, 2, 6], 3.0),  # too few to leave any out
        ("clipped", [1, -3, 90], (1 - 3 + 3) / 3),  # none longer than the median, 3
        ("mean", [np.inf, np.nan], 0.0),  # nothing to average: as it was
        ("median", [np.nan, 7], 7.0),
    ],
)
def test_averages_by_hand(rule: Any, values: list[float], expected: float) -> None:
    stack, updates = one_parameter(values, [1.0] * len(values))
    assert average_updates(stack, updates, rule).params["b"].item() == pytest.approx(expected)


@given(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=9))
def test_robust_averages_stay_within_the_sent_updates(values: list[float]) -> None:
    stack, updates = one_parameter(values, [1.0] * len(values))
    for rule in ("median", "trimmed"):
        found = average_updates(stack, updates, rule).params["b"].item()
        assert min(values) - 1e-4 <= found <= max(values) + 1e-4
    clipped = average_updates(stack, updates, "clipped").params["b"].item()
    assert abs(clipped) <= np.median(np.abs(values)) + 1e-3


def late_stream() -> fd.Stream:
    """Five clients; the fourth joins at time 1, the fifth at time 2, and the second is without news at time 2."""
    draw = np.random.default_rng(1)

    def cell(t: int, c: int) -> Any:
        if t < (c - 2) or (t, c) == (2, 1):
            return None
        x = draw.random((40, 2))
        return x, (x[:, 0] > x[:, 1]).astype(int) ^ int(t >= 2 and c > 2)

    return fd.Stream.from_arrays([[cell(t, c) for c in range(5)] for t in range(5)], n_classes=2)


class Growing(fd.engines.engine("reference")):  # type: ignore[misc]
    """Shows only the clients that have joined."""

    def worker(self, tau: int) -> Any:
        made, n = super().worker(tau), self.axis(tau)
        known = made.known
        known.clients, known.counts, known.reachable = known.clients[:n], known.counts[:, :n], known.reachable[:n]
        return made

    def axis(self, tau: int) -> int:
        return int(np.flatnonzero(self.stream.counts[: tau + 1].any(axis=0))[-1]) + 1

    def test(self, state: State, t: int) -> Any:
        return super().test(add_newcomers(state, self.stream.n_clients), t)


def without_truth(names: Any) -> list[str]:
    return [name for name in names if not name.startswith("Oracle")]


@pytest.mark.parametrize("name", mark_variants_slow(without_truth(algorithms.ALGORITHMS)))
def test_a_client_that_joins_later_is_one_that_was_out_of_reach(name: str) -> None:
    """The axis of clients grows; decisions and parameters are those of the full axis."""
    stream, local = late_stream(), Local(rounds=2, steps=3)
    net = fd.mlp(2, 4, 2)
    results = []
    delta = {"delta": 0.05} if "delta" in algorithms.get_options(algorithms.find_entry(name).cls) else {}
    for cls in (fd.engines.engine("reference"), Growing):
        results.append(list(run_steps(cls(stream, net, local, 0), fd.algorithm(name, **delta))))
    for full, short in zip(*results, strict=True):
        n = len(short.state.votes)
        assert n == (3, 4, 5, 5)[full.tau]
        private = short.state.models.private.any()
        if private or np.array_equal(short.state.votes, np.eye(n)):  # a model is made when its client joins
            assert not private or {*short.state.models.owner} - {-1} == set(range(n))
            np.testing.assert_allclose(full.accuracy[:n], short.accuracy[:n], atol=1e-6)
            continue
        assert_same(full.state.models.params, short.state.models.params, atol=1e-6)
        assert full.state.models.ids == short.state.models.ids
        joined = stream.counts[: full.tau + 1, :n].any(axis=0)
        np.testing.assert_array_equal(full.state.votes[:n][joined], short.state.votes[joined])


def test_a_newcomer_is_scored_by_all_models() -> None:
    stream = late_stream()
    fed = fd.engines.engine("simulator")(stream, fd.mlp(2, 4, 2), LOCAL, 0).at(2)
    assert fed.reachable.all() and np.isnan(fed.evaluate(fed.fresh(3, distinct=True))).any(axis=1).tolist() == [
        False, True, False, False, False,
    ]  # fmt: skip


def test_growing_keeps_what_is_known() -> None:
    w = Clusters(np.array([[0, 1, 1]]), 2)
    state = DriftState(
        Models({"b": np.zeros((2, 1))}, (0, 1)), w, w[-1], drifted=np.array([True, False, False]),
        reference=np.array([0.1, 0.2, 0.3]), previous=np.full(3, np.nan),
    )  # fmt: skip
    more = add_newcomers(state, 5)
    assert more.w.model.tolist() == [[0, 1, 1, -1, -1]] and more.votes[3:].tolist() == [[0, 1], [0, 1]]
    assert np.isnan(more.reference[3:]).all() and more.reference[:3].tolist() == [0.1, 0.2, 0.3]
    assert more.drifted is not None and more.drifted.tolist() == [True, False, False, False, False]
    assert add_newcomers(state, 3) is state
    with pytest.raises(ValueError, match="a state cannot lose clients"):
        add_newcomers(state, 2)


def test_every_field_with_a_value_per_client_can_grow() -> None:
    """A state whose arrays have as many entries as there are clients says what a newcomer has."""
    stream, local = late_stream(), Local(rounds=1, steps=1)
    for name in without_truth(algorithms.ALGORITHMS):
        *_, last = fd.run(stream, fd.algorithm(name), local=local)
        for field in fields(last.state):
            value = getattr(last.state, field.name)
            if field.name not in ("w", "votes", "drifted", "models") and isinstance(value, np.ndarray):
                assert value.shape[:1] != (5,) or "newcomer" in field.metadata, (name, field.name)


@pytest.mark.slow
@pytest.mark.parametrize("name", algorithms.ALGORITHMS)
@settings(max_examples=4, deadline=None)
@given(st.data())
def test_an_absent_client_keeps_identity_and_reference(name: str, data: Any) -> None:
    """Whatever the trace: a client out of reach uses the model it used, or what that became; nothing of it trains."""
    stream = fd.stream("sine-2", pattern="random:every=1,concepts=2,clients=4,steps=4")
    trace = np.array(data.draw(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=4, max_size=4)))
    engine = fd.engines.engine("simulator")(
        stream, fd.mlp(2, 4, 2), Local(rounds=2, steps=3), 0, Conditions(trace=trace)
    )
    made = fd.algorithm(name, stream)
    before: Any = None
    assert isinstance(engine, InProcess)
    for step in run_steps(engine, made):
        away = np.flatnonzero(~engine.reachable[step.tau])
        assert (step.sent[away] == 0).all()
        assert not step.drifted[away].any()
        assert np.isfinite(step.state.votes).all() and (np.asarray(step.state.votes).sum(axis=1) > 0).all()
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(step.state.models.params))
        if before is not None and isinstance(step.state, DriftState):
            np.testing.assert_array_equal(step.state.reference[away], before.state.reference[away])
            into = {e.model: e.cause["into"] for e in step.events if e.kind == "merged"}
            gone = {e.model for e in step.events if e.kind == "retired"}
            for c in away:
                was = int(before.model[c])
                while was in into:
                    was = into[was]
                assert was in gone or int(step.model[c]) == was
        before = step


def test_absent_clients_stop_no_merge() -> None:
    """Two models of one concept merge while a client with old data of theirs is away."""
    stream = fd.stream("sine-2", pattern="random:every=9,concepts=1,clients=4,steps=4")
    trace = np.ones((4, 4), dtype=bool)
    trace[2, 3] = False
    merged = []
    for conditions in (Conditions(), Conditions(trace=trace)):
        engine = fd.engines.engine("simulator")(stream, fd.mlp(2, 4, 2), Local(rounds=30), 0, conditions)
        steps = list(run_steps(engine, fd.algorithm("FedDrift", first="each", delta=0.1)))
        merged.append([len(step.state.models) for step in steps])
    assert merged[0][0] == 4 and merged[0][-1] == merged[1][-1] == 1
    assert merged[1][2] <= 2  # those in reach have become one


def test_the_draw_of_a_round() -> None:
    conditions, reachable = Conditions(participation=0.34), np.array([True, False, True, True])
    key = fd.rng.derive_key(0, "participation")
    drawn = conditions.draw_participants(reachable, key)
    assert drawn.sum() == 2 and not drawn[1]
    assert Conditions(participation=0.01).draw_participants(reachable, key).sum() == 1
    assert Conditions(participation=0.5).draw_participants(np.zeros(4, dtype=bool), key).sum() == 0


def test_dropout_has_the_requested_rate() -> None:
    there = Conditions(dropout=0.3).draw_reachable(np.ones((100, 100), dtype=np.int64), seed=0)
    assert there.mean() == pytest.approx(0.7, abs=0.02)
    assert (there != Conditions(dropout=0.3).draw_reachable(np.ones((100, 100), dtype=np.int64), seed=1)).any()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "needs a row per time step, got none"),
        ("1 0\n1\n", "expected 2 clients"),
        ("1 2\n", "got '2'"),
        ("a\n", "got 'a'"),
    ],
)
def test_an_invalid_trace_is_reported(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "trace").write_text(text)
    with pytest.raises(DataError, match=why):
        read_trace(tmp_path / "trace")


@pytest.mark.parametrize("name", ["nowhere", "a" * 300, "a\0b"])
def test_a_missing_trace_file_is_reported(name: str) -> None:
    with pytest.raises(DataError, match="cannot be read as text"):
        read_trace(name)


def test_a_trace_is_for_as_many_clients(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("1 0 1\n1 1 1\n")
    conditions = Conditions(trace=read_trace(tmp_path / "trace"))
    assert conditions.draw_reachable(np.ones((2, 3), dtype=np.int64), 0).tolist() == [[True, False, True], [True] * 3]
    with pytest.raises(DataError, match="has 2 rows, the stream 3 time steps"):
        conditions.draw_reachable(np.ones((3, 3), dtype=np.int64), 0)
    with pytest.raises(DataError, match="for 3 clients, the stream has 4"):
        conditions.draw_reachable(np.ones((2, 4), dtype=np.int64), 0)


@pytest.mark.parametrize("text", ["flip", "flip:", "flip:a", "bite:1", "garbage:99", "flip:" + "9" * 5000])
def test_invalid_poison_is_reported(text: str) -> None:
    with pytest.raises(ConfigError, match="poison"):
        parse_poison(text, 10)


def test_flipped_labels_are_those_of_some_clients_only() -> None:
    stream = fd.stream("sea-2")
    changed = poison_stream(stream, ByzantineClients(flip=(3,)))
    for c in (2, 3):
        assert (changed.cell(4, c)[1] == (1 - stream.cell(4, c)[1] if c == 3 else stream.cell(4, c)[1])).all()


@pytest.mark.parametrize(
    "values", [{"participation": 0.0}, {"participation": 1.1}, {"dropout": 1.0}, {"dropout": -0.1}]
)
def test_invalid_conditions_are_reported(values: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="must be"):
        Conditions(**values)  # type: ignore[arg-type]


def test_a_share_as_small_as_can_be_is_one_client() -> None:
    for share in (1e-300, 1e-10):
        assert (
            Conditions(share).draw_participants(np.ones(10, dtype=bool), rng.derive_key(0, "participation")).sum() == 1
        )


@pytest.mark.parametrize("average", ["median", "trimmed", "clipped"])
def test_a_round_without_clients_with_data_changes_nothing(average: Any) -> None:
    """The one client that is drawn has nothing to train on, which crashed where the server looks at every update."""
    x, y = np.zeros((4, 2)), [0, 1, 0, 1]
    s = fd.Stream.from_arrays([[(x, y), (x, y)], [(x, y), None], [(x, y), (x, y)]], n_classes=2)
    local = Local(rounds=3, steps=1, batch=4, average=average)
    for seed in range(3):
        engine = fd.engines.engine("reference")(s, fd.mlp(2, 2, 2), local, seed, Conditions(participation=0.5))
        assert len(list(run_steps(engine, fd.algorithm("Window")))) == 2
