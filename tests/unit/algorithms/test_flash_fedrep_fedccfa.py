"""Flash, FedRep and FedCCFA-Heads: update rules by hand, small examples, and heads mixed by class."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import feddrift as fd
from feddrift import rng
from feddrift._internal import checkpoint
from feddrift.algorithms.later.fedccfa import FedCCFAHeads, average_shared_rows, compute_row_distances
from feddrift.algorithms.later.fedrep import FedRep, split_local_steps
from feddrift.algorithms.later.flash import Flash, FlashState
from feddrift.data import Stream
from feddrift.engines.conditions.conditions import Conditions
from feddrift.engines.local.reference import Reference
from feddrift.engines.simulator.simulator import Simulator
from feddrift.models import class_rows, init_models, join, mix, mix_rows, take
from feddrift.nets.perceptron import mlp
from feddrift.testing import FakeFederation
from feddrift.types import Local, Models, Net, Updates, Weights

SGD = Local(rounds=1, steps=2, batch=1, lr=0.1, optimizer="sgd", weight_decay=0.0)


# Flash


class Changing(FakeFederation):
    """Two clients with 100 and 300 rows, whose updates are at these distances from the model."""

    changes: tuple[float, float] = (0.2, 0.4)
    told: Local | None = None

    def local_updates(self, models: Models, w: Weights, local: Local | None = None) -> Updates:
        self.told = local
        moved = models.params["a"] + np.array(self.changes)[:, None]
        clients = np.flatnonzero(self.reachable)
        return Updates({"a": moved[clients]}, clients, np.zeros_like(clients), np.array([100.0, 300.0])[clients])


def test_flash_by_hand() -> None:
    """Delta = (100 * 0.2 + 300 * 0.4) / 400 = 0.35; two rounds of the equations with plain numbers."""
    fed, method = Changing(0, 2, local=Local(rounds=2)), Flash(eta=0.5, tau=0.1)
    state = method.step(method.init(fed), fed)
    theta, m, v, d = 0.0, 0.0, 0.01, 0.0
    for _ in range(2):
        m = 0.9 * m + 0.1 * 0.35
        before, v = v, 0.99 * v + 0.01 * 0.35**2
        b3 = before / (abs(0.35**2 - v) + before)
        d = b3 * d + (1 - b3) * (0.35**2 - v)
        theta += 0.5 * m / max(np.sqrt(v) - d + 0.1, 0.1)
    assert d > 0.05 and theta > 0.3
    np.testing.assert_allclose(state.models.params["a"], [[theta]], rtol=1e-6)
    np.testing.assert_allclose([state.m[0], state.v[0], state.d[0]], [m, v, d], rtol=1e-12)
    assert fed.told is not None and fed.told.optimizer == "sgd" and fed.told.momentum == 0.9
    assert fed.told.patience == 0.004 and fed.told.hold_out == 0.2
    assert np.asarray(state.votes).tolist() == [[1.0], [1.0]] and np.asarray(state.w).tolist() == [[[1.0], [1.0]]]


def test_flash_divides_by_no_less_than_tau_and_steps_further_when_changes_grow() -> None:
    """After small changes a large one: d exceeds sqrt(v), and the publication's denominator is below zero."""
    models, one = Models({"a": np.zeros((1, 1))}, (0,)), np.ones(1)
    state = FlashState(models, np.zeros((0, 1, 1)), np.ones((1, 1)), m=0 * one, v=1e-6 * one, d=0 * one)
    move, after = state.compute_step(5 * one, eta=0.01, tau=1e-3)
    assert np.sqrt(after.v) - after.d + 1e-3 < 0
    np.testing.assert_allclose(move, 0.01 * 0.5 / 1e-3)
    calm = replace(state, d=0 * one).compute_step(0.01 * one, eta=0.01, tau=1e-3)[0]
    np.testing.assert_allclose(calm, 0.01 * 0.001 / (np.sqrt(0.99e-6 + 1e-6) + 1e-3 - _d(0.01)), rtol=1e-9)


def _d(change: float) -> float:
    v = 0.99e-6 + 0.01 * change**2
    b3 = 1e-6 / (abs(change**2 - v) + 1e-6)
    return (1 - b3) * (change**2 - v)


def test_flash_counts_replies_and_pauses_without_any() -> None:
    fed, method = Changing(0, 2, local=Local(rounds=1)), Flash()
    fed.reachable = np.array([True, False])
    state = method.step(method.init(fed), fed)
    np.testing.assert_allclose(state.m, 0.1 * 0.2)  # the change of client 0 alone
    fed.reachable[:] = False
    again = method.step(state, fed)
    np.testing.assert_array_equal(again.models.params["a"], state.models.params["a"])
    np.testing.assert_array_equal(again.v, state.v)


