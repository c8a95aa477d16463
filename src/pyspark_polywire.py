"""Register the data source ``polywire`` with Spark, which searches top-level modules named ``pyspark_*``.

``format("polywire")`` works without registration in any session that can import this module. Spark imports the module
in a worker process that searches for data sources. If this worker loses its driver, it exits without a traceback.
"""

from __future__ import annotations

from polywire.spark.source import PolywireDataSource as DefaultSource
from polywire.spark.worker_exit import depart_quietly

__all__ = ["DefaultSource"]

depart_quietly()
