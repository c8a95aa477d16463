"""Look up offsets by time or Kafka 0.7 address, addresses by offset, and the byte ranges of sealed records.

A lookup in memory returns its result at once. A thread searches segments and compressed batches, and the result is
passed to the completion on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Final, Protocol, TypeVar, cast

from polywire.errors import BrokerError
from polywire.log.base import NO_OFFSET, Completion, Handle, Located, SealedRange
from polywire.log.partition.partition import FilePartition
from polywire.log.segments.segment import Segment
from polywire.log.worker import Pending, pending
from polywire.records.batch import address_of, offset_of, read_header, record_at_address, record_at_offset
from polywire.records.compression import expand_body
from polywire.store.data_directory import BlobRoot
from polywire.types import Buffer

# runs in one result: up to 4 GiB in large segments, for less than a millisecond of the event loop
LOCATED_RUNS_MAX: Final = 64

Span = tuple[int, int]
"""Positions [start, stop) in a blob."""

_T = TypeVar("_T")


class Queries(Protocol):
    """Methods of ``Reader`` that lookups use."""

    @property
    def root(self) -> BlobRoot:
        """Location of the segments' blobs."""

    def segment(self, location: int) -> Segment:
        """Return a listed segment. Raises Missing."""

    def query(
        self,
        locations: Sequence[int],
        job: Callable[[Sequence[Segment]], _T],
        then: Completion[_T],
        again: Callable[[], None],
    ) -> None:
        """Run ``job`` on segments in the reader's thread, and call ``then`` on the loop with its result.

        If a segment was replaced before it was read, ``again`` is called instead, to repeat the lookup.
        """

    def query_tail(
        self,
        partition: FilePartition,
        number: int,
        job: Callable[[Buffer], int],
        then: Completion[int],
        again: Callable[[], None],
    ) -> int | None:
        """Run ``job`` on a batch that is not in a segment yet: entry ``number`` of the partition's tail index.

        Return the result if the batch is in memory and uncompressed. Otherwise call ``then`` with it later or, if a
        segment with parts of the batch was replaced meanwhile, ``again``.
        """


def offset_at(partition: FilePartition, reader: Queries, time_us: int, then: Completion[int]) -> int | Handle:
    waiter: Pending[int]
    number = partition.runs.find_time(time_us)
    if number > 0:  # the preceding run may contain later records, too
        location = partition.runs.entry(number - 1)[3]
        run = reader.segment(location).run_now(partition.incarnation)
        if run is None:  # its footer is not in memory
            waiter = pending(then)
            again = _retried(partition.offset_at, time_us, waiter)
            reader.query((location,), partial(_end_of, partition.incarnation), _repeat_lookup(again, waiter), again)
            return waiter
        if time_us <= run.last_time_us:
            waiter = pending(then)
            job = partial(_by_time, partition.incarnation, time_us)
            again = _retried(partition.offset_at, time_us, waiter)
            reader.query((location,), job, _at_least_first(partition, waiter), again)
            return waiter
    if number < len(partition.runs):
        return max(partition.runs.entry(number)[0], partition.first_offset)
    number = partition.tail.find_time(time_us)
    found = partition.tail.entry(number)[0] if number < len(partition.tail) else partition.next_offset
    return max(found, partition.first_offset)


def offset_of_address(
    partition: FilePartition, reader: Queries, address: int, then: Completion[int], *, covering: bool
) -> int | Handle:
    if address >= partition.next_address:
        return partition.next_offset if address == partition.next_address else NO_OFFSET
    waiter: Pending[int] = pending(then)
    completed = _unless_trimmed(partition, waiter)
    again = _retried(partial(partition.offset_of_address, covering=covering), address, waiter)
    number = partition.tail.find_address(address)
    if number >= 0:
        found = reader.query_tail(partition, number, partial(_offset_in, address, covering), completed, again)
        return waiter if found is None else found if found >= partition.first_offset else NO_OFFSET
    number = partition.runs.find_address(address)
    if number < 0:
        return NO_OFFSET
    job = partial(_by_address, partition.incarnation, address, covering)
    reader.query((partition.runs.entry(number)[3],), job, completed, again)
    return waiter


def address_of_offset(partition: FilePartition, reader: Queries, offset: int, then: Completion[int]) -> int | Handle:
    partition.check_range(offset)
    if offset == partition.next_offset:
        return partition.next_address
    waiter: Pending[int] = pending(then)
    again = _retried(partition.address_of_offset, offset, waiter)
    number = partition.tail.find_offset(offset)
    if number >= 0:
        found = reader.query_tail(partition, number, partial(_address_in, offset), waiter, again)
        return waiter if found is None else found
    location = partition.runs.entry(partition.runs.find_offset(offset))[3]
    reader.query((location,), partial(_by_offset, partition.incarnation, offset), waiter, again)
    return waiter


