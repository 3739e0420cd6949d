"""Operations on the model axis: merge, copy, join and replace models.

Parameters are NumPy arrays, or views of arrays on a device: their copies and joins stay on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from feddrift import rng
from feddrift._internal.device_arrays import concatenate_arrays
from feddrift._renamed import forward_renamed_names
from feddrift.errors import ConfigError
from feddrift.trees import find_class_axes, map_trunk_and_head, mark_trunk, tree_map
from feddrift.types import Bools, Floats, Ints, Models, Net, Params, Trains

if not TYPE_CHECKING:
    __getattr__ = forward_renamed_names(__name__)


def get_params(models: Models, m: int) -> Params:
    """Return the parameters of the model at position m, without the model axis."""
    return map_trunk_and_head(lambda leaf, row: leaf[row], models, m, models.trunk_index[m])


def mix(models: Models, A: npt.ArrayLike, ids: Sequence[int], family: Sequence[int] | None = None) -> Models:
    """Return a stack whose model k has the id ids[k] and is the sum of A[k, m] times model m.

    A row with two weights merges two models; a row with a single 1 copies a model.

    Args:
        models: Shared models without masks.
        A: The weights [k, m].
        ids: The ids of the new models.
        family: The family of each new model. By default a model that keeps the id of one of its parts stays in its
            family if all parts belong to this family; any other model founds a family.

    Raises:
        ValueError: The models are private or masked, or the arguments do not fit together.

    >>> two = Models({"b": np.array([[2.0], [4.0]])}, ids=(0, 1))
    >>> mix(two, [[0.5, 0.5], [1, 0]], ids=(0, 2)).params["b"].tolist()
    [[3.0], [2.0]]
    """
    if models.mask is not None:
        raise ValueError("models with masks cannot be mixed: they use different inputs")
    if models.private.any():
        raise ValueError("private models stay with their clients: they cannot be mixed")
    weights = np.asarray(A, dtype=np.float64)
    if weights.shape != (len(ids), len(models)):
        raise ValueError(f"mix needs a matrix of shape {(len(ids), len(models))}, got {weights.shape}")
    new_ids = tuple(int(i) for i in ids)
    if family is None:
        family = [_find_family(models, i, np.flatnonzero(row)) for i, row in zip(new_ids, weights, strict=True)]
    mixed = Models(None, new_ids, family=tuple(int(i) for i in family), trunk=models.trunk, classes=models.classes)
    trunk_weights = np.zeros((len(weights), len(models.families)))
    np.add.at(trunk_weights.T, models.trunk_index, weights.T)
    trunk_weights[np.abs(trunk_weights - 1) < 1e-12] = 1  # a mean within a family copies its trunk exactly
    trunk_weights = _select_trunks(mixed, trunk_weights)
    return replace(mixed, params=map_trunk_and_head(_mix_leaf, models, weights, trunk_weights))


def mix_rows(models: Models, A: npt.ArrayLike) -> Models:
    """Mix heads class by class: row k of the head of model i becomes the sum of A[k, i, j] times row k of model j's.

    The row of a class are the weights and the bias of its logit. Trunks, ids and families do not change.

    Args:
        models: Shared models.
        A: The weights [class, m, m].

    Raises:
        ConfigError: The net does not name the axes of its head that count classes.
        ValueError: The models are private, or A has another shape.

    >>> two = Models({"b": np.array([[2.0, 1.0], [4.0, 3.0]])}, ids=(0, 1), classes={"b": 0})
    >>> mix_rows(two, [[[0.5, 0.5], [0.5, 0.5]], [[1, 0], [0, 1]]]).params["b"].tolist()
    [[3.0, 1.0], [3.0, 3.0]]
    """
    weights = np.asarray(A, dtype=np.float64)
    if models.private.any():
        raise ValueError("private models stay with their clients: they cannot be mixed")

    def mix_classes(leaf: Any, axis: int, in_trunk: bool) -> Any:
        if in_trunk:
            return leaf
        by_class = np.moveaxis(leaf, 1 + _require_class_axis(axis), 0)  # [k, m, ...]
        expected = len(by_class), len(models), len(models)
        if weights.shape != expected:
            raise ValueError(f"mix_rows needs an array of shape {expected}, got {weights.shape}")
        mixed = [_mix_leaf(part, class_weights) for part, class_weights in zip(by_class, weights, strict=True)]
        return np.moveaxis(np.stack(mixed), 0, 1 + axis)

    return replace(models, params=map_trunk_and_head(mix_classes, models, False, True, _get_class_axes(models)))


def class_rows(models: Models) -> Floats:
    """Return [m, k, parameter], the weights and the bias of the logit of class k in each head."""
    parts: list[Any] = []

    def gather(leaf: Any, axis: int, in_trunk: bool) -> None:
        if not in_trunk:
            by_class = np.moveaxis(leaf, 1 + _require_class_axis(axis), 1)  # [m, k, ...]
            parts.append(by_class.reshape(*by_class.shape[:2], -1).astype(np.float64))

    map_trunk_and_head(gather, models, False, True, _get_class_axes(models))
    return np.concatenate(parts, axis=2)


def _get_class_axes(models: Models) -> Params:
    return tree_map(lambda _: -1, models.params) if models.classes is None else models.classes


def _require_class_axis(axis: int) -> int:
    if axis < 0:
        raise ConfigError("the net must name the axis of each array of its head that counts classes: Net(classes=...)")
    return axis


def take(
    models: Models,
    positions: Sequence[int] | Ints,
    ids: Sequence[int],
    family: Sequence[int] | None = None,
    owner: Sequence[int] | None = None,
) -> Models:
    """Copy the models at these positions, bit for bit.

    Args:
        models: All models.
        positions: The positions of the originals; a position may repeat.
        ids: The ids of the copies.
        family: The family of each copy. By default a copy that keeps its id keeps its family, and any other founds one.
        owner: The client whose private model each copy is, -1: shared. By default a copy has the owner of its original.

    Raises:
        ValueError: The parameters of a private model are only at its owner, and its copy would have another id; or
            models of different trunks would be one family.
    """
    rows = np.asarray(positions, dtype=np.int64)
    new_ids = tuple(int(i) for i in ids)
    if family is None:
        family = [_find_family(models, i, [m]) for i, m in zip(new_ids, rows, strict=True)]
    if any(models.held[m] and models.ids[m] != i for m, i in zip(rows, new_ids, strict=True)):
        raise ValueError("only the owner has the parameters of this model: it cannot be copied under another id")
    copies = Models(
        params=None,
        ids=new_ids,
        mask=None if models.mask is None else models.mask[rows],
        family=tuple(int(i) for i in family),
        trunk=models.trunk,
        owner=tuple(models.owner[m] for m in rows) if owner is None else tuple(int(c) for c in owner),
        held=tuple(models.held[m] for m in rows),
        classes=models.classes,
    )
    trunk_rows = _select_trunks(copies, models.trunk_index[rows])
    return replace(copies, params=map_trunk_and_head(lambda leaf, part: leaf[part], models, rows, trunk_rows))


def _find_family(models: Models, new_id: int, sources: Sequence[int] | Ints) -> int:
    """Return the family of a new model that is mixed from the models at `sources`.

    It is their family if the new model has the id of one of them, and all belong to one family; else a new family.
    """
    families = {models.family[m] for m in sources}
    keeps_id = any(models.ids[m] == new_id for m in sources)
    return families.pop() if keeps_id and len(families) == 1 else new_id


def _select_trunks(models: Models, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return one of the rows [m, ...] for each family; all models of a family must have the same row."""
    _, first = np.unique(models.trunk_index, return_index=True)
    if not np.array_equal(rows, rows[first][models.trunk_index]):
        raise ValueError(f"models of different trunks cannot be one family, got {models.family}")
    return rows[first]


