"""The shape of the code: who may import whom, and which names are public."""

from __future__ import annotations

import ast
from pathlib import Path

import feddrift

SOURCE = Path(feddrift.__file__).parent
PURE = {"numpy", "feddrift.types", "feddrift.models", "feddrift.weights", "feddrift.cluster", "feddrift.rng",
        "feddrift.errors", "feddrift.detect", "feddrift.algorithms.options"}  # fmt: skip
STANDARD = {"__future__", "collections.abc", "dataclasses", "typing", "logging", "math"}


def imports(path: Path) -> set[str]:
    """Every module that a file imports, names from `feddrift` itself resolved."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.module == "feddrift":
                found |= {f"feddrift.{alias.name}" for alias in node.names}
            else:
                found.add(node.module or "")
    return found


def test_algorithms_import_numpy_and_pure_modules_only() -> None:
    files = [p for p in (SOURCE / "algorithms").glob("*.py") if p.name not in ("__init__.py", "options.py")]
    assert len(files) >= 3
    siblings = {f"feddrift.algorithms.{path.stem}" for path in files}
    for path in files:
        assert imports(path) <= PURE | STANDARD | siblings, path.name


def test_the_pure_core_knows_no_engine() -> None:
    for name in ("types", "models", "weights", "cluster", "detect", "rng", "sampling"):
        assert not {i for i in imports(SOURCE / f"{name}.py") if i.startswith(("jax", "feddrift.engines"))}, name


def test_public_names() -> None:
    assert sorted(feddrift.__all__) == [
        "ConfigError", "DataError", "Event", "FeddriftError", "Local", "Models", "Net", "State", "Step", "Stream",
        "algorithm", "load", "mlp", "run", "stream",
    ]  # fmt: skip
    assert all(getattr(feddrift, name).__doc__ for name in feddrift.__all__)


def test_one_version_everywhere() -> None:
    root = Path(__file__).parents[2]
    for file, line in {
        "pyproject.toml": f'version = "{feddrift.__version__}"',
        "CITATION.cff": f"version: {feddrift.__version__}",
    }.items():
        assert line in (root / file).read_text().splitlines(), file
