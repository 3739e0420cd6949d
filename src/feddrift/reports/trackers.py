"""A run in MLflow, TensorBoard or W&B; `follow` tells them what is in its record."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from feddrift.errors import ConfigError, unknown
from feddrift.reports.event_text import command
from feddrift.runs.record import Record

OURS = ".feddrift"  # how the names of our event files end
MLFLOW_STATUS = {"complete": "FINISHED", "failed": "FAILED", "interrupted": "KILLED", "unfinished": "KILLED"}
MLFLOW_QUIET = {  # a wrong address is told in seconds, not minutes, and nothing is printed beside our own lines
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
AT_ONCE = 1000  # numbers in one request to MLflow
LONGEST_NOTE = 7900  # characters; MLflow cuts them at 8000

Numbers = dict[str, float]


@dataclass(frozen=True)
class News:
    """What is new of a time step; the first is 1, as in reports."""

    time: int
    numbers: Numbers
    events: str  # in words, a line each


class Tracked(Protocol):
    """A run in a tracker."""

    told: dict[int, Numbers]  # by time, what it has from before and need not be told again

    def tell(self, news: Sequence[News]) -> None:
        """Add these, and let them be seen at once; events come again when a run is followed again."""

    def end(self, status: str, seconds: float | None) -> None:
        """How the run ended and how long it took, as its record says; "running" if only its follower ends."""


Tracker = Callable[[str, Record], Tracked]  # makes a run of this name, or finds it again


def tracker(target: str) -> Tracker:
    """What `mlflow:URI`, `tensorboard:DIR` or `wandb:PROJECT` means."""
    kind, _, place = target.partition(":")
    if kind not in TRACKERS:
        raise unknown("tracker", kind, TRACKERS)
    make, package, example = TRACKERS[kind]
    if not place.strip():
        raise ConfigError(f"{kind} needs a place behind a colon, such as {example}, got '{target}'")
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"{kind} needs the package {package}: pip install 'feddrift[{kind}]'")
    return partial(make, place)


def parameters(header: Mapping[str, Any]) -> dict[str, str | float | bool]:
    """What was run, as names with one plain value each."""
    found = {name: header[name] for name in ("stream", "algorithm", "seed", "engine")}
    found |= header["local"] | header["overrides"] | header["settings"]
    return {k: v if isinstance(v, str | int | float) else "none" if v is None else str(v) for k, v in found.items()}


def identity(header: Mapping[str, Any]) -> str:
    """Which run it is, wherever its record lies; started over, it is another."""
    what = [header[name] for name in ("stream", "algorithm", "settings", "overrides", "seed", "started")]
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


class TensorBoard:
    """A folder with an event file, which is written anew."""

    def __init__(self, folder: str, name: str, record: Record) -> None:
        from tensorboardX import SummaryWriter
        from tensorboardX.summary import hparams

        self.told: dict[int, Numbers] = {}
        place = Path(folder, name)
        for old in place.glob(f"events.out.tfevents.*{OURS}"):
            old.unlink()
        # A TensorBoard that has read the old file forgets what it knows from step 0 on.
        self._writer = SummaryWriter(str(place), purge_step=0, filename_suffix=OURS)
        _, begin, self._end = hparams(parameters(record.header), {})
        self._writer.file_writer.add_summary(begin)
        self._writer.add_text("command", f"`{command(record.header)[0]}`", 0)
        self._writer.flush()

    def tell(self, news: Sequence[News]) -> None:
        for step in news:
            for key, value in step.numbers.items():
                self._writer.add_scalar(key, value, step.time)
            if step.events:
                self._writer.add_text("events", step.events.replace("\n", "\n\n"), step.time)
        self._writer.flush()

    def end(self, status: str, seconds: float | None) -> None:
        if status == "complete":
            self._writer.file_writer.add_summary(self._end)
        self._writer.close()


class MLflow:
    """A run on a tracking server or in a database, found again by a tag."""

    def __init__(self, uri: str, name: str, record: Record) -> None:
        for variable, value in MLFLOW_QUIET.items():
            os.environ.setdefault(variable, value)
        logging.getLogger("urllib3").setLevel(logging.ERROR)
        from mlflow import MlflowClient

        self._header, self._events = record.header, dict[int, str]()
        self._started = int(1000 * datetime.fromisoformat(record.header["started"]).timestamp())
        self._client = MlflowClient(uri)
        self._run = self._find() or self._make(name)
        self.told = self._known()

    def _experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "feddrift"
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found else self._client.create_experiment(name))

    def _find(self) -> str | None:
        tagged = f"tags.`feddrift.run` = '{identity(self._header)}'"
        for run in self._client.search_runs([self._experiment()], tagged):
            self._client.update_run(run.info.run_id, status="RUNNING")
            return str(run.info.run_id)
        return None

    def _make(self, name: str) -> str:
        from mlflow.entities import Param

        tags = {"feddrift.run": identity(self._header)}
        run = self._client.create_run(self._experiment(), self._started, tags, name).info.run_id
        self._client.log_batch(run, params=[Param(k, str(v)) for k, v in parameters(self._header).items()])
        return str(run)

    def _known(self) -> dict[int, Numbers]:
        found: dict[int, Numbers] = {}
        for key in self._client.get_run(self._run).data.metrics:
            for old in self._client.get_metric_history(self._run, key):
                found.setdefault(old.step, {})[key] = old.value
        return found

    def tell(self, news: Sequence[News]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        found = [Metric(key, value, now, step.time) for step in news for key, value in step.numbers.items()]
        for k in range(0, len(found), AT_ONCE):
            self._client.log_batch(self._run, metrics=found[k : k + AT_ONCE])
        self._events |= {step.time: step.events for step in news if step.events}
        self._client.set_tag(self._run, "mlflow.note.content", self._note())

    def _note(self) -> str:
        """The run's description in MLflow: its command, and what happened, the newest where that is too long."""
        lines = [f"- time {t}: {line}" for t, told in sorted(self._events.items()) for line in told.split("\n")]
        text, room = f"`{command(self._header)[0]}`\n\n", LONGEST_NOTE
        while lines and len(text) + sum(len(line) + 1 for line in lines) > room:
            lines, room = lines[1:], LONGEST_NOTE - 50
        return text + "- ...\n" * (room < LONGEST_NOTE) + "\n".join(lines)

    def end(self, status: str, seconds: float | None) -> None:
        if status in MLFLOW_STATUS:
            ended = None if seconds is None else self._started + int(1000 * seconds)
            self._client.set_terminated(self._run, MLFLOW_STATUS[status], ended)


