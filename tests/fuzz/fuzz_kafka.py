"""Fuzz Kafka's codec: requests and batches are decoded or refused as documented.

Decoded data round-trips, and nothing expands beyond its limit.

Run as ``python -m tests.fuzz.fuzz_kafka``; FUZZ_SECONDS limits it, FUZZ_SEED repeats a run. The seed is printed first.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Final

from polywire.errors import PeerError
from polywire.protocols.kafka import client_codec, codec, encoder, schema
from polywire.protocols.kafka.client_batches import decode_batches, encode_batch
from polywire.protocols.kafka.compression import compress, decode_batch, expand
from polywire.protocols.kafka.crc32c import crc32c
from polywire.protocols.kafka.decoder import BATCH_HEAD_BYTES
from polywire.protocols.kafka.messages import SERVED, Codec, Refused, Request
from polywire.records.batch import stamp, validate
from polywire.records.columns import Header, Record
from polywire.records.rows import to_records
from tests.fuzz.chance import damaged, fuzz
from tests.vectors.kafka.filling import filled
from tests.vectors.kafka.test_batches import BATCHES

INPUTS: Final = 4  # of a round
EXPANDED_BYTES_MAX: Final = 100_000
BATCH_BYTES_MAX: Final = 100_000
CASES: Final = [
    (api, version) for api, served in SERVED.items() for version in range(served.answered_from, served.last + 1)
]
ODD: Final = [struct.pack(">i", number) for number in (-2, -1, 0, 1, 2**31 - 1, -(2**31))] + [
    b"\xff\xff\xff\xff\x0f",
    b"\xff" * 9 + b"\x01",
    b"\0",
    b"\1\1",
]
REFUSALS: Final = {2, 10, 32, 87}


@contextmanager
def documented() -> Iterator[None]:
    """Assert that a refusal is one of the errors that clients expect of a batch."""
    try:
        yield
    except Refused as refused:
        if refused.error not in REFUSALS:
            raise


def check_request(chance: random.Random) -> None:
    """Decode a damaged request, which closes the connection or round-trips."""
    api, version = chance.choice(CASES)
    body = filled(schema.message(api).request, version, count(chance.randrange(9)))
    frame = client_codec.encode_request(api, version, 7, body, client_id=chance.choice([None, "", "client"]))[4:]
    try:
        request = codec.decode_request(damaged(frame, chance, times_max=4, odd=ODD))
    except PeerError:
        return
    if request.body is None:
        return
    again = client_codec.encode_request(request.api, request.version, 7, request.body)
    assert codec.decode_request(again[4:]).body == request.body


def check_answer(chance: random.Random) -> None:
    """Decode a damaged response with a client, or see it refused."""
    api, version = chance.choice(CASES)
    request = Request(api, version, 7, None, ())
    sent = b"".join(codec.encode_response(request, filled(schema.message(api).response, version)))
    try:
        client_codec.decode_response(api, version, damaged(sent[4:], chance, times_max=4, odd=ODD))
    except PeerError:
        return


def some_batch(chance: random.Random) -> bytes:
    """Return a batch of a real client, or one of ours."""
    if chance.randrange(2):
        return chance.choice(list(BATCHES.values()))
    headers = tuple(
        Header(b"h" * chance.randrange(3), chance.choice([None, b"", b"v"])) for _ in range(chance.randrange(3))
    )
    records = [
        Record(
            value=chance.choice([None, b"", b"value" * 30]),
            key=chance.choice([None, b"", b"k"]),
            headers=headers,
            origin_time_us=chance.choice([None, 0, 1_700_000_000_000_000]),
        )
        for _ in range(chance.randrange(1, 9))
    ]
    return encode_batch(records, codec=chance.choice(list(Codec)), producer_id=chance.choice([-1, 5]), base_sequence=3)


def check_batch(chance: random.Random) -> None:
    """Decode a damaged batch, mostly with a correct checksum: it is refused or makes a sound one."""
    batch = damaged(some_batch(chance), chance, times_max=3, odd=ODD, front=chance.choice([0, 21, BATCH_HEAD_BYTES]))
    if len(batch) >= BATCH_HEAD_BYTES and chance.randrange(8):
        length = struct.pack(">i", len(batch) - 12)
        batch = batch[:8] + length + batch[12:17] + struct.pack(">I", crc32c(batch[21:])) + batch[21:]
    built = None
    with documented():
        built = decode_batch(batch, bytes_max=BATCH_BYTES_MAX)[1]
    if built is not None:
        validate(built.batch)
        check_fetch(built.batch, chance)
    try:
        decode_batches(batch)
    except PeerError:
        return


def check_fetch(batch: bytearray, chance: random.Random) -> None:
    """Encode a stored batch, whole or in two parts, and decode it again."""
    base = chance.choice([0, 5, 2**40])
    stamp(batch, 0, 1, 1, base, 0, 0)
    stored = to_records(batch)
    out = bytearray(1 << 20)
    state = encoder.begin(base, at=0, limit=chance.choice([len(out), len(batch)]))
    encoder.put_batches(batch, state, out)
    state[encoder.CAP] = len(out)
    state[encoder.POSITION] = 0
    assert encoder.put_batches(batch, state, out) == encoder.DONE
    found = decode_batches(out[: state[encoder.AT]])
    assert [(r.offset, r.key, r.value, len(r.headers)) for r in found] == [
        (r.offset, r.key, r.value, len(r.headers)) for r in stored
    ]


def check_expand(chance: random.Random) -> None:
    """Decompress damaged bytes: they stay within the limit, or are refused."""
    packing = chance.choice([Codec.GZIP, Codec.SNAPPY, Codec.LZ4, Codec.ZSTD])
    plain = chance.choice([b"", b"text " * 99, bytes(EXPANDED_BYTES_MAX), bytes(2 * EXPANDED_BYTES_MAX)])
    packed = damaged(bytes(compress(plain, packing)), chance, times_max=3, odd=ODD)
    with documented():
        assert len(expand(packed, packing, EXPANDED_BYTES_MAX)) <= EXPANDED_BYTES_MAX


def check_all(chance: random.Random) -> None:
    """Run one round."""
    check_request(chance)
    check_answer(chance)
    check_batch(chance)
    check_expand(chance)


if __name__ == "__main__":
    fuzz(check_all)
