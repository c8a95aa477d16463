"""Tests of HTTP with several processes: each responds like one broker with all topics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from polywire.broker.changes import TransactionDecided
from polywire.broker.client_quotas import DEFAULT, Quota
from polywire.broker.permissions import EVERYTHING, parse_grants
from polywire.broker.settings import BrokerSettings, TableFormat
from polywire.broker.transaction_state import Transaction
from polywire.errors import BrokerError, ErrorCode, Unavailable
from polywire.http import forwarding, merging
from polywire.http.application import HttpApplication
from polywire.http.dead_letters import STAGING_PATH
from polywire.http.factory import ForwardedHttpSession
from polywire.http.merging import merged_metrics
from polywire.http.process import Sample
from polywire.http.session import Application
from polywire.log.base import Completion, Handle
from polywire.protocols.runtime import forwarded
from polywire.protocols.runtime.forwarded import ForwardedRequests, Sender
from polywire.types import PositionKind, TopicName
from tests.unit.http.site import Answer, Peer, Site, answer_of, request
from tests.unit.http.test_guard import basic

SHARDS = 3
CHANGE = {"X-Polywire": "1", "Content-Type": "application/json"}


class _FarSite:
    """Implements ``session.Site`` for a shard, which forwards no forwarded request."""

    def __init__(self, site: Site, router: _View | None = None) -> None:
        self.loop = site.loop
        self._application = HttpApplication(site.broker, site.process, names=(), router=router, is_linked=True)  # type: ignore[arg-type]

    async def application(self) -> Application:
        return self._application


class Shards:
    """Implements ``Shards``; the first shard is asked. ``lost``: shards whose processes have ended."""

    count = SHARDS
    own = 0
    users = None

    def __init__(self, settings: BrokerSettings | None = None) -> None:
        self.asked = Site(router=self, settings=settings)  # type: ignore[arg-type]  # it opens no links
        self.sites = [self.asked, *(Site(loop=self.asked.loop, settings=settings) for _ in range(SHARDS - 1))]
        self.lost: set[int] = set()
        self.links = 0

    def shard_of(self, full_name: str) -> int | None:
        return next((number for number, site in enumerate(self.sites) if site.broker.find_topic(full_name)), None)

    def shard_by_hash(self, full_name: str) -> int:
        return 0

    def least_loaded(self) -> int:
        return min(range(SHARDS), key=lambda number: len(self.sites[number].broker.topics()))

    def close(self) -> None:
        for site in self.sites[1:]:
            site.broker.close()
        self.asked.close()

    @property
    def shards(self) -> Shards:
        return self

    def execute(
        self, shard: int, protocol: str, sender: Sender, requests: bytes, then: Completion[bytes], own: int = 0
    ) -> Handle:
        self.links += 1
        site, loop = self.sites[shard], self.asked.loop
        if shard in self.lost:
            return loop.call_soon(then, Unavailable(ErrorCode.STOPPING, "lost"))
        far = _FarSite(site, _View(self, shard))
        run = ForwardedRequests(loop, requests, sender.peer, None, then)
        return run.run(partial(ForwardedHttpSession, far))

    def join_transactions(self) -> None:
        """Allow transactions with participants in several shards."""
        for number, site in enumerate(self.sites):
            site.broker.participants.begin(_Participants(self), _View(self, number).coordinates)

    def ask(self, method: str, path: str, body: object = None, **headers: str) -> Answer:
        return self.asked.ask(method, path, CHANGE | headers, b"" if body is None else body)


class _View:
    """The shards as seen by one of them; every shard coordinates transactional ids."""

    count = SHARDS

    def __init__(self, shards: Shards, own: int) -> None:
        self._shards = shards
        self.own = own
        self.shard_of = shards.shard_of
        self.execute = shards.execute
        self.least_loaded = shards.least_loaded

    @property
    def shards(self) -> _View:
        return self

    def shard_by_hash(self, full_name: str) -> int:
        return sum(full_name.encode()) % SHARDS

    def coordinates(self, name: str) -> bool:
        return self.shard_by_hash(name) == self.own


class _Participants:
    """Implements ``participants.Shards`` by calls."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards

    def end_participant(self, shard: int, decided: TransactionDecided, then: Callable[[bool], None]) -> None:
        def done(result: int | BrokerError) -> None:
            then(not isinstance(result, BrokerError))

        end = self._shards.sites[shard].broker.participants.end
        self._shards.asked.loop.call_soon(partial(end, decided.id, decided.token, commits=decided.commits, done=done))

    def ask_coordinator(self, participant: Transaction, then: Callable[[bool | None], None]) -> None:
        self._shards.asked.loop.call_soon(then, None)


