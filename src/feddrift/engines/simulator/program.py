"""Compiled program of the simulator: rounds of K local steps of all lanes and their averages.

Lanes train in tiles. The number of lanes is an argument of the program, which skips tiles without lanes, so one program
serves many numbers of lanes. Several devices share a tile evenly. If the lanes do not fit into memory, each round
trains one chunk of lanes after the other, while the other lanes and their moments are on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from feddrift.averaging import MAX_PARAMETER, average_rows, renormalize_shares
from feddrift.engines.local import optim, sampling
from feddrift.engines.simulator.lanes import Devices, Lanes, Optimiser
from feddrift.engines.simulator.matmul_precision import is_six_pass_exact, set_matmul_precision
from feddrift.nets.losses import batch_loss, compute_logits
from feddrift.trees import join_trunk_and_head, mark_trunk, split_trunk_and_head, tree_leaves, tree_map
from feddrift.types import Local, Net, Params

REPLICATED: Any = PartitionSpec()  # type: ignore[no-untyped-call]
# For scoring: tuning its matrix products takes seconds on a GPU, and scoring takes little time compared with training.
UNTUNED_OPTIONS: Any = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}

jax.tree_util.register_dataclass(Lanes, data_fields=[f.name for f in fields(Lanes)], meta_fields=[])


def run_rounds(
    devices: Devices, tile: int, net: Net, local: Local, params: Params, mask: Any, trunk_optimiser: Optimiser,
    head_optimiser: Optimiser, lanes: Lanes, x: Any, y: Any, order: Any, first: Any, last: Any,
    pull_params: Params = None,
) -> tuple[Params, Params, Optimiser, Optimiser, Any]:  # fmt: skip
    """Run Algorithm 1 for the rounds first..last - 1.

    Args:
        devices: The devices to train on.
        tile: The number of lanes that train at once.
        net: The net.
        local: The settings of local training.
        params: The parameters of the models, padded.
        mask: The masks of the models, or None.
        trunk_optimiser: The moments of the lanes' trunks; their arrays may be overwritten.
        head_optimiser: The moments of the lanes' heads; their arrays may be overwritten.
        lanes: The padded lanes.
        x: The inputs of all rows of the stream.
        y: Their classes.
        order: The order of rows that `lanes.starts` refers to.
        first: The number of the first round.
        last: The number after that of the last round.
        pull_params: The parameters to which lanes with a pull are pulled; None: those at the beginning of a round.

    Returns:
        The parameters of the models, those of the lanes before the last average, the moments of trunks and of heads,
        and [lane] the number of rounds whose average left the lane out because its parameters were not finite.
    """
    max_lanes = devices.count_fitting_lanes(params)
    if len(lanes.trunk) > max_lanes:
        return _run_in_chunks(
            devices, max_lanes, net, local, params, mask, trunk_optimiser, head_optimiser, lanes, x, y, order, first,
            last, pull_params,
        )  # fmt: skip
    options = get_static_options(local)
    trunk_optimiser, head_optimiser, lanes = devices.put_arrays((trunk_optimiser, head_optimiser, lanes), shard=True)
    unit, widths = devices.split_tile(tile) if tile < len(lanes.trunk) else (len(lanes.trunk), (1,))
    results: Any = _run_compiled_rounds(
        devices.mesh, unit, widths, net, options, params, mask, trunk_optimiser, head_optimiser, lanes, x, y,
        devices.put_arrays(order), first, last, np.float32(local.lr), pull_params,
    )  # fmt: skip
    return results  # type: ignore[no-any-return]


def get_static_options(local: Local) -> Local:
    """Return the settings for which the program is compiled, without those that it gets as arguments."""
    is_six_pass_exact()  # called now, since it cannot measure while a program is traced
    return replace(local, rounds=1, lr=1.0, average="mean", pull=None)


def _run_in_chunks(
    devices: Devices, chunk_size: int, net: Net, local: Local, params: Params, mask: Any, trunk_optimiser: Optimiser,
    head_optimiser: Optimiser, lanes: Lanes, x: Any, y: Any, order: Any, first: Any, last: Any, pull_params: Params,
) -> tuple[Params, Params, Optimiser, Optimiser, Any]:  # fmt: skip
    """Run the rounds for more lanes than fit into memory: models, lanes and moments are on the host.

    The lists `models`, `trained` and `optimisers` have two items, for trunks and for heads.
    """
    in_trunk = mark_trunk(net, params)
    n_heads = lanes.model.shape[1]
    n = int(lanes.n_lanes)
    models = [[np.array(leaf) for leaf in part] for part in split_trunk_and_head(params, in_trunk)]
    targets = lanes.trunk, lanes.model.reshape(-1)
    trained = [[leaf[rows] for leaf in part] for part, rows in zip(models, targets, strict=True)]
    optimisers: Any = tree_map(np.array, (trunk_optimiser, head_optimiser))
    rows_to_average = np.arange(n), lanes.pair[: int(lanes.n_pairs)]
    all_shares = lanes.trunk_share, lanes.head_share
    order = devices.put_arrays(order)
    options = get_static_options(local)
    left_out = np.zeros(n, dtype=np.int32)
    for round in range(int(first), int(last)):
        round_params = join_trunk_and_head(models[0], models[1], in_trunk)
        for begin in range(0, n, chunk_size):
            n_real = min(chunk_size, n - begin)
            lane = np.minimum(np.arange(begin, begin + chunk_size), n - 1)  # padding repeats the last lane
            chunk_rows = lane, (lane[:, None] * n_heads + np.arange(n_heads)).reshape(-1)
            chunk = _select_lanes(lanes, itemgetter(lane))
            moments = [
                tree_map(lambda leaf, rows=rows: leaf[rows], part)
                for part, rows in zip(optimisers, chunk_rows, strict=True)
            ]
            moments, chunk = devices.put_arrays((moments, chunk), shard=True)
            results: Any = _run_chunk(
                net, options, round_params, mask, *moments, chunk, x, y, order, np.uint32(round),
                np.float32(local.lr), pull_params,
            )  # fmt: skip
            for k, n_parts in enumerate((1, n_heads)):
                span = slice(begin * n_parts, (begin + n_real) * n_parts)
                for stack, new in zip(
                    (*trained[k], *tree_leaves(optimisers[k])),
                    (*results[k], *tree_leaves(results[2 + k])),
                    strict=True,
                ):
                    stack[span] = np.asarray(new)[: n_real * n_parts]
        is_finite = np.ones(n, dtype=bool)
        for leaf in (*trained[0], *trained[1]):
            is_finite &= (np.abs(leaf) <= MAX_PARAMETER).reshape(len(all_shares[0]), -1).all(axis=1)[:n]
        shares = list(zip(all_shares, rows_to_average, strict=True))
        if not is_finite.all():
            left_out += ~is_finite
            lane_of_row = np.arange(n), rows_to_average[1] // n_heads
            shares = [renormalize_shares(*shares[k], targets[k], is_finite[lane_of_row[k]]) for k in (0, 1)]
        models = [
            [average_rows(old, new, targets[k], *shares[k]) for old, new in zip(models[k], trained[k], strict=True)]
            if k == 0 or local.trains != "trunk"
            else models[k]
            for k in (0, 1)
        ]
    return (
        join_trunk_and_head(models[0], models[1], in_trunk),
        join_trunk_and_head(trained[0], trained[1], in_trunk),
        optimisers[0],
        optimisers[1],
        left_out,
    )


@partial(jax.jit, static_argnums=0, compiler_options=UNTUNED_OPTIONS)
def compute_all_logits(net: Net, params: Params, trunk_index: Any, mask: Any, n: Any, x: Any, rows: Any) -> Any:
    """Compute the logits [m, row, class] of the first n models, one after the other.

    One program serves any number of models up to the size of the stack.

    Args:
        net: The net.
        params: The parameters of the models, padded.
        trunk_index: [m], the position of each model's trunk.
        mask: The masks of the models, or None.
        n: The number of models.
        x: The inputs of all rows of the stream.
        rows: Positions of rows in the stream.
    """
    inputs = x[rows]
    in_trunk = mark_trunk(net, params)

    def compute_model(m: Any) -> Any:
        model_params = tree_map(lambda leaf, shared: leaf[trunk_index[m] if shared else m], params, in_trunk)
        with jax.default_matmul_precision("float32"):
            return compute_logits(net, model_params, None if mask is None else mask[m], inputs)

    output = jax.eval_shape(compute_model, 0)
    zeros = jnp.zeros((len(trunk_index), *output.shape), output.dtype)
    return jax.lax.fori_loop(0, n, lambda m, logits: logits.at[m].set(compute_model(m)), zeros)


@partial(jax.jit, static_argnums=0, compiler_options=UNTUNED_OPTIONS)
def compute_block_logits(
    net: Net, params: Params, trunk_rows: Any, head_rows: Any, mask: Any, n: Any, x: Any, rows: Any
) -> Any:
    """Compute the logits [block, row, class] of the first n blocks of rows, each with a separate model.

    Args:
        net: The net.
        params: Stacks of parameters.
        trunk_rows: [block], the position of the trunk of the block's model.
        head_rows: [block], the position of its head.
        mask: [block], its mask, or None.
        n: The number of blocks.
        x: The inputs of all rows of the stream.
        rows: [block, row], positions of rows in the stream.
    """
    in_trunk = mark_trunk(net, params)

    def compute_block(b: Any) -> Any:
        model_params = tree_map(lambda leaf, shared: leaf[trunk_rows[b] if shared else head_rows[b]], params, in_trunk)
        with jax.default_matmul_precision("float32"):
            return compute_logits(net, model_params, None if mask is None else mask[b], x[rows[b]])

    output = jax.eval_shape(compute_block, 0)
    zeros = jnp.zeros((len(head_rows), *output.shape), output.dtype)
    return jax.lax.fori_loop(0, n, lambda b, logits: logits.at[b].set(compute_block(b)), zeros)


Carry = tuple[list[Any], list[Any], Optimiser, Optimiser]  # trunks, heads, and their moments


def _run_local_round(
    net: Net, local: Local, params: Params, mask: Any, trunk_optimiser: Optimiser, head_optimiser: Optimiser,
    lanes: Lanes, x: Any, y: Any, order: Any, round: Any, lr: Any, pull_params: Params,
) -> Carry:  # fmt: skip
    """Run K local steps of every lane from the parameters of its models.

    The arguments are those of `run_rounds`, with the number of the round and the step size as arrays.

    Returns:
        Trunks [lane], heads [lane * head], and their moments.
    """
    step = build_step(net, local, params, lanes, x, y, lr)
    batches = draw_batches(local, lanes, order, round)

    def local_update(begin: Carry, constants: Any, batches: Any) -> Any:
        return jax.lax.scan(lambda carry, batch: (step(carry, constants, batch), None), begin, batches)[0]

    begin, constants = begin_round(net, params, mask, trunk_optimiser, head_optimiser, lanes, pull_params)
    with set_matmul_precision(net, local):
        return flatten_heads(jax.vmap(local_update)(begin, constants, batches), lanes)


def draw_batches(local: Local, lanes: Lanes, order: Any, round: Any) -> tuple[Any, Any, Any]:
    """Draw the minibatches of all lanes in a round.

    Returns:
        [lane, step]: the rows [B] of each minibatch, the number of rows to draw from, and the position of the head
        that is trained.
    """
    steps = jnp.arange(local.steps, dtype=jnp.uint32)
    words = sampling.derive_step_words((lanes.key[0][:, None], lanes.key[1][:, None]), round, steps[None])
    cell, first = sampling.pick_cells(words, lanes.cumulative[:, None], lanes.counts[:, None], jnp)
    n = jnp.take_along_axis(lanes.counts, cell, axis=1)
    positions = (first[..., None] + jnp.arange(local.batch)) % n[..., None]
    rows = order[jnp.take_along_axis(lanes.starts, cell, axis=1)[..., None] + positions]
    return rows, n, cell % lanes.model.shape[1]


def begin_round(
    net: Net, params: Params, mask: Any, trunk_optimiser: Optimiser, head_optimiser: Optimiser, lanes: Lanes,
    pull_params: Params,
) -> tuple[Carry, Any]:  # fmt: skip
    """Return the state of lanes at the beginning of a round, and the constants of the round.

    The constants are the masks of the lanes' models, or None, and the trunks, heads and weights of the pull, or None.
    """
    in_trunk = mark_trunk(net, params)
    model = _get_lane_models(lanes)

    def select_lanes(params: Params) -> tuple[list[Any], list[Any]]:
        trunk, head = split_trunk_and_head(params, in_trunk)
        return [leaf[lanes.trunk] for leaf in trunk], [leaf[model] for leaf in head]

    group_heads = partial(tree_map, lambda leaf: leaf.reshape(*model.shape, *leaf.shape[1:]))
    pull_target = params if pull_params is None else pull_params
    pull = None if lanes.pull is None else (*select_lanes(pull_target), lanes.pull)
    lane_mask = None if mask is None else mask[model]
    return (*select_lanes(params), trunk_optimiser, group_heads(head_optimiser)), (lane_mask, pull)


def flatten_heads(trained: Carry, lanes: Lanes) -> Carry:
    """Return the same state with a single axis [lane * head] for heads."""
    trunks, heads, trunk_optimiser, head_optimiser = trained
    flatten = partial(tree_map, lambda leaf: leaf.reshape(-1, *leaf.shape[_get_lane_models(lanes).ndim :]))
    return trunks, flatten(heads), trunk_optimiser, flatten(head_optimiser)


def _get_lane_models(lanes: Lanes) -> Any:
    """Return [lane, head], the positions of models; [lane] if every lane has a single head."""
    return lanes.model[:, 0] if lanes.model.shape[1] == 1 else lanes.model


def build_step(net: Net, local: Local, params: Params, lanes: Lanes, x: Any, y: Any, lr: Any) -> Any:
    """Return the function `step(state, constants, batch)` that returns the state of one lane after a local step.

    Args:
        net: The net.
        local: The settings of local training.
        params: The parameters of the models; only their structure is used.
        lanes: The lanes; only their number of heads is used.
        x: The inputs of all rows of the stream.
        y: Their classes.
        lr: The step size.
    """
    in_trunk = mark_trunk(net, params)
    n_heads = lanes.model.shape[1]
    gradient = jax.grad(partial(batch_loss, net))

    def get_head(stack: Any, h: Any) -> Any:
        return stack if n_heads == 1 else stack[h]

    def set_head(stack: Any, new: Any, h: Any) -> Any:
        chosen = (jnp.arange(n_heads) == h).reshape(-1, *[1] * new.ndim)
        return new if n_heads == 1 else jnp.where(chosen, new, stack)

    def step(state: Carry, constants: Any, batch: Any) -> Carry:
        mask, pull = constants
        trunk, heads, (trunk_moments, trunk_steps), head_optimisers = state
        rows, n_rows, h = batch
        head, (head_moments, head_steps) = tree_map(lambda stack: get_head(stack, h), (heads, head_optimisers))
        model_params = join_trunk_and_head(trunk, head, in_trunk)
        grads = gradient(model_params, None if mask is None else get_head(mask, h), x[rows], y[rows], n_rows)
        trunk_grads, head_grads = split_trunk_and_head(grads, in_trunk)
        if pull is not None:
            trunk_grads = optim.add_pull(trunk_grads, trunk, pull[0], pull[2])
            head_grads = optim.add_pull(head_grads, head, [get_head(leaf, h) for leaf in pull[1]], pull[2])
        if local.trains != "head":
            trunk_steps = trunk_steps + 1
            trunk, trunk_moments = optim.apply_gradients(local, trunk, trunk_grads, trunk_moments, trunk_steps, lr)
        if local.trains != "trunk":
            head_steps = head_steps + 1
            head, head_moments = optim.apply_gradients(local, head, head_grads, head_moments, head_steps, lr)
            heads, head_optimisers = tree_map(
                lambda stack, new: set_head(stack, new, h), (heads, head_optimisers), (head, (head_moments, head_steps))
            )
        return trunk, heads, (trunk_moments, trunk_steps), head_optimisers

    return step


_run_chunk = jax.jit(_run_local_round, static_argnums=(0, 1), donate_argnums=(4, 5))


@partial(jax.jit, static_argnums=(0, 1, 2, 3, 4), donate_argnums=(7, 8))
def _run_compiled_rounds(
    mesh: Mesh | None, tile: int, widths: tuple[int, ...], net: Net, local: Local, params: Params, mask: Any,
    trunk_optimiser: Optimiser, head_optimiser: Optimiser, lanes: Lanes, x: Any, y: Any, order: Any, first: Any,
    last: Any, lr: Any, pull_params: Params,
) -> tuple[Params, Params, Optimiser, Optimiser, Any]:  # fmt: skip
    """Run Algorithm 1 for the rounds first..last - 1: see `run_rounds` for arguments and results.

    First `widths[0]` tiles train at once, as often as possible, then `widths[1]` of the remaining ones, and so on.
    """
    in_trunk = mark_trunk(net, params)
    size = len(lanes.trunk)
    trunk, head = split_trunk_and_head(params, in_trunk)
    split = partial(_split_into_tiles, mesh, size // tile)
    flatten = partial(_flatten_tiles, mesh)
    lane_tiles = _select_lanes(lanes, split)

    def run_round(round: Any, carry: Any) -> Any:
        trunk, head, *state, left_out = carry
        params = join_trunk_and_head(trunk, head, in_trunk)

        def train(width: int, k: Any, state: Any) -> Any:
            """Train `width` tiles at once, from tile k on."""
            take_tiles = partial(_take_tiles, k, width)
            _, _, trunk_moments, head_moments = tree_map(take_tiles, state)
            trained = _run_local_round(
                net, local, params, mask, trunk_moments, head_moments, _select_lanes(lane_tiles, take_tiles),
                x, y, order, round, lr, pull_params,
            )  # fmt: skip
            return tree_map(partial(_put_tiles, k, width), state, list(trained))

        if tile == size:
            state = train(1, 0, state)
        n_tiles = (lanes.n_lanes + tile - 1) // tile
        done = 0
        for width in widths if tile < size else ():
            times = (n_tiles - done) // width
            state = jax.lax.fori_loop(0, times, lambda k, state, w=width, d=done: train(w, d + w * k, state), state)
            done = done + times * width
        trunks, heads = tree_map(flatten, state[:2])
        is_finite = find_finite_rows([*trunks, *heads], size)
        trunk = _average_stacks(
            mesh, trunk, trunks, lanes.trunk, lanes.trunk_share, jnp.arange(size), lanes.n_lanes, is_finite
        )
        if local.trains != "trunk":
            head = _average_stacks(
                mesh, head, heads, lanes.model.reshape(-1), lanes.head_share, lanes.pair, lanes.n_pairs,
                jnp.repeat(is_finite, lanes.model.shape[1]),
            )  # fmt: skip
        return trunk, head, *state, left_out + ~is_finite

    begin = [leaf[lanes.trunk] for leaf in trunk], [leaf[lanes.model.reshape(-1)] for leaf in head]
    tiles = tree_map(split, [*begin, trunk_optimiser, head_optimiser])
    trunk, head, *state, left_out = jax.lax.fori_loop(
        first, last, run_round, (trunk, head, *tiles, jnp.zeros(size, dtype=jnp.int32))
    )
    trunks, heads, trunk_optimiser, head_optimiser = tree_map(flatten, state)
    return (
        join_trunk_and_head(trunk, head, in_trunk),
        join_trunk_and_head(trunks, heads, in_trunk),
        trunk_optimiser,
        head_optimiser,
        left_out,
    )


def _select_lanes(lanes: Lanes, select: Callable[[Any], Any]) -> Lanes:
    """Return some of the lanes, with the fields that local steps use."""
    return Lanes(
        select(lanes.trunk), select(lanes.model), (select(lanes.key[0]), select(lanes.key[1])),
        select(lanes.cumulative), select(lanes.counts), select(lanes.starts), *(None,) * 5,
        pull=None if lanes.pull is None else select(lanes.pull),
    )  # fmt: skip


def _split_into_tiles(mesh: Mesh | None, n_tiles: int, leaf: Any) -> Any:
    """Return [tile, ...], with each tile sharded over the devices."""
    leaf = leaf.reshape(n_tiles, -1, *leaf.shape[1:])
    if mesh is None:
        return leaf
    return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, PartitionSpec(None, "lane")))  # type: ignore[no-untyped-call]


def _take_tiles(k: Any, width: int, leaf: Any) -> Any:
    """Return the lanes of `width` tiles, from tile k on, with a single axis."""
    return _flatten_tiles(None, jax.lax.dynamic_slice_in_dim(leaf, k, width))


def _put_tiles(k: Any, width: int, leaf: Any, new: Any) -> Any:
    """Return the tiles with new values of `width` tiles, from tile k on."""
    return jax.lax.dynamic_update_slice_in_dim(leaf, new.reshape(width, -1, *new.shape[1:]), k, 0)


def _flatten_tiles(mesh: Mesh | None, leaf: Any) -> Any:
    """Return the lanes of all tiles with a single axis, the inverse of `_split_into_tiles`."""
    leaf = leaf.reshape(-1, *leaf.shape[2:])
    if mesh is None:
        return leaf
    return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, PartitionSpec("lane")))  # type: ignore[no-untyped-call]


def find_finite_rows(stacks: list[Any], n: int) -> Any:
    """Return [n], whether all parameters are finite: see `averaging.find_finite_lanes`.

    Each of the n lanes has the same number of rows, which follow each other, in a stack.
    """
    is_finite = jnp.ones(n, dtype=bool)
    for leaf in stacks:
        is_finite &= (jnp.abs(leaf) <= MAX_PARAMETER).reshape(n, -1).all(axis=1)
    return is_finite


def _average_stacks(
    mesh: Mesh | None, old: list[Any], parts: list[Any], target: Any, share: Any, order: Any, n: Any, is_finite: Any
) -> list[Any]:
    """Return the averages of rows, with the same bits as `averaging.average_rows`.

    It multiplies first and then adds in a fixed order, so that XLA cannot fuse the operations. Several devices send
    each other all parts, so that their number does not change the order of the sum.

    Args:
        mesh: The mesh of several devices.
        old: The arrays before the training; rows without parts do not change.
        parts: The trained arrays.
        target: The row of `old` that each row of `parts` belongs to.
        share: The share of each row of `parts` in the average.
        order: The rows of `parts` in the order in which they are added.
        n: The number of rows of `parts` without padding: those at order[:n].
        is_finite: Whether each row of `parts` is finite; others are left out, and shares are rescaled.
    """
    if not old:
        return old
    real = jnp.zeros(len(target), dtype=bool).at[order].max(jnp.arange(len(order)) < n)
    total = jnp.zeros(len(old[0])).at[target].add(jnp.where(real & is_finite, share, 0))
    share = jnp.where((real & ~is_finite).any(), share / total[target], share)
    real &= is_finite
    has_parts = jnp.zeros(len(old[0]), dtype=bool).at[target].max(real)

    def expand(values: Any, like: Any) -> Any:
        """Return values [row] with as many axes as another array."""
        return values.reshape(-1, *[1] * (like.ndim - 1))

    products = [jnp.where(expand(is_finite, part), expand(share, part) * part, 0) for part in parts]
    if mesh is not None:
        products = jax.lax.with_sharding_constraint(products, NamedSharding(mesh, REPLICATED))  # type: ignore[no-untyped-call]
    begin = [jnp.where(expand(has_parts, leaf), 0, leaf) for leaf in old]

    def add(k: Any, sums: list[Any]) -> list[Any]:
        i = order[k]
        return [s.at[target[i]].add(p[i], mode="promise_in_bounds") for s, p in zip(sums, products, strict=True)]

    result: list[Any] = jax.lax.fori_loop(0, n, add, begin)
    return result


average_stacks = jax.jit(_average_stacks, static_argnums=0)


@jax.jit
def pick_rows(stacks: list[Any], rows: list[Any]) -> Any:
    """Return rows of stacks: stacks[k][rows[k]] for each k."""
    return [stack[positions] for stack, positions in zip(stacks, rows, strict=True)]


@jax.jit
def gather_rows(stacks: list[Any], stack_of_row: Any, rows: Any) -> Any:
    """Return [k], the row rows[k] of the stack stack_of_row[k]."""
    gathered: Any = stacks[0][jnp.where(stack_of_row == 0, rows, 0)]
    for k, stack in enumerate(stacks[1:], start=1):
        selected = stack_of_row == k
        values = stack[jnp.where(selected, rows, 0)]
        gathered = jnp.where(selected.reshape(-1, *[1] * (stack.ndim - 1)), values, gathered)
    return gathered


@jax.jit
def pick_moments(stack: Optimiser, rows: Any) -> Any:
    """Return rows of a stack of moments, zeros for positions below 0."""

    def pick(leaf: Any) -> Any:
        return jnp.where((rows < 0).reshape(-1, *[1] * (leaf.ndim - 1)), 0, leaf[jnp.maximum(rows, 0)])

    return tree_map(pick, stack)


@jax.jit
def join_moments(a: Optimiser, b: Optimiser) -> Any:
    """Concatenate two stacks of moments."""
    return tree_map(lambda x, y: jnp.concatenate([x, y]), a, b)
