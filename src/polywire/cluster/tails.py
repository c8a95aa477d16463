"""Read the ends of blobs in parallel before the blobs are opened one by one, because each read takes a network round
trip.

The number of retained ends is limited. A failed read is ignored; the blob is read again when it is opened. Only one
thread may use an object of this module.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from polywire.errors import BrokerError
from polywire.store.base import BlobMissing

TAIL_BYTES: Final = 64 * 1024  # enough for the footer of most segments
AHEAD_MAX: Final = 512  # 32 MiB: two round trips of parallel reads
THREADS: Final = 256


@dataclass(frozen=True, slots=True)
class Tail:
    """Bytes of a blob from ``start`` to its end, and its size."""

    start: int
    size: int
    content: bytes


class Tails:
    """Reads ends of blobs ahead; at most ``AHEAD_MAX`` are being read or retained."""

    def __init__(self, fetch: Callable[[str], Tail], names: Sequence[str]) -> None:
        self._fetch = fetch
        self._names = iter(names)
        self._ahead: OrderedDict[str, Future[Tail]] = OrderedDict()
        self._threads = ThreadPoolExecutor(THREADS, "polywire-tails")
        self._fill()

    def of(self, name: str) -> Tail | None:
        """Return the end of a blob if it was read ahead; earlier ones are dropped."""
        if name not in self._ahead:
            return None
        while next(iter(self._ahead)) != name:
            self._ahead.popitem(last=False)
        self._fill()
        try:
            return self._ahead[name].result()
        except (BrokerError, BlobMissing):
            return None

    def _fill(self) -> None:
        while len(self._ahead) < AHEAD_MAX and (name := next(self._names, None)) is not None:
            self._ahead[name] = self._threads.submit(self._fetch, name)

    def close(self) -> None:
        """Stop reading ahead."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._ahead.clear()
