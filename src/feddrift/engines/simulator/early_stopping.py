"""Round of local training with early stopping (`Local.patience`), compiled for all lanes at once."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from feddrift.engines.local import sampling
from feddrift.engines.simulator import program
from feddrift.engines.simulator.lanes import Lanes, Optimiser
from feddrift.engines.simulator.matmul_precision import set_matmul_precision
from feddrift.engines.simulator.validation_plan import ValidationPlan
from feddrift.nets.losses import weighted_loss
from feddrift.trees import join_trunk_and_head, mark_trunk, tree_map
from feddrift.types import Local, Net, Params

jax.tree_util.register_dataclass(ValidationPlan, data_fields=[f.name for f in fields(ValidationPlan)], meta_fields=[])


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=(4, 5))
def run_local_round(
    net: Net, local: Local, params: Params, mask: Any, trunk_optimiser: Optimiser, head_optimiser: Optimiser,
    lanes: Lanes, validation: ValidationPlan, x: Any, y: Any, order: Any, round: Any, lr: Any, pull_params: Params,
) -> tuple[program.Carry, Any]:  # fmt: skip
    """Run K local steps of every lane; a lane that has stopped does not change any more.

    The arguments are those of `program._run_local_round`, and `validation`, the held-out rows.

    Returns:
        The result of `program._run_local_round`, and [lane] the loss at the last check.
    """
    in_trunk = mark_trunk(net, params)
    n_heads = lanes.model.shape[1]
    step = jax.vmap(program.build_step(net, local, params, lanes, x, y, lr))
    begin, constants = program.begin_round(net, params, mask, trunk_optimiser, head_optimiser, lanes, pull_params)
    batches = tree_map(lambda leaf: jnp.swapaxes(leaf, 0, 1), program.draw_batches(local, lanes, order, round))

    def compute_loss(trunk: list[Any], heads: list[Any], mask: Any, rows: Any, weight: Any) -> Any:
        def compute_head_loss(head: list[Any], mask: Any, weight: Any) -> Any:
            return weighted_loss(net, join_trunk_and_head(trunk, head, in_trunk), mask, x[rows], y[rows], weight)

        if n_heads == 1:
            return compute_head_loss(heads, mask, weight[0])
        return jax.vmap(compute_head_loss)(heads, mask, weight).sum()

    def compute_losses(state: program.Carry) -> Any:
        return jax.vmap(compute_loss)(state[0], state[1], constants[0], validation.rows, validation.weight)

    def run_step(carry: Any, step_input: Any) -> Any:
        state, active, last_loss = carry
        n_steps, batch = step_input
        after = step(state, constants, batch)
        state = tree_map(lambda old, new: jnp.where(active.reshape(-1, *[1] * (new.ndim - 1)), new, old), state, after)
        due = active & (n_steps % validation.interval == 0)
        loss = jax.lax.cond(due.any(), compute_losses, lambda _: last_loss, state)
        stops = due & sampling.should_stop_early(last_loss, loss, local.patience, n_steps // validation.interval)
        return (state, active & ~stops, jnp.where(due, loss, last_loss)), None

    with set_matmul_precision(net, local):
        start = begin, jnp.ones(len(lanes.trunk), dtype=bool), validation.last_loss
        (trained, _, last_loss), _ = jax.lax.scan(run_step, start, (jnp.arange(1, local.steps + 1), batches))
    return program.flatten_heads(trained, lanes), last_loss
