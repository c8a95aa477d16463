"""What happened in a run, event by event: what a person reads, and what two runs of one seed are compared by.

Promises: an event is one line; the digest covers every line in order, those too that are not kept. Must not know: what events mean.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable
from typing import Final

LINES_KEPT: Final = 4000  # of a run that nobody prints: its end, which shows what went wrong


class Story:
    """Guards: ``actor`` is who does what comes next; ``counts`` tells how often each kind of event happened."""

    __slots__ = ("_digest", "_now", "_show", "actor", "counts", "lines", "number")

    def __init__(self, show: Callable[[str], None] | None = None) -> None:
        """show: gets each line as it is written."""
        self._show = show
        self._digest = hashlib.sha256()
        self._now: Callable[[], float] = lambda: 0.0
        self.actor = "world"
        self.number = 0
        self.lines: Final[deque[str]] = deque(maxlen=LINES_KEPT)
        self.counts: Final[Counter[str]] = Counter()

    def follow(self, now: Callable[[], float]) -> None:
        """Tell events by this time from now on."""
        self._now = now

    def tell(self, event: str, text: str = "") -> None:
        """One more event."""
        self.number += 1
        self.counts[event] += 1
        line = f"{self.number:6} {self._now():12.6f} {self.actor:8} {event:12} {text}".rstrip()
        self._digest.update(line.encode() + b"\n")
        self.lines.append(line)
        if self._show is not None:
            self._show(line)

    def digest(self) -> str:
        """What follows from every line so far."""
        return self._digest.hexdigest()
