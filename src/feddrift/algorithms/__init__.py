"""Catalogue of algorithms: for each name the class, the values of fields that the name fixes, and a summary."""

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
from feddrift.algorithms.feddrift.detection import DriftDetectionOptions
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
from feddrift.algorithms.options import get_options, get_settings
from feddrift.data import SYNTHETIC_FAMILY, TABLE_FAMILY, Stream
from feddrift.errors import ConfigError, describe_problem, safe_repr, unknown_name_error
from feddrift.memory import EXPONENTIAL, LINEAR, window
from feddrift.types import Algorithm


@dataclass(frozen=True)
class CatalogueEntry:
    """Catalogue entry of an algorithm.

    Attributes:
        cls: The class, or a function that makes an algorithm.
        fixed: Fields of the class that the name fixes.
        summary: One line for `feddrift list`.
    """

    cls: type[Any]
    fixed: dict[str, Any]
    summary: str


RECOMMENDED = "FedDrift-Auto"  # the default algorithm

ALGORITHMS: dict[str, CatalogueEntry] = {
    RECOMMENDED: CatalogueEntry(
        FedDriftAuto, {}, "the default, without settings: shared models for conflicting data, and private models"
    ),
    "Oblivious": CatalogueEntry(Single, {}, "one model on all data so far: FedAvg without regard to drift"),
    "Window": CatalogueEntry(Single, {"memory": window(1)}, "one model on the newest time step"),
    "Window-2": CatalogueEntry(Single, {"memory": window(2)}, "one model on the two newest time steps"),
    "Weighted-Linear": CatalogueEntry(
        Single, {"memory": LINEAR}, "one model, data weighted in proportion to their time"
    ),
    "Weighted-Exp": CatalogueEntry(Single, {"memory": EXPONENTIAL}, "one model, weights halve with each step of age"),
    "Adaptive-FedAvg": CatalogueEntry(
        AdaptiveFedAvg, {}, "one model on the newest time step, its learning rate tuned by the server"
    ),
    "DriftSurf": CatalogueEntry(DriftSurf, {}, "one model, replaced after a central alarm and a trial of a new one"),
    "AUE": CatalogueEntry(AUE, {}, "weighted vote of the models of the last 5 time steps"),
    "AUE-PC": CatalogueEntry(AUE, {"per_client": True}, "AUE with separate weights for each client"),
    "KUE": CatalogueEntry(KUE, {}, "vote of 10 models on random features, weighted by Cohen's kappa"),
    "CFL": CatalogueEntry(CFL, {}, "clusters that split when their clients' updates point in different directions"),
    "CFL-W": CatalogueEntry(CFL, {"memory": window(1)}, "CFL on the newest time step"),
    "IFCA(T)": CatalogueEntry(
        IFCA, {"every_round": False}, "a given number of models, clients choose once per time step"
    ),
    "IFCA": CatalogueEntry(IFCA, {}, "a given number of models, clients choose in every round"),
    "IFCA-W": CatalogueEntry(IFCA, {"memory": window(1)}, "IFCA on the newest time step"),
    "FedDrift-Eager": CatalogueEntry(FedDriftEager, {}, "one new model for all clients that drift in a time step"),
    "FedDrift-Eager-W": CatalogueEntry(FedDriftEager, {"memory": window(1)}, "FedDrift-Eager on the newest time step"),
    "FedDrift": CatalogueEntry(FedDrift, {}, "a new model for each client that drifts, then hierarchical merging"),
    "FedDrift-W": CatalogueEntry(FedDrift, {"memory": window(1)}, "FedDrift on the newest time step"),
    "FedDrift-C": CatalogueEntry(FedDriftC, {}, "FedDrift with at most one new global model per time step"),
    "FedDrift-Trunk": CatalogueEntry(FedDriftTrunk, {}, "FedDrift whose models share a trunk where that is better"),
    "Local": CatalogueEntry(LocalOnly, {}, "a model for each client, trained on its own data alone: no model is sent"),
    "Local-W": CatalogueEntry(LocalOnly, {"memory": window(1)}, "Local on the newest time step"),
    "FineTuned": CatalogueEntry(
        FineTuned, {}, "one model for all, and for each client a copy that is trained on its own data"
    ),
    "FineTuned-W": CatalogueEntry(
        FineTuned, {"memory": window(1)}, "FineTuned whose copies are trained on the newest time step"
    ),
    "Majority": CatalogueEntry(
        LocalOnly, {"sees_inputs": False}, "each client's most frequent class, whatever the inputs are"
    ),
    "FedRep": CatalogueEntry(FedRep, {}, "one trunk, trained by all clients, and a head for each client"),
    "Flash": CatalogueEntry(
        Flash, {}, "one model on the newest time step, with server steps that adapt to the variance of updates"
    ),
    "FedCCFA-Heads": CatalogueEntry(
        FedCCFAHeads, {}, "FedRep on the newest time step; clients that agree on a class share its row of the head"
    ),
    "FairFedDrift": CatalogueEntry(FairFedDrift, {}, "FedDrift with a drift test by group of rows, or by class"),
    "FedRC": CatalogueEntry(
        FedRC, {}, "a given number of models, mixed for each client by how well they explain its classes"
    ),
    "FedEM": CatalogueEntry(
        FedRC, {"by_class": False}, "a given number of models, mixed for each client by how well they explain its data"
    ),
    "FLUX": CatalogueEntry(
        FLUX, {}, "clusters of clients with similar data profiles, computed again at every time step"
    ),
    "FEROMA": CatalogueEntry(
        FEROMA, {}, "a model for each client, a mixture of the models of clients with similar data profiles"
    ),
    "Oracle": CatalogueEntry(Oracle, {}, "one model per true concept: the upper bound"),
    "Oracle-W": CatalogueEntry(Oracle, {"memory": window(1)}, "Oracle on the newest time step"),
    "Oracle-Trunk": CatalogueEntry(Oracle, {"share": True}, "one head per true concept on one trunk"),
}

