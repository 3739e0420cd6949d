"""The stream of a folder with a file per client and time step."""

from __future__ import annotations

import logging
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from feddrift.data import Stream
from feddrift.errors import ConfigError, DataError
from feddrift.streams import stream
from feddrift.types import Local

ROWS = "a,b,label\n1,2,0\n3,4,1\n"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


def save(root: Path, name: str, **arrays: Any) -> Path:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    np.savez(root / name, **arrays)
    return root


def load(root: Path, **options: Any) -> Stream:
    return stream(f"folder:{root}", **options)


def cells(s: Stream) -> list[tuple[list[list[float]], list[int]]]:
    return [(s.cell(t, c)[0].tolist(), s.cell(t, c)[1].tolist()) for t, c in np.ndindex(s.counts.shape)]


def test_a_small_folder(tmp_path: Path) -> None:
    write(tmp_path / "mine", {
        "client_10/step_3.csv": "b,label,a\n20,1,10\n",  # the same columns in another order
        "client_2/step_3.csv": ROWS,
        "client_2/step_007.csv": "a,b,label\n5,6,1\n\n-7,8.5,0\n9,1e1,1\n",
        "client_2/.hidden": "",
        "README": "",
    })  # fmt: skip
    s = load(tmp_path / "mine")
    assert (s.name, s.family, s.local, s.clients) == ("folder:mine", "table", Local(), ("2", "10"))
    assert s.counts.tolist() == [[2, 1], [3, 0]] and s.times == ("step_3", "step_7")
    assert cells(s) == [
        ([[1, 2], [3, 4]], [0, 1]),
        ([[10, 20]], [1]),
        ([[5, 6], [-7, 8.5], [9, 10]], [1, 0, 1]),
        ([], []),
    ]
    assert s.concepts is None
    assert s.n_classes == 2
    assert s.x.dtype == np.float32
    assert s.y.dtype == np.int32


def test_header_alone_is_a_cell_without_rows(tmp_path: Path) -> None:
    write(tmp_path, {"client_a/step_0.csv": "a,b,label\n", "client_a/step_1.csv": ROWS})
    assert load(tmp_path).counts.tolist() == [[0], [2]]


def test_clients_are_in_natural_order(tmp_path: Path) -> None:
    names = ("north10", "north9", "2", "10", "b", "01", "1")
    write(tmp_path, {f"client_{name}/step_{t}.csv": ROWS for name in names for t in (0, 1)})
    assert load(tmp_path).clients == ("01", "1", "2", "10", "b", "north9", "north10")


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ("3 7 3 5", [0, 2, 0, 1]),
        ("-1 1 1 -1", [0, 1, 1, 0]),
        ("10 9 2.0 2", [2, 1, 0, 0]),  # as numbers, not as text
        ("dog cat dog emu", [1, 0, 1, 2]),
        ("1_2 12_ x 1_2", [1, 0, 2, 1]),  # words, though Python would read a number
    ],
)
def test_labels_become_classes_in_order(tmp_path: Path, labels: str, expected: list[int]) -> None:
    one, two, three, four = labels.split()
    write(tmp_path, {
        "client_a/step_0.csv": f"a,label\n0,{one}\n0, {two} \n",
        "client_a/step_1.csv": f"a,label\n0,{three}\n0,{four}\n",
    })  # fmt: skip
    s = load(tmp_path)
    assert s.y.tolist() == expected
    assert s.n_classes == max(expected) + 1


def test_classes_file_sets_order_and_number(tmp_path: Path) -> None:
    write(tmp_path, {
        "classes.txt": "emu\ndog\ncat\n\n",
        "client_a/step_0.csv": "a,label\n0,cat\n",
        "client_a/step_1.csv": "a,label\n0,dog\n",
    })  # fmt: skip
    s = load(tmp_path)
    assert (s.y.tolist(), s.n_classes) == ([2, 1], 3)


def test_label_column_by_another_name(tmp_path: Path) -> None:
    write(tmp_path, {f"client_a/step_{t}.csv": "target,label\n0,2\n1,4\n" for t in (0, 1)})
    s = load(tmp_path, label="target")
    assert cells(s)[0] == ([[2], [4]], [0, 1])


