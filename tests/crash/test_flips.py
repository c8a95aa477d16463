"""Flipped bytes in every file of a data directory, after a clean stop and after a kill.

Each start has everything that was acknowledged, or reports what is damaged. It never silently returns less, or anything
else.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

import pytest

from polywire.errors import BrokerError, Corrupt
from polywire.log.doctor import Finding, Severity, examine, open_offline
from polywire.log.partition.partition import FilePartition
from polywire.types import Level
from tests.unit.log.rig import SMALL, Memory, Rig, RigLoop, batch_of, records_of

TOKENS = [bytes([number]) * 16 for number in (1, 2)]
KINDS = ("journal/seed", "journal/seed.copy", "journal/slot-", "segments/", "snapshots/", "LOCK")
STORED = ("segments", "snapshots")
SAMPLES = 30  # flips of each kind of file


def write_history(directory: Path, *, clean: bool) -> tuple[list[bytes], list[bytes]]:
    """Write synced records of all kinds; return the values of partition 1, and the changes."""
    rig = Rig(directory, SMALL)
    partition, other = rig.log.open_partition(1), rig.log.open_partition(2)
    rig.log.stage(TOKENS[0], partition, batch_of([b"staged"]), expires_at_us=2**62, level=Level.WRITTEN, done=None)
    values: list[bytes] = []
    for number in range(150):
        values.append(b"%05d" % number + b"." * 700)
        rig.append(partition, [values[-1]])
        rig.append(other, [b"o" * 300])
        rig.change(b"change-%d" % number)
        rig.log.commit()
        if number % 25 == 24:
            rig.settle()
    rig.log.publish([TOKENS[0]], b"p", level=Level.SYNCED, done=lambda _: None)
    rig.memory.apply(b"p")
    values.append(b"staged")
    rig.settle()
    changes = list(rig.memory.changes)
    if clean:
        rig.log.close()
    else:
        rig.log._expire()  # the log's timer: records which sequence was synced last
        rig.settle()
        rig.kill()
    return values, changes


def read_what_is_sound(rig: Rig, partition: FilePartition) -> tuple[dict[int, bytes], set[int]]:
    """Return values by offset, and the offsets that are reported as damaged."""
    offset, found, reported = 0, dict[int, bytes](), set[int]()
    while offset < partition.next_offset:
        try:
            read = rig.read_once(partition, offset)
        except Corrupt as error:
            facts = dict(fact.split("=") for fact in error.message.split() if "=" in fact)
            reported.update(range(int(facts["first_offset"]), int(facts["next_offset"])))
            assert "segments/" in facts["segment"]
            offset = int(facts["next_offset"])
            continue
        found.update((record.offset, cast(bytes, record.value)) for record in records_of(read))
        offset = read.next_offset
        read.pin.release()
    return found, reported


def examined(directory: Path) -> list[Finding]:
    with open_offline(directory, Memory, RigLoop()) as patient:
        return examine(patient)


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes((byte ^ 1 << at % 8,)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop", ["stopped", "killed"])
def test_a_flipped_byte_is_harmless_or_reported(tmp_path: Path, stop: str, kind: str) -> None:
    origin = tmp_path / "origin"
    values, changes = write_history(origin, clean=stop == "stopped")
    files = sorted(
        path for path in origin.rglob("*") if path.is_file() and str(path.relative_to(origin)).startswith(kind)
    )
    assert files
    places = [(path, at) for path in files for at, byte in enumerate(path.read_bytes()) if byte or "slot-" not in kind]
    refused = damaged = 0
    for path, at in random.Random(7).sample(places, min(SAMPLES, len(places))):
        copy = tmp_path / "copy"
        shutil.copytree(origin, copy)
        flip(copy / path.relative_to(origin), at)
        worst = {finding.severity for finding in examined(copy)}
        try:
            rig = Rig(copy, SMALL)
        except Corrupt as error:
            refused += 1
            assert Severity.BROKEN in worst, "the doctor agrees"
            named = any(name in error.message for name in ("slot-", "segments/", "journal"))
        else:
            named = True
            found, reported = read_what_is_sound(rig, rig.log.partition(1))
            expected = {offset: value for offset, value in enumerate(values) if offset not in reported}
            assert found == expected, (path.name, at)
            assert rig.memory.changes == changes, (path.name, at)
            damaged += bool(reported)
            assert Severity.BROKEN not in worst
            assert (Severity.DAMAGED in worst) >= bool(reported), "the doctor finds it, too"
            rig.log.close()
        assert named, "damage is reported with a name"
        shutil.rmtree(copy)
    if kind == "segments/":
        assert damaged, "most of a segment is records"
        assert not refused
    if kind in ("journal/seed", "journal/seed.copy", "snapshots/", "LOCK"):
        assert not refused
        assert not damaged


Harm = Callable[[bytes], bytes | None]
"""Damages the content of a file. None means that the file is missing."""

HARMS: Mapping[str, Harm] = {
    "missing": lambda content: None,
    "empty": lambda content: b"",
    "truncated": lambda content: content[: len(content) // 2],
    "zeros": lambda content: bytes(len(content)),
}


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("with_copy", [False, True], ids=["one", "with its copy"])
def test_a_damaged_file_costs_no_other_file(tmp_path: Path, harm: str, *, with_copy: bool) -> None:
    """A damaged list of files must not make the files look as if they were no longer needed.

    A start can lose what only the newest journal file has: its groups may as well have been lost in a power failure.
    """
    origin = tmp_path / "origin"
    values, changes = write_history(origin, clean=False)
    for path in sorted(path for path in origin.rglob("*") if path.is_file()):
        copy = tmp_path / "copy"
        shutil.copytree(origin, copy)
        names = (
            {path.name} if not with_copy else {path.stem if path.suffix == ".copy" else path.name, f"{path.name}.copy"}
        )
        harmed = [copy / path.relative_to(origin).with_name(name) for name in names]
        for other in [found for found in harmed if found.exists()]:
            content = HARMS[harm](other.read_bytes())
            other.unlink()
            if content is not None:
                other.write_bytes(content)
        before = stored_files(copy)
        try:
            rig = Rig(copy, SMALL)
        except BrokerError:
            assert stored_files(copy) == before, f"{path.relative_to(origin)} was harmed"
        else:
            for _ in range(2):  # a start deletes files, too
                end = rig.log.partition(1).next_offset if path.name.startswith("slot-") else len(values)
                found, reported = read_what_is_sound(rig, rig.log.partition(1))
                assert found == {at: value for at, value in enumerate(values[:end]) if at not in reported}
                assert not reported or path.suffix == ".pws", f"{path.relative_to(origin)} was harmed"
                assert rig.memory.changes == changes[: len(rig.memory.changes)]
                assert len(rig.memory.changes) == len(changes) or path.name.startswith("slot-")
                rig.settle()
                rig.kill()
                rig.open()
            rig.log.close()
        shutil.rmtree(copy)


def stored_files(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for part in STORED for path in (directory / part).rglob("*")}
