"""The rules of idempotent producers as this wire has them, stricter than the broker's own (spec: cursus#idempotent-producers).

Promises: what is accepted here the broker accepts, too; every refusal holds a word by which clients know that they must stop.
Must not know: batches, sessions.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

STORED_BYTES_MAX: Final = 255  # what a stored batch has room for (decision 0001)
DIGEST_BYTES: Final = 32


def stored_id(producer: bytes) -> bytes:
    """What a producer is stored as, and remembered by: its id, or the beginning of a longer one and, behind ``~``, a digest of all of it."""
    if len(producer) <= STORED_BYTES_MAX:
        return producer
    digest = blake2b(producer, digest_size=DIGEST_BYTES).hexdigest().encode()
    return producer[: STORED_BYTES_MAX - len(digest) - 1] + b"~" + digest


class Rejected(Exception):
    """A sequence that may not be stored; the text is told in the acknowledgement."""


def already_stored(known: tuple[int, int] | None, *, producer: str, epoch: int, first: int, last: int) -> int:
    """How many of the messages ``first`` to ``last`` are stored already.

    known: the producer's latest epoch and sequence in this partition. Raises Rejected.
    """
    if known is None:
        if first != 1:
            raise Rejected(f"idempotency error: first message for producer {producer} must have seqNum 1, got {first}")
        return 0
    current, latest = known
    if epoch < current:
        raise Rejected(f"stale_producer_epoch producer={producer} current={current} got={epoch}")
    if epoch > current:
        if first != 1:
            raise Rejected(
                "idempotency error: first message in new producer epoch for producer"
                f" {producer} must have seqNum 1, got {first}"
            )
        return 0
    if first > latest + 1:
        raise Rejected(f"idempotency gap for producer {producer}: expected {latest + 1}, got {first}")
    return min(latest, last) - first + 1
