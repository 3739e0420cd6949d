"""Texts of events, and commands that repeat a run."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import feddrift as fd
from feddrift import algorithms
from feddrift.reports.event_text import build_run_command, explain_event
from feddrift.runs import record
from feddrift.runs.config import RunConfig
from tests.support.records import make_header

RESULTS = Path(__file__).parents[3] / "results"
CAUSES: list[tuple[str, dict[str, Any], str]] = [
    (
        "created",
        {"error": 0.5, "reference": 0.1, "delta": 0.05, "from": None},
        "0.100 to 0.500, by more than delta 0.05; model 3 starts with new random parameters",
    ),
    (
        "created",
        {"loss": 2.0, "reference": 1.0, "delta": 0.5, "from": 1, "family": 0},
        "2.000, by more than delta 0.5; model 3 starts as a copy of model 1 on trunk 0",
    ),
    (
        "created",
        {"error": 0.5, "reference": None, "delta": 0.05, "from": 0},
        "model 3 starts as a copy of model 0 (error=0.5, reference=none, delta=0.05)",
    ),
    (
        "created",
        {"error": 0.5, "reference": 0.1, "p": 0.001, "from": 0},
        "model 3 starts as a copy of model 0 (p=0.001)",
    ),
    ("created", {"concept": 1}, "Oracle received concept B"),
    ("created", {"clients": [1], "reason": "given"}, "given"),
    (
        "created",
        {"from": 0, "clients": [1, 2], "round": 7},
        "in round 7 the updates of model 0's clients pointed in different directions; both parts start again",
    ),
    (
        "created",
        {"reason": "reactive phase", "accuracy": 0.5, "best": 0.9, "delta": 0.1},
        "accuracy 0.500 fell below the best so far, 0.900, by more than delta 0.1",
    ),
    (
        "created",
        {
            "error": 1.0,
            "reference": 0.0,
            "delta": 0.1,
            "from": 0,
            "start": "warm",
            "starts": ["warm", "fresh"],
            "rows": 9,
            "wrong": [],
        },
        "a trial on the client's data chose the start warm among warm, fresh",
    ),
    (
        "merged",
        {"into": 1, "distance": 0.0312},
        "model 3 merged into model 1: on each other's data they differ by 0.031",
    ),
    (
        "merged",
        {"into": 1, "distance": 0, "kept": "average", "family": 0},
        "into model 1 on trunk 0: on each other's data they differ by 0.000; average was kept",
    ),
    ("retired", {"reason": "no client uses it"}, "no client uses it"),
    ("revived", {"clients": [4]}, ""),
    (
        "decided",
        {"clients": [4], "reason": "new data contradict the old ones", "rows": 250, "z": 2.418273},
        "new data contradict the old ones (rows=250, z=2.418)",
    ),
    ("created", {}, ""),
]


@pytest.mark.parametrize(("kind", "cause", "sentence"), CAUSES)
def test_every_cause_has_a_text(kind: str, cause: dict[str, Any], sentence: str) -> None:
    told = explain_event({"event": kind, "model": 3, "cause": cause})
    assert sentence in told and bool(told) == bool(sentence)
    assert "clients=" not in told  # they are told elsewhere


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)
NAMES = [
    "clients", "error", "loss", "reference", "delta", "from", "family", "start", "starts", "rows", "wrong", "concept",
    "reason", "round", "accuracy", "best", "kept", "odd",
]  # fmt: skip


@given(
    st.sampled_from(["created", "retired", "revived", "decided"]), st.dictionaries(st.sampled_from(NAMES), json_values)
)
def test_any_cause_has_a_text(kind: str, cause: dict[str, Any]) -> None:
    assert isinstance(explain_event({"event": kind, "model": 1, "cause": cause}), str)


def test_every_event_of_the_records_of_the_docs_has_a_text() -> None:
    events = [event for run in record.read_all(RESULTS / "fmow-labels") for event in run.events]
    assert len(events) > 100
    assert not [event for event in events if "=" in explain_event(event) and "kappa" not in event["cause"]]


def parse_command(words: list[str]) -> dict[str, Any]:
    """The configuration that a command line stands for."""
    assert words[:2] == ["feddrift", "run"]
    options = list(zip(words[2::2], words[3::2], strict=True))
    settings = dict(value.split("=", 1) for name, value in options if name == "--set")
    return {name[2:].replace("-", "_"): value for name, value in options if name != "--set"} | {"settings": settings}


@pytest.mark.parametrize("name", algorithms.ALGORITHMS)
def test_the_command_makes_the_same_run(name: str) -> None:
    stream = fd.stream("sea-4")
    fields = algorithms.get_options(algorithms.ALGORITHMS[name].cls)
    odd = {"delta": 0.25, "init": "fresh", "max_models": 7, "redetect": name == "FedDrift-C"}
    for changes in ({}, {key: value for key, value in odd.items() if key in fields}):
        made = algorithms.get_settings(algorithms.algorithm(name, stream, **changes))
        head = make_header(stream="sea-4", algorithm=name, settings=made, seed=3, overrides={"rounds": 2, "lr": 0.5})
        text, notes = build_run_command(head)
        config = RunConfig.from_values(**parse_command(shlex.split(text)))
        algorithm, local = config.resolve_algorithm(stream)
        assert algorithms.get_settings(algorithm) == made and not notes
        assert (config.seed, local.rounds, local.lr) == (3, 2, 0.5)


def test_settings_known_by_digests_only_are_noted() -> None:
    overrides = {"data": "0123abcd", "pattern": "my drift.txt@89ab", "label": "sold", "weights": "77"}
    text, notes = build_run_command(make_header(stream="folder:my data", overrides=overrides))
    assert "--stream 'folder:my data'" in text and "--pattern 'my drift.txt'" in text and "--label sold" in text
    assert len(notes) == 3 and "0123abcd" in notes[0] and "89ab" in notes[1] and "--weights FILE" in notes[2]


def test_an_algorithm_of_your_own_keeps_all_its_settings() -> None:
    text, _ = build_run_command(
        make_header(algorithm="mine.Method", settings={"delta": 0.1, "deep": True, "most": None})
    )
    assert "--algorithm mine.Method --set delta=0.1 --set deep=true --set most=none" in text
