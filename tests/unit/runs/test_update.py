"""Updates of a finished run by new time steps: equal to a run on all data, or refused with a reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import feddrift as fd
from feddrift._internal import checkpoint
from feddrift.errors import ConfigError, DataError
from feddrift.reports import page
from feddrift.runs import record
from feddrift.runs.recorded_run import find_unfinished_runs, load_stopped_run
from feddrift.runs.update import find_runs_to_update, prepare_update
from tests.support.cli import run_feddrift
from tests.support.kills import Killed

COLUMNS: dict[str, Any] = {"client": "shop", "time": "month", "label": "sold"}
BRIEF: dict[str, Any] = {"rounds": 2, "steps": 3, "batch": 16, "lr": 0.1}
SHOPS = ("oslo", "rome", "bonn")


def sales(months: range, shops: tuple[str, ...] = SHOPS, header: bool = True) -> str:
    """Fifteen customers of each shop in every month; those of Rome turn around in month 3."""
    lines = ["shop,month,age,income,sold"] if header else []
    for month in months:
        for shop in shops:
            draw = np.random.default_rng([month, *shop.encode()])
            for age, income in draw.normal(size=(15, 2)).round(3).tolist():
                sold = (age + income > 0) ^ (shop == "rome" and month >= 3)
                lines.append(f"{shop},{month},{age},{income},{'yes' if sold else 'no'}")
    return "\n".join(lines) + "\n"


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The sales of months 1 to 4, in a folder of its own, where commands are run."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "sales.csv"
    path.write_text(sales(range(1, 5)))
    return path


def record_sales(algorithm: str = "FedDrift", out: str = "runs", stream: str = "sales.csv", **more: Any) -> fd.Record:
    settings = {"delta": 0.1} if algorithm == "FedDrift" else {}
    return fd.record(stream, algorithm, out=out, settings=settings, **{**COLUMNS, **BRIEF, **more})


def append_months(path: Path, months: range = range(5, 7), shops: tuple[str, ...] = SHOPS) -> None:
    with path.open("a") as file:
        file.write(sales(months, shops, header=False))


def read_comparable_lines(out: str) -> list[dict[str, Any]]:
    """The only record of a folder, without what a clock has written."""
    (path,) = Path(out).glob("*.jsonl*")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("started", "seconds")} for line in lines]


def read_newest_checkpoint(out: str) -> checkpoint.Checkpoint:
    """The newest checkpoint of the only run of a folder."""
    (state,) = Path(out).glob("*.state")
    newest = next(checkpoint.Folder(state).newest_first())
    assert isinstance(newest, checkpoint.Checkpoint)
    return newest


def assert_same(a: str, b: str) -> None:
    assert read_comparable_lines(a) == read_comparable_lines(b)
    assert read_newest_checkpoint(a)._tree == read_newest_checkpoint(b)._tree
    for name, array in read_newest_checkpoint(a)._arrays.items():
        np.testing.assert_array_equal(array, read_newest_checkpoint(b)._arrays[name])
    different = {"seconds", "every", "replaces"}
    ours, theirs = (
        {k: v for k, v in read_newest_checkpoint(out).about.items() if k not in different} for out in (a, b)
    )
    assert ours == theirs


@pytest.mark.parametrize(
    ("algorithm", "more"),
    [("FedDrift", {}), ("FineTuned", {}), ("FedDrift", {"checkpoint_every": 1, "balance": True}),
     ("KUE", {"dropout": 0.3}), ("AUE", {"participation": 0.5})],
)  # fmt: skip
def test_it_is_as_if_all_data_had_been_there(table: Path, algorithm: str, more: dict[str, Any]) -> None:
    before = record_sales(algorithm, **more)
    append_months(table)
    record_sales(algorithm, "whole", **more)
    (after,) = fd.update("runs")
    assert (before.rows.steps, after.rows.steps, after.status) == (3, 5, "complete")
    assert after.header["started"] == before.header["started"]
    assert_same("runs", "whole")


def test_only_new_time_steps_are_trained_and_another_file_may_have_them(table: Path) -> None:
    record_sales()
    table.with_name("longer.csv").write_text(sales(range(1, 8)))
    (state,) = find_runs_to_update(Path("runs"))
    assert [step.tau for step in prepare_update(state, "longer.csv")] == [3, 4, 5]
    record_sales(out="whole", stream="longer.csv")
    assert_same("runs", "whole")
    assert fd.record("longer.csv", "FedDrift", out="runs", resume=True, settings={"delta": 0.1}, **COLUMNS, **BRIEF)
    assert len(list(Path("runs").iterdir())) == 2


def test_later_rows_are_appended(table: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    record_sales()
    table.with_name("july.csv").write_text(sales(range(5, 7)))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    (after,) = fd.update("../runs", append="../july.csv")
    monkeypatch.chdir("..")
    assert after.header["stream"].startswith("sales.csv+") and after.rows.steps == 5
    assert table.read_text() == sales(range(1, 5))
    append_months(table)
    np.testing.assert_array_equal(after.rows.accuracy, record_sales(out="whole").rows.accuracy)
    assert fd.stream("sales.csv+july.csv", **COLUMNS).name == "table:sales.csv+july.csv"
    with pytest.raises(DataError, match=r"^july.csv is part of the run already: if it has grown, update without"):
        fd.update("runs", append="july.csv")
    Path("odd.csv").write_text("shop,month,age,sold\noslo,9,1,no\n")
    with pytest.raises(DataError, match=r"odd.csv must have the columns of sales.csv, got income in one only"):
        fd.update("runs", append="odd.csv")
    Path("late.csv").write_text(sales(range(7, 8)).replace("yes", "", 1))
    with pytest.raises(DataError, match=r"1 rows have no value in 'sold' \(1: line late.csv:\d+\)"):
        fd.update("runs", append="late.csv")


def test_the_same_refusal_of_many_runs_is_reported_once(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in range(3):
        record_sales(seed=seed)
    code, _, error = run_feddrift(capsys, "update", "runs", "--append", "sales.csv")
    assert code == 2 and error.count("sales.csv is part of the run already") == 1
    assert "the same error occurred in sales" in error and error.count("\n") == 2 and error.count("Error:") == 1


def test_files_are_meant_from_where_one_is_whatever_they_are_called(
    table: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "c++"
    folder.mkdir()
    (folder / "first.csv").write_text(sales(range(1, 5)))
    (folder / "july.txt").write_text(sales(range(5, 7)))
    (folder / "august.csv").write_text(sales(range(7, 8)))
    record_sales("Oblivious")
    monkeypatch.chdir(folder)
    (after,) = fd.update("../runs", "table:first.csv+july.txt")
    monkeypatch.chdir(tmp_path)
    record_sales("Oblivious", "others", "c++/first.csv")
    (other,) = fd.update("others", append="c++/july.txt")
    assert after.rows.steps == 5 and other.header["stream"] == "table:c++/first.csv+c++/july.txt"
    np.testing.assert_array_equal(after.rows.accuracy, other.rows.accuracy)
    (other,) = fd.update("others", append="table:c++/august.csv")
    assert other.rows.steps == 6
    with pytest.raises(DataError, match=r"^'c\+\+/none.csv' is not a file"):
        fd.stream("c++/none.csv", **COLUMNS)


def test_poisoned_clients_stay_those_when_others_join(table: Path) -> None:
    before = record_sales("Oblivious", poison="flip:0")
    append_months(table, shops=("aarhus", *SHOPS))  # which takes the first place in the file's own order
    (after,) = fd.update("runs")
    np.testing.assert_array_equal(after.rows.accuracy[:3, :3], before.rows.accuracy)
    assert after.rows.accuracy[-1, 3] > 0.5 > after.rows.accuracy[-1, 0]  # bonn still lies, and aarhus does not


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the dead close no files
@pytest.mark.parametrize("every", [0, 1])
def test_killed_before_any_change_of_the_disk_it_continues(
    table: Path, kill_before_change: Callable[[int], None], every: int
) -> None:
    longer = table.with_name("longer.csv")
    longer.write_text(sales(range(1, 7)))
    record_sales(out="whole", stream="longer.csv")
    n = 0
    while True:
        out = f"runs{n}"
        record_sales(out=out, checkpoint_every=every)
        finished = read_comparable_lines(out)
        kill_before_change(n)
        try:
            fd.update(out, "longer.csv")
        except Killed:
            kill_before_change(10**9)
        else:
            break
        old = [path for path in Path(out).glob("sales.csv_*.jsonl") if record.is_complete(path)]
        whole = [path for path in Path(out).glob("longer.csv_*.jsonl") if record.is_complete(path)]
        assert old or whole, "something is always complete"
        if old:
            assert len(old[0].read_text().splitlines()) == len(finished)
        for state in find_unfinished_runs(Path(out)) if n % 2 else ():
            if not list(state.glob("*.ckpt")):  # the update had not begun
                continue
            assert all(step.tau >= 3 for step in load_stopped_run(state))
        with suppress(DataError):  # nothing is new where it was killed at the very end, or has been resumed
            fd.update(out, "longer.csv")
        assert_same(out, "whole")
        assert len(list(Path(out).iterdir())) == 2
        n += 1 if n < 15 else 3
    kill_before_change(10**9)
    assert n > 20


def test_a_stopped_update_continues_when_repeated_or_resumed(table: Path) -> None:
    for out in ("runs", "again"):
        record_sales(out=out)
    append_months(table)
    record_sales(out="whole")
    for out in ("runs", "again"):
        (state,) = find_runs_to_update(Path(out))
        steps = iter(prepare_update(state))
        assert next(steps).tau == 3
        steps.close()  # type: ignore[attr-defined]  # as Ctrl-C does
    (stopped,) = find_unfinished_runs(Path("runs"))
    assert [step.tau for step in load_stopped_run(stopped)] == [4]
    fd.update("again")
    for out in ("runs", "again"):
        assert_same(out, "whole")


@pytest.mark.parametrize("algorithm", ["FedDrift", "FineTuned", "Local", "IFCA"])
def test_clients_may_join(table: Path, algorithm: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = record_sales(algorithm)
    append_months(table, shops=("aarhus", *SHOPS))  # its name comes before all others
    (after,) = fd.update("runs")
    assert after.header["clients"] == ["bonn", "oslo", "rome", "aarhus"]
    np.testing.assert_array_equal(after.rows.accuracy[:3, :3], before.rows.accuracy)
    assert after.rows.received[:, 3].tolist() == [0, 0, 0, 0, 15] and after.rows.tested[:, 3].tolist() == [
        0,
        0,
        0,
        15,
        15,
    ]
    np.testing.assert_array_equal(after.rows.model[:3, :3], before.rows.model)
    page.write_page([after], Path("page.html"), "sales")
    assert run_feddrift(capsys, "report", "runs")[0] == 0
    fd.export("runs", "models")
    assert fd.load_models("models").predict("aarhus", np.zeros((1, 2))).shape == (1,)
    append_months(table, range(7, 8), ("aarhus", *SHOPS))
    (later,) = fd.update("runs")
    assert later.header["clients"] == after.header["clients"] and later.rows.steps == 6
    np.testing.assert_array_equal(later.rows.accuracy[:5], after.rows.accuracy)
    assert len(list(Path("runs").iterdir())) == 2


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (sales(range(1, 5)), r"nothing to update: sales.csv has the same 3 time steps \+ 1 to test"),
        (sales(range(1, 4)), r"sales.csv ends before the run does: it has 2 time steps \+ 1 to test, the run 3 \+ 1"),
        (sales(range(1, 7), SHOPS[:2]), "has no data of client bonn, which the run has"),
        (sales(range(1, 7)).replace("oslo,2,", "oslo,2,1", 1), r"the data of time 2 \(2\) differ from those"),
        (sales(range(1, 5)) + "oslo,4,1,1,no\noslo,5,1,1,no\n", r"the data of time 4 \(4\).*complete last time step"),
        (sales(range(1, 7)) + "oslo,2.5,1,1,no\n", "time 3 is 2.5, in the run it is 3: expected all of its data"),
        (sales(range(5, 7)), "time 1 is 5, in the run it is 1: .*append adds rows to a table"),
        (sales(range(1, 7)) + "oslo,7,1,1,maybe\n", "also has the classes maybe, the run was trained with no, yes"),
        (sales(range(1, 7)).replace("income", "wealth"), "also has the features wealth, the run was trained with age"),
        ("shop,month,age,income,sold\n", "expected rows below the names"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("version", ["", "0.2.0"])
def test_data_that_do_not_continue_the_run_are_refused(
    table: Path, content: str, sentence: str, version: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Older versions remember less of the data, so they tell less; what is there stays as it is."""
    record_sales()
    if version:
        forget_data_digests("runs")
        if "maybe" in content or "wealth" in content or "data of time" in sentence:
            sentence = "the data up to time 4 differ from those of the run|other features or classes|no new names"
    before = read_comparable_lines("runs")
    table.write_text(content)
    if version and "wealth" in content:  # the same numbers under another name: nobody can tell
        assert len(fd.update("runs")) == 1
        return
    with pytest.raises(DataError, match=sentence):
        fd.update("runs")
    code, _, error = run_feddrift(capsys, "update", "runs")
    assert code == 2 and error.count("Error:") == 1 and "Traceback" not in error
    assert read_comparable_lines("runs") == before and len(list(Path("runs").iterdir())) == 2


