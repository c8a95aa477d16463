"""The journal's end, torn at every byte and with every bit flipped: earlier groups survive."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from polywire.errors import Corrupt
from polywire.log.doctor import Remedy, Severity, examine, open_offline
from polywire.log.journal.group import EntryKind, GroupHead
from polywire.log.journal.recovery import Chain, FoundGroup, find_chain
from polywire.log.journal.slots import SEED_NAMES, Slot, read_seed, restore_seed
from polywire.log.segments import writer
from polywire.store.system_files import SYSTEM_FILES
from polywire.types import Level
from tests.unit.log.rig import SMALL, Memory, Rig, RigLoop

PARTITION = 7
QUIET = replace(SMALL, sync_interval_ms=600_000, slot_bytes=32 * 1024)  # nothing is synced unless a test requests it


def write_groups(directory: Path, *, synced: int, unsynced: int) -> None:
    """Write a journal of small groups, the last ``unsynced`` of them only written.

    Group n has record ``value-n`` and a change.
    """
    rig = Rig(directory, QUIET)
    partition = rig.log.open_partition(PARTITION)
    for number in range(synced + unsynced):
        rig.append(partition, [b"value-%d" % number])
        rig.change(b"change-%d" % number)
        rig.log.commit()
        if number == synced - 1:
            rig.settle()
    rig.kill()


def chain_of(directory: Path) -> Chain:
    seed = read_seed(SYSTEM_FILES, directory / "journal")
    slots = [Slot(path, 0, seed) for path in sorted((directory / "journal").glob("slot-*"))]
    found = find_chain(slots)
    for slot in slots:
        slot.close()
    assert found is not None
    return found


def last_groups(directory: Path, count: int) -> list[FoundGroup]:
    return list(chain_of(directory).groups)[-count:]


def test_torn_at_every_byte(tmp_path: Path) -> None:
    write_groups(tmp_path, synced=3, unsynced=3)
    found_groups = last_groups(tmp_path, 2)
    path, begin, end = (
        found_groups[0].slot.path,
        found_groups[0].position,
        found_groups[-1].position + found_groups[-1].length,
    )
    content = path.read_bytes()
    for cut in range(begin, end):
        path.write_bytes(content[:cut] + bytes(len(content) - cut))
        whole = [group for group in found_groups if group.position + group.length <= cut]
        lost = content[cut:end].count(0) != end - cut  # zeros that were zeros are no loss
        chain = chain_of(tmp_path)
        expected = whole[-1].sequence if whole else found_groups[0].sequence - 1
        if lost:
            assert expected <= chain.sequence <= expected + 1
        if chain.sequence == expected and cut - (whole[-1].position + whole[-1].length if whole else begin) >= 40:
            assert chain.torn is not None, "a torn tail is reported"


def test_a_tail_torn_into_stale_bytes(tmp_path: Path) -> None:
    """The end of a write did not reach the disk, which still has bytes of an earlier round there."""
    write_groups(tmp_path, synced=3, unsynced=3)
    found_groups = last_groups(tmp_path, 2)
    path = found_groups[0].slot.path
    content = path.read_bytes()
    stale = bytes(reversed(content))
    for cut in range(found_groups[0].position, found_groups[-1].position + found_groups[-1].length, 8):
        path.write_bytes(content[:cut] + stale[cut:])
        whole = [group.sequence for group in found_groups if group.position + group.length <= cut]
        assert chain_of(tmp_path).sequence == (whole[-1] if whole else found_groups[0].sequence - 1)


def test_every_bit_flipped(tmp_path: Path) -> None:
    write_groups(tmp_path, synced=3, unsynced=3)
    found_groups = last_groups(tmp_path, 2)
    path = found_groups[0].slot.path
    content = path.read_bytes()
    with path.open("r+b", buffering=0) as file:
        bytes_of = [
            (found, at) for found in found_groups for at in range(found.position, found.position + found.length)
        ]
        for group, at in bytes_of:
            for bit in range(8):
                file.seek(at)
                file.write(bytes((content[at] ^ 1 << bit,)))
                chain = chain_of(tmp_path)
                cut = chain.sequence == group.sequence - 1 and chain.torn is not None
                assert cut or (chain.sequence == found_groups[-1].sequence and content[at] == 0), (at, bit)
            file.seek(at)
            file.write(content[at : at + 1])


def test_recovered_state_stops_at_the_cut(tmp_path: Path) -> None:
    origin = tmp_path / "origin"
    write_groups(origin, synced=3, unsynced=3)
    found_groups = last_groups(origin, 3)
    number = found_groups[0].slot.path.name
    for sample, cut in enumerate(
        range(found_groups[0].position + 1, found_groups[-1].position + found_groups[-1].length, 61)
    ):
        directory = tmp_path / f"copy-{sample}"
        shutil.copytree(origin, directory)
        path = directory / "journal" / number
        content = path.read_bytes()
        path.write_bytes(content[:cut] + bytes(len(content) - cut))
        kept = 3 + sum(group.position + group.length <= cut for group in found_groups)
        rig = Rig(directory, QUIET)
        partition = rig.log.partition(PARTITION)
        values = rig.read(partition)
        assert values[:kept] == [b"value-%d" % index for index in range(kept)]
        assert len(values) in (kept, kept + 1), "at most padding was cut"
        assert rig.memory.changes == [b"change-%d" % index for index in range(len(values))]
        rig.append(partition, [b"after"], level=Level.SYNCED)
        rig.settle()
        rig.kill()
        rig.open()
        assert rig.read(rig.log.partition(PARTITION)) == [*values, b"after"]
        rig.log.close()


def test_torn_tail_is_logged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_groups(tmp_path, synced=3, unsynced=1)
    group = last_groups(tmp_path, 1)[0]
    with group.slot.path.open("r+b") as file:
        file.seek(group.position + group.length - 60)
        file.write(bytes(60))
    rig = Rig(tmp_path, QUIET)
    rig.log.close()
    reported = capsys.readouterr()
    assert "truncated an incomplete write" in reported.out + reported.err
    assert group.slot.path.name in reported.out + reported.err


def test_damage_of_synced_groups_is_corrupt(tmp_path: Path) -> None:
    write_groups(tmp_path, synced=4, unsynced=2)
    groups = chain_of(tmp_path).groups
    path = groups[0].slot.path
    before = {file: file.read_bytes() for file in (tmp_path / "journal").iterdir()}
    content = path.read_bytes()
    for group in groups[-4:-2]:
        path.write_bytes(flipped(content, group.position + group.length - 100))
        with pytest.raises(Corrupt, match=f"sequence={group.sequence} "):
            Rig(tmp_path, QUIET)
        path.write_bytes(content)
    assert {file: file.read_bytes() for file in (tmp_path / "journal").iterdir()} == before, "nothing was changed"
    Rig(tmp_path, QUIET).log.close()


def test_damage_of_the_start_is_corrupt_once_another_group_follows(tmp_path: Path) -> None:
    write_groups(tmp_path, synced=2, unsynced=1)
    Rig(tmp_path, QUIET).kill()
    rig = Rig(tmp_path, QUIET)
    rig.append(rig.log.partition(PARTITION), [b"more"], level=Level.SYNCED)
    rig.settle()
    rig.kill()
    group = chain_of(tmp_path).groups[0]
    group.slot.path.write_bytes(flipped(group.slot.path.read_bytes(), group.position + 70))
    with pytest.raises(Corrupt):
        Rig(tmp_path, QUIET)


def test_a_start_that_did_not_reach_the_disk_is_written_again(tmp_path: Path) -> None:
    write_groups(tmp_path, synced=2, unsynced=1)
    rig = Rig(tmp_path, QUIET)
    epoch = rig.log.epoch
    rig.kill()
    group = chain_of(tmp_path).groups[0]
    group.slot.path.write_bytes(bytes(group.slot.size))
    rig = Rig(tmp_path, QUIET)
    assert rig.log.epoch == epoch
    assert rig.read(rig.log.partition(PARTITION)) == [b"value-0", b"value-1", b"value-2"]
    rig.log.close()


def test_a_missing_journal_is_corrupt(tmp_path: Path) -> None:
    write_groups(tmp_path, synced=2, unsynced=1)
    Rig(tmp_path, QUIET).log.close()
    shutil.rmtree(tmp_path / "journal")
    with pytest.raises(Corrupt):
        Rig(tmp_path, QUIET)


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes((content[at] ^ 1,)) + content[at + 1 :]


def test_a_record_that_imitates_a_later_group_is_not_taken_for_one(tmp_path: Path) -> None:
    """Producers' bytes may lie anywhere in a reused slot; they must not pass as proof that synced data was damaged."""
    write_groups(tmp_path, synced=3, unsynced=3)
    last = last_groups(tmp_path, 1)[0]
    head = GroupHead(0)
    head.entry(EntryKind.CHANGE, 0, 0, b"forged!!")
    forged = bytes(head.finish(chain_of(tmp_path).start, last.sequence + 9, last.sequence + 8, 0, 0)) + b"forged!!"
    with last.slot.path.open("r+b") as file:
        file.seek(last.position + last.length + 4096)
        file.write(forged)
    chain = chain_of(tmp_path)
    assert chain.sequence == last.sequence
    assert chain.torn is None