@pytest.fixture
def shards() -> Iterator[Shards]:
    shards = Shards()
    yield shards
    shards.close()


def make(shards: Shards, *names: str) -> None:
    for name in names:
        assert shards.ask("POST", f"/api/v1/topics/{name}", {"partitions": 1}).json == {"name": name}


def test_every_process_finds_the_topics_of_all(shards: Shards) -> None:
    names = ("a", "b", "c", "sp%2Fac%20e")
    for name in names:
        assert shards.ask("POST", f"/api/v1/topics/{name}", {"partitions": 1}).status == 200
        assert shards.ask("POST", f"/api/v1/topics/{name}/records", {"value": "v"}).json["offset"] == 0
        assert shards.ask("GET", f"/api/v1/topics/{name}").json["records"] == 1
        answer = shards.ask("GET", f"/api/v1/topics/{name}/partitions/0/records?limit=1")
        assert answer.json["records"][0]["value"]["text"] == "v"
    assert [len(site.broker.topics()) for site in shards.sites] == [2, 1, 1]
    listed = shards.ask("GET", "/api/v1/topics").json
    assert [topic["name"] for topic in listed["topics"]] == ["a", "b", "c", "sp/ac e"]
    assert shards.ask("GET", "/api/v1/topics/nowhere").status == 404
    assert shards.ask("POST", "/api/v1/topics/b", {"partitions": 1}).code == "topic_exists"
    assert shards.ask("DELETE", "/api/v1/topics/b").status == 200
    assert shards.ask("GET", "/api/v1/topics/b").status == 404


def test_the_owner_of_a_topic_serves_its_groups_downloads_and_changes(shards: Shards) -> None:
    make(shards, "a", "b", "c")
    for name in ("a", "b", "c"):
        assert shards.ask("POST", f"/api/v1/topics/{name}/partitions", {"partitions": 2}).json["partitions"] == 2
        assert shards.ask("POST", f"/api/v1/topics/{name}/records", {"value": "v", "partition": 0}).status == 200
        shard = shards.shard_of(name)
        assert shard is not None
        shards.sites[shard].broker.commit_position(name, 0, PositionKind.GROUP, f"of-{name}", 0)
        found = shards.ask("GET", f"/api/v1/topics/{name}/groups").json
        assert [(row["group"], row["lag_records"]) for row in found["groups"]] == [(f"of-{name}", 1)]
        file = shards.ask("GET", f"/api/v1/topics/{name}/download?format=csv")
        assert (file.headers["x-polywire-records"], file.headers["content-type"]) == ("1", "text/csv; charset=utf-8")
        assert file.body.count(b"\r\n") == 2
    assert shards.ask("GET", "/api/v1/topics").json["can_create"] is True


def test_the_history_is_that_of_all_processes(shards: Shards) -> None:
    for site in shards.sites:
        site.process.samples = (Sample(7, 1.0, 2.0, 3.0),)
    shown = shards.ask("GET", "/api/v1/history").json
    assert shown["samples"] == [{"number": 7, "records": 3.0, "received_bytes": 6.0, "sent_bytes": 9.0}]


