"""Checkpoints: written completely or not at all, read back bit for bit, and runs that continue after any kill."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import feddrift as fd
from feddrift import algorithms, rng
from feddrift._internal import checkpoint
from feddrift.algorithms.feddrift.detection import DriftState
from feddrift.errors import ConfigError, DataError
from feddrift.runs import record
from feddrift.runs.config import RunConfig
from feddrift.runs.recorded_run import RecordedRun, find_unfinished_runs, load_stopped_run
from feddrift.types import Event, Models, Projection, State
from tests.support.cli import run_feddrift
from tests.support.kills import Killed

PATTERN = "0 0\n0 1\n1 1\n1 0\n"


def assert_same(a: Any, b: Any) -> None:
    """Equal to the last bit, and of one type."""
    if is_dataclass(a) and not isinstance(a, type):
        assert type(a) is type(b)
        for field in fields(a):
            assert_same(getattr(a, field.name), getattr(b, field.name))
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert type(a) is type(b) and len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype
        assert_array_equal(a, b)
    else:
        assert a == b or (a != a and b != b)


@pytest.fixture
def pattern(tmp_path: Path) -> Path:
    path = tmp_path / "pattern.txt"
    path.write_text(PATTERN)
    return path


@pytest.mark.parametrize("name", algorithms.ALGORITHMS)
def test_every_algorithms_state_comes_back_to_the_bit(name: str, tmp_path: Path, pattern: Path) -> None:
    s = fd.stream("sine-2", pattern=str(pattern))
    local = fd.Local(rounds=2, steps=2)
    *_, last = fd.run(s, fd.algorithm(name, s), local=local)
    checkpoint.write(tmp_path / "a.ckpt", {"n": 1}, last.state)
    found = checkpoint.read(tmp_path / "a.ckpt")
    assert found.about == {"n": 1}
    assert_same(last.state, found.decode({"W1": 0, "b1": 0, "W2": 0, "b2": 0}))


class Layer(NamedTuple):
    W: Any
    b: Any


def test_parameters_keep_the_shape_of_their_tree(tmp_path: Path) -> None:
    params = {"z": Layer(np.ones((1, 2)), np.zeros(1)), "a": [np.full((1, 3), 7.0)]}
    state = State(
        Models(params, (4,)), np.zeros((0, 1, 1)), np.ones((1, 1)), events=(Event("created", 4, {"k": None}),)
    )
    checkpoint.write(tmp_path / "a.ckpt", {}, state)
    like = {"z": Layer(0, 0), "a": [0]}
    found = checkpoint.read(tmp_path / "a.ckpt").decode(like)
    assert_same(state, found)
    with pytest.raises(DataError, match="its models have 3 arrays, those of this run 2"):
        checkpoint.read(tmp_path / "a.ckpt").decode({"z": Layer(0, 0)})


def test_a_checkpoint_names_no_class_that_it_may_not(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot contain a pathlib\.PosixPath|cannot contain a PosixPath"):
        checkpoint.write(tmp_path / "a.ckpt", {}, [tmp_path])
    checkpoint.write(tmp_path / "a.ckpt", {}, Event("created", 4, {}))
    path = tmp_path / "a.ckpt"
    first, payload = path.read_bytes().split(b"\n", 1)
    payload = payload.replace(b'\\"Event\\"', b'\\"Evens\\"')
    line = json.loads(first) | {"sha256": hashlib.sha256(payload).hexdigest()}
    path.write_bytes(json.dumps(line).encode() + b"\n" + payload)
    with pytest.raises(DataError, match=r"a Evens, which is not a class of this program"):
        checkpoint.read(path).decode({})


def test_classes_go_by_their_names_wherever_they_lie(tmp_path: Path) -> None:
    """Ours may move to other modules; a State of somebody's that has the name of one of ours is told apart from it."""

    @dataclass(frozen=True)
    class Mine(State):
        more: int = 0

    Mine.__qualname__ = "Mine"
    theirs: Any = dataclass(frozen=True)(
        type("DriftState", (State,), {"__module__": "elsewhere", "__annotations__": {}})
    )
    models = Models([np.zeros((1, 2))], (0,))
    path = tmp_path / "a.ckpt"
    for cls, name in (
        (DriftState, b"DriftState"),
        (theirs, b"elsewhere.DriftState"),
        (Mine, b"Mine"),
        (State, b"State"),
    ):
        value = cls(models, np.zeros((0, 1, 1)), np.ones((1, 1)))  # type: ignore[arg-type]
        checkpoint.write(path, {}, value)
        assert b'\\"is\\": \\"' + name + b'\\"' in path.read_bytes() and b"feddrift." not in path.read_bytes()
        assert type(checkpoint.read(path).decode([0])) is cls
    for old, found in (
        ("feddrift.algorithms.feddrift.method.DriftState", DriftState),
        ("elsewhere.DriftState", theirs),
    ):
        assert checkpoint._find_class(old) is found
    with pytest.raises(TypeError, match="nowhere.DriftState"):
        checkpoint._find_class("nowhere.DriftState")


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda b: b"", "is not a checkpoint"),
        (lambda b: b"\x80\x04K.", "is not a checkpoint"),
        (lambda b: b[:-1], "damaged"),
        (lambda b: b[:-9] + bytes([b[-9] ^ 1]) + b[-8:], "damaged"),
        (lambda b: b.replace(b'"schema": 4', b'"schema": 9'), "schema 9, this feddrift reads 2, 3 and 4"),
        (lambda b: b.split(b"\n", 1)[0], "damaged"),
    ],
)
def test_problems_of_a_file_are_reported(tmp_path: Path, spoil: Callable[[bytes], bytes], why: str) -> None:
    path = tmp_path / "a.ckpt"
    checkpoint.write(path, {}, [np.arange(10)])
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(DataError, match=why) as error:
        checkpoint.read(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("tree", "why"),
    [
        ([1], "AttributeError"),
        ({"is": "Models", "fields": {"params": {"tree": []}, "ids": 3, "family": "ab"}}, "TypeError"),
        ({"array": "99"}, "KeyError"),
        ({}, "ValueError"),
    ],
)
def test_a_state_that_is_none_is_one_sentence(tmp_path: Path, tree: Any, why: str) -> None:
    found = checkpoint.Checkpoint(tmp_path / "a.ckpt", {}, tree, {})
    with pytest.raises(DataError, match=f"a.ckpt does not fit this run: {why}"):
        found.decode({})


