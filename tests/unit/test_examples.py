"""What the documentation shows, runs."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.stem))
def test_example_runs_and_is_short(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(path.read_text().splitlines()) < 60
    runpy.run_path(str(path), run_name="__main__")
    told = capsys.readouterr().out
    assert {"own_algorithm": "FedDrift 8", "own_data_and_net": "created model 1"}[path.stem] in told


def test_the_readme_snippet_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    exec(compile(snippet, "README.md", "exec"), {})
    told = capsys.readouterr().out
    assert "created 1" in told and len(re.findall(r"^\d ", told, re.M)) == 10
