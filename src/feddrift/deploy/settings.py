"""Settings of a deployment's server: federation.toml and the folder of client keys."""

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
from feddrift.engines.conditions.conditions import Conditions
from feddrift.engines.flower.client.store import check_name
from feddrift.engines.flower.server.connection import Roster
from feddrift.engines.flower.server.exchange import WaitingRules
from feddrift.errors import ConfigError, describe_validation_error
from feddrift.nets import build_client_net, check_fits, import_model
from feddrift.router import Route
from feddrift.runs.config import DefendOption
from feddrift.runs.record import OTHER_LOG_FILES
from feddrift.types import Average, Local, Net

MAX_ARCHIVED_TIME_STEPS = 100  # pinned time steps are not counted
REVOKED_FOLDER = "revoked"  # subfolder of the key folder, with the keys that the server refuses
MAX_MODEL_WEIGHTS = 2**28  # 1 GB, sent to every client and back in each round

_log = logging.getLogger("feddrift")


class Settings(BaseModel):
    """Settings of a federation: its clients and data, its algorithm, and the deadlines of the server."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    experiment: str = Field(description="name of the experiment; clients store each experiment separately")
    clients: tuple[str, ...] = Field(min_length=1, description="names of all clients; they may join later or never")
    features: tuple[Annotated[int, Field(ge=1, le=1_000_000)], ...] = Field(
        min_length=1, description="shape of one input"
    )
    classes: tuple[str | int, ...] = Field(min_length=2, description="labels, in the same order at all clients")
    algorithm: str = Field(default="FedDrift", description="a name from `feddrift list`; default: FedDrift")
    settings: dict[str, Any] = Field(default={}, description="settings of the algorithm, e.g. delta = 0.1")
    seed: int = Field(default=0, ge=0, lt=2**63)
    time_steps: int | None = Field(default=None, ge=1, description="number of time steps; omit to run indefinitely")
    rounds: int = Field(
        default=10, ge=1, description="R, rounds per time step; each takes one exchange of several seconds"
    )
    steps: int = Field(default=100, ge=1, description="K, local steps per round")
    batch: int = Field(default=50, ge=1)
    lr: float = Field(default=1e-2, gt=0)
    average: Average = Field(
        default="mean", description="or median, trimmed, clipped: these limit the influence of a few clients"
    )
    balance: bool = Field(default=False, description="true: clients train as if all classes were equally frequent")
    participation: float = Field(default=1.0, gt=0, le=1, description="share of the clients that train in a round")
    rest: int = Field(
        default=0,
        ge=0,
        description="a model that is unused for this many time steps is sent only to clients with low accuracy; 0: off",
    )
    share_from: int = Field(
        default=0,
        ge=0,
        description="a model is sent to all clients once this many have trained it, until then to fewer; 0: off",
    )
    route: Route = Field(
        default="none",
        description="or row, running, batch: inputs choose the model that predicts them, each input alone, with the "
        "inputs before it, or the whole batch, where this was better",
    )
    defend: DefendOption = Field(
        default=False,
        description="limit the influence of one client on the others: robust, or true for the limits of version 0.3; "
        "default: false",
    )
    model: str | None = Field(default=None, description="linear, mlp:64,64, or your own net as module:object")
    start: float | Literal["data"] = Field(
        default="data", description="when a time step starts: with new data, or a number of seconds"
    )
    quorum: int = Field(
        default=1, ge=1, description="minimum number of clients; with fewer the server waits, and then stops"
    )
    patience: float = Field(default=600.0, gt=0, description="seconds that the server waits for a quorum")
    grace: float = Field(
        default=60.0, gt=0, description="seconds that the server waits for more clients once a quorum has new data"
    )
    hello: float = Field(
        default=60.0, gt=0, description="deadline in seconds of this exchange, as evaluate and train are of theirs"
    )
    evaluate: float = Field(default=300.0, gt=0)
    train: float = Field(default=600.0, gt=0)
    explain: bool = Field(
        default=True, description="ask clients that raise an alarm which inputs and classes moved; false: never ask"
    )
    archive: int = Field(
        default=MAX_ARCHIVED_TIME_STEPS,
        ge=0,
        description="number of past time steps whose models are kept, besides pinned ones; 0: none",
    )
    notify: tuple[str, ...] = Field(
        default=(),
        description="commands and web addresses that are notified of drifts, silent or refused clients, a lost "
        "quorum, and certificates that expire soon",
    )
    look: float = Field(
        default=10.0,
        gt=0,
        description="seconds between requests for new data; while no client has any, the interval grows to a minute",
    )

    @field_validator("clients")
    @classmethod
    def _check_client_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(names)) < len(names):
            raise ValueError(f"clients must have different names, got {list(names)}")
        return tuple(check_name(name, "a client") for name in names)

    @field_validator("classes")
    @classmethod
    def _check_classes(cls, labels: tuple[str | int, ...]) -> tuple[str | int, ...]:
        if len(set(labels)) < len(labels):
            raise ValueError(f"classes must be different from each other, got {list(labels)}")
        return labels

    @classmethod
    def read(cls, path: Path) -> Settings:
        """Read a TOML file.

        Raises:
            ConfigError: If the file cannot be read or a setting is invalid; the message is one sentence.
        """
        try:
            return cls.from_dict(tomllib.loads(path.read_text(encoding="utf-8")), str(path))
        except (OSError, ValueError, RecursionError) as error:  # missing, not TOML, or nested too deeply
            raise ConfigError(f"cannot read {path}: {error}") from None

    @classmethod
    def from_dict(cls, values: dict[str, Any], source: str) -> Settings:
        """Check settings and return them.

        Args:
            values: The settings by name.
            source: The beginning of error messages, such as the path of the file.

        Raises:
            ConfigError: If a setting is invalid.
        """
        try:
            settings = cls(**values)
        except ValidationError as error:
            raise ConfigError(f"{source}: {describe_validation_error(error)}") from None
        if f"{check_name(settings.experiment, 'an experiment')}.jsonl" in OTHER_LOG_FILES:
            raise ConfigError(
                f"{source}: experiment {settings.experiment!r} is the name of another file: choose another name"
            )
        algorithm = algorithms.algorithm(settings.algorithm, **settings.settings)
        if getattr(algorithm, "needs_truth", False):
            raise ConfigError(
                f"{source}: {settings.algorithm} needs the true concepts, which are unknown in a deployment"
            )
        if settings.quorum > len(settings.clients):
            raise ConfigError(f"{source}: quorum must be in 1..{len(settings.clients)}, got {settings.quorum}")
        _ = settings.waiting_rules, settings.local  # they check their values
        settings.conditions.check_algorithm(algorithm)
        return settings

    @property
    def local(self) -> Local:
        """Settings of local training."""
        return Local(self.rounds, self.steps, self.batch, self.lr, average=self.average, balance=self.balance)

    @property
    def conditions(self) -> Conditions:
        """Conditions of the run."""
        names = ("participation", "rest", "share_from", "route", "defend")
        return Conditions(**{name: getattr(self, name) for name in names})

    @property
    def waiting_rules(self) -> WaitingRules:
        """Deadlines and quorum of the exchanges with clients."""
        names = ("quorum", "patience", "hello", "evaluate", "train", "start", "grace", "look")
        return WaitingRules(**{name: getattr(self, name) for name in names})

    def create_net(self, folder: Path) -> Net:
        """Create the net that all clients train; by default a perceptron with one hidden layer.

        Args:
            folder: The folder that contains federation.toml and the module of a custom net.

        Raises:
            ConfigError: If the net does not fit the data, or has too many weights.
        """
        n_features = math.prod(self.features)
        n_classes = len(self.classes)
        source = import_model(self.model, folder)
        if source is None or isinstance(source, str):
            sizes = (n_features, *_parse_hidden_sizes(source, n_features), n_classes)
            n_weights = sum(n_inputs * n_outputs for n_inputs, n_outputs in pairwise(sizes))
            if n_weights > MAX_MODEL_WEIGHTS:
                raise ConfigError(
                    f"with features = {list(self.features)} the net has {n_weights:.0e} weights, at most "
                    f"{MAX_MODEL_WEIGHTS:.0e} are allowed: choose a smaller net, such as "
                    'model = "linear" or "mlp:64"'
                )
            return build_client_net(source, self.features, n_classes)
        net = build_client_net(source, self.features, n_classes)
        check_fits(net, self.features, n_classes)
        return net

    def read_roster(self, keys: Path) -> Roster:
        """Return the roster of the clients, with their public keys from this folder."""
        return Roster(self.experiment, self.clients, ClientKeys(keys, self.clients), self.features, len(self.classes))


class ClientKeys(Mapping[bytes, str]):
    """Names of the clients by public key, from the files KEYS/<client>.pub.

    The folder is read again if it changes while the server runs. A client whose last key was revoked has no such file,
    but a file KEYS/revoked/<client>-<digest>.pub.
    """

    def __init__(self, folder: Path, clients: tuple[str, ...]) -> None:
        self.folder = folder
        self.clients = clients
        self._stamps = self._read_file_stamps()
        self._names = self._read_keys()

    def _read_file_stamps(self) -> list[tuple[str, int, int]]:
        stats = ((path.name, path.stat()) for path in sorted(self.folder.glob("*.pub")))
        return [(name, stat.st_mtime_ns, stat.st_ino) for name, stat in stats]

    def _read_keys(self) -> dict[bytes, str]:
        paths = {name: self.folder / f"{name}.pub" for name in self.clients}
        revoked = {name for name, path in paths.items() if not path.exists() and self._has_revoked_key(name)}
        names = {read_public_key(path): name for name, path in paths.items() if name not in revoked}
        if len(names) < len(paths) - len(revoked):
            raise ConfigError(
                f"{self.folder}: several clients have the same key: `feddrift deploy rotate` creates others"
            )
        return names

    def _has_revoked_key(self, name: str) -> bool:
        stems = (path.stem for path in (self.folder / REVOKED_FOLDER).glob("*.pub"))
        return any(re.fullmatch(rf"{re.escape(name)}-[0-9a-f]{{16}}", stem) for stem in stems)

    def _refresh(self) -> dict[bytes, str]:
        try:
            stamps = self._read_file_stamps()
            if stamps != self._stamps:
                self._names = self._read_keys()
                self._stamps = stamps
        except (OSError, ConfigError) as error:  # perhaps a file is being written
            _log.warning("the server continues with the keys that it has read before: %s", error)
        return self._names

    def __getitem__(self, key: bytes) -> str:
        return self._refresh()[key]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._refresh())

    def __len__(self) -> int:
        return len(self._refresh())


def read_public_key(path: Path) -> bytes:
    """Read the key in a file KEYS/<client>.pub and return it in the format of the SuperLink."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

    try:
        key = load_ssh_public_key(path.read_bytes())
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"cannot read the key of client {path.stem}, {path}: {error}") from None
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def _parse_hidden_sizes(model: str | None, n_features: int) -> list[int]:
    """Return the sizes of the hidden layers of a built-in net."""
    if model is None:
        return [2 * n_features]
    return [] if model == "linear" else [int(size) for size in model.removeprefix("mlp:").split(",")]
