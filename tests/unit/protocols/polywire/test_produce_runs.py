"""Runs of PRODUCE frames handled as one: what ends a run, and that each frame gets its own response."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest

from polywire.broker.settings import BrokerSettings
from polywire.errors import BrokerError, Busy, ErrorCode
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.codec import encode_head
from polywire.protocols.polywire.messages import BY_KEY, Head, Verb
from polywire.protocols.polywire.produce_runs import encode_produced, run_bytes
from polywire.protocols.polywire.session import REQUESTS_MAX
from polywire.records.batch import merge, read_header, stamp_producer, walk
from polywire.records.columns import MERGED_BYTES_MAX
from polywire.types import Buffer
from tests.unit.protocols.polywire.peer import Answer, Peer, batch_of

HEAD = messages.Produce("t", 0)


def frame(correlation: int, batch: Buffer, head: messages.Produce = HEAD) -> bytes:
    return encode_head(Verb.PRODUCE, correlation, head, payload_bytes=len(batch)) + bytes(batch)


def send(peer: Peer, frames: Sequence[bytes]) -> list[Answer]:
    """Send all frames in one receive; return the responses by correlation."""
    data = bytearray(b"".join(frames))
    assert peer.session.receive(memoryview(data)) == len(data)
    data[:] = bytes(len(data))  # the request buffer is not needed once it is written
    peer.loop.run_due()
    return sorted(peer.frames(), key=lambda answer: answer.correlation)


def created(settings: BrokerSettings | None = None, partitions: int = 2) -> Peer:
    peer = Peer(settings)
    peer.ask(Verb.CREATE_TOPIC, messages.CreateTopic("t", partitions)).decode(messages.TopicDescription)
    return peer


def stored(peer: Peer, partition: int = 0) -> list[bytes]:
    """Return a partition's stored batches; the log itself merges nothing in these tests."""
    payload = peer.ask(Verb.FETCH, messages.Fetch("t", partition, 0)).payload
    return [payload[at:end] for at, end in pairwise([*walk(payload), len(payload)])]


def counts(peer: Peer, partition: int = 0) -> list[int]:
    return [read_header(batch).record_count for batch in stored(peer, partition)]


def appended(answer: Answer) -> tuple[int, int, int]:
    [one] = answer.decode(messages.Produced).appended
    return one.partition, one.base_offset, one.record_count


def test_similar_frames_become_one_batch_and_get_separate_responses() -> None:
    peer = created()
    sizes = [1, 3, 2, 300, 1]
    batches = [batch_of(*[b"%d" % number] * size) for number, size in enumerate(sizes)]
    answers = send(peer, [frame(70_000 + number, batch) for number, batch in enumerate(batches)])
    assert [answer.correlation for answer in answers] == [70_000 + number for number in range(5)]
    assert [appended(answer) for answer in answers] == [(0, sum(sizes[:at]), size) for at, size in enumerate(sizes)]
    assert counts(peer) == [sum(sizes)]
    [one] = stored(peer)
    assert bytes(one)[104:] == bytes(merge(batches))[104:], "every record is stored, in the order sent"


def test_a_response_has_the_same_bytes_as_for_a_single_frame() -> None:
    for offset in [*(2**power + by for power in (7, 8, 16, 32, 62) for by in (-1, 0)), 0]:
        for partition in (0, 127, 128, 70_000):
            asked = [(1, 1), (2**32 - 1, 127), (7, 128), (8, 70_000)]
            given = b"".join(number.to_bytes(4, "little") for pair in asked for number in pair)
            expected, at = b"", offset
            for correlation, count in asked:
                entry = messages.Appended(partition, at, count)
                expected += encode_head(Verb.PRODUCE, correlation, messages.Produced([entry]))
                at += count
            assert encode_produced(given, partition, offset) == expected


def producing(epoch: int) -> bytearray:
    batch = batch_of(b"p")
    stamp_producer(batch, 0, epoch, 0)
    return batch


LAST = frame(9, batch_of(b"z"))
OTHERS = {
    "another verb": encode_head(Verb.PING, 5, Head()),
    "another partition": frame(5, batch_of(b"b"), messages.Produce("t", 1)),
    "another level": frame(5, batch_of(b"b"), messages.Produce("t", 0, 0)),
    "other columns": frame(5, batch_of((b"k", b"b"))),
    "a large batch": frame(5, batch_of(b"b" * 5000)),
    "two batches": frame(5, bytes(batch_of(b"b")) + bytes(batch_of(b"b"))),
    "no batch": frame(5, b""),
    "a flag": b"".join([frame(5, b"")[:5], b"\1", frame(5, batch_of(b"b"))[6:]]),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS.keys())
def test_a_run_ends_at_a_different_frame(other: bytes) -> None:
    run = frame(1, batch_of(b"a")) + frame(2, batch_of(b"a"))
    assert run_bytes(run + other + LAST, 0, frames_max=9, batch_bytes_max=MERGED_BYTES_MAX) == len(run)
    assert run_bytes(b"front" + run + other, 5, frames_max=9, batch_bytes_max=MERGED_BYTES_MAX) == len(run)
    assert run_bytes(other + run, 0, frames_max=9, batch_bytes_max=MERGED_BYTES_MAX) == 0


