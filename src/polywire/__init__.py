"""Polywire: a durable log broker that speaks six protocols over one log.

The client's modules are imported on first use, so a broker starts without them. With ``POLYWIRE_PURE=1`` in the
environment all modules run from their Python source.

Example:
    async with polywire.connect("127.0.0.1:9555") as client:
        await client.send("orders", "hello", key="a")
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

from polywire.build_info import VERSION as __version__
from polywire.build_info import compiled_modules, prefer_sources

if os.environ.get("POLYWIRE_PURE") == "1":
    prefer_sources()

if TYPE_CHECKING:
    from polywire.client.blocking import connect_sync
    from polywire.client.client import Client, connect
    from polywire.client.consumer import Consumer
    from polywire.client.notices import Rebalance
    from polywire.client.producer import Producer
    from polywire.client.queue import Job, Queue
    from polywire.client.record import Record
    from polywire.client.tracing import trace_context
    from polywire.client.transaction import Transaction
    from polywire.tables.frames import read_arrow, read_pandas, read_polars, scan, scan_polars, to_duckdb
    from polywire.tables.sql import sql
    from polywire.types import Level

_MODULES = {
    "Client": "client.client",
    "Consumer": "client.consumer",
    "Job": "client.queue",
    "Level": "types",
    "Producer": "client.producer",
    "Queue": "client.queue",
    "Rebalance": "client.notices",
    "Record": "client.record",
    "Transaction": "client.transaction",
    "connect": "client.client",
    "connect_sync": "client.blocking",
    "read_arrow": "tables.frames",
    "read_pandas": "tables.frames",
    "read_polars": "tables.frames",
    "scan": "tables.frames",
    "scan_polars": "tables.frames",
    "sql": "tables.sql",
    "to_duckdb": "tables.frames",
    "trace_context": "client.tracing",
}

__all__ = [
    "Client",
    "Consumer",
    "Job",
    "Level",
    "Producer",
    "Queue",
    "Rebalance",
    "Record",
    "Transaction",
    "__version__",
    "compiled_modules",
    "connect",
    "connect_sync",
    "read_arrow",
    "read_pandas",
    "read_polars",
    "scan",
    "scan_polars",
    "sql",
    "to_duckdb",
    "trace_context",
]


def __getattr__(name: str) -> object:
    """Import a public name of the client on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module 'polywire' has no attribute {name!r}")
    found: object = getattr(import_module(f"polywire.{_MODULES[name]}"), name)
    globals()[name] = found
    return found
