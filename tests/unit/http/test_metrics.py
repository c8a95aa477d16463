"""Tests of the metrics."""

from __future__ import annotations

import time
from math import inf

import pytest
from prometheus_client.parser import text_string_to_metric_families

from polywire.durations import Durations
from polywire.http import metrics
from polywire.http.encoding import Slices
from polywire.records.columns import Record
from polywire.records.rows import from_records
from polywire.types import Level, PositionKind, TopicName
from tests.unit.http.site import Site, bucket_view


def reported(site: Site) -> dict[tuple[str, ...], float]:
    """Return values by name and labels."""
    text = site.ask("GET", "/metrics").body.decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name, *sorted(sample.labels.values())] = sample.value
    return found


def fill(site: Site, topic: str, count: int, *, partitions: int = 1) -> None:
    site.broker.create_topic(TopicName.parse(topic), partition_count=partitions)
    partition = site.broker.topic(topic).partitions[0]
    batch = from_records([Record(value=b"v")] * count)
    site.broker.produce(partition, batch, level=Level.WRITTEN, done=None)
    site.broker.commit()


def test_topics_have_metrics(site: Site) -> None:
    fill(site, "orders", 5, partitions=3)
    found = reported(site)
    assert found["polywire_topic_partitions", "orders"] == 3
    assert found["polywire_topic_records_total", "orders"] == 5
    assert found["polywire_topic_retained_records", "orders"] == 5
    assert found["polywire_batches_total",] == 1
    assert found["polywire_connections", "kafka"] == 2
    assert found["polywire_sent_bytes_total", "kafka"] == 2000
    assert found["polywire_connections_refused_total",] == 3


def test_a_partition_without_a_commit_has_no_lag(site: Site) -> None:
    fill(site, "orders", 5)
    site.broker.commit_position("orders", 0, PositionKind.GROUP, "billing", 2)
    site.broker.groups.join("audit", "orders", "m", wire="flux")
    time.sleep(0.01)
    found = reported(site)
    assert found["polywire_group_lag_records", "billing", "orders"] == 3
    assert ("polywire_group_lag_records", "audit", "orders") not in found, (
        "without a committed offset the group may have started at the end"
    )
    assert ("polywire_group_lag_seconds", "audit", "orders") not in found
    assert 0.01 <= found["polywire_group_lag_seconds", "billing", "orders"] < 60
    site.broker.commit_position("orders", 0, PositionKind.GROUP, "billing", 5)
    found = reported(site)
    assert found["polywire_group_lag_records", "billing", "orders"] == 0
    assert found["polywire_group_lag_seconds", "billing", "orders"] == 0


def test_series_have_limits_and_the_rest_is_summed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "TOPICS_MAX", 2)
    monkeypatch.setattr(metrics, "GROUPS_MAX", 2)
    for number in range(5):
        fill(site, f"t{number}", 2)
        site.broker.commit_position(f"t{number}", 0, PositionKind.GROUP, "g", 0)
    found = reported(site)
    assert sorted(labels for name, *labels in found if name == "polywire_topic_records_total") == [
        ["(others)"],
        ["t0"],
        ["t1"],
    ]
    assert found["polywire_topic_records_total", "(others)"] == 6
    assert found["polywire_topics",] == 5
    assert len([name for name, *_ in found if name == "polywire_group_lag_records"]) == 2
    assert found["polywire_groups_left_out",] == 1


def test_wide_metrics_are_collected_in_slices(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(site, "wide", 1, partitions=50)
    monkeypatch.setattr("polywire.http.encoding.SLICE_S", -1.0)
    rests = []
    slices = Slices()
    rest = slices.rest

    async def counted() -> None:
        rests.append(1)
        await rest()

    monkeypatch.setattr(slices, "rest", counted)
    site.loop.run_until_complete(metrics._topic_families(site.broker, slices))
    assert len(rests) == 50


def test_names_do_not_break_a_line(site: Site) -> None:
    name = 'a"b\\c'
    fill(site, name, 1)
    assert reported(site)["polywire_topic_records_total", name] == 1


def test_a_broker_with_a_bucket_has_its_metrics(site: Site) -> None:
    assert not [name for name, *_ in reported(site) if name.startswith("polywire_bucket_")]
    site.process.view = bucket_view()
    found = reported(site)
    name = "polywire_bucket"
    assert found[f"{name}_leads", "0000"] == 1
    assert found[f"{name}_epoch", "0000"] == 3
    assert found[f"{name}_unstored_bytes", "0000"] == 4096
    assert found[f"{name}_unstored_seconds", "0000"] == 0.25
    assert found[f"{name}_journal_objects", "0000"] == 9
    assert found[f"{name}_node", "standby", "two"] == 1
    assert found[f"{name}_changes_total", "leading"] == 2
    assert found[f"{name}_request_seconds_count", "create", "done"] == 2
    assert found[f"{name}_request_seconds_count", "failed", "read"] == 1
    assert found[f"{name}_bytes_total", "put"] == 5000
    assert found[f"{name}_requests_total", "put"] == 2000
    assert found[f"{name}_cost_total", "put"] == pytest.approx(0.01)


def test_without_prices_there_is_no_cost(site: Site) -> None:
    site.process.view = bucket_view(priced=False)
    names = {name for name, *_ in reported(site)}
    assert "polywire_bucket_requests_total" in names
    assert "polywire_bucket_cost_total" not in names


def test_quantiles_are_upper_bounds() -> None:
    durations = Durations((0.1, 1.0))
    assert durations.quantile(0.99) == 0.0
    for seconds in (0.05, 0.06, 0.5):
        durations.observe(seconds)
    assert (durations.quantile(0.5), durations.quantile(0.99)) == (0.1, 1.0)
    durations.observe(2.0, count=9)
    assert durations.quantile(0.99) == inf


def test_durations_are_cumulative() -> None:
    durations = Durations()
    for seconds in (0.0001, 0.004, 0.005, 99.0):
        durations.observe(seconds)
    counts = dict(durations.cumulative())
    assert (counts["0.0005"], counts["0.002"], counts["0.005"], counts["10.0"], counts["+Inf"]) == (1, 1, 3, 3, 4)
    assert durations.sum_s == pytest.approx(99.0091)
