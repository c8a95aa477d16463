"""Batches to produce, and completion callbacks that record their results."""

from __future__ import annotations

from array import array

from polywire.errors import BrokerError, ErrorCode
from polywire.log.base import NO_OFFSET
from polywire.records import batch as batches
from polywire.records.columns import Column
from polywire.types import Buffer


class Answers:
    """A completion callback that records results; an error is recorded as offset -1."""

    def __init__(self) -> None:
        self.offsets: list[int] = []
        self.errors: list[BrokerError] = []

    def __call__(self, result: int | BrokerError) -> None:
        if isinstance(result, BrokerError):
            self.errors.append(result)
        self.offsets.append(NO_OFFSET if isinstance(result, BrokerError) else result)

    @property
    def reported(self) -> bool:
        """Return whether a result has arrived."""
        return bool(self.offsets)

    @property
    def code(self) -> ErrorCode:
        """Return the code of the only result, which must be an error."""
        [error] = self.errors
        assert len(self.offsets) == 1
        return error.code

    def check(self) -> None:
        """Assert that there is exactly one result and that it is no error."""
        assert (len(self.offsets), self.errors) == (1, []), (self.offsets, self.errors)


def batch_of(*values: bytes) -> bytearray:
    """Return a batch of keyless records without sequence numbers."""
    spans = array("q")
    at = 0
    for value in values:
        spans.extend((0, -1, at, len(value)))
        at += len(value)
    return batches.from_spans(b"".join(values), memoryview(spans))


def batch_by(producer: bytes, epoch: int, base: int, count: int = 1) -> bytearray:
    """Return a batch of ``count`` one-byte records of an idempotent producer."""
    columns: dict[int, Buffer] = {
        Column.VALUE_OFFSETS: array("i", range(count + 1)).tobytes(),
        Column.VALUE_BYTES: b"v" * count,
        Column.PRODUCER_ID: producer,
    }
    return batches.from_columns(columns, count, producer_epoch=epoch, base_sequence=base)
