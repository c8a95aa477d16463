"""``python -m benchmarks.soak``: numbered records through four pipelines on a Spark cluster, with kills.

Producers send over the protocols; land, refine, windows and a bridge back into a topic run on a standalone cluster of
several workers. An executor, the broker and the driver are killed with ``kill -9`` in turn. Afterwards a quality report
of every table and topic must find each record exactly once. Its pages and a summary are left in the output folder.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from benchmarks.measure import console, machine
from benchmarks.soak_driver import COPIED, COUNTED, FIELDS, PIPELINES, PRODUCED, REFINED, Plan
from polywire.client import bulk
from polywire.client.connect import SCHEMES
from polywire.spark import session
from polywire.spark.functions import parse_json
from polywire.spark.pipelines.compact import last_by_key
from polywire.spark.pipelines.quality import Quality, quality
from polywire.spark.pipelines.queries import topic_rows
from polywire.testing.process import BrokerProcess, child_environment

ROOT = Path(__file__).resolve().parents[1]
CLUSTER = ROOT / "deploy" / "spark-cluster" / "cluster.sh"
BULK = "polywire"
BULK_SHARE = 0.6  # of all records sent over the bulk protocol; the others share the rest
KILLED = ("executor", "broker", "driver")
EXECUTOR = "CoarseGrainedExecutorBackend"
POLL_S = 0.2
STAGGER_S = 3.0
START_S = 120.0
app = App(name="soak", help=__doc__)


@dataclass(slots=True)
class Soak:
    """One run."""

    directory: Path
    wires: tuple[str, ...]
    records: int
    seconds: float
    kills: int
    pause_s: float
    batch_records_max: int
    workers: int
    memory: str
    side_by_side: int = 4
    done: list[str] = field(default_factory=list)
    drivers: int = 0

    def topic(self, wire: str) -> str:
        return f"soak-{wire}"

    @property
    def topics(self) -> str:
        """Return all topics, as the option ``subscribe`` takes them."""
        return ",".join(self.topic(wire) for wire in self.wires)

    def shares(self) -> dict[str, int]:
        """Return the records of each protocol."""
        others = [wire for wire in self.wires if wire != BULK]
        rest = (
            int(self.records * (1 - BULK_SHARE))
            if BULK in self.wires and others
            else self.records * (BULK not in self.wires)
        )
        shares = {wire: rest // len(others) for wire in others}
        last = self.wires[-1] if BULK not in self.wires else BULK
        shares[last] = self.records - sum(count for wire, count in shares.items() if wire != last)
        return shares


@contextmanager
def cluster(soak: Soak) -> Iterator[str]:
    """Start a standalone cluster; yield the master's URL."""
    environment = {**child_environment(), "CLUSTER_DIR": str(soak.directory / "cluster"), "PYTHON": sys.executable}
    start = [str(CLUSTER), "start", "--workers", str(soak.workers), "--memory", soak.memory]
    started = subprocess.run(start, env=environment, capture_output=True, text=True, check=False)
    try:
        if started.returncode:
            raise SystemExit(f"the cluster did not start: {started.stderr}")
        yield started.stdout.strip()
    finally:
        subprocess.run([str(CLUSTER), "stop"], env=environment, check=False)


def start_producers(soak: Soak, broker: BrokerProcess) -> list[subprocess.Popen[bytes]]:
    """Start one process for each protocol."""
    address = broker.url("polywire")
    connection = bulk.connect(address)
    started = []
    for wire, count in soak.shares().items():
        connection.create_topic(soak.topic(wire), 1)
        words = [wire, broker.url(wire), address, soak.topic(wire), str(count), str(soak.seconds)]
        with (soak.directory / f"producer-{wire}.log").open("wb") as log:
            command = [sys.executable, "-m", "benchmarks.soak_producer", *words]
            started.append(subprocess.Popen(command, cwd=ROOT, env=child_environment(), stdout=log, stderr=log))
    return started


def start_driver(soak: Soak, broker: BrokerProcess, master: str) -> subprocess.Popen[bytes]:
    """Start a driver in its own process group, so that its JVM and Python workers die with it."""
    address = broker.url("polywire").removeprefix("polywire://")
    # Every driver starts with other pipelines than the previous one, so that each of them is running during some kill.
    first = soak.drivers * soak.side_by_side % PIPELINES
    most = soak.batch_records_max
    plan = Plan(master, address, soak.topics, str(soak.directory), most, STAGGER_S, soak.side_by_side, first)
    text = json.dumps({name: getattr(plan, name) for name in Plan.__slots__})
    soak.drivers += 1
    with (soak.directory / "driver.log").open("ab") as log, (soak.directory / "progress.jsonl").open("ab") as reported:
        command = [sys.executable, "-m", "benchmarks.soak_driver", text]
        return subprocess.Popen(
            command, cwd=ROOT, env=child_environment(), stdout=reported, stderr=log, start_new_session=True
        )


def executors(soak: Soak) -> list[int]:
    """Return the processes of the cluster's executors: children of its workers."""
    workers = {int(file.read_text()) for file in (soak.directory / "cluster").glob("worker-*.pid")}
    found = []
    for place in Path("/proc").iterdir():
        if not place.name.isdigit():
            continue
        try:
            parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            if parent in workers and EXECUTOR in (place / "cmdline").read_text():
                found.append(int(place.name))
        except OSError:
            continue  # it has just ended
    return found


def working(soak: Soak, since: int) -> bool:
    """Return whether micro-batches ended since the progress file had this length."""
    file = soak.directory / "progress.jsonl"
    return file.exists() and file.stat().st_size > since


