"""The flights of ``flights.py`` through three brokers on one bucket: who leads is killed in the middle, and each flight is there once.

Every wire's sender and Spark know all three brokers. When half of the flights are acknowledged and Spark is landing them, the broker that
leads is ended by ``kill -9``; another leads within some three seconds, and everybody goes on. At the end Spark plans a read of the whole
history, all brokers are killed, and the history is read from the bucket alone.

Run it with ``make demo-cluster``, or ``python -m examples.flights_cluster``. The bucket is versitygw where ``POLYWIRE_S3_SERVER`` or the PATH
has it (and ``polywire[bucket]`` is installed), else a directory. It leaves ``demo-cluster-output/``.
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
LED_S = 60.0  # in which somebody leads again; it takes some three
RUNS_MAX = 5  # of a pipeline that failed, each from its checkpoint
GONE = (Unavailable, NotOwner, Busy)
T = TypeVar("T")


@dataclass(slots=True)
class Story:
    """What happens, and when."""

    begun: float = field(default_factory=time.monotonic)

    def tell(self, text: str) -> None:
        console.print(f"{time.monotonic() - self.begun:6.1f} s  {text}", highlight=False, soft_wrap=True)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Where the log lies."""

    url: str
    kind: str


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--output", type=Path, default=Path("demo-cluster-output"), help="directory to fill")
    arguments.add_argument("--flights", type=int, help="how many (default: all)")
    given = arguments.parse_args()
    output = given.output.resolve()
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    story = Story()
    with ThreadPoolExecutor(max_workers=1) as background, bucket_in(output) as bucket:
        starting = background.submit(start_spark)
        story.tell(f"the log is in {bucket.url} ({bucket.kind})")
        flights, carriers = read_flights()
        flights = flights.slice(0, given.flights)
        with running(output, bucket, story) as brokers:
            spark = starting.result()
            try:
                return demonstrate(spark, Demo(output, story, bucket, brokers), flights, carriers)
            finally:
                spark.stop()


def demonstrate(spark: SparkSession, demo: Demo, flights: pa.Table, carriers: dict[str, str]) -> int:
    """The whole story; 0 when each flight is there once."""
    total, tell = flights.num_rows, demo.story.tell
    once(demo.brokers.url(), lambda client: client.create_topic(TOPIC, PARTITION_COUNT))
    progress = Progress(total)
    with ThreadPoolExecutor(max_workers=2) as pool:
        sending = pool.submit(produce, demo.brokers, flights, progress)
        landing = pool.submit(demo.land, spark, progress)
        demo.kill_the_leader(progress)
        sending.result()
        tell(f"all {total:,} flights are acknowledged, over {', '.join(SCHEMES)}")
        landed, batches = landing.result()
    tell(f"Spark landed {landed:,} flights in {batches} micro-batches")
    demo.count_days(spark)
    demo.hand_over()
    found = check(spark, demo.brokers.addresses(), total, demo.output)
    delays = mean_delays(spark.read.parquet(str(demo.output / "flights")))
    history = demo.read_without_brokers(spark)
    is_whole = history == Counter(range(total))
    tell(f"{sum(history.values()):,} flights read from the bucket while no broker runs")
    console.print(delay_table(delays, carriers))
    draw(delays, carriers, demo.output / "delays.png")
    console.print(f"chart   {shown(demo.output / 'delays.png')}")
    console.print(f"table   {shown(demo.output / 'flights')} (Parquet, by month; {batches} micro-batches)")
    console.print(f"report  {shown(demo.output / 'quality.html')}")
    problems = [*found.problems, *([] if is_whole else ["the history in the bucket is not each flight once"])]
    verdict = f"NOT each exactly once: {', '.join(problems)}" if problems else "each exactly once"
    console.print(f"flights {total:,} produced, {landed:,} landed, {sum(history.values()):,} in the bucket: {verdict}")
    return 1 if problems or not found.sound else 0


class Progress:
    """How many flights are acknowledged, and when some were the last time."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.acknowledged = 0
        self._changed = threading.Condition()

    def add(self, flights: int) -> None:
        with self._changed:
            self.acknowledged += flights
            self._changed.notify_all()

    def wait_for(self, flights: int) -> None:
        """Until more than so many are."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.acknowledged >= min(flights, self.total), 10 * LED_S):
                raise SystemExit("nobody acknowledges anything")


