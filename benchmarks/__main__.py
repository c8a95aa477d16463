"""``python -m benchmarks``: measure produce, fetch, lone-request latency and the Spark read on this machine."""

from __future__ import annotations

import statistics
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from benchmarks import (
    cursus_load,
    flux_load,
    iggy_load,
    iggy_today,
    kafka07_load,
    polywire_load,
    spark_load,
    spark_stream,
)
from benchmarks.measure import ROUNDS, Figure, console, figure, fresh_broker, report, resident_bytes
from polywire.client import bulk

MEBI = 1024 * 1024
UNSEALED_BATCHES = 7_000  # of 104 kB: with those before they fit a journal file of 1 GiB
WARMING_BATCHES = 2_800  # until the usual journal has all its files
app = App(name="benchmarks", help="Measure Polywire on this machine, over real sockets.")


def produce_figures(rounds: int) -> list[Figure]:
    """Produce over the ``polywire`` wire to one partition and to a thousand, and what the broker's memory was then."""
    batch = polywire_load.value_batch(1000, 100)
    found: list[Figure] = []
    with fresh_broker() as broker:
        host, port = broker.addresses["polywire"]
        connection = bulk.connect(f"polywire://{host}:{port}")
        connection.create_topic("one", 1)
        connection.create_topic("thousand", 1000)
        for topic, partitions in (("one", 1), ("thousand", 1000)):
            found.append(
                figure(
                    f"polywire produce, 1000 x 100 B, {partitions} partition{'s' * (partitions > 1)}",
                    "records/s",
                    lambda topic=topic, partitions=partitions: polywire_load.produce_rate(  # type: ignore[misc]
                        host, port, topic, batch=batch, batch_records=1000, batches=20_000, partitions=partitions
                    ),
                    aim=8e6 if partitions == 1 else 0.7 * found[0].median,
                    rounds=rounds,
                )
            )
        memory = resident_bytes(broker.pid)
        found.append(
            Figure(
                "broker memory after that",
                "MiB",
                memory["VmHWM"] / MEBI,
                memory["RssAnon"] / MEBI,
                memory["VmHWM"] / MEBI,
                500,
                False,
                "median is the peak with mapped files, min is anonymous memory at the end",
            )
        )
    return found


def sealing_figures(rounds: int) -> list[Figure]:
    """What sealing costs: the same produce into a journal that is long enough to hold it all, and into the usual one."""
    batch = polywire_load.value_batch(1000, 100)

    def one_round(*options: str) -> float:
        with fresh_broker(*options) as broker:
            host, port = broker.addresses["polywire"]
            bulk.connect(f"polywire://{host}:{port}").create_topic("one", 1)
            produce = partial(polywire_load.produce_rate, host, port, "one", batch=batch, batch_records=1000)
            produce(batches=WARMING_BATCHES)
            return produce(batches=UNSEALED_BATCHES)

    name = f"polywire produce, {UNSEALED_BATCHES // 1000} M records at once"
    without = figure(f"{name}, nothing sealed", "records/s", lambda: one_round("--slot-mib", "1024"), rounds=rounds)
    sealed = figure(f"{name}, sealed", "records/s", one_round, aim=0.8 * without.median, rounds=rounds)
    return [without, sealed]


def fetch_figures(rounds: int) -> list[Figure]:
    """Range fetches of one gigabyte into Arrow: history that is in memory, and history that only the disk has."""
    batch = polywire_load.value_batch(1000, 100)
    with fresh_broker() as broker:
        host, port = broker.addresses["polywire"]

        def filled(topic: str) -> str:
            bulk.connect(f"polywire://{host}:{port}").create_topic(topic, 1)
            polywire_load.produce_rate(host, port, topic, batch=batch, batch_records=1000, batches=10_000)
            return topic

        cold = iter([filled(f"cold-{number}") for number in range(min(rounds, 3) + 1)])
        warm = filled("warm")
        for _ in range(2):  # what is read again stays in memory from then on
            polywire_load.fetch_rate(host, port, warm)
        return [
            figure(
                "polywire range fetch into Arrow, 100 B, in memory",
                "MB/s of values",
                lambda: polywire_load.fetch_rate(host, port, warm)[0] / 1e6,
                aim=2000,
                rounds=rounds,
            ),
            figure(
                "polywire range fetch into Arrow, 100 B, first read from the disk",
                "MB/s of values",
                lambda: polywire_load.fetch_rate(host, port, next(cold))[0] / 1e6,
                rounds=min(rounds, 3),
                remark="direct reads: bounded by the disk",
            ),
        ]


