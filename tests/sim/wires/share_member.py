"""A member of a Kafka share group, with one request at a time: heartbeats, fetches and acknowledgements (KIP-932).

It falls silent, leaves, joins again, sends old epochs, and loses its connection with records in hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final

from polywire.protocols.kafka import schema
from polywire.protocols.kafka.messages import Api, WireError
from polywire.types import Outcome
from tests.sim.chance import Chance
from tests.sim.promises import require
from tests.sim.story import Story
from tests.sim.wires.ledger import TOPICS
from tests.sim.wires.lone_kafka_peer import LoneKafkaPeer
from tests.sim.wires.share_ledger import GROUP, SESSION_S, ShareLedger, Spot

VERSIONS: Final[Mapping[Api, int]] = {
    Api.SHARE_GROUP_HEARTBEAT: 1,
    Api.SHARE_FETCH: 1,
    Api.SHARE_ACKNOWLEDGE: 1,
}
JOINING: Final = 0
LEAVING: Final = -1
REMOVED_S: Final = SESSION_S * 1.25 + 0.01  # the broker checks four times in each session timeout
FAR: Final = 1000  # added to an epoch that the member never had
BEATS: Final = SESSION_S / 4  # interval of heartbeats
WAITS_MS: Final = (0, 0, 300, 2000)
SILENCES_S: Final = (0.5, SESSION_S, 2 * SESSION_S)
RECORDS_MAX: Final = 5
COMBINED: Final = 0.3  # share of fetches that acknowledge a record, too
OUTCOMES: Final = (Outcome.ACCEPT, Outcome.ACCEPT, Outcome.ACCEPT, Outcome.RELEASE, Outcome.REJECT)
ACTS: Final = {"fetch": 6.0, "acknowledge": 5.0, "beat": 2.0, "leave": 0.2, "silence": 0.3, "forge": 0.3, "rejoin": 0.2}


class ShareMember(LoneKafkaPeer):
    """Guards: ``_held`` are the records that it has received over this connection and not acknowledged."""

    def __init__(self, name: str, ledger: ShareLedger, now: Callable[[], float], chance: Chance, story: Story) -> None:
        super().__init__(name, VERSIONS, chance, story)
        self._ledger: Final = ledger
        self._now: Final = now
        self._epoch: int | None = None
        self._topics: Mapping[bytes, list[int]] = {}
        self._session = 0
        self._held: Final[dict[Spot, int]] = {}
        self._silent_until = 0.0
        self._beaten_at = self._heard_at = 0.0
        self._is_beating = False

    def started(self) -> None:
        """Begin again: the broker does not store members."""
        self._forget()
        self._silent_until = 0.0

    def disconnected(self) -> None:
        """Note the loss of the connection: the broker releases the records of its session."""
        if self._is_beating:
            self._ledger.lost(self.name)
        self._is_beating = False
        super().disconnected()
        self._session = 0
        self._held.clear()
        self._ledger.frees(self.name)

    def _forget(self) -> None:
        self._epoch = None
        self._topics = {}

    def _step(self) -> None:
        if self._now() < self._silent_until:
            return
        if self._epoch is None or self._now() - self._beaten_at > BEATS:
            self._beat()
            return
        act = self._chance.weighted(list(ACTS), list(ACTS.values()))
        if act == "fetch" and self._topics:
            self._fetch()
        elif act == "acknowledge" and self._held:
            self._acknowledge()
        elif act == "silence":
            self._silent_until = self._now() + self._chance.one_of(SILENCES_S)
            self._story.tell("silent", f"{self.name} until {self._silent_until}")
        elif act == "rejoin":
            self._forget()
        elif act == "forge":
            self._forge()
        elif act == "leave":
            self._leave()

    # Heartbeats

    def _send_beat(self, epoch: int, then: Callable[[float, Any], None]) -> None:
        self._is_beating = True
        self._beaten_at = self._heard_at = sent_at = self._now()

        def answered(body: Any) -> None:
            self._is_beating = False
            then(sent_at, body)

        topics = sorted(TOPICS) if epoch == JOINING else None
        fields = {"group_id": GROUP, "member_id": self.name, "member_epoch": epoch, "subscribed_topic_names": topics}
        self._ask(Api.SHARE_GROUP_HEARTBEAT, answered, **fields)

    def _beat(self) -> None:
        epoch, silent_s = self._epoch or JOINING, self._now() - self._heard_at

        def beaten(sent_at: float, body: Any) -> None:
            error = WireError(body.error)
            if error is WireError.UNKNOWN_MEMBER_ID:
                self._ledger.unknown(self.name)
                self._forget()
            elif error is WireError.FENCED_MEMBER_EPOCH:
                self._ledger.fenced(self.name)
                self._forget()
            elif error is WireError.NONE:
                was_silent = epoch != JOINING and silent_s > REMOVED_S
                require(not was_silent, "a silent member is removed", member=self.name, silent_s=silent_s)
                self._ledger.beaten(self.name, sent_at, body.member_epoch, joins=epoch == JOINING)
                self._epoch = body.member_epoch
                if body.assignment is not None:
                    self._assigned(body.assignment)

        self._send_beat(epoch, beaten)

    def _assigned(self, assignment: Any) -> None:
        found = {one.topic_id: sorted(one.partitions) for one in assignment.topic_partitions}
        expected = sorted(list(range(count)) for count in TOPICS.values())
        require(sorted(found.values()) == expected, "a member reads every partition", member=self.name, found=found)
        self._topics = found
        self._session = 0

    def _forge(self) -> None:
        """Send an epoch that this member never had."""
        was_seated = self._ledger.is_seated(self.name)

        def refused(_: float, body: Any) -> None:
            error = WireError(body.error)
            require(error is not WireError.NONE, "a wrong member epoch is refused", member=self.name)
            is_known = self._ledger.is_seated(self.name)
            if was_seated and is_known:
                require(
                    error is not WireError.UNKNOWN_MEMBER_ID, "a member that sends heartbeats stays", member=self.name
                )

        self._send_beat((self._epoch or 0) + FAR, refused)
        self._beaten_at = 0.0

    def _leave(self) -> None:
        self._ledger.leaves(self.name)
        self._send_beat(LEAVING, lambda *_: None)
        self._forget()

    # Records

    def _fetch(self) -> None:
        sent_at, topics = self._now(), schema.request(Api.SHARE_FETCH).Topics
        is_opening, requested = self._session == 0, []
        if is_opening:
            self._held.clear()  # the broker releases the records of an earlier session
            self._ledger.frees(self.name)
            requested = [
                topics(topic_id=id_, partitions=[topics.Partitions(index=index, batches=[]) for index in partitions])
                for id_, partitions in self._topics.items()
            ]
        acknowledged: Callable[[WireError], None] | None = None
        if not is_opening and self._held and self._chance.happens(COMBINED):
            topic, acknowledged = self._next_acknowledgement(topics)
            requested = [topic]
        self._ask(
            Api.SHARE_FETCH,
            partial(self._fetched, sent_at, acknowledged),
            group_id=GROUP,
            member_id=self.name,
            session_epoch=self._session,
            max_wait_ms=self._chance.one_of(WAITS_MS),
            min_bytes=1,
            max_bytes=1 << 20,
            max_records=1 + self._chance.below(RECORDS_MAX),
            batch_size=1,
            topics=requested,
            forgotten=[],
        )

    def _fetched(self, sent_at: float, acknowledged: Callable[[WireError], None] | None, body: Any) -> None:
        if not self._is_in_session(WireError(body.error)):
            return
        if acknowledged is not None:
            errors = [entry.acknowledge_error for topic in body.responses for entry in topic.partitions]
            acknowledged(WireError(max(errors)))
        for spot, count in _acquired(body):
            self._story.tell("shared", f"{self.name} {spot[1]}/{spot[2]}x{count}")
            self._ledger.delivered(self.name, spot, count, sent_at, self._is_connected)
            self._held[spot] = count

    def _is_connected(self) -> bool:
        """Return whether neither end has closed the connection; the broker does so if responses are not read."""
        link = self.link
        return link is not None and not (link.is_cut or link.is_over or link.connection.is_aborted)

    def _is_in_session(self, error: WireError) -> bool:
        """Return whether a request of the session was processed."""
        lost = error in (WireError.SHARE_SESSION_NOT_FOUND, WireError.INVALID_SHARE_SESSION_EPOCH)
        require(not lost, "a session lasts as long as its connection", member=self.name, error=error.name)
        if error is WireError.NONE:
            self._session += 1
        return error is WireError.NONE

    def _acknowledge(self) -> None:
        if not self._session:
            self._held.clear()
            return
        topic, acknowledged = self._next_acknowledgement(schema.request(Api.SHARE_ACKNOWLEDGE).Topics)

        def answered(body: Any) -> None:
            if self._is_in_session(WireError(body.error)):
                acknowledged(WireError(body.responses[0].partitions[0].error))

        self._ask(
            Api.SHARE_ACKNOWLEDGE,
            answered,
            group_id=GROUP,
            member_id=self.name,
            session_epoch=self._session,
            topics=[topic],
        )

    def _next_acknowledgement(self, topics: Any) -> tuple[Any, Callable[[WireError], None]]:
        """Choose a record and an outcome. Return the topic's part of the request, and a check of the result."""
        spot = self._chance.one_of(sorted(self._held))
        count, outcome = self._held.pop(spot), self._chance.one_of(OUTCOMES)
        was_held = self._ledger.holds(self.name, spot)
        self._ledger.frees(self.name, [spot])
        batch = topics.Partitions.Batches(first_offset=spot[2], last_offset=spot[2], types=[int(outcome)])
        partition = topics.Partitions(index=spot[1], batches=[batch])
        self._story.tell("share ack", f"{self.name} {spot[1]}/{spot[2]} {outcome.name}")
        sent_at = self._now()

        def acknowledged(error: WireError) -> None:
            is_refused = error is WireError.INVALID_RECORD_STATE
            is_prompt = self._now() == sent_at  # otherwise the lock may have ended on the way
            require(not (is_refused and was_held and is_prompt), "a lock is valid until its end", spot=spot[1:])
            if error is WireError.NONE and outcome is Outcome.ACCEPT:
                self._ledger.accepted(spot, count)

        return topics(topic_id=spot[0], partitions=[partition]), acknowledged


def _acquired(body: Any) -> Iterator[tuple[Spot, int]]:
    """Yield the records of a response with their delivery counts."""
    for topic in body.responses:
        for partition in topic.partitions:
            runs = [(run.first_offset, run.last_offset, run.delivery_count) for run in partition.acquired_records]
            yield from (
                ((topic.topic_id, partition.index, offset), count)
                for first, last, count in runs
                for offset in range(first, last + 1)
            )
