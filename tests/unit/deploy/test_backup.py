"""Backups of a running deployment, restored in another place; log files of limited size."""

from __future__ import annotations

import io
import json
import logging
import shutil
import sqlite3
import sys
import tarfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

from feddrift._internal.checkpoint import Checkpoint, Folder
from feddrift.deploy.monitor import logs
from feddrift.deploy.monitor.alerts import find_stop_notices
from feddrift.deploy.monitor.status import read_status
from feddrift.deploy.operate import backup as module
from feddrift.deploy.operate import scaffold
from feddrift.deploy.operate.backup import MANIFEST, restore_backup, write_backup
from feddrift.deploy.operate.check import find_problems
from feddrift.deploy.operate.rollback import roll_back
from feddrift.deploy.server.archive import Archive
from feddrift.deploy.server.loop import federate
from feddrift.engines.flower.client.serve import current
from feddrift.engines.flower.model_parts import init_template
from feddrift.engines.flower.server.exchange import QuorumError
from feddrift.errors import ConfigError, DataError
from feddrift.nets import default_net
from feddrift.runs.record import read
from tests.support.cli import run_and_get_output
from tests.support.federation import (
    FEDDRIFT,
    LEARN,
    assert_identical,
    assert_same_record,
    make_federation,
    make_server_folder,
    make_swapping_stream,
    observe_data_requests,
)
from tests.support.kills import Killed


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A deployment as `feddrift deploy init` writes it, with a database of Flower's that is being written."""
    folder = tmp_path / "old place" / "fed"
    scaffold.create_deployment(folder, ["a", "b"], [2], ["0", "1"])
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_federation_continues_from_a_backup_taken_while_it_ran(tmp_path: Path) -> None:
    """Inside time 3, at every question of it; its clients have gone on since, and it comes out the same."""
    server, stream, taken = make_server_folder(tmp_path), make_swapping_stream(), list[Path]()
    engine = make_federation(stream, LEARN, root=tmp_path / "clients")
    engine.n_steps = 4
    asked = engine.send_requests

    def ask(tau: int, *args: Any, **kwargs: Any) -> Any:
        if tau == 2:
            taken.append(tmp_path / f"{len(taken)}.tar")
            run_and_get_output("deploy", "backup", str(tmp_path), str(taken[-1]))
        return asked(tau, *args, **kwargs)

    engine.send_requests = ask  # type: ignore[method-assign]
    list(federate(engine, FEDDRIFT, server / "state"))

    def end(folder: Path) -> Any:
        newest = next(iter(Folder(folder / "state" / "checkpoints").newest_first()))
        assert isinstance(newest, Checkpoint)
        return newest.decode(init_template(default_net(stream)))[0].models.params

    expected = read(server / "state" / "test.jsonl")
    assert len(taken) == 5  # hello, evaluate, two rounds, explain
    for k, file in enumerate(taken):
        again = tmp_path / f"again{k}"
        assert "is the server's folder as it was at" in run_and_get_output("deploy", "restore", str(file), str(again))
        other = make_federation(stream, LEARN, root=tmp_path / "clients")
        other.n_steps = 4
        list(federate(other, FEDDRIFT, again / "state"))
        assert_same_record(read(again / "state" / "test.jsonl"), expected)
        assert_identical(end(again), end(server))
        assert Archive(again / "state").list_times() == [1, 2, 3, 4]
        assert not (again / "state" / "restored").exists()
        found = read_status(again)
        assert found is not None and found.state == "finished"


