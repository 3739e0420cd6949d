"""Signatures, secrets and certificates that limit what a client runs and which processes use its SuperNode."""

from __future__ import annotations

import json
import os
import socket
import ssl
import stat
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

from flwr.cli.build import build_fab_from_disk
from flwr.supercore.fab import Fab
from flwr.supernode.start_client_internal import _verify_fab

from feddrift.deploy.operate import scaffold
from feddrift.deploy.operate.check import find_problems
from feddrift.deploy.pki import app_signature
from feddrift.deploy.processes import launcher, runtime
from feddrift.errors import DataError
from tests.support.flower import open_link_state

pytestmark = [
    pytest.mark.filterwarnings("ignore:No path_separator:DeprecationWarning"),  # of Flower's database
    pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning"),  # of how Flower builds an app
]


@pytest.fixture
def made(tmp_path: Path) -> Path:
    scaffold.create_deployment(tmp_path / "fed", ["a"], [2], ["no", "yes"])
    return tmp_path / "fed"


def load_app(server: Path, verifications: dict[str, str] | None = None) -> Fab:
    """The app as Flower sends it to clients."""
    signed = json.loads((server / app_signature.SIGNATURE_FILE).read_text())
    return Fab("", build_fab_from_disk(server / "app"), verifications or signed["verifications"])


def read_trusted_keys(folder: Path) -> dict[str, str]:
    return dict(json.loads((folder / app_signature.TRUSTED_FILE).read_text()))


def test_a_client_takes_the_app_that_came_with_its_folder_and_no_other(made: Path) -> None:
    server, client = made / "server", made / "clients" / "a"
    old = load_app(server)
    assert _verify_fab(old, read_trusted_keys(client)) and old.verifications["valid_license"]
    scaffold.add_client(made, "late")
    assert read_trusted_keys(made / "clients" / "late") == read_trusted_keys(client)  # the app is not signed again

    (server / "app" / "feddrift_client.py").write_text("app = 'of another'\n")
    assert not _verify_fab(load_app(server), read_trusted_keys(client))  # the old signature
    app_signature.sign_app(server)
    assert read_trusted_keys(server) != read_trusted_keys(client)
    new = load_app(server)
    assert _verify_fab(new, read_trusted_keys(server)) and not _verify_fab(new, read_trusted_keys(client))  # another's
    ((name, _),) = read_trusted_keys(client).items()
    stolen = {name: next(value for key, value in new.verifications.items() if key != "valid_license")}
    assert not _verify_fab(load_app(server, stolen), read_trusted_keys(client))  # another's under the old one's name


def test_the_key_that_signed_is_nowhere(made: Path) -> None:
    files = [path for path in (made / "server").rglob("*") if path.is_file()]
    private = {path.name for path in files if b"PRIVATE KEY" in path.read_bytes()}
    assert private == {"ca.key", "server.key"}
    assert set(json.loads((made / "server" / app_signature.SIGNATURE_FILE).read_text())) == {"app", "verifications"}


def test_the_superlink_sends_the_signature_of_this_app_only(made: Path) -> None:
    """In Flower's own database."""
    server = made / "server"
    app_signature.publish_signature(server)  # there is none yet
    with open_link_state(server / "state" / "superlink.db") as link:
        ours = link.store_fab(Fab("", build_fab_from_disk(server / "app"), {}))
        other = link.store_fab(Fab("", b"of another", {}))
        app_signature.publish_signature(server)
        sent = link.get_fab(ours)
        not_ours = link.get_fab(other)
    assert sent is not None and _verify_fab(sent, read_trusted_keys(made / "clients" / "a"))
    assert not_ours is not None and not_ours.verifications == {}


