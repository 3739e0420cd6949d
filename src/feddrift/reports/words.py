"""Settings as short texts: what is set, what is not the default, what sets runs apart."""

from __future__ import annotations

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


def describe(settings: Mapping[str, Any]) -> str:
    """Settings as one line.

    >>> describe({"delta": 0.1, "init": "warm", "max_models": None})
    'delta=0.1, init=warm, max_models=none'
    """
    return ", ".join(f"{key}={'none' if value is None else value}" for key, value in settings.items())


def ranges(seeds: Sequence[int]) -> str:
    """0, 1, 2, 5 as 0-2, 5."""
    runs: list[list[int]] = []
    for seed in seeds:
        if runs and seed == runs[-1][-1] + 1:
            runs[-1].append(seed)
        else:
            runs.append([seed])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
