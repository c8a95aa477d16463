"""Hours without a fault: one broker, the clients of all histories, and the same checkers.

``python -m tests.histories.healthy --seconds 3600``. The broker runs all the time. Each part is a history of its own, with new
topics, so that it can be judged. In addition to the checkers:

* Each request is acknowledged: there is no reason to refuse one, or to lose a response.
* The broker logs no error, and ``polywire doctor`` finds nothing at the end.
* The broker's memory after the last part is that after the first ones, once it has freed what it does not use.
"""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final

from polywire.client.connect import connect
from polywire.testing import SLOT_MIB
from tests.broker_process import BrokerProcess
from tests.histories.clients import read_everything
from tests.histories.driven import Copier
from tests.histories.history import History, Outcome, Produce
from tests.histories.outside import judge_everything, judges
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
    strangers,
    working,
)
from tests.ledger import Command

PART_S: Final = 240.0  # of one history, which is kept in memory
PAUSE_S: Final = 0.2  # between two requests of a client
REST_S: Final = 45.0  # until the broker has freed memory that it does not use
SETTLE_PARTS: Final = 3  # parts until buffers and caches have their usual sizes
MEMORY_MB_MAX: Final = 16.0  # growth of the process's own memory after these parts


class Healthy:
    """A broker without faults, and its memory after each part."""

    def __init__(self, broker: BrokerProcess, part_s: float) -> None:
        self.memory_mb: Final = list[float]()
        self._broker: Final = broker
        self._part_s: Final = part_s

    def make(self, _folder: Path, _seed: int, _running: ExitStack) -> History:
        """Return the history of one part."""
        history = asyncio.run(self._work())
        time.sleep(REST_S)
        self.memory_mb.append(self._broker.memory_bytes / 1e6)
        print(f"memory_mb={self.memory_mb[-1]:.1f}", flush=True)
        return history

    async def _work(self) -> History:
        history, url = History(), self._broker.url
        driven = strangers(url, history)
        copies = [COPY, *(client.name for client in driven if isinstance(client, Copier))]
        topics = dict.fromkeys((TOPIC, ONCE, *copies), PARTITIONS)
        await create(topics, url)
        async with working([*everybody(url, history, PAUSE_S), *driven]):
            await asyncio.sleep(self._part_s)
        await read_everything(url("polywire"), topics, dict.fromkeys((GROUP, *copies), TOPIC), history)
        client = await connect(url("polywire"))
        for topic in topics:
            await client.delete_topic(topic)
        await client.close()
        return history

    def wrong(self) -> list[str]:
        """Return what is wrong with the broker after all parts. It must still be running, and is stopped."""
        log = self._broker.log_text()
        wrong = [line for line in log.splitlines() if "level=error" in line or "Traceback" in line]
        usual, last = median(self.memory_mb[:SETTLE_PARTS]), self.memory_mb[-1]
        if last > usual + MEMORY_MB_MAX:
            wrong.append(f"memory grew from {usual:.1f} to {last:.1f} MB")
        if self._broker.stop():
            wrong.append("the broker did not end properly")
        check_data(self._broker.data_dir)
        return wrong


def _broker(folder: Path) -> BrokerProcess:
    """Return a broker with small journal files, so that the first parts already fill one."""
    return BrokerProcess(folder / "data", "--slot-mib", str(SLOT_MIB), wires=WIRES)


def judge_healthy(history: History) -> list[str]:
    """Return what all checkers find, and the requests that were not acknowledged."""
    return judge_everything(history) + [
        f"{produce.who}: {produce.outcome.value} without a fault"
        for produce in history.of(Produce)
        if _is_lost(produce)
    ]


def _is_lost(produce: Produce) -> bool:
    return produce.outcome is not Outcome.DONE


def main() -> int:
    """Make and judge parts until the time is up, and then judge the broker."""
    parser = parser_of("tests.histories.healthy", __doc__)
    parser.add_argument("--seconds", type=float, default=3600.0, help="how long clients work, in all")
    given = parser.parse_args()
    part_s = PART_S if given.ledger else min(given.seconds, PART_S)
    print(f"judges: {', '.join(judges())}")
    with TemporaryDirectory() as folder, _broker(Path(folder)) as broker:
        healthy, end = Healthy(broker, part_s), time.monotonic() + given.seconds
        histories = Histories(Command(f"tests.histories.healthy --seconds {part_s:.0f}"), healthy.make, judge_healthy)
        code = repeat(
            histories,
            seed=given.seed,
            is_enough=lambda _: time.monotonic() >= end,
            is_recorded=given.ledger,
        )
        wrong = healthy.wrong()
    print("\n".join(wrong))
    return 1 if wrong else code


if __name__ == "__main__":
    sys.exit(main())
