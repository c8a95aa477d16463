"""Tests of queues in the admin API and the metrics."""

from __future__ import annotations

from typing import Any

import pytest

from polywire.broker.groups.share import Batch
from polywire.broker.owners import caller_of
from polywire.broker.permissions import EVERYTHING, parse_grants
from polywire.http import queues as http_queues
from polywire.http.endpoints import PREFIX
from polywire.records.columns import Header, Record
from polywire.records.rows import from_records
from polywire.share_settings import AUTO_OFFSET_RESET, DEAD_LETTERS, DELIVERIES, LOCK_DURATION, SETTINGS
from polywire.types import Level, Outcome, PositionKind, TopicName
from tests.unit.http.site import Answer, Site
from tests.unit.http.test_guard import CHANGE, basic
from tests.unit.http.test_metrics import reported

JOBS = f"{PREFIX}/topics/jobs/queues/senders"
OWN = {AUTO_OFFSET_RESET: "earliest", DEAD_LETTERS: "jobs.dead", DELIVERIES: 3}


def change(site: Site, path: str, body: Any = b"", method: str = "POST", **headers: str) -> Answer:
    return site.ask(method, path, CHANGE | headers, body)


def produce(site: Site, topic: str, count: int, partition: int = 0) -> None:
    records = [Record(b"v", None, (Header(b"dead.topic", b"jobs"),))] * count
    target = site.broker.topic(topic).partitions[partition]
    site.broker.produce(target, from_records(records), level=Level.WRITTEN, done=None)
    site.broker.commit()


def acquire(site: Site, worker: str, count: int, topic: str = "jobs", group: str = "senders") -> None:
    shares, partition = site.broker.shares, site.broker.topic(topic).partitions[0]
    first = shares.next_offset(group, partition)
    assert first is not None
    end = partition.log.next_offset
    assert shares.acquire(group, partition, worker, first, end, count_max=count, done=None)
    site.broker.commit()


def acknowledge(site: Site, worker: str, offset: int, outcome: Outcome, delay_s: float = 0.0) -> None:
    batches = [Batch(offset, offset, [outcome], delay_s)]
    partition = site.broker.topic("jobs").partitions[0]
    site.broker.shares.acknowledge("senders", partition, worker, batches, done=lambda _: None)
    site.broker.commit()


@pytest.fixture
def filled(site: Site) -> Site:
    """A queue with ten records, of which one is finished, one delayed, one rejected, and four are held."""
    for name in ("jobs", "jobs.dead"):
        site.broker.create_topic(TopicName.parse(name), 2)
    assert change(site, f"{JOBS}/settings", OWN).status == 200
    produce(site, "jobs", 8)
    produce(site, "jobs", 2, partition=1)
    acquire(site, "a", 4)
    acquire(site, "b", 3)
    acknowledge(site, "a", 0, Outcome.ACCEPT)
    acknowledge(site, "a", 1, Outcome.RELEASE, 60.0)
    acknowledge(site, "a", 2, Outcome.REJECT)
    site.loop.run_until_complete(nothing())
    return site


async def nothing() -> None:
    """Run the callbacks that are due."""


def test_queues_are_listed_with_their_depth(filled: Site) -> None:
    produce(filled, "jobs.dead", 4)
    filled.broker.commit_position("jobs.dead", 0, PositionKind.GROUP, "redrive", 2)
    answer = filled.ask("GET", f"{PREFIX}/queues").json
    [row] = answer["queues"]
    assert answer["more"] is False
    assert 0 < row.pop("waiting_s") < 60
    assert row == {
        "group": "senders",
        "topic": "jobs",
        "waiting": 3,
        "held": 4,
        "delayed": 1,
        "worker_count": 2,
        "workers": [{"worker": "b", "held": 3}, {"worker": "a", "held": 1}],
        "settings": {name: str(value) for name, value in OWN.items()},
        "dead_letters": {"topic": "jobs.dead", "waiting": 3},
        "counts": {"accepted": 1, "released": 1, "rejected": 1, "expired": 0, "lapsed": 0},
    }