def test_an_older_deployment_continues_and_reports_missing_settings(
    made: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server, client = made / "server", made / "clients" / "a"
    for path in (
        server / app_signature.SIGNATURE_FILE,
        server / app_signature.TRUSTED_FILE,
        client / app_signature.TRUSTED_FILE,
    ):
        path.unlink()
    app_signature.publish_signature(server)
    assert "--trusted-entities" not in launcher.build_supernode_command(client)
    assert "this client runs any app that its server sends" in caplog.text
    assert any("trusted.yaml is missing, so this client runs" in told for told in find_problems(made))
    app_signature.sign_app(server)  # as `deploy server` does
    (client / app_signature.TRUSTED_FILE).write_bytes((server / app_signature.TRUSTED_FILE).read_bytes())
    assert launcher.build_supernode_command(client)[-2:] == [
        "--trusted-entities",
        str(client / app_signature.TRUSTED_FILE),
    ]
    assert not any("trusted.yaml" in told for told in find_problems(made))
    (client / app_signature.TRUSTED_FILE).write_text("{}")
    assert any("is not the server's, so the client refuses the server's app" in told for told in find_problems(made))
    (server / app_signature.SIGNATURE_FILE).write_text("{")
    with pytest.raises(DataError, match="move it away, then the app is signed again"):
        app_signature.publish_signature(server)


def test_check_names_a_folder_that_others_can_enter(made: Path) -> None:
    client = made / "clients" / "a"
    client.chmod(0o755)
    assert any(f"other users can open {client}: chmod 700" in told for told in find_problems(made))


def test_secrets_of_the_runtime_are_made_once_and_for_the_owner_alone(made: Path) -> None:
    folder = made / "clients" / "a"
    runtime.prepare_runtime_files(folder)
    home = folder / "flwr"
    files = [home / name for name in ("runtime.key", "runtime.crt", "runtime.secret")]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    before = [path.read_bytes() for path in files]
    (home / "apps" / "of.another").mkdir(parents=True)
    runtime.prepare_runtime_files(folder)  # a process that an earlier start has left goes on with the same
    assert before == [path.read_bytes() for path in files] and not (home / "apps").exists()
    files[2].write_bytes(b"")
    files[2].chmod(0o644)
    runtime.prepare_runtime_files(folder)
    assert len(files[2].read_bytes()) == 32 and stat.S_IMODE(files[2].stat().st_mode) == 0o600
    words = " ".join(launcher.build_supernode_command(folder))
    assert "--isolation process" in words and f"--superexec-auth-secret-file {files[2]}" in words
    assert "--insecure" not in words + " ".join(runtime.build_superexec_arguments(folder, 1, os.getpid()))


def test_a_supernode_that_does_not_come_up_is_tried_again(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client, waits = made / "clients" / "a", list[float]()

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if waits.count(30.0) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(launcher, "build_supernode_command", lambda *_: [sys.executable, "-c", "raise SystemExit(3)"])
    monkeypatch.setattr(time, "sleep", sleep)
    with pytest.raises(KeyboardInterrupt):
        launcher.run_client(client)
    assert [seconds for seconds in waits if seconds >= 5] == [5, 10, 20, 30, 30]


@pytest.mark.parametrize("other", [True, False])
def test_superexec_takes_no_other_listener_for_its_supernode(tmp_path: Path, other: bool) -> None:
    """Who takes the port before the SuperNode does would else tell it what to run."""
    for name in ("own", "other"):
        (tmp_path / name).mkdir()
        runtime.prepare_runtime_files(tmp_path / name)
    home = tmp_path / ("other" if other else "own") / "flwr"
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(home / "runtime.crt", home / "runtime.key")
    trusts = ssl.create_default_context(cafile=str(tmp_path / "own" / "flwr" / "runtime.crt"))
    trusts.verify_flags |= ssl.VERIFY_X509_STRICT  # as later versions of Python do
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            line, _ = listening.accept()
            try:
                tls.wrap_socket(line, server_side=True).close()
            except OSError:
                line.close()

        answering = threading.Thread(target=answer)
        answering.start()
        try:
            with socket.create_connection(listening.getsockname(), timeout=30) as line:
                if other:
                    with pytest.raises(ssl.SSLCertVerificationError):
                        trusts.wrap_socket(line, server_hostname="127.0.0.1")
                else:
                    trusts.wrap_socket(line, server_hostname="127.0.0.1").close()
        finally:
            answering.join()
