"""Print the lowest versions of the direct dependencies that pyproject.toml allows, as constraints for pip.

Usage: `python -m tests.lowest > /tmp/lowest.txt`, then in a new environment
`pip install -c /tmp/lowest.txt -e . pytest pytest-xdist hypothesis`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def pin_lowest(requirements: Iterable[str]) -> list[str]:
    """Turn requirements with lower bounds into pins of these bounds.

    Raises:
        ValueError: A requirement has no lower bound.

    >>> pin_lowest(["numpy>=2.0", "jax[cuda12]>=0.5,<1"])
    ['numpy==2.0', 'jax==0.5']
    """
    pins = []
    for requirement in requirements:
        match = re.fullmatch(r"([\w.-]+)(?:\[.*\])?>=([\w.]+)(?:,.*)?", requirement)
        if match is None:
            raise ValueError(f"{requirement!r} must have a lower bound, such as numpy>=2.0")
        pins.append(f"{match[1]}=={match[2]}")
    return pins


def main() -> None:
    """Print one pin per line."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    print("\n".join(pin_lowest(project["dependencies"])))


if __name__ == "__main__":
    main()
