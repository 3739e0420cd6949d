"""Nets from user code: pairs of JAX functions, PyTorch modules, and models of any framework that train themselves."""

from __future__ import annotations

import inspect
import sys
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from feddrift._internal import plugins
from feddrift.data import Stream
from feddrift.errors import ConfigError
from feddrift.types import Net

Arrays = list[npt.NDArray[Any]]

LEGAL_SOURCES = (
    "a Net, a PyTorch module's class, a model with init, logits and fit, or a function of the stream that makes one"
)

STREAM_FUNCTION_HINT = (
    "write a function of the stream that makes it, def net(stream), with stream.x.shape[1] inputs and stream.n_classes "
    "outputs, and name this function"
)

_converted_modules: dict[Any, Net] = {}  # used by all runs of a process, so that a net is compiled once


class ExternalModel(Protocol):
    """Interface of a model whose framework JAX cannot trace."""

    def init(self, seed: int) -> Arrays:
        """Return new parameters."""
        ...

    def logits(self, params: Arrays, x: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return scores [n, class]; the highest is the prediction, and their softmax the probabilities."""
        ...

    def fit(self, params: Arrays, batches: Iterable[tuple[Any, Any]], lr: float) -> Arrays:
        """Return the parameters after a step on each minibatch (x, y), without changing the arguments."""
        ...


@dataclass(frozen=True)
class ExternalNet(Net):
    """A net around a model of another framework; it has no trunk and need not use JAX."""

    model: Any = None  # an ExternalModel


def net_of(model: ExternalModel) -> Net:
    """Wrap a model that trains itself as a Net."""
    return ExternalNet(
        lambda key: [np.asarray(array) for array in model.init(int(key[0]) % 2**31)],
        lambda params, x: model.logits(params, x),
        model=model,
    )


def check_traceable(net: Net) -> None:
    """Raise ConfigError for a model that trains itself: JAX cannot trace it."""
    if isinstance(net, ExternalNet):
        raise ConfigError("a model with init, logits and fit trains itself: only the engine simulator supports it")


def convert_to_net(
    name: str, source: Any, features: Sequence[int], n_classes: int, stream: Stream | None = None
) -> Net:
    """Convert an object from user code to a net.

    Args:
        name: The name of the object, for messages.
        source: A Net, a model with init, logits and fit, or a class or function that makes one or a PyTorch module.
        features: The shape of an input.
        n_classes: The number of classes.
        stream: The stream for a function that takes one; None: the function must not take arguments.

    Raises:
        ConfigError: If the object is none of these, or making the net failed.
    """
    if isinstance(source, Net):
        return source
    if _is_external_model(source):
        return net_of(source)
    if not callable(source) or _is_torch_module(source):
        hint = ": name its class, since each model needs new parameters" if _is_torch_module(source) else ""
        raise ConfigError(f"'{name}' must be {LEGAL_SOURCES}, got {type(source).__name__}{hint}")
    make = cast("Callable[[], Any]", source)
    arguments = _list_argument_names(source)
    if arguments:
        if stream is None:
            raise ConfigError(f"'{name}' must be made without arguments: clients that keep their data have no stream")
        if len(arguments) > 1:
            raise ConfigError(f"'{name}' needs the arguments {', '.join(arguments)}: {STREAM_FUNCTION_HINT}")
        make = partial(source, stream)
    try:
        product = plugins.call_function("net", name, _call_with_fixed_seed, make)
    except ConfigError as error:
        if isinstance(source, type) and arguments not in ([], ["stream"]):
            got = f"it was given the stream as its argument '{arguments[0]}'"
            raise ConfigError(f"{error}; {got}: {STREAM_FUNCTION_HINT}") from error.__cause__
        raise
    if _is_torch_module(product):
        from feddrift.nets.torch import convert_torch_module  # here, since importing PyTorch takes a while

        key = source, tuple(features), n_classes, None if make is source else _hash_stream(stream)
        if key not in _converted_modules:
            _converted_modules[key] = convert_torch_module(name, make, features)
        return _converted_modules[key]
    if isinstance(product, Net):
        return product
    if _is_external_model(product):
        return net_of(product)
    raise ConfigError(f"'{name}' must be {LEGAL_SOURCES}, got {type(product).__name__}")


def _is_external_model(value: Any) -> bool:
    methods = ("init", "logits", "fit")
    return not isinstance(value, type) and all(callable(getattr(value, name, None)) for name in methods)


def _is_torch_module(value: Any) -> bool:
    """Return True for a PyTorch module, without importing PyTorch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def _call_with_fixed_seed(make: Callable[[], Any]) -> Any:
    """Call a function without changing the state of PyTorch's generator."""
    if "torch" not in sys.modules:
        return make()
    from feddrift.nets.torch import call_with_seed

    return call_with_seed(make, 0)


def _hash_stream(stream: Any) -> tuple[Any, ...]:
    """Return the name and a checksum of the data of a stream."""
    return stream.name, *(zlib.crc32(np.ascontiguousarray(a).data) for a in (stream.x, stream.y, stream.counts))


def _list_argument_names(make: Callable[..., Any]) -> list[str]:
    """Return the names of the required arguments, or of an optional one called stream."""
    try:
        parameters = inspect.signature(make).parameters.values()
    except ValueError:  # it has no signature
        return ["stream"]
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return required or [p.name for p in parameters if p.name == "stream"]
