"""The values that protocols and users have in the first shard, which stores them for all processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from polywire.broker.access import REPLICATED
from polywire.log.base import Loop
from polywire.routing.bindings import WIRE as BINDINGS
from polywire.routing.messages import Topics, Value

if TYPE_CHECKING:
    from polywire.broker.broker import Broker
    from polywire.broker.changes import WireStateSet

VALUES_SHARD: Final = 0
APPLIED_S: Final = 1.0  # how long a change waits for a process that does not respond

Watcher = Callable[["Value | WireStateSet"], None]


class Values:
    """The values of the first shard in any process. In other processes they are as the first shard last reported them.

    Attributes:
        are_known: whether the first shard has reported its values since this process started.
        are_stored: whether this process knows the users of an earlier report.
    """

    def __init__(self, local: Broker, *, is_first: bool) -> None:
        self._local: Final = local
        self._is_first: Final = is_first
        self._watchers: Final[list[Watcher]] = []
        # users are stored in this process, too, so that they are known while the first process is unavailable
        stored = () if is_first else REPLICATED
        self._reported: Final[dict[str, dict[str, bytes]]] = {wire: dict(local.wire_state(wire)) for wire in stored}
        self.are_stored: Final = any(self._reported.values())
        self.are_known = is_first

    def of(self, wire: str) -> Mapping[str, bytes]:
        """Return the values of a protocol by key."""
        return self._local.wire_state(wire) if self._is_first else self._reported.get(wire, {})

    def watch(self, changed: Watcher) -> None:
        """Call ``changed`` with each value that is stored or removed."""
        if self._is_first:
            self._local.watch_wire_state(changed)
        else:
            self._watchers.append(changed)

    def apply(self, report: Topics) -> None:
        """Apply the values in a report of the first shard."""
        changed = [value for value in report.values if value.wire != BINDINGS]
        if report.begins:
            reported = {(value.wire, value.key) for value in changed}
            known = [(wire, key) for wire, values in self._reported.items() for key in values]
            changed += [Value(wire, key, None) for wire, key in known if (wire, key) not in reported]
            self.are_known = True
        for value in changed:
            values = self._reported.setdefault(value.wire, {})
            if value.value is None:
                values.pop(value.key, None)
            else:
                values[value.key] = value.value
            self._local.access.replicate(value.wire, value.key, value.value)
            for watcher in self._watchers:
                watcher(value)


class Subscriber(Protocol):
    """Another process. It applies changes of the values that this process stores."""

    @property
    def is_behind(self) -> bool:
        """Whether it has yet to apply a value."""

    def when_applied(self, then: Callable[[], None]) -> None:
        """Call ``then`` once it has applied all present values, or its link has ended."""


class Subscribers:
    """The processes that apply the values of this one."""

    def __init__(self, loop: Loop) -> None:
        self._loop: Final = loop
        self.all: Final[set[Subscriber]] = set()

    def when_applied(self, then: Callable[[], None]) -> None:
        """Call ``then`` once all processes have applied all present values.

        No process delays it longer than ``APPLIED_S``.
        """
        behind = {subscriber for subscriber in self.all if subscriber.is_behind}
        if not behind:
            then()
            return

        def end() -> None:
            behind.clear()
            timer.cancel()
            then()

        def applied(subscriber: Subscriber) -> None:
            if subscriber in behind:
                behind.discard(subscriber)
                if not behind:
                    end()

        timer = self._loop.call_later(APPLIED_S, end)
        for subscriber in tuple(behind):
            subscriber.when_applied(partial(applied, subscriber))
