"""Runs in the trackers MLflow, TensorBoard and W&B, which receive the content of records."""

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

from feddrift.errors import ConfigError, unknown_name_error
from feddrift.reports.event_text import build_run_command
from feddrift.runs.record import Record

EVENT_FILE_SUFFIX = ".feddrift"  # of the names of event files that feddrift writes
MLFLOW_STATUS = {"complete": "FINISHED", "failed": "FAILED", "interrupted": "KILLED", "unfinished": "KILLED"}
MLFLOW_ENVIRONMENT = {  # a wrong address fails within seconds, not minutes, and MLflow prints nothing
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
MAX_NUMBERS_PER_REQUEST = 1000  # to MLflow
MAX_NOTE_CHARACTERS = 7900  # MLflow cuts notes at 8000
ELLIPSIS_CHARACTERS = 50  # reserved in a note for the line that replaces omitted events

Numbers = dict[str, float]


@dataclass(frozen=True)
class StepNews:
    """New numbers and events of a time step."""

    time: int  # the first time step is 1, as in reports
    numbers: Numbers
    events: str  # a sentence on each line


class TrackerRun(Protocol):
    """A run in a tracker."""

    reported_numbers: dict[int, Numbers]  # by time, the numbers that the tracker has already

    def log_steps(self, news: Sequence[StepNews]) -> None:
        """Add news, which are visible at once; a new follower sends all events of a run again."""

    def end_run(self, status: str, seconds: float | None) -> None:
        """Report the end of the run.

        Args:
            status: The status in the record; "running" if only the follower ends, and the run continues.
            seconds: The duration of the run; None: unknown.
        """


TrackerFactory = Callable[[str, Record], TrackerRun]  # creates or finds the run of a record under this name


def parse_tracker(target: str) -> TrackerFactory:
    """Return the factory of runs in a tracker.

    Args:
        target: ``mlflow:URI``, ``tensorboard:DIR`` or ``wandb:PROJECT``.

    Raises:
        ConfigError: The tracker is unknown or not installed, or its address is missing.
    """
    kind, _, place = target.partition(":")
    if kind not in TRACKERS:
        raise unknown_name_error("tracker", kind, TRACKERS)
    make, package, example = TRACKERS[kind]
    if not place.strip():
        raise ConfigError(f"{kind} needs a place behind a colon, such as {example}, got '{target}'")
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"{kind} needs the package {package}: pip install 'feddrift[{kind}]'")
    return partial(make, place)


def collect_parameters(header: Mapping[str, Any]) -> dict[str, str | float | bool]:
    """Return the configuration of a run as plain values by name."""
    values = {name: header[name] for name in ("stream", "algorithm", "seed", "engine")}
    values |= header["local"] | header["overrides"] | header["settings"]
    return {k: v if isinstance(v, str | int | float) else "none" if v is None else str(v) for k, v in values.items()}


def compute_run_id(header: Mapping[str, Any]) -> str:
    """Return an id of a run, which does not depend on the path of its record; a new start of the run changes it."""
    values = [header[name] for name in ("stream", "algorithm", "settings", "overrides", "seed", "started")]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


class TensorBoard:
    """Run in TensorBoard: a folder with an event file, which replaces an earlier one."""

    def __init__(self, folder: str, name: str, record: Record) -> None:
        from tensorboardX import SummaryWriter
        from tensorboardX.summary import hparams

        self.reported_numbers: dict[int, Numbers] = {}
        run_folder = Path(folder, name)
        for old in run_folder.glob(f"events.out.tfevents.*{EVENT_FILE_SUFFIX}"):
            old.unlink()
        # purge_step: a TensorBoard that has read the old file drops its values from step 0 on.
        self._writer = SummaryWriter(str(run_folder), purge_step=0, filename_suffix=EVENT_FILE_SUFFIX)
        _, begin, self._end = hparams(collect_parameters(record.header), {})
        self._writer.file_writer.add_summary(begin)
        self._writer.add_text("command", f"`{build_run_command(record.header)[0]}`", 0)
        self._writer.flush()

    def log_steps(self, news: Sequence[StepNews]) -> None:
        for step in news:
            for key, value in step.numbers.items():
                self._writer.add_scalar(key, value, step.time)
            if step.events:
                self._writer.add_text("events", step.events.replace("\n", "\n\n"), step.time)
        self._writer.flush()

    def end_run(self, status: str, seconds: float | None) -> None:
        if status == "complete":
            self._writer.file_writer.add_summary(self._end)
        self._writer.close()


