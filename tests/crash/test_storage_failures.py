"""A disk that fails at any call, during opening, writing and sealing: nothing acknowledged is lost."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from polywire.errors import BrokerError, Busy
from polywire.store.system_files import SystemMapping
from polywire.types import Level
from tests.unit.log.rig import SMALL, Rig, batch_of

CALLS = ("pwritev", "fdatasync", "fsync", "link", "unlink", "posix_fallocate")
NEVER = 2**62
TOKENS = [bytes([number]) * 16 for number in (1, 2, 3)]


class Faults:
    """Counts calls that touch the disk; from call ``at`` on, ``count`` of them fail."""

    def __init__(self, patch: pytest.MonkeyPatch, code: int = errno.EIO) -> None:
        self.calls = 0
        self.at = -1
        self.count = 1
        self._code = code
        for name in CALLS:
            patch.setattr(os, name, self._wrap(name, getattr(os, name)))
        patch.setattr(SystemMapping, "flush", self._wrap("flush", SystemMapping.flush))

    def _wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            number = self.calls
            self.calls += 1
            if 0 <= self.at <= number < self.at + self.count:
                raise OSError(self._code, f"{name} failed on request")
            return real(*arguments, **named)

        return call


def write_history(directory: Path) -> tuple[list[bytes], list[bytes]]:
    """Write sealed, unsealed, staged, published and trimmed data, and kill the writer; return values and changes."""
    rig = Rig(directory, SMALL)
    partition, other = rig.log.open_partition(1), rig.log.open_partition(2)
    values: list[bytes] = []
    for number in range(60):
        values.append(b"%d" % number + b"." * 2000)
        rig.append(partition, values[-1:])
        rig.change(b"%d" % number)
        if number in (5, 30, 55):
            token = TOKENS[(5, 30, 55).index(number)]
            rig.log.stage(token, partition, batch_of([token]), expires_at_us=NEVER, level=Level.WRITTEN, done=None)
            rig.append(other, [b"." * 900])
        if number in (35, 58):
            token = TOKENS[(35, 58).index(number)]
            rig.log.publish([token], b"p", level=Level.WRITTEN, done=lambda _: None)
            rig.memory.apply(b"p")
            values.append(token)
        rig.log.commit()
        if number % 20 == 19:
            rig.settle()
    rig.log.trim(2, 2)
    rig.log.commit()
    changes = rig.memory.changes
    rig.kill()
    return values, changes


def check(directory: Path, values: list[bytes], changes: list[bytes]) -> None:
    rig = Rig(directory, SMALL)
    assert rig.read(rig.log.partition(1)) == values
    assert rig.memory.changes == changes
    assert rig.log.partition(2).first_offset == 2
    assert list(rig.log.staged_partitions([TOKENS[2]])) == [1]
    rig.log.publish([TOKENS[2]], b"p", level=Level.WRITTEN, done=lambda _: None)
    rig.log.commit()
    assert rig.read(rig.log.partition(1), len(values)) == [TOKENS[2]]
    rig.kill()
    rig.open()
    assert rig.read(rig.log.partition(1)) == [*values, TOKENS[2]]
    rig.log.close()


def test_opening_fails_at_any_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    origin = tmp_path / "origin"
    values, changes = write_history(origin)
    step, calls, failed = 0, calls_of_opening(origin, tmp_path, monkeypatch), 0
    while step < calls:
        directory = tmp_path / f"copy-{step}"
        shutil.copytree(origin, directory)
        for at in (step, step // 2):  # twice in a row, at different points
            with monkeypatch.context() as patch:
                faults = Faults(patch)
                faults.at = at
                failed += not opens(directory)
                calls = max(calls, faults.calls)
        check(directory, values, changes)
        shutil.rmtree(directory)
        step += 1
    assert failed > 20


def calls_of_opening(origin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how many calls can fail."""
    directory = shutil.copytree(origin, tmp_path / "sound")
    with monkeypatch.context() as patch:
        faults = Faults(patch)
        assert opens(directory)
    return faults.calls


def opens(directory: Path) -> bool:
    """Open the log and kill it; return False if it did not open."""
    try:
        Rig(directory, SMALL).kill()
    except BrokerError:
        return False
    return True


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_writing_fails_at_any_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    for step in range(0, 200, 7):
        directory = tmp_path / f"step-{step}"
        reported: list[tuple[int, bytes]] = []
        with monkeypatch.context() as patch:
            faults = Faults(patch, code)
            rig = Rig(directory, SMALL)
            rig.log.open_partition(1)
            rig.settle()
            faults.at = faults.calls + step
            write_until_refused(rig, reported)
            rig.kill()
        rig = Rig(directory, SMALL)
        values = rig.read(rig.log.partition(1))
        for offset, value in reported:
            assert values[offset] == value
        rig.log.close()
        shutil.rmtree(directory)


def write_until_refused(rig: Rig, reported: list[tuple[int, bytes]]) -> None:
    """Append numbered values until the log fails; acknowledged ones are added to ``reported``."""
    for number in range(120):
        value = b"%d" % number + b"." * 1500
        level = Level.SYNCED if number % 9 == 0 else Level.WRITTEN
        try:
            rig.log.append(rig.log.partition(1), batch_of([value]), level=level, done=partial(note, reported, value))
        except Busy:
            rig.loop.run_pass(0.002)
        except BrokerError:
            return
        rig.loop.run_pass(0.001 if rig.log.congested else 0.0)


def note(reported: list[tuple[int, bytes]], value: bytes, offset: int | BrokerError) -> None:
    if not isinstance(offset, BrokerError):
        reported.append((offset, value))
