"""Versions and public names; import-linter checks which module may import which."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import feddrift
from feddrift import _renamed


def test_one_version_everywhere() -> None:
    root = Path(__file__).parents[2]
    for file, line in {
        "pyproject.toml": f'version = "{feddrift.__version__}"',
        "CITATION.cff": f"version: {feddrift.__version__}",
    }.items():
        assert line in (root / file).read_text().splitlines(), file


@pytest.mark.parametrize(("old", "new"), _renamed.MODULES.items())
def test_an_import_path_of_version_0_3_works_with_a_warning(old: str, new: str) -> None:
    if "flower" in old:
        pytest.importorskip("flwr", reason="the extra 'flower' is not installed")
    found, target = importlib.import_module(old), importlib.import_module(new)
    own = [name for name, value in vars(target).items() if getattr(value, "__module__", None) == new]
    name = next(name for name in own if not name.startswith("_"))
    with pytest.warns(DeprecationWarning, match=f"{old}.{name} is now {new}.{name}"):
        assert getattr(found, name) is getattr(target, name)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = found.nothing


def test_names_of_modules_that_are_packages_now_are_found_with_a_warning() -> None:
    from feddrift.algorithms.auto.method import FedDriftAuto
    from feddrift.algorithms.feddrift.method import FedDrift

    with pytest.warns(DeprecationWarning, match="feddrift.algorithms.feddrift.method.FedDrift"):
        from feddrift.algorithms.feddrift import FedDrift as old_feddrift
    with pytest.warns(DeprecationWarning, match="feddrift.algorithms.auto.method.FedDriftAuto"):
        from feddrift.algorithms.auto import FedDriftAuto as old_auto
    assert (old_feddrift, old_auto) == (FedDrift, FedDriftAuto)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("feddrift.engines.worker.Known", "feddrift.engines.worker.FederationInfo"),
        ("feddrift.engines.worker.in_turn", "feddrift.engines.worker.run_rounds_sequentially"),
        ("feddrift.simulation.steps_on", "feddrift.simulation.run_steps"),
        ("feddrift.run.with_newcomers", "feddrift.simulation.add_newcomers"),
        ("feddrift.engines.in_process.InProcessWorker", "feddrift.engines.local.engine.InProcessWorker"),
    ],
)
def test_a_renamed_documented_name_is_found_with_a_warning(old: str, new: str) -> None:
    (module, name), (target, current) = old.rsplit(".", 1), new.rsplit(".", 1)
    with pytest.warns(DeprecationWarning, match=f"{old} is now {new}"):
        found = getattr(importlib.import_module(module), name)
    assert found is getattr(importlib.import_module(target), current)


def test_every_renamed_name_exists() -> None:
    for old, new in _renamed.NAMES.items():
        module, _, name = (new if "." in new else f"{old.rpartition('.')[0]}.{new}").rpartition(".")
        assert hasattr(importlib.import_module(module), name), old


def test_the_app_of_an_older_deployment_is_found() -> None:
    """Its file imports the app from the package."""
    pytest.importorskip("flwr", reason="the extra 'flower' is not installed")
    from feddrift.deploy.server import app, loop

    assert app is loop.app
