"""The Session port: what the server's connection driver asks of a wire, and what a wire may do to its connection (decision 0003).

Promises: sessions are sans-I/O; bytes in, bytes out, order of answers kept by the session. Must not know: sockets, the loop, any one wire.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from polywire.errors import PeerError
from polywire.types import Buffer

if TYPE_CHECKING:
    from polywire.broker.access import Principal

NOBODY_FRAME_BYTES_MAX: Final = 4096  # of a peer that has yet to log in: a name and a password have 1.3 KB at most
QUANTUM_S: Final = 0.002  # how long requests of one connection are handled before other connections get a turn


class Output(Protocol):
    """What a session may do to its connection."""

    @property
    def backlog(self) -> int:
        """Bytes written by the session that the kernel has not taken yet."""

    @property
    def backlog_max(self) -> int:
        """Above this the connection stops reading from the peer; a session that streams must pause until ``drained``."""

    @property
    def peer(self) -> str:
        """Address of the peer, for logs."""

    @property
    def certified(self) -> Principal | None:
        """Who the peer is by its TLS certificate, None without one, or on a broker without users; known once it has sent something."""

    @property
    def local(self) -> tuple[str, int]:
        """Host and port that the peer connected to."""

    @property
    def on_loopback(self) -> bool:
        """Whether the peer is on this machine."""

    def write(self, data: Buffer) -> None:
        """Send bytes; they may be reused by the caller as soon as the call returns only if ``data`` is ``bytes``."""

    def write_many(self, parts: Sequence[Buffer], released: Callable[[], None] | None = None) -> None:
        """Send parts in order without joining them; ``released`` is called once the kernel has all of them (or the peer is gone)."""

    def close(self) -> None:
        """Close once everything written was sent."""

    def fail(self, error: PeerError) -> None:
        """Close as if ``receive`` had raised this: for what is found out later."""

    def identified(self, principal: Principal | None) -> None:
        """Say who the peer is from now on, None: nobody; the connection is closed when that login is over. Raises Busy(BUSY) when there is
        no place for one more of such, then it stays who it was."""

    def pin(self) -> Callable[[], None]:
        """Keep the bytes that ``receive`` is offered now as they are, also when the connection ends, until what is returned is called; the
        session is paused all the while."""


class Session(Protocol):
    """One peer's conversation on one wire."""

    @property
    def spoken_dialect(self) -> str:
        """Which form of its wire the peer speaks, or by which software; empty where there is one form only, or it is not known yet."""

    @property
    def frame_bytes_max(self) -> int:
        """Longest incomplete request that may wait in the receive buffer; longer ones are refused by ``receive`` itself."""

    def receive(self, data: memoryview) -> int:
        """Handle every complete request at the start of ``data``; return how many bytes were consumed.

        The rest is offered again, in front of what comes next. Views of ``data`` handed to the broker stay valid until the
        next commit. Raises PeerError(fatal=True) to have the connection closed after what was written.
        """

    def wanted(self) -> int:
        """Bytes the pending request needs in all when it is known (so the buffer can grow once), else 0."""

    def paused(self) -> bool:
        """True while the session will not take more requests (an answer must come first); ``Output`` is told by ``resume`` of the driver."""

    def owes(self) -> bool:
        """Whether something that was asked for is not answered yet."""

    def drained(self) -> None:
        """The backlog fell below its low mark: go on streaming."""

    def finish(self, data: memoryview) -> None:
        """The peer has sent all it will; ``data`` is what was not consumed. Answers already owed are still sent."""

    def close(self) -> None:
        """The connection is gone or the broker stops: drop waits, pins and callbacks."""


class SessionFactory(Protocol):
    """Makes sessions of one wire."""

    @property
    def wire(self) -> str:
        """Name of the wire as in ``polywire serve --<wire>``."""

    def recognise(self, prefix: bytes) -> bool | None:
        """Whether a connection that begins with these bytes speaks this wire; None when more bytes are needed."""

    def open(self, output: Output, resume: Callable[[], None]) -> Session:
        """A session for a new connection. Calling ``resume`` asks the driver to offer waiting bytes again after ``paused``."""
