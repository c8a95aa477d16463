"""Write over one protocol, read over another: ``python examples/client_kafka.py [kafka url] [polywire url]``."""

from __future__ import annotations

import asyncio
import sys

import polywire


async def main(kafka: str, native: str) -> None:
    async with polywire.connect(kafka) as client:
        await client.send("notes", "written over the Kafka protocol", key="a")
    async with polywire.connect(native) as client, client.consumer("notes") as consumer:
        async for record in consumer:
            print(record.key, record.text)
            break


if __name__ == "__main__":
    arguments = dict(enumerate(sys.argv))
    asyncio.run(main(arguments.get(1, "kafka://127.0.0.1:9094"), arguments.get(2, "127.0.0.1:9555")))
