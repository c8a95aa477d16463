"""A producer of the soak: numbered records over one protocol into one topic, each once, through kills of the broker.

It is the only writer of its topic, which has one partition: after a lost connection the partition's end gives the next
number. The `polywire` protocol sends whole batches made by Arrow, the others records.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc

from polywire.client import bulk, sync
from polywire.client.arrow import arrow_to_batches
from polywire.errors import BrokerError, Retry
from polywire.records.columns import Record

BATCH = 20_000
REQUEST = 2_000  # records of one request on protocols that send them one by one
PAUSE_S = 0.1
GIVE_UP_S = 120.0


def values(wire: str, first: int, count: int) -> pa.Array[Any]:
    """Return the records' values: the protocol and the number, which is their future offset."""
    numbers = pa.array(range(first, first + count)).cast(pa.string())
    before, after = pa.scalar(f'{{"w":"{wire}","n":'), pa.scalar("}")
    joined: Any = pc.binary_join_element_wise(before, numbers, after, pa.scalar(""))  # type: ignore[call-overload]
    return cast("pa.Array[Any]", joined.cast(pa.binary()))


def sender(wire: str, url: str, topic: str) -> Callable[[int, int], None]:
    """Return a function that appends ``count`` records from number ``first`` on."""
    if wire == "polywire":
        connection = bulk.connect(url)
        return lambda first, count: _send_batches(connection, topic, first, count)
    client = sync.connect(url)

    def send(first: int, count: int) -> None:
        records = [Record(value=value) for value in values(wire, first, count).to_pylist()]
        for at in range(0, count, REQUEST):
            client.produce(topic, records[at : at + REQUEST])

    return send


def _send_batches(connection: bulk.BulkConnection, topic: str, first: int, count: int) -> None:
    connection.produce(topic, 0, arrow_to_batches(pa.record_batch({"value": values("polywire", first, count)})))


def produce(wire: str, url: str, address: str, topic: str, total: int, seconds: float) -> None:
    """Send until ``total`` records are stored, spread over ``seconds`` (0: as fast as possible)."""
    send: Callable[[int, int], None] | None = None
    began = lost_at = time.monotonic()
    done = 0
    while done < total:
        try:
            send = send or sender(wire, url, topic)
            count = min(BATCH, total - done)
            send(done, count)
            done, lost_at = done + count, time.monotonic()
            time.sleep(max(0.0, began + seconds * done / total - lost_at))
        except (BrokerError, OSError) as error:
            refused = isinstance(error, BrokerError) and error.retry is Retry.NEVER
            if refused or time.monotonic() > lost_at + GIVE_UP_S:
                raise
            time.sleep(PAUSE_S)
            send = None
            done = bulk.connect(address).bounds([topic])[0].next_offset


if __name__ == "__main__":
    _, own_wire, own_url, own_address, own_topic, own_total, own_seconds = sys.argv
    produce(own_wire, own_url, own_address, own_topic, int(own_total), float(own_seconds))
