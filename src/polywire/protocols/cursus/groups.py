"""Commands of consumer groups and their offsets (spec: cursus#subscribe, cursus#group-requests, cursus#groups).

Promises: every rule of membership is the coordinator's, which other wires share; here are this wire's names and words, and its own two
rules: a member that joins again stays the same member, and a committed offset never goes back. Must not know: sockets, records.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from typing import Final

from polywire.broker.access import Principal
from polywire.broker.actions import Action
from polywire.broker.broker import Broker
from polywire.broker.groups.coordinator import GroupView, Membership
from polywire.errors import BrokerError, ErrorCode, Invalid
from polywire.protocols.cursus.confirmed import GroupKey
from polywire.protocols.cursus.context import COORDINATOR, WIRE
from polywire.protocols.cursus.errors import refused
from polywire.protocols.cursus.messages import (
    POSITIONS,
    Dialect,
    Refused,
    Request,
    bracketed,
    encoded,
    integer,
    quote,
    topic_word,
)
from polywire.protocols.cursus.read_arguments import DEFAULT_GROUP
from polywire.protocols.cursus.reply_slots import Answer
from polywire.protocols.cursus.session import Command, CursusSession, Reply
from polywire.protocols.cursus.topics import DONE
from polywire.types import PARTITION_COUNT_MAX, Assignor, PositionKind

SUFFIXES: Final = 10_000  # member ids end in four digits (spec: cursus#group-model)
TRANSACTION_KEYS: Final = ("transactional_id", "txn", "transaction")
REJOIN: Final = "hint=REBALANCE_REQUIRED"
NEVER: Final = "0001-01-01T00:00:00Z"

Pairs = Mapping[int, int]
"""Offsets by partition."""


@dataclass(frozen=True, slots=True)
class Place:
    """Group and topic of a request, and the member and generation it gives; generation None when it gives none."""

    session: CursusSession
    topic: str
    group: str
    member: str = ""
    generation: int | None = None

    @property
    def key(self) -> GroupKey:
        """How the group is known beyond this wire."""
        return self.topic, self.group

    def view(self) -> GroupView | None:
        """The group as it is."""
        return self.session.state.broker.groups.view(self.group, self.topic)

    def refused(self, error: BrokerError, partition: int | None = None) -> Refused:
        """What the coordinator refused, in this wire's words and in its order: unknown member first (spec: cursus#group-model)."""
        view = self.view()
        match error.code:
            case ErrorCode.GROUP_MISSING:
                return Refused("group_not_found", f"group={self.group}{self._hint}")
            case ErrorCode.GENERATION_STALE | ErrorCode.MEMBER_MISSING:
                if view is None or all(member.id != self.member for member in view.members):
                    return Refused("member_not_found", f"member={self.member} group={self.group}{self._hint}")
                return self.stale(view.generation)
            case ErrorCode.DENIED:
                return refused(error)
            case ErrorCode.PARTITION_NOT_ASSIGNED:
                return self.not_owner(partition)
            case _:
                return Refused("coordinator_error", f"reason={quote(error.message)}")

    @property
    def _hint(self) -> str:
        """The page of the positional dialect has one word for whoever has to join anew; who leaves does not, and gives no generation."""
        rejoins = self.session.spoken is Dialect.POSITIONAL and self.generation is not None
        return f" {REJOIN}" if rejoins else ""

    def not_owner(self, partition: int | None) -> Refused:
        """The partition is another member's."""
        facts = f"member={self.member} group={self.group} generation={self.generation}"
        return Refused("NOT_OWNER", f"partition={partition} {facts}")

    def stale(self, current: int) -> Refused:
        """Fenced; the hint is what clients of every dialect look for (spec: cursus#fencing)."""
        facts = f"current={current} requested={self.generation} group={self.group} member={self.member}"
        return Refused("GEN_MISMATCH", f"{facts} {REJOIN}")


# Arguments


def _number(request: Request, key: str) -> int:
    """A number that must be there and not negative. Raises Refused ``missing_<key>`` and ``invalid_<key>``."""
    value = integer(request.need(key))
    if value is None or value < 0:
        raise Refused(f"invalid_{key}", f"command={request.name}" if key == "generation" else "")
    return value


