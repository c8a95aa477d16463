"""Clients that are members of groups, including some that continue after they were removed.

The checks cover ownership of partitions, removals of members and committed offsets.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from polywire.broker.groups.group import Membership
from polywire.errors import BrokerError, ErrorCode
from polywire.types import Assignor, PositionKind
from tests.sim.broker.asking import Asking
from tests.sim.broker.history import Key
from tests.sim.broker.members import Member, is_connected
from tests.sim.broker.part import Part
from tests.sim.chance import Chance
from tests.sim.promises import require

GROUPS: Final = ("g", "h")
MEMBERS: Final = 5
WIRE: Final = "simulated"
OFFSETS: Final = 1000
_GONE: Final = (ErrorCode.GENERATION_STALE, ErrorCode.MEMBER_MISSING, ErrorCode.GROUP_MISSING)


class GroupPart(Part):
    """A base of ``Client``."""

    def __init__(self, asking: Asking, chance: Chance) -> None:
        super().__init__(asking, chance)
        self._leaving = ""
        asking.watch("group", self._group_changed)

    def join(self) -> None:
        topic = self.topic()
        if topic is None:
            return
        group, name, id_ = self.chance.one_of(GROUPS), topic.name.full, f"m{self.chance.below(MEMBERS)}"
        assignor, level = self.chance.one_of((None, None, Assignor.RANGE, Assignor.ROUND_ROBIN)), self.level()
        verb = partial(self.broker.groups.join, group, name, id_, wire=WIRE, level=level, assignor=assignor)
        found = self.ask(
            "join",
            f"{group}/{name} {id_}",
            lambda done: verb(connected=is_connected(id_), done=done),
            level=level,
            free=("group",),
        )
        if found is not None:
            self._seat(group, name, id_, found)

    def _seat(self, group: str, topic: str, id_: str, found: Membership) -> None:
        """Note an assignment."""
        self.asking.story.tell("seat", f"{group}/{topic} {id_} generation={found.generation} {found.partitions}")
        shown = self.model.history.latest.get(("group", topic, group))
        right = isinstance(shown, tuple) and shown[0] == found.generation and id_ in shown[1]
        require(right, "a member is one of its generation", member=id_, generation=found.generation, shown=shown)
        self.model.members.seat(group, topic, id_, found, now=self._now(), moment=self.model.history.moment)

    def _now(self) -> float:
        return self.broker.clock.monotonic()

    def _member(self) -> Member | None:
        members = self.model.members.all()
        return self.chance.one_of(members) if members else None

    def heartbeat(self) -> None:
        member = self._member()
        if member is None:
            return
        at, now = (member.group, member.topic, member.id), self._now()
        was_silent = self._is_silent(member) and self._is_long_ago(member.maybe_seen_at)
        found = self.asking.ask(
            "heartbeat",
            f"{member.group}/{member.topic} {member.id} generation={member.generation}",
            lambda _: self.broker.groups.heartbeat(*at, member.generation, wire=WIRE),
            level=None,
            free=("group",),
        )
        if isinstance(found, BrokerError):
            self._judge_refusal(member, found)
            return
        require(
            not was_silent, "who is silent for too long is put out", member=member.id, seen_at=member.seen_at, now=now
        )
        self._seat(*at, found)

    def _judge_refusal(self, member: Member, error: BrokerError) -> None:
        """Check an answer that a member is removed or its generation is stale."""
        if self.asking.is_excused(error):
            return
        shown = self.model.history.latest.get(("group", member.topic, member.group))
        is_current = isinstance(shown, tuple) and shown[0] == member.generation and member.id in shown[1]
        expected = error.code in _GONE and not is_current
        require(expected, "who is a member of this generation is not refused", error=str(error), shown=shown)
        self.model.members.lose_generation(member)

    def _is_silent(self, member: Member) -> bool:
        return self._is_long_ago(member.seen_at)

    def _is_long_ago(self, seen_at: float) -> bool:
        """Return whether the timeout has passed, rounded as in the coordinator."""
        return seen_at < self._now() - self.broker.settings.member_timeout_s

    def commit_position(self) -> None:
        """Commit a position as a member, perhaps in an earlier generation."""
        member = self._member()
        topic = None if member is None else self.broker.find_topic(member.topic)
        if member is None or topic is None:
            return
        number, offset = self.chance.below(len(topic.partitions)), self.chance.below(OFFSETS)
        level, refresh = self.level(), self.chance.happens(0.3)
        generation = member.generation
        verb = partial(
            self.broker.groups.commit_all,
            member.group,
            member.topic,
            member.id,
            generation,
            {number: offset},
            wire=WIRE,
            refresh=refresh,
            level=level,
        )
        key: Key = ("position", member.topic, member.group, number)
        found = self.asking.ask(
            "position",
            f"{member.group}/{member.topic} {member.id} generation={generation} {number}: {offset} {level.name}",
            lambda done: verb(done=done),
            level=level,
            applied=lambda _: {key: offset},
            free=("group",),
        )
        if isinstance(found, BrokerError):
            if refresh and self.asking.is_excused(found):
                member.maybe_seen_at = self._now()
            if found.code is not ErrorCode.PARTITION_NOT_ASSIGNED:
                self._judge_refusal(member, found)
            else:
                require(number not in member.partitions, "an owner may store its position", member=member.id)
            return
        shown = self.model.history.latest.get(("group", member.topic, member.group))
        right = isinstance(shown, tuple) and shown[0] == generation and number in member.partitions
        require(right, "only the owner of this generation stores positions", member=member.id, shown=shown)
        if refresh:
            member.seen_at = max(member.seen_at, self._now())

    def commit_plainly(self) -> None:
        """Commit a position of a group without being a member."""
        topic = self.topic()
        if topic is None:
            return
        group, name, level = self.chance.one_of(GROUPS), topic.name.full, self.level()
        offsets = {number: self.chance.below(OFFSETS) for number in range(len(topic.partitions))}
        verb = partial(self.broker.commit_positions, name, offsets, PositionKind.GROUP, group, level=level)
        self.ask(
            "positions",
            f"{group}/{name} {offsets}",
            lambda done: verb(done=done),
            level=level,
            applied=lambda _: {("position", name, group, number): offset for number, offset in offsets.items()},
        )

    def leave(self) -> None:
        member = self._member()
        if member is None:
            return
        level, self._leaving = self.level(), member.id
        verb = partial(self.broker.groups.leave, member.group, member.topic, member.id, member.generation, wire=WIRE)
        found = self.asking.ask(
            "leave",
            f"{member.group}/{member.topic} {member.id} generation={member.generation} {level.name}",
            lambda done: verb(level=level, done=done),
            level=level,
            free=("group",),
        )
        self._leaving = ""
        if isinstance(found, BrokerError):
            self._judge_refusal(member, found)

    def delete_group(self) -> None:
        topic = self.topic()
        if topic is None:
            return
        group, name, level = self.chance.one_of(GROUPS), topic.name.full, self.level()
        gone = {key: None for key in self.model.history.latest if _is_of(key, group, name)}
        found = self.asking.ask(
            "disband",
            f"{group}/{name} {level.name}",
            lambda done: self.broker.groups.delete(group, name, level=level, done=done),
            level=level,
            applied=lambda _: gone,
        )
        if isinstance(found, BrokerError):
            missing = found.code is ErrorCode.GROUP_MISSING and not gone
            require(missing or self.asking.is_excused(found), "refused for no reason", error=str(found))

    def _group_changed(self, key: Key, before: object, after: object) -> None:
        """Check a changed group: a removed member was silent or left."""
        topic, group = str(key[1]), str(key[2])
        if not isinstance(after, tuple):
            self.model.members.end(group, topic)
            return
        if not isinstance(before, tuple):
            return
        require(after[0] > before[0], "generations go up", group=group, topic=topic, was=before, now=after)
        for id_ in [id_ for id_ in before[1] if id_ not in after[1]]:
            member = self.model.members.find(group, topic, id_)
            assert member is not None, "it was seen"
            silent = self._is_silent(member)
            require(
                silent or id_ == self._leaving,
                "who gives signs of life is not put out",
                member=id_,
                seen_at=member.seen_at,
            )
            self.model.members.lose(member)


def _is_of(key: Key, group: str, topic: str) -> bool:
    return key[0] in ("group", "position") and key[1:3] == (topic, group)
