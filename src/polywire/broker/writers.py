"""Writers of staged data: the last number each has published.

Promises: follows from the changes alone, also what is forgotten when. Must not know: what was published, the log.
"""

from __future__ import annotations

from polywire.broker import changes
from polywire.broker.settings import BrokerSettings
from polywire.errors import Busy, ErrorCode


class Writers:
    """The last published number of each writer, longest idle first.

    Invariant: a writer is forgotten only when it has been idle for ``writer_expiry_us``.
    """

    __slots__ = ("_by_name", "_settings")

    def __init__(self, settings: BrokerSettings) -> None:
        self._settings = settings
        self._by_name: dict[str, changes.Published] = {}

    def last(self, writer: str) -> int | None:
        """The last number a writer published."""
        known = self._by_name.get(writer)
        return None if known is None else known.number

    def check_room(self, writer: str, now_us: int) -> None:
        """Refuse a new writer while all remembered ones are too young to forget. Raises Busy(BUSY)."""
        if writer in self._by_name or len(self._by_name) < self._settings.writers_max:
            return
        oldest = next(iter(self._by_name.values()))
        if now_us - oldest.at_us <= self._settings.writer_expiry_us:
            raise Busy(ErrorCode.BUSY, f"too many writers limit={self._settings.writers_max}")

    def apply(self, change: changes.Published) -> None:
        """A writer published; writers idle for too long are forgotten."""
        self._by_name.pop(change.writer, None)
        self._by_name[change.writer] = changes.Published(change.writer, change.number, change.at_us)
        while True:
            oldest = next(iter(self._by_name.values()))
            if change.at_us - oldest.at_us <= self._settings.writer_expiry_us:
                return
            del self._by_name[oldest.writer]

    def snapshot(self) -> tuple[changes.Published, ...]:
        """All writers as they are, longest idle first."""
        return tuple(self._by_name.values())
