"""The command line as a user types it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from feddrift import cli, streams
from feddrift.algorithms import ALGORITHMS
from feddrift.data import Stream
from feddrift.runs import record
from tests.support.cli import QUICK_OPTIONS, run_feddrift


def test_run_report_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = str(tmp_path / "runs")
    code, out, _ = run_feddrift(
        capsys, "run", "--stream", "sine-2", "--algorithm", "FedDrift", "--algorithm", "Oracle", "--seeds", "0-1",
        "--out", runs, *QUICK_OPTIONS,
    )  # fmt: skip
    assert code == 0
    assert out.count("time   1") == 4 and "Oracle seed 1" in out and "omitting" in out
    assert "sine-2: 3 clients, 3 time steps + 1 to test, 2 features, 2 classes" in out
    code, out, err = run_feddrift(capsys, "report", runs, "--json")
    assert code == 0 and not err
    feddrift_, oracle = sorted(json.loads(out), key=lambda o: str(o["algorithm"]))
    assert feddrift_["algorithm"] == "FedDrift" and feddrift_["stream"] == "sine-2" and feddrift_["seeds"] == [0, 1]
    assert feddrift_["settings"]["delta"] == 0.1 and feddrift_["settings"]["rounds"] == 1
    assert feddrift_["settings"]["pattern"].startswith("random:")
    for key in ("omitting_drifts", "including_drifts"):
        assert 0 <= feddrift_[key]["mean"] <= 100 and feddrift_[key]["std"] >= 0
    assert oracle["ari"] == 1.0 and oracle["models_final"] == 2 and oracle["models_sent_ratio"] >= 1
    code, out, _ = run_feddrift(capsys, "report", runs, "--metrics")
    assert code == 0 and "precision" in out and "MB" in out and out.count("Oracle") == 3  # a column, and two rows
    told = json.loads(run_feddrift(capsys, "report", runs, "--metrics", "--json")[1])
    told = {o["algorithm"]: o["metrics"] for o in told}
    assert told["Oracle"]["noticed"]["recall"]["mean"] == 1 and told["Oracle"]["lost_to_oracle"]["mean"] == 0
    assert told["FedDrift"]["always"]["recall"]["mean"] == 1 and told["FedDrift"]["bytes"]["scoring"]["mean"] > 0
    for words, why in (
        (["--follow"], "needs --html"),
        (["--html", str(tmp_path / "x.html"), "--json"], "leave out --json"),
    ):
        code, _, err = run_feddrift(capsys, "report", runs, *words)
        assert code == 2 and why in err and not (tmp_path / "x.html").exists()
    for kind in ("clusters", "accuracy"):
        picture = tmp_path / f"{kind}.png"
        assert run_feddrift(capsys, "plot", runs, kind, "--out", str(picture))[0] == 0
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_without_a_name_the_method_without_settings_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "--stream", "sine-2", *QUICK_OPTIONS]
    code, out, err = run_feddrift(capsys, *words, "--out", str(tmp_path / "left-out"))
    sentence, *others = out.splitlines()
    assert code == 0 and not err
    assert sentence == "algorithm: FedDrift-Auto, which needs no settings (--algorithm chooses another)"
    code, out, _ = run_feddrift(capsys, *words, "--algorithm", "FedDrift-Auto", "--out", str(tmp_path / "named"))
    assert out.splitlines()[:-1] == others[:-1]  # the same, but for the folder and that sentence
    (left_out,), (named,) = ((tmp_path / folder).glob("*.jsonl") for folder in ("left-out", "named"))
    assert left_out.name == named.name and record.read(left_out).header["algorithm"] == "FedDrift-Auto"


def test_a_rehearsal_warns_of_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    words = ["run", "--stream", "sea-4", "--algorithm", "FedDrift", "--set", "delta=0.001", "--out", str(tmp_path)]
    code, out, err = run_feddrift(
        capsys, *words, "--pattern", "random:clients=3,steps=3,every=2,concepts=2", "--dry-run"
    )
    assert code == 0 and "FedDrift" in out and not err and not caplog.records


def test_report_as_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs, page = str(tmp_path / "runs"), tmp_path / "new" / "report.html"
    run_feddrift(capsys, "run", "--stream", "sine-2", "--algorithm", "FedDrift", "--out", runs, *QUICK_OPTIONS)
    code, out, err = run_feddrift(capsys, "report", runs, "--html", str(page))
    assert code == 0 and f"wrote {page}" in out and not err
    assert "<title>runs · feddrift report</title>" in page.read_text()
    (path,) = (tmp_path / "runs").glob("*.jsonl")
    path.rename(path.with_suffix(".jsonl.part"))  # as if it still ran
    lines = path.with_suffix(".jsonl.part").read_text().splitlines(keepends=True)
    path.with_suffix(".jsonl.part").write_text("".join(lines[:-2]))
    assert run_feddrift(capsys, "report", runs, "--html", str(page))[0] == 0
    code, _, err = run_feddrift(capsys, "report", str(tmp_path / "nowhere"), "--html", str(page))
    assert code == 2 and len(err.splitlines()) == 1


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_feddrift(capsys, "list", "--json")
    listed: dict[str, list[dict[str, str]]] = json.loads(out)
    assert code == 0 and set(listed) == {"algorithms", "streams", "engines"}
    assert [entry["name"] for entry in listed["algorithms"]] == list(ALGORITHMS)
    assert {"sine-2", "mnist-l-4", "sea-4-text"} <= {entry["name"] for entry in listed["streams"]}
    assert all(entry["summary"] for entries in listed.values() for entry in entries)
    assert listed["algorithms"][0]["name"] == "FedDrift-Auto" and "default" in listed["algorithms"][0]["summary"]
    code, out, _ = run_feddrift(capsys, "list")
    assert code == 0 and "FedDrift-Eager-W" in out and "folder:DIR" in out and "merge_delta" in out


RUN = ["run", "--stream", "sine-2", "--algorithm", "FedDrift"]
WRONG: list[tuple[list[str], str]] = [
    (["run", "--stream", "sine", "--algorithm", "FedDrift"], "unknown stream 'sine', did you mean 'sine-2'?"),
    (["run", "--stream", "sine-2", "--algorithm", "feddrft"], "unknown algorithm 'feddrft', did you mean 'FedDrift'?"),
    ([*RUN, "--set", "dleta=0.1"], "unknown setting of FedDrift 'dleta', did you mean 'delta'?"),
    ([*RUN, "--set", "delta"], "--set takes KEY=VALUE, such as delta=0.1, got 'delta'"),
    ([*RUN, "--set", "delta=high"], "FedDrift.delta must be a number"),
    ([*RUN, "--set", "delta=1.5"], "FedDrift.delta must be in [0, 1] for metric='error', got 1.5"),
    ([*RUN, "--set", "init=hot"], "FedDrift.init must be 'warm', 'fresh' or 'best', got 'hot'"),
    (["run", "--stream", "sine-2", "--algorithm", "Oracle", "--set", "a=1"], "Oracle has no settings, got 'a'"),
    ([*RUN, "--seeds", "4-1"], "a range of seeds goes from the lower to the higher one, got '4-1': write 1-4"),
    ([*RUN, "--seed", "1", "--seeds", "0-1"], "give either --seed or --seeds, not both"),
    ([*RUN, "--seed", "-1"], "seed must be at least 0, got -1"),
    ([*RUN, "--seeds", "0-99999999"], "seeds are at most 10000"),
    ([*RUN, "--seeds", "0-9999,20000-29999"], "seeds are at most 10000"),  # together
    ([*RUN, "--seeds", "9" * 5000], "seeds are a range such as 0-4"),  # more digits than Python reads
    ([*RUN, "--set", "name=x"], "unknown setting of FedDrift 'name'"),
    (["run", "--stream", "a\nb\x1b[31m", "--algorithm", "FedDrift"], "unknown stream 'a\\nb\\x1b[31m'"),
    ([*RUN, "--pattern", "random:every=2,concepts=2,clients=999999999,steps=999999999"], "must be at most 1000000"),
    (["run", "--stream", "folder:" + "a" * 300, "--algorithm", "FedDrift"], "is not a directory"),
    (["run", "--stream", "folder:~nobody-of-this-name", "--algorithm", "FedDrift"], "is not a directory"),
    (["report", "a" * 300], "is neither a folder of records nor a record"),
    ([*RUN, "--rounds", "0"], "rounds must be at least 1, got 0"),
    ([*RUN, "--rounds", "99999999999"], "rounds must be at most 1000000"),
    ([*RUN, "--set", "delta=0.1", "--set", "delta=0.2"], "--set delta is given twice"),
    ([*RUN, "--set", "redetect=true"], "redetect is a setting of FedDrift-C only"),
    ([*RUN, "--algorithm", "Oracle", "--set", "dleta=1"], "of FedDrift, Oracle 'dleta', did you mean 'delta'?"),
    ([*RUN, "--lr", "nan"], "lr"),
    ([*RUN, "--defend", "robus"], "defend must be robust, true (the limits of version 0.3) or false, got 'robus'"),
    ([*RUN, "--poison", "relabel:0:to=5"], "two different classes of 0 to 1, got from=0 and to=5"),
    ([*RUN, "--poison", "stale:0:factor=5"], "poison: stale has no options, got 'factor=5'"),
    ([*RUN, "--engine", "warp"], "unknown engine 'warp'"),
    ([*RUN, "--pattern", "random:every=2,concepts=9"], "sine has concepts 0 and 1"),
    ([*RUN, "--pattern", "nowhere.txt"], "pattern file nowhere.txt does not exist"),
    (["run", "--stream", "folder:nowhere", "--algorithm", "FedDrift"], "nowhere"),
    (["report", "nowhere"], "nowhere is neither a folder of records nor a record"),
    (["plot", ".", "pie", "--out", "x.png"], "'pie' is not one of"),
    (["run", "--algorithm", "FedDrift"], "Missing option '--stream'"),
    (["run", "--stream", "sine-2", "--set", "delta=0.1"], "FedDrift-Auto has no settings, got 'delta'"),
    (["frobnicate"], "No such command 'frobnicate'"),
]


@pytest.mark.parametrize(("args", "sentence"), WRONG, ids=[" ".join(args) for args, _ in WRONG])
def test_bad_input_is_one_sentence_and_exit_code_2(
    args: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run_feddrift(capsys, *args)
    assert code == 2
    assert err.startswith("Error: ") and len(err.strip().splitlines()) == 1
    assert sentence in err and "Traceback" not in out + err
    assert not list(tmp_path.rglob("*"))  # nothing half-written


def test_a_folder_named_as_a_stream_is_recognised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shops").mkdir()
    for label in ([], ["--label", "sold"]):
        code, _, told = run_feddrift(capsys, "run", "--stream", "shops", "--algorithm", "FedDrift", *label)
        assert code == 2 and "did you mean 'folder:shops'?" in told


def test_help_is_worth_reading(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_feddrift(capsys, "run", "--help")
    assert code == 0
    for word in ("--stream", "--set", "--seeds", "communication rounds", "random:every=2", "Example", "FedDrift-Auto,"):
        assert word in out


def test_an_unwritable_folder_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("in the way")
    code, _, err = run_feddrift(capsys, *RUN, *QUICK_OPTIONS, "--out", str(tmp_path / "file"))
    assert code == 2 and len(err.strip().splitlines()) == 1 and "it is a file, not a folder" in err


def test_settings_go_to_the_algorithms_that_know_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [*RUN, "--algorithm", "Oblivious", *QUICK_OPTIONS, "--set", "delta=0.3", "--set", "init=fresh"]
    code, out, _ = run_feddrift(capsys, *command, "--out", str(tmp_path))
    assert code == 0 and "delta=0.3" in out and "init=fresh" in out  # what was set is shown
    found = {
        o["algorithm"]: o["settings"] for o in json.loads(run_feddrift(capsys, "report", str(tmp_path), "--json")[1])
    }
    assert found["FedDrift"]["delta"] == 0.3 and "delta" not in found["Oblivious"]


def test_the_line_of_a_time_step_lists_moved_clients(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "drift.txt").write_text("0 0 0\n0 0 0\n0 1 1\n1 1 1\n1 1 1\n")
    code, out, _ = run_feddrift(
        capsys, *RUN, "--pattern", str(tmp_path / "drift.txt"), "--rounds", "10", "--set", "init=fresh",
        "--out", str(tmp_path),
    )  # fmt: skip
    assert code == 0
    lines = [line for line in out.splitlines() if line.startswith("  time")]
    assert "new model 1 for client 1; new model 2 for client 2" in lines[2]
    assert "model 2 merged into 1; client 0 to model 1" in lines[3] and lines[0].endswith("1 model")


def test_oracle_without_truth_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for client in "ab":
        (tmp_path / "data" / f"client_{client}").mkdir(parents=True)
        for t in range(2):
            (tmp_path / "data" / f"client_{client}" / f"step_{t}.csv").write_text("x,label\n1,0\n2,1\n")
    command = ["run", "--stream", f"folder:{tmp_path / 'data'}", "--algorithm", "Oblivious", "--algorithm", "Oracle"]
    code, out, err = run_feddrift(capsys, *command, "--out", str(tmp_path / "runs"))
    assert code == 2 and "Oracle needs a stream with known true concepts" in err
    assert not out and not (tmp_path / "runs").exists()


def test_a_report_of_unfinished_runs_mentions_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_feddrift(capsys, *RUN, *QUICK_OPTIONS, "--out", str(tmp_path))
    (path,) = tmp_path.glob("*.jsonl")
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    code, _, err = run_feddrift(capsys, "report", str(path))
    assert code == 2 and f"the run in {path} is not finished yet: `feddrift resume` continues it" in err


def test_a_closed_pipe_ends_the_command_quietly(tmp_path: Path) -> None:
    command = (
        f"{sys.executable} -m feddrift run --stream sine-2 --algorithm Window --rounds 1 --out {tmp_path} | head -1"
    )
    done = subprocess.run(["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"], capture_output=True, text=True)
    assert done.returncode in (0, 1, 141) and "sine-2" in done.stdout
    assert "Traceback" not in done.stderr and "FATAL" not in done.stderr


def test_your_own_folder_runs_without_ground_truth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw = np.random.default_rng(0)
    for client in ("north", "south"):
        for t in range(3):
            x = draw.random((20, 2))
            rows = [f"{a:.4f},{b:.4f},{'yes' if a > b else 'no'}" for a, b in x]
            path = tmp_path / "data" / f"client_{client}" / f"step_{t}.csv"
            path.parent.mkdir(parents=True, exist_ok=True)
            if not (client == "south" and t == 0):
                path.write_text("\n".join(["height,width,sold", *rows]))
    stream = f"folder:{tmp_path / 'data'}"
    runs = str(tmp_path / "runs")
    args = ["run", "--stream", stream, "--algorithm", "FedDrift", "--label", "sold", "--rounds", "1", "--out", runs]
    assert run_feddrift(capsys, *args)[0] == 0
    (only,) = json.loads(run_feddrift(capsys, "report", runs, "--json")[1])
    assert only["stream"] == stream and only["omitting_drifts"] is None and only["ari"] is None
    assert only["including_drifts"]["mean"] > 30


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_leaves_a_valid_record(stop: signal.Signals, tmp_path: Path) -> None:
    # Whoever runs the tests in the background may have Ctrl-C ignored, so the process says that it listens.
    begin = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from feddrift import cli; cli.main()"
    )
    command = [sys.executable, "-c", begin, *RUN, "--out", str(tmp_path), "--rounds", "20000", "--seeds", "0-1"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        for _ in range(600):  # the file is created and locked first; its header is written when training begins
            if any(path.stat().st_size for path in tmp_path.glob("*.part")):
                break
            time.sleep(0.1)
        process.send_signal(stop)
        try:
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130 and "stopped" in err and "Traceback" not in err
    assert f"`feddrift resume {tmp_path}` continues" in err
    assert "FedDrift seed 0. Not begun yet, so run them again: FedDrift seed 1\n" in err
    (left,) = record.read_all(tmp_path)
    assert left.status == "interrupted" and left.rows.steps < 10


def test_a_dry_run_estimates_its_cost_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["run", "--stream", "sine-2", "--algorithm", "Oblivious", "--algorithm", "Oracle", "--seeds", "0-2"]
    code, said, _ = run_feddrift(
        capsys, *args, "--rounds", "2", "--steps", "5", "--out", str(tmp_path / "runs"), "--dry-run"
    )
    assert code == 0 and "1,000" in said and "1,290" in said and "GB" in said  # Oracle: 129 lanes
    assert not (tmp_path / "runs").exists()


def test_a_run_is_compared_with_finished_runs_on_the_same_data_in_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = ["--stream", "sine-2", "--rounds", "1", "--steps", "2", "--seeds", "0-1", "--out", str(tmp_path)]
    code, said, _ = run_feddrift(capsys, "run", *short, "--algorithm", "FedDrift")
    assert code == 0 and said.count("Nothing to compare FedDrift with: add `--algorithm Oblivious`") == 1
    run_feddrift(capsys, "run", *short, "--algorithm", "Oracle", "--lr", "0.5")  # other training: not compared
    (tmp_path / "broken.jsonl").write_text("no record")
    code, said, _ = run_feddrift(capsys, "run", *short, "--algorithm", "Oblivious")
    assert code == 0 and f"compared with 2 finished runs on the same data in {tmp_path}" in said
    assert "one shared model" in said and "Numbers in brackets are 95 % intervals" in said and "Oracle" not in said


def test_the_same_command_writes_the_same_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def lines(folder: Path) -> list[dict[str, Any]]:
        run_feddrift(capsys, *RUN, *QUICK_OPTIONS, "--seed", "3", "--out", str(folder))
        (path,) = folder.glob("*.jsonl")
        return [line for line in map(json.loads, path.read_text().splitlines()) if line["kind"] in ("row", "event")]

    assert lines(tmp_path / "a") == lines(tmp_path / "b")


@pytest.mark.parametrize(("data_seed", "n_builds"), [("0", 1), ("seed", 3)])
def test_streams_are_built_once_for_each_data_seed(
    data_seed: str, n_builds: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    build_stream = streams.stream
    built_with: list[int] = []

    def count_builds(*args: Any, **options: Any) -> Stream:
        built_with.append(options["data_seed"])
        return build_stream(*args, **options)

    monkeypatch.setattr(streams, "stream", count_builds)
    pattern = ["--pattern", str(tmp_path / "pattern.txt")]  # a random pattern would differ between seeds
    (tmp_path / "pattern.txt").write_text("0 0 1\n0 1 1\n1 1 0\n")
    names = ["--algorithm", "Oblivious", "--algorithm", "Window"]
    options = ["--rounds", "1", "--steps", "2", "--seeds", "0-2", "--data-seed", data_seed, "--out", str(tmp_path)]
    code, _, _ = run_feddrift(capsys, "run", "--stream", "sine-2", *names, *pattern, *options)
    assert code == 0
    assert len(built_with) == n_builds
    assert len(record.read_all(tmp_path)) == 6


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("feddrift rep", ["report"]),
        ("feddrift run --stream ci", ["circle-2"]),
        ("feddrift run --algorithm FedDrift-E", ["FedDrift-Eager", "FedDrift-Eager-W"]),
        ("feddrift run --algorithm FedDrift-A", ["FedDrift-Auto"]),
    ],
)
def test_a_shell_completes_commands_and_names(typed: str, expected: list[str]) -> None:
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" ")), "_FEDDRIFT_COMPLETE": "complete_bash"}
    code = "import sys; sys.argv = ['feddrift']; from feddrift.cli import main; main()"
    told = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **words}, capture_output=True, text=True, check=True
    )
    assert told.stdout.split() == expected


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plot"], "clusters: the model of each client over time"),
        (["report"], "folders of records, or single records"),
        (["deploy", "add"], "of the new client"),
    ],
)
def test_the_help_of_positional_arguments_is_shown(words: list[str], said: str) -> None:
    if typer_hides_argument_help():
        pytest.skip("typer before 0.26 does not pass the help of arguments on to click 8.5")
    if words[0] == "deploy":
        pytest.importorskip("flwr", reason="the extra 'flower' is not installed")
    told = CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, [*words, "--help"])
    assert said in told.output, told.output


def typer_hides_argument_help() -> bool:
    """Return whether the installed typer uses a click that resets the help of its arguments."""
    typer_version = tuple(map(int, metadata.version("typer").split(".")[:2]))
    if typer_version >= (0, 26):  # has its own click
        return False
    return tuple(map(int, metadata.version("click").split(".")[:2])) >= (8, 5)
