"""Byzantine clients and the effect of `defend`: by hand, and on every engine."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import feddrift as fd
from feddrift import clustering
from feddrift.algorithms.auto import new_clusters
from feddrift.averaging import MAX_PARAMETER, average_updates
from feddrift.data import Stream
from feddrift.engines.conditions import robust
from feddrift.engines.conditions.byzantine import ByzantineBehaviour
from feddrift.engines.conditions.conditions import Conditions
from feddrift.engines.conditions.robust import RobustWorker, cap_counts, compute_client_median
from feddrift.engines.worker import CellScores, WorkerProxy
from feddrift.errors import ConfigError
from feddrift.runs import record
from feddrift.runs.config import RunConfig
from feddrift.runs.poison import parse_poison
from feddrift.runs.recorded_run import RecordedRun
from feddrift.simulation import Step, run_steps
from feddrift.testing import SHORT_TRAINING, FakeFederation, small_stream
from feddrift.types import Clusters, Local, Models, Tournament, Updates
from tests.support.engines import (
    EACH_ENGINE,
    ENGINE_NAMES,
    IN_PROCESS_ENGINES,
    LOCAL,
    SLOW_ENGINES,
    assert_same,
    make_engine,
    mark_slow,
)

CALM = np.zeros((10, 4), dtype=np.int64)  # nothing drifts
LEARN = Local(rounds=5, steps=20, batch=10, lr=0.05)


def make_even_stream(concepts: Any = CALM, size: int = 20) -> Stream:
    return small_stream(concepts, size)


def run_method(
    algorithm: str, conditions: Conditions, concepts: Any = CALM, name: str = "simulator", local: Local = LEARN
) -> list[Step]:
    stream = make_even_stream(concepts)
    engine = make_engine(name, stream, local, 0, conditions)
    engine.n_steps = stream.n_steps  # over a network there might be more
    settings = {} if algorithm == "FedDrift-Auto" else {"delta": 0.2}
    return list(run_steps(engine, fd.algorithm(algorithm, stream, **settings)))


# weights


def test_a_client_counts_at_most_five_times_the_median() -> None:
    counts = np.array([[100, 200, 300, 10**9], [100, 200, 300, 1400]])
    everybody = np.ones(4, dtype=bool)
    assert cap_counts(counts, everybody).tolist() == [[100, 200, 300, 1250], [100, 200, 300, 1250]]  # 5 * 250
    assert cap_counts(counts[:, :3], everybody[:3]).tolist() == counts[:, :3].tolist()
    away = np.array([True, False, True, True])  # the median of 100, 300 and the claim
    assert cap_counts(counts, away)[0].tolist() == [100, 200, 300, 1500]
    assert cap_counts(np.zeros((2, 3), dtype=np.int64), np.ones(3, dtype=bool)).tolist() == [[0] * 3] * 2


def test_a_time_that_only_one_client_has_data_of_is_not_its_own_measure() -> None:
    counts = np.array([[0, 0, 10**6], [10, 30, 10**6]])
    assert cap_counts(counts, np.ones(3, dtype=bool)).tolist() == [[0, 0, 150], [10, 30, 150]]  # 5 * 30, twice


@pytest.mark.parametrize("name", EACH_ENGINE)
def test_a_claim_weighs_five_in_averages_on_every_engine(name: str) -> None:
    stream = make_even_stream()
    lies = Conditions(lies=ByzantineBehaviour(claims=(2,)))
    honest, believed, defended = (
        make_engine(name, stream, conditions=conditions).at(1)
        for conditions in (Conditions(), lies, replace(lies, defend=True))
    )
    w = np.ones((2, 4, 1))
    start, updates = honest.fresh(), honest.local_updates(honest.fresh(), w)
    assert believed.counts[:, 2].tolist() == [20_000_000] * 2 and defended.counts[:, 2].tolist() == [100] * 2
    assert believed.received.tolist() == defended.received.tolist() == [20, 20, 20_000_000, 20]  # what was said
    for fed, weight in ((believed, 1e6), (defended, 5.0)):
        size = np.array([1, 1, weight, 1]) * 40
        assert_same(
            fed.train(fed.fresh(), w, rounds=1).params,
            average_updates(start, replace(updates, size=size)).params,
            atol=1e-5,
        )


def test_a_claim_weighs_five_in_merges() -> None:
    fed = make_engine(
        "simulator", make_even_stream(), conditions=Conditions(lies=ByzantineBehaviour(claims=(2,)), defend=True)
    ).at(0)
    w = Clusters(np.array([[0, 0, 1, 1]]), 2)  # 20 + 20 rows, 100 + 20 rows
    models = Models({"a": np.array([[0.0], [1.0]])}, (0, 1))
    merged, _, _ = clustering.merge_closest(models, w, np.array([[np.inf, 0.0], [0.0, np.inf]]), fed.counts, 0.1)
    assert merged.params["a"].item() == pytest.approx(120 / 160)


@pytest.mark.parametrize("name", EACH_ENGINE)
def test_a_claim_weighs_five_in_contests_and_trials(name: str) -> None:
    stream = make_even_stream()
    lies = Conditions(lies=ByzantineBehaviour(claims=(2,)))
    honest, believed, defended = (
        make_engine(name, stream, conditions=conditions).at(1)
        for conditions in (Conditions(), lies, replace(lies, defend=True))
    )
    teams = np.arange(2)[:, None, None].repeat(4, axis=1)
    true, claimed, weighed = (fed.contest(fed.fresh(2, distinct=True), teams) for fed in (honest, believed, defended))
    assert claimed.rows.tolist() == [20, 20, 20_000_000, 20] and weighed.rows.tolist() == [20, 20, 100, 20]
    np.testing.assert_array_equal(claimed.wrong[2], true.wrong[2] * 10**6)
    np.testing.assert_array_equal(weighed.wrong[2], true.wrong[2] * 5)
    np.testing.assert_array_equal(np.delete(weighed.wrong, 2, axis=0), np.delete(true.wrong, 2, axis=0))
    confused = [fed.confusion(fed.fresh())[:, 0].sum(axis=(1, 2)).tolist() for fed in (believed, defended)]
    assert confused == [[20, 20, 20_000_000, 20], [20, 20, 100, 20]]


# merges


def test_the_middle_of_clients() -> None:
    L = np.full((2, 2, 3), np.nan)
    L[0, 0], L[0, 1], L[1, 0, :2] = [0.0, 0.5, 0.4], [0.2, 0.2, 1.0], [0.1, 0.3]
    np.testing.assert_allclose(compute_client_median(L), [[0.4, 0.2], [0.2, np.nan]])
    by_class = np.stack([L, L + 1], axis=-1)
    np.testing.assert_allclose(compute_client_median(by_class)[..., 1], [[1.4, 1.2], [1.2, np.nan]])


@pytest.mark.parametrize("name", EACH_ENGINE)
def test_a_merge_asks_the_clients_not_their_rows(name: str) -> None:
    """L of honest clients, which one that claims a million times its rows and makes no mistakes turns to zero."""
    stream, w = make_even_stream(), np.ones((2, 4, 2))
    glue = Conditions(lies=ByzantineBehaviour(claims=(2,), glue=(2,)))
    honest, believed, defended = (
        make_engine(name, stream, conditions=conditions).at(1)
        for conditions in (Conditions(), glue, replace(glue, defend=True))
    )
    models = honest.fresh(2, distinct=True)
    each = honest.cross_evaluate(models, w, per_client=True)
    assert believed.cross_evaluate(models, w).max() < 1e-5 < each.min()
    each[:, :, 2] = 0
    np.testing.assert_allclose(defended.cross_evaluate(models, w), np.median(each, axis=2))
    np.testing.assert_allclose(defended.cross_evaluate(models, w, per_client=True), each)


def test_one_client_cannot_glue_what_the_others_tell_apart() -> None:
    """The liar has data of both concepts, so it has a say on either side."""
    concepts = np.array([[0] * 5] * 2 + [[1, 1, 0, 0, 0]] * 2 + [[1, 1, 0, 0, 1]] * 5)
    glue = Conditions(lies=ByzantineBehaviour(claims=(4,), glue=(4,)))
    believed, defended = (run_method("FedDrift", c, concepts)[4] for c in (glue, replace(glue, defend=True)))
    assert len(believed.state.models) == 1 and len(defended.state.models) == 2
    assert defended.accuracy[:4].mean() > believed.accuracy[:4].mean() + 0.2


# alarms


def test_alarms_that_come_too_often_are_held_back() -> None:
    method = fd.algorithm("FedDrift", delta=0.2)
    state: Any = method.init(FakeFederation(0, 2))
    rejected = {2: [True, False]}
    for tau in range(4):
        fed = FakeFederation(tau, 2, loss=(lambda c, i: 0.9) if tau == 2 else (lambda c, i: 0.1))
        fed.rejected_alarms = np.array(rejected.get(tau, [False, False]))
        state = method.step(state, fed)
        if tau == 2:
            assert state.drifted is not None and state.drifted.tolist() == [False, True]
            assert state.reference.tolist() == [0.1, 0.9]  # held back: compared with the same again
            held = [event for event in state.events if event.kind == "decided"]
            assert [event.cause["clients"] for event in held] == [[0]] and "not acted on" in held[0].cause["reason"]
            assert state.w.model[-1].tolist() == [0, 1]


def list_creation_steps(steps: list[Step], c: int) -> list[int]:
    return [s.tau for s in steps for e in s.events if e.kind == "created" and c in e.cause["clients"]]


def list_return_steps(steps: list[Step], c: int) -> list[int]:
    back = [(s.tau, e.cause) for s in steps for e in s.events if e.kind == "decided"]
    return [tau for tau, cause in back if cause["clients"] == [c] and "a recent alarm" in cause["reason"]]


@pytest.mark.parametrize("algorithm", ["FedDrift", "FedDrift-Eager"])
def test_one_alarm_in_three_time_steps_is_acted_on(algorithm: str) -> None:
    lies = Conditions(lies=ByzantineBehaviour(alarms=(1,)))
    believed, defended = (run_method(algorithm, c) for c in (lies, replace(lies, defend=True)))
    assert list_creation_steps(believed, 1) == [1, 3, 5, 7] and list_return_steps(believed, 1) == []
    assert list_creation_steps(defended, 1) == [1, 5] and list_return_steps(defended, 1) == [3, 7]
    times = defended[-1].loop.alarm_times
    assert times is not None and times.tolist() == [robust.NO_ALARM_TIME, 5, robust.NO_ALARM_TIME, robust.NO_ALARM_TIME]
    assert believed[-1].loop.alarm_times is None


def test_auto_limits_clients_that_create_models_too_often() -> None:
    """Two clients drift at time 3, when neither may found; their errors are compared with those before it again."""
    stream = make_even_stream(np.array([[0] * 4] * 3 + [[1, 1, 0, 0]] * 3), 60)
    engine, method = make_engine("simulator", stream, LEARN, 0), fd.algorithm("FedDrift-Auto", stream)
    state, founded, errors = method.init(engine.at(0)), list[list[int]](), list[Any]()
    for tau in range(5):
        fed = engine.at(tau)
        earlier = [2, 2] if tau == 3 else [robust.NO_ALARM_TIME] * 2  # of clients 0 and 1
        fed.alarm_filter = robust.AlarmFilter(np.array(earlier), 4, tau)
        state = method.step(state, fed)
        founded.append([c for e in state.events if e.kind == "created" for c in e.cause["clients"]])
        errors.append(vars(state)["error"])
        if tau == 3:
            held = [e.cause["clients"] for e in state.events if "a recent alarm" in str(e.cause.get("reason"))]
            assert held == [[0], [1]] and fed.alarm_filter.last_times.tolist()[:2] == [2, 2]
    assert founded[:4] == [[]] * 4 and founded[4]
    np.testing.assert_array_equal(errors[3][:2], errors[2][:2])


def test_a_client_that_may_not_create_a_model_alone_may_do_so_with_others() -> None:
    """Of three founders the first two are alike; only the second may, so the third has to wait."""

    def run_contest(models: Models, teams: Any) -> Tournament:
        wrong = np.zeros((4, 3, 3), dtype=np.int64)
        wrong[:2, 2, 2] = 10  # at clients 0 and 1 the third's candidate is worse, at client 2 the others'
        wrong[2, :2, :2] = 10
        return Tournament(np.full(4, 100), wrong)

    fed = FakeFederation(2, 4, run_contest=run_contest)
    best, may = np.zeros(4, dtype=np.int64), np.array([False, True, False, False])
    found = new_clusters.create_clusters([0, 1, 2], [False] * 3, may, fed.fresh(), best, 5, 1, 0.84, fed)
    assert found.groups == [[0, 1]] and found.models.ids == (5,) and found.parents == [0]
    all_may = new_clusters.create_clusters(
        [0, 1, 2], [False] * 3, np.ones(4, dtype=bool), fed.fresh(), best, 5, 1, 0.84, fed
    )
    assert all_may.groups == [[0, 1], [2]] and all_may.models.ids == (5, 6)


def test_the_first_alarm_of_a_newcomer_counts() -> None:
    alarms = robust.AlarmFilter(np.array([4, robust.NO_ALARM_TIME]), 3, tau=5)
    assert alarms.last_times.tolist() == [4, robust.NO_ALARM_TIME, robust.NO_ALARM_TIME]
    assert alarms.accept(np.ones(3, dtype=bool)).tolist() == [False, True, True]
    assert alarms.last_times.tolist() == [4, 5, 5]


# scores that cannot be


class Absurd(WorkerProxy):
    """Client 1 answers with what cannot be."""

    def __init__(self, worker: Any, sums: float = 0.0, common: int = 0) -> None:
        super().__init__(worker)
        self.sums, self.common = sums, common

    def score(self, models: Any, cells: Any, *given: Any) -> Iterator[CellScores]:
        for which, sums, sizes in super().score(models, cells, *given):
            sums = sums.astype(float)
            sums[:, cells[which, 1] == 1] += self.sums
            yield which, sums, sizes

    def contest(self, models: Any, teams: Any, held_by: Any) -> Tournament:
        found = super().contest(models, teams, held_by)
        found.wrong[1, 0, 1] += self.common
        return found


@pytest.mark.parametrize(("metric", "sums"), [("error", 21), ("error", -30), ("brier", 30.0), ("loss", 1e38)])
def test_absurd_scores_are_refused_by_name(metric: Any, sums: float, caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine("simulator", make_even_stream(), conditions=Conditions(defend=True))
    fed = engine.at(1)
    assert isinstance(fed.worker, RobustWorker)
    fed.worker.worker = Absurd(fed.worker.worker, sums)
    with caplog.at_level(logging.WARNING):
        loss = fed.evaluate(fed.fresh(), metric)
    assert np.isnan(loss[:, 0]).tolist() == [False, True, False, False]
    assert f"time 1: client 1 reports {metric} of" in caplog.text and "excluded" in caplog.text
    assert fed.reachable.tolist() == [True, False, True, True]
    assert fed.local_updates(fed.fresh(), np.ones((2, 4, 1))).client.tolist() == [0, 2, 3]
    assert engine.at(2).reachable.all()  # in the next time step it is asked again
    resumed = engine.at(1)
    resumed.restore(fed.progress())
    assert resumed.reachable.tolist() == [True, False, True, True]


def test_absurd_tables_are_refused_by_name(caplog: pytest.LogCaptureFixture) -> None:
    fed = make_engine("simulator", make_even_stream(), conditions=Conditions(defend=True)).at(1)
    assert isinstance(fed.worker, RobustWorker)
    fed.worker.worker = Absurd(fed.worker.worker, common=1)
    teams = np.arange(2)[:, None, None].repeat(4, axis=1)
    found = fed.contest(fed.fresh(2, distinct=True), teams)
    assert found.rows.tolist() == [20, 0, 20, 20] and "client 1 reports common mistakes" in caplog.text


def test_a_loss_that_is_not_finite_is_not_counted_as_false() -> None:
    fed = make_engine("simulator", make_even_stream(), conditions=Conditions(defend=True)).at(1)
    assert isinstance(fed.worker, RobustWorker)
    fed.worker.worker = Absurd(fed.worker.worker, np.inf)
    assert np.isnan(fed.evaluate(fed.fresh(), "loss")[1, 0]) and fed.reachable.all()


# updates that cannot be


@pytest.mark.parametrize("value", [1e38, -1e38, 2 * MAX_PARAMETER])
def test_a_finite_but_absurd_update_is_left_out(value: float) -> None:
    models = Models({"a": np.zeros((1, 2), dtype=np.float32)}, (0,))
    params = {"a": np.array([[1, 1], [1, value], [3, 3]], dtype=np.float32)}
    one = np.zeros(3, dtype=np.int64)
    for rule in ("mean", "median"):
        found = average_updates(models, Updates(params, np.arange(3), one, np.ones(3)), rule)
        np.testing.assert_allclose(found.params["a"], [[2, 2]])


@pytest.mark.parametrize("name", mark_slow(IN_PROCESS_ENGINES, *SLOW_ENGINES))
def test_absurd_updates_are_left_out_on_every_engine(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Inputs of one client so large that its first step of SGD leaves a parameter that is finite and absurd."""
    stream = make_even_stream()
    huge = replace(stream, x=stream.x.copy())
    for t in range(2):
        huge.x[stream.rows(t, 1)] = 1e22
    local, w = replace(LOCAL, optimizer="sgd", steps=1, rounds=1, weight_decay=0.0), np.ones((2, 4, 1))
    fed, well = make_engine(name, huge, local).at(1), make_engine(name, stream, local).at(1)
    alone = fed.local_updates(fed.fresh(), w)
    largest = max(float(np.abs(leaf[1]).max()) for leaf in _leaves(alone.params))
    assert MAX_PARAMETER < largest < np.inf
    fed = make_engine(name, huge, local).at(1)
    w[:, 1] = 0
    expected = well.train(well.fresh(), w)
    assert_same(fed.train(fed.fresh(), np.ones((2, 4, 1))).params, expected.params, atol=1e-6)
    assert "client 1 sent updates of model 0 that are not finite or absurd" in caplog.text


