"""Engine: the interface of what runs the clients of each time step and tests their models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from feddrift.drift_explanation import Shifts
from feddrift.engines.conditions.byzantine import NO_BYZANTINE_CLIENTS, ByzantineWorker
from feddrift.engines.conditions.conditions import Conditions
from feddrift.engines.conditions.robust import RobustWorker
from feddrift.engines.server.federation import TimeStep
from feddrift.engines.worker import Worker
from feddrift.types import Floats, Ints, Local, Models, Net, State


class Engine(ABC):
    """Interface of all engines; a subclass implements `worker` and `test`.

    A run that has the name of an engine creates it with `(stream, net, local, seed, conditions)`.
    """

    net: Net
    local: Local
    seed: int
    conditions: Conditions
    n_steps: int | None = None  # number of time steps with training; None: unlimited
    lane_rounds: int = 0  # rounds that all lanes have trained, also in trials; 0 if the engine does not count

    @abstractmethod
    def worker(self, tau: int) -> Worker:
        """Return the worker of time tau, with a new optimiser state."""

    @abstractmethod
    def test(self, state: State, t: int) -> tuple[Ints, Ints]:
        """Test the models on the data of time t.

        Returns:
            [c], the number of examples of S_c^(t) that the votes of client c classify correctly, and their number.
        """

    def scores(self, state: State, t: int) -> Mapping[str, Floats]:
        """Return further scores [c] of the same test by name (see `feddrift.scores`); none by default.

        The run loop calls it after `test`, with the same arguments.
        """
        return {}

    def shifts(self, tau: int, clients: Sequence[int]) -> Mapping[int, Shifts]:
        """Explain alarms: return, by client, what changed in its data before time tau; none by default."""
        return {}

    def lost_private(self) -> Sequence[tuple[int, int]]:
        """Return the private models (client, id) that their owners have lost since the last call."""
        return ()

    def at(self, tau: int) -> TimeStep:
        """Return the federation of time tau: what an algorithm may request from its clients."""
        worker = self.worker(tau)
        if self.conditions.lies != NO_BYZANTINE_CLIENTS:
            worker = ByzantineWorker(worker, self.conditions.lies, tau, self.seed)
        if self.conditions.defend:
            worker = RobustWorker(worker, tau, self.conditions.defend)
        return TimeStep(worker, tau, self.net, self.local, self.seed, self.conditions, self.store_models)

    def store_models(self, models: Models) -> Models:
        """Return the models as the server stores them."""
        return models
