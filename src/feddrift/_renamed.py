"""Import paths of version 0.3: they still work in version 0.4, with a DeprecationWarning that names the new path."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Collection
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

MODULES = {  # documented modules of version 0.3 whose paths no longer exist
    "feddrift.algorithms.drift_tests": "feddrift.algorithms.feddrift.drift_tests",
    "feddrift.algorithms.ifca": "feddrift.algorithms.baselines.ifca",
    "feddrift.algorithms.private": "feddrift.algorithms.baselines.local",
    "feddrift.algorithms.single": "feddrift.algorithms.baselines.single",
    "feddrift.cluster": "feddrift.clustering",
    "feddrift.engines.base": "feddrift.engines.server.engine",
    "feddrift.engines.entries": "feddrift.engines.sparse_weights",
    "feddrift.engines.federation": "feddrift.engines.server.federation",
    "feddrift.engines.flower.asking": "feddrift.engines.flower.server.connection",
    "feddrift.engines.flower.exchange": "feddrift.engines.flower.server.exchange",
    "feddrift.engines.flower.federation": "feddrift.engines.flower.server.federation",
    "feddrift.engines.flower.serve": "feddrift.engines.flower.client.serve",
    "feddrift.engines.in_process": "feddrift.engines.local.engine",
    "feddrift.engines.reference": "feddrift.engines.local.reference",
    "feddrift.exported": "feddrift.exported_models",
    "feddrift.local": "feddrift.training",
    "feddrift.nets.own": "feddrift.nets.external",
    "feddrift.run": "feddrift.simulation",
    "feddrift.runs.recorded": "feddrift.runs.recorded_run",
}
NAMES: dict[str, str] = {  # public names of version 0.3, "module's new path.Old" -> "New" or "other module.New"
    "feddrift.averaging.averaged": "average_updates",
    "feddrift.averaging.average": "average_rows",
    "feddrift.averaging.cosines_of": "compute_cosines",
    "feddrift.averaging.finite": "find_finite_lanes",
    "feddrift.averaging.moves": "measure_updates",
    "feddrift.averaging.shares": "compute_shares",
    "feddrift.clustering.best_models": "find_best_models",
    "feddrift.clustering.rises": "detect_rise",
    "feddrift.clustering.nobody": "create_empty_clusters",
    "feddrift.clustering.assign": "append_assignment",
    "feddrift.clustering.fade": "apply_memory",
    "feddrift.clustering.beats": "wins_sign_test",
    "feddrift.clustering.decisive": "count_decisive_rows",
    "feddrift.clustering.below": "is_error_below",
    "feddrift.clustering.widen": "append_models",
    "feddrift.clustering.keep": "keep_models",
    "feddrift.clustering.moved": "remap_models",
    "feddrift.clustering.mass": "sum_examples_per_model",
    "feddrift.clustering.least_used": "find_least_used",
    "feddrift.clustering.bipartition": "split_cluster",
    "feddrift.clustering.distances": "compute_distances",
    "feddrift.clustering.Pairs": "ClosestPairs",
    "feddrift.clustering.linked": "link_closest",
    "feddrift.engines.worker.Known": "FederationInfo",
    "feddrift.engines.worker.Question": "StatisticsRequest",
    "feddrift.engines.worker.Scored": "CellScores",
    "feddrift.engines.worker.Through": "WorkerProxy",
    "feddrift.engines.worker.Work": "TrainingPlan",
    "feddrift.engines.worker.gathered": "concatenate_updates",
    "feddrift.engines.worker.in_turn": "run_rounds_sequentially",
    "feddrift.memory.pooled": "average_over_clients",
    "feddrift.models.classes_of": "find_class_axes",
    "feddrift.models.concatenated": "concatenate_arrays",
    "feddrift.models.fresh": "init_models",
    "feddrift.models.in_place_of": "substitute_models",
    "feddrift.models.only_trained": "restore_untrained_part",
    "feddrift.models.params_of": "get_params",
    "feddrift.models.private": "get_private_models",
    "feddrift.models.put": "replace_model",
    "feddrift.models.trunk_of": "mark_trunk",
    "feddrift.simulation.passed_over": "add_skipped_steps",
    "feddrift.simulation.steps_on": "run_steps",
    "feddrift.simulation.with_newcomers": "add_newcomers",
}


def forward_names(package: str, module: str, names: Collection[str] | None = None) -> Callable[[str], Any]:
    """Return a `__getattr__` for a module that looks names up in another module, with a warning.

    Args:
        package: The path that old code imports from.
        module: The module that has the names now.
        names: The names to look up; None: all public ones.
    """

    def find_name(name: str) -> Any:
        if names is not None and name not in names:  # e.g. a submodule: Python looks it up before it imports it
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        current_module, _, current_name = NAMES.get(f"{module}.{name}", name).rpartition(".")
        current_module = current_module or module
        target = importlib.import_module(current_module)
        if current_name.startswith("_") or not hasattr(target, current_name):
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        warnings.warn(f"{package}.{name} is now {current_module}.{current_name}", DeprecationWarning, stacklevel=2)
        return getattr(target, current_name)

    return find_name


def forward_renamed_names(module: str) -> Callable[[str], Any]:
    """Return a `__getattr__` for a module that still exists: it looks up the module's own renamed names."""
    return forward_names(module, module, [old.rpartition(".")[2] for old in NAMES if old.rpartition(".")[0] == module])


class RenamedModuleFinder(MetaPathFinder, Loader):
    """Finder and loader that create a substitute for a module that is imported by its old path."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        return spec_from_loader(name, self) if name in MODULES else None

    def exec_module(self, module: ModuleType) -> None:
        module.__doc__ = f"Now {MODULES[module.__name__]}."
        module.__dict__["__getattr__"] = forward_names(module.__name__, MODULES[module.__name__])


def install() -> None:
    """Add the finder after all others: Python calls it only for modules that do not exist."""
    if not any(isinstance(finder, RenamedModuleFinder) for finder in sys.meta_path):
        sys.meta_path.append(RenamedModuleFinder())
