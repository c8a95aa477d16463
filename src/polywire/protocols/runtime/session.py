"""The interface between a connection and the session of a protocol (decision 0107).

Sessions do no I/O: they consume and produce bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from polywire.errors import PeerError
from polywire.types import Buffer

if TYPE_CHECKING:
    from polywire.broker.access import Principal
    from polywire.broker.client_quotas import Meter

LOGIN_FRAME_BYTES_MAX: Final = 4096  # limit for an unauthenticated client; a name and a password need at most 1.3 KB
QUANTUM_S: Final = 0.002  # time for the requests of one connection before other connections are served


def begins_with(prefix: bytes, opening: bytes) -> bool | None:
    """Return whether a connection begins with ``opening``, given its first bytes; None if more are needed."""
    if prefix[: len(opening)] != opening[: len(prefix)]:
        return False
    return True if len(prefix) >= len(opening) else None


class Output(Protocol):
    """The operations of a connection that its session uses."""

    @property
    def backlog(self) -> int:
        """Number of bytes that were passed to ``write`` and not yet accepted by the kernel."""

    @property
    def backlog_max(self) -> int:
        """Value of ``backlog`` above which the connection stops reading; negative while a quota delays the client.

        A session that sends data without requests must stop at this value, until ``drained`` is called.
        """

    @property
    def meter(self) -> Meter | None:
        """Charges the client's traffic to quotas; None if none apply."""

    def delay_ms(self, size: int) -> int:
        """Return the milliseconds for which the client is delayed by quotas after a response of ``size`` bytes."""

    def set_client_id(self, client_id: str | None) -> None:
        """Set the name that the client has sent, for quotas. Called when it changes."""

    @property
    def peer(self) -> str:
        """Address of the client, for logs."""

    @property
    def certified(self) -> Principal | None:
        """The user of the client's TLS certificate; None without a certificate, or if authentication is off.

        It is also None until the first bytes are received.
        """

    @property
    def local(self) -> tuple[str, int]:
        """Host and port that the client connected to."""

    @property
    def on_loopback(self) -> bool:
        """Whether the client is on this machine."""

    def write(self, data: Buffer) -> None:
        """Send bytes. The caller must not change ``data`` after the call."""

    def write_many(self, parts: Sequence[Buffer], released: Callable[[], None] | None = None) -> None:
        """Send parts in order, without joining them.

        ``released`` is called when the kernel has accepted all of them, or the connection is closed.
        """

    def close(self) -> None:
        """Close the connection when all output was sent."""

    def fail(self, error: PeerError) -> None:
        """Close the connection as if ``receive`` had raised this error. Used for errors found after ``receive``."""

    def identified(self, principal: Principal | None) -> None:
        """Set the client's user after a login.

        After a logout, None restores the user of the TLS certificate, if any. The connection is closed when the login
        becomes invalid. Raises Busy(BUSY), without an effect, if there are too many connections of authenticated
        clients.
        """

    def pin(self) -> Callable[[], None]:
        """Keep the content of the buffer passed to ``receive`` until the returned function is called.

        It stays valid even if the connection closes. The session must accept no requests meanwhile.
        """


class Session(Protocol):
    """One connection's state, implemented by each protocol."""

    @property
    def spoken_dialect(self) -> str:
        """Name of the client's dialect of the protocol, or of its software, for logs and metrics; empty if unknown."""

    @property
    def requests(self) -> int:
        """Number of requests that were executed so far."""

    @property
    def frame_bytes_max(self) -> int:
        """Size limit for an incomplete request in the receive buffer. ``receive`` rejects longer requests."""

    def receive(self, data: memoryview) -> int:
        """Handle every complete request at the start of ``data``, and return the number of bytes consumed.

        The remaining bytes are passed again, followed by newer ones. Views of ``data`` that were passed to the broker
        stay valid until the next commit. Raises PeerError(fatal=True) to close the connection after pending output
        is sent.
        """

    def wanted(self) -> int:
        """Return how many bytes to allocate for the incomplete request, or 0 if its length is unknown."""

    def paused(self) -> bool:
        """Return whether the session accepts no request for now. If so, it calls ``resume`` later."""

    def owes(self) -> bool:
        """Whether a request is unanswered."""

    def drained(self) -> None:
        """Continue to send data: the ``backlog`` of the connection is low enough again."""

    def finish(self, data: memoryview) -> None:
        """Handle the end of the client's data. ``data`` are the bytes not consumed before.

        An incomplete request is dropped. Complete requests are still executed, and their responses sent.
        """

    def close(self) -> None:
        """Cancel all requests and release buffers. The connection is closed or the broker stops."""


class SessionFactory(Protocol):
    """Creates sessions of one protocol."""

    @property
    def wire(self) -> str:
        """Name of the protocol, as in the option ``polywire serve --<protocol>``."""

    def recognise(self, prefix: bytes) -> bool | None:
        """Return whether a connection that begins with these bytes uses this protocol; None if more are needed."""

    def open(self, output: Output, resume: Callable[[], None]) -> Session:
        """Return a session for a new connection.

        A session that was ``paused`` calls ``resume`` when it can accept requests. Waiting bytes are then passed again.
        """
