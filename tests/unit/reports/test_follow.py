"""Runs in trackers: each number and event of a record is logged once."""

from __future__ import annotations

import lzma
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from feddrift import cli
from feddrift.cli.deploy import format_trained_step
from feddrift.errors import ConfigError, DataError
from feddrift.reports import trackers
from feddrift.reports.follow import Follower, collect_step_numbers, describe_step_events
from feddrift.reports.trackers import Numbers, StepNews, TrackerFactory
from feddrift.runs import record
from feddrift.runs.record import Record
from feddrift.runs.writer import RecordWriter
from tests.support.records import make_header, make_merge_event, make_rows, write_federation_record, write_record

BORN: dict[str, Any] = {"t": 1, "event": "created", "model": 1, "cause": {"clients": [1], "from": 0}}
COLUMNS: dict[str, Any] = {
    "accuracy": [[0.5, 0.75], [0.25, None], [1.0, 0.5]], "tested": [[10, 10], [10, 0], [10, 10]],
    "model": [[0, 0], [0, 1], [0, 0]], "n_models": [[1, 1], [2, 2], [1, 1]],
    "drift": [[False, False], [False, True], [False, False]],
}  # fmt: skip
EVENTS: list[dict[str, Any]] = [BORN, make_merge_event(2, 1, 0)]
STEPS: list[Numbers] = [
    {"accuracy/mean": 0.625, "accuracy/worst": 0.5, "federation/models": 1, "federation/alarms": 0,
     "federation/models_sent": 20, "per_client/0": 0.5, "per_client/1": 0.75},
    {"accuracy/mean": 0.25, "accuracy/worst": 0.25, "federation/models": 2, "federation/alarms": 1,
     "federation/models_sent": 40, "per_client/0": 0.25},
    {"accuracy/mean": 0.75, "accuracy/worst": 0.5, "federation/models": 1, "federation/alarms": 0,
     "federation/models_sent": 60, "per_client/0": 1.0, "per_client/1": 0.5},
]  # fmt: skip
TOLD = [
    "",
    "model 1 created for client 1: model 1 starts as a copy of model 0",
    "model 1 merged into model 0: on each other's data they differ by 0.010",
]


class Fake:
    """A tracker that remembers its runs by name."""

    def __init__(self) -> None:
        self.runs: dict[str, Fake.Run] = {}
        self.begun: list[str] = []

    class Run:
        def __init__(self) -> None:
            self.reported_numbers: dict[int, Numbers] = {}
            self.entries: list[tuple[int, str, float]] = []
            self.events: list[tuple[int, str]] = []
            self.status = ""
            self.seconds: float | None = None

        def log_steps(self, news: Sequence[StepNews]) -> None:
            for step in news:
                self.entries += [(step.time, key, value) for key, value in step.numbers.items()]
                self.reported_numbers.setdefault(step.time, {}).update(step.numbers)
                if step.events:
                    self.events.append((step.time, step.events))

        def end_run(self, status: str, seconds: float | None) -> None:
            self.status = status
            self.seconds = seconds

    def __call__(self, name: str, found: Record) -> Fake.Run:
        self.begun.append(name)
        return self.runs.setdefault(name, Fake.Run())


def entries(steps: Sequence[Numbers]) -> list[tuple[int, str, float]]:
    return [(t, key, value) for t, step in enumerate(steps, 1) for key, value in step.items()]


def look(run: Path, tracker: TrackerFactory) -> list[str]:
    """One look by a follower that ends then."""
    follower = Follower(run, tracker)
    sentences = list(follower.report_news())
    follower.close()
    return sentences


def test_logged_numbers_and_events_of_a_run(tmp_path: Path) -> None:
    found = write_record(tmp_path, make_header(3), COLUMNS, EVENTS)
    assert collect_step_numbers(found) == STEPS and describe_step_events(found) == TOLD


