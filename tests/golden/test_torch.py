"""Our optimiser and loss against PyTorch's numbers (made by make_torch_adam.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from feddrift.engines.local import optim
from feddrift.nets.losses import batch_loss
from feddrift.nets.perceptron import mlp
from feddrift.types import Local

GOLDEN = json.loads(Path(__file__).with_name("torch_adam.json").read_text())


@pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax"])
def test_adam_with_amsgrad_and_l2_is_pytorchs(xp: Any) -> None:
    net, local = mlp(3, 6, 3), Local(lr=0.01, weight_decay=1e-3)
    params = {k: xp.asarray(v, dtype=np.float32) for k, v in GOLDEN["start"].items()}
    moments = optim.init_moments(params)
    losses = []
    for i, (x, y) in enumerate(zip(GOLDEN["x"], GOLDEN["y"], strict=True)):
        batch = np.asarray(x, dtype=np.float32), np.asarray(y, dtype=np.int32)
        loss, grads = jax.value_and_grad(lambda p, b: batch_loss(net, p, None, b[0], b[1], len(b[1])))(params, batch)
        grads = {k: xp.asarray(g) for k, g in grads.items()}
        params, moments = optim.apply_gradients(local, params, grads, moments, xp.asarray(i + 1, dtype=np.float32))
        losses.append(float(loss))
    np.testing.assert_allclose(losses, GOLDEN["losses"], atol=2e-6)
    for name, expected in GOLDEN["end"].items():
        np.testing.assert_allclose(params[name], expected, atol=2e-6)


def test_the_maximum_of_amsgrad_is_taken_before_bias_correction() -> None:
    """After a large gradient, small ones: PyTorch's rule keeps dividing by the corrected old maximum."""
    local = Local(lr=1.0, weight_decay=0.0)
    params, moments = {"a": np.zeros(1, np.float32)}, optim.init_moments({"a": np.zeros(1, np.float32)})
    for i, g in enumerate([1.0, 0.0]):
        grad = {"a": np.array([g], np.float32)}
        params, moments = optim.apply_gradients(local, params, grad, moments, np.asarray(i + 1, dtype=np.float32))
    # mean: 0.1, 0.09; largest square: 0.001, kept; corrections at step 2: 0.19 and 0.001999
    second = (0.09 / 0.19) / (np.sqrt(0.001) / np.sqrt(0.001999))
    np.testing.assert_allclose(params["a"], [-1.0 - second], rtol=1e-4)


def test_sgd_is_a_plain_step() -> None:
    local = Local(lr=0.5, optimizer="sgd", weight_decay=0.0)
    params = {"a": np.array([1.0], np.float32)}
    params, _ = optim.apply_gradients(local, params, {"a": np.array([2.0], np.float32)}, {}, np.asarray(1.0))
    assert params["a"].tolist() == [0.0]
