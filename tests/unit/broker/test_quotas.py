"""Quotas of one owner, by count and bytes: other owners are never locked out, and usage follows from the state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count

import pytest

from polywire.broker.access import ConfiguredUser, Principal
from polywire.broker.owners import NO_CALLER, Caller, caller_of
from polywire.broker.permissions import parse_grants
from polywire.broker.quotas import Kind, Usage
from polywire.broker.settings import WIRE_OPTIONS_BYTES_MAX, BrokerSettings, TopicSettings
from polywire.broker.state import State
from polywire.broker.transaction_state import Scope
from polywire.errors import Busy, Invalid
from polywire.testing.memory_broker import MemoryBroker
from polywire.types import Level, PositionKind, TopicName
from tests.unit.broker.answers import batch_by, batch_of

SETTINGS = BrokerSettings(
    groups_max=40,
    members_total_max=60,
    positions_max=200,
    position_owners_max=50,
    writers_max=40,
    transactional_ids_max=40,
    wire_state_keys_max=40,
    aggregates_max=40,
    events_max=60,
    aggregate_snapshots_bytes_max=9_000,
    state_bytes_max=40_000,
    reserved_count=3,
    reserved_bytes=3_000,
)
HOSTILE = caller_of(None, "10.0.0.66:1")
OTHER = caller_of(None, "10.0.0.7:1")
Fill = Callable[[MemoryBroker, Caller, str], object]


def append_event(memory: MemoryBroker, by: Caller, key: str) -> None:
    """Append the next event of an aggregate."""
    broker = memory.broker
    topic = broker.find_topic("ev")
    if topic is None:
        topic = broker.create_topic(TopicName("default", "ev"), 1, TopicSettings(event_sourcing=True))
    (partition,), name = topic.partitions, key.encode()
    version = broker.events.version(partition, name) + 1
    broker.events.append(partition, name, version, batch_of(b"e"), by=by, level=Level.WRITTEN, done=None)


def save_snapshot(memory: MemoryBroker, by: Caller, key: str) -> None:
    """Save a snapshot of an unowned aggregate."""
    append_event(memory, NO_CALLER, key)
    events, (partition,) = memory.broker.events, memory.broker.topic("ev").partitions
    events.save_snapshot(partition, key.encode(), 1, b"s" * (300 - len(key)), by=by, level=Level.WRITTEN, done=None)


FILLS: dict[str, Fill] = {
    "transactional ids": lambda m, by, name: m.broker.transactions.begin_epoch(name, by=by, done=None),
    "writers": lambda m, by, name: m.broker.publish(name, 1, [], by=by, done=None),
    "groups": lambda m, by, name: m.broker.groups.join(name, "t", "m", wire="flux", named_alone=True, by=by),
    "groups without members": lambda m, by, name: m.broker.groups.create(name, "t", by=by),
    "members": lambda m, by, name: m.broker.groups.join(f"g{by.owner}", "t", name, wire="flux", by=by),
    "names of groups": lambda m, by, name: m.broker.groups.bind("cursus", name, "t", by=by),
    "positions": lambda m, by, name: m.broker.commit_position("t", 0, PositionKind.CONSUMER, name, 1, by=by),
    "positions of missing topics": lambda m, by, name: m.broker.commit_position(
        name, 0, PositionKind.GROUP, "g", 1, by=by
    ),
    "aggregates": append_event,
    "events": lambda m, by, name: append_event(m, by, f"{by.owner}{name[5:8]}"),
    "events of one aggregate": lambda m, by, name: append_event(m, by, "shared"),
    "snapshots": save_snapshot,
    "state of a wire": lambda m, by, name: m.broker.set_wire_state("flux", name, b"v" * 100, by=by),
}


def fill(memory: MemoryBroker, by: Caller, how: Fill, size: int = 1) -> int:
    """Add until the broker refuses; return how many it accepted."""
    for number in count():
        try:
            how(memory, by, f"{number:05}{by.owner % 1000}{'x' * size}")
        except Busy:
            return number
        assert number < 10_000, "no limit was reached"
    raise AssertionError


@pytest.mark.parametrize("what", FILLS)
@pytest.mark.parametrize("size", [1, 200])
def test_one_address_cannot_use_up_the_quota_of_others_even_after_a_restart(what: str, size: int) -> None:
    memory = MemoryBroker(SETTINGS)
    memory.broker.ensure_topic("t")
    taken = fill(memory, HOSTILE, FILLS[what], size)
    assert taken > 3
    assert memory.broker._state.usage.bytes_of(HOSTILE.owner) <= SETTINGS.state_bytes_max // 2 + 1000
    memory.run()
    memory.restart()
    with pytest.raises(Busy):
        FILLS[what](memory, HOSTILE, "one more")
    for name in "abc":
        FILLS[what](memory, OTHER, name)


@pytest.mark.parametrize("what", FILLS)
def test_many_addresses_cannot_use_up_the_reserve_of_users(what: str) -> None:
    memory = MemoryBroker(SETTINGS)
    memory.broker.ensure_topic("t")
    memory.broker.access.configure([ConfiguredUser("alice", "", parse_grants(["all"]))])
    for number in range(4):
        fill(memory, caller_of(None, f"10.0.0.{number}:1"), FILLS[what])
    with pytest.raises(Busy):
        FILLS[what](memory, OTHER, "no place for one more address")
    alice = memory.broker.access.user("alice")
    for name in "abc":
        FILLS[what](memory, caller_of(Principal(alice.id, "alice"), "10.0.0.1:1"), name)


def test_usage_is_equal_from_changes_and_a_snapshot_and_zero_after_deletion() -> None:
    memory = MemoryBroker()
    topic = memory.broker.ensure_topic("t")
    for number, how in enumerate(FILLS.values()):
        for name in "ab":
            how(memory, caller_of(None, f"10.0.0.{number}:1"), name if number != 3 else name * 2)
    transactions = memory.broker.transactions
    transactions.begin(transactions.begin_epoch("a", by=HOSTILE, done=None), done=None)
    open_one = transactions.find("a")
    assert open_one is not None
    transactions.stage(open_one, topic.partitions[0], batch_of(b"v"), first=1, last=1, done=None)
    memory.broker.groups.leave("b", "t", "m", None, wire="flux")
    memory.broker.commit_position("t", 0, PositionKind.CONSUMER, "a", 2, by=Caller(None, 9))
    memory.run()
    state = memory.broker._state
    again = State(memory.settings)
    again.restore(state.snapshot())
    memory.restart()
    replayed = memory.broker._state
    for kind in Kind:
        assert again.usage.count(kind) == state.usage.count(kind) == replayed.usage.count(kind), kind
    assert again.usage.owners() == state.usage.owners() == replayed.usage.owners()
    assert again.usage.bytes == state.usage.bytes == replayed.usage.bytes == sum(state.usage.owners().values())
    memory.broker.delete_topic(memory.broker.topic("t"))
    memory.broker.delete_topic(memory.broker.topic("ev"))
    for name in "ab":
        memory.broker.set_wire_state("flux", name, None)
        memory.broker.delete_positions(PositionKind.GROUP, "g")
    kinds = [kind for kind in Kind if replayed.usage.count(kind)]
    assert kinds == [Kind.TRANSACTIONAL_IDS, Kind.WRITERS]


def test_an_open_transaction_counts_its_staged_offsets() -> None:
    memory = MemoryBroker(SETTINGS)
    transactions = memory.broker.transactions
    transactions.begin(transactions.begin_epoch("x", by=HOSTILE, done=None), done=None)
    transaction = transactions.find("x")
    assert transaction is not None
    scope = Scope("t", "g", "m", 1)
    held = fill(
        memory, HOSTILE, lambda m, by, name: transactions.put_offsets(transaction, scope, {int(name[:5]): 1}, done=None)
    )
    assert held > 10
    assert memory.broker._state.usage.bytes <= SETTINGS.state_bytes_max // 2
    transactions.abort(transaction, done=None)
    assert memory.broker._state.usage.bytes < 1_000


def test_events_removed_by_retention_no_longer_count() -> None:
    memory = MemoryBroker(SETTINGS)
    append_event(memory, OTHER, "shared")
    held = fill(memory, HOSTILE, FILLS["events of one aggregate"])
    memory.run()
    memory.broker.topic("ev").partitions[0].log.trim(held)  # type: ignore[attr-defined]
    memory.advance(11)
    append_event(memory, HOSTILE, "shared")
    usage = memory.broker._state.usage
    assert (usage.count_of(Kind.EVENTS, OTHER.owner), usage.count_of(Kind.EVENTS, HOSTILE.owner)) == (0, 2)


def test_long_idle_ids_and_writers_are_evicted() -> None:
    seldom = replace(SETTINGS, expiry_interval_s=3600.0, retention_interval_s=3600.0)  # a month has fewer passes
    memory = MemoryBroker(seldom)
    days = 24 * 3600
    for what, after in (("transactional ids", 8 * days), ("writers", 31 * days)):
        fill(memory, HOSTILE, FILLS[what])
        memory.advance(after)
        FILLS[what](memory, HOSTILE, "one more")


@pytest.mark.parametrize("partitions", [1, 12])
def test_one_address_can_create_most_topics_but_not_all(partitions: int) -> None:
    memory = MemoryBroker(replace(SETTINGS, topics_max=40, partitions_max=200))
    made = fill(memory, HOSTILE, lambda m, by, name: m.broker.create_topic(TopicName("s", name), partitions, by=by))
    assert made == (36 if partitions == 1 else 15)
    topic = memory.broker.create_topic(TopicName("s", "others"), 1, by=OTHER)
    memory.broker.grow_topic(topic, 2)
    memory.run()
    memory.restart()
    state = memory.broker._state
    assert state.usage.count_of(Kind.TOPICS, HOSTILE.owner) == made
    with pytest.raises(Busy):
        memory.broker.ensure_topic("one-more", by=HOSTILE)
    memory.broker.delete_topic(memory.broker.topics()[0])
    memory.broker.shrink_topic(memory.broker.topic("s.others"), 1)
    memory.broker.ensure_topic("one-more", by=HOSTILE)
    again = State(memory.settings)
    again.restore(state.snapshot())
    for kind in (Kind.TOPICS, Kind.PARTITIONS):
        assert again.usage.count(kind) == state.usage.count(kind)


def test_protocol_options_of_topics_count_and_are_limited() -> None:
    memory = MemoryBroker(SETTINGS)
    topic = memory.broker.create_topic(TopicName("s", "t"), 1, by=HOSTILE)
    memory.broker.configure_topic(topic, TopicSettings(wire_options={"cursus": b"x" * 15_000}))
    other = memory.broker.create_topic(TopicName("s", "u"), 1, by=HOSTILE)
    with pytest.raises(Busy):
        memory.broker.configure_topic(other, TopicSettings(wire_options={"cursus": b"x" * 15_000}))
    with pytest.raises(Invalid):
        memory.broker.configure_topic(
            other, TopicSettings(wire_options={"cursus": b"x" * WIRE_OPTIONS_BYTES_MAX + b"x"})
        )


def test_usage_keeps_no_entry_for_an_owner_without_state() -> None:
    usage = Usage()
    usage.charge(Kind.GROUPS, 5, 2, 100)
    usage.charge(Kind.GROUPS, 5, -2, -100)
    assert usage.owners() == {}
    assert usage.count_of(Kind.GROUPS, 5) == usage.bytes_of(5) == usage.bytes == usage.count(Kind.GROUPS) == 0
    assert not usage._counts


def test_state_created_without_a_caller_counts_in_the_total_only() -> None:
    memory = MemoryBroker(SETTINGS)
    memory.broker.ensure_topic("t")
    assert fill(memory, NO_CALLER, FILLS["groups without members"]) == SETTINGS.groups_max


def test_an_owner_at_the_producer_limit_evicts_its_own_producers() -> None:
    memory = MemoryBroker(replace(SETTINGS, producers_max=20))
    partition = memory.broker.ensure_topic("t").partitions[0]

    def produce(by: Caller, name: bytes, base: int) -> None:
        memory.broker.produce(partition, batch_by(name, 1, base), by=by, level=Level.WRITTEN, done=None)

    produce(OTHER, b"other", 0)
    for number in range(100):
        produce(HOSTILE, b"%d" % number, 0)
    assert memory.broker.producer_last(partition, b"other") == (1, 0)
    assert memory.broker.producer_last(partition, b"89") is None
    assert memory.broker.producer_last(partition, b"90") == (1, 0)
    memory.broker.shrink_topic(memory.broker.topic("t"), 0)
    assert not memory.broker._state.producers._owned


def test_one_address_leaves_staging_capacity_for_others() -> None:
    memory = MemoryBroker(replace(SETTINGS, staged_bytes_max=100_000, stage_expiry_us=1_000_000))
    partition = memory.broker.ensure_topic("t").partitions[0]

    def stage(m: MemoryBroker, by: Caller, name: str) -> None:
        m.broker.stage(
            name[:16].encode().ljust(16), partition, batch_of(b"v" * 900), by=by, level=Level.WRITTEN, done=None
        )

    staged = fill(memory, HOSTILE, stage)
    assert 80 <= staged < 100
    stage(memory, OTHER, "other")
    memory.run()
    memory.broker.abandon([f"{0:05}{HOSTILE.owner % 1000}x"[:16].encode().ljust(16)], by=HOSTILE)
    stage(memory, HOSTILE, "one more")
    with pytest.raises(Busy):
        stage(memory, HOSTILE, "too much")
    memory.advance(2)
    stage(memory, HOSTILE, "the others have expired")
    assert len(memory.broker.staging._stagers._by_token) == 1
