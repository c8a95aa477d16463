"""Instructions of the broker for the same work, of a commit and of the working tree.

Run: ``python -m benchmarks.instructions [--against COMMIT] [--only BEGINNING] [--quick] [--limit 1.05] [--keep DATE]``

The comparison is with the last commit that stored a result, so that many small losses add up until a new result is
stored.

Each broker runs under callgrind, with the same loads from outside, and the counts are read between passes. Other load
of the machine only changes how much periodic work falls into a pass, and how many requests the broker finds at once.
The kernel's work and waiting are not counted, so a change that saves system calls shows less here than its worth. The
broker does not poll before it sleeps (decision 0112), because that would count elapsed time.

It exits with 1 if a load takes more than ``limit`` times the commit's instructions, and with 0 and a clear message
without valgrind.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from rich.table import Table

from benchmarks import (
    cursus_load,
    flux_load,
    iggy_load,
    iggy_today,
    kafka07_load,
    kafka_polls,
    lone_requests,
    polywire_load,
)
from benchmarks.measure import console, machine
from benchmarks.peers import ours
from benchmarks.peers.peer import Peer
from benchmarks.peers.workloads import follow
from polywire.build_info import compiled_from
from polywire.testing.process import WIRES, lasting_port

HERE: Final = Path(__file__).resolve().parents[1]
KEPT: Final = HERE / "build" / "instructions"  # trees of commits, built
READY_S: Final = 900.0  # half a minute of processor time on a busy machine
PASSES: Final = 3  # counted, after one that is not
LIMIT: Final = 1.05
REPEATS: Final = 2  # how often a load that seems slower is counted again
BATCH_RECORDS: Final = 1_000
SMALL_RECORDS: Final = 10
RESULT: Final = "-instructions.md"
BUILT_FROM: Final = ("src", "setup.py", "pyproject.toml", "README.md", "LICENSE")
MADE_IN: Final = Path("build") / "lib"  # where modules are linked before they are copied next to their sources

Addresses = Mapping[str, tuple[str, int]]

FOLLOWED: Final[Mapping[str, Peer]] = {
    "polywire": ours.Polywire(),
    "kafka": ours.PolywireKafka(),
    "cursus": ours.PolywireCursus(),
}
"""The protocols in which a consumer waits for records."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One load. count: requests of a pass. quick: whether the short form has it."""

    name: str
    count: int
    prepare: Callable[[Addresses], object]
    run: Callable[[Addresses, int], object]
    quick: bool = False


def workloads() -> Iterator[Workload]:
    """Return every load, small requests first."""
    for wire in lone_requests.MADE:
        for connections in (1, 8):
            topic = f"lone-{wire}-{connections}"
            yield Workload(
                f"{wire}-lone-{connections}",
                400,
                partial(lone_requests.create, wire=wire, topic=topic),
                partial(_lone, wire, topic, connections),
                quick=True,
            )
    for wire, peer in FOLLOWED.items():
        yield Workload(f"{wire}-follow", 400, _nothing, partial(_follow, wire, peer, itertools.count()), quick=True)
    yield Workload("flux-pipelined", 5_000, _nothing, _flux_pipelined, quick=True)
    yield Workload("polywire-produce", 100, partial(_create, topic="bulk"), _polywire_produce, quick=True)
    yield Workload("polywire-ten", 2_000, partial(_create, topic="ten"), _polywire_ten, quick=True)
    yield Workload("polywire-fetch", 800, _nothing, _polywire_fetch, quick=True)
    yield Workload("cursus-produce", 100, lambda at: cursus_load.create(*at["cursus"], "written"), _cursus_produce)
    yield Workload("iggy-send", 100, lambda at: iggy_load.create(*at["iggy"], "sent"), _iggy_send)
    yield Workload("iggy-poll", 100, _nothing, _iggy_poll)
    yield Workload("iggy-today-send", 100, lambda at: iggy_today.create(*at["iggy"], "load"), _iggy_today_send)
    yield Workload("kafka-poll-1000", 50, lambda at: kafka_polls.create(*at["kafka"], "polled"), _kafka_poll)
    yield Workload("kafka07-produce", 100, _nothing, _kafka07_produce)
    yield Workload("kafka07-fetch", 100, _nothing, _kafka07_fetch)


