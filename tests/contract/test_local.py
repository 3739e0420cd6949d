"""Settings of Local (momentum, trained part, balanced classes, early stopping), equal on all engines."""

from __future__ import annotations

import copy
import sys
import types
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import feddrift as fd
from feddrift.data import Stream
from feddrift.engines.local import sampling
from feddrift.models import substitute_models, take
from feddrift.nets.perceptron import mlp
from feddrift.testing import check_algorithm
from feddrift.types import Local, Models, Pull
from tests.support.documentation import read_blocks
from tests.support.engines import (
    EACH_ENGINE,
    ENGINE_CLASSES,
    ENGINE_NAMES,
    LOCAL,
    assert_same,
    draw_weights,
    is_different,
    make_engine,
    make_uneven_stream,
    mark_slow,
)

VALUES: dict[str, dict[str, Any]] = {
    "momentum": {"optimizer": "sgd", "momentum": 0.9, "lr": 0.1},
    "trunk": {"trains": "trunk"},
    "even": {"even": 3, "trains": "head", "hold_out": 0.3},
    "patience": {"patience": 0.05, "hold_out": 0.3, "steps": 8, "balance": True},
}


def make_shared_trunk(fed: Any) -> Models:
    return take(fed.fresh(), [0, 0, 0], (0, 1, 2), (0, 0, 2))


@pytest.mark.slow
@pytest.mark.parametrize("value", VALUES)
def test_engines_agree(value: str) -> None:
    """A model apart and two on one trunk; in single rounds, in several, and in what is sent."""
    stream, local = make_uneven_stream(1), replace(LOCAL, **VALUES[value])
    w, results = draw_weights(2, stream, 3, 1), []
    for name in ENGINE_NAMES:
        fed = make_engine(name, stream, local).at(2)
        models = make_shared_trunk(fed)
        results.append([fed.local_updates(models, w).params, fed.train(models, w).params, fed.sent])
    for other in results[1:]:
        assert_same(results[0], other, atol=1e-5)
    plain = make_engine("simulator", stream, replace(local, **PLAIN)).at(2)
    assert is_different(plain.train(make_shared_trunk(plain), w).params, results[0][1])


def make_shared_and_private_models(fed: Any) -> tuple[Models, Models]:
    """A model for all, and a private copy of another at each client."""
    start = fed.fresh(2, distinct=True)
    return take(start, [0], [0]), take(start, [1] * 4, range(1, 5), owner=range(4))


@pytest.mark.slow
def test_engines_agree_on_pulls() -> None:
    """To where a round began, with weights of each client; and of private models to a shared one."""
    stream, results = make_uneven_stream(1), []
    w, own = draw_weights(2, stream, 3, 1), np.tile(np.eye(4), (3, 1, 1))
    for name in ENGINE_NAMES:
        fed = make_engine(name, stream, replace(LOCAL, steps=3)).at(2)
        models, (shared, private) = make_shared_trunk(fed), make_shared_and_private_models(fed)
        answers: list[Any] = [fed.train(models, w, local=replace(fed.local, pull=Pull([1.0, 0.5, 0.0, 2.0]))).params]
        tuned = fed.train(private, own, rounds=1, local=replace(fed.local, pull=Pull(1.0, to=shared)))
        answers.append(fed.evaluate(tuned, "loss"))  # of private models only scores leave a client
        results.append([*answers, fed.sent])
    for other in results[1:]:
        assert_same(results[0], other, atol=1e-5)
    free = make_engine("simulator", stream, replace(LOCAL, steps=3)).at(2)
    assert is_different(free.train(make_shared_trunk(free), w).params, results[0][0])


def test_models_are_pulled_to_those_in_their_places() -> None:
    fed = make_engine("reference", make_uneven_stream()).at(0)
    models, others = make_shared_trunk(fed), fed.fresh(3, distinct=True)
    assert_same(substitute_models(models, others).params["W2"], others.params["W2"])
    assert_same(
        substitute_models(models, others).params["W1"], others.params["W1"][[0, 2]]
    )  # of the first of each family
    assert_same(substitute_models(models, take(others, [1], [1])).params["W2"], others.params["W2"][[1, 1, 1]])


