"""``python -m benchmarks.queues``: work queues of Polywire and of its peers, every row measured in turns in one run."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Final

from cyclopts import App, Parameter

from benchmarks.measure import console, spell
from benchmarks.peers.peer import Absent, Server
from benchmarks.peers.running import chosen, leave_out, start
from benchmarks.peers.table import Row, report
from benchmarks.peers.workloads import Round
from benchmarks.queues import clients, workloads
from benchmarks.queues.kafka import ApacheShares, PolywireShares
from benchmarks.queues.nats import NatsQueue
from benchmarks.queues.peer import QueuePeer
from benchmarks.queues.polywire import PolywireQueue
from benchmarks.queues.rabbitmq import RabbitQueue

app = App(name="benchmarks.queues", help="Compare work queues with those of other brokers, over real sockets.")
PEERS: Final[Sequence[QueuePeer]] = (PolywireQueue(), PolywireShares(), ApacheShares(), RabbitQueue(), NatsQueue())
CROWD: Final = 1_000  # workers of one group
SINGLE_CONNECTIONS: Final = 8


@dataclass(frozen=True, slots=True)
class Workload:
    """Rows that are measured together.

    titles: pairs of a row's name and its unit. measured: figures of one round, one for each row; none for a peer that
    cannot do it.
    """

    titles: Sequence[tuple[str, str]]
    measured: Callable[[QueuePeer, Server, str], Sequence[Round]]


def _workloads(scale: float) -> dict[str, Workload]:
    """Return the workloads by name, with ``scale`` times the usual work."""
    found: dict[str, Workload] = {}
    for workers, records in ((1, 100_000), (10, 100_000), (100, 30_000), (CROWD, 10_000)):
        prefetch = workloads.prefetch_of(workers)
        title = f"{workers:,} workers, prefetch {prefetch}" if workers > 1 else f"1 worker, prefetch {prefetch}"
        found[f"workers-{workers}"] = Workload([(title, "acks/s")], _acknowledged(workers, int(records * scale)))

    def single(peer: QueuePeer, server: Server, topic: str) -> Sequence[Round]:
        count = int(8_000 * scale)
        if not peer.confirms:
            return []
        return [workloads.acknowledged(peer, server, topic, count, workers=SINGLE_CONNECTIONS, single=True)]

    found["single"] = Workload([(f"one by one, confirmed, {SINGLE_CONNECTIONS} workers", "acks/s")], single)
    delays = [f"{CROWD:,} workers wait, {workloads.PACE:,} records/s, delivery {part}" for part in ("p50", "p99")]
    memory = f"memory of the broker with {CROWD:,} workers", "MiB"
    found["crowd"] = Workload(
        [*((title, "us") for title in delays), memory],
        lambda peer, server, topic: workloads.crowd(peer, server, topic, 5 * scale, workers=CROWD),
    )
    of_clients = int(50_000 * scale)
    found["client"] = Workload(
        [(f"client.queue in Python, {clients.CONCURRENCY} handlers", "acks/s")],
        lambda peer, server, topic: clients.python(peer, server, topic, of_clients),
    )
    found["java"] = Workload(
        [("KafkaShareConsumer, explicit", "acks/s")],
        lambda peer, server, topic: clients.java(peer, server, topic, 2 * of_clients),
    )
    return found


def _acknowledged(workers: int, records: int) -> Callable[[QueuePeer, Server, str], Sequence[Round]]:
    return lambda peer, server, topic: [workloads.acknowledged(peer, server, topic, records, workers=workers)]


@app.default
def run(
    *,
    only: Annotated[
        str, Parameter(help="Workloads whose names begin so: workers-1, workers-10, single, crowd, client, java.")
    ] = "",
    peers: Annotated[str, Parameter(help="Peers whose names contain one of these words, separated by commas.")] = "",
    rounds: Annotated[int, Parameter(help="Rounds of every workload, after a warm-up; all peers take turns.")] = 3,
    scale: Annotated[float, Parameter(help="How much work of the usual amount.")] = 1.0,
    keep: Annotated[Path | None, Parameter(help="File to keep the result in, without its ending.")] = None,
) -> None:
    """Measure and print a table of medians. Example: python -m benchmarks.queues --only workers --peers polywire,nats"""
    wanted = chosen(PEERS, peers)
    rows: list[Row] = []
    absent: dict[str, str] = {peer.name: "not requested" for peer in PEERS if peer not in wanted}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # peers end with this process
    for name, workload in _workloads(scale).items():
        if name.startswith(only):
            console.rule(name)
            rows += _measure(name, workload, wanted, rounds, absent)
    report(rows, absent, {}, keep, command=f"python -m benchmarks.queues --rounds {rounds} --scale {scale:g}")


def _measure(
    name: str, workload: Workload, wanted: Sequence[QueuePeer], rounds: int, absent: dict[str, str]
) -> list[Row]:
    """Measure the rows of one workload. Every peer is started for it, and has a turn in each round."""
    found = [Row(title, unit, unit == "acks/s") for title, unit in workload.titles]
    with ExitStack() as stack:
        running = start(stack, wanted, absent)
        for number, (peer, server) in product(range(rounds + 1), running):
            topic = f"{name}-{number}"
            peer.create(server.address, topic)
            try:
                figures = workload.measured(peer, server, topic)
            except Absent as reason:
                leave_out(name, reason, absent)
                return []
            _note(found, peer.name, figures, counted=number > 0)
    return found


def _note(rows: Sequence[Row], peer: str, figures: Sequence[Round], *, counted: bool) -> None:
    """Show one round, and store it unless it was a warm-up."""
    for row, one in zip(rows, figures, strict=False):
        costs = f" ({one.server_us:.1f} us of the server, generator {one.generator:.0%})"
        console.print(f"{peer}: {row.name}: {spell(one.value)} {row.unit}{costs}", highlight=False)
        if counted:
            row.rounds.setdefault(peer, []).append(one)


if __name__ == "__main__":
    app()