def _nothing(at: Addresses) -> None:
    """Do nothing: the load creates what it needs, or reads what an earlier one has left."""


def _create(at: Addresses, topic: str) -> None:
    lone_requests.create(at, "polywire", topic)


def _lone(wire: str, topic: str, connections: int, at: Addresses, count: int) -> None:
    lone_requests.rate(at[wire], wire, topic, connections=connections, requests=count)


def _follow(wire: str, peer: Peer, numbers: Iterator[int], at: Addresses, count: int) -> None:
    host, port = at["polywire"]
    ours.URLS[at[wire]] = f"polywire://{host}:{port}"
    topic = f"follow-{wire}-{next(numbers)}"
    peer.create(at[wire], topic)
    follow(peer, at[wire], topic, count)


def _flux_pipelined(at: Addresses, count: int) -> None:
    flux_load.pipelined_rate(*at["flux"], "pipelined", requests=count)


def _polywire_produce(at: Addresses, count: int) -> None:
    batch = polywire_load.value_batch(BATCH_RECORDS, 100)
    polywire_load.produce_rate(*at["polywire"], "bulk", batch=batch, batch_records=BATCH_RECORDS, batches=count)


def _polywire_ten(at: Addresses, count: int) -> None:
    batch = polywire_load.value_batch(SMALL_RECORDS, 100)
    polywire_load.produce_rate(*at["polywire"], "ten", batch=batch, batch_records=SMALL_RECORDS, batches=count)


