"""A federation in numbers, as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from feddrift.deploy.monitor.status import Status, find_record_path, read_status
from feddrift.deploy.pki.certificates import read_days_left
from feddrift.reports.exchanges import REFUSED_REPLY_PREFIX, summarise_clients

Samples = Iterable[tuple[Mapping[str, str], float]]


class MetricsPage:
    """Numbers in Prometheus's text format, each with the name of the experiment."""

    def __init__(self, experiment: str) -> None:
        self.experiment, self.lines = experiment, list[str]()

    def add_header(self, name: str, kind: str, about: str) -> None:
        self.lines += [f"# HELP feddrift_{name} {about}", f"# TYPE feddrift_{name} {kind}"]

    def add_samples(self, name: str, samples: Samples) -> None:
        for labels, value in samples:
            named = {"experiment": self.experiment, **labels}.items()
            inside = ",".join(f'{key}="{_escape_label(text)}"' for key, text in named)
            self.lines.append(f"feddrift_{name}{{{inside}}} {value:.10g}")

    def add_metric(self, name: str, kind: str, about: str, samples: Samples) -> None:
        self.add_header(name, kind, about)
        self.add_samples(name, samples)


def format_metrics(server: Path) -> str:
    """All numbers as text; before the federation has begun those that are known then."""
    federation, page = read_status(server), MetricsPage(find_record_path(server).stem)
    days = [({"file": name}, left) for name, left in read_days_left(server).items()]
    page.add_metric("certificate_days", "gauge", "Days until a certificate ends.", days)
    running = federation is not None and federation.running
    page.add_metric("running", "gauge", "Whether a server is at work.", [({}, running)])
    if federation is not None:
        _add_client_metrics(federation, page)
        _add_model_metrics(federation, page)
        _add_exchange_metrics(federation, page)
    return "\n".join(page.lines) + "\n"


def _add_client_metrics(federation: Status, page: MetricsPage) -> None:
    now = federation.describe_clients().values()
    states = {"here": 0, "silent": 0, "refused": 0}
    for entry in now:
        refused = str(entry["trouble"] or "").startswith(REFUSED_REPLY_PREFIX)
        states["here" if entry["here"] else "refused" if refused else "silent"] += 1
    page.add_metric(
        "clients", "gauge", "Clients by how their last answer went.", [({"state": k}, n) for k, n in states.items()]
    )


def _add_model_metrics(federation: Status, page: MetricsPage) -> None:
    record, rows = federation.record, federation.record.rows
    names = record.header["clients"]
    page.add_metric("time_steps_total", "counter", "Time steps that were trained.", [({}, rows.steps)])
    if rows.steps:
        page.add_metric("models", "gauge", "Shared models.", [({}, rows.n_models[-1].max())])
        alarms = [({"client": name}, rows.drift[:, c].sum()) for c, name in enumerate(names)]
        page.add_metric("alarms_total", "counter", "Drift alarms of a client.", alarms)
    if record.tested:
        last = record.tested - 1
        each = [({"client": name}, rows.accuracy[last, c]) for c, name in enumerate(names) if rows.tested[last, c]]
        page.add_metric("accuracy", "gauge", "Of a client, at the last time step that is tested.", each)


def _add_exchange_metrics(federation: Status, page: MetricsPage) -> None:
    record, took = federation.record, dict[str, list[float]]()
    for line in record.exchanges:
        took.setdefault(line["asked"], []).append(line["took"])
    page.add_header("exchange_seconds", "summary", "Seconds that clients were waited for.")
    page.add_samples("exchange_seconds_sum", [({"asked": kind}, sum(seconds)) for kind, seconds in took.items()])
    page.add_samples("exchange_seconds_count", [({"asked": kind}, len(seconds)) for kind, seconds in took.items()])
    traffic = [
        ({"client": name, "direction": way}, entry[way])
        for name, entry in zip(record.header["clients"], summarise_clients(record), strict=True)
        for way in ("to", "from")
    ]
    page.add_metric("bytes_total", "counter", "Bytes to and from a client.", traffic)


def _escape_label(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
