"""Batches of a client with its own rhythm: order, backlog, missing and ignored files."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

from feddrift._internal import checkpoint
from feddrift.deploy.server.loop import federate
from feddrift.engines.flower.client.batches import StepFiles
from feddrift.engines.flower.client.client import Client, load_client
from feddrift.engines.flower.client.policy import PERMISSIVE
from feddrift.engines.flower.client.store import Store
from feddrift.runs.record import read
from tests.support.cli import run_and_get_output
from tests.support.federation import (
    FEDDRIFT,
    LEARN,
    assert_identical,
    edit_body,
    get_reply,
    make_federation,
    make_request,
    make_server_folder,
    make_swapping_stream,
)
from tests.support.flower import SHORT_WAITING, InProcessFlower, make_batch_loader


def hello(client: Client, tau: int) -> dict[str, Any]:
    return get_reply(client, "hello", make_request(make_federation(make_swapping_stream()), "hello", {}, tau=tau))


def write(folder: Path, n: int, rows: int, x: float = 1.0) -> None:
    """A batch of so many rows, whose first feature is x."""
    folder.mkdir(exist_ok=True)
    (folder / "classes.txt").write_text("no\nyes\n")
    (folder / f"step_{n}.csv").write_text("x,y,label\n" + f"{x},2,yes\n" * rows)


def in_folder(root: Path) -> Client:
    (root / "client.toml").write_text('name = "a"\n[policy]\nmin_rows = 1\nmin_batch = 1\nmin_steps = 1\n')
    return load_client(root)


def every_second(engine: InProcessFlower, name: str, c: int) -> None:
    """Let this client get a batch at times 0, 2, 4, ...; the time is that of the first client, which never lags."""
    clients, now = engine.local_grid.clients, [0]
    first, batches = clients["a"].load, make_batch_loader(make_swapping_stream(n_steps=8), c)

    def on_time(n: int) -> Any:
        now[0] = max(now[0], n)
        return first(n)

    clients["a"].load = on_time
    clients[name].load = lambda n: batches(n) if 2 * n <= now[0] else None


def test_a_client_with_every_second_step_is_tested_scored_and_raises_its_alarm(tmp_path: Path) -> None:
    """The labels of c swap at its batch 2, which comes at time 4; by file numbers it was late from time 1 on."""
    engine = make_federation(make_swapping_stream(n_steps=8), LEARN)
    engine.n_steps = 8
    every_second(engine, "c", 2)
    steps = list(federate(engine, FEDDRIFT, tmp_path))
    record = read(tmp_path / "test.jsonl")
    assert record.rows.received[:, 2].tolist() == [60, 0] * 4 and (record.rows.received[:, :2] == 60).all()
    assert record.rows.tested[:, 2].tolist() == [0, 60] * 4
    assert np.argwhere(record.rows.drift).tolist() == [[4, 2]]
    assert steps[-1].model[0] == steps[-1].model[1] != steps[-1].model[2] and steps[-1].accuracy[2] > 0.8
    trained = np.asarray(steps[-1].state.w)[:, 2].argmax(axis=1)
    assert set(trained[[4, 6]]).isdisjoint(trained[[0, 2]])  # no row of the new labels trains the others' model


def test_status_shows_backlog_silence_and_gap(tmp_path: Path) -> None:
    """b gets nothing after its batch 0, c was out of reach at first, of a the batch 3 is missing."""
    server, stream = make_server_folder(tmp_path), make_swapping_stream(n_steps=5)
    engine = make_federation(stream, LEARN)
    engine.n_steps = 4
    a, b = (engine.local_grid.clients[name] for name in "ab")
    a.load = lambda n: stream.cell(n, 0) if n != 3 else None
    b.load = lambda n: stream.cell(0, 1) if n == 0 else None
    engine.local_grid.offline.add("c")
    for step in federate(engine, FEDDRIFT, server / "state"):
        if step.tau == 1:
            engine.local_grid.offline.clear()
    clients = json.loads(run_and_get_output("deploy", "status", str(tmp_path), "--json"))["clients"]
    found = [(now["quiet"], now["backlog"], now["gap"]) for now in clients.values()]
    assert found == [(1, 1, 3), (3, 0, None), (0, 3, None)]
    told = " ".join(run_and_get_output("deploy", "status", str(tmp_path)).split())
    assert "none for 1 time step: batch 3 is missing, 1 batch waits for it" in told
    assert "none for 3 time steps" in told and "3 batches wait" in told
    lines = [json.loads(line) for line in (server / "state" / "test.jsonl").read_text().splitlines()]
    assert ["backlog" in line for line in lines if line.get("asked") == "hello"][:2] == [False, False]


def test_each_time_step_uses_the_oldest_batch_and_reports_the_backlog(tmp_path: Path) -> None:
    for n in range(4):
        write(tmp_path / "data", n, rows=n + 1)
    client = in_folder(tmp_path)
    told = hello(client, tau=2)
    assert told["cells"] == [[2, 1]] and (told["backlog"], told["gap"]) == (3, None)
    assert hello(client, tau=2) == told  # a time step has one batch
    assert hello(client, tau=5)["cells"] == [[2, 1], [5, 2]]
    assert hello(client, tau=6)["cells"] == [[2, 1], [5, 2], [6, 3]]
    last = hello(client, tau=7)
    assert last["cells"][-1] == [7, 4] and "backlog" not in last


def test_a_gap_waits_and_a_batch_without_rows_fills_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "data", 0, rows=2)
    write(tmp_path / "data", 2, rows=3)
    client = in_folder(tmp_path)
    hello(client, tau=0)
    told = hello(client, tau=1)
    assert told["cells"] == [[0, 2]] and (told["backlog"], told["gap"]) == (1, 1)
    assert "client a: its batch 1 is missing, and 2 wait for it" in caplog.text
    write(tmp_path / "data", 1, rows=0)
    told = hello(client, tau=1)
    assert told["cells"] == [[0, 2]] and (told["backlog"], told["gap"]) == (1, None)  # it has had its time step
    assert hello(client, tau=2)["cells"] == [[0, 2], [2, 3]]


def test_a_function_may_return_nothing(tmp_path: Path) -> None:
    client = Client(
        "a",
        tmp_path,
        lambda n: ([], []) if n == 0 else (np.ones((n, 2)), [0] * n) if n < 3 else None,
        policy=PERMISSIVE,
    )
    told = [hello(client, tau) for tau in range(3)]
    assert [now["cells"] for now in told] == [[], [[1, 1]], [[1, 1], [2, 2]]]


def test_a_batch_that_fails_does_not_keep_back_the_one_before(tmp_path: Path) -> None:
    client = Client("a", tmp_path, lambda n: (np.ones((4, 2)), [0] * 4) if n == 0 else [][n], policy=PERMISSIVE)
    assert hello(client, tau=3)["cells"] == [[3, 4]]
    assert "IndexError" in hello(client, tau=4)["failed"]


def test_a_store_of_an_older_version_continues_its_numbering(tmp_path: Path) -> None:
    """A cell of time t was file t; this client had become late: three files by time 6."""
    cells = tmp_path / "test" / "a" / "cells"
    for t in range(3):
        cell = {"x": np.full((4, 2), t, dtype=np.float32), "y": np.zeros(4, dtype=np.int32)}
        checkpoint.write(cells / f"{t:06d}-4.cell", {}, cell)
    client = Client("a", tmp_path, lambda n: (np.full((5, 2), n), [0] * 5) if n < 4 else None, policy=PERMISSIVE)
    assert hello(client, tau=7)["cells"] == [[0, 4], [1, 4], [2, 4], [7, 5]]
    store = client.open_store("test")
    assert store.read_batch(7)[0].tolist() == [[3, 3]] * 5 and store.read_batch(1)[0].tolist() == [[1, 1]] * 4


def test_whose_batches_come_with_the_time_keeps_the_files_of_before(tmp_path: Path) -> None:
    client = Client("a", tmp_path, make_batch_loader(make_swapping_stream(), 0), policy=PERMISSIVE)
    for tau in range(3):
        hello(client, tau)
    names = sorted(path.name for path in (tmp_path / "test" / "a" / "cells").iterdir())
    assert names == ["000000-60.cell", "000001-60.cell", "000002-60.cell"]


def test_forgotten_data_do_not_come_back(tmp_path: Path) -> None:
    """Batches of 30 rows, of which 70 are kept; the last two are empty, and the newest rows stay."""

    def load(n: int) -> Any:
        return (np.ones((30, 2)), [0] * 30) if n < 3 else ([], []) if n < 5 else None

    client = Client("a", tmp_path, load, max_rows=20, policy=PERMISSIVE)
    told = [hello(client, tau)["cells"] for tau in range(3, 9)]
    assert told[2:] == [[[5, 30]]] * 4 and client.open_store("test").get_next_batch_number() == 5


def test_a_file_that_was_written_again_is_ignored_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "data", 0, rows=2)
    client = in_folder(tmp_path)
    hello(client, tau=0)
    write(tmp_path / "data", 0, rows=7, x=9.0)
    for _ in range(2):
        assert hello(client, tau=0)["cells"] == [[0, 2]]
    warnings = [line.getMessage() for line in caplog.records if line.levelno == logging.WARNING]
    assert warnings == ["client a: step_0.csv was changed after it was loaded, which has no effect"]
    (tmp_path / "data" / "step_0.csv").unlink()
    caplog.clear()
    assert hello(client, tau=0)["cells"] == [[0, 2]] and not caplog.records


def test_a_batch_that_the_server_never_received_is_shown_again() -> None:
    """The answer of b at time 1 is lost, and the time step starts without it: its batch is no history at time 2."""
    engine = make_federation(make_swapping_stream())
    engine.at(0)
    engine.local_grid.tamper["b", "hello"] = edit_body(lambda body: "{}")
    assert engine.at(1).counts[:, 1].tolist() == [60, 0]
    engine.local_grid.tamper.clear()
    fed, store = engine.at(2), engine.local_grid.clients["b"].open_store("test")
    assert fed.counts[:, 1].tolist() == [60, 0, 60]
    np.testing.assert_array_equal(store.read_batch(2)[0], make_swapping_stream().cell(1, 1)[0])


def test_a_client_that_returns_inside_a_time_step_shows_new_data_in_the_next() -> None:
    engine = make_federation(make_swapping_stream(), waiting=replace(SHORT_WAITING, quorum=2, patience=5))
    engine.local_grid.offline.add("c")
    fed = engine.at(0)
    engine.local_grid.offline.clear()
    engine.local_grid.faults["b", "train"] = lambda message: None
    fed.train(fed.fresh(), np.ones((1, 3, 1)), rounds=1)  # c completes the quorum
    assert engine.present == {0, 1, 2} and engine.counts[:, 2].tolist() == [0, 0]
    assert engine.at(1).counts[:, 2].tolist() == [0, 60]


def test_names_at_an_alarm_are_those_of_the_batch_that_was_shown(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "classes.txt").write_text("no\nyes\n")
    for n in range(2):
        (tmp_path / "data" / f"step_{n}.csv").write_text("wind,rain,label\n" + f"{5 * n},2,yes\n" * 20)
    client = in_folder(tmp_path)
    hello(client, tau=3)
    hello(client, tau=4)
    told = get_reply(client, "explain", make_request(make_federation(make_swapping_stream()), "explain", {}, tau=4))
    assert told["shifts"]["moved"][0]["name"] == "wind"


def test_only_names_that_are_read_count_as_batches(tmp_path: Path) -> None:
    for name in (
        "step_0.csv",
        "step_01.csv",
        "step_2.npz",
        "step_2.csv",
        "step_x.csv",
        ".step_3.csv",
        "step_4.csv.tmp",
    ):
        (tmp_path / name).touch()
    assert StepFiles(tmp_path).list_numbers() == [0, 2] and Store(tmp_path, "e", "c").get_next_batch_number() == 0


def damage(store: Store, t: int) -> None:
    """One byte of the stored batch of time t is another."""
    path = store.path / "cells" / store.list_batches()[t].file_name
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))


def test_a_damaged_batch_is_taken_in_again_and_nothing_is_missed(caplog: pytest.LogCaptureFixture) -> None:
    engine, whole = make_federation(make_swapping_stream()), make_federation(make_swapping_stream())
    fed, models, w = engine.at(1), whole.at(1).fresh(), np.ones((2, 3, 1))
    damage(engine.local_grid.clients["b"].open_store("test"), 0)
    accounts: list[Any] = []
    engine.on_exchange = accounts.append
    assert_identical(fed.train(models, w).params, whole.at(1).train(models, w).params)
    assert fed.reachable.all() and "batch 0 is loaded again" in caplog.text
    told = [line.get("note") for line in (account.to_record_line() for account in accounts)]
    assert told == [[None, "its batch 0 was damaged in its store, and was loaded again", None], None]


def test_a_damaged_batch_that_was_removed_is_forgotten_and_its_client_continues(tmp_path: Path) -> None:
    write(tmp_path / "data", 0, rows=2)
    write(tmp_path / "data", 1, rows=3)
    client, stream = in_folder(tmp_path), make_swapping_stream()
    engine = make_federation(stream)
    engine.local_grid.clients = {**engine.local_grid.clients, "a": client}
    fed = engine.at(1)
    damage(client.open_store("test"), 0)
    (tmp_path / "data" / "step_0.csv").unlink()
    accounts: list[Any] = []
    engine.on_exchange = accounts.append
    fed.train(fed.fresh(), np.ones((2, 3, 1)), rounds=1)
    assert fed.reachable.tolist() == [False, True, True]  # it has other rows than it said
    (answers,) = (account.clients for account in accounts)
    assert answers[0].note == "its batch 0 was damaged in its store, and is lost: its rows are deleted"
    assert "data that this client does not have" in str(answers[0].trouble)
    write(tmp_path / "data", 2, rows=4)
    fed = engine.at(2)
    assert fed.counts[:, 0].tolist() == [0, 3, 4]
    fed.train(fed.fresh(), np.ones((3, 3, 1)), rounds=1)
    assert fed.reachable.all()


def test_data_that_arrive_while_a_time_step_resumes_wait_for_the_next(tmp_path: Path) -> None:
    """The server is killed inside time 2, before which c got nothing, and after which its batch 1 is there."""
    stream, there = make_swapping_stream(n_steps=5), [1]
    local = replace(LEARN, rounds=2)

    def engine_of() -> InProcessFlower:
        engine = make_federation(stream, local, root=tmp_path / "clients")
        batches = make_batch_loader(stream, 2)
        engine.local_grid.clients["c"].load = lambda n: batches(n) if n < there[0] else None
        engine.n_steps = 4
        return engine

    class Killed(BaseException):
        pass

    engine = engine_of()
    ask = engine.send_requests

    def killed(tau: int, requests: Any, read_reply: Any, round: int | None = None) -> Any:
        if (tau, round) == (2, 1):
            raise Killed
        return ask(tau, requests, read_reply, round)

    engine.send_requests = killed  # type: ignore[method-assign]
    with pytest.raises(Killed):
        list(federate(engine, FEDDRIFT, tmp_path / "server"))
    there[0] = 2
    list(federate(engine_of(), FEDDRIFT, tmp_path / "server"))
    received = read(tmp_path / "server" / "test.jsonl").rows.received[:, 2].tolist()
    assert received == [60, 0, 0, 60]  # it was taken for a batch of time 2 that nobody had scored, and not told
