"""A process that copies records in transactions of the Python client: from ``in`` to ``out``, with a second one to ``log``.

Start it with the broker's URL. It writes a line for each commit, and for the error that ended it.
"""

from __future__ import annotations

import asyncio
import sys

import polywire
from polywire.errors import BrokerError, Conflict, ErrorCode

GROUP = "copiers"
ID = "copier"
AT_ONCE = 7
FENCED = "fenced"


async def copy(url: str) -> None:
    async with polywire.connect(url, reconnect_s=300) as client:
        options = {"group": GROUP, "member": "copier", "auto_commit": False}
        async with client.consumer("in", **options, reconnect_s=300.0) as consumer:  # type: ignore[arg-type]
            while True:
                await copy_some(client, consumer)


async def copy_some(client: polywire.Client, consumer: polywire.Consumer) -> None:
    try:
        async with client.transaction(ID, consumer=consumer, timeout_s=300) as transaction:
            for record in await consumer.batch(AT_ONCE, timeout_s=1):
                await transaction.send("out", record.value, key=record.value)
                await transaction.send("log", record.value, partition=0)
        print("committed", flush=True)
    except Conflict as error:
        if error.code is ErrorCode.PRODUCER_FENCED:
            raise


if __name__ == "__main__":
    try:
        asyncio.run(copy(sys.argv[1]))
    except BrokerError as error:
        print(FENCED if error.code is ErrorCode.PRODUCER_FENCED else f"{error.code} {error.message}", flush=True)
