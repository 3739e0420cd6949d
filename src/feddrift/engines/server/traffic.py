"""What a time step sends: models to and from each client, in parameters, by purpose."""

from __future__ import annotations

from typing import Any

import numpy as np

from feddrift.engines.worker import Work
from feddrift.trees import leaves, split
from feddrift.types import Floats, Ints, Local, Models

SCORING, TRAINING = 0, 1  # what models are sent for


class Traffic:
    """Counts what is sent; a trunk or a head that a client has unchanged is not sent again to be scored."""

    def __init__(self, n_clients: int) -> None:
        self.numbers: Ints = np.zeros((2, n_clients), dtype=np.int64)  # parameters to and from clients, by purpose
        self.model_size = 1  # parameters of a model
        self.has: dict[tuple[str, int], Ints] = {}  # the clients that have a trunk or head, unchanged, for scoring

    @property
    def sent(self) -> Floats:
        """[c], models to and from each client so far; a trunk or a head alone is the part of a model that it is."""
        return np.asarray(self.numbers.sum(axis=0) / self.model_size)

    @property
    def sent_scoring(self) -> Floats:
        """[c], the part of `sent` that was scored and not trained."""
        return np.asarray(self.numbers[SCORING] / self.model_size)

    def score(self, clients: Ints, models: Models) -> None:
        """These clients are sent these models to score."""
        self._send(clients, models, SCORING)

    def _send(self, clients: Ints, models: Models, purpose: int) -> None:
        """These clients are sent what they have not of these models."""
        trunk, head = self._sizes(models)
        parts = {("trunk", i): trunk for i in models.families} | {("head", i): head for i in models.ids}
        for part, size in parts.items():
            has = self.has.get(part)
            new = clients if has is None else clients[~np.isin(clients, has)]
            self.numbers[purpose, new] += size
            if len(new):
                self.has[part] = new if has is None else np.union1d(has, new)

    def tell(self, clients: Ints, numbers: int, models: Models) -> None:
        """So many numbers about these models go between the server and each of these clients."""
        self._sizes(models)
        self.numbers[SCORING, clients] += numbers

    def train(self, models: Models, work: Work, rounds: int, local: Local) -> None:
        """These models go down and up in every round, unless they are private; what they are pulled to goes down."""
        if local.pull is not None and local.pull.to is not None:
            self._send(np.unique(work.client), local.pull.to, TRAINING)
        if models.private[work.model].all():
            return
        trunk, head = self._sizes(models)
        changed: set[tuple[str, int]] = set()
        if local.trains != "head":
            _, first = np.unique(work.lane, return_index=True)
            np.add.at(self.numbers[TRAINING], work.client[first], 2 * rounds * trunk)
            changed |= {("trunk", models.family[m]) for m in work.model}
        if local.trains != "trunk":
            np.add.at(self.numbers[TRAINING], work.client, 2 * rounds * head)
            changed |= {("head", models.ids[m]) for m in work.model}
        self.has = {part: has for part, has in self.has.items() if part not in changed}

    def save(self) -> dict[str, Any]:
        """For a checkpoint."""
        scored = [(*part, has) for part, has in self.has.items()]
        return {"numbers": self.numbers, "model_size": self.model_size, "scored": scored}

    def load(self, saved: dict[str, Any]) -> None:
        """The way back."""
        self.numbers, self.model_size = saved["numbers"], saved["model_size"]
        self.has = {  # 0.3.0 saved [c], who has it
            (kind, i): np.flatnonzero(has) if has.dtype == bool else has for kind, i, has in saved["scored"]
        }

    def _sizes(self, models: Models) -> tuple[int, int]:
        """How many parameters a trunk has, and a head."""
        parts = ([], leaves(models.params)) if models.trunk is None else split(models.params, models.trunk)
        trunk, head = (sum(int(np.prod(leaf.shape[1:])) for leaf in part) for part in parts)
        self.model_size = trunk + head
        return trunk, head
