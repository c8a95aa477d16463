"""Transactions over several processes: permissions, deleted topics, large parts, delayed messages, resharding."""

from __future__ import annotations

import time
from typing import Any

import pytest

from polywire.broker.changes import TransactionalProducer
from polywire.broker.participants import Joined
from polywire.broker.transactions import BATCHES_AT_ONCE_MAX
from polywire.errors import Busy, Conflict
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.client_batches import encode_batch
from polywire.protocols.kafka.client_codec import decode_response, encode_request
from polywire.protocols.kafka.forwarded import Origin
from polywire.protocols.kafka.messages import Api, Request, WireError
from polywire.protocols.kafka.routed import ask_shard
from polywire.protocols.kafka.sasl import PLAIN
from polywire.protocols.kafka.transactions import SETTLED_S
from polywire.protocols.runtime.forwarded import Sender
from polywire.records.columns import Record
from tests.unit.protocols.kafka.test_processes import TOPICS, WAIT_S, Client, Processes, with_users
from tests.unit.protocols.kafka.test_transactions_of_processes import (
    HOME,
    Deaf,
    Everywhere,
    away,
    back,
    decisions,
    each_dialect,
    end,
    everywhere,
    producer,
    stored,
    write,
)
from tests.unit.protocols.kafka.transaction_dialogue import TRANSACTIONAL, Producer


@pytest.fixture
def processes() -> Processes:
    made = Processes()
    made.make(*TOPICS)
    return made


def sent(made: Producer, topic: str, first: int, value: bytes) -> dict[str, Any]:
    """Return the fields of a Produce request of one record."""
    batch = encode_batch(
        [Record(value)],
        producer_id=made.number,
        producer_epoch=made.epoch,
        base_sequence=first,
        attributes=TRANSACTIONAL,
    )
    topics = schema.request(Api.PRODUCE).Topics
    one = topics(name=topic, partitions=[topics.Partitions(index=0, records=batch)])
    return {"transactional_id": made.id, "acks": -1, "topics": [one]}


def frames(client: Client) -> list[bytes]:
    """Return the responses that arrived, without their lengths."""
    data, found = bytes(client.output.written), []
    client.output.written.clear()
    while data:
        size = int.from_bytes(data[:4], "big")
        found.append(data[4 : 4 + size])
        data = data[4 + size :]
    return found


def test_later_records_wait_until_the_coordinator_has_added_the_first_ones(processes: Processes) -> None:
    """A client pipelines several requests: they must be handled in the order of their sequences."""
    made = producer(processes)
    client = made.peer.clients[1]  # type: ignore[attr-defined]
    data = b"".join(
        encode_request(
            Api.PRODUCE,
            12,
            number,
            schema.request(Api.PRODUCE)(**sent(made, "a", number, b"%d" % number)),
            client_id="t",
        )
        for number in range(5)
    )
    waiting, session = bytearray(data), client.session
    for _ in range(100):
        if waiting and not session.paused():
            del waiting[: session.receive(memoryview(bytearray(waiting)))]
        processes.loop.run_due()
        for broker in processes.shards.brokers:
            broker.commit()
    reported = [decode_response(Api.PRODUCE, 12, frame) for frame in frames(client)]
    assert [(number, one.responses[0].partitions[0].error) for number, one in reported] == [(n, 0) for n in range(5)]
    assert made.finish() == 0
    assert stored(processes, "a") == [b"%d" % number for number in range(5)]


def test_a_connection_closed_while_the_coordinator_is_asked_leaves_nothing(processes: Processes) -> None:
    made = producer(processes)
    client = made.peer.clients[1]  # type: ignore[attr-defined]
    client.tell(Api.PRODUCE, 12, **sent(made, "a", 0, b"v"))
    assert client.output.pins == 1
    client.session.close()
    assert client.output.pins == 0
    back(processes, {})
    assert made.finish(commits=False) == 0
    assert everywhere(processes) == [[], [], []]


@each_dialect
def test_records_of_a_topic_deleted_during_the_transaction_are_dropped(processes: Processes, dialect: int) -> None:
    made = producer(processes)
    write(made, dialect, "a", "bb", "ccc")
    broker = processes.broker("bb")
    broker.delete_topic(broker.topic("bb"))
    processes.loop.run_due()
    assert end(made, dialect) == 0
    assert (stored(processes, "a"), stored(processes, "ccc")) == ([b"v"], [b"v"])
    assert decisions(processes) == 0


def test_a_large_participant_is_committed_in_steps(processes: Processes) -> None:
    made, count = producer(processes), BATCHES_AT_ONCE_MAX + 50
    for number in range(count):
        assert made.produce(number, b"%d" % number, topic="a", version=12).error == 0
    write(made, 2, "ccc")
    assert made.finish() == 0
    assert stored(processes, "a") == [b"%d" % number for number in range(count)]
    assert stored(processes, "ccc") == [b"v"]