def test_a_pull_by_hand() -> None:
    """One row, two steps of sgd: b <- b - lr (gradient + weight (b - to)); the first is free where to is the start."""
    stream = Stream.from_arrays([[(np.ones((1, 1)), np.zeros(1, dtype=int))]] * 2, n_classes=2)
    net, w = mlp(1, (), 2), np.ones((1, 1, 1))
    local = Local(rounds=1, steps=2, batch=1, lr=0.1, optimizer="sgd", weight_decay=0.0)
    for name in ("reference", "simulator"):
        fed = ENGINE_CLASSES[name](stream, net, local, 0).at(0)
        models, other = fed.fresh(), fed.fresh(2, distinct=True)
        for to in (None, take(other, [1], [0])):
            theta = np.concatenate([models.params["W1"][0, 0], models.params["b1"][0]]).astype(float)
            aim = theta if to is None else np.concatenate([to.params["W1"][0, 0], to.params["b1"][0]])
            for _ in range(2):
                p = np.exp(theta[:2] + theta[2:]) / np.exp(theta[:2] + theta[2:]).sum()
                theta = theta - 0.1 * (np.tile(p - [1, 0], 2) + 2.0 * (theta - aim))
            trained = fed.train(models, w, local=replace(local, pull=Pull(2.0, to))).params
            np.testing.assert_allclose(np.concatenate([trained["W1"][0, 0], trained["b1"][0]]), theta, atol=1e-6)


def test_a_strong_pull_keeps_models_where_they_are_and_what_they_are_pulled_to_is_sent_once() -> None:
    stream = make_uneven_stream()
    fed = make_engine("simulator", stream, replace(LOCAL, optimizer="sgd", lr=0.01)).at(2)
    shared, private = make_shared_and_private_models(fed)
    local = replace(fed.local, steps=50, pull=Pull([50.0, 50.0, 50.0, 0.0], to=shared))
    tuned = fed.train(private, np.tile(np.eye(4), (3, 1, 1)), rounds=2, local=local)
    away = np.abs(tuned.params["W1"] - shared.params["W1"]).max(axis=(1, 2))
    assert away[1:3].max() < 0.02 < away[3]
    assert fed.sent.tolist() == (stream.counts[:3].sum(axis=0) > 0).astype(float).tolist()


def test_pulls_that_do_not_fit_are_refused() -> None:
    fed = make_engine("simulator", make_uneven_stream()).at(2)
    models, w = fed.fresh(3), np.ones((3, 4, 3))
    for pull, sentence in (
        (Pull([1.0, 2.0]), "one weight, or one for each of 4 clients, got"),
        (Pull(1.0, fed.fresh(2)), "to one model, or to one for each of 3, got 2"),
        (Pull(1.0, take(fed.fresh(), [0], [0], owner=[1])), "a pull needs shared models"),
    ):
        with pytest.raises(fd.ConfigError, match=sentence):
            fed.train(models, w, local=replace(LOCAL, pull=pull))
    with pytest.raises(fd.ConfigError, match="weight of a pull must be numbers of at least 0, got -1"):
        Pull(-1)
    with pytest.raises(fd.ConfigError, match=r"pull must be a Pull, such as Pull\(0.1\), got 0.1"):
        Local(pull=0.1)  # type: ignore[arg-type]
    assert "pull" not in Local().to_dict()


PLAIN: dict[str, Any] = {"momentum": 0.0, "trains": "all", "even": 0, "patience": 0.0}


@pytest.mark.parametrize(
    "name", mark_slow([name for name in ("simulator", "compiled", "flower") if name in ENGINE_NAMES], "compiled")
)
@pytest.mark.parametrize("value", ["trunk", "patience"])
def test_rounds_add_up(name: str, value: str) -> None:
    stream, local = make_uneven_stream(), replace(LOCAL, **VALUES[value])
    w = draw_weights(2, stream, 3, 1)
    at_once, one_by_one = make_engine(name, stream, local).at(2), make_engine(name, stream, local).at(2)
    models = make_shared_trunk(at_once)
    parts = models
    for _ in range(3):
        parts = one_by_one.train(parts, w, rounds=1)
    assert_same(at_once.train(models, w, rounds=3).params, parts.params)


