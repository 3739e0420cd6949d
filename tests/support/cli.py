"""Commands of feddrift, run inside the process of a test."""

from __future__ import annotations

import signal
import sys

import pytest
from typer.testing import CliRunner

from feddrift import cli
from feddrift.cli import app

QUICK_OPTIONS = ["--rounds", "1", "--steps", "2", "--pattern", "random:every=1,concepts=2,clients=3,steps=3"]


def run_feddrift(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    """Run a command and return its exit code, standard output and standard error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["feddrift", *args])
        patch.setattr(signal, "signal", lambda *_: None)
        patch.setattr(cli, "has_running_thread", lambda: False)  # else the command would exit without waiting
        with pytest.raises(SystemExit) as stop:
            cli.main()
    result = capsys.readouterr()
    return int(stop.value.code or 0), result.out, result.err


SWEEP_GRID = """
[[runs]]
stream = "sine-2"
algorithm = ["FedDrift", "Oblivious"]
seeds = "0-1"
rounds = 1
steps = 2
pattern = "random:every=1,concepts=2,clients=3,steps=3"
settings = {delta = [0.1, 0.2]}

[[runs]]
stream = ["sine-2", "circle-2"]
algorithm = "Oblivious"
rounds = 1
steps = 2
pattern = "random:every=1,concepts=2,clients=3,steps=3"
"""


def run_and_get_output(*words: str) -> str:
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    return result.output
