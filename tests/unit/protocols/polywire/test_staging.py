"""Staged and idempotent produce over the `polywire` protocol."""

from __future__ import annotations

import pytest

from polywire.errors import ErrorCode
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.messages import Head, Verb
from polywire.records.columns import Event, Record
from polywire.records.rows import from_records
from tests.unit.protocols.polywire.peer import Peer, batch_of

ONE, TWO = b"1" * 16, b"2" * 16


@pytest.fixture
def peer() -> Peer:
    made = Peer()
    made.ask(Verb.CREATE_TOPIC, messages.CreateTopic("t", 2)).decode(messages.TopicDescription)
    return made


def next_offsets(peer: Peer) -> list[int]:
    [topic] = peer.ask(Verb.BOUNDS, messages.AskBounds(["t"])).decode(messages.BoundsList).topics
    return [partition.next_offset for partition in topic.partitions]


def test_staged_batches_are_visible_once_published_and_published_once(peer: Peer) -> None:
    staged = peer.ask(Verb.STAGE, messages.Stage(ONE, "t", 0), batch_of(b"a", b"b")).decode(messages.Staged)
    assert staged.record_count == 2
    peer.ask(Verb.STAGE, messages.Stage(TWO, "t", 1), batch_of(b"c")).decode(messages.Staged)
    assert next_offsets(peer) == [0, 0]
    published = peer.ask(Verb.PUBLISH, messages.Publish("query", 1, [ONE, TWO])).decode(messages.Published)
    assert not published.duplicate
    assert sorted((r.name, r.partition, r.first_offset, r.next_offset) for r in published.ranges) == [
        ("t", 0, 0, 2),
        ("t", 1, 0, 1),
    ]
    assert next_offsets(peer) == [2, 1]
    again = peer.ask(Verb.PUBLISH, messages.Publish("query", 1, [ONE, TWO])).decode(messages.Published)
    assert (again.duplicate, again.ranges) == (True, [])
    assert next_offsets(peer) == [2, 1]


def test_unknown_tokens_publish_nothing(peer: Peer) -> None:
    peer.ask(Verb.STAGE, messages.Stage(ONE, "t", 0), batch_of(b"a"))
    assert peer.ask(Verb.PUBLISH, messages.Publish("q", 1, [ONE, TWO])).error.code is ErrorCode.STAGE_MISSING
    assert next_offsets(peer) == [0, 0]


def test_abandoned_tokens_are_gone(peer: Peer) -> None:
    peer.ask(Verb.STAGE, messages.Stage(ONE, "t", 0), batch_of(b"a"))
    peer.ask(Verb.ABANDON, messages.Abandon([ONE, TWO])).decode(Head)
    assert peer.ask(Verb.PUBLISH, messages.Publish("q", 1, [ONE])).error.code is ErrorCode.STAGE_MISSING


def test_staged_records_are_split_by_key(peer: Peer) -> None:
    batch = batch_of(*[(b"k%d" % n, b"v") for n in range(20)])
    assert peer.ask(Verb.STAGE, messages.Stage(ONE, "t", -1), batch).decode(messages.Staged).record_count == 20
    peer.ask(Verb.PUBLISH, messages.Publish("q", 1, [ONE])).decode(messages.Published)
    assert sum(next_offsets(peer)) == 20
    assert min(next_offsets(peer)) > 0


@pytest.mark.parametrize("token", [b"", b"short", b"x" * 17])
def test_tokens_have_sixteen_bytes(peer: Peer, token: bytes) -> None:
    assert peer.ask(Verb.STAGE, messages.Stage(token, "t", 0), batch_of(b"a")).error.code is ErrorCode.INVALID_REQUEST
    assert peer.ask(Verb.ABANDON, messages.Abandon([token])).error.code is ErrorCode.INVALID_REQUEST


def test_a_duplicate_batch_of_a_producer_returns_its_original_offset(peer: Peer) -> None:
    def produced(base: int, *values: bytes, epoch: int = 1) -> messages.Produced:
        batch = from_records(
            [Record(value) for value in values], producer_id=b"p", producer_epoch=epoch, base_sequence=base
        )
        return peer.ask(Verb.PRODUCE, messages.Produce("t", 0), batch).decode(messages.Produced)

    assert produced(0, b"a", b"b").appended[0].base_offset == 0
    assert produced(2, b"c").appended[0].base_offset == 2
    assert produced(0, b"a", b"b").appended[0].base_offset == 0
    assert next_offsets(peer) == [3, 0]
    with pytest.raises(Exception, match=r"gap|sequence") as caught:
        produced(9, b"z")
    assert getattr(caught.value, "code", None) is ErrorCode.SEQUENCE_GAP
    produced(0, b"n", epoch=2)
    with pytest.raises(Exception, match=r"epoch|fenced") as caught:
        produced(3, b"old")
    assert getattr(caught.value, "code", None) is ErrorCode.PRODUCER_FENCED


def test_a_batch_with_a_producer_must_name_its_partition(peer: Peer) -> None:
    batch = from_records([Record(b"v", b"k")], producer_id=b"p", producer_epoch=1, base_sequence=0)
    assert peer.ask(Verb.PRODUCE, messages.Produce("t", -1), batch).error.code is ErrorCode.INVALID_BATCH


def test_fields_reserved_for_the_broker_or_other_protocols_are_refused(peer: Peer) -> None:
    event = from_records([Record(b"v", event=Event("made", 1, 1), flags=2)])
    assert peer.ask(Verb.PRODUCE, messages.Produce("t", 0), event).error.code is ErrorCode.INVALID_BATCH


def test_records_with_headers_keep_them_when_split_by_key(peer: Peer) -> None:
    records = [Record(b"v%d" % n, b"k%d" % n, id=bytes([n]) * 16, origin_time_us=n) for n in range(12)]
    answer = peer.ask(Verb.PRODUCE, messages.Produce("t", -1), from_records(records))
    assert sum(a.record_count for a in answer.decode(messages.Produced).appended) == 12
    assert sum(next_offsets(peer)) == 12