def locate(
    partition: FilePartition,
    reader: Queries,
    offset: int,
    then: Completion[Located],
    *,
    offset_end: int | None,
) -> Located | Handle:
    partition.check_range(offset)
    end = min(partition.readable_offset, partition.tail_offset)
    end = end if offset_end is None else min(end, offset_end)
    locations: list[int] = []
    bounds = [offset]
    number = max(partition.runs.find_offset(offset), 0)
    while bounds[-1] < end and len(locations) < LOCATED_RUNS_MAX:
        locations.append(partition.runs.entry(number)[3])
        number += 1
        following = partition.runs.entry(number)[0] if number < len(partition.runs) else partition.tail_offset
        bounds.append(min(following, end))
    segments = [reader.segment(location) for location in locations]
    located = partial(_located, reader.root, segments, bounds, bounds[-1] < end)
    warm = [
        segment.span_now(partition.incarnation, *ends) for segment, ends in zip(segments, pairwise(bounds), strict=True)
    ]
    if all(warm):
        return located([span for span in warm if span is not None])
    waiter: Pending[Located] = pending(then)
    again = _retried(partial(partition.locate, offset_end=offset_end), offset, waiter)
    reader.query(
        locations, partial(_spans, partition.incarnation, bounds), partial(_complete_located, located, waiter), again
    )
    return waiter


# In the reader's thread


def _end_of(incarnation: int, segments: Sequence[Segment]) -> int:
    """Return the offset after the last record that these segments have of a partition. May read a footer from disk."""
    (segment,) = segments
    return segment.run(incarnation).next_offset


def _spans(incarnation: int, bounds: Sequence[int], segments: Sequence[Segment]) -> list[Span]:
    return [segment.span(incarnation, *ends) for segment, ends in zip(segments, pairwise(bounds), strict=True)]


def _by_time(incarnation: int, time_us: int, segments: Sequence[Segment]) -> int:
    (segment,) = segments
    return segment.by_time(incarnation, time_us)


def _by_address(incarnation: int, address: int, covering: bool, segments: Sequence[Segment]) -> int:
    (segment,) = segments
    batch = segment.by_address(incarnation, address)
    return NO_OFFSET if batch is None else _offset_in(address, covering, batch)


def _by_offset(incarnation: int, offset: int, segments: Sequence[Segment]) -> int:
    (segment,) = segments
    return _address_in(offset, segment.batch_at(incarnation, offset))


def _offset_in(address: int, covering: bool, batch: Buffer) -> int:
    """Return the offset of the record that begins at a byte position (Kafka 0.7) or, if ``covering``, contains it."""
    batch = expand_body(batch)
    index = record_at_address(batch, address, covering=covering)
    return NO_OFFSET if index < 0 else offset_of(batch, index)


def _address_in(offset: int, batch: Buffer) -> int:
    """Return the byte position (Kafka 0.7) of the first record at or after an offset, or the batch's end if there is
    none.
    """
    batch = expand_body(batch)
    index = record_at_offset(batch, offset)
    header = read_header(batch)
    return address_of(batch, index) if index < header.record_count else header.base_address + header.address_span


# On the loop


def _located(
    root: BlobRoot, segments: Sequence[Segment], bounds: Sequence[int], more: bool, spans: Sequence[Span]
) -> Located:
    runs = [
        SealedRange(root.prefix + segment.name, *span, *ends)
        for segment, span, ends in zip(segments, spans, pairwise(bounds), strict=True)
    ]
    return Located(root, runs, more)


def _complete_located(
    located: Callable[[Sequence[Span]], Located],
    then: Completion[Located],
    found: Sequence[Span] | BrokerError,
) -> None:
    then(found if isinstance(found, BrokerError) else located(found))


def _repeat_lookup(again: Callable[[], None], then: Completion[int]) -> Completion[int]:
    """Return a callback that repeats a lookup by calling ``again``. Errors are passed to ``then``."""

    def completed(found: int | BrokerError) -> None:
        if isinstance(found, BrokerError):
            then(found)
        else:
            again()

    return completed


def _at_least_first(partition: FilePartition, then: Completion[int]) -> Completion[int]:
    """Return a callback that passes its result to ``then``, or the partition's first offset if that is higher."""
    return lambda found: then(found if isinstance(found, BrokerError) else max(found, partition.first_offset))


def _unless_trimmed(partition: FilePartition, then: Completion[int]) -> Completion[int]:
    """Return a callback that passes its result to ``then``, or NO_OFFSET if that offset was trimmed meanwhile."""
    return lambda found: then(found if isinstance(found, BrokerError) or found >= partition.first_offset else NO_OFFSET)


def _retried(
    question: Callable[[int, Completion[_T]], _T | Handle], argument: int, waiter: Pending[_T]
) -> Callable[[], None]:
    """Return a function that repeats a lookup and passes the result to ``waiter``.

    Args:
        question: method that performs the lookup.
        argument: its argument.
    """

    def request() -> None:
        if waiter.is_over:
            return
        try:
            found: _T | Handle | BrokerError = question(argument, waiter)
        except BrokerError as refused:
            found = refused
        if found is not waiter:  # the lookup now waits for other data
            waiter(cast(_T | BrokerError, found))

    return request
