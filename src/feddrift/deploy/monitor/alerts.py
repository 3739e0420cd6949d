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
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

import numpy as np

from feddrift.deploy.monitor.logs import read_stop_reason
from feddrift.deploy.monitor.status import Status, find_record_path, read_status
from feddrift.deploy.pki.certificates import read_days_left
from feddrift.reports.event_text import explain_alarm
from feddrift.reports.exchanges import REFUSED_REPLY_PREFIX
from feddrift.runs.locks import is_being_written
from feddrift.runs.record import AUDIT_FILE, Record, get_part_path

NoticeKind = Literal[
    "drift", "silent", "refused", "quorum", "stopped", "certificate", "archive", "damaged", "joined", "back", "changed"
]
DELIVERED_KINDS: tuple[NoticeKind, ...] = (
    "drift",
    "silent",
    "refused",
    "quorum",
    "stopped",
    "certificate",
)  # the others are kept only
CERTIFICATE_WARNING_DAYS = 30, 7, 1  # days before a certificate ends
CHECK_INTERVAL_SECONDS = 10.0  # seconds
DELIVERY_TIMEOUT_SECONDS = 30.0  # of a command or a webhook

_log = logging.getLogger("feddrift")


@dataclass(frozen=True)
class Notice:
    """One thing that happened."""

    event: NoticeKind
    when: str  # the time step, or the clock's time
    client: str | None
    text: str

    @property
    def key(self) -> tuple[str, str, str | None]:
        """Of two notices with the same key only one is told."""
        return self.event, self.when, self.client


def find_record_notices(record: Record) -> Iterator[Notice]:
    """Who came, fell silent, was refused and came back, and who drifted."""
    names, state, joined = record.header["clients"], dict[int, NoticeKind](), set[int]()
    for line in record.exchanges:
        for c, trouble in zip(line["c"], line["trouble"], strict=True):
            now: NoticeKind = "back" if trouble is None else "refused" if trouble.startswith(REFUSED_REPLY_PREFIX) else "silent"
            unknown = now == "silent" and c not in joined  # it has a place, and did not come yet
            if line["asked"] == "explain" or state.get(c) == now or unknown:
                continue
            state[c] = now
            if now == "back" and c not in joined:
                yield Notice("joined", line["at"], names[c], f"client {names[c]} has joined")
            else:
                why = {"back": "is back", "refused": str(trouble), "silent": f"is silent: {trouble}"}[now]
                yield Notice(now, line["at"], names[c], f"client {names[c]}{':' * (now == 'refused')} {why}")
            joined |= {c} if now == "back" else set()
    for t, c in np.argwhere(record.rows.drift).tolist():
        shifts = record.shifts.get((t, c))
        why = "" if shifts is None else f": {explain_alarm(shifts, t)}"
        text = f"alarm of client {names[c]} at time {t + 1}{why}"
        began = record.header["times"][t] or record.header["started"]
        yield Notice("drift", f"time {t + 1} of {record.header['stream']}, {began}", names[c], text)


def find_expiring_certificates(server: Path) -> Iterator[Notice]:
    """Those that end soon."""
    for name, days in read_days_left(server).items():
        due = [limit for limit in CERTIFICATE_WARNING_DAYS if days <= limit]
        if due:
            text = f"{name} ends in {days:.0f} days" if days > 0 else f"{name} has ended: nobody can connect any more"
            ends = (datetime.now(UTC) + timedelta(days=days)).date()
            yield Notice("certificate", f"{name}, {min(due)} days before {ends}", None, text)


def find_stop_notices(federation: Status, server: Path) -> Iterator[Notice]:
    """The federation's end before its time."""
    if federation.state != "stopped":
        return
    why = read_stop_reason(server / "state" / "server.log")
    when = f"after {len(federation.record.exchanges)} exchanges"
    yield Notice("quorum" if "quorum" in why else "stopped", when, None, f"the federation has stopped: {why}")


