"""The Flower engine over the in-process grid, with and without failures."""

from __future__ import annotations

import io
import json
import logging
import pickle
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

from flwr.app import Array, ArrayRecord, Context, Error, Message, RecordDict

import feddrift as fd
from feddrift._internal.checkpoint import Folder
from feddrift._internal.device_arrays import find_distinct_rows
from feddrift.algorithms import ALGORITHMS
from feddrift.averaging import average_updates
from feddrift.data import Stream
from feddrift.deploy.server import loop, recording
from feddrift.deploy.server.loop import federate, run_federation
from feddrift.deploy.settings import Settings
from feddrift.engines.conditions.conditions import Defend
from feddrift.engines.flower import serialization
from feddrift.engines.flower.client.client import Client, load_client, make_client_app
from feddrift.engines.flower.client.policy import PERMISSIVE
from feddrift.engines.flower.client.serve import current
from feddrift.engines.flower.messages import VERSION
from feddrift.engines.flower.model_parts import describe_models
from feddrift.engines.flower.server import federation
from feddrift.engines.flower.server.exchange import MESSAGE_GRACE_SECONDS, QuorumError
from feddrift.errors import ConfigError, DataError
from feddrift.runs.export import load_last_state
from feddrift.simulation import Step
from feddrift.trees import tree_leaves
from feddrift.types import Local
from tests.support.engines import mark_variants_slow
from tests.support.federation import (
    LEARN,
    LOCAL,
    assert_identical,
    drop_message,
    edit_body,
    get_reply,
    make_federation,
    make_request,
    make_swapping_stream,
    run_n_steps,
)
from tests.support.flower import SHORT_WAITING, InProcessFlower, make_batch_loader
from tests.support.kills import Killed


def test_feddrift_decides_as_on_the_simulator(tmp_path: Path) -> None:
    """SINE-2, ten clients, drifts at several times: ids, merges and accuracies."""
    stream = fd.stream("sine-2")
    local, algorithm = replace(stream.local, rounds=2), fd.algorithm("FedDrift", stream)
    engine = make_federation(stream, local)
    here = list(fd.run(stream, algorithm, local=local, seed=0))
    there = run_n_steps(engine, algorithm, stream.n_steps, tmp_path)
    assert [s.state.models.ids for s in there] == [s.state.models.ids for s in here]
    assert [[(e.kind, e.model) for e in s.events] for s in there] == [
        [(e.kind, e.model) for e in s.events] for s in here
    ]
    assert any(e.kind == "merged" for s in here for e in s.events)
    for a, b in zip(here, there, strict=True):
        np.testing.assert_array_equal(a.model, b.model)
        np.testing.assert_allclose(a.accuracy, b.accuracy, atol=0.002)
        np.testing.assert_array_equal(a.sent, b.sent)


@pytest.mark.parametrize(
    "name", mark_variants_slow([name for name, entry in ALGORITHMS.items() if not hasattr(entry.cls, "needs_truth")])
)
def test_every_algorithm_runs_unchanged(name: str, tmp_path: Path) -> None:
    stream = make_swapping_stream(n_steps=3, n=20)
    algorithm = fd.algorithm(name, stream)
    here = list(fd.run(stream, algorithm, local=LOCAL, seed=0))
    there = run_n_steps(make_federation(stream), algorithm, stream.n_steps, tmp_path)
    for a, b in zip(here, there, strict=True):
        assert a.state.models.ids == b.state.models.ids
        np.testing.assert_allclose(a.state.votes, b.state.votes, atol=1e-5)
        np.testing.assert_allclose(a.accuracy, b.accuracy, atol=0.051)  # one of 20
        shared = np.flatnonzero(~a.state.models.private)  # no other parameters reach the server
        for x, y in zip(tree_leaves(a.state.models.params), tree_leaves(b.state.models.params), strict=True):
            if x.shape[0] == len(a.state.models):
                x, y = x[shared], y[shared]
            np.testing.assert_allclose(x, y, atol=1e-4)


def test_the_server_stores_one_row_for_all_private_models(tmp_path: Path) -> None:
    stream = make_swapping_stream(n_steps=4, n=20)
    engine = make_federation(stream)
    steps = run_n_steps(engine, fd.algorithm("FedDrift-Auto"), stream.n_steps, tmp_path)
    saved, _ = load_last_state(Folder(tmp_path / "checkpoints"), engine.net)
    for state in (steps[-1].state, saved):
        private = state.models.private
        assert private.sum() >= 2 * stream.n_clients
        for leaf in tree_leaves(state.models.params):
            stack, rows = find_distinct_rows(leaf)
            assert len(stack) <= (~private).sum() + 1 and np.isnan(stack[rows[private]]).all()


def test_a_time_step_of_feddrift_takes_one_exchange_and_one_per_round(tmp_path: Path) -> None:
    stream, per_step = make_swapping_stream(), []
    engine = make_federation(stream, LEARN)
    algorithm = fd.algorithm("FedDrift", delta=0.2)
    state = algorithm.init(engine.at(0))
    for tau in range(stream.n_steps):
        fed, before = engine.at(tau), engine.n_exchanges
        state = algorithm.step(state, fed)
        per_step.append(engine.n_exchanges - before)
        engine.test(state, tau + 1)
    assert per_step == [1 + LOCAL.rounds] * stream.n_steps and len(state.models) > 1


def test_a_model_that_did_not_change_is_not_sent_again() -> None:
    engine = make_federation(make_swapping_stream())
    fed = engine.at(0)
    models, w = fed.fresh(), np.ones((1, 3, 1))
    fed.evaluate(models)
    assert {size for _, kind, size in engine.local_grid.log if kind == "evaluate"} != {0}
    fed.train(models, w, rounds=1)
    assert {size for _, kind, size in engine.local_grid.log if kind == "train"} == {0}