def test_decisions_are_logged_with_their_clients(tmp_path: Path) -> None:
    causes = [{"clients": [1], "reason": "goes back to model 0", "rows": 9}, {"clients": [], "reason": "all stay"}]
    decided = [{"t": 1, "event": "decided", "model": 0, "cause": cause} for cause in causes]
    found = write_record(tmp_path, make_header(2), None, decided)
    assert describe_step_events(found)[1].split("\n") == [
        "decision for client 1: goes back to model 0 (rows=9)", "decision for all clients: all stay",
    ]  # fmt: skip
    assert "decided" not in format_trained_step(found, 1)


def test_other_scores_are_logged_as_means_if_recorded(tmp_path: Path) -> None:
    found = write_record(
        tmp_path, make_header(2), {"log_loss": [[0.5, 1.5], [None, None]], "auc": [[0.5, None], [None, None]]}
    )
    scores = [
        {key: value for key, value in step.items() if key.startswith("mean/")} for step in collect_step_numbers(found)
    ]
    assert scores == [{"mean/log_loss": 1.0, "mean/auc": 0.5}, {}]


def test_a_federation_is_followed_up_to_its_last_tested_step(tmp_path: Path) -> None:
    found = collect_step_numbers(write_federation_record(tmp_path))
    assert [step.get("accuracy/mean") for step in found] == [0.5, pytest.approx(0.775), None]
    assert found[1]["per_client/1"] == 0.8 and "per_client/2" not in found[1]
    assert [step["federation/alarms"] for step in found] == [0, 1, 0]


def test_many_clients_have_no_curve_each_and_many_events_are_counted(tmp_path: Path) -> None:
    births = [{**BORN, "t": 0, "model": 1 + k, "cause": {"clients": [k]}} for k in range(101)]
    found = write_record(tmp_path, make_header(1, 101), None, births)
    assert set(collect_step_numbers(found)[0]) == set(STEPS[0]) - {"per_client/0", "per_client/1"}
    assert len(describe_step_events(found)[0].splitlines()) == 21 and describe_step_events(found)[0].endswith(
        "and 81 events more"
    )


def test_finished_runs_are_logged_at_once_and_never_twice(tmp_path: Path) -> None:
    write_record(tmp_path / "runs", make_header(3), COLUMNS, EVENTS)
    write_record(tmp_path / "runs" / "more", make_header(3), COLUMNS, EVENTS, steps=2)
    fake = Fake()
    for _ in range(2):
        follower = Follower(tmp_path / "runs", fake)
        sentences = list(follower.report_news())
        assert [s.split(": ")[1] for s in sentences] == [
            "interrupted after 2 time steps",
            "complete after 3 time steps",
        ]
        assert not follower.expects_news and not list(follower.report_news())
    short, whole = sorted(fake.runs, key=len, reverse=True)
    assert short == f"more/{whole}" and whole.startswith("sine-2_FedDrift_")
    assert fake.runs[whole].entries == entries(STEPS) and fake.runs[short].entries == entries(STEPS[:2])
    assert (fake.runs[whole].status, fake.runs[short].status) == ("complete", "interrupted")
    assert fake.runs[whole].seconds is not None


