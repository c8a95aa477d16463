"""Convert the broker's errors to Kafka's error codes.

The table covers every ``ErrorCode``. Clients retry after a code if and only if a retry can help.
"""

from __future__ import annotations

from typing import Final

from polywire.errors import BrokerError, ErrorCode
from polywire.protocols.kafka.messages import WireError

WIRE_ERRORS: Final[dict[ErrorCode, WireError]] = {
    ErrorCode.INVALID_REQUEST: WireError.INVALID_REQUEST,
    ErrorCode.INVALID_BATCH: WireError.INVALID_RECORD,
    ErrorCode.INVALID_TOPIC: WireError.INVALID_TOPIC,
    ErrorCode.INVALID_PARTITION_COUNT: WireError.INVALID_PARTITIONS,
    ErrorCode.INVALID_NAME: WireError.INVALID_GROUP_ID,
    ErrorCode.INVALID_SESSION_TIMEOUT: WireError.INVALID_SESSION_TIMEOUT,
    ErrorCode.RECORD_TOO_LARGE: WireError.MESSAGE_TOO_LARGE,
    ErrorCode.SEQUENCE_GAP: WireError.OUT_OF_ORDER_SEQUENCE_NUMBER,
    ErrorCode.DENIED: WireError.TOPIC_AUTHORIZATION_FAILED,
    ErrorCode.LOGIN_REQUIRED: WireError.ILLEGAL_SASL_STATE,
    ErrorCode.LOGIN_FAILED: WireError.SASL_AUTHENTICATION_FAILED,
    ErrorCode.TOPIC_MISSING: WireError.UNKNOWN_TOPIC_OR_PARTITION,
    ErrorCode.PARTITION_MISSING: WireError.UNKNOWN_TOPIC_OR_PARTITION,
    ErrorCode.GROUP_MISSING: WireError.GROUP_ID_NOT_FOUND,
    ErrorCode.MEMBER_MISSING: WireError.UNKNOWN_MEMBER_ID,
    ErrorCode.STAGE_MISSING: WireError.INVALID_TXN_STATE,
    ErrorCode.TRANSACTION_MISSING: WireError.INVALID_TXN_STATE,
    ErrorCode.WRITER_MISSING: WireError.INVALID_PRODUCER_ID_MAPPING,
    ErrorCode.USER_MISSING: WireError.INVALID_REQUEST,
    ErrorCode.TOKEN_MISSING: WireError.INVALID_REQUEST,
    ErrorCode.LINK_MISSING: WireError.INVALID_REQUEST,
    ErrorCode.OFFSET_OUT_OF_RANGE: WireError.OFFSET_OUT_OF_RANGE,
    ErrorCode.EPOCH_ENDED: WireError.FENCED_LEADER_EPOCH,
    ErrorCode.TOPIC_EXISTS: WireError.TOPIC_ALREADY_EXISTS,
    ErrorCode.TOPIC_REPLACED: WireError.UNKNOWN_TOPIC_ID,
    ErrorCode.TOPIC_LINKED: WireError.POLICY_VIOLATION,
    ErrorCode.GROUP_EXISTS: WireError.INCONSISTENT_GROUP_PROTOCOL,
    ErrorCode.GROUP_NOT_EMPTY: WireError.NON_EMPTY_GROUP,
    ErrorCode.GROUP_REBALANCING: WireError.REBALANCE_IN_PROGRESS,
    ErrorCode.GROUP_PROTOCOL_MISMATCH: WireError.INCONSISTENT_GROUP_PROTOCOL,
    ErrorCode.MEMBER_FENCED: WireError.FENCED_INSTANCE_ID,
    ErrorCode.USER_EXISTS: WireError.INVALID_REQUEST,
    ErrorCode.TOKEN_EXISTS: WireError.INVALID_REQUEST,
    ErrorCode.LINK_EXISTS: WireError.INVALID_REQUEST,
    ErrorCode.GENERATION_STALE: WireError.ILLEGAL_GENERATION,
    ErrorCode.VERSION_CONFLICT: WireError.INVALID_REQUEST,
    ErrorCode.PARTITION_NOT_ASSIGNED: WireError.ILLEGAL_GENERATION,
    ErrorCode.RECORD_NOT_ACQUIRED: WireError.INVALID_RECORD_STATE,
    ErrorCode.PRODUCER_FENCED: WireError.INVALID_PRODUCER_EPOCH,
    ErrorCode.NOT_OWNER: WireError.NOT_LEADER_OR_FOLLOWER,
    ErrorCode.BUSY: WireError.THROTTLING_QUOTA_EXCEEDED,
    ErrorCode.STAGE_FULL: WireError.POLICY_VIOLATION,
    ErrorCode.DISK_FULL: WireError.KAFKA_STORAGE_ERROR,
    # clients then refresh their metadata and find the broker after its restart
    ErrorCode.STOPPING: WireError.NOT_LEADER_OR_FOLLOWER,
    ErrorCode.UNREACHABLE: WireError.NOT_LEADER_OR_FOLLOWER,
    ErrorCode.REPLICATION_TIMEOUT: WireError.REQUEST_TIMED_OUT,
    ErrorCode.STORAGE_FAILED: WireError.KAFKA_STORAGE_ERROR,
    ErrorCode.CORRUPT: WireError.UNKNOWN_SERVER_ERROR,
    ErrorCode.NEWER_FORMAT: WireError.UNKNOWN_SERVER_ERROR,
}


def wire_error(error: BrokerError, *, denied: WireError = WireError.TOPIC_AUTHORIZATION_FAILED) -> WireError:
    """Return the Kafka error for an error of the broker.

    ``denied`` is returned for a missing permission. It depends on the resource: topic, group, cluster or transactional
    id.
    """
    return denied if error.code is ErrorCode.DENIED else WIRE_ERRORS[error.code]
