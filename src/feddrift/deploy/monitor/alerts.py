"""Notices about a federation for its operator, and the audit log of clients that joined, were refused or changed.

Notices are derived from the record that the server writes. Those that were sent are in ``state/audit.jsonl``, so a
server that starts again sends none of them twice.
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
from feddrift.deploy.pki.certificates import read_remaining_days
from feddrift.reports.event_text import explain_alarm
from feddrift.reports.exchanges import REFUSED_REPLY_PREFIXES
from feddrift.runs.locks import is_being_written
from feddrift.runs.record import AUDIT_FILE, Record, get_part_path

NoticeKind = Literal[
    "drift", "silent", "refused", "quorum", "stopped", "certificate", "archive", "damaged", "joined", "back", "changed"
]
# Notices that are sent to commands and webhooks; the others are only written to the audit log.
DELIVERED_KINDS: tuple[NoticeKind, ...] = ("drift", "silent", "refused", "quorum", "stopped", "certificate")
CERTIFICATE_WARNING_DAYS = 30, 7, 1  # before a certificate expires
CHECK_INTERVAL_SECONDS = 10.0
DELIVERY_TIMEOUT_SECONDS = 30.0  # of a command or a webhook

_log = logging.getLogger("feddrift")


@dataclass(frozen=True)
class Notice:
    """An event in a federation that its operator should notice.

    Attributes:
        event: The kind of the event.
        when: The time step or the clock time.
        client: The name of the client; None: the notice is about the whole federation.
        text: A sentence for people.
    """

    event: NoticeKind
    when: str
    client: str | None
    text: str

    @property
    def key(self) -> tuple[str, str, str | None]:
        """The identity of the event: of two notices with the same key only one is sent."""
        return self.event, self.when, self.client


def find_record_notices(record: Record) -> Iterator[Notice]:
    """Yield notices of clients that joined, fell silent, were refused or came back, and then of drift alarms."""
    names = record.header["clients"]
    last_kinds = dict[int, NoticeKind]()  # by client, the kind of its last notice
    joined = set[int]()
    for line in record.exchanges:
        for c, trouble in zip(line["c"], line["trouble"], strict=True):
            kind: NoticeKind = "back"
            if trouble is not None:
                kind = "refused" if trouble.startswith(REFUSED_REPLY_PREFIXES) else "silent"
            never_connected = kind == "silent" and c not in joined
            if line["asked"] == "explain" or last_kinds.get(c) == kind or never_connected:
                continue
            last_kinds[c] = kind
            if kind == "back" and c not in joined:
                yield Notice("joined", line["at"], names[c], f"client {names[c]} has joined")
            else:
                why = {"back": "is back", "refused": str(trouble), "silent": f"is silent: {trouble}"}[kind]
                yield Notice(kind, line["at"], names[c], f"client {names[c]}{':' * (kind == 'refused')} {why}")
            if kind == "back":
                joined.add(c)
    for t, c in np.argwhere(record.rows.drift).tolist():
        shifts = record.shifts.get((t, c))
        why = "" if shifts is None else f": {explain_alarm(shifts, t)}"
        text = f"alarm of client {names[c]} at time {t + 1}{why}"
        began = record.header["times"][t] or record.header["started"]
        yield Notice("drift", f"time {t + 1} of {record.header['stream']}, {began}", names[c], text)


def find_expiring_certificates(server: Path) -> Iterator[Notice]:
    """Yield a notice for each certificate in a server's folder that expires soon or has expired."""
    for name, days in read_remaining_days(server).items():
        due = [limit for limit in CERTIFICATE_WARNING_DAYS if days <= limit]
        if due:
            text = f"{name} ends in {days:.0f} days" if days > 0 else f"{name} has ended: clients cannot connect"
            text += "; renew it with `feddrift deploy renew" + (" --ca`" if name == "ca.crt" else "`")
            ends = (datetime.now(UTC) + timedelta(days=days)).date()
            yield Notice("certificate", f"{name}, {min(due)} days before {ends}", None, text)


def find_stop_notices(federation: Status, server: Path) -> Iterator[Notice]:
    """Yield a notice if the federation has stopped before its end, with the reason from the server's log."""
    if federation.state != "stopped":
        return
    why = read_stop_reason(server / "state" / "server.log")
    when = f"after {len(federation.record.exchanges)} exchanges"
    yield Notice("quorum" if "quorum" in why else "stopped", when, None, f"the federation has stopped: {why}")


