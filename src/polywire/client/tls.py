"""TLS of clients: what ``+tls`` in a URL means.

Promises: the broker's certificate is verified, by host name too, against the authorities of the system or those the environment names
(``SSL_CERT_FILE``, ``SSL_CERT_DIR``). Must not know: any wire.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from typing import Any, Final

SCHEME_SUFFIX: Final = "+tls"
JOINED_BYTES_MAX: Final = 64 * 1024  # small parts go into one record


def client_context() -> ssl.SSLContext:
    """Return a context for TLS 1.2 and newer that verifies everything.

    Authorities are the system's, or those that ``SSL_CERT_FILE`` or ``SSL_CERT_DIR`` name in the environment.
    """
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def secured(context: ssl.SSLContext | None, host: str) -> dict[str, Any]:
    """What ``create_connection`` needs for TLS to this host; nothing without a context."""
    return {} if context is None else {"ssl": context, "server_hostname": host}


class TlsSocket:
    """The verbs of a blocking socket that ``FramedSocket`` uses, under TLS. Raises OSError as a socket does."""

    def __init__(self, plain: socket.socket, context: ssl.SSLContext, host: str) -> None:
        self._socket: Final = context.wrap_socket(plain, server_hostname=host)

    def setsockopt(self, *args: Any) -> None:
        """Set an option of the socket underneath."""
        self._socket.setsockopt(*args)

    def settimeout(self, timeout_s: float | None) -> None:
        """Limit each wait to so many seconds; None: wait for ever."""
        self._socket.settimeout(timeout_s)

    def close(self) -> None:
        """Close both."""
        self._socket.close()

    def recv(self, size: int, flags: int) -> bytes:
        """Return bytes that nobody asked for, encrypted or not."""
        if self._socket.pending():
            return b"?"
        return socket.socket.recv(self._socket, size, flags)

    def recv_into(self, view: memoryview, size: int, flags: int) -> int:
        """At least one byte, 0 at the end; TLS has no flags."""
        try:
            return self._socket.recv_into(view, size)
        except ssl.SSLWantReadError as error:
            raise BlockingIOError(str(error)) from None

    def sendmsg(self, parts: Sequence[memoryview]) -> int:
        """Some of the parts, in order; returns the bytes taken."""
        small: list[memoryview] = []
        size = 0
        for part in parts:
            size += len(part)
            if size > JOINED_BYTES_MAX:
                break
            small.append(part)
        return self._socket.send(b"".join(small) if small else parts[0])
