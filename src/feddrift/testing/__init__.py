"""Checks for authors of methods, nets, drift tests and engines: does their code keep the contract?

Each check takes seconds and raises an AssertionError that describes the first problem. pytest is not needed::

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
from feddrift.algorithms.feddrift.drift_tests import DriftTest, Evidence, check_answer
from feddrift.data import Stream
from feddrift.engines import engine as find_engine
from feddrift.engines.conditions.conditions import Conditions
from feddrift.engines.server.engine import Engine
from feddrift.errors import ConfigError
from feddrift.models import init_models
from feddrift.nets import default_net
from feddrift.simulation import Step, run_steps
from feddrift.state_checks import STALE_EVENTS_ADVICE, explain_errors
from feddrift.testing.fake import FakeFederation as FakeFederation
from feddrift.trees import tree_leaves, tree_map
from feddrift.types import Algorithm, Bools, Ints, Local, Net, Router, State

SHORT_TRAINING = Local(rounds=2, steps=4, batch=8, lr=0.05)
# Two clients drift at the same time. After the others, too, have drifted, one client returns to concept 0.
CONCEPTS = np.array([[0, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [0, 1, 1, 1], [0, 1, 1, 1]])


def small_stream(concepts: Ints = CONCEPTS, size: int = 30, seed: int = 0, missing: Sequence[Any] = ()) -> Stream:
    """Make a stream with two features, in which concept 1 swaps the labels of concept 0.

    Args:
        concepts: [T + 1, c], the concept of each cell.
        size: The number of rows of a cell.
        seed: The seed of the rows.
        missing: The cells (t, c) without data.

    >>> small_stream()
    Stream('small': 4 clients, 5 time steps + 1 to test, 720 examples of 2 features, 2 classes)
    """
    random = np.random.default_rng(seed)

    def make_cell(concept: int) -> tuple[Any, Any]:
        x = random.random((size, 2))
        return x, (x[:, 0] > x[:, 1]).astype(int) ^ concept

    cells: list[list[Any]] = [[make_cell(int(concept)) for concept in row] for row in concepts]
    for t, c in missing:
        cells[t][c] = None
    return Stream.from_arrays(cells, name="small", n_classes=2, concepts=concepts)


def check_algorithm(algorithm: Algorithm, *, local: Local = SHORT_TRAINING) -> None:
    """Check a method of your own.

    Its states have the right shapes, and are the same for the same seed. It does not change its inputs, and continues
    in the same way from a saved state. Events explain all changes of shared models. It runs if clients have no data,
    are unreachable or join later. It uses neither true concepts nor later data.

    Args:
        algorithm: The method; its `init` and `step` are called many times.
        local: The settings of local training.

    Raises:
        AssertionError: The method does not keep the contract.
    """
    _check_methods(algorithm, ("init", "step"), "an algorithm")
    unused_copy = copy.deepcopy(algorithm)
    stream = small_stream()
    steps = _run_steps(algorithm, stream, local)
    for step in steps:
        _check_alarms_and_events(step)
    _check_lineage(steps)
    for a, b in zip(steps, _run_steps(algorithm, stream, local), strict=True):
        _check_equal_states(a.state, b.state, f"two runs with one seed differ at tau={a.tau}")
    _check_resuming(unused_copy, stream, steps, local)
    changed = replace(stream, x=stream.x.copy(), y=stream.y.copy())
    future = slice(int(stream.starts[3, 0]), None)
    changed.x[future] = 0.5
    changed.y[future] = 0
    for a, b in zip(steps[:3], _run_steps(algorithm, changed, local)[:3], strict=True):
        _check_equal_states(a.state, b.state, f"other data after tau=2 change what was decided at tau={a.tau}")
    all_clients = [(2, c) for c in range(4)]
    gaps = [(0, 0), (1, 0), (2, 3), (3, 3), (4, 1), (5, 2)]  # client 0 has no data at first, others have gaps
    for missing, conditions in ((all_clients, Conditions()), (gaps, Conditions()), ((), Conditions(0.5, 0.3))):
        for step in _run_steps(algorithm, small_stream(missing=missing), local, conditions):
            _check_alarms_and_events(step)
    _check_joining_client(algorithm, stream, local)
    if not getattr(algorithm, "needs_truth", False):
        message = "it uses the true concepts: set needs_truth = True if it may"
        for concepts in (None, 1 - CONCEPTS):
            try:
                other_steps = _run_steps(algorithm, replace(stream, concepts=concepts), local)
            except AssertionError as error:  # the run with the true concepts did not raise it
                raise AssertionError(message) from error
            for a, b in zip(steps, other_steps, strict=True):
                _check_equal_states(a.state, b.state, message)


def _run_steps(
    algorithm: Algorithm, stream: Stream, local: Local, conditions: Conditions | None = None, **begin: Any
) -> list[Step]:
    """Run all time steps, or those after a state (`done` and `state`); convert a ConfigError to an AssertionError."""
    engine = find_engine("simulator")(stream, default_net(stream), local, 0, conditions or Conditions())
    try:
        return list(run_steps(engine, algorithm, **begin))
    except ConfigError as error:
        raise AssertionError(str(error)) from error


def _check_alarms_and_events(step: Step) -> None:
    """Check for mistakes that do not stop a run: alarms without data, and repeated events."""
    where = f"at tau={step.tau}"
    without_data = step.drifted & (step.received == 0)
    assert not without_data.any(), (
        f"an alarm at a client without new data {where}: {np.flatnonzero(without_data).tolist()}"
    )
    kinds = [(event.kind, event.model) for event in step.state.events if event.kind != "decided"]
    assert len(set(kinds)) == len(kinds), f"an event is reported twice {where}: {kinds}"


def _check_joining_client(algorithm: Algorithm, stream: Stream, local: Local) -> None:
    """Check that the last client can join at tau=3, as with `feddrift update`."""
    last = stream.n_clients - 1
    cells = [[None if c == last and t < 3 else stream.cell(t, c) for c in range(last + 1)] for t in range(6)]
    concepts = stream.concepts
    assert concepts is not None
    before, after = (
        Stream.from_arrays([row[:n] for row in cells], name="small", n_classes=2, concepts=concepts[:, :n])
        for n in (last, last + 1)
    )
    steps = _run_steps(algorithm, before, local)[:3]
    try:
        steps += _run_steps(algorithm, after, local, done=3, state=steps[-1].state)
    except AssertionError as error:
        raise AssertionError(
            f"it must continue when a client joins: {error}; declare fields of its State that have a value for each "
            'client as field(metadata={"newcomer": value}), and create the models of newcomers with '
            "feddrift.models.get_private_models"
        ) from error
    for step in steps:
        _check_alarms_and_events(step)
    _check_lineage(steps)


def _check_lineage(steps: Sequence[Step]) -> None:
    """Check that events explain all changes of shared models, and that owners of models never change.

    Private models need no events, and an id may be used again for the same client.
    """
    owner_of: dict[int, int] = {}
    for step in steps:
        for i, owner in zip(step.state.models.ids, step.state.models.owner, strict=True):
            is_same = owner_of.setdefault(i, owner) == owner
            assert is_same, f"a model always has one owner, or none: model {i} has another at tau={step.tau}"
    private = {i for i, owner in owner_of.items() if owner >= 0}
    old_ids: set[int] = set()  # of models that were merged or retired
    expected_ids = set(steps[0].state.models.ids) - private
    for before, step in itertools.pairwise(steps):
        are_stale = step.state.events and step.state.events is before.state.events
        assert not are_stale, f"the events at tau={step.tau} are those of the step before: {STALE_EVENTS_ADVICE}"
        events = [event for event in step.events if event.model not in private]
        created = {event.model for event in events if event.kind == "created"}
        reused = sorted(created & old_ids)
        assert not reused, f"a model id is used once only: {reused} is used again at tau={step.tau}"
        removed = {event.model for event in events if event.kind == "merged"}
        removed |= {e.model for e in events if e.kind == "retired" and e.cause.get("reason") != "no client uses it"}
        expected_ids = (expected_ids | created) - removed
        old_ids |= removed
        ids = set(step.state.models.ids) - private
        assert expected_ids == ids, (
            f"events at tau={step.tau} leave the models {sorted(expected_ids)}, there are {sorted(ids)}"
        )


def _check_resuming(algorithm: Algorithm, stream: Stream, expected: Sequence[Step], local: Local) -> None:
    """Check that a new copy of the method gives the same states from saved states with read-only arrays."""
    net = default_net(stream)
    engine = find_engine("simulator")(stream, net, local, 0)
    state = algorithm.init(engine.at(0))
    with tempfile.TemporaryDirectory() as folder:
        for tau, step in enumerate(expected):
            checkpoint.write(Path(folder) / "state", {}, state)
            saved: State = checkpoint.read(Path(folder) / "state").decode(net.init(rng.derive_key(0, "init", 0)))
            values = {f.name: getattr(saved, f.name) for f in fields(saved)}
            arrays = {name: _freeze_array(value) for name, value in values.items() if isinstance(value, np.ndarray)}
            models = replace(saved.models, params=tree_map(_freeze_array, saved.models.params))
            try:
                with explain_errors(algorithm, type(algorithm).__name__):
                    state = copy.deepcopy(algorithm).step(replace(saved, models=models, **arrays), engine.at(tau))
            except Exception as error:
                why = "changes an array of" if "read-only" in str(error) else "fails with a saved copy of"
                raise AssertionError(f"the step at tau={tau} {why} the state before: {error}") from error
            _check_equal_states(state, step.state, f"a saved state continues differently at tau={tau}")


def _check_methods(value: Any, methods: Sequence[str], what: str) -> None:
    has_methods = not isinstance(value, type) and all(callable(getattr(value, name, None)) for name in methods)
    assert has_methods, f"{what} is an object with {' and '.join(methods)}, got {value!r}"


def _freeze_array(array: Any) -> Any:
    """Return a read-only copy."""
    frozen = np.array(array)
    frozen.setflags(write=False)
    return frozen


def _check_equal_states(a: State, b: State, message: str) -> None:
    are_equal = _are_trees_equal([a.w, a.votes, a.models.params], [b.w, b.votes, b.models.params])
    assert a.models.ids == b.models.ids and are_equal, message


def _are_trees_equal(a: Any, b: Any) -> bool:
    """Return True if two trees have equal arrays."""
    leaves_a = tree_leaves(a)
    leaves_b = tree_leaves(b)
    return len(leaves_a) == len(leaves_b) and all(map(np.array_equal, leaves_a, leaves_b))


def check_net(net: Net, features: Sequence[int], n_classes: int) -> None:
    """Check a net of your own.

    Its parameters depend on the key only. The logits of an input do not depend on the other inputs. Training lowers the
    loss.

    Args:
        net: The net.
        features: The shape of one input.
        n_classes: The number of logits.

    Raises:
        AssertionError: The net does not keep the contract.

    >>> from feddrift.nets.perceptron import mlp
    >>> check_net(mlp(3, 6, 2), [3], 2)
    """
    _check_methods(net, ("init", "apply"), "a net")
    params, again, different = (net.init(rng.derive_key(seed, "init", 0)) for seed in (0, 0, 1))
    arrays = [np.asarray(leaf) for leaf in tree_leaves(params)]
    assert arrays and all(a.dtype.kind == "f" and np.isfinite(a).all() for a in arrays), (
        "parameters must be finite floats"
    )
    assert _are_trees_equal(params, again), "the same key must give the same parameters"
    assert not _are_trees_equal(params, different), "another key must give other parameters"
    x = np.random.default_rng(0).random((6, *features)).astype(np.float32)
    logits = np.asarray(net.apply(params, x))
    assert np.array_equal(logits, np.asarray(net.apply(params, x))), "two calls with the same inputs must agree"
    assert logits.shape == (6, n_classes), f"apply must give logits of shape (6, {n_classes}), got {logits.shape}"
    assert np.isfinite(logits).all(), "logits must be finite"
    single = np.concatenate([np.asarray(net.apply(params, x[k : k + 1])) for k in range(6)])
    assert np.allclose(logits, single, atol=1e-4), "an input's logits must not depend on the others of its batch"
    inputs = np.random.default_rng(1).random((2, 200, *features)).astype(np.float32)
    labels = (inputs.reshape(2, 200, -1)[..., 0] * n_classes).astype(int)
    cells = [[(inputs[t], labels[t])] for t in range(2)]
    stream = Stream.from_arrays(cells, name="check", n_classes=n_classes)
    local = Local(rounds=5, steps=40, batch=50, lr=0.01, weight_decay=0.0)  # weight decay alone could lower the loss
    engine = find_engine("simulator")(stream, net, local, 0)
    fed = engine.at(0)
    start = init_models(net, 0)
    before = fed.evaluate(start, "loss")[0, 0]
    after = engine.at(0).evaluate(fed.train(start, np.ones((1, 1, 1))), "loss")[0, 0]
    assert after < before, f"training must lower the loss, it went from {before:.4f} to {after:.4f}"


def check_test(test: DriftTest) -> None:
    """Check a drift test of your own.

    It returns one truth value for each client. It raises an alarm for a client whose score jumps, and no alarm without
    scores or without a rise of the score.

    Args:
        test: The drift test.

    Raises:
        AssertionError: The test does not keep the contract.

    >>> from feddrift.algorithms.feddrift.drift_tests import Threshold
    >>> check_test(Threshold(0.1))
    """
    assert callable(test) and not isinstance(test, type), f"a drift test is a function of Evidence, got {test!r}"
    n = 5

    def find_alarms(scores: npt.ArrayLike, reference: npt.ArrayLike) -> Bools:
        observed = np.asarray(scores, dtype=float)
        counts = np.full(observed.shape, 500)
        before = observed.copy()
        answer = test(Evidence(observed, counts, np.ones(n, dtype=np.int64), np.asarray(reference, dtype=float)))
        assert np.array_equal(observed, before, equal_nan=True), "a test must not change its evidence"
        try:
            return check_answer(answer, n, getattr(test, "__name__", type(test).__name__))
        except ConfigError as error:
            raise AssertionError(str(error)) from None

    untrained = np.full((1, n), 0.5)
    stable = np.concatenate([untrained, np.full((6, n), 0.05)])
    assert not find_alarms(stable, np.full(n, 0.05)).any(), "scores that stay the same are not a drift"
    jump = stable.copy()
    jump[-1, 2] = 0.9
    assert find_alarms(jump, np.full(n, 0.05))[2], "an error that rises from 0.05 to 0.9 on 500 examples is a drift"
    assert not np.delete(find_alarms(jump, np.full(n, 0.05)), 2).any(), "only the client whose score rose has drifted"
    unscored = stable.copy()
    unscored[-1, :] = np.nan
    assert not find_alarms(unscored, np.full(n, 0.05)).any(), "a client that was not scored raises no alarm"
    assert not find_alarms(stable, np.full(n, np.nan)).any(), (
        "without a score to compare with, the test raises no alarm"
    )
    for steps in (1, 2):
        try:
            find_alarms(stable[:steps], np.full(n, np.nan if steps == 1 else 0.5))
        except IndexError as error:
            raise AssertionError(f"a test must accept the scores of {steps} time steps: {error}") from error
    assert np.array_equal(find_alarms(jump, np.full(n, 0.05)), find_alarms(jump, np.full(n, 0.05))), (
        "two calls must agree"
    )


def check_worker(make: Callable[..., Engine], *, atol: float = 1e-4) -> None:
    """Check an engine of your own: it has the same results as the reference engine, on cells of different sizes.

    Args:
        make: The engine's class or function, which is called with (stream, net, local, seed, conditions).
        atol: The largest difference of numbers such as parameters.

    Raises:
        AssertionError: A result differs.
    """
    random = np.random.default_rng(0)
    sizes = np.maximum(random.integers(0, 30, (5, 4)), [0, 3, 0, 0])
    sizes[0, 0] = 0
    cells: list[list[Any]] = []
    for row in sizes:
        xs = [random.random((n, 3)) for n in row]
        cells.append([(x, (x[:, 0] > x[:, 1]).astype(int)) if len(x) else None for x in xs])
    stream = Stream.from_arrays(cells, name="uneven", n_classes=2)
    w = random.random((3, 4, 3)) * (random.random((3, 4, 3)) < 0.6)
    arguments = stream, default_net(stream), SHORT_TRAINING, 3, Conditions()
    checked = make(*arguments).at(2)
    reference = find_engine("reference")(*arguments).at(2)
    models = reference.fresh(3, distinct=True)
    parent = np.array([0, 1, -1, 2])
    votes = np.eye(3)[[0, 1, 2, 0]]
    router = Router("running", random.random((3, 3)), np.eye(3), margin=0.5)
    own = replace(models, owner=(-1, -1, 1))
    teams = np.array([[[0, -1]] * 4, [[0, 1]] * 4, [[1, -1], [1, 2], [0, -1], [-1, -1]]])
    halves = [replace(SHORT_TRAINING, hold_out=0.5, holds="last"), replace(SHORT_TRAINING, hold_out=0.5, holds="first")]
    requests: dict[str, Callable[[Any], Any]] = {
        "evaluate": lambda fed: fed.evaluate(models),
        "evaluate loss": lambda fed: fed.evaluate(models, "loss"),
        "cross_evaluate": lambda fed: fed.cross_evaluate(models, w),
        "evaluate by class": lambda fed: fed.evaluate(models, "loss", by="class"),
        "cross_evaluate by class and client": lambda fed: fed.cross_evaluate(models, w, by="class", per_client=True),
        "confusion": lambda fed: fed.confusion(models),
        "moments of inputs": lambda fed: astuple(fed.moments(own, "input", by="class")),
        "moments of the trunk": lambda fed: astuple(fed.moments(own, "trunk")),
        "local_updates": lambda fed: fed.local_updates(models, w).params,
        "train": lambda fed: fed.train(models, w).params,
        "tournament": lambda fed: fed.tournament(models, w[:-1], parent, ("warm", "fresh")).rows,
        "train on a half": lambda fed: fed.train(models, w, local=halves[1]).params,
        "contest": lambda fed: [astuple(fed.contest(own, teams, held_by)) for held_by in (None, *halves)],
        "reroute": lambda fed: fed.reroute(models, votes, "hard", dict.fromkeys(range(4), router)),
        "sent": lambda fed: fed.sent,
    }
    for name, send in requests.items():
        for a, b in zip(tree_leaves(send(checked)), tree_leaves(send(reference)), strict=True):
            are_close = np.allclose(np.asarray(a, dtype=float), np.asarray(b, dtype=float), atol=atol, equal_nan=True)
            assert are_close, f"{name} differs from the result of the reference engine"
    state = State(models, w, votes)
    for name, tested_state in (("test", state), ("test with a router", replace(state, router=router))):
        result = make(*arguments).test(tested_state, 3)
        expected = find_engine("reference")(*arguments).test(tested_state, 3)
        assert np.array_equal(result, expected), f"{name} differs from the result of the reference engine"
