"""Positions and groups on the `polywire` wire (docs/protocols/polywire.md §4.4).

Promises: each request is answered once, what changes something when it is written. Must not know: frames, sockets, how partitions are
dealt out.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from heapq import nsmallest
from typing import TYPE_CHECKING, Final

from polywire.broker.permissions import Permission
from polywire.errors import BrokerError, ErrorCode, Invalid
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.messages import Head, Verb
from polywire.protocols.polywire.words import Answering, check_name, find_partition, kind_of, level_of
from polywire.types import Assignor, Level, PositionKind

if TYPE_CHECKING:
    from polywire.broker.broker import Broker
    from polywire.broker.groups.coordinator import GroupView
    from polywire.protocols.polywire.admission import Admission

WIRE: Final = "polywire"
_ASSIGNORS: Final = {assignor.value: assignor for assignor in Assignor}

Grouped = messages.Commit | messages.AskPosition | messages.Join | messages.Member | messages.AskGroups
GROUPS_MAX: Final = 1_000  # page §3: of one answer
GROUP_ENTRIES_MAX: Final = 20_000  # members and positions of one answer, unless a single group has more


class Grouping:
    """Requests about positions and groups."""

    __slots__ = ("_admission", "_broker", "_session")

    def __init__(self, broker: Broker, session: Answering, admission: Admission) -> None:
        self._admission: Final = admission
        self._broker: Final = broker
        self._session: Final = session

    def handle(self, verb: int, correlation: int, request: Grouped) -> None:
        """Carry out one request. Raises BrokerError when it is refused at once."""
        match request:
            case messages.Commit():
                self._commit(correlation, request)
            case messages.AskPosition():
                kind = kind_of(request.kind)
                offset = self._broker.position(request.name, request.partition, kind, request.owner)
                self._session.answer(verb, correlation, messages.Position(offset))
            case messages.Join():
                self._join(correlation, request)
            case messages.Member():
                self._stay(verb, correlation, request)
            case messages.AskGroups():
                self._session.answer(verb, correlation, self._groups(request))

    def _commit(self, correlation: int, request: messages.Commit) -> None:
        check_name("owner", request.owner)
        find_partition(self._broker, request.name, request.partition)
        level = level_of(request.level)
        done = partial(self._done, Verb.COMMIT, correlation, Head())
        if request.member:
            if kind_of(request.kind) is not PositionKind.GROUP:
                raise Invalid(ErrorCode.INVALID_REQUEST, "a commit with a member is a group's")
            self._broker.groups.commit(
                request.owner,
                request.name,
                request.member,
                request.generation,
                request.partition,
                request.offset,
                wire=WIRE,
                refresh=True,
                level=level,
                done=done,
            )
        else:
            self._broker.commit_position(
                request.name,
                request.partition,
                kind_of(request.kind),
                request.owner,
                request.offset,
                level=level,
                done=done,
            )
        self._session.owe()

    def _join(self, correlation: int, request: messages.Join) -> None:
        if request.assignor is not None and request.assignor not in _ASSIGNORS:
            raise Invalid(ErrorCode.INVALID_REQUEST, f"unknown assignor assignor={request.assignor!r}")
        self._broker.topic(request.name)
        place: list[messages.Membership] = []

        def done(_: int, error: BrokerError | None) -> None:
            if error is None:
                self._session.settle(Verb.JOIN, correlation, place[0])
            else:
                self._session.settle_error(Verb.JOIN, correlation, error)

        membership = self._broker.groups.join(
            request.group,
            request.name,
            request.member,
            wire=WIRE,
            assignor=None if request.assignor is None else _ASSIGNORS[request.assignor],
            level=Level.WRITTEN,
            done=done,
        )
        place.append(messages.Membership(membership.generation, list(membership.partitions)))
        self._session.owe()

    def _stay(self, verb: int, correlation: int, request: messages.Member) -> None:
        groups = self._broker.groups
        if verb == Verb.LEAVE:
            done = partial(self._done, Verb.LEAVE, correlation, Head())
            groups.leave(request.group, request.name, request.member, request.generation, wire=WIRE, done=done)
            self._session.owe()
            return
        ask = groups.sync if verb == Verb.SYNC else groups.heartbeat
        membership = ask(request.group, request.name, request.member, request.generation, wire=WIRE)
        self._session.answer(verb, correlation, messages.Membership(membership.generation, list(membership.partitions)))

    def _groups(self, request: messages.AskGroups) -> messages.GroupList:
        """Groups that have members or positions, by topic and name."""
        if request.after and len(request.after) != 2:
            raise Invalid(ErrorCode.INVALID_REQUEST, "after must name a topic and a group")
        after = tuple(request.after)
        views = {(view.topic, view.name): view for view in self._broker.groups.views()}
        positions = self._broker.position_owners(PositionKind.GROUP)
        wanted = [
            key
            for key in views.keys() | positions.keys()
            if request.group in (None, key[1]) and key > after and self._admission.sees(key[0], Permission.GROUP)
        ]
        chosen = nsmallest(GROUPS_MAX, wanted)
        entries: list[messages.GroupEntry] = []
        room = GROUP_ENTRIES_MAX
        for key in chosen:
            entry = _entry(key, views.get(key), positions.get(key, {}))
            room -= len(entry.members) + len(entry.positions)
            if entries and room < 0:
                break
            entries.append(entry)
        return messages.GroupList(entries, len(entries) < len(wanted))

    def _done(self, verb: Verb, correlation: int, head: Head, _: int, error: BrokerError | None) -> None:
        if error is None:
            self._session.settle(verb, correlation, head)
        else:
            self._session.settle_error(verb, correlation, error)


def _entry(key: tuple[str, str], view: GroupView | None, positions: Mapping[int, int]) -> messages.GroupEntry:
    members = () if view is None else view.members
    return messages.GroupEntry(
        name=key[0],
        group=key[1],
        generation=-1 if view is None else view.generation,
        assignor=None if view is None else view.assignor.value,
        members=[
            messages.MemberEntry(member.id, member.wire, int(member.idle_s * 1000), list(member.partitions))
            for member in members
        ],
        positions=[[partition, offset] for partition, offset in sorted(positions.items())],
    )
