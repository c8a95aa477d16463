"""The model of a log: all requests in order, and the acknowledged durability level of each.

It checks recovered states and reads. A result that does not follow from requests, acknowledgements and permitted losses
is a ``Violation``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from polywire.errors import BrokerError, Corrupt
from polywire.records.columns import Record
from tests.sim.promises import Acknowledged, require

Content = tuple[bytes | None, bytes | None]
"""Key and value of a record."""


@dataclass(slots=True)
class KeptPartition:
    """One partition. ``records``: all appended records by offset. ``gone``: those removed by compaction.

    first: its first offset by request; ``first_known`` by acknowledgement. opened, dropped: whether that was requested,
    and acknowledged. shown: readers have seen only records below this offset. rotten: offsets of damaged records.
    """

    incarnation: int
    keyed: bool
    records: list[Content] = field(default_factory=list)
    appended: Acknowledged = field(default_factory=Acknowledged)
    gone: set[int] = field(default_factory=set)
    first: int = 0
    trimmed: Acknowledged = field(default_factory=Acknowledged)
    opened: Acknowledged = field(default_factory=Acknowledged)
    dropped: bool = False
    dropped_known: Acknowledged = field(default_factory=Acknowledged)
    shown: int = 0
    rotten: set[int] = field(default_factory=set)

    def copied(self) -> KeptPartition:
        """Return a copy."""
        return replace(
            self,
            records=list(self.records),
            gone=set(self.gone),
            rotten=set(self.rotten),
            appended=replace(self.appended),
            trimmed=replace(self.trimmed),
            opened=replace(self.opened),
            dropped_known=replace(self.dropped_known),
        )

    def check_records(self, found: list[Record], first: int, end: int) -> None:
        """Check the records read of offsets [first, end)."""
        offset = first
        for record in found:
            require(offset <= record.offset < end, "records come in order, once", expected=offset, found=record.offset)
            self._check_hole(offset, record.offset)
            asked = self.records[record.offset] if record.offset < len(self.records) else None
            require(asked == (record.key, record.value), "a record is what was appended", offset=record.offset)
            require(record.offset not in self.gone, "what was compacted away stays away", offset=record.offset)
            offset = record.offset + 1
        self._check_hole(offset, end)

    def _check_hole(self, start: int, stop: int) -> None:
        """Check that missing records have a newer one of their key, or are the newest null of a key."""
        for offset in range(start, stop):
            require(self.keyed, "every offset has its record", partition=self.incarnation, offset=offset)
            key, value = self.records[offset]
            newer = any(later == key for later, _ in self.records[offset + 1 :])
            require(newer or value is None, "the newest record of a key stays", offset=offset, key=key)
            self.gone.add(offset)

    def pass_damage(self, offset: int, error: BrokerError, *, damaged: str = "") -> int:
        """Check the refusal of a record as damaged; return where reading continues, as the error says.

        damaged: a file with damage somewhere; otherwise the model knows the damaged records.
        """
        facts: dict[str, object] = {"partition": self.incarnation, "offset": offset, "error": error.message}
        is_reported = isinstance(error, Corrupt) and "segment=" in error.message
        if not damaged:
            require(is_reported and offset in self.rotten, "every record can be read", **facts)
        require(is_reported, "the error names the damaged file", damaged=damaged, **facts)
        first, end = _fact(error.message, "first_offset", offset), _fact(error.message, "next_offset", offset + 1)
        require(first <= offset < end, "what is around damage stays readable", **facts)
        spared = [] if damaged else [sound for sound in range(offset, end) if sound not in self.rotten]
        require(not spared, "what is around damage stays readable", sound=spared, **facts)
        return end

    def check_nulls(self, found: set[int]) -> None:
        """Check that the newest null of a key disappears only after all older records of the key. ``found``: existing
        offsets.
        """
        for offset in self.gone:
            key, value = self.records[offset]
            if value is None and offset >= self.first:
                back = [older for older in found if older < offset and self.records[older][0] == key]
                newer = any(later == key for later, _ in self.records[offset + 1 :])
                require(newer or not back, "what was deleted is not back", offset=offset, older=back)


def _fact(message: str, name: str, otherwise: int) -> int:
    _, _, rest = message.partition(f" {name}=")
    number = rest.partition(" ")[0]
    return int(number) if number else otherwise


@dataclass(slots=True)
class Staged:
    """The batches staged under one token."""

    partition: int
    contents: list[Content]
    known: Acknowledged = field(default_factory=Acknowledged)
    size: int = 0
    leaving: bool = False
    """Whether its publication or abandonment, or the deletion of its partition, was requested."""
    spent: bool = False
    """Whether its publication or abandonment was requested."""

    def spend(self) -> None:
        """Note a request to publish or abandon it."""
        self.leaving = self.spent = True


@dataclass(frozen=True, slots=True)
class Addition:
    """One request in the order of all; it reaches up to ``end`` of a partition or of the changes."""

    partition: int
    """0 for the changes."""
    end: int


class Model:
    """Guards: it has what the log has, plus all requests since the last start."""

    def __init__(self) -> None:
        self.partitions: Final[dict[int, KeptPartition]] = {}
        self.incarnations = 0
        """The last one in use."""
        self.changes: Final[list[bytes]] = []
        self.changed: Final = Acknowledged()
        self.tokens: Final[dict[bytes, Staged]] = {}
        self.additions: Final[list[Addition]] = []
        self.publications: Final[list[tuple[list[bytes], int, list[Addition]]]] = []
        """Tokens, the end of the changes, and the ends of the partitions."""

    def copied(self) -> Model:
        """Return a copy, for experiments on a copy of the disk."""
        copy = Model()
        copy.partitions.update((number, kept.copied()) for number, kept in self.partitions.items())
        copy.incarnations = self.incarnations
        copy.changes.extend(self.changes)
        copy.changed.written, copy.changed.synced = self.changed.written, self.changed.synced
        copy.tokens.update((token, replace(one, known=replace(one.known))) for token, one in self.tokens.items())
        copy.additions.extend(self.additions)
        copy.publications.extend(self.publications)
        return copy

    def open(self, incarnation: int, *, keyed: bool) -> KeptPartition:
        """Add a partition."""
        self.incarnations = incarnation
        self.partitions[incarnation] = kept = KeptPartition(incarnation, keyed)
        return kept

    def append(self, kept: KeptPartition, contents: list[Content]) -> int:
        """Append records; return the offset of the first."""
        first = len(kept.records)
        kept.records += contents
        self.additions.append(Addition(kept.incarnation, len(kept.records)))
        return first

    def change(self, change: bytes) -> int:
        """Add a change; return the number of changes."""
        self.changes.append(change)
        self.additions.append(Addition(0, len(self.changes)))
        return len(self.changes)

    def publish(self, tokens: list[bytes], change: bytes) -> dict[int, tuple[int, int]]:
        """Publish tokens with a change; return the offsets of each partition."""
        ranges: dict[int, tuple[int, int]] = {}
        reached = []
        for token in tokens:
            staged = self.tokens[token]
            staged.spend()
            kept = self.partitions[staged.partition]
            if kept.dropped:
                continue
            first = self.append(kept, staged.contents)
            ranges[staged.partition] = (ranges.get(staged.partition, (first, 0))[0], len(kept.records))
            reached.append(self.additions[-1])
        self.publications.append((list(tokens), self.change(change), reached))
        return ranges

    def everything(self) -> list[tuple[Acknowledged, int]]:
        """Return all requests until now, to be noted once a later barrier is reached."""
        found = [(self.changed, len(self.changes))]
        for kept in self.partitions.values():
            found += [(kept.appended, len(kept.records)), (kept.opened, 1), (kept.trimmed, kept.first)]
            found += [(kept.dropped_known, int(kept.dropped))]
        found += [(staged.known, 1) for staged in self.tokens.values() if not staged.leaving]
        return found

    def forget_acknowledged(self) -> None:
        """Permit the loss of everything acknowledged."""
        known = [acknowledged for acknowledged, _ in self.everything()]
        for acknowledged in [*known, *(staged.known for staged in self.tokens.values())]:
            acknowledged.written = acknowledged.synced = 0

    # After a start

    def check_prefix(self, ends: dict[int, int]) -> None:
        """Check that everything lost was requested after everything recovered: groups are ordered and atomic.

        ``ends``: the recovered ends by partition, 0 for the changes.
        """
        lost: Addition | None = None
        for addition in self.additions:
            if addition.partition not in ends:
                continue
            if ends[addition.partition] < addition.end:
                lost = lost or addition
            elif lost is not None:
                require(
                    False, "what was asked for later is not kept without what came before", lost=lost, kept=addition
                )
        self.additions.clear()

    def check_changes(self, found: list[bytes], *, powerless: bool) -> None:
        """Check the broker's state."""
        require(found == self.changes[: len(found)], "changes are those asked for, in order", found=found[-3:])
        floor = self.changed.floor(powerless=powerless)
        require(len(found) >= floor, "an acknowledged change is there", found=len(found), acknowledged=floor)
        del self.changes[len(found) :]
        self.changed.written = self.changed.synced = len(found)

    def check_publications(self, ends: dict[int, int]) -> None:
        """Check that a publication exists as a whole or not at all."""
        for tokens, changed, reached in self.publications:
            there = ends[0] >= changed
            for addition in reached:
                if addition.partition in ends:
                    require(
                        there == (ends[addition.partition] >= addition.end), "a publish is atomic", reached=addition
                    )
            for token in tokens:
                if there:
                    self.tokens.pop(token, None)
                elif token in self.tokens:
                    self.tokens[token].leaving = self.tokens[token].spent = False
        self.publications.clear()

    def check_survival(self, kept: KeptPartition, first: int, end: int, *, powerless: bool, shown_stays: bool) -> None:
        """Check a recovered partition; records beyond ``end`` are lost."""
        floor = kept.appended.floor(powerless=powerless)
        facts = {"partition": kept.incarnation, "end": end, "asked": len(kept.records)}
        require(end <= len(kept.records), "no number without its record", **facts)
        require(end >= floor, "an acknowledged record is there", acknowledged=floor, **facts)
        require(not shown_stays or end >= kept.shown, "what a reader was shown stays", shown=kept.shown, **facts)
        require(not kept.dropped_known.floor(powerless=powerless), "a dropped partition stays dropped", **facts)
        require(first >= kept.trimmed.floor(powerless=powerless), "what was trimmed stays away", first=first, **facts)
        require(first <= min(kept.first, end) or kept.first > end, "nothing is trimmed unasked", first=first, **facts)
        del kept.records[end:]
        kept.first, kept.shown, kept.dropped = first, end, False
        kept.appended = Acknowledged(end, end)
        kept.trimmed, kept.opened = Acknowledged(first, first), Acknowledged(1, 1)
        kept.dropped_known = Acknowledged()
        kept.gone = {offset for offset in kept.gone if offset < end}
        kept.rotten = {offset for offset in kept.rotten if offset < end}

    def check_loss(self, kept: KeptPartition, *, powerless: bool) -> None:
        """Check that a partition may be missing."""
        known = kept.opened.floor(powerless=powerless) or kept.appended.floor(powerless=powerless)
        require(kept.dropped or not known, "an acknowledged partition is there", partition=kept.incarnation)
        del self.partitions[kept.incarnation]
        for token in [token for token, staged in self.tokens.items() if staged.partition == kept.incarnation]:
            del self.tokens[token]