MAX_INTEGER_SETTING = 1_000_000  # largest absolute value of an integer setting, such as a number of models

# Defaults for the paper's data, by class, setting and family of streams; other streams have the default of the class.
_FEDDRIFT_DELTAS = {"sine": 0.10, "circle": 0.04, "sea": 0.04, "mnist": 0.10, "fmow": 0.06}
DEFAULTS_BY_FAMILY: dict[type[Any], dict[str, dict[str, float]]] = {
    FedDrift: {"delta": _FEDDRIFT_DELTAS},
    FedDriftEager: {"delta": _FEDDRIFT_DELTAS},
    FairFedDrift: {},  # without the deltas of FedDrift: it compares losses, not errors
    DriftSurf: {"delta": {"sine": 0.10, "circle": 0.05, "sea": 0.02, "mnist": 0.10, "fmow": 0.04}},
    AdaptiveFedAvg: {"lr": {"sine": 0.1}},
}

# Further defaults for FMoW, by name: its clients have several distributions from the start, and ensembles are smaller.
_FMOW_IFCA = {"n_models": 5, "first": "choose"}
FMOW_DEFAULTS: dict[str, dict[str, Any]] = {
    "FedDrift": {"first": "each"}, "FedDrift-W": {"first": "each"},
    "IFCA(T)": _FMOW_IFCA, "IFCA": _FMOW_IFCA, "IFCA-W": _FMOW_IFCA,
    "CFL": {"max_models": 5}, "CFL-W": {"max_models": 5},
    "AUE": {"n_models": 4}, "AUE-PC": {"n_models": 4}, "KUE": {"n_models": 3},
}  # fmt: skip


def algorithm(name: str, stream: Stream | None = None, /, **settings: Any) -> Algorithm:
    """Create an algorithm from its name and settings.

    Args:
        name: A name that `feddrift list` shows, or ``package.module:Name`` for your own class or function.
        stream: The stream whose defaults apply to settings that are not given, such as the paper's delta for it;
            without it the defaults of the algorithm apply.
        settings: Settings that `feddrift list` shows for the algorithm.

    Raises:
        ConfigError: The name or a setting is unknown, or a value is not allowed.

    >>> algorithm("FedDrift", delta=0.1).delta
    0.1
    """
    algorithm_entry = find_entry(name)
    if stream is not None and not isinstance(stream, Stream):
        raise ConfigError(f"the second argument must be a Stream, as fd.stream gives it, got {type(stream).__name__}")
    if stream is not None:
        settings = {**_choose_defaults(name, algorithm_entry.cls, stream, settings), **settings}
    parsed = _parse_settings(name, algorithm_entry.cls, settings)
    try:
        instance: Algorithm = algorithm_entry.cls(**parsed, **algorithm_entry.fixed)
    except TypeError as error:
        if name in ALGORITHMS:
            raise
        raise ConfigError(f"algorithm '{name}' cannot be made: {error}") from error
    _check_methods(name, instance)
    return instance


