"""``polywire doctor`` and ``polywire log repair``: reports of damage, and the repaired state."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from polywire.broker import changes
from polywire.broker.broker import Broker
from polywire.broker.settings import BrokerSettings
from polywire.cli.main import run
from polywire.clock import SystemClock
from polywire.errors import Corrupt, ErrorCode
from polywire.log.journal import snapshot
from polywire.log.log import FileLog
from polywire.log.segments import format as segment_format
from polywire.log.settings import LogSettings
from polywire.store.files import Access
from polywire.store.system_files import SystemFile, SystemFiles
from polywire.types import Level, TopicName
from tests.unit.log.rig import RigLoop, abandon, batch_of, expecting

SIZES = LogSettings(slot_bytes=128 * 1024, disk_reserve_bytes=0)
TOPIC = "shop.orders"


def write_records(directory: Path, count: int = 400, *, is_killed: bool = False) -> None:
    """Create a broker's directory with sealed records, and with unsealed ones if it is killed, not shut down cleanly."""
    loop = RigLoop()
    broker = Broker.open(directory, BrokerSettings(), loop, SystemClock(), log_settings=SIZES)
    if broker.find_topic(TOPIC) is None:
        broker.create_topic(TopicName("shop", "orders"), 1)
    partition = broker.topic(TOPIC).partitions[0]
    for number in range(count):
        broker._log.append(partition.log, batch_of([b"%05d" % number + b"." * 700]), level=Level.WRITTEN, done=None)
        broker._log.commit()
        if number % 50 == 49:
            reported: list[int] = []
            broker._log.barrier(Level.SYNCED, expecting(reported))
            loop.run_until(lambda reported=reported: reported and not broker._log.sealing)  # type: ignore[misc, attr-defined]
    if not is_killed:
        broker.close()
        return
    log = broker._log
    assert isinstance(log, FileLog)
    synced: list[int] = []
    log.barrier(Level.SYNCED, expecting(synced))
    loop.run_until(lambda: synced)
    log._mark_synced()  # says that the last records are synced, as after some idle seconds
    abandon(log)


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.fixture
def rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, list[dict[str, Any]]]]:
    """Return a function that runs a command on the directory: (exit code, output)."""

    def answer(*words: str) -> tuple[int, list[dict[str, Any]]]:
        capsys.readouterr()
        code = run([*words, "--data-dir", str(tmp_path), "--output", "json"])
        text = capsys.readouterr().out
        return code, json.loads(text) if text else []

    return answer


Rows = Callable[..., tuple[int, list[dict[str, Any]]]]


def bad(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in found if row["state"] != "sound"]


