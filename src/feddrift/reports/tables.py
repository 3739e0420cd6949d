"""Reports for people and for programs: summaries as tables and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from feddrift.reports.labels import describe, differences, notable, ranges, shared
from feddrift.reports.ranks import Ranking
from feddrift.reports.summary import Difference, Published, Spread, Summary
from feddrift.scores import ACCURACY, Score

Column = tuple[str, str | None, float]  # what is measured, the dummy's that stands behind it in brackets, a factor
DRIFTS: dict[str, Column] = {
    "precision\n(coin's)": ("noticed precision", "chance precision", 1.0),
    "recall\n(coin's)": ("noticed recall", "chance recall", 1.0),
    "delay\n(coin's)": ("noticed delay", "chance delay", 1.0),
    "lost to\nOracle": ("lost_to_oracle", None, 1.0),
    "lost": ("lost", None, 1.0),
}
LEVELS = {"worst\nclient": "worst", "10th\npct.": "tenth"}  # in percent where the score is a share
REST: dict[str, Column] = {
    "NMI": ("nmi", None, 1.0),
    "spare\nmodels": ("spare", None, 1.0),
    "MB\ntrained": ("bytes training", None, 1e-6),
    "MB\nscored": ("bytes scoring", None, 1e-6),
}


def to_json(
    summaries: Sequence[Summary],
    against: Sequence[Difference | None] = (),
    paper: Sequence[Published | None] = (),
    metrics: Sequence[Mapping[str, Spread | None]] = (),
) -> list[dict[str, Any]]:
    """Summaries as JSON values; settings hold the overrides, too."""
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
            objects[-1]["metrics"] = _nested({name: value and asdict(value) for name, value in metrics[k].items()})
    return objects


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """ "noticed recall" as the entry "recall" of "noticed".

    >>> _nested({"ari": 1, "noticed recall": 2, "noticed delay": 3})
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


def table(
    summaries: Sequence[Summary],
    against: Sequence[Difference | None] = (),
    paper: Sequence[Published | None] = (),
    score: Score = ACCURACY,
) -> Table:
    """Summaries for people, the best of each stream first; sent is relative to Oblivious, models are those at the end,
    ARI the adjusted Rand index. What needs true concepts is shown where some are known."""
    percent, digits = ", %" if score.share else "", 2 if score.share else 4
    has_truth = any(summary.ari is not None for summary in summaries)
    columns = [
        *([f"omitting\ndrifts{percent}", f"including\ndrifts{percent}"] if has_truth else [f"{_mean(score)}{percent}"]),
        *("sent", "models"),
        *(["false\nalarm", "ARI"] if has_truth else []),
    ]
    if against:
        points = "points" if score.share else "lower is better"
        columns.append(f"over {next((gap.baseline for gap in against if gap), 'it')},\n{points}")
    if paper:
        columns += ["paper,\nomitting", "ours\nover it", "paper,\nincluding", "ours\nover it"]
    grid, names = _grid(columns, 15), _names(summaries)
    grid.caption = _caption(summaries)
    if score != ACCURACY:
        grid.title = score.title
    for k in _best_first(summaries, score):
        summary = summaries[k]
        cells = [
            *names[k],
            *([spread(summary.omitting_drifts, digits)] if has_truth else []),
            spread(summary.including_drifts, digits),
            f"{summary.models_sent_ratio:.2f}x",
            f"{summary.models_final:.3g}",
            *(_of_truth(summary) if has_truth else []),
            *([difference(against[k], digits)] if against else []),
            *(_beside(summary, paper[k]) if paper else []),
        ]
        grid.add_row(*(Text(cell) for cell in cells))  # as Text: a name may hold [brackets]
    return grid


def ranks_to_json(ranking: Ranking) -> list[dict[str, Any]]:
    """A method after the other, the best first."""
    rows = zip(ranking.methods, ranking.mean.tolist(), ranking.ranks.tolist(), strict=True)
    return [
        {"method": method, "mean_rank": mean, "ranks": dict(zip(ranking.streams, each, strict=True))}
        for method, mean, each in rows
    ]


def ranks_table(ranking: Ranking) -> Table:
    """Mean ranks and those on each stream, 1: best."""
    table = Table("", "mean rank", *ranking.streams, box=None)
    for method, mean, each in zip(ranking.methods, ranking.mean, ranking.ranks, strict=True):
        table.add_row(Text(method), f"{mean:.2f}", *(f"{rank:g}" for rank in each))
    lines = [f"mean ranks differ at 5 % where they are {ranking.critical_difference:.2f} apart (Nemenyi)"]
    if ranking.left_out:
        lines.append(ranking.without)
    table.caption = Text("\n".join(lines), justify="left")
    return table


def _mean(score: Score) -> str:
    """What the one mean is called where drifts are not known; another score's name is the table's title."""
    return "accuracy" if score == ACCURACY else "mean"


def _of_truth(summary: Summary) -> list[str]:
    return [
        "-" if summary.false_alarms is None else f"{summary.false_alarms:.3g}",
        "-" if summary.ari is None else f"{summary.ari:.2f}",
    ]


