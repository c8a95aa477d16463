"""Enter the members of Kafka groups into the coordinator's groups, which have one topic each.

A member of a Kafka group has one membership for each of its topics (concepts: groups#handing-over). Each membership is
assigned partitions like a member of any other protocol, and the coordinator knows which partitions it holds. Members
that wait for released partitions learn of the release from a new generation, unless another notification is earlier.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple, Protocol

from polywire.broker.elsewhere import TopicElsewhere
from polywire.broker.groups.coordinator import Coordinator
from polywire.broker.groups.group import Group
from polywire.broker.groups.holdings import Holdings
from polywire.broker.owners import ITSELF, Caller
from polywire.broker.topics import Topic
from polywire.errors import Missing
from polywire.types import Assignor


class Host(Protocol):
    """The broker as memberships use it."""

    def group_topic(self, full_name: str) -> Topic | TopicElsewhere | None:
        """Return the topic with this full name."""

    def group_topic_of_id(self, topic_id: bytes) -> Topic | TopicElsewhere | None:
        """Return the topic with this id."""


class Share(NamedTuple):
    """A member's share of a topic in the coordinator's group, and the present holders of its partitions."""

    partitions: range
    generation: int
    holdings: Holdings


@dataclass(slots=True)
class Seat:
    """The memberships of one member, all under the same id.

    topics: topic ids by full name. is_consumer: the member uses Kafka's newer protocol.
    """

    id: str
    wire: str
    topics: dict[str, bytes] = field(default_factory=dict)
    is_consumer: bool = False


class Seats:
    """The memberships of all Kafka groups."""

    __slots__ = ("_coordinator", "_host")

    def __init__(self, host: Host, coordinator: Coordinator) -> None:
        self._host = host
        self._coordinator = coordinator

    def take(
        self,
        group: str,
        seat: Seat,
        topics: Collection[str],
        *,
        assignor: Assignor | None,
        by: Caller,
        at_most: int | None = None,
    ) -> bool:
        """Join those of the given topics that exist and leave all others; return whether this is complete.

        at_most: the largest number of joins in this call. Raises as ``Coordinator.join``.
        """
        found = {topic: self._host.group_topic(topic) for topic in topics}
        wanted = {topic: there.id for topic, there in found.items() if there is not None}
        for topic in [topic for topic, id_ in seat.topics.items() if wanted.get(topic) != id_]:
            self.leave(group, seat, topic)
        coordinator, left = self._coordinator, at_most
        for topic, id_ in wanted.items():
            if topic not in seat.topics or not coordinator.has_member(group, topic, seat.id):
                if left == 0:
                    return False
                coordinator.join(
                    group,
                    topic,
                    seat.id,
                    wire=seat.wire,
                    assignor=assignor,
                    watched=True,
                    is_consumer=seat.is_consumer,
                    by=by,
                )
                seat.topics[topic] = id_
                left = None if left is None else left - 1
            coordinator.holdings.held(group, id_).enter(seat.id)
        return True

    def leave(self, group: str, seat: Seat, topic: str) -> None:
        """Leave a topic. The member holds its partitions until it releases them. Raises Busy(DISK_FULL)."""
        with suppress(Missing):  # the topic or the group was deleted
            self._coordinator.leave(group, topic, seat.id, None, wire=seat.wire, by=ITSELF)
        del seat.topics[topic]

    def leave_some(self, group: str, seat: Seat, at_most: int) -> bool:
        """Leave up to ``at_most`` topics; return whether none is left. Raises Busy(DISK_FULL)."""
        for topic in list(islice(seat.topics, at_most)):
            self.leave(group, seat, topic)
        return not seat.topics

    def end(self, group: str, seat: Seat, topic_ids: Collection[bytes]) -> None:
        """Remove a member: leave all its topics and release all its partitions, also in the topics with the given ids.

        If this raises Busy(DISK_FULL), the member remains.
        """
        ids = {*topic_ids, *seat.topics.values()}
        for topic in list(seat.topics):
            self.leave(group, seat, topic)
        for id_ in ids:
            self._coordinator.holdings.held(group, id_).leave(seat.id)
        self.hand_over(group, ids)
        for id_ in ids:
            self._coordinator.holdings.forget(group, id_)

    def end_in(self, group: str, seat: Seat, topic: str) -> None:
        """Remove a member from one topic and release its partitions there.

        If this raises Busy(DISK_FULL), it remains.
        """
        id_ = seat.topics[topic]
        self.leave(group, seat, topic)
        self._coordinator.holdings.held(group, id_).leave(seat.id)
        self.hand_over(group, (id_,))
        self._coordinator.holdings.forget(group, id_)

    def hold(self, group: str, seat: Seat, topic: str, partitions: Collection[int]) -> None:
        """Record partitions that a member reads before it joins the topic; do nothing if the topic does not exist."""
        id_ = self.topic_id(topic)
        if id_ is not None:
            seat.topics[topic] = id_
            self._coordinator.holdings.held(group, id_).take(seat.id, partitions)

    def share(self, group: str, seat: Seat, topic: str) -> Share | None:
        """Return a member's share of one of its topics."""
        there, id_ = self._coordinator.refreshed(group, topic), seat.topics[topic]
        if there is None or not there.has(seat.id):
            return None
        return Share(there.share(seat.id), there.generation, self._coordinator.holdings.held(group, id_))

    def shares(self, group: str, seat: Seat) -> dict[bytes, Share]:
        """Return a member's shares by topic id."""
        found = {id_: self.share(group, seat, topic) for topic, id_ in seat.topics.items()}
        return {id_: share for id_, share in found.items() if share is not None}

    def topic_id(self, topic: str) -> bytes | None:
        """Return the id of a topic, None if it does not exist."""
        found = self._host.group_topic(topic)
        return None if found is None else found.id

    def is_left(self, group: str, topic: str, seat: str) -> bool:
        """Return whether a membership from before the restart still exists: no member has claimed or replaced it."""
        if not self._coordinator.has_member(group, topic, seat) or self._coordinator.has_changed(group, topic):
            return False
        topic_id = self.topic_id(topic)
        if topic_id is None:
            return True
        is_taken = seat in self._coordinator.holdings.held(group, topic_id)
        self._coordinator.holdings.forget(group, topic_id)
        return not is_taken

    def held(self, group: str, topic_id: bytes) -> Holdings:
        """Return the holdings of a topic, created if missing."""
        return self._coordinator.holdings.held(group, topic_id)

    def clear(self, group: str, seat: Seat, topic_id: bytes) -> None:
        """Forget a topic in which the member has no membership, once it holds nothing there."""
        held = self._coordinator.holdings.held(group, topic_id)
        if not held.of(seat.id):
            held.leave(seat.id)
            self._coordinator.holdings.forget(group, topic_id)

    def hand_over(self, group: str, topic_ids: Collection[bytes]) -> Mapping[bytes, int]:
        """Begin a generation in topics where partitions may be free, for members of protocols that never release
        partitions.

        Returns the generations by topic id.
        """
        renewed: dict[bytes, int] = {}
        for id_ in topic_ids:
            held = self._coordinator.holdings.held(group, id_)
            released = held.take_released()
            topic = self._host.group_topic_of_id(id_) if released else None
            there = None if topic is None else self._coordinator.refreshed(group, topic.name.full)
            if there is not None and there.members and any(there.owner_of(one) not in held for one in released):
                self._coordinator.renew(group, there.topic)
                renewed[id_] = there.generation + 1
        return renewed

    def group_in(self, group: str, topic: str) -> Group | None:
        """Return the coordinator's group of a topic without expired members."""
        return self._coordinator.refreshed(group, topic)
