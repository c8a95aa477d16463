"""Cold reads of segments: shared between readers, bounded, and retried when a segment was deleted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from polywire.errors import BrokerError
from polywire.log.base import Completion
from polywire.log.partition.cold_reads import RESTS_UNUSED, ColdReads, Stop, Window
from polywire.log.segments.damage import Piece, read_pieces
from polywire.log.segments.segment import Segment
from polywire.log.segments.writer import RunSource, write_segment
from polywire.log.worker import Worker, attempt
from polywire.store.file import FileBlob, FileStore
from tests.memory_store import MemoryStore
from tests.unit.log.batches import Slot

PARTITION = 7
BATCHES = 12


class HeldWorker:
    """A worker that runs jobs only when a test calls it."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Callable[[], Any], Completion[Any]]] = []

    def run(self, job: Callable[[], Any], reported: Completion[Any]) -> None:
        self.jobs.append((job, reported))

    def work(self) -> None:
        jobs, self.jobs = self.jobs, []
        for job, reported in jobs:
            reported(attempt(job))


class Place:
    """Two segments of one partition, and their readers."""

    def __init__(self) -> None:
        slot = Slot(PARTITION)
        for number in range(BATCHES):
            slot.append(PARTITION, [b"%d-%d" % (number, index) * 40 for index in range(50)], time_us=number)
        self.stored = slot.partitions[PARTITION].batches
        self.store = MemoryStore()
        self.segments = [self._segment(0, BATCHES // 2), self._segment(BATCHES // 2, BATCHES)]
        self.worker = HeldWorker()
        self.cold = ColdReads(cast(Worker, self.worker))
        self.reported: list[Window | BrokerError | None] = []

    def _segment(self, start: int, stop: int) -> Segment:
        name = f"segments/{start}-{stop}.pws"
        batches = [batch.content for batch in self.stored[start:stop]]
        write_segment(self.store, name, [RunSource.of_batches(PARTITION, batches)])
        return Segment.open(self.store, name)

    def request(self, offset: int, room: int) -> None:
        self.cold.request((PARTITION, offset), self.segments, self.reported.append, room)


def test_a_window_continues_into_the_next_segment_while_it_has_capacity() -> None:
    place = Place()
    place.request(0, 1 << 20)
    place.worker.work()
    (window,) = place.reported
    assert isinstance(window, Window)
    assert b"".join(bytes(piece.data) for piece in window.pieces) == b"".join(batch.content for batch in place.stored)
    assert [piece.end for piece in window.pieces] == [50 * BATCHES // 2, 50 * BATCHES]


def test_many_small_pieces_share_one_block() -> None:
    place = Place()
    place.segments = [place._segment(number, number + 1) for number in range(BATCHES)]
    place.request(0, 1 << 20)
    place.worker.work()
    (window,) = place.reported
    assert isinstance(window, Window)
    assert [bytes(piece.data) for piece in window.pieces] == [batch.content for batch in place.stored]


def test_a_small_read_takes_one_segment() -> None:
    place = Place()
    place.request(0, 100)
    place.worker.work()
    (window,) = place.reported
    assert isinstance(window, Window)
    assert len(window.pieces) == 1
    assert bytes(window.pieces[0].data).startswith(place.stored[0].content)


def test_the_memory_of_reads_is_freed_when_it_is_not_used() -> None:
    place = Place()
    place.request(0, 1000)
    place.worker.work()
    place.request(50, 1000)
    for _ in range(RESTS_UNUSED - 1):
        place.cold.rest()
    assert place.cold.find(PARTITION, 0) is not None
    assert place.cold._arena.block_count == 1
    place.cold.rest()
    assert place.cold.find(PARTITION, 0) is None
    assert place.cold._arena.block_count == 0
    place.worker.work()
    assert place.cold.find(PARTITION, 50) is not None, "it was being read"
    read, again = place.reported
    assert isinstance(read, Window)
    assert bytes(read.pieces[0].data).startswith(place.stored[0].content), "its reader still has it"
    place.cold.was_read(PARTITION, 0, 50, None)
    place.cold.rest()
    assert place.cold.find(PARTITION, 50) is again, "it was used recently"


def test_requests_for_the_same_window_share_one_read() -> None:
    place = Place()
    place.request(0, 1000)
    place.request(0, 1000)
    assert len(place.worker.jobs) == 1
    assert place.cold.requested((PARTITION, 0)) is place.segments
    place.worker.work()
    assert place.cold.requested((PARTITION, 0)) is None
    first, second = place.reported
    assert first is second is place.cold.find(PARTITION, 0)


def test_a_read_started_before_records_were_removed_serves_only_earlier_requests() -> None:
    place = Place()
    place.request(0, 1000)
    place.cold.forget(PARTITION)
    assert place.cold.requested((PARTITION, 0)) is None
    place.request(0, 1000)
    assert len(place.worker.jobs) == 2, "a later request must see the current segments"
    jobs, place.worker.jobs = place.worker.jobs, []
    place.worker.jobs = jobs[:1]
    place.worker.work()
    assert len(place.reported) == 1
    assert place.cold.find(PARTITION, 0) is None
    place.worker.jobs = jobs[1:]
    place.worker.work()
    assert place.cold.find(PARTITION, 0) is place.reported[1] is not place.reported[0]


def test_least_recently_used_windows_are_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polywire.log.partition.cold_reads.WINDOWS_MAX", 3)
    place = Place()
    place.segments = [place._segment(number, number + 1) for number in range(BATCHES)]
    for number, segment in enumerate(place.segments):
        place.cold.request((PARTITION, 50 * number), [segment], None, 1)
        place.worker.work()
        assert place.cold.find(PARTITION, 0) is not None
    kept = [number for number in range(BATCHES) if place.cold.find(PARTITION, 50 * number) is not None]
    assert kept == [0, BATCHES - 2, BATCHES - 1], "the first was used all the time"


def test_of_windows_with_an_offset_the_furthest_reaching_is_used() -> None:
    place = Place()
    place.request(0, 1 << 20)
    place.request(50, 1)
    place.worker.work()
    found = place.cold.find(PARTITION, 60)
    assert found is not None
    assert (found.first, found.end) == (0, 50 * BATCHES)
    assert place.cold.find(PARTITION, 50 * BATCHES) is None
    assert place.cold.find(PARTITION + 1, 0) is None


def test_a_sequential_reader_resumes_where_its_last_read_stopped() -> None:
    place = Place()
    place.request(0, 1 << 20)
    place.worker.work()
    window = place.cold.find(PARTITION, 0)
    assert window is not None
    at, _, reached = read_pieces(window.pieces, 0, 1, 1 << 40, [])
    place.cold.was_read(PARTITION, 0, at, Stop(window, reached))
    assert place.cold.is_sequential(PARTITION, at)
    assert place.cold.is_sequential(PARTITION, at - 1), "a client may take less than was read"
    assert not place.cold.is_sequential(PARTITION, 0)
    assert not place.cold.is_sequential(PARTITION, at + 1)
    stop = place.cold.resume(PARTITION, at)
    assert stop is not None
    chunks: list[memoryview] = []
    assert read_pieces(stop.window.pieces, at, 1, 1 << 40, chunks, stop.position)[0] == at + 50
    assert bytes(chunks[0]) == place.stored[1].content
    assert place.cold.resume(PARTITION, at) is None, "another reader searches from the start"


def test_a_read_ends_before_a_merged_batch_that_repeats_records() -> None:
    """Segments can be merged between reads: the batch with the next record may then start with earlier records."""
    place, merged = Place(), Slot(PARTITION)
    merged.append(PARTITION, [b"%d" % index * 40 for index in range(150)], time_us=0)
    first, after = place.stored[0].content, merged.partitions[PARTITION].batches[0].content
    chunks: list[memoryview] = []
    at, bytes_left, _ = read_pieces([Piece(memoryview(first), 50, None)], 0, 1 << 20, 1 << 40, chunks)
    assert (at, len(chunks)) == (50, 1)
    again = [Piece(memoryview(after), 150, None)]
    assert read_pieces(again, at, bytes_left, 1 << 40, chunks)[0] == 50
    assert len(chunks) == 1, "no record is returned twice in one read"
    alone: list[memoryview] = []
    assert read_pieces(again, at, bytes_left, 1 << 40, alone)[0] == 150
    assert bytes(alone[0]) == bytes(after), "a new read starts with the whole batch"


def test_a_read_does_not_resume_in_an_evicted_window() -> None:
    place = Place()
    place.request(0, 1 << 20)
    place.worker.work()
    window = place.cold.find(PARTITION, 0)
    assert window is not None
    place.cold.was_read(PARTITION, 0, 50, Stop(window, (0, len(place.stored[0].content))))
    place.cold.forget(PARTITION)
    assert place.cold.resume(PARTITION, 50) is None
    assert place.cold.find(PARTITION, 50) is None


def test_a_deleted_segment_yields_no_window_and_no_error() -> None:
    place = Place()
    place.store.delete(f"segments/0-{BATCHES // 2}.pws")
    place.request(0, 1000)
    place.worker.work()
    assert place.reported == [None]
    assert place.cold.find(PARTITION, 0) is None


def test_repeated_reads_eventually_fill_the_page_cache() -> None:
    place = Place()
    direct = []
    blob = place.store.open(f"segments/0-{BATCHES // 2}.pws")
    original = type(blob).read_direct

    def counted(self: Any, block: memoryview, start: int, stop: int) -> memoryview:
        direct.append(stop - start)
        return original(self, block, start, stop)

    type(blob).read_direct = counted  # type: ignore[method-assign]
    try:
        for room in range(20):
            place.cold.forget(PARTITION)
            place.cold.request((PARTITION, 0), place.segments[:1], None, (1 << 20) + room)
            place.worker.work()
    finally:
        type(blob).read_direct = original  # type: ignore[method-assign]
    assert 1 <= len(direct) < 20
    last = place.cold.find(PARTITION, 0)
    assert last is not None
    assert bytes(last.pieces[0].data).startswith(place.stored[0].content)


def test_a_just_sealed_segment_is_read_without_waiting_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place()
    batches = [batch.content for batch in place.stored]
    content = b"".join(batches)
    requested: list[int] = []

    def read_now(_: FileBlob, out: memoryview, position: int) -> bool:
        requested.append(position)
        out[:] = content
        return True

    for kept_bytes in (1 << 20, 0):
        store = FileStore(tmp_path, kept_bytes=kept_bytes)
        name = f"segments/{kept_bytes}.pws"
        write_segment(store, name, [RunSource.of_batches(PARTITION, batches)])
        segment = Segment.open(store, name)
        segment.locate(PARTITION, 0)  # loads its index entries
        requested.clear()
        with monkeypatch.context() as patch:
            patch.setattr(FileBlob, "read_now", read_now)
            window = place.cold.glance(segment, PARTITION, 0, 1 << 20, 1 << 30, more=False)
        if kept_bytes:
            assert window is not None
            assert b"".join(bytes(piece.data) for piece in window.pieces) == content
        else:
            assert window is None
            assert requested == [], "even a probe would make the system read it into memory"
