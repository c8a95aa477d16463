"""How long the worst requests block the broker's loop, and how long the largest ones delay others.

Run: ``python -m benchmarks.stalls [--rounds N] [--only SUBSTRING …] [--verbs | --large]``

Every verb: on one connection, then on ten at once, over one broker whose state is at its limits (``benchmarks.verbs``).
A stall is the processor time of one pass of the broker's own loop (``benchmarks.watched``), so that other work of the
machine does not count. Large requests: encoded before the clock starts and, once decompressed, as long as their
protocol permits; each is answered before the next. The other client is a separate process that sends one small request
after another.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import selectors
import socket
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.cursus_load import command, encoded_batch
from benchmarks.measure import fresh_broker, resident_bytes
from benchmarks.verbs import Asked, all_verbs, filling, filling_cursus
from benchmarks.watched import WATCH
from polywire.protocols.cursus.compression import algorithm
from polywire.protocols.cursus.messages import frame
from polywire.protocols.iggy import client_codec
from polywire.protocols.iggy.messages import U32, Code
from polywire.protocols.kafka07.compression import EXPANDED_BYTES_MAX, wrap
from polywire.protocols.kafka07.messages import (
    CompressionCodec,
    encode_message,
    encode_offsets,
    encode_produce,
    encode_set,
)
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.codec import MAGIC, encode_head
from polywire.protocols.polywire.messages import Verb
from polywire.records.columns import Record
from polywire.records.rows import from_records
from polywire.testing.process import BrokerProcess

ROUNDS = 15
PAUSE_S = 0.0005  # between two single requests
ANSWER_S = 20.0
FIRST = b"V1|1|PRODUCE|lone k:v\n"
LONE = b"V1|1|CONSUME|lone 0 0\n"  # a read, because a produce waits for the disk as well when the log is behind
CURSUS_BYTES = 63 << 20
CURSUS_RECORDS = 100_000
KAFKA_BYTES = EXPANDED_BYTES_MAX - (64 << 10)
HELD_MS_MAX = 20.0  # limit of one pass of the loop
TOGETHER = 10  # connections that send the same at once
QUIET_S = 0.05  # it is over after that long without a response and a stall
VERB_S_MAX = 30.0


def large_requests() -> Iterator[tuple[str, str, Callable[[], bytes]]]:
    """Return (name, protocol, function that returns the request)."""
    wide = encoded_batch("large", records=CURSUS_RECORDS, value=bytes(CURSUS_BYTES // CURSUS_RECORDS - 70))[4:]
    yield "cursus plain batch", "cursus", partial(frame, wide)
    for name in ("gzip", "lz4", "xerial"):
        yield f"cursus {name} batch", "cursus", partial(_cursus, name, wide)
        yield f"cursus {name} zeros", "cursus", partial(_cursus, name, bytes(CURSUS_BYTES))
    plain = encode_set([bytes(90)] * (KAFKA_BYTES // 100))
    tiny = encode_set([b""] * (KAFKA_BYTES // 10))
    yield "kafka07 plain set", "kafka07", partial(encode_produce, b"large", 0, plain)
    for codec in (CompressionCodec.GZIP, CompressionCodec.SNAPPY):
        yield f"kafka07 {codec.name.lower()} set", "kafka07", partial(_kafka, plain, codec)
        yield f"kafka07 {codec.name.lower()} tiny", "kafka07", partial(_kafka, tiny, codec)
        yield (
            f"kafka07 {codec.name.lower()} zeros",
            "kafka07",
            partial(_kafka, encode_message(bytes(KAFKA_BYTES)), codec),
        )
    yield "iggy tiny", "iggy", partial(_iggy, b"x", 1_200_000)
    yield "iggy messages", "iggy", partial(_iggy, bytes(1000), 10_000)
    yield "polywire tiny", "polywire", partial(_polywire, b"", 3_900_000)
    yield "polywire records", "polywire", partial(_polywire, bytes(100), 140_000)


def _cursus(name: str, body: bytes) -> bytes:
    return frame(algorithm(name).compress(body))


def _kafka(message_set: bytes, codec: CompressionCodec) -> bytes:
    return encode_produce(b"large", 0, wrap(message_set, codec))


def _iggy(value: bytes, count: int) -> bytes:
    message = bytes(20) + U32.pack(len(value)) + value
    at = client_codec.ident("default") + client_codec.ident("large")
    return client_codec.request(Code.SEND, at + client_codec.to_partition(1) + message * count)


def _polywire(value: bytes, count: int) -> bytes:
    batch = bytes(from_records([Record(value)] * count))
    head = encode_head(Verb.PRODUCE, 1, messages.Produce("large", 0, create=True), payload_bytes=len(batch))
    return MAGIC + head + batch


def _ask_alone(place: tuple[str, int], pipe: Connection) -> None:
    """Send single requests until the stop signal; return when each began, and how long it took."""
    taken: list[tuple[float, float]] = []
    with socket.create_connection(place, timeout=ANSWER_S) as peer:
        peer.sendall(FIRST)
        peer.recv(4096)
        pipe.send(None)
        while not pipe.poll():
            begun = time.monotonic()
            peer.sendall(LONE)
            peer.recv(4096)
            taken.append((begun, time.monotonic() - begun))
            time.sleep(PAUSE_S)
    pipe.send(taken)


def _send(broker: BrokerProcess, wire: str, data: bytes) -> None:
    """Send one request on a new connection and wait for the response or the end."""
    with suppress(ConnectionError), socket.create_connection(broker.addresses[wire], timeout=ANSWER_S) as peer:
        peer.sendall(data)
        if wire == "kafka07":  # only a later request gets a response
            peer.sendall(encode_offsets(b"large", 0, -1, 1))
        peer.recv(65_536)


def stalls_ms(broker: BrokerProcess, wire: str, data: bytes, rounds: int) -> list[float]:
    """Return the longest wait of a single request during each of the large ones."""
    here, there = multiprocessing.Pipe()
    asking_alone = multiprocessing.Process(target=_ask_alone, args=(broker.addresses["flux"], there))
    asking_alone.start()
    here.recv()
    spans = []
    for _ in range(rounds):
        time.sleep(0.02)
        begun = time.monotonic()
        _send(broker, wire, data)
        spans.append((begun, time.monotonic()))
    time.sleep(0.05)
    here.send(None)
    taken: list[tuple[float, float]] = here.recv()
    asking_alone.join()
    return [
        1000 * max((took for at, took in taken if at < end and at + took > begin), default=0.0) for begin, end in spans
    ]


# Every verb


@dataclass(frozen=True, slots=True)
class Held:
    """The longest stalls: by processor time, by the clock, by garbage collection; and where most of the time went."""

    processor_s: float
    clock_s: float
    collecting_s: float
    place: str


class Watcher:
    """The receiving end of a watched broker's reports."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._file = self._socket.makefile("rb")

    def reported(self) -> dict[str, Any]:
        """Return the longest stalls since the last call."""
        self._socket.sendall(b"?")
        seen: dict[str, Any] = json.loads(self._file.readline())
        return seen


