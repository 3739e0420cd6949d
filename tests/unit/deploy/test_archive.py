"""The archive of models at the server of a deployment: which are stored, and rolling back to them."""

from __future__ import annotations

import gc
import json
import logging
import os
import shutil
from collections import namedtuple
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

from typer.testing import CliRunner

import feddrift as fd
from feddrift._internal.checkpoint import Checkpoint, Folder
from feddrift.algorithms import ALGORITHMS
from feddrift.cli import app
from feddrift.cli.deploy import format_tested_step, format_trained_step
from feddrift.deploy.monitor.alerts import read_audit_log
from feddrift.deploy.operate.rollback import build_rollback_state, roll_back
from feddrift.deploy.server.archive import Archive, list_archived_steps, read_rollback_time
from feddrift.deploy.server.loop import federate
from feddrift.engines.flower.client.serve import current
from feddrift.engines.flower.model_parts import init_template
from feddrift.errors import BusyError, DataError
from feddrift.nets import default_net
from feddrift.reports.page.data import collect_page_data
from feddrift.runs.record import read, read_all, read_latest
from feddrift.simulation import Step, add_skipped_steps
from feddrift.trees import tree_leaves
from feddrift.types import Clusters, Floats, Models, State
from tests.support.cli import run_and_get_output
from tests.support.federation import (
    FEDDRIFT,
    LEARN,
    assert_identical,
    assert_same_record,
    make_federation,
    make_server_folder,
    make_swapping_stream,
    observe_data_requests,
    select_clients,
)
from tests.support.flower import InProcessFlower
from tests.support.kills import Killed

QUICK = ["FedDrift", "FedDrift-Auto"]
QUICK_LOCAL = fd.Local(rounds=1, steps=2, batch=8, lr=0.05)
OTHERS = [name for name, entry in ALGORITHMS.items() if not hasattr(entry.cls, "needs_truth") and name not in QUICK]


def run_time_steps(
    engine: InProcessFlower, n_steps: int, server: Path, algorithm: Any = FEDDRIFT, **options: Any
) -> list[Step]:
    engine.n_steps = n_steps
    return list(federate(engine, algorithm, server / "state", **options))


def serve_time_steps(stream: Any, server: Path, n_steps: int, local: Any = LEARN) -> list[Step]:
    return run_time_steps(make_federation(stream, local, root=server.parent / "clients"), n_steps, server)


def load_state(saved: Checkpoint | DataError, stream: Any) -> State:
    assert isinstance(saved, Checkpoint)
    state: State = saved.decode(init_template(default_net(stream)))[0]
    return state


def read_newest_checkpoint(server: Path) -> Checkpoint:
    saved = next(iter(Folder(server / "state" / "checkpoints").newest_first()))
    assert isinstance(saved, Checkpoint)
    return saved


def test_every_time_step_is_stored_with_the_used_models(tmp_path: Path) -> None:
    server, stream = make_server_folder(tmp_path), make_swapping_stream()
    steps = serve_time_steps(stream, server, 4)
    archive = Archive(server / "state")
    assert archive.list_times() == [1, 2, 3, 4]
    for time, step in enumerate(steps, 1):
        state = load_state(archive.read_checkpoint(time), stream)
        assert_identical(state.models.params, step.state.models.params)
        np.testing.assert_array_equal(state.votes, step.state.votes)
    shown = list_archived_steps(server)
    assert [step.users for step in shown] == [{0: ["a", "b", "c"]}] * 2 + [{0: ["a", "b"], 1: ["c"]}] * 2
    assert [step.accuracy for step in shown] == [pytest.approx(step.accuracy.mean()) for step in steps]
    assert not any(step.pinned for step in shown) and all(len(step.began) == 16 for step in shown)
    text = run_and_get_output("deploy", "models", "list", str(tmp_path))
    assert "0: a, b; 1: c" in text and f"{100 * steps[3].accuracy.mean():.2f} %" in text and "goes on from" not in text
    told = json.loads(run_and_get_output("deploy", "models", "list", str(tmp_path), "--json"))
    assert told["back_to"] is None and told["steps"][2]["users"] == {"0": ["a", "b"], "1": ["c"]}