def test_without_its_seed_a_journal_is_corrupt(tmp_path: Path) -> None:
    write_groups(tmp_path, synced=3, unsynced=0)
    for name in SEED_NAMES:
        (tmp_path / "journal" / name).unlink()
    with pytest.raises(Corrupt):
        Rig(tmp_path, QUIET)


@pytest.mark.parametrize("name", SEED_NAMES)
def test_a_damaged_copy_of_the_seed_is_rewritten(tmp_path: Path, name: str) -> None:
    write_groups(tmp_path, synced=3, unsynced=0)
    path = tmp_path / "journal" / name
    sound = path.read_bytes()
    for damaged in (flipped(sound, 9), flipped(sound, 20), b"", sound[:8]):
        path.write_bytes(damaged)
        rig = Rig(tmp_path, QUIET)
        assert rig.read(rig.log.partition(PARTITION)) == [b"value-%d" % number for number in range(3)]
        rig.kill()
        assert path.read_bytes() == sound


def test_a_plain_seed_of_earlier_versions_is_read_and_replaced(tmp_path: Path) -> None:
    write_groups(tmp_path, synced=3, unsynced=0)
    first, second = (tmp_path / "journal" / name for name in SEED_NAMES)
    sound = first.read_bytes()
    second.unlink()
    first.write_bytes(flipped(sound[8:16], 3))
    with pytest.raises(Corrupt, match="files are not empty"):
        Rig(tmp_path, QUIET)
    first.write_bytes(sound[8:16])
    rig = Rig(tmp_path, QUIET)
    assert rig.read(rig.log.partition(PARTITION)) == [b"value-%d" % number for number in range(3)]
    rig.log.close()
    assert first.read_bytes() == second.read_bytes() == sound