def test_an_empty_queue_has_no_waiting_time(site: Site) -> None:
    site.broker.create_topic(TopicName.parse("jobs"), 1)
    change(site, f"{JOBS}/settings", {AUTO_OFFSET_RESET: "earliest"})
    [row] = site.ask("GET", f"{PREFIX}/queues").json["queues"]
    assert (row["waiting"], row["waiting_s"], row["dead_letters"]) == (0, 0, None)


def test_a_queue_is_described(filled: Site) -> None:
    found = filled.ask("GET", JOBS).json
    assert [(row["partition"], row["start"], row["waiting"], row["held"]) for row in found["partitions"]] == [
        (0, 1, 1, 4),
        (1, 0, 2, 0),
    ]
    settings = {row["name"]: row for row in found["setting_list"]}
    assert settings.keys() == SETTINGS.keys()
    assert (settings[DELIVERIES]["value"], settings[DELIVERIES]["source"]) == ("3", "group")
    assert (settings[LOCK_DURATION]["value"], settings[LOCK_DURATION]["source"]) == ("30000", "default")
    assert (found["can_alter"], found["can_purge"], found["more"]) == (True, True, False)


def test_records_that_retention_removed_do_not_wait(filled: Site) -> None:
    partition = filled.broker.topic("jobs").partitions[0]
    filled.broker.trim_partition(partition, partition.log.next_offset)
    assert filled.ask("GET", JOBS).json["partitions"][0]["waiting"] == 0


def test_settings_are_changed_one_by_one(filled: Site) -> None:
    made = change(filled, f"{JOBS}/settings", {DELIVERIES: None, LOCK_DURATION: 5000}).json
    assert made["settings"] == {AUTO_OFFSET_RESET: "earliest", DEAD_LETTERS: "jobs.dead", LOCK_DURATION: "5000"}


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({DELIVERIES: 0}, "a number from 1 to 1000"),
        ({DELIVERIES: "many"}, "a number from 1 to 1000"),
        ({DELIVERIES: 1.5}, "must be a text, a number or null"),
        ({DELIVERIES: [1]}, "must be a text, a number or null"),
        ({DEAD_LETTERS: "a b\x1b"}, "topic name"),
        ({AUTO_OFFSET_RESET: "yesterday"}, "earliest, latest or by_duration"),
        ({"share.unknown": "1"}, "no such field"),
    ],
)
def test_wrong_settings_are_rejected(filled: Site, body: Any, text: str) -> None:
    answer = change(filled, f"{JOBS}/settings", body)
    assert (answer.status, text in answer.json["error"]["message"]) == (400, True)
    [row] = filled.ask("GET", f"{PREFIX}/queues").json["queues"]
    assert row["settings"][DELIVERIES] == "3"


def test_a_purge_skips_waiting_records(filled: Site) -> None:
    assert change(filled, f"{JOBS}/purge", {"dry_run": True}).json["records"] == 4
    refused = change(filled, f"{JOBS}/purge")
    assert (refused.status, "stop them first" in refused.json["error"]["message"]) == (409, True)
    for worker in ("a", "b"):
        filled.broker.shares.release_member("senders", worker)
    filled.broker.commit()
    assert filled.ask("GET", JOBS).json["waiting"] == 7
    assert change(filled, f"{JOBS}/purge").json["records"] == 8
    found = filled.ask("GET", JOBS).json
    assert (found["waiting"], found["delayed"], found["held"]) == (0, 0, 0)
    assert len(found["setting_list"]) == len(SETTINGS)


def test_unknown_queues_are_missing_and_not_created(filled: Site) -> None:
    filled.broker.create_topic(TopicName.parse("other"), 1)
    for path in ("topics/jobs/queues/none", "topics/other/queues/senders", "topics/none/queues/senders"):
        assert filled.ask("GET", f"{PREFIX}/{path}").status == 404
        assert change(filled, f"{PREFIX}/{path}/purge").status == 404
    assert [row["topic"] for row in filled.ask("GET", f"{PREFIX}/queues").json["queues"]] == ["jobs"]


