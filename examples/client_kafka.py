"""Write over one wire, read over another: ``python examples/client_kafka.py [kafka url] [polywire url]``."""

from __future__ import annotations

import asyncio
import sys

import polywire


async def main(kafka: str, own: str) -> None:
    async with polywire.connect(kafka) as client:
        await client.send("notes", "written by a client of Kafka's wire", key="a")
    async with polywire.connect(own) as client, client.consumer("notes") as consumer:
        async for record in consumer:
            print(record.key, record.text)
            break


if __name__ == "__main__":
    given = dict(enumerate(sys.argv))
    asyncio.run(main(given.get(1, "kafka://127.0.0.1:9094"), given.get(2, "127.0.0.1:9555")))
