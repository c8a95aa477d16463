"""Operations on the write batch, which change the broker's state and report when the change is durable.

A change is built, added to the write batch, and applied with the function that recovery uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Protocol

from polywire.broker import changes
from polywire.broker.state import State
from polywire.log.base import Completion, Log, Need
from polywire.types import Level

PROBE_BYTES = 4096  # size of a typical record with its metadata
ENTRY_BYTES = 40  # bytes of a directory entry in a journal group, with padding (decision 0102)


class WriteBatchVerbs(Protocol):
    """A base of ``Broker``: the verbs use its log and state."""

    __slots__ = ()

    _log: Log
    _state: State

    def settle(self, level: Level, done: Completion[int]) -> None:
        """Call ``done`` once everything added so far has reached ``level``; for requests that require no change."""
        self._log.barrier(level, done)

    def probe(self, done: Completion[int]) -> None:
        """Check whether the log would accept a record, without storing one; call ``done`` once earlier additions are
        synced.

        Raises Busy(DISK_FULL).
        """
        self._log.reserve(PROBE_BYTES)
        self._log.barrier(Level.SYNCED, done)

    congested: bool = property(attrgetter("_log.congested"))  # type: ignore[assignment]
    """Whether to pause reading from producers. Every request reads this twice, so the property avoids a Python call."""

    def on_relief(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once, on the loop, when the log is no longer congested."""
        self._log.on_relief(callback)

    @property
    def uncommitted(self) -> bool:
        """Return whether additions that were not written yet may still refer to buffers of the caller."""
        return self._log.uncommitted

    def hold(self) -> None:
        """Do not schedule a commit for further additions, because the caller will commit soon."""
        self._log.hold()

    def commit(self) -> None:
        """Write the write batch now. Before this returns, completions with level ``written`` or lower are called."""
        self._log.commit()

    def change_all(self, made: Sequence[changes.Change], *, level: Level, done: Completion[int] | None) -> None:
        """Journal changes as one group, in order, and apply them. Without changes, ``done`` is called after earlier
        additions.

        If it raises Busy(DISK_FULL), nothing has changed.
        """
        if not made:
            if done is not None:
                self._log.barrier(level, done)
            return
        encoded = [changes.encode(change) for change in made]
        if len(encoded) > 1:
            self._log.reserve(sum(map(len, encoded)) + ENTRY_BYTES * len(encoded), need=Need.CHANGE)
        for index, change in enumerate(made):
            last = index == len(made) - 1
            self._log.change(encoded[index], level=level, done=done if last else None)
            self._state.apply_change(change)
