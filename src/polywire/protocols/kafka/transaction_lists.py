"""ListTransactions and DescribeTransactions (spec: kafka#transactions).

Users see only the transactional ids that they may use.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from polywire.broker.changes import TransactionState
from polywire.broker.permissions import Action
from polywire.broker.transaction_state import Transaction
from polywire.errors import BrokerError
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.messages import Api, WireError
from polywire.protocols.kafka.patterns import Pattern, PatternError
from polywire.protocols.kafka.replies import answer_in_slices
from polywire.protocols.kafka.reply_slots import Answer
from polywire.protocols.kafka.session import KafkaSession
from polywire.protocols.kafka.transactions import find_transaction, transaction_error

if TYPE_CHECKING:
    from polywire.protocols.kafka.message_types import (
        DescribeTransactionsRequest,
        DescribeTransactionsResponse,
        ListTransactionsRequest,
        ListTransactionsResponse,
    )

NO_PRODUCER: Final = -1
_US_PER_MS: Final = 1_000
_WORDS: Final = {
    TransactionState.EMPTY: "Empty",
    TransactionState.OPEN: "Ongoing",
    TransactionState.SHARED: "Ongoing",
    TransactionState.COMMITTED: "CompleteCommit",
    TransactionState.ABORTED: "CompleteAbort",
}
_UNUSED_STATES: Final = frozenset({"PrepareCommit", "PrepareAbort", "Dead", "PrepareEpochFence"})
"""Kafka's states that no transaction has in Polywire. As filters, they are accepted and match nothing."""


def _number(transaction: Transaction) -> int:
    return NO_PRODUCER if transaction.producer is None else transaction.producer.id


def list_transactions(
    session: KafkaSession, answer: Answer, request: ListTransactionsRequest, /
) -> ListTransactionsResponse | None:
    """ListTransactions: list the transactional ids that the client may use and that match the filters."""
    response = schema.response(Api.LIST_TRANSACTIONS)
    try:
        session.broker.access.authorize_somewhere(session.principal, Action.TRANSACTION)
    except BrokerError as error:
        return response(error=transaction_error(error))
    try:
        pattern = Pattern(request.transactional_id_pattern) if request.transactional_id_pattern else None
    except PatternError:
        return response(error=WireError.INVALID_REGULAR_EXPRESSION)
    states, numbers = set(request.state_filters), set(request.producer_id_filters)
    open_since_us = session.broker.elapsed.now_us() - request.duration_filter * _US_PER_MS

    def listed(known: Transaction) -> ListTransactionsResponse.TransactionStates | None:
        left_out = (
            # Cursus registers its ids in all shards, so only the coordinator lists them
            not session.shared.coordinates(known.id)
            or (states and _WORDS[known.state] not in states)
            or (numbers and _number(known) not in numbers)
            or (pattern is not None and not _matches(pattern, known.id))
            or (request.duration_filter > 0 and not (known.is_open and known.began_at_us <= open_since_us))
        )
        if left_out:
            return None
        made = response.TransactionStates
        return made(transactional_id=known.id, producer_id=_number(known), transaction_state=_WORDS[known.state])

    known = session.broker.transactions.visible(by=session.caller)
    unknown = sorted(states.difference(_WORDS.values(), _UNUSED_STATES))
    return answer_in_slices(
        session.broker,
        answer,
        map(listed, known),
        lambda entries: response(unknown_state_filters=unknown, transaction_states=entries),
    )


def _matches(pattern: Pattern, id_: str) -> bool:
    with suppress(PatternError):
        return pattern.matches(id_)
    return False


def describe_transactions(
    session: KafkaSession, answer: Answer, request: DescribeTransactionsRequest, /
) -> DescribeTransactionsResponse | None:
    """DescribeTransactions: describe transactions. The partitions are included only while the transaction is open."""
    response = schema.response(Api.DESCRIBE_TRANSACTIONS)
    entries = (_described(session, response.TransactionStates, id_) for id_ in request.transactional_ids)
    return answer_in_slices(session.broker, answer, entries, lambda made: response(transaction_states=made))


def _described(
    session: KafkaSession, made: type[DescribeTransactionsResponse.TransactionStates], id_: str
) -> DescribeTransactionsResponse.TransactionStates:
    try:
        session.broker.access.authorize_somewhere(session.principal, Action.TRANSACTION)
        known = find_transaction(session, id_)
    except BrokerError as error:
        return made(transactional_id=id_, error=transaction_error(error), producer_id=NO_PRODUCER)
    if known is None:
        missing = WireError.TRANSACTIONAL_ID_NOT_FOUND
        return made(transactional_id=id_, error=missing, producer_id=NO_PRODUCER)
    broker, began_at_us = session.broker, -_US_PER_MS
    if known.is_open:  # only then is there a start time, which is converted to wall-clock time
        began_at_us = broker.clock.now_us() - (broker.elapsed.now_us() - known.began_at_us)
    return made(
        transactional_id=id_,
        transaction_state=_WORDS[known.state],
        transaction_timeout_ms=0 if known.producer is None else known.producer.timeout_us // _US_PER_MS,
        transaction_start_time_ms=began_at_us // _US_PER_MS,
        producer_id=_number(known),
        producer_epoch=min(known.producer_epoch, 32_767),
        topics=list(_written(session, made.Topics, known)) if known.is_open else [],
    )


def _written(
    session: KafkaSession, made: type[DescribeTransactionsResponse.TransactionStates.Topics], known: Transaction
) -> Iterator[DescribeTransactionsResponse.TransactionStates.Topics]:
    for topic in session.broker.transactions.topics(known):
        if session.permits(Action.TOPIC_DESCRIBE, topic):
            held = known.partitions or known.sequences
            numbers = [partition.number for partition in topic.partitions if partition.incarnation in held]
            yield made(topic=topic.name.full, partitions=numbers)
