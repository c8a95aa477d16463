"""Windows of segments: read once for all who ask, bounded in number, and refused to nobody when a segment went."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from polywire.errors import BrokerError
from polywire.log.cold import WINDOWS_MAX, ColdReads, Window
from polywire.log.segment import Segment
from polywire.log.segment_write import RunSource, write_segment
from polywire.log.worker import Worker, attempt
from polywire.store.memory import MemoryStore
from tests.unit.log.batches import Slot

PARTITION = 7
BATCHES = 12


class HeldWorker:
    """A worker whose jobs run when the test says so."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Callable[[], Any], Callable[[Any, BrokerError | None], None]]] = []

    def run(self, job: Callable[[], Any], told: Callable[[Any, BrokerError | None], None]) -> None:
        self.jobs.append((job, told))

    def work(self) -> None:
        jobs, self.jobs = self.jobs, []
        for job, told in jobs:
            told(*attempt(job))


class Place:
    """Two segments of one partition, and who reads them."""

    def __init__(self) -> None:
        slot = Slot(PARTITION)
        for number in range(BATCHES):
            slot.append(PARTITION, [b"%d-%d" % (number, index) * 40 for index in range(50)], time_us=number)
        self.stored = slot.partitions[PARTITION].batches
        self.store = MemoryStore()
        self.segments = [self._segment(0, BATCHES // 2), self._segment(BATCHES // 2, BATCHES)]
        self.worker = HeldWorker()
        self.cold = ColdReads(cast(Worker, self.worker))
        self.told: list[tuple[Window | None, BrokerError | None]] = []

    def _segment(self, start: int, stop: int) -> Segment:
        name = f"segments/{start}-{stop}.pws"
        batches = [batch.content for batch in self.stored[start:stop]]
        write_segment(self.store, name, [RunSource.of_batches(PARTITION, batches)])
        return Segment.open(self.store, name)

    def ask(self, offset: int, room: int) -> None:
        self.cold.ask((PARTITION, offset, room), self.segments, lambda *found: self.told.append(found))


def test_a_window_goes_on_from_segment_to_segment_while_there_is_room() -> None:
    place = Place()
    place.ask(0, 1 << 20)
    place.worker.work()
    ((window, error),) = place.told
    assert error is None
    assert window is not None
    assert b"".join(bytes(piece.data) for piece in window.pieces) == b"".join(batch.content for batch in place.stored)
    assert [piece.end for piece in window.pieces] == [50 * BATCHES // 2, 50 * BATCHES]


def test_many_small_pieces_share_one_block() -> None:
    place = Place()
    place.segments = [place._segment(number, number + 1) for number in range(BATCHES)]
    place.ask(0, 1 << 20)
    place.worker.work()
    window = place.told[0][0]
    assert window is not None
    assert [bytes(piece.data) for piece in window.pieces] == [batch.content for batch in place.stored]


def test_a_small_read_takes_one_segment() -> None:
    place = Place()
    place.ask(0, 100)
    place.worker.work()
    window = place.told[0][0]
    assert window is not None
    assert len(window.pieces) == 1
    assert bytes(window.pieces[0].data).startswith(place.stored[0].content)


def test_who_asks_for_the_same_waits_for_the_same() -> None:
    place = Place()
    place.ask(0, 1000)
    place.ask(0, 1000)
    assert len(place.worker.jobs) == 1
    place.worker.work()
    (first, _), (second, _) = place.told
    assert first is second is place.cold.find((PARTITION, 0, 1000))


def test_windows_used_longest_ago_are_forgotten() -> None:
    place = Place()
    for room in range(1, WINDOWS_MAX + 3):
        place.ask(0, room)
        place.worker.work()
        assert place.cold.find((PARTITION, 0, 1)) is not None or room > WINDOWS_MAX
    kept = [room for room in range(1, WINDOWS_MAX + 3) if place.cold.find((PARTITION, 0, room)) is not None]
    assert len(kept) == WINDOWS_MAX
    assert 1 in kept, "it was looked at all the time"


def test_a_segment_that_went_is_told_as_neither_window_nor_error() -> None:
    place = Place()
    place.store.delete(f"segments/0-{BATCHES // 2}.pws")
    place.ask(0, 1000)
    place.worker.work()
    assert place.told == [(None, None)]
    assert place.cold.find((PARTITION, 0, 1000)) is None


def test_a_read_again_and_again_fills_the_page_cache_at_last() -> None:
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
            place.cold.ask((PARTITION, 0, (1 << 20) + room), place.segments[:1], None)
            place.worker.work()
    finally:
        type(blob).read_direct = original  # type: ignore[method-assign]
    assert 1 <= len(direct) < 20
    last = place.cold.find((PARTITION, 0, (1 << 20) + 19))
    assert last is not None
    assert bytes(last.pieces[0].data).startswith(place.stored[0].content)
