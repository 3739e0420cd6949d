"""Configuration of nginx, the proxy in front of the SuperLink: the only port that is open to the network."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path

from feddrift.errors import ConfigError

MAX_REQUEST_SIZE = "16m"  # Flower sends large objects in pieces of 5 MB
# Limits per address, which may be shared by 40 clients with up to 4 connections each. Faster requests are delayed. More
# requests at once than all these clients send are refused with code 503, and Flower tries again.
MAX_CONNECTIONS_PER_ADDRESS = 256
REQUESTS_PER_SECOND = 200
MAX_IMMEDIATE_REQUESTS = 400

NGINX_TEMPLATE = """\
# Clients connect to this proxy. It passes on only the fleet API: the SuperLink's control API has no authentication.
daemon off;
worker_processes auto;
worker_rlimit_nofile 4096;
pid {state}/nginx.pid;
error_log {state}/nginx.log warn;
events {{ worker_connections 2048; }}
http {{
  access_log off;
  server_tokens off;
  client_body_temp_path {state}/nginx-body;
  proxy_temp_path {state}/nginx-proxy;
  fastcgi_temp_path {state}/nginx-fastcgi;
  uwsgi_temp_path {state}/nginx-uwsgi;
  scgi_temp_path {state}/nginx-scgi;
  limit_conn_zone $binary_remote_addr zone=from:1m;
  limit_req_zone $binary_remote_addr zone=requests:1m rate={rate}r/s;
  client_header_timeout 10s;  # a client that sends its request byte by byte must not block a connection
  client_body_timeout 30s;
  server {{
    {listen}
    ssl_certificate {server}/server.crt;
    ssl_certificate_key {server}/server.key;
    ssl_protocols TLSv1.2 TLSv1.3;
    client_max_body_size {max_request};
    limit_conn from {connections};
    limit_req zone=requests burst={burst} delay={at_once};
    client_body_buffer_size 64k;
    location /v1/fleet/ {{
      proxy_pass https://127.0.0.1:{inner};
      proxy_http_version 1.1;
      proxy_ssl_verify on;
      proxy_ssl_trusted_certificate {server}/ca.crt;
      proxy_ssl_name localhost;
      proxy_read_timeout 300s;
      proxy_request_buffering off;  # no temporary files: workers may not enter this folder
      proxy_max_temp_file_size 0;
    }}
    location / {{ return 403; }}
  }}
}}
"""


def format_nginx_config(server: Path, bind: str | None, port: int, inner: int) -> str:
    """Return the content of nginx.conf.

    Args:
        server: The server's folder.
        bind: The address at which nginx listens; None: all addresses.
        port: The port to which clients connect.
        inner: The SuperLink's own port.

    Raises:
        ConfigError: If `bind` is not an address.
    """
    return NGINX_TEMPLATE.format(
        state=server / "state",
        server=server,
        listen=format_listen_directives(bind, port),
        inner=inner,
        max_request=MAX_REQUEST_SIZE,
        connections=MAX_CONNECTIONS_PER_ADDRESS,
        rate=REQUESTS_PER_SECOND,
        at_once=MAX_IMMEDIATE_REQUESTS,
        burst=MAX_IMMEDIATE_REQUESTS + MAX_CONNECTIONS_PER_ADDRESS,
    )


def format_listen_directives(bind: str | None, port: int) -> str:
    """Return nginx's `listen` directives: for one address, or for all of this machine, with IPv6 if it is available."""
    if bind is None:
        return f"listen {port} ssl;" + (f"\n    listen [::]:{port} ssl;" if _has_ipv6() else "")
    try:
        return f"listen {format_address(str(ipaddress.ip_address(bind)), port)} ssl;"
    except ValueError:
        raise ConfigError(f"--bind must be an IP address of the server, e.g. 192.0.2.1 or ::1, got {bind!r}") from None


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::", 0))
    except OSError:
        return False
    return True


def format_address(host: str, port: int) -> str:
    """Return host and port as one text, in the format of nginx and Flower."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
