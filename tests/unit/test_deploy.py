"""Deployments as files: what `init` writes, what `check` finds wrong, what `status` tells."""

from __future__ import annotations

import re
import shutil
import stat
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key

from feddrift.cli import app
from feddrift.deploy import make, start
from feddrift.deploy.check import problems
from feddrift.deploy.settings import Settings
from feddrift.errors import ConfigError

OPTIONS = ["--clients", "a,b", "--features", "2", "--classes", "no,yes"]


@pytest.fixture
def made(tmp_path: Path) -> Path:
    make.init(tmp_path / "fed", ["a", "b"], [2], ["no", "yes"], host="fed.example.org", port=18443, inner=18444)
    return tmp_path / "fed"


def wrong(folder: Path) -> str:
    return "\n".join(problem for problem in problems(folder) if "nginx is not installed" not in problem)


def test_init_writes_what_check_takes(made: Path) -> None:
    assert wrong(made) == wrong(made / "server") == wrong(made / "clients" / "a") == ""
    settings = Settings.read(made / "server" / "federation.toml")
    assert settings.clients == ("a", "b") and settings.roster(made / "server" / "keys").n_classes == 2
    assert (made / "clients" / "a" / "data" / "classes.txt").read_text() == "no\nyes\n"


def test_a_new_federation_needs_no_settings_and_an_older_one_stays_what_it_is(made: Path) -> None:
    path = made / "server" / "federation.toml"
    settings = Settings.read(path)
    assert (settings.algorithm, settings.settings, settings.defend) == ("FedDrift-Auto", {}, True)
    trusting = path.read_text().replace("\ndefend = true", "\n# defend = true")
    assert Settings.checked(tomllib.loads(trusting), "here").defend is False
    (line,) = (line for line in path.read_text().splitlines() if "algorithm =" in line)
    path.write_text(path.read_text().replace(line, ""))
    assert Settings.read(path).algorithm == "FedDrift" and wrong(made) == ""
    path.write_text(f"{path.read_text()}delta = 0.2\n")
    assert Settings.read(path).settings == {"delta": 0.2}
    path.write_text(path.read_text().replace("[settings]", f"{line}\n[settings]"))
    assert "FedDrift-Auto has no settings, got 'delta'" in wrong(made)


def test_secrets_are_for_the_owner_alone_and_a_clients_key_stays_with_it(made: Path) -> None:
    secrets = [made / "server" / "ca.key", made / "server" / "server.key", made / "clients" / "a" / "key"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in secrets} == {0o600}
    private = (made / "clients" / "a" / "key").read_text()
    assert all(private not in path.read_text() for path in (made / "server").rglob("*") if path.is_file())
    keys = {(made / "clients" / name / "key").read_text() for name in "ab"}
    assert len(keys) == 2
    load_ssh_private_key(private.encode(), None)


def test_the_certificate_is_for_the_host_and_for_loopback(made: Path) -> None:
    found = x509.load_pem_x509_certificate((made / "server" / "server.crt").read_bytes())
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "fed.example.org"]


def test_the_superlink_is_on_loopback_with_keys_and_no_installs(made: Path) -> None:
    command = " ".join(start.superlink(made / "server"))
    assert "--host 127.0.0.1 --port 18444" in command and "--enable-supernode-auth" in command
    assert "--disable-runtime-dependency-installation" in command and "--insecure" not in command
    quiet = start.environment(made / "server")
    assert (quiet["FLWR_TELEMETRY_ENABLED"], quiet["FLWR_DISABLE_UPDATE_CHECK"]) == ("0", "1")
    assert "--insecure" not in start.supernode(made / "clients" / "a")


def test_the_proxy_forwards_the_fleet_path_only(made: Path) -> None:
    text = (made / "server" / "nginx.conf").read_text()
    assert re.findall(r"location (\S+) ", text) == ["/v1/fleet/", "/"] and "location / { return 403; }" in text
    assert "proxy_ssl_verify on" in text and start.ports(made / "server") == (18443, 18444)


