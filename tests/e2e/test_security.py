"""Operators rely on these: reloading without a restart, an audit log, and private files."""

from __future__ import annotations

import json
import os
import signal
import stat
import time
import urllib.request
from pathlib import Path

import pytest

from polywire.server.users import add_user, remove_user
from tests.broker_process import WIRES, BrokerProcess
from tests.e2e.test_logins import CREATE_TOKEN, DELETE_USER, ME, assert_ended, logged_in, make_user, named, words
from tests.e2e.test_users import CREATE_STREAM, Peer

RELOADED_S_MAX = 60.0


def hang_up(broker: BrokerProcess, times: int) -> None:
    """Send SIGHUP, and wait until the broker has reloaded that many times in all."""
    os.kill(broker.pid, signal.SIGHUP)
    deadline = time.monotonic() + RELOADED_S_MAX
    while broker.log_text().count("event=reloaded") < times:
        assert not broker.stopped, broker.log_text()
        assert time.monotonic() < deadline, broker.log_text()
        time.sleep(0.02)


def test_sighup_reloads_users_and_keeps_other_connections(tmp_path: Path) -> None:
    users = tmp_path / "users"
    for name in ("alice", "bob"):
        add_user(users, name, "password", "all")
    with BrokerProcess(tmp_path / "data", "--users", str(users)) as broker:
        with logged_in(broker, "alice", "password") as alice, logged_in(broker, "bob", "password") as bob:
            remove_user(users, "bob")
            add_user(users, "carol", "password", "read_streams")
            hang_up(broker, 1)
            assert_ended(bob.socket)
            assert alice.ask(ME)[0] == 0
            with logged_in(broker, "carol", "password") as carol:
                assert carol.ask(CREATE_STREAM, words("shop"))[0] == 41
            for number, content in enumerate(("", "rubbish\n"), 2):
                users.write_text(content)
                hang_up(broker, number)
            users.chmod(0o644)
            hang_up(broker, 4)
            users.unlink()
            hang_up(broker, 5)
            assert alice.ask(ME)[0] == 0
            with Peer(broker) as unauthenticated:
                assert unauthenticated.log_in("iggy", "iggy") == 42, "nothing was opened"
        text = broker.log_text()
        assert [
            word in text for word in ("users file is empty", "not name:hash", "chmod 600", "users file does not exist")
        ] == [True] * 4
        assert broker.stop() == 0


def listed_quotas(broker: BrokerProcess) -> list[tuple[str, float | None, bool]]:
    with urllib.request.urlopen(f"{broker.url('http')}/api/v1/quotas") as answer:
        found = json.load(answer)["quotas"]
    return [(quota["user"] or quota["client_id"], quota["produce"], quota["configured"]) for quota in found]


@pytest.mark.parametrize("processes", [1, 2])
def test_sighup_applies_the_quotas_of_the_settings_file(tmp_path: Path, processes: int) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text('[serve]\nquotas = "user=* produce=1MB; client-id=old produce=5"\n')
    options = ("--config", str(settings), *(("--processes", "2") if processes > 1 else ()))
    with BrokerProcess(tmp_path / "data", *options, wires=[*WIRES, "http"]) as broker:
        expected = [("*", 1e6, True), ("old", 5, True)]
        assert listed_quotas(broker) == expected
        expected = [("*", 2e6, True)]
        for number, content in enumerate(
            (
                '[serve]\nquotas = "user=* produce=2MB"\n',
                "[serve",
                "[serve]\nquotas = 7\n",
                "serve = 7\n",
                '[serve]\nquotas = "user=* produce=fast"\n',
                '[serve]\nquotas = "user=nemo produce=1"\n',
            ),
            1,
        ):
            settings.write_text(content)
            hang_up(broker, number * processes)
            assert listed_quotas(broker) == expected, content
        settings.unlink()
        hang_up(broker, 7 * processes)
        assert listed_quotas(broker) == expected
        settings.write_text("[serve]\n")
        hang_up(broker, 8 * processes)
        assert listed_quotas(broker) == []
        assert broker.log_text().count("what=quotas") == 6 * processes


@pytest.mark.parametrize("origin", ["option", "variable"])
def test_quotas_of_an_option_are_not_replaced_by_the_settings_file(
    tmp_path: Path, origin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, given = tmp_path / "settings.toml", "user=* produce=5"
    settings.write_text('[serve]\nquotas = "user=* produce=1MB"\n')
    if origin == "variable":
        monkeypatch.setenv("POLYWIRE_SERVE_QUOTAS", given)
    options = ("--quotas", given) if origin == "option" else ()
    with BrokerProcess(tmp_path / "data", "--config", str(settings), *options, wires=[*WIRES, "http"]) as broker:
        hang_up(broker, 1)
        assert listed_quotas(broker) == [("*", 5, True)]


def test_the_audit_log_has_logins_and_changes(tmp_path: Path) -> None:
    users, audit = tmp_path / "users", tmp_path / "audit.jsonl"
    add_user(users, "alice", "wonderland", "all")
    options = ("--users", str(users), "--audit-log", str(audit))
    with BrokerProcess(tmp_path / "data", *options) as broker:
        with logged_in(broker, "alice", "wonderland") as alice, Peer(broker) as eve:
            assert eve.log_in("alice\x1b[2J", "guess") == 42
            make_user(alice, "bob")
            with logged_in(broker, "bob", "password") as bob:
                assert bob.ask(CREATE_STREAM, words("shop"))[0] == 41
                assert bob.ask(CREATE_TOKEN, words("token") + bytes(8))[0] == 0
            assert alice.ask(DELETE_USER, named("bob"))[0] == 0
        assert broker.stop() == 0
        lines = [json.loads(line) for line in audit.read_text().splitlines()]
        reported = [(line["action"], line["outcome"], line.get("user"), line.get("resource")) for line in lines]
        for expected in (
            ("user.configure", "allowed", None, "alice"),
            ("login", "allowed", "alice", None),
            ("login", "refused", "alice\x1b[2J", None),
            ("user.create", "allowed", "alice", "bob"),
            ("login", "allowed", "bob", None),
            ("token.create", "allowed", "bob", "bob/token"),
            ("user.delete", "allowed", "alice", "bob"),
        ):
            assert expected in reported, reported
        assert [line for line in lines if line["outcome"] == "refused" and line.get("user") == "bob"], lines
        assert all(line["peer"].startswith("127.0.0.1:") for line in lines if line["action"] == "login")
        assert stat.S_IMODE(audit.stat().st_mode) == 0o600
        assert not [word for word in ("wonderland", "guess") if f'"{word}"' in audit.read_text()]
        assert "\x1b" not in audit.read_text() + broker.log_text()
        assert "logger=polywire.audit" in broker.log_text()


def test_files_of_the_broker_are_private(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir(0o755)
    data.chmod(0o755)
    with BrokerProcess(data) as broker:
        assert stat.S_IMODE(data.stat().st_mode) == 0o700
        assert "restricted permissions" in broker.log_text()
        paths = [path for path in data.rglob("*") if path.name != "LOCK"]
        assert paths
        assert not [path for path in paths if path.stat().st_mode & 0o077], "nothing is accessible to other users"
        assert broker.stop() == 0
