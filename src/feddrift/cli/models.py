"""`feddrift deploy models`: list the past models of a deployment, pin them, and roll back to them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from feddrift.cli import console
from feddrift.cli.console import print_line

app = typer.Typer(no_args_is_help=True, help="List, pin and roll back to the models of past time steps.")

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="the deployment, or its server folder")]
Time = Annotated[int, typer.Argument(metavar="TIME", min=1, help="the number of the time step in `list`")]


@app.command("list")
def list_models(folder: Folder, as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False) -> None:
    """List the time steps with stored models: their beginning, the users and the accuracy of each model, and pins."""
    from feddrift.deploy.processes import launcher
    from feddrift.deploy.server.archive import list_archived_steps, read_rollback_time

    server = launcher.find_server_folder(folder)
    steps = list_archived_steps(server)
    rollback_time = read_rollback_time(server)
    if as_json:
        print(json.dumps({"back_to": rollback_time, "steps": [step.to_dict() for step in steps]}, indent=2))
        return
    if not steps:
        print_line("no time step is kept yet")
    else:
        table = Table(box=None)
        for name in ("time", "began, UTC", "models", "accuracy", "pinned"):
            table.add_column(name)
        for step in steps:
            share = "" if step.accuracy is None else f"{100 * step.accuracy:.2f} %"
            users = "; ".join(f"{model}: {', '.join(names)}" for model, names in step.users.items())
            table.add_row(*map(Text, (str(step.time), step.began, users, share, "yes" if step.pinned else "")))
        console.out.print(table)
    if rollback_time is not None:
        print_line(f"the next time step continues from the models of time {rollback_time}")


@app.command("pin")
def pin_models(folder: Folder, time: Time) -> None:
    """Keep the models of a time step permanently."""
    from feddrift.deploy.monitor.alerts import audit_change
    from feddrift.deploy.processes import launcher
    from feddrift.deploy.server.archive import Archive

    server = launcher.find_server_folder(folder)
    Archive(server / "state").pin(time)
    audit_change(server, None, f"the models of time {time} are pinned")
    print_line(f"the models of time {time} are kept")


@app.command("rollback")
def roll_back_models(folder: Folder, time: Time) -> None:
    """Continue the federation from the models of an earlier time step; it must not be running."""
    from feddrift.deploy.operate import rollback
    from feddrift.deploy.processes import launcher

    n_steps = rollback.roll_back(launcher.find_server_folder(folder), time)
    print_line(
        f"time {n_steps + 1} will start from the models of time {time}: start `feddrift deploy server` and `run` again"
    )
