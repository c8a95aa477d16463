"""What a broker is to the workloads that compare several: how it is started, and what its wire looks like to a load generator.

Promises: a peer's server has files and ports of its own and is gone afterwards. Must not know: any wire, what is measured.
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

from benchmarks.measure import processor_seconds

Address = tuple[str, int]
ANSWER_S: Final = 60.0
START_S: Final = 90.0  # a JVM on a busy machine
RECEIVE_BYTES: Final = 4 << 20  # more than one frame of any workload


class Absent(Exception):
    """This peer cannot be started here; the text says what is missing and where it comes from."""


@dataclass(frozen=True, slots=True)
class Server:
    """A running broker. place: where its files lie, for who wants to have them forgotten by the page cache."""

    address: Address
    pid: int
    place: Path | None = None

    def processor_seconds(self) -> float:
        """What it and the processes that it started have used."""
        return sum(processor_seconds(pid) for pid in self._family())

    def resident_bytes(self) -> int:
        """Memory that belongs to it alone."""
        total = 0
        for pid in self._family():
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("RssAnon:"):
                    total += int(line.split()[1]) * 1024
        return total

    def _family(self) -> list[int]:
        found = [self.pid]
        for pid in found:
            for task in Path(f"/proc/{pid}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
        return found


@dataclass(frozen=True, slots=True)
class Taken:
    """What a follower found in the bytes that came: so many records, and what it has to say before more come."""

    records: int
    answer: bytes = b""


class Follower(Protocol):
    """One consumer's side of a conversation, reading a topic from its beginning and waiting at its end."""

    def take(self, received: memoryview) -> Taken:
        """Look at bytes that came, in order; a frame may be cut anywhere."""


class Peer(Protocol):
    """One broker on one of its wires."""

    @property
    def name(self) -> str:
        """As the table calls it."""

    @property
    def pushes(self) -> bool:
        """Whether a follower hears of new records by itself or by waiting."""

    def running(self, place: Path) -> AbstractContextManager[Server]:
        """Start it over an empty directory, records written to files and not synced, as Polywire's level ``written``. Raises Absent."""

    def create(self, address: Address, topic: str) -> None:
        """Make a topic with one partition."""

    def producer(self, address: Address, topic: str) -> socket.socket:
        """A connection that can send requests."""

    def request(self, topic: str, values: Sequence[bytes]) -> bytes:
        """Bytes that store these values, to be confirmed."""

    def confirmations(self) -> Callable[[memoryview], int]:
        """Says of received bytes, in order, how many more records are confirmed. Raises AssertionError for a refusal."""

    def follow(self, address: Address, topic: str) -> tuple[socket.socket, Follower]:
        """A connection on which a topic's records come, its first request sent."""


class Frames:
    """Cuts what is received into frames of a length and a body."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def cut(self, received: memoryview) -> Iterator[memoryview]:
        """The bodies that are whole now. Each is gone once the next is asked for."""
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
    """Counts answers that have a fixed number of lines each."""

    def __init__(self, lines_each: int) -> None:
        self._each: Final = lines_each
        self._lines = 0

    def count(self, received: memoryview) -> int:
        """How many answers end in these bytes."""
        before = self._lines // self._each
        self._lines += bytes(received).count(b"\n")
        return self._lines // self._each - before


def connect(address: Address) -> socket.socket:
    """A connection as every load generator has it."""
    peer = socket.create_connection(address, timeout=ANSWER_S)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return peer


def receive_until(peer: socket.socket, whole: Callable[[bytes], bool]) -> bytes:
    """Read until ``whole`` says so. Raises AssertionError when the peer hangs up before."""
    found = b""
    while not whole(found):
        more = peer.recv(65_536)
        if not more:
            raise AssertionError(f"hung up early answer={found[-200:]!r}")
        found += more
    return found


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def find(program: str, package: str) -> str:
    """The path of a peer's program. Raises Absent."""
    found = shutil.which(program, path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/lib/rabbitmq/bin")
    if found is None:
        raise Absent(f"{program} is not installed; on Debian and Ubuntu: apt-get install {package}")
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
    """A peer's process in a group of its own, once it listens and ``asked`` raises no OSError or AssertionError any more."""
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
