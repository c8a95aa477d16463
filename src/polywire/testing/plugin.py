"""Fixtures for pytest, available wherever Polywire is installed.

* ``polywire_broker`` is a broker in memory with every protocol, shared by all tests of a run.
* ``polywire_client`` is a client of this broker.
* ``polywire_topic`` is the name of an empty topic for one test.

Polywire is imported only when a test uses a fixture.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from polywire.client.blocking import SyncClient
    from polywire.testing import RunningBroker


@pytest.fixture(scope="session")
def polywire_broker() -> Iterator[RunningBroker]:
    """A broker in memory, on free ports: ``polywire_broker.url("kafka")``, ``polywire_broker.addresses["iggy"]``."""
    from polywire.testing import broker

    with broker() as running:
        yield running


@pytest.fixture
def polywire_client(polywire_broker: RunningBroker) -> Iterator[SyncClient]:
    """A client of the broker, made by ``polywire.connect_sync``."""
    from polywire.client.blocking import connect_sync

    with connect_sync(polywire_broker.url()) as client:
        yield client


@pytest.fixture
def polywire_topic(polywire_client: SyncClient) -> Iterator[str]:
    """An empty topic of three partitions, deleted after the test."""
    topic = f"test-{secrets.token_hex(6)}"
    polywire_client.create_topic(topic, 3)
    yield topic
    if any(found.name == topic for found in polywire_client.topics()):
        polywire_client.delete_topic(topic)