def test_a_restored_folder_names_its_new_place(made: Path, tmp_path: Path) -> None:
    server, file, new = made / "server", tmp_path / "b.tar", tmp_path / "new place"
    database = server / "state" / "superlink.db"
    with closing(sqlite3.connect(database)) as writing:
        writing.execute("PRAGMA journal_mode=WAL")
        writing.execute(
            "CREATE TABLE task (finished_at TEXT, sub_status TEXT, details TEXT, active_until TEXT, token TEXT)"
        )
        past = ("2026-01-01 00:00:00+00:00", "completed", "", None, None)
        writing.executemany("INSERT INTO task VALUES (?, ?, ?, ?, ?)", [past, (None, "", "", "2027-01-01", "secret")])
        writing.commit()  # in the journal only
        (server / "state" / "nginx.pid").write_text("17")
        (server / "cache").mkdir()
        (server / "cache" / "compiled").write_text("x")
        unit = server / "feddrift-server.service"
        unit.write_text(unit.read_text().replace(sys.executable, "/other/python"))
        n = write_backup(server, file)
    assert file.stat().st_mode & 0o777 == 0o600 and not list(tmp_path.glob("*.part"))
    new.mkdir()  # an empty one will do
    kind, when = restore_backup(file, new)
    assert kind == "server" and when.startswith("20")
    before, after = contents(server), contents(new)
    assert after.pop("state/restored") == after.pop("state/unconfirmed_keys") == b""
    left_out = {
        "state/nginx.pid",
        "cache/compiled",
        *(name for name in before if name.startswith("state/superlink.db-")),
    }
    assert before.keys() - after.keys() == left_out and len(after) == n
    rewritten = {"nginx.conf", "flwr/config.toml", "feddrift-server.service", "feddrift-run.service"}
    assert {name for name in after if after[name] != before[name]} == rewritten | {"state/superlink.db"}
    for name in rewritten:
        assert str(server).encode() not in after[name] and str(new).encode() in after[name]
    assert f"ExecStart={sys.executable} -m feddrift deploy server {new}".encode() in after["feddrift-server.service"]
    with closing(sqlite3.connect(new / "state" / "superlink.db")) as opened:
        ended = opened.execute("SELECT * FROM task ORDER BY finished_at").fetchall()
    assert ended[0] == past and ended[1][0] > past[0] and ended[1][1:] == ("stopped", "restored", None, None)
    for name in ("ca.key", "server.key", "federation.toml"):
        assert (new / name).stat().st_mode == (server / name).stat().st_mode
        assert (new / name).stat().st_mtime == pytest.approx((server / name).stat().st_mtime, abs=1e-3)
    assert {path.stat().st_mode & 0o777 for path in (new, new / "keys", new / "state")} == {0o700}
    (problem,) = [problem for problem in find_problems(new) if "nginx" not in problem]
    assert problem.startswith(f"{new} was restored from a backup, which may bring back keys")


def test_a_rollback_that_is_under_way_survives_a_restore(tmp_path: Path) -> None:
    """The time step that begins anew starts from the old models, and the archive keeps the ones that were given up."""
    server, stream = make_server_folder(tmp_path), make_swapping_stream(n_steps=6)
    first = make_federation(stream, LEARN, root=tmp_path / "clients")
    first.n_steps = 3
    list(federate(first, FEDDRIFT, server / "state"))
    roll_back(server, 1)
    given_up = Archive(server / "state").read_checkpoint(3).about
    engine = make_federation(stream, LEARN, root=tmp_path / "clients")
    asked = engine.send_requests

    def ask(tau: int, *args: Any, **kwargs: Any) -> Any:
        if list((server / "state" / "checkpoints").glob("000003-000001.ckpt")):
            raise Killed
        return asked(tau, *args, **kwargs)

    engine.send_requests = ask  # type: ignore[method-assign]
    with pytest.raises(Killed):
        list(federate(engine, FEDDRIFT, server / "state"))
    run_and_get_output("deploy", "backup", str(tmp_path), str(tmp_path / "b.tar"))
    for folder in (server, tmp_path / "new"):
        if folder != server:
            restore_backup(tmp_path / "b.tar", folder)
        other = make_federation(stream, LEARN, root=tmp_path / "clients")
        other.n_steps = 5
        list(federate(other, FEDDRIFT, folder / "state"))
    expected, found = (read(folder / "state" / "test.jsonl") for folder in (server, tmp_path / "new"))
    assert_same_record(found, expected)
    assert [event["t"] for event in found.events if event["event"] == "decided"] == [3]
    assert Archive(tmp_path / "new" / "state").read_checkpoint(3).about == given_up


