"""Expire unused state: groups, offsets, group bindings, writers, transactional ids, transactions (decision 0115).

Each pass checks a bounded number of items, and the next pass continues after them. A full disk only delays expiry. Time
is measured with a monotonic clock, so setting the system clock never expires anything early.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from polywire.broker import changes
from polywire.broker.groups.classic import ClassicGroup
from polywire.broker.groups.coordinator import Coordinator, GroupBroker
from polywire.broker.groups.offsets import Held, Reader
from polywire.broker.owners import ITSELF
from polywire.broker.settings import KEEP, SECOND_US, BrokerSettings
from polywire.broker.state import State
from polywire.clock import ElapsedClock
from polywire.errors import Busy, NotOwner, Unavailable
from polywire.log.base import Loop
from polywire.types import Level, PositionKind


class Expiry:
    """Deletes unused groups and committed offsets, and aborts late transactions: a bounded number in each pass.

    Args:
        classic: all classic groups by name. Their offsets do not expire while they have members.
        abort_late: aborts transactions that exceed their timeout. Raises Busy(DISK_FULL).
    """

    __slots__ = (
        "_abort_late",
        "_broker",
        "_classic",
        "_clock",
        "_groups",
        "_loop",
        "_round",
        "_settings",
        "_started_at_us",
        "_state",
        "_stopped",
    )

    def __init__(
        self,
        broker: GroupBroker,
        state: State,
        groups: Coordinator,
        settings: BrokerSettings,
        loop: Loop,
        clock: ElapsedClock,
        classic: Mapping[str, ClassicGroup],
        abort_late: Callable[[], None],
    ) -> None:
        self._classic = classic
        self._abort_late = abort_late
        self._broker = broker
        self._state = state
        self._groups = groups
        self._settings = settings
        self._loop = loop
        self._clock = clock
        self._started_at_us = clock.now_us()
        # remaining checks of the current round, in which every item is checked once
        self._round: Iterator[Callable[[], None]] = iter(())
        self._stopped = False

    def start(self) -> None:
        """Schedule the first pass after one interval."""
        self._loop.call_later(self._settings.expiry_interval_s, self._run)

    def stop(self) -> None:
        self._stopped = True

    def _run(self) -> None:
        if self._stopped:
            return
        try:
            self.run_pass()
        except Busy:  # the disk is full: retried later
            self._round = iter(())
        except (NotOwner, Unavailable):  # another broker leads, or storage has failed: this one is about to stop
            self._stopped = True
            return
        self._loop.call_later(self._settings.expiry_interval_s, self._run)

    def run_pass(self) -> None:
        """Abort late transactions, then delete expired groups, bindings and offsets.

        Raises Busy(DISK_FULL).
        """
        now_us = self._clock.now_us()
        self._state.writers.forget_idle(now_us)
        self._state.transactions.forget_idle(now_us)
        self._abort_late()
        for _ in range(self._settings.expiry_count_max):
            check = next(self._round, None)
            if check is None:
                self._round = self._all_checks()
                return
            check()

    def _all_checks(self) -> Iterator[Callable[[], None]]:
        """Yield one check for each group, each group binding and each set of committed offsets.

        Calling the check deletes the group, binding or offsets if they have expired.
        """
        for topic, name in list(self._state.groups):
            yield lambda topic=topic, name=name: self._check_group(topic, name)  # type: ignore[misc]
        for key, reader in self._state.positions.readers():
            yield lambda key=key, reader=reader: self._check_reader(key, reader)  # type: ignore[misc]
        for wire, name in list(self._state.bindings):
            yield lambda wire=wire, name=name: self._check_binding(wire, name)  # type: ignore[misc]

    def _check_group(self, topic: str, name: str) -> None:
        """Expire a group without members together with its offsets."""
        self._groups.sweep(name, topic)
        group = self._state.groups.get((topic, name))
        if group is None or group.members:
            return
        held = self._state.positions.held(self._state.topic_key(topic), PositionKind.GROUP, name)
        if held is not None and self._is_in_use(name, held):
            return
        if held is None:
            ended = not group.kept and self._is_over(group.at_us, self._settings.group_expiry_us)
        else:
            ended = self._is_unused(max(group.at_us, held.used_at_us)) and not group.kept
        if ended:
            self._groups.delete(name, topic, by=ITSELF)

    def _check_reader(self, key: changes.TopicKey, reader: Reader) -> None:
        """Expire the offsets of a consumer, or of a group without members."""
        kind, name = reader
        held = self._state.positions.held(key, *reader)
        if held is None or (kind is PositionKind.GROUP and self._is_in_use(name, held)):
            return
        if not self._is_unused(held.used_at_us):
            return
        if kind is PositionKind.GROUP:
            group = self._state.groups.get((self._broker.topic_name(key), name))
            if group is not None and (group.members or not self._is_unused(group.at_us)):
                return
        made = changes.PositionsDeleted(kind, name, *changes.split_key(key), None)
        self._broker.change_all([made], level=Level.WRITTEN, done=None)

    def _check_binding(self, wire: str, name: str) -> None:
        bound = self._state.bindings.get((wire, name))
        if bound is None or (bound.topic, name) in self._state.groups or not self._is_unused(bound.at_us):
            return
        held = self._state.positions.held(self._state.topic_key(bound.topic), PositionKind.GROUP, name)
        if held is None:
            self._broker.change_all([changes.GroupUnbound(wire, name)], level=Level.WRITTEN, done=None)

    def _is_in_use(self, name: str, held: Held) -> bool:
        """Return whether these offsets must not expire, because they belong to a classic group with members."""
        group = self._classic.get(name)
        if group is None or not group.has_members:
            return False
        held.asked_at_us = self._clock.now_us()
        return True

    def _is_unused(self, at_us: int) -> bool:
        """Return whether the last use is too long ago. Reads are not stored, so the broker's start counts as a use."""
        if self._settings.positions_expiry_us == KEEP:
            return False
        grace_us = int(self._settings.expiry_grace_s * SECOND_US)
        return self._is_over(self._started_at_us, grace_us) and self._is_over(at_us, self._settings.positions_expiry_us)

    def _is_over(self, at_us: int, limit_us: int) -> bool:
        return self._clock.now_us() - at_us > limit_us
