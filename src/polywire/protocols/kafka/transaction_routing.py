"""Route requests about Kafka transactions between the processes of a broker (decision 0129).

The hash of a transactional id selects its coordinator shard, which assigns producer ids and decides the outcome of each
transaction. A shard that owns a topic of the transaction participates: it stores the uncommitted records and offsets,
once the coordinator has added it. If all topics are in the coordinator's shard, no other shard participates.

* If this shard is not the coordinator, the request gets the error that makes clients look up the coordinator.
* No shard stores anything for a transaction before the coordinator has recorded that the shard participates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from struct import Struct
from typing import TYPE_CHECKING, Any, Final

from polywire.broker.permissions import Action
from polywire.errors import BrokerError
from polywire.protocols.kafka import produce as producing
from polywire.protocols.kafka import producers, schema, transaction_lists, transactions
from polywire.protocols.kafka.group_routing import divided, turn_of
from polywire.protocols.kafka.groups import authorize_group, group_error
from polywire.protocols.kafka.messages import NO_ID, Api, Refused, Request, WireError
from polywire.protocols.kafka.participants import Holder, Permission, calling, enter, permit
from polywire.protocols.kafka.produce import Producing
from polywire.protocols.kafka.reply_slots import Answer
from polywire.protocols.kafka.routed import (
    Bodies,
    RoutedKafkaSession,
    ShardRequest,
    ask_each,
    ask_shards,
    routed,
)
from polywire.protocols.kafka.session import Handler, KafkaSession
from polywire.protocols.kafka.structures import Record, changed
from polywire.types import Buffer

if TYPE_CHECKING:
    from polywire.protocols.kafka.message_types import (
        AddPartitionsToTxnRequest,
        AddPartitionsToTxnResponse,
        DescribeTransactionsRequest,
        DescribeTransactionsResponse,
        InitProducerIdRequest,
        InitProducerIdResponse,
        ProduceRequest,
        TxnOffsetCommitRequest,
        TxnOffsetCommitResponse,
    )

_MAGIC: Final = 2
_HEAD: Final = Struct(
    ">16x b 4x h 20x q h"
)  # header of a batch: magic, attributes, producer's id and epoch (spec: kafka#record-batches)
_TRANSACTIONAL: Final = 16  # bit in the attributes
# versions used on links: the last in which a request does not begin a transaction
_FORWARDED_VERSIONS: Final = {Api.ADD_PARTITIONS_TO_TXN: 3, Api.TXN_OFFSET_COMMIT: 4}


def _at_coordinator(handler: Handler, refused: Callable[[Request, WireError], Record]) -> Handler:
    """Return a handler for transactional ids that this shard coordinates.

    ``refused`` builds the response for other ids.
    """

    def handle(session: KafkaSession, answer: Answer, request: Any, /) -> Record | None:
        if session.shared.coordinates(request.transactional_id):
            return handler(session, answer, request)
        return refused(answer.request, WireError.NOT_COORDINATOR)

    return handle


def _refused(head: Request, error: WireError) -> Record:
    refused: Record = schema.response(head.api)(error=error)
    return refused


def _refused_each(head: Request, error: WireError) -> AddPartitionsToTxnResponse | TxnOffsetCommitResponse:
    response = schema.response(head.api)
    made = response.Topics
    refused: AddPartitionsToTxnResponse | TxnOffsetCommitResponse = response(
        topics=[
            made(
                name=topic.name,
                partitions=[made.Partitions(index=getattr(one, "index", one), error=error) for one in topic.partitions],
            )
            for topic in head.body.topics
        ]
    )
    return refused


# InitProducerId


def init_producer_id(
    session: KafkaSession, answer: Answer, request: InitProducerIdRequest, /
) -> InitProducerIdResponse | None:
    """InitProducerId: handle requests without a transactional id, or with one that this shard coordinates."""
    if request.transactional_id is not None and not session.shared.coordinates(request.transactional_id):
        return schema.response(Api.INIT_PRODUCER_ID)(error=WireError.NOT_COORDINATOR)
    return producers.init_producer_id(session, answer, request)


# Partitions and offsets of a transaction


def add_partitions(session: KafkaSession, answer: Answer, request: AddPartitionsToTxnRequest, /) -> Record | None:
    """Add the shards of the topics to the transaction, then add the partitions there."""
    session = routed(session)
    by_shard = divided(session, request.topics)
    if by_shard.keys() <= {session.shards.own}:
        transactions.add_partitions(session, answer, request)
        return None
    try:
        transactions.current(session, answer, request)
    except Refused as refused:
        return _refused_each(answer.request, refused.error)
    parts = {shard: changed(request, topics=topics) for shard, topics in by_shard.items()}
    permission = partial(_refused_each, answer.request)
    _stage_at(session, answer, request, parts, permission, _added, begins=True)
    return None


def _added(body: AddPartitionsToTxnResponse) -> AddPartitionsToTxnResponse:
    entries = [entry for topic in body.topics for entry in topic.partitions]
    if any(entry.error for entry in entries):
        for entry in entries:
            entry.error = entry.error or WireError.OPERATION_NOT_ATTEMPTED
    return body


def txn_offset_commit(session: KafkaSession, answer: Answer, request: TxnOffsetCommitRequest, /) -> Record | None:
    """TxnOffsetCommit: this shard, which coordinates the group, checks the member.

    The shards of the topics stage the offsets.
    """
    session = routed(session)
    if not session.shared.coordinates(request.group_id):
        return _refused_each(answer.request, WireError.NOT_COORDINATOR)
    by_shard = divided(session, request.topics)
    if by_shard.keys() <= {session.shards.own} and session.shared.coordinates(request.transactional_id):
        transactions.txn_offset_commit(session, answer, request)
        return None
    try:
        authorize_group(session, Action.OFFSET_COMMIT, ())
        transactions.check_member(session, request)
    except BrokerError as error:
        return _refused_each(answer.request, group_error(error))
    number = turn_of(session, request.group_id)
    parts = {
        shard: changed(request, topics=topics, generation_id=number, member_id="") for shard, topics in by_shard.items()
    }
    begins = answer.request.version >= transactions.ADDING_OFFSETS_SINCE
    _stage_at(session, answer, request, parts, partial(_refused_each, answer.request), _same, begins=begins)
    return None


def _same(body: TxnOffsetCommitResponse) -> TxnOffsetCommitResponse:
    return body


def _stage_at(
    session: RoutedKafkaSession,
    answer: Answer,
    request: AddPartitionsToTxnRequest | TxnOffsetCommitRequest,
    parts: Mapping[int, AddPartitionsToTxnRequest] | Mapping[int, TxnOffsetCommitRequest],
    refuse: Callable[[WireError], Record],
    finish: Callable[[Any], Record],
    *,
    begins: bool,
) -> None:
    """Execute a request in the shards of its parts, and join their responses. ``finish`` gets the joined response.

    First, the coordinator adds the shards to the transaction, and each shard opens its participant.
    """
    api = answer.request.api
    response = schema.response(api)

    def permitted(permission: Permission | None) -> Record | None:
        if permission is None:
            return refuse(WireError.COORDINATOR_NOT_AVAILABLE)
        if permission.error:
            return refuse(_fenced_as(api, answer.request.version, WireError(permission.error)))
        entering = {shard: calling(session, shard, enter, permission) for shard in parts}
        ask_each(session, answer, entering, entered)
        return None

    def entered(found: Bodies) -> Record | None:
        for error in found.values():
            if error is None or error:
                return refuse(WireError.COORDINATOR_NOT_AVAILABLE if error is None else WireError(error))
        ask_shards(session, answer, parts, executed, version=_FORWARDED_VERSIONS[api])
        return None

    def executed(found: Bodies) -> Record:
        topics: list[Any] = []
        for shard, body in found.items():
            failed = made_of(parts[shard]) if body is None else body
            topics += failed.topics
        return finish(response(topics=topics))

    def made_of(part: Record) -> AddPartitionsToTxnResponse | TxnOffsetCommitResponse:
        return _refused_each(answer.request._replace(body=part), WireError.COORDINATOR_NOT_AVAILABLE)

    coordinator = session.shards.shard_by_hash(request.transactional_id)
    holder = Holder(request.transactional_id, request.producer_id, request.producer_epoch)
    joining = calling(session, coordinator, permit, holder, tuple(parts), begins=begins)
    ask_each(session, answer, {coordinator: joining}, lambda found: permitted(found[coordinator]))


def _fenced_as(api: Api, version: int, error: WireError) -> WireError:
    if api is Api.ADD_PARTITIONS_TO_TXN and version >= transactions.FENCED_SINCE:
        return WireError.PRODUCER_FENCED if error is WireError.INVALID_PRODUCER_EPOCH else error
    return error


# Records


class _Joining:
    """A produce request that waits for the coordinator. ``release`` frees the request's bytes."""

    __slots__ = ("_cancel", "_release")

    def __init__(self, cancel: Callable[[], None], release: Callable[[], None]) -> None:
        self._cancel: Final = cancel
        self._release: Final = release

    def leave(self) -> None:
        self._cancel()
        self._release()


