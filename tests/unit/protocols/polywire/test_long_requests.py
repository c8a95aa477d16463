"""Requests for thousands of batches or partitions are executed in slices, with other requests in between."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest

from polywire.broker.broker import Broker
from polywire.broker.sliced import SLICE_S
from polywire.broker.staging import PORTION_TOKENS
from polywire.broker.topic_verbs import AT_ONCE_MAX
from polywire.errors import ErrorCode, Missing
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.auth import Admission
from polywire.protocols.polywire.batches import RANGE_BYTES, RANGE_RECORDS, SPAN_BYTES, _ranges
from polywire.protocols.polywire.codec import encode_head
from polywire.protocols.polywire.messages import BY_KEY, Head, Verb
from polywire.records.batch import validate
from polywire.records.partitioner import partitions_of
from polywire.testing.loop import ManualLoop
from polywire.testing.memory_broker import MemoryBroker
from polywire.testing.memory_log import MemoryLog, MemoryPublication
from polywire.types import KeyHash
from tests.unit.protocols.polywire.peer import Answer, Peer, batch_of

PARTITIONS = 200
PER_SLICE = 10  # batches that one slice has time for
KEYED = batch_of(*[(b"k%d" % n, b"v%d" % n) for n in range(2000)])
TOKEN = b"1" * 16


@pytest.fixture
def memory() -> MemoryBroker:
    return MemoryBroker()


@pytest.fixture
def peer(memory: MemoryBroker, monkeypatch: pytest.MonkeyPatch) -> Peer:
    """Return a client of a broker on which each batch takes a tenth of a slice; ``t`` has many partitions."""
    made = peer_of(memory)
    made.ask(Verb.CREATE_TOPIC, messages.CreateTopic("t", PARTITIONS)).decode(messages.TopicDescription)
    for verb in ("produce", "stage"):
        _take_time(made, monkeypatch, verb)
    return made


def peer_of(memory: MemoryBroker) -> Peer:
    assert isinstance(memory.loop, ManualLoop)
    return Peer(broker=memory.broker, loop=memory.loop)


def _take_time(peer: Peer, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    real: Callable[..., None] = getattr(Broker, verb)

    def slowly(*args: Any, **named: Any) -> None:
        real(*args, **named)
        peer.loop.clock.advance(SLICE_S / PER_SLICE)

    monkeypatch.setattr(Broker, verb, slowly)


def stored(broker: Broker) -> int:
    return sum(partition.log.next_offset for partition in broker.topic("t").partitions)


def request(verb: Verb, number: int = BY_KEY) -> Head:
    return messages.Produce("t", number) if verb is Verb.PRODUCE else messages.Stage(TOKEN, "t", number)


@pytest.mark.parametrize("verb", [Verb.PRODUCE, Verb.STAGE])
def test_other_requests_are_answered_between_slices_of_batches(peer: Peer, verb: Verb) -> None:
    other = peer.another()
    taken, answered = [peer.broker.appended], 0
    peer.send(verb, request(verb), KEYED)
    while not peer.output.written:
        taken.append(peer.broker.appended)
        other.send(Verb.PING, Head())
        answered += len(other.frames())
        peer.loop.run_pass()
    assert max(after - before for before, after in pairwise(taken)) <= PER_SLICE + 1  # a clock of whole microseconds
    assert peer.broker.appended == PARTITIONS
    assert answered == len(taken) - 1
    [answer] = peer.frames()
    if verb is Verb.PRODUCE:
        produced = answer.decode(messages.Produced)
        assert [appended.partition for appended in produced.appended] == list(range(PARTITIONS))
        assert sum(appended.record_count for appended in produced.appended) == 2000
        assert {appended.base_offset for appended in produced.appended} == {0}
        assert len(answer.payload) == 4 * 2000
    else:
        assert answer.decode(messages.Staged).record_count == 2000


def test_a_batch_of_many_keys_is_scanned_in_parts(memory: MemoryBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    peer, looked, known = peer_of(memory), [0], partitions_of

    def slowly(source: memoryview, spans: memoryview, count: int, kind: KeyHash) -> array[int]:
        looked[-1] += len(spans) // SPAN_BYTES
        peer.loop.clock.advance(SLICE_S)
        return known(source, spans, count, kind)

    monkeypatch.setattr("polywire.protocols.polywire.batches.partitions_of", slowly)
    monkeypatch.setattr("polywire.protocols.polywire.batches.RANGE_RECORDS", 300)
    monkeypatch.setattr("polywire.protocols.polywire.batches.MAPPED_BYTES_MIN", 1)
    peer.ask(Verb.CREATE_TOPIC, messages.CreateTopic("t", 3)).decode(messages.TopicDescription)
    peer.send(Verb.PRODUCE, request(Verb.PRODUCE), KEYED)
    while not peer.output.written:
        looked.append(0)
        peer.loop.run_pass()
    assert max(looked) == 300
    assert sum(looked) == 2000
    [answer] = peer.frames()
    numbers = array("I", bytes(answer.payload)).tolist()
    topic = peer.broker.topic("t")
    assert numbers == [peer.broker.partition_of_key(topic, b"k%d" % n, KeyHash.FNV32).number for n in range(2000)]
    assert stored(peer.broker) == 2000


def test_long_keys_are_scanned_in_smaller_parts() -> None:
    assert list(_ranges(7, 2 * RANGE_BYTES)) == [(0, 3), (3, 6), (6, 7)]
    assert list(_ranges(2, 20 * RANGE_BYTES)) == [(0, 1), (1, 2)]
    assert list(_ranges(RANGE_RECORDS + 1, 200)) == [(0, RANGE_RECORDS), (RANGE_RECORDS, RANGE_RECORDS + 1)]


def test_all_batches_are_validated_in_slices_before_any_is_stored(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []

    def slowly(payload: memoryview, at: int) -> int:
        looked.append(at)
        peer.loop.clock.advance(SLICE_S / PER_SLICE)
        return validate(payload, at)

    monkeypatch.setattr("polywire.protocols.polywire.batches.validate", slowly)
    good = batch_of(b"v")
    peer.send(Verb.PRODUCE, request(Verb.PRODUCE, 0), good * 50 + good[:-8])
    assert len(looked) <= PER_SLICE + 1
    while not peer.output.written:
        before = len(looked)
        peer.loop.run_pass()
        assert len(looked) - before <= PER_SLICE + 1
    assert peer.frames()[0].error.code is ErrorCode.INVALID_BATCH
    assert stored(peer.broker) == 0
    assert peer.output.pins == 0


def test_the_next_request_of_the_same_client_waits(peer: Peer) -> None:
    peer.send(Verb.PRODUCE, request(Verb.PRODUCE), KEYED)
    assert peer.session.paused()
    peer.loop.run_due()
    assert not peer.session.paused()
    assert peer.resumes > 0
    [answer] = peer.frames()
    assert answer.verb == Verb.PRODUCE


def test_the_receive_buffer_is_pinned_until_the_last_batch_is_written(peer: Peer) -> None:
    """Batches without keys are stored directly from the receive buffer."""
    plain = batch_of(b"v")
    peer.send(Verb.PRODUCE, request(Verb.PRODUCE), plain * 100)
    while peer.broker.appended < 100:
        assert peer.output.pins == 1
        peer.loop.run_pass()
    assert not peer.broker.uncommitted or peer.output.pins == 1
    peer.loop.run_due()
    assert peer.output.pins == 0
    assert stored(peer.broker) == 100


def test_a_stop_between_slices_keeps_the_batches_stored_so_far(memory: MemoryBroker, peer: Peer) -> None:
    peer.send(Verb.PRODUCE, request(Verb.PRODUCE), KEYED)
    for _ in range(5):
        memory.loop.run_pass()  # type: ignore[attr-defined]
    assert not peer.output.written
    broker = memory.restart()
    assert 0 < stored(broker) < 2000
    again = peer_of(memory)
    answer = again.ask(Verb.PRODUCE, request(Verb.PRODUCE), KEYED).decode(messages.Produced)
    assert len(answer.appended) == PARTITIONS


def test_a_topic_deleted_between_slices_refuses_the_rest(peer: Peer) -> None:
    peer.send(Verb.PRODUCE, request(Verb.PRODUCE), KEYED)
    peer.loop.run_pass()
    peer.another().ask(Verb.DELETE_TOPIC, messages.DeleteTopic("t"))
    peer.loop.run_due()
    [answer] = peer.frames()
    assert answer.error.code is ErrorCode.PARTITION_MISSING
    assert peer.broker.appended < PARTITIONS
    assert peer.output.pins == 0
    assert not peer.session.paused()


def test_the_rest_is_stored_if_the_connection_closes_between_slices(peer: Peer) -> None:
    peer.send(Verb.PRODUCE, request(Verb.PRODUCE), KEYED)
    peer.session.close()
    peer.loop.run_due()
    assert stored(peer.broker) == 2000
    assert peer.output.pins == 0
    assert not peer.output.written


def test_requests_after_a_change_of_a_wide_topic_see_it(memory: MemoryBroker) -> None:
    peer, count = peer_of(memory), AT_ONCE_MAX + 1
    frames = [
        (Verb.CREATE_TOPIC, messages.CreateTopic("t", count), b""),
        (Verb.PRODUCE, messages.Produce("t", count - 1), batch_of(b"v")),
        (Verb.GROW_TOPIC, messages.GrowTopic("t", 2 * count), b""),
        (Verb.PRODUCE, messages.Produce("t", 2 * count - 1), batch_of(b"v")),
        (Verb.PURGE_TOPIC, messages.PurgeTopic("t"), b""),
        (Verb.BOUNDS, messages.AskBounds(["t"]), b""),
        (Verb.DELETE_TOPIC, messages.DeleteTopic("t"), b""),
    ]
    waiting = b""
    for correlation, (verb, head, payload) in enumerate(frames):
        waiting += encode_head(verb, correlation, head, payload_bytes=len(payload)) + bytes(payload)
    answers: list[Answer] = []
    while len(answers) < len(frames):
        if not peer.session.paused():
            waiting = waiting[peer.session.receive(memoryview(bytearray(waiting))) :]
        peer.loop.run_pass()
        answers += peer.frames()
    assert [answer.correlation for answer in answers] == list(range(len(frames)))
    assert answers[0].decode(messages.TopicDescription).name == "t"
    bounds = answers[5].decode(messages.BoundsList).topics[0].partitions
    assert [partition.first_offset for partition in bounds if partition.next_offset] == [1, 1]
    assert len(bounds) == 2 * count
    answers[6].decode(Head)


def test_a_conflicting_change_of_a_wide_topic_is_refused(memory: MemoryBroker) -> None:
    peers = peer_of(memory), peer_of(memory)
    for peer in peers:
        peer.send(Verb.CREATE_TOPIC, messages.CreateTopic("t", AT_ONCE_MAX + 1))
        assert peer.session.paused()
    memory.run()
    assert not any(peer.session.paused() for peer in peers)
    assert peers[0].frames()[0].decode(messages.TopicDescription).name == "t"
    assert peers[1].frames()[0].error.code is ErrorCode.TOPIC_EXISTS


TOKENS = [b"%016d" % n for n in range(2000)]


@pytest.fixture
def staged(memory: MemoryBroker) -> Peer:
    """Return a client that has staged a batch under each of ``TOKENS``."""
    peer = peer_of(memory)
    peer.ask(Verb.CREATE_TOPIC, messages.CreateTopic("t", 1)).decode(messages.TopicDescription)
    for token in TOKENS:
        peer.ask(Verb.STAGE, messages.Stage(token, "t", 0), batch_of(b"v")).decode(messages.Staged)
    return peer


def left(peer: Peer) -> int:
    """Return the number of tokens that are still staged."""
    found = 0
    for token in TOKENS:
        with suppress(Missing):
            found += len(peer.broker._log.staged_partitions([token]))
    return found


def test_many_tokens_are_abandoned_in_slices(staged: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    _take_time(staged, monkeypatch, "abandon")
    staged.send(Verb.ABANDON, messages.Abandon(TOKENS))
    kept = [len(TOKENS)]
    while not staged.output.written:
        kept.append(left(staged))
        staged.loop.run_pass()
    staged.frames()[0].decode(Head)
    assert left(staged) == 0
    assert max(before - after for before, after in pairwise(kept)) <= PORTION_TOKENS * (PER_SLICE + 1)
    assert len(kept) > 2


def test_nothing_is_abandoned_when_one_of_many_is_refused(staged: Peer) -> None:
    answer = staged.ask(Verb.ABANDON, messages.Abandon([*TOKENS, b"short"]))
    assert answer.error.code is ErrorCode.INVALID_REQUEST
    assert left(staged) == len(TOKENS)


def test_many_tokens_are_checked_in_slices_and_published_at_once(staged: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    check, checked = Admission.check_tokens, [0]

    def slowly(admission: Admission, tokens: Sequence[bytes]) -> None:
        check(admission, tokens)
        checked[-1] += len(tokens)
        staged.loop.clock.advance(2 * SLICE_S)

    monkeypatch.setattr(Admission, "check_tokens", slowly)
    staged.send(Verb.PUBLISH, messages.Publish("w", 1, TOKENS))
    seen = set()
    while not staged.output.written:
        checked.append(0)
        staged.loop.run_pass()
        seen.add(stored(staged.broker))
    assert max(checked) == PORTION_TOKENS
    assert sum(checked) == len(TOKENS)
    assert seen == {0, len(TOKENS)}
    [published] = staged.frames()[0].decode(messages.Published).ranges
    assert (published.first_offset, published.next_offset) == (0, len(TOKENS))
    again = staged.ask(Verb.PUBLISH, messages.Publish("w", 1, TOKENS)).decode(messages.Published)
    assert again.duplicate


@pytest.fixture
def laid_out(monkeypatch: pytest.MonkeyPatch, memory: MemoryBroker) -> list[int]:
    """Record how many tokens each pass of the loop lays out; each takes a part of a slice."""
    add, counts = MemoryPublication.add, [0]

    def slowly(made: MemoryPublication, tokens: Sequence[bytes]) -> Iterator[None]:
        for step in add(made, tokens):
            counts[-1] += 1
            memory.loop.clock.advance(SLICE_S / PER_SLICE)  # type: ignore[attr-defined]
            yield step

    monkeypatch.setattr(MemoryPublication, "add", slowly)
    return counts


def test_many_batches_are_laid_out_in_slices_and_published_at_once(staged: Peer, laid_out: list[int]) -> None:
    other, answered, seen = staged.another(), 0, set()
    staged.send(Verb.PUBLISH, messages.Publish("w", 1, TOKENS))
    assert staged.session.paused()
    while not staged.output.written:
        other.send(Verb.PING, Head())
        answered += len(other.frames())
        seen.add(stored(staged.broker))
        laid_out.append(0)
        staged.loop.run_pass()
    assert max(laid_out) <= PER_SLICE + 1
    assert sum(laid_out) == len(TOKENS)
    assert answered > len(TOKENS) // (PER_SLICE + 1)
    assert seen <= {0, len(TOKENS)}
    staged.frames()[0].decode(messages.Published)
    assert not staged.session.paused()


def test_a_duplicate_publish_waits_for_the_original(staged: Peer, laid_out: list[int]) -> None:
    peers = staged, staged.another(), staged.another()
    for peer in peers:
        peer.send(Verb.PUBLISH, messages.Publish("w", 1, TOKENS))
        staged.loop.run_pass()
    staged.loop.run_due()
    assert [peer.frames()[0].decode(messages.Published).duplicate for peer in peers] == [False, True, True]
    assert stored(staged.broker) == len(TOKENS) == sum(laid_out)


def test_batches_of_a_refused_publish_stay_staged(staged: Peer, laid_out: list[int]) -> None:
    answer = staged.ask(Verb.PUBLISH, messages.Publish("w", 1, [*TOKENS, b"?" * 16]))
    assert answer.error.code is ErrorCode.STAGE_MISSING
    assert sum(laid_out) == len(TOKENS)
    assert left(staged) == len(TOKENS)
    assert not staged.session.paused()
    staged.ask(Verb.PUBLISH, messages.Publish("w", 1, TOKENS)).decode(messages.Published)
    assert stored(staged.broker) == len(TOKENS)


def test_a_topic_deleted_while_its_batches_are_laid_out(staged: Peer, laid_out: list[int]) -> None:
    staged.send(Verb.PUBLISH, messages.Publish("w", 1, TOKENS))
    staged.loop.run_pass()
    assert 0 < sum(laid_out) < len(TOKENS)
    staged.another().ask(Verb.DELETE_TOPIC, messages.DeleteTopic("t"))
    staged.loop.run_due()
    assert staged.frames()[0].error.code is ErrorCode.PARTITION_MISSING
    assert left(staged) == len(TOKENS)


def test_batches_being_published_cannot_be_abandoned(staged: Peer, laid_out: list[int]) -> None:
    staged.send(Verb.PUBLISH, messages.Publish("w", 1, TOKENS))
    staged.loop.run_pass()
    staged.another().send(Verb.ABANDON, messages.Abandon(TOKENS[:1]))
    staged.loop.run_due()
    staged.frames()[0].decode(messages.Published)
    assert stored(staged.broker) == len(TOKENS) == sum(laid_out)


def test_a_publish_completes_if_its_connection_closes_meanwhile(staged: Peer, laid_out: list[int]) -> None:
    staged.send(Verb.PUBLISH, messages.Publish("w", 1, TOKENS))
    staged.session.close()
    staged.loop.run_due()
    assert stored(staged.broker) == len(TOKENS) == sum(laid_out)


def test_leftovers_of_many_failed_attempts_are_dropped_in_slices(staged: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [b"left%012d" % number for number in range(2000)]
    for token in tokens:
        staged.ask(Verb.STAGE, messages.Stage(token, "t", 0, writer="w", number=1), batch_of(b"v"))
    dropped: list[int] = []
    abandon = MemoryLog.abandon

    def counted(log: MemoryLog, some: Sequence[bytes]) -> None:
        dropped.append(len(some))
        staged.loop.clock.advance(SLICE_S)
        abandon(log, some)

    monkeypatch.setattr(MemoryLog, "abandon", counted)
    staged.ask(Verb.PUBLISH, messages.Publish("w", 1, TOKENS[:1])).decode(messages.Published)
    assert sum(dropped) == len(tokens)
    assert max(dropped) <= PORTION_TOKENS


def test_batches_for_many_partitions_are_published_in_token_order(memory: MemoryBroker) -> None:
    peer = peer_of(memory)
    peer.ask(Verb.CREATE_TOPIC, messages.CreateTopic("t", 3)).decode(messages.TopicDescription)
    tokens = TOKENS[:4]
    for number, token in enumerate(tokens):
        for partition in (2, 0, number % 3):
            peer.ask(Verb.STAGE, messages.Stage(token, "t", partition), batch_of(b"%d" % number))
    ranges = peer.ask(Verb.PUBLISH, messages.Publish("w", 1, tokens)).decode(messages.Published).ranges
    assert sorted((found.partition, found.first_offset, found.next_offset) for found in ranges) == [
        (0, 0, 6),
        (1, 0, 1),
        (2, 0, 5),
    ]
