"""The command line of deployments."""

from __future__ import annotations

import importlib.util
import json
import logging
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from feddrift.cli import console
from feddrift.cli.console import say
from feddrift.errors import ConfigError

app = typer.Typer(no_args_is_help=True, help="Run a federation on real machines, with Flower.")

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
    port: Annotated[int, typer.Option(help="the port that clients reach")] = 9443,
    inner: Annotated[int, typer.Option(help="the SuperLink's own port, on loopback")] = 9444,
    experiment: Annotated[str, typer.Option(help="a name; clients keep experiments apart")] = "first",
) -> None:
    """Write all that a new federation needs: certificates, keys, settings, proxy, service units."""
    from feddrift.deploy import make

    shape = [int(n) for n in features.split(",") if n.strip().isdecimal()]
    if len(shape) != len(features.split(",")):
        raise ConfigError(f"--features takes whole numbers such as 2 or 28,28, got '{features}'")
    names, labels = ([part.strip() for part in text.split(",")] for text in (clients, classes))
    make.init(folder, names, shape, labels, host=host, port=port, inner=inner, experiment=experiment)
    say(f"{folder / 'server'} is the server's; edit its federation.toml")
    for name in names:
        say(f"{folder / 'clients' / name} goes to client {name}; its data go to data/step_0.csv, data/step_1.csv, ...")


@app.command()
def add(folder: Folder, name: Annotated[str, typer.Argument(help="of the new client")]) -> None:
    """Make a place for one more client, with its own key; start server and run again to take it in."""
    from feddrift.deploy import make

    make.add(folder, name)
    say(f"{folder / 'clients' / name} goes to client {name}")


@app.command()
def check(folder: Folder) -> None:
    """Say what is wrong with a deployment."""
    from feddrift.deploy import check as checks

    found = list(checks.problems(folder))
    for problem in found:
        say(f"- {problem}")
    if found:
        raise typer.Exit(1)
    say("nothing is wrong")


@app.command()
def server(
    folder: Folder,
    proxy: Annotated[bool, typer.Option(help="without it only this machine can connect, past nginx")] = True,
) -> None:
    """Run the SuperLink and the proxy in front of it."""
    from feddrift.deploy import start

    start.serve(folder, proxy)


@app.command()
def client(
    folder: Folder,
    address: Annotated[str | None, typer.Option("--server", help="host:port, in place of client.toml's")] = None,
) -> None:
    """Run a client; it comes back by itself when it loses the server."""
    from feddrift.deploy import start

    start.client(folder, address)


@app.command("run")
def run_(folder: Folder) -> None:
    """Start the federation, or take it up again where it stopped, and tell its time steps."""
    from feddrift.deploy import start

    for step in start.run(folder):
        say(line(step))


@app.command()
def status(folder: Folder, as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False) -> None:
    """Show clients, models and drifts as of the last time step."""
    from feddrift.deploy import start

    steps = start.history(start.part(folder, "server"))
    if as_json:
        print(json.dumps(steps, indent=2))
        return
    if not steps:
        say("no time step is done yet")
        return
    last = steps[-1]
    models = ", ".join(map(str, last["models"]))
    table = Table(title=f"time {last['t'] + 1}, {last['at']}: models {models}", title_justify="left", box=None)
    for name in ("client", "model", "accuracy", "drifts", "here", "trouble"):
        table.add_column(name)
    for name, row in last["clients"].items():
        drifts = [str(step["t"] + 1) for step in steps if step["clients"].get(name, {}).get("drift")]
        accuracy = "" if row["accuracy"] is None else f"{100 * row['accuracy']:.1f} %"
        here = "yes" if row["here"] else "no"
        table.add_row(name, str(row["model"]), accuracy, ", ".join(drifts), here, row["trouble"] or "")
    console.out.print(table)
    for step in steps:
        for event in step["events"]:
            say(f"  time {step['t'] + 1}: model {event['model']} {event['event']}")


def line(step: dict[str, Any]) -> str:
    """One time step in one line."""
    told = [f"{e['event']} model {e['model']}" for e in step["events"]]
    rows = [row for row in step["clients"].values() if row["tested"]]
    right, tested = sum(row["accuracy"] * row["tested"] for row in rows), sum(row["tested"] for row in rows)
    accuracy = f"{100 * right / tested:6.2f} %" if tested else "not tested"
    absent = [name for name, row in step["clients"].items() if not row["here"]]
    if absent:
        told.append(f"out of reach: {', '.join(absent)}")
    return f"  time {step['t'] + 1:3d}   {accuracy}   {len(step['models'])} models   {'; '.join(told)}".rstrip()
