"""The native code for small perceptrons: where it applies, and that the number of cores does not matter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import feddrift as fd
from feddrift import rng
from feddrift.engines import kernel, kernel_loops, simulator
from feddrift.nets import default_net
from feddrift.nets.perceptron import perceptron
from tests.contract.test_engines import LOCAL, make, same, some_w, uneven_stream

pytest.importorskip("numba")


def stacked(net: fd.Net) -> Any:
    return {name: leaf[None] for name, leaf in net.init((np.uint32(1), np.uint32(2))).items()}


def test_it_is_for_small_perceptrons_with_the_usual_trunk_or_none() -> None:
    small = fd.mlp(2, 4, 2)
    assert kernel.applies(small, stacked(small))
    assert kernel.applies(replace(small, trunk=()), stacked(small))
    assert not kernel.applies(replace(small, trunk=("W1",)), stacked(small))
    assert not kernel.applies(replace(small, apply=lambda params, x: perceptron(params, x)), stacked(small))
    large = fd.mlp(65, 64, 2)
    assert not kernel.applies(large, stacked(large))


def test_the_simulator_uses_it_and_works_without(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = uneven_stream()
    w, calls = some_w(2, stream, 2), []
    native = kernel.rounds

    def counted(*args: Any, **more: Any) -> Any:
        calls.append(1)
        return native(*args, **more)

    monkeypatch.setattr(kernel, "rounds", counted)
    fed = make("simulator", stream).at(2)
    with_it = fed.train(fed.fresh(2), w).params
    assert len(calls) == 1
    monkeypatch.setattr(kernel_loops, "COMPILED", False)  # as if numba were not installed
    fed = make("simulator", stream).at(2)
    same(fed.train(fed.fresh(2), w).params, with_it, atol=1e-5)
    assert len(calls) == 1


@pytest.mark.parametrize("cores", [1, 3, 64])
def test_the_number_of_cores_changes_no_bit(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = uneven_stream(n_clients=7)
    w = some_w(2, stream, 3)
    results = []
    for n in (2, cores):
        monkeypatch.setattr(kernel, "cores", lambda n=n: n)
        fed = make("simulator", stream).at(2)
        results.append(fed.train(fed.fresh(3, distinct=True), w).params)
    same(*results)


@pytest.mark.parametrize("n", [1, 2, 3, 500, 4097])
def test_cells_are_shuffled_as_the_generator_says(n: int) -> None:
    keys = rng.derive(3, "shuffle", 5, np.arange(4), 7)
    starts, order = np.array([0, n, 3 * n, 2 * n]), np.zeros(4 * n, dtype=np.int32)
    kernel.shuffle(keys, starts, np.full(4, n), order)
    for k, start in enumerate(starts):
        expected = start + rng.permutation((keys[0][k], keys[1][k]), n)
        np.testing.assert_array_equal(order[start : start + n], expected)


def test_exponentials_are_right_to_the_last_digits() -> None:
    from numba import njit

    from feddrift.engines.vectors import SIZE, load, store

    exp = kernel_loops._exp

    @njit
    def fill(x: Any) -> None:
        for at in range(0, x.shape[1], SIZE):
            store(x, 0, at, exp(load(x, 0, at)))

    x = np.linspace(-87, 0, 5008, dtype=np.float32)[None]
    found = x.copy()
    fill(found)
    np.testing.assert_allclose(found, np.exp(x.astype(np.float64)), rtol=2e-7)


@pytest.mark.parametrize("n", [16, 32, 48, 64, 80, 112, 128])
def test_sums_have_the_last_bits_of_a_plain_loop(n: int) -> None:
    """Of which LLVM makes several sums: runs recorded when the loops were plain are still what they were."""
    from numba import njit

    from feddrift.engines.vectors import NATIVE

    if NATIVE == 4:
        pytest.skip("on processors without AVX the number of sums varies")
    dot, total = kernel_loops._dot, kernel_loops._total

    @njit(fastmath={"reassoc", "contract", "nsz", "arcp"})
    def plain(a: Any, b: Any) -> Any:
        found, alone = np.float32(0), np.float32(0)
        for i in range(len(a) // 16 * 16):
            found += a[i] * b[i]
        for i in range(len(a) // 16 * 16):
            alone += a[i]
        return found, alone

    @njit
    def ours(a: Any, b: Any) -> Any:
        return dot(a, 0, b, 0, a.shape[1]), total(a, 0, a.shape[1])

    draw = np.random.default_rng(n)
    for _ in range(50):
        a, b = draw.normal(size=(2, 1, n)).astype(np.float32)
        assert ours(a, b) == plain(a[0], b[0])


@pytest.mark.parametrize("hidden", [4, ()])
def test_data_may_lie_in_any_order_and_be_of_any_kind(hidden: Any) -> None:
    stream = uneven_stream()
    x = (stream.x * 100).astype(np.uint8)
    wide = np.repeat(x, 2, axis=1).astype(np.float64)
    kinds: list[tuple[Any, Any]] = [
        (x.astype(np.float32), stream.y), (x, stream.y.astype(np.int64)), (np.asfortranarray(x), stream.y),
        (wide[:, ::2], np.repeat(stream.y, 2)[::2]),
    ]  # fmt: skip
    results = []
    for each, y in kinds:
        fed = simulator.Simulator(replace(stream, x=each, y=y), fd.mlp(3, hidden, 2), LOCAL, 3).at(2)
        results.append(fed.train(fed.fresh(2, distinct=True), some_w(2, stream, 2)).params)
    for result in results[1:]:
        same(result, results[0])


def test_data_may_lie_in_a_file(tmp_path: Path) -> None:
    stream = uneven_stream()
    for name in ("x", "y"):
        np.save(tmp_path / f"{name}.npy", getattr(stream, name))
    mapped = replace(stream, **{name: np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in ("x", "y")})
    results = []
    for each in (stream, mapped):
        fed = make("simulator", each).at(2)
        models = fed.fresh(2, distinct=True)
        w = some_w(2, stream, 2)
        results.append((fed.train(models, w).params, fed.evaluate(models), fed.cross_evaluate(models, w)))
    same(results[0], results[1])


@pytest.mark.slow
def test_a_whole_run_is_the_compiled_programs() -> None:
    """Same decisions, accuracy within half a point, on a stream whose decisions do not hang by a hair."""
    stream = fd.stream("sine-2")
    net = replace(default_net(stream), apply=lambda params, x: perceptron(params, x))
    runs = [
        list(fd.run(stream, fd.algorithm("FedDrift", stream), net=n, local=fd.Local(rounds=10), seed=2))
        for n in (None, net)
    ]
    for a, b in zip(*runs, strict=True):
        assert a.model.tolist() == b.model.tolist() and a.sent.tolist() == b.sent.tolist()
        assert abs(a.accuracy.mean() - b.accuracy.mean()) < 0.005
    assert simulator.Simulator(stream, net, LOCAL, 0).native
