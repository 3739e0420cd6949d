"""Means and deviations of layer outputs on the clients' data: by hand, and equal on every engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

import feddrift as fd
from feddrift import rng
from feddrift.data import Stream
from feddrift.engines.external_model import make_simulator
from feddrift.engines.local import engine as local_engine
from feddrift.models import graft, join, take
from feddrift.nets import get_layer_width
from feddrift.nets.external import net_of
from feddrift.nets.resnet import resnet18
from feddrift.types import Floats, Models, Moments, Net, Projection
from tests.support.engines import (
    EACH_ENGINE,
    ENGINE_CLASSES,
    ENGINE_NAMES,
    LOCAL,
    ThresholdModel,
    make_engine,
    make_threshold_models,
    make_uneven_stream,
)

LINEAR = fd.mlp(1, (), 2)
QUESTIONS: list[dict[str, Any]] = [
    {"layer": "input"},
    {"layer": "input", "by": "class", "square": False},
    {"layer": "trunk", "by": "class"},
    {"layer": "trunk", "project": np.arange(12.0).reshape(6, 2) / 7},
    {"layer": "trunk", "by": "class", "project": Projection((3, 4), 4)},
    {"layer": "logits", "by": "class"},
]


def make_number_stream() -> Stream:
    """Inputs and labels of four clients, of which the third has none at time 0."""
    cells: list[Any] = [([1, 2, 3, 6], [0, 0, 0, 1]), ([4], [1]), None, ([1, 9], [0, 1])]
    now = [cell and (np.array(cell[0], dtype=float)[:, None], np.array(cell[1])) for cell in cells]
    return Stream.from_arrays([now, now], n_classes=2)


def list_arrays(moments: Moments) -> list[Any]:
    return [moments.count, moments.mean, moments.std]


@pytest.mark.parametrize("name", EACH_ENGINE)
def test_moments_by_hand(name: str) -> None:
    fed = ENGINE_CLASSES[name](make_number_stream(), LINEAR, LOCAL, 3).at(0)
    fed.worker.known.reachable = np.array([True, True, True, False])
    models, nan = make_threshold_models(2.5, 4.5), np.nan
    whole = fed.moments(models, "input")
    assert whole.count.tolist() == [[[4], [4]], [[1], [1]], [[0], [0]], [[0], [0]]]
    np.testing.assert_allclose(whole.mean[:, 0, 0, 0], [3, 4, nan, nan])
    np.testing.assert_allclose(whole.std[:, 0, 0, 0], [np.sqrt(3.5), 0, nan, nan])
    by_class = fed.moments(models, "logits", by="class")
    assert by_class.count[:, 0].tolist() == [[3, 1], [0, 1], [0, 0], [0, 0]]
    # Of the logit of yes: ten times the distance to the model's limit.
    np.testing.assert_allclose(by_class.mean[0, :, :, 1], [[-5, 35], [-25, 15]], atol=1e-4)
    np.testing.assert_allclose(by_class.std[0, 0, :, 1], [10 * np.sqrt(2 / 3), 0], atol=1e-4)
    assert np.isnan(by_class.mean[1, :, 0]).all() and np.isnan(by_class.std[1, :, 0]).all()
    twice = fed.moments(models, "trunk", project=np.array([[2.0, -1.0]]), square=False)  # a linear net has no trunk
    np.testing.assert_allclose(twice.mean[:2, 0, 0], [[6, -3], [8, -4]])
    assert np.isnan(twice.std).all()


def make_shared_and_private_models(fed: Any) -> Models:
    """Three models, the second on the trunk of the first, and one of the second client's own."""
    apart = fed.fresh(4, distinct=True)
    first = take(apart, [0], [0])
    three = join(join(first, graft(take(apart, [1], [1]), first, family=0)), take(apart, [2], [2]))
    return join(three, take(apart, [3], [3], owner=[1]))


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True])
def test_engines_report_the_same_moments(masked: bool) -> None:
    stream = make_uneven_stream(2)
    answers: list[Any] = []
    for name in ENGINE_NAMES:
        fed = make_engine(name, stream).at(3)
        models = make_shared_and_private_models(fed)
        if masked:
            models = replace(models, mask=np.array([[1, 0, 1], [1, 1, 1], [0, 0, 1], [1, 1, 0]], dtype=float))
        answers.append([list_arrays(fed.moments(models, **question)) for question in QUESTIONS] + [[fed.sent]])
    first = answers[0][2][1]
    assert np.isfinite(first[1, 3]).any() and np.isnan(first[0, 3]).all()  # a private model is its owner's
    assert not np.allclose(first[1, 0], first[1, 2], equal_nan=True)
    assert np.allclose(first[1, 0], first[1, 1], equal_nan=True) != masked  # one trunk
    for name, other in zip(ENGINE_NAMES[1:], answers[1:], strict=True):
        for a, b in zip(jax.tree.leaves(answers[0]), jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5, err_msg=name)


