"""List the records of dead-letter queues, and send them to their original topics again (redrive).

A dead letter is a record that a pipeline could not process. Its headers contain the reason, and its original topic and
partition. A redrive produces the record to them again.

* A redrive sends the letters and commits the offset of its consumer group in one transaction, so no letter is lost or
  sent twice, even after a crash.
* The original topics may belong to several processes. The process that has the dead letters coordinates the transaction
  (decision 0129). It adds each other process as a participant, which stages the letters for its topics and applies the
  commit or abort. Letters reach other processes as HTTP requests.
* Any producer can write the headers of a letter. Therefore, letters are sent only to topics that the request names and
  to which the user may produce.
* A redrive reads a limited number of bytes, including headers, but always at least one letter.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final
from zlib import crc32

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from polywire.broker.broker import Broker
from polywire.broker.changes import TransactionalProducer
from polywire.broker.owners import ITSELF
from polywire.broker.participants import Joined
from polywire.broker.permissions import Action
from polywire.broker.topics import Partition, Topic
from polywire.broker.transaction_state import INTERNAL, Scope, Transaction
from polywire.errors import BrokerError, Busy, Conflict, ErrorCode, Invalid, Missing
from polywire.http.encoding import Slices
from polywire.http.endpoints import ApiCall, Endpoint, partition_of
from polywire.http.errors import raise_error
from polywire.http.guard import PRINCIPAL, completing
from polywire.http.records import READERS_MAX, ReadLimit, RecordReader, Taken
from polywire.http.shard_requests import request_bytes, send_to_shard
from polywire.protocols.runtime.forwarded import Forwarding
from polywire.records.batch import merge
from polywire.records.columns import text_of
from polywire.records.rows import Rows
from polywire.types import PositionKind

GROUP: Final = "redrive"  # the group whose committed offsets in a topic of dead letters show which letters were sent
STAGING_PATH: Final = "/link/letters"
TIMEOUT_US: Final = 120_000_000  # after this time the transaction is aborted; twice the time limit of staging
_OWNER_BITS: Final = 2**64 - 1  # makes the number of an owner, which may be negative, unsigned
# attempts to find a transactional id that this process coordinates; a few are normally enough
ID_TRIES_MAX: Final = 1_000
# how long a response waits until other processes have applied the commit; they apply it in any case
APPLIED_S: Final = 5.0
LETTERS_MAX: Final = 1_000  # records of one redrive
LETTERS_BYTES_MAX: Final = 2 * 1024 * 1024  # bytes of one redrive, headers included; at least one record is always sent
TARGETS_MAX: Final = 100  # topics named in one request
TARGET_BYTES_MAX: Final = 511  # length of a topic's name; a longer header is ignored
_PREFIX: Final = b"dead."
_DIGITS_MAX: Final = 9


class Letter(msgspec.Struct, frozen=True, array_like=True):
    """A dead letter (a record that could not be processed) to send back to its topic.

    Attributes:
        topic: its original topic.
        partition: its original partition; None if unknown.
        batch: a batch that contains only this record.
    """

    topic: str
    partition: int | None
    batch: bytes


class RemoteLetters(msgspec.Struct, frozen=True, array_like=True):
    """Dead letters for topics of another process, and the transaction that it joins to store them."""

    id: str
    coordinator: int
    token: bytes
    epoch: int
    producer: TransactionalProducer
    owner: int
    letters: list[Letter]


class Redrive:
    """Sends dead letters to their original topics."""

    def __init__(self, broker: Broker, router: Forwarding | None) -> None:
        self._broker: Final = broker
        self._router: Final = router
        self._shards: Final = None if router is None else router.shards
        self._round_robin = 0  # number of letters without a known partition, to distribute them

    async def send(
        self,
        topic: Topic,
        letters: Sequence[Letter],
        *,
        begins: Mapping[int, int | None],
        ends: Mapping[int, int],
        call: ApiCall,
    ) -> None:
        """Send dead letters and commit the offsets in their topic, or do neither.

        Args:
            topic: the topic of dead letters.
            letters: the letters to send.
            begins: committed offset of each partition when the letters were read.
            ends: offset to commit for each partition.
            call: the request.

        Raises BrokerError if nothing was sent.
        """
        transactions = self._broker.transactions
        local, remote = self._by_shard(letters, call)
        id_ = self._id(topic, call)
        if self._broker.participants.is_deciding(id_) and not await self._wait_until_applied(id_):
            raise Busy(
                ErrorCode.BUSY, "another process has not finished the previous redrive (retry)", retry_after_ms=1_000
            )
        made = transactions.number_producer(
            id_, asks_again=False, timeout_us=TIMEOUT_US, is_internal=True, by=call.caller, done=None
        )
        transaction = transactions.begin(made, done=None)
        epoch = transaction.epoch
        try:
            if remote:
                await self._stage_remote(transaction, remote, call)
                self._check_current(transaction)
            for partition, batch, letter_count in self._batches(local):
                transactions.stage(transaction, partition, batch, first=0, last=letter_count - 1, done=None)
            self._check_positions(topic, begins)
            if ends:
                transactions.put_offsets(transaction, Scope(topic.name.full, GROUP), ends, by=call.caller, done=None)
            done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            transactions.commit(transaction, by=call.caller, done=completing(done))
            await done
            if remote:
                await self._wait_until_applied(id_)
        finally:
            found = transactions.find(id_, by=ITSELF)
            if found is not None and found.epoch == epoch:  # if not, a later redrive uses the id
                with suppress(BrokerError):  # if it cannot be deleted now, it will expire
                    transactions.delete(id_, by=call.caller)

    def _check_current(self, transaction: Transaction) -> None:
        found = self._broker.transactions.find(transaction.id, by=ITSELF)
        if found is not transaction or not transaction.is_open:
            raise Conflict(ErrorCode.PRODUCER_FENCED, "another redrive of these dead letters is in progress")

    def _check_positions(self, topic: Topic, begins: Mapping[int, int | None]) -> None:
        """Raise Conflict(VERSION_CONFLICT) if a committed offset is not the one in ``begins`` any more."""
        before = self._broker.positions_in(topic.name.full, PositionKind.GROUP, GROUP, latest=True)
        if any(before.get(number) != begin for number, begin in begins.items()):
            raise Conflict(ErrorCode.VERSION_CONFLICT, "another redrive has already sent these dead letters")

    def _id(self, topic: Topic, call: ApiCall) -> str:
        """Return the transactional id for sending a user's dead letters of a topic.

        The id is chosen so that this process is its coordinator.
        """
        first = f"{INTERNAL}redrive-{call.caller.owner & _OWNER_BITS:x}-{crc32(topic.name.full.encode()):08x}"
        shards = self._shards
        if shards is None:
            return first
        names = (f"{first}-{number}" for number in range(ID_TRIES_MAX))
        return next((name for name in names if shards.shard_by_hash(name) == shards.own), first)

    def _by_shard(self, letters: Iterable[Letter], call: ApiCall) -> tuple[list[Letter], dict[int, list[Letter]]]:
        """Return the dead letters for topics of this process, and those for topics of each other process.

        Raises Missing(TOPIC_MISSING), and Denied if the user may not produce to a topic.
        """
        broker, shards = self._broker, self._shards
        local: list[Letter] = []
        remote: dict[int, list[Letter]] = {}
        for letter in letters:
            broker.access.authorize(call.principal, Action.PRODUCE, broker.resource(letter.topic))
            shard = None if shards is None or broker.find_topic(letter.topic) else shards.shard_of(letter.topic)
            if shards is None or shard is None or shard == shards.own:
                broker.topic(letter.topic)
                local.append(letter)
            else:
                remote.setdefault(shard, []).append(letter)
        return local, remote

    def _batches(self, letters: Iterable[Letter]) -> list[tuple[Partition, bytearray, int]]:
        """Return one batch for each target partition, with the number of its letters.

        Raises Missing(TOPIC_MISSING) if a topic was deleted.
        """
        found: dict[Partition, list[bytes]] = {}
        for letter in letters:
            partitions, number = self._broker.topic(letter.topic).written_to(), letter.partition
            if number is None or number >= len(partitions):
                self._round_robin += 1
                number = self._round_robin % len(partitions)
            found.setdefault(partitions[number], []).append(letter.batch)
        return [(partition, merge(batches), len(batches)) for partition, batches in found.items()]

    # Other processes

    async def _stage_remote(
        self, transaction: Transaction, remote: Mapping[int, Sequence[Letter]], call: ApiCall
    ) -> None:
        """Add other processes to the transaction, and send them the dead letters for their topics.

        Raises BrokerError if one of them cannot store its letters.
        """
        router, producer = self._router, transaction.producer
        assert router is not None, "only with several processes"
        assert producer is not None, "set by number_producer"
        joined: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._broker.participants.join(transaction, list(remote), done=completing(joined))
        await joined
        for shard, letters in remote.items():
            part = RemoteLetters(
                transaction.id,
                router.shards.own,
                transaction.token,
                transaction.epoch,
                producer,
                transaction.owner,
                list(letters),
            )
            body = msgspec.msgpack.encode(part)
            raise_error(await send_to_shard(router, shard, request_bytes(STAGING_PATH, call.authorization, body)))

    async def _wait_until_applied(self, id_: str) -> bool:
        """Wait until other processes have applied the commit, so that consumers find the letters.

        Returns False if that takes longer than APPLIED_S.
        """
        applied = asyncio.Event()
        cancel = self._broker.participants.when_settled(id_, applied.set)
        with suppress(TimeoutError):
            await asyncio.wait_for(applied.wait(), APPLIED_S)
        cancel()
        return applied.is_set()

    async def stage(self, request: Request) -> Response:
        """Store dead letters that another process sends, as part of its transaction.

        Raises BrokerError if that fails.
        """
        part = msgspec.msgpack.decode(await request.body(), type=RemoteLetters)
        broker, principal = self._broker, request.scope[PRINCIPAL]
        for name in {letter.topic for letter in part.letters}:
            broker.access.authorize(principal, Action.PRODUCE, broker.resource(name))
        batches = self._batches(part.letters)
        participant = broker.participants.enter(
            Joined(part.id, part.coordinator, part.token, part.epoch, part.producer, part.owner)
        )
        staged = []
        for partition, batch, letter_count in batches:
            done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            broker.transactions.stage(
                participant, partition, batch, first=0, last=letter_count - 1, done=completing(done)
            )
            staged.append(done)
        await asyncio.gather(*staged)
        return Response(b"{}", media_type="application/json")


@dataclass(slots=True)
class Letters:
    """Dead letters read for a request to send them back.

    Attributes:
        collects: whether to collect the letters in ``found``, or only to count them.
        found: the letters.
        count: number of letters.
        targets: number of letters by original topic.
        others: number of records that are not dead letters.
        begins: committed offset of each partition that was read.
        ends: offset after the last record that was read, by partition.
        waiting: number of records after the committed offsets.
        more: whether some of the waiting records were not read.
        size: bytes that were read.
    """

    collects: bool
    found: list[Letter] = field(default_factory=list)
    count: int = 0
    targets: Counter[str] = field(default_factory=Counter)
    others: int = 0
    begins: dict[int, int | None] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)
    waiting: int = 0
    more: bool = False
    size: int = 0

    @property
    def is_full(self) -> bool:
        return self.count + self.others >= LETTERS_MAX or self.size >= LETTERS_BYTES_MAX

    def take(self, rows: Rows, index: int) -> Taken:
        """Count or collect a record. Implements ``records.Take``."""
        size = rows.size(index)
        if self.size and self.size + size > LETTERS_BYTES_MAX:
            self.size = LETTERS_BYTES_MAX
            return Taken.LEFT
        self.size += size
        target = letter_header(rows, index, b"topic")
        if not target or len(target.encode()) > TARGET_BYTES_MAX:
            self.others += 1
        else:
            self.count += 1
            self.targets[target] += 1
            if self.collects:
                batch = rows.copy(index, without=_PREFIX, has_origin_time=True)
                self.found.append(Letter(target, _number(letter_header(rows, index, b"partition")), bytes(batch)))
        return Taken.LAST if self.is_full else Taken.MORE


class DeadLetters:
    """The HTTP API's endpoints for dead letters."""

    def __init__(self, broker: Broker, reader: RecordReader, redrive: Redrive) -> None:
        self._broker: Final = broker
        self._reader: Final = reader
        # each redrive holds up to the size of the largest batch in memory
        self._redrives: Final = asyncio.Semaphore(READERS_MAX)
        self._redrive: Final = redrive

    def table(self) -> Sequence[Endpoint]:
        fields = {
            "topics": "list of topics that records may return to",
            "partition": "with offset: redrive only this record; no offset is committed",
            "offset": "offset of that record",
        }
        topic_path = "/topics/{topic}"
        return [
            Endpoint("GET", f"{topic_path}/dead-letters", Action.FETCH, "Preview a redrive", self._preview),
            Endpoint(
                "POST",
                f"{topic_path}/redrive",
                Action.FETCH,
                f"Redrive at most {LETTERS_MAX} dead letters; also needs produce for their topics",
                self._send,
                fields,
                also=Action.OFFSET_COMMIT,
            ),
        ]

    async def _preview(self, call: ApiCall) -> Any:
        topic = self._broker.topic(call.path["topic"])
        return _redrive_json(topic, await self._waiting(topic, Letters(collects=False)))

    async def _send(self, call: ApiCall) -> Any:
        topic, targets = self._broker.topic(call.path["topic"]), _targets(call)
        async with self._redrives:
            if "offset" in call.body:
                letters = await self._one(topic, call.body.get("partition", 0), call.body["offset"])
            else:
                letters = await self._waiting(topic, Letters(collects=True))
            others = sorted(letters.targets.keys() - targets)
            if others:
                raise Invalid(
                    ErrorCode.INVALID_REQUEST,
                    f"dead letters belong to topics that the request does not name (add them to its topics) topics={others[:10]}",
                )
            if letters.ends or letters.found:
                await self._redrive.send(topic, letters.found, begins=letters.begins, ends=letters.ends, call=call)
        return _redrive_json(topic, letters)

    async def _waiting(self, topic: Topic, letters: Letters) -> Letters:
        slices, limit = Slices(), ReadLimit()
        committed = self._broker.positions_in(topic.name.full, PositionKind.GROUP, GROUP, latest=True)
        for partition in list(topic.partitions):
            log = partition.log
            begin, end = max(committed.get(partition.number, 0), log.first_offset), log.readable_offset
            letters.waiting += max(0, end - begin)
            if begin < end and not letters.is_full and limit.left > 0:
                letters.begins[partition.number] = committed.get(partition.number)
                begin = letters.ends[partition.number] = await self._reader.each(
                    partition, begin, letters.take, limit=limit
                )
            letters.more |= begin < end
            if slices.is_over:
                await slices.rest()
        return letters

    async def _one(self, topic: Topic, number: Any, offset: Any) -> Letters:
        """Read one dead letter without committing an offset.

        Raises Invalid(INVALID_REQUEST) for an invalid offset, and Missing if the record does not exist or is not a dead
        letter.
        """
        letters = Letters(collects=True)
        await self._reader.read_one(partition_of(topic, number), offset, letters.take)
        if not letters.count:
            raise Missing(
                ErrorCode.OFFSET_OUT_OF_RANGE, f"the record is not a dead letter partition={number} offset={offset}"
            )
        return letters


