"""Stage batches and publish them exactly once, identified by writer and sequence number.

* A publish is one atomic journal write that includes the writer's new sequence number.
* Publishing a sequence number again changes nothing. The caller gets the answer "duplicate" when the original publish
  is durable.
* Offsets of groups can be committed in the same write. Then records and offsets are stored together or not at all.
* Staged data is invisible until published, and expires.
* A writer or a token can be used only by its owner.
* Beginning a new epoch of a writer fences the processes that publish with earlier epochs.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple, Protocol, TypeAlias

import msgspec

from polywire.broker import changes
from polywire.broker.owners import ITSELF, LINKS_CALLER, NO_CALLER, UNOWNED, Caller, Owners, next_owner
from polywire.broker.producers import size_of
from polywire.broker.quotas import Kind
from polywire.broker.record_verbs import RecordVerbs, producer_identity
from polywire.broker.settings import BrokerSettings, check_name
from polywire.broker.state import State
from polywire.broker.topics import Partition, Topic, linked
from polywire.clock import ElapsedClock
from polywire.errors import BrokerError, Busy, Conflict, ErrorCode, Invalid, Missing
from polywire.log.base import NEVER_US, Completion, Publication, Ranges, Staging
from polywire.types import Buffer, Level

TOKEN_BYTES: Final = 16
NO_WRITE: Final = ("", 0)  # for batches that are staged without naming a writer and number
STAGERS_MAX: Final = 65_536  # tokens whose writer is remembered; as many as batches can be staged
TOKENS_MAX: Final = 10_000  # tokens of one publish: one per task of a Spark job
PORTION_TOKENS: Final = 100  # tokens to process per slice, which takes some tenths of a millisecond
EPOCH_MAX: Final = 2**62
LEFT_OVER_MAX: Final = 1_000  # tokens of a fenced process that are dropped at once; the others expire

Offsets: TypeAlias = Callable[[], Iterable[changes.PositionsStored]]
"""Checks the offsets that a publish commits, immediately before it, and returns the changes. Raises BrokerError."""


class PublishedRange(msgspec.Struct, frozen=True):
    """Offsets of the committed records of one partition. ``next_offset`` is exclusive."""

    partition: Partition
    first_offset: int
    next_offset: int


class PublishAnswer(msgspec.Struct, frozen=True):
    """Result of a publish.

    Attributes:
        duplicate: the writer had already published this sequence number or a later one. ``ranges`` is empty then.
    """

    duplicate: bool
    ranges: tuple[PublishedRange, ...] = ()


class _Stager(NamedTuple):
    """The caller that stored batches under a token.

    Attributes:
        writer, number: writer and sequence number that the batches are for, empty if not given.
        size: bytes of the batches.
    """

    owner: int
    writer: str
    number: int
    size: int
    expires_at_us: int


class _Stagers:
    """The owners of tokens. Only the owner of a token may publish or drop the batches stored under it.

    The table is in memory only and has at most ``STAGERS_MAX`` tokens. The oldest are dropped first. Access to the
    batches of a dropped token is not restricted, but tokens are random, so only the client that chose a token knows it.
    """

    __slots__ = ("_by_token", "_sizes", "_tokens")

    def __init__(self) -> None:
        self._by_token: dict[bytes, _Stager] = {}
        self._sizes: dict[int, int] = {}
        self._tokens: dict[str, set[bytes]] = {}

    def owners(self, tokens: Iterable[bytes]) -> dict[int, bytes]:
        """Return the owners of these tokens, each with one of its tokens. Unknown tokens are skipped."""
        get = self._by_token.get
        return {known.owner: token for token in tokens if (known := get(token)) is not None}

    def size_of(self, owner: int, now_us: int) -> int:
        """Return the number of unpublished, unexpired bytes of an owner."""
        while self._by_token:
            token, oldest = next(iter(self._by_token.items()))
            if oldest.expires_at_us > now_us:
                break
            self.forget([token])
        return self._sizes.get(owner, 0)

    def note(self, token: bytes, owner: int, write: tuple[str, int], *, size: int, expires_at_us: int) -> None:
        """Record that bytes were stored under a token.

        Args:
            write: writer and sequence number for which they were stored.
        """
        known = self._by_token.pop(token, None)
        if known is not None:
            self._by_token[token] = known._replace(size=known.size + size, expires_at_us=expires_at_us)
            self._count(known.owner, size)
            return
        if len(self._by_token) >= STAGERS_MAX:
            self.forget([next(iter(self._by_token))])
        self._by_token[token] = _Stager(owner, *write, size, expires_at_us)
        self._tokens.setdefault(write[0], set()).add(token)
        self._count(owner, size)

    def _count(self, owner: int, size: int) -> None:
        left = self._sizes.get(owner, 0) + size
        if left:
            self._sizes[owner] = left
        else:
            self._sizes.pop(owner, None)

    def forget(self, tokens: Sequence[bytes]) -> None:
        pop, sizes = self._by_token.pop, Counter[int]()
        for token in tokens:
            known = pop(token, None)
            if known is None:
                continue
            sizes[known.owner] += known.size
            own = self._tokens[known.writer]
            own.discard(token)
            if not own:
                del self._tokens[known.writer]
        for owner, size in sizes.items():
            self._count(owner, -size)

    def of(self, writer: str) -> list[bytes]:
        """Return the tokens of a writer whose batches were neither published nor dropped."""
        return list(self._tokens.get(writer, ()))

    def left_over(self, tokens: Sequence[bytes], writer: str, number: int) -> list[bytes]:
        """Return those of the given tokens that the writer used for this sequence number or a lower one."""
        get = self._by_token.get
        known = [(token, get(token)) for token in tokens]
        return sorted([token for token, by in known if by is not None and by.writer == writer and by.number <= number])


def no_offsets() -> Iterable[changes.PositionsStored]:
    """Return no offsets, for a publish of records only."""
    return ()


class _Publishing(msgspec.Struct, eq=False):
    """A publish in progress.

    Attributes:
        waiting: callbacks of retries of the same publish, called with its result.
    """

    waiting: list[Completion[PublishAnswer]] = msgspec.field(default_factory=list)


class StagedPublish:
    """Stores batches that are invisible until a publish makes them readable atomically."""

    __slots__ = ("_clock", "_log", "_owners", "_publishing", "_settings", "_stagers", "_state")

    def __init__(
        self, log: Staging, state: State, settings: BrokerSettings, clock: ElapsedClock, *, owners: Owners
    ) -> None:
        self._log = log
        self._state = state
        self._settings = settings
        self._clock = clock
        # latest publish of each writer, until the log has completed it
        self._publishing: dict[str, _Publishing] = {}
        self._owners = owners
        self._stagers = _Stagers()

    def stage(
        self,
        token: bytes,
        partition: Partition,
        batch: Buffer,
        *,
        write: tuple[str, int] = NO_WRITE,
        by: Caller,
        level: Level,
        done: Completion[int] | None,
        expires: bool = True,
    ) -> None:
        """Store a batch under a token, invisible until it is published.

        Args:
            write: writer and sequence number that the batch is for.
            expires: whether the batch is deleted if it is not published in time.
        """
        self.check_tokens([token], by=by)
        if write[0]:
            self._owners.check(by, self._state.writers.owner(write[0]), "writer", write[0])
        if producer_identity(batch) is not None:
            raise Invalid(
                ErrorCode.INVALID_BATCH,
                "a staged batch must not have a producer epoch, because the number of the publish prevents duplicates",
            )
        now_us = self._clock.now_us()
        self._admit_staged(by, len(batch), now_us)
        expires_at_us = now_us + self._settings.stage_expiry_us
        kept_until_us = expires_at_us if expires else NEVER_US
        self._log.stage(token, partition.log, batch, expires_at_us=kept_until_us, level=level, done=done)
        self._stagers.note(token, by.owner, write, size=len(batch), expires_at_us=expires_at_us)

    def _admit_staged(self, by: Caller, size: int, now_us: int) -> None:
        share = int(self._settings.staged_bytes_max * self._settings.bulk_share)
        if by.owner != UNOWNED and self._stagers.size_of(by.owner, now_us) + size > share:
            raise Busy(
                ErrorCode.STAGE_FULL,
                f"one user or address has staged too many bytes limit={share}",
                retry_after_ms=1000,
            )

    def forget(self, tokens: Sequence[bytes]) -> None:
        """Remove tokens from the table after a transaction has published their batches."""
        self._stagers.forget(tokens)

    def check_tokens(self, tokens: Sequence[bytes], *, by: Caller) -> None:
        """Raise Invalid(INVALID_REQUEST) for an invalid token, Denied(DENIED) for a token of another user."""
        for token in tokens:
            check_token(token)
        for owner, token in self._stagers.owners(tokens).items():
            self._owners.check(by, owner, "token", token.hex())

    def abandon(self, tokens: Sequence[bytes], *, by: Caller) -> None:
        self.check_tokens(tokens, by=by)
        self._stagers.forget(tokens)
        if tokens:
            self._log.abandon(tokens)

    def begin_epoch(self, writer: str, *, epoch_min: int, by: Caller, done: Completion[int] | None) -> int:
        """Begin an epoch of a writer and return it. Publishes with earlier epochs are then rejected.

        The epoch is the writer's next one, or ``epoch_min`` if that is higher. Batches that were staged for the writer
        are dropped.
        """
        check_name(writer, self._settings.name_bytes_max)
        known, now_us = self._state.writers.find(writer), self._clock.now_us()
        owner = UNOWNED if known is None else known.owner
        self._owners.check(by, owner, "writer", writer)
        epoch = max(epoch_min, 1 if known is None else known.epoch + 1)
        if not 0 < epoch <= EPOCH_MAX:
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                f"the writer's epoch is out of range (delete the writer) writer={writer!r} epoch={epoch}",
            )
        self._admit(writer, now_us, by)
        change = changes.Published(writer, 0, now_us, (), next_owner(owner, by), epoch)
        self._log.change(changes.encode(change), level=Level.SYNCED, done=done)
        self._state.apply_change(change)
        with suppress(Busy):  # batches that are not dropped now will expire
            self.abandon(self._stagers.of(writer)[:LEFT_OVER_MAX], by=ITSELF)
        return epoch

    def publish(
        self,
        writer: str,
        number: int,
        tokens: Sequence[bytes],
        *,
        epoch: int = 0,
        offsets: Offsets = no_offsets,
        by: Caller,
        done: Completion[PublishAnswer] | None,
    ) -> None:
        deque(self.publishing(writer, number, tokens, epoch=epoch, offsets=offsets, by=by, done=done), maxlen=0)

    def publishing(
        self,
        writer: str,
        number: int,
        tokens: Sequence[bytes],
        *,
        epoch: int = 0,
        offsets: Offsets = no_offsets,
        by: Caller,
        done: Completion[PublishAnswer] | None,
    ) -> Iterator[None]:
        """Publish in several passes of the loop. The checks, the layout and the cleanup yield after each slice.

        The publish itself is one step. Only one such iterator may run at a time. Otherwise a retry of the same publish
        would raise STAGE_MISSING instead of waiting for the result of the first.
        """
        self._check(writer, number, tokens)
        self._check_writer(writer, epoch, number, by)
        for portion in portions(tokens):
            self.check_tokens(portion, by=by)
            yield
        if not self._is_published(writer, epoch, number):
            prepared, is_new = self._log.prepare(), False
            try:
                yield from prepared.add(tokens)
                yield
                is_new = self._publish(writer, number, tokens, prepared, epoch=epoch, offsets=offsets, by=by, done=done)
            finally:
                if not is_new:
                    prepared.cancel()
            if is_new:
                yield from self._clean_up(writer, number, tokens)
                return
        for portion in portions(tokens):
            self.abandon(portion, by=ITSELF)
            yield
        yield from self._abandon_left_over(writer, number)
        self._answer_duplicate(writer, done)

    def _is_published(self, writer: str, epoch: int, number: int) -> bool:
        known = self._state.writers.find(writer)
        return known is not None and (epoch, number) <= (known.epoch, known.number)

    def _publish(
        self,
        writer: str,
        number: int,
        tokens: Sequence[bytes],
        prepared: Publication,
        *,
        epoch: int,
        offsets: Offsets,
        by: Caller,
        done: Completion[PublishAnswer] | None,
    ) -> bool:
        """Publish in one step. Return False if the writer has published this sequence number since the first check."""
        self._check_writer(writer, epoch, number, by)
        self.check_tokens(tokens, by=by)
        if self._is_published(writer, epoch, number):
            return False
        now_us = self._clock.now_us()
        self._admit(writer, now_us, by)
        self.check_not_deleted(prepared.incarnations)
        self._check_unlinked(prepared.incarnations, by)
        positions = tuple([position for stored in offsets() for position in stored.one_by_one()])
        owner = next_owner(self._state.writers.owner(writer), by)
        change = changes.Published(writer, number, now_us, positions, owner, epoch)
        publishing = _Publishing()

        settled = partial(self._settle, writer, publishing, done)

        if tokens:
            self._log.publish(prepared, changes.encode(change), level=Level.SYNCED, done=settled)
        else:
            self._log.change(changes.encode(change), level=Level.SYNCED, done=partial(_settle_without, settled))
        self._publishing[writer] = publishing
        self._state.apply_change(change)
        return True

    def _check_writer(self, writer: str, epoch: int, number: int, by: Caller) -> None:
        known = self._state.writers.find(writer)
        if known is None:
            return
        self._owners.check(by, known.owner, "writer", writer)
        if epoch < known.epoch:
            raise Conflict(
                ErrorCode.PRODUCER_FENCED,
                "another process has taken over this writer or transactional id (only one process may use it at a time)"
                f" writer={writer!r} epoch={epoch} current_epoch={known.epoch}",
            )
        if epoch == known.epoch:
            self._check_step(writer, number, known.number)

    def _clean_up(self, writer: str, number: int, tokens: Sequence[bytes]) -> Iterator[None]:
        """Remove published tokens, and drop the batches that failed attempts stored for the same sequence number."""
        for portion in portions(tokens):
            self._stagers.forget(portion)
            yield
        with suppress(Busy):  # the publish succeeded in any case, and remaining staged data expires
            yield from self._abandon_left_over(writer, number)

    def _abandon_left_over(self, writer: str, number: int) -> Iterator[None]:
        """Drop the writer's unpublished batches for this sequence number or lower ones."""
        for portion in portions(self._stagers.of(writer)):
            left = self._stagers.left_over(portion, writer, number)
            if left:
                self.abandon(left, by=ITSELF)
            yield

    def writers(self, *, by: Caller) -> list[changes.Published]:
        """Return the last publish of every writer that the caller may use, sorted by name."""
        found = [known for known in self._state.writers if self._owners.may_use(by, known.owner)]
        return sorted(found, key=lambda known: known.writer)

    def delete_writer(self, writer: str, *, by: Caller, done: Completion[int] | None) -> None:
        """Delete a writer. Its next publish may have any sequence number.

        Raises Missing(WRITER_MISSING) if the writer does not exist or belongs to another user.
        """
        found = self._state.writers.find(writer)
        if found is None or not self._owners.may_use(by, found.owner):
            raise Missing(ErrorCode.WRITER_MISSING, f"no such writer writer={writer!r}")
        change = changes.WriterDeleted(writer)
        self._log.change(changes.encode(change), level=Level.SYNCED, done=done)
        self._state.apply_change(change)

    def _admit(self, writer: str, now_us: int, by: Caller) -> None:
        """Raise Busy(BUSY) if this is a new writer, there are too many writers, and none of them has expired."""
        self._state.writers.forget_idle(now_us)
        if self._state.writers.find(writer) is None:
            self._state.quotas.admit(Kind.WRITERS, by, size_of(writer))

    def _check_step(self, writer: str, number: int, last: int) -> None:
        """Raise Invalid(SEQUENCE_GAP) for a sequence number far above the writer's last one.

        If it were accepted, all numbers in between would become duplicates. An unknown writer may start at any number,
        because it may have expired.
        """
        limit = self._settings.writer_step_max
        if number - last > limit:
            raise Invalid(
                ErrorCode.SEQUENCE_GAP,
                f"publish number is too far above the last one (use last + 1) writer={writer!r} last={last} got={number} limit={limit}",
            )

    def _check(self, writer: str, number: int, tokens: Sequence[bytes]) -> None:
        check_name(writer, self._settings.name_bytes_max)
        if not 0 <= number < 2**63:
            raise Invalid(ErrorCode.INVALID_REQUEST, f"publish number is out of range number={number}")
        if len(tokens) > TOKENS_MAX or len(set(tokens)) != len(tokens):
            raise Invalid(
                ErrorCode.INVALID_REQUEST, f"duplicate tokens, or too many count={len(tokens)} limit={TOKENS_MAX}"
            )

    def check_not_deleted(self, incarnations: Iterable[int]) -> None:
        """Raise Missing(PARTITION_MISSING) if a partition was deleted, because publishing would lose its records
        silently.
        """
        for incarnation in incarnations:
            if self._state.catalog.find_partition(incarnation) is None:
                raise Missing(
                    ErrorCode.PARTITION_MISSING,
                    f"the partition of a staged batch was deleted incarnation={incarnation}",
                )

    def _check_unlinked(self, incarnations: Iterable[int], by: Caller) -> None:
        """Raise Conflict(TOPIC_LINKED) if a link writes one of the topics.

        The link may have begun after the batches were staged.
        """
        for incarnation in incarnations:
            partition = self._state.catalog.find_partition(incarnation)
            if partition is not None and partition.link and by.owner != LINKS_CALLER.owner:
                raise linked(partition.topic)

    def staged_topics(self, tokens: Sequence[bytes]) -> list[Topic]:
        """Return the topics that have batches under these tokens. Unknown tokens are ignored."""
        incarnations: set[int] = set()
        for token in tokens:
            with suppress(Missing):  # the token was published, dropped, or has expired
                incarnations.update(self._log.staged_partitions([token]))
        partitions = map(self._state.catalog.find_partition, incarnations)
        return list({found.topic.id: found.topic for found in partitions if found is not None}.values())

    def _answer_duplicate(self, writer: str, done: Completion[PublishAnswer] | None) -> None:
        if done is None:
            return
        publishing = self._publishing.get(writer)
        if publishing is not None:
            publishing.waiting.append(done)
            return
        self._log.barrier(Level.SYNCED, partial(_complete_duplicate, done))

    def _settle(
        self,
        writer: str,
        publishing: _Publishing,
        done: Completion[PublishAnswer] | None,
        ranges: Ranges | BrokerError,
    ) -> None:
        if self._publishing.get(writer) is publishing:
            del self._publishing[writer]
        failed = ranges if isinstance(ranges, BrokerError) else None
        if done is not None and not isinstance(ranges, BrokerError):
            done(PublishAnswer(duplicate=False, ranges=tuple(self._ranges(ranges))))
        elif done is not None and failed is not None:
            done(failed)
        for waiting in publishing.waiting:
            waiting(failed or PublishAnswer(duplicate=True))

    def _ranges(self, ranges: Ranges) -> list[PublishedRange]:
        found = []
        for incarnation, first, after in ranges:
            partition = self._state.catalog.find_partition(incarnation)
            if partition is not None:  # None if it was deleted in the meantime, so its range is of no use to the caller
                found.append(PublishedRange(partition, first, after))
        return found


