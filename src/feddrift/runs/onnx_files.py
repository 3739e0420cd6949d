"""ONNX files of exported perceptrons: one per model, and one with all models and the votes as an input."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from feddrift._version import __version__
from feddrift.errors import ConfigError
from feddrift.models import get_params
from feddrift.tables.features import Feature
from feddrift.types import Ballot, Models

OPSET = 17
IR_VERSION = 8  # of the file format; onnxruntime 1.12 and later read it
VOTES_FILE = "votes.onnx"
OWN_FILES = re.compile(r"model-\d+\.onnx|votes\.onnx")


@dataclass(frozen=True)
class GraphDescription:
    """The inputs and classes of models, and how they vote."""

    features: tuple[int, ...]  # the shape of one input
    classes: tuple[int | str, ...]
    columns: tuple[str, ...]
    recipe: tuple[Feature, ...]  # of a table: numbers are filled and scaled in the file
    ballot: Ballot


def import_onnx() -> ModuleType:
    """Import the package onnx.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        import onnx
    except ModuleNotFoundError:
        raise ConfigError("ONNX files need the package onnx: pip install 'feddrift[onnx]'") from None
    module: ModuleType = onnx
    return module


def delete_files(folder: Path) -> None:
    """Delete the ONNX files that an earlier export wrote into a folder."""
    for path in folder.glob("*.onnx"):
        if OWN_FILES.fullmatch(path.name):
            path.unlink()


def build_files(models: Models, description: GraphDescription, *, with_votes: bool) -> dict[str, bytes]:
    """Build the content of the ONNX files.

    Args:
        models: Models of a perceptron.
        description: Their inputs and classes.
        with_votes: True to add the file in which all models vote.

    Returns:
        The contents by the names of the files.
    """
    files = {f"model-{i}.onnx": _build_file(models, [m], description) for m, i in enumerate(models.ids)}
    if with_votes:
        files[VOTES_FILE] = _build_file(models, list(range(len(models))), description, with_votes=True)
    return files


class _Graph:
    """The nodes and constants of a graph."""

    def __init__(self, onnx: ModuleType) -> None:
        self.onnx = onnx
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def add_constant(self, name: str, value: npt.NDArray[Any]) -> str:
        """Add a constant, and return its name."""
        if value.dtype.kind == "U":
            texts = [text.encode() for text in value.tolist()]
            constant = self.onnx.helper.make_tensor(name, self.onnx.TensorProto.STRING, value.shape, texts)
        else:
            constant = self.onnx.numpy_helper.from_array(np.ascontiguousarray(value), name)
        self.constants.append(constant)
        return name

    def add_node(self, kind: str, inputs: list[str], output: str, **attributes: Any) -> str:
        """Add an operator, and return the name of its output."""
        self.nodes.append(self.onnx.helper.make_node(kind, inputs, [output], **attributes))
        return output


def _build_file(
    models: Models, positions: list[int], description: GraphDescription, *, with_votes: bool = False
) -> bytes:
    """Build one ONNX file.

    Args:
        models: Models of a perceptron.
        positions: The positions of the models in the file: a single one, unless they vote.
        description: Their inputs and classes.
        with_votes: True if the votes are an input.
    """
    onnx = import_onnx()
    graph = _Graph(onnx)
    helper = onnx.helper
    types = onnx.TensorProto
    x = _add_preprocessing(graph, description)
    logits = _add_layers(graph, models, positions, x)
    n_classes = len(description.classes)
    inputs = [
        helper.make_tensor_value_info(
            "x", types.DOUBLE if description.recipe else types.FLOAT, ["rows", *description.features]
        )
    ]
    if with_votes:
        inputs.append(helper.make_tensor_value_info("votes", types.FLOAT, [len(positions)]))
        scores = _add_votes(graph, logits, description.ballot, n_classes)
    else:
        scores = graph.add_node("Softmax", [logits], "probabilities", axis=-1)
    graph.add_node("ArgMax", [scores], "position", axis=-1, keepdims=0)
    classes = graph.add_constant("classes", np.array(description.classes))
    graph.add_node("Gather", [classes, "position"], "class")
    class_type = types.STRING if isinstance(description.classes[0], str) else types.INT64
    outputs = [
        helper.make_tensor_value_info("class", class_type, ["rows"]),
        helper.make_tensor_value_info("probabilities", types.FLOAT, ["rows", n_classes]),
    ]
    model = helper.make_model(
        helper.make_graph(graph.nodes, "feddrift", inputs, outputs, graph.constants),
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="feddrift",
        producer_version=__version__,
    )
    about = {
        "models": [models.ids[m] for m in positions],
        "classes": description.classes,
        "columns": description.columns,
    }
    helper.set_model_props(model, {key: json.dumps(value) for key, value in about.items()})
    onnx.checker.check_model(model)
    content: bytes = model.SerializeToString()
    return content


