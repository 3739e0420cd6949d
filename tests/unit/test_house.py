"""Versions and public names; import-linter checks which module may import which."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path

import pytest

import feddrift
from feddrift import _moved


def test_one_version_everywhere() -> None:
    root = Path(__file__).parents[2]
    for file, line in {
        "pyproject.toml": f'version = "{feddrift.__version__}"',
        "CITATION.cff": f"version: {feddrift.__version__}",
    }.items():
        assert line in (root / file).read_text().splitlines(), file


@pytest.mark.parametrize("old", _moved.MODULES)
def test_old_import_paths_lead_on_with_a_warning(old: str) -> None:
    if "flower" in old or "deploy" in old:
        pytest.importorskip("flwr", reason="the extra 'flower' is not installed")
    found = importlib.import_module(old)
    for place in _moved.MODULES[old]:
        new = importlib.import_module(place)
        own = [name for name, value in vars(new).items() if getattr(value, "__module__", None) == place]
        name = next(name for name in own if not name.startswith("_"))
        with pytest.warns(DeprecationWarning, match=f"{old}.{name} is now {place}.{name}"):
            assert getattr(found, name) is getattr(new, name)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = found.nothing


def test_names_that_moved_out_of_a_module_are_found_with_a_warning() -> None:
    from feddrift import averaging, data, models, types

    with pytest.warns(DeprecationWarning, match=r"feddrift.types.Stream is now feddrift.data.Stream"):
        assert types.Stream is data.Stream  # type: ignore[attr-defined]
    with pytest.warns(DeprecationWarning, match="averaging.averaged"):
        assert models.averaged is averaging.averaged  # type: ignore[attr-defined]
    with warnings.catch_warnings(), pytest.raises(ImportError, match="cannot import name 'Nothing'"):
        from feddrift.types import Nothing  # type: ignore[attr-defined]  # noqa: F401


def test_the_app_of_an_older_deployment_is_found() -> None:
    """Its file holds the old path."""
    pytest.importorskip("flwr", reason="the extra 'flower' is not installed")
    from feddrift.deploy import server

    with pytest.warns(DeprecationWarning, match=r"feddrift.deploy.server.app"):
        from feddrift.engines.flower.server import app  # type: ignore[import-not-found]
    assert app is server.app
