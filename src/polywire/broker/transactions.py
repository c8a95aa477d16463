"""Transactions that are open over many requests: records staged one by one, positions of a group, and one atomic end.

Promises: what a transaction holds is journalled in the same group as the staged record, so counts and records agree after any crash; the
records and the positions of a commit become true in one group (decision 0012). Must not know: wires, who is a member of what.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Final

from polywire.broker import changes
from polywire.broker.changes import TransactionState
from polywire.broker.events import CHANGE_BYTES, ENTRY_BYTES
from polywire.broker.owners import ITSELF, NOBODY, UNOWNED, Caller, Owners, heir
from polywire.broker.produce import Admission
from polywire.broker.quotas import NUMBER_BYTES, TRANSACTIONAL_ID_BYTES, Kind
from polywire.broker.settings import BrokerSettings, check_name
from polywire.broker.staged_publish import TOKEN_BYTES, StagedPublish
from polywire.broker.state import State
from polywire.broker.topics import Partition
from polywire.broker.transaction_state import Scope, Transaction
from polywire.clock import ElapsedClock
from polywire.errors import BrokerError, Busy, Conflict, ErrorCode, Missing
from polywire.log.base import NO_OFFSET, Completion, Need, Ranges, Staging
from polywire.types import Buffer, Level

_NO_TOKEN: Final = b""


class Transactions:
    """The transactions of all transactional ids.

    Everything here is synced before it is answered: losing the tail of a transaction in a power cut, and then committing the rest, would tear
    it apart.
    """

    __slots__ = ("_admission", "_clock", "_log", "_owners", "_settings", "_staging", "_state")

    def __init__(
        self,
        log: Staging,
        state: State,
        *,
        admission: Admission,
        staging: StagedPublish,
        settings: BrokerSettings,
        clock: ElapsedClock,
        owners: Owners,
    ) -> None:
        self._log = log
        self._state = state
        self._admission = admission
        self._staging = staging
        self._settings = settings
        self._clock = clock
        self._owners = owners

    def find(self, id_: str, *, by: Caller = NOBODY) -> Transaction | None:
        """The latest transaction of a transactional id, for who may use it; one whose staged records may have expired has aborted.

        Raises Denied(DENIED).
        """
        found = self._state.transactions.find(id_)
        if found is not None:
            self._check_owner(by, found)
        if found is None or not found.is_open or not found.messages:
            return found
        if self._clock.now_us() < found.at_us + self._settings.stage_expiry_us:
            return found
        self.abort(found, done=None)
        return self._state.transactions.find(id_)

    def _check_owner(self, by: Caller, transaction: Transaction) -> None:
        self._owners.check(by, transaction.owner, "transactional_id", transaction.id)

    def begin_epoch(self, id_: str, *, by: Caller = NOBODY, done: Completion[int] | None) -> Transaction:
        """Hold this transactional id: an open transaction of whoever held it before is aborted, and that one fenced.

        Raises Invalid(INVALID_NAME), Denied(DENIED) when it is another user's, Busy(BUSY) when there are too many, Busy(DISK_FULL).
        """
        check_name(id_, self._settings.name_bytes_max)
        self._state.transactions.forget_idle(self._clock.now_us())
        known = self._state.transactions.find(id_)
        if known is not None:
            self._check_owner(by, known)
        else:
            self._state.quotas.admit(Kind.TRANSACTIONAL_IDS, by, TRANSACTIONAL_ID_BYTES + len(id_))
        self._reserve_end(id_)
        if known is not None and known.is_open:
            self._staging.abandon([known.token], by=ITSELF)
        epoch, owner = (0, UNOWNED) if known is None else (known.epoch + 1, known.owner)
        return self._store(id_, epoch, TransactionState.ABORTED, _NO_TOKEN, heir(owner, by), done)

    def visible(self, *, by: Caller) -> list[Transaction]:
        """The transactional ids that somebody may use, each with its latest transaction, by id; not to be changed."""
        found = [known for known in self._state.transactions if self._owners.may_use(by, known.owner)]
        return sorted(found, key=lambda known: known.id)

    def delete(self, id_: str, *, by: Caller = NOBODY, done: Completion[int] | None = None) -> None:
        """Forget a transactional id: its open transaction is aborted, and its epochs count from 0 again.

        Raises Missing(TRANSACTION_MISSING), Denied(DENIED), Busy(DISK_FULL).
        """
        found = self.find(id_, by=by)
        if found is None:
            raise Missing(ErrorCode.TRANSACTION_MISSING, f"no such transactional id id={id_!r}")
        if found.is_open:
            self.abort(found, done=None)
        change = changes.TransactionalIdDeleted(id_)
        self._log.change(changes.encode(change), level=Level.SYNCED, done=done)
        self._state.apply_change(change)

    def begin(self, transaction: Transaction, *, done: Completion[int] | None) -> None:
        """Open a transaction; none is open. Raises Busy(DISK_FULL)."""
        assert not transaction.is_open, "one transaction at a time"
        token = secrets.token_bytes(TOKEN_BYTES)
        self._store(transaction.id, transaction.epoch, TransactionState.OPEN, token, transaction.owner, done)

    def _reserve_end(self, id_: str) -> None:
        """What a transaction staged goes in the group that says how it ended, or not at all. Raises Busy(DISK_FULL)."""
        self._log.reserve(TOKEN_BYTES + len(id_.encode()) + CHANGE_BYTES + 2 * ENTRY_BYTES, need=Need.REMOVAL)

    def _store(
        self, id_: str, epoch: int, state: TransactionState, token: bytes, owner: int, done: Completion[int] | None
    ) -> Transaction:
        change = changes.TransactionalIdStored(id_, epoch, state, token, self._clock.now_us(), owner)
        self._log.change(changes.encode(change), level=Level.SYNCED, done=done)
        self._state.apply_change(change)
        stored = self._state.transactions.find(id_)
        assert stored is not None, "it was just stored"
        return stored

    def stage(
        self,
        transaction: Transaction,
        partition: Partition,
        sequence: int,
        batch: Buffer,
        *,
        done: Completion[int] | None,
    ) -> bool:
        """Hold one record back for the end of an open transaction; False when its sequence is not above the partition's last, which
        makes it a repeat: nothing is staged, and ``done`` follows the original.

        Raises Missing(PARTITION_MISSING), Invalid(INVALID_BATCH, RECORD_TOO_LARGE), Busy(BUSY, STAGE_FULL, DISK_FULL).
        """
        assert transaction.is_open, "records belong to a transaction"
        self._admission.check(partition, batch)
        self._log.reserve(len(batch) + len(transaction.id.encode()) + CHANGE_BYTES + 3 * ENTRY_BYTES)
        if not self._is_current(transaction):
            raise Conflict(ErrorCode.PRODUCER_FENCED, f"the transaction has ended id={transaction.id!r}")
        if sequence <= transaction.sequences.get(partition.incarnation, 0):
            if done is not None:
                self._log.barrier(Level.SYNCED, done)
            return False
        limit = self._settings.transaction_messages_max
        if transaction.messages >= limit:
            raise Busy(ErrorCode.BUSY, f"too many records in one transaction limit={limit}")
        if partition.incarnation not in transaction.sequences:
            self._admit_numbers(transaction, 1)
        now_us = (
            self._clock.now_us()
        )  # before the staging reads the clock: its records outlive ``at_us`` by their whole time
        self._staging.stage(
            transaction.token, partition, batch, by=Caller(None, transaction.owner), level=Level.SYNCED, done=done
        )
        change = changes.TransactionStaged(
            transaction.id, partition.incarnation, sequence, transaction.messages + 1, now_us
        )
        self._log.change(changes.encode(change), level=Level.SYNCED, done=None)
        self._state.apply_change(change)
        return True

    def _admit_numbers(self, transaction: Transaction, count: int) -> None:
        """Let a transaction hold so many numbers more, for the share of whoever owns it. Raises Busy(BUSY)."""
        self._state.quotas.admit(Kind.TRANSACTIONAL_IDS, NOBODY, NUMBER_BYTES * count, count=0, owner=transaction.owner)

    def _is_current(self, transaction: Transaction) -> bool:
        return transaction.is_open and self._state.transactions.find(transaction.id) is transaction

    def put_offsets(
        self, transaction: Transaction, scope: Scope, offsets: Mapping[int, int], *, done: Completion[int] | None
    ) -> None:
        """Commit these next offsets of a group, by partition number, with an open transaction. Raises Busy(BUSY, DISK_FULL)."""
        assert transaction.is_open, "positions belong to a transaction"
        self._admit_numbers(transaction, len(offsets.keys() - transaction.offsets.keys()))
        change = changes.TransactionOffsets(
            id=transaction.id,
            topic=scope.topic,
            group=scope.group,
            member=scope.member,
            generation=scope.generation,
            offsets=dict(offsets),
        )
        self._log.change(changes.encode(change), level=Level.SYNCED, done=done)
        self._state.apply_change(change)

    def abort(self, transaction: Transaction, *, done: Completion[int] | None) -> None:
        """End an open transaction without a trace. Raises Busy(DISK_FULL)."""
        assert transaction.is_open, "there is something to end"
        self._reserve_end(transaction.id)
        self._staging.abandon([transaction.token], by=ITSELF)
        self._store(transaction.id, transaction.epoch, TransactionState.ABORTED, _NO_TOKEN, transaction.owner, done)

    def commit(
        self, transaction: Transaction, positions: changes.PositionsStored | None, *, done: Completion[int] | None
    ) -> None:
        """End an open transaction: its records can be read and the positions are stored, all at once.

        Raises Missing(STAGE_MISSING) when its records have expired, Missing(PARTITION_MISSING) when a partition was deleted since,
        Busy(DISK_FULL); then nothing has happened.
        """
        assert transaction.is_open, "there is something to end"
        change = changes.TransactionCommitted(transaction.id, self._clock.now_us(), (), positions)
        data = changes.encode(change)
        if transaction.messages:
            self._staging.check_staged([transaction.token])

            def published(ranges: Ranges | BrokerError) -> None:
                if done is not None:
                    done(ranges if isinstance(ranges, BrokerError) else NO_OFFSET)

            self._log.publish([transaction.token], data, level=Level.SYNCED, done=published)
            self._staging.forget([transaction.token])
        else:
            self._log.change(data, level=Level.SYNCED, done=done)
        self._state.apply_change(change)
