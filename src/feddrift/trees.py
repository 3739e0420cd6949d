"""Parameters as trees: nested dicts, lists and tuples of arrays, which a net may part into a trunk and a head.

Not `jax.tree_util`, since algorithms work on them and must not need JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from feddrift.errors import ConfigError
from feddrift.types import Models, Net, Params


def tree_map(f: Callable[..., Any], tree: Params, *others: Params) -> Params:
    """Apply f to every array of nested dicts, lists and tuples."""
    if isinstance(tree, dict):
        return {k: tree_map(f, v, *(o[k] for o in others)) for k, v in tree.items()}
    if isinstance(tree, list | tuple):
        branches = [tree_map(f, v, *(o[i] for o in others)) for i, v in enumerate(tree)]
        return type(tree)(*branches) if hasattr(tree, "_fields") else type(tree)(branches)  # a named tuple, or plain
    return f(tree, *others)


def leaves(tree: Params) -> list[Any]:
    """The arrays of a tree, dictionaries in the order of their keys."""
    return [leaf for _, leaf in paths(tree)]


def paths(tree: Params, path: str = "") -> Iterator[tuple[str, Any]]:
    """The arrays of a tree with their paths, such as "params/Dense_0/kernel", in the order of `leaves`."""
    below = path + "/" if path else ""
    if isinstance(tree, dict):
        for key in sorted(tree):
            yield from paths(tree[key], f"{below}{key}")
    elif isinstance(tree, list | tuple):
        for i, branch in enumerate(tree):
            yield from paths(branch, f"{below}{i}")
    else:
        yield path, tree


def trunk_of(net: Net, params: Params) -> Params:
    """A tree like params: True where an array belongs to the net's trunk."""
    names = [path for path, _ in paths(params)]
    if callable(net.trunk):
        in_trunk = [bool(net.trunk(path)) for path in names]
    else:
        for name in net.trunk:
            if not any(_within(path, name) for path in names):
                raise ConfigError(f"the net has no parameters '{name}' for its trunk (there are: {', '.join(names)})")
        in_trunk = [any(_within(path, name) for name in net.trunk) for path in names]
    return refill(params, iter(in_trunk))


def classes_of(net: Net, params: Params) -> Params:
    """A tree like params: which axis of an array (of one model) counts classes, -1: none."""
    axes, names = dict(net.classes), [path for path, _ in paths(params)]
    for name in axes:
        if name not in names:
            raise ConfigError(f"the net has no array '{name}' that counts classes (there are: {', '.join(names)})")
    return refill(params, iter([axes.get(path, -1) for path in names]))


def has_trunk(models: Models) -> bool:
    """Whether these models can share something and differ in something."""
    return models.trunk is not None and len(set(leaves(models.trunk))) == 2


def _within(path: str, branch: str) -> bool:
    return path == branch or path.startswith(branch + "/")


def split(params: Params, trunk: Params) -> tuple[list[Any], list[Any]]:
    """The arrays of the trunk, and those of the head."""
    marked = list(zip(leaves(params), leaves(trunk), strict=True))
    return [leaf for leaf, shared in marked if shared], [leaf for leaf, shared in marked if not shared]


def unsplit(trunk_leaves: Sequence[Any], head_leaves: Sequence[Any], trunk: Params) -> Params:
    """The parameters whose `split` these are."""
    of_trunk, of_head = iter(trunk_leaves), iter(head_leaves)
    return refill(trunk, (next(of_trunk if shared else of_head) for shared in leaves(trunk)))


def refill(tree: Params, values: Iterator[Any]) -> Params:
    """A tree of the same shape with these leaves, in the order of `leaves`."""
    if isinstance(tree, dict):
        filled = {key: refill(tree[key], values) for key in sorted(tree)}
        return {key: filled[key] for key in tree}
    if isinstance(tree, list | tuple):
        branches = [refill(branch, values) for branch in tree]
        return type(tree)(*branches) if hasattr(tree, "_fields") else type(tree)(branches)
    return next(values)


def map_trunk_and_head(f: Callable[..., Any], models: Models, head: Any, trunk: Any, *others: Params) -> Params:
    """Map f over all arrays, with `head` for those that every model has and `trunk` for those that a family shares."""
    if models.trunk is None:
        return tree_map(lambda *arrays: f(*arrays, head), models.params, *others)
    return tree_map(
        lambda leaf, shared, *rest: f(leaf, *rest, trunk if shared else head), models.params, models.trunk, *others
    )
