"""`feddrift deploy`: the commands of a deployment, which runs a federation on real machines."""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from feddrift.cli import console, models
from feddrift.cli.console import handle_stop_signals, print_line, print_to_stderr
from feddrift.cli.keys import AuthorityKey, print_keys
from feddrift.errors import ConfigError
from feddrift.reports.event_text import ROLLBACK_REASON_PREFIX, explain_alarm, format_event_line
from feddrift.reports.exchanges import find_absent_clients, find_client_notes
from feddrift.runs.record import LEGACY_HISTORY_FILE, Record

app = typer.Typer(no_args_is_help=True, help="Run a federation on real machines, with Flower.")
app.add_typer(models.app, name="models")

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="the deployment, or the folder of this machine")]


@app.callback()
def _check_flower() -> None:
    if importlib.util.find_spec("flwr") is None:
        raise ConfigError("feddrift deploy needs Flower: pip install 'feddrift[flower]'")
    logging.getLogger("feddrift").setLevel(logging.INFO)


@app.command("init")
def init_federation(
    folder: Folder,
    clients: Annotated[str, typer.Option(help="names of the clients: a,b,c")],
    features: Annotated[str, typer.Option(help="number of inputs, or their shape: 2, or 28,28")],
    classes: Annotated[str, typer.Option(help="the labels: 0,1 or cat,dog")],
    host: Annotated[str, typer.Option(help="the server's name or address for clients")] = "localhost",
    bind: Annotated[str | None, typer.Option(help="the address that nginx listens on; default: all")] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="the port that clients connect to")] = 9443,
    inner: Annotated[int, typer.Option(min=1, max=65535, help="the port of the SuperLink on loopback")] = 9444,
    experiment: Annotated[str, typer.Option(help="name of the experiment, unique for the clients")] = "first",
    algorithm: Annotated[
        str | None, typer.Option(help="a name from `feddrift list`; default: the recommended one")
    ] = None,
    time_steps: Annotated[int | None, typer.Option(help="number of time steps; default: unlimited")] = None,
    rounds: Annotated[int | None, typer.Option(help="R, training rounds per time step")] = None,
    steps: Annotated[int | None, typer.Option(help="K, local steps per round")] = None,
    quorum: Annotated[int | None, typer.Option(help="minimum number of clients; with fewer the server waits")] = None,
) -> None:
    """Create the files of a new federation: certificates, keys, settings, proxy, service units."""
    from feddrift.deploy.operate import scaffold

    shape = [int(n) for n in features.split(",") if n.strip().isdecimal()]
    if len(shape) != len(features.split(",")):
        raise ConfigError(f"--features takes whole numbers such as 2 or 28,28, got '{features}'")
    names, labels = ([part.strip() for part in text.split(",")] for text in (clients, classes))
    if len(labels) < 2:
        raise ConfigError(f"--classes takes at least two labels, such as 0,1, got '{classes}'")
    given = {"algorithm": algorithm, "time_steps": time_steps, "rounds": rounds, "steps": steps, "quorum": quorum}
    settings = {key: value for key, value in given.items() if value is not None}
    scaffold.create_deployment(
        folder, names, shape, labels, host=host, bind=bind, port=port, inner=inner, experiment=experiment,
        settings=settings,
    )  # fmt: skip
    print_line(f"{folder / 'server'} is the server's; edit its federation.toml")
    for name in names:
        print_line(
            f"{folder / 'clients' / name} goes to client {name}; its data go to data/step_0.csv, data/step_1.csv, ..."
        )


@app.command("add")
def add_client(folder: Folder, name: Annotated[str, typer.Argument(help="name of the new client")]) -> None:
    """Add a client with its own key; restart `server` and `run` to admit it."""
    from feddrift.deploy.operate import scaffold

    scaffold.add_client(folder, name)
    print_line(f"{folder / 'clients' / name} goes to client {name}")


@app.command("check")
def check_deployment(folder: Folder, ca_key: AuthorityKey = None) -> None:
    """Check a deployment, and list its problems."""
    from feddrift.deploy.operate import check as checks

    problems = list(checks.find_problems(folder, ca_key))
    for problem in problems:
        print_line(f"- {problem}")
    if problems:
        raise typer.Exit(1)
    print_line("nothing is wrong")


