"""The cost of a record in Kafka's codec: processor nanoseconds in a tight loop, without a broker.

Run: ``python -m benchmarks.kafka_codec [--keep FILE]``

Decoding is everything from the bytes of a PRODUCE request's batch to a stored batch without offsets, with both checksums. Encoding is
everything from a stored batch to the bytes of a fetched one.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.measure import Figure, figure, report
from polywire.protocols.kafka import encoder
from polywire.protocols.kafka.client_batches import encode_batch
from polywire.protocols.kafka.compression import decode_batch
from polywire.protocols.kafka.messages import Codec
from polywire.records.batch import stamp
from polywire.records.columns import Record

RECORDS = 1000
VALUE_BYTES = 100
CALLS = 1000  # of one round
ROUNDS = 7
AIM_NS = 20.0  # a record, for values of 100 bytes without keys


def records(key: bytes | None, value_bytes: int) -> list[Record]:
    """Return a batch's records, a hundred of them in each millisecond."""
    return [
        Record(value=os.urandom(value_bytes), key=key, origin_time_us=1_700_000_000_000_000 + number // 100 * 1000)
        for number in range(RECORDS)
    ]


def per_record(call: Callable[[], object], calls: int = CALLS) -> Callable[[], float]:
    """Run one round; return processor nanoseconds per record."""

    def one_round() -> float:
        begun = time.process_time_ns()
        for _ in range(calls):
            call()
        return (time.process_time_ns() - begun) / (calls * RECORDS)

    return one_round


def figures_of(name: str, made: list[Record], *, codec: Codec = Codec.NONE, aim: float | None = None) -> list[Figure]:
    """Measure decoding and encoding of one kind of batch."""
    batch = encode_batch(made, codec=codec)
    stored = decode_batch(batch, bytes_max=len(batch))[1].batch
    stamp(stored, 0, 1, 1, 0, 0, 0)
    out = bytearray(2 * len(stored))

    def decode() -> None:
        decode_batch(batch, bytes_max=len(batch))

    def encode() -> None:
        encoder.put_batches(stored, encoder.begin(0, at=0, limit=len(out)), out)

    calls = CALLS if codec is Codec.NONE else CALLS // 10
    found = [
        figure(f"decode, {name}", "ns", per_record(decode, calls), aim=aim, more_is_better=False, rounds=ROUNDS),
    ]
    if codec is Codec.NONE:
        found.append(
            figure(f"encode, {name}", "ns", per_record(encode), aim=aim, more_is_better=False, rounds=ROUNDS),
        )
    return found


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--keep", type=Path, help="write the figures to FILE.json and FILE.md")
    keep = options.parse_args().keep
    plain = records(None, VALUE_BYTES)
    found = figures_of(f"{VALUE_BYTES} bytes", plain, aim=AIM_NS)
    found += figures_of(f"{VALUE_BYTES} bytes with a key of 8", records(b"a key: 8", VALUE_BYTES))
    found += figures_of("1000 bytes", records(None, 1000))
    for codec in (Codec.LZ4, Codec.SNAPPY, Codec.ZSTD, Codec.GZIP):
        found += figures_of(f"{VALUE_BYTES} bytes in {codec.name.lower()}", plain, codec=codec)
    report(found, command="python -m benchmarks.kafka_codec", keep=keep)


if __name__ == "__main__":
    main()
