"""ACQUIRE with acknowledgements over the `polywire` protocol: both in one request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from polywire.broker.broker import Broker
from polywire.errors import Busy, ErrorCode
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.errors import error_of
from polywire.protocols.polywire.messages import AcknowledgedRun, Head, Verb
from polywire.records.rows import to_records
from polywire.share_settings import AUTO_OFFSET_RESET, DEAD_LETTERS
from polywire.types import Level, Outcome
from tests.unit.protocols.polywire.peer import Answer, Peer, batch_of

WAIT_MS = 30_000
Run = tuple[int, int, int]


def make_peer(settings: dict[str, str | None] | None = None) -> Peer:
    """Return a client of a topic whose only partition has ten records."""
    made = Peer()
    made.ask(Verb.CREATE_TOPIC, messages.CreateTopic("t", 1)).decode(messages.TopicDescription)
    configure = messages.ConfigureQueue("g", "t", {AUTO_OFFSET_RESET: "earliest", **(settings or {})})
    made.ask(Verb.CONFIGURE_QUEUE, configure).decode(Head)
    produce(made, *(b"v%d" % n for n in range(10)))
    return made


@pytest.fixture
def peer() -> Peer:
    return make_peer()


def produce(peer: Peer, *values: bytes) -> None:
    head = messages.Produce("t", 0, level=int(Level.WRITTEN))
    peer.ask(Verb.PRODUCE, head, batch_of(*values)).decode(messages.Produced)


def head(records_max: int, *runs: tuple[int, int, Outcome], wait_ms: int = WAIT_MS) -> messages.Acquire:
    entries = [AcknowledgedRun(0, *run) for run in runs]
    return messages.Acquire("g", "t", "m", records_max, wait_ms=wait_ms, runs=entries)


def found(answer: Answer) -> tuple[list[Run], list[tuple[int, ErrorCode]]]:
    """Return the acquired runs, and the index and error of each refused entry."""
    decoded = answer.decode(messages.Acquired)
    assert decoded.refused is not None
    runs = [(*run,) for part in decoded.partitions for run in part.runs]
    return runs, [(index, error_of(failure).code) for index, failure in decoded.refused]


def combine(peer: Peer, records_max: int, *runs: tuple[int, int, Outcome]) -> tuple[list[Run], Sequence[object]]:
    return found(peer.ask(Verb.ACQUIRE, head(records_max, *runs)))


def unfinished(peer: Peer) -> dict[int, int]:
    """Return the delivery counts of the unfinished records."""
    progress = peer.broker._state.shares.find("g", peer.broker.topic("t").partitions[0].incarnation)
    assert progress is not None
    return dict(progress.counts)


def held(peer: Peer) -> dict[str, int]:
    offsets = peer.broker.shares.offsets("g", peer.broker.topic("t").partitions[0])
    assert offsets is not None
    return dict(offsets.acquired)


def test_records_end_and_others_come(peer: Peer) -> None:
    assert combine(peer, 2) == ([(0, 1, 1)], [])
    answer = peer.ask(Verb.ACQUIRE, head(2, (0, 0, Outcome.ACCEPT), (1, 1, Outcome.ACCEPT)))
    assert found(answer) == ([(2, 3, 1)], [])
    assert [record.value for record in to_records(answer.payload)] == [b"v2", b"v3"]
    assert unfinished(peer) == {2: 1, 3: 1}


def test_acknowledgements_take_effect_first(peer: Peer) -> None:
    """A record that is released by a request can be acquired by it."""
    combine(peer, 10)
    assert combine(peer, 10, (4, 4, Outcome.RELEASE), (5, 9, Outcome.ACCEPT)) == ([(4, 4, 2)], [])
    assert unfinished(peer) == {0: 1, 1: 1, 2: 1, 3: 1, 4: 2}


def test_a_refused_entry_does_not_prevent_an_acquisition(peer: Peer) -> None:
    combine(peer, 2)
    runs, refused = combine(peer, 3, (0, 0, Outcome.ACCEPT), (7, 7, Outcome.ACCEPT), (1, 1, Outcome.ACCEPT))
    assert runs == [(2, 4, 1)]
    assert refused == [(1, ErrorCode.RECORD_NOT_ACQUIRED)]
    assert unfinished(peer) == {2: 1, 3: 1, 4: 1}


def test_a_malformed_entry_refuses_the_whole_request(peer: Peer) -> None:
    combine(peer, 2)
    answer = peer.ask(Verb.ACQUIRE, head(2, (0, 0, Outcome.ACCEPT), (1, 0, Outcome.ACCEPT)))
    assert answer.error.code is ErrorCode.INVALID_REQUEST
    assert unfinished(peer) == {0: 1, 1: 1}
    assert held(peer) == {"m": 2}


def test_a_request_with_acknowledgements_does_not_wait(peer: Peer) -> None:
    combine(peer, 10)
    assert combine(peer, 1, (0, 9, Outcome.ACCEPT)) == ([], [])
    peer.send(Verb.ACQUIRE, head(1))
    peer.loop.run_due()
    assert peer.frames() == []
    produce_frames = peer.another()
    produce(produce_frames, b"later")
    peer.loop.run_due()
    [answer] = peer.frames()
    assert found(answer) == ([(10, 10, 1)], [])


def test_the_disk_may_be_full_between_both(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The acknowledgements have taken effect, so the response reports them. The next request reports the error."""
    combine(peer, 2)
    change_all = Broker.change_all
    stored: list[Any] = []

    def full(broker: Broker, made: Any, **named: Any) -> None:
        if stored:
            raise Busy(ErrorCode.DISK_FULL, "disk is full")
        stored.append(made)
        change_all(broker, made, **named)

    monkeypatch.setattr(Broker, "change_all", full)
    assert combine(peer, 2, (0, 1, Outcome.ACCEPT)) == ([], [])
    assert unfinished(peer) == {}
    assert held(peer) == {}
    assert peer.ask(Verb.ACQUIRE, head(2)).error.code is ErrorCode.DISK_FULL
    monkeypatch.undo()
    assert combine(peer, 2) == ([(2, 3, 1)], [])


