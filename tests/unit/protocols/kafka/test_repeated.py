"""Requests that repeat an earlier one: the same bytes as from a session that compares nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from polywire.broker.settings import AccessList, TopicSettings
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.client_batches import encode_batch
from polywire.protocols.kafka.client_codec import encode_request
from polywire.protocols.kafka.configs import settings_of
from polywire.protocols.kafka.factory import COMMANDS
from polywire.protocols.kafka.fetch_responses import IDS_SINCE, SESSIONS_SINCE
from polywire.protocols.kafka.messages import NO_ID, SERVED, Api, Codec
from polywire.protocols.kafka.session import KafkaSession
from polywire.protocols.runtime.shapes import SHAPES_MAX
from polywire.records.columns import Record
from polywire.records.rows import from_records
from polywire.types import Level
from tests.unit.protocols.kafka.dialogue import Dialogue, World
from tests.unit.protocols.kafka.test_produce import NOW_US, body_of, make

FETCH = schema.request(Api.FETCH)
FETCH_VERSIONS = range(SERVED[Api.FETCH].answered_from, SERVED[Api.FETCH].last + 1)
BATCH = encode_batch([Record(b"value", key=b"key")])
KEYLESS = encode_batch([Record(b"value")])
DAMAGED = BATCH[:-1] + b"!"
VERSIONS = range(SERVED[Api.PRODUCE].answered_from, SERVED[Api.PRODUCE].last + 1)
UNLEARNED = {api: replace(command, learn=None) for api, command in COMMANDS.items()}
Play = Callable[["Client"], None]


class Client:
    """One connection, whose requests may differ from each other."""

    def __init__(self, version: int, settings: TopicSettings | None, *, learns: bool) -> None:
        self.world = World(now_us=NOW_US)
        self.topic = make(self.world, settings)
        self.peer: Dialogue = self.world.connect()
        self.version = version
        if not learns:
            self.session._commands = UNLEARNED  # type: ignore[misc]
        self.repeated: list[bool] = []
        self.sent = b""
        self._number = 0

    @property
    def session(self) -> KafkaSession:
        session = self.peer.session
        assert isinstance(session, KafkaSession)
        return session

    def send(self, batch: bytes = BATCH, *, partition: int = 0, acks: int = 1, tail: bytes = b"", **more: Any) -> None:
        """Send a request with one batch, and note whether it was executed as a repetition."""
        self.send_body(body_of(self.topic, {partition: batch}, self.version, acks), tail=tail, **more)

    def send_fetch(self, offsets: dict[int, int], *, client_id: str = "test", tail: bytes = b"", **fields: Any) -> None:
        """Send a Fetch request, and note whether it was executed as a repetition."""
        topic_id = self.topic.id if self.version >= IDS_SINCE else NO_ID
        entries = [
            FETCH.Topics.Partitions(partition=number, fetch_offset=offset, partition_max_bytes=9_000)
            for number, offset in offsets.items()
        ]
        topic = FETCH.Topics(topic=self.topic.name.full, topic_id=topic_id, partitions=entries)
        asked: dict[str, Any] = {"session_epoch": -1, "max_wait_ms": 500, "topics": [topic] if entries else []}
        self.send_body(FETCH(**asked | fields), api=Api.FETCH, client_id=client_id, tail=tail)

    def send_body(self, body: Any, *, api: Api = Api.PRODUCE, tail: bytes = b"", client_id: str = "test") -> None:
        self._number += 1
        frame = encode_request(api, self.version, self._number, body, client_id=client_id)
        frame = (len(frame) - 4 + len(tail)).to_bytes(4, "big") + frame[4:] + tail
        take = self.session.take_repeated
        self.repeated.append(False)
        if take is not None:

            def noted(*given: Any) -> bool:
                self.repeated[-1] = take(*given)
                return self.repeated[-1]

            self.session.take_repeated = noted
        self.peer.feed(frame)
        self.peer.pass_by()
        if take is not None and self.session.take_repeated is noted:
            self.session.take_repeated = take
        self.sent += self.peer.take()

    def result(self) -> tuple[bytes, object]:
        ends = [partition.log.next_offset for partition in self.topic.partitions]
        return self.sent.replace(self.topic.id, bytes(16)), (self.peer.closed, ends)


def played(play: Play, version: int = 9, settings: TopicSettings | None = None) -> list[bool]:
    """Run a conversation with and without repetitions; return which requests were executed as repetitions."""
    learned, plain = (Client(version, settings, learns=learns) for learns in (True, False))
    play(learned)
    play(plain)
    assert learned.result() == plain.result()
    assert not any(plain.repeated)
    return learned.repeated


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("acks", [1, -1])
def test_the_same_request_is_repeated(version: int, acks: int) -> None:
    def play(client: Client) -> None:
        for size in (1, 1, 50, 63, 64, 200, 9_000):
            client.send(encode_batch([Record(b"v" * size)]), acks=acks)

    assert played(play, version) == [False] + [True] * 6


@pytest.mark.parametrize("version", VERSIONS)
def test_bytes_after_a_request_are_ignored(version: int) -> None:
    def play(client: Client) -> None:
        client.send(tail=b"more")
        client.send()
        client.send(tail=b"more")
        client.send()

    assert played(play, version) == [False, False, False, True]


@pytest.mark.parametrize("version", [8, 9, 13])
def test_refused_batches_get_their_errors(version: int) -> None:
    def play(client: Client) -> None:
        for batch in (BATCH, DAMAGED, BATCH[:-1], b"", encode_batch([Record(b"v")], attributes=32), BATCH):
            client.send(batch)

    assert played(play, version) == [False] * 5 + [True]


def test_other_requests_are_executed_like_any() -> None:
    def play(client: Client) -> None:
        client.send()
        client.send(acks=0)
        client.send(acks=2)
        client.send(encode_batch([Record(os.urandom(20_000))], codec=Codec.GZIP))
        client.send(encode_batch([Record(bytes(2_000_000))], codec=Codec.ZSTD))
        client.send(partition=5)
        client.send_body(body_of(client.topic, {0: BATCH, 1: BATCH}, client.version, 1))
        client.send_body(body_of(client.topic, {0: BATCH}, client.version, 1, transactional_id="t"))
        client.send(encode_batch([Record(b"v")], attributes=16, producer_id=1, producer_epoch=0, base_sequence=0))
        client.send()

    assert played(play) == [False] * 9 + [True]


@pytest.mark.parametrize("codec", Codec)
def test_small_compressed_batches_are_repeated(codec: Codec) -> None:
    def play(client: Client) -> None:
        for batch in (BATCH, DAMAGED, BATCH, KEYLESS):
            client.send(encode_batch([Record(batch * 9)], codec=codec))

    assert played(play) == [False, True, True, True]


def test_sequences_of_a_producer_are_checked() -> None:
    def play(client: Client) -> None:
        for sequence in (0, 1, 1, 3, 2, *range(3, 9), 2, 0):
            batch = encode_batch([Record(b"v")], producer_id=7, producer_epoch=0, base_sequence=sequence)
            client.send(batch)

    repeated = played(play)
    assert repeated[:3] == [False, True, True]
    assert repeated[4]


@pytest.mark.parametrize(
    "settings",
    [
        TopicSettings(compaction=True),
        settings_of({"message.timestamp.type": "LogAppendTime"}),
        settings_of({"max.message.bytes": "80"}),
        settings_of({"message.timestamp.before.max.ms": "1000", "message.timestamp.after.max.ms": "1000"}),
    ],
)
def test_settings_of_the_topic_are_applied(settings: TopicSettings) -> None:
    def play(client: Client) -> None:
        for batch in (BATCH, KEYLESS, encode_batch([Record(b"v", origin_time_us=NOW_US - 9_000_000)]), BATCH):
            client.send(batch)

    played(play, settings=settings)


def test_changes_of_the_topic_are_noticed() -> None:
    def configure(client: Client, **changes: Any) -> None:
        client.world.memory.broker.configure_topic(client.topic, replace(client.topic.settings, **changes))
        client.world.memory.run()

    def play(client: Client) -> None:
        client.send()
        client.send()
        configure(client, access=AccessList(writers=("root",)))
        client.send()
        configure(client, access=None)
        client.send()
        client.world.memory.broker.delete_topic(client.topic)
        client.world.memory.run()
        client.send()
        client.topic = make(client.world)
        client.send()
        client.send()

    assert played(play) == [False, True, False, True, False, False, True]


def test_another_client_id_is_noticed() -> None:
    def play(client: Client) -> None:
        client.send()
        client.send(client_id="other")
        client.send(client_id="other")
        client.send()
        assert client.peer.client_id == "test"

    assert played(play) == [False, False, True, False]


def test_a_client_with_a_quota_gets_its_delay() -> None:
    client = Client(9, None, learns=True)
    client.send()
    client.peer.meter = object()  # type: ignore[assignment]
    client.send()
    assert client.repeated == [False, False]


def test_a_connection_remembers_few_shapes() -> None:
    client = Client(9, None, learns=True)
    for number in range(2 * SHAPES_MAX):
        body = body_of(client.topic, {0: BATCH}, client.version, 1, timeout_ms=number)
        client.send_body(body)
    client.send_body(body_of(client.topic, {0: BATCH}, client.version, 1, transactional_id=None), client_id="x" * 9_000)
    assert len(client.session.shapes) == 0
    client.send()
    for number in range(2 * SHAPES_MAX):
        client.send_body(body_of(client.topic, {0: BATCH}, client.version, 1, timeout_ms=number))
    assert len(client.session.shapes) == SHAPES_MAX


# Fetch requests


def put(client: Client, *partitions: int) -> None:
    for number in partitions:
        client.world.memory.broker.produce(
            client.topic.partitions[number], from_records([Record(b"value")]), level=Level.WRITTEN, done=None
        )
    client.world.memory.run()


@pytest.mark.parametrize("version", FETCH_VERSIONS)
def test_a_fetch_with_other_offsets_and_partitions_is_repeated(version: int) -> None:
    def play(client: Client) -> None:
        put(client, 0, 0, 0, 1)
        for offset in (0, 1, 2, 3, 4, -1, 2**62, 0):
            client.send_fetch({0: offset})
        client.send_fetch({1: 0})
        client.send_fetch({7: 0})
        client.send_fetch({0: 0, 1: 0})
        client.send_fetch({1: 1, 0: 2})

    assert played(play, version) == [False] + [True] * 9 + [False, True]


@pytest.mark.parametrize("version", [9, 12])
def test_produce_and_fetch_of_one_connection_are_both_repeated(version: int) -> None:
    def play(client: Client) -> None:
        for offset in range(4):
            client.send()
            client.send_fetch({0: offset})

    assert played(play, version) == [False, False] + [True] * 6


def test_a_fetch_that_differs_in_anything_else_is_not_repeated() -> None:
    def play(client: Client) -> None:
        put(client, 0)
        client.send_fetch({0: 0})
        client.send_fetch({0: 0}, min_bytes=1)
        client.send_fetch({0: 0}, max_bytes=1)
        client.send_fetch({0: 0}, rack_id="a")
        client.send_fetch({0: 0}, tail=b"more")
        client.send_fetch({0: 0}, client_id="other")
        client.send_fetch({0: 0}, client_id="other")
        client.send_fetch({0: 0})
        assert client.peer.client_id == "test"

    assert played(play, 12) == [False] * 6 + [True, False]


@pytest.mark.parametrize("version", range(SESSIONS_SINCE, SERVED[Api.FETCH].last + 1))
def test_the_requests_of_a_fetch_session_are_repeated(version: int) -> None:
    def play(client: Client) -> None:
        put(client, 0, 1, 1)
        client.send_fetch({0: 0, 1: 0}, session_epoch=0)
        client.send_fetch({1: 1}, session_epoch=1, session_id=1)
        client.send_fetch({1: 2}, session_epoch=2, session_id=1)
        put(client, 0)
        client.send_fetch({0: 1}, session_epoch=3, session_id=1)
        client.send_fetch({0: 1}, session_epoch=3, session_id=1)  # not the next epoch
        client.send_fetch({0: 1}, session_epoch=4, session_id=1)
        client.send_fetch({}, session_epoch=5, session_id=1)

    assert played(play, version) == [False, False, True, True, True, True, False]


@pytest.mark.parametrize("version", [12, 17])
def test_changes_of_the_topic_are_noticed_by_a_repeated_fetch(version: int) -> None:
    def configure(client: Client, access: AccessList | None) -> None:
        client.world.memory.broker.configure_topic(client.topic, replace(client.topic.settings, access=access))
        client.world.memory.run()

    def play(client: Client) -> None:
        put(client, 0)
        client.send_fetch({0: 0})
        configure(client, AccessList(readers=("root",)))
        client.send_fetch({0: 0})
        configure(client, None)
        client.send_fetch({0: 0})
        client.world.memory.broker.trim_partition(client.topic.partitions[0], 1)
        client.send_fetch({0: 0})
        client.world.memory.broker.delete_topic(client.topic)
        client.send_fetch({0: 0})

    assert played(play, version) == [False] + [True] * 4


def test_a_repeated_fetch_waits_for_the_earlier_one() -> None:
    def play(client: Client) -> None:
        put(client, 0)
        for offset in range(3):
            client.send_fetch({0: offset}, min_bytes=1)
        responses = len(client.sent)
        for _ in range(2):
            put(client, 0)
            client.peer.pass_by()
            client.sent += client.peer.take()
            assert len(client.sent) > responses
            responses = len(client.sent)

    assert played(play, 12) == [False, True, False]


def test_a_long_fetch_is_not_remembered() -> None:
    client = Client(12, None, learns=True)
    client.send_fetch(dict.fromkeys(range(50), 0))
    client.send_fetch(dict.fromkeys(range(50), 0))
    assert client.repeated == [False, False]
    for number in range(2 * SHAPES_MAX):
        client.send_fetch({0: 0}, max_bytes=number)
    assert len(client.session.fetch_shapes) == SHAPES_MAX
