"""Typed columns in the writer: no value stops a table, columns are added with their rows, and older rows get them later."""

from __future__ import annotations

import io
import json
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyiceberg.table import StaticTable

from polywire.errors import Invalid
from polywire.store.objects import Objects
from polywire.table_columns import (
    COLUMNS_MAX,
    ERROR_COLUMN,
    FIXED,
    TypedColumn,
    column_name,
    parse_columns,
    plan_columns,
)
from polywire.table_orders import iceberg_metadata_name
from polywire.tables import parquet
from polywire.tables.columns import ARROW_SCHEMA, arrow_schema
from polywire.tables.delta_log import CHECKPOINT_COMMITS, DataFile
from polywire.tables.iceberg import IcebergMetadata
from polywire.tables.typed import ERROR_CHARS_MAX, ColumnMaker, Extractor
from polywire.tables.writer import TopicTable
from polywire.testing.memory_objects import MemoryObjects
from tests.unit.tables.rig import TOPIC, Clock, FakeTopic, check, load, merge, save

# Parsing the setting


def test_a_list_of_columns() -> None:
    text = " id LONG, `a ``b`:string,total decimal( 10 , 2 ),d dec , Timestamp timestamp, x.y bigint,z INTEGER,r real"
    assert [(column.field, column.name, column.type) for column in parse_columns(text)] == [
        ("id", "id", "long"),
        ("a `b", "a_`b", "string"),
        ("total", "total", "decimal(10,2)"),
        ("d", "d", "decimal(10,0)"),
        ("Timestamp", "value_Timestamp", "timestamp"),
        ("x.y", "x_y", "long"),
        ("z", "z", "int"),
        ("r", "r", "float"),
    ]
    assert parse_columns("") == parse_columns("  ") == parse_columns("Infer") == ()
    assert len(parse_columns(", ".join(f"c{number} int" for number in range(COLUMNS_MAX)))) == COLUMNS_MAX


@pytest.mark.parametrize(
    "text",
    [
        "id",
        "id,",
        "id long,",
        ",",
        "id longs",
        "id long(3)",
        "id decimal(39,1)",
        "id decimal(0,0)",
        "id decimal(3,4)",
        "id decimal(1",
        "id long, ID string",
        "a.b long, a_b long",
        "key long, value_key long",
        "`` long",
        "id long not null",
        "id struct<a:int>",
        "\ud800 long",
        "n" * 256 + " long",
        "infer, id long",
        " " * 20_000,
        ", ".join(f"c{number} int" for number in range(COLUMNS_MAX + 1)),
    ],
)
def test_a_wrong_list_is_rejected(text: str) -> None:
    with pytest.raises(Invalid, match="topic setting is invalid: table_columns "):
        parse_columns(text)


@given(st.text())
def test_any_text_is_parsed_or_rejected(text: str) -> None:
    try:
        plan_columns((), text)
    except Invalid:
        return


def test_names_of_columns_that_every_table_has() -> None:
    assert (*ARROW_SCHEMA.names, "_error") == FIXED
    assert [column_name(name) for name in ("KEY", "_error", "a=b\n", "", "é" * 200)] == [
        "value_KEY",
        "value__error",
        "a_b_",
        None,
        None,
    ]


# Making columns of values


EVERY = parse_columns(
    "b boolean, i int, l long, f float, d double, s string, day date, at timestamp, n decimal(10,2), o decimal(38,0)"
)
HOSTILE = [
    b"",
    b" ",
    b"null",
    b"[1]",
    b"5",
    b'"text"',
    b"{",
    b"{}",
    b"{} {}",
    b'{"l":1}\n{"l":2}',
    b"\xff",
    b'{"\xff":1,"l":1}',
    b'{"x":"\xff","l":1}',
    b'{"s":"\xff"}',
    b'{"s":"\\ud800"}',
    b'{"s":["\\ud800"]}',
    b'{"x":"\\ud800","l":1}',
    b'{"s":"a\\u0000b"}',
    b'{"s":"a\x00b"}',
    b'\xef\xbb\xbf{"l":1}',
    b'{"l":9223372036854775807,"i":2147483647}',
    b'{"l":9223372036854775808}',
    b'{"l":' + b"9" * 5000 + b"}",
    b'{"d":' + b"9" * 5000 + b"}",
    b'{"n":' + b"9" * 5000 + b"}",
    b'{"n":"' + b"9" * 5000 + b'"}',
    b'{"l":1.0}',
    b'{"l":true,"b":1,"i":"1"}',
    b'{"i":2147483648}',
    b'{"d":NaN}',
    b'{"d":1e400}',
    b'{"d":-1e-400,"f":1}',
    b'{"f":1e39}',
    b'{"f":3.4028235e38}',
    b'{"n":1e1000000}',
    b'{"n":"1E+999999999999"}',
    b'{"n":"1E-999999999999"}',
    b'{"n":"NaN","o":"Infinity"}',
    b'{"n":12345678.90,"o":' + b"9" * 38 + b"}",
    b'{"n":123456789.1}',
    b'{"n":1.234}',
    b'{"at":"0001-01-01T00:00:00+23:00"}',
    b'{"at":"9999-12-31T23:59:59.9999999-23:00"}',
    b'{"at":"2026-11-27T03:00:00","day":"2026-11-27"}',
    b'{"at":"2026-11-27","day":"2026-11-31"}',
    b'{"at":"2026-11-27T23:59:60Z","day":20260}',
    b'{"l":1,"l":"x"}',
    b'{"l":"x","l":1}',
    b'{"s":{"a":[1, {"b":null}]}}',
    b'{"s":5}',
    b'{"s":null,"l":null}',
    b'{"s":' + b"[" * 100_000 + b"}",
    b'{"s":' + b"[" * 5000 + b"]" * 5000 + b"}",
    b'{"x":' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b',"l":1}',
    b'{"s":"' + b"x" * (1 << 20) + b'"}',
    b"{" + b",".join(b'"k%d":1' % number for number in range(5000)) + b',"l":7}',
]


