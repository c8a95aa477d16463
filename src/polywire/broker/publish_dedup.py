"""Writers of staged data, and the last sequence number that each has published.

The state is computed from journalled changes alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from polywire.broker import changes
from polywire.broker.owners import UNOWNED
from polywire.broker.quotas import WRITER_BYTES, Kind, Usage
from polywire.broker.settings import BrokerSettings
from polywire.broker.view import one_by_one


class PublishDedup:
    """The last published number of each writer; the writer idle for longest comes first.

    Invariant: a writer is dropped only after it was idle for ``writer_expiry_us`` on the elapsed clock.
    """

    __slots__ = ("_by_name", "_settings", "_usage")

    def __init__(self, settings: BrokerSettings, usage: Usage) -> None:
        self._settings = settings
        self._usage = usage
        self._by_name: dict[str, changes.Published] = {}

    def last(self, writer: str) -> int | None:
        """Return the last number that a writer has published."""
        known = self._by_name.get(writer)
        return None if known is None else known.number

    def owner(self, writer: str) -> int:
        """Return a writer's owner."""
        known = self._by_name.get(writer)
        return UNOWNED if known is None else known.owner

    def __iter__(self) -> Iterator[changes.Published]:
        return iter(self._by_name.values())

    def find(self, writer: str) -> changes.Published | None:
        """Return a writer's last publish."""
        return self._by_name.get(writer)

    def apply(self, change: changes.Published) -> None:
        """Apply a publish, and drop writers that were idle for too long."""
        self.forget(change.writer)
        self._by_name[change.writer] = changes.Published(change.writer, change.number, change.at_us, owner=change.owner)
        self._charge(change, 1)
        self.forget_idle(change.at_us)

    def forget_idle(self, now_us: int) -> None:
        """Drop writers that were idle for too long."""
        while self._by_name:
            oldest = next(iter(self._by_name.values()))
            if now_us - oldest.at_us <= self._settings.writer_expiry_us:
                return
            self.forget(oldest.writer)

    def forget(self, writer: str) -> None:
        """Drop a writer; its next publish may have any number."""
        known = self._by_name.pop(writer, None)
        if known is not None:
            self._charge(known, -1)

    def _charge(self, known: changes.Published, count: int) -> None:
        self._usage.charge(Kind.WRITERS, known.owner, count, count * size_of(known.writer))

    @property
    def latest_us(self) -> int:
        """The time of the last publish, 0 if there was none."""
        return max((known.at_us for known in self._by_name.values()), default=0)

    def encoded(self) -> Iterator[bytes]:
        """Yield all writers as they are at the time of the call, longest idle first, encoded in pieces."""
        return one_by_one(list(self._by_name.values()))


def size_of(writer: str) -> int:
    """Return the bytes that quotas charge for a writer."""
    return WRITER_BYTES + len(writer)
