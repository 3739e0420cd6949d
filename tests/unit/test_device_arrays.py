"""Arrays that stay on a device, and operations on them."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import feddrift as fd
from feddrift._internal import checkpoint
from feddrift._internal.device_arrays import SHARED_ROWS, StackView, find_device, find_distinct_rows, move_to_host
from feddrift._internal.system import delete_oldest_files
from feddrift.averaging import average_updates, find_finite_lanes, measure_updates
from feddrift.engines.simulator import compilation_cache
from feddrift.engines.simulator.lanes import Devices
from feddrift.engines.simulator.simulator import Simulator
from feddrift.models import get_params, init_models, join, take
from feddrift.nets import default_net
from feddrift.nets.perceptron import apply_perceptron
from feddrift.streams import files
from feddrift.trees import tree_leaves
from feddrift.types import Federation, Models, Updates
from tests.conftest import prepare_program_cache


def make_compiled_federation(**local: Any) -> Federation:
    """A federation of SINE-2 whose net has no native code."""
    stream = fd.stream("sine-2")
    net = replace(default_net(stream), apply=lambda params, x: apply_perceptron(params, x))
    return Simulator(stream, net, fd.Local(rounds=2, steps=5, **local), 0).at(1)


def train_two_models() -> tuple[Models, Updates]:
    fed = make_compiled_federation()
    w = np.ones((2, fed.n_clients, 2))
    w[:, :4, 1] = 0
    return (models := fed.fresh(2, distinct=True)), fed.local_updates(models, w)


def test_to_numpy_it_is_an_array() -> None:
    _, updates = train_two_models()
    leaf = tree_leaves(updates.params)[0]
    assert isinstance(leaf, StackView) and "here" not in vars(leaf)  # nobody has read it
    here = np.asarray(leaf)
    assert leaf.shape == here.shape == (16, 2, 4) and leaf.ndim == 3 and len(leaf) == 16
    np.testing.assert_array_equal(leaf[3], here[3])
    np.testing.assert_array_equal(leaf + 1, here + 1)
    np.testing.assert_array_equal(np.concatenate([leaf, here]), np.concatenate([here, here]))
    np.testing.assert_array_equal(leaf.mean(axis=0), here.mean(axis=0))
    assert repr(leaf) == repr(here)
    assert type(pickle.loads(pickle.dumps(leaf))) is np.ndarray
    np.testing.assert_array_equal(jnp.asarray(leaf), here)


def test_models_stay_on_their_device_and_can_be_read_as_arrays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = fd.stream("sine-2")
    net = replace(default_net(stream), apply=lambda params, x: apply_perceptron(params, x))
    begun, tested = list[bool](), list[bool]()

    class Watched(fd.algorithm("FedDrift", stream).__class__):  # type: ignore[misc]
        def step(self, state: Any, fed: Any) -> Any:
            begun.append(find_device(state.models.params) is not None)
            return super().step(state, fed)

    def test(engine: Simulator, state: Any, t: int, original: Any = Simulator.test) -> Any:
        tested.append(find_device(state.models.params) is not None)
        return original(engine, state, t)

    monkeypatch.setattr(Simulator, "test", test)
    run = fd.run(stream, Watched(delta=0.05), net=net, local=fd.Local(rounds=1, steps=2))
    steps = list(islice(run, 4))  # XLA compiles for long whenever there are more models
    assert all(type(leaf) is np.ndarray for step in steps for leaf in tree_leaves(step.state.models.params))
    assert len(tested) == 4 and all(tested) and all(begun[1:]) and not begun[0]  # those of a seed come from the host


def test_an_array_that_is_written_moves_to_the_host() -> None:
    _, updates = train_two_models()
    one, other = tree_leaves(updates.params)[:2]
    before = np.array(one)
    one[3] = 0
    assert one.storage is None and (one[3] == 0).all() and find_device(updates.params) is None
    np.testing.assert_array_equal(one[:3], before[:3])
    twice = other
    twice *= 2
    np.testing.assert_array_equal(np.add(other, 0), twice)


def test_models_made_of_updates_have_their_parameters() -> None:
    """Also where these lie in another order on the device."""
    models, updates = train_two_models()
    place = find_device(updates.params)
    assert place is not None
    turned = {name: StackView(place, leaf.stack, leaf.rows[::-1]) for name, leaf in updates.params.items()}
    personal = Models(turned, tuple(range(16)), trunk=models.trunk)
    np.testing.assert_array_equal(
        make_compiled_federation().evaluate(personal), make_compiled_federation().evaluate(move_to_host(personal))
    )


def test_copies_and_joins_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    fed = make_compiled_federation()
    here = fed.fresh(3, distinct=True)
    there = fed.train(here, np.ones((2, fed.n_clients, 3)))
    copies = take(there, [2, 0, 2], [3, 4, 5])
    both = join(join(here, copies), take(there, [1], [6]))
    alone = take(both, [5], [5])
    for models in (there, copies, both, alone):
        assert find_device(models.params) is not None
        assert not any("here" in vars(leaf) for leaf in tree_leaves(models.params))  # nobody has read it
    at_once = move_to_host(there)
    expected = join(join(here, take(at_once, [2, 0, 2], [3, 4, 5])), take(at_once, [1], [6]))
    np.testing.assert_array_equal(fed.evaluate(both), fed.evaluate(expected))
    np.testing.assert_array_equal(fed.evaluate(alone), fed.evaluate(expected)[:, 5:6])
    for leaf, same in zip(tree_leaves(both.params), tree_leaves(expected.params), strict=True):
        np.testing.assert_array_equal(leaf, same)
    monkeypatch.setattr(Devices, "count_fitting_lanes", lambda *_: 13)
    assert find_device(join(here, copies).params) is not None  # six fit
    assert find_device(join(both, take(there, [0], [7])).params) is None


def test_rows_of_it_are_its_own() -> None:
    _, updates = train_two_models()
    leaf = tree_leaves(updates.params)[0]
    some, before = leaf[[4, 1]], np.array(leaf)
    some[0] = 0
    assert some.storage is None and leaf.storage is not None and (some[0] == 0).all()
    np.testing.assert_array_equal(leaf, before)
    np.testing.assert_array_equal(some[1], before[1])
    np.testing.assert_array_equal(leaf[np.array([False] * 15 + [True])], before[15:])
    assert leaf[[]].shape == (0, 2, 4) and leaf[:2].shape == (2, 2, 4)
    leaf[1] = 7
    np.testing.assert_array_equal(some[1], before[1])


def test_averages_and_lengths_are_the_same_there_and_here() -> None:
    models, updates = train_two_models()
    here = move_to_host(updates)
    assert find_device(updates.params) is not None and find_device(here.params) is None
    assert move_to_host(models) is models and move_to_host(None) is None
    for there, on_the_host in zip(
        tree_leaves(average_updates(models, updates).params),
        tree_leaves(average_updates(models, here).params),
        strict=True,
    ):
        np.testing.assert_array_equal(there, on_the_host)
    far, near = measure_updates(models, updates), measure_updates(models, here)
    for m in (0, 1):
        assert far.measure_mean(m) == pytest.approx(near.measure_mean(m), rel=1e-5)
        np.testing.assert_allclose(far.measure_lengths(m), near.measure_lengths(m), rtol=1e-5)
        np.testing.assert_allclose(far.measure_cosines(m), near.measure_cosines(m), atol=1e-5)
    assert len(far.measure_lengths(0)) == 10 and len(far.measure_lengths(1)) == 6


def test_an_update_that_is_not_finite_is_left_out_there_too() -> None:
    models, updates = train_two_models()

    def spoilt(leaf: StackView) -> StackView:
        assert leaf.storage is not None
        return StackView(leaf.storage, leaf.stack.at[leaf.rows[3]].set(np.nan), leaf.rows)

    bad = replace(updates, params={name: spoilt(leaf) for name, leaf in updates.params.items()})
    assert np.flatnonzero(~find_finite_lanes(models, bad)).tolist() == [3]
    for there, here in zip(
        tree_leaves(average_updates(models, bad).params),
        tree_leaves(average_updates(models, move_to_host(bad)).params),
        strict=True,
    ):
        assert np.isfinite(there).all()
        np.testing.assert_allclose(there, here, rtol=1e-6)


def test_steps_hand_out_numpy_arrays() -> None:
    stream = fd.stream("sine-2")
    net = replace(default_net(stream), apply=lambda params, x: apply_perceptron(params, x))
    step = next(fd.run(stream, "IFCA", net=net, local=fd.Local(rounds=2, steps=2)))
    assert all(type(leaf) is np.ndarray for leaf in tree_leaves(step.state.models.params))


def test_programs_are_stored_in_the_users_cache_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import jax

    config: Any = jax.config
    before = config.jax_compilation_cache_dir
    monkeypatch.setattr(files, "find_cache_folder", lambda: tmp_path)
    try:
        for folder, enabled, expected in (
            (None, True, tmp_path / "programs" / compilation_cache.identify_processor()),
            ("/elsewhere", True, Path("/elsewhere")),
            (None, False, None),
        ):
            config.update("jax_compilation_cache_dir", folder)
            config.update("jax_enable_compilation_cache", enabled)
            compilation_cache.enable_compilation_cache.cache_clear()
            assert compilation_cache.enable_compilation_cache() == expected
        config.update("jax_compilation_cache_dir", None)
        config.update("jax_enable_compilation_cache", True)
        compilation_cache.enable_compilation_cache.cache_clear()
        (tmp_path / "file").write_text("")
        assert (
            compilation_cache.enable_compilation_cache(tmp_path / "file" / "below") is None
        )  # no folder can be made there
    finally:
        config.update("jax_compilation_cache_dir", before)
        config.update("jax_enable_compilation_cache", True)
        compilation_cache.enable_compilation_cache.cache_clear()


def test_the_oldest_files_are_deleted_first(tmp_path: Path) -> None:
    for age, name in enumerate(("new", "old", "oldest")):
        (tmp_path / name).write_bytes(b"x" * 40)
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    delete_oldest_files(tmp_path, 80)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "old"]
    delete_oldest_files(tmp_path, 80)
    assert len(list(tmp_path.iterdir())) == 2


def test_the_cache_of_the_checks_loses_damaged_programs_only(tmp_path: Path) -> None:
    from jax._src.compilation_cache import compress_executable

    folder = tmp_path / compilation_cache.identify_processor()
    folder.mkdir()
    whole = compress_executable(b"program" * 100)
    (folder / "whole-cache").write_bytes(whole)
    (folder / "cut-cache").write_bytes(whole[:-5])
    (folder / "empty-cache").write_bytes(b"")
    assert prepare_program_cache(tmp_path) == folder
    assert [path.name for path in folder.iterdir()] == ["whole-cache"]


def test_precision_is_recorded_where_it_has_an_effect() -> None:
    from feddrift.runs.config import RunConfig

    assert "precision" not in fd.Local().to_dict() and fd.Local(precision="tf32").to_dict()["precision"] == "tf32"
    with pytest.raises(fd.ConfigError, match="precision must be float32 or tf32, got 'half'"):
        fd.Local(precision="half")  # type: ignore[arg-type]
    stream = fd.stream("sine-2")
    assert RunConfig.from_values(stream="sine-2", precision="tf32").list_overrides(stream) == {"precision": "tf32"}
    assert RunConfig.from_values(stream="sine-2", precision="float32").list_overrides(stream) == {}


@pytest.mark.slow
@pytest.mark.parametrize(("words", "kept_some"), [((), True), (("--no-cache",), False)])
def test_a_run_stores_its_programs_for_the_next_unless_disabled(
    words: tuple[str, ...], kept_some: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    small = ["--rounds", "1", "--steps", "1", "--net", "mlp:8,8", "--out", str(tmp_path / "runs")]
    command = [
        sys.executable,
        "-m",
        "feddrift",
        "run",
        "--stream",
        "sine-2",
        "--algorithm",
        "Oblivious",
        *small,
        *words,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "cache" / "feddrift" / "programs").exists() == kept_some


# rows that are stored once


def test_copies_share_a_row_until_one_is_written() -> None:
    models = SHARED_ROWS.store_models(Models({"a": np.array([[1.0, 2.0], [3.0, 4.0]])}, (0, 1)))
    copies = take(models, [1] * 50, range(2, 52))
    everything = join(models, copies)
    leaf = everything.params["a"]
    stack, rows = find_distinct_rows(leaf)
    assert leaf.shape == (52, 2) and len(stack) == 3 and rows[2:].tolist() == [2] * 50
    np.testing.assert_array_equal(leaf, np.concatenate([[[1.0, 2.0]], np.tile([3.0, 4.0], (51, 1))]))
    assert get_params(everything, 51)["a"].tolist() == [3.0, 4.0] and leaf[1:3].tolist() == [[3.0, 4.0]] * 2
    assert find_device(everything.params) is None and move_to_host(everything) is everything
    with pytest.raises(ValueError, match="read-only"):
        get_params(everything, 51)["a"] *= 5
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(models.params["a"])[0] = 5
    leaf[0] = 9.0
    assert leaf.storage is None and models.params["a"][0].tolist() == [1.0, 2.0]


def test_no_rows_of_such_an_array_are_no_copy() -> None:
    models = SHARED_ROWS.store_models(Models({"a": np.ones((2, 3))}, (0, 1)))
    none = take(models, [], [])
    assert none.params["a"].shape == (0, 3) and join(none, take(models, [], [])).params["a"].shape == (0, 3)
    assert "here" not in vars(models.params["a"])


def test_models_without_values_share_one_row() -> None:
    leaf = np.arange(8.0).reshape(4, 2)
    empty = SHARED_ROWS.clear_rows(leaf, np.array([1, 3]))
    np.testing.assert_array_equal(np.isnan(np.asarray(empty)).all(axis=1), [False, True, False, True])
    assert len(empty.stack) == 3 and leaf[1].tolist() == [2.0, 3.0]
    again = SHARED_ROWS.clear_rows(empty, np.array([0, 1, 2, 3]))
    assert len(again.stack) == 1 and np.isnan(np.asarray(again)).all()


def test_a_checkpoint_stores_such_a_row_once(tmp_path: Path) -> None:
    one = SHARED_ROWS.store_models(Models({"a": np.ones((1, 10_000))}, (0,)))
    checkpoint.write(tmp_path / "a.ckpt", {}, take(one, [0] * 100, range(100)))
    assert (tmp_path / "a.ckpt").stat().st_size < 200_000  # one row has 80,000 bytes
    models = checkpoint.read(tmp_path / "a.ckpt").decode({"a": np.zeros(1)})
    assert models.params["a"].shape == (100, 10_000) and (np.asarray(models.params["a"]) == 1).all()


def test_parts_of_equal_models_are_described_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from feddrift.engines.flower import model_parts

    net = fd.mlp(2, (), 2)
    start = SHARED_ROWS.store_models(init_models(net, 0))
    digests: list[Any] = []

    def digest(part: Any) -> str:
        digests.append(part)
        return "0123"

    monkeypatch.setattr(model_parts, "compute_digest", digest)
    specs, found = model_parts.describe_models(net, take(start, [0] * 30, range(1, 31)))
    assert len(digests) == 1 and [spec["head"] for spec in specs] == ["0123"] * 30 and list(found) == ["0123"]
