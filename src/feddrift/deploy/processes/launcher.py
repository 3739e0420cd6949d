"""Processes of a federation: SuperLink and proxy at the server, SuperNode at a client, and the run itself."""

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

from feddrift.deploy.monitor.alerts import Notifier, audit_change
from feddrift.deploy.monitor.logs import read_stop_reason, rotate_in_background
from feddrift.deploy.monitor.status import RecordWatcher
from feddrift.deploy.pki import app_signature
from feddrift.deploy.pki.revocations import (
    hash_key,
    needs_key_confirmation,
    remove_revoked_keys,
    require_key_confirmation,
    update_revocations,
)
from feddrift.deploy.processes import control, flower_preload, runtime
from feddrift.deploy.processes.process_tree import EXECUTOR_PROGRAM, ExecutorMonitor, end_process_tree
from feddrift.deploy.settings import Settings, read_public_key
from feddrift.engines.flower.client.client_toml import describe_policy, has_policy, read_client_toml
from feddrift.engines.flower.revocations import RESTORED_MARKER, ClientRevocations, Revocation
from feddrift.errors import ConfigError, DataError, FeddriftError
from feddrift.runs.record import Record

MIN_RETRY_SECONDS = 5.0  # pause before a client that has ended starts again for the first time
MAX_RETRY_SECONDS = 30.0
DISCONNECT_SECONDS = 120.0  # after this time, a server certainly considers a client disconnected that has ended
STATUS_INTERVAL_SECONDS = 5  # between requests for the status of a run
MAX_LISTED_RUNS = 10  # number of the newest runs among which the active one is searched
START_TIMEOUT_SECONDS = 60.0  # until the processes of a server must reply

_log = logging.getLogger("feddrift")


def build_environment(folder: Path) -> dict[str, str]:
    """Return the environment variables of Flower's programs.

    They send no telemetry, install nothing at run time, and write their files into the folder.
    """
    return os.environ | {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_HOME": str(folder / "flwr"),
        # Flower starts its own programs by name: they are beside this Python, which may not be on the path.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
    }


def find_program(name: str) -> str:
    """Return the path of a Flower program in the environment of this Python."""
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise ConfigError(f"{path} is missing: install the extra with pip install 'feddrift[flower]'")
    return str(path)


def find_server_folder(folder: Path) -> Path:
    """Return the folder that contains federation.toml: this folder or its subfolder `server`.

    Raises:
        ConfigError: If neither contains it.
    """
    path = folder.resolve() if (folder / "federation.toml").exists() else (folder / "server").resolve()
    if not (path / "federation.toml").exists():
        raise ConfigError(f"{folder} has no federation.toml: `feddrift deploy init` creates one")
    return path


def read_ports(server: Path) -> tuple[int, int]:
    """Return the port to which clients connect, and the SuperLink's own port behind the proxy."""
    text = (server / "nginx.conf").read_text()
    public_port = re.search(r"listen (?:\S+:)?([0-9]+) ssl;", text)
    superlink_port = re.search(r"proxy_pass https://127\.0\.0\.1:([0-9]+);", text)
    if public_port is None or superlink_port is None:
        raise ConfigError(f"{server / 'nginx.conf'} must listen on a port with ssl, and pass to a port of 127.0.0.1")
    return int(public_port[1]), int(superlink_port[1])


def read_proxy_address(server: Path) -> str:
    """Return an address of this machine at which nginx listens."""
    found = re.search(r"listen (?:(\S+):)?[0-9]+ ssl;", (server / "nginx.conf").read_text())
    return found[1].strip("[]") if found and found[1] else "127.0.0.1"


def build_superlink_command(server: Path) -> list[str]:
    """Return the command that starts the SuperLink, on the loopback interface only."""
    return [
        find_program("flower-superlink"), "--host", "127.0.0.1", "--port", str(read_ports(server)[1]),
        "--ssl-certfile", str(server / "server.crt"), "--ssl-keyfile", str(server / "server.key"),
        "--ssl-ca-certfile", str(server / "ca.crt"), "--enable-supernode-auth",
        "--disable-runtime-dependency-installation", "--database", str(server / "state" / "superlink.db"),
    ]  # fmt: skip


