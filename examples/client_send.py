"""Send records and print the offsets they got: ``python examples/client_send.py [url]``."""

from __future__ import annotations

import asyncio
import sys

import polywire


async def main(url: str) -> None:
    async with polywire.connect(url) as client:
        stored = await client.send("orders", "hello", key="a", headers={"source": "web"})
        print(f"stored in partition {stored.partition} at offset {stored.offset}")
        async with client.producer(linger_ms=20) as producer:
            receipts = [await producer.send("orders", f"order {n}", key=f"customer {n % 3}") for n in range(100)]
            await producer.send_many("orders", [f"more {n}" for n in range(1000)])
        print(f"the last of {len(receipts)} went to {await receipts[-1]}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:9555"))