def flux_figures(rounds: int) -> list[Figure]:
    """Lone and pipelined FLUX produce, beside a bare echo."""
    found: list[Figure] = []
    with flux_load.EchoProcess() as (host, port):
        found.append(
            figure(
                "bare uvloop echo, round trip",
                "us",
                lambda: flux_load.round_trip_us(host, port, b"x" * 130 + b"\n", requests=5_000),
                more_is_better=False,
                rounds=rounds,
            )
        )
    with fresh_broker() as broker:
        host, port = broker.addresses["flux"]
        found.append(
            figure(
                "FLUX lone produce and reply, p50",
                "us",
                lambda: flux_load.lone_latency_us(host, port, "lone", requests=5_000),
                aim=75,
                more_is_better=False,
                rounds=rounds,
            )
        )
        found.append(
            figure(
                "FLUX pipelined produce, 100 B",
                "records/s",
                lambda: flux_load.pipelined_rate(host, port, "pipelined", requests=1_000_000),
                aim=500_000,
                rounds=rounds,
            )
        )
    return found


def cursus_figures(rounds: int) -> list[Figure]:
    """Produce, CONSUME and STREAM over the Cursus wire, and how long a pushed record takes."""
    records = 4_000_000
    with fresh_broker() as broker:
        host, port = broker.addresses["cursus"]
        for topic in ("written", "read", "paced"):
            cursus_load.create(host, port, topic)
        cursus_load.produce_rate(host, port, "read", batches=records // 1000)
        latencies: list[tuple[float, float]] = []

        def median_latency() -> float:
            latencies.append(cursus_load.push_latency_ms(host, port, "paced"))
            return latencies[-1][0]

        found = [
            figure(
                "Cursus produce, 1000 x 100 B, acks=1, one connection",
                "records/s",
                lambda: cursus_load.produce_rate(host, port, "written", batches=10_000),
                aim=5e6,
                rounds=rounds,
            ),
            figure(
                "Cursus CONSUME, 100 B, one connection",
                "records/s",
                lambda: cursus_load.consume_rate(host, port, "read", records=records),
                aim=8e6,
                rounds=rounds,
            ),
            figure(
                "Cursus STREAM, 100 B, one connection",
                "records/s",
                lambda: cursus_load.stream_rate(host, port, "read", records=records),
                aim=8e6,
                rounds=rounds,
            ),
            figure(
                "Cursus push at 10,000 records/s, p50",
                "ms",
                median_latency,
                aim=1,
                more_is_better=False,
                rounds=rounds,
            ),
        ]
        highest = [p99 for _, p99 in latencies[1:]]
        middle = statistics.median(highest)
        name = "Cursus push at 10,000 records/s, p99"
        found.append(Figure(name, "ms", middle, min(highest), max(highest), 5, False))
    return found


def iggy_figures(rounds: int) -> list[Figure]:
    """Sends of 1,000 messages over the documented Iggy dialect, acknowledged, and polls of 1,000."""
    with fresh_broker() as broker:
        host, port = broker.addresses["iggy"]
        for topic in ("written", "read"):
            iggy_load.create(host, port, topic)
        iggy_load.send_rate(host, port, "read", requests=1_000)
        return [
            figure(
                "Iggy send, 1000 x 100 B, one connection",
                "records/s",
                lambda: iggy_load.send_rate(host, port, "written", requests=10_000),
                aim=5e6,
                rounds=rounds,
            ),
            figure(
                "Iggy send with ids, 1000 x 100 B, one connection",
                "records/s",
                lambda: iggy_load.send_rate(host, port, "written", requests=10_000, ids=True),
                rounds=rounds,
            ),
            figure(
                "Iggy poll, 1000 x 100 B, in memory, one connection",
                "records/s",
                lambda: iggy_load.poll_rate(host, port, "read", polls=10_000, requests_sent=1_000),
                aim=8e6,
                rounds=rounds,
            ),
        ]


def kafka07_figures(rounds: int) -> list[Figure]:
    """Sets of 200 and of single messages over the Kafka 0.7 wire, and fetches of a mebibyte."""
    with fresh_broker() as broker:
        host, port = broker.addresses["kafka07"]
        kafka07_load.produce_rate(host, port, "read", requests=20_000)
        return [
            figure(
                "Kafka 0.7 produce, 200 x 200 B, one connection",
                "records/s",
                lambda: kafka07_load.produce_rate(host, port, "written", requests=20_000),
                aim=4e6,
                rounds=rounds,
            ),
            figure(
                "Kafka 0.7 produce, single messages of 200 B, pipelined",
                "records/s",
                lambda: kafka07_load.produce_rate(host, port, "single", requests=500_000, messages=1),
                aim=400_000,
                rounds=rounds,
            ),
            figure(
                "Kafka 0.7 fetch of 1 MiB, 200 B, four under way",
                "records/s",
                lambda: kafka07_load.fetch_rate(host, port, "read", ahead=4),
                aim=10e6,
                rounds=rounds,
            ),
            figure(
                "Kafka 0.7 fetch of 1 MiB, 200 B, one at a time",
                "records/s",
                lambda: kafka07_load.fetch_rate(host, port, "read"),
                aim=10e6,
                rounds=rounds,
            ),
        ]


def iggy_today_figures(rounds: int) -> list[Figure]:
    """The same in today's dialect, and what the real SDK for Python reaches, where ``make dev`` has installed it."""
    with fresh_broker() as broker:
        host, port = broker.addresses["iggy"]
        iggy_today.create(host, port, "load")
        found = [
            figure(
                "Iggy of today, send, 1000 x 100 B, one connection",
                "records/s",
                lambda: iggy_today.send_rate(host, port, "load", requests=10_000),
                rounds=rounds,
            ),
            figure(
                "Iggy of today, poll, 1000 x 100 B, one connection",
                "records/s",
                lambda: iggy_today.poll_rate(host, port, "load", polls=10_000),
                rounds=rounds,
            ),
        ]
    for name, base in iggy_today.SDKS.items():
        if (iggy_today.INTEROP / name).is_dir():
            found += _sdk_figures(name, base)
    return found


def _sdk_figures(name: str, base: int) -> list[Figure]:
    with fresh_broker() as broker:
        host, port = broker.addresses["iggy"]
        rates = iggy_today.client_rates(host, port, iggy_today.INTEROP / name, base=base, requests=1_000)
    remark = "mostly the client's own work"
    titles = f"{name}, sends of 1000 x 100 B", f"{name}, polls of 1000 x 100 B"
    return [
        Figure(title, "records/s", rate, rate, rate, None, True, remark)
        for title, rate in zip(titles, rates, strict=True)
    ]


@app.default
def run(
    *,
    only: Annotated[
        str,
        Parameter(
            help="Parts whose names begin so, such as flux or spark (spark-read, spark-local, spark-write, spark-stream); all when empty."
        ),
    ] = "",
    rounds: int = ROUNDS,
    keep: Annotated[Path | None, Parameter(help="File to keep the result in, without its ending.")] = None,
) -> None:
    """Measure and print a table of medians.

    Example: python -m benchmarks --only flux --rounds 3
    """
    parts = {
        "produce": produce_figures,
        "sealing": sealing_figures,
        "fetch": fetch_figures,
        "flux": flux_figures,
        "cursus": cursus_figures,
        "iggy": iggy_figures,
        "iggy-today": iggy_today_figures,
        "kafka07": kafka07_figures,
        "spark-read": spark_load.read_figures,
        "spark-local": spark_load.local_figures,
        "spark-write": spark_load.write_figures,
        "spark-stream": spark_stream.stream_figures,
    }
    if only not in ("", *parts):
        raise ValueError(f"no such part only={only!r} parts={', '.join(parts)}")
    figures: list[Figure] = []
    for name, part in parts.items():
        if name.startswith(only):
            console.rule(name)
            figures += part(rounds)
    report(figures, command="make bench", keep=keep)


if __name__ == "__main__":
    app()