def test_the_oldest_make_room_and_pinned_ones_stay(tmp_path: Path) -> None:
    server, stream = make_server_folder(tmp_path), make_swapping_stream(n_steps=6, n=20)
    engine = make_federation(stream, root=tmp_path / "clients")
    assert "no time step is kept yet" in run_and_get_output("deploy", "models", "list", str(tmp_path))
    run_time_steps(engine, 2, server, archive=2)
    assert "the models of time 1 are kept" in run_and_get_output("deploy", "models", "pin", str(tmp_path), "1")
    run_time_steps(make_federation(stream, root=tmp_path / "clients"), 6, server, archive=2)
    archive = Archive(server / "state")
    assert archive.list_times() == [1, 5, 6] and [step.pinned for step in list_archived_steps(server)] == [
        True,
        False,
        False,
    ]
    assert [notice.text for notice in read_audit_log(server)] == ["the models of time 1 are pinned"]
    told = CliRunner().invoke(app, ["deploy", "models", "pin", str(tmp_path), "3"])
    assert isinstance(told.exception, DataError)
    assert str(told.exception).endswith("has no models of time 3: it has those of time 1, 5 to 6")
    assert not (archive.path / "000003.pin").exists()
    run_time_steps(make_federation(stream, root=tmp_path / "clients"), 7, server, archive=0)
    assert archive.list_times() == [1]


def one(text: str) -> str:
    return " ".join(text.split())


def test_a_file_system_without_links_is_copied_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server, stream = make_server_folder(tmp_path), make_swapping_stream(n=20)

    def link(*_: Any) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", link)
    steps = serve_time_steps(stream, server, 2)
    for time, step in enumerate(steps, 1):
        assert_identical(
            load_state(Archive(server / "state").read_checkpoint(time), stream).models.params, step.state.models.params
        )


def test_a_full_disk_does_not_stop_the_federation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = make_server_folder(tmp_path)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9 - 999, 999))
    with caplog.at_level(logging.WARNING, "feddrift"):
        assert len(serve_time_steps(make_swapping_stream(n=20), server, 2)) == 2
    assert Archive(server / "state").list_times() == []
    texts = [notice.text for notice in read_audit_log(server) if notice.event == "archive"]
    assert len(texts) == 2 and texts[0].startswith("cannot archive time 1 in ") and "0.0 MB left" in texts[0]
    assert all(text in caplog.text for text in texts)


def test_a_step_killed_before_it_was_archived_is_archived_at_the_next_start(tmp_path: Path) -> None:
    server, stream = make_server_folder(tmp_path), make_swapping_stream(n=20)
    serve_time_steps(stream, server, 2)
    shutil.rmtree(server / "state" / "archive")
    serve_time_steps(stream, server, 3)
    assert Archive(server / "state").list_times() == [2, 3]
    serve_time_steps(stream, server, 4)
    files = sorted(path.name for path in (server / "state" / "archive").iterdir())
    assert files == ["000002.ckpt", "000003.ckpt", "000004.ckpt"]


def test_an_archive_of_another_start_is_put_aside(tmp_path: Path) -> None:
    server, stream = make_server_folder(tmp_path), make_swapping_stream(n=20)
    serve_time_steps(stream, server, 3)
    for path in (server / "state" / "checkpoints", tmp_path / "clients"):
        shutil.rmtree(path)
    (server / "state" / "test.jsonl").unlink()
    serve_time_steps(stream, server, 1)
    assert Archive(server / "state").list_times() == [1]
    assert len(list((server / "state" / "archive.old1").glob("*.ckpt"))) == 3


