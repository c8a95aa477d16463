"""``polywire bench``: measure produce throughput, consume throughput and end-to-end latency of a broker.

Measurements use the public client, on a new topic that is deleted afterwards. Latency is measured from the time at
which a record was due to be sent. A slow broker therefore cannot hide its latency by delaying the sender.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import secrets
import sys
import time
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import ceil
from typing import Annotated, Final

from cyclopts import App, Parameter
from cyclopts.validators import Number

from polywire.build_info import VERSION
from polywire.cli.connection import ADDRESS_DEFAULT, Address, run_with_client
from polywire.cli.output import ListFormat, note, print_list
from polywire.cli.progress import reported
from polywire.cli.usage import examples
from polywire.client.address import split_login
from polywire.client.base import Ability, WireClient
from polywire.client.consumer import Consumer
from polywire.client.producer import Producer
from polywire.errors import ErrorCode, Unavailable
from polywire.escaping import escaped_json

COLUMNS: Final = ("figure", "value", "unit")
PERCENTILES: Final = (50.0, 90.0, 99.0, 99.9)
MEBI: Final = 1 << 20
QUIET_SECONDS: Final = 10.0  # seconds without a record after which a measurement fails
RECORDS_MAX: Final = 100_000_000
SIZE_MAX: Final = 1 << 20
BATCH_MAX: Final = 100_000
IN_FLIGHT_MAX: Final = 1_000


class BenchFormat(Enum):
    """Format of the results."""

    TABLE = "table"
    JSON = "json"


app = App(
    name="bench",
    help_epilogue=examples("polywire bench produce", "polywire bench latency --address kafka://127.0.0.1:9094"),
)

Records = Annotated[
    int, Parameter(name=("--records", "-n"), help="Number of records.", validator=Number(gte=1, lte=RECORDS_MAX))
]
Size = Annotated[int, Parameter(help="Size of a record's value in bytes.", validator=Number(gte=1, lte=SIZE_MAX))]
Batch = Annotated[int, Parameter(help="Number of records in a batch.", validator=Number(gte=1, lte=BATCH_MAX))]
InFlight = Annotated[
    int, Parameter(help="Maximum number of unacknowledged batches.", validator=Number(gte=1, lte=IN_FLIGHT_MAX))
]
Partitions = Annotated[
    int,
    Parameter(
        help="Number of partitions of the topic, if the protocol can create topics.", validator=Number(gte=1, lte=1_000)
    ),
]
Output = Annotated[BenchFormat, Parameter(name=("--output", "-o"), help="Output format.")]


@dataclass(slots=True)
class Measured:
    """Results of a measurement: values by name, each with its unit."""

    settings: Mapping[str, object]
    figures: dict[str, tuple[float, str]] = field(default_factory=dict)

    def rate(self, records: int, bytes_: int, seconds: float, processor_seconds: float) -> None:
        """Add record rate, byte rate, and the client's CPU time per record."""
        self.figures["records"] = (records, "")
        self.figures["rate"] = (round(records / seconds), "records/s")
        self.figures["throughput"] = (round(bytes_ / seconds / MEBI, 1), "MiB/s")
        self.figures["client_processor_time"] = (round(1e6 * processor_seconds / records, 3), "us/record")

    def latencies(self, seconds: Sequence[float]) -> None:
        ordered = sorted(seconds)
        for percent in PERCENTILES:
            at = min(ceil(len(ordered) * percent / 100), len(ordered)) - 1
            self.figures[f"latency_p{percent:g}"] = (round(1e3 * ordered[at], 3), "ms")
        self.figures["latency_max"] = (round(1e3 * ordered[-1], 3), "ms")


@app.command(
    help_epilogue=examples("polywire bench produce", "polywire bench produce --batch 1 --in-flight 1 -n 10000 -o json")
)
def produce(
    *,
    records: Records = 1_000_000,
    size: Size = 100,
    batch: Batch = 1_000,
    in_flight: InFlight = 10,
    partitions: Partitions = 1,
    output: Output = BenchFormat.TABLE,
    address: Address = ADDRESS_DEFAULT,
) -> None:
    """Measure how fast records are produced and acknowledged. Latency is the time from sending a batch to its acknowledgement."""
    settings: dict[str, object] = {
        "records": records,
        "size": size,
        "batch": batch,
        "in_flight": in_flight,
        "partitions": partitions,
    }
    measured = _measured("produce", address, settings)

    async def work(topic: str) -> None:
        begun, processor = time.perf_counter(), time.process_time()
        times = await _produce(address, topic, records, size=size, batch=batch, in_flight=in_flight)
        seconds = time.perf_counter() - begun
        measured.rate(records, records * size, seconds, time.process_time() - processor)
        measured.latencies(times)

    _with_new_topic(address, partitions, work)
    _print(measured, output)


@app.command(help_epilogue=examples("polywire bench consume", "polywire bench consume --address iggy://127.0.0.1:8090"))
def consume(
    *,
    records: Records = 1_000_000,
    size: Size = 100,
    partitions: Partitions = 1,
    output: Output = BenchFormat.TABLE,
    address: Address = ADDRESS_DEFAULT,
) -> None:
    """Measure how fast records are consumed. The records are produced before the measurement starts."""
    settings: dict[str, object] = {"records": records, "size": size, "partitions": partitions}
    measured = _measured("consume", address, settings)

    async def work(topic: str) -> None:
        await _produce(address, topic, records, size=size, batch=1_000, in_flight=10)
        begun, processor, left = time.perf_counter(), time.process_time(), records
        async with Consumer(address, topic) as consumer:
            while left:
                found = await consumer.batch(10_000, timeout_s=QUIET_SECONDS)
                if not found:
                    raise Unavailable(
                        ErrorCode.STOPPING, f"no record arrived in time seconds={QUIET_SECONDS:g} missing={left}"
                    )
                left -= len(found)
        seconds = time.perf_counter() - begun
        measured.rate(records, records * size, seconds, time.process_time() - processor)

    _with_new_topic(address, partitions, work)
    _print(measured, output)


