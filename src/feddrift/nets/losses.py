"""The training loss of nets: cross-entropy."""

from __future__ import annotations

from typing import Any

from feddrift.types import Net, Params


def cross_entropy(logits: Any, y: Any) -> Any:
    """Return the loss of each example."""
    import jax.numpy as jnp  # here and below, since JAX takes a while to import
    from jax.nn import logsumexp

    return logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, y[:, None], axis=-1)[:, 0]


def compute_logits(net: Net, params: Params, mask: Any, x: Any) -> Any:
    """Return the logits of a model that sees only the features of its mask."""
    return net.apply(params, x if mask is None else x * mask)


def weighted_loss(net: Net, params: Params, mask: Any, x: Any, y: Any, weight: Any) -> Any:
    """Return the sum of the losses of these examples, each times its weight."""
    return (cross_entropy(compute_logits(net, params, mask, x), y) * weight).sum()


def batch_loss(net: Net, params: Params, mask: Any, x: Any, y: Any, n: Any) -> Any:
    """Return the mean loss over a minibatch from a cell of n rows; if n < B, its last B - n rows are repeats."""
    import jax.numpy as jnp

    losses = cross_entropy(compute_logits(net, params, mask, x), y)
    n_distinct = jnp.minimum(n, len(losses))
    return jnp.where(jnp.arange(len(losses)) < n_distinct, losses, 0.0).sum() / n_distinct
