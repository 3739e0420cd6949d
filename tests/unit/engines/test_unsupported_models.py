"""Models of fewer clients than `share_from` are sent to few others, and all engines decide alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import feddrift as fd
from feddrift import clustering
from feddrift.algorithms.feddrift.trunk import merge_families
from feddrift.deploy.settings import Settings
from feddrift.engines.conditions.conditions import Conditions
from feddrift.engines.conditions.unsupported_models import find_holders, limit_sharing
from feddrift.errors import ConfigError
from feddrift.nets import default_net
from feddrift.router import Router
from feddrift.runs.config import RunConfig
from feddrift.simulation import Step, run_steps
from feddrift.testing import FakeFederation, small_stream
from feddrift.types import Clusters, Local, Models, State

LEARN = Local(rounds=10, steps=20, batch=20, lr=0.05)
# Client 0 reaches concept 1 two time steps before client 1; the others never do.
CONCEPTS = np.array([[0] * 4] * 2 + [[1, 0, 0, 0]] * 2 + [[1, 1, 0, 0]] * 3)
METHODS = ("FedDrift", "FedDrift-Auto")


def run_method(share_from: int, name: str = "FedDrift", engine: str = "simulator") -> list[Step]:
    stream = small_stream(CONCEPTS, size=200)
    settings = {"delta": 0.1} if name == "FedDrift" else {}
    method = fd.algorithm(name, stream, **settings)
    return list(fd.run(stream, method, engine=engine, local=LEARN, conditions=Conditions(share_from=share_from)))


def make_federation(tau: int, *, served: Any = None, share_from: int = 2) -> Any:
    """Return a federation with model 0 of all clients and model 7, which only client 0 has trained."""
    stream = small_stream(CONCEPTS, size=60)
    engine = fd.engines.engine("simulator")(stream, default_net(stream), LEARN, 0, Conditions(share_from=share_from))
    fed = engine.at(tau)
    w = Clusters(np.where(CONCEPTS[:tau] == 1, 1, 0), 2)
    models = fd.models.take(fed.fresh(2, distinct=True), [0, 1], [0, 7])
    fed.limit_sharing(State(models, w, np.eye(2)[w.model[-1]]), served)
    return fed, models


def test_the_founder_alone_scores_its_model_until_another_client_needs_it() -> None:
    usual = run_method(0)
    limited = run_method(2)
    assert [step.model.tolist() for step in limited] == [step.model.tolist() for step in usual]
    assert usual[2].model.tolist() == [1, 0, 0, 0] and usual[4].model.tolist() == [1, 1, 0, 0]
    for step, other in zip(limited, usual, strict=True):
        np.testing.assert_array_equal(step.accuracy, other.accuracy)
    sent = np.array([step.sent_scoring for step in limited])
    everything = np.array([step.sent_scoring for step in usual])
    assert sent[3].tolist() == [2, 1, 1, 1] and everything[3].tolist() == [2, 2, 2, 2]
    assert sent[4].tolist() == [2, 2, 1, 1]  # client 1 is badly served
    np.testing.assert_array_equal(sent[5:], everything[5:])  # both have trained it


def test_receivers_are_holders_and_badly_served_clients() -> None:
    well_served = np.array([[1.0] * 4, [60] * 4])
    fed, models = make_federation(3, served=well_served)
    receivers = fed.find_receivers(models)
    assert receivers.tolist() == [[True, True]] + [[True, False]] * 3
    loss = fed.evaluate(models)
    assert np.isfinite(loss).tolist() == receivers.tolist()
    fed.sharing.candidates[2] = True
    assert np.isfinite(fed.evaluate(models)[:, 1]).tolist() == [True, False, True, False]
    assert (fed.confusion(models).sum(axis=(2, 3)) > 0).tolist() == fed.find_receivers(models).tolist()
    private = Models(models.params, (0, 7), owner=(-1, 2))
    assert fed.find_receivers(private)[:, 1].tolist() == [False, False, True, False]


def test_a_client_is_badly_served_until_its_error_falls_again() -> None:
    fed, models = make_federation(3, served=np.array([[0.0, 1.0, np.nan], [60, 60, np.nan]]))
    error = fed.evaluate(models, "error")
    sharing = fed.sharing
    assert error[0].min() > 0.2 and sharing.candidates.tolist() == [True, False, True, True]  # 2 and 3: never scored
    assert sharing.served[0].tolist() == [0.0, *error[1:, 0]] and sharing.served[1].tolist() == [60] * 4
    unreachable = limit_sharing(fed.worker, models, sharing.holders, np.array([1]), 3, sharing.served)
    np.testing.assert_array_equal(unreachable.served, sharing.served)


@pytest.mark.parametrize(("share_from", "unsupported"), [(2, {}), (3, {7: [0, 1]}), (5, {0: [0, 1, 2, 3], 7: [0, 1]})])
@pytest.mark.parametrize("dense", [False, True])
def test_a_model_needs_data_of_enough_clients(share_from: int, unsupported: dict[int, list[int]], dense: bool) -> None:
    w = Clusters(CONCEPTS[:5], 3)  # nothing trains the third model
    state = State(Models({"a": np.zeros((3, 1))}, (0, 7, 9)), np.asarray(w) if dense else w, np.eye(3)[CONCEPTS[4]])
    counts = np.full((6, 4), 60)
    found = find_holders(state, counts, share_from)
    assert {i: clients.tolist() for i, clients in found.items()} == unsupported
    counts[:, 1] = 0  # a client that uses a model without data does not support it
    assert 7 in find_holders(state, counts, 2)


def test_a_withheld_model_is_compared_where_it_may_be_sent() -> None:
    fed, models = make_federation(3, served=np.array([[1.0] * 4, [60] * 4]))
    w = np.zeros((4, 4, 2))
    w[0, :, 0] = w[2:, 0, 1] = 1
    L = fed.cross_evaluate(models, w)
    fed.sharing = None
    usual = fed.cross_evaluate(models, w)
    np.testing.assert_array_equal(L[0], usual[0])
    np.testing.assert_array_equal(L[1, 1], usual[1, 1])
    own = w.copy()
    own[0, 1:] = 0
    assert L[1, 0] == fed.cross_evaluate(models, own)[1, 0]  # the founder's own earlier data
    own[0, 0] = 0
    fed, models = make_federation(3, served=np.array([[1.0] * 4, [60] * 4]))
    w[0, 0] = 0  # the founder has no data of model 0: only this direction is known
    L = fed.cross_evaluate(models, w)
    assert np.isnan(L[1, 0]) and np.isfinite(L[0, 1])
    assert clustering.compute_distances(L)[0, 1] == max(0.0, L[0, 1] - L[0, 0])


def test_a_withheld_model_is_not_in_a_contest() -> None:
    fed, models = make_federation(3, served=np.array([[1.0] * 4, [60] * 4]))
    every_model = np.repeat(np.arange(2)[:, None, None], 4, axis=1)
    assert fed.contest(models, every_model).rows.tolist() == [60, 0, 0, 0]
    assert fed.contest(models, every_model[:1]).rows.tolist() == [60] * 4


def test_a_continued_step_has_the_same_receivers() -> None:
    fed, models = make_federation(3, served=np.array([[1.0] * 4, [60] * 4]))
    fed.sharing.candidates[3] = True
    again, _ = make_federation(3)
    again.restore(fed.progress())
    assert again.find_receivers(models).tolist() == fed.find_receivers(models).tolist()


def test_families_merge_without_a_comparison_of_withheld_models() -> None:
    models = Models({"a": np.array([[0.0], [4.0]])}, (0, 7))
    clusters = clustering.Clustering(models, Clusters(np.array([[0, 0, 1], [0, 0, 1]]), 2))
    D = np.array([[np.inf, 0.0], [0.0, np.inf]])
    fed = FakeFederation(tau=1, n_clients=3)
    fed.withheld[7] = [1]
    merged = merge_families(clusters, D, 0.1, 0.05, "error", fed)
    assert fed.requests == [] and merged.events[0].cause["kept"] == "average"
    np.testing.assert_allclose(merged.models.params["a"], [[4 / 3]])


@pytest.mark.parametrize("name", METHODS)
def test_engines_decide_alike(name: str) -> None:
    compare_steps(run_method(2, name), run_method(2, name, "reference"))


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_over_flower_it_equals_the_simulator(name: str) -> None:
    pytest.importorskip("flwr", reason="the extra 'flower' is not installed")
    from tests.support.flower import InProcessFlower

    stream = small_stream(CONCEPTS, size=200)
    engine = InProcessFlower(stream, default_net(stream), LEARN, 0, Conditions(share_from=2))
    engine.n_steps = stream.n_steps
    method = fd.algorithm(name, stream, **({"delta": 0.1} if name == "FedDrift" else {}))
    compare_steps(run_method(2, name), list(run_steps(engine, method)))


def compare_steps(here: list[Step], there: list[Step]) -> None:
    for a, b in zip(here, there, strict=True):
        np.testing.assert_array_equal(a.model, b.model)
        np.testing.assert_array_equal(a.sent_scoring, b.sent_scoring)
        assert [(e.kind, e.model) for e in a.events] == [(e.kind, e.model) for e in b.events]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(fd.algorithms.ALGORITHMS) - {"FLUX", "FEROMA"}))  # they have routers
def test_every_algorithm_copes(name: str) -> None:
    stream = small_stream(CONCEPTS, size=30)
    brief = Local(rounds=2, steps=4, batch=8, lr=0.05)
    for step in fd.run(stream, fd.algorithm(name, stream), local=brief, conditions=Conditions(share_from=2)):
        assert np.isfinite(step.accuracy).all() and np.isfinite(step.state.votes).all()


def test_it_is_recorded_only_where_it_is_set(tmp_path: Path) -> None:
    options: dict[str, Any] = {"out": tmp_path, "rounds": 1}
    limited = fd.record("sine-2", "FedDrift", share_from=2, **options)
    assert limited.header["overrides"] == {"rounds": 1, "share_from": 2}
    assert fd.record("sine-2", "FedDrift", **options).header["overrides"] == {"rounds": 1}


@pytest.mark.parametrize("value", [-1, 1.5, True])
def test_a_wrong_number_is_reported(value: Any) -> None:
    with pytest.raises(ConfigError, match=f"share_from must be a whole number of clients, 0 for off, got {value}"):
        Conditions(share_from=value)
    with pytest.raises(ConfigError, match="share_from"):
        RunConfig.from_values(stream="sine-2", algorithm="FedDrift", share_from=value)


def test_routers_are_refused() -> None:
    with pytest.raises(ConfigError, match="share_from=2 needs route=none, got route=row: a router sends every model"):
        Conditions(share_from=2, route="row")
    federation = {"experiment": "e", "clients": ["a"], "features": [2], "classes": ["n", "y"], "route": "row"}
    with pytest.raises(ConfigError, match="share_from=3 needs route=none, got route=row"):
        Settings.from_dict(federation | {"share_from": 3}, "here")
    assert Settings.from_dict(federation | {"share_from": 1}, "here").conditions.route == "row"
    refused = "share_from=2 does not work with the router of FLUX, which sends models to all clients"
    with pytest.raises(ConfigError, match=refused):
        next(fd.run("sine-2", "FLUX", conditions=Conditions(share_from=2)))
    config = RunConfig.from_values(stream="sine-2", algorithm="FLUX", share_from=2)
    with pytest.raises(ConfigError, match=refused):
        config.build_conditions(fd.stream("sine-2"))
    with pytest.raises(ConfigError, match=refused):
        Settings.from_dict(federation | {"route": "none", "algorithm": "FLUX", "share_from": 2}, "here")


def test_an_algorithm_that_returns_a_router_is_refused() -> None:
    class WithRouter:
        def init(self, fed: fd.Federation) -> State:
            return State(fed.fresh(), np.zeros((0, fed.n_clients, 1)), np.ones((fed.n_clients, 1)))

        def step(self, state: State, fed: fd.Federation) -> State:
            w = np.ones((fed.tau + 1, fed.n_clients, 1))
            return State(state.models, w, w[-1], router=Router("row", np.zeros((1, 2)), np.ones((1, 1))))

    with pytest.raises(ConfigError, match="share_from=2 does not work with WithRouter, which returned a router"):
        next(fd.run("sine-2", WithRouter(), conditions=Conditions(share_from=2)))
