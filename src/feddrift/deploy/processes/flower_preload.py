"""Flower's programs at a client with a warm start: each message is handled by a fork of a process with all imports.

`python -P -m feddrift.deploy.processes.flower_preload flower-supernode ...` does what `flower-supernode ...` does.
Instead of starting Python for every message, its SuperExec requests a fork from a process that has already imported all
modules. The SuperNode polls sooner while there are messages, and wakes its SuperExec when one arrives. For this,
functions in Flower's modules are replaced, in these processes only. With an untested version of Flower, Flower's own
programs run unchanged.
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

MAX_POLL_SECONDS = 3.0  # between polls for messages when none arrive, as in Flower
MIN_POLL_SECONDS = 0.3  # from a message until the next poll
REPLY_POLL_SECONDS = 0.1  # between polls for the reply to a message, which is in the SuperNode's own memory
TASK_POLL_SECONDS = 10.0  # between a SuperExec's polls for messages if the SuperNode wakes it
START_TIMEOUT_SECONDS = 120.0  # for the start of the preloaded process
FORK_TIMEOUT_SECONDS = 10.0  # for the reply to a request for a fork
MAX_FAILURES = 3  # consecutive failed requests, after which no fork is requested again

_log = logging.getLogger("feddrift")


def build_command(name: str, look: float | None = None) -> list[str]:
    """Return the command that starts a Flower program of a client.

    Args:
        name: The Flower program, such as flower-supernode.
        look: The maximum number of seconds between polls for messages.
    """
    return [
        sys.executable,
        "-P",
        "-m",
        "feddrift.deploy.processes.flower_preload",
        name,
        *([] if look is None else ["--look", str(look)]),
    ]


def main() -> None:
    """Run the Flower program that the first argument names, with the other arguments."""
    name, *arguments = sys.argv[1:]
    look = MAX_POLL_SECONDS
    if arguments[:1] == ["--look"]:
        look = float(arguments[1])
        del arguments[:2]
    path = Path(sys.executable).parent / name
    if (problem := find_flwr_problem()) is not None:  # the names that are replaced here may not exist in its modules
        _log.warning("%s starts without preloading, so messages take longer: %s", name, problem)
        os.execv(path, [str(path), *arguments])
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent))  # as Python does for a script
    {
        "flower-supernode": lambda: _run_supernode(look),
        "flower-superexec": _run_superexec,
        "flwr-clientapp": _run_clientapp,
    }[name]()


def _run_supernode(look: float) -> None:
    from flwr.supernode.cli import flower_supernode

    _end_with_parent()
    node = importlib.import_module("flwr.supernode.start_client_internal")
    backoff = PollingBackoff(look)
    receive = _replace_end_of_run_error(node._pull_and_store_message, node.RunNotRunningException)
    push = backoff.wake_before_push(node._push_messages, _find_wake_pipe())
    vars(node).update(time=backoff, _pull_and_store_message=receive, _push_messages=push)
    flower_supernode()


def _replace_end_of_run_error(receive: Callable[..., Any], ended: type[BaseException]) -> Callable[..., Any]:
    """Return Flower's function that receives a message, changed to delete each message whose run has ended.

    A run ends while a client receives a message of it if the server stops and starts again, or is restored from a
    backup. Flower then raises an exception that is not an `Exception`, and does not delete the message that it has
    stored. The process that was started for it never ends, and each later process handles that message before its own:
    its own reply then arrives too late. An ordinary exception makes Flower delete the message.

    Flower does not delete a reply to that message. There is one if the server stopped just before it could confirm that
    the message was received: the message is complete, and a process replies to it while Flower tries to reach the
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
                raise ConnectionError("the run of this message has ended") from error

        return call

    def receive_message(**arguments: Any) -> Any:
        _delete_replies(arguments["state"], arguments["object_store"])
        callbacks = ("pull_object", "confirm_message_received")
        return receive(**arguments | {name: raise_ordinary(arguments[name]) for name in callbacks})

    return receive_message


