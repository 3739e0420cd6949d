"""For authors of methods, nets, drift tests and engines: does it keep the contract?

Each check runs in seconds and raises an AssertionError that says what is wrong. Nothing here needs pytest::

    from feddrift.testing import check_algorithm
    check_algorithm(Mine())
"""

from __future__ import annotations

import copy
import itertools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import astuple, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from feddrift import rng
from feddrift._internal import checkpoint
from feddrift.algorithms.feddrift.drift_tests import DriftTest, Evidence, checked_answer
from feddrift.data import Stream
from feddrift.engines import engine as find_engine
from feddrift.engines.conditions.conditions import Conditions
from feddrift.engines.server.engine import Engine
from feddrift.errors import ConfigError
from feddrift.models import fresh
from feddrift.nets import default_net
from feddrift.simulation import Step, steps_on
from feddrift.state_checks import STALE, told
from feddrift.testing.fake import FakeFederation as FakeFederation
from feddrift.trees import leaves, tree_map
from feddrift.types import Algorithm, Bools, Ints, Local, Net, Router, State

BRIEF = Local(rounds=2, steps=4, batch=8, lr=0.05)
# Two clients drift at once, concept 0 is left by all and found again by one.
CONCEPTS = np.array([[0, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [0, 1, 1, 1], [0, 1, 1, 1]])


def small_stream(concepts: Ints = CONCEPTS, size: int = 30, seed: int = 0, missing: Sequence[Any] = ()) -> Stream:
    """Two features; concept 1 swaps the labels of concept 0. Cells (t, c) that are missing have no data.

    >>> small_stream()
    Stream('small': 4 clients, 5 time steps + 1 to test, 720 examples of 2 features, 2 classes)
    """
    draw = np.random.default_rng(seed)

    def cell(concept: int) -> tuple[Any, Any]:
        x = draw.random((size, 2))
        return x, (x[:, 0] > x[:, 1]).astype(int) ^ concept

    cells: list[list[Any]] = [[cell(int(concept)) for concept in row] for row in concepts]
    for t, c in missing:
        cells[t][c] = None
    return Stream.from_arrays(cells, name="small", n_classes=2, concepts=concepts)


def check_algorithm(algorithm: Algorithm, *, local: Local = BRIEF) -> None:
    """A method of your own: states of the right shape, same seed same result, no input changed, a saved state goes on
    alike, events account for all models but private ones, which need none, clients may lack data, be away or join
    later, and neither truth nor future is used. An AssertionError says what is wrong.

    Parameters:
        algorithm: What is checked; its `init` and `step` are called many times.
        local: How clients train meanwhile.
    """
    _check_is(algorithm, ("init", "step"), "an algorithm")
    untouched = copy.deepcopy(algorithm)
    stream = small_stream()
    steps = _played(algorithm, stream, local)
    for step in steps:
        _check_step(step)
    _check_lineage(steps)
    for a, b in zip(steps, _played(algorithm, stream, local), strict=True):
        _check_same(a.state, b.state, f"two runs with one seed differ at tau={a.tau}")
    _check_saved(untouched, stream, steps, local)
    later = replace(stream, x=stream.x.copy(), y=stream.y.copy())
    future = slice(int(stream.starts[3, 0]), None)
    later.x[future], later.y[future] = 0.5, 0
    for a, b in zip(steps[:3], _played(algorithm, later, local)[:3], strict=True):
        _check_same(a.state, b.state, f"other data after tau=2 change what was decided at tau={a.tau}")
    nobody = [(2, c) for c in range(4)]
    gaps = [(0, 0), (1, 0), (2, 3), (3, 3), (4, 1), (5, 2)]  # a client that joins later, others with gaps
    for missing, conditions in ((nobody, Conditions()), (gaps, Conditions()), ((), Conditions(0.5, 0.3))):
        for step in _played(algorithm, small_stream(missing=missing), local, conditions):
            _check_step(step)
    _check_newcomer(algorithm, stream, local)
    if not getattr(algorithm, "needs_truth", False):
        complaint = "it looks at the true concepts: set needs_truth = True if it is told them"
        for concepts in (None, 1 - CONCEPTS):
            try:
                blind = _played(algorithm, replace(stream, concepts=concepts), local)
            except AssertionError as error:  # which there was not when it could look
                raise AssertionError(complaint) from error
            for a, b in zip(steps, blind, strict=True):
                _check_same(a.state, b.state, complaint)


def _played(
    algorithm: Algorithm, stream: Stream, local: Local, conditions: Conditions | None = None, **at: Any
) -> list[Step]:
    """All time steps, or those after `done`, which go on from a `state`; what `run` refuses is what is wrong."""
    engine = find_engine("simulator")(stream, default_net(stream), local, 0, conditions or Conditions())
    try:
        return list(steps_on(engine, algorithm, **at))
    except ConfigError as error:
        raise AssertionError(str(error)) from error


def _check_step(step: Step) -> None:
    """What a run puts up with, and a method that is right does not do."""
    at = f"at tau={step.tau}"
    silent = step.drifted & (step.received == 0)
    assert not silent.any(), f"an alarm at a client without new data {at}: {np.flatnonzero(silent).tolist()}"
    kinds = [(event.kind, event.model) for event in step.state.events if event.kind != "decided"]
    assert len(set(kinds)) == len(kinds), f"an event is told twice {at}: {kinds}"


def _check_newcomer(algorithm: Algorithm, stream: Stream, local: Local) -> None:
    """Three clients, and from tau=3 on a fourth, as `feddrift update` has it."""
    late = stream.n_clients - 1
    cells = [[None if c == late and t < 3 else stream.cell(t, c) for c in range(late + 1)] for t in range(6)]
    concepts = stream.concepts
    assert concepts is not None
    few, all_ = (
        Stream.from_arrays([row[:n] for row in cells], name="small", n_classes=2, concepts=concepts[:, :n])
        for n in (late, late + 1)
    )
    steps = _played(algorithm, few, local)[:3]
    try:
        steps += _played(algorithm, all_, local, done=3, state=steps[-1].state)
    except AssertionError as error:
        cure = (
            'a field of its State with a value for each client says field(metadata={"newcomer": value}), and who has a '
        )
        cure += "model for each client makes one for newcomers (feddrift.models.private)"
        raise AssertionError(f"it must go on when a client joins: {error}; {cure}") from error
    for step in steps:
        _check_step(step)
    _check_lineage(steps)


def _check_lineage(steps: Sequence[Step]) -> None:
    """Events account for all shared models; private ones need none, and one's id may come back for the same client."""
    owner_of: dict[int, int] = {}
    for step in steps:
        for i, owner in zip(step.state.models.ids, step.state.models.owner, strict=True):
            same = owner_of.setdefault(i, owner) == owner
            assert same, f"a model has one owner, or none, for life: model {i} has another at tau={step.tau}"
    private = {i for i, owner in owner_of.items() if owner >= 0}
    gone: set[int] = set()
    alive = set(steps[0].state.models.ids) - private
    for before, step in itertools.pairwise(steps):
        stale = step.state.events and step.state.events is before.state.events
        assert not stale, f"the events at tau={step.tau} are those of the step before: {STALE}"
        events = [event for event in step.events if event.model not in private]
        born = {event.model for event in events if event.kind == "created"}
        assert not born & gone, f"model ids are for life: {sorted(born & gone)} was used before, at tau={step.tau}"
        left = {event.model for event in events if event.kind == "merged"}
        left |= {e.model for e in events if e.kind == "retired" and e.cause.get("reason") != "no client uses it"}
        alive = (alive | born) - left
        gone |= left
        there = set(step.state.models.ids) - private
        assert alive == there, f"events at tau={step.tau} leave the models {sorted(alive)}, there are {sorted(there)}"


def _check_saved(algorithm: Algorithm, stream: Stream, expected: Sequence[Step], local: Local) -> None:
    """Every array is read-only, the state goes through a file before each step, and the method is as good as new."""
    net = default_net(stream)
    engine = find_engine("simulator")(stream, net, local, 0)
    state = algorithm.init(engine.at(0))
    with tempfile.TemporaryDirectory() as folder:
        for tau, step in enumerate(expected):
            checkpoint.write(Path(folder) / "state", {}, state)
            saved: State = checkpoint.read(Path(folder) / "state").value(net.init(rng.derive(0, "init", 0)))
            arrays = {
                f.name: _frozen(value) for f in fields(saved) if isinstance(value := getattr(saved, f.name), np.ndarray)
            }
            models = replace(saved.models, params=tree_map(_frozen, saved.models.params))
            try:
                with told(algorithm, type(algorithm).__name__):
                    state = copy.deepcopy(algorithm).step(replace(saved, models=models, **arrays), engine.at(tau))
            except Exception as error:
                why = "changes an array of" if "read-only" in str(error) else "fails when it has saved and read"
                raise AssertionError(f"the step at tau={tau} {why} the state it was given: {error}") from error
            _check_same(state, step.state, f"a state that was saved and read goes on differently at tau={tau}")


def _check_is(value: Any, methods: Sequence[str], what: str) -> None:
    there = not isinstance(value, type) and all(callable(getattr(value, name, None)) for name in methods)
    assert there, f"{what} is an object with {' and '.join(methods)}, got {value!r}"


def _frozen(array: Any) -> Any:
    copy = np.array(array)
    copy.setflags(write=False)
    return copy


def _check_same(a: State, b: State, sentence: str) -> None:
    pairs = [(a.w, b.w), (a.votes, b.votes), *zip(leaves(a.models.params), leaves(b.models.params), strict=False)]
    same = a.models.ids == b.models.ids and all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in pairs)
    assert same, sentence


