"""Names of records are for good: every file below results/ bears the name that is made of its header today."""

from __future__ import annotations

import json
from pathlib import Path

from feddrift import algorithms
from feddrift.runs.record import file_name

RESULTS = Path(__file__).parents[2] / "results"
# Settings that a few early records say or leave out unlike those made today: they keep their names all the same.
EARLY = ({("first", "one")}, {("quarantine", False)})


def test_every_record_has_the_name_that_is_made_of_its_header_today() -> None:
    paths = sorted(RESULTS.rglob("*.jsonl"))
    assert len(paths) > 2900
    known: set[str] = set()
    for path in paths:
        with open(path) as file:
            header = json.loads(file.readline())
        assert file_name(header) == path.stem, path
        configured = json.dumps([header["algorithm"], header["settings"]])
        if configured in known:
            continue
        known.add(configured)
        made = algorithms.algorithm(header["algorithm"], **header["settings"])
        changed = set(algorithms.settings(made).items()) ^ set(header["settings"].items())
        assert not changed or changed in EARLY, path
    assert len(known) > 50
