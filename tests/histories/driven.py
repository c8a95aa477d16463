"""Clients in separate processes: transactional copies, committed readers, idempotent producers.

They are this project's own, and unmodified ones of Kafka. ``POLYWIRE_KAFKA_CLIENTS`` names an interpreter that has
confluent-kafka, kafka-python and aiokafka, and ``POLYWIRE_KAFKA_JAVA`` a class path with Kafka's own client
(spec: kafka#clients-to-test-with).

As in ``clients``; a client that is killed or ends is restarted.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import subprocess
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from tests.histories.clients import CONNECT_S, Url, now
from tests.histories.history import (
    Event,
    Fault,
    Fetch,
    History,
    Outcome,
    Place,
    Position,
    Produce,
    Shared,
    Transaction,
    Write,
)

DRIVER: Final = Path(__file__).with_name("transactions.driver")
JAVA_DRIVER: Final = Path(__file__).with_name("Transactions.java")
JAVA: Final = "java"
COMPILED: Final = Path("build/histories/java")
JAVA_OPTIONS: Final = ("-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
OWN: Final = "polywire"
PEERS: Final = ("confluent-kafka", "kafka-python", "aiokafka")
LINE_BYTES_MAX: Final = 1 << 24
END_S: Final = 20.0
SILENT_S: Final = 40.0  # longer than its requests may take


def drivers() -> Mapping[str, Sequence[str]]:
    """Return the command line of each client's driver, by the client's name, for the clients that are here."""
    found: dict[str, Sequence[str]] = {OWN: (sys.executable, str(DRIVER), OWN)}
    interpreter, classes = os.environ.get("POLYWIRE_KAFKA_CLIENTS", ""), os.environ.get("POLYWIRE_KAFKA_JAVA", "")
    if Path(interpreter).is_file():
        found |= {peer: (interpreter, str(DRIVER), peer) for peer in PEERS}
    if classes and shutil.which("javac"):
        found[JAVA] = "java", *JAVA_OPTIONS, "-cp", f"{_compiled(classes)}{os.pathsep}{classes}", JAVA_DRIVER.stem
    return found


@cache
def _compiled(classes: str) -> Path:
    """Return the directory of the compiled Java driver. It is compiled once, not at each start of the driver."""
    folder = COMPILED / hashlib.sha256(JAVA_DRIVER.read_bytes() + classes.encode()).hexdigest()[:16]
    if not folder.exists():
        COMPILED.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=COMPILED) as made:
            subprocess.run(
                ["javac", "-nowarn", "-Xlint:-deprecation", "-cp", classes, "-d", f"{made}/classes", str(JAVA_DRIVER)],
                check=True,
            )
            with suppress(OSError):  # another process has compiled it meanwhile
                Path(made, "classes").rename(folder)
    return folder


class Driven:
    """A driver that is restarted whenever it ends.

    ``answers`` counts its reports; ``errors`` has fatal errors of clients.
    """

    def __init__(self, peer: str, url: Url, history: History, program: Sequence[str]) -> None:
        self.peer: Final = peer
        self.running = True
        self.answers = 0
        self.errors: list[str] = []
        self.history: Final = history
        self._url: Final = url
        self._program: Final = tuple(program)
        self._lives: Final = count(1)
        self._process: Process | None = None

    @property
    def name(self) -> str:
        """Its name in the history."""
        raise AssertionError("each kind has its own")

    def words(self, life: int) -> Sequence[str]:
        """Return the driver's arguments for one of its lives."""
        raise AssertionError("each kind has its own")

    async def run(self) -> None:
        """Work until ``running`` is cleared."""
        while self.running:
            address = self._url(OWN) if self.peer == OWN else self._url("kafka").partition("://")[2]
            what, *words = self.words(next(self._lives))
            command = [*self._program, what, address, *words]
            self._process = await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, limit=LINE_BYTES_MAX
            )
            watching = asyncio.create_task(self._stop(self._process))
            try:
                await self._listen(self._process)
            finally:
                watching.cancel()
                self.kill()
            await self._process.wait()
            self.on_end()
            await asyncio.sleep(CONNECT_S)

    def kill(self) -> None:
        """Kill it with ``kill -9``, if it runs."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def _listen(self, process: Process) -> None:
        """Read its output until it ends; kill it if it is silent for too long, as its user would."""
        assert process.stdout is not None
        while True:
            try:
                async with asyncio.timeout(SILENT_S):
                    line = await process.stdout.readline()
            except TimeoutError:
                moment = now()
                self.history.events.append(Fault(f"{self.peer} fell silent", moment, moment))
                process.kill()
                continue
            if not line:
                return
            self._hear(json.loads(line))

    async def _stop(self, process: Process) -> None:
        while self.running:  # noqa: ASYNC110 - looking is the point
            await asyncio.sleep(CONNECT_S)
        assert process.stdin is not None
        process.stdin.close()
        await asyncio.sleep(END_S)
        process.kill()

    def _hear(self, words: list[Any]) -> None:
        match words:
            case ["error", text]:
                self.errors.append(text)
            case ["idle", _]:
                self.answers += 1
            case _:
                self.on_event(words)

    def on_event(self, words: list[Any]) -> None:
        """Record an event of the driver."""

    def on_end(self) -> None:
        """Record what the driver can no longer report."""

    def note(self, event: Event) -> None:
        """Record an answered event."""
        self.history.events.append(event)
        self.answers += 1


class Copier(Driven):
    """Copies a topic into another, in transactions."""

    def __init__(
        self, peer: str, url: Url, history: History, program: Sequence[str], *, source: str, partitions: int
    ) -> None:
        super().__init__(peer, url, history, program)
        self._source: Final = source
        self._partitions: Final = partitions
        self._open: tuple[int, tuple[Write, ...]] | None = None
        self._asked = False
        self._prefixes: Final[set[str]] = set()

    @property
    def name(self) -> str:
        """Its topic, group and transactional id."""
        return f"copy-{self.peer}"

    def is_open(self, *, is_ending: bool) -> bool:
        """Whether a transaction is open, and its commit was requested if ``is_ending``."""
        return self._open is not None and (self._asked or not is_ending)

    def words(self, life: int) -> Sequence[str]:
        """Copy."""
        return "copy", self._source, self.name, self.name, str(life), str(self._partitions)

    def on_event(self, words: list[Any]) -> None:
        """Record offsets and transactions."""
        match words:
            case ["positions", begun, ended, positions]:
                self.on_end()
                for number, offset in positions:
                    self.note(Position(self.name, begun, ended, Shared(self.name, self._source, number), offset))
            case ["begun", at, prefix, taken]:
                self.on_end()
                assert prefix not in self._prefixes, f"the driver wrote the values of an earlier transaction: {prefix}"
                self._prefixes.add(prefix)
                writes = [
                    Write(self.name, f"{prefix}:{number}:{offset}".encode(), Place(self._source, number, offset))
                    for number, offset in taken
                ]
                self._open, self._asked = (at, tuple(writes)), False
            case ["ending", _]:
                self._asked = True
            case ["ended", at]:
                self._end(at, Outcome.DONE if self._asked else Outcome.REFUSED)

    def on_end(self) -> None:
        """Record a transaction in flight as doubtful, if its commit was requested."""
        if self._open is not None:
            self._end(now(), Outcome.UNKNOWN if self._asked else Outcome.REFUSED)

    def _end(self, at: int, outcome: Outcome) -> None:
        assert self._open is not None
        begun, writes = self._open
        after = {Shared(self.name, *write.source[:2]): write.source.offset + 1 for write in writes}
        self._open = None
        self.note(Transaction(self.name, begun, at, writes, tuple(after.items()), outcome))


class Once(Driven):
    """Writes to a partition as an idempotent producer, whose client repeats unacknowledged records."""

    def __init__(
        self, peer: str, url: Url, history: History, program: Sequence[str], *, topic: str, partition: int
    ) -> None:
        super().__init__(peer, url, history, program)
        self._topic: Final = topic
        self._partition: Final = partition
        self._open: tuple[int, tuple[bytes, ...]] | None = None

    @property
    def name(self) -> str:
        """The prefix of its records."""
        return f"once-{self.peer}"

    def words(self, life: int) -> Sequence[str]:
        """Write."""
        return "once", self._topic, self.name, str(life), str(self._partition)

    def on_event(self, words: list[Any]) -> None:
        """Record acknowledgements."""
        match words:
            case ["asked", at, values]:
                self.on_end()
                self._open = at, tuple(value.encode() for value in values)
            case ["stored", at, offsets]:
                places = tuple(Place(self._topic, self._partition, offset) for offset in offsets)
                self._note(at, Outcome.DONE, places if min(offsets) >= 0 else ())

    def on_end(self) -> None:
        """Record that records in flight may be stored, once."""
        if self._open is not None:
            self._note(now(), Outcome.UNKNOWN)

    def _note(self, at: int, outcome: Outcome, places: tuple[Place, ...] = ()) -> None:
        assert self._open is not None
        begun, values = self._open
        self._open = None
        self.note(Produce(self.name, begun, at, self._topic, values, outcome, places))


class CommittedReader(Driven):
    """Reads committed records of a topic."""

    def __init__(
        self, peer: str, url: Url, history: History, program: Sequence[str], *, topic: str, partitions: int
    ) -> None:
        super().__init__(peer, url, history, program)
        self._topic: Final = topic
        self._partitions: Final = partitions

    @property
    def name(self) -> str:
        """Its name: client and topic."""
        return f"{self.peer} of {self._topic}"

    def words(self, life: int) -> Sequence[str]:
        """Read."""
        return "read", self._topic, str(self._partitions)

    def on_event(self, words: list[Any]) -> None:
        """Record delivered records."""
        match words:
            case ["read", begun, ended, partition, first, offsets, values]:
                place = Place(self._topic, partition, first)
                shown = tuple(value.encode() for value in values)
                self.note(Fetch(self.name, begun, ended, place, tuple(offsets), shown))
