"""Models that share a trunk: training, scores, averages and counts are equal on every engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import feddrift as fd
from feddrift.averaging import average_updates
from feddrift.data import Stream
from feddrift.engines.local.engine import InProcessWorker
from feddrift.engines.local.sampling import count_training_rows
from feddrift.engines.local.trials import HOLD_OUT_SHARE
from feddrift.engines.server.engine import Engine
from feddrift.errors import ConfigError
from feddrift.models import get_params, join, take
from feddrift.nets import default_net
from feddrift.trees import tree_leaves
from feddrift.types import Local, Start
from tests.support.engines import (
    EACH_ENGINE,
    ENGINE_CLASSES,
    ENGINE_NAMES,
    IN_PROCESS_ENGINES,
    LOCAL,
    SLOW_ENGINES,
    assert_same,
    draw_weights,
    is_different,
    make_model_families,
    make_uneven_stream,
    mark_slow,
)

STARTS: tuple[Start, ...] = ("warm", "head", "joint", "fresh")


def make(name: str, stream: Stream, local: Local = LOCAL, **trunk: Any) -> Engine:
    engine: Engine = ENGINE_CLASSES[name](stream, replace(default_net(stream), **trunk), local, 3)
    return engine


@pytest.mark.parametrize(  # test_engines has all pairs
    ("seed", "optimizer"), [(0, "adam"), *(pytest.param(*p, marks=pytest.mark.slow) for p in ((1, "adam"), (2, "sgd")))]
)
def test_all_verbs_agree_between_engines(seed: int, optimizer: Any) -> None:
    stream = make_uneven_stream(seed)
    w = draw_weights(2, stream, 4, seed)
    parent = np.array([0, 3, -1, 1])
    results = []
    for name in ENGINE_NAMES:
        fed = make(name, stream, replace(LOCAL, optimizer=optimizer)).at(2)
        models = make_model_families(fed)
        updates = fed.local_updates(models, w)
        found = fed.tournament(models, w[:2], parent, STARTS)
        results.append(
            {
                "error": fed.evaluate(models), "cross": fed.cross_evaluate(models, w, "loss"),
                "updates": updates.params, "lanes": (updates.client, updates.model, updates.size, updates.lane),
                "train": fed.train(models, w).params, "sent": fed.sent, "trial": (found.rows, found.wrong),
            }
        )  # fmt: skip
    for other in results[1:]:
        for verb, value in results[0].items():
            assert_same(value, other[verb], atol=1e-5)


@pytest.mark.parametrize("name", EACH_ENGINE)
def test_rounds_add_up(name: str) -> None:
    stream = make_uneven_stream()
    w = draw_weights(3, stream, 4)
    at_once, one_by_one = make(name, stream).at(3), make(name, stream).at(3)
    models = make_model_families(at_once)
    whole, parts = at_once.train(models, w, rounds=3), models
    for _ in range(3):
        parts = one_by_one.train(parts, w, rounds=1)
    assert_same(whole.params, parts.params)
    assert at_once.sent.tolist() == one_by_one.sent.tolist()


@pytest.mark.parametrize("name", EACH_ENGINE)
def test_a_round_is_the_average_of_its_local_updates(name: str) -> None:
    stream = make_uneven_stream()
    w = draw_weights(3, stream, 4)
    models = make_model_families(make(name, stream).at(3))
    trained = make(name, stream).at(3).train(models, w, rounds=1)
    assert_same(
        trained.params, average_updates(models, make(name, stream).at(3).local_updates(models, w)).params
    )  # bit for bit


@pytest.mark.parametrize("name", EACH_ENGINE)
def test_the_average_by_hand(name: str) -> None:
    """A trunk weighs clients by all their data for its family, a head by the data clustered to it."""
    stream = make_uneven_stream()
    counts = stream.counts[:2]
    fed = make(name, stream).at(1)
    models = make_model_families(fed)
    w = np.zeros((2, 4, 4))
    w[0, :, 0] = w[1, :2, 1] = w[1, 2:, 3] = 1
    updates = fed.local_updates(models, w)
    trained = make(name, stream).at(1).train(models, w, rounds=1)
    assert counts[0, 0] == 0  # so client 0 trains head 1 alone, and client 1 both
    pairs = list(zip(updates.client.tolist(), updates.model.tolist(), strict=True))
    assert pairs[:3] == [(1, 0), (2, 0), (3, 0)] and (0, 1) in pairs and (0, 0) not in pairs
    lane = {c: updates.lane[k] for k, (c, m) in enumerate(pairs) if m in (0, 1)}
    assert updates.lane[pairs.index((1, 0))] == updates.lane[pairs.index((1, 1))]
    behind = {c: float(counts[0, c] + (counts[1, c] if c < 2 else 0)) for c in range(4)}
    expected = sum(behind[c] * updates.params["W1"][lane[c]] for c in range(4)) / sum(behind.values())
    np.testing.assert_allclose(trained.params["W1"][0], expected, rtol=1e-6)
    head = sum(float(counts[1, c]) * updates.params["W2"][pairs.index((c, 1))] for c in (0, 1)) / counts[1, :2].sum()
    np.testing.assert_allclose(trained.params["W2"][1], head, rtol=1e-6)


@pytest.mark.parametrize("name", EACH_ENGINE)
def test_a_step_trains_one_head_and_lets_the_others_rest(name: str) -> None:
    stream = make_uneven_stream()
    fed = make(name, stream, replace(LOCAL, steps=1)).at(2)
    models = make_model_families(fed)
    w = np.zeros((3, 4, 4))
    w[0, 1, 0] = w[1, 1, 1] = w[2, 1, 2] = 1  # one client with three heads
    updates = fed.local_updates(models, w)
    assert updates.lane.tolist() == [0, 0, 0]
    moved = [bool((updates.params["W2"][k] != models.params["W2"][k]).any()) for k in range(3)]
    assert sum(moved) == 1
    assert (updates.params["W1"][0] != models.params["W1"][0]).any()


@pytest.mark.parametrize("name", EACH_ENGINE)
def test_an_unused_family_is_unchanged_and_a_used_one_trains_all_its_heads_in_step(name: str) -> None:
    stream = make_uneven_stream()
    fed = make(name, stream).at(2)
    models = make_model_families(fed)
    w = np.ones((3, 4, 4))
    w[2, :, 1:] = 0  # at tau only model 0 is in use
    trained = fed.train(models, w)
    for m, changed in enumerate([True, True, True, False]):
        assert is_different(get_params(trained, m), get_params(models, m)) == changed
        assert is_different(get_params(trained, m)["W2"], get_params(models, m)["W2"]) == changed


@pytest.mark.parametrize("name", EACH_ENGINE)
def test_parts_of_models_are_counted_as_parts(name: str) -> None:
    stream = make_uneven_stream()  # a net of 3-6-2: a trunk of 24 numbers, a head of 14
    fed = make(name, stream).at(2)
    models = make_model_families(fed)
    new = stream.counts[2] > 0
    fed.evaluate(models)
    np.testing.assert_allclose(fed.sent, (2 * 24 + 4 * 14) / 38 * new)  # two trunks, four heads
    w = np.zeros((3, 4, 4))
    w[:, :, 0] = w[:, :, 1] = 1
    fed.train(models, w, rounds=5)
    has = stream.counts[:3].sum(axis=0) > 0
    np.testing.assert_allclose(fed.sent, (2 * 24 + 4 * 14) / 38 * new + 2 * 5 * (24 + 2 * 14) / 38 * has)
    fed.evaluate(models)  # the trunk has changed, and two of the heads
    np.testing.assert_allclose(fed.sent, (3 * 24 + 6 * 14) / 38 * new + 2 * 5 * (24 + 2 * 14) / 38 * has)


@pytest.mark.parametrize("name", mark_slow(ENGINE_NAMES, *SLOW_ENGINES, "flower"))
def test_without_sharing_the_trunk_makes_no_difference(name: str) -> None:
    """One family per model is the case of before, whatever the net calls its trunk; compilers may round differently."""
    stream, results = make_uneven_stream(), []
    w = draw_weights(2, stream, 3)
    for trunk in [(), ("W1", "b1"), lambda path: path == "b2"]:
        fed = make(name, stream, trunk=trunk).at(2)
        models = fed.fresh(3, distinct=True)
        trained = fed.train(models, w)
        results.append((trained.params, fed.local_updates(trained, w).params, fed.evaluate(trained), fed.sent))
    for other in results[1:]:
        assert_same(results[0], other, atol=0.0 if name == "reference" else 1e-6)


@pytest.mark.parametrize("name", EACH_ENGINE)
def test_a_tournament_does_not_change_the_run(name: str) -> None:
    stream = make_uneven_stream()
    w = draw_weights(2, stream, 4)
    quiet, busy = make(name, stream).at(2), make(name, stream).at(2)
    models = make_model_families(quiet)
    for _ in range(2):  # before the first training and after it
        found = busy.tournament(models, w[:2], np.array([0, 1, -1, 3]), STARTS)
        assert_same(quiet.train(models, w, rounds=1).params, busy.train(models, w, rounds=1).params)
    assert quiet.sent.tolist() == busy.sent.tolist()
    assert found.rows[2] == 0 and not found.wrong[2].any()
    took_part = [c for c in (0, 1, 3) if stream.counts[2, c] > 1]
    assert (
        found.rows[took_part] == (stream.counts[2] - count_training_rows(stream.counts[2], HOLD_OUT_SHARE))[took_part]
    ).all()
    assert (np.diagonal(found.wrong, axis1=1, axis2=2) <= found.rows[:, None]).all()


@pytest.mark.parametrize("name", EACH_ENGINE)
def test_a_clients_trial_is_its_own_affair(name: str) -> None:
    """Who else holds one makes no difference."""
    stream = make_uneven_stream(n_clients=4)
    w = draw_weights(2, stream, 4)[:2]
    fed = make(name, stream).at(2)
    models = make_model_families(fed)
    everybody = fed.tournament(models, w, np.array([0, 1, 2, 3]), STARTS)
    for c in range(4):
        alone = fed.tournament(models, w, np.where(np.arange(4) == c, c, -1), STARTS)
        assert alone.rows[c] == everybody.rows[c] and alone.wrong[c].tolist() == everybody.wrong[c].tolist()


def test_a_trial_is_held_on_whole_cells_and_refuses_what_it_cannot_do() -> None:
    stream = make_uneven_stream()
    fed = make("simulator", stream, replace(LOCAL, bags=True)).at(2)
    models, w, parent = make_model_families(fed), np.ones((2, 4, 4)), np.zeros(4, dtype=np.int64)
    assert fed.tournament(models, w, parent, STARTS).rows.any()
    with pytest.raises(ConfigError, match=r"w must have shape \(t, c, m\) = \(2, 4, 4\), got \(3, 4, 4\)"):
        fed.tournament(models, np.ones((3, 4, 4)), parent, STARTS)
    with pytest.raises(ValueError, match="different inputs"):
        fed.tournament(replace(models, mask=np.ones((4, 3))), w, parent, STARTS)
    fed.worker.known.reachable = np.array([False, True, True, True])
    assert fed.tournament(models, w, parent, ("warm",)).rows[0] == 0


@pytest.mark.parametrize("name", EACH_ENGINE)
def test_the_start_that_learns_the_new_concept_wins_the_tournament(name: str) -> None:
    """Swapped labels: after hardly any training a fresh model makes fewer mistakes than one that knew better."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(3, 200, 2))
    y = (x[..., 0] > 0).astype(int)
    stream = Stream.from_arrays([[(x[0], y[0])], [(x[1], 1 - y[1])], [(x[2], y[2])]])
    engine = make(name, stream, Local(rounds=4, steps=25, lr=0.01))
    models = engine.at(0).train(engine.at(0).fresh(), np.ones((1, 1, 1)))
    shortly = make(name, stream, Local(rounds=1, steps=20, lr=0.01)).at(1)
    found = shortly.tournament(models, np.ones((1, 1, 1)), np.array([0]), ("warm", "fresh"))
    assert found.rows.tolist() == [60]
    assert found.wrong[0, 1, 1] < found.wrong[0, 0, 0] and found.wrong[0, 0, 1] <= found.wrong[0, 1, 1]


