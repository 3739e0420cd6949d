"""FLUX and FEROMA: profiles, clusters and mixtures by hand, and a stream on which they must succeed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import feddrift as fd
from feddrift.algorithms.later.data_profiles import (
    DESCRIBER_ID,
    BlockScale,
    compute_distances,
    compute_profiles,
    find_components,
    find_knee,
)
from feddrift.algorithms.later.feroma import FEROMA, FeromaState, _count_newest_rows, compute_shares, estimate_scatter
from feddrift.algorithms.later.flux import FLUX, FluxState
from feddrift.data import Stream
from feddrift.engines import engine as find_engine
from feddrift.engines.local.engine import InProcessWorker
from feddrift.nets import default_net
from feddrift.testing import FakeFederation, check_algorithm
from feddrift.types import Floats, Ints, Models, Moments, Net, Tournament, Updates

NAN = np.nan
LOCAL = fd.Local(rounds=12, steps=20, batch=50, lr=0.05)


def make_moments(count: Any, mean: Any, std: Any) -> Moments:
    """Of one model and one number: [c, k]."""
    mean, std = (np.array(table, dtype=float)[:, None, :, None] for table in (mean, std))
    return Moments(np.array(count)[:, None], mean, std)


def test_a_profile_by_hand() -> None:
    """Rows 1, 3 of the first class and 8 of the second; a client without data."""
    found = compute_profiles(make_moments([[2, 1], [0, 0]], [[2, 8], [NAN, NAN]], [[1, 0], [NAN, NAN]]))
    rows = np.array([1.0, 3.0, 8.0])
    expected: list[float] = [rows.mean(), rows.std(), 2, -1, 1, -1]  # one row of a class is too few
    np.testing.assert_allclose(found[0, :, 0], np.array(expected))
    assert found.shape == (2, 6, 1) and np.isnan(found[1]).all()


def test_blocks_are_scaled_over_clients_and_their_numbers() -> None:
    described = np.array([[[0.0, 4.0], [5.0, 5.0]], [[2.0, 3.0], [5.0, 5.0]], [[NAN, NAN], [NAN, NAN]]])
    scale = BlockScale.fit_profiles(described)
    expected = np.array([[0, 1, 0, 0], [0.5, 0.75, 0, 0]])  # a block that is one number: 0
    np.testing.assert_allclose(scale(described[:2]), expected)
    assert np.isnan(scale(described)[2]).all()


def test_knees_and_components() -> None:
    assert find_knee(np.array([1.0, 1.1, 1.2, 1.3, 9.0])) == 1.3
    assert find_knee(np.array([3.0])) == find_knee(np.array([1.0, 2.0, 3.0])) == 3.0  # no knee: all are near
    D = compute_distances(np.array([[0.0], [1.0], [2.0], [10.0]]), np.array([[0.0], [1.0], [2.0], [10.0]]))
    assert find_components(D <= 1).tolist() == [0, 0, 0, 3] and find_components(D <= 0.5).tolist() == [0, 1, 2, 3]


def make_moments_reply(*at: float) -> Any:
    """What moments answers: both classes of each client lie at one number, with deviation 1; NaN: no data."""

    def answer(models: Models, layer: str, by: str) -> Moments:
        mean = np.array([[x, x] for x in at])
        return make_moments(np.where(np.isnan(mean), 0, 50), mean, np.where(np.isnan(mean), np.nan, 1.0))

    return answer


def make_contest(*accuracies: float) -> Any:
    told = iter(accuracies)

    def contest(models: Models, teams: Ints) -> Tournament:
        wrong = round(100 * (1 - next(told)))
        return Tournament(np.full(teams.shape[1], 100), np.full((teams.shape[1], 1, 1), wrong))

    return contest


def flux(tau: int, *at: float, **given: Any) -> FakeFederation:
    counts = np.full((tau + 1, len(at)), 100)
    counts[-1, np.isnan(at)] = 0
    return FakeFederation(
        tau, len(at), compute_moments=make_moments_reply(*at), counts=counts, local=fd.Local(rounds=10), **given
    )


def test_a_run_of_flux_by_hand() -> None:
    method = FLUX()
    state = method.init(flux(0, 0, 0, 0, 0))
    fed = flux(0, 0.0, 0.1, 5.0, 5.1, 9.0, run_contest=make_contest(0.5, 0.7, 0.76, 0.8))
    state = replace(state, votes=np.ones((5, 1)))
    state = method.step(state, fed)
    # The rise of round 3, 0.06, is not below the limit; that of round 4 is. Six of ten rounds are left.
    round_by_round = ["train rounds=1 lr=0.01", "contest holds=last"]
    assert fed.requests == [*round_by_round * 4, "moments trunk class", "train rounds=6"]
    # Distances to the nearest are 0.1 four times and 3.9: the knee is 0.1.
    assert state.models.ids == (0, 1, 2) and state.votes.argmax(axis=1).tolist() == [0, 0, 1, 1, 2]
    assert [e.cause["clients"] for e in state.events] == [[2, 3], [4]] and not state.drifted.any()  # type: ignore[union-attr]
    assert state.describer is not None and state.describer.ids == (DESCRIBER_ID,)
    np.testing.assert_allclose(state.centre[:, 0, 0], [0.05, 5.05, 9])
    # All starts are G, which had four rounds; then the clusters trained on.
    assert state.describer.params["a"].tolist() == [[4]] and state.models.params["a"].tolist() == [[5]] * 3
    # Two swap, one comes back late, and one is new: it copies the nearest, under a name of its own.
    fed = flux(1, 5.05, 0.0, 5.0, 20.0, NAN)
    moved = method.step(state, fed)
    assert fed.requests == ["moments trunk class", "train rounds=10"]
    assert moved.votes.argmax(axis=1).tolist()[:3] == [1, moved.votes[1].argmax(), 1]
    assert moved.votes.argmax(axis=1)[4] == 2  # without data it stays
    (event,) = [e for e in moved.events if e.cause["clients"] == [3]]
    assert event.kind == "created" and event.cause["from"] == 2 and event.cause["distance"] > event.cause["eps"]
    assert moved.drifted is not None and moved.drifted[3] and not moved.drifted[[0, 2, 4]].any()
    w = np.asarray(fed.trained[1])
    assert not w[0].any() and w[1].sum() == 5  # the newest data alone


def test_a_router_of_centres() -> None:
    method = FLUX()
    fed = flux(0, 0.0, 0.1, 5.0, 5.1, run_contest=make_contest(0.5, 0.9, 0.9))
    state = method.step(method.init(fed), fed)
    way = state.router
    assert way is not None and way.per == "batch" and way.of == "moments" and way.layer == "trunk"
    assert way.votes.tolist() == np.eye(2).tolist() and way.model is state.describer
    # What lies at 5, with deviation 1, is the second's; numbers are scaled by the block's 0 to 5.1.
    np.testing.assert_allclose(way.centre[:, 0], [0.05 / 5.1, 5.05 / 5.1])
    silent = FLUX(router=False)
    fed = flux(0, 0.0, 0.1, 5.0, 5.1, run_contest=make_contest(0.5, 0.9, 0.9))
    assert silent.step(silent.init(fed), fed).router is None


def test_complete_linkage_keeps_a_chain_apart() -> None:
    chain = (0.0, 1.0, 2.1, 3.2, 30.0)
    states = []
    for linkage in ("single", "complete"):
        fed, method = flux(0, *chain, run_contest=make_contest(0.5, 0.9, 0.9)), fd.algorithm("FLUX", linkage=linkage)
        states.append(method.step(method.init(fed), fed))
    single, complete = (state.votes.argmax(axis=1) for state in states)
    assert len(set(single[:4])) == 1 and single[4] != single[0]
    assert complete[4] not in complete[:4]


def test_one_client_alone_and_no_client() -> None:
    fed, method = flux(0, 3.0, run_contest=make_contest(0.5, 0.9, 0.9)), FLUX()
    state = method.step(method.init(fed), fed)
    again = method.step(state, flux(1, 50.0))
    assert again.models.ids == (0,) and not again.events
    idle = method.step(again, flux(2, NAN))
    assert idle.models.ids == (0,) and np.asarray(idle.w).shape == (3, 1, 1) and idle.describer is not None
    early = method.step(method.init(flux(0, NAN)), flux(0, NAN))
    assert early.describer is None


def test_shares_by_hand() -> None:
    now, before = np.array([[0.0], [4.0], [NAN]]), np.array([[1.0], [3.0], [NAN]])
    A = compute_shares(now, before, np.array([100, 300, 50]), "inverse")
    np.testing.assert_allclose(A[0], [0.5, 0.5, 0], atol=1e-6)  # 100 / 1 and 300 / 3
    np.testing.assert_allclose(A[1], [100 / 3 / (100 / 3 + 300), 300 / (100 / 3 + 300), 0], atol=1e-6)
    assert A[2].tolist() == [0, 0, 1]  # who is not described keeps its own
    soft = compute_shares(now, before, np.array([100, 300, 50]), "softmax")
    np.testing.assert_allclose(soft[0, 0], 100 * np.exp(-1) / (100 * np.exp(-1) + 300 * np.exp(-3)))
    first = compute_shares(now, np.full((3, 1), NAN), np.array([100, 300, 0]), "inverse")
    np.testing.assert_allclose(first, np.array([[0.25, 0.75, 0], [0.25, 0.75, 0], [0, 0, 1]]))
    np.testing.assert_allclose(compute_shares(now, np.full((3, 1), NAN), np.array([100, 300, 0]), "softmax"), first)


def test_profiles_scatter_as_fewer_rows_would() -> None:
    described = np.array([[[9.0], [2.0], [9.0], [-1.0], [3.0], [-1.0]]])  # mean, std, means and stds of two classes
    found: Floats = estimate_scatter(described, np.array([[60, 1]]))[0, :, 0]
    n = 0.6 * 61
    expected: list[float] = [2 / np.sqrt(n), 2 / np.sqrt(2 * n), 3 / np.sqrt(36), 0, 3 / np.sqrt(72), 0]
    np.testing.assert_allclose(found, np.array(expected))


def test_the_newest_counts() -> None:
    assert _count_newest_rows(np.array([[5, 0, 7], [6, 0, 0]])).tolist() == [6, 0, 7]


def test_a_round_of_feroma_by_hand() -> None:
    """Two clients, one round after the common one; then a time step in which the second has no data."""
    sent: list[Any] = []

    def lanes(models: Models, w: Any) -> Updates:
        sent.append(models.params["a"].copy())
        active = np.flatnonzero(np.asarray(w)[-1].any(axis=1) & (fed.counts[-1] > 0))
        trained = models.params["a"][active] + [[10.0 * (c + 1)] for c in active]
        return Updates({"a": trained}, active, active, np.full(len(active), 100.0))

    method = FEROMA(common_rounds=1)
    fed = FakeFederation(0, 2, compute_moments=make_moments_reply(0.0, 8.0), lanes=lanes, local=fd.Local(rounds=3))
    state = method.step(method.init(fed), fed)
    assert fed.requests == ["train rounds=1", "moments trunk class", "local_updates", "local_updates"]
    assert sent[0].tolist() == [[1], [1]]  # both from G, whatever the mixture
    # Then each is nearly its own: 11 and 21, mixed by 1 / distance; far apart, little of the other.
    assert abs(sent[1][0, 0] - 11) < 2 and abs(sent[1][1, 0] - 21) < 2 and sent[1][0, 0] > 11
    assert state.models.ids == (0, 1) and np.asarray(state.votes).tolist() == np.eye(2).tolist()
    assert [(e.kind, e.model) for e in state.events] == [("created", 1)]
    assert isinstance(state, FeromaState) and state.profile.shape[1] == 2
    before = state.models.params["a"]
    fed = FakeFederation(1, 2, compute_moments=make_moments_reply(8.0, NAN), lanes=lanes, local=fd.Local(rounds=1))
    fed.counts[1, 1] = 0
    moved = method.step(state, fed)
    # The first looks like the second did: it trains from the second's model, which stays.
    assert abs(sent[2][0, 0] - before[1, 0]) < 2 and moved.models.params["a"][1, 0] == before[1, 0]
    np.testing.assert_array_equal(moved.profile[:, 1], state.profile[:, 1])


def make_turning_stream(seed: int = 0) -> Stream:
    """Inputs of concept 1 lie elsewhere and have the opposite labels; at times 2 and 4 clients change places."""
    draw = np.random.default_rng(seed)
    concepts = np.array([[0, 0, 0, 1, 1, 1]] * 2 + [[1, 1, 1, 0, 0, 0]] * 2 + [[0, 1] * 3] * 2)

    def cell(concept: int) -> Any:
        x = draw.random((200, 2)) + 1.5 * concept
        return x, (x[:, 0] > x[:, 1]).astype(int) ^ concept

    return Stream.from_arrays([[cell(k) for k in row] for row in concepts], n_classes=2, concepts=concepts)


@pytest.mark.parametrize("settings", [("FLUX", {}), ("FLUX", {"linkage": "complete"}), ("FEROMA", {})], ids=str)
def test_inputs_choose_after_a_change_before_training(settings: tuple[str, dict[str, Any]]) -> None:
    stream, (name, given) = make_turning_stream(), settings
    changes = [1, 3]  # time steps whose test has the clients elsewhere
    routed = list(fd.run(stream, fd.algorithm(name, stream, **given), local=LOCAL))
    known = list(fd.run(stream, fd.algorithm(name, stream, **given, router=False), local=LOCAL))
    assert min(routed[t].accuracy.mean() for t in range(1, 5)) > 0.9
    assert max(known[t].accuracy.mean() for t in changes) < 0.7
    if given:  # the two concepts are found, and found again
        assert [len(set(zip(s.model.tolist(), stream.concepts[s.tau], strict=True))) for s in known] == [2] * 5  # type: ignore[index]
        assert len(known[-1].state.models) == 2


@pytest.mark.parametrize("name", ["FLUX", "FEROMA"])
def test_they_keep_the_contract(name: str) -> None:
    check_algorithm(fd.algorithm(name))


@pytest.mark.parametrize("name", ["FLUX", "FEROMA"])
def test_clients_may_join_late_and_be_away(name: str) -> None:
    stream = make_turning_stream()
    trace = np.ones((5, 6), dtype=bool)
    trace[2, 0] = trace[3, 5] = False
    cells: list[list[Any]] = [[stream.cell(t, c) for c in range(6)] for t in range(6)]
    cells[0][1] = cells[1][1] = None  # joins at time 2
    late = Stream.from_arrays(cells, n_classes=2)
    steps = list(fd.run(late, fd.algorithm(name), local=LOCAL, conditions=fd.Conditions(trace=trace)))
    assert steps[2].model[0] == steps[1].model[0] and all(np.isfinite(s.state.votes).all() for s in steps)
    assert steps[2].accuracy[1] > 0.9


@pytest.mark.parametrize("name", ["FLUX", "FEROMA"])
def test_a_net_that_does_not_define_its_features(name: str) -> None:
    stream = make_turning_stream()
    usual = default_net(stream)
    net = Net(usual.init, usual.apply, usual.trunk)
    with pytest.raises(fd.ConfigError, match="use layer=input or logits"):
        list(fd.run(stream, name, net=net, local=fd.Local(rounds=2, steps=2)))
    steps = list(fd.run(stream, fd.algorithm(name, layer="input"), net=net, local=fd.Local(rounds=2, steps=2)))
    assert steps[0].state.router is not None and steps[0].state.router.model is None


@pytest.mark.parametrize(
    ("name", "setting", "sentence"),
    [
        ("FLUX", {"rise": 2.0}, r"FLUX.rise must be in \[0, 1\], got 2.0"),
        ("FEROMA", {"common_rounds": 0}, "FEROMA.common_rounds must be at least 1, got 0"),
    ],
)
def test_settings_out_of_range(name: str, setting: dict[str, Any], sentence: str) -> None:
    with pytest.raises(fd.ConfigError, match=sentence):
        fd.algorithm(name, **setting)


def test_the_traffic_of_flux_is_counted() -> None:
    """The describing model down, (2 d + 1) k numbers up, and two models for each of the rounds."""
    stream = make_turning_stream()
    net = default_net(stream)
    size = sum(int(leaf.size) for leaf in net.init((np.uint32(0), np.uint32(0))).values())
    algorithm, engine = fd.algorithm("FLUX"), find_engine("simulator")(stream, net, LOCAL, 0)
    state = algorithm.step(algorithm.init(engine.at(0)), engine.at(0))
    fed = engine.at(1)
    assert isinstance(algorithm.step(state, fed), FluxState)
    np.testing.assert_allclose(fed.sent, 2 * LOCAL.rounds + 1 + (2 * 2 + 1) * 2 / size)


@pytest.mark.parametrize("name", ["FLUX", "FEROMA"])
def test_clients_that_are_lost_during_a_request_stop_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one client has data at first, and it does not come to describe them."""
    draw = np.random.default_rng(0)

    def cell() -> Any:
        x = draw.random((20, 3))
        return x, (x[:, 0] > 0.5).astype(int)

    stream = fd.Stream.from_arrays([[cell(), None, None], [cell(), cell(), cell()], [cell()] * 3], n_classes=2)
    answer = InProcessWorker.describe

    def lost(self: Any, models: Any, clients: Any, question: Any) -> Any:
        found = answer(self, models, clients, question)
        if self.tau:
            return found
        return Moments.empty(len(clients), len(models), found.count.shape[2], found.mean.shape[3])

    monkeypatch.setattr(InProcessWorker, "describe", lost)
    steps = list(fd.run(stream, name, engine="reference", local=fd.Local(rounds=4, steps=3, batch=8)))
    assert len(steps) == 2 and np.isfinite(steps[-1].accuracy).all()
