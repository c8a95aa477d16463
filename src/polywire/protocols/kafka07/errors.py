"""What each error of the broker is called on the Kafka 0.7 wire.

Promises: the table names every ``ErrorCode``. Must not know: sessions, sockets.
"""

from __future__ import annotations

from typing import Final

from polywire.errors import BrokerError, ErrorCode
from polywire.protocols.kafka07.messages import WireError

# Only entries of FETCH and MULTIFETCH carry a code. The wire has three for a broker: the offset is wrong (clients begin anew), the partition
# is wrong (clients stop), anything else (clients tell the user). PRODUCE and OFFSETS can only close.
WIRE_ERRORS: Final[dict[ErrorCode, WireError]] = dict.fromkeys(ErrorCode, WireError.UNKNOWN) | {
    ErrorCode.PARTITION_MISSING: WireError.WRONG_PARTITION,
    ErrorCode.OFFSET_OUT_OF_RANGE: WireError.OFFSET_OUT_OF_RANGE,
    ErrorCode.EPOCH_ENDED: WireError.OFFSET_OUT_OF_RANGE,
}


def wire_error(error: BrokerError) -> WireError:
    """The code for an error of the broker."""
    return WIRE_ERRORS[error.code]
