"""A worker of a share group over the Kafka protocol (KIP-932; spec: kafka#share-groups).

* It is a member of the group, and has a share session with the leader of each partition that it reads.
* A broker responds to the requests of a connection in order. A ShareFetch that waits would delay acknowledgements, so
  requests wait at the broker only while the worker holds no records.
* Kafka acknowledges the records of a partition all or none. If one of them is rejected, halves are sent again.
* The protocol has no delays and no reasons.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from polywire.client.connection import understood
from polywire.client.kafka import FETCH_BYTES, JOINING, LEAVING, KafkaClient
from polywire.client.kafka_connection import VERSIONS, BrokerConnection, alone, check
from polywire.client.queue_calls import Acquisition
from polywire.client.record import from_stored
from polywire.errors import BrokerError, Busy, Conflict, ErrorCode, Invalid, Unavailable
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.client_batches import decode_batches
from polywire.protocols.kafka.messages import Api, WireError
from polywire.share_settings import DEAD_LETTERS, DEFAULT_SETTINGS, ORDER
from polywire.share_settings import check as check_setting
from polywire.types import Outcome

if TYPE_CHECKING:
    from polywire.protocols.kafka.message_types import (
        ApiVersionsResponse,
        IncrementalAlterConfigsResponse,
        ShareAcknowledgeResponse,
        ShareFetchResponse,
        ShareGroupHeartbeatResponse,
    )
    from polywire.protocols.polywire.messages import AcknowledgedRun

WAIT_MS_MAX: Final = 500  # the default of Kafka's clients; closing a queue waits for the last request
POLL_S: Final = 0.1  # pause between requests that do not wait at the broker
JOINING_BEAT_S: Final = 0.5  # interval of heartbeats while no partition is assigned
RETRY_MS: Final = 500  # after an error that ends by itself
LEAVE_S: Final = 2.0
ACQUIRED_MAX: Final = 100_000  # offsets of one response; brokers acquire at most ``max_records``
RECORD_LIMIT: Final = 1  # acquire mode: never more than ``max_records`` (KIP-1206)
GROUP: Final = 32  # resource type of settings
SET: Final = 0  # operation of IncrementalAlterConfigs
OURS: Final = frozenset({ORDER, DEAD_LETTERS})  # settings that Apache Kafka 4.3 does not have
_APIS: Final = (Api.SHARE_GROUP_HEARTBEAT, Api.SHARE_FETCH, Api.SHARE_ACKNOWLEDGE)
_REJOIN: Final = frozenset({WireError.UNKNOWN_MEMBER_ID, WireError.FENCED_MEMBER_EPOCH, WireError.GROUP_ID_NOT_FOUND})
_MOVED: Final = frozenset({WireError.NOT_LEADER_OR_FOLLOWER, WireError.FENCED_LEADER_EPOCH})
_UNKNOWN: Final = frozenset({WireError.UNKNOWN_TOPIC_OR_PARTITION, WireError.UNKNOWN_TOPIC_ID})

_Place = tuple[bytes, int]
"""Topic id and partition."""


class _Session:
    """The share session with one broker.

    Attributes:
        epoch: the epoch of the next request, 0 for the one that opens the session.
        wanted: the partitions to read.
        known: those that the broker knows.
    """

    __slots__ = ("connection", "epoch", "known", "wanted")

    def __init__(self, connection: BrokerConnection) -> None:
        self.connection: Final = connection
        self.epoch = 0
        self.wanted: set[_Place] = set()
        self.known: set[_Place] = set()


class KafkaWorker:
    """A worker of a share group. It joins with the first ``acquire``."""

    stores_delays: Final = False
    combines: Final = False

    def __init__(self, client: KafkaClient, *, group: str, topic: str, worker: str) -> None:
        self._client: Final = client
        self._group, self._topic, self._worker = group, topic, worker
        self._epoch = JOINING
        self._beat_s = 0.0
        self._beating: asyncio.Task[None] | None = None
        self._failure: BrokerError | None = None
        self._assigned: frozenset[_Place] = frozenset()
        self._placed: frozenset[_Place] | None = None  # the assignment for which leaders were looked up
        self._sessions: dict[BrokerConnection, _Session] = {}
        self._leaders: dict[int, tuple[_Session, bytes]] = {}  # session and topic id by partition
        self._held: set[tuple[int, int]] = set()  # partition and offset of the records under a lock
        self._lock_s = DEFAULT_SETTINGS.lock_s

    # Settings

    async def configure(self, settings: Mapping[str, str | None]) -> None:
        """Change settings of the group. See ``QueueWorker``."""
        answer: ApiVersionsResponse = await self._client.ask(Api.API_VERSIONS)
        check(answer)
        served = {entry.api_key: range(entry.min_version, entry.max_version + 1) for entry in answer.api_keys}
        if not all(VERSIONS[api] in served.get(api, ()) for api in _APIS):
            raise Invalid(ErrorCode.INVALID_REQUEST, "the broker has no queues: they need Apache Kafka 4.2 or later")
        await self._client.topic_id(self._topic)
        if not settings:
            return
        for name in OURS & settings.keys():
            check_setting(name, settings[name] or "")
        resource = schema.request(Api.INCREMENTAL_ALTER_CONFIGS).Resources
        changes = [resource.Configs(name=name, config_operation=SET, value=value) for name, value in settings.items()]
        # a Polywire broker of several processes has the settings of a queue in the process that leads the topic
        leaders = await self._client.cluster.leaders(self._topic, [0])
        altered: IncrementalAlterConfigsResponse = await self._client.cluster.ask_over(
            leaders[0],
            Api.INCREMENTAL_ALTER_CONFIGS,
            {"resources": [resource(resource_type=GROUP, resource_name=self._group, configs=changes)]},
        )
        try:
            for result in altered.responses:
                check(result)
        except Invalid as error:
            ours = sorted(OURS & settings.keys())
            if not ours:
                raise
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                f"{error.message} (only Polywire brokers have {', '.join(ours)}: connect to one, with a polywire:// or"
                " kafka:// URL)",
            ) from None

    # Membership

    async def leave(self) -> None:
        """Leave the group, so that its other workers get the partitions at once."""
        beating, self._beating = self._beating, None
        if beating is None:
            return
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        if self._failure is None:
            with suppress(BrokerError, TimeoutError):
                async with asyncio.timeout(LEAVE_S):
                    self._epoch = LEAVING
                    await self._ask_coordinator()

    async def _keep_membership(self) -> None:
        """Join the group if necessary. Raises the error that ended the membership."""
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        if self._beating is None:
            await self._beat()
            self._beating = asyncio.ensure_future(self._keep_beating())

    async def _keep_beating(self) -> None:
        while True:
            await asyncio.sleep(self._beat_s if self._assigned else min(self._beat_s, JOINING_BEAT_S))
            try:
                await self._beat()
            except Busy:
                continue
            except BrokerError as error:
                self._failure = error
                return

    async def _beat(self) -> None:
        response = await self._ask_coordinator()
        if response.error in _REJOIN and self._epoch != JOINING:
            self._epoch = JOINING
            response = await self._ask_coordinator()
        if response.error == WireError.GROUP_ID_NOT_FOUND:
            message = response.message or "a group of another kind has this name"
            raise Conflict(ErrorCode.GROUP_PROTOCOL_MISMATCH, message)
        if response.error == WireError.UNSUPPORTED_VERSION:
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                "share groups are disabled in this cluster (enable the feature share.version)",
            )
        _check(response)
        self._epoch = response.member_epoch
        self._beat_s = max(response.heartbeat_interval_ms / 1000, POLL_S)
        if response.assignment is not None:
            self._assigned = frozenset(
                (bytes(entry.topic_id), partition)
                for entry in response.assignment.topic_partitions
                for partition in entry.partitions
            )

    async def _ask_coordinator(self) -> ShareGroupHeartbeatResponse:
        response: ShareGroupHeartbeatResponse = await self._client.cluster.ask_coordinator(
            self._group,
            alone,
            Api.SHARE_GROUP_HEARTBEAT,
            group_id=self._group,
            member_id=self._worker,
            member_epoch=self._epoch,
            subscribed_topic_names=[self._topic] if self._epoch == JOINING else None,
        )
        return response

    async def _find_leaders(self) -> None:
        """Distribute the assigned partitions to the sessions with their leaders."""
        assigned = self._assigned
        if assigned == self._placed:
            return
        connections = await self._client.cluster.leaders(self._topic, {partition for _, partition in assigned})
        for session in self._sessions.values():
            session.wanted = set()
        for topic_id, partition in assigned:
            connection = connections[partition]
            session = self._sessions.setdefault(connection, _Session(connection))
            session.wanted.add((topic_id, partition))
            self._leaders[partition] = session, topic_id
        self._placed = assigned

    # Records

    async def acquire(self, *, records_max: int, wait_ms: int, runs: Sequence[AcknowledgedRun] = ()) -> Acquisition:
        """Acquire records from the first broker that has some. See ``QueueWorker``."""
        assert not runs, "it does not combine"
        while True:
            await self._keep_membership()
            await self._find_leaders()
            sessions = [session for session in self._sessions.values() if session.wanted]
            if sessions:
                break
            await asyncio.sleep(POLL_S)
        waits = len(sessions) == 1 and not self._held
        for session in sessions:
            found = await self._fetch(session, records_max, min(wait_ms, WAIT_MS_MAX) if waits else 0)
            if found.records or found.gaps:
                self._sessions[session.connection] = self._sessions.pop(session.connection)  # the last one next time
                return found
        if not waits or self._placed is None:
            await asyncio.sleep(min(wait_ms / 1000, POLL_S))
        return Acquisition(self._lock_s, [], [])

    async def _fetch(self, session: _Session, records_max: int, wait_ms: int) -> Acquisition:
        """Acquire records from one broker. Raises an error of a partition only if there are no records."""
        request = schema.request(Api.SHARE_FETCH)
        added, forgotten = session.wanted - session.known, session.known - session.wanted
        session.known = set(session.wanted)
        response: ShareFetchResponse = await self._ask(
            session,
            Api.SHARE_FETCH,
            max_wait_ms=wait_ms,
            min_bytes=1,
            max_bytes=FETCH_BYTES,
            max_records=records_max,
            batch_size=records_max,
            acquire_mode=RECORD_LIMIT,
            topics=[
                request.Topics(
                    topic_id=topic_id, partitions=[request.Topics.Partitions(index=index) for index in indexes]
                )
                for topic_id, indexes in _by_topic(added).items()
            ],
            forgotten=[
                request.Forgotten(topic_id=topic_id, partitions=indexes)
                for topic_id, indexes in _by_topic(forgotten).items()
            ],
        )
        if response.lock_timeout_ms > 0:
            self._lock_s = response.lock_timeout_ms / 1000
        acquisition = Acquisition(self._lock_s, [], [])
        errors: list[Any] = []
        for topic in response.responses:
            for entry in topic.partitions:
                if entry.error:
                    errors.append(entry)
                else:
                    self._add(entry, acquisition)
        if errors and not acquisition.records:
            await self._raise_or_look_again(errors)
        return acquisition

    async def _raise_or_look_again(self, errors: Sequence[Any]) -> None:
        """Look for the leaders again if a partition has moved, and raise any other error."""
        for entry in errors:
            if entry.error in _UNKNOWN:
                await self._client.topic_id(self._topic)  # raises if the topic is missing
            elif entry.error not in _MOVED:
                _check(entry)
        self._placed = None

    def _add(self, entry: ShareFetchResponse.Responses.Partitions, acquisition: Acquisition) -> None:
        runs = [(run.first_offset, run.last_offset, run.delivery_count) for run in entry.acquired_records]
        if not runs:
            return
        if sum(max(last - first + 1, 0) for first, last, _ in runs) > ACQUIRED_MAX:
            raise Unavailable(ErrorCode.UNREACHABLE, f"invalid response: too many acquired records runs={len(runs)}")
        stored = {record.offset: record for record in understood(decode_batches, entry.records or b"")}
        for first, last, attempt in runs:
            for offset in range(first, last + 1):
                record = stored.get(offset)
                self._held.add((entry.index, offset))
                if record is None:
                    acquisition.gaps.append((entry.index, offset))
                else:
                    acquisition.records.append((from_stored(record, self._topic, entry.index), attempt))

    # Acknowledgements

    async def acknowledge(self, runs: Sequence[AcknowledgedRun]) -> Mapping[int, BrokerError]:
        """Acknowledge acquired records. See ``QueueWorker``."""
        refused: dict[int, BrokerError] = {}
        by_session: dict[_Session, list[int]] = {}
        for index, run in enumerate(runs):
            session, _ = self._leaders.get(run.partition, (None, b""))
            if session is None or not session.epoch:
                facts = f"partition={run.partition} offset={run.first}"
                refused[index] = Conflict(ErrorCode.RECORD_NOT_ACQUIRED, f"the partition has moved {facts}")
            else:
                by_session.setdefault(session, []).append(index)
        for session, indexes in by_session.items():
            await self._send(session, indexes, runs, refused)
        for index, run in enumerate(runs):
            if run.outcome != Outcome.RENEW or index in refused:
                self._held.difference_update((run.partition, offset) for offset in range(run.first, run.last + 1))
        return refused

    async def _send(
        self,
        session: _Session,
        indexes: Sequence[int],
        runs: Sequence[AcknowledgedRun],
        refused: dict[int, BrokerError],
    ) -> None:
        made = schema.request(Api.SHARE_ACKNOWLEDGE).Topics
        by_partition: dict[int, list[int]] = {}
        topics: dict[bytes, Any] = {}
        for index in indexes:
            by_partition.setdefault(runs[index].partition, []).append(index)
        for partition, part in by_partition.items():
            batches = [
                made.Partitions.Batches(
                    first_offset=runs[index].first, last_offset=runs[index].last, types=[runs[index].outcome]
                )
                for index in part
            ]
            topic_id = self._leaders[partition][1]
            topic = topics.setdefault(topic_id, made(topic_id=topic_id, partitions=[]))
            topic.partitions.append(made.Partitions(index=partition, batches=batches))
        response: ShareAcknowledgeResponse = await self._ask(
            session,
            Api.SHARE_ACKNOWLEDGE,
            is_renew=any(runs[index].outcome == Outcome.RENEW for index in indexes),
            topics=list(topics.values()),
        )
        for entry in (entry for topic in response.responses for entry in topic.partitions):
            part = by_partition.get(entry.index, [])
            if entry.error == WireError.INVALID_RECORD_STATE and len(part) > 1:
                half = len(part) // 2
                await self._send(session, part[:half], runs, refused)
                await self._send(session, part[half:], runs, refused)
            elif entry.error:
                error = _error(entry)
                refused.update(dict.fromkeys(part, error))

    async def _ask(self, session: _Session, api: Api, **fields: Any) -> Any:
        """Send a request in a session. Raises Unavailable if the broker has ended the session."""
        epoch = session.epoch
        session.epoch = epoch + 1 if epoch < _EPOCH_MAX else 1
        answer = await self._client.cluster.ask_over(
            session.connection,
            api,
            {"group_id": self._group, "member_id": self._worker, "session_epoch": epoch, **fields},
        )
        _check(answer)
        return answer


_EPOCH_MAX: Final = 2**31 - 1


def _by_topic(places: Iterable[_Place]) -> dict[bytes, list[int]]:
    found: dict[bytes, list[int]] = {}
    for topic_id, partition in sorted(places):
        found.setdefault(topic_id, []).append(partition)
    return found


def _error(entry: Any) -> BrokerError:
    try:
        _check(entry)
    except BrokerError as error:
        return error
    raise AssertionError("the entry has an error")


def _check(entry: Any) -> None:
    """Raise the exception for an error code. If the error ends by itself, it has a time for the next attempt."""
    try:
        check(entry)
    except Busy as error:
        raise Busy(error.code, error.message, retry_after_ms=RETRY_MS) from None