def test_going_back_gives_clients_the_old_models_and_starts_from_them(tmp_path: Path) -> None:
    """At time 3 model 1 is made for c; back to time 2, all use model 0 as it was; what came since trains nothing."""
    server, stream, found = make_server_folder(tmp_path), make_swapping_stream(n_steps=6), dict[str, Any]()
    serve_time_steps(stream, server, 4)
    before = load_state(Archive(server / "state").read_checkpoint(2), stream)
    settings = server / "federation.toml"
    (tmp_path / "clients" / "client.toml").write_text('name = "c"\n')
    (tmp_path / "clients" / "store").symlink_to(tmp_path / "clients")  # as a client's folder has it
    x = np.random.default_rng(1).random((200, 2)).astype(np.float32)
    assert len(current(tmp_path / "clients", "test").predict(x)) == 200
    assert (current(tmp_path / "clients", "test").predict(x) == (x[:, 0] <= 0.5)).mean() > 0.8  # its labels are swapped

    settings.write_text(settings.read_text().replace("rounds = 2", "rounds = 2\ntime_steps = 6"))
    text = one(run_and_get_output("deploy", "models", "rollback", str(tmp_path), "2"))
    assert text.startswith(
        "time 5 will start from the models of time 2: start `feddrift deploy server` and `run` again"
    )
    assert "the next time step continues from the models of time 2" in run_and_get_output(
        "deploy", "models", "list", str(tmp_path)
    )
    assert [notice.text for notice in read_audit_log(server)] == [
        "an operator went back to the models of time 2, after time 4"
    ]
    went = load_state(read_newest_checkpoint(server), stream)
    assert_identical(went.models.params, before.models.params)
    assert isinstance(went.w, Clusters) and went.w.model[2:].tolist() == [[-1] * 3] * 2 and went.w.weight.all()
    assert np.isnan(went.observed[2:]).all() and len(went.observed) == 4  # type: ignore[attr-defined]
    assert went.next_id == 2  # type: ignore[attr-defined]

    engine = make_federation(stream, LEARN, root=tmp_path / "clients")

    def see(t: int) -> None:
        if t == 5 and not found:  # time 5 (from 1) is trained
            found["list"] = run_and_get_output("deploy", "models", "list", str(tmp_path))
        if t == 4:
            found["served"] = current(tmp_path / "clients", "test")

    observe_data_requests(engine, see)
    asked, served_then = engine.send_requests, list[Any]()

    def ask(tau: int, *args: Any, **kwargs: Any) -> Any:
        answers = asked(tau, *args, **kwargs)
        if not served_then:
            served_then.append(current(tmp_path / "clients", "test"))
        return answers

    engine.send_requests = ask  # type: ignore[method-assign]
    steps = run_time_steps(engine, 6, server)
    assert [step.tau for step in steps] == [4, 5]
    assert_identical(served_then[0].models.params, before.models.params)  # after the first hello
    assert "goes on from" not in found["list"] and read_rollback_time(server) is None
    record = read(server / "state" / "test.jsonl")
    at = [(e["event"], e["model"], e["cause"].get("reason")) for e in record.events if e["t"] == 4]
    reason = "an operator went back to the models of time 2"
    assert at[:2] == [("decided", 0, reason), ("retired", 1, reason)] and ("revived", 0, reason) in at
    assert format_trained_step(record, 4).splitlines()[0].endswith(f"2 models   alarm at c; {reason}; created model 2")
    created = [(e["t"], e["model"], e["cause"]["clients"]) for e in record.events if e["event"] == "created"]
    assert created == [(2, 1, [2]), (4, 2, [2])]  # c has other labels still; no id is given twice
    assert record.rows.steps == record.tested == 6 and record.status == "complete"
    hellos = [line["at"] for line in record.exchanges if (line["t"], line["asked"]) == (4, "hello")]
    assert len(hellos) == 2  # the one that ended time 4, and the one that gave the old models back
    text = one(run_and_get_output("deploy", "status", str(tmp_path)))
    assert f"time 5: decision for all clients: {reason}" in text
    assert fd.report(tmp_path, tmp_path / "page.html").exists() and reason in json.dumps(
        collect_page_data(read_all(tmp_path), "fed")
    )
    assert run_and_get_output("export", str(tmp_path), "--out", str(tmp_path / "models"))
    assert Archive(server / "state").list_times() == [1, 2, 3, 4, 5, 6]


def test_a_pending_test_is_dropped_after_a_rollback(tmp_path: Path) -> None:
    """Time 3 is trained and waits for its test when an operator goes back: the record has no accuracy of it."""
    server, stream = make_server_folder(tmp_path), make_swapping_stream(n_steps=6)
    engine = make_federation(stream, LEARN, root=tmp_path / "clients")
    with pytest.raises(Killed):
        kill_during_run(engine, 2, server, exchanges=0, n_steps=6)
    trained_only = read(server / "state" / "test.jsonl")
    assert (trained_only.rows.steps, trained_only.tested) == (3, 2)
    roll_back(server, 1)
    serve_time_steps(stream, server, 5)
    record = read(server / "state" / "test.jsonl")
    assert record.rows.tested[2].tolist() == [0, 0, 0] and np.isnan(record.rows.accuracy[2]).all()
    assert format_tested_step(record, 2).endswith("tested    on no data")
    assert [step.accuracy is None for step in list_archived_steps(server)] == [False, False, True, False, False]
    assert (record.rows.tested[[0, 1, 3, 4]] == 60).all()


