"""FedDrift-Trunk and its tournament, one decision at a time, on losses and mistakes written by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from feddrift import clustering
from feddrift.algorithms.feddrift.detection import DriftState
from feddrift.algorithms.feddrift.method import FedDrift, FedDriftEager
from feddrift.algorithms.feddrift.trunk import FedDriftTrunk
from feddrift.clustering import Clustering
from feddrift.testing import FakeFederation
from feddrift.types import Clusters, Models, Tournament, Weights
from tests.support.fake_federation import list_model_ids


class Fake(FakeFederation):
    """The fake with a net of one number for a trunk and one for a head."""

    def fresh(self, n: int = 1, distinct: bool = False) -> Models:
        params = {"a": np.zeros((n, 1)), "trunk": np.zeros((n, 1))}
        return Models(params, tuple(range(n)), trunk={"a": False, "trunk": True})

    def train(self, models: Models, w: Weights, rounds: Any = None, local: Any = None) -> Models:
        self.trained = models, w, local or self.local
        return models


def trial(n_clients: int, **wrong: Any) -> Tournament:
    """Of 100 rows each: c1=[[...]] are the mistakes of client 1."""
    n = len(next(iter(wrong.values())))
    found = Tournament.empty(n_clients, n)
    for name, counts in wrong.items():
        found.rows[int(name[1:])] = 100
        found.wrong[int(name[1:])] = counts
    return found


def make_independent_errors(*errors: int) -> list[list[int]]:
    """Starts that never err on the same row."""
    return np.diag(errors).tolist()


def step_with_drift(algorithm: Any, found: Tournament, clients: tuple[int, ...] = (1,)) -> tuple[DriftState, Fake]:
    """The state after these clients of four drift at time 1."""
    quiet = Fake(0, 4, loss=lambda c, i: 0.1)
    loud = Fake(1, 4, loss=lambda c, i: 0.6 if c in clients else 0.1, trial=found)
    state = algorithm.step(algorithm.step(algorithm.init(quiet), quiet), loud)
    return state, loud


WARM, HEAD, JOINT, FRESH = range(4)


@pytest.mark.parametrize(
    ("errors", "winner"),
    [
        ((30, 12, 30, 30), "head"),  # sharing is better
        ((30, 30, 12, 30), "joint"),
        ((14, 12, 12, 14), "warm"),  # no difference to speak of: a model of its own
        ((30, 30, 30, 12), "fresh"),
        ((2, 3, 9, 2), "head"),  # an error that is below delta for sure: little to gain
        ((2, 9, 3, 2), "joint"),
        ((4, 4, 4, 4), "head"),
        ((5, 5, 5, 5), "warm"),  # 5 of 100 may be a true error of 0.1, with a probability above 5 %
        ((0, 4, 4, 4), "head"),  # four rows may be chance
        ((0, 9, 4, 0), "joint"),
    ],
)
def test_the_winning_start_becomes_the_model(errors: tuple[int, ...], winner: str) -> None:
    state, fed = step_with_drift(FedDriftTrunk(delta=0.1), trial(4, c1=make_independent_errors(*errors)))
    (event,) = state.events
    shared = winner in ("head", "joint")
    assert event.cause["start"] == winner and event.cause["rows"] == 100
    assert event.cause["wrong"] == make_independent_errors(*errors)
    assert event.cause["starts"] == ["warm", "head", "joint", "fresh"]
    assert state.models.family == ((0, 0) if shared else (0, 1))
    assert event.cause.get("family") == (0 if shared else None)
    assert event.cause["from"] == (None if winner == "fresh" else 0)
    assert len(state.models.params["trunk"]) == (1 if shared else 2)
    assert list_model_ids(state.votes, state.models) == [0, 1, 0, 0]
    assert fed.last_tournament[1].tolist() == [-1, 0, -1, -1] and fed.last_tournament[0].shape == (1, 4, 1)


def test_little_to_gain_is_not_taken_where_a_copy_is_better_for_sure() -> None:
    assert FedDriftTrunk(delta=0.1).choose_start(400, np.diag([4, 15, 15, 4])) == WARM  # below delta, but 15 against 4
    assert FedDriftTrunk(delta=0.1).choose_start(400, np.diag([15, 15, 15, 15])) == HEAD
    assert FedDriftTrunk(delta=0.1).choose_start(3, np.zeros((4, 4), dtype=np.int64)) == WARM  # three rows show nothing
    assert FedDriftTrunk(delta=0.1).choose_start(0, np.zeros((4, 4), dtype=np.int64)) == WARM


def test_rows_that_both_get_wrong_decide_nothing() -> None:
    noise = np.full((4, 4), 20) + np.diag([5, 1, 5, 5])
    state, _ = step_with_drift(FedDriftTrunk(delta=0.1), trial(4, c1=noise.tolist()))
    assert state.events[0].cause["start"] == "warm"
    assert not clustering.wins_sign_test(noise, HEAD, WARM) and clustering.wins_sign_test(np.diag([9, 1]), 1, 0)
    assert not clustering.wins_sign_test(noise, HEAD, HEAD)


@pytest.mark.parametrize("start", ["head", "warm", "fresh"])
def test_without_a_trial_the_start_is_given(start: Any) -> None:
    state, fed = step_with_drift(FedDriftTrunk(delta=0.1, init_=start), Tournament.empty(4, 4))
    assert not [verb for verb in fed.requests if verb.startswith("tournament")]
    assert "start" not in state.events[0].cause
    assert state.models.family == ((0, 0) if start == "head" else (0, 1))


def test_a_client_that_could_not_hold_a_trial_gets_a_model_of_its_own() -> None:
    state, _ = step_with_drift(FedDriftTrunk(delta=0.1), Tournament.empty(4, 4))
    assert state.events[0].cause["start"] == "warm" and state.models.family == (0, 1)


def test_every_client_decides_alone_with_feddrift_and_all_together_with_eager() -> None:
    found = trial(4, c1=make_independent_errors(30, 12), c2=make_independent_errors(14, 20))
    alone, _ = step_with_drift(FedDrift(delta=0.1, init_="best"), found, (1, 2))
    assert [e.cause["start"] for e in alone.events] == ["fresh", "warm"]
    assert alone.models.family == alone.models.ids == (0, 1, 2)  # nothing is shared
    together, fed = step_with_drift(FedDriftEager(delta=0.1, init_="best"), found, (1, 2))
    (event,) = together.events
    assert (
        event.cause["rows"] == 200
        and event.cause["wrong"] == make_independent_errors(44, 32)
        and event.cause["start"] == "warm"
    )
    assert fed.requests.count("tournament warm fresh") == 1


def family_scene(family: tuple[int, ...], n_clients: int = 4) -> tuple[Models, Clusters]:
    """Models 0, 1, ... with one client each at two time steps; head m is m, the trunk of family f is 10 f."""
    m = len(family)
    trunks = [[10.0 * f] for f in dict.fromkeys(family)]
    params = {"a": np.arange(m, dtype=float)[:, None], "trunk": np.array(trunks)}
    models = Models(params, tuple(range(m)), family=family, trunk={"a": False, "trunk": True})
    owner = np.where(np.arange(n_clients) < m, np.arange(n_clients), -1)
    return models, Clusters(np.stack([owner, owner]), m)


def merge(family: tuple[int, ...], error: dict[int, float], pair: tuple[int, int], **fed: Any) -> Any:
    """Merge this pair of models; `error` by id, the average being the one after the last."""
    models, w = family_scene(family)
    world = Fake(1, 4, loss=lambda c, i: error[i], **fed)
    D = np.full((len(family), len(family)), np.inf)
    D[pair] = D[pair[::-1]] = 0.01
    after = FedDriftTrunk(delta=0.1).merge_models(Clustering(models, w), D, world)
    merged, united, (event,) = after.models, after.w, after.events
    assert event.cause["into"] == pair[0] and event.model == pair[1]
    assert np.asarray(united).sum() == np.asarray(w).sum() and united.shape[2] == len(family) - 1
    return merged, event.cause


def test_within_a_family_heads_are_averaged_and_the_trunk_stays() -> None:
    merged, cause = merge((0, 0, 2), {0: 0.2, 1: 0.2, 2: 0, 3: 0.2}, (0, 1))
    assert cause["kept"] == "average" and cause["family"] == 0 and merged.family == (0, 2)
    assert merged.params["a"].tolist() == [[0.5], [2.0]] and merged.params["trunk"].tolist() == [[0.0], [20.0]]


def test_an_average_worse_than_a_parent_does_not_stand() -> None:
    merged, cause = merge((0, 0), {0: 0.2, 1: 0.1, 2: 0.3}, (0, 1))
    assert cause["kept"] == 1 and merged.params["a"].tolist() == [[1.0]] and merged.ids == (0,)


def test_two_models_on_trunks_of_their_own_are_averaged_as_a_whole() -> None:
    merged, cause = merge((0, 1), {0: 0.2, 1: 0.2, 2: 0.1}, (0, 1))
    assert cause["kept"] == "average" and merged.family == (0,)
    assert merged.params["a"].tolist() == [[0.5]] and merged.params["trunk"].tolist() == [[5.0]]


def test_a_model_of_its_own_can_join_a_family_by_merging() -> None:
    """The family's model is kept although a little worse: it is the cheaper one, and delta / 2 is no drift."""
    merged, cause = merge((0, 0, 2), {0: 0.2, 1: 0.14, 2: 0.1, 3: 0.1}, (1, 2))
    assert cause["kept"] == 1 and cause["family"] == 0 and merged.family == (0, 0)
    assert merged.params["trunk"].tolist() == [[0.0]]


