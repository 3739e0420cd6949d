"""Scores by class and by group: counted by hand, and equal on every engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

import feddrift as fd
from feddrift.data import Stream
from feddrift.engines.server import federation
from tests.support.engines import (
    EACH_ENGINE,
    ENGINE_CLASSES,
    ENGINE_NAMES,
    IN_PROCESS_ENGINES,
    LINEAR,
    LOCAL,
    SCORING_MODULES,
    draw_weights,
    make_engine,
    make_threshold_models,
    make_uneven_stream,
)

WITH_GROUPS = [*IN_PROCESS_ENGINES, "threaded"]  # clients over Flower have none


def make_grouped_stream() -> Stream:
    """Inputs, labels and groups of four clients; the third has none at time 1."""
    cells: list[Any] = [([1, 2, 3, 4, 5, 6], [0, 0, 0, 1, 1, 0]), ([1, 2, 5], [1, 0, 1]), ([7], [1]), ([1, 9], [0, 1])]
    now = [(np.array(x, dtype=float)[:, None], np.array(y)) for x, y in cells]
    groups = [[0, 0, 1, 1, 1, 2], [1, 1, 0], [2], [0, 1]]
    later: list[Any] = [*now[:2], None, now[3]]
    return Stream.from_arrays([now, later, now], n_classes=2, groups=[groups] * 3)


@pytest.mark.parametrize("name", EACH_ENGINE)
def test_errors_by_class_by_hand(name: str) -> None:
    fed = ENGINE_CLASSES[name](make_grouped_stream(), LINEAR, LOCAL, 3).at(1)
    fed.worker.known.reachable = np.array([True, True, True, False])
    error, nan = fed.evaluate(make_threshold_models(2.5, 4.5), by="class"), np.nan
    # Above 2.5 errs at 3 and 6, above 4.5 at 4 and 6; nobody knows that the second client's 1 is a yes.
    np.testing.assert_allclose(error[0], [[2 / 4, 0], [1 / 4, 1 / 2]])
    np.testing.assert_allclose(error[1], [[0, 1 / 2], [0, 1 / 2]])
    np.testing.assert_array_equal(error[2:], np.full((2, 2, 2), nan))


@pytest.mark.parametrize("name", WITH_GROUPS)
def test_errors_by_group_by_hand(name: str) -> None:
    fed = ENGINE_CLASSES[name](make_grouped_stream(), LINEAR, LOCAL, 3).at(0)
    assert fed.n_groups == 3
    error, nan = fed.evaluate(make_threshold_models(2.5, 4.5), by="group"), np.nan
    np.testing.assert_allclose(error[0], [[0, 1 / 3, 1], [0, 1 / 3, 1]])
    np.testing.assert_allclose(error[1], [[0, 1 / 2, nan], [0, 1 / 2, nan]])
    np.testing.assert_allclose(error[2], [[nan, nan, 0], [nan, nan, 0]])
    assert fed.get_losses(np.zeros(4, dtype=int)).tolist() != error[:, 0, 0].tolist()  # what records have is the whole


@pytest.mark.parametrize("name", WITH_GROUPS)
def test_distances_by_group_and_client_by_hand(name: str) -> None:
    fed = ENGINE_CLASSES[name](make_grouped_stream(), LINEAR, LOCAL, 3).at(1)
    models, w, nan = make_threshold_models(2.5, 4.5), np.zeros((2, 4, 2)), np.nan
    w[0, 0, 0] = w[0, 2, 0] = w[0, 1, 1] = 1  # the first and the third client are the first model's
    w[1, 0, 0] = 3.0
    L = fed.cross_evaluate(models, w, by="group", per_client=True)
    assert L.shape == (2, 2, 4, 3)
    np.testing.assert_allclose(L[0, 0], [[0, 1 / 3, 1], [nan] * 3, [nan, nan, 0], [nan] * 3])
    np.testing.assert_allclose(L[1, 1], [[nan] * 3, [0, 1 / 2, nan], [nan] * 3, [nan] * 3])
    together = fed.cross_evaluate(models, w, by="group")
    # Group 2: one row of the first client, four times (1 + 3) a mistake, and one of the third, right.
    np.testing.assert_allclose(together[0, 0], [0, 1 / 3, 4 / 5])
    np.testing.assert_allclose(fed.cross_evaluate(models, w, per_client=True)[0, 0], [2 / 6, nan, 0, nan])


def test_parts_make_the_whole() -> None:
    stream, draw = make_uneven_stream(1), np.random.default_rng(3)
    stream = replace(stream, group=draw.integers(0, 3, len(stream.y)))
    fed, w = make_engine("simulator", stream).at(2), draw_weights(2, stream, 3)
    models = fed.fresh(3, distinct=True)
    for by in ("class", "group"):
        labels = stream.y if by == "class" else stream.group
        assert labels is not None
        rows = [np.bincount(labels[stream.rows(2, c)], minlength=3) for c in range(4)]
        for metric in ("error", "loss", "brier"):
            parts = np.nan_to_num(fed.evaluate(models, metric, by=by))
            n = np.array(rows)[:, None, : parts.shape[2]]
            total = np.where(n.sum(axis=2) > 0, (parts * n).sum(axis=2) / np.maximum(n.sum(axis=2), 1), np.nan)
            np.testing.assert_allclose(total, fed.evaluate(models, metric), atol=1e-6)
    assert np.isfinite(fed.cross_evaluate(models, w, "loss", by="group")).any()


@pytest.mark.parametrize("sampled", [False, True])
def test_engines_score_parts_alike(sampled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in SCORING_MODULES if sampled else ():
        monkeypatch.setattr(module, "MAX_SCORED_ROWS", 5)
    stream = make_uneven_stream()
    w = draw_weights(2, stream, 3)
    answers = []
    for name in ENGINE_NAMES:
        fed = make_engine(name, stream).at(2)
        models = fed.fresh(3, distinct=True)
        answers.append(
            [
                fed.evaluate(models, by="class"), fed.evaluate(models, "loss", by="class"), fed.evaluate(models),
                fed.cross_evaluate(models, w, by="class"), fed.cross_evaluate(models, w, "loss", "class", True),
                fed.cross_evaluate(models, w), fed.sent,
            ]
        )  # fmt: skip
    for name, other in zip(ENGINE_NAMES[1:], answers[1:], strict=True):
        for a, b in zip(jax.tree.leaves(answers[0]), jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6, err_msg=name)


def test_idle_models_are_left_out_of_distances() -> None:
    fed = ENGINE_CLASSES["simulator"](make_grouped_stream(), LINEAR, LOCAL, 3).at(1)
    fed.idle_models = frozenset({1})
    w = np.zeros((2, 4, 2))
    w[:, :, 0] = w[0, 0, 1] = 1
    L = fed.cross_evaluate(make_threshold_models(2.5, 4.5), w, by="group", per_client=True)
    assert L.shape == (2, 2, 4, 3) and np.isnan(L[1]).all() and np.isnan(L[:, 1]).all() and np.isfinite(L[0, 0]).any()


@pytest.mark.parametrize("name", EACH_ENGINE)
def test_parts_that_there_are_not(name: str) -> None:
    fed = make_engine(name, make_uneven_stream()).at(2)
    assert fed.n_groups == 0 and isinstance(fed, federation.TimeStep)
    with pytest.raises(fd.ConfigError, match="rows belong to groups, and these do not: use by=class"):
        fed.evaluate(fed.fresh(), by="group")
    with pytest.raises(fd.ConfigError, match="by must be class or group, got 'client'"):
        fed.cross_evaluate(fed.fresh(), np.ones((3, 4, 1)), by="client")  # type: ignore[arg-type]
    assert not fed.sent.any()
