"""Sweeps: runs of a grid file in parallel processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

from feddrift import cli
from feddrift.cli import sweep as plans
from feddrift.data import Stream
from feddrift.errors import ConfigError, FeddriftError
from feddrift.runs import record, sweep
from feddrift.runs.config import RunConfig
from feddrift.runs.estimate import CostEstimate
from tests.support.cli import SWEEP_GRID


def write_grid(tmp_path: Path, text: str = SWEEP_GRID) -> Path:
    path = tmp_path / "grid.toml"
    path.write_text(text)
    return path


def run_feddrift(*args: object, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "feddrift", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_a_grid_is_every_combination_once(tmp_path: Path) -> None:
    configs = sweep.read_grid(write_grid(tmp_path))
    told = [(c.stream, c.algorithm, c.settings.get("delta"), c.seed) for c in configs]
    assert told == [
        *[("sine-2", "FedDrift", delta, seed) for delta in (0.1, 0.2) for seed in (0, 1)],
        *[("sine-2", "Oblivious", None, seed) for seed in (0, 1)],
        ("circle-2", "Oblivious", None, 0),
    ]
    assert all(c.rounds == 1 and c.pattern for c in configs)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "one or more tables"),
        ("[[runs]", "cannot be read as TOML"),
        ("runs = 3", "one or more tables"),
        ("x = 1\n[[runs]]\nstream='sine-2'\nalgorithm='Oracle'", "got \\['x'\\]"),
        ("[[runs]]\nalgorithm = 'Oracle'", "runs 1: stream is missing"),
        ("[[runs]]\nstream = 'sine-2'\nalgorithm = []", "at least one value"),
        ("[[runs]]\nstream = 'sine-2'\nalgorithm = 'Orcale'", "Oracle"),
        ("[[runs]]\nstream = 'sine2'\nalgorithm = 'Oracle'", "did you mean 'sine-2'"),
        ("[[runs]]\nstream = 'sine-2'\nalgorithm = [['Oracle']]", "algorithm must be a name"),
        ("[[runs]]\nstream = 'sine-2'\nalgorithm = 'FedDrift'\nsettings = {delta = -3}", "delta must be"),
        ("[[runs]]\nstream = 'sine-2'\nalgorithm = 'Oracle'\nseed = 1", "unknown key 'seed'"),
        ("[[runs]]\nstream = 'sine-2'\nalgorithm = 'Oracle'\nseeds = 'x'", "seeds are a range"),
        ("[[runs]]\nstream = 'sine-2'\nalgorithm = 'Oracle'\nrounds = 0", "rounds"),
        (
            "[[runs]]\nstream = 'sine-2'\nalgorithm = 'Oracle'\nsettings = {delta = 1}",
            "none of Oracle has a setting 'delta'",
        ),
        ("[[runs]]\nstream = 'sine-2'\nalgorithm = 'Oracle'\nsettings = 4", "must be a table"),
        ("[[runs]]\nstream = 'sine-2'\nalgorithm = 'Oracle'\nrounds = true", "rounds must be a number"),
        (
            "[[runs]]\nstream = 'sine-2'\nalgorithm = 'Oracle'\ndefend = 'robus'",
            "defend must be robust, true .* 'robus'",
        ),
        (f"x = {'9' * 5000}", "cannot be read as TOML"),  # more digits than Python reads
        (f"x = {'[' * 3000}", "cannot be read as TOML"),  # deeper than Python goes
        (f"[[runs]]\nstream = 0x{'f' * 5000}\nalgorithm = 'Oracle'", "got a number of thousands of digits"),
        (f"[[runs]]\nstream = 'sine-2'\nalgorithm = 'Oracle'\nseeds = 0x{'f' * 5000}", "seeds are a range"),
        (f"[[runs]]\nstream = 'sine-2'\nalgorithm = 'Oracle'\nrounds = 0x{'f' * 5000}", "thousands of digits"),
        (
            f"[[runs]]\nstream = 'sine-2'\nalgorithm = 'Oracle'\nrounds = {list(range(1, 1001))}\nseeds = '0-999'",
            "a grid is at most 100000 runs, got 1000000",
        ),
    ],
)
def test_a_bad_grid_is_one_sentence(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(FeddriftError, match=said):
        sweep.read_grid(write_grid(tmp_path, text))


def test_a_grid_takes_all_that_a_run_takes(tmp_path: Path) -> None:
    legal = {param.name for param in typer.main.get_command(cli.app).commands["run"].params}  # type: ignore[attr-defined]
    assert {*sweep.KEY_DESCRIPTIONS} - {"settings", "data_dir", "scale"} == legal - {
        "set_", "seed", "data_dir", "out_dir", "checkpoint_every", "dry_run", "no_scale", "no_cache"
    }  # fmt: skip
    given = """
    [[runs]]
    stream = "weather.csv"
    algorithm = "Oblivious"
    client = "station"
    time = "date"
    every = ["month", 30]
    label = ["rain", "snow"]
    missing = "mean"
    scale = [true, false]
    engine = "reference"
    data_dir = "here"
    """
    configs = sweep.read_grid(write_grid(tmp_path, given))
    told = [(c.label, c.every, c.scale) for c in configs]
    assert told == [(a, b, s) for a in ("rain", "snow") for b in ("month", "30") for s in (True, False)]
    assert configs[0].engine == "reference" and configs[0].data_dir == Path("here") and configs[0].missing == "mean"
    assert sweep.read_grid(write_grid(tmp_path, given), Path("there"))[0].data_dir == Path("there")
    for wrong, said in {"every = 'mont'": "did you mean 'month'", "clint = 'a'": "did you mean 'client'"}.items():
        with pytest.raises(FeddriftError, match=f"runs 1: unknown .*{said}"):
            sweep.read_grid(write_grid(tmp_path, f"[[runs]]\nstream = 'a.csv'\nalgorithm = 'Oracle'\n{wrong}"))


def test_a_grid_without_an_algorithm_is_of_the_method_without_settings(tmp_path: Path) -> None:
    left_out, named = (
        sweep.read_grid(write_grid(tmp_path, f"[[runs]]\nstream = 'sine-2'\n{more}\nseeds = '0-1'"))
        for more in ("", "algorithm = 'FedDrift-Auto'")
    )
    assert left_out == named and [config.algorithm for config in left_out] == ["FedDrift-Auto"] * 2
    with pytest.raises(ConfigError, match="none of FedDrift-Auto has a setting 'delta'"):
        sweep.read_grid(write_grid(tmp_path, "[[runs]]\nstream = 'sine-2'\nsettings = {delta = 0.1}"))


def test_every_key_of_a_grid_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "compare.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.M))
    assert rows == sweep.KEY_DESCRIPTIONS


def test_a_sweep_skips_finished_runs_and_reports_failed_ones(tmp_path: Path) -> None:
    out, path = tmp_path / "runs", write_grid(tmp_path)
    first = run_feddrift("sweep", path, "--out", out, "--jobs", 2)
    assert first.returncode == 0, first.stderr
    assert "7 done, 0 were finished before, 0 failed" in first.stdout and "[7/7]" in first.stdout
    assert all(r.status == "complete" for r in record.read_all(out)) and len(list(out.glob("*.jsonl"))) == 7
    missing = "[[runs]]\nstream = 'mnist-4'\nalgorithm = 'Oracle'\nrounds = 1\n"
    again = run_feddrift(
        "sweep", write_grid(tmp_path, SWEEP_GRID + missing), "--out", out, "--data-dir", tmp_path / "none"
    )
    assert again.returncode == 1
    assert "0 done, 7 were finished before, 1 failed" in again.stdout
    assert again.stderr.count("\n") == 1 and "failed: mnist-4 Oracle seed 0:" in again.stderr


def test_runs_on_the_same_data_follow_each_other(tmp_path: Path) -> None:
    text = "[[runs]]\nstream = 'sine-2'\nalgorithm = ['Window', 'Oblivious']\nrounds = 1\nsteps = 2\nseeds = '0-1'\n"
    told = run_feddrift("sweep", write_grid(tmp_path, text), "--out", tmp_path / "runs", "--jobs", 1).stdout
    assert re.findall(r"sine-2 (\w+) seed (\d)", told) == [
        ("Window", "0"), ("Oblivious", "0"), ("Window", "1"), ("Oblivious", "1")
    ]  # fmt: skip


def test_runs_without_time_for_a_rehearsal_count_as_average(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()

    def rehearse_run(config: RunConfig, stream: Stream) -> CostEstimate:
        asked.append(config.algorithm)
        return CostEstimate(lanes=1.0, local_steps=1, seconds=30.0, bytes=1.0)

    monkeypatch.setattr(plans, "rehearse_run", rehearse_run)
    monkeypatch.setattr(plans, "MAX_REHEARSAL_SECONDS", 0.0)
    text = "[[runs]]\nstream = 'sine-2'\nalgorithm = ['Window', 'Oblivious']\nseeds = '0-1'\n"
    plan = plans._build_plan_table(sweep.read_grid(write_grid(tmp_path, text)), tmp_path / "runs", jobs=1)
    assert asked == ["Window"]
    assert plan.caption == (
        "about 2 min with 1 processes at a time; 2 runs were not rehearsed and count with the mean time"
    )


def test_a_dry_run_lists_remaining_runs_and_writes_nothing(tmp_path: Path) -> None:
    path, first, out = write_grid(tmp_path), tmp_path / "first.toml", tmp_path / "runs"
    first.write_text("[[runs]]" + SWEEP_GRID.split("[[runs]]")[1])

    def left() -> list[list[str]]:
        told = run_feddrift("sweep", path, "--out", out, "--dry-run", "--jobs", 3)
        assert told.returncode == 0 and "with 3 processes at a time" in told.stdout, told.stderr
        return [line.split()[:4] for line in told.stdout.splitlines()[2:4]]

    assert left() == [["sine-2", "6", "0", "6"], ["circle-2", "1", "0", "1"]] and not out.exists()
    assert run_feddrift("sweep", first, "--out", out, "--jobs", 1).returncode == 0
    before = sorted(out.iterdir())
    assert left() == [["sine-2", "6", "6", "0"], ["circle-2", "1", "0", "1"]] and sorted(out.iterdir()) == before


@pytest.mark.slow
def test_runs_recorded_with_other_code_are_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = "from feddrift.algorithms.baselines.single import Single\n\nclass Mine(Single):\n    pass\n"
    (tmp_path / "mine.py").write_text(code)
    path = write_grid(
        tmp_path,
        SWEEP_GRID.partition("[[runs]]\nstream = [")[0].replace('"FedDrift"', '"mine:Mine"').partition("settings")[0],
    )
    assert "4 done, 0 were finished before" in run_feddrift("sweep", path, "--out", "runs", "--jobs", 1).stdout
    assert "0 done, 4 were finished before" in run_feddrift("sweep", path, "--out", "runs", "--jobs", 1).stdout
    (tmp_path / "mine.py").write_text(f"{code}\n# better\n")
    again = run_feddrift("sweep", path, "--out", "runs", "--jobs", 1).stdout
    assert "2 done, 2 were finished before" in again and again.count("again: mine has changed since") == 2
    assert "0 done, 4 were finished before" in run_feddrift("sweep", path, "--out", "runs", "--jobs", 1).stdout
    (tmp_path / "mine.py").write_text(f"{code}\n# better still\n")
    first, *_ = sorted((tmp_path / "runs").glob("*mine*.jsonl"))
    record.get_part_path(first).write_text("")  # of a run that was stopped at once
    assert "2 done, 2 were finished before" in run_feddrift("sweep", path, "--out", "runs", "--jobs", 1).stdout


@pytest.mark.slow
def test_the_same_run_in_other_words_is_done_once(tmp_path: Path) -> None:
    quick = "rounds = 1\nsteps = 2\nseeds = [0, 1]\npattern = 'random:every=1,concepts=2,clients=3,steps=3'\n"
    words = ("", "settings = {delta = [0.05, 0.1]}\n")  # 0.1 is the default there
    text = "".join(f"[[runs]]\nstream = 'sine-2'\nalgorithm = 'FedDrift'\n{quick}{more}" for more in words)
    told = run_feddrift("sweep", write_grid(tmp_path, text), "--out", tmp_path / "runs", "--jobs", 3)
    assert told.returncode == 0 and "0 failed" in told.stdout, told.stderr
    assert len(list((tmp_path / "runs").glob("*.jsonl"))) == 4


@pytest.mark.slow
def test_a_worker_lost_between_two_runs_is_replaced(tmp_path: Path) -> None:
    configs = sweep.read_grid(write_grid(tmp_path))
    ended: list[str] = []
    for news in sweep.run_sweep(configs, tmp_path / "runs", jobs=1):
        if news.kind == "done" and not ended:
            (worker,) = multiprocessing.active_children()
            worker.kill()
            time.sleep(0.2)
        if news.kind != "step":
            ended.append(news.kind)
    assert sorted(ended) in (["done"] * 7, ["done"] * 6 + ["failed"])


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("in the way")
    told = run_feddrift("sweep", write_grid(tmp_path), "--out", tmp_path / "runs")
    assert told.returncode == 2 and "it is a file, not a folder" in told.stderr and told.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_killed_run_is_reported_and_the_others_continue(tmp_path: Path) -> None:
    endless = LONG.replace("0-1", "0").replace("rounds = 20", "rounds = 4000")  # seconds a step: nobody is so late
    configs = sweep.read_grid(write_grid(tmp_path, endless + LONG.replace("0-1", "1")))
    ended: dict[str, str] = {}
    for news in sweep.run_sweep(configs, tmp_path / "runs", jobs=1):
        if news.kind == "step" and news.config.seed == 0 and not ended:
            (worker,) = multiprocessing.active_children()
            worker.kill()
        elif news.kind != "step":
            ended[str(news.config.seed)] = f"{news.kind} {news.reason}".strip()
    assert ended == {"0": "failed its process ended with code -9", "1": "done"}
    (unfinished,) = [r for r in record.read_all(tmp_path / "runs") if r.status != "complete"]
    assert unfinished.header["seed"] == 0


LONG = """
[[runs]]
stream = "sine-2"
algorithm = "Oblivious"
seeds = "0-1"
rounds = 20
pattern = "random:every=3,concepts=2,clients=4,steps=12"
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep that was never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    assert run_feddrift("sweep", write_grid(folder, LONG), "--out", folder / "runs", "--jobs", 1).returncode == 0
    return folder / "runs"


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_sweep_resumes_where_it_stopped(tmp_path: Path, whole: Path, how: signal.Signals) -> None:
    """Records and results are those of a sweep that was never stopped."""
    path, out = write_grid(tmp_path, LONG), tmp_path / "runs"
    command = [sys.executable, "-m", "feddrift", "sweep", str(path), "--out", str(out), "--jobs", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    while process.poll() is None and not any(b'"row"' in p.read_bytes() for p in out.glob("*.part")):
        time.sleep(0.01)
    os.kill(process.pid, how)
    _, said = process.communicate(timeout=60)
    if how is signal.SIGINT:
        assert process.returncode == 130 and b"Traceback" not in said
    begin = time.monotonic()
    while (status := run_feddrift("sweep", path, "--out", out)).returncode and time.monotonic() < begin + 60:
        time.sleep(0.5)  # runs of a killed sweep may still hold their records for a moment
    assert status.returncode == 0, status.stderr
    for ours in sorted(out.glob("*.jsonl")):
        theirs = whole / ours.name
        rows = [[json.loads(line) for line in p.read_text().splitlines()[1:-1]] for p in (ours, theirs)]
        assert rows[0] == rows[1] and len(rows[0]) >= 48
