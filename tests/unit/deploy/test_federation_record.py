"""The record of a federation: written without delay, readable meanwhile, unchanged by a kill."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")


import feddrift as fd
from feddrift.cli.deploy import format_tested_step, format_trained_step
from feddrift.deploy.monitor.alerts import read_audit_log
from feddrift.deploy.monitor.status import RecordWatcher, read_status
from feddrift.deploy.operate.export import export_federation
from feddrift.deploy.server.loop import federate
from feddrift.engines.flower.server.exchange import QuorumError
from feddrift.errors import DataError
from feddrift.reports import metrics, page
from feddrift.reports.exchanges import find_absent_clients, find_missing_replies
from feddrift.reports.page.data import collect_page_data
from feddrift.reports.summary import has_joined, summarise
from feddrift.runs.record import get_part_path, read, read_all
from tests.support.cli import run_and_get_output
from tests.support.federation import (
    FEDDRIFT,
    LEARN,
    assert_same_record,
    edit_body,
    make_federation,
    make_server_folder,
    make_swapping_stream,
    observe_data_requests,
    select_clients,
)
from tests.support.flower import SHORT_WAITING, InProcessFlower
from tests.support.kills import Killed


def test_an_alarm_is_in_record_status_and_page_before_the_next_data_come(tmp_path: Path) -> None:
    """The labels of c swap at time 2; what all readers say is looked at while the data of time 3 are awaited."""
    server, found = make_server_folder(tmp_path), dict[str, Any]()
    engine = make_federation(make_swapping_stream(), LEARN)
    engine.n_steps = 4

    def see(t: int) -> None:
        if t == 3 and not found:
            found["record"] = read(server / "state" / "test.jsonl.part")
            found["status"] = run_and_get_output("deploy", "status", str(tmp_path))
            found["json"] = json.loads(run_and_get_output("deploy", "status", str(tmp_path), "--json"))
            found["report"] = run_and_get_output("report", str(tmp_path))
            found["page"] = collect_page_data(read_all(server), "fed")["streams"][0]["groups"][0]["runs"][0]

    observe_data_requests(engine, see)
    steps = list(federate(engine, FEDDRIFT, server / "state"))
    record = found["record"]
    assert record.status == "unfinished" and (record.rows.steps, record.tested) == (3, 2)
    assert record.rows.drift[2].tolist() == [False, False, True] and np.isnan(record.rows.accuracy[2]).all()
    assert [(e["event"], e["model"], e["t"]) for e in record.events] == [("created", 1, 2)]
    assert "running" in found["status"] and "not tested yet" in found["status"]
    assert "time 3: model 1 created for client c: the best model's error rose" in found["status"]
    assert "test is not finished: these are its first 3 time steps" in found["report"]
    told = found["json"]
    assert told["status"] == "running" and [step["tested"] for step in told["steps"]] == [True, True, False]
    assert "time 3: alarm of c: the inputs and the class shares are as before" in " ".join(found["status"].split())
    client = told["steps"][2]["clients"]["c"]
    assert client.pop("shifts")["since"] == 1 and client == {
        "model": 1, "drift": True, "accuracy": None, "tested": None, "sent": float(steps[2].sent[2]), "received": 60,
    }  # fmt: skip
    shown = found["page"]
    assert (shown["steps"], shown["tested"], shown["n_steps"]) == (3, 2, None)
    assert 8 in shown["cells"]["alarms"] and shown["cells"]["accuracy"][6:] == [-2, -2, -2]
    assert [event["kind"] for event in shown["events"]] == ["created"]
    assert (
        "finished" in run_and_get_output("deploy", "status", str(tmp_path))
        and not get_part_path(server / "state" / "test.jsonl").exists()
    )


def test_the_record_has_the_values_of_the_steps(tmp_path: Path) -> None:
    engine = make_federation(make_swapping_stream(), LEARN)
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
    steps_asked = [[(t, *question) for question in questions] for t in range(4)]
    steps_asked[2].append((2, "explain", None))  # c, which raises an alarm
    assert asked == [question for step in steps_asked for question in step] + [(4, "hello", None)]
    for line in record.exchanges:
        assert line["c"] == [0, 1, 2] and not any(line["trouble"])
        assert min(line["sent"]) > 100 and min(line["answered"]) > 20 and max(line["seconds"]) <= line["took"]


def test_a_client_joins_late_and_another_leaves(tmp_path: Path) -> None:
    """First a and b; then c, whose labels are swapped from time 2 on, has a place; at time 3 b is gone."""
    stream, state = make_swapping_stream(n_steps=5), tmp_path / "server" / "state"
    early = make_federation(select_clients(stream, 2), LEARN, root=tmp_path / "clients")
    early.n_steps = 2
    list(federate(early, FEDDRIFT, state))
    engine = make_federation(stream, LEARN, root=tmp_path / "clients")
    engine.n_steps = 5
    observe_data_requests(engine, lambda t: engine.local_grid.offline.add("b") if t == 3 else None)
    list(federate(engine, FEDDRIFT, state))
    lines = [json.loads(line) for line in (state / "test.jsonl").read_text().splitlines()]
    assert [(line["t"], line["c"], line["name"]) for line in lines if line["kind"] == "client"] == [(2, 2, "c")]
    record = read(state / "test.jsonl")
    assert record.header["clients"] == ["a", "b", "c"] and record.rows.model.shape == (5, 3)
    assert has_joined(record)[:, 2].tolist() == [False, False, True, True, True]
    assert record.rows.received[:, 2].tolist()[:2] == [0, 0] and record.rows.model[:2, 2].tolist() == [0, 0]
    assert record.rows.received[3:, 1].tolist() == [0, 0]
    last = [line for line in record.exchanges if line["asked"] == "hello"][-1]
    assert last["trouble"] == [None, "it is not connected", None] and last["sent"][1] == 0
    (summary,) = summarise([record])
    assert summary.stream == "test" and summary.including_drifts is not None
    assert metrics.compute_metrics(record).mean is not None
    shown = collect_page_data([record], "fed")["streams"][0]["groups"][0]["runs"][0]
    assert shown["exchanges"]["clients"][1]["trouble"] == "it is not connected"
    assert any(c == 1 and why == "it is not connected" for _, _, c, _, _, why in shown["exchanges"]["out"])
    page.write_page([record], tmp_path / "page.html", "fed")
    for kind in ("clusters", "accuracy"):
        run_and_get_output("plot", str(state), kind, "--out", str(tmp_path / f"{kind}.png"))
    assert "test" in run_and_get_output("report", str(state)) and "test" in run_and_get_output(
        "report", str(state), "--metrics"
    )


def run_time_steps(engine: InProcessFlower, n_steps: int, state: Path) -> list[int]:
    """Run a federation up to so many time steps; which of them were tested."""
    engine.n_steps = n_steps
    return [step.tau for step in federate(engine, FEDDRIFT, state)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the dead close no files
@pytest.mark.slow
def test_killed_before_any_change_of_the_disk_a_record_is_the_same(
    tmp_path: Path, kill_before_change: Callable[[int], None]
) -> None:
    """Two clients, then a third; every server but the last dies before the n-th change of the disk."""
    stream = make_swapping_stream(n_steps=4, n=20)

    def stage(folder: Path, n_clients: int, n_steps: int) -> None:
        run_time_steps(
            make_federation(select_clients(stream, n_clients), root=folder / "clients"), n_steps, folder / "state"
        )

    def both(folder: Path) -> int:
        """How often a server died."""
        deaths = 0
        for n_clients, n_steps in ((2, 2), (3, 4)):
            with suppress(Killed):
                stage(folder, n_clients, n_steps)
                continue
            gc.collect()  # the dead hold no locks
            kill_before_change(10**9)
            deaths += 1
            stage(folder, n_clients, n_steps)
        return deaths

    assert both(tmp_path / "whole") == 0
    expected, n = read(tmp_path / "whole" / "state" / "test.jsonl"), 0
    while True:
        folder = tmp_path / str(n)
        kill_before_change(n)
        if not both(folder):
            break
        assert_same_record(read(folder / "state" / "test.jsonl"), expected)
        assert not list((folder / "state").glob("*.part"))
        n += 1 if n < 4 else 29
    assert n > 60


@pytest.mark.slow
def test_a_record_that_is_shorter_than_the_checkpoint_is_filled_up(tmp_path: Path) -> None:
    """After a power cut, say: cut anywhere, also where a checkpoint lies inside the next time step."""
    stream = make_swapping_stream(n=20)
    run_time_steps(make_federation(stream, root=tmp_path / "clients"), 2, tmp_path / "state")
    third = make_federation(stream, root=tmp_path / "clients")
    asked, left = third.send_requests, [3]

    def ask(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise Killed
        return asked(*args, **kwargs)

    third.send_requests = ask  # type: ignore[method-assign]
    with pytest.raises(Killed):
        run_time_steps(third, 4, tmp_path / "state")  # after a hello, an evaluation and a round
    lines = (tmp_path / "state" / "test.jsonl").read_bytes().splitlines(keepends=True)
    newest = max(path.name for path in (tmp_path / "state" / "checkpoints").iterdir())
    assert newest.startswith("000002-00000") and newest > "000002-000000"
    for kept in range(len(lines)):
        for name in ("clients", "state"):
            shutil.copytree(tmp_path / name, tmp_path / str(kept) / name)
        state = tmp_path / str(kept) / "state"
        (state / "test.jsonl").write_bytes(b"".join(lines[:kept]))
        assert run_time_steps(make_federation(stream, root=tmp_path / str(kept) / "clients"), 4, state) == [2, 3]
        record = read(state / "test.jsonl")
        assert record.status == "complete" and record.tested == record.rows.steps == 4
        assert (record.rows.received == 20).all() and record.rows.tested[2:].min() == 20


def test_a_client_that_is_away_when_the_server_starts_again_keeps_its_test(tmp_path: Path) -> None:
    stream = make_swapping_stream()
    run_time_steps(make_federation(stream, LEARN, root=tmp_path / "clients"), 2, tmp_path / "state")
    before = read(tmp_path / "state" / "test.jsonl")
    again = make_federation(stream, LEARN, root=tmp_path / "clients")
    again.local_grid.offline |= {"b", "c"}
    assert run_time_steps(again, 3, tmp_path / "state") == [1, 2]
    after = read(tmp_path / "state" / "test.jsonl")
    np.testing.assert_array_equal(after.rows.accuracy[:2], before.rows.accuracy)
    assert after.rows.tested[2].tolist() == [60, 0, 0]


def test_a_finished_federation_stays_finished(tmp_path: Path) -> None:
    run_time_steps(make_federation(make_swapping_stream(n=20), root=tmp_path / "clients"), 2, tmp_path / "state")
    before = (tmp_path / "state" / "test.jsonl").read_bytes()
    nobody = make_federation(make_swapping_stream(n=20), root=tmp_path / "clients")
    nobody.local_grid.offline |= {"a", "b", "c"}
    assert run_time_steps(nobody, 2, tmp_path / "state") == []  # though there is no quorum
    assert (tmp_path / "state" / "test.jsonl").read_bytes() == before
    more = make_federation(make_swapping_stream(n=20), root=tmp_path / "clients")
    assert (
        run_time_steps(more, 3, tmp_path / "state") == [1, 2]
        and read(tmp_path / "state" / "test.jsonl").rows.steps == 3
    )


def test_a_federation_that_never_began_may_be_changed(tmp_path: Path) -> None:
    """Nobody was there; then the settings were corrected, and a client fewer has a place."""
    nobody = make_federation(make_swapping_stream(n=20))
    nobody.local_grid.offline |= {"a", "b", "c"}
    with pytest.raises(QuorumError):
        list(federate(nobody, fd.algorithm("Oblivious"), tmp_path, {"algorithm": "Oblivious"}))
    assert read(tmp_path / "test.jsonl").header["algorithm"] == "Oblivious"
    engine = make_federation(select_clients(make_swapping_stream(n=20), 2))
    engine.n_steps = 2
    assert len(list(federate(engine, FEDDRIFT, tmp_path, {"algorithm": "FedDrift"}))) == 2
    record = read(tmp_path / "test.jsonl")
    assert (record.header["algorithm"], record.header["clients"]) == ("FedDrift", ["a", "b"])


def test_waiting_for_data_does_not_fill_the_record(tmp_path: Path) -> None:
    """Nor does a client that always lacks what it was sent, or complains in other words every time."""
    engine = make_federation(
        make_swapping_stream(n=20), waiting=replace(SHORT_WAITING, start="data", grace=0.2, look=0.001, patience=5)
    )
    words = iter(range(10**6))
    engine.local_grid.tamper["b", "hello"] = edit_body(lambda body: body.update(missing=["head-0"]))
    engine.local_grid.tamper["c", "hello"] = edit_body(lambda body: body.update(failed=f"for the {next(words)}th time"))
    looks = run_time_steps(engine, 2, tmp_path)
    hellos = [line for line in read(tmp_path / "test.jsonl").exchanges if line["asked"] == "hello"]
    asked = sum(kind == "hello" for _, kind, _ in engine.local_grid.log)
    assert looks == [0, 1] and asked > 15 and len(hellos) <= 6


def test_a_command_follows_trained_and_tested_steps(tmp_path: Path) -> None:
    server, lines = make_server_folder(tmp_path), list[str]()
    engine = make_federation(make_swapping_stream(), LEARN)
    watch = RecordWatcher(server)

    def look(_: int) -> None:
        for record, t, tested in watch.read_new_steps():
            lines.append(format_tested_step(record, t) if tested else format_trained_step(record, t))

    observe_data_requests(engine, look)
    run_time_steps(engine, 4, server / "state")
    look(4)
    assert [line.split()[:3] for line in lines] == [
        ["time", str(t), what] for t in range(1, 5) for what in ("trained", "tested")
    ]
    trained, moved = lines[4].splitlines()
    assert trained.endswith("alarm at c; created model 1") and lines[5].endswith("%")
    assert moved.strip().startswith("c: the inputs and the class shares are as before")
    assert watch.read_new_steps() == [] and RecordWatcher(server).read_new_steps() == []


def test_a_reason_is_shown_as_it_is(tmp_path: Path) -> None:
    server = make_server_folder(tmp_path)
    engine = make_federation(make_swapping_stream(n=20))
    engine.local_grid.tamper["c", "hello"] = edit_body(lambda body: body.update(failed="[/red] [link=x]broken"))
    run_time_steps(engine, 1, server / "state")
    assert "[/red] [link=x]broken" in " ".join(run_and_get_output("deploy", "status", str(tmp_path)).split())


def test_federations_of_one_name_are_distinguished(tmp_path: Path) -> None:
    run_time_steps(make_federation(make_swapping_stream(n=20)), 1, tmp_path / "here")
    run_time_steps(make_federation(select_clients(make_swapping_stream(n=20), 2)), 1, tmp_path / "there")
    records = read_all(tmp_path)
    assert len(records) == 2 == len(summarise(records)) and len(collect_page_data(records, "two")["streams"]) == 2


@pytest.mark.parametrize("record", ["whole", "lost"])
def test_a_federation_whose_checkpoints_are_all_damaged_stops_and_asks(tmp_path: Path, record: str) -> None:
    """Also where its record is lost, which told before that there had been time steps."""
    run_time_steps(make_federation(make_swapping_stream(n=20), root=tmp_path / "clients"), 2, tmp_path / "state")
    files = list((tmp_path / "state" / "checkpoints").iterdir())
    for path in files:
        path.write_bytes(path.read_bytes()[:-1])
    if record == "lost":
        (tmp_path / "state" / "test.jsonl").unlink()
    with pytest.raises(
        DataError, match="none of the checkpoints in .* is intact .*restore one from a backup .* or move this folder"
    ):
        run_time_steps(make_federation(make_swapping_stream(n=20), root=tmp_path / "clients"), 3, tmp_path / "state")
    assert len(files) == 2 and sorted((tmp_path / "state" / "checkpoints").iterdir()) == sorted(files)
    assert [notice.event for notice in read_audit_log(tmp_path)] == ["damaged"] * 2


def test_a_record_is_locked_by_its_writer(tmp_path: Path) -> None:
    """A torn line is cut off; a federation without its checkpoints does not start over; a lost record is replaced."""
    server, state = make_server_folder(tmp_path), tmp_path / "server" / "state"
    engine = make_federation(make_swapping_stream(), LEARN, root=tmp_path / "clients")
    engine.n_steps = 2
    list(federate(engine, FEDDRIFT, state))
    path = state / "test.jsonl"
    with open(path, "ab") as file:
        file.truncate(path.stat().st_size - 7)
    again = make_federation(make_swapping_stream(), LEARN, root=tmp_path / "clients")
    again.n_steps = 3
    assert [step.tau for step in federate(again, FEDDRIFT, state)] == [1, 2]
    assert read(path).rows.steps == 3 and read(path).status == "complete"

    (state / "checkpoints").rename(tmp_path / "away")
    fresh = make_federation(make_swapping_stream(), LEARN)
    with pytest.raises(DataError, match="has time steps, but none of the checkpoints"):
        next(iter(federate(fresh, FEDDRIFT, state)))
    (tmp_path / "away").rename(state / "checkpoints")

    path.rename(tmp_path / "lost.jsonl")
    old = {"model": 0, "drift": False, "accuracy": 0.5, "tested": 60, "sent": 4.0, "here": True, "trouble": None}
    history = {"t": 0, "at": "then", "models": [0], "clients": dict.fromkeys("abc", old), "events": []}
    (state / "history.jsonl").write_text(json.dumps(history) + '\n{"t": 1, "mod')
    again = make_federation(make_swapping_stream(), LEARN, root=tmp_path / "clients")
    again.n_steps = 4
    assert [step.tau for step in federate(again, FEDDRIFT, state)] == [2, 3]
    record, lost = read(path), read(tmp_path / "lost.jsonl")
    assert record.rows.steps == 4 and not (state / "history.jsonl").exists()
    assert record.rows.accuracy[0].tolist() == [0.5] * 3  # as the file of version 0.1 has it
    np.testing.assert_array_equal(record.rows.model[:3], lost.rows.model)
    np.testing.assert_array_equal(record.rows.received[:3], lost.rows.received)
    found = read_status(server)
    assert found is not None and found.state == "finished"


def test_a_stopped_federation_logs_it_and_can_be_exported(tmp_path: Path) -> None:
    server, exported = make_server_folder(tmp_path), tmp_path / "models"
    assert "no time step" in run_and_get_output("deploy", "status", str(tmp_path))
    engine = make_federation(make_swapping_stream(), LEARN)
    with pytest.raises(DataError, match="no trained models yet"):
        export_federation(server, exported)

    def see(t: int) -> None:
        if t == 4:
            if not exported.exists():
                run_and_get_output("export", str(tmp_path), "--out", str(exported))
            engine.local_grid.offline |= {"a", "b", "c"}

    observe_data_requests(engine, see)
    with pytest.raises(QuorumError):
        list(federate(engine, FEDDRIFT, server / "state"))
    models = fd.load_models(exported)
    x = np.random.default_rng(1).random((200, 2)).astype(np.float32)
    assert models.about["time_steps"] == 4
    assert (models.predict("a", x) == (x[:, 0] > 0.5)).mean() > 0.9
    assert (models.predict("c", x) == (x[:, 0] <= 0.5)).mean() > 0.8
    assert models.about["lineage"][0]["cause"]["clients"] == ["c"]
    assert "stopped, `feddrift deploy run` continues it" in run_and_get_output("deploy", "status", str(tmp_path))


def test_the_method_of_new_federations_is_logged_shown_and_exported(tmp_path: Path) -> None:
    """Its private models stay with the clients: what is exported are the shared ones."""
    server, exported = make_server_folder(tmp_path), tmp_path / "models"
    settings = server / "federation.toml"
    settings.write_text(settings.read_text() + 'algorithm = "FedDrift-Auto"\n')
    engine = make_federation(make_swapping_stream(), LEARN)
    engine.n_steps = 4
    list(federate(engine, fd.algorithm("FedDrift-Auto"), server / "state", {"algorithm": "FedDrift-Auto"}))
    assert "FedDrift-Auto" in run_and_get_output("deploy", "status", str(tmp_path))
    (group,) = collect_page_data(read_all(tmp_path), "fed")["streams"][0]["groups"]
    assert group["algorithm"] == "FedDrift-Auto" and fd.report(tmp_path, tmp_path / "page.html").exists()
    assert export_federation(server, exported) == 4
    models = fd.load_models(exported)
    x = np.random.default_rng(1).random((200, 2)).astype(np.float32)
    assert not models.models.private.any() and np.allclose(models.predict_proba("a", x).sum(axis=1), 1)
    assert (models.predict("a", x) == (x[:, 0] > 0.5)).mean() > 0.9
    assert (models.predict("c", x) == (x[:, 0] <= 0.5)).mean() > 0.8
    choice = models.choose(x)
    assert choice.models[0] in models.models.ids and choice.reason.endswith(" of 3")


def test_no_client_can_spoil_the_record(tmp_path: Path) -> None:
    """Texts that are no text, and a loss beyond all bounds: the server goes on, and says what it can."""
    engine = make_federation(make_swapping_stream(), LEARN)
    engine.n_steps = 3
    engine.local_grid.tamper["b", "hello"] = edit_body(lambda body: body.update(cells=[["\ud800\n\x1b", 1]]))
    engine.local_grid.tamper["c", "evaluate"] = edit_body(lambda body: body.update(new=[1e300] * len(body["new"])))
    algorithm = fd.algorithm("FedDrift", delta=0.2, metric="loss")
    assert [step.tau for step in federate(engine, algorithm, tmp_path)] == [0, 1, 2]
    record = read(tmp_path / "test.jsonl")
    assert np.isnan(record.rows.loss[:, 2]).all() and not np.isnan(record.rows.loss[:, 0]).any()
    refused = [why for _, _, c, _, _, why in find_missing_replies(record) if c == 1]
    assert len(refused) == 4 and all(why.endswith(r"got \ud800\n\x1b") for why in refused)
    page.write_page([record], tmp_path / "page.html", "fed")


def test_a_client_that_missed_one_hello_and_answered_the_next_counts_as_present(tmp_path: Path) -> None:
    """b is not there when time 1 is asked for at first; c misses a round of training."""
    engine = make_federation(
        make_swapping_stream(), LEARN, waiting=replace(SHORT_WAITING, start="data", grace=60, patience=60)
    )
    missed: list[str] = []

    def late(message: Any) -> None:
        missed.append("b")
        del engine.local_grid.faults["b", "hello"]

    engine.n_steps = 2
    observe_data_requests(
        engine, lambda t: None if t != 1 or missed else engine.local_grid.faults.update({("b", "hello"): late})
    )
    engine.local_grid.faults["c", "train"] = lambda message: None
    list(federate(engine, FEDDRIFT, tmp_path))
    record = read(tmp_path / "test.jsonl")
    assert missed and {(t, c) for _, t, c, *_ in find_missing_replies(record)} == {(0, 2), (1, 1), (1, 2)}
    assert [find_absent_clients(record, t) for t in range(2)] == [[2], [2]]
    assert [format_trained_step(record, t).rpartition("sat out: ")[2] for t in range(2)] == ["c", "c"]
