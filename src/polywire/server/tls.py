"""TLS for connections of clients and for links to other machines.

This module also detects TLS on ports that accept connections with and without TLS.

* A connection sees the same back-pressure as without TLS. Written bytes count as unsent until the kernel has accepted
  them, and nothing is read from the socket while the connection is paused.
* Bytes of a client that fails the handshake never reach a session.
"""

from __future__ import annotations

import asyncio
import ssl
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol, cast

import structlog

from polywire.errors import ErrorCode, Invalid
from polywire.server.config import ServeConfig
from polywire.server.connection import Connection
from polywire.server.file_permissions import warn_of_readable
from polywire.server.hub import Hub
from polywire.server.phases import EndedTransport
from polywire.types import Buffer

RECORD_BYTES: Final = 16 * 1024  # the maximum of a TLS record
RECORDS_BYTES: Final = 256 * 1024  # limit for the bytes that are read from the socket, or encrypted, at once
HANDSHAKE_SECONDS_MAX: Final = 10.0
HELLO_BYTES: Final = 6  # header of a TLS record, and the first byte of a ClientHello

log = structlog.get_logger("polywire.server")

_scratch: Final = memoryview(bytearray(RECORDS_BYTES))
"""Memory for encrypted bytes between the socket and OpenSSL.

All connections share it, because it is filled and emptied in the same callback of the loop.
"""


def server_context(certificate: Path, key: Path | None, client_authority: Path | None) -> ssl.SSLContext:
    """Return a context for TLS 1.2 and newer with this certificate (PEM with its chain).

    If ``client_authority`` is set, clients must present a certificate signed by it. Raises Invalid(INVALID_REQUEST) for
    a missing or invalid file.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    try:
        context.load_cert_chain(certificate, key)
        if client_authority is not None:
            context.load_verify_locations(client_authority)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"cannot use the certificate reason={error} certificate={certificate} key={key} authority={client_authority}",
        ) from error
    return context


class ServerTls:
    """The server's certificate. New connections get the certificate of the latest ``reload``."""

    __slots__ = ("_config", "context")

    def __init__(self, config: ServeConfig) -> None:
        """Load the certificate. Raises Invalid(INVALID_REQUEST) for an invalid file."""
        self._config: Final = config
        self.context = self._load()

    def reload(self) -> None:
        """Load the files again.

        If that fails, raise Invalid(INVALID_REQUEST) and continue to use the previous certificate.
        """
        self.context = self._load()

    def over(self, hub: Hub, connection: Connection, *, plain_too: bool) -> TlsConnection:
        """Return the asyncio protocol for the socket of a connection.

        ``plain_too``: whether clients without TLS are accepted.
        """
        return TlsConnection(hub, connection, self.context, plain_too=plain_too)

    def _load(self) -> ssl.SSLContext:
        config = self._config
        assert config.tls_certificate is not None, "there is a certificate"
        context = server_context(config.tls_certificate, config.tls_key, config.tls_client_authority)
        warn_of_readable(config.tls_key or config.tls_certificate)
        return context


def server_tls(config: ServeConfig) -> ServerTls | None:
    """Return the TLS of the broker's listeners; None if no certificate is configured.

    Raises Invalid(INVALID_REQUEST) for an invalid file.
    """
    return None if config.tls_certificate is None else ServerTls(config)


def is_hello(prefix: bytes) -> bool | None:
    """Return whether these bytes begin a TLS handshake; None if more are needed.

    No request of a supported protocol begins with these bytes. If they were the length of a frame, they would exceed
    every limit, or be followed by a command that no client sends first.
    """
    known = b"\x16\x03"
    if not known.startswith(prefix[:2]) and not prefix.startswith(known):
        return False
    return prefix[5] == 1 if len(prefix) >= HELLO_BYTES else None


def common_name(certificate: Mapping[str, Any]) -> str:
    """Return the common name of a verified certificate; empty unless the certificate has exactly one."""
    names = [value for parts in certificate.get("subject", ()) for key, value in parts if key == "commonName"]
    return names[0] if len(names) == 1 else ""