def test_a_full_disk_refuses_the_entries(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    combine(peer, 2)

    def full(*_: Any, **__: Any) -> None:
        raise Busy(ErrorCode.DISK_FULL, "disk is full")

    monkeypatch.setattr(Broker, "change_all", full)
    assert combine(peer, 2, (0, 1, Outcome.ACCEPT)) == ([], [(0, ErrorCode.DISK_FULL)])
    assert unfinished(peer) == {0: 1, 1: 1}
    assert held(peer) == {"m": 2}


def test_a_connection_that_is_lost_before_the_response(peer: Peer) -> None:
    """Its acknowledgements count, and the records that it has acquired go to another worker."""
    combine(peer, 2)
    peer.send(Verb.ACQUIRE, head(3, (0, 1, Outcome.ACCEPT)))
    peer.session.close()
    peer.loop.run_due()
    other = peer.another()
    assert unfinished(peer) == {2: 1, 3: 1, 4: 1}
    assert combine(other, 3) == ([(2, 4, 2)], [])


def test_nothing_is_acquired_while_a_dead_letter_is_copied() -> None:
    """The copy may take long, for example while its topic is missing, and the locks would expire."""
    peer = make_peer({DEAD_LETTERS: "dead"})
    combine(peer, 2)
    assert combine(peer, 2, (0, 0, Outcome.REJECT), (1, 1, Outcome.ACCEPT)) == ([], [])
    assert unfinished(peer) == {}
    assert peer.broker.topic("dead").partitions[0].log.next_offset == 1
    assert combine(peer, 2) == ([(2, 3, 1)], [])


def test_every_response_shows_that_entries_are_executed(peer: Peer) -> None:
    """A client sends entries only to brokers that execute them."""
    answer = peer.ask(Verb.ACQUIRE, head(2))
    assert answer.decode(messages.Acquired).refused == []


def test_no_offset_is_the_largest_number(peer: Peer) -> None:
    """The offset after the last one of an entry must be a signed 64-bit number, too."""
    combine(peer, 2)
    answer = peer.ask(Verb.ACQUIRE, head(2, (0, 2**63 - 1, Outcome.ACCEPT)))
    assert answer.error.code is ErrorCode.INVALID_REQUEST
    runs, refused = combine(peer, 2, (0, 2**63 - 2, Outcome.ACCEPT))
    assert (runs, refused) == ([(2, 3, 1)], [(0, ErrorCode.RECORD_NOT_ACQUIRED)])
    assert unfinished(peer) == {0: 1, 1: 1, 2: 1, 3: 1}