def _admit(session: CursusSession, topic: str, action: Action) -> None:
    """Whoever may not read a topic may not move its readers either. Raises Refused."""
    found = session.state.broker.find_topic(topic)
    if found is not None:
        session.state.guard.admit_topic(session, found, action)


def _may_see(session: CursusSession, topic: str) -> bool:
    resource = session.state.broker.resource(topic)
    return session.state.guard.admits_topic(session, resource, Action.GROUP_DESCRIBE)


def _check_topic(session: CursusSession, request: Request, topic: str, group: str) -> None:
    """A group belongs to one topic in the modern dialect, but for the one that clients use when none was configured. Raises Refused."""
    if request.dialect is not Dialect.MODERN:
        return
    expected = session.state.broker.groups.topic_of(WIRE, group)
    if expected is not None and expected != topic:
        told = topic_word(expected) if _may_see(session, expected) else ""
        raise Refused("topic_not_assigned_to_group", f"expected={told} actual={topic_word(topic)}")


def _member_place(session: CursusSession, request: Request, *, generation: bool = True) -> Place:
    topic, group, member = (request.need(key) for key in ("topic", "group", "member"))
    wanted = _number(request, "generation") if generation or request.options.get("generation") else None
    _admit(session, topic, Action.GROUP_JOIN)
    _check_topic(session, request, topic, group)
    return Place(session, topic, group, _known(session, request, topic, group, member), wanted)


def _known(session: CursusSession, request: Request, topic: str, group: str, member: str) -> str:
    """The member meant; the positional dialect may also give the name it joined under (spec: cursus#answers-by-dialect)."""
    view = session.state.broker.groups.view(group, topic)
    if view is None or request.dialect is Dialect.MODERN:
        return member
    ids = [known.id for known in view.members]
    if member in ids:
        return member
    if request.options.get("consumer") in ids:
        return request.options["consumer"]
    return next((known for known in ids if base_of(known) == member), member)


def base_of(member: str) -> str:
    """The name that a member joined under."""
    base, dash, digits = member.rpartition("-")
    return base if dash and len(digits) == 4 and digits.isascii() and digits.isdigit() else member


# Membership


def join(session: CursusSession, request: Request, /) -> Reply | None:
    """JOIN_GROUP: a new member, one that resumes, or one that was fenced and comes back."""
    topic, group, given = (request.need(key) for key in ("topic", "group", "member"))
    wanted = _number(request, "generation") if request.options.get("generation") else None
    broker = session.state.broker
    if broker.find_topic(topic) is None:
        raise Refused("topic_not_found", f"topic={topic_word(topic)}")
    _admit(session, topic, Action.GROUP_JOIN)
    _check_topic(session, request, topic, group)
    place = Place(session, topic, group, given, wanted)
    if wanted is not None:
        return _resume(place, request)
    returning = _returning(place)
    member = returning or _new_id(place)
    new = place.view() is None
    answer = session.later(request.dialect, blocking=True)
    try:
        membership = broker.groups.join(
            group,
            topic,
            member,
            wire=WIRE,
            assignor=Assignor.RANGE if new else None,
            first_generation=0,
            named_alone=group != DEFAULT_GROUP and broker.groups.topic_of(WIRE, group) in (None, topic),
            by=session.caller,
            done=answer.done,
        )
    except Invalid as error:
        raise Refused("invalid_member", f"reason={quote(error.message)}") from None
    view = place.view()
    assert view is not None, "whoever joins has a group"
    confirmed = session.state.confirmed
    if (
        returning is None or returning == given
    ):  # who came back by its base name may do so again until it has used the generation
        confirmed.mark(place.key, member, membership.generation)
    confirmed.keep(place.key, [known.id for known in view.members], broker.settings.groups_max)
    answer.body = _placed(member, membership)
    return None


