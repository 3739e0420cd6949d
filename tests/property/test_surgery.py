"""Invariants of merging, mixing and memory, for any clusters."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feddrift import clustering
from feddrift.averaging import average_updates
from feddrift.memory import Memory
from feddrift.models import get_params, graft, join, mix, replace_model, take
from feddrift.types import Clusters, Floats, Ints, Models, Updates

SEEDS = st.integers(0, 2**31)


def draw_clustering(seed: int) -> tuple[Models, Clusters, Ints, Floats]:
    """A random clustering of cells, models and cross losses."""
    draw = np.random.default_rng(seed)
    t, c, m = draw.integers(1, 5), draw.integers(1, 6), draw.integers(1, 7)
    w = Clusters(draw.integers(-1, m, (t, c)), int(m))
    counts = draw.integers(0, 9, (t, c))
    models = Models({"a": draw.normal(size=(m, 3)), "b": draw.normal(size=(m, 2, 2))}, tuple(range(5, 5 + m)))
    return models, w, counts, draw.random((m, m))


@given(SEEDS, st.floats(0, 1))
def test_merging_keeps_data_cells_and_the_weighted_mean(seed: int, delta: float) -> None:
    models, w, counts, L = draw_clustering(seed)
    L[:, np.einsum("tcm,tc->m", w, counts) == 0] = np.nan
    D = clustering.compute_distances(L)
    before = [x.copy() for x in (models.params["a"], w.model, D)]
    merged, united, events = clustering.merge_closest(models, w, D, counts, delta)
    for old, now in zip(before, (models.params["a"], w.model, D), strict=True):
        np.testing.assert_array_equal(old, now)  # inputs are never changed
    np.testing.assert_array_equal(united.model < 0, w.model < 0)  # each cell stays in one cluster
    mass, new_mass = (np.einsum("tcm,tc->m", x, counts) for x in (w, united))
    assert new_mass.sum() == mass.sum()
    for leaf in ("a", "b"):
        np.testing.assert_allclose(
            np.tensordot(new_mass, merged.params[leaf], 1), np.tensordot(mass, models.params[leaf], 1), atol=1e-9
        )
    assert len(merged) == len(models) - len(events) and set(merged.ids) <= set(models.ids)
    assert all(e.cause["into"] < e.model and e.cause["distance"] <= delta + 1e-9 for e in events)
    assert list(merged.ids) == sorted(merged.ids)


@given(SEEDS, st.floats(0, 1))
def test_no_two_members_of_a_merged_cluster_are_farther_apart_than_delta(seed: int, delta: float) -> None:
    models, w, counts, L = draw_clustering(seed)
    counts = counts + 1
    w.model[0, 0] = -1
    D = clustering.compute_distances(L)
    _, _, events = clustering.merge_closest(models, w, D, counts, delta)
    group = {i: {i} for i in models.ids}
    for e in events:
        group[e.cause["into"]] |= group.pop(e.model)
    at = {i: m for m, i in enumerate(models.ids)}
    for members in group.values():
        assert all(D[at[i], at[j]] <= delta + 1e-9 for i in members for j in members if i != j)


def test_merging_stops_at_delta_inclusive_and_prefers_the_closest() -> None:
    D = np.array([[np.inf, 0.3, 0.1], [0.3, np.inf, 0.2], [0.1, 0.2, np.inf]])
    models = Models({"a": np.array([[1.0], [2.0], [4.0]])}, (0, 1, 2))
    w, counts = Clusters(np.array([[0, 1, 2]]), 3), np.array([[3, 1, 1]])
    merged, _, events = clustering.merge_closest(models, w, D, counts, 0.1)
    assert [(e.model, e.cause["into"]) for e in events] == [(2, 0)]
    np.testing.assert_allclose(merged.params["a"], [[(3 * 1 + 4) / 4], [2.0]])
    assert len(clustering.merge_closest(models, w, D, counts, 0.0999)[2]) == 0
    # complete linkage: {0, 2} and 1 are 0.3 apart, not 0.2
    assert len(clustering.merge_closest(models, w, D, counts, 0.25)[2]) == 1
    assert len(clustering.merge_closest(models, w, D, counts, 0.3)[2]) == 2


@given(SEEDS, st.integers(1, 12))
def test_pairs_unite_as_if_every_distance_were_looked_at_each_time(seed: int, n: int) -> None:
    """Also where many distances are equal: the first of them in order."""
    draw = np.random.default_rng(seed)
    D = np.triu(draw.integers(0, 4, (n, n)) / 10, 1)
    D = D + D.T
    np.fill_diagonal(D, np.inf)
    pairs, slow = clustering.ClosestPairs(D), D.copy()
    while np.isfinite(slow.min()):
        i, j = divmod(int(slow.argmin()), n)
        assert pairs.find_closest() == (i, j, slow[i, j])
        slow[i] = slow[:, i] = np.maximum(slow[i], slow[j])
        slow[i, i] = slow[j, :] = slow[:, j] = np.inf
        pairs.unite(i, j)
    assert pairs.find_closest()[2] == np.inf


@given(SEEDS)
def test_distances_are_symmetric_not_negative_and_infinite_to_oneself(seed: int) -> None:
    L = draw_clustering(seed)[3]
    D = clustering.compute_distances(L)
    np.testing.assert_array_equal(D, D.T)
    assert (D >= 0).all() and np.isinf(np.diag(D)).all()
    i, j = 0, len(L) - 1
    if i != j:
        assert D[i, j] == max(L[i, j] - L[i, i], L[j, i] - L[j, j], 0)


@given(SEEDS)
def test_mixing_is_linear_and_copies_are_exact(seed: int) -> None:
    models = draw_clustering(seed)[0]
    n = len(models)
    draw = np.random.default_rng(seed)
    A, B = draw.random((2, n)), draw.random((3, 2))
    twice = mix(mix(models, A, (0, 1)), B, (0, 1, 2))
    once = mix(models, B @ A, (0, 1, 2))
    np.testing.assert_allclose(twice.params["b"], once.params["b"], atol=1e-9)
    positions = draw.integers(0, n, 4)
    copied, mixed = take(models, positions, range(4)), mix(models, np.eye(n)[positions], range(4))
    np.testing.assert_array_equal(copied.params["a"], mixed.params["a"])
    np.testing.assert_array_equal(copied.params["a"], models.params["a"][positions])
    both = join(models, copied)
    assert len(both) == n + 4 and both.ids == models.ids + (0, 1, 2, 3)


def test_a_poisoned_model_does_not_touch_its_neighbours() -> None:
    models = Models({"a": np.array([[1.0], [np.nan], [3.0]])}, (0, 1, 2))
    assert mix(models, np.array([[0.5, 0, 0.5], [1, 0, 0]]), (0, 1)).params["a"].tolist() == [[2.0], [1.0]]


def test_the_average_weighs_lanes_by_their_data_and_leaves_idle_models_alone() -> None:
    models = Models({"a": np.array([[9.0], [8.0]], dtype=np.float32)}, (3, 7))
    lanes = Updates(
        {"a": np.array([[1.0], [4.0]], dtype=np.float32)}, np.array([0, 1]), np.array([1, 1]), np.array([2.0, 1])
    )
    after = average_updates(models, lanes)
    np.testing.assert_allclose(after.params["a"], [[9.0], [2.0]], rtol=1e-6)
    assert after.ids == (3, 7)


@settings(max_examples=30)
@given(st.integers(0, 60))
def test_memories_weigh_the_newest_most(tau: int) -> None:
    for memory in (Memory("all"), Memory("window", 1), Memory("window", 3), Memory("linear"), Memory("exponential")):
        weights = memory(tau)
        assert weights.shape == (tau + 1,) and np.isfinite(weights).all()
        assert (np.diff(weights) >= 0).all() and weights[-1] > 0
    assert Memory("window", 3)(tau).sum() == min(3, tau + 1)
    np.testing.assert_array_equal(Memory("window", tau + 1)(tau), Memory("all")(tau))
    linear, exponential = Memory("linear")(tau), Memory("exponential")(tau)
    assert linear[-1] == (tau + 1) * linear[0]
    np.testing.assert_allclose(exponential[1:] / exponential[:-1], 2)


def draw_families(seed: int) -> Models:
    """Random models in random families: "a" is their trunk, "b" their head."""
    draw = np.random.default_rng(seed)
    m = int(draw.integers(1, 7))
    ids = [int(i) for i in draw.permutation(20)[:m]]
    family = tuple(ids[int(draw.integers(0, k + 1))] for k in range(m))  # of a model before it, or its own
    n = len(set(family))
    params = {"a": draw.normal(size=(n, 3)), "b": draw.normal(size=(m, 2, 2))}
    return Models(params, tuple(ids), family=family, trunk={"a": True, "b": False})


def are_equal(a: Models, i: int, b: Models, j: int) -> bool:
    return all(np.array_equal(get_params(a, i)[leaf], get_params(b, j)[leaf]) for leaf in ("a", "b"))


def is_consistent(models: Models) -> bool:
    """One trunk per family, one head per model."""
    return len(models.params["a"]) == len(models.families) and len(models.params["b"]) == len(models)


@given(SEEDS)
def test_families_survive_every_kind_of_surgery(seed: int) -> None:
    models, draw = draw_families(seed), np.random.default_rng(seed + 1)
    at = draw.permutation(len(models))[: int(draw.integers(1, len(models) + 1))]
    some = take(models, at, [models.ids[m] for m in at])
    assert is_consistent(some) and all(are_equal(some, k, models, int(m)) for k, m in enumerate(at))
    assert some.family == tuple(models.family[m] for m in at)  # who keeps the id keeps the family

    copies = take(models, at, range(100, 100 + len(at)))
    assert is_consistent(copies) and all(are_equal(copies, k, models, int(m)) for k, m in enumerate(at))
    assert copies.family == copies.ids  # a copy under a new id stands alone

    heads = take(models, at, range(100, 100 + len(at)), [models.family[m] for m in at])
    both = join(models, heads)
    assert is_consistent(both) and both.families == models.families  # no trunk was added
    assert all(are_equal(both, m, models, m) for m in range(len(models)))
    assert all(are_equal(both, len(models) + k, models, int(m)) for k, m in enumerate(at))

    same_again = mix(models, np.eye(len(models)), models.ids)
    assert is_consistent(same_again) and same_again.family == models.family
    assert all(are_equal(same_again, m, models, m) for m in range(len(models)))


@given(SEEDS)
def test_mixing_within_a_family_leaves_its_trunk_alone(seed: int) -> None:
    models = draw_families(seed)
    i = len(models) - 1
    j = models.family.index(models.family[i])
    A = np.eye(len(models))
    A[i], A[i, j], A[i, i] = 0, 0.3, 0.7
    if i == j:
        A[i, i] = 1
    mixed = mix(models, A, models.ids)
    assert mixed.family == models.family
    np.testing.assert_array_equal(mixed.params["a"], models.params["a"])
    np.testing.assert_allclose(mixed.params["b"][i], np.tensordot(A[i], models.params["b"], 1))


def test_mixing_across_families_mixes_their_trunks() -> None:
    models = Models(
        {"a": np.array([[1.0], [5.0]]), "b": np.array([[1.0], [2.0], [3.0]])}, (0, 1, 2), family=(0, 0, 2),
        trunk={"a": True, "b": False},
    )  # fmt: skip
    mixed = mix(models, np.array([[1, 0, 0], [0, 0.5, 0.5]]), [0, 1], family=[0, 2])
    assert mixed.params["a"].tolist() == [[1.0], [3.0]] and mixed.params["b"].tolist() == [[1.0], [2.5]]
    with pytest.raises(ValueError, match="different trunks cannot be one family"):
        mix(models, np.array([[1, 0, 0], [0, 0.5, 0.5]]), [0, 1], family=[0, 0])
    with pytest.raises(ValueError, match="different trunks cannot be one family"):
        take(models, [0, 2], [0, 2], family=[0, 0])


def test_a_model_that_replaces_another_has_its_id_and_no_family() -> None:
    models = draw_families(3)
    other = Models({"a": np.full((1, 3), 7.0), "b": np.full((1, 2, 2), 8.0)}, (0,), trunk=models.trunk)
    alone = take(models, range(len(models)), models.ids, family=models.ids)
    placed = replace_model(alone, 0, other)
    assert placed.ids == models.ids and placed.family == models.ids and are_equal(placed, 0, other, 0)
    assert all(are_equal(placed, m, models, m) for m in range(1, len(models)))


@given(SEEDS)
def test_a_model_put_into_a_family_leaves_the_others_alone(seed: int) -> None:
    models = draw_families(seed)
    m = len(models) - 1
    other = Models({"a": np.full((1, 3), 7.0), "b": np.full((1, 2, 2), 8.0)}, (0,), trunk=models.trunk)
    if models.ids[m] in models.family[:m]:
        with pytest.raises(ValueError, match="different trunks"):
            replace_model(models, m, other)
        return
    placed = replace_model(models, m, other)
    assert is_consistent(placed) and placed.ids == models.ids and are_equal(placed, m, other, 0)
    assert all(are_equal(placed, k, models, k) for k in range(m))


@given(SEEDS)
def test_grafted_heads_stand_on_the_other_trunk(seed: int) -> None:
    models, heads = draw_families(seed), take(draw_families(seed + 1), [0], [50])
    family = models.family[-1]
    both = join(models, graft(heads, models, family))
    assert is_consistent(both) and both.families == models.families
    last, stock, own = get_params(both, len(models)), get_params(models, len(models) - 1), get_params(heads, 0)
    assert np.array_equal(last["a"], stock["a"]) and np.array_equal(last["b"], own["b"])


def test_names_are_for_life() -> None:
    models = draw_families(1)
    with pytest.raises(ValueError, match="need different ids"):
        join(models, models)


def test_a_family_has_one_trunk() -> None:
    models = draw_families(1)
    stranger = Models(
        {"a": np.zeros((1, 3)), "b": np.zeros((1, 2, 2))}, (99,), family=models.family[:1], trunk=models.trunk
    )
    with pytest.raises(ValueError, match="different trunks cannot be one family"):
        join(models, stranger)
    with pytest.raises(ValueError, match="need trunk, to mark the arrays"):
        Models({"a": np.zeros((2, 3))}, (0, 1), family=(0, 0))
