"""Commands of transactions, such as BEGIN_TXN, TXN_PUBLISH and END_TXN (spec: cursus#transactions).

All reasons to refuse a commit are checked before anything is published. Ending a transaction again in the same way
succeeds.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Final, NamedTuple, cast

import msgspec

from polywire.broker.changes import TransactionState
from polywire.broker.owners import ITSELF, Caller
from polywire.broker.participants import Joined, Latest
from polywire.broker.permissions import Action
from polywire.broker.topics import Partition, Topic
from polywire.broker.transaction_state import HeldOffsets, Scope, Transaction
from polywire.errors import BrokerError, Busy, Conflict, Denied, ErrorCode, Invalid, Missing, Unavailable
from polywire.protocols.cursus.context import TRANSACTIONS, CursusParts, CursusState
from polywire.protocols.cursus.groups import TRANSACTION_KEYS, GroupRequest
from polywire.protocols.cursus.messages import Dialect, Refused, Request, encoded, integer, quote, topic_word
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


class TransactionRequest(msgspec.Struct, frozen=True):
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
        """Return the transaction, in the shard that coordinates it.

        Raises Refused ``transaction_not_found``. For a fenced producer, raises Refused ``failure`` with the word by
        which clients detect fencing.
        """
        found = _find(self.session, self.name)
        self._check_current(found, failure)
        return found

    def _check_current(self, found: Transaction | Latest, failure: str) -> None:
        producer = self.request.options["producerId"]
        # a transaction with a producer id belongs to another protocol
        if self.epoch != found.epoch or found.has_producer:
            facts = f"transactional_id={self.name} current_epoch={found.epoch} requested_epoch={self.epoch}"
            if failure == FENCED:
                raise Refused(FENCED, facts)
            raise Refused(failure, f"reason={quote(f'producer fenced {facts}')} hint={FENCED}")
        if producer != producer_of(self.name):
            facts = f"transactional_id={self.name} expected={producer_of(self.name)} got={producer}"
            raise Refused(failure, f"reason={quote(f'producer mismatch {facts}')}")

    def opened(self, failure: str) -> Transaction:
        """Return the open transaction or, if another shard coordinates it, this shard's part of it.

        Raises Refused ``failure`` if it is not open, and the same errors as ``transaction``. Raises Pending until the
        coordinator has added this shard.
        """
        parts = self.session.state.parts
        if parts is None or parts.shards.shard_by_hash(self.name) == parts.shards.own:
            found: Transaction | Latest = _find(self.session, self.name)
        else:
            found = self._participant(parts, failure)
        self._check_current(found, failure)
        if not found.is_open:
            raise Refused(failure, f"reason={quote(f'transaction {self.name} is {found.state.value}')}")
        assert isinstance(found, Transaction), "the coordinator has added this shard, because the epoch is current"
        return found

    def _participant(self, parts: CursusParts, failure: str) -> Transaction | Latest:
        """Return this shard's part of the transaction, or the coordinator's transaction if this shard cannot
        participate.
        """
        participants, by = self.session.state.local.participants, self.session.caller
        known = participants.find(self.name, by=by)
        if known is not None and known.is_open and known.epoch == self.epoch and not known.has_producer:
            return known
        try:
            latest = parts.join_epoch(self.name, self.epoch, by=by)
            if latest is None:
                raise _not_found(self.name)
            if not latest.is_open or latest.epoch != self.epoch or latest.has_producer:
                return latest
            coordinator = parts.shards.shard_by_hash(self.name)
            return participants.enter(Joined(self.name, coordinator, latest.token, latest.epoch, None, by.owner))
        except (Busy, Conflict, Unavailable) as error:
            raise Refused(failure, f"reason={quote(error.message)}") from None


def _find(session: CursusSession, name: str) -> Transaction:
    found = session.state.local.transactions.find(name, by=session.caller)
    if found is None:
        raise _not_found(name)
    return found


def _not_found(name: str) -> Refused:
    return Refused("transaction_not_found", f"reason={quote(f'transaction {name} not found')}")


def begin_epoch(session: CursusSession, request: Request, /) -> Reply | None:
    """INIT_PRODUCER_ID: begin a new epoch of a transactional id.

    It fences producers with earlier epochs and aborts their open transactions.
    """
    name = _name(request)
    broker, epoch_min = session.state.local, _epoch_min(session, name)
    answer = session.later(request.dialect, blocking=True)
    try:
        done = broker.participants.when_visible(name, answer.done)
        transaction = broker.transactions.begin_epoch(name, epoch_min=epoch_min, by=session.caller, done=done)
    except (Invalid, Busy) as error:
        raise Refused("init_producer_failed", f"reason={quote(error.message)}") from None
    answer.body = encoded(f"OK transactional_id={name} producerId={producer_of(name)} epoch={transaction.epoch}")
    return None


def _epoch_min(session: CursusSession, name: str) -> int:
    """Return the lowest epoch that a transactional id may get next: one above its epochs in all shards.

    If the number of shards has changed, another shard may have coordinated the id. Raises Pending.
    """
    parts = session.state.parts
    if parts is None or session.state.local.transactions.find(name, by=ITSELF) is not None:
        return 0
    epochs: list[int] = [parts.call_part(shard, TRANSACTIONS, last_epoch, name) for shard in _others(parts)]
    return 1 + max(epochs)


def last_epoch(state: CursusState, name: str) -> int:
    """Return the last epoch of a transactional id that this shard knows, -1 if it does not know the id."""
    known = state.local.transactions.find(name, by=ITSELF)
    return -1 if known is None else known.epoch


def _others(parts: CursusParts) -> list[int]:
    return [shard for shard in range(parts.shards.count) if shard != parts.shards.own]


def begin(session: CursusSession, request: Request, /) -> Reply | None:
    """BEGIN_TXN: begin a transaction.

    It may follow an earlier transaction of the epoch, and may be repeated until the transaction has a record.
    """
    asked = TransactionRequest.read(session, request)
    transaction = asked.transaction("transaction_begin_failed")
    if transaction.is_open and (transaction.messages or transaction.positions or transaction.shards):
        raise Refused("producer_reinitialization_required", f"transactional_id={asked.name} epoch={asked.epoch}")
    if session.state.local.participants.is_deciding(asked.name):
        reason = f"the previous transaction of {asked.name} has not ended in all processes (retry)"
        raise Refused("transaction_begin_failed", f"reason={quote(reason)}")
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
    """TXN_PUBLISH: add a record to the transaction.

    If the transaction already has a record with this sequence number in the partition, the new one is ignored and the
    reply is the same.
    """
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
    """Return the partition in the request, or else one that is chosen by key or sequence number.

    Successive sequence numbers select the partitions in turn, so a duplicate gets the same partition as the original.
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
    """SEND_OFFSETS_TO_TXN: add offsets of a group to the transaction.

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
    """END_TXN: commit or abort. A repeated request gets the same response."""
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
    visible = broker.participants.when_visible(asked.name, answer.done)
    if transaction.is_open:
        broker.transactions.abort(transaction, done=visible)
    else:
        broker.settle(Level.SYNCED, visible)
    return None


def _commit(asked: TransactionRequest, transaction: Transaction) -> Reply | None:
    broker = asked.session.state.local
    refusals: list[Refused] = []
    if transaction.is_open:
        _check_rights(asked, transaction)
    counts = _counts(asked.session, transaction, checks=transaction.is_open)
    answer = asked.session.later(asked.request.dialect, blocking=True)
    answer.body = encoded(f"OK transactional_id={asked.name} state=committed {counts}")
    visible = broker.participants.when_visible(asked.name, answer.done)
    if not transaction.is_open:
        broker.settle(Level.SYNCED, visible)
        return None

    def confirm() -> None:
        try:
            _check_member(asked.session, transaction)
        except Refused as refused:
            refusals.append(refused)
            raise Conflict(ErrorCode.GENERATION_STALE, str(refused)) from None

    def done(result: int | BrokerError) -> None:
        if refusals:
            answer.refuse(refusals[0])
        elif isinstance(result, _NOT_COMMITTED):
            answer.refuse(_failed_commit(result))
        else:
            visible(result)

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


def _check_member(session: CursusSession, transaction: Transaction) -> None:
    for scope, held in transaction.positions.items():
        _check(GroupRequest(session, scope.topic, scope.group, scope.member, scope.generation), held.offsets)


class Staged(NamedTuple):
    """The part of a transaction in one shard.

    Attributes:
        records, offsets: numbers of its records and offsets.
        refusal: why the shard refuses the commit: code and facts.
    """

    records: int = 0
    offsets: int = 0
    refusal: tuple[str, str] | None = None


class _Client(msgspec.Struct, frozen=True):
    """User and address of a client of another process, to check its group membership."""

    state: CursusState
    caller: Caller
    spoken: Dialect | None


def staged(state: CursusState, name: str, token: bytes, *, checks: bool, dialect: Dialect | None, by: Caller) -> Staged:
    """Return the numbers of records and offsets that this shard, as a participant, has stored for a transaction.

    If ``checks``, check that the client may commit it. This is the last check, because the outcome is decided in
    another shard.
    """
    found = state.local.participants.find(name, by=by)
    if found is None or found.token != token:
        return Staged()
    try:
        if checks:
            _check_participant(state, found, by)
            _check_member(cast(CursusSession, _Client(state, by, dialect)), found)
    except Refused as refused:
        return Staged(refusal=(refused.code, refused.facts))
    return Staged(found.messages, found.position_count)


def _check_participant(state: CursusState, participant: Transaction, by: Caller) -> None:
    for topic in state.local.transactions.topics(participant):
        if not state.local.access.permits(by.principal, Action.PRODUCE, topic):
            raise Refused("NOT_AUTHORIZED_FOR_TOPIC", f"operation=write topic={topic_word(topic.name.full)}")


def _counts(session: CursusSession, transaction: Transaction, *, checks: bool = False) -> str:
    """Return the numbers of the transaction's records and offsets in all shards.

    If ``checks``, the other shards check that they can be committed. Raises Refused if they cannot, and Pending until
    all shards have responded.
    """
    records, offsets, parts = transaction.messages, transaction.position_count, session.state.parts
    if parts is not None:
        committed = transaction.state is TransactionState.COMMITTED
        for shard in _others(parts) if committed else transaction.shards:
            found: Staged = parts.call_part(
                shard,
                TRANSACTIONS,
                staged,
                transaction.id,
                transaction.token,
                checks=checks,
                dialect=session.spoken,
                by=session.caller,
            )
            if found.refusal is not None:
                raise Refused(*found.refusal)
            records, offsets = records + found.records, offsets + found.offsets
    return f"messages={records} offsets={offsets}"


def _failed_commit(error: BrokerError) -> Refused:
    return Refused("transaction_commit_failed", f"state=open reason={quote(error.message)}")


def status(session: CursusSession, request: Request, /) -> Reply:
    name = _name(request)
    found = _find(session, name)
    state = TransactionState.ABORTED if found.state is TransactionState.EMPTY else found.phase
    return encoded(f"OK transactional_id={name} state={state.value} {_counts(session, found)}")


COMMANDS: Final = (
    Command("INIT_PRODUCER_ID", begin_epoch, (Action.TRANSACTION,)),
    Command("BEGIN_TXN", begin, (Action.TRANSACTION,)),
    Command("TXN_PUBLISH", publish, (Action.TRANSACTION, Action.PRODUCE)),
    Command("SEND_OFFSETS_TO_TXN", send_offsets, (Action.TRANSACTION, Action.OFFSET_COMMIT)),
    Command("END_TXN", end, (Action.TRANSACTION,)),
    Command("TXN_STATUS", status, (Action.TRANSACTION,)),
)
