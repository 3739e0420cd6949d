"""Monitoring of a federation: status, metrics and notifications."""

from __future__ import annotations

import json
import shlex
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

from prometheus_client.parser import text_string_to_metric_families

import feddrift as fd
from feddrift.deploy.monitor import alerts, web
from feddrift.deploy.monitor.alerts import Notice, Notifier, audit_change, read_audit_log
from feddrift.deploy.monitor.metrics import MetricsPage, format_metrics
from feddrift.deploy.operate.scaffold import create_deployment
from feddrift.deploy.pki import certificates
from feddrift.deploy.server.loop import federate
from feddrift.deploy.settings import Settings
from feddrift.engines.flower.server.exchange import QuorumError
from feddrift.errors import ConfigError
from feddrift.runs.record import read_all
from tests.support.federation import (
    LEARN,
    edit_body,
    make_federation,
    make_server_folder,
    make_swapping_stream,
    observe_data_requests,
)

FEDDRIFT = fd.algorithm("FedDrift", delta=0.2)
TOLD = [("refused", "b"), ("silent", "b"), ("drift", "c")]


def spoil_update(body: dict[str, Any]) -> None:
    body.update(new=[1e300] * len(body["new"]))


@pytest.fixture
def server(tmp_path: Path) -> Path:
    """The labels of c swap at time 3; b sends nonsense there, and is not connected after that."""
    server, engine = make_server_folder(tmp_path), make_federation(make_swapping_stream(), LEARN)
    engine.n_steps = 4

    def see(t: int) -> None:
        if t == 2:
            engine.local_grid.tamper["b", "evaluate"] = edit_body(spoil_update)
        if t == 3:
            engine.local_grid.offline.add("b")

    observe_data_requests(engine, see)
    list(federate(engine, FEDDRIFT, server / "state"))
    return server


def list_events_and_clients(found: list[Notice]) -> list[tuple[str, str | None]]:
    return [(notice.event, notice.client) for notice in found]


def test_events_are_notified_once(server: Path, tmp_path: Path) -> None:
    script = tmp_path / "tell.py"
    script.write_text(
        "import json, os, sys\n"
        "told = json.load(sys.stdin)\n"
        "assert told['text'] == os.environ['FEDDRIFT_TEXT'] and told['experiment'] == 'test'\n"
        "open('told', 'a').write(os.environ['FEDDRIFT_EVENT'] + ' ' + os.environ['FEDDRIFT_CLIENT'] + '\\n')\n"
    )
    herald = Notifier(server, [shlex.join([sys.executable, str(script)])])
    new = herald.send_new_notices()
    assert list_events_and_clients(new) == [("joined", "a"), ("joined", "b"), ("joined", "c"), *TOLD]
    refused, _, drift = new[3:]
    assert refused.text.startswith("client b: its reply is refused") and refused.when.startswith("20")
    assert (
        drift.when.startswith("time 3 of test, 20")
        and "alarm of client c at time 3: the inputs and the class shares" in drift.text
    )
    assert (server / "told").read_text().splitlines() == ["refused b", "silent b", "drift c"]  # who joined is kept only
    assert herald.send_new_notices() == [] == Notifier(server).send_new_notices() and read_audit_log(server) == new
    with open(server / "state" / "audit.jsonl", "a") as log:
        log.write('{"event": "dri')  # the machine went down
    assert Notifier(server).send_new_notices() == []
    audit_change(server, "a", "its key was renewed")
    assert read_audit_log(server)[-1].client == "a"  # not lost behind the torn line


def test_a_client_falls_silent_and_returns(tmp_path: Path) -> None:
    server, engine = make_server_folder(tmp_path), make_federation(make_swapping_stream(), LEARN)
    engine.n_steps = 4

    def see(t: int) -> None:
        (engine.local_grid.offline.add if t == 2 else engine.local_grid.offline.discard)("b")

    observe_data_requests(engine, see)
    list(federate(engine, FEDDRIFT, server / "state"))
    events = [event for event, client in list_events_and_clients(Notifier(server).send_new_notices()) if client == "b"]
    assert events == ["joined", "silent", "back"]


