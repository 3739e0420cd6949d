"""Records: format, order of lines, interrupted records, and errors of damaged files."""

from __future__ import annotations

import errno
import json
import lzma
import re
import threading
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import feddrift as fd
from feddrift.errors import DataError
from feddrift.reports.metrics import compute_traffic_by_phase, find_switches
from feddrift.runs import locks, schema
from feddrift.runs import writer as writer_module
from feddrift.runs.record import build_record_name, read, read_all, read_latest
from feddrift.runs.writer import RecordWriter
from tests.support.records import make_header, make_merge_event, make_rows, write_federation_record, write_record

CREATED = {"t": 1, "event": "created", "model": 1, "cause": {"client": 0}}


def write_lines(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def good_lines() -> list[Any]:
    head = make_header()
    return [
        {"kind": "header", "schema": 1, **head},
        *({"kind": "row", **row} for row in make_rows(head, 0)),
        {"kind": "event", **CREATED},
        *({"kind": "row", **row} for row in make_rows(head, 1)),
        {"kind": "end", "status": "complete", "seconds": 1.5},
    ]


def test_a_packed_file_is_read_like_a_folder(tmp_path: Path) -> None:
    for seed in (0, 1, 2):
        lines = good_lines()
        lines[0] |= {"seed": seed}
        write_lines(tmp_path / f"{seed}.jsonl", lines)
    single = read_all(tmp_path)
    packed = tmp_path / "packed" / "all.jsonl.xz"
    packed.parent.mkdir()
    packed.write_bytes(lzma.compress(b"".join((tmp_path / f"{seed}.jsonl").read_bytes() for seed in (1, 0))))
    assert (
        [run.header["seed"] for run in read_all(packed)]
        == [0, 1]
        == [r.header["seed"] for r in read_all(packed.parent)]
    )
    for a, b in zip(single, read_all(packed), strict=False):
        np.testing.assert_array_equal(a.rows.accuracy, b.rows.accuracy)
        assert a.events == b.events and a.status == b.status == "complete"
    assert len(read_all(tmp_path)) == 5  # both kinds of files
    bad = [*good_lines(), *good_lines()]
    bad[-1] = {"kind": "end", "status": "gone", "seconds": 1.5}
    packed.write_bytes(lzma.compress(write_lines(tmp_path / "bad.jsonl", bad).read_bytes()))
    with pytest.raises(DataError, match=f"{packed.name}, line {len(bad)}: .*gone"):
        read_all(packed)
    first = (tmp_path / "0.jsonl").read_bytes()
    for text in (b"{}\n", b"{}\n" + first, b""):
        packed.write_bytes(lzma.compress(text))
        with pytest.raises(DataError, match="it has no header in its first line"):
            read_all(packed)
    packed.write_bytes(b"no xz")
    with pytest.raises(DataError, match="cannot read"):
        read_all(packed)


@pytest.mark.parametrize("many", [writer_module.MAX_CLIENTS_IN_ROWS, 0])
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(n_steps=st.integers(1, 4), n_clients=st.integers(1, 5), data=st.data())
def test_what_is_written_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, many: int, n_steps: int, n_clients: int, data: st.DataObject
) -> None:
    monkeypatch.setattr(writer_module, "MAX_CLIENTS_IN_ROWS", many)

    def cells(values: st.SearchStrategy[Any]) -> Any:
        shape = st.lists(values, min_size=n_clients, max_size=n_clients)
        return np.array(data.draw(st.lists(shape, min_size=n_steps, max_size=n_steps)), dtype=object)

    columns = {
        "accuracy": cells(st.none() | st.floats(0, 1)),
        "tested": cells(st.integers(0, 1000)),
        "concept": cells(st.none() | st.integers(0, 9)),
        "next_concept": cells(st.none() | st.integers(0, 9)),
        "model": cells(st.integers(0, 99)),
        "n_models": cells(st.integers(1, 9)),
        "drift": cells(st.booleans()),
        "models_sent": cells(st.integers(0, 10**6)),
    }
    head = make_header(n_steps, n_clients)
    record = write_record(tmp_path, head, columns, [make_merge_event(n_steps - 1, 4, into=2)])
    assert record.status == "complete"
    assert record.header == {"kind": "header", "schema": 1, **head}
    assert record.events == ({"kind": "event", **make_merge_event(n_steps - 1, 4, into=2)},)
    for name, values in columns.items():
        missing = np.nan if name == "accuracy" else -1
        expected = np.array([missing if v is None else v for v in values.flat], dtype=np.float64)
        got = getattr(record.rows, name)
        assert got.shape == (n_steps, n_clients)
        np.testing.assert_array_equal(got.reshape(-1).astype(np.float64), expected)


