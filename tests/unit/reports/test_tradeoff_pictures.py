"""Pictures of patterns, thresholds and traffic, from records only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.collections import PathCollection
from matplotlib.colors import to_rgba

from feddrift.errors import ConfigError, DataError
from feddrift.reports import pictures
from feddrift.runs.record import Record
from tests.support.records import make_header, write_record

CONCEPTS = [[0, 0], [0, 1], [1, 1]]


def sweep(tmp_path: Path, **changes: Any) -> list[Record]:
    """FedDrift and Eager at three thresholds, two seeds; accuracy falls and traffic grows with delta."""
    records = []
    for name in ("FedDrift", "FedDrift-Eager"):
        for delta in (0.2, 0.05, 0.1):
            for seed in (0, 1):
                head = make_header(
                    2, 2, algorithm=name, settings={"delta": delta}, seed=seed, concepts=CONCEPTS, **changes
                )
                columns = {"accuracy": [[0.9 - delta] * 2] * 2, "models_sent": [[100 * (1 + delta)] * 2] * 2}
                records.append(write_record(tmp_path, head, columns))
    return records


def test_a_line_per_algorithm_over_the_thresholds(tmp_path: Path) -> None:
    fig = pictures.draw_threshold(sweep(tmp_path) + sweep(tmp_path, stream="sea-4"))
    assert [ax.get_title(loc="left") for ax in fig.axes] == ["sea-4", "sine-2"]
    for ax in fig.axes:
        assert len(ax.lines) == 2
        for line in ax.lines:
            assert np.asarray(line.get_xdata()).tolist() == [0.05, 0.1, 0.2]
            assert np.asarray(line.get_ydata()).tolist() == pytest.approx([85, 80, 70])


def test_other_settings_make_another_line(tmp_path: Path) -> None:
    fig = pictures.draw_threshold(sweep(tmp_path) + sweep(tmp_path, overrides={"rounds": 9}))
    assert len(fig.axes[0].lines) == 4
    names = [text.get_text() for text in fig.legends[0].get_texts()]
    assert "FedDrift (rounds=9)" in names


def test_a_point_per_run_against_traffic(tmp_path: Path) -> None:
    fig = pictures.draw_traffic(sweep(tmp_path))
    points = [c for c in fig.axes[0].collections if isinstance(c, PathCollection)]
    assert len(points) == 2
    offsets: Any = points[0].get_offsets()
    assert offsets[:, 0].tolist() == pytest.approx([10.5, 11, 12]) and offsets[:, 1].tolist() == pytest.approx(
        [85, 80, 70]
    )


def test_algorithms_without_a_delta_are_drawn_in_grey(tmp_path: Path) -> None:
    plain = write_record(tmp_path, make_header(2, 2, algorithm="Oblivious", settings={}, concepts=[[0, 0]] * 3))
    fig = pictures.draw_traffic([*sweep(tmp_path), plain])
    points = [c for c in fig.axes[0].collections if isinstance(c, PathCollection)]
    assert len(points) == 3 and to_rgba("#CCCCCC") in map(tuple, np.asarray(points[2].get_facecolor()))
    assert [ax.get_ylabel() for ax in pictures.draw_traffic([plain]).axes] == [
        "accuracy omitting drifts"
    ]  # no scale of delta


def test_each_pattern_once(tmp_path: Path) -> None:
    records = sweep(tmp_path) + sweep(tmp_path, stream="sea-4")
    assert len(pictures.draw_patterns(records).axes) == 1
    letters = [text.get_text() for text in pictures.draw_patterns(records).axes[0].texts]
    assert sorted(letters) == ["A", "A", "A", "B", "B", "B"]


def test_nothing_to_draw_is_one_sentence(tmp_path: Path) -> None:
    blind = [write_record(tmp_path, make_header(2, 2), {})]
    for draw in (pictures.draw_patterns, pictures.draw_threshold, pictures.draw_traffic):
        with pytest.raises(DataError, match="to draw"):
            draw(blind)
    odd_deltas: list[object] = ["high", None, [], 1e308, 10**400]  # of a record of another program
    for delta in odd_deltas:
        odd = write_record(tmp_path, make_header(1, 1, concepts=[[0], [0]], settings={"delta": delta}), {})
        with pytest.raises(DataError, match="nothing to draw"):
            pictures.draw_threshold([odd])
    many = [write_record(tmp_path, make_header(1, 1, seed=k, concepts=[[k], [0]]), {}) for k in range(13)]
    with pytest.raises(ConfigError, match="room for 1 to 12 patterns"):
        pictures.draw_patterns(many)


def test_fmows_classes_fill_the_picture() -> None:
    fig = pictures.draw_class_shares()
    assert [ax.get_title(loc="left") for ax in fig.axes] == ["all regions", "Africa"]
    assert all(len(ax.collections) == 10 for ax in fig.axes)
