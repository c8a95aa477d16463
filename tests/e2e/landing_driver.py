"""A Spark driver in its own process, which tests kill: lands a topic, or copies it to another."""

from __future__ import annotations

import sys
from pathlib import Path

from polywire.spark import session
from polywire.spark.pipelines.land import land
from polywire.spark.pipelines.queries import into_topic, run_query, topic_stream
from polywire.spark.sessions import JAVA_OPTIONS
from tests.e2e.java import short_lived

BATCH_RECORDS_MAX = 1_000


def main(address: str, topic: str, directory: str, copy: str = "") -> None:
    """Land the topic in the directory, or copy it to the topic ``copy``."""
    scratch = Path(directory) / "scratch"  # a killed Spark leaves its own files behind
    scratch.mkdir(exist_ok=True)
    conf = {JAVA_OPTIONS: short_lived(), "spark.local.dir": str(scratch)}
    spark = session("driver", master="local[2]", **conf)
    table, checkpoint = Path(directory) / "table", Path(directory) / "checkpoint"
    if copy:
        records = topic_stream(spark, address, topic, batch_records_max=BATCH_RECORDS_MAX)
        # Through a shuffle, so that a repeated micro-batch has other tasks with other rows.
        writer = into_topic(records.select("key", "value").repartition(3), address, copy)
        run_query(writer, "copy", checkpoint, available_now=True, on_progress=None)
    else:
        land(spark, address, topic, table, checkpoint, ["partition"], batch_records_max=BATCH_RECORDS_MAX)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
