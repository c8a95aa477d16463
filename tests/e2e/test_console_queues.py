"""Queues in the console: create one, watch its workers, change its settings and purge it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

import polywire
from polywire.client.sync import SyncClient
from polywire.records.columns import Record
from tests.broker_process import BrokerProcess
from tests.e2e.browser import Page, checked_page, find_browser
from tools.screenshots import url

PROGRAM = find_browser()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="NO BROWSER: the console was not tried (apt install chromium)")
HOSTILE = '<img src=x onerror="document.title=1">'
COUNT = 8


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path_factory.mktemp("queues") / "data", wires=("polywire", "http")) as process:
        with SyncClient(process.url()) as client:
            client.create_topic("jobs", 1)
            client.produce("jobs", [Record(b"job")] * COUNT, partition=0)
        yield process


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    with checked_page(tmp_path / "profile") as page:
        yield page


def cards(page: Page, *expected: str) -> None:
    """Wait until the cards show the records that wait, are held and are delayed."""
    names = ("Waiting", "Held by workers", "Delayed")
    page.until(lambda text: all(f"{name}\n{number}\n" in text for name, number in zip(names, expected, strict=True)))


def test_a_queue_is_created_watched_changed_and_purged(broker: BrokerProcess, page: Page) -> None:
    page.open(url(broker, "/queues"))
    page.until("There are no queues")
    page.click("Create a queue")
    page.fill("Topic", "jobs")
    page.fill("Group", HOSTILE)
    page.fill("Attempts", "many")
    page.click("Create queue")
    page.until("a number from 1 to 1000")
    page.errors.clear()  # the browser counts the response as an error
    page.fill("Attempts", "1")
    page.fill("Topic for dead letters", "jobs.dead")
    page.evaluate("document.querySelector('select').value = 'earliest'")
    page.click("Create queue")
    assert HOSTILE in page.until("Finished per second")
    cards(page, str(COUNT), "0", "0")
    asyncio.run(work(broker, page))
    page.until("No worker holds records")
    page.click("Change settings")
    page.fill("share.delivery.count.limit", "0")
    page.click("Save settings")
    page.until("a number from 1 to 1000")
    page.errors.clear()
    page.fill("share.delivery.count.limit", "7")
    page.click("Save settings")
    page.until("share.delivery.count.limit\t7\t5\tgroup")
    page.click("Purge")
    page.click(f"Skip the records of {HOSTILE}")
    page.until("Skipped")
    cards(page, "0", "0", "0")


async def work(broker: BrokerProcess, page: Page) -> None:
    """Reject the first job, and acknowledge the second. Meanwhile the queue cannot be purged."""
    async with (
        polywire.connect(broker.url()) as client,
        client.queue("jobs", group=HOSTILE, worker=HOSTILE, prefetch=4, start=None) as queue,
    ):
        job = await queue.get()
        assert job is not None
        await asyncio.to_thread(refuse_purge, page)
        await job.reject()
        job = await queue.get()
        assert job is not None
        await job.ack()
        await asyncio.to_thread(page.until, "1 accepted, 0 released, 1 rejected")
        await asyncio.to_thread(page.until, "jobs.dead (1)")


def refuse_purge(page: Page) -> None:
    cards(page, str(COUNT - 4), "4", "0")
    page.click("Purge")
    page.click(f"Skip the records of {HOSTILE}")
    page.until("stop them first")
    page.errors.clear()
