"""Processes that start others: which of them live, and how all of them are ended, each by its own id."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

EXECUTOR_PROGRAM = "flower-superexec"  # starts the app for SuperLink and SuperNode, which do not miss it
TERMINATION_STAGES = (signal.SIGTERM, 15.0), (signal.SIGKILL, 5.0)  # and the seconds until the next


@dataclass(frozen=True)
class Process:
    """A process that lives; a later one of the same id has started at another time."""

    pid: int
    parent: int
    start_time: int


def find_descendants(pid: int, processes: Iterable[Process] | None = None) -> list[Process]:
    """All that descend from a process, nearest first."""
    every = list(list_processes() if processes is None else processes)
    pids, found = [pid], list[Process]()
    for parent in pids:
        children = [process for process in every if process.parent == parent]
        pids += (child.pid for child in children)
        found += children
    return found


def list_processes() -> list[Process]:
    """All processes but those that are dead and not yet buried; none where the system has no /proc."""
    return [process for path in Path("/proc").glob("[0-9]*/stat") if (process := _read_process(path))]


def _read_process(path: Path) -> Process | None:
    with suppress(OSError, ValueError, IndexError):  # it has ended meanwhile
        fields = path.read_text().rpartition(")")[2].split()
        if fields[0] not in "ZX":
            return Process(int(path.parent.name), int(fields[1]), int(fields[19]))
    return None


class ExecutorMonitor:
    """Watches what runs apps for these processes: once gone, it does not come back by itself."""

    def __init__(self, pids: Iterable[int], patience: float = 180.0) -> None:
        self._pids, self._seen = set(pids), dict[int, Process]()
        self._end = time.monotonic() + patience  # by then each has started its own

    def has_lost_executor(self) -> bool:
        """Whether one of them is not there that was at an earlier look, or should be by now."""
        if self._seen.keys() == self._pids and all(
            _read_process(Path(f"/proc/{p.pid}/stat")) == p for p in self._seen.values()
        ):
            return False  # a look at all processes every second is a hundredth of a core
        every = list_processes()
        now = {
            pid: p
            for pid in self._pids
            for p in find_descendants(pid, every)
            if EXECUTOR_PROGRAM in _read_command_line(p.pid)
        }
        expected = self._pids if every and time.monotonic() > self._end else set(self._seen)
        self._seen |= now
        return bool(expected - now.keys())


def end_process_tree(child: subprocess.Popen[bytes]) -> None:
    """Ask a child of ours and all below it to end, also those with a session of their own, and make them."""
    every = list_processes()
    known = {_identify(process) for process in every if process.pid == child.pid}
    for how, seconds in TERMINATION_STAGES:
        told, deadline = set[tuple[int, int]](), time.monotonic() + seconds
        if not every or child.poll() is not None:  # the system does not say who there is, or its parent is dead
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, how)
        while True:
            every = list_processes()
            for pid, _ in known & set(map(_identify, every)):
                known |= set(map(_identify, find_descendants(pid, every)))
            left = known & set(map(_identify, every))
            if child.poll() is not None and not left:
                return
            for pid, started in left - told:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, how)
                told.add((pid, started))
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)


def _identify(process: Process) -> tuple[int, int]:
    """What no other process is called, also later."""
    return process.pid, process.start_time


def _read_command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""
