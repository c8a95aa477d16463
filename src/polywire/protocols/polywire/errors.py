"""The error numbers of the `polywire` protocol, each for a code and a kind of error (spec: polywire#errors).

Every ``ErrorCode`` has a number, and every number has a code. If a client does not know a code, it raises the most
general error of that kind.
"""

from __future__ import annotations

from typing import Final

from polywire.errors import (
    BrokerError,
    Busy,
    Conflict,
    Corrupt,
    Denied,
    ErrorCode,
    Invalid,
    Missing,
    NotOwner,
    Retry,
    Unavailable,
)
from polywire.protocols.polywire.messages import Failure

CODES: Final[dict[ErrorCode, int]] = {
    ErrorCode.INVALID_REQUEST: 1,
    ErrorCode.INVALID_BATCH: 2,
    ErrorCode.INVALID_TOPIC: 3,
    ErrorCode.INVALID_PARTITION_COUNT: 4,
    ErrorCode.INVALID_NAME: 5,
    ErrorCode.RECORD_TOO_LARGE: 6,
    ErrorCode.SEQUENCE_GAP: 7,
    ErrorCode.INVALID_SESSION_TIMEOUT: 8,
    ErrorCode.DENIED: 16,
    ErrorCode.LOGIN_REQUIRED: 17,
    ErrorCode.LOGIN_FAILED: 18,
    ErrorCode.TOPIC_MISSING: 32,
    ErrorCode.PARTITION_MISSING: 33,
    ErrorCode.GROUP_MISSING: 34,
    ErrorCode.MEMBER_MISSING: 35,
    ErrorCode.STAGE_MISSING: 36,
    ErrorCode.OFFSET_OUT_OF_RANGE: 37,
    ErrorCode.EPOCH_ENDED: 38,
    ErrorCode.USER_MISSING: 39,
    ErrorCode.TOKEN_MISSING: 40,
    ErrorCode.TRANSACTION_MISSING: 41,
    ErrorCode.WRITER_MISSING: 42,
    ErrorCode.LINK_MISSING: 43,
    ErrorCode.TOPIC_EXISTS: 48,
    ErrorCode.TOPIC_REPLACED: 49,
    ErrorCode.GENERATION_STALE: 50,
    ErrorCode.PARTITION_NOT_ASSIGNED: 51,
    ErrorCode.PRODUCER_FENCED: 52,
    ErrorCode.GROUP_EXISTS: 55,
    ErrorCode.USER_EXISTS: 53,
    ErrorCode.TOKEN_EXISTS: 54,
    ErrorCode.VERSION_CONFLICT: 56,
    ErrorCode.GROUP_NOT_EMPTY: 57,
    ErrorCode.GROUP_REBALANCING: 58,
    ErrorCode.GROUP_PROTOCOL_MISMATCH: 59,
    ErrorCode.MEMBER_FENCED: 60,
    ErrorCode.LINK_EXISTS: 61,
    ErrorCode.TOPIC_LINKED: 62,
    ErrorCode.RECORD_NOT_ACQUIRED: 63,
    ErrorCode.NOT_OWNER: 64,
    ErrorCode.BUSY: 80,
    ErrorCode.STAGE_FULL: 81,
    ErrorCode.DISK_FULL: 82,
    ErrorCode.STOPPING: 96,
    ErrorCode.REPLICATION_TIMEOUT: 97,
    ErrorCode.STORAGE_FAILED: 98,
    ErrorCode.UNREACHABLE: 99,
    ErrorCode.CORRUPT: 112,
    ErrorCode.NEWER_FORMAT: 113,
}
_CODES_BY_NUMBER: Final = {number: code for code, number in CODES.items()}

KINDS: Final[dict[type[BrokerError], int]] = {
    Invalid: 1,
    Denied: 2,
    Missing: 3,
    Conflict: 4,
    NotOwner: 5,
    Busy: 6,
    Unavailable: 7,
    Corrupt: 8,
}
# By kind of error: the code to use instead of an unknown code, which is the most general one of the kind.
_KINDS_BY_NUMBER: Final[dict[int, tuple[type[BrokerError], ErrorCode]]] = {
    1: (Invalid, ErrorCode.INVALID_REQUEST),
    2: (Denied, ErrorCode.DENIED),
    3: (Missing, ErrorCode.TOPIC_MISSING),
    4: (Conflict, ErrorCode.TOPIC_EXISTS),
    5: (NotOwner, ErrorCode.NOT_OWNER),
    6: (Busy, ErrorCode.BUSY),
    7: (Unavailable, ErrorCode.STOPPING),
    8: (Corrupt, ErrorCode.CORRUPT),
}
RETRIES: Final[dict[Retry, int]] = {Retry.NEVER: 0, Retry.NOW: 1, Retry.LATER: 2, Retry.ELSEWHERE: 3}


def failure_of(error: BrokerError) -> Failure:
    """Return the header of an error frame for ``error``. Errors that only other protocols have become Invalid."""
    kind = KINDS.get(type(error), KINDS[Invalid])
    return Failure(CODES[error.code], kind, error.message, RETRIES[error.retry], error.retry_after_ms)


def error_of(failure: Failure) -> BrokerError:
    """Return the exception for the header of an error frame.

    An unknown kind of error becomes Unavailable: the outcome of the request is unknown.
    """
    kind, plain = _KINDS_BY_NUMBER.get(failure.kind, (Unavailable, ErrorCode.STOPPING))
    code = _CODES_BY_NUMBER.get(failure.code, plain)
    return kind(code, failure.message, retry_after_ms=failure.retry_after_ms)
