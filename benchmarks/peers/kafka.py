"""Apache Kafka: the reference broker alone on KRaft, and its protocol for any broker that speaks it."""

from __future__ import annotations

import glob
import os
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

from benchmarks.peers.peer import (
    ANSWER_S,
    Absent,
    Address,
    Frames,
    Server,
    Taken,
    connect,
    find,
    free_port,
    receive_until,
    server_process,
)
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.client_batches import encode_batch
from polywire.protocols.kafka.client_codec import decode_response, encode_request
from polywire.protocols.kafka.messages import Api
from polywire.records.columns import Record

JARS: Final = "POLYWIRE_KAFKA_JAVA"
FETCH_BYTES: Final = 1 << 20
WAIT_MS: Final = 10_000
_PRODUCE_VERSION: Final = 8
_FETCH_VERSION: Final = 4
_CREATE_VERSION: Final = 4
_LIST_VERSION: Final = 1
_PRODUCED_ERROR_AT: Final = -36  # error code of the only partition of a response without record errors, from its end
_BATCHES_AT: Final = (
    4 + 4 + 4 + 2 + 4 + 4 + 2 + 8 + 8 + 4 + 4
)  # in a response about one partition, without its topic's name
_LAST_DELTA_AT: Final = 23  # of a batch
_BATCH_HEAD: Final = struct.Struct(">qi")
_TOPIC_EXISTS: Final = 36


class KafkaWire:
    """The load generator's side of Kafka, for any broker."""

    pushes = True
    origin_time_us: int | None = None
    """The time of each record."""

    def create(self, address: Address, topic: str, partitions: int = 1) -> None:
        """See Peer."""
        request = schema.request(Api.CREATE_TOPICS)
        made = request.Topics(name=topic, num_partitions=partitions, replication_factor=1)
        body = request(topics=[made], timeout_ms=int(ANSWER_S) * 1000)
        with closing(connect(address)) as peer:
            reported = ask(peer, Api.CREATE_TOPICS, _CREATE_VERSION, body)
            if reported.topics[0].error not in (0, _TOPIC_EXISTS):
                raise AssertionError(f"no topic answer={reported!r}")
            while not _is_led(peer, topic, partitions):
                time.sleep(0.1)

    def ready(self, address: Address) -> None:
        """Raise an error if the broker cannot create a topic yet."""
        self.create(address, "ready")

    def producer(self, address: Address, topic: str) -> socket.socket:
        """See Peer."""
        return connect(address)

    def request(self, topic: str, values: Sequence[bytes], partition: int = 0) -> bytes:
        """See Peer: one batch, confirmed by the leader."""
        topics = schema.request(Api.PRODUCE).Topics
        batch = encode_batch([Record(value, origin_time_us=self.origin_time_us) for value in values])
        one = topics(name=topic, partitions=[topics.Partitions(index=partition, records=batch)])
        body = schema.request(Api.PRODUCE)(acks=1, timeout_ms=int(ANSWER_S) * 1000, topics=[one])
        return encode_request(Api.PRODUCE, _PRODUCE_VERSION, len(values), body, client_id="bench")

    def confirmations(self) -> Callable[[memoryview], int]:
        """See Peer: the correlation id of a response is the number of its records."""
        frames = Frames()

        def count(received: memoryview) -> int:
            found = 0
            for frame in frames.cut(received):
                if bytes(frame[_PRODUCED_ERROR_AT:][:2]) != b"\0\0":
                    raise AssertionError(f"refused answer={bytes(frame)!r}")
                found += int.from_bytes(frame[:4], "big")
            return found

        return count

    def follow(self, address: Address, topic: str) -> tuple[socket.socket, Fetcher]:
        """See Peer."""
        peer = connect(address)
        peer.sendall(_fetch(topic, 0))
        return peer, Fetcher(topic)


