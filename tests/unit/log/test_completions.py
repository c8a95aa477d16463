"""Completions and handles of both logs: called once, never inside the starting call, never after cancel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pytest

from polywire.errors import BrokerError, Missing, Unavailable
from polywire.log.base import NO_OFFSET, Completion, Handle, Log, PartitionLog, Read
from polywire.log.partition.partition import FilePartition
from polywire.log.worker import Pending, pending
from polywire.records.compression import Compression
from polywire.store.file import FileBlob
from polywire.testing.loop import ManualLoop
from polywire.testing.memory_log import MemoryLog
from polywire.types import Level
from tests.unit.log.rig import SMALL, Memory, Rig, batch_of

TOKEN = b"t" * 16
NEVER = 2**62
PASSES = 50


class World(Protocol):
    """A log with one partition of two records, and its loop."""

    log: Log
    partition: PartitionLog

    def run(self) -> None:
        """Run until everything due was called, and some passes more."""

    def fail(self) -> None:
        """Make the disk fail."""


class OnFiles:
    """The log on files."""

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self._rig = Rig(directory, replace(SMALL, sync_interval_ms=600_000))
        self.log: Log = self._rig.log
        self.partition: PartitionLog = self._rig.log.open_partition(1)
        self._rig.append(self._rig.log.partition(1), [b"a", b"b"])
        self._rig.settle()

    def run(self) -> None:
        reported: list[object] = []
        try:
            self.log.barrier(Level.SYNCED, reported.append)
        except Unavailable:
            reported.append(None)
        self._rig.loop.run_until(lambda: reported)
        for _ in range(PASSES):
            self._rig.loop.run_pass()

    def fail(self) -> None:
        def broken(*_: object) -> int:
            raise OSError(5, "input/output error")

        self._patch.setattr("os.pwritev", broken)

    def close(self) -> None:
        self._patch.undo()
        self._rig.log.close()


class InMemory:
    """The log in memory."""

    def __init__(self) -> None:
        self._loop = ManualLoop()
        self._log = MemoryLog(self._loop, self._loop.clock, Memory())
        self.log: Log = self._log
        self.partition: PartitionLog = self._log.open_partition(1)
        self.log.append(self.partition, batch_of([b"a", b"b"]), level=Level.SYNCED, done=None)
        self.run()

    def run(self) -> None:
        self._loop.run_due()

    def fail(self) -> None:
        self._log.fail()

    def close(self) -> None:
        self.log.close()


@pytest.fixture(params=["files", "memory"])
def world(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = OnFiles(tmp_path, monkeypatch) if request.param == "files" else InMemory()
    yield made
    made.close()


def append(world: World, level: Level, done: Completion[Any]) -> None:
    world.log.append(world.partition, batch_of([b"c"]), level=level, done=done)


def merged(world: World, level: Level, done: Completion[Any]) -> None:
    world.log.append(world.partition, batch_of([b"c"]), level=level, done=None)
    world.log.append(world.partition, batch_of([b"d"]), level=level, done=done)


def change(world: World, level: Level, done: Completion[Any]) -> None:
    world.log.change(b"change", level=level, done=done)


def barrier(world: World, level: Level, done: Completion[Any]) -> None:
    world.log.barrier(level, done)


def stage(world: World, level: Level, done: Completion[Any]) -> None:
    world.log.stage(TOKEN, world.partition, batch_of([b"c"]), expires_at_us=NEVER, level=level, done=done)


def publish(world: World, level: Level, done: Completion[Any]) -> None:
    world.log.stage(TOKEN, world.partition, batch_of([b"c"]), expires_at_us=NEVER, level=level, done=None)
    world.log.publish([TOKEN], b"published", level=level, done=done)


ADDITIONS: dict[Callable[[World, Level, Completion[Any]], None], object] = {
    append: 2,
    merged: 3,
    change: NO_OFFSET,
    barrier: NO_OFFSET,
    stage: NO_OFFSET,
    publish: [(1, 2, 3)],
}


@pytest.mark.parametrize("level", list(Level))
@pytest.mark.parametrize("verb", ADDITIONS, ids=lambda verb: verb.__name__)
def test_an_addition_completes_once_and_never_inside(
    world: World, verb: Callable[[World, Level, Completion[Any]], None], level: Level
) -> None:
    reported: list[object] = []
    verb(world, level, reported.append)
    assert not reported, "the callback ran inside the call"
    world.log.write()
    assert not reported, "the callback ran inside a write that another append needed"
    world.run()
    assert reported == [ADDITIONS[verb]]


@pytest.mark.parametrize("verb", ADDITIONS, ids=lambda verb: verb.__name__)
def test_an_addition_that_fails_completes_once_with_the_error(
    world: World, verb: Callable[[World, Level, Completion[Any]], None]
) -> None:
    reported: list[object] = []
    verb(world, Level.SYNCED, reported.append)
    world.log.change(b"so that there is something to write", level=Level.WRITTEN, done=None)
    world.fail()
    world.log.commit()
    world.run()
    assert [type(error) for error in reported] == [Unavailable]


def test_a_method_that_raises_completes_nothing(world: World) -> None:
    reported: list[object] = []
    with pytest.raises(Missing):
        world.log.publish([b"u" * 16], b"change", level=Level.WRITTEN, done=reported.append)
    with pytest.raises(Missing):
        world.partition.read(7, bytes_max=1, then=reported.append)
    world.run()
    assert not reported


@pytest.mark.parametrize("offset", [0, 2], ids=["due", "not due"])
def test_a_wait_completes_at_most_once_and_never_inside_the_call(world: World, offset: int) -> None:
    woken: list[str] = []
    world.log.wait(world.partition, offset, lambda: woken.append("waits"))
    world.log.wait(world.partition, offset, lambda: woken.append("takes back")).cancel()
    assert not woken
    append(world, Level.WRITTEN, lambda _: None)
    world.run()
    append(world, Level.WRITTEN, lambda _: None)
    world.run()
    assert woken == ["waits"]


def test_a_due_wait_can_be_cancelled(world: World) -> None:
    woken: list[str] = []
    waits: list[Handle] = []

    def first() -> None:
        woken.append("first")
        waits[0].cancel()
        waits[0].cancel()

    world.log.wait(world.partition, 2, first)
    waits.append(world.log.wait(world.partition, 2, lambda: woken.append("second")))
    append(world, Level.WRITTEN, lambda _: None)
    world.run()
    assert woken == ["first"]


# Records that look available in memory are read by a thread if the page cache does not have them.


def read(partition: FilePartition, then: Completion[Any]) -> object:
    return partition.read(0, bytes_max=1, then=then)


def locate(partition: FilePartition, then: Completion[Any]) -> object:
    return partition.locate(0, then)


def offset_at(partition: Any, then: Completion[Any]) -> object:
    times = partition.runs if isinstance(partition, FilePartition) and len(partition.runs) else None
    return partition.offset_at(1 if times is None else times.entry(0)[5] + 1, then)


def offset_of_address(partition: FilePartition, then: Completion[Any]) -> object:
    return partition.offset_of_address(0, then)


def address_of_offset(partition: FilePartition, then: Completion[Any]) -> object:
    return partition.address_of_offset(1, then)


LOOK_UPS = (read, locate, offset_at, offset_of_address, address_of_offset)


@pytest.fixture
def cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """Return a log whose first records are sealed and not cached."""
    rig = Rig(tmp_path, replace(SMALL, sync_interval_ms=600_000))
    partition = rig.log.open_partition(1)
    partition.compression = Compression.ZSTD
    before = rig.log._journal.current
    while rig.log._journal.current is before:
        rig.append(partition, [b"x" * 1000])
        rig.log.commit()
    rig.settle()
    rig.log.close()
    rig.open()
    monkeypatch.setattr(FileBlob, "read_now", lambda *_: False)
    yield rig
    rig.log.close()


@pytest.mark.parametrize("verb", LOOK_UPS, ids=lambda verb: verb.__name__)
def test_a_cold_read_completes_at_most_once_and_never_inside_the_call(
    cold: Rig, verb: Callable[[FilePartition, Completion[Any]], object]
) -> None:
    partition = cold.log.partition(1)
    reported: list[object] = []
    taken_back: list[object] = []
    handle = verb(partition, taken_back.append)
    waiting = verb(partition, reported.append)
    assert isinstance(handle, Pending)
    assert isinstance(waiting, Pending)
    handle.cancel()
    assert not reported, "the callback ran inside the call"
    cold.loop.run_until(lambda: reported)
    for _ in range(PASSES):
        cold.loop.run_pass(0.001)
    assert len(reported) == 1
    assert not isinstance(reported[0], BrokerError), reported
    assert not taken_back
    waiting.cancel()
    handle.cancel()


@pytest.mark.parametrize("verb", LOOK_UPS, ids=lambda verb: verb.__name__)
def test_available_results_are_returned_without_a_callback(
    world: World, verb: Callable[[Any, Completion[Any]], object]
) -> None:
    reported: list[object] = []
    found = verb(world.partition, reported.append)
    assert not isinstance(found, Pending)
    world.run()
    assert not reported


# Helpers


class Pinned:
    """Bytes that may have to be released."""

    def __init__(self) -> None:
        self.released = 0

    def release(self) -> None:
        self.released += 1


def test_the_bytes_of_a_cancelled_read_are_released() -> None:
    reported: list[object] = []
    pin = Pinned()
    waiter: Pending[Read] = pending(reported.append)
    assert pending(waiter) is waiter, "a second request must not affect the first handle"
    waiter.cancel()
    assert waiter.is_over
    waiter(Read((), 0, 0, pin))
    assert not reported
    assert pin.released == 1
    waiter = pending(reported.append)
    waiter(Read((), 0, 0, pin))
    waiter.cancel()
    assert len(reported) == 1
    assert pin.released == 1, "the receiver releases it"
