"""Labels that are computed from a column: a comparison such as ``delay > 15``, or ``carrier in (AA, DL)``."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from feddrift.errors import DataError
from feddrift.tables.columns import CodedTexts, SourceColumn, parse_number
from feddrift.types import Bools, Floats

COMPARISONS: dict[str, Callable[[Floats, float], Bools]] = {
    "<": np.less,
    "<=": np.less_equal,
    ">": np.greater,
    ">=": np.greater_equal,
}
EXPRESSION_FORMS = "COLUMN < NUMBER (also <=, > and >=), COLUMN == VALUE (also !=), or COLUMN in (VALUE, VALUE)"
NO = "no"
YES = "yes"
LABELS = (NO, YES)  # the classes: the expression is false or true

_TOKEN = re.compile(r"""\s*(?:"([^"]*)"|'([^']*)'|(<=|>=|==|!=|<|>|=|!|\(|\)|,)|([^\s"'<>=!(),]+))""")
_LOOKS_LIKE_EXPRESSION = re.compile(r"[<>=!]|\sin\s*\(|[\"']\s*in\b|\sin\s*$")


@dataclass(frozen=True)
class LabelExpression:
    """A comparison of a column with a value, or with several."""

    text: str
    column: str
    operator: str
    values: tuple[str, ...]

    def compute_labels(self, source: SourceColumn) -> CodedTexts:
        """Return the label of each row, yes or no; rows without a value have none.

        Args:
            source: The column.

        Raises:
            DataError: A value that is compared with a number is not a number.
        """
        if self.operator in COMPARISONS:
            numbers, gaps = source.parse_numbers()
            if (invalid := np.isnan(numbers) & ~gaps).any():
                row = int(invalid.argmax())
                n_invalid = int(invalid.sum())
                raise DataError(
                    f"'{self.operator}' compares numbers, got {source.format_value(row)!r} in {n_invalid} of "
                    f"{len(numbers)} rows; == or in (...) compares words"
                )
            codes = COMPARISONS[self.operator](numbers, parse_number(self.values[0])).astype(np.int32)
            codes[gaps] = len(LABELS)
            return CodedTexts((*LABELS, ""), codes)
        texts = source.encode_texts()
        labels = [self._decide(text) for text in texts.texts]
        return CodedTexts.from_values(labels, texts.codes)

    def _decide(self, text: str) -> str:
        """Return the label of a text; numbers are equal if their values are."""
        if not text:
            return ""
        number = parse_number(text)
        found = any(text == value or number == parse_number(value) for value in self.values)
        return LABELS[found != (self.operator == "!=")]


def looks_like_expression(label: str) -> bool:
    """Return True for a label with an operator.

    >>> [looks_like_expression(label) for label in ("delay > 15", "carrier in (AA, DL)", "sold", "sold in june")]
    [True, True, False, False]
    """
    return bool(_LOOKS_LIKE_EXPRESSION.search(label))


def parse_expression(text: str) -> LabelExpression:
    """Parse a label expression; names and values with spaces or operators are quoted.

    Raises:
        DataError: The text is not an expression; the message says where and what is allowed.

    >>> parse_expression("'arrival delay' >= 15").column
    'arrival delay'
    >>> parse_expression("carrier in (AA, 'B 6')").values
    ('AA', 'B 6')
    """
    tokens = _split_tokens(text)
    column = _read_operand(tokens, 0, text, "the name of a column")
    operator = tokens[1][1] if len(tokens) > 1 and tokens[1][0] != "quoted" else ""
    if operator in COMPARISONS or operator in ("==", "!="):
        values = [_read_operand(tokens, 2, text, "a value")]
        end = 3
    elif operator == "in":
        values, end = _read_list(tokens, text)
    else:
        hint = ", did you mean '=='?" if operator == "=" else ""
        raise _build_error(text, f"<, <=, >, >=, ==, != or in after '{column}'", tokens, 1, hint)
    if end < len(tokens):
        raise _build_error(text, "the end", tokens, end)
    if operator in COMPARISONS and not math.isfinite(parse_number(values[0])):
        raise DataError(f"'{operator}' in the label {text!r} needs a number, got {values[0]!r}: use ==, != or in")
    return LabelExpression(text, column, operator, tuple(values))


Token = tuple[str, str]  # quoted, operator or word; and its text


def _split_tokens(text: str) -> list[Token]:
    tokens: list[Token] = []
    position = 0
    while text[position:].strip():
        match = _TOKEN.match(text, position)
        if match is None:
            raise DataError(f"the label {text!r} has an open quote: allowed is {EXPRESSION_FORMS}")
        double, single, operator, word = match.groups()
        quoted = single if double is None else double
        tokens.append(
            ("quoted", quoted) if quoted is not None else ("operator" if operator else "word", operator or word)
        )
        position = match.end()
    return tokens


def _read_operand(tokens: Sequence[Token], index: int, text: str, wanted: str) -> str:
    if index >= len(tokens) or tokens[index][0] == "operator" or not tokens[index][1].strip():
        raise _build_error(text, wanted, tokens, index)
    return tokens[index][1].strip()


def _read_list(tokens: Sequence[Token], text: str) -> tuple[list[str], int]:
    """Return the values of a list in brackets, which begins at the third token, and the position after it."""
    if tokens[2:3] != [("operator", "(")]:
        raise _build_error(text, "'(' after in", tokens, 2)
    values: list[str] = []
    index = 3
    while True:
        values.append(_read_operand(tokens, index, text, "a value"))
        if tokens[index + 1 : index + 2] == [("operator", ")")]:
            return values, index + 2
        if tokens[index + 1 : index + 2] != [("operator", ",")]:
            raise _build_error(text, "',' or ')'", tokens, index + 1)
        index += 2


def _build_error(text: str, wanted: str, tokens: Sequence[Token], index: int, hint: str = "") -> DataError:
    got = f"'{tokens[index][1]}'" if index < len(tokens) else "the end"
    quotes = "; names and values with spaces need quotes"
    return DataError(f"the label {text!r} needs {wanted}, got {got}{hint}: allowed is {EXPRESSION_FORMS}{quotes}")