def _delete_replies(state: Any, objects: Any) -> None:
    """Delete all replies that a SuperNode has stored and not sent, with their contents."""
    for reply in state.get_messages_legacy(is_reply=True):
        _log.warning("the reply to message %s is deleted, since its run has ended", reply.metadata.reply_to_message_id)
        state.delete_messages(message_ids=[reply.metadata.message_id])
        objects.delete(reply.metadata.message_id)


def _run_superexec() -> None:
    from flwr.supercore.cli import flower_superexec

    executor = importlib.import_module("flwr.supercore.superexec.executor.subprocess_executor")
    vars(executor).update(subprocess=SimpleNamespace(Popen=PreloadedProcess().Popen, DEVNULL=subprocess.DEVNULL))
    loop = importlib.import_module("flwr.supercore.superexec.run_superexec")
    if (pipe := _open_wake_pipe()) is not None:
        time_module = SimpleNamespace(sleep=lambda seconds: _wait_for_wake(pipe, seconds))
        vars(loop).update(time=time_module, _DEFAULT_TASK_POLL_INTERVAL_SECONDS=TASK_POLL_SECONDS)
    flower_superexec()


def _run_clientapp() -> None:
    """Run the preloaded process; only its children return from `_fork_on_request`, and each handles one message."""
    from flwr.supernode.cli import flwr_clientapp

    _load_modules()
    gc.collect()
    gc.freeze()  # the children do not scan these objects, so the memory stays shared
    sys.argv = _fork_on_request(socket.socket(fileno=int(sys.argv[1])))
    flwr_clientapp()


def _load_modules() -> None:
    """Import the modules that clients need; if training does not need JAX, train once, to load the native code."""
    from feddrift.algorithms import algorithm
    from feddrift.data import Stream
    from feddrift.engines.external_model import make_simulator
    from feddrift.engines.native import kernel
    from feddrift.engines.simulator.lanes import has_only_one_cpu
    from feddrift.nets import build_client_net
    from feddrift.simulation import run_steps
    from feddrift.types import Local

    importlib.import_module("httpcore")  # else httpx imports it during each message
    # Otherwise JAX would train, and start threads, which a fork does not copy.
    if has_only_one_cpu() and kernel.is_available():
        x = np.zeros((16, 2), np.float32)
        stream = Stream("practice", x, np.arange(16, dtype=np.int32) % 2, np.full((2, 1), 8), 2)
        engine = make_simulator(stream, build_client_net(None, (2,), 2), Local(rounds=1, steps=1, batch=2), 0)
        list(run_steps(engine, algorithm("FedDrift")))


