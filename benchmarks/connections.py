"""The cost of ten thousand connections, and the latency of one more client during a thousand active ones.

Run: ``python -m benchmarks.connections [--connections N] [--active N] [--rate R] [--seconds S]``

The active ones are FLUX producers that send one record after the other at an even rate. The others have produced one record and are idle.
The measured client is a separate process with one small request at a time, first over a broker without other connections.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import selectors
import socket
import time
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event

from benchmarks.measure import Figure, figure_of, fresh_broker, report

REQUEST = b"V1|1|PRODUCE|busy key:%s acks=1\n" % (b"v" * 100)
LONE = b"V1|1|PRODUCE|lone key:value acks=1\n"
PAUSE_S = 0.002  # between two requests of the measured client
ANSWER_S = 20.0
AIM = 3.0  # times the latency of the same client on an idle broker


def open_one(place: tuple[str, int]) -> socket.socket:
    """Return a connection that has produced one record."""
    peer = socket.create_connection(place, timeout=ANSWER_S)
    peer.sendall(REQUEST)
    peer.recv(4096)
    return peer


def rest(place: tuple[str, int], count: int, ready: Event, stop: Event) -> None:
    """Hold idle connections."""
    peers = [open_one(place) for _ in range(count)]
    ready.set()
    stop.wait()
    for peer in peers:
        peer.close()


def work(place: tuple[str, int], count: int, rate: float, ready: Event, stop: Event) -> None:
    """Send on every connection in turn, ``rate`` times a second each."""
    peers = [open_one(place) for _ in range(count)]
    found = selectors.DefaultSelector()
    for peer in peers:
        peer.setblocking(False)
        found.register(peer, selectors.EVENT_READ)
    ready.set()
    begun, sent = time.monotonic(), 0
    while not stop.is_set():
        due = int((time.monotonic() - begun) * rate * count)
        while sent < due:
            peers[sent % count].send(REQUEST)
            sent += 1
        for key, _ in found.select(0.001):
            key.fileobj.recv(65_536)  # type: ignore[union-attr]


def measure(place: tuple[str, int], seconds: float, pipe: Connection) -> None:
    """Return the milliseconds of each request of one client."""
    times: list[float] = []
    with socket.create_connection(place, timeout=ANSWER_S) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            begun = time.perf_counter()
            peer.sendall(LONE)
            assert b"|OK|" in peer.recv(4096)
            times.append((time.perf_counter() - begun) * 1000)
            time.sleep(PAUSE_S)
    pipe.send(times)


def measured(place: tuple[str, int], seconds: float) -> list[float]:
    """Return sorted times of a client in its own process."""
    mine, its = multiprocessing.Pipe()
    process = multiprocessing.Process(target=measure, args=(place, seconds, its))
    process.start()
    times: list[float] = mine.recv()
    process.join()
    return sorted(times)


def part(times: list[float], share: float) -> float:
    """Return the time that this share of requests stayed below."""
    return times[int(len(times) * share)]


def figures(connections: int, active: int, rate: float, seconds: float) -> list[Figure]:
    """Measure one client alone, then during the others."""
    stop = multiprocessing.Event()
    with fresh_broker() as broker:
        place = broker.addresses["flux"]
        measured(place, 1.0)
        alone = measured(place, seconds)
        before = broker.memory_bytes
        others = []
        for target, args in ((rest, (connections - active,)), (work, (active, rate))):
            ready = multiprocessing.Event()
            others.append(multiprocessing.Process(target=target, args=(place, *args, ready, stop)))
            others[-1].start()
            assert ready.wait(300), "the broker took too long to accept all connections"
        beside = measured(place, seconds)
        after = broker.memory_bytes
        stop.set()
        for process in others:
            process.join(30)
    name = f"beside {connections:,} connections, {active:,} active, {active * rate:,.0f} records/s"
    ratio = part(beside, 0.99) / part(alone, 0.99)
    return [
        figure_of("one client alone, p99", "ms", [part(alone, 0.99)], more_is_better=False),
        figure_of(f"{name}, p50", "ms", [part(beside, 0.5)], more_is_better=False),
        figure_of(f"{name}, p99", "ms", [part(beside, 0.99)], more_is_better=False),
        figure_of("p99 beside the others, times alone", "x", [ratio], aim=AIM, more_is_better=False),
        figure_of("slowest", "ms", [beside[-1]], more_is_better=False),
        figure_of("memory of a connection", "kB", [(after - before) / connections / 1000], more_is_better=False),
    ]


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.connections")
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--active", type=int, default=1_000)
    parser.add_argument("--rate", type=float, default=2.0, help="records a second of each active one")
    parser.add_argument("--seconds", type=float, default=15.0)
    asked = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    report(
        figures(asked.connections, asked.active, asked.rate, asked.seconds),
        command="python -m benchmarks.connections",
        keep=None,
    )


if __name__ == "__main__":
    main()