def test_many_clients_are_one_line_of_columns_per_time_step(tmp_path: Path) -> None:
    head = make_header(2, 1000)
    made = write_record(tmp_path, head, {"model": [range(1000), [5] * 1000], "loss": [[None] * 1000, [0.5] * 1000]})
    (path,) = tmp_path.glob("*.jsonl")
    kinds = [json.loads(line)["kind"] for line in path.read_text().splitlines()]
    assert kinds == ["header", "columns", "columns", "end"]
    assert made.status == "complete" and made.rows.model[0].tolist() == list(range(1000))
    assert np.isnan(made.rows.loss[0]).all() and (made.rows.loss[1] == 0.5).all() and (made.rows.received == -1).all()
    lines = path.read_text().splitlines()
    short = json.loads(lines[1])
    short["model"].pop()
    for bad, said in (
        (short, "same length"),
        ({k: v[:7] if isinstance(v, list) else v for k, v in short.items()}, "1000 long, got 7"),
    ):
        with pytest.raises(DataError, match=said):
            read(write_lines(tmp_path / "bad.jsonl", [lines[0], bad]))
    cut = tmp_path / "cut.jsonl"
    cut.write_text("\n".join(lines[:2]) + "\n" + lines[2][:5000])
    assert read(cut).rows.steps == 1
    with (
        RecordWriter(tmp_path / "other", head) as writer,
        pytest.raises(DataError, match="in the order of the clients"),
    ):
        writer.write_step(make_rows(head, 0)[::-1])


def test_numpy_values_and_nan_are_written_as_json(tmp_path: Path) -> None:
    head = make_header(1, 1, concepts=np.array([[0], [1]]), settings={"delta": np.float64(0.5), "widths": (2, 4)})
    head["seed"] = np.int64(3)
    with RecordWriter(tmp_path, head) as writer:
        writer.write_step(make_rows(head, 0, accuracy=[np.nan], model=[np.int64(7)], drift=[np.True_]))
    header_line, row, end = map(json.loads, writer.path.read_text().splitlines())
    assert header_line["settings"] == {"delta": 0.5, "widths": [2, 4]}
    assert header_line["concepts"] == [[0], [1]]
    assert (row["accuracy"], row["model"], row["drift"]) == (None, 7, True)
    assert end["status"] == "complete"
    assert np.isnan(read(writer.path).rows.accuracy).all()


def test_decisions_are_read_back_and_change_no_clusters(tmp_path: Path) -> None:
    causes = [{"clients": [c], "reason": "stays with model 0", "rows": 250} for c in range(2)]
    decided = [{"t": 1, "event": "decided", "model": 0, "cause": cause} for cause in causes]
    record = write_record(tmp_path, make_header(), None, decided)
    assert record.events == tuple({"kind": "event", **event} for event in decided)
    table = fd.events(record)
    assert table["event"] == ["decided"] * 2 and table["cause"] == causes
    assert table["why"] == ["stays with model 0 (rows=250)"] * 2
    assert not find_switches(record).any() and set(compute_traffic_by_phase(record)) == {"first", "quiet"}


def test_events_come_before_the_rows_of_their_step(tmp_path: Path) -> None:
    head = make_header()
    with RecordWriter(tmp_path, head) as writer:
        writer.write_step(make_rows(head, 0))
        writer.write_step(make_rows(head, 1), [CREATED])
    kinds = [json.loads(line)["kind"] for line in writer.path.read_text().splitlines()]
    assert kinds == ["header", "row", "row", "event", "row", "row", "end"]