def run_all(soak: Soak, broker: BrokerProcess, master: str) -> None:
    """Produce, process and kill until everything is done."""
    producers = start_producers(soak, broker)
    driver = start_driver(soak, broker, master)
    waiting = list(KILLED * soak.kills)
    seen, next_at = 0, time.monotonic()
    try:
        while driver.poll() != 0:
            time.sleep(POLL_S)
            if driver.poll() not in (None, 0):
                driver = start_driver(soak, broker, master)
            if not waiting and all(one.poll() == 0 for one in producers):
                (soak.directory / PRODUCED).touch()
            failed = [one.args for one in producers if one.poll() not in (None, 0)]
            if failed:
                raise SystemExit(f"a producer failed: {failed} (see {soak.directory})")
            # Killed only when it is working again, so that each kill interrupts something.
            if waiting and time.monotonic() > next_at and working(soak, seen) and executors(soak):
                kill(soak, waiting.pop(0), broker, driver)
                seen = (soak.directory / "progress.jsonl").stat().st_size
                next_at = time.monotonic() + soak.pause_s
    finally:
        for process in producers:
            process.kill()
            process.wait()
        if driver.poll() is None:
            os.killpg(driver.pid, signal.SIGKILL)
            driver.wait()


def kill(soak: Soak, what: str, broker: BrokerProcess, driver: subprocess.Popen[bytes]) -> None:
    """Kill with ``kill -9``; the broker is restarted at once, the driver by its watcher, executors by Spark."""
    match what:
        case "executor":
            os.kill(executors(soak)[0], signal.SIGKILL)
        case "broker":
            broker.kill()
            broker.start()
        case _:
            os.killpg(driver.pid, signal.SIGKILL)
            driver.wait()
    soak.done.append(what)
    console.print(f"killed {what}", highlight=False)


def reports(spark: SparkSession, soak: Soak, broker: BrokerProcess) -> dict[str, Quality]:
    """Return the quality report of every table and topic."""
    address = broker.url("polywire").removeprefix("polywire://")
    pages = soak.directory / "reports"
    pages.mkdir(exist_ok=True)
    reported: dict[str, Any] = {"sequence": "n", "producer": "w", "expected": soak.records}
    found = {}
    for topic in (REFINED, COPIED):
        found[topic] = quality(
            spark, address=address, topic=topic, parse=FIELDS, report=pages / f"{topic}.html", **reported
        )
    found["table"] = quality(spark, path=soak.directory / "table", report=pages / "table.html", **reported)
    for wire, count in soak.shares().items():
        own = {**reported, "expected": count}
        topic = soak.topic(wire)
        found[topic] = quality(spark, address=address, topic=topic, parse=FIELDS, report=pages / f"{topic}.html", **own)
    return found


def counted(spark: SparkSession, broker: BrokerProcess) -> dict[str, tuple[int, int]]:
    """Return records and sum of numbers by protocol, according to the windows' last values."""
    rows = last_by_key(topic_rows(spark, broker.url("polywire").removeprefix("polywire://"), COUNTED, headers=True))
    windows = parse_json(rows, "w string, records long, total long")
    sums = windows.groupBy("w").agg(f.sum("records").alias("records"), f.sum("total").alias("total"))
    return {row["w"]: (row["records"], row["total"]) for row in sums.collect()}


def soak_once(soak: Soak) -> dict[str, Any]:
    """Run it all; return the summary, which is also written to ``summary.json``."""
    soak.directory.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with BrokerProcess(soak.directory / "data") as broker:
        with cluster(soak) as master:
            run_all(soak, broker, master)
        took = time.monotonic() - began
        spark = session(
            "soak-report", master="local[2]", **{"spark.driver.memory": "3g", "spark.sql.shuffle.partitions": "4"}
        )
        try:
            found = reports(spark, soak, broker)
            windows = counted(spark, broker)
        finally:
            spark.stop()
    expected = {wire: (count, count * (count - 1) // 2) for wire, count in soak.shares().items()}
    summary = {
        "records": soak.records, "shares": soak.shares(), "killed": soak.done, "drivers_started": soak.drivers,
        "seconds": round(took, 1), "machine": machine(),
        "reports": {name: {"records": one.records, "problems": list(one.problems)} for name, one in found.items()},
        "windows_exact": windows == expected,
        "exactly_once": windows == expected and all(one.sound for one in found.values()),
    }  # fmt: skip
    (soak.directory / "summary.json").write_text(json.dumps(summary, indent=2), encoding="utf-8")
    return summary


@app.default
def main(
    *,
    output: Path = Path("soak-output"),
    records: int = 20_000_000,
    wires: Annotated[Sequence[str], Parameter(help="Wires that records come in over.")] = SCHEMES,
    seconds: Annotated[float, Parameter(help="Time producing is spread over; 0: as fast as possible.")] = 0.0,
    kills: Annotated[int, Parameter(help="How often executor, broker and driver are killed, each.")] = 3,
    pause: Annotated[float, Parameter(help="Least seconds between two kills.")] = 20.0,
    batch: Annotated[int, Parameter(help="Most records of a micro-batch.")] = 1_000_000,
    workers: int = 2,
    memory: str = "2g",
    side_by_side: Annotated[int, Parameter(help="Pipelines that run at once.")] = 4,
) -> int:
    """Produce, process, kill, and count."""
    soak = Soak(output.resolve(), tuple(wires), records, seconds, kills, pause, batch, workers, memory, side_by_side)
    summary = soak_once(soak)
    console.print_json(data=summary)
    return 0 if summary["exactly_once"] else 1


if __name__ == "__main__":
    app()
