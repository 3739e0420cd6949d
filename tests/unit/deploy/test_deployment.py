"""Folders of a deployment: `init` writes them, `check` reports problems, `status` shows their state."""

from __future__ import annotations

import errno
import fcntl
import http.server
import importlib.metadata
import os
import re
import shutil
import signal
import ssl
import stat
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from packaging.requirements import Requirement

from feddrift._internal.system import lock_folder
from feddrift.cli import app
from feddrift.deploy.flower_version import TESTED_FLWR
from feddrift.deploy.operate import check as checks
from feddrift.deploy.operate import scaffold
from feddrift.deploy.operate.check import find_problems
from feddrift.deploy.processes import control, launcher, process_tree, proxy
from feddrift.deploy.settings import Settings, read_public_key
from feddrift.engines.flower.client.client import load_client
from feddrift.engines.flower.client.store import Store
from feddrift.errors import BusyError, ConfigError, DataError
from feddrift.runs.locks import is_being_written
from feddrift.runs.record import get_part_path
from tests.support.documentation import ROOT
from tests.support.flower import open_link_state

OPTIONS = ["--clients", "a,b", "--features", "2", "--classes", "no,yes"]


@pytest.fixture
def made(tmp_path: Path) -> Path:
    scaffold.create_deployment(
        tmp_path / "fed", ["a", "b"], [2], ["no", "yes"], host="fed.example.org", port=18443, inner=18444
    )
    return tmp_path / "fed"


def join_problems(folder: Path) -> str:
    return "\n".join(problem for problem in find_problems(folder) if "nginx is not installed" not in problem)


def test_check_accepts_the_folders_that_init_writes(made: Path) -> None:
    assert join_problems(made) == join_problems(made / "server") == ""
    settings = Settings.read(made / "server" / "federation.toml")
    assert settings.clients == ("a", "b") and settings.read_roster(made / "server" / "keys").n_classes == 2
    assert (made / "clients" / "a" / "data" / "classes.txt").read_text() == "no\nyes\n"


def test_a_new_federation_needs_no_settings_and_an_older_one_keeps_its_own(made: Path) -> None:
    path = made / "server" / "federation.toml"
    settings = Settings.read(path)
    assert (settings.algorithm, settings.settings, settings.defend) == ("FedDrift-Auto", {}, "robust")
    assert settings.share_from == 0
    for line, expected in (("# no line", False), ("defend = false", False), ("defend = true", True)):
        older = path.read_text().replace('\ndefend = "robust"', f"\n{line}")
        assert Settings.from_dict(tomllib.loads(older), "here").defend is expected
    wrong = path.read_text().replace('"robust"', '"all"')
    with pytest.raises(ConfigError, match=r"here: defend must be robust, true .* or false, got 'all'"):
        Settings.from_dict(tomllib.loads(wrong), "here")
    (line,) = (line for line in path.read_text().splitlines() if "algorithm =" in line)
    path.write_text(path.read_text().replace(line, ""))
    assert Settings.read(path).algorithm == "FedDrift" and join_problems(made) == ""
    path.write_text(f"{path.read_text()}delta = 0.2\n")
    assert Settings.read(path).settings == {"delta": 0.2}
    path.write_text(path.read_text().replace("[settings]", f"{line}\n[settings]"))
    assert "FedDrift-Auto has no settings, got 'delta'" in join_problems(made)


def test_secrets_are_for_the_owner_alone_and_a_clients_key_stays_with_it(made: Path) -> None:
    secrets = [made / "server" / "ca.key", made / "server" / "server.key", made / "clients" / "a" / "key"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in secrets} == {0o600}
    private = (made / "clients" / "a" / "key").read_text()
    assert all(private not in path.read_text() for path in (made / "server").rglob("*") if path.is_file())
    keys = {(made / "clients" / name / "key").read_text() for name in "ab"}
    assert len(keys) == 2
    load_ssh_private_key(private.encode(), None)


def test_the_certificate_is_for_the_host_and_for_loopback(made: Path) -> None:
    found = x509.load_pem_x509_certificate((made / "server" / "server.crt").read_bytes())
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "fed.example.org"]


def test_the_superlink_is_on_loopback_with_keys_and_no_installs(made: Path) -> None:
    command = " ".join(launcher.build_superlink_command(made / "server"))
    assert "--host 127.0.0.1 --port 18444" in command and "--enable-supernode-auth" in command
    assert "--disable-runtime-dependency-installation" in command and "--insecure" not in command
    quiet = launcher.build_environment(made / "server")
    assert (quiet["FLWR_TELEMETRY_ENABLED"], quiet["FLWR_DISABLE_UPDATE_CHECK"]) == ("0", "1")
    assert "--insecure" not in launcher.build_supernode_command(made / "clients" / "a")


