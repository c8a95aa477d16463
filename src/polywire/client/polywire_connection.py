"""Frames of the `polywire` protocol over one asyncio connection.

Responses may arrive in any order; each is matched to its request. If a caller is cancelled, its request is cancelled at
the broker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, Final

from polywire.client.connection import Connection
from polywire.client.unreachable import makes_no_sense
from polywire.errors import ErrorCode, Invalid, PeerError
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.codec import (
    ERROR,
    MAGIC,
    MORE,
    PREFIX_BYTES,
    decode_answer,
    decode_answer_prefix,
    encode_head,
)
from polywire.protocols.polywire.errors import error_of
from polywire.protocols.polywire.messages import Failure, Head, Verb
from polywire.types import Buffer


class _Pending:
    """A request in flight. ``parts`` has the payloads of the response frames received so far."""

    __slots__ = ("done", "parts")

    def __init__(self, done: asyncio.Future[tuple[bytes, list[bytes]]]) -> None:
        self.done: Final = done
        self.parts: list[bytes] = []


class PolywireConnection(Connection):
    """A connection of frames. Each request gets exactly one result or error, even if the connection is lost."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.greeted: Final[asyncio.Future[bytes]] = loop.create_future()
        self.greeted.add_done_callback(_ignore)
        self._buffer = bytearray()
        self._pending: dict[int, _Pending] = {}
        self._correlation = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the first bytes, which name the protocol and its version. Called by asyncio."""
        super().connection_made(transport)
        self._opened().write(MAGIC)

    def _take_waiting(self) -> Iterable[asyncio.Future[Any]]:
        pending, self._pending = self._pending, {}
        return [self.greeted, *(request.done for request in pending.values())]

    def data_received(self, data: bytes) -> None:
        """Pass complete responses to their requests. Called by asyncio."""
        self._buffer += data
        try:
            taken = self._take()
        except PeerError as error:
            self.fail(makes_no_sense(error, self._address, is_answered=self._is_answered))
            return
        except Invalid as error:
            self.fail(error)
            return
        del self._buffer[:taken]

    async def ask(self, verb: Verb, head: Head, payload: Sequence[Buffer] = ()) -> tuple[bytes, list[bytes]]:
        """Return the head of the response's last frame, and the payloads of all its frames."""
        transport = self._opened()
        self._correlation = (self._correlation % 0xFFFF_FFFF) + 1
        correlation = self._correlation
        pending = self._pending[correlation] = _Pending(self._loop.create_future())
        parts = [memoryview(part).cast("B") for part in payload]
        size = sum([len(part) for part in parts])
        transport.writelines([encode_head(verb, correlation, head, payload_bytes=size), *parts])
        try:
            await self._writable.wait()
            return await pending.done
        except asyncio.CancelledError:
            if verb is Verb.FETCH and self._lost is None:
                self._cancel(correlation)
            raise

    def _cancel(self, correlation: int) -> None:
        """Cancel a request at the broker. Its response, and the response to the cancellation, are ignored."""
        self._correlation = (self._correlation % 0xFFFF_FFFF) + 1
        ignored = self._pending[self._correlation] = _Pending(self._loop.create_future())
        ignored.done.add_done_callback(_ignore)
        self._opened().write(encode_head(Verb.CANCEL, self._correlation, messages.Cancel(correlation)))

    def _take(self) -> int:
        at = 0
        if not self._is_answered:
            self._look_for_tls(self._buffer)
            if len(self._buffer) < len(MAGIC):
                return 0
            if self._buffer[: len(MAGIC)] != MAGIC:
                raise Invalid(
                    ErrorCode.INVALID_REQUEST,
                    "cannot connect: the server does not speak this version of the polywire protocol"
                    f" opening={self._buffer[:8].hex()} address={self._address}",
                )
            self._is_answered = True
            at = len(MAGIC)
        while len(self._buffer) - at >= PREFIX_BYTES:
            prefix = decode_answer_prefix(self._buffer, at)
            end = at + PREFIX_BYTES + prefix.length
            if end > len(self._buffer):
                break
            body = at + PREFIX_BYTES + prefix.head_bytes
            with memoryview(self._buffer) as view:
                head, payload = bytes(view[at + PREFIX_BYTES : body]), bytes(view[body:end])
            self._settle(prefix.correlation, prefix.flags, head, payload)
            at = end
        return at

    def _settle(self, correlation: int, flags: int, head: bytes, payload: bytes) -> None:
        if correlation == 0:
            if flags & ERROR:
                raise PeerError(decode_answer(head, Failure).message, fatal=True)
            if not self.greeted.done():
                self.greeted.set_result(head)
            return
        pending = self._pending.get(correlation)
        if pending is None:
            raise PeerError(f"response without a request correlation={correlation}", fatal=True)
        if flags & ERROR:
            failure = decode_answer(head, Failure)
            del self._pending[correlation]
            if not pending.done.done():
                pending.done.set_exception(error_of(failure))
            return
        pending.parts.append(payload)
        if not flags & MORE:
            del self._pending[correlation]
            if not pending.done.done():
                pending.done.set_result((head, pending.parts))


def _ignore(done: asyncio.Future[Any]) -> None:
    """Retrieve the outcome. Otherwise asyncio would report an exception that was never retrieved."""
    if not done.cancelled():
        done.exception()
