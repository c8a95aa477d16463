"""Seats of members of Kafka's groups in the coordinator's groups, which are of one topic each (concepts: groups#handing-over).

Promises: a seat is dealt partitions like a member of any wire, and the coordinator is told what it holds; who waits for what was let go of is
told by a new generation where nothing else does. Must not know: wires, how members learn of their partitions.
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
    """What seats ask of the broker."""

    def group_topic(self, full_name: str) -> Topic | TopicElsewhere | None:
        """The topic of this full name."""

    def group_topic_of_id(self, topic_id: bytes) -> Topic | TopicElsewhere | None:
        """The topic of this id."""


class Share(NamedTuple):
    """What a seat should have in a topic by the coordinator's group, and who holds what there."""

    partitions: range
    generation: int
    holdings: Holdings


@dataclass(slots=True)
class Seat:
    """One member's, under one id in all its topics. ``topics``: ids by full name. ``is_consumer``: of the newer protocol."""

    id: str
    wire: str
    topics: dict[str, bytes] = field(default_factory=dict)
    is_consumer: bool = False


class Seats:
    """Those of all groups."""

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
        """Take part wherever there is a topic of these, and nowhere else; whether it does. Raises as ``Coordinator.join``.

        at_most: seats that are taken in this call.
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
        """Nothing more is dealt out to it there; what it holds it holds until it lets go. Raises Busy(DISK_FULL)."""
        with suppress(Missing):  # the topic is gone, or the group was deleted
            self._coordinator.leave(group, topic, seat.id, None, wire=seat.wire, by=ITSELF)
        del seat.topics[topic]

    def leave_some(self, group: str, seat: Seat, at_most: int) -> bool:
        """Leave so many topics; whether no seat is left. Raises Busy(DISK_FULL)."""
        for topic in list(islice(seat.topics, at_most)):
            self.leave(group, seat, topic)
        return not seat.topics

    def end(self, group: str, seat: Seat, topic_ids: Collection[bytes]) -> None:
        """It is nobody's any more, and holds nothing, in these topics neither. Raises Busy(DISK_FULL); then it is still somebody's."""
        ids = {*topic_ids, *seat.topics.values()}
        for topic in list(seat.topics):
            self.leave(group, seat, topic)
        for id_ in ids:
            self._coordinator.holdings.held(group, id_).leave(seat.id)
        self.hand_over(group, ids)
        for id_ in ids:
            self._coordinator.holdings.forget(group, id_)

    def end_in(self, group: str, seat: Seat, topic: str) -> None:
        """It is nobody's any more in one topic, and holds nothing there. Raises Busy(DISK_FULL); then it is still somebody's."""
        id_ = seat.topics[topic]
        self.leave(group, seat, topic)
        self._coordinator.holdings.held(group, id_).leave(seat.id)
        self.hand_over(group, (id_,))
        self._coordinator.holdings.forget(group, id_)

    def hold(self, group: str, seat: Seat, topic: str, partitions: Collection[int]) -> None:
        """What is read there is this seat's, which is yet to be taken; nothing where the topic does not exist."""
        id_ = self.topic_id(topic)
        if id_ is not None:
            seat.topics[topic] = id_
            self._coordinator.holdings.held(group, id_).take(seat.id, partitions)

    def share(self, group: str, seat: Seat, topic: str) -> Share | None:
        """What a seat should have in one of its topics."""
        there, id_ = self._coordinator.refreshed(group, topic), seat.topics[topic]
        if there is None or not there.has(seat.id):
            return None
        return Share(there.share(seat.id), there.generation, self._coordinator.holdings.held(group, id_))

    def shares(self, group: str, seat: Seat) -> dict[bytes, Share]:
        """What a seat should have, by topic's id."""
        found = {id_: self.share(group, seat, topic) for topic, id_ in seat.topics.items()}
        return {id_: share for id_, share in found.items() if share is not None}

    def topic_id(self, topic: str) -> bytes | None:
        """The id of a topic, None while it does not exist."""
        found = self._host.group_topic(topic)
        return None if found is None else found.id

    def is_left(self, group: str, topic: str, seat: str) -> bool:
        """Whether there is a seat that nobody has taken since the broker began, and what others were dealt is as it was then."""
        if not self._coordinator.has_member(group, topic, seat) or self._coordinator.has_changed(group, topic):
            return False
        topic_id = self.topic_id(topic)
        if topic_id is None:
            return True
        is_taken = seat in self._coordinator.holdings.held(group, topic_id)
        self._coordinator.holdings.forget(group, topic_id)
        return not is_taken

    def held(self, group: str, topic_id: bytes) -> Holdings:
        """Who has to let go of which partitions of a topic before others have them."""
        return self._coordinator.holdings.held(group, topic_id)

    def clear(self, group: str, seat: Seat, topic_id: bytes) -> None:
        """A topic without a seat is done with as soon as nothing in it is held."""
        held = self._coordinator.holdings.held(group, topic_id)
        if not held.of(seat.id):
            held.leave(seat.id)
            self._coordinator.holdings.forget(group, topic_id)

    def hand_over(self, group: str, topic_ids: Collection[bytes]) -> Mapping[bytes, int]:
        """Partitions may be free now: members that never let go find out by a new generation, whose numbers are returned by topic's id."""
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
        """The coordinator's group in a topic as its members find it now."""
        return self._coordinator.refreshed(group, topic)
