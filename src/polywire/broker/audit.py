"""Audit events without secrets: logins, refusals, and changes of permissions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


class Outcome(Enum):
    """Outcome of an audited action."""

    ALLOWED = "allowed"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class AuditEvent:
    """One audited action. peer: address of the connection, empty without one."""

    action: str
    outcome: Outcome
    user: str = ""
    peer: str = ""
    resource: str = ""
    reason: str = ""


AuditSink = Callable[[AuditEvent], None]


def discard(event: AuditEvent) -> None:
    """Drop an event."""
    del event
