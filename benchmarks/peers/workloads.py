"""The workloads of the comparison. Each returns a figure and the server's processor time for it.

Requests are encoded before the clock starts; every record is counted when it is confirmed or arrives.
"""

from __future__ import annotations

import multiprocessing
import select
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Final

from benchmarks.peers.kafka import KafkaWire
from benchmarks.peers.peer import ANSWER_S, RECEIVE_BYTES, Address, Peer, Server
from benchmarks.receiving import receive

VALUE: Final = b"x" * 100
BATCH: Final = 1000
WINDOW: Final = 8  # batches in flight
PACE: Final = 10_000  # records a second
PARTITIONS: Final = 1000  # of a wide topic
IDLE: Final = 1000  # idle connections

Client = Callable[[Address, str, int], tuple[float, float]]
"""Produces that many records to a topic and consumes them: the rates of both."""


@dataclass(frozen=True, slots=True)
class Round:
    """One round's figure.

    server_us: processor microseconds of the server per record; generator: the busy share of the generator's processor
    (1 is a core).
    """

    value: float
    server_us: float = 0.0
    generator: float = 0.0


class Costs:
    """Processor time of a server and of this process from its creation."""

    def __init__(self, server: Server) -> None:
        self._server: Final = server
        self._used: Final = server.processor_seconds()
        self._own: Final = time.process_time()
        self._begun: Final = time.perf_counter()

    def round(self, records: int) -> Round:
        """Return records per second since then."""
        took = time.perf_counter() - self._begun
        used = self._server.processor_seconds() - self._used
        return Round(records / took, used * 1e6 / records, (time.process_time() - self._own) / took)


def produce(peer: Peer, server: Server, topic: str, records: int, value: bytes = VALUE) -> Round:
    """Return records per second of one connection that sends batches, ``WINDOW`` of them unconfirmed."""
    return _produce(peer, server, topic, [peer.request(topic, [value] * BATCH)], records)


def produce_widely(peer: KafkaWire, server: Server, topic: str, records: int) -> Round:
    """Do the same with one batch for each of ``PARTITIONS`` partitions in turn. The peer speaks ``KafkaWire``."""
    requests = [peer.request(topic, [VALUE] * BATCH, partition) for partition in range(PARTITIONS)]
    return _produce(peer, server, topic, requests, records)


