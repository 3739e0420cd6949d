"""Protocol versions: a server with protocol n supports clients with n and n - 1."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

from flwr.app import RecordDict

import feddrift as fd
from feddrift.engines.flower import protocol, serialization
from feddrift.engines.flower.messages import PROTOCOL, VERSION
from feddrift.engines.flower.protocol import (
    CHANGES,
    SUPPORTED_PROTOCOLS,
    ProtocolChange,
    check_client_version,
    check_server_version,
    parse_protocol,
)
from feddrift.engines.flower.serialization import InvalidMessageError
from feddrift.reports.exchanges import collect_exchanges, find_absent_clients, find_client_notes, find_missing_replies
from feddrift.runs.record import read
from feddrift.simulation import Step
from tests.support.federation import (
    assert_identical,
    edit_body,
    get_reply,
    make_federation,
    make_request,
    make_swapping_stream,
    replace_client,
    run_n_steps,
)
from tests.support.flower import InProcessFlower, OldClient


def run_three_steps(engine: InProcessFlower, folder: Path, algorithm: str = "FedDrift") -> list[Step]:
    settings = {"delta": 0.2} if algorithm == "FedDrift" else {}
    return run_n_steps(engine, fd.algorithm(algorithm, **settings), 3, folder)


def list_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line.getMessage() for line in caplog.records if line.levelno >= logging.WARNING]


def test_the_table_ends_with_the_current_protocol() -> None:
    """Who raises the number says here what an older client does not know."""
    assert list(CHANGES) == list(range(2, PROTOCOL + 1)) and SUPPORTED_PROTOCOLS == (PROTOCOL, PROTOCOL - 1)
    assert parse_protocol(VERSION) == PROTOCOL and parse_protocol(OldClient.version) == PROTOCOL - 1


@pytest.mark.parametrize(
    "version", [None, 5, "", "5", "/5", "1.0/", "1.0/-5", "1.0/5\n", "a b/5", "x" * 41 + "/5", "1/\u0665"]
)
def test_an_invalid_version_has_no_protocol(version: Any) -> None:
    assert parse_protocol(version) is None
    with pytest.raises(
        InvalidMessageError, match=r"the client has version .*, the server .* \(protocol 7\), .*: update the client"
    ):
        check_client_version(version)
    with pytest.raises(
        InvalidMessageError, match=r"the server has version .*, this client .* \(protocol 7\): update the server"
    ):
        check_server_version(version)


def test_the_number_alone_decides_and_a_refusal_names_the_side_to_update() -> None:
    ours = rf"0\.[0-9.]+ \(protocol {PROTOCOL}\)"
    assert [check_client_version(f"9.9/{n}") for n in SUPPORTED_PROTOCOLS] == [f"9.9/{n}" for n in SUPPORTED_PROTOCOLS]
    check_server_version(f"9.9/{PROTOCOL}")
    too_old, too_new = f"0.1/{PROTOCOL - 2}", f"9.9/{PROTOCOL + 1}"
    supported = f"which supports protocols {PROTOCOL - 1} and {PROTOCOL}"
    with pytest.raises(
        InvalidMessageError,
        match=rf"has version 0.1 \(protocol {PROTOCOL - 2}\), the server {ours}, {supported}: update the client$",
    ):
        check_client_version(too_old)
    with pytest.raises(
        InvalidMessageError,
        match=rf"9.9 \(protocol {PROTOCOL + 1}\), the server {ours}, {supported}: update the server$",
    ):
        check_client_version(too_new)
    with pytest.raises(
        InvalidMessageError, match=rf"0.1 \(protocol {PROTOCOL - 1}\), this client {ours}: update the server$"
    ):
        check_server_version(f"0.1/{PROTOCOL - 1}")
    with pytest.raises(
        InvalidMessageError,
        match=rf"9.9 \(protocol {PROTOCOL + 1}\), this client {ours}: the server repeats the request in this client's",
    ):
        check_server_version(too_new)
    with pytest.raises(InvalidMessageError, match=rf"has version {ours}, this client {ours}: the server repeats"):
        check_server_version(f"0.1/{PROTOCOL - 1}", VERSION)
    with pytest.raises(
        InvalidMessageError, match=rf"\(protocol {PROTOCOL + 2}\), this client {ours}: update the client$"
    ):
        check_server_version(f"9.9/{PROTOCOL + 2}")


def test_a_client_of_the_number_before_takes_part_with_the_same_result(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stream = make_swapping_stream(n_steps=3)
    engine = make_federation(stream)
    old = replace_client(engine, OldClient)
    there = run_three_steps(engine, tmp_path / "mixed")
    told = list_warnings(caplog)
    for mixed, new in zip(there, run_three_steps(make_federation(stream), tmp_path / "new"), strict=True):
        assert_identical(mixed.state.models.params, new.state.models.params)
        np.testing.assert_array_equal(mixed.tested, new.tested)
        np.testing.assert_array_equal(mixed.accuracy, new.accuracy)
    assert len(told) == 1 and f"client b: it has version 0.3.0/{PROTOCOL - 1}, this server" in told[0], told
    first, *others = old.heard
    assert first[1]["version"] == VERSION and {body["version"] for _, body in others} == {OldClient.version}
    assert {kind for kind, _ in others} == {"hello", "evaluate", "train"}


@pytest.mark.parametrize("algorithm", ["FedDrift-Auto", "FLUX", "FineTuned"])
def test_it_answers_every_kind_of_question_alike(tmp_path: Path, algorithm: str) -> None:
    """Contests, descriptions, private models: none of which changed."""
    stream = make_swapping_stream(n_steps=3, n=20)
    engine = make_federation(stream)
    old = replace_client(engine, OldClient)
    there = run_three_steps(engine, tmp_path / "mixed", algorithm)
    for mixed, new in zip(there, run_three_steps(make_federation(stream), tmp_path / "new", algorithm), strict=True):
        assert_identical(mixed.state.models.params, new.state.models.params)
        np.testing.assert_array_equal(mixed.accuracy, new.accuracy)
    asked = {"FedDrift-Auto": "contest", "FLUX": "describe", "FineTuned": "train"}[algorithm]
    assert asked in {kind for kind, body in old.heard if body["version"] == OldClient.version}


def test_a_client_may_be_updated_and_set_back_while_the_federation_runs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It keeps its store, and says by itself what it speaks now."""
    stream = make_swapping_stream(n_steps=3)
    engine = make_federation(stream)
    new = engine.local_grid.clients["b"]
    old = replace_client(engine, OldClient)
    fed = engine.at(0)
    models, w = fed.fresh(), np.ones((1, 3, 1))
    trained = fed.train(models, w, rounds=1)
    engine.local_grid.clients["b"] = new  # type: ignore[index]
    trained = fed.train(trained, w, rounds=1)
    engine.local_grid.clients["b"] = old  # type: ignore[index]
    trained = fed.train(trained, w, rounds=1)
    assert fed.reachable.all()
    every = make_federation(stream).at(0)
    expected = models
    for _ in range(3):
        expected = every.train(expected, w, rounds=1)
    assert_identical(trained.params, expected.params)
    first, at_the_client, again = list_warnings(caplog)
    assert first == again and f"client b: it has version {OldClient.version}" in first
    assert "client b refused a message" in at_the_client and "the server repeats" in at_the_client


