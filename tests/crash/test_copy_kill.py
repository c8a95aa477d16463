"""A copy between two brokers, all three killed repeatedly with -9: every record arrives once and in order."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import pytest

from polywire.client.connect import connect
from polywire.records.columns import Record
from tests.broker_process import BrokerProcess, child_environment

RECORDS: Final = 30_000
SECONDS_MAX: Final = 120.0
OPTIONS: Final = ("--slot-mib", "17")


async def fill(url: str) -> None:
    client = await connect(url)
    await client.create_topic("orders", 2)
    for partition in range(2):
        await client.produce("orders", [Record(b"%d" % number) for number in range(RECORDS)], partition=partition)
    await client.close()


async def read(url: str) -> list[list[int]]:
    client = await connect(url)
    found = []
    for part in await client.bounds("orders"):
        values: list[int] = []
        while records := await client.fetch("orders", part.partition, len(values)):
            values += [int(record.value or b"-1") for record in records]
        found.append(values)
    await client.close()
    return found


@pytest.mark.parametrize("wire", ["polywire", "kafka"])
def test_nothing_is_lost_or_duplicated(wire: str, tmp_path: Path) -> None:
    state = tmp_path / "state"
    with (
        BrokerProcess(tmp_path / "old", *OPTIONS, wires=["polywire"]) as old,
        BrokerProcess(tmp_path / "new", *OPTIONS, wires=sorted({"polywire", wire})) as new,
    ):
        asyncio.run(fill(old.url()))
        command = [sys.executable, "-m", "polywire", "record", "copy", f"{old.url()}/orders"]
        command += [f"{new.url(wire)}/orders", "--state", str(state)]

        def start() -> subprocess.Popen[bytes]:
            return subprocess.Popen(command, stderr=subprocess.PIPE, env=child_environment())

        copy = start()
        for victim in (new, old, new):
            _wait_for_progress(state, copy)
            victim.kill()
            victim.start()
        _wait_for_progress(state, copy)
        copy.kill()
        copy.communicate()
        with start() as copy:
            _, reported = copy.communicate(timeout=SECONDS_MAX)
        assert copy.returncode == 0, reported.decode()
        assert asyncio.run(read(new.url())) == [list(range(RECORDS))] * 2


def _wait_for_progress(state: Path, copy: subprocess.Popen[bytes]) -> None:
    """Wait until the copy has written its state again, or is done."""
    before = state.stat().st_ino if state.exists() else 0
    end = time.monotonic() + SECONDS_MAX
    while copy.poll() is None and (not state.exists() or state.stat().st_ino == before):
        assert time.monotonic() < end, "the copy makes no progress"
        time.sleep(0.005)
