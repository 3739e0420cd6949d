"""Attacks of a server that reads a client's rows: what the default policy refuses, and what it does not prevent.

Each attack also runs against a client that permits everything, where it must succeed: so it is able to.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

from feddrift.engines.flower.client.client import Client
from feddrift.engines.flower.client.policy import PERMISSIVE, Policy
from feddrift.types import Local
from tests.support import attacks
from tests.support.attacks import Attacker

N_FEATURES = 5
DEFAULT = Policy()
PAPER = Local(rounds=1)  # Adam, 50 steps, batch 50
SMALLEST = Local(rounds=1, steps=5, batch=11)  # little more than the default policy requires


def make_attack(
    folder: Path, policy: Policy = DEFAULT, n: int = 59, rare: int | None = None, **settings: Any
) -> tuple[Attacker, attacks.Array, attacks.Array]:
    """Return a server with one client, the rows of the client, and their labels; `rare` rows have class 1."""
    draw = np.random.default_rng(1)
    x = draw.normal(size=(n, N_FEATURES)).astype(np.float32)
    y = (x[:, 0] + 0.3 * draw.normal(size=n) > 0).astype(int) if rare is None else np.arange(n) < rare
    y = np.asarray(y, dtype=int)
    client = Client("a", folder, lambda k: (x, y) if k == 0 else None, policy=policy, **settings)
    attacker = Attacker(client, N_FEATURES)
    attacker.say_hello()
    return attacker, x, y


@pytest.mark.slow
def test_one_row_per_step_is_refused(tmp_path: Path) -> None:
    """The update of one step of SGD on one row, divided by the update of the bias, is the row."""
    attacker, x, _ = make_attack(tmp_path / "permissive", PERMISSIVE)
    assert attacks.count_recovered_rows(x, attacks.read_single_rows(attacker, [attacks.ONE_ROW_PER_STEP], 15)) > 8

    attacker, x, _ = make_attack(tmp_path / "default")
    adam = replace(PAPER, steps=1, batch=1)
    settings = [attacks.ONE_ROW_PER_STEP, adam, replace(adam, batch=10), replace(adam, steps=5), SMALLEST, PAPER]
    found = attacks.read_single_rows(attacker, settings, 15)
    assert attacks.count_recovered_rows(x, found) == 0 and attacks.find_smallest_distance(x, found) > 0.1
    reasons = " ".join(attacker.refused)
    assert all(reason in reasons for reason in ("optimizer sgd", "batch = 1,", "steps = 1,")), reasons


def test_units_that_react_to_one_row_reveal_nothing_while_adam_normalises_gradients(tmp_path: Path) -> None:
    linear = replace(attacks.ONE_ROW_PER_STEP, batch=60, trains="trunk")
    attacker, x, _ = make_attack(tmp_path / "permissive", PERMISSIVE, n=60)
    assert attacks.count_recovered_rows(x, attacks.isolate_rows_by_units(attacker, linear, 0.1, 15)) > 8
    attacker, x, _ = make_attack(tmp_path / "default", n=60)
    assert attacks.isolate_rows_by_units(attacker, linear, 0.1, 15) == []
    found = attacks.isolate_rows_by_units(attacker, PAPER, 0.1, 15)
    assert len(found) > 100 and attacks.count_recovered_rows(x, found) == 0
    assert attacks.find_smallest_distance(x, found) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize(("local", "minimum"), [(SMALLEST, 59), (PAPER, 30)])
def test_known_limit_many_updates_of_a_made_up_model_reveal_rows(local: Local, minimum: int, tmp_path: Path) -> None:
    """NOT prevented: gradients below Adam's eps make its steps linear, and the seed tells which rows each step drew."""
    settings = replace(local, lr=1e5, weight_decay=0.0, trains="trunk")
    attacker, x, _ = make_attack(tmp_path)
    assert attacks.count_recovered_rows(x, attacks.solve_many_updates(attacker, settings, len(x), 90)) >= minimum
    assert not attacker.refused


@pytest.mark.slow
@pytest.mark.parametrize("primes", [False, True])
def test_known_limit_units_that_react_to_one_row_reveal_rows_if_adam_is_linear(primes: bool, tmp_path: Path) -> None:
    """NOT prevented; with `primes` also with the settings of an honest experiment: a large gradient comes first."""
    settings = replace(PAPER, trains="trunk")
    if not primes:
        settings = replace(settings, lr=1e5, weight_decay=0.0)
    attacker, x, _ = make_attack(tmp_path, n=60)
    found = attacks.isolate_rows_by_units(attacker, settings, 1.0 if primes else attacks.TINY, 100, primes=primes)
    assert attacks.count_recovered_rows(x, found) > 20 and not attacker.refused


def test_pinned_settings_stop_a_server_that_becomes_malicious(tmp_path: Path) -> None:
    attacker, _, _ = make_attack(tmp_path)
    assert attacker.train(attacker.make_open_model(), PAPER)[0] is not None
    assert attacks.solve_many_updates(attacker, replace(SMALLEST, lr=1e5, weight_decay=0.0), 59, 2) == []
    assert attacker.refused[0].startswith("it changes pinned settings of the experiment (batch: 50, requested: 11; lr:")


