"""The console in a real browser, with real data, through every page."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest

from polywire.client.sync import SyncClient
from polywire.records.columns import Record
from polywire.server.users import add_user
from tests.broker_process import BrokerProcess
from tests.e2e.browser import Page, browser, find_browser

PROGRAM = find_browser()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="NO BROWSER: the console was not tried (apt install chromium)")
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
def page(broker: BrokerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    assert PROGRAM is not None
    with browser(PROGRAM, tmp_path_factory.mktemp("profile")) as page:
        page.look(width=1200, height=800)
        yield page
        assert page.errors == []


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """A broker with users."""
    folder = tmp_path_factory.mktemp("guarded")
    add_user(folder / "users", "alice", "wonderland", "")
    with BrokerProcess(folder / "data", "--users", str(folder / "users"), wires=("polywire", "http")) as process:
        yield process


def url(broker: BrokerProcess, path: str) -> str:
    host, port = broker.addresses["http"]
    return f"http://{host}:{port}/#{path}"


def test_overview_is_live(broker: BrokerProcess, page: Page) -> None:
    page.open(url(broker, "/"))
    assert "polywire" in page.until("Records stored per second")
    assert "61" in page.text()
    with socket.create_connection(broker.addresses["flux"], timeout=10) as peer:
        peer.sendall(b"V1|1|PRODUCE|live a:1\n")
        page.until("62")


def test_topics_are_filtered_by_keyboard_alone(broker: BrokerProcess, page: Page) -> None:
    page.open(url(broker, "/"))
    page.until("Overview")
    page.press("g", "t")
    page.until("shop.orders")
    page.press("/", "h", "o", "s", "t")
    assert "shop.orders" not in page.until(lambda text: "shop.orders" not in text)
    assert "hostile" in page.text()


def test_the_way_past_the_menu_stays_on_the_page(broker: BrokerProcess, page: Page) -> None:
    page.open(url(broker, "/groups"))
    page.until("billing")
    page.evaluate("document.querySelector('.skip').click()")
    assert page.evaluate("document.activeElement.id") == "main"
    assert page.evaluate("location.hash") == "#/groups"


def test_records_are_browsed_and_stored(broker: BrokerProcess, page: Page) -> None:
    page.open(url(broker, "/topics/shop.orders/records"))
    assert '"order": 59' in page.until("read up to 60")
    page.evaluate("document.querySelector('main details').open = true")
    assert '"sku-3"' in page.until('  "order": 59')
    page.open(url(broker, "/topics/shop.orders"))
    page.until("Store a record")
    page.evaluate(
        "document.querySelector('textarea').value = 'from a browser'; document.querySelector('form button').click()"
    )
    page.until("stored in partition")


def test_what_peers_have_sent_is_text(broker: BrokerProcess, page: Page) -> None:
    page.open(url(broker, "/topics/hostile/records"))
    assert HOSTILE in page.until("onerror")
    assert page.evaluate("document.querySelectorAll('main img').length") == 0
    assert "hostile" in page.evaluate("document.title")


def test_a_group_is_moved_behind_a_preview(broker: BrokerProcess, page: Page) -> None:
    page.open(url(broker, "/groups"))
    assert "billing" in page.until("shop.orders")
    page.open(url(broker, "/groups/shop.orders/billing"))
    page.until("Move the group")
    page.evaluate("document.querySelector('form button').click()")
    page.until("This is what would be moved.")
    with SyncClient(broker.url()) as client:
        assert client.position("billing", "shop.orders", 0) == 20
        page.evaluate("[...document.querySelectorAll('button')].find((b) => b.innerText == 'Move the group').click()")
        page.until("Moved.")
        assert client.position("billing", "shop.orders", 0) == 0


def test_clients_and_users(broker: BrokerProcess, page: Page) -> None:
    page.open(url(broker, "/clients"))
    page.until("http")
    page.open(url(broker, "/users"))
    page.until("whoever reaches it may do everything")


def test_users_are_made_changed_and_ended(guarded: BrokerProcess, page: Page) -> None:
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
    page.click("Replace")
    page.until("logins and tokens of before have ended")
    page.log_in("carol", "second")
    page.open(url(guarded, "/users"))
    page.until("not allowed")
    page.click("What you may do, your password and your tokens")
    page.until("Your tokens")
    page.fill("Name", "laptop")
    page.click("Make a token")
    page.until("shown this once")
    page.log_in("alice", "wonderland")
    page.open(url(guarded, "/users/carol"))
    page.until("Delete")
    page.click("Delete")
    page.click("Delete this user for good")
    page.until("Add a user")
    assert "carol" not in page.text()
    page.errors.clear()  # the browser counts the refusal as one


@pytest.mark.parametrize(
    "path", ["/", "/topics", "/topics/shop.orders", "/topics/shop.orders/records", "/groups", "/clients", "/users"]
)
def test_pages_fit_a_narrow_screen(broker: BrokerProcess, page: Page, path: str) -> None:
    page.look(width=360, height=740, dark=True)
    try:
        page.open(url(broker, path))
        page.until(lambda text: len(text) > 20)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        assert page.evaluate("getComputedStyle(document.body).color") == "rgb(227, 230, 232)"
    finally:
        page.look(width=1200, height=800)


def test_a_page_that_is_not_there_says_so(broker: BrokerProcess, page: Page) -> None:
    page.open(url(broker, "/topics/missing"))
    page.until("no such topic")
    page.errors.clear()  # the browser counts the answer as one
