"""Write torch_adam.json: PyTorch's numbers for our optimiser and loss. Needs torch 2.13, once."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

draw = np.random.default_rng(7)
shapes = {"W1": (3, 6), "b1": (6,), "W2": (6, 3), "b2": (3,)}
start = {name: draw.uniform(-0.5, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}
batches = [
    (draw.normal(size=(8, 3)).astype(np.float32), draw.integers(0, 3, 8)) for _ in range(12)
]  # enough for the maximum of amsgrad to matter

params = {name: torch.tensor(value, requires_grad=True) for name, value in start.items()}
adam = torch.optim.Adam(params.values(), lr=0.01, weight_decay=1e-3, amsgrad=True)
losses = []
for x, y in batches:
    hidden = torch.relu(torch.tensor(x) @ params["W1"] + params["b1"])
    loss = torch.nn.functional.cross_entropy(hidden @ params["W2"] + params["b2"], torch.tensor(y))
    adam.zero_grad()
    loss.backward()
    adam.step()
    losses.append(float(loss.detach()))

golden = {
    "start": {k: v.tolist() for k, v in start.items()},
    "x": [x.tolist() for x, _ in batches],
    "y": [y.tolist() for _, y in batches],
    "losses": losses,
    "end": {k: v.detach().numpy().tolist() for k, v in params.items()},
}
Path(__file__).with_name("torch_adam.json").write_text(json.dumps(golden))
