"""Where clients live: an engine makes the Worker of each time step and tests the models that clients use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from feddrift.drift_explanation import Shifts
from feddrift.engines.conditions.byzantine import lying
from feddrift.engines.conditions.conditions import Conditions
from feddrift.engines.conditions.robust import Guarded
from feddrift.engines.server.federation import TimeStep
from feddrift.engines.worker import Worker
from feddrift.types import Floats, Ints, Local, Models, Net, State


class Engine(ABC):
    """Two methods make an engine; `at(tau)` is the federation of one time step.

    What is found by name is made with (stream, net, local, seed, conditions).
    """

    net: Net
    local: Local
    seed: int
    conditions: Conditions
    n_steps: int | None = None  # how many time steps there are to train in; None: on and on
    lane_rounds: int = 0  # rounds of all lanes so far, trials included: the work done, where somebody counts it

    @abstractmethod
    def worker(self, tau: int) -> Worker:
        """Who does the clients' work at time tau, with no moments yet."""

    @abstractmethod
    def test(self, state: State, t: int) -> tuple[Ints, Ints]:
        """How many of S_c^(t) each client gets right when its models vote, and how many there are."""

    def scores(self, state: State, t: int) -> Mapping[str, Floats]:
        """How good the probabilities and classes of the same test are, [c] by name (see `feddrift.scores`).

        An engine that does not say leaves them unknown. It is asked after `test`, with the same arguments.
        """
        return {}

    def shifts(self, tau: int, clients: Sequence[int]) -> Mapping[int, Shifts]:
        """What moved in the data of these clients, which raised an alarm at time tau; without those that do not say."""
        return {}

    def lost_private(self) -> Sequence[tuple[int, int]]:
        """The private models (client, id) that were begun anew since this was asked last: their owner lost them."""
        return ()

    def at(self, tau: int) -> TimeStep:
        """All that a server may ask at time tau."""
        worker = lying(self.worker(tau), self.conditions.lies, tau, self.seed)
        if self.conditions.defend:
            worker = Guarded(worker, tau)
        return TimeStep(worker, tau, self.net, self.local, self.seed, self.conditions, self.store_models)

    def store_models(self, models: Models) -> Models:
        """Return the models as the server stores them."""
        return models
