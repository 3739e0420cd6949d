"""The command line of deployments."""

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
from feddrift.cli.console import can_be_stopped, say, tell
from feddrift.errors import ConfigError
from feddrift.reports.event_text import WENT_BACK, alarm_sentence, event_line
from feddrift.reports.exchanges import absent, noted
from feddrift.runs.record import OLD_HISTORY, Record

app = typer.Typer(no_args_is_help=True, help="Run a federation on real machines, with Flower.")
app.add_typer(models.app, name="models")

ON_LOOPBACK = "on this machine's loopback"
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="the deployment, or this machine's part of it")]


@app.callback()
def _main() -> None:
    if importlib.util.find_spec("flwr") is None:
        raise ConfigError("feddrift deploy needs Flower: pip install 'feddrift[flower]'")
    logging.getLogger("feddrift").setLevel(logging.INFO)


@app.command()
def init(
    folder: Folder,
    clients: Annotated[str, typer.Option(help="their names: a,b,c")],
    features: Annotated[str, typer.Option(help="how many inputs there are, or their shape: 2, or 28,28")],
    classes: Annotated[str, typer.Option(help="the labels: 0,1 or cat,dog")],
    host: Annotated[str, typer.Option(help="the server's name or address, as clients see it")] = "localhost",
    bind: Annotated[str | None, typer.Option(help="the address that nginx listens on; without it, all")] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="the port that clients reach")] = 9443,
    inner: Annotated[int, typer.Option(min=1, max=65535, help="the SuperLink's own port, on loopback")] = 9444,
    experiment: Annotated[str, typer.Option(help="a name; clients keep experiments apart")] = "first",
    algorithm: Annotated[
        str | None, typer.Option(help="a name from `feddrift list`; without it, what it recommends")
    ] = None,
    time_steps: Annotated[int | None, typer.Option(help="how many; without it, on and on")] = None,
    rounds: Annotated[int | None, typer.Option(help="R, exchanges of training in a time step")] = None,
    steps: Annotated[int | None, typer.Option(help="K, local steps in a round")] = None,
    quorum: Annotated[int | None, typer.Option(help="with fewer clients the server waits")] = None,
) -> None:
    """Write all that a new federation needs: certificates, keys, settings, proxy, service units."""
    from feddrift.deploy.operate import scaffold

    shape = [int(n) for n in features.split(",") if n.strip().isdecimal()]
    if len(shape) != len(features.split(",")):
        raise ConfigError(f"--features takes whole numbers such as 2 or 28,28, got '{features}'")
    names, labels = ([part.strip() for part in text.split(",")] for text in (clients, classes))
    if len(labels) < 2:
        raise ConfigError(f"--classes takes at least two labels, such as 0,1, got '{classes}'")
    given = {"algorithm": algorithm, "time_steps": time_steps, "rounds": rounds, "steps": steps, "quorum": quorum}
    settings = {key: value for key, value in given.items() if value is not None}
    scaffold.init(
        folder, names, shape, labels, host=host, bind=bind, port=port, inner=inner, experiment=experiment,
        settings=settings,
    )  # fmt: skip
    say(f"{folder / 'server'} is the server's; edit its federation.toml")
    for name in names:
        say(f"{folder / 'clients' / name} goes to client {name}; its data go to data/step_0.csv, data/step_1.csv, ...")


@app.command()
def add(folder: Folder, name: Annotated[str, typer.Argument(help="of the new client")]) -> None:
    """Make a place for one more client, with its own key; start server and run again to take it in."""
    from feddrift.deploy.operate import scaffold

    scaffold.add(folder, name)
    say(f"{folder / 'clients' / name} goes to client {name}")


@app.command()
def check(folder: Folder) -> None:
    """Say what is wrong with a deployment."""
    from feddrift.deploy.operate import check as checks

    problems = list(checks.problems(folder))
    for problem in problems:
        say(f"- {problem}")
    if problems:
        raise typer.Exit(1)
    say("nothing is wrong")