def build_supernode_command(folder: Path, address: str | None = None, port: int | None = None) -> list[str]:
    """Return the command that starts a client's SuperNode.

    Args:
        folder: The client's folder.
        address: The server as host:port; None: as in client.toml.
        port: The port of the runtime API, on the loopback interface; None: any.
    """
    settings = read_client_toml(folder)
    server = address or settings.get("server")
    if server is None:
        raise ConfigError(f"{folder / 'client.toml'} must contain `server`, as host:port")
    program = find_program("flower-supernode")
    preloaded = flower_preload.build_command("flower-supernode", settings.get("look"))
    return [
        *(preloaded if settings.get("warm", True) else [program]),
        "--superlink", server, "--root-certificates", str(folder / "ca.crt"),
        "--auth-supernode-private-key", str(folder / "key"), "--host", "127.0.0.1",
        "--port", str(port or find_free_port()), "--node-config", f"folder={json.dumps(str(folder))}",
        *runtime.build_supernode_arguments(folder), *app_signature.build_trust_arguments(folder),
    ]  # fmt: skip


def find_free_port() -> int:
    """Return an unused port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_server(folder: Path, proxy: bool = True) -> None:
    """Run the SuperLink, and nginx in front of it, until this process is terminated.

    Raises:
        ConfigError: If the server was restored from a backup, and its keys are not confirmed.
        DataError: If one of the processes ends.
    """
    server = find_server_folder(folder)
    require_key_confirmation(server)
    exclude_revoked_keys(server)
    public_port, superlink_port = read_ports(server)
    commands = [build_superlink_command(server)]
    app_signature.sign_app(server)
    nginx = shutil.which("nginx") or shutil.which("/usr/sbin/nginx")
    if proxy and nginx is None:
        raise ConfigError("nginx is not installed; without it (--no-proxy) only clients on this machine can connect")
    if proxy and nginx is not None:
        commands.append([nginx, "-p", str(server), "-c", str(server / "nginx.conf")])
    unfinished_runs = _find_unfinished_flower_runs(server / "state" / "superlink.db")
    with _run_processes(commands, build_environment(server)) as processes:
        _wait_until(lambda: _can_connect(superlink_port), "the SuperLink", processes)
        register_keys(server)
        for run_id in unfinished_runs:
            with suppress(DataError), _connect(server) as superlink:  # the SuperLink may have ended it already
                superlink.stop_run(run_id)
        if proxy:
            address = read_proxy_address(server)
            _wait_until(lambda: _can_connect(public_port, address), "nginx", processes)
        _log.info("clients can connect to port %d", public_port if proxy else superlink_port)
        notifier = Notifier(server, Settings.read(server / "federation.toml").notify)
        with notifier.run_in_background(), rotate_in_background(server / "state" / "nginx.log"):
            end_reason = _wait_for_end(processes)
    raise DataError(f"the server stops, since {end_reason}: see its output above, and start it again")


def exclude_revoked_keys(server: Path, ca_key: Path | None = None, reported: Sequence[Revocation] = ()) -> None:
    """Update the list of revocations, and exclude the keys in the list that clients have at this server.

    Args:
        server: The server's folder.
        ca_key: The private key of the authority, if it is not in the server's folder.
        reported: Signed entries from clients.

    Raises:
        ConfigError: If `ca_key` is given and cannot be used.
        DataError: If the list cannot be read or written, or no authority in ca.crt has signed a reported entry.
    """
    update_revocations(server, ca_key, reported)
    for entry in remove_revoked_keys(server):
        text = f"client {entry.client} had a revoked key again, which was removed: {entry}"
        _log.warning("%s; `feddrift deploy rotate` creates a new one", text)
        audit_change(server, entry.client, text)


def update_running_server(server: Path) -> bool:
    """Register the keys at the SuperLink if it is running, and return whether this was successful.

    A restored server whose keys are not confirmed is not running: at its port may be the server of the backup.
    """
    try:
        if is_server_running(server) and not needs_key_confirmation(server):
            register_keys(server)
            return True
    except FeddriftError as error:
        _log.warning("the running server could not register the keys, it does so at its next start: %s", error)
    return False


def register_keys(server: Path) -> None:
    """Register new client keys at the SuperLink, and unregister those that the folder `keys` does not contain."""
    nodes = _read_registered_keys(server / "state" / "superlink.db")
    keys = {path.stem: read_public_key(path) for path in sorted((server / "keys").glob("*.pub"))}
    for name in (name for name, key in keys.items() if nodes.get(key, 0) is None):
        _log.warning("the key of client %s was revoked permanently: `feddrift deploy rotate` creates a new one", name)
    new = {name: key for name, key in keys.items() if key not in nodes}
    removed = [node for key, node in nodes.items() if key not in keys.values() and node is not None]
    if new or removed:
        with _connect(server) as superlink:
            for name, key in new.items():
                superlink.register_client(name, key)
            for node in removed:
                superlink.unregister_node(node)


def _connect(server: Path) -> control.SuperLinkConnection:
    return control.SuperLinkConnection(f"127.0.0.1:{read_ports(server)[1]}", server / "ca.crt")


def _read_registered_keys(database: Path) -> dict[bytes, int | None]:
    """Return the node of each key in the SuperLink's database, None for a revoked key; Flower's API lists no keys."""
    try:
        with closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)) as connection:
            rows = connection.execute("SELECT public_key, node_id, status FROM node").fetchall()
    except sqlite3.Error as error:
        raise DataError(f"cannot read the keys in {database}, the SuperLink's database: {error}") from None
    return {key: None if status == "unregistered" else node % 2**64 for key, node, status in rows}  # stored as signed


def _find_unfinished_flower_runs(database: Path) -> list[int]:
    """Return the runs that ended with the previous server; the SuperLink itself notices this only after a minute."""
    if not database.exists():
        return []
    query = "SELECT run.run_id FROM run JOIN task ON task_id = primary_task_id WHERE finished_at IS NULL"
    try:
        with closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)) as connection:
            return [run_id % 2**64 for (run_id,) in connection.execute(query)]
    except sqlite3.Error as error:
        _log.warning("cannot read the runs in %s, so an unfinished run ends only after a minute: %s", database, error)
        return []


def run_client(folder: Path, address: str | None = None) -> None:
    """Run a client, and start it again whenever it ends.

    A server refuses a client for up to a minute after its connection was lost.

    Args:
        folder: The client's folder.
        address: The server as host:port; None: as in client.toml.
    """
    folder = folder.resolve()
    retry_seconds = MIN_RETRY_SECONDS
    if not (folder / "client.toml").exists():
        raise ConfigError(f"{folder} is not a client's folder: it has no client.toml")
    if not has_policy(folder):
        _log.warning("%s", describe_policy(folder))
    refused_since = time.monotonic()
    while True:
        began = time.monotonic()
        reason = _run_client_processes(folder, address)
        if time.monotonic() - began > DISCONNECT_SECONDS:
            retry_seconds = MIN_RETRY_SECONDS
            refused_since = time.monotonic()
        elif EXECUTOR_PROGRAM not in reason:
            server = address or read_client_toml(folder).get("server", "")
            reason = f"{reason}: {_explain_refusal(folder, server, time.monotonic() - refused_since)}"
        _log.warning("%s; the client starts again in %g s", reason, retry_seconds)
        time.sleep(retry_seconds)
        retry_seconds = min(2 * retry_seconds, MAX_RETRY_SECONDS)


def _explain_refusal(folder: Path, server: str, seconds: float) -> str:
    """Return the probable reason why a client could not connect for these seconds; Flower reports only a code."""
    host, _, port = server.rpartition(":")
    if not _can_connect(int(port) if port.isdecimal() else 0, host):
        return f"cannot connect to the server {server}: check that it is running, and its address in client.toml"
    if (reason := _explain_old_key(folder)) is not None:
        return reason
    if seconds < DISCONNECT_SECONDS:
        return "the server may still consider this client connected, for up to a minute"
    return (
        f"the server has refused this client for {seconds / 60:.0f} minutes: its key was revoked or replaced there "
        "(`feddrift deploy rotate` creates a new one), or its clock is wrong (`feddrift deploy check` reports this)"
    )


def _explain_old_key(folder: Path) -> str | None:
    """Return why the key of a client is probably not accepted; None: the client knows no reason."""
    try:
        digest = hash_key(folder / "key.pub")
    except ConfigError:
        return None
    remedy = "`feddrift deploy rotate` creates a new key"
    for entry in ClientRevocations(folder).read()[0]:
        if entry.key == digest:
            return f"the key of this client was revoked on {entry.day}, so the server refuses it: {remedy}"
    if (folder / RESTORED_MARKER).exists():
        return (
            "this folder was restored from a backup: if its key was revoked or replaced after the backup, the server "
            f"refuses it permanently: {remedy}; otherwise the server may still consider this client connected, for up "
            "to a minute"
        )
    return None


def _run_client_processes(folder: Path, address: str | None) -> str:
    """Run a SuperNode and its SuperExec until one of them ends, and return which one ended."""
    runtime.prepare_runtime_files(folder)
    port = find_free_port()
    environment = build_environment(folder)
    with _run_processes([build_supernode_command(folder, address, port)], environment) as processes:
        try:
            timeout_seconds = 3 * START_TIMEOUT_SECONDS  # for slow machines
            _wait_until(lambda: _can_connect(port), "the SuperNode", processes, timeout_seconds)
        except DataError as error:
            return str(error)
        is_preloaded = read_client_toml(folder).get("warm", True)
        program = flower_preload.build_command(EXECUTOR_PROGRAM) if is_preloaded else [find_program(EXECUTOR_PROGRAM)]
        command = [*program, *runtime.build_superexec_arguments(folder, port, processes[0].pid)]
        processes.append(subprocess.Popen(command, env=environment, start_new_session=True))
        return _wait_for_end(processes)


def follow_federation(folder: Path) -> Iterator[tuple[Record, int, bool]]:
    """Start the federation, or follow it if it runs already, until its end.

    Yields:
        The record, a time step, and whether the step is tested: once when it is trained, and once when it is tested.

    Raises:
        DataError: If the run fails.
    """
    server = find_server_folder(folder)
    watcher = RecordWatcher(server)
    with _connect(server) as superlink:
        runs = superlink.list_runs(limit=MAX_LISTED_RUNS)
        run_id = next((number for number, status in runs.items() if not status.startswith("finished")), None)
        if run_id is None:
            run_id = _start_run(server)
        status = ""
        while not status.startswith("finished"):
            for _ in range(STATUS_INTERVAL_SECONDS):  # reading the record is cheaper than a request
                time.sleep(1)
                yield from watcher.read_new_steps()
            status = superlink.list_runs(run_id=run_id).get(run_id, "finished:lost")
    yield from watcher.read_new_steps()
    if status != "finished:completed":
        raise DataError(f"the run has ended with status {status}: {read_stop_reason(server / 'state' / 'server.log')}")


def _start_run(server: Path) -> int:
    """Start a run of the server's app with `flwr run`, and return its number."""
    config = f"folder={json.dumps(str(server))}"
    command = [find_program("flwr"), "run", str(server / "app"), "local", "--run-config", config, "--format", "json"]
    result = subprocess.run(command, env=build_environment(server), capture_output=True, text=True, timeout=120)
    try:
        reply = dict(json.loads(result.stdout[result.stdout.index("{") :]))
    except ValueError:
        raise DataError(f"`flwr run` failed: {(result.stderr or result.stdout).strip()[-400:]}") from None
    if "run-id" not in reply:
        raise DataError(f"Flower did not start the run, its reply is {reply}")
    return int(reply["run-id"])