def test_silence_that_ends_in_a_refusal_is_reported(tmp_path: Path) -> None:
    """b comes late, goes, and returns with nonsense."""
    server, engine = make_server_folder(tmp_path), make_federation(make_swapping_stream(n_steps=6), LEARN)
    engine.n_steps = 6
    engine.local_grid.offline.add("b")

    def see(t: int) -> None:
        (engine.local_grid.offline.add if t == 3 else engine.local_grid.offline.discard)("b")
        if t == 4:
            engine.local_grid.tamper["b", "hello"] = edit_body(lambda body: body.update(cells=[["x", 1]]))

    observe_data_requests(engine, see)
    list(federate(engine, FEDDRIFT, server / "state"))
    events = [event for event, client in list_events_and_clients(Notifier(server).send_new_notices()) if client == "b"]
    assert events == ["joined", "silent", "refused"]


def test_a_lost_quorum_is_reported(tmp_path: Path) -> None:
    server, engine = make_server_folder(tmp_path), make_federation(make_swapping_stream(), LEARN)
    engine.n_steps = 4
    observe_data_requests(engine, lambda t: engine.local_grid.offline.update("abc") if t == 2 else None)
    with pytest.raises(QuorumError) as error:
        list(federate(engine, FEDDRIFT, server / "state"))
    (server / "state" / "server.log").write_text(f"INFO: begins\nERROR: {error.value}\n")
    (last,) = [notice for notice in Notifier(server).send_new_notices() if notice.event == "quorum"]
    assert last.text.startswith("the federation has stopped: ERROR: time 2")
    (server / "state" / "server.log").write_text("2026-11-17 00:54:29,239 INFO hello at time 3: 3 of 3 clients\n")
    (server / "state" / "audit.jsonl").unlink()
    (last,) = [notice for notice in Notifier(server).send_new_notices() if notice.event == "stopped"]
    assert "terminated without an error" in last.text and "hello" not in last.text


def freeze_clock(now: datetime) -> Any:
    """The clock at this time."""

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return now

    return Clock


def test_expiring_certificates_are_reported_in_advance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create_deployment(tmp_path / "fed", ["a"], [2], ["0", "1"])
    server = tmp_path / "fed" / "server"
    days = certificates.read_remaining_days(server)
    assert (
        set(days) == {"ca.crt", "server.crt"} and min(days.values()) > 30 and Notifier(server).send_new_notices() == []
    )
    for passed, told_then in ((0, 0), (370, 2), (371, 0), (392, 2), (396.5, 2)):  # both end together
        left = {name: n - passed for name, n in {"ca.crt": 397.0, "server.crt": 397.0}.items()}
        monkeypatch.setattr(alerts, "read_remaining_days", lambda _, left=left: left)
        monkeypatch.setattr(alerts, "datetime", freeze_clock(datetime.now(UTC) + timedelta(days=passed)))
        assert [notice.event for notice in Notifier(server).send_new_notices()] == ["certificate"] * told_then, passed
    monkeypatch.setattr(alerts, "read_remaining_days", lambda _: {"server.crt": 20.0})  # that of the next year
    assert [notice.event for notice in Notifier(server).send_new_notices()] == ["certificate"]
    audit_change(server, "a", "its place was made")
    assert read_audit_log(server)[-1].text == "its place was made"


def test_a_webhook_gets_it_and_one_that_is_down_stops_nothing(server: Path, caplog: pytest.LogCaptureFixture) -> None:
    heard: list[dict[str, Any]] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with running(ThreadingHTTPServer(("127.0.0.1", 0), Hook)) as hook:
        targets = ["http://127.0.0.1:9/?secret=1", "no-such-command", f"http://127.0.0.1:{hook.server_port}/"]
        Notifier(server, targets).send_new_notices()
    assert [(one["event"], one["client"]) for one in heard] == TOLD
    assert "no-such-command did not receive" in caplog.text and "secret" not in caplog.text