def test_file_names_distinguish_configurations_and_seeds() -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"seed": 1},
        {"stream": "sine.2"},
        {"algorithm": "FedDrift-W"},
        {"settings": {"delta": 0.2, "init": "warm"}},
        {"overrides": {"rounds": 3}},
        {"stream": "folder:/data/a b"},
        {"stream": "folder:/data/a?b"},
    ]
    names = [build_record_name(make_header(**change)) for change in changes]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) for name in names)
    assert names[1] == names[0].replace("_seed0", "_seed1")
    assert names[0].startswith("sine-2_FedDrift_")
    assert build_record_name(make_header(settings={"init": "warm", "delta": 0.1})) == names[0], (
        "the order of settings means nothing"
    )


def test_a_record_cut_anywhere_still_holds_its_whole_steps(tmp_path: Path) -> None:
    head = make_header(3, 2)
    write_record(tmp_path, head, {"model": [[0, 1], [2, 3], [4, 5]]}, [make_merge_event(1, 7, into=0)])
    (path,) = tmp_path.glob("*.jsonl")
    data = path.read_bytes()
    ends = [i for i, byte in enumerate(data) if byte == ord("\n")]  # header, 2 rows, event, 2 rows, 2 rows, end
    cut = tmp_path / "cut.jsonl"
    for size in range(len(data)):
        cut.write_bytes(data[:size])
        if size < ends[0]:
            with pytest.raises(DataError, match="no header"):
                read(cut)
            continue
        record = read(cut)
        done = sum(size >= ends[i] for i in (2, 5, 7))  # the last row of each step, with or without its newline
        assert record.rows.model.tolist() == [[0, 1], [2, 3], [4, 5]][:done]
        assert len(record.events) == (done >= 2)
        assert record.status == ("complete" if size >= ends[8] else "unfinished")


