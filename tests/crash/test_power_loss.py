"""A real broker is killed, and its journal loses everything that no sync has proved, page by page.

Records acknowledged as ``synced`` must survive. A reader that had read further learns that the epoch ended, and gets no
other records.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from polywire.client.bulk import BulkConnection, PartitionRange, connect
from polywire.errors import Conflict, ErrorCode, Missing
from polywire.log.journal.group import EntryKind, read_directory
from polywire.log.journal.recovery import Chain, FoundGroup, find_chain
from polywire.log.journal.slots import Slot, read_seed
from polywire.records.batch import read_header
from polywire.records.columns import Record
from polywire.records.rows import from_records, to_records
from polywire.store.system_files import SYSTEM_FILES
from polywire.types import Level
from tests.broker_process import BrokerProcess

TOPIC = "numbers"
ROUNDS = 4
PAGE = 4096


def lose_power(directory: Path, synced: dict[int, int], keep: random.Random | None) -> None:
    """Remove every page after the last group known to be synced; ``keep`` chooses random pages that survive.

    ``synced`` has, by partition's incarnation, the offset below which everything was acknowledged as synced.
    """
    seed = read_seed(SYSTEM_FILES, directory / "journal")
    slots = [Slot(path, 0, seed) for path in sorted((directory / "journal").glob("slot-*"))]
    chain = find_chain(slots)
    assert chain is not None
    floor = synced_floor(chain, synced)
    last = next((group for group in chain.groups if group.sequence == floor), None)
    assert last is not None, "nothing was sealed in so short a time"
    for slot in {group.slot for group in chain.groups if group.sequence >= floor}:
        begin = last.position + last.length if slot is last.slot else 0
        cut(slot, begin, keep)
    for slot in slots:
        slot.close()


def synced_floor(chain: Chain, synced: dict[int, int]) -> int:
    """Return the highest sequence known to be on the disk: by a response, by the start, or by a later group."""
    floor = max(group.synced for group in chain.groups)
    return max([floor, *(group.sequence for group in chain.groups if was_reported(group, synced))])


def was_reported(group: FoundGroup, synced: dict[int, int]) -> bool:
    if group.kinds & 1 << EntryKind.START:
        return True
    for entry in read_directory(group.slot.view, group.position):
        if entry.kind == EntryKind.BATCH:
            offset = read_header(group.slot.view, entry.position).base_offset
            if offset < synced.get(entry.partition, 0):
                return True
    return False


def cut(slot: Slot, begin: int, keep: random.Random | None) -> None:
    """Zero a slot from ``begin`` on, except the pages that are kept."""
    with slot.path.open("r+b") as file:
        for start in range(begin, slot.size, PAGE):
            at = max(begin, start - start % PAGE)
            stop = min(at - at % PAGE + PAGE, slot.size)
            if keep is None or keep.random() < 0.4:
                file.seek(at)
                file.write(bytes(stop - at))


def values_of(client: BulkConnection, found: PartitionRange, offset: int, end: int, epoch: int) -> list[bytes]:
    chunks = client.fetch_range(TOPIC, found.partition, found.incarnation, offset, end, epoch=epoch)
    values = []
    for chunk in chunks:
        data, at = chunk.data, 0
        while at < len(data):
            records = to_records(data, at)
            values += [record.value or b"" for record in records if offset <= record.offset < end]
            at += read_header(data, at).length
    return values


def produce(client: BulkConnection, chance: random.Random, number: int, count: int, level: Level) -> int:
    """Append ``count`` records with consecutive numbers; return the next number."""
    values = [b"%d" % value + b"." * chance.randrange(2000) for value in range(number, number + count)]
    result = client.produce(TOPIC, 0, [from_records([Record(value) for value in values])], level)
    assert result.appended[0].base_offset == number
    return number + count


def numbers(values: list[bytes]) -> list[int]:
    return [int(value.rstrip(b".")) for value in values]


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_synced_records_survive_and_readers_learn_that_the_epoch_ended(tmp_path: Path, seed: int | None) -> None:
    chance, keep = random.Random(seed), None if seed is None else random.Random(seed)
    lost = 0
    with BrokerProcess(tmp_path / "data") as broker:
        client = connect(broker.url("polywire"))
        client.create_topic(TOPIC, 1)
        for _ in range(ROUNDS):
            found = client.bounds([TOPIC])[0]
            number = found.next_offset
            for _ in range(chance.randrange(5)):
                number = produce(client, chance, number, chance.randrange(1, 20), Level.WRITTEN)
            synced = produce(client, chance, number, 3, Level.SYNCED)
            seen = synced
            for _ in range(chance.randrange(3, 12)):
                seen = produce(client, chance, seen, chance.randrange(1, 20), Level.WRITTEN)
            assert len(values_of(client, found, synced, seen, found.epoch)) == seen - synced, "it was read before"
            broker.kill()
            client.close()
            lose_power(broker.data_dir, {found.incarnation: synced}, keep)
            broker.start()
            client = connect(broker.url("polywire"))
            now = client.bounds([TOPIC])[0]
            assert now.epoch == found.epoch + 1
            assert synced <= now.next_offset <= seen, "records acknowledged as synced are there"
            kept = now.next_offset
            assert numbers(values_of(client, now, 0, kept, now.epoch)) == list(range(kept))
            if kept < seen:
                lost += 1
                assert_epoch_ended(client, found, seen)
                produce(client, chance, kept, seen - kept + 5, Level.SYNCED)
                assert_epoch_ended(client, found, seen)
            assert values_of(client, found, 0, kept, found.epoch) == values_of(client, now, 0, kept, now.epoch)
        client.close()
        assert broker.stop() == 0, broker.log_text()
    assert lost > 0, "power losses removed something"


def assert_epoch_ended(client: BulkConnection, found: PartitionRange, seen: int) -> None:
    """Assert that a reader at ``seen`` of an old epoch gets an error, whatever is stored there now."""
    with pytest.raises((Conflict, Missing)) as reported:
        values_of(client, found, seen, seen + 1, found.epoch)
    assert reported.value.code is ErrorCode.EPOCH_ENDED
