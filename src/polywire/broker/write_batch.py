"""The broker's verbs about the write batch: the part of its facade that changes its state, and says when what was taken is stored.

Promises: state is changed by building a change, adding it to the write batch and applying it with the function recovery uses.
Must not know: wires, what a change is about.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Protocol

from polywire.broker import changes
from polywire.broker.state import State
from polywire.log.base import Completion, Log, Need
from polywire.types import Level

PROBE_BYTES = 4096  # a record as most are, with all that is stored around it
ENTRY_BYTES = 40  # a directory entry of a journal group (decision 0002), and its padding


class WriteBatchVerbs(Protocol):
    """A base of ``Broker``, whose log and state these verbs use."""

    __slots__ = ()

    _log: Log
    _state: State

    def settle(self, level: Level, done: Completion[int]) -> None:
        """Call ``done`` once everything taken so far has reached ``level``: the answer to what turned out to be done already."""
        self._log.barrier(level, done)

    def probe(self, done: Completion[int]) -> None:
        """Ask the log what it would say to a record now, and call ``done`` once all that was taken so far is synced; nothing is stored.

        Raises Busy(DISK_FULL).
        """
        self._log.reserve(PROBE_BYTES)
        self._log.barrier(Level.SYNCED, done)

    congested: bool = property(attrgetter("_log.congested"))  # type: ignore[assignment]
    """Whether peers that produce should be read no further for now; every request asks twice, and so without a frame."""

    def on_relief(self, callback: Callable[[], None]) -> None:
        """Call back once, on the loop, when the log is not congested (any more)."""
        self._log.on_relief(callback)

    @property
    def uncommitted(self) -> bool:
        """Whether something was asked for that is not written yet, and may still view what was handed over."""
        return self._log.uncommitted

    def hold(self) -> None:
        """A commit follows soon: none is scheduled for what is asked for until then."""
        self._log.hold()

    def commit(self) -> None:
        """Write the write batch now; what asked for ``written`` or less is answered before this returns."""
        self._log.commit()

    def change_all(self, made: Sequence[changes.Change], *, level: Level, done: Completion[int] | None) -> None:
        """Journal changes as one group, in order, and make them true. With none, ``done`` follows what was added before.

        Raises Busy(DISK_FULL); then nothing has changed.
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
