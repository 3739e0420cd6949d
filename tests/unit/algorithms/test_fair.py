"""FairFedDrift, FedRC and FedEM: decisions on losses written by hand, and streams on which they must succeed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import feddrift as fd
from feddrift.algorithms.feddrift.fair import FairFedDrift, choose_models, compute_group_distances
from feddrift.algorithms.later.fedrc import FedRC, compute_responsibilities, update_mixtures
from feddrift.data import Stream
from feddrift.testing import FakeFederation, check_algorithm
from feddrift.types import Floats

NAN = np.nan
Table = dict[tuple[int, int], list[float]]


def make_federation(tau: int, loss: Table, cross: Any = None, **given: Any) -> FakeFederation:
    """Two clients, two groups; loss[c, id] is a list over groups."""
    return FakeFederation(tau, 2, n_groups=2, loss_by=lambda c, i, g: loss[c, i][g], cross_by=cross, **given)


def test_a_model_must_suit_every_group() -> None:
    loss = np.array([[[0.1, 0.9], [0.4, 0.5]]])
    seen, levels = choose_models(loss, np.array([[0.1], [0.3]]), np.array([0]), delta=0.3)
    # The first has a lower sum here (1.0 and 0.9) but for the second group, which rises by 0.6; the second suits.
    assert seen.best.tolist() == [1] and not seen.drifted.any() and seen.lowest.tolist() == [0.9]
    assert levels.tolist() == [[0.4], [0.5]]
    seen, levels = choose_models(loss, np.array([[0.1], [0.1]]), np.array([0]), delta=0.3)
    assert seen.drifted.tolist() == [True] and levels[:, 0].tolist() == [0.4, 0.5]  # the smallest sum, suiting or not
    seen, _ = choose_models(np.array([[[0.4, 0.5], [0.1, 0.3]]]), np.array([[0.4], [0.5]]), np.array([0]), delta=0.3)
    assert seen.best.tolist() == [1]  # of two that suit, the smaller sum


def test_groups_without_rows_and_clients_without_data_decide_nothing() -> None:
    loss = np.array([[[0.5, NAN]], [[NAN, NAN]], [[9.0, 9.0]]])
    before = np.array([[0.4, 0.1, NAN], [0.2, 0.1, NAN]])
    seen, levels = choose_models(loss, before, np.array([0, 0, 0]), delta=0.2)
    assert not seen.drifted.any() and np.isnan(seen.lowest[1])
    np.testing.assert_array_equal(levels, [[0.5, 0.1, 9.0], [0.2, 0.1, 9.0]])


def test_distances_by_hand() -> None:
    L = np.full((2, 2, 3, 2), NAN)  # clients 0 and 1 are with model 0, client 2 with model 1
    L[0, 0, :2], L[1, 1, 2] = [[0.1, 0.2], [0.3, 0.2]], [0.2, 0.2]
    L[0, 1, 2], L[1, 0, :2] = [0.4, 0.3], [[0.2, 0.2], [0.5, NAN]]
    # Model 0 on what is model 1's, against client 0 in its own: 0.3 and 0.1 more, together 0.4; against client 1 less.
    # Model 1 on what client 1 has: 0.3 more in the one group that both have.
    assert compute_group_distances(L, 0.3)[0, 1] == pytest.approx(0.4)
    assert (
        compute_group_distances(L, 0.3)[1, 0] == compute_group_distances(L, 0.3)[0, 1]
        and np.isinf(np.diag(compute_group_distances(L, 0.3))).all()
    )
    assert np.isinf(compute_group_distances(L, 0.29)[0, 1])  # one group of one pair forbids it
    L[0, 1] = NAN
    assert np.isinf(compute_group_distances(L, 1.0)[0, 1])  # nothing to compare


def test_a_round_by_hand() -> None:
    """Two clients; at time 2 one group of the second loses although the mean falls: FedDrift would not notice."""
    method = FairFedDrift(delta=0.3)
    state = method.init(FakeFederation(0, 2, n_groups=2))
    calm: Table = {(0, 0): [0.5, 0.5], (1, 0): [0.9, 0.2]}
    for tau in (0, 1):
        state = method.step(state, make_federation(tau, calm))
        assert state.models.ids == (0,) and not state.drifted.any()  # type: ignore[union-attr]
    fed = make_federation(2, {(0, 0): [0.5, 0.5], (1, 0): [0.1, 0.6]})
    state = method.step(state, fed)
    assert state.models.ids == (0, 1) and np.asarray(state.votes).tolist() == [[1, 0], [0, 1]]
    (event,) = state.events
    assert event.kind == "created" and event.cause["from"] == 0 and event.cause["clients"] == [1]
    assert state.levels[:, 1].tolist() == [0.1, 0.6]
    assert fed.requests == ["evaluate loss by group", "train"]
    # A step later the two are compared on data before that step, and merge: no group of any client loses by it.
    found: Table = {(0, 0): [0.5, 0.5], (0, 1): [0.6, 0.6], (1, 0): [0.4, 0.9], (1, 1): [0.1, 0.6]}
    fed = make_federation(3, found, cross=lambda i, j, c, g: 0.5 if i == j else 0.6)
    merged = method.step(state, fed)
    assert [(e.kind, e.model) for e in merged.events] == [("merged", 1)] and merged.models.ids == (0,)
    assert np.asarray(fed.last_cross_evaluation)[3].sum() == 0 and np.asarray(fed.last_cross_evaluation)[
        2
    ].tolist() == [[1, 0], [0, 1]]
    fed = make_federation(3, found, cross=lambda i, j, c, g: 0.5 if i == j else 0.9 if g else 0.1)
    assert method.step(state, fed).models.ids == (0, 1)  # in the mean they are alike


def test_new_models_copy_the_first() -> None:
    method = FairFedDrift(delta=0.1)
    state = method.init(FakeFederation(0, 2, n_groups=2))
    losses = iter([[0.5, 0.5], [0.5, 0.5], [0.9, 0.9], [5.0, 5.0]])
    for tau, level in enumerate(losses):
        better = [0.9 * value for value in level]
        table: Table = {(c, i): level if i == 0 or c == 0 else better for c in (0, 1) for i in range(9)}
        state = method.step(state, make_federation(tau, table, cross=lambda *_: 0.0 if _[0] == _[1] else 1.0))
    assert {e.cause["from"] for e in state.events if e.kind == "created"} == {0}


@pytest.mark.parametrize("setting", [{"test": "two-sample"}, {"quarantine": True}, {"first": "each"}])
def test_settings_that_it_has_not(setting: dict[str, Any]) -> None:
    with pytest.raises(fd.ConfigError, match=f"FairFedDrift.{next(iter(setting))} can only be"):
        fd.algorithm("FairFedDrift", **setting)


def test_on_a_table_it_keeps_its_own_test() -> None:
    table = {"shop": ["a", "b"] * 3, "day": [1, 1, 2, 2, 3, 3], "age": [3, 5, 3, 4, 1, 2], "sold": [0, 1] * 3}
    stream = Stream.from_frame(table, client="shop", time="day", label="sold")
    made = fd.algorithm("FairFedDrift", stream)
    assert isinstance(made, FairFedDrift) and made.test == "threshold"
    sine = fd.algorithm("FairFedDrift", fd.stream("sine-2"))
    assert isinstance(sine, FairFedDrift) and sine.delta == 0.25


def make_swapped_minority_stream(seed: int = 0, share: float = 0.15) -> Stream:
    """Two classes by two features; a tenth of the rows (group 1) lies apart, and only its labels swap, at client 0."""
    draw = np.random.default_rng(seed)
    cells, groups, concepts = [], [], np.zeros((7, 3), dtype=int)
    concepts[3:, 0] = 1
    for row in concepts:
        line: list[Any] = [[], []]
        for concept in row:
            group = (draw.random(400) < share).astype(int)
            x = draw.random((400, 2)) + 3 * group[:, None]
            y = (x[:, 0] > x[:, 1]).astype(int) ^ (concept & group)
            line[0].append((x, y))
            line[1].append(group)
        cells.append(line[0])
        groups.append(line[1])
    return Stream.from_arrays(cells, n_classes=2, concepts=concepts, groups=groups)


def test_a_drift_of_a_few_rows_is_found_by_group() -> None:
    stream, local = make_swapped_minority_stream(), fd.Local(rounds=15, steps=30, batch=50, lr=0.05)
    steps = list(fd.run(stream, fd.algorithm("FairFedDrift", stream, delta=0.5), local=local))
    alarms = np.array([step.drifted for step in steps])
    assert alarms[3].tolist() == [True, False, False] and not alarms[:3].any()
    blind = fd.run(stream, fd.algorithm("FedDrift", stream, delta=0.2), local=local)
    assert not any(step.drifted.any() for step in blind)  # 15 % of the rows are too few for a drop by 20 %


def test_mixtures_by_hand() -> None:
    """Two clients, two models, two classes, one round."""
    omega = np.array([[0.5, 0.5], [0.8, 0.2]])
    loss = np.log(np.array([[[1.0, 2.0], [3.0, 2.0]], [[1.0, NAN], [4.0, NAN]]]))  # exp(-CE) is 1 over it
    gamma = compute_responsibilities(omega, loss, np.full((2, 2), 0.5))
    np.testing.assert_allclose(gamma[0], [[3 / 4, 1 / 2], [1 / 4, 1 / 2]])
    np.testing.assert_allclose(gamma[1, :, 0], [16 / 17, 1 / 17])  # 0.8 / 1 to 0.2 / 4
    counts = np.array([[6.0, 2.0], [17.0, 0.0]])
    new, shares = update_mixtures(gamma, counts, omega, np.full((2, 2), 0.5))
    np.testing.assert_allclose(new, [[(4.5 + 1) / 8, (1.5 + 1) / 8], [16 / 17, 1 / 17]])
    np.testing.assert_allclose(shares, [[20.5 / 21.5, 1 / 21.5], [2.5 / 3.5, 1 / 3.5]])
    again = compute_responsibilities(omega, loss, shares)  # a class that a model has much of speaks less for it
    np.testing.assert_allclose(again[0, 0, 0], (1 / shares[0, 0]) / (1 / shares[0, 0] + 1 / 3 / shares[1, 0]))


def test_a_client_without_new_data_keeps_its_mixture() -> None:
    gamma: Floats = np.stack([np.full((2, 2), NAN), np.array([[1.0, 1.0], [0.0, 0.0]])])
    omega, shares = np.array([[0.3, 0.7], [0.5, 0.5]]), np.array([[0.5, 0.5], [0.2, 0.8]])
    new, kept = update_mixtures(gamma, np.array([[0.0, 0.0], [1.0, 3.0]]), omega, shares)
    assert new.tolist() == [[0.3, 0.7], [1.0, 0.0]] and kept.tolist() == [[0.25, 0.75], [0.2, 0.8]]


@pytest.mark.parametrize("name", ["FedRC", "FedEM"])
def test_a_step_of_two_clients_by_hand(name: str) -> None:
    method = fd.algorithm(name, n_models=2)
    confusions = np.zeros((2, 1, 2, 2), dtype=np.int64)
    confusions[0, 0, :, 0], confusions[1, 0, :, 0] = [3, 1], [1, 3]
    fed = FakeFederation(
        0, 2, loss_by=lambda c, i, g: float(np.log(3)) if c != i else 0.0, confusions=confusions,
        local=fd.Local(rounds=2),
    )  # fmt: skip
    state = method.step(method.init(fed), fed)
    assert fed.requests == ["confusion", *["evaluate loss by class", "train rounds=1"] * 2] and state.ballot == "soft"
    if name == "FedEM":  # 3 to 1 in the first round, then 9 to 1
        np.testing.assert_allclose(state.votes, [[0.9, 0.1], [0.1, 0.9]])
    else:  # model 0 has (3 + 1 / 3) / (4 + 4 / 3) of class 0 after the first round
        share = np.array([[(9 / 4 + 1 / 4) / 4, (3 / 4 + 3 / 4) / 4], [(3 / 4 + 3 / 4) / 4, (1 / 4 + 9 / 4) / 4]])
        odds = 9 * share[1] / share[0]  # of model 0 at client 0, by class
        np.testing.assert_allclose(state.votes[0, 0], (odds / (1 + odds)) @ [3, 1] / 4)
    np.testing.assert_allclose(state.w[-1], state.votes)


@pytest.mark.parametrize("name", ["FedRC", "FedEM"])
def test_two_kinds_of_clients_part(name: str) -> None:
    draw, concepts = np.random.default_rng(0), np.tile([0, 0, 1, 1], (4, 1))

    def cell(concept: int) -> Any:
        x = draw.random((200, 2))
        return x, (x[:, 0] > x[:, 1]).astype(int) ^ concept

    stream = Stream.from_arrays([[cell(k) for k in row] for row in concepts], n_classes=2, concepts=concepts)
    local = fd.Local(rounds=20, steps=20, batch=50, lr=0.05)
    last = list(fd.run(stream, fd.algorithm(name, n_models=2), local=local))[-1]
    assert last.model[0] == last.model[1] != last.model[2] == last.model[3]
    assert np.asarray(last.state.votes).max(axis=1).min() > 0.95 and last.accuracy.min() > 0.9


@pytest.mark.parametrize("name", ["FairFedDrift", "FedRC", "FedEM"])
def test_they_keep_the_contract(name: str) -> None:
    check_algorithm(fd.algorithm(name))


def test_the_number_of_models_is_checked() -> None:
    with pytest.raises(fd.ConfigError, match=r"FedRC.n_models must be at least 1, got 0"):
        FedRC(n_models=0)


def test_groups_are_classes_over_flower() -> None:
    pytest.importorskip("flwr", reason="the extra 'flower' is not installed")
    from feddrift.nets import default_net
    from feddrift.simulation import run_steps
    from tests.support.flower import InProcessFlower

    stream, local = make_swapped_minority_stream(), fd.Local(rounds=2, steps=4, batch=20, lr=0.05)
    engine = InProcessFlower(stream, default_net(stream), local, 0)
    engine.n_steps = 2
    steps = list(run_steps(engine, fd.algorithm("FairFedDrift")))
    by_class = replace(stream, group=None)
    here = list(fd.run(by_class, fd.algorithm("FairFedDrift"), local=local))
    assert [s.model.tolist() for s in steps] == [s.model.tolist() for s in here[:2]]
    assert steps[-1].state.levels.shape == (2, 3)  # type: ignore[attr-defined]
