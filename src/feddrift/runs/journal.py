"""Resumable time steps: a federation that records its answers.

An algorithm depends only on the results of the federation's methods. A step that was killed is therefore repeated from
its beginning with the recorded answers, up to the round in which it stopped; later requests are sent again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from feddrift._internal.device_arrays import move_to_host
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


class ResumableFederation(Federation, Protocol):
    """A federation whose time step can be resumed."""

    def train(
        self,
        models: Models,
        w: Weights,
        rounds: int | None = None,
        local: Local | None = None,
        remaining_rounds: int | None = None,
    ) -> Models:
        """Train as in `Federation`; `remaining_rounds` is the number of rounds on the same data, including these."""
        ...

    def progress(self) -> Any:
        """Return the state of the engine that affects the rest of the step, such as moments and counters.

        It consists of arrays, numbers and texts in lists and dictionaries.
        """
        ...

    def restore(self, progress: Any) -> None:
        """Restore a state of the engine that `progress` returned."""
        ...


@dataclass(frozen=True)
class StepProgress:
    """The progress inside a time step."""

    rounds: int = 0  # rounds of training in this step so far
    answers: tuple[tuple[str, Any], ...] = ()  # (question, answer), in order
    partial_models: Models | None = None  # the models in an unfinished call of train
    trained_rounds: int = 0  # the number of rounds that are done in this call
    engine_progress: Any = None  # see `ResumableFederation.progress`

    def to_tuple(self) -> tuple[Any, ...]:
        """Return the fields for a checkpoint; `StepProgress(*fields)` restores the object."""
        return self.rounds, self.answers, self.partial_models, self.trained_rounds, self.engine_progress


class Journal:
    """A federation that records the answers of another one, and saves the progress within the time step.

    Args:
        fed: The federation that answers.
        save_every: The number of rounds between two calls of `save`.
        save: Stores the progress.
        progress: The saved progress of this time step: its answers are repeated without asking `fed`.
    """

    def __init__(
        self,
        fed: ResumableFederation,
        save_every: int,
        save: Callable[[StepProgress], object],
        progress: StepProgress | None = None,
    ) -> None:
        self._fed = fed
        self._save_every = save_every
        self._save = save
        self._progress = progress or StepProgress()
        self._answers: list[tuple[str, Any]] = []
        self._rounds = self._saved_rounds = self._progress.rounds
        if progress is not None:
            fed.restore(progress.engine_progress)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fed, name)  # attributes that need no client

    def evaluate(self, models: Models, metric: Metric = "error", by: Parting | None = None) -> Floats:
        question = f"evaluate {models.ids} {metric}" + (f" by {by}" if by else "")
        return self._answer_question(question, lambda: self._fed.evaluate(models, metric, by))

    def confusion(self, models: Models) -> Ints:
        return self._answer_question(f"confusion {models.ids}", lambda: self._fed.confusion(models))

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
        return self._answer_question(question, lambda: self._fed.cross_evaluate(models, w, metric, by, per_client))

    def moments(
        self,
        models: Models,
        layer: Layer,
        by: Literal["all", "class"] = "all",
        project: Floats | Projection | None = None,
        square: bool = True,
    ) -> Moments:
        return self._answer_question(
            f"moments {models.ids} {layer} {by} {square}", lambda: self._fed.moments(models, layer, by, project, square)
        )

    def tournament(self, models: Models, w: Weights, parent: Ints, starts: Sequence[Start]) -> Tournament:
        question = f"tournament {models.ids} {w.shape} {parent.tolist()} {starts}"
        return self._answer_question(question, lambda: self._fed.tournament(models, w, parent, starts))

    def contest(self, models: Models, teams: Ints, held_by: Local | None = None) -> Tournament:
        question = f"contest {models.ids} {teams.shape} {_build_local_key(held_by)}"
        return self._answer_question(question, lambda: self._fed.contest(models, teams, held_by))

    def local_updates(self, models: Models, w: Weights, local: Local | None = None) -> Updates:
        def train_one_round() -> Updates:
            updates = self._fed.local_updates(models, w, local)
            self._rounds += 1
            return updates

        question = f"local_updates {models.ids} {w.shape} {_build_local_key(local)}"
        return self._answer_question(question, train_one_round, trains=True)

    def train(self, models: Models, w: Weights, rounds: int | None = None, local: Local | None = None) -> Models:
        total = (local or self._fed.local).rounds if rounds is None else rounds

        def train_in_portions() -> Models:
            current = models
            rounds_done = 0
            saved = self._progress
            if saved.partial_models is not None and len(self._answers) == len(saved.answers):  # it stopped in this call
                current = saved.partial_models
                rounds_done = saved.trained_rounds
            while rounds_done < total:
                portion = min(total - rounds_done, max(1, self._saved_rounds + self._save_every - self._rounds))
                current = self._fed.train(current, w, portion, local, remaining_rounds=total - rounds_done)
                rounds_done += portion
                self._rounds += portion
                if rounds_done < total:
                    self._save_if_due(current, rounds_done)
            return current

        question = f"train {models.ids} {w.shape} {total} {_build_local_key(local)}"
        return self._answer_question(question, train_in_portions, trains=True)

    def _answer_question(self, question: str, ask: Callable[[], T], trains: bool = False) -> T:
        old_answers = self._progress.answers
        k = len(self._answers)
        if k < len(old_answers):
            if old_answers[k][0] != question:
                raise DataError(
                    "cannot continue inside this time step: the algorithm or its settings have changed "
                    f"(it asks '{question}', it asked '{old_answers[k][0]}')"
                )
            answer: T = old_answers[k][1]
        else:
            answer = move_to_host(ask())  # as it is read from a checkpoint
        self._answers.append((question, answer))
        if trains and k >= len(old_answers):
            self._save_if_due(None, 0)
        return answer

    def _save_if_due(self, models: Models | None, trained_rounds: int) -> None:
        if self._rounds >= self._saved_rounds + self._save_every:
            self._saved_rounds = self._rounds
            answers = tuple(self._answers)
            self._save(StepProgress(self._rounds, answers, move_to_host(models), trained_rounds, self._fed.progress()))


def _build_local_key(local: Local | None) -> tuple[Any, ...] | None:
    """Return the settings of local training in the form of questions, which checkpoints contain."""
    return None if local is None else tuple(local.to_dict().values())
