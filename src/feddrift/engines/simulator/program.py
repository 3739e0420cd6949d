"""The compiled program: K local steps of lanes, their averages, and the rounds around them.

Lanes train a tile at a time, as many tiles as have any: how many lanes there are is an argument of the program, so that
one serves many numbers of them. Several devices share a tile evenly. Lanes that do not fit into a device's memory go
through it in chunks, round by round, while their moments wait on the host.
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

from feddrift.averaging import MAX_PARAMETER, average, renormalised
from feddrift.engines.local import optim, sampling
from feddrift.engines.simulator.lanes import Devices, Lanes, Optimiser
from feddrift.engines.simulator.matmul_precision import products, six_passes_are_exact
from feddrift.nets.losses import batch_loss, masked
from feddrift.trees import leaves, split, tree_map, trunk_of, unsplit
from feddrift.types import Local, Net, Params

REPLICATED: Any = PartitionSpec()  # type: ignore[no-untyped-call]
# Of scoring, which is little beside training: tuning its products takes a GPU seconds.
UNTUNED: Any = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}

jax.tree_util.register_dataclass(Lanes, data_fields=[f.name for f in fields(Lanes)], meta_fields=[])


def rounds(
    devices: Devices, tile: int, net: Net, local: Local, params: Params, mask: Any, of_trunk: Optimiser,
    of_head: Optimiser, lanes: Lanes, x: Any, y: Any, order: Any, first: Any, last: Any, to: Params = None,
) -> tuple[Params, Params, Optimiser, Optimiser, Any]:  # fmt: skip
    """Algorithm 1 for the rounds first..last-1: the models, the lanes before the last average, their
    moments, and in how many rounds each lane was left out of the average since not all in it were numbers.

    Lanes with a pull are pulled to the models `to`, or to what they begin a round with."""
    room = devices.room(params)
    if len(lanes.trunk) > room:
        return _in_chunks(
            devices, room, net, local, params, mask, of_trunk, of_head, lanes, x, y, order, first, last, to
        )
    program = compiled_for(local)
    of_trunk, of_head, lanes = devices.put((of_trunk, of_head, lanes), deal=True)
    cut = devices.cut(tile) if tile < len(lanes.trunk) else (len(lanes.trunk), (1,))
    trained: Any = _rounds(
        devices.mesh, *cut, net, program, params, mask, of_trunk, of_head, lanes, x, y, devices.put(order), first, last,
        np.float32(local.lr), to,
    )  # fmt: skip
    return trained  # type: ignore[no-any-return]


def compiled_for(local: Local) -> Local:
    """What the program depends on: what it is given as arguments is no part of it."""
    six_passes_are_exact()  # now: while a program is traced nothing can be tried
    return replace(local, rounds=1, lr=1.0, average="mean", pull=None)


def _in_chunks(
    devices: Devices, room: int, net: Net, local: Local, params: Params, mask: Any, of_trunk: Optimiser,
    of_head: Optimiser, lanes: Lanes, x: Any, y: Any, order: Any, first: Any, last: Any, to: Params,
) -> tuple[Params, Params, Optimiser, Optimiser, Any]:  # fmt: skip
    """`rounds` for more lanes than there is room for: models, lanes and moments stay on the host."""
    shape, heads, n = trunk_of(net, params), lanes.model.shape[1], int(lanes.n_lanes)
    models = [[np.array(leaf) for leaf in part] for part in split(params, shape)]
    at = lanes.trunk, lanes.model.reshape(-1)
    work = [[leaf[rows] for leaf in part] for part, rows in zip(models, at, strict=True)]
    states: Any = tree_map(np.array, (of_trunk, of_head))
    parts = np.arange(n), lanes.pair[: int(lanes.n_pairs)]
    share, order = (lanes.trunk_share, lanes.head_share), devices.put(order)
    program = compiled_for(local)
    refused = np.zeros(n, dtype=np.int32)
    for round in range(int(first), int(last)):
        now = unsplit(models[0], models[1], shape)
        for begin in range(0, n, room):
            real = min(room, n - begin)
            lane = np.minimum(np.arange(begin, begin + room), n - 1)  # beyond the last: the last again
            of = lane, (lane[:, None] * heads + np.arange(heads)).reshape(-1)
            chunk = _some(lanes, itemgetter(lane))
            moments = [
                tree_map(lambda leaf, rows=rows: leaf[rows], part) for part, rows in zip(states, of, strict=True)
            ]
            moments, chunk = devices.put((moments, chunk), deal=True)
            trained: Any = _chunk(
                net, program, now, mask, *moments, chunk, x, y, order, np.uint32(round), np.float32(local.lr), to
            )
            for k, span in enumerate((slice(begin, begin + real), slice(begin * heads, (begin + real) * heads))):
                m = real * (heads if k else 1)
                for stack, new in zip(
                    (*work[k], *leaves(states[k])), (*trained[k], *leaves(trained[2 + k])), strict=True
                ):
                    stack[span] = np.asarray(new)[:m]
        sound = np.ones(n, dtype=bool)
        for leaf in (*work[0], *work[1]):
            sound &= (np.abs(leaf) <= MAX_PARAMETER).reshape(len(share[0]), -1).all(axis=1)[:n]
        added = list(zip(share, parts, strict=True))
        if not sound.all():
            refused += ~sound
            lane_of = np.arange(n), parts[1] // heads
            added = [renormalised(*added[k], at[k], sound[lane_of[k]]) for k in (0, 1)]
        models = [
            [average(old, new, at[k], *added[k]) for old, new in zip(models[k], work[k], strict=True)]
            if k == 0 or local.trains != "trunk"
            else models[k]
            for k in (0, 1)
        ]
    return unsplit(models[0], models[1], shape), unsplit(work[0], work[1], shape), states[0], states[1], refused


@partial(jax.jit, static_argnums=0, compiler_options=UNTUNED)
def logits(net: Net, params: Params, on: Any, mask: Any, n: Any, x: Any, rows: Any) -> Any:
    """[m, row, class], of the first n models: one after the other, so that one program serves any number of them."""
    seen, shape = x[rows], trunk_of(net, params)

    def of_model(m: Any) -> Any:
        full = tree_map(lambda leaf, shared: leaf[on[m] if shared else m], params, shape)
        with jax.default_matmul_precision("float32"):
            return masked(net, full, None if mask is None else mask[m], seen)

    out = jax.eval_shape(of_model, 0)
    blank = jnp.zeros((len(on), *out.shape), out.dtype)
    return jax.lax.fori_loop(0, n, lambda m, all: all.at[m].set(of_model(m)), blank)


@partial(jax.jit, static_argnums=0, compiler_options=UNTUNED)
def block_logits(net: Net, params: Params, of_trunk: Any, of_head: Any, mask: Any, n: Any, x: Any, rows: Any) -> Any:
    """Compute the logits [block, row, class] of the first n blocks of rows, each of a model of its own.

    The model of a block has the trunk at of_trunk[block] of the stacks, its head at of_head[block], and mask[block].
    """
    shape = trunk_of(net, params)

    def of_block(b: Any) -> Any:
        full = tree_map(lambda leaf, shared: leaf[of_trunk[b] if shared else of_head[b]], params, shape)
        with jax.default_matmul_precision("float32"):
            return masked(net, full, None if mask is None else mask[b], x[rows[b]])

    out = jax.eval_shape(of_block, 0)
    blank = jnp.zeros((len(of_head), *out.shape), out.dtype)
    return jax.lax.fori_loop(0, n, lambda b, all: all.at[b].set(of_block(b)), blank)


Carry = tuple[list[Any], list[Any], Optimiser, Optimiser]  # trunks, heads, and their moments


def _local_round(
    net: Net, local: Local, params: Params, mask: Any, of_trunk: Optimiser, of_head: Optimiser, lanes: Lanes,
    x: Any, y: Any, order: Any, round: Any, lr: Any, to: Params,
) -> Carry:  # fmt: skip
    """K local steps of every lane, from its models' parameters: trunks [lane], heads [lane * head], their moments."""
    step, drawn = stepper(net, local, params, lanes, x, y, lr), draws(local, lanes, order, round)

    def local_update(begin: Carry, stays: Any, drawn: Any) -> Any:
        return jax.lax.scan(lambda carry, drawn: (step(carry, stays, drawn), None), begin, drawn)[0]

    begin, stays = begun(net, params, mask, of_trunk, of_head, lanes, to)
    with products(net, local):
        return flat(jax.vmap(local_update)(begin, stays, drawn), lanes)


