"""User-defined parts by name: ``package.module:Name``, ``package.module.Name``, or an entry point of a package."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from feddrift.errors import ConfigError, FeddriftError, suggest_name

_digests: dict[str, str] = {}  # by module: the digest of its file when it was loaded


def is_import_path(name: str) -> bool:
    """Return True if a name has the form of an import path.

    >>> is_import_path("mypkg.methods:Mine"), is_import_path("mypkg.Mine"), is_import_path("FedDrift-C")
    (True, True, False)
    """
    module, _, attribute = name.partition(":") if ":" in name else name.rpartition(".")
    return all(part.isidentifier() for part in (*module.split("."), *attribute.split(".")))


def load_object(kind: str, name: str, folder: Path | None = None) -> Any:
    """Import the object with this path; modules in the working directory are found, too.

    Args:
        kind: The kind of the object, for messages.
        name: The path.
        folder: A folder that is searched first. It remains in `sys.path`: its modules may import one another later.

    Raises:
        ConfigError: The module cannot be imported, or does not have the object.

    >>> load_object("algorithm", "collections:Counter")
    <class 'collections.Counter'>
    """
    module, _, attribute = name.partition(":") if ":" in name else name.rpartition(".")
    if folder is not None and str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    cwd = str(Path.cwd())
    add_cwd = cwd not in sys.path  # a console script does not search it, but users' files are there
    if add_cwd:
        sys.path.append(cwd)
    try:
        target: Any = importlib.import_module(module)
        _record_digest(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise ConfigError(f"{kind} '{name}': importing {module} failed: {error}") from error
        raise ConfigError(f"{kind} '{name}': there is no module '{error.name}' here or installed") from None
    except Exception as error:  # a user's module may raise any error when it is imported
        raise ConfigError(f"{kind} '{name}': importing {module} failed: {type(error).__name__}: {error}") from error
    finally:
        if add_cwd:
            sys.path.remove(cwd)
    for part in attribute.split("."):
        if not hasattr(target, part):
            raise ConfigError(
                f"{kind} '{name}': {module} has no '{attribute}'{suggest_name(part, _list_public_names(target))}"
            )
        target = getattr(target, part)
    return target


def list_sources(*names: str | None) -> dict[str, str]:
    """Return, for each module in one of these paths, the digest of its file when it was loaded."""
    modules = [name.partition(":")[0] if ":" in name else name.rpartition(".")[0] for name in names if name]
    return {module: _digests[module] for module in modules if module in _digests}


def _record_digest(module: str) -> None:
    """Store the digest of a module's file when it is first loaded; later changes of the file do not alter it."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if module not in _digests and file is not None and Path(file).is_file():
        _digests[module] = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12]


def _list_public_names(target: object) -> list[str]:
    """Return the public names of a module or class."""
    return [name for name in dir(target) if not name.startswith("_")]


def call_function(kind: str, name: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call a user's function and return its result.

    Args:
        kind: The kind of the object that it creates, for messages.
        name: Its path, for messages.
        function: The function.
        args: Its arguments.

    Raises:
        ConfigError: The function raised an error, which is the cause of this one. FeddriftErrors are not converted.
    """
    try:
        return function(*args)
    except FeddriftError:
        raise
    except Exception as error:
        raise ConfigError(f"{kind} '{name}' failed: {type(error).__name__}: {error}") from error


def list_plugins(kind: str) -> dict[str, str]:
    """Return the paths of entry points of installed packages by name.

    Args:
        kind: algorithm, stream or net: the group is ``feddrift.algorithms``, ``feddrift.streams`` or ``feddrift.nets``.
    """
    points = importlib.metadata.entry_points(group=f"feddrift.{kind}s")
    return {point.name: f"{point.module}:{point.attr}" for point in points}


def find_object(kind: str, name: str) -> Any | None:
    """Import the object of an entry point or path; None if the name is neither.

    Args:
        kind: The kind of the object: algorithm, stream or net.
        name: The name of an entry point of an installed package, or a path.
    """
    path = list_plugins(kind).get(name, name)
    return load_object(kind, path) if is_import_path(path) else None