@app.command()
def server(
    folder: Folder,
    proxy: Annotated[bool, typer.Option(help="put nginx in front; without it only this machine can connect")] = True,
) -> None:
    """Run Flower's server (the SuperLink) and nginx, the proxy in front of it."""
    from feddrift.deploy.flower_version import find_flwr_problem
    from feddrift.deploy.processes import launcher

    if (sentence := find_flwr_problem()) is not None:
        tell(sentence)
    launcher.serve(folder, proxy)


@app.command()
def client(
    folder: Folder,
    address: Annotated[str | None, typer.Option("--server", help="host:port, in place of client.toml's")] = None,
) -> None:
    """Run a client; it comes back by itself when it loses the server."""
    from feddrift.deploy.processes import launcher

    launcher.client(folder, address)


@app.command("run")
def run_(folder: Folder) -> None:
    """Start the federation, or take it up again where it stopped, and tell each time step, trained and tested."""
    from feddrift.deploy.processes import launcher

    told = False
    for record, t, tested in launcher.run(folder):
        say(line_of_test(record, t) if tested else line_of_training(record, t))
        told = True
    if not told:
        say("it has finished: no time step is left to do (`time_steps` in federation.toml says how many there are)")


@app.command()
def status(folder: Folder, as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False) -> None:
    """Show whether it runs or is finished, and clients, models and drifts as of the last time step."""
    from feddrift.deploy.monitor import status as reader
    from feddrift.deploy.processes import launcher

    federation = reader.status(launcher.part(folder, "server"))
    if as_json:
        print(json.dumps(None if federation is None else federation.plain(), indent=2))
        return
    if federation is None and (launcher.part(folder, "server") / "state" / OLD_HISTORY).exists():
        say("it was begun by version 0.1: `feddrift deploy run` goes on with it")
        return
    if federation is None or not federation.record.rows.steps:
        say("no time step is done yet" + ("" if federation is None else f"; {federation.sentence}"))
        return
    record, last = federation.record, federation.record.rows.steps - 1
    say(f"{record.header['stream']}, {record.header['algorithm']}: {federation.sentence}")
    say(f"{_time(record, last)} is trained{'' if record.tested > last else ', not tested yet: it waits for new data'}")
    table = Table(box=None)
    accuracy = f"accuracy, time {record.tested}" if record.tested else "accuracy"
    here = ["here"] if federation.running else []
    for name in ("client", "model", accuracy, "alarms", "new data", *here, "trouble"):
        table.add_column(name)
    for c, (name, now) in enumerate(federation.clients().items()):
        share = federation.client(record.tested - 1, c)["accuracy"] if record.tested else None
        alarms = ", ".join(str(t + 1) for t in range(last + 1) if record.rows.drift[t, c])
        cells = [name, str(record.rows.model[last, c]), "" if share is None else f"{100 * share:.1f} %", alarms]
        cells.append(new_data(now))
        cells += ["yes" if now["here"] else "no"] if federation.running else []
        table.add_row(*map(Text, (*cells, now["trouble"] or "")))  # as Text: a reason may hold [brackets]
    console.out.print(table)
    for event in record.events:
        say(f"  time {event['t'] + 1}: {event_line(event, record.header['clients'])}")
    for _, t, c, _, _, what in noted(record):
        say(f"  time {t + 1}: client {record.header['clients'][c]}: {what}")
    for (t, c), shifts in record.shifts.items():
        say(f"  time {t + 1}: alarm of {record.header['clients'][c]}: {alarm_sentence(shifts, t)}")


