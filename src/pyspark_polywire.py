"""Spark finds data sources in top-level modules named ``pyspark_*``.

Promises: ``format("polywire")`` works in any session that can import this module, without registration; the worker that looks for data
sources here leaves without a word. Must not know: anything else.
"""

from __future__ import annotations

from polywire.spark.source import PolywireDataSource as DefaultSource
from polywire.spark.worker_exit import depart_quietly

__all__ = ["DefaultSource"]

depart_quietly()
