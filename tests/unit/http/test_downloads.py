"""Tests of downloads: formats, ranges, filters and limits."""

from __future__ import annotations

import csv
import io
import json
from base64 import b64decode
from urllib.parse import quote

import pyarrow.parquet as pq
import pytest

from polywire.http import downloads, records
from polywire.http.endpoints import PREFIX
from polywire.records.columns import Header, HeaderKind, Record
from polywire.records.rows import from_records
from polywire.types import Level, TopicName
from tests.unit.http.site import Answer, Site

HOSTILE = b'=1+1,"a"\r\n<img src=x onerror=alert(1)>'
COUNT = Header(b"n", (7).to_bytes(8, "little"), value_kind=HeaderKind.INT64)


def store(site: Site, *stored: Record, partition: int = 0) -> None:
    if site.broker.find_topic("t") is None:
        site.broker.create_topic(TopicName.parse("t"), 2)
    site.broker.produce(
        site.broker.topic("t").partitions[partition], from_records(stored), level=Level.WRITTEN, done=None
    )
    site.broker.commit()


def download(site: Site, query: str) -> Answer:
    return site.ask("GET", f"{PREFIX}/topics/t/download?{query}")


def offsets(answer: Answer) -> list[tuple[int, int]]:
    return [(record["partition"], record["offset"]) for record in answer.json]


@pytest.fixture
def mixed(site: Site) -> Site:
    store(
        site,
        Record(HOSTILE, b"k", (COUNT, Header(b"h", b"\xff")), origin_time_us=1_700_000_000_000_000),
        Record(b"\xff\0", b""),
        Record(None, None),
        Record(b""),
    )
    return site


def test_json_has_every_record_as_it_is(mixed: Site) -> None:
    answer = download(mixed, "format=json")
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["content-disposition"] == "attachment"
    assert (answer.headers["x-polywire-records"], answer.headers["x-polywire-more"]) == ("4", "0")
    first, second, third, fourth = answer.json
    assert (first["key"], first["value"]) == ("k", HOSTILE.decode())
    assert first["headers"] == [{"key": "n", "value": "7"}, {"key": "h", "value": {"base64": "/w=="}}]
    assert first["timestamp"] == "2023-11-14T22:13:20.000000Z"
    assert b64decode(second["value"]["base64"]) == b"\xff\0"
    assert (third["key"], third["value"], fourth["value"]) == (None, None, "")


def test_csv_can_be_read_back(mixed: Site) -> None:
    answer = download(mixed, "format=csv")
    rows = list(csv.reader(io.StringIO(answer.body.decode(), newline="")))
    assert rows[0] == ["partition", "offset", "timestamp", "key", "value", "headers"]
    assert rows[1][3:5] == ["k", f"'{HOSTILE.decode()}"]
    assert json.loads(rows[1][5])[0] == {"key": "n", "value": "7"}
    assert rows[2][4] == "\\xff00"
    assert ',"",' in answer.body.decode().splitlines()[3], "an empty key is no null"


@pytest.mark.parametrize("text", ["=1+1", "+a", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "'=1", "''@x", "＝1"])
def test_a_formula_becomes_text_and_can_be_restored(text: str) -> None:
    assert downloads.harmless(text) == f"'{text}"


@pytest.mark.parametrize("text", ["", "a=1", "-5", "+1.5e-7", "'quoted'", "0", " =1", '{"a": -1}'])
def test_other_texts_are_unchanged(text: str) -> None:
    assert downloads.harmless(text) == text


def test_parquet_has_the_columns_of_a_table(mixed: Site) -> None:
    table = pq.read_table(io.BytesIO(download(mixed, "format=parquet").body))
    assert table.column_names == ["partition", "offset", "timestamp", "timestamp_type", "key", "value", "headers"]
    assert table["value"].to_pylist() == [HOSTILE, b"\xff\0", None, b""]
    assert table["timestamp_type"].to_pylist() == [0, 1, 1, 1]
    assert table["headers"].to_pylist()[0] == [{"key": "n", "value": b"7"}, {"key": "h", "value": b"\xff"}]
    assert pq.read_table(io.BytesIO(download(mixed, "format=parquet&from=99").body)).num_rows == 0


def test_ranges_and_filters_select_records(site: Site) -> None:
    store(site, *(Record(b'{"n": %d}' % number, b"k%d" % (number % 2)) for number in range(10)))
    store(site, *(Record(b"other") for _ in range(3)), partition=1)
    assert offsets(download(site, "")) == [(0, n) for n in range(10)] + [(1, n) for n in range(3)]
    assert offsets(download(site, "partition=0&from=3&until=5")) == [(0, 3), (0, 4)]
    assert offsets(download(site, "partition=1&until=2000-01-01")) == []
    assert offsets(download(site, "from=2000-01-01&partition=1")) == [(1, 0), (1, 1), (1, 2)]
    assert offsets(download(site, "offsets=1:1-2,0:8-99")) == [(1, 1), (0, 8), (0, 9)]
    assert offsets(download(site, "key=k1&until=4")) == [(0, 1), (0, 3)]
    assert offsets(download(site, "json=" + quote("n > 7"))) == [(0, 8), (0, 9)]
    assert offsets(download(site, "search=OTHER&until=1")) == [(1, 0)]


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("format=xlsx", 400),
        ("partition=9", 404),
        ("partition=x", 404),
        ("from=yesterday", 400),
        ("offsets=0:5", 400),
        ("offsets=9:0-1", 404),
        ("offsets=0:-1-2", 400),
        ("offsets=" + ",".join(["0:0-1"] * 1_001), 400),
        ("json=a+b", 400),
    ],
)
def test_wrong_requests_are_refused(mixed: Site, query: str, status: int) -> None:
    assert download(mixed, query).status == status


def test_a_download_has_limits(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(10):
        store(site, Record(b"x" * 1_000))
    for name, limit, count in (("DOWNLOAD_RECORDS_MAX", 4, 4), ("DOWNLOAD_BYTES_MAX", 3_500, 3)):
        with monkeypatch.context() as patch:
            patch.setattr(downloads, name, limit)
            answer = download(site, "")
            assert (len(answer.json), answer.headers["x-polywire-more"]) == (count, "1")
    monkeypatch.setattr(downloads, "DOWNLOAD_READ_BYTES_MAX", 1)
    monkeypatch.setattr(records, "READ_BYTES", 1)
    answer = download(site, "partition=0")
    assert answer.headers["x-polywire-more"] == "1"
    assert len(answer.json) == 1


def test_the_headers_of_a_record_are_limited(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "DOWNLOAD_HEADERS_BYTES_MAX", 100)
    store(site, Record(b"v", None, (Header(b"h", b"1"),) * 50_000))
    [record] = download(site, "").json
    assert len(record["headers"]) == 5


def test_parquet_without_pyarrow_says_what_to_install(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    store(site, Record(b"v"))
    monkeypatch.setattr(downloads, "COMMAND", ("-c", f"raise SystemExit({downloads.NO_PYARROW})"))
    answer = download(site, "format=parquet")
    assert answer.code == "invalid_request"
    assert "polywire[arrow]" in answer.json["error"]["message"]


def test_a_process_that_fails_is_reported(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    store(site, Record(b"v"))
    monkeypatch.setattr(downloads, "COMMAND", ("-m", "no_such_module"))
    assert download(site, "format=parquet").code == "busy"