@pytest.mark.parametrize("name", mark_slow(["simulator", "compiled", "reference"], "compiled"))
@pytest.mark.parametrize("value", ["momentum", "patience"])
def test_a_time_step_continues_where_it_stopped(name: str, value: str) -> None:
    """What momentum and patience remember is a part of what is saved."""
    stream, local = make_uneven_stream(), replace(LOCAL, **VALUES[value])
    w, first = np.ones((3, 4, 1)), make_engine(name, stream, local).at(2)
    models = first.train(first.fresh(), w, rounds=2)
    second = make_engine(name, stream, local).at(2)
    second.restore(copy.deepcopy(first.progress()))
    assert_same(first.train(models, w, rounds=2).params, second.train(models, w, rounds=2).params)


def test_momentum_by_hand() -> None:
    """Two steps on one row: the second moves by 0.5 of the first move, and by its own gradient."""
    stream = Stream.from_arrays([[(np.ones((1, 1)), np.zeros(1, dtype=int))]] * 2, n_classes=2)
    net, w = mlp(1, (), 2), np.ones((1, 1, 1))
    local = Local(rounds=1, steps=2, batch=1, lr=0.1, optimizer="sgd", momentum=0.5, weight_decay=0.0)
    for name in ("reference", "simulator", "compiled"):
        fed = ENGINE_CLASSES[name](stream, net, local, 0).at(0)
        models = fed.fresh()
        bias, z, memory = models.params["b1"][0].astype(float), models.params["W1"][0, 0].astype(float), np.zeros(2)
        for _ in range(2):
            p = np.exp(z + bias) / np.exp(z + bias).sum()
            memory = 0.5 * memory + (p - [1, 0])
            bias, z = bias - 0.1 * memory, z - 0.1 * memory  # the input is 1: weights and biases move alike
        np.testing.assert_allclose(fed.train(models, w).params["b1"][0], bias, atol=1e-6)


@pytest.mark.parametrize("name", EACH_ENGINE)
def test_a_trunk_can_learn_alone(name: str) -> None:
    stream = make_uneven_stream()
    fed = make_engine(name, stream, replace(LOCAL, trains="trunk")).at(2)
    models = make_shared_trunk(fed)
    trained = fed.train(models, np.ones((3, 4, 3)))
    assert_same([trained.params[k] for k in ("W2", "b2")], [models.params[k] for k in ("W2", "b2")])
    assert is_different(trained.params["W1"], models.params["W1"])
    has = stream.counts[:3].sum(axis=0) > 0
    np.testing.assert_allclose(fed.sent, 2 * LOCAL.rounds * 2 * 24 / 38 * has)  # two trunks, no head


def test_without_a_trunk_there_is_nothing_to_learn() -> None:
    stream = make_uneven_stream()
    fed = ENGINE_CLASSES["simulator"](stream, mlp(3, (), 2), replace(LOCAL, trains="trunk"), 0).at(0)
    with pytest.raises(fd.ConfigError, match="trains='trunk' needs a net with a trunk and a head"):
        fed.train(fed.fresh(), np.ones((1, 4, 1)))


def test_even_takes_the_newest_rows_of_each_class_and_no_more_than_the_rarest_has() -> None:
    classes = np.array([2, 0, 0, 2, 2, 0, 2, 0, 0])
    tables = sampling.build_even_tables(
        classes, np.array([4, 5]), 5
    )  # four of class 2, five of class 0, none of class 1
    assert sorted(tables.rows.tolist()) == [0, 1, 3, 4, 5, 6, 7, 8] and tables.sizes.tolist() == [3, 5]
    assert classes[tables.rows[3:]].tolist() == [0, 2, 0, 2, 0]  # they take turns
    assert sorted(sampling.build_even_tables(classes, np.array([4, 5]), 2).rows.tolist()) == [
        4,
        5,
        6,
        7,
    ]  # all of the newest cell


