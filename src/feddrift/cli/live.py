"""Progress of runs in a terminal: a table of the runs, and a line for each time step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from feddrift.simulation import Step, count_models
from feddrift.types import Ints

MAX_TABLE_RUNS = 8  # the newest runs; others are not shown
MAX_LISTED_EVENTS = 12  # of one kind in a time step; more are only counted
MAX_LISTED_MOVERS = 20  # clients that change their model in a time step; more are only counted
SPARKLINE_BLOCKS = "▁▂▃▄▅▆▇█"


@dataclass
class RunProgress:
    """The progress of one run."""

    name: str
    n_steps: int
    accuracy: list[float] = field(default_factory=list)  # by time step; NaN without test data
    models: int = 0
    alarms: int = 0  # of all clients and time steps
    merges: int = 0

    def add_step(self, step: Step) -> None:
        """Count one more time step."""
        self.accuracy.append(float(step.accuracy[step.tested > 0].mean()) if step.tested.any() else np.nan)
        self.models = count_models(step.state)
        self.alarms += int(step.drifted.sum())
        self.merges += sum(event.kind == "merged" for event in step.events)


class ProgressTable:
    """The table of the runs of a command; rich draws it several times per second."""

    def __init__(self, n_runs: int) -> None:
        self.n_runs = n_runs
        self.runs: list[RunProgress] = []
        self.news = ""
        self._start = time.monotonic()

    def add_run(self, name: str, n_steps: int) -> None:
        """Add a row for a run that starts now."""
        self.runs.append(RunProgress(name, n_steps))

    def add_step(self, step: Step, news: str) -> None:
        """Count a time step of the last run, and show `news` below the table."""
        self.runs[-1].add_step(step)
        self.news = news.strip()

    def __rich__(self) -> RenderableType:
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1))
        table.add_column("run", overflow="fold", min_width=12)
        for name in ("time", "accuracy", "so far", "models", "alarms", "merges"):
            table.add_column(name, justify="left" if name == "so far" else "right", no_wrap=True)
        for run in self.runs[-MAX_TABLE_RUNS:]:
            known = [a for a in run.accuracy if not np.isnan(a)]
            table.add_row(
                Text(run.name),
                f"{len(run.accuracy)}/{run.n_steps}",
                f"{100 * known[-1]:.2f} %" if known else "",
                draw_sparkline(run.accuracy),
                str(run.models or ""),
                str(run.alarms),
                str(run.merges),
            )
        news = Text(self.news, overflow="ellipsis", no_wrap=True)
        return Group(table, news, Text(self._format_remaining_time(), style="dim"))

    def _format_remaining_time(self) -> str:
        """Extrapolate the time of all runs; those that have not begun count as many time steps as the longest."""
        steps_done = sum(len(run.accuracy) for run in self.runs)
        longest = max((run.n_steps for run in self.runs), default=0)
        total = sum(run.n_steps for run in self.runs) + (self.n_runs - len(self.runs)) * longest
        if not steps_done or steps_done == total:
            return ""
        seconds = (time.monotonic() - self._start) / steps_done * (total - steps_done)
        return f"run {len(self.runs)} of {self.n_runs}, about {seconds:.0f} s left"


def draw_sparkline(shares: list[float], width: int = 24) -> str:
    """Draw the last `width` shares, from 0 to 1, as bars of one character; NaN is a space.

    >>> draw_sparkline([0.0, 0.5, float("nan"), 1.0])
    '▁▅ █'
    """
    top = len(SPARKLINE_BLOCKS) - 1
    return "".join(
        " " if np.isnan(a) else SPARKLINE_BLOCKS[min(top, int(a * len(SPARKLINE_BLOCKS)))] for a in shares[-width:]
    )


def format_step(step: Step, previous_models: Ints | None, clients: Sequence[str]) -> str:
    """Format a time step as one line: accuracy, number of models, and the clients that changed their model.

    Args:
        step: The time step.
        previous_models: [c], the model that each client used in the time step before; None: changes are not listed.
        clients: Names of the clients.
    """
    news = []
    created = {e.model: e.cause for e in step.events if e.kind == "created"}
    if len(created) > MAX_LISTED_EVENTS:
        news.append(f"{len(created)} new models")
    for model, cause in sorted(created.items()) if len(created) <= MAX_LISTED_EVENTS else ():
        users = [name for name, used in zip(clients, step.model, strict=True) if used == model]
        trunk = f" on trunk {cause['family']}" if "family" in cause else ""
        news.append(f"new model {model}{trunk}" + (f" for {_format_clients(users)}" if users else ""))
    merged = {e.model: e.cause["into"] for e in step.events if e.kind == "merged"}
    if len(merged) > MAX_LISTED_EVENTS:
        news.append(f"{len(merged)} models merged into others")
    else:
        news += [f"model {gone} merged into {into}" for gone, into in merged.items()]
    if previous_models is None or len(previous_models) != len(step.model):
        previous_models = step.model
    moves: dict[int, list[str]] = {}
    for c, (old, new) in enumerate(zip(previous_models, step.model, strict=True)):
        while int(old) in merged:
            old = merged[int(old)]
        if old != new and new not in created:
            moves.setdefault(int(new), []).append(clients[c])
    n_movers = sum(map(len, moves.values()))
    if len(moves) > MAX_LISTED_EVENTS or (len(moves) > 1 and n_movers > MAX_LISTED_MOVERS):
        news.append(f"{n_movers} clients to {len(moves)} other models")
    else:
        news += [f"{_format_clients(movers)} to model {model}" for model, movers in sorted(moves.items())]
    is_tested = step.tested > 0
    accuracy = f"{100 * step.accuracy[is_tested].mean():6.2f} %" if is_tested.any() else "no test data"
    n = count_models(step.state)
    return f"  time {step.tau + 1:3d}   {accuracy}   {n} model{'s' if n > 1 else ' '}   {'; '.join(news)}".rstrip()


def _format_clients(names: Sequence[str]) -> str:
    listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return f"client{'s' if len(names) > 1 else ''} {listed}"
