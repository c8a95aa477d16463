"""Record batches of real clients and codecs, and the one of the specification: all hold the same four records.

``batches.txt`` was written with kafka-python 3.0.12, aiokafka 0.14.0, and the records of the first of them compressed
in further ways with lz4 4.4.5, zstandard 0.25.0 and cramjam: a line is a name and the batch.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from polywire.protocols.kafka import encoder
from polywire.protocols.kafka.client_batches import decode_batches, encode_batch
from polywire.protocols.kafka.compression import decode_batch
from polywire.protocols.kafka.decoder import BATCH_BYTES_MAX, check_batch
from polywire.protocols.kafka.messages import Codec
from polywire.records.batch import read_header, stamp, validate
from polywire.records.columns import Header, Record
from polywire.records.rows import to_records

BATCHES = {
    name: bytes.fromhex(batch)
    for name, _, batch in (
        line.partition(" ") for line in (Path(__file__).parent / "batches.txt").read_text(encoding="ascii").splitlines()
    )
}
WORKED = bytes.fromhex(
    "0000000000000000 0000003e ffffffff 02 675a95fd 0000 00000000 0000018bcfe56800 0000018bcfe56800 ffffffffffffffff ffff ffffffff 00000001"
    "18 000000 026b 0276 02 0268 0231"
)
ONE = Record(value=b"v", key=b"k", headers=(Header(b"h", b"1"),), origin_time_us=1_700_000_000_000_000)
RECORDS = [
    ONE,
    Record(value=b"text " * 60, origin_time_us=1_699_999_999_000_000),
    Record(
        value=None,
        key=b"",
        headers=(Header(b"a", None), Header(b"a", b""), Header(b"b", "\u00e9".encode())),
        origin_time_us=1_700_000_000_500_000,
    ),
    Record(value=b"", key=b"key", origin_time_us=1_700_000_003_000_000),
]


def shown(records: list[Record]) -> list[tuple[object, ...]]:
    return [
        (record.key, record.value, [(header.key, header.value) for header in record.headers], record.origin_time_us)
        for record in records
    ]


@pytest.mark.parametrize("name", list(BATCHES))
def test_batches_of_clients_are_stored_correctly(name: str) -> None:
    head, built = decode_batch(BATCHES[name], bytes_max=BATCH_BYTES_MAX)
    validate(built.batch)
    assert shown(to_records(built.batch)) == shown(RECORDS)
    assert (built.max_time_ms, built.null_keys) == (1_700_000_003_000, 1)
    stored = read_header(built.batch)
    if head.producer_id >= 0:
        assert (stored.producer_epoch, stored.base_sequence) == (7, 2_147_483_646)
        assert b"k" + (4242).to_bytes(8, "big") in bytes(built.batch)
    else:
        assert stored.producer_epoch == -1
    assert shown(decode_batches(BATCHES[name])) == shown(RECORDS)


@pytest.mark.parametrize("name", ["kafka-python/none", "aiokafka/none"])
def test_stored_batches_are_encoded_as_clients_write_them(name: str) -> None:
    """Except for the partition's epoch, before the CRC, and the sequence of a batch without a producer."""
    _, built = decode_batch(BATCHES[name], bytes_max=BATCH_BYTES_MAX)
    stamp(built.batch, 0, 1, 9, 1000, 0, 1_800_000_000_000_000)
    out = bytearray(4096)
    state = encoder.begin(1000, at=10, limit=4000)
    assert encoder.put_batches(built.batch, state, out) == encoder.DONE
    written = bytes(out[10 : state[encoder.AT]])
    assert written[:8] == (1000).to_bytes(8, "big")
    assert written[12:16] == (9).to_bytes(4, "big")
    expected = BATCHES["kafka-python/none"]
    assert written[8:12] + written[16:] == expected[8:12] + expected[16:]
    assert state[encoder.NEXT] == 1004


def test_the_worked_example() -> None:
    head, built = decode_batch(WORKED, bytes_max=BATCH_BYTES_MAX)
    assert (head.end, head.record_count, head.producer_id) == (74, 1, -1)
    assert shown(to_records(built.batch)) == shown([ONE])
    assert encode_batch([ONE]) == WORKED


@pytest.mark.parametrize("codec", list(Codec))
def test_our_client_writes_every_codec(codec: Codec) -> None:
    batch = encode_batch(RECORDS, codec=codec, producer_id=4242, producer_epoch=7, base_sequence=5)
    head = check_batch(batch)
    assert (head.codec, head.producer_id, head.producer_epoch, head.base_sequence) == (codec, 4242, 7, 5)
    _, built = decode_batch(batch, bytes_max=BATCH_BYTES_MAX)
    assert shown(to_records(built.batch)) == shown(RECORDS)
    assert shown(decode_batches(batch + batch[:-1])) == shown(RECORDS)
