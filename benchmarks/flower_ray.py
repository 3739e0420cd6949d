"""FedAvg through Flower's own Ray simulation: `python flower_ray.py STEPS...` prints the seconds per round as JSON.

It needs flwr[simulation] and NumPy, not feddrift.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import plain
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

CLIENTS = 10
ROWS = 500
NET = (2, 4, 2)
ROUNDS = 20

client_app = ClientApp()
server_app = ServerApp()
found: dict[str, Any] = {"seconds_per_round": {}}


def data(client: int) -> tuple[Any, Any]:
    """A client's rows of SINE."""
    x = np.random.default_rng(client).random((ROWS, NET[0]), dtype=np.float32)
    return x, (x[:, 1] <= np.sin(x[:, 0])).astype(int)


def age() -> float:
    """Seconds since this process began."""
    began = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began


def record(params: plain.Arrays) -> ArrayRecord:
    """A model as Flower sends it."""
    return ArrayRecord({str(k): Array(p) for k, p in enumerate(params)})


def arrays(content: RecordDict) -> plain.Arrays:
    """A model as it comes."""
    return [array.numpy().copy() for array in content.array_records["model"].values()]


@client_app.train()  # type: ignore[untyped-decorator, unused-ignore]
def train(message: Message, context: Context) -> Message:
    """A client's part of a round."""
    params = arrays(message.content)
    client = int(context.node_config["partition-id"])
    steps = int(message.content.config_records["how"]["steps"])
    plain.train(params, plain.zeros(params), 0, *data(client), steps, np.random.default_rng(client))
    content = RecordDict({"model": record(params), "sizes": MetricRecord({"rows": ROWS})})
    return Message(content, reply_to=message)


@server_app.main()  # type: ignore[untyped-decorator, unused-ignore]
def serve(grid: Grid, context: Context) -> None:
    """Rounds of FedAvg for each number of local steps."""
    while len(nodes := list(grid.get_node_ids())) < CLIENTS:
        time.sleep(0.05)
    params = plain.init(np.random.default_rng(0), *NET)

    def one_round(params: plain.Arrays, steps: int) -> plain.Arrays:
        content = RecordDict({"model": record(params), "how": ConfigRecord({"steps": steps})})
        sent = [Message(content, dst_node_id=node, message_type="train") for node in nodes]
        replies = list(grid.send_and_receive(sent))
        failed = [reply.error.reason for reply in replies if reply.has_error()]
        if failed or len(replies) < CLIENTS:
            raise RuntimeError(f"{CLIENTS - len(replies) + len(failed)} clients failed: {failed[:1]}")
        return [np.mean(parts, axis=0) for parts in zip(*(arrays(r.content) for r in replies), strict=True)]

    params = one_round(params, 1)
    found["start_up_seconds"] = age()
    for steps in map(int, sys.argv[1:]):
        begin = time.perf_counter()
        for _ in range(ROUNDS):
            params = one_round(params, steps)
        found["seconds_per_round"][steps] = (time.perf_counter() - begin) / ROUNDS


if __name__ == "__main__":
    cores = len(os.sched_getaffinity(0))
    how = {"init_args": {"num_cpus": cores}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server_app, client_app, CLIENTS, backend_config=how)
    print(json.dumps(found))
