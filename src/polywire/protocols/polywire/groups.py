"""Positions and groups on the `polywire` wire (protocols: polywire#44-groups).

Promises: each request is answered once, what changes something when it is written. Must not know: frames, sockets, how partitions are
dealt out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from heapq import nsmallest
from typing import TYPE_CHECKING, Final

from polywire.broker.actions import Action
from polywire.errors import BrokerError, ErrorCode, Invalid
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.arguments import check_name, find_partition, kind_of, level_of
from polywire.protocols.polywire.messages import Head, Verb
from polywire.protocols.polywire.replies import LongAnswer, ReplyOwner
from polywire.types import Assignor, Level, PositionKind

if TYPE_CHECKING:
    from polywire.broker.broker import Broker
    from polywire.broker.groups.coordinator import GroupView
    from polywire.protocols.polywire.auth import Admission

WIRE: Final = "polywire"
_ASSIGNORS: Final = {assignor.value: assignor for assignor in Assignor}

Grouped = (
    messages.Commit | messages.AskPosition | messages.Join | messages.Member | messages.AskGroups | messages.DeleteGroup
)
GROUPS_MAX: Final = 1_000  # page §3: of one answer
GROUP_ENTRIES_MAX: Final = 20_000  # members and positions of one answer, unless a single group has more


class GroupRequests:
    """Requests about positions and groups."""

    __slots__ = ("_admission", "_broker", "_session")

    def __init__(self, broker: Broker, session: ReplyOwner, admission: Admission) -> None:
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
                self._groups(correlation, request)
            case messages.DeleteGroup():
                done = partial(self._done, Verb.DELETE_GROUP, correlation, Head())
                self._broker.groups.delete(request.group, request.name, by=self._admission.caller, done=done)
                self._session.owe()

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
                by=self._admission.caller,
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
                by=self._admission.caller,
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
            by=self._admission.caller,
            level=Level.WRITTEN,
            done=done,
        )
        place.append(messages.Membership(membership.generation, list(membership.partitions)))
        self._session.owe()

    def _stay(self, verb: int, correlation: int, request: messages.Member) -> None:
        groups, by = self._broker.groups, self._admission.caller
        place = request.group, request.name, request.member, request.generation
        if verb == Verb.LEAVE:
            done = partial(self._done, Verb.LEAVE, correlation, Head())
            groups.leave(*place, wire=WIRE, by=by, done=done)
            self._session.owe()
            return
        ask = groups.sync if verb == Verb.SYNC else groups.heartbeat
        membership = ask(*place, wire=WIRE, by=by)
        self._session.answer(verb, correlation, messages.Membership(membership.generation, list(membership.partitions)))

    def _groups(self, correlation: int, request: messages.AskGroups) -> None:
        """Groups that have members or positions, by topic and name. Raises Invalid."""
        if request.after and len(request.after) != 2:
            raise Invalid(ErrorCode.INVALID_REQUEST, "after must name a topic and a group")
        listing = _Listing(self._broker, request, self._sees)
        LongAnswer(self._broker, self._session, Verb.GROUPS, correlation).make(listing.entries(), listing.answer)

    def _sees(self, full_name: str) -> bool:
        return self._admission.sees(self._broker.resource(full_name), Action.GROUP_DESCRIBE)

    def _done(self, verb: Verb, correlation: int, head: Head, _: int, error: BrokerError | None) -> None:
        if error is None:
            self._session.settle(verb, correlation, head)
        else:
            self._session.settle_error(verb, correlation, error)


class _Listing:
    """One GROUPS under way. Invariant: ``_first`` holds the first of what was found so far; ``wanted`` counts all of it."""

    __slots__ = ("_broker", "_first", "_request", "_sees", "wanted")

    def __init__(self, broker: Broker, request: messages.AskGroups, sees: Callable[[str], bool]) -> None:
        self._broker = broker
        self._request = request
        self._sees = sees
        self._first: set[tuple[str, str]] = set()
        self.wanted = 0

    def entries(self) -> Iterator[messages.GroupEntry | None]:
        """The groups of the answer; nothing is yielded for each that is looked at."""
        keys = self._broker.groups.pairs()
        for _ in self._scan(keys):
            yield None
        known = set(keys)
        for _ in self._scan(key for key in self._broker.position_owners(PositionKind.GROUP) if key not in known):
            yield None
        room = GROUP_ENTRIES_MAX
        for key in sorted(self._first)[:GROUPS_MAX]:
            view = self._broker.groups.view(key[1], key[0])
            owner = self._broker.access.name_of(self._broker.groups.owner(*key))
            entry = _entry(key, view, self._broker.positions_in(key[0], PositionKind.GROUP, key[1]), owner)
            room -= len(entry.members) + len(entry.positions)
            if room < 0 and room + len(entry.members) + len(entry.positions) < GROUP_ENTRIES_MAX:
                break  # not its first
            yield entry

    def answer(self, entries: list[messages.GroupEntry]) -> messages.GroupList:
        """What is told of these, and whether there are more."""
        return messages.GroupList(entries, len(entries) < self.wanted)

    def _scan(self, keys: Iterable[tuple[str, str]]) -> Iterator[None]:
        group, after = self._request.group, tuple(self._request.after)
        for key in keys:
            if group in (None, key[1]) and key > after and self._sees(key[0]):
                self.wanted += 1
                self._first.add(key)
                if len(self._first) > 4 * GROUPS_MAX:
                    self._first = set(nsmallest(GROUPS_MAX, self._first))
            yield None


def _entry(
    key: tuple[str, str], view: GroupView | None, positions: Mapping[int, int], owner: str
) -> messages.GroupEntry:
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
        owner=owner,
    )
