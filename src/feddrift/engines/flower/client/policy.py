"""Policy of a client: what its operator allows a server to request. This module does not need Flower."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

from feddrift.errors import ConfigError, FeddriftError, safe_repr
from feddrift.training import Local

MIN_GROUP_ROWS = 10  # no statistic of a class or group with fewer rows is sent, whatever the policy is
COPIES_IN_TRAINING = 5  # of a model: its parameters, their update, and three moments of the optimizer
COPIES_IN_SCORING = 2
BYTES_PER_GB = 10**9


class RequestRefusedError(FeddriftError):
    """A request that the client's policy does not allow; the message is one sentence."""


@dataclass(frozen=True)
class Policy:
    """Limits of what a server may request of a client: the table `[policy]` in client.toml.

    The minima hold for trained models that are sent. Private models, which never leave the client, are exempt.

    Args:
        min_rows: The minimum number of rows that an update is trained on. Smaller batches of data are not shown to the
            server at all. No row may have a larger share of the drawn examples than one of `min_rows` equal rows has.
        min_batch: The minimum batch of a local step.
        min_steps: The minimum number of local steps.
        allow_sgd: Whether updates may be trained with the optimizer sgd.
        max_requests: The maximum number of models that requests of one time step may score or train; each round counts.
        max_steps: The maximum number of local steps in one time step.
        max_memory: The maximum memory in GB that a request is expected to need.
        pin: Whether changes of the settings of an experiment are refused until the operator accepts them.
        min_group_rows: The minimum number of rows of a class or group in statistics; not a setting of client.toml.
    """

    min_rows: int = 10
    min_batch: int = 10
    min_steps: int = 5
    allow_sgd: bool = False
    max_requests: int = 2000
    max_steps: int = 1_000_000
    max_memory: float = 8.0
    pin: bool = True
    min_group_rows: int = MIN_GROUP_ROWS

    @classmethod
    def from_table(cls, table: Any, source: str) -> Policy:
        """Check the table `[policy]` of client.toml and return the policy.

        Args:
            table: The table.
            source: The beginning of error messages.

        Raises:
            ConfigError: A setting is unknown or has an invalid value.
        """
        if not isinstance(table, Mapping):
            raise ConfigError(f"{source}: policy must be a table [policy], got {safe_repr(table)}")
        legal = [field.name for field in fields(cls) if field.name != "min_group_rows"]
        for name, value in table.items():
            if name not in legal:
                raise ConfigError(f"{source}: [policy] has no setting {name!r}; legal are {', '.join(legal)}")
            default = getattr(cls, name)
            if isinstance(default, bool):
                is_legal = isinstance(value, bool)
                expected = "true or false"
            elif isinstance(default, int):
                is_legal = type(value) is int and value >= 1
                expected = "a whole number, at least 1"
            else:
                is_legal = type(value) in (int, float) and 0 < value < math.inf
                expected = "a number of GB above 0"
            if not is_legal:
                raise ConfigError(f"{source}: {name} in [policy] must be {expected}, got {safe_repr(value)}")
        return cls(**table)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings of client.toml by name."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "min_group_rows"}

    @property
    def min_scored_rows(self) -> int:
        """Minimum number of held-out rows on which models are scored: half of `min_rows`, as a half may be held out."""
        return (self.min_rows + 1) // 2

    def check_local_steps(self, local: Local) -> None:
        """Check that local training mixes enough rows for an update that is sent.

        Raises:
            RequestRefusedError: The batch or the number of steps is too small, or the optimizer is not allowed.
        """
        if local.optimizer != "adam" and not self.allow_sgd:
            raise RequestRefusedError(
                f"it requests the optimizer {local.optimizer}, the policy allows adam only: set allow_sgd = true in "
                "[policy] of client.toml to allow it"
            )
        for name, asked, minimum in (
            ("batch", local.batch, self.min_batch),
            ("steps", local.steps, self.min_steps),
        ):
            if asked < minimum:
                raise RequestRefusedError(f"it requests {name} = {asked}, the policy requires at least {minimum}")

    def check_rows(self, effective_rows: float, rows_per_cell: int) -> None:
        """Check that no few rows determine an update that is sent.

        Args:
            effective_rows: One divided by the largest share of a row in the drawn examples.
            rows_per_cell: The smallest number of distinct rows of a cell from which examples are drawn.

        Raises:
            RequestRefusedError: There are too few rows, or one has too much weight.
        """
        if effective_rows < self.min_rows * (1 - 1e-9):
            raise RequestRefusedError(
                f"it requests an update in which one row counts as much as 1 of {effective_rows:.3g}, the policy "
                f"requires at least {self.min_rows} rows"
            )
        if rows_per_cell < self.min_scored_rows:
            raise RequestRefusedError(
                f"it requests training on {rows_per_cell} rows of a time step, the policy requires at least "
                f"{self.min_scored_rows}"
            )

    def check_scored_rows(self, n_rows: int) -> None:
        """Check the number of held-out rows on which models are scored.

        Raises:
            RequestRefusedError: There are too few.
        """
        if n_rows < self.min_scored_rows:
            raise RequestRefusedError(
                f"it requests scores on {n_rows} held-out rows, the policy requires at least {self.min_scored_rows}"
            )

    def check_memory(self, n_bytes: float) -> None:
        """Check the expected memory of a request.

        Raises:
            RequestRefusedError: It is above the maximum.
        """
        if n_bytes > self.max_memory * BYTES_PER_GB:
            raise RequestRefusedError(
                f"it would need about {n_bytes / BYTES_PER_GB:.3g} GB of memory, the policy allows {self.max_memory:g}"
            )


PERMISSIVE = Policy(min_rows=1, min_batch=1, min_steps=1, allow_sgd=True, pin=False, min_group_rows=1)


def choose_sent_groups(counts: Sequence[int], min_rows: int) -> list[bool]:
    """Choose the groups of rows whose statistics may be sent.

    The rest of the rows could be computed from the statistics of all rows, so it must be empty or large enough, too.

    >>> choose_sent_groups([30, 1, 20], 10), choose_sent_groups([30, 12, 20], 10), choose_sent_groups([30, 6, 5], 10)
    ([True, False, False], [True, True, True], [True, False, False])
    """
    sent = [count >= min_rows for count in counts]
    order = sorted(range(len(counts)), key=lambda k: counts[k])
    for k in order:
        rest = sum(count for count, is_sent in zip(counts, sent, strict=True) if not is_sent)
        if sent[k] and 0 < rest < min_rows:
            sent[k] = False
    return sent


def count_weights(model: Any, features: Sequence[int], n_classes: int) -> int | None:
    """Return the number of weights of a built-in perceptron, without building it; None: it is another net."""
    n_features = math.prod(features)
    if model is None:
        hidden = [2 * n_features]
    elif model == "linear":
        hidden = []
    elif isinstance(model, str) and model.startswith("mlp:"):
        hidden = [int(size) for size in model.removeprefix("mlp:").split(",")]
    else:
        return None
    sizes = [n_features, *hidden, n_classes]
    return sum((n_inputs + 1) * n_outputs for n_inputs, n_outputs in pairwise(sizes))
