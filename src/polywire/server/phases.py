"""How far a connection has come, and why its peer is not read: a phase, which only goes on, and reasons, which come and go::

    SILENT ──► UNKNOWN ──► OPEN ──► ENDING ──► CLOSED
       └──────────────────────┘        any phase may be the last before ENDING or CLOSED

Promises: a transition that is not in the table is none. Must not know: connections.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Final


class Phase(IntEnum):
    """How far a connection has come."""

    SILENT = 0
    """The peer has sent nothing yet."""
    UNKNOWN = 1
    """What the peer has sent does not tell its wire yet."""
    OPEN = 2
    """What the peer sends is offered to the session."""
    ENDING = 3
    """Nothing more is offered; what was answered still goes out."""
    CLOSED = 4
    """There is no session any more, and nothing that was received; the transport has ended, or will without another read."""


SILENT: Final = Phase.SILENT  # looked at for every read: found by their own names in a tenth of the time
UNKNOWN: Final = Phase.UNKNOWN
OPEN: Final = Phase.OPEN
ENDING: Final = Phase.ENDING
CLOSED: Final = Phase.CLOSED

TRANSITIONS: Final[Mapping[Phase, frozenset[Phase]]] = {
    SILENT: frozenset({UNKNOWN, OPEN, ENDING, CLOSED}),
    UNKNOWN: frozenset({OPEN, ENDING, CLOSED}),
    OPEN: frozenset({ENDING, CLOSED}),
    ENDING: frozenset({CLOSED}),
    CLOSED: frozenset(),
}


class Pause:
    """Reasons not to read from the peer; several may hold at once, and nothing is read while any does. What was received is offered again
    when no reason is left but DRAINING.

    Plain numbers: they are looked at for every read.
    """

    OWING: Final = 1
    """The session answers first, or the peer has to take its answers."""
    CONGESTED: Final = 2
    """The peer produces, and the log is behind."""
    STARVED: Final = 4
    """There is no memory for more of its request."""
    YIELDING: Final = 8
    """So much was read from it at once that others are read first."""
    QUEUED: Final = 16
    """Offers have taken long enough in this pass of the loop."""
    OFFERING: Final = 32
    """What had waited is being offered."""
    ENDED: Final = 64
    """Nothing more is offered."""
    DRAINING: Final = 128
    """The broker takes no further request."""
