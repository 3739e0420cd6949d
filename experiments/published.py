"""FairFedDrift and FLUX with the optimiser, rounds and epochs of their publications: `python -m experiments.published`.

Both publications have small convolutional nets; here a perceptron of 100 hidden units is in their place. Streams and
settings are those of their experiments, as far as they are known; tables show published and own results together.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import feddrift as fd
from feddrift import algorithms

SGD = {"optimizer": "sgd", "weight_decay": 0.0}
FAIR = fd.Local(rounds=10, steps=110, batch=32, lr=0.1, **SGD)  # five epochs of 700 rows
FLUX = fd.Local(rounds=10, steps=94, batch=64, lr=0.005, momentum=0.9, **SGD)  # two epochs of 3,000 rows
NET = "mlp:100"
SHIFTS = {  # of what clients have from the start; ten clients, four distributions
    "turned inputs": ["turn(0)", "turn(90)", "turn(180)", "turn(270)"],
    "swapped labels": ["keep", "swap(0,1)", "swap(2,3)", "swap(4,5)"],
    "some classes": ["show(0,1)", "show(2,3)", "show(4,5)", "show(6,7)"],
}


def main(which: str = "") -> None:
    for name, line in {"fair": fair, "flux": flux}.items():
        if which in ("", name):
            for text in line():
                print(text, flush=True)


def fair() -> Iterator[str]:
    """Mean accuracy over the five scenarios of FairFedDrift, a tenth of the rows in the group that drifts."""
    methods = {
        "FairFedDrift": ("FairFedDrift", {"delta": 0.25}, 93.80), "FedAvg, newest step": ("Window", {}, 94.40),
        "Oracle": ("Oracle", {}, 94.17),
    }  # fmt: skip
    for title, (name, settings, published) in methods.items():
        found = [accuracy(fd.stream(f"mnist-g-{k}"), name, settings, FAIR) for k in range(1, 6)]
        by_scenario = ", ".join(f"{value:.2f}" for value in found)
        yield f"mnist-g, {title}: {np.mean(found):.2f} ({by_scenario}); published {published:.2f}"


def flux() -> Iterator[str]:
    """Accuracy of FLUX after its ten rounds where distributions differ between clients and no client drifts."""
    methods = {
        "FLUX, chosen by inputs": ("FLUX", {}, 94.0), "FLUX, as trained": ("FLUX", {"router": False}, 92.5),
        "FedAvg": ("Oblivious", {}, 80.9),
    }  # fmt: skip
    for title, (name, settings, published) in methods.items():
        found = {what: accuracy(differing(concepts), name, settings, FLUX) for what, concepts in SHIFTS.items()}
        by_shift = ", ".join(f"{what} {value:.2f}" for what, value in found.items())
        yield f"{title}: {np.mean(list(found.values())):.2f} ({by_shift}); published, more kinds: {published:.1f}"


def differing(concepts: list[str]) -> fd.Stream:
    """Ten clients of these concepts, one time step of 3,000 MNIST rows each and one that tests."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "differing.toml"
        recipe.write_text(
            f'base = "mnist"\nconcepts = {concepts}\npattern = ["0123012301", "0123012301"]\nrows = 3000\n'
        )
        return fd.stream(str(recipe))


def accuracy(stream: fd.Stream, name: str, settings: dict[str, object], local: fd.Local) -> float:
    """Percent of the next time steps' rows that are right, as a mean over clients and time."""
    method = algorithms.algorithm(name, **settings)
    return 100 * float(np.mean([step.accuracy.mean() for step in fd.run(stream, method, net=NET, local=local)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
