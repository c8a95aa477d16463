"""CONSUME and STREAM: start positions, contents and ends."""

from __future__ import annotations

import struct
from typing import Any

from polywire.protocols.cursus.messages import enveloped, frame
from polywire.testing.loop import ManualLoop
from polywire.types import Level, PositionKind
from tests.processor import processor_used
from tests.unit.protocols.cursus.dialogue import Dialogue, World
from tests.unit.protocols.cursus.test_produce import batch, messages


def unpack(body: bytes) -> tuple[str, int, list[tuple[int, int, bytes]]]:
    """Return topic, partition and (offset, sequence, payload) of a pushed batch; an independent decoder."""
    assert body[:2] == b"\xba\x7c"
    at = 2

    def take(form: str) -> Any:
        nonlocal at
        (value,) = struct.unpack_from(">" + form, body, at)
        at += struct.calcsize(">" + form)
        return value

    def text(form: str = "H") -> bytes:
        nonlocal at
        size = take(form)
        at += size
        assert at <= len(body)
        return body[at - size : at]

    topic, partition = text().decode(), take("i")
    assert (text("B"), take("B")) == (b"1", 0)
    first, last, count = take("Q"), take("Q"), take("i")
    found = []
    for _ in range(count):
        offset, sequence = take("Q"), take("Q")
        text(), text(), take("q")
        payload = text("I")
        text(), take("I"), take("Q"), text()
        found.append((offset, sequence, payload))
    assert at == len(body)
    if found:
        assert (first, last) == (found[0][1], found[-1][1])
    return topic, partition, found


def filled(count: int = 6) -> tuple[World, Dialogue]:
    world = World()
    peer = world.connect()
    peer.ask("CREATE topic=c1 partitions=2")
    peer.ask(batch("c1", 0, messages(*range(1, count + 1))))
    return world, peer


def test_consume_starts_at_the_given_offset_every_time() -> None:
    world, peer = filled()
    world.memory.broker.commit_position("c1", 0, PositionKind.GROUP, "g", 5, level=Level.WRITTEN)
    for _ in range(2):
        _, _, found = unpack(peer.say(b"CONSUME topic=c1 partition=0 offset=4 member=m group=g")[0])
        assert found == [(4, 5, b"v5"), (5, 6, b"v6")]
    _, _, found = unpack(peer.say(b"CONSUME topic=c1 partition=0 member=m group=g")[0])
    assert [offset for offset, _, _ in found] == [5]
    _, _, found = unpack(peer.say(b"CONSUME topic=c1 partition=0 member=m group=h autoOffsetReset=latest")[0])
    assert found == []


def test_a_read_without_records_returns_an_empty_batch() -> None:
    _, peer = filled()
    (answer,) = peer.say(b"CONSUME topic=c1 partition=0 offset=99 member=m")
    assert answer == b"\xba\x7c\x00\x02c1\x00\x00\x00\x00\x011\x00" + bytes(20)


def test_the_worked_example_byte_for_byte() -> None:
    world = World()
    peer = world.connect()
    peer.ask("CREATE topic=c1 partitions=1")
    sent = [{"seq": n, "pid": "p", "payload": b"m%d" % n} for n in range(1, 6)]
    peer.ask(batch("c1", 0, sent))
    (answer,) = peer.say(enveloped("", b"CONSUME topic=c1 partition=0 offset=4 member=m"))
    expected = (
        "ba7c 0002 6331 00000000 01 31 00 0000000000000005 0000000000000005 00000001"
        "0000000000000004 0000000000000005 0001 70 0000 0000000000000000 00000002 6d35 0000 00000000 0000000000000000 0000"
    )
    assert answer == bytes.fromhex(expected)


def test_a_long_poll_ends_with_records_or_a_timeout() -> None:
    world, peer = filled()
    ask = b"CONSUME topic=c1 partition=1 offset=0 member=m wait_ms=1000"
    assert peer.say(ask) == []
    world.connect().ask(batch("c1", 1, messages(1)))
    peer.pass_by()
    assert unpack(peer.take_bodies()[0])[2] == [(0, 1, b"v1")]
    assert peer.say(ask.replace(b"offset=0", b"offset=1")) == []
    world.memory.advance(1.1)
    assert unpack(peer.take_bodies()[0])[2] == []


def test_batches_after_a_long_poll_are_acknowledged_after_it() -> None:
    _, peer = filled(1)
    peer.feed(
        frame(b"CONSUME topic=c1 partition=1 offset=0 member=m wait_ms=1000") + frame(batch("c1", 1, messages(1)))
    )
    assert not peer.session.paused(), "a stopping broker does not wait for a long poll"
    peer.feed(frame(b"LIST"))
    peer.pass_by()
    read, acknowledged, listed = peer.take_bodies()
    assert unpack(read)[2] == [(0, 1, b"v1")]
    assert (acknowledged[:14], listed) == (b'{"status":"OK"', b"OK count=1 topics=c1")