@pytest.mark.parametrize(
    "about", [{"steps": float("inf")}, {"steps": 1.5}, {"seconds": float("nan")}, {"every": -1}, {"steps": -1}]
)
def test_a_checkpoint_without_sense_is_named_and_not_used(
    tmp_path: Path, pattern: Path, caplog: pytest.LogCaptureFixture, about: dict[str, Any]
) -> None:
    recorded = RecordedRun(make_config(pattern), tmp_path)
    steps = iter(recorded)
    next(steps)
    steps.close()  # type: ignore[attr-defined]
    for path in recorded.checkpoints.path.glob("*.ckpt"):
        found = checkpoint.read(path)
        value = found.decode({"W1": 0, "b1": 0, "W2": 0, "b2": 0})
        checkpoint.write(path, {**found.about, **about}, value)
    again = RecordedRun(make_config(pattern), tmp_path, resume=True)
    assert again._find_resume_point().steps_done == 0 and caplog.text.count("is not a checkpoint of a run") == 2


def test_a_folder_that_cannot_be_is_named() -> None:
    for name in ("nowhere", "a" * 300, "a\0b"):
        with pytest.raises(DataError, match="is not a folder of records"):
            find_unfinished_runs(Path(name))


def make_config(pattern: Path, algorithm: str = "FedDrift", engine: str = "simulator") -> RunConfig:
    return RunConfig.from_values(
        stream="sine-2", algorithm=algorithm, rounds=3, steps=2, pattern=str(pattern), engine=engine,
        settings={"delta": 0.02} if algorithm == "FedDrift" else {},
    )  # fmt: skip