# FedRep


def gradients(p: dict[str, Any], x: float, y: int) -> dict[str, Any]:
    """Of the cross-entropy of a net with one hidden unit, by hand."""
    hidden = x * p["W1"][0] + p["b1"]
    out = np.maximum(hidden, 0) @ p["W2"] + p["b2"]
    error = np.exp(out) / np.exp(out).sum() - np.eye(2)[y]
    back = (p["W2"] @ error) * (hidden > 0)
    return {"W1": x * back[None], "b1": back, "W2": np.maximum(hidden, 0)[:, None] * error, "b2": error}


def test_a_round_of_fedrep_by_hand() -> None:
    """Two clients with a row each: a step of each head on the common trunk, then one of the trunk under each head."""
    rows = [(1.0, 0), (0.5, 1)]
    cells = [[(np.array([[x]]), np.array([y])) for x, y in rows]] * 2
    fed = Reference(Stream.from_arrays(cells, n_classes=2), mlp(1, 1, 2), SGD, 4).at(0)
    method = FedRep()
    state = method.init(fed)
    start = {k: np.asarray(v[0], dtype=np.float64) for k, v in state.models.params.items()}
    start["W1"], start["b1"] = np.abs(start["W1"]), np.abs(start["b1"])  # the hidden unit is on
    models = state.models
    params = {k: np.repeat(v[None], 1 if k in ("W1", "b1") else 2, axis=0).astype(np.float32) for k, v in start.items()}
    state = method.step(replace(state, models=replace(models, params=params)), fed)
    trunks = []
    for c, (x, y) in enumerate(rows):
        g = gradients(start, x, y)
        mine = {**start, "W2": start["W2"] - 0.1 * g["W2"], "b2": start["b2"] - 0.1 * g["b2"]}
        np.testing.assert_allclose(state.models.params["W2"][c], mine["W2"], atol=1e-6)
        np.testing.assert_allclose(state.models.params["b2"][c], mine["b2"], atol=1e-6)
        g = gradients(mine, x, y)
        trunks.append({k: mine[k] - 0.1 * g[k] for k in ("W1", "b1")})
    for k in ("W1", "b1"):
        np.testing.assert_allclose(state.models.params[k][0], (trunks[0][k] + trunks[1][k]) / 2, atol=1e-6)
    np.testing.assert_allclose(fed.sent, 2.0)  # head and trunk, down and up


def test_halves_share_the_steps_of_a_round() -> None:
    assert [part.steps for part in split_local_steps(Local(steps=50), 0.5)] == [25, 25]
    assert [part.steps for part in split_local_steps(Local(steps=50), 1 / 6)] == [8, 42]
    assert [part.steps for part in split_local_steps(Local(steps=2), 0.9)] == [1, 1]
    assert [part.steps for part in split_local_steps(Local(steps=1), 0.5)] == [1, 1]
    assert [part.trains for part in split_local_steps(Local(), 0.5)] == ["head", "trunk"]


def make_opposed_stream(n_steps: int = 3, n: int = 80) -> Stream:
    """Clients 0 and 1 agree on the labels of four quarters of a square; 2 and 3 exchange classes 1 and 2."""
    draw = np.random.default_rng(0)

    def cell(c: int) -> Any:
        x = draw.random((n, 2))
        y = (x[:, 0] > 0.5) + 2 * (x[:, 1] > 0.5)
        return x, np.array([0, 2, 1, 3])[y] if c > 1 else y

    return Stream.from_arrays([[cell(c) for c in range(4)] for _ in range(n_steps + 1)], n_classes=4)


@pytest.mark.parametrize("name", ["FedRep", "FedCCFA-Heads"])
def test_heads_of_their_own_serve_clients_that_disagree(name: str) -> None:
    local = Local(rounds=15, steps=30, batch=40, lr=0.02)
    accuracy = {
        which: list(fd.run(make_opposed_stream(), which, local=local))[-1].accuracy.mean()
        for which in (name, "Oblivious")
    }
    assert accuracy[name] > accuracy["Oblivious"] + 0.2


