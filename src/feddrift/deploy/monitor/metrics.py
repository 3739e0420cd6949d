"""A federation in numbers, as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from feddrift.deploy.monitor.status import Status, record_path, status
from feddrift.deploy.pki.certificates import days_left
from feddrift.reports.exchanges import REFUSED, by_client

Samples = Iterable[tuple[Mapping[str, str], float]]


class Page:
    """Numbers in Prometheus's text format, each with the name of the experiment."""

    def __init__(self, experiment: str) -> None:
        self.experiment, self.lines = experiment, list[str]()

    def head(self, name: str, kind: str, about: str) -> None:
        self.lines += [f"# HELP feddrift_{name} {about}", f"# TYPE feddrift_{name} {kind}"]

    def add(self, name: str, samples: Samples) -> None:
        for labels, value in samples:
            named = {"experiment": self.experiment, **labels}.items()
            inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in named)
            self.lines.append(f"feddrift_{name}{{{inside}}} {value:.10g}")

    def tell(self, name: str, kind: str, about: str, samples: Samples) -> None:
        self.head(name, kind, about)
        self.add(name, samples)


def metrics(server: Path) -> str:
    """All numbers as text; before the federation has begun those that are known then."""
    federation, page = status(server), Page(record_path(server).stem)
    days = [({"file": name}, left) for name, left in days_left(server).items()]
    page.tell("certificate_days", "gauge", "Days until a certificate ends.", days)
    running = federation is not None and federation.running
    page.tell("running", "gauge", "Whether a server is at work.", [({}, running)])
    if federation is not None:
        _tell_clients(federation, page)
        _tell_models(federation, page)
        _tell_exchanges(federation, page)
    return "\n".join(page.lines) + "\n"


def _tell_clients(federation: Status, page: Page) -> None:
    now = federation.clients().values()
    states = {"here": 0, "silent": 0, "refused": 0}
    for entry in now:
        refused = str(entry["trouble"] or "").startswith(REFUSED)
        states["here" if entry["here"] else "refused" if refused else "silent"] += 1
    page.tell(
        "clients", "gauge", "Clients by how their last answer went.", [({"state": k}, n) for k, n in states.items()]
    )


def _tell_models(federation: Status, page: Page) -> None:
    record, rows = federation.record, federation.record.rows
    names = record.header["clients"]
    page.tell("time_steps_total", "counter", "Time steps that were trained.", [({}, rows.steps)])
    if rows.steps:
        page.tell("models", "gauge", "Shared models.", [({}, rows.n_models[-1].max())])
        alarms = [({"client": name}, rows.drift[:, c].sum()) for c, name in enumerate(names)]
        page.tell("alarms_total", "counter", "Drift alarms of a client.", alarms)
    if record.tested:
        last = record.tested - 1
        each = [({"client": name}, rows.accuracy[last, c]) for c, name in enumerate(names) if rows.tested[last, c]]
        page.tell("accuracy", "gauge", "Of a client, at the last time step that is tested.", each)


def _tell_exchanges(federation: Status, page: Page) -> None:
    record, took = federation.record, dict[str, list[float]]()
    for line in record.exchanges:
        took.setdefault(line["asked"], []).append(line["took"])
    page.head("exchange_seconds", "summary", "Seconds that clients were waited for.")
    page.add("exchange_seconds_sum", [({"asked": kind}, sum(seconds)) for kind, seconds in took.items()])
    page.add("exchange_seconds_count", [({"asked": kind}, len(seconds)) for kind, seconds in took.items()])
    traffic = [
        ({"client": name, "direction": way}, entry[way])
        for name, entry in zip(record.header["clients"], by_client(record), strict=True)
        for way in ("to", "from")
    ]
    page.tell("bytes_total", "counter", "Bytes to and from a client.", traffic)


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
