"""Revocations of keys: their list at the server, the copies of the authority and of clients, and restored backups."""

from __future__ import annotations

import json
import logging
import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

from cryptography import x509

from feddrift.deploy.files import replace_file
from feddrift.deploy.monitor.alerts import read_audit_log
from feddrift.deploy.operate import client_keys, scaffold
from feddrift.deploy.operate.backup import restore_backup, write_backup
from feddrift.deploy.pki import certificates, revocations
from feddrift.deploy.pki.revocations import hash_key, update_revocations
from feddrift.deploy.processes import launcher
from feddrift.deploy.server.revocation_book import ServerRevocations
from feddrift.engines.flower.client.client import load_client
from feddrift.engines.flower.revocations import (
    MAX_SERIAL,
    REVOCATIONS_FILE,
    ClientRevocations,
    MissingRevocationsError,
    Revocation,
    read_revocations,
    write_revocations,
)
from feddrift.engines.flower.serialization import InvalidMessageError
from feddrift.engines.flower.server.connection import KEY_REVOKED
from feddrift.errors import ConfigError, DataError
from tests.support.federation import make_federation, make_swapping_stream, replace_client
from tests.support.flower import InProcessFlower, OldClient
from tests.unit.deploy.test_keys import join_problems, run_deploy_command

NAMES = ("a", "b", "c")


@pytest.fixture
def made(tmp_path: Path) -> Path:
    scaffold.create_deployment(tmp_path / "fed", NAMES, [2], ["no", "yes"], port=18443, inner=18444)
    return tmp_path / "fed"


@pytest.fixture
def server(made: Path) -> Path:
    return made / "server"


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "is_server_running", lambda server: False)


def read_list(folder: Path) -> list[Revocation]:
    return read_revocations(folder / REVOCATIONS_FILE)[0]


def list_keys(server: Path) -> list[str]:
    return sorted(path.stem for path in (server / "keys").glob("*.pub"))


def read_authorities(server: Path) -> list[x509.Certificate]:
    return certificates.read_authorities(server)


def test_revocations_and_rotations_are_numbered_and_signed(made: Path, server: Path) -> None:
    old = {name: hash_key(server / "keys" / f"{name}.pub") for name in NAMES}
    assert not (server / REVOCATIONS_FILE).exists()
    run_deploy_command("revoke", made, "b")
    run_deploy_command("rotate", made, "a")
    first, second = entries = read_list(server)
    assert (first.serial, first.client, first.key) == (1, "b", old["b"])
    assert (second.serial, second.client, second.key) == (2, "a", old["a"])
    assert all(entry.is_signed_by(read_authorities(server)) for entry in entries)
    for change in ({"serial": 3}, {"client": "c"}, {"key": old["c"]}, {"time": "2020-01-01"}):
        assert not replace(first, **change).is_signed_by(read_authorities(server))
    run_deploy_command("rotate", made, "b")  # it had no key: nothing more is revoked
    assert read_list(server) == entries and join_problems(made) == ""
    shown = run_deploy_command("keys", made)
    assert f"client b: key {hash_key(server / 'keys' / 'b.pub')[:16]}, since 20" in shown
    assert f"revocation 1: client b, key {old['b'][:16]}, {first.time[:10]}\n" in shown


