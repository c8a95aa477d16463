"""Operations that stage, publish and drop batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from polywire.broker.owners import NO_CALLER, Caller
from polywire.broker.record_verbs import RecordVerbs
from polywire.broker.staged_publish import NO_WRITE, PublishAnswer, StagedPublish
from polywire.broker.topics import Partition
from polywire.log.base import Completion
from polywire.types import Buffer, Level


class StagingVerbs(RecordVerbs, Protocol):
    """A base of ``Broker``: the verbs use its log and state. Staged batches count in ``appended``, too."""

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
        """Store a validated batch under a token of 16 bytes. It is invisible until published, and expires after
        ``stage_expiry_us``.

        write: writer and number for which it is staged. When the writer has published that or a later number, batches
        that were staged for it and not published are dropped. Raises Missing(PARTITION_MISSING),
        Invalid(INVALID_REQUEST, INVALID_BATCH, RECORD_TOO_LARGE), Denied(DENIED) for another user's token or writer,
        Busy(STAGE_FULL, DISK_FULL).
        """
        self.appended += 1
        self._admission.check(partition, batch)
        self.staging.stage(token, partition, batch, write=write, by=by, level=level, done=done)

    def publish(
        self,
        writer: str,
        number: int,
        tokens: Sequence[bytes],
        *,
        by: Caller = NO_CALLER,
        done: Completion[PublishAnswer] | None,
    ) -> None:
        """Make all batches under these tokens readable, as one atomic and synced group.

        If the writer has published this or a later number before, the tokens are dropped and the answer is a duplicate,
        sent once the original is synced. Raises Missing(STAGE_MISSING) for an unknown or expired token,
        Missing(PARTITION_MISSING) if a partition was deleted, Invalid(INVALID_NAME, INVALID_REQUEST),
        Invalid(SEQUENCE_GAP) for a number too far above the last one, Denied(DENIED) for another user's writer or
        token, Busy(BUSY, DISK_FULL). After an error, nothing is published.
        """
        self.staging.publish(writer, number, tokens, by=by, done=done)

    def publishing(
        self,
        writer: str,
        number: int,
        tokens: Sequence[bytes],
        *,
        by: Caller = NO_CALLER,
        done: Completion[PublishAnswer] | None,
    ) -> Iterator[None]:
        """Publish in slices, for publishes with thousands of batches; put it into ``publish_work``. Raises as
        ``publish``.
        """
        return self.staging.publishing(writer, number, tokens, by=by, done=done)

    def abandon(self, tokens: Sequence[bytes], *, by: Caller = NO_CALLER) -> None:
        """Drop staged batches; unknown tokens are ignored.

        Raises Invalid(INVALID_REQUEST), Denied(DENIED) for a token of another user.
        """
        self.staging.abandon(tokens, by=by)
