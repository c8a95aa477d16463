"""Frames of a Kafka connection, fatal errors, and detection of the protocol (spec: kafka#framing)."""

from __future__ import annotations

from collections.abc import Iterator
from struct import pack

import pytest

from polywire.protocols.cursus.factory import CursusFactory
from polywire.protocols.flux.factory import FluxFactory
from polywire.protocols.iggy.factory import IggyFactory
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.client_codec import decode_response, encode_request
from polywire.protocols.kafka.cluster import NAMED_SINCE, SOFTWARE_CHARS_MAX
from polywire.protocols.kafka.factory import COMMANDS
from polywire.protocols.kafka.messages import SERVED, Api, WireError
from polywire.protocols.kafka.session import REQUEST_BYTES_MAX
from polywire.protocols.kafka07 import messages as kafka07
from polywire.protocols.kafka07.factory import Kafka07Factory
from polywire.protocols.polywire.factory import PolywireFactory
from tests.unit.protocols.kafka.dialogue import World


@pytest.fixture
def world() -> World:
    return World()


@pytest.mark.parametrize("version", range(5))
def test_every_version_of_api_versions_lists_the_apis_with_a_handler(world: World, version: int) -> None:
    peer = world.connect()
    answer = peer.ask(
        Api.API_VERSIONS, version, client_software_name="librdkafka", client_software_version="2.16.0-RC1"
    )
    assert peer.session.spoken_dialect == ("librdkafka 2.16.0-RC1" if version >= NAMED_SINCE else "")
    reported = {entry.api_key: (entry.min_version, entry.max_version) for entry in answer.api_keys}
    assert answer.error == WireError.NONE
    assert reported == {api: (SERVED[api].first, SERVED[api].last) for api in COMMANDS}


def test_an_unknown_version_gets_a_response_in_the_first_layout(world: World) -> None:
    peer = world.connect()
    sent = peer.exchange(pack(">ihhih", 12, 18, 5, 7, -1) + b"\0\0")
    assert sent == bytes.fromhex("00000010 00000007 0023 00000001 0012 0000 0004")
    assert peer.ask(Api.API_VERSIONS, 0).error == WireError.NONE


def test_a_long_client_name_is_truncated(world: World) -> None:
    peer = world.connect()
    peer.ask(Api.API_VERSIONS, 3, client_software_name="a" * 1000, client_software_version="1")
    assert peer.session.spoken_dialect == "a" * SOFTWARE_CHARS_MAX


@pytest.mark.parametrize("name", ["", "-x", "x.", "a b", "é", "x/1"])
def test_the_client_software_needs_a_name(world: World, name: str) -> None:
    for fields in ({"client_software_name": name}, {"client_software_version": name}):
        named = {"client_software_name": "a", "client_software_version": "1"} | fields
        assert world.connect().ask(Api.API_VERSIONS, 3, **named).error == WireError.INVALID_REQUEST


@pytest.mark.parametrize(
    "frame",
    [
        pack(">i", -1),
        pack(">i", REQUEST_BYTES_MAX + 1),
        pack(">i", 3) + b"\0\0\0",
        pack(">ihhih", 10, 93, 0, 1, -1),
        pack(">ihhih", 10, 18, -1, 1, -1)[:-2] + b"\xff\xfe",
        pack(">ihhih", 10, 3, 14, 1, -1),
        pack(">ihhih", 10, 3, 4, 1, -1),
        pack(">ihhih", 10, 18, 0, 1, 5),
        pack(">ihhihi", 14, 3, 0, 1, -1, 1_000_000),
    ],
)
def test_invalid_frames_close_the_connection(world: World, frame: bytes) -> None:
    peer = world.connect()
    assert peer.exchange(frame) == b""
    assert peer.gave_up is not None


def test_trailing_bytes_of_a_request_are_ignored(world: World) -> None:
    request = encode_request(Api.METADATA, 9, 1, schema.request(Api.METADATA)(topics=None))
    longer = pack(">i", len(request) - 4 + 3) + request[4:] + b"\1\0\0"
    peer = world.connect()
    assert len(peer.exchange(longer)) > 4
    assert peer.gave_up is None


def test_split_and_pipelined_requests_are_answered_in_order(world: World) -> None:
    requests = b"".join(
        encode_request(Api.METADATA, 1 + number % 12, number, schema.request(Api.METADATA)(topics=None))
        for number in range(50)
    )
    peer = world.connect()
    for at in range(0, len(requests), 7):
        peer.feed(requests[at : at + 7])
    peer.pass_by()
    assert [int.from_bytes(frame[:4], "big") for frame in peer.frames()] == list(range(50))


def test_complete_requests_before_the_end_of_the_stream_are_answered(world: World) -> None:
    request = encode_request(Api.METADATA, 1, 9, schema.request(Api.METADATA)(topics=None))
    peer = world.connect()
    peer.feed(request + request[:5])
    peer.finish()
    assert decode_response(Api.METADATA, 1, next(peer.frames()))[0] == 9
    assert peer.closed


# Detection


def openings(api: Api) -> Iterator[bytes]:
    """Return every version of a request as a client may begin a connection, with typical numbers and names."""
    served = SERVED[api]
    for version in range(served.answered_from, served.last + 1):
        for number in (0, 1, 65_535):
            for name in (None, "", "rdkafka"):
                yield encode_request(api, version, number, schema.request(api)(), client_id=name)


@pytest.mark.parametrize("api", SERVED, ids=lambda api: api.name.lower())
def test_every_first_request_is_detected_as_kafka_only(world: World, api: Api) -> None:
    broker = world.memory.broker
    others = [wire(broker) for wire in (FluxFactory, CursusFactory, IggyFactory, Kafka07Factory, PolywireFactory)]
    for opening in openings(api):
        assert world.factory.recognise(opening[:64]) is True
        assert not [other.wire for other in others if other.recognise(opening[:64])]
        assert {world.factory.recognise(opening[:size]) for size in range(14)} == {None}


@pytest.mark.parametrize(
    "frame",
    [
        kafka07.encode_produce(b"orders", 0, b""),
        kafka07.encode_fetch(b"orders", 0, 0, 1 << 20),
        kafka07.encode_offsets(b"orders", 0, -1, 1),
        kafka07.encode_multifetch([kafka07.FetchEntry(b"orders", 0, 0, 1 << 20)] * 3),
        kafka07.encode_fetch(b"o" * 300, 0, 0, 1),
    ],
)
def test_requests_of_kafka_07_are_not_detected_as_kafka(world: World, frame: bytes) -> None:
    assert not [size for size in range(14, 65) if world.factory.recognise(frame[:size])]
