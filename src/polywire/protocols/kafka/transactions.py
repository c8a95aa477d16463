"""InitProducerId, AddPartitionsToTxn, AddOffsetsToTxn, TxnOffsetCommit, EndTxn (spec: kafka#transactions).

* Requests of a fenced producer change nothing.
* Records and committed offsets of a transaction become visible atomically.
* A repeated EndTxn has the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from polywire.broker.changes import TransactionState
from polywire.broker.groups.commits import Commit
from polywire.broker.owners import ITSELF
from polywire.broker.permissions import Action
from polywire.broker.producers import WRAP
from polywire.broker.topics import Partition, Topic
from polywire.broker.transaction_state import Scope, Transaction, level_of
from polywire.errors import BrokerError, ErrorCode
from polywire.log.base import Completion
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.context import KafkaBroker
from polywire.protocols.kafka.decoder import BatchHead
from polywire.protocols.kafka.errors import wire_error
from polywire.protocols.kafka.groups import authorize_group, group_error
from polywire.protocols.kafka.lookup import led_topic
from polywire.protocols.kafka.messages import Api, Refused, WireError
from polywire.protocols.kafka.positions import read_commits
from polywire.protocols.kafka.replies import PARTITIONS_PER_STEP, HasError, PendingResponse
from polywire.protocols.kafka.reply_slots import Answer
from polywire.protocols.kafka.session import KafkaSession
from polywire.records.header import stamp_producer
from polywire.types import Level

if TYPE_CHECKING:
    from polywire.protocols.kafka.message_types import (
        AddOffsetsToTxnRequest,
        AddOffsetsToTxnResponse,
        AddPartitionsToTxnRequest,
        AddPartitionsToTxnResponse,
        EndTxnRequest,
        EndTxnResponse,
        InitProducerIdRequest,
        InitProducerIdResponse,
        TxnOffsetCommitRequest,
        TxnOffsetCommitResponse,
    )

TIMEOUT_MS_MAX: Final = 900_000  # maximum transaction timeout, as in Kafka
# first version of AddPartitionsToTxn, AddOffsetsToTxn and EndTxn with an error code for fenced producers
FENCED_SINCE: Final = 2
FENCED_INIT_SINCE: Final = 4  # first version of InitProducerId with that error code
ABORTABLE_SINCE: Final = 11  # first version of Produce with an error code that makes clients abort the transaction
ADDING_SINCE: Final = 12  # first version of Produce that adds partitions to the transaction
ADDING_OFFSETS_SINCE: Final = 5  # first version of TxnOffsetCommit that adds the group to the transaction
RAISING_SINCE: Final = 5  # first version of EndTxn that increments the producer epoch
NO_PRODUCER: Final = -1
_NOT_NUMBERED: Final = -1  # stands for the epoch of a stored batch whose sequence numbers are not checked
# How long a response waits until all shards have applied a decided transaction. They apply it even if that takes
# longer.
SETTLED_S: Final = 5.0
_US_PER_MS: Final = 1_000
_ENDED: Final = {True: TransactionState.COMMITTED, False: TransactionState.ABORTED}
_ERRORS: Final = {
    ErrorCode.INVALID_NAME: WireError.INVALID_REQUEST,
    ErrorCode.PRODUCER_FENCED: WireError.CONCURRENT_TRANSACTIONS,
    # clients look up their coordinator and retry
    ErrorCode.BUSY: WireError.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.DISK_FULL: WireError.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.STOPPING: WireError.COORDINATOR_NOT_AVAILABLE,
}


def transaction_error(error: BrokerError) -> WireError:
    found = _ERRORS.get(error.code)
    return wire_error(error, denied=WireError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED) if found is None else found


def _fenced(version: int, since: int = FENCED_SINCE) -> WireError:
    return WireError.PRODUCER_FENCED if version >= since else WireError.INVALID_PRODUCER_EPOCH


def find_transaction(session: KafkaSession, id_: str) -> Transaction | None:
    """Return the latest transaction of a transactional id, or None.

    If another shard coordinates the id, return the part of the transaction in this shard. Raises Denied(DENIED).
    """
    if session.shared.coordinates(id_):
        return session.broker.transactions.find(id_, by=session.caller)
    return session.broker.participants.find(id_, by=session.caller)


def held_by(session: KafkaSession, id_: str, *, producer_id: int, epoch: int, fenced: WireError) -> Transaction:
    """Return the latest transaction of a transactional id.

    Raises Refused unless this producer, in this epoch, holds the id.
    """
    try:
        session.broker.access.authorize_somewhere(session.principal, Action.TRANSACTION)
        found = find_transaction(session, id_)
    except BrokerError as error:
        raise Refused(transaction_error(error), error.message) from None
    return check_holder(found, producer_id=producer_id, epoch=epoch, fenced=fenced)


def check_holder(found: Transaction | None, *, producer_id: int, epoch: int, fenced: WireError) -> Transaction:
    """Return the latest transaction of an id. Raises Refused if another producer, or none, holds the id."""
    if found is None:
        raise Refused(WireError.INVALID_PRODUCER_ID_MAPPING, "no producer holds the transactional id")
    if found.producer is not None and found.producer.id != producer_id:
        raise Refused(WireError.INVALID_PRODUCER_ID_MAPPING, "the transactional id has another producer")
    if found.producer is None or found.producer_epoch != epoch:
        raise Refused(fenced, f"the producer has another epoch current={found.producer_epoch} got={epoch}")
    return found


def check_settled(broker: KafkaBroker, transaction: Transaction) -> None:
    """Raise Refused while the end of an earlier transaction is not complete."""
    if broker.transactions.is_ending(transaction):
        raise Refused(WireError.CONCURRENT_TRANSACTIONS, "the transaction is being committed")
    if broker.participants.is_deciding(transaction.id):
        raise Refused(
            WireError.CONCURRENT_TRANSACTIONS, "the previous transaction has not ended in all processes yet (retry)"
        )


def check_begun(transaction: Transaction) -> None:
    """Raise Refused if this shard has lost its part of the transaction.

    A power failure can do that soon after it was opened.
    """
    if transaction.is_participant and not transaction.is_open:
        raise Refused(WireError.CONCURRENT_TRANSACTIONS, "this process has lost its part of the transaction (abort it)")


# InitProducerId


def hold(session: KafkaSession, answer: Answer, request: InitProducerIdRequest, /) -> InitProducerIdResponse | None:
    """InitProducerId with a transactional id: abort its open transaction and fence the previous producer."""
    response = schema.response(Api.INIT_PRODUCER_ID)

    def done(result: int | BrokerError) -> None:
        if isinstance(result, BrokerError):
            answer.ok(response(error=transaction_error(result)))
        else:
            assert held.producer is not None, "a transaction of this protocol has a producer id"
            answer.ok(response(producer_id=held.producer.id, producer_epoch=held.producer_epoch))

    try:
        visible = session.broker.participants.when_visible(request.transactional_id or "", done)
        held = _hold(session, request, _fenced(answer.request.version, FENCED_INIT_SINCE), visible)
    except Refused as refused:
        return response(error=refused.error)
    except BrokerError as error:
        return response(error=transaction_error(error))
    return None


def _hold(
    session: KafkaSession, request: InitProducerIdRequest, fenced: WireError, done: Completion[int]
) -> Transaction:
    """Assign the transactional id to the client's producer.

    Raises Refused or BrokerError if the producer must not have the id.
    """
    id_, transactions, level = request.transactional_id, session.broker.transactions, session.shared.settings.acks_all
    session.broker.access.authorize_somewhere(session.principal, Action.TRANSACTION)
    if not id_:
        raise Refused(WireError.INVALID_REQUEST, "transactional id must not be empty")
    if not 0 < request.transaction_timeout_ms <= TIMEOUT_MS_MAX:
        raise Refused(
            WireError.INVALID_TRANSACTION_TIMEOUT,
            f"transaction timeout is out of range ms={request.transaction_timeout_ms} limit={TIMEOUT_MS_MAX}",
        )
    known = transactions.find(id_, by=session.caller)
    asks_again = known is not None and request.producer_id != NO_PRODUCER
    if known is not None and asks_again:
        producer = known.producer
        if producer is None or producer.id != request.producer_id:
            raise Refused(fenced, "the transactional id has another producer")
        if request.producer_epoch != known.producer_epoch:
            epoch_before = producer.first_epoch + request.producer_epoch
            if epoch_before != producer.asked_epoch or known.is_open:
                raise Refused(fenced, "the producer has another epoch")
            session.broker.settle(level, done)
            return known
    return transactions.number_producer(
        id_,
        asks_again=asks_again,
        timeout_us=request.transaction_timeout_ms * _US_PER_MS,
        level=level,
        by=session.caller,
        done=done,
    )


# Partitions and offsets


def add_partitions(session: KafkaSession, answer: Answer, request: AddPartitionsToTxnRequest, /) -> None:
    """AddPartitionsToTxn: add all partitions or none. Many partitions are looked up in slices."""
    body = schema.response(Api.ADD_PARTITIONS_TO_TXN)(topics=[])
    pending_response = PendingResponse(answer, body)
    pending_response.run(session.broker, _add_each(session, answer, request, body, pending_response))


def _add_each(
    session: KafkaSession,
    answer: Answer,
    request: AddPartitionsToTxnRequest,
    body: AddPartitionsToTxnResponse,
    pending_response: PendingResponse,
) -> Iterator[None]:
    made = schema.response(Api.ADD_PARTITIONS_TO_TXN).Topics
    entries: list[AddPartitionsToTxnResponse.Topics.Partitions] = []
    found: list[Partition] = []
    for topic_request in request.topics:
        topic_entry = made(name=topic_request.name, partitions=[])
        body.topics.append(topic_entry)
        topic = _writable(session, topic_request.name)
        for number in topic_request.partitions:
            entry = made.Partitions(index=number)
            topic_entry.partitions.append(entry)
            entries.append(entry)
            if isinstance(topic, BrokerError):
                entry.error = wire_error(topic)
            elif 0 <= number < len(topic.partitions):
                found.append(topic.partitions[number])
            else:
                entry.error = WireError.UNKNOWN_TOPIC_OR_PARTITION
            yield None
    if len(found) < len(entries):
        _refuse([entry for entry in entries if not entry.error], WireError.OPERATION_NOT_ATTEMPTED)
        return

    def done(result: int | BrokerError) -> None:
        if isinstance(result, BrokerError):
            _refuse(entries, transaction_error(result))
        pending_response.count_result()

    pending_response.expect()
    try:
        transaction = current(session, answer, request)
        check_begun(transaction)
        session.broker.transactions.add_partitions(transaction, found, level=Level.WRITTEN, done=done)
    except Refused as refused:
        _refuse(entries, refused.error)
        pending_response.count_result()
    except BrokerError as error:
        _refuse(entries, transaction_error(error))
        pending_response.count_result()


def _writable(session: KafkaSession, name: str) -> Topic | BrokerError:
    try:
        return led_topic(session, Action.PRODUCE, name)
    except BrokerError as error:
        # the error's traceback refers to this connection, which would in turn refer to the error
        return error.with_traceback(None)


def _refuse(entries: Iterable[HasError], code: WireError) -> None:
    for entry in entries:
        entry.error = code


def current(
    session: KafkaSession,
    answer: Answer,
    request: AddPartitionsToTxnRequest | AddOffsetsToTxnRequest | EndTxnRequest,
) -> Transaction:
    """Return the transaction of a request.

    Raises Refused if another producer holds the id, or the transaction is being ended.
    """
    found = held_by(
        session,
        request.transactional_id,
        producer_id=request.producer_id,
        epoch=request.producer_epoch,
        fenced=_fenced(answer.request.version),
    )
    check_settled(session.broker, found)
    return found


def add_offsets(
    session: KafkaSession, answer: Answer, request: AddOffsetsToTxnRequest, /
) -> AddOffsetsToTxnResponse | None:
    """AddOffsetsToTxn: open the transaction. The group's offsets follow with TxnOffsetCommit."""
    response = schema.response(Api.ADD_OFFSETS_TO_TXN)
    try:
        authorize_group(session, Action.OFFSET_COMMIT, ())
    except BrokerError as error:
        return response(error=group_error(error))
    try:
        transaction = current(session, answer, request)
        done = _ended(answer, response)
        if transaction.is_open:
            session.broker.settle(Level.WRITTEN, done)
        else:
            session.broker.transactions.begin(transaction, level=Level.WRITTEN, done=done)
    except Refused as refused:
        return response(error=refused.error)
    except BrokerError as error:
        return response(error=transaction_error(error))
    return None


