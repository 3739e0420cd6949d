"""Names and sentences of the sources follow the rules of CONTRIBUTING.md, as far as a program can check them.

A rule must not force a worse name: EXCEPTIONS lists the names that are better than their alternatives.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = [ROOT / folder for folder in ("src/feddrift", "examples", "experiments", "benchmarks", "tests/support")]
PATHS = [path for folder in FOLDERS for path in sorted(folder.rglob("*.py"))]

EXCEPTIONS = {  # "module.function", or "module.words" -> why it stays
    "algorithms.auto.review.nobody": "a sentence in records",
    "algorithms.auto.review.is at it": "a sentence in records",
    "experiments.unseen.moved": "a stream name in records",
    "engines.server.federation.allowed": "a method of the public class Federation",
    "testing.fake.allowed": "a method of the public class Federation",
    "types.allowed": "a method of the public class Federation",
}
PREDICATES = ("is", "has", "can", "are", "was")  # `is_revoked` is a question, not a participle
IRREGULAR_PARTICIPLES = re.compile(
    "bent|born|bound|chosen|cut|drawn|found|given|heard|held|kept|known|laid|left|lost|made|said|seen|sent|shown|spoken|"
    "taken|told|woken"
)
NOT_PARTICIPLES = re.compile("bed|embed|exceed|feed|indeed|need|proceed|red|seed|shed|speed")
RELATIVE_PRONOUN = re.compile(r"(How|What|Where|Whether|Which|Who|Whom|Whose)\b")
DIALECT = re.compile(
    r"\b(anew|ere|everybody|nobody|somebody|thereof|told|tells? (?:how|it|them|what|who)|whoever|"
    r"(?:are|is) at it|(?:are|is) no (?!later|longer|more)[a-z]+|at home|comes? to nothing|goes? on (?:from|with)|"
    r"in hand|leads? on|lies? (?:at|beside|in|there)|of one's own|on and on|so many|stands? "
    r"(?:beside|for itself|in|on|there)|what is (?:not )?so)\b",
    re.IGNORECASE,
)
QUOTED = re.compile(r"`[^`]*`|'[^']*'")  # names and values in a sentence

Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def is_participle(word: str) -> bool:
    """Whether a word is a past participle, by its form."""
    if word.endswith("ed") and len(word) > 4:
        return not NOT_PARTICIPLES.fullmatch(word)
    return bool(IRREGULAR_PARTICIPLES.fullmatch(word))


def is_property(function: Function) -> bool:
    return any("property" in ast.unparse(decorator) for decorator in function.decorator_list)


def list_functions_named_by_participles(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, Function) and not node.name.startswith("__") and not is_property(node):
            words = [word for word in node.name.split("_") if word]
            if words and words[0] not in PREDICATES and is_participle(words[-1]):
                yield node.lineno, node.name


def list_relative_docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, Documented) and RELATIVE_PRONOUN.match(ast.get_docstring(node) or ""):
            yield getattr(node, "lineno", 1), (ast.get_docstring(node) or "").partition("\n")[0]


def list_tuple_assignments(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield assignments of several values to several names that do not exchange them."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Tuple)
            and isinstance(node.value, ast.Tuple)
        ):
            targets = {ast.unparse(item) for item in node.targets[0].elts}
            if targets.isdisjoint(ast.unparse(item) for item in node.value.elts):
                yield node.lineno, ast.unparse(node)


def list_sentences(text: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield docstrings, other strings of several words, and comments."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def get_module_name(path: Path) -> str:
    """Return the module's name: that of the package without `feddrift.`, of others with their folder."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removeprefix("src.feddrift.")


def report(path: Path, found: Iterator[tuple[int, str]]) -> list[str]:
    """Return the places that are not exceptions."""
    module = get_module_name(path)
    return [f"{path.name}:{line} {what}" for line, what in found if f"{module}.{what}" not in EXCEPTIONS]


@pytest.mark.parametrize("path", PATHS, ids=get_module_name)
def test_language_of_a_module(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert not report(path, list_functions_named_by_participles(tree)), "a function name is a verb and its object"
    assert not report(path, list_relative_docstrings(tree)), "a docstring starts with a verb or a noun"
    assert not report(path, list_tuple_assignments(tree)), "one assignment per line"
    dialect = (
        (line, match.group(0))
        for line, sentence in list_sentences(text, tree)
        for match in DIALECT.finditer(QUOTED.sub("", sentence))
    )
    assert not report(path, dialect), "plain English"


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ("def _judged(x): return x", list_functions_named_by_participles),
        ("def rows_kept(x): return x", list_functions_named_by_participles),
        ("def f():\n    'What it returns.'", list_relative_docstrings),
        ("a, b = x.c, 1", list_tuple_assignments),
    ],
)
def test_the_rules_find_offenders(source: str, rule: object) -> None:
    assert callable(rule) and list(rule(ast.parse(source)))


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ("def need_seed(x): return x", list_functions_named_by_participles),
        ("def is_closed(x): return x", list_functions_named_by_participles),
        ("class A:\n    @property\n    def closed(self): return 1", list_functions_named_by_participles),
        ("a, b = b, a", list_tuple_assignments),
        ("a, b = pair", list_tuple_assignments),
    ],
)
def test_the_rules_leave_others_alone(source: str, rule: object) -> None:
    assert callable(rule) and not list(rule(ast.parse(source)))