def extracted(values: list[bytes | None], columns: tuple[TypedColumn, ...] = EVERY, *, batch: int = 1000) -> list[Any]:
    """Return the rows: the error, then the columns."""
    extractor = Extractor(columns)
    rows: list[Any] = []
    for first in range(0, len(values), batch):
        found = extractor.extract(pa.array(values[first : first + batch], pa.binary()))
        rows += zip(*(array.to_pylist() for array in (found.errors, *found.arrays)), strict=True)
    return rows


def test_hostile_values_cost_only_their_own_row() -> None:
    good = b'{"b":true,"i":1,"l":2,"f":0.5,"d":1.5,"s":"t","day":"2026-11-27","at":"2026-11-27T05:00:00+02:00","n":1.5}'
    rows = extracted([item for value in HOSTILE for item in (value, None, good)])
    nothing = (None,) * len(EVERY)
    moment = datetime(2026, 11, 27, 3, tzinfo=UTC)
    expected = (None, True, 1, 2, 0.5, 1.5, "t", date(2026, 11, 27), moment, Decimal("1.50"), None)
    for at, value in enumerate(HOSTILE):
        assert rows[3 * at + 1] == (None, *nothing), value[:80]
        assert rows[3 * at + 2] == expected, value[:80]
        error = rows[3 * at][0]
        assert error is None or (error.isprintable() and len(error) <= ERROR_CHARS_MAX)


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (b'{"d":"abc"}', 'd: expected double, found string "abc"'),
        (b'{"l":1.0,"i":{}}', "i: expected int, found object {}; l: expected long, found number 1.0"),
        (b"[1]", "value is not a JSON object"),
        (b'{"x":"\xff"}', "value is not UTF-8"),
        (b'{"n":1.234}', "n: expected decimal(10,2), found number 1.234"),
        (b'{"at":"0001-01-01T00:00:00+23:00"}', 'at: expected timestamp, found string "0001-01-01T00:00:00+23:00"'),
        (b'{"l":"a\\nb"}', 'l: expected long, found string "a\\nb"'),
        (b'{"l":"x","l":1}', None),
        (b'{"s":5}', None),
    ],
)
def test_errors(value: bytes, error: str | None) -> None:
    assert extracted([value])[0][0] == error


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
OBJECTS = st.dictionaries(st.sampled_from([column.field for column in EVERY] + ["x", "y"]), JSON, max_size=5)


@given(st.lists(OBJECTS.map(lambda item: json.dumps(item).encode()) | st.sampled_from(HOSTILE), max_size=8))
def test_a_row_depends_on_its_value_only(values: list[bytes]) -> None:
    """Neither on other rows, nor on the columns that are made with it."""
    alone = [extracted([value])[0] for value in values]
    assert extracted(list(values)) == alone
    assert extracted(list(values), batch=1) == alone
    for number, column in enumerate(EVERY):
        assert [row[1] for row in extracted(list(values), (column,))] == [row[number + 1] for row in alone]


# Tables


def table_of(topic: FakeTopic, objects: Objects, columns: str, url: str = "file:///t") -> TopicTable:
    clock = Clock()
    iceberg = IcebergMetadata(objects, url, now_ms=clock.now_ms, pause=lambda _: None)
    return TopicTable(
        TOPIC, objects, topic, now_ms=clock.now_ms, pause=lambda _: None, iceberg=iceberg, columns=columns
    )


