"""Following records as they grow, to tell a tracker what is new in them.

What a tracker is told is a function of the record alone, so a follower may be killed and started again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from feddrift.errors import DataError
from feddrift.reports.event_text import alarm_sentence, event_line
from feddrift.reports.trackers import News, Numbers, Tracked, Tracker, identity
from feddrift.runs.locks import is_being_written
from feddrift.runs.record import Record, file_name, find_packed, latest, part_of, paths, read_packed
from feddrift.scores import SCORES

MANY_CLIENTS = 100  # with more there is no curve for each
MANY_EVENTS = 20  # of one time step; the record has the rest
PATIENCE = 3  # looks without a run at work, until no other is expected to begin


def numbers(record: Record) -> list[Numbers]:
    """What there is to draw of each time step; accuracies are shares, and there where they are known.

    Trackers put names that begin alike together, and these groups in the order of the alphabet.
    """
    rows, names = record.rows, _names(record.header["clients"])
    sent = rows.models_sent.sum(axis=1).cumsum()
    found = []
    for t in range(rows.steps):
        tested = {name: float(a) for name, a in zip(names, rows.accuracy[t], strict=True) if not np.isnan(a)}
        shares = list(tested.values())
        step = {"accuracy/mean": float(np.mean(shares)), "accuracy/worst": min(shares)} if shares else {}
        step["federation/models"] = float(rows.n_models[t].max())
        step["federation/alarms"] = float(rows.drift[t].sum())
        step["federation/models_sent"] = float(sent[t])
        for name in SCORES:  # of which older records say nothing
            values = getattr(rows, name)[t]
            if not np.isnan(values).all():
                step[f"mean/{name}"] = float(np.nanmean(values))
        if len(names) <= MANY_CLIENTS:
            step |= {f"per_client/{name}": a for name, a in tested.items()}
        found.append(step)
    return found


def _names(clients: Sequence[str]) -> list[str]:
    """The clients' names in letters that all trackers take, no two alike, whoever joins later.

    >>> _names(["Łódź 1", "a/b", "a:b", ".."])
    ['Łódź_1', 'a_b', 'a_b-2', '3']
    """
    found: dict[str, None] = {}
    for c, client in enumerate(clients):
        name = re.sub(r"[^\w.-]", "_", client)[:100].strip(".") or str(c)
        while name in found:
            name += f"-{c}"
        found[name] = None
    return list(found)


def events(record: Record) -> list[str]:
    """What happened to models in each time step, what was decided, and what moved at alarms, in words, a line each."""
    found: list[list[str]] = [[] for _ in range(record.rows.steps)]
    clients = record.header["clients"]
    for event in record.events:
        found[event["t"]].append(event_line(event, clients))
    for (t, c), shifts in record.shifts.items():
        found[t].append(f"alarm of client {clients[c]}: {alarm_sentence(shifts, t)}")
    return [
        "\n".join(lines[:MANY_EVENTS] + [f"and {len(lines) - MANY_EVENTS} events more"] * (len(lines) > MANY_EVENTS))
        for lines in found
    ]


class Follower:
    """Hands what is new in the records below a folder, or in one record, to a tracker, look by look."""

    def __init__(self, run: Path, tracker: Tracker) -> None:
        self._run, self._tracker, self._runs = run, tracker, dict[Path, _Followed]()
        self._packed: list[Path] | None = None  # packed files, which are reported at the first look only
        self._quiet = PATIENCE  # looks since a run was at work

    @property
    def waits(self) -> bool:
        """Whether there may be news later: a run is at work, or was a moment ago."""
        return self._quiet < PATIENCE

    def look(self) -> Iterator[str]:
        """Tell the tracker what is new; yields a sentence for each run that begins or has ended."""
        self._quiet += 1
        if self._packed is None:
            self._packed = find_packed(self._run)
            for packed in self._packed:
                yield from self._report_packed(packed)
        for path in paths(self._run, may_be_none=bool(self._packed)):
            one = self._runs.setdefault(path, self._follow(path))
            yield from one.look()
            if one.at_work:
                self._quiet = 0

    def _report_packed(self, packed: Path) -> Iterator[str]:
        """Report all records of a packed file under the names that they have as plain files in its folder."""
        for record in read_packed(packed):
            path = packed.with_name(f"{file_name(record.header)}.jsonl")
            yield from self._follow(path).report_record(record)

    def _follow(self, path: Path) -> _Followed:
        below = path.relative_to(self._run) if self._run in path.parents else Path(path.name)
        return _Followed(path, below, self._tracker)

    def close(self) -> None:
        """Stop following; the runs go on."""
        for one in self._runs.values():
            one.end("running")


@dataclass
class _Followed:
    """One record, and how much of it has been told."""

    path: Path
    below: Path  # the same, as seen from the folder that is followed
    tracker: Tracker
    at_work: bool = False
    _seen: object = None  # what its files were like at the last look
    _tracked: Tracked | None = None  # while there is more to come
    _run: str = ""
    _status: str = ""
    _told: dict[int, Numbers] = field(default_factory=dict)
    _steps: int = 0  # whose events are told

    def look(self) -> Iterator[str]:
        self.at_work = is_being_written(self.path)  # before it is read: what nobody writes is read whole
        seen = self.at_work, _stamp(self.path), _stamp(part_of(self.path))
        if seen == self._seen:
            return
        try:
            record = latest(self.path)
        except DataError:
            if self.at_work:  # its header is not there yet
                return
            raise
        if record is None:
            return
        self._seen = seen
        yield from self.report_record(record)

    def report_record(self, record: Record) -> Iterator[str]:
        """Send the part of a record that the tracker does not have yet."""
        if identity(record.header) != self._run:
            self.end("interrupted")  # it is being run anew
            self._run, self._status, self._told, self._steps = identity(record.header), "", {}, 0
        status = "running" if record.status == "unfinished" and self.at_work else record.status
        if status != self._status or self._news(record):
            yield from self._tell(record, status)

    def _tell(self, record: Record, status: str) -> Iterator[str]:
        name = self.path.stem if record.runs_on else self.below.with_suffix("").as_posix()
        with _one_sentence():
            if self._tracked is None:
                self._tracked = self.tracker(name, record)
                self._told, self._steps = self._tracked.told, 0
            self._tracked.tell(self._news(record))
        if self._status != status == "running":
            yield f"{name}: following"
        self._told, self._steps, self._status = dict(enumerate(numbers(record), 1)), record.rows.steps, status
        if status != "running":
            self.end(status, record.seconds)
            yield f"{name}: {'stopped' if status == 'unfinished' else status} after {self._steps} time steps"

    def _news(self, record: Record) -> list[News]:
        found = []
        for t, (now, text) in enumerate(zip(numbers(record), events(record), strict=True), 1):
            told = self._told.get(t, {})
            new = News(t, {k: v for k, v in now.items() if told.get(k) != v}, text if t > self._steps else "")
            if new.numbers or new.events:
                found.append(new)
        return found

    def end(self, status: str, seconds: float | None = None) -> None:
        tracked, self._tracked = self._tracked, None
        if tracked is not None:
            with _one_sentence():
                tracked.end(status, seconds)


@contextmanager
def _one_sentence() -> Iterator[None]:
    """Whatever goes wrong in a tracker: its place may be wrong, out of reach or full."""
    try:
        yield
    except Exception as error:
        why = "no server answers there" if "Max retries exceeded" in str(error) else str(error) or type(error).__name__
        raise DataError(f"cannot write to the tracker: {why}") from error


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
