"""Creation of a federation for `feddrift deploy init`: certificates, keys, settings, proxy and service units."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cryptography import x509

from feddrift.algorithms import RECOMMENDED
from feddrift.deploy.files import write_new_file
from feddrift.deploy.monitor.alerts import audit_change
from feddrift.deploy.operate.client_keys import generate_key_pair
from feddrift.deploy.pki import app_signature, certificates
from feddrift.deploy.processes import proxy
from feddrift.deploy.processes.launcher import find_server_folder, read_ports
from feddrift.deploy.settings import Settings
from feddrift.engines.flower.client.store import check_name
from feddrift.errors import ConfigError

UNIT_TEMPLATE = """\
[Unit]
Description=feddrift {description}
After=network-online.target{after}
Wants=network-online.target
StartLimitIntervalSec=0

[Service]
ExecStart={python} -m feddrift deploy {command} {folder}
Restart={restart}
RestartSec={seconds}
Environment=FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1
Environment=NUMBA_CACHE_DIR={folder}/cache
NoNewPrivileges=yes
PrivateTmp=yes
ProtectSystem=strict
ReadWritePaths={folder}

[Install]
WantedBy=multi-user.target
"""

POLICY_TABLE = """
[policy]                    # what the server may request (docs/deploy-policy.md)
min_rows = 10               # rows that an update is trained on; smaller batches of data are not used
min_batch = 10              # rows of a local step of such an update
min_steps = 5               # local steps of such an update
allow_sgd = false           # true: also sgd, which Adaptive-FedAvg, FedCCFA-Heads and Flash need
max_requests = 2000         # models to score or to train per time step; each round counts
max_steps = 1000000         # local steps per time step
max_memory = 8              # GB that a request may need
pin = true                  # false: the net, the algorithm and the training settings may change at any time
"""

APP_PROJECT = """\
[project]
name = "feddrift-app"
version = "0.1.0"
description = "feddrift over Flower"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "feddrift"

[tool.flwr.app.components]
serverapp = "feddrift_server:app"
clientapp = "feddrift_client:app"