def test_a_class_of_one_row_is_not_described(tmp_path: Path) -> None:
    """Neither by its own statistics nor as the difference of all rows and the other class."""

    def ask(attacker: Attacker, by: str) -> dict[str, Any]:
        specs, parts, _ = attacker.make_models(attacker.make_open_model())
        body = {"models": specs, "layer": "input", "by": by, "project": None, "square": True}
        return attacker.send("describe", body, parts)[0]

    def find_rows(attacker: Attacker) -> list[attacks.Array]:
        by_class = ask(attacker, "class")
        every = ask(attacker, "all")
        counts = [*by_class["count"][0], *every["count"][0]]
        means = [np.array(mean) for mean in (*by_class["mean"][0], *every["mean"][0])]
        found = [mean for mean, count in zip(means, counts, strict=True) if count]
        for known, mean in zip(counts[:-1], means[:-1], strict=True):
            if 0 < known < counts[-1]:
                found.append((means[-1] * counts[-1] - mean * known) / (counts[-1] - known))
        return found

    attacker, x, _ = make_attack(tmp_path / "permissive", PERMISSIVE, rare=1, describe=True)
    assert attacks.count_recovered_rows(x, find_rows(attacker)) == 1
    attacker, x, _ = make_attack(tmp_path / "on", rare=1, describe=True)
    found = find_rows(attacker)
    assert len(found) == 1 and attacks.count_recovered_rows(x, found) == 0  # the mean of all rows
    attacker, _, _ = make_attack(tmp_path / "off", rare=1)
    assert ask(attacker, "class")["count"] is None


@pytest.mark.parametrize("setting", [{"even": 1}, {"balance": True}])
def test_a_class_of_one_row_does_not_determine_an_update(setting: dict[str, Any], tmp_path: Path) -> None:
    """Half of all examples would be this row, or one of two."""
    local = replace(PAPER, **setting)
    attacker, _, _ = make_attack(tmp_path / "permissive", PERMISSIVE, rare=1)
    assert attacker.train(attacker.make_open_model(), local)[0] is not None
    attacker, _, _ = make_attack(tmp_path / "default", rare=1)
    assert attacker.train(attacker.make_open_model(), local)[0] is None
    assert "one row counts as much as 1 of 2, the policy requires at least 10 rows" in attacker.refused[0]


def test_a_small_cell_has_no_weight_scores_or_count(tmp_path: Path) -> None:
    """A batch of one row: weights of cells or a score of a made-up model would single it out."""
    draw = np.random.default_rng(2)
    cells = [(draw.normal(size=(n, N_FEATURES)).astype(np.float32), np.arange(n) % 2) for n in (40, 1)]

    def attack(policy: Policy, folder: Path) -> tuple[Attacker, list[Any]]:
        client = Client("a", folder, lambda k: cells[k] if k < 2 else None, policy=policy)
        attacker = Attacker(client, N_FEATURES)
        attacker.say_hello(0)
        return attacker, attacker.say_hello(1)["cells"]

    attacker, shown = attack(PERMISSIVE, tmp_path / "permissive")
    assert shown == [[0, 40], [1, 1]]
    local = replace(attacks.ONE_ROW_PER_STEP, batch=50, steps=50, lr=1e-3)
    change, _ = attacker.train(attacker.make_open_model(), local, ((0, 1), (1e-12, 1.0)))
    assert min(np.abs(row - cells[1][0][0]).max() for row in attacks.divide_updates(change)) < 1e-3
    attacker, shown = attack(Policy(), tmp_path / "default")
    assert shown == [[0, 40]]
    assert attacker.train(attacker.make_open_model(), PAPER, ((0, 1), (1e-12, 1.0)))[0] is None
    specs, parts, _ = attacker.make_models(attacker.make_open_model())
    scores = attacker.send("evaluate", {"metric": "error", "models": specs}, parts)[0]
    assert [t for t, _, _ in scores["stored"]] == [0] and "new" not in scores


@pytest.mark.slow
def test_known_limit_counts_of_mistakes_reveal_the_values_of_a_column(tmp_path: Path) -> None:
    """NOT prevented: each count of a made-up model says how many rows of each class are beyond a threshold."""
    attacker, x, _ = make_attack(tmp_path)
    thresholds = np.linspace(-3, 3, 601)
    models = []
    for threshold in thresholds:
        params = {name: np.zeros_like(value) for name, value in attacker.make_open_model().items()}
        params["W1"][0, 0] = params["W2"][0, 1] = 1.0
        params["b1"][0] = 4.0
        params["b2"][1] = -4.0 - threshold  # class 1 is predicted if column 0 is beyond the threshold
        models.append(params)
    counts = []
    for k in range(0, len(models), 200):
        specs, parts, _ = attacker.make_models(*models[k : k + 200])
        counts += attacker.send("evaluate", {"metric": "error", "models": specs}, parts)[0]["new"]
    values = thresholds[1:][np.diff(counts) != 0] - (thresholds[1] - thresholds[0]) / 2
    errors = np.abs(x[:, 0][:, None] - values).min(axis=1) / x[:, 0].std()
    assert not attacker.refused and (errors < 0.01).mean() > 0.8