def test_sums_include_all_processes(shards: Shards) -> None:
    make(shards, "a", "b", "c")
    shown = shards.ask("GET", "/api/v1/overview").json
    assert (shown["topics"], shown["ready"], shown["refused"]) == (3, True, 9)
    assert shown["wires"]["kafka"]["accepted"] == 15
    assert shards.ask("GET", "/api/v1/groups").json == {"groups": [], "more": False}
    assert shards.ask("GET", "/api/v1/connections").json == {"connections": [], "more": False}
    assert shards.ask("GET", "/api/v1/settings").status == 200


def test_the_use_of_quotas_is_added_up(shards: Shards) -> None:
    for number, site in enumerate(shards.sites):
        quotas = (Quota(DEFAULT, None, produce=1e6), *((Quota(None, "only here", fetch=1.0),) if number else ()))
        site.broker.access.configure_quotas(quotas)
        meter = site.broker.access.quotas.meter("u", None, "", 0)
        assert meter is not None
        meter.received(1000 * (number + 1))
    [found] = shards.ask("GET", "/api/v1/quotas").json["quotas"]
    assert (found["user"], found["used"]) == ("*", {"produce": 6000})


def test_queues_of_all_processes_are_merged(shards: Shards) -> None:
    make(shards, "a", "b", "c")
    for topic in "cab":
        made = shards.ask("POST", f"/api/v1/topics/{topic}/queues/workers/settings", {"share.delivery.count.limit": 3})
        assert made.status == 200
    found = shards.ask("GET", "/api/v1/queues").json
    assert ([row["topic"] for row in found["queues"]], found["more"]) == (["a", "b", "c"], False)
    assert shards.ask("GET", "/api/v1/topics/b/queues/workers").json["settings"] == {"share.delivery.count.limit": "3"}
    assert shards.ask("POST", "/api/v1/topics/b/queues/workers/purge").json["records"] == 0


def test_metrics_of_all_processes_are_merged(shards: Shards) -> None:
    make(shards, "a", "b", "c")
    text = shards.ask("GET", "/metrics").body.decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert len(families) == sum(line.startswith("# TYPE") for line in text.splitlines()), "each shard is asked once"
    topics = {(s.labels["shard"], s.value) for s in families["polywire_topics"].samples}
    assert topics == {("0000", 1.0), ("0001", 1.0), ("0002", 1.0)}
    assert {s.labels["topic"] for s in families["polywire_topic_partitions"].samples} == {"a", "b", "c"}
    assert [s.value for s in families["polywire_shard_up"].samples] == [1.0, 1.0, 1.0]


def test_a_lost_process_is_reported_and_the_broker_not_ready(shards: Shards) -> None:
    make(shards, "a", "b", "c")
    assert shards.ask("GET", "/readyz").body == b"ready\n"
    shards.lost.add(1)
    assert shards.ask("GET", "/readyz").status == 503
    assert shards.ask("GET", "/livez").status == 200
    text = shards.ask("GET", "/metrics").body.decode()
    assert 'polywire_shard_up{shard="0001"} 0' in text
    assert 'polywire_topics{shard="0001"}' not in text
    assert shards.ask("GET", "/api/v1/topics/b").code == "stopping"
    assert shards.ask("GET", "/api/v1/topics").status == 503
    assert shards.ask("GET", "/api/v1/topics/a").status == 200


def test_a_silent_process_times_out(shards: Shards, monkeypatch: pytest.MonkeyPatch) -> None:
    make(shards, "a", "b")
    monkeypatch.setattr(forwarding, "RESPONSE_S", 0.01)
    monkeypatch.setattr(ForwardedHttpSession, "receive", lambda self, data: 0)
    assert shards.ask("GET", "/api/v1/topics").code == "stopping"


def test_every_process_checks_the_login(shards: Shards) -> None:
    make(shards, "a", "b")
    for site in shards.sites:
        site.configure(root=EVERYTHING)
    links = shards.links
    assert shards.ask("GET", "/api/v1/topics/b").status == 401
    assert shards.ask("GET", "/metrics").status == 401
    assert shards.links == links, "nothing is forwarded before the login"
    login = {"Authorization": "Basic cm9vdDpyb290"}
    assert shards.ask("GET", "/api/v1/topics/b", None, **login).status == 200
    assert shards.ask("GET", "/metrics", None, **login).status == 200
    assert shards.ask("HEAD", "/api/v1/topics", None, **login).body == b""