class MLflow:
    """Run on a tracking server of MLflow or in a database; a tag identifies it."""

    def __init__(self, uri: str, name: str, record: Record) -> None:
        for variable, value in MLFLOW_ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
        logging.getLogger("urllib3").setLevel(logging.ERROR)
        from mlflow import MlflowClient

        self._header = record.header
        self._events = dict[int, str]()
        self._started = int(1000 * datetime.fromisoformat(record.header["started"]).timestamp())
        self._client = MlflowClient(uri)
        self._run = self._find_run() or self._create_run(name)
        self.reported_numbers = self._load_reported_numbers()

    def _get_experiment_id(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "feddrift"
        experiment = self._client.get_experiment_by_name(name)
        return str(experiment.experiment_id if experiment else self._client.create_experiment(name))

    def _find_run(self) -> str | None:
        query = f"tags.`feddrift.run` = '{compute_run_id(self._header)}'"
        for run in self._client.search_runs([self._get_experiment_id()], query):
            self._client.update_run(run.info.run_id, status="RUNNING")
            return str(run.info.run_id)
        return None

    def _create_run(self, name: str) -> str:
        from mlflow.entities import Param

        tags = {"feddrift.run": compute_run_id(self._header)}
        run = self._client.create_run(self._get_experiment_id(), self._started, tags, name).info.run_id
        self._client.log_batch(run, params=[Param(k, str(v)) for k, v in collect_parameters(self._header).items()])
        return str(run)

    def _load_reported_numbers(self) -> dict[int, Numbers]:
        numbers: dict[int, Numbers] = {}
        for key in self._client.get_run(self._run).data.metrics:
            for metric in self._client.get_metric_history(self._run, key):
                numbers.setdefault(metric.step, {})[key] = metric.value
        return numbers

    def log_steps(self, news: Sequence[StepNews]) -> None:
        from mlflow.entities import Metric

        timestamp = int(1000 * time.time())
        metrics = [Metric(key, value, timestamp, step.time) for step in news for key, value in step.numbers.items()]
        for k in range(0, len(metrics), MAX_NUMBERS_PER_REQUEST):
            self._client.log_batch(self._run, metrics=metrics[k : k + MAX_NUMBERS_PER_REQUEST])
        self._events |= {step.time: step.events for step in news if step.events}
        self._client.set_tag(self._run, "mlflow.note.content", self._build_note())

    def _build_note(self) -> str:
        """Return the note on the run for MLflow: its command and its events, without the oldest if it is too long."""
        lines = [f"- time {t}: {line}" for t, events in sorted(self._events.items()) for line in events.split("\n")]
        text = f"`{build_run_command(self._header)[0]}`\n\n"
        limit = MAX_NOTE_CHARACTERS
        while lines and len(text) + sum(len(line) + 1 for line in lines) > limit:
            lines = lines[1:]
            limit = MAX_NOTE_CHARACTERS - ELLIPSIS_CHARACTERS
        return text + "- ...\n" * (limit < MAX_NOTE_CHARACTERS) + "\n".join(lines)

    def end_run(self, status: str, seconds: float | None) -> None:
        if status in MLFLOW_STATUS:
            end = None if seconds is None else self._started + int(1000 * seconds)
            self._client.set_terminated(self._run, MLFLOW_STATUS[status], end)


class WandB:
    """Run that W&B stores on this machine until `wandb sync`; it replaces an earlier one."""

    def __init__(self, project: str, name: str, record: Record) -> None:
        import wandb

        self.reported_numbers: dict[int, Numbers] = {}
        self._run = wandb.init(
            project=project,
            name=name,
            id=compute_run_id(record.header),
            config=collect_parameters(record.header),
            notes=build_run_command(record.header)[0],
            mode="offline",
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
        )
        self._run.define_metric("*", step_metric="time")
        run_folder = Path(self._run.settings.sync_dir)
        for old in run_folder.parent.glob(f"offline-run-*-{compute_run_id(record.header)}"):
            if old != run_folder:
                shutil.rmtree(old)

    def log_steps(self, news: Sequence[StepNews]) -> None:
        for step in news:
            self._run.log({"time": step.time, **step.numbers, **({"events": step.events} if step.events else {})})

    def end_run(self, status: str, seconds: float | None) -> None:
        self._run.finish(exit_code=0 if status in ("complete", "running") else 1)


# The class, the package and an example of the target of each tracker.
TRACKERS: dict[str, tuple[Callable[[str, str, Record], TrackerRun], str, str]] = {
    "mlflow": (MLflow, "mlflow", "mlflow:sqlite:///mlflow.db"),
    "tensorboard": (TensorBoard, "tensorboardX", "tensorboard:tb"),
    "wandb": (WandB, "wandb", "wandb:my-project"),
}
