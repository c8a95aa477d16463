"""Cursus batches round-trip through the codec, a stored batch and the codec again."""

from __future__ import annotations

from array import array

import hypothesis.strategies as st
from hypothesis import given, settings

from polywire.client.cursus import decode_batch, encode_batch
from polywire.protocols.cursus import decoder
from polywire.protocols.cursus.messages import PREFIX_BYTES
from polywire.records.columns import Event, Record
from tests.unit.protocols.cursus.dialogue import World

events = st.none() | st.builds(
    Event,
    type=st.text(min_size=1, max_size=8),
    schema_version=st.integers(0, 2**32 - 1),
    aggregate_version=st.integers(0, 2**63 - 1),
    metadata=st.none() | st.binary(min_size=1, max_size=8),
)
records = st.builds(
    Record,
    value=st.binary(max_size=300),
    key=st.none() | st.binary(min_size=1, max_size=20),
    event=events,
)


@settings(max_examples=60)
@given(st.lists(records, min_size=1, max_size=20), st.data())
def test_messages_round_trip(sent: list[Record], data: st.DataObject) -> None:
    peer = World().connect()
    peer.ask("CREATE topic=t partitions=1")
    assert peer.say(encode_batch("t", 0, "1", sent))[0].startswith(b'{"status":"OK"')
    start = data.draw(st.integers(0, len(sent)))
    most = data.draw(st.integers(1, 25))
    (reply,) = peer.say(f"CONSUME topic=t partition=0 offset={start} member=m batch={most}".encode())
    found = decode_batch(reply)
    assert [record.offset for record in found] == list(range(start, min(start + most, len(sent))))
    for record in found:
        original = sent[record.offset]
        assert (record.value, record.key, record.event) == (original.value, original.key, original.event)


@settings(max_examples=150)
@given(st.lists(records, min_size=1, max_size=4), st.data())
def test_a_truncated_batch_is_refused(sent: list[Record], data: st.DataObject) -> None:
    body = encode_batch("topic", 3, "all", sent)
    cut = body[: data.draw(st.integers(PREFIX_BYTES + 2, len(body) - 1))]
    room = len(body) // decoder.MESSAGE_BYTES_MIN + 1
    head, spans = array("q", bytes(8 * decoder.HEAD_WORDS)), array("q", bytes(32 * room))
    details = array("q", bytes(8 * decoder.DETAIL_WORDS * room))
    assert decoder.scan(cut, decoder.MODERN, head, spans, details) < 0
    assert decoder.scan(body, decoder.MODERN, head, spans, details) == 0
    assert head[decoder.COUNT] == len(sent)
    assert head[decoder.END] == len(body)
    assert head[decoder.PAYLOAD_BYTES] == sum(len(record.value or b"") for record in sent)