def test_a_client_that_lost_its_models_is_sent_them_again() -> None:
    engine = make_federation(make_swapping_stream())
    fed = engine.at(0)
    models, w = fed.fresh(), np.ones((1, 3, 1))
    fed.evaluate(models)
    store = engine.local_grid.clients["b"].open_store("test")
    store.keep_parts([])
    trained = fed.train(models, w, rounds=1)
    assert fed.reachable.all()
    assert_identical(trained.params, make_federation(make_swapping_stream()).at(0).train(models, w, rounds=1).params)


# Failures: a reply that does not come.


def reply_with_flower_error(message: Message) -> Message:
    """Code 5, sent by the server's own node id whoever failed."""
    return Message(Error(5, "node unavailable"), reply_to=message)


@pytest.mark.parametrize("fault", [drop_message, reply_with_flower_error])
def test_a_missing_evaluation_carries_the_identity_over_and_makes_no_model(fault: Any, tmp_path: Path) -> None:
    stream = make_swapping_stream()
    engine = make_federation(stream, LEARN)
    algorithm = fd.algorithm("FedDrift", delta=0.2)
    state = algorithm.init(engine.at(0))
    for tau in range(2):
        state = algorithm.step(state, engine.at(tau))
    reference = state.reference  # type: ignore[attr-defined]
    engine.local_grid.faults["c", "evaluate"] = fault
    fed = engine.at(2)
    loss = fed.evaluate(state.models)
    assert np.isnan(loss[2]).all() and not np.isnan(loss[:2]).any()
    assert fed.reachable.tolist() == [True, True, False]
    after = algorithm.step(state, engine.at(2))
    assert len(after.models) == 1 and not after.drifted.any()  # type: ignore[union-attr]
    assert after.votes[2].argmax() == state.votes[2].argmax()
    assert after.reference[2] == reference[2]  # type: ignore[attr-defined]
    engine.local_grid.faults.clear()
    assert len(algorithm.step(state, engine.at(2)).models) == 2  # what it would have found


@pytest.mark.parametrize("fault", [drop_message, reply_with_flower_error])
def test_a_missing_update_renormalises_the_average(fault: Any) -> None:
    stream = make_swapping_stream()
    models, w = make_federation(stream).at(0).fresh(), np.ones((1, 3, 1))
    every = make_federation(stream).at(0).local_updates(models, w)
    others = replace(every, params={k: v[:2] for k, v in every.params.items()}, client=every.client[:2],
                     model=every.model[:2], size=every.size[:2], lane=every.lane[:2])  # fmt: skip
    engine = make_federation(stream)
    engine.local_grid.faults["c", "train"] = fault
    assert_identical(engine.at(0).train(models, w, rounds=1).params, average_updates(models, others).params)
    assert list(engine.trouble) == ["c"]


def test_a_cluster_without_any_reply_keeps_its_model() -> None:
    engine = make_federation(make_swapping_stream())
    engine.local_grid.faults["c", "train"] = drop_message
    fed = engine.at(0)
    models, w = fed.fresh(2, distinct=True), np.zeros((1, 3, 2))
    w[0, :2, 0] = w[0, 2, 1] = 1
    trained = fed.train(models, w)
    for old, new in zip(tree_leaves(models.params), tree_leaves(trained.params), strict=True):
        np.testing.assert_array_equal(old[1], new[1])
        assert not np.array_equal(old[0], new[0])


def test_a_client_that_failed_is_not_asked_again_in_this_time_step_but_in_the_next() -> None:
    engine = make_federation(make_swapping_stream())
    engine.local_grid.faults["b", "train"] = drop_message
    fed = engine.at(0)
    fed.train(fed.fresh(), np.ones((1, 3, 1)), rounds=3)
    assert [kind for name, kind, _ in engine.local_grid.log if name == "b"].count("train") == 1
    assert engine.at(1).reachable.all()


def test_without_a_quorum_the_step_waits_and_then_raises_an_error() -> None:
    engine = make_federation(make_swapping_stream(), waiting=replace(SHORT_WAITING, quorum=2))
    fed = engine.at(0)
    models, w = fed.fresh(), np.ones((1, 3, 1))
    engine.local_grid.offline |= {"b", "c"}
    with pytest.raises(
        QuorumError, match=r"time 0, train of round 0: waited .* quorum of 2 out of 3 .* connected: a \(b:"
    ):
        fed.train(models, w)
    with pytest.raises(QuorumError, match="time 1, start: "):
        engine.at(1)


