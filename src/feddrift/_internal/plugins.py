"""Your own parts by name: ``package.module:Name`` or ``package.module.Name``, or what an installed package offers."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from feddrift.errors import ConfigError, FeddriftError, nearest

_digests: dict[str, str] = {}  # by module of a user


def is_path(name: str) -> bool:
    """Whether a name says where to import from.

    >>> is_path("mypkg.methods:Mine"), is_path("mypkg.Mine"), is_path("FedDrift-C")
    (True, True, False)
    """
    module, _, attribute = name.partition(":") if ":" in name else name.rpartition(".")
    return all(part.isidentifier() for part in (*module.split("."), *attribute.split(".")))


def load(what: str, name: str, folder: Path | None = None) -> Any:
    """The object that a path names; the working directory is looked through as well, or before all this folder.

    A folder stays on Python's path: its modules may import one another later.

    >>> load("algorithm", "collections:Counter")
    <class 'collections.Counter'>
    """
    module, _, attribute = name.partition(":") if ":" in name else name.rpartition(".")
    if folder is not None and str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    cwd = str(Path.cwd())
    added = cwd not in sys.path  # a console script does not look there, and people's files lie there
    if added:
        sys.path.append(cwd)
    try:
        target: Any = importlib.import_module(module)
        _remember(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise ConfigError(f"{what} '{name}': importing {module} failed: {error}") from error
        raise ConfigError(f"{what} '{name}': there is no module '{error.name}' here or installed") from None
    except Exception as error:  # whatever their module does when it is imported
        raise ConfigError(f"{what} '{name}': importing {module} failed: {type(error).__name__}: {error}") from error
    finally:
        if added:
            sys.path.remove(cwd)
    for part in attribute.split("."):
        if not hasattr(target, part):
            raise ConfigError(f"{what} '{name}': {module} has no '{attribute}'{nearest(part, _public(target))}")
        target = getattr(target, part)
    return target


def sources(*names: str | None) -> dict[str, str]:
    """Of each module that one of these names is a path into: the digest of its file as it was when it was loaded."""
    modules = [name.partition(":")[0] if ":" in name else name.rpartition(".")[0] for name in names if name]
    return {module: _digests[module] for module in modules if module in _digests}


def _remember(module: str) -> None:
    """The digest of what Python has loaded, which a later change of the file does not move."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if module not in _digests and file is not None and Path(file).is_file():
        _digests[module] = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12]


def _public(target: object) -> list[str]:
    """The names in a module or class that are meant to be used."""
    return [name for name in dir(target) if not name.startswith("_")]


def called(what: str, name: str, make: Callable[..., Any], *args: Any) -> Any:
    """What their function makes; what goes wrong in it is one sentence, with its traceback as the cause."""
    try:
        return make(*args)
    except FeddriftError:
        raise
    except Exception as error:
        raise ConfigError(f"{what} '{name}' failed: {type(error).__name__}: {error}") from error


def installed(what: str) -> dict[str, str]:
    """Path by name of what installed packages offer in the group ``feddrift.algorithms``, ``.streams`` or ``.nets``."""
    points = importlib.metadata.entry_points(group=f"feddrift.{what}s")
    return {point.name: f"{point.module}:{point.attr}" for point in points}


def find(what: str, name: str) -> Any | None:
    """What an installed package offers under this name, or what lies at this path; None if it is neither."""
    path = installed(what).get(name, name)
    return load(what, path) if is_path(path) else None
