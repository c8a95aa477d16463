"""Reads of a log after a failed write, until the process ends."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from polywire.errors import BrokerError, Busy, Corrupt, Unavailable
from polywire.log.base import Ranges, Read
from polywire.log.log import FileLog
from polywire.records.columns import Record
from polywire.records.rows import from_records
from polywire.store.base import BlobExists
from polywire.store.file import FileStore
from polywire.store.file_objects import FileObjects
from polywire.store.objects import ObjectChanged
from polywire.types import Level
from tests.sim.log.client import records_of
from tests.sim.machine import SETTINGS, Machine
from tests.sim.process import DIRECTORY

TOKEN = b"t" * 16


def _append(log: FileLog, reported: list[int | BrokerError | Ranges]) -> None:
    log.append(log.partition(1), from_records([Record(b"lost")]), level=Level.WRITTEN, done=reported.append)


def _publish(log: FileLog, reported: list[int | BrokerError | Ranges]) -> None:
    log.publish([TOKEN], b"change", level=Level.WRITTEN, done=reported.append)


def test_a_read_after_a_failed_append_finds_the_end() -> None:
    _read_behind_a_failed(_append)


def test_a_read_after_a_failed_publish_finds_the_end() -> None:
    _read_behind_a_failed(_publish)


def _read_behind_a_failed(ask: Callable[[FileLog, list[int | BrokerError | Ranges]], None]) -> None:
    machine = Machine()
    log = machine.open()
    log.open_partition(1)
    machine.append(log, b"kept")
    staged = partial(log.stage, TOKEN, log.partition(1), from_records([Record(b"lost")]), expires_at_us=2**62)
    staged(level=Level.WRITTEN, done=None)
    log.commit()
    reported: list[int | BrokerError | Ranges] = []
    machine.process.files.faults.rates["write"] = 1.0
    ask(log, reported)
    machine.process.until(lambda: reported)
    assert isinstance(reported[0], BrokerError)
    partition = log.partition(1)
    assert partition.next_offset == 1
    found = partition.read(1, bytes_max=1000, then=lambda _: None)
    assert isinstance(found, Read)
    assert not found.chunks


def test_a_transient_read_error_does_not_mark_damage() -> None:
    machine = Machine()
    log = machine.open()
    log.open_partition(1)
    published = _publish_sealed(machine, log)
    machine.process.files.faults.rates["read"] = 1.0
    with suppress(Busy):  # nothing is sealed meanwhile
        for _ in range(30):
            machine.append(log, b"." * 4000)
    machine.process.until(lambda: machine.story.counts["fault"])
    machine.process.files.faults.rates.clear()
    machine.process.until(lambda: not log.sealing)
    found = machine.process.read(1, published)
    assert isinstance(found, Read), found
    assert records_of(found.chunks)[0].value == b"staged"


def test_a_failed_read_is_retried_for_the_next_reader() -> None:
    machine = Machine()
    log = machine.open()
    log.open_partition(1)
    _fill(machine, log)
    _read_fails_once(machine, log, 0)


def test_a_failed_read_of_a_staged_body_is_retried_for_the_next_reader() -> None:
    machine = Machine()
    log = machine.open()
    log.open_partition(1)
    published = _publish_sealed(machine, log)
    log.commit()
    _read_fails_once(machine, log, published)


def _publish_sealed(machine: Machine, log: FileLog) -> int:
    """Publish a staged batch whose body is in a segment already, without a commit; return its offset."""
    staged = partial(log.stage, TOKEN, log.partition(1), from_records([Record(b"staged")]), expires_at_us=2**62)
    staged(level=Level.WRITTEN, done=None)
    _fill(machine, log)
    published = log.partition(1).next_offset
    log.publish([TOKEN], b"change", level=Level.WRITTEN, done=lambda _: None)
    return published


def _read_fails_once(machine: Machine, log: FileLog, offset: int) -> None:
    files = machine.process.files
    files.cold = 1.0  # no read is answered at once
    machine.process.read(1, offset)  # loads the segment's footer and index
    log._state.reader.forget(log.partition(1))
    log._state.reader._cold._bodies.clear()
    files.faults.rates["read"] = 1.0
    assert isinstance(machine.process.read(1, offset), Corrupt)
    files.faults.rates.clear()
    found = machine.process.read(1, offset)
    assert isinstance(found, Read), found
    assert records_of(found.chunks)[0].offset == offset


def test_removals_on_a_full_disk_leave_space_for_sealing() -> None:
    machine = Machine()
    log = machine.open()
    log.open_partition(1)
    machine.append(log, b"kept")
    machine.disk.capacity_bytes = machine.disk.used_bytes
    with suppress(Busy):
        while True:
            machine.append(log, b"." * 4000)
    with suppress(Busy):
        while True:
            log.trim(1, 1)
            reported: list[int | BrokerError] = []
            log.barrier(Level.SYNCED, reported.append)
            machine.process.until(lambda reported=reported: reported)  # type: ignore[misc]
    machine.disk.capacity_bytes = 1 << 24
    machine.process.until(lambda: not log.sealing)
    machine.append(log, b"kept")


def test_a_read_that_cannot_open_its_segment_at_once_runs_in_the_reader() -> None:
    machine = Machine(replace(SETTINGS, open_blobs_max=1))
    log = machine.open()
    log.open_partition(1)
    _fill(machine, log)
    _fill(machine, log)
    ends = [log.partition(1).next_offset // 2, 0]
    for offset in ends:  # loads the metadata of both segments; one of them is open
        assert isinstance(machine.process.read(1, offset), Read)
    machine.process.log._state.reader.forget(log.partition(1))
    files, reported = machine.process.files, list[Read | BrokerError]()
    files.faults.rates["open"] = 1.0
    assert not isinstance(log.partition(1).read(ends[0], bytes_max=1, then=reported.append), Read)
    files.faults.rates.clear()
    machine.process.until(lambda: reported)
    assert isinstance(reported[0], Read)


def test_a_directory_of_blobs_whose_sync_failed_is_synced_before_its_blobs_count() -> None:
    machine = Machine()
    machine.open()
    files = machine.process.files
    store = FileStore(DIRECTORY, files=files)
    files.faults.rates["sync"] = 1.0
    with pytest.raises(BrokerError):
        store.put_new("blobs/first", [b"first"])
    files.faults.rates.clear()
    store.put_new("blobs/second", [b"second"])
    machine.disk.lose_power(machine.chance, 0.0)
    assert store.get("blobs/second") == b"second"


def test_one_of_too_many_slots_is_kept_for_the_next_write() -> None:
    journal = Machine(replace(SETTINGS, slot_count_min=3, slot_count_max=3)).open()._journal
    journal.roll()
    journal.roll()
    first, second, _ = journal.slots.values()
    assert not journal.free
    journal._slot_count_max = 2
    journal.release(first)
    journal.release(second)
    assert list(journal.free) == [first]


@pytest.mark.parametrize("is_another", [False, True], ids=["same", "another"])
def test_a_directory_of_objects_whose_sync_failed_is_synced_before_its_objects_count(is_another: bool) -> None:
    machine = Machine()
    machine.open()
    files = machine.process.files
    objects = FileObjects(DIRECTORY, files)
    files.faults.rates["sync"] = 1.0
    for _ in range(3):  # one directory per call, each without its sync
        with pytest.raises(BrokerError):
            objects.create("deep/below/first", [b"first"])
    files.faults.rates.clear()
    if is_another:
        objects = FileObjects(DIRECTORY, files)
    objects.create("deep/below/second", [b"second"])
    machine.disk.lose_power(machine.chance, 0.0)
    assert objects.read("deep/below/second").content == b"second"


@pytest.mark.parametrize("failing", range(1, 256))
def test_an_object_is_there_after_any_syncs_of_directories_failed(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """failing: the syncs that fail, as bits."""
    machine = Machine()
    machine.open()
    files, sync, left = machine.process.files, machine.process.files.sync_directory, failing

    def sync_or_fail(path: Path) -> None:
        nonlocal left
        fails, left = left & 1, left >> 1
        if fails:
            _fail(path)
        sync(path)

    monkeypatch.setattr(files, "sync_directory", sync_or_fail)
    objects, is_stored = FileObjects(DIRECTORY / "new", files), False
    while not is_stored:
        try:
            objects.create("deep/first", [b"first"])
            is_stored = True
        except Unavailable:
            continue
        except BlobExists:
            is_stored = objects.read("deep/first").content == b"first"
    machine.disk.lose_power(machine.chance, 0.0)
    assert objects.read("deep/first").content == b"first"


@pytest.mark.parametrize("kept", [0.0, 1.0])
def test_an_object_that_was_replaced_is_there_after_a_failed_sync(kept: float) -> None:
    machine = Machine()
    machine.open()
    files = machine.process.files
    objects = FileObjects(DIRECTORY, files)
    objects.create("some/floor", [b"first"])
    tag = objects.read("some/floor").tag
    sync = files.sync_directory
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "sync_directory", lambda path: _fail(path) if path.name == "some" else sync(path))
        with pytest.raises(Unavailable):
            objects.replace("some/floor", b"second", tag)
    with pytest.raises(ObjectChanged):
        objects.replace("some/floor", b"second", tag)
    machine.disk.lose_power(machine.chance, kept)
    assert objects.read("some/floor").content == b"second"


def _fail(path: Path) -> None:
    raise OSError(errno.EIO, "Input/output error", str(path))


def _fill(machine: Machine, log: FileLog) -> None:
    """Fill the slot and wait until it is sealed."""
    for _ in range(12):
        machine.append(log, b"." * 4000)
    machine.process.until(lambda: not log.sealing)
