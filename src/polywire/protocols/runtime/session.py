"""The Session port: the interface between the connection driver and a protocol's session (decision 0107).

Sessions do no I/O: they consume and produce bytes. They keep responses in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from polywire.errors import PeerError
from polywire.types import Buffer

if TYPE_CHECKING:
    from polywire.broker.access import Principal

LOGIN_FRAME_BYTES_MAX: Final = 4096  # of an unauthenticated client: name and password have at most 1.3 KB
QUANTUM_S: Final = 0.002  # time for the requests of one connection before other connections get a turn


class Output(Protocol):
    """Operations of a session on its connection."""

    @property
    def backlog(self) -> int:
        """Bytes written that the kernel has not accepted yet."""

    @property
    def backlog_max(self) -> int:
        """Above this the connection stops reading; a session that streams must pause until ``drained``."""

    @property
    def peer(self) -> str:
        """Address of the client, for logs."""

    @property
    def certified(self) -> Principal | None:
        """User of the client's TLS certificate; None without one, or on a broker without users. Known once it has sent
        something.
        """

    @property
    def local(self) -> tuple[str, int]:
        """Host and port that the client connected to."""

    @property
    def on_loopback(self) -> bool:
        """Whether the client is on this machine."""

    def write(self, data: Buffer) -> None:
        """Send bytes; the caller may reuse them after the call only if ``data`` is ``bytes``."""

    def write_many(self, parts: Sequence[Buffer], released: Callable[[], None] | None = None) -> None:
        """Send parts in order without joining them; ``released`` is called once the kernel has all of them, or the
        connection is closed.
        """

    def close(self) -> None:
        """Close once everything written was sent."""

    def fail(self, error: PeerError) -> None:
        """Close as if ``receive`` had raised this error, for errors found later."""

    def identified(self, principal: Principal | None) -> None:
        """Set the client's user, or None; the connection is closed when that login ends.

        Raises Busy(BUSY) if there are too many connections of authenticated clients; the user is unchanged then.
        """

    def pin(self) -> Callable[[], None]:
        """Keep the bytes passed to ``receive`` in place, even if the connection closes, until the returned function is
        called.

        The session is paused meanwhile.
        """


class Session(Protocol):
    """A conversation with one client in one protocol."""

    @property
    def spoken_dialect(self) -> str:
        """Dialect of the protocol, or the client software; empty if there is only one dialect, or it is unknown yet."""

    @property
    def frame_bytes_max(self) -> int:
        """Longest incomplete request that may wait in the receive buffer; ``receive`` refuses longer ones."""

    def receive(self, data: memoryview) -> int:
        """Handle every complete request at the start of ``data`` and return the bytes consumed.

        The rest is offered again, before later bytes. Views of ``data`` passed to the broker stay valid until the next
        commit. Raises PeerError(fatal=True) to close the connection after pending output.
        """

    def wanted(self) -> int:
        """Bytes that the pending request needs in all if known (so the buffer can grow once), else 0."""

    def paused(self) -> bool:
        """Whether the session accepts no request for now; it calls the driver's ``resume`` later."""

    def owes(self) -> bool:
        """Whether a request is unanswered."""

    def drained(self) -> None:
        """The backlog is low again: continue streaming."""

    def finish(self, data: memoryview) -> None:
        """The client has finished sending; ``data`` was not consumed. Outstanding answers are still sent."""

    def close(self) -> None:
        """The connection is closed or the broker stops: drop waits, pins and callbacks."""


class SessionFactory(Protocol):
    """Creates sessions of one protocol."""

    @property
    def wire(self) -> str:
        """Name of the protocol as in ``polywire serve --<protocol>``."""

    def recognise(self, prefix: bytes) -> bool | None:
        """Return whether a connection that begins with these bytes uses this protocol; None if more bytes are needed."""

    def open(self, output: Output, resume: Callable[[], None]) -> Session:
        """Return a session for a new connection. Its ``resume`` asks the driver to offer waiting bytes again after
        ``paused``.
        """
