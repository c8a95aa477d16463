"""Links over HTTP."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from polywire.http.endpoints import PREFIX
from polywire.link_orders import LinkReport, LinkStart, LinkView
from tests.unit.http.site import LINK, Site
from tests.unit.http.test_guard import CHANGE

NEW = {"source": "kafka://reader:secret@new:9092", "topics": ["a", "b*"]}


def ask(site: Site, method: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, Any]:
    content = b"" if body is None else json.dumps(body).encode()
    found = site.ask(method, PREFIX + path, CHANGE, content)
    assert b"secret" not in found.body
    return found.status, json.loads(found.body)


def test_a_link_is_shown_without_its_password(site: Site) -> None:
    _, listed = ask(site, "GET", "/links")
    _, found = ask(site, "GET", "/links/old")
    for view in (listed["links"][0], found):
        assert view["user"] == "reader"
        assert (view["source"], view["state"], view["lag"], view["rate"]) == ("kafka://old:9092", "running", 2, 9.0)
    assert found["topic_reports"][0]["topic"] == "orders"


@pytest.mark.parametrize(
    ("reports", "lag", "topic_lags"),
    [
        ([], None, []),
        ([LinkReport("old")], 0, []),
        ([LinkReport("old"), LinkReport("old", "a", lag=2), LinkReport("old", "b", lag=3)], 5, [2, 3]),
        ([LinkReport("old"), LinkReport("old", "a", lag=2), LinkReport("old", "b", error="x")], None, [2, None]),
        ([LinkReport("old", error="no broker"), LinkReport("old", "a", lag=2)], None, [None]),
    ],
)
def test_a_lag_is_unknown_while_a_link_fails(
    site: Site, reports: list[LinkReport], lag: int | None, topic_lags: list[int | None]
) -> None:
    assert site.process.links is not None
    site.process.links.views["old"] = LinkView(LINK, {report.topic: report for report in reports})
    for view in (ask(site, "GET", "/links")[1]["links"][0], found := ask(site, "GET", "/links/old")[1]):
        assert view["lag"] == lag
        assert (view["lag_s"] is None) == (lag is None)
    assert [row["lag"] for row in found["topic_reports"]] == topic_lags
    metrics = site.ask("GET", "/metrics").body.decode()
    for name in ("polywire_link_lag_records", "polywire_link_lag_seconds"):
        assert metrics.count(f'{name}{{link="old"') == len([lag for lag in topic_lags if lag is not None])


def test_the_overview_names_the_links_that_fail(site: Site) -> None:
    assert ask(site, "GET", "/overview")[1]["failing_links"] == []
    assert site.process.links is not None
    site.process.links.views["old"] = LinkView(LINK, {"": LinkReport("old", error="no broker")})
    assert ask(site, "GET", "/overview")[1]["failing_links"] == ["old"]
    site.process.links = None
    assert ask(site, "GET", "/overview")[1]["failing_links"] == []


def test_the_state_of_a_link_is_that_of_its_worst_topic() -> None:
    fine, failing = LinkReport("old", "a"), LinkReport("old", "b", error="reason")
    assert LinkView(LINK, {}).state == "starting"
    assert LinkView(LINK, {"a": fine}).state == "running"
    view = LinkView(LINK, {"": LinkReport("old"), "a": fine, "b": failing})
    assert (view.state, view.error) == ("failing", "reason")


def test_a_view_is_complete_with_a_report_of_each_topic() -> None:
    whole, topic = LinkReport("old", topics=2), LinkReport("old", "a")
    assert not LinkView(LINK, {}).is_complete
    assert not LinkView(LINK, {"": LinkReport("old"), "a": topic}).is_complete
    assert not LinkView(LINK, {"": whole, "a": topic}).is_complete
    assert LinkView(LINK, {"": whole, "a": topic, "b": topic}).is_complete


def test_create_pause_resume_and_delete(site: Site) -> None:
    assert ask(site, "POST", "/links/new", {**NEW, "dry_run": True})[1]["topics"][0]["records"] == 9
    assert ask(site, "GET", "/links/new")[0] == 404
    assert ask(site, "POST", "/links/new", {**NEW, "start": "latest"})[1]["notes"] == ["no keys"]
    assert site.process.links is not None
    assert site.process.links.views["new"].link.start is LinkStart.LATEST
    assert ask(site, "POST", "/links/new/paused", {"paused": True})[1]["state"] == "paused"
    assert ask(site, "POST", "/links/new/paused", {"paused": False})[1]["state"] == "starting"
    assert ask(site, "DELETE", "/links/new")[0] == 200
    status, error = ask(site, "DELETE", "/links/new")
    assert status == 404
    assert "known=old" in error["error"]["message"]


def test_a_cut_over_and_its_end(site: Site) -> None:
    status, found = ask(site, "POST", "/links/old/cut-over", {"quiet_ms": 200})
    assert (status, found["topics"][0]["phase"], found["topics"][0]["pause_s"]) == (200, "cut-over", 0.2)
    _, found = ask(site, "POST", "/links/old/cut-over", {"reverse": True})
    assert found["topics"][0]["phase"] == "reversed"
    assert ask(site, "POST", "/links/old/fall-back", {})[1]["topics"][0]["phase"] == "following"
    assert ask(site, "POST", "/links/old/cut-over/cancel", {})[1]["topics"][0]["phase"] == "following"
    for body in (
        {"quiet_ms": -1},
        {"quiet_ms": True},
        {"quiet_ms": 10**9},
        {"topics": "a"},
        {"topics": [1]},
        {"reverse": 1},
    ):
        assert ask(site, "POST", "/links/old/cut-over", body)[0] == 400
    assert ask(site, "POST", "/links/none/cut-over", {})[0] == 404


@pytest.mark.parametrize(
    "body",
    [
        {"topics": ["a"]},
        {"source": "kafka://a:1"},
        {**NEW, "topics": "a"},
        {**NEW, "topics": [1]},
        {**NEW, "start": "middle"},
        {**NEW, "dry_run": "yes"},
    ],
)
def test_invalid_links_are_rejected(site: Site, body: Mapping[str, Any]) -> None:
    assert ask(site, "POST", "/links/new", body)[0] == 400


def test_a_process_that_starts_has_no_links(site: Site) -> None:
    site.process.links = None
    assert ask(site, "GET", "/links")[0] == 503


def test_metrics_of_links(site: Site) -> None:
    text = site.ask("GET", "/metrics").body.decode()
    assert 'polywire_link_lag_records{link="old",topic="orders"} 2.0' in text
    assert 'polywire_link_state{link="old",state="running"} 1.0' in text


def test_only_users_who_may_change_links_get_the_form(site: Site) -> None:
    assert ask(site, "GET", "/links")[1]["can_alter"] is True
    assert ask(site, "GET", "/links/old")[1]["can_alter"] is True
