"""Consumer groups over the Kafka protocol (spec: kafka#consumer-groups, decision 0118).

This is the newer group protocol, in which the broker assigns partitions.

* A revoked partition is released at the broker only when the caller joins again. Until then, the caller may not know of
  the revocation.
* A caller that joins again is the same member.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from polywire.client.base import Membership
from polywire.client.kafka_errors import check
from polywire.client.listings import GroupInfo, MemberInfo
from polywire.errors import BrokerError, Conflict, ErrorCode, Missing
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.messages import Api, WireError
from polywire.protocols.kafka.subscription import WRITING
from polywire.types import Assignor

Ask = Callable[..., Awaitable[Any]]
Describe = Callable[[str], Awaitable[Any]]

JOINING: Final = 0  # the epoch in the heartbeat of a member that joins
LEAVING: Final = -1
REBALANCE_TIMEOUT_MS: Final = 45_000  # how long a member may take to release partitions; the default of Kafka's clients
BEATS_MAX: Final = 4  # heartbeats in one join; each releases the partitions that the previous response revoked
CONSUMER: Final = "consumer"  # the type of groups whose partitions the broker assigns
NO_GENERATION: Final = -1
_ASSIGNORS: Final = {Assignor.ROUND_ROBIN: "uniform", Assignor.RANGE: "range"}
_NOT_A_MEMBER: Final = (ErrorCode.MEMBER_MISSING, ErrorCode.GENERATION_STALE)

_Partitions = frozenset[int]


@dataclass(slots=True)
class _Topic:
    """One topic of a member.

    ``owned`` are the partitions that the caller knows about, ``assigned`` those in the broker's last response.
    """

    id: bytes
    generation: int = NO_GENERATION
    owned: _Partitions = frozenset()
    assigned: _Partitions = frozenset()


@dataclass(slots=True)
class _Member:
    group: str
    name: str
    epoch: int = JOINING
    topics: dict[str, _Topic] = field(default_factory=dict)


class Groups:
    """The group members of one client, and the committed offsets of any group."""

    __slots__ = ("_ask", "_describe", "_members")

    def __init__(self, ask: Ask, describe: Describe) -> None:
        """Create the object. ``ask`` sends requests. ``describe`` returns the metadata of an existing topic."""
        self._ask: Final = ask
        self._describe: Final = describe
        self._members: Final[dict[tuple[str, str], _Member]] = {}

    # Members

    async def join(self, group: str, topic: str, name: str, assignor: Assignor | None) -> Membership:
        """Join the group, or accept a new assignment.

        Before the call, the caller must stop reading the partitions that ``heartbeat`` reported as revoked.
        """
        id_ = (await self._describe(topic)).topic_id
        member = self._members.setdefault((group, name), _Member(group, name))
        if topic not in member.topics or member.topics[topic].id != id_:
            member.topics[topic] = _Topic(id_)
        place = member.topics[topic]
        try:
            for _ in range(BEATS_MAX):
                place.owned = place.assigned
                await self._whole_beat(member, assignor)
                if place.owned <= place.assigned:
                    break
        except BrokerError:
            if place.generation == NO_GENERATION:
                self._forget(member, topic)
            raise
        place.owned, place.generation = place.assigned, member.epoch
        return Membership(place.generation, tuple(sorted(place.owned)))

    async def heartbeat(self, group: str, topic: str, name: str, generation: int) -> Membership:
        """Send a heartbeat. Raises Conflict(GENERATION_STALE) if the assignment has changed."""
        member, place = self._place(group, topic, name)
        if generation == place.generation:
            await self._beat(member)
        if generation != place.generation or place.assigned != place.owned:
            raise Conflict(ErrorCode.GENERATION_STALE, f"the group is rebalancing (join again) group={group!r}")
        return Membership(place.generation, tuple(sorted(place.owned)))

    async def leave(self, group: str, topic: str, name: str) -> None:
        """Leave the group for this topic. With its last topic, the member leaves the group itself."""
        member, _ = self._place(group, topic, name)
        self._forget(member, topic)
        if member.topics:
            await self._whole_beat(member, None)
        else:
            member.epoch = LEAVING
            await self._beat(member)

    def _forget(self, member: _Member, topic: str) -> None:
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
        """Send a heartbeat with all fields, so that the response has the complete assignment.

        If the broker does not know the member, join again.
        """
        try:
            await self._beat(member, **_everything(member, assignor))
        except (Missing, Conflict) as error:
            if error.code not in _NOT_A_MEMBER or member.epoch == JOINING:
                raise
            member.epoch = JOINING
            for place in member.topics.values():
                place.assigned = place.owned = frozenset()
            await self._beat(member, **_everything(member, assignor))

    async def _beat(self, member: _Member, **fields: Any) -> None:
        """Send a heartbeat. Raises Missing(MEMBER_MISSING), Conflict(GENERATION_STALE)."""
        response = await self._ask(
            Api.CONSUMER_GROUP_HEARTBEAT,
            group_id=member.group,
            member_id=member.name,
            member_epoch=member.epoch,
            **fields,
        )
        check(response)
        member.epoch = response.member_epoch
        if response.assignment is not None:
            assigned = {entry.topic_id: frozenset(entry.partitions) for entry in response.assignment.topic_partitions}
            for place in member.topics.values():
                place.assigned = assigned.get(place.id, frozenset())

    # Positions

    async def commit(self, group: str, topic: str, partition: int, offset: int, name: str, generation: int) -> None:
        """Commit an offset.

        With a member, the commit has its current epoch, unless the caller passes an older generation.
        """
        epoch = generation
        if name:
            member, place = self._place(group, topic, name)
            epoch = member.epoch if generation == place.generation else generation
        topic_type = schema.request(Api.OFFSET_COMMIT).Topics
        entries = [topic_type.Partitions(index=partition, offset=offset)]
        answer = await self._ask(
            Api.OFFSET_COMMIT,
            group_id=group,
            generation=epoch,
            member_id=name,
            topics=[topic_type(name=topic, partitions=entries)],
        )
        check(answer.topics[0].partitions[0])

    async def position(self, group: str, topic: str, partition: int) -> int | None:
        """Return the next offset to read, or None if nothing was committed."""
        group_type = schema.request(Api.OFFSET_FETCH).Groups
        request = group_type(group_id=group, topics=[group_type.Topics(name=topic, indexes=[partition])])
        answer = await self._ask(Api.OFFSET_FETCH, groups=[request])
        check(answer.groups[0])
        entry = answer.groups[0].topics[0].partitions[0]
        check(entry)
        return entry.offset if entry.offset >= 0 else None

    # Lists

    async def groups(self, group: str | None) -> list[GroupInfo]:
        """Return groups with their members and committed offsets, sorted by topic and name."""
        listed = (await self._ask(Api.LIST_GROUPS)).groups if group is None else await self._kind_of(group)
        found: list[GroupInfo] = []
        for entry in listed:
            is_consumer = entry.group_type.casefold() == CONSUMER
            description = await (self._consumers(entry.group_id) if is_consumer else self._classic(entry.group_id))
            if description is not None:
                found += _infos(entry.group_id, description, await self._positions(entry.group_id))
        return sorted(found, key=lambda info: (info.topic, info.name))

    async def _kind_of(self, group: str) -> list[Any]:
        """Return the entry of a group in the list of all groups, as a list. It is empty if there is no such group.

        No other response has the group's type.
        """
        return [entry for entry in (await self._ask(Api.LIST_GROUPS)).groups if entry.group_id == group]

    async def _positions(self, group: str) -> dict[str, dict[int, int]]:
        group_type = schema.request(Api.OFFSET_FETCH).Groups
        answer = (await self._ask(Api.OFFSET_FETCH, groups=[group_type(group_id=group, topics=None)])).groups[0]
        check(answer)
        return {
            topic.name: {entry.index: entry.offset for entry in topic.partitions if entry.offset >= 0}
            for topic in answer.topics
        }

    async def _consumers(self, group: str) -> _Description | None:
        """Describe a group of the newer protocol. Return None if the group has been deleted meanwhile."""
        response = (await self._ask(Api.CONSUMER_GROUP_DESCRIBE, group_ids=[group])).groups[0]
        if response.error == WireError.GROUP_ID_NOT_FOUND:
            return None
        check(response)
        members = [
            (
                member.member_id,
                member.client_id,
                {at.topic_name: at.partitions for at in member.assignment.topic_partitions},
            )
            for member in response.members
        ]
        return _Description(response.group_epoch, response.assignor_name or None, members)

    async def _classic(self, group: str) -> _Description | None:
        response = (await self._ask(Api.DESCRIBE_GROUPS, groups=[group])).groups[0]
        check(response)
        members = [
            (member.member_id, member.client_id, dict(WRITING.decode(bytes(member.member_assignment))))
            for member in response.members
        ]
        return _Description(NO_GENERATION, response.protocol_data or None, members)


@dataclass(frozen=True, slots=True)
class _Description:
    """A group as described by the broker.

    ``members`` has the id, the client id and the partitions by topic of each member.
    """

    generation: int
    assignor: str | None
    members: Sequence[tuple[str, str, Mapping[str, Collection[int]]]]


def _everything(member: _Member, assignor: Assignor | None) -> dict[str, Any]:
    """Return all fields of a heartbeat, including the partitions that the caller owns."""
    entry_of = schema.request(Api.CONSUMER_GROUP_HEARTBEAT).TopicPartitions
    return {
        "rebalance_timeout_ms": REBALANCE_TIMEOUT_MS,
        "subscribed_topic_names": sorted(member.topics),
        "server_assignor": None if assignor is None else _ASSIGNORS[assignor],
        "topic_partitions": [
            entry_of(topic_id=place.id, partitions=sorted(place.owned))
            for place in member.topics.values()
            if place.owned
        ],
    }


def _infos(name: str, description: _Description, positions: Mapping[str, Mapping[int, int]]) -> Iterator[GroupInfo]:
    """Yield the group once for each topic that it reads or has committed offsets in.

    The protocol does not report the owner of a group, nor when a member was last seen.
    """
    for topic in {*positions, *(topic for _, _, held in description.members for topic in held)}:
        members = [
            MemberInfo(id_, client, 0, tuple(sorted(held[topic])))
            for id_, client, held in description.members
            if topic in held
        ]
        yield GroupInfo(
            topic, name, description.generation, description.assignor, tuple(members), positions.get(topic, {})
        )
