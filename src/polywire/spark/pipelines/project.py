"""Create a working project for Spark's declarative pipelines (``spark-pipelines``).

These properties of Spark 4.3 determine the project's content:

* Spark finds the data source ``polywire`` without registration. A definition file must not register it.
* In the spec file of the project, ``storage`` must be a URI and configuration values must be text.
* The command starts its own Connect server, so ``spark.master`` is not set.
* A second run needs a catalog that persists after the first.

Existing files are never overwritten.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from polywire.client.address import PASSWORD_VARIABLE
from polywire.errors import ErrorCode, Invalid

_SPEC: Final = """# Run with: SPARK_CONF_DIR=conf spark-pipelines run
name: {name}
storage: {storage}
catalog: spark_catalog
database: default
libraries:
  - glob:
      include: transformations/**
configuration:
  spark.sql.shuffle.partitions: "2"
  polywire.address: "{address}"
  polywire.topic: "{topic}"
"""

_RECORDS: Final = '''"""The topic as a streaming table, a view over it, and a topic with a copy of the table's records."""

from __future__ import annotations

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

spark = SparkSession.active()
ADDRESS = spark.conf.get("polywire.address")
TOPIC = spark.conf.get("polywire.topic")


@dp.table(comment="every record of the topic, once")
def records() -> DataFrame:
    stream = spark.readStream.format("polywire").option("address", ADDRESS).option("subscribe", TOPIC)
    return stream.option("startingOffsets", "earliest").load()


@dp.materialized_view(comment="records and bytes of each partition")
def partitions() -> DataFrame:
    counted = spark.read.table("records").groupBy("partition")
    return counted.agg(f.count("*").alias("records"), f.sum(f.length("value")).alias("bytes"))


dp.create_sink("copied", "polywire", {"address": ADDRESS, "topic": f"{TOPIC}-copy"})


@dp.append_flow(target="copied")
def copy() -> DataFrame:
    return spark.readStream.table("records").select("key", "value")
'''

_README: Final = """# {name}

A project of Spark's declarative pipelines over the Polywire topic `{topic}`.

```
pip install "../polywire[spark]" "pyspark[pipelines]"  # the path of a checkout: Polywire is not on PyPI yet
export SPARK_CONF_DIR=conf
spark-pipelines dry-run    # checks the definitions
spark-pipelines run        # reads all current records, then ends; run it again to read newer ones
```

* `spark-pipeline.yml` contains the address of the broker and the location of the tables.
* `conf/` configures a catalog that persists between runs (Derby, in this folder). Without it, a second run would fail: its tables exist.
* `transformations/` contains the datasets.
"""

_DEFAULTS: Final = """spark.sql.catalogImplementation              hive
spark.hadoop.javax.jdo.option.ConnectionURL  jdbc:derby:;databaseName={folder}/metastore;create=true
spark.sql.warehouse.dir                      {storage}/warehouse
spark.python.unix.domain.socket.enabled      true
spark.ui.enabled                             false
spark.driver.host                            127.0.0.1
spark.driver.bindAddress                     127.0.0.1
spark.driver.extraJavaOptions                -Dderby.system.home={folder}
"""

_NAME: Final = re.compile(r"[A-Za-z0-9_-]+")


def make(directory: Path, *, topic: str, address: str) -> list[str]:
    """Write the project and return the names of its files.

    Raises Invalid(INVALID_REQUEST) if the directory is not empty or the spec cannot contain a name.
    """
    if ":" in address.rpartition("://")[2].rpartition("@")[0]:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"passwords are not written to files (use name@host:port and the variable {PASSWORD_VARIABLE})",
        )
    folder = directory.resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise Invalid(ErrorCode.INVALID_REQUEST, f"directory exists and is not empty path={directory}")
    if not _NAME.fullmatch(folder.name) or '"' in topic + address:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"the files of a project cannot contain one of these names name={folder.name!r} topic={topic!r}",
        )
    facts = {
        "name": folder.name, "topic": topic, "address": address, "folder": str(folder), "storage": (folder / "storage").as_uri(),
    }  # fmt: skip
    files = {
        "spark-pipeline.yml": _SPEC.format(**facts),
        "transformations/records.py": _RECORDS,
        "conf/spark-defaults.conf": _DEFAULTS.format(**facts),
        "README.md": _README.format(**facts),
    }
    for name, text in files.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    return list(files)
