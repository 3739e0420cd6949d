"""Flower's programs at a client, warm: each message has a process of its own, forked from one that has imported all.

`python -P -m feddrift.deploy.processes.flower_preload flower-supernode ...` does what `flower-supernode ...` does.
Instead of starting Python for every message, its SuperExec asks a process that has already imported everything to fork.
The SuperNode polls sooner while there are messages, and wakes its SuperExec when one arrives. This is done by replacing
functions in Flower's modules, in these processes only; with an untested version of Flower nothing is replaced.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import logging
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from feddrift.deploy.flower_version import find_flwr_problem

MAX_POLL_SECONDS = 3.0  # seconds between looks for messages when none come, as in Flower
MIN_POLL_SECONDS = 0.3  # seconds until the next look after a message
REPLY_POLL_SECONDS = 0.1  # seconds between looks for the reply to a message, in the SuperNode's own memory
TASK_POLL_SECONDS = 10.0  # seconds between a SuperExec's looks for messages where it is woken
START_TIMEOUT_SECONDS, FORK_TIMEOUT_SECONDS = (
    120.0,
    10.0,
)  # seconds until the warm process must be there, and have forked
MAX_FAILURES = 3  # times in a row that it may fail before it is left alone

_log = logging.getLogger("feddrift")


def build_command(name: str, look: float | None = None) -> list[str]:
    """How a program of Flower's at a client is started."""
    return [
        sys.executable,
        "-P",
        "-m",
        "feddrift.deploy.processes.flower_preload",
        name,
        *([] if look is None else ["--look", str(look)]),
    ]


def main() -> None:
    """Become the program of Flower's that the first word names, with the other words."""
    name, *words = sys.argv[1:]
    look = MAX_POLL_SECONDS
    if words[:1] == ["--look"]:
        look, words = float(words[1]), words[2:]
    path = Path(sys.executable).parent / name
    if (sentence := find_flwr_problem()) is not None:  # its modules may lack the names that are replaced here
        _log.warning("%s starts cold: %s", name, sentence)
        os.execv(path, [str(path), *words])
    sys.argv = [str(path), *words]
    sys.path.insert(0, str(path.parent))  # as for a script
    {
        "flower-supernode": lambda: _run_supernode(look),
        "flower-superexec": _run_superexec,
        "flwr-clientapp": _run_clientapp,
    }[name]()


def _run_supernode(look: float) -> None:
    from flwr.supernode.cli import flower_supernode

    _end_with_parent()
    node = importlib.import_module("flwr.supernode.start_client_internal")
    waits = PollingBackoff(look)
    receive = _replace_end_of_run_error(node._pull_and_store_message, node.RunNotRunningException)
    push = waits.wake_before_push(node._push_messages, _find_wake_pipe())
    vars(node).update(time=waits, _pull_and_store_message=receive, _push_messages=push)
    flower_supernode()


