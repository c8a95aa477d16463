"""Histories of power losses: real processes, and a disk that loses data that was not synced (``durable_disk``).

``python -m tests.histories.power_losses --count 100 --seed 7``. With ``durability = "synced"`` every promise must hold as
if the broker had only been killed. With ``--durability written``, producers request both levels. Records that were
acknowledged as synced must survive, and others may be lost from the end of the log only. With ``--impatient``
the broker does not wait for the disk, which the checkers must notice.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from functools import partial
from itertools import product
from pathlib import Path
from typing import Final

from polywire.testing import SLOT_MIB
from polywire.types import Level
from tests.broker_process import BrokerProcess
from tests.histories.checkers import (
    acknowledged_is_there,
    judge,
    nothing_comes_twice,
    nothing_is_invented,
    only_the_end_is_lost,
    partitions_are_ordered,
)
from tests.histories.clients import Producer, Url, read_everything
from tests.histories.durable_disk import DURABLE, IMPATIENT, lose_power, remember
from tests.histories.history import POWER_LOSS, Fault, History
from tests.histories.outside import judge_everything
from tests.histories.repeat import Histories, parser_of, repeat
from tests.histories.run import (
    COPY,
    GROUP,
    ONCE,
    PARTITIONS,
    TOPIC,
    WIRES,
    check_data,
    create,
    everybody,
    working,
)
from tests.ledger import Command
from tests.sim.chance import Chance

PART: Final = 25  # power losses of one history
EVENTS: Final = 100  # requests that are answered after a start, before a power loss
LATER_S: Final = (0.0, 0.5)
LOST: Final = ("lost sectors", "lost changes of directories")
SYNCED: Final = "synced"
WRITTEN: Final = "written"
MODULE: Final = "tests.histories.losing_broker"
CHECKERS_OF_WRITTEN: Final = (
    acknowledged_is_there,
    nothing_comes_twice,
    nothing_is_invented,
    partitions_are_ordered,
    only_the_end_is_lost,
)
"""The promises that also hold where readers may see records that are lost later."""


class Machine:
    """A broker whose machine loses power."""

    def __init__(self, folder: Path, seed: int, durability: str, *, is_impatient: bool) -> None:
        self._copy: Final = folder / "copy"
        self._chance: Final = Chance(seed)
        options = "--slot-mib", str(SLOT_MIB), "--durability", durability
        environment = {DURABLE: str(self._copy)}
        if is_impatient:
            environment |= {IMPATIENT: "1"}
        self.broker: Final = BrokerProcess(
            folder / "data", *options, wires=WIRES, module=MODULE, environment=environment
        )
        self.broker.data_dir.mkdir(mode=0o700)
        remember(self.broker.data_dir, self._copy)

    def lose_power(self) -> list[Fault]:
        """Kill the broker, take from its disk what was not synced, and start it. Return the events."""
        begun = time.monotonic_ns()
        self.broker.kill()
        ended = time.monotonic_ns()
        lost = lose_power(self.broker.data_dir, self._copy, self._chance)
        remember(self.broker.data_dir, self._copy)
        self.broker.start()
        names = [POWER_LOSS, *(name for name, number in zip(LOST, lost, strict=True) if number)]
        return [Fault(name, begun, ended) for name in names]


def producers(url: Url, history: History) -> list[Producer]:
    """Return producers whose acknowledged records survive a power loss, and others."""
    found = []
    for wire, level, size in product(("polywire", "kafka", "cursus"), (Level.WRITTEN, Level.SYNCED), (1, 7)):
        producer = Producer(f"{level.name}-{wire}-{size}", wire, url, history, topic=TOPIC, level=level, size=size)
        producer.is_durable = level is Level.SYNCED
        found.append(producer)
    return found


def run(folder: Path, *, seed: int, losses: int, durability: str = SYNCED, is_impatient: bool = False) -> History:
    """Make a history with that many power losses in an empty folder."""
    machine = Machine(folder, seed, durability, is_impatient=is_impatient)
    with machine.broker:
        history = asyncio.run(_run(machine, random.Random(seed), losses, is_synced=durability == SYNCED))
        assert machine.broker.stop() == 0, machine.broker.log_text()[-4000:]
    check_data(machine.broker.data_dir)
    return history


async def _run(machine: Machine, chance: random.Random, losses: int, *, is_synced: bool) -> History:
    history, url = History(), machine.broker.url
    clients = everybody(url, history) if is_synced else producers(url, history)
    topics = dict.fromkeys((TOPIC, ONCE, COPY), PARTITIONS)
    await create(topics, url)
    async with working(clients):
        for _ in range(losses):
            enough = len(history.events) + EVENTS
            while len(history.events) < enough:  # noqa: ASYNC110 - looking is the point
                await asyncio.sleep(0.01)
            await asyncio.sleep(chance.uniform(*LATER_S))
            history.events += await asyncio.to_thread(machine.lose_power)
    await read_everything(url("polywire"), topics, dict.fromkeys((GROUP, COPY), TOPIC), history)
    return history


def main() -> int:
    """Make histories until there were enough power losses, or one of them is wrong."""
    parser = parser_of("tests.histories.power_losses", __doc__)
    parser.add_argument("--count", type=int, default=PART, help="number of power losses")
    parser.add_argument("--durability", choices=(SYNCED, WRITTEN), default=SYNCED, help="of the broker")
    parser.add_argument("--impatient", action="store_true", help="acknowledge before the sync")
    given = parser.parse_args()
    part = PART if given.ledger else min(given.count, PART)
    words = f"--durability {given.durability}{' --impatient' if given.impatient else ''}"
    histories = Histories(
        Command(f"tests.histories.power_losses --count {part} {words}"),
        lambda folder, seed, _: run(
            folder, seed=seed, losses=part, durability=given.durability, is_impatient=given.impatient
        ),
        judge_everything if given.durability == SYNCED else partial(judge, checkers=CHECKERS_OF_WRITTEN),
    )
    return repeat(
        histories, seed=given.seed, is_enough=lambda totals: totals[POWER_LOSS] >= given.count, is_recorded=given.ledger
    )


if __name__ == "__main__":
    sys.exit(main())
