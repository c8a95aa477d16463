"""Prepare a publish of staged batches in short steps: build its journal write except for the offsets (decision 0106).

* A token belongs to one publish until that publish is written or cancelled.
* One compiled call assigns the offsets of all batches, and another one makes the batches readable. The number of calls
  does not depend on the number of batches.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from polywire.errors import BrokerError
from polywire.log.base import Publication
from polywire.log.journal.group import ENTRY_BYTES
from polywire.log.journal.staging import StagedBatch, StagedToken
from polywire.log.partition.partition import PUBLISHED, PUBLISHED_SHIFT, FilePartition
from polywire.log.partition.reader import PublishedBatch, PublishedGroup
from polywire.log.partition.tail_index import attach

if TYPE_CHECKING:
    from polywire.log.state import LogState

LOT_BATCHES: Final = 50  # batches laid out per step: takes some hundredths of a millisecond
NO_PARTITION: Final = -1

Publishable = Sequence[bytes] | Publication


class FilePublication:
    """A publish in preparation. Implements ``Publication``.

    Attributes:
        tokens: tokens that this publish has reserved.
        content: entries of the journal write, back to back. Each entry is a token and the headers of the batches stored
            under it for one partition.
        entries: for each entry, its end in ``content`` and the index of its partition in ``partitions``. The index is
            NO_PARTITION if all partitions of the token were dropped.
        positions: for each batch, the position to enter into the partition's ``TailIndex``.
    """

    __slots__ = (
        "_indexes",
        "_numbers",
        "_sizes",
        "_state",
        "batches",
        "content",
        "entries",
        "group",
        "incarnations",
        "partitions",
        "positions",
        "tokens",
    )

    def __init__(self, state: LogState) -> None:
        self._state: Final = state
        self._indexes: dict[int, int] = {}
        self._numbers: Final[list[list[int]]] = []
        self._sizes: Final[list[int]] = []
        self.incarnations: Final[set[int]] = set()
        self.tokens: Final[list[StagedToken]] = []
        self.partitions: Final[list[FilePartition]] = []
        self.batches: Final[list[StagedBatch]] = []
        self.entries: Final = array("q")
        self.positions: Final = array("q")
        self.content: Final = bytearray()
        self.group: Final = PublishedGroup(self.content)

    @property
    def size(self) -> int:
        """Size of the publish in a journal write, in bytes."""
        return len(self.content) + ENTRY_BYTES * (len(self.entries) // 2)

    def add(self, tokens: Sequence[bytes]) -> Iterator[None]:
        claim = self._state.staging.claim
        for number, token in enumerate(dict.fromkeys(tokens)):
            staged = claim(token)
            self.tokens.append(staged)
            if len(staged.batches) > LOT_BATCHES:
                yield from self._lay_out(staged, _is_any)
            else:
                deque(self._lay_out(staged, _is_any), maxlen=0)
            if number % LOT_BATCHES == 0:
                yield

    def cancel(self) -> None:
        for staged in self.tokens:
            staged.claimed = False
        self.tokens.clear()
        self._drop_published()

    def _drop_published(self) -> None:
        for position in self.positions:
            del self._state.reader.published[position >> PUBLISHED_SHIFT]
        del self.positions[:]

    def without_dropped(self) -> FilePublication:
        """Return the publication without the batches of dropped partitions."""
        if all(partition.opened for partition in self.partitions):
            return self
        self._drop_published()
        made = FilePublication(self._state)
        for staged in self.tokens:
            made.tokens.append(staged)
            deque(made._lay_out(staged, _is_open), maxlen=0)
        return made

    def _lay_out(self, staged: StagedToken, counts: Callable[[FilePartition], bool]) -> Iterator[None]:
        content, entries = self.content, len(self.entries)
        for incarnation, batches in staged.by_partition():
            self.incarnations.add(incarnation)
            partition = self._state.partitions.get(incarnation)
            if partition is None or not counts(partition):
                continue
            index = self._index_of(partition)
            content += staged.token
            for number, batch in enumerate(batches, start=1):
                self._add(batch, index)
                if number % LOT_BATCHES == 0:
                    yield
            self.entries.extend((len(content), index))
        if len(self.entries) == entries:  # recovery must learn that the token is gone
            content += staged.token
            self.entries.extend((len(content), NO_PARTITION))

    def _index_of(self, partition: FilePartition) -> int:
        index = self._indexes.get(partition.incarnation)
        if index is None:
            index = self._indexes[partition.incarnation] = len(self.partitions)
            self.partitions.append(partition)
            self._numbers.append([])
            self._sizes.append(0)
        return index

    def _add(self, batch: StagedBatch, index: int) -> None:
        number = self._state.add_published(PublishedBatch(self.group, len(self.content), batch))
        self.content.extend(batch.header)
        self.batches.append(batch)
        self.positions.append(number << PUBLISHED_SHIFT)
        self._numbers[index].append(number)
        self._sizes[index] += batch.length

    def settle(self, serial: int) -> None:
        """Make the batches readable and remove the tokens, after the publish was written to the journal file
        ``serial``.
        """
        self.group.serial = serial
        attach([partition.tail for partition in self.partitions], self.content, self.entries, self.positions, PUBLISHED)
        for partition, numbers, size in zip(self.partitions, self._numbers, self._sizes, strict=True):
            partition.published.extend(numbers)
            partition.tail_bytes += size
        for batch in self.batches:
            batch.published = True
        self._state.unstage([staged.token for staged in self.tokens])


@contextmanager
def prepared(state: LogState, tokens: Publishable) -> Iterator[FilePublication]:
    """Yield a publication of these tokens. On a BrokerError it is cancelled.

    Raises Missing(STAGE_MISSING) if a token is unknown, expired or used by another publish.
    """
    made = FilePublication(state) if isinstance(tokens, Sequence) else tokens
    assert isinstance(made, FilePublication), "a publication of this log"
    try:
        if isinstance(tokens, Sequence):
            deque(made.add(tokens), maxlen=0)
        yield made
    except BrokerError:
        made.cancel()
        raise


def _is_any(_: FilePartition) -> bool:
    return True


def _is_open(partition: FilePartition) -> bool:
    return partition.opened
