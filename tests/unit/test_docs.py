"""The documentation: its code runs, and its commands exist."""

from __future__ import annotations

import doctest
import importlib.util
import re
import signal
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

from feddrift import algorithms, cli, streams
from feddrift._internal import plugins
from feddrift.cli import console
from feddrift.data import Stream
from feddrift.runs import sweep
from feddrift.runs.config import RunConfig, parse_seeds
from feddrift.testing import check_algorithm
from tests.support.documentation import (
    COMMANDS,
    PAGES,
    ROOT,
    Block,
    copy_reader_files,
    list_mentioned_commands,
    read_blocks,
)

COMMAND = typer.main.get_command(cli.app)
SPEC = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs" / "site_hooks.py")
assert SPEC and SPEC.loader
HOOKS: Any = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(HOOKS)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to work in, with what a reader has; modules found in it are forgotten afterwards."""
    copy_reader_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def write_files(page: str, folder: Path) -> None:
    for block in read_blocks(page):
        if block.file:
            (folder / block.file).write_text(block.text)


@pytest.mark.parametrize(
    "page", [p for p in PAGES if any(b.language == "python" and not b.why for b in read_blocks(p))]
)
def test_python_runs(page: str, desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the order of the page, as in one session."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in read_blocks(page):
        if block.language != "python" or block.why:
            continue
        if "import onnxruntime" in block.text:
            pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
        if 'fd.load_models("models")' in block.text:  # what the command before it leaves
            quick = ["--stream", "sine-2", "--algorithm", "FedDrift", "--rounds", "1", "--steps", "1"]
            cli.app(["run", *quick], standalone_mode=False)
            cli.app(["export", "runs", "--out", "models"], standalone_mode=False)
        exec(compile("\n" * block.line + block.text, page, "exec"), names)
    if page == "README.md":
        printed = capsys.readouterr().out
        (shown,) = (block.text for block in read_blocks(page) if block.language == "text")
        assert "created 1" in shown and shown in printed, "the output in README.md is not that of its code"
        assert len(re.findall(r"^\d ", printed, re.M)) == 10
    if page == "docs/faults.md":
        assert names["classes"].shape == (500,)


def test_the_quick_start_shows_what_its_first_command_prints(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = "docs/quickstart.md"
    words = next(w for block in read_blocks(page) for w in block.commands if w[:2] == ["feddrift", "run"])
    cli.app(words[1:], standalone_mode=False)
    printed = capsys.readouterr().out
    (shown,) = (block.text for block in read_blocks(page) if block.language == "text")
    assert shown in printed
    for name in ("FedDrift", "Oblivious", "Oracle"):
        (row,) = re.findall(rf"^\| {name}\b[^|]*\|(.*)\|$", (ROOT / page).read_text(), re.M)
        omitting, including, sent, models, ari = (cell.strip() for cell in row.split("|"))
        columns = [omitting, including, sent, models, "0", ari]  # "0": no false alarms
        assert re.search(rf"sine-2 +{name}\b.* +{' +'.join(map(re.escape, columns))} *$", printed, re.M), name


@pytest.mark.slow
@pytest.mark.parametrize(
    "block",
    [b for page in ("docs/extend.md", "docs/extend-nets.md") for b in read_blocks(page) if "def step(" in b.text],
    ids=lambda b: b.file or f"{b.page}:{b.line}",
)
def test_methods_that_are_shown_keep_the_contract(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = ModuleType("shown")
    monkeypatch.setitem(sys.modules, "shown", shown)
    exec(compile(block.text, block.file or block.page, "exec"), vars(shown))
    (method,) = [c for c in vars(shown).values() if getattr(c, "__module__", None) == "shown" and hasattr(c, "step")]
    check_algorithm(method())


@pytest.mark.parametrize("page", PAGES)
def test_commands_are_ones_that_there_are(page: str, desk: Path) -> None:
    write_files(page, desk)
    for block in read_blocks(page):
        here = desk
        for words in block.commands:
            assert words[0] in COMMANDS, f"{page}:{block.line}: {words[0]} is a command that no test knows"
            if words[0] == "cd":
                here = desk / words[1]
                assert here.is_dir()
            elif words[0] == "feddrift":
                with pytest.MonkeyPatch.context() as patch:
                    patch.chdir(here)
                    check(words[1:], whole=not block.why)
            else:
                check_other(words)
    for words in list_mentioned_commands(page):
        check(words[1:], whole=False)


def check(words: list[str], whole: bool) -> None:
    """The options exist and what they name exists; only a whole command must leave nothing out."""
    command: Any = COMMAND
    while hasattr(command, "commands") and words and words[0] in command.commands:
        command, words = command.commands[words[0]], words[1:]
    options = {name for param in command.params for name in param.opts} | {"--help", "-h"}
    assert {word for word in words if word.startswith("--")} <= options, words
    if hasattr(command, "commands"):
        assert not [word for word in words if not word.startswith("-")], f"no command: {words}"
        return
    if "--help" in words:
        return
    try:
        given = command.make_context(command.name, list(words)).params
    except console.CommandLineError as error:
        if whole or type(error).__name__ != "MissingParameter":
            raise
        return
    if command.name == "run" and "stream" in given:
        check_run(given)
    if command.name == "sweep" and given["file"] != "FILE.toml":
        assert sweep.read_grid(Path(given["file"]))


def check_run(given: dict[str, Any]) -> None:
    given["algorithm"] = given["algorithm"] or [algorithms.RECOMMENDED]
    settings = {key: value for key, _, value in (pair.partition("=") for pair in given["set_"] or ())}
    known = {key for name in given["algorithm"] for key in algorithms.get_options(algorithms.find_entry(name).cls)}
    assert set(settings) <= known, f"no setting of {given['algorithm']}: {set(settings) - known}"
    for name in given["algorithm"]:
        legal = algorithms.get_options(algorithms.find_entry(name).cls)
        algorithms.algorithm(name, **{k: v for k, v in settings.items() if k in legal})
    fields = {k: v for k, v in given.items() if k in RunConfig.model_fields and k != "algorithm"}
    config = RunConfig.from_values(
        algorithm=given["algorithm"][0], **{k: v for k, v in fields.items() if v is not None}
    )
    parse_seeds(given["seeds"] or "0")
    if config.pattern is not None and config.pattern.endswith(".txt"):
        return  # a file that the page makes
    if config.stream.startswith("folder:") or config.stream.endswith(".csv"):
        made = config.load_stream()
    elif config.stream.startswith(("sine", "circle", "sea")):
        made = load_stream(config.stream, config.pattern)
    elif streams.is_in_catalogue(config.stream) or streams.is_recipe(config.stream):  # data that may be missing here
        streams.check_name(config.stream)
        return
    else:
        assert callable(plugins.load_object("stream", config.stream))
        return
    config.build_conditions(made)


@cache
def load_stream(name: str, pattern: str | None) -> Stream:
    return streams.stream(name, pattern=pattern)


def check_other(words: list[str]) -> None:
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M), words
    elif words[0] == "python":
        written_by_export = "models/predict.py"
        assert words[1] in ("-m", written_by_export) or (ROOT / words[1]).is_file(), words
    elif words[0] == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert words[1] == "install"
        for name in re.findall(r"feddrift\[(\w+)\]", " ".join(words)):
            assert name in extras, words
    else:
        assert words == [".", ".venv/bin/activate"], words


def test_extras_in_the_text_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {name for page in PAGES for name in re.findall(r"feddrift\[(\w+)\]", (ROOT / page).read_text())}
    assert named and named <= set(extras)


def test_grids_are_grids(desk: Path) -> None:
    found = [block for page in PAGES for block in read_blocks(page) if block.language == "toml"]
    assert len(found) >= 3
    for block in found:
        if "[[runs]]" in block.text:
            (desk / "grid.toml").write_text(block.text)
            assert sweep.read_grid(desk / "grid.toml")
        else:
            tomllib.loads(block.text)


def test_few_blocks_are_not_run() -> None:
    """Each with its reason."""
    reasons = {f"{b.page}:{b.line}": b.why for page in PAGES for b in read_blocks(page) if b.why}
    assert len(reasons) <= 11 and all(len(why) > 10 for why in reasons.values()), reasons
    runnable = [b for page in PAGES for b in read_blocks(page) if b.commands or b.language == "python"]
    assert len(runnable) > 6 * len(reasons)
    marks = sum((ROOT / page).read_text().count("<!-- not run") for page in PAGES)
    assert marks == len(reasons), "a mark stands directly before its block"


@pytest.mark.parametrize(
    "page", [*PAGES, "CHANGELOG.md", "CONTRIBUTING.md", "results/README.md", "benchmarks/README.md"]
)
def test_links_lead_somewhere(page: str) -> None:
    """On GitHub, which has no strict build."""
    assert [target for target in HOOKS.linked(page) if not (ROOT / target).exists()] == []


def test_the_hooks_pass_their_doctests() -> None:
    found = doctest.testmod(HOOKS)
    assert found.attempted >= 2 and not found.failed


def test_code_beside_pseudo_code_is_there() -> None:
    found = [match for page in PAGES for match in HOOKS.CODE.findall((ROOT / page).read_text())]
    assert len(found) >= 5
    for path, name in found:
        assert re.search(rf"^(def|class) {name.rpartition('.')[2]}\(", HOOKS.code(path, name), re.MULTILINE)


def test_the_site_and_its_lists_have_every_page() -> None:
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    assert set(re.findall(r"([\w-]+\.md)$", nav, re.M)) >= pages
    assert {target.removeprefix("docs/") for target in HOOKS.linked("docs/index.md")} >= pages - {"index.md"}


def test_llms_txt_lists_every_page_with_a_description() -> None:
    text = (ROOT / "docs" / "llms.txt").read_text()
    assert re.match(r"# feddrift\n\n> \S", text)
    links = re.findall(r"^- \[[^\]]+\]\(([^)]+)\): \w", text, re.M)
    assert len(links) == len(set(links)) == text.count("](")
    assert set(links) == {path.name for path in (ROOT / "docs").glob("*.md")}


def test_each_attack_that_the_docs_list_has_the_test_that_they_name() -> None:
    page = (ROOT / "docs" / "deploy-security.md").read_text().split("## Attacks and the tests that repeat them")[1]
    rows = [row.strip("|").split("|") for row in page.splitlines() if row.startswith("|")]
    attacks = [row for row in rows if row[0].strip() not in ("attack", "---")]
    assert len(attacks) > 15 and {len(row) for row in attacks} == {3}
    for attack, _, tests in attacks:
        found = re.findall(r"`([a-z/]+/test_[a-z_]+\.py)`: ([^;`]+)", tests)
        assert found and len(found) == tests.count("`") / 2, attack
        for path, names in found:
            source = (ROOT / "tests" / path).read_text()
            for name in names.split(", "):
                assert re.search(rf"def test_\w*{name.strip().replace(' ', '_')}", source), (attack, path, name)