class WandB:
    """A run that W&B keeps on this machine until `wandb sync`, written anew."""

    def __init__(self, project: str, name: str, record: Record) -> None:
        import wandb

        self.told: dict[int, Numbers] = {}
        self._run = wandb.init(
            project=project,
            name=name,
            id=identity(record.header),
            config=parameters(record.header),
            notes=command(record.header)[0],
            mode="offline",
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
        )
        self._run.define_metric("*", step_metric="time")
        new = Path(self._run.settings.sync_dir)
        for old in new.parent.glob(f"offline-run-*-{identity(record.header)}"):
            if old != new:
                shutil.rmtree(old)

    def tell(self, news: Sequence[News]) -> None:
        for step in news:
            self._run.log({"time": step.time, **step.numbers, **({"events": step.events} if step.events else {})})

    def end(self, status: str, seconds: float | None) -> None:
        self._run.finish(exit_code=0 if status in ("complete", "running") else 1)


TRACKERS: dict[str, tuple[Callable[[str, str, Record], Tracked], str, str]] = {  # its package, and how to write it
    "mlflow": (MLflow, "mlflow", "mlflow:sqlite:///mlflow.db"),
    "tensorboard": (TensorBoard, "tensorboardX", "tensorboard:tb"),
    "wandb": (WandB, "wandb", "wandb:my-project"),
}
