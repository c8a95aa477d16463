"""The console in a real browser with real data, on every page."""

from __future__ import annotations

import json
import socket
import struct
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import quote
from zoneinfo import ZoneInfo

import fastavro
import pyarrow.parquet as pq
import pytest

from polywire.client.sync import SyncClient
from polywire.records.columns import Header, HeaderKind, Record
from polywire.server.users import add_user
from tests.broker_process import BrokerProcess
from tests.e2e.browser import Page, browser, find_browser

PROGRAM = find_browser()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="NO BROWSER: the console was not tried (apt install chromium)")
HOSTILE_TOPIC = "<img src=x onerror=alert(1)>"
HOSTILE = '<img src=x onerror="document.title=1">'


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path_factory.mktemp("console") / "data", wires=("flux", "polywire", "http")) as process:
        with SyncClient(process.url()) as client:
            orders = [{"order": number, "items": [f"sku-{number % 7}"]} for number in range(60)]
            for topic in ("shop.orders", "hostile"):
                client.create_topic(topic, 3)
            client.produce("shop.orders", [Record(json.dumps(order).encode()) for order in orders], partition=0)
            client.produce("hostile", [Record(HOSTILE.encode())], partition=0)
            client.commit("billing", "shop.orders", 0, 20)
        yield process


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    assert PROGRAM is not None
    with browser(PROGRAM, tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def page(window: Page) -> Iterator[Page]:
    """Return an empty page; what an earlier test has left in it does not count."""
    window.open("about:blank")
    window.look(width=1200, height=800)
    window.errors.clear()
    yield window
    assert window.errors == []


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """Serve a broker with users."""
    folder = tmp_path_factory.mktemp("guarded")
    add_user(folder / "users", "alice", "wonderland", "all")
    add_user(folder / "users", "reader", "wonderland", "consume@shop")
    with BrokerProcess(folder / "data", "--users", str(folder / "users"), wires=("polywire", "http")) as process:
        yield process


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def url(broker: BrokerProcess, path: str) -> str:
    host, port = broker.addresses["http"]
    return f"http://{host}:{port}/#{path}"


def test_overview_is_live(broker: BrokerProcess, page: Page) -> None:
    page.open(url(broker, "/"))
    assert "polywire" in page.until("Records stored per second")
    assert "61" in page.text()
    with socket.create_connection(broker.addresses["flux"], timeout=60) as peer:
        peer.sendall(b"V1|1|PRODUCE|live a:1\n")
        page.until("62")


def test_charts_show_the_last_hour_after_a_reload(broker: BrokerProcess, page: Page) -> None:
    page.open(url(broker, "/"))
    page.until("Records stored per second")
    # the broker takes a sample every ten seconds
    found = "fetch('/api/v1/history').then((response) => response.json()).then(({ samples }) => samples.length)"
    wait_for(lambda: bool(page.evaluate(found)))
    page.open("about:blank")
    page.open(url(broker, "/"))
    page.until("Records stored per second")
    chart = "document.querySelector('svg.rates')"
    assert page.evaluate(f"{chart}.querySelectorAll('.area').length") >= 1
    assert page.evaluate(f"{chart}.querySelector('.zero') !== null")
    assert page.evaluate(f"{chart}.querySelector('.area title').textContent").endswith("/s")
    assert page.evaluate(
        f"[...{chart}.querySelectorAll('text')].some((text) => /^[0-9][0-9]:[0-9][0-9]$/.test(text.textContent))"
    )
    bytes_of = "document.querySelectorAll('svg.rates')[1].querySelector('text').textContent"
    assert page.evaluate(bytes_of) == "0 B"


def test_topics_can_be_filtered_with_the_keyboard(broker: BrokerProcess, page: Page) -> None:
    page.open(url(broker, "/"))
    page.until("Overview")
    page.press("g", "t")
    page.until("shop.orders")
    page.press("/", "h", "o", "s", "t")
    assert "shop.orders" not in page.until(lambda text: "shop.orders" not in text)
    assert "hostile" in page.text()


def test_a_broker_with_a_bucket_has_the_bucket_page(broker: BrokerProcess, page: Page, tmp_path: Path) -> None:
    link = "document.getElementById('bucket').hidden"
    page.open(url(broker, "/"))
    page.until("Overview")
    assert page.evaluate(link) is True
    page.open(url(broker, "/bucket"))
    page.until("not in a bucket")
    given = ("--bucket", f"file://{tmp_path / 'bucket'}", "--node", "one", "--bucket-prices", "put=5,get=0.4")
    with BrokerProcess(tmp_path / "data", *given, wires=("polywire", "http")) as leader:
        with SyncClient(leader.url()) as client:
            client.create_topic("shop.orders", 1)
            client.produce("shop.orders", [Record(b"one")], partition=0)
        page.open(url(leader, "/"))
        page.until("Overview")
        assert page.evaluate(link) is False
        page.press("g", "b")
        text = page.until("Rates and means cover the last")
        assert f"file://{tmp_path / 'bucket'}" in text
        assert "leads" in page.until(lambda text: "No broker has been seen yet." not in text)
        assert "create\tdone" in page.text()
        assert "Cost of 30 days" in page.text()


def test_a_topic_with_a_table_shows_its_state(page: Page, tmp_path: Path) -> None:
    given = ("--table", "delta", "--table-freshness-s", "1")
    with BrokerProcess(tmp_path / "data", *given, wires=("polywire", "http")) as tabled:
        with SyncClient(tabled.url()) as client:
            client.create_topic("orders", 1)
            client.produce("orders", [Record(b"one"), Record(b"two")], partition=0)
        page.open(url(tabled, "/topics/orders"))
        text = page.until("Rows\n2\n")  # the page updates itself
        assert "The last commit was at" in text
        assert f"{tmp_path / 'data' / 'tables' / 'default' / 'orders'}\nCopy" in text
        page.click("Read the table")
        assert f"delta_scan('{tmp_path}/data/tables/default/orders')" in page.until("Polars")
        page.open(url(tabled, "/topics"))
        page.until("delta: up to date")
        page.open(url(tabled, "/topics/orders"))
        page.until("Read the table")
        page.click("Change")
        page.evaluate("document.querySelector('details[open] select').value = 'none'")
        page.click("Save")
        page.until("not written to a table")


def test_rejected_rows_and_errors_of_a_table_are_shown(broker: BrokerProcess, page: Page) -> None:
    found = {
        "name": "typed",
        "partitions": 1,
        "retained_records": 1,
        "stored_bytes": 1,
        "settings": {},
        "setting_list": [],
        "partition_list": [],
        "table": {
            "formats": "delta",
            "freshness_s": 5,
            "url": None,
            "version": 3,
            "rows": 9,
            "files": 1,
            "size": 1,
            "behind": 70,
            "skipped": 0,
            "committed_ms": 1,
            "complete_ms": 1,
            "commit_s": 0.1,
            "age_s": 300,
            "error": "disk full",
            "rejected": 4,
            "rejected_sample": HOSTILE,
        },
    }
    page.open(url(broker, "/topics"))
    page.until("hostile")
    answers = f"window.fetch = async () => ({{ok: true, json: async () => ({json.dumps(found)})}})"
    page.evaluate(f"window.real = fetch; {answers}; location.hash = '/topics/typed'; null")
    text = page.until("4 rows do not fit the typed columns")
    assert "disk full" in text
    assert HOSTILE in text
    assert "Behind by\n5 min" in text
    page.evaluate("window.fetch = real; null")
    page.click("List them")
    page.until("Statement")
    assert "from typed where _error is not null" in page.evaluate("document.querySelector('textarea').value")


def test_a_topic_is_created_changed_and_deleted(broker: BrokerProcess, page: Page) -> None:
    page.open(url(broker, "/topics"))
    page.until("Create a topic")
    page.click("Create a topic")
    page.fill("Name", "wrong/name?")
    page.fill("Partitions", "0")
    page.evaluate("document.querySelector('input[type=number]').removeAttribute('min')")
    page.click("Create topic")
    page.until("partition count")
    page.errors.clear()  # the browser reports the status 400
    page.fill("Name", "made")
    page.fill("Partitions", "2")
    page.fill("Retain for", "36 h")
    page.click("Create topic")
    text = page.until("Delete this topic")
    assert "Partitions\n2" in text
    assert "retention_age_us\t36 h\tno limit\tthis topic" in text
    assert "No group reads this topic." in text
    page.click("Change settings")
    page.evaluate(f"{labelled('compression')}.value = '\"zstd\"'")
    page.fill("retention_age_us", "")
    page.fill("retention_bytes", "2 GiB")
    page.click("Save settings")
    text = page.until("retention_bytes\t2.0 GiB\tno limit\tthis topic")
    assert "retention_age_us\tno limit\tno limit\tdefault" in text
    assert "compression\tzstd\tnone\tthis topic" in text
    with SyncClient(broker.url()) as client:
        client.produce("made", [Record(b"v")], partition=0)
        client.commit("readers", "made", 0, 0)
        page.open(url(broker, "/"))
        page.until("Overview")
        page.open(url(broker, "/topics/made"))
        page.until("readers\t0\t1\t")
        page.click("Add partitions")
        page.evaluate(
            "[...document.querySelectorAll('main button')].find((one) => one.innerText == 'Add partitions').click()"
        )
        page.until("Partitions\n3")
        page.click("Delete this topic")
        assert "This deletes 1 records in 3 partitions" in page.until("cannot be undone")
        page.fill("Type the topic's name to confirm", "mode")
        page.click("Delete topic")
        page.until("this is not the name of the topic")
        assert any(known.name == "made" for known in client.topics())
        page.fill("Type the topic's name to confirm", "made")
        page.click("Delete topic")
        page.until("Create a topic")
        assert all(known.name != "made" for known in client.topics())


def labelled(label: str) -> str:
    """Return the expression of the field with this label."""
    return (
        f"[...document.querySelectorAll('main label')].find((one) => one.innerText.trim().split('\\n')[0] == {json.dumps(label)})"
        ".querySelector('input, select')"
    )


def test_users_see_only_what_they_may_change(guarded: BrokerProcess, page: Page) -> None:
    with SyncClient(guarded.url().replace("://", "://alice:wonderland@")) as client:
        client.create_topic("shop.seen", 1)
        client.produce("shop.seen", [Record(b"v")], partition=0)
    page.log_in("reader", "wonderland")
    page.open(url(guarded, "/topics"))
    assert "Create a topic" not in page.until("shop.seen")
    page.open(url(guarded, "/topics/shop.seen"))
    text = page.until("Settings")
    for absent in ("Delete", "Change settings", "Add partitions", "Produce a record", "Groups\n"):
        assert absent not in text
    change = "{method: 'DELETE', headers: {'X-Polywire': '1'}}"
    assert page.evaluate(f"fetch('/api/v1/topics/shop.seen', {change}).then((response) => response.status)") == 403
    page.errors.clear()  # the browser reports the status 403


STATEMENT = 'select partition, count(*) as n from "shop.orders" group by all order by all'


def test_sql_has_results_charts_and_a_history(broker: BrokerProcess, page: Page) -> None:
    page.open(url(broker, "/"))
    page.until("Overview")
    page.press("g", "s")
    page.until("Statement")
    page.evaluate("document.querySelector('textarea').focus()")
    page.evaluate(f"document.querySelector('textarea').value = {json.dumps(STATEMENT)}")
    enter = "new KeyboardEvent('keydown', {key: 'Enter', ctrlKey: true, bubbles: true, cancelable: true})"
    page.evaluate(f"document.querySelector('textarea').dispatchEvent({enter})")
    text = page.until("1 row in")
    assert "BIGINT" in text
    assert "0\t60" in text
    page.click("Chart")
    assert page.evaluate("document.querySelectorAll('svg.chart rect').length") == 1
    page.evaluate("document.querySelector('textarea').value = 'select value, null as nothing from hostile'")
    page.click("Run")
    text = page.until("NULL")
    assert HOSTILE in text, "a value is text, never markup"
    page.evaluate("document.querySelector('textarea').value = 'from missing'")
    page.click("Run")
    page.until("no such topic")
    page.errors.clear()  # the browser reports the status 404
    page.open(url(broker, "/"))
    page.until("Overview")
    page.open(url(broker, "/sql"))
    page.until("Recent statements (3)")
    page.click("hostile")
    assert page.evaluate("document.querySelector('textarea').value").endswith("hostile")


def test_a_query_is_cancelled(broker: BrokerProcess, page: Page) -> None:
    page.open(url(broker, "/sql"))
    page.until("Statement")
    endless = "select count(*) from range(10000000) a, range(10000000) b where (a.range + b.range) % 7 = 3"
    page.evaluate(f"document.querySelector('textarea').value = {json.dumps(endless)}")
    page.click("Run")
    page.until("running for 2 s")
    page.click("Cancel")
    page.until("the query was cancelled")
    page.errors.clear()  # the browser reports the status 400


def test_the_skip_link_stays_on_the_page(broker: BrokerProcess, page: Page) -> None:
    page.open(url(broker, "/groups"))
    page.until("billing")
    page.evaluate("document.querySelector('.skip').click()")
    assert page.evaluate("document.activeElement.id") == "main"
    assert page.evaluate("location.hash") == "#/groups"


def test_records_are_browsed_and_produced(broker: BrokerProcess, page: Page) -> None:
    page.open(url(broker, "/topics/shop.orders/records"))
    assert '"order": 59' in page.until("16 records of 3 partitions")
    page.evaluate("document.querySelector('main tbody details').open = true")
    assert '"sku-3"' in page.until('  "order": 59')
    page.click("Send again")
    page.until("stored in partition 0 at offset 60")
    page.open(url(broker, "/topics/shop.orders/records?partition=0&from=earliest"))
    page.until("read up to 50")
    page.click("Load more")
    page.until("read up to 61")
    page.open(url(broker, "/topics/shop.orders"))
    page.until("Produce a record")
    page.evaluate("document.querySelector('textarea').value = 'from a browser'")
    page.click("Produce")
    page.until("stored in partition")


def test_records_are_searched_sorted_and_downloaded(broker: BrokerProcess, page: Page, tmp_path: Path) -> None:
    with SyncClient(broker.url()) as client:
        client.create_topic("searched", 2)
        for partition in range(2):
            values = [json.dumps({"n": number, "tags": [{"name": f"tag-{number % 5}"}]}) for number in range(200)]
            client.produce(
                "searched",
                [
                    Record(value.encode(), f"key-{partition}".encode(), (Header(b"city", b"Berlin"),))
                    for value in values
                ],
                partition=partition,
            )
    page.open(url(broker, "/topics/searched/records"))
    page.until("50 records of 2 partitions")
    page.click("Load more")
    page.until("100 records of 2 partitions")
    page.fill("JSON field", "n < 3")
    page.click("Read")
    page.until("6 records match")
    page.fill("Search", "BERLIN")
    page.fill("Key", "key-1")
    page.click("Read")
    text = page.until("3 records match")
    assert '"n": 2' in next(line for line in text.splitlines() if '"n"' in line), "newest first"
    page.click("Stored ↓")
    assert '"n": 0' in next(line for line in page.text().splitlines() if '"n"' in line)
    page.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    page.click("Download")
    for kind in ("json", "csv", "parquet"):
        page.evaluate(f"{labelled('Format')}.value = '{kind}'")
        page.evaluate("document.querySelector('details.above form').requestSubmit()")
        file = tmp_path / f"searched.{kind}"
        wait_for(file.exists)
        page.until("3 records")
    assert [record["value"] for record in json.loads((tmp_path / "searched.json").read_text())] == [
        json.dumps({"n": number, "tags": [{"name": f"tag-{number}"}]}) for number in range(3)
    ]
    assert pq.read_table(tmp_path / "searched.parquet")["offset"].to_pylist() == [0, 1, 2]
    page.fill("JSON field", "n <")
    page.fill("Search", "")
    page.click("Read")
    page.until("0 records match")
    page.fill("JSON field", "a b")
    page.click("Read")
    page.until("JSON filter is invalid")
    page.errors.clear()  # the browser reports the status 400


def test_times_are_local_and_utc_on_hover(broker: BrokerProcess, page: Page) -> None:
    page.call("Emulation.setTimezoneOverride", timezoneId="Asia/Kolkata")
    try:
        page.open(url(broker, "/"))
        page.until("Overview")
        page.open(url(broker, "/topics/shop.orders/records?partition=0"))
        page.until("read up to")
        shown = page.evaluate("document.querySelector('main tbody time').textContent")
        utc = page.evaluate("document.querySelector('main tbody time').title")
        local = datetime.fromisoformat(shown).replace(tzinfo=ZoneInfo("Asia/Kolkata"))
        assert utc.endswith(" UTC")
        assert local == datetime.fromisoformat(utc.removesuffix(" UTC")).replace(tzinfo=UTC)
        # a time without a zone is local time
        page.fill("From", str(datetime.now(ZoneInfo("Asia/Kolkata")).replace(tzinfo=None) - timedelta(hours=1)))
        page.click("Read")
        page.until('"order": 0')
    finally:
        page.call("Emulation.setTimezoneOverride", timezoneId="")


def test_a_slow_page_says_that_it_loads(broker: BrokerProcess, page: Page) -> None:
    page.open(url(broker, "/"))
    page.until("Overview")
    slow = "(path, ...more) => new Promise((done) => { held.push(done); }).then(() => real(path, ...more))"
    page.evaluate(f"window.real = fetch; window.held = []; window.fetch = {slow}; location.hash = '/topics'; null")
    page.until("Loading…")
    page.evaluate("window.fetch = real; held.forEach((done) => done()); null")
    page.until("shop.orders")


def test_dead_letters_are_redriven(broker: BrokerProcess, page: Page) -> None:
    said = {b"dead.reason": b"malformed", b"dead.topic": b"shop.orders", b"dead.partition": b"1", b"dead.offset": b"3"}
    headers = tuple(Header(name, value) for name, value in said.items())
    with SyncClient(broker.url()) as client:
        client.create_topic("shop.orders.dead", 1)
        client.produce(
            "shop.orders.dead", [Record(b"letter %d" % number, None, headers) for number in range(3)], partition=0
        )
        page.open(url(broker, "/"))
        page.until("Overview")
        page.press("g", "d")
        page.until("shop.orders.dead")
        page.open(url(broker, "/topics/shop.orders.dead/records"))
        page.until("read up to 3")
        page.evaluate("document.querySelector('main tbody details').open = true")
        assert "shop.orders / 1 @ 3" in page.until("malformed")
        page.click("Redrive this record")
        page.until("sent to shop.orders")
        page.open(url(broker, "/dead/shop.orders.dead"))
        page.until("3 records are waiting.")
        page.click("Redrive 3 records")
        page.until("Redrove 3 records.")
        assert "No records are waiting." in page.text()
        values = [record.value or b"" for record in client.fetch("shop.orders", 1, 0)]
    assert [value for value in values if value.startswith(b"letter")] == [
        b"letter 2",
        b"letter 0",
        b"letter 1",
        b"letter 2",
    ]


READING: dict[str, Any] = {
    "type": "record",
    "name": "Reading",
    "namespace": "lab",
    "fields": [
        {"name": "sensor", "type": {"type": "enum", "name": "Sensor", "symbols": ["HEAT", "LIGHT"]}},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "day", "type": {"type": "int", "logicalType": "date"}},
        {"name": "cost", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}},
        {"name": "large", "type": "long"},
        {"name": "exact", "type": "double"},
        {"name": "rough", "type": "float"},
        {"name": "raw", "type": {"type": "fixed", "name": "Raw", "size": 2}},
        {"name": "tags", "type": {"type": "map", "values": ["null", "string"]}},
        {"name": "next", "type": ["null", "Reading"]},
    ],
}