class TlsUser(Protocol):
    """The asyncio protocol that uses a ``TlsTransport``."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is connected. Bytes that are written now are sent after the handshake."""

    def eof_received(self) -> bool | None:
        """Handle the end of the other side's stream. Return True to keep the connection open for writing."""

    def pause_writing(self) -> None: ...

    def resume_writing(self) -> None: ...

    def connection_lost(self, exc: Exception | None) -> None: ...


class TlsTransport(asyncio.BufferedProtocol, ABC):
    """One end of a TLS connection. The protocol that uses it sees an asyncio transport.

    While that protocol pauses, at most ``RECORDS_BYTES`` of decrypted bytes wait in OpenSSL.
    """

    __slots__ = (
        "_early",
        "_engine",
        "_finished",
        "_incoming",
        "_open",
        "_outgoing",
        "_paused",
        "_pumping",
        "_timer",
        "_transport",
        "_user",
    )

    def __init__(self, user: TlsUser) -> None:
        self._user: Final = user
        self._incoming: Final = ssl.MemoryBIO()
        self._outgoing: Final = ssl.MemoryBIO()
        self._engine: ssl.SSLObject | None = None  # set when the other end is known to use TLS
        self._transport: Any = None  # uvloop's transport is not a subclass of asyncio.Transport
        self._timer: asyncio.TimerHandle | None = None
        self._open = False  # whether the handshake is complete; before, the user gets no bytes
        self._early: list[Buffer] = []
        self._paused = False
        self._pumping = False
        self._finished = False

    # Implemented by each end

    @abstractmethod
    def _may_open(self) -> bool:
        """Check the other end after the handshake. Return False if the check has closed the connection."""

    @abstractmethod
    def _failed(self, reason: str, error: ssl.SSLError | None) -> None:
        """Close the connection after a TLS failure. ``error`` is None after a timeout."""

    @abstractmethod
    def _plain_memory(self) -> memoryview:
        """Return memory for decrypted bytes."""

    @abstractmethod
    def _plain_received(self, count: int) -> None: ...

    # Called by the socket

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(HANDSHAKE_SECONDS_MAX, self._too_late)
        self._user.connection_made(self)  # type: ignore[arg-type]  # it has the verbs that are used

    def _too_late(self) -> None:
        if not self._open and not self._transport.is_closing():
            self._failed("the client did not complete the TLS handshake in time", None)

    def get_buffer(self, sizehint: int) -> memoryview:
        return _scratch

    def buffer_updated(self, nbytes: int) -> None:
        self._incoming.write(_scratch[:nbytes])
        self._pump()

    def eof_received(self) -> bool:
        if not self._open:
            return False
        return self._finish()

    def _finish(self) -> bool:
        """Handle the end of the stream. Return whether the connection stays open for writing."""
        if not self._finished:
            self._finished = True
            return bool(self._user.eof_received())
        return True

    def pause_writing(self) -> None:
        self._user.pause_writing()

    def resume_writing(self) -> None:
        self._user.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        self._finished = True
        self._user.connection_lost(exc)
        self._transport = EndedTransport(self._transport)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # Between socket and user

    def _pump(self) -> None:
        """Continue the handshake. After the handshake, pass decrypted bytes to the protocol until the protocol pauses."""
        if self._pumping or self._transport.is_closing():
            return
        self._pumping = True
        try:
            if not self._open:
                self._shake_hands()
            if self._open:
                self._decrypt()
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            self._send()  # an alert, if there is one
            self._failed(f"TLS failed: {error.reason or error}", error)
            return
        finally:
            self._pumping = False
        self._send()

    def _shake_hands(self) -> None:
        assert self._engine is not None, "the socket uses TLS"
        self._engine.do_handshake()
        if not self._may_open():
            return
        self._open = True
        self._cancel_timer()
        self._send()
        early, self._early = self._early, []
        for data in early:
            self.write(data)

    def _decrypt(self) -> None:
        engine = self._engine
        assert engine is not None, "the socket uses TLS"
        while self._incoming.pending or engine.pending():
            if self._paused or self._finished or self._transport.is_closing():
                return
            memory = self._plain_memory()
            try:
                # the type stub wants a bytearray, but a memoryview works
                count = cast(int, engine.read(len(memory), cast(bytearray, memory)))
            except ssl.SSLZeroReturnError:
                count = 0
            if count:
                self._plain_received(count)
            elif not self._finish():
                self.close()

    def _send(self) -> None:
        while self._outgoing.pending and not self._transport.is_closing():
            self._transport.write(self._outgoing.read(RECORDS_BYTES))

    # Called by the user

    def write(self, data: Buffer) -> None:
        if self._transport.is_closing():
            return  # as in every transport; the engine may have failed
        if not self._open:
            self._early.append(bytes(data))
            return
        assert self._engine is not None, "the handshake is done"
        view = memoryview(data).cast("B")
        while len(view):
            view = view[self._engine.write(view[:RECORDS_BYTES]) :]
            self._send()

    def writelines(self, parts: Sequence[Buffer]) -> None:
        """Write parts in order. Small parts share a TLS record."""
        if sum(map(len, parts)) <= RECORDS_BYTES:
            self.write(b"".join(parts))
            return
        for part in parts:
            self.write(part)

    def can_write_eof(self) -> bool:
        """Return whether one direction can be closed before the other."""
        return self._open

    def write_eof(self) -> None:
        """Send the end of the stream. Bytes from the other end are still read."""
        if self._open and self._engine is not None and not self._transport.is_closing():
            with suppress(ssl.SSLError):  # unwrap raises an error if the other end has not closed its direction yet
                self._engine.unwrap()
            self._send()

    def pause_reading(self) -> None:
        self._paused = True
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
            asyncio.get_running_loop().call_soon(self._pump)

    def close(self) -> None:
        self.write_eof()
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def is_closing(self) -> bool:
        return bool(self._transport.is_closing())

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._transport.set_write_buffer_limits(high=high, low=low)

    def get_write_buffer_size(self) -> int:
        return int(self._transport.get_write_buffer_size()) + self._outgoing.pending

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)


