"""Histories of transactions: a broker that is killed while clients of several libraries copy a topic in transactions.

``python -m tests.histories.transactions --count 100 --seed 7``. Each client has a transactional id, writes to several
partitions, and commits the offsets of what it read. They are librdkafka (confluent-kafka), kafka-python and aiokafka
where ``POLYWIRE_KAFKA_CLIENTS`` is given, Kafka's own client where ``POLYWIRE_KAFKA_JAVA`` is, and always
``polywire.Client`` and one over this project's codec of Kafka. The broker is killed with ``kill -9`` while one of them
has an open transaction or commits it.

The report counts the kills at which a transaction was open, by client.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from polywire.testing import SLOT_MIB
from polywire.types import Level
from tests.broker_process import BrokerProcess
from tests.histories.clients import Producer, Reader, read_everything
from tests.histories.driven import Copier, Driven, drivers
from tests.histories.history import Fault, History, Outcome, Transaction
from tests.histories.kafka_clients import Transformer
from tests.histories.repeat import Histories, parser_of, repeat
from tests.histories.run import COPY, PARTITIONS, TOPIC, check_data, copiers, create, working
from tests.ledger import Command

PART: Final = 40  # kills of one history
COMMITTED: Final = 2  # clients that have committed since the start of the broker, when the next kill becomes due
COMMITTED_S: Final = 60.0  # until then
OPEN_S: Final = 3.0  # until the next transaction of a client, otherwise the broker is killed without
LATER_S: Final = (0.0, 0.02)  # from the beginning of a transaction; a commit takes less
KILL: Final = "kill -9"
OPEN: Final = "kill in a transaction"
WIRES: Final = ("polywire", "kafka")


def run(folder: Path, *, seed: int, kills: int) -> History:
    """Make a history with that many kills in an empty folder."""
    with BrokerProcess(folder / "data", "--slot-mib", str(SLOT_MIB), wires=WIRES) as broker:
        history = asyncio.run(_run(broker, random.Random(seed), kills))
        assert broker.stop() == 0, broker.log_text()[-4000:]
    check_data(broker.data_dir)
    return history


async def _run(broker: BrokerProcess, chance: random.Random, kills: int) -> History:
    history, url = History(), broker.url
    driven = copiers(url, history, drivers())
    writers = [client for client in driven if isinstance(client, Copier)]
    copies = [COPY, *(client.name for client in writers)]
    clients: list[Producer | Reader | Transformer | Driven] = [
        *driven,
        Transformer(COPY, url, history, source=TOPIC, target=COPY, partitions=PARTITIONS),
        Reader("r", "polywire", url, history, topic=COPY, partitions=PARTITIONS),
        Producer("p-kafka", "kafka", url, history, topic=TOPIC, level=Level.SYNCED, size=9),
        Producer("p-polywire", "polywire", url, history, topic=TOPIC, level=Level.WRITTEN, size=3),
    ]
    topics = dict.fromkeys((TOPIC, *copies), PARTITIONS)
    await create(topics, url)
    async with working(clients):
        for _ in range(kills):
            await _committed(history, min(COMMITTED, len(copies)))
            is_ending = chance.choice((True, False))
            if writers:
                await _open(chance.choice(writers), is_ending=is_ending)
            await asyncio.sleep(0 if is_ending else chance.uniform(*LATER_S))
            begun = time.monotonic_ns()
            await asyncio.to_thread(broker.kill)
            history.events.append(Fault(KILL, begun, time.monotonic_ns()))
            await asyncio.to_thread(broker.start)
    await read_everything(url("polywire"), topics, dict.fromkeys(copies, TOPIC), history)
    history.events += open_at_kills(history)
    return history


async def _committed(history: History, clients: int) -> None:
    """Wait until that many clients have committed a transaction from now on."""
    at, found = len(history.events), set[str]()
    async with asyncio.timeout(COMMITTED_S):
        while len(found) < clients:
            await asyncio.sleep(0.02)
            new, at = history.events[at:], len(history.events)
            found |= {event.who for event in new if isinstance(event, Transaction) and event.outcome is Outcome.DONE}


async def _open(client: Copier, *, is_ending: bool) -> None:
    """Wait until a client has an open transaction, or requests its commit, but not for long."""
    with suppress(TimeoutError):
        async with asyncio.timeout(OPEN_S):
            while not client.is_open(is_ending=is_ending):  # noqa: ASYNC110 - looking is the point
                await asyncio.sleep(0.001)


def open_at_kills(history: History) -> Sequence[Fault]:
    """Return an event for each kill at which a transaction was open, and one for each client that had one."""
    found: list[Fault] = []
    transactions = list(history.of(Transaction))
    for kill in [fault for fault in history.of(Fault) if fault.who == KILL]:
        clients = {one.who for one in transactions if one.begun < kill.begun < one.ended}
        names = [OPEN] if clients else []
        found += [
            Fault(name, kill.begun, kill.ended) for name in (*names, *(f"{OPEN} of {who}" for who in sorted(clients)))
        ]
    return found


def main() -> int:
    """Make histories until there were enough kills, or one of them is wrong."""
    parser = parser_of("tests.histories.transactions", __doc__)
    parser.add_argument("--count", type=int, default=100, help="number of kills")
    given = parser.parse_args()
    part = PART if given.ledger else min(given.count, PART)
    libraries = ", ".join(drivers())
    histories = Histories(
        Command(f"tests.histories.transactions --count {part}", libraries),
        lambda folder, seed, _: run(folder, seed=seed, kills=part),
    )
    return repeat(
        histories, seed=given.seed, is_enough=lambda totals: totals[KILL] >= given.count, is_recorded=given.ledger
    )


if __name__ == "__main__":
    sys.exit(main())
