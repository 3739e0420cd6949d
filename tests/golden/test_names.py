"""Names of records never change: those of the records below results/ are still made of their headers today.

`names.txt` has a line for each folder and configuration, with its seeds. Where records are added to results/, add the
lines that the test reports.
"""

from __future__ import annotations

import json
from pathlib import Path

from feddrift import algorithms
from feddrift.reports.labels import format_ranges
from feddrift.runs.record import build_record_name, split_packed_file

RESULTS = Path(__file__).parents[2] / "results"
NAMES = Path(__file__).with_name("names.txt")
# Settings that a few early records say or leave out unlike those made today: they keep their names all the same.
EARLY = ({("first", "one")}, {("quarantine", False)})


def test_every_record_has_the_name_that_is_made_of_its_header_today() -> None:
    assert not list(RESULTS.rglob("*.jsonl")), "pack these records: python experiments/publish.py --pack FOLDER"
    seeds: dict[str, list[int]] = {}
    known: set[str] = set()
    for path in sorted(RESULTS.glob("*/records.jsonl.xz")):
        for lines in split_packed_file(path):
            header = json.loads(lines[0])
            name, _, seed = build_record_name(header).rpartition("_seed")
            seeds.setdefault(f"{path.parent.name}/{name}", []).append(int(seed))
            configured = json.dumps([header["algorithm"], header["settings"]])
            if configured in known:
                continue
            known.add(configured)
            made = algorithms.algorithm(header["algorithm"], **header["settings"])
            changed = set(algorithms.get_settings(made).items()) ^ set(header["settings"].items())
            assert not changed or changed in EARLY, (path, name)
    assert len(known) > 50
    found = [f"{name} seeds {format_ranges(sorted(numbers))}" for name, numbers in sorted(seeds.items())]
    assert found == NAMES.read_text().splitlines()
