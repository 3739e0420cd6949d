"""Scores, compared with scikit-learn for each client."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn import metrics as sk

import feddrift as fd
from feddrift import scores
from feddrift.engines import engine as find_engine
from feddrift.errors import ConfigError
from feddrift.nets import default_net
from feddrift.simulation import run_steps
from feddrift.testing import small_stream


def draw_scores(n_classes: int, sizes: list[int], seed: int) -> tuple[Any, ...]:
    draw = np.random.default_rng(seed)
    logits = draw.normal(size=(sum(sizes), n_classes)).round(1)  # ties, too
    chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    y = draw.integers(0, n_classes, sum(sizes)).astype(np.int32)
    y[: sizes[0]] = 1  # a client with one class
    return chances, chances.argmax(axis=1), y, np.array(sizes), draw.integers(0, 9, (len(sizes), n_classes))


@pytest.mark.parametrize("n_classes", [2, 3, 7])
@pytest.mark.parametrize("seed", [0, 1])
def test_they_are_those_of_scikit_learn(n_classes: int, seed: int) -> None:
    sizes = [20, 60, 0, 200, 1]
    chances, predicted, y, n, received = draw_scores(n_classes, sizes, seed)
    found = scores.compute_scores(chances, predicted, y, n, received)
    assert set(found) == set(scores.SCORES)
    start = 0
    for c, size in enumerate(sizes):
        part, start = slice(start, start + size), start + size
        if not size:
            assert all(np.isnan(values[c]) for values in found.values())
            continue
        p, labels, true = chances[part], list(range(n_classes)), y[part]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of classes that a client does not have
            expected = {
                "log_loss": sk.log_loss(true, p, labels=labels),
                "brier": sk.brier_score_loss(
                    true, p[:, 1] if n_classes == 2 else p, **({} if n_classes == 2 else {"labels": labels})
                ),
                "balanced_accuracy": sk.balanced_accuracy_score(true, predicted[part]),
                "f1": sk.f1_score(true, predicted[part], average="macro"),
                "majority": np.mean(true == received[c].argmax()),
            }
        for name, value in expected.items():
            assert found[name][c] == pytest.approx(value, rel=1e-12), (name, c)
        classes = [k for k in (labels if n_classes > 2 else [1]) if 0 < (true == k).sum() < size]
        areas = [sk.roc_auc_score(true == k, p[:, k]) for k in classes]
        assert found["auc"][c] == pytest.approx(np.mean(areas), rel=1e-12) if areas else np.isnan(found["auc"][c])
    if n_classes > 2:  # and where all classes are there, its own average
        p, true = chances[sum(sizes[:3]) : -1], y[sum(sizes[:3]) : -1]
        assert found["auc"][3] == pytest.approx(sk.roc_auc_score(true, p, multi_class="ovr"), rel=1e-12)


def test_a_single_class_is_accepted() -> None:
    cells = [[(np.random.default_rng(t).random((8, 2)), np.zeros(8, dtype=int))] for t in range(3)]
    step = next(fd.run(fd.Stream.from_arrays(cells), "Oblivious", local=fd.Local(rounds=1, steps=1)))
    assert step.scores["log_loss"][0] == 0 and np.isnan(step.scores["auc"][0])


def test_the_edges() -> None:
    chances = np.array([[1.0, 0.0], [0.0, 1.0]])
    found = scores.compute_scores(
        chances, np.array([0, 1]), np.array([1, 1]), np.array([2]), np.zeros((1, 2), dtype=int)
    )
    assert found["log_loss"][0] == pytest.approx(-np.log(np.finfo(float).eps) / 2)  # certain and wrong is not infinite
    assert np.isnan(found["majority"][0])  # nothing received before
    empty = scores.compute_scores(
        np.zeros((0, 3)), np.zeros(0, int), np.zeros(0, int), np.array([0, 0]), np.zeros((2, 3), int)
    )
    assert all(np.isnan(values).all() and values.shape == (2,) for values in empty.values())
    with pytest.raises(ConfigError, match="unknown score 'acc'.*accuracy, log_loss"):
        scores.find_score("acc")


@pytest.mark.parametrize("name", ["FedDrift", "AUE"])
def test_a_record_has_those_of_the_models_that_it_exports(name: str, tmp_path: Path) -> None:
    """After the last time step they are tested on the last cells, which scikit-learn can do as well."""
    record = fd.record("sea-4", name, out=tmp_path / "runs", rounds=3)
    models = fd.load_models(fd.export(tmp_path / "runs", tmp_path / "models")[0])
    stream = fd.stream("sea-4")
    for c, client in enumerate(stream.clients):
        x, y = stream.cell(10, c)
        p, rows = models.predict_proba(client, x), record.rows
        np.testing.assert_allclose(p.sum(axis=1), 1)
        assert rows.log_loss[-1, c] == pytest.approx(sk.log_loss(y, p), abs=1e-4)
        assert rows.brier[-1, c] == pytest.approx(sk.brier_score_loss(y, p[:, 1]), abs=1e-4)
        assert rows.auc[-1, c] == pytest.approx(sk.roc_auc_score(y, p[:, 1]), abs=1e-4)
        predicted = models.predict(client, x)
        assert rows.balanced_accuracy[-1, c] == pytest.approx(sk.balanced_accuracy_score(y, predicted), abs=0.005)
        assert rows.f1[-1, c] == pytest.approx(sk.f1_score(y, predicted, average="macro"), abs=0.005)  # ties of floats
        seen = np.concatenate([stream.cell(t, c)[1] for t in range(10)])
        assert rows.majority[-1, c] == pytest.approx(np.mean(y == np.bincount(seen).argmax()), abs=1e-6)
    assert set(scores.SCORES) <= set(fd.rows(record))


def test_received_models_are_counted_correctly_in_any_order_of_times() -> None:
    """An engine counts on from the time it was asked for last."""
    stream, local = fd.stream("sea-4"), fd.Local(rounds=1, steps=1)
    state = next(fd.run(stream, "Oblivious", local=local)).state
    engine = find_engine("simulator")(stream, default_net(stream), local, 0)
    for t in (3, 5, 2, 10, 10):
        for c, majority in enumerate(engine.scores(state, t)["majority"]):
            seen = np.concatenate([stream.cell(past, c)[1] for past in range(t)])
            assert majority == np.mean(stream.cell(t, c)[1] == np.bincount(seen).argmax())


def test_every_engine_gives_the_same_explanation() -> None:
    local, stream = fd.Local(rounds=2, steps=3, batch=8), small_stream(missing=[(0, 0), (3, 1)])
    pytest.importorskip("flwr", reason="the extra 'flower' is not installed")
    from tests.support.flower import InProcessFlower

    over_flower = InProcessFlower(stream, default_net(stream), local, seed=0)
    over_flower.n_steps = stream.n_steps
    runs = {
        "simulator": fd.run(stream, "FedDrift", local=local),
        "reference": fd.run(stream, "FedDrift", local=local, engine="reference"),
        "flower": run_steps(over_flower, fd.algorithm("FedDrift")),
    }
    steps = {name: list(run) for name, run in runs.items()}
    for ours, plain, remote in zip(*steps.values(), strict=True):
        for name in scores.SCORES:
            np.testing.assert_allclose(ours.scores[name], plain.scores[name], atol=1e-4, err_msg=name)
            np.testing.assert_allclose(ours.scores[name], remote.scores[name], atol=1e-4, err_msg=name)
