"""Conversations of hostile clients with a running broker: every way to end one, at every byte.

A conversation depends on its number and the seed only, and is limited in time. After each a polite client is served,
and in the end the broker has no more descriptors than before.
"""

from __future__ import annotations

import os
import random
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection
from itertools import chain
from pathlib import Path
from typing import Final

from tests.broker_process import BrokerProcess
from tests.fuzz.chance import damaged
from tests.hostile.exchanges import STREAMS
from tests.hostile.peers import ANSWER_S_MAX, End, PoliteClient, connect, hang_up, push

ANSWERS_S: Final = 0.02  # how long a client waits for responses before it continues
STALLED_MAX: Final = 32  # connections that stall at once
WORKER_DESCRIPTORS: Final = 3  # of a broker for each of its worker processes: two pipes, and a connection
FLOOD: Final = 40  # repetitions of a stream
# longer than a request may wait, because a client that vanishes meanwhile is noticed at its end
SETTLED_S_MAX: Final = 75.0

Ending = Callable[["Hostile", socket.socket, bytes], None]


@dataclass
class Figures:
    """The figures of a run."""

    conversations: int = 0
    seconds: float = 0.0
    slowest_ms: float = 0.0
    p99_ms: float = 0.0
    held_ms: float = 0.0
    descriptors: tuple[int, int] = (0, 0)
    connections: tuple[int, int] = (0, 0)
    memory_mb: tuple[int, int] = (0, 0)

    def __str__(self) -> str:
        return (
            f"{self.conversations:>8,} conversations in {self.seconds:.0f} s; polite client: p99 {self.p99_ms:.1f} ms,"
            f" slowest {self.slowest_ms:.1f} ms, of the loop's processor time at most {self.held_ms:.1f} ms;"
            f" descriptors {self.descriptors[0]} -> {self.descriptors[1]};"
            f" connections {self.connections[0]} -> {self.connections[1]};"
            f" memory {self.memory_mb[0]} -> {self.memory_mb[1]} MB"
        )


@dataclass
class Hostile:
    """Clients of one protocol. Guards: at most ``STALLED_MAX`` of them stall."""

    broker: BrokerProcess
    wire: str
    seed: int
    chance: random.Random = field(default_factory=random.Random)
    stalled: deque[socket.socket] = field(default_factory=deque)

    def converse(self, number: int) -> None:
        """Run one conversation, from the first byte to its end."""
        chance = self.chance = random.Random(f"{self.seed} {self.wire} {number // len(ENDINGS)}")
        stream = STREAMS[self.wire](chance)
        with suppress(OSError):  # the broker may have closed the connection first
            ENDINGS[number % len(ENDINGS)](self, connect(self.broker, self.wire), stream)

    def cut(self, peer: socket.socket, stream: bytes) -> None:
        """Close with a FIN in the middle, with unread responses."""
        push(peer, stream[: self.chance.randrange(len(stream) + 1)])
        hang_up(peer, End.FIN)

    def kill(self, peer: socket.socket, stream: bytes) -> None:
        """Close with a RST in the middle, perhaps a moment later."""
        push(peer, stream[: self.chance.randrange(len(stream) + 1)])
        time.sleep(self.chance.choice((0, 0, 0.0005, 0.003)))
        hang_up(peer, End.RST)

    def half_close(self, peer: socket.socket, stream: bytes) -> None:
        """Close the sending side, and continue to read."""
        push(peer, stream[: self.chance.randrange(len(stream) + 1)])
        peer.shutdown(socket.SHUT_WR)
        read(peer)
        hang_up(peer, self.chance.choice(list(End)))

    def stall(self, peer: socket.socket, stream: bytes) -> None:
        """Stall in the middle, until other clients do."""
        push(peer, stream[: self.chance.randrange(len(stream) + 1)])
        self.stalled.append(peer)
        if len(self.stalled) > STALLED_MAX:
            hang_up(self.stalled.popleft(), self.chance.choice(list(End)))

    def flood(self, peer: socket.socket, stream: bytes) -> None:
        """Repeat the same bytes and read nothing."""
        for _ in range(FLOOD):
            push(peer, stream)
        hang_up(peer, End.RST)

    def lie(self, peer: socket.socket, stream: bytes) -> None:
        """Send damaged bytes."""
        push(peer, damaged(stream, self.chance, times_max=6))
        read(peer)
        hang_up(peer, self.chance.choice(list(End)))

    def echo(self, peer: socket.socket, stream: bytes) -> None:
        """Send back the responses."""
        push(peer, stream)
        push(peer, read(peer))
        hang_up(peer, End.RST)

    def leave(self) -> None:
        """Close stalled connections."""
        while self.stalled:
            hang_up(self.stalled.popleft(), End.RST)


