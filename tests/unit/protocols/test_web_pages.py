"""An HTTP request that a web page causes closes the connection of any protocol, whatever its body contains."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from polywire.broker.broker import Broker
from polywire.protocols.cursus.factory import CursusFactory
from polywire.protocols.cursus.messages import enveloped, frame
from polywire.protocols.flux.factory import FluxFactory
from polywire.protocols.iggy.factory import IggyFactory
from polywire.protocols.kafka07.factory import Kafka07Factory
from polywire.protocols.polywire.factory import PolywireFactory
from polywire.protocols.runtime.session import SessionFactory
from tests.unit.protocols.dialogue import Dialogue, World

WIRES: list[Callable[[Broker], SessionFactory]] = [
    FluxFactory,
    CursusFactory,
    IggyFactory,
    Kafka07Factory,
    PolywireFactory,
]
METHODS = ("GET", "POST", "PUT", "HEAD", "OPTIONS", "DELETE", "PATCH", "CONNECT", "TRACE", "PRI", "Post")
BODY = b"\nV1|1|PRODUCE|stolen k:v\n" + frame(b"CREATE topic=stolen") + frame(enveloped("", b"CREATE topic=stolen"))


def request(method: str) -> bytes:
    lines = f"{method} / HTTP/1.1\r\nHost: localhost:9092\r\nContent-Type: text/plain\r\nContent-Length: {len(BODY)}\r\n\r\n"
    return lines.encode() + BODY


@pytest.mark.parametrize("make", WIRES)
@pytest.mark.parametrize("method", METHODS)
def test_an_http_request_closes_the_connection(make: Callable[[Broker], SessionFactory], method: str) -> None:
    world = World(make)
    peer = Dialogue(world)
    answer = peer.exchange(request(method))
    assert peer.closed
    assert b"OK" not in answer
    assert world.memory.broker.topics() == []


@pytest.mark.parametrize("method", METHODS)
def test_no_protocol_is_detected_in_an_http_request(method: str) -> None:
    broker = World(FluxFactory).memory.broker
    assert not any(make(broker).recognise(request(method)[:64]) for make in WIRES)


def test_requests_before_it_are_answered() -> None:
    peer = Dialogue(World(FluxFactory))
    answer = peer.exchange(b"V1|1|PRODUCE|t k:v\n" + request("POST"))
    assert answer == b"V1|1|OK|partition=0 offset=0 hw=0\n"
    assert peer.closed