@pytest.mark.parametrize(
    ("line", "change", "why"),
    [
        (1, {"schema": 3}, "schema must be 1 or 2, got 3"),
        (1, {"schema": 2}, "n_steps must be a number in schema 1, and null in schema 2"),
        (1, {"n_steps": None}, "n_steps must be a number in schema 1, and null in schema 2"),
        (2, {"tested": None}, "tested must be a number"),
        (1, {"seed": None}, "seed must be a whole number, got None"),
        (1, {"clients": ["a"]}, "clients must be 2 names"),
        (1, {"concepts": [[0, 0]]}, "concepts must be 3 rows of 2 clients"),
        (1, {"started": "yesterday"}, "yesterday"),
        (1, {"local": {}}, "rounds"),
        (1, {"same": {"D": 1}}, "same must map concept ids"),
        (1, {"same": {"1": 3}}, "same must map concept ids to lower ones"),
        (1, {"same": {"9" * 5000: 0}}, "same must map concept ids"),  # more digits than Python reads
        (1, {"local": {"rounds": 10**400}}, "rounds"),  # more than a float holds
        (1, {"n_steps": 2**62, "concepts": [[0, 0]]}, "concepts must be"),  # more than memory holds
        (1, {"settings": {"delta": float("nan")}}, "settings must contain finite numbers"),
        (1, {"started": "0001-01-01"}, "started: it must be a time since 1970"),  # no timestamp
        (1, {"kind": "row"}, "missing|required"),
        (2, {"accuracy": 1.01}, "accuracy.*got 1.01"),
        (2, {"accuracy": "0.5"}, "accuracy.*got '0.5'"),
        (2, {"model": True}, "model.*got True"),
        (2, {"drift": 1}, "drift.*got 1"),
        (2, {"n_models": -1}, "n_models.*got -1"),
        (2, {"kind": "raw"}, "not a line of a record"),
        (3, {"c": 0}, "expected time 0, client 1 .* got the row of time 0, client 0"),
        (4, {"event": "died"}, "event.*got 'died'"),
        (4, {"event": "merged"}, "must contain into"),
        (4, {"event": "merged", "cause": {"into": 2**63, "distance": 0.1}}, "must contain into"),
        (4, {"event": "merged", "cause": {"into": -1, "distance": 0.1}}, "must contain into"),
        (4, {"event": "merged", "cause": {"into": 0, "distance": float("inf")}}, "cause must contain finite numbers"),
        (4, {"event": "decided", "cause": {"reason": "stays"}}, "must name its clients"),
        (4, {"event": "decided", "cause": {"clients": ["a"], "reason": "stays"}}, "must name its clients"),
        (4, {"event": "decided", "cause": {"clients": [0], "z": 2.5}}, "and a reason"),
        (4, {"t": 0}, "expected time 1, client 0"),
        (5, {"t": 2}, "expected time 1, client 0 .* got the row of time 2, client 0"),
        (7, {"status": "done"}, "status.*got 'done'"),
        (7, {"seconds": -1}, "seconds.*got -1"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: int, change: dict[str, Any], why: str) -> None:
    lines = good_lines()
    lines[line - 1] |= change
    path = write_lines(tmp_path / "a.jsonl", lines)
    with pytest.raises(DataError, match=rf"a\.jsonl, line {line}: .*({why})") as caught:
        read(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", sorted(set(good_lines()[1]) - {"kind"}))
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    lines = good_lines()
    del lines[1][key]
    with pytest.raises(DataError, match=rf"line 2: {key} is missing"):
        read(write_lines(tmp_path / "a.jsonl", lines))


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (lambda lines: lines.insert(2, '{"kind": "row", "t":'), "line 3: .*JSON"),
        (lambda lines: lines.insert(2, ""), "line 3: .*JSON"),
        (lambda lines: lines.insert(2, "[" * 100_000), "line 3: .*JSON"),
        (lambda lines: lines.insert(2, "5"), "line 3: "),
        (lambda lines: lines.insert(2, lines[0]), "line 3: a record has one header"),
        (lambda lines: lines.append(lines[-1]), "line 8: nothing may follow the end"),
        (lambda lines: lines.insert(6, lines[5] | {"t": 2, "c": 0}), "line 7: .* of 2 time steps"),
        (lambda lines: lines.insert(5, lines[3]), "line 6: expected time 1, client 1 .* got the event of time 1"),
        (lambda lines: lines.pop(5), "line 6: complete means 2 time steps, got 1"),
        (lambda lines: lines.pop(0), "line 1: a record starts with its header, got 'row'"),
        (lambda lines: lines.clear(), "no header"),
    ],
)
def test_a_wrong_order_is_named(tmp_path: Path, edit: Any, why: str) -> None:
    lines = good_lines()
    edit(lines)
    with pytest.raises(DataError, match=why):
        read(write_lines(tmp_path / "a.jsonl", lines))


def test_bytes_that_are_no_text_are_an_error(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", good_lines())
    path.write_bytes(path.read_bytes().replace(b'"tested"', b'"\xff\xfe"', 1))
    with pytest.raises(DataError, match="line 2"):
        read(path)


def test_unknown_keys_are_ignored(tmp_path: Path) -> None:
    lines = good_lines()
    lines[1]["remark"] = "from a later version"
    assert read(write_lines(tmp_path / "a.jsonl", lines)).status == "complete"


@pytest.mark.parametrize(
    ("error", "status"),
    [(KeyboardInterrupt(), "interrupted"), (GeneratorExit(), "interrupted"), (RuntimeError(), "failed")],
)
def test_an_error_ends_the_record(tmp_path: Path, error: BaseException, status: str) -> None:
    head = make_header()
    writer = RecordWriter(tmp_path, head)

    def one_step_and_an_error() -> None:
        with writer:
            writer.write_step(make_rows(head, 0))
            raise error

    with pytest.raises(type(error)):
        one_step_and_an_error()
    record = read(writer.path)
    assert (record.status, record.rows.steps) == (status, 1)
    assert not writer.part_path.exists()


def test_while_it_runs_there_is_only_a_part(tmp_path: Path) -> None:
    head = make_header()
    writer = RecordWriter(tmp_path / "new" / "folder", head)
    writer.write_step(make_rows(head, 0))
    assert not writer.path.exists()
    (running,) = read_all(tmp_path)
    assert (running.status, running.rows.steps) == ("unfinished", 1)
    writer.write_step(make_rows(head, 1))
    writer.close("complete", 2.5)
    writer.close("failed", 3.0)  # closed is closed
    assert json.loads(writer.path.read_text().splitlines()[-1]) == {"kind": "end", "status": "complete", "seconds": 2.5}


def test_less_never_replaces_a_complete_record(tmp_path: Path) -> None:
    head = make_header()
    write_record(tmp_path, head, {"model": [[1, 1], [1, 1]]})
    assert write_record(tmp_path, head, {"model": [[2, 2], [2, 2]]}, steps=1).status == "complete"
    (kept,) = read_all(tmp_path)
    assert kept.rows.model[0, 0] == 1
    assert len(list(tmp_path.glob("*.part"))) == 1, "what was done is left in the part"
    write_record(tmp_path, head, {"model": [[3, 3], [3, 3]]})
    (replaced,) = read_all(tmp_path)
    assert replaced.rows.model[0, 0] == 3
    assert not list(tmp_path.glob("*.part"))


def test_an_interrupted_record_is_replaced(tmp_path: Path) -> None:
    assert write_record(tmp_path, make_header(), {"model": [[1, 1]]}, steps=1).rows.model[0, 0] == 1
    assert write_record(tmp_path, make_header(), {"model": [[2, 2]]}, steps=1).rows.model[0, 0] == 2


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"t": [1, 1]}, "expected time 0"),
        ({"c": [1, 0]}, "expected time 0, client 0"),
        ({"accuracy": [0.5, 1.5]}, "accuracy"),
    ],
)
def test_the_writer_refuses_what_cannot_be_read(tmp_path: Path, wrong: dict[str, Any], why: str) -> None:
    head = make_header()
    with RecordWriter(tmp_path, head) as writer:
        size = writer.part_path.stat().st_size
        with pytest.raises(DataError, match=why):
            writer.write_step(make_rows(head, 0, **wrong))
        with pytest.raises(DataError, match="2 rows, got 1"):
            writer.write_step(make_rows(head, 0)[:1])
        assert writer.part_path.stat().st_size == size
    assert read(writer.path).status == "interrupted"