def test_a_model_can_leave_its_family_by_merging() -> None:
    merged, cause = merge((0, 0, 2), {0: 0.2, 1: 0.3, 2: 0.1, 3: 0.2}, (1, 2))
    assert cause["kept"] == 2 and merged.family == (0, 2) and merged.ids == (0, 1)
    assert merged.params["a"].tolist() == [[0.0], [2.0]] and merged.params["trunk"].tolist() == [[0.0], [20.0]]


def test_the_average_of_two_trunks_does_not_disturb_the_rest_of_a_family() -> None:
    merged, cause = merge((0, 0, 2), {0: 0.2, 1: 0.3, 2: 0.3, 3: 0.1}, (1, 2))
    assert cause["kept"] == "average" and merged.family == (0, 2)
    assert merged.params["trunk"].tolist() == [[0.0], [10.0]]  # the mean of 0 and 20, for the merged model alone


def test_two_trunks_that_both_serve_others_are_not_averaged() -> None:
    merged, cause = merge((0, 0, 2, 2), {0: 0.1, 1: 0.3, 2: 0.2, 3: 0.1}, (1, 2))
    assert cause["kept"] == 2 and merged.family == (0, 2, 2)
    _, tie = merge((0, 0, 2, 2), {0: 0.1, 1: 0.2, 2: 0.2, 3: 0.1}, (1, 2))
    assert tie["kept"] == 1


