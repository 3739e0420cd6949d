"""Contests of models and ensembles at the clients: counts computed by hand, and equal on every engine."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import feddrift as fd
from feddrift.data import Stream
from feddrift.engines.external_model import make_simulator
from feddrift.engines.local.engine import InProcessWorker
from feddrift.engines.local.sampling import count_training_rows
from feddrift.models import graft, join, take
from feddrift.nets.external import net_of
from feddrift.testing import FakeFederation
from feddrift.types import Holds, Ints, Local, Models, Tournament
from tests.support.engines import (
    EACH_ENGINE,
    ENGINE_CLASSES,
    ENGINE_NAMES,
    IN_PROCESS_ENGINES,
    LINEAR,
    LOCAL,
    SLOW_ENGINES,
    ThresholdModel,
    make_engine,
    make_threshold_models,
    make_uneven_stream,
    mark_slow,
)

NOBODY, NOT_THERE = -1, 3
NATIVE = [name for name in ENGINE_NAMES if name not in ("compiled", "chunked")]  # the others XLA compiles for
ENDS: tuple[Holds, ...] = ("last", "first")


def make_number_stream() -> Stream:
    """Inputs and labels of four clients, of which the third has none at time 0."""
    cells: list[Any] = [([1, 2, 3, 4, 5, 6], [0, 0, 0, 1, 1, 0]), ([1, 2, 5], [1, 0, 1]), None, ([1, 9], [0, 1])]
    now = [cell and (np.array(cell[0], dtype=float)[:, None], np.array(cell[1])) for cell in cells]
    return Stream.from_arrays([now, now], n_classes=2)


def repeat_for_all_clients(*teams: list[int]) -> Ints:
    """Teams that are the same at all four clients."""
    wide = max(map(len, teams))
    return np.array([[team + [NOBODY] * (wide - len(team))] * 4 for team in teams])


@pytest.mark.parametrize("name", EACH_ENGINE)
def test_counts_by_hand(name: str) -> None:
    fed = ENGINE_CLASSES[name](make_number_stream(), LINEAR, LOCAL, 3).at(0)
    fed.worker.known.reachable = np.arange(4) != NOT_THERE
    found = fed.contest(make_threshold_models(2.5, 4.5), repeat_for_all_clients([0], [1], [0, 1]))
    assert found.rows.tolist() == [6, 3, 0, 0]
    # Client 0: above 2.5 errs at 3 and 6, above 4.5 at 4 and 6. At 3 and 4 who is right is also surer, so that
    # together they err at 6 alone. Client 1: nobody knows that 1 is a yes.
    assert found.wrong[0].tolist() == [[2, 1, 1], [1, 2, 1], [1, 1, 1]]
    assert found.wrong[1].tolist() == [[1] * 3] * 3
    assert not found.wrong[2:].any()
    twice = fed.contest(
        make_threshold_models(2.5, 4.5), repeat_for_all_clients([0, 0, 1])
    )  # who is named twice counts twice
    assert twice.wrong[:, 0, 0].tolist() == [2, 1, 0, 0]


def make_private_pairs(fed: Any, local: Local) -> Models:
    """A shared model, and of each client one of its own, which it has trained."""
    own = take(fed.fresh(), [0] * 4, [1, 2, 3, 4], owner=[0, 1, 2, 3])
    w = np.zeros((fed.tau + 1, 4, 4))
    w[-1] = np.eye(4)
    return join(fed.fresh(), fed.train(own, w, local=local))


@pytest.mark.parametrize(
    ("seed", "names"), [(0, NATIVE), *(pytest.param(seed, ENGINE_NAMES, marks=pytest.mark.slow) for seed in (0, 1))]
)
def test_all_engines_count_alike(seed: int, names: list[str]) -> None:
    stream, learn = make_uneven_stream(seed), replace(LOCAL, rounds=4, steps=10, lr=0.05)
    results = []
    for name in names:
        fed = make_engine(name, stream).at(2)
        own = np.arange(1, 5)[None, :, None]
        teams = np.concatenate([np.zeros_like(own), own]), np.concatenate([np.zeros_like(own), own], axis=2)
        answers = []
        for held_by in (None, *(replace(learn, hold_out=0.5, holds=end) for end in ENDS)):
            models = make_private_pairs(fed, held_by or learn)
            answers += [fed.contest(models, alone_or_not, held_by) for alone_or_not in teams]
        results.append([(found.rows.tolist(), found.wrong.tolist()) for found in answers] + [fed.sent.tolist()])
    assert np.ptp([table for _, table in results[0][:-1:2]], axis=0).any()  # there is something to count
    for name, other in zip(names[1:], results[1:], strict=True):
        assert other == results[0], name


def make_trunk_and_heads(fed: Any) -> Models:
    """Three models, the second on the trunk of the first."""
    apart = fed.fresh(3, distinct=True)
    first = take(apart, [0], [0])
    return join(join(first, graft(take(apart, [1], [1]), first, family=0)), take(apart, [2], [2]))


@pytest.mark.parametrize("name", EACH_ENGINE)
def test_a_model_alone_errs_as_when_it_is_evaluated(name: str) -> None:
    stream = make_uneven_stream(5)
    fed = make_engine(name, stream).at(3)
    models = make_trunk_and_heads(fed)
    draw = np.random.default_rng(0)
    teams = draw.integers(0, 3, (4, 4, 1))
    found = fed.contest(models, np.concatenate([teams, np.full_like(teams, NOBODY)], axis=2))
    new = stream.counts[3] > 0
    assert found.rows.tolist() == stream.counts[3].tolist() and new.any()
    mistakes = np.nan_to_num(fed.evaluate(models)) * stream.counts[3][:, None]
    for k in range(4):
        np.testing.assert_allclose(found.wrong[:, k, k], mistakes[np.arange(4), teams[k, :, 0]], atol=1e-9)


@pytest.mark.parametrize("name", EACH_ENGINE)
def test_the_halves_that_two_trainings_hold_out_make_the_whole(name: str) -> None:
    draw = np.random.default_rng(1)
    cells = [[(x := draw.random((10, 3)), (x[:, 0] > x[:, 1]).astype(int)) for _ in range(4)] for _ in range(3)]
    fed = make_engine(name, Stream.from_arrays(cells, n_classes=2)).at(1)
    models, teams = fed.fresh(2, distinct=True), repeat_for_all_clients([0], [1], [0, 1])
    whole = fed.contest(models, teams)
    halves = [fed.contest(models, teams, replace(LOCAL, hold_out=0.5, holds=end)) for end in ENDS]
    assert [half.rows.tolist() for half in halves] == [[5] * 4] * 2
    np.testing.assert_array_equal(sum(half.wrong for half in halves), whole.wrong)
    assert (halves[0].wrong != halves[1].wrong).any()
    most = fed.contest(models, teams, replace(LOCAL, hold_out=0.7))
    assert most.rows.tolist() == (10 - count_training_rows(np.full(4, 10), 0.7)).tolist() == [7] * 4


@pytest.mark.parametrize("name", mark_slow(IN_PROCESS_ENGINES, *SLOW_ENGINES))  # a real client takes no such data in
def test_the_first_rows_can_be_held_out(name: str) -> None:
    stream = make_uneven_stream()
    fed = make_engine(name, stream).at(2)
    poisoned, n_poisoned = replace(stream, x=stream.x.copy()), 0
    for t, c in np.argwhere(stream.counts[:3] > 1):
        assert isinstance(fed.worker, InProcessWorker)
        order = fed.worker.shuffle_cell(int(t), int(c))
        n_held = len(order) - int(count_training_rows(np.array(len(order)), 0.3))
        poisoned.x[order[:n_held]] = np.nan
        n_poisoned += n_held
    local, w = replace(LOCAL, hold_out=0.3, holds="first"), np.ones((3, 4, 1))
    a, b = (make_engine(name, data).at(2).train(fed.fresh(), w, local=local).params for data in (stream, poisoned))
    assert n_poisoned
    for leaf in a:
        np.testing.assert_array_equal(a[leaf], b[leaf])
    other_end = make_engine(name, poisoned).at(2).local_updates(fed.fresh(), w, replace(local, holds="last"))
    assert np.isnan(other_end.params["W1"]).any()


@pytest.mark.parametrize("name", EACH_ENGINE)
def test_a_trial_holds_out_its_own_rows_whatever_the_run_does(name: str) -> None:
    stream, parent = make_uneven_stream(), np.zeros(4, dtype=np.int64)
    found = []
    for local in (replace(LOCAL, hold_out=0.3), replace(LOCAL, hold_out=0.3, holds="first")):
        fed = make_engine(name, stream, local).at(2)
        found.append(fed.tournament(fed.fresh(), np.ones((2, 4, 1)), parent, ("warm", "fresh")).wrong)
    np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.parametrize("name", EACH_ENGINE)
def test_shared_models_are_sent_once_and_private_ones_never(name: str) -> None:
    fed = ENGINE_CLASSES[name](make_number_stream(), LINEAR, LOCAL, 3).at(0)
    fed.worker.known.reachable = np.arange(4) != NOT_THERE
    models = replace(make_threshold_models(2.5, 4.5, 3.5), owner=(-1, -1, 0))
    fed.contest(models, np.array([[[2], [NOBODY], [NOBODY], [NOBODY]]]))
    assert not fed.sent.any()
    fed.contest(models, np.array([[[0, 2], [0, NOBODY], [0, NOBODY], [0, NOBODY]]]))
    assert fed.sent.tolist() == [1, 1, 0, 0]  # the third has no data, the fourth is out of reach
    fed.contest(models, repeat_for_all_clients([0], [1], [0, 1]))
    fed.contest(models, repeat_for_all_clients([1, 0]))
    assert fed.sent.tolist() == fed.sent_scoring.tolist() == [2, 2, 0, 0]


@pytest.mark.parametrize("name", EACH_ENGINE)
def test_a_contest_does_not_change_the_run(name: str) -> None:
    stream, w = make_uneven_stream(), np.ones((3, 4, 2))
    quiet, busy = make_engine(name, stream).at(2), make_engine(name, stream).at(2)
    models = quiet.fresh(2, distinct=True)
    for _ in range(2):
        busy.contest(models, repeat_for_all_clients([0], [0, 1]), replace(LOCAL, hold_out=0.5))
        a, b = (fed.train(models, w, rounds=1).params for fed in (quiet, busy))
        for leaf in a:
            np.testing.assert_array_equal(a[leaf], b[leaf])


def test_without_contestants_no_request_is_sent() -> None:
    one = Stream.from_arrays([[(np.ones((1, 1)), np.array([1]))] * 4] * 2, n_classes=2)
    fed = ENGINE_CLASSES["simulator"](one, LINEAR, LOCAL, 3).at(0)
    models, held_by = make_threshold_models(2.5), replace(LOCAL, hold_out=0.5)
    assert fed.contest(models, repeat_for_all_clients([0])).rows.tolist() == [1] * 4
    for teams, how in (
        (repeat_for_all_clients([0]), held_by),  # of one row none is held out
        (repeat_for_all_clients([0], [NOBODY]), None),  # a contestant has no model
        (np.zeros((0, 4, 1), dtype=np.int64), None),
        (np.zeros((1, 4, 0), dtype=np.int64), None),
    ):
        found = fed.contest(models, teams, how)
        assert not found.rows.any() and found.wrong.shape == (4, len(teams), len(teams))
    assert fed.sent.tolist() == [1] * 4


@pytest.mark.parametrize("name", EACH_ENGINE)
def test_invalid_teams_are_refused(name: str) -> None:
    fed = ENGINE_CLASSES[name](make_number_stream(), LINEAR, LOCAL, 3).at(0)
    models = replace(make_threshold_models(2.5, 4.5), owner=(-1, 0))
    with pytest.raises(ValueError, match=r"whole numbers \[k, 4 clients, i\], got \(1, 3, 1\)"):
        fed.contest(models, np.zeros((1, 3, 1), dtype=np.int64))
    with pytest.raises(ValueError, match=r"got \(4, 1\)"):
        fed.contest(models, np.zeros((4, 1), dtype=np.int64))
    with pytest.raises(ValueError, match="whole numbers"):
        fed.contest(models, np.zeros((1, 4, 1)))
    for position in (-2, 2):
        with pytest.raises(ValueError, match="positions of 2 models"):
            fed.contest(models, repeat_for_all_clients([position]))
    with pytest.raises(fd.ConfigError, match="its owner only"):
        fed.contest(models, repeat_for_all_clients([1]))
    with pytest.raises(fd.ConfigError, match="must hold something out"):
        fed.contest(models, repeat_for_all_clients([0]), LOCAL)
    assert not fed.sent.any()


def test_models_of_other_frameworks_compete() -> None:
    fed = make_simulator(make_number_stream(), net_of(ThresholdModel()), LOCAL, 3).at(0)
    models = Models([np.array([[2.5], [4.5]], dtype=np.float32)], ids=(0, 1))
    found = fed.contest(models, repeat_for_all_clients([0], [1], [0, 1]))
    assert found.wrong[0].tolist() == [[2, 1, 1], [1, 2, 1], [1, 1, 1]] and found.rows.tolist() == [6, 3, 0, 2]
    trained = [
        fed.train(take(models, [0], [0]), np.eye(4)[0][None, :, None], local=replace(LOCAL, hold_out=0.5, holds=end))
        for end in ENDS
    ]
    assert float(trained[0].params[0][0, 0]) != float(trained[1].params[0][0, 0])  # each saw its own half


def test_a_fake_federation_returns_the_given_values() -> None:
    fed = FakeFederation(tau=0, n_clients=2, run_contest=lambda models, teams: Tournament.empty(2, len(teams)))
    teams = np.zeros((3, 2, 1), dtype=np.int64)
    assert fed.contest(fed.fresh(), teams).wrong.shape == (2, 3, 3)
    fed.contest(fed.fresh(), teams, Local(hold_out=0.5, holds="first"))
    assert fed.requests == ["contest", "contest holds=first"]


if importlib.util.find_spec("flwr"):
    from feddrift.engines.flower import serialization

    def test_a_client_gets_the_models_of_its_own_teams_and_counts_leave_it() -> None:
        engine = ENGINE_CLASSES["flower"](make_number_stream(), LINEAR, LOCAL, 3)
        fed, bodies = engine.at(0), dict[str, list[Any]]()
        for name, client in engine.local_grid.clients.items():

            def answer(kind: str, content: Any, name: str = name, real: Any = client.handle_message) -> Any:
                reply = real(kind, content)
                bodies[name] = [serialization.unpack_message(content)[0], *serialization.unpack_message(reply)]
                return reply

            client.handle_message = answer
        models = replace(make_threshold_models(2.5, 4.5, 3.5), owner=(-1, -1, 3))
        teams = np.array([[[1, 0], [1, NOBODY], [1, NOBODY], [2, 1]], [[1, NOBODY]] * 4])
        fed.contest(models, teams, Local(hold_out=0.5, holds="first"))
        asked = {
            name: ([spec["id"] for spec in asked["models"]], asked["teams"]) for name, (asked, *_) in bodies.items()
        }
        assert asked == {"0": ([0, 1], [[1, 0], [1]]), "1": ([1], [[0], [0]]), "3": ([1, 2], [[1, 0], [0]])}
        for question, reply, parts in bodies.values():
            assert question["held_by"]["holds"] == "first" and not parts
            assert set(reply) == {"version", "client", "rows", "wrong"}
