"""What a terminal shows of runs while they go on: a small table, and a line for each time step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from feddrift.simulation import Step, n_models
from feddrift.types import Ints

SHOWN = 8  # runs in the table: the newest
FEW = 12  # events of a kind that the line of a time step tells one by one
MANY_MOVERS = 20  # clients that change their models in one time step: above this number they are only counted
BLOCKS = "▁▂▃▄▅▆▇█"


@dataclass
class Tally:
    """What one run has shown so far."""

    name: str
    n_steps: int
    accuracy: list[float] = field(default_factory=list)  # by time step; NaN without test data
    models: int = 0
    alarms: int = 0  # of all clients so far
    merges: int = 0

    def add(self, step: Step) -> None:
        """Count one more time step."""
        self.accuracy.append(float(step.accuracy[step.tested > 0].mean()) if step.tested.any() else np.nan)
        self.models = n_models(step.state)
        self.alarms += int(step.drifted.sum())
        self.merges += sum(event.kind == "merged" for event in step.events)


class Board:
    """The table of all runs of a command; rich draws it anew whenever it looks."""

    def __init__(self, n_runs: int) -> None:
        self.n_runs, self.runs, self.news, self._start = n_runs, list[Tally](), "", time.monotonic()

    def begin(self, name: str, n_steps: int) -> None:
        """Add a line for a run that starts now."""
        self.runs.append(Tally(name, n_steps))

    def step(self, step: Step, news: str) -> None:
        """Count a time step of the last run, and show `news` below the table."""
        self.runs[-1].add(step)
        self.news = news.strip()

    def __rich__(self) -> RenderableType:
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1))
        table.add_column("run", overflow="fold", min_width=12)
        for name in ("time", "accuracy", "so far", "models", "alarms", "merges"):
            table.add_column(name, justify="left" if name == "so far" else "right", no_wrap=True)
        for run in self.runs[-SHOWN:]:
            seen = [a for a in run.accuracy if not np.isnan(a)]
            table.add_row(
                Text(run.name),
                f"{len(run.accuracy)}/{run.n_steps}",
                f"{100 * seen[-1]:.2f} %" if seen else "",
                spark(run.accuracy),
                str(run.models or ""),
                str(run.alarms),
                str(run.merges),
            )
        return Group(table, Text(self.news, overflow="ellipsis", no_wrap=True), Text(self._time_left(), style="dim"))

    def _time_left(self) -> str:
        steps_done = sum(len(run.accuracy) for run in self.runs)
        total = sum(run.n_steps for run in self.runs) + (self.n_runs - len(self.runs)) * max(
            (run.n_steps for run in self.runs), default=0
        )
        if not steps_done or steps_done == total:
            return ""
        left = (time.monotonic() - self._start) / steps_done * (total - steps_done)
        return f"run {len(self.runs)} of {self.n_runs}, about {left:.0f} s left"


def spark(shares: list[float], width: int = 24) -> str:
    """The newest of these shares as little bars, 0 to 1.

    >>> spark([0.0, 0.5, float("nan"), 1.0])
    '▁▅ █'
    """
    top = len(BLOCKS) - 1
    return "".join(" " if np.isnan(a) else BLOCKS[min(top, int(a * len(BLOCKS)))] for a in shares[-width:])


def step_line(step: Step, before: Ints | None, clients: Sequence[str]) -> str:
    """One time step in one line: accuracy, number of models, and who moved where."""
    news = []
    born = {e.model: e.cause for e in step.events if e.kind == "created"}
    if len(born) > FEW:
        news.append(f"{len(born)} new models")
    for model, cause in sorted(born.items()) if len(born) <= FEW else ():
        users = [name for name, used in zip(clients, step.model, strict=True) if used == model]
        trunk = f" on trunk {cause['family']}" if "family" in cause else ""
        news.append(f"new model {model}{trunk}" + (f" for {_few(users)}" if users else ""))
    merged = {e.model: e.cause["into"] for e in step.events if e.kind == "merged"}
    if len(merged) > FEW:
        news.append(f"{len(merged)} models merged into others")
    else:
        news += [f"model {gone} merged into {into}" for gone, into in merged.items()]
    was = step.model if before is None or len(before) != len(step.model) else before
    moves: dict[int, list[str]] = {}
    for c, (old, new) in enumerate(zip(was, step.model, strict=True)):
        while int(old) in merged:
            old = merged[int(old)]
        if old != new and new not in born:
            moves.setdefault(int(new), []).append(clients[c])
    n_movers = sum(map(len, moves.values()))
    if len(moves) > FEW or (len(moves) > 1 and n_movers > MANY_MOVERS):
        news.append(f"{n_movers} clients to {len(moves)} other models")
    else:
        news += [f"{_few(movers)} to model {model}" for model, movers in sorted(moves.items())]
    seen = step.tested > 0
    accuracy = f"{100 * step.accuracy[seen].mean():6.2f} %" if seen.any() else "no test data"
    n = n_models(step.state)
    return f"  time {step.tau + 1:3d}   {accuracy}   {n} model{'s' if n > 1 else ' '}   {'; '.join(news)}".rstrip()


def _few(names: Sequence[str]) -> str:
    listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return f"client{'s' if len(names) > 1 else ''} {listed}"
