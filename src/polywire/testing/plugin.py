"""Fixtures for pytest, there wherever Polywire is installed.

``polywire_broker`` is a broker in memory that speaks every wire, one for the whole run; ``polywire_client`` is its client, ``polywire_topic``
the name of a topic of the test's own.

Promises: nothing of Polywire is loaded before a test asks for a fixture. Must not know: what is tested.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from polywire.client.twin import SyncClient
    from polywire.testing import RunningBroker


@pytest.fixture(scope="session")
def polywire_broker() -> Iterator[RunningBroker]:
    """A broker in memory, on free ports: ``polywire_broker.url("kafka")``, ``polywire_broker.addresses["iggy"]``."""
    from polywire.testing import broker

    with broker() as running:
        yield running


@pytest.fixture
def polywire_client(polywire_broker: RunningBroker) -> Iterator[SyncClient]:
    """A client of the broker, as ``polywire.connect_sync`` makes it."""
    from polywire.client.twin import connect_sync

    with connect_sync(polywire_broker.url()) as client:
        yield client


@pytest.fixture
def polywire_topic(polywire_client: SyncClient) -> Iterator[str]:
    """A topic of three partitions with nothing in it, which is deleted behind the test."""
    topic = f"test-{secrets.token_hex(6)}"
    polywire_client.create_topic(topic, 3)
    yield topic
    if any(found.name == topic for found in polywire_client.topics()):
        polywire_client.delete_topic(topic)