def _replace_end_of_run_error(receive: Callable[..., Any], ended: type[BaseException]) -> Callable[..., Any]:
    """Return Flower's function that receives a message, made to leave nothing of a message whose run has ended.

    A run ends while a client receives a message of it where the server stops and starts again, or is restored from a
    backup. Flower then raises an exception that is not an `Exception`, and does not delete the message that it has
    stored. The process that was started for it never ends, and each later process handles the message before its own:
    too late for the server. An ordinary exception makes Flower delete the message.

    Flower does not delete a reply to that message. There is one where the server stopped just before it could confirm
    that the message was received: the message is complete, and a process replies to it while Flower tries to reach the
    server. Flower would send that reply instead of the reply to the next message, and from then on each reply would be
    one message late. Flower receives a message only when none is in progress, so all replies that are stored by then
    are deleted.

    Args:
        receive: `_pull_and_store_message` of Flower.
        ended: The exception by which Flower reports that a run has ended.
    """

    def raise_ordinary(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            try:
                return function(*arguments)
            except ended as error:
                raise ConnectionError("the run has ended") from error

        return call

    def received(**arguments: Any) -> Any:
        _delete_replies(arguments["state"], arguments["object_store"])
        parts = ("pull_object", "confirm_message_received")
        return receive(**arguments | {name: raise_ordinary(arguments[name]) for name in parts})

    return received


def _delete_replies(state: Any, objects: Any) -> None:
    """Delete all replies that a SuperNode has stored and not sent, with their contents."""
    for reply in state.get_messages_legacy(is_reply=True):
        _log.warning("reply to message %s deleted: its run has ended", reply.metadata.reply_to_message_id)
        state.delete_messages(message_ids=[reply.metadata.message_id])
        objects.delete(reply.metadata.message_id)


def _run_superexec() -> None:
    from flwr.supercore.cli import flower_superexec

    executor = importlib.import_module("flwr.supercore.superexec.executor.subprocess_executor")
    vars(executor).update(subprocess=SimpleNamespace(Popen=PreloadedProcess().Popen, DEVNULL=subprocess.DEVNULL))
    loop = importlib.import_module("flwr.supercore.superexec.run_superexec")
    if (bell := _open_wake_pipe()) is not None:
        waits = SimpleNamespace(sleep=lambda seconds: _wait_for_wake(bell, seconds))
        vars(loop).update(time=waits, _DEFAULT_TASK_POLL_INTERVAL_SECONDS=TASK_POLL_SECONDS)
    flower_superexec()


def _run_clientapp() -> None:
    """The warm process; what goes on after `_forked` is a child of it, which handles one message and ends."""
    from flwr.supernode.cli import flwr_clientapp

    _load_modules()
    gc.collect()
    gc.freeze()  # what is there by now is not looked at, and so not copied, in the children
    sys.argv = _fork_on_request(socket.socket(fileno=int(sys.argv[1])))
    flwr_clientapp()


def _load_modules() -> None:
    """Import what clients need and, where JAX is not needed for it, load the native code by a use of it."""
    from feddrift.algorithms import algorithm
    from feddrift.data import Stream
    from feddrift.engines.external_model import make_simulator
    from feddrift.engines.native import kernel
    from feddrift.engines.simulator.lanes import only_one_cpu
    from feddrift.nets import build_client_net
    from feddrift.simulation import run_steps
    from feddrift.types import Local

    importlib.import_module("httpcore")  # which httpx leaves to its first client: a third of a message without data
    if only_one_cpu() and kernel.is_available():  # else JAX would do it, and start threads
        x, y, counts = np.zeros((16, 2), np.float32), np.arange(16, dtype=np.int32) % 2, np.full((2, 1), 8)
        stream = Stream("practice", x, y, counts, 2)
        engine = make_simulator(stream, build_client_net(None, (2,), 2), Local(rounds=1, steps=1, batch=2), 0)
        list(run_steps(engine, algorithm("FedDrift")))


def _fork_on_request(line: socket.socket) -> list[str]:
    """Fork whenever the SuperExec asks; returns in the children, with the words to be started with."""
    signal.signal(signal.SIGCHLD, _reap_children)
    needed = mmap.mmap(-1, 1)  # shared with the children: whether one of them has needed JAX
    words = None
    with line, line.makefile("rw") as talk:
        talk.write("ready\n")
        talk.flush()
        for asked in talk:
            if not (pid := os.fork()):
                words = json.loads(asked)
                break
            talk.write(f"{pid}\n")
            talk.flush()
            if needed[0]:
                importlib.import_module("feddrift.engines.simulator.program")
    if words is None:  # the SuperExec is gone
        sys.exit(0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    np.random.seed()  # noqa: NPY002  (a user's code may draw from it; Python's own generator does so by itself)
    atexit.register(lambda: needed.__setitem__(0, needed[0] | ("jax" in sys.modules)))
    return [str(Path(sys.executable).parent / words[0]), *words[1:]]


def _reap_children(*_: object) -> None:
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            code = os.waitstatus_to_exitcode(ended[1])
            if code:
                _log.warning("the process of a message has ended with code %d", code)


class PreloadedProcess:
    """Stands for `subprocess` where Flower starts a process for a message: the warm process forks, if it can."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._cold: list[subprocess.Popen[bytes]] = []
        self._failed = 0
        self._start_process()

    def Popen(self, words: Sequence[str], **how: Any) -> None:
        """Start a process with these words."""
        if words[0] == "flwr-clientapp" and not how and self._failed < MAX_FAILURES:
            try:
                self._request_fork(words)
                self._failed = 0
                return
            except (OSError, ValueError) as error:
                self._failed += 1
                self._kill_process()
                what = "this message starts" if self._failed < MAX_FAILURES else "messages start"
                _log.warning("%s cold: the warm process does not fork (%s)", what, error)
        self._cold = [process for process in self._cold if process.poll() is None]  # the dead are buried
        self._cold.append(subprocess.Popen(words, **how))
        if self._process is None and self._failed < MAX_FAILURES:
            self._start_process()

    def _start_process(self) -> None:
        """Start it and wait for it: the SuperExec takes no message meanwhile, so none runs out of time."""
        ours, its = socket.socketpair()
        ours.settimeout(START_TIMEOUT_SECONDS)
        with its:
            self._process = subprocess.Popen(
                [*build_command("flwr-clientapp"), str(its.fileno())], pass_fds=[its.fileno()]
            )
        self._line, self._talk = ours, ours.makefile("rw")
        with suppress(OSError):  # then it does not fork, either
            self._talk.readline()
        ours.settimeout(FORK_TIMEOUT_SECONDS)

    def _request_fork(self, words: Sequence[str]) -> int:
        self._talk.write(json.dumps(list(words)) + "\n")
        self._talk.flush()
        if not (answer := self._talk.readline()):
            raise OSError("it has ended")
        return int(answer)

    def _kill_process(self) -> None:
        """End it, so that no message is handled twice."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            with suppress(OSError):
                self._talk.close()
            self._line.close()
            self._process = None


class PollingBackoff:
    """Stands for `time` in the SuperNode: looks for messages follow a message soon, and then ever more slowly."""

    def __init__(self, look: float) -> None:
        self.look, self._last = look, -float("inf")

    def sleep(self, seconds: float) -> None:
        """Flower's 3 s are those between looks for messages; its half second is for a reply."""
        if seconds < 1:
            time.sleep(min(seconds, REPLY_POLL_SECONDS))
        else:
            time.sleep(min(self.look, max(MIN_POLL_SECONDS, (time.monotonic() - self._last) / 2)))

    def wake_before_push(self, push: Callable[..., None], fifo: Path | None) -> Callable[..., None]:
        """What sends the reply to a message that has come: it wakes the SuperExec before it waits."""

        def pushed(**arguments: Any) -> None:
            if fifo is not None:
                with suppress(OSError):  # nobody listens, or it is full: then it wakes by itself
                    bell = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
                    os.write(bell, b"!")
                    os.close(bell)
            push(**arguments)
            self._last = time.monotonic()

        return pushed


def _find_wake_pipe() -> Path | None:
    """By what a SuperNode wakes its SuperExec: a pipe in the client's folder."""
    home = os.environ.get("FLWR_HOME")
    return Path(home) / "bell" if home else None


def _open_wake_pipe() -> int | None:
    """The SuperExec's end of it; None where the folder cannot hold one."""
    if (fifo := _find_wake_pipe()) is None:
        return None
    try:
        fifo.unlink(missing_ok=True)
        os.mkfifo(fifo, 0o600)
        return os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
    except OSError:
        return None


def _wait_for_wake(bell: int, seconds: float) -> None:
    if select.select([bell], [], [], seconds)[0]:
        with suppress(BlockingIOError):
            os.read(bell, 4096)


def _end_with_parent() -> None:
    """Be told to end when the process that started this one does, also when it is killed; Linux alone can do so."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


if __name__ == "__main__":
    main()