def read_comparable_lines(path: Path) -> list[dict[str, Any]]:
    """A record without what a clock has written."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("started", "seconds")} for line in lines]


def read_final_checkpoint(recorded: RecordedRun) -> Any:
    newest = next(recorded.checkpoints.newest_first())
    assert isinstance(newest, checkpoint.Checkpoint) and newest.about["steps"] == recorded.stream.n_steps
    return newest.decode({"W1": 0, "b1": 0, "W2": 0, "b2": 0})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the dead close no files
@pytest.mark.parametrize(
    ("algorithm", "every"), [("FedDrift", 0), ("FedDrift", 1), ("IFCA", 1), ("CFL", 2), ("KUE", 2)]
)
def test_killed_before_any_change_of_the_disk_a_run_resumes_to_the_same_bits(
    tmp_path: Path, pattern: Path, kill_before_change: Callable[[int], None], algorithm: str, every: int
) -> None:
    config = make_config(pattern, algorithm)
    unbroken = RecordedRun(config, tmp_path / "unbroken")
    list(unbroken)
    expected, n = read_comparable_lines(unbroken.path), 0
    while True:
        out = tmp_path / str(n)
        kill_before_change(n)
        try:
            list(RecordedRun(config, out, every=every))
        except Killed:
            pass
        else:
            break
        kill_before_change(10**9)
        again = RecordedRun(config, out, resume=True, every=every)
        list(again)
        assert read_comparable_lines(again.path) == expected
        assert_same(read_final_checkpoint(unbroken), read_final_checkpoint(again))
        assert not list(out.glob("*.part"))
        n += 1 if n < 12 else 5
    assert n > 20


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    tmp_path: Path, pattern: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(pattern)
    unbroken = RecordedRun(config, tmp_path / "unbroken")
    list(unbroken)
    first = RecordedRun(config, tmp_path / "b")
    steps = iter(first)
    next(steps), next(steps)
    steps.close()  # type: ignore[attr-defined]  # as Ctrl-C does
    newest = max(first.checkpoints.path.glob("*.ckpt"))
    newest.write_bytes(newest.read_bytes()[:-3])
    again = RecordedRun(config, tmp_path / "b", resume=True)
    assert [step.tau for step in again] == [1, 2]
    assert f"{newest} is damaged" in caplog.text
    assert read_comparable_lines(again.path) == read_comparable_lines(unbroken.path)
    assert_same(read_final_checkpoint(unbroken), read_final_checkpoint(again))


def test_a_foreign_checkpoint_is_named_and_not_used(
    tmp_path: Path, pattern: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = RecordedRun(make_config(pattern, "Oblivious"), tmp_path)
    list(theirs)
    ours = RecordedRun(make_config(pattern), tmp_path, resume=True)
    theirs.checkpoints.path.rename(ours.checkpoints.path)
    assert [step.tau for step in ours] == [0, 1, 2]
    assert "belongs to another run: sine-2_Oblivious" in caplog.text


def test_unfinished_runs_are_found_with_their_configuration(
    tmp_path: Path, pattern: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(pattern.parent)
    config = make_config(Path(pattern.name))
    steps = iter(RecordedRun(config, tmp_path / "runs"))
    next(steps)
    steps.close()  # type: ignore[attr-defined]
    monkeypatch.chdir("/")  # the pattern was named from another folder
    (state,) = find_unfinished_runs(tmp_path / "runs")
    found = load_stopped_run(state)
    assert found.config == config and [step.tau for step in found] == [1, 2]
    assert not find_unfinished_runs(tmp_path / "runs")


def test_a_run_whose_data_have_changed_does_not_go_on(
    tmp_path: Path, pattern: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what is wrong with one run keeps no other from going on."""
    for algorithm in ("FedDrift", "Oblivious"):
        steps = iter(RecordedRun(make_config(pattern, algorithm), tmp_path / "runs"))
        next(steps)
        steps.close()  # type: ignore[attr-defined]
        if algorithm == "FedDrift":
            first = make_config(pattern, algorithm)
    assert first.pattern is not None
    other = tmp_path / "other.txt"
    other.write_text(PATTERN)
    steps = iter(RecordedRun(first.model_copy(update={"pattern": str(other)}), tmp_path / "runs"))
    next(steps)
    steps.close()  # type: ignore[attr-defined]
    other.write_text(PATTERN.replace("0", "1"))
    code, _, told = run_feddrift(capsys, "resume", str(tmp_path / "runs"))
    assert code == 2 and told.count("have changed since") == 1 and "Traceback" not in told
    assert len(find_unfinished_runs(tmp_path / "runs")) == 1  # the other two are done


