"""What a run will cost, before it: a rehearsal with one local step per round, and a sample of the real training."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from feddrift.algorithms.baselines.oracle import Oracle
from feddrift.data import Stream
from feddrift.engines import engine as find_engine
from feddrift.engines.server.engine import Engine
from feddrift.engines.simulator.lanes import COPIES
from feddrift.nets import default_net
from feddrift.simulation import steps_on
from feddrift.trees import leaves
from feddrift.types import Algorithm, Clusters, Local, Net

SAMPLE_SECONDS = 0.5  # of training that is timed
REHEARSAL_SECONDS = 5.0  # a longer rehearsal stops, and the rest is extrapolated
ROUNDS = 5  # more of them in a rehearsal that shows what a round costs besides its local steps
PROGRAM_BYTES = 300e6  # Python, NumPy and JAX


@dataclass(frozen=True)
class Estimate:
    """What to expect of a run."""

    lanes: float  # clients at work on a model, per round, on average over time
    local_steps: int  # minibatch steps of all of them, in the whole run
    seconds: float
    bytes: float  # of memory at the peak


def estimate(
    stream: Stream, algorithm: Algorithm, *, engine: str, local: Local, seed: int = 0, net: Net | None = None
) -> Estimate:
    """Lanes, local steps, time and memory of a run.

    How many models there will be is not known before. Where the true concepts are, clusters are taken to be the true
    ones; otherwise what barely trained models lead to stands for it, which may be too few.
    """
    net = net or default_net(stream)

    def on_engine(rounds: int, steps: int) -> Engine:
        return find_engine(engine)(stream, net, replace(local, rounds=rounds, steps=steps), seed)

    per_step = _sample(on_engine(local.rounds, local.steps), local)
    lanes, fixed, clusters = _rehearse(on_engine(1, 1), algorithm)  # compiles on the way, as the run will
    once, often = (_rehearse(on_engine(rounds, 1), algorithm)[1] for rounds in (1, 1 + ROUNDS))
    fixed += (local.rounds - 1) * max(0.0, often - once) / ROUNDS  # some algorithms ask between rounds
    if clusters and stream.concepts is not None and not isinstance(algorithm, Oracle):
        lanes = max(lanes, _rehearse(on_engine(1, 1), Oracle())[0])
    local_steps = lanes * local.rounds * local.steps
    at_once = lanes / stream.n_steps
    lane_bytes = COPIES * sum(leaf.nbytes for leaf in leaves(net.init((np.uint32(0), np.uint32(0)))))
    data_bytes = 2 * stream.x.nbytes + 2 * stream.y.nbytes  # here, and on the device or as an order of rows
    return Estimate(
        lanes=at_once,
        local_steps=round(local_steps),
        seconds=fixed + local_steps * per_step,
        bytes=PROGRAM_BYTES + data_bytes + at_once * lane_bytes,
    )


def _rehearse(engine: Engine, algorithm: Algorithm) -> tuple[float, float, bool]:
    """Lanes over all time steps, seconds for everything but training, and whether each client is in a cluster."""
    begin, steps_done, clusters = time.perf_counter(), 0, False
    with _quiet(logging.getLogger("feddrift.algorithms")):
        for step in steps_on(engine, algorithm):
            steps_done, clusters = steps_done + 1, isinstance(step.state.w, Clusters)
            if time.perf_counter() - begin > REHEARSAL_SECONDS:
                break
    scale = (engine.n_steps or steps_done) / steps_done
    return engine.lane_rounds * scale, (time.perf_counter() - begin) * scale, clusters


@contextmanager
def _quiet(log: logging.Logger) -> Iterator[None]:
    """Silence warnings meanwhile: of barely trained models they say nothing about the run."""
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def _sample(engine: Engine, local: Local) -> float:
    """Seconds per local step of a lane."""
    fed = engine.at(0)
    models, w = fed.fresh(), np.ones((1, fed.n_clients, 1))

    def timed(rounds: int) -> float:
        begin = time.perf_counter()
        fed.train(models, w, rounds=rounds)
        return time.perf_counter() - begin

    timed(1)  # compiles
    rounds = int(np.clip(SAMPLE_SECONDS / max(timed(1), 1e-6), 1, local.rounds))
    lanes = max(1, int((fed.counts[0] > 0).sum()))
    return timed(rounds) / (rounds * local.steps * lanes)