def reading(following: Any = None) -> dict[str, Any]:
    made = {
        "sensor": "LIGHT",
        "at": 1_700_000_000_123,
        "day": 19_000,
        "cost": Decimal("-12.34"),
        "large": -(2**62),
        "exact": 0.1,
    }
    return {**made, "rough": 0.5, "raw": b"\x00\xff", "tags": {"a": None, "ä": "ö"}, "next": following}


SHOWN = {
    "sensor": "LIGHT",
    "at": "2023-11-14T22:13:20.123Z",
    "day": "2022-01-08",
    "cost": "-12.34",
    "large": str(-(2**62)),
    "exact": 0.1,
    "rough": 0.5,
    "raw": "0x00ff",
    "tags": {"a": None, "ä": "ö"},
}


def test_numeric_headers_are_shown_as_numbers(broker: BrokerProcess, page: Page) -> None:
    place = [
        Header(b"dead.topic", b"shop.orders"),
        Header(b"dead.partition", (0).to_bytes(4, "little"), value_kind=HeaderKind.INT32),
        Header(b"dead.offset", (17).to_bytes(8, "little"), value_kind=HeaderKind.UINT64),
    ]
    kinds = [
        Header(b"temperature", struct.pack("<d", -0.5), value_kind=HeaderKind.FLOAT64),
        Header(b"is_late", b"\1", value_kind=HeaderKind.BOOL),
        Header((7).to_bytes(2, "little"), b"a key that is a number", HeaderKind.INT16, HeaderKind.STRING),
        *[Header(b"many", b"")] * 5_000,
    ]
    with SyncClient(broker.url()) as client:
        client.create_topic("typed", 1)
        client.produce("typed", [Record(b"v", None, (*place, *kinds))], partition=0)
    page.open(url(broker, "/topics/typed/records"))
    page.until("read up to 1")
    page.evaluate("document.querySelector('main tbody details').open = true")
    text = page.until("shop.orders / 0 @ 17")
    for shown in ("temperature\n-0.5", "is_late\ntrue", "7\na key that is a number", "of 5,006 headers are not shown"):
        assert shown in text
    page.click("Load the whole record")
    page.until(lambda text: "are not shown" not in text)
    assert page.text().count("many") == 5_000
    page.evaluate("document.querySelector('main .letter a').click()")
    page.until(lambda text: '"order": 17' in text and '"order": 16' not in text)


