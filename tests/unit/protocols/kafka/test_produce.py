"""Records produced over the Kafka protocol (spec: kafka#produce, kafka#refused-batches)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from polywire.broker.settings import Compression, TopicSettings
from polywire.broker.topics import Topic
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.client_batches import decode_batches, encode_batch
from polywire.protocols.kafka.client_codec import decode_response
from polywire.protocols.kafka.configs import AHEAD_MS_MAX, settings_of
from polywire.protocols.kafka.context import KafkaSettings
from polywire.protocols.kafka.messages import NO_ID, SERVED, Api, Codec, WireError
from polywire.records.columns import Header, Record
from polywire.types import Level, TopicName
from tests.unit.broker.test_owners import guard
from tests.unit.protocols.kafka.dialogue import Dialogue, World

NOW_US = 1_700_000_000_000_000
RECORDS = [
    Record(None, key=None),
    Record(b"", key=b""),
    Record(b"v", key=b"k", headers=(Header(b"h", b"1"), Header(b"h", None), Header(b"", b""))),
    Record(b"w" * 1000, origin_time_us=NOW_US - 5_000),
]


@pytest.fixture
def world() -> World:
    return World(now_us=NOW_US)


def make(world: World, settings: TopicSettings | None = None, name: str = "orders") -> Topic:
    return world.memory.broker.create_topic(TopicName.parse(name), 2, settings)


def body_of(topic: Topic, batches: dict[int, bytes | None], version: int, acks: int, **fields: Any) -> Any:
    asked = schema.request(Api.PRODUCE)
    entries = [asked.Topics.Partitions(index=number, records=batch) for number, batch in batches.items()]
    topic_id = topic.id if version >= 13 else NO_ID
    topics = [asked.Topics(name=topic.name.full, topic_id=topic_id, partitions=entries)]
    return asked(acks=acks, topics=topics, **fields)


def produce(
    peer: Dialogue, topic: Topic, *batches: bytes | None, version: int = 9, acks: int = 1, **fields: Any
) -> list[Any]:
    """Return the response of each partition."""
    number = peer.tell(Api.PRODUCE, version, body_of(topic, dict(enumerate(batches)), version, acks, **fields))
    peer.pass_by()
    frames = list(peer.frames())
    assert len(frames) == 1
    correlation, body = decode_response(Api.PRODUCE, version, frames[0])
    assert correlation == number
    return list(body.responses[0].partitions)


def stored(peer: Dialogue, topic: Topic, partition: int = 0) -> list[Record]:
    asked = schema.request(Api.FETCH).Topics
    entries = [asked.Partitions(partition=partition, fetch_offset=0, partition_max_bytes=1 << 24)]
    answer = peer.ask(Api.FETCH, 12, topics=[asked(topic=topic.name.full, partitions=entries)])
    return decode_batches(answer.responses[0].partitions[0].records)


def plain(records: Sequence[Record]) -> list[tuple[bytes | None, bytes | None, tuple[Header, ...]]]:
    return [(record.key, record.value, record.headers) for record in records]


@pytest.mark.parametrize("version", range(SERVED[Api.PRODUCE].answered_from, SERVED[Api.PRODUCE].last + 1))
def test_records_are_stored_unchanged(world: World, version: int) -> None:
    peer, topic = world.connect(), make(world)
    (first,) = produce(peer, topic, encode_batch(RECORDS), version=version)
    (second,) = produce(peer, topic, encode_batch(RECORDS), version=version)
    assert (first.error, first.base_offset, first.log_append_time_ms) == (0, 0, -1)
    assert (second.error, second.base_offset) == (0, 4)
    found = stored(peer, topic)
    assert plain(found) == plain(RECORDS) * 2
    assert [record.offset for record in found] == list(range(8))
    assert found[3].origin_time_us == NOW_US - 5_000


@pytest.mark.parametrize("codec", Codec)
def test_every_codec_is_decompressed(world: World, codec: Codec) -> None:
    peer, topic = world.connect(), make(world)
    (entry,) = produce(peer, topic, encode_batch(RECORDS, codec=codec))
    assert entry.error == 0
    assert plain(stored(peer, topic)) == plain(RECORDS)


@pytest.mark.parametrize("codec", [Codec.GZIP, Codec.ZSTD])
def test_large_compressed_batches_are_decompressed_off_the_event_loop(world: World, codec: Codec) -> None:
    peer, topic = world.connect(), make(world)
    large = [Record(b"x" * 100_000) for _ in range(30)]
    peer.tell(Api.PRODUCE, 9, body_of(topic, {0: encode_batch(large, codec=codec)}, 9, 1))
    small = peer.tell(Api.PRODUCE, 9, body_of(topic, {0: encode_batch(RECORDS)}, 9, 1))
    assert peer.pins == 1
    peer.pass_by()
    assert [int.from_bytes(frame[:4], "big") for frame in peer.frames()] == [small - 1, small]
    assert plain(stored(peer, topic)) == plain([*large, *RECORDS])
    assert peer.pins == 0


WIDE = 400


class ShortSlices:
    """Slices that end at their first check of the time."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self._sliced = world.memory.broker.sliced
        monkeypatch.setattr(world.memory.broker, "sliced", self)
        monkeypatch.setattr("polywire.protocols.kafka.produce.QUANTUM_S", -1.0)

    def put(self, step: Callable[[float], bool]) -> None:
        def one(end: float) -> bool:
            self.count += 1
            return step(-1.0)

        self._sliced.put(one)