def _leaves(params: Any) -> list[Any]:
    from feddrift.trees import tree_leaves

    return [np.asarray(leaf) for leaf in tree_leaves(params)]


# lies


def test_each_byzantine_behaviour_reaches_the_server() -> None:
    stream, w = make_even_stream(), np.ones((2, 4, 1))

    def told(tau: int = 1, **lies: Any) -> Any:
        return make_engine("simulator", stream, conditions=Conditions(lies=ByzantineBehaviour(**lies))).at(tau)

    honest = told()
    models = honest.fresh()
    error, teams = honest.evaluate(models)[:, 0], np.zeros((2, 4, 1), dtype=np.int64)
    alarms = told(alarms=(1, 3))
    assert np.where([False, True, False, True], 1.0, error).tolist() == alarms.evaluate(models)[:, 0].tolist()
    assert alarms.contest(models, teams).wrong[1].tolist() == [[20, 20], [20, 20]]
    assert alarms.confusion(models)[1, 0].trace() == 0 and alarms.confusion(models)[1, 0].sum() == 20
    assert told(2, alarms=(1,)).evaluate(models).tolist() == told(2).evaluate(models).tolist()  # every second step
    glue = told(glue=(1,))
    assert glue.evaluate(models)[:, 0].tolist() == error.tolist()
    assert glue.cross_evaluate(models, w, per_client=True)[0, 0, 1] == 0
    claims = told(claims=(1,), factor=3.0)
    assert claims.counts[:, 1].tolist() == [60, 60] and claims.evaluate(models)[:, 0].tolist() == error.tolist()
    losses = told(losses=(1,))
    drawn = [told(tau, losses=(1,)).evaluate(models)[1, 0] for tau in range(5)]
    assert len(set(drawn)) > 2 and all(value * 20 == round(value * 20) for value in drawn)
    assert losses.evaluate(models).tolist() == told(losses=(1,)).evaluate(models).tolist()  # no matter how often
    wrong = losses.contest(honest.fresh(2, distinct=True), np.arange(2)[:, None, None].repeat(4, axis=1)).wrong[1]
    assert (wrong == wrong.T).all() and (wrong <= np.minimum.outer(wrong.diagonal(), wrong.diagonal())).all()
    assert losses.confusion(models)[1, 0].sum() == 20


