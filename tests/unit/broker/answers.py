"""Batches to produce and callbacks that remember what they were told."""

from __future__ import annotations

from array import array

from polywire.errors import BrokerError, ErrorCode
from polywire.log.base import NO_OFFSET
from polywire.records import batch as batches
from polywire.records.columns import Column
from polywire.types import Buffer


class Answers:
    """A completion that keeps its answers; an error has the offset -1."""

    def __init__(self) -> None:
        self.offsets: list[int] = []
        self.errors: list[BrokerError] = []

    def __call__(self, result: int | BrokerError) -> None:
        if isinstance(result, BrokerError):
            self.errors.append(result)
        self.offsets.append(NO_OFFSET if isinstance(result, BrokerError) else result)

    @property
    def reported(self) -> bool:
        """Whether there is an answer."""
        return bool(self.offsets)

    @property
    def code(self) -> ErrorCode:
        """The code of the only answer, which is an error."""
        [error] = self.errors
        assert len(self.offsets) == 1
        return error.code

    def check(self) -> None:
        """There is one answer, and it is no error."""
        assert (len(self.offsets), self.errors) == (1, []), (self.offsets, self.errors)


def batch_of(*values: bytes) -> bytearray:
    """An unnumbered batch of records without keys."""
    spans = array("q")
    at = 0
    for value in values:
        spans.extend((0, -1, at, len(value)))
        at += len(value)
    return batches.from_spans(b"".join(values), memoryview(spans))


def batch_by(producer: bytes, epoch: int, base: int, count: int = 1) -> bytearray:
    """A batch of ``count`` one-byte records of an idempotent producer."""
    columns: dict[int, Buffer] = {
        Column.VALUE_OFFSETS: array("i", range(count + 1)).tobytes(),
        Column.VALUE_BYTES: b"v" * count,
        Column.PRODUCER_ID: producer,
    }
    return batches.from_columns(columns, count, producer_epoch=epoch, base_sequence=base)