def test_the_proxy_forwards_the_fleet_path_only(made: Path) -> None:
    text = (made / "server" / "nginx.conf").read_text()
    assert re.findall(r"location (\S+) ", text) == ["/v1/fleet/", "/"] and "location / { return 403; }" in text
    assert "proxy_ssl_verify on" in text and launcher.read_ports(made / "server") == (18443, 18444)


@pytest.mark.parametrize(
    ("lines", "address"),
    [
        ("listen 9443 ssl;", "127.0.0.1"),  # of older versions
        ("listen 9443 ssl;\n    listen [::]:9443 ssl;", "127.0.0.1"),
        ("listen 192.0.2.1:9443 ssl;", "192.0.2.1"),
        ("listen [2001:db8::1]:9443 ssl;", "2001:db8::1"),
    ],
)
def test_where_the_proxy_listens(made: Path, lines: str, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "_has_ipv6", lambda: "[::]" in lines)
    assert proxy.format_listen_directives(None if address == "127.0.0.1" else address, 9443) == lines
    path = made / "server" / "nginx.conf"
    path.write_text(re.sub(r"(?m)(^ *listen \S*18443 ssl;\n)+", f"    {lines}\n", path.read_text()))
    assert (
        launcher.read_ports(made / "server") == (9443, 18444)
        and launcher.read_proxy_address(made / "server") == address
    )


def test_clients_of_a_server_with_an_address_of_ipv6(tmp_path: Path) -> None:
    scaffold.create_deployment(tmp_path / "fed", ["a"], [2], ["no", "yes"], host="2001:db8::1", bind="2001:db8::1")
    scaffold.add_client(tmp_path / "fed", "late")
    for name in ("a", "late"):
        assert 'server = "[2001:db8::1]:9443"' in (tmp_path / "fed" / "clients" / name / "client.toml").read_text()


def test_services_start_again(made: Path) -> None:
    units = sorted(made.rglob("*.service"))
    assert [unit.name for unit in units].count("feddrift-client.service") == 2 and len(units) == 4
    for unit in units:
        text = unit.read_text()
        assert re.search(r"Restart=(always|on-failure)", text) and "FLWR_TELEMETRY_ENABLED=0" in text
        assert f"ProtectSystem=strict\nReadWritePaths={unit.parent}\n" in text  # and to no other folder


def test_a_second_init_touches_nothing(made: Path) -> None:
    with pytest.raises(ConfigError, match="not empty"):
        scaffold.create_deployment(made, ["a"], [2], ["0", "1"])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"clients": ["a", "a"]}, "different names"),
        ({"clients": ["../x"]}, "the name of a client must"),
        ({"classes": ["0"]}, "classes"),
        ({"experiment": "a b"}, "the name of an experiment must"),
        ({"bind": "fed.example.org"}, "--bind must be an IP address of the server, .* got 'fed.example.org'"),
    ],
)
def test_init_refuses(options: dict[str, object], sentence: str, tmp_path: Path) -> None:
    given = {"clients": ["a"], "features": [2], "classes": ["0", "1"], **options}
    with pytest.raises(ConfigError, match=sentence):
        scaffold.create_deployment(tmp_path / "fed", **given)  # type: ignore[arg-type]


def test_add_makes_a_place_behind_the_others(made: Path) -> None:
    scaffold.add_client(made, "late")
    assert Settings.read(made / "server" / "federation.toml").clients == ("a", "b", "late")
    assert join_problems(made) == ""
    with pytest.raises(ConfigError, match="already"):
        scaffold.add_client(made, "late")


@pytest.mark.parametrize("given", ["fed", "fed/server"])
def test_add_needs_the_servers_folder_only(made: Path, given: str) -> None:
    """The clients' folders are where they belong."""
    shutil.rmtree(made / "clients")
    folder = made.parent / given
    scaffold.add_client(folder, "late")
    assert Settings.read(made / "server" / "federation.toml").clients == ("a", "b", "late")
    client = folder / "clients" / "late"
    assert 'server = "fed.example.org:18443"' in (client / "client.toml").read_text()
    assert (client / "data" / "classes.txt").read_text() == "no\nyes\n" and join_problems(folder) == ""
    scaffold.add_client(folder, "later")
    (made / "server" / "keys" / "latest.pub").touch()
    with pytest.raises(ConfigError, match=r"latest.pub exists already: move it away"):
        scaffold.add_client(folder, "latest")


