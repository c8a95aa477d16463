"""Send the flights of ``flights.py`` through three brokers on one bucket, kill the leader halfway, and check that each flight arrived once.

All producers and Spark know the addresses of all three brokers. When half of the flights are acknowledged and Spark is writing them to a
table, the leader is killed with ``kill -9``. A standby takes over within about three seconds, and all clients continue. At the end Spark
plans a read of the whole topic, all brokers are killed, and Spark reads the records from the bucket alone.

Run it with ``make demo-cluster`` or ``python -m examples.flights_cluster``. The bucket is served by versitygw if ``POLYWIRE_S3_SERVER`` or
the PATH has it (and ``polywire[bucket]`` is installed); otherwise it is a directory. The results are in ``demo-cluster-output/``.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import TypeVar

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

import polywire
from examples.flights import (
    BATCH_RECORDS_MAX,
    DAYS_TOPIC,
    FLIGHT,
    PARTITION_COUNT,
    PRODUCE_RECORDS,
    START_TIMEOUT_S,
    STOP_TIMEOUT_S,
    TOPIC,
    YEAR,
    check,
    console,
    delay_table,
    draw,
    mean_delays,
    read_flights,
    shown,
    wait_for,
)
from polywire.client import bulk, sync
from polywire.client.connect import SCHEMES
from polywire.client.sync import SyncClient
from polywire.errors import Busy, NotOwner, Unavailable
from polywire.records.columns import Record
from polywire.spark import session
from polywire.spark.pipelines.land import land
from polywire.spark.pipelines.windows import windows
from polywire.testing.process import lasting_port

NODES = ("broker-1", "broker-2", "broker-3")
BUCKET = "flights"
KEY = "polywire-demo"
FAILOVER_S = 60.0  # limit for a takeover, which takes about three seconds
RUNS_MAX = 5  # restarts of a failed pipeline, each from its checkpoint
GONE = (Unavailable, NotOwner, Busy)
T = TypeVar("T")


@dataclass(slots=True)
class Timeline:
    """Prints events with the seconds since the start."""

    begun: float = field(default_factory=time.monotonic)

    def add(self, text: str) -> None:
        console.print(f"{time.monotonic() - self.begun:6.1f} s  {text}", highlight=False, soft_wrap=True)


@dataclass(frozen=True, slots=True)
class Bucket:
    """The URL of the bucket, and what serves it."""

    url: str
    kind: str


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--output", type=Path, default=Path("demo-cluster-output"), help="directory to fill")
    arguments.add_argument("--flights", type=int, help="number of flights to send (default: all)")
    options = arguments.parse_args()
    output = options.output.resolve()
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    timeline = Timeline()
    with ThreadPoolExecutor(max_workers=1) as background, bucket_in(output) as bucket:
        starting = background.submit(start_spark)
        timeline.add(f"the log is in {bucket.url} ({bucket.kind})")
        flights, carriers = read_flights()
        flights = flights.slice(0, options.flights)
        with running(output, bucket, timeline) as brokers:
            spark = starting.result()
            try:
                return demonstrate(spark, Demo(output, timeline, bucket, brokers), flights, carriers)
            finally:
                spark.stop()


def demonstrate(spark: SparkSession, demo: Demo, flights: pa.Table, carriers: dict[str, str]) -> int:
    """Run all steps; return 0 if each flight arrived exactly once."""
    total, event = flights.num_rows, demo.timeline.add
    once(demo.brokers.url(), lambda client: client.create_topic(TOPIC, PARTITION_COUNT))
    progress = Progress(total)
    with ThreadPoolExecutor(max_workers=2) as pool:
        sending = pool.submit(produce, demo.brokers, flights, progress)
        landing = pool.submit(demo.land, spark, progress)
        demo.kill_the_leader(progress)
        sending.result()
        event(f"all {total:,} flights are acknowledged, over {', '.join(SCHEMES)}")
        landed, batches = landing.result()
    event(f"Spark landed {landed:,} flights in {batches} micro-batches")
    demo.count_days(spark)
    demo.hand_over()
    found = check(spark, demo.brokers.addresses(), total, demo.output)
    delays = mean_delays(demo.brokers.url())
    history = demo.read_without_brokers(spark)
    is_whole = history == Counter(range(total))
    event(f"{sum(history.values()):,} flights read from the bucket while no broker runs")
    console.print(delay_table(delays, carriers))
    draw(delays, carriers, demo.output / "delays.png")
    console.print(f"chart   {shown(demo.output / 'delays.png')}")
    console.print(f"table   {shown(demo.output / 'flights')} (Parquet, by month; {batches} micro-batches)")
    console.print(f"report  {shown(demo.output / 'quality.html')}")
    problems = [*found.problems, *([] if is_whole else ["the bucket does not have each flight once"])]
    verdict = f"NOT each exactly once: {', '.join(problems)}" if problems else "each exactly once"
    console.print(f"flights {total:,} produced, {landed:,} landed, {sum(history.values()):,} in the bucket: {verdict}")
    return 1 if problems or not found.sound else 0


class Progress:
    """The number of acknowledged flights, to wait for."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.acknowledged = 0
        self._changed = threading.Condition()

    def add(self, flights: int) -> None:
        with self._changed:
            self.acknowledged += flights
            self._changed.notify_all()

    def wait_for(self, flights: int) -> None:
        """Wait until this many flights, or all, are acknowledged."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.acknowledged >= min(flights, self.total), 10 * FAILOVER_S):
                raise SystemExit("no acknowledgement arrived")


@dataclass(frozen=True, slots=True)
class Demo:
    """The steps of the demo."""

    output: Path
    timeline: Timeline
    bucket: Bucket
    brokers: Brokers

    def kill_the_leader(self, progress: Progress) -> None:
        """Kill the leader halfway with ``kill -9``, and restart it after a takeover."""
        progress.wait_for(progress.total // 2)
        leader = self.brokers.leader()
        self.brokers.kill(leader)
        killed, acknowledged = time.monotonic(), progress.acknowledged
        self.timeline.add(f"{leader} is killed (kill -9), {acknowledged:,} flights are acknowledged")
        follower = self.brokers.leader()
        self.timeline.add(f"{follower} leads, {time.monotonic() - killed:.1f} s after the kill")
        progress.wait_for(acknowledged + 1)
        self.timeline.add(f"the next flights are acknowledged, {time.monotonic() - killed:.1f} s after the kill")
        self.brokers.start(leader)
        self.timeline.add(f"{leader} is restarted as a standby")

    def land(self, spark: SparkSession, progress: Progress) -> tuple[int, int]:
        """Write the topic to a table until all flights are there. Return the numbers of flights and micro-batches."""
        landed = batches = 0
        failures = count(1)
        while landed < progress.total:
            progress.wait_for(landed + 1)
            try:
                ran = land(
                    spark, self.brokers.addresses(), TOPIC, self.output / "flights", self.output / "land", ["month"],
                    parse=f"json:{FLIGHT}", files_max=1, batch_records_max=BATCH_RECORDS_MAX,
                )  # fmt: skip
            except Exception as error:
                if next(failures) > RUNS_MAX:
                    raise
                self.timeline.add(f"land is restarted after an error: {str(error).splitlines()[0][:100]}")
                landed = self._landed(spark)
                continue
            landed, batches = landed + ran.records, batches + ran.batches
        return landed, batches

    def _landed(self, spark: SparkSession) -> int:
        table = self.output / "flights"
        return spark.read.parquet(str(table)).count() if table.exists() else 0

    def count_days(self, spark: SparkSession) -> None:
        """Count flights by day and carrier into another topic."""
        ran = windows(
            spark, self.brokers.addresses(), TOPIC, self.output / "windows", f"json:{FLIGHT}", length="1 day", time="time_hour",
            delay=YEAR, group_by=["carrier"], measures=["avg(dep_delay) as delay"], output=DAYS_TOPIC,
        )  # fmt: skip
        self.timeline.add(f"Spark counted {ran.records:,} flights by day into the topic {DAYS_TOPIC}")

    def hand_over(self) -> None:
        """Make a standby the leader, which seals the journal: Spark reads segments only."""
        words = [sys.executable, "-m", "polywire", "cluster", "takeover", self.bucket.url]
        before = time.monotonic()
        result = subprocess.run(words, capture_output=True, text=True, check=False)
        if result.returncode:
            raise SystemExit(f"the takeover failed: {result.stderr}")
        leader = self.brokers.leader()
        self.timeline.add(f"{leader} leads after a requested takeover, which took {time.monotonic() - before:.1f} s")
        address, end = self.brokers.addresses(), time.monotonic() + FAILOVER_S
        while not is_sealed(address):
            if time.monotonic() > end:
                raise SystemExit("the journal is not sealed")
            time.sleep(0.1)

    def read_without_brokers(self, spark: SparkSession) -> Counter[int]:
        """Count each flight in the bucket. Spark asks for the segments when it plans the read; then all brokers are killed."""
        options = {"address": self.brokers.addresses(), "subscribe": TOPIC, "localSegments": "required"}
        history = spark.read.format("polywire").options(**options).load()
        identities = history.select(f.get_json_object(f.col("value").cast("string"), "$.id").cast("int")).rdd
        tasks = identities.getNumPartitions()
        for node in NODES:
            self.brokers.kill(node)
        self.timeline.add(f"a read of all flights is planned ({tasks} tasks), and all brokers are killed")
        return Counter(identities.map(lambda row: row[0]).collect())


def is_sealed(address: str) -> bool:
    """Return whether every record is in a segment."""
    with suppress(*GONE):
        connection = bulk.connect(address)
        ends = {part.partition: part.next_offset for part in connection.bounds([TOPIC])}
        runs = {number: connection.locate(TOPIC, number).runs for number in ends}
        return all(
            not ends[number] or (runs[number] and runs[number][-1].next_offset == ends[number]) for number in ends
        )
    return False


class Brokers:
    """Three broker processes with fixed addresses."""

    def __init__(self, output: Path, bucket: Bucket) -> None:
        self._output = output
        self._bucket = bucket
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._places = {node: {wire: f"127.0.0.1:{lasting_port()}" for wire in (*SCHEMES, "http")} for node in NODES}

    def url(self, wire: str = "polywire", first: int = 0) -> str:
        """Return the URL of all three brokers, beginning with the one of this number."""
        nodes = [NODES[(first + number) % len(NODES)] for number in range(len(NODES))]
        return f"{wire}://{','.join(self._places[node][wire] for node in nodes)}"

    def addresses(self) -> str:
        """Return the addresses of all three brokers in the form of Spark's option ``address``."""
        return self.url().partition("://")[2]

    def start(self, node: str) -> None:
        """Start a broker at its addresses."""
        ready, log = self._output / f"{node}.ready", self._output / f"{node}.log"
        ready.unlink(missing_ok=True)
        command = [
            sys.executable,
            "-m",
            "polywire",
            "serve",
            "--bucket",
            self._bucket.url,
            "--node",
            node,
            "--balance-s",
            "0",
        ]
        command += ["--data-dir", str(self._output / f"{node}-cache"), "--ready-file", str(ready)]
        command += [word for wire, place in self._places[node].items() for word in (f"--{wire}", place)]
        with log.open("a") as errors:
            process = subprocess.Popen(command, stdout=errors, stderr=subprocess.STDOUT)
        self._processes[node] = process
        wait_for(ready, process, log)

    def kill(self, node: str) -> None:
        """Kill a broker with ``kill -9``."""
        self._processes[node].kill()
        self._processes[node].wait()

    def stop(self) -> None:
        """Stop all brokers that are still running."""
        for process in self._processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self._processes.values():
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()

    def leader(self) -> str:
        """Wait for a leader and return its name."""
        end = time.monotonic() + FAILOVER_S
        while time.monotonic() < end:
            for node, process in self._processes.items():
                if process.poll() is None and self._leads(node):
                    return node
            time.sleep(0.02)
        raise SystemExit("no broker became the leader")

    def _leads(self, node: str) -> bool:
        host, _, port = self._places[node]["http"].rpartition(":")
        connection = HTTPConnection(host, int(port), timeout=5)
        with suppress(OSError, HTTPException):
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
            return re.search(r"^polywire_bucket_leads\{[^}]*\} 1", text, re.MULTILINE) is not None
        return False


