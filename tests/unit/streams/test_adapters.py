"""Streams from data sets of other libraries: the files of docs/adapters.md, if these libraries are installed."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import feddrift as fd
from tests.support.documentation import read_blocks


@pytest.fixture
def adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that imports a file of the page."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    files = {block.file: block.text for block in read_blocks("docs/adapters.md") if block.file}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    yield importlib.import_module
    for name in files:
        sys.modules.pop(name.removesuffix(".py"), None)


def test_streams_of_river_are_cut_into_time_steps(adapters: Any) -> None:
    pytest.importorskip("river", reason="river is not installed")
    from river.datasets import synth

    stream = adapters("river_streams").sea()
    assert stream.counts.tolist() == [[500] * 3] * 9 and stream.clients == ("a", "b", "c")
    first = [(list(x.values()), y) for x, y in synth.SEA(variant=2, seed=2).take(500)]
    x, y = stream.cell(0, 1)
    assert y.tolist() == [int(label) for _, label in first]
    expected = np.array([row for row, _ in first])
    assert all(np.corrcoef(x[:, k], expected[:, k])[0, 1] > 0.999999 for k in range(3))  # scaled, in their order
    share = np.array([[stream.cell(t, c)[1].mean() for c in range(3)] for t in range(9)])
    change = abs(share[4:].mean(axis=0) - share[:4].mean(axis=0))
    assert change[2] > 0.1 > 0.05 > max(change[:2])  # the concept of client c changes after four time steps
    named = fd.stream("river_streams:sea")
    np.testing.assert_array_equal(named.x, stream.x)


def test_a_bunch_of_scikit_learn_is_dealt_to_clients(adapters: Any) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    pytest.importorskip("pandas", reason="pandas is not installed")
    stream = adapters("sklearn_data").cancer()
    assert stream.classes == ("benign", "malignant") and stream.n_clients == 3 and len(stream.y) == 569
    benign = [
        float(np.mean(np.concatenate([stream.cell(t, 0)[1] for t in times]) == 0)) for times in ((0, 1, 2), (3, 4, 5))
    ]
    assert benign[0] > 0.5 > benign[1]  # the labels of client 0 are exchanged


def test_a_hugging_face_dataset_is_a_table(adapters: Any) -> None:
    datasets = pytest.importorskip("datasets", reason="Hugging Face datasets is not installed: pip install datasets")
    columns: dict[str, list[Any]] = {
        "store": ["b", "a", "a", "b", "a"],
        "week": [1, 1, 2, 2, 3],
        "price": [1.0, 2.0, 3.0, 4.0, 50.0],
        "sold": [0, 1, 1, 0, 1],
    }
    kinds = {
        name: datasets.Value(kind) for name, kind in (("store", "string"), ("week", "int64"), ("price", "float64"))
    }
    kinds["sold"] = datasets.ClassLabel(names=["no", "yes"])
    dataset = datasets.Dataset.from_dict(columns, features=datasets.Features(kinds))
    chosen = dataset.filter(lambda row: row["price"] < 10)  # its Arrow table still has all rows
    stream = adapters("hugging_face").make_stream(chosen, "store", "week", "sold")
    assert stream.counts.tolist() == [[1, 1], [1, 1]] and stream.clients == ("a", "b")
    assert stream.classes == ("no", "yes") and stream.y.tolist() == [1, 0, 1, 0]
    plain = dataset.remove_columns("sold").add_column("sold", [0, 1, 1, 0, 1])
    assert adapters("hugging_face").make_stream(plain, "store", "week", "sold").n_steps == 2


def test_partitions_of_flwr_datasets_are_clients(adapters: Any) -> None:
    datasets = pytest.importorskip("datasets", reason="Hugging Face datasets is not installed: pip install datasets")
    partitioners = pytest.importorskip("flwr_datasets.partitioner", reason="flwr-datasets is not installed")
    columns = {
        "week": [k % 3 for k in range(60)],
        "price": [float(k) for k in range(60)],
        "sold": [k % 2 for k in range(60)],
    }
    partitioner = partitioners.IidPartitioner(num_partitions=4)
    partitioner.dataset = datasets.Dataset.from_dict(columns)
    module = adapters("hugging_face")
    stream = module.make_stream(module.join_partitions(partitioner), "client", "week", "sold")
    assert stream.clients == ("0", "1", "2", "3") and stream.counts.sum(axis=0).tolist() == [15] * 4
