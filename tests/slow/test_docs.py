"""Every block of the documentation, run as by a reader: commands and code of a page in order, with fewer rounds."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from feddrift import cli
from feddrift.runs import sweep
from feddrift.runs.config import RunConfig
from tests.support.documentation import PAGES, ROOT, copy_reader_files, read_blocks

pytestmark = pytest.mark.slow
SHORT = {"run": ["--rounds", "2", "--steps", "2"], "sweep": ["--jobs", "1"]}
NEEDS = {  # how the name of a stream or grid begins, and the folder of data that it reads
    "mnist": "mnist", "digits-": "mnist", "fashion-": "fashion_mnist", "clothes.toml": "fashion_mnist",
    "experiments/tables-mnist": "mnist", "fmow-labels": "fashion_mnist",
    "air-quality": "five_cities_pm25", "air-beijing": "beijing_air",
    "experiments/air": "five_cities_pm25", "experiments/air.toml": "beijing_air",
    "experiments.variants:by_city": "five_cities_pm25", "experiments.variants:without_date": "five_cities_pm25",
}  # fmt: skip
read_grid = sweep.read_grid


def first_runs(path: Path, data_dir: Path | None = None) -> list[RunConfig]:
    """Two runs of a grid."""
    grid = read_grid(path, data_dir)
    return [grid[k].model_copy(update={"rounds": 1, "steps": 1}) for k in (0, len(grid) // 3)]


def list_data_folders(words: list[str]) -> list[str]:
    """The folders of data that a command reads."""
    return [folder for word in words for name, folder in NEEDS.items() if word.startswith(name)]


def has_data(words: list[str]) -> bool:
    return all(
        (Path(os.environ.get("FEDDRIFT_DATA", "/nowhere")) / folder).is_dir() for folder in list_data_folders(words)
    )


def run(words: list[str]) -> None:
    """A feddrift command in this process; one that would go on for ever is stopped at its first pause."""
    seeds = (
        ["--seeds", "0" if list_data_folders(words) else "0-1"] if "--seeds" in words else []
    )  # real data take long to read

    def pause(_: float) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["feddrift", *words, *seeds, *SHORT.get(words[0], [])])
        patch.setattr(signal, "signal", lambda *_: None)
        patch.setattr(sweep, "read_grid", first_runs)
        if "--follow" in words:
            patch.setattr("feddrift.cli.report.time.sleep", pause)
        with pytest.raises(SystemExit) as stop:
            cli.main()
    assert (stop.value.code or 0) == (130 if "--follow" in words else 0), words


@pytest.mark.parametrize("page", [p for p in PAGES if any(b.commands for b in read_blocks(p))])
def test_page(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy_reader_files(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in read_blocks(page):
        monkeypatch.chdir(tmp_path)
        if block.file:
            Path(block.file).write_text(block.text)
        if block.why:
            continue
        if "import onnxruntime" in block.text:
            pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
        if block.language == "python":
            exec(compile("\n" * block.line + block.text, page, "exec"), names)
        for words in block.commands:
            if words[0] == "cd":
                monkeypatch.chdir(words[1])
            elif words[0] == "feddrift":
                if not has_data(words):
                    pytest.skip(f"no data for: {' '.join(words)}")
                run(words[1:])
    for name in ("mytest", "memories"):
        sys.modules.pop(name, None)
    made = {path.suffix for path in tmp_path.glob("*") if path.is_file()}
    for suffix in (".html", ".png"):  # whatever a page says it writes at the top is there
        run_here = [command for block in read_blocks(page) if not block.why for command in block.commands]
        if any(word.endswith(suffix) and "/" not in word for command in run_here for word in command):
            assert suffix in made, page


def test_the_site_builds_without_a_warning_and_fetches_nothing(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="mkdocs-material is not installed: make docs")
    pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed: make docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    told = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert told.returncode == 0, told.stderr
    pages = sorted((tmp_path / "site").rglob("*.html"))
    assert len(pages) >= len(PAGES)
    for page in pages:
        fetched = re.findall(r'<(?:script|img|link|iframe)\b[^>]*\b(?:src|href)="(https?://[^"]+)"', page.read_text())
        assert fetched == [], page.name
    algorithms = (tmp_path / "site" / "algorithms.html").read_text()
    assert algorithms.count('class="beside"') == 2 and "merge_closest" in algorithms
    for link in re.findall(r"\]\(([^)]+)\)", (tmp_path / "site" / "llms.txt").read_text()):
        assert (tmp_path / "site" / link).is_file(), link
    assert "A tour of feddrift" in (tmp_path / "site" / "repository" / "examples" / "tour.ipynb.html").read_text()
    assert "repository/examples/own_algorithm.py.html" in (tmp_path / "site" / "extend.html").read_text()
