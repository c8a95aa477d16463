"""The port for what makes groups durable: a disk that is flushed, or a bucket that groups are sent to.

Promises: groups become durable in their order, and who waits is called in order of asking. Must not know: what a group holds, who waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from polywire.errors import BrokerError
from polywire.log.base import Completion, Loop
from polywire.log.journal.slots import Slot


class Syncer(Protocol):
    """Guards: ``synced`` is the highest sequence everything up to which is durable; ``unsynced_bytes`` are those of the groups behind it."""

    synced: int
    written: int
    unsynced_bytes: int

    @property
    def is_local(self) -> bool:
        """Whether recovery reads the slots themselves: then a group may count that lies behind others which do not (decision 0013), and
        one that says what was synced last distinguishes damage from a torn end."""

    @property
    def is_long(self) -> bool:
        """Whether recovery would have to read so much that the slot at hand should be sealed before it is full."""

    def wrote(self, sequence: int, position: int, size: int) -> None:
        """A group was written to the current slot."""

    def wait(self, sequence: int, callback: Completion[None]) -> None:
        """Call back once ``sequence``, which was written, is durable; at once when it is."""

    def spare(self, slot: Slot) -> None:
        """A full slot's groups are in segments, which the group written last names."""

    def sync_last(self, slot: Slot, done: Callable[[], None]) -> None:
        """Make nothing but the group written last durable: what it says of this slot counts without what lies between. Only where
        ``is_local``."""

    def sealed(self, sequence: int, naming: int) -> None:
        """Everything up to ``sequence`` is in segments; the group that says so, ``naming``, is durable."""

    def finish(self) -> None:
        """Make everything durable here and now; for closing. Raises OSError, NotOwner, Unavailable."""

    def abandon(self) -> Sequence[Completion[None]]:
        """The log has failed: nothing becomes durable any more; returns who waited."""

    def stop(self) -> None:
        """End what runs beside the loop."""


MakeSyncer = Callable[[Loop, Callable[[], None], Callable[[BrokerError], None], Callable[[], bool]], Syncer]
"""Makes a syncer that calls back on this loop: whenever ``synced`` has grown, behind those who waited for it, and when it has failed. The
last argument returns whether a slot is being sealed."""
