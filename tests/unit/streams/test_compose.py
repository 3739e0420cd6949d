"""Composed streams: recipes, their effect on the base data, and the named recipes."""

from __future__ import annotations

import json
import os
import pickle
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import feddrift as fd
from feddrift import rng, streams
from feddrift.errors import ConfigError, DataError, FeddriftError
from feddrift.runs.config import RunConfig
from feddrift.streams import bases, components, is_synthetic, maps, mnist, stream
from feddrift.streams.compose import compose_stream, draw_class_counts
from feddrift.streams.composed import COMPOSED
from feddrift.streams.maps import MAP_FORMS
from feddrift.streams.patterns import build_pattern
from feddrift.streams.recipe import OPTIONS, Recipe, read_recipe

SIDE = 6
N = 7000  # pictures of the made-up base; picture i has class i % 10 and is known by its last three pixels


def pictures() -> npt.NDArray[np.uint8]:
    pixels = np.random.default_rng(0).integers(0, 256, (N, SIDE * SIDE)).astype(np.uint8)
    number = np.arange(N)
    pixels[:, -2], pixels[:, -1] = number // 256, number % 256
    return pixels


PIXELS = pictures()
WHOLE = PIXELS.reshape(N, SIDE, SIDE) / np.float32(255)


@pytest.fixture(autouse=True)
def made_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def load(data_dir: object = None) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        return PIXELS, (np.arange(N) % 10).astype(np.uint8)

    monkeypatch.setattr(mnist, "load_mnist", load)
    monkeypatch.setattr(bases, "load_fashion", load)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def list_picture_numbers(x: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Which pictures these are, where nothing was done to them."""
    last = np.rint(x.reshape(len(x), -1)[:, -2:] * 255).astype(np.int64)
    return np.asarray(256 * last[:, 0] + last[:, 1])


def truth(name: str, **options: Any) -> npt.NDArray[np.int64]:
    concepts = stream(name, **options).concepts
    assert concepts is not None
    return concepts


def make_recipe(**keys: Any) -> Recipe:
    usual: dict[str, Any] = {"base": "mnist", "concepts": ["keep"], "pattern": ["00", "00", "00"], "rows": 20}
    return Recipe(**usual | keys)


def make_stream(data_seed: int = 0, **keys: Any) -> fd.Stream:
    recipe = make_recipe(**keys)
    return compose_stream(recipe, "made", recipe.build_concept_ids(0, data_seed), data_seed=data_seed)


def test_swaps_come_when_they_should() -> None:
    group = np.array([1, 1, 1, 2, 2, 2, 3, 3, 3, 3] * 2)
    for name, starts, end in (
        ("sudden", (10, 10, 10), 99),
        ("recurrent", (10, 10, 10), 15),
        ("incremental", (10, 11, 12), 99),
    ):
        concepts = truth(f"fashion-swap-{name}")
        assert concepts.shape == (21, 20)
        for t in range(21):
            expected = [k if starts[k - 1] <= t < end else 0 for k in group.tolist()]
            assert concepts[t].tolist() == expected, (name, t)


def test_swaps_exchange_labels_and_clients_keep_their_shares() -> None:
    s = stream("fashion-swap-sudden:rows=15,shares=dirichlet(0.5,1)")
    concepts = truth("fashion-swap-sudden:rows=15,shares=dirichlet(0.5,1)")
    swaps = {0: (0, 0), 1: (1, 2), 2: (3, 4), 3: (5, 6)}
    seen = []
    for t, c in np.ndindex(s.counts.shape):
        x, y = s.cell(t, c)
        classes = list_picture_numbers(x) % 10
        a, b = swaps[int(concepts[t, c])]
        assert y.tolist() == [b if k == a else a if k == b else k for k in classes.tolist()]
        np.testing.assert_array_equal(
            np.bincount(classes, minlength=10), np.bincount(list_picture_numbers(s.cell(0, c)[0]) % 10)
        )
        seen += list_picture_numbers(x).tolist()
    assert len(set(seen)) == len(seen) == 20 * 21 * 15  # 630 of a class are needed, 700 are there
    assert (s.counts == s.counts[0]).all() and len(set(s.counts[0].tolist())) > 5


def test_dirichlet_shares() -> None:
    even, odd = draw_class_counts(150, 20, 10, 1e6, 2), draw_class_counts(150, 20, 10, 0.1, 2)
    for counts in (even, odd):
        assert counts.shape == (20, 10) and (counts.sum(axis=0) == 300).all() and counts.min() >= 2
    assert np.abs(even - 15).max() <= 1 and (odd == 2).mean() > 0.4
    assert (odd != draw_class_counts(150, 20, 10, 0.1, 2, data_seed=1)).any()
    assert draw_class_counts(7, 3, 10, 0.5, 0).sum() == 21  # does not divide evenly


def test_shares_are_from_the_dirichlet_distribution() -> None:
    draws = np.concatenate([draw_class_counts(10_000, 4, 10, 0.5, 0, data_seed=k).T / 4000 for k in range(300)])
    assert draws.mean() == pytest.approx(0.25)
    assert draws.var() == pytest.approx(0.25 * 0.75 / (4 * 0.5 + 1), rel=0.05)  # of Dir(1/2, 1/2, 1/2, 1/2)


PUBLISHED = {
    1: "0000000000/0000000000/0000011111/0000011111/0000011111/2222211111/2222211111/2222211111/2220000011/2220000011",
    2: "0000000000/0000000000/0001111000/0001111000/0001111000/2222211000/2222211000/2222211000/0001100011/0001100011",
    3: "0000000000/0000000000/0011112222/0011112222/0011112220/1222221110/1222221110/1222221110/0002222111/0002222111",
    4: "0000000000/0000000000/3334440000/3334442211/3334442211/2222112211/2222110003/4443330003/4443331112/4443331112",
    5: "0000000000/0000000000/1112223300/1112223333/1121441122/3321441122/4441422333/4442222333/1133322122/1133322122",
}


@pytest.mark.parametrize("k", PUBLISHED)
def test_patterns_of_groups_are_the_published_ones(k: int) -> None:
    rows = [[int(digit) for digit in row] for row in PUBLISHED[k].split("/")]
    assert len(rows) == 10 and truth(f"mnist-g-{k}:rows=10").tolist() == rows


def test_only_group_0_is_negated_turned_and_swapped() -> None:
    s = stream("mnist-g-4:rows=60")
    assert s.group is not None and s.concepts is not None and s.n_steps == 9
    for t, c in np.ndindex(s.counts.shape):
        x, y, group = *s.cell(t, c), s.group[s.rows(t, c)]
        assert np.bincount(group).tolist() == [6, 54]
        assert (y[group == 1] == list_picture_numbers(x[group == 1]) % 10).all()
        upright = -np.rot90(x[group == 0].reshape(-1, SIDE, SIDE), -1, axes=(1, 2))
        which = list_picture_numbers(upright)
        np.testing.assert_array_equal(upright, WHOLE[which])  # to the bit
        j = int(s.concepts[t, c])
        swap = {j: j + 1, j + 1: j} if j else {}
        assert y[group == 0].tolist() == [swap.get(k, k) for k in (which % 10).tolist()]
    assert np.bincount(stream("mnist-g-1:rows=60,group_share=0.05").group).tolist() == [300, 5700]  # type: ignore[arg-type]


def test_digits_turn_to_the_bit() -> None:
    s = stream("digits-turn:rows=20")
    assert s.concepts is not None and (s.concepts == build_pattern("F")).all()
    for t, c in np.ndindex(s.counts.shape):
        x, y = s.cell(t, c)
        upright = np.rot90(x.reshape(-1, SIDE, SIDE), -int(s.concepts[t, c]), axes=(1, 2))
        np.testing.assert_array_equal(upright, WHOLE[list_picture_numbers(upright)])
        assert (y == list_picture_numbers(upright) % 10).all()
    often = stream("digits-turn:rows=1", pattern="random:every=1,concepts=4,clients=3,steps=5")
    assert often.counts.shape == (6, 3)


def test_turns_are_against_the_clock() -> None:
    ink = np.array([[[0, 1], [0, 0]]], dtype=np.float32)  # at the top right
    base = bases.Base(np.zeros((1, 2, 2), dtype=np.uint8), np.zeros(1, dtype=np.int64), 10)
    for degrees, turned in ((90, [[1, 0], [0, 0]]), (180, [[0, 0], [1, 0]]), (270, [[0, 0], [0, 1]])):
        one = maps.parse_maps(f"turn({degrees})", "mnist", 10)
        x, _ = maps.apply_maps(one, ink, np.zeros(1, dtype=np.int64), base, lambda i: rng.derive_key(0, "data", i))
        assert x[0].tolist() == turned


def test_each_client_is_shown_a_pair_of_digits() -> None:
    s = stream("digits-shown")
    pairs: dict[int, set[int]] = {}
    for (t, c), k in np.ndenumerate(truth("digits-shown").astype(object)):
        x, y = s.cell(t, c)
        assert (y == list_picture_numbers(x) % 10).all() and len(y) == 500
        assert pairs.setdefault(k, set(y.tolist())) == set(y.tolist())
    assert sorted(pairs) == list(range(6)) and len({frozenset(pair) for pair in pairs.values()}) == 6
    assert all(len(pair) == 2 for pair in pairs.values())
    assert len(set(truth("digits-shown")[0].tolist())) > 1  # also at the first step
    other = stream("digits-shown", data_seed=1)
    assert (truth("digits-shown", data_seed=1) != truth("digits-shown")).any() and (other.y != s.y).any()


def test_four_label_maps_while_all_pictures_turn() -> None:
    s = stream("fashion-maps:rows=10")
    assert s.concepts is not None and s.counts.shape == (7, 60)
    sizes = [np.bincount(row).tolist() for row in s.concepts]
    assert sizes == [[30, 30], [20, 20, 20], *[[15, 15, 15, 15]] * 5]
    assert (s.concepts[2] != s.concepts[3]).any() and (s.concepts[5] == s.concepts[6]).all()
    for t, turn in enumerate((0, 90, 180, 0, 90, 180, 180)):
        for c in range(60):
            x, y = s.cell(t, c)
            upright = np.rot90(x.reshape(-1, SIDE, SIDE), -(turn // 90), axes=(1, 2))
            classes = list_picture_numbers(upright) % 10
            np.testing.assert_array_equal(upright, WHOLE[list_picture_numbers(upright)])
            k = s.concepts[t, c]
            assert (y == [classes, 9 - classes, (classes + 1) % 10, (classes + 2) % 10][k]).all()


def test_concepts_that_mean_the_same_are_one_however_they_are_written() -> None:
    concepts = ["keep", "swap(1, 2)", "turn(0) add(0)", "swap(2,1) keep", "turn(90)", "swap(1,2) turn(90.0)"]
    assert make_stream(concepts=concepts, pattern=["01", "23", "45"]).same == {2: 0, 3: 1}


def compute_clean_labels(x: npt.NDArray[np.float32], concept: int | npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    return np.asarray(x[:, 1] + x[:, 2] > np.array([8, 9, 7, 9])[concept])


def test_drifts_of_sea_4_mixed_come_row_by_row() -> None:
    s = stream("sea-4-mixed")
    assert s.concepts is not None and s.counts.shape == (21, 10) and (s.counts == 250).all()
    assert (s.concepts[:-1] == np.repeat(build_pattern("F")[:10], 2, axis=0)).all() and s.same == {3: 1}
    changes = np.argwhere(s.concepts[1:] != s.concepts[:-1]) + [1, 0]
    assert set(changes[:, 0] % 2) == {0}
    told = np.zeros((2, 5))  # rows whose label says which of two planes, by fifths of the cell: all, of the new one
    for t, c in changes:
        x, y = s.cell(t, c)
        new, old = (compute_clean_labels(x, int(k)) for k in (s.concepts[t, c], s.concepts[t - 1, c]))
        for fifth in range(5):
            differ = np.flatnonzero(new != old)
            differ = differ[differ // 50 == fifth]
            told[:, fifth] += len(differ), (y[differ] == new[differ]).sum()
    rising = (told[1] / told[0] - 0.1) / 0.8  # a tenth of the labels is flipped
    np.testing.assert_allclose(rising, [0.1, 0.3, 0.5, 0.7, 0.9], atol=0.12)
    steady = np.repeat(np.vstack([np.ones((1, 10), bool), s.concepts[1:] == s.concepts[:-1]]).reshape(-1), 250)
    flipped = (compute_clean_labels(s.x, np.repeat(s.concepts.reshape(-1), 250)) != s.y)[steady]
    assert flipped.mean() == pytest.approx(0.1, abs=0.01)


def test_bursts_are_noise_and_no_drift() -> None:
    s = stream("sea-4-burst")
    assert s.concepts is not None and (s.concepts == build_pattern("F")).all()
    flipped = (compute_clean_labels(s.x, np.repeat(s.concepts.reshape(-1), 500)) != s.y).reshape(110, 500).mean(axis=1)
    noisy = np.sort(flipped)[::-1]
    assert (noisy[:6] > 0.2).all() and (noisy[6:] < 0.16).all()  # 5 % of 110 cells
    assert noisy[:6].mean() == pytest.approx(0.6 * 0.1 + 0.4 * 0.5, abs=0.04)
    assert (stream("sea-4-burst", data_seed=3).x != s.x).any()


def test_fixed_rows_are_repeated_with_the_labels_of_the_step() -> None:
    s = stream("fashion-swap-incremental:fixed=true,rows=30")
    for c in range(20):
        first = list_picture_numbers(s.cell(0, c)[0])
        for t in range(20):
            np.testing.assert_array_equal(list_picture_numbers(s.cell(t, c)[0]), first)
        assert (s.cell(9, c)[1] == first % 10).all() and (s.cell(19, c)[1] != first % 10).any()
        assert not set(list_picture_numbers(s.cell(20, c)[0]).tolist()) & set(
            first.tolist()
        )  # the last one tests on others
    assert stream("fashion-swap-incremental:fixed=false,rows=30").name.endswith(":fixed=false,rows=30")


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPOSED)
def test_every_name_is_the_same_each_time_and_another_with_another_data_seed(name: str) -> None:
    small = f"{name}:rows=20"
    one, again, other = stream(small), stream(small, seed=5), stream(small, data_seed=7)
    for field in ("x", "y", "counts", "concepts", "group"):
        np.testing.assert_array_equal(getattr(one, field), getattr(again, field))
    assert one.x.shape == other.x.shape or name.startswith("fashion-swap")
    assert one.x[:100].tolist() != other.x[:100].tolist()
    assert is_synthetic(name) and is_synthetic(small) and streams.is_in_catalogue(small)
    streams.check_name(small)
    summary = streams.list_summaries()[name]
    assert 10 < len(summary) < 80 and "\n" not in summary


def test_random_patterns_of_a_composed_stream_have_its_clients_and_steps() -> None:
    s = stream("fashion-swap-sudden:rows=20", pattern="random:every=2,concepts=4")
    assert s.counts.shape == (21, 20)
    with pytest.raises(ConfigError, match=r"random:every=1,concepts=9 uses concept 8, but there are 4 concepts"):
        stream("digits-turn", pattern="random:every=1,concepts=9")
    assert make_recipe(pattern="random:every=1,concepts=1", clients=3, steps=4).build_concept_ids(0, 0).shape == (5, 3)
    assert (
        make_recipe(pattern="R", concepts=["keep"] * 4).build_concept_ids(7, 0).tolist() == build_pattern("R2").tolist()
    )


def test_components_are_those_of_all_pictures() -> None:
    s = stream("digits-turn:components=5")
    x = PIXELS / np.float64(255) - PIXELS.mean(axis=0) / 255
    variance, axes = np.linalg.eigh(x.T @ x / N)
    cell = s.concepts[0, 0] == 0 and s.cell(0, 0)  # type: ignore[index]
    full = stream("digits-turn").cell(0, 0)[0]
    expected = x[list_picture_numbers(full)] @ axes[:, ::-1][:, :5] / np.sqrt(variance[-1])
    np.testing.assert_allclose(np.abs(cell[0]), np.abs(expected), atol=1e-4)
    assert (s.net, s.local.rounds, s.local.lr) == ("mlp:28", 20, 1e-2)
    assert fd.stream("digits-turn").local.lr == 1e-3
    net = RunConfig.from_values(stream="digits-turn:components=5").find_net(s)
    assert net is fd.mlp(5, 28, 10)
    assert RunConfig.from_values(stream="digits-turn:components=5", net="linear").find_net(s) is fd.mlp(5, (), 10)
    with pytest.raises(ConfigError, match="components must be at most 36, got 37"):
        stream("digits-turn:components=37")


def test_components_are_kept_and_a_broken_file_is_no_harm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = stream("digits-turn:components=5,rows=9")
    (kept,) = (tmp_path / "cache").rglob("*.npy")
    with monkeypatch.context() as patch:
        patch.setattr(components, "_compute_components", None)  # it is not called again
        np.testing.assert_array_equal(stream("digits-turn:components=5,rows=9").x, first.x)
    kept.write_bytes(kept.read_bytes()[:50])
    np.testing.assert_array_equal(stream("digits-turn:components=5,rows=9").x, first.x)
    kept.parent.chmod(0o500)
    monkeypatch.setattr(components, "atomic_write", refuse_to_write)
    np.testing.assert_array_equal(stream("digits-turn:components=6,rows=9").y, first.y)


def refuse_to_write(path: Path, data: bytes) -> None:
    raise DataError(f"cannot write {path}")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("keep", lambda k: k),
        ("swap(1,2)", lambda k: {1: 2, 2: 1}.get(k, k)),
        ("reverse", lambda k: 9 - k),
        ("add(3)", lambda k: (k + 3) % 10),
        ("swap( 1 , 2 )  add(1)", lambda k: {1: 3, 2: 2}.get(k, (k + 1) % 10)),
    ],
)
def test_maps_of_labels(text: str, told: Any) -> None:
    s = make_stream(concepts=[text])
    assert s.y.tolist() == [told(k) for k in (list_picture_numbers(s.x) % 10).tolist()]


def test_noise_replaces_labels_by_random_ones() -> None:
    s = make_stream(concepts=["noise(0.4)"], rows=1000)
    wrong = s.y != list_picture_numbers(s.x) % 10
    assert wrong.mean() == pytest.approx(0.4 * 0.9, abs=0.02)
    assert np.bincount(s.y[wrong]).min() > 150


def test_a_concept_of_some_classes_has_rows_of_these_only() -> None:
    s = make_stream(concepts=["show(1,2,7) add(1)"], rows=100)
    assert set(s.y.tolist()) == {2, 3, 8} and set((list_picture_numbers(s.x) % 10).tolist()) == {1, 2, 7}


@pytest.mark.parametrize("kind", ["shot", "blur", "brightness", "stripes"])
def test_worse_corruption_is_further_from_the_picture(kind: str) -> None:
    plain = make_stream()
    far = []
    for severity in (1, 3, 5):
        s = make_stream(concepts=[f"corrupt({kind},{severity})"])
        assert (s.y == plain.y).all() and s.x.min() >= -1 and s.x.max() <= 1
        far.append(np.abs(s.x - plain.x).mean())
    assert 0.01 < far[0] < far[1] < far[2]
    np.testing.assert_array_equal(
        make_stream(concepts=["corrupt(shot,1)"]).x, make_stream(concepts=["corrupt(shot,1)"]).x
    )


def test_blur_is_the_mean_of_neighbours() -> None:
    s = make_stream(concepts=["corrupt(blur,1)"])
    x = np.pad(WHOLE[list_picture_numbers(make_stream().x)], ((0, 0), (1, 1), (1, 1)), mode="edge")
    boxes = np.mean([x[:, i : i + SIDE, j : j + SIDE] for i in range(3) for j in range(3)], axis=0)
    np.testing.assert_allclose(s.x.reshape(-1, SIDE, SIDE), boxes, atol=1e-6)


def test_keys_options_and_maps_are_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "streams.md").read_text()
    rows = dict(re.findall(r"^\| `(.+?)` \| (.*) \|$", page, re.M))
    described = {key: field.description for key, field in Recipe.model_fields.items()} | MAP_FORMS
    assert {key: rows.get(key) for key in described} == described
    assert {key.partition("=")[0] for key in rows if re.match(r"\w+=", key)} == set(OPTIONS)
    named = {name for name in COMPOSED if f"`{name}`" in page}
    assert named == set(COMPOSED) - {"mnist-g-2", "mnist-g-3", "mnist-g-4"}


BAD = [
    ({"base": "mnits"}, "base must be 'mnist'"),
    ({"bases": 1}, "unknown key 'bases', did you mean 'base'"),
    ({"concepts": []}, "concepts must have at least 1 value, got 0"),
    ({"concepts": ["swop(1,2)"]}, "unknown map 'swop' (one of: keep, swap(a,b), reverse"),
    ({"concepts": ["swap(1)"]}, r"expected swap(a,b) (exchanges the labels of classes a and b; classes are 0 to 9)"),
    ({"concepts": ["swap(1,1)"]}, "got 'swap(1,1)'"),
    ({"concepts": ["swap(1,12)"]}, "classes are 0 to 9"),
    ({"concepts": ["turn(45)"]}, "turns pictures by 0, 90, 180 or 270 degrees, counterclockwise), got 'turn(45)'"),
    ({"concepts": ["add(x)"]}, "expected add(j)"),
    ({"concepts": ["noise(nan)"]}, "expected noise(p)"),
    ({"concepts": ["noise(1.5)"]}, "got 'noise(1.5)'"),
    ({"concepts": ["corrupt(fog,2)"]}, "shot, blur, brightness, stripes"),
    ({"concepts": ["corrupt(blur,9)"]}, "of severity s from 1 to 5"),
    ({"concepts": ["corrupt"]}, "expected corrupt(kind,s)"),
    ({"concepts": ["keep(1)"]}, "expected keep"),
    ({"concepts": ["show()"]}, "expected show(a,b,...)"),
    ({"concepts": [""]}, "a concept is one map or several, such as swap(1,2) or negate turn(90), got ''"),
    ({"concepts": ["swap(1,2"]}, "a concept is one map or several"),
    ({"concepts": ["plane(8)"]}, "plane is for the points of the base sea, and mnist has pictures"),
    ({"concepts": ["show(1) show(2)"]}, "a concept may have only one show"),
    ({"concepts": [3]}, "concepts.0 must be text, got 3"),
    ({"base": "sea"}, "each concept of the base sea needs a plane, such as plane(8)"),
    ({"base": "sea", "concepts": ["plane(8) turn(90)"]}, "turn is for pictures, and the base sea has points"),
    ({"base": "sea", "concepts": ["plane(8)"], "components": 2}, "the base sea has no pictures"),
    ({"group_map": "turn(90)"}, "group_map needs a group_share above 0"),
    ({"group_share": 2}, "group_share must be at most 1, got 2"),
    ({"burst_map": "show(1,2)"}, "show and plane are maps for concepts only"),
    ({"over_time": ["sideways"]}, "unknown map 'sideways'"),
    ({"shares": "odd"}, "shares must be even or dirichlet(alpha,least)"),
    ({"shares": "dirichlet(0,2)"}, "with alpha from 0.01"),
    ({"shares": "dirichlet(0.5,60)"}, "60 rows of each of 10 classes must fit into a cell, got rows = 20"),
    ({"shares": "dirichlet(0.5,1)", "concepts": ["show(1,2)"]}, "shares must be even and fixed false"),
    ({"fixed": True, "concepts": ["show(1,2)"]}, "shares must be even and fixed false"),
    ({"rows": 0}, "rows must be at least 1, got 0"),
    ({"rows": True}, "rows must be a number, got True"),
    ({"pattern": "Z"}, "unknown pattern 'Z'"),
    ({"pattern": "F"}, "the pattern F uses concept 3, but there are 1 concepts"),
    ({"pattern": "random:every=0,concepts=1"}, "every must be a whole number from 1, got '0'"),
    ({"pattern": ["00"]}, "at least 2, one to train and one to test"),
    ({"pattern": ["00", "0"]}, "all of one length"),
    ({"pattern": ["0a", "00"]}, "concepts are whole numbers from 0"),
    ({"pattern": [[0, -1], [0, 0]]}, "concepts are whole numbers from 0"),
    ({"pattern": 7}, "expected a name, random:..., or rows of concepts"),
    ({"pattern": ["01", "00"]}, "the pattern in rows uses concept 1, but there are 1 concepts"),
    ({"clients": 3}, "clients must be left out or 2 as in the pattern, got 3"),
    ({"steps": 9}, "steps must be left out or 2 as in the pattern, got 9"),
    ({"lr": -1}, "lr must be above 0, got -1"),
]


@pytest.mark.parametrize(("change", "why"), BAD, ids=[str(change) for change, _ in BAD])
def test_a_bad_file_gets_one_sentence(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    good = {"base": "mnist", "concepts": ["keep"], "pattern": ["00", "00", "00"], "rows": 20}
    path = tmp_path / "mine.toml"
    path.write_text("\n".join(f"{key} = {json.dumps(value)}" for key, value in (good | change).items()))
    for call in (stream, streams.check_name):
        with pytest.raises(ConfigError) as caught:
            call(str(path))
        message = str(caught.value)
        assert message.startswith(f"{path}: ") and why in message and "\n" not in message, message


def test_invalid_recipes(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    with pytest.raises(DataError, match=r"mine.toml cannot be read as TOML: No such file"):
        stream(str(path))
    for content in (b"base = ", b"\xff\xfe\x00"):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"mine.toml cannot be read as TOML"):
            stream(str(path))
    path.write_text('base = "mnist"\nconcepts = ["keep"]')
    with pytest.raises(ConfigError, match=r"mine.toml: pattern is missing"):
        stream(str(path))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("digits-turn:component=32", "unknown option of digits-turn 'component', did you mean 'components'?"),
        ("digits-turn:", "unknown option of digits-turn ''"),
        ("digits-turn:rows", "options of digits-turn are KEY=VALUE, each once, such as components=32, got 'rows'"),
        ("digits-turn:rows=2,rows=3", "each once"),
        ("digits-turn:rows=two", "digits-turn:rows=two: rows must be a whole number"),
        ("sea-4-burst:components=2", "the base sea has no pictures"),
        ("digits-trun", "unknown stream 'digits-trun', did you mean 'digits-turn'?"),
    ],
)
def test_a_bad_option_gets_one_sentence(name: str, why: str) -> None:
    for call in (stream, streams.check_name):
        with pytest.raises(ConfigError, match=re.escape(why)):
            call(name)


MINE = """
base = "fashion"
components = 4
shares = "dirichlet(0.5,1)"
concepts = ["keep", "swap(1,2)"]
pattern = ["000", "000", "011", "011"]
rows = 30
rounds = 2
"""


def test_a_recipe_of_your_own_runs_and_is_known_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(MINE)
    s = stream("mine.toml")
    assert (s.name, s.n_clients, s.n_steps, s.features, s.local.rounds) == ("mine.toml", 3, 3, (4,), 2)
    first = fd.record("mine.toml", "Oblivious", out="runs", data_seed=1)
    second = fd.record("mine.toml", "Oblivious", out="runs", data_seed=2)
    assert first.header["overrides"]["data"] == second.header["overrides"]["data"]  # other rows of one recipe
    assert first.rows.accuracy.tolist() != second.rows.accuracy.tolist()
    Path("mine.toml").write_text(f"# {MINE}".replace("# \n", "# a remark\n"))
    assert streams.hash_recipe("mine.toml") == first.header["overrides"]["data"]
    Path("mine.toml").write_text(MINE.replace("rows = 30", "rows = 31"))
    assert streams.hash_recipe("mine.toml") != first.header["overrides"]["data"]
    other = stream("mine.toml", pattern="random:every=1,concepts=2")
    assert other.counts.shape == (4, 3)
    for option in ({"label": "sold"}, {"client": "shop"}):
        with pytest.raises(ConfigError, match=r"must be left out for mine.toml"):
            stream("mine.toml", **option)  # type: ignore[arg-type]


def test_a_recipe_in_a_sweep_and_a_name_with_options(tmp_path: Path) -> None:
    from feddrift.runs.sweep import read_grid

    (tmp_path / "mine.toml").write_text(MINE)
    grid = tmp_path / "grid.toml"
    names = [str(tmp_path / "mine.toml"), "digits-turn:components=32", "digits-turn"]
    grid.write_text(
        f'[[runs]]\nstream = {json.dumps(names)}\nalgorithm = "Oblivious"\ndata_seed = "seed"\nseeds = "0-1"'
    )
    configs = read_grid(grid)
    assert [config.stream for config in configs] == [name for name in names for _ in range(2)]
    grid.write_text('[[runs]]\nstream = "digits-turn:turns=3"')
    with pytest.raises(ConfigError, match="runs 1: unknown option of digits-turn 'turns'"):
        read_grid(grid)


def test_records_of_composed_streams_contain_differences_only() -> None:
    config = RunConfig.from_values(stream="digits-turn:rows=20,components=4", algorithm="Oblivious", pattern="F")
    assert config.list_overrides(config.load_stream()) == {}
    config = RunConfig.from_values(stream="digits-turn:rows=20", algorithm="Oblivious", pattern="Y", data_seed="seed")
    assert config.list_overrides(config.load_stream()) == {"pattern": "Y", "data_seed": "seed"}


def test_a_composed_stream_never_grows(tmp_path: Path) -> None:
    fd.record("sea-4-burst:rows=20", "Oblivious", out=tmp_path, rounds=1)
    with pytest.raises(DataError, match=r"sea-4-burst:rows=20 always has the same 10 time steps \+ 1 to test"):
        fd.update(tmp_path)


@pytest.mark.parametrize(("base", "concept"), [("sea", "plane(8)"), ("mnist", "add(1)")])
def test_a_recipe_that_has_become_longer_begins_as_before(base: str, concept: str) -> None:
    short = make_stream(base=base, concepts=[concept], pattern=["00", "00"])
    long = make_stream(base=base, concepts=[concept], pattern=["00", "00", "00"])
    np.testing.assert_array_equal(long.x[: len(short.x)], short.x)
    np.testing.assert_array_equal(long.y[: len(short.y)], short.y)


def test_no_setting_is_chosen_for_a_composed_stream() -> None:
    s = stream("sea-4-burst:rows=20")
    for name in ("FedDrift", "FedDrift-Eager", "FedDrift-Trunk"):
        why = f"{name} needs a delta for sea-4-burst:rows=20, such as delta=0.05, or test=two-sample, which needs none"
        with pytest.raises(ConfigError, match=why):
            fd.algorithm(name, s)
        assert fd.algorithm(name, s, delta=0.2).delta == 0.2  # type: ignore[attr-defined]
        assert fd.algorithm(name, s, test="two-sample")
    with pytest.raises(ConfigError, match=r"DriftSurf needs a delta for .*=0.05: no published value is known"):
        fd.algorithm("DriftSurf", s)
    assert fd.algorithm("IFCA", s).n_models == 4  # type: ignore[attr-defined]
    assert fd.algorithm("FedDrift-Auto", s)


def batch(path: Path, n: int, first: int) -> None:
    """A file as CIFAR-10's python version has it: red, green and blue planes, row by row."""
    data = np.zeros((n, 3, 32, 32), dtype=np.uint8)
    data[:, 0, 0, 1], data[:, 1, 2, 3], data[:, 2, 31, 0] = np.arange(first, first + n), 7, 9
    labels = [(first + k) % 10 for k in range(n)]
    content = {b"batch_label": b"a", b"labels": labels, b"data": data.reshape(n, -1), b"filenames": [b"x.png"] * n}
    path.write_bytes(pickle.dumps(content, protocol=2))


def test_cifar10_from_its_python_version(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    with pytest.raises(DataError, match=r"CIFAR-10 is incomplete: put data_batch_1, .*, test_batch of its python"):
        bases.load_cifar10(tmp_path)
    folder.mkdir()
    for k, file in enumerate(bases.CIFAR_FILES):
        batch(folder / file, 20, 20 * k)
    pixels, labels = bases.load_cifar10(tmp_path)
    assert pixels.shape == (120, 32, 32, 3) and labels.tolist() == [k % 10 for k in range(120)]
    assert pixels[:, 0, 1, 0].tolist() == list(range(120)) and (pixels[:, 2, 3] == [0, 7, 0]).all()
    assert (pixels[:, 31, 0] == [0, 0, 9]).all()
    recipe = make_recipe(base="cifar10", concepts=["turn(180)"])
    s = compose_stream(recipe, "c", recipe.build_concept_ids(0, 0), tmp_path)
    upright = np.rot90(s.x.reshape(-1, 32, 32, 3), 2, axes=(1, 2))
    assert s.n_classes == 10 and (np.rint(255 * upright[:, 0, 1, 0]) % 10 == s.y).all()


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch evil",)


def test_a_file_that_is_no_batch_of_cifar10_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for k, file in enumerate(bases.CIFAR_FILES):
        batch(folder / file, 20, 20 * k)
    small = {b"data": np.zeros((2, 5), dtype=np.uint8), b"labels": [0, 1]}
    for content in (pickle.dumps(Evil()), b"nothing", pickle.dumps({b"data": 3}), pickle.dumps(small, protocol=2)):
        (folder / "data_batch_3").write_bytes(content)
        with pytest.raises(DataError, match=r"data_batch_3 is not .*CIFAR-10"):
            bases.load_cifar10(tmp_path)
    assert not Path("evil").exists()


def test_groups_go_with_their_rows() -> None:
    from feddrift.runs.stream_fingerprint import StreamFingerprint, hash_stream, reorder_clients

    x, y = np.arange(8.0).reshape(4, 2), [0, 1, 1, 0]
    cells: Any = [[(x, y), (x[:2], y[:2])], [None, (x[:1], y[:1])]]
    groups: Any = [[[0, 0, 1, 2], [3, 4]], [None, [5]]]
    s = fd.Stream.from_arrays(cells, groups=groups, clients=["a", "b"])
    assert s.group is not None and s.group.tolist() == [0, 0, 1, 2, 3, 4, 5]
    turned = reorder_clients(s, ["b", "a"])
    assert turned.group is not None and turned.group.tolist() == [3, 4, 0, 0, 1, 2, 5]
    plain = replace(s, group=None)
    assert (
        hash_stream(plain) != hash_stream(s)
        and StreamFingerprint.from_stream(plain).steps != StreamFingerprint.from_stream(s).steps
    )


@pytest.mark.parametrize(
    ("groups", "why"),
    [
        ([[[0, 1], None]], "groups must have the time steps and clients of cells"),
        ([[[0]], [[0, 1]]], "time 0, client 0: a group is a whole number for each of 2 rows, got int64 \\(1,\\)"),
        ([[[0, 0.5]], [[0, 1]]], "a group is a whole number for each of 2 rows, got float64"),
        ([[[0, -1]], [[0, 1]]], "groups are 0 to 999, got -1 to 0"),
        ([[None], [[0, 1]]], "groups must be 2 whole numbers"),
        ([[["a", "b"]], [[0, 1]]], "groups must be 2 whole numbers"),
    ],
)
def test_bad_groups_get_one_sentence(groups: Any, why: str) -> None:
    cell: Any = (np.zeros((2, 1)), [0, 1])
    with pytest.raises(DataError, match=why):
        fd.Stream.from_arrays([[cell], [cell]], groups=groups)


MAPS = st.sampled_from(
    ["keep", "swap(1,2)", "reverse", "add(4)", "turn(90)", "negate", "noise(0.3)", "negate turn(270)"]
)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    concepts=st.lists(MAPS, min_size=1, max_size=3),
    size=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    rows=st.integers(10, 40),
    shares=st.sampled_from(["even", "dirichlet(0.3,1)", "dirichlet(5,0)"]),
    flags=st.tuples(st.booleans(), st.booleans()),
    group=st.sampled_from([0.0, 0.3]),
    burst=st.sampled_from([0.0, 0.5]),
    data_seed=st.integers(0, 3),
)
def test_any_recipe_makes_a_sound_stream(
    concepts: list[str], size: tuple[int, int], rows: int, shares: str, flags: tuple[bool, bool],
    group: float, burst: float, data_seed: int,
) -> None:  # fmt: skip
    steps, clients = size
    keys = {"concepts": concepts, "pattern": f"random:every=1,concepts={len(concepts)}", "rows": rows, "shares": shares}
    keys |= {"clients": clients, "steps": steps, "fixed": flags[0], "mixed": flags[1]}
    keys |= {"group_share": group, "burst_share": burst}
    one, again = make_stream(data_seed, **keys), make_stream(data_seed, **keys)
    assert one.counts.shape == (steps + 1, clients) and one.counts.sum() == len(one.x) == rows * clients * (steps + 1)
    assert one.y.min() >= 0 and one.y.max() < 10 and np.abs(one.x).max() <= 1
    assert (one.group is None) == (group == 0)
    for field in ("x", "y", "counts", "concepts", "group"):
        np.testing.assert_array_equal(getattr(one, field), getattr(again, field))


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(alphabet="swapturnhow()0123456789,. -ne", max_size=20))
def test_nonsense_for_a_concept_is_refused_in_a_sentence(text: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f"base = 'mnist'\nconcepts = [{json.dumps(text)}]\npattern = ['0', '0']\n")
    with suppress(FeddriftError):  # and with nothing else
        assert read_recipe(str(path)).concept_maps
