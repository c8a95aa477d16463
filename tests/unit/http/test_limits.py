"""Tests that responses have a limit in bytes, whatever users have stored."""

from __future__ import annotations

import asyncio
import json
import threading
import tracemalloc
from typing import Any

import pytest

from polywire.http import dead_letters, encoding, lag, metrics, records
from polywire.http.endpoints import PREFIX
from polywire.records.columns import Header, HeaderKind, Record
from polywire.records.rows import Rows, from_records, to_records
from polywire.types import Level, PositionKind, TopicName
from tests.unit.http.site import Site
from tests.unit.http.test_guard import CHANGE

MANY_HEADERS = 100_000
PAGE = f"{PREFIX}/topics/t/partitions/0/records"
MEMORY_MAX = 12_000_000  # the batch takes a few MB; its headers would take 20 MB as values and 100 MB as JSON


def store(site: Site, *stored: Record, topic: str = "t") -> None:
    if site.broker.find_topic(topic) is None:
        site.broker.create_topic(TopicName.parse(topic), 2)
    for record in stored:
        site.broker.produce(
            site.broker.topic(topic).partitions[0], from_records([record]), level=Level.WRITTEN, done=None
        )
    site.broker.commit()


def post(site: Site, path: str, body: Any) -> Any:
    return site.ask("POST", f"{PREFIX}/topics/{path}", CHANGE, body).json


@pytest.fixture
def many(site: Site) -> Site:
    """Write a dead letter with very many headers, and load the modules that respond."""
    site.broker.create_topic(TopicName.parse("orders"), 3)
    headers = (Header(b"dead.topic", b"orders"), Header(b"dead.partition", b"2"))
    store(site, Record(b"v", b"k", headers + (Header(b"h", b""),) * (MANY_HEADERS - 2)))
    assert site.ask("GET", f"{PREFIX}/topics").status == 200
    return site


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "t/partitions/0/records?limit=1", b""),
        ("GET", "t/partitions/0/records?limit=1&whole=1", b""),
        ("GET", "t/partitions/0/records?key=other", b""),
        ("GET", "t/partitions/0/records?search=other", b""),
        ("GET", "t/partitions/0/records?json=other", b""),
        ("GET", "t/partitions/0/records?tail=5&search=h", b""),
        ("GET", "t/download?search=h", b""),
        ("GET", "t/download?format=csv", b""),
        ("GET", "t/dead-letters", b""),
        ("POST", "t/redrive", b'{"topics": ["orders"]}'),
        ("POST", "t/redrive", b'{"topics": ["orders"], "offset": 0}'),
        ("POST", "t/resend", b'{"partition": 0, "offset": 0}'),
    ],
)
def test_many_headers_use_little_memory(many: Site, method: str, path: str, body: bytes) -> None:
    tracemalloc.start()
    try:
        answer = many.ask(method, f"{PREFIX}/topics/{path}", CHANGE, body)
        assert tracemalloc.get_traced_memory()[1] < MEMORY_MAX
    finally:
        tracemalloc.stop()
    assert answer.status == 200, answer.body


def test_a_record_has_its_header_count(many: Site) -> None:
    (record,) = many.ask("GET", f"{PAGE}?limit=1").json["records"]
    assert record["header_count"] == MANY_HEADERS > len(record["headers"]) > 100
    assert len(json.dumps(record["headers"], separators=(",", ":"))) <= records.HEADERS_BYTES_MAX
    (whole,) = many.ask("GET", f"{PAGE}?limit=1&whole=1").json["records"]
    assert len(whole["headers"]) > 100 * len(record["headers"])


def test_resent_and_redriven_records_have_all_headers(many: Site) -> None:
    assert post(many, "t/resend", {"partition": 0, "offset": 0}) == {"partition": 0, "offset": 1}
    assert post(many, "t/redrive", {"topics": ["orders"]})["letters"] == 1
    (sent,) = stored_in(many, "orders", 2)
    assert sent.headers == (Header(b"h", b""),) * (MANY_HEADERS - 2)
    original, copy = stored_in(many, "t", 0)
    assert copy.headers == original.headers


def stored_in(site: Site, topic: str, number: int) -> list[Record]:
    log = site.broker.topic(topic).partitions[number].log
    read = log.read(0, bytes_max=1 << 26, then=lambda _: None)
    return [record for chunk in read.chunks for record in to_records(chunk)]  # type: ignore[union-attr]


