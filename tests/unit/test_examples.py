"""The examples run."""

from __future__ import annotations

import json
import re
import runpy
import signal
from pathlib import Path
from typing import Any

import pytest

from feddrift.cli import app
from feddrift.runs import record

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize(  # XLA compiles own_net for each number of lanes; its command below has fewer
    "path",
    [pytest.param(path, marks=pytest.mark.slow) if path.stem == "own_net" else path for path in EXAMPLES],
    ids=lambda path: str(path.stem),
)
def test_example_runs_and_is_short(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(path.read_text().splitlines()) < (125 if path.stem == "own_engine" else 60)
    if path.stem == "own_net":
        pytest.importorskip("flax", reason="flax is not installed")
    if path.stem == "own_model":
        pytest.importorskip("flwr", reason="the extra 'flower' is not installed")
        pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    runpy.run_path(str(path), run_name="__main__")
    told = capsys.readouterr().out
    expected = {"own_algorithm": "FedDrift 8", "own_stream": "created model 1", "own_net": "created model 1"}
    expected |= {"own_model": "models [0 1]", "own_engine": "models [1 1 1 1 1 1 1 1 1 1]"}
    assert {**expected, "tour": "alarms (time, client): [[3, 1], [3, 7]"}[path.stem] in told


def test_the_notebook_has_the_cells_of_the_tour_and_they_run(capsys: pytest.CaptureFixture[str]) -> None:
    cells = json.loads((ROOT / "examples" / "tour.ipynb").read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells), "outputs are not stored"
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    tour = re.split(r"^# %% .*\n", (ROOT / "examples" / "tour.py").read_text(), flags=re.M)[1:]
    assert [source.removesuffix("\nfigure") for source in code] == [cell.strip("\n") for cell in tour]
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, source in enumerate(code):
        exec(compile(source, f"tour.ipynb, code cell {number}", "exec"), names)
    printed = capsys.readouterr().out
    assert "alarms (time, client): [[3, 1], [3, 7]" in printed and "points over Oblivious" in printed
    assert names["figure"].axes and re.search(r"client 7: 9\d\.\d % correct", printed)


COMMANDS = [path for path in EXAMPLES if path.stem not in ("tour", "own_model")]
FEWER = {
    "own_net": ["--pattern", "random:every=1,concepts=2,clients=3,steps=2"]
}  # it compiles for each number of lanes


@pytest.mark.slow
@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: str(path.stem))
def test_its_command_runs_in_its_folder(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line of its docstring, as people type it beside the file."""
    (command,) = re.findall(r"On the command line: feddrift (.*)", path.read_text())
    if path.stem == "own_net":
        pytest.importorskip("flax", reason="flax is not installed")
    monkeypatch.chdir(path.parent)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    args = [*command.split(), "--out", str(tmp_path), "--rounds", "1", "--steps", "1", *FEWER.get(path.stem, [])]
    assert not app(args, standalone_mode=False)
    (found,) = record.read_all(tmp_path)
    assert f"{path.stem}:" in json.dumps(found.header)
