"""Connections that end while their responses are being written: other clients are served.

Each of these once ended the process: a response was written, and its connection paused or closed, while the loop asked
for a buffer.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest

from polywire.protocols.cursus.messages import frame
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.codec import encode_head
from polywire.protocols.polywire.messages import Verb
from polywire.server.users import add_user
from tests.broker_process import WIRES, BrokerProcess
from tests.crash.test_hostile_peers import RawPeer, record_batch
from tests.hostile.peers import End, PoliteClient, connect, hang_up, push

VISITS = 40
PASSWORD = "a long password"

_topics = count(10)

Visit = Callable[[BrokerProcess], None]


def long_line(broker: BrokerProcess) -> None:
    """Send records, then 400 KB that never become a line."""
    with connect(broker, "flux") as peer:
        push(peer, b"V1|1|PRODUCE|w key:value acks=1\n" + b"a" * 400_000)
        peer.settimeout(0.05)
        with suppress(OSError):
            while peer.recv(65_536):
                pass


def disconnect_after_publish(broker: BrokerProcess) -> None:
    """Create a topic, publish a record, and disconnect: 79 bytes."""
    topic = next(_topics)
    peer = connect(broker, "cursus")
    peer.sendall(frame(b"CREATE topic=w%d partitions=2" % topic) + frame(b"PUBLISH topic=w%d acks=1 message=m" % topic))
    hang_up(peer, End.FIN)


def web_page(broker: BrokerProcess) -> None:
    """Send what any web page may make a browser send to a port of this machine."""
    peer = connect(broker, "flux")
    body = b"V1|1|PRODUCE|w key:value acks=1\n" + b"a" * 400_000
    push(peer, b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 400000\r\n\r\n" + body)
    time.sleep(0.02)  # the page is left while the broker reads
    hang_up(peer, End.RST)


def killed_producers(broker: BrokerProcess) -> None:
    """Two producers that keep producing without reading a response, and are killed."""
    lines = b"".join(b"V1|%d|PRODUCE|w key:%s acks=1\n" % (number, b"v" * 500) for number in range(300))
    kill_under_answers([connect(broker, "flux") for _ in range(2)], lines)


def kill_under_answers(peers: list[socket.socket], requests: bytes) -> None:
    """Send from all connections in turn without reading; then end all at once."""
    for peer in peers * 50:
        push(peer, requests)
    for peer in peers:
        hang_up(peer, End.RST)


@pytest.mark.parametrize("visit", [long_line, disconnect_after_publish, web_page, killed_producers])
def test_a_connection_that_ends_during_its_responses_affects_no_other(tmp_path: Path, visit: Visit) -> None:
    with BrokerProcess(tmp_path / "data") as broker, PoliteClient(broker) as polite:
        for _ in range(VISITS):
            visit(broker)
            polite.produce()
        assert broker.stop() == 0, broker.log_text()
        assert "level=error" not in broker.log_text(), broker.log_text()


def logged_in(broker: BrokerProcess) -> socket.socket:
    peer = RawPeer(broker)
    peer.ask(Verb.LOGIN, messages.LogIn("ann", PASSWORD))
    return peer.socket


def test_killed_producers_with_a_login_affect_no_other(tmp_path: Path) -> None:
    users = tmp_path / "users"
    add_user(users, "ann", PASSWORD, "admin")
    add_user(users, "anonymous", PASSWORD, "admin")  # the polite client cannot log in
    batch = record_batch(100)
    produce = encode_head(Verb.PRODUCE, 1, messages.Produce("w", 0, create=True), payload_bytes=len(batch)) + batch
    running = BrokerProcess(tmp_path / "data", "--users", str(users), wires=WIRES)
    with running as broker, PoliteClient(broker) as polite:
        for _ in range(VISITS):
            kill_under_answers([logged_in(broker) for _ in range(2)], produce * 50)
            polite.produce()
        assert broker.stop() == 0, broker.log_text()
        assert "level=error" not in broker.log_text(), broker.log_text()
