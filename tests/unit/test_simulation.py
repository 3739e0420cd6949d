"""The loop over time steps and its derivations from the states of an algorithm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import feddrift as fd
from feddrift.engines import engine as find_engine
from feddrift.engines.conditions.conditions import Conditions
from feddrift.errors import ConfigError
from feddrift.nets import default_net
from feddrift.runs import recorded_run as recorded_module
from feddrift.runs.config import RunConfig
from feddrift.runs.record import read
from feddrift.runs.recorded_run import RecordedRun
from feddrift.simulation import find_model_events, run_steps
from feddrift.types import Clusters, Event, Federation, Local, Models, State


def state(ids: tuple[int, ...], used: list[int], events: tuple[Event, ...] = ()) -> State:
    """Client c uses the model with id used[c]."""
    votes = np.array([[float(i == u) for i in ids] for u in used])
    return State(Models({}, ids), votes[None], votes, events=events)


def kinds(before: State, after: State) -> list[tuple[str, int]]:
    return [(e.kind, e.model) for e in find_model_events(before, after)]


def test_a_model_that_falls_out_of_use_is_retired_and_may_be_revived() -> None:
    both, only = state((0, 1), [0, 1]), state((0, 1), [1, 1])
    assert kinds(both, only) == [("retired", 0)]
    assert kinds(only, both) == [("revived", 0)]
    assert find_model_events(only, both)[0].cause == {"clients": [0]}
    assert find_model_events(both, only)[0].cause == {"reason": "no client uses it"}
    assert find_model_events(both, state((1,), [1, 1]))[0].cause == {"reason": "deleted"}
    assert kinds(both, both) == []


def test_the_target_of_a_merge_is_revived_when_it_was_idle() -> None:
    merged = Event("merged", 1, {"into": 0, "distance": 0.0})
    idle = state((0, 1), [1, 1])
    assert kinds(idle, state((0,), [0, 0], (merged,))) == [("merged", 1), ("revived", 0)]
    assert kinds(state((0, 1, 2), [0, 1]), state((0, 2), [2, 2], (merged,))) == [
        ("merged", 1), ("retired", 0), ("revived", 2),
    ]  # fmt: skip


def test_a_model_is_not_created_twice() -> None:
    created = Event("created", 1, {})
    assert kinds(state((0,), [0, 0]), state((0, 1), [0, 1], (created,))) == [("created", 1)]
    decided = Event("decided", 0, {"clients": [1], "reason": "stays"})
    both = state((0, 1), [0, 1])
    assert kinds(both, state((0, 1), [1, 1], (decided,))) == [("decided", 0), ("retired", 0)]
    private = replace(both, models=Models({}, (0, 1), owner=(-1, 1)))
    assert kinds(private, state((0,), [0, 0])) == []  # private models need no events
    told = Event("retired", 0, {"reason": "its own"})
    assert find_model_events(state((0, 1), [0, 1]), state((1,), [1, 1], (told,))) == (told,)


class Wrong:
    """FedAvg that trains nothing, and makes something else of its states."""

    def __init__(self, spoil: Callable[[State], Any], first: Callable[[State], Any] = lambda state: state) -> None:
        self.spoil, self.first = spoil, first

    def init(self, fed: Federation) -> Any:
        n = fed.n_clients
        return self.first(State(fed.fresh(2), w=np.zeros((0, n, 2)), votes=np.ones((n, 2))))

    def step(self, before: State, fed: Federation) -> Any:
        return self.spoil(replace(before, w=np.ones((fed.tau + 1, fed.n_clients, 2)), events=()))


def spoil_state(name: str, value: float, *at: int) -> Callable[[State], State]:
    """The state with one number of w or of the votes replaced."""

    def spoil(state: State) -> State:
        array = np.array(getattr(state, name))
        array[at] = value
        return replace(state, **{name: array})  # type: ignore[arg-type]

    return spoil


def not_numbers(state: State) -> State:
    params = {name: np.array(leaf) for name, leaf in state.models.params.items()}
    params["b2"][1, 0] = np.inf
    return replace(state, models=replace(state.models, params=params))


def news(*events: Any) -> Callable[[State], State]:
    return lambda state: replace(state, events=events)


NONSENSE: list[tuple[Callable[[Any], Any], str]] = [
    (lambda s: None, " must return a State, got NoneType"),
    (lambda s: replace(s, models=None), ": models must be Models, got NoneType"),
    (lambda s: replace(s, models=replace(s.models, ids=(3, 3))), r": models must have different ids, got \(3, 3\)"),
    (lambda s: replace(s, votes=np.ones((10, 3))), r": votes must have shape \(10, 2\) .* got \(10, 3\)"),
    (lambda s: replace(s, votes=s.votes.tolist()), r": votes must have shape \(10, 2\) .* got list"),
    (lambda s: replace(s, w=np.ones((4, 10, 2))), r": w must have shape \(., 10, 2\) .* got \(4, 10, 2\)"),
    (lambda s: replace(s, w=Clusters(np.full(s.w.shape[:2], 5), 2)), ": w must name positions of 2 models"),
    (spoil_state("w", np.nan, -1, 3, 1), r": w must be finite and not negative, got nan at \(t, c, m\) = \(., 3, 1\)"),
    (spoil_state("votes", np.nan, 3, 1), r": votes must be finite and not negative, got nan at \(c, m\) = \(3, 1\)"),
    (spoil_state("votes", -1, 0, 0), ": votes must be finite and not negative, got -1"),
    (spoil_state("votes", 0, 4), ": every client needs a model to vote with, client 4 has none"),
    (lambda s: replace(s, ballot="secret"), ": ballot must be hard or soft, got 'secret'"),
    (not_numbers, ": parameters must be finite, those of model 1 are not"),
    (lambda s: replace(s, drifted=np.array([3])), ": drifted must be None or an array of 10 truth values, got int64"),
    (lambda s: replace(s, drifted=[True] * 10), ": drifted must be None or an array of 10 truth values, got list"),
    (lambda s: replace(s, events=Event("revived", 0, {})), ": events must be a tuple of Event, got Event"),
    (news("created"), ": events must be a tuple of Event, got tuple"),
    (news(Event("reset", 0, {})), ": an event is one of created, merged, .* got Event"),  # type: ignore[arg-type]
    (news(Event("created", 7, None)), ": an event is .* with a dictionary as its cause, got"),  # type: ignore[arg-type]
    (news(Event("decided", 0, {"clients": [10], "reason": "far"})), ": a decision must name its clients, of 0 to 9"),
    (news(Event("decided", 0, {"clients": [[1]], "reason": "far"})), ": a decision must name its clients, of 0 to 9"),
]


BRIEF = Local(rounds=1, steps=1)


@pytest.mark.parametrize(("spoil", "why"), NONSENSE)
def test_a_custom_method_that_returns_an_invalid_state_gets_an_error(spoil: Callable[[State], Any], why: str) -> None:
    with pytest.raises(ConfigError, match=f"^Wrong.step at tau=0{why}"):
        next(fd.run("sine-2", Wrong(spoil), local=BRIEF))


def test_so_is_one_that_begins_with_nonsense() -> None:
    for first, why in {
        lambda s: None: " must return a State, got NoneType",
        lambda s: replace(s, w=np.zeros((0, 10, 1))): r": w must have shape \(0, 10, 2\) .* got \(0, 10, 1\)",
        not_numbers: ": parameters must be finite, those of model 1 are not",
    }.items():
        with pytest.raises(ConfigError, match=f"^Wrong.init{why}"):
            next(fd.run("sine-2", Wrong(lambda state: state, first), local=BRIEF))


def test_news_of_the_step_before_are_refused() -> None:
    """As `replace(state, ...)` would tell them again."""

    def told(*steps: Callable[[State], State]) -> list[State]:
        made = iter(steps)
        states = fd.run("sine-2", Wrong(lambda state: next(made)(state)), local=BRIEF)
        return [next(states).state for _ in steps]

    born, merged = news(Event("created", 1, {})), news(Event("merged", 1, {"into": 0, "distance": 0.0}))
    alarm = lambda state: replace(state, drifted=np.ones(10, dtype=bool))  # noqa: E731
    assert len(told(born, lambda state: state, merged)) == 3  # at tau=0 there was no model before
    with pytest.raises(ConfigError, match="at tau=1: model 1 is created, but was there before: events and drifted be"):
        told(born, born)
    with pytest.raises(ConfigError, match="at tau=1: model 7 is merged or retired, but was not there before"):
        told(born, news(Event("retired", 7, {})))
    assert told(news(Event("created", 7, {}), Event("retired", 7, {})))  # in one step
    with pytest.raises(ConfigError, match="at tau=1: these alarms are those of the step before"):
        told(alarm, lambda state: state)


@pytest.mark.parametrize("engine", ["simulator", "reference"])
def test_a_step_logs_its_data_scores_and_traffic(engine: str) -> None:
    stream, local = fd.stream("sine-2", pattern="random:every=2,concepts=2,clients=4,steps=4"), Local(rounds=2, steps=5)
    one_out = Conditions(trace=np.array([[True] * 4, [True, True, False, True], [True] * 4, [True] * 4]))
    made = find_engine(engine)(stream, default_net(stream), local, 0, one_out)
    method = fd.algorithm("FedDrift")
    before = method.init(made.at(0))
    for step in run_steps(made, method):
        expected = stream.counts[step.tau].copy()
        if step.tau == 1:
            expected[2] = 0
            assert np.isnan(step.loss[2]) and step.sent[2] == 0
        assert step.received.tolist() == expected.tolist()
        here, ids = np.flatnonzero(step.received), before.models.ids
        scored = made.at(step.tau).evaluate(before.models)
        for c in here:
            known = step.model[c] in ids
            assert step.loss[c] == scored[c, ids.index(step.model[c])] if known else np.isnan(step.loss[c])
        assert (step.sent_scoring[here] >= len(ids)).all()
        lanes = (np.asarray(step.state.w)[:, here].sum(axis=0) > 0).sum(axis=1)
        assert ((step.sent - step.sent_scoring)[here] == 2 * local.rounds * lanes).all()
        before = step.state


def test_a_method_that_never_scores_has_no_loss() -> None:
    (first, *_) = fd.run(fd.stream("sine-2"), fd.algorithm("Oblivious"), local=Local(rounds=1, steps=1))
    assert np.isnan(first.loss).all() and (first.sent_scoring == 0).all() and (first.sent == 2).all()


def test_the_loss_is_that_before_training() -> None:
    stream, local = fd.stream("sine-2"), Local(rounds=2, steps=20)
    method = fd.algorithm("IFCA")  # chooses after every round
    made = find_engine("simulator")(stream, default_net(stream), local, 0)
    before = method.init(made.at(0))
    for step in run_steps(made, method):
        if step.tau:
            scored = made.at(step.tau).evaluate(before.models)
            assert step.loss.tolist() == [scored[c, before.models.ids.index(m)] for c, m in enumerate(step.model)]
        before = step.state
    first = next(iter(fd.run(stream, fd.algorithm("AUE"), local=local)))  # which scores what it has trained
    assert np.isnan(first.loss).all()


def test_a_record_has_the_values_of_its_steps(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).random((40, 2)), np.tile([0, 1], 20)
    (tmp_path / "data").mkdir()
    for name, first in (("a", 0), ("b", 1)):
        (tmp_path / "data" / f"client_{name}").mkdir()
        for t in range(first, 4):
            np.savez(tmp_path / "data" / f"client_{name}" / f"step_{t + 5}.npz", x=x[: 30 + t], y=y[: 30 + t])
    config = RunConfig.from_values(stream=f"folder:{tmp_path / 'data'}", algorithm="FedDrift", rounds=1, steps=1)
    recorded = RecordedRun(config, tmp_path / "runs")
    steps = list(recorded)
    found = read(recorded.path)
    assert found.header["times"] == ["step_5", "step_6", "step_7", "step_8"] and found.header["model_bytes"] == 4 * 22
    for name in ("received", "loss", "sent_scoring"):
        assert np.allclose(
            getattr(found.rows, name), [getattr(step, name) for step in steps], atol=1e-6, equal_nan=True
        )
    assert found.rows.received.tolist() == [[30, 0], [31, 31], [32, 32]]
    assert np.isnan(found.rows.loss[0, 1]) and not np.isnan(found.rows.loss[2]).any()


def test_a_resumed_run_knows_which_models_were_in_use(tmp_path: Path) -> None:
    config = RunConfig.from_values(stream="sine-2", algorithm="FedDrift", rounds=2, steps=20)
    whole = list(RecordedRun(config, tmp_path / "whole"))
    begun = iter(RecordedRun(config, tmp_path / "parts"))
    for _ in range(5):
        next(begun)
    begun.close()  # type: ignore[attr-defined]
    again = RecordedRun(config, tmp_path / "parts", resume=True)
    first = next(iter(again))
    assert again.previous_models is not None and again.previous_models.tolist() == whole[first.tau - 1].model.tolist()


def test_models_are_counted_once_for_all_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each of them would take a time that grows with the square of their number."""
    asked: list[int] = []

    def counted(state: State) -> int:
        asked.append(1)
        return 7

    monkeypatch.setattr(recorded_module, "count_models", counted)
    rows, _ = recorded_module.build_lines(next(fd.run("sine-2", "Oblivious", local=fd.Local(rounds=1, steps=1))))
    assert len(asked) == 1 and {row["n_models"] for row in rows} == {7} and len(rows) == 10
