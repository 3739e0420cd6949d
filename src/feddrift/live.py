"""A small table in the terminal that follows runs while they go on."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from feddrift.run import Step

SHOWN = 8  # runs in the table: the newest
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
        self.models = len(step.state.models)
        self.alarms += int(step.drifted.sum())
        self.merges += sum(event.kind == "merged" for event in step.events)


class Board:
    """The table of all runs of a command; rich draws it anew whenever it looks."""

    def __init__(self, n_runs: int) -> None:
        self.n_runs, self.runs, self.news, self._start = n_runs, list[Tally](), "", time.monotonic()

    def begin(self, name: str, n_steps: int) -> None:
        """A run starts."""
        self.runs.append(Tally(name, n_steps))

    def step(self, step: Step, news: str) -> None:
        """The run that goes on has done a time step, of which this is the news."""
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
                Text(run.name), f"{len(run.accuracy)}/{run.n_steps}", f"{100 * seen[-1]:.2f} %" if seen else "",
                spark(run.accuracy), str(run.models or ""), str(run.alarms), str(run.merges),
            )  # fmt: skip
        return Group(table, Text(self.news, overflow="ellipsis", no_wrap=True), Text(self._rest(), style="dim"))

    def _rest(self) -> str:
        done = sum(len(run.accuracy) for run in self.runs)
        total = sum(run.n_steps for run in self.runs) + (self.n_runs - len(self.runs)) * max(
            (run.n_steps for run in self.runs), default=0
        )
        if not done or done == total:
            return ""
        left = (time.monotonic() - self._start) / done * (total - done)
        return f"run {len(self.runs)} of {self.n_runs}, about {left:.0f} s left"


def spark(shares: list[float], width: int = 24) -> str:
    """The newest of these shares as little bars, 0 to 1.

    >>> spark([0.0, 0.5, float("nan"), 1.0])
    '▁▅ █'
    """
    top = len(BLOCKS) - 1
    return "".join(" " if np.isnan(a) else BLOCKS[min(top, int(a * len(BLOCKS)))] for a in shares[-width:])
