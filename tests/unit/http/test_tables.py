"""The state of tables in the admin API and in metrics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

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
    assert described(site) == {"formats": "delta", "freshness_s": 5}
    site.process.table_reports["orders"] = table_report("orders", error="bucket failed")
    found = described(site)
    assert (found["rows"], found["version"], found["error"]) == (100, 7, "bucket failed")
    assert found["age_s"] > 0


@pytest.mark.parametrize(("error", "failing"), [("", "0.0"), ("disk full", "1.0")])
def test_metrics_have_the_state_of_tables(site: Site, error: str, failing: str) -> None:
    assert "polywire_table" not in site.ask("GET", "/metrics").body.decode()
    site.process.table_reports["orders"] = table_report("orders", error=error, behind=12, rejected=3)
    text = site.ask("GET", "/metrics").body.decode()
    assert 'polywire_table_behind_records{topic="orders"} 12.0' in text
    assert 'polywire_table_rejected_records{topic="orders"} 3.0' in text
    assert f'polywire_table_failing{{topic="orders"}} {failing}' in text


def test_the_age_of_a_table_counts_from_when_it_had_all_records() -> None:
    report = table_report("orders", complete_ms=10_000)
    assert report.age_s(12_500_000) == 2.5
    assert table_report("orders", complete_ms=0).age_s(12_500_000) == 0