def test_avro_values_are_decoded(broker: BrokerProcess, page: Page) -> None:
    """Files and single values that another implementation wrote, and values that only look like Avro."""
    page.open(url(broker, "/"))
    page.until("Overview")
    schema = json.dumps(READING)
    parsed = fastavro.parse_schema(READING)

    def read(data: bytes, given: str = "") -> Any:
        call = (
            f"decoded(Uint8Array.from(atob('{b64encode(data).decode()}'), (c) => c.charCodeAt(0)), {json.dumps(given)})"
        )
        answered = f"{call}.then((found) => JSON.stringify(found), (error) => JSON.stringify(error.message))"
        return json.loads(page.evaluate(f"import('/static/avro.js').then(({{ decoded }}) => {answered})"))

    whole = {**SHOWN, "next": {**SHOWN, "next": None}}
    for codec in ("null", "deflate"):
        written = BytesIO()
        fastavro.writer(written, parsed, [reading(reading()), reading()], codec=codec)
        assert read(written.getvalue()) == [whole, {**SHOWN, "next": None}]
        assert "too early" in read(written.getvalue()[:-20])
    single = BytesIO()
    fastavro.schemaless_writer(single, parsed, reading(reading()))
    value = single.getvalue()
    for head in (b"", b"\0\0\0\0\7", b"\xc3\1" + bytes(8)):
        assert read(head + value, schema) == whole
    assert read(value + b"x", schema) == "bytes are left after the value: it was written with another schema"
    assert "too early" in read(value[:-1], schema)
    assert "enter the schema" in read(value)
    nothings = json.dumps({"type": "array", "items": "null"})
    assert "more than 20000 items" in read(b"\xfe\xff\xff\xff\xff\xff\xff\xff\xff\1", nothings), "2**63 - 1 of them"
    endless = json.dumps({"type": "record", "name": "R", "fields": [{"name": "r", "type": "R"}]})
    assert "too deeply" in read(b"\1", endless)


