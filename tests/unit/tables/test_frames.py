"""Topics as tables in Arrow and pandas: complete, or between offsets and times."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

import polywire
from polywire.errors import Invalid, Missing
from polywire.tables.frames import read_arrow, read_pandas, scan
from tests.unit.client.served import Served


@pytest.fixture
def filled(served: Served) -> str:
    with polywire.connect_sync(served.address) as client:
        for first in (0, 5):
            with client.producer() as producer:
                producer.send_many("t", [str(n) for n in range(first, first + 5)], keys=["k"] * 5, partition=1)
        client.send("t", "other", partition=0)
    return served.address


def values(address: str, **options: Any) -> list[Any]:
    return read_arrow(address, "t", columns=["value"], text=True, **options).column("value").to_pylist()


def test_a_topic_is_read_as_a_table(filled: str) -> None:
    table = read_arrow(filled, "t")
    assert table.column_names == ["key", "value", "partition", "offset", "timestamp"]
    assert table.column("value").to_pylist() == [b"other", *(b"%d" % n for n in range(10))]
    assert table.column("key").to_pylist() == [None, *[b"k"] * 10]
    assert table.column("partition").to_pylist() == [0, *[1] * 10]
    assert table.column("offset").to_pylist() == [0, *range(10)]
    assert sum(batch.num_rows for batch in scan(filled, "t")) == 11


def test_a_topic_is_read_between_bounds(filled: str) -> None:
    numbers = [str(n) for n in range(10)]
    assert values(filled, start=3, end=7) == numbers[3:7]
    assert values(filled, start=1, end=99) == numbers[1:]
    assert values(filled, start="latest") == []
    with polywire.connect_sync(filled) as client:
        begun = client.fetch("t", 1, 5, records_max=1)[0].time
    assert values(filled, start=begun, end=begun + timedelta(microseconds=1)) == numbers[5:]
    assert values(filled, end=begun) == numbers[:5]


def test_a_topic_is_read_as_a_frame(filled: str) -> None:
    frame = read_pandas(filled, "t", text=True)
    assert list(frame["value"]) == ["other", *(str(n) for n in range(10))]


def test_invalid_arguments_are_refused(filled: str) -> None:
    with pytest.raises(Invalid, match="unknown=size"):
        list(scan(filled, "t", columns=["size"]))
    with pytest.raises(Invalid, match="start must be"):
        list(scan(filled, "t", end="now"))  # type: ignore[arg-type]  # what is wanted is said
    with pytest.raises(Missing):
        read_arrow(filled, "missing")
