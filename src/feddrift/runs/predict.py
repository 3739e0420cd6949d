"""Predict with the models in the folder of this file. It needs Python 3.10 or later and NumPy, not feddrift.

    python predict.py --client NAME rows.csv
    python predict.py --new-client rows.csv

This prints the class of each row. The first line of rows.csv has the names of the columns, in any order; further
columns are ignored. Tables are prepared as in training: gaps are filled, words become 0 and 1, and numbers are
standardised. If the models have no names of columns, the file has no line of names, and each line has all numbers of
an input.

`feddrift export` copies this file beside models.json, which describes the models, and models.safetensors.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

MISSING_TEXTS = {"", "?", "NA", "N/A", "<NA>", "nan", "NaN", "NAN", "NaT", "null", "NULL"}
MAX_TABLE_VALUE = 1e38
DTYPES = {"F32": np.float32, "F64": np.float64}


class InputError(Exception):
    """A file or an argument that is not valid."""


def read_safetensors(path: Path) -> dict[str, Any]:
    """Read the arrays of a file: the size of a header, the header as JSON, and the values of all arrays."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    arrays = {}
    for name, about in json.loads(content[8:start]).items():
        if name != "__metadata__":
            first, end = about["data_offsets"]
            dtype = np.dtype(DTYPES[about["dtype"]]).newbyteorder("<")
            values = np.frombuffer(content[start + first : start + end], dtype=dtype)
            arrays[name] = values.reshape(about["shape"])
    return arrays


