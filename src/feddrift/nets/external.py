"""Nets of your own: pairs of JAX functions, PyTorch modules, and models of any framework that train themselves."""

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

LEGAL = "a Net, a PyTorch module's class, a model with init, logits and fit, or a function of the stream that makes one"

OF_THE_STREAM = (
    "write a function of the stream that makes it, def net(stream), with stream.x.shape[1] inputs and stream.n_classes "
    "outputs, and name that"
)

_bridges: dict[Any, Net] = {}  # one net, one compiled program, however many runs a process makes


class OwnModel(Protocol):
    """What a framework must do that JAX cannot trace."""

    def init(self, seed: int) -> Arrays:
        """New parameters."""
        ...

    def logits(self, params: Arrays, x: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Scores [n, class]; the highest is the prediction, and their softmax the probabilities."""
        ...

    def fit(self, params: Arrays, batches: Iterable[tuple[Any, Any]], lr: float) -> Arrays:
        """The parameters after a step on each of these minibatches (x, y); what it is given must stay as it is."""
        ...


@dataclass(frozen=True)
class OwnNet(Net):
    """A model of another framework as a net: it has no trunk, and nothing in it needs to be JAX."""

    model: Any = None  # an OwnModel


def net_of(model: OwnModel) -> Net:
    """The same as a Net."""
    return OwnNet(
        lambda key: [np.asarray(array) for array in model.init(int(key[0]) % 2**31)],
        lambda params, x: model.logits(params, x),
        model=model,
    )


def check_traceable(net: Net) -> None:
    """Refuse a model that trains itself where JAX should."""
    if isinstance(net, OwnNet):
        raise ConfigError("a model with init, logits and fit trains itself, which only the engine simulator lets it")


def own_net(name: str, source: Any, features: Sequence[int], n_classes: int, stream: Stream | None = None) -> Net:
    """What `name` leads to, as a net; where there is no stream yet, it must be made without one."""
    if isinstance(source, Net):
        return source
    if _is_model(source):
        return net_of(source)
    if not callable(source) or _is_module(source):
        hint = ": name its class, since each model starts anew" if _is_module(source) else ""
        raise ConfigError(f"'{name}' must be {LEGAL}, got {type(source).__name__}{hint}")
    make, arguments = cast("Callable[[], Any]", source), _arguments(source)
    if arguments:
        if stream is None:
            raise ConfigError(f"'{name}' must be made without arguments: clients that keep their data have no stream")
        if len(arguments) > 1:
            raise ConfigError(f"'{name}' needs the arguments {', '.join(arguments)}: {OF_THE_STREAM}")
        make = partial(source, stream)
    try:
        product = plugins.called("net", name, _undisturbed, make)
    except ConfigError as error:
        if isinstance(source, type) and arguments not in ([], ["stream"]):
            got = f"it was given the stream as its argument '{arguments[0]}'"
            raise ConfigError(f"{error}; {got}: {OF_THE_STREAM}") from error.__cause__
        raise
    if _is_module(product):
        from feddrift.nets.torch import bridge  # here, since PyTorch takes a while to import

        key = source, tuple(features), n_classes, None if make is source else _digest(stream)
        if key not in _bridges:
            _bridges[key] = bridge(name, make, features)
        return _bridges[key]
    if isinstance(product, Net):
        return product
    if _is_model(product):
        return net_of(product)
    raise ConfigError(f"'{name}' must be {LEGAL}, got {type(product).__name__}")


def _is_model(value: Any) -> bool:
    methods = ("init", "logits", "fit")
    return not isinstance(value, type) and all(callable(getattr(value, name, None)) for name in methods)


def _is_module(value: Any) -> bool:
    """Whether this is a PyTorch module; without PyTorch nothing is."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def _undisturbed(make: Callable[[], Any]) -> Any:
    """What this makes; where it may draw from PyTorch's generator, nobody else notices."""
    if "torch" not in sys.modules:
        return make()
    from feddrift.nets.torch import seeded

    return seeded(make, 0)


def _digest(stream: Any) -> tuple[Any, ...]:
    """Of all that a net may have been made of."""
    return stream.name, *(zlib.crc32(np.ascontiguousarray(a).data) for a in (stream.x, stream.y, stream.counts))


def _arguments(make: Callable[..., Any]) -> list[str]:
    """The names of the arguments that it needs, or takes and calls a stream."""
    try:
        parameters = inspect.signature(make).parameters.values()
    except ValueError:  # it tells no parameters
        return ["stream"]
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return required or [p.name for p in parameters if p.name == "stream"]
