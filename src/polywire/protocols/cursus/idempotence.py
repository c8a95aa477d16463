"""Check idempotent producers by the rules of Cursus (spec: cursus#idempotent-producers).

These rules are stricter than the broker's, so the broker accepts every batch that passes them. Every refusal contains a
word that makes clients stop producing.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

STORED_BYTES_MAX: Final = 255  # longest producer id in a stored batch (decision 0101)
DIGEST_BYTES: Final = 32


def stored_id(producer: bytes) -> bytes:
    """Return the id under which a producer is stored.

    A long id is replaced by its beginning, ``~`` and a digest of the whole id.
    """
    if len(producer) <= STORED_BYTES_MAX:
        return producer
    digest = blake2b(producer, digest_size=DIGEST_BYTES).hexdigest().encode()
    return producer[: STORED_BYTES_MAX - len(digest) - 1] + b"~" + digest


class Rejected(Exception):
    """A sequence that must not be stored. The acknowledgement contains its text."""


def already_stored(known: tuple[int, int] | None, *, producer: str, epoch: int, first: int, last: int) -> int:
    """Return how many of the messages ``first`` to ``last`` are already stored.

    ``known`` is the producer's latest epoch and sequence in this partition, None for a new producer. Raises Rejected if
    the messages must not be stored.
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
