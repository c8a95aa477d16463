"""``polywire mcp``: a client of the Model Context Protocol looks at a broker."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import mcp
import pytest

import polywire
from polywire.cli.mcp import READING, WRITING
from tests.broker_process import BrokerProcess

LIMIT_S = 60.0


def command(*words: str) -> list[str]:
    return ["-m", "polywire", *words]


@asynccontextmanager
async def connected(broker: BrokerProcess, *words: str) -> AsyncGenerator[mcp.Client, None]:
    arguments = command("mcp", "--address", broker.url(), "--http", broker.url("http"), *words)
    server = mcp.StdioServerParameters(command=sys.executable, args=arguments, env=dict(os.environ))
    async with asyncio.timeout(LIMIT_S), mcp.Client(server) as client:
        yield client


async def result_of(client: mcp.Client, tool: str, **arguments: Any) -> Any:
    found = await client.call_tool(tool, arguments)
    assert not found.is_error, found.content
    return found.structured_content


async def error_of(client: mcp.Client, tool: str, **arguments: Any) -> str:
    found = await client.call_tool(tool, arguments)
    assert found.is_error
    (content,) = found.content
    return str(content.text)  # type: ignore[union-attr]  # an error is text


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path, wires=["polywire", "http"]) as process:
        yield process


def test_an_assistant_finds_why_a_group_is_behind(broker: BrokerProcess) -> None:
    async def look() -> None:
        async with connected(broker) as client, polywire.connect(broker.url()) as broker_client:
            assert [tool.name for tool in (await client.list_tools()).tools] == list(READING)
            await broker_client.create_topic("orders", 2)
            async with broker_client.producer() as producer:
                for number in range(10):
                    await producer.send_json("orders", {"number": number}, partition=0)
            async with broker_client.consumer("orders", group="billing", auto_commit=False) as consumer:
                await consumer.batch(4)
                await consumer.commit()
                (group,) = (await result_of(client, "list_groups"))["groups"]
                assert (group["group"], group["members"], group["lag_records"]) == ("billing", 1, 6)
                found = await result_of(client, "explain_group", group="billing", topic="orders", seconds=1)
                assert "does not commit" in found["reasons"][0]
            found = await result_of(client, "explain_group", group="billing", topic="orders", seconds=0.5)
            assert found["reasons"][0].startswith("The group has no members")
            assert "did you mean 'billing'" in await error_of(client, "describe_group", group="biling", topic="orders")

    asyncio.run(look())


def test_an_assistant_reads_topics(broker: BrokerProcess) -> None:
    async def look() -> None:
        async with connected(broker) as client, polywire.connect(broker.url()) as broker_client:
            await broker_client.create_topic("orders", 1)
            await broker_client.send_json("orders", {"price": 12}, key="a", headers={"source": "web"})
            await broker_client.send("orders", b"\xff\x00")
            await broker_client.send("orders", "x" * 5_000)
            topics = await result_of(client, "list_topics")
            assert topics == {"topics": [{"topic": "orders", "partitions": 1}], "omitted": 0}
            description = await result_of(client, "describe_topic", topic="orders")
            assert description["partitions"] == [{"partition": 0, "first_offset": 0, "next_offset": 3}]
            first, second, third = (await result_of(client, "read_records", topic="orders", partition=0))["records"]
            assert (first["key"], first["value"], first["headers"]) == ("a", '{"price":12}', {"source": "web"})
            assert second["value"] == {"base64": "/wA=", "bytes": 2}
            assert (len(third["value"]["text"]), third["value"]["characters"]) == (2_000, 5_000)
            assert (await result_of(client, "health"))["version"] == polywire.__version__
            assert (await result_of(client, "list_links"))["links"] == []
            rows = await result_of(client, "sql", statement="SELECT count(*) AS n FROM orders")
            assert rows["rows"] == [[3]]
            assert "only a single SELECT" in await error_of(client, "sql", statement="DROP TABLE orders")
            assert "no such topic" in await error_of(client, "describe_topic", topic="ordrs")

    asyncio.run(look())


def test_writing_must_be_allowed(broker: BrokerProcess) -> None:
    async def look() -> None:
        async with connected(broker) as client:
            assert (await client.call_tool("produce", {"topic": "orders", "value": "x"})).is_error
        async with connected(broker, "--allow-writes") as client:
            assert [tool.name for tool in (await client.list_tools()).tools] == [*READING, *WRITING]
            await result_of(client, "create_topic", topic="orders", partitions=1)
            assert await result_of(client, "produce", topic="orders", value="x") == {"partition": 0, "offset": 0}

    asyncio.run(look())
