"""For any records: batches round-trip and reshape like lists, and damaged batches do no harm."""

from __future__ import annotations

import os
import subprocess
import sys
from array import array
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

import polywire
from polywire.errors import Invalid
from polywire.records import batch
from polywire.records.columns import Record
from polywire.records.compression import Compression, compress_body, expand_body
from polywire.records.rows import from_records, producer_of, to_records
from tests.property.records.strategies import LISTS
from tests.unit.records.samples import payloads, reseal, spans

_SEQUENCES = st.none() | st.integers(0, 2**63)


@given(LISTS, st.none() | st.binary(min_size=1, max_size=255), st.integers(-1, 2**63 - 1), st.integers(0, 2**63))
def test_records_round_trip(records: list[Record], producer_id: bytes | None, epoch: int, sequence: int) -> None:
    built = from_records(records, producer_id=producer_id, producer_epoch=epoch, base_sequence=sequence)
    expected = [
        replace(record, sequence=None if producer_id is None else sequence + i) for i, record in enumerate(records)
    ]
    assert batch.validate(built) == len(built)
    assert to_records(built) == expected
    assert producer_of(built) == producer_id


@given(LISTS, st.lists(_SEQUENCES, min_size=40, max_size=40))
def test_sequences_round_trip(records: list[Record], sequences: list[int | None]) -> None:
    numbered = [replace(record, sequence=sequence) for record, sequence in zip(records, sequences, strict=False)]
    stored = to_records(from_records(numbered, producer_id=b"p", base_sequence=3))
    last = 2
    for given_record, record in zip(numbered, stored, strict=True):
        last = last + 1 if given_record.sequence is None else given_record.sequence
        assert record.sequence == last


@given(LISTS, st.data())
def test_spans_and_rows_select_records(records: list[Record], data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(0, len(records) - 1), min_size=1, max_size=20))
    pairs = payloads(records)
    flags = bytes(record.flags & 1 for record in records)
    built = batch.from_spans(*spans(pairs), array("i", rows), flags)
    assert batch.validate(built) == len(built)
    assert built == from_records([Record(key=pairs[i][0], value=pairs[i][1], flags=flags[i]) for i in rows])


@given(st.lists(LISTS, min_size=1, max_size=4))
def test_merging_is_concatenation(lists: list[list[Record]]) -> None:
    merged = batch.merge([from_records(records) for records in lists])
    assert batch.validate(merged) == len(merged)
    assert merged == from_records([record for records in lists for record in records])


@given(LISTS, st.booleans(), st.data())
def test_slicing_and_taking_match_lists(records: list[Record], produced: bool, data: st.DataObject) -> None:
    whole = from_records(records, producer_id=b"p" if produced else None, base_sequence=11 if produced else 0)
    batch.stamp(whole, 0, 5, 1, 1000, 10_000, 77)
    start = data.draw(st.integers(0, len(records) - 1))
    stop = data.draw(st.integers(start + 1, len(records)))
    part = batch.slice_records(whole, start, stop)
    assert batch.validate(part) == len(part)
    assert to_records(part) == to_records(whole)[start:stop]
    assert batch.address_of(part, 0) == batch.address_of(whole, start)
    rows = data.draw(st.lists(st.integers(0, len(records) - 1), min_size=1, max_size=20))
    taken = batch.take(whole, array("i", rows))
    assert batch.validate(taken) == len(taken)
    stored = [replace(record, offset=-1, append_time_us=0) for record in to_records(whole)]
    assert to_records(taken) == [stored[row] for row in rows]


@given(LISTS)
def test_addresses_add_up(records: list[Record]) -> None:
    built = from_records(records)
    batch.stamp(built, 0, 5, 1, 1000, 10_000, 77)
    address = 10_000
    for i, record in enumerate(records):
        assert batch.address_of(built, i) == address
        assert batch.record_at_address(built, address) == i
        assert batch.record_at_address(built, address + 1) == -1
        address += 10 - (record.flags & 1) + len(record.value or b"")
    assert batch.read_header(built).address_span == address - 10_000


@given(LISTS, st.booleans(), st.data())
def test_damage_is_refused_or_harmless(records: list[Record], produced: bool, data: st.DataObject) -> None:
    """With corrected checksums, either a rule refuses the batch or every function works on it."""
    damaged = from_records(records, producer_id=b"p" if produced else None)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        batch.validate(reseal(damaged))
    except Invalid:
        return
    assert len(to_records(damaged)) == batch.read_header(damaged).record_count
    batch.take(damaged, array("i", [0]))
    batch.slice_records(damaged, 0, 1)
    batch.spans_of(damaged)


@given(st.binary(max_size=400), st.booleans())
def test_noise_is_refused(noise: bytes, magic: bool) -> None:
    noise = b"PWB1" + noise if magic else noise
    assert not batch.check_header(noise, 0)
    for call in (batch.validate, batch.layout, batch.spans_of):
        try:
            call(noise)
        except Invalid:
            continue
        raise AssertionError("noise was taken for a batch")


@given(LISTS, st.sampled_from(Compression))
def test_compressed_bodies_round_trip(records: list[Record], kind: Compression) -> None:
    built = from_records(records)
    packed = compress_body(built, kind)
    assert len(packed) <= len(built)
    assert expand_body(packed) == built


_DIGESTS = """
import sys
from array import array
from polywire.records import batch, checksum
from polywire.records.rows import from_records
from tests.unit.records.samples import PRODUCER, RICH, spans
plain = batch.from_spans(*spans([(b"k%d" % i, b"v" * i) for i in range(200)]))
rich = from_records(RICH, producer_id=PRODUCER, base_sequence=7)
built = [plain, rich, batch.merge([from_records(RICH), plain]), batch.slice_records(rich, 1, 4)]
built.append(batch.take(rich, array("i", [4, 0, 2])))
for one in built:
    batch.stamp(one, 0, 1, 2, 3, 4, 5)
    print(f"{checksum.xxh64(one):016x}")
"""


def test_compiled_and_uncompiled_code_make_the_same_bytes() -> None:
    """If nothing is compiled, both are the source and this shows little."""
    answers = []
    for pure in ("0", "1"):
        environment = {**os.environ, "POLYWIRE_PURE": pure, "PYTHONPATH": os.pathsep.join(sys.path)}
        run = subprocess.run(
            [sys.executable, "-c", _DIGESTS], env=environment, capture_output=True, text=True, check=True
        )
        answers.append(run.stdout.split())
    assert len(answers[0]) == 5
    assert answers[0] == answers[1], polywire.compiled_modules()
