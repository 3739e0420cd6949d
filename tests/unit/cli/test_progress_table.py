"""The progress table of a run in a terminal."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

import feddrift as fd
from feddrift import cli
from feddrift.cli import console
from feddrift.cli.live import ProgressTable
from feddrift.types import Local


def render(board: ProgressTable) -> str:
    out = io.StringIO()
    Console(file=out, width=100).print(board)
    return out.getvalue()


def test_the_board_counts_models_alarms_and_merges() -> None:
    stream = fd.stream("sine-2")
    board = ProgressTable(2)
    assert "run" in render(board)  # before anything runs
    board.add_run("FedDrift seed 2", stream.n_steps)
    steps = list(fd.run(stream, fd.algorithm("FedDrift", stream), local=Local(rounds=10), seed=2))
    for step in steps[:5]:
        board.add_step(step, f"  time {step.tau + 1}  ")
    (run,) = board.runs
    assert (run.models, run.alarms, run.merges, len(run.accuracy)) == (2, 2, 1, 5)  # as in tests/golden
    told = render(board)
    assert "FedDrift seed 2" in told and "5/10" in told and "time 5" in told and "run 1 of 2, about" in told


def test_a_terminal_has_the_table_and_a_pipe_has_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = ["feddrift", "run", "--stream", "sine-2", "--algorithm", "Oblivious", "--rounds", "1", "--steps", "1"]
    told = {}
    for terminal in (True, False):
        out = Console(file=io.StringIO(), force_terminal=terminal, width=100)
        monkeypatch.setattr(console, "out", out)
        monkeypatch.setattr(sys, "argv", [*args, "--out", str(tmp_path)])
        monkeypatch.setattr("signal.signal", lambda *_: None)
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert not stop.value.code
        assert isinstance(out.file, io.StringIO)
        told[terminal] = out.file.getvalue()
    assert "10/10" in told[True] and "alarms" in told[True] and "  time   1" not in told[True]
    assert "10/10" not in told[False] and told[False].count("  time ") == 10
