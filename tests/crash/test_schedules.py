"""Random histories under random schedules: threads that finish in any order, full disks, kills, power losses.

Acknowledged writes survive, stored data is a prefix of the requests, and every start succeeds.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from polywire.errors import BrokerError, Busy, Missing
from polywire.log.base import Completion
from polywire.log.log import FileLog
from polywire.types import Level
from tests.crash.disk import JournalDisk
from tests.crash.test_full_start import full_disk
from tests.unit.log.rig import SMALL, batch_of
from tests.unit.log.schedule import ManualRig

NEVER = 2**62
STEPS = 300
SETTINGS = replace(SMALL, slot_bytes=48 * 1024, slot_count_min=2, slot_count_max=4, sync_interval_ms=60_000)


@dataclass
class Kept:
    """One partition: all requested records, how many were acknowledged as written and synced, and what was trimmed."""

    values: list[bytes] = field(default_factory=list)
    written: int = 0
    synced: int = 0
    first: int = 0


class Run:
    """One state. Invariant: ``partitions`` and ``changes`` are all requests so far, as far as they survived."""

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch, seed: int) -> None:
        self.chance = random.Random(seed)
        self.disk = JournalDisk(patch)
        self.full = ExitStack()
        self.rig = ManualRig(directory, patch, SETTINGS)
        self.directory = directory
        self.partitions: dict[int, Kept] = {}
        self.changes = Kept()
        self.tokens: dict[bytes, tuple[int, bytes]] = {}
        self.count = 0
        self.weights: list[float] = []
        self.mood()

    @property
    def log(self) -> FileLog:
        return self.rig.log

    def value(self) -> bytes:
        self.count += 1
        return b"%d:" % self.count + b"." * self.chance.choice((1, 50, 900, 4200))

    # Requests; each raises Busy if there is no capacity

    def open(self) -> None:
        incarnation = len(self.partitions) + 1
        self.log.open_partition(incarnation)
        self.partitions[incarnation] = Kept()

    def reported(self, kept: Kept, count: int, level: Level) -> Completion[object]:
        """Acknowledge; sometimes the callback appends and commits more."""

        def done(result: object | BrokerError) -> None:
            assert not isinstance(result, BrokerError), result
            kept.written = max(kept.written, count)
            if level is Level.SYNCED:
                kept.synced = max(kept.synced, count)
            if self.chance.random() < 0.2:
                with suppress(Busy):
                    self.append()
                    if self.chance.random() < 0.5:
                        self.log.commit()

        return done

    def append(self) -> None:
        which, kept = self.chance.choice(list(self.partitions.items()))
        level, value = self.chance.choice((Level.WRITTEN, Level.WRITTEN, Level.SYNCED)), self.value()
        done = self.reported(kept, len(kept.values) + 1, level)
        self.log.append(self.log.partition(which), batch_of([value]), level=level, done=done)
        kept.values.append(value)

    def change(self) -> None:
        value, kept = b"%d" % self.count, self.changes
        level = self.chance.choice((Level.WRITTEN, Level.SYNCED))
        self.log.change(value, level=level, done=self.reported(kept, len(kept.values) + 1, level))
        kept.values.append(value)
        self.rig.memory.apply(value)

    def stage(self) -> None:
        which, value, token = self.chance.choice(list(self.partitions)), self.value(), os.urandom(16)
        partition = self.log.partition(which)
        self.log.stage(token, partition, batch_of([value]), expires_at_us=NEVER, level=Level.WRITTEN, done=None)
        self.tokens[token] = (which, value)

    def publish(self) -> None:
        if not self.tokens:
            return
        token = self.chance.choice(list(self.tokens))
        which, value = self.tokens[token]
        kept, change = self.partitions[which], b"p%d" % self.count
        done = self.reported(kept, len(kept.values) + 1, Level.SYNCED)
        self.log.publish([token], change, level=Level.SYNCED, done=done)
        del self.tokens[token]
        kept.values.append(value)
        self.changes.values.append(change)
        self.rig.memory.apply(change)

    def trim(self) -> None:
        which, kept = self.chance.choice(list(self.partitions.items()))
        end = self.log.partition(which).next_offset
        first = max(kept.first, end if self.chance.random() < 0.5 else self.chance.randint(0, end))
        self.log.trim(which, first)
        kept.first = first

    # Faults

    def step(self) -> None:
        (act,) = self.chance.choices(list(ACTS), self.weights)
        with suppress(Busy):
            act(self)

    def mood(self) -> None:
        """Make some actions frequent and others rare from now on."""
        self.weights = [weight * self.chance.random() ** 3 for weight in ACTS.values()]

    def commit(self) -> None:
        self.log.commit()

    def pass_(self) -> None:
        self.rig.passes(1)

    def seal(self) -> None:
        self.work("seal")

    def sync(self) -> None:
        self.work("sync")

    def look_after(self) -> None:
        self.log._expire()

    def work(self, name: str) -> None:
        if self.rig.workers[name].jobs:
            self.rig.workers[name].step()

    def fill_disk(self) -> None:
        self.full.close()
        self.full.enter_context(full_disk())

    def free_disk(self) -> None:
        self.full.close()

    def crash(self) -> None:
        """Kill the broker or cut the power; acknowledged data is there, and nothing that was not requested."""
        powerless = self.chance.random() < 0.5
        self.rig.kill()
        if powerless:
            self.disk.lose_power(self.directory, self.chance if self.chance.random() < 0.8 else None)
        try:
            self.rig.open()
        except Busy:  # not even a start has capacity in slots this small
            self.free_disk()
            self.rig.open()
        self.survived(self.changes, self.rig.memory.changes, powerless)
        for which in list(self.partitions):
            kept = self.partitions[which]
            try:
                partition = self.log.partition(which)
            except Missing:
                assert not (kept.synced if powerless else kept.written)
                self.log.open_partition(which)
                self.partitions[which] = Kept()
                continue
            assert partition.first_offset <= kept.first
            kept.first = partition.first_offset
            found = [value for value in self.rig.read(partition, kept.first) if value is not None]
            self.survived(kept, [*kept.values[: kept.first], *found], powerless)
        self.tokens = {token: what for token, what in self.tokens.items() if self.is_staged(token)}

    def is_staged(self, token: bytes) -> bool:
        try:
            return bool(self.log.staged_partitions([token]))
        except Missing:
            return False

    def survived(self, kept: Kept, found: list[bytes], powerless: bool) -> None:
        assert found == kept.values[: len(found)]
        assert len(found) >= (kept.synced if powerless else kept.written)
        kept.values = list(found)
        kept.written = kept.synced = len(found)

    def check(self) -> None:
        """Assert that readers get everything written."""
        self.log.commit()
        for which, kept in list(self.partitions.items()):
            partition = self.log.partition(which)
            end = partition.next_offset
            found = self.rig.read(partition, partition.first_offset)
            assert found[: end - partition.first_offset] == kept.values[partition.first_offset : end]

    def end(self) -> None:
        self.free_disk()
        self.rig.loop.run_until(self.is_done)
        self.check()
        self.crash()
        self.rig.kill()

    def is_done(self) -> bool:
        self.rig.drain()
        return not self.log.sealing


ACTS: dict[Callable[[Run], None], float] = {
    Run.append: 12,
    Run.change: 3,
    Run.stage: 2,
    Run.publish: 3,
    Run.trim: 3,
    Run.commit: 8,
    Run.pass_: 8,
    Run.seal: 4,
    Run.sync: 4,
    Run.check: 0.5,
    Run.fill_disk: 0.4,
    Run.free_disk: 0.4,
    Run.look_after: 0.5,
}
"""Actions and their frequency."""


@pytest.mark.parametrize("seed", range(int(os.environ.get("POLYWIRE_SCHEDULES", "24"))))
def test_no_schedule_loses_acknowledged_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    run = Run(tmp_path, monkeypatch, seed)
    with run.full:
        run.open()
        run.open()
        for number in range(STEPS):
            run.step()
            if number % 60 == 59:
                run.crash()
                run.mood()
        run.end()