def _ended(answer: Answer, response: type[AddOffsetsToTxnResponse] | type[EndTxnResponse]) -> Completion[int]:
    def done(result: int | BrokerError) -> None:
        answer.ok(response(error=transaction_error(result) if isinstance(result, BrokerError) else WireError.NONE))

    return done


def txn_offset_commit(session: KafkaSession, answer: Answer, request: TxnOffsetCommitRequest, /) -> None:
    """TxnOffsetCommit: stage committed offsets until the transaction ends. Many are processed in slices."""
    move(session, answer, request, partial(check_member, session, request))


def move(session: KafkaSession, answer: Answer, request: TxnOffsetCommitRequest, check: Callable[[], None]) -> None:
    """Process a TxnOffsetCommit. ``check`` raises BrokerError if the group may not commit now."""
    body = schema.response(Api.TXN_OFFSET_COMMIT)(topics=[])
    pending_response = PendingResponse(answer, body)
    begins = answer.request.version >= ADDING_OFFSETS_SINCE
    pending_response.run(session.broker, _move_each(session, request, body, pending_response, check, begins=begins))


def _move_each(
    session: KafkaSession,
    request: TxnOffsetCommitRequest,
    body: TxnOffsetCommitResponse,
    pending_response: PendingResponse,
    check: Callable[[], None],
    *,
    begins: bool,
) -> Iterator[None]:
    made = schema.response(Api.TXN_OFFSET_COMMIT).Topics
    moved: list[tuple[str, dict[int, Commit]]] = []
    for topic_request in request.topics:
        topic_entry = made(name=topic_request.name, partitions=[])
        body.topics.append(topic_entry)
        topic: Topic | BrokerError
        commits: dict[int, Commit] = {}
        try:
            topic = led_topic(session, Action.OFFSET_COMMIT, topic_request.name)
        except BrokerError as error:
            topic = error.with_traceback(None)
        for at in range(0, len(topic_request.partitions), PARTITIONS_PER_STEP):
            some = topic_request.partitions[at : at + PARTITIONS_PER_STEP]
            entries = [made.Partitions(index=one.index) for one in some]
            topic_entry.partitions += entries
            if isinstance(topic, BrokerError):
                _refuse(entries, group_error(topic))
            else:
                commits.update(read_commits(topic, some, entries))
            yield None
        if commits and not isinstance(topic, BrokerError):
            moved.append((topic.name.full, commits))
    entries = [entry for topic_entry in body.topics for entry in topic_entry.partitions if not entry.error]
    _move(session, request, moved, entries, pending_response, check, begins=begins)


