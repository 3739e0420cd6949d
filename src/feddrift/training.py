"""Settings of training: the local steps of a client, and the average of the clients' updates at the server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from feddrift.errors import ConfigError

if TYPE_CHECKING:
    from feddrift.types import Models

Average = Literal["mean", "median", "trimmed", "clipped"]
Holds = Literal["last", "first"]
Precision = Literal["float32", "tf32"]
Trains = Literal["all", "head", "trunk"]
# Later fields of `Local`: records and messages contain them only if they differ from the default, as older ones do.
LATER_FIELDS = ("balance", "holds", "momentum", "even", "patience", "pull", "precision")


@dataclass(frozen=True, eq=False)
class Pull:
    """Proximal term of local training: weight / 2 * |theta - to|^2 is added to the loss.

    Args:
        weight: One number, or one for each client.
        to: The models that parameters are pulled to: a stack of one model for all, or of one model for each that is
            trained. By default each model is pulled to its parameters at the start of the round.

    >>> Local(pull=Pull(0.1)).to_dict()["pull"]
    {'weight': 0.1, 'to': None}
    """

    weight: float | Sequence[float]
    to: Models | None = None

    def __post_init__(self) -> None:
        weights = np.asarray(self.weight, dtype=object).reshape(-1)
        if not len(weights) or not all(isinstance(w, int | float | np.number) and 0 <= w < np.inf for w in weights):
            raise ConfigError(f"the weight of a pull must be numbers of at least 0, got {self.weight!r}")

    def get_client_weight(self, client: int) -> float:
        """Return the weight for the client at this position."""
        return float(np.asarray(self.weight).reshape(-1)[client if np.ndim(self.weight) else 0])

    def to_dict(self) -> dict[str, Any]:
        """Return the weight and the ids of the models, as plain values of messages and records."""
        weight = np.asarray(self.weight, dtype=np.float64).tolist()
        return {"weight": weight, "to": None if self.to is None else list(self.to.ids)}


@dataclass(frozen=True)
class Local:
    """Settings of training: R `rounds` of K local `steps` on minibatches of B (`batch`) examples, with step size `lr`.

    >>> Local(rounds=20, lr=0.05).steps
    50
    """

    rounds: int = 100
    steps: int = 50
    batch: int = 50
    lr: float = 1e-2
    optimizer: Literal["adam", "sgd"] = "adam"  # adam: its variant AMSGrad, as PyTorch defines it
    weight_decay: float = 1e-3  # L2 added to the gradient
    bags: bool = False  # each lane trains on its own bootstrap of every cell: Poisson(1) weights, then n rows by weight
    hold_out: float = 0.0  # share of every cell that is not trained on, drawn again at each time step
    trains: Trains = "all"  # the part that is trained; the other part stays as it is
    average: Average = "mean"  # the server's average of the clients' updates: see averaging.average_updates
    balance: bool = False  # every class of a lane's data is drawn equally often: see sampling.build_balanced_tables
    holds: Holds = "last"  # the end of a cell's random order that hold_out leaves out
    momentum: float = 0.0  # of sgd, as PyTorch defines it; reset at each time step
    even: int = 0  # rows of each class to train on, limited by the rarest: see sampling.build_even_tables; 0: all rows
    # Early stopping, with hold_out: a client evaluates its held-out loss every ceil(N / B) local steps. It ends a round
    # after the e-th evaluation if the loss fell by less than patience / e since the evaluation before, which may be in
    # an earlier round of the time step. 0: off.
    patience: float = 0.0
    pull: Pull | None = None  # proximal term
    precision: Precision = "float32"  # of matrix products in training on GPUs; tf32: 10 bits, faster; scores: float32

    def __post_init__(self) -> None:  # noqa: C901  # one check for each field
        for name, minimum in (("rounds", 1), ("steps", 1), ("batch", 1), ("even", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise ConfigError(f"{name} must be a whole number, got {value!r}")
            if value < minimum:
                raise ConfigError(f"{name} must be at least {minimum}, got {value}")
        for name in ("lr", "weight_decay", "hold_out", "momentum", "patience"):
            if not isinstance(getattr(self, name), int | float | np.number):
                raise ConfigError(f"{name} must be a number, got {getattr(self, name)!r}")
        if not 0 < self.lr < np.inf:
            raise ConfigError(f"lr must be above 0, got {self.lr}")
        if self.optimizer not in ("adam", "sgd"):
            raise ConfigError(f"optimizer must be adam or sgd, got {self.optimizer!r}")
        if not 0 <= self.weight_decay < np.inf:
            raise ConfigError(f"weight_decay must be at least 0, got {self.weight_decay}")
        if not 0 <= self.hold_out < 1:
            raise ConfigError(f"hold_out must be in [0, 1), got {self.hold_out}")
        if self.hold_out and self.bags:
            raise ConfigError("bags draw from whole cells: hold_out must be 0 with them")
        if self.trains not in get_args(Trains):
            raise ConfigError(f"trains must be all, head or trunk, got {self.trains!r}")
        if self.average not in get_args(Average):
            raise ConfigError(f"average must be one of {', '.join(get_args(Average))}, got {self.average!r}")
        if not isinstance(self.balance, bool):
            raise ConfigError(f"balance must be True or False, got {self.balance!r}")
        if self.holds not in get_args(Holds):
            raise ConfigError(f"holds must be last or first, got {self.holds!r}")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum must be in [0, 1), got {self.momentum}")
        if self.momentum and self.optimizer != "sgd":
            raise ConfigError(f"momentum is a setting of optimizer='sgd', adam has its own: got {self.momentum}")
        if not 0 <= self.patience < np.inf:
            raise ConfigError(f"patience must be at least 0, got {self.patience}")
        if self.patience and not self.hold_out:
            raise ConfigError("patience needs held-out rows: set hold_out to a share, such as 0.2")
        if self.precision not in get_args(Precision):
            raise ConfigError(f"precision must be float32 or tf32, got {self.precision!r}")
        if self.pull is not None and not isinstance(self.pull, Pull):
            raise ConfigError(f"pull must be a Pull, such as Pull(0.1), got {self.pull!r}")

    @property
    def by_class(self) -> bool:
        """True if minibatches are drawn by class and not from whole cells."""
        return self.balance or self.even > 0

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, for records and messages; LATER_FIELDS only if they differ from the default.

        >>> "holds" in Local(hold_out=0.5).to_dict(), Local(holds="first").to_dict()["holds"]
        (False, 'first')
        """
        left_out = {name for name in LATER_FIELDS if getattr(self, name) == getattr(Local, name)}
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in left_out}
        return values if self.pull is None else {**values, "pull": self.pull.to_dict()}