def produce(session: KafkaSession, answer: Answer, request: ProduceRequest, /) -> None:
    """Before the first records of a transaction that another shard coordinates, request permission from that shard."""
    session = routed(session)
    id_ = request.transactional_id
    holder = None if id_ is None or session.shared.coordinates(id_) else _holder(session, id_, request.topics)
    if holder is None or _is_in(session, holder):
        producing.produce(session, answer, request)
        return
    # in earlier versions, clients add partitions with another request
    begins = answer.request.version >= transactions.ADDING_SINCE
    shards = (session.shards.own,) if begins else ()

    def came(permission: Permission | None) -> None:
        refused = None
        try:
            _let_in(session, permission, answer.request.version, begins=begins)
        except Refused as why:
            refused = why.with_traceback(None)
        Producing(session, answer, request, refused=refused).begin(request.topics)

    release = session.output.pin()
    joining = calling(session, session.shards.shard_by_hash(holder.id), permit, holder, shards, begins=begins)
    call = ShardRequest(session.broker.loop, joining, came, again=True)
    session.work = _Joining(call.cancel, release)


def _holder(session: RoutedKafkaSession, id_: str, topics: Iterable[ProduceRequest.Topics]) -> Holder | None:
    """Return the producer of the first transactional batch for a topic of this shard; None without such a batch."""
    for topic in topics:
        if _is_here(session, topic):
            heads = [head for one in topic.partitions if (head := _transactional(one.records)) is not None]
            if heads:
                return Holder(id_, *heads[0])
    return None


