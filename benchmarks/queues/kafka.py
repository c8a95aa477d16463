"""Share groups over Kafka's protocol, for any broker (KIP-932)."""

from __future__ import annotations

import socket
import time
from base64 import urlsafe_b64encode
from contextlib import closing
from functools import partial
from struct import Struct
from typing import Any, Final

from benchmarks.peers.kafka import Kafka, KafkaWire, ask
from benchmarks.peers.ours import PolywireKafka
from benchmarks.peers.peer import ANSWER_S, Address, Frames, connect
from benchmarks.queues.peer import WAIT_MS, Step, group_of
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.client_codec import decode_response, encode_request
from polywire.protocols.kafka.messages import Api
from polywire.share_settings import AUTO_OFFSET_RESET

SETTINGS: Final = (  # for a group of 1,000 members, and their topic for the progress of groups on one broker
    "group.share.max.size=1000\ngroup.share.max.share.sessions=10000\n"
    "share.coordinator.state.topic.replication.factor=1\nshare.coordinator.state.topic.min.isr=1\n"
)
_GROUP_RESOURCE: Final = 32
_VERSION: Final = 2  # of ShareFetch and ShareAcknowledge
_METADATA_VERSION: Final = 12
_FIND_VERSION: Final = 2
_NOT_READY: Final = (14, 15, 16)  # the coordinator loads, is not available or is not known yet
_ERRORS_MAX: Final = 1_000  # the first fetches fail while Apache Kafka creates the topic for the progress of groups
_RECORD_LIMIT: Final = 1  # acquire mode in which a request gets no more than max_records
_ACCEPT: Final = [1]
_MEMBER: Final = Struct("<QQ")


class KafkaShares(KafkaWire):
    """The load generator's side of a share group."""

    confirms = True

    def create(self, address: Address, topic: str, partitions: int = 1) -> None:
        """See QueuePeer."""
        super().create(address, topic, partitions)
        request = schema.request(Api.INCREMENTAL_ALTER_CONFIGS)
        made = request.Resources.Configs(name=AUTO_OFFSET_RESET, config_operation=0, value="earliest")
        named = request.Resources(resource_type=_GROUP_RESOURCE, resource_name=group_of(topic), configs=[made])
        with closing(connect(address)) as peer:
            reported = ask(peer, Api.INCREMENTAL_ALTER_CONFIGS, 1, request(resources=[named]))
        if reported.responses[0].error:
            raise AssertionError(f"no group answer={reported!r}")

    def worker(
        self, address: Address, topic: str, number: int, *, prefetch: int, single: bool
    ) -> tuple[socket.socket, ShareWorker]:
        """See QueuePeer: it is a member of the group before it fetches."""
        peer = connect(address)
        member = urlsafe_b64encode(_MEMBER.pack(number + 1, 1)).rstrip(b"=").decode()  # Kafka demands a UUID
        request = schema.request(Api.METADATA)
        reported = ask(peer, Api.METADATA, _METADATA_VERSION, request(topics=[request.Topics(name=topic)]))
        beat = schema.request(Api.SHARE_GROUP_HEARTBEAT)(
            group_id=group_of(topic), member_id=member, member_epoch=0, subscribed_topic_names=[topic]
        )
        _ask_coordinator(peer, Api.SHARE_GROUP_HEARTBEAT, 1, beat)
        return peer, ShareWorker(topic, reported.topics[0].topic_id, member, prefetch, single=single)


def _ask_coordinator(peer: socket.socket, api: Api, version: int, body: Any) -> None:
    """Send a request until the group's coordinator is ready. Raises AssertionError if it is refused."""
    end = time.monotonic() + ANSWER_S
    while (answer := ask(peer, api, version, body)).error:
        if answer.error not in _NOT_READY or time.monotonic() > end:
            raise AssertionError(f"refused answer={answer!r}")
        found = schema.request(Api.FIND_COORDINATOR)(key=body.group_id)  # creates the topic of groups
        ask(peer, Api.FIND_COORDINATOR, _FIND_VERSION, found)
        time.sleep(0.2)


class ShareWorker:
    """Sends ShareFetch with the acknowledgements of earlier records, or ShareAcknowledge for single ones."""

    def __init__(self, topic: str, topic_id: bytes, member: str, prefetch: int, *, single: bool) -> None:
        self._topic_id: Final = topic_id
        self._key: Final[dict[str, Any]] = {"group_id": group_of(topic), "member_id": member}
        self._prefetch: Final = prefetch
        self._single: Final = single
        self._frames: Final = Frames()
        self._epoch = 0
        self._offsets: list[int] = []  # to be acknowledged
        self._api = Api.SHARE_FETCH  # of the request without a response
        self._sent = 0  # its acknowledgements
        self._errors = 0

    def begin(self) -> bytes:
        """See Worker."""
        return self._fetch([])

    def take(self, received: memoryview) -> Step:
        """See Worker."""
        done = 0
        answer = b""
        for frame in self._frames.cut(received):
            _, body = decode_response(self._api, _VERSION, frame)
            if body.error:
                raise AssertionError(f"refused answer={body!r}")
            for topic in body.responses:
                for partition in topic.partitions:
                    self._take(partition)
            done += self._sent
            if not self._single:
                answer += self._fetch(self._offsets)
                self._offsets = []
            elif self._offsets:
                answer += self._acknowledge([self._offsets.pop()])
            else:
                answer += self._fetch([])
        return Step(done, answer)

    def _take(self, partition: Any) -> None:
        fetches = self._api is Api.SHARE_FETCH
        self._errors += partition.error != 0
        refused = partition.acknowledge_error if fetches else partition.error
        if refused or self._errors > _ERRORS_MAX:
            raise AssertionError(f"refused answer={partition!r}")
        if fetches:
            for run in partition.acquired_records:
                self._offsets += range(run.first_offset, run.last_offset + 1)

    def _topics(self, made: Any, offsets: list[int]) -> list[Any]:
        if self._epoch and not offsets:
            return []  # the session knows what to read
        batches = [
            made.Topics.Partitions.Batches(first_offset=offset, last_offset=offset, types=_ACCEPT) for offset in offsets
        ]
        return [made.Topics(topic_id=self._topic_id, partitions=[made.Topics.Partitions(index=0, batches=batches)])]

    def _fetch(self, offsets: list[int]) -> bytes:
        made = schema.request(Api.SHARE_FETCH)
        body = partial(
            made,
            max_wait_ms=WAIT_MS,
            min_bytes=1,
            max_records=self._prefetch,
            batch_size=self._prefetch,
            acquire_mode=_RECORD_LIMIT,
        )
        return self._request(Api.SHARE_FETCH, body, offsets)

    def _acknowledge(self, offsets: list[int]) -> bytes:
        return self._request(Api.SHARE_ACKNOWLEDGE, schema.request(Api.SHARE_ACKNOWLEDGE), offsets)

    def _request(self, api: Api, made: Any, offsets: list[int]) -> bytes:
        topics = self._topics(schema.request(api), offsets)
        body = made(**self._key, session_epoch=self._epoch, topics=topics)
        self._api, self._sent = api, len(offsets)
        self._epoch += 1
        return encode_request(api, _VERSION, 1, body, client_id="bench")


class PolywireShares(KafkaShares, PolywireKafka):
    """Polywire. An acknowledgement that was answered survives a crash of the broker."""


class ApacheShares(KafkaShares, Kafka):
    """Apache Kafka. An acknowledgement that was answered is in the page cache of one broker, as its records are."""

    name = "Apache Kafka"

    def __init__(self) -> None:
        super().__init__(SETTINGS)
