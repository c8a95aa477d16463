"""Fixtures of the tests of tables: brokers behind a socket, one of them with tables in a directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from polywire.broker.settings import BrokerSettings
from polywire.client.bulk import BulkConnection, connect
from tests.unit.client.served import Served


@pytest.fixture
def served() -> Iterator[Served]:
    with Served() as server:
        yield server


@pytest.fixture
def tabled(tmp_path: Path) -> Iterator[Served]:
    """Serve a broker that has tables in ``tmp_path``. Tests write them themselves."""
    with Served(BrokerSettings(tables_url=f"{tmp_path.as_uri()}/tables")) as server:
        yield server


@pytest.fixture
def connection(tabled: Served) -> Iterator[BulkConnection]:
    made = connect(tabled.address)
    made.create_topic("orders", 3, {"table": "delta"})
    yield made
    made.close()