@pytest.mark.parametrize(
    ("installed", "is_reported"), [(TESTED_FLWR[0], False), ("1.41.7", False), ("1.42.0", True), ("2.0", True)]
)
def test_an_untested_flower_is_reported_and_not_refused(
    installed: str, is_reported: bool, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[Path] = []
    monkeypatch.setattr(importlib.metadata, "version", lambda name: installed)
    monkeypatch.setattr(launcher, "run_server", lambda folder, proxy: served.append(folder))
    result = CliRunner().invoke(app, ["deploy", "server", str(made / "server")])
    sentence = f"flwr {installed} is installed, with which this feddrift is not tested"
    assert served == [made / "server"]
    assert (sentence in result.output.replace("\n", " ")) == is_reported
    assert any(problem.startswith(sentence) for problem in find_problems(made)) == is_reported


def test_the_flower_extra_allows_the_tested_versions() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (requirement,) = (Requirement(text) for text in extras["flower"] if text.startswith("flwr"))
    assert all(requirement.specifier.contains(version) for version in TESTED_FLWR)


@pytest.fixture
def open_for_test() -> Iterator[ExitStack]:
    """Whatever is entered here is closed when the test ends."""
    with ExitStack() as stack:
        yield stack


@pytest.mark.filterwarnings("ignore:No path_separator:DeprecationWarning")  # of Flower's database
def test_a_key_that_is_no_longer_assigned_is_refused(
    made: Path, open_for_test: ExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In Flower's own database; a client that gets a new key is known by that one."""
    server, said = made / "server", list[str]()
    database = server / "state" / "superlink.db"
    link = open_for_test.enter_context(open_link_state(database))

    class Link(control.SuperLinkConnection):
        def __init__(self, address: str, authority: Path) -> None:
            assert (address, authority) == ("127.0.0.1:18444", server / "ca.crt")

        def __exit__(self, *_: object) -> None:
            pass

        def register_client(self, name: str, key: bytes) -> None:
            said.append(f"new {name}")
            link.create_node("me", "me", key, 30.0)

        def unregister_node(self, node: int) -> None:
            said.append("gone")
            link.delete_node("me", node)

    monkeypatch.setattr(control, "SuperLinkConnection", Link)
    launcher.register_keys(server)
    launcher.register_keys(server)
    old, other = (read_public_key(server / "keys" / f"{name}.pub") for name in "ab")
    scaffold.create_deployment(made.parent / "other", ["x"], [2], ["no", "yes"])
    (server / "keys" / "a.pub").rename(made / "old.pub")
    shutil.copy(made.parent / "other" / "server" / "keys" / "x.pub", server / "keys" / "a.pub")
    launcher.register_keys(server)
    assert said == ["new a", "new b", "new a", "gone"]
    known = launcher._read_registered_keys(database)
    assert known[old] is None and known[other] is not None and len(known) == 3
    shutil.copy(made / "old.pub", server / "keys" / "a.pub")
    launcher.register_keys(server)  # the new key is shut out in its turn
    assert said[4:] == ["gone"] and "client a was revoked permanently" in caplog.text


@pytest.mark.filterwarnings("ignore:No path_separator:DeprecationWarning")  # of Flower's migrations
def test_a_server_knows_which_runs_ended_with_the_one_before(made: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By Flower's own database, before Flower has looked at it; once stopped, a run is dead no more."""
    database = made / "server" / "state" / "superlink.db"
    assert launcher._find_unfinished_flower_runs(database) == []
    words: tuple[Any, ...] = ("a/b", "1", "hash", {}, "@none/default", None, "me", "flwr-serverapp")
    with open_link_state(database) as link:
        runs = [link.create_run(*words) for _ in range(2)]
        assert sorted(launcher._find_unfinished_flower_runs(database)) == sorted(runs) and all(runs)
        assert link.stop_run(runs[0]) and launcher._find_unfinished_flower_runs(database) == runs[1:]
    other = database.with_name("other.db")
    other.write_bytes(b"no database")
    assert launcher._find_unfinished_flower_runs(other) == []
    assert "an unfinished run ends only after a minute" in caplog.text


def wait_until(true: Callable[[], object]) -> None:
    """On a busy machine, too."""
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


FAMILY = """
import subprocess, sys, time
code = "import subprocess, sys, time; subprocess.Popen(['sleep', '600']); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", code, "flower-superexec"], start_new_session=True)
time.sleep(600)
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the system has no /proc")
def test_ending_a_process_tree_includes_processes_with_their_own_session() -> None:
    """As Flower's server starts what runs its apps."""
    child = subprocess.Popen([sys.executable, "-c", FAMILY], start_new_session=True)
    wait_until(lambda: len(process_tree.find_descendants(child.pid)) == 2)
    family = process_tree.find_descendants(child.pid)
    process_tree.end_process_tree(child)
    pids = {(process.pid, process.start_time) for process in process_tree.list_processes()}
    assert child.returncode is not None and not pids & {(process.pid, process.start_time) for process in family}


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the system has no /proc")
def test_an_executor_that_was_killed_is_missed() -> None:
    child = subprocess.Popen([sys.executable, "-c", FAMILY], start_new_session=True)
    try:
        executors = process_tree.ExecutorMonitor([child.pid])
        wait_until(lambda: len(process_tree.find_descendants(child.pid)) == 2)
        assert not executors.has_lost_executor() and not executors.has_lost_executor()
        executor, _ = process_tree.find_descendants(child.pid)
        os.kill(executor.pid, signal.SIGKILL)  # its parent does not bury it
        wait_until(executors.has_lost_executor)
        assert child.poll() is None
        assert not process_tree.ExecutorMonitor([child.pid]).has_lost_executor()  # it may still be about to start it,
        wait_until(process_tree.ExecutorMonitor([child.pid], patience=0).has_lost_executor)  # but not for ever
    finally:
        process_tree.end_process_tree(child)


def spoil(made: Path, what: str) -> None:
    server, client = made / "server", made / "clients" / "a"
    if what == "open key":
        (client / "key").chmod(0o644)
    elif what == "other key":
        (client / "key.pub").write_text((made / "clients" / "b" / "key.pub").read_text())
    elif what == "stranger":
        (server / "keys" / "eve.pub").write_text((server / "keys" / "a.pub").read_text())
    elif what == "same key":
        (server / "keys" / "b.pub").write_text((server / "keys" / "a.pub").read_text())
    elif what == "other certificate":
        (server / "server.crt").write_text((server / "ca.crt").read_text())
    elif what == "setting":
        (server / "federation.toml").write_text((server / "federation.toml").read_text().replace("features", "featurs"))
    elif what == "algorithm":
        settings = (server / "federation.toml").read_text()
        (server / "federation.toml").write_text(settings.replace('"FedDrift-Auto"', '"Oracle"'))
    elif what == "quorum":
        (server / "federation.toml").write_text("quorum = 9\n" + (server / "federation.toml").read_text())
    elif what == "client setting":
        (client / "client.toml").write_text('name = "a"\nmax_rws = 3\n')
    elif what == "classes":
        (client / "data" / "classes.txt").unlink()
    elif what == "gap":
        (client / "data" / "step_0.csv").touch()
        (client / "data" / "step_2.csv").touch()
        (client / "store" / "first" / "a" / "cells").mkdir(parents=True)
        (client / "store" / "first" / "a" / "cells" / "000000-5.cell").touch()
    elif what.startswith("data: "):
        (client / "data" / "step_0.csv").write_text(what.removeprefix("data: "))
    elif what.startswith("load: "):
        module = f"mine_{len(what)}"  # a module is imported once
        (client / f"{module}.py").write_text(what.removeprefix("load: "))
        (client / "client.toml").write_text(f'load = "{module}:load"\n{(client / "client.toml").read_text()}')
    elif " = " in what:
        path = client / "client.toml"
        if what.startswith("features"):
            path = server / "federation.toml"
            path.write_text(re.sub(r"(?m)^features.*$", "", path.read_text()))
        path.write_text(f"{what}\n{path.read_text()}")


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("open key", "can be read by others: chmod 600"), ("other key", "does not belong to"),
        ("stranger", "keys of eve"), ("same key", "several clients have the same key"),
        ("other certificate", "do not fit together|not the key"),
        ("setting", "featurs"), ("algorithm", "Oracle needs the true concepts"),
        ("quorum", r"quorum must be in 1\.\.2, got 9"),
        ("client setting", "max_rws"), ("classes", "classes.txt"),
        ("max_rows = -1", "max_rows must be a whole number, at least 1, got -1"),
        ("max_rows = 0", "max_rows must be a whole number, at least 1, got 0"),
        ("max_age = 2.5", "max_age must be a whole number, at least 1, got 2.5"),
        ("label = 3", "label must be text in quotes, got 3"), ("load = true", "load must be text in quotes, got True"),
        ("features = [224, 224, 3]", r"features = \[224, 224, 3\] the net has 5e\+10 weights, at most 3e\+08"),
        ("features = [1000000, 1000000]", r"2e\+24 weights"),
        ("gap", "has step_2 and no step_1, for which the client waits"),
        ("data: x,y\n1,2\n", r"data/step_0\.csv.*label"),
        ("data: x,y,label\n1,2,maybe\n", r"data/step_0\.csv.*maybe"),
        ("data: x,y,label\n1,much,no\n", r"data/step_0\.csv.*much"),
        ("data: x,y,z,label\n1,2,3,no\n", r"step_0\.csv: batch 0: features of shape \(3,\), the federation has \(2,\)"),
        ("load: def load(n): return [[1, 2]], [7]", r"clients/a: load\(0\): .*7"),
        ("load: def load(n): raise OSError('gone')", r"clients/a: load\(0\) fails: OSError: gone"),
    ],
)  # fmt: skip
def test_check_reports_problems(made: Path, what: str, sentence: str) -> None:
    spoil(made, what)
    assert re.search(sentence, join_problems(made)), join_problems(made)


def test_check_reports_a_custom_net_that_does_not_accept_the_features(made: Path) -> None:
    server = made / "server"
    (server / "three_inputs.py").write_text("import feddrift as fd\n\nnet = fd.mlp(3, 4, 2)\n")
    settings = (server / "federation.toml").read_text()
    (server / "federation.toml").write_text('model = "three_inputs:net"\n' + settings)
    assert "the net takes 3 features, the stream has 2" in join_problems(made / "server")


@pytest.mark.parametrize("folder", ["server", "clients/a"])
def test_check_names_a_clock_that_is_before_the_certificates(
    made: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "_check_clock", lambda client: [])  # which asks the server
    assert join_problems(made / folder) == ""
    now = datetime.now(UTC)
    monkeypatch.setattr(checks, "_read_clock", lambda: now - timedelta(days=1))
    assert re.match(
        r"the clock of this machine is wrong: it shows .* UTC, but .*/ca.crt was created at",
        join_problems(made / folder),
    )


class Wrong(http.server.BaseHTTPRequestHandler):
    """A server whose clock is off by so many seconds."""

    off = 0.0

    def date_time_string(self, timestamp: float | None = None) -> str:
        return super().date_time_string(time.time() + self.off)

    def do_GET(self) -> None:
        self.send_error(403)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(("off", "said"), [(0, ""), (-3600, "s ahead of"), (3600, "s behind")])
def test_check_names_a_clock_that_is_off_by_the_servers(made: Path, off: float, said: str) -> None:
    handler = type("Off", (Wrong,), {"off": off})
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as server:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(made / "server" / "server.crt", made / "server" / "server.key")
        server.socket = tls.wrap_socket(server.socket, server_side=True)
        answering = threading.Thread(target=server.serve_forever, args=(0.05,))
        answering.start()
        try:
            settings = made / "clients" / "a" / "client.toml"
            address = f"localhost:{server.server_port}"
            settings.write_text(settings.read_text().replace("fed.example.org:18443", address))
            told = join_problems(made / "clients" / "a")
        finally:
            server.shutdown()
            answering.join()
    assert told.startswith("the clock of this machine is 3") and said in told if said else told == ""


def test_the_commands(tmp_path: Path) -> None:
    run, fed = CliRunner(), tmp_path / "fed"
    assert run.invoke(app, ["deploy", "init", str(fed), *OPTIONS]).exit_code == 0
    told = run.invoke(app, ["deploy", "check", str(fed)])
    assert "nothing is wrong" in told.output or "nginx is not installed" in told.output
    (fed / "clients" / "a" / "key").chmod(0o644)
    told = run.invoke(app, ["deploy", "check", str(fed)])
    assert told.exit_code == 1 and "chmod 600" in told.output
    assert "no time step" in run.invoke(app, ["deploy", "status", str(fed)]).output


def test_flowers_programs_are_found_without_an_activated_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    found = shutil.which("flower-superexec", path=launcher.build_environment(tmp_path)["PATH"])
    assert found is not None and Path(found).parent == Path(sys.executable).parent


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("no-such-program x", "this program does not exist"),
        ("cat >> alerts.jsonl", "which >> needs"),
        ("mail 'ops", "cannot be read"),
        ("", "this program does not exist"),
    ],
)
def test_check_reports_notification_commands_that_cannot_run(made: Path, command: str, said: str) -> None:
    settings = made / "server" / "federation.toml"
    text = settings.read_text()
    settings.write_text(f'notify = ["{command}"]\n' + text)
    assert said in join_problems(made)
    settings.write_text('notify = ["cat", "https://example.org/hook"]\n' + text)
    assert "notify" not in join_problems(made)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["init", "new", *OPTIONS[:4], "--classes", "0"], "at least two labels"),
        (["init", "new", *OPTIONS, "--port", "7000", "--inner", "7000"], "must be different"),
        (["init", "new", *OPTIONS, "--port", "70000"], "70000"),
        (["client", "nowhere"], "is not a client's folder"),
        (["rotate", "fed/server", "nobody"], "nobody"),
        (["page", "fed", "--port", "80000"], "80000"),
    ],
)
def test_mistakes_of_operators_give_a_one_sentence_error(
    made: Path, words: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made.parent)
    told = CliRunner().invoke(app, ["deploy", *words])
    assert told.exit_code and sentence in str(told.exception) + told.output
    assert not Path("new").exists()


