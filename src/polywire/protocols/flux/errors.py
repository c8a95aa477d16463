"""Map every error of the broker to a FLUX error."""

from __future__ import annotations

from typing import Final

from polywire.errors import BrokerError, ErrorCode
from polywire.protocols.flux.messages import Refused, WireCode

_BAD = WireCode.BAD_REQUEST
_LEADER = WireCode.NOT_LEADER
_GENERATION = WireCode.GENERATION_MISMATCH

# The protocol has five codes. Clients that get NOT_LEADER try the next broker, so it is used only if this broker does
# not lead or is stopping. A full disk or a busy broker is BAD_REQUEST with the reason; clients then retry with the same
# broker. A text of None means the broker's own message.
WIRE_ERRORS: Final[dict[ErrorCode, tuple[WireCode, str | None]]] = {
    ErrorCode.INVALID_REQUEST: (_BAD, None),
    ErrorCode.INVALID_BATCH: (_BAD, None),
    ErrorCode.INVALID_TOPIC: (_BAD, "invalid topic"),
    ErrorCode.INVALID_PARTITION_COUNT: (_BAD, None),
    ErrorCode.INVALID_NAME: (_BAD, None),
    ErrorCode.INVALID_SESSION_TIMEOUT: (_BAD, None),
    ErrorCode.RECORD_TOO_LARGE: (_BAD, None),
    ErrorCode.SEQUENCE_GAP: (_BAD, None),
    ErrorCode.DENIED: (_BAD, None),
    ErrorCode.LOGIN_REQUIRED: (_BAD, None),
    ErrorCode.LOGIN_FAILED: (_BAD, None),
    ErrorCode.USER_MISSING: (_BAD, None),
    ErrorCode.TOKEN_MISSING: (_BAD, None),
    ErrorCode.LINK_MISSING: (_BAD, None),
    ErrorCode.USER_EXISTS: (_BAD, None),
    ErrorCode.TOKEN_EXISTS: (_BAD, None),
    ErrorCode.LINK_EXISTS: (_BAD, None),
    ErrorCode.VERSION_CONFLICT: (_BAD, None),
    ErrorCode.TOPIC_MISSING: (_BAD, None),
    ErrorCode.PARTITION_MISSING: (_BAD, "invalid partition"),
    ErrorCode.GROUP_MISSING: (_GENERATION, "group not found"),
    ErrorCode.MEMBER_MISSING: (_GENERATION, "unknown member"),
    ErrorCode.STAGE_MISSING: (_BAD, None),
    ErrorCode.TRANSACTION_MISSING: (_BAD, None),
    ErrorCode.WRITER_MISSING: (_BAD, None),
    ErrorCode.OFFSET_OUT_OF_RANGE: (_BAD, "invalid offset"),
    ErrorCode.EPOCH_ENDED: (_BAD, "invalid offset"),
    ErrorCode.TOPIC_EXISTS: (_BAD, None),
    ErrorCode.TOPIC_REPLACED: (_BAD, None),
    ErrorCode.TOPIC_LINKED: (_BAD, None),
    ErrorCode.GROUP_EXISTS: (_BAD, None),
    ErrorCode.GROUP_NOT_EMPTY: (_BAD, None),
    ErrorCode.GROUP_REBALANCING: (_GENERATION, None),
    ErrorCode.GROUP_PROTOCOL_MISMATCH: (_BAD, None),
    ErrorCode.MEMBER_FENCED: (_GENERATION, None),
    ErrorCode.GENERATION_STALE: (_GENERATION, "stale generation"),
    ErrorCode.PARTITION_NOT_ASSIGNED: (_GENERATION, "partition not assigned to member"),
    ErrorCode.RECORD_NOT_ACQUIRED: (_GENERATION, None),
    ErrorCode.PRODUCER_FENCED: (_BAD, None),
    ErrorCode.NOT_OWNER: (_LEADER, "partition leader unavailable on this broker"),
    ErrorCode.BUSY: (_BAD, None),
    ErrorCode.STAGE_FULL: (_BAD, None),
    ErrorCode.DISK_FULL: (_BAD, None),
    ErrorCode.STOPPING: (_LEADER, None),
    ErrorCode.UNREACHABLE: (_LEADER, None),
    # with any ``acks``: the bucket does not accept data
    ErrorCode.REPLICATION_TIMEOUT: (WireCode.REPLICATION_TIMEOUT, None),
    ErrorCode.STORAGE_FAILED: (_BAD, None),
    ErrorCode.CORRUPT: (_BAD, None),
    ErrorCode.NEWER_FORMAT: (_BAD, None),
}


def refused(error: BrokerError) -> Refused:
    """Return the FLUX error for an error of the broker."""
    code, text = WIRE_ERRORS[error.code]
    return Refused(code, (text or error.message).replace("\n", " ").replace("|", "%7C"))


def not_leader() -> Refused:
    return Refused(_LEADER, b"partition leader unavailable on this broker")


def replication_timeout() -> Refused:
    """Return the error for a record with ``acks=all`` that was not replicated in time. The record remains stored."""
    return Refused(WireCode.REPLICATION_TIMEOUT, b"acks=all timeout")