@each_dialect
def test_a_repeated_end_gets_the_same_response(processes: Processes, dialect: int) -> None:
    made = producer(processes)
    write(made, dialect, "a", "bb")
    before = made.epoch
    was = away(processes, 2)
    client, version = made.peer.clients[0], 3 if dialect == 1 else 5  # type: ignore[attr-defined]
    client.tell(Api.END_TXN, version, **made.who, committed=True)
    for _ in range(3):  # another connection repeats it, while it is decided and not done
        other = Client(processes, 0)
        other.tell(Api.END_TXN, version, **made.who, committed=True)
        processes.loop.advance(SETTLED_S)
        reported = other.hear(Api.END_TXN, version)
        assert reported.error == (WireError.CONCURRENT_TRANSACTIONS if dialect == 1 else 0)
    back(processes, was)
    reported = Client(processes, 0).ask(Api.END_TXN, version, **made.who, committed=True)
    assert reported.error == 0
    if dialect == 2:
        assert (reported.producer_id, reported.producer_epoch) == (made.number, before + 1)
    assert everywhere(processes) == [[b"v"], [b"v"], []]


def test_every_client_waiting_for_an_end_gets_the_result(processes: Processes) -> None:
    made = producer(processes)
    write(made, 2, "a", "bb")
    was = away(processes, 2)
    clients = [Client(processes, 0) for _ in range(3)]
    for client in clients:
        client.tell(Api.END_TXN, 5, **made.who, committed=True)
    assert [client.hear(Api.END_TXN, 5) for client in clients] == [None] * 3
    processes.shards.factories[2] = was[2]
    for link in processes.shards.links:
        if isinstance(link._session, Deaf) and link._peer is not None:
            link.break_off()
    processes.loop.advance(1.0)
    assert [client.hear(Api.END_TXN, 5).producer_epoch for client in clients] == [1] * 3


def test_the_next_transaction_waits_for_an_unresponsive_shard(processes: Processes) -> None:
    made = producer(processes)
    write(made, 2, "a", "bb", "ccc")
    was = away(processes, 2)
    client = made.peer.clients[0]  # type: ignore[attr-defined]
    version = client.tell(Api.END_TXN, 5, **made.who, committed=True)
    client.hear(Api.END_TXN, version)
    processes.loop.advance(SETTLED_S)
    reported = client.hear(Api.END_TXN, version)
    made.number, made.epoch = reported.producer_id, reported.producer_epoch
    assert made.produce(0, b"next", topic="ccc", version=12).error == WireError.REQUEST_TIMED_OUT
    elsewhere = made.peer.clients[1]  # type: ignore[attr-defined]
    elsewhere.tell(Api.PRODUCE, 12, **sent(made, "a", 0, b"next"))
    processes.loop.advance(SETTLED_S)
    reported = elsewhere.hear(Api.PRODUCE, 12)
    assert reported.responses[0].partitions[0].error == WireError.REQUEST_TIMED_OUT
    back(processes, was)
    write(made, 2, "a", "ccc", value=b"next")
    assert made.finish() == 0
    assert everywhere(processes) == [[b"v", b"next"], [b"v"], [b"v", b"next"]]


# Permissions of a coordinator


def joined(home: int = 0, token: int = 1, epoch: int = 3, number: int = 9) -> Joined:
    return Joined("id", home, bytes([token]) * 16, epoch, TransactionalProducer(number, 0, -1, 10**9), 0)


def test_a_late_permission_after_the_end_opens_nothing(processes: Processes) -> None:
    participants = processes.shards.brokers[1].participants
    participants.end("id", joined().token, commits=True, done=lambda _: None)
    with pytest.raises(Conflict):
        participants.enter(joined())
    participants.enter(joined(token=2))
    with pytest.raises(Conflict):
        participants.enter(joined(token=3, epoch=2))
    assert participants.enter(joined(token=3, epoch=0, number=10)).token == joined(token=3).token, (
        "an id that was re-created"
    )


def test_a_late_end_does_not_end_the_next_transaction(processes: Processes) -> None:
    """In the first version both have the same epoch."""
    participants = processes.shards.brokers[1].participants
    participants.enter(joined())
    for _ in range(2):
        participants.end("id", joined().token, commits=True, done=lambda _: None)
        processes.loop.run_due()
        participants.enter(joined(token=2))
    participant = participants.find("id")
    assert participant is not None
    assert participant.is_open


