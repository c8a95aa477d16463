"""A client with Kafka transactions, one request at a time, which commits or aborts them.

A transaction is visible as a whole or not at all, and only after its commit was requested.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from polywire.protocols.kafka import schema
from polywire.protocols.kafka.client_batches import encode_batch
from polywire.protocols.kafka.messages import Api
from polywire.protocols.kafka.transactions import ADDING_SINCE
from polywire.records.columns import Record
from polywire.types import Level
from tests.sim.chance import Chance
from tests.sim.story import Story
from tests.sim.wires.ledger import COPIERS, PLACES, Ledger, Owner, Place, Sending, Transaction
from tests.sim.wires.lone_kafka_peer import LoneKafkaPeer, error_of

if TYPE_CHECKING:
    from polywire.protocols.kafka.message_types import (
        AddOffsetsToTxnResponse,
        AddPartitionsToTxnResponse,
        EndTxnResponse,
        InitProducerIdResponse,
        OffsetFetchResponse,
        ProduceResponse,
        TxnOffsetCommitResponse,
    )

VERSIONS: Final = {
    Api.INIT_PRODUCER_ID: 1,
    Api.ADD_PARTITIONS_TO_TXN: 1,
    Api.ADD_OFFSETS_TO_TXN: 1,
    Api.TXN_OFFSET_COMMIT: 2,
    Api.OFFSET_FETCH: 5,
    Api.PRODUCE: 8,
    Api.END_TXN: 1,
}
ID: Final = "copies"
TIMEOUT_MS: Final = 60_000
TRANSACTIONAL: Final = 0x10  # of a batch's attributes
VALUE_SIZES: Final = (1, 40, 2000)
COMMITS: Final = 0.7  # of transactions
SOURCE: Final[Place] = ("b", 0)
"""The copied topic, for positions."""
MOVES: Final = 0.7  # of steps in a transaction without a position
LOOKS: Final = 0.1  # of steps between two transactions


class Transactor(LoneKafkaPeer):
    """Implements ``Caller``. Guards: ``_transaction`` is the open one."""

    def __init__(
        self,
        ledger: Ledger,
        chance: Chance,
        story: Story,
        *,
        name: str = "t",
        id_: str = ID,
        owner: Owner = COPIERS,
        versions: Mapping[Api, int] = VERSIONS,
        timeout_ms: int = TIMEOUT_MS,
    ) -> None:
        """name: prefix of its values. id_: its transactional id. owner: of the position that it commits."""
        super().__init__(name, versions, chance, story)
        self._id: Final = id_
        self._owner: Final = owner
        self._timeout_ms: Final = timeout_ms
        self._adds: Final = versions[Api.PRODUCE] < ADDING_SINCE
        """Whether it adds partitions to a transaction before it uses them."""
        self._ledger: Final = ledger
        self._producer: tuple[int, int] | None = None
        self._sequences: dict[Place, int] = {}
        self._transaction: Transaction | None = None
        self._added: set[Place] = set()
        self._offset = 0
        self._moving: set[Place] = set()

    def disconnected(self) -> None:
        """Note the loss of the connection: the next one begins an epoch, which aborts the open transaction."""
        super().disconnected()
        self._producer = self._transaction = None

    def _step(self) -> None:
        if self._producer is None:
            self._ask(
                Api.INIT_PRODUCER_ID, self._begun, transactional_id=self._id, transaction_timeout_ms=self._timeout_ms
            )
        elif self.moves and self._transaction is None and self._chance.happens(LOOKS):
            self._look()
        elif self.moves and self._can_move(self._transaction) and self._chance.happens(MOVES):
            self._move()
        elif self._transaction is not None and self._chance.happens(0.4):
            self._end(self._transaction)
        else:
            self._produce()

    def _whose(self) -> dict[str, Any]:
        assert self._producer is not None, "it has begun"
        return {"transactional_id": self._id, "producer_id": self._producer[0], "producer_epoch": self._producer[1]}

    def _begun(self, body: InitProducerIdResponse) -> None:
        self._producer = None if body.error else (body.producer_id, body.producer_epoch)
        self._transaction = None
        self._sequences.clear()
        self._added.clear()
        self._moving.clear()

    def _produce(self) -> None:
        place = self._chance.one_of(PLACES)
        if self._adds and place not in self._added:
            topics = schema.request(Api.ADD_PARTITIONS_TO_TXN).Topics
            one = topics(name=place[0], partitions=[place[1]])
            self._ask(
                Api.ADD_PARTITIONS_TO_TXN, lambda body: self._was_added(place, body), topics=[one], **self._whose()
            )
            return
        assert self._producer is not None, "it has begun"
        if self._transaction is None:
            self._transaction = Transaction(owner=self._owner)
        count = 1 + self._chance.below(3)
        values = [
            b"%s.%d.%d:" % (self.name.encode(), self._count, index) + b"." * self._chance.one_of(VALUE_SIZES)
            for index in range(count)
        ]
        sending = Sending(place, values, self.name, self._count, Level.SYNCED, transaction=self._transaction)
        self._ledger.sent(sending)
        base = self._sequences.get(place, 0)
        self._sequences[place] = base + count
        batch = encode_batch(
            [Record(value) for value in values],
            producer_id=self._producer[0],
            producer_epoch=self._producer[1],
            base_sequence=base,
            attributes=TRANSACTIONAL,
        )
        produced = schema.request(Api.PRODUCE).Topics
        topic = produced(name=place[0], partitions=[produced.Partitions(index=place[1], records=batch)])
        self._ask(
            Api.PRODUCE,
            lambda body: self._was_staged(sending, body),
            transactional_id=self._id,
            acks=-1,
            timeout_ms=1000,
            topics=[topic],
        )

    def _was_added(self, place: Place, body: AddPartitionsToTxnResponse) -> None:
        if body.topics[0].partitions[0].error:
            self._producer = None
        else:
            self._added.add(place)

    def _was_staged(self, sending: Sending, body: ProduceResponse) -> None:
        transaction = sending.transaction
        assert transaction is not None, "it is of one"
        if body.responses[0].partitions[0].error:
            self._producer = None
        else:
            transaction.staged.append(sending)

    # Positions

    @staticmethod
    def _can_move(transaction: Transaction | None) -> bool:
        return transaction is not None and transaction.moved is None and bool(transaction.staged)

    def _move(self) -> None:
        """Commit the position, first by AddOffsetsToTxn, then by TxnOffsetCommit."""
        if self._adds and SOURCE not in self._moving:
            self._ask(Api.ADD_OFFSETS_TO_TXN, self._may_move, group_id=self._owner[1], **self._whose())
            return
        self._offset += 1 + self._chance.below(5)
        offset, transaction = self._offset, self._transaction
        assert transaction is not None, "it is open"

        def was_moved(body: TxnOffsetCommitResponse) -> None:
            if body.topics[0].partitions[0].error:
                self._producer = None
            else:
                transaction.moved = offset

        topics = schema.request(Api.TXN_OFFSET_COMMIT).Topics
        one = topics(name=SOURCE[0], partitions=[topics.Partitions(index=SOURCE[1], offset=offset)])
        self._ask(Api.TXN_OFFSET_COMMIT, was_moved, group_id=self._owner[1], topics=[one], **self._whose())

    def _may_move(self, body: AddOffsetsToTxnResponse) -> None:
        if body.error:
            self._producer = None
        else:
            self._moving.add(SOURCE)

    def _look(self) -> None:
        """Fetch the position: uncommitted ones must not be visible."""
        since = self._ledger.last_answered(self._owner, SOURCE)

        def reported(body: OffsetFetchResponse) -> None:
            if not error_of(body):
                found = body.topics[0].partitions[0].offset
                self._ledger.finds(self._owner, SOURCE, None if found < 0 else found, since)

        one = schema.request(Api.OFFSET_FETCH).Topics(name=SOURCE[0], indexes=[SOURCE[1]])
        self._ask(Api.OFFSET_FETCH, reported, group_id=self._owner[1], topics=[one])

    def _end(self, transaction: Transaction) -> None:
        """Request the end of a completely staged transaction."""
        transaction.is_asked = self._chance.happens(COMMITS)
        is_moved = transaction.is_asked and transaction.moved is not None
        at = self._ledger.asks(self._owner, SOURCE, transaction.moved or 0) if is_moved else -1

        def ended(body: EndTxnResponse) -> None:
            self._transaction = None
            self._added.clear()
            self._moving.clear()
            if is_moved and not body.error:
                self._story.tell("moved", f"{self.name} to {transaction.moved}")
                self._ledger.was_stored(self._owner, SOURCE, at, Level.SYNCED)
            if body.error:
                self._producer = None
                return
            if not self._adds:  # each transaction has an epoch
                self._producer = body.producer_id, body.producer_epoch
                self._sequences.clear()
            if transaction.is_asked:
                self._ledger.committed(transaction)

        self._ask(Api.END_TXN, ended, committed=transaction.is_asked, **self._whose())
