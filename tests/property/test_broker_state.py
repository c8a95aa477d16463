"""The broker's state after a restart is the same from the first group on or from a snapshot, after any history."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import hypothesis.strategies as st
import msgspec
from hypothesis import given, settings

from polywire.broker import changes
from polywire.broker.broker import Broker
from polywire.broker.changes import TransactionalProducer
from polywire.broker.participants import Joined
from polywire.broker.settings import BrokerSettings, TopicSettings
from polywire.broker.transaction_state import Scope
from polywire.errors import BrokerError
from polywire.testing.memory_broker import MemoryBroker
from polywire.types import Assignor, Level, PositionKind, TopicName
from tests.unit.broker.answers import batch_by, batch_of

Step = Callable[[Broker], object]

NAMES = st.sampled_from(["a", "b", "c"])
SMALL = st.integers(0, 3)


def produce(topic: str, partition: int, epoch: int, base: int, count: int) -> Step:
    def step(broker: Broker) -> None:
        batch = batch_of(b"v") if epoch < 0 else batch_by(b"p%d" % (base % 2), epoch, base, count + 1)
        broker.produce(broker.ensure_topic(topic).partitions[partition % 3], batch, level=Level.WRITTEN, done=None)

    return step


def stage_and_publish(topic: str, number: int, token: int) -> Step:
    def step(broker: Broker) -> None:
        partition = broker.ensure_topic(topic).partitions[0]
        broker.stage(bytes([token]) * 16, partition, batch_of(b"v"), level=Level.WRITTEN, done=None)
        broker.publish("w", number, [bytes([token]) * 16], done=None)

    return step


def append_event(key: bytes, version: int) -> Step:
    def step(broker: Broker) -> None:
        topic = broker.find_topic("events")
        if topic is None:
            topic = broker.create_topic(TopicName("default", "events"), 1, TopicSettings(event_sourcing=True))
        partition = topic.partitions[0]
        broker.events.append(partition, key, version, batch_of(b"e"), level=Level.WRITTEN, done=None)
        broker.events.save_snapshot(partition, key, version, b"s" * version, level=Level.WRITTEN, done=None)

    return step


def transact(id_: str, topic: str, act: str, number: int) -> Step:
    def step(broker: Broker) -> None:
        transactions = broker.transactions
        held = transactions.find(id_)
        if held is None or act == "epoch":
            transactions.begin_epoch(id_, done=None)
        elif not held.is_open:
            transactions.begin(held, done=None)
        elif act == "stage":
            partition = broker.ensure_topic(topic).partitions[0]
            transactions.stage(held, partition, batch_of(b"t"), first=number, last=number, done=None)
        elif act == "offsets":
            transactions.put_offsets(held, Scope(topic, "g", "m", 1), {number: number}, done=None)
        elif act == "abort":
            transactions.abort(held, done=None)
        else:
            transactions.commit(held, done=lambda _: None)

    return step


def share(id_: str, topic: str, act: str, number: int) -> Step:
    """Return transaction state that several shards share."""
    token = bytes([number + 1]) * 16

    def step(broker: Broker) -> None:
        held, participant = broker.transactions.find(id_), broker.participants.find(id_)
        if act == "join" and held is not None and held.is_open:
            broker.participants.join(held, (number,), done=lambda _: None)
        elif act == "enter":
            producer = TransactionalProducer(7, 0, -1, 10**9)
            broker.participants.enter(Joined(id_, 1, token, number, producer, 0))
        elif act == "stage" and participant is not None and participant.is_open:
            partition = broker.ensure_topic(topic).partitions[0]
            first = participant.sequences.get(partition.incarnation, -1) + 1
            broker.transactions.stage(participant, partition, batch_of(b"t"), first=first, last=first, done=None)
        elif act == "end" and participant is not None:
            broker.participants.end(id_, participant.token, commits=number % 2 == 0, done=lambda _: None)
        elif act == "settle":
            for decided in list(broker._state.transactions.decisions)[:1]:
                broker.participants.end("none", decided, commits=True, done=lambda _: None)

    return step


STEPS: st.SearchStrategy[Step] = st.one_of(
    st.builds(produce, NAMES, SMALL, st.integers(-1, 2), st.integers(0, 6), SMALL),
    st.builds(stage_and_publish, NAMES, SMALL, SMALL),
    st.builds(append_event, st.sampled_from([b"k", b"l"]), st.integers(1, 4)),
    st.builds(
        transact, NAMES, NAMES, st.sampled_from(["epoch", "stage", "offsets", "abort", "commit", "commit"]), SMALL
    ),
    st.builds(share, NAMES, NAMES, st.sampled_from(["join", "enter", "stage", "end", "settle"]), SMALL),
    NAMES.map(lambda name: lambda broker: broker.create_topic(TopicName("default", name))),
    NAMES.map(lambda name: lambda broker: broker.delete_topic(broker.topic(name))),
    NAMES.map(lambda name: lambda broker: broker.purge_topic(broker.topic(name))),
    st.builds(lambda name, n: lambda broker: broker.grow_topic(broker.topic(name), 3 + n), NAMES, SMALL),
    st.builds(
        lambda name, n: lambda broker: broker.configure_topic(broker.topic(name), TopicSettings(retention_bytes=n)),
        NAMES,
        SMALL,
    ),
    st.builds(
        lambda name, n, owner: lambda broker: broker.commit_position(name, n, PositionKind.GROUP, owner, n),
        NAMES,
        SMALL,
        NAMES,
    ),
    st.builds(
        lambda name, owner: lambda broker: broker.delete_positions(PositionKind.GROUP, owner, full_name=name),
        st.none() | NAMES,
        NAMES,
    ),
    st.builds(
        lambda name, member, assignor: (
            lambda broker: broker.groups.join("g", name, member, wire="flux", assignor=assignor, named_alone=True)
        ),
        NAMES,
        NAMES,
        st.none() | st.sampled_from(Assignor),
    ),
    st.builds(
        lambda name, member: lambda broker: broker.groups.leave("g", name, member, None, wire="flux"), NAMES, NAMES
    ),
    NAMES.map(lambda name: lambda broker: broker.groups.delete("g", name)),
    st.builds(
        lambda key, value: lambda broker: broker.set_wire_state("flux", key, value),
        NAMES,
        st.none() | st.binary(max_size=3),
    ),
)


def timeless(state: bytes) -> changes.Snapshot:
    """Return a state without the times that recovery restarts: those of producers, offsets, groups and names."""
    was, replace = changes.decode_snapshot(state), msgspec.structs.replace
    return replace(
        was,
        producers=tuple(replace(producer, seen_at_us=0) for producer in was.producers),
        positions=tuple(replace(position, at_us=0) for position in was.positions),
        groups=tuple(replace(group, at_us=0) for group in was.groups),
        bindings=tuple(replace(binding, at_us=0) for binding in was.bindings),
    )


@settings(max_examples=200)
@given(steps=st.lists(st.tuples(STEPS, st.booleans(), st.floats(0, 2)), max_size=40), snapshot_at=st.integers(0, 60))
def test_a_restart_finds_the_same_state(steps: list[tuple[Step, bool, float]], snapshot_at: int) -> None:
    memory = MemoryBroker(BrokerSettings(producers_max=4, producer_window=2, producer_expiry_us=3_000_000))
    for index, (step, run, seconds) in enumerate(steps):
        with contextlib.suppress(BrokerError):
            step(memory.broker)
        if run:
            memory.advance(seconds)
        if index == snapshot_at:
            memory.run()
            memory.log.take_snapshot()
    memory.run()
    topics = [(t.name, t.id, [p.log.next_offset for p in t.partitions]) for t in memory.broker.topics()]
    state = timeless(memory.log.state())
    memory.restart(synced_only=False)
    assert timeless(memory.log.state()) == state
    assert [(t.name, t.id, [p.log.next_offset for p in t.partitions]) for t in memory.broker.topics()] == topics
    exact = memory.log.state()
    memory.log.take_snapshot()
    memory.restart()
    assert memory.log.state() == exact
