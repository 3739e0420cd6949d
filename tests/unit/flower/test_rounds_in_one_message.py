"""Several rounds of models that one client trains alone, in one message, equal rounds requested one by one."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

from flwr.app import Message

import feddrift as fd
from feddrift.data import Stream
from feddrift.deploy.server.loop import federate
from feddrift.engines.conditions.conditions import Conditions
from feddrift.engines.flower.client import training
from feddrift.engines.flower.server import remote
from feddrift.models import graft, join, take
from feddrift.nets import build_client_net, default_net
from feddrift.simulation import Step
from feddrift.trees import tree_leaves
from feddrift.types import Local, Models, Pull
from tests.support.federation import LEARN, drop_message, edit_body, make_swapping_stream, replace_client, run_n_steps
from tests.support.flower import SHORT_WAITING, InProcessFlower, OldClient
from tests.support.kills import Killed

PATIENT = replace(SHORT_WAITING, train=60)
ADAM = Local(rounds=4, steps=3, batch=8, lr=0.05)


def make_federation(stream: Stream, local: Local = ADAM, **kwargs: Any) -> InProcessFlower:
    return InProcessFlower(stream, default_net(stream), local, 0, **{"waiting": PATIENT, **kwargs})


def force_single_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on every client is asked for every round."""
    monkeypatch.setattr(remote, "_find_sharing_clients", lambda models, work: set(work.client.tolist()))


def list_bytes(models: Models) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in tree_leaves(models.params)]


def train_two_models(engine: InProcessFlower, w: Any = None, calls: int = 1, local: Local | None = None) -> Models:
    """Two models, of which c has the second for itself; `calls` one after the other in one time step."""
    fed = engine.at(0)
    models = fed.fresh(2, distinct=True)
    if w is None:
        w = np.zeros((1, 3, 2))
        w[0, :2, 0] = w[0, 2, 1] = 1
    for _ in range(calls):
        models = fed.train(models, w, local=local)
    return models


def count_train_requests(engine: InProcessFlower, name: str) -> int:
    return sum(who == name and kind == "train" for who, kind, _ in engine.local_grid.log)


