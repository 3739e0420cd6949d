"""Equality of all engines: every method of a federation gives the same results, and the rules of training hold."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import pytest

import feddrift as fd
from feddrift.averaging import average_updates
from feddrift.engines.conditions.conditions import Conditions
from feddrift.engines.local import engine as local_engine
from feddrift.engines.simulator import lanes, program, simulator
from feddrift.errors import ConfigError
from feddrift.nets import default_net
from feddrift.nets.perceptron import apply_perceptron
from feddrift.types import Clusters, Local
from tests.support.engines import (
    EACH_ENGINE,
    ENGINE_NAMES,
    IN_PROCESS_ENGINES,
    LOCAL,
    SCORING_MODULES,
    SLOW_ENGINES,
    Compiled,
    assert_same,
    draw_weights,
    is_different,
    make_engine,
    make_uneven_stream,
    mark_slow,
)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_all_verbs_agree_between_engines(seed: int, optimizer: Any) -> None:
    stream = make_uneven_stream(seed)
    w = draw_weights(2, stream, 3, seed)
    results = []
    for name in ENGINE_NAMES:
        fed = make_engine(name, stream, replace(LOCAL, optimizer=optimizer)).at(2)
        models = fed.fresh(3, distinct=True)
        updates = fed.local_updates(models, w)
        results.append(
            {
                "fresh": models.params, "error": fed.evaluate(models), "loss": fed.evaluate(models, "loss"),
                "cross": fed.cross_evaluate(models, w), "cross loss": fed.cross_evaluate(models, w, "loss"),
                "updates": updates.params, "lanes": (updates.client, updates.model, updates.size),
                "train": fed.train(models, w).params, "sent": fed.sent,
            }
        )  # fmt: skip
    for other in results[1:]:
        for verb, value in results[0].items():
            assert_same(value, other[verb], atol=1e-5)


@pytest.mark.parametrize("name", EACH_ENGINE)
def test_clusters_are_the_array_they_stand_for(name: str) -> None:
    stream = make_uneven_stream(n_clients=6)
    draw = np.random.default_rng(5)
    w = Clusters(draw.integers(-1, 3, (3, 6)), 3, np.array([0.0, 0.5, 2.0]))
    results = []
    for given in (w, np.asarray(w)):
        fed = make_engine(name, stream).at(2)
        models = fed.fresh(3, distinct=True)
        before = Clusters(w.model[:2], 3, w.weight[:2]) if given is w else given[:2]
        trial = fed.tournament(models, before, np.array([0, 1, 2, -1, 0, 1]), ("warm", "joint"))
        results.append((fed.cross_evaluate(models, given), fed.train(models, given).params, fed.sent, trial.wrong))
    assert_same(results[0], results[1])
    np.testing.assert_array_equal(w[-1], np.asarray(w)[-1])
    np.testing.assert_array_equal(w[:, 2, 1], np.asarray(w)[:, 2, 1])
    with pytest.raises(ConfigError, match="positions of 3 models"):
        fed.train(models, replace(w, model=w.model + 1))


@pytest.mark.parametrize("name", EACH_ENGINE)
@pytest.mark.parametrize("room", [1, 40])
def test_scoring_in_blocks_changes_nothing(name: str, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = make_uneven_stream(n_clients=5)
    w = draw_weights(3, stream, 3)
    results = []
    for size in (local_engine.MAX_SCORED_VALUES, room):
        monkeypatch.setattr(local_engine, "MAX_SCORED_VALUES", size)
        fed = make_engine(name, stream).at(3)
        models = fed.fresh(3, distinct=True)
        results.append((fed.evaluate(models), fed.cross_evaluate(models, w), fed.confusion(models)))
    assert_same(results[0], results[1], atol=1e-12)


def test_room_follows_from_memory_and_the_size_of_a_model() -> None:
    devices = lanes.Devices(tuple(jax.local_devices()))
    small, large = {"a": np.zeros((3, 10), dtype=np.float32)}, {"a": np.zeros((3, 10**10 // 4), dtype=np.int8)}
    assert devices.count_fitting_lanes(small) > 10**6 and 1 <= devices.count_fitting_lanes(large) <= 64


@pytest.mark.parametrize("name", mark_slow(IN_PROCESS_ENGINES, *SLOW_ENGINES))
def test_each_row_is_judged_by_the_model_of_its_cell(name: str) -> None:
    stream = make_uneven_stream(n_clients=5)
    engine = make_engine(name, stream)
    assert isinstance(engine, local_engine.InProcess)
    models = engine.at(0).fresh(4, distinct=True)
    rows, sizes, which = np.arange(12)[::-1], np.array([5, 4, 3]), np.array([3, 0, 3])
    every = engine.score_rows(models, rows, "error")
    np.testing.assert_array_equal(
        engine.find_mistakes(models, rows, sizes, which), every[np.repeat(which, sizes), range(12)]
    )


@pytest.mark.parametrize("name", EACH_ENGINE)
def test_rounds_add_up(name: str) -> None:
    """R calls of one round are one call of R rounds, bit for bit, moments and minibatches included."""
    stream = make_uneven_stream()
    w = draw_weights(3, stream, 2)
    at_once, one_by_one = make_engine(name, stream).at(3), make_engine(name, stream).at(3)
    models = at_once.fresh(2, distinct=True)
    whole = at_once.train(models, w, rounds=3)
    parts = models
    for _ in range(3):
        parts = one_by_one.train(parts, w, rounds=1)
    assert_same(whole.params, parts.params)
    assert at_once.sent.tolist() == one_by_one.sent.tolist()


@pytest.mark.parametrize("name", EACH_ENGINE)
def test_a_round_is_the_average_of_its_local_updates(name: str) -> None:
    stream = make_uneven_stream()
    w = np.ones((2, stream.n_clients, 2))
    models = make_engine(name, stream).at(1).fresh(2, distinct=True)
    trained = make_engine(name, stream).at(1).train(models, w, rounds=1)
    updates = make_engine(name, stream).at(1).local_updates(models, w)
    assert_same(trained.params, average_updates(models, updates).params)  # bit for bit


@pytest.mark.parametrize("name", EACH_ENGINE)
def test_an_unused_model_is_returned_unchanged(name: str) -> None:
    stream = make_uneven_stream()
    fed = make_engine(name, stream).at(2)
    models = fed.fresh(2, distinct=True)
    w = np.ones((3, stream.n_clients, 2))
    w[2, :, 1] = 0
    trained = fed.train(models, w)
    for before, after in zip(jax.tree.leaves(models.params), jax.tree.leaves(trained.params), strict=True):
        np.testing.assert_array_equal(np.asarray(after)[1], before[1])
        assert not np.array_equal(np.asarray(after)[0], before[0])


@pytest.mark.parametrize("name", EACH_ENGINE)
def test_a_client_without_new_data_still_trains_on_its_history(name: str) -> None:
    stream = make_uneven_stream(n_clients=2)
    assert stream.counts[1, 0] > 0
    counts = stream.counts.copy()
    keep = np.ones(len(stream.x), dtype=bool)
    keep[stream.rows(2, 0)] = False
    counts[2, 0] = 0
    stream = replace(stream, x=stream.x[keep], y=stream.y[keep], counts=counts, clients=("a", "b"))
    fed = make_engine(name, stream).at(2)
    lanes = fed.local_updates(fed.fresh(), np.ones((3, 2, 1)))
    assert lanes.client.tolist() == [0, 1]
    assert np.isnan(fed.evaluate(fed.fresh())[0]).all() and not np.isnan(fed.evaluate(fed.fresh())[1]).any()


@pytest.mark.parametrize("name", EACH_ENGINE)
def test_a_client_out_of_reach_is_neither_scored_nor_trained(name: str) -> None:
    stream = make_uneven_stream()
    fed = make_engine(name, stream).at(2)
    fed.worker.known.reachable = np.array([True, False, True, True])
    models, w = fed.fresh(), np.ones((3, 4, 1))
    assert np.isnan(fed.evaluate(models)[1]).all()
    assert 1 not in fed.local_updates(models, w).client
    assert fed.sent[1] == 0


@pytest.mark.parametrize("name", EACH_ENGINE)
def test_adding_a_model_does_not_change_the_minibatches_of_others(name: str) -> None:
    stream = make_uneven_stream()
    small, large = make_engine(name, stream).at(2), make_engine(name, stream).at(2)
    one, two = small.fresh(1), small.fresh(2)
    a = small.train(one, np.ones((3, 4, 1)))
    b = large.train(two, np.ones((3, 4, 2)))
    for x, y in zip(jax.tree.leaves(a.params), jax.tree.leaves(b.params), strict=True):
        np.testing.assert_allclose(x[0], y[0], atol=1e-6)
        assert not np.allclose(y[0], y[1], atol=1e-6)  # its twin under another id drew other minibatches


@pytest.mark.parametrize("name", EACH_ENGINE)
def test_nothing_of_the_future_is_used(name: str) -> None:
    stream = make_uneven_stream()
    tau = 2
    first_later = int(stream.starts[tau + 1, 0])
    poisoned = replace(stream, x=stream.x.copy(), y=stream.y.copy())
    poisoned.x[first_later:] = np.nan
    w = draw_weights(tau, stream, 2)
    seen = []
    for s in (stream, poisoned):
        fed = make_engine(name, s).at(tau)
        models = fed.fresh(2, distinct=True)
        seen.append((fed.evaluate(models), fed.cross_evaluate(models, w), fed.train(models, w).params, fed.counts))
    assert_same(seen[0], seen[1])
    assert len(seen[0][3]) == tau + 1


@pytest.mark.parametrize("name", EACH_ENGINE)
def test_models_sent_are_counted_by_hand(name: str) -> None:
    stream = make_uneven_stream()
    stream = replace(stream, counts=stream.counts)
    fed = make_engine(name, stream).at(2)
    models = fed.fresh(2)
    has_new, has_any = stream.counts[2] > 0, stream.counts[:3].sum(axis=0) > 0
    fed.evaluate(models)
    np.testing.assert_array_equal(fed.sent, 2 * has_new)  # two models down
    w = np.ones((3, 4, 2))
    fed.cross_evaluate(models, w)
    np.testing.assert_array_equal(fed.sent, 2 * has_any)  # whoever has a model already is not sent it again
    fed.train(models, w, rounds=5)
    np.testing.assert_array_equal(fed.sent, (2 + 2 * 5 * 2) * has_any)  # down and up, two models, five rounds
    fed.evaluate(models)
    np.testing.assert_array_equal(fed.sent, (2 + 2 * 5 * 2) * has_any + 2 * has_new)  # they have changed


@pytest.mark.parametrize("name", EACH_ENGINE)
def test_cross_evaluation_is_a_weighted_error_over_the_clusters_cells(name: str) -> None:
    stream = make_uneven_stream()
    engine = make_engine(name, stream)
    fed = engine.at(1)
    models = fed.fresh(2, distinct=True)
    w = np.zeros((2, 4, 2))
    w[0, 1, 0] = w[1, 2, 0] = w[1, 1, 1] = 1
    L = fed.cross_evaluate(models, w)
    logits = [
        np.asarray(engine.net.apply(jax.tree.map(lambda leaf, m=m: leaf[m], models.params), stream.x)) for m in (0, 1)
    ]
    wrong = np.array([(scores.argmax(axis=1) != stream.y) for scores in logits])
    zero = np.r_[stream.rows(0, 1), stream.rows(1, 2)]
    for i in (0, 1):
        np.testing.assert_allclose(L[i, 0], wrong[i, zero].mean(), atol=1e-12)
        np.testing.assert_allclose(L[i, 1], wrong[i, stream.rows(1, 1)].mean(), atol=1e-12)
    w[1, 1, 1] = 0
    assert np.isnan(fed.cross_evaluate(models, w)[:, 1]).all()


def test_large_cells_are_sampled_alike_by_all_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in SCORING_MODULES:
        monkeypatch.setattr(module, "MAX_SCORED_ROWS", 5)
    stream = make_uneven_stream()
    feds = [make_engine(name, stream).at(2) for name in ENGINE_NAMES]
    w = draw_weights(2, stream, 2)
    a, *others = (fed.cross_evaluate(fed.fresh(2, distinct=True), w, "loss") for fed in feds)
    for b in others:
        np.testing.assert_allclose(a, b, atol=1e-6)
    monkeypatch.undo()
    assert not np.allclose(a, feds[0].cross_evaluate(feds[0].fresh(2, distinct=True), w, "loss"))


@pytest.mark.parametrize("name", EACH_ENGINE)
def test_a_w_of_the_wrong_shape_is_refused(name: str) -> None:
    fed = make_engine(name, make_uneven_stream()).at(2)
    with pytest.raises(ConfigError, match=r"w must have shape \(t, c, m\) = \(3, 4, 1\), got \(2, 4, 1\)"):
        fed.train(fed.fresh(), np.ones((2, 4, 1)))
    with pytest.raises(ConfigError, match=r"w must have shape .*, got list"):
        fed.train(fed.fresh(), [[[1.0]] * 4] * 3)  # type: ignore[arg-type]
    w = np.ones((3, 4, 1))
    for value in (np.nan, np.inf, -2.0):
        w[1, 2, 0] = value
        with pytest.raises(ConfigError, match=rf"finite and not negative, got {value} at \(t, c, m\) = \(1, 2, 0\)"):
            fed.train(fed.fresh(), w)
    with pytest.raises(ConfigError, match="w must be numbers, got object"):
        fed.train(fed.fresh(), np.full((3, 4, 1), None))


@pytest.mark.parametrize("name", EACH_ENGINE)
def test_without_work_nothing_trains(name: str) -> None:
    stream = make_uneven_stream()
    fed = make_engine(name, stream).at(2)
    models, w = fed.fresh(2), np.zeros((3, 4, 2))
    assert len(fed.local_updates(models, w).client) == 0
    assert_same(average_updates(models, fed.local_updates(models, w)).params, models.params)
    assert_same(fed.train(models, w).params, models.params)
    assert not fed.sent.any()


@pytest.mark.parametrize("name", EACH_ENGINE)
def test_only_a_model_that_changed_is_sent_again_for_scoring(name: str) -> None:
    stream = make_uneven_stream()
    fed = make_engine(name, stream).at(2)
    models, w = fed.fresh(2), np.zeros((3, 4, 2))
    w[:, :, 1] = 1
    has_new = stream.counts[2] > 0
    fed.evaluate(models)
    models = fed.train(models, w, rounds=1)
    before = fed.sent.copy()
    fed.evaluate(models)
    np.testing.assert_array_equal(fed.sent - before, 1 * has_new)


def test_lanes_that_are_idle_in_one_call_keep_their_moments() -> None:
    """Clients may move between models from round to round; both engines remember each pair's optimiser."""
    stream = make_uneven_stream()
    wa, wb = draw_weights(2, stream, 3, 1), draw_weights(2, stream, 3, 5)
    results = []
    for name in ENGINE_NAMES:
        fed = make_engine(name, stream).at(2)
        models = fed.fresh(3, distinct=True)
        for w in (wa, wb, wa):
            models = fed.train(models, w, rounds=1)
        results.append(models.params)
    for other in results[1:]:
        assert_same(results[0], other, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["simulator", "compiled"])
