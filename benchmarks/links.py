"""Copying a topic of Apache Kafka: a link, and MirrorMaker 2 to another Kafka and to Polywire.

Run: ``POLYWIRE_KAFKA_JAVA='directory/*' python -m benchmarks.links [--records N] [--rounds N] [--alone]``

* A topic has six partitions, and records of 100 bytes in batches of about 16 KB, as Kafka's producers send by default.
* The rate of a link is counted from its creation. That of MirrorMaker is counted from its first record at the target,
  because it takes many seconds to start.
* Processor time is that of the copier and of the target broker, without the source.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks.measure import console
from benchmarks.peers.kafka import JARS, Kafka, KafkaWire, ask
from benchmarks.peers.peer import Address, connect, find
from benchmarks.table_writing import processor_s
from polywire.cli.admin import AdminApi
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.client_batches import encode_batch
from polywire.protocols.kafka.messages import Api, Codec
from polywire.records.columns import Record
from polywire.testing.process import BrokerProcess

PARTITIONS: Final = 6
BATCH_RECORDS: Final = 140
VALUE_BYTES: Final = 100
CODECS: Final = (Codec.NONE, Codec.LZ4)
POLL_S: Final = 0.05
LIMIT_S: Final = 600.0
MIRROR: Final = """clusters=source,target
source.bootstrap.servers={source}
target.bootstrap.servers={target}
source->target.enabled=true
source->target.topics={topic}
target->source.enabled=false
replication.policy.class=org.apache.kafka.connect.mirror.IdentityReplicationPolicy
tasks.max=6
replication.factor=1
checkpoints.topic.replication.factor=1
heartbeats.topic.replication.factor=1
offset-syncs.topic.replication.factor=1
offset.storage.replication.factor=1
status.storage.replication.factor=1
config.storage.replication.factor=1
emit.heartbeats.enabled=false
emit.checkpoints.enabled=false
sync.topic.acls.enabled=false
sync.topic.configs.enabled=false
refresh.topics.enabled=false
"""


@dataclass(frozen=True, slots=True)
class Copied:
    """Records per second, and processor time per million records, in seconds."""

    rate: float
    processor_s: float


def fill(address: Address, topic: str, codec: Codec, records: int) -> int:
    """Create and fill a topic with at least that many records. Return their number."""
    KafkaWire().create(address, topic, PARTITIONS)
    values = [Record(b"%08d" % number + os.urandom(VALUE_BYTES // 2) + b"x" * 42) for number in range(BATCH_RECORDS)]
    topics = schema.request(Api.PRODUCE).Topics
    batch = encode_batch(values, codec=codec)
    count = -(-records // (PARTITIONS * BATCH_RECORDS))
    with connect(address) as peer:
        for _ in range(count):
            entries = [topics.Partitions(index=number, records=batch) for number in range(PARTITIONS)]
            body = schema.request(Api.PRODUCE)(
                acks=1, timeout_ms=30_000, topics=[topics(name=topic, partitions=entries)]
            )
            reported = ask(peer, Api.PRODUCE, 8, body)
            assert not any(one.error for one in reported.responses[0].partitions), reported
    return count * PARTITIONS * BATCH_RECORDS


def copied(address: Address, topic: str) -> int:
    """Return the sum of the end offsets of a topic over Kafka's protocol, 0 if it does not exist."""
    request = schema.request(Api.LIST_OFFSETS)
    ends = [request.Topics.Partitions(index=index, timestamp=-1) for index in range(PARTITIONS)]
    with connect(address) as peer:
        body = request(replica_id=-1, topics=[request.Topics(name=topic, partitions=ends)])
        (reported,) = ask(peer, Api.LIST_OFFSETS, 1, body).topics
    return sum(max(0, one.offset) for one in reported.partitions if not one.error)