def _polywire_fetch(at: Addresses, count: int) -> None:
    for _ in range(count // 100):  # so that the broker's work once a second hardly counts
        polywire_load.fetch_rate(*at["polywire"], "bulk")


def _cursus_produce(at: Addresses, count: int) -> None:
    cursus_load.produce_rate(*at["cursus"], "written", batches=count)


def _iggy_send(at: Addresses, count: int) -> None:
    iggy_load.send_rate(*at["iggy"], "sent", requests=count)


def _iggy_poll(at: Addresses, count: int) -> None:
    iggy_load.poll_rate(*at["iggy"], "sent", polls=count, requests_sent=count)


def _iggy_today_send(at: Addresses, count: int) -> None:
    iggy_today.send_rate(*at["iggy"], "load", requests=count)


def _kafka_poll(at: Addresses, count: int) -> None:
    kafka_polls.poll_rate(*at["kafka"], "polled", count)


def _kafka07_produce(at: Addresses, count: int) -> None:
    kafka07_load.produce_rate(*at["kafka07"], "kafka07", requests=count)


def _kafka07_fetch(at: Addresses, count: int) -> None:
    kafka07_load.fetch_rate(*at["kafka07"], "kafka07")


class CountedBroker:
    """The broker of one tree under callgrind. Invariant: ``_read`` dumps were read."""

    def __init__(self, tree: Path, place: Path) -> None:
        place.mkdir()
        self._out = place / "counts"
        self._read = 0
        ready = place / "ready"
        command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={self._out}", "--cache-sim=no", "--quiet"]
        command += ["--instr-atstart=no"]  # it starts several times as fast
        command += [sys.executable, "-m", "polywire", "serve", "--data-dir", str(place / "data")]
        command += ["--ready-file", str(ready), "--idle-poll-us", "0"]
        for wire in (*WIRES, "http"):  # two brokers that start at the same time must not share a default port
            command += [f"--{wire}", f"127.0.0.1:{lasting_port()}"]
        environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "PYTHONHASHSEED": "0"}
        with (place / "log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=place, env=environment)
        end = time.monotonic() + READY_S
        while not ready.exists():
            if self._process.poll() is not None or time.monotonic() > end:
                self.stop()
                raise AssertionError(f"the broker did not get ready tree={tree}\n{(place / 'log').read_text()}")
            time.sleep(0.1)
        self.addresses = {name: (at["host"], at["port"]) for name, at in json.loads(ready.read_text()).items()}
        self._control("--instr=on")

    def _control(self, command: str) -> None:
        subprocess.run(["callgrind_control", command, str(self._process.pid)], check=True, capture_output=True)

    def count(self) -> int:
        """Return the instructions since the last call."""
        self._control("--dump")
        self._read += 1
        dump = self._out.with_name(f"{self._out.name}.{self._read}")
        for line in dump.read_text().splitlines():
            if line.startswith("totals:"):
                dump.unlink()
                return int(line.split()[1])
        raise AssertionError(f"no total in what callgrind wrote file={dump}")

    def stop(self) -> None:
        """End the process without a result."""
        self._process.kill()
        self._process.wait()


def count_all(tree: Path, place: Path, chosen: Sequence[Workload], passes: int) -> dict[str, list[int]]:
    """Return the instructions per request of each pass of each load."""
    broker = CountedBroker(tree, place)
    try:
        found: dict[str, list[int]] = {}
        for workload in chosen:
            workload.prepare(broker.addresses)
            workload.run(broker.addresses, workload.count)
            broker.count()
            found[workload.name] = counts = []
            for _ in range(passes):
                workload.run(broker.addresses, workload.count)
                counts.append(broker.count() // workload.count)
        return found
    finally:
        broker.stop()


# The commit's tree


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=HERE, check=True, capture_output=True, text=True).stdout.strip()


def commit_kept() -> str:
    """Return the last commit that stored a result, empty if the history does not go back so far."""
    return _git("log", "-1", "--format=%h", "--", f":(glob)benchmarks/results/*{RESULT}")


def is_same(commit: str) -> bool:
    """Return whether the working tree's broker is the commit's."""
    return subprocess.run(["git", "diff", "--quiet", commit, "--", *BUILT_FROM], cwd=HERE, check=False).returncode == 0


def built(commit: str) -> Path:
    """Return a tree of this commit with compiled modules; it is kept, because building takes a minute."""
    tree = KEPT / _git("rev-parse", commit)
    complete = tree / ".complete"
    if complete.exists():
        return tree
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", commit, *BUILT_FROM], cwd=HERE, check=True, capture_output=True)
    subprocess.run(["tar", "-x", "-C", str(tree)], input=archive.stdout, check=True)
    _take_over_modules(tree)
    environment = {name: value for name, value in os.environ.items() if name != "POLYWIRE_PURE"}
    build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace", "--build-lib", str(tree / MADE_IN)]
    subprocess.run(build, cwd=tree, check=True, env=environment, stdout=subprocess.DEVNULL)
    subprocess.run([sys.executable, "-m", "compileall", "-q", "src"], cwd=tree, check=True)
    complete.touch()
    return tree


def _take_over_modules(tree: Path) -> None:
    """Copy compiled modules of identical sources and declarations, if the same ``setup.py`` builds them."""
    if not _same(Path("setup.py"), tree):
        return
    sources = [
        source
        for source in (HERE / "src").rglob("*.py")
        if all(_same(path.relative_to(HERE), tree) for path in (source.with_suffix(".pxd"), *compiled_from(source)))
    ]
    for suffix, to in ((".c", tree / "src"), (".so", tree / MADE_IN)):  # later products must be newer
        for source in sources:
            for made in source.parent.glob(f"{source.stem}.*{suffix}".replace(".*.c", ".c")):
                copy = to / made.relative_to(HERE / "src")
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(made, copy)


def _same(path: Path, tree: Path) -> bool:
    """Return whether both trees have the same file, or neither has it."""
    here, there = HERE / path, tree / path
    if not (here.exists() and there.exists()):
        return here.exists() == there.exists()
    return here.read_bytes() == there.read_bytes()


# The comparison


@dataclass(frozen=True, slots=True)
class Comparison:
    """The instructions per request of one load, for each pass."""

    name: str
    before: Sequence[int]
    now: Sequence[int]

    @property
    def ratio(self) -> float:
        """Return the ratio of the instructions to those of the commit."""
        return statistics.median(self.now) / statistics.median(self.before)

    @property
    def spread(self) -> float:
        """Return the spread between passes of the same broker."""
        return max(max(counts) / min(counts) for counts in (self.before, self.now)) - 1

    def is_worse(self, limit: float) -> bool:
        """Return whether the cheapest pass exceeds ``limit`` times the commit's dearest one, which excludes noise."""
        return min(self.now) > limit * max(self.before)


def compare(commit: str, chosen: Sequence[Workload], *, passes: int) -> list[Comparison]:
    """Count both concurrently, so that other load changes their counts alike."""
    tree = built(commit)
    with tempfile.TemporaryDirectory(prefix="polywire-instructions-") as place, ThreadPoolExecutor(2) as pool:
        before = pool.submit(count_all, tree, Path(place) / "before", chosen, passes)
        now = pool.submit(count_all, HERE, Path(place) / "now", chosen, passes)
        return [Comparison(name, counts, now.result()[name]) for name, counts in before.result().items()]


def show(commit: str, found: Sequence[Comparison], keep: Path | None) -> None:
    """Print the table, and store it on request."""
    title = f"thousands of instructions a request: {commit}, and the working tree"
    columns = ("load", "before", "now", "ratio", "spread")
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column == "load" else "right", no_wrap=True)
    lines = ["| " + " | ".join(columns) + " |", "|---" + "|---:" * (len(columns) - 1) + "|"]
    for one in found:
        counts = (f"{statistics.median(counts) / 1e3:,.1f}" for counts in (one.before, one.now))
        cells = (one.name, *counts, f"{one.ratio:.3f}", f"{one.spread:.1%}")
        table.add_row(*cells)
        lines.append("| " + " | ".join(cells) + " |")
    console.print(table)
    if keep is not None:
        facts = ", ".join(f"{name} {value}" for name, value in machine().items())
        command = "`python -m benchmarks.instructions`"
        keep.write_text("\n".join([f"# {keep.stem}", "", facts, "", f"{command}, {title}", "", *lines]) + "\n")


