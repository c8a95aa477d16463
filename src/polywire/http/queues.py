"""The endpoints of the admin API for queues, which are share groups of a topic, and their depth for the metrics.

Each process lists the queues of its topics. It has their settings and locks, too.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from heapq import nsmallest
from typing import Any, Final

import msgspec

from polywire.broker.broker import Broker
from polywire.broker.groups.share_reading import ShareOffsets
from polywire.broker.owners import ITSELF, Caller
from polywire.broker.permissions import Action
from polywire.broker.topics import Partition, Topic
from polywire.errors import ErrorCode, Invalid, Missing
from polywire.http.dead_letters import waiting_letters
from polywire.http.encoding import Listing, Slices
from polywire.http.endpoints import ApiCall, Endpoint
from polywire.http.guard import completing
from polywire.http.lag import LAGS_MAX, age_of
from polywire.http.topics import PARTITIONS_MAX
from polywire.share_settings import DEAD_LETTERS, DEFAULTS, SETTINGS, spelled

QUEUES_MAX: Final = 1_000  # pairs of a group and a topic in one list
LISTED_MAX: Final = 100  # workers of one queue in a list
WORKERS_MAX: Final = 1_000  # workers of one queue


class PartitionDepth(msgspec.Struct, frozen=True):
    """The records of a queue in one partition.

    Attributes:
        start: all records below this offset are finished.
        waiting: records that a worker could acquire now.
        held: records that workers have acquired.
        delayed: records that are not due yet, or are being copied to the dead-letter topic.
        waiting_s: age of the oldest waiting record; 0 if none waits, None if it is unknown.
        next_due_ms: when the next record is due that was sent with a delay, in milliseconds since 1970, if known.
    """

    partition: int
    start: int
    next_offset: int
    waiting: int
    held: int
    delayed: int
    waiting_s: float | None
    next_due_ms: int | None = None


class Queue(msgspec.Struct):
    """A share group in one topic.

    Attributes:
        held: number of acquired records by worker; 0 for a worker that has none.
    """

    group: str
    topic: Topic
    held: Counter[str] = msgspec.field(default_factory=Counter)
    partitions: list[PartitionDepth] = []

    @property
    def waiting(self) -> int:
        return sum(depth.waiting for depth in self.partitions)

    @property
    def delayed(self) -> int:
        return sum(depth.delayed for depth in self.partitions)

    @property
    def waiting_s(self) -> float:
        return max((depth.waiting_s or 0.0 for depth in self.partitions), default=0.0)


async def queues(
    broker: Broker,
    slices: Slices,
    *,
    count_max: int = QUEUES_MAX,
    by: Caller = ITSELF,
    permits: Callable[[Topic], bool] = lambda _: True,
) -> tuple[list[Queue], bool]:
    """Return (queues of this process, sorted by topic and group; whether some were excluded).

    Because of the limit LAGS_MAX, the queues of the topics with the most partitions are excluded.
    """
    pairs: list[tuple[str, str]] = []
    for group in broker.shares.directory.names(by=by):
        pairs += [(topic, group) for topic in broker.shares.topics(group)]
        if slices.is_over:
            await slices.rest()
    topics = [(topic, group) for name, group in pairs if (topic := broker.find_topic(name)) and permits(topic)]
    chosen = nsmallest(count_max, topics, key=lambda pair: (pair[0].name.full, pair[1]))
    chosen.sort(key=lambda pair: len(pair[0].partitions))
    found, left = [], LAGS_MAX
    for topic, group in chosen:
        left -= len(topic.partitions)
        if left < 0:
            break
        found.append(await _queue(broker, topic, group, slices))
    return sorted(found, key=lambda queue: (queue.topic.name.full, queue.group)), len(found) < len(topics)


async def _queue(broker: Broker, topic: Topic, group: str, slices: Slices) -> Queue:
    queue = Queue(group, topic)
    view = broker.shares.members.view(group)
    for member in () if view is None else view.members:
        if topic.name.full in member.topics:
            queue.held[member.id] = 0
    for partition in list(topic.partitions):
        offsets = broker.shares.offsets(group, partition)
        if offsets is not None:
            queue.held.update(offsets.acquired)
            queue.partitions.append(await _depth(broker, partition, offsets))
        if slices.is_over:
            await slices.rest()
    return queue


async def _depth(broker: Broker, partition: Partition, offsets: ShareOffsets) -> PartitionDepth:
    log, held = partition.log, sum(offsets.acquired.values())
    first, end = log.first_offset, log.readable_offset
    again = offsets.unfinished - held - offsets.delayed if first < offsets.end else 0
    waiting = max(again, 0) + max(end - max(offsets.end, first), 0)
    age = await age_of(broker, partition, max(offsets.available, first)) if waiting else 0.0
    delayed = offsets.delayed + offsets.scheduled
    return PartitionDepth(partition.number, offsets.start, end, waiting, held, delayed, age, offsets.next_due_ms)


class QueueEndpoints:
    """The HTTP API's endpoints for queues."""

    def __init__(self, broker: Broker) -> None:
        self._broker: Final = broker

    def table(self) -> Sequence[Endpoint]:
        path = "/topics/{topic}/queues/{group}"
        settings = {name: f"{spelled(name)}; null for the default" for name in SETTINGS}
        return [
            Endpoint("GET", "/queues", Action.GROUP_LIST, "List queues (share groups) with their depth", self._list),
            Endpoint("GET", path, Action.GROUP_DESCRIBE, "Describe a queue", self._describe),
            Endpoint(
                "POST",
                f"{path}/settings",
                Action.GROUP_CREATE,
                "Create a queue, or change its settings; settings that are not named remain",
                self._configure,
                settings,
            ),
            Endpoint(
                "POST",
                f"{path}/purge",
                Action.OFFSET_COMMIT,
                "Skip all records that wait in a queue without workers; they remain in the topic",
                self._purge,
                {"dry_run": "true counts the records without skipping them"},
            ),
        ]

    async def _list(self, call: ApiCall) -> Any:
        broker, slices = self._broker, Slices()

        def permits(topic: Topic) -> bool:
            return broker.access.permits(call.principal, Action.GROUP_DESCRIBE, topic)

        found, more = await queues(broker, slices, by=call.caller, permits=permits)
        letters = _LetterCounts(broker, call)
        rows = await Listing(QUEUES_MAX).extend((self._row(queue, letters, LISTED_MAX) for queue in found), slices)
        return {"queues": rows.rows, "more": more or rows.more}

    def _row(self, queue: Queue, letters: _LetterCounts, workers_max: int) -> dict[str, Any]:
        name = queue.topic.name.full
        settings = self._broker.shares.directory.stored_settings(queue.group)
        dead = settings.get(DEAD_LETTERS, "")
        return {
            "group": queue.group,
            "topic": name,
            "waiting": queue.waiting,
            "held": queue.held.total(),
            "delayed": queue.delayed,
            "waiting_s": queue.waiting_s,
            "worker_count": len(queue.held),
            "workers": [{"worker": worker, "held": held} for worker, held in queue.held.most_common(workers_max)],
            "settings": dict(settings),
            "dead_letters": {"topic": dead, "waiting": letters.count(dead)} if dead else None,
            "counts": msgspec.structs.asdict(self._broker.shares.counts(queue.group, name)),
        }

    async def _describe(self, call: ApiCall) -> Any:
        broker, slices = self._broker, Slices()
        queue = await self._find(call, slices)
        stored = broker.shares.directory.stored_settings(queue.group)
        partitions = await Listing(PARTITIONS_MAX).extend(queue.partitions, slices)

        def permits(action: Action) -> bool:
            return broker.access.permits(call.principal, action, queue.topic)

        return {
            **self._row(queue, _LetterCounts(broker, call), WORKERS_MAX),
            "partitions": partitions.rows,
            "setting_list": [
                {
                    "name": name,
                    "value": stored.get(name, DEFAULTS[name]),
                    "default": DEFAULTS[name],
                    "source": "group" if name in stored else "default",
                    "meaning": setting.meaning,
                    "allowed": spelled(name),
                    "choices": setting.choices or None,
                    "is_fixed": False,
                }
                for name, setting in SETTINGS.items()
            ],
            "can_alter": permits(Action.GROUP_CREATE),
            "can_purge": permits(Action.OFFSET_COMMIT),
            "more": partitions.more,
        }

    async def _find(self, call: ApiCall, slices: Slices) -> Queue:
        """Return a queue. Raises Missing(TOPIC_MISSING, GROUP_MISSING), the latter also for another user's group."""
        shares, group = self._broker.shares, call.path["group"]
        topic = self._broker.topic(call.path["topic"])
        name = topic.name.full
        if not shares.directory.exists(group, by=call.caller) or name not in shares.topics(group):
            raise Missing(ErrorCode.GROUP_MISSING, f"no such queue group={group!r} topic={name!r}")
        return await _queue(self._broker, topic, group, slices)

    async def _configure(self, call: ApiCall) -> Any:
        topic, group = self._broker.topic(call.path["topic"]), call.path["group"]
        settings = {name: _text(name, value) for name, value in call.body.items()}
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._broker.shares.configure(group, topic, settings, by=call.caller, done=completing(done))
        await done
        stored = self._broker.shares.directory.stored_settings(group)
        return {"group": group, "topic": topic.name.full, "settings": dict(stored)}

    async def _purge(self, call: ApiCall) -> Any:
        queue = await self._find(call, Slices())
        dry_run = call.body.get("dry_run", False) is not False
        if not dry_run:
            offsets = {partition: partition.log.next_offset for partition in queue.topic.partitions}
            done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            self._broker.shares.alter_offsets(queue.group, offsets, by=call.caller, done=completing(done))
            await done
        return {
            "group": queue.group,
            "topic": queue.topic.name.full,
            "dry_run": dry_run,
            "records": queue.waiting + queue.delayed,
        }


class _LetterCounts:
    """Counts the waiting records of dead-letter topics. Each topic is counted only once."""

    def __init__(self, broker: Broker, call: ApiCall) -> None:
        self._broker: Final = broker
        self._call: Final = call
        self._counts: Final[dict[str, int | None]] = {}

    def count(self, name: str) -> int | None:
        """Return the number of letters. None if this process does not have the topic, or the user may not see it."""
        if name not in self._counts:
            topic = self._broker.find_topic(name)
            is_seen = topic is not None and self._broker.access.permits(
                self._call.principal, Action.TOPIC_DESCRIBE, topic
            )
            self._counts[name] = waiting_letters(self._broker, topic) if topic is not None and is_seen else None
        return self._counts[name]


def _text(name: str, value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    raise Invalid(ErrorCode.INVALID_REQUEST, f"{name:.80} must be a text, a number or null got={value!r:.40}")