def test_a_foreign_page_reaches_no_shard(shards: Shards) -> None:
    make(shards, "a", "b")
    links = shards.links
    assert shards.ask("GET", "/api/v1/topics/b", None, Origin="https://evil.example").status == 403
    assert shards.links == links


def letter(value: str, topic: str) -> dict[str, object]:
    return {"value": value, "headers": {"dead.topic": topic, "dead.partition": "0"}}


def values(shards: Shards, topic: str) -> list[str]:
    page = shards.ask("GET", f"/api/v1/topics/{topic}/partitions/0/records").json
    return [record["value"]["text"] for record in page["records"]]


def test_letters_are_redriven_to_topics_of_every_shard(shards: Shards) -> None:
    shards.join_transactions()
    make(shards, "a", "b", "c", "x.dead", "y.dead", "z.dead")
    assert len({shards.shard_of(name) for name in ("x.dead", "y.dead", "z.dead")}) == SHARDS
    for dead in ("x.dead", "y.dead", "z.dead"):
        for topic in ("a", "b", "c"):
            shards.ask("POST", f"/api/v1/topics/{dead}/records", letter(f"{dead} {topic}", topic))
        sent = shards.ask("POST", f"/api/v1/topics/{dead}/redrive", {"topics": ["a", "b", "c"]})
        assert (sent.status, sent.json["letters"]) == (200, 3), sent.body
        assert shards.ask("POST", f"/api/v1/topics/{dead}/redrive", {"topics": ["a", "b", "c"]}).json["letters"] == 0
    for topic in ("a", "b", "c"):
        assert values(shards, topic) == [f"{dead} {topic}" for dead in ("x.dead", "y.dead", "z.dead")]


def test_a_redrive_that_one_shard_rejects_sends_nothing(shards: Shards) -> None:
    shards.join_transactions()
    make(shards, "a", "b", "c", "x.dead")
    assert shards.shard_of("x.dead") == 0
    for topic in ("a", "b", "c"):
        shards.ask("POST", "/api/v1/topics/x.dead/records", letter(topic, topic))
    shards.lost.add(2)
    assert shards.ask("POST", "/api/v1/topics/x.dead/redrive", {"topics": ["a", "b", "c"]}).status == 503
    shards.lost.clear()
    assert [values(shards, topic) for topic in ("a", "b", "c")] == [[], [], []]
    sent = shards.ask("POST", "/api/v1/topics/x.dead/redrive", {"topics": ["a", "b", "c"]})
    assert (sent.status, sent.json["letters"]) == (200, 3), sent.body
    assert [values(shards, topic) for topic in ("a", "b", "c")] == [["a"], ["b"], ["c"]]


def test_concurrent_redrives_over_shards_send_letters_once(shards: Shards) -> None:
    shards.join_transactions()
    make(shards, "a", "b", "c", "x.dead")
    for topic in ("b", "c", "a"):
        shards.ask("POST", "/api/v1/topics/x.dead/records", letter(topic, topic))
    sent = request("POST", "/api/v1/topics/x.dead/redrive", CHANGE, b'{"topics": ["a", "b", "c"]}')
    peers = [Peer(), Peer()]

    async def both() -> None:
        application = shards.asked.application
        await asyncio.gather(*(application.exchange(peer, asyncio.Event()).run(sent) for peer in peers))

    shards.asked.loop.run_until_complete(both())
    assert sorted(answer_of(bytes(peer.sent)).status for peer in peers) == [200, 409]
    assert [values(shards, topic) for topic in ("a", "b", "c")] == [["a"], ["b"], ["c"]]


