"""What somebody should be told of a federation, and the log of who joined, was refused or was changed, when.

Notices are read off the record that the server writes. What has been told stands in ``state/audit.jsonl``, so that a
server which starts again tells nothing twice.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import subprocess
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from feddrift.deploy.certificates import days_left
from feddrift.deploy.status import record_path, status
from feddrift.reports.exchanges import REFUSED
from feddrift.reports.story import alarm_sentence
from feddrift.runs.record import Record, part_of

What = Literal["drift", "silent", "refused", "quorum", "stopped", "certificate", "joined", "back", "changed"]
TOLD: tuple[What, ...] = ("drift", "silent", "refused", "quorum", "stopped", "certificate")  # the others are kept only
SOON = 30, 7, 1  # days before a certificate ends
EVERY = 10.0  # seconds
TIMEOUT = 30.0  # of a command or a webhook

_log = logging.getLogger("feddrift")


@dataclass(frozen=True)
class Notice:
    """One thing that happened."""

    event: What
    when: str  # the time step, or the clock's time
    client: str | None
    text: str

    @property
    def key(self) -> tuple[str, str, str | None]:
        """Of two notices with the same key only one is told."""
        return self.event, self.when, self.client


def of_record(record: Record) -> Iterator[Notice]:
    """Who came, fell silent, was refused and came back, and who drifted."""
    names, well = record.header["clients"], dict[int, bool]()
    for line in record.exchanges:
        for c, trouble in zip(line["c"], line["trouble"], strict=True):
            if line["asked"] == "explain" or well.get(c) == (trouble is None):
                continue
            if trouble is None:
                known = c in well
                word = "is back" if known else "has joined"
                yield Notice("back" if known else "joined", line["at"], names[c], f"client {names[c]} {word}")
            elif c in well or trouble.startswith(REFUSED):
                refused = trouble.startswith(REFUSED)
                text = f"client {names[c]}: {trouble}" if refused else f"client {names[c]} is silent: {trouble}"
                yield Notice("refused" if refused else "silent", line["at"], names[c], text)
            well[c] = trouble is None
    for t in range(record.rows.steps):
        for c in range(record.rows.drift.shape[1]):
            if record.rows.drift[t, c]:
                shifts = record.shifts.get((t, c))
                why = "" if shifts is None else f": {alarm_sentence(shifts, t)}"
                yield Notice("drift", f"time {t + 1}", names[c], f"alarm of client {names[c]} at time {t + 1}{why}")


def of_certificates(server: Path) -> Iterator[Notice]:
    """Those that end soon."""
    for name, days in days_left(server).items():
        due = [limit for limit in SOON if days <= limit]
        if due:
            text = f"{name} ends in {days:.0f} days" if days > 0 else f"{name} has ended: nobody can connect any more"
            yield Notice("certificate", f"{min(due)} days before", None, text)


def of_stop(server: Path) -> Iterator[Notice]:
    """The federation's end before its time."""
    federation = status(server)
    if federation is None or federation.word != "stopped":
        return
    log = server / "state" / "server.log"
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    last = lines[-1] if lines else "it wrote no log"
    when = f"after {len(federation.record.exchanges)} exchanges"
    yield Notice("quorum" if "quorum" in last else "stopped", when, None, f"the federation has stopped: {last}")


class Herald:
    """Looks at a federation, writes what is new to the audit log, and tells it to commands and webhooks."""

    def __init__(self, server: Path, targets: Sequence[str] = ()) -> None:
        self.server, self.targets = server, targets
        self._record: tuple[tuple[int, int], list[Notice]] | None = None

    def look(self) -> list[Notice]:
        """What nobody was told yet."""
        found = [*self._of_record(), *of_stop(self.server), *of_certificates(self.server)]
        told = {notice.key for notice in audited(self.server)}
        new = list({notice.key: notice for notice in found if notice.key not in told}.values())
        for notice in new:
            audit(self.server, notice)
            for target in self.targets if notice.event in TOLD else ():
                deliver(target, notice, self.server)
        return new

    def _of_record(self) -> list[Notice]:
        """Read again only where the record has changed."""
        path = record_path(self.server)
        file = next((file for file in (part_of(path), path) if file.exists()), None)
        if file is None:
            return []
        stamp = file.stat().st_size, file.stat().st_mtime_ns
        if self._record is None or self._record[0] != stamp:
            federation = status(self.server)
            self._record = stamp, [] if federation is None else list(of_record(federation.record))
        return self._record[1]

    @contextmanager
    def watching(self, every: float = EVERY) -> Iterator[None]:
        """Look again and again meanwhile; what goes wrong is logged, and stops nothing."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(every):
                try:
                    self.look()
                except Exception as error:
                    _log.warning("nobody could be told: %s: %s", type(error).__name__, error)

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(2)


def deliver(target: str, notice: Notice, server: Path) -> None:
    """Post a notice as JSON to an address, or give it to a command: as JSON on its input, and in its environment."""
    body = json.dumps({"experiment": record_path(server).stem, **asdict(notice)})
    try:
        if target.startswith(("http://", "https://")):
            request = urllib.request.Request(target, body.encode(), {"Content-Type": "application/json"})
            urllib.request.urlopen(request, timeout=TIMEOUT).close()
        else:
            fields = {f"FEDDRIFT_{key.upper()}": value or "" for key, value in asdict(notice).items()}
            subprocess.run(
                shlex.split(target), input=body, text=True, check=True, timeout=TIMEOUT, cwd=server,
                env=os.environ | fields, stdout=subprocess.DEVNULL,
            )  # fmt: skip
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        _log.warning("%s was not told '%s': %s", target.split("?")[0], notice.text, error)


def audit(server: Path, notice: Notice) -> None:
    """Append it to the audit log, which is only ever appended to."""
    path = server / "state" / "audit.jsonl"
    path.parent.mkdir(exist_ok=True)
    line = {"at": datetime.now(UTC).isoformat(timespec="seconds"), **asdict(notice)}
    with open(path, "a", encoding="utf-8") as log:
        log.write(json.dumps(line) + "\n")
        log.flush()
        os.fsync(log.fileno())


def changed(server: Path, client: str | None, text: str) -> None:
    """Keep in the audit log what an operator did."""
    audit(server, Notice("changed", datetime.now(UTC).isoformat(), client, text))


def audited(server: Path) -> list[Notice]:
    """All that the audit log has; a line that was cut short is left out."""
    path, found = server / "state" / "audit.jsonl", []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
            found.append(Notice(entry["event"], entry["when"], entry["client"], entry["text"]))
        except (ValueError, KeyError, TypeError):
            continue
    return found
