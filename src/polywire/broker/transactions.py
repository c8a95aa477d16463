"""Staged batches and their publishing: exactly once in, by (writer, number).

Promises: publishing is one atomic group with the writer's new number; publishing a number again changes nothing and
is answered as a duplicate once the original is durable. Staged data is invisible until then and expires.
Must not know: who the writers are, wires.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from polywire.broker import changes
from polywire.broker.produce import producer_identity
from polywire.broker.settings import BrokerSettings, check_name
from polywire.broker.state import State
from polywire.broker.topics import Partition
from polywire.clock import Clock
from polywire.errors import BrokerError, ErrorCode, Invalid, Missing
from polywire.log.base import Done, Log
from polywire.types import Buffer, Level

TOKEN_BYTES: Final = 16
STAGERS_MAX: Final = 65_536  # tokens whose writer is remembered, as many as batches may lie staged
TOKENS_MAX: Final = 10_000  # per publish: one per task of a Spark job, and the group that publishes stays small


@dataclass(frozen=True, slots=True)
class PublishedRange:
    """Where the staged records of one partition went; ``next_offset`` is exclusive."""

    partition: Partition
    first_offset: int
    next_offset: int


@dataclass(frozen=True, slots=True)
class PublishAnswer:
    """``duplicate``: this number of the writer, or a later one, was already published; then there are no ranges."""

    duplicate: bool
    ranges: tuple[PublishedRange, ...] = ()


PublishDone = Callable[[PublishAnswer | BrokerError], None]


class _Stagers:
    """Who staged under which token, as far as they said: what is left over of a writer when it has published can go at once.

    Kept in memory only, oldest forgotten first: whatever is not remembered expires. Guards: at most ``STAGERS_MAX`` are remembered.
    """

    __slots__ = ("_by_token", "_tokens")

    def __init__(self) -> None:
        self._by_token: dict[bytes, tuple[str, int]] = {}
        self._tokens: dict[str, set[bytes]] = {}

    def note(self, token: bytes, writer: str, number: int) -> None:
        """A writer stages under a token, for its publish of this number."""
        if token in self._by_token:
            return
        if len(self._by_token) >= STAGERS_MAX:
            self.forget([next(iter(self._by_token))])
        self._by_token[token] = (writer, number)
        self._tokens.setdefault(writer, set()).add(token)

    def forget(self, tokens: Sequence[bytes]) -> None:
        """Tokens that were published or abandoned."""
        for token in tokens:
            known = self._by_token.pop(token, None)
            if known is None:
                continue
            own = self._tokens[known[0]]
            own.discard(token)
            if not own:
                del self._tokens[known[0]]

    def left_over(self, writer: str, number: int) -> list[bytes]:
        """Tokens for this or an earlier number of a writer that were neither published nor abandoned."""
        return sorted(token for token in self._tokens.get(writer, ()) if self._by_token[token][1] <= number)


class _Publishing:
    """A publish on its way to the disk, and the repeats that wait for it."""

    __slots__ = ("waiting",)

    def __init__(self) -> None:
        self.waiting: list[PublishDone] = []


class Transactions:
    """Staging and publishing over one log.

    Invariant: ``_publishing`` holds a writer's latest publish while the log has not answered for it.
    """

    __slots__ = ("_clock", "_log", "_publishing", "_settings", "_stagers", "_state")

    def __init__(self, log: Log, state: State, settings: BrokerSettings, clock: Clock) -> None:
        self._log = log
        self._state = state
        self._settings = settings
        self._clock = clock
        self._publishing: dict[str, _Publishing] = {}
        self._stagers = _Stagers()

    def stage(
        self,
        token: bytes,
        partition: Partition,
        batch: Buffer,
        *,
        write: tuple[str, int] | None = None,
        level: Level,
        done: Done | None,
    ) -> None:
        """Store a batch under a token, as ``Broker.stage`` says."""
        check_token(token)
        if producer_identity(batch) is not None:
            raise Invalid(
                ErrorCode.INVALID_BATCH, "a staged batch must not have a producer epoch: its number says it once"
            )
        expires_at_us = self._clock.now_us() + self._settings.stage_expiry_us
        self._log.stage(token, partition.log, batch, expires_at_us=expires_at_us, level=level, done=done)
        if write is not None:
            self._stagers.note(token, *write)

    def abandon(self, tokens: Sequence[bytes]) -> None:
        """Drop staged batches, as ``Broker.abandon`` says."""
        for token in tokens:
            check_token(token)
        self._stagers.forget(tokens)
        if tokens:
            self._log.abandon(tokens)

    def publish(
        self,
        writer: str,
        number: int,
        tokens: Sequence[bytes],
        *,
        positions: Sequence[changes.PositionStored] = (),
        done: PublishDone | None,
    ) -> None:
        """Publish staged batches, as ``Broker.publish`` says."""
        self._check(writer, number, tokens)
        last = self._state.writers.last(writer)
        if last is not None and number <= last:
            self.abandon([*tokens, *self._left_over(writer, number, tokens)])
            self._answer_duplicate(writer, done)
            return
        now_us = self._clock.now_us()
        self._state.writers.check_room(writer, now_us)
        self.check_staged(tokens)
        change = changes.Published(writer, number, now_us, tuple(positions))
        publishing = _Publishing()

        def settled(ranges: Sequence[tuple[int, int, int]], error: BrokerError | None) -> None:
            self._settle(writer, publishing, done, ranges, error)

        if tokens:
            self._log.publish(tokens, changes.encode(change), level=Level.SYNCED, done=settled)
        else:
            self._log.change(changes.encode(change), level=Level.SYNCED, done=lambda _, error: settled((), error))
        self._publishing[writer] = publishing
        self._state.apply_change(change)
        self._stagers.forget(tokens)
        self.abandon(self._left_over(writer, number, tokens))

    def _left_over(self, writer: str, number: int, tokens: Sequence[bytes]) -> list[bytes]:
        """What attempts that failed have left of this write, or of an earlier one."""
        return [token for token in self._stagers.left_over(writer, number) if token not in tokens]

    def _check(self, writer: str, number: int, tokens: Sequence[bytes]) -> None:
        check_name(writer, self._settings.name_bytes_max)
        if not 0 <= number < 2**63:
            raise Invalid(ErrorCode.INVALID_REQUEST, f"number is out of range number={number}")
        if len(tokens) > TOKENS_MAX or len(set(tokens)) != len(tokens):
            raise Invalid(
                ErrorCode.INVALID_REQUEST, f"tokens repeat or are too many count={len(tokens)} limit={TOKENS_MAX}"
            )
        for token in tokens:
            check_token(token)

    def check_staged(self, tokens: Sequence[bytes]) -> None:
        """Publishing to a partition that ended would lose records silently: refuse it as a whole.

        Raises Missing(STAGE_MISSING, PARTITION_MISSING).
        """
        for token in tokens:
            for incarnation in self._log.staged_partitions(token):
                if self._state.catalog.find_partition(incarnation) is None:
                    raise Missing(
                        ErrorCode.PARTITION_MISSING,
                        f"the partition of a staged batch was deleted token={token.hex()} incarnation={incarnation}",
                    )

    def _answer_duplicate(self, writer: str, done: PublishDone | None) -> None:
        if done is None:
            return
        publishing = self._publishing.get(writer)
        if publishing is not None:
            publishing.waiting.append(done)
            return
        self._log.barrier(Level.SYNCED, lambda _, error: done(error or PublishAnswer(duplicate=True)))

    def _settle(
        self,
        writer: str,
        publishing: _Publishing,
        done: PublishDone | None,
        ranges: Sequence[tuple[int, int, int]],
        error: BrokerError | None,
    ) -> None:
        if self._publishing.get(writer) is publishing:
            del self._publishing[writer]
        if done is not None:
            done(error or PublishAnswer(duplicate=False, ranges=tuple(self._ranges(ranges))))
        for waiting in publishing.waiting:
            waiting(error or PublishAnswer(duplicate=True))

    def _ranges(self, ranges: Sequence[tuple[int, int, int]]) -> list[PublishedRange]:
        found = []
        for incarnation, first, after in ranges:
            partition = self._state.catalog.find_partition(incarnation)
            if partition is not None:  # deleted since: nobody can read it, so nobody needs to know where it was
                found.append(PublishedRange(partition, first, after))
        return found


def check_token(token: bytes) -> None:
    """Refuse a token that has not 16 bytes, or only zeros, by which stored runs say "no token". Raises Invalid(INVALID_REQUEST)."""
    if len(token) != TOKEN_BYTES:
        raise Invalid(ErrorCode.INVALID_REQUEST, f"a token has {TOKEN_BYTES} bytes got={len(token)}")
    if not any(token):
        raise Invalid(ErrorCode.INVALID_REQUEST, "a token must not be all zeros")
