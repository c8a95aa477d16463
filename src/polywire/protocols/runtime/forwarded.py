"""Execute requests that another process of this broker forwards.

A session executes them as if the client had sent them here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

import msgspec

from polywire.broker.access import Access, Principal
from polywire.errors import BrokerError, ErrorCode, PeerError, Unavailable
from polywire.log.base import Completion, Handle, Loop
from polywire.protocols.runtime.session import Output, Session
from polywire.protocols.runtime.shards import Shards
from polywire.types import Buffer

# responses to one client's requests, which are joined; far more than a page of HTTP with the largest record needs
RESPONSE_BYTES_MAX: Final = 64 * 1024 * 1024
PIECE_BYTES_MIN: Final = 64 * 1024  # smaller pieces wait for the next one
BACKLOG_BYTES_MAX: Final = 512 * 1024  # limit for responses that the client has not received; then a session pauses


class Sender(msgspec.Struct, frozen=True, array_like=True):
    """The client that sent a forwarded request.

    Attributes:
        user: name of the user, authenticated by the process that forwarded the request; None if unauthenticated.
        peer: the client's address.
        context: protocol-specific data about the client, encoded by the protocol.
    """

    user: str | None
    peer: str
    context: bytes = b""


class Execution(Handle, Protocol):
    """Handle of forwarded requests that are being executed."""

    def cancel(self) -> None:
        """End the requests, as if the client had closed its connection. Their callbacks are not called any more."""

    def credit(self, count: int) -> None:
        """Report that the client has received ``count`` more bytes of those passed to ``more``.

        Then further bytes are sent.
        """


class ForwardedRequests:
    """Executes requests that another process forwarded, in a new session, and collects the responses.

    Implements ``Output`` for the session, and ``Execution`` for the process that forwarded the requests.

    Attributes:
        backlog: bytes passed to ``more`` that the client has not received yet.
        certified: the client's user. See ``Output``.
        more: called with long responses in pieces, except the last one. If it is None, all responses are reported at
            the end.
    """

    __slots__ = (
        "_at",
        "_data",
        "_done",
        "_loop",
        "_parts",
        "_session",
        "_size",
        "backlog",
        "certified",
        "more",
        "peer",
    )

    backlog_max: Final = BACKLOG_BYTES_MAX
    meter: Final = None  # the process with the client's connection charges its traffic
    local: Final = ("", 0)
    on_loopback: Final = False

    def __init__(
        self, loop: Loop, data: Buffer, peer: str, certified: Principal | None, done: Completion[bytes]
    ) -> None:
        """Copy ``data``, which must be complete requests.

        ``done`` is called with the responses, or with Unavailable if the session has rejected a request.
        """
        self._loop: Final = loop
        self._data: Final = memoryview(bytearray(data))
        self._at = 0
        self._done: Final = done
        self._parts: list[bytes] = []
        self._size = 0  # bytes in ``_parts``
        self.backlog = 0
        self.more: Callable[[bytes], None] | None = None
        self._session: Session | None = None
        self.peer: Final = peer
        self.certified: Final = certified

    def run(self, open_session: Callable[[Output, Callable[[], None]], Session]) -> ForwardedRequests:
        """Execute the requests in the session that ``open_session`` returns."""
        try:
            self._session = open_session(self, self._offer)
        except PeerError as error:
            self._loop.call_soon(self._done, _rejected(error))
        else:
            self._loop.call_soon(self._offer)
        return self

    def _offer(self) -> None:
        session = self._session
        if session is None:
            return
        try:
            while self._at < len(self._data) and not session.paused():
                taken = session.receive(self._data[self._at :])
                if not taken:
                    session.paused()  # lets a waiting session call ``_offer`` later
                    break
                self._at += taken
        except PeerError as error:
            self.fail(error)
            return
        self._end_when_answered()

    def _end_when_answered(self) -> None:
        if self._session is not None and self._at == len(self._data) and not self._session.owes():
            self._end(b"".join(self._parts))

    def _end(self, result: bytes | BrokerError) -> None:
        self.cancel()
        self._done(result)

    def cancel(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def credit(self, count: int) -> None:
        was_full = self.backlog >= self.backlog_max
        self.backlog -= count
        if was_full and self.backlog < self.backlog_max and self._session is not None:
            self._session.drained()

    # Output

    def write(self, data: Buffer) -> None:
        self._size += len(data)
        if self._size > RESPONSE_BYTES_MAX:
            self.fail(PeerError(f"the response is too large limit={RESPONSE_BYTES_MAX}", fatal=True))
            return
        self._parts.append(bytes(data))
        if self.more is not None:
            self.backlog += len(data)
            if self._size >= PIECE_BYTES_MIN:
                piece, self._size = b"".join(self._parts), 0
                self._parts.clear()
                self.more(piece)
        self._loop.call_soon(self._end_when_answered)

    def write_many(self, parts: Sequence[Buffer], released: Callable[[], None] | None = None) -> None:
        for part in parts:
            self.write(part)
        if released is not None:
            released()

    def close(self) -> None:
        if self._session is not None:
            self._end(b"".join(self._parts))

    def fail(self, error: PeerError) -> None:
        """Report Unavailable instead of responses."""
        if self._session is not None:
            self._end(_rejected(error))

    def identified(self, principal: Principal | None) -> None:
        pass

    def set_client_id(self, client_id: str | None) -> None:
        pass

    def delay_ms(self, size: int) -> int:
        return 0

    def pin(self) -> Callable[[], None]:
        return _nothing


Executor = Callable[[Sender, memoryview, Completion[bytes]], ForwardedRequests]
"""Executes complete requests of a client. The completion gets all of their responses, joined."""


def _rejected(error: PeerError) -> Unavailable:
    return Unavailable(ErrorCode.STOPPING, f"a process has rejected a forwarded request reason={error}")


def _nothing() -> None:
    pass


class Forwarding(Protocol):
    """Forwards requests of clients to other processes of the broker."""

    @property
    def shards(self) -> Shards:
        """The broker's shards."""

    @property
    def users(self) -> Access:
        """See ``WireBroker``."""

    def execute(
        self,
        shard: int,
        protocol: str,
        sender: Sender,
        requests: bytes,
        then: Completion[bytes],
        more: Callable[[bytes], None] | None = None,
    ) -> Execution:
        """Execute complete requests of a client in another process.

        Raises Busy(BUSY) if too many bytes are in flight to that process.

        Args:
            protocol: name of the protocol.
            then: called with the responses, joined, or with Unavailable. Not called inside this call.
            more: called with long responses in pieces, so that ``then`` gets only the last piece. The caller must
                report the bytes that the client has received to ``Execution.credit``.
        """
