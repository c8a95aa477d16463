"""The Spark driver of the soak: runs land, refine, windows and a bridge concurrently, in passes, until all is produced.

It is a separate process, because it is killed; it ends with 0 after a whole pass that began when everything was there.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

from pyspark.sql import SparkSession

from polywire.spark import session
from polywire.spark.pipelines.bridge import bridge
from polywire.spark.pipelines.land import land
from polywire.spark.pipelines.queries import Ran
from polywire.spark.pipelines.refine import refine
from polywire.spark.pipelines.windows import windows
from polywire.spark.progress import BatchProgress
from polywire.spark.sessions import LOCAL_SETTINGS

PRODUCED = "produced"  # a file that appears when every record was acknowledged
FIELDS = "json:w string, n long"
REFINED, COPIED, COUNTED = "soak-refined", "soak-copied", "soak-counted"
PIPELINES = 4
DELAY = "6 hours"  # no record may count as late: kills stop partitions for different times


@dataclass(frozen=True, slots=True)
class Plan:
    """The driver's configuration, as JSON.

    ``side_by_side`` pipelines run at once, from number ``first`` on, and start ``stagger_s`` apart: each starts several
    processes, and Spark waits only ten seconds for one of them.
    """

    master: str
    address: str
    topics: str
    directory: str
    batch_records_max: int
    stagger_s: float
    side_by_side: int
    first: int


def jobs(spark: SparkSession, plan: Plan) -> dict[str, Callable[[], Ran]]:
    """Return the pipelines, each of which resumes and ends when all available records are processed."""
    place = Path(plan.directory)

    def reported(name: str) -> Callable[[BatchProgress], None]:
        def tell(batch: BatchProgress) -> None:
            sys.stdout.write(json.dumps({"job": name, **asdict(batch)}) + "\n")
            sys.stdout.flush()

        return tell

    most = plan.batch_records_max
    return {
        "land": lambda: land(
            spark, plan.address, plan.topics, place / "table", place / "land", ["_topic"], parse=FIELDS, batch_records_max=most,
            on_progress=reported("land"),
        ),
        "refine": lambda: refine(
            spark, plan.address, plan.topics, REFINED, place / "refine", FIELDS, id="concat(w, '-', n)", delay=DELAY,
            batch_records_max=most, on_progress=reported("refine"),
        ),
        "windows": lambda: windows(
            spark, plan.address, plan.topics, place / "windows", FIELDS, length="10 seconds", delay=DELAY, group_by=["w"],
            measures=["sum(n) as total"], output=COUNTED, batch_records_max=most, on_progress=reported("windows"),
        ),
        "bridge": lambda: bridge(
            spark, plan.address, plan.topics, COPIED, place / "bridge", batch_records_max=most, on_progress=reported("bridge")
        ),
    }  # fmt: skip


def one_pass(spark: SparkSession, plan: Plan) -> None:
    """Run every pipeline until available records are processed. A failing one ends the process, which is restarted."""
    running = {}
    with ThreadPoolExecutor(plan.side_by_side) as pool:
        known = list(jobs(spark, plan).items())
        for name, job in known[plan.first :] + known[: plan.first]:
            running[pool.submit(job)] = name
            time.sleep(plan.stagger_s if plan.side_by_side > 1 else 0.0)
        for ended in as_completed(running):
            error = ended.exception()
            if error is not None:
                traceback.print_exception(error)
                os._exit(1)
            sys.stdout.write(json.dumps({"job": running[ended], "pass": asdict(ended.result())}) + "\n")


def main(text: str) -> None:
    plan = Plan(**json.loads(text))
    # Driver, executors and checkpoints are on this machine, whatever the master is.
    conf = {**LOCAL_SETTINGS, "spark.sql.shuffle.partitions": "2", "spark.local.dir": f"{plan.directory}/scratch"}
    conf["spark.scheduler.mode"] = "FAIR"
    spark = session("soak", master=plan.master, **conf)
    produced = Path(plan.directory) / PRODUCED
    last = False
    while not last:
        last = produced.exists()
        one_pass(spark, plan)
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1])
