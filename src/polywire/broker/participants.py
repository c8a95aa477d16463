"""Transactions over several shards: decide their outcome, and apply it in each shard (decision 0129).

Each transaction has one coordinator shard, which alone decides its outcome. Every shard that stores records or offsets
of the transaction has a *participant*: an open local transaction with the same token. Only the coordinator's decision
(commit or abort) ends a participant. The coordinator stores which shards have a participant before the participants
begin. The coordinator retains its decision until all participants have applied it.

* A decision is durable before it is sent, and comes only from the leader of the coordinator shard.
* A participant is neither ended nor dropped before the coordinator has decided.
* Applying a decision is idempotent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from typing import Final, Protocol

import msgspec

from polywire.broker import changes
from polywire.broker.changes import TransactionalProducer, TransactionDecided, TransactionState
from polywire.broker.events import CHANGE_BYTES, ENTRY_BYTES
from polywire.broker.owners import ITSELF, Caller
from polywire.broker.quotas import TRANSACTIONAL_ID_BYTES, Kind
from polywire.broker.staging import TOKEN_BYTES, StagedPublish
from polywire.broker.state import State
from polywire.broker.transaction_state import OPEN, PARTICIPANT, Transaction
from polywire.broker.transactions import Transactions
from polywire.clock import ElapsedClock
from polywire.errors import BrokerError, Busy, Conflict, ErrorCode
from polywire.log.base import Completion, Loop, Need, Staging
from polywire.types import Level

AGAIN_S: Final = 0.1  # seconds before a decision is sent again; doubled with each attempt
AGAIN_S_MAX: Final = 5.0
# seconds to wait until all shards have applied the outcome of an id, before its next transaction is rejected
NEXT_S: Final = 2.0
# seconds for which a response waits until all shards have applied the outcome; after that, it is sent anyway
SETTLED_S: Final = 5.0
LOOK_S: Final = 5.0  # seconds between two checks for participants that have been open for a long time
# after this time, a participant asks its coordinator for the outcome; normally the coordinator sends it earlier
DOUBT_US: Final = 10_000_000
# tokens of ended participants to remember, because a permission to participate may arrive after the end
ENDED_MAX: Final = 10_000


class Shards(Protocol):
    """Sends requests to other shards. A callback is never called before the method has returned."""

    def end_participant(self, shard: int, decided: TransactionDecided, then: Callable[[bool], None]) -> None:
        """Send the decision on a transaction to a participating shard.

        ``then`` is called with whether that shard has durably applied the decision.
        """

    def ask_coordinator(self, participant: Transaction, then: Callable[[bool | None], None]) -> None:
        """Ask the coordinator of a transaction for its outcome.

        ``then`` is called with True for commit, False for abort, and None if the transaction is open or the coordinator
        cannot be reached.
        """


class Joined(msgspec.Struct, frozen=True):
    """A coordinator's permission for another shard to participate in a transaction.

    Attributes:
        id: transactional id.
        coordinator: shard of the coordinator.
        token: identifies the transaction's uncommitted records.
        epoch: epoch of the transactional id.
        producer: the Kafka producer that uses the id, None for other protocols.
        owner: number of the user who owns the id, in the process of the participant.
    """

    id: str
    coordinator: int
    token: bytes
    epoch: int
    producer: TransactionalProducer | None
    owner: int


class Latest(msgspec.Struct, frozen=True):
    """The latest transaction of a transactional id, as its coordinator reports it to another shard.

    Attributes:
        token: identifies the transaction's uncommitted records.
        has_producer: whether the transactional id belongs to a producer with a producer id.
    """

    epoch: int
    state: TransactionState
    token: bytes
    has_producer: bool

    @property
    def is_open(self) -> bool:
        """Whether the transaction is in progress."""
        return self.state in OPEN


def _latest(transaction: Transaction) -> Latest:
    return Latest(transaction.epoch, transaction.state, transaction.token, transaction.has_producer)


def _nothing() -> None:
    pass


def _ended(_: int | BrokerError) -> None:
    pass


class Participants:
    """Two-phase commit of transactions over several shards, both as coordinator and as participant."""

    __slots__ = (
        "_clock",
        "_ended",
        "_in_flight",
        "_is_stopped",
        "_log",
        "_loop",
        "_shards",
        "_staging",
        "_state",
        "_transactions",
        "_waiting",
    )

    def __init__(
        self,
        log: Staging,
        state: State,
        transactions: Transactions,
        staging: StagedPublish,
        *,
        clock: ElapsedClock,
        loop: Loop,
    ) -> None:
        self._log = log
        self._state = state
        self._transactions = transactions
        self._staging = staging
        self._clock = clock
        self._loop = loop
        self._shards: Shards | None = None
        # by token of a decision: shards that have not confirmed it yet
        self._in_flight: dict[bytes, set[int]] = {}
        # tokens of participants that this process ended, oldest first; a permission may arrive after the end and must
        # not reopen the participant
        self._ended: dict[bytes, None] = {}
        self._waiting: dict[str, list[Callable[[], None]]] = {}
        self._is_stopped = False

    def begin(self, shards: Shards, is_coordinator: Callable[[str], bool]) -> None:
        """Resume the transactions that were open or being decided when the broker stopped.

        Call it before clients connect. If the number of shards has changed, another shard may coordinate a
        transactional id now. Open transactions of such ids are aborted.

        Args:
            is_coordinator: returns whether this shard coordinates a transactional id.
        """
        self._shards = shards
        self._transactions.on_decided(self._send_decisions)
        self._loop.call_soon(self._abort_moved, is_coordinator)
        self._loop.call_soon(self._send_decisions)
        self._loop.call_soon(self._ask_coordinators, 0)

    def stop(self) -> None:
        """Stop sending decisions."""
        self._is_stopped = True

    def _abort_moved(self, is_coordinator: Callable[[str], bool]) -> None:
        for known in self._transactions.visible(by=ITSELF):
            if known.is_open and not is_coordinator(known.id) and not self._is_stopped:
                with suppress(Busy):  # the disk is full: retried later
                    self._transactions.abort(known, raises_epoch=True, done=None)

    # Coordinator

    def join(self, transaction: Transaction, shards: Collection[int], *, done: Completion[int]) -> None:
        """Let shards participate in an open transaction. They may store its records only after ``done`` was called.

        Raises Busy(DISK_FULL).
        """
        assert transaction.is_open, "only an open transaction gets participants"
        assert not transaction.is_participant, "it is ours"
        added = tuple(shard for shard in shards if shard not in transaction.shards)
        if not added:
            self._log.barrier(Level.SYNCED, done)
            return
        change = changes.TransactionJoined(transaction.id, added)
        self._log.change(changes.encode(change), level=Level.SYNCED, done=done)
        self._state.apply_change(change)

    def is_deciding(self, id_: str) -> bool:
        """Return whether some shards have not confirmed the outcome of this id's last transaction."""
        return self._state.transactions.is_deciding(id_)

    def when_settled(self, id_: str, then: Callable[[], None]) -> Callable[[], None]:
        """Call ``then`` once all shards have confirmed the outcome of this id's last transaction.

        Return a function that cancels the call.
        """
        if not self.is_deciding(id_):
            self._loop.call_soon(then)
            return _nothing
        waiting = self._waiting.setdefault(id_, [])
        waiting.append(then)

        def cancel() -> None:
            if then in waiting:
                waiting.remove(then)

        return cancel

    def once_settled(self, id_: str, then: Callable[[], None], limit_s: float) -> None:
        """Call ``then`` once all shards have confirmed the outcome of this id's last transaction, or after ``limit_s``
        seconds.
        """
        is_waiting = True

        def end() -> None:
            nonlocal is_waiting
            if is_waiting:
                is_waiting = False
                cancel()
                timer.cancel()
                then()

        cancel = self.when_settled(id_, end)
        timer = self._loop.call_later(limit_s, end)

    def when_visible(self, id_: str, done: Completion[int]) -> Completion[int]:
        """Return a callback that calls ``done`` once all shards show the transaction's outcome, or after ``SETTLED_S``.

        The client may then read the records that it committed from any shard.
        """

        def stored(result: int | BrokerError) -> None:
            if isinstance(result, BrokerError) or not self.is_deciding(id_):
                done(result)
            else:
                self.once_settled(id_, partial(done, result), SETTLED_S)

        return stored

    def join_epoch(self, id_: str, epoch: int, shard: int, *, by: Caller, then: Completion[Latest | None]) -> None:
        """Let a shard participate in the open transaction of an epoch, for protocols without producer ids.

        ``then`` is called with the id's latest transaction, or with None if the caller has no such id. The shard
        participates if this transaction is open, has the given epoch, and has no producer id. ``then`` is called with
        Busy(BUSY) if other shards have yet to apply the previous transaction's outcome, and with other errors of
        ``join``.
        """
        if self.is_deciding(id_):
            self.once_settled(id_, partial(self._join_epoch, id_, epoch, shard, by, then), NEXT_S)
        else:
            self._join_epoch(id_, epoch, shard, by, then)

    def _join_epoch(self, id_: str, epoch: int, shard: int, by: Caller, then: Completion[Latest | None]) -> None:
        if self.is_deciding(id_):
            then(Busy(ErrorCode.BUSY, f"the previous transaction has not ended in all processes (retry) id={id_!r}"))
            return
        found = self._transactions.find(id_, by=by)
        if found is None or not found.is_open or found.epoch != epoch or found.has_producer:
            then(None if found is None else _latest(found))
            return
        token = found.token

        def joined(result: int | BrokerError) -> None:
            latest = self._transactions.find(id_, by=by)
            if isinstance(result, BrokerError):
                then(result)
            elif latest is None or latest.token != token:
                then(Conflict(ErrorCode.PRODUCER_FENCED, f"the transaction has ended id={id_!r}"))
            else:
                then(_latest(latest))

        try:
            self.join(found, (shard,), done=joined)
        except BrokerError as error:
            then(error)

    def outcome(self, id_: str, token: bytes, then: Callable[[bool | BrokerError | None], None]) -> None:
        """Call ``then`` with True if a transaction commits, False if it was aborted, and None while it is open.

        A transaction without a known decision was aborted. Before reporting this, the shard writes to its journal to
        make sure that it still is the leader. Raises Busy(DISK_FULL).
        """

        def known(commits: bool, result: int | BrokerError) -> None:
            then(result if isinstance(result, BrokerError) else commits)

        decided = self._state.transactions.decisions.get(token)
        if decided is not None:
            self._log.barrier(Level.SYNCED, partial(known, decided.commits))
            return
        found = self._state.transactions.find(id_)
        if found is not None and found.is_open and found.token == token:
            self._loop.call_soon(then, None)
            return
        self._prove(token, partial(known, False))

    def _prove(self, token: bytes, done: Completion[int]) -> None:
        """Write to the journal to make sure that this process still leads the shard.

        ``done`` gets an error if it does not. The entry says that ``token`` has no open transaction. Raises
        Busy(DISK_FULL).
        """
        change = changes.TransactionSettled(token)
        self._log.change(changes.encode(change), level=Level.SYNCED, done=done)
        self._state.apply_change(change)

    def _send_decisions(self) -> None:
        for token, decided in self._state.transactions.decisions.items():
            if token not in self._in_flight:
                self._in_flight[token] = set(decided.shards)
                self._log.barrier(Level.SYNCED, partial(self._decision_written, decided))

    def _decision_written(self, decided: TransactionDecided, result: int | BrokerError) -> None:
        """Send a decision to the participants once it is durable. If its write failed, do nothing."""
        if not isinstance(result, BrokerError):
            for shard in decided.shards:
                self._send_decision(decided, shard, AGAIN_S)

    def _send_decision(self, decided: TransactionDecided, shard: int, again_s: float) -> None:
        if self._shards is not None and not self._is_stopped:
            self._shards.end_participant(shard, decided, partial(self._decision_applied, decided, shard, again_s))

    def _decision_applied(self, decided: TransactionDecided, shard: int, again_s: float, has_applied: bool, /) -> None:
        """Handle a participant's response to a decision.

        If the participant has not applied the decision, send it again after ``again_s`` seconds.
        """
        if self._is_stopped:
            return
        if not has_applied:
            self._loop.call_later(again_s, self._send_decision, decided, shard, min(2 * again_s, AGAIN_S_MAX))
            return
        left = self._in_flight[decided.token]
        left.discard(shard)
        if not left:
            self._record_applied(decided)

    def _record_applied(self, decided: TransactionDecided) -> None:
        """Store that all participants have applied a decision.

        If a crash loses this entry, the decision is sent again.
        """
        if self._is_stopped:
            return
        change = changes.TransactionSettled(decided.token)
        try:
            self._log.change(changes.encode(change), level=Level.WRITTEN, done=None)
        except Busy:  # the disk is full
            self._loop.call_later(AGAIN_S_MAX, self._record_applied, decided)
            return
        except BrokerError:  # storage has failed: the process that leads next sends the decision again
            return
        self._state.apply_change(change)
        del self._in_flight[decided.token]
        if not self.is_deciding(decided.id):
            for then in tuple(self._waiting.pop(decided.id, ())):
                then()

    # Participant

    def find(self, id_: str, *, by: Caller = ITSELF) -> Transaction | None:
        """Return this shard's part of a transaction that another shard coordinates, or None.

        Raises Denied(DENIED) if the caller may not use the transactional id.
        """
        return self._transactions.find(PARTICIPANT + id_, by=by)

    def enter(self, joined: Joined) -> Transaction:
        """Open this shard's part of a transaction and return it. If it is already open, return it.

        An open part of an earlier transaction of this id is aborted. Raises Conflict(PRODUCER_FENCED) if the
        transaction has ended, Busy(DISK_FULL), and Busy(BUSY) if there are too many participants or another coordinator
        has not yet ended the earlier transaction.
        """
        name = PARTICIPANT + joined.id
        known = self._state.transactions.find(name)
        if known is not None and known.is_open and known.token == joined.token:
            return known
        self._check_current(joined, known)
        if known is None:
            size = TRANSACTIONAL_ID_BYTES + len(name)
            self._state.quotas.admit(Kind.TRANSACTIONAL_IDS, Caller(None, joined.owner), size)
        self._log.reserve(TOKEN_BYTES + len(name.encode()) + CHANGE_BYTES + 2 * ENTRY_BYTES, need=Need.CHANGE)
        if known is not None and known.is_open:
            self._staging.abandon([known.token], by=ITSELF)
        change = changes.TransactionalIdStored(
            name,
            joined.epoch,
            TransactionState.SHARED,
            joined.token,
            self._clock.now_us(),
            joined.owner,
            joined.producer,
            joined.coordinator,
        )
        self._log.change(changes.encode(change), level=Level.WRITTEN, done=None)
        self._state.apply_change(change)
        made = self._state.transactions.find(name)
        assert made is not None, "it was just stored"
        return made

    def _check_current(self, joined: Joined, known: Transaction | None) -> None:
        """Raise Conflict(PRODUCER_FENCED) or Busy(BUSY) if a transaction has ended before its permission arrived."""
        is_late = joined.token in self._ended
        if known is not None and known.coordinator == joined.coordinator:
            # if a deleted id is used again, its epochs restart at 0, but it gets a new producer id
            is_same = (
                known.producer is not None and joined.producer is not None and known.producer.id == joined.producer.id
            )
            is_late = is_late or (is_same and known.epoch > joined.epoch) or self._transactions.is_ending(known)
        elif known is not None and known.is_open:
            raise Busy(ErrorCode.BUSY, f"another coordinator has yet to end the transaction id={joined.id!r}")
        if is_late:
            raise Conflict(ErrorCode.PRODUCER_FENCED, f"the transaction has ended id={joined.id!r}")

    def end(self, id_: str, token: bytes, *, commits: bool, done: Completion[int]) -> None:
        """Commit or abort this shard's part of a transaction, as its coordinator decided.

        A repeated call has no effect. If no part is open, an earlier call has ended it. Before calling ``done``, the
        shard then writes to its journal, to make sure that it still is the leader. After a BrokerError the coordinator
        must send the decision again.
        """
        participant = self.find(id_)
        if participant is None or not participant.is_open or participant.token != token:
            self._remember_ended(token)
            self._prove(token, done)
        elif commits:
            self._transactions.commit(participant, by=Caller(None, participant.owner), level=Level.SYNCED, done=done)
            self._remember_ended(token)
        else:
            self._transactions.abort(participant, level=Level.SYNCED, done=done)
            self._remember_ended(token)

    def _remember_ended(self, token: bytes) -> None:
        self._ended[token] = None
        if len(self._ended) > ENDED_MAX:
            del self._ended[next(iter(self._ended))]

    def _ask_coordinators(self, doubt_us: int) -> None:
        """Ask the coordinators of participants that have been open for at least ``doubt_us`` for the outcome."""
        if self._is_stopped or self._shards is None:
            return
        latest_us = self._clock.now_us() - doubt_us
        for name in list(self._state.transactions.open):
            participant = self._state.transactions.find(name)
            if participant is not None and participant.is_participant and participant.began_at_us <= latest_us:
                self._shards.ask_coordinator(participant, partial(self._apply_answer, name, participant.token))
        self._loop.call_later(LOOK_S, self._ask_coordinators, DOUBT_US)

    def _apply_answer(self, name: str, token: bytes, commits: bool | None, /) -> None:
        """Commit or abort a participant as its coordinator decided. None means that the transaction is still open."""
        participant = self._state.transactions.find(name)
        if (
            commits is None
            or self._is_stopped
            or participant is None
            or participant.token != token
            or not participant.is_open
        ):
            return
        with suppress(BrokerError):  # the coordinator is asked again
            self.end(name.removeprefix(PARTICIPANT), token, commits=commits, done=_ended)
