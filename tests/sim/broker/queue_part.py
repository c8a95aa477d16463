"""Workers of share groups: they acquire, finish, retry and forget records, and come back over several connections.

* A record has one worker inside its lock, and is not delivered before it is due or after its time is over.
* Delivery counts are exact after every stop.
* A record ends because a worker ended it, or its time or its deliveries are over. A rejected record has one copy in the
  dead-letter topic, if its group has one.
* Records with one key have one worker at a time, in the order of their offsets.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import pytest

from polywire.broker import changes
from polywire.broker.broker import Broker
from polywire.broker.groups import delay_index, delivery_marks, share, share_delays
from polywire.broker.groups.share import FINISHED, Batch
from polywire.broker.groups.share_table import ShareTable, unflat
from polywire.broker.owners import ITSELF
from polywire.broker.settings import TopicSettings
from polywire.broker.state import State
from polywire.broker.topics import Partition, Topic
from polywire.delivery_times import DELIVER_AT, EXPIRES_AT
from polywire.errors import BrokerError, Conflict, ErrorCode, Missing
from polywire.records.columns import Header, Record
from polywire.records.rows import from_records, to_records
from polywire.share_settings import (
    AUTO_OFFSET_RESET,
    DEAD_LETTERS,
    DELIVERIES,
    LOCK_DURATION,
    NUMBERS,
    ORDER,
    UNFINISHED,
    Number,
)
from polywire.types import Buffer, Level, Outcome, TopicName
from tests.sim.broker.asking import Asking
from tests.sim.broker.history import Key
from tests.sim.broker.queue_model import LETTERS, NO_TIMES, Event, Kind, Seen, SeenKey, Times
from tests.sim.broker.record_part import RecordPart
from tests.sim.broker.taking import Taking
from tests.sim.chance import Chance
from tests.sim.log.model import Content, KeptPartition
from tests.sim.promises import require

ORDERED: Final = "ordered"
LOCK_S: Final = 1.0
DELIVERIES_MAX: Final = 3
UNFINISHED_MAX: Final = 5
_SETTINGS: Final = {
    AUTO_OFFSET_RESET: "earliest",
    LOCK_DURATION: str(int(LOCK_S * 1000)),
    DELIVERIES: str(DELIVERIES_MAX),
    UNFINISHED: str(UNFINISHED_MAX),
}
QUEUES: Final[Mapping[str, Mapping[str, str]]] = {
    "jobs": {**_SETTINGS, DEAD_LETTERS: LETTERS},
    ORDERED: {**_SETTINGS, ORDER: "key"},
}
"""The groups and their settings."""
WORKERS: Final = ("w0", "w1", "w2")
CONNECTIONS_MAX: Final = 5
REQUESTS_MAX: Final = 3  # of one connection
COMBINED: Final = 0.3  # share of requests for records that acknowledge others first
KEYS: Final = 3
DELAYS_S: Final = (-5.0, 0.05, 0.3, 0.3, 1.5, 5.0, 3600.0, 20 * 86_400.0)
TTLS_S: Final = (0.2, 1.0, 5.0, 3600.0)
RETRY_DELAYS_S: Final = (0.0, 0.0, 0.05, 0.7, 3.0, 8.0)
OUTCOMES: Final = (
    *(Outcome.ACCEPT,) * 6,
    *(Outcome.RELEASE,) * 4,
    Outcome.REJECT,
    Outcome.REJECT,
    Outcome.RENEW,
)
_ENDS: Final = (Outcome.ACCEPT, Outcome.GAP)


@dataclass(slots=True)
class Hold:
    """A record that a worker has acquired. is_received: whether the worker knows it, and may acknowledge it."""

    member: str
    deadline: float
    is_record: bool
    is_received: bool = False


@dataclass(eq=False, slots=True)
class Connection:
    """A connection of a worker, with its requests in progress."""

    group: str
    member: str
    requests: list[Taking] = field(default_factory=list)


@contextmanager
def small_queues(
    changed: Callable[[ShareTable, changes.Change], None], copied: Callable[[Partition, Buffer], None]
) -> Iterator[None]:
    """Make limits small, so that they are reached.

    changed: called after each change of a share group. copied: called with each copy of a rejected record.
    """
    apply, produce = State.apply_change, Broker.produce

    def noted(state: State, change: Any) -> None:
        apply(state, change)
        if isinstance(change, changes.SHARE_CHANGES):
            changed(state.shares, change)

    def produced(broker: Broker, partition: Partition, batch: Buffer, **named: Any) -> None:
        produce(broker, partition, batch, **named)
        if named.get("by") is ITSELF and partition.topic.name.full == LETTERS:
            copied(partition, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(State, "apply_change", noted)
        patch.setattr(Broker, "produce", produced)
        patch.setattr(share_delays, "DUE_MAX", 2)
        patch.setattr(share, "STORED_DELAY_S_MAX", 2.0)
        patch.setattr(delivery_marks, "MARKS_MAX", 3)
        patch.setattr(delay_index, "BACKLOG_MAX", 4)
        patch.setitem(NUMBERS, UNFINISHED, Number(2_000, 1, 10_000))
        yield


class QueuePart(RecordPart):
    """A base of ``Client``. Guards: ``held`` has the locks of this process."""

    def __init__(self, asking: Asking, chance: Chance) -> None:
        super().__init__(asking, chance)
        self.queues: Final = asking.model.queues
        self.connections: list[Connection] = []
        self._holds: Final[dict[SeenKey, dict[int, Hold]]] = {}
        self._rejected: Final[dict[SeenKey, set[int]]] = {}  # which are to be copied to the dead-letter topic
        self._waits: Final[dict[SeenKey, dict[int, float]]] = {}  # ends of retry delays that began in this process
        self._touched: Final[dict[SeenKey, dict[int, int]]] = {}  # moment of the last change of each record
        self._outcomes: Mapping[int, Outcome] = {}  # of the acknowledgement in progress
        self._gone: tuple[str, str] | None = None
        self._is_resetting = False
        self._copy: tuple[Partition, Record] | None = None
        self._latest_ms = 0

    # Time

    def note_time(self) -> None:
        """Note the system time, before and after it is set."""
        self._latest_ms = max(self._latest_ms, self._now_ms())
        self.queues.latest_ms = max(self.queues.latest_ms, self._latest_ms)

    def _now_ms(self) -> int:
        return self.broker.clock.now_us() // 1000

    # Changes of the stored state

    def share_changed(self, change: changes.Change) -> None:
        """Check a change, and note the state after it."""
        self.note_time()
        letter = None
        match change:
            case changes.ShareProgressed() | changes.ShareCursorMoved():
                letter = self._note_letter(change)
                ends = self._judge_progress(change, letter)
                self.asking.notice()
                moment, key = self.model.history.moment, (change.group, change.incarnation)
                offsets = [at for first, last, _ in unflat(change.runs) for at in range(first, last + 1)]
                if isinstance(change, changes.ShareProgressed):
                    offsets += change.due_ms
                self._touched.setdefault(key, {}).update(dict.fromkeys(offsets, moment))
                for kind, offset in ends:
                    self.queues.of(*key).add(Event(moment, kind, offset))
            case changes.ShareStored():
                self.asking.notice()
                self._queue_begun(change)
            case changes.ShareDeleted():
                self.asking.notice()
                for incarnation in change.incarnations:
                    self._forget_queue((change.group, incarnation))
            case changes.ShareGroupDeleted():
                self.asking.notice()
                for key in [key for key in self.queues.seen if key[0] == change.name]:
                    self._forget_queue(key)
            case _:
                self.asking.notice()

    def _queue_begun(self, change: changes.ShareStored) -> None:
        key = change.group, change.incarnation
        partition = self._living()[change.incarnation]
        is_first = change.start <= partition.log.first_offset
        require(is_first or self._is_resetting, "a group begins with the first record", begin=change.start)
        self._drop_seen(key)
        self.queues.of(*key).add(Event(self.model.history.moment, Kind.BEGIN, change.start))

    def _forget_queue(self, key: SeenKey) -> None:
        self._drop_seen(key)
        self.queues.of(*key).add(Event(self.model.history.moment, Kind.FORGET, 0))

    def _drop_seen(self, key: SeenKey) -> None:
        for known in (self._holds, self._rejected, self._waits, self._touched):
            known.pop(key, None)

    def _living(self) -> dict[int, Partition]:
        return {partition.incarnation: partition for topic in self.broker.topics() for partition in topic.partitions}

    def copied(self, partition: Partition, batch: Buffer) -> None:
        """Note a copy of a rejected record in the dead-letter topic. The change that ends the record must be next."""
        require(self._copy is None, "a copy and the end of its record are one change", copy=self._copy)
        [record] = to_records(batch)
        self._copy = partition, record

    def _note_letter(self, change: changes.ShareProgressed | changes.ShareCursorMoved) -> int | None:
        """Add the record to the dead-letter topic that was copied with this change; return its offset."""
        if self._copy is None:
            return None
        (partition, record), self._copy = self._copy, None
        origin = self._living()[change.incarnation]
        facts = {header.key.decode(): (header.value or b"").decode() for header in record.headers}
        found = int(facts["dead.offset"])
        counts = self.queues.of(change.group, change.incarnation).counts
        expected = {
            "dead.topic": origin.topic.name.full,
            "dead.partition": str(origin.number),
            "dead.group": change.group,
            "dead.deliveries": str(counts.get(found, 0)),
        }
        require(facts.items() >= expected.items(), "a copy names its record", copy=facts, expected=expected)
        content = self.model.partitions[change.incarnation].records[found]
        require(content == (record.key, record.value), "a copy is like its record", copy=facts)
        ended = [run[:2] for run in unflat(change.runs) if run.deliveries == FINISHED]
        require(ended == [(found, found)], "a copy and the end of its record are one change", copy=facts, ended=ended)
        self.model.partitions[partition.incarnation].records.append(content)
        return found

    def _judge_progress(
        self, change: changes.ShareProgressed | changes.ShareCursorMoved, letter: int | None
    ) -> list[tuple[Kind, int]]:
        """Check a change of some records; return those that ended."""
        partition = self._living()[change.incarnation]
        before = self.model.history.latest.get(("share", partition.topic.name.full, change.group, change.incarnation))
        end, unfinished, _, cursor = before if isinstance(before, tuple) else (0, (), (), (0, -1))
        known = {offset for offset, _ in unfinished}
        if isinstance(change, changes.ShareCursorMoved):
            limit = max(self._latest_ms, cursor[0])
            require(change.cursor[0] <= limit, "the cursor does not pass the clock", cursor=change.cursor, now=limit)
            cursor = change.cursor
        found: list[tuple[Kind, int]] = []
        for offset, count in ((at, run[2]) for run in unflat(change.runs) for at in range(run[0], run[1] + 1)):
            due_ms = self.queues.times_of(change.incarnation, offset).due_ms
            if count != FINISHED:
                is_due = (
                    offset in known
                    or partition.topic.settings.compaction
                    or (due_ms or 0) <= max(self._now_ms(), cursor[0])
                )
                require(is_due, "a record is not delivered before it is due", offset=offset, due=due_ms, cursor=cursor)
                continue
            is_new = offset >= end and isinstance(change, changes.ShareCursorMoved)
            if is_new and due_ms is not None and (due_ms, offset) > tuple(cursor[:2]):
                continue  # it waits until it is due
            kind = self._end_of(change.group, partition, offset, letter)
            if kind is not None:
                found.append((kind, offset))
        return found

    def _end_of(self, group: str, partition: Partition, offset: int, letter: int | None) -> Kind | None:
        """Return the event with which a record ends. Raises Violation if it must not end."""
        key = group, partition.incarnation
        seen = self.queues.of(*key)
        facts = {"group": group, "partition": partition.incarnation, "offset": offset}
        if offset == letter:
            require(offset not in seen.letters, "a record is copied once", **facts)
            require(self._may_be_rejected(key, offset), "only rejected records are copied", **facts)
            self._rejected.get(key, set()).discard(offset)
            return Kind.LETTER
        outcome, has_letters = self._outcomes.get(offset), DEAD_LETTERS in QUEUES[group]
        if outcome in _ENDS or (outcome is Outcome.REJECT and not has_letters):
            return Kind.END
        if offset < partition.log.first_offset or partition.topic.settings.compaction:
            return None
        require(not has_letters, "a rejected record is copied before it ends", **facts)
        require(
            self._may_be_rejected(key, offset), "a record ends for a reason", **facts, count=seen.counts.get(offset)
        )
        return None

    def _may_be_rejected(self, key: SeenKey, offset: int) -> bool:
        seen = self.queues.of(*key)
        if offset in self._rejected.get(key, ()) or self._outcomes.get(offset) is Outcome.REJECT:
            return True
        hold = self._holds.get(key, {}).get(offset)
        is_free = hold is None or not self._is_live(hold)
        is_free = is_free or offset in self._outcomes or (hold is not None and self._gone == (key[0], hold.member))
        is_over = self.queues.times_of(key[1], offset).is_over(self._latest_ms)
        return is_free and (is_over or seen.counts.get(offset, 0) >= DELIVERIES_MAX)

    def _is_live(self, hold: Hold) -> bool:
        return hold.deadline > self.broker.clock.monotonic()

    def _live(self, key: SeenKey) -> list[int]:
        """Return the locked records of a group in a partition."""
        partition = self._living().get(key[1])
        first = math.inf if partition is None else partition.log.first_offset
        return [at for at, hold in self._holds.get(key, {}).items() if at >= first and self._is_live(hold)]

    # Records with times

    def schedule(self) -> None:
        """Send records, some of which have a key, are due later, or are worthless after a time."""
        partition = self.partition()
        if partition is None:
            return
        contents: list[Content] = []
        records: list[Record] = []
        kept, times = self.model.partitions[partition.incarnation], dict[int, Times]()
        for value_of, _ in ((content[1], 0) for content in self.contents(partition.topic.settings.compaction)):
            keyed = partition.topic.settings.compaction or self.chance.happens(0.6)
            key = b"k%d" % self.chance.below(KEYS) if keyed else None
            due_ms, expires_ms = self._time(DELAYS_S, 0.4), self._time(TTLS_S, 0.2)
            named = ((DELIVER_AT, due_ms), (EXPIRES_AT, expires_ms))
            headers = tuple(Header(name.encode(), b"%d" % at) for name, at in named if at is not None)
            times[len(kept.records) + len(contents)] = Times(due_ms, expires_ms)
            records.append(Record(value_of, key, headers=headers))
            contents.append((key, value_of))
        first, level = len(kept.records), self.level()

        def applied(_: object) -> Mapping[Key, object]:
            self.queues.times.setdefault(partition.incarnation, {}).update(times)
            return self.append(partition, contents)

        self.ask(
            "schedule",
            f"p{partition.incarnation} {[(at, *times[at]) for at in times]}",
            lambda done: self.broker.produce(partition, from_records(records), level=level, done=done),
            level=level,
            applied=applied,
            completed=partial(self._check_offset, first),
        )

    def _time(self, seconds: tuple[float, ...], share: float) -> int | None:
        return self._now_ms() + int(1000 * self.chance.one_of(seconds)) if self.chance.happens(share) else None

    # Groups

    def open_letters(self) -> None:
        """Create the dead-letter topic, which may have been deleted."""
        if self.broker.find_topic(LETTERS) is not None:
            return
        level = self.level()

        def applied(topic: Topic) -> Mapping[Key, object]:
            made: dict[Key, object] = {("topic", LETTERS): (topic.id.hex(), 1)}
            for partition in topic.partitions:
                self.model.partitions[partition.incarnation] = KeptPartition(partition.incarnation, keyed=False)
                made["letters", LETTERS, partition.incarnation] = made["first", LETTERS, partition.incarnation] = 0
            return made

        verb = partial(self.broker.create_topic, TopicName.parse(LETTERS), 1, TopicSettings(), level=level)
        self.ask("create", LETTERS, lambda done: verb(done=done), level=level, applied=applied)

    def lose_letters(self) -> None:
        """Delete the dead-letter topic. Rejected records then wait for another one."""
        topic, level = self.broker.find_topic(LETTERS), self.level()
        if topic is None:
            return
        gone = {key: None for key in self.model.history.latest if len(key) > 1 and key[1] == LETTERS}
        verb = partial(self.broker.delete_topic, topic, level=level)
        self.ask("delete", LETTERS, lambda done: verb(done=done), level=level, applied=lambda _: gone)

    def configure_queue(self) -> None:
        """Let a group read a topic."""
        topic, group = self.topic(), self.chance.one_of(tuple(QUEUES))
        if topic is None or (DEAD_LETTERS in QUEUES[group] and self.broker.find_topic(LETTERS) is None):
            return
        verb = partial(self.broker.shares.configure, group, topic, QUEUES[group])
        self.ask("configure", f"{group}/{topic.name.full}", lambda done: verb(done=done), level=Level.WRITTEN)

    def _is_configured(self, group: str) -> bool:
        return bool(self.broker.shares.directory.stored_settings(group))

    def reset_queue(self) -> None:
        """Set a group to other offsets of a topic, or delete its progress there, or the group."""
        topic, group = self.topic(), self.chance.one_of(tuple(QUEUES))
        if topic is None or not self.broker.shares.directory.exists(group):
            return
        shares, kind = self.broker.shares, self.chance.below(4)
        if kind < 2:
            offsets = {at: self.chance.below(at.log.next_offset + 1) for at in topic.partitions}
            verb = partial(shares.alter_offsets, group, offsets)
        elif kind == 2:
            verb = partial(shares.delete_offsets, group, topic.partitions)
        else:
            for connection in self.connections:  # a request would create the group again, with other settings
                for request in connection.requests if connection.group == group else ():
                    request.cancel()
            verb = partial(shares.delete_topic, group, topic)
        self._is_resetting = True
        text = f"{group}/{topic.name.full} {('offsets', 'offsets', 'delete', 'group')[kind]}"
        found = self.asking.ask("reset queue", text, lambda done: verb(done=done), level=Level.WRITTEN)
        self._is_resetting = False
        keys = [key for key in self._holds if key[0] == group]
        if isinstance(found, BrokerError):
            is_used = any(self._holds[key] for key in keys) or any(
                one.requests for one in self.connections if one.group == group
            )
            in_use = isinstance(found, Conflict) and found.code is ErrorCode.GROUP_NOT_EMPTY and is_used
            require(in_use or self.asking.is_excused(found), "refused for no reason", error=str(found))
        else:
            live = [(key, at) for key in keys for at in self._live(key)]
            require(not live, "a group with workers is not reset", group=group, live=live)

    # Workers

    def connect(self) -> None:
        """Connect a worker, perhaps once more."""
        if len(self.connections) < CONNECTIONS_MAX:
            self._connect(self.chance.one_of(tuple(QUEUES)), self.chance.one_of(WORKERS))

    def _connect(self, group: str, member: str) -> Connection:
        self.asking.story.tell("connect", f"{group} {member}")
        self.broker.shares.member_connected(group, member)
        connection = Connection(group, member)
        self.connections.append(connection)
        return connection

    def disconnect(self) -> None:
        """Close a connection, perhaps an old one of a worker that has another one by now."""
        if self.connections:
            self._disconnect(self.connections.pop(self.chance.below(len(self.connections))))

    def _disconnect(self, connection: Connection) -> None:
        group, member = connection.group, connection.member
        is_last = not any((one.group, one.member) == (group, member) for one in self.connections)
        self.asking.notice()
        self.asking.story.tell("disconnect", f"{group} {member} last={is_last}")
        for request in connection.requests:
            request.cancel()
        self._gone = (group, member) if is_last else None
        self.broker.shares.member_disconnected(group, member)
        self._gone = None
        for key, holds in self._holds.items() if is_last else ():
            partition = self._living().get(key[1])
            own = [at for at, hold in holds.items() if hold.member == member] if key[0] == group else []
            counts = self.queues.of(*key).counts
            if own and partition is not None and all(counts.get(at, 0) < DELIVERIES_MAX for at in own):
                offsets = self.broker.shares.offsets(group, partition)
                is_free = offsets is None or member not in offsets.acquired
                require(is_free, "the records of a worker that is gone are released", member=member, offsets=own)
            for at in own:
                del holds[at]

    def vanish(self) -> None:
        """Let a worker forget all its records without closing its connection."""
        if not self.connections:
            return
        gone = self.chance.one_of(self.connections)
        self.asking.story.tell("vanish", f"{gone.group} {gone.member}")
        for key, holds in self._holds.items():
            for hold in holds.values() if key[0] == gone.group else ():
                if hold.member == gone.member:
                    hold.is_received = False

    def take(self) -> None:
        """Ask for records."""
        topic = self.topic()
        if topic is None:
            return
        if not self.connections:
            self.connect()
        connection = self.chance.one_of(self.connections)
        connection.requests = [request for request in connection.requests if request.is_open]
        if len(connection.requests) >= REQUESTS_MAX or not self._is_configured(connection.group):
            return
        records_max, wait_s = 1 + self.chance.below(4), self.chance.one_of((0.0, 0.0, 0.5, 5.0))
        turn = self.chance.below(len(topic.partitions))
        self._take(connection, topic, records_max, wait_s, turn)

    def _take(self, connection: Connection, topic: Topic, records_max: int, wait_s: float, turn: int) -> Taking:
        group, member = connection.group, connection.member
        self.asking.notice()
        text = f"{group}/{topic.name.full} {member} records={records_max} wait={wait_s}"
        self.asking.story.tell("take", text)
        request = Taking(self, topic, group=group, member=member, records_max=records_max, wait_s=wait_s)
        connection.requests.append(request)
        if self.asking.recovered is None and self.chance.happens(COMBINED):
            self.acknowledge(request)
        numbers = list(range(len(topic.partitions)))
        request.read(numbers[turn:] + numbers[:turn])
        return request

    def delivered(
        self,
        group: str,
        member: str,
        partition: Partition,
        counts: Mapping[int, int],
        records: Mapping[int, Record],
    ) -> int:
        """Check records that a worker has acquired. Return the moment from which they are delivered."""
        if self.asking.recovered is not None:
            return sys.maxsize
        self.note_time()
        key = group, partition.incarnation
        seen, kept = self.queues.of(*key), self.model.partitions[partition.incarnation]
        text = " ".join(f"{at}x{count}" for at, count in counts.items())
        self.asking.story.tell("acquired", f"{group} p{partition.incarnation} {member} {text}")
        deadline = self.broker.clock.monotonic() + LOCK_S
        holds, touched = self._holds.setdefault(key, {}), self._touched.get(key, {})
        for at, count in counts.items():
            record = records.get(at)
            is_kept = kept.keyed if record is None else kept.records[at] == (record.key, record.value)
            require(is_kept, "a record is what was appended", partition=partition.incarnation, offset=at)
            self._judge_delivery(key, seen, at, count, is_record=record is not None)
            if group == ORDERED and record is not None and record.key is not None:
                self._judge_order(key, seen, partition, at, record.key)
            seen.add(Event(touched[at], Kind.DELIVER, at))
            self._waits.get(key, {}).pop(at, None)
            holds[at] = Hold(member, deadline, record is not None)
        return max(touched[at] for at in counts)

    def _judge_delivery(self, key: SeenKey, seen: Seen, at: int, count: int, *, is_record: bool) -> None:
        facts = {"group": key[0], "partition": key[1], "offset": at, "count": count}
        now_ms, times = self._now_ms(), self.queues.times_of(key[1], at) if is_record else NO_TIMES
        require(seen.begin is not None and at >= seen.begin, "a group reads from its begin", **facts, begin=seen.begin)
        require(at not in seen.ended and at not in seen.letters, "a finished record is not delivered", **facts)
        require(at not in self._rejected.get(key, ()), "a rejected record is not delivered", **facts)
        hold = self._holds.get(key, {}).get(at)
        require(hold is None or not self._is_live(hold), "a record has one worker", **facts, hold=hold)
        known = seen.counts.get(at, 0)
        require(count == known + 1, "delivery counts are exact", **facts, known=known)
        require(count <= DELIVERIES_MAX, "a record is delivered as often as permitted", **facts)
        require(not times.is_over(now_ms), "a record is not delivered after its time", **facts, times=times, now=now_ms)
        over_at = self._waits.get(key, {}).get(at)
        if over_at is not None:
            is_over = over_at <= self.broker.clock.monotonic() + 1e-6
        else:
            is_over = seen.later.get(at, 0) <= self._latest_ms
        require(is_over, "a record is not retried before its delay is over", **facts, due=seen.later.get(at))

    def _judge_order(self, key: SeenKey, seen: Seen, partition: Partition, at: int, name: bytes) -> None:
        records, first = self.model.partitions[key[1]].records, max(seen.begin or 0, partition.log.first_offset)
        holds, facts = self._holds.get(key, {}), {"partition": key[1], "offset": at, "key": name}
        same = [other for other in range(first, len(records)) if records[other][0] == name and other != at]
        locked = [other for other in same if other in holds and holds[other].is_record and self._is_live(holds[other])]
        require(not locked, "records with one key have one worker", **facts, locked=locked)
        if partition.topic.settings.compaction:
            return
        ended = seen.ended | seen.letters
        for other in same:
            times = self.queues.times_of(key[1], other)
            is_over = times.is_over(self.queues.latest_ms) or seen.counts.get(other, 0) >= DELIVERIES_MAX
            is_first = other > at or other in ended or is_over or times.due_ms is not None
            require(is_first, "records with one key are delivered in order", **facts, earlier=other)

    def refused(self, error: BrokerError) -> None:
        """Check a partition that could not be read."""
        if self.asking.recovered is not None:
            return
        excused = self.asking.is_excused(error) or isinstance(error, Missing) or self.may_fail_reads
        require(excused, "refused for no reason", error=str(error))

    def received(self, request: Taking) -> None:
        """Note a response: the worker has its records, and their deliveries are stored."""
        for partition, offsets, moment in request.taken.values():
            if self.asking.recovered is not None:
                self.asking.judge_late(f"take {request.group} {request.member} {offsets}", moment)
                continue
            self.asking.acknowledge(moment, Level.WRITTEN)
            key = request.group, partition.incarnation
            self.asking.story.tell("received", f"{request.group} p{key[1]} {request.member} {offsets}")
            for at in offsets:
                hold = self._holds.get(key, {}).get(at)
                if hold is not None and hold.member == request.member:
                    hold.is_received = True

    def acknowledge(self, request: Taking | None = None) -> None:
        """Acknowledge some records of a worker, perhaps after their locks have expired, or those of another worker.

        request: the request for other records that does this first.
        """
        known = sorted(
            {
                (key, hold.member)
                for key, holds in self._holds.items()
                for hold in holds.values()
                if hold.is_received
                and key[1] in self._living()
                and (request is None or request.may_acknowledge(key, hold.member))
            }
        )
        if not known:
            return
        key, member = self.chance.one_of(known)
        held = self._holds[key]
        own = sorted(at for at, hold in held.items() if hold.member == member and hold.is_received)
        start = self.chance.below(len(own))
        chosen = own[start : start + 1 + self.chance.below(3)]
        outcomes = {at: self.chance.one_of(OUTCOMES) if held[at].is_record else Outcome.GAP for at in chosen}
        if request is None and self.chance.happens(0.05):
            member = self.chance.one_of(WORKERS)
        self._acknowledge(key, member, outcomes, self.chance.one_of(RETRY_DELAYS_S), request)

    def _acknowledge(
        self,
        key: SeenKey,
        member: str,
        outcomes: Mapping[int, Outcome],
        delay_s: float,
        request: Taking | None = None,
    ) -> None:
        partition, held = self._living()[key[1]], self._holds.get(key, {})
        verb = partial(
            self.broker.shares.acknowledge,
            key[0],
            partition,
            member,
            [Batch(at, at, (int(outcome),), delay_s) for at, outcome in outcomes.items()],
        )
        counts, rejected = self.queues.of(*key).counts, [at for at in outcomes if outcomes[at] is Outcome.REJECT]
        exhausted = [at for at in outcomes if outcomes[at] is Outcome.RELEASE and counts.get(at, 0) >= DELIVERIES_MAX]
        was_live = all(at in held and held[at].member == member and self._is_live(held[at]) for at in outcomes)

        def completed(_: int) -> None:
            for at in [*rejected, *exhausted]:
                self.asking.acknowledge(self.queues.of(*key).ended_at(at), Level.WRITTEN)

        self._outcomes = outcomes
        found = self.asking.ask(
            "acknowledge",
            f"{key[0]} p{key[1]} {member} {[(at, outcome.name) for at, outcome in outcomes.items()]} delay={delay_s}",
            lambda done: verb(done=done) if request is None else request.acknowledge(verb, done),
            level=Level.WRITTEN,
            completed=completed,
        )
        self._outcomes = {}
        if isinstance(found, BrokerError):
            was_live = was_live and min(outcomes) >= partition.log.first_offset
            expired = found.code is ErrorCode.RECORD_NOT_ACQUIRED and not was_live
            require(expired or self.asking.is_excused(found), "a lock is valid until its end", error=str(found))
            return
        others = [at for at in outcomes if at not in held or held[at].member != member]
        require(not others, "only the worker of a record acknowledges it", member=member, offsets=others)
        self._apply(key, outcomes, delay_s, exhausted)

    def _apply(self, key: SeenKey, outcomes: Mapping[int, Outcome], delay_s: float, exhausted: list[int]) -> None:
        """Note the effect of an acknowledgement."""
        held, now, seen = self._holds[key], self.broker.clock.monotonic(), self.queues.of(*key)
        for at, outcome in outcomes.items():
            if outcome is Outcome.RENEW:
                held[at].deadline = now + LOCK_S
                continue
            del held[at]
            is_rejected = outcome is Outcome.REJECT or at in exhausted
            if is_rejected and DEAD_LETTERS in QUEUES[key[0]]:
                self._rejected.setdefault(key, set()).add(at)
            elif outcome is Outcome.RELEASE and not is_rejected and delay_s > 0:
                self._waits.setdefault(key, {})[at] = now + delay_s
                due_ms = self._now_ms() + int(delay_s * 1000) - 1
                seen.add(Event(self._touched[key][at], Kind.LATER, at, due_ms))
