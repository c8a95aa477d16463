"""A segment that is truncated under a running broker: reads of lost records fail, and nothing else does."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from polywire.client.connect import connect
from polywire.errors import BrokerError, ErrorCode
from polywire.records.columns import Record
from tests.behaviour.test_damage import COUNT, DAMAGED, sealed_values
from tests.broker_process import BrokerProcess


def test_reads_of_a_truncated_segment_fail_and_the_broker_keeps_running(tmp_path: Path) -> None:
    """A memory-mapped file would end the process at an access beyond its end."""
    with BrokerProcess(tmp_path / "data", wires=("polywire",)) as broker:
        asyncio.run(cut_and_read(broker))
        assert broker.stop() == 0, broker.log_text()


async def cut_and_read(broker: BrokerProcess) -> None:
    client = await connect(broker.url())
    await client.produce("beside", [Record(value=b"in the same file")], partition=0)
    await client.close()
    path, content, _ = await sealed_values(broker, "t")
    assert b"in the same file" in content
    client = await connect(broker.url())
    assert [record.value for record in await client.fetch("beside", 0, 0)] == [b"in the same file"], "the file is open"
    os.truncate(path, 0)  # within its last page a mapping would read zeros
    for offset in (*range(COUNT), DAMAGED, 0):
        with pytest.raises(BrokerError) as reported:
            await asyncio.wait_for(client.fetch("t", 0, offset), 120)
        assert reported.value.code is ErrorCode.CORRUPT
    await client.produce("t", [Record(value=b"goes on")], partition=0)
    assert [record.value for record in await client.fetch("t", 0, COUNT)] == [b"goes on"]
    await client.close()
