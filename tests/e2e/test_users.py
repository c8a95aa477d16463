"""A broker with users: protocols with a login require it, and users survive restarts."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from itertools import product
from pathlib import Path

import pytest

from polywire.client import bulk, sync
from polywire.errors import Denied, ErrorCode
from polywire.protocols.iggy.messages import PermissionFlags, permission_bytes
from polywire.records.columns import Record
from polywire.server.users import add_user
from tests import fork_server
from tests.broker_process import BrokerProcess, child_environment
from tests.unit.protocols.iggy.dialogue import classic

LOGIN, STREAMS, CREATE_STREAM, CREATE_USER, DELETE_USER = 38, 201, 202, 33, 34


def user_command(*words: str, password: str = "") -> subprocess.CompletedProcess[str]:
    return fork_server.run(
        [sys.executable, "-m", "polywire", "user", *words],
        input=password + "\n",
        text=True,
        env=child_environment() | {"COLUMNS": "200"},
    )


class Peer:
    """One connection to the Iggy protocol."""

    def __init__(self, broker: BrokerProcess) -> None:
        self.socket = socket.create_connection(broker.addresses["iggy"], timeout=60)

    def ask(self, code: int, payload: bytes = b"") -> tuple[int, bytes]:
        self.socket.sendall(classic(code, payload))
        head = self._read(8)
        return int.from_bytes(head[:4], "little"), self._read(int.from_bytes(head[4:], "little"))

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self.socket.recv(size - len(data))
            assert part, "the broker closed the connection"
            data += part
        return data

    def log_in(self, name: str, password: str) -> int:
        words = bytes((len(name),)) + name.encode() + bytes((len(password),)) + password.encode()
        return self.ask(LOGIN, words + b"\x06\x00\x00\x000.10.0\x00\x00\x00\x00")[0]

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


def test_only_users_can_log_in(tmp_path: Path) -> None:
    users = tmp_path / "users"
    assert user_command("add", "alice", "--users", str(users), password="wonderland").returncode == 0
    add_user(users, "reader", "looking-glass", "read_streams")
    assert "wonderland" not in users.read_text()
    assert os.stat(users).st_mode & 0o077 == 0
    listed = user_command("list", "--users", str(users), "--output", "csv").stdout.splitlines()
    assert listed == ["user,everything,scram,permissions", "alice,True,False,all", "reader,False,False,read_streams"]
    broker = BrokerProcess(tmp_path / "data", "--users", str(users))
    with broker:
        with Peer(broker) as unauthenticated:
            assert unauthenticated.ask(STREAMS)[0] == 40
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


def test_altered_permissions_apply_to_open_connections_after_a_reload(tmp_path: Path) -> None:
    users = tmp_path / "users"
    add_user(users, "alice", "wonderland", "read_streams")
    with BrokerProcess(tmp_path / "data", "--users", str(users)) as broker, Peer(broker) as alice:
        assert alice.log_in("alice", "wonderland") == 0
        assert alice.ask(CREATE_STREAM, b"\x04shop")[0] == 41
        altered = user_command("alter", "alice", "--permissions", "manage_streams", "--users", str(users))
        assert altered.returncode == 0, altered.stderr
        assert "permissions=manage_streams" in altered.stderr
        assert alice.ask(CREATE_STREAM, b"\x04shop")[0] == 41, "the broker has not read the file yet"
        os.kill(broker.pid, signal.SIGHUP)
        end = time.monotonic() + 60
        while alice.ask(CREATE_STREAM, b"\x04shop")[0] != 0:
            assert time.monotonic() < end, broker.log_text()
            time.sleep(0.05)


def polywire(place: str, *words: str, password: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command against the broker at this address."""
    known = {} if password is None else {"POLYWIRE_PASSWORD": password}
    environment = child_environment() | {"POLYWIRE_ADDRESS": f"polywire://{place}", "COLUMNS": "200"} | known
    return fork_server.run([sys.executable, "-m", "polywire", *words], text=True, env=environment)


