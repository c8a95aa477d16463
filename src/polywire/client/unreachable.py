"""Why no connection came about, in words of people.

Promises: the same words for every client, and a kind that tells whether waiting can help. Must not know: any wire, any event loop.
"""

from __future__ import annotations

import socket
import ssl
from typing import Final

from polywire.errors import BrokerError, ErrorCode, Invalid, PeerError, Unavailable
from polywire.types import spell_address

HUNG_UP: Final = "the server closed the connection without replying: check the port, TLS on both ends,"

SILENT: Final = "no response in time (check that the port belongs to this protocol)"


def hung_up(address: str, doubt: str = "") -> Unavailable:
    """Somebody listens and hung up without a word: it was just ending, takes this for nonsense, or means what ``doubt`` asks."""
    cause = " ".join(filter(None, (HUNG_UP, doubt, "and that the cluster has a leader")))
    return Unavailable(ErrorCode.UNREACHABLE, f"cannot connect: {cause} address={address}")


def is_hanging_up(error: BrokerError) -> bool:
    """Whether this is what ``hung_up`` returned."""
    return HUNG_UP in error.message


def silent(address: str) -> Unavailable:
    """Somebody listens and says nothing: another wire, which waits for the rest of a request, or a broker that stands still."""
    return Unavailable(ErrorCode.UNREACHABLE, f"cannot connect: {SILENT} address={address}")


def is_silent(error: BrokerError) -> bool:
    """Whether this is what ``silent`` returned."""
    return SILENT in error.message


def nobody_answers(reasons: list[str]) -> Unavailable:
    """None of several brokers could be reached, each for its reason."""
    return Unavailable(ErrorCode.UNREACHABLE, f"no broker responds reasons={'; '.join(reasons)}")


def makes_no_sense(error: PeerError, address: str, *, is_answered: bool) -> Unavailable:
    """What came is no reply of this wire; from a port that has not answered anything else, it may be another's."""
    cause = (
        error.message
        if is_answered
        else f"cannot connect: {error.message} (check that the port belongs to this protocol)"
    )
    return Unavailable(ErrorCode.UNREACHABLE, f"{cause} address={address}")


def cannot_connect(error: Exception, host: str, port: int) -> BrokerError:
    """What is raised when no connection came about: Invalid for what waiting does not mend."""
    kind: type[BrokerError]
    match error:
        case ConnectionResetError() | ConnectionAbortedError() | ssl.SSLEOFError():
            return hung_up(spell_address(host, port))
        case ssl.SSLError():
            kind, code, cause = Invalid, ErrorCode.INVALID_REQUEST, _cause(error)
        case _:
            kind, code, cause = Unavailable, ErrorCode.UNREACHABLE, _cause(error)
    return kind(code, f"cannot connect: {cause} address={spell_address(host, port)}")


def _cause(error: Exception) -> str:
    match error:
        case ConnectionRefusedError():
            return "connection refused (check that a broker is running there)"
        case socket.gaierror():
            return "no such host"
        case ssl.SSLCertVerificationError():
            return f"the server's certificate is not trusted ({error.verify_message})"
        case ssl.SSLError(reason="WRONG_VERSION_NUMBER" | "RECORD_LAYER_FAILURE"):
            return "the server does not use TLS (remove +tls)"
        case ssl.SSLError():
            return f"TLS failed ({error.reason or error})"
        case TimeoutError():
            return SILENT
        case _:
            return str(error) or type(error).__name__
