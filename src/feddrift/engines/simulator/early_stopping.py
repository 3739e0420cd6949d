"""A round that clients may end early: `Local.patience` in the compiled program, for all lanes at once."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from feddrift.engines.local import sampling
from feddrift.engines.simulator import program
from feddrift.engines.simulator.lanes import Lanes, Optimiser
from feddrift.engines.simulator.matmul_precision import products
from feddrift.engines.simulator.validation_plan import Looks
from feddrift.nets.losses import weighed_loss
from feddrift.trees import tree_map, trunk_of, unsplit
from feddrift.types import Local, Net, Params

jax.tree_util.register_dataclass(Looks, data_fields=[f.name for f in fields(Looks)], meta_fields=[])


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=(4, 5))
def local_round(
    net: Net, local: Local, params: Params, mask: Any, of_trunk: Optimiser, of_head: Optimiser, lanes: Lanes,
    looks: Looks, x: Any, y: Any, order: Any, round: Any, lr: Any, to: Params,
) -> tuple[program.Carry, Any]:  # fmt: skip
    """As `program._local_round`, and the loss [lane] at the last look; a lane that has stopped stays as it is."""
    shape, n_heads = trunk_of(net, params), lanes.model.shape[1]
    step = jax.vmap(program.stepper(net, local, params, lanes, x, y, lr))
    begin, stays = program.begun(net, params, mask, of_trunk, of_head, lanes, to)
    drawn = tree_map(lambda leaf: jnp.swapaxes(leaf, 0, 1), program.draws(local, lanes, order, round))

    def look(trunk: list[Any], heads: list[Any], sees: Any, rows: Any, weight: Any) -> Any:
        def under(head: list[Any], sees: Any, weight: Any) -> Any:
            return weighed_loss(net, unsplit(trunk, head, shape), sees, x[rows], y[rows], weight)

        if n_heads == 1:
            return under(heads, sees, weight[0])
        return jax.vmap(under)(heads, sees, weight).sum()

    def look_all(now: program.Carry) -> Any:
        return jax.vmap(look)(now[0], now[1], stays[0], looks.rows, looks.weight)

    def one(carry: Any, drawn: Any) -> Any:
        now, going, before = carry
        done, batches = drawn
        moved = step(now, stays, batches)
        now = tree_map(lambda old, new: jnp.where(going.reshape(-1, *[1] * (new.ndim - 1)), new, old), now, moved)
        due = going & (done % looks.every == 0)
        loss = jax.lax.cond(due.any(), look_all, lambda _: before, now)
        stops = due & sampling.enough(before, loss, local.patience, done // looks.every)
        return (now, going & ~stops, jnp.where(due, loss, before)), None

    with products(net, local):
        start = begin, jnp.ones(len(lanes.trunk), dtype=bool), looks.before
        (trained, _, last), _ = jax.lax.scan(one, start, (jnp.arange(1, local.steps + 1), drawn))
    return program.flat(trained, lanes), last
