"""All classic groups in which the broker assigns partitions; their work is done in slices.

A group's assignments wait until all of its members have memberships; other groups are not delayed. A group that no
longer shares a topic with other protocols removes its memberships itself (concepts: groups#one-group-for-all).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container
from functools import partial
from typing import Final

from polywire.broker.groups.classic import ClassicGroup, Phase
from polywire.broker.groups.classic_sharing import Sharing
from polywire.broker.groups.coordinator import Coordinator
from polywire.broker.groups.seats import Seats
from polywire.broker.owners import Caller
from polywire.broker.sliced import SlicedWork
from polywire.clock import Clock
from polywire.errors import ErrorCode, Missing
from polywire.log.base import Loop

RETRY_S: Final = 1.0  # after a failed write, usually because the disk was full


class Sharings:
    """The classic groups of one broker that are shared with other protocols.

    Invariant: ``_shared`` has the outstanding work of every group that ``is_shared`` or has memberships left.
    ``_working`` has the groups whose work is queued in ``sliced``.
    """

    __slots__ = ("_clock", "_coordinator", "_loop", "_on_seated", "_seats", "_shared", "_sliced", "_table", "_working")

    def __init__(
        self,
        *,
        seats: Seats,
        coordinator: Coordinator,
        table: dict[str, ClassicGroup],
        sliced: SlicedWork,
        loop: Loop,
        clock: Clock,
        on_seated: Callable[[str], None],
    ) -> None:
        """table: all classic groups by name. on_seated: called with the name of a group once all of its members have
        their assignments.
        """
        self._seats: Final = seats
        self._coordinator: Final = coordinator
        self._table: Final = table
        self._sliced: Final = sliced
        self._loop: Final = loop
        self._clock: Final = clock
        self._on_seated: Final = on_seated
        self._shared: dict[str, Sharing] = {}
        self._working: set[str] = set()

    def seats(self, group: str) -> Container[str]:
        """Return the members of the coordinator's group that are in a classic group, or were until just now."""
        return self._shared.get(group, ())

    def has_others(self, group: str, topic: str) -> bool:
        """Return whether the coordinator's group of this name has members outside the classic group."""
        found, ours = self._coordinator.view(group, topic), self.seats(group)
        return found is not None and any(member.id not in ours for member in found.members)

    def share(self, group: ClassicGroup, by: Caller) -> None:
        """Let the broker assign from the next generation on. by: the user who owns the memberships."""
        sharing = self._shared.setdefault(group.name, Sharing(group.name, self._seats, by))
        sharing.by = by
        sharing.begin(group)
        group.is_shared = True
        self._work(group.name)

    def _unshare(self, group: ClassicGroup) -> None:
        """Let the group's leader assign from the next generation on."""
        self._shared[group.name].end()
        group.is_shared = False
        self._work(group.name)

    def joined(self, group: ClassicGroup, member_id: str, by: Caller) -> None:
        """Update the memberships after a member has joined or begins to wait for the other members."""
        if not group.is_shared:
            return
        sharing, member = self._shared[group.name], group.member(member_id)
        sharing.by = by
        is_going_on = group.phase is not Phase.PREPARING and group.generation == sharing.generation
        # a member that stays in its generation continues to read its assignment
        if member is not None and not is_going_on:
            sharing.joined(member)

    def follow(self, group: ClassicGroup) -> None:
        """Update the memberships of a shared group; sharing ends when its last member has left."""
        if not group.is_shared:
            return
        if not group.has_members:
            self._unshare(group)
            return
        self._shared[group.name].follow(group)
        self._work(group.name)

    def is_due(self, group: ClassicGroup) -> bool:
        """Return whether members must rejoin: shares have changed, or all members of other protocols have left."""
        if not group.is_shared or group.phase is not Phase.STABLE:
            return False
        sharing = self._shared[group.name]
        is_due = sharing.is_due(group)
        if sharing.is_alone:
            self._unshare(group)
        return is_due or not group.is_shared

    def met(self, group: str) -> None:
        """Start to check the group of this name again, because a member of another protocol is about to join it."""
        sharing = self._shared.get(group)
        if sharing is not None:
            sharing.met()

    def check(self, group: str, topic: str, member_id: str, partitions: Collection[int], by: Caller) -> None:
        """Refuse commits for partitions that the member does not read, if the group has members of other protocols.

        Raises Missing(MEMBER_MISSING), Conflict(PARTITION_NOT_ASSIGNED), Denied(DENIED).
        """
        found = self._table.get(group)
        member = None if found is None or not found.is_shared else found.member(member_id)
        if member is None and self.has_others(group, topic):
            raise Missing(
                ErrorCode.MEMBER_MISSING, f"the group has members of other protocols group={group!r} topic={topic!r}"
            )
        if member is None or self._shared[group].check(member, topic, partitions):
            return
        there = self._coordinator.view(group, topic)
        if there is not None and there.members:
            self._coordinator.check_reader(group, topic, member.seat, partitions, wire=member.join.wire, by=by)

    def _work(self, name: str) -> None:
        if name in self._shared and name not in self._working:
            self._working.add(name)
            self._sliced.put(partial(self._work_on, name))

    def _work_on(self, name: str, end: float) -> bool:
        """Do a slice; return whether more work is left."""
        sharing, found = self._shared[name], self._table.get(name)
        group = found if found is not None and found.is_shared else None
        while sharing.step(group):
            if self._clock.monotonic() >= end:
                return True
        self._working.discard(name)
        if group is not None and group.phase is Phase.COMPLETING:
            self._on_seated(name)
        elif group is None and sharing.is_over:
            del self._shared[name]
        elif group is None:
            self._loop.call_later(RETRY_S, self._retry, name)
        return False

    def _retry(self, name: str) -> None:
        sharing, found = self._shared.get(name), self._table.get(name)
        if sharing is not None and (found is None or not found.is_shared):
            sharing.end()
            self._work(name)
