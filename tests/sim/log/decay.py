"""A disk that flips a bit of a sealed segment while the log runs, and flips it back before the process ends.

The model knows which records may be refused meanwhile, and to which copies the damage has spread. The scrub must find
the damage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from polywire.log.segments.format import SegmentRun, read_info
from polywire.records.batch import read_header
from polywire.records.columns import HEADER_BYTES
from polywire.store.file import FileStore
from tests.memory_store import MemoryStore
from tests.sim.chance import Chance
from tests.sim.disk import Inode, SimulatedDisk
from tests.sim.log.model import KeptPartition, Model
from tests.sim.log.process import LogProcess
from tests.sim.log.reading import read_back
from tests.sim.process import DIRECTORY
from tests.sim.promises import require
from tests.sim.story import Story

PADDING_BYTES: Final = 8  # at the end of a batch: up to seven unverified padding bytes


@dataclass(frozen=True, slots=True)
class _Flip:
    """A flipped bit of a file. ``offsets`` may be refused, and ``certain``, a subset, must be. Records behind a damaged
    header can be found by the index or not.
    """

    name: str
    inode: Inode
    at: int
    bit: int
    kept: KeptPartition | None
    offsets: frozenset[int]
    certain: frozenset[int]
    links: int
    """Hard links to the file at that time."""

    def apply(self) -> None:
        for data in (self.inode.data, self.inode.durable):
            if self.at < len(data):
                data[self.at] ^= self.bit


class Decay:
    """Guards: one bit at a time is flipped, and the model has its damage."""

    def __init__(self, disk: SimulatedDisk, model: Model, process: LogProcess, chance: Chance, story: Story) -> None:
        self._disk = disk
        self._model = model
        self._process = process
        self._chance = chance
        self._story = story
        self._flip: _Flip | None = None
        self._begun_without: frozenset[int] = frozenset()

    def begin(self) -> None:
        """Flip a bit of an existing segment; from now on every read goes to the disk."""
        names = sorted(sealed.segment.name for sealed in self._process.log._state.segments.by_location.values())
        if self._flip is not None or not names:
            return
        name = self._chance.one_of(names)
        inode = self._disk.find(DIRECTORY / name)
        assert isinstance(inode, Inode), "a segment is a file"
        store = MemoryStore()
        store.put_new(name, [inode.data])
        info = read_info(store, name)
        runs = [run for run in info if not run.token and run.partition in self._model.partitions]
        if not runs or self._chance.happens(0.2):  # a footer, of which there are two
            at = info.data_bytes + self._chance.below(info.size - info.data_bytes)
            kept, offsets, certain = None, frozenset[int](), frozenset[int]()
        else:
            run = self._chance.one_of(runs)
            kept = self._model.partitions[run.partition]
            at, offsets, certain = self._place(inode, run)
        bit = 1 << self._chance.below(8)
        self._flip = _Flip(name, inode, at, bit, kept, offsets, certain, self._story.counts["link"])
        self._flip.apply()
        self._process.files.cold = 1.0
        if kept is not None:
            self._begun_without = frozenset(offsets - kept.rotten)
            kept.rotten |= offsets
        self._story.tell("decay", f"{name} at={at} records={sorted(offsets)[:1]}+{len(offsets)}")

    def _place(self, inode: Inode, run: SegmentRun) -> tuple[int, frozenset[int], frozenset[int]]:
        """Return a byte of a run, the offsets that may be lost with it, and those that certainly are."""
        at = run.position + self._chance.below(run.size)
        begin = run.position
        while begin + (header := read_header(inode.data, begin)).length <= at:
            begin += header.length
        at = min(at, begin + header.length - PADDING_BYTES)
        last = header.next_offset if at - begin >= HEADER_BYTES else run.next_offset
        return at, frozenset(range(header.base_offset, last)), frozenset(range(header.base_offset, header.next_offset))

    def judge(self) -> None:
        """Check that reads of damaged records report it, that their neighbours are readable, and that the scrub finds
        the damage.
        """
        flip = self._flip
        if flip is None or flip.kept is None or flip.kept.dropped:
            return
        partition, reader = self._process.log.partition(flip.kept.incarnation), self._process.log._state.reader
        # A read from before the flip may complete after it.
        self._process.until(lambda: not reader._cold._asked)
        reader.forget(partition)
        if self._lives(flip.name) and self._store.open(flip.name).is_cached:
            read_back(self._process, flip.kept)  # the copy in memory is sound
            self._store.forget(flip.name)
            self._process.until(lambda: not reader._cold._asked)
            reader.forget(partition)
        begun = partition.first_offset
        lay = [offset for offset in sorted(flip.certain) if begun <= offset and self._lies_there(flip, offset)]
        refused = read_back(self._process, flip.kept)
        # A read during a merge gets the data from before.
        due = [offset for offset in lay if self._lies_there(flip, offset)]
        require(not due or refused, "what is damaged is not served", damaged=flip.name, offsets=due)
        self._process.until(lambda: self._is_found(flip.name) or not self._lives(flip.name))
        self._story.tell("refused rot", f"{flip.name} records={sorted(refused)}")

    def _lies_there(self, flip: _Flip, offset: int) -> bool:
        """Return whether a record is still read from the damaged file."""
        assert flip.kept is not None, "it is one of a partition"
        runs = self._process.log._state.partitions[flip.kept.incarnation].runs
        if not len(runs) or offset < runs.entry(0)[0]:
            return False
        location = runs.entry(runs.find_offset(offset))[3]
        return self._process.log._state.segments.by_location[location].segment.name == flip.name

    @property
    def _store(self) -> FileStore:
        store = self._process.log._disk.store
        assert isinstance(store, FileStore), "what lies on a disk rots"
        return store

    def _is_found(self, name: str) -> bool:
        return any(damage.segment == name for damage in self._process.log._state.segments.notes.found)

    def _lives(self, name: str) -> bool:
        segments = self._process.log._state.segments.by_location.values()
        return any(sealed.segment.name == name for sealed in segments)

    def end(self) -> None:
        """Flip the bit back. Copies of the damage, made by merging, compaction or waiting reads, stay damaged."""
        flip, self._flip = self._flip, None
        if flip is None:
            return
        flip.apply()
        self._story.tell("mended", flip.name)
        log = self._process.log
        copied = log.sealing or self._story.counts["link"] > flip.links or log._state.reader._cold._asked
        if flip.kept is not None and not copied:
            flip.kept.rotten -= self._begun_without
