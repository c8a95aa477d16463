"""Fetches that take more than one frame, wait, pause, or end early; epochs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from polywire.broker.broker import Broker
from polywire.broker.settings import BrokerSettings
from polywire.broker.sliced import SLICE_S
from polywire.errors import Busy, Conflict, ErrorCode
from polywire.log.base import Replay
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.codec import ANSWER_BYTES_MAX
from polywire.protocols.polywire.messages import Head, Verb
from polywire.protocols.polywire.session import FETCHES_MAX
from polywire.protocols.runtime.session import QUANTUM_S
from polywire.records.batch import read_header, walk
from polywire.testing.loop import ManualLoop, SimulatedClock
from polywire.testing.memory_log import MemoryLog
from polywire.types import Buffer
from tests.unit.protocols.polywire.peer import Answer, CapturedOutput, Peer, batch_of

MEGABYTE = 1 << 20


@pytest.fixture
def peer() -> Peer:
    made = Peer()
    made.ask(Verb.CREATE_TOPIC, messages.CreateTopic("t", 1)).decode(messages.TopicDescription)
    return made


def produce(peer: Peer, *values: bytes) -> None:
    for value in values:
        peer.ask(Verb.PRODUCE, messages.Produce("t", 0), batch_of(value)).decode(messages.Produced)


def offsets_of(frames: list[Answer]) -> list[int]:
    return [read_header(frame.payload, at).base_offset for frame in frames for at in walk(frame.payload)]


def test_a_large_range_is_sent_in_bounded_frames(peer: Peer) -> None:
    produce(peer, *[b"x" * MEGABYTE] * 10)
    peer.send(Verb.FETCH, messages.Fetch("t", 0, 0))
    peer.loop.run_due()
    frames = peer.frames()
    assert [frame.more for frame in frames] == [True] * (len(frames) - 1) + [False]
    assert max(len(frame.payload) for frame in frames) <= ANSWER_BYTES_MAX
    assert offsets_of(frames) == list(range(10))
    assert [frame.decode(messages.Fetched).next_offset for frame in frames][-1] == 10
    assert peer.output.releases == len(frames)


def test_a_range_ends_with_the_batch_that_reaches_its_end(peer: Peer) -> None:
    produce(peer, *[b"x" * MEGABYTE] * 10)
    peer.send(Verb.FETCH, messages.Fetch("t", 0, 2, 7))
    peer.loop.run_due()
    assert offsets_of(peer.frames()) == [2, 3, 4, 5, 6]


@pytest.mark.parametrize(("bytes_max", "count"), [(1, 1), (2 * MEGABYTE + 9999, 2), (5 * MEGABYTE + 9999, 5)])
def test_bytes_max_ends_a_fetch_after_at_least_one_batch(peer: Peer, bytes_max: int, count: int) -> None:
    produce(peer, *[b"x" * MEGABYTE] * 10)
    peer.send(Verb.FETCH, messages.Fetch("t", 0, 0, bytes_max=bytes_max))
    peer.loop.run_due()
    frames = peer.frames()
    assert offsets_of(frames) == list(range(count))
    assert not frames[-1].more


def test_a_fetch_without_an_end_stops_at_the_readable_end(peer: Peer) -> None:
    produce(peer, *[b"x" * MEGABYTE] * 6)
    peer.output.backlog = peer.output.backlog_max
    peer.send(Verb.FETCH, messages.Fetch("t", 0, 0))
    peer.loop.run_due()
    assert peer.frames() == []
    peer.output.backlog = 0
    peer.session.drained()
    produce_later = peer.another()
    produce(produce_later, b"late")
    peer.loop.run_due()
    assert offsets_of(peer.frames()) == list(range(6))


def test_streams_pause_for_a_slow_client_and_resume_when_it_reads(peer: Peer) -> None:
    produce(peer, *[b"x" * MEGABYTE] * 12)
    peer.output.backlog = peer.output.backlog_max
    peer.send(Verb.FETCH, messages.Fetch("t", 0, 0))
    peer.loop.run_due()
    assert peer.frames() == []
    peer.output.backlog = 0
    peer.session.drained()
    peer.loop.run_due()
    assert offsets_of(peer.frames()) == list(range(12))


def test_one_frame_is_read_ahead_for_a_slow_client_and_released_when_it_disconnects(peer: Peer) -> None:
    produce(peer, *[b"x" * MEGABYTE] * 12)
    peer.output.backlog = peer.output.backlog_max
    for _ in range(3):
        peer.send(Verb.FETCH, messages.Fetch("t", 0, 0))
    peer.loop.run_due()
    assert sum(fetch.holds_bytes for fetch in peer.session.fetches) == 1
    peer.session.close()
    assert sum(fetch.holds_bytes for fetch in peer.session.fetches) == 0


class SlowOutput(CapturedOutput):
    """Writes that take a millisecond per MiB; ``takes``: bytes accepted before it pauses the session."""

    def __init__(self, clock: SimulatedClock, *, takes: int) -> None:
        super().__init__()
        self._clock = clock
        self._takes = takes

    def write_many(self, parts: Sequence[Buffer], released: Callable[[], None] | None = None) -> None:
        size = sum(map(len, parts))
        self._clock.advance(size / MEGABYTE / 1000)
        self.backlog += max(0, size - self._takes)
        super().write_many(parts, released)


FRAME_S = ANSWER_BYTES_MAX / MEGABYTE / 1000


def streaming(peer: Peer, count: int, *, takes: int = 1 << 40, megabytes: int = 40) -> list[Peer]:
    """Return clients with slow writes, over one topic with that much data."""
    produce(peer, *[b"x" * MEGABYTE] * megabytes)
    return [peer.another(SlowOutput(peer.loop.clock, takes=takes)) for _ in range(count)]


def longest_pass(loop: ManualLoop) -> float:
    """Return the longest pass of the loop until nothing is due."""
    longest = 0.0
    for _ in range(10_000):
        begun = loop.clock.monotonic()
        if not loop.run_pass():
            return longest
        longest = max(longest, loop.clock.monotonic() - begun)
    raise AssertionError("it never ends")


def test_a_long_stream_yields_to_other_connections(peer: Peer) -> None:
    [one] = streaming(peer, 1)
    begun = peer.loop.clock.monotonic()
    one.send(Verb.FETCH, messages.Fetch("t", 0, 0))
    assert peer.loop.clock.monotonic() - begun <= QUANTUM_S + FRAME_S
    assert longest_pass(peer.loop) <= SLICE_S + FRAME_S
    assert offsets_of(one.frames()) == list(range(40))


def test_ten_long_streams_share_a_pass(peer: Peer) -> None:
    peers = streaming(peer, 10)
    for one in peers:
        one.send(Verb.FETCH, messages.Fetch("t", 0, 0))
    assert longest_pass(peer.loop) <= SLICE_S + FRAME_S
    assert all(offsets_of(one.frames()) == list(range(40)) for one in peers)


def test_ten_clients_that_resume_at_once_share_a_pass(peer: Peer) -> None:
    peers = streaming(peer, 10, takes=MEGABYTE)
    for one in peers:
        one.send(Verb.FETCH, messages.Fetch("t", 0, 0))
    longest = longest_pass(peer.loop)
    for _ in range(100):
        begun = peer.loop.clock.monotonic()
        for one in peers:
            one.output.backlog = 0
            one.session.drained()
        assert peer.loop.clock.monotonic() == begun, "nothing is written inside the socket's callback"
        longest = max(longest, longest_pass(peer.loop))
    assert longest <= SLICE_S + FRAME_S
    assert all(offsets_of(one.frames()) == list(range(40)) for one in peers)


def test_a_long_poll_does_not_wait_for_heavy_readers(peer: Peer) -> None:
    peers = streaming(peer, 10)
    peer.ask(Verb.CREATE_TOPIC, messages.CreateTopic("u", 1)).decode(messages.TopicDescription)
    waiting = peer.send(Verb.FETCH, messages.Fetch("u", 0, 0, wait_ms=5000))
    for one in peers:
        one.send(Verb.FETCH, messages.Fetch("t", 0, 0))
    peer.loop.run_pass()
    peer.another().send(Verb.PRODUCE, messages.Produce("u", 0), batch_of(b"x"))
    for _ in range(3):
        peer.loop.run_pass()
    assert [frame.correlation for frame in peer.frames()] == [waiting]


def test_a_long_poll_completes_with_a_record_and_blocks_nothing(peer: Peer) -> None:
    waiting = peer.send(Verb.FETCH, messages.Fetch("t", 0, 0, wait_ms=5000))
    peer.loop.advance(1.0)
    peer.ask(Verb.PING, Head()).decode(Head)
    other = peer.another()
    other.send(Verb.PRODUCE, messages.Produce("t", 0), batch_of(b"x"))
    peer.loop.run_due()
    [answer] = peer.frames()
    assert answer.correlation == waiting
    assert offsets_of([answer]) == [0]


def test_a_long_poll_completes_as_soon_as_the_log_notifies_it(peer: Peer) -> None:
    waiting = peer.send(Verb.FETCH, messages.Fetch("t", 0, 0, wait_ms=5000))
    peer.loop.run_pass()
    peer.another().send(Verb.PRODUCE, messages.Produce("t", 0), batch_of(b"x"))
    peer.broker.commit()
    peer.loop.run_pass()  # in which the log in memory notifies readers
    assert [answer.correlation for answer in peer.frames()] == [waiting]


def test_a_long_poll_ends_empty_at_its_timeout(peer: Peer) -> None:
    peer.send(Verb.FETCH, messages.Fetch("t", 0, 0, wait_ms=5000))
    peer.loop.advance(4.9)
    assert peer.frames() == []
    peer.loop.advance(0.2)
    [answer] = peer.frames()
    assert (answer.payload, answer.decode(messages.Fetched).next_offset) == (b"", 0)


def test_a_cancelled_long_poll_ends_at_once(peer: Peer) -> None:
    waiting = peer.send(Verb.FETCH, messages.Fetch("t", 0, 0, wait_ms=5000))
    cancel = peer.send(Verb.CANCEL, messages.Cancel(waiting))
    assert [frame.correlation for frame in peer.frames()] == [waiting, cancel]
    produce(peer, b"x")
    peer.loop.advance(10.0)
    assert peer.frames() == []


def test_a_deleted_topic_ends_its_long_polls(peer: Peer) -> None:
    waiting = peer.send(Verb.FETCH, messages.Fetch("t", 0, 0, wait_ms=5000))
    peer.send(Verb.DELETE_TOPIC, messages.DeleteTopic("t"))
    peer.loop.run_due()
    answers = {frame.correlation: frame for frame in peer.frames()}
    assert answers[waiting].error.code is ErrorCode.PARTITION_MISSING


def test_open_fetches_are_limited_and_their_correlations_distinct(peer: Peer) -> None:
    for _ in range(FETCHES_MAX):
        last = peer.send(Verb.FETCH, messages.Fetch("t", 0, 0, wait_ms=5000))
    error = peer.ask(Verb.FETCH, messages.Fetch("t", 0, 0, wait_ms=5000)).error
    assert isinstance(error, Busy)
    peer.correlations = iter([last])
    assert peer.ask(Verb.FETCH, messages.Fetch("t", 0, 0)).error.code is ErrorCode.INVALID_REQUEST


def test_a_half_closed_client_gets_its_responses(peer: Peer) -> None:
    peer.send(Verb.FETCH, messages.Fetch("t", 0, 0, wait_ms=5000))
    peer.session.finish(memoryview(b"half"))
    assert not peer.output.closed
    peer.loop.advance(6.0)
    assert len(peer.frames()) == 1
    assert peer.output.closed


def test_offsets_beyond_the_end_of_an_epoch_are_refused() -> None:
    loop = ManualLoop()
    logs: list[MemoryLog] = []

    def opened(settings: BrokerSettings) -> Broker:
        def open_log(replay: Replay) -> MemoryLog:
            logs.append(MemoryLog(loop, loop.clock, replay) if not logs else logs[-1].reopen(replay, synced_only=True))
            return logs[-1]

        return Broker.over(open_log, settings=settings, loop=loop, clock=loop.clock)

    first = Peer(broker=opened(BrokerSettings()), loop=loop)
    first.ask(Verb.CREATE_TOPIC, messages.CreateTopic("t", 1)).decode(messages.TopicDescription)
    first.ask(Verb.PRODUCE, messages.Produce("t", 0, level=2), batch_of(b"a", b"b"))
    produce(first, b"lost")
    first.session.close()
    second = Peer(broker=opened(BrokerSettings()), loop=loop)
    produce(second, b"new", b"newer")
    error = second.ask(Verb.FETCH, messages.Fetch("t", 0, 3, epoch=1)).error
    assert isinstance(error, Conflict)
    assert (error.code, "end=2" in error.message) == (ErrorCode.EPOCH_ENDED, True)
    assert second.ask(Verb.FETCH, messages.Fetch("t", 0, 1, 3, epoch=1)).error.code is ErrorCode.EPOCH_ENDED
    assert offsets_of([second.ask(Verb.FETCH, messages.Fetch("t", 0, 2, epoch=1))]) == [2, 3]