@pytest.mark.parametrize("name", mark_slow(IN_PROCESS_ENGINES, *SLOW_ENGINES))  # a real client takes no such data in
def test_held_out_rows_are_not_trained_on(name: str) -> None:
    stream = make_uneven_stream()
    fed = make(name, stream).at(2)
    poisoned = replace(stream, x=stream.x.copy())
    for t, c in np.argwhere(stream.counts[:3] > 0):
        assert isinstance(fed.worker, InProcessWorker)
        order = fed.worker.shuffle_cell(int(t), int(c))
        poisoned.x[order[int(count_training_rows(np.array(len(order)), 0.3)) :]] = np.nan
    local, w = replace(LOCAL, hold_out=0.3), np.ones((3, 4, 1))
    assert_same(
        fed.train(fed.fresh(), w, local=local).params,
        make(name, poisoned).at(2).train(fed.fresh(), w, local=local).params,
    )
    whole = make(name, poisoned).at(2).local_updates(fed.fresh(), w)
    assert np.isnan(whole.params["W1"]).any()


@pytest.mark.parametrize("name", EACH_ENGINE)
def test_a_head_can_learn_alone(name: str) -> None:
    stream = make_uneven_stream()
    fed = make(name, stream).at(2)
    models, w = make_model_families(fed), np.ones((3, 4, 4))
    trained = fed.train(models, w, local=replace(LOCAL, trains="head"))
    assert_same([trained.params[k] for k in ("W1", "b1")], [models.params[k] for k in ("W1", "b1")])
    assert all(is_different(trained.params["W2"][m], models.params["W2"][m]) for m in range(4))
    has = stream.counts[:3].sum(axis=0) > 0
    np.testing.assert_allclose(fed.sent, 2 * LOCAL.rounds * 4 * 14 / 38 * has)  # only heads travel


