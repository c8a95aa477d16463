"""The page ``/metrics`` for Prometheus.

Values are collected when the page is requested, in time slices, and encoded in a thread. Metrics add no work per
record. The number of series is limited: topics beyond the limit are summed as ``(others)``.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from polywire.broker.broker import Broker
from polywire.build_info import VERSION
from polywire.escaping import escaped
from polywire.http.encoding import Slices
from polywire.http.lag import group_lags
from polywire.http.process import BucketView, Process
from polywire.http.queues import QUEUES_MAX, queues
from polywire.link_orders import LINK_STATES

NAME: Final = "polywire_bucket"
TOPICS_MAX: Final = 1_000  # topics with their own series; the others are summed
GROUPS_MAX: Final = 1_000  # pairs of a group and a topic
QUOTAS_MAX: Final = 1_000  # users and client ids with quotas
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


def bucket_families(bucket: BucketView) -> Iterator[Metric]:
    shard = bucket.shard
    info = GaugeMetricFamily(
        f"{NAME}_info", "The bucket that holds the log, and this broker's name in it.", labels=["url", "id", "node"]
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
    yield _shard(
        "unstored_seconds", "Age of the oldest bytes that are not in the bucket yet.", shard.shard, shard.unstored_s
    )
    yield _shard("journal_objects", "Journal objects that a start reads.", shard.shard, shard.objects)
    yield _gauge("bucket_journal_objects_max", "Journal objects above which segments are sealed.", bucket.objects_max)
    yield _gauge("bucket_cache_bytes", "Segments cached in the data directory.", shard.cached_bytes)
    yield _gauge(
        "bucket_cache_bytes_max", "Size limit of the segments cached in the data directory.", bucket.cached_bytes_max
    )
    nodes = GaugeMetricFamily(
        f"{NAME}_node", "Brokers that use the bucket, with their state.", labels=["node", "state"]
    )
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
    for requests in bucket.requests:
        taken.add_metric([requests.verb, requests.outcome], requests.durations.cumulative(), requests.durations.sum_s)
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
    cost = CounterMetricFamily(f"{NAME}_cost", "Cost of requests, computed with --bucket-prices.", labels=["kind"])
    for charge in bucket.charges:
        charged.add_metric([charge.kind], charge.requests)
        if charge.cost is not None:
            cost.add_metric([charge.kind], charge.cost)
    yield charged
    if cost.samples:
        yield cost


def _shard(name: str, text: str, shard: str, value: float) -> Metric:
    family = GaugeMetricFamily(f"{NAME}_{name}", text, labels=["shard"])
    family.add_metric([shard], value)
    return family


class _Families:
    """Passes metrics to ``generate_latest``, in place of a Prometheus registry."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families: Final = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


async def metrics_text(broker: Broker, process: Process) -> bytes:
    slices = Slices()
    families = [
        *_process_families(),
        *_connection_families(process),
        *_quota_families(broker),
        *await _topic_families(broker, slices),
        *await _group_families(broker, slices),
        *await _queue_families(broker, slices),
        *_log_families(broker, process),
        *_table_families(broker, process),
        *_link_families(process),
        *_query_families(process),
    ]
    bucket = process.bucket()
    if bucket is not None:
        families += bucket_families(bucket)
    return await asyncio.to_thread(generate_latest, _Families(families))


def _gauge(name: str, text: str, value: float) -> Metric:
    family = GaugeMetricFamily(f"polywire_{name}", text)
    family.add_metric([], value)
    return family


def _counter(name: str, text: str, value: float) -> Metric:
    family = CounterMetricFamily(f"polywire_{name}", text)
    family.add_metric([], value)
    return family


