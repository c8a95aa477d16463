"""Expiry of unused groups, offsets, writers and transactions, independent of the wall clock."""

from __future__ import annotations

import pytest

from polywire.broker import changes
from polywire.broker.owners import NO_CALLER
from polywire.broker.quotas import Kind
from polywire.broker.settings import BrokerSettings, TopicSettings
from polywire.broker.state import State
from polywire.errors import BrokerError, Busy, ErrorCode, Missing, NotOwner, Unavailable
from polywire.testing.loop import SimulatedClock
from polywire.testing.memory_broker import MemoryBroker
from polywire.types import Assignor, Level, PositionKind, TopicName
from tests.unit.broker.answers import batch_of

HOUR = 3600.0
DAY = 24 * HOUR
OFTEN = BrokerSettings(expiry_interval_s=600.0, retention_interval_s=600.0)


@pytest.fixture
def idle() -> MemoryBroker:
    memory = MemoryBroker(OFTEN)
    memory.broker.ensure_topic("t")
    return memory


def join(memory: MemoryBroker, group: str = "g", *, connected: bool = False) -> None:
    memory.broker.groups.join(group, "t", "m", wire="flux", named_alone=True, connected=connected)


def groups(memory: MemoryBroker) -> list[str]:
    return [view.name for view in memory.broker.groups.views()]


def commit(memory: MemoryBroker, name: str = "g", kind: PositionKind = PositionKind.GROUP) -> None:
    memory.broker.commit_position("t", 0, kind, name, 5)


def position(memory: MemoryBroker, name: str = "g", kind: PositionKind = PositionKind.GROUP) -> int | None:
    held = memory.broker._state.positions.committed(memory.broker.topic("t").id, kind, name).get(0)
    return None if held is None else held.offset


def test_groups_without_members_and_positions_end_after_an_hour(idle: MemoryBroker) -> None:
    join(idle, "left")
    idle.broker.groups.leave("left", "t", "m", None, wire="flux")
    join(idle, "dead")
    join(idle, "living", connected=True)
    idle.broker.groups.create("made", "t")
    idle.advance(0.5 * HOUR)
    assert groups(idle) == ["dead", "left", "living", "made"]
    idle.advance(1.5 * HOUR)
    assert groups(idle) == ["dead", "living", "made"]  # the expired member has not been removed before
    idle.advance(2 * HOUR)
    assert groups(idle) == ["living", "made"]
    assert idle.broker.groups.topic_of("flux", "left") is None
    idle.advance(30 * DAY)
    idle.restart()
    assert groups(idle) == ["living", "made"]


def test_positions_end_after_seven_days_without_use(idle: MemoryBroker) -> None:
    for name in ("idle", "commits", "asks"):
        commit(idle, name, PositionKind.CONSUMER)
    for name in ("alone", "g", "members"):
        commit(idle, name)
    join(idle, "g")
    join(idle, "members", connected=True)
    for _ in range(14):
        idle.advance(0.5 * DAY)
        commit(idle, "commits", PositionKind.CONSUMER)
        assert idle.broker.position("t", 0, PositionKind.CONSUMER, "asks") == 5
    assert position(idle, "idle", PositionKind.CONSUMER) == 5
    idle.advance(0.5 * DAY)
    left = {name: position(idle, name, PositionKind.CONSUMER) for name in ("idle", "commits", "asks")}
    assert left == {"idle": None, "commits": 5, "asks": 5}
    assert {name: position(idle, name) for name in ("alone", "g", "members")} == {
        "alone": None,
        "g": None,
        "members": 5,
    }
    assert groups(idle) == ["members"]
    idle.run()
    idle.restart()
    assert position(idle, "idle", PositionKind.CONSUMER) is None
    idle.advance(0.5 * HOUR)
    assert position(idle, "asks", PositionKind.CONSUMER) == 5


def test_setting_the_wall_clock_expires_nothing(idle: MemoryBroker) -> None:
    commit(idle)
    join(idle)
    idle.broker.transactions.begin_epoch("x", done=None)
    clock = idle.clock
    assert isinstance(clock, SimulatedClock)
    clock.step(31 * DAY)
    idle.advance(HOUR / 2)
    assert groups(idle) == ["g"]
    idle.run()
    idle.restart()
    idle.advance(2 * HOUR)
    assert position(idle) == 5
    assert idle.broker.transactions.find("x") is not None
    assert idle.broker.transactions.begin_epoch("x", done=None).epoch == 1


