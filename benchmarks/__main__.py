"""``python -m benchmarks``: measure produce, fetch, latency of single requests, and Spark reads on this machine."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection
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
    lone_requests,
    polywire_load,
    spark_load,
    spark_stream,
)
from benchmarks.measure import ROUNDS, Figure, console, figure, fresh_broker, rates, report, resident_bytes
from polywire.client import bulk

MEBI = 1024 * 1024
UNSEALED_BATCHES = 7_000  # of 104 kB: with those before they fit a journal file of 1 GiB
WARMING_BATCHES = 2_800  # until the default journal has all its files
app = App(name="benchmarks", help="Measure Polywire on this machine, over real sockets.")


TEN_BATCHES = 400_000  # of ten records each

_produce_rate = partial(polywire_load.produce_rate, batch=polywire_load.value_batch(1000, 100), batch_records=1000)
"""Records per second, 1000 of 100 bytes in a batch."""


def produce_figures(rounds: int) -> list[Figure]:
    """Produce over `polywire` to one partition and to a thousand, with the broker's memory."""
    with fresh_broker() as broker:
        host, port = broker.addresses["polywire"]
        connection = bulk.connect(f"polywire://{host}:{port}")
        name = "polywire produce, 1000 x 100 B,"

        def produce(topic: str, partitions: int) -> Callable[[], float]:
            connection.create_topic(topic, partitions)
            return partial(_produce_rate, host, port, topic, batches=20_000, partitions=partitions)

        (one,) = rates(rounds, (f"{name} 1 partition", produce("one", 1), 8e6))
        (thousand,) = rates(rounds, (f"{name} 1000 partitions", produce("thousand", 1000), 0.7 * one.median))
        connection.create_topic("small", 1)
        small = partial(
            polywire_load.produce_rate,
            host,
            port,
            "small",
            batch=polywire_load.value_batch(10, 100),
            batch_records=10,
            batches=TEN_BATCHES,
        )
        (ten,) = rates(rounds, ("polywire produce, 10 x 100 B, 1 partition", small, 5e6))
        memory = resident_bytes(broker.pid)
        peak, anonymous = memory["VmHWM"] / MEBI, memory["RssAnon"] / MEBI
        remark = "median is the peak with mapped files, min is anonymous memory at the end"
        return [
            one,
            thousand,
            ten,
            Figure("broker memory after that", "MiB", peak, anonymous, peak, 500, False, remark),
        ]


def sealing_figures(rounds: int) -> list[Figure]:
    """The cost of sealing: the same produce into a journal that can hold all of it, and into the default one."""

    def one_round(*options: str) -> float:
        with fresh_broker(*options) as broker:
            host, port = broker.addresses["polywire"]
            bulk.connect(f"polywire://{host}:{port}").create_topic("one", 1)
            _produce_rate(host, port, "one", batches=WARMING_BATCHES)
            return _produce_rate(host, port, "one", batches=UNSEALED_BATCHES)

    name = f"polywire produce, {UNSEALED_BATCHES // 1000} M records at once"
    (without,) = rates(rounds, (f"{name}, nothing sealed", partial(one_round, "--slot-mib", "1024"), None))
    return [without, *rates(rounds, (f"{name}, sealed", one_round, 0.8 * without.median))]


def fetch_figures(rounds: int) -> list[Figure]:
    """Range fetches of one gigabyte into Arrow: cached history, and history on disk only."""
    with fresh_broker() as broker:
        host, port = broker.addresses["polywire"]

        def filled(topic: str) -> str:
            bulk.connect(f"polywire://{host}:{port}").create_topic(topic, 1)
            _produce_rate(host, port, topic, batches=10_000)
            return topic

        cold = iter([filled(f"cold-{number}") for number in range(min(rounds, 3) + 1)])
        warm = filled("warm")
        for _ in range(2):  # later reads are cached
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
    """Single and pipelined FLUX produce, next to a bare echo."""
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
        pipelined = partial(flux_load.pipelined_rate, host, port, "pipelined", requests=1_000_000)
        return found + rates(rounds, ("FLUX pipelined produce, 100 B", pipelined, 5e5))


def small_figures(rounds: int) -> list[Figure]:
    """One record per request: the latency of a single one, and the rate of eight concurrent connections."""
    found: list[Figure] = []
    with fresh_broker() as broker:
        for wire, address in broker.addresses.items():
            if wire not in lone_requests.MADE:
                continue
            topic = f"small-{wire}"
            lone_requests.create(broker.addresses, wire, topic)
            lone = partial(lone_requests.latency_us, address, wire, topic, requests=2_000)
            beside = partial(lone_requests.rate, address, wire, topic, connections=8, requests=16_000)
            found.append(figure(f"{wire} lone produce and reply, p50", "us", lone, more_is_better=False, rounds=rounds))
            found.append(figure(f"{wire} produce, 8 connections, one record each", "requests/s", beside, rounds=rounds))
    return found


