"""``python -m benchmarks.peers``: one table of Polywire and its peers, every row measured in turns in one run."""

from __future__ import annotations

import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Final

from cyclopts import App, Parameter

from benchmarks.measure import console, spell
from benchmarks.peers import history, limits, workloads
from benchmarks.peers.chart import draw
from benchmarks.peers.iggy import Iggy
from benchmarks.peers.kafka import Kafka, KafkaWire
from benchmarks.peers.kafka_clients import java, librdkafka
from benchmarks.peers.limits import EPOLL_ECHO, UVLOOP_ECHO, Echo
from benchmarks.peers.nats import Nats
from benchmarks.peers.ours import Polywire, PolywireCursus, PolywireFlux, PolywireIggy, PolywireKafka
from benchmarks.peers.peer import Absent, Peer, Server
from benchmarks.peers.rabbitmq import RabbitMQ
from benchmarks.peers.redis import Redis
from benchmarks.peers.running import busy_machine, chosen, leave_out, start
from benchmarks.peers.table import LIMIT, Row, report
from benchmarks.peers.tansu import Tansu
from benchmarks.peers.workloads import Client, Round

app = App(name="benchmarks.peers", help="Compare Polywire with other brokers on this machine, over real sockets.")
PEERS: Final[Sequence[Peer]] = (
    Polywire(),
    PolywireKafka(),
    PolywireCursus(),
    PolywireFlux(),
    PolywireIggy(),
    Nats(),
    Redis(),
    Redis("Valkey Streams", "valkey-server", "valkey"),
    RabbitMQ(),
    Kafka(),
    Tansu(),
    Iggy(),
)
HISTORIANS: Final = (Polywire, PolywireKafka, PolywireCursus, RabbitMQ, Kafka)
"""Peers that read history from files: the others keep it in memory, or read record by record."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A group of rows that are measured together.

    titles: its rows. measured: figures of one round, one for each row; none for a peer that cannot do it. once: it is
    neither repeated nor warmed up, because connections are measured while memory grows. echoes: programs measured like
    brokers; limit: the machine's maximum, in the unit of each row.
    """

    titles: Sequence[str]
    unit: str
    more_is_better: bool
    measured: Callable[[Peer, Server, str], Sequence[Round]]
    once: bool = False
    echoes: Sequence[Echo] = ()
    limit: tuple[str, Callable[[], Sequence[Round]]] | None = None


def _workloads(scale: float, place: Path) -> dict[str, Workload]:
    """Return the workloads by name, with ``scale`` times the usual work; files of limits are written to ``place``."""
    return {**_batched(scale), **_small(scale), **_historic(scale, place), **_of_clients(scale)}


def _streamed(*value_bytes: int) -> tuple[str, Callable[[], Sequence[Round]]]:
    """Measure the throughput of loopback, in records of the rows' sizes."""

    def measured() -> Sequence[Round]:
        speed = limits.stream_bytes_per_s()
        return [Round(speed / size) for size in value_bytes]

    return f"{LIMIT}a stream over loopback", measured


def _batched(scale: float) -> dict[str, Workload]:
    batched = int(2_000 * scale) * workloads.BATCH

    def batches(peer: Peer, server: Server, topic: str) -> Sequence[Round]:
        found = [workloads.produce(peer, server, topic, batched)]
        if peer.pushes:
            found.append(workloads.consume(peer, server, topic, batched))
        return found

    def wide(peer: Peer, server: Server, topic: str) -> Sequence[Round]:
        if not isinstance(peer, KafkaWire):
            return []
        peer.create(server.address, f"{topic}-wide", workloads.PARTITIONS)
        return [workloads.produce_widely(peer, server, f"{topic}-wide", batched)]

    batch = f"{workloads.BATCH} x 100 B"
    titles = [f"produce, {batch}, {workloads.WINDOW} ahead", "consume what was just written, 100 B"]
    widely = [f"produce, {batch}, to {workloads.PARTITIONS} partitions in turn"]
    return {
        "batches": Workload(titles, "records/s", True, batches, limit=_streamed(100, 100)),
        "wide": Workload(widely, "records/s", True, wide, limit=_streamed(100)),
    }


