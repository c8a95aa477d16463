"""Connections that cannot log in, or never do, take no slot from clients that are served."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

import pytest

from polywire.protocols.kafka07.messages import encode_offsets
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.codec import ERROR
from polywire.protocols.polywire.messages import Verb
from polywire.server.users import add_user
from tests.broker_process import LOGIN_WIRES, WIRES, BrokerProcess
from tests.crash.test_hostile_peers import RawPeer
from tests.hostile.peers import PoliteClient, connect, push

DESCRIPTORS: Final = 64  # leaves 16 slots, 10 of them for unauthenticated connections and anonymous
STRANGERS: Final = 40
PASSWORD: Final = "pass-word"
API_VERSIONS: Final = b"\0\0\0\x0c\0\x12\0\0\0\0\0\1\0\2me"  # a Kafka request that needs no login
REQUESTS_MAX: Final = 2_000_000  # far more than the buffers of both sides hold
BEGINNINGS: Final = {  # of a request on each protocol, as sent by a client that never sends the rest
    "cursus": b"\0\0\0\x40\0\0AUTH princi",
    "iggy": b"\x40\0\0\0\x26\0\0\0\x04",
    "kafka": b"\0\0\0\x40\0\x12",
    "polywire": b"\0\0\0\x40",
    "flux": b"V1|1|PRO",
    "kafka07": b"\0\0\0\x40\0\0",
}


@contextmanager
def guarded(tmp_path: Path) -> Iterator[BrokerProcess]:
    """Return a broker with users and few slots."""
    users = tmp_path / "users"
    add_user(users, "root", PASSWORD, "all")
    add_user(users, "anonymous", PASSWORD, "produce,consume,manage_topics")
    with BrokerProcess(tmp_path / "data", "--users", str(users), wires=WIRES, descriptors=DESCRIPTORS) as broker:
        yield broker


def can_log_in(broker: BrokerProcess) -> bool:
    """Return whether root gets a slot and is served."""
    with RawPeer(broker) as peer:
        return not peer.ask(Verb.LOGIN, messages.LogIn("root", PASSWORD)).flags & ERROR


def asks_for_offsets(broker: BrokerProcess, held: ExitStack) -> Callable[[], None]:
    """Return a Kafka 0.7 client that sends requests on one connection."""
    peer = held.enter_context(connect(broker, "kafka07"))
    request = encode_offsets(b"polite", 0, -1, 1)

    def ask() -> None:
        peer.sendall(request)
        assert len(peer.recv(4096)) > 4, "the broker closed the connection"

    return ask


def produces(broker: BrokerProcess, held: ExitStack) -> Callable[[], None]:
    """Return a FLUX client that produces on one connection."""
    return held.enter_context(PoliteClient(broker)).produce


def visit(broker: BrokerProcess, wire: str, data: bytes, held: ExitStack) -> socket.socket | None:
    """Open a connection that stays open if the broker allows it."""
    with suppress(OSError):
        peer = held.enter_context(connect(broker, wire))
        push(peer, data)
        return peer
    return None


@pytest.mark.parametrize("polite", [produces, asks_for_offsets])
def test_strangers_take_no_slot_of_a_client_that_cannot_log_in(
    tmp_path: Path, polite: Callable[[BrokerProcess, ExitStack], Callable[[], None]]
) -> None:
    with guarded(tmp_path) as broker, ExitStack() as held:
        served = polite(broker, held)
        served()
        for number in range(STRANGERS):
            visit(broker, LOGIN_WIRES[number % len(LOGIN_WIRES)], b"", held)
            served()
        assert can_log_in(broker)


@pytest.mark.parametrize("wire", WIRES)
def test_requests_that_never_end_take_no_slot_of_clients(tmp_path: Path, wire: str) -> None:
    with guarded(tmp_path) as broker, RawPeer(broker) as root, ExitStack() as held:
        assert not root.ask(Verb.LOGIN, messages.LogIn("root", PASSWORD)).flags & ERROR
        produce = produces(broker, held)
        for _ in range(STRANGERS):
            visit(broker, wire, BEGINNINGS[wire], held)
            produce()
            assert not root.ask(Verb.PING, messages.Head()).flags & ERROR
        assert can_log_in(broker)


def test_a_flood_of_anonymous_leaves_slots_for_logins(tmp_path: Path) -> None:
    with guarded(tmp_path) as broker, RawPeer(broker) as root, ExitStack() as held:
        assert not root.ask(Verb.LOGIN, messages.LogIn("root", PASSWORD)).flags & ERROR
        flood: list[socket.socket] = []
        for _ in range(STRANGERS):
            peer = visit(broker, "flux", b"V1|1|PRODUCE|flood k:v\n", held)
            flood += [] if peer is None else [peer]
            for other in flood:
                push(other, b"V1|1|PRODUCE|flood k:v\n")
            assert not root.ask(Verb.PING, messages.Head()).flags & ERROR
        assert can_log_in(broker)


def clog(peer: socket.socket) -> None:
    """Send requests until the broker stops reading, and read no responses."""
    requests = API_VERSIONS * 2_000
    peer.setblocking(False)
    with suppress(OSError):  # its buffers are full, or the broker has closed the connection
        for _ in range(REQUESTS_MAX // 2_000):
            peer.sendall(requests)


def test_unread_responses_of_strangers_leave_slots_for_logins(tmp_path: Path) -> None:
    with guarded(tmp_path) as broker, ExitStack() as held:
        for _ in range(STRANGERS):
            peer = visit(broker, "kafka", b"", held)
            if peer is not None:
                clog(peer)
        assert can_log_in(broker)