def append(topic: FakeTopic, objects: Objects, columns: str) -> TopicTable:
    table = table_of(topic, objects, columns)
    while table.append().behind:
        pass
    check(topic, objects)
    return table


def types(objects: Objects) -> dict[str, str]:
    return {column.name: column.type for column in load(objects).columns[1:]}


def typed_rows(objects: Objects, folder: Path) -> list[dict[str, Any]]:
    """Return the typed columns, about which Delta and Iceberg agree."""
    place = save(objects, folder)
    found = deltalake.DeltaTable(str(place)).to_pyarrow_table().drop_columns(["timestamp", "headers", "key"])
    rows = sorted(found.to_pylist(), key=lambda row: (row["partition"], row["offset"]))
    version = int(objects.read("metadata/version-hint.text").content)
    metadata = (place / iceberg_metadata_name(version)).read_text().replace("file:///t", f"file://{place}")
    moved = place / "moved.metadata.json"
    moved.write_text(metadata)
    schema = StaticTable.from_metadata(str(moved)).schema()
    assert [item.name for item in schema.fields] == arrow_schema(load(objects).columns).names
    return rows


def test_inferred_columns_are_committed_with_their_rows(tmp_path: Path) -> None:
    topic, objects = FakeTopic(2), MemoryObjects()
    topic.produce(0, b'{"id":1,"total":5,"who":"a","none":null}', None, b"no JSON")
    topic.produce(1, b'{"id":2,"total":5.5,"flag":true,"more":{"a":1},"key":"k"}')
    append(topic, objects, "infer")
    assert types(objects) == {
        "id": "long",
        "total": "double",  # also in the rows of the other partition
        "who": "string",
        "flag": "boolean",
        "more": "string",
        "value_key": "string",
    }
    assert [row["total"] for row in typed_rows(objects, tmp_path)] == [5.0, None, None, 5.5]
    assert len(load(objects).files) == 1
    topic.produce(0, b'{"id":"x","later":1}')
    append(topic, objects, "infer")
    row = typed_rows(objects, tmp_path)[3]
    assert (row["later"], row["_error"]) == (1, 'id: expected long, found string "x"')
    assert [column.field_id for column in load(objects).columns] == [11, *range(100, 107)]


def test_columns_that_are_found_after_rows_were_written_begin_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "ROW_GROUP_ROWS", 7)  # as many as a chunk has
    topic, objects = FakeTopic(1), MemoryObjects()
    topic.produce(0, *[b'{"a":1}'] * 14, *[b'{"b":1}'] * 14, *[b'{"a":1.5}'] * 3)
    table = append(topic, objects, "infer")
    state = load(objects)
    assert types(objects) == {"a": "long", "b": "long"}
    assert [(file.row_count, "b" in file.nulls) for file in state.files.values()] == [(14, False), (17, True)]
    assert state.version == 1
    assert table.plan_merge() is None  # no row of the first file has the field


def test_the_number_of_columns_is_limited() -> None:
    topic, objects = FakeTopic(1), MemoryObjects()
    for number in range(COLUMNS_MAX + 50):
        topic.produce(0, b'{"f%d":1}' % number)
    table = append(topic, objects, "infer")
    assert len(load(objects).columns) == COLUMNS_MAX + 1
    assert table.typed is not None
    assert table.typed.notes == "other fields are ignored: the table has 200 typed columns"
    topic.produce(0, b'{"f249":1,"f1":5}')
    append(topic, objects, "infer")
    assert len(load(objects).columns) == COLUMNS_MAX + 1
    version = int(objects.read("metadata/version-hint.text").content)
    metadata = json.loads(objects.read(iceberg_metadata_name(version)).content)
    assert metadata["last-column-id"] == 100 + COLUMNS_MAX - 1


def test_fields_with_names_that_differ_in_case_are_one_column() -> None:
    topic, objects = FakeTopic(1), MemoryObjects()
    topic.produce(0, b'{"id":1,"Id":2,"":3,"' + b"n" * 300 + b'":4}')
    table = append(topic, objects, "infer")
    assert types(objects) == {"id": "long"}
    assert table.typed is not None
    assert "Id is not added: the column of another field has this name" in table.typed.notes


def test_a_column_keeps_its_type() -> None:
    topic, objects = FakeTopic(1), MemoryObjects()
    topic.produce(0, b'{"total":1}')
    append(topic, objects, "total long")
    table = append(topic, objects, "total double, city string")
    assert types(objects) == {"total": "long", "city": "string"}
    assert table.typed is not None
    assert table.typed.notes == "total stays long"


