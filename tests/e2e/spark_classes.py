"""``python -m tests.e2e.spark_classes FILE``: write an archive of the classes that a short Spark session loads."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import polywire
from polywire.spark import session
from polywire.spark.pipelines.land import land
from polywire.spark.sessions import JAVA_OPTIONS
from tests.broker_process import BrokerProcess
from tests.e2e.java import ONE_COMPILER

TOPIC: Final = "orders"


def main(archive: str) -> None:
    """Query a topic and land it in a table; Java writes the archive when it ends."""
    with TemporaryDirectory() as name, BrokerProcess(Path(name) / "data", wires=["polywire"]) as broker:
        folder, address = Path(name), broker.address("polywire")
        with polywire.connect_sync(broker.url()) as client:
            client.send(TOPIC, "value", key="key")
        options = f"{ONE_COMPILER} -XX:ArchiveClassesAtExit={archive}"
        spark = session("classes", master="local[2]", **{JAVA_OPTIONS: options})
        rows = spark.read.format("polywire").options(address=address, subscribe=TOPIC).load()
        rows.groupBy("key").count().collect()
        land(spark, address, TOPIC, folder / "table", folder / "checkpoint", ["partition"])
        spark.read.parquet(str(folder / "table")).collect()
        spark.stop()


if __name__ == "__main__":
    main(sys.argv[1])