def main() -> int:
    """Run the comparison of the command line."""
    parser = argparse.ArgumentParser(
        description="Count the broker's instructions, of a commit and of the working tree."
    )
    parser.add_argument("--against", help="commit to compare with; the last one that kept a result without")
    parser.add_argument("--only", default="", help="loads whose names begin so")
    parser.add_argument("--quick", action="store_true", help="only what takes two minutes in all")
    parser.add_argument("--limit", type=float, default=LIMIT, help=f"what a load may take, times the commit ({LIMIT})")
    parser.add_argument("--passes", type=int, default=PASSES, help=f"that are counted ({PASSES})")
    parser.add_argument(
        "--keep", metavar="DATE", help="keep the table among the results: what follows is compared with it"
    )
    asked = parser.parse_args()
    if shutil.which("valgrind") is None:
        print("NOTHING WAS COUNTED: there is no valgrind here", file=sys.stderr)
        return 0
    chosen = [one for one in workloads() if one.name.startswith(asked.only) and (one.quick or not asked.quick)]
    if not chosen:
        parser.error(f"no load's name begins so only={asked.only!r}")
    commit = asked.against or commit_kept()
    if not commit:
        print(f"NOTHING WAS COUNTED: the history here has no commit that kept a result of {RESULT}", file=sys.stderr)
        return 0
    if is_same(commit):
        print(f"nothing was counted: the broker is that of {commit}")
        return 0
    found = compare(commit, chosen, passes=asked.passes)
    show(commit, found, asked.keep and HERE / "benchmarks" / "results" / f"{asked.keep}{RESULT}")
    worse = [one for one in found if one.is_worse(asked.limit)]
    for _ in range(REPEATS):  # what else the machine does can raise some counts by a few percent
        slow = {one.name for one in worse}
        again = [one for one in chosen if any(name.startswith(one.name.partition("-")[0]) for name in slow)]
        found = compare(commit, again, passes=asked.passes) if again else []
        worse = [one for one in found if one.name in slow and one.is_worse(asked.limit)]
    for one in worse:
        print(f"SLOWER: {one.name} takes {one.ratio:.3f} times what it took", file=sys.stderr)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