def test_rows_that_were_written_before_get_columns_later(tmp_path: Path) -> None:
    topic, objects = FakeTopic(1), MemoryObjects()
    topic.produce(0, b'{"a":1,"b":2}', b"no JSON")
    append(topic, objects, "")
    topic.produce(0, b'{"a":3,"b":"x"}')
    append(topic, objects, "a long")
    topic.produce(0, b'{"a":5,"b":6}')
    table = append(topic, objects, "b long")
    while merge(table):
        pass
    check(topic, objects)
    rows = [(row["a"], row["b"], row["_error"]) for row in typed_rows(objects, tmp_path)]
    assert [row[:2] for row in rows] == [(None, 2), (None, None), (3, None), (None, 6)]
    assert rows[1][2].startswith("value is not JSON")
    assert rows[2][2] == 'b: expected long, found string "x"'
    table = append(topic, objects, "a long, b long")
    while merge(table):
        pass
    assert [row["a"] for row in typed_rows(objects, tmp_path)] == [1, None, 3, 5]
    table = append(topic, objects, "")
    assert not merge(table)


def test_a_topic_that_was_created_again_begins_without_columns() -> None:
    topic, objects = FakeTopic(1), MemoryObjects()
    topic.produce(0, b'{"a":1}')
    append(topic, objects, "infer")
    again = FakeTopic(1, topic_id=b"other topic 0123")
    again.produce(0, b'{"a":"text"}')
    append(again, objects, "infer")
    assert load(objects).columns == (ERROR_COLUMN, TypedColumn("a", "string", "a", 101))  # a new id
    metadata = json.loads(objects.read(iceberg_metadata_name(2)).content)
    assert [schema["schema-id"] for schema in metadata["schemas"]] == [0, 1]
    assert metadata["current-schema-id"] == metadata["snapshots"][-1]["schema-id"] == 1


def test_a_checkpoint_has_the_columns_and_tags() -> None:
    topic, objects = FakeTopic(1), MemoryObjects()
    for number in range(CHECKPOINT_COMMITS + 1):
        topic.produce(0, b'{"a":%d}' % number)
        append(topic, objects, "infer")
    state = load(objects)
    assert state.checkpoint > 0
    assert types(objects) == {"a": "long"}
    assert all(file.has_all_fields for file in state.files.values())
    table = pq.read_table(io.BytesIO(objects.read(f"_delta_log/{state.checkpoint:020}.checkpoint.parquet").content))
    assert "polywire.fields" in str(table.column("add").to_pylist())


def test_columns_of_the_log_are_those_of_the_table() -> None:
    values = pa.array(HOSTILE, pa.binary())
    batch = pa.RecordBatch.from_arrays([values], names=["value"])
    names = ["_error", *(column.name for column in EVERY)]
    assert ColumnMaker(EVERY, names).added(batch).select(["_error", "l"]).to_pylist() == [
        {"_error": row[0], "l": row[3]} for row in extracted(list(HOSTILE))
    ]


def test_files_state_the_bounds_of_columns(tmp_path: Path) -> None:
    topic, objects = FakeTopic(1), MemoryObjects()
    columns = "id long, day date, at timestamp, end timestamp, none long"
    topic.produce(
        0,
        b'{"id":5,"day":"2026-11-27","at":"2026-11-27T03:00:00.123456Z","end":"9999-12-31T23:59:59.999999Z"}',
        b'{"id":-3,"day":"0001-01-01","at":"0001-01-01T00:00:00Z","end":"2026-11-27T03:00:00Z"}',
        b'{"id":1.5}',
    )
    table_of(topic, objects, columns, tmp_path.as_uri()).append()
    (file,) = load(objects).files.values()
    save(objects, tmp_path)
    actions = deltalake.DeltaTable(str(tmp_path)).get_add_actions(flatten=True)
    (row,) = pa.table(actions).to_pylist()
    assert (row["min.id"], row["max.id"]) == (-3, 5)
    assert (row["min.day"], row["max.day"]) == (date(1, 1, 1), date(2026, 11, 27))
    assert row["max.at"] == datetime(2026, 11, 27, 3, 0, 0, 124_000, tzinfo=UTC)
    assert row.get("max.end") is None  # a text of it would have five digits for the year
    assert row.get("max.none") is None
    assert DataFile.of(file.add(data_change=True)["add"]) == file
    found = StaticTable.from_metadata(str(tmp_path / iceberg_metadata_name(1)))
    assert found.scan(row_filter="id = 7").to_arrow().num_rows == 0
    (entry,) = found.inspect.files().to_pylist()
    bounds = entry["readable_metrics"]
    assert (bounds["id"]["lower_bound"], bounds["id"]["upper_bound"]) == (-3, 5)
    assert bounds["day"]["lower_bound"] == date(1, 1, 1)
