"""The processes of a federation: SuperLink and proxy, a client's SuperNode, and the run itself."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from feddrift.deploy.monitor.alerts import Notifier
from feddrift.deploy.monitor.logs import read_stop_reason, rotate_in_background
from feddrift.deploy.monitor.status import RecordWatcher
from feddrift.deploy.pki import app_signature
from feddrift.deploy.processes import control, flower_preload, runtime
from feddrift.deploy.processes.process_tree import EXECUTOR_PROGRAM, ExecutorMonitor, end_process_tree
from feddrift.deploy.settings import Settings, read_public_key
from feddrift.engines.flower.client.client_toml import read_client_toml
from feddrift.errors import ConfigError, DataError
from feddrift.runs.record import Record

BACKOFF = 5.0, 30.0  # seconds until a client tries again, at first and at most: a server takes a minute to miss it
DISCONNECT_SECONDS = 120.0  # seconds after which a server has missed a client that is gone
STATUS_INTERVAL_SECONDS = 5  # seconds between questions after the state of a run
MAX_LISTED_RUNS = 10  # runs among which the one that is on must be: it is one of the newest
START_TIMEOUT_SECONDS = 60.0  # seconds until a server's processes must answer

_log = logging.getLogger("feddrift")


def build_environment(folder: Path) -> dict[str, str]:
    """Flower's own settings: nothing phones home or is installed at run time, and its files stay in the folder."""
    return os.environ | {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_HOME": str(folder / "flwr"),
        # Flower starts its own programs by name: they are beside this Python, whether that is on the path or not.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
    }


def find_program(name: str) -> str:
    """A command of Flower's, from this very environment."""
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise ConfigError(f"{path} is missing, install the extra: pip install 'feddrift[flower]'")
    return str(path)


def find_server_folder(folder: Path) -> Path:
    """Return the folder that contains federation.toml: this folder or its subfolder `server`.

    Raises:
        ConfigError: If neither contains it.
    """
    path = folder.resolve() if (folder / "federation.toml").exists() else (folder / "server").resolve()
    if not (path / "federation.toml").exists():
        raise ConfigError(f"{folder} has no federation.toml, `feddrift deploy init` makes one")
    return path


def read_ports(server: Path) -> tuple[int, int]:
    """The port that clients reach, and the SuperLink's own behind it."""
    text = (server / "nginx.conf").read_text()
    outer = re.search(r"listen (?:\S+:)?([0-9]+) ssl;", text)
    inner = re.search(r"proxy_pass https://127\.0\.0\.1:([0-9]+);", text)
    if outer is None or inner is None:
        raise ConfigError(f"{server / 'nginx.conf'} must listen on a port with ssl and pass to one of 127.0.0.1")
    return int(outer[1]), int(inner[1])


def read_proxy_address(server: Path) -> str:
    """An address of this machine at which nginx listens."""
    found = re.search(r"listen (?:(\S+):)?[0-9]+ ssl;", (server / "nginx.conf").read_text())
    return found[1].strip("[]") if found and found[1] else "127.0.0.1"


def build_superlink_command(server: Path) -> list[str]:
    """The command that starts the SuperLink, on this machine's loopback only."""
    return [
        find_program("flower-superlink"), "--host", "127.0.0.1", "--port", str(read_ports(server)[1]),
        "--ssl-certfile", str(server / "server.crt"), "--ssl-keyfile", str(server / "server.key"),
        "--ssl-ca-certfile", str(server / "ca.crt"), "--enable-supernode-auth",
        "--disable-runtime-dependency-installation", "--database", str(server / "state" / "superlink.db"),
    ]  # fmt: skip


def build_supernode_command(folder: Path, address: str | None = None, port: int | None = None) -> list[str]:
    """The command that starts a client, with its runtime API on this port of loopback."""
    settings = read_client_toml(folder)
    server = address or settings.get("server")
    if server is None:
        raise ConfigError(f"{folder / 'client.toml'} must name the server, host:port")
    own = find_program("flower-supernode")
    return [
        *(flower_preload.build_command("flower-supernode", settings.get("look")) if settings.get("warm", True) else [own]),
        "--superlink", server, "--root-certificates", str(folder / "ca.crt"),
        "--auth-supernode-private-key", str(folder / "key"), "--host", "127.0.0.1",
        "--port", str(port or find_free_port()), "--node-config", f"folder={json.dumps(str(folder))}",
        *runtime.build_supernode_arguments(folder), *app_signature.build_trust_arguments(folder),
    ]  # fmt: skip


