"""Map the broker's errors to Iggy's error numbers.

Every ``ErrorCode`` has a number (spec: iggy#error-numbers, iggy#d1-and-d2-error-numbers, iggy#d3-error-numbers).
"""

from __future__ import annotations

from typing import Final

from polywire.errors import BrokerError, ErrorCode
from polywire.protocols.iggy.dialect import D0, Dialect
from polywire.protocols.iggy.messages import REFUSED, Refused

ERROR: Final = 1
UNKNOWN_COMMAND: Final = 3
UNAVAILABLE: Final = 5
NO_RESOURCE: Final = 20
NOT_LOGGED_IN: Final = 40
NOT_ALLOWED: Final = 41
BAD_CREDENTIALS: Final = 42
BAD_USERNAME: Final = 43
BAD_PASSWORD: Final = 44
BAD_STATUS: Final = 45
USER_EXISTS: Final = 46
CANNOT_DELETE_USER: Final = 48
BAD_TOKEN_NAME: Final = 50
BAD_TOKEN: Final = 53
BAD_SIZE: Final = 80
HISTORY_GONE: Final = 87
HELD_TOO_MANY: Final = 90
SEQUENCE_GAP: Final = 92
PRODUCER_FENCED: Final = 93
NO_PRODUCER_PARTITION: Final = 95
NO_SUCH_CLIENT: Final = 100
BAD_CLIENT_ID: Final = 101
NO_STREAM_ID: Final = 1009
NO_STREAM_NAME: Final = 1010
STREAM_ID_TAKEN: Final = 1011
STREAM_NAME_TAKEN: Final = 1012
BAD_STREAM_NAME: Final = 1013
BAD_STREAM_ID: Final = 1014
NO_TOPIC_ID: Final = 2010
NO_TOPIC_NAME: Final = 2011
TOPIC_ID_TAKEN: Final = 2012
TOPIC_NAME_TAKEN: Final = 2013
BAD_TOPIC_NAME: Final = 2014
BAD_PARTITION_COUNT: Final = 2015
BAD_TOPIC_ID: Final = 2016
FIXED_PARTITIONS: Final = 2023
NO_PARTITION: Final = 3007
NO_PARTITIONS: Final = 3008
BAD_MESSAGE_COUNT: Final = 4009
TOO_BIG: Final = 4022
NO_KEY_VALUE: Final = 4028
UNKNOWN_OPTION: Final = 4041
BAD_OPTION: Final = 4042
OPTIONS_TOO_BIG: Final = 4043
NOT_UPDATABLE: Final = 4103
NOT_RESETTABLE: Final = 4104
NO_STORED_OFFSET: Final = 3021
BAD_OFFSET: Final = 4100
RESERVED: Final = 4101
NO_GROUP_ID: Final = 5000
GROUP_ID_TAKEN: Final = 5001
NO_GROUP_NAME: Final = 5003
GROUP_NAME_TAKEN: Final = 5004
BAD_GROUP_NAME: Final = 5005
NO_MEMBER: Final = 5006
BAD_GROUP_ID: Final = 5002
NOT_OWNED: Final = 5009

NUMBERS: Final[dict[ErrorCode, int]] = {
    ErrorCode.INVALID_REQUEST: UNKNOWN_COMMAND,
    ErrorCode.INVALID_BATCH: UNKNOWN_COMMAND,
    ErrorCode.INVALID_TOPIC: BAD_TOPIC_NAME,
    ErrorCode.INVALID_PARTITION_COUNT: BAD_PARTITION_COUNT,
    ErrorCode.INVALID_NAME: BAD_GROUP_NAME,
    ErrorCode.INVALID_SESSION_TIMEOUT: UNKNOWN_COMMAND,
    ErrorCode.RECORD_TOO_LARGE: TOO_BIG,
    ErrorCode.SEQUENCE_GAP: SEQUENCE_GAP,
    ErrorCode.DENIED: NOT_ALLOWED,
    ErrorCode.LOGIN_REQUIRED: NOT_LOGGED_IN,
    ErrorCode.LOGIN_FAILED: BAD_CREDENTIALS,
    ErrorCode.TOPIC_MISSING: NO_TOPIC_NAME,
    ErrorCode.PARTITION_MISSING: NO_PARTITION,
    ErrorCode.GROUP_MISSING: NO_GROUP_ID,
    ErrorCode.MEMBER_MISSING: NO_MEMBER,
    ErrorCode.STAGE_MISSING: ERROR,
    ErrorCode.TRANSACTION_MISSING: NO_RESOURCE,
    ErrorCode.WRITER_MISSING: NO_RESOURCE,
    ErrorCode.USER_MISSING: NO_RESOURCE,
    ErrorCode.TOKEN_MISSING: BAD_TOKEN,
    ErrorCode.LINK_MISSING: NO_RESOURCE,
    ErrorCode.OFFSET_OUT_OF_RANGE: BAD_OFFSET,
    ErrorCode.EPOCH_ENDED: ERROR,
    ErrorCode.TOPIC_EXISTS: TOPIC_NAME_TAKEN,
    ErrorCode.TOPIC_REPLACED: NO_TOPIC_ID,
    ErrorCode.TOPIC_LINKED: NOT_ALLOWED,
    ErrorCode.GROUP_EXISTS: GROUP_NAME_TAKEN,
    ErrorCode.GROUP_NOT_EMPTY: ERROR,
    ErrorCode.GROUP_REBALANCING: NO_MEMBER,
    ErrorCode.GROUP_PROTOCOL_MISMATCH: GROUP_NAME_TAKEN,
    ErrorCode.MEMBER_FENCED: NO_MEMBER,
    ErrorCode.VERSION_CONFLICT: ERROR,
    ErrorCode.USER_EXISTS: USER_EXISTS,
    ErrorCode.TOKEN_EXISTS: 51,
    ErrorCode.LINK_EXISTS: ERROR,
    ErrorCode.GENERATION_STALE: NO_MEMBER,
    ErrorCode.PARTITION_NOT_ASSIGNED: NOT_OWNED,
    ErrorCode.RECORD_NOT_ACQUIRED: NOT_OWNED,
    ErrorCode.PRODUCER_FENCED: PRODUCER_FENCED,
    ErrorCode.NOT_OWNER: ERROR,
    ErrorCode.BUSY: ERROR,
    ErrorCode.STAGE_FULL: ERROR,
    ErrorCode.DISK_FULL: ERROR,
    ErrorCode.STOPPING: ERROR,
    ErrorCode.UNREACHABLE: ERROR,
    ErrorCode.REPLICATION_TIMEOUT: ERROR,
    ErrorCode.STORAGE_FAILED: ERROR,
    ErrorCode.CORRUPT: ERROR,
    ErrorCode.NEWER_FORMAT: ERROR,
}

# In D0, error numbers are grouped differently, and there are no users.
_D0: Final = {
    NOT_ALLOWED: UNAVAILABLE,
    BAD_GROUP_ID: 5003,
    NO_MEMBER: 5002,
    NO_GROUP_NAME: NO_GROUP_ID,
    GROUP_NAME_TAKEN: GROUP_ID_TAKEN,
}


def number_of(error: BrokerError, dialect: Dialect) -> int:
    """Return the error number of a dialect. The error may come from another process."""
    if isinstance(error, Refused):
        number = error.number
    elif error.message.startswith(REFUSED):
        number = int(error.message.removeprefix(REFUSED))
    else:
        number = NUMBERS.get(error.code, ERROR)
    return _D0.get(number, number) if dialect is D0 else number
