"""``python -m benchmarks.peers``: one table of Polywire and its peers, every row measured in turns in one run."""

from __future__ import annotations

import json
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Final

from cyclopts import App, Parameter
from rich.table import Table

from benchmarks.measure import console, machine, spell
from benchmarks.peers import workloads
from benchmarks.peers.kafka import Kafka, KafkaWire
from benchmarks.peers.kafka_clients import java, librdkafka
from benchmarks.peers.nats import Nats
from benchmarks.peers.ours import Polywire, PolywireCursus, PolywireFlux, PolywireKafka
from benchmarks.peers.peer import Absent, Peer, Server
from benchmarks.peers.rabbitmq import RabbitMQ
from benchmarks.peers.redis import Redis
from benchmarks.peers.workloads import Client, Round

app = App(name="benchmarks.peers", help="Compare Polywire with other brokers on this machine, over real sockets.")
OURS: Final = "Polywire"
PEERS: Final[Sequence[Peer]] = (
    Polywire(),
    PolywireKafka(),
    PolywireCursus(),
    PolywireFlux(),
    Nats(),
    Redis(),
    Redis("Valkey Streams", "valkey-server", "valkey"),
    RabbitMQ(),
    Kafka(),
)


@dataclass(slots=True)
class Row:
    """One workload's rounds by peer."""

    name: str
    unit: str
    more_is_better: bool
    rounds: dict[str, list[Round]] = field(default_factory=dict)

    def median(self, peer: str) -> float:
        """The figure of a peer."""
        return statistics.median(one.value for one in self.rounds[peer])

    def ratio(self) -> float | None:
        """How many times better our best wire is than the best of the others; None without one of both."""
        pick = max if self.more_is_better else min
        ours = [self.median(peer) for peer in self.rounds if peer.startswith(OURS)]
        others = [self.median(peer) for peer in self.rounds if not peer.startswith(OURS)]
        if not ours or not others:
            return None
        return pick(ours) / pick(others) if self.more_is_better else pick(others) / pick(ours)


@dataclass(frozen=True, slots=True)
class Workload:
    """What is measured together. titles: its rows. measured: figures of one round, one for each row; none for a peer that cannot do it.
    once: it is not repeated, and not warmed up: what a connection costs is seen while memory grows."""

    titles: Sequence[str]
    unit: str
    more_is_better: bool
    measured: Callable[[Peer, Server, str], Sequence[Round]]
    once: bool = False


def _workloads(scale: float) -> dict[str, Workload]:
    """By name, with ``scale`` times the usual work."""
    batched, small, of_clients = int(2_000 * scale) * workloads.BATCH, int(16_000 * scale), int(1_000_000 * scale)

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

    def alone(peer: Peer, server: Server, topic: str) -> Sequence[Round]:
        return [workloads.lone_us(peer, server, topic, small // 4)]

    def eight(peer: Peer, server: Server, topic: str) -> Sequence[Round]:
        return [workloads.side_by_side(peer, server, topic, small)]

    def paced(peer: Peer, server: Server, topic: str) -> Sequence[Round]:
        return workloads.end_to_end_us(peer, server, topic, 3 * scale) if peer.pushes else []

    def idle(peer: Peer, server: Server, topic: str) -> Sequence[Round]:
        return [workloads.idle_kib(peer, server, topic)]

    def client(asked: Client) -> Callable[[Peer, Server, str], Sequence[Round]]:
        def measured(peer: Peer, server: Server, topic: str) -> Sequence[Round]:
            return workloads.client_rates(asked, server, topic, of_clients) if isinstance(peer, KafkaWire) else []

        return measured

    batch = f"{workloads.BATCH} x 100 B"
    ends = [f"end to end at {workloads.PACE:,}/s, {part}" for part in ("p50", "p99")]
    return {
        "batches": Workload(
            [f"produce, {batch}, {workloads.WINDOW} ahead", "consume what was just written, 100 B"],
            "records/s",
            True,
            batches,
        ),
        "wide": Workload([f"produce, {batch}, to {workloads.PARTITIONS} partitions in turn"], "records/s", True, wide),
        "lone": Workload(["lone produce and confirmation, p50"], "us", False, alone),
        "eight": Workload(["8 connections, one record each"], "records/s", True, eight),
        "paced": Workload(ends, "us", False, paced),
        "idle": Workload(["memory of a resting connection"], "KiB", False, idle, once=True),
        "librdkafka": Workload(
            ["librdkafka from Python, produce 100 B", "librdkafka from Python, consume"],
            "records/s",
            True,
            client(librdkafka),
        ),
        "java": Workload(
            ["Kafka's producer-perf-test, 100 B", "Kafka's consumer-perf-test"], "records/s", True, client(java)
        ),
    }


@app.default
def run(
    *,
    only: Annotated[
        str,
        Parameter(help="Workloads whose names begin so: batches, wide, lone, eight, paced, idle, librdkafka, java."),
    ] = "",
    peers: Annotated[str, Parameter(help="Peers whose names contain one of these words, separated by commas.")] = "",
    rounds: Annotated[int, Parameter(help="Rounds of every workload; all peers take turns in each.")] = 5,
    scale: Annotated[float, Parameter(help="How much work of the usual amount.")] = 1.0,
    keep: Annotated[Path | None, Parameter(help="File to keep the result in, without its ending.")] = None,
) -> None:
    """Measure and print a table of medians.

    Example: python -m benchmarks.peers --only batches --peers kafka,nats
    """
    words = [word.strip().lower() for word in peers.split(",") if word.strip()]
    wanted = [peer for peer in PEERS if not words or any(word in peer.name.lower() for word in words)]
    rows: list[Row] = []
    absent: dict[str, str] = {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # peers end with this process
    with ExitStack() as stack:
        running = _start(stack, wanted, absent)
        for name, workload in _workloads(scale).items():
            if name.startswith(only):
                console.rule(name)
                rows += _measure(name, workload, running, rounds, absent)
    _report(rows, absent, keep)


def _start(stack: ExitStack, wanted: Sequence[Peer], absent: dict[str, str]) -> list[tuple[Peer, Server]]:
    """All that can be started; ``absent`` is told of the others."""
    running: list[tuple[Peer, Server]] = []
    for peer in wanted:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="polywire-peer-")))
        try:
            running.append((peer, stack.enter_context(peer.running(place))))
        except Absent as reason:
            _leave_out(peer.name, reason, absent)
    return running


