"""The workloads of queues. Each returns figures and the server's processor time for them.

A queue is filled before the clock starts, with more records than are counted, so that no worker has to wait.
"""

from __future__ import annotations

import multiprocessing
import re
import select
import selectors
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Final

from benchmarks.peers.peer import ANSWER_S, RECEIVE_BYTES, Server
from benchmarks.peers.workloads import Costs, Round
from benchmarks.queues.peer import LOCKS_MAX, QueuePeer, Worker

VALUE_BYTES: Final = 100
BATCH: Final = 100  # records of one stored batch, about Kafka's default of 16 KiB
WINDOW: Final = 20  # batches in flight while a queue is filled
PREFETCH: Final = 500
SPARE: Final = 2 * LOCKS_MAX  # records that are filled but not counted
PACE: Final = 1_000  # records a second, for latencies
_SENT: Final = re.compile(rb"sent=(\d{19})")  # in the values of latencies: when one was sent


@dataclass(slots=True)
class _Working:
    """A worker on its connection, and the bytes that the socket did not accept yet."""

    connection: socket.socket
    worker: Worker
    unsent: bytes = b""


def fill(peer: QueuePeer, server: Server, topic: str, records: int) -> None:
    """Store records and wait until all are confirmed."""
    confirmed = peer.confirmations()
    buffer = memoryview(bytearray(RECEIVE_BYTES))
    request = peer.request(topic, [b"x" * VALUE_BYTES] * BATCH)
    sent = done = 0
    with closing(peer.producer(server.address, topic)) as connection:
        while done < records:
            while sent < records and sent - done <= (WINDOW - 1) * BATCH:
                connection.sendall(request)
                sent += BATCH
            size = connection.recv_into(buffer)
            assert size, "the connection was closed early"
            done += confirmed(buffer[:size])


def prefetch_of(workers: int) -> int:
    """Return how many records each of some workers holds, so that all can hold some."""
    return min(PREFETCH, max(LOCKS_MAX // workers, 1))


def acknowledged(
    peer: QueuePeer, server: Server, topic: str, records: int, *, workers: int, single: bool = False
) -> Round:
    """Return acknowledgements per second of workers that share a queue."""
    fill(peer, server, topic, records + SPARE)
    with ExitStack() as stack:
        working = _connected(stack, peer, server, topic, workers, single=single)
        with _Loop(working) as loop:
            costs = Costs(server)
            loop.begin()
            done = 0
            while done < records:
                done += loop.turn(ANSWER_S)
            return costs.round(done)


def _connected(
    stack: ExitStack, peer: QueuePeer, server: Server, topic: str, workers: int, *, single: bool
) -> list[_Working]:
    found = []
    for number in range(workers):
        connection, worker = peer.worker(server.address, topic, number, prefetch=prefetch_of(workers), single=single)
        found.append(_Working(stack.enter_context(closing(connection)), worker))
    return found


class _Loop:
    """Serves all workers of one process."""

    def __init__(self, working: Sequence[_Working], seen: Callable[[memoryview], None] | None = None) -> None:
        """``seen`` gets all received bytes."""
        self._working: Final = working
        self._seen: Final = seen
        self._buffer: Final = memoryview(bytearray(RECEIVE_BYTES))
        self._selector: Final = selectors.DefaultSelector()

    def __enter__(self) -> _Loop:
        for working in self._working:
            working.connection.setblocking(False)
            self._selector.register(working.connection, selectors.EVENT_READ, working)
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()

    def begin(self) -> None:
        """Send every worker's first request."""
        for working in self._working:
            self._send(working, working.worker.begin())

    def turn(self, timeout_s: float) -> int:
        """Serve all workers with received bytes. Return the number of acknowledgements that are done.

        Raises AssertionError after ``timeout_s`` without any.
        """
        ready = self._selector.select(timeout_s)
        assert ready, "no worker got anything"
        done = 0
        for key, events in ready:
            working: _Working = key.data
            if events & selectors.EVENT_WRITE:
                self._send(working, b"")
            if not events & selectors.EVENT_READ:
                continue
            try:
                size = working.connection.recv_into(self._buffer)
            except BlockingIOError:
                continue
            assert size, "the connection was closed early"
            received = self._buffer[:size]
            if self._seen is not None:
                self._seen(received)
            step = working.worker.take(received)
            done += step.acknowledged
            if step.answer:
                self._send(working, step.answer)
        return done

    def _send(self, working: _Working, data: bytes) -> None:
        had = bool(working.unsent)
        data = working.unsent + data
        try:
            sent = working.connection.send(data) if data else 0
        except BlockingIOError:
            sent = 0
        working.unsent = data[sent:]
        if had != bool(working.unsent):
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if working.unsent else 0)
            self._selector.modify(working.connection, events, working)


def crowd(peer: QueuePeer, server: Server, topic: str, seconds: float, *, workers: int) -> Sequence[Round]:
    """Return figures of workers that wait while records arrive at an even rate.

    They are microseconds from sending to delivery (p50 and p99), and MiB of the broker's memory.
    """
    expected = int(seconds * PACE)
    came: dict[int, int] = {}

    def seen(received: memoryview) -> None:
        now = time.time_ns()
        for found in _SENT.finditer(received):
            came.setdefault(int(found[1]), now)

    with ExitStack() as stack:
        working = _connected(stack, peer, server, topic, workers, single=False)
        loop = stack.enter_context(_Loop(working, seen))
        loop.begin()
        time.sleep(1.0)  # until all wait
        held = server.resident_bytes()
        costs = Costs(server)
        with _producing(peer, server, topic, expected) as sent:
            done = 0
            while done < expected:
                done += loop.turn(ANSWER_S)
            paid = costs.round(expected)
            times = sent()
    delays = [(came[at] - at) / 1000 for at in times][expected // 10 :]
    cuts = statistics.quantiles(delays, n=100)
    return [
        *(Round(cuts[at], paid.server_us, paid.generator) for at in (49, 98)),
        Round(held / 2**20),
    ]


@contextmanager
def _producing(peer: QueuePeer, server: Server, topic: str, expected: int) -> Iterator[Callable[[], list[int]]]:
    """Send records from another process, and yield a function that returns when each was sent."""
    ours, theirs = multiprocessing.Pipe()
    pacer = multiprocessing.get_context("fork").Process(
        target=_send_paced, args=(theirs, peer, server, topic, expected), daemon=True
    )
    pacer.start()
    try:
        yield ours.recv
    finally:
        pacer.join(ANSWER_S)


def _send_paced(pipe: Connection, peer: QueuePeer, server: Server, topic: str, records: int) -> None:
    confirmed = peer.confirmations()
    buffer = memoryview(bytearray(RECEIVE_BYTES))
    sent: list[int] = []
    answered = 0
    with closing(peer.producer(server.address, topic)) as connection:
        begun = time.perf_counter()
        while answered < records:
            left = begun + len(sent) / PACE - time.perf_counter() if len(sent) < records else ANSWER_S
            if select.select([connection], [], [], max(0.0, left))[0]:
                size = connection.recv_into(buffer)
                assert size, "the connection was closed early"
                answered += confirmed(buffer[:size])
            elif len(sent) < records:
                sent.append(time.time_ns())
                value = b"sent=%d" % sent[-1] + b"x" * (VALUE_BYTES - 24)
                connection.sendall(peer.request(topic, [value]))
        pipe.send(sent)
