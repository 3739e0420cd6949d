"""Recipes of the streams of later publications than FedDrift, with their patterns and maps."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import NamedTuple

import numpy as np

from feddrift import rng
from feddrift.streams.patterns import build_pattern
from feddrift.streams.recipe import Recipe, Rows
from feddrift.types import Ints

SWAPS = ("keep", "swap(1,2)", "swap(3,4)", "swap(5,6)")
TURNS = ("turn(0)", "turn(90)", "turn(180)", "turn(270)")
PLANES = ("plane(8)", "plane(9)", "plane(7)", "plane(9)")  # as in sea-4
N_SHOWN_PAIRS = 6  # concepts of digits-shown
GROUP_PATTERNS = (  # a row per time step, a column per client; the last only tests
    "0000000000/0000000000/0000011111/0000011111/0000011111/2222211111/2222211111/2222211111/2220000011/2220000011",
    "0000000000/0000000000/0001111000/0001111000/0001111000/2222211000/2222211000/2222211000/0001100011/0001100011",
    "0000000000/0000000000/0011112222/0011112222/0011112220/1222221110/1222221110/1222221110/0002222111/0002222111",
    "0000000000/0000000000/3334440000/3334442211/3334442211/2222112211/2222110003/4443330003/4443331112/4443331112",
    "0000000000/0000000000/1112223300/1112223333/1121441122/3321441122/4441422333/4442222333/1133322122/1133322122",
)

_SHOWN = 7  # identifies digits-shown in the random keys of data
_MAPS = 8  # identifies fashion-maps


class ComposedEntry(NamedTuple):
    """A composed stream of the catalogue."""

    summary: str
    recipe: Callable[[int], Recipe]  # from the data seed, which draws some of the patterns


def _build_swap_recipe(starts: tuple[int, int, int], end: int = 21) -> Recipe:
    """Return a recipe in which each of three groups of clients swaps labels from its own time step until the end."""
    c = np.arange(20) % 10
    t = np.arange(21)[:, None]
    swap = np.where(c < 3, 1, np.where(c < 6, 2, 3))
    ids = np.where((t >= np.array(starts)[swap - 1]) & (t < end), swap, 0)
    return Recipe(base="fashion", shares="dirichlet(0.5,2)", rows=150, concepts=SWAPS, pattern=_to_rows(ids))


def _build_group_recipe(number: int) -> Recipe:
    """Return a recipe that swaps labels only in one tenth of each cell; its pictures are negated and turned."""
    swaps = tuple(f"swap({j},{j + 1})" for j in range(1, 5))
    return Recipe(
        base="mnist",
        rows=700,
        group_share=0.1,
        group_map="negate turn(90)",
        concepts=("keep", *swaps),
        pattern=GROUP_PATTERNS[number - 1].split("/"),  # type: ignore[arg-type]  # a row as text
    )


def _build_shown_recipe(data_seed: int) -> Recipe:
    """Return a recipe in which each client draws one of six random pairs of digits at each step."""
    pairs = np.array(list(combinations(range(10), 2)))
    chosen = pairs[rng.permutation(rng.derive_key(data_seed, "data", _SHOWN, 0), len(pairs))[:N_SHOWN_PAIRS]]
    drawn = rng.uniform(rng.derive_key(data_seed, "data", _SHOWN, 1), (11, 10), 0, N_SHOWN_PAIRS).astype(np.int64)
    return Recipe(base="mnist", concepts=tuple(f"show({a},{b})" for a, b in chosen), pattern=_to_rows(drawn))


def _build_maps_recipe(data_seed: int) -> Recipe:
    """Return a recipe with 60 clients in 2, 3, then 4 equal groups, drawn at each step, while all pictures turn."""
    ids = np.empty((7, 60), dtype=np.int64)
    for t, n in enumerate((2, 3, 4, 4, 4, 4)):
        ids[t] = rng.permutation(rng.derive_key(data_seed, "data", _MAPS, t), 60) % n
    ids[6] = ids[5]
    concepts = ("keep", "reverse", "add(1)", "add(2)")
    return Recipe(base="fashion", rows=140, concepts=concepts, over_time=TURNS[:3] * 2, pattern=_to_rows(ids))


def _build_mixed_recipe() -> Recipe:
    pattern = _to_rows(np.repeat(build_pattern("F"), 2, axis=0)[:21])
    return Recipe(base="sea", rows=250, mixed=True, concepts=PLANES, pattern=pattern)


def _build_burst_recipe() -> Recipe:
    return Recipe(base="sea", rows=500, burst_share=0.05, burst_map="noise(0.4)", concepts=PLANES, pattern="F")


def _to_rows(ids: Ints) -> Rows:
    return tuple(tuple(row) for row in ids.tolist())


COMPOSED: dict[str, ComposedEntry] = {
    "fashion-swap-sudden": ComposedEntry(
        "uneven clothes; three groups of clients swap labels at once", lambda _: _build_swap_recipe((10, 10, 10))
    ),
    "fashion-swap-recurrent": ComposedEntry(
        "the same, and later they swap back", lambda _: _build_swap_recipe((10, 10, 10), 15)
    ),
    "fashion-swap-incremental": ComposedEntry(
        "the same, one group after the other", lambda _: _build_swap_recipe((10, 11, 12))
    ),
    "mnist-g-1": ComposedEntry(
        "digits; a negated, turned tenth swaps labels; pattern 1 of 5", lambda _: _build_group_recipe(1)
    ),
    "mnist-g-2": ComposedEntry("the same, pattern 2 of 5", lambda _: _build_group_recipe(2)),
    "mnist-g-3": ComposedEntry("the same, pattern 3 of 5", lambda _: _build_group_recipe(3)),
    "mnist-g-4": ComposedEntry("the same, pattern 4 of 5", lambda _: _build_group_recipe(4)),
    "mnist-g-5": ComposedEntry("the same, pattern 5 of 5", lambda _: _build_group_recipe(5)),
    "digits-turn": ComposedEntry(
        "digits, turned by 0, 90, 180 or 270 degrees", lambda _: Recipe(base="mnist", concepts=TURNS, pattern="F")
    ),
    "digits-shown": ComposedEntry(
        "digits; each client sees a random pair of classes at each step", _build_shown_recipe
    ),
    "fashion-maps": ComposedEntry(
        "clothes under four label maps, drawn again at each step; all turn", _build_maps_recipe
    ),
    "sea-4-mixed": ComposedEntry(
        "sea-4 whose drifts come row by row, within a time step", lambda _: _build_mixed_recipe()
    ),
    "sea-4-burst": ComposedEntry(
        "sea-4 with noise in some cells, which is not a drift", lambda _: _build_burst_recipe()
    ),
}
