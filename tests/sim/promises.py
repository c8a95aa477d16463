"""The properties that a run checks. A violation ends the run and is reported with details."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from polywire.errors import BrokerError
from polywire.store.base import BlobExists, BlobMissing
from polywire.types import Level


class Violation(AssertionError):
    """A violated property, with facts."""

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
"""Exceptions that end a run as a failure: a ``Violation``, or any error of the code under test."""


def require(holds: object, promise: str, **facts: object) -> None:
    """Check a property. Raises Violation."""
    if not holds:
        raise Violation(promise, " ".join(f"{name}={value!r}" for name, value in facts.items()))


@dataclass(slots=True)
class Acknowledged:
    """How far data was acknowledged: ``written`` survives a kill, ``synced`` a power loss, and also a takeover."""

    written: int = 0
    synced: int = 0

    def note(self, reached: int, level: Level) -> None:
        """Note that everything below ``reached`` is acknowledged."""
        if level is not Level.MEMORY:  # MEMORY survives nothing
            self.written = max(self.written, reached)
        if level >= Level.SYNCED:
            self.synced = max(self.synced, reached)

    def floor(self, *, powerless: bool) -> int:
        """Return the end of the data that must exist after a stop."""
        return self.synced if powerless else self.written