PRIVATE = """import numpy as np
import feddrift as fd
from feddrift.models import take

class Private:
    def init(self, fed):
        n = fed.n_clients
        return fd.State(take(fed.fresh(), [0] * n, range(n), owner=range(n)), w=np.zeros((0, n, n)), votes=np.eye(n))

    def step(self, state, fed):
        n = fed.n_clients
        models = take(state.models, range(n), range(n))
        w = np.tile(np.eye(n), (fed.tau + 1, 1, 1))
        return fd.State(fed.train(models, w), w, np.eye(n))
"""


def test_a_method_without_room_for_new_clients_gets_an_error(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (table.parent / "without_room.py").write_text(PRIVATE)
    record_sales("without_room:Private")
    append_months(table, shops=(*SHOPS, "kiel"))
    code, _, error = run_feddrift(capsys, "update", "runs")
    assert code == 2 and error.count("\n") == 1 and "Private.step at tau=3: IndexError" in error
    line = PRIVATE[: PRIVATE.index("take(state")].count("\n") + 1
    assert f"without_room.py, line {line}; raised in" in error


def forget_data_digests(out: str) -> None:
    """Make the newest checkpoint one of a version that remembers nothing of the data."""
    newest = read_newest_checkpoint(out)
    about = {k: v for k, v in newest.about.items() if k not in ("data", "replaces")}
    value = newest.decode({"W1": 0, "b1": 0, "W2": 0, "b2": 0})
    checkpoint.write(newest.path, about, value)


def test_a_run_of_an_older_version_is_updated_all_the_same(table: Path) -> None:
    record_sales()
    forget_data_digests("runs")
    append_months(table)
    record_sales(out="whole")
    fd.update("runs")
    assert_same("runs", "whole")


def test_runs_that_cannot_be_updated_are_reported(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fd.record("sine-2", "Oblivious", out="sine", rounds=1)
    with pytest.raises(DataError, match=r"sine-2 always has the same 10 time steps \+ 1 to test"):
        fd.update("sine")
    Path("empty").mkdir()
    with pytest.raises(DataError, match="no run below empty has checkpoints"):
        fd.update("empty")
    with pytest.raises(ConfigError, match="takes the folder of the records"):
        fd.update(None)  # type: ignore[arg-type]
    record_sales()
    with pytest.raises(ConfigError, match="another stream or a file to append, not both"):
        fd.update("runs", "a.csv", append="b.csv")
    (state,) = find_runs_to_update(Path("runs"))
    for file in state.glob("*.ckpt"):
        file.unlink()
    with pytest.raises(DataError, match="the checkpoint of its last time step is missing: run it again on all data"):
        fd.update("runs")
    record_sales(out="stopped", resume=True)
    (path,) = Path("stopped").glob("*.jsonl")
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-4]))
    code, _, error = run_feddrift(capsys, "update", "stopped")
    assert code == 2 and "is not finished: `feddrift resume" in error