def test_services_start_again(made: Path) -> None:
    units = sorted(made.rglob("*.service"))
    assert [unit.name for unit in units].count("feddrift-client.service") == 2 and len(units) == 4
    for unit in units:
        text = unit.read_text()
        assert re.search(r"Restart=(always|on-failure)", text) and "FLWR_TELEMETRY_ENABLED=0" in text


def test_a_second_init_touches_nothing(made: Path) -> None:
    with pytest.raises(ConfigError, match="not empty"):
        make.init(made, ["a"], [2], ["0", "1"])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"clients": ["a", "a"]}, "different names"),
        ({"clients": ["../x"]}, "a client must be letters"),
        ({"classes": ["0"]}, "classes"),
        ({"experiment": "a b"}, "an experiment must be"),
    ],
)
def test_init_refuses(options: dict[str, object], sentence: str, tmp_path: Path) -> None:
    given = {"clients": ["a"], "features": [2], "classes": ["0", "1"], **options}
    with pytest.raises(ConfigError, match=sentence):
        make.init(tmp_path / "fed", **given)  # type: ignore[arg-type]


def test_add_makes_a_place_behind_the_others(made: Path) -> None:
    make.add(made, "late")
    assert Settings.read(made / "server" / "federation.toml").clients == ("a", "b", "late")
    assert wrong(made) == ""
    with pytest.raises(ConfigError, match="already"):
        make.add(made, "late")


def spoil(made: Path, what: str) -> None:
    server, client = made / "server", made / "clients" / "a"
    if what == "open key":
        (client / "key").chmod(0o644)
    elif what == "other key":
        (client / "key.pub").write_text((made / "clients" / "b" / "key.pub").read_text())
    elif what == "stranger":
        (server / "keys" / "eve.pub").write_text((server / "keys" / "a.pub").read_text())
    elif what == "same key":
        (server / "keys" / "b.pub").write_text((server / "keys" / "a.pub").read_text())
    elif what == "other certificate":
        (server / "server.crt").write_text((server / "ca.crt").read_text())
    elif what == "setting":
        (server / "federation.toml").write_text((server / "federation.toml").read_text().replace("features", "featurs"))
    elif what == "algorithm":
        settings = (server / "federation.toml").read_text()
        (server / "federation.toml").write_text(settings.replace('"FedDrift-Auto"', '"Oracle"'))
    elif what == "quorum":
        (server / "federation.toml").write_text("quorum = 9\n" + (server / "federation.toml").read_text())
    elif what == "client setting":
        (client / "client.toml").write_text('name = "a"\nmax_rws = 3\n')
    elif what == "classes":
        (client / "data" / "classes.txt").unlink()


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("open key", "can be read by others: chmod 600"), ("other key", "is not the public part"),
        ("stranger", "keys of eve"), ("same key", "a key of its own"),
        ("other certificate", "do not fit together|not the key"),
        ("setting", "featurs"), ("algorithm", "Oracle needs the true concepts"),
        ("quorum", r"quorum must be in 1\.\.2, got 9"),
        ("client setting", "max_rws"), ("classes", "classes.txt"),
    ],
)  # fmt: skip
def test_check_says_what_is_wrong(made: Path, what: str, sentence: str) -> None:
    spoil(made, what)
    assert re.search(sentence, wrong(made)), wrong(made)


def test_the_commands(tmp_path: Path) -> None:
    run, fed = CliRunner(), tmp_path / "fed"
    assert run.invoke(app, ["deploy", "init", str(fed), *OPTIONS]).exit_code == 0
    told = run.invoke(app, ["deploy", "check", str(fed)])
    assert "nothing is wrong" in told.output or "nginx is not installed" in told.output
    (fed / "clients" / "a" / "key").chmod(0o644)
    told = run.invoke(app, ["deploy", "check", str(fed)])
    assert told.exit_code == 1 and "chmod 600" in told.output
    assert "no time step" in run.invoke(app, ["deploy", "status", str(fed)]).output


def test_flowers_programs_are_found_without_an_activated_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    found = shutil.which("flower-superexec", path=start.environment(tmp_path)["PATH"])
    assert found is not None and Path(found).parent == Path(sys.executable).parent