@pytest.mark.slow
def test_patience_ends_a_round_when_the_held_out_loss_falls_by_too_little() -> None:
    """With no end of patience a client stops at its second look, whatever the round; without, never."""
    stream = make_uneven_stream()
    w, n = np.zeros((3, 4, 1)), int(stream.counts[2, 1])
    w[2, 1] = 1
    local = replace(LOCAL, hold_out=0.3, lr=0.001, steps=1000, batch=8)
    every = -(-int(sampling.count_training_rows(np.array(n), 0.3)) // 8)
    for name in ("reference", "compiled", "simulator"):
        hasty = make_engine(name, stream, replace(local, patience=1e9)).at(2)
        updates = hasty.local_updates(hasty.fresh(), w).params
        short = make_engine(name, stream, replace(local, steps=2 * every)).at(2)
        assert_same(
            updates, short.local_updates(short.fresh(), w).params, atol=1e-6
        )  # the loss falls at this step size
        patient, plain = (make_engine(name, stream, replace(local, patience=p, steps=40)).at(2) for p in (1e-12, 0.0))
        assert_same(
            patient.local_updates(patient.fresh(), w).params, plain.local_updates(plain.fresh(), w).params, atol=1e-6
        )


def test_linear_nets_have_patience_and_momentum_too() -> None:
    stream, results = make_uneven_stream(1), []
    local = replace(LOCAL, hold_out=0.3, patience=0.05, steps=8, optimizer="sgd", momentum=0.9)
    for name in ("reference", "simulator"):
        fed = ENGINE_CLASSES[name](stream, mlp(3, (), 2), local, 3).at(2)
        results.append(fed.train(fed.fresh(2, distinct=True), draw_weights(2, stream, 2)).params)
    assert_same(results[0], results[1], atol=1e-5)


@pytest.mark.slow
def test_a_look_of_an_earlier_round_counts() -> None:
    """The first round stops at its second look; in the next the first look has one to compare with."""
    stream = make_uneven_stream()
    w = np.zeros((3, 4, 1))
    w[2, 1] = 1
    every = -(-int(sampling.count_training_rows(stream.counts[2, 1], 0.3)) // 8)
    local = replace(LOCAL, hold_out=0.3, lr=0.001, steps=50, batch=8, patience=1e9)
    fed, plain = (
        make_engine("compiled", stream, local).at(2),
        make_engine("compiled", stream, replace(local, patience=0.0)).at(2),
    )
    first = fed.train(fed.fresh(), w, rounds=1)
    expected = plain.train(plain.fresh(), w, rounds=1, local=replace(local, patience=0.0, steps=2 * every))
    assert_same(first.params, expected.params, atol=1e-6)
    second = fed.train(first, w, rounds=1)
    expected = plain.train(first, w, rounds=1, local=replace(local, patience=0.0, steps=every))
    assert_same(second.params, expected.params, atol=1e-6)


def test_they_are_recorded_where_they_are_set_alone() -> None:
    new = {"momentum", "even", "patience"}
    assert not new & Local().to_dict().keys()
    local = Local(optimizer="sgd", momentum=0.9, even=5, patience=0.1, hold_out=0.2)
    assert new <= local.to_dict().keys() and Local(**local.to_dict()) == local


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"momentum": 0.9}, "momentum is a setting of optimizer='sgd'"),
        ({"momentum": 1.0, "optimizer": "sgd"}, r"momentum must be in \[0, 1\), got 1.0"),
        ({"even": -1}, "even must be at least 0, got -1"),
        ({"even": 1.5}, "even must be a whole number, got 1.5"),
        ({"trains": "tail"}, "trains must be all, head or trunk, got 'tail'"),
        ({"patience": -0.1, "hold_out": 0.2}, "patience must be at least 0, got -0.1"),
        ({"patience": 0.1}, "patience needs held-out rows: set hold_out to a share"),
    ],
    ids=str,
)
def test_nonsense_is_refused(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(fd.ConfigError, match=sentence):
        Local(**wrong)


@pytest.mark.slow
@pytest.mark.parametrize(("file", "name"), [("prox.py", "FedProx"), ("ditto.py", "Ditto")])
def test_the_proximal_methods_of_the_documentation_keep_the_contract(file: str, name: str) -> None:
    (text,) = [block.text for block in read_blocks("docs/extend.md") if block.file == file]
    module = types.ModuleType(file.removesuffix(".py"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, module.__name__, module)  # where dataclasses look for annotations
        exec(compile(text, file, "exec"), vars(module))
        check_algorithm(getattr(module, name)())
