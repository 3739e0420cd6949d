"""Short texts for settings, labels of runs, shifts of data, and ranges of numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from feddrift import algorithms


def select_non_default(algorithm: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that differ from the algorithm's defaults, and delta; all if the algorithm is unknown."""
    entry = algorithms.ALGORITHMS.get(algorithm)
    if entry is None:
        return dict(settings)
    defaults = {name: field.default for name, field in algorithms.get_options(entry.cls).items()}
    return {k: v for k, v in settings.items() if k == "delta" or (k in defaults and v != defaults[k])}


def find_differing_settings(configurations: Sequence[tuple[str, str, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return for each (stream, algorithm, settings) the settings that differ within its stream and algorithm.

    >>> find_differing_settings([("sine-2", "FedDrift", {"delta": 0.1, "init": i}) for i in ("warm", "fresh")])
    [{'init': 'warm'}, {'init': 'fresh'}]
    """
    result = []
    for stream, algorithm, settings in configurations:
        peers = [s for peer_stream, name, s in configurations if (peer_stream, name) == (stream, algorithm)]
        result.append({k: v for k, v in settings.items() if any(k not in p or p[k] != v for p in peers)})
    return result


def find_common_settings(settings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings that are the same in all of these.

    >>> find_common_settings([{"every": "month", "net": "linear"}, {"every": "month"}])
    {'every': 'month'}
    """
    first, *others = settings
    return {k: v for k, v in first.items() if all(k in other and other[k] == v for other in others)}


def build_labels(headers: Sequence[Mapping[str, Any]], elsewhere: Sequence[Mapping[str, Any]] = ()) -> list[str]:
    """Return labels of runs: the algorithm, with the settings and options in which its runs differ.

    Args:
        headers: Headers of records on one stream.
        elsewhere: Headers of records on other streams; the labels also contain the settings that differ there.
    """
    common = find_common_settings([header["overrides"] for header in headers]) if headers else {}
    all_headers = [*headers, *elsewhere]
    differing = find_differing_settings([(h["stream"], h["algorithm"], h["settings"]) for h in all_headers])
    shown_names: dict[str, set[str]] = {}
    for header, settings in zip(all_headers, differing, strict=True):
        shown_names.setdefault(header["algorithm"], set()).update(settings)
    labels = []
    for header in headers:
        own = {k: v for k, v in header["settings"].items() if k in shown_names[header["algorithm"]]}
        own |= {k: v for k, v in header["overrides"].items() if k not in common}
        labels.append(header["algorithm"] + (f" ({format_settings(own)})" if own else ""))
    return labels


def format_settings(settings: Mapping[str, Any]) -> str:
    """Format settings as one line.

    >>> format_settings({"delta": 0.1, "init": "warm", "max_models": None})
    'delta=0.1, init=warm, max_models=none'
    """
    return ", ".join(f"{key}={'none' if value is None else value}" for key, value in settings.items())


def describe_shift(shift: Mapping[str, Any]) -> str:
    """Describe a change in a client's data, with its values before and after.

    >>> describe_shift({"what": "missing", "name": "humidity", "before": 0.04, "after": 0.7, "distance": 0.66})
    'humidity: 70 % missing, before 4 %'
    >>> describe_shift({"what": "mean", "name": "age", "before": 12.0, "after": 21.3, "distance": 0.4, "within": "yes"})
    'age within class yes: mean 21.3, before 12.0'
    """
    what = shift["what"]
    name = shift["name"]
    as_others = ", as at most clients" if shift.get("common") else ""
    label = f"class {name}" if what == "class" else name
    label += f" within class {shift['within']}" if shift.get("within") is not None else ""
    if what in ("mean", "deviation"):
        after, before = _format_pair(shift["after"], shift["before"])
        return f"{label}: {'mean' if what == 'mean' else 'standard deviation'} {after}, before {before}{as_others}"
    after, before = _format_pair(100 * shift["after"], 100 * shift["before"], 2)
    return f"{label}: {after} %{' missing' * (what == 'missing')}, before {before} %{as_others}"


def _format_pair(a: float, b: float, digits: int = 3) -> tuple[str, str]:
    """Format two numbers with the same number of decimals.

    Args:
        a: A number.
        b: A number.
        digits: Number of digits of the larger one. If the texts are equal, they get more, up to 8 decimals.
    """
    largest = max(abs(a), abs(b))
    if largest and not 1e-4 <= largest < 1e6:
        return f"{a:.{digits}g}", f"{b:.{digits}g}"
    decimals = max(0, digits - 1 - math.floor(math.log10(largest))) if largest else 0
    while a != b and decimals < 8 and f"{a:.{decimals}f}" == f"{b:.{decimals}f}":
        decimals += 1
    return f"{a:.{decimals}f}", f"{b:.{decimals}f}"


def format_ranges(seeds: Sequence[int]) -> str:
    """Format sorted numbers as ranges.

    >>> format_ranges([0, 1, 2, 5])
    '0-2, 5'
    """
    runs: list[list[int]] = []
    for seed in seeds:
        if runs and seed == runs[-1][-1] + 1:
            runs[-1].append(seed)
        else:
            runs.append([seed])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