class Fetcher:
    """Sends Fetch after Fetch, each from the end of the last batch."""

    def __init__(self, topic: str) -> None:
        self._topic: Final = topic
        self._frames: Final = Frames()
        self._next = 0

    def take(self, received: memoryview) -> Taken:
        """See Follower."""
        before = self._next
        answered = False
        for frame in self._frames.cut(received):
            answered = True
            at = _BATCHES_AT + len(self._topic)
            while len(frame) - at > _LAST_DELTA_AT + 4:
                base, length = _BATCH_HEAD.unpack_from(frame, at)
                end = at + _BATCH_HEAD.size + length
                if end > len(frame):
                    break
                self._next = base + int.from_bytes(frame[at + _LAST_DELTA_AT :][:4], "big") + 1
                at = end
        return Taken(self._next - before, _fetch(self._topic, self._next) if answered else b"")


class Kafka(KafkaWire):
    """The reference broker, one process that is broker and controller."""

    name = "Apache Kafka"

    def __init__(self, settings: str = "") -> None:
        """``settings`` are further lines of the properties file."""
        self._settings: Final = settings

    @contextmanager
    def running(self, place: Path) -> Iterator[Server]:
        """See Peer: its defaults leave syncing to the system."""
        jars = os.environ.get(JARS, "")
        if not any("kafka_2" in name for name in glob.glob(jars)):
            raise Absent(
                f"set {JARS}='directory/*' to jars of org.apache.kafka:kafka_2.13 and what it depends on (Maven)"
            )
        java = find("java", "openjdk-17-jre-headless")
        port, controller = free_port(), free_port()
        settings = place / "server.properties"
        settings.write_text(
            "process.roles=broker,controller\nnode.id=1\n"
            f"controller.quorum.bootstrap.servers=127.0.0.1:{controller}\n"
            f"listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}\n"
            f"advertised.listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}\n"
            "controller.listener.names=CONTROLLER\nlistener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT\n"
            f"log.dirs={place / 'logs'}\noffsets.topic.replication.factor=1\ntransaction.state.log.replication.factor=1\n"
            "transaction.state.log.min.isr=1\ngroup.initial.rebalance.delay.ms=0\nsocket.request.max.bytes=104857600\n"
            + self._settings
        )
        run = [java, "-cp", jars]
        made = [
            *run,
            "kafka.tools.StorageTool",
            "format",
            "--standalone",
            "-t",
            "bench-bench-bench-bench",
            "-c",
            str(settings),
        ]
        done = subprocess.run(made, capture_output=True, text=True, check=False)
        if done.returncode:
            raise AssertionError(f"Kafka's storage was not made\n{done.stdout[-1000:]}{done.stderr[-1000:]}")
        heap = ["-Xms1G", "-Xmx1G", "-server", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20"]
        command = [java, *heap, *run[1:], "kafka.Kafka", str(settings)]
        with server_process(command, port, place, asked=self.ready) as server:
            yield server


def _is_led(peer: socket.socket, topic: str, partitions: int) -> bool:
    """Return whether every partition responds: leaders are elected after the topic exists."""
    request = schema.request(Api.LIST_OFFSETS)
    ends = [request.Topics.Partitions(index=index, timestamp=-1) for index in range(partitions)]
    body = request(replica_id=-1, topics=[request.Topics(name=topic, partitions=ends)])
    (reported,) = ask(peer, Api.LIST_OFFSETS, _LIST_VERSION, body).topics
    return not any(one.error for one in reported.partitions)


def ask(peer: socket.socket, api: Api, version: int, body: Any) -> Any:
    """Return the response to one request."""
    peer.sendall(encode_request(api, version, 1, body, client_id="bench"))
    answer = receive_until(peer, lambda found: any(Frames().cut(memoryview(found))))
    return decode_response(api, version, answer[4:])[1]


def _fetch(topic: str, offset: int) -> bytes:
    topics = schema.request(Api.FETCH).Topics
    partition = topics.Partitions(partition=0, fetch_offset=offset, partition_max_bytes=FETCH_BYTES)
    body = schema.request(Api.FETCH)(
        replica_id=-1,
        max_wait_ms=WAIT_MS,
        min_bytes=1,
        max_bytes=FETCH_BYTES,
        topics=[topics(topic=topic, partitions=[partition])],
    )
    return encode_request(Api.FETCH, _FETCH_VERSION, 1, body, client_id="bench")
