"""How a client trains: the settings of its local steps, and how the server makes one model of what comes back."""

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
# Fields that came after records and messages were there.
LATER = ("balance", "holds", "momentum", "even", "patience", "pull", "precision")


@dataclass(frozen=True, eq=False)
class Pull:
    """A pull in the loss of local training: weight / 2 * |theta - to|^2 is added, so weight (theta - to) to gradients.

    `weight` is one number, or one for each client. A model is pulled to what it was when the round began, or to other
    models: of a stack as long as the one that is trained each to the one in its place, of a single one all to that.

    >>> Local(pull=Pull(0.1)).plain()["pull"]
    {'weight': 0.1, 'to': None}
    """

    weight: float | Sequence[float]
    to: Models | None = None  # None: what it was when the round began

    def __post_init__(self) -> None:
        weights = np.asarray(self.weight, dtype=object).reshape(-1)
        if not len(weights) or not all(isinstance(w, int | float | np.number) and 0 <= w < np.inf for w in weights):
            raise ConfigError(f"the weight of a pull must be numbers of at least 0, got {self.weight!r}")

    def on(self, client: int) -> float:
        """The weight at a client."""
        return float(np.asarray(self.weight).reshape(-1)[client if np.ndim(self.weight) else 0])

    def plain(self) -> dict[str, Any]:
        """Weight, and the ids of the models, for questions that are asked again."""
        weight = np.asarray(self.weight, dtype=np.float64).tolist()
        return {"weight": weight, "to": None if self.to is None else list(self.to.ids)}


@dataclass(frozen=True)
class Local:
    """How a client trains: R `rounds` of K `steps` on minibatches of B (`batch`) examples, with step size eta (`lr`).

    >>> Local(rounds=20, lr=0.05).steps
    50
    """

    rounds: int = 100
    steps: int = 50
    batch: int = 50
    lr: float = 1e-2
    optimizer: Literal["adam", "sgd"] = "adam"  # adam: amsgrad, as PyTorch defines it
    weight_decay: float = 1e-3  # L2 added to the gradient
    bags: bool = False  # each lane trains on its own bootstrap of every cell: Poisson(1) weights, then n rows by weight
    hold_out: float = 0.0  # the share of every cell that is not trained on, drawn anew at each time step
    trains: Trains = "all"  # head: the trunk stays as it is; trunk: the heads do
    average: Average = "mean"  # how the server makes one model of its clients' updates: see averaging.averaged
    balance: bool = False  # every class of a lane's data is drawn equally often: see sampling.balanced
    holds: Holds = "last"  # which end of a cell's order hold_out leaves out
    momentum: float = 0.0  # of sgd, as PyTorch defines it; what it remembers lasts for one time step
    even: int = 0  # train on so many rows of each class, or as many as the rarest has: see sampling.even; 0: on all
    # With hold_out: a client looks at its held-out loss every ceil(N / B) local steps, and stops the round at the e-th
    # look if the loss fell since the look before (in this time step) by less than patience / e. 0: never.
    patience: float = 0.0
    pull: Pull | None = None  # of parameters, towards where the round began or towards other models
    precision: Precision = "float32"  # of matrix products in training on GPUs; tf32: 10 bits, quicker; scores: float32

    def __post_init__(self) -> None:
        for name in ("rounds", "steps", "batch", "even"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise ConfigError(f"{name} must be a whole number, got {value!r}")
            if value < (name != "even"):
                raise ConfigError(f"{name} must be at least {int(name != 'even')}, got {value}")
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
            raise ConfigError(f"momentum goes with optimizer='sgd', adam has its own: got {self.momentum}")
        if not 0 <= self.patience < np.inf:
            raise ConfigError(f"patience must be at least 0, got {self.patience}")
        if self.patience and not self.hold_out:
            raise ConfigError("patience looks at held-out rows: give hold_out a share, such as 0.2")
        if self.precision not in get_args(Precision):
            raise ConfigError(f"precision must be float32 or tf32, got {self.precision!r}")
        if self.pull is not None and not isinstance(self.pull, Pull):
            raise ConfigError(f"pull must be a Pull, such as Pull(0.1), got {self.pull!r}")

    @property
    def by_class(self) -> bool:
        """Whether minibatches are drawn by class, and not from cells as they are."""
        return self.balance or self.even > 0

    def plain(self) -> dict[str, Any]:
        """The fields by name, for records and messages; those that older versions do not know where they say something.

        >>> "holds" in Local(hold_out=0.5).plain(), Local(holds="first").plain()["holds"]
        (False, 'first')
        """
        unsaid = {name for name in LATER if getattr(self, name) == getattr(Local, name)}
        said = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in unsaid}
        return said if self.pull is None else {**said, "pull": self.pull.plain()}
