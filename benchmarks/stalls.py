"""How long one peer's largest requests keep another peer's lone request waiting.

Run: ``python -m benchmarks.stalls [--rounds N] [--only SUBSTRING]``

Requests are made before the clock starts and are as long, once expanded, as their wire allows; one follows the other, each is answered before
the next. The other peer is a process of its own that sends one small request after another.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection

from benchmarks.cursus_load import command, encoded_batch
from benchmarks.measure import fresh_broker, resident_bytes
from polywire.protocols.cursus.compression import algorithm
from polywire.protocols.cursus.messages import frame
from polywire.protocols.iggy import asking
from polywire.protocols.iggy.messages import U32, Code
from polywire.protocols.kafka07.expansion import EXPANDED_BYTES_MAX, wrap
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
from tests.broker_process import BrokerProcess

ROUNDS = 15
PAUSE_S = 0.0005  # between two lone requests
ANSWER_S = 20.0
FIRST = b"V1|1|PRODUCE|lone k:v\n"
LONE = b"V1|1|CONSUME|lone 0 0\n"  # reads: what is produced waits for the disk as well when the log is behind
CURSUS_BYTES = 63 << 20
CURSUS_RECORDS = 100_000
KAFKA_BYTES = EXPANDED_BYTES_MAX - (64 << 10)


def large_requests() -> Iterator[tuple[str, str, Callable[[], bytes]]]:
    """(name, wire, what makes it)."""
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
    at = asking.ident("default") + asking.ident("large")
    return asking.request(Code.SEND, at + asking.to_partition(1) + message * count)


def _polywire(value: bytes, count: int) -> bytes:
    batch = bytes(from_records([Record(value)] * count))
    head = encode_head(Verb.PRODUCE, 1, messages.Produce("large", 0, create=True), payload_bytes=len(batch))
    return MAGIC + head + batch


def _ask_alone(place: tuple[str, int], pipe: Connection) -> None:
    """Lone requests until told to stop: when each began, and how long its answer took."""
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
    """One request on a connection of its own until it was answered or the broker hung up."""
    with suppress(ConnectionError), socket.create_connection(broker.addresses[wire], timeout=ANSWER_S) as peer:
        peer.sendall(data)
        if wire == "kafka07":  # no answer but that of a request behind it
            peer.sendall(encode_offsets(b"large", 0, -1, 1))
        peer.recv(65_536)


def stalls_ms(broker: BrokerProcess, wire: str, data: bytes, rounds: int) -> list[float]:
    """The longest wait of a lone request during each of the large ones."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    for name, wire, make in large_requests():
        if options.only not in name:
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
