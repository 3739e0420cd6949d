"""One generator for many streams: base data x label shares x concept maps x who has which concept when."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from feddrift import rng
from feddrift.data import MADE, Stream
from feddrift.errors import ConfigError
from feddrift.streams import bases
from feddrift.streams.bases import Base, Values
from feddrift.streams.components import components, project
from feddrift.streams.maps import Labels, Map, apply, meaning, shown
from feddrift.streams.recipe import SMALL_NET, Recipe
from feddrift.types import Ints

_COMPOSED = 6  # its name among the random keys of data
_POOL, _SHARES, _BURST, _CELL = range(4)  # what is drawn there: of all, or of a cell:
_ORDER, _MIX, _GROUP, _OVER_TIME, _OF_GROUP, _OF_CONCEPT, _OF_BURST = range(7)

Maps = tuple[Map, ...]


def compose(recipe: Recipe, name: str, ids: Ints, data_dir: str | Path | None = None, data_seed: int = 0) -> Stream:
    """The stream of a recipe in which the clients have these concepts [T + 1, c]; another data seed draws others."""
    counts = np.full(ids.shape, recipe.rows, dtype=np.int64)
    by_class = None
    if recipe.dirichlet is not None:
        by_class = dirichlet(recipe.rows, ids.shape[1], recipe.n_classes, *recipe.dirichlet, data_seed=data_seed)
        counts = np.broadcast_to(by_class.sum(axis=1), ids.shape).copy()
    base = bases.load(recipe.base, data_dir, data_seed, int(counts.sum()))
    width, n_components = base.x[0].size, recipe.components
    if n_components is not None and n_components > width:
        raise ConfigError(f"{name}: components must be at most {width}, got {n_components}")
    axes = None if n_components is None else components(base, n_components)
    cells = _Cells(recipe, base, ids, by_class, data_seed)
    x = np.empty((int(counts.sum()), n_components or width), dtype=np.float32)
    y, group = np.empty(len(x), dtype=np.int32), np.empty(len(x), dtype=np.int64)
    end = 0
    for t in range(len(ids)):
        made = [cells.made(t, c) for c in range(ids.shape[1])]
        values, labels, in_group = (np.concatenate(part) for part in zip(*made, strict=True))
        rows = slice(end, end := end + len(labels))
        x[rows] = values.reshape(len(labels), -1) if axes is None else project(values, *axes)
        y[rows], group[rows] = labels, ~in_group
    meanings = [meaning(of_concept) for of_concept in recipe.concept_maps]
    return Stream(
        name=name,
        x=x,
        y=y,
        counts=counts,
        n_classes=base.n_classes,
        concepts=ids,
        same={k: meanings.index(of_concept) for k, of_concept in enumerate(meanings) if of_concept in meanings[:k]},
        family=MADE,
        local=recipe.local,
        group=group if recipe.group_share else None,
        net=recipe.net or (SMALL_NET if recipe.components else None),
    )


def dirichlet(rows: int, n_clients: int, n_classes: int, alpha: float, least: int, data_seed: int = 0) -> Ints:
    """How many rows [c, k] of each class each client has at a time step, of n_clients x rows in all.

    Everybody has so many at least; of what remains of a class the clients' shares are from Dir(alpha, ..., alpha).
    """
    of_class = np.diff(np.arange(n_classes + 1) * rows * n_clients // n_classes)
    words = rng.bits(rng.derive(data_seed, "data", _COMPOSED, _SHARES), 4)
    shares = np.random.RandomState(words).dirichlet(np.full(n_clients, alpha), n_classes)  # [k, c]
    exact = shares * (of_class - least * n_clients)[:, None]
    counts = np.floor(exact).astype(np.int64)
    for k, missing in enumerate(of_class - least * n_clients - counts.sum(axis=1)):
        counts[k, np.argsort(counts[k] - exact[k], kind="stable")[:missing]] += 1  # the largest remainders
    return np.asarray(least + counts.T, dtype=np.int64)


class _Cells:
    """The cells of a composed stream, made one after the other: time outer, client inner."""

    def __init__(self, recipe: Recipe, base: Base, ids: Ints, by_class: Ints | None, data_seed: int) -> None:
        self.recipe, self.base, self.ids, self.by_class, self.data_seed = recipe, base, ids, by_class, data_seed
        self.concepts, self.last = recipe.concept_maps, len(ids) - 1
        self.group_map, self.burst_map = recipe.maps(recipe.group_map), recipe.maps(recipe.burst_map)
        self.over_time = [recipe.maps(text) for text in recipe.over_time]
        n = len(base.y)  # points are random as they are, and the first ones stay where a stream becomes longer
        self.pools = _Pools(base.y, rng.permutation(self._key(_POOL), n) if base.pictures else np.arange(n))
        bursts = rng.permutation(self._key(_BURST), ids.size)[: round(recipe.burst_share * ids.size)]
        self.bursts = np.isin(np.arange(ids.size), bursts).reshape(ids.shape)
        self.first: dict[int, Ints] = {}  # the rows of each client, where they are fixed

    def _key(self, *names: int) -> rng.Words:
        return rng.derive(self.data_seed, "data", _COMPOSED, *names)

    def made(self, t: int, c: int) -> tuple[Values, Labels, npt.NDArray[np.bool_]]:
        """Inputs and labels of a cell, and which rows are in group 0."""
        repeats = self.recipe.fixed and t < self.last  # the last row only tests: on other rows
        key = partial(self._key, _CELL, 0 if repeats else t, c)
        n = self.recipe.rows if self.by_class is None else int(self.by_class[c].sum())
        in_group = rng.permutation(key(_GROUP), n) < round(self.recipe.group_share * n)
        concept = self._concept_of_rows(t, c, n, key(_MIX))
        if self.recipe.group_share:
            concept = np.where(in_group, concept, 0)
        rows = self.first.get(c) if repeats else None
        if rows is None:
            rows = self._drawn(c, concept, key(_ORDER))
            self.first.setdefault(c, rows)
        x, y = self.base.values(rows), self.base.y[rows]
        if self.over_time:
            x, y = apply(self.over_time[min(t, len(self.over_time) - 1)], x, y, self.base, partial(key, _OVER_TIME))
        x, y = self._where(in_group, self.group_map, x, y, partial(key, _OF_GROUP))
        for k in np.unique(concept):
            x, y = self._where(concept == k, self.concepts[k], x, y, partial(key, _OF_CONCEPT, int(k)))
        if self.bursts[t, c]:
            x, y = apply(self.burst_map, x, y, self.base, partial(key, _OF_BURST))
        return x, y, in_group

    def _concept_of_rows(self, t: int, c: int, n: int, key: rng.Words) -> Ints:
        now, before = self.ids[t, c], self.ids[max(t - 1, 0), c]
        if not self.recipe.mixed or now == before:
            return np.full(n, now)
        is_new = rng.uniform(key, (n,)) < (np.arange(n) + 0.5) / n  # a chance that rises from 0 to 1
        return np.asarray(np.where(is_new, now, before), dtype=np.int64)

    def _drawn(self, c: int, concept: Ints, key: rng.Words) -> Ints:
        """New rows for a cell, by the classes that its client has or its concepts show."""
        if self.by_class is not None:
            rows: Ints = np.concatenate([self.pools.take((k,), n) for k, n in enumerate(self.by_class[c])])
            return np.take(rows, rng.permutation(key, len(rows)))
        rows = np.empty(len(concept), dtype=np.int64)
        for k in np.unique(concept):
            classes = shown(self.concepts[k])
            drawn = self.pools.take(classes, int((concept == k).sum()))
            rows[concept == k] = np.take(drawn, rng.permutation(key, len(drawn))) if classes else drawn
        return rows

    def _where(
        self, mask: npt.NDArray[np.bool_], maps: Maps, x: Values, y: Labels, key: partial[rng.Words]
    ) -> tuple[Values, Labels]:
        """The maps on some rows of a cell."""
        if mask.all():
            return apply(maps, x, y, self.base, key)
        if mask.any():
            x, y = x.copy(), y.copy()
            x[mask], y[mask] = apply(maps, x[mask], y[mask], self.base, key)
        return x, y


class _Pools:
    """All rows in a random order, or those of some classes, each once until those that are asked for are used up."""

    def __init__(self, y: Labels, order: Ints) -> None:
        self.y, self.order = y, order
        self.rows: dict[tuple[int, ...], Ints] = {}
        self.is_new = np.ones(len(y), dtype=bool)

    def take(self, classes: tuple[int, ...], n: int) -> Ints:
        """The next rows of these classes, as many of each, or of all where none is named."""
        if len(classes) > 1:
            ends = n * np.arange(len(classes) + 1) // len(classes)
            return np.concatenate([self.take((k,), m) for k, m in zip(classes, np.diff(ends).tolist(), strict=True)])
        if classes not in self.rows:
            self.rows[classes] = self.order[np.isin(self.y[self.order], classes)] if classes else self.order
        rows = self.rows[classes]
        taken = rows[self.is_new[rows]][:n]
        self.is_new[taken] = False
        if len(taken) == n:
            return taken
        self.is_new[rows] = True  # all over again
        again = np.take(rows, np.arange(n - len(taken)), mode="wrap")
        self.is_new[again] = False
        return np.concatenate([taken, again])
