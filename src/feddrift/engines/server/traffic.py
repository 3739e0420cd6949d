"""Traffic of a time step: parameters sent to and from each client, by purpose."""

from __future__ import annotations

from typing import Any

import numpy as np

from feddrift.engines.worker import TrainingPlan
from feddrift.trees import split_trunk_and_head, tree_leaves
from feddrift.types import Floats, Ints, Local, Models

SCORING = 0  # purposes: rows of `Traffic.numbers`
TRAINING = 1


class Traffic:
    """Counter of sent parameters; a trunk or head that a client has already received is not sent again for scoring."""

    def __init__(self, n_clients: int) -> None:
        self.numbers: Ints = np.zeros((2, n_clients), dtype=np.int64)  # [purpose, c], numbers sent to and from clients
        self.model_size = 1  # parameters of a model
        self.recipients: dict[tuple[str, int], Ints] = {}  # by trunk or head, the clients that received it

    @property
    def sent(self) -> Floats:
        """[c], number of models sent to and from each client; a trunk or head counts by its share of the parameters."""
        return np.asarray(self.numbers.sum(axis=0) / self.model_size)

    @property
    def sent_scoring(self) -> Floats:
        """[c], the part of `sent` that was sent for scoring, not for training."""
        return np.asarray(self.numbers[SCORING] / self.model_size)

    def add_scoring(self, clients: Ints, models: Models) -> None:
        """Count models that are sent to clients for scoring."""
        self._add_models(clients, models, SCORING)

    def _add_models(self, clients: Ints, models: Models, purpose: int) -> None:
        """Count the trunks and heads that these clients have not received yet."""
        trunk, head = self._count_parameters(models)
        parts = {("trunk", i): trunk for i in models.families} | {("head", i): head for i in models.ids}
        for part, size in parts.items():
            recipients = self.recipients.get(part)
            missing = clients if recipients is None else clients[~np.isin(clients, recipients)]
            self.numbers[purpose, missing] += size
            if len(missing):
                self.recipients[part] = missing if recipients is None else np.union1d(recipients, missing)

    def add_numbers(self, clients: Ints, numbers: int, models: Models) -> None:
        """Count numbers other than parameters that are sent between the server and each of these clients."""
        self._count_parameters(models)
        self.numbers[SCORING, clients] += numbers

    def add_training(self, models: Models, plan: TrainingPlan, rounds: int, local: Local) -> None:
        """Count the models that are sent in rounds of training, unless they are private, and the targets of a pull."""
        if local.pull is not None and local.pull.to is not None:
            self._add_models(np.unique(plan.client), local.pull.to, TRAINING)
        if models.private[plan.model].all():
            return
        trunk, head = self._count_parameters(models)
        changed: set[tuple[str, int]] = set()
        if local.trains != "head":
            _, first = np.unique(plan.lane, return_index=True)
            np.add.at(self.numbers[TRAINING], plan.client[first], 2 * rounds * trunk)
            changed |= {("trunk", models.family[m]) for m in plan.model}
        if local.trains != "trunk":
            np.add.at(self.numbers[TRAINING], plan.client, 2 * rounds * head)
            changed |= {("head", models.ids[m]) for m in plan.model}
        self.recipients = {part: clients for part, clients in self.recipients.items() if part not in changed}

    def save(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        scored = [(*part, clients) for part, clients in self.recipients.items()]
        return {"numbers": self.numbers, "model_size": self.model_size, "scored": scored}

    def load(self, saved: dict[str, Any]) -> None:
        """Restore the state that `save` returned."""
        self.numbers = saved["numbers"]
        self.model_size = saved["model_size"]
        self.recipients = {  # version 0.3 saved [c], true for recipients
            (kind, i): np.flatnonzero(clients) if clients.dtype == bool else clients
            for kind, i, clients in saved["scored"]
        }

    def _count_parameters(self, models: Models) -> tuple[int, int]:
        """Count the parameters of a trunk and of a head."""
        trunk_leaves: list[Any] = []
        head_leaves = tree_leaves(models.params)
        if models.trunk is not None:
            trunk_leaves, head_leaves = split_trunk_and_head(models.params, models.trunk)
        trunk_size = sum(int(np.prod(leaf.shape[1:])) for leaf in trunk_leaves)
        head_size = sum(int(np.prod(leaf.shape[1:])) for leaf in head_leaves)
        self.model_size = trunk_size + head_size
        return trunk_size, head_size
