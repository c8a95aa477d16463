"""Transactions that several shards have parts of: the branches here of what is decided elsewhere, and what is decided here for others
(decision 0079).

A transaction is at home in one shard, which alone decides how it ends. Every shard that has records or positions of it has a *branch*: an
open transaction of the broker's own, staged under the same token, which nothing ends but what its home has decided. Home keeps which shards
may have one before they do, and the decision until all of them have followed.

Promises: what a shard was told lasts, and comes from who leads the shard that tells it; a branch is neither ended nor forgotten before its
home has decided; every end may be told again. Must not know: wires, how shards are reached, who has which transactional id.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from polywire.broker import changes
from polywire.broker.changes import TransactionalProducer, TransactionDecided, TransactionState
from polywire.broker.events import CHANGE_BYTES, ENTRY_BYTES
from polywire.broker.owners import ITSELF, Caller
from polywire.broker.quotas import TRANSACTIONAL_ID_BYTES, Kind
from polywire.broker.staged_publish import TOKEN_BYTES, StagedPublish
from polywire.broker.state import State
from polywire.broker.transaction_state import BRANCH, Transaction
from polywire.broker.transactions import Transactions
from polywire.clock import ElapsedClock
from polywire.errors import BrokerError, Busy, Conflict, ErrorCode
from polywire.log.base import Completion, Loop, Need, Staging
from polywire.types import Level

AGAIN_S: Final = 0.1  # before a shard that did not follow is told again, doubled each time
AGAIN_S_MAX: Final = 5.0
LOOK_S: Final = 5.0  # between two looks at branches that are open for long
DOUBT_US: Final = 10_000_000  # that a branch is open before its home is asked: it tells by itself
ENDED_MAX: Final = 10_000  # branches that are remembered to have ended, for a permission that comes later than the end


class Shards(Protocol):
    """The other shards. Nothing is called from inside a call."""

    def end_branch(self, shard: int, decided: TransactionDecided, then: Callable[[bool], None]) -> None:
        """Have a shard follow a decision; tells whether it has, for good."""

    def ask_home(self, branch: Transaction, then: Callable[[bool | None], None]) -> None:
        """Ask the home of a branch how it ended; tells whether it commits, None while that is open or nobody answers."""


@dataclass(frozen=True, slots=True)
class Joined:
    """What home lets a shard stage for. token: what the parts of this transaction are staged under. epoch: of the transactional id."""

    id: str
    home: int
    token: bytes
    epoch: int
    producer: TransactionalProducer
    owner: int


def _nothing() -> None:
    """Nobody waits."""


def _ended(_: int | BrokerError) -> None:
    """Home tells again where it did not work."""


class Branches:
    """Both sides of one shard.

    Invariant: ``_told`` are the decisions that are on their way, with the shards that have yet to follow; ``_ended`` the tokens of branches
    that were ended by this process, the oldest first: whoever was let in before, and is heard of after, must not open one again.
    """

    __slots__ = (
        "_clock",
        "_ended",
        "_is_stopped",
        "_log",
        "_loop",
        "_shards",
        "_staging",
        "_state",
        "_told",
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
        self._told: dict[bytes, set[int]] = {}
        self._ended: dict[bytes, None] = {}
        self._waiting: dict[str, list[Callable[[], None]]] = {}
        self._is_stopped = False

    def begin(self, shards: Shards, is_home: Callable[[str], bool]) -> None:
        """There are others: go on with what was decided, and ask for what is open. Called once, before anybody is served.

        is_home: whether a transactional id is at home here. One that was when there were fewer shards is not: what it has open nobody ends.
        """
        self._shards = shards
        self._transactions.on_decided(self._tell_all)
        self._loop.call_soon(self._abort_moved, is_home)
        self._loop.call_soon(self._tell_all)
        self._loop.call_soon(self._look, 0)

    def stop(self) -> None:
        """Tell nobody any more."""
        self._is_stopped = True

    def _abort_moved(self, is_home: Callable[[str], bool]) -> None:
        """Abort what is open of numbered producers that look for another home now."""
        for known in self._transactions.visible(by=ITSELF):
            if known.is_open and known.producer is not None and not is_home(known.id) and not self._is_stopped:
                with suppress(Busy):  # the disk is full: it takes its time
                    self._transactions.abort(known, raises_epoch=True, done=None)

    # At home

    def join(self, transaction: Transaction, shards: Collection[int], *, done: Completion[int]) -> None:
        """Let shards have branches of an open transaction of ours, once that is synced and before they stage. Raises Busy(DISK_FULL)."""
        assert transaction.is_open, "it has not ended"
        assert not transaction.is_branch, "it is ours"
        added = tuple(shard for shard in shards if shard not in transaction.shards)
        if not added:
            self._log.barrier(Level.SYNCED, done)
            return
        change = changes.TransactionJoined(transaction.id, added)
        self._log.change(changes.encode(change), level=Level.SYNCED, done=done)
        self._state.apply_change(change)

    def is_deciding(self, id_: str) -> bool:
        """Whether some shard may not have followed yet how a transaction of this id has ended."""
        return self._state.transactions.is_deciding(id_)

    def when_settled(self, id_: str, then: Callable[[], None]) -> Callable[[], None]:
        """Call back once all shards have followed; returns what makes that unwanted."""
        if not self.is_deciding(id_):
            self._loop.call_soon(then)
            return _nothing
        waiting = self._waiting.setdefault(id_, [])
        waiting.append(then)

        def cancel() -> None:
            if then in waiting:
                waiting.remove(then)

        return cancel

    def outcome(self, id_: str, token: bytes, then: Callable[[bool | BrokerError | None], None]) -> None:
        """How a transaction of ours has ended, for a shard that has a branch: whether it commits, None while it is open. What is known of no
        decision has aborted, and is said by who can still store. Raises Busy(DISK_FULL)."""

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
        """Store that nothing is open under a token: who does not lead this shard any more fails. Raises Busy(DISK_FULL)."""
        change = changes.TransactionSettled(token)
        self._log.change(changes.encode(change), level=Level.SYNCED, done=done)
        self._state.apply_change(change)

    def _tell_all(self) -> None:
        """Have shards follow all that was decided."""
        for token, decided in self._state.transactions.decisions.items():
            if token not in self._told:
                self._told[token] = set(decided.shards)
                self._log.barrier(Level.SYNCED, partial(self._is_kept, decided))

    def _is_kept(self, decided: TransactionDecided, result: int | BrokerError) -> None:
        """A decision lasts, or never was one."""
        if not isinstance(result, BrokerError):
            for shard in decided.shards:
                self._tell(decided, shard, AGAIN_S)

    def _tell(self, decided: TransactionDecided, shard: int, again_s: float) -> None:
        if self._shards is not None and not self._is_stopped:
            self._shards.end_branch(shard, decided, partial(self._followed, decided, shard, again_s))

    def _followed(self, decided: TransactionDecided, shard: int, again_s: float, has_followed: bool, /) -> None:
        """A shard has followed, or is told again."""
        if self._is_stopped:
            return
        if not has_followed:
            self._loop.call_later(again_s, self._tell, decided, shard, min(2 * again_s, AGAIN_S_MAX))
            return
        left = self._told[decided.token]
        left.discard(shard)
        if not left:
            self._settle(decided)

    def _settle(self, decided: TransactionDecided) -> None:
        """All have followed. A crash that takes this has them told once more."""
        if self._is_stopped:
            return
        change = changes.TransactionSettled(decided.token)
        try:
            self._log.change(changes.encode(change), level=Level.WRITTEN, done=None)
        except Busy:  # the disk is full
            self._loop.call_later(AGAIN_S_MAX, self._settle, decided)
            return
        except BrokerError:  # storage has failed: the next process has them told once more
            return
        self._state.apply_change(change)
        del self._told[decided.token]
        if not self.is_deciding(decided.id):
            for then in tuple(self._waiting.pop(decided.id, ())):
                then()

    # Branches

    def find(self, id_: str, *, by: Caller = ITSELF) -> Transaction | None:
        """The latest branch here of a transactional id that is at home elsewhere, for who may use the id. Raises Denied(DENIED)."""
        return self._transactions.find(BRANCH + id_, by=by)

    def enter(self, joined: Joined) -> Transaction:
        """Open a branch that its home has let in, unless it is open; one of an earlier transaction of that home has aborted.

        Raises Conflict(PRODUCER_FENCED) for one that has ended, Busy(BUSY) where another home has yet to decide, or there are too many,
        Busy(DISK_FULL).
        """
        name = BRANCH + joined.id
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
            joined.home,
        )
        self._log.change(changes.encode(change), level=Level.WRITTEN, done=None)
        self._state.apply_change(change)
        made = self._state.transactions.find(name)
        assert made is not None, "it was just stored"
        return made

    def _check_current(self, joined: Joined, known: Transaction | None) -> None:
        """Refuse a permission that comes later than the end of what it is for. Raises Conflict(PRODUCER_FENCED), Busy(BUSY)."""
        is_late = joined.token in self._ended
        if known is not None and known.home == joined.home:
            assert known.producer is not None, "branches have one"
            is_same = known.producer.id == joined.producer.id  # an id that was deleted counts its epochs anew
            is_late = is_late or (is_same and known.epoch > joined.epoch) or self._transactions.is_ending(known)
        elif known is not None and known.is_open:
            raise Busy(ErrorCode.BUSY, f"its branch here has another home, which has not decided id={joined.id!r}")
        if is_late:
            raise Conflict(ErrorCode.PRODUCER_FENCED, f"the transaction has ended id={joined.id!r}")

    def end(self, id_: str, token: bytes, *, commits: bool, done: Completion[int]) -> None:
        """Follow what home has decided of a branch, once more if need be: one that is not open has followed before, and that is said by who
        can still store. Raises BrokerError: then it is to be told again."""
        branch = self.find(id_)
        if branch is None or not branch.is_open or branch.token != token:
            self._note(token)
            self._prove(token, done)
        elif commits:
            self._transactions.commit(branch, by=Caller(None, branch.owner), level=Level.SYNCED, done=done)
            self._note(token)
        else:
            self._transactions.abort(branch, level=Level.SYNCED, done=done)
            self._note(token)

    def _note(self, token: bytes) -> None:
        self._ended[token] = None
        if len(self._ended) > ENDED_MAX:
            del self._ended[next(iter(self._ended))]

    def _look(self, doubt_us: int) -> None:
        """Ask for branches that have been open for long: their home tells by itself as long as it knows of them."""
        if self._is_stopped or self._shards is None:
            return
        latest_us = self._clock.now_us() - doubt_us
        for name in list(self._state.transactions.open):
            branch = self._state.transactions.find(name)
            if branch is not None and branch.is_branch and branch.began_at_us <= latest_us:
                self._shards.ask_home(branch, partial(self._answered, name, branch.token))
        self._loop.call_later(LOOK_S, self._look, DOUBT_US)

    def _answered(self, name: str, token: bytes, commits: bool | None, /) -> None:
        """A home has told how a transaction has ended, or that it is open."""
        branch = self._state.transactions.find(name)
        if commits is None or self._is_stopped or branch is None or branch.token != token or not branch.is_open:
            return
        try:
            self.end(name.removeprefix(BRANCH), token, commits=commits, done=_ended)
        except BrokerError:
            """It is asked for again."""