def test_check_looks_at_the_batch_that_the_client_shows_next(made: Path) -> None:
    """On the client's own machine, too, where what the server said last tells the features."""
    client = made / "clients" / "a"
    (client / "data" / "step_0.csv").write_text("x,y,label\n1,2,no\n")
    assert join_problems(client) == join_problems(made) == ""
    store = Store(client / "store", "first", "a")
    store.take_next_batch(load_client(client).load, 0, (2,), 2)
    store.write_serving({"features": [2], "n_classes": 2})
    (client / "data" / "step_0.csv").write_text("what is past is past")
    assert join_problems(client) == ""
    (client / "data" / "step_1.csv").write_text("x,label\n1,no\n")
    assert "step_1.csv: batch 1: features of shape (1,), the federation has (2,)" in join_problems(client)


def test_the_reason_of_a_refused_connection_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_can_connect", lambda port, address: (port, address) == (9443, "fed.example.org"))
    reason = launcher._explain_refusal(tmp_path, "other.example.org:9443", 5)
    assert reason.startswith("cannot connect to the server other.example.org:9443: ")
    assert "may still consider this client connected" in launcher._explain_refusal(tmp_path, "fed.example.org:9443", 5)
    told = launcher._explain_refusal(tmp_path, "fed.example.org:9443", 200)
    assert told.startswith("the server has refused this client for 3 minutes: its key was revoked or replaced there")


