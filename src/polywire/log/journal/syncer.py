"""The interface that makes groups durable: by flushing a disk, or by uploading to a bucket.

Groups become durable in order, and callbacks are called in the order of requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from polywire.errors import BrokerError
from polywire.log.base import Completion, Loop
from polywire.log.journal.slots import Slot


class Syncer(Protocol):
    """``synced`` is the highest sequence up to which everything is durable; ``unsynced_bytes`` is the size of later
    groups.
    """

    synced: int
    written: int
    unsynced_bytes: int

    @property
    def is_local(self) -> bool:
        """Whether recovery reads the slots.

        If so, a group may be valid although earlier ones are lost (decision 0102), and groups record the synced
        sequence, which distinguishes damage from a torn tail.
        """

    @property
    def is_long(self) -> bool:
        """Whether to seal the current slot before it is full, because recovery would have to read too much."""

    def wrote(self, sequence: int, position: int, size: int) -> None:
        """Record a group in the current slot."""

    def wait(self, sequence: int, callback: Completion[None]) -> None:
        """Call back once the written group ``sequence`` is durable, at once if it already is."""

    def spare(self, slot: Slot) -> None:
        """Note that the last group lists segments with a full slot's groups, so the slot need not be made durable."""

    def sync_last(self, slot: Slot, done: Callable[[], None]) -> None:
        """Make only the last group durable, which lists segments for this slot; skip the groups between.

        Requires ``is_local``.
        """

    def sealed(self, sequence: int, naming: int) -> None:
        """Note that everything up to ``sequence`` is in segments, and that group ``naming``, which lists them, is
        durable.
        """

    def finish(self) -> None:
        """Make everything durable now, before closing; raise OSError, NotOwner or Unavailable."""

    def abandon(self) -> Sequence[Completion[None]]:
        """Stop after a failure of the log; return the callbacks that are still waiting."""

    def stop(self) -> None:
        """Stop all threads."""


MakeSyncer = Callable[[Loop, Callable[[], None], Callable[[BrokerError], None], Callable[[], bool]], Syncer]
"""Creates a syncer for this loop.

The syncer calls the second argument whenever ``synced`` has grown, after the waiting callbacks, and the third argument
on failure. The last argument returns whether a slot is being sealed.
"""