class Notifier:
    """Sender of notices: it writes new ones to the audit log and delivers them to commands and webhooks.

    Args:
        server: The server's folder.
        targets: Commands, and addresses that start with http:// or https://.
    """

    def __init__(self, server: Path, targets: Sequence[str] = ()) -> None:
        self.server = server
        self.targets = targets
        self._record_stamp: tuple[object, ...] | None = None
        self._record_notices: list[Notice] = []

    def send_new_notices(self) -> list[Notice]:
        """Send the notices that are not in the audit log yet, and return them."""
        found = [*self._find_federation_notices(), *find_expiring_certificates(self.server)]
        sent = {notice.key for notice in read_audit_log(self.server)}
        new = list({notice.key: notice for notice in found if notice.key not in sent}.values())
        for notice in new:
            append_to_audit_log(self.server, notice)
            for target in self.targets if notice.event in DELIVERED_KINDS else ():
                deliver_notice(target, notice, self.server)
        return new

    def _find_federation_notices(self) -> list[Notice]:
        """Return the notices from the record; it is read again only if it or the state of its writer has changed."""
        path = find_record_path(self.server)
        file = next((file for file in (get_part_path(path), path) if file.exists()), None)
        if file is None:
            return []
        stamp = file, file.stat().st_size, file.stat().st_mtime_ns, is_being_written(path)
        if stamp != self._record_stamp:
            federation = read_status(self.server)
            self._record_stamp = stamp
            self._record_notices = []
            if federation is not None:
                self._record_notices = [
                    *find_record_notices(federation.record),
                    *find_stop_notices(federation, self.server),
                ]
        return self._record_notices

    @contextmanager
    def run_in_background(self, interval_seconds: float = CHECK_INTERVAL_SECONDS) -> Iterator[None]:
        """Send new notices at regular intervals during the block; after an error the next check tries again."""
        ended = threading.Event()

        def send_regularly() -> None:
            while not ended.wait(interval_seconds):
                try:
                    self.send_new_notices()
                except Exception as error:
                    _log.warning(
                        "notices could not be sent, the next check tries again: %s: %s", type(error).__name__, error
                    )

        thread = threading.Thread(target=send_regularly, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(2)


def deliver_notice(target: str, notice: Notice, server: Path) -> None:
    """Post a notice as JSON to an address, or run a command with it; failures are logged.

    Args:
        target: An address (http:// or https://), or a command, which gets the notice as JSON on its standard input
            and in environment variables `FEDDRIFT_...`.
        notice: The notice.
        server: The server's folder, in which the command runs.
    """
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
        _log.warning("notify: %s did not receive '%s': %s", target.split("?")[0], notice.text, error)


def append_to_audit_log(server: Path, notice: Notice) -> None:
    """Append a notice to the audit log, from which no line is ever removed."""
    path = server / "state" / AUDIT_FILE
    path.parent.mkdir(exist_ok=True)
    line = {"at": datetime.now(UTC).isoformat(timespec="seconds"), **asdict(notice)}
    with open(path, "a+b") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - 1))
        is_torn = log.read(1) not in (b"", b"\n")  # the last line is incomplete, since the machine stopped
        log.write(b"\n" * is_torn + json.dumps(line).encode() + b"\n")
        log.flush()
        os.fsync(log.fileno())


def log_and_audit(server: Path, notice: Notice) -> None:
    """Log a notice as a warning and append it to the audit log; a failure to write the audit log is ignored."""
    _log.warning("%s", notice.text)
    with suppress(OSError):  # the disk may be full
        append_to_audit_log(server, notice)


def audit_change(server: Path, client: str | None, text: str) -> None:
    """Record a change by an operator in the audit log.

    Args:
        server: The server's folder.
        client: The name of the client that was changed, if any.
        text: A sentence that describes the change.
    """
    append_to_audit_log(server, Notice("changed", datetime.now(UTC).isoformat(), client, text))


def read_audit_log(server: Path) -> list[Notice]:
    """Return all notices in the audit log; a line that was cut off is left out."""
    path = server / "state" / AUDIT_FILE
    notices = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
            notices.append(Notice(entry["event"], entry["when"], entry["client"], entry["text"]))
        except (ValueError, KeyError, TypeError):
            continue
    return notices