def test_incomplete_frames_are_not_in_a_run() -> None:
    one = frame(1, batch_of(b"a"))
    for cut in range(len(one)):
        assert run_bytes(one + one[:cut], 0, frames_max=9, batch_bytes_max=MERGED_BYTES_MAX) == 0
        assert run_bytes(2 * one + one[:cut], 0, frames_max=9, batch_bytes_max=MERGED_BYTES_MAX) == 2 * len(one)


def test_a_run_has_limits() -> None:
    batch = batch_of(b"a")
    frames = frame(1, batch) * 10
    size = len(frames) // 10
    assert run_bytes(frames, 0, frames_max=4, batch_bytes_max=MERGED_BYTES_MAX) == 4 * size
    assert run_bytes(frames, 0, frames_max=1, batch_bytes_max=MERGED_BYTES_MAX) == 0
    assert run_bytes(frames, 0, frames_max=99, batch_bytes_max=3 * len(batch)) == 3 * size
    assert run_bytes(frames, 0, frames_max=99, batch_bytes_max=0) == 0


def test_pending_responses_stay_within_their_limit() -> None:
    peer = created()
    data = bytearray(frame(1, batch_of(b"a")) * (REQUESTS_MAX + 5))
    taken = peer.session.receive(memoryview(data))
    assert taken == len(data) // (REQUESTS_MAX + 5) * REQUESTS_MAX
    assert peer.session.paused()
    peer.loop.run_due()
    assert len(peer.frames()) == REQUESTS_MAX
    assert not peer.session.owes()


@pytest.mark.parametrize("place", [0, 1, 2])
def test_only_the_invalid_batch_of_a_run_is_refused(place: int) -> None:
    peer = created()
    frames = [frame(number, batch_of(b"a", b"b")) for number in range(3)]
    broken = bytearray(frames[place])
    broken[-1] ^= 1
    frames[place] = bytes(broken)
    answers = send(peer, frames)
    assert answers.pop(place).error.code is ErrorCode.INVALID_BATCH
    assert [appended(answer) for answer in answers] == [(0, 0, 2), (0, 2, 2)]
    assert sum(counts(peer)) == 4


def test_an_error_of_a_run_is_returned_for_each_frame() -> None:
    peer = created()
    for head, code in [
        (messages.Produce("none", 0), ErrorCode.TOPIC_MISSING),
        (messages.Produce("t", 7), ErrorCode.PARTITION_MISSING),
        (messages.Produce("t", 0, 99), ErrorCode.INVALID_REQUEST),
    ]:
        answers = send(peer, [frame(number, batch_of(b"a"), head) for number in range(3)])
        assert [(answer.correlation, answer.error.code) for answer in answers] == [(at, code) for at in range(3)]


def test_an_automatically_created_topic_has_all_records() -> None:
    peer = Peer()
    answers = send(peer, [frame(number, batch_of(b"a"), messages.Produce("t", 0, create=True)) for number in range(3)])
    assert [appended(answer) for answer in answers] == [(0, 0, 1), (0, 1, 1), (0, 2, 1)]


def test_records_with_keys_are_routed_by_key() -> None:
    peer = created()
    frames = [frame(number, batch_of((b"%d" % number, b"v")), messages.Produce("t", BY_KEY)) for number in range(20)]
    answers = send(peer, frames)
    for answer in answers:
        assert answer.decode(messages.Produced).appended[0].partition == int.from_bytes(answer.payload, "little")
    assert min(sum(counts(peer, 0)), sum(counts(peer, 1))) > 0


def test_a_small_limit_of_batches_applies_to_merged_ones() -> None:
    batch = batch_of(b"a" * 100)
    peer = created(BrokerSettings(batch_bytes_max=3 * len(batch), record_bytes_max=200))
    answers = send(peer, [frame(number, batch) for number in range(9)])
    assert [appended(answer)[1] for answer in answers] == list(range(9))
    assert all(len(one) <= 3 * len(batch) for one in stored(peer))


def test_an_error_of_the_log_is_returned_for_each_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = created()
    broker = peer.broker

    def failing(*_: object, done: object = None, **__: object) -> None:
        assert callable(done)
        peer.loop.call_soon(done, Busy(ErrorCode.BUSY, "later"))

    monkeypatch.setattr(type(broker), "produce", failing)
    answers = send(peer, [frame(number, batch_of(b"a")) for number in range(3)])
    assert [(answer.correlation, answer.error.code) for answer in answers] == [(at, ErrorCode.BUSY) for at in range(3)]
    assert not peer.session.owes()

    def refusing(*_: object, **__: object) -> None:
        raise Busy(ErrorCode.BUSY, "now")

    monkeypatch.setattr(type(broker), "produce", refusing)
    answers = send(peer, [frame(number, batch_of(b"a")) for number in range(3)])
    assert all(isinstance(answer.error, BrokerError) for answer in answers)
    assert len(answers) == 3
    assert not peer.session.owes()


def test_batches_of_a_producer_are_not_merged() -> None:
    one = frame(1, producing(1))
    assert run_bytes(one + one, 0, frames_max=9, batch_bytes_max=MERGED_BYTES_MAX) == 0
