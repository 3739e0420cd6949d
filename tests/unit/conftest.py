"""A fixture that ends a run before the n-th change of the disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from feddrift.runs import writer
from tests.support.kills import Killed


@pytest.fixture
def kill_before_change(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Dies before the n-th change of the disk: a write, a new name, a name removed, a cut."""
    left = [10**9]

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def act(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return real(*args, **kwargs)

        return act

    def gone(self: writer.RecordWriter, kind: Any, error: Any, trace: Any) -> None:
        if kind is not None:
            self._file.close()  # as the system does for the dead
        else:
            leave(self, kind, error, trace)

    leave = writer.RecordWriter.__exit__
    monkeypatch.setattr(writer.RecordWriter, "__exit__", gone)
    for owner, name in ((os, "replace"), (os, "fsync"), (Path, "unlink"), (writer.RecordWriter, "_write")):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))
    return lambda n: left.__setitem__(0, n)
