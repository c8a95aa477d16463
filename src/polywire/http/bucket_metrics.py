"""What Prometheus is told of the bucket that holds the log.

Promises: nothing is asked of the bucket for it. Must not know: who asks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from polywire.http.process import BucketView

NAME: Final = "polywire_bucket"


def bucket_families(bucket: BucketView) -> Iterator[Metric]:
    """Everything of a broker that leads."""
    shard = bucket.shard
    info = GaugeMetricFamily(
        f"{NAME}_info", "The bucket that holds the log, and this broker at it.", labels=["url", "id", "node"]
    )
    info.add_metric([bucket.url, bucket.id, bucket.node], 1)
    yield info
    yield _shard("leads", "1 where the broker leads the shard, 0 where it stands by.", shard.shard, 1)
    yield _shard(
        "epoch", "Number of the start that the shard is led under; it grows with every one.", shard.shard, shard.start
    )
    yield _shard(
        "unstored_bytes", "Bytes that were written and are not in the bucket.", shard.shard, shard.unstored_bytes
    )
    yield _shard(
        "unstored_seconds", "For how long the oldest of these bytes has waited.", shard.shard, shard.unstored_s
    )
    yield _shard("journal_objects", "Objects of the journal that a start would read.", shard.shard, shard.objects)
    yield _gauge("journal_objects_max", "How many there are before segments are sealed.", bucket.objects_max)
    yield _gauge("cache_bytes", "Segments that lie in the data directory, too.", shard.cached_bytes)
    yield _gauge("cache_bytes_max", "What of them may lie there.", bucket.cached_bytes_max)
    nodes = GaugeMetricFamily(
        f"{NAME}_node", "Brokers of the bucket, each with what it does.", labels=["node", "state"]
    )
    for node in bucket.nodes:
        nodes.add_metric([node.name, node.state], 1)
    yield nodes
    changes = CounterMetricFamily(
        f"{NAME}_changes", "How often this process has begun to lead, and was made to end.", labels=["to"]
    )
    changes.add_metric(["leading"], bucket.led)
    changes.add_metric(["standing by"], bucket.deposed)
    yield changes
    yield from _request_families(bucket)


def _request_families(bucket: BucketView) -> Iterator[Metric]:
    taken = HistogramMetricFamily(
        f"{NAME}_request_seconds",
        "Time that requests to the bucket took. refused: the name was taken or the object another one; failed: no answer or an error.",
        labels=["verb", "outcome"],
    )
    for one in bucket.requests:
        taken.add_metric([one.verb, one.outcome], one.durations.cumulative(), one.durations.sum_s)
    yield taken
    moved = CounterMetricFamily(f"{NAME}_bytes", "Bytes of objects that were put and got.", labels=["direction"])
    moved.add_metric(["put"], bucket.put_bytes)
    moved.add_metric(["got"], bucket.got_bytes)
    yield moved
    charged = CounterMetricFamily(
        f"{NAME}_requests",
        "Requests as stores charge for them: a listing is one for every 1,000 names.",
        labels=["kind"],
    )
    cost = CounterMetricFamily(f"{NAME}_cost", "What they cost by the setting bucket_prices.", labels=["kind"])
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