def timed(address: Address, topic: str, records: int, pids: Callable[[], Sequence[int]], *, started: bool) -> Copied:
    """Wait for all records. ``started``: whether the time begins now, and not with the first record."""
    limit = time.monotonic() + LIMIT_S
    while not started and not copied(address, topic):
        assert time.monotonic() < limit, "nothing was copied"
        time.sleep(POLL_S)
    begun, before, first = time.monotonic(), sum(map(processor_s, pids())), copied(address, topic)
    while (found := copied(address, topic)) < records:
        assert time.monotonic() < limit, f"copied={found} records={records}"
        time.sleep(POLL_S)
    count = records - first
    used = sum(map(processor_s, pids())) - before
    return Copied(count / (time.monotonic() - begun), used / count * 1e6)


def link_rate(source: Address, topic: str, records: int) -> Copied:
    with (
        tempfile.TemporaryDirectory() as folder,
        BrokerProcess(Path(folder) / "data", wires=["kafka", "http"]) as broker,
    ):
        body = {"source": f"kafka://{source[0]}:{source[1]}", "topics": ["other"]}
        AdminApi(broker.url("http")).request("POST", "links/other", body)  # the process for links starts
        time.sleep(2.0)
        children = Path(f"/proc/{broker.pid}/task/{broker.pid}/children")

        def pids() -> Sequence[int]:
            return [broker.pid, *map(int, children.read_text().split())]

        body = {"source": f"kafka://{source[0]}:{source[1]}", "topics": [topic]}
        AdminApi(broker.url("http")).request("POST", "links/measured", body)
        return timed(broker.addresses["kafka"], topic, records, pids, started=True)


@contextmanager
def mirror(folder: Path, source: Address, target: Address, topic: str) -> Iterator[int]:
    """Run MirrorMaker 2, and yield its process id."""
    settings = folder / "mirror.properties"
    settings.write_text(
        MIRROR.format(source="{}:{}".format(*source), target="{}:{}".format(*target), topic=topic), encoding="utf-8"
    )
    java = find("java", "openjdk-17-jre-headless")
    command = [java, "-Xmx1G", "-cp", os.environ[JARS], "org.apache.kafka.connect.mirror.MirrorMaker", str(settings)]
    with (folder / "mirror.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            yield process.pid
        finally:
            process.kill()


def mirror_rate(source: Address, topic: str, records: int, *, to_polywire: bool) -> Copied:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if to_polywire:
            broker = stack.enter_context(BrokerProcess(folder / "data", wires=["kafka"]))
            address, target_pid = broker.addresses["kafka"], broker.pid
        else:
            (folder / "kafka").mkdir()
            server = stack.enter_context(Kafka().running(folder / "kafka"))
            address, target_pid = server.address, server.pid
        KafkaWire().create(address, topic, PARTITIONS)
        pid = stack.enter_context(mirror(folder, source, address, topic))
        return timed(address, topic, records, lambda: [pid, target_pid], started=False)


def main() -> None:
    """Measure, and print a table."""
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--alone", action="store_true", help="measure links only")
    given = parser.parse_args()
    print = console.print
    with tempfile.TemporaryDirectory() as folder, Kafka().running(Path(folder)) as server:
        fill(server.address, "other", Codec.NONE, 1)
        for codec in CODECS:
            topic = f"measured-{codec.name.lower()}"
            records = fill(server.address, topic, codec, given.records)
            measured = {"link": partial(link_rate, server.address, topic, records)}
            if not given.alone:
                mirrored = partial(mirror_rate, server.address, topic, records)
                measured["MirrorMaker 2 to Kafka"] = partial(mirrored, to_polywire=False)
                measured["MirrorMaker 2 to Polywire"] = partial(mirrored, to_polywire=True)
            for name, measure in measured.items():
                rounds = [measure() for _ in range(given.rounds)]
                rate, used = median(one.rate for one in rounds), median(one.processor_s for one in rounds)
                print(f"{codec.name.lower():5} {name:26} {rate:12,.0f} records/s {used:8.2f} s per million records")


if __name__ == "__main__":
    main()
