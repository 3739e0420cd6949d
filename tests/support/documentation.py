"""Code blocks of the documentation, and the commands in them and in its text.

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

ROOT = Path(__file__).parents[2]
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
        """The name of the file that the block contains, if any."""
        named = re.match(r"# (\w+\.\w+)\n", self.text)
        return named and named[1]

    @property
    def commands(self) -> list[list[str]]:
        """The commands of the block as lists of words; empty if it is not shell code."""
        if self.language not in ("", "bash"):
            return []
        lines = self.text.replace("\\\n", " ").splitlines()
        if not any(line.split(" ")[0] in COMMANDS for line in lines):
            return []
        if self.why:  # perhaps more than lines of commands
            lines = [line for line in lines if line.startswith("feddrift ")]
        return [words for line in lines if (words := shlex.split(line, comments=True))]


def read_blocks(page: str) -> list[Block]:
    """Return the blocks of a page, in order."""
    text = (ROOT / page).read_text()
    return [
        Block(page, text.count("\n", 0, found.start()) + 1, found["language"], found["text"], found["why"])
        for found in FENCE.finditer(text)
    ]


def list_mentioned_commands(page: str) -> Iterator[list[str]]:
    """Yield the commands in the running text of a page, which may omit options."""
    text = FENCE.sub("", (ROOT / page).read_text())
    for found in re.finditer(r"`(feddrift\s[^`]+)`", text):
        yield shlex.split(found[1])


def copy_reader_files(folder: Path) -> None:
    """Copy the files of a reader: examples, grids, records, and the data of docs/data.md."""
    for name in ("examples", "experiments"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("runs", "__pycache__"))
    (folder / "results").symlink_to(ROOT / "results")
    shutil.copy(ROOT / "examples" / "own_algorithm.py", folder / "mine.py")  # as docs/extend.md says
    with chdir(folder):
        for block in read_blocks("docs/data.md"):
            if block.language == "python" and ".write_text(" in block.text:
                exec(compile(block.text, "docs/data.md", "exec"), {})
