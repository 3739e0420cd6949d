"""The contract of algorithms, for every name of the catalogue, on both engines."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import islice
from typing import Any

import numpy as np
import pytest

import feddrift as fd
from feddrift.algorithms import ALGORITHMS
from feddrift.data import Stream
from feddrift.engines import ENGINES
from feddrift.nets import default_net
from feddrift.types import Ints, Local
from tests.support.engines import mark_slow, mark_variants_slow

LOCAL = Local(rounds=4, steps=8, batch=10, lr=0.05)
NAMES = list(ALGORITHMS)
# Names that differ from another name of their class in how far back a model remembers, and in nothing else. FedDrift-W,
# Window and Weighted-Exp stand for them in the quick checks.
OTHER_MEMORIES = (
    "Window-2", "Weighted-Linear", "CFL-W", "IFCA-W", "FedDrift-Eager-W", "Local-W", "FineTuned-W", "Oracle-W",
)  # fmt: skip
# Two clients drift at once (and are isolated, then merged), concept 0 is left by all and found again by one.
PATTERN = np.array([[0, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [0, 1, 1, 1], [0, 1, 1, 1]])


def make_drifting_stream(concepts: Ints = PATTERN, size: int = 40, seed: int = 0) -> Stream:
    """Two features; concept 1 swaps the labels of concept 0."""
    draw = np.random.default_rng(seed)

    def cell(concept: int) -> Any:
        x = draw.random((size, 2))
        return x, (x[:, 0] > x[:, 1]).astype(int) ^ concept

    return Stream.from_arrays([[cell(k) for k in row] for row in concepts], n_classes=2, concepts=concepts)


RELEASED = {"AUE as released": "AUE", "AUE-PC as released": "AUE-PC", "KUE as released": "KUE"}


def each_behaviour(names: Sequence[str]) -> list[Any]:
    """Return all names; those that only remember differently are left to the long checks."""
    return mark_slow(names, *OTHER_MEMORIES)


def make_algorithm(name: str, stream: Stream) -> Any:
    if name in RELEASED:
        return fd.algorithm(RELEASED[name], stream, as_released=True)
    return fd.algorithm(name, stream)


def play_steps(name: str, stream: Stream, seed: int = 0, engine: str = "simulator") -> Iterator[fd.Step]:
    return iter(fd.run(stream, fd.algorithm(name, stream), local=LOCAL, seed=seed, engine=engine))


def play(name: str, stream: Stream, seed: int = 0, engine: str = "simulator") -> list[fd.Step]:
    return list(play_steps(name, stream, seed, engine))


@cache
def run_method(name: str) -> list[fd.Step]:
    """The run of a name that many tests look at; none of them changes it."""
    stream = make_drifting_stream()
    return list(fd.run(stream, make_algorithm(name, stream), local=LOCAL))


def row(step: fd.Step) -> Any:
    return step.accuracy.tolist(), step.model.tolist(), step.sent.tolist(), step.events


def test_other_memories_are_fixed_settings_and_nothing_else() -> None:
    """So that a name with another behaviour is not left to the long checks."""
    quick = [ALGORITHMS[name] for name in NAMES if name not in OTHER_MEMORIES]
    for name in OTHER_MEMORIES:
        entry = ALGORITHMS[name]
        assert list(entry.fixed) == ["memory"] and any(other.cls is entry.cls for other in quick)


@pytest.mark.parametrize("name", each_behaviour(NAMES))
def test_same_seed_same_rows_and_another_seed_others(name: str) -> None:
    stream = make_drifting_stream()
    expected = [row(step) for step in run_method(name)]
    assert expected == [row(step) for step in play(name, stream)]
    another = map(row, play_steps(name, stream, seed=1))
    assert any(ours != theirs for ours, theirs in zip(expected, another, strict=True))  # the first difference is enough


OPTIONS: dict[str, dict[str, Any]] = {
    "fresh": {"init": "fresh"}, "loss": {"metric": "loss", "delta": 0.3}, "capped": {"max_models": 2},
    "random ties": {"ties": "random"}, "eager to merge": {"merge_delta": 0.5},
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS)
def test_engines_take_the_same_decisions_under_every_option(options: str) -> None:
    stream = make_drifting_stream()
    algorithm = fd.algorithm("FedDrift", stream, **{"delta": 0.2, **OPTIONS[options]})
    a, b = (
        [(s.model.tolist(), [(e.kind, e.model) for e in s.events])
         for s in fd.run(stream, algorithm, local=LOCAL, engine=engine)]
        for engine in ("simulator", "reference")
    )  # fmt: skip
    assert a == b
    assert any(kind == "created" for _, events in a for kind, _ in events)


def test_the_stream_of_these_tests_has_merges_and_revivals() -> None:
    stream = make_drifting_stream()
    steps = fd.run(stream, fd.algorithm("FedDrift", stream, delta=0.2), local=LOCAL)
    kinds = {e.kind for s in steps for e in s.events}
    assert kinds == {"created", "merged", "retired", "revived"}


@pytest.mark.parametrize("name", mark_variants_slow(NAMES))
def test_engines_take_the_same_decisions(name: str) -> None:
    a, b = run_method(name), play(name, make_drifting_stream(), engine="reference")
    for x, y in zip(a, b, strict=True):
        assert x.model.tolist() == y.model.tolist() and x.sent.tolist() == y.sent.tolist()
        assert [(e.kind, e.model) for e in x.events] == [(e.kind, e.model) for e in y.events]
        assert abs(x.accuracy.mean() - y.accuracy.mean()) < 0.002


def freeze(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {k: freeze(v) for k, v in tree.items()}
    copy = np.array(tree)
    copy.setflags(write=False)
    return copy


@pytest.mark.parametrize("name", each_behaviour([*NAMES, *RELEASED]))
def test_a_step_changes_no_input_and_a_saved_state_continues_alike(name: str) -> None:
    """Every array of the state is made read-only, and the state travels through pickle before each step."""
    stream = make_drifting_stream()
    algorithm = make_algorithm(name, stream)
    engine = ENGINES["simulator"][0](stream, default_net(stream), LOCAL, 0)
    state = algorithm.init(engine.at(0))
    expected = run_method(name)
    for tau in range(stream.n_steps):
        state = pickle.loads(pickle.dumps(state))
        arrays = {k: freeze(v) for k, v in vars(state).items() if isinstance(v, np.ndarray)}
        state = replace(state, models=replace(state.models, params=freeze(state.models.params)), **arrays)
        state = algorithm.step(state, engine.at(tau))
        unbroken = expected[tau].state
        assert state.models.ids == unbroken.models.ids
        np.testing.assert_array_equal(state.votes, unbroken.votes)
        np.testing.assert_array_equal(state.w, unbroken.w)
        for leaf, values in unbroken.models.params.items():
            np.testing.assert_array_equal(state.models.params[leaf], values)


@pytest.mark.parametrize("name", [*NAMES, *RELEASED])
def test_the_events_determine_the_existing_models(name: str) -> None:
    """Created, merged and deleted models, replayed, are the models of the state."""
    alive = {0} if "KUE" not in name else set(range(10 + (name in RELEASED)))
    for step in run_method(name):
        alive |= {e.model for e in step.events if e.kind == "created"}
        alive -= {e.model for e in step.events if e.kind == "merged"}
        idle = {e.model for e in step.events if e.kind == "retired" and e.cause["reason"] == "no client uses it"}
        alive -= {e.model for e in step.events if e.kind == "retired"} - idle
        owners = zip(step.state.models.ids, step.state.models.owner, strict=True)
        told = {i for i, owner in owners if owner < 0 or i in alive}  # private models may go untold
        assert alive == told, (step.tau, step.events)


def _by_model(state: fd.State) -> dict[int, list[float]]:
    """The votes of each model that has any."""
    of_models = np.asarray(state.votes).T
    return {i: votes.tolist() for i, votes in zip(state.models.ids, of_models, strict=True) if votes.any()}


@pytest.mark.parametrize("empty", [0, 2])
@pytest.mark.parametrize("name", each_behaviour([*NAMES, *RELEASED]))
def test_a_time_step_without_data(name: str, empty: int) -> None:
    calm = make_drifting_stream(np.zeros((6, 4), dtype=int))
    cells: list[list[Any]] = [[calm.cell(t, c) if t != empty else None for c in range(4)] for t in range(6)]
    stream = Stream.from_arrays(cells, n_classes=2, concepts=np.zeros((6, 4), dtype=int))
    steps = list(fd.run(stream, make_algorithm(name, stream), local=LOCAL))
    assert not steps[empty].drifted.any()
    if empty:
        assert [e.kind for e in steps[empty].events] == []
        before, after = (_by_model(step.state) for step in steps[empty - 1 : empty + 1])
        assert before == after


@pytest.mark.parametrize("name", NAMES)
def test_state_shapes_and_votes(name: str) -> None:
    for step in run_method(name):
        state, m = step.state, len(step.state.models)
        assert state.w.shape == (step.tau + 1, 4, m) and state.votes.shape == (4, m)
        assert len(set(state.models.ids)) == m
        assert (np.asarray(state.w) >= 0).all() and (np.asarray(state.votes).sum(axis=1) > 0).all()


SHAPES = {
    "one client": PATTERN[:, :1],
    "no drift": np.zeros((5, 3), dtype=int),
    "drift everywhere": np.tile(np.arange(5)[:, None] % 2, (1, 3)),
    "all at once": np.repeat([[0], [0], [1], [1]], 3, axis=1),
    "one training step": np.zeros((2, 2), dtype=int),
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_every_shape_of_drift_runs(name: str, shape: str) -> None:
    concepts = SHAPES[shape]
    steps = play(name, make_drifting_stream(concepts))
    assert len(steps) == len(concepts) - 1
    assert all(np.isfinite(s.accuracy).all() for s in steps)


@pytest.mark.parametrize("name", each_behaviour(NAMES))
def test_clients_without_data_for_a_while_or_at_first(name: str) -> None:
    whole = make_drifting_stream()
    cells: list[list[Any]] = [[whole.cell(t, c) for c in range(4)] for t in range(6)]
    cells[0][0] = cells[1][0] = cells[2][3] = cells[3][3] = cells[4][1] = cells[5][2] = None
    stream = Stream.from_arrays(cells, n_classes=2, concepts=PATTERN)
    steps = play(name, stream)
    assert np.isnan(steps[0].accuracy[0]) and np.isnan(steps[4].accuracy[2]) and np.isfinite(steps[4].accuracy[0])
    if name.startswith("FedDrift"):
        merged = {e.model: e.cause["into"] for s in steps for e in s.events if e.kind == "merged"}
        kept = int(steps[1].model[3])
        assert int(steps[2].model[3]) == merged.get(kept, kept)


class Blindfold:
    """A federation that gives away no truth and no future."""

    def __init__(self, fed: Any) -> None:
        self._fed = fed

    def __getattr__(self, name: str) -> Any:
        assert name != "concepts", "only Oracle may read the truth"
        return getattr(self._fed, name)


@pytest.mark.parametrize("name", each_behaviour([n for n in NAMES if not n.startswith("Oracle")]))
def test_only_oracle_reads_the_truth(name: str) -> None:
    stream = make_drifting_stream()
    algorithm = fd.algorithm(name, stream)
    engine = ENGINES["simulator"][0](stream, default_net(stream), LOCAL, 0)
    state = algorithm.init(Blindfold(engine.at(0)))
    for tau in range(stream.n_steps):
        state = algorithm.step(state, Blindfold(engine.at(tau)))


@pytest.mark.parametrize("name", each_behaviour(NAMES))
def test_the_next_time_step_is_not_read(name: str) -> None:
    """With the data of tau + 1 and later replaced, all decisions up to tau stay."""
    stream = make_drifting_stream()
    tau = 2
    later = replace(stream, x=stream.x.copy(), y=stream.y.copy())
    rest = slice(int(stream.starts[tau + 1, 0]), None)
    later.x[rest], later.y[rest] = 0.5, 0
    a, b = run_method(name)[: tau + 1], list(islice(play_steps(name, later), tau + 1))
    assert [s.model.tolist() for s in a] == [s.model.tolist() for s in b]
    for x, y in zip(a, b, strict=True):
        for leaf in x.state.models.params:
            np.testing.assert_array_equal(x.state.models.params[leaf], y.state.models.params[leaf])


def test_oracle_needs_the_truth() -> None:
    stream = replace(make_drifting_stream(), concepts=None)
    with pytest.raises(fd.ConfigError, match="true concepts are known"):
        play("Oracle", stream)


def test_oracle_has_one_model_per_concept_and_the_true_clusters() -> None:
    last = run_method("Oracle")[-1]
    models = np.array([s.model for s in run_method("Oracle")])
    np.testing.assert_array_equal(models, PATTERN[:-1])
    assert last.state.models.ids == (0, 1)


def test_oblivious_sends_two_models_per_round_client_and_step() -> None:
    steps = run_method("Oblivious")
    assert sum(int(s.sent.sum()) for s in steps) == 2 * LOCAL.rounds * 4 * 5
