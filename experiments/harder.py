"""sine-2, sea-4 and air-quality under other conditions: `experiments.harder:sine_50_clients`.

Of each of `sine`, `sea` and `air` there are: 5_clients, 50_clients, 100_rows and 2000_rows a cell, bursts (in a fifth
of the cells a tenth of the labels is flipped), gradual (a drift takes a whole time step to happen). Air quality has
2,000 rows a cell by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import feddrift as fd
from feddrift.data import Cell
from feddrift.streams import synthetic
from feddrift.streams.patterns import build_pattern

Make = Callable[..., fd.Stream]
Cells = list[list[Cell | None]]  # [t][c]

SHARE = 0.2  # of the cells
FLIPPED = 0.1  # of the labels in these cells


def _make_stream(make: Make, name: str, clients: Sequence[int], draws: int) -> Make:
    """Return the stream with these columns of its pattern and this number of draws of 500 rows per cell."""

    def stream(data_seed: int = 0) -> fd.Stream:
        concepts = build_pattern("F" if name == "sea-4" else "Y")[:, clients]
        return _join_cells([make(name, concepts, data_seed=data_seed + 1000 * k) for k in range(draws)])

    return stream


def _join_cells(draws: Sequence[fd.Stream]) -> fd.Stream:
    """Return one stream whose cells have the rows of all draws."""
    first = draws[0]
    shape = (*draws[0].counts.shape, -1)
    x = np.concatenate([s.x.reshape(*shape, first.x.shape[1]) for s in draws], axis=2)
    y = np.concatenate([s.y.reshape(shape) for s in draws], axis=2)
    counts = first.counts * len(draws)
    return replace(first, x=x.reshape(-1, first.x.shape[1]), y=y.reshape(-1), counts=counts)


def _thin(make: Make, rows: int) -> Make:
    """Return the stream with this number of rows of each cell."""

    def stream(data_dir: str | Path | None = None, data_seed: int = 0) -> fd.Stream:
        random = np.random.default_rng([data_seed, 1])
        return _map_cells(make(data_dir, data_seed), lambda t, c, x, y: _some(random, x, y, rows))

    return stream


def _some(random: np.random.Generator, x: npt.NDArray[Any], y: npt.NDArray[Any], rows: int) -> Cell:
    kept = np.sort(random.permutation(len(x))[:rows])
    return x[kept], y[kept]


def _bursts(make: Make) -> Make:
    """Now and then a client's labels are noisy, for a time step."""

    def stream(data_dir: str | Path | None = None, data_seed: int = 0) -> fd.Stream:
        random = np.random.default_rng([data_seed, 2])

        def noisy(t: int, c: int, x: npt.NDArray[Any], y: npt.NDArray[Any]) -> Cell:
            burst = random.random() < SHARE
            flip = random.random(len(y)) < FLIPPED
            return x, np.where(flip & burst, 1 - y, y)

        return _map_cells(make(data_dir, data_seed), noisy)

    return stream


def _gradual(make: Make, name: str) -> Make:
    """In the time step of a drift, rows are of the new concept with a chance that rises from 0 to 1."""

    def stream(data_seed: int = 0) -> fd.Stream:
        concepts = build_pattern("F" if name == "sea-4" else "Y")
        before = np.concatenate([concepts[:1], concepts[:-1]])
        new, old = (make(name, table, data_seed=data_seed) for table in (concepts, before))  # the same points
        random = np.random.default_rng([data_seed, 3])
        rows = np.linspace(0, 1, synthetic.ROWS_PER_CELL)
        late = (random.random((*concepts.shape, len(rows))) > rows).reshape(-1)
        return replace(new, y=np.where(late, old.y, new.y))

    return stream


def _map_cells(stream: fd.Stream, change: Callable[[int, int, npt.NDArray[Any], npt.NDArray[Any]], Cell]) -> fd.Stream:
    """Return the stream with a change of every cell that has rows."""
    cells = [
        [change(t, c, *stream.cell(t, c)) if stream.counts[t, c] else None for c in range(stream.n_clients)]
        for t in range(len(stream.counts))
    ]
    return _with(stream, cells, stream.clients)


