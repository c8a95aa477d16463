"""Exceptions, one class for each way in which the caller should react.

Every failure that a client of the broker sees has one of these classes and one ``ErrorCode``. Each protocol maps the
codes to its own errors in its ``errors.py``.
"""

from __future__ import annotations

from enum import Enum
from typing import ClassVar, Final


class Retry(Enum):
    """When a retry can succeed."""

    NEVER = "never"
    NOW = "now"
    LATER = "later"
    ELSEWHERE = "elsewhere"


class ErrorCode(Enum):
    """Identifies an error. The class of the exception says how to react."""

    INVALID_REQUEST = "invalid_request"
    INVALID_BATCH = "invalid_batch"
    INVALID_TOPIC = "invalid_topic"
    INVALID_PARTITION_COUNT = "invalid_partition_count"
    INVALID_NAME = "invalid_name"
    INVALID_SESSION_TIMEOUT = "invalid_session_timeout"
    RECORD_TOO_LARGE = "record_too_large"
    SEQUENCE_GAP = "sequence_gap"
    DENIED = "denied"
    LOGIN_REQUIRED = "login_required"
    LOGIN_FAILED = "login_failed"
    TOPIC_MISSING = "topic_missing"
    PARTITION_MISSING = "partition_missing"
    GROUP_MISSING = "group_missing"
    MEMBER_MISSING = "member_missing"
    STAGE_MISSING = "stage_missing"
    TRANSACTION_MISSING = "transaction_missing"
    WRITER_MISSING = "writer_missing"
    USER_MISSING = "user_missing"
    TOKEN_MISSING = "token_missing"
    LINK_MISSING = "link_missing"
    OFFSET_OUT_OF_RANGE = "offset_out_of_range"
    EPOCH_ENDED = "epoch_ended"
    TOPIC_EXISTS = "topic_exists"
    TOPIC_REPLACED = "topic_replaced"
    TOPIC_LINKED = "topic_linked"
    GROUP_EXISTS = "group_exists"
    GROUP_NOT_EMPTY = "group_not_empty"
    GROUP_REBALANCING = "group_rebalancing"
    GROUP_PROTOCOL_MISMATCH = "group_protocol_mismatch"
    MEMBER_FENCED = "member_fenced"
    USER_EXISTS = "user_exists"
    TOKEN_EXISTS = "token_exists"
    LINK_EXISTS = "link_exists"
    GENERATION_STALE = "generation_stale"
    VERSION_CONFLICT = "version_conflict"
    PARTITION_NOT_ASSIGNED = "partition_not_assigned"
    RECORD_NOT_ACQUIRED = "record_not_acquired"
    PRODUCER_FENCED = "producer_fenced"
    NOT_OWNER = "not_owner"
    BUSY = "busy"
    STAGE_FULL = "stage_full"
    DISK_FULL = "disk_full"
    STOPPING = "stopping"
    REPLICATION_TIMEOUT = "replication_timeout"
    STORAGE_FAILED = "storage_failed"
    UNREACHABLE = "unreachable"  # raised by clients: no server listens or replies, or it speaks another protocol
    CORRUPT = "corrupt"
    NEWER_FORMAT = "newer_format"  # the checksum is valid but the format unknown: a newer version wrote the data


class BrokerError(Exception):
    """Base of all errors that a caller may see. The subclass says how to react; ``code`` identifies the error.

    Attributes:
        code: identifies the error.
        message: begins in lower case and ends with facts as ``key=value``.
        retry: when a retry can succeed.
        retry_after_ms: milliseconds after which a retry usually succeeds; None if unknown.
    """

    retry: ClassVar[Retry] = Retry.NEVER

    def __init__(self, code: ErrorCode, message: str, *, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.code: Final = code
        self.message: Final = message
        self.retry_after_ms: Final = retry_after_ms

    def __reduce__(self) -> tuple[object, ...]:
        """Let other processes receive the error, such as the parent of a ``multiprocessing`` worker."""
        return _restored, (type(self), self.code, self.message, self.retry_after_ms)


def _restored(kind: type[BrokerError], code: ErrorCode, message: str, retry_after_ms: int | None) -> BrokerError:
    return kind(code, message, retry_after_ms=retry_after_ms)


class Invalid(BrokerError):
    """The request is wrong; correct it."""


class Denied(BrokerError):
    """The client is not logged in or lacks a permission."""


class Missing(BrokerError):
    """The named topic, group, user or other object does not exist."""


class Conflict(BrokerError):
    """The object already exists, or the caller is fenced or uses an outdated epoch."""


class NotOwner(BrokerError):
    """Another broker owns the object; send the request to the broker that the message names."""

    retry = Retry.ELSEWHERE


class Busy(BrokerError):
    """A limit is reached. Retry after ``retry_after_ms``; if that is None, delete something first."""

    retry = Retry.LATER


class Unavailable(BrokerError):
    """A dependency failed or a time limit passed; nothing was acknowledged."""

    retry = Retry.NOW


class Corrupt(BrokerError):
    """Stored data is damaged; an operator must act."""


class PeerError(Exception):
    """A peer sent invalid bytes. If ``fatal``, the connection is closed; otherwise the peer gets an error response."""

    def __init__(self, message: str, *, fatal: bool) -> None:
        super().__init__(message)
        self.message: Final = message
        self.fatal: Final = fatal
