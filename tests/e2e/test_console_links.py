"""Links in the console: create one, cut its topics over, fall back, cancel and delete it; those that fail are named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from polywire.cli.admin import AdminApi
from polywire.client.sync import SyncClient
from polywire.records.columns import Record
from polywire.server.users import add_user
from tests.broker_process import BrokerProcess
from tests.e2e.browser import Page, browser, checked_page, find_browser
from tools import screenshots
from tools.screenshots import url

PROGRAM = find_browser()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="NO BROWSER: the console was not tried (apt install chromium)")
LINKED_TOPIC = "<img src=x onerror=alert(2)>"


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path / "data", wires=("polywire", "http")) as process:
        yield process


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    with checked_page(tmp_path / "profile") as page:
        yield page


def test_a_link_is_checked_created_paused_and_deleted(broker: BrokerProcess, page: Page, tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "source", wires=("polywire",)) as source:
        with SyncClient(source.url()) as client:
            client.create_topic("linked", 2)
            client.produce("linked", [Record(b"a"), Record(b"b")])
        page.open(url(broker, "/links"))
        page.until("There are no links")
        page.fill("Name", "old")
        page.fill("Source", source.url())
        page.fill("Topics", "linked, nothing*")
        page.click("Check")
        page.until("no topic of the source matches")
        page.errors.clear()  # the browser reports the status 404
        page.fill("Topics", "linked")
        page.click("Check")
        assert "is created" in page.until("Preview: nothing has changed yet.")
        page.click("Create link")
        page.until(lambda text: "Records behind" in text and "linked" in text and "running" in text)
        page.click("Pause")
        page.until("paused")
        page.click("Resume")
        page.until(lambda text: "running" in text)
        page.open(url(broker, "/links"))
        page.until("Create a link")
        page.open(url(broker, "/links/old"))
        page.until("Switch over")
        page.click("Delete")
        page.click("Delete link")
        page.until("There are no links")
        page.errors.clear()  # a request about the deleted link may be on its way


def test_topics_of_a_link_are_cut_over_and_fall_back(broker: BrokerProcess, page: Page, tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "source", wires=("polywire",)) as source, SyncClient(source.url()) as client:
        for topic in ("switched", LINKED_TOPIC):
            client.create_topic(topic, 1)
        client.produce("switched", [Record(b"a"), Record(b"b")])
        page.open(url(broker, "/"))
        page.until("Overview")
        screenshots.create_link(page, "switch", source, ["switched", LINKED_TOPIC])
        page.open(url(broker, "/links/switch"))
        page.until(lambda text: "running" in text and text.count("following") == 2)
        page.click("Cut over …")
        assert "First stop the producers at the source." in page.until("Cut over topics of the link switch?")
        page.click("Back")
        page.until(lambda text: "First stop" not in text)
        page.click("Cut over …")
        page.evaluate("document.querySelector('#switch input:not([type=checkbox])').value = 'nothing'")
        page.click("Cut over now")
        page.until(lambda _: page.text_of("#switch [role=alert]") != "")
        page.errors.clear()  # the browser reports the status 404
        page.evaluate("document.querySelector('#switch input:not([type=checkbox])').value = ''")
        page.evaluate("document.querySelector('#switch input[type=checkbox]').click()")
        page.until("so that you can fall back")
        page.click("Cut over now")
        text = page.until("Now start the producers here.")
        assert "reversed" in text
        with SyncClient(broker.url()) as here:
            here.produce("switched", [Record(b"c")])
        page.click("Fall back …")
        page.until("First stop the producers at this broker.")
        page.click("Fall back now")
        page.until("Now start the producers at the source.")
        assert [record.value for record in client.fetch("switched", 0, 0)] == [b"a", b"b", b"c"]
        assert page.evaluate("document.querySelectorAll('main img').length") == 0
        page.click("Delete")
        page.click("Delete link")
        page.until("There are no links")
        page.errors.clear()  # a request about the deleted link may be on its way


def test_a_waiting_cut_over_is_cancelled(broker: BrokerProcess, page: Page, tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "source", wires=("polywire",)) as source, SyncClient(source.url()) as client:
        client.create_topic("busy", 1)
        client.produce("busy", [Record(b"a")])
        page.open(url(broker, "/"))
        page.until("Overview")
        screenshots.create_link(page, "busy", source, ["busy"])
        page.open(url(broker, "/links/busy"))
        page.until(lambda text: "running" in text and "following" in text)
        page.click("Cut over …")
        page.until("Cut over topics of the link busy?")
        source.kill()  # nothing can be copied any more
        page.click("Cut over now")
        page.until("Cancel")
        page.click("Cancel")
        page.until("Cancelled: nothing has changed.")
        assert (
            page.evaluate(
                "fetch('/api/v1/links/busy').then((response) => response.json()).then((found) => found.topic_reports[0].phase)"
            )
            == "following"
        )
        page.click("Delete")
        page.click("Delete link")
        page.until("There are no links")
        page.errors.clear()


def test_a_link_that_fails_is_named_in_the_overview(broker: BrokerProcess, page: Page, tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "source", wires=("polywire",)) as source:
        with SyncClient(source.url()) as client:
            client.create_topic("orders", 1)
        AdminApi(broker.url("http")).request("POST", "links/old", {"source": source.url(), "topics": ["orders"]})
        page.open(url(broker, "/links/old"))
        page.until(lambda text: "Records behind\n0\n" in text and "running" in text)
        page.open(url(broker, "/"))
        assert "Links that fail" not in page.until("Protocols")
        source.kill()
        page.until("Links that fail: old")
        page.click("old")
        page.until(lambda text: "Records behind\n–\n" in text and "The link fails" in text)


def test_users_who_may_not_change_links_see_them_only(tmp_path: Path) -> None:
    assert PROGRAM is not None
    add_user(tmp_path / "users", "reader", "wonderland", "read_servers")
    with (
        BrokerProcess(tmp_path / "data", "--users", str(tmp_path / "users"), wires=("polywire", "http")) as process,
        browser(PROGRAM, tmp_path / "profile") as page,
    ):
        page.log_in("reader", "wonderland")
        page.open(url(process, "/links"))
        assert "Create a link" not in page.until("There are no links")
