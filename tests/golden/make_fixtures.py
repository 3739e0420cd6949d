"""Files as this version writes them, for later versions to read: python -m tests.golden.make_fixtures NAME

`schema-2.tar.gz` was made before class names in checkpoints lost their modules; it is never made again. Every release
adds one, `version-X.Y.Z`.
"""

from __future__ import annotations

import gzip
import io
import json
import sys
import tarfile
import tempfile
from pathlib import Path

from feddrift.exported_models import load_models
from feddrift.runs.export import export
from feddrift.runs.recorded_run import RecordedRun
from tests.golden import hashes, world

EXPORTED = ("FedDrift", "FedDrift-Trunk", "KUE")


def make(folder: Path) -> None:
    for name in hashes.KILLED:
        config = hashes.RUNS[f"simulator/{name}"]
        hashes.begun(config, folder / "runs" / f"{name}-between", 4, 0)
        hashes.begun(config, folder / "runs" / f"{name}-inside", 4, 1)
    hashes.over_flower("FedDrift", folder / "flower", stop=22)  # after the first round of time step 4
    x = world.make().x[:50]
    for name in EXPORTED:
        out = folder / "exports" / name
        with tempfile.TemporaryDirectory() as runs:
            run = RecordedRun(hashes.RUNS[f"simulator/{name}"], Path(runs))
            list(run)
            export(run, out)
        models = load_models(out)
        said = {client: models.predict(client, x).tolist() for client in "abcde"}
        (out / "expected.json").write_text(json.dumps(said) + "\n")


def pack(folder: Path, path: Path) -> None:
    """All files, without owners and times."""
    with gzip.GzipFile(path, "wb", mtime=0) as zipped, tarfile.open(fileobj=zipped, mode="w") as archive:
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                about = tarfile.TarInfo(str(file.relative_to(folder)))
                about.size = file.stat().st_size
                archive.addfile(about, io.BytesIO(file.read_bytes()))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        make(Path(made))
        pack(Path(made), Path(__file__).with_name(f"{sys.argv[1]}.tar.gz"))