@pytest.mark.parametrize("y", [np.array([4, 9]), np.array([4.0, 9.0]), np.array(["p", "q"]), np.array([False, True])])
def test_npz(tmp_path: Path, y: Any) -> None:
    images = np.arange(8, dtype=np.uint8).reshape(2, 2, 2)
    save(tmp_path, "client_a/step_0.npz", x=images, y=y)
    save(tmp_path, "client_a/step_1.npz", x=images[:0], y=y[:0])
    s = load(tmp_path)
    assert s.counts.tolist() == [[2], [0]]
    assert s.x.tolist() == images.tolist()
    assert s.y.tolist() == [0, 1]


finite = st.floats(-100, 100, width=32)
table = st.lists(st.tuples(finite, finite, st.sampled_from([3, 5, 8])), max_size=5)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.dictionaries(st.tuples(st.integers(0, 3), st.integers(0, 12)), table, min_size=1), flip=st.booleans())
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, data: dict[tuple[int, int], Any], flip: bool
) -> None:
    data = {**data, (0, 0): [(1.0, 2.0, 3)], (0, 1): [(0.5, 0.25, 5), (0.0, 0.0, 8)]}
    root = tmp_path_factory.mktemp("folder")
    for (c, t), rows in data.items():
        header, order = ("b,label,a", (1, 2, 0)) if flip and c else ("a,b,label", (0, 1, 2))
        lines = [",".join(repr(row[i]) for i in order) for row in rows]
        write(root, {f"client_{c}/step_{t}.csv": "\n".join([header, *lines]) + "\n"})
    s = load(root)
    clients, times = sorted({c for c, _ in data}), sorted({t for _, t in data})
    for (i, t), (j, c) in ((a, b) for a in enumerate(times) for b in enumerate(clients)):
        rows = data.get((c, t), [])
        x, y = s.cell(i, j)
        assert x.tolist() == [[row[0], row[1]] for row in rows]
        assert y.tolist() == [[3, 5, 8].index(row[2]) for row in rows]


def test_badly_scaled_features_warn_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, {f"client_a/step_{t}.csv": "a,label\n-1013,0\n1,1\n" for t in (0, 1)})
    with caplog.at_level(logging.WARNING, logger="feddrift"):
        load(tmp_path)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "features reach 1013; scale them" in caplog.text


def test_well_scaled_features_do_not_warn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, {f"client_a/step_{t}.csv": "a,label\n-100,0\n100,1\n" for t in (0, 1)})
    with caplog.at_level(logging.WARNING, logger="feddrift"):
        load(tmp_path)
    assert not caplog.records


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ("", "step_1.csv is empty, expected a header line with a column 'label'"),
        ("a,b,target\n1,2,0\n", "step_1.csv: no label column 'label' among .*target.*choose one with --label"),
        ("a,label\n1,0\n", "step_1.csv: expected one column 'b', got 0"),
        ("a,b,c,label\n1,2,3,0\n", "step_1.csv: column 'c' is not in .*step_0.csv"),
        ("a,b,b,label\n1,2,3,0\n", "step_1.csv: expected one column 'b', got 2"),
        ("a,b,label\n1,2\n", "step_1.csv, line 2: expected 3 values as in the header, got 2"),
        ("a,b,label\n1,2,0\n1,,0\n", "step_1.csv, line 3, column 'b': expected a number, got ''"),
        ("a,b,label\n1,nan,0\n", "step_1.csv, line 2, column 'b': expected a number, got 'nan'"),
        ("b,a,label\n1,cold,0\n", "step_1.csv, line 2, column 'a': expected a number, got 'cold'"),
        ("a,b,label\n1,1e39,0\n", "step_1.csv, line 2, column 'b': expected a finite number below 1e38, got '1e39'"),
        ("a,b,label\n1,1_0,0\n", "step_1.csv, line 2, column 'b': expected a number, got '1_0'"),
        (
            "a,b,label\n1,2,0\n\n1,2,cat\n",
            "step_1.csv, line 4: label 'cat' is a word, but other labels are whole numbers",
        ),
        ("a,b,label\n1,2, \n", "step_1.csv, line 2: the label is empty"),
        ("a,b,label\n1,2,NaN\n", "step_1.csv, line 2: the label is empty"),
        ("a,b,label\n1,2,0.5\n", "step_1.csv, line 2: labels are whole numbers or words, got 0.5"),
        (f"a,b,label\n1,2,{'9' * 5000}\n", "step_1.csv, line 2: a label that is a number has less than 20 digits"),
        ('a,b,label\n1,2,"0\n1,2,1\n', "step_1.csv cannot be read: unexpected end of data"),  # was one long label
        ("a,b,label\n1,2,cat\0\n", "step_1.csv, line 2: a label is text without NUL bytes"),
    ],
)
def test_wrong_csv(tmp_path: Path, second: str, message: str) -> None:
    write(tmp_path, {"client_a/step_0.csv": ROWS, "client_a/step_1.csv": second})
    with pytest.raises(DataError, match=message):
        load(tmp_path)


