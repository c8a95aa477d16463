"""Create errors that the clients of all protocols raise with the same messages.

There are errors for these cases:

* A connection could not be opened. The class of the error says whether to retry.
* A protocol does not support a feature. The error is raised before anything is sent.
* A page of a list does not advance beyond the previous page. Without this error, reading the list would never end.
"""

from __future__ import annotations

import socket
import ssl
from typing import Final, TypeVar

from polywire.errors import BrokerError, Corrupt, ErrorCode, Invalid, PeerError, Unavailable
from polywire.records.columns import Record
from polywire.types import spell_address

CLOSED: Final = "the server closed the connection without replying: check the port, TLS on both ends,"

POLYWIRE_PORT: Final = "that this is the polywire listener (by default port 9555, not Kafka's 9094),"
"""Advice for ``connection_closed`` over the `polywire` protocol."""

NO_REPLY: Final = "no response in time (check that the port belongs to this protocol)"


def connection_closed(address: str, check: str = "") -> Unavailable:
    """Return the error for a broker that closed the connection without a reply.

    ``check`` is further advice.
    """
    cause = " ".join(filter(None, (CLOSED, check, "and that the cluster has a leader")))
    return Unavailable(ErrorCode.UNREACHABLE, f"cannot connect: {cause} address={address}")


def not_polywire(opening: bytes, address: str) -> Invalid:
    """Return the error for a reply that does not begin as the `polywire` protocol does."""
    return Invalid(
        ErrorCode.INVALID_REQUEST,
        "cannot connect: the server does not speak this version of the polywire protocol (check that the port is the"
        f" polywire listener, by default 9555) opening={opening.hex()} address={address}",
    )


def is_connection_closed(error: BrokerError) -> bool:
    """Return whether the error is from ``connection_closed``."""
    return CLOSED in error.message


def no_reply(address: str) -> Unavailable:
    """Return the error for a server that accepts the connection but does not reply.

    It may hang, or wait for more data because it speaks another protocol.
    """
    return Unavailable(ErrorCode.UNREACHABLE, f"cannot connect: {NO_REPLY} address={address}")


def is_no_reply(error: BrokerError) -> bool:
    """Return whether the error is from ``no_reply``."""
    return NO_REPLY in error.message


def no_broker_responds(reasons: list[str]) -> Unavailable:
    """Return the error if none of several brokers could be reached. ``reasons`` are their errors."""
    return Unavailable(ErrorCode.UNREACHABLE, f"no broker responds reasons={'; '.join(reasons)}")


def invalid_reply(error: PeerError, address: str, *, is_later: bool) -> Unavailable:
    """Return the error for an invalid reply. If it is the first reply, the message suggests to check the port."""
    cause = (
        error.message if is_later else f"cannot connect: {error.message} (check that the port belongs to this protocol)"
    )
    return Unavailable(ErrorCode.UNREACHABLE, f"{cause} address={address}")


def cannot_connect(error: Exception, host: str, port: int) -> BrokerError:
    """Return the error for a failed connection attempt: Invalid if a retry cannot help."""
    kind: type[BrokerError]
    match error:
        case ConnectionResetError() | ConnectionAbortedError() | ssl.SSLEOFError():
            return connection_closed(spell_address(host, port))
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
            return NO_REPLY
        case _:
            return str(error) or type(error).__name__


def cannot(wire: str, what: str) -> Invalid:
    """Return the error for an operation that the protocol does not support."""
    return Invalid(ErrorCode.INVALID_REQUEST, f"the {wire} protocol cannot {what}")


def cannot_name(wire: str, name: str) -> Invalid:
    """Return the error for a topic name that the protocol does not support."""
    return Invalid(ErrorCode.INVALID_TOPIC, f"the {wire} protocol does not support this name name={name!r}")


def bare_value(wire: str, record: Record, *, events: bool = False) -> bytes:
    """Return the value of a record that has only a value and a key, and with ``events`` also an event.

    Raises Invalid for any other record.
    """
    if record.value is None:
        raise cannot(wire, "send null values")
    if record.headers or record.id is not None or record.origin_time_us is not None:
        raise cannot(wire, "send headers, ids or times")
    if record.event is not None and not events:
        raise cannot(wire, "send events")
    return record.value


Cursor = TypeVar("Cursor", int, str, tuple[str, str])


def beyond(last: Cursor, found: Cursor, what: str) -> Cursor:
    """Return ``found``, the position at which a loop over pages continues.

    Raises Corrupt(CORRUPT) unless it is above the previous position ``last``, because the loop would never end.
    """
    if found <= last:
        raise Corrupt(
            ErrorCode.CORRUPT,
            f"the broker's response does not advance (check its version and logs) cursor={what} asked={last!r} answered={found!r}",
        )
    return found


def from_offset(records: list[Record], offset: int) -> list[Record]:
    """Return fetched records. Raises Corrupt(CORRUPT) if all of them are below ``offset``, the requested one."""
    if records:
        beyond(offset - 1, records[-1].offset, "offset")
    return records
