"""Streams: the data that every client receives over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from feddrift.errors import DataError
from feddrift.types import Ints, Local

if TYPE_CHECKING:
    from feddrift.tables.features import Feature

TABLE_FAMILY = "table"  # the family of tables and folders of files
SYNTHETIC_FAMILY = "made"  # the family of composed streams, for which no settings are published
MAX_GROUPS = 1000
Cell = tuple[npt.ArrayLike, npt.ArrayLike]  # x[n, ...], y[n]


@dataclass(frozen=True, repr=False)
class Stream:
    """Data that every client receives over time: T training steps, and a last step that is only for testing.

    A cell S_c^(t) is the batch that client c receives at time t. Cells are stored one after the other, time outer,
    client inner: ``x[rows(t, c)]``. `from_arrays` and `from_frame` create a stream from your own data.

    >>> from feddrift import stream
    >>> stream("sea-4")
    Stream('sea-4': 10 clients, 10 time steps + 1 to test, 55,000 examples of 3 features, 2 classes)
    """

    name: str
    x: npt.NDArray[Any]  # float32, or uint8 for pictures
    y: npt.NDArray[np.int32]
    counts: Ints  # [T + 1, c], zero is legal
    n_classes: int
    concepts: Ints | None = None  # [T + 1, c], the true concepts: only Oracle and reports may read them
    same: Mapping[int, int] = field(default_factory=dict)  # concept -> a lower id of the same concept
    clients: tuple[str, ...] = ()  # [c], names; by default their positions
    times: tuple[str, ...] = ()  # [T + 1], names of the time steps, if they have any
    classes: tuple[int | str, ...] = ()  # names of the classes, if they are not 0, 1, 2, ...
    columns: tuple[str, ...] = ()  # names of the features in their order, if they have any
    recipe: tuple[Feature, ...] = ()  # of a table: how each feature is computed from a column
    family: str = "own"  # selects defaults: sine, circle, sea, mnist, table, ...
    local: Local = Local()  # default settings of local training; for published data those of the publication
    group: Ints | None = None  # [n], the group of each row, small numbers from 0
    net: str | None = None  # name of the default net, such as mlp:28; None: the paper's net for such inputs

    def __post_init__(self) -> None:
        if self.counts.ndim != 2 or len(self.counts) < 2 or self.counts.shape[1] < 1:
            raise DataError(f"stream {self.name}: needs at least 2 time steps and 1 client, got {self.counts.shape}")
        if self.counts.sum() != len(self.x) or len(self.x) != len(self.y):
            raise DataError(f"stream {self.name}: counts, x and y disagree on the number of examples")
        if self.concepts is not None and self.concepts.shape != self.counts.shape:
            raise DataError(
                f"stream {self.name}: concepts must have shape {self.counts.shape}, got {self.concepts.shape}"
            )
        if self.group is not None:
            _check_group(self.group, len(self.y), f"stream {self.name}")
        if self.clients and len(self.clients) != self.n_clients:
            raise DataError(f"stream {self.name}: {self.n_clients} clients need as many names, got {len(self.clients)}")
        if self.times and len(self.times) != len(self.counts):
            raise DataError(
                f"stream {self.name}: {len(self.counts)} time steps need as many names, got {len(self.times)}"
            )
        if not self.clients:
            object.__setattr__(self, "clients", tuple(str(c) for c in range(self.n_clients)))

    def __repr__(self) -> str:
        shape = " x ".join(map(str, self.x.shape[1:]))
        size = f"{self.n_clients} clients, {self.n_steps} time steps + 1 to test, {len(self.y):,} examples"
        return f"Stream({self.name!r}: {size} of {shape} features, {self.n_classes} classes)"

    @property
    def n_steps(self) -> int:
        """T, the number of training steps."""
        return len(self.counts) - 1

    @property
    def n_clients(self) -> int:
        """P, the number of clients."""
        return int(self.counts.shape[1])

    @property
    def features(self) -> tuple[int, ...]:
        """The shape of one input."""
        return self.x.shape[1:]

    @cached_property
    def starts(self) -> Ints:
        """[T + 1, c], the first row of each cell."""
        ends = np.cumsum(self.counts.reshape(-1)).reshape(self.counts.shape)
        return ends - self.counts

    def rows(self, t: int, c: int) -> slice:
        """Return the rows of S_c^(t) in x and y."""
        start = int(self.starts[t, c])
        return slice(start, start + int(self.counts[t, c]))

    def cell(self, t: int, c: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
        """Return S_c^(t), the data that client c receives at time t: inputs x[n, ...] and labels y[n]."""
        rows = self.rows(t, c)
        return self.x[rows], self.y[rows]

    @classmethod
    def from_arrays(
        cls,
        cells: Sequence[Sequence[Cell | None]],
        *,
        name: str = "arrays",
        n_classes: int | None = None,
        concepts: npt.ArrayLike | None = None,
        clients: Sequence[str] = (),
        times: Sequence[str] = (),
        local: Local | None = None,
        groups: Sequence[Sequence[npt.ArrayLike | None]] | None = None,
    ) -> Stream:
        """Create a stream from arrays: ``cells[t][c]`` is a pair (x, y), or None if client c has no data of time t.

        Args:
            cells: Inputs x[n, ...] and labels y[n], whole numbers from 0, by time step and client; the last time step
                is only for testing.
            name: The name in records and reports.
            n_classes: The number of classes; by default the largest label + 1.
            concepts: [t, c], the true concept of each cell, if it is known.
            clients: The names of the clients.
            times: The names of the time steps.
            local: The default settings of local training for these data.
            groups: The group of each row, whole numbers from 0, by time step and client as `cells`.

        Raises:
            DataError: The arrays are not valid or do not fit together.

        >>> x, y = np.zeros((4, 2)), [0, 1, 1, 0]
        >>> Stream.from_arrays([[(x, y), None], [(x, y), (x, y)]]).counts.tolist()
        [[4, 0], [4, 4]]
        """
        try:
            row_lengths = {len(row) for row in cells}
        except TypeError:
            raise DataError(f"stream {name}: cells must be a list of time steps, each a list of clients") from None
        if len(set(clients)) < len(clients):
            raise DataError(f"stream {name}: clients must be a list of distinct names, got {clients!r}")
        if len(row_lengths) != 1:
            raise DataError(f"stream {name}: every time step needs the same clients, got {sorted(row_lengths)} of them")
        n_clients = row_lengths.pop()
        if clients and len(clients) != n_clients:
            raise DataError(f"stream {name}: {n_clients} clients need as many names, got {len(clients)}")
        if groups is not None and [len(row) for row in groups] != [len(row) for row in cells]:
            raise DataError(f"stream {name}: groups must have the time steps and clients of cells")
        group: list[Ints] = []
        xs: list[npt.NDArray[np.float32]] = []
        ys: list[npt.NDArray[np.int32]] = []
        counts = np.zeros((len(cells), n_clients), dtype=np.int64)
        for t, row in enumerate(cells):
            for c, cell in enumerate(row):
                if cell is None:
                    continue
                where = f"stream {name}, time {t}, client {clients[c] if clients else c}"
                x, y = _convert_cell(cell, where)
                if xs and x.shape[1:] != xs[0].shape[1:]:
                    raise DataError(f"{where}: features of shape {x.shape[1:]}, elsewhere {xs[0].shape[1:]}")
                if n_classes is not None and len(y) and y.max() >= n_classes:
                    raise DataError(f"{where}: unknown label {int(y.max())}, legal are 0 to {n_classes - 1}")
                xs.append(x)
                ys.append(y)
                if groups is not None:
                    group.append(_convert_group(groups[t][c], len(y), where))
                counts[t, c] = len(x)
        if not counts.sum():
            raise DataError(f"stream {name}: no examples at all")
        y_all = np.concatenate(ys)
        return cls(
            name=name,
            x=np.concatenate(xs),
            y=y_all,
            counts=counts,
            n_classes=n_classes if n_classes is not None else int(y_all.max()) + 1,
            concepts=None if concepts is None else np.asarray(concepts, dtype=np.int64),
            clients=tuple(clients),
            times=tuple(str(time) for time in times),
            local=local or Local(),
            group=None if groups is None else np.concatenate(group),
        )

    @classmethod
    def from_frame(  # noqa: PLR0913  # the options of tables
        cls,
        frame: object,
        *,
        client: str,
        time: str,
        label: str,
        every: str | float | None = None,
        missing: str | None = None,
        categories: str | None = None,
        scale: bool = True,
        drop: str | Sequence[str] = (),
        features: str | Sequence[str] | None = None,
        name: str = "frame",
    ) -> Stream:
        """Create a stream from a data frame (pandas, polars, Arrow, ...) or a dictionary of columns, a row per example.

        Args:
            frame: The table. All columns except the three that follow are features, in their order.
            client: The column of the clients.
            time: The column of times, which become time steps; the last one is only for testing.
            label: The column of labels: whole numbers or words. Or an expression that makes the labels yes and no:
                ``delay > 15``, ``carrier == AA`` or ``carrier in (AA, DL)``; its column is not a feature.
            every: The length of a time step: ``year``, ``quarter``, ``month`` or ``week`` of dates, or a number, of
                days or of the units of the column. By default each value is a time step.
            missing: The treatment of rows without a value: ``drop`` the rows, fill in the ``mean`` of the first time
                step, or do so and add an ``indicator``, a feature that is 1 where the value is missing. By default
                missing values are an error.
            categories: ``onehot`` creates a feature for each word that a column has in the first time step.
            scale: If True, numbers are scaled by mean and standard deviation of the first time step.
            drop: Columns that are not features: a list of names, or a text with commas between them.
            features: The columns that are features, in place of all others.
            name: The name of the stream.

        Raises:
            ConfigError: `frame` is not a table, or an option is not valid.
            DataError: The table has problems; the message lists them.

        >>> table = {"shop": ["a", "b", "a"], "day": [1, 1, 2], "age": [30, 50, 35], "sold": ["yes", "no", "no"]}
        >>> s = Stream.from_frame(table, client="shop", time="day", label="sold")
        >>> s.counts.tolist(), s.times, s.x[:, 0].tolist()
        ([[1, 1], [1, 0]], ('1', '2'), [-1.0, 1.0, -0.5])
        """
        from feddrift.tables.arrange import Table, TableOptions, arrange_table
        from feddrift.tables.columns import ArrayColumn, read_frame
        from feddrift.tables.problems import Problems

        options = TableOptions(client, time, label, every, missing, categories, scale, drop, features)
        columns = {column: ArrayColumn(values) for column, values in read_frame(frame).items()}
        n = len(next(iter(columns.values()), ()))
        table = Table(name, columns, range(n), "row", Problems(name))
        return cls(name=name, family=TABLE_FAMILY, **vars(arrange_table(table, options)))


def _convert_cell(cell: Cell, where: str) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    if not isinstance(cell, Sequence) or len(cell) != 2:
        raise DataError(f"{where}: a cell is a pair (x, y) or None, got a {type(cell).__name__}")
    try:
        x = np.asarray(cell[0], dtype=np.float32)
        labels = np.asarray(cell[1], dtype=np.float64)
    except (TypeError, ValueError):
        raise DataError(f"{where}: features and labels must be numbers") from None
    if x.ndim < 2 or labels.shape != x.shape[:1]:
        raise DataError(
            f"{where}: expected x of shape [n, features] and y of shape [n], got {x.shape} and {labels.shape}"
        )
    if not np.isfinite(x).all():
        raise DataError(f"{where}: example {int(np.argwhere(~np.isfinite(x))[0][0])} has a missing or infinite feature")
    is_class = np.isfinite(labels) & (labels >= 0) & (labels < 2**31) & (labels == np.floor(labels))
    if not is_class.all():
        raise DataError(f"{where}: unknown label {labels[~is_class][0]:g}, labels are whole numbers from 0")
    return x, labels.astype(np.int32)


def _convert_group(values: npt.ArrayLike | None, n: int, where: str) -> Ints:
    try:
        group = np.asarray(values)
        integers = group.astype(np.int64)
    except (TypeError, ValueError):  # also for None
        raise DataError(f"{where}: groups must be {n} whole numbers, as many as the cell has rows") from None
    _check_group(group, n, where)
    return integers


def _check_group(group: npt.NDArray[Any], n: int, where: str) -> None:
    if group.dtype.kind not in "iu" or group.shape != (n,):
        raise DataError(f"{where}: a group is a whole number for each of {n} rows, got {group.dtype} {group.shape}")
    if n and not 0 <= group.min() <= group.max() < MAX_GROUPS:
        raise DataError(f"{where}: groups are 0 to {MAX_GROUPS - 1}, got {group.min()} to {group.max()}")