def is_server_running(server: Path) -> bool:
    """Return whether the SuperLink of this server runs, on this machine."""
    return _can_connect(read_ports(server)[1])


def _can_connect(port: int, address: str = "127.0.0.1") -> bool:
    try:
        socket.create_connection((address, port), timeout=1).close()
    except OSError:
        return False
    return True


def _wait_until(
    condition: Callable[[], bool],
    program: str,
    processes: Sequence[subprocess.Popen[bytes]],
    timeout_seconds: float = START_TIMEOUT_SECONDS,
) -> None:
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if any(process.poll() is not None for process in processes):
            raise DataError(f"a process has ended before {program} accepted connections: see the output above")
        if time.monotonic() > deadline:
            raise DataError(f"{program} does not accept connections after {timeout_seconds:g} s: see the output above")
        time.sleep(0.2)


def _wait_for_end(processes: Sequence[subprocess.Popen[bytes]]) -> str:
    """Wait until a process or the SuperExec of one of them ends, and return which program ended."""
    names = {process.pid: _find_program_name(process) for process in processes}
    executors = ExecutorMonitor(pid for pid, name in names.items() if name == "flower-superlink")
    while True:
        for process in processes:
            if process.poll() is not None:
                return f"{names[process.pid]} has ended with code {process.returncode}"
        if executors.has_lost_executor():
            return f"{EXECUTOR_PROGRAM} has ended"
        time.sleep(1)


def _find_program_name(process: subprocess.Popen[bytes]) -> str:
    """Return the name of a program; that of a preloaded program is not the first word of its command."""
    names = [Path(word).name for word in map(str, process.args)]  # type: ignore[arg-type]
    return next((name for name in names if name.startswith("flower-")), names[0])


@contextmanager
def _run_processes(commands: Sequence[list[str]], env: dict[str, str]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run commands, each in its own process group; at the end, terminate them and all their descendants."""

    def stop(*_: object) -> None:
        raise SystemExit(0)

    previous_handler = signal.signal(signal.SIGTERM, stop)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        processes += (subprocess.Popen(command, env=env, start_new_session=True) for command in commands)
        yield processes
    finally:
        for process in processes:
            end_process_tree(process)
        signal.signal(signal.SIGTERM, previous_handler)