def _mix_leaf(leaf: Any, weights: Floats) -> Any:
    out = np.zeros((len(weights), *leaf.shape[1:]), dtype=leaf.dtype)
    for k, m in np.argwhere(weights):  # weights of 0 are skipped, since 0 times NaN is NaN
        out[k] += leaf.dtype.type(weights[k, m]) * leaf[m]
    return out


def join(first: Models, *others: Models) -> Models:
    """Concatenate stacks of models; families with the same name must have equal trunks.

    Raises:
        ValueError: Two stacks have a model of the same id, or trunks or masks do not fit together.
    """
    stacks = (first, *others)
    ids = list(first.ids)
    known_families = set(first.families)
    is_new: list[Bools] = []  # for each other stack: [family], True for families that the stacks before it do not have
    for other in others:
        if set(ids) & set(other.ids):
            raise ValueError(
                f"models that are joined need different ids, got {tuple(ids)} and {other.ids}: "
                "take(models, positions, ids) makes copies under new ones"
            )
        if (first.mask is None) != (other.mask is None):
            raise ValueError("models with and without a mask cannot be joined")
        ids += other.ids
        is_new.append(np.array([name not in known_families for name in other.families], dtype=bool))
        known_families |= set(other.families)

    def join_leaves(leaf: Any, *arguments: Any) -> Any:
        *leaves, in_trunk = arguments
        if not in_trunk:
            return concatenate_arrays([leaf, *leaves])
        return concatenate_arrays([leaf, *(other[new] for other, new in zip(leaves, is_new, strict=True))])

    def check_trunks(*arguments: Any) -> None:
        *leaves, in_trunk = arguments
        trunk_of_family: dict[int, Any] = {}
        for models, leaf in zip(stacks, leaves, strict=True) if in_trunk else ():
            for f, name in enumerate(models.families):
                if name in trunk_of_family and not np.array_equal(trunk_of_family[name], leaf[f], equal_nan=True):
                    families = " and ".join(str(models.family) for models in stacks)
                    raise ValueError(f"models of different trunks cannot be one family, got {families}")
                trunk_of_family.setdefault(name, leaf[f])

    trees = [other.params for other in others]
    if not all(new.all() for new in is_new):
        map_trunk_and_head(check_trunks, first, False, True, *trees)
    params = map_trunk_and_head(join_leaves, first, False, True, *trees)
    mask = None if first.mask is None else np.concatenate([np.asarray(models.mask) for models in stacks])
    family, owner, held = (
        tuple(value for models in stacks for value in getattr(models, name)) for name in ("family", "owner", "held")
    )
    return Models(
        params, tuple(ids), mask=mask, family=family, trunk=first.trunk, owner=owner, held=held, classes=first.classes
    )


