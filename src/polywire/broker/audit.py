"""What an auditor wants to know: who logged in or could not, who was refused what, who changed what others may do.

Promises: plain values; nothing secret is in them. Must not know: where they are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


class Outcome(Enum):
    """What came of it."""

    ALLOWED = "allowed"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class AuditEvent:
    """One thing that somebody did, or was kept from doing. peer: address of the connection, empty where there is none."""

    action: str
    outcome: Outcome
    user: str = ""
    peer: str = ""
    resource: str = ""
    reason: str = ""


AuditSink = Callable[[AuditEvent], None]


def discard(event: AuditEvent) -> None:
    """Nobody listens."""
    del event
