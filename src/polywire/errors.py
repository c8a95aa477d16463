"""What can go wrong, told by what the caller should do about it (house: a kind exists only if the caller would act differently).

Promises: every failure that leaves the broker is one of these kinds with one ``ErrorCode``; each wire maps codes to its own words in
its ``errors.py``. Must not know: any wire, any socket.
"""

from __future__ import annotations

from enum import Enum
from typing import ClassVar, Final


class Retry(Enum):
    """When asking again can help."""

    NEVER = "never"
    NOW = "now"
    LATER = "later"
    ELSEWHERE = "elsewhere"


class ErrorCode(Enum):
    """Which error it is; the kind of the exception says what to do."""

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
    OFFSET_OUT_OF_RANGE = "offset_out_of_range"
    EPOCH_ENDED = "epoch_ended"
    TOPIC_EXISTS = "topic_exists"
    TOPIC_REPLACED = "topic_replaced"
    GROUP_EXISTS = "group_exists"
    GROUP_NOT_EMPTY = "group_not_empty"
    GROUP_REBALANCING = "group_rebalancing"
    GROUP_PROTOCOL_MISMATCH = "group_protocol_mismatch"
    MEMBER_FENCED = "member_fenced"
    USER_EXISTS = "user_exists"
    TOKEN_EXISTS = "token_exists"
    GENERATION_STALE = "generation_stale"
    VERSION_CONFLICT = "version_conflict"
    PARTITION_NOT_ASSIGNED = "partition_not_assigned"
    PRODUCER_FENCED = "producer_fenced"
    NOT_OWNER = "not_owner"
    BUSY = "busy"
    STAGE_FULL = "stage_full"
    DISK_FULL = "disk_full"
    STOPPING = "stopping"
    REPLICATION_TIMEOUT = "replication_timeout"
    STORAGE_FAILED = "storage_failed"
    UNREACHABLE = (
        "unreachable"  # raised by clients alone: nobody listens there, or answers, or what does is something else
    )
    CORRUPT = "corrupt"
    NEWER_FORMAT = "newer_format"  # what verifies and makes no sense: a newer version wrote it, and reads it


class BrokerError(Exception):
    """Base of all errors a caller may see; its kinds say what to do, ``code`` says which error it is.

    message: lower case, facts last as ``key=value``. retry: when asking again can help. retry_after_ms: after how long what is over a limit
    now has mostly passed by itself, None where nobody knows.
    """

    retry: ClassVar[Retry] = Retry.NEVER

    def __init__(self, code: ErrorCode, message: str, *, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.code: Final = code
        self.message: Final = message
        self.retry_after_ms: Final = retry_after_ms


class Invalid(BrokerError):
    """The request is wrong; fix it."""


class Denied(BrokerError):
    """Log in, or ask for the right."""


class Missing(BrokerError):
    """There is no such thing."""


class Conflict(BrokerError):
    """It is already there, or the caller is fenced or from an older epoch."""


class NotOwner(BrokerError):
    """Another broker owns this; ask the one the message names."""

    retry = Retry.ELSEWHERE


class Busy(BrokerError):
    """Over a limit for now; come back after ``retry_after_ms``, or when something was removed where there is none."""

    retry = Retry.LATER


class Unavailable(BrokerError):
    """A dependency failed or time ran out; nothing was acknowledged."""

    retry = Retry.NOW


class Corrupt(BrokerError):
    """Stored bytes do not verify; an operator must look."""


class PeerError(Exception):
    """Bytes from a peer that make no sense. ``fatal`` closes the connection, otherwise the peer gets an answer."""

    def __init__(self, message: str, *, fatal: bool) -> None:
        super().__init__(message)
        self.message: Final = message
        self.fatal: Final = fatal