def test_data_from_clients_is_never_markup(broker: BrokerProcess, page: Page) -> None:
    page.open(url(broker, "/topics/hostile/records"))
    assert HOSTILE in page.until("onerror")
    assert page.evaluate("document.querySelectorAll('main img').length") == 0
    assert "hostile" in page.evaluate("document.title")
    with SyncClient(broker.url()) as client:
        client.commit(HOSTILE, "hostile", 0, 0)
        client.create_topic(HOSTILE_TOPIC, 1)
        client.produce(HOSTILE_TOPIC, [Record(b"v", HOSTILE.encode(), (Header(HOSTILE.encode(), HOSTILE.encode()),))])
    name = quote(HOSTILE_TOPIC, safe="")
    for path, expected in (
        ("/topics/hostile", HOSTILE),
        ("/topics", HOSTILE_TOPIC),
        (f"/topics/{name}", "Settings"),
        (f"/topics/{name}/records", "read up to 1"),
        ("/groups", HOSTILE),
    ):
        page.open("about:blank")
        page.open(url(broker, path))
        page.until(expected)
        page.evaluate("document.querySelectorAll('main details').forEach((details) => { details.open = true; })")
        page.settle()
        assert page.evaluate("document.querySelectorAll('main img').length") == 0


@pytest.mark.parametrize("name", [".", "..", "%2E%2E"])
def test_a_group_with_a_name_of_dots_is_shown(broker: BrokerProcess, page: Page, name: str) -> None:
    with SyncClient(broker.url()) as client:
        client.commit(name, "shop.orders", 0, 10)
    page.open(url(broker, f"/groups/shop.orders/{quote(name)}"))
    page.until(f"{name} · shop.orders")
    page.open("about:blank")


