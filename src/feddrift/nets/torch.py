"""PyTorch modules as nets, through torchax: JAX traces the module's own code (extra ``torch``).

A net is ``apply(params, x)``: it has no random key and no memory. So dropout and batch norm are refused; buffers and
frozen parameters are constants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import numpy as np

from feddrift import rng
from feddrift.errors import ConfigError
from feddrift.trees import paths
from feddrift.types import Net, Params

INSTEAD = "or make it a model with init, logits and fit (docs/extend.md)"


def bridge(name: str, make: Callable[[], Any], features: Sequence[int]) -> Net:
    """The net that a module computes; `make` builds one, and is called again for each new start.

    Parameters lie in a tree by the names of layers: ``conv/weight``. Models may share the layer that a module calls
    `trunk`, or those that its attribute `trunk` names.
    """
    torchax = _torchax()
    import jax.numpy as jnp  # after torchax, which sets what it needs

    module = seeded(make, 0)
    _check(name, module, features)
    learns = {path for path, parameter in module.named_parameters() if parameter.requires_grad}
    classes = _classes(module, features, learns)
    states, call = torchax.extract_jax(module.eval())
    fixed = {path: array for path, array in states.items() if path not in learns}

    def init(key: rng.Words) -> Params:
        fresh = seeded(make, int(key[0]) << 32 | int(key[1]))
        return _tree({path: _array(leaf) for path, leaf in fresh.named_parameters() if path in learns})

    def apply(params: Params, x: Any) -> Any:
        learnt = {path.replace("/", "."): jnp.asarray(leaf) for path, leaf in paths(params)}
        return call(learnt | fixed, (jnp.asarray(x, dtype=np.float32),))

    def hidden(params: Params, x: Any) -> Any:
        """What the first layer of the head is given."""
        given: list[Any] = []
        hooks = [layer.register_forward_pre_hook(lambda _, x: given.append(x[0])) for layer in heads]
        try:
            apply(params, x)
        finally:
            for hook in hooks:
                hook.remove()
        return torchax.default_env().t2j_iso(given[0])

    trunk = _trunk(name, module)
    heads = _heads(module, learns, trunk)
    return Net(init, apply, trunk, classes=classes, hidden=hidden if trunk and heads else None)


def _check(name: str, module: Any, features: Sequence[int]) -> None:
    """Say what a bridge cannot do: what changes or draws as a module trains."""
    import torch

    for path, layer in module.named_modules():
        if isinstance(layer, torch.nn.modules.batchnorm._BatchNorm):
            what = "learns from whole batches, which clients do not share: use GroupNorm or LayerNorm"
            raise ConfigError(f"net '{name}': its batch norm '{path}' {what}, {INSTEAD}")
    lazy = [path for path, leaf in module.named_parameters() if torch.nn.parameter.is_lazy(leaf)]
    if lazy:
        raise ConfigError(f"net '{name}': '{lazy[0]}' has no size before it sees data: give the layer its sizes")
    before = {path: buffer.clone() for path, buffer in module.named_buffers()}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        state = torch.get_rng_state()
        try:
            module.train()(torch.zeros(2, *features))
        except Exception as error:  # whatever the module's own code says
            why = f"{type(error).__name__}: {error}"
            cure = "a function of the stream, def net(stream), can give it these sizes"
            raise ConfigError(f"net '{name}' does not take inputs of shape {tuple(features)}: {why}; {cure}") from error
        drew = not torch.equal(state, torch.get_rng_state())
    if drew:
        what = "draws random numbers as it trains, as dropout does, and a run could not repeat them: set p=0"
        raise ConfigError(f"net '{name}' {what}, {INSTEAD}")
    changed = [path for path, buffer in module.named_buffers() if not torch.equal(buffer, before[path])]
    if changed:
        what = f"changes its buffer '{changed[0]}' as it trains, which is no parameter: leave it out"
        raise ConfigError(f"net '{name}' {what}, {INSTEAD}")


def _trunk(name: str, module: Any) -> list[str]:
    trunk = getattr(module, "trunk", ())
    if "trunk" in dict(module.named_children()):
        return ["trunk"]
    names = [trunk] if isinstance(trunk, str) else trunk
    if not isinstance(names, list | tuple) or not all(isinstance(layer, str) for layer in names):
        raise ConfigError(f"net '{name}': its trunk must be a layer, or the names of layers, got {trunk!r}")
    return [layer.replace(".", "/") for layer in names]


def _heads(module: Any, learns: set[str], trunk: list[str]) -> list[Any]:
    """The layers that have parameters of the head."""
    names = {
        path for path in learns if not any(f"{path}.".startswith(layer.replace("/", ".") + ".") for layer in trunk)
    }
    layers = dict(module.named_modules())
    return [layers[name] for name in dict.fromkeys(path.rpartition(".")[0] for path in names) if name]


def _classes(module: Any, features: Sequence[int], learns: set[str]) -> dict[str, int]:
    """The arrays of the last linear layer, if its outputs are as many as the module's: it makes the logits."""
    import torch

    linear = [(path, layer) for path, layer in module.named_modules() if isinstance(layer, torch.nn.Linear)]
    if not linear:
        return {}
    path, layer = linear[-1]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        n_classes = module.eval()(torch.zeros(1, *features)).shape[-1]
    names = [f"{path}.{kind}".lstrip(".") for kind in ("weight", "bias")] if layer.out_features == n_classes else []
    return {name.replace(".", "/"): 0 for name in names if name in learns}