[tool.flwr.app.config]
folder = ""
"""


def create_deployment(
    folder: Path,
    clients: Sequence[str],
    features: Sequence[int],
    classes: Sequence[str],
    *,
    host: str = "localhost",
    bind: str | None = None,
    port: int = 9443,
    inner: int = 9444,
    experiment: str = "first",
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Create a new federation: a folder for the server and one for each client.

    Args:
        folder: The new folder, which may exist if it is empty.
        clients: The names of the clients.
        features: The shape of one input.
        classes: The labels of the classes.
        host: The name or address by which clients reach the server.
        bind: The address on which the proxy listens; None: all.
        port: The port of the proxy, which clients reach.
        inner: The port of the SuperLink behind it, on this machine.
        experiment: The name of the federation and its record.
        settings: Further settings of federation.toml.

    Raises:
        ConfigError: If the folder is not empty or a setting is not allowed.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty: a new federation needs a new folder")
    values: dict[str, Any] = {
        "experiment": experiment,
        "clients": [check_name(name, "a client") for name in clients],
        "features": list(features),
        "classes": list(classes),
        "algorithm": RECOMMENDED,
        "defend": "robust",
        **(settings or {}),
    }
    Settings.from_dict(values, "the options")
    if port == inner:
        raise ConfigError(f"the ports of the proxy and of the SuperLink must be different, got {port} for both")
    proxy.format_listen_directives(bind, port)  # raises an error for a wrong address before anything is written
    server = (folder / "server").resolve()
    for path in (folder, server, server / "keys", server / "state", server / "app", server / "flwr"):
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o700)
    certificates.create_certificates(server, host)
    write_new_file(server / "federation.toml", _format_settings(values))
    write_new_file(server / "nginx.conf", proxy.format_nginx_config(server, bind, port, inner))
    write_new_file(server / "app" / "pyproject.toml", APP_PROJECT)
    write_new_file(
        server / "app" / "feddrift_server.py",
        "from feddrift.deploy.server.loop import app\n\n__all__ = ['app']\n",
    )
    write_new_file(
        server / "app" / "feddrift_client.py",
        "from feddrift.engines.flower.client.client import app\n\n__all__ = ['app']\n",
    )
    app_signature.sign_app(server)
    link = f'address = "127.0.0.1:{inner}"\nroot-certificates = {json.dumps(str(server / "ca.crt"))}\n'
    write_new_file(server / "flwr" / "config.toml", f'[superlink]\ndefault = "local"\n\n[superlink.local]\n{link}')
    _write_unit(server / "feddrift-server.service", "server", server, "SuperLink and proxy", "always", 10)
    _write_unit(
        server / "feddrift-run.service", "run", server, "federation", "on-failure", 30, " feddrift-server.service"
    )
    for name in clients:
        _create_client_folder(
            folder.resolve() / "clients" / name, server, name, proxy.format_address(host, port), classes
        )


def add_client(folder: Path, name: str) -> None:
    """Add a client after the existing ones; a running federation includes it when `feddrift deploy run` starts again.

    Only the server's folder is needed: the folders of the other clients may be on their machines.

    Args:
        folder: The deployment or the server's folder; the client's folder is created in its subfolder `clients`.
        name: The new client.

    Raises:
        ConfigError: If the name is in use, or a file of the client exists, or federation.toml cannot be edited.
    """
    server = find_server_folder(folder)
    path = server / "federation.toml"
    client = folder.resolve() / "clients" / check_name(name, "a client")
    settings = Settings.read(path)
    if name in settings.clients:
        raise ConfigError(f"{path} already has a client {name}: choose another name")
    for old in (client, server / "keys" / f"{name}.pub"):
        if old.exists():
            raise ConfigError(f"{old} exists already: move it away, or choose another name")
    address = proxy.format_address(_read_host(server / "server.crt"), read_ports(server)[0])
    line = f"clients = {json.dumps([*settings.clients, name])}"
    text, replacements = re.subn(r"(?m)^clients *= *\[[^]]*\]", line, path.read_text())
    if not replacements:
        raise ConfigError(f"{path} has no list of clients in one pair of brackets: add {name!r} to its clients by hand")
    app_signature.sign_app(server)
    _create_client_folder(client, server, name, address, [str(label) for label in settings.classes])
    path.write_text(text)
    audit_change(server, name, f"client {name} was added")


def _read_host(certificate: Path) -> str:
    """Return the server's name or address for clients: the first in its certificate that is not the loopback's."""
    try:
        loaded = x509.load_pem_x509_certificate(certificate.read_bytes())
        names = loaded.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, x509.ExtensionNotFound) as error:
        raise ConfigError(f"cannot read the server's name in {certificate}: {error}") from None
    hosts = [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]
    return next((host for host in hosts if host not in ("localhost", "127.0.0.1")), "localhost")


def _create_client_folder(folder: Path, server: Path, name: str, address: str, classes: Sequence[str]) -> None:
    """Create the folder to copy to a client's machine; only this folder contains the client's private key."""
    (folder / "data").mkdir(parents=True)
    folder.chmod(0o700)
    private, public = generate_key_pair(name)
    write_new_file(folder / "key", private, secret=True)
    write_new_file(folder / "key.pub", public)
    write_new_file(server / "keys" / f"{name}.pub", public)
    for shared in ("ca.crt", app_signature.TRUSTED_FILE):
        write_new_file(folder / shared, (server / shared).read_text())
    write_new_file(folder / "data" / "classes.txt", "".join(f"{label}\n" for label in classes))
    write_new_file(
        folder / "client.toml",
        f"name = {json.dumps(name)}\nserver = {json.dumps(address)}\n"
        '# data = "data"             # its batches: data/step_<n>.csv or .npz, n = 0, 1, ..., moved there complete\n'
        '# label = "label"           # the column of the labels\n'
        '# load = "mine:load"        # or load(n) in mine.py, which returns (x, y), or None if n has not arrived\n'
        '# model = "mine:model"      # or linear, mlp:64,64; as in federation.toml\n'
        "# max_rows = 100000         # maximum number of stored rows\n"
        "# max_age = 50              # maximum age of stored rows in time steps\n"
        "# explain = true            # false: the server is not sent what changed in the data at an alarm\n"
        "# describe = false          # true: send means by class, which FLUX, FEROMA and route need\n"
        "# look = 3                  # maximum seconds between polls for messages\n"
        "# warm = true               # false: a new Python process per message: slower, needs less memory\n"
        + POLICY_TABLE,
    )
    _write_unit(folder / "feddrift-client.service", "client", folder, f"client {name}", "always", 20)


def _format_settings(values: Mapping[str, object]) -> str:
    """Return the text of federation.toml: the given settings, and all others with their defaults as comments."""
    lines = []
    for name, field in Settings.model_fields.items():
        about = f"  # {field.description}" if field.description else ""
        if name in values:
            lines.append(f"{name} = {json.dumps(values[name])}{about}")
        elif name != "settings":
            example = {"time_steps": 100, "model": "mine:model"}.get(name, field.default)
            lines.append(f"# {name} = {json.dumps(example)}{about}")
    return "\n".join([*lines, "", f"[settings]  # of the algorithm; {RECOMMENDED} has none", "# delta = 0.1", ""])


def _write_unit(
    path: Path, command: str, folder: Path, description: str, restart: str, seconds: int, after: str = ""
) -> None:
    """Write the unit file of a systemd service.

    Args:
        path: The new file.
        command: The subcommand of `feddrift deploy` that the service runs.
        folder: The folder of the server or client.
        description: The description of the service.
        restart: systemd's rule for a restart.
        seconds: The pause before a restart.
        after: A unit that must start first, after a space.
    """
    values = {"description": description, "after": after, "python": sys.executable, "command": command}
    write_new_file(path, UNIT_TEMPLATE.format(**values, folder=folder, restart=restart, seconds=seconds))
