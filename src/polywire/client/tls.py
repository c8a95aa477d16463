"""TLS for clients, which ``+tls`` in a URL selects.

The broker's certificate and host name are verified. Trusted authorities are those of the system, or those in
``SSL_CERT_FILE`` and ``SSL_CERT_DIR``.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from typing import Any, Final

SCHEME_SUFFIX: Final = "+tls"
JOINED_BYTES_MAX: Final = 64 * 1024  # parts are joined up to this size, so that they are sent as one TLS record


def client_context() -> ssl.SSLContext:
    """Return a context for TLS 1.2 and newer that verifies certificates and host names.

    Trusted authorities are those of the system, or those in the environment variables ``SSL_CERT_FILE`` and
    ``SSL_CERT_DIR``.
    """
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def secured(context: ssl.SSLContext | None, host: str) -> dict[str, Any]:
    """Return the arguments of ``create_connection`` for TLS to this host, or no arguments if ``context`` is None."""
    return {} if context is None else {"ssl": context, "server_hostname": host}


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
        """Return a placeholder if decrypted data is buffered.

        Otherwise return received bytes, which may be encrypted.
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