def tell_wide(peer: Dialogue, topic: Topic, *, codec: Codec = Codec.NONE, acks: int = 1) -> int:
    """Send one batch for each partition, whose value is its number, and for a missing one."""
    batches = {number: encode_batch([Record(b"%d" % number)], codec=codec) for number in range(WIDE + 1)}
    return peer.tell(Api.PRODUCE, 9, body_of(topic, dict(batches), 9, acks))


def values_in(world: World, topic: Topic) -> list[bytes | None]:
    reader = world.connect()
    return [record.value for number in range(WIDE) for record in stored(reader, topic, number)]


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.GZIP])
def test_many_partitions_are_stored_in_slices(world: World, monkeypatch: pytest.MonkeyPatch, codec: Codec) -> None:
    topic = world.memory.broker.create_topic(TopicName.parse("wide"), WIDE)
    peer, other, slices = world.connect(), world.connect(), ShortSlices(world, monkeypatch)
    first = tell_wide(peer, topic, codec=codec)
    second = peer.tell(Api.PRODUCE, 9, body_of(topic, {0: encode_batch([Record(b"behind")])}, 9, 1))
    other.tell(Api.API_VERSIONS, 0, schema.request(Api.API_VERSIONS)())
    assert other.sent, "other requests go first"
    assert not peer.sent
    assert peer.pins == 1
    peer.pass_by()
    frames = list(peer.frames())
    assert [int.from_bytes(frame[:4], "big") for frame in frames] == [first, second]
    entries = decode_response(Api.PRODUCE, 9, frames[0])[1].responses[0].partitions
    assert [entry.error for entry in entries] == [0] * WIDE + [WireError.UNKNOWN_TOPIC_OR_PARTITION]
    assert slices.count > WIDE, "each partition may be the last of its slice"
    assert peer.pins == 0
    (behind,) = decode_response(Api.PRODUCE, 9, frames[1])[1].responses[0].partitions
    assert behind.base_offset == 1, "requests of a connection are not reordered"
    assert values_in(world, topic)[2:] == [b"%d" % number for number in range(1, WIDE)]