def _small(scale: float) -> dict[str, Workload]:
    small = int(16_000 * scale)

    def alone(peer: Peer, server: Server, topic: str) -> Sequence[Round]:
        return [workloads.lone_us(peer, server, topic, small // 4)]

    def eight(peer: Peer, server: Server, topic: str) -> Sequence[Round]:
        return [workloads.side_by_side(peer, server, topic, small)]

    def paced(peer: Peer, server: Server, topic: str) -> Sequence[Round]:
        return workloads.end_to_end_us(peer, server, topic, 3 * scale) if peer.pushes else []

    def idle(peer: Peer, server: Server, topic: str) -> Sequence[Round]:
        return [workloads.idle_kib(peer, server, topic)]

    ends = [f"end to end at {workloads.PACE:,}/s, {part}" for part in ("p50", "p99")]
    echoes = (EPOLL_ECHO, UVLOOP_ECHO)
    return {
        "lone": Workload(["lone produce and confirmation, p50"], "us", False, alone, echoes=echoes),
        "eight": Workload(["8 connections, one record each"], "records/s", True, eight, echoes=echoes),
        "paced": Workload(ends, "us", False, paced, echoes=(EPOLL_ECHO,)),
        "idle": Workload(["memory of a resting connection"], "KiB", False, idle, once=True),
    }


def _historic(scale: float, place: Path) -> dict[str, Workload]:
    def of(
        measured: Callable[[Peer, Server, str, bytes, float], Sequence[Round]], size: int
    ) -> Callable[[Peer, Server, str], Sequence[Round]]:
        def one(peer: Peer, server: Server, topic: str) -> Sequence[Round]:
            return measured(peer, server, topic, b"x" * size, scale) if isinstance(peer, HISTORIANS) else []

        return one

    def read(size: int) -> tuple[str, Callable[[], Sequence[Round]]]:
        return f"{LIMIT}a file read in order", lambda: [Round(limits.read_bytes_per_s(place) / size)]

    found: dict[str, Workload] = {}
    for name, size in (("100 B", 100), ("1 KiB", 1024)):
        key = name.replace(" ", "").lower()
        titles = (
            f"read from the journal, {name}",
            f"read of what was sealed a moment ago, {name}",
            f"the same, third time, {name}",
        )
        streamed = _streamed(*[size] * len(titles))
        found[f"sealed-{key}"] = Workload(titles, "records/s", True, of(history.sealed, size), limit=streamed)
        first = [f"first read from the disk, {name}"]
        found[f"cold-{key}"] = Workload(first, "records/s", True, of(history.cold, size), limit=read(size))
    return found


def _of_clients(scale: float) -> dict[str, Workload]:
    of_clients = int(1_000_000 * scale)

    def client(asked: Client) -> Callable[[Peer, Server, str], Sequence[Round]]:
        def measured(peer: Peer, server: Server, topic: str) -> Sequence[Round]:
            return workloads.client_rates(asked, server, topic, of_clients) if isinstance(peer, KafkaWire) else []

        return measured

    titles = ["librdkafka from Python, produce 100 B", "librdkafka from Python, consume"]
    tools = ["Kafka's producer-perf-test, 100 B", "Kafka's consumer-perf-test"]
    return {
        "librdkafka": Workload(titles, "records/s", True, client(librdkafka)),
        "java": Workload(tools, "records/s", True, client(java)),
    }


@app.default
def run(
    *,
    only: Annotated[
        str,
        Parameter(
            help="Workloads whose names begin so: batches, wide, lone, eight, paced, idle, sealed-100b, sealed-1kib, cold-100b, cold-1kib,"
            " librdkafka, java."
        ),
    ] = "",
    peers: Annotated[
        str,
        Parameter(
            help="Peers whose names contain one of these words, separated by commas: polywire, nats, redis, valkey,"
            " rabbitmq, kafka, tansu, iggy."
        ),
    ] = "",
    rounds: Annotated[int, Parameter(help="Rounds of every workload; all peers take turns in each.")] = 5,
    scale: Annotated[float, Parameter(help="How much work of the usual amount.")] = 1.0,
    busy: Annotated[
        bool, Parameter(help="Keep every core busy with other work. Compare the server's processor time then.")
    ] = False,
    keep: Annotated[Path | None, Parameter(help="File to keep the result in, without its ending.")] = None,
) -> None:
    """Measure and print a table of medians. Example: python -m benchmarks.peers --only batches --peers kafka,nats"""
    wanted = chosen(PEERS, peers)
    rows: list[Row] = []
    absent: dict[str, str] = {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # peers end with this process
    with ExitStack() as stack:
        running = start(stack, wanted, absent)
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="polywire-peer-")))
        measured = {name: one for name, one in _workloads(scale, place).items() if name.startswith(only)}
        for name, workload in measured.items():
            console.rule(name)
            echoes = start(stack, workload.echoes, absent)
            with busy_machine() if busy else nullcontext():
                rows += _measure(name, workload, [*running, *echoes], rounds, absent)
        found = _limits(place)
    report(rows, absent, found, keep)
    if keep is not None and rows:
        draw(rows, keep.with_suffix(".svg"))


def _limits(place: Path) -> dict[str, str]:
    """Return the machine's limits as text; the median of three."""
    measured: dict[str, Callable[[], float]] = {
        "memory copy": limits.copy_bytes_per_s,
        "loopback": limits.stream_bytes_per_s,
        "file read in order": partial(limits.read_bytes_per_s, place),
    }
    return {name: f"{statistics.median(one() for _ in range(3)) / 1e9:.1f} GB/s" for name, one in measured.items()}


def _measure(
    name: str, workload: Workload, running: Sequence[tuple[Peer, Server]], rounds: int, absent: dict[str, str]
) -> list[Row]:
    """Measure the rows of one workload, every peer in turn in each round."""
    found = [Row(title, workload.unit, workload.more_is_better) for title in workload.titles]
    for number in range(1 if workload.once else rounds + 1):
        topic = f"{name}-{number}"
        counted = number > 0 or workload.once
        for peer, server in running:
            peer.create(server.address, topic)
            try:
                figures = workload.measured(peer, server, topic)
            except Absent as reason:
                leave_out(name, reason, absent)
                return []
            _note(found, peer.name, figures, counted=counted)
        if workload.limit is not None:
            limit, measured = workload.limit
            _note(found, limit, measured(), counted=counted)
    return found


def _note(rows: Sequence[Row], peer: str, figures: Sequence[Round], *, counted: bool) -> None:
    """Show one round, and store it unless it was a warm-up."""
    for row, one in zip(rows, figures, strict=False):
        console.print(f"{peer}: {row.name}: {spell(one.value)} {row.unit}", highlight=False)
        if counted:
            row.rounds.setdefault(peer, []).append(one)


if __name__ == "__main__":
    app()
