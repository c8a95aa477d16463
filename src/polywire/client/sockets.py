"""Blocking sockets for frames of the `polywire` protocol, and a pool of them.

Every error of the connection closes it and raises Unavailable. The header of every response is checked. A pooled socket
is reused only if its last response was read completely. Calls of the pool may come from any thread.
"""

from __future__ import annotations

import math
import socket
import ssl
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from polywire.client.address import Login
from polywire.client.failures import (
    POLYWIRE_PORT,
    cannot_connect,
    connection_closed,
    no_broker_responds,
    no_reply,
    not_polywire,
)
from polywire.errors import BrokerError, ErrorCode, PeerError, Unavailable
from polywire.protocols.polywire.codec import (
    ERROR,
    MAGIC,
    MORE,
    PREFIX_BYTES,
    Prefix,
    decode_answer,
    decode_answer_prefix,
    encode_head,
)
from polywire.protocols.polywire.errors import error_of
from polywire.protocols.polywire.messages import Failure, Head, Limits, LogIn, Verb
from polywire.records.allocation import Arena
from polywire.types import Buffer, spell_address

JOINED_BYTES_MAX: Final = 64 * 1024  # parts are joined up to this size, so that they are sent as one TLS record
SEND_PARTS_MAX: Final = 64  # buffers per sendmsg, far below the system's limit of 1,024
SPARE_MAX: Final = 4  # idle sockets in the pool


class TlsSocket:
    """The methods of a blocking socket that ``FramedSocket`` uses, over TLS. They raise OSError as a socket does."""

    def __init__(self, plain: socket.socket, context: ssl.SSLContext, host: str) -> None:
        self._socket: Final = context.wrap_socket(plain, server_hostname=host)

    def setsockopt(self, *args: Any) -> None:
        """Set an option of the TCP socket."""
        self._socket.setsockopt(*args)

    def settimeout(self, timeout_s: float | None) -> None:
        """Limit each wait to this many seconds. None waits forever."""
        self._socket.settimeout(timeout_s)

    def close(self) -> None:
        """Close the TLS and the TCP socket."""
        self._socket.close()

    def recv(self, size: int, flags: int) -> bytes:
        """Return any bytes if the socket is readable, so that the caller can check this.

        If decrypted data is buffered, the result is a placeholder. Otherwise it comes from the socket, encrypted.
        """
        if self._socket.pending():
            return b"?"
        return socket.socket.recv(self._socket, size, flags)

    def recv_into(self, view: memoryview, size: int, flags: int) -> int:
        """Read at least one byte, or return 0 at the end. TLS has no flags."""
        try:
            return self._socket.recv_into(view, size)
        except ssl.SSLWantReadError as error:
            raise BlockingIOError(str(error)) from None

    def sendmsg(self, parts: Sequence[memoryview]) -> int:
        """Send some of the parts, in order, and return the number of bytes sent."""
        small: list[memoryview] = []
        size = 0
        for part in parts:
            size += len(part)
            if size > JOINED_BYTES_MAX:
                break
            small.append(part)
        return self._socket.send(b"".join(small) if small else parts[0])


