"""What tests with a FakeFederation ask of a state."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from feddrift.types import Models


def identities(votes: npt.NDArray[np.float64], models: Models) -> list[int]:
    """The id each client uses."""
    return [models.ids[m] for m in votes.argmax(axis=1)]