def draws(local: Local, lanes: Lanes, order: Any, round: Any) -> tuple[Any, Any, Any]:
    """[lane, step]: the rows of each minibatch [B], how many rows there are to draw from, and the head that learns."""
    steps = jnp.arange(local.steps, dtype=jnp.uint32)
    words = sampling.step_words((lanes.key[0][:, None], lanes.key[1][:, None]), round, steps[None])
    cell, first = sampling.pick(words, lanes.cumulative[:, None], lanes.counts[:, None], jnp)
    n = jnp.take_along_axis(lanes.counts, cell, axis=1)
    at = (first[..., None] + jnp.arange(local.batch)) % n[..., None]
    rows = order[jnp.take_along_axis(lanes.starts, cell, axis=1)[..., None] + at]
    return rows, n, cell % lanes.model.shape[1]


def begun(
    net: Net, params: Params, mask: Any, of_trunk: Optimiser, of_head: Optimiser, lanes: Lanes, to: Params
) -> tuple[Carry, Any]:
    """What lanes begin a round with; and what stays: what their models see, where they are pulled, and how strongly."""
    shape, model = trunk_of(net, params), _models(lanes)

    def of_lanes(params: Params) -> tuple[list[Any], list[Any]]:
        trunk, head = split(params, shape)
        return [leaf[lanes.trunk] for leaf in trunk], [leaf[model] for leaf in head]

    by_lane = partial(tree_map, lambda leaf: leaf.reshape(*model.shape, *leaf.shape[1:]))
    pulled = None if lanes.pull is None else (*of_lanes(params if to is None else to), lanes.pull)
    sees = None if mask is None else mask[model]
    return (*of_lanes(params), of_trunk, by_lane(of_head)), (sees, pulled)