def _settle_without(settled: Completion[Ranges], published: int | BrokerError) -> None:
    """Complete a publish that has no batches."""
    settled(published if isinstance(published, BrokerError) else ())


def _complete_duplicate(done: Completion[PublishAnswer], synced: int | BrokerError) -> None:
    done(synced if isinstance(synced, BrokerError) else PublishAnswer(duplicate=True))


def check_token(token: bytes) -> None:
    """Raise Invalid(INVALID_REQUEST) unless a token has 16 bytes, not all zero. In storage, zeros mean "no token"."""
    if len(token) != TOKEN_BYTES:
        raise Invalid(ErrorCode.INVALID_REQUEST, f"token must have {TOKEN_BYTES} bytes got={len(token)}")
    if not any(token):
        raise Invalid(ErrorCode.INVALID_REQUEST, "token must not be all zeros")


def portions(tokens: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Yield the tokens in groups of ``PORTION_TOKENS``."""
    for start in range(0, len(tokens), PORTION_TOKENS):
        yield tokens[start : start + PORTION_TOKENS]


class StagingVerbs(RecordVerbs, Protocol):
    """The methods of ``Broker`` for two-phase writes: store invisible batches, then publish them atomically."""

    __slots__ = ()

    staging: StagedPublish

    def stage(
        self,
        token: bytes,
        partition: Partition,
        batch: Buffer,
        *,
        write: tuple[str, int] = NO_WRITE,
        by: Caller = NO_CALLER,
        level: Level,
        done: Completion[int] | None,
    ) -> None:
        """Store a validated batch under a token of 16 bytes, invisible until it is published.

        It is deleted after ``stage_expiry_us`` if it is not published. Raises Missing(PARTITION_MISSING),
        Invalid(INVALID_REQUEST, INVALID_BATCH, RECORD_TOO_LARGE), Denied(DENIED) for another user's token or writer,
        Busy(STAGE_FULL, DISK_FULL).

        Args:
            write: writer and sequence number that the batch is for. When the writer publishes this number or a later
                one without this token, the batch is deleted.
        """
        self.appended += 1
        self._admission.check(partition, batch, by=by)
        self.staging.stage(token, partition, batch, write=write, by=by, level=level, done=done)

    def publish(
        self,
        writer: str,
        number: int,
        tokens: Sequence[bytes],
        *,
        epoch: int = 0,
        offsets: Offsets = no_offsets,
        by: Caller = NO_CALLER,
        done: Completion[PublishAnswer] | None,
    ) -> None:
        """Make all batches under these tokens readable and commit ``offsets``, in one atomic and synced write.

        If the writer has published this sequence number or a later one before, the batches are deleted, and the result
        is a duplicate. ``done`` is then called once the original is synced. After an error, nothing is published.

        Raises Missing(STAGE_MISSING) for an unknown or expired token, Missing(PARTITION_MISSING) if a partition was
        deleted, Invalid(INVALID_NAME, INVALID_REQUEST), Invalid(SEQUENCE_GAP) for a number too far above the last one,
        Conflict(PRODUCER_FENCED) if the writer has a later epoch, Denied(DENIED) for another user's writer or token,
        Busy(BUSY, DISK_FULL), and the errors of ``offsets``.
        """
        self.staging.publish(writer, number, tokens, epoch=epoch, offsets=offsets, by=by, done=done)

    def publishing(
        self,
        writer: str,
        number: int,
        tokens: Sequence[bytes],
        *,
        epoch: int = 0,
        offsets: Offsets = no_offsets,
        by: Caller = NO_CALLER,
        done: Completion[PublishAnswer] | None,
    ) -> Iterator[None]:
        """Publish thousands of batches in several passes of the loop.

        The caller puts the iterator into ``publish_work``. Raises the same errors as ``publish``.
        """
        return self.staging.publishing(writer, number, tokens, epoch=epoch, offsets=offsets, by=by, done=done)

    def abandon(self, tokens: Sequence[bytes], *, by: Caller = NO_CALLER) -> None:
        """Delete the unpublished batches under these tokens. Unknown tokens are ignored.

        Raises Invalid(INVALID_REQUEST), Denied(DENIED) for a token of another user.
        """
        self.staging.abandon(tokens, by=by)
