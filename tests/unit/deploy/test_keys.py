"""Renewal of certificates, and replacement and revocation of client keys."""

from __future__ import annotations

import logging
import os
import socket
import ssl
import stat
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from feddrift.cli import app
from feddrift.deploy import files
from feddrift.deploy.monitor.alerts import read_audit_log
from feddrift.deploy.operate import client_keys, scaffold
from feddrift.deploy.operate.check import find_problems
from feddrift.deploy.pki import certificates
from feddrift.deploy.processes import launcher
from feddrift.deploy.settings import Settings, read_public_key
from feddrift.engines.flower.server.connection import KEY_REVOKED
from feddrift.errors import ConfigError, DataError, FeddriftError
from tests.support.federation import make_federation, make_swapping_stream
from tests.support.flower import SHORT_WAITING


@pytest.fixture
def made(tmp_path: Path) -> Path:
    scaffold.create_deployment(
        tmp_path / "fed", ["a", "b"], [2], ["no", "yes"], host="fed.example.org", port=18443, inner=18444
    )
    return tmp_path / "fed"


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "is_server_running", lambda server: False)


def run_deploy_command(*words: object, code: int = 0) -> str:
    done = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["deploy", *map(str, words)])
    assert done.exit_code == code or (code and isinstance(done.exception, FeddriftError)), done.output
    return f"{done.output}{done.exception or ''}"


def join_problems(folder: Path) -> str:
    return "\n".join(problem for problem in find_problems(folder) if "nginx is not installed" not in problem)


def read_certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def names(path: Path) -> Any:
    return read_certificate(path).extensions.get_extension_for_class(x509.SubjectAlternativeName)


def texts(server: Path) -> list[str]:
    return [notice.text for notice in read_audit_log(server) if notice.event == "changed"]