@app.command()
def page(folder: Folder, port: Annotated[int, typer.Option(min=0, max=65535, help=ON_LOOPBACK)] = 8050) -> None:
    """Serve the live page of the federation, and its numbers for Prometheus, to this machine."""
    from feddrift.deploy.monitor import web
    from feddrift.deploy.processes import launcher

    with web.listen(launcher.part(folder, "server"), port) as listening:
        for where, what in web.PLACES.items():
            say(f"http://127.0.0.1:{listening.server_port}{where}  {what}")
        say(f"Ctrl-C ends it; from elsewhere: ssh -L 8050:127.0.0.1:{listening.server_port} SERVER")
        can_be_stopped()
        listening.serve_forever()


@app.command()
def backup(folder: Folder, file: Annotated[Path, typer.Argument(metavar="FILE", help="a new file")]) -> None:
    """Write a server's folder, though it runs, or a client's, into one file, with its keys: keep it safe."""
    from feddrift.deploy.operate import backup as backups
    from feddrift.deploy.processes import launcher

    folder = folder if (folder / "client.toml").exists() else launcher.part(folder, "server")
    say(f"{file} has {backups.backup(folder, file)} files of {folder}, private keys among them")


@app.command()
def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="what `feddrift deploy backup` wrote")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="a new or an empty folder")],
) -> None:
    """Make a folder of a backup, in another place or on another machine, to go on from there."""
    from feddrift.deploy.operate import backup as backups

    kind, made = backups.restore(file, folder)
    say(f"{folder} is the {kind}'s folder as it was at {made}; `feddrift deploy check {folder}` looks at it")


def new_data(client: Mapping[str, Any]) -> str:
    """How a client's data come, by its status: nothing where each time step has some and none wait.

    >>> new_data({"quiet": 0, "backlog": 3, "gap": None}), new_data({"quiet": 2, "backlog": 1, "gap": 4})
    ('3 batches wait', 'none for 2 time steps: batch 4 is missing, 1 batch waits for it')
    """
    quiet, backlog, gap = client["quiet"], client["backlog"], client["gap"]
    none = "none yet" if quiet is None else f"none for {quiet} time step{'s' * (quiet > 1)}" if quiet else ""
    waits = f"{backlog} batch{'es wait' if backlog > 1 else ' waits'}" if backlog else ""
    if gap is not None:
        waits = f"batch {gap} is missing, {waits} for it"
    return ": ".join(filter(None, (none, waits)))


def line_of_training(record: Record, t: int) -> str:
    """A time step whose training has ended in one line, and below what moved at each client that raised an alarm."""
    rows, names = record.rows, record.header["clients"]
    turns = [event for event in record.events if event["t"] == t]
    reasons = [str(event["cause"].get("reason", "")) for event in turns]
    news = list(dict.fromkeys(reason for reason in reasons if reason.startswith(WENT_BACK)))
    for event, reason in zip(turns, reasons, strict=True):
        if event["event"] != "decided" and reason not in news:
            news.append(f"{event['event']} model {event['model']}")
    alarms = [names[c] for c in range(len(names)) if rows.drift[t, c]]
    if alarms:
        news.insert(0, f"alarm at {', '.join(alarms)}")
    if out := absent(record, t):
        news.append(f"sat out: {', '.join(names[c] for c in out)}")
    n = int(rows.n_models[t].max())
    line = f"  time {t + 1:3d} trained   {n} model{'s' * (n > 1)}   {'; '.join(news)}".rstrip()
    moved = [f"{names[c]}: {alarm_sentence(shifts, t)}" for (at, c), shifts in record.shifts.items() if at == t]
    return "\n".join([line, *(f"             {text}" for text in moved)])


def line_of_test(record: Record, t: int) -> str:
    """A time step that is tested, in one line."""
    tested, accuracy = record.rows.tested[t], record.rows.accuracy[t]
    right = float((accuracy * tested)[tested > 0].sum())
    return f"  time {t + 1:3d} tested    " + (f"{100 * right / tested.sum():.2f} %" if tested.any() else "on no data")


def _time(record: Record, t: int) -> str:
    name = record.header["times"][t]
    return f"time {t + 1}" + (f" (began {name} UTC)" if name else "")