def test_both_parts_of_a_cell_get_rows() -> None:
    assert count_training_rows(np.array([0, 1, 2, 3, 10, 500]), 0.3).tolist() == [0, 1, 1, 2, 7, 350]
    assert count_training_rows(np.array([0, 5]), 0.0).tolist() == [0, 5]
    assert count_training_rows(np.array([2, 100]), 0.99).tolist() == [1, 1]


@pytest.mark.parametrize("trunk", ["W1", ["W1"], ("W1",)])
def test_a_trunk_may_be_given_by_one_path_or_several(trunk: Any) -> None:
    fed = make("simulator", make_uneven_stream(), trunk=trunk).at(0)
    assert fed.fresh().trunk == {"W1": True, "b1": False, "W2": False, "b2": False}
    fed.evaluate(fed.fresh())


def wandering_stream(seed: int) -> Stream:
    """Three concepts that come and go at random, cells of 0 to 80 rows; one shape for all seeds, to compile once."""
    draw = np.random.default_rng(seed)
    steps, clients, rows = 5, 4, 2000

    def cell(concept: int, n: int) -> Any:
        x = draw.random((n, 2))
        y = [x[:, 0] > 0.5, x[:, 0] <= 0.5, x.sum(axis=1) > 1][concept]
        return (x, y.astype(int)) if n else None

    concepts = draw.integers(0, 3, (steps + 1, clients))
    sizes = draw.choice([0, 1, 2, 20, 80], (steps + 1, clients))
    sizes[0, 0] = 20
    sizes[-1, -1] += rows - sizes.sum()
    cells = [[cell(k, n) for k, n in zip(ks, ns, strict=True)] for ks, ns in zip(concepts, sizes, strict=True)]
    return Stream.from_arrays(cells, n_classes=2, concepts=concepts)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("settings", [{}, {"init": "head"}, {"max_models": 3}], ids=str)