def kill_during_run(engine: InProcessFlower, after: int, server: Path, exchanges: int, n_steps: int) -> None:
    """Run until so many time steps are trained, and then die after so many questions more."""
    engine.n_steps = n_steps
    asked, left = engine.send_requests, [exchanges]

    def ask(*args: Any, **kwargs: Any) -> Any:
        left[0] -= len(Archive(server / "state").list_times()) > after
        if left[0] < 0:
            raise Killed
        return asked(*args, **kwargs)

    engine.send_requests = ask  # type: ignore[method-assign]
    for _ in federate(engine, FEDDRIFT, server / "state"):
        pass


def test_going_back_inside_a_time_step_gives_that_up(tmp_path: Path) -> None:
    """Its rounds are forgotten, and no checkpoint of them is left to be taken up."""
    server, stream = make_server_folder(tmp_path), make_swapping_stream(n_steps=6)
    with pytest.raises(Killed):
        kill_during_run(make_federation(stream, LEARN, root=tmp_path / "clients"), 3, server, exchanges=3, n_steps=6)
    saved = read_newest_checkpoint(server)
    assert saved.about["rounds"] and int(saved.about["steps"]) == 4
    roll_back(server, 3)
    assert [path.name for path in (server / "state" / "checkpoints").iterdir()] == ["000004-000000.ckpt"]
    serve_time_steps(stream, server, 6)
    (event,) = [e for e in read(server / "state" / "test.jsonl").events if e["event"] == "decided"]
    assert event["t"] == 4 and event["cause"]["reason"].endswith("time 3")


def test_going_back_again_before_anything_ran_tells_both(tmp_path: Path) -> None:
    """To time 2, which gives model 1 up, and on to time 1."""
    server, stream = make_server_folder(tmp_path), make_swapping_stream(n_steps=6)
    serve_time_steps(stream, server, 3)
    roll_back(server, 2)
    roll_back(server, 1)
    assert_identical(
        load_state(read_newest_checkpoint(server), stream).models.params,
        load_state(Archive(server / "state").read_checkpoint(1), stream).models.params,
    )
    serve_time_steps(stream, server, 4)
    at = [e for e in read(server / "state" / "test.jsonl").events if e["t"] == 3]
    told = [(e["event"], e["model"], str(e["cause"].get("reason"))[-6:]) for e in at]
    assert told[:3] == [("decided", 0, "time 2"), ("retired", 1, "time 2"), ("decided", 0, "time 1")]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the dead close no files
def test_a_killed_command_has_gone_back_or_not(tmp_path: Path, kill_before_change: Callable[[int], None]) -> None:
    """Inside a time step: whole checkpoints all the way, and given again it goes back."""
    server, stream, seen = (
        make_server_folder(tmp_path / "made"),
        make_swapping_stream(n_steps=6, n=20),
        set[int | None](),
    )
    with pytest.raises(Killed):
        kill_during_run(make_federation(stream, root=tmp_path / "made" / "clients"), 3, server, exchanges=3, n_steps=6)
    for n in range(100):
        again = tmp_path / str(n) / "server"
        shutil.copytree(server, again)
        kill_before_change(n)
        with suppress(Killed):
            roll_back(again, 1)
            break
        kill_before_change(10**9)
        gc.collect()  # the dead hold no locks
        assert all(isinstance(saved, Checkpoint) for saved in Folder(again / "state" / "checkpoints").newest_first())
        seen.add(read_rollback_time(again))
        roll_back(again, 1)
        assert read_rollback_time(again) == 1 and read_newest_checkpoint(again).path.name == "000004-000000.ckpt"
    kill_before_change(10**9)
    assert n > 3 and seen == {None, 1}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the dead close no files
