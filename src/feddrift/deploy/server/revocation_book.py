"""The revocations of a running federation: those of the server's list, and what clients report about them."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from feddrift._internal.system import atomic_write
from feddrift.deploy.pki.revocations import REPORTED_SERIALS_FILE, read_reported_serials
from feddrift.deploy.processes import launcher
from feddrift.engines.flower.revocations import (
    REVOCATIONS_FILE,
    Revocation,
    find_highest_serial,
    read_revocations,
)
from feddrift.engines.flower.serialization import InvalidMessageError
from feddrift.errors import DataError, FeddriftError

_log = logging.getLogger("feddrift")


class ServerRevocations:
    """Revocations in a server's folder, for the connection to its clients.

    The file is read again when it changes. If it is damaged, the last intact content is used.
    """

    def __init__(self, server: Path) -> None:
        self.server = server
        self._stamp: tuple[int, int] | None = None
        self._revocations: tuple[Revocation, ...] = ()

    def read(self) -> Sequence[Revocation]:
        """Return all revocations."""
        path = self.server / REVOCATIONS_FILE
        try:
            status = path.stat()
            stamp = status.st_mtime_ns, status.st_ino
            if stamp != self._stamp:
                self._stamp = stamp
                self._revocations = tuple(read_revocations(path)[0])
        except FileNotFoundError:
            self._revocations = ()
            self._stamp = None
        except (OSError, DataError) as error:
            _log.warning("the server continues with the revocations that it has read before: %s", error)
        return self._revocations

    def adopt(self, client: str, revocations: Sequence[Revocation]) -> None:
        """Add revocations that a client has reported, and exclude their keys."""
        try:
            launcher.exclude_revoked_keys(self.server, reported=revocations)
        except FeddriftError as error:
            raise InvalidMessageError(
                f"{error}: if the authority was renewed after the backup, copy the client's ca.crt to the server"
            ) from None
        launcher.update_running_server(self.server)

    def note_serial(self, client: str, serial: int) -> None:
        """Store the highest serial number that a client has received, and report it if the server's is lower."""
        highest = find_highest_serial(self.read())
        if serial > highest:
            text = (
                "client %s has seen revocation %d, but the list of this server ends at %d: see `feddrift deploy check`"
            )
            _log.warning(text, client, serial, highest)
        serials = read_reported_serials(self.server)
        if serials.get(client) != serial:
            try:
                content = json.dumps(serials | {client: serial}, indent=1)
                atomic_write(self.server / "state" / REPORTED_SERIALS_FILE, f"{content}\n".encode())
            except DataError as error:
                _log.warning("%s", error)