def connects(server: Path, trusted: Path) -> bool:
    """Whether one that trusts this file gets through to a server with these certificates."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(server / "server.crt", server / "server.key")
    ours, theirs = socket.socketpair()

    def serve() -> None:
        try:
            tls.wrap_socket(ours, server_side=True).close()
        except OSError:
            ours.close()

    answering = threading.Thread(target=serve)
    answering.start()
    try:
        line = ssl.create_default_context(cafile=str(trusted)).wrap_socket(theirs, server_hostname="fed.example.org")
        line.close()
        return True
    except ssl.SSLCertVerificationError:
        return False
    finally:
        theirs.close()
        answering.join()


def test_a_renewed_certificate_is_for_the_same_names_and_trusted_as_before(made: Path) -> None:
    server, path = made / "server", made / "server" / "server.crt"
    old, old_key = path.read_text(), (server / "server.key").read_text()
    told = run_deploy_command("renew", made)
    assert (
        f"valid until {read_certificate(path).not_valid_after_utc.date()}" in told
        and "start server and run again" in told
    )
    assert path.read_text() != old and (server / "server.key").read_text() != old_key
    kept = server / "server.crt.old", server / "server.key.old"
    assert [file.read_text() for file in kept] == [old, old_key]
    assert names(path) == names(kept[0]) and read_certificate(path).subject == read_certificate(kept[0]).subject
    assert read_certificate(path).serial_number != read_certificate(kept[0]).serial_number
    assert {stat.S_IMODE((server / name).stat().st_mode) for name in ("server.key", "server.key.old")} == {0o600}
    assert join_problems(made) == "" and connects(server, made / "clients" / "a" / "ca.crt")
    (text,) = texts(server)
    assert text == f"the server has a new certificate until {read_certificate(path).not_valid_after_utc.date()}"


def test_renew_needs_the_authoritys_key_wherever_it_is_kept(made: Path, tmp_path: Path) -> None:
    server, safe = made / "server", tmp_path / "safe"
    before = (server / "server.crt").read_text()
    (server / "ca.key").rename(safe)
    told = run_deploy_command("renew", made, code=2)
    assert "ca.key is missing, but it signs all certificates: give its path with --ca-key PATH" in told
    scaffold.create_deployment(tmp_path / "other", ["x"], [2], ["no", "yes"])
    assert "is not the key of" in run_deploy_command(
        "renew", made, "--ca-key", tmp_path / "other" / "server" / "ca.key", code=2
    )
    assert "cannot read the authority's key" in run_deploy_command("renew", made, "--ca-key", server / "ca.crt", code=2)
    assert (server / "server.crt").read_text() == before and not list(server.glob("*.old")) and not texts(server)
    run_deploy_command("renew", made, "--ca-key", safe)
    assert (
        (server / "server.crt").read_text() != before and join_problems(made) == "" and not (server / "ca.key").exists()
    )


def test_a_certificate_ends_with_its_authority_and_not_after(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = made / "server"
    monkeypatch.setattr(certificates, "AUTHORITY_VALID_DAYS", 100)
    certificates.renew_authority(server)
    assert certificates.renew_server_certificate(server) == read_certificate(server / "ca.crt").not_valid_after_utc
    monkeypatch.setattr(certificates, "AUTHORITY_VALID_DAYS", 0)
    certificates.renew_authority(server)  # it has ended five minutes ago
    with pytest.raises(ConfigError, match=r"ca.crt ended on .*: run `feddrift deploy renew --ca` first"):
        certificates.renew_server_certificate(server)


def test_a_new_authority_is_trusted_beside_the_old_one_until_all_have_it(made: Path) -> None:
    server, late = made / "server", made / "clients" / "b" / "ca.crt"
    before = (server / "server.crt").read_text()
    told = run_deploy_command("renew", made, "--ca")
    assert "copy it to every client" in told and (server / "server.crt").read_text() == before
    assert len(certificates.read_authorities(server)) == 2 and read_certificate(server / "ca.crt") != read_certificate(
        late
    )
    assert connects(server, late) and connects(server, server / "ca.crt")
    assert "clients/a/ca.crt is not the server's" in join_problems(made) and join_problems(server) == ""
    assert (server / "ca.key.old").exists() and stat.S_IMODE((server / "ca.key").stat().st_mode) == 0o600
    run_deploy_command("renew", made, "--ca-key", server / "ca.key.old")  # not all have it yet
    assert connects(server, late)
    run_deploy_command("renew", made)
    assert connects(server, server / "ca.crt") and not connects(server, late) and join_problems(server) == ""


def test_of_two_authorities_that_counts_which_signed(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = made / "server"
    monkeypatch.setattr(certificates, "AUTHORITY_VALID_DAYS", 20)
    certificates.renew_authority(server)
    assert certificates.read_remaining_days(server)["ca.crt"] > 3000 and join_problems(server) == ""
    certificates.renew_server_certificate(server)
    assert 19 < certificates.read_remaining_days(server)["ca.crt"] < 20
    assert "ca.crt ends on" in join_problems(server) and "`feddrift deploy renew --ca` at the server" in join_problems(
        server
    )
    (server / "server.crt").unlink()
    assert certificates.read_remaining_days(server) == {}


def test_authorities_that_have_ended_are_trusted_no_more(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = made / "server"
    monkeypatch.setattr(certificates, "AUTHORITY_VALID_DAYS", 0)
    certificates.renew_authority(server)
    monkeypatch.setattr(certificates, "AUTHORITY_VALID_DAYS", 3650)
    certificates.renew_authority(server)
    assert len(certificates.read_authorities(server)) == 2
    (server / "ca.crt").write_text("nothing")
    with pytest.raises(ConfigError, match="cannot read .*ca.crt"):
        certificates.renew_authority(server)


def test_a_replaced_file_is_complete_or_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "key"
    files.write_new_file(path, "old", secret=True)
    path.with_name("key.part").write_text("left behind, and open to all")
    files.replace_file(path, "new", secret=True)
    assert path.read_text() == "new" and stat.S_IMODE(path.stat().st_mode) == 0o600
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        files.replace_file(path, "half")
    assert path.read_text() == "new"


def test_a_key_is_rotated_in_one_command_where_both_sides_are(made: Path) -> None:
    client, server = made / "clients" / "a", made / "server"
    old, old_public = (client / "key").read_text(), read_public_key(server / "keys" / "a.pub")
    told = run_deploy_command("rotate", made, "a")
    assert "once it is started" in told and join_problems(made) == ""
    assert (client / "key").read_text() != old and (client / "key.old").read_text() == old
    assert {stat.S_IMODE((client / name).stat().st_mode) for name in ("key", "key.old")} == {0o600}
    new = read_public_key(server / "keys" / "a.pub")
    assert new == read_public_key(client / "key.pub") != old_public
    (shut_out,) = (server / "keys" / "revoked").glob("*.pub")
    assert read_public_key(shut_out) == old_public and shut_out.name.startswith("a-")
    (text,) = texts(server)
    assert text.startswith("client a has a new key, ") and text.endswith(f"{shut_out.stem[2:]}, was revoked")
    assert Settings.read(server / "federation.toml").read_roster(server / "keys").keys.keys() >= {new}


def test_a_key_is_rotated_in_two_where_the_client_is_somewhere_else(made: Path, tmp_path: Path) -> None:
    client, server = tmp_path / "a", made / "server"
    (made / "clients" / "a").rename(client)
    told = run_deploy_command("rotate", made, "a", code=2)
    assert "is made in its own folder" in told and "name it here with --key" in told
    told = run_deploy_command("rotate", client, "a")
    assert f"copy {client / 'key.pub'} to the server" in told and not texts(server)
    assert read_public_key(server / "keys" / "a.pub") == read_public_key(client / "key.pub.old")
    assert "--key is an option for the server's folder" in run_deploy_command(
        "rotate", client, "a", "--key", client / "key.pub", code=2
    )
    for folder in (made, server):
        _, line = client_keys.generate_key_pair("whoever")
        (tmp_path / "key.pub").write_text(line)
        run_deploy_command("rotate", folder, "a", "--key", tmp_path / "key.pub")
        assert (server / "keys" / "a.pub").read_text() == line.replace("whoever", "a")
    assert len(list((server / "keys" / "revoked").glob("a-*.pub"))) == 2


def test_commands_refuse_unknown_clients(made: Path, tmp_path: Path) -> None:
    assert "unknown client 'aa', did you mean 'a'? (one of: a, b)" in run_deploy_command("revoke", made, "aa", code=2)
    assert "unknown client 'c'" in run_deploy_command(
        "rotate", made, "c", "--key", made / "clients" / "b" / "key.pub", code=2
    )
    assert "belongs to client b, not to a" in run_deploy_command("rotate", made / "clients" / "b", "a", code=2)
    assert "neither federation.toml nor" in run_deploy_command("rotate", tmp_path, "a", code=2)
    assert "has no federation.toml" in run_deploy_command("revoke", made / "clients" / "b", "b", code=2)
    (made / "clients" / "b").rename(made / "clients" / "c")
    text = (made / "clients" / "c" / "client.toml").read_text()
    (made / "clients" / "c" / "client.toml").write_text(text.replace('"b"', '"c"'))
    before = (made / "clients" / "c" / "key").read_text()
    assert "unknown client 'c'" in run_deploy_command("rotate", made, "c", code=2)
    assert (made / "clients" / "c" / "key").read_text() == before and not texts(made / "server")


def openssh(key: Any) -> bytes:
    return bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("nothing", "cannot read the key .*: No such file"),
        ("text", "is not a public key in the format of `feddrift deploy rotate`"),
        ("private", "is a private key, which must never leave its client: use key.pub"),
        ("ed25519", "must be of type ecdsa-sha2-nistp384, as of `feddrift deploy rotate`, got ssh-ed25519"),
        ("p256", "must be of type ecdsa-sha2-nistp384, as of `feddrift deploy rotate`, got ecdsa-sha2-nistp256"),
        ("another's", "is already that of client b: create a new one"), ("its own", "is already that of client a"),
        ("shut out", "was revoked permanently: create a new one"),
    ],
)  # fmt: skip
def test_an_invalid_new_key_of_a_client_is_refused(made: Path, tmp_path: Path, what: str, sentence: str) -> None:
    server, path = made / "server", tmp_path / "given"
    folder = server / "keys"
    if what == "text":
        path.write_text("ecdsa-sha2-nistp384 AAAA a\n")
    elif what == "private":
        path.write_text((made / "clients" / "a" / "key").read_text())
    elif what == "ed25519":
        path.write_bytes(openssh(ed25519.Ed25519PrivateKey.generate()))
    elif what == "p256":
        path.write_bytes(openssh(ec.generate_private_key(ec.SECP256R1())))
    elif what in ("another's", "its own"):
        path.write_text((folder / ("b.pub" if what == "another's" else "a.pub")).read_text())
    elif what == "shut out":
        path.write_text((folder / "b.pub").read_text())
        client_keys.revoke_client(server, "b")
    before = (folder / "a.pub").read_text()
    with pytest.raises(ConfigError, match=sentence):
        client_keys.accept_new_key(server, "a", path)
    assert (folder / "a.pub").read_text() == before and not list((folder / "revoked").glob("a-*"))


def test_a_client_that_is_shut_out_keeps_its_place(made: Path) -> None:
    server = made / "server"
    old = read_public_key(server / "keys" / "b.pub")
    assert "client b is shut out when the server is started" in run_deploy_command("revoke", made, "b")
    settings = Settings.read(server / "federation.toml")
    roster = settings.read_roster(server / "keys")
    assert roster.clients == ("a", "b") and list(roster.keys.values()) == ["a"]
    assert join_problems(made).startswith(join_problems(server))
    assert join_problems(server).startswith(
        "client b has no key at the server, so it cannot connect: `feddrift deploy rotate`"
    )
    assert "it is revoked already" in run_deploy_command("revoke", made, "b", code=2)
    (server / "federation.toml").write_text(f"quorum = 2\n{(server / 'federation.toml').read_text()}")
    assert "quorum = 2, but only 1 clients have keys" in join_problems(server)
    run_deploy_command("rotate", made, "b")
    assert join_problems(made) == "" and read_public_key(server / "keys" / "b.pub") != old
    shut_out, again = texts(server)
    assert shut_out.startswith("the key of client b, ") and again.startswith("client b has a new key, ")
    assert "the old key" not in again  # it was shut out before


def test_a_key_that_is_lost_is_not_one_that_was_taken_back(made: Path) -> None:
    client_keys.revoke_client(made / "server", "a")
    (made / "server" / "keys" / "b.pub").unlink()
    assert "cannot read the key of client b" in join_problems(made / "server")
    (made / "server" / "keys" / "revoked" / "b.c-0123456789abcdef.pub").touch()  # of a client b.c
    assert "cannot read the key of client b" in join_problems(made / "server")


def test_a_run_knows_new_keys_at_once(made: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = made / "server"
    known = Settings.read(server / "federation.toml").read_roster(server / "keys").keys
    old = read_public_key(server / "keys" / "a.pub")
    assert known[old] == "a" and len(known) == 2
    run_deploy_command("rotate", made, "a")
    new = read_public_key(server / "keys" / "a.pub")
    assert known.get(old) is None and known[new] == "a" and set(known.values()) == {"a", "b"}
    client_keys.revoke_client(server, "b")
    assert dict(known) == {new: "a"}
    (server / "keys" / "a.pub").write_text("nonsense")
    assert (
        dict(known) == {new: "a"}
        and "continues with the keys that it has read before: cannot read the key of client a" in caplog.text
    )


def test_a_running_server_receives_changed_keys(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[set[str]] = []
    monkeypatch.setattr(launcher, "is_server_running", lambda server: True)
    monkeypatch.setattr(
        launcher, "register_keys", lambda server: told.append({p.stem for p in (server / "keys").glob("*.pub")})
    )
    assert run_deploy_command("revoke", made, "b").strip() == "client b is shut out"
    assert "the server knows the new key of client b, and no longer the old one" in run_deploy_command(
        "rotate", made, "b"
    )
    assert told == [{"a"}, {"a", "b"}]


def test_a_server_that_does_not_receive_the_command_is_restarted(
    made: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(server: Path) -> None:
        raise DataError("no answer")

    monkeypatch.setattr(launcher, "is_server_running", lambda server: True)
    monkeypatch.setattr(launcher, "register_keys", fails)
    assert "is shut out when the server is started" in run_deploy_command("revoke", made, "b")
    assert "the running server could not register the keys, it does so at its next start: no answer" in caplog.text
    assert len(texts(made / "server")) == 1


def test_a_client_without_a_key_is_unreachable_and_the_reason_is_given(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_federation(make_swapping_stream())
    known = {key: name for key, name in engine.roster.keys.items() if name != "b"}
    engine.roster = replace(engine.roster, keys=known)
    accounts: list[Any] = []
    engine.on_exchange = accounts.append
    fed = engine.at(0)
    loss = fed.evaluate(fed.fresh())
    assert fed.reachable.tolist() == [True, False, True] and np.isnan(loss[1]).all()
    assert accounts[0].clients[1].trouble == KEY_REVOKED
    assert all(line.levelno < logging.WARNING for line in caplog.records)  # as of one that has not come


def test_the_server_does_not_wait_for_a_revoked_client() -> None:
    engine = make_federation(make_swapping_stream(), waiting=replace(SHORT_WAITING, start="data", grace=1000.0))
    known = {key: name for key, name in engine.roster.keys.items() if name != "b"}
    engine.roster = replace(engine.roster, keys=known)
    assert engine.at(0).reachable.tolist() == [True, False, True]


def test_the_server_is_up_where_its_own_port_answers(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        conf = made / "server" / "nginx.conf"
        conf.write_text(conf.read_text().replace(":18444", f":{listening.getsockname()[1]}"))
        assert not launcher.is_server_running(made / "server")
        listening.listen()
        assert launcher.is_server_running(made / "server")


INIT = ["--clients", "a,b", "--features", "2", "--classes", "no,yes"]


def test_init_accepts_the_usual_settings_of_a_federation(tmp_path: Path) -> None:
    words = ["--algorithm", "FedDrift", "--time-steps", 4, "--rounds", 3, "--steps", 50, "--quorum", 2]
    run_deploy_command("init", tmp_path / "fed", *INIT, *words)
    settings = Settings.read(tmp_path / "fed" / "server" / "federation.toml")
    given = settings.algorithm, settings.time_steps, settings.rounds, settings.steps, settings.quorum
    assert given == ("FedDrift", 4, 3, 50, 2) and settings.defend and join_problems(tmp_path / "fed") == ""
    run_deploy_command("init", tmp_path / "plain", *INIT)
    text = (tmp_path / "plain" / "server" / "federation.toml").read_text()
    assert "# rounds = 10" in text and "# quorum = 1" in text and 'algorithm = "FedDrift-Auto"' in text


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--algorithm", "FedDrif"], "unknown algorithm 'FedDrif', did you mean 'FedDrift'?"),
        (["--algorithm", "Oracle"], "Oracle needs the true concepts"),
        (["--rounds", "0"], "rounds must be at least 1, got 0"),
        (["--quorum", "3"], "quorum must be in 1..2, got 3"),
        (["--time-steps", "-1"], "time_steps must be at least 1, got -1"),
    ],
)
def test_init_refuses_before_anything_is_written(tmp_path: Path, words: list[str], sentence: str) -> None:
    assert sentence in run_deploy_command("init", tmp_path / "fed", *INIT, *words, code=2)
    assert not (tmp_path / "fed").exists()
