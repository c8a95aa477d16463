"""Stored batches and slots for the tests of the log's lower floors."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from polywire.records.batch import from_spans, read_header, stamp


def make_batch(values: Sequence[bytes]) -> bytearray:
    """An unnumbered batch with these values, without keys."""
    source = b"".join(values)
    spans, at = array("q"), 0
    for value in values:
        spans.extend((0, -1, at, len(value)))
        at += len(value)
    return from_spans(source, memoryview(spans))


@dataclass
class Stored:
    """One batch of a slot as a model remembers it."""

    content: bytes
    offset: int
    next_offset: int
    address: int
    next_address: int
    time_us: int


@dataclass
class Partition:
    """One partition of a slot: where its batches lie, and what they are."""

    number: int
    positions: array[int] = field(default_factory=lambda: array("q"))
    lengths: array[int] = field(default_factory=lambda: array("q"))
    batches: list[Stored] = field(default_factory=list)
    next_offset: int = 0
    next_address: int = 0

    @property
    def content(self) -> bytes:
        return b"".join(batch.content for batch in self.batches)


class Slot:
    """Batches of several partitions scattered over one buffer, as a journal leaves them."""

    def __init__(self, *partitions: int) -> None:
        self.base = bytearray()
        self.partitions = {number: Partition(number) for number in partitions}

    def append(self, number: int, values: Sequence[bytes], *, time_us: int, epoch: int = 1) -> None:
        partition = self.partitions[number]
        batch = make_batch(values)
        stamp(batch, 0, number, epoch, partition.next_offset, partition.next_address, time_us)
        header = read_header(batch)
        self.base += bytes(32)
        partition.positions.append(len(self.base))
        partition.lengths.append(len(batch))
        self.base += batch
        offset, address = partition.next_offset, partition.next_address
        partition.next_offset += header.offset_span
        partition.next_address += header.address_span
        partition.batches.append(
            Stored(bytes(batch), offset, partition.next_offset, address, partition.next_address, time_us)
        )