def test_many_compressed_batches_are_stored_in_slices(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = world.memory.broker.create_topic(TopicName.parse("wide"), WIDE)
    peer, slices = world.connect(), ShortSlices(world, monkeypatch)
    large = encode_batch([Record(b"x" * 20_000)], codec=Codec.GZIP)
    peer.tell(Api.PRODUCE, 9, body_of(topic, dict.fromkeys(range(WIDE), large), 9, 1))
    peer.pass_by()
    (frame,) = peer.frames()
    assert {entry.error for entry in decode_response(Api.PRODUCE, 9, frame)[1].responses[0].partitions} == {0}
    assert values_in(world, topic) == [b"x" * 20_000] * WIDE
    assert (slices.count > WIDE, peer.pins) == (True, 0)


@pytest.mark.parametrize("passes", [1, 50])
def test_a_closed_connection_stops_a_request_of_many_batches(
    world: World, monkeypatch: pytest.MonkeyPatch, passes: int
) -> None:
    topic = world.memory.broker.create_topic(TopicName.parse("wide"), WIDE)
    peer = world.connect()
    ShortSlices(world, monkeypatch)
    tell_wide(peer, topic)
    for _ in range(passes):
        world.memory.loop.run_pass()  # type: ignore[attr-defined]  # it is driven by hand
    peer.session.close()
    peer.closed = True
    peer.pass_by()
    assert peer.pins == 0
    assert 0 < len(values_in(world, topic)) < WIDE


def test_many_batches_without_acknowledgement_get_no_response(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = world.memory.broker.create_topic(TopicName.parse("wide"), WIDE + 1)
    peer = world.connect()
    ShortSlices(world, monkeypatch)
    tell_wide(peer, topic, acks=0)
    peer.pass_by()
    assert not peer.sent
    assert peer.gave_up is None
    assert len(values_in(world, topic)) == WIDE


def test_a_decompression_bomb_is_too_large(world: World) -> None:
    peer, topic = world.connect(), make(world)
    bomb = encode_batch([Record(b"\0" * 17_000_000)], codec=Codec.ZSTD)
    (entry,) = produce(peer, topic, bomb)
    assert entry.error == WireError.MESSAGE_TOO_LARGE
    assert stored(peer, topic) == []


def test_a_connection_closed_during_decompression_stores_nothing(world: World) -> None:
    peer, topic = world.connect(), make(world)
    large = encode_batch([Record(b"x" * 100_000) for _ in range(30)], codec=Codec.GZIP)
    peer.tell(Api.PRODUCE, 9, body_of(topic, {0: large}, 9, 1))
    peer.session.close()
    peer.closed = True
    peer.pass_by()
    assert peer.pins == 0
    assert stored(world.connect(), topic) == []


def test_partitions_fail_separately(world: World) -> None:
    peer, topic = world.connect(), make(world)
    good, damaged = encode_batch(RECORDS), bytearray(encode_batch(RECORDS))
    damaged[-1] ^= 1
    entries = produce(peer, topic, good, bytes(damaged), good)
    assert [(entry.error, entry.base_offset) for entry in entries] == [
        (0, 0),
        (WireError.CORRUPT_MESSAGE, -1),
        (WireError.UNKNOWN_TOPIC_OR_PARTITION, -1),
    ]
    assert entries[1].message


@pytest.mark.parametrize(
    ("batch", "error"),
    [
        (None, WireError.INVALID_RECORD),
        (b"", WireError.INVALID_RECORD),
        (b"x" * 60, WireError.CORRUPT_MESSAGE),
        (encode_batch(RECORDS) * 2, WireError.INVALID_RECORD),
        (encode_batch([]), WireError.INVALID_RECORD),
        (encode_batch(RECORDS, attributes=32), WireError.INVALID_RECORD),
        (encode_batch(RECORDS, attributes=16), WireError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED),
        (encode_batch(RECORDS, attributes=5), WireError.INVALID_RECORD),
        (encode_batch(RECORDS, attributes=1), WireError.INVALID_RECORD),
        (encode_batch(RECORDS, producer_id=1, producer_epoch=0, base_sequence=-1), WireError.INVALID_RECORD),
        (encode_batch(RECORDS, producer_id=1, base_sequence=0), WireError.INVALID_PRODUCER_EPOCH),
        (encode_batch(RECORDS, producer_id=-2, producer_epoch=0, base_sequence=0), WireError.INVALID_RECORD),
        (encode_batch([Record(b"v", origin_time_us=NOW_US + (AHEAD_MS_MAX + 1) * 1000)]), WireError.INVALID_TIMESTAMP),
    ],
)
def test_refused_batches(world: World, batch: bytes | None, error: WireError) -> None:
    peer, topic = world.connect(), make(world)
    (entry,) = produce(peer, topic, batch)
    assert (entry.error, entry.base_offset) == (error, -1)
    assert stored(peer, topic) == []


def test_timestamps_up_to_one_hour_ahead_are_accepted(world: World) -> None:
    peer, topic = world.connect(), make(world)
    (entry,) = produce(peer, topic, encode_batch([Record(b"v", origin_time_us=NOW_US + AHEAD_MS_MAX * 1000)]))
    assert entry.error == 0


def test_records_of_a_compacted_topic_need_keys(world: World) -> None:
    peer, topic = world.connect(), make(world, TopicSettings(compaction=True))
    assert produce(peer, topic, encode_batch(RECORDS))[0].error == WireError.INVALID_RECORD
    assert produce(peer, topic, encode_batch([Record(b"v", key=b"")]))[0].error == 0


def test_a_topic_limits_the_size_of_batches(world: World) -> None:
    peer, topic = world.connect(), make(world)
    config = schema.request(Api.INCREMENTAL_ALTER_CONFIGS).Resources
    changed = config.Configs(name="max.message.bytes", value="100")
    resource = config(resource_type=2, resource_name="orders", configs=[changed])
    assert not peer.ask(Api.INCREMENTAL_ALTER_CONFIGS, resources=[resource]).responses[0].error
    assert produce(peer, topic, encode_batch(RECORDS))[0].error == WireError.MESSAGE_TOO_LARGE
    assert produce(peer, topic, encode_batch([Record(b"v")]))[0].error == 0


@pytest.mark.parametrize("acks", [2, -2, 32767])
def test_other_acks_are_refused(world: World, acks: int) -> None:
    peer, topic = world.connect(), make(world)
    assert produce(peer, topic, encode_batch(RECORDS), acks=acks)[0].error == WireError.INVALID_REQUIRED_ACKS
    assert stored(peer, topic) == []


def test_topics_can_be_named_by_id(world: World) -> None:
    peer, topic = world.connect(), make(world)
    world.memory.broker.delete_topic(topic)
    make(world)
    (entry,) = produce(peer, topic, encode_batch(RECORDS), version=13)
    assert entry.error == WireError.UNKNOWN_TOPIC_ID


def test_acks_0_gets_no_response(world: World) -> None:
    peer, topic = world.connect(), make(world)
    peer.tell(Api.PRODUCE, 9, body_of(topic, {0: encode_batch(RECORDS)}, 9, 0))
    assert len(stored(peer, topic)) == 4
    assert not peer.closed


def test_a_failure_with_acks_0_closes_the_connection(world: World) -> None:
    peer, topic = world.connect(), make(world)
    peer.tell(Api.PRODUCE, 9, body_of(topic, {0: encode_batch(RECORDS), 7: encode_batch(RECORDS)}, 9, 0))
    peer.pass_by()
    assert peer.gave_up is not None
    assert peer.take() == b""
    assert len(stored(world.connect(), topic)) == 4


@pytest.mark.parametrize(("acks_all", "kept"), [(Level.SYNCED, True), (Level.WRITTEN, False)])
def test_acks_all_uses_the_configured_level(acks_all: Level, kept: bool) -> None:
    world = World(kafka=KafkaSettings(acks_all=acks_all))
    topic = make(world)
    world.memory.broker.settle(Level.SYNCED, lambda *_: None)
    world.memory.run()
    peer = world.connect()
    number = peer.tell(Api.PRODUCE, 9, body_of(topic, {0: encode_batch(RECORDS)}, 9, -1))
    answered = [int.from_bytes(frame[:4], "big") for frame in peer.frames()]
    assert answered == ([] if kept else [number])


def test_pipelined_requests_keep_their_order(world: World) -> None:
    peer, topic = world.connect(), make(world)
    numbers = [
        peer.tell(
            Api.PRODUCE, 9, body_of(topic, {0: encode_batch([Record(b"%d" % number)])}, 9, 1 if number % 3 else -1)
        )
        for number in range(50)
    ]
    peer.pass_by()
    assert [int.from_bytes(frame[:4], "big") for frame in peer.frames()] == numbers
    assert [record.value for record in stored(peer, topic)] == [b"%d" % number for number in range(50)]


def test_a_producer_belongs_to_the_first_user_who_used_it(world: World) -> None:
    """Producer ids are visible to users who may describe producers.

    Another user's batches with such an id are refused.
    """
    topic = make(world)
    guard(world.memory)

    def reported(name: str, sequence: int) -> Any:
        peer = world.connect()
        peer.certified = world.memory.broker.access.certified(name)
        batch = encode_batch([Record(name.encode())], producer_id=7, producer_epoch=0, base_sequence=sequence)
        (entry,) = produce(peer, topic, batch)
        return entry.error, entry.base_offset

    assert reported("alice", 0) == (WireError.NONE, 0)
    assert reported("bob", 1) == (WireError.TOPIC_AUTHORIZATION_FAILED, -1)
    assert reported("alice", 1) == (WireError.NONE, 1)


# Append times


def batch_at(*ahead_ms: int | None) -> bytes:
    """Return a batch of records with times so far ahead of the broker's clock; None has no time."""
    times = (None if ahead is None else NOW_US + ahead * 1000 for ahead in ahead_ms)
    return encode_batch([Record(b"v", origin_time_us=time_us) for time_us in times])


@pytest.mark.parametrize("after", [0, 60_000, 4 * AHEAD_MS_MAX])
def test_a_topic_limits_timestamps_in_the_future(world: World, after: int) -> None:
    peer, topic = world.connect(), make(world, settings_of({"message.timestamp.after.max.ms": str(after)}))
    assert [one.error for one in produce(peer, topic, batch_at(after, 0))] == [0]
    (refused,) = produce(peer, topic, batch_at(0, after + 1))
    assert refused.error == WireError.INVALID_TIMESTAMP
    assert f"limit={NOW_US // 1000 + after}" in refused.message
    assert listed(peer, topic, NOW_US // 1000 + after) == (0, NOW_US // 1000 + after)


def test_a_future_timestamp_is_found_behind_records_appended_later(world: World) -> None:
    """The search starts as far back as timestamps may be ahead."""
    hours = 3_600_000
    peer, topic = world.connect(), make(world, settings_of({"message.timestamp.after.max.ms": str(10 * hours)}))
    produce(peer, topic, batch_at(8 * hours))
    for _ in range(4):
        world.memory.advance(3600.0)
        produce(peer, topic, batch_at(None))
    assert listed(peer, topic, NOW_US // 1000 + 7 * hours) == (0, NOW_US // 1000 + 8 * hours)


@pytest.mark.parametrize("before", [0, 3_600_000])
def test_a_topic_limits_the_age_of_timestamps(world: World, before: int) -> None:
    peer, topic = world.connect(), make(world, settings_of({"message.timestamp.before.max.ms": str(before)}))
    assert [one.error for one in produce(peer, topic, batch_at(-before, None, 0))] == [0]
    assert [one.error for one in produce(peer, topic, batch_at(None))] == [0]
    (refused,) = produce(peer, topic, batch_at(0, None, -before - 1))
    assert refused.error == WireError.INVALID_TIMESTAMP
    assert f"limit={NOW_US // 1000 - before}" in refused.message
    assert len(stored(peer, topic)) == 4


def test_append_times_have_no_limits(world: World) -> None:
    given = {"message.timestamp.type": APPENDED}
    given |= {f"message.timestamp.{name}.max.ms": "0" for name in ("before", "after")}
    peer, topic = world.connect(), make(world, settings_of(given))
    assert [one.error for one in produce(peer, topic, batch_at(-1_000_000, 1_000_000))] == [0]


APPENDED = "LogAppendTime"


def listed(peer: Dialogue, topic: Topic, time_ms: int) -> tuple[int, int]:
    """Return the offset and time of the first record that is not older."""
    asked = schema.request(Api.LIST_OFFSETS).Topics
    topics = [asked(name=topic.name.full, partitions=[asked.Partitions(index=0, timestamp=time_ms)])]
    (entry,) = peer.ask(Api.LIST_OFFSETS, 7, topics=topics).topics[0].partitions
    return entry.offset, entry.timestamp


@pytest.mark.parametrize("compression", [Compression.NONE, Compression.ZSTD])
def test_a_topic_can_use_append_times(world: World, compression: Compression) -> None:
    """Whatever the client's clock says; the acknowledgement has the time that readers get."""
    settings = replace(settings_of({"message.timestamp.type": APPENDED}), compression=compression)
    peer, topic = world.connect(), make(world, settings)
    ahead = Record(b"ahead", origin_time_us=NOW_US + 2 * AHEAD_MS_MAX * 1000)
    (first,) = produce(peer, topic, encode_batch([*RECORDS, ahead]))
    world.memory.advance(2.5)
    (second,) = produce(peer, topic, encode_batch(RECORDS), version=13)
    now_ms = NOW_US // 1000
    assert (first.error, first.log_append_time_ms) == (0, now_ms)
    assert (second.error, second.log_append_time_ms) == (0, now_ms + 2500)
    found = stored(peer, topic)
    assert [record.append_time_us // 1000 for record in found] == [now_ms] * 5 + [now_ms + 2500] * 4
    assert [record.origin_time_us for record in found] == [None] * 9
    assert listed(peer, topic, now_ms - 5) == (0, now_ms)
    assert listed(peer, topic, now_ms + 1) == (5, now_ms + 2500)
    assert listed(peer, topic, -3) == (5, now_ms + 2500)


def test_acks_0_returns_no_append_time(world: World) -> None:
    topic = make(world, settings_of({"message.timestamp.type": APPENDED}))
    peer = world.connect()
    peer.tell(Api.PRODUCE, 9, body_of(topic, {0: encode_batch(RECORDS)}, 9, 0))
    peer.pass_by()
    assert not peer.sent
    assert peer.gave_up is None
    (entry,) = produce(peer, topic, encode_batch(RECORDS))
    assert entry.base_offset == len(RECORDS)


def test_records_purged_before_the_acknowledgement_have_no_time(world: World) -> None:
    topic = make(world, settings_of({"message.timestamp.type": APPENDED}))
    peer = world.connect()
    number = peer.tell(Api.PRODUCE, 9, body_of(topic, {0: encode_batch(RECORDS)}, 9, -1))
    world.memory.broker.purge_topic(topic)
    peer.pass_by()
    (frame,) = peer.frames()
    assert int.from_bytes(frame[:4], "big") == number


def test_a_topic_can_return_to_client_times(world: World) -> None:
    topic = make(world, settings_of({"message.timestamp.type": APPENDED}))
    peer = world.connect()
    produce(peer, topic, encode_batch(RECORDS))
    resource = schema.request(Api.INCREMENTAL_ALTER_CONFIGS).Resources
    config = resource.Configs(name="message.timestamp.type", config_operation=0, value="CreateTime")
    asked = [resource(resource_type=2, resource_name=topic.name.full, configs=[config])]
    assert peer.ask(Api.INCREMENTAL_ALTER_CONFIGS, resources=asked).responses[0].error == 0
    assert stored(peer, topic)[3].origin_time_us == NOW_US - 5_000
