"""The loss that nets train on."""

from __future__ import annotations

from typing import Any

from feddrift.types import Net, Params


def cross_entropy(logits: Any, y: Any) -> Any:
    """The loss of each example."""
    import jax.numpy as jnp  # here and below, since JAX takes a while to import
    from jax.nn import logsumexp

    return logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, y[:, None], axis=-1)[:, 0]


def masked(net: Net, params: Params, mask: Any, x: Any) -> Any:
    """Logits from what the model sees of its inputs."""
    return net.apply(params, x if mask is None else x * mask)


def weighed_loss(net: Net, params: Params, mask: Any, x: Any, y: Any, weight: Any) -> Any:
    """The sum of the losses of these examples, each by its weight."""
    return (cross_entropy(masked(net, params, mask, x), y) * weight).sum()


def batch_loss(net: Net, params: Params, mask: Any, x: Any, y: Any, n: Any) -> Any:
    """Mean loss over a minibatch drawn from a cell of n rows: where n < B, its last B - n rows are repeats."""
    import jax.numpy as jnp

    losses = cross_entropy(masked(net, params, mask, x), y)
    real = jnp.minimum(n, len(losses))
    return jnp.where(jnp.arange(len(losses)) < real, losses, 0.0).sum() / real