@contextmanager
def running(listening: ThreadingHTTPServer) -> Iterator[ThreadingHTTPServer]:
    thread = threading.Thread(target=listening.serve_forever, daemon=True)
    thread.start()
    try:
        yield listening
    finally:
        listening.shutdown()
        listening.server_close()
        thread.join()


def test_prometheus_reads_the_numbers(server: Path) -> None:
    samples = {
        (sample.name, *(v for k, v in sorted(sample.labels.items()) if k != "experiment")): sample.value
        for family in text_string_to_metric_families(format_metrics(server))
        for sample in family.samples
    }
    record = fd.read(server / "state" / "test.jsonl")[0]
    assert samples["feddrift_clients", "silent"] == 3 and samples["feddrift_running",] == 0  # it has ended
    assert samples["feddrift_time_steps_total",] == 4 and samples["feddrift_alarms_total", "c"] == 1
    assert samples["feddrift_models",] == record.rows.n_models[-1].max()
    assert samples["feddrift_accuracy", "a"] == pytest.approx(record.rows.accuracy[-1, 0])
    trained = [line for line in record.exchanges if line["asked"] == "train"]
    assert samples["feddrift_exchange_seconds_count", "train"] == len(trained) == 8
    assert samples["feddrift_exchange_seconds_sum", "train"] == pytest.approx(sum(line["took"] for line in trained))
    assert samples["feddrift_bytes_total", "a", "to"] == sum(
        line["sent"][line["c"].index(0)] for line in record.exchanges
    )


def test_names_with_quotes_stay_one_label() -> None:
    page = MetricsPage('a"b\\c\nd')
    page.add_metric("x", "gauge", "About.", [({}, 1.0)])
    (family,) = text_string_to_metric_families("\n".join(page.lines) + "\n")
    assert family.samples[0].labels == {"experiment": 'a"b\\c\nd'}


def test_the_page_is_served_to_this_machine_alone(server: Path) -> None:
    def get(where: str, host: str | None = None) -> tuple[int, str]:
        request = urllib.request.Request(f"http://127.0.0.1:{page.server_port}{where}")
        if host:
            request.add_header("Host", host)
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    with running(web.create_web_server(server, 0)) as page:
        assert page.server_address[0] == "127.0.0.1"
        code, text = get("/")
        assert code == 200 and "test · feddrift report" in text
        assert "feddrift_time_steps_total" in get("/metrics")[1]
        assert json.loads(get("/status.json")[1])["status"] == "finished"
        assert get("/state/superlink.db")[0] == 404 and get("/", host="evil.example:80")[0] == 403
        with pytest.raises(ConfigError, match=r"port [0-9]+ cannot be used: Address already in use"):
            web.create_web_server(server, page.server_port)


def test_before_the_first_time_step(tmp_path: Path) -> None:
    server = make_server_folder(tmp_path)
    assert "No time step is done yet" in web.build_response(server, "/")[1]
    assert web.build_response(server, "/status.json")[1] == "null" and "feddrift_running" in format_metrics(server)
    assert Notifier(server).send_new_notices() == []


def test_the_audit_log_is_not_read_as_a_record_and_no_record_has_its_name(server: Path) -> None:
    """It lies beside the record, which reports must go on reading."""
    before = len(read_all(server))
    audit_change(server, None, "an operator looked at it")
    assert len(read_all(server)) == before > 0
    settings = server / "federation.toml"
    settings.write_text(settings.read_text().replace('experiment = "test"', 'experiment = "audit"'))
    with pytest.raises(ConfigError, match="experiment 'audit' is the name of another file"):
        Settings.read(settings)