@app.command("server")
def run_server(
    folder: Folder,
    proxy: Annotated[bool, typer.Option(help="also run nginx; without it, only this machine can connect")] = True,
) -> None:
    """Run Flower's server (the SuperLink) and nginx, the proxy in front of it."""
    from feddrift.deploy.flower_version import find_flwr_problem
    from feddrift.deploy.processes import launcher

    if (sentence := find_flwr_problem()) is not None:
        print_to_stderr(sentence)
    launcher.run_server(folder, proxy)


@app.command("client")
def run_client(
    folder: Folder,
    address: Annotated[str | None, typer.Option("--server", help="host:port, in place of client.toml's")] = None,
    status: Annotated[bool, typer.Option("--status", help="show what the server requested, and end")] = False,
    accept: Annotated[
        bool, typer.Option("--accept", help="show and accept the changed settings that the server requests, and end")
    ] = False,
) -> None:
    """Run a client; it reconnects by itself after it has lost the server."""
    from feddrift.deploy.operate import client_requests
    from feddrift.deploy.processes import launcher

    if status and accept:
        raise ConfigError("--status and --accept are two commands: choose one")
    if status or accept:
        describe = client_requests.describe_requests if status else client_requests.accept_requested_settings
        for line in describe(folder):
            print_line(line)
        return
    launcher.run_client(folder, address)


@app.command("run")
def run_federation(folder: Folder) -> None:
    """Start the federation, or continue it, and print each time step when it is trained and when it is tested."""
    from feddrift.deploy.processes import launcher

    has_steps = False
    for record, t, is_tested in launcher.follow_federation(folder):
        print_line(format_tested_step(record, t) if is_tested else format_trained_step(record, t))
        has_steps = True
    if not has_steps:
        print_line("the federation has finished: no time step is left (see `time_steps` in federation.toml)")


@app.command("status")
def show_status(folder: Folder, as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False) -> None:
    """Show whether the federation is running, and its clients, models and drifts after the last time step."""
    from feddrift.deploy.monitor import status as reader
    from feddrift.deploy.processes import launcher

    federation = reader.read_status(launcher.find_server_folder(folder))
    if as_json:
        print(json.dumps(None if federation is None else federation.to_dict(), indent=2))
        return
    if federation is None and (launcher.find_server_folder(folder) / "state" / LEGACY_HISTORY_FILE).exists():
        print_line("it was begun by version 0.1: `feddrift deploy run` continues it")
        return
    if federation is None or not federation.record.rows.steps:
        print_line("no time step is done yet" + ("" if federation is None else f"; {federation.sentence}"))
        return
    record = federation.record
    last = record.rows.steps - 1
    print_line(f"{record.header['stream']}, {record.header['algorithm']}: {federation.sentence}")
    test_note = "" if record.tested > last else ", not tested yet: it waits for new data"
    print_line(f"{_format_time_step(record, last)} is trained{test_note}")
    table = Table(box=None)
    accuracy_title = f"accuracy, time {record.tested}" if record.tested else "accuracy"
    here = ["here"] if federation.running else []
    for title in ("client", "model", accuracy_title, "alarms", "new data", *here, "trouble"):
        table.add_column(title)
    for c, (name, client) in enumerate(federation.describe_clients().items()):
        share = federation.describe_client(record.tested - 1, c)["accuracy"] if record.tested else None
        alarms = ", ".join(str(t + 1) for t in range(last + 1) if record.rows.drift[t, c])
        cells = [name, str(record.rows.model[last, c]), "" if share is None else f"{100 * share:.1f} %", alarms]
        cells.append(describe_new_data(client))
        cells += ["yes" if client["here"] else "no"] if federation.running else []
        table.add_row(*map(Text, (*cells, client["trouble"] or "")))  # as Text: a reason may contain [brackets]
    console.out.print(table)
    for event in record.events:
        print_line(f"  time {event['t'] + 1}: {format_event_line(event, record.header['clients'])}")
    for _, t, c, _, _, note in find_client_notes(record):
        print_line(f"  time {t + 1}: client {record.header['clients'][c]}: {note}")
    for (t, c), shifts in record.shifts.items():
        print_line(f"  time {t + 1}: alarm of {record.header['clients'][c]}: {explain_alarm(shifts, t)}")


@app.command("page")
def serve_page(
    folder: Folder, port: Annotated[int, typer.Option(min=0, max=65535, help="the port of the page on loopback")] = 8050
) -> None:
    """Serve the live page of the federation, and its numbers for Prometheus, to this machine."""
    from feddrift.deploy.monitor import web
    from feddrift.deploy.processes import launcher

    with web.create_web_server(launcher.find_server_folder(folder), port) as listening:
        for path, description in web.PATHS.items():
            print_line(f"http://127.0.0.1:{listening.server_port}{path}  {description}")
        print_line(f"Ctrl-C ends it; from another machine: ssh -L 8050:127.0.0.1:{listening.server_port} SERVER")
        handle_stop_signals()
        listening.serve_forever()