def _returning(place: Place) -> str | None:
    """The member that this one already is (spec: cursus#joining-again).

    By its base name also one without partitions: Java's client joins anew every second while it has none.
    """
    view = place.view()
    if view is None:
        return None
    if place.session.state.broker.groups.has_member(place.group, place.topic, place.member):
        return place.member  # also one that nobody has missed yet
    confirmed = place.session.state.confirmed
    for member in view.members:
        known = confirmed.has(place.key, member.id, view.generation)
        if base_of(member.id) == place.member and not (known and member.partitions):
            return member.id
    return None


def _new_id(place: Place) -> str:
    """An id that no member has; the one that a member of this name has in the group's first topic, where it reads several."""
    view, groups = place.view(), place.session.state.broker.groups
    taken = frozenset(member.id for member in view.members) if view is not None else frozenset()
    bound = groups.topic_of(WIRE, place.group)
    first = groups.view(place.group, bound) if bound is not None and _may_see(place.session, bound) else None
    for one in first.members if first is not None else ():
        if base_of(one.id) == place.member and one.id not in taken:
            return one.id
    start = secrets.randbelow(SUFFIXES)
    for step in range(SUFFIXES):
        member = f"{place.member}-{(start + step) % SUFFIXES:04d}"
        if member not in taken:
            return member
    raise Refused("coordinator_error", f"reason={quote(f'too many members named {place.member}')}")


def _resume(place: Place, request: Request) -> Reply:
    """The member goes on where it was, if nothing has changed since."""
    view = place.view()
    if view is None or all(member.id != place.member for member in view.members):
        raise Refused("member_not_found", f"member={place.member} group={place.group}")
    return encoded(f"{_heard(place).decode()} resumed=true")


def _heard(place: Place) -> bytes:
    """A sign of life, answered with the member's place. Raises Refused."""
    assert place.generation is not None, "a sign of life names its generation"
    groups = place.session.state.broker.groups
    try:
        membership = groups.heartbeat(
            place.group, place.topic, place.member, place.generation, wire=WIRE, by=place.session.caller
        )
    except BrokerError as error:
        raise place.refused(error) from None
    place.session.state.confirmed.mark(place.key, place.member, membership.generation)
    return _placed(place.member, membership)


def _placed(member: str, membership: Membership) -> bytes:
    partitions = bracketed(membership.partitions)
    return encoded(f"OK generation={membership.generation} member={member} assignments={partitions}")


def sync(session: CursusSession, request: Request, /) -> Reply:
    """SYNC_GROUP: the assignment again."""
    return _heard(_member_place(session, request))


def heartbeat(session: CursusSession, request: Request, /) -> Reply:
    """HEARTBEAT."""
    place = _member_place(session, request)
    _heard(place)
    return encoded(f"OK member={place.member} generation={place.generation}")


def leave(session: CursusSession, request: Request, /) -> Reply | None:
    """LEAVE_GROUP; most clients give no generation, then it is not compared (spec: cursus#group-answers)."""
    place = _member_place(session, request, generation=False)
    answer = session.later(request.dialect, blocking=True)
    answer.body = encoded(f"OK group={place.group} member={place.member} left=true")
    try:
        session.state.broker.groups.leave(
            place.group,
            place.topic,
            place.member,
            place.generation,
            wire=WIRE,
            by=session.caller,
            done=answer.done,
        )
    except BrokerError as error:
        raise place.refused(error) from None
    return None


# Offsets


def commit_offset(session: CursusSession, request: Request, /) -> Reply | None:
    """COMMIT_OFFSET: fenced, and never back."""
    topic, partition = request.need("topic"), _number(request, "partition")
    group, offset = request.need("group"), _number(request, "offset")
    _check_topic(session, request, topic, group)
    place = _member_place(session, request)
    pairs = {partition: offset}
    if request.is_set("validate_only"):
        check_offsets(place, pairs, _single_regression)
        return b"OK validated=true"
    return _commit(request, place, pairs, _single_regression, b"OK")


def batch_commit(session: CursusSession, request: Request, /) -> Reply | None:
    """BATCH_COMMIT: all or nothing."""
    place = _member_place(session, request)
    pairs = read_pairs(request, place.group, place.topic)
    return _commit(request, place, pairs, _batch_regression, encoded(f"OK batched={len(pairs)}"))


