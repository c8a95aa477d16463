"""Commands of consumer groups (spec: cursus#groups, cursus#group-requests, cursus#subscribe).

The broker's coordinator implements groups for all protocols. In Cursus, a client that rejoins remains the same member,
although it sends a new id.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from itertools import chain
from typing import Final

import msgspec

from polywire.broker.access import Principal
from polywire.broker.api import Pending
from polywire.broker.groups.group import GroupView, Membership
from polywire.broker.permissions import Action
from polywire.errors import BrokerError, ErrorCode, Invalid, Unavailable
from polywire.protocols.cursus.context import COORDINATOR, WIRE, CursusBroker, GroupKey
from polywire.protocols.cursus.errors import refused
from polywire.protocols.cursus.messages import (
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
from polywire.protocols.cursus.session import Command, CursusSession, Reply
from polywire.protocols.cursus.topics import DONE
from polywire.types import Assignor, TopicName

SUFFIXES: Final = 10_000  # member ids end in four digits (spec: cursus#group-model)
TRANSACTION_KEYS: Final = ("transactional_id", "txn", "transaction")
REJOIN: Final = "hint=REBALANCE_REQUIRED"
NEVER: Final = "0001-01-01T00:00:00Z"


class GroupRequest(msgspec.Struct, frozen=True):
    """A request of a group member. The generation is None if the request has none."""

    session: CursusSession
    topic: str
    group: str
    member: str = ""
    generation: int | None = None

    @property
    def key(self) -> GroupKey:
        return self.topic, self.group

    def view(self) -> GroupView | None:
        return self.session.state.local.groups.view(self.group, self.topic)

    def refused(self, error: BrokerError, partition: int | None = None) -> Refused:
        """Return the Cursus error for an error of the coordinator.

        Cursus reports an unknown member before a stale generation (spec: cursus#group-model).
        """
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
        """Return the word by which clients of the older protocol version recognise that they must rejoin.

        A member that leaves sends no generation and gets no such word, because it will not rejoin.
        """
        rejoins = self.session.spoken is Dialect.POSITIONAL and self.generation is not None
        return f" {REJOIN}" if rejoins else ""

    def not_owner(self, partition: int | None) -> Refused:
        facts = f"member={self.member} group={self.group} generation={self.generation}"
        return Refused("NOT_OWNER", f"partition={partition} {facts}")

    def stale(self, current: int) -> Refused:
        """Return the error for a fenced member, with the word by which clients recognise it (spec: cursus#fencing)."""
        facts = f"current={current} requested={self.generation} group={self.group} member={self.member}"
        return Refused("GEN_MISMATCH", f"{facts} {REJOIN}")


# Arguments


def number(request: Request, key: str) -> int:
    """Return a required number of at least 0. Raises Refused ``missing_<key>`` or ``invalid_<key>``."""
    value = integer(request.need(key))
    if value is None or value < 0:
        raise Refused(f"invalid_{key}", f"command={request.name}" if key == "generation" else "")
    return value


def admit(session: CursusSession, topic: str, action: Action) -> None:
    """Raise Refused if the client may not perform the action on the topic.

    It then may not use the topic's groups either.
    """
    found = session.state.local.find_topic(topic)
    if found is not None:
        session.state.guard.admit_topic(session, found, action)


def _may_see(session: CursusSession, topic: str) -> bool:
    resource = session.state.broker.resource(topic)
    return session.state.guard.admits_topic(session, resource, Action.GROUP_DESCRIBE)


def check_topic(session: CursusSession, request: Request, topic: str, group: str) -> None:
    """Raise Refused if the group already reads another topic: for current clients, a group has only one topic.

    The group that clients use by default is exempt.
    """
    if request.dialect is not Dialect.MODERN:
        return
    expected = session.state.local.groups.bound_to(WIRE, group)
    if expected is not None and expected != topic:
        expected_word = topic_word(expected) if _may_see(session, expected) else ""
        raise Refused("topic_not_assigned_to_group", f"expected={expected_word} actual={topic_word(topic)}")


def member_request(session: CursusSession, request: Request, *, generation: bool = True) -> GroupRequest:
    topic, group, member = (request.need(key) for key in ("topic", "group", "member"))
    wanted = number(request, "generation") if generation or request.options.get("generation") else None
    admit(session, topic, Action.GROUP_JOIN)
    check_topic(session, request, topic, group)
    return GroupRequest(session, topic, group, _member_id(session, request, topic, group, member), wanted)


def _member_id(session: CursusSession, request: Request, topic: str, group: str, member: str) -> str:
    """Return the member's id.

    Older clients may send the name with which the member joined instead (spec: cursus#answers-by-dialect).
    """
    view = session.state.local.groups.view(group, topic)
    if view is None or request.dialect is Dialect.MODERN:
        return member
    ids = [known.id for known in view.members]
    if member in ids:
        return member
    if request.options.get("consumer") in ids:
        return request.options["consumer"]
    return next((known for known in ids if base_of(known) == member), member)


def base_of(member: str) -> str:
    """Return the name with which a member joined: its id without the suffix."""
    base, dash, digits = member.rpartition("-")
    return base if dash and len(digits) == 4 and digits.isascii() and digits.isdigit() else member


# Membership


def join(session: CursusSession, request: Request, /) -> Reply | None:
    """JOIN_GROUP: add a new member, let a member continue after a reconnect, or let a fenced member rejoin."""
    topic, group, given = (request.need(key) for key in ("topic", "group", "member"))
    wanted = number(request, "generation") if request.options.get("generation") else None
    broker = session.state.local
    if broker.find_topic(topic) is None:
        raise Refused("topic_not_found", f"topic={topic_word(topic)}")
    admit(session, topic, Action.GROUP_JOIN)
    check_topic(session, request, topic, group)
    group_request = GroupRequest(session, topic, group, given, wanted)
    if wanted is not None:
        return _resume(group_request, request)
    returning = _continued_member(group_request)
    member = returning or _new_id(group_request)
    new = group_request.view() is None
    answer = session.later(request.dialect, blocking=True)
    try:
        membership = broker.groups.join(
            group,
            topic,
            member,
            wire=WIRE,
            assignor=Assignor.RANGE if new else None,
            first_generation=0,
            named_alone=group != DEFAULT_GROUP and broker.groups.bound_to(WIRE, group) in (None, topic),
            by=session.caller,
            done=answer.done,
        )
    except Invalid as error:
        raise Refused("invalid_member", f"reason={quote(error.message)}") from None
    view = group_request.view()
    assert view is not None, "a member that joined has a group"
    used = session.state.generations_used
    if (
        returning is None or returning == given
    ):  # a member that returned under its base name may do so again until it has used the generation
        used.mark(group_request.key, member, membership.generation)
    used.retain(group_request.key, [known.id for known in view.members], broker.settings.groups_max)
    answer.body = _format_membership(member, membership)
    return None


def _continued_member(group_request: GroupRequest) -> str | None:
    """Return the id of the existing member that sends JOIN_GROUP again; None for a new member.

    A request with the name of a member without partitions counts as sent by that member: Java's client joins again every
    second while it has no partitions (spec: cursus#joining-again).
    """
    view = group_request.view()
    if view is None:
        return None
    if group_request.session.state.local.groups.has_member(
        group_request.group, group_request.topic, group_request.member
    ):
        return group_request.member  # also a member that has expired but was not removed yet
    used = group_request.session.state.generations_used
    for member in view.members:
        known = used.has(group_request.key, member.id, view.generation)
        if base_of(member.id) == group_request.member and not (known and member.partitions):
            return member.id
    return None


def _new_id(group_request: GroupRequest) -> str:
    """Return an unused id for a new member, or the id that the member has in the group's first topic."""
    view, groups = group_request.view(), group_request.session.state.local.groups
    taken = frozenset(member.id for member in view.members) if view is not None else frozenset()
    bound = groups.topic_of(WIRE, group_request.group)
    first = (
        groups.view(group_request.group, bound)
        if bound is not None and _may_see(group_request.session, bound)
        else None
    )
    for first_member in first.members if first is not None else ():
        if base_of(first_member.id) == group_request.member and first_member.id not in taken:
            return first_member.id
    start = secrets.randbelow(SUFFIXES)
    for step in range(SUFFIXES):
        member = f"{group_request.member}-{(start + step) % SUFFIXES:04d}"
        if member not in taken:
            return member
    raise Refused("coordinator_error", f"reason={quote(f'too many members named {group_request.member}')}")


def _resume(group_request: GroupRequest, request: Request) -> Reply:
    """Let a member continue if its assignment has not changed. Raises Refused otherwise."""
    view = group_request.view()
    if view is None or all(member.id != group_request.member for member in view.members):
        raise Refused("member_not_found", f"member={group_request.member} group={group_request.group}")
    return encoded(f"{_record_heartbeat(group_request).decode()} resumed=true")


def _record_heartbeat(group_request: GroupRequest) -> bytes:
    """Record a heartbeat, and return the response with the member's partitions.

    Raises Refused if the member is unknown or fenced.
    """
    assert group_request.generation is not None, "a heartbeat has a generation"
    groups = group_request.session.state.local.groups
    try:
        membership = groups.heartbeat(
            group_request.group,
            group_request.topic,
            group_request.member,
            group_request.generation,
            wire=WIRE,
            by=group_request.session.caller,
        )
    except BrokerError as error:
        raise group_request.refused(error) from None
    group_request.session.state.generations_used.mark(group_request.key, group_request.member, membership.generation)
    return _format_membership(group_request.member, membership)


def _format_membership(member: str, membership: Membership) -> bytes:
    partitions = bracketed(membership.partitions)
    return encoded(f"OK generation={membership.generation} member={member} assignments={partitions}")


def sync(session: CursusSession, request: Request, /) -> Reply:
    return _record_heartbeat(member_request(session, request))


def heartbeat(session: CursusSession, request: Request, /) -> Reply:
    group_request = member_request(session, request)
    _record_heartbeat(group_request)
    return encoded(f"OK member={group_request.member} generation={group_request.generation}")


def leave(session: CursusSession, request: Request, /) -> Reply | None:
    """LEAVE_GROUP: remove a member.

    The generation is compared only if the client sends one; most do not (spec: cursus#group-answers).
    """
    group_request = member_request(session, request, generation=False)
    answer = session.later(request.dialect, blocking=True)
    answer.body = encoded(f"OK group={group_request.group} member={group_request.member} left=true")
    try:
        session.state.local.groups.leave(
            group_request.group,
            group_request.topic,
            group_request.member,
            group_request.generation,
            wire=WIRE,
            by=session.caller,
            done=answer.done,
        )
    except BrokerError as error:
        raise group_request.refused(error) from None
    return None


# Groups


def register(session: CursusSession, request: Request, /) -> Reply | None:
    topic, group = request.need("topic"), request.need("group")
    if session.state.local.find_topic(topic) is None:
        raise Refused("topic_not_found", f"topic={topic_word(topic)}")
    return _register(
        session, request, topic, group, encoded(f"OK group={group} topic={topic_word(topic)} registered=true")
    )


def _register(session: CursusSession, request: Request, topic: str, group: str, reply: bytes) -> Reply | None:
    admit(session, topic, Action.GROUP_CREATE)
    groups = session.state.local.groups
    expected = groups.bound_to(WIRE, group)
    if expected is not None and expected != topic:
        if request.dialect is not Dialect.MODERN:  # the group then reads one more topic
            return reply
        expected_word = topic_word(expected) if _may_see(session, expected) else ""
        reason = f"topic mismatch (existing: {expected_word}, requested: {topic_word(topic)})"
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
    """SUBSCRIBE: register the group. No records are pushed (spec: cursus#subscribe)."""
    legacy = request.dialect is Dialect.LEGACY
    topic, group = request.options.get("topic", ""), request.options.get("group", "")
    if not topic:
        raise Refused("missing_topic", "command=SUBSCRIBE", legacy="missing topic name")
    if session.state.local.find_topic(topic) is None:
        raise Refused(
            "topic_not_found", f"topic={topic_word(topic)}", legacy=f"topic '{topic_word(topic)}' does not exist"
        )
    if legacy:
        reply = f"{DONE} Subscribed to '{topic_word(topic)}'" + (f" with group '{group}'" if group else "")
    else:
        group = request.need("group")
        reply = f"OK group={group} topic={topic_word(topic)} registered=true"
    if not group:
        admit(session, topic, Action.GROUP_CREATE)
        return encoded(reply)
    return _register(session, request, topic, group, encoded(reply))


def find_coordinator(session: CursusSession, request: Request, /) -> Reply:
    """FIND_COORDINATOR: return this broker, which coordinates all groups."""
    if request.options.get("group"):
        kind = "group"
    elif any(request.options.get(key) for key in TRANSACTION_KEYS):
        kind = "transaction"
    else:
        raise Refused("missing_coordinator_key", "command=FIND_COORDINATOR")
    host, port = session.address
    return encoded(f"OK coordinator_id={COORDINATOR} coordinator_type={kind} host={host} port={port}")


def list_groups(session: CursusSession, request: Request, /) -> Reply | None:
    """LIST_GROUPS: list the names of groups whose topics the client may read, whichever protocol the members use."""
    if request.arguments:
        raise Refused("unknown_command", f"command={quote(request.text)}")
    broker = session.state.broker
    session.state.require_latest()
    pairs = broker.groups.pairs()
    bound = [(topic, name) for name, topic in broker.groups.bound(WIRE).items()]
    names = _list(broker, session.state.guard.acting, chain(pairs, bound))
    session.later(request.dialect, blocking=True).make(names)
    return None


def _list(broker: CursusBroker, acting: Principal | None, pairs: Iterable[tuple[str, str]]) -> Iterator[bytes]:
    """Yield the response with the names of groups.

    Before it, empty bytes are yielded, so that other requests can run. ``acting`` is the user of the request: the
    connection may have begun other requests meanwhile.
    """
    found: set[str] = set()
    for full_name, name in pairs:
        try:
            resource = broker.resource(full_name)
        except (Pending, Unavailable):  # the topic was created in another process just now
            resource = TopicName.parse(full_name)
        if broker.access.permits(acting, Action.GROUP_DESCRIBE, resource):
            found.add(name)
        yield b""
    names = sorted(found, key=str.encode)
    yield encoded(f"OK count={len(names)} groups={','.join(names)}")


def status(session: CursusSession, request: Request, /) -> Reply:
    name = request.need("group")
    broker, groups = session.state.broker, session.state.broker.groups
    session.state.require_latest()
    topic = groups.bound_to(WIRE, name) or min((of for of, other in groups.pairs() if other == name), default=None)
    if topic is None or not _may_see(session, topic):  # a group that must not be disclosed is reported as missing
        reason = f"group '{name}' not found"
        raise Refused("group_status_failed", f"reason={quote(reason)}")
    view = groups.view(name, topic) or GroupView(topic, name, 0, Assignor.RANGE, ())
    now_us = broker.clock.now_us()
    shown = {
        "status": "OK",
        "group_name": name,
        "topic_name": topic_word(topic),
        "state": "Stable" if view.members else "Dead",
        "generation": view.generation,
        "member_count": len(view.members),
        "partition_count": view.partition_count or broker.partition_count(topic),
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


COMMANDS: Final = (
    Command("JOIN_GROUP", join, (Action.GROUP_JOIN,)),
    Command("SYNC_GROUP", sync, (Action.GROUP_JOIN,)),
    Command("HEARTBEAT", heartbeat, (Action.GROUP_JOIN,)),
    Command("LEAVE_GROUP", leave, (Action.GROUP_JOIN,)),
    Command("FIND_COORDINATOR", find_coordinator, (Action.GROUP_LIST,)),
    Command("REGISTER_GROUP", register, (Action.GROUP_CREATE,)),
    Command("GROUP_STATUS", status, (Action.GROUP_LIST,)),
    Command("LIST_GROUPS", list_groups, (Action.GROUP_LIST,), alone=True),
    Command("SUBSCRIBE", subscribe, (Action.GROUP_CREATE,)),
)
