"""Permissions on a running broker: protocols without a login, and dotted names over every protocol."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from polywire.client import sync
from polywire.errors import Denied
from polywire.records.columns import Record
from polywire.server.users import add_user
from tests import fork_server
from tests.broker_process import WIRES, BrokerProcess, child_environment, silenced
from tests.e2e.test_users import Peer, polywire

STREAMS, GET_TOPICS = 201, 301


def flux(broker: BrokerProcess, line: str) -> str:
    with socket.create_connection(broker.addresses["flux"], timeout=60) as peer:
        peer.sendall(f"V1|1|{line}\n".encode())
        return peer.makefile().readline().strip()


def test_a_protocol_without_a_login_needs_an_anonymous_user(tmp_path: Path) -> None:
    users = tmp_path / "users"
    add_user(users, "alice", "wonderland", "all")
    words = ("serve", "--data-dir", str(tmp_path / "data"), "--users", str(users), *silenced("flux"))
    ended = fork_server.run(
        [sys.executable, "-m", "polywire", *words, "--flux", "127.0.0.1:0"],
        text=True,
        env=child_environment(),
        timeout=180,
    )
    assert ended.returncode == 1
    assert "polywire user add anonymous" in ended.stderr
    assert "--flux" in ended.stderr


def test_clients_without_a_login_have_the_permissions_of_anonymous(tmp_path: Path) -> None:
    users = tmp_path / "users"
    add_user(users, "alice", "wonderland", "all")
    add_user(users, "anonymous", "never-logs-in", "produce@clicks")
    with BrokerProcess(tmp_path / "data", "--users", str(users), wires=WIRES) as broker:
        host, port = broker.addresses["polywire"]
        with sync.connect(f"polywire://alice:wonderland@{host}:{port}") as alice:
            alice.create_topic("clicks.web", 1)
            alice.create_topic("shop.orders", 1)
        assert flux(broker, "PRODUCE|clicks.web k:v").startswith("V1|1|OK|")
        for line in (
            "CONSUME|clicks.web 0 0",
            "PRODUCE|shop.orders k:v",
            "PRODUCE|clicks.new k:v",
            "JOIN|g clicks.web m",
        ):
            assert "not allowed" in flux(broker, line), line
        assert flux(broker, "ADMIN_GET_METADATA|") == "V1|1|OK|topics=[clicks.web] brokers=[0] fenced=[]"


def test_a_dotted_name_means_the_same_topic_everywhere(tmp_path: Path) -> None:
    users = tmp_path / "users"
    add_user(users, "alice", "wonderland", "all")
    add_user(users, "shopper", "looking-glass", "consume@shop,read_streams@shop")
    add_user(users, "outsider", "looking-glass", "consume@default,read_streams@default,manage_topics@default")
    with BrokerProcess(tmp_path / "data", "--users", str(users)) as broker:
        host, port = broker.addresses["polywire"]
        place = f"{host}:{port}"
        made = polywire(f"alice:wonderland@{place}", "topic", "create", "shop.orders", "--partitions", "1")
        assert made.returncode == 0, made.stderr
        with sync.connect(f"polywire://alice:wonderland@{place}") as alice:
            alice.produce("shop.orders", [Record(b"v")])
        with sync.connect(f"polywire://shopper:looking-glass@{place}") as shopper:
            assert [topic.name for topic in shopper.topics()] == ["shop.orders"]
            assert [record.value for record in shopper.fetch("shop.orders", 0, 0)] == [b"v"]
        with sync.connect(f"polywire://outsider:looking-glass@{place}") as outsider:
            assert outsider.topics() == []
            with pytest.raises(Denied):
                outsider.fetch("shop.orders", 0, 0)
            with pytest.raises(Denied):
                outsider.create_topic("shop.squatted", 1)
        with Peer(broker) as shopper, Peer(broker) as outsider:
            assert shopper.log_in("shopper", "looking-glass") == 0
            assert shopper.ask(GET_TOPICS, b"\x02\x04shop")[1].endswith(b"\x06orders")
            assert outsider.log_in("outsider", "looking-glass") == 0
            assert outsider.ask(STREAMS) == (0, b"")
            assert outsider.ask(GET_TOPICS, b"\x02\x04shop")[0] == 41
