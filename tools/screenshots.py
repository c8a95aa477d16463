"""Save a screenshot of every page of the console: ``python -m tools.screenshots [folder] [name …]`` or ``make screenshots``.

The broker has sample data. Pictures of the documentation are in docs/operate; look at them before you commit them.
Requires Chromium.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from random import Random
from threading import Event, Semaphore, Thread
from typing import Final

from PIL import Image

import polywire
from polywire.client.sync import SyncClient
from polywire.records.columns import Header, HeaderKind, Record
from polywire.server.users import add_user
from tests.broker_process import BrokerProcess
from tests.e2e.browser import Page, browser, find_browser

ROOT: Final = Path(__file__).parents[1]
DOCS: Final = ROOT / "docs" / "operate"
PREFIX: Final = "console-"
WIDTH: Final = 1200
NARROW: Final = (390, 844)
COLORS: Final = 256  # of a picture: flat colors and smooth text need no more, and files get a third of the size
HEIGHT_MIN: Final = 480
HEIGHT_MAX: Final = 1_200
USER: Final = "alice"
PASSWORD: Final = "wonderland"
ZONE: Final = "Europe/Berlin"
STATEMENT: Final = """\
select decode(value)::json->>'city' as city, sum((decode(value)::json->>'total')::double) as total
from shop.orders
group by city
order by total desc"""


@dataclass(frozen=True, slots=True)
class Picture:
    """One page to show.

    Attributes:
        name: of the file, and of the page in tests.
        path: of the page.
        expected: text that the page has when it is complete.
        prepare: opens forms and fills them before the picture.
        is_narrow: a phone, in dark colors.
    """

    name: str
    path: str
    expected: str
    prepare: Callable[[Page], object] = lambda _: None
    is_narrow: bool = False

    @property
    def file(self) -> str:
        return f"{PREFIX}{self.name}.png"


def _open_record(page: Page) -> None:
    page.evaluate("document.querySelector('main tbody details').open = true")
    page.until("Send again")


def _search(page: Page) -> None:
    page.fill("Search", "berlin")
    page.fill("JSON field", "items[*].count >= 3")
    page.click("Read")
    page.until("records match")
    _open_record(page)


def _query(page: Page) -> None:
    page.evaluate(f"document.querySelector('textarea').value = {json.dumps(STATEMENT)}")
    page.click("Run")
    page.until("rows in")
    page.click("Chart")


def _preview(page: Page) -> None:
    page.click("Preview")
    page.until("Preview: nothing has changed yet.")


def _topic_forms(page: Page) -> None:
    page.click("Change settings")


def _rates(page: Page) -> None:
    page.until(lambda text: "Records stored per second\n0\n" not in text)


def _queue_rates(page: Page) -> None:
    page.until(lambda text: "Finished per second\n–" not in text)


def _confirm(page: Page) -> None:
    page.click("Cut over …")
    page.until("First stop the producers")


PICTURES: Final = (
    Picture("overview", "/", "Records stored per second", _rates),
    Picture("topics", "/topics", "shop.orders", lambda page: page.click("Create a topic")),
    Picture("topic", "/topics/shop.payments", "Partitions", _topic_forms),
    Picture("records", "/topics/shop.orders/records?from=earliest", "records of", _search),
    Picture("sql", "/sql", "Statement", _query),
    Picture("dead-letters", "/dead/shop.orders.dead", "are waiting"),
    Picture("dead", "/topics/shop.orders.dead/records", "read up to", _open_record),
    Picture("groups", "/groups", "billing"),
    Picture("group", "/groups/shop.orders/billing", "Reset offsets", _preview),
    Picture("queues", "/queues", "senders"),
    Picture("queue", "/queues/shop.mails/senders", "Purge", _queue_rates),
    Picture("links", "/links", "running"),
    Picture("link", "/links/old", "invoices\t", _confirm),
    Picture("clients", "/clients", "polywire"),
    Picture("users", "/users", "Add a user"),
    Picture("user", "/users/alice", "Your tokens"),
    Picture("quotas", "/quotas", "of 5 MB/s"),
    Picture("bucket", "/bucket", "Rates and means cover the last"),
    Picture("narrow", "/", "Records stored per second", _rates, is_narrow=True),
)


def url(broker: BrokerProcess, path: str) -> str:
    """Return the address of a page."""
    host, port = broker.addresses["http"]
    return f"http://{host}:{port}/#{path}"


def login_url(broker: BrokerProcess) -> str:
    return broker.url().replace("://", f"://{USER}:{PASSWORD}@")


def _orders(count: int) -> Iterator[Record]:
    random = Random(7)  # the same pictures every time
    cities = ("Berlin", "Lyon", "Porto", "Turin", "Utrecht")
    for number in range(count):
        items = [{"sku": f"sku-{random.randrange(90)}", "count": random.randrange(1, 5)} for _ in range(2)]
        value = {
            "order": number,
            "city": random.choice(cities),
            "items": items,
            "total": random.randrange(500, 90_000) / 100,
        }
        headers = (
            Header(b"trace", f"{random.getrandbits(64):016x}".encode()),
            Header(b"attempt", random.randrange(1, 4).to_bytes(4, "little"), value_kind=HeaderKind.INT32),
        )
        yield Record(json.dumps(value).encode(), f"customer-{random.randrange(400)}".encode(), headers)


def _dead_letters() -> Iterator[Record]:
    for number in range(3):
        headers = {"reason": "total is not a number", "topic": "shop.orders", "partition": str(number), "offset": "17"}
        yield Record(
            b'{"order": %d, "total": "n/a"}' % number,
            None,
            tuple(Header(f"dead.{name}".encode(), text.encode()) for name, text in headers.items()),
        )


def fill(broker: BrokerProcess, source: BrokerProcess) -> None:
    """Write the sample data."""
    with SyncClient(source.url()) as client:
        client.create_topic("invoices", 2)
        client.produce("invoices", list(_orders(200)), partition=0)
    with SyncClient(login_url(broker)) as client:
        for topic, partitions in (("shop.orders", 3), ("shop.payments", 4), ("shop.orders.dead", 1), ("sensors", 6)):
            client.create_topic(topic, partitions)
        orders = list(_orders(900))
        for partition in range(3):
            client.produce("shop.orders", orders[partition::3], partition=partition)
        for topic, partition, count in (("shop.payments", 0, 120), ("shop.payments", 1, 80), ("sensors", 2, 400)):
            client.produce(topic, list(_orders(count)), partition=partition)
        client.produce("shop.orders.dead", list(_dead_letters()), partition=0)
        for group, topic, offset in (
            ("billing", "shop.orders", 240),
            ("mail", "shop.orders", 300),
            ("ledger", "shop.payments", 30),
        ):
            client.commit(group, topic, 0, offset)
            client.commit(group, topic, 1, offset // 2)
        for topic, count in (("shop.mails", 3_000), ("shop.invoices", 25)):
            client.create_topic(topic, 2)
            client.produce(topic, list(_orders(count)), partition=0)
        client.create_topic("shop.mails.dead", 1)
    asyncio.run(_create_queues(broker))


async def _create_queues(broker: BrokerProcess) -> None:
    async with (
        polywire.connect(login_url(broker)) as client,
        client.queue("shop.mails", group="senders", prefetch=1, attempts=3, dead_letters="shop.mails.dead"),
        client.queue("shop.invoices", group="printers"),
    ):
        pass


async def _work(broker: BrokerProcess, worker: str, began: Semaphore, ends: Event) -> None:
    """Work on a queue slowly, so that records wait, are held, delayed and rejected."""
    async with (
        polywire.connect(login_url(broker)) as client,
        client.queue("shop.mails", group="senders", worker=worker, prefetch=20) as queue,
    ):
        for number in range(3_000):
            job = await queue.get(timeout_s=1)
            if job is None or ends.is_set():
                return
            if number == 4:
                await job.reject()
            elif number in (2, 3):
                await job.retry(delay_s=3600)
            else:
                await job.ack()
            if number == 5:
                began.release()
            await asyncio.sleep(0.2)


@contextmanager
def working(broker: BrokerProcess) -> Iterator[None]:
    """Run workers of a queue in the background."""
    workers = ("mailer-1", "mailer-2")
    began, ends = Semaphore(0), Event()

    async def work() -> None:
        await asyncio.gather(*(_work(broker, worker, began, ends) for worker in workers))

    thread = Thread(target=lambda: asyncio.run(work()))
    thread.start()
    try:
        for _ in workers:
            assert began.acquire(timeout=60)
        yield
    finally:
        ends.set()
        thread.join()


def activity(page: Page) -> None:
    """Give the charts an hour of activity, which a new broker does not have."""
    random = Random(3)
    now = int(time.time()) // 10
    samples = []
    for step in range(360):
        base = 900 + 500 * math.sin(step / 40) + (1_400 if 210 < step < 250 else 0)
        records = base * random.uniform(0.9, 1.1)
        samples.append(
            {
                "number": now - 360 + step,
                "records": records,
                "received_bytes": records * 240,
                "sent_bytes": records * 700,
            }
        )
    answer = json.dumps({"interval_s": 10, "samples": samples})
    source = (
        "const asked = fetch; window.fetch = (path, ...more) => path === '/api/v1/history'"
        f" ? Promise.resolve(new Response({json.dumps(answer)})) : asked(path, ...more);"
    )
    page.call("Page.addScriptToEvaluateOnNewDocument", source=source)


def create_link(page: Page, name: str, source: BrokerProcess, topics: Sequence[str]) -> None:
    """Create a link with the broker whose console is open."""
    body = json.dumps({"source": source.url(), "topics": topics})
    headers = json.dumps({"X-Polywire": "1", "Content-Type": "application/json"})
    request = f"{{method: 'POST', headers: {headers}, body: {json.dumps(body)}}}"
    assert page.evaluate(f"fetch('/api/v1/links/{name}', {request}).then((response) => response.status)") == 200


@contextmanager
def stage(folder: Path) -> Iterator[tuple[BrokerProcess, Page]]:
    """Start a broker with users, a bucket, tables and sample data, and a browser."""
    program = find_browser()
    assert program is not None, "no browser: install chromium"
    add_user(folder / "users", USER, PASSWORD, "all")
    add_user(folder / "users", "reader", PASSWORD, "consume@shop,group@shop,read_servers")
    options = [
        *("--users", str(folder / "users"), "--bucket", f"file://{folder / 'bucket'}", "--node", "broker-1"),
        *("--quotas", "user=alice produce=5MB fetch=20MB; client-id=* requests=500"),
        *("--bucket-prices", "put=0.005,get=0.0004", "--table", "delta", "--table-freshness-s", "1"),
    ]
    with ExitStack() as stack:
        source = stack.enter_context(BrokerProcess(folder / "source", wires=("polywire",)))
        broker = stack.enter_context(BrokerProcess(folder / "data", *options, wires=("polywire", "http")))
        fill(broker, source)
        page = stack.enter_context(browser(program, folder / "profile"))
        page.call("Emulation.setTimezoneOverride", timezoneId=ZONE)
        page.log_in(USER, PASSWORD)
        page.look(width=WIDTH, height=HEIGHT_MIN)
        page.open(url(broker, "/links"))
        page.until("There are no links")
        create_link(page, "old", source, ["invoices"])
        page.until("running")
        yield broker, page


def show(page: Page, broker: BrokerProcess, picture: Picture, *, width: int, height: int, dark: bool) -> None:
    """Open a page as the picture shows it."""
    page.look(width=width, height=height, dark=dark)
    page.open("about:blank")  # so that the next address is a new page
    page.open(url(broker, picture.path))
    page.until(picture.expected)
    picture.prepare(page)


def save(page: Page, broker: BrokerProcess, picture: Picture, path: Path, *, dark: bool = False) -> None:
    """Save one picture, as high as its page."""
    width, height = NARROW if picture.is_narrow else (WIDTH, HEIGHT_MIN)
    is_dark = dark or picture.is_narrow
    show(page, broker, picture, width=width, height=height, dark=is_dark)
    if not picture.is_narrow:
        full = int(page.evaluate("document.documentElement.scrollHeight"))
        page.look(width=width, height=min(max(full, HEIGHT_MIN), HEIGHT_MAX), dark=is_dark)
    page.settle()
    page.screenshot(path)
    _reduce(path)


def _reduce(path: Path) -> None:
    """Replace the rarest colors of a picture, so that its file is smaller. The frequent ones stay exactly as they are."""
    with Image.open(path) as opened:
        picture = opened.convert("RGB")
    found = sorted(picture.getcolors(picture.width * picture.height) or [], reverse=True)[:COLORS]
    palette = Image.new("P", (1, 1))
    palette.putpalette([part for _, color in found if isinstance(color, tuple) for part in color])
    picture.quantize(palette=palette, dither=Image.Dither.NONE).save(path, optimize=True)


@contextmanager
def producing(broker: BrokerProcess) -> Iterator[None]:
    """Produce records in the background, so that the present rates are not zero."""
    ends = Event()

    def produce() -> None:
        with SyncClient(login_url(broker)) as client:
            while not ends.wait(0.2):
                client.produce("sensors", list(_orders(240)), partition=3)
                client.fetch("shop.orders", 0, 0)

    thread = Thread(target=produce)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def _background(broker: BrokerProcess, picture: Picture) -> AbstractContextManager[None]:
    if picture.path.startswith("/queues"):
        return working(broker)
    return producing(broker) if picture.path == "/" else nullcontext()


def main(arguments: Sequence[str]) -> int:
    place = Path(arguments[0]) if arguments else DOCS
    chosen = [picture for picture in PICTURES if picture.name in arguments[1:] or len(arguments) < 2]
    with tempfile.TemporaryDirectory(prefix="polywire-") as folder, stage(Path(folder)) as (broker, page):
        activity(page)
        for picture in chosen:
            with _background(broker, picture):
                save(page, broker, picture, place / picture.file)
            print(place / picture.file)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