def _best_first(summaries: Sequence[Summary], score: Score) -> list[int]:
    """Positions, stream by stream: by the mean omitting drifts, or of all where these are unknown; no mean is last."""

    def place(k: int) -> tuple[str, bool, float]:
        mean = summaries[k].omitting_drifts or summaries[k].including_drifts
        sign = -1 if score.higher_is_better else 1
        return summaries[k].stream, mean is None, sign * mean.mean if mean else 0.0

    return sorted(range(len(summaries)), key=place)


def metrics_tables(
    summaries: Sequence[Summary], metrics: Sequence[Mapping[str, Spread | None]], score: Score = ACCURACY
) -> list[Table]:
    """Tables of drifts and of the rest, as docs/metrics.md defines them, where known: each fits a terminal of 80."""
    measured = {name for numbers in metrics for name, value in numbers.items() if value is not None}
    levels = {f"{title}, %" if score.share else title: (name, None, 100.0 if score.share else 1.0)
              for title, name in LEVELS.items()}  # fmt: skip
    shown = [
        {title: how for title, how in columns.items() if how[0] in measured} for columns in (DRIFTS, levels | REST)
    ]
    order = _best_first(summaries, score)
    tables = [_metrics_table(summaries, metrics, columns, order) for columns in shown if columns]
    if tables:
        tables[0].title = None if score == ACCURACY else score.title
        tables[-1].caption = _caption(summaries)
    return tables


def _metrics_table(
    summaries: Sequence[Summary],
    metrics: Sequence[Mapping[str, Spread | None]],
    columns: Mapping[str, Column],
    order: Sequence[int],
) -> Table:
    grid, names = _grid(columns, 10), _names(summaries)
    for k in order:
        grid.add_row(*(Text(text) for text in (*names[k], *(_measured(metrics[k], *how) for how in columns.values()))))
    return grid


def _grid(columns: Iterable[str], width: int) -> Table:
    """Narrow: nine columns in a terminal of 80. The first two wrap, numbers are never cut."""
    grid = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    grid.add_column("stream", overflow="fold", min_width=8)
    grid.add_column("algorithm", overflow="fold", min_width=width)
    for name in ("seeds", *columns):
        grid.add_column(name, justify="right", no_wrap=True)
    return grid


def _measured(spreads: Mapping[str, Spread | None], name: str, dummy: str | None, factor: float) -> str:
    value, beside = spreads.get(name), spreads.get(dummy) if dummy else None
    number = 0.0 if value is None else factor * value.mean
    text = "-" if value is None else f"{number:.3g}" if factor < 1 else f"{number:.2f}".replace("-0.00", "0.00")
    return text + (f" ({beside.mean:.2f})" if beside else "")


def _names(summaries: Sequence[Summary]) -> list[tuple[str, str, str]]:
    """Stream, algorithm with its settings and what sets it apart on the stream, and seeds, as texts."""
    different = differences([(s.stream, s.algorithm, {**s.settings, **s.overrides}) for s in summaries])
    common, names = _common(summaries), []
    for s, differs in zip(summaries, different, strict=True):
        own = {k: v for k, v in s.overrides.items() if k not in common[s.stream]}
        words = describe({**notable(s.algorithm, s.settings), **own, **differs})
        names.append((s.stream, f"{s.algorithm} {words}".strip(), ranges(s.seeds)))
    return names


def _common(summaries: Sequence[Summary]) -> dict[str, dict[str, Any]]:
    """By stream, the run options that all its rows share."""
    streams = dict.fromkeys(summary.stream for summary in summaries)
    return {name: shared([s.overrides for s in summaries if s.stream == name]) for name in streams}


def _caption(summaries: Sequence[Summary]) -> Text | None:
    """What the rows of each stream share and so leave out, a line for each."""
    lines = [f"{stream}: {describe(options)}" for stream, options in _common(summaries).items() if options]
    return Text("\n".join(lines), justify="left") if lines else None


def _beside(summary: Summary, published: Published | None) -> list[str]:
    """The paper's two accuracies, each with how far ours is above it; a star: outside its band."""
    if published is None:
        return ["-"] * 4
    cells = []
    for accuracy, within in published.within.items():
        mine, printed = getattr(summary, accuracy), getattr(published, accuracy)
        gap = "-" if mine is None else f"{mine.mean - printed.mean:+.2f}"
        cells += [spread(printed), gap + ("*" if within is False else " ")]
    return cells


def spread(value: Spread | None, digits: int = 2) -> str:
    """A mean and its deviation as text."""
    if value is None:
        return "-"
    return f"{value.mean:.{digits}f}" + ("" if value.std is None else f" ± {value.std:.{digits}f}")


def difference(gap: Difference | None, digits: int = 2) -> str:
    """A difference and its interval as text."""
    if gap is None:
        return "-"
    return f"{gap.mean:+.{digits}f}" + ("" if gap.low is None else f" [{gap.low:+.{digits}f}, {gap.high:+.{digits}f}]")
