"""A tour of feddrift in cells, which many editors run one by one. tour.ipynb is the same tour as a notebook."""

# %% Load a stream: ten clients with new data at each of ten time steps. The labels of each client swap at some time.
from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

import feddrift as fd

stream = fd.stream("sine-2")
print(stream)
print(stream.concepts)  # the true concept of each client (columns) at each time (rows), for reports and Oracle only

# %% Run FedDrift step by step: the accuracy on the next data, the model of each client, and the reasons for changes.
quick = fd.Local(rounds=10)  # the paper has 100 rounds per time step
for step in fd.run(stream, "FedDrift", local=quick, seed=2):
    print(step.tau, f"{step.accuracy.mean():.3f}", step.model)
    for event in step.events:
        print("   ", event.kind, event.model, dict(event.cause))

# %% Look at the state after the last step: w[t, c, m] says which data train which model, votes which model predicts.
print(step, step.state.w.shape, step.state.votes.argmax(axis=1))

# %% Choose another drift test, which needs no threshold.
algorithm = fd.algorithm("FedDrift", stream, test="two-sample")
alarms = [s.drifted for s in fd.run(stream, algorithm, local=quick, seed=2)]
print("alarms (time, client):", np.argwhere(alarms).tolist())

# %% Write records, as the command line does. With resume=True, a run that was stopped continues.
folder = Path(tempfile.mkdtemp())
for name in ("Oblivious", "FedDrift", "Oracle"):
    print(fd.record("sine-2", name, out=folder, seed=2, rounds=10, resume=True))
records = fd.read(folder)

# %% Read a table of plain columns, which pandas.DataFrame accepts, and find the lowest accuracy.
rows = fd.rows(records)
print(min(zip(rows["accuracy"], rows["algorithm"], rows["client"], rows["t"], strict=True)))

# %% Compare FedDrift with one model for all clients (Oblivious), and with known concepts (Oracle).
table = fd.summary(records, against="Oblivious")
for name, accuracy, above in zip(table["algorithm"], table["omitting_drifts"], table["over_mean"], strict=True):
    print(f"{name:10s} {accuracy:.2f} %, {above:+.2f} points over Oblivious")

# %% Write a report for the browser, and draw the model of each client at each time.
print("open", fd.report(folder, folder / "report.html"))
figure = fd.plot(records[0], "clusters")
figure.savefig(folder / "clusters.png")

# %% Export the models, and predict with the model of client 7.
models = fd.load_models(next(path for path in fd.export(folder, folder / "models") if "FedDrift" in path.name))
x, y = stream.cell(10, 7)
print(f"client 7: {100 * (models.predict('7', x) == y).mean():.1f} % correct")
