"""Sweeps that share a folder, in one process."""

from __future__ import annotations

import errno
import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import feddrift as fd
from feddrift import cli
from feddrift.errors import BusyError, ConfigError
from feddrift.runs import record, sweep
from feddrift.runs import recorded_run as recorded_module
from feddrift.runs.config import RunConfig
from feddrift.runs.locks import NoLocksError, check_locks, lock_file
from feddrift.runs.recorded_run import RecordedRun
from feddrift.runs.writer import lock_record
from tests.support.documentation import ROOT, read_blocks

CONFIG = RunConfig.from_values(
    stream="sine-2", algorithm="Oblivious", rounds=1, steps=2, pattern="random:every=1,concepts=2,clients=3,steps=3"
)


def expect_step(news: sweep.SweepProgress) -> None:
    """Check a report of a worker before its last one."""
    assert news.kind == "step"


def one(out: Path, alone: bool = False) -> sweep.SweepProgress:
    return sweep._run_config(CONFIG, CONFIG.load_stream(), out, alone, expect_step)


def refuse(*_: Any) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


def test_a_run_finished_between_looking_and_locking_is_not_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def late(path: Path, alone: bool) -> Iterator[Any]:
        list(RecordedRun(CONFIG, tmp_path))  # the other sweep does it just now
        began.append(record.read(path).header["started"])
        with lock_record(path, alone) as part:
            yield part

    began: list[str] = []
    monkeypatch.setattr(sweep, "lock_record", late)
    news = one(tmp_path)
    assert news.kind == "skipped" and news.record.endswith(".jsonl")
    assert [record.read(path).header["started"] for path in tmp_path.glob("*.jsonl")] == began
    assert not list(tmp_path.glob("*.part"))


def test_a_run_in_other_hands_is_left_to_them(tmp_path: Path) -> None:
    path = RecordedRun(CONFIG, tmp_path).path
    with lock_record(path):
        assert one(tmp_path).kind == "busy"
        assert record.read_latest(path) is None  # nothing is there to read yet
    assert not record.get_part_path(path).exists() and one(tmp_path).kind == "done" and one(tmp_path).kind == "skipped"


@pytest.mark.parametrize("finished", [False, True])
def test_an_unfinished_run_of_another_version_restarts_and_a_finished_one_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: bool
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(recorded_module, "__version__", "0.0.1")
        steps = iter(RecordedRun(CONFIG, tmp_path))
        next(steps)
        if finished:
            list(steps)
        else:
            del steps
    (path,) = tmp_path.glob("*.jsonl*")
    before = record.read(path).header
    news = one(tmp_path)
    assert (news.kind, news.reason) == (("skipped", "") if finished else ("done", "feddrift has changed since"))
    after = record.read(path).header
    assert (after["started"] == before["started"]) == finished
    assert sweep.count_versions(tmp_path, [news.record, "none.jsonl"]) == {after["versions"]["feddrift"]: 1}
    assert after["versions"]["feddrift"] == ("0.0.1" if finished else fd.__version__)


def test_a_stopped_run_is_gone_on_with(tmp_path: Path) -> None:
    steps = iter(RecordedRun(CONFIG, tmp_path))
    next(steps)
    del steps
    (path,) = tmp_path.glob("*.jsonl")
    before = record.read(path)
    assert (before.status, before.rows.steps) == ("interrupted", 1)
    assert one(tmp_path).kind == "done"
    after = record.read(path)
    assert after.status == "complete" and after.header["started"] == before.header["started"]


def test_without_locks_only_a_part_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(NoLocksError, match=r"has no locks \(No locks available\).* --part 1/2 and --part 2/2"):
        check_locks(tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(NoLocksError, match="--part 1/1"):
        one(tmp_path)
    assert one(tmp_path, alone=True).kind == "done"
    (tmp_path / "grid.toml").write_text("[[runs]]\nstream = 'sine-2'\n")
    told = CliRunner().invoke(cli.app, ["sweep", str(tmp_path / "grid.toml"), "--out", str(tmp_path)])
    assert isinstance(told.exception, NoLocksError) and "done" not in told.output


def test_another_error_of_a_lock_does_not_mean_a_busy_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    first = lock_file(tmp_path / "x")
    with pytest.raises(BusyError, match="another run is writing"):
        lock_file(tmp_path / "x")
    first.close()
    lock_file(tmp_path / "x").close()
    monkeypatch.setattr(fcntl, "flock", broken)
    with pytest.raises(OSError, match="Input/output error"):
        lock_file(tmp_path / "x")


def test_parts_are_the_plan() -> None:
    plan = [CONFIG.model_copy(update={"seed": seed}) for seed in range(7)]
    for n in (1, 3, 7, 9):
        parts = [sweep.select_part(plan, f"{k}/{n}") for k in range(1, n + 1)]
        assert sorted(config.seed for part in parts for config in part) == list(range(7))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(
    "part", ["", "3", "0/4", "5/4", "1/0", "a/b", "1/2/3", "-1/2", "1.5/2", f"1/{'9' * 5000}", "²/3"]
)
def test_a_bad_part_is_one_sentence(part: str) -> None:
    with pytest.raises(ConfigError, match=r"a part is K/N with K from 1 to N, such as 3/20, got '"):
        sweep.select_part([CONFIG], part)


def test_the_page_shows_the_script() -> None:
    script = (ROOT / "examples" / "sweep.sbatch").read_text()
    assert script in [block.text for block in read_blocks("docs/sweeps.md")]