def test_a_new_journal_is_never_created_over_slots_that_are_not_empty(tmp_path: Path) -> None:
    write_groups(tmp_path, synced=3, unsynced=0)
    directory = tmp_path / "journal"
    before = {path: path.read_bytes() for path in directory.glob("slot-*")}
    for name in SEED_NAMES:
        (directory / name).unlink()
    restore_seed(SYSTEM_FILES, directory, 12345)
    with pytest.raises(Corrupt, match="files are not empty"):
        Rig(tmp_path, QUIET)
    assert {path: path.read_bytes() for path in directory.glob("slot-*")} == before


def write_marked(directory: Path) -> Rig:
    """Write three groups with a record each, and one that says that they are synced."""
    rig = Rig(directory, QUIET)
    partition = rig.log.open_partition(PARTITION)
    for number in range(3):
        rig.append(partition, [b"value-%d" % number], Level.SYNCED)
        rig.settle()
    rig.log._mark_synced()
    rig.settle()
    return rig


def test_damage_of_the_last_group_before_a_mark_is_corrupt(tmp_path: Path) -> None:
    write_marked(tmp_path).kill()
    closing, last = chain_of(tmp_path).groups[-1], chain_of(tmp_path).groups[-2]
    content = last.slot.path.read_bytes()
    for at in range(last.position, last.position + last.length):
        last.slot.path.write_bytes(flipped(content, at))
        reported = refusal(tmp_path)
        if reported:
            assert f"sequence={last.sequence} " in reported
            assert "slot-0000.pwj" in reported
        else:
            assert content[at] == 0, "only padding of a batch is not covered"
            assert chain_of(tmp_path).sequence == closing.sequence, "it is cut off"
    for at in range(closing.position, closing.position + closing.length, 3):
        last.slot.path.write_bytes(flipped(content, at))
        assert chain_of(tmp_path).sequence == last.sequence, "the marking group names no segments"