@app.command("backup")
def write_backup(folder: Folder, file: Annotated[Path, typer.Argument(metavar="FILE", help="a new file")]) -> None:
    """Back up the folder of a server, which may be running, or of a client. The file contains keys: keep it safe."""
    from feddrift.deploy.operate import backup as backups
    from feddrift.deploy.processes import launcher

    folder = folder if (folder / "client.toml").exists() else launcher.find_server_folder(folder)
    print_line(f"{file} has {backups.write_backup(folder, file)} files of {folder}, private keys among them")


@app.command("restore")
def restore_backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="a file of `feddrift deploy backup`")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="a new or an empty folder")],
    ca_key: AuthorityKey = None,
) -> None:
    """Restore a backup into a new folder, also on another machine; list the keys that it brings back."""
    from feddrift.deploy.operate import backup as backups

    kind, written_at = backups.restore_backup(file, folder, ca_key)
    print_line(f"{folder} is the {kind}'s folder as it was at {written_at}; `feddrift deploy check {folder}` checks it")
    if kind == "client":
        print_line("if its key was revoked or replaced after that, the server refuses it: `feddrift deploy rotate`")
        return
    print_keys(folder)
    print_line(f"revoke each key that must not connect any more: `feddrift deploy revoke {folder} NAME`")
    print_line(f"the server does not start before `feddrift deploy keys {folder} --confirm`")


def describe_new_data(client: Mapping[str, Any]) -> str:
    """Describe the new data of a client, from its status; empty if the last time step had data and no batch waits.

    >>> describe_new_data({"quiet": 0, "backlog": 3, "gap": None})
    '3 batches wait'
    >>> describe_new_data({"quiet": 2, "backlog": 1, "gap": 4})
    'none for 2 time steps: batch 4 is missing, 1 batch waits for it'
    """
    quiet = client["quiet"]
    backlog = client["backlog"]
    gap = client["gap"]
    none = "none yet" if quiet is None else f"none for {quiet} time step{'s' * (quiet > 1)}" if quiet else ""
    waits = f"{backlog} batch{'es wait' if backlog > 1 else ' waits'}" if backlog else ""
    if gap is not None:
        waits = f"batch {gap} is missing, {waits} for it"
    return ": ".join(filter(None, (none, waits)))


def format_trained_step(record: Record, t: int) -> str:
    """Format a trained time step as one line, and a line for each alarm about the changes in the client's data."""
    rows = record.rows
    names = record.header["clients"]
    events = [event for event in record.events if event["t"] == t]
    reasons = [str(event["cause"].get("reason", "")) for event in events]
    news = list(dict.fromkeys(reason for reason in reasons if reason.startswith(ROLLBACK_REASON_PREFIX)))
    for event, reason in zip(events, reasons, strict=True):
        if event["event"] != "decided" and reason not in news:
            news.append(f"{event['event']} model {event['model']}")
    alarms = [names[c] for c in range(len(names)) if rows.drift[t, c]]
    if alarms:
        news.insert(0, f"alarm at {', '.join(alarms)}")
    if absent := find_absent_clients(record, t):
        news.append(f"sat out: {', '.join(names[c] for c in absent)}")
    n = int(rows.n_models[t].max())
    line = f"  time {t + 1:3d} trained   {n} model{'s' * (n > 1)}   {'; '.join(news)}".rstrip()
    alarm_texts = [
        f"{names[c]}: {explain_alarm(shifts, t)}"
        for (alarm_time, c), shifts in record.shifts.items()
        if alarm_time == t
    ]
    return "\n".join([line, *(f"             {text}" for text in alarm_texts)])


def format_tested_step(record: Record, t: int) -> str:
    """Format a tested time step as one line, with the accuracy over all tested rows."""
    tested = record.rows.tested[t]
    accuracy = record.rows.accuracy[t]
    right = float((accuracy * tested)[tested > 0].sum())
    return f"  time {t + 1:3d} tested    " + (f"{100 * right / tested.sum():.2f} %" if tested.any() else "on no data")


def _format_time_step(record: Record, t: int) -> str:
    """Name a time step by its number and, if known, by the time at which it began."""
    name = record.header["times"][t]
    return f"time {t + 1}" + (f" (began {name} UTC)" if name else "")