class OtherVersion(OldClient):
    """A client of the same number and another version, from when versions had to be the same."""

    version = f"0.1.9/{PROTOCOL}"

    def handle_message(self, kind: str, content: RecordDict) -> RecordDict:
        asked, _ = serialization.unpack_message(content)
        if asked.get("version") != self.version:
            self.heard.append((kind, asked))
            return serialization.pack_message(
                {"version": self.version, "client": self.name, "failed": "another version"}
            )
        return super().handle_message(kind, content)


def test_another_version_of_the_same_number_is_accepted(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_federation(make_swapping_stream())
    old = replace_client(engine, OtherVersion)
    fed = engine.at(0)
    assert np.isfinite(fed.evaluate(fed.fresh())).all() and not list_warnings(caplog)
    assert [body["version"] for _, body in old.heard] == [VERSION, old.version, old.version]
    assert old.heard[1][1]["seen"] == -1
    asked = make_request(engine, "hello", {"version": f"9.9/{PROTOCOL}"})
    assert "failed" not in get_reply(engine.local_grid.clients["a"], "hello", asked)


def test_a_client_with_the_protocol_gets_one_request_in_any_version() -> None:
    engine = make_federation(make_swapping_stream())
    versions: list[str] = []

    def renamed(body: dict[str, Any]) -> None:
        versions.append(body["version"])
        body.update(version=f"9.9/{PROTOCOL}")

    engine.local_grid.tamper["b", "hello"] = edit_body(renamed)
    assert engine.at(0).reachable.all() and versions == [VERSION]


def test_an_older_version_is_in_the_record_once_and_shown(tmp_path: Path) -> None:
    engine = make_federation(make_swapping_stream(n_steps=3))
    replace_client(engine, OldClient)
    run_three_steps(engine, tmp_path)
    (told,) = find_client_notes(record := read(tmp_path / "test.jsonl"))
    assert told[1:4] == (0, 1, "hello") and told[5].startswith(f"it has version {OldClient.version}, this server")
    assert not list(find_missing_replies(record)) and find_absent_clients(record, 0) == []
    shown = collect_exchanges(record)
    assert shown is not None and shown["out"] == [list(told)]


def test_missing_fields_of_an_older_reply_are_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    change = replace(CHANGES[PROTOCOL], reply_defaults={"hello": {"backlog": 7, "gap": None}})
    monkeypatch.setitem(protocol.CHANGES, PROTOCOL, change)
    engine = make_federation(make_swapping_stream())
    replace_client(engine, OldClient)
    accounts: list[Any] = []
    engine.on_exchange = accounts.append
    engine.at(0)
    assert accounts[0].clients[1].backlog == 7


class TooOld(OldClient):
    version = f"0.0.9/{PROTOCOL - 2}"


class TooNew(OldClient):
    version = f"9.9/{PROTOCOL + 1}"


@pytest.mark.parametrize(("kind", "side"), [(TooOld, "client"), (TooNew, "server")])
def test_others_are_refused_by_name_and_get_one_request(
    kind: type[OldClient], side: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_federation(make_swapping_stream())
    old = replace_client(engine, kind)
    fed = engine.at(0)
    assert fed.reachable.tolist() == [True, False, True] and len(old.heard) == 1
    (told,) = list_warnings(caplog)
    assert told.startswith("client b, hello at time 0: its reply is refused: the client has version")
    assert told.endswith(f"update the {side}")


def test_one_that_changes_its_words_at_every_question_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    class Fickle(OldClient):
        def handle_message(self, kind: str, content: Any) -> Any:
            body, _ = serialization.unpack_message(content)
            self.heard.append((kind, body))
            other = PROTOCOL if parse_protocol(body["version"]) != PROTOCOL else PROTOCOL - 1
            return serialization.pack_message(
                {"version": f"1.0/{other}", "client": "b", "cells": [[0, 60]], "scores": {}}
            )

    engine = make_federation(make_swapping_stream())
    old = replace_client(engine, Fickle)
    assert engine.at(0).reachable.tolist() == [True, False, True] and len(old.heard) == 2
    assert "it replies with version 1.0/7 to a request with version 1.0/6" in list_warnings(caplog)[-1]


def test_a_request_that_the_previous_protocol_lacks_is_not_sent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    change = replace(CHANGES[PROTOCOL], unknown_kinds=frozenset({"evaluate"}))
    monkeypatch.setitem(protocol.CHANGES, PROTOCOL, change)
    engine = make_federation(make_swapping_stream())
    old = replace_client(engine, OldClient)
    loss = (fed := engine.at(0)).evaluate(fed.fresh())
    assert np.isfinite(loss[:, 0]).tolist() == [True, False, True]
    assert {kind for kind, _ in old.heard} == {"hello"}
    assert "not sent: 0.3.0 (protocol 6) does not support the request 'evaluate': update the client" in caplog.text


def test_words_are_left_out_and_filled_in_for_every_number_since(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {
        6: ProtocolChange("one", unknown_fields={"hello": frozenset({"new"})}, reply_defaults={"hello": {"count": 0}}),
        7: ProtocolChange(
            "two", unknown_fields={"hello": frozenset({"newer"})}, reply_defaults={"hello": {"count": 1, "gap": None}}
        ),
    }
    monkeypatch.setattr(protocol, "CHANGES", table)
    body = {"old": 1, "new": 2, "newer": 3}
    assert protocol.adapt_request("1.0/5", "hello", body) == {"old": 1}
    assert protocol.adapt_request("1.0/6", "hello", body) == {"old": 1, "new": 2}
    assert protocol.adapt_request("1.0/7", "hello", body) == protocol.adapt_request("1.0/5", "train", body) == body
    assert protocol.adapt_reply("1.0/6", "hello", {"count": 5}) == {"count": 5, "gap": None}
    assert protocol.adapt_reply("1.0/7", "hello", {}) == protocol.adapt_reply("1.0/5", "train", {}) == {}