def seeded(make: Callable[[], Any], seed: int) -> Any:
    """A module whose random start depends on this seed alone."""
    import torch

    with torch.random.fork_rng(devices=[]):  # torchax's device has no generator
        torch.manual_seed(seed)
        return make()


def _array(parameter: Any) -> Any:
    return parameter.detach().numpy().astype(np.float32)  # a copy


def _tree(flat: dict[str, Any]) -> Params:
    """``{"conv.weight": ...}`` as ``{"conv": {"weight": ...}}``."""
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        *branch, last = path.split(".")
        place = tree
        for part in branch:
            place = place.setdefault(part, {})
        place[last] = leaf
    return tree


@cache
def _torchax() -> Any:
    """The library, with stand-ins for operators that it names and newer versions of PyTorch no longer have."""
    try:
        with _tolerate_missing_operators():
            import torchax

            torchax.default_env()  # loads the rest of it
    except ModuleNotFoundError as error:
        raise ConfigError(f"PyTorch modules need the extra torch (pip install 'feddrift[torch]'): {error}") from None
    except Exception as error:  # versions that do not fit together
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(f"torchax does not work with this PyTorch (pip install 'feddrift[torch]'): {why}") from error
    return torchax


class _MissingOperator(str):
    """Name of an operator that this PyTorch does not have; its overloads are missing, too."""

    def __getattr__(self, name: str) -> _MissingOperator:
        if name.startswith("__"):
            raise AttributeError(name)
        return _MissingOperator(f"{self}.{name}")


@contextmanager
def _tolerate_missing_operators() -> Iterator[None]:
    """Give torchax stand-ins for operators that it lists in its tables, and that newer versions of PyTorch removed.

    PyTorch 2.13 removed the operators on named tensors, 2.15 removed `cholesky`. No net calls them.
    """
    import torch

    packet: Any = torch._ops.OpOverloadPacket
    namespace: Any = torch._ops._OpNamespace
    find_overload = packet.__getattr__
    find_operator = namespace.__getattr__

    def find_overload_or_name(self: Any, name: str) -> Any:
        try:
            return find_overload(self, name)
        except AttributeError:
            if "name" not in name.lower():
                raise
            return _MissingOperator(f"{self}.{name}")

    def find_operator_or_name(self: Any, name: str) -> Any:
        try:
            return find_operator(self, name)
        except AttributeError:
            if self.name != "aten" or name.startswith("__"):
                raise
            return _MissingOperator(f"aten.{name}")

    with (
        mock.patch.object(packet, "__getattr__", find_overload_or_name),
        mock.patch.object(namespace, "__getattr__", find_operator_or_name),
    ):
        yield