def test_pages_count_keys_values_and_headers(site: Site) -> None:
    large = b"x" * 300_000
    stored = [Record(b"", large), Record(large), Record(b"", None, (Header(b"h", large),)), Record(large, large)] * 5
    store(site, *stored)
    offset, found = 0, []
    while offset < len(stored):
        answer = site.ask("GET", f"{PAGE}?offset={offset}&limit=500&whole=1")
        assert len(answer.body) <= records.PAGE_BYTES_MAX + 200
        assert answer.json["next_offset"] > offset
        found += [record["offset"] for record in answer.json["records"]]
        offset = answer.json["next_offset"]
    assert found == list(range(len(stored)))


def test_a_page_has_one_record_of_any_size(site: Site) -> None:
    store(site, Record(b"\xff" * 5_000_000, b"k" * 3_000_000), Record(b"next"))
    page = site.ask("GET", f"{PAGE}?whole=1").json
    (record,) = page["records"]
    assert (len(record["key"]["text"]), record["value"]["bytes"], page["next_offset"]) == (3_000_000, 5_000_000, 1)
    assert not record["value"]["cut"]


@pytest.mark.parametrize("value", [b"\0" * 1_000_000, "\N{PILE OF POO}\0".encode() * 200_000, b"a" * 999_999 + b"\xff"])
def test_no_value_is_longer_than_base64(site: Site, value: bytes) -> None:
    store(site, Record(value))
    answer = site.ask("GET", f"{PAGE}?whole=1")
    assert len(answer.body) < len(value) * 4 // 3 + 1_000
    assert "base64" in answer.json["records"][0]["value"]


@pytest.mark.parametrize("text", ["a" * 500_000, "ä€\N{PILE OF POO}" * 60_000, 'quoted "text"\n' * 30_000])
def test_long_text_stays_text(site: Site, text: str) -> None:
    store(site, Record(text.encode()))
    (record,) = site.ask("GET", f"{PAGE}?whole=1").json["records"]
    assert record["value"] == {"text": text, "bytes": len(text.encode()), "cut": False}


