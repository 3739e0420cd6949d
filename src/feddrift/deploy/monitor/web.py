"""The live page of a federation, its metrics and its status, on the server's loopback."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from feddrift.deploy.monitor.metrics import format_metrics
from feddrift.deploy.monitor.status import read_status
from feddrift.errors import ConfigError
from feddrift.reports.page import build_page
from feddrift.reports.page.data import collect_page_data

PATHS = {"/": "the page", "/metrics": "for Prometheus", "/status.json": "as `feddrift deploy status --json` has it"}
EMPTY_PAGE = '<meta http-equiv="refresh" content="5"><title>feddrift</title><p>No time step is done yet.'


def create_web_server(server: Path, port: int) -> ThreadingHTTPServer:
    """A web server of this federation, which nobody but this machine can reach; `serve_forever` runs it."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            host = (self.headers.get("Host") or "").rpartition(":")[0] or self.headers.get("Host")
            if host not in ("127.0.0.1", "localhost"):  # a page elsewhere must not read this by a name of its own
                self._answer(403, "text/plain", "ask for 127.0.0.1 or localhost\n")
                return
            where = self.path.partition("?")[0]
            if where not in PATHS:
                self._answer(404, "text/plain", f"there are {', '.join(PATHS)}\n")
                return
            self._answer(200, *build_response(server, where))

        def _answer(self, code: int, kind: str, text: str) -> None:
            body = text.encode()
            self.send_response(code)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    try:
        return ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        raise ConfigError(f"port {port} cannot be used: {error.strerror}; --port names another") from None


def build_response(server: Path, where: str) -> tuple[str, str]:
    """The kind and text of what is there now."""
    if where == "/metrics":
        return "text/plain; version=0.0.4", format_metrics(server)
    federation = read_status(server)
    if where == "/status.json":
        return "application/json", json.dumps(None if federation is None else federation.plain())
    if federation is None or not federation.record.rows.steps:
        return "text/html", EMPTY_PAGE
    return "text/html", build_page(collect_page_data([federation.record], federation.record.header["stream"]))