@contextmanager
def watched_broker() -> Iterator[tuple[BrokerProcess, Watcher]]:
    """Start a broker whose state is at its limits; return it with its watcher."""
    with tempfile.TemporaryDirectory(prefix="polywire-stalls-", dir=os.environ.get("POLYWIRE_BENCH_DIR")) as place:
        os.environ[WATCH] = f"{place}/watch"
        with BrokerProcess(Path(place) / "data", module="benchmarks.watched") as broker:
            watcher = Watcher(os.environ[WATCH])
            _fill(broker)
            yield broker, watcher


def _fill(broker: BrokerProcess) -> None:
    with socket.create_connection(broker.addresses["polywire"], timeout=120) as peer:
        peer.sendall(MAGIC)
        for frames in filling():
            peer.sendall(b"".join(frames))
            _drain([peer], 0.02)
    with socket.create_connection(broker.addresses["cursus"], timeout=120) as peer:
        waiting = 0
        for data in filling_cursus():
            peer.sendall(data)
            waiting += 1
            if waiting == 200:
                _drain([peer], 0.02)
                waiting = 0
        _drain([peer], 0.5)


def _drain(
    peers: list[socket.socket], quiet_s: float, watcher: Watcher | None = None, *, said: bytearray | None = None
) -> tuple[int, Held]:
    """Read, into ``said`` if given, until the broker is quiet; return the bytes and the longest stalls."""
    got, most = 0, {"processor_s": 0.0, "clock_s": 0.0, "collecting_s": 0.0}
    places: Counter[str] = Counter()
    end = time.monotonic() + VERB_S_MAX
    with selectors.DefaultSelector() as selector:
        for peer in peers:
            selector.register(peer, selectors.EVENT_READ)
        while time.monotonic() < end:
            ready = selector.select(quiet_s)
            for key, _ in ready:
                got += _read(selector, key.fileobj, said)
            seen: dict[str, Any] = watcher.reported() if watcher is not None else {"quiet_s": quiet_s}
            most = {name: max(value, seen.get(name, 0.0)) for name, value in most.items()}
            places.update(dict(seen.get("places", [])))
            if not ready and seen["quiet_s"] >= quiet_s and (got or not selector.get_map()):
                break
            if not selector.get_map() and seen["quiet_s"] >= quiet_s:
                break
    return got, Held(**most, place=next((place for place, _ in places.most_common(1)), ""))


