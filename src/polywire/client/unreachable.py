"""Why no connection came about, in words of people.

Promises: the same words for every client, and a kind that tells whether waiting can help. Must not know: any wire, any event loop.
"""

from __future__ import annotations

import socket
import ssl
from typing import Final

from polywire.errors import BrokerError, ErrorCode, Invalid, Unavailable

HUNG_UP: Final = "it hung up at once, is it another wire's port, or is TLS on one side only?"


def hung_up() -> Unavailable:
    """Somebody listens and hung up without a word: a broker that was just ending, or one that takes this for nonsense."""
    return Unavailable(ErrorCode.STOPPING, f"cannot connect: {HUNG_UP}")


def is_hanging_up(error: BrokerError) -> bool:
    """Whether this is what ``hung_up`` returned."""
    return error.message.endswith(HUNG_UP)


def cannot_connect(error: Exception, host: str, port: int) -> BrokerError:
    """What is raised when no connection came about: Invalid for what waiting does not mend."""
    kind: type[BrokerError]
    match error:
        case ConnectionResetError() | ConnectionAbortedError() | ssl.SSLEOFError():
            return hung_up()
        case ssl.SSLError():
            kind, code, cause = Invalid, ErrorCode.INVALID_REQUEST, _cause(error)
        case _:
            kind, code, cause = Unavailable, ErrorCode.STOPPING, _cause(error)
    return kind(code, f"cannot connect: {cause} address={host}:{port}")


def _cause(error: Exception) -> str:
    match error:
        case ConnectionRefusedError():
            return "connection refused, is a broker running there?"
        case socket.gaierror():
            return "no such host"
        case ssl.SSLCertVerificationError():
            return f"its certificate is not trusted ({error.verify_message})"
        case ssl.SSLError(reason="WRONG_VERSION_NUMBER" | "RECORD_LAYER_FAILURE"):
            return "what listens there speaks no TLS, leave out +tls"
        case ssl.SSLError():
            return f"TLS failed ({error.reason or error})"
        case TimeoutError():
            return "no answer in time"
        case _:
            return str(error) or type(error).__name__
