"""A member of a classic Kafka group that behaves like a client.

It joins, assigns if it is the leader, syncs, sends heartbeats and commits. It may continue after it was removed. It has
at most one outstanding request, and keeps its identity over connections and processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from struct import pack
from typing import TYPE_CHECKING, Any, Final

from polywire.protocols.kafka import schema
from polywire.protocols.kafka.messages import Api, WireError
from tests.sim.chance import Chance
from tests.sim.promises import require
from tests.sim.story import Story
from tests.sim.wires.classic_ledger import NOTHING, STATIC, ClassicLedger, Place
from tests.sim.wires.group_ledger import GROUP, TOPIC, Move
from tests.sim.wires.kafka_speech import LATER
from tests.sim.wires.ledger import TOPICS
from tests.sim.wires.lone_kafka_peer import LoneKafkaPeer, error_of
from tests.sim.wires.network import Link

if TYPE_CHECKING:
    from polywire.protocols.kafka.message_types import JoinGroupResponse, SyncGroupResponse

DYNAMIC: Final = "c"  # prefix of the names of dynamic members
VERSIONS: Final = {
    Api.SYNC_GROUP: 5,
    Api.HEARTBEAT: 4,
    Api.LEAVE_GROUP: 4,
    Api.OFFSET_COMMIT: 8,
    Api.OFFSET_FETCH: 5,
}
JOIN_VERSIONS: Final[Mapping[str, tuple[int, ...]]] = {STATIC: (5, 9), DYNAMIC: (3, 5, 9)}
"""Without an id first, with an id, and with skip_assignment."""
PROTOCOL_TYPE: Final = "consumer"
PROTOCOL: Final = "range"
ACTS: Final = {"beat": 5.0, "move": 6.0, "look": 2.0, "late": 3.0, "forget": 2.0, "again": 0.4, "leave": 0.4}
"""The acts of a member with their maximal weights; some are rare in the life of a process."""
FORGETS: Final = 0.3  # of connections that end: the client restarts, too
UNASSIGNED: Final = 0.1  # of partitions that a leader assigns to no member
REST_S: Final = 0.2  # between two heartbeats or connections of an idle member
CHANGED: Final = frozenset(
    {
        WireError.UNKNOWN_MEMBER_ID,
        WireError.ILLEGAL_GENERATION,
        WireError.REBALANCE_IN_PROGRESS,
        WireError.FENCED_INSTANCE_ID,
    }
)
"""Errors of a group that changed, or that removed this member."""
NO_CALLER: Final = frozenset({WireError.UNKNOWN_MEMBER_ID, WireError.FENCED_INSTANCE_ID})
"""Errors for callers that are not members."""
ELSEWHERE: Final = (WireError.NOT_COORDINATOR,)  # of a coordinator that stops


class State(Enum):
    """The state of a member."""

    OUT = "out"
    INFORMED = "informed of a generation"
    IN = "in"


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Session and rebalance timeouts in seconds."""

    session_s: float
    rebalance_s: float


