"""Pictures of clusters and accuracy, drawn from records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection, QuadMesh
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from feddrift.errors import ConfigError, DataError
from feddrift.reports import pictures
from feddrift.reports.pictures.style import PALE, STRONG
from feddrift.runs.record import Record
from tests.support.records import make_header, write_record

CONCEPTS = [[0, 0], [0, 1], [1, 1], [1, 1]]
MODELS = [[0, 0], [0, 3], [1, 12]]


def run(out: Path, seed: int = 0, columns: dict[str, Any] | None = None, **changes: Any) -> Record:
    head = make_header(3, 2, **{"concepts": CONCEPTS, "seed": seed, **changes})
    return write_record(out, head, columns or {"model": MODELS, "drift": np.array(MODELS) > 1})


def list_cell_texts(ax: Axes) -> dict[tuple[float, float], str]:
    return {text.get_position(): text.get_text() for text in ax.texts}


def legend(fig: Figure) -> list[str]:
    return [text.get_text() for found in fig.legends for text in found.get_texts()]


def colours(ax: Axes) -> Any:
    (mesh,) = (found for found in ax.collections if isinstance(found, QuadMesh))
    return mesh.get_array()


def polygons(ax: Axes, n: int = -1) -> list[Any]:
    found = [c for c in ax.collections if isinstance(c, PolyCollection) and not isinstance(c, QuadMesh)]
    return list(found[n].get_paths())


def title(ax: Axes) -> str:
    return ax.get_title(loc="left")


def test_a_cell_is_a_model_on_its_concept(tmp_path: Path) -> None:
    fig = pictures.draw_clusters([run(tmp_path)])
    (ax,) = fig.axes
    assert list_cell_texts(ax) == {(1, 0): "0", (2, 0): "0", (3, 0): "1", (1, 1): "0", (2, 1): "3", (3, 1): "12"}
    blue, green = to_rgb(PALE[0]), to_rgb(PALE[1])
    np.testing.assert_allclose(colours(ax), [[blue, blue, green], [blue, green, green]])  # [c, t]
    assert legend(fig) == ["Concept A", "Concept B", "drift alarm"]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["1", "2", "3"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["0", "1"]
    low, high = ax.get_ylim()
    assert low > high, "the first client is on top"


def test_alarms_are_marked_in_their_cells(tmp_path: Path) -> None:
    (ax,) = pictures.draw_clusters([run(tmp_path)]).axes
    cells = [tuple(path.vertices.mean(axis=0).round().astype(int).tolist()) for path in polygons(ax)]
    assert cells == [(2, 1), (3, 1)]


def test_the_title_names_the_run(tmp_path: Path) -> None:
    (ax,) = pictures.draw_clusters([run(tmp_path, seed=4)]).axes
    assert title(ax) == "sine-2 · FedDrift · seed 4\naccuracy 90.00 % omitting drifts, 90.00 % including"


def test_equal_concepts_are_named_as_such(tmp_path: Path) -> None:
    fig = pictures.draw_clusters([run(tmp_path, concepts=[[0, 1], [0, 3], [1, 1], [1, 1]], same={"3": 1})])
    assert legend(fig)[:3] == ["Concept A", "Concept B", "Concept D (= B)"]


def test_without_truth_the_colour_is_the_model(tmp_path: Path) -> None:
    fig = pictures.draw_clusters([run(tmp_path, concepts=None)])
    (ax,) = fig.axes
    found = colours(ax)
    np.testing.assert_allclose(found[0, 0], found[1, 0])
    assert len({tuple(cell) for cell in found.reshape(-1, 3)}) == 4, "models 0, 1, 3 and 12"
    assert legend(fig) == ["drift alarm"]
    assert title(ax).endswith("accuracy 90.00 %")


def test_an_interrupted_run_shows_what_it_has(tmp_path: Path) -> None:
    (ax,) = pictures.draw_clusters(
        [write_record(tmp_path, make_header(3, 2, concepts=CONCEPTS), {"model": MODELS}, steps=2)]
    ).axes
    assert sorted(list_cell_texts(ax)) == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert title(ax).endswith("interrupted after 2 of 3 time steps")
    assert ax.get_xlim() == (0.5, 3.5)


def test_forty_clients_still_have_numbers(tmp_path: Path) -> None:
    fig = pictures.draw_clusters(
        [write_record(tmp_path, make_header(10, 40, concepts=[[c % 4 for c in range(40)]] * 11))]
    )
    (ax,) = fig.axes
    assert len(ax.texts) == 400
    assert all(float(text.get_fontsize()) >= 5 for text in ax.texts)
    assert len(ax.get_yticks()) == 40


@pytest.mark.parametrize("truth", [True, False])
def test_small_cells_have_squares_for_numbers(tmp_path: Path, truth: bool) -> None:
    concepts = [[0] * 100, [1] * 100, [1] * 100] if truth else None
    models = np.arange(200).reshape(2, 100) % 10
    fig = pictures.draw_clusters([write_record(tmp_path, make_header(2, 100, concepts=concepts), {"model": models})])
    (ax,) = fig.axes
    assert not ax.texts
    assert len(polygons(ax, 0)) == 200
    assert legend(fig) == ["Concept A", "Concept B"] * truth + [f"model {i}" for i in range(8)] + ["other models"]
    assert len(ax.get_yticks()) < 100


def test_many_concepts_have_colours_of_their_own(tmp_path: Path) -> None:
    fig = pictures.draw_clusters([write_record(tmp_path, make_header(1, 30, concepts=[list(range(30))] * 2))])
    (ax,) = fig.axes
    assert len({tuple(cell) for cell in colours(ax).reshape(-1, 3)}) == 30
    assert legend(fig)[25:28] == ["Concept Z", "Concept 26", "Concept 27"]


def test_several_runs_have_a_panel_each(tmp_path: Path) -> None:
    records = [run(tmp_path, seed=k) for k in range(5)] + [run(tmp_path, settings={"delta": 0.2, "init": "warm"})]
    fig = pictures.draw_clusters(records)
    assert [title(ax).split("\n")[:2] for ax in fig.axes] == [
        *([f"sine-2 · FedDrift · seed {k}", "delta=0.1"] for k in range(5)),
        ["sine-2 · FedDrift · seed 0", "delta=0.2"],
    ]
    assert legend(fig) == ["Concept A", "Concept B", "drift alarm"]


def test_too_many_and_no_runs_are_errors(tmp_path: Path) -> None:
    record = run(tmp_path)
    assert len(pictures.draw_clusters([record] * 12).axes) == 12
    with pytest.raises(ConfigError, match="1 to 12 runs, got 13: choose fewer"):
        pictures.draw_clusters([record] * 13)
    with pytest.raises(DataError, match="no time steps to draw"):
        pictures.draw_clusters([write_record(tmp_path / "empty", make_header(), steps=0)])


def lines(ax: Axes) -> list[Line2D]:
    return list(ax.lines)


def points(line: Line2D) -> Any:
    return line.get_xydata()


def flat(*values: float | None) -> dict[str, Any]:
    return {"accuracy": [[value, value] for value in values]}


def test_accuracy_is_the_mean_over_clients_then_seeds(tmp_path: Path) -> None:
    columns = {"accuracy": [[0.5, 0.7], [0.8, None], [1.0, 1.0]]}
    fig = pictures.draw_accuracy([run(tmp_path, 0, columns), run(tmp_path, 1, flat(0.8, 0.8, 0.6))])
    (ax,) = fig.axes
    (line,) = lines(ax)
    np.testing.assert_allclose(points(line), [(1, 70), (2, 80), (3, 80)])
    (band,) = (path.vertices for path in polygons(ax))
    std = np.sqrt([200, 0, 800])  # of (60, 80), (80, 80), (100, 60)
    for t, mean, spread in zip([1, 2, 3], [70, 80, 80], std, strict=True):
        heights = band[band[:, 0] == t, 1]
        assert (heights.min(), heights.max()) == (pytest.approx(mean - spread), pytest.approx(mean + spread))
    assert legend(fig) == ["FedDrift"]
    assert title(ax) == "sine-2 (2 seeds)"


def test_one_seed_has_no_band_and_a_gap_without_test_data(tmp_path: Path) -> None:
    (ax,) = pictures.draw_accuracy([run(tmp_path, 0, flat(0.5, None, 0.7))]).axes
    np.testing.assert_allclose(points(lines(ax)[0]), [(1, 50), (2, np.nan), (3, 70)])
    assert not ax.collections
    assert title(ax) == "sine-2 (1 seed)"


def test_lines_are_named_by_what_differs(tmp_path: Path) -> None:
    records = [
        run(tmp_path, 0),
        run(tmp_path, 0, settings={"delta": 0.1, "init": "fresh"}),
        run(tmp_path, 0, algorithm="Oracle"),
        run(tmp_path, 0, algorithm="Oracle", stream="circle-2"),
        run(tmp_path, 1, algorithm="Oracle", stream="circle-2"),
    ]
    fig = pictures.draw_accuracy(records)
    assert [title(ax) for ax in fig.axes] == ["circle-2 (2 seeds)", "sine-2 (1 seed)"]
    assert legend(fig) == ["Oracle", "FedDrift (init=warm)", "FedDrift (init=fresh)"]
    circle, sine = fig.axes
    assert len(lines(sine)) == 3
    assert lines(circle)[0].get_color() == lines(sine)[0].get_color() == STRONG[7], "an algorithm keeps its colour"
    assert len({line.get_color() for line in lines(sine)}) == 3


def test_many_lines_are_distinguishable(tmp_path: Path) -> None:
    (ax,) = pictures.draw_accuracy([run(tmp_path, algorithm=f"A{k}") for k in range(22)]).axes
    assert len({(line.get_color(), line.get_linestyle()) for line in lines(ax)}) == 22


def test_the_axes_are_whole_times_and_percent(tmp_path: Path) -> None:
    fig = pictures.draw_accuracy([run(tmp_path, 0, flat(0.5, 0.6, 0.99)), run(tmp_path, 1, flat(0.9, 0.6, 1))])
    (ax,) = fig.axes
    fig.canvas.draw()
    assert all(tick == round(tick) for tick in ax.get_xticks())
    assert all(label.get_text().endswith(" %") for label in ax.get_yticklabels())
    assert ax.get_ylim()[1] <= 101


def test_unfinished_runs_are_not_averaged(tmp_path: Path) -> None:
    stopped = write_record(tmp_path, make_header(3, 2, seed=1), steps=2)
    (ax,) = pictures.draw_accuracy([run(tmp_path, concepts=None), stopped]).axes
    assert title(ax) == "sine-2 (1 seed)"
    with pytest.raises(DataError, match="no complete runs to draw, got 1 unfinished"):
        pictures.draw_accuracy([stopped])


@pytest.mark.parametrize(("name", "magic"), [("a.png", b"\x89PNG"), ("new/b.pdf", b"%PDF"), ("c.SVG", b"<?xml")])
def test_figures_are_saved_by_their_ending(tmp_path: Path, name: str, magic: bytes) -> None:
    pictures.save_picture(pictures.draw_clusters([run(tmp_path)]), tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(magic)


def test_a_figure_that_cannot_be_saved_is_an_error(tmp_path: Path) -> None:
    fig = pictures.draw_accuracy([run(tmp_path)])
    with pytest.raises(ConfigError, match=r"must end in \.pdf, \.png, \.svg, got '.*a\.jpeg2'"):
        pictures.save_picture(fig, tmp_path / "a.jpeg2")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"^cannot write below .*: it is a file, not a folder$"):
        pictures.save_picture(fig, tmp_path / "file" / "a.png")
