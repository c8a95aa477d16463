"""Settings from options, environment and file: precedence, origin of each value, and rejected settings."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import which
from typing import Any

import pytest

from polywire.cli.main import run
from polywire.cli.usage import EXIT_DONE, EXIT_FAILED, EXIT_USAGE
from polywire.server.config import RELOADED
from tests.certificates import Certificates


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def settings(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, tuple[Any, str]]:
    """Return the value and origin of each setting."""
    assert run(["config", "show", "--origin", "--output", "json", *words]) == EXIT_DONE
    return {row["setting"]: (row["value"], row["origin"]) for row in json.loads(capsys.readouterr().out)}


def test_options_override_the_environment_which_overrides_the_file(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = folder / "polywire.toml"
    file.write_text(
        '[serve]\npartitions = 1\nslot_mib = 1\nretention-hours = 1\ndurability = "synced"\nflux-admin = false\n'
    )
    monkeypatch.setenv("POLYWIRE_SERVE_PARTITIONS", "2")
    monkeypatch.setenv("POLYWIRE_SERVE_SLOT_MIB", "20")
    found = settings(capsys, "--slot-mib", "30")
    assert found["slot-mib"] == (30, "option")
    assert found["partitions"] == (2, "POLYWIRE_SERVE_PARTITIONS")
    assert found["retention-hours"] == (1.0, str(file))
    assert found["durability"] == ("synced", str(file))
    assert found["flux-admin"] == (False, str(file))
    assert found["iggy"] == ("127.0.0.1:8090", "default")


def test_config_option_replaces_the_default_file(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "polywire.toml").write_text("[serve]\npartitions = 1\nslot-mib = 20\n")
    other = folder / "other.toml"
    other.write_text("[serve]\npartitions = 5\n")
    for words in (("--config", "other.toml"), ()):
        if not words:
            monkeypatch.setenv("POLYWIRE_SERVE_CONFIG", "other.toml")
        found = settings(capsys, *words)
        assert found["partitions"] == (5, str(other))
        assert found["slot-mib"][1] == "default"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[serve]\npartitons = 1\n", "unknown key 'partitons' in [serve], did you mean 'partitions'?"),
        ("[serve]\ndata_dri = 'x'\n", "unknown key 'data_dri' in [serve], did you mean 'data-dir'?"),
        ("[serve]\nxyzzy = 1\n", "unknown key 'xyzzy' in [serve] ("),
        ("[serve]\nconfig = 'other.toml'\n", "unknown key 'config' in [serve]"),
        ("[serve]\ndata-dir = 'x'\ndata_dir = 'y'\n", "duplicate key 'data-dir' in [serve]"),
        ("[sevre]\npartitions = 1\n", "unknown key 'sevre', did you mean 'serve'?"),
        ("partitions = 1\n", "unknown key 'partitions' (move it below [serve])"),
        ("serve = 1\n", "[serve] must be a table"),
        ("[serve\n", "polywire.toml is not valid TOML"),
        ("[serve]\npartitions = 'many'\n", "partitions"),
        ("[serve]\nusers = ['a', 'b']\n", "users"),
        ("[serve]\ndurability = 'memory'\n", "durability"),
    ],
)
@pytest.mark.parametrize("verb", [("serve",), ("config", "show"), ("config", "check")], ids=" ".join)
def test_an_invalid_settings_file_is_rejected(
    verb: tuple[str, ...], content: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "polywire.toml").write_text(content)
    assert run(list(verb)) == EXIT_USAGE
    assert message in capsys.readouterr().err
    assert not (folder / "polywire-data").exists()


@pytest.mark.parametrize("verb", [("serve",), ("config", "check")], ids=" ".join)
def test_a_missing_settings_file_is_an_error(verb: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*verb, "--config", "missing.toml"]) == EXIT_FAILED
    assert "missing.toml" in capsys.readouterr().err


def test_check_creates_no_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "check", "--flux", "off"]) == EXIT_DONE
    message = capsys.readouterr().err
    assert "kafka on 127.0.0.1:9094" in message
    assert "flux" not in message
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--cursus", "0.0.0.0:1"), "listening on other than loopback addresses needs --users or --insecure"),
        (("--cursus", "nowhere"), "address is invalid (use HOST:PORT or off)"),
        (("--owner-share", "7"), "owner share must be above 0"),
        (("--users", "missing.users"), "missing.users"),
        (("--flux-tls", "127.0.0.1:0"), "a TLS listener needs a certificate"),
        (("--flux-tls", "127.0.0.1:0", "--tls-certificate", "missing.pem"), "missing.pem"),
    ],
    ids=str,
)
def test_check_rejects_settings_that_a_start_rejects(
    options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["config", "check", *options]) == EXIT_FAILED
    assert message in capsys.readouterr().err


@pytest.mark.skipif(which("openssl") is None, reason="links under TLS were NOT checked: no openssl")
def test_check_rejects_a_certificate_that_other_machines_would_reject(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Certificates(tmp_path)
    options = ["--tls-machine-authority", made.path("authority"), "--bucket", f"file://{tmp_path / 'bucket'}"]
    for name, code in (("server", EXIT_DONE), ("client", EXIT_FAILED)):
        tls = ["--tls-certificate", made.path(name), "--tls-key", made.path(name, "key")]
        assert run(["config", "check", *options, *tls]) == code
    assert "use a certificate that names the host" in capsys.readouterr().err


def test_an_unknown_option_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "check", "--partitons", "1"]) == EXIT_USAGE
    assert "--partitions" in capsys.readouterr().err


def test_check_reports_an_unknown_environment_variable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker itself ignores it, because other programs may set such variables."""
    monkeypatch.setenv("POLYWIRE_SERVE_PARTITIONS", "2")
    assert run(["config", "check"]) == EXIT_DONE
    monkeypatch.setenv("POLYWIRE_SERVE_PARTITONS", "2")
    capsys.readouterr()
    assert run(["config", "check"]) == EXIT_USAGE
    expected = "unknown environment variable 'POLYWIRE_SERVE_PARTITONS', did you mean 'POLYWIRE_SERVE_PARTITIONS'?"
    assert expected in capsys.readouterr().err


def test_the_reloaded_settings_are_listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "polywire.toml").write_text('[serve]\nusers = "polywire.users"\n')
    assert run(["config", "show", "--reloaded", "--output", "json"]) == EXIT_DONE
    rows = {row["setting"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows.keys() == RELOADED.keys()
    assert rows["users"]["value"] == "polywire.users"
    assert rows["audit-log"]["sighup"] == "opened again"
    assert run(["config", "show", "--reloaded"]) == EXIT_DONE
    assert "sighup" in capsys.readouterr().out
