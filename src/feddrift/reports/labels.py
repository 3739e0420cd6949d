"""Settings as short texts: what is set, what is not the default, what sets runs apart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from feddrift import algorithms


def notable(algorithm: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are not the algorithm's own defaults; all of one from elsewhere."""
    entry = algorithms.ALGORITHMS.get(algorithm)
    if entry is None:
        return dict(settings)
    defaults = {name: field.default for name, field in algorithms.options(entry.cls).items()}
    return {k: v for k, v in settings.items() if k == "delta" or (k in defaults and v != defaults[k])}


def differences(configurations: Sequence[tuple[str, str, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Of each (stream, algorithm, settings), the settings that differ within the same stream and algorithm.

    >>> differences([("sine-2", "FedDrift", {"delta": 0.1, "init": i}) for i in ("warm", "fresh")])
    [{'init': 'warm'}, {'init': 'fresh'}]
    """
    result = []
    for stream, algorithm, settings in configurations:
        peers = [s for peer_stream, name, s in configurations if (peer_stream, name) == (stream, algorithm)]
        result.append({k: v for k, v in settings.items() if any(k not in p or p[k] != v for p in peers)})
    return result


def shared(settings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all of several settings have in common.

    >>> shared([{"every": "month", "net": "linear"}, {"every": "month"}])
    {'every': 'month'}
    """
    first, *others = settings
    return {k: v for k, v in first.items() if all(k in other and other[k] == v for other in others)}


def names(headers: Sequence[Mapping[str, Any]], elsewhere: Sequence[Mapping[str, Any]] = ()) -> list[str]:
    """Of runs on one stream the algorithm, with the settings and run options that set each apart: there, or on other
    streams, of which `elsewhere` has the headers."""
    common = shared([header["overrides"] for header in headers]) if headers else {}
    every = [*headers, *elsewhere]
    telling: dict[str, set[str]] = {}
    for header, differs in zip(
        every, differences([(h["stream"], h["algorithm"], h["settings"]) for h in every]), strict=True
    ):
        telling.setdefault(header["algorithm"], set()).update(differs)
    labels = []
    for header in headers:
        own = {k: v for k, v in header["settings"].items() if k in telling[header["algorithm"]]}
        own |= {k: v for k, v in header["overrides"].items() if k not in common}
        labels.append(header["algorithm"] + (f" ({describe(own)})" if own else ""))
    return labels


def describe(settings: Mapping[str, Any]) -> str:
    """Settings as one line.

    >>> describe({"delta": 0.1, "init": "warm", "max_models": None})
    'delta=0.1, init=warm, max_models=none'
    """
    return ", ".join(f"{key}={'none' if value is None else value}" for key, value in settings.items())


def moved(shift: Mapping[str, Any]) -> str:
    """One thing that moved in a client's data, before and after.

    >>> moved({"what": "missing", "name": "humidity", "before": 0.04, "after": 0.7, "distance": 0.66})
    'humidity: 70 % missing, before 4 %'
    >>> moved({"what": "mean", "name": "age", "before": 12.0, "after": 21.3, "distance": 0.4, "within": "yes"})
    'age within class yes: mean 21.3, before 12.0'
    """
    what, name = shift["what"], shift["name"]
    as_others = ", as at most clients" if shift.get("common") else ""
    label = f"class {name}" if what == "class" else name
    label += f" within class {shift['within']}" if shift.get("within") is not None else ""
    if what in ("mean", "deviation"):
        after, before = _alike(shift["after"], shift["before"])
        return f"{label}: {'mean' if what == 'mean' else 'standard deviation'} {after}, before {before}{as_others}"
    after, before = _alike(100 * shift["after"], 100 * shift["before"], 2)
    return f"{label}: {after} %{' missing' * (what == 'missing')}, before {before} %{as_others}"


def _alike(a: float, b: float, digits: int = 3) -> tuple[str, str]:
    """Two numbers with the same decimals: as many digits as this, or more until they differ."""
    largest = max(abs(a), abs(b))
    if largest and not 1e-4 <= largest < 1e6:
        return f"{a:.{digits}g}", f"{b:.{digits}g}"
    decimals = max(0, digits - 1 - math.floor(math.log10(largest))) if largest else 0
    while (texts := (f"{a:.{decimals}f}", f"{b:.{decimals}f}"))[0] == texts[1] and a != b and decimals < 8:
        decimals += 1
    return texts


def ranges(seeds: Sequence[int]) -> str:
    """0, 1, 2, 5 as 0-2, 5."""
    runs: list[list[int]] = []
    for seed in seeds:
        if runs and seed == runs[-1][-1] + 1:
            runs[-1].append(seed)
        else:
            runs.append([seed])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
