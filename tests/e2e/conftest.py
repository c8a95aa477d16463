"""Fixtures of the end-to-end tests: a real broker in its own process, and one Spark session."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from polywire.client import bulk
from polywire.client.arrow import arrow_to_batches
from tests.broker_process import silenced
from tests.e2e import installation
from tests.e2e.followed_page import Step, follow, path_of
from tests.e2e.java import short_lived

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 60.0
PAGES_TOGETHER_MAX = 4
SOURCE = Path(__file__).resolve().parents[2] / "src"


@dataclass(frozen=True)
class Reached:
    """A broker that another fixture starts and stops. ``address`` is that of the `polywire` protocol."""

    address: str

    @property
    def connection(self) -> bulk.BulkConnection:
        return bulk.connect(self.address)


@dataclass(frozen=True)
class Served(Reached):
    """A broker under test."""

    process: subprocess.Popen[bytes]


Followed = Mapping[str, Future[Sequence[tuple[Step, str]]]]
"""The steps of each page with their output."""
Serve = Callable[[Path], Served]


def environment() -> dict[str, str]:
    """Return the environment in which a child process can import this checkout."""
    paths = [str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def start_broker(directory: Path) -> Served:
    directory.mkdir(parents=True, exist_ok=True)
    ready = directory / "ready.json"
    ready.unlink(missing_ok=True)
    listen = ["--polywire", "127.0.0.1:0", *silenced("polywire")]
    command = [sys.executable, "-m", "polywire", "serve", *listen]
    with (directory / "broker.log").open("ab") as log:
        process = subprocess.Popen(
            [*command, "--data-dir", str(directory / "data"), "--ready-file", str(ready)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment(),
        )
    deadline = time.monotonic() + START_TIMEOUT_S
    while not ready.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            pytest.fail(f"the broker did not start: {(directory / 'broker.log').read_text()[-2000:]}")
        time.sleep(0.02)
    wire = json.loads(ready.read_text())["polywire"]
    return Served(f"{wire['host']}:{wire['port']}", process)


def stop_broker(served: Served) -> None:
    if served.process.poll() is None:
        served.process.send_signal(signal.SIGTERM)
    try:
        served.process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        served.process.kill()
        served.process.wait()


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve one broker for all tests; each test creates its own topics."""
    broker = start_broker(tmp_path_factory.mktemp("broker"))
    yield broker
    stop_broker(broker)


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """Start one Spark session on two cores."""
    from polywire.spark import session
    from polywire.spark.sessions import JAVA_OPTIONS

    made = session("tests", master="local[2]", **{JAVA_OPTIONS: short_lived()})
    yield made
    made.stop()


@pytest.fixture(scope="session")
def source_distribution(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def make(place: Path) -> Path:
        return installation.build_source_distribution(installation.copy_checkout(place))

    return installation.made_once("checkout", tmp_path_factory, make)


@pytest.fixture(scope="session")
def wheel(source_distribution: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel without compiled modules, as on a machine without a compiler; it is also quick to build."""

    def make(place: Path) -> Path:
        return installation.build_wheel(source_distribution, place, CC="no-such-compiler")

    return installation.made_once("wheel", tmp_path_factory, make)


@pytest.fixture(scope="session")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of an environment with that wheel and without the checkout."""

    def make(place: Path) -> Path:
        return installation.environment_with(wheel, place)

    return installation.made_once("environment", tmp_path_factory, make)


@pytest.fixture(scope="module")
def followed(
    request: pytest.FixtureRequest, python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Followed]:
    """Follow the pages that tests of a module have as ``name``, and return the steps of each.

    Several pages are followed at the same time, because most of their commands wait: for records, members and timeouts.
    All tests of a module run in one process (``--dist loadscope``).
    """
    names = {
        str(item.callspec.params["name"]): None
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.module is request.module and "followed" in item.fixturenames
    }
    with ThreadPoolExecutor(PAGES_TOGETHER_MAX) as pool:

        def begin(name: str) -> Future[Sequence[tuple[Step, str]]]:
            folder = tmp_path_factory.mktemp("page") / "folder"
            folder.mkdir()
            return pool.submit(lambda: list(follow(path_of(name), python, folder)))

        yield {name: begin(name) for name in names}
        pool.shutdown(cancel_futures=True)


_numbers = itertools.count()


@pytest.fixture
def topic() -> str:
    """Return an unused topic name."""
    return f"topic-{next(_numbers)}"


def fill(connection: bulk.BulkConnection, topic: str, counts: list[int], *, headers: bool = False) -> None:
    """Append ``counts[n]`` records to partition n (``k<n>``: ``<partition>-<offset>``); create the topic if missing."""
    if topic not in {known.name for known in connection.topics()}:
        connection.create_topic(topic, len(counts))
    bounds = {reported.partition: reported.next_offset for reported in connection.bounds([topic])}
    for partition, count in enumerate(counts):
        offsets = range(bounds[partition], bounds[partition] + count)
        columns: dict[str, pa.Array[Any]] = {
            "key": pa.array([f"k{partition}".encode()] * count, pa.binary()),
            "value": pa.array([f"{partition}-{offset}".encode() for offset in offsets], pa.binary()),
        }
        if headers:
            kind = pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))
            columns["headers"] = pa.array([[{"key": "n", "value": str(offset).encode()}] for offset in offsets], kind)
        for batch in arrow_to_batches(pa.record_batch(columns)) if count else ():
            connection.produce(topic, partition, [batch])