@contextmanager
def running(output: Path, bucket: Bucket, timeline: Timeline) -> Iterator[Brokers]:
    """Run three brokers."""
    brokers = Brokers(output, bucket)
    try:
        for node in NODES:
            brokers.start(node)
        leader = brokers.leader()
        timeline.add(f"{leader} leads, {' and '.join(node for node in NODES if node != leader)} are standbys")
        yield brokers
    finally:
        brokers.stop()


@contextmanager
def bucket_in(output: Path) -> Iterator[Bucket]:
    """Provide a bucket on an S3 server, or a directory if there is no server."""
    binary = os.environ.get("POLYWIRE_S3_SERVER") or shutil.which("versitygw")
    missing = (
        "set POLYWIRE_S3_SERVER to versitygw's path for a server" if not binary else "polywire[bucket] is not installed"
    )
    if not binary or find_spec("obstore") is None:
        yield Bucket(f"file://{output / 'bucket'}", f"a directory: {missing}")
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{probe.getsockname()[1]}"
    (output / "s3" / BUCKET).mkdir(parents=True)
    command = [binary, "--port", place, "--access", KEY, "--secret", KEY, "--quiet", "posix", str(output / "s3")]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    keys = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": KEY, "AWS_REGION": "us-east-1"}
    os.environ.update({"AWS_ENDPOINT_URL": f"http://{place}", **keys})  # for the brokers, and for Spark's tasks
    try:
        wait_until_open(place)
        yield Bucket(f"s3://{BUCKET}/log", "versitygw")
    finally:
        server.kill()


