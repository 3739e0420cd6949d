"""Cost estimates before a run: a rehearsal with one local step per round, and a sample of the real training."""

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
from feddrift.engines.simulator.lanes import PARAMETER_COPIES_PER_LANE
from feddrift.nets import default_net
from feddrift.simulation import run_steps
from feddrift.trees import tree_leaves
from feddrift.types import Algorithm, Clusters, Local, Net

SAMPLE_SECONDS = 0.5  # duration of the training that is timed
REHEARSAL_SECONDS = 5.0  # a longer rehearsal stops, and its rest is extrapolated
EXTRA_ROUNDS = 5  # additional rounds per time step in the rehearsal that measures the cost of a round itself
PROGRAM_BYTES = 300e6  # memory of Python, NumPy and JAX


@dataclass(frozen=True)
class CostEstimate:
    """The expected cost of a run."""

    lanes: float  # pairs of a client and a model that train in a round, on average over time
    local_steps: int  # minibatch steps of all lanes, in the whole run
    seconds: float
    bytes: float  # peak memory


def estimate_cost(
    stream: Stream, algorithm: Algorithm, *, engine: str, local: Local, seed: int = 0, net: Net | None = None
) -> CostEstimate:
    """Estimate lanes, local steps, time and memory of a run.

    The number of models is unknown before a run. If the true concepts are known, the estimate assumes the true
    clusters. Otherwise it uses the clusters of the rehearsal, which may be too few, since its models barely train.

    Args:
        stream: The data.
        algorithm: The algorithm.
        engine: The name of the engine.
        local: The training settings of the run.
        seed: The seed of the rehearsal.
        net: The net; None: the default net of the stream.
    """
    net = net or default_net(stream)

    def build_engine(rounds: int, steps: int) -> Engine:
        return find_engine(engine)(stream, net, replace(local, rounds=rounds, steps=steps), seed)

    seconds_per_step = _time_local_step(build_engine(local.rounds, local.steps), local)
    # The first rehearsal compiles, as the run will.
    lane_rounds, fixed_seconds, has_clusters = _run_rehearsal(build_engine(1, 1), algorithm)
    short, long = (_run_rehearsal(build_engine(rounds, 1), algorithm)[1] for rounds in (1, 1 + EXTRA_ROUNDS))
    fixed_seconds += (local.rounds - 1) * max(0.0, long - short) / EXTRA_ROUNDS  # some algorithms evaluate every round
    if has_clusters and stream.concepts is not None and not isinstance(algorithm, Oracle):
        lane_rounds = max(lane_rounds, _run_rehearsal(build_engine(1, 1), Oracle())[0])
    local_steps = lane_rounds * local.rounds * local.steps
    lanes = lane_rounds / stream.n_steps
    lane_bytes = PARAMETER_COPIES_PER_LANE * sum(
        leaf.nbytes for leaf in tree_leaves(net.init((np.uint32(0), np.uint32(0))))
    )
    data_bytes = 2 * stream.x.nbytes + 2 * stream.y.nbytes  # in memory, and on the device or as an order of rows
    return CostEstimate(
        lanes=lanes,
        local_steps=round(local_steps),
        seconds=fixed_seconds + local_steps * seconds_per_step,
        bytes=PROGRAM_BYTES + data_bytes + lanes * lane_bytes,
    )


def _run_rehearsal(engine: Engine, algorithm: Algorithm) -> tuple[float, float, bool]:
    """Run an algorithm with few local steps, and extrapolate if it stops early.

    Returns:
        The lanes summed over all time steps, the seconds, and whether the algorithm has clusters.
    """
    begin = time.perf_counter()
    steps_done = 0
    has_clusters = False
    with _silence_warnings(logging.getLogger("feddrift.algorithms")):
        for step in run_steps(engine, algorithm):
            steps_done += 1
            has_clusters = isinstance(step.state.w, Clusters)
            if time.perf_counter() - begin > REHEARSAL_SECONDS:
                break
    scale = (engine.n_steps or steps_done) / steps_done
    return engine.lane_rounds * scale, (time.perf_counter() - begin) * scale, has_clusters


@contextmanager
def _silence_warnings(log: logging.Logger) -> Iterator[None]:
    """Silence a logger in the block: warnings about barely trained models do not apply to the run."""
    old_level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(old_level)


def _time_local_step(engine: Engine, local: Local) -> float:
    """Return the seconds per local step of a lane."""
    fed = engine.at(0)
    models = fed.fresh()

    def time_rounds(rounds: int) -> float:
        begin = time.perf_counter()
        fed.train(models, np.ones((1, fed.n_clients, 1)), rounds=rounds)
        return time.perf_counter() - begin

    time_rounds(1)  # compiles
    rounds = int(np.clip(SAMPLE_SECONDS / max(time_rounds(1), 1e-6), 1, local.rounds))
    lanes = max(1, int((fed.counts[0] > 0).sum()))
    return time_rounds(rounds) / (rounds * local.steps * lanes)