def test_a_family_may_outlive_the_names_of_all_models() -> None:
    """After a merge into the trunk of a model that is gone, the family's name is above every id."""
    merged, _ = merge((0, 1, 2), {0: 0.1, 1: 0.3, 2: 0.1, 3: 0.3}, (1, 2))
    assert merged.ids == (0, 1) and merged.family == (0, 2)
    D = np.array([[np.inf, 0.01], [0.01, np.inf]])
    w = Clusters(np.array([[0, 0, 1, 1]] * 2), 2)
    again = FedDriftTrunk(delta=0.1).merge_models(Clustering(merged, w), D, Fake(1, 4, loss=lambda c, i: 0.1))
    assert again.models.ids == (0,) and (D == D.T).all() and np.isinf(D[0, 0])  # what was given is left alone


def test_a_new_head_keeps_the_trunk_of_its_trial() -> None:
    """Its parent merges with a model of another family in the same step."""
    models, w = family_scene((0, 1))
    state = DriftState(
        models, w, votes=np.eye(2)[[0, 1, 0, 1]], reference=np.full(4, 0.3), previous=np.full(4, 0.3), next_id=2,
        observed=np.full((2, 4), 0.3), since=np.ones(4, dtype=np.int64),
    )  # fmt: skip
    found = trial(4, c2=make_independent_errors(30, 12, 30, 30))
    error = {0: 0.3, 1: 0.3, 3: 0.1}  # their average, on trial under the name 3, is much better
    fed = Fake(2, 4, loss=lambda c, i: 0.6 if c == 2 else error[i], cross=lambda i, j: 0.1, trial=found)
    after = FedDriftTrunk(delta=0.1).step(state, fed)
    assert [(e.kind, e.model) for e in after.events] == [("merged", 1), ("created", 2)]
    assert after.models.ids == (0, 2) and after.models.family[1] == 0  # the newborn stands on its parent's trunk
    assert after.models.params["trunk"][after.models.trunk_index[1]].tolist() == [0.0]
    merged = after.models.params["trunk"][after.models.trunk_index[0], 0]
    assert after.models.family[0] == 1 and merged == pytest.approx((5 * 0 + 2 * 10) / 7)  # by the cells behind them


def test_without_new_data_the_old_must_do() -> None:
    counts = np.array([[100] * 4, [0] * 4])
    cross = {(0, 0): 0.3, (1, 1): 0.2, (2, 2): 0.1}
    merged, cause = merge((0, 0), {0: 0, 1: 0, 2: 1}, (0, 1), counts=counts, cross=lambda i, j: cross.get((i, i), 0.9))
    assert cause["kept"] == "average" and len(merged) == 1


def test_all_that_are_close_merge_one_pair_after_the_other() -> None:
    models, w = family_scene((0, 0, 0, 3))
    D = np.full((4, 4), 0.05)
    np.fill_diagonal(D, np.inf)
    fed = Fake(1, 4, loss=lambda c, i: 0.1)
    after = FedDriftTrunk(delta=0.1).merge_models(Clustering(models, w), D, fed)
    merged, united = after.models, after.w
    assert [(e.model, e.cause["into"]) for e in after.events] == [(1, 0), (2, 0), (3, 0)]
    assert merged.ids == (0,) and united.shape == (2, 4, 1) and np.asarray(united).all()
    assert merged.params["a"].tolist() == [[1.5]]  # the mean by the data behind them, not of means