@app.command(
    help_epilogue=examples("polywire bench latency", "polywire bench latency --rate 5000 --seconds 30 -o json")
)
def latency(
    *,
    rate: Annotated[int, Parameter(help="Records per second.", validator=Number(gte=1, lte=100_000))] = 100,
    seconds: Annotated[
        int, Parameter(help="Duration of the measurement in seconds.", validator=Number(gte=1, lte=86_400))
    ] = 10,
    size: Size = 100,
    output: Output = BenchFormat.TABLE,
    address: Address = ADDRESS_DEFAULT,
) -> None:
    """Measure end-to-end latency at a steady rate. Latency is the time from when a record should have been sent to when
    it was read.
    """
    settings: dict[str, object] = {"rate": rate, "seconds": seconds, "size": size}
    measured = _measured("latency", address, settings)

    async def work(topic: str) -> None:
        count = rate * seconds
        async with Producer(address, linger_ms=0) as producer:
            # not measured: the latency of a topic's first record includes the topic's setup
            await producer.send_and_wait(topic, b"." * size)
            async with Consumer(address, topic) as consumer:
                await consumer.batch(1, timeout_s=QUIET_SECONDS)
                begun = time.perf_counter()
                sending = _send_when_due(producer, topic, begun, count, rate=rate, size=size)
                _, times = await asyncio.gather(sending, _read_all(consumer, begun, count, rate=rate))
        measured.figures["records"] = (count, "")
        measured.latencies(times)

    _with_new_topic(address, 1, work)
    _print(measured, output)


def _measured(measurement: str, address: str, settings: Mapping[str, object]) -> Measured:
    """Return an empty result with the settings and the address, without its login."""
    return Measured({"measurement": measurement, "address": split_login(address)[1], **settings})


async def _produce(url: str, topic: str, records: int, *, size: int, batch: int, in_flight: int) -> array[float]:
    times = array("d")
    value = os.urandom(size).hex()[:size].encode()  # hexadecimal, because some protocols accept text only
    left = records

    async def keep_one_in_flight(producer: Producer) -> None:
        nonlocal left
        while left:
            count = min(batch, left)
            left -= count
            begun = time.perf_counter()
            await (await producer.send_many(topic, [value] * count))
            times.append(time.perf_counter() - begun)

    async with Producer(url, linger_ms=0) as producer:
        await asyncio.gather(*(keep_one_in_flight(producer) for _ in range(in_flight)))
    return times


async def _send_when_due(producer: Producer, topic: str, begun: float, count: int, *, rate: int, size: int) -> None:
    sent = 0
    while sent < count:
        await asyncio.sleep(max(0.0, begun + sent / rate - time.perf_counter()))
        due = min(count, int((time.perf_counter() - begun) * rate) + 1)
        await producer.send_many(topic, [b"." * size] * max(due - sent, 1))
        sent = max(due, sent + 1)
    await producer.flush()


async def _read_all(consumer: Consumer, begun: float, count: int, *, rate: int) -> array[float]:
    """Read all records.

    Return, for each, the seconds between the time at which it was due to be sent and its arrival.
    """
    times = array("d")
    while len(times) < count:
        found = await consumer.batch(10_000, timeout_s=QUIET_SECONDS + 1 / rate)
        if not found:
            raise Unavailable(
                ErrorCode.STOPPING, f"no record arrived in time seconds={QUIET_SECONDS:g} missing={count - len(times)}"
            )
        now = time.perf_counter()
        times.extend(now - begun - (len(times) + number) / rate for number in range(len(found)))
    return times


def _with_new_topic(address: str, partitions: int, work: Callable[[str], Awaitable[None]]) -> None:
    async def connected(client: WireClient) -> None:
        topic = f"bench-{secrets.token_hex(4)}"
        if Ability.CREATE_TOPIC in client.abilities:
            await client.create_topic(topic, partitions)
        try:
            with reported("measuring"):
                await work(topic)
        finally:
            if Ability.DELETE_TOPIC in client.abilities:
                await client.delete_topic(topic)
            else:
                note(f"the protocol cannot delete topics: the topic of the measurement remains topic={topic}")

    run_with_client(address, connected)


def _machine() -> dict[str, object]:
    return {
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "processors": os.cpu_count(),
        "python": platform.python_version(),
        "client": f"polywire {VERSION}",
    }


def _print(measured: Measured, form: BenchFormat) -> None:
    figures = [(name, value, unit) for name, (value, unit) in measured.figures.items()]
    if form is BenchFormat.JSON:
        results = {"machine": _machine(), "settings": dict(measured.settings)}
        results["figures"] = {name: {"value": value, "unit": unit} for name, value, unit in figures}
        sys.stdout.write(escaped_json(json.dumps(results, indent=2)) + "\n")
        return
    for facts in (measured.settings, _machine()):
        note(" ".join(f"{name}={value}" for name, value in facts.items()))
    print_list([dict(zip(COLUMNS, row, strict=True)) for row in figures], columns=COLUMNS, form=ListFormat.TABLE)