def _move(
    session: KafkaSession,
    request: TxnOffsetCommitRequest,
    moved: Iterable[tuple[str, dict[int, Commit]]],
    entries: Sequence[HasError],
    pending_response: PendingResponse,
    check: Callable[[], None],
    *,
    begins: bool,
) -> None:
    """Stage offsets in the transaction, or set the error of their entries.

    ``begins``: whether this request may open the transaction.
    """

    def done(result: int | BrokerError) -> None:
        if isinstance(result, BrokerError):
            _refuse(entries, transaction_error(result))
        pending_response.count_result()

    pending_response.expect()
    try:
        authorize_group(session, Action.OFFSET_COMMIT, ())
        transaction = _open(session, request, begins=begins)
        check()
        if not transaction.is_open:
            transaction = session.broker.transactions.begin(transaction, level=Level.WRITTEN, done=None)
        for name, commits in moved:
            scope = Scope(name, request.group_id, request.member_id, request.generation_id)
            _hold_offsets(session, transaction, scope, commits)
        session.broker.settle(level_of(transaction, session.shared.settings.acks_all), done)
    except Refused as refused:
        _refuse(entries, refused.error)
        pending_response.count_result()
    except BrokerError as error:
        _refuse(entries, group_error(error))
        pending_response.count_result()


