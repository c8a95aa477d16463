"""A full disk: writes are refused with the reason; reads, commits and deletions work, and deletions free space."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog

from polywire.broker.broker import Broker
from polywire.broker.settings import BrokerSettings
from polywire.clock import SystemClock
from polywire.errors import BrokerError, Busy, ErrorCode
from polywire.log.base import NO_OFFSET, Read
from polywire.log.log import FileLog
from polywire.types import Level, PositionKind, TopicName
from tests.unit.log.rig import SMALL, RigLoop, batch_of

FULL_AFTER_BYTES = 1 << 20
LEVEL = Level.WRITTEN
SETTINGS = replace(SMALL, disk_reserve_bytes=FULL_AFTER_BYTES // 4)


class SmallDisk:
    """Replaces ``os.statvfs``: what the directory holds is all the space there is."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._base = self._used()

    def __call__(self, _: object) -> Any:
        class Space:
            f_bavail = max(0, FULL_AFTER_BYTES - (self._used() - self._base))
            f_frsize = 1

        return Space

    def _used(self) -> int:
        return sum(file.stat().st_size for file in self._directory.rglob("*") if file.is_file())


def test_deletions_work_on_a_full_disk_and_free_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = RigLoop()
    broker = Broker.open(tmp_path / "data", BrokerSettings(), loop, SystemClock(), log_settings=SETTINGS)
    monkeypatch.setattr(os, "statvfs", SmallDisk(tmp_path))
    topic = broker.create_topic(TopicName("default", "full"), 1)
    with structlog.testing.capture_logs() as logged:
        refused = _fill(broker, loop, "full")
    assert refused.code is ErrorCode.DISK_FULL
    [reported_of] = [
        line for line in logged if line["event"].startswith("the disk is full: the broker rejects records")
    ]
    assert reported_of["free_bytes"] < reported_of["kept_free_bytes"] == SETTINGS.disk_reserve_bytes
    found: list[Read | BrokerError] = []
    read = broker.fetch(topic.partitions[0], 0, bytes_max=1000, then=found.append)
    loop.run_until(lambda: isinstance(read, Read) or found)
    broker.commit_position("full", 0, PositionKind.GROUP, "g", 1)
    with pytest.raises(Busy):
        broker.create_topic(TopicName("default", "more"))
    reported: list[int | BrokerError] = []
    broker.delete_topic(topic, done=reported.append)
    loop.run_until(lambda: reported)
    assert reported == [NO_OFFSET]
    with structlog.testing.capture_logs() as logged:
        loop.run_until(lambda: _has_room(broker))
    assert [line["log_level"] for line in logged if line["event"].startswith("the disk has free space again")] == [
        "info"
    ]
    broker.close()


def _fill(broker: Broker, loop: RigLoop, name: str) -> BrokerError:
    """Produce until the disk is full."""
    partition = broker.topic(name).partitions[0]
    for _ in range(100_000):
        try:
            broker.produce(partition, batch_of([b"x" * 4000]), level=Level.WRITTEN, done=None)
        except Busy as error:
            if error.code is ErrorCode.DISK_FULL:
                return error
        loop.run_pass(0.001)
    raise AssertionError("the disk is never full")


def _has_room(broker: Broker) -> bool:
    try:
        broker.create_topic(TopicName("default", "again"))
    except Busy:
        return False
    return True


def test_removals_have_space_after_commits_have_used_up_theirs(tmp_path: Path) -> None:
    loop = RigLoop()
    broker = Broker.open(tmp_path / "data", BrokerSettings(), loop, SystemClock(), log_settings=SETTINGS)
    for name in ("deleted", "purged", "trimmed"):
        broker.produce(
            broker.create_topic(TopicName("default", name), 1).partitions[0], batch_of([b"x"]), level=LEVEL, done=None
        )
    broker.commit()
    log = broker._log
    assert isinstance(log, FileLog)
    log._sealer._stopped = True  # as when no segment finds space on the disk
    _commit_until_refused(broker)
    reported: list[int | BrokerError] = []
    broker.delete_topic(broker.topic("deleted"), done=reported.append)
    broker.purge_topic(broker.topic("purged"), done=reported.append)
    partition = broker.topic("trimmed").partitions[0]
    log.trim(partition.incarnation, 1)
    broker.commit()
    assert partition.log.first_offset == 1
    with pytest.raises(Busy):
        broker.commit_position("purged", 0, PositionKind.GROUP, "g", 1)
    loop.run_until(lambda: len(reported) == 2)
    assert reported == [NO_OFFSET, NO_OFFSET]
    assert log.has_capacity(1), "and the sealer has its own reserve"
    broker.close()


def _commit_until_refused(broker: Broker) -> None:
    for number in range(1_000_000):
        try:
            broker.commit_position("purged", 0, PositionKind.GROUP, "g", number)
        except Busy:
            return
        broker.commit()
    raise AssertionError("there is always room")
