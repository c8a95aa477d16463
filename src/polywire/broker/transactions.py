"""Transactions over many requests: their records and consumer offsets are committed or aborted atomically.

A record of an open transaction and the transaction's updated state are written to the journal together, so they agree
after any crash. A commit makes records and offsets visible in one atomic journal write (decision 0111).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Final

import msgspec

from polywire.broker import changes
from polywire.broker.changes import TransactionalProducer, TransactionState
from polywire.broker.events import CHANGE_BYTES, ENTRY_BYTES
from polywire.broker.groups.commits import NO_NOTES, Commits
from polywire.broker.owners import ITSELF, NO_CALLER, UNOWNED, Caller, Owners, next_owner
from polywire.broker.quotas import NUMBER_BYTES, TRANSACTIONAL_ID_BYTES, Kind
from polywire.broker.record_verbs import Admission
from polywire.broker.settings import BrokerSettings, check_name
from polywire.broker.sliced import OrderedWork, Steps
from polywire.broker.staging import TOKEN_BYTES, StagedPublish
from polywire.broker.state import State
from polywire.broker.topics import Partition, Topic
from polywire.broker.transaction_state import PRODUCER_EPOCHS, HeldOffsets, Scope, Transaction, is_participant, level_of
from polywire.clock import ElapsedClock
from polywire.errors import BrokerError, Busy, Conflict, Denied, ErrorCode, Missing
from polywire.log.base import NO_OFFSET, Completion, Loop, Need, Publication, Ranges, Staging
from polywire.records.fields import header_fields
from polywire.types import Buffer, Level, PositionKind

NO_EPOCH: Final = -1
CHECKED_MAX: Final = 1_000  # open transactions to check for a timeout per pass
BATCHES_AT_ONCE_MAX: Final = 500  # larger transactions are committed in slices; this many batches take a millisecond
NUMBER_ENTRY_BYTES: Final = 9  # largest size of a number in a change
_NO_TOKEN: Final = b""
_record_count: Final = header_fields("record_count")


class _Ending(msgspec.Struct, eq=False):
    """A commit in progress.

    Attributes:
        waiting: completions of the callers that wait for the commit.
        is_over: the commit was cancelled.
    """

    waiting: list[Completion[int]]
    publication: Publication | None = None
    is_over: bool = False

    def notify(self, result: int | BrokerError) -> None:
        for done in self.waiting:
            done(result)


def _nothing() -> None:
    pass


def _drops_deleted(transaction: Transaction) -> bool:
    """Return whether a commit ignores records of deleted partitions, because it must not fail."""
    return transaction.producer is not None or transaction.is_participant


def _published(done: Completion[int], ranges: Ranges | BrokerError) -> None:
    done(ranges if isinstance(ranges, BrokerError) else NO_OFFSET)


class Transactions:
    """Begins, commits and aborts the transactions of all transactional ids.

    By default everything is synced before it is acknowledged: if a power failure lost the last part of a transaction, a
    commit of the other part would break atomicity. A producer may request less durability. Its open transactions are
    then aborted at the broker's next start. A transaction with participants in several shards is always synced
    (decision 0129). In participating shards, ``Participants`` ends it.

    Args:
        work: the queue in which large commits run.
    """

    __slots__ = (
        "_admission",
        "_clock",
        "_commits",
        "_endings",
        "_left_open",
        "_log",
        "_loop",
        "_new_producer_id",
        "_on_decided",
        "_owners",
        "_settings",
        "_staging",
        "_state",
        "_unchecked",
        "_work",
    )

    def __init__(
        self,
        log: Staging,
        state: State,
        *,
        admission: Admission,
        staging: StagedPublish,
        commits: Commits,
        settings: BrokerSettings,
        clock: ElapsedClock,
        owners: Owners,
        new_producer_id: Callable[[], int],
        loop: Loop,
        work: OrderedWork,
    ) -> None:
        self._log = log
        self._loop = loop
        self._work = work
        # commits in progress, by transactional id; a commit is cancelled before its transaction changes in another way
        self._endings: dict[str, _Ending] = {}
        self._state = state
        self._admission = admission
        self._staging = staging
        self._commits = commits
        self._settings = settings
        self._clock = clock
        self._owners = owners
        self._new_producer_id = new_producer_id
        self._unchecked: list[str] = []
        self._on_decided: Callable[[], None] = _nothing
        # tokens of transactions to abort, because their data may be lost
        self._left_open = {
            known.token
            for known in state.transactions
            if known.is_open and known.producer is not None and not known.producer.synced
        }

    def on_decided(self, notify: Callable[[], None]) -> None:
        """Call ``notify`` whenever a transaction over several shards has been committed or aborted here.

        It is called before the call that ended the transaction returns.
        """
        self._on_decided = notify

    # Transactional ids

    def find(self, id_: str, *, by: Caller = NO_CALLER) -> Transaction | None:
        """Return the latest transaction of a transactional id, or None.

        A transaction that has timed out is aborted first.

        An id of another user is treated as missing.
        """
        found = self._state.transactions.find(id_)
        if found is None or not self._owners.may_use(by, found.owner):
            return None
        if not self._has_timed_out(found):
            return found
        self.abort(found, raises_epoch=found.producer is not None, done=None)
        return self._state.transactions.find(id_)

    def _has_timed_out(self, transaction: Transaction) -> bool:
        """Return whether an open transaction has timed out, or its uncommitted records may have expired or been lost."""
        if not transaction.is_open or transaction.is_participant or transaction.id in self._endings:
            return False
        now_us, producer = self._clock.now_us(), transaction.producer
        may_have_staged = bool(transaction.messages or transaction.shards)
        if may_have_staged and now_us >= transaction.at_us + self._settings.stage_expiry_us:
            return True
        if producer is None:
            return False
        return now_us >= transaction.began_at_us + producer.timeout_us or transaction.token in self._left_open

    def abort_late(self) -> None:
        """Abort transactions that have timed out. Each call checks some of them. Raises Busy(DISK_FULL)."""
        if not self._unchecked:
            self._unchecked = list(self._state.transactions.open)
        for id_ in self._unchecked[:CHECKED_MAX]:
            self.find(id_, by=ITSELF)
        del self._unchecked[:CHECKED_MAX]

    def _check_owner(self, by: Caller, transaction: Transaction) -> None:
        self._owners.check(by, transaction.owner, "transactional_id", transaction.id)

    def begin_epoch(
        self, id_: str, *, epoch_min: int = 0, by: Caller = NO_CALLER, done: Completion[int] | None
    ) -> Transaction:
        """Begin a new epoch of a transactional id, which fences its previous producer.

        The id's open transaction is aborted. Raises Invalid(INVALID_NAME), Denied(DENIED) for another user's id,
        Busy(BUSY) if there are too many ids, Busy(DISK_FULL).

        Args:
            epoch_min: minimum for the new epoch, for an id that had later epochs in another shard.
        """
        known = self._admit_holder(id_, by)
        epoch, owner = (0, UNOWNED) if known is None else (known.epoch + 1, known.owner)
        epoch = max(epoch, epoch_min)
        return self._store(
            Transaction(id_, epoch, TransactionState.ABORTED, _NO_TOKEN, 0, owner=next_owner(owner, by)), done
        )

    def number_producer(
        self,
        id_: str,
        *,
        asks_again: bool,
        timeout_us: int,
        level: Level = Level.SYNCED,
        is_internal: bool = False,
        by: Caller = NO_CALLER,
        done: Completion[int] | None,
    ) -> Transaction:
        """Begin a new epoch for a Kafka producer (InitProducerId), which fences the previous producer of this id.

        The producer id stays the same until its epochs are used up. Raises the same errors as ``begin_epoch``.

        Args:
            asks_again: the request has the id's current or previous epoch. A retry of such a request gets the same new
                epoch again.
            level: durability of the result and of the transaction's records.
            is_internal: the id is one of the broker's own.
        """
        known = self._admit_holder(id_, by, is_internal=is_internal)
        made = Transaction(id_, 0, TransactionState.EMPTY, _NO_TOKEN, 0, owner=by.owner)
        kept_at = level if known is None else level_of(known, level)
        if known is not None:
            made.epoch, made.producer, made.owner = known.epoch, known.producer, next_owner(known.owner, by)
            self._raise_epoch(made, asked_by_holder=asks_again)
        number, first, asked = self._new_producer_id(), made.epoch, NO_EPOCH
        if made.producer is not None:
            number, first, asked = made.producer.id, made.producer.first_epoch, made.producer.asked_epoch
        made.producer = TransactionalProducer(number, first, asked, timeout_us, level >= Level.SYNCED)
        return self._store(made, done, kept_at)

    def _raise_epoch(self, transaction: Transaction, *, asked_by_holder: bool) -> None:
        """Begin the next epoch, with a new producer id if the current one has no epochs left."""
        producer, last = transaction.producer, transaction.epoch
        transaction.epoch = last + 1
        if producer is None:
            return
        number, first = producer.id, producer.first_epoch
        if transaction.producer_epoch >= PRODUCER_EPOCHS:
            number, first = self._new_producer_id(), transaction.epoch
        asked = last if asked_by_holder else NO_EPOCH
        transaction.producer = TransactionalProducer(number, first, asked, producer.timeout_us, producer.synced)

    def _admit_holder(self, id_: str, by: Caller, *, is_internal: bool = False) -> Transaction | None:
        """Check that a caller may begin a new epoch of an id, and abort the id's open transaction.

        Returns the transaction, or None if the id is new. Raises Invalid(INVALID_NAME), Denied(DENIED) for another
        user's id, Busy(BUSY) if there are too many ids, Busy(DISK_FULL).
        """
        check_name(id_, self._settings.name_bytes_max)
        self._state.transactions.check_reserved(id_, is_internal=is_internal)
        self._state.transactions.forget_idle(self._clock.now_us())
        known = self._state.transactions.find(id_)
        if known is not None:
            self._check_owner(by, known)
        else:
            self._state.quotas.admit(Kind.TRANSACTIONAL_IDS, by, TRANSACTIONAL_ID_BYTES + len(id_))
        self._reserve_end(id_)
        self._break_off(id_)
        if known is not None and known.is_open:
            self._staging.abandon([known.token], by=ITSELF)
        return known

    def visible(self, *, by: Caller, participants: bool = False) -> list[Transaction]:
        """Return the transactional ids that the caller may use, sorted, with their latest transactions.

        The caller must not change these objects.

        Args:
            participants: include transactions that other shards coordinate.
        """
        known, may_use = self._state.transactions, self._owners.may_use
        found = [one for one in known if (participants or not is_participant(one.id)) and may_use(by, one.owner)]
        return sorted(found, key=lambda known: known.id)

    def delete(self, id_: str, *, by: Caller = NO_CALLER, done: Completion[int] | None = None) -> None:
        """Delete a transactional id and abort its open transaction. If the id is used again, epochs restart at 0.

        Raises Busy(DISK_FULL), and Missing(TRANSACTION_MISSING) if it does not exist or belongs to another user.
        """
        found = None if is_participant(id_) else self.find(id_, by=by)
        if found is None:
            raise Missing(ErrorCode.TRANSACTION_MISSING, f"no such transactional id id={id_!r}")
        if found.is_open:
            self.abort(found, done=None)
        change = changes.TransactionalIdDeleted(id_)
        self._log.change(changes.encode(change), level=Level.SYNCED, done=done)
        self._state.apply_change(change)

    def _store(
        self, transaction: Transaction, done: Completion[int] | None, level: Level = Level.SYNCED
    ) -> Transaction:
        change = self._change_of(transaction)
        self._log.change(changes.encode(change), level=level, done=done)
        self._apply_end(change)
        stored = self._state.transactions.find(transaction.id)
        assert stored is not None, "it was just stored"
        return stored

    def _apply_end(self, change: changes.TransactionalIdStored | changes.TransactionCommitted) -> None:
        self._state.apply_change(change)
        if self._state.transactions.decisions:
            self._on_decided()

    def _change_of(self, transaction: Transaction) -> changes.TransactionalIdStored:
        return changes.TransactionalIdStored(
            transaction.id,
            transaction.epoch,
            transaction.state,
            transaction.token,
            self._clock.now_us(),
            transaction.owner,
            transaction.producer,
            transaction.coordinator,
        )

    # One transaction

    def begin(
        self, transaction: Transaction, *, level: Level = Level.SYNCED, done: Completion[int] | None
    ) -> Transaction:
        """Begin a transaction. The id must not have an open one. Raises Busy(DISK_FULL)."""
        assert not transaction.is_open, "one transaction at a time"
        assert not transaction.is_participant, "a participant is begun by Participants.enter"
        made = replace(transaction, state=TransactionState.OPEN, token=secrets.token_bytes(TOKEN_BYTES))
        return self._store(made, done, level)

    def add_partitions(
        self, transaction: Transaction, partitions: Collection[Partition], *, level: Level, done: Completion[int] | None
    ) -> None:
        """Add partitions to a producer's transaction. Begins one if none is open.

        Raises Busy(BUSY, DISK_FULL).
        """
        added = [
            partition.incarnation for partition in partitions if partition.incarnation not in transaction.partitions
        ]
        self._admit_partitions(transaction, transaction.partitions, len(added))
        size = len(transaction.id.encode()) + NUMBER_ENTRY_BYTES * len(added)
        self._log.reserve(2 * size + 2 * CHANGE_BYTES + 2 * ENTRY_BYTES, need=Need.CHANGE)
        if not transaction.is_open:
            self.begin(transaction, level=level, done=None)
        change = changes.TransactionPartitions(transaction.id, tuple(added))
        self._log.change(changes.encode(change), level=level, done=done)
        self._state.apply_change(change)

    def _admit_partitions(self, transaction: Transaction, held: Collection[int], count: int) -> None:
        limit = self._settings.transaction_partitions_max
        if count and len(held) + count > limit:
            raise Busy(ErrorCode.BUSY, f"too many partitions in transactions of one epoch limit={limit}")
        self._admit_numbers(transaction, count)

    def _reserve_end(self, id_: str) -> None:
        """Reserve space in the log for the entry that will end a transaction and delete its uncommitted records.

        Raises Busy(DISK_FULL).
        """
        self._log.reserve(TOKEN_BYTES + len(id_.encode()) + CHANGE_BYTES + 2 * ENTRY_BYTES, need=Need.REMOVAL)

    def stage(
        self,
        transaction: Transaction,
        partition: Partition,
        batch: Buffer,
        *,
        first: int,
        last: int,
        level: Level = Level.SYNCED,
        done: Completion[int] | None,
    ) -> bool:
        """Store a batch of an open transaction, with these sequence numbers. Return False if it is a duplicate.

        In both cases ``done`` is called once the batch has reached ``level``. Raises Missing(PARTITION_MISSING),
        Invalid(INVALID_BATCH, RECORD_TOO_LARGE, SEQUENCE_GAP), Busy(BUSY, STAGE_FULL, DISK_FULL).
        """
        assert transaction.is_open, "records belong to a transaction"
        self._admission.check(partition, batch)
        self._log.reserve(len(batch) + len(transaction.id.encode()) + CHANGE_BYTES + 3 * ENTRY_BYTES)
        self._check_current(transaction)
        if transaction.repeats(partition.incarnation, first=first, last=last):
            if done is not None:
                self._log.barrier(level, done)
            return False
        limit = self._settings.transaction_batches_max
        if transaction.batches >= limit:
            raise Busy(ErrorCode.BUSY, f"too many batches in one transaction limit={limit}")
        added = [held for held in (transaction.sequences, transaction.partitions) if partition.incarnation not in held]
        for held in added:
            self._admit_partitions(transaction, held, 1)
        level = level_of(transaction, level)
        now_us = (
            self._clock.now_us()
        )  # read the clock before staging does, so that the records expire later than ``at_us`` suggests
        self._staging.stage(
            transaction.token,
            partition,
            batch,
            by=Caller(None, transaction.owner),
            level=level,
            done=done,
            expires=not transaction.is_participant,
        )
        (count,) = _record_count(batch)
        change = changes.TransactionStaged(
            transaction.id, partition.incarnation, last, transaction.messages + count, now_us
        )
        self._log.change(changes.encode(change), level=level, done=None)
        self._state.apply_change(change)
        return True

    def _admit_numbers(self, transaction: Transaction, count: int, size: int = 0) -> None:
        """Raise Busy(BUSY) if the quota of a transaction's owner does not permit ``count`` more numbers and ``size``
        bytes.
        """
        size += NUMBER_BYTES * count
        self._state.quotas.admit(Kind.TRANSACTIONAL_IDS, NO_CALLER, size, count=0, owner=transaction.owner)

    def _check_current(self, transaction: Transaction) -> None:
        """Raise Conflict(PRODUCER_FENCED) if a transaction has ended, or its commit has begun."""
        found = self._state.transactions.find(transaction.id)
        if found is not transaction or not found.is_open or found.id in self._endings:
            raise Conflict(ErrorCode.PRODUCER_FENCED, f"the transaction has ended id={transaction.id!r}")

    def put_offsets(
        self,
        transaction: Transaction,
        scope: Scope,
        offsets: Mapping[int, int],
        *,
        notes: Mapping[int, tuple[int, str]] = NO_NOTES,
        by: Caller = NO_CALLER,
        level: Level = Level.SYNCED,
        done: Completion[int] | None,
    ) -> None:
        """Add a group's next offsets, by partition number, to an open transaction, which will commit them.

        Raises Invalid(INVALID_NAME, INVALID_REQUEST), Denied(DENIED) for another user's group, Busy(BUSY, DISK_FULL).

        Args:
            scope: group, topic and member.
            notes: leader epoch and metadata of some of the offsets.
        """
        assert transaction.is_open, "positions belong to a transaction"
        self._check_current(transaction)
        if _drops_deleted(transaction):  # check now, so that the commit is not refused later
            self._stored(transaction, scope, HeldOffsets(dict(offsets), dict(notes)), by)
        held = transaction.positions.get(scope)
        added = len(offsets) if held is None else len(offsets.keys() - held.offsets.keys())
        limits = self._settings
        if transaction.position_count + added > limits.transaction_positions_max:
            raise Busy(ErrorCode.BUSY, f"too many offsets in one transaction limit={limits.transaction_positions_max}")
        if held is None and len(transaction.positions) >= limits.transaction_scopes_max:
            raise Busy(
                ErrorCode.BUSY, f"too many groups and topics in one transaction limit={limits.transaction_scopes_max}"
            )
        level = level_of(transaction, level)
        self._admit_numbers(transaction, added, sum([len(metadata) for _, metadata in notes.values()]))
        change = changes.TransactionOffsets(
            id=transaction.id,
            topic=scope.topic,
            group=scope.group,
            member=scope.member,
            generation=scope.generation,
            offsets=dict(offsets),
            notes=dict(notes),
        )
        self._log.change(changes.encode(change), level=level, done=done)
        self._state.apply_change(change)

    def topics(self, transaction: Transaction) -> Collection[Topic]:
        """Return the existing topics that a transaction writes to."""
        found = map(self._state.catalog.find_partition, transaction.partitions or transaction.sequences)
        return {partition.topic.id: partition.topic for partition in found if partition is not None}.values()

    def shards_of(self, id_: str) -> Collection[int]:
        """Return other shards that may participate in the open transaction of an id."""
        found = self._state.transactions.find(id_)
        return () if found is None else tuple(found.shards)

    def undecided(self, group: str, topic: str) -> Set[int]:
        """Return the partitions of a topic for which open transactions contain offsets of a group."""
        found: set[int] = set()
        for transaction in self._state.transactions.moving(group):
            if not self._has_timed_out(transaction):
                scopes = transaction.positions.items()
                found.update(*[held.offsets for scope, held in scopes if (scope.group, scope.topic) == (group, topic)])
        return found

    def abort(
        self,
        transaction: Transaction,
        *,
        raises_epoch: bool = False,
        by_holder: bool = False,
        level: Level = Level.SYNCED,
        done: Completion[int] | None,
    ) -> Transaction:
        """Abort the open transaction, if there is one. Raises Busy(DISK_FULL).

        Args:
            raises_epoch: begin a new epoch, too.
            by_holder: whether the producer with the current epoch requested the abort. If not, that producer must
                request the new epoch before it can continue.
        """
        assert transaction.is_open or raises_epoch, "an abort needs an open transaction or a new epoch"
        self._reserve_end(transaction.id)
        self._break_off(transaction.id)
        if transaction.is_open:
            self._staging.abandon([transaction.token], by=ITSELF)
        made = replace(transaction, state=TransactionState.ABORTED, token=_NO_TOKEN)
        if raises_epoch:
            self._raise_epoch(made, asked_by_holder=by_holder)
        return self._store(made, done, level_of(transaction, level))

    def is_ending(self, transaction: Transaction) -> bool:
        """Return whether a commit of this transaction is in progress."""
        return transaction.id in self._endings

    def commit(
        self,
        transaction: Transaction,
        *,
        by: Caller = NO_CALLER,
        confirm: Callable[[], None] = _nothing,
        raises_epoch: bool = False,
        level: Level = Level.SYNCED,
        done: Completion[int],
    ) -> None:
        """Commit an open transaction: its records become readable and its offsets are stored, atomically.

        A large transaction is prepared in several passes of the loop first. Meanwhile it can be aborted, and repeated
        requests wait for the same result. If a partition or topic was deleted, a transaction with a producer id drops
        the records for it. Any other transaction is not committed.

        Args:
            confirm: called immediately before the step that commits. It may raise an error to prevent the commit.
            raises_epoch: begin a new epoch, which the producer uses next.

        After an error nothing has changed. These errors are raised, or passed to ``done``: Missing(STAGE_MISSING) if
        the records have expired; Missing(PARTITION_MISSING) if a partition was deleted; Busy(DISK_FULL); errors of
        ``confirm``; Invalid, Denied, Missing(MEMBER_MISSING) or Busy(BUSY) if the offsets must not be stored;
        Conflict(PRODUCER_FENCED) if the transaction was aborted meanwhile.
        """
        assert transaction.is_open, "only an open transaction can be committed"
        level = level_of(transaction, level)
        ending = self._endings.get(transaction.id)
        if ending is not None:
            ending.waiting.append(done)
        elif transaction.batches <= BATCHES_AT_ONCE_MAX:
            confirm()
            self._publish(transaction, [transaction.token], by=by, raises_epoch=raises_epoch, level=level, done=done)
        else:
            self._endings[transaction.id] = ending = _Ending([done])
            publish = partial(self._publish, by=by, raises_epoch=raises_epoch, level=level)
            self._work.put(self._committing(transaction, ending, confirm, publish))

    def _committing(
        self, transaction: Transaction, ending: _Ending, confirm: Callable[[], None], publish: Callable[..., None]
    ) -> Steps:
        """Yield the steps of a large commit. If the transaction is aborted meanwhile, nothing is committed."""
        if ending.is_over:
            return
        publication = ending.publication = self._log.prepare()
        try:
            for _ in publication.add([transaction.token]):
                yield False
                if ending.is_over:
                    return
            yield False
            if ending.is_over:
                return
            confirm()
            publish(transaction, publication, done=ending.notify)
        except BrokerError as error:
            publication.cancel()
            self._loop.call_soon(ending.notify, error)
        del self._endings[transaction.id]

    def _break_off(self, id_: str) -> None:
        """Cancel the commit of a transaction that is about to be aborted."""
        ending = self._endings.pop(id_, None)
        if ending is not None:
            ending.is_over = True
            if ending.publication is not None:
                ending.publication.cancel()
            fenced = Conflict(ErrorCode.PRODUCER_FENCED, f"the transaction was aborted before its commit id={id_!r}")
            self._loop.call_soon(ending.notify, fenced)

    def _publish(
        self,
        transaction: Transaction,
        staged: Sequence[bytes] | Publication,
        *,
        by: Caller,
        raises_epoch: bool,
        level: Level,
        done: Completion[int],
    ) -> None:
        positions = tuple(self._positions(transaction, by))
        raised = self._raised(transaction) if raises_epoch else None
        change = changes.TransactionCommitted(transaction.id, self._clock.now_us(), (), None, positions, raised)
        data = changes.encode(change)
        if transaction.messages:
            if not _drops_deleted(transaction):
                self._staging.check_not_deleted(transaction.sequences)
            self._log.publish(staged, data, level=level, done=partial(_published, done))
            self._staging.forget([transaction.token])
        else:
            self._log.change(data, level=level, done=done)
        self._apply_end(change)

    def _raised(self, transaction: Transaction) -> changes.TransactionalIdStored:
        """Return the transactional id's next state, for a commit that begins an epoch."""
        made = replace(transaction, state=TransactionState.COMMITTED, token=_NO_TOKEN)
        self._raise_epoch(made, asked_by_holder=True)
        return self._change_of(made)

    def _positions(self, transaction: Transaction, by: Caller) -> Iterator[changes.PositionsStored]:
        for scope, held in transaction.positions.items():
            if not _drops_deleted(transaction) or self._state.catalog.find(scope.topic) is not None:
                with (
                    suppress(Denied) if transaction.is_participant else nullcontext()
                ):  # skip the offsets of a group that belongs to another user by now, because the decision is final
                    yield self._stored(transaction, scope, held, by)

    def _stored(self, transaction: Transaction, scope: Scope, held: HeldOffsets, by: Caller) -> changes.PositionsStored:
        return self._commits.stored(
            scope.topic,
            held.offsets,
            PositionKind.GROUP,
            scope.group,
            notes=held.notes,
            generation=max(scope.generation, -1),
            by=by,
            of_classic=_drops_deleted(transaction),
        )
