"""Real trackers: each contains the content of the record exactly once, however often it is followed."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from feddrift.reports.follow import collect_step_numbers, describe_step_events
from feddrift.reports.trackers import MAX_NOTE_CHARACTERS, StepNews, collect_parameters, parse_tracker
from feddrift.runs import record
from feddrift.runs.record import Record
from feddrift.runs.writer import RecordWriter
from tests.support.records import make_header, make_rows, write_federation_record

pytestmark = pytest.mark.slow
BORN = {"t": 1, "event": "created", "model": 1, "cause": {"clients": [1], "from": 0}}
RUNS = Path(__file__).parents[2] / "results" / "mnist-4"


def follow(run: Path, target: str, folder: Path, stop: bool = False) -> str:
    """What the command prints, in a process of its own; stopped by Ctrl-C once it follows."""
    env = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "WANDB_ERROR_REPORTING": "false", "PYTHONUNBUFFERED": "1"}
    command, pipe = [sys.executable, "-m", "feddrift", "follow", str(run), target], subprocess.PIPE
    with subprocess.Popen(command, cwd=folder, env=env, stdout=pipe, stderr=pipe, text=True) as on:
        assert on.stdout is not None
        said = on.stdout.readline()
        if stop:
            on.send_signal(signal.SIGINT)
        more, errors = on.communicate(timeout=300)
    assert on.returncode == (130 if stop else 0), errors
    return said + more


def follow_live_run(target: str, folder: Path) -> Record:
    """A run that is followed twice while it is written, and once more when it has ended."""
    head = make_header(3, overrides={"pattern": "Y"})
    with RecordWriter(folder / "runs", head) as writer:
        for t in range(3):
            writer.write_step(make_rows(head, t, accuracy=[0.5 + t / 10, 0.7]), [BORN] if t == 1 else [])
            if t < 2:
                assert follow(folder / "runs", target, folder, stop=True) == f"{writer.path.stem}: following\n"
    assert "complete after 3 time steps" in follow(folder / "runs", target, folder)
    return record.read(writer.path)


@pytest.mark.filterwarnings("ignore")  # what MLflow does with its database
def test_mlflow(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="the extra 'mlflow' is not installed")
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    going_on = write_federation_record(tmp_path / "fed" / "server" / "state")
    ended = follow_live_run(f"mlflow:{uri}", tmp_path)
    for _ in range(2):
        assert follow(tmp_path / "fed", f"mlflow:{uri}", tmp_path) == "fed: stopped after 3 time steps\n"
        follow(RUNS, f"mlflow:{uri}", tmp_path)
    known = {record.build_record_name(run.header): run for run in record.read_all(RUNS)}
    assert len(known) == 5
    known |= {"fed": going_on, record.build_record_name(ended.header): ended}
    client = MlflowClient(uri)
    (experiment,) = client.search_experiments(filter_string="name = 'feddrift'")
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert set(runs) == set(known)
    for name, found in known.items():
        run, steps = runs[name], collect_step_numbers(found)
        assert run.data.params == {key: str(value) for key, value in collect_parameters(found.header).items()}
        assert set(run.data.metrics) == {key for step in steps for key in step}
        for key in run.data.metrics:
            told = [(old.step, old.value) for old in client.get_metric_history(run.info.run_id, key)]
            assert told == [(t, step[key]) for t, step in enumerate(steps, 1) if key in step], (name, key)
        assert run.info.status == ("KILLED" if found is going_on else "FINISHED")
        happened = [line for text in describe_step_events(found) for line in text.splitlines()]
        assert all(line in run.data.tags["mlflow.note.content"] for line in happened)
        if found.seconds is not None:
            assert run.info.end_time - run.info.start_time == pytest.approx(1000 * found.seconds, abs=2)


@pytest.mark.filterwarnings("ignore")
def test_a_long_story_is_cut_where_mlflow_would(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="the extra 'mlflow' is not installed")
    run = parse_tracker(f"mlflow:sqlite:///{tmp_path / 'mlflow.db'}")("long", write_federation_record(tmp_path / "fed"))
    run.log_steps([StepNews(t, {}, f"event {t} " + 90 * "x") for t in range(1, 201)])
    note = run._client.get_run(run._run).data.tags["mlflow.note.content"]  # type: ignore[attr-defined]
    assert (
        len(note) <= MAX_NOTE_CHARACTERS and "event 200 x" in note and "event 1 x" not in note and "\n- ...\n" in note
    )


def test_wandb(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="the extra 'wandb' is not installed")
    found = follow_live_run("wandb:drift", tmp_path)
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    told: dict[int, dict[str, Any]] = {}
    for line in entries(file):
        kind = line.WhichOneof("record_type")
        if kind == "run":
            assert (line.run.project, line.run.display_name) == ("drift", record.build_record_name(found.header))
            assert "feddrift run --stream sine-2" in line.run.notes
        if kind == "history":
            values = {"/".join(item.nested_key) or item.key: item.value_json for item in line.history.item}
            t = int(values["time"])
            assert t not in told
            told[t] = values
    assert sorted(told) == [1, 2, 3] and "model 1 created for client 1" in told[2]["events"]
    for t, step in enumerate(collect_step_numbers(found), 1):
        assert {key: float(told[t][key]) for key in step} == step


def entries(file: Path) -> Iterator[Any]:
    """The records in a file of W&B: a log of LevelDB's kind, in blocks of 32 KiB, after a head of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # too little room for a head: zeros
            at += 32768 - at % 32768
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            found = wandb_internal_pb2.Record()
            found.ParseFromString(whole)
            yield found
            whole = b""