class FullDisk:
    """A file that takes half of the first write and no more."""

    def __init__(self, file: Any) -> None:
        self.file, self.full = file, False

    def write(self, data: bytes) -> int:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.full = True
        return int(self.file.write(data[: len(data) // 2]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> Any:
        return self.file.__enter__()

    def __exit__(self, *error: object) -> Any:
        return self.file.__exit__(*error)


def test_a_full_disk_leaves_whole_steps(tmp_path: Path) -> None:
    head = make_header()
    writer = RecordWriter(tmp_path, head)
    writer.write_step(make_rows(head, 0))
    size = writer.part_path.stat().st_size
    writer._file = FullDisk(writer._file)  # type: ignore[assignment]
    with pytest.raises(DataError, match=r"^cannot write .*\.part: No space left on device$"):
        writer.write_step(make_rows(head, 1))
    with pytest.raises(DataError, match="No space left"):
        writer.close("failed", 1)
    assert writer.part_path.stat().st_size == size
    (record,) = read_all(tmp_path)
    assert (record.status, record.rows.steps) == ("unfinished", 1)


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"^cannot write records into .*: it is a file, not a folder$"):
        RecordWriter(tmp_path / "file", make_header())


def test_read_all_finds_everything_in_order(tmp_path: Path) -> None:
    for seed in (10, 2):
        write_record(tmp_path / "deep" / "er", make_header(seed=seed))
    write_record(tmp_path, make_header(algorithm="Eager", seed=5))
    (tmp_path / "notes.txt").write_text("not a record")
    found = [(r.header["algorithm"], r.header["seed"]) for r in read_all(tmp_path)]
    assert found == [("Eager", 5), ("FedDrift", 2), ("FedDrift", 10)]


def test_read_all_reports_missing_records(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no records \(\*\.jsonl\) below"):
        read_all(tmp_path)
    with pytest.raises(DataError, match="nowhere is neither a folder of records nor a record"):
        read_all(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"cannot read .*No such file"):
        read(tmp_path / "nothing.jsonl")


def test_a_second_run_into_the_same_record_is_refused_at_once(tmp_path: Path) -> None:
    first = RecordWriter(tmp_path, make_header())
    with pytest.raises(DataError, match="another run is writing"):
        RecordWriter(tmp_path, make_header())
    first.close("interrupted", 1.0)
    RecordWriter(tmp_path, make_header()).close("interrupted", 1.0)
    assert [r.status for r in read_all(tmp_path)] == ["interrupted"]


def test_times_need_a_name_each(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="times must be 3 names"):
        RecordWriter(tmp_path, make_header(2, 2, times=["a", "b"]))


def test_an_unfinished_federation_is_read_up_to_its_last_step(tmp_path: Path) -> None:
    record = write_federation_record(tmp_path)
    assert record.status == "unfinished" and record.runs_on and (record.rows.steps, record.tested) == (3, 2)
    assert record.header["clients"] == ["0", "1", "2"] and record.header["n_clients"] == 3
    assert record.header["times"] == ["day 0", "day 1", "day 2"]
    np.testing.assert_array_equal(record.rows.accuracy, [[0.5, np.nan, np.nan], [0.75, 0.8, np.nan], [np.nan] * 3])
    assert record.rows.tested.tolist() == [[10, 0, 0], [10, 10, 0], [0, 0, 0]]  # of two tests of a time the last
    assert record.rows.model.tolist() == [[0, 0, 0], [0, 1, 0], [0, 1, 1]]
    assert record.rows.received.tolist() == [[20, 20, 0], [20, 20, 0], [20, 20, 20]]
    assert [line["asked"] for line in record.exchanges] == ["hello", "train"]


def federation_lines(tmp_path: Path) -> list[Any]:
    write_federation_record(tmp_path)
    (path,) = tmp_path.glob("*.part")
    return [json.loads(line) for line in path.read_text().splitlines()]


FIRST_TEST = 6


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (lambda lines: lines.insert(2, lines[2]), "line 4: expected time 0 to begin once, got the time of time 0"),
        (
            lambda lines: lines.insert(FIRST_TEST - 1, lines[FIRST_TEST]),
            "line 6: a line 'test' is not allowed between the rows",
        ),
        (lambda lines: lines.pop(FIRST_TEST), "time 0 must be tested before time 1"),
        (lambda lines: lines[FIRST_TEST].update(t=1), "expected a test of time 0, got the test of time 1"),
        (lambda lines: lines[FIRST_TEST].update(tested=[10], accuracy=[0.5]), "expected a test of time 0"),
        (lambda lines: lines[FIRST_TEST].update(tested=[10]), "same length"),
        (lambda lines: lines[4].update(tested=5), "tested must be null in schema 2"),
        (lambda lines: lines[1].update(c=[0, 7]), "and 2 clients, got the exchange of time 0"),
        (lambda lines: lines[1].update(sent=[]), "same length"),
        (lambda lines: lines[1].update(at="noon"), "at: "),
        (lambda lines: [line.update(c=5) for line in lines if line["kind"] == "client"], "expected client 2"),
        (lambda lines: lines[0].update(times=["a"]), "not known beforehand"),
        (lambda lines: lines[0].update(schema=1, n_steps=3), "a line 'exchange' is not allowed in schema 1"),
    ],
)
def test_a_wrong_line_of_a_federation_is_named(tmp_path: Path, edit: Any, why: str) -> None:
    lines = federation_lines(tmp_path)
    edit(lines)
    with pytest.raises(DataError, match=why):
        read(write_lines(tmp_path / "a.jsonl", lines))


def test_a_federation_continues_after_any_cut(tmp_path: Path) -> None:
    """Whatever was torn off its end, the whole time steps and all lines before the next one stay."""
    whole = "".join(json.dumps(line) + "\n" for line in federation_lines(tmp_path)).encode()
    (part,) = tmp_path.glob("*.part")
    for size in range(whole.index(b"\n") + 1, len(whole) + 1, 7):
        part.write_bytes(whole[: whole.rindex(b"\n", 0, size) + 1])
        before = read(part)
        part.write_bytes(whole[:size])
        writer = RecordWriter(tmp_path, make_header(None, 3), n_done=before.rows.steps, name="fed")
        after = read(part)
        assert (after.rows.steps, after.tested) == (before.rows.steps, before.tested)
        assert len(after.exchanges) == len(before.exchanges) and after.header == before.header
        assert whole.startswith(part.read_bytes()) and part.read_bytes().endswith(b"\n")
        writer._file.close()
    part.write_bytes(whole)
    with pytest.raises(DataError, match="cannot continue after 4 time steps: .* has fewer"):
        RecordWriter(tmp_path, make_header(None, 3), n_done=4, name="fed")
    assert read(part).rows.steps == 3  # and nothing is lost by that


def test_a_client_that_did_not_join_after_all_is_cut_off(tmp_path: Path) -> None:
    write_federation_record(tmp_path)
    RecordWriter(tmp_path, make_header(None, 3, clients=["0", "1", "other"]), n_done=2, name="fed")._file.close()
    record = read(tmp_path / "fed.jsonl.part")
    assert record.header["clients"] == ["0", "1"] and record.tested == 2 and len(record.exchanges) == 2
    assert record.rows.tested.tolist() == [[10, 0], [10, 0]]  # the second test came behind


def test_of_each_client_the_last_test_on_any_examples_counts(tmp_path: Path) -> None:
    """A server that was started again when some had left tests only who is there."""
    head = make_header(None, 2)
    with RecordWriter(tmp_path, head, name="fed") as writer:
        writer.write_step(make_rows(head, 0, accuracy=[None] * 2, tested=[None] * 2))
        writer.write_line("test", t=0, accuracy=[0.5, 0.25], tested=[10, 20])
        writer.write_line("test", t=0, accuracy=[0.75, None], tested=[12, 0])
    record = read(writer.path)
    assert record.rows.accuracy.tolist() == [[0.75, 0.25]] and record.rows.tested.tolist() == [[12, 20]]


def test_times_without_a_name_shift_no_other(tmp_path: Path) -> None:
    head = make_header(None, 1)
    with RecordWriter(tmp_path, head, name="fed") as writer:
        for t in range(2):
            if t == 1:
                writer.write_line("time", t=1, name="the second")
            writer.write_step(make_rows(head, t, accuracy=[None], tested=[None]))
            writer.write_line("test", t=t, accuracy=[0.5], tested=[10])
    assert read(writer.path).header["times"] == ["", "the second"]


def test_a_complete_record_stays_until_another_is_complete(tmp_path: Path) -> None:
    head = make_header(3, 2)
    write_record(tmp_path, head)

    def fails() -> None:
        with RecordWriter(tmp_path, head, n_done=2):
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert read_all(tmp_path)[0].status == "complete"


def test_readers_are_no_hindrance(tmp_path: Path) -> None:
    """Who only asks whether a record is being written does not keep a run from writing it."""
    head = make_header(1, 1)
    path = tmp_path / f"{build_record_name(head)}.jsonl"
    asked = [True]

    def ask() -> None:
        while asked[0]:
            locks.is_being_written(path)

    reader = threading.Thread(target=ask)
    reader.start()
    try:
        for _ in range(300):
            with RecordWriter(tmp_path, head) as writer:
                writer.write_step(make_rows(head, 0))
            found = read_latest(path)
            assert found is not None and found.status == "complete"
    finally:
        asked[0] = False
        reader.join()


def test_a_closed_record_becomes_the_part_again(tmp_path: Path) -> None:
    """So that whoever reads it meanwhile sees how the run goes on."""
    head = make_header(3, 2)
    write_record(tmp_path, head, steps=1)
    with RecordWriter(tmp_path, head, n_done=1) as writer:
        assert not writer.path.exists()
        writer.write_step(make_rows(head, 1))
        assert read_all(tmp_path)[0].rows.steps == 2
        writer.write_step(make_rows(head, 2))
    assert read(writer.path).status == "complete" and not writer.part_path.exists()


def test_the_docs_name_every_field_of_a_line() -> None:
    page = (Path(__file__).parents[3] / "docs" / "compare.md").read_text().partition("### Fields of a record")[2]
    told = dict(re.findall(r"^\| `(\w+)`[^|]*\| (.*) \|$", page, flags=re.MULTILINE))
    for line in (schema.HeaderLine, schema.RowLine, schema.EventLine, schema.EndLine):
        kind, *names = (field.name for field in fields(line))
        text = told[get_args(get_type_hints(line)[kind])[0]]
        assert not [name for name in names if f"`{name}`" not in text], line