def test_after_a_clean_stop_damage_of_any_one_group_costs_nothing(tmp_path: Path) -> None:
    rig = write_marked(tmp_path)
    groups = chain_of(tmp_path).groups
    rig.log.close()
    (closing,) = chain_of(tmp_path).groups
    path, content = closing.slot.path, closing.slot.path.read_bytes()
    for group in (*groups, closing):
        for at in range(group.position, group.position + group.length, 7):
            path.write_bytes(flipped(content, at))
            last = chain_of(tmp_path).sequence
            assert last == closing.sequence or (group is closing and last == closing.sequence - 1)
        stopped = tmp_path.with_name(f"stopped-{group.sequence}")
        shutil.copytree(tmp_path, stopped)
        again = Rig(stopped, QUIET)
        assert again.read(again.log.partition(PARTITION)) == [b"value-0", b"value-1", b"value-2"]
        again.kill()


def refusal(directory: Path) -> str:
    """Return the error of a start that finds damage, or nothing."""
    try:
        chain_of(directory)
    except Corrupt as error:
        return error.message
    return ""


def test_damage_of_long_synced_groups_is_corrupt_after_a_kill(tmp_path: Path) -> None:
    rig = Rig(tmp_path, QUIET)
    partition = rig.log.open_partition(PARTITION)
    rig.append(partition, [b"value"], Level.SYNCED)
    rig.settle()
    last = chain_of(tmp_path).groups[-1]
    for _ in range(3):
        rig.log._expire()  # what the log's timer does when nothing is written
        rig.settle()
    rig.kill()
    assert chain_of(tmp_path).sequence == last.sequence + 1, "one group records it, once"
    path = last.slot.path
    path.write_bytes(flipped(path.read_bytes(), last.position + 70))
    with pytest.raises(Corrupt, match=f"sequence={last.sequence} "):
        Rig(tmp_path, QUIET)


# Truncated slots


@pytest.mark.parametrize("cut", [1, 7, 511, 512, 4095, 4097])
def test_a_slot_of_any_length_is_read(tmp_path: Path, cut: int) -> None:
    """A direct read needs whole blocks; a truncated file has any length."""
    rig = Rig(tmp_path, QUIET)
    partition = rig.log.open_partition(1)
    for number in range(5):
        rig.append(partition, [b"value-%d" % number])
        rig.log.commit()
    slot = rig.log._journal.current
    assert slot is not None
    path, written = slot.path, rig.log._journal.position
    rig.kill()
    for length in (slot.size - cut, written + cut):
        with path.open("r+b") as file:
            file.truncate(length)
        with open_offline(tmp_path, Memory, RigLoop()) as offline:
            assert [finding.severity for finding in examine(offline)] == [Severity.SOUND, Severity.SOUND]
    rig.open()
    assert rig.read(rig.log.partition(1)) == [b"value-%d" % number for number in range(5)]
    rig.log.close()


def test_doctor_reports_a_batch_that_cannot_be_sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It seals as a start does, so it reports what would stop a start."""
    rig = Rig(tmp_path, QUIET)
    rig.append(rig.log.open_partition(1), [b"value"])
    rig.log.commit()
    rig.kill()
    monkeypatch.setattr(writer, "survey", lambda *_: -1)
    with pytest.raises(Corrupt, match="cannot seal an invalid batch"):
        rig.open()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with open_offline(tmp_path, Memory, RigLoop()) as offline:
        (broken,) = [finding for finding in examine(offline) if finding.severity is Severity.BROKEN]
    assert "cannot seal an invalid batch partition=1" in broken.message
    assert broken.remedy is Remedy.BACKUP
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
