"""Groups over the Kafka wire: members by the newer protocol (spec: kafka#consumer-groups, decision 0118).

The broker shares partitions out. A member keeps what it was told until its caller joins again: only then the broker hears that it has let go
of what others are to have.

Promises: a partition that was taken from a member is not let go of before its caller knows; joining again is the same member. Must not know:
connections, records.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from polywire.client.base import Membership
from polywire.client.group_info import GroupInfo, MemberInfo
from polywire.client.kafka_errors import check
from polywire.errors import BrokerError, Conflict, ErrorCode, Missing
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.messages import Api, WireError
from polywire.protocols.kafka.subscription import WRITING
from polywire.types import Assignor

Ask = Callable[..., Awaitable[Any]]
Describe = Callable[[str], Awaitable[Any]]

JOINING: Final = 0  # the epoch of who comes with nothing
LEAVING: Final = -1
REBALANCE_TIMEOUT_MS: Final = 45_000  # how long a member has to let go: what clients of Kafka say
BEATS_MAX: Final = 4  # of one join: each lets go of what the one before has taken away
CONSUMER: Final = "consumer"  # the type of groups whose members are told what to read
NO_GENERATION: Final = -1
_ASSIGNORS: Final = {Assignor.ROUND_ROBIN: "uniform", Assignor.RANGE: "range"}
_NOBODY: Final = (ErrorCode.MEMBER_MISSING, ErrorCode.GENERATION_STALE)

_Partitions = frozenset[int]


@dataclass(slots=True)
class _Topic:
    """One topic of a member. told: what its caller knows of. assigned: what the broker said last."""

    id: bytes
    generation: int = NO_GENERATION
    told: _Partitions = frozenset()
    assigned: _Partitions = frozenset()


@dataclass(slots=True)
class _Member:
    """A member of one group, by its own epoch, with all its topics."""

    group: str
    name: str
    epoch: int = JOINING
    topics: dict[str, _Topic] = field(default_factory=dict)


class Groups:
    """The members that one client has made, and positions of any group."""

    __slots__ = ("_ask", "_describe", "_members")

    def __init__(self, ask: Ask, describe: Describe) -> None:
        """ask: sends a request. describe: what Metadata tells of a topic, which is there."""
        self._ask: Final = ask
        self._describe: Final = describe
        self._members: Final[dict[tuple[str, str], _Member]] = {}

    # Members

    async def join(self, group: str, topic: str, name: str, assignor: Assignor | None) -> Membership:
        """Become a member, or take what changed; its caller has let go of what is not in the answer."""
        id_ = (await self._describe(topic)).topic_id
        member = self._members.setdefault((group, name), _Member(group, name))
        if topic not in member.topics or member.topics[topic].id != id_:
            member.topics[topic] = _Topic(id_)
        place = member.topics[topic]
        try:
            for _ in range(BEATS_MAX):
                place.told = place.assigned
                await self._whole_beat(member, assignor)
                if place.told <= place.assigned:
                    break
        except BrokerError:
            if place.generation == NO_GENERATION:
                self._forget(member, topic)
            raise
        place.told, place.generation = place.assigned, member.epoch
        return Membership(place.generation, tuple(sorted(place.told)))

    async def heartbeat(self, group: str, topic: str, name: str, generation: int) -> Membership:
        """Stay a member. Raises Conflict(GENERATION_STALE) when there is something to take or to let go of."""
        member, place = self._place(group, topic, name)
        if generation == place.generation:
            await self._beat(member)
        if generation != place.generation or place.assigned != place.told:
            raise Conflict(ErrorCode.GENERATION_STALE, f"the group is rebalancing (join again) group={group!r}")
        return Membership(place.generation, tuple(sorted(place.told)))

    async def leave(self, group: str, topic: str, name: str) -> None:
        """Be no member any more, for this topic."""
        member, _ = self._place(group, topic, name)
        self._forget(member, topic)
        if member.topics:
            await self._whole_beat(member, None)
        else:
            member.epoch = LEAVING
            await self._beat(member)

    def _forget(self, member: _Member, topic: str) -> None:
        """A member has one topic less, and with none is none."""
        del member.topics[topic]
        if not member.topics:
            self._members.pop((member.group, member.name), None)

    def _place(self, group: str, topic: str, name: str) -> tuple[_Member, _Topic]:
        member = self._members.get((group, name))
        place = None if member is None else member.topics.get(topic)
        if member is None or place is None:
            raise Missing(ErrorCode.MEMBER_MISSING, f"this client has not joined group={group!r} member={name!r}")
        return member, place

    async def _whole_beat(self, member: _Member, assignor: Assignor | None) -> None:
        """Say everything, which is answered with everything; who is not known any more begins anew."""
        try:
            await self._beat(member, **_everything(member, assignor))
        except (Missing, Conflict) as error:
            if error.code not in _NOBODY or member.epoch == JOINING:
                raise
            member.epoch = JOINING
            for place in member.topics.values():
                place.assigned = place.told = frozenset()
            await self._beat(member, **_everything(member, assignor))

    async def _beat(self, member: _Member, **said: Any) -> None:
        """A sign of life. Raises Missing(MEMBER_MISSING), Conflict(GENERATION_STALE)."""
        told = await self._ask(
            Api.CONSUMER_GROUP_HEARTBEAT,
            group_id=member.group,
            member_id=member.name,
            member_epoch=member.epoch,
            **said,
        )
        check(told)
        member.epoch = told.member_epoch
        if told.assignment is not None:
            assigned = {one.topic_id: frozenset(one.partitions) for one in told.assignment.topic_partitions}
            for place in member.topics.values():
                place.assigned = assigned.get(place.id, frozenset())

    # Positions

    async def commit(self, group: str, topic: str, partition: int, offset: int, name: str, generation: int) -> None:
        """Store a position; of a member under the epoch that it has by now, unless its caller has an older one in mind."""
        epoch = generation
        if name:
            member, place = self._place(group, topic, name)
            epoch = member.epoch if generation == place.generation else generation
        asked = schema.request(Api.OFFSET_COMMIT).Topics
        entries = [asked.Partitions(index=partition, offset=offset)]
        answer = await self._ask(
            Api.OFFSET_COMMIT,
            group_id=group,
            generation=epoch,
            member_id=name,
            topics=[asked(name=topic, partitions=entries)],
        )
        check(answer.topics[0].partitions[0])

    async def position(self, group: str, topic: str, partition: int) -> int | None:
        """The next offset to read, None when nothing was committed."""
        asked = schema.request(Api.OFFSET_FETCH).Groups
        wanted = asked(group_id=group, topics=[asked.Topics(name=topic, indexes=[partition])])
        answer = await self._ask(Api.OFFSET_FETCH, groups=[wanted])
        check(answer.groups[0])
        entry = answer.groups[0].topics[0].partitions[0]
        check(entry)
        return entry.offset if entry.offset >= 0 else None

    # Lists

    async def groups(self, group: str | None) -> list[GroupInfo]:
        """Groups with their members and positions, by topic and name."""
        listed = (await self._ask(Api.LIST_GROUPS)).groups if group is None else await self._kind_of(group)
        found: list[GroupInfo] = []
        for entry in listed:
            is_consumer = entry.group_type.casefold() == CONSUMER
            told = await (self._consumers(entry.group_id) if is_consumer else self._classic(entry.group_id))
            if told is not None:
                found += _infos(entry.group_id, told, await self._positions(entry.group_id))
        return sorted(found, key=lambda info: (info.topic, info.name))

    async def _kind_of(self, group: str) -> list[Any]:
        """The entry of one group in the list of all, which alone tells of which kind it is."""
        return [entry for entry in (await self._ask(Api.LIST_GROUPS)).groups if entry.group_id == group]

    async def _positions(self, group: str) -> dict[str, dict[int, int]]:
        asked = schema.request(Api.OFFSET_FETCH).Groups
        answer = (await self._ask(Api.OFFSET_FETCH, groups=[asked(group_id=group, topics=None)])).groups[0]
        check(answer)
        return {
            topic.name: {entry.index: entry.offset for entry in topic.partitions if entry.offset >= 0}
            for topic in answer.topics
        }

    async def _consumers(self, group: str) -> _Told | None:
        """A group by the newer protocol; None when it is gone meanwhile."""
        told = (await self._ask(Api.CONSUMER_GROUP_DESCRIBE, group_ids=[group])).groups[0]
        if told.error == WireError.GROUP_ID_NOT_FOUND:
            return None
        check(told)
        members = [
            (one.member_id, one.client_id, {at.topic_name: at.partitions for at in one.assignment.topic_partitions})
            for one in told.members
        ]
        return _Told(told.group_epoch, told.assignor_name or None, members)

    async def _classic(self, group: str) -> _Told | None:
        """A group whose members share the work out themselves."""
        told = (await self._ask(Api.DESCRIBE_GROUPS, groups=[group])).groups[0]
        check(told)
        members = [
            (one.member_id, one.client_id, dict(WRITING.decode(bytes(one.member_assignment)))) for one in told.members
        ]
        return _Told(NO_GENERATION, told.protocol_data or None, members)


@dataclass(frozen=True, slots=True)
class _Told:
    """What is told of a group. members: id, client id, and partitions by topic, of each."""

    generation: int
    assignor: str | None
    members: Sequence[tuple[str, str, Mapping[str, Collection[int]]]]


def _everything(member: _Member, assignor: Assignor | None) -> dict[str, Any]:
    """What a member says of itself; it holds what its caller was told of."""
    owned = schema.request(Api.CONSUMER_GROUP_HEARTBEAT).TopicPartitions
    return {
        "rebalance_timeout_ms": REBALANCE_TIMEOUT_MS,
        "subscribed_topic_names": sorted(member.topics),
        "server_assignor": None if assignor is None else _ASSIGNORS[assignor],
        "topic_partitions": [
            owned(topic_id=place.id, partitions=sorted(place.told)) for place in member.topics.values() if place.told
        ],
    }


def _infos(name: str, told: _Told, positions: Mapping[str, Mapping[int, int]]) -> Iterator[GroupInfo]:
    """A group in each topic that it reads or has positions in. This wire does not tell when members were heard of, nor whose a group is."""
    for topic in {*positions, *(topic for _, _, held in told.members for topic in held)}:
        members = [
            MemberInfo(id_, client, 0, tuple(sorted(held[topic])))
            for id_, client, held in told.members
            if topic in held
        ]
        yield GroupInfo(topic, name, told.generation, told.assignor, tuple(members), positions.get(topic, {}))
