"""Committed offsets of groups, and of consumers outside groups, in one table for all protocols (concepts:
groups#positions).

* An offset belongs to one incarnation of a topic and is deleted with it.
* An offset committed before its topic exists is stored under the topic's name until the topic is created.
* Any offset can be stored, even a negative one or one past the end of the partition.
* If the log hides records until they are durable, clients do not see an offset before it is durable either. Otherwise a
  failover could take back an offset that a client has seen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Final, NamedTuple

from polywire.broker.changes import PositionsDeleted, PositionsStored, PositionStored, TopicKey, split_key
from polywire.broker.quotas import POSITION_BYTES, READER_BYTES, Kind, Usage
from polywire.broker.view import Views, encoded
from polywire.errors import BrokerError
from polywire.log.base import Completion
from polywire.types import PositionKind

NO_EPOCH: Final = -1


class Position(NamedTuple):
    """A committed offset: the next offset to read.

    Attributes:
        generation: generation of the group that committed it, -1 if none.
        epoch: leader epoch of the last record read, -1 if unknown.
        metadata: text that the client stored with the offset.
    """

    offset: int
    generation: int
    epoch: int = NO_EPOCH
    metadata: str = ""


Reader = tuple[PositionKind, str]


class Held:
    """The committed offsets of one consumer or group in a topic, by partition.

    Attributes:
        metadata_bytes: total size of the metadata.
        at_us: time of the last commit, in microseconds that count only while the broker runs. 0 if unknown.
        asked_at_us: time of the last read since the start.
    """

    __slots__ = ("asked_at_us", "at_us", "metadata_bytes", "name_bytes", "owner", "partitions")

    def __init__(self, name: str, owner: int) -> None:
        self.partitions: dict[int, Position] = {}
        self.name_bytes = len(name)
        self.metadata_bytes = 0
        self.owner = owner
        self.at_us = 0
        self.asked_at_us = 0

    @property
    def used_at_us(self) -> int:
        return max(self.at_us, self.asked_at_us)


class Positions:
    """All committed offsets by topic, consumer or group, and partition.

    The key of a topic is its id, or its name until it exists.

    Attributes:
        count: number of offsets in the table.
    """

    __slots__ = ("_by_topic", "_earlier", "_readers", "_usage", "_views", "_when_durable", "count")

    def __init__(self, usage: Usage) -> None:
        self._by_topic: dict[TopicKey, dict[Reader, Held]] = {}
        self._usage = usage
        self._readers: Final = Views(self._readers_of)
        self._views: Final = Views(self._stored)
        self._earlier: Final[dict[tuple[TopicKey, Reader], dict[int, deque[Position | None]]]] = {}
        """The offset before each change that is not durable yet, by partition. The first is the durable one."""
        self._when_durable: Callable[[Completion[int]], None] | None = None
        self.count = 0

    def show_durable_only(self, when_durable: Callable[[Completion[int]], None]) -> None:
        """From now on, ``committed`` omits changes that are not durable yet.

        ``when_durable`` calls a callback once all changes so far are durable, in the order of the calls.
        """
        self._when_durable = when_durable

    def committed(
        self, topic: TopicKey, kind: PositionKind, name: str, *, latest: bool = False
    ) -> Mapping[int, Position]:
        """Return the committed offsets of a consumer or group in a topic, by partition number.

        Args:
            latest: whether to include changes that are not durable yet, which clients must not see.
        """
        held = self.held(topic, kind, name)
        kept = {} if held is None else held.partitions
        earlier = None if latest else self._earlier.get((topic, (kind, name)))
        if earlier is None:
            return kept
        durable = {number: before[0] for number, before in earlier.items()}
        return {number: position for number, position in {**kept, **durable}.items() if position is not None}

    def _keep_earlier(self, topic: TopicKey, reader: Reader, held: Held, numbers: Collection[int]) -> None:
        """Before a change of these partitions' offsets, keep the present ones until the change is durable."""
        if self._when_durable is None or not numbers:
            return
        earlier = self._earlier.setdefault((topic, reader), {})
        for number in numbers:
            earlier.setdefault(number, deque()).append(held.partitions.get(number))
        self._when_durable(partial(self._became_durable, (topic, reader), tuple(numbers)))

    def _became_durable(self, key: tuple[TopicKey, Reader], numbers: Sequence[int], result: int | BrokerError) -> None:
        if isinstance(result, BrokerError):  # the log has failed, so this never becomes durable
            return
        earlier = self._earlier[key]
        for number in numbers:
            earlier[number].popleft()
            if not earlier[number]:
                del earlier[number]
        if not earlier:
            del self._earlier[key]

    def held(self, topic: TopicKey, kind: PositionKind, name: str) -> Held | None:
        return self._by_topic.get(topic, {}).get((kind, name))

    @property
    def latest_us(self) -> int:
        """Time of the latest commit, 0 if there was none."""
        return max((held.at_us for owners in self._by_topic.values() for held in owners.values()), default=0)

    def begin(self, now_us: int) -> None:
        """End the recovery. For expiry, offsets whose time is unknown count as committed now."""
        for owners in self._by_topic.values():
            for held in owners.values():
                held.at_us = held.at_us or now_us

    def readers(self) -> list[tuple[TopicKey, Reader]]:
        """Return all consumers and groups with offsets, by topic."""
        return [(topic, reader) for topic, owners in self._by_topic.items() for reader in owners]

    def offsets(
        self,
        topic: TopicKey,
        kind: PositionKind,
        name: str,
        among: Collection[int] | None = None,
        *,
        latest: bool = False,
    ) -> dict[int, int]:
        """Return the committed offsets of a consumer or group in a topic, by partition number.

        Args:
            among: if given, only the offsets of these partitions.
            latest: as for ``committed``.
        """
        kept = self.committed(topic, kind, name, latest=latest)
        return {number: kept[number].offset for number in (kept if among is None else among) if number in kept}

    def of(self, kind: PositionKind, name: str) -> Iterator[tuple[TopicKey, int, Position]]:
        """Yield (topic, partition number, offset) for all committed offsets of one consumer or group."""
        for topic, owners in self._by_topic.items():
            held = owners.get((kind, name))
            for partition, position in held.partitions.items() if held is not None else ():
                yield topic, partition, position

    def owners(self, kind: PositionKind) -> Iterator[tuple[TopicKey, str, dict[int, Position]]]:
        """Yield (topic, name, offsets by partition number) for all consumers or all groups with committed offsets."""
        # iterate over copies, because the table may change while a caller pauses
        for topic, owners in list(self._by_topic.items()):
            for (owner_kind, name), held in list(owners.items()):
                if owner_kind is kind:
                    yield topic, name, held.partitions

    def store(self, change: PositionStored | PositionsStored) -> None:
        if isinstance(change, PositionsStored):
            offsets, notes = change.offsets, change.notes
        else:
            offsets = {change.partition: change.offset}
            noted = change.epoch != NO_EPOCH or change.metadata
            notes = {change.partition: (change.epoch, change.metadata)} if noted else {}
        if not offsets:
            return
        held, generation = self._hold(change), change.generation
        self._keep_earlier(change.topic, (change.kind, change.name), held, offsets)
        had, freed = len(held.partitions), self._metadata_bytes(held, offsets) if held.metadata_bytes else 0
        made = {number: Position(offset, generation) for number, offset in offsets.items()}
        made.update({number: Position(offsets[number], generation, *note) for number, note in notes.items()})
        held.partitions.update(made)
        self._charge_positions(held, len(held.partitions) - had, self._metadata_bytes(held, notes) - freed)

    def _metadata_bytes(self, held: Held, numbers: Collection[int]) -> int:
        kept = held.partitions
        return sum([len(kept[number].metadata) for number in numbers if number in kept])

    def _hold(self, change: PositionStored | PositionsStored) -> Held:
        self._views.changing((change.topic, (change.kind, change.name)))
        owners = self._by_topic.setdefault(change.topic, {})
        held = owners.get((change.kind, change.name))
        if held is None:
            held = owners[change.kind, change.name] = Held(change.name, change.owner)
            self._charge(held, 1)
        if held.owner != change.owner:
            self._charge(held, -1)
            held.owner = change.owner
            self._charge(held, 1)
        held.at_us = max(held.at_us, change.at_us)
        return held

    def _charge(self, held: Held, sign: int) -> None:
        """Add these offsets to their owner's quota, or subtract them if ``sign`` is -1."""
        self._usage.charge(Kind.READERS, held.owner, sign, sign * (READER_BYTES + held.name_bytes))
        size = len(held.partitions) * POSITION_BYTES + held.metadata_bytes
        self.count += sign * len(held.partitions)
        self._usage.charge(Kind.POSITIONS, held.owner, sign * len(held.partitions), sign * size)

    def _charge_positions(self, held: Held, count: int, metadata_bytes: int) -> None:
        self.count += count
        held.metadata_bytes += metadata_bytes
        self._usage.charge(Kind.POSITIONS, held.owner, count, count * POSITION_BYTES + metadata_bytes)

    def bind(self, full_name: str, topic_id: bytes) -> None:
        """Move the offsets that were committed under a topic's name to its id, because the topic was created."""
        self._changing(full_name)
        waiting = self._by_topic.pop(full_name, None)
        if waiting is not None:
            self._by_topic[topic_id] = waiting

    def drop_topic(self, topic_id: bytes) -> None:
        self._changing(topic_id)
        for held in self._by_topic.pop(topic_id, {}).values():
            self._charge(held, -1)

    def drop_partitions(self, topic_id: bytes, partition_count: int) -> None:
        """Drop the offsets of deleted partitions: all from number ``partition_count`` on."""
        self._changing(topic_id)
        owners = self._by_topic.get(topic_id, {})
        for owner, held in list(owners.items()):
            for number in [number for number in held.partitions if number >= partition_count]:
                self._charge_positions(held, -1, -len(held.partitions.pop(number).metadata))
            if not held.partitions:
                self._charge(owners.pop(owner), -1)
        if not owners:
            self._by_topic.pop(topic_id, None)

    def delete(self, change: PositionsDeleted) -> None:
        owner = (change.kind, change.name)
        for topic in [change.topic] if change.topic is not None else list(self._by_topic):
            owners = self._by_topic.get(topic, {})
            held = owners.get(owner)
            if held is None:
                continue
            self._readers.changing(topic)
            self._views.changing((topic, owner))
            numbers = (
                held.partitions.keys() if change.partition is None else held.partitions.keys() & {change.partition}
            )
            self._keep_earlier(topic, owner, held, numbers)
            gone = None if change.partition is None else held.partitions.pop(change.partition, None)
            if gone is not None:
                self._charge_positions(held, -1, -len(gone.metadata))
            if change.partition is None or not held.partitions:
                self._charge(owners.pop(owner), -1)
            if not owners:
                self._by_topic.pop(topic, None)

    def _changing(self, topic: TopicKey) -> None:
        self._readers.changing(topic)
        for owner in self._by_topic.get(topic, ()):
            self._views.changing((topic, owner))

    def encoded(self) -> Iterator[bytes]:
        """Yield all offsets as they are at the time of the call, encoded in pieces."""
        readers = self._readers.open(list(self._by_topic))
        return encoded(self.count, self._views.open(chain.from_iterable(readers)))

    def _readers_of(self, topic: TopicKey) -> Sequence[tuple[TopicKey, Reader]]:
        return [(topic, owner) for owner in self._by_topic.get(topic, ())]

    def _stored(self, key: tuple[TopicKey, Reader]) -> Sequence[PositionStored]:
        topic, (kind, name) = key
        held = self.held(topic, kind, name)
        if held is None:
            return ()
        place, owner, at_us = split_key(topic), held.owner, held.at_us
        return [
            PositionStored(*place, partition, kind, name, *position[:2], owner, at_us, *position[2:])
            for partition, position in held.partitions.items()
        ]