def executed_modules(conditions: Conditions) -> set[str]:
    """Return the modules of conditions of which a run calls a function."""
    folder = Path(robust.__file__).parent
    called = set()

    def notice_call(frame: Any, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.parent == folder:
            called.add(path.stem)

    steps = fd.run("sine-2", "FedDrift-Auto", local=Local(rounds=1, steps=1), conditions=conditions)
    sys.setprofile(notice_call)
    try:
        for step in steps:
            if step.tau == 4:
                break
    finally:
        sys.setprofile(None)
    return called


def test_a_plain_run_executes_no_code_of_conditions() -> None:
    lies = ByzantineBehaviour(glue=(0,))
    every = Conditions(lies=lies, defend=True, rest=1, route="batch", participation=0.5)
    assert executed_modules(every) >= {"byzantine", "conditions", "idle_models", "robust", "routing"}
    assert executed_modules(Conditions()) <= {"conditions"}
    fed = make_engine("simulator", make_even_stream()).at(0)
    assert not isinstance(fed.worker, WorkerProxy)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("flip:3,0", "flip:0,3"), ("claims:1", "claims:1"), ("claims:1:factor=1e+06", "claims:1"),
        ("claims:1:factor=20", "claims:1:factor=20"), ("glue:2+claims:1:factor=1e3", "claims:1:factor=1000+glue:2"),
        ("losses:1+alarms:1+garbage:0+flip:2", "flip:2+garbage:0+alarms:1+losses:1"),
    ],
)  # fmt: skip
def test_poison_is_read_and_written(text: str, canonical: str) -> None:
    found = parse_poison(text, 4)
    assert str(found) == canonical and parse_poison(canonical, 4) == found