def test_restarting_a_run_is_logged(tmp_path: Path, pattern: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        steps = iter(RecordedRun(make_config(pattern), tmp_path))
        next(steps)
        steps.close()  # type: ignore[attr-defined]
    assert caplog.text.count("starts again; resume would continue it") == 1


def test_without_any_valid_checkpoint_there_is_an_error(tmp_path: Path, pattern: Path) -> None:
    recorded = RecordedRun(make_config(pattern), tmp_path)
    steps = iter(recorded)
    next(steps)
    steps.close()  # type: ignore[attr-defined]
    for path in recorded.checkpoints.path.glob("*.ckpt"):
        path.write_bytes(b"?")
    with pytest.raises(DataError, match="no checkpoint is intact .*run it again"):
        load_stopped_run(recorded.checkpoints.path)


def test_only_the_last_two_are_kept(tmp_path: Path, pattern: Path) -> None:
    recorded = RecordedRun(make_config(pattern), tmp_path, every=1)
    list(recorded)
    assert sorted(p.name for p in recorded.checkpoints.path.iterdir()) == ["000002-000003.ckpt", "000003-000000.ckpt"]


def test_a_changed_algorithm_cannot_go_on_inside_a_time_step(tmp_path: Path, pattern: Path) -> None:
    from feddrift.runs.journal import Journal, StepProgress

    s = fd.stream("sine-2", pattern=str(pattern))
    fed = fd.engines.engine("simulator")(s, fd.mlp(2, 4, 2), fd.Local(rounds=1, steps=1), 0).at(0)
    known = StepProgress(1, (("evaluate (0,) loss", None),), engine_progress=fed.progress())
    with pytest.raises(DataError, match=r"it asks 'evaluate \(0,\) error', it asked 'evaluate \(0,\) loss'"):
        Journal(fed, 1, lambda inside: None, known).evaluate(fed.fresh())


def test_an_interrupted_step_knows_the_counts_of_its_contests(tmp_path: Path, pattern: Path) -> None:
    from feddrift.runs.journal import Journal, StepProgress

    s = fd.stream("sine-2", pattern=str(pattern))
    engine = fd.engines.engine("simulator")(s, fd.mlp(2, 4, 2), fd.Local(rounds=2, steps=1), 0)
    half, teams = fd.Local(rounds=2, steps=1, hold_out=0.5, holds="first"), np.zeros((2, s.n_clients, 1), dtype=int)

    def step(fed: Any) -> tuple[Any, Any]:
        found = fed.contest(fed.fresh(), teams, half)
        return found, fed.train(fed.fresh(), np.ones((1, s.n_clients, 1)), local=half)

    saved: list[StepProgress] = []
    found, trained = step(Journal(engine.at(0), 1, saved.append))
    checkpoint.write(tmp_path / "inside", {}, saved[0].to_tuple())
    before = StepProgress(
        *checkpoint.read(tmp_path / "inside").decode(fd.mlp(2, 4, 2).init(rng.derive_key(0, "init", 0)))
    )
    fed = engine.at(0)
    fed.contest = lambda *_: pytest.fail("it was asked again")  # type: ignore[method-assign]
    again, went_on = step(Journal(fed, 1, lambda inside: None, before))
    assert found.rows.all()
    assert_same([found, trained], [again, went_on])
    with pytest.raises(DataError, match=r"it asks 'contest .* None', it asked 'contest .*'first'\)'"):
        Journal(engine.at(0), 1, lambda inside: None, before).contest(fed.fresh(), teams)


def test_an_interrupted_step_knows_its_moments(tmp_path: Path, pattern: Path) -> None:
    from feddrift.runs.journal import Journal, StepProgress

    s = fd.stream("sine-2", pattern=str(pattern))
    engine = fd.engines.engine("simulator")(s, fd.mlp(2, 4, 2), fd.Local(rounds=2, steps=1), 0)

    def step(fed: Any) -> tuple[Any, Any]:
        moments = fed.moments(fed.fresh(), "trunk", by="class", project=Projection((1, 2), 2))
        return moments, fed.train(fed.fresh(), np.ones((1, s.n_clients, 1)))

    saved: list[StepProgress] = []
    moments, trained = step(Journal(engine.at(0), 1, saved.append))
    checkpoint.write(tmp_path / "inside", {}, saved[0].to_tuple())
    before = StepProgress(
        *checkpoint.read(tmp_path / "inside").decode(fd.mlp(2, 4, 2).init(rng.derive_key(0, "init", 0)))
    )
    fed = engine.at(0)
    fed.moments = lambda *_: pytest.fail("it was asked again")  # type: ignore[method-assign]
    again, went_on = step(Journal(fed, 1, lambda inside: None, before))
    assert np.isfinite(moments.std).any()
    assert_same([moments, trained], [again, went_on])


def test_training_settings_are_sent_as_before_without_new_options() -> None:
    """Records, checkpoints and questions of earlier versions have no `holds`, and must be the same as today's."""
    assert "holds" not in fd.Local(hold_out=0.5).to_dict() and fd.Local(**fd.Local().to_dict()) == fd.Local()
    first = fd.Local(hold_out=0.5, holds="first")
    assert list(first.to_dict())[-1] == "holds" and fd.Local(**first.to_dict()) == first
    with pytest.raises(ConfigError, match="holds must be last or first, got 'middle'"):
        fd.Local(holds="middle")  # type: ignore[arg-type]


def run_with_file_limit(folder: Path, size: int, *words: str) -> tuple[int, str]:
    """The command where no file may grow beyond a size, as on a full disk."""
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))"
    code = f"{limit}; from feddrift.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=folder, capture_output=True, text=True)
    return done.returncode, done.stderr