def test_packed_records_are_logged_once_under_the_names_of_their_plain_files(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    plain, packed = Fake(), Fake()
    records = [write_record(runs / "more", head, COLUMNS, EVENTS) for head in (make_header(3), make_header(3, seed=1))]
    files = [runs / "more" / f"{record.build_record_name(found.header)}.jsonl" for found in records]
    sentences = look(runs, plain)
    file = runs / "more" / "records.jsonl.xz"
    file.write_bytes(lzma.compress(b"".join(path.read_bytes() for path in files)))
    for path in files:
        path.unlink()
    follower = Follower(runs, packed)
    assert list(follower.report_news()) == sentences and not list(follower.report_news()) and not follower.expects_news
    assert list(packed.runs) == list(plain.runs) == [f"more/{path.stem}" for path in files]
    for name, run in packed.runs.items():
        assert run.entries == plain.runs[name].entries and run.status == "complete"
    assert look(file, packed) == [sentence.removeprefix("more/") for sentence in sentences]


def test_a_run_is_followed_while_it_is_written(tmp_path: Path) -> None:
    fake, head = Fake(), make_header(3)
    whole = write_record(tmp_path / "whole", head, COLUMNS, EVENTS)
    with RecordWriter(tmp_path / "runs", head) as writer:
        follower, name = Follower(tmp_path / "runs", fake), writer.path.stem
        assert list(follower.report_news()) == [f"{name}: following"] and follower.expects_news
        for t in range(3):
            cells = {key: values[t] for key, values in COLUMNS.items()}
            writer.write_step(make_rows(head, t, **cells), [event for event in EVENTS if event["t"] == t])
            assert list(follower.report_news()) == [] and follower.expects_news
            assert fake.runs[name].entries == entries(STEPS[: t + 1])
    assert list(follower.report_news()) == [f"{name}: complete after 3 time steps"]
    assert fake.runs[name].entries == entries(collect_step_numbers(whole)) and fake.begun == [name]
    assert fake.runs[name].events == [(2, TOLD[1]), (3, TOLD[2])]
    assert follower.expects_news  # the command may go on with another run
    with RecordWriter(tmp_path / "runs", make_header(3, seed=1)) as other:
        assert list(follower.report_news()) == [f"{other.path.stem}: following"]
        follower.close()
        assert fake.runs[other.path.stem].status == "running"
    for _ in range(3):
        list(follower.report_news())
    assert not follower.expects_news


def test_a_killed_follower_continues_where_it_stopped(tmp_path: Path) -> None:
    fake, head = Fake(), make_header(3)
    with RecordWriter(tmp_path, head) as writer:
        writer.write_step(make_rows(head, 0))
        list(Follower(tmp_path, fake).report_news())  # and no more of it
        writer.write_step(make_rows(head, 1))
        look(writer.path, fake)
        fake.runs[writer.path.stem].reported_numbers[2].pop("accuracy/worst")  # a half of what it was about to tell
        writer.write_step(make_rows(head, 2))
    look(tmp_path, fake)
    told = fake.runs[writer.path.stem].entries
    again = told.pop(next(k for k in range(len(told) - 1, 0, -1) if told[k][:2] == (2, "accuracy/worst")))
    assert again in told and sorted(told) == sorted(entries(collect_step_numbers(record.read(writer.path))))


def test_a_killed_run_resumes(tmp_path: Path) -> None:
    fake, head = Fake(), make_header(3)
    writer = RecordWriter(tmp_path, head)
    writer.write_step(make_rows(head, 0))
    writer._file.close()  # as if it had been killed
    follower = Follower(tmp_path, fake)
    assert list(follower.report_news()) == [f"{writer.path.stem}: stopped after 1 time steps"]
    assert fake.runs[writer.path.stem].status == "unfinished" and not follower.expects_news
    with RecordWriter(tmp_path, head, n_done=1) as writer:
        for t in (1, 2):
            writer.write_step(make_rows(head, t))
    assert list(follower.report_news()) == [f"{writer.path.stem}: complete after 3 time steps"]
    assert fake.runs[writer.path.stem].entries == entries(collect_step_numbers(record.read(writer.path)))


def test_a_run_that_is_started_over_is_another(tmp_path: Path) -> None:
    fake = Fake()
    follower = Follower(tmp_path, fake)
    for day in (1, 2):
        fake.runs.clear()
        found = write_record(tmp_path, make_header(2, started=f"2026-01-0{day}T00:00:00+00:00"))
        assert len(list(follower.report_news())) == 1
        (run,) = fake.runs.values()
        assert run.entries == entries(collect_step_numbers(found))


def test_a_federation_is_logged_after_training_and_after_testing(tmp_path: Path) -> None:
    fake = Fake()
    write_federation_record(tmp_path)
    part = tmp_path / "fed.jsonl.part"
    lines = part.read_text().splitlines(keepends=True)
    ends = [k + 1 for k, line in enumerate(lines) if '"test"' in line or ('"row"' in line and '"c": 1' in line)]
    for end in (*ends, len(lines)):
        part.write_text("".join(lines[:end]))
        look(tmp_path, fake)
    (name,) = fake.runs
    told: dict[int, Numbers] = {}
    for t, key, value in fake.runs[name].entries:  # a later test of the same step counts
        told.setdefault(t, {})[key] = value
    assert name == "fed" and list(told.values()) == collect_step_numbers(record.read(part))
    assert [v for t, k, v in fake.runs[name].entries if (t, k) == (2, "accuracy/mean")] == [0.5, pytest.approx(0.775)]
    assert len([k for _, k, _ in fake.runs[name].entries if k == "federation/models"]) == 3


def test_names_of_clients_are_apart_and_legal_in_every_tracker(tmp_path: Path) -> None:
    names = ["a/b", "a:b", "", "<b>", "_b_", "a_b-1"]
    (step,) = collect_step_numbers(write_record(tmp_path, make_header(1, 6, clients=names)))
    assert [key for key in step if key.startswith("per_client/")] == [
        f"per_client/{name}" for name in ("a_b", "a_b-1", "2", "_b_", "_b_-4", "a_b-1-5")
    ]


def test_tracker_failures_give_a_one_sentence_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_record(tmp_path, make_header(1))

    def broken(name: str, found: Record) -> Any:
        raise RuntimeError("Max retries exceeded with url")

    with pytest.raises(DataError, match="cannot write to the tracker: no server answers there"):
        look(tmp_path, broken)
    with pytest.raises(DataError, match="neither a folder of records nor a record"):
        look(tmp_path / "nowhere", broken)
    with pytest.raises(ConfigError, match="unknown tracker 'tensorbord', did you mean 'tensorboard'"):
        trackers.parse_tracker("tensorbord:x")
    with pytest.raises(ConfigError, match="mlflow needs a place behind a colon, such as mlflow:sqlite"):
        trackers.parse_tracker("mlflow")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for kind, package in (("mlflow", "mlflow"), ("tensorboard", "tensorboardX"), ("wandb", "wandb")):
        with pytest.raises(ConfigError, match=rf"needs the package {package}: pip install 'feddrift\[{kind}\]'"):
            trackers.parse_tracker(f"{kind}:x")


def test_tensorboard_has_the_content_of_the_record_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorboardX", reason="the extra 'tensorboard' is not installed")
    loader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="the extra 'tensorboard' is not installed"
    )
    write_record(tmp_path / "runs", make_header(3), COLUMNS, EVENTS)
    going_on = write_federation_record(tmp_path / "runs" / "fed")
    (tmp_path / "tb" / "fed").mkdir(parents=True)
    (tmp_path / "tb" / "fed" / "events.out.tfevents.1.mine").touch()  # of somebody else
    running: dict[str, Any] = {}  # a TensorBoard that has read the files before they are written anew
    for _ in range(2):
        cli.app(["follow", str(tmp_path / "runs"), f"tensorboard:{tmp_path / 'tb'}"], standalone_mode=False)
        assert "fed: stopped after 3 time steps" in capsys.readouterr().out
        for folder in (tmp_path / "tb").iterdir():
            running.setdefault(folder.name, loader.EventAccumulator(str(folder))).Reload()
            assert len(list(folder.glob("*.feddrift"))) == 1
    assert len(list((tmp_path / "tb" / "fed").iterdir())) == 2
    for name, found in running.items():
        steps = collect_step_numbers(going_on if name == "fed" else record.read(tmp_path / "runs" / f"{name}.jsonl"))
        fresh = loader.EventAccumulator(str(tmp_path / "tb" / name))
        fresh.Reload()
        for board in (found, fresh):
            assert set(board.Tags()["scalars"]) == {key for step in steps for key in step}
            for key in board.Tags()["scalars"]:
                told = [(event.step, event.value) for event in board.Scalars(key)]
                assert told == [(t, pytest.approx(step[key])) for t, step in enumerate(steps, 1) if key in step]
    (text,) = fresh.Tensors("events/text_summary")[-1].tensor_proto.string_val
    assert fresh.Tensors("events/text_summary")[-1].step == (2 if name == "fed" else 3) and b"model 1" in text
