"""The policy of a client: rules, pinned settings, the log of requests, and the commands that show them."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

import feddrift as fd
from feddrift.algorithms import ALGORITHMS
from feddrift.deploy.operate import check, scaffold
from feddrift.engines.flower.client import request_log
from feddrift.engines.flower.client.agreement import Agreement
from feddrift.engines.flower.client.client import Client, load_client
from feddrift.engines.flower.client.client_toml import describe_policy, read_client_toml
from feddrift.engines.flower.client.policy import (
    PERMISSIVE,
    Policy,
    RequestRefusedError,
    choose_sent_groups,
    count_weights,
)
from feddrift.engines.flower.client.request_log import RequestEntry, RequestLog
from feddrift.errors import ConfigError
from feddrift.nets import build_client_net
from feddrift.reports.exchanges import find_client_notes, find_missing_replies
from feddrift.runs.record import read
from feddrift.trees import tree_leaves
from feddrift.types import Local
from tests.support.attacks import Attacker
from tests.support.cli import run_and_get_output
from tests.support.federation import make_federation, make_swapping_stream, run_n_steps

LOCAL = Local(rounds=2, steps=10, batch=10, lr=0.05)


def make_attacker(
    folder: Path, policy: Policy | None = None, sizes: tuple[int, ...] = (60,), **settings: Any
) -> Attacker:
    """Return a server with one client that has these batches."""
    draw = np.random.default_rng(0)
    cells = [(draw.normal(size=(n, 2)).astype(np.float32), np.arange(n) % 2) for n in sizes]

    def load(n: int) -> Any:
        return cells[n] if n < len(cells) else None

    attacker = Attacker(Client("a", folder, load, policy=policy or Policy(), **settings), 2)
    attacker.say_hello()
    return attacker


def read_log(attacker: Attacker) -> list[dict[str, Any]]:
    return list(attacker.client.request_log.read())


def get_refusal(attacker: Attacker, local: Local = LOCAL, **request: Any) -> str | None:
    """Return the sentence with which the client refuses a training, which is in its log, too; None: it trains."""
    change, _ = attacker.train(attacker.make_open_model(), local, **request)
    entry = read_log(attacker)[-1]
    assert (change is None) == (entry["refused"] is not None) and entry["failed"] is None
    if change is None:
        assert entry["refused"] == attacker.refused[-1]
    refused: str | None = entry["refused"]
    return refused


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"batch": 9}, "it requests batch = 9, the policy requires at least 10"),
        ({"steps": 4}, "it requests steps = 4, the policy requires at least 5"),
        ({"optimizer": "sgd"}, "it requests the optimizer sgd, the policy allows adam only"),
        ({"hold_out": 0.9}, "one row counts as much as 1 of 6, the policy requires at least 10 rows"),
        ({"even": 4}, "one row counts as much as 1 of 8, the policy requires at least 10 rows"),
    ],
)
def test_an_update_needs_rows_batch_steps_and_adam(change: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    attacker = make_attacker(tmp_path)
    assert sentence in str(get_refusal(attacker, replace(LOCAL, **change)))
    assert get_refusal(attacker) is None  # a refused request does not pin its settings
    assert not list((tmp_path / "attack" / "a").glob("asked*"))


@pytest.mark.parametrize(
    "local",
    [
        Local(),  # the paper's
        LOCAL,
        replace(LOCAL, hold_out=0.5),
        replace(LOCAL, hold_out=0.5, holds="first"),
        replace(LOCAL, hold_out=0.2, patience=0.004),
        replace(LOCAL, bags=True),
        replace(LOCAL, trains="head"),
        replace(LOCAL, trains="trunk"),
        replace(LOCAL, balance=True),
        replace(LOCAL, steps=1000),
    ],
)
def test_thirty_rows_are_enough_for_ordinary_settings(local: Local, tmp_path: Path) -> None:
    assert get_refusal(make_attacker(tmp_path, sizes=(30,)), replace(local, steps=min(local.steps, 20))) is None


def test_weights_of_cells_do_not_single_out_rows(tmp_path: Path) -> None:
    attacker = make_attacker(tmp_path, sizes=(100, 12))
    attacker.say_hello(1)
    assert get_refusal(attacker, w=([0, 1], [1.0, 1.0])) is None
    assert get_refusal(attacker, w=([0, 1], [1e-9, 1.0])) is None  # twelve rows alone
    assert "3 rows of a time step" in str(get_refusal(attacker, replace(LOCAL, hold_out=0.75), w=([0, 1], [1.0, 1.0])))
    for weight in (0.0, -1.0):
        attacker.train(attacker.make_open_model(), LOCAL, ([0, 1], [weight, 1.0]))
        assert "weight that is not a number above 0" in read_log(attacker)[-1]["failed"]


def test_private_models_are_exempt_and_the_operator_may_allow_more(tmp_path: Path) -> None:
    attacker = make_attacker(tmp_path / "private")
    specs, parts, _ = attacker.make_models(attacker.make_open_model())
    body = {
        "round": 0, "local": replace(LOCAL, batch=1, steps=1, optimizer="sgd").to_dict(), "models": specs,
        "w": [[0], [0], [1.0]], "rounds": 1, "keep": 1, "pull": None, "to": [], "more": 0, "within": 0.0,
    }  # fmt: skip
    fields, raw = attacker.send("train", body, parts)
    assert fields["round"] == 0 and not raw
    small = replace(LOCAL, batch=2, steps=1, optimizer="sgd")
    assert get_refusal(make_attacker(tmp_path / "sgd", Policy(min_batch=2, min_steps=1, allow_sgd=True)), small) is None


def test_small_batches_are_held_back_and_later_ones_are_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    attacker = make_attacker(tmp_path, sizes=(20, 9, 30))
    assert attacker.say_hello(1)["cells"] == [[0, 20]]
    assert "batch 1 has 9 rows and is not used, the policy requires at least 10 (min_rows)" in caplog.text
    assert attacker.say_hello(2)["cells"] == [[0, 20], [2, 30]]
    attacker.train(attacker.make_open_model(), LOCAL, ([0, 1, 2], [1.0] * 3))
    assert "data that this client does not have" in read_log(attacker)[-1]["failed"]


def test_scores_on_few_held_out_rows_are_refused(tmp_path: Path) -> None:
    attacker = make_attacker(tmp_path, sizes=(30,))
    specs, parts, _ = attacker.make_models(attacker.make_open_model())
    for share, is_refused in ((0.02, True), (0.2, False), (0.5, False)):
        held_by = replace(LOCAL, hold_out=share).to_dict()
        fields, _ = attacker.send("contest", {"models": specs, "teams": [[0]], "held_by": held_by}, parts)
        assert ("refused" in fields) is is_refused and ("wrong" in fields) is not is_refused
    assert attacker.refused == ["it requests scores on 1 held-out rows, the policy requires at least 5"]
    few = make_attacker(tmp_path / "few", sizes=(11,))
    specs, parts, _ = few.make_models(few.make_open_model())
    body = {"models": specs, "parent": 0, "starts": ["warm"], "local": LOCAL.to_dict(), "w": [[], [], []]}
    assert "refused" in few.send("tournament", body, parts)[0]


def test_requests_steps_and_memory_are_bounded_until_new_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy(max_requests=4, max_steps=25)
    attacker = make_attacker(tmp_path, policy, sizes=(30, 30, 30))
    specs, parts, _ = attacker.make_models(attacker.make_open_model(), attacker.make_open_model())
    assert "stored" in attacker.send("evaluate", {"metric": "error", "models": specs}, parts)[0]
    assert [get_refusal(attacker), get_refusal(attacker)] == [None, None]
    sentence = "it would make 5 models in requests in this time step, the policy allows 4 (max_requests)"
    assert get_refusal(attacker) == sentence
    assert "cells" in attacker.say_hello(0)  # without models it is not counted
    attacker.say_hello(1)
    assert [get_refusal(attacker, w=([1], [1.0])) for _ in range(2)] == [None, None]
    assert "30 local steps in this time step, the policy allows 25 (max_steps)" in str(get_refusal(attacker))
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 86_401)
    assert get_refusal(attacker) is None  # a day later
    large = make_attacker(tmp_path / "large")
    large.client.policy = Policy(max_memory=1e-7)
    assert "GB of memory, the policy allows 1e-07" in str(get_refusal(large))


def test_a_served_model_is_counted_once(tmp_path: Path) -> None:
    attacker = make_attacker(tmp_path, Policy(max_requests=2))

    def serve(specs: Any, parts: Any) -> dict[str, Any]:
        served = {"tau": 0, "models": specs, "votes": [1.0], "ballot": "hard"}
        return attacker.send("hello", {"seen": 0, "serve": served}, parts)[0]

    first = attacker.make_models(attacker.make_open_model())[:2]
    assert all("right" in serve(*first) for _ in range(5))
    others = [attacker.make_models(attacker.make_open_model(head))[:2] for head in (0.2, 0.3)]
    assert "right" in serve(*others[0]) and "refused" in serve(*others[1])


@pytest.mark.parametrize("model", [None, "linear", "mlp:7,3"])
def test_weights_are_counted_before_the_net_is_built(model: str | None) -> None:
    net = build_client_net(model, (3, 4), 5)
    assert count_weights(model, (3, 4), 5) == sum(np.size(leaf) for leaf in tree_leaves(net.init((0, 1))))


def test_a_huge_net_is_refused_before_it_is_built(tmp_path: Path) -> None:
    client = Client("a", tmp_path, lambda n: None)
    attacker = make_attacker(tmp_path / "other")
    attacker.client = client
    attacker.context = replace(attacker.context, features=(10**6, 10**6))
    assert "GB of memory, the policy allows 8" in attacker.say_hello()["refused"]


def test_settings_are_pinned_until_the_operator_accepts_others(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    (folder / "data").mkdir(parents=True)
    (folder / "client.toml").write_text('name = "a"\n')
    (folder / "data" / "classes.txt").write_text("0\n1\n")
    x = np.random.default_rng(0).random((40, 2)).round(4)
    np.savez(folder / "data" / "step_0.npz", x=x, y=(x[:, 0] > 0.5).astype(int))
    attacker = Attacker(load_client(folder), 2)
    plan = {"algorithm": "FedDrift", "settings": {"delta": 0.1}, "local": LOCAL.to_dict()}
    assert "cells" in attacker.send("hello", {"seen": -1, "plan": plan})[0]
    assert get_refusal(attacker) is None
    assert get_refusal(attacker, replace(LOCAL, steps=20, hold_out=0.5, trains="head")) is None  # these vary
    changed = "it changes pinned settings of the experiment (batch: 10, requested: 20; lr: 0.05, requested: 1.0): "
    assert str(get_refusal(attacker, replace(LOCAL, batch=20, lr=1.0))).startswith(changed)
    other = plan | {"algorithm": "FLUX"}
    assert "algorithm" in attacker.send("hello", {"seen": 0, "plan": other})[0]["refused"]
    attacker.context = replace(attacker.context, seed=99)
    assert "seed: 5, requested: 99" in attacker.say_hello()["refused"]
    attacker.context = replace(attacker.context, seed=5)

    assert any("wants to change pinned settings (batch, lr, algorithm, seed)" in p for p in check.find_problems(folder))
    status = run_and_get_output("deploy", "client", str(folder), "--status")
    for text in (
        "3 hello",
        "3 train",
        "refused: 3",
        "batch: 10, requested: 20",
        'algorithm = "FedDrift"',
    ):
        assert text in status, status
    accepted = run_and_get_output("deploy", "client", str(folder), "--accept")
    assert "experiment attack: batch: 10, requested: 20" in accepted
    assert "experiment attack: accepted and pinned 4 settings" in accepted
    assert "not requested other settings" in run_and_get_output("deploy", "client", str(folder), "--accept")
    attacker.context = replace(attacker.context, seed=99)
    assert get_refusal(attacker, replace(LOCAL, batch=20, lr=1.0)) is None
    assert "batch: 20, requested: 10" in str(get_refusal(attacker))


def test_init_writes_the_default_policy_and_a_folder_without_one_has_it(tmp_path: Path) -> None:
    scaffold.create_deployment(tmp_path / "fed", ["a"], [2], ["0", "1"])
    folder = tmp_path / "fed" / "clients" / "a"
    assert read_client_toml(folder)["policy"] == Policy()
    client = load_client(folder)
    assert (client.policy, client.describe, client.explain) == (Policy(), False, True)
    assert describe_policy(folder).startswith("policy: min_rows = 10, min_batch = 10,")
    (tmp_path / "client.toml").write_text('name = "a"\n')
    assert load_client(tmp_path).policy == Policy()
    assert describe_policy(tmp_path).startswith("client.toml has no [policy], so the defaults apply: min_rows = 10,")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("policy = 3", "policy must be a table [policy], got 3"),
        ("[policy]\nmin_row = 3", "[policy] has no setting 'min_row'; legal are min_rows, min_batch,"),
        ("[policy]\nmin_group_rows = 3", "[policy] has no setting 'min_group_rows'"),
        ("[policy]\nmin_rows = 0", "min_rows in [policy] must be a whole number, at least 1, got 0"),
        ("[policy]\nallow_sgd = 1", "allow_sgd in [policy] must be true or false, got 1"),
        ("[policy]\nmax_memory = 0", "max_memory in [policy] must be a number of GB above 0, got 0"),
    ],
)
def test_a_wrong_policy_is_one_clear_sentence(line: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "client.toml").write_text(f'name = "a"\n{line}\n')
    with pytest.raises(ConfigError) as error:
        read_client_toml(tmp_path)
    assert sentence in str(error.value)


def test_groups_with_few_rows_and_their_rests_are_not_sent() -> None:
    draw = np.random.default_rng(0)
    for _ in range(300):
        counts = draw.integers(0, 30, size=draw.integers(1, 8)).tolist()
        sent = choose_sent_groups(counts, 10)
        rest = sum(count for count, is_sent in zip(counts, sent, strict=True) if not is_sent)
        assert all(count >= 10 for count, is_sent in zip(counts, sent, strict=True) if is_sent)
        assert rest == 0 or rest >= 10 or not any(sent)


def test_an_explanation_describes_no_class_with_few_rows(tmp_path: Path) -> None:
    """Classes 0 and 1 move in opposite directions; the few rows of class 2 are not the rest of what is described."""
    draw = np.random.default_rng(0)
    y = np.repeat([0, 1, 2], [150, 146, 4])
    cells = [(draw.normal(size=(300, 2)).astype(np.float32) + np.float32(n) * np.array([[1], [-1], [0]])[y], y)
             for n in (0, 1)]  # fmt: skip

    def explain(policy: Policy, folder: Path) -> set[str]:
        client = Client("a", folder, lambda n: cells[n] if n < 2 else None, policy=policy)
        attacker = Attacker(client, 2, n_classes=3)
        attacker.say_hello(0)
        attacker.say_hello(1)
        moved = attacker.send("explain", {})[0]["shifts"]["moved"]
        return {shift["within"] for shift in moved if "within" in shift}

    assert explain(PERMISSIVE, tmp_path / "permissive") == {"0", "1"}
    assert explain(Policy(), tmp_path / "default") == {"0"}


def test_the_log_is_bounded_and_survives_cut_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_log, "MAX_LOG_BYTES", 2000)
    log = RequestLog(tmp_path / "requests.jsonl")
    for k in range(50):
        log.append(RequestEntry("train", "x", k))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["requests.jsonl", "requests.jsonl.1"]
    assert all(path.stat().st_size <= 2000 for path in tmp_path.iterdir())
    times = [entry["t"] for entry in log.read()]
    assert times == list(range(times[0], 50)) and len(times) >= 10
    with open(log.path, "a") as file:
        file.write('{"at": "2026')  # a power failure
    log.append(RequestEntry("train", "x", 50))
    assert [entry["t"] for entry in log.read()] == [*times, 50]
    log.append(RequestEntry("hello", "x", 51))
    log.append(RequestEntry("hello", "x", 51))  # a server that waits for data
    assert [entry["t"] for entry in log.read()][-2:] == [50, 51]


def test_a_damaged_file_of_pinned_settings_is_not_replaced_silently(tmp_path: Path) -> None:
    attacker = make_attacker(tmp_path)
    (tmp_path / "attack" / "a" / "pinned.json").write_text("{")
    assert "DataError" in attacker.say_hello()["failed"]
    agreement = Agreement(tmp_path / "new")
    agreement.pin({"batch": 1})
    with pytest.raises(RequestRefusedError):
        agreement.check({"batch": 2})
    assert json.loads((tmp_path / "new" / "asked.json").read_text()) == {"batch": 2}


def test_refusals_are_in_the_servers_record_and_needs_are_named_at_its_start(tmp_path: Path) -> None:
    stream = make_swapping_stream(n_steps=2)
    engine = make_federation(stream)
    engine.needs = ("describe",)
    client = engine.local_grid.clients["b"]
    client.policy = Policy()
    client.describe = False
    run_n_steps(engine, fd.algorithm("FedDrift", delta=0.2), 2, tmp_path)
    record = read(tmp_path / "test.jsonl")
    reasons = {(c, reason) for _, _, c, _, _, reason in find_missing_replies(record)}
    assert reasons == {(1, "it refuses the request: it requests batch = 8, the policy requires at least 10")}
    (note,) = find_client_notes(record)
    assert note[1:3] == (0, 1)
    assert note[5] == (
        "it refuses describe, which this method needs: its operator can set describe = true in its client.toml"
    )


DEPLOYABLE = [name for name, entry in ALGORITHMS.items() if not getattr(entry.cls, "needs_truth", False)]


@pytest.mark.parametrize(
    "name",
    [name if name in ("FedDrift", "FLUX") else pytest.param(name, marks=pytest.mark.slow) for name in DEPLOYABLE],
)
def test_every_method_works_with_the_default_policy_and_thirty_rows(name: str, tmp_path: Path) -> None:
    """Methods that need more than the defaults say so; `init` comments name them."""
    stream = make_swapping_stream(n_steps=4, n=30)
    local = Local(rounds=3)  # the paper's
    engine = make_federation(stream, local)
    algorithm = fd.algorithm(name)
    engine.needs = getattr(algorithm, "needs_consent", ())
    engine.plan = {"algorithm": name, "settings": {}, "local": local.to_dict()}
    for client in engine.local_grid.clients.values():
        client.policy = Policy(allow_sgd="sgd" in engine.needs)
        client.describe = "describe" in engine.needs
    run_n_steps(engine, algorithm, 4, tmp_path)
    entries = [entry for client in engine.local_grid.clients.values() for entry in client.request_log.read()]
    assert entries and not [entry for entry in entries if entry["refused"] or entry["failed"]]
    assert not list(find_client_notes(read(tmp_path / "test.jsonl")))
