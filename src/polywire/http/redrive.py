"""Send dead letters back, in one transaction with the committed offset.

The target topics may belong to several processes. The process that has the dead letters coordinates the transaction
(decision 0129). It adds each other process as a participant, which stages the letters for its topics and applies the
decision. Letters reach other processes over the HTTP link between them.

* Either all letters are sent and the offset is committed, or nothing happens.
* Nothing is staged for a topic to which the user may not produce.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Final
from zlib import crc32

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from polywire.broker.branches import Joined
from polywire.broker.broker import Broker
from polywire.broker.changes import TransactionalProducer
from polywire.broker.owners import ITSELF
from polywire.broker.permissions import Action
from polywire.broker.topics import Partition, Topic
from polywire.broker.transaction_state import INTERNAL, Scope, Transaction
from polywire.errors import BrokerError, Busy, Conflict, ErrorCode
from polywire.http.endpoints import ApiCall
from polywire.http.errors import raise_error
from polywire.http.guard import PRINCIPAL, completing
from polywire.http.shard_requests import ask_shard, request_bytes
from polywire.protocols.runtime.shards import Shards
from polywire.records.batch import merge
from polywire.types import PositionKind

GROUP: Final = "redrive"  # the group whose committed offsets in a topic of dead letters show which letters were sent
STAGING_PATH: Final = "/link/letters"
TIMEOUT_US: Final = 120_000_000  # then the transaction is aborted; twice the time limit of staging
_OWNER_BITS: Final = 2**64 - 1  # makes the number of an owner, which may be negative, unsigned
# attempts to find a transactional id that this process coordinates; a few are normally enough
ID_TRIES_MAX: Final = 1_000
# how long a response waits until other processes have applied the commit; they apply it in any case
SETTLED_S: Final = 5.0


class Letter(msgspec.Struct, frozen=True, array_like=True):
    """A letter to send back.

    partition: its original partition, None if unknown. batch: a batch that contains only this record.
    """

    topic: str
    partition: int | None
    batch: bytes


class FarLetters(msgspec.Struct, frozen=True, array_like=True):
    """Letters that another process stages, with the fields of its participant (see ``branches.Joined``)."""

    id: str
    home: int
    token: bytes
    epoch: int
    producer: TransactionalProducer
    owner: int
    letters: list[Letter]


class Redrive:
    """Sends dead letters back. ``_round_robin`` selects partitions for letters whose partition is unknown."""

    def __init__(self, broker: Broker, shards: Shards | None) -> None:
        self._broker: Final = broker
        self._shards: Final = shards
        self._round_robin = 0

    async def send(
        self,
        topic: Topic,
        letters: Sequence[Letter],
        *,
        begins: Mapping[int, int | None],
        ends: Mapping[int, int],
        call: ApiCall,
    ) -> None:
        """Send letters and commit the offsets in their topic, or do neither.

        begins, ends: the committed offset of each partition before and after. Raises BrokerError.
        """
        transactions = self._broker.transactions
        near, far = self._by_shard(letters, call)
        id_ = self._id(topic, call)
        if self._broker.branches.is_deciding(id_) and not await self._settled(id_):
            raise Busy(
                ErrorCode.BUSY, "another process has not finished the previous redrive (retry)", retry_after_ms=1_000
            )
        made = transactions.number_producer(
            id_, asks_again=False, timeout_us=TIMEOUT_US, is_internal=True, by=call.caller, done=None
        )
        transaction = transactions.begin(made, done=None)
        epoch = transaction.epoch
        try:
            if far:
                await self._stage_far(transaction, far, call)
                self._check_current(transaction)
            for partition, batch, letter_count in self._batches(near):
                transactions.stage(transaction, partition, batch, first=0, last=letter_count - 1, done=None)
            self._check_positions(topic, begins)
            if ends:
                transactions.put_offsets(transaction, Scope(topic.name.full, GROUP), ends, by=call.caller, done=None)
            done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            transactions.commit(transaction, by=call.caller, done=completing(done))
            await done
            if far:
                await self._settled(id_)
        finally:
            found = transactions.find(id_, by=ITSELF)
            if found is not None and found.epoch == epoch:  # if not, a later redrive uses the id
                with suppress(BrokerError):  # if it cannot be deleted now, it will expire
                    transactions.delete(id_, by=call.caller)

    def _check_current(self, transaction: Transaction) -> None:
        """Raise Conflict(PRODUCER_FENCED) if another redrive of these letters has begun."""
        found = self._broker.transactions.find(transaction.id, by=ITSELF)
        if found is not transaction or not transaction.is_open:
            raise Conflict(ErrorCode.PRODUCER_FENCED, "another redrive of these dead letters is in progress")

    def _check_positions(self, topic: Topic, begins: Mapping[int, int | None]) -> None:
        """Raise Conflict(VERSION_CONFLICT) if committed offsets have changed since the letters were read."""
        before = self._broker.positions_in(topic.name.full, PositionKind.GROUP, GROUP)
        if any(before.get(number) != begin for number, begin in begins.items()):
            raise Conflict(ErrorCode.VERSION_CONFLICT, "another redrive has already sent these dead letters")

    def _id(self, topic: Topic, call: ApiCall) -> str:
        """Return the transactional id for a user and a topic, which this process coordinates. It is the same for every
        redrive.
        """
        first = f"{INTERNAL}redrive-{call.caller.owner & _OWNER_BITS:x}-{crc32(topic.name.full.encode()):08x}"
        shards = self._shards
        if shards is None:
            return first
        names = (f"{first}-{number}" for number in range(ID_TRIES_MAX))
        return next((name for name in names if shards.home(name) == shards.own), first)

    def _by_shard(self, letters: Iterable[Letter], call: ApiCall) -> tuple[list[Letter], dict[int, list[Letter]]]:
        """Split letters into those for topics of this process, and those for each other process.

        Raises Missing(TOPIC_MISSING), Denied.
        """
        broker, shards = self._broker, self._shards
        near: list[Letter] = []
        far: dict[int, list[Letter]] = {}
        for letter in letters:
            broker.access.authorize(call.principal, Action.PRODUCE, broker.resource(letter.topic))
            shard = None if shards is None or broker.find_topic(letter.topic) else shards.shard_of(letter.topic)
            if shards is None or shard is None or shard == shards.own:
                broker.topic(letter.topic)
                near.append(letter)
            else:
                far.setdefault(shard, []).append(letter)
        return near, far

    def _batches(self, letters: Iterable[Letter]) -> list[tuple[Partition, bytearray, int]]:
        """Return the letters for this process: for each partition, one batch and the number of its letters.

        Raises Missing(TOPIC_MISSING).
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

    async def _stage_far(self, transaction: Transaction, far: Mapping[int, Sequence[Letter]], call: ApiCall) -> None:
        """Add each other process as a participant, then send it its letters. Raises BrokerError."""
        shards, producer = self._shards, transaction.producer
        assert shards is not None, "only with several processes"
        assert producer is not None, "set by number_producer"
        joined: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._broker.branches.join(transaction, list(far), done=completing(joined))
        await joined
        for shard, letters in far.items():
            part = FarLetters(
                transaction.id,
                shards.own,
                transaction.token,
                transaction.epoch,
                producer,
                transaction.owner,
                list(letters),
            )
            body = msgspec.msgpack.encode(part)
            raise_error(await ask_shard(shards, shard, request_bytes(STAGING_PATH, call.authorization, body)))

    async def _settled(self, id_: str) -> bool:
        """Wait until other processes have applied the commit, so that consumers find the letters.

        Returns False if that takes longer than SETTLED_S.
        """
        settled = asyncio.Event()
        cancel = self._broker.branches.when_settled(id_, settled.set)
        with suppress(TimeoutError):
            await asyncio.wait_for(settled.wait(), SETTLED_S)
        cancel()
        return settled.is_set()

    async def stage(self, request: Request) -> Response:
        """Stage the letters that another process sends. Raises BrokerError."""
        part = msgspec.msgpack.decode(await request.body(), type=FarLetters)
        broker, principal = self._broker, request.scope[PRINCIPAL]
        for name in {letter.topic for letter in part.letters}:
            broker.access.authorize(principal, Action.PRODUCE, broker.resource(name))
        batches = self._batches(part.letters)
        branch = broker.branches.enter(Joined(part.id, part.home, part.token, part.epoch, part.producer, part.owner))
        staged = []
        for partition, batch, letter_count in batches:
            done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            broker.transactions.stage(branch, partition, batch, first=0, last=letter_count - 1, done=completing(done))
            staged.append(done)
        await asyncio.gather(*staged)
        return Response(b"{}", media_type="application/json")
