"""What a log is for its readers once a write has failed, until the process ends."""

from __future__ import annotations

from functools import partial

import pytest

from polywire.errors import BrokerError
from polywire.log.base import Ranges, Read
from polywire.log.log import FileLog
from polywire.records.columns import Record
from polywire.records.rows import from_records
from polywire.types import Level
from tests.sim.machine import Machine

TOKEN = b"t" * 16


def _append(log: FileLog, told: list[int | BrokerError | Ranges]) -> None:
    log.append(log.partition(1), from_records([Record(b"lost")]), level=Level.WRITTEN, done=told.append)


def _publish(log: FileLog, told: list[int | BrokerError | Ranges]) -> None:
    log.publish([TOKEN], b"change", level=Level.WRITTEN, done=told.append)


@pytest.mark.parametrize("ask", [_append, _publish])
def test_who_reads_behind_a_failed_write_finds_the_end(ask: object) -> None:
    machine = Machine()
    log = machine.open()
    log.open_partition(1)
    machine.append(log, b"kept")
    staged = partial(log.stage, TOKEN, log.partition(1), from_records([Record(b"lost")]), expires_at_us=2**62)
    staged(level=Level.WRITTEN, done=None)
    log.commit()
    told: list[int | BrokerError | Ranges] = []
    machine.process.files.faults.rates["write"] = 1.0
    assert callable(ask)
    ask(log, told)
    machine.process.until(lambda: told)
    assert isinstance(told[0], BrokerError)
    partition = log.partition(1)
    assert partition.next_offset == 1
    found = partition.read(1, bytes_max=1000, then=lambda _: None)
    assert isinstance(found, Read)
    assert not found.chunks
