"""Share groups over the `polywire` protocol: records that are acquired, and acknowledgements of single ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from polywire.broker import changes
from polywire.broker.state import State
from polywire.errors import ErrorCode
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.errors import error_of
from polywire.protocols.polywire.messages import AcknowledgedRun, Head, Verb
from polywire.records.rows import to_records
from polywire.share_settings import AUTO_OFFSET_RESET
from polywire.types import Level, Outcome
from tests.unit.protocols.polywire.peer import Peer, batch_of

EARLIEST: dict[str, str | None] = {AUTO_OFFSET_RESET: "earliest"}


@pytest.fixture
def peer() -> Peer:
    return make_peer()


def make_peer() -> Peer:
    """Return a client of a topic whose two partitions have ten records each, in batches of five."""
    made = Peer()
    made.ask(Verb.CREATE_TOPIC, messages.CreateTopic("t", 2)).decode(messages.TopicDescription)
    made.ask(Verb.CONFIGURE_QUEUE, messages.ConfigureQueue("g", "t", EARLIEST)).decode(Head)
    for partition in (0, 0, 1, 1):
        produce = messages.Produce("t", partition, level=int(Level.WRITTEN))
        made.ask(Verb.PRODUCE, produce, batch_of(*[b"v%d" % n for n in range(5)])).decode(messages.Produced)
    return made


def acquire(peer: Peer, records_max: int = 100, member: str = "m") -> list[tuple[int, list[tuple[int, int, int]]]]:
    found = peer.ask(Verb.ACQUIRE, messages.Acquire("g", "t", member, records_max)).decode(messages.Acquired)
    return sorted((part.partition, [(*run,) for run in part.runs]) for part in found.partitions)


def acknowledge(peer: Peer, *runs: tuple[int, int, int, Outcome]) -> list[tuple[int, ErrorCode]]:
    """Return the index and the error code of each refused entry."""
    head = messages.Acknowledge("g", "t", "m", [AcknowledgedRun(*run) for run in runs])
    refused = peer.ask(Verb.ACKNOWLEDGE, head).decode(messages.Acknowledged).refused
    return [(index, error_of(failure).code) for index, failure in refused]


def unfinished(peer: Peer, partition: int) -> list[int]:
    stored = peer.broker.topic("t").partitions[partition].incarnation
    progress = peer.broker._state.shares.find("g", stored)
    assert progress is not None
    return sorted(progress.counts)


def test_many_single_acknowledgements_are_one_change(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert acquire(peer) == [(0, [(0, 9, 1)]), (1, [(0, 9, 1)])]
    stored: list[Any] = []
    apply = State.apply_change

    def noted(state: State, change: Any) -> None:
        stored.append(change)
        apply(state, change)

    monkeypatch.setattr(State, "apply_change", noted)
    accepted = [(partition, offset, offset, Outcome.ACCEPT) for partition in (0, 1) for offset in range(10)]
    assert acknowledge(peer, *accepted) == []
    assert [change.runs for change in stored if isinstance(change, changes.ShareProgressed)] == [(0, 9, -1)] * 2
    assert unfinished(peer, 0) == unfinished(peer, 1) == []


def test_each_entry_has_its_own_outcome(peer: Peer) -> None:
    acquire(peer)
    outcomes = [Outcome.ACCEPT, Outcome.RELEASE, Outcome.REJECT, Outcome.RENEW, Outcome.ACCEPT, Outcome.RELEASE]
    assert acknowledge(peer, *((0, offset, offset, outcome) for offset, outcome in enumerate(outcomes))) == []
    assert unfinished(peer, 0) == [1, 3, 5, 6, 7, 8, 9]
    assert acquire(peer) == [(0, [(1, 1, 2), (5, 5, 2)])]


def test_refused_entries_do_not_affect_others(peer: Peer) -> None:
    acquire(peer, 5)
    found = [partition for partition in (0, 1) if unfinished(peer, partition)]
    [mine] = found
    other = 1 - mine
    accept = Outcome.ACCEPT
    refused = acknowledge(
        peer, (mine, 0, 1, accept), (mine, 2, 2, accept), (mine, 7, 7, accept), (other, 0, 0, accept), (9, 0, 0, accept)
    )
    missing, unlocked = ErrorCode.PARTITION_MISSING, ErrorCode.RECORD_NOT_ACQUIRED
    assert refused == [(2, unlocked), (3, unlocked), (4, missing)]
    assert unfinished(peer, mine) == [3, 4]


def test_entries_take_effect_in_order_even_if_they_overlap(peer: Peer) -> None:
    acquire(peer, 5)
    [mine] = [partition for partition in (0, 1) if unfinished(peer, partition)]
    refused = acknowledge(
        peer,
        (mine, 3, 3, Outcome.ACCEPT),
        (mine, 2, 2, Outcome.RENEW),
        (mine, 2, 2, Outcome.ACCEPT),
        (mine, 2, 3, Outcome.ACCEPT),
        (mine, 0, 1, Outcome.ACCEPT),
    )
    assert refused == [(3, ErrorCode.RECORD_NOT_ACQUIRED)]
    assert unfinished(peer, mine) == [4]


def test_an_empty_request_is_answered(peer: Peer) -> None:
    assert acknowledge(peer) == []


def test_a_response_has_no_more_records_than_requested(peer: Peer) -> None:
    answer = peer.ask(Verb.ACQUIRE, messages.Acquire("g", "t", "m", 2))
    [part] = answer.decode(messages.Acquired).partitions
    assert part.runs == [(0, 1, 1)]
    assert [record.value for record in to_records(answer.payload)] == [b"v0", b"v1"]


def test_records_that_the_connection_sent_before_are_acquired(peer: Peer) -> None:
    acquire(peer)
    peer.send(Verb.PRODUCE, messages.Produce("t", 0, level=int(Level.WRITTEN)), batch_of(b"new"))
    peer.send(Verb.ACQUIRE, messages.Acquire("g", "t", "m", 5))
    peer.loop.run_due()
    _, found = peer.frames()
    assert [part.runs for part in found.decode(messages.Acquired).partitions] == [[(10, 10, 1)]]


def test_a_worker_that_reconnects_keeps_its_records(peer: Peer) -> None:
    """The broker may notice late that the old connection is lost."""
    old, new = peer.another(), peer.another()
    assert acquire(old, 2) != []
    held = acquire(new, 2)
    assert held != []
    old.session.close()
    [(partition, [(first, last, _)])] = held
    assert acknowledge(new, (partition, first, last, Outcome.ACCEPT)) == []
    acquire(new, 1)
    new.session.close()
    peer.loop.run_due()
    offsets = [peer.broker.shares.offsets("g", partition) for partition in peer.broker.topic("t").partitions]
    assert [found.acquired for found in offsets if found is not None] == [{}, {}]


def test_a_record_that_is_released_during_a_read_is_not_acquired_unread(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker would take a record that is missing in the response for one that compaction removed."""
    held = peer.another()
    assert acquire(held, 5, "other") == [(0, [(0, 4, 1)])]
    fetch, arrived = type(peer.broker).fetch, list[Any]()

    def slow(broker: Any, partition: Any, offset: int, *, then: Any, **named: Any) -> Any:
        arrived.append(lambda: then(fetch(broker, partition, offset, then=then, **named)))
        return SimpleNamespace(cancel=lambda: None)

    monkeypatch.setattr(type(peer.broker), "fetch", slow)
    peer.send(Verb.ACQUIRE, messages.Acquire("g", "t", "m", 5))
    peer.loop.run_due()
    held.session.close()
    while arrived:
        arrived.pop(0)()
        peer.loop.run_due()
    [answer] = peer.frames()
    parts = answer.decode(messages.Acquired).partitions
    runs = sum(last - first + 1 for part in parts for first, last, _ in part.runs)
    payload, records = memoryview(answer.payload), 0
    for part in parts:
        at = 0
        while at < part.payload_bytes:
            records += len(to_records(payload, at))
            at += int.from_bytes(payload[at + 4 : at + 8], "little")
        payload = payload[part.payload_bytes :]
    assert records == runs == 5