def read_pairs(request: Request, group: str, topic: str) -> dict[int, int]:
    """The list ``P0:1,P1:2``, wherever it stands among the arguments; the letter may be missing (spec: cursus#group-answers). Raises
    Refused."""
    words = [word for word in request.words if "=" not in word]
    if request.dialect is not Dialect.MODERN:
        words = list(request.words[len(POSITIONS[request.name]) - 1 :]) or [""]
    if len(words) > 1:  # who divides the list by blanks must not think that all of it was stored
        raise Refused("invalid_batch_commit_entry", f"entry={quote(' '.join(words))}")
    entries = (words or request.words or ("",))[-1].split(",")
    if len(entries) > PARTITION_COUNT_MAX:
        raise Refused("invalid_batch_commit_entry", f"reason={quote(f'more than {PARTITION_COUNT_MAX} entries')}")
    pairs: dict[int, int] = {}
    for entry in entries:
        name, colon, text = entry.partition(":")
        if not colon:
            raise Refused("invalid_batch_commit_entry", f"entry={quote(entry)}")
        partition, offset = integer(name.removeprefix("P")), integer(text)
        if partition is None or not 0 <= partition < PARTITION_COUNT_MAX:
            raise Refused("invalid_partition", f"entry={quote(entry)}")
        if offset is None or offset < 0:
            raise Refused("invalid_offset", f"entry={quote(entry)}")
        if partition in pairs:
            raise Refused("duplicate_partition", f"partition={partition} group={group} topic={topic_word(topic)}")
        pairs[partition] = offset
    return pairs


Regression = Callable[[Place, int, int, int], str]
"""How a step back is told: of a place and partition, the current offset and the one given."""


def _single_regression(place: Place, partition: int, current: int, got: int) -> str:
    return f"offset regression group={place.group} topic={topic_word(place.topic)} partition={partition} current={current} got={got}"


def _batch_regression(place: Place, partition: int, current: int, got: int) -> str:
    return (
        f"offset regression for group={place.group} topic={topic_word(place.topic)} partition={partition}:"
        f" current={current} attempted={got}"
    )


def check_offsets(place: Place, pairs: Pairs, regression: Regression) -> None:
    """Whether the member may commit all this; counts as a sign of life. Raises Refused."""
    assert place.generation is not None, "a commit names its generation"
    groups, by = place.session.state.broker.groups, place.session.caller
    who = place.group, place.topic, place.member, place.generation
    try:
        owned = groups.heartbeat(*who, wire=WIRE, by=by).partitions
    except BrokerError as error:
        raise place.refused(error, next(iter(pairs), None)) from None
    foreign = pairs.keys() - set(owned)
    if foreign:
        raise place.not_owner(next(partition for partition in pairs if partition in foreign))
    place.session.state.confirmed.mark(place.key, place.member, place.generation)
    _check_forward(place, pairs, regression)


def _check_forward(place: Place, pairs: Pairs, regression: Regression) -> None:
    positions = place.session.state.broker.positions_in(place.topic, PositionKind.GROUP, place.group, pairs)
    for partition, offset in pairs.items():
        current = positions.get(partition)
        if current is not None and offset < current:
            reason = regression(place, partition, current, offset)
            raise Refused("offset_regression", f"reason={quote(reason)}")


def _commit(request: Request, place: Place, pairs: Pairs, regression: Regression, reply: bytes) -> Reply | None:
    check_offsets(place, pairs, regression)
    answer = place.session.later(request.dialect, blocking=True)
    answer.body = reply
    _store(place, pairs, answer)
    return None


def _store(place: Place, pairs: Pairs, answer: Answer) -> None:
    generation = -1 if place.generation is None else place.generation
    place.session.state.broker.commit_positions(
        place.topic,
        pairs,
        PositionKind.GROUP,
        place.group,
        generation=generation,
        by=place.session.caller,
        done=answer.done,
    )