def _is_here(session: RoutedKafkaSession, topic: ProduceRequest.Topics) -> bool:
    broker = session.broker
    found = broker.find_topic(topic.name) if topic.topic_id == NO_ID else broker.topic_of_id(topic.topic_id)
    return found is not None and session.leads(found)


def _transactional(records: Buffer | None) -> tuple[int, int] | None:
    if records is None or len(records) < _HEAD.size:
        return None
    magic, attributes, producer_id, epoch = _HEAD.unpack_from(records)
    return (producer_id, epoch) if magic == _MAGIC and attributes & _TRANSACTIONAL else None


def _is_in(session: RoutedKafkaSession, holder: Holder) -> bool:
    try:
        participant = session.broker.participants.find(holder.id, by=session.caller)
    except BrokerError:
        return True  # the records are rejected later, when they are checked
    if participant is None or not participant.is_open or participant.producer is None:
        return False
    return (participant.producer.id, participant.producer_epoch) == (holder.producer_id, holder.epoch)


def _let_in(session: RoutedKafkaSession, permission: Permission | None, version: int, *, begins: bool) -> None:
    """Open this shard's participant with the coordinator's permission. Raises Refused if the coordinator has not given it.

    ``version`` is the version of the Produce request.
    """
    if permission is None or permission.error in _AGAIN:
        raise Refused(
            WireError.REQUEST_TIMED_OUT,
            "the coordinator of the transactional id cannot add this process to the transaction now (retry)",
        )
    if not begins and permission.error in (WireError.NONE, WireError.INVALID_TXN_STATE):
        raise transactions.not_added(version)
    joined = permission.joined(session.caller)
    try:
        session.broker.participants.enter(joined)
    except BrokerError as error:
        raise Refused(WireError.REQUEST_TIMED_OUT, error.message) from None


_AGAIN: Final = frozenset(
    {WireError.CONCURRENT_TRANSACTIONS, WireError.COORDINATOR_NOT_AVAILABLE, WireError.NOT_COORDINATOR}
)
"""Errors of the coordinator that are replaced by an error after which producers send the records again."""


# Descriptions for tools


def describe_transactions(session: KafkaSession, answer: Answer, request: DescribeTransactionsRequest, /) -> None:
    """Describe ids that this shard coordinates, with the topics of all participating shards."""
    session = routed(session)
    response, own = schema.response(Api.DESCRIBE_TRANSACTIONS), session.shards.own
    names = [id_ for id_ in request.transactional_ids if session.shared.coordinates(id_)]
    by_shard: dict[int, list[str]] = {own: names}
    for id_ in names:
        for shard in session.broker.transactions.shards_of(id_):
            by_shard.setdefault(shard, []).append(id_)

    def joined(found: Bodies) -> DescribeTransactionsResponse:
        ours = found.pop(own)
        by_id = {} if ours is None else {one.transactional_id: one for one in ours.transaction_states}
        participants = (one for body in found.values() if body is not None for one in body.transaction_states)
        for participant in participants:
            if not participant.error and participant.transactional_id in by_id:
                by_id[participant.transactional_id].topics = [
                    *by_id[participant.transactional_id].topics,
                    *participant.topics,
                ]
        lost = WireError.COORDINATOR_NOT_AVAILABLE
        made = response.TransactionStates
        return response(
            transaction_states=[
                by_id.get(id_)
                or made(transactional_id=id_, error=lost if id_ in names else WireError.NOT_COORDINATOR, producer_id=-1)
                for id_ in request.transactional_ids
            ]
        )

    bodies = {shard: changed(request, transactional_ids=ids) for shard, ids in by_shard.items()}
    ask_shards(session, answer, bodies, joined)


TRANSACTION_HANDLERS: Final[Mapping[Api, Handler]] = {
    Api.PRODUCE: produce,
    Api.INIT_PRODUCER_ID: init_producer_id,
    Api.ADD_PARTITIONS_TO_TXN: _at_coordinator(add_partitions, _refused_each),
    Api.ADD_OFFSETS_TO_TXN: _at_coordinator(transactions.add_offsets, _refused),
    Api.TXN_OFFSET_COMMIT: txn_offset_commit,
    Api.END_TXN: _at_coordinator(transactions.end, _refused),
    Api.DESCRIBE_TRANSACTIONS: describe_transactions,
    Api.LIST_TRANSACTIONS: transaction_lists.list_transactions,
}
