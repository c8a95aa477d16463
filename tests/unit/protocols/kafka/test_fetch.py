"""Records fetched over the Kafka protocol (spec: kafka#fetch)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from polywire.broker.sliced import SlicedWork
from polywire.broker.topics import Topic
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.client_batches import decode_batches
from polywire.protocols.kafka.client_codec import decode_response
from polywire.protocols.kafka.context import KafkaSettings
from polywire.protocols.kafka.fetching import ENCODED_AT_ONCE_MAX
from polywire.protocols.kafka.messages import NO_ID, SERVED, Api, WireError
from polywire.protocols.runtime.slices import AT_ONCE_MAX
from polywire.records.columns import Record
from polywire.records.compression import Compression, compress_body
from polywire.records.rows import from_records
from polywire.testing.loop import ManualLoop
from polywire.types import Level, TopicName
from tests.unit.protocols.kafka.dialogue import Dialogue, World

ASKED = schema.request(Api.FETCH).Topics
MANY = 1 << 30


@pytest.fixture
def world() -> World:
    return World()


def make(world: World, partitions: int = 1, name: str = "orders") -> Topic:
    return world.memory.broker.create_topic(TopicName.parse(name), partitions)


def put(world: World, topic: Topic, *values: bytes, partition: int = 0, packed: Compression | None = None) -> None:
    batch = from_records([Record(value) for value in values])
    if packed is not None:
        batch = bytearray(compress_body(batch, packed))
    world.memory.broker.produce(topic.partitions[partition], batch, level=Level.WRITTEN, done=None)
    world.memory.run()


def asked(topic: Topic, *partitions: tuple[int, int], version: int = 12, limit: int = MANY, **fields: Any) -> Any:
    """Return partitions of a topic with the requested offsets."""
    entries = [
        ASKED.Partitions(partition=number, fetch_offset=offset, partition_max_bytes=limit, **fields)
        for number, offset in partitions
    ]
    topic_id = topic.id if version >= 13 else NO_ID
    return ASKED(topic=topic.name.full, topic_id=topic_id, partitions=entries)


def values(entry: Any, offset: int = 0) -> list[bytes | None]:
    return [record.value for record in decode_batches(entry.records, offset=offset)]


def fetched(peer: Dialogue, topic: Topic, offset: int = 0, version: int = 12, **fields: Any) -> Any:
    """Return the response for the only partition."""
    answer = peer.ask(Api.FETCH, version, topics=[asked(topic, (0, offset), version=version)], **fields)
    assert (answer.error, answer.session_id) == (0, 0)
    return answer.responses[0].partitions[0]


@pytest.mark.parametrize("version", range(SERVED[Api.FETCH].first, SERVED[Api.FETCH].last + 1))
def test_available_records_are_returned(world: World, version: int) -> None:
    topic = make(world)
    put(world, topic, b"a", b"b")
    put(world, topic, b"c")
    entry = fetched(world.connect(), topic, version=version, max_wait_ms=1_000, min_bytes=1)
    assert (entry.error, entry.high_watermark, entry.last_stable_offset) == (0, 3, 3)
    assert entry.log_start_offset == (0 if version >= 5 else -1)
    assert values(entry) == [b"a", b"b", b"c"]


@pytest.mark.parametrize("version", range(SERVED[Api.FETCH].first, SERVED[Api.FETCH].last + 1))
def test_large_and_small_records_of_several_topics(world: World, version: int) -> None:
    """Large records are sent without a copy, between the other bytes of the response."""
    sizes = {"a": (5_000, 1, 9_000), "b": (1, 0, 5_000), "c": (0, 0, 1)}
    topics = [make(world, len(counts), name) for name, counts in sizes.items()]
    for topic in topics:
        for number, size in enumerate(sizes[topic.name.full]):
            put(world, topic, b"x" * size, partition=number)
    requested = [asked(topic, (0, 0), (1, 0), (2, 0), version=version) for topic in topics]
    answer = world.connect().ask(Api.FETCH, version, topics=requested, max_bytes=MANY)
    assert [one.topic_id if version >= 13 else one.topic for one in answer.responses] == [
        topic.id if version >= 13 else topic.name.full for topic in topics
    ]
    found = [[[len(value or b"") for value in values(entry)] for entry in one.partitions] for one in answer.responses]
    assert found == [[[size] for size in counts] for counts in sizes.values()]


def test_reading_can_start_inside_a_batch(world: World) -> None:
    topic = make(world)
    put(world, topic, b"a", b"b", b"c")
    entry = fetched(world.connect(), topic, 1)
    assert [(record.offset, record.value) for record in decode_batches(entry.records)] == [(1, b"b"), (2, b"c")]


@pytest.mark.parametrize("packed", Compression)
def test_compressed_batches_are_decompressed(world: World, packed: Compression) -> None:
    topic = make(world)
    put(world, topic, b"a" * 5_000, b"b")
    put(world, topic, *[b"c" * 5_000] * 3, packed=packed)
    put(world, topic, b"d")
    put(world, topic, b"e" * 5_000, packed=packed)
    found = values(fetched(world.connect(), topic))
    assert found == [b"a" * 5_000, b"b", *[b"c" * 5_000] * 3, b"d", b"e" * 5_000]


@pytest.mark.parametrize("offset", [-1, 3, 2**62])
def test_offsets_out_of_range(world: World, offset: int) -> None:
    topic = make(world)
    put(world, topic, b"a", b"b")
    entry = fetched(world.connect(), topic, offset, max_wait_ms=60_000, min_bytes=1)
    reported = (
        entry.error,
        entry.high_watermark,
        entry.last_stable_offset,
        entry.log_start_offset,
        bytes(entry.records),
    )
    assert reported == (WireError.OFFSET_OUT_OF_RANGE, -1, -1, -1, b"")


def test_offsets_below_deleted_records_are_out_of_range(world: World) -> None:
    topic = make(world)
    put(world, topic, b"a", b"b")
    world.memory.broker.trim_partition(topic.partitions[0], 1)
    world.memory.run()
    peer = world.connect()
    assert fetched(peer, topic, 0).error == WireError.OFFSET_OUT_OF_RANGE
    assert values(fetched(peer, topic, 1)) == [b"b"]


def test_unknown_topics_and_partitions(world: World) -> None:
    topic = make(world)
    put(world, topic, b"a")
    peer = world.connect()
    named = ASKED(topic="none", partitions=[ASKED.Partitions(partition=0)])
    answer = peer.ask(Api.FETCH, 12, topics=[named, asked(topic, (0, 0), (5, 0))], max_wait_ms=9_000)
    errors = [entry.error for reported in answer.responses for entry in reported.partitions]
    assert errors == [WireError.UNKNOWN_TOPIC_OR_PARTITION, 0, WireError.UNKNOWN_TOPIC_OR_PARTITION]
    unknown = ASKED(topic_id=b"\7" * 16, partitions=[ASKED.Partitions(partition=0)])
    entry = peer.ask(Api.FETCH, 13, topics=[unknown]).responses[0].partitions[0]
    assert entry.error == WireError.UNKNOWN_TOPIC_ID


def test_leader_epochs_are_checked(world: World) -> None:
    topic = make(world)
    peer = world.connect()
    for epoch, error in ((1, 0), (-1, 0), (0, WireError.FENCED_LEADER_EPOCH), (2, WireError.UNKNOWN_LEADER_EPOCH)):
        topics = [asked(topic, (0, 0), current_leader_epoch=epoch)]
        assert peer.ask(Api.FETCH, 12, topics=topics).responses[0].partitions[0].error == error


# Limits


def test_limits_hold_except_for_the_first_record(world: World) -> None:
    topic = make(world, 3)
    for number in range(3):
        for _ in range(10):
            put(world, topic, b"x" * 1_000, partition=number)
    peer = world.connect()

    def counts(limit: int, **fields: Any) -> list[int]:
        topics = [asked(topic, (0, 0), (1, 0), (2, 0), limit=limit)]
        answer = peer.ask(Api.FETCH, 12, topics=topics, **fields)
        return [len(values(entry)) for entry in answer.responses[0].partitions]

    assert counts(MANY) == [10, 10, 10]
    assert counts(2_500) == [2, 2, 2]
    assert counts(0) == [1, 0, 0]
    assert counts(MANY, max_bytes=1) == [1, 0, 0]
    assert counts(MANY, max_bytes=14_000) == [10, 3, 0]
    assert counts(5_000, max_bytes=12_000) == [4, 4, 3]


def test_the_broker_limits_the_size_of_a_response() -> None:
    world = World(kafka=KafkaSettings(answer_bytes_max=3_000))
    topic = make(world)
    for _ in range(10):
        put(world, topic, b"x" * 1_000)
    assert len(values(fetched(world.connect(), topic))) == 2


def test_a_record_beyond_all_limits_is_returned_alone(world: World) -> None:
    topic = make(world)
    put(world, topic, b"x" * 3_000_000, b"y")
    entry = peer_entry = world.connect().ask(Api.FETCH, 12, topics=[asked(topic, (0, 0), limit=1_000)])
    assert [len(value or b"") for value in values(entry.responses[0].partitions[0])] == [3_000_000]
    del peer_entry


@pytest.mark.parametrize("value", [b"", b"a", b"a" * 500])
@pytest.mark.parametrize("packed", [None, Compression.LZ4])
def test_records_that_grow_much_are_returned_up_to_the_limits(
    world: World, value: bytes, packed: Compression | None
) -> None:
    """Small records are several times as large in a response as in the log, and compressed ones any number of times."""
    topic = make(world)
    put(world, topic, *[value] * 100, packed=packed)
    peer = world.connect()
    whole = fetched(peer, topic)
    assert values(whole) == [value] * 100
    size = len(whole.records)
    for limit, count in ((size, 100), (size - 1, 99), (1, 1)):
        (entry,) = peer.ask(Api.FETCH, 12, topics=[asked(topic, (0, 0), limit=limit)]).responses[0].partitions
        assert values(entry) == [value] * count


# Waiting


def test_an_empty_response_is_sent_when_the_wait_ends(world: World) -> None:
    topic = make(world)
    peer = world.connect()
    number = peer.tell(
        Api.FETCH, 12, schema.request(Api.FETCH)(topics=[asked(topic, (0, 0))], max_wait_ms=500, min_bytes=1)
    )
    peer.pass_by()
    world.memory.advance(0.4)
    assert list(peer.frames()) == []
    world.memory.advance(0.2)
    (frame,) = peer.frames()
    correlation, body = decode_response(Api.FETCH, 12, frame)
    assert (correlation, bytes(body.responses[0].partitions[0].records)) == (number, b"")


def test_a_new_record_completes_a_waiting_fetch(world: World) -> None:
    topic = make(world, 2)
    peer = world.connect()
    topics = [asked(topic, (0, 0), (1, 0))]
    peer.tell(Api.FETCH, 12, schema.request(Api.FETCH)(topics=topics, max_wait_ms=60_000, min_bytes=1))
    peer.pass_by()
    put(world, topic, b"a", partition=1)
    peer.pass_by()
    (frame,) = peer.frames()
    entries = decode_response(Api.FETCH, 12, frame)[1].responses[0].partitions
    assert [values(entry) for entry in entries] == [[], [b"a"]]


def test_a_fetch_waits_for_min_bytes(world: World) -> None:
    topic = make(world)
    put(world, topic, b"a")
    peer = world.connect()
    body = schema.request(Api.FETCH)(topics=[asked(topic, (0, 0))], max_wait_ms=60_000, min_bytes=3_000)
    peer.tell(Api.FETCH, 12, body)
    peer.pass_by()
    put(world, topic, b"b")
    peer.pass_by()
    assert list(peer.frames()) == []
    put(world, topic, b"c" * 3_000)
    peer.pass_by()
    (frame,) = peer.frames()
    assert len(values(decode_response(Api.FETCH, 12, frame)[1].responses[0].partitions[0])) == 3


def test_requests_after_a_waiting_fetch_wait_too(world: World) -> None:
    topic = make(world)
    peer = world.connect()
    body = schema.request(Api.FETCH)(topics=[asked(topic, (0, 0))], max_wait_ms=500, min_bytes=1)
    first = peer.tell(Api.FETCH, 12, body)
    second = peer.tell(Api.METADATA, 9, schema.request(Api.METADATA)(topics=[]))
    peer.pass_by()
    assert list(peer.frames()) == []
    world.memory.advance(1)
    peer.pass_by()
    assert [int.from_bytes(frame[:4], "big") for frame in peer.frames()] == [first, second]


def test_deleting_a_topic_completes_a_waiting_fetch(world: World) -> None:
    topic = make(world)
    peer = world.connect()
    peer.tell(Api.FETCH, 12, schema.request(Api.FETCH)(topics=[asked(topic, (0, 0))], max_wait_ms=60_000, min_bytes=1))
    peer.pass_by()
    world.memory.broker.delete_topic(topic)
    peer.pass_by()
    (frame,) = peer.frames()
    error = decode_response(Api.FETCH, 12, frame)[1].responses[0].partitions[0].error
    assert error == WireError.UNKNOWN_TOPIC_OR_PARTITION


def test_a_closed_connection_stops_waiting(world: World) -> None:
    topic = make(world)
    peer = world.connect()
    peer.tell(Api.FETCH, 12, schema.request(Api.FETCH)(topics=[asked(topic, (0, 0))], max_wait_ms=60_000, min_bytes=1))
    peer.pass_by()
    peer.session.close()
    put(world, topic, b"a")
    world.memory.advance(100)
    assert not peer.sent


# Many partitions

WIDE = ENCODED_AT_ONCE_MAX + 1


def wide(world: World, count: int = WIDE) -> tuple[Topic, Any]:
    topic = make(world, count)
    topics = [asked(topic, *((number, 0) for number in range(count)))]
    return topic, schema.request(Api.FETCH)(topics=topics, max_wait_ms=60_000, min_bytes=1, max_bytes=MANY)


def test_many_partitions_are_fetched_in_slices(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    topic, body = wide(world)
    large, small = b"l" * 5_000, b"s"
    put(world, topic, large, partition=3)
    put(world, topic, small, partition=WIDE - 1)
    peer, other = world.connect(), world.connect()
    looks: list[int] = []
    monkeypatch.setattr(world.memory.broker, "sliced", CountedSlices(world.memory.broker.sliced, looks))
    peer.tell(Api.FETCH, 12, body)
    other.tell(Api.API_VERSIONS, 0, schema.request(Api.API_VERSIONS)())
    assert other.sent
    assert not peer.sent
    peer.pass_by()
    (frame,) = peer.frames()
    entries = decode_response(Api.FETCH, 12, frame)[1].responses[0].partitions
    assert [entry.index for entry in entries] == list(range(WIDE))
    found = {entry.index: values(entry) for entry in entries if entry.records}
    assert found == {3: [large], WIDE - 1: [small]}
    assert len(looks) > 2 * (WIDE // AT_ONCE_MAX), "each part of the work pauses"


class CountedSlices:
    """Slices that end at their first check of the time."""

    def __init__(self, sliced: SlicedWork, looks: list[int]) -> None:
        self._sliced = sliced
        self._looks = looks

    def put(self, step: Callable[[float], bool]) -> None:
        def one(end: float) -> bool:
            self._looks.append(1)
            return step(-1.0)

        self._sliced.put(one)


@pytest.mark.parametrize("partition", [0, WIDE - 1])
def test_a_new_record_completes_a_waiting_fetch_of_many_partitions(world: World, partition: int) -> None:
    topic, body = wide(world)
    peer = world.connect()
    peer.tell(Api.FETCH, 12, body)
    peer.pass_by()
    assert not peer.sent
    put(world, topic, b"a", partition=partition)
    peer.pass_by()
    (frame,) = peer.frames()
    entries = decode_response(Api.FETCH, 12, frame)[1].responses[0].partitions
    assert {entry.index: values(entry) for entry in entries if entry.records} == {partition: [b"a"]}


@pytest.mark.parametrize("passes", range(1, 60, 3))
def test_records_and_deletions_during_a_sliced_fetch_are_seen(
    world: World, monkeypatch: pytest.MonkeyPatch, passes: int
) -> None:
    """A record of the first partition arrives before it is read, after it, or while the fetch already waits."""
    count = 4 * AT_ONCE_MAX
    topic, body = wide(world, count)
    peer = world.connect()
    monkeypatch.setattr(world.memory.broker, "sliced", CountedSlices(world.memory.broker.sliced, []))
    peer.tell(Api.FETCH, 12, body)
    loop = world.memory.loop
    assert isinstance(loop, ManualLoop)
    for _ in range(10 * passes):
        loop.run_pass()
    if passes % 2:
        put(world, topic, b"a")
    else:
        world.memory.broker.delete_topic(topic)
    peer.pass_by()
    (frame,) = peer.frames()
    entries = decode_response(Api.FETCH, 12, frame)[1].responses[0].partitions
    assert len(entries) == count
    if passes % 2:
        assert values(entries[0]) == [b"a"]
    else:
        assert WireError.UNKNOWN_TOPIC_OR_PARTITION in {entry.error for entry in entries}


def test_a_fetch_of_many_partitions_stops_when_the_connection_closes(world: World) -> None:
    topic, body = wide(world)
    peer = world.connect()
    peer.tell(Api.FETCH, 12, body)
    peer.session.close()
    peer.pass_by()
    put(world, topic, b"a")
    peer.pass_by()
    assert not peer.sent
