"""Cost of lists and lookups, and assignment of ids, with many topics."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from polywire.broker.broker import Broker
from polywire.broker.sliced import SLICE_S, SlicedWork
from polywire.broker.topic_verbs import AT_ONCE_MAX
from polywire.broker.topics import Topic
from polywire.errors import Busy, ErrorCode
from polywire.protocols.iggy import client_codec
from polywire.protocols.iggy.client_codec import ident, request
from polywire.protocols.iggy.directory import Directory
from polywire.protocols.iggy.messages import U32, Code
from polywire.protocols.iggy.session import IggySession
from polywire.testing.loop import ManualLoop, SimulatedClock
from polywire.testing.memory_log import MemoryLog
from polywire.types import Level, TopicName
from tests.unit.broker.answers import batch_of
from tests.unit.protocols.iggy.dialogue import Dialogue
from tests.unit.protocols.iggy.test_documented import create_topic, peer

__all__ = ["peer"]


def test_a_lookup_of_a_missing_topic_does_not_scan_all_topics(peer: Dialogue, monkeypatch: pytest.MonkeyPatch) -> None:
    broker = peer.world.memory.broker
    looks: list[int] = []
    topics = broker.topics

    def look(_: Broker) -> list[Topic]:
        looks.append(1)
        return topics()

    monkeypatch.setattr(Broker, "topics", look)
    for _ in range(3):
        assert peer.classic(Code.GET_TOPIC, ident(1) + ident("none"))[0] == 2011
        assert peer.classic(Code.GET_STREAMS)[0] == 0
    assert create_topic(peer, 2, "u") == 0
    assert peer.classic(Code.GET_TOPIC, ident(1) + ident("none"))[0] == 2011
    assert not looks
    broker.create_topic(TopicName("s", "of-another-wire"))
    peer.pass_by()
    assert peer.classic(Code.GET_TOPIC, ident(1) + ident("of-another-wire"))[0] == 0
    assert len(looks) == 1


def test_concurrent_lists_are_answered_in_order(peer: Dialogue) -> None:
    for number in range(2, 40):
        create_topic(peer, number, f"t{number}")
    peer.feed(request(Code.GET_STREAMS) + request(Code.GET_TOPICS, ident(1)) + request(Code.PING))
    peer.pass_by()
    answers = peer.take()
    sizes = []
    while answers:
        status, size = U32.unpack_from(answers)[0], U32.unpack_from(answers, 4)[0]
        assert status == 0
        sizes.append(size)
        answers = answers[8 + size :]
    assert len(sizes) == 3
    assert 0 < sizes[0] < sizes[1]
    assert sizes[2] == 0


def test_ids_of_deleted_topics_are_reused(peer: Dialogue) -> None:
    for number in range(3):
        peer.world.memory.broker.create_topic(TopicName("s", f"other{number}"))
    peer.pass_by()
    assert peer.classic(Code.GET_TOPIC, ident(1) + ident("other2"))[0] == 0
    assert peer.classic(Code.DELETE_TOPIC, ident(1) + ident("other0"))[0] == 0
    peer.world.memory.broker.create_topic(TopicName("s", "fresh"))
    peer.pass_by()
    status, payload = peer.classic(Code.GET_TOPIC, ident(1) + ident("fresh"))
    assert (status, U32.unpack_from(payload)[0]) == (0, 2)


def test_many_topics_of_another_protocol_get_ids_in_slices(peer: Dialogue, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = peer.world.memory
    for number in range(300):
        memory.broker.create_topic(TopicName("s", f"other{number}"))
    peer.pass_by()
    configure = Broker.configure_topic
    held: list[int] = []

    def configured(broker: Broker, *args: Any, **settings: Any) -> None:
        held[-1] += 1
        now_s[0] += 0.001
        configure(broker, *args, **settings)

    def run(work: SlicedWork) -> None:
        held.append(0)
        ran(work)

    now_s, monotonic, ran = [0.0], memory.clock.monotonic, SlicedWork._run
    monkeypatch.setattr(type(memory.clock), "monotonic", lambda _: monotonic() + now_s[0])
    monkeypatch.setattr(Broker, "configure_topic", configured)
    monkeypatch.setattr(SlicedWork, "_run", run)
    asked = [peer, peer.beside()]
    for one in asked:
        one.feed(request(Code.GET_STREAM, ident(1)) + request(Code.PING))
    peer.pass_by()
    assert sum(held) == 300
    assert max(held) <= 3, "other clients had their turn"
    for one in asked:
        answer = one.take()
        stream, topics = client_codec.read_stream(answer[8:-8])
        assert (stream.topic_count, len(topics), answer[-8:]) == (301, 301, bytes(8))


def test_a_new_topic_among_many_is_found_in_slices(peer: Dialogue, monkeypatch: pytest.MonkeyPatch) -> None:
    broker, in_slices, scan_in_slices = peer.world.memory.broker, [0], Directory.scan_in_slices

    def counted(directory: Directory, then: Callable[[], None]) -> None:
        in_slices[-1] += 1
        scan_in_slices(directory, then)

    monkeypatch.setattr("polywire.protocols.iggy.directory.SCANNED_MAX", 20)
    monkeypatch.setattr(Directory, "scan_in_slices", counted)
    for count in (20, 1, 0):
        for number in range(count):
            broker.create_topic(TopicName("s", f"other{count}-{number}"))
        peer.pass_by()
        status, payload = peer.classic(Code.GET_STREAM, ident(1))
        assert (status, client_codec.read_stream(payload)[0].topic_count) == (0, len(broker.topics()))
        in_slices.append(0)
    assert in_slices == [0, 1, 0, 0]


def test_topics_deleted_while_ids_are_assigned(peer: Dialogue) -> None:
    assert isinstance(peer.session, IggySession)
    broker, directory = peer.world.memory.broker, peer.session.shared.directory
    made = [broker.create_topic(TopicName(f"x{number % 3}", f"other{number}")) for number in range(90)]
    peer.pass_by()
    look = directory._scan()
    for turn, _ in enumerate(look):
        if turn % 3 == 0 and made:
            broker.delete_topic(made.pop(0))
        if turn == 40:
            peer.classic(Code.GET_TOPIC, ident("x1") + ident("none"))  # another lookup runs meanwhile
    peer.pass_by()
    status, payload = peer.classic(Code.GET_STREAMS)
    assert status == 0
    living = {stream.name: stream.topic_count for stream in client_codec.read_streams(payload)}
    assert sum(living.values()) == 1 + len(made) == len(broker.topics())


def test_topics_that_cannot_get_ids_are_an_error_and_not_a_loop(
    peer: Dialogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(100):
        peer.world.memory.broker.create_topic(TopicName("s", f"other{number}"))
    peer.pass_by()

    def full(*_: object, **__: object) -> None:
        raise Busy(ErrorCode.BUSY, "no room")

    with monkeypatch.context() as patched:
        patched.setattr(Broker, "configure_topic", full)
        assert peer.classic(Code.GET_STREAM, ident(1))[0] == 1
    peer.world.memory.broker.create_topic(TopicName("s", "one-more"))
    peer.pass_by()
    assert peer.classic(Code.GET_STREAM, ident(1))[0] == 0


MANY = AT_ONCE_MAX


def passes(peer: Dialogue) -> list[int]:
    """Return the number of topics after each pass of the loop until the client gets its response."""
    memory, left = peer.world.memory, []
    assert isinstance(memory.loop, ManualLoop)
    while not peer.sent:
        memory.loop.run_pass()
        left.append(len(memory.broker.topics()))
    return left


@pytest.fixture
def slow(peer: Dialogue, monkeypatch: pytest.MonkeyPatch) -> Dialogue:
    """Return a client whose stream has many topics; deleting or purging each takes a tenth of a slice."""
    memory = peer.world.memory
    for number in range(MANY):
        memory.broker.create_topic(TopicName("s", f"other{number}"))
    peer.pass_by()
    assert peer.classic(Code.GET_STREAM, ident(1))[0] == 0
    for verb in ("drop_partition", "trim"):
        real: Any = getattr(MemoryLog, verb)

        def slowly(*args: Any, real: Any = real) -> None:
            assert isinstance(memory.clock, SimulatedClock)
            memory.clock.advance(SLICE_S / 10)
            real(*args)

        monkeypatch.setattr(MemoryLog, verb, slowly)
    return peer


def test_a_stream_of_many_topics_is_deleted_in_slices(slow: Dialogue) -> None:
    count = len(slow.world.memory.broker.topics())
    slow.feed(request(Code.DELETE_STREAM, ident(1)) + request(Code.GET_STREAM, ident(1)))
    left = passes(slow)
    assert max(before - after for before, after in pairwise([count, *left])) <= 12
    assert left[-1] == 0
    slow.pass_by()
    answers = slow.take()
    assert [U32.unpack_from(answers, 8 * number)[0] for number in range(2)] == [0, 1009]
    assert isinstance(slow.session, IggySession)
    directory = slow.session.shared.directory
    assert not directory._topics
    assert directory._seen_version == slow.world.memory.broker.topics_version, "no other request scans all topics again"


def test_topics_created_during_the_deletion_of_their_stream_are_deleted(slow: Dialogue) -> None:
    slow.feed(request(Code.DELETE_STREAM, ident(1)))
    slow.world.memory.loop.run_pass()  # type: ignore[attr-defined]
    other = slow.beside()
    assert create_topic(other, 4000, "late") == 0
    slow.pass_by()
    assert slow.take()[:4] == bytes(4)
    assert slow.world.memory.broker.topics() == []
    assert other.classic(Code.GET_STREAM, ident(1))[0] == 1009


def test_a_stop_keeps_the_stream_with_its_remaining_topics(slow: Dialogue) -> None:
    world, count = slow.world, len(slow.world.memory.broker.topics())
    slow.feed(request(Code.DELETE_STREAM, ident(1)))
    for _ in range(5):
        world.memory.loop.run_pass()  # type: ignore[attr-defined]
    world.restart()
    again = slow.beside()
    status, payload = again.classic(Code.GET_STREAM, ident(1))
    assert status == 0
    assert 0 < client_codec.read_stream(payload)[0].topic_count < count
    assert again.classic(Code.DELETE_STREAM, ident(1))[0] == 0
    assert again.classic(Code.GET_STREAM, ident(1))[0] == 1009
    assert world.memory.broker.topics() == []


def test_a_stream_of_many_topics_is_purged_in_slices(slow: Dialogue) -> None:
    broker = slow.world.memory.broker
    for topic in broker.topics():
        broker.produce(topic.partitions[0], batch_of(b"v"), level=Level.MEMORY, done=None)
    slow.feed(request(Code.PURGE_STREAM, ident(1)))
    assert len(passes(slow)) > MANY // 12
    assert slow.take()[:4] == bytes(4)
    assert {
        (topic.partitions[0].log.first_offset, topic.partitions[0].log.next_offset) for topic in broker.topics()
    } == {(1, 1)}