class FramedSocket:
    """A connected blocking socket of the ``polywire`` protocol.

    It is closed after an error, so that the rest of a response is never read as the next response.

    Attributes:
        owed: number of requests whose responses were not read yet.
    """

    __slots__ = ("_correlation", "_is_greeted", "_socket", "address", "limits", "open", "owed")

    def __init__(
        self, host: str, port: int, *, timeout_s: float, tls: ssl.SSLContext | None = None, login: Login | None = None
    ) -> None:
        """Connect, negotiate the protocol version, and log in.

        ``timeout_s`` limits each wait for the broker, in seconds. Raises Unavailable. If the login fails, raises
        Denied(LOGIN_FAILED) or Busy.
        """
        try:
            plain = socket.create_connection((host, port), timeout=timeout_s)
            connected: Any = plain if tls is None else TlsSocket(plain, tls, host)
        except OSError as error:
            raise cannot_connect(error, host, port) from None
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._begin(connected, spell_address(host, port), timeout_s)
        if login is not None:
            self._log_in(login)

    @classmethod
    def over(cls, connected: socket.socket, *, timeout_s: float) -> FramedSocket:
        """Return the client's end of a connected socket pair. Raises Unavailable."""
        made = cls.__new__(cls)
        made._begin(connected, "socket pair", timeout_s)
        return made

    def _begin(self, connected: Any, address: str, timeout_s: float) -> None:
        self.address = address
        self.open = True
        self.owed = 0
        self._correlation = 0
        self._is_greeted = False
        self._socket = connected
        # With the kernel's timeouts, one recv call returns a whole frame. Python's timeouts would poll before each part
        # of it.
        self._socket.settimeout(None)
        fraction, seconds = math.modf(timeout_s)
        interval = struct.pack("@ll", int(seconds), int(fraction * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, interval)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, interval)
        self.limits = self._greet()

    def _log_in(self, login: Login) -> None:
        try:
            prefix, _ = self.receive(self.send(Verb.LOGIN, LogIn(login.name, login.password)))
            self.receive_payload(prefix)
        except BrokerError:
            self.close()
            raise

    def close(self) -> None:
        """Close the socket. Responses that were not read are lost."""
        self.open = False
        self._socket.close()

    def usable(self) -> bool:
        """Return whether the socket can be reused: the broker has not closed it, and all responses were read."""
        if not self.open or self.owed:
            return False
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            pass
        # Readable although no response is due: the peer closed the connection, or sent unrequested bytes.
        self.close()
        return False

    def send(self, verb: Verb, head: Head, payload: Sequence[Buffer] = ()) -> int:
        """Send one request, and return its correlation id."""
        self._correlation = (self._correlation % 0xFFFF_FFFF) + 1
        self.owed += 1
        size = sum(memoryview(part).nbytes for part in payload)
        self._send_parts([encode_head(verb, self._correlation, head, payload_bytes=size), *payload])
        return self._correlation

    def receive(self, correlation: int) -> tuple[Prefix, bytes]:
        """Return the prefix and the header of the next response frame. The caller must then read its payload.

        Raises the error in the response, or Unavailable if the frame does not have this correlation id.
        """
        prefix, head = self._receive_frame()
        if prefix.correlation != correlation:
            self.close()
            raise Unavailable(ErrorCode.UNREACHABLE, f"unexpected response address={self.address}")
        return prefix, head

    def receive_payload(self, prefix: Prefix, arena: Arena | None = None) -> memoryview:
        """Return the payload of the frame whose header was read last, in memory of ``arena`` if it is set."""
        size = prefix.length - prefix.head_bytes
        view = memoryview(bytearray(size)) if arena is None or size == 0 else arena.take(size)
        self._receive_into(view)
        if not more_follows(prefix):
            self.owed -= 1
        return view

    def _greet(self) -> Limits:
        self._send_parts([MAGIC])
        opening = bytearray(len(MAGIC))
        self._receive_into(memoryview(opening))
        if opening != MAGIC:
            self.close()
            raise not_polywire(bytes(opening), self.address)
        self._is_greeted = True
        _, head = self._receive_frame()
        return self._decode(head)

    def _decode(self, head: bytes) -> Limits:
        try:
            return decode_answer(head, Limits)
        except PeerError as error:
            self.close()
            raise Unavailable(ErrorCode.UNREACHABLE, error.message) from None

    def _receive_frame(self) -> tuple[Prefix, bytes]:
        start = bytearray(PREFIX_BYTES)
        self._receive_into(memoryview(start))
        try:
            prefix = decode_answer_prefix(start)
            head = bytearray(prefix.head_bytes)
            self._receive_into(memoryview(head))
            if not prefix.flags & ERROR:
                return prefix, bytes(head)
            failure = decode_answer(head, Failure)
        except PeerError as error:
            self.close()
            raise Unavailable(ErrorCode.UNREACHABLE, f"{error.message} address={self.address}") from None
        self.owed -= 1
        raise error_of(failure)

    def _receive_into(self, view: memoryview) -> None:
        at = 0
        try:
            while at < len(view):
                size = self._socket.recv_into(view[at:], 0, socket.MSG_WAITALL)
                if size == 0:
                    raise ConnectionResetError("the broker closed the connection")
                at += size
        except BlockingIOError:
            self.close()
            if not self._is_greeted:
                raise no_reply(self.address) from None
            raise Unavailable(ErrorCode.UNREACHABLE, f"no response in time address={self.address}") from None
        except OSError as error:
            raise self._lost(error) from None

    def _lost(self, error: OSError) -> Unavailable:
        """Close the socket, and return the error for a lost connection."""
        self.close()
        if not self._is_greeted:
            return connection_closed(self.address, POLYWIRE_PORT)
        return Unavailable(ErrorCode.UNREACHABLE, f"connection lost reason={error} address={self.address}")

    def _send_parts(self, parts: Sequence[Buffer]) -> None:
        views = [view for view in (memoryview(part).cast("B") for part in parts) if len(view)]
        try:
            while views:
                sent = self._socket.sendmsg(views[:SEND_PARTS_MAX])
                while views and sent >= len(views[0]):
                    sent -= len(views.pop(0))
                if sent:
                    views[0] = views[0][sent:]
        except OSError as error:
            raise self._lost(error) from None


