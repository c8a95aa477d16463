"""Common parts of the benchmarks: a fresh broker, rounds, medians, the machine's description, and stored results.

A figure is the median of rounds after a warm-up, with minimum and maximum. The broker runs as users run it, in its own
process over a fresh data directory.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from polywire.testing.process import BrokerProcess

PROCESS_CLOCK = 2  # with a process id, names the clock of its processor time (clock_getcpuclockid, Linux)
ROUNDS = 5
REPORT_COLUMNS = 140  # if no terminal reports its width; a figure must never be truncated
console = Console()
if not console.is_terminal:
    console.width = REPORT_COLUMNS


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured figure: the median of its rounds, with the project's aim (None: only for comparison)."""

    name: str
    unit: str
    median: float
    low: float
    high: float
    aim: float | None
    more_is_better: bool
    remark: str = ""

    @property
    def reached(self) -> str:
        """Return whether the aim was reached, as a word."""
        if self.aim is None:
            return ""
        good = self.median >= self.aim if self.more_is_better else self.median <= self.aim
        return "yes" if good else "no"


def figure(
    name: str,
    unit: str,
    one_round: Callable[[], float],
    *,
    aim: float | None = None,
    more_is_better: bool = True,
    rounds: int = ROUNDS,
    remark: str = "",
) -> Figure:
    """Run a warm-up and ``rounds`` rounds of a workload; a round returns its figure in ``unit``."""
    with console.status(f"{name}: warming up"):
        one_round()
    values: list[float] = []
    for number in range(rounds):
        with console.status(f"{name}: round {number + 1} of {rounds}"):
            values.append(one_round())
    return figure_of(name, unit, values, aim=aim, more_is_better=more_is_better, remark=remark)


def figure_of(
    name: str,
    unit: str,
    values: Sequence[float],
    *,
    aim: float | None = None,
    more_is_better: bool = True,
    remark: str = "",
) -> Figure:
    """Return the figure of rounds that were run elsewhere."""
    found = Figure(name, unit, statistics.median(values), min(values), max(values), aim, more_is_better, remark)
    reported = f"{name}: {spell(found.median)} {unit}  ({spell(found.low)} to {spell(found.high)})"
    console.print(f"{reported}  {remark}" if remark else reported, highlight=False)
    return found


def rates(rounds: int, *workloads: tuple[str, Callable[[], float], float | None]) -> list[Figure]:
    """Return figures in records per second, of workloads as (name, one round, aim)."""
    return [figure(name, "records/s", one_round, aim=aim, rounds=rounds) for name, one_round, aim in workloads]


@contextmanager
def fresh_broker(*options: str) -> Iterator[BrokerProcess]:
    """Start a broker over a new data directory, which is deleted afterwards."""
    place = tempfile.TemporaryDirectory(prefix="polywire-bench-", dir=os.environ.get("POLYWIRE_BENCH_DIR"))
    with place as path, BrokerProcess(Path(path) / "data", *options) as broker:
        yield broker


def resident_bytes(pid: int) -> dict[str, int]:
    """Return the memory of a process from /proc: all of it, and the part that is not shared mapped files."""
    fields = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("VmHWM", "VmRSS", "RssAnon", "RssFile"):
            fields[name] = int(value.split()[0]) * 1024
    return fields


def processor_seconds(pid: int, *, with_children: bool = False) -> float:
    """Return the processor time of a process, user and system; with_children: with that of its ended children.

    Without children it is exact to nanoseconds. With them, it has steps of 10 ms. Raises OSError if the process has ended.
    """
    if not with_children:
        return time.clock_gettime(~pid << 3 | PROCESS_CLOCK)
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def descendants(pid: int) -> dict[int, str]:
    """Return every process below one, with its name."""
    below: dict[int, list[tuple[int, str]]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            head, _, rest = stat.read_text().rpartition(")")
        except OSError:  # it has ended meanwhile
            continue
        number, _, name = head.partition(" (")
        below.setdefault(int(rest.split()[1]), []).append((int(number), name))
    found: dict[int, str] = {}
    parents = [pid]
    while parents:
        children = below.get(parents.pop(), [])
        found.update(children)
        parents += [number for number, _ in children]
    return found


def machine() -> dict[str, str]:
    """Describe the machine."""
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "processor": model,
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory:.0f} GiB",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def spell(value: float) -> str:
    """Format a figure for people."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def report(figures: list[Figure], *, command: str, keep: Path | None) -> None:
    """Print the table, and store it as JSON and Markdown if ``keep`` names a file without its extension."""
    facts = machine()
    table = Table(title="Polywire on " + ", ".join(facts.values()))
    for column in ("workload", "median", "min", "max", "unit", "aim", "reached"):
        table.add_column(column, justify="right" if column in ("median", "min", "max", "aim") else "left", no_wrap=True)
    rows = [
        (f.name, spell(f.median), spell(f.low), spell(f.high), f.unit, "" if f.aim is None else spell(f.aim), f.reached)
        for f in figures
    ]
    for row in rows:
        table.add_row(*row)
    console.print(table)
    if keep is None:
        return
    keep.parent.mkdir(parents=True, exist_ok=True)
    keep.with_suffix(".json").write_text(
        json.dumps({"machine": facts, "command": command, "figures": [asdict(f) for f in figures]}, indent=2) + "\n"
    )
    lines = [
        f"# {keep.stem}",
        "",
        ", ".join(f"{name} {value}" for name, value in facts.items()),
        "",
        f"`{command}`",
        "",
    ]
    lines += [
        "| workload | median | min | max | unit | aim | reached | remark |",
        "|---|---:|---:|---:|---|---:|---|---|",
    ]
    lines += ["| " + " | ".join((*row, f.remark)) + " |" for row, f in zip(rows, figures, strict=True)]
    keep.with_suffix(".md").write_text("\n".join(lines) + "\n")
