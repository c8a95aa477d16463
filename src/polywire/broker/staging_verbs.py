"""The broker's verbs about staged batches: the part of its facade that holds them back, publishes and drops them.

Promises: what is published is readable as a whole, once. Must not know: wires, how the log keeps its files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from polywire.broker.owners import NOBODY, Caller
from polywire.broker.record_verbs import RecordVerbs
from polywire.broker.staged_publish import NO_WRITE, PublishAnswer, StagedPublish
from polywire.broker.topics import Partition
from polywire.log.base import Completion
from polywire.types import Buffer, Level


class StagingVerbs(RecordVerbs, Protocol):
    """A base of ``Broker``, whose log and state these verbs use; what is staged counts as appended, too."""

    __slots__ = ()

    staging: StagedPublish

    def stage(
        self,
        token: bytes,
        partition: Partition,
        batch: Buffer,
        *,
        write: tuple[str, int] = NO_WRITE,
        by: Caller = NOBODY,
        level: Level,
        done: Completion[int] | None,
    ) -> None:
        """Store a validated batch under a 16-byte token, invisible until published; it expires after ``stage_expiry_us``.

        write: the writer and number it is meant for. When that or a later number is published, tokens meant for it that were not among
        those published are dropped.

        Raises Missing(PARTITION_MISSING), Invalid(INVALID_REQUEST, INVALID_BATCH, RECORD_TOO_LARGE), Denied(DENIED) for another user's token
        or writer, Busy(STAGE_FULL, DISK_FULL).
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
        by: Caller = NOBODY,
        done: Completion[PublishAnswer] | None,
    ) -> None:
        """Make all batches under these tokens readable, as one atomic and synced group, unless this writer has published this number,
        or a later one, before: then the tokens are dropped and the answer, a duplicate, waits for the original's sync.

        Raises Missing(STAGE_MISSING) for an unknown or expired token, Missing(PARTITION_MISSING) when a partition was deleted since,
        Invalid(INVALID_NAME, INVALID_REQUEST), Invalid(SEQUENCE_GAP) for a number too far ahead, Denied(DENIED) for another user's writer or
        token, Busy(BUSY, DISK_FULL); then nothing is published.
        """
        self.staging.publish(writer, number, tokens, by=by, done=done)

    def publishing(
        self,
        writer: str,
        number: int,
        tokens: Sequence[bytes],
        *,
        by: Caller = NOBODY,
        done: Completion[PublishAnswer] | None,
    ) -> Iterator[None]:
        """The same a little at a time, for thousands of batches; to be put into ``publish_work``. Raises as ``publish``."""
        return self.staging.publishing(writer, number, tokens, by=by, done=done)

    def abandon(self, tokens: Sequence[bytes], *, by: Caller = NOBODY) -> None:
        """Drop staged batches; unknown tokens are ignored. Raises Invalid(INVALID_REQUEST), Denied(DENIED) for another user's."""
        self.staging.abandon(tokens, by=by)