def flat(trained: Carry, lanes: Lanes) -> Carry:
    """The same with all heads, [lane * head], in one row."""
    trunks, heads, of_trunk, head_optimisers = trained
    rows = partial(tree_map, lambda leaf: leaf.reshape(-1, *leaf.shape[_models(lanes).ndim :]))
    return trunks, rows(heads), of_trunk, rows(head_optimisers)


def _models(lanes: Lanes) -> Any:
    """[lane, head]; a single head needs no axis of its own."""
    return lanes.model[:, 0] if lanes.model.shape[1] == 1 else lanes.model


def stepper(net: Net, local: Local, params: Params, lanes: Lanes, x: Any, y: Any, lr: Any) -> Any:
    """One local step of one lane: step(carry, what stays, what is drawn) is the carry after it."""
    shape, n_heads = trunk_of(net, params), lanes.model.shape[1]
    gradient = jax.grad(partial(batch_loss, net))

    def get(stack: Any, h: Any) -> Any:
        return stack if n_heads == 1 else stack[h]

    def set(stack: Any, new: Any, h: Any) -> Any:
        chosen = (jnp.arange(n_heads) == h).reshape(-1, *[1] * new.ndim)
        return new if n_heads == 1 else jnp.where(chosen, new, stack)

    def step(carry: Carry, stays: Any, drawn: Any) -> Carry:
        sees, pulled = stays
        trunk, heads, (trunk_moments, trunk_done), head_optimisers = carry
        batch, size, h = drawn
        head, (head_moments, head_done) = tree_map(lambda stack: get(stack, h), (heads, head_optimisers))
        full = unsplit(trunk, head, shape)
        grads = gradient(full, None if sees is None else get(sees, h), x[batch], y[batch], size)
        trunk_grads, head_grads = split(grads, shape)
        if pulled is not None:
            trunk_grads = optim.pulled(trunk_grads, trunk, pulled[0], pulled[2])
            head_grads = optim.pulled(head_grads, head, [get(leaf, h) for leaf in pulled[1]], pulled[2])
        if local.trains != "head":
            trunk_done = trunk_done + 1
            trunk, trunk_moments = optim.update(local, trunk, trunk_grads, trunk_moments, trunk_done, lr)
        if local.trains != "trunk":
            head_done = head_done + 1
            head, head_moments = optim.update(local, head, head_grads, head_moments, head_done, lr)
            heads, head_optimisers = tree_map(
                lambda stack, new: set(stack, new, h), (heads, head_optimisers), (head, (head_moments, head_done))
            )
        return trunk, heads, (trunk_moments, trunk_done), head_optimisers

    return step


