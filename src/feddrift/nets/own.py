"""Nets of your own: pairs of JAX functions, PyTorch modules, and models of any framework that train themselves."""

from __future__ import annotations

import inspect
import sys
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from feddrift import plugins
from feddrift.data import Stream
from feddrift.errors import ConfigError
from feddrift.types import Net

Arrays = list[npt.NDArray[Any]]

LEGAL = "a Net, a PyTorch module's class, a model with init, logits and fit, or a function of the stream that makes one"

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


def own_net(name: str, found: Any, features: Sequence[int], n_classes: int, stream: Stream | None = None) -> Net:
    """What `name` led to, as a net; where there is no stream yet, it must be made without one."""
    if isinstance(found, Net):
        return found
    if _is_model(found):
        return net_of(found)
    if not callable(found) or _is_module(found):
        hint = ": name its class, since each model starts anew" if _is_module(found) else ""
        raise ConfigError(f"'{name}' must be {LEGAL}, got {type(found).__name__}{hint}")
    make: Callable[[], Any] = found
    if _wants_a_stream(found):
        if stream is None:
            raise ConfigError(f"'{name}' must be made without arguments: clients that keep their data have no stream")
        make = partial(found, stream)
    if "torch" not in sys.modules:
        made = plugins.called("net", name, make)
    else:
        from feddrift.nets.torch import bridge, seeded

        made = plugins.called("net", name, seeded, make, 0)  # a module draws its start, which is nobody else's affair
    if _is_module(made):
        key = found, tuple(features), n_classes, None if make is found else _digest(stream)
        if key not in _bridges:
            _bridges[key] = bridge(name, make, features)
        return _bridges[key]
    if isinstance(made, Net):
        return made
    if _is_model(made):
        return net_of(made)
    raise ConfigError(f"'{name}' must be {LEGAL}, got {type(made).__name__}")


def _is_model(found: Any) -> bool:
    methods = ("init", "logits", "fit")
    return not isinstance(found, type) and all(callable(getattr(found, name, None)) for name in methods)


def _is_module(found: Any) -> bool:
    """Whether this is a PyTorch module; without PyTorch nothing is."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(found, torch.nn.Module)


def _digest(stream: Any) -> tuple[Any, ...]:
    """Of all that a net may have been made of."""
    return stream.name, *(zlib.crc32(np.ascontiguousarray(a).data) for a in (stream.x, stream.y, stream.counts))


def _wants_a_stream(make: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(make).parameters.values()
    except ValueError:  # it tells no parameters
        return True
    required = (
        p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    )
    return any(required) or any(p.name == "stream" for p in parameters)