@pytest.mark.parametrize("name", ["FedRep", "FedCCFA-Heads"])
def test_absent_and_late_clients(name: str) -> None:
    """Out of reach a client keeps its head; one that joins late gets a fresh head on the trunk as it is by then."""
    trace = np.array([[1, 1, 1, 0], [1, 0, 1, 1], [1, 1, 1, 1]], dtype=bool)
    stream, local = make_opposed_stream(), Local(rounds=2, steps=6, batch=10)
    steps = list(fd.run(stream, name, local=local, conditions=Conditions(trace=trace)))
    first, second = (step.state.models for step in steps[:2])
    np.testing.assert_array_equal(first.params["W2"][1], second.params["W2"][1])
    assert not np.array_equal(first.params["W2"][0], second.params["W2"][0])
    assert [step.state.votes.argmax(axis=1).tolist() for step in steps] == [[0, 1, 2, 3]] * 3
    engine = Simulator(stream, mlp(2, 4, 4), local, 0)
    method = fd.algorithm(name)
    fed = engine.at(0)
    state = method.init(fed)
    short = replace(state, models=take(state.models, range(3), range(3), [0] * 3), votes=np.eye(4, 3))
    grown = method.step(short, engine.at(1))
    assert grown.models.ids == (0, 1, 2, 3) and set(grown.models.family) == {0}
    assert [event.model for event in grown.events] == [3]


# FedCCFA-Heads


def test_distances_of_rows_by_hand() -> None:
    """cos(0, 2) = 0, cos(1, 2) = 0.6, so 0 and 1 are 0.6 apart; of 0 and 2: |cos(0, 1) - cos(2, 1)| = |0.8 - 0.6|."""
    D = compute_row_distances(np.array([[2.0, 0.0], [0.8, 0.6], [0.0, 5.0]]))
    np.testing.assert_allclose(D, [[0, 0.6, 0.2], [0.6, 0, 0.8], [0.2, 0.8, 0]], atol=1e-12)


def test_groups_are_transitive_and_omit_absent_clients() -> None:
    angle = np.array([0.0, 0.1, 0.2, 1.5, 0.1])
    rows = np.stack([np.cos(angle), np.sin(angle)], axis=1)[:, None]
    apart = compute_row_distances(rows[[0, 1, 2, 3], 0])
    limit = (apart[0, 1] + apart[1, 2]) * 0.6
    assert apart[0, 2] > limit > max(apart[0, 1], apart[1, 2])  # linked by the one between
    A = average_shared_rows(rows, np.array([0, 1, 2, 3]), limit)[0]
    np.testing.assert_allclose(A[:3, :3], 1 / 3)
    np.testing.assert_allclose(A[3:], np.eye(5)[3:])  # one alone, and one that was not asked


def test_clients_share_the_classes_on_which_they_agree() -> None:
    """On opposed data heads that start alike tell for each class who agrees: on 0 and 3 all, on 1 and 2 by pairs."""
    stream, local = (
        make_opposed_stream(1, 400),
        Local(rounds=1, steps=40, batch=20, lr=0.2, optimizer="sgd", trains="head", even=50),
    )
    fed = Simulator(stream, mlp(2, 32, 4), local, 0).at(0)
    heads = take(fed.fresh(), [0] * 4, range(4), [0] * 4)
    w = np.eye(4)[None]
    trained = fed.train(heads, w)
    A = average_shared_rows(class_rows(trained), np.arange(4), 0.1)
    pairs = np.kron(np.eye(2), np.ones((2, 2))) / 2
    np.testing.assert_allclose(A, [np.full((4, 4), 0.25), pairs, pairs, np.full((4, 4), 0.25)])


def test_the_first_head_of_a_client_is_the_balanced_one_and_two_clients_share_nothing() -> None:
    """With lr so small that nothing else moves, a head is what its balanced training made of the common start."""
    stream = make_opposed_stream(1)
    two = Stream.from_arrays([[stream.cell(t, c) for c in (0, 2)] for t in range(2)], n_classes=4)
    local = Local(rounds=1, steps=6, batch=64, lr=1e-12)
    fed, method = Simulator(two, mlp(2, 4, 4), local, 0).at(0), FedCCFAHeads()
    state = method.step(method.init(fed), fed)
    again = Simulator(two, mlp(2, 4, 4), local, 0).at(0)
    start = take(again.fresh(), [0, 0], [2, 3], [0, 0])
    how = replace(local, optimizer="sgd", lr=0.1, trains="head", even=5, steps=5)
    beta = again.local_updates(start, np.eye(2)[None], how)
    np.testing.assert_allclose(state.models.params["W2"], beta.params["W2"], atol=1e-7)
    assert not np.allclose(beta.params["W2"][0], beta.params["W2"][1], atol=1e-4)


# Rows of classes