def graft(heads: Models, stock: Models, family: int) -> Models:
    """Combine the heads of models with the trunk of a family of another stack.

    Args:
        heads: The models whose heads are used.
        stock: The stack with the trunk.
        family: The name of the family in `stock`, to which the results belong.
    """
    row = [stock.families.index(family)]
    params = map_trunk_and_head(
        lambda own, other, in_trunk: other[row] if in_trunk else own, heads, False, True, stock.params
    )
    return replace(heads, family=(family,) * len(heads), params=params)


def substitute_models(models: Models, others: Models) -> Models:
    """Replace the parameters of models by those of others, and keep their ids.

    Args:
        models: The models.
        others: As many models, which replace those at the same positions; or one model, which replaces all.

    Raises:
        ValueError: The number of other models is neither 1 nor that of the models.
    """
    if len(others) not in (1, len(models)):
        raise ValueError(f"expected one model, or {len(models)} of them, got {len(others)}")
    position = np.arange(len(models)) % len(others)
    _, first = np.unique(models.trunk_index, return_index=True)
    params = map_trunk_and_head(lambda leaf, rows: leaf[rows], others, position, others.trunk_index[position[first]])
    return replace(models, params=params)


def unused_id(models: Models) -> int:
    """Return an id that no model and no family has."""
    return max(*models.ids, *models.family) + 1


def get_private_models(models: Models, start: Models, n_clients: int) -> Models:
    """Return one private model per client, in client order: the first that the client owns, else a copy of `start`.

    Args:
        models: The models, of which some may be private.
        start: A stack of one model. Its copies, such as those for clients that joined later, get new ids.
        n_clients: The number of clients.

    >>> start = Models({"b": np.zeros((1, 2))}, ids=(0,))
    >>> two = get_private_models(start, start, 2)
    >>> two.ids, two.owner, get_private_models(two, start, 3).ids
    ((1, 2), (0, 1), (1, 2, 3))
    """
    position_of_client = {c: m for m, c in reversed(list(enumerate(models.owner))) if c >= 0}
    newcomers = [c for c in range(n_clients) if c not in position_of_client]
    if newcomers:
        free_id = unused_id(models)
        ids = range(free_id, free_id + len(newcomers))
        position_of_client |= {c: len(models) + k for k, c in enumerate(newcomers)}
        models = join(models, take(start, [0] * len(newcomers), ids, owner=newcomers))
    positions = [position_of_client[c] for c in range(n_clients)]
    return take(models, positions, [models.ids[m] for m in positions])


def replace_model(models: Models, m: int, newcomer: Models) -> Models:
    """Replace the model at position m by another one, which gets the id of the old one and a new family.

    Args:
        models: All models.
        m: The position of a model that is the only one of its family, or not its founder.
        newcomer: A stack of one model.
    """
    free_id = unused_id(models)
    order = [len(models) if k == m else k for k in range(len(models))]
    return take(join(models, take(newcomer, [0], [free_id])), order, models.ids)


def init_models(net: Net, seed: int, n: int = 1, distinct: bool = False) -> Models:
    """Initialise new models with the ids 0..n-1.

    Args:
        net: The architecture.
        seed: The seed of the run.
        n: The number of models.
        distinct: If True, each model is drawn with its own random key; else all are copies of the first.
    """
    inits = [net.init(rng.derive_key(seed, "init", i if distinct else 0)) for i in range(n)]
    params = tree_map(lambda *leaves: np.stack(leaves), *inits)
    return Models(params, tuple(range(n)), trunk=mark_trunk(net, params), classes=find_class_axes(net, params))


def restore_untrained_part(before: Models, trained: Models, trains: Trains) -> Models:
    """Return trained models whose untrained part is exactly as before.

    An average of equal arrays may differ from them in its last bits.

    Args:
        before: The models before training.
        trained: The models after training.
        trains: The part that was trained.
    """
    if trains == "all":
        return trained
    params = map_trunk_and_head(
        lambda new, old, part: new if part == trains else old, trained, "head", "trunk", before.params
    )
    return replace(trained, params=params)
