"""The state of tables in the admin API and in metrics."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from typing import Any

import pytest

from polywire.broker.permissions import parse_grants
from polywire.broker.settings import BrokerSettings, TableFormat, TopicSettings
from polywire.http.endpoints import PREFIX
from polywire.types import TopicName
from tests.unit.http.site import Site, table_report


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site(settings=BrokerSettings(tables_url="file:///tables"))
    yield made
    made.close()


def make(site: Site, table: TableFormat | None = TableFormat.DELTA) -> None:
    settings = TopicSettings(table=table, table_freshness_s=5)
    site.broker.create_topic(TopicName.parse("orders"), 1, settings)


def described(site: Site) -> Any:
    return site.ask("GET", f"{PREFIX}/topics/orders").json["table"]


def test_a_topic_without_a_table_has_none(site: Site) -> None:
    make(site, None)
    assert described(site) is None


def test_a_topic_shows_its_table(site: Site) -> None:
    make(site)
    url = "file:///tables/default/orders"
    assert described(site) == {"formats": "delta", "freshness_s": 5, "url": url}
    site.process.table_reports["orders"] = table_report("orders", error="bucket failed")
    found = described(site)
    assert (found["rows"], found["version"], found["error"]) == (100, 7, "bucket failed")
    assert found["age_s"] > 0


def test_the_list_of_topics_shows_tables(site: Site) -> None:
    make(site)
    site.process.table_reports["orders"] = table_report("orders", behind=3)
    (row,) = site.ask("GET", f"{PREFIX}/topics").json["topics"]
    assert (row["table"]["formats"], row["table"]["behind"]) == ("delta", 3)


def test_the_path_of_a_table_is_for_those_who_may_read_its_files(site: Site) -> None:
    make(site)
    site.configure(reader=parse_grants(["consume"]), writer=parse_grants(["produce"]))

    def url(user: str) -> Any:
        login = b64encode(f"{user}:{user}".encode()).decode()
        found = site.ask("GET", f"{PREFIX}/topics/orders", {"Authorization": f"Basic {login}"}).json
        assert found["can_alter"] is False
        return found["table"]["url"]

    assert url("reader") == "file:///tables/default/orders"
    assert url("writer") is None
    site.peer.on_loopback = False
    assert url("reader") is None


def test_settings_of_a_topic_can_be_changed(site: Site) -> None:
    make(site, None)
    change = {"X-Polywire": "1", "Content-Type": "application/json"}
    path = f"{PREFIX}/topics/orders"
    body = {"table": "delta,iceberg", "table_freshness_s": 7, "compaction": True}
    assert site.ask("GET", path).json["can_alter"] is True
    assert site.ask("POST", f"{path}/settings", change, body).status == 200
    found = site.ask("GET", path).json
    assert (found["table"]["formats"], found["table"]["freshness_s"]) == ("delta,iceberg", 7)
    assert found["settings"]["compaction"] is True
    assert site.ask("POST", f"{path}/settings", change, {"table": None, "table_freshness_s": None}).status == 200
    assert site.ask("GET", path).json["table"] is None
    rejected: list[dict[str, Any]] = [
        {"table": "csv"},
        {"table": []},
        {"table_freshness_s": 0},
        {"table_freshness_s": 1.5},
        {"other": 1},
    ]
    for wrong in rejected:
        assert site.ask("POST", f"{path}/settings", change, wrong).status == 400, wrong
    assert site.ask("POST", f"{path}/settings", change, {"key_hash": None}).status == 400, "it is fixed"
    assert site.ask("GET", path).json["settings"]["compaction"] is True


@pytest.mark.parametrize(("error", "failing"), [("", "0.0"), ("disk full", "1.0")])
def test_metrics_have_the_state_of_tables(site: Site, error: str, failing: str) -> None:
    assert "polywire_table" not in site.ask("GET", "/metrics").body.decode()
    site.process.table_reports["orders"] = table_report("orders", error=error, behind=12, rejected=3)
    text = site.ask("GET", "/metrics").body.decode()
    assert 'polywire_table_behind_records{topic="orders"} 12.0' in text
    assert 'polywire_table_rejected_records{topic="orders"} 3.0' in text
    assert f'polywire_table_failing{{topic="orders"}} {failing}' in text
    assert 'polywire_table_freshness_seconds{topic="orders"} 0.0' in text, "the topic was just deleted"
    make(site)
    assert 'polywire_table_freshness_seconds{topic="orders"} 5.0' in site.ask("GET", "/metrics").body.decode()


def test_the_age_of_a_table_counts_from_when_it_had_all_records() -> None:
    report = table_report("orders", complete_ms=10_000)
    assert report.age_s(12_500_000) == 2.5
    assert table_report("orders", complete_ms=0).age_s(12_500_000) == 0