@pytest.mark.slow
def test_on_a_full_disk_a_run_ends_with_one_sentence_and_resumes_when_there_is_room(
    tmp_path: Path, pattern: Path
) -> None:
    words = f"run --stream sine-2 --algorithm FedDrift --rounds 3 --steps 2 --pattern {pattern}".split()
    whole = RecordedRun(make_config(pattern, "FedDrift").model_copy(update={"settings": {}}), tmp_path / "whole")
    list(whole)
    sizes = [path.stat().st_size for path in whole.checkpoints.path.iterdir()]
    for size in (200, whole.path.stat().st_size - 500, min(sizes) - 100):  # no header, not all rows, no checkpoint
        out = tmp_path / str(size)
        code, said = run_with_file_limit(tmp_path, size, *words, "--out", str(out))
        assert code == 2 and said.count("\n") == 1 and said.startswith("Error: cannot write"), said
        assert "File too large" in said
        for state in find_unfinished_runs(out):
            list(load_stopped_run(state))
        for path in out.glob("*.jsonl"):
            assert record.is_complete(path) and read_comparable_lines(path) == read_comparable_lines(whole.path)


def test_a_read_only_folder_is_reported_and_its_files_remain(tmp_path: Path, pattern: Path) -> None:
    recorded = RecordedRun(make_config(pattern), tmp_path / "runs")
    list(recorded)
    before = recorded.path.read_bytes()
    if os.access("/proc/1/mem", os.W_OK):
        pytest.skip("root may write everywhere")
    (tmp_path / "runs").chmod(0o555)
    try:
        with pytest.raises(DataError, match="permission denied"):
            list(RecordedRun(make_config(pattern, "Oblivious"), tmp_path / "runs"))
    finally:
        (tmp_path / "runs").chmod(0o755)
    assert recorded.path.read_bytes() == before
