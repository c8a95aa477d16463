"""A running broker writes Iceberg tables, and pyiceberg reads them through the broker's catalog."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from polywire import connect_sync
from polywire.client import bulk
from tests.broker_process import BrokerProcess

pyiceberg = pytest.importorskip("pyiceberg", reason="pyiceberg is not installed")
WAIT_S = 120.0


def rows_in(catalog: Any, name: tuple[str, str], count: int) -> list[dict[str, Any]]:
    """Return the rows of a table when it has this number."""
    from pyiceberg.exceptions import NoSuchTableError

    end, found = time.monotonic() + WAIT_S, []
    while time.monotonic() < end:
        try:
            found = catalog.load_table(name).scan().to_arrow().to_pylist()
        except NoSuchTableError:  # the first rows are not written yet
            found = []
        if len(found) >= count:
            return found
        time.sleep(0.1)
    raise AssertionError(f"the table has {len(found)} rows instead of {count}")


@pytest.mark.parametrize("processes", [1, 2])
def test_pyiceberg_reads_topics_through_the_catalog(tmp_path: Path, processes: int) -> None:
    from pyiceberg.catalog import load_catalog
    from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError

    options = ["--table", "delta,iceberg", "--table-freshness-s", "1"]
    if processes > 1:
        options += ["--processes", str(processes)]
    with BrokerProcess(tmp_path / "data", *options, wires=["polywire", "http"]) as broker:
        connection, client = bulk.connect(broker.url()), connect_sync(broker.url())
        names = [("default", "orders"), ("sales", "a"), ("sales", "b")]
        sent: dict[tuple[str, str], list[bytes]] = {}
        for stream, topic in names:
            full = topic if stream == "default" else f"{stream}.{topic}"
            connection.create_topic(full, 2)
            sent[stream, topic] = [f"{full} {number}".encode() for number in range(50)]
            for value in sent[stream, topic]:
                client.send(full, value)
        host, port = broker.addresses["http"]
        catalog = load_catalog("polywire", type="rest", uri=f"http://{host}:{port}/iceberg")
        for name in names:
            found = rows_in(catalog, name, 50)
            assert sorted(row["value"] for row in found) == sorted(sent[name])
            assert len({(row["partition"], row["offset"]) for row in found}) == 50
        assert catalog.list_namespaces() == [("default",), ("sales",)]
        assert catalog.list_tables("sales") == [("sales", "a"), ("sales", "b")]
        assert catalog.table_exists("sales.a")
        assert not catalog.table_exists("sales.c")
        assert catalog.namespace_exists("sales")
        assert not catalog.namespace_exists("nothing")
        with pytest.raises(NoSuchTableError):
            catalog.load_table("sales.c")
        with pytest.raises(NoSuchNamespaceError):
            catalog.load_namespace_properties("nothing")
        client.close()
        connection.close()
