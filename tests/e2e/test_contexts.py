"""Contexts against a broker with users: over the protocol and HTTP, with the password from a command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from polywire.server.users import add_user
from tests.broker_process import BrokerProcess, child_environment


def test_a_context_logs_in_over_every_listener(tmp_path: Path) -> None:
    users, secret = tmp_path / "users", tmp_path / "secret"
    add_user(users, "alice", "secret")
    secret.write_text("secret\n")
    environment = {**child_environment(), "XDG_CONFIG_HOME": str(tmp_path / "config")}
    del environment["POLYWIRE_CONTEXT"]

    def command(*words: str) -> tuple[int, str]:
        found = subprocess.run(
            [sys.executable, "-m", "polywire", *words], env=environment, capture_output=True, text=True, check=False
        )
        return found.returncode, found.stdout + found.stderr

    with BrokerProcess(tmp_path / "data", "--users", str(users), wires=["polywire", "kafka", "http"]) as broker:
        for name in ("polywire", "kafka"):
            addresses = ("--address", broker.url(name), "--http", broker.url("http"))
            login = ("--user", "alice", "--password-command", f"cat {secret}")
            assert command("context", "add", name, *addresses, *login)[0] == 0
        assert command("topic", "create", "orders", "--partitions", "2")[0] == 0
        code, text = command("--context", "kafka", "topic", "list", "--output", "csv")
        assert (code, "orders,2" in text) == (0, True), text
        assert command("quota", "set", "--user", "alice", "--requests", "1000")[0] == 0
        code, text = command("topic", "list", "--address", broker.url("polywire").replace("://", "://alice@"))
        assert (code, "user has no password" in text) == (1, True), text
