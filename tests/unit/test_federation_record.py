"""The record of a federation of real machines: told at once, read while it is written, the same after a kill."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

from typer.testing import CliRunner

import feddrift as fd
from feddrift.cli import app
from feddrift.data import Stream
from feddrift.deploy.export import export
from feddrift.deploy.server import federate
from feddrift.deploy.status import status
from feddrift.engines.flower.exchange import QuorumError
from feddrift.errors import DataError
from feddrift.reports import metrics, page
from feddrift.reports.exchanges import sat_out
from feddrift.reports.page.data import collect
from feddrift.reports.summary import joined, summarise
from feddrift.runs.record import Record, part_of, read, read_all
from tests.flower import OverFlower
from tests.unit.test_flower import LEARN, Killed, edited, over, swapping

FEDDRIFT = fd.algorithm("FedDrift", delta=0.2)
SETTINGS = """\
experiment = "test"
clients = {clients}
features = [2]
classes = [0, 1]
rounds = 2
"""


def server_of(folder: Path, clients: Sequence[str] = ("a", "b", "c")) -> Path:
    """The folder of a server, as far as its readers need it."""
    server = folder / "server"
    (server / "state").mkdir(parents=True, exist_ok=True)
    (server / "federation.toml").write_text(SETTINGS.format(clients=json.dumps(list(clients))))
    return server


def part_of_stream(stream: Stream, n_clients: int) -> Stream:
    cells = [[stream.cell(t, c) for c in range(n_clients)] for t in range(len(stream.counts))]
    return Stream.from_arrays(cells, n_classes=2, clients=stream.clients[:n_clients])


def watched(engine: OverFlower, see: Callable[[int], None]) -> None:
    """Call `see` whenever the first client is asked for the data of a time."""
    client = engine.local_grid.clients["a"]
    load = client.load

    def seen(t: int) -> Any:
        see(t)
        return load(t)

    client.load = seen


def run(*words: str) -> str:
    told = CliRunner().invoke(app, words)
    assert told.exit_code == 0, told.output
    return told.output


def test_an_alarm_is_in_record_status_and_page_before_the_next_data_come(tmp_path: Path) -> None:
    """The labels of c swap at time 2; what all readers say is looked at while the data of time 3 are awaited."""
    server, found = server_of(tmp_path), dict[str, Any]()
    engine = over(swapping(), LEARN)
    engine.n_steps = 4

    def see(t: int) -> None:
        if t == 3 and not found:
            found["record"] = read(server / "state" / "test.jsonl.part")
            found["status"] = run("deploy", "status", str(tmp_path))
            found["json"] = json.loads(run("deploy", "status", str(tmp_path), "--json"))
            found["report"] = run("report", str(tmp_path))
            found["page"] = collect(read_all(server), "fed")["streams"][0]["groups"][0]["runs"][0]

    watched(engine, see)
    steps = list(federate(engine, FEDDRIFT, server / "state"))
    record = found["record"]
    assert record.status == "unfinished" and (record.rows.steps, record.tested) == (3, 2)
    assert record.rows.drift[2].tolist() == [False, False, True] and np.isnan(record.rows.accuracy[2]).all()
    assert [(e["event"], e["model"], e["t"]) for e in record.events] == [("created", 1, 2)]
    assert "running" in found["status"] and "not tested yet" in found["status"]
    assert "time 3: model 1 created: the best model's error rose" in found["status"]
    assert "test is not finished: these are its first 3 time steps" in found["report"]
    told = found["json"]
    assert told["status"] == "running" and [step["tested"] for step in told["steps"]] == [True, True, False]
    assert told["steps"][2]["clients"]["c"] == {
        "model": 1, "drift": True, "accuracy": None, "tested": None, "sent": float(steps[2].sent[2]), "received": 60,
    }  # fmt: skip
    shown = found["page"]
    assert (shown["steps"], shown["tested"], shown["n_steps"]) == (3, 2, None)
    assert 8 in shown["cells"]["alarms"] and shown["cells"]["accuracy"][6:] == [-2, -2, -2]
    assert [event["kind"] for event in shown["events"]] == ["created"]
    assert (
        "finished" in run("deploy", "status", str(tmp_path)) and not part_of(server / "state" / "test.jsonl").exists()
    )


def test_the_record_says_what_the_steps_say(tmp_path: Path) -> None:
    engine = over(swapping(), LEARN)
    engine.n_steps = 4
    steps = list(federate(engine, FEDDRIFT, tmp_path))
    record = read(tmp_path / "test.jsonl")
    assert record.status == "complete" and record.runs_on and record.tested == record.rows.steps == 4
    for t, step in enumerate(steps):
        np.testing.assert_array_equal(record.rows.accuracy[t], step.accuracy)
        np.testing.assert_array_equal(record.rows.model[t], step.model)
        np.testing.assert_array_equal(record.rows.drift[t], step.drifted)
        np.testing.assert_array_equal(record.rows.tested[t], step.tested)
        np.testing.assert_allclose(record.rows.models_sent[t], step.sent)
        np.testing.assert_array_equal(record.rows.received[t], step.received)
    assert len(record.header["times"]) == 4
    asked = [(line["t"], line["asked"], line["round"]) for line in record.exchanges]
    questions = [("hello", None), ("evaluate", None), ("train", 0), ("train", 1)]
    assert asked == [(t, *question) for t in range(4) for question in questions] + [(4, "hello", None)]
    for line in record.exchanges:
        assert line["c"] == [0, 1, 2] and line["trouble"] == [None] * 3
        assert min(line["sent"]) > 100 and min(line["answered"]) > 20 and max(line["seconds"]) <= line["took"]


def test_a_client_joins_late_and_another_leaves(tmp_path: Path) -> None:
    """First a and b; then c, whose labels are swapped from time 2 on, has a place; at time 3 b is gone."""
    stream, state = swapping(n_steps=5), tmp_path / "server" / "state"
    early = over(part_of_stream(stream, 2), LEARN, root=tmp_path / "clients")
    early.n_steps = 2
    list(federate(early, FEDDRIFT, state))
    engine = over(stream, LEARN, root=tmp_path / "clients")
    engine.n_steps = 5
    watched(engine, lambda t: engine.local_grid.offline.add("b") if t == 3 else None)
    list(federate(engine, FEDDRIFT, state))
    lines = [json.loads(line) for line in (state / "test.jsonl").read_text().splitlines()]
    assert [(line["t"], line["c"], line["name"]) for line in lines if line["kind"] == "client"] == [(2, 2, "c")]
    record = read(state / "test.jsonl")
    assert record.header["clients"] == ["a", "b", "c"] and record.rows.model.shape == (5, 3)
    assert joined(record)[:, 2].tolist() == [False, False, True, True, True]
    assert record.rows.received[:, 2].tolist()[:2] == [0, 0] and record.rows.model[:2, 2].tolist() == [0, 0]
    assert record.rows.received[3:, 1].tolist() == [0, 0]
    last = [line for line in record.exchanges if line["asked"] == "hello"][-1]
    assert last["trouble"] == [None, "it is not connected", None] and last["sent"][1] == 0
    (summary,) = summarise([record])
    assert summary.stream == "test" and summary.including_drifts is not None
    assert metrics.measure(record).mean is not None
    shown = collect([record], "fed")["streams"][0]["groups"][0]["runs"][0]
    assert shown["exchanges"]["clients"][1]["trouble"] == "it is not connected"
    assert any(c == 1 and why == "it is not connected" for _, _, c, _, _, why in shown["exchanges"]["out"])
    page.write([record], tmp_path / "page.html", "fed")
    for kind in ("clusters", "accuracy"):
        run("plot", str(state), kind, "--out", str(tmp_path / f"{kind}.png"))
    assert "test" in run("report", str(state)) and "test" in run("report", str(state), "--metrics")


def told(record: Record) -> list[Any]:
    """What does not depend on the clock."""
    return [record.rows, record.events, record.status, record.tested]


def test_a_record_is_the_same_after_kills(tmp_path: Path) -> None:
    """Killed again and again, between and inside time steps; exchanges of all servers stay."""
    whole = over(swapping(), LEARN)
    whole.n_steps = 4
    list(federate(whole, FEDDRIFT, tmp_path / "whole"))
    expected = read(tmp_path / "whole" / "test.jsonl")
    clients, kills, done = None, 0, False
    while not done:
        engine = over(swapping(), LEARN, root=tmp_path / "clients")
        clients = engine.local_grid.clients = clients or engine.local_grid.clients
        engine.n_steps = 4
        left, push = [3], engine.local_grid.push_messages

        def counted(sent: Any, left: list[int] = left, push: Any = push) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return push(sent)

        engine.local_grid.push_messages = counted  # type: ignore[method-assign, assignment]
        try:
            list(federate(engine, FEDDRIFT, tmp_path / "state"))
            done = True
        except Killed:
            kills += 1
            assert kills < 40
    found = read(tmp_path / "state" / "test.jsonl")
    assert kills >= 4
    for a, b in zip(told(expected), told(found), strict=True):
        if hasattr(a, "accuracy"):
            for name in ("accuracy", "model", "drift", "tested", "models_sent", "received", "loss"):
                np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
        else:
            assert a == b
    assert len(found.exchanges) > len(expected.exchanges)  # every server said hello


def test_a_record_is_kept_by_whoever_writes_it(tmp_path: Path) -> None:
    """A torn line is cut off; a federation without its checkpoints does not start over; a lost record is replaced."""
    server, state = server_of(tmp_path), tmp_path / "server" / "state"
    engine = over(swapping(), LEARN, root=tmp_path / "clients")
    engine.n_steps = 2
    list(federate(engine, FEDDRIFT, state))
    path = state / "test.jsonl"
    with open(path, "ab") as file:
        file.truncate(path.stat().st_size - 7)
    again = over(swapping(), LEARN, root=tmp_path / "clients")
    again.n_steps = 3
    assert [step.tau for step in federate(again, FEDDRIFT, state)] == [1, 2]
    assert read(path).rows.steps == 3 and read(path).status == "complete"

    (state / "checkpoints").rename(tmp_path / "away")
    fresh = over(swapping(), LEARN)
    with pytest.raises(DataError, match="has 3 time steps but none of the checkpoints"):
        next(iter(federate(fresh, FEDDRIFT, state)))
    (tmp_path / "away").rename(state / "checkpoints")

    path.rename(tmp_path / "lost.jsonl")
    old = {"model": 0, "drift": False, "accuracy": 0.5, "tested": 60, "sent": 4.0, "here": True, "trouble": None}
    history = {"t": 0, "at": "then", "models": [0], "clients": dict.fromkeys("abc", old), "events": []}
    (state / "history.jsonl").write_text(json.dumps(history) + '\n{"t": 1, "mod')
    again = over(swapping(), LEARN, root=tmp_path / "clients")
    again.n_steps = 4
    assert [step.tau for step in federate(again, FEDDRIFT, state)] == [2, 3]
    record, lost = read(path), read(tmp_path / "lost.jsonl")
    assert record.rows.steps == 4 and not (state / "history.jsonl").exists()
    assert record.rows.accuracy[0].tolist() == [0.5] * 3  # as the file of version 0.1 has it
    np.testing.assert_array_equal(record.rows.model[:3], lost.rows.model)
    np.testing.assert_array_equal(record.rows.received[:3], lost.rows.received)
    found = status(server)
    assert found is not None and found.word == "finished"


def test_a_federation_that_stops_says_so_and_can_be_exported(tmp_path: Path) -> None:
    server, exported = server_of(tmp_path), tmp_path / "models"
    assert "no time step" in run("deploy", "status", str(tmp_path))
    engine = over(swapping(), LEARN)
    with pytest.raises(DataError, match="no time step yet"):
        export(server, exported)

    def see(t: int) -> None:
        if t == 4:
            if not exported.exists():
                run("export", str(tmp_path), "--out", str(exported))
            engine.local_grid.offline |= {"a", "b", "c"}

    watched(engine, see)
    with pytest.raises(QuorumError):
        list(federate(engine, FEDDRIFT, server / "state"))
    models = fd.load(exported)
    x = np.random.default_rng(1).random((200, 2)).astype(np.float32)
    assert models.about["time_steps"] == 4
    assert (models.predict("a", x) == (x[:, 0] > 0.5)).mean() > 0.9
    assert (models.predict("c", x) == (x[:, 0] <= 0.5)).mean() > 0.8
    assert models.about["lineage"][0]["cause"]["clients"] == ["c"]
    assert "stopped, `feddrift deploy run` goes on" in run("deploy", "status", str(tmp_path))


def test_no_client_can_spoil_the_record(tmp_path: Path) -> None:
    """Texts that are no text, and a loss beyond all bounds: the server goes on, and says what it can."""
    engine = over(swapping(), LEARN)
    engine.n_steps = 3
    engine.local_grid.tamper["b", "hello"] = edited(lambda body: body.update(cells=[["\ud800\n\x1b", 1]]))
    engine.local_grid.tamper["c", "evaluate"] = edited(lambda body: body.update(new=[1e300] * len(body["new"])))
    algorithm = fd.algorithm("FedDrift", delta=0.2, metric="loss")
    assert [step.tau for step in federate(engine, algorithm, tmp_path)] == [0, 1, 2]
    record = read(tmp_path / "test.jsonl")
    assert np.isnan(record.rows.loss[:, 2]).all() and not np.isnan(record.rows.loss[:, 0]).any()
    refused = [why for _, _, c, _, _, why in sat_out(record) if c == 1]
    assert len(refused) == 4 and all(why.endswith(r"got \ud800\n\x1b") for why in refused)
    page.write([record], tmp_path / "page.html", "fed")
