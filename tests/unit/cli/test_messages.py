"""Messages of the command line about wrong words, paths and values: one sentence, exit code 2, no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from feddrift.cli import _explain_wrong_words
from feddrift.errors import DataError
from tests.support.cli import QUICK_OPTIONS, run_feddrift
from tests.support.records import make_header, write_record


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--html", "."], "cannot write .: it is a folder, give the name of a file"),
        (["--html", "/"], "cannot write /: it is a folder, give the name of a file"),
        (["--html", ".."], "cannot write ..: it is a folder, give the name of a file, such as ../NAME"),
        (["--html", "runs"], "cannot write runs: it is a folder, give the name of a file, such as runs/NAME"),
        (["--html", "table.csv/x.html"], "cannot write below table.csv: it is a file, not a folder"),
        (["--html", ""], "--html is empty: give the path of a file or a folder"),
        (["--html="], "--html is empty: give the path of a file or a folder"),
    ],
)
def test_a_page_is_not_written_to_a_folder_or_below_a_file(
    words: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_record(tmp_path / "runs", make_header(3, 2))
    Path("table.csv").write_text("shop,day\n")
    before = sorted(tmp_path.rglob("*"))
    code, out, error = run_feddrift(capsys, "report", "runs", *words)
    assert code == 2 and error.startswith(f"Error: {sentence}") and error.count("\n") == 1
    assert "Traceback" not in out + error and sorted(tmp_path.rglob("*")) == before


def test_an_export_to_a_file_is_refused_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        run_feddrift(capsys, "run", "--stream", "sine-2", "--algorithm", "Oblivious", "--seeds", "0-1", *QUICK_OPTIONS)[
            0
        ]
        == 0
    )
    Path("table.csv").write_text("shop,day\n")
    code, _, error = run_feddrift(capsys, "export", "runs", "--out", "table.csv")
    assert code == 2 and error == "Error: cannot write below table.csv: it is a file, not a folder\n"
    assert Path("table.csv").read_text() == "shop,day\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["run", "sine-2"], "Missing option '--stream'. Did you mean --stream sine-2?"),
        (["run", "--algorithm", "Oblivious"], "Missing option '--stream'."),
        (["run", "--stream", "sine-2", "--out", ""], "--out is empty: give the path of a file or a folder"),
        (
            ["run", "--stream", "sine-2", "--seeds", "4-0"],
            "goes from the lower to the higher one, got '4-0': write 0-4",
        ),
        (["list", "algorithms"], "see `feddrift list --help`; `feddrift list` alone lists everything"),
        (["report", "runs", "--weigh", "row"], "Invalid value for '--weigh': 'row' is not one of 'clients', 'rows'"),
    ],
)
def test_wrong_words_are_explained(
    words: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, error = run_feddrift(capsys, *words)
    assert code == 2 and sentence in error and error.count("\n") == 1
    assert ("Did you mean" in error) == ("Did you mean" in sentence)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (["Oracle", "Oblivious"], "Oracle and Oblivious have no settings, got 'delta'"),
        (["Oracle", "Local", "Oblivious"], "Oracle, Local and Oblivious have no settings, got 'delta'"),
        (["Oblivious"], "Oblivious has no settings, got 'delta'"),
        (["Oblivious", "IFCA"], "unknown setting of Oblivious, IFCA 'delta' (one of: "),
    ],
)
def test_settings_of_methods_without_settings(
    names: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    methods = [word for name in names for word in ("--algorithm", name)]
    code, _, error = run_feddrift(capsys, "run", "--stream", "sine-2", *methods, "--set", "delta=0.1")
    assert code == 2 and error.startswith(f"Error: {sentence}")


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("Input should be a valid integer, unable to parse string as an integer", "must be a whole number"),
        ("Input should be a valid number, unable to parse string as a number", "must be a number"),
        ("Input should be greater than or equal to 0", "must be at least 0"),
        ("Value error, 'row' is not one of 'clients', 'rows'.", "'row' is not one of 'clients', 'rows'."),
    ],
)
def test_words_of_the_validation_library_are_replaced(message: str, expected: str) -> None:
    start = "Invalid value for '--x': "
    assert _explain_wrong_words(start + message, ["run"]) == start + expected


def test_an_update_that_fails_has_one_error_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_feddrift(capsys, "run", "--stream", "sine-2", "--algorithm", "Oblivious", "--seeds", "0-1", *QUICK_OPTIONS)
    for words in ([], ["--stream", "none.csv"], ["--append", "none.csv"]):
        code, _, error = run_feddrift(capsys, "update", "runs", *words)
        assert code == 2 and error.count("Error:") == 1 and error.count("\n") <= 2, error
        assert "the same error occurred in sine-2_Oblivious" in error or error.count("\n") == 1


def test_an_unexpected_error_of_a_run_has_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_feddrift(capsys, "run", "--stream", "sine-2", "--algorithm", "Oblivious", *QUICK_OPTIONS)

    def fail(*_: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("feddrift.cli.run.prepare_update", fail)
    code, _, error = run_feddrift(capsys, "update", "runs")
    assert code == 1 and "ZeroDivisionError: division by zero" in error
    monkeypatch.setattr("feddrift.cli.run.prepare_update", lambda *_: (_ for _ in ()).throw(DataError("odd table")))
    assert run_feddrift(capsys, "update", "runs")[0] == 2
