"""Check a start: the recovered state and all readable records.

Each record equals the appended one. If it may be damaged, the read may report the damage instead.
"""

from __future__ import annotations

from polywire.errors import BrokerError
from polywire.log.base import Read
from polywire.records.columns import Record
from polywire.types import Level
from tests.sim.log.client import records_of
from tests.sim.log.model import KeptPartition, Model
from tests.sim.log.process import LogProcess
from tests.sim.process import Process
from tests.sim.promises import require


def check_start(process: LogProcess, model: Model, *, powerless: bool, shown_stays: bool, damaged: str = "") -> None:
    """Check that everything acknowledged at its level exists, and nothing that was not requested. The model continues
    with the recovered state.

    damaged: a file with damage somewhere, so any of its records may be refused.
    """
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
    """Read a partition from its first to its last record; return the refused offsets.

    damaged: a file with damage somewhere, so any of its records may be refused.
    """
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
