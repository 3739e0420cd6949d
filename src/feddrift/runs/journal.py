"""A time step that can be interrupted: a federation that remembers its answers.

An algorithm is a function of what its verbs return. So a step that was killed is taken again from its beginning, with
the answers that are known already, up to the very round where it stopped; from there on clients work again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from feddrift._internal.device_arrays import on_host
from feddrift.errors import DataError
from feddrift.types import (
    Federation,
    Floats,
    Ints,
    Layer,
    Local,
    Metric,
    Models,
    Moments,
    Parting,
    Projection,
    Start,
    Tournament,
    Updates,
    Weights,
)

T = TypeVar("T")


class Resumable(Federation, Protocol):
    """A federation whose time step can be taken up again."""

    def train(
        self, models: Models, w: Weights, rounds: int | None = None, local: Local | None = None, of: int | None = None
    ) -> Models:
        """As in `Federation`; these rounds are the first `of` so many, which all follow, on the same data."""
        ...

    def progress(self) -> Any:
        """What the rest of the step depends on: moments, counters; arrays, numbers and texts in lists and dicts."""
        ...

    def restore(self, progress: Any) -> None: ...


@dataclass(frozen=True)
class Inside:
    """How far a time step has come."""

    rounds: int = 0  # trained in this step so far
    answers: tuple[tuple[str, Any], ...] = ()  # what was asked, and the answer, in order
    models: Models | None = None  # as far as they have come, where a call of train is under way,
    trained: int = 0  # after so many of its rounds
    progress: Any = None  # what the engine needs to go on: moments, counters

    def plain(self) -> tuple[Any, ...]:
        """As a tuple, for a checkpoint; `Inside(*plain)` is the way back."""
        return self.rounds, self.answers, self.models, self.trained, self.progress


class Journal:
    """A Federation that asks `fed` and calls `save` with how far the step has come, after every so many rounds."""

    def __init__(
        self, fed: Resumable, every: int, save: Callable[[Inside], object], before: Inside | None = None
    ) -> None:
        self._fed, self._every, self._save = fed, every, save
        self._before = before or Inside()
        self._answers: list[tuple[str, Any]] = []
        self._rounds = self._saved = self._before.rounds
        if before is not None:
            fed.restore(before.progress)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fed, name)  # attributes that ask no client are passed through

    def evaluate(self, models: Models, metric: Metric = "error", by: Parting | None = None) -> Floats:
        question = f"evaluate {models.ids} {metric}" + (f" by {by}" if by else "")
        return self._asked(question, lambda: self._fed.evaluate(models, metric, by))

    def confusion(self, models: Models) -> Ints:
        return self._asked(f"confusion {models.ids}", lambda: self._fed.confusion(models))

    def cross_evaluate(
        self,
        models: Models,
        w: Weights,
        metric: Metric = "error",
        by: Parting | None = None,
        per_client: bool = False,
    ) -> Floats:
        question = f"cross_evaluate {models.ids} {w.shape} {metric}"
        question += (f" by {by}" if by else "") + (" per client" if per_client else "")
        return self._asked(question, lambda: self._fed.cross_evaluate(models, w, metric, by, per_client))

    def moments(
        self,
        models: Models,
        layer: Layer,
        by: Literal["all", "class"] = "all",
        project: Floats | Projection | None = None,
        square: bool = True,
    ) -> Moments:
        return self._asked(
            f"moments {models.ids} {layer} {by} {square}", lambda: self._fed.moments(models, layer, by, project, square)
        )

    def tournament(self, models: Models, w: Weights, parent: Ints, starts: Sequence[Start]) -> Tournament:
        question = f"tournament {models.ids} {w.shape} {parent.tolist()} {starts}"
        return self._asked(question, lambda: self._fed.tournament(models, w, parent, starts))

    def contest(self, models: Models, teams: Ints, held_by: Local | None = None) -> Tournament:
        question = f"contest {models.ids} {teams.shape} {_told(held_by)}"
        return self._asked(question, lambda: self._fed.contest(models, teams, held_by))

    def local_updates(self, models: Models, w: Weights, local: Local | None = None) -> Updates:
        def ask() -> Updates:
            updates = self._fed.local_updates(models, w, local)
            self._rounds += 1
            return updates

        question = f"local_updates {models.ids} {w.shape} {_told(local)}"
        return self._asked(question, ask, then_save=True)

    def train(self, models: Models, w: Weights, rounds: int | None = None, local: Local | None = None) -> Models:
        total = (local or self._fed.local).rounds if rounds is None else rounds

        def ask() -> Models:
            now, rounds_done, past = models, 0, self._before
            if past.models is not None and len(self._answers) == len(past.answers):  # this call was under way
                now, rounds_done = past.models, past.trained
            while rounds_done < total:
                portion = min(total - rounds_done, max(1, self._saved + self._every - self._rounds))
                now = self._fed.train(now, w, portion, local, of=total - rounds_done)
                rounds_done, self._rounds = rounds_done + portion, self._rounds + portion
                if rounds_done < total:
                    self._save_if_due(now, rounds_done)
            return now

        question = f"train {models.ids} {w.shape} {total} {_told(local)}"
        return self._asked(question, ask, then_save=True)

    def _asked(self, question: str, ask: Callable[[], T], then_save: bool = False) -> T:
        old_answers, k = self._before.answers, len(self._answers)
        if k < len(old_answers):
            if old_answers[k][0] != question:
                raise DataError(
                    "cannot go on inside this time step: the algorithm, or its settings, are not what they were "
                    f"(it asks '{question}', it asked '{old_answers[k][0]}')"
                )
            answer: T = old_answers[k][1]
        else:
            answer = on_host(ask())  # as it will be where the step is taken again
        self._answers.append((question, answer))
        if then_save and k >= len(old_answers):
            self._save_if_due(None, 0)
        return answer

    def _save_if_due(self, models: Models | None, trained: int) -> None:
        if self._rounds >= self._saved + self._every:
            self._saved = self._rounds
            self._save(Inside(self._rounds, tuple(self._answers), on_host(models), trained, self._fed.progress()))


def _told(local: Local | None) -> tuple[Any, ...] | None:
    """How clients train, as questions have always had it."""
    return None if local is None else tuple(local.plain().values())
