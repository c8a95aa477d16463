"""Staged batches and their publishing: exactly once in, by (writer, number).

Promises: publishing is one atomic group with the writer's new number; publishing a number again changes nothing and
is answered as a duplicate once the original is durable. Staged data is invisible until then and expires.
A writer and a token are used by their owner only. Must not know: wires.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from polywire.broker import changes
from polywire.broker.owners import ITSELF, UNOWNED, Caller, Owners, heir
from polywire.broker.produce import producer_identity
from polywire.broker.publish_dedup import size_of
from polywire.broker.quotas import Kind
from polywire.broker.settings import BrokerSettings, check_name
from polywire.broker.state import State
from polywire.broker.topics import Partition, Topic
from polywire.clock import ElapsedClock
from polywire.errors import BrokerError, Busy, ErrorCode, Invalid, Missing
from polywire.log.base import NEVER_US, Completion, Publication, Ranges, Staging
from polywire.types import Buffer, Level

TOKEN_BYTES: Final = 16
NO_WRITE: Final = ("", 0)  # what is staged without a word about the publish it is meant for
STAGERS_MAX: Final = 65_536  # tokens whose writer is remembered, as many as batches may lie staged
TOKENS_MAX: Final = 10_000  # per publish: one per task of a Spark job
LOT_TOKENS: Final = 100  # looked at, or dropped, in one go: some tenths of a millisecond


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


class _Stager(NamedTuple):
    """Whose token it is, the publish it is meant for: of this writer (empty: not said) and number; how much is staged, and until when."""

    owner: int
    writer: str
    number: int
    size: int
    expires_at_us: int


class _Stagers:
    """Who staged under which token: nobody else may publish or drop it, and what is left over of a writer when it has published can go.

    Kept in memory only, oldest forgotten first: a token is random, so whoever knows one that is not remembered made it; and what is not
    remembered expires. Guards: at most ``STAGERS_MAX`` are remembered.
    """

    __slots__ = ("_by_token", "_sizes", "_tokens")

    def __init__(self) -> None:
        self._by_token: dict[bytes, _Stager] = {}
        self._sizes: dict[int, int] = {}
        self._tokens: dict[str, set[bytes]] = {}

    def owners(self, tokens: Iterable[bytes]) -> dict[int, bytes]:
        """Whose tokens these are, each with one of them: thousands have few owners. What is not known is nobody's."""
        get = self._by_token.get
        return {known.owner: token for token in tokens if (known := get(token)) is not None}

    def size_of(self, owner: int, now_us: int) -> int:
        """Bytes that somebody has staged and that have not expired."""
        while self._by_token:
            token, oldest = next(iter(self._by_token.items()))
            if oldest.expires_at_us > now_us:
                break
            self.forget([token])
        return self._sizes.get(owner, 0)

    def note(self, token: bytes, owner: int, write: tuple[str, int], *, size: int, expires_at_us: int) -> None:
        """Somebody stages so many bytes more under a token, for this writer's publish of this number."""
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
        """Tokens that were published or abandoned."""
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
        """Tokens meant for some publish of a writer that were neither published nor abandoned."""
        return list(self._tokens.get(writer, ()))

    def left_over(self, tokens: Sequence[bytes], writer: str, number: int) -> list[bytes]:
        """Those of these tokens that are meant for this or an earlier number of a writer."""
        get = self._by_token.get
        known = [(token, get(token)) for token in tokens]
        return sorted([token for token, by in known if by is not None and by.writer == writer and by.number <= number])


class _Publishing:
    """A publish on its way to the disk, and the repeats that wait for it."""

    __slots__ = ("waiting",)

    def __init__(self) -> None:
        self.waiting: list[Completion[PublishAnswer]] = []


