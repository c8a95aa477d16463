"""The events of a run: for people to read, and to compare two runs of one seed.

An event is one line. The digest covers all lines in order, including lines that are not stored.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable
from typing import Final

LINES_KEPT: Final = 4000  # the end of an unprinted run, which shows the failure


class Story:
    """Guards: ``actor`` is the part that causes the next events; ``counts`` has the number of events by kind."""

    __slots__ = ("_digest", "_events", "_lines", "_now", "_show", "actor", "counts", "number")

    def __init__(self, show: Callable[[str], None] | None = None) -> None:
        """show: called with every line."""
        self._show = show
        self._digest = hashlib.sha256()
        self._now: Callable[[], float] = lambda: 0.0
        self.actor = "world"
        self.number = 0
        self._lines: Final[deque[str]] = deque(maxlen=LINES_KEPT)
        self._events: Final[list[tuple[int, float, str, str, str]]] = []
        self.counts: Final[Counter[str]] = Counter()

    def follow(self, now: Callable[[], float]) -> None:
        """Use this clock for the times of events from now on."""
        self._now = now

    def tell(self, event: str, text: str = "") -> None:
        """Add an event."""
        self.number += 1
        self.counts[event] += 1
        self._events.append((self.number, self._now(), self.actor, event, text))
        if self._show is not None or len(self._events) > LINES_KEPT:
            self._write()

    def _write(self) -> None:
        """Format the events as lines, which most runs never need."""
        for number, now, actor, event, text in self._events:
            line = f"{number:6} {now:12.6f} {actor:8} {event:12} {text}".rstrip()
            self._digest.update(line.encode() + b"\n")
            self._lines.append(line)
            if self._show is not None:
                self._show(line)
        self._events.clear()

    @property
    def lines(self) -> deque[str]:
        """The last lines."""
        self._write()
        return self._lines

    def digest(self) -> str:
        """The digest of all lines so far."""
        self._write()
        return self._digest.hexdigest()


class Aside(Story):
    """The events of one part of a run. Guards: ``counts`` are of that part; the whole has every event of it, with its
    mark.
    """

    __slots__ = ("_mark", "_whole")

    def __init__(self, whole: Story, mark: str) -> None:
        super().__init__()
        self._whole = whole
        self._mark = mark

    def tell(self, event: str, text: str = "") -> None:
        """Add an event."""
        self.counts[event] += 1
        self._whole.actor = self.actor
        self._whole.tell(event, f"{self._mark} {text}")
