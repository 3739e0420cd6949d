"""Balanced training: every class of a client's data has the same weight, on all engines, only on request."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import feddrift as fd
from feddrift.data import Stream
from feddrift.engines.local import sampling
from feddrift.models import take
from feddrift.reports import event_text
from feddrift.types import Floats, Local
from tests.support.cli import run_feddrift
from tests.support.engines import (
    ENGINE_NAMES,
    LOCAL,
    assert_same,
    draw_weights,
    is_different,
    make_engine,
    make_uneven_stream,
)

BALANCED = replace(LOCAL, balance=True)


def make_rare_stream(n_clients: int = 3, n_steps: int = 3, n: int = 400) -> Stream:
    """One row in twelve is positive, and features tell so with much noise; the last client never sees a positive."""
    draw = np.random.default_rng(0)

    def cell(c: int) -> Any:
        y = (draw.random(n) < 1 / 12) & (c < n_clients - 1)
        return draw.normal(size=(n, 2)) + 1.2 * y[:, None], y.astype(int)

    return Stream.from_arrays([[cell(c) for c in range(n_clients)] for _ in range(n_steps + 1)], n_classes=2)


def compute_drawn_shares(classes: list[int], sizes: list[int], w: Floats) -> Floats:
    """How often each class is drawn: cells by w times their mass, places of their tables all alike."""
    y, n_cells = np.array(classes), np.array(sizes)
    tables = sampling.build_balanced_tables(y, n_cells, w)
    chance = w * tables.mass / (w * tables.mass).sum() / tables.sizes
    return np.bincount(y[tables.rows], np.repeat(chance, tables.sizes)).astype(np.float64)


def test_all_classes_are_drawn_equally_often() -> None:
    np.testing.assert_allclose(compute_drawn_shares([0] * 9 + [1], [10], np.ones(1)), [0.5, 0.5])
    classes = [0] * 30 + [1] * 5 + [0] * 40 + [2] * 7  # two cells, of which each lacks a class
    np.testing.assert_allclose(compute_drawn_shares(classes, [35, 47], np.array([1.0, 0.25])), [1 / 3] * 3, atol=0.01)
    np.testing.assert_allclose(compute_drawn_shares([1, 1, 1], [2, 1], np.ones(2)), [0, 1])  # a class that nobody has
    scarce = compute_drawn_shares(
        [0] * 1000 + [0, 1], [1000, 2], np.array([1.0, 1e-9])
    )  # a table does not grow without end
    assert scarce[1] > 0.49


def test_every_row_has_a_place_and_every_minibatch_its_share_of_all_classes() -> None:
    classes = np.array([0] * 80 + [1] * 16 + [2] * 4)
    tables = sampling.build_balanced_tables(classes, np.array([100]), np.ones(1))
    assert set(tables.rows.tolist()) == set(range(100)) and tables.sizes.tolist() == [240]
    for start in range(0, 240, 30):
        assert np.ptp(np.bincount(classes[np.roll(tables.rows, -start)[:30]])) <= 2


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"bags": True}, {"hold_out": 0.3}, {"optimizer": "sgd"}], ids=str)
def test_engines_agree(more: dict[str, Any]) -> None:
    stream = make_uneven_stream(1)
    stream.y[np.random.default_rng(2).random(len(stream.y)) < 0.6] = 0
    w, results = draw_weights(2, stream, 3, 1), []
    for name in ENGINE_NAMES:
        fed = make_engine(name, stream, replace(BALANCED, **more)).at(2)
        models = fed.fresh(3, distinct=True)
        tried = fed.tournament(models, w[:2], np.array([0, -1, 2, 1]), ("warm", "fresh"))
        results.append([fed.local_updates(models, w).params, fed.train(models, w).params, tried.wrong])
    for other in results[1:]:
        assert_same(results[0], other, atol=1e-5)
    plain = make_engine("simulator", stream, replace(LOCAL, **more)).at(2)
    assert is_different(plain.train(plain.fresh(3, distinct=True), w).params, results[0][1])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ENGINE_NAMES if name != "reference"])
def test_engines_agree_on_heads_that_share_a_trunk(name: str) -> None:
    stream, results = make_uneven_stream(2), []
    w = draw_weights(2, stream, 3, 4)
    for kind in ("reference", name):
        fed = make_engine(kind, stream, BALANCED).at(2)
        models = take(fed.fresh(), [0, 0, 0], (0, 1, 2), (0, 0, 2))
        results.append(fed.train(models, w).params)
    assert_same(results[0], results[1], atol=1e-5)


def balanced_accuracy(stream: Stream, name: str, **options: Any) -> float:
    local = Local(rounds=10, steps=20, batch=32, lr=0.02, **options)
    last = list(fd.run(stream, name, local=local))[-1]
    return float(last.scores["balanced_accuracy"][:-1].mean())  # of the clients that have both classes


@pytest.mark.parametrize("name", ["Oblivious", "FedDrift", "Local", "FineTuned"])
def test_rare_classes_are_found(name: str) -> None:
    stream = make_rare_stream()
    assert balanced_accuracy(stream, name, balance=True) > balanced_accuracy(stream, name) + 0.1


def test_the_most_frequent_class_stays_the_most_frequent() -> None:
    steps = [list(fd.run(make_rare_stream(), "Majority", local=replace(LOCAL, balance=b)))[-1] for b in (False, True)]
    assert_same(*(step.state.models.params for step in steps))


def test_it_is_recorded_where_it_is_set_alone(tmp_path: Path) -> None:
    assert "balance" not in Local().to_dict() and Local(**Local(balance=True).to_dict()) == Local(balance=True)
    run = fd.record("sine-2", "Oblivious", out=tmp_path, rounds=1, balance=True)
    assert run.header["overrides"]["balance"] is True and run.header["local"]["balance"] is True
    assert " --balance " in event_text.build_run_command(run.header)[0]
    plain = fd.record("sine-2", "Oblivious", out=tmp_path, rounds=1, balance=False)
    assert "balance" not in {**plain.header["overrides"], **plain.header["local"]}


def test_balance_is_set_on_the_command_line_and_in_a_federation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("run", "--stream", "sine-2", "--algorithm", "Oblivious", "--rounds", "1", "--balance", "--out")
    assert run_feddrift(capsys, *words, str(tmp_path))[0] == 0
    (run,) = fd.read(tmp_path)
    assert run.header["local"]["balance"] is True
    pytest.importorskip("flwr", reason="the extra 'flower' is not installed")
    from feddrift.deploy.settings import Settings

    told = {"experiment": "a", "clients": ["b"], "features": [2], "classes": [0, 1], "balance": True}
    assert Settings.from_dict(told, "here").local.balance
    with pytest.raises(fd.ConfigError, match="balance must be True or False, got 1"):
        Local(balance=1)  # type: ignore[arg-type]
