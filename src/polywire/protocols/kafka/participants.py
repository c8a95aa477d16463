"""Calls between the processes of a broker for Kafka transactions over several shards (decision 0129).

One shard coordinates a transactional id, and the others participate. Before a producer may write to another shard, the
coordinator checks the producer, and stores that the shard participates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from polywire.broker.changes import TransactionalProducer
from polywire.broker.owners import ITSELF, Caller
from polywire.broker.participants import NEXT_S, Joined
from polywire.broker.permissions import Action
from polywire.broker.transaction_state import Transaction
from polywire.errors import BrokerError
from polywire.log.base import Completion
from polywire.protocols.kafka.context import Shared
from polywire.protocols.kafka.messages import Refused, WireError
from polywire.protocols.kafka.routed import RoutedKafkaSession, Send, Then
from polywire.protocols.kafka.transactions import check_holder, check_settled, transaction_error
from polywire.types import Level

PART: Final = "kafka_transactions"


class Permission(msgspec.Struct, frozen=True, array_like=True):
    """The coordinator's response to ``permit``: an error, or the values that the shards need to stage records."""

    error: int = 0
    message: str = ""
    id: str = ""
    coordinator: int = 0
    token: bytes = b""
    epoch: int = 0
    producer: TransactionalProducer | None = None

    def joined(self, by: Caller) -> Joined:
        """Convert the permission for the broker, with the client as owner.

        Raises Refused if the permission is an error.
        """
        if self.error or self.producer is None:
            raise Refused(WireError(self.error), self.message)
        return Joined(self.id, self.coordinator, self.token, self.epoch, self.producer, by.owner)


class Holder(msgspec.Struct, frozen=True, array_like=True):
    """The producer of a request.

    Attributes:
        id: transactional id.
        epoch: epoch of the producer id.
    """

    id: str
    producer_id: int
    epoch: int


def permit(
    shared: Shared,
    holder: Holder,
    shards: tuple[int, ...],
    *,
    begins: bool,
    by: Caller,
    then: Completion[Permission],
) -> None:
    """Add shards to the open transaction of a producer, as the coordinator of its id.

    If ``begins`` is set and no transaction is open, begin one. If other shards have yet to apply the outcome of the
    previous transaction, wait for them.
    """
    participants = shared.broker.participants
    run = partial(_permit, shared, holder, shards, begins=begins, by=by, then=then)
    if participants.is_deciding(holder.id):
        participants.once_settled(holder.id, run, NEXT_S)
    else:
        run()


def _permit(
    shared: Shared, holder: Holder, shards: Sequence[int], *, begins: bool, by: Caller, then: Completion[Permission]
) -> None:
    broker = shared.broker

    def joined(transaction: Transaction, result: int | BrokerError) -> None:
        if isinstance(result, BrokerError):
            then(_denied(result))
        elif not transaction.is_open or broker.transactions.find(holder.id, by=ITSELF) is not transaction:
            then(Permission(WireError.CONCURRENT_TRANSACTIONS, "the transaction has ended"))
        else:
            then(_permission(shared, transaction))

    try:
        transaction = _current(shared, holder, begins=begins, by=by)
        others = [shard for shard in shards if shard != _own(shared)]
        if others:
            broker.participants.join(transaction, others, done=partial(joined, transaction))
        else:
            broker.settle(Level.SYNCED, partial(joined, transaction))
    except Refused as refused:
        then(Permission(refused.error, refused.message))
    except BrokerError as error:
        then(_denied(error))


def _denied(error: BrokerError) -> Permission:
    return Permission(transaction_error(error), error.message)


def _own(shared: Shared) -> int:
    assert shared.shards is not None, "only a broker with several shards has participants"
    return shared.shards.own


def _current(shared: Shared, holder: Holder, *, begins: bool, by: Caller) -> Transaction:
    """Return the open transaction of a producer.

    Raises Refused or BrokerError if there is none, or another producer holds the id.
    """
    if not shared.coordinates(holder.id):
        raise Refused(WireError.NOT_COORDINATOR, "another process coordinates the transactional id")
    shared.broker.access.authorize_somewhere(by.principal, Action.TRANSACTION)
    transaction = check_holder(
        shared.broker.transactions.find(holder.id, by=by),
        producer_id=holder.producer_id,
        epoch=holder.epoch,
        fenced=WireError.INVALID_PRODUCER_EPOCH,
    )
    check_settled(shared.broker, transaction)
    if not transaction.is_open:
        if not begins:
            raise Refused(WireError.INVALID_TXN_STATE, "no transaction is open")
        transaction = shared.broker.transactions.begin(transaction, level=Level.WRITTEN, done=None)
    return transaction


def _permission(shared: Shared, transaction: Transaction) -> Permission:
    producer = transaction.producer
    assert producer is not None, "an open transaction has a producer"
    return Permission(
        id=transaction.id,
        coordinator=_own(shared),
        token=transaction.token,
        epoch=transaction.epoch,
        producer=TransactionalProducer(producer.id, producer.first_epoch, -1, producer.timeout_us),
    )


def enter(shared: Shared, permission: Permission, *, by: Caller, then: Completion[int]) -> None:
    """Open this shard's participant in a transaction. ``then`` gets the protocol's error code, 0 for none."""
    try:
        joined = permission.joined(by)
        if joined.coordinator != _own(shared):
            shared.broker.participants.enter(joined)
    except Refused as refused:
        then(refused.error)
    except BrokerError as error:
        then(transaction_error(error))
    else:
        then(0)


def calling(
    session: RoutedKafkaSession, shard: int, function: Callable[..., None], *values: Any, **options: Any
) -> Send:
    """Return a function that calls ``permit`` or ``enter`` in the process of a shard, for the client of a session."""

    def send(then: Then) -> None:
        def returned(result: Any) -> None:
            then(None if isinstance(result, BrokerError) else result)

        by = session.caller
        if shard == session.shards.own:
            function(session.shared, *values, **options, by=by, then=returned)
        else:
            session.router.call_part(shard, PART, function, *values, **options, by=by, then=returned)

    return send