def test_offsets_stored_without_a_time_expire_counting_from_the_start() -> None:
    memory = MemoryBroker(OFTEN)
    topic = memory.broker.ensure_topic("t")
    old = changes.PositionStored(topic.id, "", 0, PositionKind.CONSUMER, "old", 5)
    group = changes.GroupStored("t", "old", 3, Assignor.RANGE, 3, ())
    memory.broker.change_all([old, group], level=memory.settings.durability, done=None)
    memory.run()
    memory.restart()
    memory.advance(6.9 * DAY)
    assert position(memory, "old", PositionKind.CONSUMER) == 5
    memory.advance(0.5 * DAY)
    assert position(memory, "old", PositionKind.CONSUMER) is None
    assert groups(memory) == ["old"]


def test_bare_names_without_a_group_end(idle: MemoryBroker) -> None:
    idle.broker.groups.bind("cursus", "g", "t")
    idle.advance(6 * DAY)
    assert idle.broker.groups.topic_of("cursus", "g") == "t"
    idle.advance(2 * DAY)
    assert idle.broker.groups.topic_of("cursus", "g") is None
    assert idle.broker._state.usage.count(Kind.BINDINGS) == 0


def test_a_pass_is_bounded_and_the_next_one_resumes_there() -> None:
    memory = MemoryBroker(BrokerSettings(expiry_interval_s=600.0, expiry_count_max=10))
    memory.broker.ensure_topic("t")
    for number in range(25):
        join(memory, f"g{number:02}")
        memory.broker.groups.leave(f"g{number:02}", "t", "m", None, wire="flux")
    memory.advance(HOUR + 601)
    assert len(groups(memory)) >= 15
    memory.advance(HOUR)
    assert groups(memory) == []


def test_a_full_disk_delays_expiry(idle: MemoryBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    join(idle)
    idle.broker.groups.leave("g", "t", "m", None, wire="flux")
    with monkeypatch.context() as full:

        def refuse(*_: object, **__: object) -> None:
            raise Busy(ErrorCode.DISK_FULL, "no space left")

        full.setattr(type(idle.log), "change", refuse)
        idle.advance(5 * HOUR)
        assert groups(idle) == ["g"]
    idle.advance(HOUR)
    assert groups(idle) == []


def test_deleted_state_stays_deleted_and_frees_its_memory(idle: MemoryBroker) -> None:
    transactions = idle.broker.transactions
    transactions.begin(transactions.begin_epoch("x", done=None), done=None)
    idle.broker.publish("w", 7, [], done=None)
    join(idle)
    commit(idle)
    commit(idle, "alone")
    idle.run()
    transactions.delete("x")
    idle.broker.staging.delete_writer("w", by=NO_CALLER, done=None)
    idle.broker.groups.delete("g", "t")
    idle.broker.groups.delete("alone", "t")
    idle.run()
    for again in (False, True):
        state = idle.broker._state
        counts = {kind for kind in Kind if state.usage.count(kind)}
        assert counts == {Kind.TOPICS, Kind.PARTITIONS}, again
        assert state.usage.owners() == {}
        with pytest.raises(Missing):
            idle.broker.transactions.delete("x")
        with pytest.raises(Missing):
            idle.broker.staging.delete_writer("w", by=NO_CALLER, done=None)
        with pytest.raises(Missing):
            idle.broker.groups.delete("g", "t")
        idle.restart()
    restored = State(idle.settings)
    restored.restore(idle.broker._state.snapshot())
    assert restored.usage.bytes == 0


def test_expiry_stops_once_storage_has_failed(idle: MemoryBroker) -> None:
    idle.broker.configure_topic(idle.broker.topic("t"), TopicSettings(retention_bytes=1))
    for _ in range(2):
        idle.broker.produce(idle.broker.topic("t").partitions[0], batch_of(b"v"), level=Level.WRITTEN, done=None)
        idle.broker.commit()
    join(idle)
    idle.broker.groups.leave("g", "t", "m", None, wire="flux")
    idle.run()
    idle.log.fail()
    idle.advance(2 * HOUR)  # a timer that raises would end the test
    assert groups(idle) == ["g"]


@pytest.mark.parametrize(
    "error",
    [NotOwner(ErrorCode.NOT_OWNER, "deposed"), Unavailable(ErrorCode.STORAGE_FAILED, "storage failed")],
    ids=["deposed", "failed"],
)
def test_a_broker_whose_log_accepts_no_writes_expires_nothing(error: BrokerError) -> None:
    memory = MemoryBroker(OFTEN)
    topic = memory.broker.create_topic(TopicName.parse("t"), 1, TopicSettings(retention_bytes=1))
    memory.broker.produce(topic.partitions[0], batch_of(b"old"), level=Level.SYNCED, done=None)
    memory.broker.produce(topic.partitions[0], batch_of(b"new"), level=Level.SYNCED, done=None)
    memory.broker.groups.join("g", "t", "m", wire="flux", named_alone=True)
    memory.run()
    memory.log.take_snapshot()
    memory.log.fail(error)
    memory.advance(30 * DAY)  # an error would end the loop
    assert (groups(memory), topic.partitions[0].log.first_offset) == (["g"], 0)