def test_padding_does_not_change_the_bits(name: str) -> None:
    """The same ten lanes beside an idle model that widens the stack."""
    stream = make_uneven_stream(n_clients=10)
    a, b = make_engine(name, stream).at(1), make_engine(name, stream).at(1)
    w = np.ones((2, 10, 9))
    w[1, :, 1:] = 0
    alone = a.train(a.fresh(1), w[:, :, :1])
    padded = b.train(b.fresh(9), w)
    assert not is_different(jax.tree.map(lambda p: p[0], alone.params), jax.tree.map(lambda p: p[0], padded.params))


@pytest.mark.slow
def test_a_run_compiles_only_when_its_lanes_outgrow_a_bucket() -> None:
    """A whole FedDrift run: after the second time step a new program means a larger bucket, nothing else."""
    stream = fd.stream("sine-2")
    net = replace(
        default_net(stream), apply=lambda params, x: apply_perceptron(params, x)
    )  # none that native code knows
    compiled: Any = program._run_compiled_rounds
    devices = lanes.Devices.find_all()
    local = Local(rounds=2, steps=50, lr=0.0101)  # unlike any other test's, so that nothing is compiled yet
    seen: list[tuple[int, int]] = []  # lanes, programs
    for step in fd.run(stream, fd.algorithm("FedDrift", stream), net=net, local=local, seed=2):
        w = np.asarray(step.state.w)
        n = int(((w.sum(axis=0) > 0) & (w[-1].any(axis=0))).sum())
        seen.append((devices.choose_capacity(n, 10, step.state.models.params), compiled._cache_size()))
    for (_, programs), (bucket, more), k in zip(seen[1:], seen[2:], range(2, 99), strict=False):
        grew = bucket > max(b for b, _ in seen[:k])
        assert more - programs == int(grew), seen
    assert seen[-1][1] - seen[0][1] >= 1  # it did grow


