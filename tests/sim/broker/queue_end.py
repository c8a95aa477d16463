"""The end of a run with share groups: workers accept everything that is left, and every record must have ended."""

from __future__ import annotations

from typing import Final

from polywire.broker.topics import Partition, Topic
from polywire.share_settings import DEAD_LETTERS
from polywire.types import Outcome
from tests.sim.broker.process import BrokerProcess
from tests.sim.broker.queue_model import LETTERS, SeenKey
from tests.sim.broker.queue_part import DELIVERIES_MAX, LOCK_S, QUEUES, Connection, QueuePart
from tests.sim.promises import require

ROUNDS_MAX: Final = 400
IDLE_MAX: Final = 8  # rounds without a record until a queue counts as empty
WORKER: Final = "last"


class Drain:
    """Guards: no faults happen any more."""

    def __init__(self, process: BrokerProcess, part: QueuePart) -> None:
        self._process = process
        self._part = part

    def run(self) -> None:
        """Accept everything that is left. Raises Violation if a record has not ended then."""
        part, process = self._part, self._process
        if not part.queues.seen:
            return
        while part.connections:
            part.disconnect()
        part.open_letters()
        self._commit()
        part.note_time()
        due_ms = [times.due_ms or 0 for known in part.queues.times.values() for times in known.values()]
        due_ms += [later for seen in part.queues.seen.values() for later in seen.later.values()]
        ahead_ms = max(due_ms, default=0) - part.broker.clock.now_us() // 1000 + 1000
        if ahead_ms > 0:
            part.broker.clock.step(ahead_ms / 1000)  # type: ignore[attr-defined]
        part.note_time()
        self._pass_time(LOCK_S)
        connections = [part._connect(group, WORKER) for group in QUEUES if part._is_configured(group)]
        idle = rounds = 0
        while idle < IDLE_MAX:
            found = [self._take(connection, topic) for connection in connections for topic in part.broker.topics()]
            idle = 0 if any(found) else idle + 1
            rounds += 1
            require(rounds < ROUNDS_MAX, "queues become empty", rounds=rounds)
            self._pass_time(LOCK_S + 0.1)
        part.asking.notice()
        process.until(lambda: process.loop.is_idle)

    def _commit(self) -> None:
        self._part.broker.commit()
        self._process.until(lambda: self._process.loop.is_idle)

    def _pass_time(self, seconds: float) -> None:
        self._process.loop.pass_time(seconds)
        self._commit()

    def _take(self, connection: Connection, topic: Topic) -> bool:
        part = self._part
        key = {partition.incarnation: partition for partition in topic.partitions}
        is_read = [at for at in key if part.queues.of(connection.group, at).begin is not None]
        if topic.name.full == LETTERS or not is_read:
            return False
        request = part._take(connection, topic, 4, 0.0, 0)
        part.broker.commit()
        self._process.until(lambda: not request.is_open)
        for partition, offsets, _ in request.taken.values():
            held = part._holds[connection.group, partition.incarnation]
            outcomes = {at: Outcome.ACCEPT if held[at].is_record else Outcome.GAP for at in offsets}
            part._acknowledge((connection.group, partition.incarnation), WORKER, outcomes, 0.0)
        self._commit()
        return bool(request.taken)

    def check(self) -> None:
        """Check that every record has ended. All of them were read before, to learn which ones compaction removed."""
        part = self._part
        for key, seen in part.queues.seen.items():
            partition = part._living().get(key[1])
            if partition is None or seen.begin is None:
                continue
            progress = part.broker._state.shares.find(*key)
            assert progress is not None, "it has begun"
            facts = {"group": key[0], "partition": key[1]}
            left = dict(progress.counts), progress.cursor.waiting
            require(left == ({}, 0), "a queue becomes empty", **facts, unfinished=left[0], waiting=left[1])
            end = partition.log.next_offset
            require(progress.end == end, "a queue is read to its end", **facts, at=progress.end, end=end)
            self._check_records(key, partition)

    def _check_records(self, key: SeenKey, partition: Partition) -> None:
        part, group = self._part, key[0]
        seen, kept = part.queues.of(*key), part.model.partitions[key[1]]
        for at in range(max(seen.begin or 0, partition.log.first_offset), partition.log.next_offset):
            if at in kept.gone or at in seen.ended or at in seen.letters:
                continue
            is_over = part.queues.times_of(key[1], at).is_over(part.queues.latest_ms)
            is_rejected = is_over or seen.counts.get(at, 0) >= DELIVERIES_MAX
            is_ended = is_rejected and DEAD_LETTERS not in QUEUES[group]
            facts = {"group": group, "partition": key[1], "offset": at, "count": seen.counts.get(at)}
            require(is_ended, "no record is lost", **facts, times=part.queues.times_of(key[1], at))