_chunk = jax.jit(_local_round, static_argnums=(0, 1), donate_argnums=(4, 5))


@partial(jax.jit, static_argnums=(0, 1, 2, 3, 4), donate_argnums=(7, 8))
def _rounds(
    mesh: Mesh | None, tile: int, widths: tuple[int, ...], net: Net, local: Local, params: Params, mask: Any,
    of_trunk: Optimiser, of_head: Optimiser, lanes: Lanes, x: Any, y: Any, order: Any, first: Any, last: Any, lr: Any,
    to: Params,
) -> tuple[Params, Params, Optimiser, Optimiser, Any]:  # fmt: skip
    """Algorithm 1 for the rounds first..last-1: the models, the lanes before the last average, their
    moments, and in how many rounds each lane was left out of the average since not all in it were numbers.

    Tiles train `widths[0]` at a time, those that are left over `widths[1]` at a time, and so on, at last one by one."""
    shape, size = trunk_of(net, params), len(lanes.trunk)
    trunk, head = split(params, shape)
    in_tiles, in_a_row = partial(_in_tiles, mesh, size // tile), partial(_in_a_row, mesh)
    described = _some(lanes, in_tiles)

    def one_round(round: Any, carry: Any) -> Any:
        trunk, head, *work, refused = carry
        params = unsplit(trunk, head, shape)

        def train(width: int, k: Any, work: Any) -> Any:
            """So many tiles at once, from tile k on."""
            of_tiles = partial(_slice, k, width)
            _, _, of_trunk, of_head = tree_map(of_tiles, work)
            mine = _some(described, of_tiles)
            trained = _local_round(net, local, params, mask, of_trunk, of_head, mine, x, y, order, round, lr, to)
            return tree_map(partial(_put_slice, k, width), work, list(trained))

        if tile == size:
            work = train(1, 0, work)
        n_tiles, done = (lanes.n_lanes + tile - 1) // tile, 0
        for width in widths if tile < size else ():
            times = (n_tiles - done) // width
            work = jax.lax.fori_loop(0, times, lambda k, work, w=width, d=done: train(w, d + w * k, work), work)
            done = done + times * width
        trunks, heads = tree_map(in_a_row, work[:2])
        every, sound = jnp.arange(size), finite([*trunks, *heads], size)
        of_pair = jnp.repeat(sound, lanes.model.shape[1])
        trunk = _averaged(mesh, trunk, trunks, lanes.trunk, lanes.trunk_share, every, lanes.n_lanes, sound)
        if local.trains != "trunk":
            head = _averaged(
                mesh, head, heads, lanes.model.reshape(-1), lanes.head_share, lanes.pair, lanes.n_pairs, of_pair
            )
        return trunk, head, *work, refused + ~sound

    begin = [leaf[lanes.trunk] for leaf in trunk], [leaf[lanes.model.reshape(-1)] for leaf in head]
    never = jnp.zeros(size, dtype=jnp.int32)
    trunk, head, *work, refused = jax.lax.fori_loop(
        first, last, one_round, (trunk, head, *tree_map(in_tiles, [*begin, of_trunk, of_head]), never)
    )
    trunks, heads, of_trunk, of_head = tree_map(in_a_row, work)
    return unsplit(trunk, head, shape), unsplit(trunks, heads, shape), of_trunk, of_head, refused


def _some(lanes: Lanes, pick: Callable[[Any], Any]) -> Lanes:
    """What training needs to know of some of the lanes."""
    return Lanes(
        pick(lanes.trunk), pick(lanes.model), (pick(lanes.key[0]), pick(lanes.key[1])), pick(lanes.cumulative),
        pick(lanes.counts), pick(lanes.starts), *(None,) * 5, pull=None if lanes.pull is None else pick(lanes.pull),
    )  # fmt: skip


def _in_tiles(mesh: Mesh | None, n_tiles: int, leaf: Any) -> Any:
    """[tile, ...], each tile dealt out to the devices."""
    leaf = leaf.reshape(n_tiles, -1, *leaf.shape[1:])
    if mesh is None:
        return leaf
    return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, PartitionSpec(None, "lane")))  # type: ignore[no-untyped-call]


