"""Why no connection came about, in words of people.

Promises: the same words for every client. Must not know: any wire, any event loop.
"""

from __future__ import annotations

import socket
import ssl
from typing import Final

from polywire.errors import ErrorCode, Unavailable

HUNG_UP: Final = "it hung up at once, is it another wire's port, or one with TLS?"


def cannot_connect(error: Exception, host: str, port: int) -> Unavailable:
    """What is raised when no connection came about."""
    return Unavailable(ErrorCode.STOPPING, f"cannot connect: {_cause(error)} address={host}:{port}")


def _cause(error: Exception) -> str:
    match error:
        case ConnectionRefusedError():
            return "connection refused, is a broker running there?"
        case socket.gaierror():
            return "no such host"
        case ssl.SSLCertVerificationError():
            return f"its certificate is not trusted ({error.verify_message})"
        case ssl.SSLError(reason="WRONG_VERSION_NUMBER" | "RECORD_LAYER_FAILURE" | "UNEXPECTED_EOF_WHILE_READING"):
            return "what listens there speaks no TLS, leave out +tls"
        case ssl.SSLError():
            return f"TLS failed ({error.reason or error})"
        case ConnectionResetError() | ConnectionAbortedError():
            return HUNG_UP
        case TimeoutError():
            return "no answer in time"
        case _:
            return str(error) or type(error).__name__
