"""Nets as pairs of functions: the default net of a stream, nets by name, and nets from user code."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from feddrift import rng
from feddrift._internal import plugins
from feddrift.data import Stream
from feddrift.errors import ConfigError, FeddriftError, unknown_name_error
from feddrift.nets.external import ExternalNet, convert_to_net
from feddrift.nets.perceptron import build_default_perceptron, get_layer_sizes, mlp
from feddrift.trees import tree_paths
from feddrift.types import Layer, Net, Params

BUILT_IN_NETS = ("linear", "mlp:64,64")


def default_net(stream: Stream, weights: str | Path | None = None) -> Net:
    """Return the default net of a stream: its own, a ResNet-18 for FMoW's pictures, or the paper's perceptron d-2d-C.

    Args:
        stream: The stream.
        weights: A file with weights of a ResNet-18, for streams of pictures only.

    Raises:
        ConfigError: If there are weights, but the stream has no pictures.
    """
    if stream.family == "fmow" and stream.x.ndim == 4:
        from feddrift.nets.resnet import resnet18  # here, since few streams need it

        return resnet18(stream.n_classes, weights)
    if weights is not None:
        raise ConfigError(f"weights are for streams of pictures, {stream.name} has no pictures")
    if stream.net is not None:
        return named_net(stream.net, stream)
    return build_default_perceptron(stream.x.shape[1:], stream.n_classes)


def check_fits(net: Net, features: Sequence[int], n_classes: int) -> None:
    """Raise ConfigError unless a net takes such inputs and gives a logit for each class.

    Native code would otherwise read beyond its arrays.
    """
    if not isinstance(net, Net):
        raise ConfigError(f"a net must be a Net(init, apply), got {type(net).__name__}")
    params = init_params(net, rng.derive_key(0, "init", 0))
    sizes = get_layer_sizes(net, params)
    if sizes is not None:
        n_outputs = sizes[-1]
        if sizes[0] != math.prod(features):
            raise ConfigError(f"the net takes {sizes[0]} features, the stream has {math.prod(features)}")
    else:
        try:
            shape = _get_output_shape(net, params, (2, *features))
        except Exception as error:  # the net's own code may raise anything
            raise ConfigError(
                f"the net does not take inputs of shape {tuple(features)}: {_describe_error(error)}"
            ) from error
        if len(shape) != 2 or shape[0] != 2:
            raise ConfigError(f"the net must give a row of logits for each input, for 2 inputs it gives {shape}")
        n_outputs = shape[1]
    if n_outputs != n_classes:
        raise ConfigError(f"the net gives {n_outputs} logits for an input, the stream has {n_classes} classes")


def _get_output_shape(net: Net, params: Params, input_shape: tuple[int, ...]) -> tuple[int, ...]:
    if isinstance(net, ExternalNet):
        return np.shape(net.apply(params, np.zeros(input_shape, dtype=np.float32)))
    import jax  # here, since importing JAX takes a while

    return np.shape(jax.eval_shape(net.apply, params, jax.ShapeDtypeStruct(input_shape, np.float32)))  # type: ignore[no-untyped-call]


def remove_head(net: Net) -> Net:
    """Return a net whose outputs are the inputs of the head of this net.

    Raises:
        ConfigError: If the net does not define these inputs (`Net.hidden`).
    """
    if net.hidden is None:
        raise ConfigError(
            "layer=trunk needs a net with the function `hidden`, Net(init, apply, trunk, hidden), and this net has "
            "none: use layer=input or logits"
        )
    return replace(net, apply=net.hidden)


@lru_cache(maxsize=64)
def get_layer_width(net: Net, layer: Layer, features: tuple[int, ...], n_classes: int) -> int:
    """Return the number of outputs of a layer of this net for an input."""
    if layer != "trunk":
        return math.prod(features) if layer == "input" else n_classes
    hidden = remove_head(net)
    params = init_params(net, rng.derive_key(0, "init", 0))
    sizes = get_layer_sizes(net, params)
    return sizes[-2] if sizes else math.prod(_get_output_shape(hidden, params, (1, *features)))


def init_params(net: Net, key: rng.Words) -> Params:
    """Return the initial parameters of a net.

    Raises:
        ConfigError: If the net's init failed, or its result is not a tree of floating point arrays.
    """
    try:
        params = net.init(key)
    except FeddriftError:
        raise
    except Exception as error:  # the net's own code may raise anything
        raise ConfigError(f"the net's init failed: {_describe_error(error)}") from error
    wrong = {path: type(leaf).__name__ for path, leaf in tree_paths(params) if not hasattr(leaf, "dtype")}
    if wrong:
        path, kind = next(iter(wrong.items()))
        raise ConfigError(f"the net's init must give arrays in dicts, lists or tuples, got {kind} at '{path}'")
    for path, leaf in tree_paths(params):
        if np.dtype(leaf.dtype).kind not in "fV":  # V: bfloat16
            raise ConfigError(f"the net's parameters must be floating point numbers, got {leaf.dtype} at '{path}'")
    return params


def _describe_error(error: Exception) -> str:
    """Return the kind of an error and the first line of its text."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"


