"""Spark finds data sources in top-level modules named ``pyspark_*``; this one makes ``format("polywire")`` known without registration."""

from __future__ import annotations

from polywire.spark.source import PolywireDataSource as DefaultSource

__all__ = ["DefaultSource"]
