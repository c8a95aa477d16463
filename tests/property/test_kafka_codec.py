"""Kafka's codec round-trips any records; damaged data is refused or decoded, and does nothing else."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from polywire.errors import PeerError
from polywire.protocols.kafka import client_codec, codec, encoder, schema
from polywire.protocols.kafka.client_batches import decode_batches, encode_batch
from polywire.protocols.kafka.compression import decode_batch
from polywire.protocols.kafka.messages import SERVED, Api, Codec, Refused, Request
from polywire.records.batch import stamp, validate
from polywire.records.columns import Header, Record
from polywire.records.rows import from_records, to_records
from tests.property.records.strategies import LISTS
from tests.vectors.kafka.filling import filled

_TIMES_MS = st.integers(-(2**51), 2**51).filter(lambda time: time != -1)
_HEADERS = st.builds(Header, key=st.binary(max_size=9), value=st.none() | st.binary(max_size=9))
PRODUCED = st.lists(
    st.builds(
        Record,
        value=st.none() | st.binary(max_size=300),
        key=st.none() | st.binary(max_size=20),
        headers=st.lists(_HEADERS, max_size=3).map(tuple),
        origin_time_us=st.none() | _TIMES_MS.map(lambda time: time * 1000),
    ),
    min_size=1,
    max_size=30,
)
VERSIONS = st.sampled_from(
    [(api, version) for api, served in SERVED.items() for version in range(served.answered_from, served.last + 1)]
)


def shown(records: list[Record]) -> list[tuple[object, ...]]:
    return [
        (record.key, record.value, [(header.key, header.value) for header in record.headers], record.origin_time_us)
        for record in records
    ]


@given(records=PRODUCED, packing=st.sampled_from(Codec))
def test_produced_records_are_stored_and_fetched(records: list[Record], packing: Codec) -> None:
    batch = encode_batch(records, codec=packing)
    _, built = decode_batch(batch, bytes_max=len(batch))
    validate(built.batch)
    assert shown(to_records(built.batch)) == shown(records)
    stamp(built.batch, 0, 1, 1, 50, 0, 0)
    out = bytearray(1 << 20)
    state = encoder.begin(50, at=0, limit=len(out))
    assert encoder.put_batches(built.batch, state, out) == encoder.DONE
    found = decode_batches(out[: state[encoder.AT]])
    assert [record.offset for record in found] == list(range(50, 50 + len(records)))
    without_times = [
        record if record.origin_time_us is not None else replace(record, origin_time_us=0) for record in records
    ]
    assert shown(found) == shown(without_times)


@given(records=LISTS, limit=st.integers(0, 5000))
def test_records_of_any_protocol_are_fetched_in_pieces(records: list[Record], limit: int) -> None:
    batch = from_records(records)
    stamp(batch, 0, 1, 1, 0, 0, 0)
    found: list[Record] = []
    offset = 0
    for _ in range(len(records)):
        out = bytearray(limit)
        state = encoder.begin(offset, at=0, limit=limit)
        reason = encoder.put_batches(batch, state, out)
        if reason == encoder.FULL and state[encoder.AT] == 0:
            out = bytearray(state[encoder.NEEDED])
            state = encoder.begin(offset, at=0, limit=len(out))
            reason = encoder.put_batches(batch, state, out)
            assert state[encoder.NEXT] > offset
        found += decode_batches(out[: state[encoder.AT]])
        offset = state[encoder.NEXT]
        if reason == encoder.DONE:
            break
    assert [(record.offset, record.key, record.value) for record in found] == [
        (number, record.key, record.value) for number, record in enumerate(records)
    ]


@given(records=PRODUCED, at=st.integers(0), bits=st.integers(1, 255), packing=st.sampled_from(Codec))
def test_a_damaged_batch_is_refused(records: list[Record], at: int, bits: int, packing: Codec) -> None:
    """The checksum covers everything but the first bytes, which mean little."""
    batch = bytearray(encode_batch(records, codec=packing))
    at %= len(batch)
    batch[at] ^= bits
    try:
        decode_batch(batch, bytes_max=len(batch))
    except Refused:
        return
    assert 12 <= at < 16


@given(case=VERSIONS, start=st.integers(1, 9))
def test_requests_and_responses_round_trip(case: tuple[Api, int], start: int) -> None:
    api, version = case
    body = filled(schema.message(api).request, version, count(start))
    frame = client_codec.encode_request(api, version, start, body, client_id="c")
    request = codec.decode_request(frame[4:])
    assert (request.api, request.version, request.correlation_id, request.body) == (api, version, start, body)
    answer = filled(schema.message(api).response, version, count(start))
    sent = b"".join(codec.encode_response(request, answer))
    assert client_codec.decode_response(api, version, sent[4:]) == (start, answer)


@given(case=VERSIONS, data=st.data())
def test_a_damaged_request_is_decoded_or_refused(case: tuple[Api, int], data: st.DataObject) -> None:
    api, version = case
    frame = bytearray(client_codec.encode_request(api, version, 1, filled(schema.message(api).request, version))[4:])
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        request = codec.decode_request(bytes(frame[: data.draw(st.integers(0, len(frame)))]))
    except PeerError:
        return
    assert isinstance(request, Request)
