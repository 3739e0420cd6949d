"""The checks for authors of extensions: correct code passes, and each kind of error is named."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import feddrift as fd
from feddrift._internal import plugins
from feddrift.algorithms import ALGORITHMS
from feddrift.algorithms.feddrift.drift_tests import Evidence, Proportional, Threshold, TwoSample
from feddrift.engines import ENGINES
from feddrift.engines.simulator.simulator import Simulator, SimulatorWorker
from feddrift.models import join, take
from feddrift.testing import FakeFederation, check_algorithm, check_net, check_test, check_worker
from feddrift.types import Bools, Event, Federation, Ints, State, Tournament
from tests.support.engines import mark_variants_slow

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.parametrize("name", mark_variants_slow([*ALGORITHMS]))
def test_every_method_of_the_catalogue_passes(name: str) -> None:
    check_algorithm(fd.algorithm(name))


def test_the_examples_pass() -> None:
    check_algorithm(plugins.load_object("algorithm", "own_algorithm:Restart", EXAMPLES)())
    check_worker(plugins.load_object("engine", "own_engine:ThreadedEngine", EXAMPLES))


@pytest.mark.parametrize("name", ENGINES)
def test_the_engines_pass(name: str) -> None:
    check_worker(ENGINES[name][0])


@pytest.mark.parametrize("test", [Threshold(0.1), Proportional(), TwoSample()])
def test_the_drift_tests_pass(test: Any) -> None:
    check_test(test)


@dataclass(frozen=True)
class Spoilt:
    """FedAvg with something wrong about its states."""

    spoil: Callable[[State, State, Federation], State]

    def init(self, fed: Federation) -> State:
        return fd.algorithm("Oblivious").init(fed)

    def step(self, state: State, fed: Federation) -> State:
        return self.spoil(state, fd.algorithm("Oblivious").step(state, fed), fed)


def in_place(before: State, after: State, fed: Federation) -> State:
    votes = before.votes
    assert isinstance(votes, np.ndarray)
    votes[:] = votes
    return after


def forgets_the_seed(before: State, after: State, fed: Federation) -> State:
    return replace(after, votes=np.asarray(after.votes) * np.random.default_rng().random())


def peeks(before: State, after: State, fed: Any) -> State:
    stream = fed.worker.engine.stream
    return replace(after, votes=after.votes * (1 + stream.y[stream.rows(min(fed.tau + 1, 5), 0)].sum()))


WRONG: dict[str, tuple[Any, str]] = {
    "negative": (lambda b, a, fed: replace(a, w=np.asarray(a.w) - 2.0),
                 "Spoilt.step at tau=0: w must be finite and not negative, got -1.0 at"),
    "no votes": (lambda b, a, fed: replace(a, votes=a.votes * 0), "every client needs a model"),
    "nan": (lambda b, a, fed: replace(a, votes=a.votes * np.nan), "votes must be finite"),
    "in place": (in_place, "changes an array of the state"),
    "unseeded": (forgets_the_seed, "two runs with one seed differ"),
    "peeks": (peeks, "other data after tau=2 change"),
    "truth": (lambda b, a, fed: replace(a, votes=a.votes * (1 + (0 if fed.concepts is None else fed.concepts.sum()))),
              "uses the true concepts"),
    "needs truth": (lambda b, a, fed: replace(a, votes=a.votes * (1 + fed.concepts[-1, 0])), "uses the true"),
    "no bool": (lambda b, a, fed: replace(a, drifted=np.zeros(4)), "an array of 4 truth values"),
    "alarm": (lambda b, a, fed: replace(a, drifted=np.ones(4, dtype=bool)), "an alarm at a client without new data"),
    "whose": (lambda b, a, fed: replace(a, events=(Event("decided", 0, {"clients": [4], "reason": "stays"}),)),
              "must name its clients, of 0 to 3"),
    "why": (lambda b, a, fed: replace(a, events=(Event("decided", 0, {"clients": [0]}),)), "and a reason, got"),
    "stale": (lambda b, a, fed: replace(a, events=b.events or (Event("revived", 0, {}),)),
              "the events at tau=1 are those of the step before"),
    "twice": (lambda b, a, fed: replace(a, events=(Event("revived", 0, {}),) * 2), "reported twice"),
    "lineage": (lambda b, a, fed: replace(a, events=(Event("created", 7 + fed.tau, {}),)), "leave the models"),
}  # fmt: skip


@dataclass(frozen=True)
class Decides:
    """FedAvg that decides about each client; at even times there is a model of one client beside, as `owner` says."""

    owner: Callable[[int], int]

    def init(self, fed: Federation) -> State:
        return fd.algorithm("Oblivious").init(fed)

    def step(self, state: State, fed: Federation) -> State:
        w = np.ones((fed.tau + 1, fed.n_clients, 1))
        models = fed.train(take(state.models, [0], [0]), w)
        if fed.tau % 2 == 0:
            models = join(models, take(models, [0], [9], owner=[self.owner(fed.tau)]))
            w = np.pad(w, ((0, 0), (0, 0), (0, 1)))
            w[-1, 0, 1] = 1
        decided = [
            Event("decided", 0, {"clients": [c], "reason": "it stays", "rows": 30}) for c in range(fed.n_clients)
        ]
        return State(models, w, votes=w[-1], events=tuple(decided))


def test_decisions_and_a_private_model_for_one_time_step_pass() -> None:
    check_algorithm(Decides(lambda tau: 0))


@pytest.mark.parametrize(
    ("owner", "sentence"),
    [(lambda tau: -1, r"leave the models \[0\], there are \[0, 9\]"), (lambda tau: tau, "has one owner, or none")],
)
def test_shared_models_need_events_and_owners_stay(owner: Callable[[int], int], sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence):
        check_algorithm(Decides(owner))


@dataclass(frozen=True)
class Seen(State):
    """With what each client has."""

    rows: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64), metadata={"newcomer": 0})


@dataclass(frozen=True)
class Forgetful(State):
    """The same, without room for clients that join."""

    rows: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))


@dataclass(frozen=True)
class Adds:
    """FedAvg that adds up how many rows each client had."""

    kind: type[Any]

    def init(self, fed: Federation) -> State:
        made: State = self.kind(**vars(fd.algorithm("Oblivious").init(fed)), rows=np.zeros(fed.n_clients, dtype=int))
        return made

    def step(self, state: Any, fed: Federation) -> State:
        return replace(fd.algorithm("Oblivious").step(state, fed), rows=state.rows + fed.counts[-1])  # type: ignore[call-arg]


def test_a_client_that_joins_later_needs_room() -> None:
    check_algorithm(Adds(Seen))
    sentence = (
        r"when a client joins: Adds.step at tau=3: ValueError: operands .*test_testing.py, line \d+\); .*newcomer"
    )
    with pytest.raises(AssertionError, match=sentence):
        check_algorithm(Adds(Forgetful))


class Counts:
    """FedAvg that remembers something beside its state."""

    def __init__(self) -> None:
        self.seen = 0

    def init(self, fed: Federation) -> State:
        self.seen = 0
        return fd.algorithm("Oblivious").init(fed)

    def step(self, state: State, fed: Federation) -> State:
        self.seen += 1
        after = fd.algorithm("Oblivious").step(state, fed)
        return replace(after, votes=np.asarray(after.votes) * self.seen)


def test_memory_outside_the_state_is_detected() -> None:
    with pytest.raises(AssertionError, match="a saved state continues differently at tau=1"):
        check_algorithm(Counts())
    with pytest.raises(AssertionError, match="an algorithm is an object with init and step, got"):
        check_algorithm(Counts)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", WRONG)
def test_an_invalid_method_gets_an_explanation(name: str) -> None:
    spoil, sentence = WRONG[name]
    with pytest.raises(AssertionError, match=sentence):
        check_algorithm(Spoilt(spoil))


def test_an_invalid_net_gets_an_explanation() -> None:
    good = fd.mlp(3, 6, 2)
    check_net(good, [3], 2)
    constant = good.init((np.uint32(1), np.uint32(2)))
    for net, sentence in (
        (replace(good, init=lambda key: constant), "another key must give other"),
        (replace(good, apply=lambda params, x: good.apply(params, x)[:, :1]), r"shape \(6, 2\), got \(6, 1\)"),
        (replace(good, apply=lambda params, x: good.apply(params, x) + x.mean()), "must not depend on the others"),
        (replace(good, apply=lambda params, x: 0 * good.apply(params, x)), "training must lower the loss"),
        (replace(good, apply=lambda params, x: good.apply(jax.lax.stop_gradient(params), x)), "training must lower"),
        (replace(good, apply=lambda params, x: good.apply(params, x) + np.random.default_rng().random()), "two calls"),
    ):
        with pytest.raises(AssertionError, match=sentence):
            check_net(net, [3], 2)


def test_an_invalid_drift_test_gets_an_explanation() -> None:
    def same(seen: Evidence, value: bool) -> Bools:
        return np.full(len(seen.newest), value)

    for test, sentence in (
        (lambda seen: same(seen, True), "stay the same are not a drift"),
        (lambda seen: same(seen, False), "is a drift"),
        (lambda seen: [False] * 5, "an array of 5 truth values, '<lambda>' gave list"),
        (lambda seen: seen.newest > seen.observed[-3] + 0.1, "must accept the scores of 1 time steps"),
        (lambda seen: seen.newest.max() > 0.5 + 0 * seen.newest, "only the client whose score rose"),
        (lambda seen: ~(seen.newest <= seen.reference + 0.1), "not scored raises no alarm"),
    ):
        with pytest.raises(AssertionError, match=sentence):
            check_test(test)  # type: ignore[arg-type]


def test_an_invalid_engine_gets_an_explanation() -> None:
    class Deaf(SimulatorWorker):
        def score(self, *args: Any, **kwargs: Any) -> Any:
            for which, sums, sizes in super().score(*args, **kwargs):
                yield which, sums + 1, sizes

    class Engine(Simulator):
        def worker(self, tau: int) -> Deaf:
            return Deaf(self, tau)

    with pytest.raises(AssertionError, match="evaluate differs from the result of the reference engine"):
        check_worker(Engine)


def test_the_fake_federation_records_its_requests() -> None:
    fed = FakeFederation(tau=1, n_clients=3, loss=lambda c, i: c / 10)
    state = fd.algorithm("FedDrift").step(fd.algorithm("FedDrift").init(FakeFederation(0, 3)), FakeFederation(0, 3))
    fd.algorithm("FedDrift").step(state, fed)
    assert fed.requests[0] == "evaluate error" and fed.requests[-1].startswith("train")


def test_names_of_version_0_3_still_work_on_a_fake_federation() -> None:
    with pytest.warns(DeprecationWarning, match="FakeFederation.judge is now run_contest"):
        fed = FakeFederation(0, 2, judge=lambda _, teams: Tournament.empty(2, len(teams)))  # type: ignore[call-arg]
    fed.contest(fed.fresh(), np.zeros((3, 2, 1), dtype=int))
    with pytest.warns(DeprecationWarning, match="FakeFederation.asked is now requests"):
        assert fed.asked == ["contest"]  # type: ignore[attr-defined]
    with pytest.warns(DeprecationWarning, match="FakeFederation.quiet is now rejected_alarms"):
        fed.quiet = np.array([True, False])  # type: ignore[attr-defined]
    assert fed.allowed(np.ones(2, dtype=bool)).tolist() == [False, True]
    with pytest.raises(AttributeError, match="FakeFederation has no attribute 'hearing'"):
        fed.hearing  # type: ignore[attr-defined]  # noqa: B018
    assert copy.deepcopy(fed).requests == ["contest"] and replace(fed, tau=1).requests == ["contest"]