def find_free_port() -> int:
    """A port of this machine's loopback that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_server(folder: Path, proxy: bool = True) -> None:
    """Run the SuperLink and, in front of it, nginx; returns when one of them ends or this process is told to."""
    server = find_server_folder(folder)
    outer, inner = read_ports(server)
    commands = [build_superlink_command(server)]
    app_signature.sign_app(server)
    nginx = shutil.which("nginx") or shutil.which("/usr/sbin/nginx")
    if proxy and nginx is None:
        raise ConfigError("nginx is not installed; without it (--no-proxy) only clients on this machine can connect")
    if proxy and nginx is not None:
        commands.append([nginx, "-p", str(server), "-c", str(server / "nginx.conf")])
    dead = _find_unfinished_runs(server / "state" / "superlink.db")
    with _run_processes(commands, build_environment(server)) as children:
        _wait_until(lambda: _can_connect(inner), "the SuperLink to listen", children)
        register_keys(server)
        for name in dead:
            with suppress(DataError), _connect(server) as link:  # the SuperLink may have missed it by now
                link.stop_run(name)
        if proxy:
            at = read_proxy_address(server)
            _wait_until(lambda: _can_connect(outer, at), "nginx to listen", children)
        _log.info("clients can connect to port %d", outer if proxy else inner)
        herald = Notifier(server, Settings.read(server / "federation.toml").notify)
        with herald.run_in_background(), rotate_in_background(server / "state" / "nginx.log"):
            ended = _wait_for_end(children)
    raise DataError(f"the server stops, since {ended}: see its output, and start it again")


def register_keys(server: Path) -> None:
    """Make the clients' keys, and no others, known to the SuperLink."""
    known = _read_registered_keys(server / "state" / "superlink.db")
    keys = {path.stem: read_public_key(path) for path in sorted((server / "keys").glob("*.pub"))}
    for name in (name for name, key in keys.items() if known.get(key, 0) is None):
        _log.warning("the key of client %s was shut out, which is for good: give it a new one", name)
    new = {name: key for name, key in keys.items() if key not in known}
    gone = [node for key, node in known.items() if key not in keys.values() and node is not None]
    if new or gone:
        with _connect(server) as link:
            for name, key in new.items():
                link.register_client(name, key)
            for node in gone:
                link.unregister_node(node)


def _connect(server: Path) -> control.SuperLinkConnection:
    return control.SuperLinkConnection(f"127.0.0.1:{read_ports(server)[1]}", server / "ca.crt")


def _read_registered_keys(database: Path) -> dict[bytes, int | None]:
    """By key, the node that the SuperLink has for it; None: it was shut out. No command of Flower's tells the keys."""
    try:
        with closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)) as opened:
            rows = opened.execute("SELECT public_key, node_id, status FROM node").fetchall()
    except sqlite3.Error as error:
        raise DataError(f"cannot read the keys in {database}, which the SuperLink writes: {error}") from None
    return {key: None if status == "unregistered" else node % 2**64 for key, node, status in rows}  # it is kept signed


def _find_unfinished_runs(database: Path) -> list[int]:
    """Runs that ended with the server before this one: the SuperLink would miss them after a minute only."""
    if not database.exists():
        return []
    query = "SELECT run.run_id FROM run JOIN task ON task_id = primary_task_id WHERE finished_at IS NULL"
    try:
        with closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)) as opened:
            return [name % 2**64 for (name,) in opened.execute(query)]
    except sqlite3.Error as error:
        _log.warning("cannot read the runs in %s, a run that is on is missed in a minute: %s", database, error)
        return []


def run_client(folder: Path, address: str | None = None) -> None:
    """Run a client, again and again: a server that takes it to be connected still refuses it for a minute."""
    folder, wait = folder.resolve(), BACKOFF[0]
    if not (folder / "client.toml").exists():
        raise ConfigError(f"{folder} is no client's folder: it has no client.toml")
    since = time.monotonic()  # it was let in last, or has tried to
    while True:
        began = time.monotonic()
        ended = _run_client_processes(folder, address)
        if time.monotonic() - began > DISCONNECT_SECONDS:
            wait, since = BACKOFF[0], time.monotonic()
        elif EXECUTOR_PROGRAM not in ended:
            server = address or read_client_toml(folder).get("server", "")
            ended = f"{ended}: {_explain_refusal(server, time.monotonic() - since)}"
        _log.warning("%s; the client starts again in %g s", ended, wait)
        time.sleep(wait)
        wait = min(2 * wait, BACKOFF[1])


def _explain_refusal(server: str, seconds: float) -> str:
    """What it means that a client has not been let in for so long: Flower's own words are a code."""
    host, _, port = server.rpartition(":")
    if not _can_connect(int(port) if port.isdecimal() else 0, host):
        return f"the server, {server}, cannot be reached"
    if seconds < DISCONNECT_SECONDS:
        return "the server lets nobody in whom it takes to be connected, and it takes a minute to miss a client"
    return (
        f"the server has not let it in for {seconds / 60:.0f} minutes: its key was taken back or replaced there "
        "(`feddrift deploy rotate` gives it another), or its clock is off (`feddrift deploy check` says so)"
    )


