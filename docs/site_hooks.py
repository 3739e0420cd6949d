"""Hooks that add to the site the files outside docs/ that pages link to, source code, and pages as Markdown.

Links are written as GitHub understands them (`../examples/own_net.py`). On the site such a file is a page below
`repository/`. The comment `<!-- code: src/feddrift/clustering.py compute_distances -->` becomes the source of that
function.
"""

from __future__ import annotations

import ast
import json
import posixpath
import re
import shutil
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?(?=\))")
CODE = re.compile(r"<!-- code: (\S+) (\S+) -->")
OUTSIDE = "repository/"


def on_config(config: Any) -> Any:
    """List the decisions, and let Markdown know the doctests of docstrings, which it would take for quotations."""
    from markdown.extensions import Extension
    from markdown.preprocessors import Preprocessor

    class Doctests(Preprocessor):
        def run(self, lines: list[str]) -> list[str]:
            return fenced(lines)

    class WithDoctests(Extension):
        def extendMarkdown(self, md: Any) -> None:
            md.preprocessors.register(Doctests(md), "doctests", 40)  # before code in fences is taken out

    config.markdown_extensions.append(WithDoctests())
    decisions = sorted(f"decisions/{path.name}" for path in (ROOT / "docs" / "decisions").glob("*.md"))
    (explanation,) = (part["Explanation"] for part in config.nav if "Explanation" in part)
    explanation.append({"Decisions": decisions})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add a page for each file outside docs/ that a page links to, and for those that these link to."""
    from mkdocs.structure.files import File

    waiting = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    done = set(waiting)
    while waiting:
        for target in linked(waiting.pop()):
            if target in done or target.startswith("docs/") or not (ROOT / target).is_file():
                continue
            done.add(target)
            waiting += [target] if target.endswith(".md") else []
            files.append(File.generated(config, site_path(target), content=as_page(target)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links and code of a page as the site needs them."""
    uri = page.file.src_uri
    where = uri.removeprefix(OUTSIDE) if uri.startswith(OUTSIDE) else f"docs/{uri}"

    def relinked(match: re.Match[str]) -> str:
        target = resolved(where, match[1])
        if not (ROOT / target).exists():
            return match[0]  # as it is, for MkDocs to complain about
        return posixpath.relpath(site_path(target), posixpath.dirname(uri)) + (match[2] or "")

    def source(match: re.Match[str]) -> str:
        return f"```python\n{code(match[1], match[2])}\n```"

    return CODE.sub(source, LINK.sub(relinked, markdown))


def on_post_build(config: Any) -> None:
    """Publish the pages as Markdown, too: llms.txt links to them."""
    for path in (ROOT / "docs").glob("*.md"):
        shutil.copy(path, Path(config.site_dir) / path.name)


def fenced(lines: list[str]) -> list[str]:
    """Text in which every doctest is a block of code.

    >>> fenced(["A sum:", "", ">>> 1 + 1", "2", ""])
    ['A sum:', '', '```pycon', '>>> 1 + 1', '2', '```', '']
    """
    told, inside, fence = [], False, False
    for line in [*lines, ""]:
        fence ^= line.lstrip().startswith("```")
        if line.startswith(">>> ") and not inside and not fence:
            told.append("```pycon")
            inside = True
        elif inside and not line.strip():
            told.append("```")
            inside = False
        told.append(line)
    return told[:-1]


def linked(path: str) -> list[str]:
    """What a file of the repository links to, from the repository's root."""
    return [resolved(path, match[1]) for match in LINK.finditer((ROOT / path).read_text())]


def resolved(path: str, link: str) -> str:
    """A link of this file, from the repository's root."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link))


def site_path(target: str) -> str:
    """Where a file of the repository is on the site."""
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    return OUTSIDE + (target if target.endswith(".md") else f"{target}.md")


def as_page(path: str) -> str:
    """A file as Markdown: its text, or its code under its name, which a search for words leaves out."""
    text = (ROOT / path).read_text()
    if path.endswith(".md"):
        return text
    if path.endswith(".ipynb"):
        return notebook_as_page(text)
    language = Path(path).suffix[1:].replace("py", "python")
    return f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n```{language}\n{text}```\n"


def notebook_as_page(text: str) -> str:
    """Return the cells of a notebook as Markdown: text as it is, code in fences.

    >>> notebook_as_page('{"cells": [{"cell_type": "code", "source": ["1 +", " 1"]}]}')
    '```python\\n1 + 1\\n```\\n'
    """
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(f"```python\n{source}\n```\n" if cell["cell_type"] == "code" else f"{source}\n")
    return "\n".join(parts)


def code(path: str, name: str) -> str:
    """The source of a function, class or method of a file.

    >>> code("src/feddrift/clustering.py", "detect_rise").splitlines()[0]
    'def detect_rise(lowest: Floats, reference: Floats, delta: float) -> Bools:'
    """
    text = (ROOT / path).read_text()
    found: Any = ast.parse(text)
    for part in name.split("."):
        found = next(node for node in found.body if getattr(node, "name", None) == part)
    return textwrap.dedent(ast.get_source_segment(text, found, padded=True) or "")
