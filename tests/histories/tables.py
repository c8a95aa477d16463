"""Histories of a topic and its table: the broker and the process that writes tables are killed and suspended.

``python -m tests.histories.tables --count 100 --seed 7``. The seed determines the order. With
``--compacted``, the topic is compacted, and its keys are set again and again, and deleted. At the end, and after every
``CHECK_EVERY`` faults, another Delta library reads the table. It must have exactly the records of the log below the
offsets that its last commit states, and after maintenance no other files.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from subprocess import run as run_command
from tempfile import TemporaryDirectory
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import deltalake
import pyarrow as pa

import polywire
from polywire.client.blocking import SyncClient
from polywire.client.bulk import connect
from polywire.errors import BrokerError
from polywire.store.url import open_bucket
from polywire.tables.delta_log import DeltaLog, TableState
from polywire.tables.frames import read_arrow
from polywire.tables.writer import DATA
from tests.broker_process import BrokerProcess
from tests.histories.repeat import parser_of
from tests.ledger import Command, recorded

TOPIC: Final = "orders"
PARTITIONS: Final = 3
CHECK_EVERY: Final = 25
CALM_S: Final = (0.2, 3.0)  # between two faults
TRIES: Final = 5
CAUGHT_UP_S: Final = 60.0
OPTIONS: Final = (
    "--table",
    "delta,iceberg",
    "--table-freshness-s",
    "1",
    "--table-history-hours",
    "0",
    "--slot-mib",
    "17",
)
EVENTS: Final = {"stop": "clean stop", "rows": "records stored"}
"""Names of counts in the ledger that are not those of this module."""
BATCH: Final = 100
VALUE_BYTES: Final = 100  # so much that ranges are read from segments
KEYS: Final = 500  # of a compacted topic
COLUMNS_BY_SEED: Final = ("", "infer", "id long, step1 long")
COLUMNS: Final = ("partition", "offset", "key", "value")


class Wrong(Exception):
    """The table and the log differ, or the table does not catch up."""


@dataclass
class World:
    """A broker with a table, and what was done to it."""

    broker: BrokerProcess
    chance: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    stopped: list[int] = field(default_factory=list)

    def inject(self) -> None:
        """Wait, and inject one fault."""
        time.sleep(self.chance.uniform(*CALM_S))
        (name,) = self.chance.choices(list(FAULTS), WEIGHTS)
        FAULTS[name](self)
        self.counts[name] += 1

    def kill_writer(self) -> None:
        for pid in writers(self.broker):
            os.kill(pid, signal.SIGKILL)

    def kill_broker(self) -> None:
        """Kill the broker only: its writer finishes what it has read, and ends."""
        self.broker.kill()
        self.broker.start()

    def kill_both(self) -> None:
        pids = [self.broker.pid, *writers(self.broker)]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        self.broker.kill()
        self.broker.start()

    def outlive(self) -> None:
        """Suspend the writer, kill the broker, and continue the old writer while the next one writes."""
        pids = writers(self.broker)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        self.stopped += pids
        self.broker.kill()
        self.broker.start()
        self._pause(2.0)
        self.close()

    def close(self) -> None:
        """Continue suspended processes."""
        for pid in self.stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self.stopped.clear()

    def stop_broker(self) -> None:
        assert self.broker.stop() == 0, self.broker.log_text()
        self.broker.start()

    def _pause(self, longest: float) -> None:
        time.sleep(self.chance.uniform(0, longest))


FAULTS: Final[Mapping[str, Callable[[World], None]]] = {
    "kill writer": World.kill_writer,
    "kill broker": World.kill_broker,
    "kill both": World.kill_both,
    "writer outlives broker": World.outlive,
    "stop": World.stop_broker,
}
WEIGHTS: Final = (5, 3, 3, 2, 1)


def writers(broker: BrokerProcess) -> list[int]:
    """Return the ids of the processes that write tables for a broker that runs now."""
    found = run_command(["pgrep", "-P", str(broker.pid)], capture_output=True, text=True, check=False).stdout
    return [int(pid) for pid in found.split() if b"polywire.tables" in _command_line(int(pid))]


def _command_line(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


@contextmanager
def in_background(work: Callable[[threading.Event], object]) -> Iterator[None]:
    """Run a function in a thread. Its event is set when the block ends."""
    ending = threading.Event()
    thread = threading.Thread(target=work, args=(ending,))
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()


def producing(broker: BrokerProcess, *, keys: int | None = None) -> AbstractContextManager[None]:
    """Send records until the block ends. Records that are sent twice are two records.

    Each has its own key, or one of ``keys`` keys, and then a tenth of them are tombstones.
    """
    return in_background(lambda ending: _produce(broker, ending, keys))


def _produce(broker: BrokerProcess, ending: threading.Event, keys: int | None) -> None:
    sent = count(step=BATCH)
    while not ending.is_set():
        with suppress(BrokerError), polywire.connect_sync(broker.url()) as client:
            _produce_to(client, ending, sent, keys)
        time.sleep(0.02)


def _produce_to(client: SyncClient, ending: threading.Event, sent: Iterator[int], keys: int | None) -> None:
    while not ending.is_set():
        first = next(sent)
        numbers = range(first, first + BATCH)
        values = [None if keys and number % 10 == 9 else _value(number) for number in numbers]
        names = [b"%d" % (number * 7919 % keys if keys else number) for number in numbers]
        with client.producer() as producer:
            producer.send_many(TOPIC, values, keys=names)
        time.sleep(0.02)


def _value(number: int) -> bytes:
    """Return JSON with a field that is new now and then, and seldom a value that does not fit."""
    if number % 500 == 7:
        return b"no JSON" if number % 1000 == 7 else b'{"id":"text"}'
    return b'{"id":%d,"step%d":1,"pad":"%0*d"}' % (number, number // 10_000, VALUE_BYTES, number)


def check_columns(table: pa.Table) -> None:
    """Check that each row has the typed column of its value. Raises Wrong."""
    if "id" not in table.column_names:
        return
    for value, found, error in zip(
        *(table.column(name).to_pylist() for name in ("value", "id", "_error")), strict=True
    ):
        if value is None:
            is_right = found is error is None
        elif found is not None:
            is_right = value.startswith(b'{"id":%d,' % found)
        else:
            is_right = error or not value.startswith(b'{"id":')
        if not is_right:
            raise Wrong(f"a column differs from its value value={value!r} id={found} error={error!r}")


def rows_of(table: pa.Table) -> list[tuple[Any, ...]]:
    return sorted(zip(*(table.column(name).to_pylist() for name in COLUMNS), strict=True))


def check(broker: BrokerProcess) -> int:
    """Compare the table and the log. Return the number of rows. Raises Wrong."""
    url = connect(broker.url()).describe(TOPIC).table
    path = unquote(urlsplit(url).path)
    for _ in range(TRIES):
        state = DeltaLog(open_bucket(url)).load()
        with suppress(FileNotFoundError, deltalake.exceptions.DeltaError):  # maintenance deletes replaced files at once
            query = deltalake.QueryBuilder().register("rows", deltalake.DeltaTable(path, version=state.version))
            found = pa.table(query.execute("select * from rows"))
            break
    else:
        raise Wrong("the table could not be read")
    rows = rows_of(found)
    if state.columns and not any("id" not in file.nulls for file in state.files.values()):
        check_columns(found)
    ends = {key.partition: offset for key, offset in state.offsets.items()}
    log = rows_of(read_arrow(broker.url(), TOPIC, columns=COLUMNS))
    expected = [row for row in log if row[1] < ends.get(row[0], 0)]
    if state.is_latest:
        last = {(row[0], row[2]): row for row in expected}
        # compaction may have removed an older record of a key that was set again since this version
        changed = {(row[0], row[2]) for row in log if row[1] >= ends.get(row[0], 0)}
        expected = [
            row for key, row in sorted(last.items(), key=lambda item: item[1][:2]) if row[3] and key not in changed
        ]
        rows = [row for row in rows if (row[0], row[2]) not in changed]
    if rows != expected:
        missing, extra = set(expected) - set(rows), Counter(rows) - Counter(expected)
        raise Wrong(f"missing={sorted(missing)[:5]} extra={list(extra)[:5]} rows={len(rows)} expected={len(expected)}")
    return len(rows)


def wait_for_records(url: str, count: int) -> int:
    """Wait until a table has so many records of a topic, and return its version. Raises Wrong."""
    end = time.monotonic() + CAUGHT_UP_S
    while (found := sum((state := DeltaLog(open_bucket(url)).load()).offsets.values())) != count:
        if time.monotonic() > end:
            raise Wrong(f"the table has other records records={found} expected={count}")
        time.sleep(0.05)
    return state.version


def wait_for_offsets(url: str, ends: Mapping[int, int]) -> None:
    """Wait until a table has reached these offsets. Raises Wrong."""
    deadline = time.monotonic() + CAUGHT_UP_S
    while time.monotonic() < deadline:
        state = DeltaLog(open_bucket(url)).load()
        found = {key.partition: offset for key, offset in state.offsets.items()}
        if all(found.get(partition, 0) >= end for partition, end in ends.items()):
            return
        time.sleep(0.05)
    raise Wrong(f"the table does not reach the end of its topic offsets={found} ends={ends}")


def catch_up(broker: BrokerProcess) -> TableState:
    """Wait until the table has all records of the log, and no files but its own. Raises Wrong."""
    end, objects = time.monotonic() + CAUGHT_UP_S, open_bucket(connect(broker.url()).describe(TOPIC).table)
    while time.monotonic() < end:
        time.sleep(0.2)
        bounds = connect(broker.url()).bounds([TOPIC])
        state = DeltaLog(objects).load()
        ends = {key.partition: offset for key, offset in state.offsets.items()}
        behind = sum(partition.next_offset - ends.get(partition.partition, 0) for partition in bounds)
        others = set(objects.list(DATA)) - state.used()
        if not behind and not others:
            return state
    raise Wrong(f"the table does not catch up\n{broker.log_text()}")


def run(
    folder: Path,
    *,
    seed: int,
    faults: int,
    in_bucket: bool = False,
    is_compacted: bool = False,
    report: Callable[[str], object] = print,
) -> Counter[str]:
    """Run that many faults, and return the counts. Raises Wrong, AssertionError."""
    options = (*OPTIONS, "--bucket", (folder / "bucket").as_uri()) if in_bucket else OPTIONS
    with BrokerProcess(folder / "data", *options, wires=["polywire"]) as broker:
        settings: dict[str, int | str | None] = {
            "table_columns": COLUMNS_BY_SEED[seed % len(COLUMNS_BY_SEED)],
            "compaction": int(is_compacted),
        }
        connect(broker.url()).create_topic(TOPIC, PARTITIONS, settings)
        world = World(broker, random.Random(seed))
        with producing(broker, keys=KEYS if is_compacted else None), closing(world):
            _inject(world, faults, report)
        world.kill_writer()  # the next one deletes what the earlier ones left
        state = catch_up(broker)
        world.counts["rows"] = check(broker)
        world.counts["versions"] = state.version
        return world.counts


def _inject(world: World, faults: int, report: Callable[[str], object]) -> None:
    for number in range(1, faults + 1):
        world.inject()
        if number % CHECK_EVERY == 0:
            report(f"{number} faults, {check(world.broker)} rows")


def main() -> int:
    """Run one history; the exit code is 0 if nothing is wrong."""
    parser = parser_of("tests.histories.tables", __doc__)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--bucket", action="store_true", help="store the log and the table in a bucket (a directory)")
    parser.add_argument("--compacted", action="store_true", help="compact the topic")
    given = parser.parse_args()
    options = f"{' --bucket' if given.bucket else ''}{' --compacted' if given.compacted else ''}"
    command = Command(f"tests.histories.tables --count {given.count}{options}")
    with (
        recorded(command, given.seed, is_recorded=given.ledger) as recording,
        TemporaryDirectory(ignore_cleanup_errors=True) as folder,  # the last writer may be finishing
    ):
        counts = run(
            Path(folder), seed=recording.seed, faults=given.count, in_bucket=given.bucket, is_compacted=given.compacted
        )
        recording.counts = {EVENTS.get(name, name): number for name, number in counts.items()}
    for name, number in sorted(counts.items()):
        print(f"{name:24} {number}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