def test_a_problem_of_one_run_does_not_stop_the_others(table: Path) -> None:
    record_sales("Oblivious", "runs/a")
    fd.record("sine-2", "Oblivious", out="runs/b", rounds=1, steps=1)
    record_sales("Oblivious", "runs/c")
    append_months(table)
    with pytest.raises(DataError, match="sine-2 always has the same 10 time steps"):
        fd.update("runs")
    assert {run.rows.steps for run in fd.read("runs") if run.header["stream"] == "sales.csv"} == {5}


def test_a_run_that_is_started_again_after_its_update_stays(table: Path) -> None:
    record_sales()
    append_months(table)
    fd.update("runs")
    table.write_text(sales(range(1, 5)))
    record_sales()
    append_months(table)
    with pytest.raises(DataError, match="is unchanged|nothing to update"):
        fd.update("runs")
    assert sorted(run.rows.steps for run in fd.read("runs")) == [3, 5]


def test_a_run_on_all_data_that_is_there_already_stays(table: Path) -> None:
    record_sales()
    append_months(table)
    record_sales()
    with pytest.raises(DataError, match="already has all data of sales.csv, so sales.csv_FedDrift_.* is unchanged"):
        fd.update(next(path for path in Path("runs").glob("*.jsonl") if record.read(path).rows.steps == 3))
    assert len(list(Path("runs").iterdir())) == 4