def test_one_class_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"client_a/step_0.csv": "a,label\n1,cat\n", "client_a/step_1.csv": "a,label\n1,cat\n"})
    with pytest.raises(DataError, match="every row has the label 'cat', and at least 2 classes are needed"):
        load(tmp_path)


def test_a_number_among_words(tmp_path: Path) -> None:
    write(tmp_path, {"client_a/step_0.csv": "a,label\n1,cat\n", "client_a/step_1.csv": "a,label\n1,cat\n1,7\n"})
    with pytest.raises(DataError, match=r"step_1.csv, line 3: label '7' is a whole number, but other labels are words"):
        load(tmp_path)


def test_the_rarer_kind_of_label_is_the_odd_one(tmp_path: Path) -> None:
    write(tmp_path, {"client_a/step_0.csv": "a,label\n1,N/A\n1,3\n1,4\n", "client_a/step_1.csv": "a,label\n1,3\n"})
    with pytest.raises(DataError, match=r"step_0.csv, line 2: label 'N/A' is a word"):
        load(tmp_path)


def test_csv_without_features_or_text(tmp_path: Path) -> None:
    write(tmp_path, {"client_a/step_0.csv": "label\n1\n", "client_a/step_1.csv": "label\n1\n"})
    with pytest.raises(DataError, match=r"step_0.csv: expected named feature columns beside 'label'"):
        load(tmp_path)
    write(tmp_path, {"client_a/step_0.csv": ",a,label\n0,2.5,1\n"})  # an index that its writer did not name
    with pytest.raises(DataError, match=r"step_0.csv: expected named feature columns beside 'label'"):
        load(tmp_path)
    (tmp_path / "client_a" / "step_0.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match=r"step_0.csv cannot be read"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        ("cat\ndog\n", "step_0.csv, line 3: unknown label 'emu', classes.txt has cat, dog"),
        ("cat\nemu\ncat\n", "classes.txt: 3 lines name only 2 distinct classes"),
        ("1\n1.0\n", "classes.txt: 2 lines name only 1 distinct classes"),
        ("cat\n\nemu\n", "classes.txt, line 2: the label is empty"),
        ("cat\n4\n", "classes.txt, line 2: label '4' is a whole number, but other labels are words"),
        ("0\n1\n", "step_0.csv, line 2: unknown label 'cat', classes.txt has 0, 1"),
    ],
)
def test_wrong_classes(tmp_path: Path, classes: str, message: str) -> None:
    rows = "a,label\n1,cat\n1,emu\n"
    write(tmp_path, {"classes.txt": classes, "client_a/step_0.csv": rows, "client_a/step_1.csv": rows})
    with pytest.raises(DataError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "has no clients"),
        (["client_a/step_0.csv"], "has 1 time steps, but at least 2"),
        (["client_a/step_0.csv", "client_b/step_0.csv"], "has 1 time steps, but at least 2"),
        (["client_a/step_0.csv", "client_a/step_x.csv"], "step_x.csv: expected a name like step_<number>.csv"),
        (["client_a/step_0.csv", "client_a/notes.txt"], "notes.txt: expected a name like step_<number>.csv"),
        (["client_a/step_0.csv", "client_a/step_0.npz"], "step_0.csv and step_0.npz are the same time step"),
        (["client_a/step_1.csv", "client_a/step_01.csv"], "step_01.csv and step_1.csv are the same time step"),
        (["client_a/step_0.csv", "client_a/step_1.npz"], "step_1.npz: all files must be of one kind"),
    ],
)
def test_wrong_files(tmp_path: Path, files: list[str], message: str) -> None:
    write(tmp_path, dict.fromkeys(files, ROWS))
    with pytest.raises(DataError, match=message):
        load(tmp_path)


