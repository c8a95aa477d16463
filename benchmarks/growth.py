"""``python -m benchmarks.growth``: Polywire's figures by size of data, as tables and charts.

One broker serves all sizes of a curve, and the sizes take turns in every round, so that other load affects all alike.
"""

from __future__ import annotations

import resource
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from cyclopts import App, Parameter

from benchmarks.measure import Figure, console, figure_of, fresh_broker, report
from benchmarks.peers.ours import Polywire, PolywireFlux
from benchmarks.peers.peer import Server
from benchmarks.peers.workloads import side_by_side
from benchmarks.polywire_load import produce_rate, value_batch
from benchmarks.start import GIGA, MEBI, make_up, started
from polywire.client import bulk

app = App(
    name="benchmarks.growth", help="Measure how Polywire's figures change as partitions, connections and data grow."
)
PARTITIONS: Final = (1, 10, 100, 1000)
CONNECTIONS: Final = (1, 8, 64, 512, 4096, 10_000)
GIGABYTES: Final = (1, 10, 100)
RECORDS: Final = 100  # per connection
REQUESTS: Final = 16_000  # in total, at least
PARTITIONS_OF_DATA: Final = 10_000
SLOT_BYTES: Final = 64 * MEBI


@dataclass(frozen=True, slots=True)
class Point:
    """The measurements at one size: a value per round."""

    size: int
    values: Sequence[float]


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a chart."""

    name: str
    unit: str
    points: Sequence[Point]
    more_is_better: bool = True


def over_partitions(rounds: int, scale: float) -> list[Curve]:
    """Measure records per second of one connection that writes to all partitions in turn, by batch size."""
    found = []
    with fresh_broker() as broker:
        host, port = broker.addresses["polywire"]
        connection = bulk.connect(f"polywire://{host}:{port}")
        for partitions in PARTITIONS:
            connection.create_topic(f"wide-{partitions}", partitions)
        for records, batches in ((1000, 10_000), (10, 50_000)):
            batch = value_batch(records, 100)

            def rate(
                partitions: int, batch: bytes = batch, records: int = records, batches: int = int(batches * scale)
            ) -> float:
                topic = f"wide-{partitions}"
                return produce_rate(
                    host, port, topic, batch=batch, batch_records=records, batches=batches, partitions=partitions
                )

            points = _in_turns(PARTITIONS, rounds, rate)
            found.append(Curve(f"produce, {records} x 100 B a batch", "records/s", points))
    return found


def over_connections(rounds: int, scale: float) -> list[Curve]:
    """Measure records per second of connections that each send one record and wait for its confirmation."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    sizes = [size for size in CONNECTIONS if size <= hard - 200]
    found = []
    for peer in (PolywireFlux(), Polywire()):
        with tempfile.TemporaryDirectory(prefix="polywire-growth-") as place, peer.running(Path(place)) as server:
            peer.create(server.address, "many")

            def rate(connections: int, peer: PolywireFlux | Polywire = peer, server: Server = server) -> float:
                requests = int(max(REQUESTS, connections * RECORDS / 10) * scale)
                return side_by_side(peer, server, "many", max(requests, connections), connections=connections).value

            found.append(Curve(f"{peer.wire}, one record a request", "records/s", _in_turns(sizes, rounds, rate)))
    return found


def over_data(rounds: int, scale: float) -> list[Curve]:
    """Measure seconds and memory of a start on a generated log of that many gigabytes in ten thousand partitions."""
    seconds, memory = [], []
    for gigabytes in GIGABYTES:
        place = Path(tempfile.mkdtemp(prefix="polywire-growth-"))
        try:
            make_up(place / "data", int(gigabytes * GIGA * scale), PARTITIONS_OF_DATA, SLOT_BYTES)
            starts = [started(place / "data") for _ in range(rounds)]
        finally:
            shutil.rmtree(place)
        seconds.append(Point(gigabytes, [one.seconds for one in starts]))
        memory.append(Point(gigabytes, [one.memory["VmHWM"] / MEBI for one in starts]))
    return [
        Curve("start until it answers", "s", seconds, more_is_better=False),
        Curve("largest memory of the start", "MiB", memory, more_is_better=False),
    ]


CURVES: Final[dict[str, tuple[str, Callable[[int, float], list[Curve]]]]] = {
    "partitions": ("partitions", over_partitions),
    "connections": ("connections", over_connections),
    "data": ("gigabytes", over_data),
}
"""By name: what grows, and the measurement."""


def _in_turns(sizes: Sequence[int], rounds: int, measured: Callable[[int], float]) -> list[Point]:
    """Measure every size once a round; the first round is a warm-up."""
    values: dict[int, list[float]] = {size: [] for size in sizes}
    for number in range(rounds + 1):
        for size in sizes:
            with console.status(f"round {number} of {rounds}: {size:,}"):
                value = measured(size)
            if number:
                values[size].append(value)
    return [Point(size, values[size]) for size in sizes]


def _figures(curve: Curve, grows: str) -> list[Figure]:
    return [
        figure_of(
            f"{curve.name}, {point.size:,} {grows}", curve.unit, point.values, more_is_better=curve.more_is_better
        )
        for point in curve.points
    ]


def draw(name: str, grows: str, curves: Sequence[Curve], figures: Sequence[Sequence[Figure]], file: Path) -> None:
    """Draw a chart for each unit, sizes on a logarithmic axis, with the spread of the rounds."""
    from matplotlib.figure import Figure as Drawing

    units = list(dict.fromkeys(curve.unit for curve in curves))
    drawing = Drawing(figsize=(7, 3.2 * len(units)), layout="constrained")
    for panel, unit in zip(drawing.subplots(len(units), squeeze=False)[:, 0], units, strict=True):
        for curve, measured in zip(curves, figures, strict=True):
            if curve.unit != unit:
                continue
            sizes = [point.size for point in curve.points]
            panel.plot(sizes, [one.median for one in measured], marker="o", label=curve.name)
            panel.fill_between(sizes, [one.low for one in measured], [one.high for one in measured], alpha=0.15)
        panel.set(xscale="log", xlabel=grows, ylabel=unit, ylim=(0, None), title=f"{unit} over {name}")
        panel.grid(alpha=0.3)
        panel.legend()
    file.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(file)
    console.print(f"drawn: {file}")


@app.default
def run(
    *,
    only: Annotated[str, Parameter(help="Curves whose names begin so: partitions, connections, data.")] = "",
    rounds: Annotated[int, Parameter(help="Rounds of every size; the sizes of a curve take turns.")] = 3,
    scale: Annotated[float, Parameter(help="How much work, and how much data, of the usual amount.")] = 1.0,
    keep: Annotated[
        Path | None, Parameter(help="File to keep tables in, without its ending; charts lie beside it.")
    ] = None,
) -> None:
    """Measure, print a table of each curve, and draw it next to the stored result."""
    chosen = {name: asked for name, asked in CURVES.items() if name.startswith(only)}
    if not chosen:
        raise SystemExit(f"no curve begins with {only!r}: there are {', '.join(CURVES)}")
    command = (
        "python -m benchmarks.growth" + (f" --only {only}" if only else "") + f" --rounds {rounds} --scale {scale:g}"
    )
    found: list[Figure] = []
    for name, (grows, measure) in chosen.items():
        curves = measure(rounds, scale)
        figures = [_figures(curve, grows) for curve in curves]
        found += [one for of_curve in figures for one in of_curve]
        if keep is not None:
            draw(name, grows, curves, figures, keep.with_name(f"{keep.name}-{name}.svg"))
    report(found, command=command, keep=keep)


if __name__ == "__main__":
    app()