def check_net(net: Net, features: Sequence[int], n_classes: int) -> None:
    """A net of your own: a function of its key, one row of logits for each input, and it learns.

    Parameters:
        net: What is checked.
        features: The shape of one input.
        n_classes: How many logits it gives.

    >>> from feddrift.nets.perceptron import mlp
    >>> check_net(mlp(3, 6, 2), [3], 2)
    """
    _check_is(net, ("init", "apply"), "a net")
    params, again, different = (net.init(rng.derive(seed, "init", 0)) for seed in (0, 0, 1))
    arrays = [np.asarray(leaf) for leaf in leaves(params)]
    assert arrays and all(a.dtype.kind == "f" and np.isfinite(a).all() for a in arrays), (
        "parameters must be finite floats"
    )
    twice = all(np.array_equal(x, y) for x, y in zip(leaves(params), leaves(again), strict=True))
    assert twice, "the same key must give the same parameters"
    differ = any(not np.array_equal(x, y) for x, y in zip(leaves(params), leaves(different), strict=True))
    assert differ, "another key must give other parameters"
    x = np.random.default_rng(0).random((6, *features)).astype(np.float32)
    logits = np.asarray(net.apply(params, x))
    assert np.array_equal(logits, np.asarray(net.apply(params, x))), "two calls with the same inputs must agree"
    assert logits.shape == (6, n_classes), f"apply must give logits of shape (6, {n_classes}), got {logits.shape}"
    assert np.isfinite(logits).all(), "logits must be finite"
    alone = np.concatenate([np.asarray(net.apply(params, x[k : k + 1])) for k in range(6)])
    assert np.allclose(logits, alone, atol=1e-4), "an input's logits must not depend on the others of its batch"
    draw = np.random.default_rng(1)
    inputs = draw.random((2, 200, *features)).astype(np.float32)
    labels = (inputs.reshape(2, 200, -1)[..., 0] * n_classes).astype(int)
    cells = [[(inputs[t], labels[t])] for t in range(2)]
    stream = Stream.from_arrays(cells, name="check", n_classes=n_classes)
    local = Local(rounds=5, steps=40, batch=50, lr=0.01, weight_decay=0.0)  # which alone would lower a loss
    engine = find_engine("simulator")(stream, net, local, 0)
    fed = engine.at(0)
    start = fresh(net, 0)
    before = fed.evaluate(start, "loss")[0, 0]
    after = engine.at(0).evaluate(fed.train(start, np.ones((1, 1, 1))), "loss")[0, 0]
    assert after < before, f"training must lower the loss, it went from {before:.4f} to {after:.4f}"