def test_a_pattern_that_could_backtrack_exponentially_is_fast() -> None:
    peer = World().connect()
    peer.ask(f"CREATE topic={'a' * 40} partitions=1")
    with processor_used() as used:
        answer = peer.ask(f"CONSUME topic={'*a' * 12}b partition=0 member=m group=g")
    assert "no topics match" in answer
    assert used.seconds < 0.5
    assert "at most 249 characters" in peer.ask(f"CONSUME topic={'*a' * 125} partition=0 member=m group=g")


def test_a_pattern_reads_all_matching_topics() -> None:
    _, peer = filled(1)
    peer.ask("CREATE topic=c2 partitions=1")
    peer.ask(batch("c2", 0, messages(7)))
    topic, _, found = unpack(peer.say(b"CONSUME topic=c? partition=0 offset=0 member=m")[0])
    assert (topic, [value for _, _, value in found]) == ("c?", [b"v1", b"v7"])
    assert peer.ask("CONSUME topic=zz* partition=0 offset=0 member=m") == (
        "ERROR: command_failed reason=\"no topics match pattern 'zz*'\""
    )


def test_a_batch_has_the_requested_number_of_records() -> None:
    _, peer = filled()
    _, _, found = unpack(peer.say(b"CONSUME topic=c1 partition=0 offset=1 member=m batch=2")[0])
    assert [offset for offset, _, _ in found] == [1, 2]


def test_reads_below_the_first_offset_return_the_bounds() -> None:
    world, peer = filled()
    broker = world.memory.broker
    broker.purge_topic(broker.topic("c1"))
    peer.ask(batch("c1", 0, messages(9)))
    bounds = "requested=0 earliest=6 latest=7"
    assert peer.ask("CONSUME topic=c1 partition=0 offset=0 member=m") == f"ERROR: OFFSET_OUT_OF_RANGE {bounds}"
    (control,) = peer.say(b"STREAM topic=c1 partition=0 group=g offset=0")
    assert control.decode() == f"STREAM_CONTROL type=CLOSE reason=offset_out_of_range offset=0 {bounds}"
    (again,) = peer.say(b"STREAM topic=c1 partition=0 group=g offset=6")
    assert [offset for offset, _, _ in unpack(again)[2]] == [6]


def test_a_stream_pushes_records_and_keepalives_and_can_be_replaced() -> None:
    world, peer = filled(5)
    (first,) = peer.say(b"STREAM topic=c1 partition=0 group=sg member=m generation=1 offset=3")
    assert [offset for offset, _, _ in unpack(first)[2]] == [3, 4]
    world.memory.advance(5.1)
    assert peer.take_bodies() == [b""]
    other = world.connect()
    other.ask(batch("c1", 0, messages(6)))
    peer.pass_by()
    assert [offset for offset, _, _ in unpack(peer.take_bodies()[0])[2]] == [5]
    other.feed(frame(b"STREAM topic=c1 partition=0 group=sg offset=6"))
    other.pass_by()
    assert peer.take_bodies() == [b"STREAM_CONTROL type=CLOSE reason=replaced offset=6"]
    assert not peer.closed
    world.memory.advance(11)
    assert peer.closed
    assert world.factory.state.stream_count == 1


def test_a_stream_pushes_records_as_soon_as_the_log_notifies_it() -> None:
    world, peer = filled(5)
    peer.say(b"STREAM topic=c1 partition=0 group=sg offset=5")
    producer = world.connect()
    producer.feed(frame(batch("c1", 0, messages(6))))
    assert isinstance(world.memory.loop, ManualLoop)
    world.memory.loop.run_pass()  # in which the log in memory notifies readers
    assert [offset for offset, _, _ in unpack(peer.take_bodies()[0])[2]] == [5]


def test_a_stream_ends_with_its_topic() -> None:
    world, peer = filled(1)
    peer.say(b"STREAM topic=c1 partition=0 group=sg offset=0")
    world.connect().ask("DELETE topic=c1")
    peer.pass_by()
    assert peer.take_bodies() == [b"STREAM_CONTROL type=CLOSE reason=removed offset=1"]


def test_a_client_that_does_not_read_is_not_read_from() -> None:
    world, peer = filled(1)
    peer.say(b"STREAM topic=c1 partition=0 group=sg offset=0")
    peer.backlog = peer.backlog_max + 1
    world.connect().ask(batch("c1", 0, messages(2)))
    world.memory.advance(6.0)
    assert peer.take_bodies() == []
    peer.backlog = 0
    peer.session.drained()
    peer.pass_by()
    assert [offset for offset, _, _ in unpack(peer.take_bodies()[0])[2]] == [1]