def test_a_shard_does_not_open_a_participant_by_itself(processes: Processes) -> None:
    """A power loss took its unsynced participant: partitions that arrive later belong to another one."""
    made = producer(processes)
    write(made, 1, "a")
    assert end(made, 1) == 0
    assert made.add(0, topic="ccc") == [0], "the coordinator has started the next transaction"
    reported: list[Any] = []
    topics = [schema.request(Api.ADD_PARTITIONS_TO_TXN).Topics(name="a", partitions=[0])]
    asked = schema.request(Api.ADD_PARTITIONS_TO_TXN)(**made.who, topics=topics)
    request = Request(Api.ADD_PARTITIONS_TO_TXN, 3, 0, None, asked)
    sender = Sender(None, "", Origin(0, 1).encode())
    ask_shard(processes.routers[0], 1, sender, request, reported.append)
    processes.run()
    assert reported[0].topics[0].partitions[0].error == WireError.CONCURRENT_TRANSACTIONS, (
        "after this error clients retry"
    )
    participant = processes.shards.brokers[1].participants.find(HOME)
    assert participant is not None
    assert not participant.is_open


def test_a_participant_of_another_coordinator_is_waited_for(processes: Processes) -> None:
    participants = processes.shards.brokers[1].participants
    participants.enter(joined())
    with pytest.raises(Busy):
        participants.enter(joined(home=2, token=2))
    participants.end("id", joined().token, commits=False, done=lambda _: None)
    processes.loop.run_due()
    assert participants.enter(joined(home=2, token=2, epoch=0)).is_open


def test_internal_ids_of_participants_are_refused(processes: Processes) -> None:
    reported = Client(processes, 1).ask(
        Api.INIT_PRODUCER_ID, 4, transactional_id="\0abc", transaction_timeout_ms=1000
    )  # a name of four characters
    assert reported.error == WireError.INVALID_REQUEST


def test_open_transactions_are_aborted_when_their_coordinator_moves(processes: Processes) -> None:
    """The directory had fewer processes before."""
    made = Producer(Everywhere(processes), "aa")  # type: ignore[arg-type]
    broker = processes.shards.brokers[1]
    held = broker.transactions.number_producer("aa", asks_again=False, timeout_us=10**9, done=None)
    kept = broker.transactions.number_producer("a", asks_again=False, timeout_us=10**9, done=None)
    for one in (held, kept):
        broker.transactions.begin(one, done=None)
    broker.participants._is_stopped = False
    broker.participants._abort_moved(processes.outside[1].shared.coordinates)
    found = [broker.transactions.find(name) for name in ("aa", "a")]
    assert [one is not None and one.is_open for one in found] == [False, True]
    assert made.init() == 0


# Permissions


def logged_in(processes: Processes, name: str) -> Everywhere:
    everywhere_ = Everywhere(processes)
    for client in everywhere_.clients:
        client.ask(Api.SASL_HANDSHAKE, mechanism=PLAIN)
        version = client.tell(Api.SASL_AUTHENTICATE, auth_bytes=f"\0{name}\0wonderland".encode())
        end_s = time.monotonic() + WAIT_S
        while (reported := client.hear(Api.SASL_AUTHENTICATE, version)) is None:
            assert time.monotonic() < end_s, "passwords are verified in a thread"
        assert not reported.error
    return everywhere_


def test_permissions_of_the_client_apply_in_every_shard(processes: Processes) -> None:
    """alice may do everything, bob only what concerns topic a."""
    with_users(processes)
    bob = Producer(logged_in(processes, "bob"), "TTTT")  # type: ignore[arg-type]  # at home in shard 1, as topic a
    assert bob.init() == 0
    assert bob.add(0, topic="bb") == [WireError.TOPIC_AUTHORIZATION_FAILED]
    assert bob.produce(0, b"v", topic="bb", version=12).error == WireError.TOPIC_AUTHORIZATION_FAILED
    assert bob.produce(0, b"bob", topic="a", version=12).error == 0
    assert bob.move(1, topic="bb", group="ccc", version=5) == WireError.GROUP_AUTHORIZATION_FAILED
    assert bob.move(1, topic="a", group="ccc", version=5) == 0
    alice = Producer(logged_in(processes, "alice"), HOME)  # type: ignore[arg-type]
    assert alice.init() == 0
    write(alice, 2, "a", "bb", "ccc")
    stolen = Producer(bob.peer, HOME, alice.number, alice.epoch)
    denied = WireError.INVALID_PRODUCER_ID_MAPPING  # as for an id that does not exist
    assert stolen.produce(1, b"stolen", topic="a", version=12).error == denied
    assert stolen.add(0, topic="a") == [denied]
    assert stolen.finish() == denied
    assert alice.finish() == 0
    assert bob.finish() == 0
    processes.loop.run_due()
    brokers = processes.shards.brokers
    partition = brokers[1].topic("a").partitions[0]
    assert partition.log.next_offset == 2
