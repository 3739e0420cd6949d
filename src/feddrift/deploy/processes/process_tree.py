"""Process trees: find the descendants of a process, and end them all, each by its own id."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

EXECUTOR_PROGRAM = "flower-superexec"  # runs apps for SuperLink and SuperNode, which do not report when it ends
TERMINATION_STAGES = (signal.SIGTERM, 15.0), (signal.SIGKILL, 5.0)  # signals, and seconds until the next stage


@dataclass(frozen=True)
class Process:
    """A running process; a later process with the same id has another start time."""

    pid: int
    parent: int
    start_time: int


def find_descendants(pid: int, processes: Iterable[Process] | None = None) -> list[Process]:
    """Return all descendants of a process, nearest first.

    Args:
        pid: The process.
        processes: All running processes; None: they are listed.
    """
    candidates = list(list_processes() if processes is None else processes)
    pids = [pid]
    descendants: list[Process] = []
    for parent in pids:
        children = [process for process in candidates if process.parent == parent]
        pids += (child.pid for child in children)
        descendants += children
    return descendants


def list_processes() -> list[Process]:
    """Return all processes that have not ended; none if the system has no /proc."""
    return [process for path in Path("/proc").glob("[0-9]*/stat") if (process := _read_process(path))]


def _read_process(path: Path) -> Process | None:
    with suppress(OSError, ValueError, IndexError):  # the process has ended meanwhile
        fields = path.read_text().rpartition(")")[2].split()
        if fields[0] not in "ZX":
            return Process(int(path.parent.name), int(fields[1]), int(fields[19]))
    return None


class ExecutorMonitor:
    """Monitor of the SuperExecs of some processes: a SuperExec that has ended does not start again by itself.

    Args:
        pids: The processes, each of which starts a SuperExec.
        patience: The number of seconds after which each has certainly started its SuperExec.
    """

    def __init__(self, pids: Iterable[int], patience: float = 180.0) -> None:
        self._pids = set(pids)
        self._executors: dict[int, Process] = {}
        self._deadline = time.monotonic() + patience

    def has_lost_executor(self) -> bool:
        """Return whether a SuperExec is missing that was found by an earlier call, or should have started by now."""
        if self._executors.keys() == self._pids and all(
            _read_process(Path(f"/proc/{executor.pid}/stat")) == executor for executor in self._executors.values()
        ):
            return False  # this check is cheaper than listing all processes
        processes = list_processes()
        found = {
            pid: process
            for pid in self._pids
            for process in find_descendants(pid, processes)
            if EXECUTOR_PROGRAM in _read_command_line(process.pid)
        }
        expected = self._pids if processes and time.monotonic() > self._deadline else set(self._executors)
        self._executors |= found
        return bool(expected - found.keys())


def end_process_tree(child: subprocess.Popen[bytes]) -> None:
    """End a child process and all its descendants, also those in other sessions: first SIGTERM, then SIGKILL."""
    processes = list_processes()
    tree = {_identify(process) for process in processes if process.pid == child.pid}
    for number, seconds in TERMINATION_STAGES:
        signaled: set[tuple[int, int]] = set()
        deadline = time.monotonic() + seconds
        if not processes or child.poll() is not None:  # processes cannot be listed, or their parent has ended
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, number)
        while True:
            processes = list_processes()
            for pid, _ in tree & set(map(_identify, processes)):
                tree |= set(map(_identify, find_descendants(pid, processes)))
            left = tree & set(map(_identify, processes))
            if child.poll() is not None and not left:
                return
            for pid, start_time in left - signaled:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
                signaled.add((pid, start_time))
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)


def _identify(process: Process) -> tuple[int, int]:
    """Return an identifier that is never used by another process."""
    return process.pid, process.start_time


def _read_command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""
