"""Map the broker's errors to Cursus errors, and each error code to its class (spec: cursus#error-classes)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from polywire.errors import BrokerError, ErrorCode
from polywire.protocols.cursus.messages import Dialect, Refused, encoded, quote, truth

WIRE_ERRORS: Final[Mapping[ErrorCode, str]] = {
    ErrorCode.INVALID_REQUEST: "invalid_request",
    ErrorCode.INVALID_BATCH: "batch_decode_failed",
    ErrorCode.INVALID_TOPIC: "invalid_topic_name",
    ErrorCode.INVALID_PARTITION_COUNT: "invalid_partitions",
    ErrorCode.INVALID_NAME: "invalid_name",
    ErrorCode.INVALID_SESSION_TIMEOUT: "invalid_request",
    ErrorCode.RECORD_TOO_LARGE: "broker_error",
    ErrorCode.SEQUENCE_GAP: "broker_error",
    ErrorCode.DENIED: "NOT_AUTHORIZED_FOR_OPERATION",
    ErrorCode.LOGIN_REQUIRED: "authentication_required",
    ErrorCode.LOGIN_FAILED: "authentication_failed",
    ErrorCode.USER_MISSING: "user_not_found",
    ErrorCode.TOKEN_MISSING: "token_not_found",
    ErrorCode.LINK_MISSING: "broker_error",
    ErrorCode.USER_EXISTS: "user_exists",
    ErrorCode.TOKEN_EXISTS: "token_exists",
    ErrorCode.LINK_EXISTS: "broker_error",
    ErrorCode.TOPIC_MISSING: "topic_not_found",
    ErrorCode.PARTITION_MISSING: "partition_not_found",
    ErrorCode.GROUP_MISSING: "group_not_found",
    ErrorCode.MEMBER_MISSING: "member_not_found",
    ErrorCode.STAGE_MISSING: "transaction_not_found",
    ErrorCode.TRANSACTION_MISSING: "transaction_not_found",
    ErrorCode.WRITER_MISSING: "broker_error",
    ErrorCode.OFFSET_OUT_OF_RANGE: "OFFSET_OUT_OF_RANGE",
    ErrorCode.EPOCH_ENDED: "OFFSET_OUT_OF_RANGE",
    ErrorCode.TOPIC_EXISTS: "create_topic_failed",
    ErrorCode.TOPIC_REPLACED: "topic_not_found",
    ErrorCode.TOPIC_LINKED: "NOT_AUTHORIZED_FOR_TOPIC",
    ErrorCode.GROUP_EXISTS: "broker_error",
    ErrorCode.GROUP_NOT_EMPTY: "broker_error",
    ErrorCode.GROUP_REBALANCING: "GEN_MISMATCH",
    ErrorCode.GROUP_PROTOCOL_MISMATCH: "broker_error",
    ErrorCode.MEMBER_FENCED: "member_not_found",
    ErrorCode.GENERATION_STALE: "GEN_MISMATCH",
    ErrorCode.VERSION_CONFLICT: "version_conflict",
    ErrorCode.PARTITION_NOT_ASSIGNED: "NOT_OWNER",
    ErrorCode.RECORD_NOT_ACQUIRED: "NOT_OWNER",
    ErrorCode.PRODUCER_FENCED: "stale_producer_epoch",
    ErrorCode.NOT_OWNER: "NOT_PARTITION_LEADER",
    ErrorCode.BUSY: "broker_busy",
    ErrorCode.STAGE_FULL: "broker_busy",
    ErrorCode.DISK_FULL: "broker_error",
    ErrorCode.STOPPING: "request_cancelled",
    ErrorCode.UNREACHABLE: "request_cancelled",
    ErrorCode.REPLICATION_TIMEOUT: "broker_error",
    ErrorCode.STORAGE_FAILED: "broker_error",
    ErrorCode.CORRUPT: "broker_error",
    ErrorCode.NEWER_FORMAT: "broker_error",
}

_CLASSES: Final[Mapping[str, str]] = {
    "routing": "NOT_COORDINATOR NOT_LEADER NOT_PARTITION_LEADER",
    "availability": "broker_busy cluster_metadata_unavailable cluster_not_available coordinator_not_available fsm_not_available"
    " leader_election_result_unavailable leader_not_found no_raft_leader offset_manager_not_available request_cancelled"
    " router_not_available transaction_abort_marker_failed transaction_commit_failed transaction_manager_not_available"
    " transaction_sync_failed",
    "fencing": "GEN_MISMATCH NOT_OWNER STALE_LEADER_EPOCH member_not_found producer_fenced stale_producer_epoch",
    "conflict": "OFFSET_OUT_OF_RANGE leader_election_rejected offset_regression producer_reinitialization_required"
    " snapshot_version_exceeds_stream topic_not_assigned_to_group transaction_aborted transaction_already_committed"
    " transaction_not_abortable transaction_not_committing version_conflict",
    "authorization": "NOT_AUTHORIZED_FOR_OPERATION NOT_AUTHORIZED_FOR_TOPIC authentication_failed authentication_required"
    " internal_topic_write_forbidden transaction_metadata_forbidden",
    "not_found": "group_not_found partition_metadata_not_found partition_not_found topic_not_found transaction_not_found",
    "validation": "UNSUPPORTED_FEATURE UNSUPPORTED_PROTOCOL_VERSION batch_decode_failed distribution_not_enabled"
    " distribution_required duplicate_partition event_sourcing_not_enabled no_valid_offsets unknown_command"
    " unsupported_topic_policy",
}
_CLASS_OF: Final = {code: name for name, codes in _CLASSES.items() for code in codes.split()}
_BEGINNINGS: Final = (
    ("authorization", ("not_authorized", "authorization_", "internal_")),
    ("validation", ("missing_", "invalid_", "empty_", "malformed_", "decode_", "unmarshal_")),
)
_ENDINGS: Final = ("_not_found", "_missing")
_RETRYABLE: Final = frozenset({"routing", "availability"})


def refused(error: BrokerError) -> Refused:
    """Return the Cursus error for an error of the broker."""
    return Refused(WIRE_ERRORS[error.code], f"reason={quote(error.message)}", legacy=error.message)


def class_of(code: str) -> str:
    known = _CLASS_OF.get(code)
    if known is not None:
        return known
    for name, beginnings in _BEGINNINGS:
        if code.lower().startswith(beginnings):
            return name
    return "not_found" if code.endswith(_ENDINGS) else "internal"


def encode_error(error: Refused, dialect: Dialect, *, structured: bool) -> bytes:
    """Return the body of an error response.

    ``structured``: whether the client has negotiated the feature ``structured_errors_v1``.
    """
    if dialect is Dialect.LEGACY and error.legacy is not None:
        return encoded(f"ERROR: {error.legacy}")
    if structured and not error.classed:
        kind = class_of(error.code)
        return encoded(f"ERROR: {error.code} class={kind} retryable={truth(kind in _RETRYABLE)} {error.facts}".rstrip())
    return encoded(f"ERROR: {error.code} {error.facts}".rstrip())
