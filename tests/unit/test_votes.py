"""Votes as indices of models: the same numbers as the full array, with less memory."""

from __future__ import annotations

import copy
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import feddrift as fd
from feddrift._internal import checkpoint
from feddrift.data import Stream
from feddrift.engines.simulator.simulator import Simulator
from feddrift.engines.sparse_weights import find_weight_problem
from feddrift.nets import default_net
from feddrift.nets.voting import average_probabilities
from feddrift.simulation import add_newcomers, run_steps
from feddrift.testing import FakeFederation
from feddrift.types import Floats, Local, Models, State, Votes

SHAPES = arrays.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=6)
FULL = arrays.arrays(np.float64, SHAPES, elements=st.sampled_from([0.0, 0.0, 0.25, 0.5, 1.0]))


@given(FULL)
def test_they_are_the_array_that_they_stand_for(full: Floats) -> None:
    votes = Votes.of(full)
    assert votes.shape == full.shape and len(votes) == len(full)
    np.testing.assert_array_equal(np.asarray(votes), full)
    np.testing.assert_array_equal(votes[0], full[0])
    np.testing.assert_array_equal(votes[:, ::2], full[:, ::2])
    np.testing.assert_array_equal(votes[-1:, 0], full[-1:, 0])
    np.testing.assert_array_equal(votes.argmax(axis=1), full.argmax(axis=1))
    np.testing.assert_array_equal(votes.used, full.any(axis=0))
    np.testing.assert_array_equal(votes.has_any, full.any(axis=1))
    np.testing.assert_array_equal(votes[:, [0, 0]], full[:, [0, 0]])
    np.testing.assert_array_equal(votes[:, -1], full[:, -1])
    np.testing.assert_array_equal(votes[:, None], full[:, None])
    np.testing.assert_array_equal(votes[full.any(axis=1), :], full[full.any(axis=1), :])
    np.testing.assert_array_equal(votes[[0, -1], [0, -1]], full[[0, -1], [0, -1]])
    np.testing.assert_array_equal(votes.of_client(0, np.arange(full.shape[1])), full[0])
    np.testing.assert_array_equal(2 * votes > 0.5, 2 * full > 0.5)
    np.testing.assert_array_equal(votes.sum(axis=1), full.sum(axis=1))
    np.testing.assert_array_equal(copy.deepcopy(votes).T, full.T)


@pytest.mark.parametrize(
    ("votes", "problem"),
    [
        (Votes(np.array([[3]]), np.ones((1, 1)), 3), "must name positions of 3 models"),
        (Votes(np.array([[-1]]), np.ones((1, 1)), 3), "must have the weight 0 in empty places"),
        (Votes(np.array([[0]]), np.full((1, 1), -2.0), 3), "must be finite and not negative, got -2.0 at (c, k)"),
        (Votes(np.array([[1, 0]]), np.ones((1, 2)), 3), "must name the models of a client in ascending order"),
        (Votes(np.array([[1, 1]]), np.ones((1, 2)), 3), "must name the models of a client in ascending order"),
        (Votes(np.array([[-1, 1]]), np.array([[0.0, 1.0]]), 3), "empty places last"),
        (Votes(np.array([[0, -1]]), np.array([[1.0, 0.0]]), 3), ""),
    ],
)
def test_problems_of_votes_are_reported(votes: Votes, problem: str) -> None:
    assert problem in find_weight_problem(votes, "votes", "c, m") and bool(find_weight_problem(votes, "votes")) == bool(
        problem
    )


def test_models_and_weights_must_have_one_shape() -> None:
    with pytest.raises(ValueError, match="a weight for each model"):
        Votes(np.zeros((2, 1), dtype=np.int64), np.ones((2, 2)), 3)


def test_new_clients_vote_with_the_most_used_model() -> None:
    models = Models({"a": np.zeros((3, 1))}, (0, 1, 2), owner=(-1, -1, 1))
    full = np.array([[0.0, 1.0, 0.0], [0.0, 0.5, 0.5]])
    state = State(models, np.zeros((0, 2, 3)), Votes.of(full))
    late = add_newcomers(state, 4)
    of_array = add_newcomers(replace(state, votes=full), 4)
    np.testing.assert_array_equal(np.asarray(late.votes), of_array.votes)
    assert isinstance(late.votes, Votes)


def test_a_run_resumes_from_a_checkpoint_whose_votes_are_an_array(tmp_path: Path) -> None:
    """As version 0.3.0 wrote it."""
    stream, local = fd.stream("sine-2"), Local(rounds=2, steps=3)
    steps = list(fd.run(stream, "FineTuned", local=local))
    before = replace(steps[3].state, votes=np.asarray(steps[3].state.votes))
    checkpoint.write(tmp_path / "a.ckpt", {}, before)
    state = checkpoint.read(tmp_path / "a.ckpt").decode(before.models.params)
    assert isinstance(state.votes, np.ndarray)
    engine = Simulator(stream, default_net(stream), local, 0)
    later = list(run_steps(engine, fd.algorithm("FineTuned"), done=4, state=state))
    assert [step.accuracy.tolist() for step in later] == [step.accuracy.tolist() for step in steps[4:]]


def test_a_model_without_a_vote_may_be_anything() -> None:
    sound, unsound = np.array([[0.2, 0.8]]), np.full((1, 2), np.nan)
    np.testing.assert_array_equal(average_probabilities([sound, unsound], np.array([[2.0, 0.0]])), sound)


def make_spreading_stream(clients: int) -> Stream:
    """Two concepts, of which the second reaches more clients at each time step."""
    draw, steps, rows = np.random.default_rng(0), 4, 20
    concepts = np.zeros((steps + 1, clients), dtype=int)
    for t in range(2, steps + 1):
        concepts[t, : clients * (t - 1) // steps] = 1
    x = draw.random((concepts.size * rows, 2), dtype=np.float32)
    y = (x[:, 1] <= np.sin(x[:, 0])) ^ (np.repeat(concepts.ravel(), rows) == 1)
    return Stream("spreading", x, y.astype(np.int32), np.full(concepts.shape, rows), 2)


@pytest.mark.parametrize("name", ["Local", "FineTuned", "FedDrift-Auto"])
def test_memory_grows_with_the_number_of_clients_and_not_with_its_square(name: str) -> None:
    peaks = []
    for clients in (200, 1000):
        stream = make_spreading_stream(clients)
        tracemalloc.start()
        for step in fd.run(stream, name, local=Local(rounds=2, steps=2)):
            assert isinstance(step.state.votes, Votes)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 7 * peaks[0]  # of five times as many clients; an array of clients and models has 25 times


def test_a_fake_federation_serves_methods_with_private_models() -> None:
    fed = FakeFederation(0, 3)
    assert isinstance(fd.algorithm("Local").init(fed).votes, Votes)
