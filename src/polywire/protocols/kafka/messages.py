"""Names, numbers and limits of the Kafka protocol, and the headers of its messages.

ApiVersions may list only versions in ``SERVED``.

A request is ``i32 length | i16 api | i16 version | i32 correlation | i16 length, client id | [tags] | body``. A
response is ``i32 length | i32 correlation | [tags] | body``. Flexible versions have the tags, except in the response
header of API_VERSIONS.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, Final, NamedTuple

WIRE: Final = "kafka"
FRAME_BYTES_MAX: Final = 100 * 1024 * 1024  # limit for a request; Kafka's default
NO_ID: Final = bytes(16)  # the topic id of a request that names the topic by name
NO_OFFSET: Final = -1
NO_EPOCH: Final = -1
NO_OPERATIONS: Final = -2_147_483_648  # the request did not ask for allowed operations
METADATA_BYTES_MAX: Final = 4096  # limit for the metadata stored with a committed offset


class Api(IntEnum):
    __hash__ = int.__hash__  # of caches that every request reads; an enum's own is written in Python

    PRODUCE = 0
    FETCH = 1
    LIST_OFFSETS = 2
    METADATA = 3
    OFFSET_COMMIT = 8
    OFFSET_FETCH = 9
    FIND_COORDINATOR = 10
    JOIN_GROUP = 11
    HEARTBEAT = 12
    LEAVE_GROUP = 13
    SYNC_GROUP = 14
    DESCRIBE_GROUPS = 15
    LIST_GROUPS = 16
    SASL_HANDSHAKE = 17
    API_VERSIONS = 18
    CREATE_TOPICS = 19
    DELETE_TOPICS = 20
    DELETE_RECORDS = 21
    INIT_PRODUCER_ID = 22
    OFFSET_FOR_LEADER_EPOCH = 23
    ADD_PARTITIONS_TO_TXN = 24
    ADD_OFFSETS_TO_TXN = 25
    END_TXN = 26
    TXN_OFFSET_COMMIT = 28
    DESCRIBE_ACLS = 29
    DESCRIBE_CONFIGS = 32
    ALTER_CONFIGS = 33
    DESCRIBE_LOG_DIRS = 35
    SASL_AUTHENTICATE = 36
    CREATE_PARTITIONS = 37
    DELETE_GROUPS = 42
    ELECT_LEADERS = 43
    INCREMENTAL_ALTER_CONFIGS = 44
    LIST_PARTITION_REASSIGNMENTS = 46
    OFFSET_DELETE = 47
    DESCRIBE_CLIENT_QUOTAS = 48
    ALTER_CLIENT_QUOTAS = 49
    DESCRIBE_USER_SCRAM_CREDENTIALS = 50
    ALTER_USER_SCRAM_CREDENTIALS = 51
    DESCRIBE_CLUSTER = 60
    DESCRIBE_PRODUCERS = 61
    DESCRIBE_TRANSACTIONS = 65
    LIST_TRANSACTIONS = 66
    CONSUMER_GROUP_HEARTBEAT = 68
    CONSUMER_GROUP_DESCRIBE = 69
    LIST_CONFIG_RESOURCES = 74
    DESCRIBE_TOPIC_PARTITIONS = 75
    SHARE_GROUP_HEARTBEAT = 76
    SHARE_GROUP_DESCRIBE = 77
    SHARE_FETCH = 78
    SHARE_ACKNOWLEDGE = 79
    DESCRIBE_SHARE_GROUP_OFFSETS = 90
    ALTER_SHARE_GROUP_OFFSETS = 91
    DELETE_SHARE_GROUP_OFFSETS = 92


class Served(NamedTuple):
    """Supported versions of a request.

    Attributes:
        first, last: the versions that ApiVersions reports.
        answered_from: the first version that has a working implementation. Older ones are rejected.
    """

    first: int
    last: int
    answered_from: int


def _served(first: int, last: int, answered_from: int | None = None) -> Served:
    return Served(first, last, first if answered_from is None else answered_from)


SERVED: Final[Mapping[Api, Served]] = {
    # if the minimum were higher, older clients would assume that the broker does not support compression
    Api.PRODUCE: _served(0, 13, 3),
    Api.FETCH: _served(4, 18),
    Api.LIST_OFFSETS: _served(1, 11),
    Api.METADATA: _served(0, 13),
    Api.OFFSET_COMMIT: _served(2, 10),
    Api.OFFSET_FETCH: _served(1, 10),
    Api.FIND_COORDINATOR: _served(0, 6),
    Api.JOIN_GROUP: _served(0, 9),
    Api.HEARTBEAT: _served(0, 4),
    Api.LEAVE_GROUP: _served(0, 5),
    Api.SYNC_GROUP: _served(0, 5),
    Api.DESCRIBE_GROUPS: _served(0, 6),
    Api.LIST_GROUPS: _served(0, 5),
    Api.SASL_HANDSHAKE: _served(0, 1),
    Api.API_VERSIONS: _served(0, 4),
    Api.CREATE_TOPICS: _served(2, 7),
    Api.DELETE_TOPICS: _served(1, 6),
    Api.DELETE_RECORDS: _served(0, 2),
    Api.INIT_PRODUCER_ID: _served(0, 5),
    Api.OFFSET_FOR_LEADER_EPOCH: _served(2, 4),
    Api.ADD_PARTITIONS_TO_TXN: _served(0, 3),
    Api.ADD_OFFSETS_TO_TXN: _served(0, 4),
    Api.END_TXN: _served(0, 5),
    Api.TXN_OFFSET_COMMIT: _served(0, 5),
    Api.DESCRIBE_ACLS: _served(1, 3),
    Api.DESCRIBE_CONFIGS: _served(1, 4),
    Api.ALTER_CONFIGS: _served(0, 2),
    Api.DESCRIBE_LOG_DIRS: _served(1, 5),
    Api.SASL_AUTHENTICATE: _served(0, 2),
    Api.CREATE_PARTITIONS: _served(0, 3),
    Api.DELETE_GROUPS: _served(0, 2),
    Api.ELECT_LEADERS: _served(0, 2),
    Api.INCREMENTAL_ALTER_CONFIGS: _served(0, 1),
    Api.LIST_PARTITION_REASSIGNMENTS: _served(0, 0),
    Api.OFFSET_DELETE: _served(0, 0),
    Api.DESCRIBE_CLIENT_QUOTAS: _served(0, 1),
    Api.ALTER_CLIENT_QUOTAS: _served(0, 1),
    Api.DESCRIBE_USER_SCRAM_CREDENTIALS: _served(0, 0),
    Api.ALTER_USER_SCRAM_CREDENTIALS: _served(0, 0),
    Api.DESCRIBE_CLUSTER: _served(0, 2),
    Api.DESCRIBE_PRODUCERS: _served(0, 0),
    Api.LIST_CONFIG_RESOURCES: _served(0, 1),
    Api.DESCRIBE_TOPIC_PARTITIONS: _served(0, 0),
    Api.DESCRIBE_TRANSACTIONS: _served(0, 0),
    Api.LIST_TRANSACTIONS: _served(0, 2),
    Api.CONSUMER_GROUP_HEARTBEAT: _served(0, 1),
    Api.CONSUMER_GROUP_DESCRIBE: _served(0, 1),
    Api.SHARE_GROUP_HEARTBEAT: _served(1, 1),
    Api.SHARE_GROUP_DESCRIBE: _served(1, 1),
    Api.SHARE_FETCH: _served(1, 2),
    Api.SHARE_ACKNOWLEDGE: _served(1, 2),
    Api.DESCRIBE_SHARE_GROUP_OFFSETS: _served(0, 1),
    Api.ALTER_SHARE_GROUP_OFFSETS: _served(0, 0),
    Api.DELETE_SHARE_GROUP_OFFSETS: _served(0, 0),
}
"""The versions that ApiVersions reports for requests that have a handler."""


class WireError(IntEnum):
    UNKNOWN_SERVER_ERROR = -1
    NONE = 0
    OFFSET_OUT_OF_RANGE = 1
    CORRUPT_MESSAGE = 2
    UNKNOWN_TOPIC_OR_PARTITION = 3
    LEADER_NOT_AVAILABLE = 5
    NOT_LEADER_OR_FOLLOWER = 6
    REQUEST_TIMED_OUT = 7
    MESSAGE_TOO_LARGE = 10
    OFFSET_METADATA_TOO_LARGE = 12
    COORDINATOR_LOAD_IN_PROGRESS = 14
    COORDINATOR_NOT_AVAILABLE = 15
    NOT_COORDINATOR = 16
    INVALID_TOPIC = 17
    INVALID_REQUIRED_ACKS = 21
    ILLEGAL_GENERATION = 22
    INCONSISTENT_GROUP_PROTOCOL = 23
    INVALID_GROUP_ID = 24
    UNKNOWN_MEMBER_ID = 25
    INVALID_SESSION_TIMEOUT = 26
    REBALANCE_IN_PROGRESS = 27
    TOPIC_AUTHORIZATION_FAILED = 29
    GROUP_AUTHORIZATION_FAILED = 30
    CLUSTER_AUTHORIZATION_FAILED = 31
    INVALID_TIMESTAMP = 32
    UNSUPPORTED_SASL_MECHANISM = 33
    ILLEGAL_SASL_STATE = 34
    UNSUPPORTED_VERSION = 35
    TOPIC_ALREADY_EXISTS = 36
    INVALID_PARTITIONS = 37
    INVALID_REPLICATION_FACTOR = 38
    INVALID_REPLICA_ASSIGNMENT = 39
    INVALID_CONFIG = 40
    NOT_CONTROLLER = 41
    INVALID_REQUEST = 42
    POLICY_VIOLATION = 44
    OUT_OF_ORDER_SEQUENCE_NUMBER = 45
    DUPLICATE_SEQUENCE_NUMBER = 46
    INVALID_PRODUCER_EPOCH = 47
    INVALID_TXN_STATE = 48
    INVALID_PRODUCER_ID_MAPPING = 49
    INVALID_TRANSACTION_TIMEOUT = 50
    CONCURRENT_TRANSACTIONS = 51
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED = 53
    SECURITY_DISABLED = 54
    OPERATION_NOT_ATTEMPTED = 55
    KAFKA_STORAGE_ERROR = 56
    SASL_AUTHENTICATION_FAILED = 58
    UNKNOWN_PRODUCER_ID = 59
    NON_EMPTY_GROUP = 68
    GROUP_ID_NOT_FOUND = 69
    FETCH_SESSION_ID_NOT_FOUND = 70
    INVALID_FETCH_SESSION_EPOCH = 71
    FENCED_LEADER_EPOCH = 74
    UNKNOWN_LEADER_EPOCH = 75
    UNSUPPORTED_COMPRESSION_TYPE = 76
    MEMBER_ID_REQUIRED = 79
    GROUP_MAX_SIZE_REACHED = 81
    FENCED_INSTANCE_ID = 82
    ELECTION_NOT_NEEDED = 84
    GROUP_SUBSCRIBED_TO_TOPIC = 86
    INVALID_RECORD = 87
    UNSTABLE_OFFSET_COMMIT = 88
    THROTTLING_QUOTA_EXCEEDED = 89
    PRODUCER_FENCED = 90
    RESOURCE_NOT_FOUND = 91
    DUPLICATE_RESOURCE = 92
    UNACCEPTABLE_CREDENTIAL = 93
    UNKNOWN_TOPIC_ID = 100
    TRANSACTIONAL_ID_NOT_FOUND = 105
    FETCH_SESSION_TOPIC_ID_ERROR = 106
    FENCED_MEMBER_EPOCH = 110
    UNRELEASED_INSTANCE_ID = 111
    UNSUPPORTED_ASSIGNOR = 112
    STALE_MEMBER_EPOCH = 113
    TRANSACTION_ABORTABLE = 120
    INVALID_RECORD_STATE = 121
    SHARE_SESSION_NOT_FOUND = 122
    INVALID_SHARE_SESSION_EPOCH = 123
    INVALID_REGULAR_EXPRESSION = 128
    SHARE_SESSION_LIMIT_REACHED = 133


class Codec(IntEnum):
    NONE = 0
    GZIP = 1
    SNAPPY = 2
    LZ4 = 3
    ZSTD = 4


class Refused(Exception):
    """An error for one part of a request, such as a partition."""

    def __init__(self, error: WireError, message: str) -> None:
        super().__init__(message)
        self.error: Final = error
        self.message: Final = message


class Request(NamedTuple):
    """A decoded request.

    Attributes:
        body: a record of the type for the api; None for an unknown version of API_VERSIONS.
    """

    api: Api
    version: int
    correlation_id: int
    client_id: str | None
    body: Any