def test_clients_without_new_data_get_requests_at_growing_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """But not while some have new data and the others are waited for."""
    now, slept = 0.0, list[float]()

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        slept.append(seconds)
        if now > 2000:
            engine.local_grid.clients["a"].load = make_batch_loader(stream, 0)

    stream = make_swapping_stream()
    engine = make_federation(stream, waiting=replace(SHORT_WAITING, start="data", look=10, grace=100))
    for client in engine.local_grid.clients.values():
        client.load = lambda n: None
    monkeypatch.setattr(federation, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    engine.send_hello(0)
    assert slept[:11] == [10.0] * 11 and slept == sorted(slept[:-11]) + [10.0] * 11  # the last ones are the grace
    assert slept[-12] == 60.0 and slept.count(60.0) > 20


def test_a_client_that_comes_back_only_to_fail_again_is_given_up() -> None:
    engine = make_federation(make_swapping_stream(), waiting=replace(SHORT_WAITING, quorum=3))
    engine.local_grid.faults["b", "train"] = drop_message
    fed = engine.at(0)
    with pytest.raises(QuorumError, match=r"\(b: train at time 0, round 0: no reply"):
        fed.train(fed.fresh(), np.ones((1, 3, 1)))


def test_a_client_that_comes_back_completes_the_quorum() -> None:
    stream = make_swapping_stream()
    engine = make_federation(stream, waiting=replace(SHORT_WAITING, quorum=3, patience=5))
    fed = engine.at(0)
    models, w = fed.fresh(), np.ones((1, 3, 1))

    def once(message: Message) -> None:
        del engine.local_grid.faults["b", "train"]

    engine.local_grid.faults["b", "train"] = once
    trained = fed.train(models, w)
    assert_identical(trained.params, make_federation(stream).at(0).train(models, w).params)


def test_a_client_joins_later_and_shows_its_oldest_batch_first() -> None:
    stream = make_swapping_stream()
    engine = make_federation(stream)
    engine.local_grid.offline.add("c")
    algorithm = fd.algorithm("FedDrift", delta=0.2)
    state = algorithm.init(engine.at(0))
    for tau in range(3):
        if tau == 2:
            engine.local_grid.offline.clear()
        fed = engine.at(tau)
        assert (fed.counts[:, 2] > 0).tolist() == [False] * tau + [tau == 2]
        state = algorithm.step(state, fed)
    assert fed.reachable.all() and fed.sent[2] > 0


# Failures: a reply that is wrong.


def edit_arrays(change: Callable[[Any], Any]) -> Callable[[RecordDict], RecordDict]:
    def tamper(content: RecordDict) -> RecordDict:
        for name, record in list(content.array_records.items()):
            content[name] = ArrayRecord([change(array.numpy()) for array in record.values()])
        return content

    return tamper


def replace_raw_bytes(data: Callable[[Any], bytes], stype: str = "numpy.ndarray") -> Callable[[RecordDict], RecordDict]:
    def tamper(content: RecordDict) -> RecordDict:
        for name, record in list(content.array_records.items()):
            made = {k: Array(a.dtype, a.shape, stype, data(a.numpy())) for k, a in record.items()}
            content[name] = ArrayRecord(made)
        return content

    return tamper


def object_array(_: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    return file.getvalue()


def make_npy_claiming(shape: str) -> bytes:
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header


def add_model_part(content: RecordDict) -> RecordDict:
    content["head-99"] = ArrayRecord([np.zeros(3)])
    return content


def remove_last_arrays(content: RecordDict) -> RecordDict:
    for name, record in list(content.array_records.items()):
        content[name] = ArrayRecord([a.numpy() for a in record.values()][:-1])
    return content


TRAIN_LIES: dict[str, tuple[Any, str]] = {
    "nan": (edit_arrays(lambda a: np.full_like(a, np.nan)), "not finite"),
    "infinite": (edit_arrays(lambda a: np.full_like(a, np.inf)), "not finite"),
    "absurd": (edit_arrays(lambda a: np.full_like(a, 1e38)), "beyond 1e+15"),
    "shape": (edit_arrays(lambda a: a[:1]), "expected float32"),
    "dtype": (edit_arrays(lambda a: a.astype(np.float16)), "expected float32"),
    "far too many bytes": (edit_arrays(lambda a: np.zeros(10_000_000, dtype=np.float32)), "bytes where at most"),
    "fewer arrays": (remove_last_arrays, "arrays, expected"),
    "an extra part": (add_model_part, "parts of models, expected"),
    "a pickle": (replace_raw_bytes(lambda a: pickle.dumps([1, 2])), "pickles are never read"),
    "an array of objects": (replace_raw_bytes(object_array), "pickles are never read"),
    "an endless array": (
        replace_raw_bytes(lambda a: make_npy_claiming("(99999999999,)")),
        "is not a plain array",
    ),  # a MemoryError before
    "a broken header": (
        replace_raw_bytes(lambda a: make_npy_claiming("(" * 500)),
        "is not a plain array",
    ),  # a TokenError
    "another kind": (replace_raw_bytes(lambda a: b"\x80", "pickle"), "of kind 'pickle'"),
    "another round": (edit_body(lambda body: body.update(round=7)), "whole number in 0..0, got 7"),
    "an old version": (
        edit_body(lambda body: body.update(version="0.0.1/0")),
        "the client has version 0.0.1 (protocol 0), the server",
    ),
    "another's name": (edit_body(lambda body: body.update(client="a")), "claims to be from client 'a'"),
    "no JSON": (edit_body(lambda body: "{"), "not JSON"),
    "a list": (edit_body(lambda body: "[1]"), "not a JSON object"),
    "nothing": (edit_body(lambda body: "{}"), "has version None"),
}
EVALUATE_LIES: dict[str, tuple[Any, str]] = {
    "NaN": (edit_body(lambda body: json.dumps(body | {"new": [float("nan")]})), "not JSON of finite numbers"),
    "below zero": (edit_body(lambda body: body.update(new=[-1])), "got -1"),
    "more mistakes than rows": (edit_body(lambda body: body.update(new=[61])), "0..60, got 61"),
    "half a mistake": (edit_body(lambda body: body.update(new=[0.5])), "count of mistakes"),
    "a word": (edit_body(lambda body: body.update(new=["1"])), "got 1"),
    "too many": (edit_body(lambda body: body.update(new=[1, 1])), "expected 1 numbers"),
    "no history": (edit_body(lambda body: body.update(stored=[])), "each stored time step"),
    "another size": (edit_body(lambda body: body.update(stored=[[0, 59, [1]]])), "60..60, got 59"),
    "malformed": (edit_body(lambda body: body.update(stored=[7])), "malformed"),
    "missing": (edit_body(lambda body: body.pop("new")), "malformed"),
}


@pytest.mark.parametrize("lie", TRAIN_LIES)
def test_a_bad_update_is_refused_by_name_and_harms_nobody(lie: str, caplog: pytest.LogCaptureFixture) -> None:
    stream = make_swapping_stream()
    models, w = make_federation(stream).at(0).fresh(), np.ones((1, 3, 1))
    dropped, lying = make_federation(stream), make_federation(stream)
    dropped.local_grid.faults["b", "train"] = drop_message
    lying.local_grid.tamper["b", "train"], sentence = TRAIN_LIES[lie]
    expected = dropped.at(0).train(models, w).params
    caplog.clear()
    assert_identical(lying.at(0).train(models, w).params, expected)
    told = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(told) == 1 and told[0].startswith("client b, train at time 0, round 0:") and sentence in told[0], told


@pytest.mark.parametrize("lie", EVALUATE_LIES)
def test_a_bad_evaluation_is_refused_by_name_and_harms_nobody(lie: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = make_federation(make_swapping_stream())
    engine.local_grid.tamper["b", "evaluate"], sentence = EVALUATE_LIES[lie]
    loss = engine.at(0).evaluate(engine.at(0).fresh())
    np.testing.assert_array_equal(np.isnan(loss[:, 0]), [False, True, False])
    told = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(told) == 1 and told[0].startswith("client b, evaluate at time 0:") and sentence in told[0], told


CONTEST_LIES: dict[str, tuple[Any, str]] = {
    "fewer rows": (edit_body(lambda body: body.update(rows=29)), "30..30, got 29"),
    "another size": (edit_body(lambda body: body.update(wrong=[[1]])), "a table of 2 by 2 counts"),
    "half a mistake": (edit_body(lambda body: body.update(wrong=[[1.0, 0.5], [0.5, 1.0]])), "a table of 2 by 2 counts"),
    "below zero": (edit_body(lambda body: body.update(wrong=[[1, -1], [-1, 1]])), "counts up to 30"),
    "more mistakes than rows": (edit_body(lambda body: body.update(wrong=[[31, 0], [0, 0]])), "counts up to 30"),
    "one way only": (edit_body(lambda body: body.update(wrong=[[5, 4], [3, 5]])), "a symmetric table"),
    "more in common than alone": (
        edit_body(lambda body: body.update(wrong=[[5, 4], [4, 3]])),
        "the mistakes of each contestant",
    ),
    "ragged": (edit_body(lambda body: body.update(wrong=[[5, 4], [4]])), "malformed"),
    "missing": (edit_body(lambda body: body.pop("wrong")), "malformed"),
}


@pytest.mark.parametrize("lie", CONTEST_LIES)
def test_a_bad_count_is_refused_by_name_and_harms_nobody(lie: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = make_federation(make_swapping_stream())
    engine.local_grid.tamper["b", "contest"], sentence = CONTEST_LIES[lie]
    fed = engine.at(0)
    teams = np.array([[[0]] * 3, [[1]] * 3])
    found = fed.contest(fed.fresh(2, distinct=True), teams, replace(LOCAL, hold_out=0.5))
    assert found.rows.tolist() == [30, 0, 30] and not found.wrong[1].any() and not fed.reachable[1]
    told = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(told) == 1 and told[0].startswith("client b, contest at time 0:") and sentence in told[0], told


PART_LIES: dict[str, tuple[Any, str]] = {
    "fewer rows": (edit_body(lambda body: body.update(sizes=[29, 30])), "2 numbers of rows that add up to 60"),
    "three classes": (edit_body(lambda body: body.update(sizes=[20, 20, 20])), "2 numbers of rows that add up to 60"),
    "no sizes": (edit_body(lambda body: body.pop("sizes")), "malformed"),
    "more mistakes than rows": (edit_body(lambda body: body.update(sizes=[0, 60], new=[[1, 0]])), "no more mistakes"),
    "two models": (edit_body(lambda body: body.update(new=[[0, 0], [0, 0]])), "sums of 1 models"),
    "a lie of older data": (edit_body(lambda body: body.update(stored=[[0, [60, 1], [[0, 0]]]])), "add up to 60"),
}


@pytest.mark.parametrize("lie", PART_LIES)
def test_bad_scores_by_class_are_refused_by_name(lie: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = make_federation(make_swapping_stream())
    engine.local_grid.tamper["b", "evaluate"], sentence = PART_LIES[lie]
    loss = engine.at(0).evaluate(engine.at(0).fresh(), by="class")
    assert loss.shape == (3, 1, 2) and np.isnan(loss).all(axis=(1, 2)).tolist() == [False, True, False]
    told = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(told) == 1 and told[0].startswith("client b, evaluate at time 0:") and sentence in told[0], told


MOMENT_LIES: dict[str, tuple[Any, str]] = {
    "fewer rows": (edit_body(lambda body: body.update(count=[[29, 30]])), "(1, 2), each model's adding up to 60"),
    "below zero": (edit_body(lambda body: body.update(count=[[-1, 61]])), "adding up to 60"),
    "half a row": (edit_body(lambda body: body.update(count=[[29.5, 30.5]])), "adding up to 60"),
    "another size": (edit_body(lambda body: body.update(mean=[[[1.0]]])), "deviations of shape (1, 2, 2)"),
    "a negative deviation": (edit_body(lambda body: body.update(std=[[[-1.0, 0], [0, 0]]])), "deviations of shape"),
    "a word": (edit_body(lambda body: body.update(std="none")), "malformed"),
    "missing": (edit_body(lambda body: body.pop("mean")), "malformed"),
}


@pytest.mark.parametrize("lie", MOMENT_LIES)
def test_bad_moments_are_refused_by_name_and_harm_nobody(lie: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = make_federation(make_swapping_stream())
    engine.local_grid.tamper["b", "describe"], sentence = MOMENT_LIES[lie]
    fed = engine.at(0)
    moments = fed.moments(fed.fresh(), "input", by="class")
    assert moments.count.sum(axis=(1, 2)).tolist() == [60, 0, 60] and np.isnan(moments.mean[1]).all()
    assert not fed.reachable[1]
    told = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(told) == 1 and told[0].startswith("client b, describe at time 0:") and sentence in told[0], told


def test_a_client_refuses_to_send_invalid_moments() -> None:
    engine = make_federation(make_swapping_stream())
    client = engine.local_grid.clients["a"]
    client.handle_message("hello", make_request(engine, "hello", {}))
    specs, parts = describe_models(engine.net, engine.at(0).fresh())

    def told(tau: int = 0, **body: Any) -> str:
        head = {"version": VERSION, "about": asdict(engine.build_context(0, tau)), "models": specs}
        plain = {"layer": "input", "by": "all", "project": None, "square": True}
        return str(get_reply(client, "describe", serialization.pack_message(head | plain | body, parts)))

    assert "'count': [[60]]" in told()
    assert "the layer 'head', legal are input, trunk, logits" in told(layer="head")
    assert "moments by 'client', legal are all and class" in told(by="client")
    assert "projects 3 numbers of a layer that has 2" in told(project=[[1.0]] * 3)
    assert "expected a whole number in 1..1000000, got 0" in told(project={"key": [1, 2], "size": 0})
    assert "data that this client does not have" in told(tau=1)


def test_a_client_refuses_a_contest_that_makes_no_sense() -> None:
    engine = make_federation(make_swapping_stream())
    client = engine.local_grid.clients["a"]
    client.handle_message("hello", make_request(engine, "hello", {}))
    specs, parts = describe_models(engine.net, engine.at(0).fresh())

    def told(tau: int = 0, **body: Any) -> str:
        head = {"version": VERSION, "about": asdict(engine.build_context(0, tau)), "models": specs}
        return str(
            get_reply(
                client, "contest", serialization.pack_message(head | {"teams": [[0]], "held_by": None} | body, parts)
            )
        )

    assert "'rows': 60" in told()
    assert "0..0, got 1" in told(teams=[[1]]) and "0..0, got -1" in told(teams=[[-1]])
    assert "without contestants" in told(teams=[]) and "without contestants" in told(teams=[[0], []])
    assert "hold none out" in told(held_by=Local().to_dict())
    assert "data that this client does not have" in told(tau=1)
    assert "TypeError, see the client's log" in told(held_by={"something": 1})


@pytest.mark.parametrize(
    "cells", [[[0, -5]], [[0, 10**12]], [[7, 5]], [[-1, 5]], [[0, 5], [0, 6]], [["0", 5]], [[0, 1.5]], [0], None]
)
def test_a_bad_hello_is_refused(cells: Any) -> None:
    engine = make_federation(make_swapping_stream())
    engine.local_grid.tamper["b", "hello"] = edit_body(lambda body: body.update(cells=cells))
    fed = engine.at(0)
    assert fed.reachable.tolist() == [True, False, True] and fed.counts[:, 1].tolist() == [0]
    assert "hello at time 0" in engine.trouble["b"]


def test_a_node_with_an_unknown_key_gets_no_request() -> None:
    engine = make_federation(make_swapping_stream())
    keys = {key: name for key, name in engine.roster.keys.items() if name != "c"}
    engine.roster = replace(engine.roster, keys=keys)
    assert engine.at(0).reachable.tolist() == [True, True, False]
    assert {name for name, *_ in engine.local_grid.log} == {"a", "b"}


# The client.


def test_a_repeated_request_gets_the_same_reply() -> None:
    engine = make_federation(make_swapping_stream())
    seen: list[tuple[str, RecordDict]] = []
    client = engine.local_grid.clients["a"]
    real = client.handle_message
    client.handle_message = lambda kind, content: seen.append((kind, content)) or real(kind, content)  # type: ignore[method-assign, func-returns-value]
    fed = engine.at(0)
    fed.train(fed.fresh(), np.ones((1, 3, 1)), rounds=3)
    kind, last = seen[-1]
    answers = [serialization.unpack_message(real(kind, last)) for _ in range(2)]
    for part in answers[0][1]:
        for x, y in zip(answers[0][1][part], answers[1][1][part], strict=True):
            np.testing.assert_array_equal(x.numpy(), y.numpy())
    assert kind == "train" and answers[0][0] == answers[1][0]


def test_a_client_refuses_another_version_another_client_and_broken_messages(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_federation(make_swapping_stream())
    client = engine.local_grid.clients["a"]
    old = serialization.pack_message({"version": "0.0.1/0", "about": asdict(engine.build_context(0, 0))})
    told = get_reply(client, "hello", old)
    assert told["version"] == VERSION and "the server has version 0.0.1 (protocol 0), this client" in told["failed"]
    assert "for client 'b'" in get_reply(client, "hello", make_request(engine, "hello", {}, c=1))["failed"]
    assert (
        "its description of the federation"
        in get_reply(client, "hello", serialization.pack_message({"version": VERSION}))["failed"]
    )
    assert (
        "ConfigError" in get_reply(client, "hello", make_request(engine, "hello", {}, experiment="../../etc"))["failed"]
    )
    assert not list(client.root.parent.glob("etc"))


def test_what_goes_wrong_with_data_is_told_at_home_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "classes.txt").write_text("0\n1\n")
    (data / "step_0.csv").write_text("x,y,label\nsecret,1,0\n")
    (tmp_path / "client.toml").write_text('name = "a"\n')
    told = get_reply(load_client(tmp_path), "hello", make_request(make_federation(make_swapping_stream()), "hello", {}))
    assert "secret" not in str(told) and "DataError" in told["failed"]
    assert "secret" in caplog.text


SECRET = "row 17 of Mrs Smith"
FAILING = {
    "load at import": ('load = "mine_a:load"', f"raise ValueError('{SECRET}')"),
    "load at import, exit": ('load = "mine_b:load"', f"raise SystemExit('{SECRET}')"),
    "model at import": ('model = "mine_c:model"', f"raise KeyError('{SECRET}')"),
    "no such name": ('load = "mine_d:load"', f"lod = '{SECRET}'"),
    "load": ('load = "mine_e:load"', f"def load(n): raise OSError('{SECRET}')"),
    "load, exit": ('load = "mine_f:load"', f"def load(n): raise SystemExit('{SECRET}')"),
    "model": ('model = "mine_g:model"', f"def model(): raise TypeError('{SECRET}')"),
    "model at import, exit": ('model = "mine_h:model"', f"raise SystemExit('{SECRET}')"),
    "model, of its own kind": (
        'model = "mine_i:model"',
        f"class Panic(BaseException): pass\n\ndef model(): raise Panic('{SECRET}') from ValueError('{SECRET}')",
    ),
    "load, a warning": (
        'load = "mine_j:load"',
        f"import warnings\n\ndef load(n):\n    print('{SECRET}')\n    warnings.warn('{SECRET}')\n    return [1], [0]",
    ),
}


@pytest.mark.parametrize("case", FAILING)
def test_nothing_that_a_clients_own_code_says_reaches_the_server(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither by its answer nor by Flower, which sends on what an app raises; the client's log has the whole text."""
    line, code = FAILING[case]
    (tmp_path / "client.toml").write_text(f'name = "b"\n{line}\n')
    (tmp_path / f"{line.split(chr(34))[1].split(':')[0]}.py").write_text(code)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "classes.txt").write_text("0\n1\n")
    (tmp_path / "data" / "step_0.csv").write_text("x,y,label\n1,2,0\n3,4,1\n")
    engine = make_federation(make_swapping_stream())
    app, replies = make_client_app(lambda context: load_client(tmp_path)), list[str]()

    def told(message: Message) -> Message:
        reply = app(message, Context(1, 1, {}, RecordDict(), {}))
        replies.append(str(reply.content.config_records["body"]["json"]))
        return reply

    engine.local_grid.faults["b", "hello"] = engine.local_grid.faults["b", "evaluate"] = told
    fed = engine.at(0)
    fed.evaluate(fed.fresh())
    assert fed.reachable.tolist() == [True, False, True]
    assert "see the client's log" in engine.trouble["b"] and "claims" not in engine.trouble["b"]
    assert replies and "Smith" not in str(replies)
    assert case == "no such name" or "Smith" in caplog.text


def test_files_arrive_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "classes.txt").write_text("no\nyes\n")
    (tmp_path / "client.toml").write_text('name = "a"\nmax_age = 2\n[policy]\nmin_rows = 1\n')
    client, engine = load_client(tmp_path), make_federation(make_swapping_stream())

    def cells(tau: int) -> Any:
        return get_reply(client, "hello", make_request(engine, "hello", {}, tau=tau))["cells"]

    assert cells(0) == []
    (tmp_path / "data" / "step_0.csv").write_text("x,y,label\n1,2,yes\n3,4,no\n")
    assert cells(0) == [[0, 2]]
    (tmp_path / "data" / "step_0.csv").unlink()  # the store has its own copy
    np.savez(tmp_path / "data" / "step_1.npz", x=np.zeros((3, 2)), y=np.array(["yes", "no", "no"]))
    (tmp_path / "data" / "step_2.csv").write_text("x,y,label\n1,2,yes\n")
    assert cells(1) == [[0, 2], [1, 3]]
    assert cells(3) == [[3, 1]]  # at most two time steps old
    assert client.open_store("test").read_batch(3)[1].tolist() == [1]
    assert cells(3) == [[3, 1]]


def test_a_store_forgets_the_oldest_and_never_takes_them_in_again(tmp_path: Path) -> None:
    stream = make_swapping_stream(n_steps=5)
    client = Client("a", tmp_path, make_batch_loader(stream, 0), max_rows=130, policy=PERMISSIVE)
    engine = make_federation(stream)
    told = [get_reply(client, "hello", make_request(engine, "hello", {}, tau=tau))["cells"] for tau in range(5)]
    assert told[-1] == [[3, 60], [4, 60]] and told[1] == [[0, 60], [1, 60]]


def test_experiments_do_not_leak_into_each_other(tmp_path: Path) -> None:
    client, engine = (
        Client("a", tmp_path, make_batch_loader(make_swapping_stream(), 0), policy=PERMISSIVE),
        make_federation(make_swapping_stream()),
    )
    get_reply(client, "hello", make_request(engine, "hello", {}, tau=1))
    assert client.open_store("test").count_rows() and not client.open_store("other").count_rows()


def test_a_load_function_with_wrong_data_is_refused(tmp_path: Path) -> None:
    engine = make_federation(make_swapping_stream())
    for wrong in (lambda t: (np.zeros((3, 5)), [0, 1, 0]), lambda t: (np.zeros((3, 2)), [0, 1, 9])):
        client = Client("a", tmp_path, wrong, policy=PERMISSIVE)
        assert "DataError" in get_reply(client, "hello", make_request(engine, "hello", {}))["failed"]


def test_a_model_that_was_tampered_with_on_its_way_is_refused() -> None:
    engine = make_federation(make_swapping_stream())
    client = engine.local_grid.clients["a"]
    client.handle_message("hello", make_request(engine, "hello", {}))
    specs, parts = describe_models(engine.net, engine.at(0).fresh())
    name = specs[0]["head"]
    head = {"version": VERSION, "about": asdict(engine.build_context(0, 0)), "metric": "error", "models": specs}
    other = parts | {name: [array + 1 for array in parts[name]]}
    assert (
        "is not the digest of its content"
        in get_reply(client, "evaluate", serialization.pack_message(head, other))["failed"]
    )


# The server.


@pytest.mark.parametrize(
    "name", ["FedDrift", *(pytest.param(name, marks=pytest.mark.slow) for name in ("IFCA", "KUE", "CFL"))]
)
def test_a_killed_server_resumes_at_the_round_where_it_stopped(name: str, tmp_path: Path) -> None:
    stream = make_swapping_stream()
    algorithm = fd.algorithm(name, stream)
    whole = run_n_steps(make_federation(stream, replace(LOCAL, rounds=3)), algorithm, 4, tmp_path / "whole")
    engine = make_federation(stream, replace(LOCAL, rounds=3), root=tmp_path / "clients")
    clients = engine.local_grid.clients
    kills, steps = 0, dict[int, Step]()
    while True:
        left = [7]  # exchanges until the next kill

        def push(sent: Any, left: list[int] = left, engine: InProcessFlower = engine) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return type(engine.local_grid).push_messages(engine.local_grid, sent)

        engine.local_grid.push_messages = push  # type: ignore[method-assign, assignment]
        try:
            engine.n_steps = 4
            for step in federate(engine, algorithm, tmp_path / "server"):
                steps[step.tau] = step
            break
        except Killed:
            kills += 1
        assert kills < 40
        engine = make_federation(stream, replace(LOCAL, rounds=3), root=tmp_path / "clients")
        engine.local_grid.clients = clients
    assert kills >= 2 and sorted(steps) == [0, 1, 2, 3]
    for a in whole:
        b = steps[a.tau]
        assert a.state.models.ids == b.state.models.ids
        assert_identical(a.state.models.params, b.state.models.params)
        np.testing.assert_array_equal(a.state.votes, b.state.votes)
        np.testing.assert_array_equal(a.accuracy, b.accuracy)
        assert [e.kind for e in a.events] == [e.kind for e in b.events]


def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path) -> None:
    stream = make_swapping_stream()
    first, second = make_federation(stream), make_federation(stream)
    first.n_steps = second.n_steps = 1
    list(federate(first, fd.algorithm("FedDrift"), tmp_path, {"experiment": "a"}))
    assert any(Folder(tmp_path / "checkpoints").newest_first())
    with pytest.raises(DataError, match="other settings"):
        list(federate(second, fd.algorithm("FedDrift"), tmp_path, {"experiment": "b"}))


def test_a_time_step_starts_when_new_data_are_there(tmp_path: Path) -> None:
    stream = make_swapping_stream()
    engine = make_federation(stream, waiting=replace(SHORT_WAITING, start="data", quorum=3, patience=5, look=0.01))
    here = set[int]()
    looks = 0

    def load(t: int) -> Any:
        nonlocal looks
        looks += t == 1
        if looks > 5:
            here.add(1)
        return stream.cell(t, 0) if t == 0 or t in here else None

    engine.local_grid.clients["a"].load = load
    algorithm = fd.algorithm("FedDrift")
    state = algorithm.step(algorithm.init(engine.at(0)), engine.at(0))
    _, tested = engine.test(state, 1)
    assert looks > 5 and tested.tolist() == [60, 60, 60]


def test_a_place_added_later_joins_a_federation_that_runs(tmp_path: Path) -> None:
    stream, algorithm = make_swapping_stream(), fd.algorithm("FedDrift", delta=0.2)
    two = Stream.from_arrays(
        [[stream.cell(t, c) for c in range(2)] for t in range(5)], n_classes=2, clients=stream.clients[:2]
    )
    run_n_steps(make_federation(two, LEARN, root=tmp_path / "clients"), algorithm, 2, tmp_path / "server")
    steps = run_n_steps(make_federation(stream, LEARN, root=tmp_path / "clients"), algorithm, 4, tmp_path / "server")
    assert steps[-1].tau == 3 and steps[-1].state.votes.shape[0] == 3
    assert [step.sent[2] > 0 for step in steps[-2:]] == [True, True] and steps[-1].tested[2] > 0
    assert steps[0].tau == 1 and np.isnan(steps[0].loss[2]) and steps[0].received[2] == 0  # told again, without the new
    with pytest.raises(DataError, match="must be added after these"):
        run_n_steps(make_federation(two), algorithm, 4, tmp_path / "server")


def test_two_servers_do_not_work_on_one_federation(tmp_path: Path) -> None:
    settings = Settings(experiment="test", clients=("a", "b", "c"), features=(2,), classes=(0, 1), time_steps=1)
    first, second = make_federation(make_swapping_stream()), make_federation(make_swapping_stream())
    steps: Any = federate(first, fd.algorithm("FedDrift"), tmp_path)
    next(steps)
    with pytest.raises(DataError, match="another server is running"):
        run_federation(second.local_grid, settings, second.roster, tmp_path)
    steps.close()


@pytest.mark.parametrize("defend", [False, True, "robust"])
def test_a_server_defends_itself_if_its_settings_enable_it(
    defend: Defend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []

    def federate(*given: Any) -> tuple[()]:
        found.extend(given)
        return ()

    monkeypatch.setattr(loop, "federate", federate)
    places: dict[str, Any] = {"experiment": "test", "clients": ("a", "b", "c"), "features": (2,), "classes": (0, 1)}
    engine = make_federation(make_swapping_stream())
    settings = Settings(**places | ({"defend": defend} if defend else {}), archive=7)
    run_federation(engine.local_grid, settings, engine.roster, tmp_path)
    made, algorithm, _, about, archive = found
    assert archive == 7 and "archive" not in about  # which may change while a federation runs
    assert made.conditions.defend is defend and about.get("defend", False) is defend
    assert ("defend" in about) is bool(defend)  # older checkpoints have no such line
    assert recording.build_header(made, algorithm, about)["overrides"] == ({"defend": defend} if defend else {})


def test_the_server_waits_a_while_for_clients_that_were_connected(tmp_path: Path) -> None:
    engine = make_federation(
        make_swapping_stream(), waiting=replace(SHORT_WAITING, start="data", grace=0.2, patience=5)
    )
    engine.local_grid.offline.add("c")

    def hellos(tau: int) -> int:
        before = len(engine.local_grid.log)
        engine.at(tau)
        return sum(name == "a" for name, *_ in engine.local_grid.log[before:])

    assert hellos(0) > 1  # it may come yet,
    assert hellos(1) == 1  # but has not been there lately
    engine.local_grid.offline.clear()
    assert hellos(2) == 1 and engine.at(2).reachable.all()


def test_messages_do_not_outlive_their_deadline() -> None:
    engine, seen = make_federation(make_swapping_stream()), list[Message]()
    engine.local_grid.faults["a", "evaluate"] = lambda message: seen.append(message)
    fed = engine.at(0)
    fed.evaluate(fed.fresh())
    assert seen[0].metadata.ttl == pytest.approx(SHORT_WAITING.evaluate + MESSAGE_GRACE_SECONDS)


# Serving.


def test_a_client_predicts_offline_with_the_model_it_uses(tmp_path: Path) -> None:
    stream = make_swapping_stream()
    engine = make_federation(stream, Local(rounds=3, steps=50, lr=0.05), root=tmp_path / "store")
    (tmp_path / "client.toml").write_text('name = "c"\n')
    with pytest.raises(DataError, match="no model yet"):
        current(tmp_path)
    steps = run_n_steps(engine, fd.algorithm("FedDrift", delta=0.2), 4, tmp_path / "server")
    model = current(tmp_path)
    assert model.models.ids == (steps[-1].model[2],) and model.tau == 3
    x, y = stream.cell(4, 2)
    assert (model.predict(x) == y).mean() == steps[-1].accuracy[2] > 0.8
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "classes.txt").write_text("no\nyes\n")
    assert set(current(tmp_path).predict(x)) == {"no", "yes"}
    with pytest.raises(DataError, match="must be finite numbers"):  # as exported models say it
        model.predict([[np.nan] * x.shape[1]])
    with pytest.raises(DataError, match="must have shape"):
        model.predict(np.zeros((2, 99)))
    with pytest.raises(ConfigError, match="cannot read"):
        current(tmp_path / "nowhere")


@pytest.mark.slow
def test_an_ensemble_votes_offline_as_in_the_run(tmp_path: Path) -> None:
    stream = make_swapping_stream()
    engine = make_federation(stream, root=tmp_path / "store")
    (tmp_path / "client.toml").write_text('name = "b"\n')
    steps = run_n_steps(engine, fd.algorithm("KUE"), 3, tmp_path / "server")
    x, y = stream.cell(3, 1)
    model = current(tmp_path)
    assert len(model.votes) > 1 and (model.predict(x) == y).mean() == steps[-1].accuracy[1]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("features = [0]", "features.0 must be at least 1, got 0"),
        ("classes = ['a', 'a']", "classes must be different from each other"),
        (f"seed = 0x{'f' * 5000}", "got a number of thousands of digits"),  # a ValueError before
        (f"seed = {'[' * 3000}", "cannot read"),  # a RecursionError
        ("lr = inf", "lr must be above 0"),  # told when the run had begun
        ("start = nan", "start must be 'data' or a number of seconds"),
    ],
)
def test_a_server_file_that_makes_no_sense_is_one_sentence(tmp_path: Path, line: str, said: str) -> None:
    good = {"experiment": "'x'", "clients": "['a']", "features": "[2]", "classes": "['no', 'yes']"}
    key, _, value = line.partition(" = ")
    text = "\n".join(f"{name} = {what}" for name, what in {**good, key: value}.items())
    (tmp_path / "federation.toml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        Settings.read(tmp_path / "federation.toml")


def test_a_client_does_not_look_for_data_of_endless_time() -> None:
    """A time of 10^15 kept it busy for ever."""
    engine = make_federation(make_swapping_stream())
    client = engine.local_grid.clients["a"]
    told = get_reply(client, "hello", make_request(engine, "hello", {}, tau=10**15))["failed"]
    assert "expected a whole number in 0..1000000" in told


def test_a_client_refuses_a_metric_that_there_is_not() -> None:
    engine = make_federation(make_swapping_stream())
    client = engine.local_grid.clients["a"]
    client.handle_message("hello", make_request(engine, "hello", {}))
    specs, parts = describe_models(engine.net, engine.at(0).fresh())
    head = {"version": VERSION, "about": asdict(engine.build_context(0, 0)), "models": specs}
    for metric in ("class", "foo"):
        told = get_reply(client, "evaluate", serialization.pack_message(head | {"metric": metric}, parts))["failed"]
        assert f"the metric '{metric}', legal are error, loss, brier" in told
