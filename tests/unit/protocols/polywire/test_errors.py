"""The table of errors is complete and one to one, and errors round-trip."""

from __future__ import annotations

import pytest

from polywire import errors
from polywire.errors import BrokerError, ErrorCode, Retry
from polywire.protocols.polywire.errors import CODES, KINDS, RETRIES, error_of, failure_of
from polywire.protocols.polywire.messages import Failure


def test_every_code_kind_and_retry_has_one_number() -> None:
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, BrokerError)}
    assert set(CODES) == set(ErrorCode)
    assert set(KINDS) == kinds - {BrokerError}
    assert set(RETRIES) == set(Retry)
    for table in (CODES, KINDS, RETRIES):
        assert len(set(table.values())) == len(table)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("code", [ErrorCode.BUSY, ErrorCode.CORRUPT])
def test_errors_round_trip(kind: type[BrokerError], code: ErrorCode) -> None:
    error = kind(code, "it failed why=so", retry_after_ms=5)
    back = error_of(failure_of(error))
    assert (type(back), back.code, back.message, back.retry_after_ms) == (kind, code, "it failed why=so", 5)


def test_unknown_codes_use_their_kind_and_unknown_kinds_are_not_retriable() -> None:
    assert type(error_of(Failure(9999, 4, "m", 0))) is errors.Conflict
    assert type(error_of(Failure(9999, 99, "m", 0))) is errors.Unavailable
    assert type(error_of(Failure(CODES[ErrorCode.TOPIC_MISSING], 99, "m", 0))) is errors.Unavailable