def test_users_see_queues_of_their_topics_only(filled: Site) -> None:
    grants = parse_grants(["group@default/jobs"])
    filled.configure(boss=EVERYTHING, alice=grants, bob=parse_grants(["group@elsewhere"]))
    [row] = filled.ask("GET", f"{PREFIX}/queues", basic("alice", "alice")).json["queues"]
    assert row["dead_letters"] == {"topic": "jobs.dead", "waiting": None}, "alice has no permission for that topic"
    assert filled.ask("GET", f"{PREFIX}/queues", basic("bob", "bob")).json["queues"] == []
    for method, path in (("GET", JOBS), ("POST", f"{JOBS}/settings"), ("POST", f"{JOBS}/purge")):
        assert filled.ask(method, path, CHANGE | basic("bob", "bob")).status in (403, 404)


def test_queues_of_other_users_are_hidden(site: Site) -> None:
    site.configure(alice=parse_grants(["group@default/jobs"]), bob=parse_grants(["group@default/jobs"]))
    site.broker.create_topic(TopicName.parse("jobs"), 1)
    assert change(site, f"{JOBS}/settings", {}, **basic("alice", "alice")).status == 200
    assert len(site.ask("GET", f"{PREFIX}/queues", basic("alice", "alice")).json["queues"]) == 1
    assert site.ask("GET", f"{PREFIX}/queues", basic("bob", "bob")).json["queues"] == []
    assert site.ask("GET", JOBS, basic("bob", "bob")).status == 404
    assert change(site, f"{JOBS}/settings", {DELIVERIES: 1}, **basic("bob", "bob")).status == 403
    assert change(site, f"{JOBS}/purge", **basic("bob", "bob")).status == 404


def test_lists_of_queues_are_limited(filled: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    filled.broker.create_topic(TopicName.parse("wide"), 50)
    for group in ("x", "y"):
        change(filled, f"{PREFIX}/topics/wide/queues/{group}/settings")
    monkeypatch.setattr(http_queues, "LAGS_MAX", 60)
    found = filled.ask("GET", f"{PREFIX}/queues").json
    assert ([row["topic"] for row in found["queues"]], found["more"]) == (["jobs", "wide"], True)
    assert reported(filled)["polywire_queues_left_out",] == 1
    monkeypatch.setattr(http_queues, "LISTED_MAX", 1)
    row = filled.ask("GET", f"{PREFIX}/queues").json["queues"][0]
    assert (row["worker_count"], row["workers"]) == (2, [{"worker": "b", "held": 3}])


def test_queues_have_metrics(filled: Site) -> None:
    found = reported(filled)
    at = ("jobs", "senders")
    values = [found[f"polywire_queue_{name}", *at] for name in ("waiting_records", "held_records", "delayed_records")]
    assert values == [3, 4, 1]
    assert 0 < found["polywire_queue_waiting_seconds", *at] < 60
    assert found["polywire_queue_workers", *at] == 2
    counts = [
        found["polywire_queue_records_total", *sorted([*at, outcome])]
        for outcome in ("accepted", "released", "rejected", "expired")
    ]
    assert counts == [1, 1, 1, 0]


def test_a_broker_without_queues_has_no_metrics_of_them(site: Site) -> None:
    assert not [name for name, *_ in reported(site) if name.startswith("polywire_queue")]


def test_names_in_metrics_are_escaped(filled: Site) -> None:
    topic = filled.broker.topic("jobs")
    by = caller_of(None, "127.0.0.1:5000")
    filled.broker.shares.configure("esc\x1b[31m", topic, {}, by=by, done=lambda _: None)
    text = filled.ask("GET", "/metrics").body.decode()
    assert not [letter for letter in text if letter != "\n" and not letter.isprintable()]
