"""Clients that do harm, as `poison` names them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from feddrift.data import Stream
from feddrift.engines.conditions.byzantine import Lies
from feddrift.errors import ConfigError

KINDS = ("flip", "garbage", "claims", "alarms", "glue", "losses")


@dataclass(frozen=True)
class Poison:
    """Which clients do what: numbers of clients. As a text, it is what `read_poison` reads."""

    flip: tuple[int, ...] = ()
    garbage: tuple[int, ...] = ()
    lies: Lies = Lies()

    @property
    def who(self) -> tuple[int, ...]:
        """All of them."""
        return tuple(sorted({*self.flip, *self.garbage, *self.lies.who}))

    def __str__(self) -> str:
        found = {"flip": self.flip, "garbage": self.garbage}
        found |= {field.name: getattr(self.lies, field.name) for field in fields(Lies) if field.name != "factor"}
        told = {kind: f"{kind}:{','.join(map(str, clients))}" for kind, clients in found.items() if clients}
        if self.lies.factor != Lies.factor:
            told["claims"] += f":factor={self.lies.factor:g}"
        return "+".join(told.values())


def read_poison(text: str, n_clients: int) -> Poison:
    """What some clients do, and which.

    >>> read_poison("flip:0,3", n_clients=10).flip
    (0, 3)
    >>> str(read_poison("glue:0+claims:2,0:factor=1000", n_clients=10))
    'claims:0,2:factor=1000+glue:0'
    """
    found: dict[str, tuple[int, ...]] = {}
    factor = Lies.factor
    for part in re.split(r"\+(?=[a-z])", text):  # a number may have a + of its own
        kind, _, rest = part.partition(":")
        names, given, value = rest.partition(":factor=")
        clients = [name.strip() for name in names.split(",")]
        if kind not in KINDS or kind in found or not all(name.isdecimal() and len(name) < 20 for name in clients):
            legal = ", ".join(f"{name}:" for name in KINDS)
            raise ConfigError(
                f"poison is one or more of {legal} each with numbers of clients, joined by +, such as flip:0,3 or "
                f"claims:0+glue:0, got '{text}'"
            )
        found[kind] = tuple(sorted({int(name) for name in clients}))
        if found[kind][-1] >= n_clients:
            raise ConfigError(f"poison: clients are 0 to {n_clients - 1}, got {found[kind][-1]}")
        if given:
            factor = _factor(kind, value)
    lies = Lies(factor=factor, **{kind: found[kind] for kind in KINDS[2:] if kind in found})
    return Poison(found.get("flip", ()), found.get("garbage", ()), lies)


def _factor(kind: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if kind != "claims" or not math.isfinite(number):
        raise ConfigError(f"poison: only claims has a factor, a number such as factor=1e6, got {kind} with '{value}'")
    return number


def flipped(stream: Stream, clients: Sequence[int]) -> Stream:
    """The stream in which these clients call every class by the name of its opposite: the first the last, and so on."""
    if not clients:
        return stream
    y = stream.y.copy()
    for c in clients:
        for t in range(stream.n_steps + 1):
            y[stream.rows(t, c)] = stream.n_classes - 1 - y[stream.rows(t, c)]
    return replace(stream, y=y)
