"""The interface to a broker in comparisons: how it is started, and its protocol for the load generator.

A peer's server has its own files and ports, and is gone afterwards.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from benchmarks.measure import descendants, processor_seconds

Address = tuple[str, int]
ANSWER_S: Final = 60.0
START_S: Final = 90.0  # for a JVM on a busy machine
RECEIVE_BYTES: Final = 4 << 20  # more than one frame of any workload


class Absent(Exception):
    """This peer cannot be started here; the text says what is missing and its source."""


@dataclass(frozen=True, slots=True)
class Server:
    """A running broker. place: the directory of its files, to drop them from the page cache."""

    address: Address
    pid: int
    place: Path | None = None

    def processor_seconds(self) -> float:
        """Return the processor time of it and the processes that it started."""
        return sum(processor_seconds(pid) for pid in self._family())

    def resident_bytes(self) -> int:
        """Return its private memory."""
        total = 0
        for pid in self._family():
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("RssAnon:"):
                    total += int(line.split()[1]) * 1024
        return total

    def _family(self) -> list[int]:
        return [self.pid, *descendants(self.pid)]


@dataclass(frozen=True, slots=True)
class Taken:
    """The result of a follower's received bytes: the number of records, and its next request."""

    records: int
    answer: bytes = b""


class Follower(Protocol):
    """A consumer's side of a conversation that reads a topic from its start and waits at its end."""

    def take(self, received: memoryview) -> Taken:
        """Handle received bytes in order; a frame may be split anywhere."""


class Peer(Protocol):
    """One broker over one of its protocols."""

    @property
    def name(self) -> str:
        """Return its name in the table."""

    @property
    def pushes(self) -> bool:
        """Return whether a follower gets new records pushed, instead of by a long poll."""

    def running(self, place: Path) -> AbstractContextManager[Server]:
        """Start it over an empty directory, with written and unsynced records like Polywire's level ``written``.

        Raises Absent.
        """

    def create(self, address: Address, topic: str) -> None:
        """Create a topic with one partition."""

    def producer(self, address: Address, topic: str) -> socket.socket:
        """Return a connection that can send requests."""

    def request(self, topic: str, values: Sequence[bytes]) -> bytes:
        """Return a request that stores these values, to be confirmed."""

    def confirmations(self) -> Callable[[memoryview], int]:
        """Return a function that counts confirmed records in received bytes. It raises AssertionError for a refusal."""

    def follow(self, address: Address, topic: str) -> tuple[socket.socket, Follower]:
        """Return a connection that receives a topic's records, with its first request sent."""


class Frames:
    """Splits received bytes into frames of a length and a body."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def cut(self, received: memoryview) -> Iterator[memoryview]:
        """Yield the complete bodies. Each is invalid once the next is requested."""
        if self._pending:
            self._pending += received
            whole = memoryview(bytes(self._pending))
            self._pending = bytearray()
        else:
            whole = received
        at = 0
        while len(whole) - at >= 4:
            end = at + 4 + int.from_bytes(whole[at : at + 4], "big")
            if end > len(whole):
                break
            yield whole[at + 4 : end]
            at = end
        self._pending += whole[at:]


class Lines:
    """Counts responses with a fixed number of lines."""

    def __init__(self, lines_each: int) -> None:
        self._each: Final = lines_each
        self._lines = 0

    def count(self, received: memoryview) -> int:
        """Return how many responses end in these bytes."""
        before = self._lines // self._each
        self._lines += bytes(received).count(b"\n")
        return self._lines // self._each - before


def connect(address: Address) -> socket.socket:
    """Return a connection as every load generator has it."""
    peer = socket.create_connection(address, timeout=ANSWER_S)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return peer


def receive_until(peer: socket.socket, whole: Callable[[bytes], bool]) -> bytes:
    """Read until ``whole`` returns true. Raises AssertionError if the connection closes before."""
    found = b""
    while not whole(found):
        more = peer.recv(65_536)
        if not more:
            raise AssertionError(f"the connection was closed early answer={found[-200:]!r}")
        found += more
    return found


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def find(program: str, package: str, *, source: str = "on Debian and Ubuntu: apt-get install") -> str:
    """Return the path of a peer's program. source: how to install ``package``. Raises Absent."""
    found = shutil.which(program, path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/lib/rabbitmq/bin")
    if found is None:
        raise Absent(f"{program} is not installed; {source} {package}")
    return found


@contextmanager
def server_process(
    command: Sequence[str],
    port: int,
    place: Path,
    *,
    environment: Mapping[str, str] | None = None,
    asked: Callable[[Address], None] | None = None,
) -> Iterator[Server]:
    """Start a peer's process in its own group; wait until it listens and ``asked`` succeeds."""
    log = place / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=place,
            env={**os.environ, **(environment or {})},
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    try:
        address = ("127.0.0.1", port)
        deadline = time.monotonic() + START_S
        while not _answers(address, asked):
            if process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"{command[0]} did not start\n{log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.1)
        yield Server(address, process.pid)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _answers(address: Address, asked: Callable[[Address], None] | None) -> bool:
    try:
        connect(address).close()
        if asked is not None:
            asked(address)
    except (OSError, AssertionError):
        return False
    return True
