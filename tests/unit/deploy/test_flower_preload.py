"""Warm starts at a client: the state of a forked process, and the fallback if forking fails."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

from feddrift.deploy.operate import scaffold
from feddrift.deploy.processes import flower_preload, launcher
from feddrift.engines.flower.client.client_toml import read_client_toml
from feddrift.errors import ConfigError

# The warm process of these tests: all is real but Flower's imports, and what a message's process does.
PROGRAM = """
import json, os, sys, types
import numpy as np
from feddrift.deploy.processes import flower_preload

def told():
    return dict(argv=sys.argv, cwd=os.getcwd(), env=os.environ["WARM_TEST"], path=sys.path[0], parent=os.getppid(),
                pid=os.getpid(), draw=np.random.random(), modules="mine" in sys.modules)

def handle():
    import mine
    with open(f"{sys.argv[1]}.part", "w") as file:
        json.dump(told() | {"mine": mine.VALUE}, file)
    os.rename(f"{sys.argv[1]}.part", sys.argv[1])
    sys.exit(int(sys.argv[2]))

sys.modules["flwr.supernode.cli"] = types.SimpleNamespace(flwr_clientapp=handle)
flower_preload._load_modules = lambda: None
flower_preload.main()
"""


def wait_until(true: Callable[[], Any], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place where a warm process can be started, with a `flwr-clientapp` that says that it was started cold."""
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "mine.py").write_text("VALUE = 1\n")
    (tmp_path / "bin").mkdir()
    cold = tmp_path / "bin" / "flwr-clientapp"
    cold.write_text('#!/bin/sh\necho cold > "$1"\n')
    cold.chmod(0o700)
    monkeypatch.setattr(
        flower_preload, "build_command", lambda name: [sys.executable, str(tmp_path / "program.py"), name]
    )
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("WARM_TEST", "of the client")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def executor(folder: Path) -> Iterator[flower_preload.PreloadedProcess]:
    made = flower_preload.PreloadedProcess()
    yield made
    made._kill_process()
    for process in made._new_processes:
        process.wait()


def get_child_reply(executor: flower_preload.PreloadedProcess, path: Path, code: int = 0) -> str:
    executor.Popen(["flwr-clientapp", str(path), str(code)])
    wait_until(lambda: path.exists() and path.read_text())  # a file exists before it is written
    return path.read_text()


def test_each_message_has_a_process_like_a_new_one(executor: flower_preload.PreloadedProcess, folder: Path) -> None:
    assert executor._process is not None
    first = json.loads(get_child_reply(executor, folder / "first"))
    (folder / "mine.py").write_text("VALUE = 23\n")  # a user's module may change: it is read with every message
    second = json.loads(get_child_reply(executor, folder / "second"))
    assert (first["mine"], second["mine"]) == (1, 23)
    for one, name in ((first, "first"), (second, "second")):
        bin = Path(sys.executable).parent
        assert one["argv"] == [str(bin / "flwr-clientapp"), str(folder / name), "0"] and one["path"] == str(bin)
        assert (one["cwd"], one["env"]) == (str(folder), "of the client")
        assert one["parent"] == executor._process.pid
    assert first["pid"] != second["pid"] and first["draw"] != second["draw"]
    wait_until(
        lambda: not is_alive(first["pid"]) and not Path(f"/proc/{first['pid']}").exists()
    )  # and nobody is left unburied


def test_an_exit_status_is_reported(capfd: pytest.CaptureFixture[str], folder: Path) -> None:
    executor = flower_preload.PreloadedProcess()
    get_child_reply(executor, folder / "failed", 3)
    told = ""

    def complained() -> bool:
        nonlocal told
        told += capfd.readouterr().err
        return "the process of a message ended with code 3" in told

    wait_until(complained)
    assert json.loads(get_child_reply(executor, folder / "next"))["pid"]  # it goes on
    executor._kill_process()