X = np.zeros((2, 3))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": X}, "two plain arrays x and y"),
        ({"x": X, "y": np.array([0, "a"], dtype=object)}, "without pickled objects"),
        ({"x": X[0], "y": [0, 0, 0]}, r"expected numbers x\[n, features\] and labels y\[n\], got"),
        ({"x": X, "y": [0, 1, 1]}, r"got float64 \(2, 3\) and int64 \(3,\)"),
        ({"x": X.astype(str), "y": [0, 1]}, "expected numbers"),
        ({"x": X[:, :2], "y": [0, 1]}, r"features of shape \(2,\), but .*step_0.npz has \(3,\)"),
        ({"x": [[0, 0, 0], [0, np.nan, 0]], "y": [0, 1]}, r"example 1: feature \[1\] is missing or infinite"),
        ({"x": X, "y": [0, np.nan]}, "example 1: the label is empty"),
        ({"x": X, "y": [0, 0.5]}, "example 1: labels are whole numbers or words, got 0.5"),
        ({"x": X, "y": ["0", "a"]}, "example 1: label 'a' is a word"),
        ({"x": X[:, :0], "y": [0, 1]}, r"expected at least one feature, got x of shape \(2, 0\)"),
    ],
)
def test_wrong_npz(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    save(tmp_path, "client_a/step_0.npz", x=X, y=[0, 1])
    save(tmp_path, "client_a/step_1.npz", **arrays)
    with pytest.raises(DataError, match=f"step_1.npz.*{message}"):
        load(tmp_path)


def test_npz_that_is_none(tmp_path: Path) -> None:
    save(tmp_path, "client_a/step_0.npz", x=X, y=[0, 1])
    broken = tmp_path / "client_a" / "step_1.npz"
    for content in (b"", b"text", (tmp_path / "client_a" / "step_0.npz").read_bytes()[:200]):
        broken.write_bytes(content)
        with pytest.raises(DataError, match=r"step_1.npz: expected an .npz of two plain arrays"):
            load(tmp_path)
    with broken.open("wb") as file:
        np.save(file, X)
    with pytest.raises(DataError, match=r"step_1.npz: expected an .npz of two plain arrays"):
        load(tmp_path)


@pytest.mark.parametrize("shape", ["(99999999999,)", "(9999999999999999999999, 2)", "(" * 500])
def test_npz_with_a_wrong_header(tmp_path: Path, shape: str) -> None:
    """More than memory or a number of 64 bits holds, or no header at all, which crashed in NumPy."""
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    save(tmp_path, "client_a/step_0.npz", x=X, y=[0, 1])
    with zipfile.ZipFile(tmp_path / "client_a" / "step_1.npz", "w") as archive:
        archive.writestr("x.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    with pytest.raises(DataError, match=r"step_1.npz: expected an .npz of two plain arrays"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["client_a/step_1.csv", "classes.txt"])
def test_a_pipe_is_not_waited_for(tmp_path: Path, name: str) -> None:
    write(tmp_path, {"client_a/step_0.csv": ROWS, "client_b/step_1.csv": ROWS})
    os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match=f"{name} is not a file"):
        load(tmp_path)


def test_a_client_that_is_not_a_folder_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, {f"client_a/step_{t}.csv": ROWS for t in (0, 1)})
    (tmp_path / "client_b").symlink_to("nowhere")
    with caplog.at_level(logging.WARNING, logger="feddrift"):
        assert load(tmp_path).clients == ("a",)
    assert "left out client_b" in caplog.text


@pytest.mark.parametrize("name", ["folder:", "folder:no/such/place"])
def test_no_such_folder(name: str) -> None:
    with pytest.raises(DataError, match=f"'{name[7:]}' is not a directory"):
        stream(name)


def test_no_examples(tmp_path: Path) -> None:
    write(tmp_path, {f"client_a/step_{t}.csv": "a,label\n" for t in (0, 1)})
    with pytest.raises(DataError, match="no examples at all"):
        load(tmp_path)


def test_a_folder_takes_no_pattern(tmp_path: Path) -> None:
    write(tmp_path, {f"client_a/step_{t}.csv": ROWS for t in (0, 1)})
    with pytest.raises(ConfigError, match="has its own drift: pattern must be left out, got 'Y'"):
        load(tmp_path, pattern="Y")


def test_labels_that_differ_in_case_only_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, {
        "client_a/step_0.csv": "x,label\n1,yes\n0,no\n",
        "client_b/step_0.csv": "x,label\n1,Yes\n0,no\n",
        "client_a/step_1.csv": "x,label\n1,yes\n",
    })  # fmt: skip
    assert load(tmp_path).classes == ("Yes", "no", "yes")
    assert "the labels ['Yes', 'yes'] differ in upper and lower case only" in caplog.text
