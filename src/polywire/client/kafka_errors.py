"""Convert error codes of the Kafka protocol to exceptions of ``polywire.errors``. An unknown code becomes Invalid."""

from __future__ import annotations

from typing import Any, Final

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
)
from polywire.protocols.kafka.messages import WireError

_ERRORS: Final[dict[int, tuple[type[BrokerError], ErrorCode]]] = {
    WireError.OFFSET_OUT_OF_RANGE: (Missing, ErrorCode.OFFSET_OUT_OF_RANGE),
    WireError.CORRUPT_MESSAGE: (Invalid, ErrorCode.INVALID_BATCH),
    WireError.UNKNOWN_TOPIC_OR_PARTITION: (Missing, ErrorCode.PARTITION_MISSING),
    WireError.LEADER_NOT_AVAILABLE: (Busy, ErrorCode.BUSY),
    WireError.NOT_LEADER_OR_FOLLOWER: (NotOwner, ErrorCode.NOT_OWNER),
    WireError.NOT_COORDINATOR: (NotOwner, ErrorCode.NOT_OWNER),
    WireError.REQUEST_TIMED_OUT: (Busy, ErrorCode.BUSY),
    WireError.MESSAGE_TOO_LARGE: (Invalid, ErrorCode.RECORD_TOO_LARGE),
    WireError.INVALID_TOPIC: (Invalid, ErrorCode.INVALID_TOPIC),
    WireError.TOPIC_AUTHORIZATION_FAILED: (Denied, ErrorCode.DENIED),
    WireError.ILLEGAL_SASL_STATE: (Denied, ErrorCode.LOGIN_REQUIRED),
    WireError.TOPIC_ALREADY_EXISTS: (Conflict, ErrorCode.TOPIC_EXISTS),
    WireError.INVALID_PARTITIONS: (Invalid, ErrorCode.INVALID_PARTITION_COUNT),
    WireError.KAFKA_STORAGE_ERROR: (Busy, ErrorCode.DISK_FULL),
    WireError.INVALID_RECORD: (Invalid, ErrorCode.INVALID_BATCH),
    WireError.THROTTLING_QUOTA_EXCEEDED: (Busy, ErrorCode.BUSY),
    WireError.COORDINATOR_LOAD_IN_PROGRESS: (Busy, ErrorCode.BUSY),
    WireError.COORDINATOR_NOT_AVAILABLE: (Busy, ErrorCode.BUSY),
    WireError.GROUP_MAX_SIZE_REACHED: (Busy, ErrorCode.BUSY),
    WireError.UNSTABLE_OFFSET_COMMIT: (Busy, ErrorCode.BUSY),
    WireError.INVALID_GROUP_ID: (Invalid, ErrorCode.INVALID_NAME),
    WireError.GROUP_AUTHORIZATION_FAILED: (Denied, ErrorCode.DENIED),
    WireError.GROUP_ID_NOT_FOUND: (Missing, ErrorCode.GROUP_MISSING),
    WireError.UNKNOWN_MEMBER_ID: (Missing, ErrorCode.MEMBER_MISSING),
    WireError.FENCED_MEMBER_EPOCH: (Conflict, ErrorCode.GENERATION_STALE),
    WireError.STALE_MEMBER_EPOCH: (Conflict, ErrorCode.GENERATION_STALE),
    WireError.ILLEGAL_GENERATION: (Conflict, ErrorCode.GENERATION_STALE),
    WireError.REBALANCE_IN_PROGRESS: (Conflict, ErrorCode.GENERATION_STALE),
    WireError.INCONSISTENT_GROUP_PROTOCOL: (Conflict, ErrorCode.GROUP_PROTOCOL_MISMATCH),
    WireError.SASL_AUTHENTICATION_FAILED: (Denied, ErrorCode.LOGIN_FAILED),
    WireError.UNSUPPORTED_SASL_MECHANISM: (Denied, ErrorCode.LOGIN_FAILED),
    WireError.CLUSTER_AUTHORIZATION_FAILED: (Denied, ErrorCode.DENIED),
    WireError.UNKNOWN_SERVER_ERROR: (Corrupt, ErrorCode.CORRUPT),
}


def error_of(number: int, message: str | None = None) -> BrokerError:
    """Return the exception for an error code."""
    kind, code = _ERRORS.get(number, (Invalid, ErrorCode.INVALID_REQUEST))
    return kind(code, message or f"the broker rejected the request code={number}")


def check(entry: Any, *, missing: ErrorCode = ErrorCode.PARTITION_MISSING) -> None:
    """Raise the exception for the error code in an entry of a response, unless the code is 0."""
    if entry.error == WireError.UNKNOWN_TOPIC_OR_PARTITION:
        raise Missing(missing, "no such topic or partition")
    if entry.error:
        raise error_of(entry.error, getattr(entry, "message", None))