def test_rows_are_mixed_by_hand() -> None:
    models = init_models(mlp(1, 2, 3), 0, 2, distinct=True)
    A = np.tile(np.eye(2), (3, 1, 1))
    A[1] = np.array([[0.25, 0.75], [0.0, 1.0]])
    mixed, old = mix_rows(models, A).params, models.params
    for name in ("W1", "b1"):
        np.testing.assert_array_equal(mixed[name], old[name])
    np.testing.assert_allclose(mixed["W2"][0, :, 1], 0.25 * old["W2"][0, :, 1] + 0.75 * old["W2"][1, :, 1], rtol=1e-6)
    np.testing.assert_allclose(mixed["b2"][0, 1], 0.25 * old["b2"][0, 1] + 0.75 * old["b2"][1, 1], rtol=1e-6)
    np.testing.assert_array_equal(mixed["W2"][:, :, [0, 2]], old["W2"][:, :, [0, 2]])
    np.testing.assert_array_equal(mixed["W2"][1], old["W2"][1])
    np.testing.assert_allclose(class_rows(models)[1, 2], [*old["W2"][1, :, 2], old["b2"][1, 2]])


def test_nets_define_the_class_axis_and_models_store_it(tmp_path: Any) -> None:
    net = mlp(3, 4, 2)
    models = init_models(net, 0, 2)
    assert models.classes == {"W1": -1, "b1": -1, "W2": 1, "b2": 0}
    surgery = join(mix(models, np.eye(2), (0, 1)), take(models, [0], [2]))
    checkpoint.write(tmp_path / "saved", {}, surgery)
    saved = checkpoint.read(tmp_path / "saved").decode(net.init(rng.derive_key(0, "init", 0)))
    assert saved.classes == models.classes
    assert init_models(mlp(3, (), 2), 0).classes == {"W1": 1, "b1": 0}
    from feddrift.nets.resnet import resnet18

    assert dict(resnet18(5).classes) == {"fc/weight": 0, "fc/bias": 0}


def test_rows_that_cannot_be_mixed() -> None:
    def init(key: rng.Words) -> Any:
        return {"weight": rng.uniform(key, (2, 3), -1, 1)}

    silent = init_models(Net(init, lambda params, x: x @ params["weight"]), 0, 2)
    with pytest.raises(fd.ConfigError, match="must name the axis of each array of its head"):
        mix_rows(silent, np.tile(np.eye(2), (3, 1, 1)))
    told = init_models(Net(init, lambda params, x: x @ params["weight"], classes={"weight": 1}), 0, 2)
    with pytest.raises(ValueError, match=r"mix_rows needs an array of shape \(3, 2, 2\), got \(2, 2, 2\)"):
        mix_rows(told, np.tile(np.eye(2), (2, 1, 1)))
    with pytest.raises(fd.ConfigError, match="the net has no array 'bias' that counts classes"):
        init_models(Net(init, lambda params, x: x @ params["weight"], classes={"bias": 0}), 0)


@pytest.mark.parametrize("name", ["FedRep", "FedCCFA-Heads"])
def test_a_net_without_a_trunk_is_refused(name: str) -> None:
    with pytest.raises(fd.ConfigError, match=f"{name} needs a net with a trunk and a head"):
        next(fd.run(make_opposed_stream(), name, net=mlp(2, (), 4)))


@pytest.mark.parametrize(
    ("method", "wrong", "sentence"),
    [
        (Flash, {"eta": 0.0}, "Flash.eta must be above 0"), (Flash, {"patience": -1.0}, "Flash.patience must be at"),
        (FedRep, {"head_share": 1.0}, "FedRep.head_share must be above 0 and below 1, got 1.0"),
        (FedCCFAHeads, {"eps": 3.0}, r"FedCCFA-Heads.eps must be in \[0, 2\], got 3.0"),
        (FedCCFAHeads, {"even": 0}, "FedCCFA-Heads.even must be at least 1, got 0"),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense(method: Any, wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(fd.ConfigError, match=sentence):
        method(**wrong)


def test_a_client_with_a_single_row_has_no_hold_out() -> None:
    draw = np.random.default_rng(0)

    def cell(n: int) -> Any:
        x = draw.random((n, 3))
        return x, (x[:, 0] > 0.5).astype(int)

    stream = fd.Stream.from_arrays([[cell(20), cell(1)], [cell(20), cell(20)]], n_classes=2)
    a, b = (
        [s.accuracy for s in fd.run(stream, "Flash", engine=engine, local=fd.Local(rounds=2, steps=4, batch=8))]
        for engine in ("simulator", "reference")
    )
    np.testing.assert_allclose(a, b)
