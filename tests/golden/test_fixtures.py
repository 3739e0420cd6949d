"""What older versions left on disk is read: runs and federations go on to the same bits, exports predict the same."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from feddrift.exported import load_models
from feddrift.runs.recorded import from_checkpoints
from tests.golden import hashes, world
from tests.golden.test_hashes import same_machine

OLD = ("schema-2", "version-0.2.0")
LATER = ("FedDrift-Auto", "FLUX")  # what these versions did not have
INSIDE = [f"{name}-{where}" for name in hashes.KILLED if name not in LATER for where in ("between", "inside")]


@pytest.fixture(params=OLD)
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    with tarfile.open(Path(__file__).with_name(f"{request.param}.tar.gz")) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


@pytest.mark.parametrize("case", INSIDE)
def test_a_run_that_an_older_version_began_goes_on(old: Path, case: str) -> None:
    (state,) = (old / "runs" / case).glob("*.state")
    newest, name = hashes.newest(state), case.rpartition("-")[0]
    assert newest.about["steps"] == 4 and (newest.about["rounds"] > 0) == case.endswith("inside")
    run = from_checkpoints(state)
    steps = list(run)
    assert [step.tau for step in steps] == [4, 5, 6]
    if same_machine():
        found = {"record": hashes.of_record(run.path), "state": hashes.of_state(steps[-1].state)}
        assert found == hashes.expected()["cases"][f"simulator/{name}"]


def test_a_federation_that_an_older_version_began_goes_on(old: Path) -> None:
    """The server's checkpoint lies inside a time step, and every client's store beside it."""
    pytest.importorskip("flwr", reason="the extra 'flower' is not installed")
    newest = hashes.newest(old / "flower" / "server" / "checkpoints")
    assert (newest.about["steps"], newest.about["rounds"]) == (4, 1)
    found = hashes.over_flower("FedDrift", old / "flower")
    if same_machine():
        assert found["state"] == hashes.expected()["cases"]["flower/FedDrift"]["state"]


@pytest.mark.parametrize("name", ["FedDrift", "FedDrift-Trunk", "KUE"])
def test_models_that_an_older_version_exported_predict_as_they_did(old: Path, name: str) -> None:
    models = load_models(old / "exports" / name)
    said = json.loads((old / "exports" / name / "expected.json").read_text())
    assert len(said) == 5
    for client, predicted in said.items():
        assert models.predict(client, world.make().x[:50]).tolist() == predicted