def wait_until_open(place: str) -> None:
    host, _, port = place.rpartition(":")
    end = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end:
        with suppress(OSError):
            socket.create_connection((host, int(port)), 1).close()
            return
        time.sleep(0.02)
    raise SystemExit("the S3 server did not start")


def produce(brokers: Brokers, flights: pa.Table, progress: Progress) -> None:
    """Send each flight as a JSON record, keyed by carrier. Every protocol sends some of the carriers, all at once."""
    largest_first = [carrier for carrier, _ in Counter(flights["carrier"].to_pylist()).most_common()]
    numbered = flights.append_column("id", pa.array(range(flights.num_rows)))
    with ThreadPoolExecutor(len(SCHEMES)) as pool:
        sending = []
        for number, wire in enumerate(sorted(SCHEMES, key=lambda wire: wire != "polywire")):
            part = numbered.filter(pc.is_in(flights["carrier"], pa.array(largest_first[number :: len(SCHEMES)])))
            send = send_idempotently if wire == "polywire" else send_and_verify
            sending.append(pool.submit(send, brokers, wire, number, records_of(part), progress))
        for sent in sending:
            sent.result()


def records_of(flights: pa.Table) -> list[list[Record]]:
    """Return the records of each request."""
    encoder = msgspec.json.Encoder()
    return [
        [Record(value=encoder.encode(row), key=row["carrier"].encode()) for row in rows.to_pylist()]
        for rows in flights.to_batches(max_chunksize=PRODUCE_RECORDS)
    ]