def read_models(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the description and the arrays of exported models."""
    try:
        about = json.loads((folder / "models.json").read_text(encoding="utf-8"))
        kind = about["net"]["kind"]
        arrays = read_safetensors(folder / "models.safetensors")
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{folder} has no intact models: {type(error).__name__}: {error}") from None
    if kind != "perceptron":
        raise InputError("these models are not perceptrons: load them with feddrift.load_models")
    return about, arrays


def read_rows(path: Path) -> list[list[str]]:
    """Read the lines of a CSV file; empty lines are skipped."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = [row for row in csv.reader(file) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"cannot read {path}: {error}") from None
    for k, row in enumerate(rows):
        if len(row) != len(rows[0]):
            raise InputError(f"{path}: every line must have {len(rows[0])} values, got {len(row)} in row {k + 1}")
    return rows


def parse_numbers(texts: list[str], column: str) -> Any:
    """Convert texts to numbers, NaN where a value is missing."""
    numbers = np.full(len(texts), np.nan)
    for k, text in enumerate(texts):
        if text.strip() not in MISSING_TEXTS:
            try:
                number = math.nan if "_" in text else float(text)
            except ValueError:
                number = math.nan
            if not abs(number) < MAX_TABLE_VALUE:
                raise InputError(f"column '{column}' must have finite numbers, got '{text}' in row {k + 1}")
            numbers[k] = number
    return numbers


def compute_feature(feature: dict[str, Any], texts: list[str]) -> Any:
    """Compute a feature of a table from the texts of its column."""
    gaps = np.array([text.strip() in MISSING_TEXTS for text in texts], dtype=bool)
    column = feature["column"]
    if feature["kind"] == "gap":
        return gaps
    if gaps.any() and feature["fill"] is None:
        raise InputError(f"column '{column}' has {gaps.sum()} gaps, the models were trained without gaps")
    if feature["kind"] == "word":
        return np.array([text.strip() == feature["word"] for text in texts])
    numbers = parse_numbers(texts, column)
    filled = np.where(gaps, feature["fill"], numbers) if gaps.any() else numbers
    return (filled - feature["mean"]) / feature["std"]


def build_inputs(about: dict[str, Any], rows: list[list[str]]) -> Any:
    """Build the inputs [row, ...] of the net from the lines of a file."""
    columns = about["columns"]
    shape = tuple(about["net"]["features"])
    if not columns:
        n_features = math.prod(shape)
        if rows and len(rows[0]) != n_features:
            raise InputError(f"every line must have the {n_features} numbers of an input, got {len(rows[0])}")
        table = {str(k): list(texts) for k, texts in enumerate(zip(*rows, strict=True))}
        columns = [str(k) for k in range(n_features)]
        n = len(rows)
    else:
        names = rows[0] if rows else []
        table = {name: [row[k] for row in rows[1:]] for k, name in enumerate(names)}
        n = len(rows) - 1
    if n < 1:
        raise InputError("the file has no rows")
    recipe = about.get("recipe") or [
        {"name": name, "column": name, "kind": "number", "fill": None, "mean": 0.0, "std": 1.0} for name in columns
    ]
    missing = [feature["column"] for feature in recipe if feature["column"] not in table]
    if missing:
        raise InputError(f"the file has no column '{missing[0]}', it has {', '.join(table)}")
    x = np.stack([compute_feature(feature, table[feature["column"]]) for feature in recipe], axis=1)
    return x.astype(np.float32).reshape(n, *shape)


def find_votes(about: dict[str, Any], client: str | None) -> dict[str, float]:
    """Find the votes of the models, by their ids, for a client; None: a client that was not in training."""
    if client is None:
        if about["new_client"] is None:
            raise InputError("all models are private to their clients, none can predict for another client")
        return dict(about["new_client"]["votes"])
    if client not in about["clients"]:
        names = ", ".join(about["clients"])
        raise InputError(f"unknown client '{client}': choose one of {names}, or --new-client")
    return dict(about["clients"][client])


def compute_probabilities(arrays: dict[str, Any], model: str, x: Any) -> Any:
    """Compute the probabilities [row, class] of a model: a perceptron with ReLU, or a linear net."""
    if f"{model}/mask" in arrays:
        x = x * arrays[f"{model}/mask"]
    layer = x.reshape(len(x), -1)
    k = 1
    while f"{model}/W{k}" in arrays:
        if k > 1:
            layer = np.maximum(layer, 0)
        layer = layer @ arrays[f"{model}/W{k}"] + arrays[f"{model}/b{k}"]
        k += 1
    logits = layer.astype(np.float64)
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    return exponentials / exponentials.sum(axis=1, keepdims=True)


def predict(about: dict[str, Any], arrays: dict[str, Any], client: str | None, x: Any) -> tuple[list[Any], Any]:
    """Predict the classes of inputs [row, ...], and their probabilities [row, class].

    Args:
        about: The content of models.json.
        arrays: The content of models.safetensors.
        client: The name of the client; None: one that was not in training.
        x: The inputs.
    """
    votes = find_votes(about, client)
    total = sum(votes.values())
    scores: Any = 0.0
    probabilities: Any = 0.0
    for model, vote in votes.items():
        own = compute_probabilities(arrays, model, x)
        ballots = np.eye(own.shape[1])[own.argmax(axis=1)] if about["ballot"] == "hard" else own
        scores = scores + ballots * (vote / total)
        probabilities = probabilities + own * (vote / total)
    return [about["classes"][k] for k in scores.argmax(axis=1)], probabilities


class Parser(argparse.ArgumentParser):
    """A parser that reports an error in one line."""

    def error(self, message: str) -> NoReturn:
        """Exit with an error."""
        self.exit(2, f"Error: {message}\n")


def main() -> None:
    """Run the command."""
    parser = Parser(description="Print the class of each row of a CSV file.")
    who = parser.add_mutually_exclusive_group(required=True)
    who.add_argument("--client", metavar="NAME", help="a client that was in training: its models predict")
    who.add_argument(
        "--new-client", action="store_true", help="another client: the model with the most clients predicts"
    )
    parser.add_argument("--probabilities", action="store_true", help="print a CSV table, with a column for each class")
    parser.add_argument("rows", type=Path, metavar="rows.csv")
    options = parser.parse_args()
    folder = Path(__file__).resolve().parent
    try:
        about, arrays = read_models(folder)
        x = build_inputs(about, read_rows(options.rows))
        classes, probabilities = predict(about, arrays, options.client, x)
    except (OSError, InputError) as error:
        parser.error(str(error))
    if options.new_client:
        print(about["new_client"]["reason"], file=sys.stderr)
    out = csv.writer(sys.stdout, lineterminator="\n")
    if options.probabilities:
        out.writerow(["class", *about["classes"]])
        out.writerows([name, *row] for name, row in zip(classes, probabilities.tolist(), strict=True))
    else:
        out.writerows([name] for name in classes)


if __name__ == "__main__":
    main()