def _open(session: KafkaSession, request: TxnOffsetCommitRequest, *, begins: bool) -> Transaction:
    """Return the producer's transaction.

    Raises Refused if it is not open, unless ``begins`` allows the caller to open it.
    """
    transaction = held_by(
        session,
        request.transactional_id,
        producer_id=request.producer_id,
        epoch=request.producer_epoch,
        fenced=WireError.INVALID_PRODUCER_EPOCH,
    )
    check_settled(session.broker, transaction)
    if not transaction.is_open and (transaction.is_participant or not begins):
        raise Refused(WireError.INVALID_TXN_STATE, "no transaction is open")
    return transaction


def check_member(session: KafkaSession, request: TxnOffsetCommitRequest) -> None:
    """Raise BrokerError if the member has left the group.

    Old clients do not send the member; then nothing is checked.
    """
    if request.generation_id < 0 and not request.member_id:
        return
    consumers, classic = session.broker.consumers, session.broker.classic
    check = consumers.check_epoch if consumers.has_member(request.group_id, request.member_id) else classic.check_commit
    check(
        request.group_id,
        request.member_id,
        request.generation_id,
        instance_id=request.instance_id,
        by=session.caller,
    )


def _hold_offsets(session: KafkaSession, transaction: Transaction, scope: Scope, commits: dict[int, Commit]) -> None:
    session.broker.transactions.put_offsets(
        transaction,
        scope,
        {number: commit.offset for number, commit in commits.items()},
        notes={number: (commit.epoch, commit.metadata) for number, commit in commits.items() if commit.is_noted},
        by=session.caller,
        level=Level.WRITTEN,
        done=None,
    )


