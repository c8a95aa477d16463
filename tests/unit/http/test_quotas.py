"""Tests of quotas in the admin API and the metrics."""

from __future__ import annotations

from typing import Any

import pytest

from polywire.broker.permissions import EVERYTHING
from polywire.http.endpoints import PREFIX
from tests.unit.http.site import Answer, Site
from tests.unit.http.test_guard import CHANGE, basic

BOSS = basic("boss", "boss")


@pytest.fixture
def closed(site: Site) -> Site:
    site.configure(boss=EVERYTHING, alice=EVERYTHING)
    return site


def ask(site: Site, method: str, body: Any = b"") -> Answer:
    return site.ask(method, f"{PREFIX}/quotas", CHANGE | BOSS, body)


def test_quotas_are_set_listed_and_removed(closed: Site) -> None:
    made = ask(closed, "POST", {"user": "alice", "produce": 1000, "requests": 5}).json
    assert made == {
        "user": "alice",
        "client_id": None,
        "produce": 1000,
        "fetch": None,
        "requests": 5,
        "configured": False,
    }
    assert ask(closed, "POST", {"user": "alice", "produce": None, "fetch": "1.5kB"}).json["fetch"] == 1500
    assert ask(closed, "POST", {"user": "alice", "fetch": 2.5}).json["fetch"] == 2.5
    assert ask(closed, "POST", {"client_id": "*", "requests": 7}).json["client_id"] == "*"
    found = ask(closed, "GET").json["quotas"]
    assert [(row["user"], row["client_id"], row["produce"], row["requests"]) for row in found] == [
        ("alice", None, None, 5),
        (None, "*", None, 7),
    ]
    text = closed.ask("GET", "/metrics", BOSS).body.decode()
    assert 'polywire_quota_per_second{client_id="",limit="fetch",user="alice"} 2.5' in text
    assert 'polywire_quota_used_total{client_id="*",limit="requests",user=""} 0.0' in text
    removed = ask(closed, "DELETE", {"user": "alice"}).json
    assert (removed["requests"], removed["removed"]) == (None, True)
    assert [row["user"] for row in ask(closed, "GET").json["quotas"]] == [None]
    assert ask(closed, "DELETE", {"user": "alice"}).json["removed"] is False


def test_the_list_has_what_was_used_of_each_limit(closed: Site) -> None:
    ask(closed, "POST", {"user": "alice", "produce": 1000, "requests": 5})
    meter = closed.broker.access.quotas.meter("alice", None, "", 0)
    assert meter is not None
    meter.received(3000)
    meter.delayed(2.0)
    [found] = ask(closed, "GET").json["quotas"]
    assert (found["used"], found["delay_s"]) == ({"produce": 3000, "requests": 0}, 2.0)


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ({"user": "alise", "produce": 5}, 404, "did you mean 'alice'"),
        ({"produce": 5}, 400, "needs a user or a client id"),
        ({"user": "alice"}, 400, "needs a limit"),
        ({"user": "alice", "produce": "fast"}, 400, "rate is invalid"),
        ({"user": "alice", "produce": []}, 400, "produce must be a number"),
        ({"user": "alice", "produce": True}, 400, "produce must be a number"),
        ({"user": "alice", "produce": 0}, 400, "from 1 to"),
        ({"user": 5, "produce": 5}, 400, "user must be a name"),
        ({"client_id": "", "produce": 5}, 400, "client_id must be a name"),
    ],
)
def test_invalid_quotas_are_rejected(closed: Site, body: Any, status: int, text: str) -> None:
    answer = ask(closed, "POST", body)
    assert (answer.status, text in answer.json["error"]["message"]) == (status, True), answer.json


def test_there_are_no_metrics_without_quotas(site: Site) -> None:
    assert "polywire_quota" not in site.ask("GET", "/metrics").body.decode()
