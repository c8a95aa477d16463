"""Fixtures for pytest, available wherever Polywire is installed.

* ``polywire_broker`` is a broker in memory with every protocol, shared by all tests of a run.
* ``polywire_client`` and ``polywire_async_client`` are clients of this broker.
* ``polywire_topic`` is the name of an empty topic for one test.
* ``polywire_fresh_broker`` is a broker for one test, which may break it.

Polywire is imported only when a test uses a fixture.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from polywire.client.blocking import SyncClient
    from polywire.client.client import Client
    from polywire.testing.thread import BrokerThread


def pytest_configure(config: pytest.Config) -> None:
    """Add ``polywire_async_client``, for pytest-asyncio if it is installed, else for the plugin of anyio.

    It is not imported with this module, because pytest could then not rewrite its assertions.
    """
    fixture = import_module("pytest_asyncio").fixture if config.pluginmanager.hasplugin("asyncio") else pytest.fixture
    plugin = ModuleType("polywire_async_fixtures")
    plugin.polywire_async_client = fixture(name="polywire_async_client")(_async_client)  # type: ignore[attr-defined]
    config.pluginmanager.register(plugin)


@pytest.fixture(scope="session")
def polywire_broker() -> Iterator[BrokerThread]:
    """A broker in memory, on free ports: ``polywire_broker.url("kafka")``, ``polywire_broker.addresses["iggy"]``."""
    from polywire.testing import broker

    with broker() as running:
        yield running


@pytest.fixture
def polywire_client(polywire_broker: BrokerThread) -> Iterator[SyncClient]:
    """A client of the broker, made by ``polywire.connect_sync``."""
    from polywire.client.blocking import connect_sync

    with connect_sync(polywire_broker.url()) as client:
        yield client


async def _async_client(polywire_broker: BrokerThread) -> AsyncIterator[Client]:
    """A client of the broker, made by ``polywire.connect``. Needs pytest-asyncio, or tests with ``pytest.mark.anyio``."""
    from polywire.client.client import connect

    async with connect(polywire_broker.url()) as client:
        yield client


@pytest.fixture
def polywire_fresh_broker() -> Iterator[BrokerThread]:
    """A broker in memory for one test: advance its time, or cause faults."""
    from polywire.testing import broker

    with broker() as running:
        yield running


@pytest.fixture
def polywire_topic(polywire_client: SyncClient) -> Iterator[str]:
    """An empty topic of three partitions, deleted after the test."""
    topic = f"test-{secrets.token_hex(6)}"
    polywire_client.create_topic(topic, 3)
    yield topic
    if any(found.name == topic for found in polywire_client.topics()):
        polywire_client.delete_topic(topic)
