"""CONSUME of the legacy dialect: values by byte offset."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest

from polywire.protocols.cursus import legacy_fetch
from polywire.protocols.cursus.messages import enveloped, frame
from polywire.records.columns import Record
from polywire.records.rows import from_records
from polywire.types import Level
from tests.unit.protocols.cursus.dialogue import Dialogue, World

REFUSED = [b"ERROR: invalid offset: no message begins there"]
UNUSED_S = 0.5


def filled(*contents: bytes) -> tuple[World, Dialogue]:
    """Create a topic ``c1`` of one partition with these values."""
    world = World()
    peer = world.connect()
    peer.ask("CREATE c1 1", "admin")
    add(world, *contents)
    return world, peer


def add(world: World, *contents: bytes) -> None:
    broker = world.memory.broker
    batch = from_records([Record(value=value) for value in contents])
    broker.produce(broker.topic("c1").partitions[0], batch, level=Level.WRITTEN, done=None)
    world.memory.run()


def consumed(peer: Dialogue, start: int) -> list[bytes]:
    return peer.say(enveloped("admin", b"CONSUME c1 0 %d" % start))


def starts_of(contents: list[bytes]) -> list[int]:
    """Return the byte offsets of the values, and of the end."""
    return [0, *accumulate(4 + len(value) for value in contents)]


@pytest.mark.parametrize("topic", ["", "admin", "c1"])
def test_an_envelope_means_the_legacy_dialect_whatever_its_topic_is(topic: str) -> None:
    world, _ = filled(b"x")
    first = world.connect()
    assert first.say(enveloped(topic, b"CONSUME c1 0 0")) == [b"x"]
    missing = world.connect().say(enveloped(topic, b"CONSUME nowhere 0 0"))
    assert missing == [b"ERROR: topic 'nowhere' does not exist"]


def test_values_are_found_by_byte_offset() -> None:
    chance = random.Random(1)
    contents = [bytes(chance.choice([0, 0, 1, 7, 200])) for _ in range(60)]
    starts = starts_of(contents)
    world, peer = filled(*contents[:20])
    for at in range(20, 60, 4):
        add(world, *contents[at : at + 4])
    for byte in range(starts[-1] + 3):
        found = consumed(peer if byte % 2 else world.connect(), byte)
        if byte in starts[:-1]:
            expected = contents[starts.index(byte) :]
            assert found == expected[: len(found)], byte
            assert found
        else:
            assert found == ([] if byte >= starts[-1] else REFUSED), byte


def test_a_response_is_small_and_the_next_one_continues() -> None:
    contents = [bytes([number % 256]) * 1_000 for number in range(40)]
    contents[20] = bytes(300_000)
    world, peer = filled(*contents)
    found: list[bytes] = []
    byte = answers = 0
    while part := consumed(peer, byte):
        size = sum(4 + len(value) for value in part)
        assert size <= 8_192 or len(part) == 1
        byte += size
        found += part
        answers += 1
    assert found == contents
    assert answers == 3 + 1 + 3
    add(world, b"more")
    assert consumed(peer, byte) == [b"more"]


def test_the_latest_byte_offset_is_cached_and_others_are_searched_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 5_000
    _, peer = filled(*[b""] * count)
    monkeypatch.setattr(
        legacy_fetch, "LOOKUPS_MAX", 20
    )  # 0.6 ** 17 * 5_000 < 1, and three lookups for the last few records
    assert len(consumed(peer, 4 * (count - 10))) == 10
    assert len(consumed(peer, 8)) == 2_048
    monkeypatch.setattr(legacy_fetch, "LOOKUPS_MAX", 1)  # enough for a cached byte offset
    assert len(consumed(peer, 8 + 8_192)) == 2_048, "the offset where the search stopped"
    assert consumed(peer, 4 * (count - 10)) == REFUSED


def test_cached_byte_offsets_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(legacy_fetch, "BYTE_POSITIONS_MAX", 2)
    world, peer = filled(b"x")
    peer.ask("CREATE c2 4", "admin")
    for partition in range(4):
        assert peer.say(enveloped("admin", b"CONSUME c2 %d 0" % partition)) == []
    assert len(world.factory.state.byte_positions) == 2


def test_the_connection_closes_unless_another_request_follows() -> None:
    world, peer = filled(b"x")
    assert consumed(peer, 0) == [b"x"]
    world.memory.advance(UNUSED_S - 0.1)
    assert peer.ask("LIST", "admin") == "c1"
    world.memory.advance(2 * UNUSED_S)
    assert not peer.closed
    peer.feed(frame(enveloped("admin", b"CONSUME c1 0 0")) + frame(enveloped("admin", b"LIST")))
    peer.pass_by()
    assert peer.take_bodies() == [b"x", b"c1"]
    world.memory.advance(2 * UNUSED_S)
    assert not peer.closed
    consumed(peer, 0)
    world.memory.advance(2 * UNUSED_S)
    assert peer.closed


def test_a_half_closed_client_gets_its_values() -> None:
    _, peer = filled(b"x", b"y")
    peer.feed(frame(enveloped("admin", b"CONSUME c1 0 0")))
    peer.finish()
    assert peer.take_bodies() == [b"x", b"y"]
    assert peer.closed


def test_an_error_ends_the_response() -> None:
    world, peer = filled(b"x")
    reported = b'ERROR: invalid partition ID: strconv.Atoi: parsing "x": invalid syntax'
    assert peer.say(enveloped("admin", b"CONSUME c1 x 0")) == [reported]
    assert consumed(peer, 1) == REFUSED
    world.memory.advance(2 * UNUSED_S)
    assert not peer.closed


def test_removed_values_are_not_found_and_zero_is_the_first_kept_one() -> None:
    world, peer = filled(b"one", b"two")
    broker = world.memory.broker
    broker.purge_topic(broker.topic("c1"))
    world.memory.run()
    assert consumed(peer, 0) == []
    add(world, b"three", b"four")
    assert consumed(peer, 0) == [b"three", b"four"]
    assert consumed(peer, 7) == REFUSED
    assert consumed(peer, 14) == [b"three", b"four"]
    assert consumed(peer, 14 + 9) == [b"four"]
