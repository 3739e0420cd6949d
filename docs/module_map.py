"""Write the map of modules in docs/design.md from their docstrings: `python docs/module_map.py`."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "design.md"
SOURCES = ROOT / "src" / "feddrift"
BEGIN = "<!-- map: written by docs/module_map.py -->\n"
END = "<!-- end of map -->"


def read_summary(path: Path) -> str:
    """Return the first sentence of a module's docstring, as it stands on its first line."""
    summary = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n\n")[0]
    return " ".join(summary.split())


def write_tables(package: Path = SOURCES) -> str:
    """Return a Markdown section for a package and for each package in it."""
    name = ".".join(package.relative_to(SOURCES.parent).parts)
    modules = [path for path in sorted(package.glob("*.py")) if path.name != "__init__.py"]
    rows = [f"| `{path.stem}` | {read_summary(path)} |" for path in modules if read_summary(path)]
    section = f"### {name}\n\n{read_summary(package / '__init__.py')}\n"
    if rows:
        section += "\n| module | content |\n| --- | --- |\n" + "\n".join(rows) + "\n"
    packages = sorted(path.parent for path in package.glob("*/__init__.py"))
    return "\n".join([section, *map(write_tables, packages)])


def update_page(page: str) -> str:
    """Return the page with its map replaced by the present one."""
    return re.sub(
        f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: f"{BEGIN}\n{write_tables()}\n{END}", page, flags=re.S
    )


if __name__ == "__main__":
    PAGE.write_text(update_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