class Notifier:
    """Looks at a federation, writes what is new to the audit log, and tells it to commands and webhooks."""

    def __init__(self, server: Path, targets: Sequence[str] = ()) -> None:
        self.server, self.targets = server, targets
        self._stamp: tuple[object, ...] | None = None
        self._known: list[Notice] = []

    def send_new_notices(self) -> list[Notice]:
        """What nobody was told yet."""
        found = [*self._find_federation_notices(), *find_expiring_certificates(self.server)]
        told = {notice.key for notice in read_audit_log(self.server)}
        new = list({notice.key: notice for notice in found if notice.key not in told}.values())
        for notice in new:
            append_to_audit_log(self.server, notice)
            for target in self.targets if notice.event in DELIVERED_KINDS else ():
                deliver_notice(target, notice, self.server)
        return new

    def _find_federation_notices(self) -> list[Notice]:
        """By its record, which is read again only where it has changed, or its writer has come or gone."""
        path = find_record_path(self.server)
        file = next((file for file in (get_part_path(path), path) if file.exists()), None)
        if file is None:
            return []
        stamp = file, file.stat().st_size, file.stat().st_mtime_ns, is_being_written(path)
        if stamp != self._stamp:
            federation = read_status(self.server)
            self._stamp, self._known = stamp, []
            if federation is not None:
                self._known = [*find_record_notices(federation.record), *find_stop_notices(federation, self.server)]
        return self._known

    @contextmanager
    def run_in_background(self, interval_seconds: float = CHECK_INTERVAL_SECONDS) -> Iterator[None]:
        """Look again and again meanwhile; what goes wrong is logged, and stops nothing."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(interval_seconds):
                try:
                    self.send_new_notices()
                except Exception as error:
                    _log.warning("nobody could be told: %s: %s", type(error).__name__, error)

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(2)


def deliver_notice(target: str, notice: Notice, server: Path) -> None:
    """Post a notice as JSON to an address, or give it to a command: as JSON on its input, and in its environment."""
    body = json.dumps({"experiment": find_record_path(server).stem, **asdict(notice)})
    try:
        if target.startswith(("http://", "https://")):
            request = urllib.request.Request(target, body.encode(), {"Content-Type": "application/json"})
            urllib.request.urlopen(request, timeout=DELIVERY_TIMEOUT_SECONDS).close()
        else:
            fields = {f"FEDDRIFT_{key.upper()}": value or "" for key, value in asdict(notice).items()}
            subprocess.run(
                shlex.split(target), input=body, text=True, check=True, timeout=DELIVERY_TIMEOUT_SECONDS, cwd=server,
                env=os.environ | fields, stdout=subprocess.DEVNULL,
            )  # fmt: skip
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        _log.warning("%s was not told '%s': %s", target.split("?")[0], notice.text, error)


def append_to_audit_log(server: Path, notice: Notice) -> None:
    """Append it to the audit log, which is only ever appended to."""
    path = server / "state" / AUDIT_FILE
    path.parent.mkdir(exist_ok=True)
    line = {"at": datetime.now(UTC).isoformat(timespec="seconds"), **asdict(notice)}
    with open(path, "a+b") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - 1))
        torn = log.read(1) not in (b"", b"\n")  # the machine went down while it wrote
        log.write(b"\n" * torn + json.dumps(line).encode() + b"\n")
        log.flush()
        os.fsync(log.fileno())


def log_and_audit(server: Path, notice: Notice) -> None:
    """Log it and append it to the audit log, if that can be."""
    _log.warning("%s", notice.text)
    with suppress(OSError):  # the disk is full, perhaps
        append_to_audit_log(server, notice)


def audit_change(server: Path, client: str | None, text: str) -> None:
    """Keep in the audit log what an operator did."""
    append_to_audit_log(server, Notice("changed", datetime.now(UTC).isoformat(), client, text))


def read_audit_log(server: Path) -> list[Notice]:
    """All that the audit log has; a line that was cut short is left out."""
    path, found = server / "state" / AUDIT_FILE, []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
            found.append(Notice(entry["event"], entry["when"], entry["client"], entry["text"]))
        except (ValueError, KeyError, TypeError):
            continue
    return found
