"""Polywire for Spark: the data source ``polywire``, topics as tables, a configured session, and ready-made pipelines.

Requires the extra ``spark`` (pyspark, pyarrow). ``format("polywire")`` also works in other sessions: Spark finds the
top-level module ``pyspark_polywire``. Importing only this package imports neither pyspark nor pyarrow.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polywire.spark.sessions import session
    from polywire.spark.source import PolywireDataSource
    from polywire.spark.tables import stream_table, table

_MODULES = {
    "PolywireDataSource": "source",
    "session": "sessions",
    "stream_table": "tables",
    "table": "tables",
}
__all__ = ["PolywireDataSource", "session", "stream_table", "table"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"polywire.spark.{_MODULES[name]}"), name)