def test_whole_runs_stay_sound_whatever_the_drifts(seed: int, settings: dict[str, Any]) -> None:
    """One trunk per family, ids in order, every cell in at most one model, and nothing that is not finite."""
    stream = wandering_stream(seed)
    algorithm = fd.algorithm("FedDrift-Trunk", delta=0.1, **settings)
    local = Local(rounds=2, steps=20, lr=0.02)
    for step in fd.run(stream, algorithm, local=local, seed=seed, engine="simulator"):
        models = step.state.models
        assert len(models.params["W1"]) == len(models.families) and len(models.params["W2"]) == len(models)
        assert list(models.ids) == sorted(set(models.ids)) and np.isfinite(step.sent).all()
        assert (np.asarray(step.state.w).sum(axis=2) <= 1).all() and np.isfinite(models.params["W1"]).all()


def test_a_trunk_that_the_net_has_not_is_refused_in_one_sentence() -> None:
    stream = make_uneven_stream()
    with pytest.raises(fd.ConfigError, match=r"no parameters 'W9' for its trunk \(there are: W1, W2, b1, b2\)"):
        make("reference", stream, trunk=("W9",)).at(0).fresh()


@pytest.mark.parametrize("name", ["FedDrift-Trunk", "Oracle-Trunk"])
@pytest.mark.parametrize("trunk", [(), lambda _: True])
def test_sharing_needs_a_trunk_and_a_head(name: str, trunk: Any) -> None:
    stream = fd.stream("sine-2")
    net = replace(default_net(stream), trunk=trunk)
    with pytest.raises(fd.ConfigError, match=f"{name} needs a net with a trunk and a head"):
        next(fd.run(stream, fd.algorithm(name), net=net))