def _measure(
    name: str, workload: Workload, running: Sequence[tuple[Peer, Server]], rounds: int, absent: dict[str, str]
) -> list[Row]:
    """The rows of one workload, every peer in turn in each round."""
    found = [Row(title, workload.unit, workload.more_is_better) for title in workload.titles]
    turns = [(number, *one) for number in range(1 if workload.once else rounds + 1) for one in running]
    for number, peer, server in turns:
        topic = f"{name}-{number}"
        peer.create(server.address, topic)
        try:
            figures = workload.measured(peer, server, topic)
        except Absent as reason:
            _leave_out(name, reason, absent)
            return []
        for row, one in zip(found, figures, strict=False):
            console.print(f"{peer.name}: {row.name}: {spell(one.value)} {row.unit}", highlight=False)
            if number or workload.once:  # else the first warms up
                row.rounds.setdefault(peer.name, []).append(one)
    return found


def _leave_out(name: str, reason: Absent, absent: dict[str, str]) -> None:
    absent[name] = str(reason)
    console.print(f"{name} is left out: {reason}", style="bold red", highlight=False)


def _report(rows: Sequence[Row], absent: dict[str, str], keep: Path | None) -> None:
    facts = machine()
    lines = [
        f"# {keep.stem}" if keep else "# Peers",
        "",
        ", ".join(f"{name} {value}" for name, value in facts.items()),
        "",
    ]
    lines += ["`make bench-peers`", ""]
    lines += [f"* {name} was left out: {reason}" for name, reason in absent.items()] + [""] * bool(absent)
    lines += ["| workload | peer | median | min | max | unit | server us/record | generator | ours to the best peer |"]
    lines += ["|---|---|---:|---:|---:|---|---:|---:|---:|"]
    table = Table(title="Polywire and its peers on " + ", ".join(facts.values()))
    for column in ("workload", "peer", "median", "min", "max", "unit", "server us", "generator", "ratio"):
        named = column in ("workload", "peer", "unit")
        table.add_column(column, justify="left" if named else "right", no_wrap=not named)
    for row in rows:
        for peer, found in row.rounds.items():
            values = [one.value for one in found]
            ratio = row.ratio() if peer.startswith(OURS) else None
            cells = (
                row.name,
                peer,
                spell(statistics.median(values)),
                spell(min(values)),
                spell(max(values)),
                row.unit,
                spell(statistics.median(one.server_us for one in found)),
                f"{statistics.median(one.generator for one in found):.0%}",
                "" if ratio is None else f"{ratio:.2f}",
            )
            table.add_row(*cells)
            lines.append("| " + " | ".join(cells) + " |")
    console.print(table)
    if keep is None:
        return
    keep.parent.mkdir(parents=True, exist_ok=True)
    keep.with_suffix(".md").write_text("\n".join(lines) + "\n")
    kept = {"machine": facts, "absent": absent, "rows": [asdict(row) for row in rows]}
    keep.with_suffix(".json").write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    app()
