"""Polywire for Spark: the data source ``polywire``, topics as tables, a configured session, and ready-made pipelines.

Requires the extra ``spark`` (pyspark, pyarrow). ``format("polywire")`` also works in other sessions: Spark finds the
top-level module ``pyspark_polywire``. Importing only this package imports neither pyspark nor pyarrow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polywire.spark.sessions import session
    from polywire.spark.source import PolywireDataSource
    from polywire.spark.tables import table

__all__ = ["PolywireDataSource", "session", "table"]


def __getattr__(name: str) -> Any:
    if name == "session":
        from polywire.spark.sessions import session

        return session
    if name == "PolywireDataSource":
        from polywire.spark.source import PolywireDataSource

        return PolywireDataSource
    if name == "table":
        from polywire.spark.tables import table

        return table
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
