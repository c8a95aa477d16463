"""The JSON of offsets in Spark's checkpoints."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polywire.errors import Invalid
from polywire.spark.offsets import PartitionKey, Position, SourceOffset, decode_offset, encode_offset, total_next

_counts = st.integers(0, 2**63 - 1)
_positions = st.builds(
    Position,
    topic_id=st.binary(min_size=16, max_size=16).map(bytes.hex),
    incarnation=_counts,
    epoch=st.integers(0, 2**32 - 1),
    next_offset=_counts,
    begin_offset=st.none() | _counts,
)


def _one_id_per_topic(positions: dict[PartitionKey, Position]) -> dict[PartitionKey, Position]:
    ids = {key.topic: position.topic_id for key, position in positions.items()}
    return {
        key: Position(ids[key.topic], p.incarnation, p.epoch, p.next_offset, p.begin_offset)
        for key, p in positions.items()
    }


_keys = st.builds(PartitionKey, st.sampled_from(["a", "b.c", "ö"]), st.integers(0, 20))
_offsets = st.builds(
    SourceOffset, st.dictionaries(_keys, _positions, max_size=12).map(_one_id_per_topic), initial=st.booleans()
)


@given(_offsets)
def test_an_offset_round_trips_through_the_checkpoint(offset: SourceOffset) -> None:
    text = json.dumps(encode_offset(offset))
    assert decode_offset(json.loads(text)) == offset


@given(_offsets)
def test_equal_offsets_are_equal_strings(offset: SourceOffset) -> None:
    shuffled = SourceOffset(dict(reversed(list(offset.positions.items()))), offset.initial)
    text = json.dumps(encode_offset(offset))
    assert json.dumps(encode_offset(shuffled)) == text
    assert text == json.dumps(json.loads(text), sort_keys=True)


def test_the_stored_form_does_not_change() -> None:
    offset = SourceOffset(
        {
            PartitionKey("orders", 0): Position("9f" * 16, 17, 3, 4200, begin_offset=0),
            PartitionKey("orders", 1): Position("9f" * 16, 18, 3, 7),
        }
    )
    assert json.dumps(encode_offset(offset)) == (
        '{"initial": false, "topics": {"orders": {"id": "9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f", "partitions": {'
        '"0": {"begin": 0, "epoch": 3, "incarnation": 17, "next": 4200}, '
        '"1": {"epoch": 3, "incarnation": 18, "next": 7}}}}, "version": 1}'
    )
    assert total_next(offset) == 4207


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"version": 2, "initial": false, "topics": {}}',
        '{"version": 1, "topics": {}}',
        '{"version": 1, "initial": false, "topics": {"t": {}}}',
        '{"version": 1, "initial": false, "topics": {"t": {"id": "", "partitions": {"x": {}}}}}',
        '{"version": 1, "initial": false, "topics": [1]}',
    ],
)
def test_invalid_offsets_are_refused(text: str) -> None:
    with pytest.raises(Invalid, match="checkpoint"):
        decode_offset(json.loads(text))