def test_the_authoritys_key_is_not_needed_to_revoke(
    made: Path, server: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    safe = tmp_path / "safe" / "ca.key"
    safe.parent.mkdir()
    (server / "ca.key").rename(safe)
    run_deploy_command("revoke", made, "b")
    assert "the authority has not signed the revocation" in caplog.text and list_keys(server) == ["a", "c"]
    assert [entry.signature for entry in read_list(server)] == [""]
    assert "1 revocation is not signed, so clients do not store them" in join_problems(server)
    assert "not signed by the authority" in run_deploy_command("keys", made)
    scaffold.create_deployment(tmp_path / "other", ["x"], [2], ["no", "yes"])
    wrong = tmp_path / "other" / "server" / "ca.key"
    for path, sentence in ((wrong, "is not the key of"), (tmp_path / "none", "is missing, but it signs")):
        run_deploy_command(
            "revoke" if path == wrong else "rotate", made, "c" if path == wrong else "a", "--ca-key", path
        )
        assert sentence in caplog.text
        assert sentence in run_deploy_command("keys", made, "--ca-key", path, code=2)
        assert sentence in run_deploy_command("check", made, "--ca-key", path, code=1)
    assert [entry.client for entry in read_list(server)] == ["b", "c", "a"] and list_keys(server) == ["a"]
    assert "not signed" not in run_deploy_command("keys", made, "--ca-key", safe)
    signed = read_list(server)
    assert [entry.client for entry in signed] == ["b", "c", "a"]
    assert all(entry.is_signed_by(read_authorities(server)) for entry in signed)
    assert read_revocations(safe.parent / "ca-revocations.json")[0] == signed
    assert not (server / "ca.key").exists() and not (server / "ca-revocations.json").exists()


def test_the_copy_of_the_authority_excludes_keys_that_a_backup_brings_back(
    made: Path, server: Path, tmp_path: Path
) -> None:
    safe = tmp_path / "safe" / "ca.key"
    safe.parent.mkdir()
    (server / "ca.key").rename(safe)
    write_backup(server, tmp_path / "b.tar")
    run_deploy_command("revoke", made, "b", "--ca-key", safe)
    run_deploy_command("rotate", made, "c", "--ca-key", safe)
    expected = read_list(server)
    assert join_problems(server) == run_check(server, safe) and "not signed" not in join_problems(server)

    told = run_deploy_command("restore", tmp_path / "b.tar", tmp_path / "plain")
    assert all(f"client {name}: key " in told for name in NAMES) and "keys" in told and "--confirm" in told
    assert list_keys(tmp_path / "plain") == list(NAMES) and read_list(tmp_path / "plain") == []
    told = run_check(tmp_path / "plain", safe)
    assert f"lacks {expected[0]}, which is in" in told and f"lacks {expected[1]}, which is in" in told
    assert "was restored from a backup" in told
    run_deploy_command("keys", tmp_path / "plain", "--ca-key", safe)

    told = run_deploy_command("restore", tmp_path / "b.tar", tmp_path / "compared", "--ca-key", safe)
    assert "client a: key " in told and "client b" not in told.replace("clients/b", "")
    for folder in (tmp_path / "plain", tmp_path / "compared"):
        assert list_keys(folder) == ["a"] and read_list(folder) == expected
        changed = [notice.client for notice in read_audit_log(folder) if "had a revoked key again" in notice.text]
        assert changed == ["b", "c"]
        assert run_check(folder, safe).count("\n") == 2  # b and c have no keys, and the keys are not confirmed
    (safe.parent / "ca-revocations.json").unlink()
    assert f"ca-revocations.json lacks {expected[0]}" in run_check(tmp_path / "plain", safe)


def run_check(folder: Path, ca_key: Path) -> str:
    lines = run_deploy_command("check", folder, "--ca-key", ca_key, code=1).splitlines()
    problems = [line.removeprefix("- ") for line in lines if line.startswith("- ")]
    return "\n".join(problem for problem in problems if "nginx is not installed" not in problem)


def test_a_wrong_key_of_the_authority_restores_nothing(made: Path, tmp_path: Path) -> None:
    write_backup(made / "server", tmp_path / "b.tar")
    write_backup(made / "clients" / "a", tmp_path / "a.tar")
    with pytest.raises(ConfigError, match="is missing, but it signs"):
        restore_backup(tmp_path / "b.tar", tmp_path / "new", tmp_path / "none")
    with pytest.raises(ConfigError, match="--ca-key is an option for the backup of a server, but .*a.tar is that of"):
        restore_backup(tmp_path / "a.tar", tmp_path / "new", made / "server" / "ca.key")
    assert not list(tmp_path.glob("new*"))


def test_a_restored_server_starts_nothing_before_its_keys_are_confirmed(
    made: Path, server: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_backup(server, tmp_path / "b.tar")
    new = tmp_path / "new"
    restore_backup(tmp_path / "b.tar", new)

    class StartedError(Exception):
        """A process would have been started."""

    def start(*_: object) -> None:
        raise StartedError

    registered: list[Path] = []
    monkeypatch.setattr(launcher, "_run_processes", start)
    monkeypatch.setattr(launcher, "register_keys", registered.append)
    monkeypatch.setattr(launcher, "is_server_running", lambda server: True)  # the server of the backup, at its port
    told = run_deploy_command("server", new, "--no-proxy", code=2)
    assert "new was restored from a backup, which may bring back keys" in told and f"{new} --confirm`" in told
    run_deploy_command("revoke", new, "b")
    run_deploy_command("keys", new)  # a list is no confirmation
    with pytest.raises(ConfigError, match="was restored from a backup"):
        launcher.run_server(new, proxy=False)
    assert "the keys are confirmed: the server may start" in run_deploy_command("keys", new, "--confirm")
    assert registered == []
    assert "the keys need no confirmation" in run_deploy_command("keys", new, "--confirm")
    assert registered == [new]
    with pytest.raises(StartedError):
        launcher.run_server(new, proxy=False)
    texts = [notice.text for notice in read_audit_log(new)]
    digests = {name: hash_key(server / "keys" / f"{name}.pub")[:16] for name in NAMES}
    assert texts[-1].endswith(f"were confirmed: a ({digests['a']}), c ({digests['c']})") and list_keys(new) == [
        "a",
        "c",
    ]


def test_folders_of_older_versions_get_a_list(server: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As 0.3.0 left them: revoked keys in keys/revoked, and no list."""
    keys = server / "keys"
    folder = keys / "revoked"
    folder.mkdir()
    digests = []
    for k, (name, stem) in enumerate((("b", "b-{}"), ("a", "a-{}"), ("c", "of whom"))):
        path = folder / f"{stem.format(hash_key(keys / f'{name}.pub')[:16])}.pub"
        path.write_text(client_keys.generate_key_pair(name)[1] if name == "a" else (keys / f"{name}.pub").read_text())
        os.utime(path, (1e9 + k, 1e9 + k))
        digests.append(hash_key(path))
    (folder / "b-0000000000000000.pub").write_text("damaged")
    (keys / "b.pub").unlink()
    assert join_problems(server).startswith("client b has no key") and "\n" not in join_problems(server)
    launcher.exclude_revoked_keys(server)
    entries = read_list(server)
    assert [(entry.serial, entry.client, entry.key) for entry in entries] == [
        (k + 1, name, digest) for k, (name, digest) in enumerate(zip(("b", "a", "unknown"), digests, strict=True))
    ]
    assert entries[0].time == "2001-09-09T01:46:40+00:00" and list_keys(server) == ["a"]  # c's was in the folder, too
    launcher.exclude_revoked_keys(server)
    assert read_list(server) == entries


def test_an_interrupted_revocation_is_completed_at_the_next_start(
    made: Path, server: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run_deploy_command("revoke", made, "c")
    before = (server / REVOCATIONS_FILE).read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("full")))
        with pytest.raises(DataError, match="cannot write"):
            write_revocations(server / REVOCATIONS_FILE, [])
    assert (server / REVOCATIONS_FILE).read_bytes() == before and not list(server.glob("*.part"))
    with monkeypatch.context() as patch:
        patch.setattr(revocations, "write_revocations", lambda *_: (_ for _ in ()).throw(DataError("the disk is full")))
        run_deploy_command("revoke", made, "b")
    assert "the server enters it in revocations.json at its next start: the disk is full" in caplog.text
    assert list_keys(server) == ["a"] and len(read_list(server)) == 1
    launcher.exclude_revoked_keys(server)
    assert [entry.client for entry in read_list(server)] == ["c", "b"]


GOOD = {"serial": 1, "client": "b", "key": "0" * 64, "time": "2026-11-19T21:00:00+00:00", "signature": ""}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "cannot read the revocations in"),
        ([], "it must have format 1"),
        ({"format": 2, "serial": 0, "revocations": []}, "it must have format 1"),
        ({"format": 1, "serial": 0, "revocations": {}}, "revocations must be a list"),
        ({"format": 1, "serial": -1, "revocations": []}, "cannot read the revocations"),
        ({"format": 1, "revocations": []}, "cannot read the revocations"),
        ({"format": 1, "serial": 1, "revocations": [GOOD, GOOD | {"serial": 2}]}, "a key is revoked twice"),
        (GOOD | {"serial": 0}, "cannot read the revocations"),
        (GOOD | {"serial": MAX_SERIAL + 1}, "cannot read the revocations"),
        (GOOD | {"serial": "1"}, "cannot read the revocations"),
        (GOOD | {"client": "../b"}, "must name a client and the SHA-256"),
        (GOOD | {"key": "0" * 63}, "must name a client and the SHA-256"),
        (GOOD | {"time": "today"}, "an invalid time or signature"),
        (GOOD | {"signature": "%"}, "an invalid time or signature"),
        (GOOD | {"signature": None}, "must consist of client, key"),
        (GOOD | {"more": "x"}, "must consist of client, key"),
    ],
)
def test_a_list_with_invalid_content_is_refused(tmp_path: Path, content: Any, sentence: str) -> None:
    path = tmp_path / REVOCATIONS_FILE
    if "client" in content:
        content = {"format": 1, "serial": 1, "revocations": [content]}
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(DataError, match=sentence):
        read_revocations(path)
    write_revocations(path, [Revocation(**GOOD)])  # type: ignore[arg-type]
    assert read_revocations(path) == ([Revocation(**GOOD)], 1)  # type: ignore[arg-type]


def test_a_damaged_list_prevents_no_revocation(server: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = server / REVOCATIONS_FILE
    write_revocations(path, [Revocation(**GOOD)])  # type: ignore[arg-type]
    book = ServerRevocations(server)
    assert [entry.client for entry in book.read()] == ["b"]
    path.unlink()
    path.write_text("{")
    assert [entry.client for entry in book.read()] == ["b"]  # of a running server: as before
    assert "continues with the revocations that it has read before" in caplog.text
    with pytest.raises(DataError, match="cannot read the revocations in .*; restore the file, or move it away"):
        launcher.run_server(server)
    assert "cannot read the revocations in" in join_problems(server)
    client_keys.revoke_client(server, "a")
    assert list_keys(server) == ["b", "c"] and path.read_text() == "{"
    path.unlink()  # as the message says
    launcher.exclude_revoked_keys(server)
    assert [entry.client for entry in read_list(server)] == ["a"]


def test_a_revoked_key_is_not_accepted_again(made: Path, server: Path, tmp_path: Path) -> None:
    old = shutil.copy(server / "keys" / "b.pub", tmp_path / "old.pub")
    run_deploy_command("revoke", made, "b")
    shutil.rmtree(server / "keys" / "revoked")  # the list is enough
    told = run_deploy_command("rotate", server, "b", "--key", old, code=2)
    assert "was revoked permanently: create a new one" in told
    shutil.copy(old, server / "keys" / "b.pub")
    assert f"b.pub was revoked ({read_list(server)[0]}), so the client cannot connect" in join_problems(server)
    assert "the key in" in join_problems(made) and "was revoked on" in join_problems(
        made / "clients" / "b" / ".." / ".."
    )
    launcher.exclude_revoked_keys(server)
    assert list_keys(server) == ["a", "c"]


def test_signatures_outlast_a_new_authority(made: Path, server: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_deploy_command("revoke", made, "b")
    (old,) = read_list(server)
    run_deploy_command("renew", made, "--ca")
    launcher.exclude_revoked_keys(server)
    assert read_list(server) == [old] and old.is_signed_by(read_authorities(server)[1:])
    newest = (server / "ca.crt").read_text().partition("-----END")[0] + "-----END CERTIFICATE-----\n"
    (server / "ca.crt").write_text(newest)  # the old authority has ended
    launcher.exclude_revoked_keys(server)
    (new,) = read_list(server)
    assert replace(new, signature="") == replace(old, signature="") and new.is_signed_by(read_authorities(server))


# -- clients


def make_content(server: Path, entries: list[Revocation] | None = None) -> dict[str, Any]:
    listed = read_list(server) if entries is None else entries
    return {"serial": max((e.serial for e in listed), default=0), "list": [asdict(entry) for entry in listed]}


def test_a_client_stores_what_its_authority_has_signed(
    made: Path, server: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client = made / "clients" / "a"
    stored = ClientRevocations(client)
    assert stored.receive(make_content(server)) == {"serial": 0} and not (client / REVOCATIONS_FILE).exists()
    run_deploy_command("revoke", made, "b")
    run_deploy_command("revoke", made, "c")
    first, second = read_list(server)
    assert stored.receive({"serial": 2}) == {"serial": 0} and stored.read() == ([], 0)  # a number is not a list
    assert stored.receive(make_content(server, [first, replace(second, signature="")])) == {"serial": 2}
    assert stored.read() == ([first], 2)
    scaffold.create_deployment(tmp_path / "other", ["x"], [2], ["no", "yes"])
    client_keys.revoke_client(tmp_path / "other" / "server", "x")
    (foreign,) = read_list(tmp_path / "other" / "server")
    assert stored.receive(make_content(server, [first, foreign, second])) == {"serial": 2}
    assert stored.read() == ([first, second], 2) and "1 revocations of the server are not signed" in caplog.text
    (client / "ca.crt").write_text("nothing")
    assert stored.read() == ([], 2) and "so no revocation is stored" in caplog.text


def test_a_client_refuses_a_server_that_lacks_a_revocation(made: Path, server: Path) -> None:
    stored = ClientRevocations(made / "clients" / "a")
    run_deploy_command("revoke", made, "b")
    run_deploy_command("revoke", made, "c")
    first, second = read_list(server)
    stored.receive(make_content(server))
    with pytest.raises(MissingRevocationsError, match="the server lacks revocation 2, of key .* of client c: it was"):
        stored.receive(make_content(server, [first]))
    with pytest.raises(MissingRevocationsError, match="revocation 1, of key .* of client b, and 1 more: ") as caught:
        stored.receive(make_content(server, []))
    assert caught.value.to_report() == {"serial": 2, "missing": [asdict(first), asdict(second)]}
    assert stored.receive(make_content(server, [replace(first, serial=7, signature=""), second]))["serial"] == 7
    for content in ({"serial": -1}, {"serial": "x"}, {"serial": 1, "list": {}}, {"serial": 1, "list": [{}]}):
        with pytest.raises(InvalidMessageError):
            stored.receive(content)


def test_a_client_goes_on_if_it_cannot_read_or_write_its_revocations(
    made: Path, server: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client = made / "clients" / "a"
    run_deploy_command("revoke", made, "b")
    (client / REVOCATIONS_FILE).write_text("{")
    stored = ClientRevocations(client)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("full")))
        assert stored.receive(make_content(server)) == {"serial": 0}  # so that the server sends them again
    assert "cannot read the revocations in" in caplog.text and "are not stored: cannot write" in caplog.text
    assert stored.receive(make_content(server)) == {"serial": 1} and stored.read() == (read_list(server), 1)


def test_a_client_with_an_old_key_is_told_so(made: Path, server: Path, tmp_path: Path) -> None:
    client = made / "clients" / "b"
    write_backup(client, tmp_path / "b.tar")
    told = run_deploy_command("restore", tmp_path / "b.tar", tmp_path / "early")
    assert "if its key was revoked or replaced after that, the server refuses it: `feddrift deploy rotate`" in told
    launcher_says = launcher._explain_old_key
    assert "this folder was restored from a backup: if its key was" in str(launcher_says(tmp_path / "early"))
    ClientRevocations(tmp_path / "early").receive(make_content(server))  # a server has accepted it
    assert launcher_says(tmp_path / "early") is None and launcher_says(tmp_path) is None
    run_deploy_command("revoke", made, "b")
    ClientRevocations(tmp_path / "early").receive(make_content(server))
    assert "the key of this client was revoked on 20" in str(launcher_says(tmp_path / "early"))
    assert "early was revoked on 20" in join_problems(tmp_path / "early")
    run_deploy_command("rotate", tmp_path / "early", "b")
    assert launcher_says(tmp_path / "early") is None and "was revoked" not in join_problems(tmp_path / "early")


# -- a federation in this process, with the folders of a deployment


class FolderKeys(dict[bytes, str]):
    """The keys of clients in this process: a client has one while its file is at the server."""

    def __init__(self, server: Path) -> None:
        super().__init__({name.encode(): name for name in NAMES})
        self.server = server

    def has(self, name: str) -> bool:
        return (self.server / "keys" / f"{name}.pub").exists()

    def get(self, key: bytes, default: Any = None) -> Any:
        return self[key] if key in self and self.has(self[key]) else default

    def values(self) -> Any:
        return [name for name in super().values() if self.has(name)]


@pytest.fixture
def engine(made: Path, server: Path) -> InProcessFlower:
    return connect(made, server)


def connect(made: Path, server: Path) -> InProcessFlower:
    """Return a server of this folder, with the clients of the deployment."""
    engine = make_federation(make_swapping_stream())
    engine.roster = replace(engine.roster, keys=FolderKeys(server), revocations=ServerRevocations(server))
    for name, client in engine.local_grid.clients.items():
        client.revocations = ClientRevocations(made / "clients" / name)
    return engine


def observe_hellos(engine: InProcessFlower, name: str) -> list[dict[str, Any]]:
    """Return a list that gets the part about revocations of each hello to a client."""
    client = engine.local_grid.clients[name]
    assert client.revocations is not None
    seen: list[dict[str, Any]] = []
    receive = client.revocations.receive
    client.revocations.receive = lambda content: (seen.append(content), receive(content))[1]  # type: ignore[method-assign,func-returns-value]
    return seen


def test_the_list_is_sent_to_a_client_once(made: Path, server: Path, engine: InProcessFlower) -> None:
    seen = observe_hellos(engine, "a")
    client_keys.revoke_client(server, "c")
    for t in range(3):
        engine.send_hello(t)
    assert [sorted(content) for content in seen] == [["list", "serial"], ["serial"], ["serial"]]
    client_keys.revoke_client(server, "b")
    engine.send_hello(3)
    engine.send_hello(4)
    assert [(c["serial"], len(c.get("list", ()))) for c in seen[3:]] == [(2, 2), (2, 0)]
    assert ClientRevocations(made / "clients" / "a").read() == (read_list(server), 2)
    (made / "clients" / "a" / REVOCATIONS_FILE).unlink()  # lost: the client says so, and gets it again
    engine.send_hello(5)
    engine.send_hello(6)
    assert ["list" in content for content in seen[5:]] == [False, True]
    assert ClientRevocations(made / "clients" / "a").read() == (read_list(server), 2)


def test_clients_give_a_restored_server_back_what_it_lacks(
    made: Path, server: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_backup(server, tmp_path / "b.tar")
    client_keys.revoke_client(server, "b")
    revoked = read_list(server)
    connect(made, server).send_hello(0)
    assert ClientRevocations(made / "clients" / "a").read()[0] == revoked

    restore_backup(tmp_path / "b.tar", tmp_path / "new")
    client_keys.confirm_keys(tmp_path / "new")  # the operator has overlooked b
    engine = connect(made, tmp_path / "new")
    accounts: list[Any] = []
    engine.on_exchange = accounts.append
    caplog.set_level(logging.INFO)
    engine.send_hello(0)
    assert engine.present == {0, 2}  # at once: b's reply to the same hello does not count
    assert read_list(tmp_path / "new") == revoked and list_keys(tmp_path / "new") == ["a", "c"]
    assert f"client a refused a message (hello): the server lacks {revoked[0]}: it was probably restored" in caplog.text
    assert f"client a: it reported a revocation that this server lacked: {revoked[0]}" in caplog.text
    assert accounts[0].clients[0].note.startswith("it reported a revocation") and accounts[0].clients[0].trouble is None
    assert accounts[0].clients[1].trouble == KEY_REVOKED
    assert any(
        "client b had a revoked key again, which was removed" in n.text for n in read_audit_log(tmp_path / "new")
    )
    engine.send_hello(1)
    assert engine.present == {0, 2}


def test_a_restored_server_may_have_used_the_same_number_again(made: Path, server: Path, tmp_path: Path) -> None:
    write_backup(server, tmp_path / "b.tar")
    client_keys.revoke_client(server, "b")
    connect(made, server).send_hello(0)
    restore_backup(tmp_path / "b.tar", tmp_path / "new")
    client_keys.revoke_client(tmp_path / "new", "c")
    engine = connect(made, tmp_path / "new")
    engine.send_hello(0)
    assert engine.present == {0} and list_keys(tmp_path / "new") == ["a"]
    entries = read_list(tmp_path / "new")
    assert [(entry.serial, entry.client) for entry in entries] == [(1, "b"), (1, "c")]
    assert ClientRevocations(made / "clients" / "a").read()[0] == entries
    client_keys.replace_client_key(made / "clients" / "b", "b")
    client_keys.accept_new_key(tmp_path / "new", "b", made / "clients" / "b" / "key.pub")
    client_keys.revoke_client(tmp_path / "new", "b")
    assert [entry.serial for entry in read_list(tmp_path / "new")] == [1, 1, 2]


def test_a_server_that_lacks_the_newest_authority_says_what_to_copy(
    made: Path, server: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The backup is older than `renew --ca`: the server cannot check the signatures that clients report."""
    write_backup(server, tmp_path / "b.tar")
    run_deploy_command("renew", made, "--ca")
    for name in NAMES:
        shutil.copy(server / "ca.crt", made / "clients" / name / "ca.crt")
    client_keys.revoke_client(server, "b")
    connect(made, server).send_hello(0)
    restore_backup(tmp_path / "b.tar", tmp_path / "new")
    engine = connect(made, tmp_path / "new")
    engine.send_hello(0)
    assert engine.present == {1} and list_keys(tmp_path / "new") == list(NAMES)
    assert "if the authority was renewed after the backup, copy the client's ca.crt to the server" in caplog.text
    shutil.copy(made / "clients" / "a" / "ca.crt", tmp_path / "new" / "ca.crt")
    engine.send_hello(1)
    assert engine.present == {0, 2} and list_keys(tmp_path / "new") == ["a", "c"]


def test_no_client_can_revoke_anothers_key(
    made: Path, server: Path, engine: InProcessFlower, caplog: pytest.LogCaptureFixture
) -> None:
    forged = Revocation(1, "b", hash_key(server / "keys" / "b.pub"), "2026-11-19T21:00:00+00:00", "AAAA")
    client = engine.local_grid.clients["a"]

    def refuse(content: dict[str, Any]) -> dict[str, Any]:
        raise MissingRevocationsError([forged])

    assert client.revocations is not None
    client.revocations.receive = refuse  # type: ignore[method-assign]
    engine.send_hello(0)
    assert engine.present == {1, 2} and read_list(server) == [] and list_keys(server) == list(NAMES)
    assert f"its reply is refused: {forged}, is not signed by an authority in" in caplog.text

    client.revocations.receive = lambda content: {"serial": 99}  # type: ignore[method-assign]
    caplog.clear()
    for t in (1, 2):
        engine.send_hello(t)
    assert engine.present == {0, 1, 2}  # a number alone changes nothing, but is reported
    assert caplog.text.count("client a has seen revocation 99, but the list of this server ends at 0") == 1
    assert "client a has seen revocation 99, but" in join_problems(server)
    (server / "state" / "reported_serials.json").write_text("[")
    assert "has seen revocation" not in join_problems(server)


@pytest.mark.parametrize(
    "report", [1, [], {}, {"serial": -1}, {"serial": True}, {"serial": 0, "missing": {}}, {"serial": 0, "missing": [1]}]
)
def test_an_invalid_report_of_a_client_is_refused(server: Path, engine: InProcessFlower, report: Any) -> None:
    client = engine.local_grid.clients["a"]
    assert client.revocations is not None
    client.revocations.receive = lambda content: report  # type: ignore[method-assign]
    engine.send_hello(0)
    assert engine.present == {1, 2} and engine.trouble["a"].startswith("hello at time 0: its reply is refused: ")
    assert read_list(server) == []


def test_clients_of_the_previous_protocol_are_not_sent_revocations(server: Path, engine: InProcessFlower) -> None:
    old = replace_client(engine, OldClient, "b")
    client_keys.revoke_client(server, "c")
    engine.send_hello(0)
    assert engine.present == {0, 1} and "revocations" not in old.heard[-1][1]


def test_a_client_of_a_folder_stores_its_revocations_there(made: Path) -> None:
    client = load_client(made / "clients" / "a")
    assert client.revocations is not None and client.revocations.path == made / "clients" / "a" / REVOCATIONS_FILE


def test_commands_that_change_keys_wait_for_each_other(server: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from feddrift._internal.system import lock_folder
    from feddrift.errors import BusyError

    monkeypatch.setattr(revocations, "LOCK_SECONDS", 0.1)
    with lock_folder(server / "keys", "busy"), pytest.raises(BusyError, match="another command changes the keys"):
        update_revocations(server)
    replace_file(server / "keys" / "b.pub", (server / "keys" / "b.pub").read_text())
    assert update_revocations(server) == []
