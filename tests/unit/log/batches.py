"""Stored batches and journal slots for unit tests of the log."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from polywire.records.batch import from_spans, read_header, stamp


def make_batch(values: Sequence[bytes]) -> bytearray:
    """Return a batch of keyless records with these values and no offsets."""
    source = b"".join(values)
    spans, at = array("q"), 0
    for value in values:
        spans.extend((0, -1, at, len(value)))
        at += len(value)
    return from_spans(source, memoryview(spans))


@dataclass
class Stored:
    """One batch of a slot as the model remembers it."""

    content: bytes
    offset: int
    next_offset: int
    address: int
    next_address: int
    time_us: int


@dataclass
class Partition:
    """One partition of a slot: the positions of its batches, and the batches."""

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
    """Batches of several partitions interleaved in one buffer, as in a journal slot."""

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
