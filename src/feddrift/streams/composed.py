"""Streams of the methods that came after FedDrift, each a recipe; patterns and maps are theirs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import NamedTuple

import numpy as np

from feddrift import rng
from feddrift.streams.patterns import pattern
from feddrift.streams.recipe import Recipe, Rows
from feddrift.types import Ints

SWAPS = ("keep", "swap(1,2)", "swap(3,4)", "swap(5,6)")
TURNS = ("turn(0)", "turn(90)", "turn(180)", "turn(270)")
PLANES = ("plane(8)", "plane(9)", "plane(7)", "plane(9)")  # as those of sea-4
PAIRS = 6  # concepts of digits-shown
IN_GROUP = (  # a row per time step, a column per client; the last only tests
    "0000000000/0000000000/0000011111/0000011111/0000011111/2222211111/2222211111/2222211111/2220000011/2220000011",
    "0000000000/0000000000/0001111000/0001111000/0001111000/2222211000/2222211000/2222211000/0001100011/0001100011",
    "0000000000/0000000000/0011112222/0011112222/0011112220/1222221110/1222221110/1222221110/0002222111/0002222111",
    "0000000000/0000000000/3334440000/3334442211/3334442211/2222112211/2222110003/4443330003/4443331112/4443331112",
    "0000000000/0000000000/1112223300/1112223333/1121441122/3321441122/4441422333/4442222333/1133322122/1133322122",
)

_SHOWN, _MAPS = 7, 8  # their names among the random keys of data


class Composed(NamedTuple):
    """A composed stream of the catalogue."""

    summary: str
    recipe: Callable[[int], Recipe]  # of the data seed, which draws some of the patterns


def _swaps(starts: tuple[int, int, int], end: int = 21) -> Recipe:
    """Three groups of twenty clients, each with a swap of its own from a time step on, until another."""
    c, t = np.arange(20) % 10, np.arange(21)[:, None]
    swap = np.where(c < 3, 1, np.where(c < 6, 2, 3))
    ids = np.where((t >= np.array(starts)[swap - 1]) & (t < end), swap, 0)
    return Recipe(base="fashion", shares="dirichlet(0.5,2)", rows=150, concepts=SWAPS, pattern=_rows(ids))


def _in_group(number: int) -> Recipe:
    """Labels are swapped only among a tenth of each cell, whose pictures are negated and turned."""
    swaps = tuple(f"swap({j},{j + 1})" for j in range(1, 5))
    return Recipe(
        base="mnist",
        rows=700,
        group_share=0.1,
        group_map="negate turn(90)",
        concepts=("keep", *swaps),
        pattern=IN_GROUP[number - 1].split("/"),  # type: ignore[arg-type]  # a row as text
    )


def _shown(data_seed: int) -> Recipe:
    """Random pairs of digits, of which each client draws one at every step."""
    pairs = np.array(list(combinations(range(10), 2)))
    chosen = pairs[rng.permutation(rng.derive(data_seed, "data", _SHOWN, 0), len(pairs))[:PAIRS]]
    drawn = rng.uniform(rng.derive(data_seed, "data", _SHOWN, 1), (11, 10), 0, PAIRS).astype(np.int64)
    return Recipe(base="mnist", concepts=tuple(f"show({a},{b})" for a, b in chosen), pattern=_rows(drawn))


def _maps(data_seed: int) -> Recipe:
    """Sixty clients in two, then three, then four equal groups, drawn anew at each step, while all pictures turn."""
    ids = np.empty((7, 60), dtype=np.int64)
    for t, n in enumerate((2, 3, 4, 4, 4, 4)):
        ids[t] = rng.permutation(rng.derive(data_seed, "data", _MAPS, t), 60) % n
    ids[6] = ids[5]
    concepts, turns = ("keep", "reverse", "add(1)", "add(2)"), TURNS[:3] * 2
    return Recipe(base="fashion", rows=140, concepts=concepts, over_time=turns, pattern=_rows(ids))


def _mixed() -> Recipe:
    return Recipe(
        base="sea", rows=250, mixed=True, concepts=PLANES, pattern=_rows(np.repeat(pattern("F"), 2, axis=0)[:21])
    )


def _burst() -> Recipe:
    return Recipe(base="sea", rows=500, burst_share=0.05, burst_map="noise(0.4)", concepts=PLANES, pattern="F")


def _rows(ids: Ints) -> Rows:
    return tuple(tuple(row) for row in ids.tolist())


COMPOSED: dict[str, Composed] = {
    "fashion-swap-sudden": Composed(
        "uneven clothes; three groups of clients swap labels at once", lambda _: _swaps((10, 10, 10))
    ),
    "fashion-swap-recurrent": Composed("the same, and later they swap back", lambda _: _swaps((10, 10, 10), 15)),
    "fashion-swap-incremental": Composed("the same, one group after the other", lambda _: _swaps((10, 11, 12))),
    "mnist-g-1": Composed("digits; a negated, turned tenth swaps labels; pattern 1 of 5", lambda _: _in_group(1)),
    "mnist-g-2": Composed("the same, pattern 2 of 5", lambda _: _in_group(2)),
    "mnist-g-3": Composed("the same, pattern 3 of 5", lambda _: _in_group(3)),
    "mnist-g-4": Composed("the same, pattern 4 of 5", lambda _: _in_group(4)),
    "mnist-g-5": Composed("the same, pattern 5 of 5", lambda _: _in_group(5)),
    "digits-turn": Composed(
        "digits, turned by 0, 90, 180 or 270 degrees", lambda _: Recipe(base="mnist", concepts=TURNS, pattern="F")
    ),
    "digits-shown": Composed("digits; each client sees a random pair of classes at each step", _shown),
    "fashion-maps": Composed("clothes under four label maps, drawn anew at each step; all turn", _maps),
    "sea-4-mixed": Composed("sea-4 whose drifts come row by row, within a time step", lambda _: _mixed()),
    "sea-4-burst": Composed("sea-4 with noise in some cells, which is no drift", lambda _: _burst()),
}
