"""The command line of a deployment's past models: what there is, what stays, and going back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from feddrift.cli import console
from feddrift.cli.console import say

app = typer.Typer(no_args_is_help=True, help="The models of past time steps: list them, pin them, go back to them.")

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="the deployment, or its server's part of it")]
Time = Annotated[int, typer.Argument(metavar="TIME", min=1, help="the time step, as `list` shows it")]


@app.command("list")
def list_(folder: Folder, as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False) -> None:
    """Show the time steps whose models are kept: when they began, who used which, how these did on the next data."""
    from feddrift.deploy.processes import launcher
    from feddrift.deploy.server.archived_steps import back_to, kept

    server = launcher.part(folder, "server")
    steps, back = kept(server), back_to(server)
    if as_json:
        print(json.dumps({"back_to": back, "steps": [step.plain() for step in steps]}, indent=2))
        return
    if not steps:
        say("no time step is kept yet")
    else:
        table = Table(box=None)
        for name in ("time", "began, UTC", "models", "accuracy", "pinned"):
            table.add_column(name)
        for step in steps:
            share = "" if step.accuracy is None else f"{100 * step.accuracy:.2f} %"
            users = "; ".join(f"{model}: {', '.join(names)}" for model, names in step.users.items())
            table.add_row(*map(Text, (str(step.time), step.began, users, share, "yes" if step.pinned else "")))
        console.out.print(table)
    if back is not None:
        say(f"the next time step goes on from the models of time {back}")


@app.command()
def pin(folder: Folder, time: Time) -> None:
    """Keep the models of a time step for ever."""
    from feddrift.deploy.monitor.alerts import changed
    from feddrift.deploy.processes import launcher
    from feddrift.deploy.server.archive import Archive

    server = launcher.part(folder, "server")
    Archive(server / "state").pin(time)
    changed(server, None, f"the models of time {time} are pinned")
    say(f"the models of time {time} stay")


@app.command()
def rollback(folder: Folder, time: Time) -> None:
    """Let the federation, which must not run meanwhile, go on from the models of a time step."""
    from feddrift.deploy.operate import rollback as back
    from feddrift.deploy.processes import launcher

    steps = back.rollback(launcher.part(folder, "server"), time)
    say(f"time {steps + 1} will start from the models of time {time}: start `feddrift deploy server` and `run` again")
