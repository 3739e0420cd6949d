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
    """Raise Killed before the n-th change on the disk: a write, a rename, a removal or a sync."""
    left = [10**9]

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def act(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return real(*args, **kwargs)

        return act

    def close_if_killed(self: writer.RecordWriter, kind: Any, error: Any, trace: Any) -> None:
        if kind is not None:
            self._file.close()  # as the system does when a process ends
        else:
            leave(self, kind, error, trace)

    leave = writer.RecordWriter.__exit__
    monkeypatch.setattr(writer.RecordWriter, "__exit__", close_if_killed)
    for owner, name in ((os, "replace"), (os, "fsync"), (Path, "unlink"), (writer.RecordWriter, "_append_text")):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))
    return lambda n: left.__setitem__(0, n)
