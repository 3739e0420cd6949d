"""How several models decide together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from feddrift.nets.losses import masked
from feddrift.types import Ballot, Floats, Net, Params


def poll(net: Net, voters: Iterable[tuple[float, Params, Any]], ballot: Ballot, x: Any) -> Floats:
    """The votes [n, class] that models, each with its weight, parameters and mask, cast on inputs x[n, ...]."""
    total: Any = 0.0
    for weight, params, mask in voters:
        logits = np.asarray(masked(net, params, mask, x), dtype=np.float64)
        shares = np.exp(logits - logits.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        total = total + weight * (np.eye(logits.shape[1])[logits.argmax(axis=1)] if ballot == "hard" else shares)
    return np.asarray(total)
