"""A Kafka consumer of the newer group protocol: it sends what it reads and releases partitions before others get them."""

from __future__ import annotations

from typing import Any, Final

from polywire.protocols.kafka import schema
from polywire.protocols.kafka.messages import Api, WireError
from tests.sim.wires.group_ledger import GROUP, TOPIC, Membership
from tests.sim.wires.kafka_speech import FENCED, LATER, Identity, KafkaSpeech
from tests.sim.wires.speech import ACTS, GROUP_ACTS, Answer, Words

JOINING: Final = 0
LEAVING: Final = -1
REBALANCE_TIMEOUT_MS: Final = 3_600_000  # only silence removes a member that does not release its partitions


class KafkaMemberSpeech(KafkaSpeech):
    """Implements ``Speech``. Guards: ``_topic_id`` is known after the first assignment; no owned partitions are sent
    before.
    """

    words = Words("kafka", ACTS | GROUP_ACTS)

    def __init__(self, identity: Identity) -> None:
        super().__init__(identity)
        self._said: dict[int, Membership] = {}
        """Unanswered heartbeats by number."""
        self._last: Membership | None = None
        """The last assignment on this connection."""

    def _beat(self, number: int, place: Membership, epoch: int) -> bytes:
        made = schema.request(Api.CONSUMER_GROUP_HEARTBEAT).TopicPartitions
        owned = [made(topic_id=self._identity.topic_id, partitions=list(place.partitions))] if place.partitions else []
        self._said[number] = place
        return self._request(
            number,
            Api.CONSUMER_GROUP_HEARTBEAT,
            group_id=GROUP[1],
            member_id=place.name,
            member_epoch=epoch,
            rebalance_timeout_ms=REBALANCE_TIMEOUT_MS,
            subscribed_topic_names=[TOPIC],
            topic_partitions=owned,
        )

    def join(self, number: int, name: str) -> bytes:
        return self._beat(number, Membership(name, JOINING, (), holds=True), JOINING)

    def stay(self, number: int, place: Membership) -> bytes:
        return self._beat(number, place, place.generation)

    def leave(self, number: int, place: Membership) -> bytes:
        return self._beat(number, place, LEAVING)

    def move(self, number: int, place: Membership, partition: int, offset: int) -> bytes:
        topics = schema.request(Api.OFFSET_COMMIT).Topics
        one = topics(name=TOPIC, partitions=[topics.Partitions(index=partition, offset=offset)])
        member = {"generation": place.generation, "member_id": place.name}
        return self._request(number, Api.OFFSET_COMMIT, group_id=GROUP[1], topics=[one], **member)

    def _answer(self, number: int, api: Api, offset: int, body: Any) -> Answer:
        if api is not Api.CONSUMER_GROUP_HEARTBEAT:
            return super()._answer(number, api, offset, body)
        said, error = self._said.pop(number), WireError(body.error)
        if error:
            return Answer(number, error=error.name, later=error in LATER, is_fenced=error in FENCED)
        partitions = (self._last or said).partitions
        if body.assignment is not None:
            reported = {one.topic_id: tuple(one.partitions) for one in body.assignment.topic_partitions}
            self._identity.topic_id = next(iter(reported), self._identity.topic_id)
            partitions = reported.get(self._identity.topic_id, ())
        self._last = Membership(said.name, body.member_epoch, partitions, holds=True)
        return Answer(number, place=self._last)