class TlsConnection(TlsTransport):
    """An accepted connection of a TLS listener. A client certificate logs in the user that it names."""

    __slots__ = ("_connection", "_context", "_hub", "_prefix")

    def __init__(self, hub: Hub, connection: Connection, context: ssl.SSLContext, *, plain_too: bool) -> None:
        """``plain_too`` is whether clients without TLS are also accepted."""
        super().__init__(connection)
        self._hub: Final = hub
        self._connection: Final = connection
        self._context: Final = context
        self._prefix = b""
        if not plain_too:
            self._engine = self._make_engine()

    def _make_engine(self) -> ssl.SSLObject:
        return self._context.wrap_bio(self._incoming, self._outgoing, server_side=True)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return memory for a limited number of bytes.

        The limit is this connection's share of the receive limit, because decrypted bytes can wait in the engine.
        """
        share = self._hub.limits.receive_total_bytes_max // max(len(self._hub.connections), 1)
        return _scratch[: max(share, RECORD_BYTES)]

    def buffer_updated(self, nbytes: int) -> None:
        if self._engine is None and not self._decide(bytes(_scratch[:nbytes])):
            return
        if self._engine is not None and not self._prefix:
            self._incoming.write(_scratch[:nbytes])
        self._prefix = b""
        self._pump()

    def _decide(self, content: bytes) -> bool:
        """Return whether the bytes so far show that the client uses TLS.

        If the client does not use TLS, the connection continues without this object.
        """
        self._prefix += content
        found = is_hello(self._prefix)
        if found:
            self._engine = self._make_engine()
            self._incoming.write(self._prefix)
        elif found is False:
            self._cancel_timer()
            self._connection.move_to(self._transport, self._prefix)
        return bool(found)

    def _may_open(self) -> bool:
        assert self._engine is not None, "the socket uses TLS"
        certificate = self._engine.getpeercert()
        return not certificate or self._connection.certify(common_name(certificate))

    def _failed(self, reason: str, error: ssl.SSLError | None) -> None:
        self._connection.abort(reason)

    def _plain_memory(self) -> memoryview:
        return self._connection.get_buffer(-1)

    def _plain_received(self, count: int) -> None:
        self._connection.buffer_updated(count)
