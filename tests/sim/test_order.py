"""The order of callbacks when one of them causes another."""

from __future__ import annotations

from dataclasses import replace

from polywire.errors import BrokerError
from polywire.records.columns import Record
from polywire.records.rows import from_records
from polywire.types import Level
from tests.sim.machine import SETTINGS, Machine


def test_waiters_for_a_sync_are_called_before_one_added_meanwhile() -> None:
    machine = Machine()
    log = machine.open()
    log.open_partition(1)
    log.append(log.partition(1), from_records([Record(b"value")]), level=Level.WRITTEN, done=None)
    log.commit()
    flusher, reported = log._flusher, list[str]()

    def first(_: BrokerError | None) -> None:
        reported.append("first")
        flusher.wait(flusher.synced, lambda _: reported.append("late"))

    for waiting in (first, lambda _: reported.append("second")):
        flusher.wait(flusher.written, waiting)
    machine.process.until(lambda: len(reported) == 3)
    assert reported == ["first", "second", "late"]


def test_a_log_congested_by_unsynced_data_syncs_at_once() -> None:
    machine = Machine(replace(SETTINGS, unsynced_bytes_max=8000, sync_interval_ms=60_000))
    log = machine.open()
    log.open_partition(1)
    for _ in range(3):  # the first starts a sync, the others arrive while it runs
        log.append(log.partition(1), from_records([Record(b"." * 4000)]), level=Level.WRITTEN, done=None)
        log.commit()
    assert log.congested
    machine.process.until(lambda: not log.congested)
    assert machine.clock.monotonic() < 1.0
