"""``polywire group offsets``: import reads what export prints, and invalid input commits nothing."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator

import pytest

from polywire.cli.group import CommittedOffset, read_offsets
from polywire.cli.main import run
from polywire.client.connect import connect
from polywire.client.polywire import PolywireClient
from polywire.errors import Invalid
from polywire.records.columns import Record
from polywire.testing.thread import BrokerThread


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Iterator[BrokerThread]:
    with BrokerThread(wires=["polywire"]) as running:
        monkeypatch.setenv("POLYWIRE_ADDRESS", running.url())
        yield running


def with_client(
    broker: BrokerThread, *commits: tuple[str, int, int], members: tuple[str, ...] = ()
) -> dict[str, object]:
    """Create a topic, commit offsets and join groups; return the committed offsets by group."""

    async def work() -> dict[str, object]:
        client = await connect(broker.url())
        assert isinstance(client, PolywireClient)
        if not await client.topics():
            await client.create_topic("orders", 2)
            for partition in range(2):
                await client.produce("orders", [Record(b"x")] * 10, partition=partition)
        for group, partition, offset in commits:
            await client.commit(group, "orders", partition, offset)
        for group in members:
            await client.join(group, "orders", "m")
        found = {group.name: dict(group.positions) for group in await client.groups()}
        await client.close()
        return dict(found)

    return asyncio.run(work())


@pytest.mark.parametrize("form", ["jsonl", "csv"])
def test_import_restores_exported_offsets(
    form: str, broker: BrokerThread, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = with_client(broker, ("billing", 0, 3), ("billing", 1, 7), ("audit", 0, 10))
    assert run(["group", "offsets", "export", "--output", form]) == 0
    exported = capsys.readouterr()
    assert exported.err == "exported offsets=3 groups=2\n"
    with_client(broker, ("billing", 0, 0), ("billing", 1, 0), ("audit", 0, 0))
    monkeypatch.setattr("sys.stdin", io.StringIO(exported.out))
    assert run(["group", "offsets", "import", "--output", "jsonl"]) == 0
    moved = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["position"], row["new_position"]) for row in moved] == [(0, 10), (0, 3), (0, 7)]
    assert with_client(broker) == before
    monkeypatch.setattr("sys.stdin", io.StringIO(exported.out))
    assert run(["group", "offsets", "import", "--group", "copy", "--dry-run"]) == 0
    assert with_client(broker) == before


def test_offsets_are_set(broker: BrokerThread, capsys: pytest.CaptureFixture[str]) -> None:
    with_client(broker)
    assert run(["group", "offsets", "set", "billing", "orders", "0=4", "1=10"]) == 0
    assert with_client(broker) == {"billing": {0: 4, 1: 10}}
    assert run(["group", "offsets", "set", "billing", "orders", "0=9", "--dry-run"]) == 0
    assert with_client(broker) == {"billing": {0: 4, 1: 10}}
    capsys.readouterr()
    assert run(["group", "offsets", "show", "unknown"]) == 1
    assert "no such group group='unknown' known=billing code=group_missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("places", "reason"),
    [
        (
            ["0=4", "1=11"],
            "offset is beyond the end of the partition topic='orders' partition=1 offset=11 next_offset=10",
        ),
        (["0=4", "2=1"], "no such partition topic='orders' partition=2"),
        (["0=4", "1"], "argument is not PARTITION=OFFSET got='1'"),
        ([], "no offset to set"),
    ],
)
def test_no_offset_is_committed_unless_all_are_valid(
    places: list[str], reason: str, broker: BrokerThread, capsys: pytest.CaptureFixture[str]
) -> None:
    before = with_client(broker, ("billing", 0, 1))
    assert run(["group", "offsets", "set", "billing", "orders", *places]) == 1
    assert reason in capsys.readouterr().err
    assert with_client(broker) == before


def test_offsets_of_a_group_with_members_cannot_be_set(
    broker: BrokerThread, capsys: pytest.CaptureFixture[str]
) -> None:
    with_client(broker, ("billing", 0, 1), members=("billing",))
    assert run(["group", "offsets", "set", "billing", "orders", "0=0"]) == 1
    assert (
        "group has members (stop them first) group='billing' topic='orders' members=1 code=group_not_empty"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "lines",
    [
        ['{"group": "g", "topic": "t", "partition": 0}'],
        ['{"group": "g", "topic": "t", "partition": -1, "offset": 1}'],
        ['{"group": "g", "topic": "t", "partition": true, "offset": 1}'],
        ['{"topic": "t", "partition": 0, "offset": 1}'],
        ["[1]"],
        ["{"],
        ["[" * 9_000],
        ["group,topic,partition,offset", "g,t,0"],
        ["group,topic,partition,offset", '"g'],
        ['{"group": "' + "g" * 20_000 + '"}'],
    ],
)
def test_invalid_lines_are_rejected(lines: list[str]) -> None:
    with pytest.raises(Invalid, match="line="):
        read_offsets(lines, group=None)


def test_the_group_option_applies_to_lines_without_a_group() -> None:
    lines = ["topic,partition,offset", "", "orders,1,5"]
    assert read_offsets(lines, group="g") == [CommittedOffset("g", "orders", 1, 5)]
