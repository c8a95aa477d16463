"""Consume a topic in a group until no record arrives for a second: ``python examples/client_consume.py [url]``."""

from __future__ import annotations

import asyncio
import sys

import polywire


async def main(url: str) -> None:
    async with (
        polywire.connect(url) as client,
        client.consumer("orders", group="billing", start="earliest", auto_commit=False) as consumer,
    ):
        while records := await consumer.batch(timeout_s=1):
            first = records[0]
            print(f"{len(records)} records of partition {first.partition} from offset {first.offset}: {first.text!r}")
            await consumer.commit()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:9555"))
