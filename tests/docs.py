"""What the documentation shows: its blocks of code, and the commands in them and in its text.

A block is run by the tests unless a comment `<!-- not run: why -->` stands before it. If its first line is a comment
with the name of a file, such as `# mine.py`, the block is that file.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(
    r"^(?:<!-- not run: (?P<why>[^\n]+) -->\n\n?)?(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$",
    re.M | re.S,
)
COMMANDS = ("feddrift", "make", "python", "pip", "cd", ".")


@dataclass(frozen=True)
class Block:
    """A block of code in a page."""

    page: str
    line: int
    language: str
    text: str
    why: str | None  # it is not run

    @property
    def file(self) -> str | None:
        """The name of the file that it is."""
        named = re.match(r"# (\w+\.\w+)\n", self.text)
        return named and named[1]

    @property
    def commands(self) -> list[list[str]]:
        """What a shell would run, in words; nothing where the block is of another kind."""
        if self.language not in ("", "bash"):
            return []
        lines = self.text.replace("\\\n", " ").splitlines()
        if not any(line.split(" ")[0] in COMMANDS for line in lines):
            return []
        if self.why:  # perhaps more than lines of commands
            lines = [line for line in lines if line.startswith("feddrift ")]
        return [words for line in lines if (words := shlex.split(line, comments=True))]


def blocks(page: str) -> list[Block]:
    """The blocks of a page, in order."""
    text = (ROOT / page).read_text()
    return [
        Block(page, text.count("\n", 0, found.start()) + 1, found["language"], found["text"], found["why"])
        for found in FENCE.finditer(text)
    ]


def mentioned(page: str) -> Iterator[list[str]]:
    """The commands in the running text of a page; they may leave out what does not matter there."""
    text = FENCE.sub("", (ROOT / page).read_text())
    for found in re.finditer(r"`(feddrift\s[^`]+)`", text):
        yield shlex.split(found[1])


def furnish(folder: Path) -> None:
    """What a reader has: the examples, the grids, the records, and the data of the guide to one's own."""
    for name in ("examples", "experiments"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("runs", "__pycache__"))
    (folder / "results").symlink_to(ROOT / "results")
    shutil.copy(ROOT / "examples" / "own_algorithm.py", folder / "mine.py")  # as docs/extend.md says
    with chdir(folder):
        for block in blocks("docs/data.md"):
            if block.language == "python" and ".write_text(" in block.text:
                exec(compile(block.text, "docs/data.md", "exec"), {})