def check_test(test: DriftTest) -> None:
    """A drift test of your own: one answer per client, no alarm without scores or a rise, an alarm at a jump.

    >>> from feddrift.algorithms.feddrift.drift_tests import Threshold
    >>> check_test(Threshold(0.1))
    """
    assert callable(test) and not isinstance(test, type), f"a drift test is a function of Evidence, got {test!r}"
    n = 5

    def heard(scores: npt.ArrayLike, reference: npt.ArrayLike) -> Bools:
        observed = np.asarray(scores, dtype=float)
        counts = np.full(observed.shape, 500)
        before = observed.copy()
        answer = test(Evidence(observed, counts, np.ones(n, dtype=np.int64), np.asarray(reference, dtype=float)))
        assert np.array_equal(observed, before, equal_nan=True), "a test must not change its evidence"
        try:
            return checked_answer(answer, n, getattr(test, "__name__", type(test).__name__))
        except ConfigError as error:
            raise AssertionError(str(error)) from None

    untrained = np.full((1, n), 0.5)
    peace = np.concatenate([untrained, np.full((6, n), 0.05)])
    assert not heard(peace, np.full(n, 0.05)).any(), "scores that stay the same are no drift"
    jump = peace.copy()
    jump[-1, 2] = 0.9
    assert heard(jump, np.full(n, 0.05))[2], "an error that rises from 0.05 to 0.9 on 500 examples is a drift"
    assert not np.delete(heard(jump, np.full(n, 0.05)), 2).any(), "only the client whose score rose has drifted"
    silent = peace.copy()
    silent[-1, :] = np.nan
    assert not heard(silent, np.full(n, 0.05)).any(), "a client that was not scored raises no alarm"
    assert not heard(peace, np.full(n, np.nan)).any(), "without a score to compare with there is no alarm"
    for steps in (1, 2):
        try:
            heard(peace[:steps], np.full(n, np.nan if steps == 1 else 0.5))
        except IndexError as error:
            raise AssertionError(f"a test must do with the scores of {steps} time steps: {error}") from error
    assert np.array_equal(heard(jump, np.full(n, 0.05)), heard(jump, np.full(n, 0.05))), "two calls must agree"


