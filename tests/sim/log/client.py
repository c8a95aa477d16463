"""A client of the log that makes any request at any time, and records the responses.

The model stores a request before the log can respond to it. Every response is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Final
from zlib import crc32

from polywire.errors import BrokerError, Busy, ErrorCode, Missing
from polywire.log.base import Encoding, Need, PartitionLog, Ranges, Read
from polywire.log.log import FileLog
from polywire.records.batch import read_header
from polywire.records.columns import BatchHeader, Record
from polywire.records.compression import expand_body
from polywire.records.rows import from_records, to_records
from polywire.types import Level
from tests.sim.chance import Chance
from tests.sim.log.model import Content, KeptPartition, Model, Staged
from tests.sim.promises import require
from tests.sim.story import Story

PARTITIONS_MAX: Final = 4
KEYS: Final = 6
READS_MAX: Final = 3
LEVELS: Final = (
    (Level.MEMORY, Level.WRITTEN, Level.WRITTEN, Level.SYNCED),
    (Level.WRITTEN,),
    (Level.MEMORY, Level.WRITTEN),
    (Level.SYNCED,),
)
"""The levels of requests by mood."""
VALUE_SIZES: Final = (1, 50, 900, 4200)
NEVER_US: Final = 2**62


class BrokerState:
    """Implements ``Replay``: stores every change in order."""

    def __init__(self) -> None:
        self.changes: list[bytes] = []

    def restore(self, snapshot: bytes) -> None:
        self.changes = snapshot.split(b"\n")[:-1]

    def apply(self, change: bytes) -> None:
        self.changes.append(change)

    def replayed(self, header: BatchHeader, producer_id: bytes) -> None:
        """Do nothing: no records have producers here."""

    def snapshot(self) -> bytes:
        return b"".join(change + b"\n" for change in self.changes)

    def encoding(self) -> Encoding:
        return Encoding(_pieces(list(self.changes)))


def _pieces(changes: Sequence[bytes]) -> Iterator[bytes]:
    for start in range(0, len(changes), 8):
        yield b"".join(change + b"\n" for change in changes[start : start + 8])


def records_of(chunks: Sequence[memoryview]) -> list[Record]:
    """Return the records of stored batches in order."""
    records: list[Record] = []
    for chunk in chunks:
        at = 0
        while at < len(chunk):
            length = read_header(chunk, at).length
            records += to_records(expand_body(chunk[at : at + length]))
            at += length
    return records


class Client:
    """Guards: one model checks its requests between two starts."""

    def __init__(self, log: FileLog, state: BrokerState, model: Model, chance: Chance, story: Story) -> None:
        self.log: Final = log
        self._state = state
        self._model = model
        self._chance = chance
        self._story = story
        self._count = 0
        self._held: list[tuple[Read, int]] = []
        self._reading = 0
        self._hurried = False
        self._waiting: dict[int, tuple[KeptPartition, int]] = {}
        self.levels: Sequence[Level] = LEVELS[0]
        self._asked = 0
        self._latest: dict[tuple[int, bool], int] = {}
        """The last answered request by partition (0 for none) and by whether it waited for the disk."""
        self.unanswered = 0
        self.failure: BrokerError | None = None
        log.on_failure(self._failed)

    def act(self, weights: Sequence[float], without: Collection[str] = ()) -> None:
        """Make a request, unless it is excluded."""
        before, self._story.actor = self._story.actor, "client"
        chosen = self._chance.weighted(list(ACTS), weights)
        try:
            if chosen.__name__ not in without:
                chosen(self)
        except Busy as busy:
            self._story.tell("busy", busy.code.name)
        except BrokerError as error:
            # the log reports its failure later
            failed = self.failure is not None or error.code is ErrorCode.STORAGE_FAILED
            require(failed, "only a log that failed refuses", error=str(error))
        self._story.actor = before

    # Answers

    def _failed(self, error: BrokerError) -> None:
        self.failure = error
        self._story.tell("log failed", error.message)

    def _ask(self, level: Level, partition: int = 0) -> Callable[[], None]:
        """Expect one more answer; return the function to call with it."""
        self.unanswered += 1
        self._asked += 1
        number, queue = self._asked, (partition, Level.SYNCED in (level, self.log.settings.durability))

        def answered() -> None:
            require(number > self._latest.get(queue, 0), "who asked first is answered first", number=number)
            self._latest[queue] = number

        return answered

    def _answered(self, what: str, answered: Callable[[], None], then: Callable[[], None], found: object) -> None:
        self.unanswered -= 1
        if isinstance(found, BrokerError):
            self._story.tell("refused", what)
            require(self.failure or found.code is ErrorCode.STORAGE_FAILED, "refused for no reason", error=str(found))
            return
        self._story.tell("answered", what)
        answered()
        then()
        if self._chance.happens(0.15):  # an answer may cause more requests, and a commit
            self.act(CALLBACK_WEIGHTS)

    def _confirm(self, what: str, level: Level) -> None:
        """Note all requests so far as acknowledged once a barrier is reached."""
        asked = self._model.everything()

        def reached() -> None:
            for acknowledged, count in asked:
                acknowledged.note(count, level)

        answered = self._ask(level)
        self.log.barrier(level, lambda found: self._answered(what, answered, reached, found))

    # Requests

    def _partition(self) -> KeptPartition | None:
        living = [kept for kept in self._model.partitions.values() if not kept.dropped]
        return self._chance.one_of(living) if living else None

    def _level(self) -> Level:
        return self._chance.one_of(self.levels)

    def _contents(self, kept: KeptPartition) -> list[Content]:
        found: list[Content] = []
        for _ in range(1 + self._chance.below(3)):
            self._count += 1
            value: bytes | None = b"%d:%d:" % (self.log.epoch, self._count) + b"." * self._chance.one_of(VALUE_SIZES)
            key = b"k%d" % self._chance.below(KEYS) if kept.keyed else None
            if kept.keyed and self._chance.happens(0.15):
                value = None
            found.append((key, value))
        return found

    def open(self) -> None:
        if len([kept for kept in self._model.partitions.values() if not kept.dropped]) >= PARTITIONS_MAX:
            return
        incarnation = self._model.incarnations + 1  # never reused
        self._story.tell("open", f"p{incarnation}")
        self.log.open_partition(incarnation)
        self._model.open(incarnation, keyed=self._chance.happens(0.4))
        self._confirm(f"open p{incarnation}", self._level())

    def drop(self) -> None:
        kept = self._partition()
        if kept is not None:
            self._story.tell("drop", f"p{kept.incarnation}")
            self.log.drop_partition(kept.incarnation)
            kept.dropped = True
            for staged in self._model.tokens.values():
                staged.leaving |= staged.partition == kept.incarnation
            self._confirm(f"drop p{kept.incarnation}", self._level())

    def append(self) -> None:
        kept = self._partition()
        if kept is None:
            return
        contents, level = self._contents(kept), self._level()
        batch = from_records([Record(value, key) for key, value in contents])
        first = len(kept.records)
        what = f"p{kept.incarnation} [{first}, {first + len(contents)}) {level.name}"
        self._story.tell("append", f"{what} size={len(batch)}")
        end = first + len(contents)

        def done(found: int | BrokerError) -> None:
            right = isinstance(found, BrokerError) or found == first
            require(right, "a record gets the next number", expected=first, found=found)
            self._answered(what, answered, lambda: kept.appended.note(end, level), found)

        self.log.append(self.log.partition(kept.incarnation), batch, level=level, done=done)
        answered = self._ask(level, kept.incarnation)
        self._model.append(kept, contents)

    def change(self) -> None:
        self._count += 1
        change, level = b"c%d:%d" % (self.log.epoch, self._count), self._level()
        what = f"change {len(self._model.changes)} {level.name}"
        self._story.tell("change", what)
        reached = len(self._model.changes) + 1

        def done(found: int | BrokerError) -> None:
            self._answered(what, answered, lambda: self._model.changed.note(reached, level), found)

        self.log.change(change, level=level, done=done)
        answered = self._ask(level)
        self._state.apply(change)
        self._model.change(change)

    def stage(self) -> None:
        kept = self._partition()
        if kept is None:
            return
        token, level = self._chance.token(16), self._level()
        staged = Staged(kept.incarnation, self._contents(kept))
        batch = from_records([Record(value, key) for key, value in staged.contents])
        what = f"{token.hex()[:8]} for p{kept.incarnation} {level.name}"
        self._story.tell("stage", what)

        def done(found: int | BrokerError) -> None:
            self._answered(what, answered, lambda: staged.known.note(1, level), found)

        partition = self.log.partition(kept.incarnation)
        self.log.stage(token, partition, batch, expires_at_us=NEVER_US, level=level, done=done)
        answered = self._ask(level)
        self._model.tokens[token] = staged
        staged.size = len(batch)
        total = sum(known.size for known in self._model.tokens.values() if not known.leaving)
        require(total <= self.log.settings.staged_bytes_max, "what is staged has a limit", total=total)

    def _some_tokens(self) -> list[bytes]:
        known = [token for token, staged in self._model.tokens.items() if not staged.leaving]
        return [known.pop(self._chance.below(len(known))) for _ in range(min(len(known), 1 + self._chance.below(3)))]

    def publish(self) -> None:
        tokens = self._some_tokens()
        if not tokens:
            return
        self._count += 1
        change, level = b"p%d:%d" % (self.log.epoch, self._count), self._level()
        what = f"publish {' '.join(token.hex()[:8] for token in tokens)} {level.name}"
        self._story.tell("publish", what)
        expected: dict[int, tuple[int, int]] = {}
        reached = len(self._model.changes) + 1

        def done(found: Ranges | BrokerError) -> None:
            if not isinstance(found, BrokerError):
                ranges = {incarnation: (first, end) for incarnation, first, end in found}
                require(ranges == expected, "published batches get the next numbers", found=ranges, expected=expected)
            self._answered(what, answered, noted, found)

        def noted() -> None:
            self._model.changed.note(reached, level)
            for incarnation, (_, end) in expected.items():
                if incarnation in self._model.partitions:
                    self._model.partitions[incarnation].appended.note(end, level)

        self.log.publish(tokens, change, level=level, done=done)
        answered = self._ask(level)
        self._state.apply(change)
        expected.update(self._model.publish(tokens, change))

    def abandon(self) -> None:
        tokens = self._some_tokens()
        self._story.tell("abandon", " ".join(token.hex()[:8] for token in tokens))
        self.log.abandon(tokens)
        for token in tokens:
            self._model.tokens[token].spend()

    def publish_again(self) -> None:
        """Check that tokens are published or abandoned once only."""
        spent = [token for token, staged in self._model.tokens.items() if staged.spent]
        if not spent:
            return
        token = self._chance.one_of(spent)
        self._story.tell("again", token.hex()[:8])
        try:
            self.log.publish([token], b"twice", level=Level.MEMORY, done=lambda _: None)
        except Missing:
            return
        require(False, "a token is published once", token=token.hex())

    def trim(self) -> None:
        kept = self._partition()
        if kept is None:
            return
        end = len(kept.records)
        first = max(kept.first, end if self._chance.happens(0.3) else self._chance.below(end + 1))
        self._story.tell("trim", f"p{kept.incarnation} to {first}")
        self.log.trim(kept.incarnation, first)
        kept.first = first
        if self._chance.happens(0.5):
            self._confirm(f"trim p{kept.incarnation} to {first}", self._level())

    def compact(self) -> None:
        keyed = [kept for kept in self._model.partitions.values() if kept.keyed and not kept.dropped]
        if keyed:
            kept = self._chance.one_of(keyed)
            self._story.tell("compact", f"p{kept.incarnation}")
            self.log.compact(kept.incarnation, null_age_us=self._chance.one_of((0, 5_000_000)))

    def commit(self) -> None:
        self._story.tell("commit")
        self.log.commit()

    def reserve(self) -> None:
        self.log.reserve(self._chance.below(8000), need=self._chance.one_of(tuple(Need)))

    def barrier(self) -> None:
        level = self._level()
        self._story.tell("barrier", level.name)
        self._confirm(f"barrier {level.name}", level)

    # Readers

    def read(self) -> None:
        kept = self._partition()
        if kept is None or self._reading >= READS_MAX or self.log.uncommitted:
            return
        partition = self.log.partition(kept.incarnation)
        if partition.first_offset > partition.next_offset:
            return
        offset = partition.first_offset + self._chance.below(partition.next_offset - partition.first_offset + 1)
        size = self._chance.one_of((1, 2000, 20_000, 1 << 20))
        then = partial(self._read, kept, offset, self.log.epoch)
        self._story.tell("read", f"p{kept.incarnation} from {offset} size={size}")
        self._reading += 1
        found = partition.read(offset, bytes_max=size, then=then)
        if isinstance(found, Read):
            then(found)

    def _read(self, kept: KeptPartition, offset: int, _: int, found: Read | BrokerError) -> None:
        self._reading -= 1
        if isinstance(found, Missing):
            require(kept.dropped or offset < kept.first, "a record is there", offset=offset, error=str(found))
            return
        if isinstance(found, BrokerError):
            self._story.tell("unread", str(found))
            if kept.rotten and not (self.failure or self.may_fail_reads):
                kept.pass_damage(offset, found)
                return
            require(self.failure or self.may_fail_reads, "a record can be read", offset=offset, error=str(found))
            return
        self.judge(kept, offset, found)
        self._story.tell("given", f"p{kept.incarnation} [{offset}, {found.next_offset})")
        if found.chunks and not self._hurried and self._chance.happens(0.5):
            self._held.append((found, _sum_of(found)))
        else:
            found.pin.release()

    may_fail_reads = False
    """Whether the disk has failed since the start."""

    def judge(self, kept: KeptPartition, offset: int, found: Read) -> None:
        """Check that a reader gets what was appended."""
        records = [record for record in records_of(found.chunks) if offset <= record.offset < found.next_offset]
        if offset >= kept.first:
            kept.check_records(records, offset, found.next_offset)
        if records:
            kept.shown = max(kept.shown, found.next_offset)

    def release(self) -> None:
        """Release a slow read; its bytes must not have changed."""
        if self._held:
            found, known = self._held.pop(self._chance.below(len(self._held)))
            require(_sum_of(found) == known, "what a reader holds stays in place")
            self._story.tell("release")
            found.pin.release()

    def wait(self) -> None:
        kept = self._partition()
        if kept is None or self.log.uncommitted:
            return
        partition = self.log.partition(kept.incarnation)
        self._count += 1
        offset, number = partition.readable_offset, self._count
        self._waiting[number] = (kept, offset)
        self._story.tell("wait", f"p{kept.incarnation} at {offset}")
        cancel = self.log.wait(partition, offset, lambda: self._woken(number, partition))
        if self._chance.happens(0.2):
            cancel.cancel()
            del self._waiting[number]

    def _woken(self, number: int, partition: PartitionLog) -> None:
        kept, offset = self._waiting.pop(number)
        self._story.tell("woken", f"p{kept.incarnation} at {offset}")
        require(kept.dropped or partition.readable_offset > offset, "who is woken can read", offset=offset)

    def check_rest(self) -> None:
        """Check that every request was answered and no reader waits for existing records."""
        require(not self.unanswered, "every request is answered once", unanswered=self.unanswered)
        require(not self._reading, "every read is answered", reading=self._reading)
        for kept, offset in self._waiting.values():
            due = kept.dropped or self.log.partition(kept.incarnation).readable_offset > offset
            require(not due, "who waits is woken", partition=kept.incarnation, offset=offset)

    def let_go(self) -> None:
        """Release all reads."""
        self._hurried = True
        while self._held:
            self.release()


def _sum_of(found: Read) -> int:
    total = 0
    for chunk in found.chunks:
        total = crc32(chunk, total)
    return total


ACTS: Final[Mapping[Callable[[Client], None], float]] = {
    Client.append: 14,
    Client.change: 3,
    Client.stage: 2,
    Client.publish: 2,
    Client.abandon: 0.3,
    Client.publish_again: 0.3,
    Client.trim: 1.5,
    Client.compact: 1,
    Client.open: 0.8,
    Client.drop: 0.3,
    Client.commit: 5,
    Client.reserve: 0.5,
    Client.barrier: 0.7,
    Client.read: 4,
    Client.release: 2,
    Client.wait: 1,
}
"""The requests and their weights."""

CALLBACK_WEIGHTS: Final = [
    weight if act in (Client.append, Client.change, Client.commit, Client.stage) else 0.0
    for act, weight in ACTS.items()
]