def test_an_intact_directory_is_reported_intact_and_not_changed(tmp_path: Path, rows: Rows) -> None:
    write_records(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    code, found = rows("doctor")
    assert (code, bad(found)) == (0, [])
    assert {row["path"].split("/")[0] for row in found} == {"journal", "segments", "snapshots"}
    assert rows("log", "repair") == (0, [])
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("kind", ["journal/seed", "journal/seed.copy", "snapshots/*", "segments/*"])
def test_second_copies_are_rebuilt(tmp_path: Path, rows: Rows, kind: str) -> None:
    write_records(tmp_path)
    path = min(tmp_path.glob(kind))
    sound = path.read_bytes()
    flip(path, 18 if "seed" in kind else len(sound) - 20 if "segments" in kind else 70)
    code, found = rows("doctor")
    assert code == 3
    (worn,) = bad(found)
    assert (worn["state"], worn["remedy"]) == ("worn", "rebuild")
    assert worn["path"] in (str(path.relative_to(tmp_path)), "journal/seed")
    assert path.read_bytes() != sound, "nothing changes unless repair is requested"
    code, found = rows("doctor", "--rebuild")
    assert (code, bad(found)) == (0, [])
    assert path.read_bytes() == sound


def test_damaged_records_are_reported_by_topic_and_offsets(tmp_path: Path, rows: Rows) -> None:
    write_records(tmp_path)
    path = min(tmp_path.glob("segments/*"))
    flip(path, path.read_bytes().index(b"00007"))
    code, found = rows("doctor")
    assert code == 3
    (damaged,) = bad(found)
    assert (damaged["state"], damaged["topic"], damaged["partition"]) == ("damaged", TOPIC, 0)
    assert damaged["remedy"] == "backup"
    assert damaged["first_offset"] <= 7 < damaged["next_offset"]
    write_records(tmp_path, 10)  # a broker starts there


def test_repair_lets_a_broker_start_again(tmp_path: Path, rows: Rows) -> None:
    write_records(tmp_path, 20, is_killed=True)
    path = next(path for path in tmp_path.glob("journal/slot-*") if b"00010" in path.read_bytes())
    content = path.read_bytes()
    flip(path, content.rindex(b"PWG1", 0, content.index(b"00010")) + 16)
    before = path.read_bytes()
    code, found = rows("doctor")
    assert code == 4
    assert "polywire log repair" in bad(found)[0]["message"]
    assert bad(found)[0]["remedy"] == "repair"
    code, loss = rows("log", "repair", "--dry-run")
    assert code == 0
    assert path.read_bytes() == before
    (records,) = [row for row in loss if row["topic"]]
    assert (records["topic"], records["partition"], records["next_offset"]) == (TOPIC, 0, 20)
    assert rows("log", "repair") == (0, loss)
    assert [found.read_bytes() for found in tmp_path.glob("aside/*/slot-*")].count(before) == 1
    assert rows("doctor")[0] == 0
    write_records(tmp_path, 10)


def test_the_logs_of_all_processes_are_checked_and_repaired(
    tmp_path: Path, rows: Rows, capsys: pytest.CaptureFixture[str]
) -> None:
    write_records(tmp_path)
    other = tmp_path / "shards/0001"
    write_records(other, 20, is_killed=True)
    code, found = rows("doctor")
    assert (code, bad(found)) == (0, [])
    assert {row["path"] for row in found} >= {"journal/seed", "shards/0001/journal/seed"}
    flip(other / "journal/seed", 18)
    assert [row["path"] for row in bad(rows("doctor")[1])] == ["shards/0001/journal/seed"]
    assert rows("doctor", "--rebuild")[0] == 0
    path = next(path for path in other.glob("journal/slot-*") if b"00010" in path.read_bytes())
    content = path.read_bytes()
    flip(path, content.rindex(b"PWG1", 0, content.index(b"00010")) + 16)
    code, found = rows("log", "verify")
    assert code == 4
    assert [row["path"] for row in found] == ["shards/0001/journal"]
    code, lost = rows("log", "repair")
    assert code == 0
    assert [row["next_offset"] for row in lost if row["topic"]] == [20]
    assert rows("doctor")[0] == 0
    assert run(["segment", "list", "--data-dir", str(tmp_path)]) == 0
    assert str(other) in capsys.readouterr().err


def test_a_directory_that_cannot_be_written_is_checked(
    tmp_path: Path, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a disk that the system has mounted read-only because it fails."""
    write_records(tmp_path, 20, is_killed=True)
    opened = SystemFiles.open

    def open_to_read(files: SystemFiles, path: Path, access: Access, *more: int) -> SystemFile:
        if access not in (Access.READ, Access.DIRECT):
            raise OSError(errno.EROFS, "Read-only file system")
        return opened(files, path, access, *more)

    monkeypatch.setattr(SystemFiles, "open", open_to_read)
    for words in (("doctor",), ("log", "verify"), ("log", "repair", "--dry-run"), ("segment", "list")):
        code, found = rows(*words)
        assert (code, bad(found) if words == ("doctor",) else []) == (0, [])


def test_a_missing_segment_needs_a_backup(tmp_path: Path, rows: Rows, capsys: pytest.CaptureFixture[str]) -> None:
    write_records(tmp_path)
    path = min(tmp_path.glob("segments/*"))
    content = path.read_bytes()
    path.unlink()
    code, found = rows("doctor")
    assert code == 4
    (broken,) = bad(found)
    assert (broken["state"], broken["remedy"]) == ("broken", "backup")
    assert path.name in broken["message"]
    path.write_bytes(content)
    assert run(["doctor", "--data-dir", str(tmp_path)]) == 0
    assert "topics=1 partitions=1 groups=0 segments=" in capsys.readouterr().err


def test_a_directory_without_a_journal_is_rejected(tmp_path: Path, rows: Rows) -> None:
    assert rows("doctor")[0] == 1
    assert rows("log", "repair")[0] == 1


def test_a_bucket_is_checked_like_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory, bucket = tmp_path / "data", f"file://{tmp_path / 'bucket'}"
    write_records(directory)
    assert run(["cluster", "import", str(directory), bucket]) == 0

    def answer(*words: str) -> tuple[int, list[dict[str, Any]]]:
        capsys.readouterr()
        return run([*words, "--bucket", bucket, "--output", "json"]), json.loads(capsys.readouterr().out)

    code, found = answer("doctor")
    assert code == 0
    assert {row["state"] for row in found} == {"sound"}
    segments = [row["path"] for row in found if row["path"].startswith("shards/0000/segments/")]
    assert len(segments) > 1
    assert answer("log", "verify") == (0, [])
    flip(tmp_path / "bucket" / segments[0], 5000)
    code, (damage,) = answer("log", "verify")
    assert (code, damage["state"], damage["path"], damage["topic"]) == (3, "damaged", segments[0], TOPIC)
    (tmp_path / "bucket" / segments[1]).unlink()
    code, found = answer("log", "verify")
    assert code == 4
    assert [row["path"] for row in found if row["state"] == "broken"] == [segments[1]]
    assert run(["doctor"]) == 1
    assert run(["doctor", "--bucket", bucket, "--rebuild"]) == 1
    assert run(["doctor", "--bucket", f"file://{tmp_path / 'nothing'}"]) == 4
    assert not (tmp_path / "nothing").exists()


OLDER: dict[str, tuple[object, str, object]] = {
    "snapshot": (snapshot, "_VERSION", 2),
    "segment": (segment_format, "SEGMENT_VERSION", 1),
    "change": (changes, "_CHANGES", msgspec.msgpack.Decoder(changes.TopicPurged)),
}
"""Files that the previous version could not read."""


@pytest.mark.parametrize("kind", OLDER)
def test_files_of_a_newer_version_are_not_reported_as_damage(
    tmp_path: Path, rows: Rows, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The doctor reports the version to a user who downgrades, and offers no repair that drops data."""
    write_records(tmp_path, 20 if kind == "change" else 400, is_killed=kind == "change")
    monkeypatch.setattr(*OLDER[kind])
    kept = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "LOCK"]
    before = [path.read_bytes() for path in kept]
    with pytest.raises(Corrupt, match="a newer version of Polywire wrote this") as refused:
        write_records(tmp_path, 10)
    assert refused.value.code is ErrorCode.NEWER_FORMAT
    code, found = rows("doctor")
    assert code == 4
    assert {(row["state"], row["remedy"]) for row in bad(found)} == {("broken", "upgrade")}
    assert run(["log", "repair", "--data-dir", str(tmp_path)]) == 1
    assert "a newer version of Polywire wrote this" in capsys.readouterr().err
    assert [path.read_bytes() for path in kept] == before
    monkeypatch.undo()
    write_records(tmp_path, 10)