@pytest.mark.parametrize(
    "text",
    ["glue:1:factor=3", "claims:1:factor=much", "claims:1:factor=0", "claims:1:factor=nan", "glue:1+", "glue:1+glue:2",
     "glue:9", "claims:1:times=3"],
)  # fmt: skip
def test_invalid_byzantine_behaviours_are_reported(text: str) -> None:
    with pytest.raises(ConfigError, match="poison|factor"):
        parse_poison(text, 4)


def test_byzantine_clients_must_be_clients() -> None:
    with pytest.raises(ConfigError, match="Byzantine clients: clients are 0 to 3, got 7"):
        make_engine("simulator", make_even_stream(), conditions=Conditions(lies=ByzantineBehaviour(glue=(7,))))
    for wrong in ({"defend": 1}, {"lies": "glue:1"}):
        with pytest.raises(ConfigError, match="must be"):
            Conditions(**wrong)


# whole runs


def test_only_enabled_settings_are_recorded(tmp_path: Path) -> None:
    stream = fd.stream("sine-2")
    plain = RunConfig.from_values(stream="sine-2", algorithm="FedDrift")
    assert "defend" not in plain.list_overrides(stream)
    both = RunConfig.from_values(stream="sine-2", algorithm="FedDrift", defend=True, poison="glue:1+claims:0", rounds=1)
    assert both.list_overrides(stream) == {"rounds": 1, "defend": True, "poison": "claims:0+glue:1"}
    run = RecordedRun(both, tmp_path)
    assert len(list(run)) == 10
    assert record.read(run.path).header["overrides"]["defend"] is True


