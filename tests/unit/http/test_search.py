"""Tests of filters for records, and of pages that are read backwards."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polywire.errors import Invalid
from polywire.http import records
from polywire.http.search import FILTER_CHARS_MAX, Field, Filter, filter_of, parse_field
from polywire.records.columns import Header, HeaderKind, Record
from polywire.records.rows import from_records
from polywire.types import Level, TopicName
from tests.unit.http.site import Answer, Site
from tests.unit.http.test_api import get, values

ORDER = {
    "order": 7,
    "city": "Berlin",
    "late": False,
    "items": [{"sku": "a", "n": 1}, {"sku": "b", "n": 30}],
    "a.b": {"": 1},
}
PAGE = "/topics/t/partitions/0/records"


def store(site: Site, *stored: Record) -> None:
    if site.broker.find_topic("t") is None:
        site.broker.create_topic(TopicName.parse("t"), 1)
    site.broker.produce(site.broker.topic("t").partitions[0], from_records(stored), level=Level.WRITTEN, done=None)
    site.broker.commit()


def matches(condition: str, value: Any = None) -> bool:
    return parse_field(condition).matches(json.dumps(ORDER if value is None else value).encode())


@pytest.mark.parametrize(
    "condition",
    [
        "order",
        "order = 7",
        "order=7",
        "$.order >= 7",
        ".order < 8",
        "order != 8",
        "city = Berlin",
        'city = "Berlin"',
        "city ~ LIN",
        "city > Aachen",
        "late = false",
        "items[1].n = 30",
        "items[*].n >= 30",
        'items[*]["sku"] = b',
        '["a.b"][""] = 1',
        "items[*].n != 1",
        '["a=b"]["c]"] ~ "]="',
    ],
)
def test_a_json_field_matches(condition: str) -> None:
    assert matches(condition, {**ORDER, "a=b": {"c]": "x]=y"}})


@pytest.mark.parametrize(
    "condition",
    [
        "orders",
        "order = 8",
        "order = true",
        "late = 0",
        "city ~ x",
        "order ~ 7",
        "items[2].n = 1",
        "items.n = 1",
        "city < Aachen",
    ],
)
def test_a_json_field_does_not_match(condition: str) -> None:
    assert not matches(condition)


@pytest.mark.parametrize("condition", ["", " = 1", "a b", "a[", "a[x]", "a..", 'a["b', "[" * 200, "a" + ".b" * 40])
def test_a_wrong_json_filter_is_refused(condition: str) -> None:
    if condition:
        with pytest.raises(Invalid, match="JSON filter is invalid"):
            filter_of({"json": condition})
    else:
        assert filter_of({"json": condition}) == Filter()


@given(text=st.text(max_size=60))
def test_any_text_is_a_filter_or_refused(text: str) -> None:
    with suppress(Invalid):
        parse_field(text).matches(json.dumps(ORDER).encode())


@pytest.mark.parametrize("value", [b"", b"{", b"\xff", b"[" * 100_000, b"9" * 5_000, b'{"a":' * 2_000])
def test_a_value_that_is_not_json_does_not_match(value: bytes) -> None:
    assert not Field(("a",)).matches(value)
    assert not Field(("a",)).matches(None)


def test_filters_have_a_limit() -> None:
    for name in ("search", "json"):
        with pytest.raises(Invalid, match="too long"):
            filter_of({name: "a" * (FILTER_CHARS_MAX + 1)})
    wide = {"a": [[[1] * 100] * 100] * 100}
    assert not matches("a[*][*][*] = 2", wide)


def test_text_is_searched_in_keys_values_and_headers(site: Site) -> None:
    store(
        site,
        Record("Ä Berlin".encode()),
        Record(b"v", b"BERLIN-1"),
        Record(b"v", None, (Header(b"city", b"in berlin"),)),
        Record(b"v", None, (Header(b"berlin", b""),)),
        Record(b"v", None, (Header(b"n", (4711).to_bytes(4, "little"), value_kind=HeaderKind.INT32),)),
        Record(None),
    )

    def offsets(query: str) -> list[int]:
        return [record["offset"] for record in get(site, f"{PAGE}?{query}").json["records"]]

    assert offsets("search=berlin") == [0, 1, 2, 3]
    assert offsets("search=berlin&tail=2") == [2, 3]
    assert offsets("search=4711") == [4]
    assert offsets("search=" + quote("Ä")) == [0]
    assert offsets("search=berlin&key=BERLIN-1") == [1]
    assert offsets("search=%FF") == []


def test_a_json_filter_selects_records(site: Site) -> None:
    store(site, *(Record(json.dumps({"n": number}).encode()) for number in range(30)))
    assert values(get(site, f"{PAGE}?json=" + quote("n >= 28"))) == ['{"n": 28}', '{"n": 29}']
    assert get(site, f"{PAGE}?json=" + quote("n >= [")).json["records"] == []
    assert get(site, f"{PAGE}?json=" + quote("a b")).code == "invalid_request"


def offsets_of(answer: Answer) -> list[int]:
    return [record["offset"] for record in answer.json["records"]]


def test_older_pages_are_contiguous(site: Site) -> None:
    for begin in range(0, 100, 10):
        store(site, *(Record(b"%d" % number) for number in range(begin, begin + 10)))
    found: list[int] = []
    before = ""
    while before != "&before=0":
        answer = get(site, f"{PAGE}?tail=7{before}")
        found = offsets_of(answer) + found
        assert answer.json["begin_offset"] == found[0]
        before = f"&before={answer.json['begin_offset']}"
    assert found == list(range(100))
    assert offsets_of(get(site, f"{PAGE}?tail=3&before=50")) == [47, 48, 49]
    assert offsets_of(get(site, f"{PAGE}?tail=0")) == []


@settings(max_examples=40, deadline=None)
@given(
    batches=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    tail=st.integers(1, 30),
    step=st.integers(1, 9),
    data=st.data(),
)
def test_the_newest_matches_are_found(batches: list[int], tail: int, step: int, data: st.DataObject) -> None:
    site = Site()
    try:
        count = 0
        for size in batches:
            store(site, *(Record(b"yes" if number % step == 0 else b"no") for number in range(count, count + size)))
            count += size
        before = data.draw(st.integers(0, count + 5))
        expected = [number for number in range(min(before, count)) if number % step == 0][-tail:]
        assert offsets_of(get(site, f"{PAGE}?tail={tail}&before={before}&search=yes")) == expected
    finally:
        site.close()


def test_a_search_backwards_has_limits_and_continues(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    store(site, Record(b"needle"), *(Record(b"hay") for _ in range(199)))
    monkeypatch.setattr(records, "LOOKED_AT_MAX", 40)
    asked, before = 0, 200
    while True:
        page = get(site, f"{PAGE}?tail=5&search=needle&before={before}").json
        asked += 1
        assert page["begin_offset"] < before, "each request gets further"
        before = page["begin_offset"]
        if page["records"]:
            break
    assert asked > 1
    assert before == 0


def test_large_records_are_read_backwards_one_by_one(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(20):
        store(site, Record(b"%02d" % number + b"x" * 5_000))
    monkeypatch.setattr(records, "READ_TOTAL_BYTES_MAX", 8_000)
    monkeypatch.setattr(records, "READ_BYTES", 1)
    monkeypatch.setattr(records.ReadLimit, "__init__", lambda self, left=8_000: setattr(self, "left", left))
    found: list[int] = []
    before = 20
    while before:
        answer = get(site, f"{PAGE}?tail=4&before={before}")
        assert offsets_of(answer), "each request gets further"
        found = offsets_of(answer) + found
        before = answer.json["begin_offset"]
    assert found == list(range(20))


def test_a_page_read_backwards_is_limited_in_bytes(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(30):
        store(site, Record(b"x" * 1_000))
    monkeypatch.setattr(records, "PAGE_BYTES_MAX", 5_000)
    answer = get(site, f"{PAGE}?tail=30")
    assert offsets_of(answer) == [26, 27, 28, 29]
    assert answer.json["begin_offset"] == 26
    assert offsets_of(get(site, f"{PAGE}?tail=30&before=26")) == [22, 23, 24, 25]
