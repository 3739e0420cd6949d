"""Builder of composed streams from base data, label shares, concept maps and a drift pattern."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from feddrift import rng
from feddrift.data import SYNTHETIC_FAMILY, Stream
from feddrift.errors import ConfigError
from feddrift.streams import bases
from feddrift.streams.bases import Base, Values
from feddrift.streams.components import find_components, project_pictures
from feddrift.streams.maps import Labels, Map, apply_maps, find_shown_classes, normalize_maps
from feddrift.streams.recipe import SMALL_NET, Recipe
from feddrift.types import Ints

_COMPOSED = 6  # identifies composed streams in the random keys of data
_POOL, _SHARES, _BURST, _CELL = range(4)  # random keys of a stream
_ORDER, _MIX, _GROUP, _TIME_MAP, _GROUP_MAP, _CONCEPT_MAP, _BURST_MAP = range(7)  # random keys of a cell

Maps = tuple[Map, ...]


def compose_stream(
    recipe: Recipe, name: str, ids: Ints, data_dir: str | Path | None = None, data_seed: int = 0
) -> Stream:
    """Build the stream of a recipe.

    Args:
        recipe: The recipe.
        name: The name of the stream.
        ids: [T + 1, c], the concept of each client at each time step.
        data_dir: The folder of data files.
        data_seed: The seed of all random draws.

    Raises:
        ConfigError: The recipe has more components than the pictures have pixels.
        DataError: The base data cannot be read.
    """
    counts = np.full(ids.shape, recipe.rows, dtype=np.int64)
    class_counts = None
    if recipe.dirichlet is not None:
        class_counts = draw_class_counts(
            recipe.rows, ids.shape[1], recipe.n_classes, *recipe.dirichlet, data_seed=data_seed
        )
        counts = np.broadcast_to(class_counts.sum(axis=1), ids.shape).copy()
    base = bases.load_base(recipe.base, data_dir, data_seed, int(counts.sum()))
    width = base.x[0].size
    n_components = recipe.components
    if n_components is not None and n_components > width:
        raise ConfigError(f"{name}: components must be at most {width}, got {n_components}")
    axes = None if n_components is None else find_components(base, n_components)
    cells = _CellMaker(recipe, base, ids, class_counts, data_seed)
    x = np.empty((int(counts.sum()), n_components or width), dtype=np.float32)
    y = np.empty(len(x), dtype=np.int32)
    group = np.empty(len(x), dtype=np.int64)
    start = 0
    for t in range(len(ids)):
        parts = [cells.make_cell(t, c) for c in range(ids.shape[1])]
        values, labels, in_group = (np.concatenate(part) for part in zip(*parts, strict=True))
        rows = slice(start, start + len(labels))
        x[rows] = values.reshape(len(labels), -1) if axes is None else project_pictures(values, *axes)
        y[rows] = labels
        group[rows] = ~in_group
        start += len(labels)
    concepts = [normalize_maps(maps) for maps in recipe.concept_maps]
    return Stream(
        name=name,
        x=x,
        y=y,
        counts=counts,
        n_classes=base.n_classes,
        concepts=ids,
        same={k: concepts.index(maps) for k, maps in enumerate(concepts) if maps in concepts[:k]},
        family=SYNTHETIC_FAMILY,
        local=recipe.local,
        group=group if recipe.group_share else None,
        net=recipe.net or (SMALL_NET if recipe.components else None),
    )


def draw_class_counts(
    rows: int, n_clients: int, n_classes: int, alpha: float, min_rows: int, data_seed: int = 0
) -> Ints:
    """Draw [c, k], the number of rows of each class that each client has at each time step.

    All `rows * n_clients` rows are divided equally among the classes. Each client has at least `min_rows` of a class;
    the rest of the class is divided among the clients by shares from Dir(alpha, ..., alpha).

    Args:
        rows: The mean number of rows of a client.
        n_clients: The number of clients.
        n_classes: The number of classes.
        alpha: The concentration of the Dirichlet distribution; the smaller, the more the clients differ.
        min_rows: The minimum number of rows of a class.
        data_seed: The seed of the shares.
    """
    class_sizes = np.diff(np.arange(n_classes + 1) * rows * n_clients // n_classes)
    words = rng.draw_words(rng.derive_key(data_seed, "data", _COMPOSED, _SHARES), 4)
    shares = np.random.RandomState(words).dirichlet(np.full(n_clients, alpha), n_classes)  # [k, c]
    exact = shares * (class_sizes - min_rows * n_clients)[:, None]
    counts = np.floor(exact).astype(np.int64)
    for k, missing in enumerate(class_sizes - min_rows * n_clients - counts.sum(axis=1)):
        counts[k, np.argsort(counts[k] - exact[k], kind="stable")[:missing]] += 1  # the largest remainders
    return np.asarray(min_rows + counts.T, dtype=np.int64)


class _CellMaker:
    """Maker of the cells of a composed stream, in the order of time steps, then clients."""

    def __init__(self, recipe: Recipe, base: Base, ids: Ints, class_counts: Ints | None, data_seed: int) -> None:
        self.recipe = recipe
        self.base = base
        self.ids = ids
        self.class_counts = class_counts
        self.data_seed = data_seed
        self.concepts = recipe.concept_maps
        self.last_step = len(ids) - 1
        self.group_map = recipe.read_maps(recipe.group_map)
        self.burst_map = recipe.read_maps(recipe.burst_map)
        self.over_time = [recipe.read_maps(text) for text in recipe.over_time]
        n = len(base.y)
        # Points are in random order already, and a longer stream begins with the same points.
        order = rng.permutation(self._derive_key(_POOL), n) if base.has_pictures else np.arange(n)
        self.pools = _RowPools(base.y, order)
        bursts = rng.permutation(self._derive_key(_BURST), ids.size)[: round(recipe.burst_share * ids.size)]
        self.bursts = np.isin(np.arange(ids.size), bursts).reshape(ids.shape)
        self.first_rows: dict[int, Ints] = {}  # the rows of each client, for recipes with fixed rows

    def _derive_key(self, *names: int) -> rng.Words:
        return rng.derive_key(self.data_seed, "data", _COMPOSED, *names)

    def make_cell(self, t: int, c: int) -> tuple[Values, Labels, npt.NDArray[np.bool_]]:
        """Make the inputs and labels of a cell, and the mask of its rows in group 0."""
        repeats = self.recipe.fixed and t < self.last_step  # the last time step only tests, on other rows
        key = partial(self._derive_key, _CELL, 0 if repeats else t, c)
        n = self.recipe.rows if self.class_counts is None else int(self.class_counts[c].sum())
        in_group = rng.permutation(key(_GROUP), n) < round(self.recipe.group_share * n)
        concept = self._draw_concepts(t, c, n, key(_MIX))
        if self.recipe.group_share:
            concept = np.where(in_group, concept, 0)
        rows = self.first_rows.get(c) if repeats else None
        if rows is None:
            rows = self._draw_rows(c, concept, key(_ORDER))
            self.first_rows.setdefault(c, rows)
        x = self.base.scale_rows(rows)
        y = self.base.y[rows]
        if self.over_time:
            maps = self.over_time[min(t, len(self.over_time) - 1)]
            x, y = apply_maps(maps, x, y, self.base, partial(key, _TIME_MAP))
        x, y = self._apply_to_rows(in_group, self.group_map, x, y, partial(key, _GROUP_MAP))
        for k in np.unique(concept):
            x, y = self._apply_to_rows(concept == k, self.concepts[k], x, y, partial(key, _CONCEPT_MAP, int(k)))
        if self.bursts[t, c]:
            x, y = apply_maps(self.burst_map, x, y, self.base, partial(key, _BURST_MAP))
        return x, y, in_group

    def _draw_concepts(self, t: int, c: int, n: int, key: rng.Words) -> Ints:
        """Draw the concept of each row of a cell; in mixed recipes a new concept replaces the last one gradually."""
        concept = self.ids[t, c]
        previous = self.ids[max(t - 1, 0), c]
        if not self.recipe.mixed or concept == previous:
            return np.full(n, concept)
        is_new = rng.uniform(key, (n,)) < (np.arange(n) + 0.5) / n  # a probability that rises from 0 to 1
        return np.asarray(np.where(is_new, concept, previous), dtype=np.int64)

    def _draw_rows(self, c: int, concept: Ints, key: rng.Words) -> Ints:
        """Draw the rows of a cell, of the classes that its client has or that its concepts show."""
        if self.class_counts is not None:
            rows: Ints = np.concatenate([self.pools.take_rows((k,), n) for k, n in enumerate(self.class_counts[c])])
            return np.take(rows, rng.permutation(key, len(rows)))
        rows = np.empty(len(concept), dtype=np.int64)
        for k in np.unique(concept):
            classes = find_shown_classes(self.concepts[k])
            drawn = self.pools.take_rows(classes, int((concept == k).sum()))
            rows[concept == k] = np.take(drawn, rng.permutation(key, len(drawn))) if classes else drawn
        return rows

    def _apply_to_rows(
        self, mask: npt.NDArray[np.bool_], maps: Maps, x: Values, y: Labels, key: partial[rng.Words]
    ) -> tuple[Values, Labels]:
        """Apply the maps to the selected rows of a cell."""
        if mask.all():
            return apply_maps(maps, x, y, self.base, key)
        if mask.any():
            x = x.copy()
            y = y.copy()
            x[mask], y[mask] = apply_maps(maps, x[mask], y[mask], self.base, key)
        return x, y


class _RowPools:
    """Rows in a random order, by class; a row is repeated only when no unused row of its class is left."""

    def __init__(self, y: Labels, order: Ints) -> None:
        self.y = y
        self.order = order
        self.rows: dict[tuple[int, ...], Ints] = {}
        self.is_new = np.ones(len(y), dtype=bool)

    def take_rows(self, classes: tuple[int, ...], n: int) -> Ints:
        """Take the next n rows, equally many of each of these classes, or of any class if none is given."""
        if len(classes) > 1:
            ends = n * np.arange(len(classes) + 1) // len(classes)
            return np.concatenate(
                [self.take_rows((k,), m) for k, m in zip(classes, np.diff(ends).tolist(), strict=True)]
            )
        if classes not in self.rows:
            self.rows[classes] = self.order[np.isin(self.y[self.order], classes)] if classes else self.order
        rows = self.rows[classes]
        taken = rows[self.is_new[rows]][:n]
        self.is_new[taken] = False
        if len(taken) == n:
            return taken
        self.is_new[rows] = True  # start over
        again = np.take(rows, np.arange(n - len(taken)), mode="wrap")
        self.is_new[again] = False
        return np.concatenate([taken, again])
