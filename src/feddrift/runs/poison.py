"""The run option `poison`, which makes clients Byzantine."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from feddrift.data import Stream
from feddrift.engines.conditions.byzantine import ByzantineBehaviour
from feddrift.errors import ConfigError

POISON_KINDS = ("flip", "garbage", "claims", "alarms", "glue", "losses")


@dataclass(frozen=True)
class ByzantineClients:
    """Positions of the Byzantine clients by their behaviour; `str` returns the text that `parse_poison` reads."""

    flip: tuple[int, ...] = ()
    garbage: tuple[int, ...] = ()
    behaviour: ByzantineBehaviour = ByzantineBehaviour()  # the other kinds

    @property
    def clients(self) -> tuple[int, ...]:
        """The positions of all Byzantine clients, in ascending order."""
        return tuple(sorted({*self.flip, *self.garbage, *self.behaviour.clients}))

    def __str__(self) -> str:
        clients_of = {"flip": self.flip, "garbage": self.garbage}
        clients_of |= {f.name: getattr(self.behaviour, f.name) for f in fields(self.behaviour) if f.name != "factor"}
        parts = {kind: f"{kind}:{','.join(map(str, clients))}" for kind, clients in clients_of.items() if clients}
        if self.behaviour.factor != ByzantineBehaviour.factor:
            parts["claims"] += f":factor={self.behaviour.factor:g}"
        return "+".join(parts.values())


def parse_poison(text: str, n_clients: int) -> ByzantineClients:
    """Parse the run option `poison`.

    >>> parse_poison("flip:0,3", n_clients=10).flip
    (0, 3)
    >>> str(parse_poison("glue:0+claims:2,0:factor=1000", n_clients=10))
    'claims:0,2:factor=1000+glue:0'
    """
    clients_of: dict[str, tuple[int, ...]] = {}
    factor = ByzantineBehaviour.factor
    for part in re.split(r"\+(?=[a-z])", text):  # a factor may contain a +, as in 1e+6
        kind, _, rest = part.partition(":")
        names, has_factor, value = rest.partition(":factor=")
        clients = [name.strip() for name in names.split(",")]
        are_numbers = all(name.isdecimal() and len(name) < 20 for name in clients)
        if kind not in POISON_KINDS or kind in clients_of or not are_numbers:
            legal = ", ".join(f"{name}:" for name in POISON_KINDS)
            raise ConfigError(
                f"poison is one or more of {legal} each with numbers of clients, joined by +, such as flip:0,3 or "
                f"claims:0+glue:0, got '{text}'"
            )
        clients_of[kind] = tuple(sorted({int(name) for name in clients}))
        if clients_of[kind][-1] >= n_clients:
            raise ConfigError(f"poison: clients are 0 to {n_clients - 1}, got {clients_of[kind][-1]}")
        if has_factor:
            factor = _parse_factor(kind, value)
    other_kinds = {kind: clients_of[kind] for kind in POISON_KINDS[2:] if kind in clients_of}
    return ByzantineClients(
        flip=clients_of.get("flip", ()),
        garbage=clients_of.get("garbage", ()),
        behaviour=ByzantineBehaviour(factor=factor, **other_kinds),
    )


def _parse_factor(kind: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if kind != "claims" or not math.isfinite(number):
        raise ConfigError(f"poison: only claims has a factor, a number such as factor=1e6, got {kind} with '{value}'")
    return number


def flip_labels(stream: Stream, clients: Sequence[int]) -> Stream:
    """Return the stream with flipped labels of these clients: the first class becomes the last, and so on."""
    if not clients:
        return stream
    y = stream.y.copy()
    for c in clients:
        for t in range(stream.n_steps + 1):
            y[stream.rows(t, c)] = stream.n_classes - 1 - y[stream.rows(t, c)]
    return replace(stream, y=y)
