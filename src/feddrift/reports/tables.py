"""Summaries, metrics and ranks as tables for a terminal and as JSON values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from feddrift.reports.labels import (
    find_common_settings,
    find_differing_settings,
    format_ranges,
    format_settings,
    select_non_default,
)
from feddrift.reports.ranks import Ranking
from feddrift.reports.summary import Difference, PublishedResult, Spread, Summary
from feddrift.scores import ACCURACY, Score

Column = tuple[str, str | None, float]  # a metric, the dummy's metric to show in brackets, and the factor of the unit
DRIFT_COLUMNS: dict[str, Column] = {
    "precision\n(coin's)": ("noticed precision", "chance precision", 1.0),
    "recall\n(coin's)": ("noticed recall", "chance recall", 1.0),
    "delay\n(coin's)": ("noticed delay", "chance delay", 1.0),
    "lost to\nOracle": ("lost_to_oracle", None, 1.0),
    "lost": ("lost", None, 1.0),
}
CLIENT_COLUMNS = {"worst\nclient": "worst", "10th\npct.": "tenth"}  # in percent if the score is a share
OTHER_COLUMNS: dict[str, Column] = {
    "NMI": ("nmi", None, 1.0),
    "spare\nmodels": ("spare", None, 1.0),
    "MB\ntrained": ("bytes training", None, 1e-6),
    "MB\nscored": ("bytes scoring", None, 1e-6),
}


def to_json(
    summaries: Sequence[Summary],
    against: Sequence[Difference | None] = (),
    paper: Sequence[PublishedResult | None] = (),
    metrics: Sequence[Mapping[str, Spread | None]] = (),
) -> list[dict[str, Any]]:
    """Convert summaries to JSON values; their settings include the overrides.

    Args:
        summaries: The configurations.
        against: The difference of each to a baseline, or () to leave them out.
        paper: The paper's result for each, or ().
        metrics: The metrics of each, or ().
    """
    objects = []
    for k, summary in enumerate(summaries):
        values = asdict(summary)
        overrides = values.pop("overrides")
        objects.append({**values, "settings": values["settings"] | overrides, "seeds": list(summary.seeds)})
        if against:
            gap = against[k]
            objects[-1]["against"] = None if gap is None else {**asdict(gap), "seeds": list(gap.seeds)}
        if paper:
            cell = paper[k]
            objects[-1]["paper"] = None if cell is None else {a: asdict(getattr(cell, a)) for a in cell.within}
            objects[-1]["within"] = None if cell is None else cell.within
        if metrics:
            objects[-1]["metrics"] = _nest_by_first_word(
                {name: value and asdict(value) for name, value in metrics[k].items()}
            )
    return objects


def _nest_by_first_word(values: Mapping[str, Any]) -> dict[str, Any]:
    """Split names of two words into nested entries: "noticed recall" becomes the entry "recall" of "noticed".

    >>> _nest_by_first_word({"ari": 1, "noticed recall": 2, "noticed delay": 3})
    {'ari': 1, 'noticed': {'recall': 2, 'delay': 3}}
    """
    nested: dict[str, Any] = {}
    for name, value in values.items():
        outer, _, inner = name.partition(" ")
        if inner:
            nested.setdefault(outer, {})[inner] = value
        else:
            nested[outer] = value
    return nested


def build_summary_table(
    summaries: Sequence[Summary],
    against: Sequence[Difference | None] = (),
    paper: Sequence[PublishedResult | None] = (),
    score: Score = ACCURACY,
) -> Table:
    """Build a table of summaries, the best of each stream first.

    The column "sent" is relative to Oblivious, "models" is their number at the end, and ARI the adjusted Rand index.
    Columns that need true concepts are shown only if some are known.

    Args:
        summaries: The configurations.
        against: The difference of each to a baseline, or () to leave them out.
        paper: The paper's result for each, or ().
        score: The score of the summaries.
    """
    percent = ", %" if score.share else ""
    digits = 2 if score.share else 4
    has_truth = any(summary.ari is not None for summary in summaries)
    columns = [
        *(
            [f"omitting\ndrifts{percent}", f"including\ndrifts{percent}"]
            if has_truth
            else [f"{_get_mean_title(score)}{percent}"]
        ),
        *("sent", "models"),
        *(["false\nalarm", "ARI"] if has_truth else []),
    ]
    if against:
        points = "points" if score.share else "lower is better"
        columns.append(f"over {next((gap.baseline for gap in against if gap), 'it')},\n{points}")
    if paper:
        columns += ["paper,\nomitting", "ours\nover it", "paper,\nincluding", "ours\nover it"]
    grid = _create_grid(columns, 15)
    names = _label_summaries(summaries)
    grid.caption = _build_caption(summaries)
    if score != ACCURACY:
        grid.title = score.title
    for k in _order_best_first(summaries, score):
        summary = summaries[k]
        cells = [
            *names[k],
            *([format_spread(summary.omitting_drifts, digits)] if has_truth else []),
            format_spread(summary.including_drifts, digits),
            f"{summary.models_sent_ratio:.2f}x",
            f"{summary.models_final:.3g}",
            *(_format_truth_cells(summary) if has_truth else []),
            *([format_difference(against[k], digits)] if against else []),
            *(_format_paper_cells(summary, paper[k]) if paper else []),
        ]
        grid.add_row(*(Text(cell) for cell in cells))  # as Text: a name may contain [brackets]
    return grid


def convert_ranks_to_json(ranking: Ranking) -> list[dict[str, Any]]:
    """Convert a ranking to JSON values: one per method, the best first."""
    rows = zip(ranking.methods, ranking.mean.tolist(), ranking.ranks.tolist(), strict=True)
    return [
        {"method": method, "mean_rank": mean, "ranks": dict(zip(ranking.streams, ranks, strict=True))}
        for method, mean, ranks in rows
    ]


def build_ranks_table(ranking: Ranking) -> Table:
    """Build a table of the mean ranks and the ranks on each stream; 1 is the best."""
    table = Table("", "mean rank", *ranking.streams, box=None)
    for method, mean, ranks in zip(ranking.methods, ranking.mean, ranking.ranks, strict=True):
        table.add_row(Text(method), f"{mean:.2f}", *(f"{rank:g}" for rank in ranks))
    lines = [f"mean ranks differ at 5 % where they are {ranking.critical_difference:.2f} apart (Nemenyi)"]
    if ranking.left_out:
        lines.append(ranking.left_out_text)
    table.caption = Text("\n".join(lines), justify="left")
    return table


def _get_mean_title(score: Score) -> str:
    """Return the title of the mean if drifts are unknown; another score than accuracy is in the title of the table."""
    return "accuracy" if score == ACCURACY else "mean"


def _format_truth_cells(summary: Summary) -> list[str]:
    return [
        "-" if summary.false_alarms is None else f"{summary.false_alarms:.3g}",
        "-" if summary.ari is None else f"{summary.ari:.2f}",
    ]


def _order_best_first(summaries: Sequence[Summary], score: Score) -> list[int]:
    """Order positions by stream and then by the mean omitting drifts, or including them if drifts are unknown."""

    def build_sort_key(k: int) -> tuple[str, bool, float]:
        mean = summaries[k].omitting_drifts or summaries[k].including_drifts
        sign = -1 if score.higher_is_better else 1
        return summaries[k].stream, mean is None, sign * mean.mean if mean else 0.0

    return sorted(range(len(summaries)), key=build_sort_key)


def build_metrics_tables(
    summaries: Sequence[Summary], metrics: Sequence[Mapping[str, Spread | None]], score: Score = ACCURACY
) -> list[Table]:
    """Build a table of the metrics of drifts and a table of the others; each fits a terminal of 80 columns.

    docs/metrics.md defines the metrics; unknown ones are left out.

    Args:
        summaries: The configurations.
        metrics: The metrics of each.
        score: The score of the summaries.
    """
    measured = {name for numbers in metrics for name, value in numbers.items() if value is not None}
    levels = {f"{title}, %" if score.share else title: (name, None, 100.0 if score.share else 1.0)
              for title, name in CLIENT_COLUMNS.items()}  # fmt: skip
    shown = [
        {title: column for title, column in columns.items() if column[0] in measured}
        for columns in (DRIFT_COLUMNS, levels | OTHER_COLUMNS)
    ]
    order = _order_best_first(summaries, score)
    tables = [_build_metrics_table(summaries, metrics, columns, order) for columns in shown if columns]
    if tables:
        tables[0].title = None if score == ACCURACY else score.title
        tables[-1].caption = _build_caption(summaries)
    return tables


def _build_metrics_table(
    summaries: Sequence[Summary],
    metrics: Sequence[Mapping[str, Spread | None]],
    columns: Mapping[str, Column],
    order: Sequence[int],
) -> Table:
    grid = _create_grid(columns, 10)
    names = _label_summaries(summaries)
    for k in order:
        cells = [*names[k], *(_format_metric(metrics[k], *column) for column in columns.values())]
        grid.add_row(*(Text(cell) for cell in cells))
    return grid


def _create_grid(columns: Iterable[str], width: int) -> Table:
    """Create a narrow table: nine columns fit 80 characters. The first two columns wrap, the others do not."""
    grid = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    grid.add_column("stream", overflow="fold", min_width=8)
    grid.add_column("algorithm", overflow="fold", min_width=width)
    for name in ("seeds", *columns):
        grid.add_column(name, justify="right", no_wrap=True)
    return grid


def _format_metric(spreads: Mapping[str, Spread | None], name: str, dummy: str | None, factor: float) -> str:
    """Format a metric and, in brackets, that of a dummy; `factor` converts the unit."""
    value = spreads.get(name)
    dummy_value = spreads.get(dummy) if dummy else None
    number = 0.0 if value is None else factor * value.mean
    text = "-" if value is None else f"{number:.3g}" if factor < 1 else f"{number:.2f}".replace("-0.00", "0.00")
    return text + (f" ({dummy_value.mean:.2f})" if dummy_value else "")


def _label_summaries(summaries: Sequence[Summary]) -> list[tuple[str, str, str]]:
    """Return for each summary its stream, its algorithm with the settings to show, and its seeds, as texts."""
    different = find_differing_settings([(s.stream, s.algorithm, {**s.settings, **s.overrides}) for s in summaries])
    common = _find_common_options(summaries)
    names = []
    for s, differs in zip(summaries, different, strict=True):
        own = {k: v for k, v in s.overrides.items() if k not in common[s.stream]}
        words = format_settings({**select_non_default(s.algorithm, s.settings), **own, **differs})
        names.append((s.stream, f"{s.algorithm} {words}".strip(), format_ranges(s.seeds)))
    return names


def _find_common_options(summaries: Sequence[Summary]) -> dict[str, dict[str, Any]]:
    """Return by stream the run options that all its summaries share."""
    streams = dict.fromkeys(summary.stream for summary in summaries)
    return {name: find_common_settings([s.overrides for s in summaries if s.stream == name]) for name in streams}


def _build_caption(summaries: Sequence[Summary]) -> Text | None:
    """Return a line for each stream with the run options that all its rows share; None if there are none."""
    lines = [
        f"{stream}: {format_settings(options)}"
        for stream, options in _find_common_options(summaries).items()
        if options
    ]
    return Text("\n".join(lines), justify="left") if lines else None


def _format_paper_cells(summary: Summary, published: PublishedResult | None) -> list[str]:
    """Return the paper's two accuracies, each with our difference to it; a star marks a large difference."""
    if published is None:
        return ["-"] * 4
    cells = []
    for accuracy, within in published.within.items():
        ours = getattr(summary, accuracy)
        theirs = getattr(published, accuracy)
        gap = "-" if ours is None else f"{ours.mean - theirs.mean:+.2f}"
        cells += [format_spread(theirs), gap + ("*" if within is False else " ")]
    return cells


def format_spread(value: Spread | None, digits: int = 2) -> str:
    """Format a mean and its deviation."""
    if value is None:
        return "-"
    return f"{value.mean:.{digits}f}" + ("" if value.std is None else f" ± {value.std:.{digits}f}")


def format_difference(gap: Difference | None, digits: int = 2) -> str:
    """Format a difference and its interval."""
    if gap is None:
        return "-"
    return f"{gap.mean:+.{digits}f}" + ("" if gap.low is None else f" [{gap.low:+.{digits}f}, {gap.high:+.{digits}f}]")
