"""``kill -9`` of a real broker during redrives: each dead letter arrives once, in its original partition.

Killed redrives send no response, and the client repeats them.
"""

from __future__ import annotations

import asyncio
import json
from http.client import HTTPConnection
from pathlib import Path
from select import select
from typing import Any, Final

from polywire.client.connect import connect
from polywire.client.polywire import PolywireClient
from polywire.http.dead_letters import LETTERS_MAX
from polywire.records.columns import Header, Record
from tests.broker_process import BrokerProcess

LETTERS: Final = 6 * LETTERS_MAX
PARTITIONS: Final = 3
WAITS_S: Final = (
    0.001,
    0.01,
    0.1,
)  # time until the broker is killed: before the redrive, during it, or perhaps after it
DEAD: Final = "orders.dead"
REDRIVE: Final = f"/api/v1/topics/{DEAD}/redrive"
HEADERS: Final = {"X-Polywire": "1", "Content-Type": "application/json"}


def letter(number: int) -> Record:
    """Return a dead letter as ``refine`` writes it."""
    said = {"topic": "orders", "partition": str(number % PARTITIONS), "reason": "malformed"}
    return Record(b"%d" % number, None, tuple(Header(f"dead.{key}".encode(), said[key].encode()) for key in said))


async def fill(broker: BrokerProcess) -> None:
    client = await connect(broker.url())
    await client.create_topic("orders", PARTITIONS)
    await client.create_topic(DEAD, 1)
    await client.produce(DEAD, [letter(number) for number in range(LETTERS)], partition=0)
    await client.close()


async def arrived(broker: BrokerProcess) -> list[list[int]]:
    client = await connect(broker.url())
    assert isinstance(client, PolywireClient)
    found = []
    for part in await client.bounds("orders"):
        values: list[int] = []
        while records := await client.fetch("orders", part.partition, len(values)):
            assert not any(record.headers for record in records), "the headers of the dead letter"
            values += [int(record.value or b"-1") for record in records]
        found.append(values)
    left = await client.transactions()
    assert len(left) <= len(WAITS_S), "an interrupted redrive leaves at most its transactional id"
    await client.close()
    return found


def asked(broker: BrokerProcess) -> HTTPConnection:
    """Return a connection over which a redrive was requested."""
    connection = HTTPConnection(*broker.addresses["http"], timeout=60)
    connection.request("POST", REDRIVE, json.dumps({"topics": ["orders"]}), HEADERS)
    return connection


def redriven(broker: BrokerProcess) -> Any:
    connection = asked(broker)
    try:
        answer = connection.getresponse()
        body = answer.read()
        assert answer.status == 200, body
        return json.loads(body)
    finally:
        connection.close()


def test_letters_arrive_once(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data", "--slot-mib", "17", wires=["polywire", "http"]) as broker:
        asyncio.run(fill(broker))
        for wait_s in WAITS_S:
            connection = asked(broker)
            select([connection.sock], [], [], wait_s)
            broker.kill()
            connection.close()
            broker.start()
        letters = [redriven(broker)["letters"] for _ in range(LETTERS // LETTERS_MAX + 1)]
        assert (letters[0], letters[-1]) == (LETTERS_MAX, 0)
        expected = [list(range(first, LETTERS, PARTITIONS)) for first in range(PARTITIONS)]
        assert asyncio.run(arrived(broker)) == expected
