"""HTTP over a broker in memory, on a real loop: requests as bytes in, answers as values out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from polywire.broker.access import ROOT, ConfiguredUser, Principal
from polywire.broker.broker import Broker
from polywire.broker.owners import Caller, caller_of
from polywire.broker.passwords import hash_password
from polywire.broker.permissions import parse_grants
from polywire.broker.settings import BrokerSettings
from polywire.choices import missing
from polywire.clock import SystemClock
from polywire.cluster.opening import ShardState
from polywire.durations import Durations
from polywire.errors import ErrorCode, PeerError
from polywire.http.application import HttpApplication
from polywire.http.guard import completing
from polywire.http.process import BucketCharge, BucketNode, BucketRequests, BucketView, ConnectionView, Sample, Traffic
from polywire.link_orders import LinkDefinition, LinkPlan, LinkReport, LinkView, Phase, PlannedTopic
from polywire.protocols.runtime.forwarded import Forwarding
from polywire.table_orders import TableReport
from polywire.testing.memory_broker import MemoryBroker
from polywire.types import Buffer
from tests.unit.protocols.unmetered import Unmetered


@dataclass
class Queries:
    """Answers every statement with the same result.

    Attributes:
        asked: the statements with their limits of rows and their ids.
        running: ids of queries that can be cancelled.
    """

    asked: list[tuple[str, int, str]] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    outcomes: dict[str, int] = field(default_factory=lambda: {"done": 3, "failed": 2, "rejected": 1})

    async def run(self, caller: Caller, statement: str, *, rows_max: int, name: str) -> bytes:
        self.asked.append((statement, rows_max, name))
        return b'{"rows":[[1]]}'

    def cancel(self, caller: Caller, name: str) -> bool:
        return name in self.running


LINK = LinkDefinition("old", "kafka://reader:secret@old:9092", ("orders*",), created_at_us=1)


@dataclass
class Links:
    """Links in memory, with the reports that a test sets."""

    views: dict[str, LinkView] = field(
        default_factory=lambda: {"old": LinkView(LINK, {"orders": LinkReport("old", "orders", 3, 7, 2, 1.5, 9.0)})}
    )

    def all(self) -> Sequence[LinkView]:
        return list(self.views.values())

    def find(self, name: str) -> LinkView:
        if name not in self.views:
            raise missing(ErrorCode.LINK_MISSING, "link", name, self.views)
        return self.views[name]

    async def create(self, link: LinkDefinition, *, dry_run: bool) -> LinkPlan:
        if not dry_run:
            self.views[link.name] = LinkView(link, {})
        return LinkPlan((PlannedTopic("orders", 3, 9, creates=True),), ("no keys",))

    async def pause(self, name: str, *, paused: bool) -> LinkView:
        link = msgspec.structs.replace(self.find(name).link, paused=paused)
        self.views[name] = LinkView(link, {})
        return self.views[name]

    async def cut_over(self, name: str, patterns: Sequence[str], *, quiet_ms: int, reverse: bool = False) -> LinkView:
        phase = Phase.REVERSED if reverse else Phase.CUT_OVER
        report = LinkReport("old", "orders", phase=phase, pause_s=quiet_ms / 1000)
        return LinkView(self.find(name).link, dict.fromkeys(patterns or ("orders",), report))

    async def fall_back(self, name: str, patterns: Sequence[str], *, quiet_ms: int) -> LinkView:
        return LinkView(self.find(name).link, {"orders": LinkReport("old", "orders", pause_s=quiet_ms / 1000)})

    async def cancel_cut_over(self, name: str, patterns: Sequence[str]) -> LinkView:
        return LinkView(self.find(name).link, {"orders": LinkReport("old", "orders")})

    async def delete(self, name: str) -> None:
        del self.views[self.find(name).link.name]


@dataclass
class Process:
    """The state that the process reports."""

    stopping: bool = False
    refused: int = 3
    connections_max: int = 100
    receive_buffer_bytes: int = 0
    open: list[ConnectionView] = field(default_factory=list)
    view: BucketView | None = None
    queries: Queries | None = field(default_factory=Queries)
    links: Links | None = field(default_factory=Links)
    samples: Sequence[Sample] = ()
    table_reports: dict[str, TableReport] = field(default_factory=dict)

    def connections(self) -> Iterable[ConnectionView]:
        return self.open

    def traffic(self) -> Mapping[str, Traffic]:
        return {"kafka": Traffic(2, 5, 1000, 2000)}

    def work(self) -> Mapping[str, Durations]:
        return {"sync": Durations()}

    def requests(self) -> Mapping[tuple[str, str], Durations]:
        return {("kafka", "produce"): Durations()}

    def bucket(self) -> BucketView | None:
        return self.view

    def history(self) -> Sequence[Sample]:
        return self.samples

    def tables(self) -> Mapping[str, TableReport]:
        return self.table_reports

    def listeners(self) -> Mapping[str, str]:
        return {"kafka": "127.0.0.1:9094"}

    def settings(self) -> Sequence[tuple[str, object]]:
        return [("data_dir", "polywire-data"), ("partition_count", 3)]


def table_report(topic: str, **changes: Any) -> TableReport:
    """Return the state of a table that has all records of its topic."""
    report = TableReport(
        topic,
        version=7,
        rows=100,
        files=3,
        size=4096,
        behind=0,
        skipped=0,
        committed_ms=1_795_000_000_000,
        complete_ms=1_795_000_000_000,
        commit_s=0.25,
    )
    return msgspec.structs.replace(report, **changes)


def bucket_view(*, priced: bool = True) -> BucketView:
    """Return a view with a leader and a standby."""
    taken, slow = Durations(), Durations()
    for durations, seconds in ((taken, 0.03), (taken, 0.04), (slow, 99.0)):
        durations.observe(seconds)
    return BucketView(
        url="s3://bucket/log",
        id="ab" * 16,
        node="one",
        shard=ShardState("0000", 3, 9, unstored_bytes=4096, unstored_s=0.25, cached_bytes=1 << 20),
        objects_max=1000,
        cached_bytes_max=1 << 30,
        led=2,
        deposed=1,
        put_bytes=5000,
        got_bytes=700,
        requests=[BucketRequests("create", "done", taken), BucketRequests("read", "failed", slow)],
        charges=[
            BucketCharge("put", 2000, 0.005 if priced else None),
            BucketCharge("get", 10, 0.0 if priced else None),
        ],
        nodes=[BucketNode("one", "leads", 3), BucketNode("two", "standby", None)],
    )


class Peer(Unmetered):
    """A connection whose peer reads everything."""

    backlog = 0
    backlog_max = 1 << 20
    peer = "127.0.0.1:5"
    local = ("127.0.0.1", 9080)
    on_loopback = True
    certified: Principal | None = None

    def __init__(self) -> None:
        self.sent = bytearray()
        self.closed = False
        self.principal: Principal | None = None

    def write(self, data: Buffer) -> None:
        self.sent += data

    def write_many(self, parts: Sequence[Buffer], released: Callable[[], None] | None = None) -> None:
        for part in parts:
            self.sent += part
        if released is not None:
            released()

    def close(self) -> None:
        self.closed = True

    def fail(self, error: PeerError) -> None:
        raise error

    def pin(self) -> Callable[[], None]:
        raise AssertionError("a request is copied whole")

    def identified(self, principal: Principal | None) -> None:
        self.principal = principal


@dataclass(frozen=True)
class Answer:
    """A response."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """Return the code of the error response."""
        return str(self.json["error"]["code"])


def request(method: str, path: str, headers: Mapping[str, str] | None = None, body: bytes = b"") -> bytes:
    """Return a request as a client other than a browser sends it."""
    sent = {"Host": "127.0.0.1:9080"} | dict(headers or {})
    if body:
        sent["Content-Length"] = str(len(body))
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in sent.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


def answer_of(sent: bytes) -> Answer:
    """Return the only response in these bytes."""
    head, _, body = sent.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        body = dechunked(body)
    return Answer(int(status.split()[1]), headers, body)


def dechunked(data: bytes) -> bytes:
    found = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        found, data = found + data[: int(size, 16)], data[int(size, 16) + 2 :]
    return found


class Site:
    """A broker, and HTTP over it."""

    def __init__(
        self,
        *,
        names: Sequence[str] = (),
        settings: BrokerSettings | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
        router: Forwarding | None = None,
    ) -> None:
        self.loop = loop or asyncio.new_event_loop()
        self.memory = MemoryBroker(settings, loop=self.loop, clock=SystemClock())
        self.process = Process()
        self.peer = Peer()
        self.application = HttpApplication(self.broker, self.process, names=names, router=router)

    @property
    def broker(self) -> Broker:
        return self.memory.broker

    @property
    def caller(self) -> Caller:
        """Return the caller of an open broker."""
        return caller_of(ROOT, self.peer.peer)

    def close(self) -> None:
        self.broker.close()
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()

    def configure(self, **grants: Any) -> None:
        """Configure users whose passwords are their names."""
        users = [ConfiguredUser(name, hash_password(name), given) for name, given in grants.items()]
        self.broker.access.configure(users)

    def make_user(self, name: str, password: str, *permissions: str) -> None:
        """Create a user that can be changed over the API; configured users cannot."""
        done: asyncio.Future[Any] = self.loop.create_future()
        grants = parse_grants(permissions) if permissions else None
        self.broker.access.create_user(name, password, grants, done=completing(done))
        self.loop.run_until_complete(done)

    def ask(self, method: str, path: str, headers: Mapping[str, str] | None = None, body: bytes | Any = b"") -> Answer:
        """Send a request and return its response."""
        if not isinstance(body, bytes):
            body = json.dumps(body).encode()
        return self.exchange(request(method, path, headers, body))

    def exchange(self, sent: bytes) -> Answer:
        """Send the bytes of a request and return its response."""
        self.peer.sent.clear()
        exchange = self.application.exchange(self.peer, asyncio.Event())
        self.loop.run_until_complete(exchange.run(sent))
        return answer_of(bytes(self.peer.sent))
