"""What a start shows: the state that was asked for, as far as it must be there, and everything of it that can be read.

Promises: each record is what was asked for, or who reads it is told that it is damaged, where it may be. Must not know: what damaged it.
"""

from __future__ import annotations

from polywire.errors import BrokerError
from polywire.log.base import Read
from polywire.records.columns import Record
from polywire.testing.sim.log.client import records_of
from polywire.testing.sim.log.model import KeptPartition, Model
from polywire.testing.sim.log.process import LogProcess
from polywire.testing.sim.process import Process
from polywire.testing.sim.promises import require
from polywire.types import Level


def check_start(process: LogProcess, model: Model, *, powerless: bool, shown_stays: bool, damaged: str = "") -> None:
    """What was acknowledged at its level is there, and nothing that was not asked for. The model goes on from what was found.

    damaged: a file of which something is, so that anything of it may be refused."""
    log = process.log
    ends = {0: len(process.state.changes)}
    found = {incarnation: log.partition(incarnation) for incarnation in log.incarnations()}
    ends.update((incarnation, partition.next_offset) for incarnation, partition in found.items())
    unknown = sorted(set(found) - set(model.partitions))
    require(not unknown, "no partition appears", unknown=unknown)
    model.check_prefix(ends)
    model.check_changes(process.state.changes, powerless=powerless)
    model.check_publications(ends)
    for kept in list(model.partitions.values()):
        partition = found.get(kept.incarnation)
        if partition is None:
            model.check_loss(kept, powerless=powerless)
            continue
        first, end = partition.first_offset, partition.next_offset
        model.check_survival(kept, first, end, powerless=powerless, shown_stays=shown_stays)
    _check_staged(process, model, powerless=powerless)
    for kept in model.partitions.values():
        read_back(process, kept, damaged=damaged)


def _check_staged(process: LogProcess, model: Model, *, powerless: bool) -> None:
    for token, staged in list(model.tokens.items()):
        if process.is_staged(token):
            staged.leaving = staged.spent = False
            staged.known.note(1, Level.SYNCED)
            continue
        lost = not staged.known.floor(powerless=powerless)
        require(lost or staged.leaving, "an acknowledged staged batch is there", token=token.hex())
        del model.tokens[token]


def read_back(process: Process, kept: KeptPartition, *, damaged: str = "") -> set[int]:
    """Read a partition from its first record to its last; returns the offsets that were refused. damaged: a file of which something is, so
    that anything of it may be refused."""
    partition = process.log.partition(kept.incarnation)
    offset, end = partition.first_offset, partition.readable_offset
    seen, refused = set[int](), set[int]()
    while offset < end:
        found = process.read(kept.incarnation, offset)
        if isinstance(found, BrokerError):
            end_of_damage = kept.pass_damage(offset, found, damaged=damaged)
            refused.update(range(offset, end_of_damage))
            offset = end_of_damage
            continue
        seen.update(record.offset for record in _judge(kept, offset, found, damaged))
        offset = found.next_offset
        found.pin.release()
    kept.check_nulls(seen)
    return refused


def _judge(kept: KeptPartition, offset: int, found: Read, damaged: str) -> list[Record]:
    require(found.next_offset > offset, "a read goes on", partition=kept.incarnation, offset=offset)
    records = [record for record in records_of(found.chunks) if record.offset >= offset]
    if damaged:
        wrong = [r.offset for r in records if kept.records[r.offset] != (r.key, r.value)]
        require(not wrong, "what is damaged is not served", damaged=damaged, offsets=wrong)
    kept.check_records(records, offset, found.next_offset)
    kept.shown = max(kept.shown, found.next_offset)
    return records
