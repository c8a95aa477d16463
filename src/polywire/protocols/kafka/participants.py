"""Messages between a broker's processes for transactions across shards (decision 0129).

Each message is one ``BETWEEN_SHARDS`` request on a link between two processes. The body of the request is one of
``Question``, and the body of the response is its answer. Both are encoded as MessagePack.

In a transaction across shards, one shard coordinates the transactional id, and the others are participants.

* A producer may stage records in another shard only if the coordinator would accept its records, too. The coordinator
  checks this, and stores which shards participate.
* A request on behalf of a client is authorized as that client.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar

import msgspec

from polywire.broker.changes import TransactionalProducer
from polywire.broker.owners import ITSELF
from polywire.broker.participants import Joined
from polywire.broker.transaction_state import Transaction
from polywire.errors import BrokerError, PeerError
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.messages import Api, Refused, Request, WireError
from polywire.protocols.kafka.reply_slots import Answer
from polywire.protocols.kafka.session import KafkaSession
from polywire.protocols.kafka.transactions import check_settled, held_by, transaction_error
from polywire.types import Level

PERMIT_S: Final = (
    # how long the coordinator waits until the previous transaction has ended in all shards, before it rejects the next one
    2.0
)
LIMIT_S: Final = 5.0  # how long to wait for a shard's response; then the request is repeated

_Answer = TypeVar("_Answer", bound="Result | Permission")


class Join(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Request to the coordinator: add these shards to the open transaction of the producer.

    If ``begins`` is set and no transaction is open, begin one.
    """

    id: str
    producer_id: int
    producer_epoch: int
    shards: tuple[int, ...]
    begins: bool


class Permission(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The coordinator's response to ``Join``: an error, or the values that the shards need to stage records."""

    error: int = 0
    message: str = ""
    id: str = ""
    coordinator: int = 0
    token: bytes = b""
    epoch: int = 0
    producer: TransactionalProducer | None = None
    owner: int = 0

    def joined(self) -> Joined:
        """Return the permission in the broker's terms. Raises Refused if it is an error."""
        if self.error or self.producer is None:
            raise Refused(WireError(self.error), self.message)
        return Joined(self.id, self.coordinator, self.token, self.epoch, self.producer, self.owner)


class Enter(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Request to a shard: open its participant in a transaction that the coordinator has added it to."""

    permission: Permission


class Result(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """A shard's response: an error, or success."""

    error: int = 0
    message: str = ""


Question = Join | Enter

_ENCODER: Final = msgspec.msgpack.Encoder()
_QUESTIONS: Final[msgspec.msgpack.Decoder[Question]] = msgspec.msgpack.Decoder(Question)


def asked(question: Question) -> Request:
    body = schema.request(Api.BETWEEN_SHARDS)(body=_ENCODER.encode(question))
    return Request(Api.BETWEEN_SHARDS, 0, 0, None, body)


def answered(kind: type[_Answer], body: Any) -> _Answer | None:
    """Decode a shard's response; return None if there was none."""
    return None if body is None else msgspec.msgpack.decode(body.body, type=kind)


def _answer(answer: Answer, made: Result | Permission) -> None:
    answer.ok(schema.response(Api.BETWEEN_SHARDS)(body=_ENCODER.encode(made)))


# Requests of other processes


def between_shards(session: KafkaSession, answer: Answer, request: Any, /) -> None:
    """Execute a request of another process of this broker. Raises PeerError for an unknown request."""
    try:
        question = _QUESTIONS.decode(request.body)
    except msgspec.DecodeError as error:
        raise PeerError(f"invalid request of another process reason={error}", fatal=True) from None
    try:
        match question:
            case Join():
                permit(session, question, partial(_answer, answer))
            case Enter():
                _enter(session, answer, question)
    except BrokerError as error:
        kind = Permission if isinstance(question, Join) else Result
        _answer(answer, kind(transaction_error(error), error.message))


def permit(session: KafkaSession, asked: Join, tell: Callable[[Permission], None], *, waits: bool = True) -> None:
    """Add shards to a transaction, as the coordinator of its id, and pass the result to ``tell``.

    If ``waits``, wait until the previous transaction has ended in all shards.
    """
    if waits and session.broker.participants.is_deciding(asked.id):
        session.broker.participants.once_settled(asked.id, partial(permit, session, asked, tell, waits=False), PERMIT_S)
        return

    def done(transaction: Transaction, result: int | BrokerError) -> None:
        if isinstance(result, BrokerError):
            tell(_denied(result))
        elif not transaction.is_open or session.broker.transactions.find(asked.id, by=ITSELF) is not transaction:
            tell(Permission(WireError.CONCURRENT_TRANSACTIONS, "the transaction has ended"))
        else:
            tell(_permission(session, transaction))

    try:
        _store(session, asked, done)
    except Refused as refused:
        tell(Permission(refused.error, refused.message))
    except BrokerError as error:
        tell(_denied(error))


def _denied(error: BrokerError) -> Permission:
    return Permission(transaction_error(error), error.message)


def _store(session: KafkaSession, asked: Join, done: Callable[[Transaction, int | BrokerError], None]) -> None:
    """Store which shards participate, then call ``done``. Raises Refused or BrokerError if they may not participate."""
    transaction = _current(session, asked)
    shards = [shard for shard in asked.shards if shard != _own(session)]
    if shards:
        session.broker.participants.join(transaction, shards, done=partial(done, transaction))
    else:
        session.broker.settle(Level.SYNCED, partial(done, transaction))


def _own(session: KafkaSession) -> int:
    assert session.shared.shards is not None, "only a broker with several shards has links"
    return session.shared.shards.own


def _current(session: KafkaSession, asked: Join) -> Transaction:
    """Return the open transaction that the shards participate in.

    Raises Refused or BrokerError if there is none, or another producer holds the id.
    """
    if not session.shared.coordinates(asked.id):
        raise Refused(WireError.NOT_COORDINATOR, "another process coordinates the transactional id")
    transaction = held_by(
        session,
        asked.id,
        producer_id=asked.producer_id,
        epoch=asked.producer_epoch,
        fenced=WireError.INVALID_PRODUCER_EPOCH,
    )
    check_settled(session, transaction)
    if not transaction.is_open:
        if not asked.begins:
            raise Refused(WireError.INVALID_TXN_STATE, "no transaction is open")
        transaction = session.broker.transactions.begin(transaction, level=Level.WRITTEN, done=None)
    return transaction


def _permission(session: KafkaSession, transaction: Transaction) -> Permission:
    producer = transaction.producer
    assert producer is not None, "an open transaction has a producer"
    numbered = TransactionalProducer(producer.id, producer.first_epoch, -1, producer.timeout_us)
    return Permission(
        id=transaction.id,
        coordinator=_own(session),
        token=transaction.token,
        epoch=transaction.epoch,
        producer=numbered,
        owner=transaction.owner,
    )


def _enter(session: KafkaSession, answer: Answer, asked: Enter) -> None:
    """Open a participant. Raises BrokerError if this shard cannot."""
    joined = asked.permission.joined()
    if joined.coordinator != _own(session):
        session.broker.participants.enter(joined)
    _answer(answer, Result())
