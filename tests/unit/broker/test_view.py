"""A snapshot encoded in slices shows the state as of its start, whatever changes are applied meanwhile."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import count

import msgspec
import pytest

from polywire.broker import changes, view
from polywire.broker.producers import batch_with_offset
from polywire.broker.settings import BrokerSettings, TopicSettings
from polywire.broker.state import State
from polywire.types import Assignor, PositionKind

TOPICS = 12
STEPS = 400
NOW_US = 1_000_000
SETTINGS = BrokerSettings(producers_max=40, owner_share=1.0)


class Changing:
    """A state and random changes of every kind that fit it, over a few names, so that they interact."""

    def __init__(self, seed: int) -> None:
        self.state = State(SETTINGS)
        self.chance = random.Random(seed)
        self.ids = count()
        self.offsets = count()
        self.versions: dict[tuple[int, bytes], int] = {}
        self.kinds: list[Callable[[], changes.Change | None]] = [
            self.create,
            self.delete,
            self.add,
            self.remove,
            self.configure,
            self.position,
            self.forget_positions,
            self.group,
            self.change_group,
            self.end_group,
            self.bind,
            self.unbind,
            self.publish,
            self.forget_writer,
            self.wire_state,
            self.event,
            self.save,
            self.transaction,
            self.stage,
            self.move,
            self.commit,
            self.forget_transactional_id,
            self.batch,
            self.expire,
        ]

    def step(self) -> None:
        """Apply one change, if it fits."""
        change = self.chance.choice(self.kinds)()
        if change is not None:
            self.state.apply_change(change)

    def topic(self) -> changes.TopicCreated | None:
        found = self.state.catalog.topics(internal=True)
        if not found:
            return None
        topic = self.chance.choice(found)
        incarnations = [partition.incarnation for partition in topic.partitions]
        first = incarnations[0] if incarnations else 0
        return changes.TopicCreated(topic.id, "", topic.name.full, 0, first, len(incarnations), topic.settings)

    def number(self, most: int) -> int:
        return self.chance.randrange(most)

    def create(self) -> changes.Change | None:
        name = f"t{self.number(TOPICS)}"
        if self.state.catalog.find(name) is not None:
            return None
        first = self.state.catalog.next_incarnation
        return changes.TopicCreated(
            b"%016d" % next(self.ids), "default", name, 5, first, self.number(4), TopicSettings(), self.number(3)
        )

    def delete(self) -> changes.Change | None:
        topic = self.topic() if self.chance.random() < 0.3 else None
        return topic and changes.TopicDeleted(topic.id)

    def add(self) -> changes.Change | None:
        topic = self.topic()
        return topic and changes.PartitionsAdded(topic.id, self.state.catalog.next_incarnation, 2)

    def remove(self) -> changes.Change | None:
        topic = self.topic()
        return topic and changes.PartitionsRemoved(topic.id, topic.partition_count // 2)

    def configure(self) -> changes.Change | None:
        topic = self.topic()
        return topic and changes.TopicConfigured(topic.id, TopicSettings(retention_bytes=self.number(1000) + 1))

    def stored(self, names: str = "abc") -> changes.PositionStored:
        topic = self.topic() if self.chance.random() < 0.8 else None
        place = (topic.id, "") if topic is not None else (b"", f"t{self.number(TOPICS)}")
        if topic is None and self.state.catalog.find(place[1]) is not None:
            found = self.state.catalog.find(place[1])
            assert found is not None
            place = (found.id, "")
        name = self.chance.choice(names)
        kind = self.chance.choice(list(PositionKind))
        return changes.PositionStored(*place, self.number(3), kind, name, self.number(99), -1, self.number(3), NOW_US)

    def position(self) -> changes.Change | None:
        return self.stored()

    def forget_positions(self) -> changes.Change | None:
        was = self.stored()
        everywhere = self.chance.random() < 0.2
        place = (b"", "") if everywhere else (was.id, was.full_name)
        return changes.PositionsDeleted(was.kind, was.name, *place, None if everywhere else was.partition)

    def group(self) -> changes.Change | None:
        members = tuple(changes.MemberStored(f"m{n}", "flux") for n in range(self.number(4)))
        name = (f"t{self.number(TOPICS)}", f"g{self.number(3)}")
        return changes.GroupStored(*name, self.number(9), Assignor.RANGE, 3, members)

    def change_group(self) -> changes.Change | None:
        if not self.state.groups:
            return None
        group = self.chance.choice(list(self.state.groups.values()))
        gone = tuple(member.id for member in group.members[:1])
        joined = (changes.MemberStored(f"n{next(self.ids)}", "iggy"),)
        return changes.GroupChanged(group.topic, group.name, 10, group.assignor, 3, gone, joined, group.owner)

    def end_group(self) -> changes.Change | None:
        return changes.GroupDeleted(f"t{self.number(TOPICS)}", f"g{self.number(3)}")

    def bind(self) -> changes.Change | None:
        return changes.GroupBound("flux", f"g{self.number(3)}", f"t{self.number(TOPICS)}", self.number(3), 7)

    def unbind(self) -> changes.Change | None:
        return changes.GroupUnbound("flux", f"g{self.number(3)}")

    def publish(self) -> changes.Change | None:
        return changes.Published(f"w{self.number(5)}", self.number(99), NOW_US, (self.stored(),))

    def forget_writer(self) -> changes.Change | None:
        return changes.WriterDeleted(f"w{self.number(5)}")

    def wire_state(self) -> changes.Change | None:
        value = None if self.chance.random() < 0.3 else b"v" * self.number(3000)
        return changes.WireStateSet("cursus", f"k{self.number(5)}", value, self.number(3))

    def incarnation(self) -> int | None:
        topic = self.topic()
        return topic.first_incarnation or None if topic is not None else None

    def event(self) -> changes.Change | None:
        incarnation, key = self.incarnation(), b"k%d" % self.number(3)
        if incarnation is None:
            return None
        version = self.versions[incarnation, key] = self.versions.get((incarnation, key), 0) + 1
        return changes.EventAppended(incarnation, key, version, next(self.offsets))

    def save(self) -> changes.Change | None:
        incarnation = self.incarnation()
        return incarnation and changes.SnapshotSaved(incarnation, b"k%d" % self.number(3), 1, b"s" * self.number(99))  # type: ignore[return-value]

    def transaction(self) -> changes.Change | None:
        state = self.chance.choice(list(changes.TransactionState))
        return changes.TransactionalIdStored(f"x{self.number(3)}", self.number(9), state, b"t" * 16, NOW_US)

    def known(self) -> str | None:
        found = [known.id for known in self.state.transactions]
        return self.chance.choice(found) if found else None

    def stage(self) -> changes.Change | None:
        known = self.known()
        return known and changes.TransactionStaged(known, self.number(5), self.number(9), self.number(9), NOW_US)  # type: ignore[return-value]

    def move(self) -> changes.Change | None:
        known = self.known()
        offsets = {self.number(5): self.number(99)}
        return known and changes.TransactionOffsets(known, "t1", "g1", "m", 1, offsets)  # type: ignore[return-value]

    def commit(self) -> changes.Change | None:
        known = self.known()
        return known and changes.TransactionCommitted(known, NOW_US, (self.stored(),))  # type: ignore[return-value]

    def forget_transactional_id(self) -> changes.Change | None:
        return changes.TransactionalIdDeleted(f"x{self.number(3)}")

    def batch(self) -> None:
        """Append a producer's batch, which has no change record."""
        self.state.producers.remember(
            self.number(9) + 1,
            b"p%d" % self.number(9),
            epoch=self.number(2),
            batch=batch_with_offset(self.number(9), 20, next(self.offsets)),
            now_us=NOW_US,
            owner=self.number(3),
        )

    def expire(self) -> None:
        """Expire events by retention, which has no change record."""
        first = next(self.offsets) // 2
        self.state.aggregates.forget(lambda _: first)


