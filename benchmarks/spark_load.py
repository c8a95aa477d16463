"""Batch read of a topic by Spark, beside the same records as Parquet.

Each round is a whole action in a warm session; the first action of a fresh Java machine is the warm-up and does not count.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable

from pyspark.sql import DataFrame

from benchmarks import polywire_load
from benchmarks.measure import Figure, figure, fresh_broker
from polywire.client import bulk
from polywire.spark import session

BATCHES = 5_000
RECORDS = BATCHES * 1_000


def spark_figures(rounds: int) -> list[Figure]:
    """Rows per second of ``count`` and of a full scan on two cores."""
    spark = session("benchmarks", master="local[2]")
    try:
        with fresh_broker() as broker, tempfile.TemporaryDirectory(prefix="polywire-bench-") as place:
            host, port = broker.addresses["polywire"]
            bulk.connect(f"polywire://{host}:{port}").create_topic("scan", 4)
            polywire_load.produce_rate(
                host,
                port,
                "scan",
                batch=polywire_load.value_batch(1000, 100),
                batch_records=1000,
                batches=BATCHES,
                partitions=4,
            )
            reader = (
                spark.read.format("polywire").option("bootstrap.servers", f"{host}:{port}").option("subscribe", "scan")
            )
            frame = reader.load()
            frame.write.parquet(f"{place}/parquet")
            parquet = spark.read.parquet(f"{place}/parquet")
            return [
                figure("Spark batch read, every column", "rows/s", _scan(frame), aim=1e6, rounds=rounds),
                figure("Spark batch read, count", "rows/s", _count(frame), rounds=rounds),
                figure("Spark reading the same as Parquet, every column", "rows/s", _scan(parquet), rounds=rounds),
            ]
    finally:
        spark.stop()


def _scan(frame: DataFrame) -> Callable[[], float]:
    def one_round() -> float:
        begun = time.perf_counter()
        frame.write.format("noop").mode("overwrite").save()
        return RECORDS / (time.perf_counter() - begun)

    return one_round


def _count(frame: DataFrame) -> Callable[[], float]:
    def one_round() -> float:
        begun = time.perf_counter()
        found = frame.count()
        if found != RECORDS:
            raise AssertionError(f"a wrong count found={found} expected={RECORDS}")
        return RECORDS / (time.perf_counter() - begun)

    return one_round