# Records


def not_added(version: int) -> Refused:
    """Return the error for records whose partition is not in the transaction.

    ``version`` is the version of the Produce request.
    """
    error = WireError.TRANSACTION_ABORTABLE if version >= ABORTABLE_SINCE else WireError.INVALID_TXN_STATE
    return Refused(error, "the partition is not in the transaction")


def stage(
    session: KafkaSession,
    transactional_id: str,
    version: int,
    partition: Partition,
    head: BatchHead,
    batch: bytearray,
    done: Completion[int],
) -> None:
    """Stage the records of one partition until the transaction ends.

    ``version`` is the version of the Produce request. Raises Refused or BrokerError if the records are not accepted.
    """
    transactions = session.broker.transactions
    transaction = held_by(
        session,
        transactional_id,
        producer_id=head.producer_id,
        epoch=head.producer_epoch,
        fenced=WireError.INVALID_PRODUCER_EPOCH,
    )
    if not transaction.is_open or partition.incarnation not in transaction.partitions:
        if version < ADDING_SINCE:
            raise not_added(version)
        if not transaction.is_open:
            if transaction.is_participant or session.broker.participants.is_deciding(transactional_id):
                raise Refused(
                    WireError.REQUEST_TIMED_OUT, "the previous transaction has not ended in all processes yet (retry)"
                )
            transaction = transactions.begin(transaction, level=Level.WRITTEN, done=None)
    stamp_producer(batch, 0, _NOT_NUMBERED, 0)
    transactions.stage(
        transaction,
        partition,
        batch,
        first=head.base_sequence,
        last=(head.base_sequence + head.record_count - 1) % WRAP,
        level=session.shared.settings.acks_all,
        done=done,
    )