def commit_unfenced(session: CursusSession, request: Request, /) -> Reply | None:
    """COMMIT of the positional dialect: nobody is asked who they are, but it goes forward only (spec: cursus#group-answers)."""
    topic, group = request.need("topic"), request.need("group")
    pairs = {_number(request, "partition"): _number(request, "offset")}
    _admit(session, topic, Action.OFFSET_COMMIT)
    _check_partitions(session, topic, pairs)
    place = Place(session, topic, group)
    _check_forward(place, pairs, _single_regression)
    answer = session.later(request.dialect, blocking=True)
    answer.body = b"OK"
    _store(place, pairs, answer)
    return None


def _check_partitions(session: CursusSession, name: str, pairs: Pairs) -> None:
    """Nobody owns what an unfenced commit names, so that it is there must be looked at. Raises Refused."""
    topic = session.state.broker.find_topic(name)
    if topic is None:
        raise Refused("topic_not_found", f"topic={topic_word(name)}")
    missing = pairs.keys() - range(len(topic.partitions))
    if missing:
        raise Refused("partition_not_found", f"partition={min(missing)}")


def fetch_offset(session: CursusSession, request: Request, /) -> Reply:
    """FETCH_OFFSET: 0 when nothing was committed."""
    topic = request.need("topic")
    partition = _number(request, "partition")
    group = request.need("group")
    _admit(session, topic, Action.OFFSET_FETCH)
    broker = session.state.broker
    offset = broker.position(topic, partition, PositionKind.GROUP, group)
    if offset is None and broker.groups.view(group, topic) is None:
        _check_topic(session, request, topic, group)
        if group != DEFAULT_GROUP and broker.groups.topic_of(WIRE, group) is None:
            raise Refused("group_not_found", f"group={group}")
    return encoded(f"OK offset={offset or 0}")


# Groups


def register(session: CursusSession, request: Request, /) -> Reply | None:
    """REGISTER_GROUP: the group belongs to this topic from now on."""
    topic, group = request.need("topic"), request.need("group")
    if session.state.broker.find_topic(topic) is None:
        raise Refused("topic_not_found", f"topic={topic_word(topic)}")
    return _register(
        session, request, topic, group, encoded(f"OK group={group} topic={topic_word(topic)} registered=true")
    )


def _register(session: CursusSession, request: Request, topic: str, group: str, reply: bytes) -> Reply | None:
    _admit(session, topic, Action.GROUP_CREATE)
    groups = session.state.broker.groups
    expected = groups.topic_of(WIRE, group)
    if expected is not None and expected != topic:
        if request.dialect is not Dialect.MODERN:  # the group reads one topic more
            return reply
        told = topic_word(expected) if _may_see(session, expected) else ""
        reason = f"topic mismatch (existing: {told}, requested: {topic_word(topic)})"
        raise Refused("register_group_failed", f"reason={quote(reason)}")
    if expected == topic or group == DEFAULT_GROUP:
        return reply
    answer = session.later(request.dialect, blocking=True)
    answer.body = reply
    try:
        groups.bind(WIRE, group, topic, by=session.caller, done=answer.done)
    except Invalid as error:
        raise Refused("register_group_failed", f"reason={quote(error.message)}", legacy=error.message) from None
    return None


def subscribe(session: CursusSession, request: Request, /) -> Reply | None:
    """SUBSCRIBE: registers the group, and starts no delivery; it never did (spec: cursus#subscribe)."""
    legacy = request.dialect is Dialect.LEGACY
    topic, group = request.options.get("topic", ""), request.options.get("group", "")
    if not topic:
        raise Refused("missing_topic", "command=SUBSCRIBE", legacy="missing topic name")
    if session.state.broker.find_topic(topic) is None:
        raise Refused(
            "topic_not_found", f"topic={topic_word(topic)}", legacy=f"topic '{topic_word(topic)}' does not exist"
        )
    if legacy:
        reply = f"{DONE} Subscribed to '{topic_word(topic)}'" + (f" with group '{group}'" if group else "")
    else:
        group = request.need("group")
        reply = f"OK group={group} topic={topic_word(topic)} registered=true"
    if not group:
        _admit(session, topic, Action.GROUP_CREATE)
        return encoded(reply)
    return _register(session, request, topic, group, encoded(reply))


