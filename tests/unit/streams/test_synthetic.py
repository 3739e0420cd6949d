"""The synthetic streams: SINE, CIRCLE and SEA."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from feddrift.errors import ConfigError, DataError
from feddrift.runs.config import RunConfig
from feddrift.streams import STREAMS, default_pattern, is_synthetic, stream, synthetic
from feddrift.types import Floats, Ints, Local

SYNTHETIC = ["sine-2", "circle-2", "sea-2", "sea-4", "sea-2-text", "sea-4-text"]


@pytest.mark.parametrize("name", SYNTHETIC)
def test_shape_and_types(name: str) -> None:
    s = stream(name)
    assert s.name == name
    assert s.family == name.split("-")[0]
    assert (s.n_steps, s.n_clients, s.n_classes) == (10, 10, 2)
    assert (s.counts == 500).all()
    assert s.x.dtype == np.float32
    assert s.y.dtype == np.int32
    assert s.x.shape == (55000, 3 if s.family == "sea" else 2)
    assert s.local == Local(lr=1e-2)


@pytest.mark.parametrize("name", SYNTHETIC)
def test_every_seed_has_the_same_data(name: str) -> None:
    one, two = stream(name, seed=0), stream(name, seed=3)
    np.testing.assert_array_equal(one.x, two.x)
    np.testing.assert_array_equal(one.y, two.y)


@pytest.mark.parametrize("name", [*SYNTHETIC, "sine-2 random"])
def test_a_data_seed_draws_other_rows_of_the_same_kind(name: str) -> None:
    name, _, random = name.partition(" ")
    pattern = "random:every=2,concepts=2" if random else None
    one, two, again = (stream(name, pattern=pattern, data_seed=d) for d in (0, 1, 1))
    assert one.counts.tolist() == two.counts.tolist()
    assert np.isin(one.x[:, 0], two.x[:, 0]).mean() < 0.02  # 24 random bits may be equal by chance
    np.testing.assert_array_equal(two.x, again.x)
    assert one.concepts is not None
    assert two.concepts is not None
    assert (one.concepts == two.concepts).all() == (not random)


def test_a_data_seed_may_follow_the_seed_and_is_recorded_where_it_acts() -> None:
    config = RunConfig.from_values(stream="sine-2", algorithm="Oblivious", seed=3, data_seed="seed")
    loaded = config.load_stream()
    np.testing.assert_array_equal(loaded.x, stream("sine-2", data_seed=3).x)
    assert config.list_overrides(loaded) == {"data_seed": "seed"}
    plain = RunConfig.from_values(stream="sine-2", algorithm="Oblivious", seed=3)
    assert plain.list_overrides(plain.load_stream()) == {}


@pytest.mark.parametrize("value", ["x", -1, 2**32, 1.5, True, None])
def test_a_data_seed_is_a_whole_number_or_seed(value: object) -> None:
    with pytest.raises(ConfigError, match="data_seed must be a whole number from 0 to 4294967295, or seed"):
        RunConfig.from_values(stream="sine-2", algorithm="Oblivious", data_seed=value)


def test_data_that_are_not_drawn_accept_no_data_seed(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("c,t,x,label\na,1,1,0\na,2,2,1\n")
    for name in (str(tmp_path / "t.csv"), f"folder:{tmp_path}", "air-quality"):
        with pytest.raises(ConfigError, match="data_seed must be left out, got 2"):
            stream(name, data_seed=2)
        assert not is_synthetic(name)


def test_constant_predictor_on_circle_scores_as_published() -> None:
    s = stream("circle-2")
    assert s.concepts is not None
    accuracy: Floats = np.array([[s.cell(t + 1, c)[1].mean() for c in range(10)] for t in range(10)])
    stays = s.concepts[:-1] == s.concepts[1:]
    assert stays.sum() == 90
    assert 100 * accuracy[stays].mean() == pytest.approx(86.264, abs=5e-4)
    assert 100 * accuracy.mean() == pytest.approx(85.602, abs=5e-4)


@settings(max_examples=20)
@given(concepts=arrays(np.int64, st.tuples(st.integers(2, 4), st.integers(1, 3)), elements=st.integers(0, 1)))
def test_sine_and_circle_follow_the_released_recipe(concepts: Ints) -> None:
    sine, circle = synthetic.make_sine("sine-2", concepts), synthetic.make_circle("circle-2", concepts)
    draws = np.random.RandomState(0)
    for t, c in np.ndindex(concepts.shape):
        points = draws.uniform(size=1000).reshape(500, 2)
        draws.uniform(size=500)
        for s in (sine, circle):
            np.testing.assert_array_equal(s.cell(t, c)[0], points.astype(np.float32))
        below = [x2 <= np.sin(x1) for x1, x2 in points]
        assert sine.cell(t, c)[1].tolist() == [b != bool(concepts[t, c]) for b in below]
        centre, radius = [(0.2, 0.15), (0.6, 0.25)][concepts[t, c]]
        outside = [(x1 - centre) ** 2 + (x2 - 0.5) ** 2 > radius**2 for x1, x2 in points]
        assert circle.cell(t, c)[1].tolist() == outside


@pytest.mark.parametrize("name", ["sea-4", "sea-4-text"])
def test_sea_labels_follow_the_plane_but_for_one_in_ten(name: str) -> None:
    s = stream(name)
    assert s.concepts is not None
    assert 0 <= s.x.min() < 0.01
    assert 9.99 < s.x.max() < 10
    concept = np.repeat(s.concepts.reshape(-1), 500)
    if name == "sea-4":
        clean = s.x[:, 1] + s.x[:, 2] > np.array([8, 9, 7, 9])[concept]
        area = np.array([0.68, 0.595, 0.755, 0.595])  # of the square where the label is 1
    else:
        clean = s.x[:, 0] + s.x[:, 1] <= np.array([9, 8, 7, 9.5])[concept]
        area = np.array([0.405, 0.32, 0.245, 0.45125])
    for k in range(4):
        flipped = (clean != s.y)[concept == k]
        assert flipped.mean() == pytest.approx(0.1, abs=0.012)
        assert s.y[concept == k].mean() == pytest.approx(0.1 + 0.8 * area[k], abs=0.02)
    boundary = np.abs(s.x[:, 1] + s.x[:, 2] - 9) < 1
    assert (clean != s.y)[boundary].mean() == pytest.approx(0.1, abs=0.012)  # flips know nothing of x


def test_sea_flips_do_not_reuse_the_draws_of_the_features() -> None:
    s = stream("sea-2")  # concepts 0 and 1
    assert s.concepts is not None
    x = s.x.reshape(110, 1500)
    theta = np.repeat(8 + s.concepts.reshape(-1), 500)
    flipped = ((s.x[:, 1] + s.x[:, 2] > theta) != s.y).reshape(110, 500)
    for draws in (x[:, :500], x[:, 500:1000], x[:, 1000:]):
        assert draws[flipped].mean() == pytest.approx(5, abs=0.2)


def test_sea_cells_are_fresh_draws() -> None:
    s = stream("sea-4")
    assert len(np.unique(s.x, axis=0)) > 54990


def test_only_the_released_sea_has_two_equal_concepts() -> None:
    assert {name: dict(stream(name).same) for name in SYNTHETIC if stream(name).same} == {
        "sea-2": {3: 1},
        "sea-4": {3: 1},
    }


def test_default_patterns_are_the_papers() -> None:
    assert {name: default_pattern(name) for name, entry in STREAMS.items() if entry.pattern} == {
        "sine-2": "Y", "circle-2": "Y", "sea-2": "Y", "sea-4": "F", "sea-2-text": "Y", "sea-4-text": "F",
        "mnist-2": "Y", "mnist-4": "F", "mnist-r": "R0", "mnist-l-4": "F",
    }  # fmt: skip
    assert [default_pattern("mnist-r", seed) for seed in (1, 4, 5, 11)] == ["R1", "R4", "R0", "R1"]


def test_pattern_and_seed_reach_the_stream() -> None:
    spec = "random:every=2,concepts=2,clients=3,steps=6"
    one, two = stream("sine-2", pattern=spec, seed=1), stream("sine-2", pattern=spec, seed=2)
    assert one.concepts is not None
    assert two.concepts is not None
    assert one.counts.shape == (7, 3)
    assert (one.concepts != two.concepts).any()
    np.testing.assert_array_equal(one.x, two.x)


def test_every_stream_has_a_summary() -> None:
    for entry in STREAMS.values():
        assert 10 < len(entry.summary) < 80
        assert "\n" not in entry.summary


def test_concepts_beyond_the_dataset() -> None:
    with pytest.raises(ConfigError, match=r"^pattern F uses concept 3, but sine has concepts 0 and 1$"):
        stream("sine-2", pattern="F")
    with pytest.raises(ConfigError, match="uses concept 2, but circle has concepts 0 and 1"):
        stream("circle-2", pattern="random:every=1,concepts=3")
    with pytest.raises(ConfigError, match=r"but sea has concepts 0 to 3$"):
        stream("sea-4", pattern="random:every=1,concepts=50")


@pytest.mark.parametrize("call", [stream, default_pattern])
def test_unknown_name(call: object) -> None:
    assert callable(call)
    with pytest.raises(ConfigError, match=r"unknown stream 'sin-2', did you mean 'sine-2'\? .*fmow-labels.*folder:DIR"):
        call("sin-2")


def test_label_is_for_folders_only() -> None:
    with pytest.raises(ConfigError, match=r"label names a column of your own files.* for sine-2, got 'target'"):
        stream("sine-2", label="target")


def test_bad_pattern_is_reported_before_data_are_read() -> None:
    with pytest.raises(ConfigError, match="unknown pattern 'Z'"):
        stream("mnist-4", pattern="Z", data_dir="no-such-directory")
    with pytest.raises(DataError, match="no-such-directory"):
        stream("mnist-4", data_dir="no-such-directory")
