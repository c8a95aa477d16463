"""``polywire record compare`` from the command line."""

from __future__ import annotations

import asyncio
import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence

import pytest

from polywire.cli.admin import AdminApi
from polywire.cli.compare import with_source_password
from polywire.cli.main import run
from polywire.cli.output import Failed
from polywire.client.connect import connect
from polywire.records.columns import Record
from polywire.testing.thread import BrokerThread


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerThread]:
    with BrokerThread(wires=["polywire", "kafka"]) as running:
        asyncio.run(_fill(running.url(), FOUR))
        yield running


FOUR = {"orders": (b"a", b"b"), "same": (b"a", b"b"), "part": (b"a",), "bad": (b"a", b"\x1b[2J")}


async def _fill(url: str, topics: Mapping[str, Sequence[bytes]]) -> None:
    client = await connect(url)
    for name, values in topics.items():
        await client.create_topic(name, 1)
        await client.produce(name, [Record(value, origin_time_us=1_000) for value in values])
    await client.close()


@pytest.fixture(autouse=True)
def address(broker: BrokerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYWIRE_ADDRESS", broker.url())


def test_equal_topics(broker: BrokerThread, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["record", "compare", f"{broker.url('kafka')}/orders", "same"]) == 0
    out, err = capfd.readouterr()
    assert out.split()[-10:] == ["orders", "0", "2", "2", "0", "1", "0", "1", "0", "equal"]
    assert err.splitlines()[-1] == "equal topics=1 partitions=1 records=2 missing=0 different_partitions=0"
    assert run(["record", "compare", broker.url("kafka"), broker.url(), "--topics", "ord*,same"]) == 0
    assert "equal topics=2" in capfd.readouterr().err


def test_the_first_difference_is_printed_and_cannot_control_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["record", "compare", "orders", "bad"]) == 1
    lines = capfd.readouterr().err.splitlines()
    assert lines[0].startswith('different: topic=orders partition=0 offset=1 field=value source="b" copy="\\u001b[2J"')
    assert lines[-1] == "different topics=1 partitions=1 records=2 missing=0 different_partitions=1"


def test_a_prefix(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["record", "compare", "orders", "part"]) == 1
    assert run(["record", "compare", "orders", "part", "--prefix"]) == 0
    assert capfd.readouterr().err.splitlines()[-1].startswith("equal topics=1 partitions=1 records=1 missing=1")


def test_records_that_clients_have_written_after_a_cut_over_are_counted(
    broker: BrokerThread, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    link = {"start": "earliest", "source": f"{broker.url()}", "user": "", "more": False, "topics": ["orders"]}
    rows = [{"topic": "part", "phase": "cut-over"}]
    monkeypatch.setattr(AdminApi, "request", lambda *_: {**link, "topic_reports": rows})
    with BrokerThread(wires=["polywire"]) as copy:
        asyncio.run(_fill(copy.url(), {"part": (b"a", b"written here", b"too")}))
        assert run(["link", "compare", "old", "--address", copy.url()]) == 0
        lines = capfd.readouterr().err.splitlines()
        assert lines[0].endswith("which is not compared offsets=2 topic=part partition=0")
        assert lines[-1] == "equal topics=1 partitions=1 records=1 missing=0 different_partitions=0"
        rows[0]["phase"] = "following"
        assert run(["link", "compare", "old", "--address", copy.url()]) == 1
        assert "only_copy=2" in capfd.readouterr().err


def test_output_for_programs(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["record", "compare", "orders", "bad", "--output", "json"]) == 1
    [row] = json.loads(capfd.readouterr().out)
    assert (row["result"], row["difference"]["field"], row["ranges"][0]["copy_records"]) == ("different", "value", 2)
    assert row["source_checksum"] != row["copy_checksum"]
    assert run(["record", "compare", "orders", "same", "--output", "csv"]) == 0
    [cells] = csv.DictReader(io.StringIO(capfd.readouterr().out))
    assert cells["result"] == "equal"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["orders", "orders"], "same topic"),
        (["orders", "same", "--ignore", "kee"], "no such field field='kee' known=event,headers"),
        (["HERE", "HERE", "--topics", "none*"], "no topic matches pattern='none*' end=source known=bad,orders"),
        (["HERE", "HERE", "--topics", "ordrs"], "did you mean 'orders'"),
        (["polywire://127.0.0.1:1/orders", "orders"], "cannot connect"),
        (["polywire://127.0.0.1:1", "orders"], "topic is missing"),
    ],
)
def test_wrong_arguments(
    words: list[str], reason: str, broker: BrokerThread, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["record", "compare", *(word.replace("HERE", broker.url()) for word in words)]) == 1
    assert reason in capfd.readouterr().err


def test_the_password_of_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYWIRE_SOURCE_PASSWORD", "p@ss")
    assert with_source_password("kafka://reader@old:9092") == "kafka://reader:p%40ss@old:9092"
    assert with_source_password("kafka://reader:x@old:9092") == "kafka://reader:x@old:9092"
    assert with_source_password("kafka://old:9092") == "kafka://old:9092"
    monkeypatch.delenv("POLYWIRE_SOURCE_PASSWORD")
    monkeypatch.setenv("POLYWIRE_PASSWORD", "of this broker")
    with pytest.raises(Failed, match="POLYWIRE_SOURCE_PASSWORD user='reader'"):
        with_source_password("kafka://reader@old:9092")