def send_idempotently(
    brokers: Brokers, wire: str, first: int, requests: Sequence[Sequence[Record]], progress: Progress
) -> None:
    """Send over ``polywire``, whose idempotent producer retries without duplicates."""

    async def send() -> None:
        async with polywire.connect(brokers.url(wire, first)) as client, client.producer() as producer:
            for records in requests:
                receipt = await producer.send_many(TOPIC, [r.value for r in records], keys=[r.key for r in records])
                await receipt
                progress.add(len(records))

    asyncio.run(send())


def send_and_verify(
    brokers: Brokers, wire: str, first: int, requests: Sequence[Sequence[Record]], progress: Progress
) -> None:
    """Send over a protocol without idempotence: after an error, read which records were stored and send the others again."""
    connections = ExitStack()
    client = None
    for records in requests:
        unsent, ends = list(records), once(brokers.url(), ends_of)
        while unsent:
            try:
                client = client or connections.enter_context(sync.connect(brokers.url(wire, first)))
                client.produce(TOPIC, unsent)
                unsent = []
            except GONE:
                connections.close()
                client = None
                unsent = missing(brokers.url(), ends, unsent)
        progress.add(len(records))
    connections.close()


def missing(url: str, ends: Sequence[int], records: Sequence[Record]) -> list[Record]:
    """Return the records that were not stored at or after these offsets."""
    stored = once(url, lambda client: values_from(client, ends))
    return [record for record in records if record.value not in stored]


def once(url: str, call: Callable[[SyncClient], T]) -> T:
    """Call the leader, as soon as there is one."""
    end = time.monotonic() + FAILOVER_S
    while True:
        try:
            with sync.connect(url) as client:
                return call(client)
        except GONE:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def ends_of(client: SyncClient) -> list[int]:
    """Return the next offset of each partition."""
    return [bounds.next_offset for bounds in client.bounds(TOPIC)]


def values_from(client: SyncClient, ends: Sequence[int]) -> set[bytes | None]:
    """Return the values stored at or after these offsets."""
    found: set[bytes | None] = set()
    for partition, offset in enumerate(ends):
        while records := client.fetch(TOPIC, partition, offset):
            found.update(record.value for record in records)
            offset += len(records)
    return found


def start_spark() -> SparkSession:
    """Start Spark on two cores, with retries of failed tasks as on a cluster."""
    return session("flights", master="local[2,4]")


if __name__ == "__main__":
    sys.exit(main())
