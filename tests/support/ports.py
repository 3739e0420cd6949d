"""Ports of loopback for servers that tests start, also if several checks run on one machine."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path
from typing import IO

PORTS = range(20_000, 30_000)  # below the range from which the kernel takes ports of outgoing connections
_reserved: list[IO[str]] = []  # locked while this process runs


def reserve_port() -> int:
    """Return a port that no process listens on and that no other test process gets until this process ends."""
    folder = Path(tempfile.gettempdir()) / f"feddrift-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    for port in random.sample(PORTS, len(PORTS)):
        file = open(folder / str(port), "w")  # noqa: SIM115  (the lock ends with the file)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            continue
        if is_free(port):
            _reserved.append(file)
            return port
        file.close()
    raise OSError(f"no port of {PORTS} is free")


def is_free(port: int) -> bool:
    """Return whether a server could listen on the port at every address of this machine."""
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
