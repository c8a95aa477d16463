"""Every error of the broker has a Kafka code, and clients retry only errors that a retry can fix."""

from __future__ import annotations

import pytest

from polywire.errors import Busy, Corrupt, Denied, ErrorCode, NotOwner, Unavailable
from polywire.protocols.kafka.errors import WIRE_ERRORS, wire_error
from polywire.protocols.kafka.messages import WireError

REPEATED = {2, 3, 5, 6, 7, 14, 15, 16, 41, 51, 56, 70, 71, 74, 75, 88, 89, 100}  # by clients themselves


def test_the_table_is_total() -> None:
    assert set(WIRE_ERRORS) == set(ErrorCode)
    assert WireError.NONE not in WIRE_ERRORS.values()


@pytest.mark.parametrize("error", [WireError.GROUP_AUTHORIZATION_FAILED, WireError.CLUSTER_AUTHORIZATION_FAILED])
def test_a_denial_names_the_kind_of_resource(error: WireError) -> None:
    denied = Denied(ErrorCode.DENIED, "no")
    assert wire_error(denied) is WireError.TOPIC_AUTHORIZATION_FAILED
    assert wire_error(denied, denied=error) is error


def test_temporary_errors_are_retriable_and_permanent_ones_are_not() -> None:
    for passing in (
        NotOwner(ErrorCode.NOT_OWNER, ""),
        Busy(ErrorCode.BUSY, ""),
        Unavailable(ErrorCode.STOPPING, ""),
        Unavailable(ErrorCode.REPLICATION_TIMEOUT, ""),
    ):
        assert wire_error(passing) in REPEATED
    assert wire_error(Corrupt(ErrorCode.CORRUPT, "")) not in REPEATED
