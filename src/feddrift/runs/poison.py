"""The run option `poison`, which makes clients Byzantine."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from feddrift.data import Stream
from feddrift.engines.conditions.byzantine import ByzantineBehaviour
from feddrift.errors import ConfigError

REPORT_KINDS = ("claims", "alarms", "glue", "losses")  # false reports
UPDATE_KINDS = ("reverse", "collude", "stale")  # false updates, besides garbage
POISON_KINDS = ("flip", "garbage", *REPORT_KINDS, "relabel", "backdoor", *UPDATE_KINDS)
POISON_OPTIONS = {"claims": ("factor",), "reverse": ("factor",), "relabel": ("from", "to")}  # by kind
LAST_CLASS = -1
TRIGGER_INTERVAL = 64  # number of inputs for each input of a backdoor's trigger, which has at least one
TRIGGERED_ROW_INTERVAL = 2  # number of rows for each row with the trigger


@dataclass(frozen=True)
class ByzantineClients:
    """Positions of the Byzantine clients by their behaviour; `str` returns the text that `parse_poison` reads."""

    flip: tuple[int, ...] = ()
    garbage: tuple[int, ...] = ()
    behaviour: ByzantineBehaviour = ByzantineBehaviour()  # false reports, and false updates other than garbage
    relabel: tuple[int, ...] = ()
    relabelled_classes: tuple[int, int] = (0, LAST_CLASS)  # the true class, and the label that replaces it
    backdoor: tuple[int, ...] = ()

    @property
    def clients(self) -> tuple[int, ...]:
        """The positions of all Byzantine clients, in ascending order."""
        return tuple(sorted({*self.flip, *self.garbage, *self.relabel, *self.backdoor, *self.behaviour.clients}))

    def __str__(self) -> str:
        options = dict.fromkeys(POISON_KINDS, "")
        if self.behaviour.factor != ByzantineBehaviour.factor:
            options["claims"] = f":factor={self.behaviour.factor:g}"
        if self.behaviour.reverse_factor != ByzantineBehaviour.reverse_factor:
            options["reverse"] = f":factor={self.behaviour.reverse_factor:g}"
        true_class, label = self.relabelled_classes
        options["relabel"] = f":from={true_class}" * (true_class != 0) + f":to={label}" * (label != LAST_CLASS)
        in_behaviour = (*REPORT_KINDS, *UPDATE_KINDS)
        clients_of = {
            kind: getattr(self.behaviour if kind in in_behaviour else self, kind)
            for kind in POISON_KINDS
        }  # fmt: skip
        return "+".join(
            f"{kind}:{','.join(map(str, clients))}{options[kind]}" for kind, clients in clients_of.items() if clients
        )


def parse_poison(text: str, n_clients: int) -> ByzantineClients:
    """Parse the run option `poison`.

    >>> parse_poison("flip:0,3", n_clients=10).flip
    (0, 3)
    >>> str(parse_poison("glue:0+claims:2,0:factor=1000", n_clients=10))
    'claims:0,2:factor=1000+glue:0'
    >>> parse_poison("relabel:1:from=2:to=0", n_clients=10).relabelled_classes
    (2, 0)
    """
    clients_of: dict[str, tuple[int, ...]] = {}
    options: dict[str, float] = {}  # by kind and name
    for part in re.split(r"\+(?=[a-z])", text):  # a factor may contain a +, as in 1e+6
        kind, _, rest = part.partition(":")
        names, *given_options = rest.split(":")
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
        for option in given_options:
            name, _, value = option.partition("=")
            if name not in POISON_OPTIONS.get(kind, ()) or f"{kind} {name}" in options:
                raise ConfigError(f"poison: {_describe_options(kind)}, got '{option}'")
            options[f"{kind} {name}"] = _parse_factor(kind, value) if name == "factor" else _parse_class(name, value)
    true_class = int(options.get("relabel from", 0))
    label = int(options.get("relabel to", LAST_CLASS))
    if true_class == label:
        raise ConfigError(f"poison: relabel needs two different classes, got from={true_class} and to={label}")
    return ByzantineClients(
        flip=clients_of.get("flip", ()),
        garbage=clients_of.get("garbage", ()),
        behaviour=ByzantineBehaviour(
            factor=options.get("claims factor", ByzantineBehaviour.factor),
            reverse_factor=options.get("reverse factor", ByzantineBehaviour.reverse_factor),
            **{kind: clients_of[kind] for kind in (*REPORT_KINDS, *UPDATE_KINDS) if kind in clients_of},
        ),
        relabel=clients_of.get("relabel", ()),
        relabelled_classes=(true_class, label),
        backdoor=clients_of.get("backdoor", ()),
    )


def _describe_options(kind: str) -> str:
    examples = {"factor": "factor=20", "from": "from=0", "to": "to=1"}
    options = [examples[name] for name in POISON_OPTIONS.get(kind, ())]
    return f"{kind} has no options" if not options else f"{kind} may have {' and '.join(options)}, each once"


def _parse_factor(kind: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"poison: the factor of {kind} is a number such as factor=20, got '{value}'")
    return number


def _parse_class(name: str, value: str) -> int:
    if not (value.isdecimal() and len(value) < 10):
        raise ConfigError(f"poison: relabel names classes by their numbers, such as {name}=1, got '{value}'")
    return int(value)


def poison_stream(stream: Stream, byzantine: ByzantineClients) -> Stream:
    """Return the stream with the false data of the clients in `flip`, `relabel` and `backdoor`, in this order.

    - `flip`: the first class becomes the last, and so on.
    - `relabel`: one class gets the label of another one.
    - `backdoor`: every second row gets a trigger (see `add_trigger`) and the last class.

    Raises:
        ConfigError: If a class does not exist.
    """
    if not (byzantine.flip or byzantine.relabel or byzantine.backdoor):
        return stream
    last = stream.n_classes - 1
    true_class, label = (last if number == LAST_CLASS else number for number in byzantine.relabelled_classes)
    if byzantine.relabel and (max(true_class, label) > last or true_class == label):
        raise ConfigError(
            f"poison: relabel needs two different classes of 0 to {last}, got from={true_class} and to={label}"
        )
    y = stream.y.copy()
    x = stream.x.copy() if byzantine.backdoor else stream.x
    for t in range(stream.n_steps + 1):
        for c in byzantine.flip:
            y[stream.rows(t, c)] = last - y[stream.rows(t, c)]
        for c in byzantine.relabel:
            labels = y[stream.rows(t, c)]  # a view
            labels[labels == true_class] = label
        for c in byzantine.backdoor:
            triggered = slice(stream.rows(t, c).start, stream.rows(t, c).stop, TRIGGERED_ROW_INTERVAL)
            x[triggered] = add_trigger(x[triggered], stream)
            y[triggered] = last
    return replace(stream, x=x, y=y)


def add_trigger(x: Any, stream: Stream) -> Any:
    """Return inputs x[n, ...] with the trigger of a backdoor: one value in the first inputs.

    It is above all values of the stream by their range. Inputs that are whole numbers, such as pictures, get the
    largest value of the stream.
    """
    largest = stream.x.max()
    value = largest if stream.x.dtype.kind in "iu" else 2 * largest - stream.x.min()
    triggered = np.array(x)
    flat = triggered.reshape(len(triggered), -1)
    flat[:, : max(1, flat.shape[1] // TRIGGER_INTERVAL)] = value
    return triggered
