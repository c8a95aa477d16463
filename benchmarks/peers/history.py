"""Reads of history that is in files: just sealed, and not cached at all.

Enough is written after it that no journal slot holds it any more.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.peers.limits import drop_from_cache
from benchmarks.peers.peer import Peer, Server
from benchmarks.peers.workloads import BATCH, Round, consume, produce

HISTORY_BYTES: Final = 192 << 20  # read back
BEHIND_BYTES: Final = 160 << 20  # after that much a slot of 64 MiB is full, and was sealed
HOT_BYTES: Final = 32 << 20  # less than one slot
SETTLED_S: Final = 0.5  # a full slot is sealed by then


def records_of(size: int, value_bytes: int) -> int:
    """Return complete batches of values of that many bytes."""
    return max(1, size // value_bytes // BATCH) * BATCH


def sealed(peer: Peer, server: Server, topic: str, value: bytes, scale: float) -> Sequence[Round]:
    """Return records per second read from the journal, and of just sealed records: the first time, and the third."""
    hot, old, behind = (int(size * scale) for size in (HOT_BYTES, HISTORY_BYTES, BEHIND_BYTES))
    names = [f"{topic}-{name}" for name in ("old", "behind", "hot")]
    counts = [records_of(size, len(value)) for size in (old, behind, hot)]
    for name, count in zip(names, counts, strict=True):
        peer.create(server.address, name)
        produce(peer, server, name, count, value)
    journal = consume(peer, server, names[2], counts[2])
    time.sleep(SETTLED_S)
    reads = [consume(peer, server, names[0], counts[0]) for _ in range(3)]
    return [journal, reads[0], reads[2]]


def cold(peer: Peer, server: Server, topic: str, value: bytes, scale: float) -> Sequence[Round]:
    """Return records per second of a first read without the broker's files in the page cache."""
    for name, size in ((f"{topic}-old", HISTORY_BYTES), (f"{topic}-behind", BEHIND_BYTES)):
        peer.create(server.address, name)
        produce(peer, server, name, records_of(int(size * scale), len(value)), value)
    time.sleep(SETTLED_S)
    for path in _files(server):
        drop_from_cache(path)
    return [consume(peer, server, f"{topic}-old", records_of(int(HISTORY_BYTES * scale), len(value)))]


def _files(server: Server) -> Sequence[Path]:
    assert server.place is not None, "a broker stores its files in its directory"
    return [path for path in server.place.rglob("*") if path.is_file()]