@pytest.mark.parametrize("seed", range(20))
def test_a_view_does_not_change(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(view, "SLICE_WEIGHT", 3)
    changing = Changing(seed)
    for _ in range(STEPS):
        changing.step()
    begun: list[tuple[bytes, list[bytes]]] = []
    for _ in range(2):  # start the second while the first is being encoded
        expected = changing.state.snapshot()
        encoding = changing.state.encoding()
        assert not encoding.pieces
        rest = encoding.encode_rest()
        begun.append((expected, encoding.pieces))
        for count_, _ in enumerate(rest):
            for _ in range(changing.number(6)):
                changing.step()
            if count_ == 9 and len(begun) == 1:
                break
        if len(begun) == 1:
            first_rest = rest
    for _ in first_rest:
        changing.step()
    assert changing.state.snapshot() != begun[0][0]
    assert [b"".join(pieces) for _, pieces in begun] == [expected for expected, _ in begun]
    again = State(SETTINGS)
    again.restore(begun[1][0])
    assert again.snapshot() == begun[1][0]


def test_no_piece_holds_more_than_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "SLICE_WEIGHT", 10)
    state = State(SETTINGS)
    for number in range(100):
        state.apply_change(changes.PositionStored(b"", "t", number, PositionKind.CONSUMER, f"c{number}", 5))
    encoding = state.encoding()
    for _ in encoding.encode_rest():
        """Others have the loop."""
    assert len(encoding.pieces) > 100 / 10
    most = len(msgspec.msgpack.encode([changes.PositionStored(b"", "t", 99, PositionKind.CONSUMER, "c99", 5)] * 10))
    assert max(map(len, encoding.pieces)) <= most


@pytest.mark.parametrize("count_", [0, 1, 15, 16, 65_535, 65_536])
def test_arrays_start_as_those_of_any_encoder(count_: int) -> None:
    assert b"".join(view.one_by_one([7] * count_)) == msgspec.msgpack.encode([7] * count_)


def test_encoded_views_cost_nothing() -> None:
    changing = Changing(1)
    for _ in range(STEPS):
        changing.step()
    for _ in changing.state.encoding().encode_rest():
        changing.step()
    state = changing.state
    tables = (state.catalog, state.positions, state.producers, state.aggregates, state.transactions)
    assert not any(table._views._kept for table in tables)
