"""Log of the requests to a client: one JSON line per request, in requests.jsonl. This module does not need Flower."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

REQUEST_LOG_FILE = "requests.jsonl"  # in the folder of a client
MAX_LOG_BYTES = 5_000_000  # of requests.jsonl; then it becomes requests.jsonl.1, and the older one is deleted
MAX_TAIL_BYTES = 100_000  # of the last line
MAX_REASONS = 5  # reasons of refusals in a summary


@dataclass
class RequestEntry:
    """A request to a client and its outcome."""

    kind: str
    experiment: str | None = None  # None: the message was not readable
    t: int | None = None
    round: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)  # what was requested
    rows: int | None = None  # number of rows of the client that the reply was computed from
    bytes: int = 0  # of the reply
    refused: str | None = None  # the rule of the policy that the request breaks
    failed: str | None = None  # another reason why the reply has no answer


class RequestLog:
    """The file requests.jsonl of a client.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, entry: RequestEntry) -> None:
        """Append a line in one write, so that a kill leaves whole lines; a repeated hello is not repeated here."""
        values = asdict(entry)
        if entry.kind == "hello" and self._is_last(values):
            return
        line = json.dumps({"at": datetime.now(UTC).isoformat(timespec="seconds")} | values) + "\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and self.path.stat().st_size + len(line) > MAX_LOG_BYTES:
            os.replace(self.path, self.path.with_name(self.path.name + ".1"))
        handle = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            size = os.fstat(handle).st_size
            starts_line = not size or os.pread(handle, 1, size - 1) == b"\n"
            os.write(handle, (line if starts_line else "\n" + line).encode())
        finally:
            os.close(handle)

    def _is_last(self, values: dict[str, Any]) -> bool:
        """Return whether the last line has these values, whatever its time."""
        try:
            with open(self.path, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - MAX_TAIL_BYTES))
                last = json.loads(file.read().splitlines()[-1])
        except (OSError, ValueError, IndexError):
            return False
        return isinstance(last, dict) and {name: value for name, value in last.items() if name != "at"} == values

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the lines, oldest first, without damaged ones."""
        for path in (self.path.with_name(self.path.name + ".1"), self.path):
            if not path.exists():
                continue
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                try:
                    entry = json.loads(line)
                except ValueError:  # cut off by a power failure
                    continue
                if isinstance(entry, dict) and {"at", *RequestEntry.__dataclass_fields__} <= entry.keys():
                    yield entry

    def summarise(self) -> Iterator[str]:
        """Yield lines of text: by experiment the requests, the bytes sent, and the refusals with their reasons."""
        entries = list(self.read())
        if not entries:
            yield "no request yet"
        for experiment in dict.fromkeys(entry["experiment"] for entry in entries):
            own = [entry for entry in entries if entry["experiment"] == experiment]
            kinds = Counter(entry["kind"] for entry in own)
            reasons = Counter(entry["refused"] for entry in own if entry["refused"] is not None)
            n_failed = sum(entry["failed"] is not None for entry in own)
            name = "unreadable messages" if experiment is None else f"experiment {experiment}"
            yield f"{name}, from {own[0]['at']} to {own[-1]['at']}:"
            yield f"  requests: {', '.join(f'{count} {kind}' for kind, count in kinds.most_common())}"
            yield f"  sent: {sum(entry['bytes'] for entry in own)} bytes"
            yield f"  refused: {sum(reasons.values())}, failed: {n_failed}"
            for reason, count in reasons.most_common(MAX_REASONS):
                yield f"    {count}: {reason}"
