"""Metrics of a federation in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from feddrift.deploy.monitor.status import Status, find_record_path, read_status
from feddrift.deploy.pki.certificates import read_remaining_days
from feddrift.reports.exchanges import REFUSED_REPLY_PREFIXES, summarise_clients

Samples = Iterable[tuple[Mapping[str, str], float]]


class MetricsPage:
    """Metrics in the text format of Prometheus; each sample has the experiment as a label."""

    def __init__(self, experiment: str) -> None:
        self.experiment = experiment
        self.lines: list[str] = []

    def add_header(self, name: str, kind: str, about: str) -> None:
        self.lines += [f"# HELP feddrift_{name} {about}", f"# TYPE feddrift_{name} {kind}"]

    def add_samples(self, name: str, samples: Samples) -> None:
        for labels, value in samples:
            pairs = {"experiment": self.experiment, **labels}.items()
            label_text = ",".join(f'{key}="{_escape_label(text)}"' for key, text in pairs)
            self.lines.append(f"feddrift_{name}{{{label_text}}} {value:.10g}")

    def add_metric(self, name: str, kind: str, about: str, samples: Samples) -> None:
        self.add_header(name, kind, about)
        self.add_samples(name, samples)


def format_metrics(server: Path) -> str:
    """Return all metrics as text; before the federation has begun, only those that need no record."""
    federation = read_status(server)
    page = MetricsPage(find_record_path(server).stem)
    days_left = [({"file": name}, days) for name, days in read_remaining_days(server).items()]
    page.add_metric("certificate_days", "gauge", "Days until a certificate ends.", days_left)
    running = federation is not None and federation.running
    page.add_metric("running", "gauge", "1 while a server runs the federation, else 0.", [({}, running)])
    if federation is not None:
        _add_client_metrics(federation, page)
        _add_model_metrics(federation, page)
        _add_exchange_metrics(federation, page)
    return "\n".join(page.lines) + "\n"


def _add_client_metrics(federation: Status, page: MetricsPage) -> None:
    states = {"here": 0, "silent": 0, "refused": 0}
    for entry in federation.describe_clients().values():
        refused = str(entry["trouble"] or "").startswith(REFUSED_REPLY_PREFIXES)
        states["here" if entry["here"] else "refused" if refused else "silent"] += 1
    samples = [({"state": state}, n) for state, n in states.items()]
    page.add_metric("clients", "gauge", "Number of clients by the outcome of their last request.", samples)


def _add_model_metrics(federation: Status, page: MetricsPage) -> None:
    record = federation.record
    rows = record.rows
    names = record.header["clients"]
    page.add_metric("time_steps_total", "counter", "Number of trained time steps.", [({}, rows.steps)])
    if rows.steps:
        page.add_metric("models", "gauge", "Number of shared models.", [({}, rows.n_models[-1].max())])
        alarms = [({"client": name}, rows.drift[:, c].sum()) for c, name in enumerate(names)]
        page.add_metric("alarms_total", "counter", "Number of drift alarms of a client.", alarms)
    if record.tested:
        last = record.tested - 1
        accuracies = [({"client": n}, rows.accuracy[last, c]) for c, n in enumerate(names) if rows.tested[last, c]]
        page.add_metric("accuracy", "gauge", "Accuracy of a client at the last tested time step.", accuracies)


def _add_exchange_metrics(federation: Status, page: MetricsPage) -> None:
    record = federation.record
    durations: dict[str, list[float]] = {}  # seconds of each exchange, by the kind of its request
    for line in record.exchanges:
        durations.setdefault(line["asked"], []).append(line["took"])
    page.add_header("exchange_seconds", "summary", "Seconds that the server waited for the replies of an exchange.")
    page.add_samples("exchange_seconds_sum", [({"asked": kind}, sum(seconds)) for kind, seconds in durations.items()])
    page.add_samples("exchange_seconds_count", [({"asked": kind}, len(seconds)) for kind, seconds in durations.items()])
    traffic = [
        ({"client": name, "direction": direction}, entry[direction])
        for name, entry in zip(record.header["clients"], summarise_clients(record), strict=True)
        for direction in ("to", "from")
    ]
    page.add_metric("bytes_total", "counter", "Bytes to and from a client.", traffic)


def _escape_label(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
