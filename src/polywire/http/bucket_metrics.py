"""Metrics of the bucket that holds the log. Collecting them sends no request to the bucket."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from polywire.http.process import BucketView

NAME: Final = "polywire_bucket"


def bucket_families(bucket: BucketView) -> Iterator[Metric]:
    """Yield the metrics of a leader."""
    shard = bucket.shard
    info = GaugeMetricFamily(
        f"{NAME}_info", "The bucket that holds the log, and this broker at it.", labels=["url", "id", "node"]
    )
    info.add_metric([bucket.url, bucket.id, bucket.node], 1)
    yield info
    yield _shard("leads", "1 if the broker leads the shard, 0 if it is a standby.", shard.shard, 1)
    yield _shard(
        "epoch", "Epoch of the shard's leader; it grows with every takeover or start.", shard.shard, shard.start
    )
    yield _shard(
        "unstored_bytes",
        "Bytes written that are not in the bucket yet; they are not acknowledged.",
        shard.shard,
        shard.unstored_bytes,
    )
    yield _shard("unstored_seconds", "Age of the oldest of these bytes.", shard.shard, shard.unstored_s)
    yield _shard("journal_objects", "Journal objects that a start reads.", shard.shard, shard.objects)
    yield _gauge("journal_objects_max", "Journal objects above which segments are sealed.", bucket.objects_max)
    yield _gauge("cache_bytes", "Segments cached in the data directory.", shard.cached_bytes)
    yield _gauge("cache_bytes_max", "Limit of this cache.", bucket.cached_bytes_max)
    nodes = GaugeMetricFamily(f"{NAME}_node", "Brokers of the bucket, with their state.", labels=["node", "state"])
    for node in bucket.nodes:
        nodes.add_metric([node.name, node.state], 1)
    yield nodes
    changes = CounterMetricFamily(f"{NAME}_changes", "Changes of this process to leader and to standby.", labels=["to"])
    changes.add_metric(["leading"], bucket.led)
    changes.add_metric(["standing by"], bucket.deposed)
    yield changes
    yield from _request_families(bucket)


def _request_families(bucket: BucketView) -> Iterator[Metric]:
    taken = HistogramMetricFamily(
        f"{NAME}_request_seconds",
        "Duration of requests to the bucket.",
        labels=["verb", "outcome"],
    )
    for one in bucket.requests:
        taken.add_metric([one.verb, one.outcome], one.durations.cumulative(), one.durations.sum_s)
    yield taken
    moved = CounterMetricFamily(f"{NAME}_bytes", "Bytes of objects written and read.", labels=["direction"])
    moved.add_metric(["put"], bucket.put_bytes)
    moved.add_metric(["got"], bucket.got_bytes)
    yield moved
    charged = CounterMetricFamily(
        f"{NAME}_requests",
        "Requests as stores charge for them; a listing counts once per 1,000 names.",
        labels=["kind"],
    )
    cost = CounterMetricFamily(f"{NAME}_cost", "Cost of these requests by --bucket-prices.", labels=["kind"])
    for charge in bucket.charges:
        charged.add_metric([charge.kind], charge.requests)
        if charge.cost is not None:
            cost.add_metric([charge.kind], charge.cost)
    yield charged
    if cost.samples:
        yield cost


def _gauge(name: str, text: str, value: float) -> Metric:
    family = GaugeMetricFamily(f"{NAME}_{name}", text)
    family.add_metric([], value)
    return family


def _shard(name: str, text: str, shard: str, value: float) -> Metric:
    family = GaugeMetricFamily(f"{NAME}_{name}", text, labels=["shard"])
    family.add_metric([shard], value)
    return family
