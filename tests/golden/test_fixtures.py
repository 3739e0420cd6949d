"""Files of older versions: runs and federations continue, and exported models predict as before."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from feddrift.exported_models import load_models
from feddrift.runs.recorded_run import load_stopped_run
from tests.golden import hashes, world

# These versions computed other bits, so their runs end with other models than those of the list.
BEFORE_SAME_BITS = ("schema-2", "version-0.2.0")
VERSIONS = (*BEFORE_SAME_BITS, "version-0.3.0")
# Results of continued runs, whose records also contain sentences of the older version.
# `python -m tests.golden.test_fixtures` writes the file.
CONTINUED = Path(__file__).with_name("continued.json")
LATER = ("FedDrift-Auto", "FLUX")  # methods that these versions did not have
CASES = [
    (version, f"{name}-{where}")
    for version in VERSIONS
    for name in hashes.KILLED
    if not (version in BEFORE_SAME_BITS and name in LATER)
    for where in ("between", "inside")
]


def unpack(version: str, folder: Path) -> Path:
    with tarfile.open(Path(__file__).with_name(f"{version}.tar.gz")) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def continue_run(folder: Path, case: str) -> dict[str, Any]:
    (state,) = (folder / "runs" / case).glob("*.state")
    newest = hashes.newest(state)
    assert newest.about["steps"] == 4 and (newest.about["rounds"] > 0) == case.endswith("inside")
    run = load_stopped_run(state)
    steps = list(run)
    assert [step.tau for step in steps] == [4, 5, 6]
    return {"record": hashes.digest(hashes.read_record(run.path)), "state": hashes.of_state(steps[-1].state)}


def continue_federation(folder: Path) -> dict[str, Any]:
    """Continue a server whose checkpoint is inside a time step, with the stores of all its clients."""
    newest = hashes.newest(folder / "flower" / "server" / "checkpoints")
    assert (newest.about["steps"], newest.about["rounds"]) == (4, 1)
    return hashes.over_flower("FedDrift", folder / "flower")


@pytest.mark.parametrize(("version", "case"), CASES)
def test_a_run_that_an_older_version_began_continues(version: str, case: str, tmp_path: Path) -> None:
    found = continue_run(unpack(version, tmp_path), case)
    assert found == json.loads(CONTINUED.read_text())[f"{version}/{case}"]
    if version not in BEFORE_SAME_BITS:
        assert found["state"] == hashes.expected()[f"simulator/{case.rpartition('-')[0]}"]["state"]


def test_a_federation_that_an_older_version_began_continues(version: str, tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="the extra 'flower' is not installed")
    found = continue_federation(unpack(version, tmp_path))
    if version in BEFORE_SAME_BITS:
        assert found == json.loads(CONTINUED.read_text())[f"{version}/flower"]
    else:
        assert found["state"] == hashes.expected()["flower/FedDrift"]["state"]


@pytest.mark.parametrize("name", ["FedDrift", "FedDrift-Trunk", "KUE"])
def test_models_that_an_older_version_exported_predict_as_they_did(version: str, name: str, tmp_path: Path) -> None:
    folder = unpack(version, tmp_path) / "exports" / name
    models = load_models(folder)
    predictions = json.loads((folder / "expected.json").read_text())
    assert len(predictions) == 5
    for client, predicted in predictions.items():
        assert models.predict(client, world.make().x[:50]).tolist() == predicted


def write_continued(folder: Path) -> None:
    """Write the results of continued runs and federations of older versions."""
    found = {}
    for version, case in CASES:
        found[f"{version}/{case}"] = continue_run(unpack(version, folder / version / case), case)
    for version in BEFORE_SAME_BITS:
        found[f"{version}/flower"] = continue_federation(unpack(version, folder / version / "flower"))
    CONTINUED.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as made:
        write_continued(Path(made))