def _read(selector: selectors.BaseSelector, peer: object, said: bytearray | None) -> int:
    assert isinstance(peer, socket.socket)
    try:
        data = peer.recv(1 << 20)
    except OSError:
        data = b""
    if not data:
        selector.unregister(peer)
    if said is not None:
        said += data
    return len(data)


def held(broker: BrokerProcess, watcher: Watcher, asked: Asked, connections: int) -> tuple[int, Held]:
    """Return the response bytes, and the longest stalls while that many connections send this at once."""
    peers = [socket.create_connection(broker.addresses[asked.wire], timeout=VERB_S_MAX) for _ in range(connections)]
    try:
        for peer in peers:
            if asked.opening:
                peer.sendall(asked.opening)
        said = bytearray()
        if asked.opening:
            _drain(peers, QUIET_S, said=said)
        data = asked.make() if asked.answering is None else asked.answering(bytes(said))
        watcher.reported()
        for peer in peers:
            with suppress(OSError):
                peer.sendall(data + (ALSO if asked.wire == "kafka07" else b""))
        return _drain(peers, QUIET_S, watcher)
    finally:
        for peer in peers:
            peer.close()


ALSO = encode_offsets(b"full", 0, -1, 1)  # a produce on this protocol has no response


def verbs(only: Sequence[str]) -> None:
    """Print the table of every verb."""
    over = 0
    with watched_broker() as (broker, watcher):
        print("verb, bytes sent and answered; ms held: alone, by ten; by the clock; by collecting garbage; where")
        for asked in all_verbs():
            name = f"{asked.wire} {asked.verb}"
            if only and not any(part in name for part in only):
                continue
            sent = len(asked.make())
            got, alone = held(broker, watcher, asked, 1)
            ten = alone if asked.once else held(broker, watcher, asked, TOGETHER)[1]
            over += max(alone.processor_s, ten.processor_s) * 1000 > HELD_MS_MAX
            print(_row(name, sent, got, alone, ten), flush=True)
    print(f"verbs that hold the loop for more than {HELD_MS_MAX:.0f} ms: {over}")


def _row(name: str, sent: int, got: int, alone: Held, ten: Held) -> str:
    figures = [alone.processor_s, ten.processor_s, max(alone.clock_s, ten.clock_s)]
    collecting = max(alone.collecting_s, ten.collecting_s)
    shown = " ".join(f"{1000 * value:8.1f}" for value in (*figures, collecting))
    place = (alone if alone.processor_s * 1000 > HELD_MS_MAX else ten).place
    return f"{name:36} {sent:9} {got:10} {shown}  {place}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", nargs="*", default=())
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--verbs", action="store_true", help="every verb only")
    kind.add_argument("--large", action="store_true", help="large requests only")
    options = parser.parse_args()
    if not options.large:
        verbs(options.only)
    if not options.verbs:
        large(options)


def large(options: argparse.Namespace) -> None:
    """Print how long other clients waited for each of the largest requests."""
    for name, wire, make in large_requests():
        if options.only and not any(part in name for part in options.only):
            continue
        data = make()
        with fresh_broker() as broker:
            _send(broker, "cursus", command("CREATE topic=large partitions=1"))
            _send(broker, wire, data)
            waited = stalls_ms(broker, wire, data, options.rounds)
            peak = resident_bytes(broker.pid).get("VmHWM", 0) >> 20
        print(
            f"{name:24} {len(data) / 2**20:6.2f} MiB sent; lone request waited {statistics.median(waited):6.1f} ms"
            f" (median), {max(waited):6.1f} ms (most); broker's peak {peak} MiB",
            flush=True,
        )


if __name__ == "__main__":
    main()