@pytest.mark.slow
def test_lanes_train_alike_in_tiles_of_any_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve lanes of four clients: three tiles, one after the other, two at once and one, in halves, or all in one."""
    stream = make_uneven_stream(n_clients=4)
    results = []
    for tile, *cut in ((4, 4, (1,)), (4, 4, (2, 1)), (4, 2, (4, 2, 1)), (12, 12, (1,))):
        monkeypatch.setattr(lanes.Devices, "split_tile", lambda self, tile, cut=cut: cut)
        monkeypatch.setattr(Compiled, "choose_tile", lambda self, params, tile=tile: tile)
        fed = make_engine("compiled", stream).at(2)
        results.append(fed.train(fed.fresh(3, distinct=True), np.ones((3, 4, 3))).params)
    for other in results[1:]:
        assert_same(results[0], other, atol=1e-5)


@pytest.mark.parametrize(("tile", "n", "expected"), [(10, 2, 3), (10, 5, 5), (10, 10, 10), (10, 11, 20), (7, 30, 56)])
def test_few_numbers_of_lanes_have_a_program(tile: int, n: int, expected: int) -> None:
    small = {"a": np.zeros((3, 10), dtype=np.float32)}
    assert lanes.Devices((None,)).choose_capacity(n, tile, small) == expected


@dataclass
class Gpu:
    """What the simulator asks of one."""

    memory: int
    platform: str = "gpu"

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_limit": self.memory}


def test_a_gpu_compiles_for_four_tiles_at_once_and_trains_half_of_one_at_last() -> None:
    small, gpu = {"a": np.zeros((3, 10), dtype=np.float32)}, lanes.Devices((Gpu(1 << 30),))
    assert [gpu.choose_capacity(n, 10, small) for n in (2, 5, 10, 40, 41)] == [3, 5, 40, 40, 160]
    assert gpu.split_tile(10) == (5, (4, 2, 1)) and gpu.split_tile(7) == (7, (2, 1))
    assert lanes.Devices((None,)).split_tile(10) == (10, (1,))
    assert lanes.Devices((Gpu(1 << 13),)).choose_capacity(10, 10, small) == 10  # no room for more


@pytest.mark.parametrize(("share", "n_devices", "expected"), [(1.0, 1, 10), (1.0, 3, 12), (0.2, 1, 2), (0.2, 3, 3)])
def test_a_tile_contains_participants_and_is_shared_by_all_devices(share: float, n_devices: int, expected: int) -> None:
    stream = make_uneven_stream(n_clients=10)
    engine = simulator.Simulator(stream, default_net(stream), LOCAL, 0, Conditions(participation=share))
    engine.devices = lanes.Devices((None,) * n_devices)
    assert engine.choose_tile(engine.at(0).fresh().params) == expected
    large = {"a": np.zeros((1, 10**7), dtype=np.float32)}
    assert (
        Compiled(make_uneven_stream(n_clients=40), default_net(stream), LOCAL, 0).choose_tile(large) == 14
    )  # at most 16 at a time


def test_lanes_that_hardly_fit_have_no_room_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes.Devices, "count_fitting_lanes", lambda self, params: 32)
    assert lanes.Devices((None,)).choose_capacity(21, 10, None) == 30


@pytest.mark.slow
def test_a_known_bucket_never_compiles_again() -> None:
    stream = make_uneven_stream(
        seed=4, n_clients=5, n_steps=10
    )  # unlike any other test's, so that nothing is compiled yet
    engine = Compiled(stream, default_net(stream), replace(LOCAL, lr=0.0123), 0)

    def train(tau: int, n_models: int, n_users: int) -> tuple[int, int]:
        fed = engine.at(tau)
        w = np.zeros((tau + 1, 5, n_models))
        w[:, :n_users] = 1
        models = fed.fresh(n_models)
        fed.evaluate(models)
        fed.cross_evaluate(models, w)
        fed.train(models, w)
        programs: list[Any] = [program._run_compiled_rounds, program.compute_all_logits]
        return programs[0]._cache_size(), programs[1]._cache_size()

    train(0, 1, 5)
    start = train(1, 1, 5)
    assert [train(tau, 1, 5) for tau in (2, 3, 4, 7)] == [start] * 4  # later steps, longer histories
    grown = train(5, 3, 5)
    assert grown == (start[0] + 1, start[1])  # more lanes need a new program, a few more models to score none
    assert [train(tau, 3, n) for tau, n in ((6, 5), (7, 5), (7, 5))] == [grown] * 3
    assert train(6, 1, 5) == grown  # and back
