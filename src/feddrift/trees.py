"""Trees of parameters: nested dicts, lists and tuples of arrays, which a net may divide into a trunk and a head.

`jax.tree_util` is not used, because algorithms work on these trees without JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from feddrift.errors import ConfigError
from feddrift.types import Models, Net, Params


def tree_map(f: Callable[..., Any], tree: Params, *others: Params) -> Params:
    """Apply f to every array of a tree.

    Args:
        f: The function. Its arguments are an array and the arrays at the same path of the other trees.
        tree: The tree that defines the structure of the result.
        others: Trees of the same structure.
    """
    if isinstance(tree, dict):
        return {k: tree_map(f, v, *(o[k] for o in others)) for k, v in tree.items()}
    if isinstance(tree, list | tuple):
        branches = [tree_map(f, v, *(o[i] for o in others)) for i, v in enumerate(tree)]
        return type(tree)(*branches) if hasattr(tree, "_fields") else type(tree)(branches)  # _fields: a named tuple
    return f(tree, *others)


def tree_leaves(tree: Params) -> list[Any]:
    """Return the arrays of a tree; those of a dictionary in the sorted order of its keys."""
    return [leaf for _, leaf in tree_paths(tree)]


def tree_paths(tree: Params, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the arrays of a tree with their paths, such as "params/Dense_0/kernel", in the order of `tree_leaves`.

    Args:
        tree: The tree.
        path: The path of the tree itself, if it is a branch of another tree.
    """
    prefix = path + "/" if path else ""
    if isinstance(tree, dict):
        for key in sorted(tree):
            yield from tree_paths(tree[key], f"{prefix}{key}")
    elif isinstance(tree, list | tuple):
        for i, branch in enumerate(tree):
            yield from tree_paths(branch, f"{prefix}{i}")
    else:
        yield path, tree


def mark_trunk(net: Net, params: Params) -> Params:
    """Return a tree like params that is True where an array belongs to the net's trunk.

    Raises:
        ConfigError: The net names parameters that it does not have.
    """
    names = [path for path, _ in tree_paths(params)]
    if callable(net.trunk):
        in_trunk = [bool(net.trunk(path)) for path in names]
    else:
        for name in net.trunk:
            if not any(_is_within(path, name) for path in names):
                raise ConfigError(f"the net has no parameters '{name}' for its trunk (there are: {', '.join(names)})")
        in_trunk = [any(_is_within(path, name) for name in net.trunk) for path in names]
    return fill_tree(params, iter(in_trunk))


def find_class_axes(net: Net, params: Params) -> Params:
    """Return a tree like params with the axis of each array (of one model) that counts classes; -1: none.

    Raises:
        ConfigError: The net names arrays that it does not have.
    """
    axes = dict(net.classes)
    names = [path for path, _ in tree_paths(params)]
    for name in axes:
        if name not in names:
            raise ConfigError(f"the net has no array '{name}' that counts classes (there are: {', '.join(names)})")
    return fill_tree(params, iter([axes.get(path, -1) for path in names]))


def has_trunk(models: Models) -> bool:
    """Return True if the net of these models has both a trunk and a head."""
    return models.trunk is not None and len(set(tree_leaves(models.trunk))) == 2


def _is_within(path: str, branch: str) -> bool:
    return path == branch or path.startswith(branch + "/")


def split_trunk_and_head(params: Params, trunk: Params) -> tuple[list[Any], list[Any]]:
    """Return the arrays of the trunk, and those of the head.

    Args:
        params: The parameters.
        trunk: A tree like them that is True where an array belongs to the trunk.
    """
    marked = list(zip(tree_leaves(params), tree_leaves(trunk), strict=True))
    return [leaf for leaf, in_trunk in marked if in_trunk], [leaf for leaf, in_trunk in marked if not in_trunk]


def join_trunk_and_head(trunk_leaves: Sequence[Any], head_leaves: Sequence[Any], trunk: Params) -> Params:
    """Return the parameters from which `split_trunk_and_head` made these arrays.

    Args:
        trunk_leaves: The arrays of the trunk.
        head_leaves: The arrays of the head.
        trunk: A tree like the parameters that is True where an array belongs to the trunk.
    """
    of_trunk = iter(trunk_leaves)
    of_head = iter(head_leaves)
    return fill_tree(trunk, (next(of_trunk if in_trunk else of_head) for in_trunk in tree_leaves(trunk)))


def fill_tree(tree: Params, values: Iterator[Any]) -> Params:
    """Return a tree of the same structure whose leaves are these values, in the order of `tree_leaves`."""
    if isinstance(tree, dict):
        filled = {key: fill_tree(tree[key], values) for key in sorted(tree)}
        return {key: filled[key] for key in tree}
    if isinstance(tree, list | tuple):
        branches = [fill_tree(branch, values) for branch in tree]
        return type(tree)(*branches) if hasattr(tree, "_fields") else type(tree)(branches)
    return next(values)


def map_trunk_and_head(f: Callable[..., Any], models: Models, head: Any, trunk: Any, *others: Params) -> Params:
    """Apply f to every parameter array, with one last argument for arrays of heads and another one for those of trunks.

    Args:
        f: The function. Its arguments are an array of `models`, the arrays at the same path of the other trees, and
            `head` or `trunk`.
        models: The models.
        head: The last argument for arrays with an axis of models.
        trunk: The last argument for arrays with an axis of families.
        others: Trees like the parameters.

    Returns:
        A tree like the parameters with the results of f.
    """
    if models.trunk is None:
        return tree_map(lambda *arrays: f(*arrays, head), models.params, *others)
    return tree_map(
        lambda leaf, in_trunk, *rest: f(leaf, *rest, trunk if in_trunk else head), models.params, models.trunk, *others
    )
