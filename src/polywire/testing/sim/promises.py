"""What a run holds the code under test to: a promise that is broken ends it.

Promises: a broken promise says which one, with facts. Must not know: what is promised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from polywire.errors import BrokerError
from polywire.store.base import BlobExists, BlobMissing
from polywire.types import Level


class Violation(AssertionError):
    """A promise was broken: which one, and facts about it."""

    def __init__(self, promise: str, facts: str) -> None:
        super().__init__(f"{promise} {facts}".rstrip())
        self.promise: Final = promise


BROKEN: Final = (
    AssertionError,
    AttributeError,
    BlobExists,
    BlobMissing,
    BrokerError,
    LookupError,
    OSError,
    TypeError,
    ValueError,
)
"""What ends a run in which a promise is broken: a ``Violation``, or whatever the code that broke it raised."""


def require(holds: object, promise: str, **facts: object) -> None:
    """Insist on a promise. Raises Violation."""
    if not holds:
        raise Violation(promise, " ".join(f"{name}={value!r}" for name, value in facts.items()))


@dataclass(slots=True)
class Acknowledged:
    """How far something was acknowledged: ``written`` survives a kill, ``synced`` a power loss."""

    written: int = 0
    synced: int = 0

    def note(self, reached: int, level: Level) -> None:
        """Everything below ``reached`` is acknowledged."""
        if level is not Level.MEMORY:  # which survives nothing
            self.written = max(self.written, reached)
        if level is Level.SYNCED:
            self.synced = max(self.synced, reached)

    def floor(self, *, powerless: bool) -> int:
        """What must be there after a stop."""
        return self.synced if powerless else self.written