def more_follows(prefix: Prefix) -> bool:
    """Return whether further frames of the response follow this one."""
    return bool(prefix.flags & MORE)


@dataclass(frozen=True, slots=True)
class BrokerAddress:
    """The address of a broker, and the TLS settings that verify it; None connects without TLS."""

    host: str
    port: int
    tls: ssl.SSLContext | None = None


class Sockets:
    """A pool of sockets. A socket is lent to one caller at a time."""

    __slots__ = ("_addresses", "_last_used", "_lock", "_login", "_spares", "_timeout_s")

    def __init__(
        self,
        addresses: Sequence[BrokerAddress],
        *,
        timeout_s: float,
        login: Login | None,
        connected: Sequence[FramedSocket] = (),
    ) -> None:
        """Create a pool for one or more brokers. Other arguments are the same as in ``FramedSocket``.

        ``connected`` are sockets that the pool begins with. Without addresses, it opens no others.
        """
        self._addresses: Final = tuple(addresses)
        self._timeout_s: Final = timeout_s
        self._login: Final = login
        self._lock: Final = threading.Lock()
        self._spares: list[FramedSocket] = list(connected)
        self._last_used = 0
        """Index of the broker to which the last connection was opened."""

    def take(self) -> FramedSocket:
        """Return a socket. The caller returns it with ``give``. Raises Unavailable."""
        while True:
            with self._lock:
                found = self._spares.pop() if self._spares else None
            if found is None:
                return self._open()
            if found.usable():
                return found

    def give(self, socket: FramedSocket) -> None:
        """Return a socket to the pool. It is closed if a response was not read."""
        with self._lock:
            if socket.open and not socket.owed and len(self._spares) < SPARE_MAX:
                self._spares.append(socket)
                return
        socket.close()

    def close(self) -> None:
        """Close idle sockets. Sockets in use stay open."""
        with self._lock:
            spares, self._spares = self._spares, []
        for spare in spares:
            spare.close()

    def _open(self) -> FramedSocket:
        count, first, reasons = len(self._addresses), self._last_used, []
        for turn in range(count):
            number = (first + turn) % count
            try:
                found = self._connect(self._addresses[number])
            except Unavailable as error:
                if count == 1:
                    raise
                reasons.append(error.message)
                continue
            self._last_used = number
            return found
        raise no_broker_responds(reasons)

    def _connect(self, address: BrokerAddress) -> FramedSocket:
        return FramedSocket(address.host, address.port, timeout_s=self._timeout_s, tls=address.tls, login=self._login)
