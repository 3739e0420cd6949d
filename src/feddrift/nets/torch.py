"""PyTorch modules as nets: JAX traces the code of the module with torchax (extra ``torch``).

A net is ``apply(params, x)``, without a random key or a state. Modules with dropout or batch norm are refused, and
buffers and frozen parameters are constants.
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
from feddrift.trees import tree_paths
from feddrift.types import Net, Params

ALTERNATIVE_HINT = "or make it a model with init, logits and fit (docs/extend-nets.md)"


def convert_torch_module(name: str, make: Callable[[], Any], features: Sequence[int]) -> Net:
    """Convert a PyTorch module to a net.

    Parameters are in a tree by the names of layers: ``conv/weight``. The trunk is the layer with the name trunk, or the
    layers whose names are in the attribute `trunk`.

    Args:
        name: The name of the net, for messages.
        make: Returns the module; it is called again for each new initialisation.
        features: The shape of an input.

    Raises:
        ConfigError: If the module changes or draws random numbers while it trains, or does not take such inputs.
    """
    torchax = _import_torchax()
    import jax.numpy as jnp  # after torchax, which configures JAX

    module = call_with_seed(make, 0)
    _check_module(name, module, features)
    trainable = {path for path, parameter in module.named_parameters() if parameter.requires_grad}
    classes = _find_class_arrays(module, features, trainable)
    states, call = torchax.extract_jax(module.eval())
    fixed = {path: array for path, array in states.items() if path not in trainable}

    def init(key: rng.Words) -> Params:
        new_module = call_with_seed(make, int(key[0]) << 32 | int(key[1]))
        return _build_tree({path: _to_array(leaf) for path, leaf in new_module.named_parameters() if path in trainable})

    def apply(params: Params, x: Any) -> Any:
        leaves = {path.replace("/", "."): jnp.asarray(leaf) for path, leaf in tree_paths(params)}
        return call(leaves | fixed, (jnp.asarray(x, dtype=np.float32),))

    def hidden(params: Params, x: Any) -> Any:
        """Return the input of the first layer of the head."""
        captured: list[Any] = []
        hooks = [layer.register_forward_pre_hook(lambda _, x: captured.append(x[0])) for layer in heads]
        try:
            apply(params, x)
        finally:
            for hook in hooks:
                hook.remove()
        return torchax.default_env().t2j_iso(captured[0])

    trunk = _find_trunk(name, module)
    heads = _find_head_layers(module, trainable, trunk)
    return Net(init, apply, trunk, classes=classes, hidden=hidden if trunk and heads else None)


def _check_module(name: str, module: Any, features: Sequence[int]) -> None:
    """Refuse modules that change their buffers or draw random numbers while they train."""
    import torch

    for path, layer in module.named_modules():
        if isinstance(layer, torch.nn.modules.batchnorm._BatchNorm):
            problem = "learns from whole batches, which clients do not share: use GroupNorm or LayerNorm"
            raise ConfigError(f"net '{name}': its batch norm '{path}' {problem}, {ALTERNATIVE_HINT}")
    lazy = [path for path, leaf in module.named_parameters() if torch.nn.parameter.is_lazy(leaf)]
    if lazy:
        raise ConfigError(f"net '{name}': '{lazy[0]}' has no size before it sees data: give the layer its sizes")
    before = {path: buffer.clone() for path, buffer in module.named_buffers()}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        state = torch.get_rng_state()
        try:
            module.train()(torch.zeros(2, *features))
        except Exception as error:  # the module's own code may raise anything
            why = f"{type(error).__name__}: {error}"
            cure = "a function of the stream, def net(stream), can give it these sizes"
            raise ConfigError(f"net '{name}' does not take inputs of shape {tuple(features)}: {why}; {cure}") from error
        drew = not torch.equal(state, torch.get_rng_state())
    if drew:
        problem = "draws random numbers as it trains, as dropout does, and a run could not repeat them: set p=0"
        raise ConfigError(f"net '{name}' {problem}, {ALTERNATIVE_HINT}")
    changed = [path for path, buffer in module.named_buffers() if not torch.equal(buffer, before[path])]
    if changed:
        problem = f"changes its buffer '{changed[0]}' as it trains, which is not a parameter: leave it out"
        raise ConfigError(f"net '{name}' {problem}, {ALTERNATIVE_HINT}")


def _find_trunk(name: str, module: Any) -> list[str]:
    trunk = getattr(module, "trunk", ())
    if "trunk" in dict(module.named_children()):
        return ["trunk"]
    names = [trunk] if isinstance(trunk, str) else trunk
    if not isinstance(names, list | tuple) or not all(isinstance(layer, str) for layer in names):
        raise ConfigError(f"net '{name}': its trunk must be a layer, or the names of layers, got {trunk!r}")
    return [layer.replace(".", "/") for layer in names]


def _find_head_layers(module: Any, trainable: set[str], trunk: list[str]) -> list[Any]:
    """Return the layers with parameters of the head."""
    names = {
        path for path in trainable if not any(f"{path}.".startswith(layer.replace("/", ".") + ".") for layer in trunk)
    }
    layers = dict(module.named_modules())
    return [layers[name] for name in dict.fromkeys(path.rpartition(".")[0] for path in names) if name]


def _find_class_arrays(module: Any, features: Sequence[int], trainable: set[str]) -> dict[str, int]:
    """Return the arrays of the last linear layer if it computes the logits: if it has as many outputs as the module."""
    import torch

    linear = [(path, layer) for path, layer in module.named_modules() if isinstance(layer, torch.nn.Linear)]
    if not linear:
        return {}
    path, layer = linear[-1]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        n_classes = module.eval()(torch.zeros(1, *features)).shape[-1]
    names = [f"{path}.{kind}".lstrip(".") for kind in ("weight", "bias")] if layer.out_features == n_classes else []
    return {name.replace(".", "/"): 0 for name in names if name in trainable}


def call_with_seed(make: Callable[[], Any], seed: int) -> Any:
    """Make a module whose random initialisation depends on this seed only."""
    import torch

    with torch.random.fork_rng(devices=[]):  # torchax's device has no generator
        torch.manual_seed(seed)
        return make()


def _to_array(parameter: Any) -> Any:
    return parameter.detach().numpy().astype(np.float32)  # a copy


def _build_tree(flat: dict[str, Any]) -> Params:
    """Convert ``{"conv.weight": ...}`` to ``{"conv": {"weight": ...}}``."""
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        *branch, last = path.split(".")
        node = tree
        for part in branch:
            node = node.setdefault(part, {})
        node[last] = leaf
    return tree


@cache
def _import_torchax() -> Any:
    """Import torchax, with stand-ins for operators that newer versions of PyTorch no longer have."""
    try:
        with _tolerate_missing_operators():
            import torchax

            torchax.default_env()  # imports the rest of torchax
    except ModuleNotFoundError as error:
        raise ConfigError(f"PyTorch modules need the extra torch (pip install 'feddrift[torch]'): {error}") from None
    except Exception as error:  # incompatible versions
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
