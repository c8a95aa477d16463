"""Test an application with a broker in memory: ``python examples/client_testing.py``, or with pytest."""

from __future__ import annotations

import polywire
from polywire.testing import broker


def count_words(url: str) -> int:
    """Return the number of words in a topic: the application under test."""
    with polywire.connect_sync(url) as client, client.consumer("lines") as consumer:
        return sum(len(record.text.split()) for record in consumer.batch(timeout_s=5))


def test_words_are_counted() -> None:
    with broker() as running:
        with polywire.connect_sync(running.url()) as client:
            client.send("lines", "to be or not to be")
        assert count_words(running.url()) == 6


if __name__ == "__main__":
    test_words_are_counted()
    print("passed")