def _slice(k: Any, width: int, leaf: Any) -> Any:
    """The lanes of `width` tiles, from tile k on, in a row."""
    return _in_a_row(None, jax.lax.dynamic_slice_in_dim(leaf, k, width))


def _put_slice(k: Any, width: int, leaf: Any, new: Any) -> Any:
    return jax.lax.dynamic_update_slice_in_dim(leaf, new.reshape(width, -1, *new.shape[1:]), k, 0)


def _in_a_row(mesh: Mesh | None, leaf: Any) -> Any:
    """The way back from `_in_tiles`."""
    leaf = leaf.reshape(-1, *leaf.shape[2:])
    if mesh is None:
        return leaf
    return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, PartitionSpec("lane")))  # type: ignore[no-untyped-call]


def finite(stacks: list[Any], n: int) -> Any:
    """[n], `averaging.finite`: each has its share of the rows of each stack."""
    sound = jnp.ones(n, dtype=bool)
    for leaf in stacks:
        sound &= (jnp.abs(leaf) <= MAX_PARAMETER).reshape(n, -1).all(axis=1)
    return sound


def _averaged(
    mesh: Mesh | None, old: list[Any], parts: list[Any], target: Any, share: Any, order: Any, n: Any, sound: Any
) -> list[Any]:
    """`averaging.averaged`, to the same bits: it multiplies first and adds in a fixed order, which XLA cannot fuse.

    The k-th part to add, k < n, is order[k], it goes to target[order[k]]. Several devices send each other all parts, so
    that their number does not change the order of the sum. Parts that are not sound are left out.
    """
    if not old:
        return old
    real = jnp.zeros(len(target), dtype=bool).at[order].max(jnp.arange(len(order)) < n)
    total = jnp.zeros(len(old[0])).at[target].add(jnp.where(real & sound, share, 0))
    share = jnp.where((real & ~sound).any(), share / total[target], share)  # the others have more of it
    real &= sound
    has_parts = jnp.zeros(len(old[0]), dtype=bool).at[target].max(real)

    def per_row(values: Any, like: Any) -> Any:
        return values.reshape(-1, *[1] * (like.ndim - 1))

    products = [jnp.where(per_row(sound, part), per_row(share, part) * part, 0) for part in parts]
    if mesh is not None:
        products = jax.lax.with_sharding_constraint(products, NamedSharding(mesh, REPLICATED))  # type: ignore[no-untyped-call]
    begin = [jnp.where(per_row(has_parts, leaf), 0, leaf) for leaf in old]

    def add(k: Any, sums: list[Any]) -> list[Any]:
        i = order[k]
        return [s.at[target[i]].add(p[i], mode="promise_in_bounds") for s, p in zip(sums, products, strict=True)]

    result: list[Any] = jax.lax.fori_loop(0, n, add, begin)
    return result


averaged = jax.jit(_averaged, static_argnums=0)


@jax.jit
def picked(stacks: list[Any], rows: list[Any]) -> Any:
    """These rows of each stack."""
    return [stack[at] for stack, at in zip(stacks, rows, strict=True)]


@jax.jit
def gathered(stacks: list[Any], of: Any, rows: Any) -> Any:
    """[k]: row rows[k] of stack of[k]."""
    out: Any = stacks[0][jnp.where(of == 0, rows, 0)]
    for k, stack in enumerate(stacks[1:], start=1):
        mine = of == k
        out = jnp.where(mine.reshape(-1, *[1] * (stack.ndim - 1)), stack[jnp.where(mine, rows, 0)], out)
    return out


@jax.jit
def rows_of(stack: Optimiser, at: Any) -> Any:
    """The rows of a stack of moments at these places, zeros where a place is below 0."""

    def rows(leaf: Any) -> Any:
        return jnp.where((at < 0).reshape(-1, *[1] * (leaf.ndim - 1)), 0, leaf[jnp.maximum(at, 0)])

    return tree_map(rows, stack)


@jax.jit
def joined(a: Optimiser, b: Optimiser) -> Any:
    """Two stacks of moments as one."""
    return tree_map(lambda x, y: jnp.concatenate([x, y]), a, b)
