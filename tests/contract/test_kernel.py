"""The native code for small perceptrons: where it is used, and independence of the number of cores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import feddrift as fd
from feddrift import rng
from feddrift.engines.local.engine import InProcess
from feddrift.engines.native import kernel, kernel_loops
from feddrift.engines.simulator import simulator
from feddrift.nets import default_net
from feddrift.nets.perceptron import apply_perceptron
from tests.support.engines import LOCAL, assert_same, draw_weights, make_engine, make_uneven_stream

pytest.importorskip("numba")


def init_stacked_params(net: fd.Net) -> Any:
    return {name: leaf[None] for name, leaf in net.init((np.uint32(1), np.uint32(2))).items()}


def test_it_is_for_small_perceptrons_with_the_usual_trunk_or_none() -> None:
    small = fd.mlp(2, 4, 2)
    assert kernel.supports_net(small, init_stacked_params(small))
    assert kernel.supports_net(replace(small, trunk=()), init_stacked_params(small))
    assert not kernel.supports_net(replace(small, trunk=("W1",)), init_stacked_params(small))
    assert not kernel.supports_net(
        replace(small, apply=lambda params, x: apply_perceptron(params, x)), init_stacked_params(small)
    )
    large = fd.mlp(65, 64, 2)
    assert not kernel.supports_net(large, init_stacked_params(large))


def test_the_simulator_uses_it_and_works_without(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = make_uneven_stream()
    w, calls = draw_weights(2, stream, 2), []
    native = kernel.run_rounds

    def counted(*args: Any, **more: Any) -> Any:
        calls.append(1)
        return native(*args, **more)

    monkeypatch.setattr(kernel, "run_rounds", counted)
    fed = make_engine("simulator", stream).at(2)
    with_it = fed.train(fed.fresh(2), w).params
    assert len(calls) == 1
    monkeypatch.setattr(kernel_loops, "COMPILED", False)  # as if numba were not installed
    fed = make_engine("simulator", stream).at(2)
    assert_same(fed.train(fed.fresh(2), w).params, with_it, atol=1e-5)
    assert len(calls) == 1


@pytest.mark.parametrize("cores", [1, 3, 64])
def test_the_number_of_cores_changes_no_bit(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = make_uneven_stream(n_clients=7)
    w = draw_weights(2, stream, 3)
    results = []
    for n in (2, cores):
        monkeypatch.setattr(kernel, "count_cores", lambda n=n: n)
        fed = make_engine("simulator", stream).at(2)
        results.append(fed.train(fed.fresh(3, distinct=True), w).params)
    assert_same(*results)


@pytest.mark.parametrize("n", [1, 2, 3, 500, 4097])
def test_cells_are_shuffled_by_the_generator(n: int) -> None:
    keys = rng.derive_key(3, "shuffle", 5, np.arange(4), 7)
    starts, order = np.array([0, n, 3 * n, 2 * n]), np.zeros(4 * n, dtype=np.int32)
    kernel.shuffle_cells(keys, starts, np.full(4, n), order)
    for k, start in enumerate(starts):
        expected = start + rng.permutation((keys[0][k], keys[1][k]), n)
        np.testing.assert_array_equal(order[start : start + n], expected)


def test_exponentials_are_right_to_the_last_digits() -> None:
    from numba import njit

    from feddrift.engines.native.vectors import VECTOR_SIZE, load_vector, store_vector

    exp = kernel_loops._exp_vector

    @njit
    def fill(x: Any) -> None:
        for at in range(0, x.shape[1], VECTOR_SIZE):
            store_vector(x, 0, at, exp(load_vector(x, 0, at)))

    x = np.linspace(-87, 0, 5008, dtype=np.float32)[None]
    found = x.copy()
    fill(found)
    np.testing.assert_allclose(found, np.exp(x.astype(np.float64)), rtol=2e-7)


def fuse_in_numpy(a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c of float32 numbers, rounded once: the sum is rounded to odd in float64, then to float32."""
    product, c = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)  # the product is exact
    total = product + c
    part = total - product
    lost = (product - (total - part)) + (c - part)
    even = (total.view(np.int64) & 1) == 0
    odd = np.nextafter(total, np.where(lost > 0, np.inf, -np.inf))
    return np.where((lost != 0) & even, odd, total).astype(np.float32)


