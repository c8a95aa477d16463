"""Polywire for Spark: the data source ``polywire``, a session that is set up for it, and ready-made pipelines.

Needs the extra ``spark`` (pyspark, pyarrow). ``format("polywire")`` also works in sessions made by others: Spark finds the top-level
module ``pyspark_polywire`` by itself.
"""

from __future__ import annotations

from polywire.spark.sessions import session
from polywire.spark.source import PolywireDataSource

__all__ = ["PolywireDataSource", "session"]
