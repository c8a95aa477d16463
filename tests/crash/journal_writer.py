"""A process that writes to a log until it is killed, and prints what was acknowledged.

Lines: ``w <partition> <first offset> <number> <count>`` or ``s …`` for ``synced``, ``c <number>`` for a change, and ``p
<partition> <first offset> <number> <count>`` for a published stage. Values are ``<partition>:<number>``; numbers are
consecutive in each partition.
"""

from __future__ import annotations

import os
import random
import sys
from contextlib import suppress
from pathlib import Path

from polywire.errors import BrokerError, Busy
from polywire.log.base import Completion
from polywire.log.partition.partition import FilePartition
from polywire.types import Level
from tests.unit.log.rig import SMALL, Rig, batch_of

PARTITIONS = 3
PUBLISHED = b"published"


class Writer:
    """Appends, stages and changes at random. Invariant: ``numbers`` and ``changes`` count what the log accepted."""

    def __init__(self, rig: Rig, chosen: random.Random) -> None:
        self.rig = rig
        self.chosen = chosen
        self.partitions = [find_or_open(rig, incarnation) for incarnation in range(1, PARTITIONS + 1)]
        self.numbers = [partition.next_offset for partition in self.partitions]
        self.changes = sum(change != PUBLISHED for change in rig.memory.changes)

    def write(self) -> None:
        """Make one or two random writes. Raises Busy."""
        which = self.chosen.randrange(PARTITIONS)
        partition, number = self.partitions[which], self.numbers[which]
        count = self.chosen.choice((1, 1, 1, 3, 40))
        values = [b"%d:%d" % (which, number + index) for index in range(count)]
        if self.chosen.random() < 0.05:
            stage(self.rig, partition, values, which, number)
        else:
            level = self.chosen.choice((Level.WRITTEN, Level.WRITTEN, Level.SYNCED))
            done = tell(f"{'s' if level is Level.SYNCED else 'w'} {which}", number, count)
            self.rig.log.append(partition, batch_of(values), level=level, done=done)
        self.numbers[which] += count
        if self.chosen.random() < 0.2:
            self.rig.log.change(b"%d" % self.changes, level=Level.WRITTEN, done=tell_change(self.changes))
            self.rig.memory.apply(b"%d" % self.changes)
            self.changes += 1


def main(directory: Path, seed: int) -> None:
    chosen = random.Random(seed)
    rig = Rig(directory, SMALL)
    writer = Writer(rig, chosen)
    print("ready", flush=True)
    while True:
        with suppress(Busy):
            for _ in range(chosen.randrange(1, 12)):
                writer.write()
        rig.loop.run_pass(0.001 if chosen.random() < 0.3 or rig.log.congested else 0.0)


def find_or_open(rig: Rig, incarnation: int) -> FilePartition:
    try:
        return rig.log.partition(incarnation)
    except BrokerError:
        return rig.log.open_partition(incarnation)


def stage(rig: Rig, partition: FilePartition, values: list[bytes], which: int, number: int) -> None:
    """Stage two batches and publish them at once."""
    token = os.urandom(16)
    half = len(values) // 2
    for part in (values[:half], values[half:]):
        if part:
            rig.log.stage(token, partition, batch_of(part), expires_at_us=2**62, level=Level.WRITTEN, done=None)

    def done(ranges: object | BrokerError) -> None:
        assert not isinstance(ranges, BrokerError), ranges
        print(f"p {which} {ranges[0][1]} {number} {len(values)}", flush=True)  # type: ignore[index]

    rig.log.publish([token], PUBLISHED, level=Level.SYNCED, done=done)
    rig.memory.apply(PUBLISHED)


def tell(what: str, number: int, count: int) -> Completion[int]:
    def done(offset: int | BrokerError) -> None:
        assert not isinstance(offset, BrokerError), offset
        print(f"{what} {offset} {number} {count}", flush=True)

    return done


def tell_change(number: int) -> Completion[int]:
    def done(result: int | BrokerError) -> None:
        assert not isinstance(result, BrokerError), result
        print(f"c {number}", flush=True)

    return done


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