def test_a_client_retries_and_logs_the_reason(
    made: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It worked for a while, lost its SuperExec, and then its key was taken back."""
    now, lives = [0.0], [(500.0, "flower-supernode has ended"), (5.0, "flower-superexec has ended")]
    lives += [(10.0, "flower-supernode has ended with code 1")] * 6

    def life(folder: Path, address: str | None) -> str:
        if not lives:
            raise KeyboardInterrupt
        seconds, ended = lives.pop(0)
        now[0] += seconds
        return ended

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(launcher, "time", clock)
    monkeypatch.setattr(launcher, "_run_client_processes", life)
    monkeypatch.setattr(launcher, "_can_connect", lambda port, address: True)
    with pytest.raises(KeyboardInterrupt):
        launcher.run_client(made / "clients" / "a")
    told = [line.getMessage() for line in caplog.records]
    assert told[:2] == [f"{program} has ended; the client starts again in {s} s" for program, s in
                        (("flower-supernode", 5), ("flower-superexec", 10))]  # fmt: skip
    assert "may still consider this client connected" in told[2] and "its key was revoked or replaced" in told[-1]


def test_a_folder_that_cannot_be_locked_is_not_taken_for_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with lock_folder(tmp_path, "busy"), pytest.raises(BusyError, match="busy"), lock_folder(tmp_path, "busy"):
        pass
    monkeypatch.setattr(fcntl, "flock", none)
    with (
        pytest.raises(DataError, match=r"cannot be locked \(No locks available\)") as told,
        lock_folder(tmp_path, "busy"),
    ):
        pass
    assert not isinstance(told.value, BusyError)
    get_part_path(tmp_path / "x.jsonl").touch()
    assert not is_being_written(tmp_path / "x.jsonl")