def test_flowers_tables_are_as_we_know_them() -> None:
    from flwr.supercore.state.schema.corestate_models import Task

    known = {"finished_at", "sub_status", "details", "active_until", "token"}
    assert Task.__tablename__ == "task" and known <= set(Task.__table__.columns.keys())


def test_a_database_of_another_flower_is_made_again(
    made: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(sqlite3.connect(made / "server" / "state" / "superlink.db")) as opened:
        opened.execute("CREATE TABLE other (x INTEGER)")
    write_backup(made / "server", tmp_path / "b.tar")
    with caplog.at_level(logging.WARNING, "feddrift"):
        restore_backup(tmp_path / "b.tar", tmp_path / "new")
    assert not (tmp_path / "new" / "state" / "superlink.db").exists() and "no such table: task" in caplog.text


def test_a_clients_folder_is_carried_to_another_machine(tmp_path: Path, made: Path) -> None:
    """Its key, its data and the model it uses."""
    stream, client = make_swapping_stream(), made / "clients" / "a"
    engine = make_federation(stream, LEARN, root=client / "store")
    engine.n_steps = 2
    list(federate(engine, FEDDRIFT, tmp_path / "state"))
    (client / "data" / "link.csv").symlink_to(client / "key")
    run_and_get_output("deploy", "backup", str(client), str(tmp_path / "a.tar"))
    run_and_get_output("deploy", "restore", str(tmp_path / "a.tar"), str(tmp_path / "moved"))
    before, after = contents(client), contents(tmp_path / "moved")
    assert before.keys() - after.keys() == {"data/link.csv"} and after.keys() - before.keys() == {"restored"}
    assert {name for name in before.keys() & after if after[name] != before[name]} == {"feddrift-client.service"}
    assert (tmp_path / "moved" / "key").stat().st_mode & 0o777 == 0o600
    x = np.random.default_rng(1).random((50, 2)).astype(np.float32)
    np.testing.assert_array_equal(current(tmp_path / "moved").predict(x), current(client).predict(x))


def test_files_that_cannot_be_backed_up_are_reported(made: Path, tmp_path: Path) -> None:
    (tmp_path / "there.tar").write_text("x")
    for folder, file, sentence in (
        (made / "server", tmp_path / "there.tar", "there.tar exists already"),
        (made / "server", made / "server" / "b.tar", "must be outside of the folder"),
        (tmp_path, tmp_path / "b.tar", "neither a server's nor a client's folder: it has no federation.toml and no"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            write_backup(folder, file)
    with pytest.raises(DataError, match="cannot write .*nowhere/b.tar: No such file"):
        write_backup(made / "server", tmp_path / "nowhere" / "b.tar")
    assert (tmp_path / "there.tar").read_text() == "x" and not (made / "server" / "b.tar").exists()


def test_a_folder_that_changes_is_copied_again(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that goes while it is copied: its successor is in the backup; a record may grow meanwhile."""
    server, waits = made / "server", list[float]()
    old, new = (server / "state" / "checkpoints" / name for name in ("000001-000000.ckpt", "000002-000000.ckpt"))
    old.parent.mkdir()
    old.write_text("old")
    record = server / "state" / "first.jsonl.part"
    record.write_text("begins\n")
    monkeypatch.setattr("time.sleep", waits.append)
    real = module._HashingReader.read

    def read_and_change(self: Any, size: int) -> bytes:
        if old.exists():
            old.unlink()
            new.write_text("new")
        with open(record, "a") as file:
            file.write("and goes on\n")
        return real(self, size)

    with monkeypatch.context() as patch:
        patch.setattr(module._HashingReader, "read", read_and_change)
        write_backup(server, tmp_path / "b.tar")
    restore_backup(tmp_path / "b.tar", tmp_path / "new")
    kept = contents(tmp_path / "new")
    assert len(waits) == 1 and kept["state/checkpoints/000002-000000.ckpt"] == b"new"
    assert "state/checkpoints/000001-000000.ckpt" not in kept
    assert record.read_bytes().startswith(kept["state/first.jsonl.part"]) and record.stat().st_size > 100
    stamps = iter(range(10**6))
    monkeypatch.setattr(module, "_read_file_stamps", lambda _: next(stamps))
    with pytest.raises(DataError, match="keeps changing: try again, or stop its server or client"):
        write_backup(server, tmp_path / "c.tar")
    assert not list(tmp_path.glob("c.tar*"))


def tar_of(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for info, data in members:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def member(name: str, data: bytes = b"x", **about: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    for key, value in about.items():
        setattr(info, key, value)
    return info, data


def manifest(**changes: Any) -> tuple[tarfile.TarInfo, bytes]:
    about = {"feddrift": "backup", "format": 1, "kind": "server", "folder": "/x", "made": "now", "sha256": {}} | changes
    return member(MANIFEST, json.dumps(about).encode())


@pytest.mark.parametrize(
    ("make_file", "sentence"),
    [
        (lambda path: path.write_bytes(b"no tar at all") and path, "is not a backup, or is damaged"),
        (lambda path: tar_of(path, member("readme")), f"it has no {MANIFEST}"),
        (lambda path: tar_of(path, member(MANIFEST, b"{")), f"its {MANIFEST} does not describe one"),
        (lambda path: tar_of(path, member(MANIFEST, b'["a"]')), f"its {MANIFEST} does not describe one"),
        (lambda path: tar_of(path, manifest(kind="other")), f"its {MANIFEST} does not describe one"),
        (lambda path: tar_of(path, manifest(format=2)), "is a backup of format 2, this feddrift reads 1"),
        (lambda path: tar_of(path, member("../evil"), manifest()), "it has '../evil', but a backup has plain"),
        (lambda path: tar_of(path, member("a/../../evil"), manifest()), "plain files of its folder only, each once"),
        (lambda path: tar_of(path, member("/etc/evil"), manifest()), "it has '/etc/evil', but a backup has plain"),
        (lambda path: tar_of(path, member("a"), member("a"), manifest()), "it has 'a', but a backup has plain files"),
        (
            lambda path: tar_of(path, member("l", b"", type=tarfile.SYMTYPE, linkname="/x"), member("l/x"), manifest()),
            "it has 'l', but a backup has plain files of its folder",
        ),
        (lambda path: tar_of(path, member("h", b"", type=tarfile.LNKTYPE, linkname="key"), manifest()), "it has 'h'"),
        (lambda path: tar_of(path, member("s", type=tarfile.GNUTYPE_SPARSE), manifest()), "it has 's'"),
        (lambda path: tar_of(path, member("d", b"", type=tarfile.DIRTYPE), manifest()), "it has 'd'"),
        (lambda path: tar_of(path, member("a"), member("a/b"), manifest()), "cannot restore .*b.tar into"),
        (lambda path: tar_of(path, member("a", mtime=2.0**70), manifest()), "is not a backup, or is damaged"),
        (lambda path: tar_of(path, member("more"), manifest()), "is damaged: more does not match its checksum"),
        (lambda path: tar_of(path, manifest(sha256={"less": "0"})), "is damaged: less does not match its checksum"),
    ],
)  # fmt: skip
def test_foreign_files_are_refused(make_file: Callable[[Path], Path], sentence: str, tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    file = make_file(inside / "b.tar")
    with pytest.raises(DataError, match=sentence):
        restore_backup(file, inside / "new")
    assert sorted(path.name for path in inside.iterdir()) == ["b.tar"] and not (tmp_path / "evil").exists()


def test_a_damaged_backup_is_refused_wherever_the_damage_is(made: Path, tmp_path: Path) -> None:
    file = tmp_path / "b.tar"
    write_backup(made / "server", file)
    whole = file.read_bytes()
    with tarfile.open(file) as tar:
        places = [info.offset_data + info.size // 2 for info in tar if info.size > 2]
    assert len(places) > 10
    for place in places[:-1]:
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(DataError, match="is damaged: .* does not match its checksum"):
            restore_backup(file, tmp_path / "new")
    for length in range(0, places[-1], max(1, len(whole) // 40)):
        file.write_bytes(whole[:length])
        with pytest.raises(DataError, match="not a backup"):
            restore_backup(file, tmp_path / "new")
    assert not (tmp_path / "new").exists() and not list(tmp_path.glob("*.part"))
    file.write_bytes(whole)
    restore_backup(file, tmp_path / "whole")
    refused = 0
    for place in range(0, len(whole), 397):  # headers, too; where nothing stands, nothing is damaged
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 64]) + whole[place + 1 :])
        try:
            restore_backup(file, tmp_path / "new")
            assert contents(tmp_path / "new").keys() == contents(tmp_path / "whole").keys()
            shutil.rmtree(tmp_path / "new")
        except DataError:
            refused += 1
    assert refused > 30
    file.write_bytes(whole)
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "mine").write_text("x")
    with pytest.raises(ConfigError, match="new is not empty: name a new or empty folder"):
        restore_backup(file, tmp_path / "new")
    with pytest.raises(DataError, match="cannot restore .*: No such file"):
        restore_backup(tmp_path / "gone.tar", tmp_path / "other")
    assert contents(tmp_path / "new") == {"mine": b"x"} and not (tmp_path / "other").exists()


def test_the_servers_log_is_bounded_and_ends_with_the_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "MAX_LOG_BYTES", 500)
    server = make_server_folder(tmp_path)
    path, logger = server / "state" / "server.log", logging.Logger("test")
    assert logs.read_last_line(path) == f"{path} has no lines"
    logger.addHandler(handler := logs.create_log_handler(path))
    for k in range(100):
        logger.warning("line %d \ud800", k)
        assert logs.read_last_line(path).endswith(f"WARNING line {k} \\ud800")
        assert path.stat().st_size <= 500
    handler.close()
    assert sorted(file.name for file in path.parent.glob("server.log*")) == [
        "server.log", *(f"server.log.{k}" for k in range(1, logs.MAX_OLD_LOGS + 1)),
    ]  # fmt: skip
    engine = make_federation(make_swapping_stream(n=20))
    observe_data_requests(engine, lambda t: engine.local_grid.offline.update("abc") if t == 1 else None)
    with pytest.raises(QuorumError):
        list(federate(engine, FEDDRIFT, server / "state"))
    found = read_status(server)
    assert found is not None and next(n.text for n in find_stop_notices(found, server)).endswith("line 99 \\ud800")


def test_a_log_that_another_process_writes_is_emptied_when_it_is_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "MAX_LOG_BYTES", 10)
    path = tmp_path / "nginx.log"
    logs.rotate_if_large(path)  # there is none yet
    with open(path, "ab", buffering=0) as log:
        for k in range(logs.MAX_OLD_LOGS + 3):
            log.write(b"%011d" % k)
            logs.rotate_if_large(path)
            assert path.read_bytes() == b"" and (tmp_path / "nginx.log.1").read_bytes() == b"%011d" % k
        log.write(b"0123456789")
        logs.rotate_if_large(path)
    assert path.read_bytes() == b"0123456789"  # it is not longer than it may be
    older = [(tmp_path / f"nginx.log.{k}").read_bytes() for k in range(1, logs.MAX_OLD_LOGS + 1)]
    assert older == [b"%011d" % (logs.MAX_OLD_LOGS + 2 - k) for k in range(logs.MAX_OLD_LOGS)]
    assert not (tmp_path / f"nginx.log.{logs.MAX_OLD_LOGS + 1}").exists()
    path.write_bytes(b"x" * 11)
    with logs.rotate_in_background(path):
        pass
    assert path.read_bytes() == b"" and shutil.disk_usage(tmp_path)