def find_entry(name: str) -> CatalogueEntry:
    """Find an algorithm in the catalogue, in an installed package, or at ``package.module:Name``.

    Raises:
        ConfigError: The name is unknown, or its object is not an algorithm.
    """
    if not isinstance(name, str):
        raise ConfigError(f"the name of an algorithm must be text, got {safe_repr(name)}")
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    maker = plugins.find_object("algorithm", name)
    if maker is None:
        raise unknown_name_error(
            "algorithm", name, [*ALGORITHMS, *plugins.list_plugins("algorithm")], ["package.module:Name"]
        )
    if isinstance(maker, type):
        _check_methods(name, maker)
    elif not callable(maker):
        raise ConfigError(f"algorithm '{name}' must be a class or a function that makes one, got {maker!r}")
    return CatalogueEntry(maker, {}, (maker.__doc__ or "").partition("\n")[0])


def _check_methods(name: str, candidate: Any) -> None:
    """Raise ConfigError if the candidate does not have the methods of an algorithm."""
    for method in ("init", "step"):
        if not callable(getattr(candidate, method, None)):
            raise ConfigError(f"'{name}' is not an algorithm: it needs init(fed) and step(state, fed), got no {method}")


def _choose_defaults(name: str, cls: type[Any], stream: Stream, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults for a stream; `given` are the settings that the user chose.

    Raises:
        ConfigError: The stream is synthetic, and the algorithm needs a delta that was not given.
    """
    family = stream.family
    defaults: dict[str, Any] = {
        key: value[family] for key, value in get_family_defaults(cls).items() if family in value
    }
    if family == "fmow":
        defaults |= FMOW_DEFAULTS.get(name, {})
    detects = isinstance(cls, type) and issubclass(cls, DriftDetectionOptions) and not cls.has_own_test
    if detects and family == TABLE_FAMILY and not {"delta", "metric"} & set(given):
        defaults["test"] = "two-sample"  # no delta is known for tables; with a given delta the threshold test remains
    if family == SYNTHETIC_FAMILY and "delta" in get_family_defaults(cls) and not {"delta", "test"} & set(given):
        instead = ", or test=two-sample, which needs none" if detects else ""
        raise ConfigError(
            f"{name} needs a delta for {stream.name}, such as delta=0.05{instead}: no published value is known"
        )
    if cls is IFCA and stream.concepts is not None:
        defaults["n_models"] = len(set(stream.concepts[:-1].reshape(-1).tolist()))
    return defaults


def get_family_defaults(cls: type[Any]) -> dict[str, dict[str, float]]:
    """Return the defaults of a class that depend on the family of the stream, by setting and family.

    A class without an entry has those of its nearest base class with one.
    """
    return next((DEFAULTS_BY_FAMILY[base] for base in getattr(cls, "__mro__", ()) if base in DEFAULTS_BY_FAMILY), {})


def _parse_settings(name: str, cls: type[Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Check settings and return them as keyword arguments of the class; values given as text are converted."""
    legal = get_options(cls)
    hints = typing.get_type_hints(cls)
    parsed = {}
    for key, value in settings.items():
        if not legal:
            raise ConfigError(f"{name} has no settings, got '{key}'")
        if key not in legal:
            raise unknown_name_error(f"setting of {name}", key, legal)
        field = legal[key]
        adapter: TypeAdapter[Any] = TypeAdapter(hints[field.name])
        try:
            if isinstance(value, str) and value.lower() != "none":
                parsed[field.name] = adapter.validate_strings(value)
            else:
                parsed[field.name] = adapter.validate_python(None if isinstance(value, str) else value)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            raise ConfigError(describe_problem(problem, f"{name}.{key}", safe_repr(value))) from None
        converted = parsed[field.name]
        if isinstance(value, bool) and not isinstance(converted, bool):
            raise ConfigError(f"{name}.{key} must be a number, got {value}")
        if isinstance(converted, int) and abs(converted) > MAX_INTEGER_SETTING:
            raise ConfigError(f"{name}.{key} must be at most {MAX_INTEGER_SETTING}, got {safe_repr(value)}")
    return parsed


__all__ = [
    "ALGORITHMS",
    "FMOW_DEFAULTS",
    "RECOMMENDED",
    "CatalogueEntry",
    "algorithm",
    "find_entry",
    "get_family_defaults",
    "get_options",
    "get_settings",
]