class StagedPublish:
    """Staging and publishing over one log.

    Invariant: ``_publishing`` holds a writer's latest publish while the log has not answered for it.
    """

    __slots__ = ("_clock", "_log", "_owners", "_publishing", "_settings", "_stagers", "_state")

    def __init__(
        self, log: Staging, state: State, settings: BrokerSettings, clock: ElapsedClock, *, owners: Owners
    ) -> None:
        self._log = log
        self._state = state
        self._settings = settings
        self._clock = clock
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
        """Store a batch under a token, as ``Broker.stage`` says. expires: whether it does by itself."""
        self.check_tokens([token], by=by)
        if write[0]:
            self._owners.check(by, self._state.writers.owner(write[0]), "writer", write[0])
        if producer_identity(batch) is not None:
            raise Invalid(
                ErrorCode.INVALID_BATCH, "a staged batch must not have a producer epoch: its number says it once"
            )
        now_us = self._clock.now_us()
        self._admit_staged(by, len(batch), now_us)
        expires_at_us = now_us + self._settings.stage_expiry_us
        kept_until_us = expires_at_us if expires else NEVER_US
        self._log.stage(token, partition.log, batch, expires_at_us=kept_until_us, level=level, done=done)
        self._stagers.note(token, by.owner, write, size=len(batch), expires_at_us=expires_at_us)

    def _admit_staged(self, by: Caller, size: int, now_us: int) -> None:
        """Leave others their share of what may be staged. Raises Busy(STAGE_FULL)."""
        share = int(self._settings.staged_bytes_max * self._settings.bulk_share)
        if by.owner != UNOWNED and self._stagers.size_of(by.owner, now_us) + size > share:
            raise Busy(
                ErrorCode.STAGE_FULL, f"too much is staged by one user or address limit={share}", retry_after_ms=1000
            )

    def forget(self, tokens: Sequence[bytes]) -> None:
        """Tokens that were published elsewhere."""
        self._stagers.forget(tokens)

    def check_tokens(self, tokens: Sequence[bytes], *, by: Caller) -> None:
        """Refuse what is no token, or another user's. Raises Invalid(INVALID_REQUEST), Denied(DENIED)."""
        for token in tokens:
            check_token(token)
        for owner, token in self._stagers.owners(tokens).items():
            self._owners.check(by, owner, "token", token.hex())

    def abandon(self, tokens: Sequence[bytes], *, by: Caller) -> None:
        """Drop staged batches, as ``Broker.abandon`` says."""
        self.check_tokens(tokens, by=by)
        self._stagers.forget(tokens)
        if tokens:
            self._log.abandon(tokens)

    def publish(
        self,
        writer: str,
        number: int,
        tokens: Sequence[bytes],
        *,
        by: Caller,
        done: Completion[PublishAnswer] | None,
    ) -> None:
        """Publish staged batches, as ``Broker.publish`` says, at once."""
        deque(self.publishing(writer, number, tokens, by=by, done=done), maxlen=0)

    def publishing(
        self,
        writer: str,
        number: int,
        tokens: Sequence[bytes],
        *,
        by: Caller,
        done: Completion[PublishAnswer] | None,
    ) -> Iterator[None]:
        """The same a little at a time: all is looked at and laid out before, and cleared away behind, the one step that publishes. Two must
        not be under way at once: the second would find its tokens taken."""
        self._check(writer, number, tokens)
        self._check_writer(writer, number, by)
        for lot in lots(tokens):
            self.check_tokens(lot, by=by)
            yield
        if not self._is_published(writer, number):
            prepared, is_new = self._log.prepare(), False
            try:
                yield from prepared.add(tokens)
                yield
                is_new = self._publish(writer, number, tokens, prepared, by=by, done=done)
            finally:
                if not is_new:
                    prepared.cancel()
            if is_new:
                yield from self._clear(writer, number, tokens)
                return
        for lot in lots(tokens):
            self.abandon(lot, by=ITSELF)
            yield
        yield from self._abandon_left_over(writer, number)
        self._answer_duplicate(writer, done)

    def _is_published(self, writer: str, number: int) -> bool:
        last = self._state.writers.last(writer)
        return last is not None and number <= last

    def _publish(
        self,
        writer: str,
        number: int,
        tokens: Sequence[bytes],
        prepared: Publication,
        *,
        by: Caller,
        done: Completion[PublishAnswer] | None,
    ) -> bool:
        """The one step; False where somebody else has published it meanwhile."""
        self._check_writer(writer, number, by)
        self.check_tokens(tokens, by=by)
        if self._is_published(writer, number):
            return False
        now_us = self._clock.now_us()
        self._admit(writer, now_us, by)
        self.check_living(prepared.incarnations)
        change = changes.Published(writer, number, now_us, (), heir(self._state.writers.owner(writer), by))
        publishing = _Publishing()

        settled = partial(self._settle, writer, publishing, done)

        if tokens:
            self._log.publish(prepared, changes.encode(change), level=Level.SYNCED, done=settled)
        else:
            self._log.change(changes.encode(change), level=Level.SYNCED, done=partial(_settle_without, settled))
        self._publishing[writer] = publishing
        self._state.apply_change(change)
        return True

    def _check_writer(self, writer: str, number: int, by: Caller) -> None:
        self._owners.check(by, self._state.writers.owner(writer), "writer", writer)
        self._check_step(writer, number, self._state.writers.last(writer))

    def _clear(self, writer: str, number: int, tokens: Sequence[bytes]) -> Iterator[None]:
        """Forget what was published, and what attempts that failed have left."""
        for lot in lots(tokens):
            self._stagers.forget(lot)
            yield
        with suppress(Busy):  # it is published, whatever becomes of these: they expire
            yield from self._abandon_left_over(writer, number)

    def _abandon_left_over(self, writer: str, number: int) -> Iterator[None]:
        """Drop what is left of this write of a writer, or of an earlier one."""
        for lot in lots(self._stagers.of(writer)):
            left = self._stagers.left_over(lot, writer, number)
            if left:
                self.abandon(left, by=ITSELF)
            yield

    def writers(self, *, by: Caller) -> list[changes.Published]:
        """The last publish of every writer that somebody may use, by name."""
        found = [known for known in self._state.writers if self._owners.may_use(by, known.owner)]
        return sorted(found, key=lambda known: known.writer)

    def delete_writer(self, writer: str, *, by: Caller, done: Completion[int] | None) -> None:
        """Forget a writer: what it publishes again is stored again. Raises Missing(WRITER_MISSING), also for another user's writer."""
        found = self._state.writers.find(writer)
        if found is None or not self._owners.may_use(by, found.owner):
            raise Missing(ErrorCode.WRITER_MISSING, f"no such writer writer={writer!r}")
        change = changes.WriterDeleted(writer)
        self._log.change(changes.encode(change), level=Level.SYNCED, done=done)
        self._state.apply_change(change)

    def _admit(self, writer: str, now_us: int, by: Caller) -> None:
        """Refuse a new writer where there are too many that are too young to forget. Raises Busy(BUSY)."""
        self._state.writers.forget_idle(now_us)
        if self._state.writers.find(writer) is None:
            self._state.quotas.admit(Kind.WRITERS, by, size_of(writer))

    def _check_step(self, writer: str, number: int, last: int | None) -> None:
        """A number far ahead would make duplicates of all that its writer has still to publish. The first one is free: a writer may have
        been forgotten, or begin anywhere. Raises Invalid(SEQUENCE_GAP)."""
        limit = self._settings.writer_step_max
        if last is not None and number - last > limit:
            raise Invalid(
                ErrorCode.SEQUENCE_GAP,
                f"number is too far ahead of the last one published writer={writer!r} last={last} got={number} limit={limit}",
            )

    def _check(self, writer: str, number: int, tokens: Sequence[bytes]) -> None:
        check_name(writer, self._settings.name_bytes_max)
        if not 0 <= number < 2**63:
            raise Invalid(ErrorCode.INVALID_REQUEST, f"number is out of range number={number}")
        if len(tokens) > TOKENS_MAX or len(set(tokens)) != len(tokens):
            raise Invalid(
                ErrorCode.INVALID_REQUEST, f"tokens repeat or are too many count={len(tokens)} limit={TOKENS_MAX}"
            )

    def check_living(self, incarnations: Iterable[int]) -> None:
        """Publishing to a partition that ended would lose records silently: refuse it as a whole. Raises Missing(PARTITION_MISSING)."""
        for incarnation in incarnations:
            if self._state.catalog.find_partition(incarnation) is None:
                raise Missing(
                    ErrorCode.PARTITION_MISSING,
                    f"the partition of a staged batch was deleted incarnation={incarnation}",
                )

    def staged_topics(self, tokens: Sequence[bytes]) -> list[Topic]:
        """The topics that batches are staged for under these tokens; unknown tokens are ignored."""
        incarnations: set[int] = set()
        for token in tokens:
            with suppress(Missing):  # published, dropped or expired
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
            if partition is not None:  # deleted since: nobody can read it, so nobody needs to know where it was
                found.append(PublishedRange(partition, first, after))
        return found


def _settle_without(settled: Completion[Ranges], published: int | BrokerError) -> None:
    """A publish of no tokens, which is a change and nothing more."""
    settled(published if isinstance(published, BrokerError) else ())


def _complete_duplicate(done: Completion[PublishAnswer], synced: int | BrokerError) -> None:
    done(synced if isinstance(synced, BrokerError) else PublishAnswer(duplicate=True))


def check_token(token: bytes) -> None:
    """Refuse a token that has not 16 bytes, or only zeros, by which stored runs say "no token". Raises Invalid(INVALID_REQUEST)."""
    if len(token) != TOKEN_BYTES:
        raise Invalid(ErrorCode.INVALID_REQUEST, f"a token has {TOKEN_BYTES} bytes got={len(token)}")
    if not any(token):
        raise Invalid(ErrorCode.INVALID_REQUEST, "a token must not be all zeros")


def lots(tokens: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """A few tokens after the other."""
    for start in range(0, len(tokens), LOT_TOKENS):
        yield tokens[start : start + LOT_TOKENS]
