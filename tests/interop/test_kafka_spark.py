"""Spark's own Kafka connector and ours over the same topic: each reads what the other wrote.

The connector is not part of this project. ``POLYWIRE_KAFKA_SPARK`` names a folder with its jars (spec: kafka#clients-to-test-with).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from polywire.client.sync import connect
from polywire.records.columns import Header, Record
from polywire.spark.java import find_java
from tests.broker_process import child_environment
from tests.three_brokers import Brokers, one_or_three

VARIABLE = "POLYWIRE_KAFKA_SPARK"
DRIVER = Path(__file__).parent / "kafka" / "spark.driver"
RECORDS = 3000
BATCH = 1000
HEADERS = ((), (Header(b"a", b"1"),))
TIMES_US = (None, 1_600_000_000_123_000)
SECONDS_MAX = 300.0

pytestmark = pytest.mark.spark


def test_both_formats_give_the_same_rows(tmp_path: Path) -> None:
    jars = os.environ.get(VARIABLE)
    if not jars:
        pytest.skip(f"{VARIABLE} is not set: Spark's Kafka connector was NOT tried")
    with one_or_three(tmp_path, wires=["kafka", "polywire"]) as broker:
        host, port = broker.addresses["kafka"]
        with connect(f"kafka://{host}:{port}") as client:
            client.create_topic("both", 3)
            client.create_topic("sunk", 3)
            for first in range(0, RECORDS, BATCH):
                records = [
                    Record(
                        value(number),
                        key=b"%d" % number,
                        headers=HEADERS[number % 2],
                        origin_time_us=TIMES_US[number % 2],
                    )
                    for number in range(first, first + BATCH)
                ]
                client.produce("both", records, partition=first // BATCH % 3)
        addresses = (f"{host}:{port}", ":".join(map(str, broker.addresses["polywire"])))
        command = [sys.executable, str(DRIVER), jars, *addresses, "both", "sunk"]
        environment = {**child_environment(), "JAVA_HOME": str(find_java().home), "PYSPARK_PYTHON": sys.executable}
        said = run(command, environment, broker, tmp_path / "errors")
    assert said["columns"][0][0] == said["columns"][0][1]
    assert said["read"] == [[RECORDS, RECORDS]]
    assert said["differ"] == [[[]]]
    assert said["written"] == [[True]]
    assert said["streamed"] == [[1000, 1000]]
    assert said["half"] == [[1000]]
    assert said["over"] == [[2000, 2000, True]]


def run(command: list[str], environment: dict[str, str], broker: Brokers, errors: Path) -> dict[str, list[Any]]:
    """Return the driver's output; the broker is killed in the middle of a stream."""
    said: dict[str, list[Any]] = {}
    pipe = subprocess.PIPE
    with (
        errors.open("w") as output,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=output, text=True, env=environment) as process,
    ):
        late = threading.Timer(SECONDS_MAX, process.kill)
        late.daemon = True
        late.start()
        for what, *words in map(json.loads, process.stdout or ()):
            said.setdefault(what, []).append(words)
            if what == "half" and process.stdin is not None:
                broker.kill()
                broker.start()
                process.stdin.write("go on\n")
                process.stdin.flush()
        late.cancel()
    assert process.returncode == 0, errors.read_text()[-3000:]
    return said


def value(number: int) -> bytes:
    return b"%d" % number * 20