@pytest.mark.slow
def test_killed_before_any_change_of_the_disk_it_continues_from_the_old_models(
    tmp_path: Path, kill_before_change: Callable[[int], None]
) -> None:
    """The operator's command or the server after it dies before the n-th change; what comes out is the same."""
    stream = make_swapping_stream(n_steps=5, n=20)
    serve_time_steps(
        stream, make_server_folder(tmp_path / "made"), 3, local=fd.Local(rounds=2, steps=2, batch=8, lr=0.05)
    )

    def on(folder: Path) -> None:
        server = folder / "server"
        if read_rollback_time(server) is None and not any(e["event"] == "decided" for e in events(server)):
            roll_back(server, 1)
        serve_time_steps(stream, server, 5, local=fd.Local(rounds=2, steps=2, batch=8, lr=0.05))

    def events(server: Path) -> Any:
        inside = read_newest_checkpoint(server).decode(init_template(default_net(stream)))[2]
        told = read_latest(server / "state" / "test.jsonl")
        assert told is not None
        return [*told.events, *({"event": e.kind} for e in inside)]

    shutil.copytree(tmp_path / "made", tmp_path / "whole")
    on(tmp_path / "whole")
    expected = read(tmp_path / "whole" / "server" / "state" / "test.jsonl")
    params = load_state(read_newest_checkpoint(tmp_path / "whole" / "server"), stream).models.params
    n, died = 0, True
    while died:
        folder = tmp_path / str(n)
        shutil.copytree(tmp_path / "made", folder)
        kill_before_change(n)
        died = False
        with suppress(Killed):
            on(folder)
            continue
        died = True
        gc.collect()  # the dead hold no locks
        kill_before_change(10**9)
        on(folder)
        assert_same_record(read(folder / "server" / "state" / "test.jsonl"), expected)
        assert_identical(load_state(read_newest_checkpoint(folder / "server"), stream).models.params, params)
        n += 1 if n < 4 else 17
    assert n > 30


def test_clients_that_joined_later_are_included(tmp_path: Path) -> None:
    """c has a place from time 3 on; back to time 2, when there were a and b, it goes on like most others."""
    server, stream = make_server_folder(tmp_path), make_swapping_stream(n_steps=6)
    serve_time_steps(select_clients(stream, 2), server, 2)
    serve_time_steps(stream, server, 4)
    roll_back(server, 2)
    went = load_state(read_newest_checkpoint(server), stream)
    assert went.votes.shape == (3, 1) and went.w.shape == (4, 3, 1)
    assert [step.users for step in list_archived_steps(server)][1] == {0: ["a", "b"]}
    steps = serve_time_steps(stream, server, 6)
    assert [len(step.accuracy) for step in steps] == [3, 3] and read(server / "state" / "test.jsonl").rows.steps == 6


@pytest.mark.parametrize("name", QUICK + [pytest.param(name, marks=pytest.mark.slow) for name in OTHERS])
def test_every_algorithm_can_go_back(name: str, tmp_path: Path) -> None:
    """To the first time step, and then to one of the course that was given up."""
    server, stream = make_server_folder(tmp_path), make_swapping_stream(n_steps=6, n=20)
    algorithm = fd.algorithm(name, stream)
    for done, back in ((2, 1), (3, 2), (4, None)):
        run_time_steps(make_federation(stream, QUICK_LOCAL, root=tmp_path / "clients"), done, server, algorithm)
        if back is not None:
            roll_back(server, back)
            old, went = (
                load_state(Archive(server / "state").read_checkpoint(back), stream),
                load_state(read_newest_checkpoint(server), stream),
            )
            np.testing.assert_array_equal(went.votes, old.votes)
            assert len(went.w) == done and not np.asarray(went.w)[back:].any()
    record = read(server / "state" / "test.jsonl")
    assert record.status == "complete" and record.rows.steps == 4 and record.rows.tested.all()
    reasons = [(e["t"], str(e["cause"].get("reason"))) for e in record.events if e["event"] == "decided"]
    assert [t for t, reason in reasons if "went back" in reason] == [2, 3]


@pytest.mark.parametrize("name", ["FedDrift", "FedDrift-Auto", "DriftSurf", "CFL", "KUE"])
def test_ids_of_removed_models_are_not_used_again(name: str) -> None:
    past, *_, newest = (step.state for step in fd.run(make_swapping_stream(n_steps=3, n=20), name, local=QUICK_LOCAL))
    assert hasattr(past, "next_id") and hasattr(newest, "next_id")
    current = replace(newest, next_id=past.next_id + 7)  # type: ignore[call-arg]
    restored = build_rollback_state(past, current)
    assert restored.next_id == past.next_id + 7  # type: ignore[attr-defined]


