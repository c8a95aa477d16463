"""A broker with users, from the outside: who has no login gets nothing on the wires that have one, and users outlive a restart."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from polywire.server.users import add_user
from tests.broker_process import BrokerProcess, child_environment
from tests.unit.protocols.iggy.dialogue import classic

LOGIN, STREAMS, CREATE_STREAM, CREATE_USER = 38, 201, 202, 33


def user_command(*words: str, password: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "polywire", "user", *words],
        input=password + "\n",
        capture_output=True,
        text=True,
        env=child_environment() | {"COLUMNS": "200"},
        check=False,
    )


class Peer:
    """One connection to the Iggy wire."""

    def __init__(self, broker: BrokerProcess) -> None:
        self.socket = socket.create_connection(broker.addresses["iggy"], timeout=10)

    def ask(self, code: int, payload: bytes = b"") -> tuple[int, bytes]:
        self.socket.sendall(classic(code, payload))
        head = self._read(8)
        return int.from_bytes(head[:4], "little"), self._read(int.from_bytes(head[4:], "little"))

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self.socket.recv(size - len(data))
            assert part, "the broker hung up"
            data += part
        return data

    def log_in(self, name: str, password: str) -> int:
        words = bytes((len(name),)) + name.encode() + bytes((len(password),)) + password.encode()
        return self.ask(LOGIN, words + b"\x06\x00\x00\x000.10.0\x00\x00\x00\x00")[0]

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


def test_only_users_get_in(tmp_path: Path) -> None:
    users = tmp_path / "users"
    assert user_command("add", "alice", "--users", str(users), password="wonderland").returncode == 0
    add_user(users, "reader", "looking-glass", "read_streams")
    assert "wonderland" not in users.read_text()
    assert os.stat(users).st_mode & 0o077 == 0
    listed = user_command("list", "--users", str(users), "--output", "csv").stdout.splitlines()
    assert listed == ["user,everything", "alice,True", "reader,False"]
    broker = BrokerProcess(tmp_path / "data", "--users", str(users))
    with broker:
        with Peer(broker) as nobody:
            assert nobody.ask(STREAMS)[0] == 40
        with Peer(broker) as wrong:
            assert wrong.log_in("iggy", "iggy") == 42, "the default user is for open brokers"
            assert wrong.log_in("alice", "wondrland") == 42
            assert wrong.ask(STREAMS)[0] == 40
        with Peer(broker) as alice, Peer(broker) as reader:
            assert alice.log_in("alice", "wonderland") == 0
            assert alice.ask(CREATE_STREAM, b"\x04shop")[0] == 0
            assert alice.ask(CREATE_USER, b"\x03bob\x07builder\x01\x00")[0] == 0
            assert reader.log_in("reader", "looking-glass") == 0
            assert reader.ask(STREAMS)[0] == 0
            assert reader.ask(CREATE_STREAM, b"\x05other")[0] == 41
        broker.kill()
        broker.start()
        with Peer(broker) as bob:
            assert bob.log_in("bob", "builder") == 0
            assert bob.ask(STREAMS)[0] == 41
        assert "wonderland" not in broker.log_text()