def test_a_defended_run_is_the_argument_of_run() -> None:
    a, b = (
        list(fd.run("sine-2", "FedDrift", local=Local(rounds=1), **given))
        for given in ({"defend": True}, {"conditions": Conditions(defend=True)})
    )
    for x, y in zip(a, b, strict=True):
        assert_same(x.state.models.params, y.state.models.params)
    assert a[-1].loop.alarm_times is not None


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["FedDrift", "FedDrift-Auto"])
def test_engines_decide_alike_with_byzantine_clients(algorithm: str) -> None:
    conditions = Conditions(lies=ByzantineBehaviour(claims=(3,), alarms=(1,), glue=(3,), losses=(2,)), defend=True)
    concepts = np.array([[0] * 4] * 2 + [[1, 1, 0, 0]] * 3)
    runs = [
        run_method(algorithm, conditions, concepts, name)
        for name in ("simulator", "reference", "flower")
        if name in ENGINE_NAMES
    ]
    for other in runs[1:]:
        for a, b in zip(runs[0], other, strict=True):
            assert a.state.models.ids == b.state.models.ids and a.drifted.tolist() == b.drifted.tolist()
            assert [(e.kind, e.model) for e in a.events] == [(e.kind, e.model) for e in b.events]


@pytest.mark.parametrize("algorithm", ["FedDrift", "FedDrift-Auto", "FairFedDrift", "FedDrift-Trunk", "FLUX", "CFL"])
def test_byzantine_clients_and_gaps_at_once(algorithm: str) -> None:
    """Clients without data, out of reach and lying in every way, against a server that defends itself."""
    lies = ByzantineBehaviour(claims=(0,), alarms=(1,), glue=(2,), losses=(3,))
    stream = small_stream(missing=[(0, 0), (1, 0), (2, 3), (3, 3), (4, 1)])
    conditions = Conditions(0.5, 0.3, lies=lies, defend=True)
    steps = list(fd.run(stream, algorithm, local=SHORT_TRAINING, conditions=conditions))
    assert len(steps) == stream.n_steps
    for step in steps:
        assert all(np.isfinite(leaf).all() for leaf in _leaves(step.state.models.params))
        assert np.isfinite(step.state.votes).all() and (np.asarray(step.state.votes).sum(axis=1) > 0).all()