def test_a_setting_that_the_data_decide_must_stay(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record_sales()
    append_months(table)
    other = fd.algorithm("FedDrift", delta=0.2)
    monkeypatch.setattr("feddrift.algorithms.algorithm", lambda *_, **__: other)
    with pytest.raises(DataError, match="delta would be 0.2 now and was 0.1: run it again on all data"):
        fd.update("runs")


def test_folders_and_streams_of_ones_own_grow_too(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(t: int) -> None:
        draw = np.random.default_rng(t)
        for name in ("a", "b"):
            Path(f"data/client_{name}").mkdir(parents=True, exist_ok=True)
            rows = "".join(f"{x:.2f},{int(x > 0)}\n" for x in draw.normal(size=9))
            Path(f"data/client_{name}/step_{t}.csv").write_text("x,label\n" + rows)

    Path("growing.py").write_text(
        "import numpy as np\nimport feddrift as fd\nfrom pathlib import Path\n"
        "def make():\n    n = int(Path('length').read_text())\n"
        "    cells = [[(np.full((4, 1), t), [0, 1, 0, 1])] * 2 for t in range(n)]\n"
        "    return fd.Stream.from_arrays(cells)\n"
    )
    monkeypatch.syspath_prepend(str(table.parent))
    for n in (3, 5):
        Path("length").write_text(str(n))
        for t in range(n):
            write(t)
        for stream in ("folder:data", "growing:make"):
            out = stream.partition(":")[0]
            if n == 3:
                fd.record(stream, "Oblivious", out=out, **BRIEF)
            else:
                fd.record(stream, "Oblivious", out=f"{out}-whole", **BRIEF)
                fd.update(out)
                assert_same(out, f"{out}-whole")
