"""Web server on the loopback interface of the server: a federation's live page, its metrics and its status."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from feddrift.deploy.monitor.metrics import format_metrics
from feddrift.deploy.monitor.status import read_status
from feddrift.errors import ConfigError
from feddrift.reports.page import build_page
from feddrift.reports.page.data import collect_page_data

PATHS = {"/": "the page", "/metrics": "for Prometheus", "/status.json": "as `feddrift deploy status --json`"}
EMPTY_PAGE = '<meta http-equiv="refresh" content="5"><title>feddrift</title><p>No time step is done yet.'


def create_web_server(server: Path, port: int) -> ThreadingHTTPServer:
    """Return a web server for the federation of a server's folder; `serve_forever` runs it.

    It listens on 127.0.0.1 only, so other machines cannot reach it.

    Raises:
        ConfigError: If the port cannot be used.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            host = (self.headers.get("Host") or "").rpartition(":")[0] or self.headers.get("Host")
            if host not in ("127.0.0.1", "localhost"):  # against DNS rebinding: a foreign page must not read this one
                self._send_text(403, "text/plain", "use the address 127.0.0.1 or localhost\n")
                return
            path = self.path.partition("?")[0]
            if path not in PATHS:
                self._send_text(404, "text/plain", f"the paths are {', '.join(PATHS)}\n")
                return
            self._send_text(200, *build_response(server, path))

        def _send_text(self, code: int, content_type: str, text: str) -> None:
            body = text.encode()
            self.send_response(code)
            self.send_header("Content-Type", f"{content_type}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    try:
        return ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        raise ConfigError(f"port {port} cannot be used: {error.strerror}; choose another with --port") from None


def build_response(server: Path, path: str) -> tuple[str, str]:
    """Return the content type and the text of one of `PATHS`."""
    if path == "/metrics":
        return "text/plain; version=0.0.4", format_metrics(server)
    federation = read_status(server)
    if path == "/status.json":
        return "application/json", json.dumps(None if federation is None else federation.to_dict())
    if federation is None or not federation.record.rows.steps:
        return "text/html", EMPTY_PAGE
    return "text/html", build_page(collect_page_data([federation.record], federation.record.header["stream"]))
