"""Kafka 0.7 requests about topics of several shards: responses match a single process."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polywire.errors import PeerError
from polywire.protocols.kafka07.factory import Kafka07Factory
from polywire.protocols.kafka07.messages import (
    EARLIEST,
    LATEST,
    FetchEntry,
    encode_fetch,
    encode_multifetch,
    encode_multiproduce,
    encode_offsets,
    encode_produce,
    encode_set,
    split_multifetch_answer,
)
from polywire.protocols.kafka07.session import ENTRIES_AT_ONCE_MAX
from polywire.protocols.runtime.append_queue import BUSY_PAUSE_S
from polywire.routing import link
from polywire.routing.broker import RoutedBroker
from polywire.routing.session import RouterFactory
from tests.unit.protocols.shards_in_memory import KEY, MemoryShards, ShardedConversation

TOPICS = (b"a", b"bb", b"ccc", b"dddd")  # of shards 1, 2, 0 and 1
FRAMES = (
    *(encode_produce(topic, 0, encode_set([b"%d" % number])) for topic in TOPICS for number in range(3)),
    encode_multiproduce([(topic, 0, encode_set([topic, b"m"])) for topic in TOPICS]),
    encode_multiproduce([(topic, 0, encode_set([b"n"])) for topic in (b"ccc", b"bb", b"ccc")]),
    *(encode_fetch(topic, 0, at, 1000) for topic in TOPICS for at in (0, 11)),
    encode_fetch(b"nowhere", 0, 0, 1000),
    encode_multifetch([FetchEntry(topic, 0, 0, 1000) for topic in (*TOPICS, b"nowhere", b"bb")]),
    encode_multifetch([FetchEntry(topic, number, 0, 1000) for topic in TOPICS for number in (0, 9)]),
    *(encode_offsets(topic, 0, time, 2) for topic in TOPICS for time in (LATEST, EARLIEST)),
)


class Conversation(ShardedConversation):
    """One connection in front of ``count`` shards."""

    def __init__(self, count: int, shards: MemoryShards | None = None) -> None:
        shards = shards or MemoryShards(lambda broker: RouterFactory(broker, KEY), count)
        broker = RoutedBroker(shards.brokers[0], shards) if count > 1 else shards.brokers[0]
        super().__init__(shards, Kafka07Factory(broker))

    def say(self, *frames: bytes) -> None:
        for frame in frames:
            self.feed(frame)
        self.pass_by()

    def fetched(self, topic: bytes) -> bytes:
        self.say(encode_fetch(topic, 0, 0, 1 << 20))
        answer = self.take()
        assert answer[:6] == struct.pack(">ih", len(answer) - 4, 0)
        return answer[6:]


@settings(max_examples=60, deadline=None)
@given(chosen=st.lists(st.sampled_from(FRAMES), min_size=1, max_size=20), size=st.integers(5, 400))
def test_responses_match_a_single_process(chosen: list[bytes], size: int) -> None:
    data = b"".join(chosen)
    heard = []
    for count in (1, 3):
        conversation = Conversation(count)
        for at in range(0, len(data), size):
            conversation.feed(data[at : at + size])
            conversation.pass_by()
        conversation.pass_by()
        heard.append(conversation.take())
    assert heard[0] == heard[1]


def test_topics_are_created_in_the_shard_that_every_process_computes() -> None:
    conversation = Conversation(3)
    conversation.say(*(encode_produce(topic, 0, encode_set([topic])) for topic in TOPICS))
    assert [[topic.name.full for topic in broker.topics()] for broker in conversation.shards.brokers] == [
        ["ccc"],
        ["a", "dddd"],
        ["bb"],
    ]
    other = Conversation(3, conversation.shards)
    for topic in TOPICS:
        assert other.fetched(topic) == encode_set([topic])


def test_a_read_waits_for_records_produced_to_other_shards() -> None:
    conversation = Conversation(3)
    conversation.say(encode_produce(b"a", 0, encode_set([b"1"])))
    conversation.feed(encode_produce(b"a", 0, encode_set([b"2"])))
    conversation.feed(encode_offsets(b"ccc", 0, LATEST, 1))
    assert conversation.session.paused(), "a response for another topic acknowledges everything sent before"
    conversation.pass_by()
    assert conversation.take()
    assert conversation.fetched(b"a") == encode_set([b"1", b"2"])


def test_records_are_stored_when_the_client_disconnects() -> None:
    conversation = Conversation(3)
    conversation.feed(encode_produce(b"a", 0, encode_set([b"1"])))
    conversation.finish(encode_produce(b"bb", 0, encode_set([b"2"])) + b"\0")
    assert not conversation.output.closed
    for _ in range(10):
        conversation.shards.loop.run_due()
    assert conversation.output.closed
    other = Conversation(3, conversation.shards)
    assert (other.fetched(b"a"), other.fetched(b"bb")) == (encode_set([b"1"]), encode_set([b"2"]))


def test_a_produce_continues_after_its_connection_is_lost() -> None:
    conversation = Conversation(3)
    conversation.say(encode_produce(b"a", 0, encode_set([b"1"])))
    conversation.feed(encode_produce(b"a", 0, encode_set([b"2"])))
    conversation.session.close()
    conversation.shards.loop.run_due()
    assert Conversation(3, conversation.shards).fetched(b"a") == encode_set([b"1", b"2"])


def test_a_set_for_a_partition_that_does_not_exist_closes_the_connection() -> None:
    conversation = Conversation(3)
    conversation.say(encode_produce(b"a", 0, encode_set([b"1"])))
    with pytest.raises(PeerError, match="no such partition"):
        conversation.feed(encode_produce(b"a", 99, encode_set([b"2"])))


def test_a_process_lost_with_unconfirmed_sets_closes_the_connection() -> None:
    conversation = Conversation(3)
    conversation.say(encode_produce(b"a", 0, encode_set([b"1"])))
    conversation.feed(encode_produce(b"a", 0, encode_set([b"2"])))
    conversation.shards.links[0].break_off()
    with pytest.raises(PeerError, match="cannot be stored"):
        conversation.pass_by()


def test_a_lost_process_without_pending_requests_closes_no_connection() -> None:
    conversation = Conversation(3)
    conversation.say(encode_produce(b"a", 0, encode_set([b"1"])))
    conversation.fetched(b"a")
    conversation.shards.links[0].break_off()
    assert conversation.fetched(b"a") == encode_set([b"1"])


def test_sets_wait_while_too_many_are_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "UNANSWERED_BYTES_MAX", 1)
    conversation = Conversation(3)
    conversation.say(encode_produce(b"a", 0, encode_set([b"1"])))
    for number in (2, 3):  # in two quanta, because sets that arrive together are one batch
        conversation.feed(encode_produce(b"a", 0, encode_set([b"%d" % number])))
    assert conversation.session.paused()
    for _ in range(3):
        conversation.pass_by(BUSY_PAUSE_S)
    assert not conversation.session.paused()
    assert conversation.fetched(b"a") == encode_set([b"1", b"2", b"3"])


def test_a_request_of_very_many_entries_is_split_over_shards() -> None:
    conversation = Conversation(3)
    count = ENTRIES_AT_ONCE_MAX
    conversation.say(
        encode_multiproduce([(topic, 0, encode_set([b"x"])) for _ in range(count) for topic in (b"a", b"ccc")])
    )
    one = encode_set([b"x"])
    assert conversation.fetched(b"a") == conversation.fetched(b"ccc") == one * count
    conversation.say(encode_multifetch([FetchEntry(topic, 0, 0, 100) for _ in range(count) for topic in (b"a", b"bb")]))
    entries = split_multifetch_answer(memoryview(conversation.take())[4:])
    assert len(entries) == 2 * count
    assert bytes(entries[0][1]).startswith(one)
    assert not entries[1][1]


@pytest.mark.parametrize("frame", [struct.pack(">ih", 2, 9), struct.pack(">ihh", 4, 2, -1), struct.pack(">i", -1)])
def test_invalid_requests_close_the_connection(frame: bytes) -> None:
    with pytest.raises(PeerError):
        Conversation(3).say(frame)
