"""Random numbers that are functions of keys, not of the order in which they are drawn.

A number is derived from (seed, purpose, tau, client, ...) with Threefry-2x32 (Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", SC 2011). Only additions, xors and rotations of 32-bit words are needed, so the same
function works on NumPy and JAX arrays, and every engine draws the same numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from feddrift import numerics

Words = tuple[Any, Any]  # two uint32 arrays of one shape, NumPy or JAX

# Purposes of random numbers. The values enter all keys: append new ones, and never change one.
PURPOSES = {"init": 1, "shuffle": 2, "batch": 3, "score": 4, "ties": 5, "survivor": 6, "data": 7, "pattern": 8,
            "mask": 9, "bag": 10, "participation": 11, "dropout": 12, "garbage": 13, "projection": 14,
            "profile": 15, "lies": 16, "shown": 17, "founders": 18}  # fmt: skip

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def threefry2x32(key: Words, counter: Words) -> Words:
    """Apply twenty rounds of Threefry-2x32 to arrays of 32-bit words.

    Args:
        key: Two words, or two arrays of them.
        counter: Two words, or two arrays of them.

    Returns:
        Two random words for each pair of a key and a counter.
    """
    k0, k1 = key
    ks = (k0, k1, k0 ^ k1 ^ np.uint32(0x1BD11BDA))
    with np.errstate(over="ignore"):  # sums are modulo 2^32; NumPy warns about it for scalars
        x0 = counter[0] + ks[0]
        x1 = counter[1] + ks[1]
        for block in range(5):
            for r in _ROTATIONS[block % 2]:
                x0 = x0 + x1
                x1 = ((x1 << r) | (x1 >> (32 - r))) ^ x0
            x0 = x0 + ks[(block + 1) % 3]
            x1 = x1 + ks[(block + 2) % 3] + np.uint32(block + 1)
    return x0, x1


def derive_key(seed: int, purpose: str, *names: npt.ArrayLike) -> Words:
    """Derive the key of (seed, purpose, names...).

    Args:
        seed: A non-negative integer below 2^64.
        purpose: A key of PURPOSES.
        names: Non-negative integers, or arrays of them for several keys at once, which are broadcast.
    """
    key: Words = (np.uint32(seed & 0xFFFFFFFF), np.uint32((seed >> 32) & 0xFFFFFFFF))
    for position, name in enumerate((PURPOSES[purpose], *names)):
        key = threefry2x32(key, (np.asarray(name).astype(np.uint32), np.uint32(position)))
    return key


def draw_words(key: Words, n: int) -> npt.NDArray[np.uint32]:
    """Draw n 32-bit words from one key."""
    pairs = np.arange((n + 1) // 2, dtype=np.uint32)
    return np.stack(threefry2x32(key, (pairs, np.zeros_like(pairs))), axis=1).reshape(-1)[:n]


def to_unit_interval(words: Any) -> Any:
    """Convert words to float32 in [0, 1) by their top 24 bits, which is exact in every array library."""
    return (words >> 8).astype(np.float32) * np.float32(2.0**-24)


def uniform(key: Words, shape: tuple[int, ...], low: float = 0.0, high: float = 1.0) -> npt.NDArray[np.float32]:
    """Draw float32 numbers with a uniform distribution on [low, high)."""
    u = to_unit_interval(draw_words(key, int(np.prod(shape, dtype=int)))).reshape(shape)
    return np.asarray(np.float32(low) + np.float32(high - low) * u, dtype=np.float32)


def normal(key: Words, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Draw float32 numbers with a standard normal distribution (Box-Muller transform)."""
    n = int(np.prod(shape, dtype=int))
    u = uniform(key, (2, n)).astype(np.float64)
    drawn = np.sqrt(-2 * numerics.log1p(-u[0])) * numerics.cos(2 * np.pi * u[1])
    return np.asarray(drawn.reshape(shape), dtype=np.float32)


def permutation(key: Words, n: int) -> npt.NDArray[np.int64]:
    """Draw a random order of 0..n-1."""
    index = np.arange(n, dtype=np.uint64)
    drawn = np.sort((draw_words(key, n).astype(np.uint64) << np.uint64(32)) | index)  # equal words stay in order
    return (drawn & np.uint64(0xFFFFFFFF)).astype(np.int64)


def choice(key: Words, n: int) -> int:
    """Draw one of 0..n-1."""
    return int(to_unit_interval(draw_words(key, 1))[0] * n)
