"""Nets as pairs of functions: the one that suits a stream, another by name, or your own."""

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
from feddrift.errors import ConfigError, FeddriftError, unknown
from feddrift.nets.external import OwnNet, own_net
from feddrift.nets.perceptron import layer_sizes, mlp, usual
from feddrift.trees import paths
from feddrift.types import Layer, Net, Params

BUILT_IN = ("linear", "mlp:64,64")  # names that need no module


def default_net(stream: Stream, weights: str | Path | None = None) -> Net:
    """The stream's own net, or the paper's: a ResNet-18 for its pictures, from these weights, else d-2d-C."""
    if stream.family == "fmow" and stream.x.ndim == 4:
        from feddrift.nets.resnet import resnet18  # here: few need it

        return resnet18(stream.n_classes, weights)
    if weights is not None:
        raise ConfigError(f"weights are for streams of pictures, {stream.name} has none")
    if stream.net is not None:
        return named_net(stream.net, stream)
    return usual(stream.x.shape[1:], stream.n_classes)


def check_fits(net: Net, features: Sequence[int], n_classes: int) -> None:
    """Whether a net takes such inputs and has a logit for each class: native code would read beyond its arrays."""
    if not isinstance(net, Net):
        raise ConfigError(f"a net must be a Net(init, apply), got {type(net).__name__}")
    params = initial(net, rng.derive(0, "init", 0))
    sizes = layer_sizes(net, params)
    if sizes is not None:
        takes, gives = sizes[0], sizes[-1]
        if takes != math.prod(features):
            raise ConfigError(f"the net takes {takes} features, the stream has {math.prod(features)}")
    else:
        try:
            shape = _logits_shape(net, params, (2, *features))
        except Exception as error:  # whatever the net's own code says
            raise ConfigError(f"the net does not take inputs of shape {tuple(features)}: {_message(error)}") from error
        if len(shape) != 2 or shape[0] != 2:
            raise ConfigError(f"the net must give a row of logits for each input, for 2 inputs it gives {shape}")
        gives = shape[1]
    if gives != n_classes:
        raise ConfigError(f"the net gives {gives} logits for an input, the stream has {n_classes} classes")


def _logits_shape(net: Net, params: Params, inputs: tuple[int, ...]) -> tuple[int, ...]:
    if isinstance(net, OwnNet):
        return np.shape(net.apply(params, np.zeros(inputs, dtype=np.float32)))
    import jax  # here, since it takes a while

    return np.shape(jax.eval_shape(net.apply, params, jax.ShapeDtypeStruct(inputs, np.float32)))  # type: ignore[no-untyped-call]


def below_the_head(net: Net) -> Net:
    """A net whose logits are what the head of this one sees."""
    if net.hidden is None:
        raise ConfigError(
            "layer=trunk needs a net that says what its head sees, Net(init, apply, trunk, hidden), and this one does "
            "not: use layer=input or logits"
        )
    return replace(net, apply=net.hidden)


@lru_cache(maxsize=64)
def layer_width(net: Net, layer: Layer, features: tuple[int, ...], n_classes: int) -> int:
    """How many numbers a layer of this net makes of an input."""
    if layer != "trunk":
        return math.prod(features) if layer == "input" else n_classes
    params, hidden = initial(net, rng.derive(0, "init", 0)), below_the_head(net)
    sizes = layer_sizes(net, params)
    return sizes[-2] if sizes else math.prod(_logits_shape(hidden, params, (1, *features)))


def initial(net: Net, key: rng.Words) -> Params:
    """The parameters that a net starts with; what goes wrong in it is one sentence, with its traceback as the cause."""
    try:
        params = net.init(key)
    except FeddriftError:
        raise
    except Exception as error:  # whatever the net's own code says
        raise ConfigError(f"the net's init failed: {_message(error)}") from error
    wrong = {path: type(leaf).__name__ for path, leaf in paths(params) if not hasattr(leaf, "dtype")}
    if wrong:
        where, what = next(iter(wrong.items()))
        raise ConfigError(f"the net's init must give arrays in dicts, lists or tuples, got {what} at '{where}'")
    for path, leaf in paths(params):
        if np.dtype(leaf.dtype).kind not in "fV":  # V: bfloat16
            raise ConfigError(f"the net's parameters must be floating point numbers, got {leaf.dtype} at '{path}'")
    return params


def _message(error: Exception) -> str:
    """The kind of an error and the first line of its text."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"


def built_in(name: str, features: Sequence[int], n_classes: int) -> Net | None:
    """The net for such inputs that has this name: linear, or mlp: and the sizes of its hidden layers; None for others.

    >>> built_in("mlp:8,4", [2], 3) is mlp(2, (8, 4), 3), built_in("mine:net", [2], 3)
    (True, None)
    """
    if name == "linear":
        return mlp(math.prod(features), (), n_classes)
    if not re.match(r"mlp:([0-9]|$)", name):  # what follows may also be a name in a module mlp
        return None
    sizes = name.removeprefix("mlp:").split(",")
    if not all(re.fullmatch("[0-9]{1,7}", size) and int(size) > 0 for size in sizes):
        raise ConfigError(f"mlp: takes the sizes of its hidden layers, such as mlp:64 or mlp:64,64, got '{name}'")
    return mlp(math.prod(features), [int(size) for size in sizes], n_classes)


def named_net(name: str, stream: Stream) -> Net:
    """The net of this name: one that is `built_in`, of an installed package, or at ``package.module:make``."""
    net = built_in(name, stream.x.shape[1:], stream.n_classes)
    if net is not None:
        return net
    source = plugins.find("net", name)
    if source is None:
        raise unknown("net", name, [*BUILT_IN, *plugins.installed("net"), "package.module:make"])
    return own_net(name, source, stream.x.shape[1:], stream.n_classes, stream)


def imported(name: str | None, folder: Path) -> Any:
    """What a settings file names as its model, for `net_for`."""
    if name is None or built_in(name, (1,), 2) is not None:
        return name
    if not plugins.is_path(name):
        raise unknown("model", name, [*BUILT_IN, "module:object"])
    return plugins.load("model", name, folder)


def net_for(model: Any, features: Sequence[int], n_classes: int) -> Net:
    """The net that a client trains on such inputs, where there is no stream: from a Net, its name, or what makes one;
    by default a perceptron with one hidden layer."""
    if model is None:
        return usual(features, n_classes)
    if isinstance(model, str):
        net = built_in(model, features, n_classes)
        if net is None:
            raise unknown("net", model, BUILT_IN)
        return net
    return own_net(getattr(model, "__name__", type(model).__name__), model, features, n_classes)


__all__ = ["built_in", "check_fits", "default_net", "imported", "initial", "mlp", "named_net", "net_for"]
