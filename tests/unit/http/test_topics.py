"""Tests of the endpoints for topics: creation with settings, where values come from, partitions and groups."""

from __future__ import annotations

from typing import Any

import pytest

from polywire.broker.permissions import parse_grants
from polywire.broker.settings import TOPIC_SETTINGS, BrokerSettings
from polywire.http import lag, topics
from polywire.http.endpoints import PREFIX
from polywire.types import PositionKind, TopicName
from tests.unit.http.site import Answer, Site
from tests.unit.http.test_api import get, post, store
from tests.unit.http.test_guard import CHANGE, basic


def setting(answer: Answer, name: str) -> dict[str, Any]:
    found: dict[str, Any]
    [found] = [row for row in answer.json["setting_list"] if row["name"] == name]
    return found


def test_a_topic_is_created_with_settings(site: Site) -> None:
    body = {"partitions": 2, "compaction": True, "retention_age_us": 5, "compression": "zstd", "key_hash": "xxh32"}
    assert post(site, "/topics/t", body).status == 200
    found = get(site, "/topics/t").json["settings"]
    assert (found["compaction"], found["retention_age_us"], found["compression"], found["key_hash"]) == (
        True,
        5,
        "zstd",
        "xxh32",
    )
    for wrong in ({"compactoin": True}, {"retention_age_us": -1}, {"compression": "gzip"}, {"partitions": "3"}):
        assert post(site, "/topics/u", wrong).code == "invalid_request"
    assert get(site, "/topics/u").status == 404


def test_settings_say_where_their_value_comes_from() -> None:
    site = Site(settings=BrokerSettings(retention_age_us=60_000_000))
    try:
        site.broker.create_topic(TopicName.parse("t"), 1)
        assert post(site, "/topics/t/settings", {"retention_bytes": 4096, "compaction": True}).status == 200
        answer = get(site, "/topics/t")
        assert [row["name"] for row in answer.json["setting_list"]] == list(TOPIC_SETTINGS)
        for name, value, default, source in (
            ("retention_age_us", 60_000_000, 60_000_000, "broker"),
            ("retention_bytes", 4096, 0, "topic"),
            ("compaction", True, False, "topic"),
            ("table_freshness_s", 60, 60, "default"),
            ("key_hash", None, None, "default"),
        ):
            found = setting(answer, name)
            assert (found["value"], found["default"], found["source"]) == (value, default, source), name
        assert setting(answer, "compression")["choices"] == ["none", "lz4", "zstd"]
        assert setting(answer, "key_hash")["is_fixed"] is True
        assert post(site, "/topics/t/settings", {"retention_bytes": None}).status == 200
        assert setting(get(site, "/topics/t"), "retention_bytes")["source"] == "default"
    finally:
        site.close()


def test_partitions_are_added(site: Site) -> None:
    site.broker.create_topic(TopicName.parse("t"), 2)
    assert post(site, "/topics/t/partitions", {"partitions": 5}).json == {"name": "t", "partitions": 5}
    for wrong in ({"partitions": 4}, {"partitions": True}, {}, {"partitions": 10**9}):
        assert post(site, "/topics/t/partitions", wrong).status == 400
    assert get(site, "/topics/t").json["partitions"] == 5


def test_the_groups_of_a_topic_are_listed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    for topic in ("t", "u"):
        store(site, topic, [b"v"] * 3)
    site.broker.commit_position("t", 0, PositionKind.GROUP, "stored", 1)
    site.broker.commit_position("u", 0, PositionKind.GROUP, "other", 1)
    site.broker.groups.join("joined", "t", "m", wire="flux")
    found = get(site, "/topics/t/groups").json
    assert [(row["group"], row["members"], row["lag_records"]) for row in found["groups"]] == [
        ("joined", 1, None),
        ("stored", 0, 2),
    ]
    assert found["more"] is False
    monkeypatch.setattr(lag, "GROUPS_MAX", 1)
    monkeypatch.setattr(topics, "GROUPS_MAX", 1)
    found = get(site, "/topics/t/groups").json
    assert (len(found["groups"]), found["more"]) == (1, True)


def test_the_number_of_partitions_limits_the_groups_of_a_topic(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    store(site, "t", [b"v"])
    for name in ("a", "b", "c"):
        site.broker.commit_position("t", 0, PositionKind.GROUP, name, 0)
    monkeypatch.setattr(lag, "LAGS_MAX", 5)  # of two partitions each
    found = get(site, "/topics/t/groups").json
    assert ([row["group"] for row in found["groups"]], found["more"]) == (["a", "b"], True)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["consume@shop"], {"can_consume"}),
        (["produce@shop", "group@shop"], {"can_produce", "can_see_groups"}),
        (["manage_topics@shop"], {"can_alter", "can_delete", "can_consume", "can_produce", "can_see_groups"}),
    ],
)
def test_a_topic_tells_what_its_user_may_do(site: Site, words: list[str], expected: set[str]) -> None:
    store(site, "shop.t", [b"v"])
    site.configure(may=parse_grants(words))
    login = basic("may", "may")
    found = get(site, "/topics/shop.t", **login).json
    assert {name for name, value in found.items() if name.startswith("can_") and value} == expected
    assert get(site, "/topics", **login).json["can_create"] is ("can_alter" in expected)
    status = 200 if "can_delete" in expected else 403
    assert site.ask("DELETE", f"{PREFIX}/topics/shop.t", CHANGE | login).status == status