def fold_in_numpy(sums: Any) -> Any:
    """Return the sum of partial sums: registers in pairs, then the halves of the last one."""
    sums = sums.reshape(-1, 8)
    while len(sums) > 1:
        sums = sums[::2] + sums[1::2]
    (total,) = sums
    while len(total) > 1:
        total = total[: len(total) // 2] + total[len(total) // 2 :]
    return total[0]


@pytest.mark.parametrize("n", [16, 32, 48, 64, 80, 112, 128])
def test_sums_have_one_order_on_every_processor(n: int) -> None:
    from numba import njit

    dot, total = kernel_loops._multiply_rows, kernel_loops._sum_row

    @njit
    def ours(a: Any, b: Any) -> Any:
        return dot(a, 0, b, 0, a.shape[1]), total(a, 0, a.shape[1])

    def in_numpy(a: Any, b: Any) -> Any:
        whole = n // 32 * 32
        parts, alone = np.zeros((2, 32), dtype=np.float32)
        for at in range(0, whole, 32):
            parts, alone = fuse_in_numpy(a[at : at + 32], b[at : at + 32], parts), alone + a[at : at + 32]
        found = [fold_in_numpy(parts), fold_in_numpy(alone)]
        rest = np.zeros((2, 8), dtype=np.float32)
        rest[:, 0] = found
        for at in range(whole, n, 8):
            rest[0] = fuse_in_numpy(a[at : at + 8], b[at : at + 8], rest[0])
            rest[1] = rest[1] + a[at : at + 8]
        return tuple(map(fold_in_numpy, rest)) if whole < n else tuple(found)

    draw = np.random.default_rng(n)
    for _ in range(50):
        a, b = draw.normal(size=(2, 1, n)).astype(np.float32)
        assert ours(a, b) == in_numpy(a[0], b[0])


def test_scalar_functions_are_exact_to_float32() -> None:
    x = np.concatenate([-np.logspace(-8, 2.8, 300), [0.0]])
    np.testing.assert_allclose([kernel_loops._exp_scalar(v) for v in x], np.exp(x), rtol=1e-8)
    p = np.logspace(-3, 6, 300)
    np.testing.assert_allclose([kernel_loops._log_scalar(v) for v in p], np.log(p), rtol=1e-8, atol=1e-10)
    steps = np.array([1, 2, 3, 10, 1000, 10**6], dtype=np.float32)
    for log_beta in (kernel_loops.LOG_BETA1, kernel_loops.LOG_BETA2):
        found = [kernel_loops._correct_bias(step, log_beta) for step in steps]
        np.testing.assert_allclose(found, -np.expm1(steps.astype(float) * log_beta), rtol=2e-8)
    assert kernel_loops._exp_scalar(-1e30) == 0
    assert np.isnan([kernel_loops._exp_scalar(np.nan), kernel_loops._log_scalar(np.nan)]).all()


@pytest.mark.parametrize("hidden", [4, ()])
@pytest.mark.parametrize("masked", [False, True])
def test_logits_have_the_bits_that_predictions_compare(hidden: Any, masked: bool) -> None:
    stream = make_uneven_stream()
    engine = simulator.Simulator(stream, fd.mlp(3, hidden, 2), LOCAL, seed=0)
    models = engine.at(2).fresh(3, distinct=True)
    if masked:
        models = replace(models, mask=np.array([[1.0, 0, 1], [1, 1, 1], [0, 1, 0]]))
    rows = np.arange(len(stream.y))
    (logits,) = engine.logits(models, rows)
    for m in range(3):
        x = stream.x if models.mask is None else stream.x * models.mask[m].astype(np.float32)
        expected = engine.net.apply({name: leaf[m] for name, leaf in models.params.items()}, x)
        np.testing.assert_allclose(logits[m], expected, atol=1e-5)
        sizes, which = np.array([len(rows)]), np.array([m])
        wrong = engine.find_mistakes(models, rows, sizes, which)
        np.testing.assert_array_equal(wrong, logits[m].argmax(axis=1) != stream.y)


@pytest.mark.parametrize("hidden", [4, ()])
def test_data_may_lie_in_any_order_and_be_of_any_kind(hidden: Any) -> None:
    stream = make_uneven_stream()
    x = (stream.x * 100).astype(np.uint8)
    wide = np.repeat(x, 2, axis=1).astype(np.float64)
    kinds: list[tuple[Any, Any]] = [
        (x.astype(np.float32), stream.y), (x, stream.y.astype(np.int64)), (np.asfortranarray(x), stream.y),
        (wide[:, ::2], np.repeat(stream.y, 2)[::2]),
    ]  # fmt: skip
    results = []
    for each, y in kinds:
        fed = simulator.Simulator(replace(stream, x=each, y=y), fd.mlp(3, hidden, 2), LOCAL, 3).at(2)
        results.append(fed.train(fed.fresh(2, distinct=True), draw_weights(2, stream, 2)).params)
    for result in results[1:]:
        assert_same(result, results[0])


def test_data_may_lie_in_a_file(tmp_path: Path) -> None:
    stream = make_uneven_stream()
    for name in ("x", "y"):
        np.save(tmp_path / f"{name}.npy", getattr(stream, name))
    mapped = replace(stream, **{name: np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in ("x", "y")})
    results = []
    for each in (stream, mapped):
        fed = make_engine("simulator", each).at(2)
        models = fed.fresh(2, distinct=True)
        w = draw_weights(2, stream, 2)
        results.append((fed.train(models, w).params, fed.evaluate(models), fed.cross_evaluate(models, w)))
    assert_same(results[0], results[1])


@pytest.mark.slow
def test_a_whole_run_is_the_compiled_programs() -> None:
    """Same decisions, accuracy within half a point, on a stream whose decisions do not hang by a hair."""
    stream = fd.stream("sine-2")
    net = replace(default_net(stream), apply=lambda params, x: apply_perceptron(params, x))
    runs = [
        list(fd.run(stream, fd.algorithm("FedDrift", stream), net=n, local=fd.Local(rounds=10), seed=2))
        for n in (None, net)
    ]
    for a, b in zip(*runs, strict=True):
        assert a.model.tolist() == b.model.tolist() and a.sent.tolist() == b.sent.tolist()
        assert abs(a.accuracy.mean() - b.accuracy.mean()) < 0.005
    assert simulator.Simulator(stream, net, LOCAL, 0).native


@pytest.mark.parametrize("hidden", [4, ()])
@pytest.mark.parametrize("masked", [False, True])
def test_members_of_teams_are_scored_as_every_model_is(hidden: Any, masked: bool) -> None:
    stream = make_uneven_stream()
    engine = simulator.Simulator(stream, fd.mlp(3, hidden, 2), LOCAL, seed=0)
    models = engine.at(2).fresh(3, distinct=True)
    if masked:
        models = replace(models, mask=np.array([[1.0, 0, 1], [1, 1, 1], [0, 1, 0]]))
    draw = np.random.default_rng(4)
    rows = draw.permutation(len(stream.y))
    teams = np.array([[0, 2], [1, -1], [-1, -1], [2, 1]])
    team_of = draw.integers(len(teams), size=len(rows))
    (every,) = engine.logits(models, rows)
    expected = np.where((teams >= 0)[team_of].T[..., None], every[teams[team_of].T, np.arange(len(rows))], 0)
    sizes = np.bincount(team_of, minlength=len(teams))
    order = np.argsort(team_of, kind="stable")
    plain = InProcess.compute_member_logits(engine, models, rows[order], sizes, teams)
    np.testing.assert_array_equal(plain, expected[:, order])
    found = np.full_like(expected, np.nan)
    for block, logits in engine.compute_team_logits(models, rows, team_of, teams):
        found[:, block] = logits
    np.testing.assert_array_equal(found, expected)


def test_large_teams_are_scored_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from feddrift.engines.local import engine as local_engine

    stream = make_uneven_stream()
    engine = simulator.Simulator(stream, default_net(stream), LOCAL, seed=0)
    models = engine.at(2).fresh(2, distinct=True)
    rows, teams = np.arange(len(stream.y)), np.array([[0, 1], [1, 0], [0, 1]])
    team_of = rows % 3
    (whole,) = [found for _, found in engine.compute_team_logits(models, rows, team_of, teams)]
    monkeypatch.setattr(local_engine, "MAX_SCORED_VALUES", 1)
    blocks = [found for _, found in engine.compute_team_logits(models, rows, team_of, teams)]
    assert len(blocks) == 3
    np.testing.assert_array_equal(np.concatenate(blocks, axis=1), whole)
