"""Requests about consumer groups and offsets in the `polywire` protocol (spec: polywire#groups).

The response to a change is sent when the change is in the journal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from heapq import nsmallest
from typing import TYPE_CHECKING, Final

from polywire.broker.owners import ITSELF, LINKS_CALLER
from polywire.broker.permissions import Action
from polywire.errors import BrokerError, ErrorCode, Invalid
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.arguments import check_name, find_partition, kind_of, level_of, partition_of
from polywire.protocols.polywire.messages import Head, Verb
from polywire.protocols.polywire.replies import LongAnswer, ReplyOwner
from polywire.types import Assignor, Level, PositionKind

if TYPE_CHECKING:
    from polywire.broker import changes
    from polywire.broker.groups.group import GroupView
    from polywire.protocols.polywire.context import PolywireBroker

WIRE: Final = "polywire"
_ASSIGNORS: Final = {assignor.value: assignor for assignor in Assignor}

GROUPS_MAX: Final = 1_000  # groups in one response (spec: polywire#limits)
GROUP_ENTRIES_MAX: Final = 20_000  # members and offsets in one response; a single group may have more


def commit(session: ReplyOwner, correlation: int, request: messages.Commit, _: memoryview) -> None:
    """COMMIT: commit an offset. Raises BrokerError if it is rejected immediately."""
    broker, by = session.broker, session.admission.caller
    if by.owner == LINKS_CALLER.owner:  # the offsets of a group belong to its users, not to the link that copies them
        by = ITSELF
    check_name("owner", request.owner)
    find_partition(broker, request.name, request.partition)
    level = level_of(request.level)
    done = partial(_done, session, Verb.COMMIT, correlation)
    if request.member:
        if kind_of(request.kind) is not PositionKind.GROUP:
            raise Invalid(ErrorCode.INVALID_REQUEST, "a commit with a member needs a group")
        broker.groups.commit(
            request.owner,
            request.name,
            request.member,
            request.generation,
            request.partition,
            request.offset,
            wire=WIRE,
            refresh=True,
            by=by,
            level=level,
            done=done,
        )
    else:
        broker.commit_position(
            request.name,
            request.partition,
            kind_of(request.kind),
            request.owner,
            request.offset,
            by=by,
            level=level,
            done=done,
        )
    session.owe()


def check_offset_count(broker: PolywireBroker, groups: Sequence[messages.GroupOffsets]) -> None:
    """Raise Invalid for more offsets or groups than one transaction may commit, or for a group that occurs twice."""
    settings = broker.settings
    count = sum([len(group.offsets) for group in groups])
    if count > settings.transaction_positions_max or len(groups) > settings.transaction_scopes_max:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"too many offsets or groups in one publish offsets={count} limit={settings.transaction_positions_max}"
            f" groups={len(groups)} limit={settings.transaction_scopes_max}",
        )
    if len({(group.group, group.name) for group in groups}) < len(groups):
        raise Invalid(ErrorCode.INVALID_REQUEST, "a publish has two sets of offsets of the same group and topic")


def checked_offsets(session: ReplyOwner, groups: Sequence[messages.GroupOffsets]) -> Iterator[changes.PositionsStored]:
    """Check the offsets that a publish commits, and yield the changes that store them. Raises BrokerError."""
    broker, by = session.broker, session.admission.caller
    for group in groups:
        check_name("group", group.group)
        topic = broker.topic(group.name)
        for number in group.offsets:
            partition_of(topic, number)
        if group.member:
            broker.groups.check_member(
                group.group, group.name, group.member, group.generation, group.offsets, wire=WIRE, refresh=True, by=by
            )
        generation = group.generation if group.member else -1
        yield broker.positions_stored(
            group.name, group.offsets, PositionKind.GROUP, group.group, generation=generation, by=by
        )


def ask_position(session: ReplyOwner, correlation: int, request: messages.AskPosition, _: memoryview) -> None:
    kind = kind_of(request.kind)
    offset = session.broker.position(request.name, request.partition, kind, request.owner)
    session.answer(Verb.POSITION, correlation, messages.Position(offset))


def join(session: ReplyOwner, correlation: int, request: messages.Join, _: memoryview) -> None:
    if request.assignor is not None and request.assignor not in _ASSIGNORS:
        raise Invalid(ErrorCode.INVALID_REQUEST, f"unknown assignor assignor={request.assignor!r}")
    session.broker.topic(request.name)
    place: list[messages.Membership] = []

    def done(result: int | BrokerError) -> None:
        if isinstance(result, BrokerError):
            session.respond_error(Verb.JOIN, correlation, result)
        else:
            session.respond(Verb.JOIN, correlation, place[0])

    membership = session.broker.groups.join(
        request.group,
        request.name,
        request.member,
        wire=WIRE,
        assignor=None if request.assignor is None else _ASSIGNORS[request.assignor],
        by=session.admission.caller,
        level=Level.WRITTEN,
        done=done,
    )
    place.append(messages.Membership(membership.generation, list(membership.partitions)))
    session.owe()


def sync(session: ReplyOwner, correlation: int, request: messages.Member, _: memoryview) -> None:
    membership = session.broker.groups.sync(*_membership_of(request), wire=WIRE, by=session.admission.caller)
    session.answer(Verb.SYNC, correlation, messages.Membership(membership.generation, list(membership.partitions)))


def heartbeat(session: ReplyOwner, correlation: int, request: messages.Member, _: memoryview) -> None:
    membership = session.broker.groups.heartbeat(*_membership_of(request), wire=WIRE, by=session.admission.caller)
    session.answer(Verb.HEARTBEAT, correlation, messages.Membership(membership.generation, list(membership.partitions)))


def leave(session: ReplyOwner, correlation: int, request: messages.Member, _: memoryview) -> None:
    done = partial(_done, session, Verb.LEAVE, correlation)
    session.broker.groups.leave(*_membership_of(request), wire=WIRE, by=session.admission.caller, done=done)
    session.owe()


def _membership_of(request: messages.Member) -> tuple[str, str, str, int]:
    return request.group, request.name, request.member, request.generation


def list_groups(session: ReplyOwner, correlation: int, request: messages.AskGroups, _: memoryview) -> None:
    """GROUPS: list groups that have members or committed offsets, sorted by topic and name.

    Raises Invalid for a malformed ``after``.
    """
    if request.after and len(request.after) != 2:
        raise Invalid(ErrorCode.INVALID_REQUEST, "after must contain a topic and a group")
    listing = _Listing(session.broker, request, partial(_sees, session))
    LongAnswer(session, Verb.GROUPS, correlation).make(listing.entries(), listing.response)


def _sees(session: ReplyOwner, full_name: str) -> bool:
    return session.admission.sees(session.broker.resource(full_name), Action.GROUP_DESCRIBE)


def delete(session: ReplyOwner, correlation: int, request: messages.DeleteGroup, _: memoryview) -> None:
    done = partial(_done, session, Verb.DELETE_GROUP, correlation)
    session.broker.groups.delete(request.group, request.name, by=session.admission.caller, done=done)
    session.owe()


def _done(session: ReplyOwner, verb: Verb, correlation: int, result: int | BrokerError) -> None:
    if isinstance(result, BrokerError):
        session.respond_error(verb, correlation, result)
    else:
        session.respond(verb, correlation, Head())


class _Listing:
    """A GROUPS request in progress.

    Attributes:
        matching: number of groups that match the request.
    """

    __slots__ = ("_broker", "_first_page", "_request", "_sees", "matching")

    def __init__(self, broker: PolywireBroker, request: messages.AskGroups, sees: Callable[[str], bool]) -> None:
        self._broker = broker
        self._request = request
        self._sees = sees
        self._first_page: set[tuple[str, str]] = set()  # the matching groups that sort first
        self.matching = 0

    def entries(self) -> Iterator[messages.GroupEntry | None]:
        """Yield the groups of the response. Also yields None now and then, so that other requests can run."""
        keys = self._broker.groups.pairs()
        for _ in self._scan(keys):
            yield None
        known = set(keys)
        for _ in self._scan(key for key in self._broker.position_owners(PositionKind.GROUP) if key not in known):
            yield None
        room = GROUP_ENTRIES_MAX
        for key in sorted(self._first_page)[:GROUPS_MAX]:
            view = self._broker.groups.view(key[1], key[0])
            owner = self._broker.access.name_of(self._broker.groups.owner(*key))
            entry = _entry(key, view, self._broker.positions_in(key[0], PositionKind.GROUP, key[1]), owner)
            room -= len(entry.members) + len(entry.positions)
            if room < 0 and room + len(entry.members) + len(entry.positions) < GROUP_ENTRIES_MAX:
                break  # this group is beyond the limit
            yield entry

    def response(self, entries: list[messages.GroupEntry]) -> messages.GroupList:
        """Return the response with these groups."""
        return messages.GroupList(entries, len(entries) < self.matching)

    def _scan(self, keys: Iterable[tuple[str, str]]) -> Iterator[None]:
        group, after = self._request.group, tuple(self._request.after)
        for key in keys:
            if group in (None, key[1]) and key > after and self._sees(key[0]):
                self.matching += 1
                self._first_page.add(key)
                if len(self._first_page) > 4 * GROUPS_MAX:
                    self._first_page = set(nsmallest(GROUPS_MAX, self._first_page))
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
