"""What tests with a FakeFederation ask of a state."""

from __future__ import annotations

from feddrift.types import Floats, Models, Votes


def identities(votes: Floats | Votes, models: Models) -> list[int]:
    """The id each client uses."""
    return [models.ids[m] for m in votes.argmax(axis=1)]
