"""What the server of a deployment is told: one TOML file, checked."""

from __future__ import annotations

import logging
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from feddrift import algorithms
from feddrift.engines.flower.client.store import checked_name
from feddrift.engines.flower.server.connection import Roster
from feddrift.engines.flower.server.exchange import WaitingRules
from feddrift.errors import ConfigError, problem
from feddrift.nets import check_fits, imported, net_for
from feddrift.router import Route
from feddrift.runs.record import AUDIT, OLD_HISTORY
from feddrift.types import Average, Local, Net

MAX_ARCHIVED = 100  # time steps in the archive, beside those that are pinned
REVOKED = "revoked"  # in the folder of keys, that of those which were shut out
MAX_WEIGHTS = 2**28  # of a net: 1 GB, which goes to every client and back in every round

_log = logging.getLogger("feddrift")


class Settings(BaseModel):
    """The federation, its algorithm, and how long the server waits for whom."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    experiment: str = Field(description="its name; clients keep what belongs to different ones apart")
    clients: tuple[str, ...] = Field(min_length=1, description="all who may ever take part; places may stay empty")
    features: tuple[Annotated[int, Field(ge=1, le=1_000_000)], ...] = Field(
        min_length=1, description="the shape of one input"
    )
    classes: tuple[str | int, ...] = Field(min_length=2, description="the labels, in the same order at all clients")
    algorithm: str = Field(default="FedDrift", description="a name from `feddrift list`; without this line FedDrift")
    settings: dict[str, Any] = Field(default={}, description="of the algorithm, e.g. delta = 0.1")
    seed: int = Field(default=0, ge=0, lt=2**63)
    time_steps: int | None = Field(default=None, ge=1, description="how many; none: on and on")
    rounds: int = Field(default=10, ge=1, description="R; each costs one exchange of several seconds")
    steps: int = Field(default=100, ge=1, description="K, local steps per round")
    batch: int = Field(default=50, ge=1)
    lr: float = Field(default=1e-2, gt=0)
    average: Average = Field(
        default="mean", description="or median, trimmed, clipped: bounds what a few clients can do"
    )
    balance: bool = Field(default=False, description="whether clients train as if all classes were equally frequent")
    participation: float = Field(default=1.0, gt=0, le=1, description="the share of the clients that train in a round")
    rest: int = Field(
        default=0,
        ge=0,
        description="time steps unused after which a model is sent to badly served clients only; 0: never",
    )
    route: Route = Field(
        default="none",
        description="or row, running, batch: inputs choose the model that votes, each alone, so far, or all at once, "
        "where that has paid",
    )
    defend: bool = Field(
        default=False, description="bound what one client can do to the others; without this line false"
    )
    model: str | None = Field(default=None, description="linear, mlp:64,64, or a net of your own, module:object")
    start: float | Literal["data"] = Field(default="data", description="when new data are there, or every so many s")
    quorum: int = Field(default=1, ge=1, description="clients; with fewer the server waits, then says so and stops")
    patience: float = Field(default=600.0, gt=0, description="how long it waits, in seconds")
    grace: float = Field(default=60.0, gt=0, description="once a quorum has new data, how long others are waited for")
    hello: float = Field(default=60.0, gt=0, description="deadlines of an exchange, in seconds")
    evaluate: float = Field(default=300.0, gt=0)
    train: float = Field(default=600.0, gt=0)
    explain: bool = Field(
        default=True, description="ask clients that raise an alarm which inputs and classes moved; false: never"
    )
    archive: int = Field(
        default=MAX_ARCHIVED,
        ge=0,
        description="time steps whose models are kept to go back to, beside pinned ones; 0: none",
    )
    notify: tuple[str, ...] = Field(
        default=(),
        description="commands and web addresses that are told of drifts, silent or refused clients, a lost quorum, a "
        "certificate that ends",
    )
    look: float = Field(
        default=10.0,
        gt=0,
        description="how often clients are asked for new data, in seconds; while none has any, down to once a minute",
    )

    @field_validator("clients")
    @classmethod
    def _distinct(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(names)) < len(names):
            raise ValueError("clients must have different names")
        return tuple(checked_name(name, "a client") for name in names)

    @field_validator("classes")
    @classmethod
    def _once_each(cls, labels: tuple[str | int, ...]) -> tuple[str | int, ...]:
        if len(set(labels)) < len(labels):
            raise ValueError("every class must be named once")
        return labels

    @classmethod
    def read(cls, path: Path) -> Settings:
        """The settings in a TOML file, or an error that says in one sentence what is wrong with it."""
        try:
            return cls.checked(tomllib.loads(path.read_text(encoding="utf-8")), str(path))
        except (OSError, ValueError, RecursionError) as error:  # not there, not TOML, or beyond what Python reads
            raise ConfigError(f"cannot read {path}: {error}") from None

    @classmethod
    def checked(cls, values: dict[str, Any], where: str) -> Settings:
        """The settings in a dictionary, or an error that begins with `where`."""
        try:
            settings = cls(**values)
        except ValidationError as error:
            raise ConfigError(f"{where}, {problem(error)}") from None
        if f"{checked_name(settings.experiment, 'an experiment')}.jsonl" in (AUDIT, OLD_HISTORY):
            raise ConfigError(f"{where}: an experiment cannot be called {settings.experiment}, other files are")
        algorithm = algorithms.algorithm(settings.algorithm, **settings.settings)
        if getattr(algorithm, "needs_truth", False):
            raise ConfigError(f"{where}: {settings.algorithm} needs the true concepts, which nobody knows here")
        if settings.quorum > len(settings.clients):
            raise ConfigError(f"{where}: quorum must be in 1..{len(settings.clients)}, got {settings.quorum}")
        _ = settings.waiting, settings.local  # what they refuse shows now
        return settings

    @property
    def local(self) -> Local:
        """How clients train."""
        return Local(self.rounds, self.steps, self.batch, self.lr, average=self.average, balance=self.balance)

    @property
    def waiting(self) -> WaitingRules:
        """How long the server waits, and for whom."""
        names = ("quorum", "patience", "hello", "evaluate", "train", "start", "grace", "look")
        return WaitingRules(**{name: getattr(self, name) for name in names})

    def net(self, folder: Path) -> Net:
        """The net all clients train; by default a perceptron with one hidden layer."""
        d, n_classes = math.prod(self.features), len(self.classes)
        source = imported(self.model, folder)
        if source is None or isinstance(source, str):
            n_weights = sum(a * b for a, b in pairwise((d, *_hidden(source, d), n_classes)))
            if n_weights > MAX_WEIGHTS:
                raise ConfigError(
                    f"features = {list(self.features)} make a net of {n_weights:.0e} weights, and at most "
                    f'{MAX_WEIGHTS:.0e} can be sent around: name a smaller one, such as model = "linear" or "mlp:64"'
                )
            return net_for(source, self.features, n_classes)
        net = net_for(source, self.features, n_classes)
        check_fits(net, self.features, n_classes)
        return net

    def roster(self, keys: Path) -> Roster:
        """Who takes part, by the public keys in this folder."""
        return Roster(self.experiment, self.clients, Keys(keys, self.clients), self.features, len(self.classes))


class Keys(Mapping[bytes, str]):
    """The clients by their public keys, KEYS/<client>.pub; a folder that changes while the server runs is read again.

    A client has none where the last one was taken back, and then stands in KEYS/revoked.
    """

    def __init__(self, folder: Path, clients: tuple[str, ...]) -> None:
        self.folder, self.clients = folder, clients
        self._stamp, self._found = self._look(), self._read()

    def _look(self) -> list[tuple[str, int, int]]:
        stats = ((path.name, path.stat()) for path in sorted(self.folder.glob("*.pub")))
        return [(name, stat.st_mtime_ns, stat.st_ino) for name, stat in stats]

    def _read(self) -> dict[bytes, str]:
        paths = {name: self.folder / f"{name}.pub" for name in self.clients}
        taken_back = {name for name, path in paths.items() if not path.exists() and self._was_revoked(name)}
        found = {public_key(path): name for name, path in paths.items() if name not in taken_back}
        if len(found) < len(paths) - len(taken_back):
            raise ConfigError(f"{self.folder}: every client needs a key of its own")
        return found

    def _was_revoked(self, name: str) -> bool:
        stems = (path.stem for path in (self.folder / REVOKED).glob("*.pub"))
        return any(re.fullmatch(rf"{re.escape(name)}-[0-9a-f]{{16}}", stem) for stem in stems)

    def _now(self) -> dict[bytes, str]:
        try:
            if (stamp := self._look()) != self._stamp:
                self._stamp, self._found = stamp, self._read()
        except (OSError, ConfigError) as error:  # a file that is just being written
            _log.warning("the keys stay what they were: %s", error)
        return self._found

    def __getitem__(self, key: bytes) -> str:
        return self._now()[key]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())


def public_key(path: Path) -> bytes:
    """The key in a file KEYS/<client>.pub, as the SuperLink has it."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

    try:
        key = load_ssh_public_key(path.read_bytes())
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"cannot read the key of client {path.stem}, {path}: {error}") from None
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def _hidden(model: str | None, d: int) -> list[int]:
    """The sizes of the hidden layers of a net that is built in, for d features."""
    if model is None:
        return [2 * d]
    return [] if model == "linear" else [int(size) for size in model.removeprefix("mlp:").split(",")]
