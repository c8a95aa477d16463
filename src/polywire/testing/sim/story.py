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

    __slots__ = ("_digest", "_lines", "_now", "_show", "_told", "actor", "counts", "number")

    def __init__(self, show: Callable[[str], None] | None = None) -> None:
        """show: gets each line as it is written."""
        self._show = show
        self._digest = hashlib.sha256()
        self._now: Callable[[], float] = lambda: 0.0
        self.actor = "world"
        self.number = 0
        self._lines: Final[deque[str]] = deque(maxlen=LINES_KEPT)
        self._told: Final[list[tuple[int, float, str, str, str]]] = []
        self.counts: Final[Counter[str]] = Counter()

    def follow(self, now: Callable[[], float]) -> None:
        """Tell events by this time from now on."""
        self._now = now

    def tell(self, event: str, text: str = "") -> None:
        """One more event."""
        self.number += 1
        self.counts[event] += 1
        self._told.append((self.number, self._now(), self.actor, event, text))
        if self._show is not None or len(self._told) > LINES_KEPT:
            self._write()

    def _write(self) -> None:
        """Put what was told into lines, which most runs are never asked for."""
        for number, now, actor, event, text in self._told:
            line = f"{number:6} {now:12.6f} {actor:8} {event:12} {text}".rstrip()
            self._digest.update(line.encode() + b"\n")
            self._lines.append(line)
            if self._show is not None:
                self._show(line)
        self._told.clear()

    @property
    def lines(self) -> deque[str]:
        """The last of them."""
        self._write()
        return self._lines

    def digest(self) -> str:
        """What follows from every line so far."""
        self._write()
        return self._digest.hexdigest()


class Aside(Story):
    """What happens in one part of a run. Guards: ``counts`` are of that part; the whole has every event of it, with its mark."""

    __slots__ = ("_mark", "_whole")

    def __init__(self, whole: Story, mark: str) -> None:
        super().__init__()
        self._whole = whole
        self._mark = mark

    def tell(self, event: str, text: str = "") -> None:
        """One more event."""
        self.counts[event] += 1
        self._whole.actor = self.actor
        self._whole.tell(event, f"{self._mark} {text}")