def build_built_in_net(name: str, features: Sequence[int], n_classes: int) -> Net | None:
    """Build a built-in net.

    Args:
        name: ``linear``, or ``mlp:`` and the sizes of the hidden layers.
        features: The shape of an input.
        n_classes: The number of classes.

    Returns:
        The net; None if the name is not that of a built-in net.

    Raises:
        ConfigError: If a size is not a whole number above 0.

    >>> build_built_in_net("mlp:8,4", [2], 3) is mlp(2, (8, 4), 3)
    True
    >>> build_built_in_net("mine:net", [2], 3)
    """
    if name == "linear":
        return mlp(math.prod(features), (), n_classes)
    if not re.match(r"mlp:([0-9]|$)", name):  # mlp:name may be a name in a module mlp
        return None
    sizes = name.removeprefix("mlp:").split(",")
    if not all(re.fullmatch("[0-9]{1,7}", size) and int(size) > 0 for size in sizes):
        raise ConfigError(f"mlp: takes the sizes of its hidden layers, such as mlp:64 or mlp:64,64, got '{name}'")
    return mlp(math.prod(features), [int(size) for size in sizes], n_classes)


def named_net(name: str, stream: Stream) -> Net:
    """Return the net of this name for the inputs and classes of a stream.

    Args:
        name: The name of a built-in net, of a net of an installed package, or ``package.module:make``.
        stream: The stream.

    Raises:
        ConfigError: If the net does not exist, or making it failed.
    """
    net = build_built_in_net(name, stream.x.shape[1:], stream.n_classes)
    if net is not None:
        return net
    source = plugins.find_object("net", name)
    if source is None:
        raise unknown_name_error("net", name, [*BUILT_IN_NETS, *plugins.list_plugins("net")], ["package.module:make"])
    return convert_to_net(name, source, stream.x.shape[1:], stream.n_classes, stream)


def import_model(name: str | None, folder: Path) -> Any:
    """Import the model that a settings file names.

    Args:
        name: The name of a built-in net, or ``module:object``; None: the default net.
        folder: The folder that contains the module.

    Returns:
        The object, or the name of a built-in net: an argument of `build_client_net`.

    Raises:
        ConfigError: If the net does not exist, or the import failed.
    """
    if name is None or build_built_in_net(name, (1,), 2) is not None:
        return name
    if not plugins.is_import_path(name):
        raise unknown_name_error("model", name, BUILT_IN_NETS, ["module:object"])
    return plugins.load_object("model", name, folder)


def build_client_net(model: Any, features: Sequence[int], n_classes: int) -> Net:
    """Build the net that a client with its own data trains on such inputs.

    Args:
        model: A Net, the name of a built-in net, or an object that `convert_to_net` accepts; None: the paper's
            perceptron.
        features: The shape of an input.
        n_classes: The number of classes.

    Raises:
        ConfigError: If the net does not exist, or making it failed.
    """
    if model is None:
        return build_default_perceptron(features, n_classes)
    if isinstance(model, str):
        net = build_built_in_net(model, features, n_classes)
        if net is None:
            raise unknown_name_error("net", model, BUILT_IN_NETS)
        return net
    return convert_to_net(getattr(model, "__name__", type(model).__name__), model, features, n_classes)


__all__ = [
    "build_built_in_net",
    "build_client_net",
    "check_fits",
    "default_net",
    "import_model",
    "init_params",
    "mlp",
    "named_net",
]
