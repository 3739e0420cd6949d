"""The catalogue: every name of the paper is a small composition."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from feddrift._internal import plugins
from feddrift.algorithms.auto.method import FedDriftAuto
from feddrift.algorithms.baselines.adaptive import AdaptiveFedAvg
from feddrift.algorithms.baselines.aue import AUE
from feddrift.algorithms.baselines.cfl import CFL
from feddrift.algorithms.baselines.driftsurf import DriftSurf
from feddrift.algorithms.baselines.ifca import IFCA
from feddrift.algorithms.baselines.kue import KUE
from feddrift.algorithms.baselines.local import FineTuned, LocalOnly
from feddrift.algorithms.baselines.oracle import Oracle
from feddrift.algorithms.baselines.single import Single
from feddrift.algorithms.feddrift.detection import Detecting
from feddrift.algorithms.feddrift.fair import FairFedDrift
from feddrift.algorithms.feddrift.method import FedDrift, FedDriftEager
from feddrift.algorithms.feddrift.trunk import FedDriftTrunk
from feddrift.algorithms.feddrift.variant_c import FedDriftC
from feddrift.algorithms.later.fedccfa import FedCCFAHeads
from feddrift.algorithms.later.fedrc import FedRC
from feddrift.algorithms.later.fedrep import FedRep
from feddrift.algorithms.later.feroma import FEROMA
from feddrift.algorithms.later.flash import Flash
from feddrift.algorithms.later.flux import FLUX
from feddrift.algorithms.options import options, settings
from feddrift.data import MADE, TABLE, Stream
from feddrift.errors import ConfigError, safe_repr, unknown
from feddrift.memory import EXPONENTIAL, LINEAR, window
from feddrift.types import Algorithm


@dataclass(frozen=True)
class Entry:
    """A name of the catalogue: how to make it and what it is."""

    cls: type[Any]
    fixed: dict[str, Any]
    summary: str


RECOMMENDED = "FedDrift-Auto"  # what runs where nobody names an algorithm

ALGORITHMS: dict[str, Entry] = {
    RECOMMENDED: Entry(
        FedDriftAuto, {}, "the default, no settings: models for conflicts in the data, private ones beside them"
    ),
    "Oblivious": Entry(Single, {}, "one model on all data so far: FedAvg that knows no drift"),
    "Window": Entry(Single, {"memory": window(1)}, "one model on the newest time step"),
    "Window-2": Entry(Single, {"memory": window(2)}, "one model on the two newest time steps"),
    "Weighted-Linear": Entry(Single, {"memory": LINEAR}, "one model, data weighted in proportion to their time"),
    "Weighted-Exp": Entry(Single, {"memory": EXPONENTIAL}, "one model, weights halve with each step of age"),
    "Adaptive-FedAvg": Entry(
        AdaptiveFedAvg, {}, "one model on the newest time step, its learning rate tuned by the server"
    ),
    "DriftSurf": Entry(DriftSurf, {}, "one model, replaced after a central alarm and a trial of a new one"),
    "AUE": Entry(AUE, {}, "weighted vote of the models of the last 5 time steps"),
    "AUE-PC": Entry(AUE, {"per_client": True}, "AUE with weights of each client's own"),
    "KUE": Entry(KUE, {}, "vote of 10 models on random features, weighted by kappa"),
    "CFL": Entry(CFL, {}, "clusters that split when their clients' updates point apart"),
    "CFL-W": Entry(CFL, {"memory": window(1)}, "CFL that remembers one time step"),
    "IFCA(T)": Entry(IFCA, {"every_round": False}, "a given number of models, clients choose once per time step"),
    "IFCA": Entry(IFCA, {}, "a given number of models, clients choose in every round"),
    "IFCA-W": Entry(IFCA, {"memory": window(1)}, "IFCA that remembers one time step"),
    "FedDrift-Eager": Entry(FedDriftEager, {}, "one new model for all clients that drift at a time"),
    "FedDrift-Eager-W": Entry(FedDriftEager, {"memory": window(1)}, "FedDrift-Eager that remembers one time step"),
    "FedDrift": Entry(FedDrift, {}, "a new model for each client that drifts, then hierarchical merging"),
    "FedDrift-W": Entry(FedDrift, {"memory": window(1)}, "FedDrift that remembers one time step"),
    "FedDrift-C": Entry(FedDriftC, {}, "FedDrift with at most one new global model per time step"),
    "FedDrift-Trunk": Entry(FedDriftTrunk, {}, "FedDrift whose concepts share a trunk where that serves them"),
    "Local": Entry(LocalOnly, {}, "a model for each client, trained on its own data alone: nothing is sent"),
    "Local-W": Entry(LocalOnly, {"memory": window(1)}, "Local that remembers one time step"),
    "FineTuned": Entry(FineTuned, {}, "one model for all, and at each client a copy that learns from its own data"),
    "FineTuned-W": Entry(FineTuned, {"memory": window(1)}, "FineTuned whose copies learn from the newest data alone"),
    "Majority": Entry(LocalOnly, {"sees_inputs": False}, "each client's most frequent class, without a look at inputs"),
    "FedRep": Entry(FedRep, {}, "one trunk that learns from all, and a head of its own for each client"),
    "Flash": Entry(Flash, {}, "one model on the newest time step, whose server steps by how the clients' changes vary"),
    "FedCCFA-Heads": Entry(FedCCFAHeads, {}, "FedRep on the newest data; clients that agree on a class share its row"),
    "FairFedDrift": Entry(FairFedDrift, {}, "FedDrift that looks at every group of rows, or class, by itself"),
    "FedRC": Entry(FedRC, {}, "a given number of models, mixed at each client by how well they explain its classes"),
    "FedEM": Entry(FedRC, {"by_class": False}, "a given number of models, mixed by how well they explain its data"),
    "FLUX": Entry(FLUX, {}, "clusters of clients whose data look alike to one model, found anew at every time step"),
    "FEROMA": Entry(FEROMA, {}, "a model for each client, mixed of those of clients whose data look like its own"),
    "Oracle": Entry(Oracle, {}, "one model per true concept: the ceiling"),
    "Oracle-W": Entry(Oracle, {"memory": window(1)}, "Oracle that remembers one time step"),
    "Oracle-Trunk": Entry(Oracle, {"share": True}, "one head per true concept on one trunk"),
}

MOST = 1_000_000  # models, or time steps, that a setting may speak of

# Settings that go with the paper's data, by class, setting and family of stream; elsewhere the class's own default.
_DELTA = {"sine": 0.10, "circle": 0.04, "sea": 0.04, "mnist": 0.10, "fmow": 0.06}
BY_FAMILY: dict[type[Any], dict[str, dict[str, float]]] = {
    FedDrift: {"delta": _DELTA},
    FedDriftEager: {"delta": _DELTA},
    FairFedDrift: {},  # compares losses, not errors
    DriftSurf: {"delta": {"sine": 0.10, "circle": 0.05, "sea": 0.02, "mnist": 0.10, "fmow": 0.04}},
    AdaptiveFedAvg: {"lr": {"sine": 0.1}},
}


# How FMoW differs besides: several distributions from the start, and smaller ensembles.
_CHOOSE = {"n_models": 5, "first": "choose"}
ON_FMOW: dict[str, dict[str, Any]] = {
    "FedDrift": {"first": "each"}, "FedDrift-W": {"first": "each"},
    "IFCA(T)": _CHOOSE, "IFCA": _CHOOSE, "IFCA-W": _CHOOSE, "CFL": {"max_models": 5}, "CFL-W": {"max_models": 5},
    "AUE": {"n_models": 4}, "AUE-PC": {"n_models": 4}, "KUE": {"n_models": 3},
}  # fmt: skip


def algorithm(name: str, stream: Stream | None = None, /, **settings: Any) -> Algorithm:
    """The algorithm of this name with these settings; thresholds default to what suits the stream.

    Parameters:
        name: As `feddrift list` has it, or ``package.module:Name`` for your own.
        stream: Whose defaults apply; without it the algorithm's own.
        settings: As `feddrift list` has them, in its table of settings.

    >>> algorithm("FedDrift", delta=0.1).delta
    0.1
    """
    algorithm_entry = entry(name)
    if stream is not None and not isinstance(stream, Stream):
        raise ConfigError(f"the second argument must be a Stream, as fd.stream gives it, got {type(stream).__name__}")
    if stream is not None:
        settings = {**_defaults(name, algorithm_entry.cls, stream, settings), **settings}
    parsed = _parsed(name, algorithm_entry.cls, settings)
    try:
        instance: Algorithm = algorithm_entry.cls(**parsed, **algorithm_entry.fixed)
    except TypeError as error:
        if name in ALGORITHMS:
            raise
        raise ConfigError(f"algorithm '{name}' cannot be made: {error}") from error
    _check(name, instance)
    return instance


def entry(name: str) -> Entry:
    """What the catalogue has under this name, an installed package offers, or lies at ``package.module:Name``."""
    if not isinstance(name, str):
        raise ConfigError(f"an algorithm is found by its name, got {safe_repr(name)}")
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    maker = plugins.find("algorithm", name)
    if maker is None:
        raise unknown("algorithm", name, [*ALGORITHMS, *plugins.installed("algorithm"), "package.module:Name"])
    if isinstance(maker, type):
        _check(name, maker)
    elif not callable(maker):
        raise ConfigError(f"algorithm '{name}' must be a class or a function that makes one, got {maker!r}")
    return Entry(maker, {}, (maker.__doc__ or "").partition("\n")[0])


def _check(name: str, candidate: Any) -> None:
    for method in ("init", "step"):
        if not callable(getattr(candidate, method, None)):
            raise ConfigError(f"'{name}' is no algorithm: it needs init(fed) and step(state, fed), got no {method}")


def _defaults(name: str, cls: type[Any], stream: Stream, given: Mapping[str, Any]) -> dict[str, Any]:
    """What suits the stream, where the settings that are given leave it open."""
    defaults: dict[str, Any] = {k: v[stream.family] for k, v in by_family(cls).items() if stream.family in v}
    if stream.family == "fmow":
        defaults |= ON_FMOW.get(name, {})
    detects = isinstance(cls, type) and issubclass(cls, Detecting) and not cls.has_own_test
    if detects and stream.family == TABLE and not {"delta", "metric"} & set(given):
        defaults["test"] = "two-sample"  # nobody knows a delta there; who gives one means a threshold
    if stream.family == MADE and "delta" in by_family(cls) and not {"delta", "test"} & set(given):
        instead = ", or test=two-sample, which needs none" if detects else ""
        raise ConfigError(f"{name} needs a delta for {stream.name}, such as delta=0.05{instead}: nobody published one")
    if cls is IFCA and stream.concepts is not None:
        defaults["n_models"] = len(set(stream.concepts[:-1].reshape(-1).tolist()))
    return defaults


def by_family(cls: type[Any]) -> dict[str, dict[str, float]]:
    """The settings of a class, or of the one it is derived from, that depend on the family of the stream."""
    return next((BY_FAMILY[base] for base in getattr(cls, "__mro__", ()) if base in BY_FAMILY), {})


def _parsed(name: str, cls: type[Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as keyword arguments of the class, converted from text where they are text."""
    legal, hints = options(cls), typing.get_type_hints(cls)
    parsed = {}
    for key, value in settings.items():
        if not legal:
            raise ConfigError(f"{name} has no settings, got '{key}'")
        if key not in legal:
            raise unknown(f"setting of {name}", key, legal)
        field = legal[key]
        adapter: TypeAdapter[Any] = TypeAdapter(hints[field.name])
        try:
            if isinstance(value, str) and value.lower() != "none":
                parsed[field.name] = adapter.validate_strings(value)
            else:
                parsed[field.name] = adapter.validate_python(None if isinstance(value, str) else value)
        except ValidationError as error:
            problem = error.errors()[0]["msg"]
            raise ConfigError(f"{name}.{key}: {problem[0].lower()}{problem[1:]}, got {safe_repr(value)}") from None
        converted = parsed[field.name]
        if isinstance(value, bool) and not isinstance(converted, bool):
            raise ConfigError(f"{name}.{key}: input should be a number, got {value}")
        if isinstance(converted, int) and abs(converted) > MOST:
            raise ConfigError(f"{name}.{key}: input should be at most {MOST}, got {safe_repr(value)}")
    return parsed


__all__ = ["ALGORITHMS", "ON_FMOW", "RECOMMENDED", "Entry", "algorithm", "by_family", "entry", "options", "settings"]
