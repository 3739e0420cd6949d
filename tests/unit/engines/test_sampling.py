"""Minibatches and hold-outs of the engines in one process."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from feddrift import rng
from feddrift.engines.local import sampling

W = np.array([0.0, 1.0, 0.0, 3.0, 0.0])
COUNTS = np.array([50, 20, 10, 40, 60])


def draws(n: int) -> rng.Words:
    return sampling.derive_step_words(rng.derive_key(0, "batch"), np.uint32(0), np.arange(n, dtype=np.uint32))


def test_cells_are_drawn_in_proportion_to_weight_times_size() -> None:
    t, start = sampling.pick_cells(draws(20_000), sampling.compute_cumulative_chances(W, COUNTS), COUNTS, np)
    shares = np.bincount(t, minlength=5) / len(t)
    np.testing.assert_allclose(shares, [0, 20 / 140, 0, 120 / 140, 0], atol=0.01)
    assert set(start[t == 1]) == set(range(20)) and set(start[t == 3]) == set(range(40))


def test_every_row_of_a_cell_is_drawn_as_often() -> None:
    order = sampling.draw_row_order(0, 3, 1, 2, 40)
    _, start = sampling.pick_cells(
        draws(20_000), sampling.compute_cumulative_chances(W[3:4], COUNTS[3:4]), COUNTS[3:4], np
    )
    batches = order[(start[:, None] + np.arange(7)) % 40]
    assert all(len(set(b)) == 7 for b in batches[:200])
    share = np.bincount(batches.reshape(-1), minlength=40) / batches.size
    np.testing.assert_allclose(share, 1 / 40, atol=0.003)


def test_the_order_of_a_cell_is_new_at_each_time_step() -> None:
    assert not np.array_equal(sampling.draw_row_order(0, 3, 1, 2, 40), sampling.draw_row_order(0, 4, 1, 2, 40))


@example([1.175494351e-38, 2.0], 0)  # a chance that JAX takes for zero
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30).filter(lambda w: sum(w) > 1e-6), st.integers(0, 2**32 - 1))
def test_a_cell_without_weight_is_never_drawn(w: list[float], word: int) -> None:
    weights, counts = np.array(w), np.full(len(w), 10)
    words = np.array([word], dtype=np.uint32), np.array([5], dtype=np.uint32)
    cumulative = sampling.compute_cumulative_chances(weights, counts)
    t, start = sampling.pick_cells(words, cumulative, counts, np)
    assert weights[t[0]] > 0 and start[0] == 5
    t_jax, _ = sampling.pick_cells((jnp.asarray(words[0]), jnp.asarray(words[1])), jnp.asarray(cumulative), counts, jnp)
    assert int(t_jax[0]) == int(t[0])
