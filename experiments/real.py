"""Write the tables of docs/real.md from results/real: `python experiments/real.py`.

`python experiments/real.py logistic` first fits a logistic regression for each client, which needs the data.
"""

from __future__ import annotations

import json
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np

import feddrift as fd
from feddrift.reports import tables
from feddrift.reports.caveats import find_caveats
from feddrift.reports.labels import format_settings, select_non_default
from feddrift.reports.summary import Spread, average_known_values, compute_spread, list_configurations
from feddrift.runs import record
from feddrift.runs.record import Record
from feddrift.scores import compute_scores

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "real.md"
RESULTS = ROOT / "results" / "real"
LOGISTIC = RESULTS / "logistic.json"
STREAMS = ("air-quality", "air-beijing", "elec2-hours")
SCORES = {"log_loss": "log loss", "brier": "Brier", "auc": "AUC", "balanced_accuracy": "balanced", "f1": "F1"}
PERCENT = ("auc", "balanced_accuracy", "f1")
NEWEST_ONLY = "the same, newest data"  # its name in LOGISTIC
TITLES = {NEWEST_ONLY: "logistic regression per client, newest data"}


def main() -> None:
    if sys.argv[1:] == ["logistic"]:
        LOGISTIC.write_text(json.dumps({name: logistic(fd.stream(name)) for name in STREAMS}, indent=1) + "\n")
    PAGE.write_text(render_page(PAGE.read_text()))


def render_page(text: str) -> str:
    """Return the text of the page with new tables between its markers."""
    records = record.read_all(RESULTS)
    for stream in STREAMS:
        begin = f"<!-- {stream}: written by experiments/real.py -->\n"
        end = f"<!-- end of {stream} -->"
        assert begin in text and end in text, stream
        made = table([run for run in records if run.header["stream"] == stream], stream)
        text = re.sub(f"(?s){re.escape(begin)}.*{re.escape(end)}", lambda _: f"{begin}\n{made}\n{end}", text)  # noqa: B023
    return text


def table(records: list[Record], stream: str) -> str:
    """Compare all methods and logistic regression on a stream, and list the caveats of `feddrift report`."""
    rows: dict[str, list[str]] = {}
    level: dict[str, float] = {}
    for group in list_configurations(records):
        header = group[0].header
        named = {
            k: v
            for k, v in select_non_default(header["algorithm"], header["settings"]).items()
            if k in ("test", "n_models")
        }
        name = header["algorithm"] + (f" ({format_settings(named)})" if named else "")
        accuracy = _spread(group, "accuracy", 100)
        worst = [float(np.nanmin(average_known_values(run.rows.accuracy.T, -1))) for run in group]
        cells = [
            tables.format_spread(accuracy),
            *(tables.format_spread(_of(group, score), _digits(score)) for score in SCORES),
        ]
        sent = np.mean([fd.summary(run)["models_sent_ratio"][0] for run in group])
        models = np.mean([run.rows.n_models[-1].max() for run in group])
        rows[name] = [*cells, f"{100 * np.mean(worst):.2f}", f"{sent:.2f}", f"{models:.3g}"]
        level[name] = accuracy.mean
    for name, scores in json.loads(LOGISTIC.read_text())[stream].items():
        numbers = [f"{(100 if s in PERCENT else 1) * scores[s]:.{_digits(s)}f}" for s in SCORES]
        title = f"*{TITLES.get(name, name)}*"
        rows[title] = [f"{100 * scores['accuracy']:.2f}", *numbers, f"{100 * scores['worst']:.2f}", "0.00", "-"]
        level[title] = 100 * scores["accuracy"]
    head = ["", "accuracy, %", *(title + (", %" if s in PERCENT else "") for s, title in SCORES.items())]
    head += ["worst client, %", "sent", "models"]
    lines = [_row([name, *rows[name]]) for name in sorted(rows, key=lambda name: -level[name])]
    heading = "`feddrift report` prints these sentences below its table:"
    caveats = [f"- {sentence}" for sentence in find_caveats(records, name_streams=False)]
    return "\n".join([_row(head), "|---" * len(head) + "|", *lines, "", heading, "", *caveats])


def logistic(stream: fd.Stream) -> dict[str, dict[str, float]]:
    """Score scikit-learn's logistic regression for each client, trained on all its data so far or the newest only."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    warnings.simplefilter("ignore")  # a client may have seen one class only
    kinds = {"logistic regression per client": 0, NEWEST_ONLY: 1}
    results: dict[str, dict[str, float]] = {}
    for name, newest in kinds.items():
        scores: dict[str, Any] = {}
        for t in range(stream.n_steps):
            for c in range(stream.n_clients):
                past = [stream.cell(k, c) for k in range(t if newest else 0, t + 1) if stream.counts[k, c]]
                x, y = stream.cell(t + 1, c)
                if not past or not len(y):
                    continue
                seen_x, seen_y = (np.concatenate(part) for part in zip(*past, strict=True))
                chances = np.zeros((len(y), stream.n_classes))
                if len(classes := np.unique(seen_y)) < 2:
                    chances[:, classes[0]] = 1
                else:
                    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000)).fit(seen_x, seen_y)
                    chances[:, classes] = model.predict_proba(x)
                predicted = chances.argmax(axis=1)
                received = np.zeros((1, stream.n_classes), dtype=np.int64)
                cell = compute_scores(chances, predicted, y, np.array([len(y)]), received)
                for key, value in {"accuracy": [(predicted == y).mean()], **cell}.items():
                    scores.setdefault(key, np.full((stream.n_steps, stream.n_clients), np.nan))[t, c] = value[0]
        results[name] = {key: round(float(np.nanmean(scores[key])), 6) for key in ("accuracy", *SCORES)}
        results[name]["worst"] = round(float(np.nanmean(scores["accuracy"], axis=0).min()), 6)
    return results


def _of(group: list[Record], score: str) -> Spread:
    return _spread(group, score, 100 if score in PERCENT else 1)


def _spread(group: list[Record], name: str, factor: float) -> Spread:
    values = [factor * float(np.nanmean(getattr(run.rows, name))) for run in group]
    spread = compute_spread(values)
    assert spread is not None
    return spread


def _digits(score: str) -> int:
    return 2 if score in PERCENT else 3


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