@dataclass(frozen=True, slots=True)
class Demo:
    """What is done to the brokers, and what Spark does meanwhile."""

    output: Path
    story: Story
    bucket: Bucket
    brokers: Brokers

    def kill_the_leader(self, progress: Progress) -> None:
        """``kill -9``, in the middle; who was killed is started again once another leads."""
        progress.wait_for(progress.total // 2)
        leader = self.brokers.leader()
        self.brokers.kill(leader)
        killed, acknowledged = time.monotonic(), progress.acknowledged
        self.story.tell(f"{leader} is killed (kill -9), {acknowledged:,} flights are acknowledged")
        follower = self.brokers.leader()
        self.story.tell(f"{follower} leads, {time.monotonic() - killed:.1f} s after the kill")
        progress.wait_for(acknowledged + 1)
        self.story.tell(f"the next flights are acknowledged, {time.monotonic() - killed:.1f} s after the kill")
        self.brokers.start(leader)
        self.story.tell(f"{leader} is started again, and stands by")

    def land(self, spark: SparkSession, progress: Progress) -> tuple[int, int]:
        """The topic as a table: as often as there is more, from where the checkpoint says. Flights, and micro-batches."""
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
                self.story.tell(f"landing is started again: {str(error).splitlines()[0][:100]}")
                landed = self._landed(spark)
                continue
            landed, batches = landed + ran.records, batches + ran.batches
        return landed, batches

    def _landed(self, spark: SparkSession) -> int:
        table = self.output / "flights"
        return spark.read.parquet(str(table)).count() if table.exists() else 0

    def count_days(self, spark: SparkSession) -> None:
        """Flights by day and carrier, into another topic."""
        ran = windows(
            spark, self.brokers.addresses(), TOPIC, self.output / "windows", f"json:{FLIGHT}", length="1 day", time="time_hour",
            delay=YEAR, group_by=["carrier"], measures=["avg(dep_delay) as delay"], output=DAYS_TOPIC,
        )  # fmt: skip
        self.story.tell(f"Spark counted {ran.records:,} flights by day into the topic {DAYS_TOPIC}")

    def hand_over(self) -> None:
        """Another broker leads, as asked: what its forerunner had only in the journal becomes segments, which Spark reads."""
        words = [sys.executable, "-m", "polywire", "cluster", "takeover", self.bucket.url]
        before = time.monotonic()
        told = subprocess.run(words, capture_output=True, text=True, check=False)
        if told.returncode:
            raise SystemExit(f"nobody took over: {told.stderr}")
        leader = self.brokers.leader()
        self.story.tell(f"{leader} leads, as was asked for, after {time.monotonic() - before:.1f} s")
        address, end = self.brokers.addresses(), time.monotonic() + LED_S
        while not is_sealed(address):
            if time.monotonic() > end:
                raise SystemExit("the journal is not sealed")
            time.sleep(0.1)

    def read_without_brokers(self, spark: SparkSession) -> Counter[int]:
        """How often each flight is in the bucket. Where records lie is asked when the read is planned; then the brokers are killed."""
        options = {"address": self.brokers.addresses(), "subscribe": TOPIC, "localSegments": "required"}
        history = spark.read.format("polywire").options(**options).load()
        identities = history.select(f.get_json_object(f.col("value").cast("string"), "$.id").cast("int")).rdd
        tasks = identities.getNumPartitions()
        for node in NODES:
            self.brokers.kill(node)
        self.story.tell(f"a read of all flights is planned ({tasks} tasks), and all brokers are killed")
        return Counter(identities.map(lambda row: row[0]).collect())


def is_sealed(address: str) -> bool:
    """Whether every record is in a segment."""
    with suppress(*GONE):
        connection = bulk.connect(address)
        ends = {part.partition: part.next_offset for part in connection.bounds([TOPIC])}
        runs = {number: connection.locate(TOPIC, number).runs for number in ends}
        return all(
            not ends[number] or (runs[number] and runs[number][-1].next_offset == ends[number]) for number in ends
        )
    return False


class Brokers:
    """Three processes, each of which listens at the same addresses for as long as the demo runs, whether it leads or not."""

    def __init__(self, output: Path, bucket: Bucket) -> None:
        self._output = output
        self._bucket = bucket
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._places = {node: {wire: f"127.0.0.1:{lasting_port()}" for wire in (*SCHEMES, "http")} for node in NODES}

    def url(self, wire: str = "polywire", first: int = 0) -> str:
        """All three, beginning with one of them."""
        nodes = [NODES[(first + number) % len(NODES)] for number in range(len(NODES))]
        return f"{wire}://{','.join(self._places[node][wire] for node in nodes)}"

    def addresses(self) -> str:
        """All three, as Spark takes them."""
        return self.url().partition("://")[2]

    def start(self, node: str) -> None:
        """Start one; it listens where it did before."""
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
        """``kill -9``."""
        self._processes[node].kill()
        self._processes[node].wait()

    def stop(self) -> None:
        """End those that still run."""
        for process in self._processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self._processes.values():
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()

    def leader(self) -> str:
        """Who leads, as soon as somebody does."""
        end = time.monotonic() + LED_S
        while time.monotonic() < end:
            for node, process in self._processes.items():
                if process.poll() is None and self._leads(node):
                    return node
            time.sleep(0.02)
        raise SystemExit("nobody leads")

    def _leads(self, node: str) -> bool:
        host, _, port = self._places[node]["http"].rpartition(":")
        connection = HTTPConnection(host, int(port), timeout=5)
        with suppress(OSError, HTTPException):
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
            return re.search(r"^polywire_bucket_leads\{[^}]*\} 1", text, re.MULTILINE) is not None
        return False


@contextmanager
def running(output: Path, bucket: Bucket, story: Story) -> Iterator[Brokers]:
    """Three brokers."""
    brokers = Brokers(output, bucket)
    try:
        for node in NODES:
            brokers.start(node)
        leader = brokers.leader()
        story.tell(f"{leader} leads, {' and '.join(node for node in NODES if node != leader)} stand by")
        yield brokers
    finally:
        brokers.stop()


@contextmanager
def bucket_in(output: Path) -> Iterator[Bucket]:
    """An S3 server's, or a directory."""
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
    """Send every flight as a JSON record keyed by its carrier: the carriers are shared out among the wires, which all send at once."""
    largest_first = [carrier for carrier, _ in Counter(flights["carrier"].to_pylist()).most_common()]
    numbered = flights.append_column("id", pa.array(range(flights.num_rows)))
    with ThreadPoolExecutor(len(SCHEMES)) as pool:
        sending = []
        for number, wire in enumerate(sorted(SCHEMES, key=lambda wire: wire != "polywire")):
            own = numbered.filter(pc.is_in(flights["carrier"], pa.array(largest_first[number :: len(SCHEMES)])))
            send = send_idempotently if wire == "polywire" else send_and_look
            sending.append(pool.submit(send, brokers, wire, number, records_of(own), progress))
        for sent in sending:
            sent.result()


def records_of(flights: pa.Table) -> list[list[Record]]:
    """Records of one request after the other."""
    encoder = msgspec.json.Encoder()
    return [
        [Record(value=encoder.encode(row), key=row["carrier"].encode()) for row in rows.to_pylist()]
        for rows in flights.to_batches(max_chunksize=PRODUCE_RECORDS)
    ]


def send_idempotently(
    brokers: Brokers, wire: str, first: int, requests: Sequence[Sequence[Record]], progress: Progress
) -> None:
    """Over our own wire the client's producer does all that is needed: what it sends again is stored once."""

    async def send() -> None:
        async with polywire.connect(brokers.url(wire, first)) as client, client.producer() as producer:
            for records in requests:
                receipt = await producer.send_many(TOPIC, [r.value for r in records], keys=[r.key for r in records])
                await receipt
                progress.add(len(records))

    asyncio.run(send())


def send_and_look(
    brokers: Brokers, wire: str, first: int, requests: Sequence[Sequence[Record]], progress: Progress
) -> None:
    """Over wires without that: when nobody knows whether a request arrived, look, and send again what is not there."""
    kept = ExitStack()
    client = None
    for records in requests:
        left, ends = list(records), once(brokers.url(), ends_of)
        while left:
            try:
                client = client or kept.enter_context(sync.connect(brokers.url(wire, first)))
                client.produce(TOPIC, left)
                left = []
            except GONE:
                kept.close()
                client = None
                left = missing(brokers.url(), ends, left)
        progress.add(len(records))
    kept.close()


def missing(url: str, ends: Sequence[int], records: Sequence[Record]) -> list[Record]:
    """Which of these records were not stored since the partitions ended there, as whoever leads now knows."""
    there = once(url, lambda client: values_from(client, ends))
    return [record for record in records if record.value not in there]


def once(url: str, ask: Callable[[SyncClient], T]) -> T:
    """Ask whoever leads, as soon as somebody does."""
    end = time.monotonic() + LED_S
    while True:
        try:
            with sync.connect(url) as client:
                return ask(client)
        except GONE:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def ends_of(client: SyncClient) -> list[int]:
    """The next offset of each partition."""
    return [bounds.next_offset for bounds in client.bounds(TOPIC)]


def values_from(client: SyncClient, ends: Sequence[int]) -> set[bytes | None]:
    """What was stored from there on."""
    found: set[bytes | None] = set()
    for partition, offset in enumerate(ends):
        while records := client.fetch(TOPIC, partition, offset):
            found.update(record.value for record in records)
            offset += len(records)
    return found


def start_spark() -> SparkSession:
    """On two cores; a task that fails is tried again, as on a cluster."""
    return session("flights", master="local[2,4]", **{"spark.sql.shuffle.partitions": "2"})


if __name__ == "__main__":
    sys.exit(main())