def find_coordinator(session: CursusSession, request: Request, /) -> Reply:
    """FIND_COORDINATOR: always this broker."""
    if request.options.get("group"):
        kind = "group"
    elif any(request.options.get(key) for key in TRANSACTION_KEYS):
        kind = "transaction"
    else:
        raise Refused("missing_coordinator_key", "command=FIND_COORDINATOR")
    host, port = session.address
    return encoded(f"OK coordinator_id={COORDINATOR} coordinator_type={kind} host={host} port={port}")


def list_groups(session: CursusSession, request: Request, /) -> Reply | None:
    """LIST_GROUPS: those that any wire made, of topics that may be read, by name."""
    if request.arguments:
        raise Refused("unknown_command", f"command={quote(request.text)}")
    session.later(request.dialect, blocking=True).make(_list(session.broker, session.state.guard.acting))
    return None


def _list(broker: Broker, acting: Principal | None) -> Iterator[bytes]:
    """acting: who asked; by the time this runs others have been admitted."""
    bound = [(topic, name) for name, topic in broker.groups.bound(WIRE).items()]
    found: set[str] = set()
    for full_name, name in chain(broker.groups.pairs(), bound):
        if broker.access.permits(acting, Action.GROUP_DESCRIBE, broker.resource(full_name)):
            found.add(name)
        yield b""
    names = sorted(found, key=str.encode)
    yield encoded(f"OK count={len(names)} groups={','.join(names)}")


def status(session: CursusSession, request: Request, /) -> Reply:
    """GROUP_STATUS."""
    name = request.need("group")
    groups = session.state.broker.groups
    topic = groups.topic_of(WIRE, name) or min((of for of, other in groups.pairs() if other == name), default=None)
    if topic is None or not _may_see(session, topic):  # a group one may not know looks like one that is not there
        reason = f"group '{name}' not found"
        raise Refused("group_status_failed", f"reason={quote(reason)}")
    view = groups.view(name, topic) or GroupView(topic, name, 0, Assignor.RANGE, ())
    now_us = session.state.broker.clock.now_us()
    shown = {
        "status": "OK",
        "group_name": name,
        "topic_name": topic_word(topic),
        "state": "Stable" if view.members else "Dead",
        "generation": view.generation,
        "member_count": len(view.members),
        "partition_count": view.partition_count or session.state.broker.partition_count(topic),
        "members": [
            {
                "member_id": member.id,
                "last_heartbeat": _instant(now_us - round(member.idle_s * 1e6)),
                "assignments": member.partitions,
            }
            for member in sorted(view.members, key=lambda member: member.id.encode())
        ],
        "last_rebalance": NEVER if view.changed_at_us is None else _instant(view.changed_at_us),
    }
    return json.dumps(shown, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogateescape")


def _instant(time_us: int) -> str:
    return datetime.fromtimestamp(time_us / 1e6, UTC).isoformat().replace("+00:00", "Z")


COMMANDS: Final[Mapping[str, Command]] = {
    "JOIN_GROUP": Command(join, (Action.GROUP_JOIN,)),
    "SYNC_GROUP": Command(sync, (Action.GROUP_JOIN,)),
    "HEARTBEAT": Command(heartbeat, (Action.GROUP_JOIN,)),
    "LEAVE_GROUP": Command(leave, (Action.GROUP_JOIN,)),
    "COMMIT": Command(commit_unfenced, (Action.OFFSET_COMMIT,)),
    "COMMIT_OFFSET": Command(commit_offset, (Action.OFFSET_COMMIT,)),
    "BATCH_COMMIT": Command(batch_commit, (Action.OFFSET_COMMIT,)),
    "FETCH_OFFSET": Command(fetch_offset, (Action.OFFSET_FETCH,)),
    "FIND_COORDINATOR": Command(find_coordinator, (Action.GROUP_LIST,)),
    "REGISTER_GROUP": Command(register, (Action.GROUP_CREATE,)),
    "GROUP_STATUS": Command(status, (Action.GROUP_LIST,)),
    "LIST_GROUPS": Command(list_groups, (Action.GROUP_LIST,), alone=True),
    "SUBSCRIBE": Command(subscribe, (Action.GROUP_CREATE,)),
}