def _produce(speaker: Peer | KafkaWire, server: Server, topic: str, requests: Sequence[bytes], records: int) -> Round:
    confirmed = speaker.confirmations()
    buffer = memoryview(bytearray(RECEIVE_BYTES))
    sent = done = 0
    with closing(speaker.producer(server.address, topic)) as connection:
        costs = Costs(server)
        while done < records:
            while sent < records and sent - done <= (WINDOW - 1) * BATCH:
                connection.sendall(requests[sent // BATCH % len(requests)])
                sent += BATCH
            done += confirmed(_some(connection, buffer))
        return costs.round(records)


def consume(peer: Peer, server: Server, topic: str, records: int) -> Round:
    """Return records per second of one connection that reads a topic from its start."""
    buffer = memoryview(bytearray(RECEIVE_BYTES))
    found = 0
    costs = Costs(server)
    connection, follower = peer.follow(server.address, topic)
    with closing(connection):
        while found < records:
            taken = follower.take(_some(connection, buffer))
            found += taken.records
            if taken.answer and found < records:
                connection.sendall(taken.answer)
        return costs.round(records)


def lone_us(peer: Peer, server: Server, topic: str, requests: int) -> Round:
    """Return median microseconds of one record's request and its confirmation, with nothing else in flight."""
    times: list[int] = []
    costs = Costs(server)
    with ExitStack() as stack:
        (one,) = _producers(stack, peer, server.address, topic, 1)
        for _ in range(requests):
            begun = time.perf_counter_ns()
            one.ask()
            one.wait()
            times.append(time.perf_counter_ns() - begun)
    paid = costs.round(requests)
    return Round(statistics.median(times) / 1000, paid.server_us, paid.generator)


def side_by_side(peer: Peer, server: Server, topic: str, requests: int, *, connections: int = 8) -> Round:
    """Return records per second of connections that send one record each and wait for all confirmations."""
    with ExitStack() as stack:
        ones = _producers(stack, peer, server.address, topic, connections)
        costs = Costs(server)
        for _ in range(requests // connections):
            for one in ones:
                one.ask()
            for one in ones:
                one.wait()
        return costs.round(requests // connections * connections)


def end_to_end_us(peer: Peer, server: Server, topic: str, seconds: float) -> tuple[Round, Round]:
    """Return (p50, p99) microseconds from sending a record to its arrival at a follower, at an even rate.

    The first tenth is not counted.
    """
    expected = int(seconds * PACE)
    ours, theirs = multiprocessing.Pipe()
    buffer = memoryview(bytearray(RECEIVE_BYTES))
    came: list[int] = []
    connection, follower = peer.follow(server.address, topic)
    with closing(connection):
        connection.settimeout(ANSWER_S)
        pacer = multiprocessing.get_context("fork").Process(
            target=_send_paced, args=(theirs, peer, server.address, topic, expected), daemon=True
        )
        pacer.start()
        costs = Costs(server)
        until = time.monotonic() + seconds + ANSWER_S
        while len(came) < expected:
            size = connection.recv_into(buffer)
            if not size or time.monotonic() > until:  # some send empty fetch responses for ever
                raise AssertionError(f"connection closed or silent came={len(came)} expected={expected}")
            taken = follower.take(buffer[:size])
            came += [time.perf_counter_ns()] * taken.records
            if taken.answer:
                connection.sendall(taken.answer)
        paid = costs.round(expected)
        sent: list[int] = ours.recv()
        pacer.join()
    delays = [(there - here) / 1000 for here, there in zip(sent, came, strict=True)][expected // 10 :]
    cuts = statistics.quantiles(delays, n=100)
    half, most = (Round(cuts[at], paid.server_us, paid.generator) for at in (49, 98))
    return half, most


def follow(peer: Peer, address: Address, topic: str, records: int) -> None:
    """Send one record after the other to an empty topic, each when a follower has received the last one."""
    buffer = memoryview(bytearray(RECEIVE_BYTES))
    with ExitStack() as stack:
        (one,) = _producers(stack, peer, address, topic, 1)
        connection, follower = peer.follow(address, topic)
        stack.enter_context(closing(connection))
        connection.settimeout(ANSWER_S)
        arrived = 0
        for number in range(records):
            one.ask()
            one.wait()
            while arrived <= number:
                taken = follower.take(_some(connection, buffer))
                arrived += taken.records
                connection.sendall(taken.answer)


def idle_kib(peer: Peer, server: Server, topic: str) -> Round:
    """Return KiB of the server's memory per connection that has produced one record and is idle."""
    before = server.resident_bytes()
    with ExitStack() as stack:
        for one in _producers(stack, peer, server.address, topic, IDLE):
            one.ask()
            one.wait()
        return Round((server.resident_bytes() - before) / IDLE / 1024)


def client_rates(client: Client, server: Server, topic: str, records: int) -> Sequence[Round]:
    """Return records per second that a real client reports to have produced and consumed; costs cover both."""
    costs = Costs(server)
    rates = client(server.address, topic, records)
    paid = costs.round(2 * records)
    return [Round(rate, paid.server_us) for rate in rates]


class _Producer:
    """A connection with at most one record in flight."""

    def __init__(self, connection: socket.socket, peer: Peer, request: bytes) -> None:
        self._connection: Final = connection
        self._request: Final = request
        self._confirmed: Final = peer.confirmations()
        self._buffer: Final = memoryview(bytearray(1 << 16))

    def ask(self) -> None:
        self._connection.sendall(self._request)

    def wait(self) -> None:
        while not self._confirmed(_some(self._connection, self._buffer)):
            pass


def _producers(stack: ExitStack, peer: Peer, address: Address, topic: str, count: int) -> list[_Producer]:
    request = peer.request(topic, [VALUE])
    opened = (stack.enter_context(closing(peer.producer(address, topic))) for _ in range(count))
    return [_Producer(connection, peer, request) for connection in opened]


def _some(connection: socket.socket, buffer: memoryview) -> memoryview:
    """Return what has arrived, at least one byte."""
    size = receive(connection, buffer)
    if not size:
        raise AssertionError("the connection was closed early")
    return buffer[:size]


def _send_paced(pipe: Connection, peer: Peer, address: Address, topic: str, records: int) -> None:
    """Send one record after the other when it is due, and report when each was sent."""
    request = peer.request(topic, [VALUE])
    confirmed = peer.confirmations()
    buffer = memoryview(bytearray(RECEIVE_BYTES))
    sent: list[int] = []
    answered = 0
    with closing(peer.producer(address, topic)) as connection:
        begun = time.perf_counter()
        for number in range(records):
            due = begun + number / PACE
            while select.select([connection], [], [], max(0.0, due - time.perf_counter()))[0]:
                answered += confirmed(_some(connection, buffer))
            sent.append(time.perf_counter_ns())
            connection.sendall(request)
        while answered < records:  # closing with unread responses is a reset, after which servers drop unread requests
            answered += confirmed(_some(connection, buffer))
        pipe.send(sent)
