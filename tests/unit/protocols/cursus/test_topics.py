"""Commands about topics and the connection, and the dialect of responses."""

from __future__ import annotations

import json

from polywire.broker.settings import HOUR_US, TOPIC_RANGES
from polywire.protocols.cursus.messages import enveloped, frame
from tests.unit.protocols.cursus.dialogue import World

POLICY = "cleanup_policy=delete partitioner=hash_key auth_policy=open read_acl= write_acl= retention_hours=0 retention_bytes=0"


def test_a_topic_is_created_described_and_deleted() -> None:
    peer = World().connect()
    assert peer.ask("CREATE topic=orders partitions=2") == f"OK topic=orders partitions=2 {POLICY}"
    assert peer.ask("LIST") == "OK count=1 topics=orders"
    leaders = "leaders=127.0.0.1:9000,127.0.0.1:9000 epochs=0,0"
    assert peer.ask("METADATA topic=orders") == f"OK topic=orders partitions=2 {leaders} {POLICY}"
    assert json.loads(peer.ask("DESCRIBE topic=orders"))["partitions"][1]["leo"] == 0
    assert peer.ask("DELETE topic=orders") == "OK topic=orders deleted=true"
    assert peer.ask("LIST") == "OK count=0 topics="


def test_retention_has_the_ranges_of_every_protocol() -> None:
    peer = World().connect()
    hours, size = TOPIC_RANGES["retention_age_us"].stop // HOUR_US, TOPIC_RANGES["retention_bytes"].stop - 1
    created = peer.ask(f"CREATE topic=most partitions=1 retention_hours={hours} retention_bytes={size}")
    assert created.endswith(f"retention_hours={hours} retention_bytes={size}")
    for key, value in (("retention_hours", hours + 1), ("retention_bytes", size + 1)):
        assert peer.ask(f"CREATE topic=more partitions=1 {key}={value}") == f"ERROR: invalid_{key} value={value}"


def test_every_dialect_uses_its_own_words() -> None:
    peer = World().connect()
    assert peer.ask("LIST") == "(no topics)"
    assert peer.ask("CREATE orders 2") == "\u2705 Topic 'orders' now has 2 partitions"
    assert (
        peer.ask("STREAM orders 0") == "ERROR: invalid_stream_syntax"
    )  # this command implies the newer positional dialect
    assert peer.ask("CREATE orders 2") == f"OK topic=orders partitions=2 {POLICY}"
    assert peer.ask("CREATE orders", "admin") == "\u2705 Topic 'orders' now has 4 partitions"
    assert peer.ask("LIST", "admin") == "orders"
    assert peer.ask("DELETE orders", "admin") == "\U0001f5d1\ufe0f Topic 'orders' deleted"
    assert peer.ask("LIST") == "(no topics)"  # the connection's latest dialect


def test_frames_can_arrive_split_or_together() -> None:
    peer = World().connect()
    stream = frame(b"CREATE topic=a partitions=1") + frame(enveloped("", b"LIST")) + frame(b"")
    for byte in stream:
        peer.feed(bytes([byte]))
        peer.pass_by()
    assert [body.split()[0] for body in peer.take_bodies()] == [b"OK", b"OK", b"ERROR:"]
    peer.feed(stream)
    peer.pass_by()
    assert len(peer.take_bodies()) == 3


def test_errors_have_their_class_once_negotiated() -> None:
    peer = World().connect()
    assert peer.ask("DELETE topic=zz") == "ERROR: topic_not_found topic=zz"
    assert (
        peer.ask("DELETE topic=..") == 'ERROR: invalid_topic_name topic=".." reason="topic name \\"..\\" is reserved"'
    )
    answer = peer.ask("NEGOTIATE version=1 features=structured_errors_v1,foo_v9")
    assert answer == "OK protocol_version=1 enabled=structured_errors_v1 unsupported=foo_v9"
    assert peer.ask("DELETE topic=zz") == "ERROR: topic_not_found class=not_found retryable=false topic=zz"


def test_a_silent_connection_is_closed() -> None:
    world = World()
    peer = world.connect()
    peer.ask("LIST")
    world.memory.advance(59.0)
    assert not peer.closed
    world.memory.advance(2.0)
    assert peer.closed