def waiting_letters(broker: Broker, topic: Topic) -> int:
    """Return the number of records of a dead-letter topic that no redrive has sent yet."""
    committed = broker.positions_in(topic.name.full, PositionKind.GROUP, GROUP)
    logs = ((partition.log, committed.get(partition.number, 0)) for partition in topic.partitions)
    return sum(max(log.readable_offset - max(position, log.first_offset), 0) for log, position in logs)


def letter_header(rows: Rows, index: int, name: bytes) -> str | None:
    """Return the value of the header ``dead.NAME`` of a dead letter, None if there is none.

    A letter that failed twice has two such headers; the last one counts.
    """
    header = rows.last_header(index, _PREFIX + name)
    return None if header is None else text_of(header.value, header.value_kind)


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX else None


def _targets(call: ApiCall) -> set[str]:
    """Return the topics that the request names. Raises Invalid(INVALID_REQUEST) for an invalid list."""
    names = call.body.get("topics", [])
    if not isinstance(names, list) or len(names) > TARGETS_MAX or not all(isinstance(name, str) for name in names):
        raise Invalid(ErrorCode.INVALID_REQUEST, f"topics must be a list of at most {TARGETS_MAX} names")
    return set(names)


def _redrive_json(topic: Topic, letters: Letters) -> Mapping[str, Any]:
    return {
        "topic": topic.name.full,
        "waiting": letters.waiting,
        "letters": letters.count,
        "others": letters.others,
        "more": letters.more,
        "targets": [{"topic": name, "letters": count} for name, count in sorted(letters.targets.items())],
    }