def _process_families() -> Iterator[Metric]:
    info = GaugeMetricFamily(
        "polywire_build_info", "Version of the broker and of Python.", labels=["version", "python"]
    )
    info.add_metric([VERSION, f"{sys.version_info.major}.{sys.version_info.minor}"], 1)
    yield info
    usage = resource.getrusage(resource.RUSAGE_SELF)
    yield _counter("process_cpu_seconds", "CPU time used.", usage.ru_utime + usage.ru_stime)
    yield _gauge(
        "process_resident_memory_bytes", "Resident memory, including mapped files.", _resident_bytes(usage.ru_maxrss)
    )
    descriptors = Path("/dev/fd")
    if descriptors.exists():
        yield _gauge("process_open_fds", "Open file descriptors.", len(os.listdir(descriptors)))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield _gauge("process_max_fds", "Limit of open file descriptors.", soft)


def _resident_bytes(highest: int) -> int:
    """Return the resident memory, or ``highest``, the maximum so far, if the system does not report it."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * _PAGE
    return highest if sys.platform == "darwin" else highest * 1024


def _connection_families(process: Process) -> Iterator[Metric]:
    connections = GaugeMetricFamily("polywire_connections", "Open connections.", labels=["wire"])
    accepted = CounterMetricFamily(
        "polywire_connections_accepted", "Connections accepted since the start.", labels=["wire"]
    )
    received = CounterMetricFamily("polywire_received_bytes", "Bytes received from clients.", labels=["wire"])
    sent = CounterMetricFamily("polywire_sent_bytes", "Bytes sent to clients.", labels=["wire"])
    for wire, traffic in sorted(process.traffic().items()):
        label = [wire or "unknown"]
        connections.add_metric(label, traffic.connections)
        accepted.add_metric(label, traffic.accepted)
        received.add_metric(label, traffic.received_bytes)
        sent.add_metric(label, traffic.sent_bytes)
    yield from (connections, accepted, received, sent)
    yield _gauge("connections_max", "Limit of open connections.", process.connections_max)
    yield _counter("connections_refused", "Connections rejected because of the limit.", process.refused)
    yield _gauge("receive_buffer_bytes", "Memory that holds incomplete requests.", process.receive_buffer_bytes)


def _quota_families(broker: Broker) -> Iterator[Metric]:
    """Yield the metrics of quotas by user and client id; none if there are no quotas."""
    labels = ["user", "client_id", "limit"]
    rates = GaugeMetricFamily("polywire_quota_per_second", "Quota in bytes or requests per second.", labels=labels)
    charged = CounterMetricFamily(
        "polywire_quota_used", "Bytes or requests that counted against a quota.", labels=labels
    )
    delayed = CounterMetricFamily(
        "polywire_quota_delay_seconds", "Time for which connections were delayed by a quota.", labels=labels
    )
    quotas = broker.access.quotas
    totals = quotas.totals()
    for quota in islice(quotas, QUOTAS_MAX):
        names = ["" if name is None else label_of(name or "*") for name in quota.entity]
        for kind, rate in quota.limits.items():
            used, seconds = totals.get((quota.entity, kind), (0.0, 0.0))
            rates.add_metric([*names, kind], rate)
            charged.add_metric([*names, kind], used)
            delayed.add_metric([*names, kind], seconds)
    if rates.samples:
        yield from (rates, charged, delayed)


async def _topic_families(broker: Broker, slices: Slices) -> list[Metric]:
    labels = ["topic"]
    partitions = GaugeMetricFamily("polywire_topic_partitions", "Partitions of a topic.", labels=labels)
    appended = CounterMetricFamily(
        "polywire_topic_records", "Records stored in a topic since it was created.", labels=labels
    )
    retained = GaugeMetricFamily(
        "polywire_topic_retained_records", "Records between the first and the next offset.", labels=labels
    )
    stored = GaugeMetricFamily("polywire_topic_stored_bytes", "Bytes of a topic on disk.", labels=labels)
    topics = broker.topics(internal=True)
    others = [0, 0, 0, 0]
    for index, topic in enumerate(topics):
        sums = [len(topic.partitions), 0, 0, 0]
        for partition in list(topic.partitions):
            log = partition.log
            sums[1] += log.next_offset
            sums[2] += log.next_offset - log.first_offset
            sums[3] += log.stored_bytes
            if slices.is_over:
                await slices.rest()
        if index < TOPICS_MAX:
            _add((partitions, appended, retained, stored), topic.name.full, sums)
        else:
            others = [a + b for a, b in zip(others, sums, strict=True)]
    if len(topics) > TOPICS_MAX:
        _add((partitions, appended, retained, stored), "(others)", others)
    return [_gauge("topics", "Topics, including internal ones.", len(topics)), partitions, appended, retained, stored]


def _add(families: Iterable[Metric], name: str, values: Iterable[float]) -> None:
    for family, value in zip(families, values, strict=True):
        assert isinstance(family, GaugeMetricFamily | CounterMetricFamily), "these metrics have a single value"
        family.add_metric([label_of(name)], value)


def label_of(name: str) -> str:
    """Return the name of a topic or group as a label, with control characters escaped.

    Labels of different names differ.
    """
    label = escaped(name.replace("\\", "\\\\"))
    return label if "\\x" in label or "\\u" in label else name


async def _group_families(broker: Broker, slices: Slices) -> list[Metric]:
    labels = ["group", "topic"]
    records = GaugeMetricFamily(
        "polywire_group_lag_records", "Records that a group has not committed yet.", labels=labels
    )
    seconds = GaugeMetricFamily(
        "polywire_group_lag_seconds", "Age of the oldest record that a group has not committed yet.", labels=labels
    )
    lags, more = await group_lags(broker, slices, count_max=GROUPS_MAX)
    for lag in lags:
        if lag.records is None or lag.seconds is None:  # a group that has not committed anything has no series
            continue
        names = [label_of(lag.group), label_of(lag.topic)]
        records.add_metric(names, lag.records)
        seconds.add_metric(names, lag.seconds)
    return [
        _gauge("groups", "Pairs of group and topic that have series.", len(lags)),
        _gauge("groups_left_out", "1 if there are more pairs of group and topic than series.", more),
        records,
        seconds,
    ]


async def _queue_families(broker: Broker, slices: Slices) -> list[Metric]:
    """Return the metrics of queues; none if there are no queues."""
    found, more = await queues(broker, slices)
    if not found and not more:
        return []
    labels = ["group", "topic"]
    gauges = [
        GaugeMetricFamily(f"polywire_queue_{name}", text, labels=labels)
        for name, text in (
            ("waiting_records", "Records of a queue that a worker could acquire now."),
            ("held_records", "Records of a queue that workers have acquired and not finished."),
            ("delayed_records", "Records of a queue that are not due yet."),
            ("waiting_seconds", "Age of the oldest record that waits in a queue."),
            ("workers", "Workers of a queue that hold records or send heartbeats."),
        )
    ]
    outcomes = CounterMetricFamily(
        "polywire_queue_records",
        "Records of a queue by outcome: accepted, released, rejected (also: delivered too often), expired (the lock), lapsed (the record).",
        labels=[*labels, "outcome"],
    )
    for queue in found:
        names = [label_of(queue.group), label_of(queue.topic.name.full)]
        held = queue.held.total()
        values = queue.waiting, held, queue.delayed, queue.waiting_s, len(queue.held)
        for family, value in zip(gauges, values, strict=True):
            family.add_metric(names, value)
        for outcome, count in msgspec.structs.asdict(broker.shares.counts(queue.group, queue.topic.name.full)).items():
            outcomes.add_metric([*names, outcome], count)
    return [
        _gauge("queues_left_out", f"1 if there are more than {QUEUES_MAX} queues, which is the limit of series.", more),
        *gauges,
        outcomes,
    ]


def _table_families(broker: Broker, process: Process) -> Iterator[Metric]:
    """Yield the metrics of tables; none if there are no tables."""
    reports = list(islice(process.tables().values(), TOPICS_MAX))
    if not reports:
        return
    families = [
        GaugeMetricFamily(f"polywire_table_{name}", text, labels=["topic"])
        for name, text in (
            ("rows", "Rows of a topic's table."),
            ("files", "Files of the newest version of a table."),
            ("bytes", "Bytes of the files of the newest version of a table."),
            ("behind_records", "Records of the topic that its table does not have yet."),
            (
                "age_seconds",
                "Time since the table had all records of the topic; 0 before it had all for the first time.",
            ),
            ("commit_seconds", "Duration of the last update of a table, with reading and writing its rows."),
            (
                "freshness_seconds",
                "Maximum seconds until a record is in the table, by the topic's settings.",
            ),
            ("failing", "1 while a table cannot be written."),
            ("skipped_records", "Records that retention removed before they were in the table."),
            ("rejected_records", "Records with values that do not fit the typed columns of the table."),
        )
    ]
    now_us = broker.clock.now_us()
    for report in reports:
        topic = broker.find_topic(report.topic)
        settings = None if topic is None else topic.table_settings(broker.settings)
        values = (
            *(report.rows, report.files, report.size, report.behind, report.age_s(now_us), report.commit_s),
            *(0 if settings is None else settings.freshness_s, bool(report.error), report.skipped, report.rejected),
        )
        _add(families, report.topic, values)
    yield from families


def _link_families(process: Process) -> Iterator[Metric]:
    """Yield the metrics of links; none if there are no links."""
    views = [] if process.links is None else process.links.all()
    if not views:
        return
    states = GaugeMetricFamily("polywire_link_state", "1 for the state that a link is in.", labels=["link", "state"])
    for view in views:
        for state in LINK_STATES:
            states.add_metric([view.link.name, state], view.state == state)
    yield states
    families = [
        GaugeMetricFamily(f"polywire_link_{name}", text, labels=["link", "topic"])
        for name, text in (
            (
                "lag_records",
                "Records of the source that are not copied yet; bytes for a source of Kafka 0.7. None while a topic fails.",
            ),
            (
                "lag_seconds",
                "Age of the newest copied record of a topic; 0 if all are copied. None while a topic fails.",
            ),
            ("rate_records", "Records per second that are being copied."),
            ("late_records", "Records that were written at the source after a cut-over. They are not copied."),
            ("copied_records", "Records copied since the process that runs links was started."),
            ("skipped_records", "Records that retention removed at the source before they were copied."),
            ("failing", "1 while a topic cannot be copied."),
        )
    ]
    reports = [(view, report) for view in views for report in view.topics()]
    for view, report in reports[:TOPICS_MAX]:
        lags = (report.lag, report.lag_s) if view.knows_lag(report) else (None, None)
        copied = report.late, report.copied, report.skipped
        for family, value in zip(families, (*lags, report.rate, *copied, bool(report.error)), strict=True):
            if value is not None:
                family.add_metric([report.link, label_of(report.topic)], value)
    yield from families


def _query_families(process: Process) -> Iterator[Metric]:
    if process.queries is None:
        return
    family = CounterMetricFamily("polywire_sql_queries", "SQL statements over HTTP, by outcome.", labels=["outcome"])
    for outcome, count in sorted(process.queries.outcomes.items()):
        family.add_metric([outcome], count)
    yield family


def _log_families(broker: Broker, process: Process) -> Iterator[Metric]:
    yield _gauge("congested", "1 while producers wait because sealing or syncing cannot keep up.", broker.congested)
    yield _counter("batches", "Batches received from clients since the start.", broker.appended)
    yield _gauge("stopping", "1 while the broker is stopping.", process.stopping)
    work = HistogramMetricFamily(
        "polywire_log_work_seconds",
        "Duration of background work of the log.",
        labels=["work"],
    )
    for name, durations in sorted(process.work().items()):
        work.add_metric([name], durations.cumulative(), durations.sum_s)
    yield work
    requests = HistogramMetricFamily(
        "polywire_request_seconds",
        "Time from receiving a request to writing its response, sampled.",
        labels=["wire", "kind"],
    )
    for labels, durations in sorted(process.requests().items()):
        requests.add_metric(labels, durations.cumulative(), durations.sum_s)
    yield requests