def test_offsets_are_reset_after_a_preview(broker: BrokerProcess, page: Page) -> None:
    page.open(url(broker, "/groups"))
    assert "billing" in page.until("shop.orders")
    page.open(url(broker, "/groups/shop.orders/billing"))
    page.until("Reset offsets")
    page.evaluate("document.querySelector('form button').click()")
    page.until("Preview: nothing has changed yet.")
    with SyncClient(broker.url()) as client:
        assert client.position("billing", "shop.orders", 0) == 20
        page.evaluate("[...document.querySelectorAll('button')].find((b) => b.innerText == 'Reset offsets').click()")
        page.until("Offsets were reset.")
        assert client.position("billing", "shop.orders", 0) == 0


def test_clients_are_listed_without_those_of_the_console(broker: BrokerProcess, page: Page) -> None:
    with SyncClient(broker.url()):
        page.open(url(broker, "/clients"))
        text = page.until("not listed")
        assert "polywire" in text
        assert "http" not in text


def test_users_are_listed(broker: BrokerProcess, page: Page) -> None:
    page.open(url(broker, "/users"))
    page.until("every client can do everything")


def test_users_are_created_changed_and_deleted(guarded: BrokerProcess, page: Page) -> None:
    page.log_in("alice", "wonderland")
    page.open(url(guarded, "/users"))
    page.until("Add a user")
    page.fill("Name", "carol")
    page.fill("Password", "first")
    page.fill("Permissions", "consume@shop, group@shop")
    page.click("Add")
    page.until("Save")
    page.evaluate("document.querySelector('textarea').value = 'consume@shop'")
    page.click("Save")
    page.until(lambda text: "group@shop" not in text)
    page.fill("New password", "second")
    page.click("Change password")
    page.until("existing logins and tokens are revoked")
    page.log_in("carol", "second")
    page.open(url(guarded, "/users"))
    page.until("not allowed")
    page.click("Your permissions, password and tokens")
    page.until("Your tokens")
    page.fill("Name", "laptop")
    page.click("Create token")
    page.until("shown only once")
    page.log_in("alice", "wonderland")
    page.open(url(guarded, "/users/carol"))
    page.until("Delete")
    page.click("Delete")
    page.click("Delete user permanently")
    page.until("Add a user")
    assert "carol" not in page.text()
    page.errors.clear()  # the browser counts the refusal as an error


def test_an_unknown_topic_is_reported(broker: BrokerProcess, page: Page) -> None:
    page.open(url(broker, "/topics/missing"))
    page.until("no such topic")
    page.errors.clear()  # the browser counts the response as an error


def test_quotas_are_set_watched_and_removed(broker: BrokerProcess, page: Page) -> None:
    page.open(url(broker, "/quotas"))
    page.until("There are no quotas")
    page.fill("Client id", HOSTILE)
    page.fill("Requests per second", "1000")
    page.click("Set")
    assert HOSTILE in page.until("1 k/s")
    page.fill("User", "*")
    page.fill("Fetch per second", "50MB")
    page.click("Set")
    with SyncClient(broker.url()) as client:
        page.until(lambda text: bool(client.fetch("shop.orders", 0, 0)) and "kB of 50 MB/s" in text)
    page.click("Edit")
    page.fill("Fetch per second", "60MB")
    page.click("Set")
    page.until("of 60 MB/s")
    for left in (HOSTILE, "There are no quotas"):
        page.click("Remove")
        page.click("Remove quota")
        page.until(lambda text, left=left: left in text and "60 MB" not in text)  # type: ignore[misc]
