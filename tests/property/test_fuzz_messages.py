"""Messages of the Flower engine and the settings file of its server: invalid input of clients and operators."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from feddrift.deploy.settings import Settings
from feddrift.engines.flower import messages, serialization
from feddrift.errors import MAX_MESSAGE_LENGTH
from feddrift.reports.event_text import explain_alarm
from feddrift.runs import schema
from feddrift.trees import tree_leaves
from feddrift.types import Router
from tests.support.federation import make_federation, make_swapping_stream
from tests.support.fuzzing import (
    FEATURE_SHIFTS,
    ODD_VALUES,
    call_or_refuse,
    json_values,
    limit_examples,
    list_paths,
    mutations,
    npy_headers,
    replace_at_path,
)
from tests.support.records import make_header, make_rows


@st.composite
def draw_tampering(draw: st.DrawFn) -> Callable[[RecordDict], RecordDict]:
    """A change of a message, drawn before the message is there."""
    kind = draw(st.sampled_from(["value", "value", "text", "array", "header", "records"]))
    at, value = draw(st.integers(0, 10**6)), draw(st.sampled_from(ODD_VALUES) | json_values)
    cut, token = draw(st.integers(0, 10**6)), draw(st.binary(max_size=6))
    header = draw(npy_headers)

    def spoilt(data: bytes) -> bytes:
        place = cut % (len(data) + 1)
        return data[:place] + token + data[place + at % 3 :]

    def tamper(content: RecordDict) -> RecordDict:
        text = str(content.config_records["body"]["json"])
        if kind == "value":
            body = json.loads(text)
            where = list_paths(body)
            content["body"] = ConfigRecord({"json": json.dumps(replace_at_path(body, where[at % len(where)], value))})
        elif kind == "text":
            content["body"] = ConfigRecord({"json": spoilt(text.encode()).decode(errors="replace")})
        elif kind == "records":
            content[f"head-{at % 3}"] = ArrayRecord([np.zeros(at % 5)])
        else:
            for name, record in list(content.array_records.items()):
                changed = {}
                for key, array in record.items():
                    data = header if kind == "header" else spoilt(array.data)
                    changed[key] = Array(array.dtype, array.shape, array.stype, data)
                content[name] = ArrayRecord(changed)
        return content

    return tamper


@pytest.mark.slow
@limit_examples(60)
@given(verb=st.sampled_from(["train", "evaluate", "describe", "reroute", "contest", "hello"]), tamper=draw_tampering())
def test_replies(caplog: pytest.LogCaptureFixture, verb: str, tamper: Any) -> None:
    """One client answers anything at all: it is named in one line, and the others go on."""
    caplog.clear()
    engine = make_federation(make_swapping_stream(n_steps=1))
    engine.local_grid.tamper["b", verb] = tamper
    fed = engine.at(0)
    models, w = fed.fresh(), np.ones((1, 3, 1))
    router = Router("batch", np.zeros((2, 2)), np.eye(1)[[0, 0]])
    loss, moments, found, rerouted, trained = (
        fed.evaluate(models),
        fed.moments(models, "trunk"),
        fed.contest(models, np.zeros((2, 3, 1), dtype=int)),
        fed.reroute(models, np.ones((3, 1)), "hard", dict.fromkeys(range(3), router)),
        fed.train(models, w),
    )
    assert (found.rows[[0, 2]] > 0).all() and (found.wrong.diagonal(axis1=1, axis2=2) <= found.rows[:, None]).all()
    assert (rerouted[[0, 2], 0] > 0).all() and (rerouted[:, 1:] <= rerouted[:, :1]).all()
    assert np.isfinite(moments.mean[[0, 2]]).all() and np.isfinite(moments.std[[0, 2]]).all()
    assert np.isfinite(loss[[0, 2]]).all() and all(np.isfinite(leaf).all() for leaf in tree_leaves(trained.params))
    for line in caplog.records:
        told = line.getMessage()
        assert line.levelno < logging.ERROR and told.isprintable() and len(told) < MAX_MESSAGE_LENGTH, told


@limit_examples(60)
@given(kind=st.sampled_from(sorted(messages.REQUESTS)), tamper=draw_tampering())
def test_requests(kind: str, tamper: Any) -> None:
    """A client that is asked anything at all answers, and never with its own data."""
    client = make_federation(make_swapping_stream(n_steps=1)).local_grid.clients["b"]
    about = {
        "experiment": "x", "client": "b", "index": 1, "tau": 0, "n_clients": 3, "n_classes": 2, "features": [2],
        "seed": 0,
    }  # fmt: skip
    asked = serialization.pack_message(
        {"version": messages.VERSION, "about": about}, {"head-0": [np.zeros(2, dtype=np.float32)]}
    )
    logging.disable(logging.CRITICAL)
    try:
        body, _ = serialization.unpack_message(client.handle_message(kind, tamper(asked)))
    finally:
        logging.disable(logging.NOTSET)
    assert body["client"] == "b" and body["version"] == messages.VERSION
    if "failed" in body:
        assert body["failed"].isprintable() and len(body["failed"]) < MAX_MESSAGE_LENGTH


@limit_examples(200)
@given(
    at=st.sampled_from([path for path in list_paths(FEATURE_SHIFTS) if path]),
    value=st.sampled_from(ODD_VALUES) | json_values,
)
def test_explanations_of_an_alarm(at: Any, value: Any) -> None:
    """What is not refused can be written into a record and told in a line."""
    try:
        shifts = messages.read_shifts({"shifts": replace_at_path(FEATURE_SHIFTS, at, value)}, 3)
    except (
        serialization.InvalidMessageError,
        KeyError,
        TypeError,
        ValueError,
        IndexError,
        AttributeError,
        OverflowError,
    ):
        return  # all of which refuse the reply
    if shifts is not None:
        line = {"kind": "row", **make_rows(make_header(4, 1), 3, drift=[True], shifts=[shifts.to_dict()])[0]}
        assert schema.parse_line(schema.dump_line(line), "here")["shifts"] == shifts.to_dict()
        assert explain_alarm(shifts.to_dict(), 3).isprintable()


TOML = """experiment = "x"
clients = ["a", "b"]
features = [2]
classes = ["no", "yes"]
algorithm = "FedDrift"
settings = {delta = 0.1}
rounds = 5
lr = 0.01
quorum = 2
patience = 10.0
start = "data"
"""
literals = st.sampled_from(
    ["nan", "inf", "-1", "0", "1e300", "true", "[]", "[0]", "[1, 1]", "['a', 'a']", "''", "'../x'", "[''  ]", "{}", "5",
     "0x" + "f" * 5000, "9" * 5000, "[" * 3000, '"a\\nb"', "{name = 1}", "99999999999999999999", "1979-05-27"]
)  # fmt: skip


@limit_examples(100)
@given(mutations(TOML.encode()) | st.tuples(st.integers(0, TOML.count("\n") - 1), literals))
def test_settings(tmp_path: Path, content: bytes | tuple[int, str]) -> None:
    path = tmp_path / "federation.toml"
    if isinstance(content, tuple):
        lines = TOML.splitlines()
        lines[content[0]] = f"{lines[content[0]].partition(' =')[0]} = {content[1]}"
        content = "\n".join(lines).encode()
    path.write_bytes(content)
    found = call_or_refuse(lambda: Settings.read(path))
    if found is not None:
        assert all(0 < n < 10**7 for n in found.features) and len(set(found.classes)) == len(found.classes)
        assert math.isfinite(found.lr) and found.patience > 0 and found.waiting_rules and found.local
        assert found.start == "data" or found.start >= 0


def test_settings_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "federation.toml"
    path.write_text(TOML)
    assert Settings.read(path).quorum == 2