def test_the_polywire_protocol_and_its_clients_log_in(tmp_path: Path) -> None:
    users = tmp_path / "users"
    add_user(users, "alice", "wonder/land", "all")
    add_user(users, "reader", "looking-glass", "consume@default/orders")
    with BrokerProcess(tmp_path / "data", "--users", str(users)) as broker:
        host, port = broker.addresses["polywire"]
        place = f"{host}:{port}"
        refused = polywire(place, "topic", "list")
        assert refused.returncode == 1
        assert "log in first" in refused.stderr
        assert "polywire://name:password@host:port" in refused.stderr
        made = polywire(f"alice@{place}", "topic", "create", "orders", "--partitions", "1", password="wonder/land")
        assert made.returncode == 0, made.stderr
        assert polywire(f"alice:wonder%2Fland@{place}", "topic", "create", "other").returncode == 0
        wrong = polywire(f"alice@{place}", "topic", "list", password="wonderland")
        assert "wrong user or password" in wrong.stderr
        assert "wonderland" not in wrong.stderr
        alone = polywire(f"alice@{place}", "topic", "list")
        assert "set the variable POLYWIRE_PASSWORD" in alone.stderr
        with sync.connect(f"polywire://alice:wonder%2Fland@{place}") as alice:
            alice.produce("orders", [Record(b"v")])
        with sync.connect(f"polywire://reader:looking-glass@{place}") as reader:
            assert [topic.name for topic in reader.topics()] == ["orders"]
            assert [record.value for record in reader.fetch("orders", 0, 0)] == [b"v"]
            with pytest.raises(Denied, match="requires the permission produce") as denied:
                reader.produce("orders", [Record(b"v")])
            assert denied.value.code is ErrorCode.DENIED
        connection = bulk.connect(f"reader:looking-glass@{place}")
        assert connection is bulk.connect(f"reader:looking-glass@{place}")
        assert connection is not bulk.connect(f"alice:wonder%2Fland@{place}")
        assert [bounds.next_offset for bounds in connection.bounds(["orders"])] == [1]
        with pytest.raises(Denied):
            connection.bounds(["other"])
        with pytest.raises(Denied, match="wrong user or password"):
            bulk.connect(f"reader:glass@{place}").topics()
        broker.kill()
        broker.start()
        assert [bounds.next_offset for bounds in connection.bounds(["orders"])] == [1], "it logs in again by itself"
        assert not [word for word in ("wonder", "looking-glass") if word in broker.log_text()]


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="several processes share addresses on Linux only")
def test_users_are_changed_while_several_processes_run(tmp_path: Path) -> None:
    """A user that was created over Iggy logs in to every process until it is deleted."""
    users = tmp_path / "users"
    add_user(users, "alice", "wonderland", "all")
    topics = [f"topic-{number}" for number in range(4)]  # of both processes
    with BrokerProcess(tmp_path / "data", "--processes", "2", "--users", str(users)) as broker:
        with sync.connect(broker.url("polywire").replace("://", "://alice:wonderland@")) as alice:
            for topic in topics:
                alice.create_topic(topic, 1)
        with ExitStack() as stack:
            peers = [stack.enter_context(Peer(broker)) for _ in range(6)]  # of both processes, in most runs
            assert peers[0].log_in("alice", "wonderland") == 0
            every = permission_bytes(PermissionFlags((True,) * 10))
            assert peers[0].ask(CREATE_USER, b"\x03bob\x07builder\x01" + every)[0] == 0
            for peer in peers[1:]:
                assert peer.log_in("bob", "builder") == 0
            for wire, topic in product(("iggy", "kafka", "polywire"), topics):
                _use(broker.url(wire), topic)
            assert peers[0].ask(DELETE_USER, b"\x02\x03bob")[0] == 0
            for peer in peers[1:]:
                assert peer.socket.recv(1) == b"", "the connection is closed"
            for wire in ("iggy", "kafka", "polywire"):
                _use_in_vain(broker.url(wire), topics[0])


def _use(url: str, topic: str) -> None:
    """Write and read as a user."""
    with sync.connect(url.replace("://", "://bob:builder@")) as bob:
        bob.produce(topic, [Record(url.encode())], partition=0)
        assert [record.value for record in bob.fetch(topic, 0, 0)][-1] == url.encode()


def _use_in_vain(url: str, topic: str) -> None:
    with pytest.raises(Denied):
        _use(url, topic)