def test_letters_go_only_to_topics_the_user_may_produce_to(shards: Shards) -> None:
    shards.join_transactions()
    make(shards, "a", "b", "c", "x.dead")
    for topic in ("a", "b", "c"):
        shards.ask("POST", "/api/v1/topics/x.dead/records", letter(topic, topic))
    for site in shards.sites:
        site.configure(reader=parse_grants(["consume@x", "group@x", "produce@default/a"]), root=EVERYTHING)
    body = {"topics": ["a", "b", "c"]}
    refused = shards.ask("POST", "/api/v1/topics/x.dead/redrive", body, **basic("reader", "reader"))
    assert refused.status == 403
    sent = shards.ask("POST", "/api/v1/topics/x.dead/redrive", body, **basic("root", "root"))
    assert (sent.status, sent.json["letters"]) == (200, 3), sent.body


def test_only_a_link_stages_letters(shards: Shards) -> None:
    assert shards.ask("POST", STAGING_PATH, {}).status == 404


def test_a_response_that_is_too_large_is_an_error(shards: Shards, monkeypatch: pytest.MonkeyPatch) -> None:
    make(shards, "a", "b")
    monkeypatch.setattr(forwarded, "RESPONSE_BYTES_MAX", 100)
    assert shards.ask("GET", "/api/v1/topics/b").status == 503


def test_merged_lists_have_the_limits_of_one(shards: Shards, monkeypatch: pytest.MonkeyPatch) -> None:
    make(shards, "a", "b", "c")
    monkeypatch.setattr(merging, "TOPICS_MAX", 2)
    found = shards.ask("GET", "/api/v1/topics").json
    assert ([topic["name"] for topic in found["topics"]], found["more"]) == (["a", "b"], True)


def test_labels_are_added_to_any_sample() -> None:
    text = b'# HELP x X.\n# TYPE x gauge\nx{topic="a{ b}"} 1.0\n# HELP y Y.\n# TYPE y gauge\ny 2.0\n'
    merged = merged_metrics({0: text, 2: text}, 3).splitlines()
    assert merged[:4] == [
        b"# HELP x X.",
        b"# TYPE x gauge",
        b'x{shard="0000",topic="a{ b}"} 1.0',
        b'x{shard="0002",topic="a{ b}"} 1.0',
    ]
    assert merged[6:8] == [b'y{shard="0000"} 2.0', b'y{shard="0002"} 2.0']
    assert merged[-3:] == [b'polywire_shard_up{shard="000%d"} %d' % (n, n != 1) for n in range(3)]


def test_the_iceberg_catalog_has_the_tables_of_all_processes(tmp_path: Path) -> None:
    settings = BrokerSettings(tables_url=f"file://{tmp_path}", table=TableFormat.DELTA_AND_ICEBERG)
    shards = Shards(settings)
    try:
        for number, (stream, topic) in enumerate([("sales", "b"), ("sales", "a"), ("ops", "c")]):
            shards.sites[number].broker.create_topic(TopicName(stream, topic), 1)
            metadata = tmp_path / stream / topic / "metadata"
            metadata.mkdir(parents=True)
            (metadata / "version-hint.text").write_text("1")
            (metadata / "v1.metadata.json").write_text("{}")
        get = partial(shards.asked.ask, "GET")
        assert get("/iceberg/v1/namespaces").json == {"namespaces": [["ops"], ["sales"]]}
        found = get("/iceberg/v1/namespaces/sales/tables").json["identifiers"]
        assert [table["name"] for table in found] == ["a", "b"]
        assert get("/iceberg/v1/namespaces/ops").json["namespace"] == ["ops"]
        assert get("/iceberg/v1/namespaces/nothing").status == 404
        location = f"file://{tmp_path}/ops/c/metadata/v1.metadata.json"
        assert get("/iceberg/v1/namespaces/ops/tables/c").json["metadata-location"] == location
        assert get("/iceberg/v1/namespaces/ops/tables/a").json["error"]["type"] == "NoSuchTableException"
        shards.lost.add(2)
        lost = get("/iceberg/v1/namespaces/ops/tables/c")
        assert (lost.status, lost.json["error"]["type"]) == (503, "ServiceUnavailableException")
        assert get("/iceberg/v1/namespaces/ops").status == 503
    finally:
        shards.close()