def check_worker(make: Callable[..., Engine], *, atol: float = 1e-4) -> None:
    """An engine of your own: its workers score, train and hold trials as the reference does, on uneven data.

    Parameters:
        make: Is called as engines are, with (stream, net, local, seed, conditions).
        atol: How far parameters may be apart.
    """
    draw = np.random.default_rng(0)
    sizes = np.maximum(draw.integers(0, 30, (5, 4)), [0, 3, 0, 0])
    sizes[0, 0] = 0
    cells: list[list[Any]] = []
    for row in sizes:
        xs = [draw.random((n, 3)) for n in row]
        cells.append([(x, (x[:, 0] > x[:, 1]).astype(int)) if len(x) else None for x in xs])
    stream = Stream.from_arrays(cells, name="uneven", n_classes=2)
    net, w = default_net(stream), draw.random((3, 4, 3)) * (draw.random((3, 4, 3)) < 0.6)
    arguments = stream, net, BRIEF, 3, Conditions()
    ours, reference = make(*arguments).at(2), find_engine("reference")(*arguments).at(2)
    models = reference.fresh(3, distinct=True)
    parent, votes = np.array([0, 1, -1, 2]), np.eye(3)[[0, 1, 2, 0]]
    router = Router("running", draw.random((3, 3)), np.eye(3), margin=0.5)
    own = replace(models, owner=(-1, -1, 1))
    teams = np.array([[[0, -1]] * 4, [[0, 1]] * 4, [[1, -1], [1, 2], [0, -1], [-1, -1]]])
    halves = [replace(BRIEF, hold_out=0.5, holds="last"), replace(BRIEF, hold_out=0.5, holds="first")]
    verbs: dict[str, Callable[[Any], Any]] = {
        "evaluate": lambda fed: fed.evaluate(models),
        "evaluate loss": lambda fed: fed.evaluate(models, "loss"),
        "cross_evaluate": lambda fed: fed.cross_evaluate(models, w),
        "evaluate by class": lambda fed: fed.evaluate(models, "loss", by="class"),
        "cross_evaluate by class and client": lambda fed: fed.cross_evaluate(models, w, "error", "class", True),
        "confusion": lambda fed: fed.confusion(models),
        "moments": lambda fed: [astuple(fed.moments(own, *ask)) for ask in (("input", "class"), ("trunk", "all"))],
        "local_updates": lambda fed: fed.local_updates(models, w).params,
        "train": lambda fed: fed.train(models, w).params,
        "tournament": lambda fed: fed.tournament(models, w[:-1], parent, ("warm", "fresh")).rows,
        "train on a half": lambda fed: fed.train(models, w, local=halves[1]).params,
        "contest": lambda fed: [astuple(fed.contest(own, teams, held_by)) for held_by in (None, *halves)],
        "reroute": lambda fed: fed.reroute(models, votes, "hard", dict.fromkeys(range(4), router)),
        "sent": lambda fed: fed.sent,
    }
    for what, ask in verbs.items():
        for a, b in zip(leaves(ask(ours)), leaves(ask(reference)), strict=True):
            same = np.allclose(np.asarray(a, dtype=float), np.asarray(b, dtype=float), atol=atol, equal_nan=True)
            assert same, f"{what} is not what the reference engine gives"
    state = State(models, w, votes)
    for what, tried in (("test", state), ("test with a router", replace(state, router=router))):
        tested, expected = (factory(*arguments).test(tried, 3) for factory in (make, find_engine("reference")))
        assert np.array_equal(tested, expected), f"{what} is not what the reference engine gives"