def test_a_search_reads_a_limited_number_of_bytes(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = records.ReadLimit(1_000_000)
    monkeypatch.setattr(records, "ReadLimit", lambda: limit)
    store(site, *[Record(b"x" * 300_000)] * 20)
    page = site.ask("GET", f"{PAGE}?key=other").json
    assert (page["records"], page["looked_at"]) == ([], page["next_offset"])
    assert 3 <= page["next_offset"] < 10, "the next request resumes there"


def test_a_disconnected_client_holds_its_slot_until_its_thread_ends(site: Site) -> None:
    store(site, Record(b"v"))
    began, may_end = threading.Event(), threading.Event()

    def take(rows: Rows, index: int) -> records.Taken:
        began.set()
        assert may_end.wait(60)
        return records.Taken.LAST

    async def played() -> None:
        reader = records.RecordReader(site.broker)
        task = asyncio.ensure_future(reader.each(site.broker.topic("t").partitions[0], 0, take))
        assert await asyncio.to_thread(began.wait, 60)
        task.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        assert not task.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    site.loop.run_until_complete(played())


def test_numeric_headers_are_shown_as_numbers(site: Site) -> None:
    header = Header(b"\2\0", b"\7\0\0\0", HeaderKind.INT16, HeaderKind.INT32)
    text = Header(b"s", b"7", value_kind=HeaderKind.STRING)
    misfits = [Header(b"m", b"1" * size, value_kind=HeaderKind.FLOAT32) for size in (3, 5_000)]
    store(site, Record(b"v", None, (header, text, *misfits)))
    (record,) = site.ask("GET", PAGE).json["records"]
    number, plain, *wrong = record["headers"]
    assert (number["key"]["number"], number["value"]["number"], number["value"]["bytes"]) == ("2", "7", 4)
    assert plain["value"] == {"text": "7", "bytes": 1, "cut": False}
    assert [(one["value"]["cut"], "number" in one["value"]) for one in wrong] == [(False, False), (True, False)]


@pytest.mark.parametrize("part", [b"\xff", b"\0", b"a"])
def test_headers_have_a_limit_even_with_whole_values(site: Site, part: bytes) -> None:
    store(site, Record(b"v", None, (Header(part * 3_000_000, part * 3_000_000), Header(b"next", b"x"))))
    answer = site.ask("GET", f"{PAGE}?whole=1")
    (record,) = answer.json["records"]
    assert len(answer.body) < records.PAGE_BYTES_MAX + 1_000
    assert (record["header_count"], record["headers"][0]["key"]["cut"]) == (2, True)
    assert record["headers"][0]["value"]["bytes"] == 3_000_000


# Dead letters


def test_a_numeric_partition_header_is_used(site: Site) -> None:
    site.broker.create_topic(TopicName.parse("orders"), 3)
    number = Header(b"dead.partition", (2).to_bytes(8, "little"), value_kind=HeaderKind.INT64)
    store(site, Record(b"v", None, (Header(b"dead.topic", b"orders"), number)), topic="dead")
    assert post(site, "dead/redrive", {"topics": ["orders"]})["letters"] == 1
    assert [record.value for record in stored_in(site, "orders", 2)] == [b"v"]


def test_redrives_count_headers(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.broker.create_topic(TopicName.parse("orders"), 1)
    monkeypatch.setattr(dead_letters, "LETTERS_BYTES_MAX", 5_000)
    headers = (Header(b"dead.topic", b"orders"), *[Header(b"h", b"")] * 200)
    store(site, *[Record(b"v", None, headers)] * 5, topic="dead")
    sent = [post(site, "dead/redrive", {"topics": ["orders"]}) for _ in range(4)]
    assert [(answer["letters"], answer["more"]) for answer in sent] == [(2, True), (2, True), (1, False), (0, False)]
    assert len(stored_in(site, "orders", 0)) == 5


def test_an_invalid_topic_name_is_not_a_target(site: Site) -> None:
    store(site, Record(b"v", None, (Header(b"dead.topic", b"t" * 1_000_000),)), topic="dead")
    found = site.ask("GET", f"{PREFIX}/topics/dead/dead-letters").json
    assert (found["letters"], found["others"], found["targets"]) == (0, 1, [])


# Lists and metrics


def test_lists_have_a_limit_in_bytes(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    store(site, Record(b"v"))
    for number in range(50):
        site.broker.commit_position("t", 0, PositionKind.GROUP, f"{number:02}" + "\x1b" * 250, 0)
        site.broker.create_topic(TopicName.parse(f"{number:02}" + "n" * 250), 1)
    monkeypatch.setattr(encoding, "LIST_BYTES_MAX", 10_000)
    for name in ("topics", "groups"):
        answer = site.ask("GET", f"{PREFIX}/{name}")
        assert (0 < len(answer.json[name]) < 50, answer.json["more"]) == (True, True)
        assert len(answer.body) < 11_000


def test_groups_of_the_widest_topics_are_dropped_first(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lag, "LAGS_MAX", 5)
    for name, count in (("a.wide", 100), ("b.small", 2), ("c.small", 2)):
        site.broker.create_topic(TopicName.parse(name), count)
        site.broker.commit_position(name, 0, PositionKind.GROUP, "g", 0)
    found = site.ask("GET", f"{PREFIX}/groups").json
    assert ([group["topic"] for group in found["groups"]], found["more"]) == (["b.small", "c.small"], True)
    text = site.ask("GET", "/metrics").body.decode()
    assert "polywire_groups_left_out 1.0" in text
    assert 'group_lag_records{group="g",topic="b.small"}' in text
    assert "a.wide" not in "".join(line for line in text.split("\n") if "group_lag" in line)


def test_labels_contain_no_control_characters(site: Site) -> None:
    names = [
        "esc\x1b[31m",
        "esc\\x1b[31m",
        "c1\x9b31m",
        "turn\N{RIGHT-TO-LEFT OVERRIDE}",
        "line\nlevel=forged",
        'q"\\n',
    ]
    store(site, Record(b"v"))
    for name in names:
        site.broker.commit_position("t", 0, PositionKind.GROUP, name, 0)
    text = site.ask("GET", "/metrics").body.decode()
    assert not [letter for letter in text if letter != "\n" and not letter.isprintable()]
    labels = {line.split("group=")[1] for line in text.split("\n") if line.startswith("polywire_group_lag_records{")}
    assert len(labels) == len(names), "no two names become equal"


def test_labels_equal_names_without_control_characters() -> None:
    for name in ("orders", 'a"b\\c', "größe"):
        assert metrics.label_of(name) == name