def _add_preprocessing(graph: _Graph, description: GraphDescription) -> str:
    """Add the preprocessing of a table's features, as `transform_column`, and return the name of the net's inputs."""
    x = "x"
    recipe = description.recipe
    if recipe:
        fills = np.array([np.nan if feature.fill is None else feature.fill for feature in recipe])
        fill = graph.add_constant("fill", fills)
        gaps = graph.add_node("IsNaN", [x], "gaps")
        x = graph.add_node("Where", [gaps, fill, x], "filled")
        mean = graph.add_constant("mean", np.array([feature.mean for feature in recipe]))
        std = graph.add_constant("std", np.array([feature.std for feature in recipe]))
        x = graph.add_node("Sub", [x, mean], "centred")
        x = graph.add_node("Div", [x, std], "scaled")
        x = graph.add_node("Cast", [x], "features", to=graph.onnx.TensorProto.FLOAT)
    return graph.add_node("Flatten", [x], "inputs", axis=1)


def _add_layers(graph: _Graph, models: Models, positions: list[int], x: str) -> str:
    """Add the layers of the models, and return the name of the logits: [row, class], of several [m, row, class]."""
    several = len(positions) > 1
    params = [get_params(models, m) for m in positions]
    if models.mask is not None:
        masks = np.asarray(models.mask, dtype=np.float32)[positions].reshape(len(positions), 1, -1)
        mask = graph.add_constant("mask", masks if several else masks[0])
        x = graph.add_node("Mul", [x, mask], "masked")
    n_layers = len(params[0]) // 2
    for k in range(1, n_layers + 1):
        weights = np.stack([np.asarray(p[f"W{k}"], dtype=np.float32) for p in params])
        biases = np.stack([np.asarray(p[f"b{k}"], dtype=np.float32) for p in params])[:, None]
        product = graph.add_node(
            "MatMul", [x, graph.add_constant(f"W{k}", weights if several else weights[0])], f"product{k}"
        )
        x = graph.add_node("Add", [product, graph.add_constant(f"b{k}", biases if several else biases[0])], f"sum{k}")
        if k < n_layers:
            x = graph.add_node("Relu", [x], f"hidden{k}")
    return x


def _add_votes(graph: _Graph, logits: str, ballot: Ballot, n_classes: int) -> str:
    """Add the mean probabilities of the models, weighted by their votes, and return the name of the shares of votes."""
    first_axis = graph.add_constant("first_axis", np.array([0]))
    total = graph.add_node("ReduceSum", ["votes"], "total", keepdims=1)
    weights = graph.add_node("Div", ["votes", total], "shares")
    axes = graph.add_constant("axes_of_weights", np.array([1, 2]))
    weights = graph.add_node("Unsqueeze", [weights, axes], "weights")
    soft = graph.add_node("Softmax", [logits], "soft_ballots", axis=-1)
    weighted = graph.add_node("Mul", [soft, weights], "weighted_probabilities")
    probabilities = graph.add_node("ReduceSum", [weighted, first_axis], "probabilities", keepdims=0)
    if ballot == "soft":
        return probabilities
    choice = graph.add_node("ArgMax", [logits], "choice", axis=-1, keepdims=0)
    depth = graph.add_constant("depth", np.array([n_classes]))
    off_and_on = graph.add_constant("off_and_on", np.array([0, 1], dtype=np.float32))
    hard = graph.add_node("OneHot", [choice, depth, off_and_on], "hard_ballots")
    weighted = graph.add_node("Mul", [hard, weights], "weighted_ballots")
    return graph.add_node("ReduceSum", [weighted, first_axis], "scores", keepdims=0)