def _fork_on_request(connection: socket.socket) -> list[str]:
    """Fork at each request of the SuperExec; return in the children, with their command-line arguments."""
    signal.signal(signal.SIGCHLD, _reap_children)
    needs_jax = mmap.mmap(-1, 1)  # shared with the children: 1 if one of them has imported JAX
    arguments = None
    with connection, connection.makefile("rw") as stream:
        stream.write("ready\n")
        stream.flush()
        for request in stream:
            if not (pid := os.fork()):
                arguments = json.loads(request)
                break
            stream.write(f"{pid}\n")
            stream.flush()
            if needs_jax[0]:
                importlib.import_module("feddrift.engines.simulator.program")
    if arguments is None:  # the SuperExec has ended
        sys.exit(0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    np.random.seed()  # noqa: NPY002  (a user's code may draw from it; Python reseeds its own generator itself)
    atexit.register(lambda: needs_jax.__setitem__(0, needs_jax[0] | ("jax" in sys.modules)))
    return [str(Path(sys.executable).parent / arguments[0]), *arguments[1:]]


def _reap_children(*_: object) -> None:
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if code := os.waitstatus_to_exitcode(ended[1]):
                _log.warning("the process of a message ended with code %d: the server may get no reply", code)


class PreloadedProcess:
    """Replacement of `subprocess.Popen` in Flower's SuperExec: it requests forks of a preloaded process.

    If that process does not fork, messages are handled by new processes, as in Flower.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._new_processes: list[subprocess.Popen[bytes]] = []
        self._n_failures = 0
        self._start_process()

    def Popen(self, command: Sequence[str], **options: Any) -> None:
        """Start a process with this command, as a fork if possible."""
        if command[0] == "flwr-clientapp" and not options and self._n_failures < MAX_FAILURES:
            try:
                self._request_fork(command)
                self._n_failures = 0
                return
            except (OSError, ValueError) as error:
                self._n_failures += 1
                self._kill_process()
                subject = "this message starts" if self._n_failures < MAX_FAILURES else "all messages start"
                _log.warning("%s a new Python process: the preloaded process does not fork (%s)", subject, error)
        self._new_processes = [process for process in self._new_processes if process.poll() is None]  # poll reaps them
        self._new_processes.append(subprocess.Popen(command, **options))
        if self._process is None and self._n_failures < MAX_FAILURES:
            self._start_process()

    def _start_process(self) -> None:
        """Start the preloaded process and wait until it is ready.

        The SuperExec takes no message meanwhile, so no message times out.
        """
        own_end, child_end = socket.socketpair()
        own_end.settimeout(START_TIMEOUT_SECONDS)
        with child_end:
            number = child_end.fileno()
            self._process = subprocess.Popen([*build_command("flwr-clientapp"), str(number)], pass_fds=[number])
        self._connection = own_end
        self._stream = own_end.makefile("rw")
        with suppress(OSError):  # then the request for a fork fails as well
            self._stream.readline()
        own_end.settimeout(FORK_TIMEOUT_SECONDS)

    def _request_fork(self, command: Sequence[str]) -> int:
        self._stream.write(json.dumps(list(command)) + "\n")
        self._stream.flush()
        if not (reply := self._stream.readline()):
            raise OSError("it has ended")
        return int(reply)

    def _kill_process(self) -> None:
        """Kill the preloaded process, so that no message is handled twice."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            with suppress(OSError):
                self._stream.close()
            self._connection.close()
            self._process = None


class PollingBackoff:
    """Replacement of `time` in the SuperNode: it polls often after a message, and then at growing intervals."""

    def __init__(self, look: float) -> None:
        self.look = look
        self._last_message = -float("inf")

    def sleep(self, seconds: float) -> None:
        """Sleep for a time that depends on the last message.

        Args:
            seconds: The time that Flower would sleep: 3 s between polls for messages, 0.5 s between polls for a reply.
        """
        if seconds < 1:
            time.sleep(min(seconds, REPLY_POLL_SECONDS))
        else:
            time.sleep(min(self.look, max(MIN_POLL_SECONDS, (time.monotonic() - self._last_message) / 2)))

    def wake_before_push(self, push: Callable[..., None], fifo: Path | None) -> Callable[..., None]:
        """Return Flower's function that waits for a reply and sends it, changed to wake the SuperExec first."""

        def wake_and_push(**arguments: Any) -> None:
            if fifo is not None:
                with suppress(OSError):  # no reader, or the pipe is full: the SuperExec polls anyway
                    pipe = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
                    os.write(pipe, b"!")
                    os.close(pipe)
            push(**arguments)
            self._last_message = time.monotonic()

        return wake_and_push


def _find_wake_pipe() -> Path | None:
    """Return the path of the pipe in the client's folder by which a SuperNode wakes its SuperExec."""
    home = os.environ.get("FLWR_HOME")
    return Path(home) / "bell" if home else None


def _open_wake_pipe() -> int | None:
    """Create the pipe and return the SuperExec's end; None if the file system does not support pipes."""
    if (fifo := _find_wake_pipe()) is None:
        return None
    try:
        fifo.unlink(missing_ok=True)
        os.mkfifo(fifo, 0o600)
        return os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
    except OSError:
        return None


def _wait_for_wake(pipe: int, seconds: float) -> None:
    if select.select([pipe], [], [], seconds)[0]:
        with suppress(BlockingIOError):
            os.read(pipe, 4096)


def _end_with_parent() -> None:
    """Let the kernel terminate this process when its parent ends, also when the parent is killed; only on Linux."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


if __name__ == "__main__":
    main()
