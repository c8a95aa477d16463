"""Commands of transactions, such as BEGIN_TXN, TXN_PUBLISH and END_TXN (spec: cursus#transactions).

All reasons to refuse a commit are checked before anything is published. Ending a transaction again in the same way
succeeds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Final

from polywire.broker.changes import TransactionState
from polywire.broker.permissions import Action
from polywire.broker.topics import Partition, Topic
from polywire.broker.transaction_state import HeldOffsets, Scope, Transaction
from polywire.errors import BrokerError, Busy, Conflict, Denied, ErrorCode, Invalid, Missing
from polywire.protocols.cursus.groups import TRANSACTION_KEYS, GroupRequest
from polywire.protocols.cursus.messages import Refused, Request, encoded, integer, quote, topic_word
from polywire.protocols.cursus.offsets import check_offsets, read_pairs
from polywire.protocols.cursus.policies import policy_of
from polywire.protocols.cursus.produce import ProducerSpan, find_partition
from polywire.protocols.cursus.publish import one_record
from polywire.protocols.cursus.session import Command, CursusSession, Reply
from polywire.types import KeyHash, Level

FENCED: Final = "producer_fenced"
_NOT_COMMITTED: Final = (Invalid, Missing, Busy, Conflict, Denied)
_SEQUENCE_MAX: Final = 2**63 - 1
_LIST_FAULTS: Final = frozenset(
    {"invalid_batch_commit_entry", "invalid_partition", "invalid_offset", "duplicate_partition"}
)


def producer_of(transactional_id: str) -> str:
    return f"txn-{sha256(encoded(transactional_id)).digest()[:8].hex()}"


def _name(request: Request) -> str:
    name = next((request.options[key] for key in TRANSACTION_KEYS if request.options.get(key)), "")
    if not name:
        raise Refused("missing_transactional_id", f"command={request.name}")
    return name


@dataclass(frozen=True, slots=True)
class TransactionRequest:
    """A request that changes a transaction, with its transactional id, producer id and epoch."""

    session: CursusSession
    request: Request
    name: str
    epoch: int

    @classmethod
    def read(cls, session: CursusSession, request: Request) -> TransactionRequest:
        name = _name(request)
        request.need("producerId")
        epoch = integer(request.need("epoch"))
        if epoch is None or epoch < 0:
            raise Refused("invalid_epoch", f"command={request.name}")
        return cls(session, request, name, epoch)

    def transaction(self, failure: str) -> Transaction:
        """Return the transaction. The producer and the epoch of the request must be current.

        Raises Refused ``transaction_not_found``. For a fenced producer, raises Refused ``failure`` with the word by
        which clients detect fencing.
        """
        found = _find(self.session, self.name)
        producer = self.request.options["producerId"]
        # a holder with a producer id has used another protocol
        if self.epoch != found.epoch or found.producer is not None:
            facts = f"transactional_id={self.name} current_epoch={found.epoch} requested_epoch={self.epoch}"
            if failure == FENCED:
                raise Refused(FENCED, facts)
            raise Refused(failure, f"reason={quote(f'producer fenced {facts}')} hint={FENCED}")
        if producer != producer_of(self.name):
            facts = f"transactional_id={self.name} expected={producer_of(self.name)} got={producer}"
            raise Refused(failure, f"reason={quote(f'producer mismatch {facts}')}")
        return found

    def opened(self, failure: str) -> Transaction:
        """Return the transaction. Raises Refused ``failure`` if it is not open."""
        found = self.transaction(failure)
        if not found.is_open:
            raise Refused(failure, f"reason={quote(f'transaction {self.name} is {found.state.value}')}")
        return found


def _find(session: CursusSession, name: str) -> Transaction:
    found = session.state.local.transactions.find(name, by=session.caller)
    if found is None:
        raise Refused("transaction_not_found", f"reason={quote(f'transaction {name} not found')}")
    return found


def begin_epoch(session: CursusSession, request: Request, /) -> Reply | None:
    """Handle INIT_PRODUCER_ID: begin an epoch.

    It fences producers with earlier epochs and aborts their open transactions.
    """
    name = _name(request)
    answer = session.later(request.dialect, blocking=True)
    try:
        transaction = session.state.local.transactions.begin_epoch(
            name, epoch_min=session.epoch_min, by=session.caller, done=answer.done
        )
    except (Invalid, Busy) as error:
        raise Refused("init_producer_failed", f"reason={quote(error.message)}") from None
    answer.body = encoded(f"OK transactional_id={name} producerId={producer_of(name)} epoch={transaction.epoch}")
    return None


def begin(session: CursusSession, request: Request, /) -> Reply | None:
    """Handle BEGIN_TXN.

    It may follow an earlier transaction of the epoch, and may be repeated until something is staged.
    """
    asked = TransactionRequest.read(session, request)
    transaction = asked.transaction("transaction_begin_failed")
    if transaction.is_open and (transaction.messages or transaction.positions):
        raise Refused("producer_reinitialization_required", f"transactional_id={asked.name} epoch={asked.epoch}")
    answer = session.later(request.dialect, blocking=True)
    answer.body = encoded(
        f"OK transactional_id={asked.name} state=open producerId={producer_of(asked.name)} epoch={asked.epoch}"
    )
    if transaction.is_open:
        session.state.local.settle(Level.SYNCED, answer.done)
    else:
        session.state.local.transactions.begin(transaction, done=answer.done)
    return None


def publish(session: CursusSession, request: Request, /) -> Reply | None:
    """Handle TXN_PUBLISH: stage a record. If its partition already has the sequence, the record is a repeat."""
    name = _name(request)
    request.need("topic")
    asked = TransactionRequest.read(session, request)
    sequence = integer(request.options.get("seqNum", ""))
    if sequence is None or not 1 <= sequence <= _SEQUENCE_MAX:
        raise Refused("invalid_seq_num", f"command={request.name} reason={quote('seqNum must be greater than zero')}")
    message = session.state.guard.payload(request)
    if message is None:
        raise Refused("missing_message", f"command={request.name}")
    topic = _writable(session, request.options["topic"])
    key = encoded(request.options.get("key", ""))
    partition = _partition(session, request, topic, key, sequence)
    transaction = asked.opened("transaction_publish_failed")
    run = ProducerSpan(0, 1, encoded(request.options["producerId"]), asked.epoch, sequence, checked=False)
    answer = session.later(request.dialect, blocking=True)
    answer.body = encoded(
        f"OK transactional_id={name} staged_messages=1 topic={topic_word(topic.name.full)} partition={partition.number}"
    )
    try:
        batch = one_record(key, message, run)
        session.state.local.transactions.stage(
            transaction, partition, batch, first=sequence, last=sequence, done=answer.done
        )
    except (Invalid, Missing, Conflict, Busy) as error:
        raise Refused("transaction_publish_failed", f"reason={quote(error.message)}") from None
    return None


def _writable(session: CursusSession, name: str) -> Topic:
    if name.startswith("__"):
        raise Refused("internal_topic_write_forbidden", f"topic={topic_word(name)}")
    topic = session.state.local.find_topic(name)
    if topic is None:
        raise Refused("topic_not_found", f"topic={topic_word(name)}")
    session.state.guard.admit_topic(session, topic, Action.PRODUCE)
    return topic


def _partition(session: CursusSession, request: Request, topic: Topic, key: bytes, sequence: int) -> Partition:
    """Return the partition that is named, or else one that is chosen by key or sequence.

    Sequences select the partitions in turn, so a repeat gets the same partition as the original.
    """
    given = request.options.get("partition", "-1")
    number = integer(given)
    if number is None or number < -1:
        raise Refused("invalid_partition", f"command={request.name}")
    if number >= 0:
        return find_partition(topic, number)
    if key and policy_of(topic).partitioner == "hash_key":
        return session.state.local.partition_of_key(topic, key, KeyHash.FNV64)
    return topic.partitions[(sequence - 1) % len(topic.partitions)]


def send_offsets(session: CursusSession, request: Request, /) -> Reply | None:
    """Handle SEND_OFFSETS_TO_TXN for a member of a group.

    The member's generation is checked now and again at the commit.
    """
    asked = TransactionRequest.read(session, request)
    within = _group_request(session, request)
    pairs = _pairs(request, within)
    transaction = asked.opened("transaction_offsets_failed")
    scope = Scope(within.topic, within.group, within.member, -1 if within.generation is None else within.generation)
    _check(within, pairs)
    held = transaction.positions.get(scope, HeldOffsets())
    for other in transaction.positions:
        if other != scope:
            reason = f"transaction {asked.name} holds offsets of group={other.group} topic={topic_word(other.topic)}"
            raise Refused("transaction_offsets_failed", f"reason={quote(reason)}")
    for partition, offset in pairs.items():
        staged = held.offsets.get(partition, offset)
        if offset < staged:
            raise _failed_offsets(_regression(within, partition, staged, offset))
    answer = session.later(request.dialect, blocking=True)
    answer.body = encoded(f"OK transactional_id={asked.name} staged_offsets={len(pairs)}")
    session.state.local.transactions.put_offsets(transaction, scope, pairs, done=answer.done)
    return None


def _group_request(session: CursusSession, request: Request) -> GroupRequest:
    topic, group, member = (request.need(key) for key in ("topic", "group", "member"))
    generation = integer(request.need("generation"))
    if generation is None or generation < 0:
        raise Refused("invalid_generation", f"command={request.name}")
    found = session.state.local.find_topic(topic)
    if found is None:
        raise Refused("topic_not_found", f"topic={topic_word(topic)}")
    session.state.guard.admit_topic(session, found, Action.OFFSET_COMMIT)
    return GroupRequest(session, topic, group, member, generation)


def _pairs(request: Request, within: GroupRequest) -> dict[int, int]:
    if all("=" in word for word in request.words):
        raise Refused("invalid_txn_offsets", 'reason="missing offset pairs"')
    try:
        return read_pairs(request, within.group, within.topic)
    except Refused as error:
        if error.code not in _LIST_FAULTS:
            raise
        raise Refused("invalid_txn_offsets", f"reason={quote(str(error))}") from None


def _check(within: GroupRequest, pairs: Mapping[int, int]) -> None:
    try:
        check_offsets(within, pairs, _regression)
    except Refused as error:
        if error.code == "offset_regression":
            raise Refused("transaction_offsets_failed", error.facts) from None
        raise


def _regression(within: GroupRequest, partition: int, current: int, got: int) -> str:
    return (
        f"transaction offset regression group={within.group} topic={topic_word(within.topic)} partition={partition}"
        f" current={current} got={got}"
    )


def _failed_offsets(reason: str) -> Refused:
    return Refused("transaction_offsets_failed", f"reason={quote(reason)}")


def end(session: CursusSession, request: Request, /) -> Reply | None:
    """Handle END_TXN: commit or abort. A repeated request gets the same response."""
    asked = TransactionRequest.read(session, request)
    result = request.options.get("result", "commit").lower()
    if result not in ("commit", "abort"):
        raise Refused("invalid_transaction_result", f"value={request.options['result']}")
    transaction = asked.transaction(FENCED)
    if result == "abort":
        return _abort(asked, transaction)
    if transaction.state is TransactionState.ABORTED:
        raise Refused("transaction_aborted", f"transactional_id={asked.name}")
    return _commit(asked, transaction)


def _abort(asked: TransactionRequest, transaction: Transaction) -> Reply | None:
    if transaction.state is TransactionState.COMMITTED:
        raise Refused("transaction_already_committed", f"transactional_id={asked.name}")
    answer = asked.session.later(asked.request.dialect, blocking=True)
    answer.body = encoded(f"OK transactional_id={asked.name} state=aborted")
    broker = asked.session.state.local
    if transaction.is_open:
        broker.transactions.abort(transaction, done=answer.done)
    else:
        broker.settle(Level.SYNCED, answer.done)
    return None


def _commit(asked: TransactionRequest, transaction: Transaction) -> Reply | None:
    broker = asked.session.state.local
    counts = f"messages={transaction.messages} offsets={transaction.position_count}"
    refusals: list[Refused] = []
    if transaction.is_open:
        _check_rights(asked, transaction)
    answer = asked.session.later(asked.request.dialect, blocking=True)
    answer.body = encoded(f"OK transactional_id={asked.name} state=committed {counts}")
    if not transaction.is_open:
        broker.settle(Level.SYNCED, answer.done)
        return None

    def confirm() -> None:
        try:
            _check_member(asked, transaction)
        except Refused as refused:
            refusals.append(refused)
            raise Conflict(ErrorCode.GENERATION_STALE, str(refused)) from None

    def done(result: int | BrokerError) -> None:
        if refusals:
            answer.refuse(refusals[0])
        elif isinstance(result, _NOT_COMMITTED):
            answer.refuse(_failed_commit(result))
        else:
            answer.done(result)

    try:
        broker.transactions.commit(transaction, by=asked.session.caller, confirm=confirm, done=done)
    except BrokerError as error:
        raise (refusals or [_failed_commit(error)])[0] from None
    return None


def _check_rights(asked: TransactionRequest, transaction: Transaction) -> None:
    state = asked.session.state
    for topic in state.local.transactions.topics(transaction):
        state.guard.admit_topic(asked.session, topic, Action.PRODUCE)
    for scope in transaction.positions:
        state.guard.admit_topic(asked.session, state.local.resource(scope.topic), Action.OFFSET_COMMIT)


def _check_member(asked: TransactionRequest, transaction: Transaction) -> None:
    for scope, held in transaction.positions.items():
        _check(GroupRequest(asked.session, scope.topic, scope.group, scope.member, scope.generation), held.offsets)


def _failed_commit(error: BrokerError) -> Refused:
    return Refused("transaction_commit_failed", f"state=open reason={quote(error.message)}")


def status(session: CursusSession, request: Request, /) -> Reply:
    name = _name(request)
    found = _find(session, name)
    state = TransactionState.ABORTED if found.state is TransactionState.EMPTY else found.phase
    return encoded(
        f"OK transactional_id={name} state={state.value} messages={found.messages} offsets={found.position_count}"
    )


COMMANDS: Final = (
    Command("INIT_PRODUCER_ID", begin_epoch, (Action.TRANSACTION,)),
    Command("BEGIN_TXN", begin, (Action.TRANSACTION,)),
    Command("TXN_PUBLISH", publish, (Action.TRANSACTION, Action.PRODUCE)),
    Command("SEND_OFFSETS_TO_TXN", send_offsets, (Action.TRANSACTION, Action.OFFSET_COMMIT)),
    Command("END_TXN", end, (Action.TRANSACTION,)),
    Command("TXN_STATUS", status, (Action.TRANSACTION,)),
)
