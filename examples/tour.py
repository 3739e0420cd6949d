"""A tour in cells, as of a notebook: editors run them one by one."""

# %% A stream: ten clients, ten time steps and one that only tests; at some time the labels of each client swap.
from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

import feddrift as fd

stream = fd.stream("sine-2")
print(stream)
print(stream.concepts)  # which true concept each client has at which time: only reports and Oracle may look

# %% FedDrift, step by step: who uses which model, and why there are new ones.
quick = fd.Local(rounds=10)  # the paper's setting is 100
for step in fd.run(stream, "FedDrift", local=quick, seed=2):
    print(step.tau, f"{step.accuracy.mean():.3f}", step.model)
    for event in step.events:
        print("   ", event.kind, event.model, dict(event.cause))

# %% The last step has it all: the models, w[t, c, m] that trained them, and the votes.
print(step, step.state.w.shape, step.state.votes.argmax(axis=1))

# %% Another drift test, where nobody knows a threshold.
algorithm = fd.algorithm("FedDrift", stream, test="two-sample")
alarms = [s.drifted for s in fd.run(stream, algorithm, local=quick, seed=2)]
print("alarms (time, client):", np.argwhere(alarms).tolist())

# %% With records, as the command line makes them; with resume=True a run that was stopped goes on.
folder = Path(tempfile.mkdtemp())
for name in ("Oblivious", "FedDrift", "Oracle"):
    print(fd.record("sine-2", name, out=folder, seed=2, rounds=10, resume=True))
records = fd.read(folder)

# %% Tables are plain columns: pandas.DataFrame(fd.rows(records)) takes them. Who did worst, and when?
rows = fd.rows(records)
print(min(zip(rows["accuracy"], rows["algorithm"], rows["client"], rows["t"], strict=True)))

# %% Compare with one model for all, and with known concepts.
table = fd.summary(records, against="Oblivious")
for name, accuracy, above in zip(table["algorithm"], table["omitting_drifts"], table["over_mean"], strict=True):
    print(f"{name:10s} {accuracy:.2f} %, {above:+.2f} points over Oblivious")

# %% A picture, which a notebook shows, and a page with all of it.
figure = fd.plot(records[0], "clusters")
figure.savefig(folder / "clusters.png")
print("open", fd.report(folder, folder / "report.html"))

# %% The models, to predict with.
models = fd.load_models(next(path for path in fd.export(folder, folder / "models") if "FedDrift" in path.name))
x, y = stream.cell(10, 7)
print(f"client 7: {100 * (models.predict('7', x) == y).mean():.1f} % right")
