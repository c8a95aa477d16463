"""The connection: limits, order, turns, and detection of the protocol."""

from __future__ import annotations

import json

import pytest

from polywire.errors import ErrorCode, Invalid
from polywire.protocols.cursus.context import CursusSettings
from polywire.protocols.cursus.errors import WIRE_ERRORS, class_of, encode_error, refused
from polywire.protocols.cursus.messages import Dialect, Refused, enveloped, frame
from tests.unit.protocols.cursus.dialogue import World
from tests.unit.protocols.cursus.test_produce import batch, messages, stored


def test_every_error_of_the_broker_has_a_name_here() -> None:
    assert set(WIRE_ERRORS) == set(ErrorCode)
    reported = refused(Invalid(ErrorCode.INVALID_NAME, 'so "it" goes'))
    assert encode_error(reported, Dialect.MODERN, structured=False) == b'ERROR: invalid_name reason="so \\"it\\" goes"'
    assert encode_error(reported, Dialect.LEGACY, structured=True) == b'ERROR: so "it" goes'


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("NOT_LEADER", "routing"),
        ("request_cancelled", "availability"),
        ("GEN_MISMATCH", "fencing"),
        ("OFFSET_OUT_OF_RANGE", "conflict"),
        ("NOT_AUTHORIZED_FOR_TOPIC", "authorization"),
        ("internal_topic_write_forbidden", "authorization"),
        ("group_not_found", "not_found"),
        ("something_missing", "not_found"),
        ("missing_topic", "validation"),
        ("duplicate_partition", "validation"),
        ("command_failed", "internal"),
        ("broker_error", "internal"),
    ],
)
def test_classes_of_codes(code: str, kind: str) -> None:
    assert class_of(code) == kind
    retryable = b"true" if kind in ("routing", "availability") else b"false"
    text = encode_error(Refused(code, "a=b"), Dialect.MODERN, structured=True)
    assert text == b"ERROR: %b class=%b retryable=%b a=b" % (code.encode(), kind.encode(), retryable)


def test_a_frame_above_the_limit_closes_the_connection() -> None:
    peer = World().connect()
    peer.feed((64 * 1024 * 1024 + 1).to_bytes(4, "big"))
    assert peer.gave_up is not None
    assert peer.gave_up.message == "frame is too long bytes=67108865"


def test_memory_grows_with_received_bytes_not_with_the_announced_length() -> None:
    peer = World().connect()
    session = peer.session
    opening = (60 * 1024 * 1024).to_bytes(4, "big") + b"LIST "
    assert session.receive(memoryview(opening)) == 0
    assert session.wanted() == 1024 * 1024
    assert session.receive(memoryview(opening + bytes(1024 * 1024))) == 0
    assert session.wanted() == 4 * (len(opening) + 1024 * 1024)
    assert session.receive(memoryview(frame(b"LIST")[:-1])) == 0
    assert session.wanted() == len(frame(b"LIST"))


def test_a_batch_larger_than_a_stored_one_is_stored_in_parts() -> None:
    world = World()
    peer = world.connect()
    peer.ask("CREATE topic=big partitions=1")
    sent = [{"seq": n, "pid": "p", "payload": bytes([n]) * 6_000_000} for n in range(1, 6)]
    assert json.loads(peer.ask(batch("big", 0, sent, idempotent=1)))["last_offset"] == 4
    assert [record.value and record.value[0] for record in stored(world, "big")] == [1, 2, 3, 4, 5]
    too_long = [{"seq": 1, "pid": "q", "payload": bytes(20_000_000)}]
    answer = json.loads(peer.ask(batch("big", 0, too_long)))
    assert (answer["status"], answer["error"][:15]) == ("ERROR", "batch too large")


def test_commands_have_limits() -> None:
    peer = World().connect()
    peer.ask("CREATE topic=t partitions=1")
    too_long = 'ERROR: malformed_input reason="command is too long" command='
    assert peer.ask(b"METADATA topic=t " + b"a=b " * 100_000) == too_long + "METADATA"
    assert peer.ask(b"CONSUME t " + b"0 " * 200_000) == too_long + "CONSUME"
    assert peer.ask(b"PUBLISH topic=t producerId=p message=" + b"x" * 17_000_000) == too_long + "PUBLISH"
    assert json.loads(peer.ask(b"PUBLISH topic=t producerId=p message=" + b"x" * 9_000_000))["last_offset"] == 0
    assert len(peer.ask(b"FOOBAR" * 200_000, "")) < 1_000
    assert len(peer.ask(b"DELETE " + b"x" * 100_000)) < 300_000


def test_half_a_frame_is_dropped_at_the_end_of_the_stream() -> None:
    peer = World().connect()
    peer.feed(frame(b"LIST") + frame(b"LIST")[:-1])
    peer.finish()
    assert len(peer.take_bodies()) == 1
    assert peer.closed


def test_waiting_requests_are_answered_at_the_end_of_the_stream() -> None:
    world = World()
    peer = world.connect()
    peer.feed(frame(b"CREATE topic=t partitions=1") + frame(b"LIST") + frame(b"METADATA topic=t"))
    peer.finish()
    assert len(peer.take_bodies()) == 3
    assert peer.closed


def test_a_configured_dialect() -> None:
    legacy = World(cursus=CursusSettings(dialect=Dialect.LEGACY)).connect()
    assert legacy.ask("LIST") == "(no topics)"
    strict = World(cursus=CursusSettings(bare_publish=False)).connect()
    strict.ask("CREATE topic=t")
    assert strict.ask("hello", "t") == "ERROR: unknown command: hello"


@pytest.mark.parametrize(
    ("opening", "known"),
    [
        (frame(b"LIST"), True),
        (frame(b"create topic=x"), True),
        (frame(enveloped("admin", b"CREATE topic=x")), True),
        (frame(enveloped("", b"METADATA topic=x")), True),
        (frame(batch("t", 0, messages(1))), True),
        (frame(b"\x1f\x8b\x08\x00"), True),
        (frame(b"\x28\xb5\x2f\xfd\x20"), True),
        (frame(b"\x04\x22\x4d\x18\x68"), True),
        (frame(b"\x82SNAPPY\x00\x00"), True),
        (frame(b"\x28\xb5"), False),
        (frame(b"LISTEN here"), False),
        (b"V1|1|PRODUCE|t a:1\n", False),
        (b"\xf1PWIRE\x00\x01", False),
        (
            bytes.fromhex("00000010 0000 0004 74657374 00000000 00000000"),
            False,
        ),  # Kafka 0.7: a produce request to "test"
        (bytes.fromhex("0000001a 0001 0004 74657374 00000000 0000000000000000 00100000"), False),  # and a fetch
        (bytes.fromhex("04000000 01000000"), False),  # Iggy: a ping
        (bytes.fromhex("0e000000 26000000 0569676779"), False),  # and a login
        (b"GET / HTTP/1.1\r\n", False),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", False),  # TLS
    ],
)
def test_the_protocol_is_detected_by_its_first_bytes(opening: bytes, known: bool) -> None:
    factory = World().factory
    for size in range(len(opening[:64])):
        assert factory.recognise(opening[:size]) in (None, known)
    assert factory.recognise(opening[:64]) is known