def test_without_the_warm_process_a_message_starts_cold_and_the_next_is_warm_again(
    executor: flower_preload.PreloadedProcess, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    get_child_reply(executor, folder / "first")
    assert executor._process is not None
    os.kill(executor._process.pid, signal.SIGKILL)
    executor._process.wait()
    assert get_child_reply(executor, folder / "second") == "cold\n"
    assert "this message starts a new Python process: the preloaded process does not fork" in caplog.text
    assert json.loads(get_child_reply(executor, folder / "third"))["mine"] == 1


def test_a_warm_process_that_is_stuck_is_ended_so_that_nothing_is_done_twice(
    executor: flower_preload.PreloadedProcess, folder: Path
) -> None:
    get_child_reply(executor, folder / "first")
    stuck = executor._process
    assert stuck is not None
    os.kill(stuck.pid, signal.SIGSTOP)
    executor._connection.settimeout(0.2)
    assert get_child_reply(executor, folder / "second") == "cold\n"
    assert stuck.returncode == -signal.SIGKILL


def test_where_it_never_comes_up_it_is_left_alone(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "program.py").write_text("raise SystemExit(1)")
    executor = flower_preload.PreloadedProcess()
    for k in range(flower_preload.MAX_FAILURES + 2):
        assert get_child_reply(executor, folder / str(k)) == "cold\n"
    for process in executor._new_processes:
        process.wait()
    assert executor._process is None and len(caplog.records) == flower_preload.MAX_FAILURES
    assert caplog.messages[-1].startswith("all messages start a new Python process")


def test_other_programs_are_started_as_ever(executor: flower_preload.PreloadedProcess, folder: Path) -> None:
    other = folder / "bin" / "flwr-serverapp"
    other.write_text('#!/bin/sh\necho other > "$1"\n')
    other.chmod(0o700)
    executor.Popen(["flwr-serverapp", str(folder / "told")], stdout=subprocess.DEVNULL)
    wait_until((folder / "told").exists)


def test_it_dies_with_its_superexec_also_when_that_is_killed(folder: Path) -> None:
    code = "import sys; from feddrift.deploy.processes import flower_preload\n"
    code += "flower_preload.build_command = lambda n: [sys.executable, 'program.py', n]\n"
    code += "print(flower_preload.PreloadedProcess()._process.pid, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_alive(pid)
        parent.kill()
    wait_until(lambda: not is_alive(pid))


def test_a_supernode_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    child = (
        "import time; from feddrift.deploy.processes import flower_preload; flower_preload._end_with_parent(); "
        "print(1, flush=True); time.sleep(60)"
    )
    code = f"import subprocess, sys; c = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE)\n"
    code += "c.stdout.readline(); print(c.pid, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    wait_until(lambda: not is_alive(pid))


def test_with_another_flower_its_own_program_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started: list[Any] = []

    def execv(path: Path, words: list[str]) -> None:
        started.extend([str(path), *words])
        raise SystemExit(0)

    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.42.0")
    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setattr(
        sys, "argv", ["warm", *flower_preload.build_command("flower-supernode", 1.5)[4:], "--superlink", "here:1"]
    )
    with caplog.at_level(logging.WARNING), pytest.raises(SystemExit):
        flower_preload.main()
    own = str(Path(sys.executable).parent / "flower-supernode")
    assert started == [own, own, "--superlink", "here:1"]
    (message,) = caplog.messages
    assert message.startswith(
        "flower-supernode starts without preloading, so messages take longer: flwr 1.42.0 is installed, with which"
    )


@pytest.mark.parametrize(
    ("module", "lines"),
    [
        ("flwr.supernode.start_client_internal",
         ["time.sleep(3)", "time.sleep(0.5)", "  _push_messages(\n                state",
          " _pull_and_store_message(\n                state=", "                pull_object=pull_object,\n",
          "                confirm_message_received=confirm_message_received,\n"]),
        ("flwr.supercore.superexec.executor.subprocess_executor", ["subprocess.Popen(args)", "subprocess.DEVNULL"]),
        ("flwr.supercore.superexec.run_superexec",
         ["time.sleep(task_poll_interval)", "return _DEFAULT_TASK_POLL_INTERVAL_SECONDS"]),
    ],
)  # fmt: skip
def test_the_replaced_lines_of_flower_exist(module: str, lines: list[str]) -> None:
    source = inspect.getsource(importlib.import_module(module))
    assert not [line for line in lines if line not in source]
    used = {ast.unparse(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
    found = {name for name in used if name.split(".")[0] in ("time", "subprocess")}
    assert found <= {"time.sleep", "subprocess.Popen", "subprocess.DEVNULL"}  # nothing that a stand-in lacks


def test_looks_follow_a_message_soon_and_then_slow_down(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    now, slept = 1000.0, list[float]()

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        slept.append(seconds)

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    waits = flower_preload.PollingBackoff(3.0)
    waits.sleep(3)
    assert slept == [3.0]  # nothing has come yet
    os.mkfifo(tmp_path / "bell")
    bell = os.open(tmp_path / "bell", os.O_RDWR | os.O_NONBLOCK)
    replied: list[dict[str, int]] = []
    push = waits.wake_before_push(lambda **arguments: replied.append(arguments), tmp_path / "bell")
    push(state=1)
    assert replied == [{"state": 1}] and os.read(bell, 9) == b"!"
    waits.sleep(0.5)
    slept.clear()
    for _ in range(12):
        waits.sleep(3)
    assert slept[0] == flower_preload.MIN_POLL_SECONDS and slept == sorted(slept) and slept[-1] == 3.0
    os.close(bell)
    push(state=2)  # nobody listens: the reply is sent all the same
    assert replied[1:] == [{"state": 2}]


def test_a_client_chooses_how_it_is_started(tmp_path: Path) -> None:
    scaffold.create_deployment(tmp_path / "fed", ["a"], [2], ["no", "yes"])
    folder = tmp_path / "fed" / "clients" / "a"
    assert launcher.build_supernode_command(folder)[:7] == [
        *flower_preload.build_command("flower-supernode"),
        *launcher.build_supernode_command(folder)[5:7],
    ]
    toml = folder / "client.toml"
    text = toml.read_text()
    toml.write_text(f"look = 0.5\n{text}")
    assert launcher.build_supernode_command(folder)[4:7] == ["flower-supernode", "--look", "0.5"]
    toml.write_text(f"warm = false\n{text}")
    assert launcher.build_supernode_command(folder)[0] == launcher.find_program("flower-supernode")
    for line in ("look = 0", "look = true", "look = 61"):
        toml.write_text(f"{line}\n{text}")
        with pytest.raises(ConfigError, match=r"look must be a number of seconds from 0.1 to 60, got"):
            read_client_toml(folder)


@pytest.mark.parametrize("lacks", ["native code", "a CPU alone"])
def test_nothing_is_practised_with_jax(lacks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its threads would not outlive the fork."""
    from feddrift.engines import external_model
    from feddrift.engines.native import kernel
    from feddrift.engines.simulator import lanes

    def simulated(*_: object) -> None:
        raise AssertionError("it practises")

    monkeypatch.setattr(external_model, "make_simulator", simulated)
    monkeypatch.setattr(lanes, "has_only_one_cpu", lambda: lacks != "a CPU alone")
    monkeypatch.setattr(kernel, "is_available", lambda: lacks != "native code")
    flower_preload._load_modules()
    monkeypatch.setattr(lanes, "has_only_one_cpu", lambda: True)
    monkeypatch.setattr(kernel, "is_available", lambda: True)
    with pytest.raises(AssertionError, match="it practises"):
        flower_preload._load_modules()


@pytest.mark.parametrize("fails", ["pull_object", "confirm_message_received"])
def test_a_message_of_an_ended_run_is_deleted(fails: str) -> None:
    """With Flower's own function: nothing is left in its stores, and the task has ended."""
    node = importlib.import_module("flwr.supernode.start_client_internal")

    stored: list[str] = []
    ended: list[int] = []
    state = SimpleNamespace(
        get_messages_legacy=lambda is_reply: [],
        get_run=lambda _: SimpleNamespace(primary_task_type=None, fab_hash=""),
        create_task=lambda **_: 7,
        store_message=lambda message: stored.append(message.metadata.message_id),
        delete_messages=lambda message_ids: stored.remove(*message_ids),
        finish_task=lambda task_id, **_: ended.append(task_id),
    )
    about = SimpleNamespace(run_id=1, group_id="", message_type="query.hello", message_id="a message")
    message = SimpleNamespace(metadata=about)
    objects = SimpleNamespace(preregister=lambda *_: ["an object"], put=lambda *_: None, delete=lambda *_: None)

    def end_run(*_: Any) -> bytes:
        raise node.RunNotRunningException

    parts: dict[str, Any] = {"pull_object": lambda *_: b"content", "confirm_message_received": lambda *_: None}
    receive = flower_preload._replace_end_of_run_error(node._pull_and_store_message, node.RunNotRunningException)
    given = {"state": state, "object_store": objects, "node_config": {}, "get_run": None, "get_fab": None}
    got = receive(**given, receive=lambda: (message, None), trusted_entities=None, **parts | {fails: end_run})
    assert got is None and stored == [] and ended == [7]


def test_a_reply_to_a_message_of_an_ended_run_is_not_sent_in_place_of_the_next() -> None:
    """With Flower's own functions and stores: a process answers the message while the SuperNode still receives it."""
    from flwr.app import Message, Metadata, RecordDict
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
    from flwr.supercore.object_store import ObjectStoreFactory
    from flwr.supercore.run import Run
    from flwr.supernode.nodestate import NodeStateFactory

    node = importlib.import_module("flwr.supernode.start_client_internal")
    factory = ObjectStoreFactory()
    state, objects = NodeStateFactory(factory).state(), factory.store()
    receive = flower_preload._replace_end_of_run_error(node._pull_and_store_message, node.RunNotRunningException)
    names, sent = dict[int, str](), list[str]()

    def answer(message: Message) -> None:
        """Take a message from the SuperNode and store a reply there, as the process of the message does."""
        (stored,) = state.get_messages_legacy(run_ids=[message.metadata.run_id], is_reply=False, limit=1)
        state.record_message_processing_start(stored.metadata.message_id)
        objects.delete(stored.metadata.message_id)
        node._insert_message(Message(RecordDict(), reply_to=message), state, objects)
        state.record_message_processing_end(stored.metadata.message_id)

    def handle(run_id: int, ended: bool) -> Any:
        state.store_run(Run.create_empty(run_id))
        about = Metadata(run_id, "", 1, 5, "", "hello", time.time(), 60.0, "query.hello")
        message = Message(RecordDict(), metadata=about)  # type: ignore[call-overload]
        names[run_id] = about.__dict__["_message_id"] = message.object_id
        parts = {name: item.deflate() for name, item in get_all_nested_objects(message).items()}

        def confirm(*_: Any) -> None:
            answer(message)
            if ended:
                raise node.RunNotRunningException

        return receive(
            state=state, object_store=objects, node_config={}, get_run=None, get_fab=None, trusted_entities=None,
            receive=lambda: (message, get_object_tree(message)),
            pull_object=lambda _, name: parts[name], confirm_message_received=confirm,
        )  # fmt: skip

    def send(reply: Message, *_: Any) -> tuple[set[str], str]:
        sent.append(reply.metadata.reply_to_message_id)
        return set(), ""

    assert handle(1, ended=True) is None
    assert handle(2, ended=False) == 2
    node._push_messages(state=state, object_store=objects, send=send, push_object=lambda *_: None)
    assert sent == [names[2]] != [names[1]]
    assert len(objects) == 0