def _run_client_processes(folder: Path, address: str | None) -> str:
    """A SuperNode and its SuperExec, from their start until one of them has ended; which it is."""
    runtime.prepare_runtime_files(folder)
    port, env = find_free_port(), build_environment(folder)
    with _run_processes([build_supernode_command(folder, address, port)], env) as children:
        try:
            _wait_until(
                lambda: _can_connect(port), "the SuperNode to listen", children, 3 * START_TIMEOUT_SECONDS
            )  # small machines are slow
        except DataError as error:
            return str(error)
        own = (
            flower_preload.build_command(EXECUTOR_PROGRAM)
            if read_client_toml(folder).get("warm", True)
            else [find_program(EXECUTOR_PROGRAM)]
        )
        command = [*own, *runtime.build_superexec_arguments(folder, port, children[0].pid)]
        children.append(subprocess.Popen(command, env=env, start_new_session=True))
        return _wait_for_end(children)


def follow_federation(folder: Path) -> Iterator[tuple[Record, int, bool]]:
    """Start the federation, or follow it where it runs; each time step when it is trained, and when it is tested."""
    server = find_server_folder(folder)
    watch = RecordWatcher(server)
    with _connect(server) as link:
        active = [
            name for name, status in link.list_runs(limit=MAX_LISTED_RUNS).items() if not status.startswith("finished")
        ]
        if active:
            name = active[0]
        else:
            config = f"folder={json.dumps(str(server))}"
            answer = run_flwr_command(server, "run", str(server / "app"), "local", "--run-config", config, link=False)
            if "run-id" not in answer:
                raise DataError(f"Flower did not start the run: {answer}")
            name = int(answer["run-id"])
        status = ""
        while not status.startswith("finished"):
            for _ in range(STATUS_INTERVAL_SECONDS):  # at the file, which is nearer
                time.sleep(1)
                yield from watch.read_new_steps()
            status = link.list_runs(run_id=name).get(name, "finished:lost")
    yield from watch.read_new_steps()
    if status != "finished:completed":
        raise DataError(f"the run has ended ({status}): {read_stop_reason(server / 'state' / 'server.log')}")


def run_flwr_command(server: Path, *words: str, link: bool = True) -> dict[str, Any]:
    """What a command of Flower's says, about the SuperLink of this server."""
    command = [find_program("flwr"), *words, *(["local"] if link else []), "--format", "json"]
    result = subprocess.run(command, env=build_environment(server), capture_output=True, text=True, timeout=120)
    try:
        return dict(json.loads(result.stdout[result.stdout.index("{") :]))
    except ValueError:
        raise DataError(f"{' '.join(words[:2])} failed: {(result.stderr or result.stdout).strip()[-400:]}") from None


def is_server_running(server: Path) -> bool:
    """Whether the SuperLink of this server runs, on this machine."""
    return _can_connect(read_ports(server)[1])


def _can_connect(port: int, address: str = "127.0.0.1") -> bool:
    try:
        socket.create_connection((address, port), timeout=1).close()
    except OSError:
        return False
    return True


def _wait_until(
    true: Callable[[], bool],
    what: str,
    children: Sequence[subprocess.Popen[bytes]],
    patience: float = START_TIMEOUT_SECONDS,
) -> None:
    end = time.monotonic() + patience
    while not true():
        if time.monotonic() > end or any(child.poll() is not None for child in children):
            raise DataError(f"waited for {what}: it does not, see the output")
        time.sleep(0.2)


def _wait_for_end(children: Sequence[subprocess.Popen[bytes]]) -> str:
    """Wait until one of these has ended, or what runs apps for it, without which it would be mute; which it is."""
    names = {child.pid: _find_program_name(child) for child in children}
    executors = ExecutorMonitor(pid for pid, name in names.items() if name == "flower-superlink")
    while True:
        for child in children:
            if child.poll() is not None:
                return f"{names[child.pid]} has ended with code {child.returncode}"
        if executors.has_lost_executor():
            return f"{EXECUTOR_PROGRAM} has ended"
        time.sleep(1)


def _find_program_name(child: subprocess.Popen[bytes]) -> str:
    """The program: with a warm start its name is not the first word."""
    names = [Path(word).name for word in map(str, child.args)]  # type: ignore[arg-type]
    return next((name for name in names if name.startswith("flower-")), names[0])


@contextmanager
def _run_processes(commands: Sequence[list[str]], env: dict[str, str]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run these, each in a group of its own, and end them and all that they started when this ends."""

    def stop(*_: object) -> None:
        raise SystemExit(0)

    before = signal.signal(signal.SIGTERM, stop)
    children: list[subprocess.Popen[bytes]] = []
    try:
        children += (subprocess.Popen(command, env=env, start_new_session=True) for command in commands)
        yield children
    finally:
        for child in children:
            end_process_tree(child)
        signal.signal(signal.SIGTERM, before)