class ClassicMember(LoneKafkaPeer):
    """Implements ``Caller``. Guards: ``_place`` has its last answer; in state IN, ``_partitions`` has its assignment."""

    def __init__(self, name: str, timeouts: Timeouts, ledger: ClassicLedger, chance: Chance, story: Story) -> None:
        """name: begins with ``STATIC`` or ``DYNAMIC``."""
        join = chance.one_of(JOIN_VERSIONS[name[:1]])
        super().__init__(name, {**VERSIONS, Api.JOIN_GROUP: join}, chance, story)
        self.is_resting = False
        """Whether it only stays a member."""
        self._timeouts: Final = timeouts
        self._group: Final = ledger
        self._instance: Final = {"instance_id": name if name.startswith(STATIC) else None}
        self._state = State.OUT
        self._place = Place("", -1)
        self._was = self._place
        self._partitions = NOTHING
        self._assigned: dict[str, tuple[int, ...]] = {}
        self._changes = 0
        """How often it has changed its description."""
        self._asked_at = 0
        self._weights = list(ACTS.values())
        self._heard_s = self._connected_s = -REST_S

    @property
    def generation(self) -> int | None:
        """The generation in which it is a member."""
        return self._place.generation if self._state is State.IN else None

    @property
    def is_away(self) -> bool:
        """Whether it has no connection, and had none just now."""
        return self.link is None and self._connected_s + REST_S <= self._group.now_s()

    def connected(self, link: Link) -> None:
        """Note a connection."""
        self._connected_s = self._group.now_s()
        super().connected(link)

    def disconnected(self) -> None:
        """Note the loss of the connection; a joining member joins again."""
        if self._is_waiting and self._state is not State.IN:
            self._state = State.OUT
        self._group.cut(self.name, self.link)
        super().disconnected()
        if self._chance.happens(FORGETS):
            self._forget(0.0)

    def started(self) -> None:
        """Note that a process has started: choose new weights."""
        self._weights = [weight * self._chance.share() ** 2 for weight in ACTS.values()]

    # Requests

    def _step(self) -> None:
        now_s = self._group.now_s()
        if self._state is State.OUT:
            self._join()
        elif self._state is State.INFORMED:
            self._sync(now_s)
        elif self.is_resting:
            if self._heard_s + REST_S <= now_s:
                self._beat(now_s)
        else:
            act = self._chance.weighted(list(ACTS), self._weights)
            acts = {"beat": self._beat, "move": self._move, "late": self._move_late, "leave": self._leave}
            acts |= {"look": self._look, "forget": self._forget, "again": self._change}
            acts[act](now_s)

    def _join(self) -> None:
        comes_back = not self._place.member_id and self._instance["instance_id"] is not None
        self._asked_at = self._group.asks(self.name, comes_back=comes_back)
        asked_s = self._group.now_s()
        said = b"%d" % self._changes
        metadata = pack(f">hih{len(TOPIC)}si{len(said)}s", 0, 1, len(TOPIC), TOPIC.encode(), len(said), said)
        self._ask(
            Api.JOIN_GROUP,
            lambda body: self._has_joined(body, asked_s),
            group_id=GROUP[1],
            session_timeout_ms=round(1000 * self._timeouts.session_s),
            rebalance_timeout_ms=round(1000 * self._timeouts.rebalance_s),
            member_id=self._place.member_id,
            protocol_type=PROTOCOL_TYPE,
            protocols=[schema.request(Api.JOIN_GROUP).Protocols(name=PROTOCOL, metadata=metadata)],
            **self._instance,
        )

    def _has_joined(self, body: JoinGroupResponse, asked_s: float) -> None:
        error = WireError(body.error)
        if error is WireError.MEMBER_ID_REQUIRED:
            self._place = Place(body.member_id, -1)
        if error:
            self._group.answered(self.name)
            self._require_reason(error)
            if error in NO_CALLER:
                self._place = Place("", -1)
            return
        place = Place(body.member_id, body.generation_id, asked_s)
        self._story.tell("joined", f"{self.name} {place.generation} leads={bool(body.members)}")
        ids = [member.member_id for member in body.members]
        self._group.joined(self.name, place, body.leader, ids, self._asked_at)
        if ids and body.leader == place.member_id and not body.skip_assignment:
            if place != self._place or not self._assigned:
                self._assigned = self._shares(ids)
            self._group.assigns(place.generation, self._assigned)
        else:
            self._assigned = {}
        self._place, self._state = place, State.INFORMED

    def _shares(self, ids: list[str]) -> dict[str, tuple[int, ...]]:
        """Return a leader's assignments."""
        found: dict[str, tuple[int, ...]] = dict.fromkeys(ids, NOTHING)
        for partition in range(TOPICS[TOPIC]):
            if not self._chance.happens(UNASSIGNED):
                found[self._chance.one_of(ids)] += (partition,)
        return found

    def _as_member(self, asked_s: float) -> tuple[Place, dict[str, Any]]:
        """Return the current identity and its fields in requests."""
        place = Place(self._place.member_id, self._place.generation, asked_s)
        said = {"group_id": GROUP[1], "member_id": place.member_id, "generation_id": place.generation}
        return place, {**said, **self._instance}

    def _sync(self, now_s: float) -> None:
        place, said = self._as_member(now_s)
        made = schema.request(Api.SYNC_GROUP).Assignments
        shares = [made(member_id=one, assignment=bytes(parts)) for one, parts in self._assigned.items()]
        said |= {"protocol_type": PROTOCOL_TYPE, "protocol_name": PROTOCOL, "assignments": shares}
        self._ask(Api.SYNC_GROUP, lambda body: self._has_synced(body, place), **said)

    def _has_synced(self, body: SyncGroupResponse, place: Place) -> None:
        if body.error:
            self._is_refused(WireError(body.error), place)
            return
        self._partitions = tuple(body.assignment)
        self._group.synced(self.name, place, self._partitions)
        self._story.tell("synced up", f"{self.name} {place.generation} {self._partitions}")
        self._state, self._heard_s = State.IN, place.asked_s

    def _beat(self, now_s: float) -> None:
        place, said = self._as_member(now_s)
        self._heard_s = now_s

        def beaten(body: Any) -> None:
            if body.error:
                self._is_refused(WireError(body.error), place)
            else:
                self._group.heard(self.name, place)

        self._ask(Api.HEARTBEAT, beaten, **said)

    def _leave(self, _: float) -> None:
        """Leave; a static member disconnects without a request."""
        self._was = place = self._place
        if self._instance["instance_id"] is not None:
            return
        self._group.asks(self.name)

        def left(body: Any) -> None:
            self._group.answered(self.name)
            error = WireError(body.error or body.members[0].error)
            if error:
                self._is_refused(error, place)
            else:
                self._group.left(place.member_id)
                self._place, self._state = Place("", -1), State.OUT

        one = schema.request(Api.LEAVE_GROUP).Members(member_id=place.member_id)
        self._ask(Api.LEAVE_GROUP, left, group_id=GROUP[1], members=[one])

    def _forget(self, _: float) -> None:
        """Restart without a request."""
        self._was = self._place if self._place.generation >= 0 else self._was
        self._place, self._state = Place("", -1), State.OUT

    def _change(self, _: float) -> None:
        """Join with another description."""
        self._was = self._place
        self._changes += 1
        self._state = State.OUT

    # Positions

    def _move(self, now_s: float) -> None:
        """Commit a position, of its own partition if it has one."""
        place = Place(self._place.member_id, self._place.generation, now_s)
        own = self._partitions or tuple(range(TOPICS[TOPIC]))
        self._store(place, self._chance.one_of(own), is_late=False)

    def _move_late(self, now_s: float) -> None:
        """Commit with an earlier identity."""
        if self._was.member_id:
            place = Place(self._was.member_id, self._was.generation, now_s)
            self._store(place, self._chance.below(TOPICS[TOPIC]), is_late=True)

    def _store(self, place: Place, partition: int, *, is_late: bool) -> None:
        positions = self._group.positions
        move = positions.asks(partition, positions.furthest(partition) + 1 + self._chance.below(20))
        topics = schema.request(Api.OFFSET_COMMIT).Topics
        one = topics(name=TOPIC, partitions=[topics.Partitions(index=partition, offset=move.offset)])
        self._ask(
            Api.OFFSET_COMMIT,
            lambda body: self._is_stored(error_of(body), place, move, is_late=is_late),
            group_id=GROUP[1],
            generation=place.generation,
            member_id=place.member_id,
            topics=[one],
            **self._instance,
        )

    def _is_stored(self, error: WireError, place: Place, move: Move, *, is_late: bool) -> None:
        if not error:
            self._group.moved(self.name, place, move)
            self._story.tell("position", f"{self.name} {TOPIC}/{move.partition} {move.offset} late={is_late}")
            return
        if error in CHANGED or not self.may_be_refused:
            self._group.positions.refused(move)
        if is_late:
            self._require_reason(error)
            self._story.tell("refused late", f"{self.name} {error.name}")
        else:
            self._is_refused(error, place)

    def _look(self, _: float) -> None:
        partition, asked_at = self._chance.below(TOPICS[TOPIC]), self._group.positions.tick()

        def reported(body: Any) -> None:
            entry = body.topics[0].partitions[0]
            if not entry.error:
                self._group.positions.finds(partition, None if entry.offset < 0 else entry.offset, asked_at)

        one = schema.request(Api.OFFSET_FETCH).Topics(name=TOPIC, indexes=[partition])
        self._ask(Api.OFFSET_FETCH, reported, group_id=GROUP[1], topics=[one])

    # Answers

    def _require_reason(self, error: WireError) -> None:
        excused = error in CHANGED or error in LATER or error in ELSEWHERE or self.may_be_refused
        fine = excused or error is WireError.MEMBER_ID_REQUIRED
        require(fine, "refused for no reason", peer=self.name, error=error.name)

    def _is_refused(self, error: WireError, place: Place) -> None:
        """Handle the refusal of a member's request."""
        self._require_reason(error)
        if error not in CHANGED:
            return
        self._group.refused(self.name, place, error.name)
        self._was, self._state = self._place, State.OUT
        if error in NO_CALLER:
            self._place = Place("", -1)