def test_moments_are_those_of_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_engine, "MAX_SCORED_VALUES", 50)  # a few rows at a time
    stream, tau = make_uneven_stream(1), 2
    fed = make_engine("simulator", stream).at(tau)
    models, project = fed.fresh(2, distinct=True), Projection((7, 8), 3)
    moments = fed.moments(models, "trunk", by="class", project=project)
    for c, m, k in np.ndindex(4, 2, 2):
        x, y = stream.cell(tau, c)
        params = {name: leaf[m] for name, leaf in models.params.items()}
        rows = np.maximum(x[y == k] @ params["W1"] + params["b1"], 0) @ project.matrix(6)
        assert moments.count[c, m, k] == len(rows)
        if len(rows):
            np.testing.assert_allclose(moments.mean[c, m, k], rows.mean(axis=0), atol=1e-6)
            np.testing.assert_allclose(moments.std[c, m, k], rows.std(axis=0), atol=1e-6)


@pytest.mark.parametrize("name", EACH_ENGINE)
def test_the_traffic_of_moments_is_counted(name: str) -> None:
    fed = ENGINE_CLASSES[name](make_number_stream(), LINEAR, LOCAL, 3).at(0)
    models, size = make_threshold_models(2.5, 4.5), 4  # a weight and a bias for each class
    asked = np.array([1, 1, 0, 1])
    fed.moments(models, "input", by="class")
    numbers_told = 2 * size + 2 * 2 * (2 * 1 + 1)  # two models down; two models, two classes, (2 d + 1) numbers up
    np.testing.assert_allclose(fed.sent, asked * numbers_told / size)
    fed.moments(models, "input", project=np.ones((1, 3)), square=False)
    numbers_told += 3 + 2 * (3 + 1)  # the models are there; a matrix down, d + 1 numbers up
    np.testing.assert_allclose(fed.sent, asked * numbers_told / size)
    fed.moments(models, "input", project=Projection((1, 2), 3))
    numbers_told += 2 * 3  # a map that both sides draw is not sent, and one number is all there is
    np.testing.assert_allclose(fed.sent, asked * numbers_told / size)
    np.testing.assert_array_equal(fed.sent, fed.sent_scoring)


@pytest.mark.slow
def test_the_head_of_a_net_gets_the_declared_features() -> None:
    key, draw = rng.derive_key(0, "init", 0), np.random.default_rng(0)
    for hidden in ((), 4, (5, 3)):
        net = fd.mlp(6, hidden, 2)
        params, x = net.init(key), draw.random((7, 2, 3), dtype=np.float32)
        last = len(params) // 2
        assert net.hidden is not None
        seen = net.hidden(params, x)
        assert seen.shape == (7, get_layer_width(net, "trunk", (2, 3), 2))
        np.testing.assert_allclose(seen @ params[f"W{last}"] + params[f"b{last}"], net.apply(params, x), atol=1e-6)
    net, pictures = resnet18(3), draw.integers(0, 255, (2, 33, 33, 3)).astype(np.uint8)
    params = net.init(key)
    assert net.hidden is not None and get_layer_width(net, "trunk", (33, 33, 3), 3) == 512
    seen = net.hidden(params, pictures)
    np.testing.assert_allclose(
        seen @ params["fc"]["weight"].T + params["fc"]["bias"], net.apply(params, pictures), atol=1e-4
    )


def hide_features(net: Net) -> Net:
    return Net(net.init, net.apply, net.trunk)


@pytest.mark.parametrize("name", EACH_ENGINE)
def test_a_net_that_does_not_define_its_features(name: str) -> None:
    stream = make_uneven_stream()
    fed = ENGINE_CLASSES[name](stream, hide_features(fd.mlp(3, 6, 2)), LOCAL, 3).at(2)
    with pytest.raises(fd.ConfigError, match=r"Net\(init, apply, trunk, hidden\).* use layer=input or logits"):
        fed.moments(fed.fresh(), "trunk")
    assert np.isfinite(fed.moments(fed.fresh(), "logits").mean[1]).all()


def test_a_model_that_trains_itself_has_inputs_and_logits() -> None:
    fed = make_simulator(make_number_stream(), net_of(ThresholdModel()), LOCAL, 0).at(0)
    np.testing.assert_allclose(fed.moments(fed.fresh(), "logits").mean[:, 0, 0, 1], [30, 40, np.nan, 50])
    with pytest.raises(fd.ConfigError, match="needs a net with the function `hidden`"):
        fed.moments(fed.fresh(), "trunk")


@pytest.mark.parametrize("name", EACH_ENGINE)
def test_questions_that_make_no_sense_are_refused(name: str) -> None:
    fed = ENGINE_CLASSES[name](make_number_stream(), LINEAR, LOCAL, 3).at(0)
    models, wrong = fed.fresh(), np.ones((2, 3))
    questions: dict[str, Any] = {
        "layer must be input, trunk or logits, got 'head'": {"layer": "head"},
        "by must be all or class, got 'client'": {"layer": "input", "by": "client"},
        r"project must be a matrix \[1, d\] for layer=input, got shape \(2, 3\)": {"layer": "input", "project": wrong},
    }
    for sentence, question in questions.items():
        with pytest.raises(fd.ConfigError, match=sentence):
            fed.moments(models, **question)
    assert not fed.sent.any()


def test_a_map_is_a_function_of_its_key() -> None:
    a: Floats = Projection((1, 2), 3).matrix(10)
    np.testing.assert_array_equal(a, Projection((1, 2), 3).matrix(10))
    np.testing.assert_allclose(a.T @ a, np.eye(3), atol=1e-12)
    assert not np.allclose(a, Projection((1, 3), 3).matrix(10))
    assert Projection((1, 2), 5).matrix(2).shape == (2, 2)
