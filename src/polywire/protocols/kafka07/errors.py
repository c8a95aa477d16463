"""Convert errors of the broker to Kafka 0.7 errors."""

from __future__ import annotations

from typing import Final

from polywire.errors import BrokerError, ErrorCode
from polywire.protocols.kafka07.messages import WireError

# Only entries of FETCH and MULTIFETCH have a code. The broker uses three: wrong offset (clients restart), wrong
# partition (clients stop), and any other error (clients report it). After PRODUCE and OFFSETS, it can only close the
# connection.
WIRE_ERRORS: Final[dict[ErrorCode, WireError]] = dict.fromkeys(ErrorCode, WireError.UNKNOWN) | {
    ErrorCode.PARTITION_MISSING: WireError.WRONG_PARTITION,
    ErrorCode.OFFSET_OUT_OF_RANGE: WireError.OFFSET_OUT_OF_RANGE,
    ErrorCode.EPOCH_ENDED: WireError.OFFSET_OUT_OF_RANGE,
}


def wire_error(error: BrokerError) -> WireError:
    return WIRE_ERRORS[error.code]
