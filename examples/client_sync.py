"""Produce and consume without asyncio: ``python examples/client_sync.py [url]``."""

from __future__ import annotations

import sys

import polywire


def main(url: str) -> None:
    with polywire.connect_sync(url) as client:
        with client.producer() as producer:
            producer.send_many("orders", ["one", "two", "three"])
        with client.consumer("orders", group="shipping") as consumer:
            while records := consumer.batch(timeout_s=1):
                print([record.text for record in records])


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:9555")