# EndTxn


def end(session: KafkaSession, answer: Answer, request: EndTxnRequest, /) -> EndTxnResponse | None:
    """EndTxn: commit or abort. A repeated request gets the same response."""
    response = schema.response(Api.END_TXN)
    raises = answer.request.version >= RAISING_SINCE
    try:
        known = session.broker.transactions.find(request.transactional_id, by=session.caller) if raises else None
        if known is not None and _has_ended(known, request):
            visible = session.broker.participants.when_visible(known.id, _raised(session, answer, known, known.epoch))
            session.broker.settle(session.shared.settings.acks_all, visible)
            return None
        transaction = current(session, answer, request)
        done = _raised(session, answer, transaction, transaction.epoch + 1) if raises else _ended(answer, response)
        visible = session.broker.participants.when_visible(transaction.id, done)
        _end(session, transaction, visible, commits=request.committed, raises_epoch=raises)
    except Refused as refused:
        return response(error=refused.error)
    except BrokerError as error:
        return response(error=transaction_error(error))
    return None


def _has_ended(known: Transaction, request: EndTxnRequest) -> bool:
    """Return whether this request repeats one that has already ended the transaction and incremented the epoch."""
    if known.producer is None or known.state is not _ENDED[request.committed]:
        return False
    epoch_before = known.producer.first_epoch + request.producer_epoch
    return (known.producer.id, known.producer.asked_epoch) == (
        request.producer_id,
        epoch_before,
    ) and epoch_before == known.epoch - 1


def _raised(session: KafkaSession, answer: Answer, transaction: Transaction, epoch: int) -> Completion[int]:
    """Return a completion that responds with the producer's next epoch, or PRODUCER_FENCED if it was fenced meanwhile."""
    response, id_ = schema.response(Api.END_TXN), transaction.id

    def done(result: int | BrokerError) -> None:
        if isinstance(result, BrokerError):
            answer.ok(response(error=transaction_error(result)))
            return
        known = session.broker.transactions.find(id_, by=ITSELF)
        if known is None or known.producer is None or (known.epoch, known.producer.asked_epoch) != (epoch, epoch - 1):
            answer.ok(response(error=WireError.PRODUCER_FENCED))
        else:
            answer.ok(response(producer_id=known.producer.id, producer_epoch=known.producer_epoch))

    return done


def _end(
    session: KafkaSession, transaction: Transaction, done: Completion[int], *, commits: bool, raises_epoch: bool
) -> None:
    """End a transaction. Raises Refused or BrokerError if it cannot be ended."""
    transactions, level = session.broker.transactions, session.shared.settings.acks_all
    if raises_epoch and not commits:  # not an error, because the producer cannot know whether a transaction was open
        transactions.abort(transaction, raises_epoch=True, by_holder=True, level=level, done=done)
    elif not transaction.is_open:
        if raises_epoch or transaction.state is not _ENDED[commits]:
            raise Refused(WireError.INVALID_TXN_STATE, "no transaction is open")
        session.broker.settle(level, done)
    elif commits:
        _check_rights(session, transaction)
        transactions.commit(transaction, by=session.caller, raises_epoch=raises_epoch, level=level, done=done)
    else:
        transactions.abort(transaction, level=level, done=done)


def _check_rights(session: KafkaSession, transaction: Transaction) -> None:
    """Raise Denied if a permission for the staged records or offsets was revoked meanwhile."""
    for topic in session.broker.transactions.topics(transaction):
        session.authorize(Action.PRODUCE, topic)
    for scope in transaction.positions:
        session.authorize(Action.OFFSET_COMMIT, session.broker.resource(scope.topic))
