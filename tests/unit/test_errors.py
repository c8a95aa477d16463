"""Errors keep what they say when they are copied or sent to another process."""

from __future__ import annotations

import copy
import pickle

import pytest

from polywire.errors import (
    BrokerError,
    Busy,
    Conflict,
    Corrupt,
    Denied,
    ErrorCode,
    Invalid,
    Missing,
    NotOwner,
    Unavailable,
)


@pytest.mark.parametrize("kind", [Invalid, Denied, Missing, Conflict, NotOwner, Busy, Unavailable, Corrupt])
def test_an_error_can_be_sent_to_another_process(kind: type[BrokerError]) -> None:
    error = kind(ErrorCode.BUSY, "the disk is full", retry_after_ms=7)
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(again) is kind
        assert (again.code, again.message, again.retry_after_ms, str(again)) == (
            ErrorCode.BUSY,
            "the disk is full",
            7,
            str(error),
        )