def cursus_figures(rounds: int) -> list[Figure]:
    """Produce, CONSUME and STREAM over Cursus, and the latency of a pushed record."""
    records = 4_000_000
    with fresh_broker() as broker:
        address = broker.addresses["cursus"]
        for topic in ("written", "read", "paced"):
            cursus_load.create(*address, topic)
        cursus_load.produce_rate(*address, "read", batches=records // 1000)
        latencies: list[tuple[float, float]] = []

        def median_latency() -> float:
            latencies.append(cursus_load.push_latency_ms(*address, "paced"))
            return latencies[-1][0]

        produce = partial(cursus_load.produce_rate, *address, "written", batches=10_000)
        consume = partial(cursus_load.consume_rate, *address, "read", records=records)
        stream = partial(cursus_load.stream_rate, *address, "read", records=records)
        found = rates(
            rounds,
            ("Cursus produce, 1000 x 100 B, acks=1, one connection", produce, 5e6),
            ("Cursus CONSUME, 100 B, one connection", consume, 8e6),
            ("Cursus STREAM, 100 B, one connection", stream, 8e6),
        )
        name = "Cursus push at 10,000 records/s,"
        found.append(figure(f"{name} p50", "ms", median_latency, aim=1, more_is_better=False, rounds=rounds))
        highest = [p99 for _, p99 in latencies[1:]]
        middle = statistics.median(highest)
        found.append(Figure(f"{name} p99", "ms", middle, min(highest), max(highest), 5, False))
    return found


def iggy_figures(rounds: int) -> list[Figure]:
    """Acknowledged sends of 1,000 messages in the documented Iggy dialect, and polls of 1,000."""
    with fresh_broker() as broker:
        address = broker.addresses["iggy"]
        for topic in ("written", "read"):
            iggy_load.create(*address, topic)
        iggy_load.send_rate(*address, "read", requests=1_000)
        send = partial(iggy_load.send_rate, *address, "written", requests=10_000)
        poll = partial(iggy_load.poll_rate, *address, "read", polls=10_000, requests_sent=1_000)
        return rates(
            rounds,
            ("Iggy send, 1000 x 100 B, one connection", send, 5e6),
            ("Iggy send with ids, 1000 x 100 B, one connection", partial(send, ids=True), None),
            ("Iggy poll, 1000 x 100 B, in memory, one connection", poll, 8e6),
        )


def kafka07_figures(rounds: int) -> list[Figure]:
    """Sets of 200 and of single messages over Kafka 0.7, and fetches of a mebibyte."""
    with fresh_broker() as broker:
        produce = partial(kafka07_load.produce_rate, *broker.addresses["kafka07"])
        fetch = partial(kafka07_load.fetch_rate, *broker.addresses["kafka07"], "read")
        produce("read", requests=20_000)
        single = partial(produce, "single", requests=500_000, messages=1)
        return rates(
            rounds,
            ("Kafka 0.7 produce, 200 x 200 B, one connection", partial(produce, "written", requests=20_000), 4e6),
            ("Kafka 0.7 produce, single messages of 200 B, pipelined", single, 4e5),
            ("Kafka 0.7 fetch of 1 MiB, 200 B, four under way", partial(fetch, ahead=4), 10e6),
            ("Kafka 0.7 fetch of 1 MiB, 200 B, one at a time", fetch, 10e6),
        )


def iggy_today_figures(rounds: int) -> list[Figure]:
    """The same in the current Iggy dialect, and the real Python SDK if ``make dev`` has installed it."""
    with fresh_broker() as broker:
        address = broker.addresses["iggy"]
        iggy_today.create(*address, "load")
        send = partial(iggy_today.send_rate, *address, "load", requests=10_000)
        poll = partial(iggy_today.poll_rate, *address, "load", polls=10_000)
        name = "1000 x 100 B, one connection"
        found = rates(
            rounds, (f"Iggy of today, send, {name}", send, None), (f"Iggy of today, poll, {name}", poll, None)
        )
    for sdk, base in iggy_today.SDKS.items():
        if (iggy_today.INTEROP / sdk).is_dir():
            found += _sdk_figures(sdk, base)
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


def beginning(parts: Collection[str], only: str) -> list[str]:
    """Return the parts whose names begin with this. Raises ValueError if there is none."""
    found = [name for name in parts if name.startswith(only)]
    if not found:
        raise ValueError(f"no such part only={only!r} parts={', '.join(parts)}")
    return found


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
    """Measure and print a table of medians. Example: python -m benchmarks --only flux --rounds 3"""
    parts = {
        "produce": produce_figures,
        "sealing": sealing_figures,
        "fetch": fetch_figures,
        "flux": flux_figures,
        "small": small_figures,
        "cursus": cursus_figures,
        "iggy": iggy_figures,
        "iggy-today": iggy_today_figures,
        "kafka07": kafka07_figures,
        "spark-read": spark_load.read_figures,
        "spark-local": spark_load.local_figures,
        "spark-write": spark_load.write_figures,
        "spark-stream": spark_stream.stream_figures,
    }
    figures: list[Figure] = []
    for name in beginning(parts, only):
        console.rule(name)
        figures += parts[name](rounds)
    report(figures, command="make bench", keep=keep)


if __name__ == "__main__":
    app()
