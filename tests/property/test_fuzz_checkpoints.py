"""Damaged checkpoints and exports: never accepted as complete, and with a valid checksum refused in one sentence."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load, save

from feddrift import rng
from feddrift._internal import checkpoint
from feddrift.exported_models import ABOUT_FILE, MODELS_FILE, load_models
from feddrift.runs.config import RunConfig
from feddrift.runs.export import export
from feddrift.runs.recorded_run import RecordedRun, load_stopped_run
from feddrift.types import State
from tests.support.fuzzing import (
    LONG_SEARCH,
    ODD_VALUES,
    call_or_refuse,
    json_values,
    limit_examples,
    list_paths,
    mutations,
    replace_at_path,
)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    """A run that was stopped inside its second time step."""
    root = tmp_path_factory.mktemp("stopped")
    (root / "pattern.txt").write_text("0 0\n0 1\n1 1\n")
    config = RunConfig.from_values(
        stream="sine-2", algorithm="FedDrift", rounds=2, steps=1, pattern=str(root / "pattern.txt"), engine="reference"
    )
    steps = iter(RecordedRun(config, root / "runs", every=1))
    next(steps)
    steps.close()  # type: ignore[attr-defined]
    return RecordedRun(config, root / "runs", resume=True)


@pytest.fixture(scope="module")
def wholes(stopped: RecordedRun) -> list[bytes]:
    """After a time step, and inside one."""
    files = sorted(stopped.checkpoints.path.glob("*.ckpt"))
    assert len(files) == 2 and call_or_refuse(lambda: checkpoint.read(files[0])) is not None
    return [path.read_bytes() for path in files]


def forge_checkpoint(payload: bytes) -> bytes:
    first = {"feddrift": "checkpoint", "schema": checkpoint.SCHEMA, "sha256": hashlib.sha256(payload).hexdigest()}
    return json.dumps(first).encode() + b"\n" + payload


def tree_of(whole: bytes) -> Any:
    payload = whole.partition(b"\n")[2]
    return json.loads(json.loads(payload[8 : 8 + int.from_bytes(payload[:8], "little")])["__metadata__"]["tree"])


def with_tree(whole: bytes, tree: Any) -> bytes:
    return forge_checkpoint(save(load(whole.partition(b"\n")[2]), {"tree": json.dumps(tree)}))


def check(stopped: RecordedRun, path: Path, content: bytes) -> checkpoint.Checkpoint | None:
    """Read it and begin with it, as a run that goes on does."""
    path.write_bytes(content)
    found = call_or_refuse(lambda: checkpoint.read(path))
    if found is not None:
        like = stopped.net.init(rng.derive_key(0, "init", 0))
        call_or_refuse(lambda: found.decode(like))
        start = call_or_refuse(lambda: stopped._read_resume_point(found))
        if start is not None:
            assert start.steps_done in (0, 1) and start.seconds >= 0 and stopped.checkpoint_every >= 0
            assert isinstance(start.state, State) or (start.state is None and not start.steps_done)
    return found


@limit_examples(200)
@given(data=st.data())
def test_accidents(stopped: RecordedRun, wholes: list[bytes], tmp_path: Path, data: st.DataObject) -> None:
    whole = data.draw(st.sampled_from(wholes))
    found = check(stopped, tmp_path / "a.ckpt", data.draw(mutations(whole)))
    if found is not None:  # nothing but its first line has changed, and that says the same
        assert found.path.read_bytes().partition(b"\n")[2] == whole.partition(b"\n")[2]


def test_cut_anywhere(wholes: list[bytes], tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    for whole in wholes:
        for end in range(0, len(whole), 1 if LONG_SEARCH else 13):
            path.write_bytes(whole[:end])
            assert call_or_refuse(lambda: checkpoint.read(path)) is None


@limit_examples(100)
@given(st.binary(max_size=80))
def test_bytes_at_random(stopped: RecordedRun, tmp_path: Path, content: bytes) -> None:
    assert check(stopped, tmp_path / "a.ckpt", content) is None
    check(stopped, tmp_path / "a.ckpt", forge_checkpoint(content))


@limit_examples(100)
@given(data=st.data())
def test_accidents_before_the_checksum(
    stopped: RecordedRun, wholes: list[bytes], tmp_path: Path, data: st.DataObject
) -> None:
    payload = data.draw(st.sampled_from(wholes)).partition(b"\n")[2]
    check(stopped, tmp_path / "a.ckpt", forge_checkpoint(data.draw(mutations(payload))))


@limit_examples(60)
@given(data=st.data())
def test_values_replaced(stopped: RecordedRun, wholes: list[bytes], tmp_path: Path, data: st.DataObject) -> None:
    whole = data.draw(st.sampled_from(wholes))
    tree = tree_of(whole)
    for _ in range(data.draw(st.integers(1, 2))):
        tree = replace_at_path(tree, data.draw(st.sampled_from(list_paths(tree))), data.draw(json_values))
    check(stopped, tmp_path / "a.ckpt", with_tree(whole, tree))


def test_every_value_in_turn(stopped: RecordedRun, wholes: list[bytes], tmp_path: Path) -> None:
    for whole in wholes if LONG_SEARCH else wholes[:1]:
        tree = tree_of(whole)
        for k, path in enumerate(list_paths(tree)):
            for value in ODD_VALUES if LONG_SEARCH else ODD_VALUES[k % 13 :: 13]:
                check(stopped, tmp_path / "a.ckpt", with_tree(whole, replace_at_path(tree, path, value)))


@limit_examples(5, long=32)
@given(data=st.data())
def test_runs_to_resume(stopped: RecordedRun, wholes: list[bytes], tmp_path: Path, data: st.DataObject) -> None:
    """A folder of runs whose checkpoints say something else about the run."""
    tree = tree_of(wholes[0])
    inner = [path for path in list_paths(tree["about"]) if path]
    about = replace_at_path(
        tree["about"], data.draw(st.sampled_from(inner)), data.draw(st.sampled_from(ODD_VALUES) | json_values)
    )
    out = tmp_path / "runs"
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(stopped.out, out)
    (state,) = out.glob("*.state")
    for path in state.glob("*.ckpt"):
        path.write_bytes(with_tree(wholes[0], {**tree, "about": about}))
    run = call_or_refuse(lambda: load_stopped_run(state))
    if run is not None and run.stream.n_steps == 2 and run.local.rounds <= 2:  # still small
        call_or_refuse(lambda: [step.tau for step in run])


@pytest.fixture(scope="module")
def exported(stopped: RecordedRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    assert export(stopped, folder) == 1
    return folder


@limit_examples(120)
@given(name=st.sampled_from([ABOUT_FILE, MODELS_FILE]), data=st.data())
def test_exported_models(exported: Path, tmp_path: Path, name: str, data: st.DataObject) -> None:
    shutil.copytree(exported, tmp_path, dirs_exist_ok=True)
    content = (exported / name).read_bytes()
    if name == ABOUT_FILE and data.draw(st.booleans()):
        about = json.loads(content)
        path = data.draw(st.sampled_from(list_paths(about)))
        content = json.dumps(
            replace_at_path(about, path, data.draw(st.sampled_from(ODD_VALUES) | json_values))
        ).encode()
    else:
        content = data.draw(mutations(content))
    (tmp_path / name).write_bytes(content)
    check_models(tmp_path)


def test_every_word_about_exported_models(exported: Path, tmp_path: Path) -> None:
    shutil.copytree(exported, tmp_path, dirs_exist_ok=True)
    about = json.loads((exported / ABOUT_FILE).read_text())
    for k, path in enumerate(list_paths(about)):
        for value in ODD_VALUES if LONG_SEARCH else ODD_VALUES[k % 3 :: 3]:
            (tmp_path / ABOUT_FILE).write_text(json.dumps(replace_at_path(about, path, value)))
            check_models(tmp_path)


def check_models(folder: Path) -> None:
    """Models that are accepted can predict."""
    models = call_or_refuse(lambda: load_models(folder))
    if models is not None:
        call_or_refuse(lambda: models.choose(np.zeros((3, 2), dtype=np.float32)))
        for client in models.about["clients"]:
            found = call_or_refuse(lambda client=client: models.predict(client, np.zeros((3, 2), dtype=np.float32)))  # type: ignore[misc]
            assert found is None or (found.shape == (3,) and set(found.tolist()) <= set(models.about["classes"]))