@pytest.mark.parametrize("engine", ["simulator", "reference"])
def test_always_sharing_one_model_is_oblivious(engine: str) -> None:
    stream = fd.stream("sine-2", pattern="random:every=2,concepts=2,clients=3,steps=4")
    local = Local(rounds=2, steps=5, batch=20, lr=0.01)
    runs = [
        list(fd.run(stream, algorithm, local=local, seed=5, engine=engine))
        for algorithm in (fd.algorithm("FedDrift-Trunk", delta=1.0), fd.algorithm("Oblivious"))
    ]
    for ours, theirs in zip(*runs, strict=True):
        assert_same(ours.state.models.params, theirs.state.models.params)


@pytest.mark.parametrize("name", EACH_ENGINE)
def test_trunks_stay_apart_where_clients_train_some_models_only(name: str) -> None:
    """Families 0, 1, 0: a client without data for the first model meets the families in another order."""
    stream = make_uneven_stream()
    feds = [make(build, stream).at(2) for build in ("reference", name)]
    w = np.zeros((3, 4, 3))
    w[:, 0, :2], w[:, 1, 1:], w[:, 2, [0, 2]], w[:, 3] = 1, 1, 1, 1
    found = []
    for fed in feds:
        models = take(fed.fresh(3, distinct=True), [0, 1, 2], [0, 1, 2])
        models = join(models, take(models, [0], [5], [0]))
        models = take(models, [0, 1, 3], [0, 1, 5], [0, 1, 0])
        found.append(fed.train(models, w, rounds=2))
    for a, b in zip(tree_leaves(found[0].params), tree_leaves(found[1].params), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)