ENDINGS: Final[list[Ending]] = [
    Hostile.cut,
    Hostile.kill,
    Hostile.half_close,
    Hostile.stall,
    Hostile.flood,
    Hostile.lie,
    Hostile.echo,
    Hostile.kill,
]


def read(peer: socket.socket) -> bytes:
    """Return what arrives within a moment."""
    peer.settimeout(ANSWERS_S)
    with suppress(OSError):
        return peer.recv(65_536)
    return b""


def workers(broker: BrokerProcess) -> int:
    """Return the number of a broker's worker processes: a client that creates a link starts one (Linux; 0 elsewhere)."""
    with suppress(OSError):
        return len(Path(f"/proc/{broker.pid}/task/{broker.pid}/children").read_text("ascii").split())
    return 0


def descriptors(broker: BrokerProcess) -> int:
    """Return the number of a broker's descriptors, without those of its worker processes (Linux; 0 elsewhere)."""
    with suppress(OSError):
        return len(os.listdir(f"/proc/{broker.pid}/fd")) - WORKER_DESCRIPTORS * workers(broker)
    return 0


def converse(broker: BrokerProcess, wire: str, numbers: range, seed: int, *, visitors: int = 1) -> Figures:
    """Run conversations of one protocol concurrently. Raises AssertionError with the number of the failing one."""
    figures = Figures(len(numbers))
    begun = time.monotonic()
    with ExitStack() as stack, ThreadPoolExecutor(visitors) as threads:
        polite = [stack.enter_context(PoliteClient(broker)) for _ in range(visitors)]
        before, memory = descriptors(broker), broker.memory_bytes
        connected = connections(broker)
        visits = [
            threads.submit(_visit, Hostile(broker, wire, seed), numbers[first::visitors], beside)
            for first, beside in enumerate(polite)
        ]
        for visit in visits:
            visit.result()
        after = min(settled(lambda: descriptors(broker), before))
        figures.connections = connected, min(settled(lambda: connections(broker), connected))
        times = sorted(chain.from_iterable(beside.times for beside in polite))
        figures.held_ms = max(beside.held_s for beside in polite) * 1000
    figures.seconds = time.monotonic() - begun
    figures.slowest_ms, figures.p99_ms = times[-1] * 1000, times[len(times) * 99 // 100] * 1000
    figures.descriptors = before, after
    figures.memory_mb = memory >> 20, broker.memory_bytes >> 20
    return figures


def _visit(hostile: Hostile, numbers: range, polite: PoliteClient) -> None:
    """Run one conversation after the other, and serve the polite client after each."""
    for number in numbers:
        hostile.converse(number)
        try:
            polite.produce()
        except (OSError, AssertionError) as error:
            raise AssertionError(f"wire={hostile.wire} conversation={number} seed={hostile.seed}: {error!r}") from error
    hostile.leave()


def connections(broker: BrokerProcess) -> int:
    """Return the number of connections that a broker reports, without this one and those of its worker processes."""
    metrics = HTTPConnection(*broker.addresses["http"], timeout=ANSWER_S_MAX)
    with closing(metrics):
        metrics.request("GET", "/metrics")
        lines = metrics.getresponse().read().decode().splitlines()
    return (
        sum(int(float(line.split()[-1])) for line in lines if line.startswith("polywire_connections{"))
        - 1
        - workers(broker)
    )


def settled(count: Callable[[], int], expected: int) -> Iterator[int]:
    """Return a count repeatedly, until it is as low as expected or time is up."""
    deadline = time.monotonic() + SETTLED_S_MAX
    while True:
        held = count()
        yield held
        if held <= expected or time.monotonic() > deadline:
            return
        time.sleep(0.05)
