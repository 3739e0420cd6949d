"""Followers of records: they send new numbers and events to a tracker while the records grow.

The values in a tracker depend only on the record, so a follower may be killed and started again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from feddrift.errors import DataError
from feddrift.reports.event_text import explain_alarm, format_event_line
from feddrift.reports.trackers import Numbers, StepNews, TrackerFactory, TrackerRun, compute_run_id
from feddrift.runs.locks import is_being_written
from feddrift.runs.record import (
    Record,
    build_record_name,
    find_packed_files,
    find_record_paths,
    get_part_path,
    read_latest,
    read_packed_file,
)
from feddrift.scores import SCORES

MAX_CLIENT_CURVES = 100  # with more clients, trackers get no curves of single clients
MAX_EVENTS_PER_STEP = 20  # of more events, only the first are sent
MAX_IDLE_POLLS = 3  # after this number of polls without a running run, no news are expected


def collect_step_numbers(record: Record) -> list[Numbers]:
    """Return the numbers of each time step by name; unknown accuracies are left out.

    Trackers group names by their prefix, and sort the groups alphabetically.
    """
    rows = record.rows
    names = _build_client_names(record.header["clients"])
    sent = rows.models_sent.sum(axis=1).cumsum()
    numbers = []
    for t in range(rows.steps):
        tested = {name: float(a) for name, a in zip(names, rows.accuracy[t], strict=True) if not np.isnan(a)}
        accuracies = list(tested.values())
        step = {"accuracy/mean": float(np.mean(accuracies)), "accuracy/worst": min(accuracies)} if accuracies else {}
        step["federation/models"] = float(rows.n_models[t].max())
        step["federation/alarms"] = float(rows.drift[t].sum())
        step["federation/models_sent"] = float(sent[t])
        for name in SCORES:  # older records do not contain them
            values = getattr(rows, name)[t]
            if not np.isnan(values).all():
                step[f"mean/{name}"] = float(np.nanmean(values))
        if len(names) <= MAX_CLIENT_CURVES:
            step |= {f"per_client/{name}": a for name, a in tested.items()}
        numbers.append(step)
    return numbers


def _build_client_names(clients: Sequence[str]) -> list[str]:
    """Return distinct names of the clients in characters that all trackers allow; new clients do not change old names.

    >>> _build_client_names(["Łódź 1", "a/b", "a:b", ".."])
    ['Łódź_1', 'a_b', 'a_b-2', '3']
    """
    names: dict[str, None] = {}
    for c, client in enumerate(clients):
        name = re.sub(r"[^\w.-]", "_", client)[:100].strip(".") or str(c)
        while name in names:
            name += f"-{c}"
        names[name] = None
    return list(names)


def describe_step_events(record: Record) -> list[str]:
    """Describe the events of each time step, and the changes of the data at alarms, in a sentence on each line."""
    lines_of_step: list[list[str]] = [[] for _ in range(record.rows.steps)]
    clients = record.header["clients"]
    for event in record.events:
        lines_of_step[event["t"]].append(format_event_line(event, clients))
    for (t, c), shifts in record.shifts.items():
        lines_of_step[t].append(f"alarm of client {clients[c]}: {explain_alarm(shifts, t)}")
    return [
        "\n".join(
            lines[:MAX_EVENTS_PER_STEP]
            + [f"and {len(lines) - MAX_EVENTS_PER_STEP} events more"] * (len(lines) > MAX_EVENTS_PER_STEP)
        )
        for lines in lines_of_step
    ]


class Follower:
    """Follower of the records below a folder, or of one record; each poll sends their news to a tracker.

    Args:
        source: The folder or the record.
        tracker: The tracker.
    """

    def __init__(self, source: Path, tracker: TrackerFactory) -> None:
        self._source = source
        self._tracker = tracker
        self._records = dict[Path, _FollowedRecord]()
        self._packed_files: list[Path] | None = None  # reported at the first poll only
        self._idle_polls = MAX_IDLE_POLLS  # polls since a run was running

    @property
    def expects_news(self) -> bool:
        """True if a run is running, or was running a moment ago."""
        return self._idle_polls < MAX_IDLE_POLLS

    def report_news(self) -> Iterator[str]:
        """Send the news to the tracker; yield a sentence for each run that begins or has ended."""
        self._idle_polls += 1
        if self._packed_files is None:
            self._packed_files = find_packed_files(self._source)
            for path in self._packed_files:
                yield from self._report_packed_file(path)
        for path in find_record_paths(self._source, allow_empty=bool(self._packed_files)):
            followed = self._records.setdefault(path, self._create_followed_record(path))
            yield from followed.poll_record()
            if followed.is_running:
                self._idle_polls = 0

    def _report_packed_file(self, packed: Path) -> Iterator[str]:
        """Report all records of a packed file under the names that they have as plain files in its folder."""
        for record in read_packed_file(packed):
            path = packed.with_name(f"{build_record_name(record.header)}.jsonl")
            yield from self._create_followed_record(path).report_record(record)

    def _create_followed_record(self, path: Path) -> _FollowedRecord:
        relative_path = path.relative_to(self._source) if self._source in path.parents else Path(path.name)
        return _FollowedRecord(path, relative_path, self._tracker)

    def close(self) -> None:
        """Stop following; the runs continue."""
        for followed in self._records.values():
            followed.end_tracking("running")


@dataclass
class _FollowedRecord:
    """A record, and the part of it that the tracker has received."""

    path: Path
    relative_path: Path  # relative to the source of the follower
    tracker: TrackerFactory
    is_running: bool = False
    _file_state: object = None  # the versions of its files at the last poll
    _tracker_run: TrackerRun | None = None  # None before the first news and after the end
    _run_id: str = ""
    _status: str = ""
    _reported_numbers: dict[int, Numbers] = field(default_factory=dict)  # by time
    _reported_steps: int = 0  # number of time steps whose events are reported

    def poll_record(self) -> Iterator[str]:
        """Report the record if it has changed since the last poll."""
        self.is_running = is_being_written(self.path)  # before reading: a record without a writer is read completely
        file_state = self.is_running, _get_file_version(self.path), _get_file_version(get_part_path(self.path))
        if file_state == self._file_state:
            return
        try:
            record = read_latest(self.path)
        except DataError:
            if self.is_running:  # its header is not written yet
                return
            raise
        if record is None:
            return
        self._file_state = file_state
        yield from self.report_record(record)

    def report_record(self, record: Record) -> Iterator[str]:
        """Send the part of a record that the tracker does not have yet."""
        if compute_run_id(record.header) != self._run_id:
            self.end_tracking("interrupted")  # the run has started again
            self._run_id = compute_run_id(record.header)
            self._status = ""
            self._reported_numbers = {}
            self._reported_steps = 0
        status = "running" if record.status == "unfinished" and self.is_running else record.status
        if status != self._status or self._find_news(record):
            yield from self._send_news(record, status)

    def _send_news(self, record: Record, status: str) -> Iterator[str]:
        name = self.path.stem if record.runs_on else self.relative_path.with_suffix("").as_posix()
        with _convert_tracker_errors():
            if self._tracker_run is None:
                self._tracker_run = self.tracker(name, record)
                self._reported_numbers = self._tracker_run.reported_numbers
                self._reported_steps = 0
            self._tracker_run.log_steps(self._find_news(record))
        if self._status != status == "running":
            yield f"{name}: following"
        self._reported_numbers = dict(enumerate(collect_step_numbers(record), 1))
        self._reported_steps = record.rows.steps
        self._status = status
        if status != "running":
            self.end_tracking(status, record.seconds)
            yield f"{name}: {'stopped' if status == 'unfinished' else status} after {self._reported_steps} time steps"

    def _find_news(self, record: Record) -> list[StepNews]:
        """Return the numbers that the tracker does not have, and the events of new time steps."""
        news = []
        for t, (numbers, events) in enumerate(
            zip(collect_step_numbers(record), describe_step_events(record), strict=True), 1
        ):
            reported = self._reported_numbers.get(t, {})
            new_numbers = {k: v for k, v in numbers.items() if reported.get(k) != v}
            step = StepNews(t, new_numbers, events if t > self._reported_steps else "")
            if step.numbers or step.events:
                news.append(step)
        return news

    def end_tracking(self, status: str, seconds: float | None = None) -> None:
        """End the run in the tracker, if it has begun there."""
        tracker_run = self._tracker_run
        self._tracker_run = None
        if tracker_run is not None:
            with _convert_tracker_errors():
                tracker_run.end_run(status, seconds)


@contextmanager
def _convert_tracker_errors() -> Iterator[None]:
    """Convert any error of a tracker to DataError: its address may be wrong, unreachable or full."""
    try:
        yield
    except Exception as error:
        why = "no server answers there" if "Max retries exceeded" in str(error) else str(error) or type(error).__name__
        raise DataError(f"cannot write to the tracker: {why}") from error


def _get_file_version(path: Path) -> tuple[int, int, int] | None:
    """Return numbers that change when the file changes; None if it does not exist."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns
