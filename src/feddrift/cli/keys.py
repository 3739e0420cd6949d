"""`feddrift deploy renew`, `rotate`, `revoke` and `keys`: certificates and keys of a deployment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from feddrift.cli.console import print_line
from feddrift.errors import ConfigError

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="the deployment, or the folder of this machine")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="name of the client")]
AuthorityKey = Annotated[Path | None, typer.Option(help="path of ca.key, if it is not in the server's folder")]


def renew_certificate(
    folder: Folder,
    ca_key: AuthorityKey = None,
    ca: Annotated[
        bool, typer.Option("--ca", help="create a new authority; clients need its certificate first")
    ] = False,
) -> None:
    """Create a new certificate of the server, for the same names, with the authority that clients trust."""
    from feddrift.deploy.monitor import alerts
    from feddrift.deploy.pki import certificates
    from feddrift.deploy.processes import launcher

    server = launcher.find_server_folder(folder)
    if ca:
        ends = certificates.renew_authority(server, ca_key)
        alerts.audit_change(server, None, f"there is a new authority until {ends.date()}")
        print_line(f"{server / 'ca.crt'} now trusts a new authority, until {ends.date()}, beside the old one")
        print_line("1. copy it to every client in place of its ca.crt, and restart the clients one by one")
        print_line("2. then run `feddrift deploy renew`, which makes the server's certificate with the new authority")
        return
    ends = certificates.renew_server_certificate(server, ca_key)
    alerts.audit_change(server, None, f"the server has a new certificate until {ends.date()}")
    print_line(f"{server / 'server.crt'} is valid until {ends.date()}; the old one is beside it, server.crt.old")
    print_line("start server and run again: they use it from then on; clients reconnect by themselves")


def rotate_key(
    folder: Folder,
    name: Name,
    key: Annotated[Path | None, typer.Option(help="at the server: the file key.pub of the client")] = None,
    ca_key: AuthorityKey = None,
) -> None:
    """Replace the key of a client: create it in the client's folder, and accept it in the server's folder."""
    from feddrift.deploy.operate import client_keys

    server, client = client_keys.find_folders(folder, name)
    if server is None and key is not None:
        raise ConfigError(f"--key is an option for the server's folder, and {folder} is a client's folder")
    if server is not None:
        client_keys.check_client_name(server, name)
    if server is not None and client is None and key is None:
        raise ConfigError(
            f"the key of client {name} is made in its own folder with `feddrift deploy rotate DIR {name}`: copy the "
            "key.pub that this command writes to the server, and name it here with --key"
        )
    if key is None and client is not None:
        key = client_keys.replace_client_key(client, name)
        print_line(f"{client} has a new key; the old one is beside it, key.old")
    if server is None or key is None:
        print_line(f"copy {key} to the server: `feddrift deploy rotate DIR {name} --key key.pub`")
        print_line("a running client uses its old key until then, and reconnects with the new one by itself")
    elif client_keys.accept_new_key(server, name, key, ca_key):
        print_line(f"the server knows the new key of client {name}, and no longer the old one")
    else:
        print_line(f"the server will know the new key of client {name}, and no longer the old one, once it is started")


def revoke_client(folder: Folder, name: Name, ca_key: AuthorityKey = None) -> None:
    """Revoke the key of a client permanently; `rotate` can give the client another key later."""
    from feddrift.deploy.operate import client_keys
    from feddrift.deploy.processes import launcher

    done = client_keys.revoke_client(launcher.find_server_folder(folder), name, ca_key)
    print_line(f"client {name} is shut out" + ("" if done else " when the server is started"))


def list_keys(
    folder: Folder,
    confirm: Annotated[
        bool,
        typer.Option("--confirm", help="confirm the keys that a backup has brought back, so that the server starts"),
    ] = False,
    ca_key: AuthorityKey = None,
) -> None:
    """List the keys and revocations of a server; sign the revocations, and compare them with the authority's copy."""
    from feddrift.deploy.operate import client_keys
    from feddrift.deploy.processes import launcher

    server = launcher.find_server_folder(folder)
    revocations, unsigned = client_keys.sign_revocations(server, ca_key)
    launcher.update_running_server(server)
    print_keys(server)
    for entry in revocations:
        note = ", not signed by the authority: see --ca-key" if entry in unsigned else ""
        print_line(f"revocation {entry.serial}: client {entry.client}, key {entry.short_key}, {entry.day}{note}")
    if not confirm:
        return
    if client_keys.confirm_keys(server):
        print_line("the keys are confirmed: the server may start")
    else:
        print_line("the keys need no confirmation: they were not restored from a backup, or are confirmed already")


def print_keys(server: Path) -> None:
    """Print one line for each key that a server accepts."""
    from feddrift.deploy.operate import client_keys

    for key in client_keys.list_client_keys(server):
        print_line(f"client {key.client}: key {key.short_digest}, since {key.since}")