def _with(stream: fd.Stream, cells: Cells, clients: Sequence[str]) -> fd.Stream:
    made = fd.Stream.from_arrays(cells, name=stream.name, n_classes=2, clients=list(clients), local=stream.local)
    return replace(made, concepts=stream.concepts, same=stream.same)


def _air(data_dir: str | Path | None = None, data_seed: int = 0) -> fd.Stream:
    return fd.stream("air-quality", data_dir=data_dir)


def air_5_clients(data_dir: str | Path | None = None, data_seed: int = 0) -> fd.Stream:
    """One post of each city."""
    stream = _air(data_dir)
    cities = [name.split()[0] for name in stream.clients]
    posts = np.flatnonzero([city not in cities[:c] for c, city in enumerate(cities)])
    cells = [[_cell(stream, t, c) for c in posts] for t in range(len(stream.counts))]
    return _with(stream, cells, [stream.clients[c] for c in posts])


def air_50_clients(data_dir: str | Path | None = None, data_seed: int = 0) -> fd.Stream:
    """The rows of each post dealt out to four clients, of which the first 50 are there."""
    stream = _air(data_dir)
    random = np.random.default_rng([data_seed, 4])
    cells: Cells = []
    for t in range(len(stream.counts)):
        row: list[Cell | None] = []
        for c in range(stream.n_clients):
            whole = _cell(stream, t, c)
            parts = np.array_split(random.permutation(stream.counts[t, c]), 4)
            row += [(whole[0][part], whole[1][part]) if whole and len(part) else None for part in parts]
        cells.append(row[:50])
    return _with(stream, cells, [f"{name} {k}" for name in stream.clients for k in range(4)][:50])


def air_gradual(data_dir: str | Path | None = None, data_seed: int = 0) -> fd.Stream:
    """Each row of a quarter comes a quarter late with a chance that falls from 1 to 0 in the course of the quarter."""
    stream = _air(data_dir)
    random = np.random.default_rng([data_seed, 5])
    cells: Cells = [[None] * stream.n_clients for _ in stream.counts]
    for c in range(stream.n_clients):
        waiting: Cell | None = None
        for t in range(len(stream.counts)):
            whole = _cell(stream, t, c)
            if whole is None:
                continue
            late = random.random(len(whole[0])) > np.linspace(0, 1, len(whole[0]))
            x = whole[0][~late]
            y = whole[1][~late]
            if waiting is not None:
                x = np.concatenate([waiting[0], x])
                y = np.concatenate([waiting[1], y])
            cells[t][c] = x, y
            waiting = whole[0][late], whole[1][late]
    return _with(stream, cells, stream.clients)


def _cell(stream: fd.Stream, t: int, c: int) -> Cell | None:
    return stream.cell(t, c) if stream.counts[t, c] else None


def _plain(make: Make, name: str) -> Make:
    return lambda data_dir=None, data_seed=0: _make_stream(make, name, range(10), 1)(data_seed)


_FIVE = range(0, 10, 2)
_FIFTY = [c for c in range(10) for _ in range(5)]
sine_5_clients = _make_stream(synthetic.make_sine, "sine-2", _FIVE, 1)
sea_5_clients = _make_stream(synthetic.make_sea, "sea-4", _FIVE, 1)
sine_50_clients = _make_stream(synthetic.make_sine, "sine-2", _FIFTY, 1)
sea_50_clients = _make_stream(synthetic.make_sea, "sea-4", _FIFTY, 1)
sine_2000_rows = _make_stream(synthetic.make_sine, "sine-2", range(10), 4)
sea_2000_rows = _make_stream(synthetic.make_sea, "sea-4", range(10), 4)
sine_gradual = _gradual(synthetic.make_sine, "sine-2")
sea_gradual = _gradual(synthetic.make_sea, "sea-4")
sine_100_rows, sea_100_rows, air_100_rows = (
    _thin(make, 100) for make in (_plain(synthetic.make_sine, "sine-2"), _plain(synthetic.make_sea, "sea-4"), _air)
)
sine_bursts, sea_bursts, air_bursts = (
    _bursts(make) for make in (_plain(synthetic.make_sine, "sine-2"), _plain(synthetic.make_sea, "sea-4"), _air)
)