def test_private_models_are_those_that_the_clients_have_now(tmp_path: Path) -> None:
    server, stream = make_server_folder(tmp_path), make_swapping_stream(n_steps=6, n=20)
    algorithm = fd.algorithm("FineTuned", stream)
    run_time_steps(make_federation(stream, root=tmp_path / "clients"), 4, server, algorithm)
    now = load_state(read_newest_checkpoint(server), stream).models
    roll_back(server, 2)
    went, old = (
        load_state(read_newest_checkpoint(server), stream).models,
        load_state(Archive(server / "state").read_checkpoint(2), stream).models,
    )
    private = went.private
    assert private.sum() == 3 and np.array(went.held)[private].tolist() == np.array(now.held)[private].tolist()
    assert went.held != old.held and went.held[0] == old.held[0] == 0
    run_time_steps(make_federation(stream, root=tmp_path / "clients"), 6, server, algorithm)
    reasons = [str(e["cause"].get("reason")) for e in read(server / "state" / "test.jsonl").events]
    assert not any("had lost it" in reason for reason in reasons)


def test_it_is_refused_where_it_cannot_be(tmp_path: Path) -> None:
    server, stream = make_server_folder(tmp_path), make_swapping_stream(n_steps=6, n=20)
    with pytest.raises(DataError, match="no models of time 1: it is empty"):
        roll_back(server, 1)
    engine, refused = make_federation(stream, root=tmp_path / "clients"), list[str]()

    def see(t: int) -> None:
        if t == 2:
            with pytest.raises(BusyError) as error:
                roll_back(server, 1)
            refused.append(str(error.value))

    observe_data_requests(engine, see)
    run_time_steps(engine, 3, server)
    assert refused and refused[0].endswith("runs: stop `feddrift deploy server` first, then roll back")
    told = CliRunner().invoke(app, ["deploy", "models", "rollback", str(tmp_path), "9"])
    assert "no models of time 9: it has those of time 1 to 3" in str(told.exception)
    settings = server / "federation.toml"
    settings.write_text(settings.read_text() + "time_steps = 3\n")
    with pytest.raises(DataError, match="finished after 3 time steps: increase time_steps, then roll back"):
        roll_back(server, 1)
    settings.write_text(settings.read_text().replace("time_steps = 3", "time_steps = 4"))
    file = server / "state" / "archive" / "000002.ckpt"
    file.unlink()
    file.write_bytes((server / "state" / "archive" / "000001.ckpt").read_bytes()[:-1])
    with pytest.raises(DataError, match="000002.ckpt is damaged"):
        roll_back(server, 2)
    before = sorted(path.name for path in (server / "state" / "checkpoints").iterdir())
    foreign = make_federation(stream)
    foreign.n_steps = 1
    list(federate(foreign, FEDDRIFT, tmp_path / "other", {"algorithm": "another"}))
    shutil.copy(tmp_path / "other" / "archive" / "000001.ckpt", file)
    with pytest.raises(DataError, match="of a federation with other settings"):
        roll_back(server, 2)
    assert sorted(path.name for path in (server / "state" / "checkpoints").iterdir()) == before


def test_time_steps_that_are_passed_over() -> None:
    @dataclass(frozen=True, repr=False)
    class Own(State):
        seen: Floats = field(kw_only=True, metadata={"passed_over": -1.0})

    models = Models((np.zeros((2, 1)),), ids=(0, 1))
    state = Own(models, np.ones((1, 3, 2)), np.ones((3, 2)), seen=np.zeros((1, 5)))
    later = add_skipped_steps(state, 3)
    assert later.w.shape == (3, 3, 2) and later.w[0].all() and not later.w[1:].any()
    assert later.seen.tolist() == [[0.0] * 5, [-1.0] * 5, [-1.0] * 5]
    assert add_skipped_steps(state, 1) is state
    with pytest.raises(ValueError, match="a state cannot lose time steps: 1 time steps are known, got 0"):
        add_skipped_steps(state, 0)
    clusters = add_skipped_steps(replace(state, w=Clusters(np.zeros((1, 3), dtype=np.int64), 2, np.array([0.5]))), 2)
    assert isinstance(clusters.w, Clusters) and clusters.w.model.tolist() == [[0] * 3, [-1] * 3]
    assert clusters.w.weight.tolist() == [0.5, 1.0] and tree_leaves(clusters.models.params)