CASES: dict[str, Local] = {
    "adam": ADAM,
    "sgd": replace(ADAM, optimizer="sgd", momentum=0.9),
    "held out": replace(ADAM, hold_out=0.3),
    "patience": replace(ADAM, hold_out=0.3, patience=0.01, steps=30),
    "pulled to the start of a round": replace(ADAM, pull=Pull(0.1, None)),
    "balanced": replace(ADAM, balance=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_all_rounds_of_a_cluster_of_one_client_are_one_message_with_the_same_bits(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_federation(make_swapping_stream(), CASES[case])
    at_once = train_two_models(engine, calls=2)
    assert [count_train_requests(engine, name) for name in "abc"] == [8, 8, 2]
    force_single_rounds(monkeypatch)
    one_by_one = make_federation(make_swapping_stream(), CASES[case])
    assert list_bytes(train_two_models(one_by_one, calls=2)) == list_bytes(at_once)
    assert [count_train_requests(one_by_one, name) for name in "abc"] == [8, 8, 8]


@pytest.mark.parametrize("trains", ["all", "head", "trunk"])
def test_so_are_those_of_a_family(trains: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """b and c have two heads on one trunk, a a model of its own, or c the whole family."""

    def family(engine: InProcessFlower, whose: tuple[int, int]) -> Models:
        fed = engine.at(0)
        first, second, other = (take(fed.fresh(3, distinct=True), [m], [m]) for m in range(3))
        models, w = join(join(first, graft(second, first, family=0)), other), np.zeros((1, 3, 3))
        w[0, whose[0], 0] = w[0, whose[1], 1] = w[0, 0, 2] = 1
        return fed.train(models, w)

    stream, local = make_swapping_stream(), replace(ADAM, trains=trains)
    common, alone = make_federation(stream, local), make_federation(stream, local)
    both = family(common, (1, 2)), family(alone, (2, 2))
    assert [count_train_requests(common, name) for name in "abc"] == [1, 4, 4]
    assert [count_train_requests(alone, name) for name in "abc"] == [1, 0, 1]
    force_single_rounds(monkeypatch)
    assert [list_bytes(family(make_federation(stream, local), whose)) for whose in ((1, 2), (2, 2))] == [
        list_bytes(m) for m in both
    ]


def test_a_client_that_shares_a_model_gets_a_request_for_every_round() -> None:
    engine, w = make_federation(make_swapping_stream()), np.zeros((1, 3, 2))
    w[0, :, 0] = w[0, 2, 1] = 1  # c trains both
    train_two_models(engine, w)
    assert [count_train_requests(engine, name) for name in "abc"] == [4, 4, 4]


def test_models_with_one_client_each_take_one_exchange() -> None:
    engine = make_federation(make_swapping_stream())
    fed, before = engine.at(0), engine.n_exchanges
    w = np.zeros((1, 3, 3))
    w[0, range(3), range(3)] = 1
    fed.train(fed.fresh(3, distinct=True), w)
    assert engine.n_exchanges == before + 1


def steps_of(engine: InProcessFlower, folder: Path) -> list[Step]:
    return run_n_steps(engine, fd.algorithm("FedDrift-W", delta=0.2), 4, folder)


def test_a_federation_with_checkpoints_after_every_round_asks_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_federation(make_swapping_stream(), LEARN)
    at_once = steps_of(engine, tmp_path / "at_once")
    assert len(at_once[-1].state.models) == 2 and at_once[-1].model.tolist() == [0, 0, 1]
    force_single_rounds(monkeypatch)
    one_by_one = make_federation(make_swapping_stream(), LEARN)
    for ours, theirs in zip(at_once, steps_of(one_by_one, tmp_path / "apart"), strict=True):
        assert list_bytes(ours.state.models) == list_bytes(theirs.state.models)
        np.testing.assert_array_equal(ours.accuracy, theirs.accuracy)
        np.testing.assert_array_equal(ours.sent, theirs.sent)
    assert count_train_requests(one_by_one, "c") - count_train_requests(engine, "c") == 2 * (
        LEARN.rounds - 1
    )  # of its last two time steps
    assert count_train_requests(one_by_one, "a") == count_train_requests(engine, "a")


@pytest.mark.slow
@pytest.mark.parametrize("survives", [2, 3, 4])
def test_a_server_killed_before_or_after_it_ends_with_the_same_bits(survives: int, tmp_path: Path) -> None:
    """Killed at the next exchange after so many, again and again, also where c is ahead of the others."""
    stream, local = make_swapping_stream(), replace(LEARN, rounds=3)
    whole = steps_of(make_federation(stream, local), tmp_path / "whole")
    clients: Any = None
    steps, kills = dict[int, Step](), 0
    while len(steps) < 4:
        engine = make_federation(stream, local, root=tmp_path / "clients")
        clients = engine.local_grid.clients if clients is None else clients
        engine.local_grid.clients, left = clients, [survives + 1]  # with the hello that it begins with

        def push(sent: Any, left: list[int] = left, engine: InProcessFlower = engine) -> Any:
            replies = type(engine.local_grid).push_messages(engine.local_grid, sent)  # the clients have done it
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return replies

        engine.local_grid.push_messages = push  # type: ignore[method-assign, assignment]
        engine.n_steps = 4
        try:
            for step in federate(engine, fd.algorithm("FedDrift-W", delta=0.2), tmp_path / "server"):
                steps[step.tau] = step
        except Killed:
            kills += 1
        assert kills < 60
    assert kills > 2
    for step in whole:
        assert list_bytes(steps[step.tau].state.models) == list_bytes(step.state.models)
        np.testing.assert_array_equal(steps[step.tau].accuracy, step.accuracy)


def test_a_client_of_the_protocol_before_does_all_rounds_too() -> None:
    engine = make_federation(make_swapping_stream())
    old = replace_client(engine, OldClient, "c")
    assert (
        list_bytes(train_two_models(engine)) == list_bytes(train_two_models(make_federation(make_swapping_stream())))
        and count_train_requests(engine, "c") == 1
    )
    assert all("more" in body for kind, body in old.heard if kind == "train")


def test_a_client_that_is_reset_after_a_request_trains_with_the_same_result() -> None:
    engine = make_federation(make_swapping_stream())
    fed = engine.at(0)
    replace_client(engine, OldClient, "c")
    w = np.zeros((1, 3, 2))
    w[0, :2, 0] = w[0, 2, 1] = 1
    models = fed.train(fed.fresh(2, distinct=True), w)
    assert fed.reachable.all() and list_bytes(models) == list_bytes(
        train_two_models(make_federation(make_swapping_stream()))
    )


def test_one_whose_rounds_are_slow_does_not_keep_the_others_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers with those that it has done in time, and is asked for the rest."""
    whole, now = train_two_models(make_federation(make_swapping_stream())), [0.0]

    def monotonic() -> float:
        now[0] += 1.0
        return now[0]

    monkeypatch.setattr(training, "time", SimpleNamespace(monotonic=monotonic))  # a round takes a second
    monkeypatch.setattr(remote, "MAX_SHARED_WAIT_SECONDS", 2.0)
    engine = make_federation(make_swapping_stream())
    assert list_bytes(train_two_models(engine)) == list_bytes(whole) and count_train_requests(engine, "c") == 2


class Counting:
    """A model of somebody's own that adds one in each round, and at the client of large inputs ends at two."""

    def init(self, key: Any) -> list[Any]:
        return [np.zeros(2, dtype=np.float32)]

    def logits(self, params: list[Any], x: Any) -> Any:
        return np.zeros((len(x), 2), dtype=np.float32) + params[0]

    def fit(self, params: list[Any], batches: Any, lr: float) -> list[Any]:
        large = max(x.max() for x, _ in batches) > 1
        return [np.full_like(params[0], np.nan) if large and params[0][0] == 2 else params[0] + 1]


def test_rounds_that_are_not_finite_are_the_servers_to_see(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stream = make_swapping_stream()
    stream.x[stream.rows(0, 2)] += 1

    def told() -> tuple[list[bytes], list[str], int]:
        caplog.clear()
        engine = InProcessFlower(stream, build_client_net(Counting(), (2,), 2), ADAM, 0, waiting=PATIENT)
        models = train_two_models(engine)
        assert models.params[0].tolist() == [[4, 4], [2, 2]]
        warnings = [line.getMessage() for line in caplog.records if line.levelno >= logging.WARNING]
        return list_bytes(models), warnings, count_train_requests(engine, "c")

    at_once, warnings, n_asked = told()
    force_single_rounds(monkeypatch)
    assert (at_once, warnings, n_asked + 1) == told() and n_asked == 2
    assert warnings[0].startswith("client c, train at time 0, round 2: its reply is refused")


@pytest.mark.parametrize("more", [-1, 4, 1.5, None])
def test_a_reply_with_rounds_that_were_not_requested_is_refused(more: Any) -> None:
    engine = make_federation(make_swapping_stream())
    engine.local_grid.tamper["c", "train"] = edit_body(lambda body: body.update(more=more))
    train_two_models(engine)
    assert "whole number in 0..3" in engine.trouble["c"]


def test_a_client_that_shares_a_model_cannot_claim_more_rounds() -> None:
    engine = make_federation(make_swapping_stream())
    engine.local_grid.tamper["b", "train"] = edit_body(lambda body: body.update(more=1))
    train_two_models(engine)
    assert "whole number in 0..0" in engine.trouble["b"]


def test_partial_participation_and_robust_averages_need_a_request_per_round() -> None:
    for conditions, local in ((Conditions(participation=0.9), ADAM), (Conditions(), replace(ADAM, average="median"))):
        engine = make_federation(make_swapping_stream(), local, conditions=conditions)
        train_two_models(engine)
        assert count_train_requests(engine, "c") == 4


def test_a_client_that_returns_to_a_finished_model_gets_no_request_for_it() -> None:
    """b sits out when c begins to train their model alone, and is back for the quorum when c has done all rounds."""
    engine = make_federation(make_swapping_stream(), waiting=replace(PATIENT, train=0.2, quorum=2, patience=5))
    w = np.zeros((1, 3, 2))
    w[0, 0, 0] = w[0, 1:, 1] = 1
    fed = engine.at(0)
    models = fed.fresh(2, distinct=True)
    engine.local_grid.faults["b", "evaluate"] = drop_message
    fed.evaluate(models)
    assert fed.reachable.tolist() == [True, False, True]
    models = fed.train(models, w, 1, remaining_rounds=3)
    done = list_bytes(take(models, [1], [1]))

    def once(message: Message) -> None:
        del engine.local_grid.faults["a", "train"]

    models = fed.train(models, w, 1, remaining_rounds=2)
    engine.local_grid.faults["a", "train"] = once
    models = fed.train(models, np.stack([[*row] for row in w]), 1, remaining_rounds=1)
    assert list_bytes(take(models, [1], [1])) == done and count_train_requests(engine, "b") == 0
