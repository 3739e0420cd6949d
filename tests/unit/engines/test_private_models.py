"""Private models: trained and used by one client, never sent, stored at the client, and reported if lost."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import feddrift as fd
from feddrift.data import Stream
from feddrift.engines import engine as find_engine
from feddrift.models import get_params, join, mix, take
from feddrift.nets import default_net
from feddrift.simulation import LOST_MODEL_REASON, Step, add_newcomers, run_steps
from feddrift.testing import small_stream
from feddrift.trees import tree_leaves
from feddrift.types import Local, Models

BRIEF = Local(rounds=3, steps=5, batch=8, lr=0.05)
NAMES = ("Local", "Local-W", "FineTuned", "FineTuned-W", "Majority")


def run_method(stream: Stream, name: str, **options: Any) -> list[Step]:
    return list(fd.run(stream, name, local=BRIEF, **options))


def make_two_kinds() -> Models:
    """A shared model, and a private one of clients 0 and 1."""
    return Models({"b": np.arange(3.0)[:, None]}, ids=(0, 1, 2), owner=(-1, 0, 1))


def test_surgery_knows_whose_a_model_is() -> None:
    models = make_two_kinds()
    assert models.private.tolist() == [False, True, True] and "owner=(-1, 0, 1)" in repr(models)
    assert take(models, [2, 0], [2, 0]).owner == (1, -1)
    assert take(models, [0], [7], owner=[4]).owner == (4,)
    assert join(take(models, [0], [0]), take(models, [1], [1])).owner == (-1, 0)
    with pytest.raises(ValueError, match="cannot be mixed"):
        mix(models, np.eye(3), (0, 1, 2))
    with pytest.raises(ValueError, match="cannot be copied under another id"):
        take(replace(models, held=(0, 5, 0)), [1], [9])
    with pytest.raises(ValueError, match="only one of its family"):
        Models({"b": np.zeros((1, 1))}, ids=(0, 1), family=(0, 0), trunk={"b": True}, owner=(-1, 3))


@pytest.mark.parametrize("kind", ["simulator", "reference"])
def test_only_its_owner_scores_and_trains_it(kind: str) -> None:
    stream = small_stream()
    fed = find_engine(kind)(stream, default_net(stream), BRIEF, 0).at(0)
    models = take(fed.fresh(), [0] * 3, [0, 1, 2], owner=[-1, 2, 3])
    loss = fed.evaluate(models)
    assert np.isnan(loss).tolist() == [[False, True, True]] * 2 + [[False, False, True], [False, True, False]]
    np.testing.assert_array_equal(loss[2, 0], loss[2, 1])
    np.testing.assert_array_equal(fed.sent, [1, 1, 1, 1])  # the shared one; nothing for the others
    counts = fed.confusion(models)
    assert counts[2, 1].sum() == 30 and counts[0, 1].sum() == 0
    own = np.zeros((1, 4, 3))
    own[0, 2, 1] = own[0, 3, 2] = 1
    trained = fed.train(models, own)
    np.testing.assert_array_equal(fed.sent, [1, 1, 1, 1])
    pairs = list(zip(tree_leaves(trained.params), tree_leaves(models.params), strict=True))
    moved = [any((a[m] != b[m]).any() for a, b in pairs) for m in range(3)]
    assert moved == [False, True, True] and trained.owner == models.owner
    others = own.copy()
    others[0, 0, 1] = 1
    with pytest.raises(fd.ConfigError, match="its owner's data only"):
        fed.train(models, others)
    with pytest.raises(fd.ConfigError, match="trained apart"):
        fed.train(models, np.ones((1, 4, 3)) * [1, 0, 0] + own)
    for ask in (lambda: fed.cross_evaluate(models, own), lambda: fed.local_updates(models, own)):
        with pytest.raises(fd.ConfigError, match="leave out private ones"):
            ask()


def test_local_is_each_client_alone() -> None:
    """Its models are those of a federation of one, and nobody's choices change another's."""
    stream = small_stream()
    last = run_method(stream, "Local")[-1]
    assert last.sent.sum() == 0 and last.model.tolist() == [0, 1, 2, 3]
    swapped = replace(stream, y=stream.y.copy())
    for t in range(6):
        swapped.y[stream.rows(t, 3)] ^= 1
    other = run_method(swapped, "Local")[-1]
    for m, same in ((0, True), (3, False)):
        pairs = zip(
            tree_leaves(get_params(last.state.models, m)), tree_leaves(get_params(other.state.models, m)), strict=True
        )
        assert all((a == b).all() for a, b in pairs) == same


def test_fine_tuning_leaves_oblivious_as_it_is() -> None:
    stream = small_stream(missing=[(3, 1)])
    tuned, plain = run_method(stream, "FineTuned-W"), run_method(stream, "Oblivious")
    for a, b in zip(tuned, plain, strict=True):
        np.testing.assert_array_equal(a.sent, b.sent)
        for x, y in zip(tree_leaves(a.state.models.params), tree_leaves(b.state.models.params), strict=True):
            np.testing.assert_array_equal(x[0], y[0])
    before, after = (step.state.models for step in tuned[2:4])
    pairs = list(zip(tree_leaves(before.params), tree_leaves(after.params), strict=True))
    same = [all((a[m] == b[m]).all() for a, b in pairs) for m in range(1, 5)]
    assert same == [False, True, False, False]  # client 1 received nothing at time 3 and keeps its copy
    before, after = (step.state.models for step in run_method(stream, "FineTuned")[2:4])
    assert all(
        (a[2] != b[2]).any() for a, b in zip(tree_leaves(before.params), tree_leaves(after.params), strict=True)
    )  # or learns
    more = list(fd.run(stream, fd.algorithm("FineTuned", own_rounds=9), local=BRIEF))[-1]
    assert any(
        (a != b).any() for a, b in zip(tree_leaves(more.state.models.params), tree_leaves(after.params), strict=True)
    )


def test_majority_names_the_most_frequent_class() -> None:
    draw = np.random.default_rng(0)
    cells = [[(draw.random((60, 2)), (draw.random(60) < share).astype(int)) for share in (0.8, 0.3)] for _ in range(5)]
    stream = fd.Stream.from_arrays(cells, n_classes=2)
    for step in fd.run(stream, "Majority", local=replace(BRIEF, rounds=20)):
        np.testing.assert_allclose(step.accuracy, step.scores["majority"])
        np.testing.assert_allclose(step.scores["auc"], 0.5)  # it sees no inputs


def test_a_client_that_has_not_trained_yet_follows_the_shared_model() -> None:
    """Else a client that joins late would be tested with an untrained copy."""
    stream = small_stream(size=200, missing=[(t, 3) for t in range(3)])
    local = replace(BRIEF, rounds=20)
    tuned, plain = (list(fd.run(stream, name, local=local)) for name in ("FineTuned", "Oblivious"))
    assert tuned[2].accuracy[3] == plain[2].accuracy[3]  # its first data come at time 3


def test_newcomers_use_no_model_of_another_client() -> None:
    for name, votes in (("Local", [0.0, 0.0, 0.0, 0.0]), ("FineTuned", [1.0, 0.0, 0.0, 0.0, 0.0])):
        state = add_newcomers(run_method(small_stream(), name)[-1].state, 5)
        assert state.votes[4].tolist() == votes


def test_clients_that_join_later_get_their_own(tmp_path: Path) -> None:
    stream = small_stream(missing=[(t, 3) for t in range(3)])
    for name in ("Local", "FineTuned"):
        last = run_method(stream, name)[-1]
        assert last.model.tolist() == [i + (name == "FineTuned") for i in range(4)]


@pytest.mark.parametrize("name", NAMES)
def test_a_run_resumes_and_its_models_can_be_exported(name: str, tmp_path: Path) -> None:
    whole = fd.record("sine-2", name, out=tmp_path / "whole", rounds=2)
    models = fd.load_models(fd.export(tmp_path / "whole", tmp_path / "models")[0])
    x, y = fd.stream("sine-2").cell(10, 4)
    assert (models.predict("4", x) == y).mean() == pytest.approx(whole.rows.accuracy[-1, 4], abs=0.003)
    assert (whole.rows.models_sent == (4 if name.startswith("FineTuned") else 0)).all()


flower = pytest.importorskip("flwr", reason="the extra 'flower' is not installed")


def make_federation(stream: Stream, root: Path) -> Any:
    from tests.support.flower import InProcessFlower

    engine = InProcessFlower(stream, default_net(stream), BRIEF, 0, root=root)
    engine.n_steps = stream.n_steps
    return engine


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_deployment_keeps_them_at_the_clients(name: str, tmp_path: Path) -> None:
    stream = small_stream(missing=[(1, 2)])
    engine, here = make_federation(stream, tmp_path), run_method(stream, name)
    for a, b in zip(here, run_steps(engine, fd.algorithm(name)), strict=True):
        np.testing.assert_allclose(a.accuracy, b.accuracy, atol=0.04)
        np.testing.assert_array_equal(a.sent, b.sent)
        models = b.state.models
        assert np.isnan(tree_leaves(models.params)[0][models.private]).all()  # the server has no numbers of them
        for m in np.flatnonzero(models.private):
            store = engine.local_grid.clients[str(models.owner[m])].open_store("test")
            parts = sorted(part for part in store.list_parts() if part.startswith(f"private-{models.ids[m]}-"))
            newest = [part for part in parts if f"-{models.held[m]}-" in part]
            numbers = np.concatenate([array.ravel() for part in newest for array in store.read_part(part)])
            truth = np.concatenate([np.ravel(leaf) for leaf in tree_leaves(get_params(a.state.models, int(m)))])
            np.testing.assert_allclose(np.sort(numbers), np.sort(truth), atol=1e-4)
            assert len({part.split("-")[2] for part in parts}) <= 3  # older versions are forgotten


@pytest.mark.parametrize("how", ["sent", "pulled to"])
def test_a_server_cannot_have_them(tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from feddrift.engines.flower.client import training
    from feddrift.engines.flower.messages import REQUESTS

    engine = make_federation(small_stream(), tmp_path)
    state = [step.state for step in run_steps(engine, fd.algorithm("Local"))][-1]
    asked, handle_train = list[Any](), training.handle_train

    def curious(engine: Any, store: Any, task: Any, request: Any, *models: Any) -> Any:
        if task.client == "1":
            asked.append(request)
            request = replace(request, **{"keep": 0} if how == "sent" else {"pull": 1e6, "to": request.models})
        return handle_train(engine, store, task, request, *models)

    monkeypatch.setattr(training, "handle_train", curious)
    engine.n_steps = None
    fed = engine.at(4)
    fed.train(state.models, state.w)
    assert asked and not fed.reachable[1] and "never leaves this client" in engine.trouble["1"]
    asks = {"hello", "evaluate", "contest", "describe", "reroute", "explain", "train", "tournament"}
    assert set(REQUESTS) == asks  # nothing else could ask for one


@pytest.mark.parametrize("name", ["Local", pytest.param("FineTuned", marks=pytest.mark.slow)])
def test_a_killed_server_continues_to_the_same_bits(name: str, tmp_path: Path) -> None:
    from tests.golden import hashes

    whole = hashes.over_flower(name, tmp_path / "whole")
    for kill in (5, 14):
        assert hashes.over_flower(name, tmp_path / str(kill), kill=kill) == whole


def test_a_server_that_goes_back_finds_the_versions_of_then(tmp_path: Path) -> None:
    """A time step begun anew, or a damaged checkpoint: what was given up does not outlive what counts."""
    stream = small_stream()
    state = None
    for again in (False, True):
        engine = make_federation(stream, tmp_path)
        method = fd.algorithm("Local")
        if state is None:
            state = method.step(method.init(engine.at(0)), engine.at(0))
            engine.test(state, 1)
        fed = engine.at(1)
        models, w = state.models, np.concatenate([np.asarray(state.w)] * 2)
        for _ in range(2 if again else 6):  # six rounds are given up; the second time there are two
            models = fed.train(models, w, rounds=1)
        assert engine.lost_private() == [] and fed.reachable.all()
        fed.evaluate(models)
        assert engine.lost_private() == []


@pytest.mark.parametrize("name", ["Local", "FineTuned"])
def test_models_lost_with_a_store_are_replaced_and_reported(name: str, tmp_path: Path) -> None:
    stream = small_stream()
    engine = make_federation(stream, tmp_path)
    events = []
    for step in run_steps(engine, fd.algorithm(name)):
        events += [(step.tau, event.model) for event in step.events if event.cause.get("reason") == LOST_MODEL_REASON]
        if step.tau == 1:
            shutil.rmtree(engine.local_grid.clients["2"].open_store("test").path / "parts")
        if step.tau == 2 and name == "Local":  # half of a model is none
            store = engine.local_grid.clients["1"].open_store("test")
            store.drop_parts(part for part in store.list_parts() if part.endswith("-head"))
    private = 2 if name == "Local" else 3
    assert events == ([(2, private), (3, 1)] if name == "Local" else [])  # FineTuned makes its copies anew
    assert not np.isnan(step.accuracy).any()


def test_names_that_are_none_are_left_alone() -> None:
    from feddrift.engines.flower.model_parts import find_later_private_parts, find_old_private_parts

    names = ["private-3--5-head", "private-x-1-head", "private-1-7-trunk", "private-1-9-trunk", "private-2-9-trunk"]
    assert find_old_private_parts(names) == set() and find_later_private_parts(names, {1}, 7) == {"private-1-9-trunk"}
