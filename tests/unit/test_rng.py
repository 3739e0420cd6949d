"""Random keys and words."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from feddrift import rng

# Published with the Random123 library (kat_vectors, threefry2x32, 20 rounds): counter, key, result.
VECTORS = [
    ((0x00000000, 0x00000000), (0x00000000, 0x00000000), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
]


@pytest.mark.parametrize(("counter", "key", "result"), VECTORS)
def test_threefry_gives_the_published_numbers(
    counter: tuple[int, int], key: tuple[int, int], result: tuple[int, int]
) -> None:
    def words(pair: tuple[int, int]) -> tuple[np.uint32, np.uint32]:
        return np.uint32(pair[0]), np.uint32(pair[1])

    assert tuple(int(x) for x in rng.threefry2x32(words(key), words(counter))) == result


def test_numpy_and_jax_draw_the_same() -> None:
    key = rng.derive_key(3, "batch", 1, np.arange(4))
    steps = np.arange(5, dtype=np.uint32)

    def draw(k0: object, k1: object, s: object) -> rng.Words:
        return rng.threefry2x32((k0[:, None], k1[:, None]), (np.uint32(9), s))  # type: ignore[index]

    for a, b in zip(draw(*key, steps), jax.jit(draw)(*map(jnp.asarray, key), steps), strict=True):
        np.testing.assert_array_equal(a, np.asarray(b))
        np.testing.assert_array_equal(rng.to_unit_interval(a), np.asarray(rng.to_unit_interval(b)))


def test_a_key_depends_on_every_name_and_on_nothing_else() -> None:
    names: list[tuple[Any, ...]] = [
        (0, "batch", 1, 2),
        (1, "batch", 1, 2),
        (0, "init", 1, 2),
        (0, "batch", 2, 1),
        (0, "batch", 1),
        (2**32, "batch", 1, 2),
    ]
    keys = {tuple(int(w) for w in rng.derive_key(*n)) for n in names}
    assert len(keys) == 6
    one, many = rng.derive_key(0, "batch", 1, 2), rng.derive_key(0, "batch", 1, np.array([0, 2]))
    assert (int(one[0]), int(one[1])) == (int(many[0][1]), int(many[1][1]))


def test_draws_are_uniform_and_permutations_whole() -> None:
    u = rng.uniform(rng.derive_key(0, "data"), (20_000,), -1, 3)
    assert u.dtype == np.float32
    assert u.min() >= -1 and u.max() < 3
    assert abs(u.mean() - 1) < 0.03 and abs(u.std() - 4 / np.sqrt(12)) < 0.02
    order = rng.permutation(rng.derive_key(0, "shuffle"), 500)
    assert sorted(order) == list(range(500)) and not np.array_equal(order, np.arange(500))
    picks = np.bincount([rng.choice(rng.derive_key(s, "ties"), 3) for s in range(600)], minlength=3)
    assert picks.min() > 150
