"""A directory has at most one broker, whatever happened to the file ``LOCK``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from polywire.errors import Busy, Unavailable
from polywire.store.data_directory import MARK_FILE
from tests.unit.log.rig import Rig


def deleted(directory: Path) -> None:
    (directory / MARK_FILE).unlink()


def replaced(directory: Path) -> None:
    deleted(directory)
    (directory / MARK_FILE).write_bytes(b"1\n")


def moved_aside_and_recreated(directory: Path) -> None:
    aside = directory.rename(directory.with_name("aside"))
    directory.mkdir()
    for path in aside.iterdir():
        if path.name != MARK_FILE:
            path.rename(directory / path.name)


@pytest.mark.parametrize("change", [lambda _: None, deleted, replaced, moved_aside_and_recreated])
def test_a_second_broker_is_refused(tmp_path: Path, change: Callable[[Path], None]) -> None:
    directory = tmp_path / "data"
    rig = Rig(directory)
    partition = rig.log.open_partition(1)
    rig.append(partition, [b"first"])
    rig.settle()
    change(directory)
    with pytest.raises((Busy, Unavailable), match=r"in use|another process"):
        Rig(directory)
    rig.append(partition, [b"second"])
    rig.settle()
    rig.kill()
    again = Rig(directory)
    assert again.read(again.log.partition(1)) == [b"first", b"second"]
    again.log.close()


@pytest.mark.parametrize("change", [lambda _: None, deleted, replaced])
def test_a_refused_broker_has_changed_nothing(tmp_path: Path, change: Callable[[Path], None]) -> None:
    rig = Rig(tmp_path)
    being_made = (
        tmp_path / "journal" / ".slot-0099.pwj"
    )  # a start would delete this file if no broker had the directory open
    being_made.write_bytes(b"a slot in the making")
    change(tmp_path)
    with pytest.raises(Busy, match="in use"):
        Rig(tmp_path)
    assert being_made.exists()
    rig.log.close()


def test_closing_releases_the_directory_while_read_buffers_are_still_held(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    partition = rig.log.open_partition(1)
    rig.append(partition, [b"first"])
    rig.log.commit()
    found = rig.read_once(partition, 0)
    rig.log.close()
    rig.open()
    assert len(found.chunks) == 1
    rig.log.close()
