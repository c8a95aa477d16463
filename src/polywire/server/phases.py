"""The state of a connection: its phase, and the current reasons for not reading from it.

::

    SILENT ──► UNKNOWN ──► OPEN ──► ENDING ──► CLOSED
      └──────────┴───────────────────┘   every phase can change to ENDING or CLOSED

The transport of a closed connection is replaced by an ``EndedTransport``. An asyncio transport and its protocol refer
to each other. Breaking this cycle lets reference counting free the connection, without a garbage collection that blocks
the loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, Final


class Phase(IntEnum):
    """The phases of a connection."""

    SILENT = 0
    """The client has sent nothing yet."""
    UNKNOWN = 1
    """The client's protocol is not detected yet."""
    OPEN = 2
    """Received bytes are passed to the session."""
    ENDING = 3
    """The session gets no more bytes. Pending responses are still sent."""
    CLOSED = 4
    """The session and the received bytes were dropped. The transport is closed, or closes without another read."""


# Every read compares phases. Looking up a module constant is ten times as fast as looking up an attribute.
SILENT: Final = Phase.SILENT
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
    """Reasons not to read from a connection, as bits. They are plain integers because every read tests them.

    If DRAINING is the only reason, bytes that were already received still go to the session.
    """

    OWING: Final = 1
    """A response is pending, or the client does not read its responses."""
    CONGESTED: Final = 2
    """The client produces, and the log is behind."""
    STARVED: Final = 4
    """There is no memory for the rest of the client's request."""
    YIELDING: Final = 8
    """Many bytes of this connection were read in one pass, so other connections are served first."""
    QUEUED: Final = 16
    """Heavy requests have used up this pass of the loop, so this connection waits for a later one."""
    OFFERING: Final = 32
    """The session is processing bytes that waited during an earlier pause."""
    ENDED: Final = 64
    """The session gets no more bytes."""
    THROTTLED: Final = 256
    """The client has exceeded a quota."""
    DRAINING: Final = 128
    """The broker accepts no more requests."""


RETAINED: Final = ("peername", "sockname")


class EndedTransport:
    """Stands for a closed transport. It still has the addresses of both ends, for log lines."""

    __slots__ = ("_extra",)

    def __init__(self, transport: Any) -> None:
        self._extra = {name: transport.get_extra_info(name) for name in RETAINED}

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._extra.get(name, default)

    def is_closing(self) -> bool:
        return True

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None:
        pass

    abort = close
