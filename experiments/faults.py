"""Write the tables of docs/faults-measured.md from the records in results/: `python experiments/faults.py`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from feddrift.reports import summary
from feddrift.runs import record
from feddrift.runs.poison import parse_poison
from feddrift.runs.record import Record

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "faults-measured.md"
MARK = "<!-- measured: written by experiments/faults.py -->\n"
SEEDS = 5  # of runs with false reports, unless a cell says otherwise
ORDER = ("Oblivious", "FedDrift-Eager", "FedDrift", "Oracle")


def main() -> None:
    text = PAGE.read_text()
    PAGE.write_text(text[: text.index(MARK)] + render_results())


def render_results() -> str:
    """Return the text of the page from the mark on."""
    away = record.read_all(ROOT / "results" / "participation")
    harm = record.read_all(ROOT / "results" / "poison")
    lies = record.read_all(ROOT / "results" / "liars")
    streams = ("sine-2", "sea-4")
    sections = [*(presence(s, away) for s in streams), *(poison(s, harm) for s in streams)]
    return MARK + "\n".join([*sections, *(liars(s, lies) for s in streams)])


def presence(stream: str, records: Iterable[Record]) -> str:
    """Accuracy and adjusted Rand index by participation and dropout."""
    groups: dict[tuple[float, float, str], list[Record]] = {}
    for r in records:
        if r.header["stream"] == stream:
            given = r.header["overrides"]
            key = given.get("participation", 1.0), given.get("dropout", 0.0), r.header["algorithm"]
            groups.setdefault(key, []).append(r)
    lines = [
        f"\n### {stream}: accuracy by participation and dropout\n",
        "Accuracy in percent, omitting drifts. The adjusted Rand index of the clusters is in brackets.\n",
        "| clients per round | missed time steps | " + " | ".join(ORDER) + " |",
        "|---|---|" + "---|" * len(ORDER),
    ]
    for share, dropout in sorted({key[:2] for key in groups}, key=lambda k: (k[1], -k[0])):
        cells = []
        for name in ORDER:
            scores = [summary.summarise_run(r) for r in groups.get((share, dropout, name), [])]
            accuracy = np.mean([s.omitting_drifts for s in scores if s.omitting_drifts is not None])
            index = np.mean([s.ari for s in scores if s.ari is not None])
            cells.append(f"{accuracy:.1f}" + (f" ({index:.2f})" if name.startswith("FedDrift") else ""))
        lines.append(f"| {100 * share:.0f} % | {100 * dropout:.0f} % | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def poison(stream: str, records: Iterable[Record]) -> str:
    """Accuracy of the honest clients, by harm and way to average."""
    rules = ("mean", "median", "trimmed", "clipped")
    found: dict[tuple[str, str, str, bool], list[float]] = {}
    for r in records:
        if r.header["stream"] == stream:
            given = r.header["overrides"]
            key = given["poison"], r.header["algorithm"], given.get("average", "mean")
            found.setdefault((*key, r.header["settings"].get("quarantine", False)), []).append(honest(r))

    def cell(harm: str, name: str, rule: str, quarantine: bool = False) -> str:
        values = found.get((harm, name, rule, quarantine), [])
        return f"{np.mean(values):.1f}" if values else ""

    lines = [
        f"\n### {stream}: accuracy of the honest clients\n",
        "Accuracy of the honest clients in percent, omitting drifts.\n",
        "| Byzantine clients | algorithm | " + " | ".join(rules) + " | mean, quarantine |",
        "|---|---|" + "---|" * (len(rules) + 1),
    ]
    for harm in sorted({key[0] for key in found}, key=lambda h: (h.split(":")[0], len(h))):
        for name in [n for n in ORDER if any(key[:2] == (harm, n) for key in found)]:
            cells = [cell(harm, name, rule) for rule in rules] + [cell(harm, name, "mean", True)]
            lines.append(f"| {describe_harm(harm)} | {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def honest(r: Record) -> float:
    """Percent right, omitting drifts, over the clients that do no harm."""
    liars = [int(c) for c in r.header["overrides"]["poison"].split(":")[1].split(",")]
    stable = (r.rows.concept == r.rows.next_concept) & ~np.isin(np.arange(r.header["n_clients"]), liars)
    return float(100 * np.mean(r.rows.accuracy[stable]))


def liars(stream: str, records: Iterable[Record]) -> str:
    """Change of the honest clients' accuracy by false reports, in points: mean over seeds, and the worst of them."""
    runs = {(*_get_configuration(r), r.header["seed"]): r for r in records if r.header["stream"] == stream}
    found: dict[tuple[str, str, bool], list[float]] = {}
    for (name, harm, defend, seed), r in runs.items():
        who = parse_poison(harm, 10).clients if harm else ()
        found.setdefault((name, harm, defend), []).append(_others(r, who) - _others(runs[name, "", False, seed], who))

    def cell(name: str, harm: str, defend: bool) -> str:
        lost = found.get((name, harm, defend), [])
        seeds = "" if len(lost) in (0, SEEDS) else f", {len(lost)} seed{'s' * (len(lost) > 1)}"
        return f"{np.mean(lost):+.2f} ({min(lost):+.2f}){seeds}" if lost else ""

    methods = ("FedDrift", "FedDrift-Auto")
    right = [np.mean([_others(r, ()) for key, r in runs.items() if key[:3] == (name, "", False)]) for name in methods]
    honest_text = ", ".join(f"{name} {value:.2f} %" for name, value in zip(methods, right, strict=True))
    columns = [f"{name}, {how}" for name in methods for how in ("not defended", "defended")]
    lines = [
        f"\n### {stream}: change of the honest clients' accuracy by Byzantine clients, in points\n",
        f"Accuracy if all clients are honest: {honest_text}.\n",
        "| Byzantine clients | " + " | ".join(columns) + " |",
        "|---|" + "---|" * len(columns),
    ]
    for harm in sorted(
        {key[1] for key in found}, key=lambda h: (len(parse_poison(h, 10).clients) if h else 0, _rank(h))
    ):
        cells = [cell(name, harm, defend) if harm or defend else "" for name in methods for defend in (False, True)]
        lines.append(f"| {_lie(harm)} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _get_configuration(r: Record) -> tuple[str, str, bool]:
    given = r.header["overrides"]
    return r.header["algorithm"], given.get("poison", ""), given.get("defend", False)


def _others(r: Record, who: Iterable[int]) -> float:
    """Percent right over all time steps, without these clients."""
    return float(100 * np.nanmean(np.delete(r.rows.accuracy, list(who), axis=1)))


def _kinds(harm: str) -> list[str]:
    return [part.split(":")[0] for part in harm.split("+") if part]


def _rank(harm: str) -> tuple[int, list[int]]:
    order = ("claims", "alarms", "glue", "losses", "flip", "garbage")
    kinds = [order.index(kind) for kind in _kinds(harm)]
    return int(min(kinds, default=0) > 3), [*([9] if len(kinds) > 1 else []), *kinds]


def _lie(harm: str) -> str:
    return f"{len(parse_poison(harm, 10).clients)} of 10: {' and '.join(_kinds(harm))}" if harm else "none"


def describe_harm(harm: str) -> str:
    kind, _, clients = harm.partition(":")
    who = f"{clients.count(',') + 1} of 10"
    return f"{who} send noise" if kind == "garbage" else f"{who} have flipped labels"


if __name__ == "__main__":
    main()
