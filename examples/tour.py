"""A tour in cells, as of a notebook: editors run them one by one."""

# %% A stream: ten clients, ten time steps and one that only tests; at some time the labels of each client swap.
from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

import feddrift as fd
from feddrift.reports.summary import summarise
from feddrift.runs.config import RunConfig
from feddrift.runs.record import read_all
from feddrift.runs.recorded import RecordedRun

stream = fd.stream("sine-2")
x, y = stream.cell(0, 0)  # what client 0 received at time 0
print(f"{stream.n_clients} clients, {stream.n_steps} time steps, {len(x)} examples of {x.shape[1]} features in a cell")

# %% Which true concept each client has at which time. Only reports and Oracle may look.
print(stream.concepts)

# %% FedDrift, step by step: who uses which model, and why there are new ones.
quick = fd.Local(rounds=10)  # the paper's setting is 100
for step in fd.run(stream, fd.algorithm("FedDrift", stream), local=quick, seed=2):
    print(step.tau, f"{step.accuracy.mean():.3f}", step.model)
    for event in step.events:
        print("   ", event.kind, event.model, dict(event.cause))

# %% The last step has it all: the models, w[t, c, m] that trained them, and the votes.
last = step
print(last.state.models.ids, last.state.w.shape, last.state.votes.argmax(axis=1))

# %% Compare with one model for all, and with known concepts.
for name in ("Oblivious", "FedDrift", "Oracle"):
    steps = list(fd.run(stream, fd.algorithm(name, stream), local=quick, seed=2))
    print(f"{name:10s} {100 * np.mean([s.accuracy for s in steps]):.2f} %")

# %% Another drift test, where nobody knows a threshold.
algorithm = fd.algorithm("FedDrift", stream, test="two-sample")
alarms = [s.drifted for s in fd.run(stream, algorithm, local=quick, seed=2)]
print("alarms (time, client):", np.argwhere(alarms).tolist())

# %% A recorded run, as the command line makes it, and what a report says of it.
with tempfile.TemporaryDirectory() as folder:
    for _ in RecordedRun(RunConfig(stream="sine-2", algorithm="FedDrift", rounds=10), Path(folder)):
        pass
    (summary,) = summarise(read_all(folder))
print(f"omitting drifts {summary.omitting_drifts.mean:.2f} %, ARI {summary.ari:.2f}")  # type: ignore[union-attr]
