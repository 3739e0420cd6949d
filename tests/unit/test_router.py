"""Routing by inputs: the choice of the voting model, where labels have shown that it helps."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import feddrift as fd
from feddrift._internal import checkpoint
from feddrift.engines.conditions import routing
from feddrift.engines.conditions.conditions import Conditions
from feddrift.errors import ConfigError
from feddrift.exported_models import Predictor
from feddrift.models import init_models, take
from feddrift.nets import default_net, init_params
from feddrift.nets.voting import compute_layer
from feddrift.reports.event_text import build_run_command
from feddrift.router import OWN_VOTES, Router, Routing
from feddrift.simulation import LoopState, Step, run_steps
from feddrift.testing import small_stream
from feddrift.types import Federation, Local, Projection, State

LEARN = Local(rounds=6, steps=20, batch=20, lr=0.05)
# Four clients find concept 1 at once; later some go back to 0, and others follow.
CONCEPTS = np.array([[0] * 6, [0] * 6, [1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1], [1, 1, 0, 0, 1, 1]])
FEDDRIFT = fd.algorithm("FedDrift", delta=0.1)
WAYS = ("row", "running", "batch")


def make_shifted_stream(apart: float, concepts: Any = CONCEPTS, missing: Any = ()) -> fd.Stream:
    """Concept 1 swaps the labels; its inputs are so far apart from those of concept 0 along a feature of no other use.

    With 0 the inputs say nothing about the concept.
    """
    stream = small_stream(concepts, size=60, missing=missing)
    of_row = np.repeat(concepts.reshape(-1), stream.counts.reshape(-1))
    extra = np.random.default_rng(5).random(len(stream.x)) + apart * of_row
    return replace(stream, x=np.column_stack([stream.x, extra]).astype(np.float32))


NET = default_net(make_shifted_stream(3.0))


def run_method(stream: fd.Stream, route: Any, method: Any = FEDDRIFT, **options: Any) -> list[Step]:
    return list(fd.run(stream, method, local=LEARN, route=route, **options))


def get_routing(step: Step) -> Routing:
    """What the gate has learned."""
    assert step.loop.routing is not None
    return step.loop.routing


def compute_drift_accuracy(steps: list[Step], t: int) -> float:
    """The accuracy at time t of the clients that change their concept then."""
    return float(steps[t - 1].accuracy[CONCEPTS[t] != CONCEPTS[t - 1]].mean())


@pytest.mark.parametrize("route", WAYS)
def test_informative_inputs_improve_accuracy(route: str) -> None:
    plain, routed = run_method(make_shifted_stream(3.0), "none"), run_method(make_shifted_stream(3.0), route)
    assert all(compute_drift_accuracy(plain, t) < 0.3 for t in (4, 5)) and all(
        compute_drift_accuracy(routed, t) > 0.7 for t in (4, 5)
    )
    np.testing.assert_allclose([s.model for s in routed], [s.model for s in plain])  # training is what it was
    for step, same, row in zip(routed, plain, CONCEPTS[1:], strict=True):
        stays = CONCEPTS[step.tau] == row
        lost = 1 / 60 + 1e-9 if route == "row" else 0.0  # a row
        np.testing.assert_allclose(step.accuracy[stays], same.accuracy[stays], rtol=0, atol=lost)


def test_the_gate_is_closed_until_labels_have_shown_that_it_pays() -> None:
    steps = run_method(make_shifted_stream(3.0), "batch")
    assert [step.state.router is None for step in steps] == [True, True, False, False, False]
    assert [len(get_routing(step).saved) for step in steps[:3]] == [0, 0, 6]
    assert "routed" not in steps[1].scores and steps[3].scores["routed"].tolist() == [1, 1, 0, 0, 1, 1]
    (event,) = [e for step in steps for e in step.events if e.kind == "decided"]
    assert event in steps[2].events and event.cause["reason"].startswith("from now on the inputs choose the model")
    assert event.cause["mistakes_saved"] == get_routing(steps[2]).saved.sum() > 0


@pytest.mark.parametrize("route", WAYS)
def test_uninformative_inputs_never_enable_routing(route: str) -> None:
    plain, routed = run_method(make_shifted_stream(0.0), "none"), run_method(make_shifted_stream(0.0), route)
    assert all(step.state.router is None for step in routed)
    for step, same in zip(routed, plain, strict=True):
        np.testing.assert_array_equal(step.accuracy, same.accuracy)
        assert step.events == same.events


def test_overfitted_models_do_not_enable_routing() -> None:
    """Labels are noise: the model that a client moves to knows its rows, and helps with no others."""
    random = np.random.default_rng(0)
    cells = [[(random.normal(k, 0.2, (60, 8)), random.integers(0, 2, 60)) for k in row] for row in CONCEPTS]
    stream = fd.Stream.from_arrays(cells, name="noise", n_classes=2, concepts=CONCEPTS)
    local = Local(rounds=10, steps=30, batch=20, lr=0.01)
    steps = list(fd.run(stream, fd.algorithm("Oracle"), net="mlp:64", local=local, route="running"))
    assert len(get_routing(steps[-1]).saved) and not any(get_routing(step).pays for step in steps)


def test_among_too_many_models_nothing_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "MAX_ROUTED_MODELS", 1)
    assert all(
        step.state.router is None and not len(get_routing(step).rows)
        for step in run_method(make_shifted_stream(3.0), "batch")
    )


def test_it_stops_where_it_has_begun_to_cost() -> None:
    cells = {"rows": np.full(6, 100), "stayed": np.array([False] * 4 + [True] * 2)}
    paid = [Routing(Projection((0, 0), 2), {}, np.array(saved), **cells).pays for saved in (
        [90, 90, 90, 90, 0, 0], [90, 90, 0, 0, 0, 0], [90, 90, 90, 90, 0, -1], [90, 90, 90, 90, 5, -5],
        [-90, 90, 90, 90, 0, 0], [0] * 6,
    )]  # fmt: skip
    assert paid == [True, False, False, True, False, False]
    assert not Routing(Projection((0, 0), 2)).pays


def test_traffic_is_counted_and_training_costs_what_it_did() -> None:
    plain, routed = run_method(make_shifted_stream(3.0), "none"), run_method(make_shifted_stream(3.0), "batch")
    for step, same in zip(routed, plain, strict=True):
        np.testing.assert_allclose(step.sent - step.sent_scoring, same.sent - same.sent_scoring)
        assert (step.sent_scoring > same.sent_scoring).all()


@pytest.mark.slow
def test_the_reference_decides_alike() -> None:
    stream = make_shifted_stream(3.0)
    for one, other in zip(
        run_method(stream, "running"), run_method(stream, "running", engine="reference"), strict=True
    ):
        np.testing.assert_array_equal(one.model, other.model)
        np.testing.assert_allclose(one.accuracy, other.accuracy, atol=0.05)
        assert get_routing(one).pays == get_routing(other).pays
        np.testing.assert_allclose(one.sent, other.sent)


@pytest.mark.slow
def test_over_flower_it_decides_alike() -> None:
    from tests.support.flower import InProcessFlower

    stream = make_shifted_stream(3.0)
    engine = InProcessFlower(stream, default_net(stream), LEARN, 0, Conditions(route="running"))
    engine.n_steps = stream.n_steps
    for step, same in zip(run_steps(engine, FEDDRIFT), run_method(stream, "running"), strict=True):
        np.testing.assert_array_equal(step.model, same.model)
        np.testing.assert_allclose(step.accuracy, same.accuracy, atol=0.05)
        np.testing.assert_allclose(step.sent, same.sent)
        assert get_routing(step).pays == get_routing(same).pays
        if step.state.router is not None:
            np.testing.assert_allclose(step.scores["routed"], same.scores["routed"], atol=0.05)


def test_a_client_without_feature_statistics_is_in_no_centre() -> None:
    from tests.support.flower import InProcessFlower

    stream = make_shifted_stream(3.0)
    engine = InProcessFlower(stream, default_net(stream), LEARN, 0, Conditions(route="batch"))
    engine.n_steps = 2
    engine.local_grid.clients[stream.clients[0]].describe = False
    *_, last = run_steps(engine, FEDDRIFT)
    rows = sum(int(count.sum()) for count, *_ in get_routing(last).data.values())
    assert rows == stream.counts[:2, 1:].sum() and not np.isnan(last.accuracy).any()


def move_into_state(saved: checkpoint.Checkpoint) -> None:
    """Arrange the value of a checkpoint as version 0.3 wrote it."""
    state, _, loop = saved._tree["tuple"]
    state["fields"] |= {"routing": dict(loop["dict"])["routing"], "acted": None}
    saved._tree["tuple"].pop()


@pytest.mark.parametrize("version", ["0.3", "now"])
def test_a_resumed_run_continues_with_the_same_routing(version: str, tmp_path: Path) -> None:
    stream = make_shifted_stream(3.0)
    whole = run_method(stream, "running")
    engine = fd.engines.engine("simulator")(stream, default_net(stream), LEARN, 0, Conditions(route="running"))
    like = init_params(engine.net, (np.uint32(0), np.uint32(0)))
    for done in (2, 3):
        last = whole[done - 1]
        checkpoint.write(tmp_path / "state", {}, (last.state, None, last.loop.to_dict()))
        saved = checkpoint.read(tmp_path / "state")
        if version == "0.3":
            move_into_state(saved)
        state, _, *stored = saved.decode(like)
        loop = LoopState.from_checkpoint(saved, stored, like)
        resumed = run_steps(engine, FEDDRIFT, done=done, state=state, loop=loop)
        for step, same in zip(resumed, whole[done:], strict=True):
            np.testing.assert_array_equal(step.accuracy, same.accuracy)
            np.testing.assert_array_equal(get_routing(step).saved, get_routing(same).saved)
            np.testing.assert_array_equal(step.scores["routed"], same.scores["routed"])


def test_clients_may_be_away_or_come_late() -> None:
    missing = [(t, 5) for t in range(3)] + [(3, 0)]
    trace = np.ones((5, 6), dtype=bool)
    trace[2, 1] = False
    steps = run_method(make_shifted_stream(3.0, missing=missing), "batch", conditions=Conditions(trace=trace))
    assert [len(get_routing(step).rows) for step in steps] == [0, 0, 4, 9, 15]
    assert np.nansum(steps[-1].scores["routed"]) > 0 and compute_drift_accuracy(steps, 5) > 0.7


@pytest.mark.parametrize("name", [n for n in fd.algorithms.ALGORITHMS if n not in ("Oracle", "Oracle-Trunk")])
def test_every_method_can_be_run_with_it(name: str) -> None:
    stream, brief = make_shifted_stream(3.0), Local(rounds=1, steps=2, batch=10, lr=0.05)
    for step in fd.run(stream, fd.algorithm(name, stream), local=brief, route="batch"):
        assert np.isfinite(step.accuracy).all() and step.accuracy.shape == (6,)


def test_the_record_mentions_it(tmp_path: Path) -> None:
    options: dict[str, Any] = {"rounds": 1, "out": tmp_path}
    record = fd.record("sine-2", "FedDrift", route="running", **options)
    assert record.header["overrides"] == {"rounds": 1, "route": "running"} and "route=running" in record_names(record)
    assert np.isnan(record.rows.routed).all()
    assert "route" not in fd.record("sine-2", "FedDrift", route="none", **options).header["overrides"]


def record_names(record: Any) -> str:
    return str(fd.summary([record])["settings"])


def test_a_record_has_the_share_of_rows_that_were_routed(tmp_path: Path) -> None:
    settings, stream = {"delta": 0.1}, "tests.golden.world:shifted"
    run = fd.record(stream, "FedDrift", settings=settings, route="batch", out=tmp_path)
    assert np.nanmax(run.rows.routed) == 1 and np.isnan(run.rows.routed[:2]).all()
    assert any(why.startswith("from now on the inputs choose the model") for why in fd.events(run)["why"])
    assert "--route batch" in build_run_command(run.header)[0]


@pytest.mark.parametrize("value", ["yes", None, 3, "Batch"])
def test_other_values_are_refused(value: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="route must be one of none, row, running, batch, got"):
        Conditions(route=value)
    with pytest.raises(ConfigError, match="route must be one of"):
        fd.run("sine-2", route=value)
    with pytest.raises(ConfigError, match="route"):
        fd.record("sine-2", "FedDrift", route=value, out=tmp_path)


def test_a_router_chooses_by_row_so_far_or_all_at_once() -> None:
    centre, votes = np.array([[0.0], [1.0], [10.0]]), np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    x = np.array([[0.0], [8.0], [9.0], [9.5]])
    chosen = {per: Router(per, centre, votes).choose_centres(x).tolist() for per in WAYS}  # type: ignore[arg-type]
    assert chosen == {"row": [0, 2, 2, 2], "running": [0, 0, 2, 2], "batch": [2, 2, 2, 2]}


def test_with_a_margin_a_client_stays_unless_others_are_clearly_nearer() -> None:
    centre, votes, own = np.array([[0.0], [1.0]]), np.eye(2), np.array([1.0, 0.0])
    for per in ("running", "batch"):
        router = Router(per, centre, votes, margin=2.0)
        chosen = [router.choose_centres(np.ones((n, 1)), own)[-1] for n in range(1, 8)]
        assert chosen == [OWN_VOTES] * 4 + [1] * 3
        assert router.choose_centres(np.full((9, 1), 0.5), own).tolist() == [OWN_VOTES] * 9  # just as near
        assert router.choose_centres(np.ones((9, 1)), np.array([0.0, 1.0])).tolist() == [OWN_VOTES] * 9  # at home
    alone = Router("row", 3 * centre, votes, margin=2.0)
    assert alone.choose_centres(np.array([[3.0], [2.0], [0.0]]), own).tolist() == [1, OWN_VOTES, OWN_VOTES]
    strangers = Router("batch", centre, np.array([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]), margin=2.0)
    assert strangers.choose_centres(np.ones((9, 1)), np.array([1.0, 0.0, 0.0])).tolist() == [OWN_VOTES] * 9
    assert strangers.choose_centres(np.ones((0, 1)), own).tolist() == []


def test_a_router_of_moments_compares_means_and_deviations() -> None:
    centre = np.array([[0.0, 1.0], [0.0, 3.0]])
    x = np.array([[-3.0], [3.0], [-3.0], [3.0]])
    assert Router("batch", centre, np.eye(2), of="moments").choose_centres(x).tolist() == [1] * 4
    low, scale = np.array([0.0, 1.0]), np.array([1.0, 0.5])
    assert (
        Router("batch", (centre - low) * scale, np.eye(2), "moments", None, low, scale).choose_centres(x).tolist()
        == [1] * 4
    )


@pytest.mark.parametrize(("changes", "sentence"), [
    ({"per": "day"}, "per must be row, running or batch, got 'day'"),
    ({"of": "words"}, "describes rows or moments, got 'words'"),
    ({"of": "moments", "per": "row"}, "must be per batch, got 'row'"),
    ({"votes": np.eye(3)}, "as many votes"),
    ({"centre": np.array([[np.nan], [0.0]])}, "must be finite"),
    ({"votes": -np.eye(2)}, "at least 0"),
    ({"layer": "trunk"}, "a router of a layer .* needs a model"),
])  # fmt: skip
def test_a_router_that_makes_no_sense_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Router(**{"per": "batch", "centre": np.zeros((2, 1)), "votes": np.eye(2)} | changes)


@dataclass(frozen=True)
class Known:
    """Two models for two places of inputs; its own router says who votes, by the layer of its first model."""

    layer: Any = "input"

    def init(self, fed: Federation) -> State:
        models = fed.fresh(2, distinct=True)
        return State(models, np.zeros((0, fed.n_clients, 2)), np.tile([1.0, 0.0], (fed.n_clients, 1)))

    def step(self, state: State, fed: Federation) -> State:
        assert state.router is None or state.router.of == "moments"  # its own
        w = np.concatenate([state.w, np.eye(2)[fed.concepts[-1]][None]]) if fed.concepts is not None else state.w
        models = fed.train(state.models, w)
        first = None if self.layer == "input" else fed.fresh()
        moments = fed.moments(fed.fresh(), self.layer)
        seen = np.concatenate([moments.mean[:, 0, 0], moments.std[:, 0, 0]], axis=1)
        concepts = fed.concepts[-1] if fed.concepts is not None else np.zeros(fed.n_clients, dtype=int)
        votes = np.eye(2)[concepts]
        return State(models, w, votes, router=Router("batch", seen, votes, "moments", model=first, layer=self.layer))


@pytest.mark.parametrize("layer", ["input", "trunk", "logits"])
def test_a_method_may_bring_a_router_of_its_own(layer: str) -> None:
    steps, under = (run_method(make_shifted_stream(3.0), route, Known(layer)) for route in ("none", "batch"))
    assert compute_drift_accuracy(steps, 4) > 0.7 and steps[3].scores["routed"].tolist() == [1] * 6
    assert (steps[3].sent_scoring > 2).all()  # both models, centres, and moments
    for step, same in zip(under, steps, strict=True):  # the condition leaves it alone
        np.testing.assert_array_equal(step.accuracy, same.accuracy)


def test_a_router_for_other_models_is_refused() -> None:
    class Wrong(Known):
        def step(self, state: State, fed: Federation) -> State:
            good = super().step(state, fed)
            return replace(good, router=Router("batch", np.zeros((1, 6)), np.eye(1), "moments"))

    with pytest.raises(ConfigError, match="a router must have votes for 2 models, got 1"):
        run_method(make_shifted_stream(3.0), "none", Wrong())


def test_a_router_has_no_vote_for_private_models() -> None:
    class Prying(Known):
        def step(self, state: State, fed: Federation) -> State:
            good = super().step(state, fed)
            return replace(good, models=replace(good.models, owner=(3, -1)))

    with pytest.raises(ConfigError, match="a router must vote for shared models only"):
        run_method(make_shifted_stream(3.0), "none", Prying())


def test_a_served_model_is_chosen_as_in_the_test() -> None:
    """The router and the model that describes inputs travel with the others, and are found again."""
    from feddrift.engines.flower.client.routers import pack_router, read_router

    models = replace(init_models(NET, 0, 2, distinct=True), ids=(3, 8))
    x = make_shifted_stream(3.0).x[:40]
    centre = np.array([[0.0, 0.0, 0.0], [0.0, 0.0, 4.0]])
    for router in (
        Router("row", centre, np.eye(2), project=Projection((1, 2), 3), margin=2.0),
        Router("batch", np.zeros((1, 4)), np.array([[0.0, 1.0]]), "moments", model=init_models(NET, 1), layer="logits"),
    ):
        own = np.array([1.0, 0.0])
        sent, votes, body = pack_router(models, own, router)
        found = read_router(json.loads(json.dumps(body)), sent)
        seen = compute_layer(NET, router.model, router.layer, x)
        chosen = router.choose_centres(seen, own)
        np.testing.assert_array_equal(chosen, found.choose_centres(seen, votes))
        predictor = Predictor(NET, sent, votes, "hard", (3,), (0, 1), router=found)
        alone = [Predictor(NET, models, np.eye(2)[m], "hard", (3,), (0, 1)).predict(x) for m in (0, 1)]
        by_second = router.votes[chosen, 1] * (chosen >= 0) > 0
        np.testing.assert_array_equal(predictor.predict(x), np.where(by_second, alone[1], alone[0]))
        np.testing.assert_allclose(predictor.predict_proba(x).sum(axis=1), 1)


def test_a_trained_router_outlives_a_step_of_private_votes() -> None:
    models = fd.Models({"b": np.zeros((2, 1))}, (0, 1), owner=(-1, 0))
    past = Routing(Projection((0, 0), 2), saved=np.full(4, 9), rows=np.full(4, 100), stayed=np.zeros(4, dtype=bool))
    before = State(models, np.zeros((1, 1, 2)), np.array([[1.0, 0.0]]))
    after = replace(before, votes=np.array([[0.0, 1.0]]))
    assert routing.update_routing(before, after, past, None, "row")[1] is past  # type: ignore[arg-type]


def test_models_as_they_were_get_names_that_no_trunk_has() -> None:
    net = default_net(small_stream())
    founded = init_models(net, seed=0, n=3, distinct=True)
    before = take(founded, [0, 1, 2], [0, 1, 2])
    now = replace(take(founded, [0, 1], [0, 1]), family=(0, 3))  # model 1 stands on the trunk of one that is no more
    stack, former = routing._append_former_models(now, before, [1, 2])
    assert len(set(stack.ids)) == 4 and former == {1: 2, 2: 3}
    assert not set(stack.family[2:]) & set(stack.family[:2])
