"""Wrong options of producers and consumers raise when the object is created."""

from __future__ import annotations

import asyncio
import gc
import inspect
import socket
from collections.abc import Callable
from typing import Any

import pytest

import polywire
from polywire.client import link
from polywire.client.base import WireClient
from polywire.client.client import Client
from polywire.client.consumer import Consumer, ConsumerOptions
from polywire.client.producer import Producer, ProducerOptions
from polywire.errors import ErrorCode, Invalid, Missing, Unavailable
from polywire.types import Level

URL = "memory://options"


@pytest.mark.parametrize(("kind", "options"), [(Producer, ProducerOptions), (Consumer, ConsumerOptions)])
def test_the_typed_options_match_the_class(kind: type[Any], options: type[Any]) -> None:
    parameters = inspect.signature(kind).parameters.values()
    named = {one.name: one.annotation for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY}
    assert named == {name: hint.__forward_arg__ for name, hint in options.__annotations__.items()}


def _made(work: Callable[[Client], object]) -> None:
    async def make() -> None:
        work(Client(URL))

    asyncio.run(make())


def test_an_unknown_option_is_refused() -> None:
    def consumer(client: Client) -> object:
        return client.consumer("a", gruop="x")  # type: ignore[call-arg]

    def producer(client: Client) -> object:
        return client.producer(levle="synced")  # type: ignore[call-arg]

    with pytest.raises(TypeError, match="did you mean 'group'"):
        _made(consumer)
    with pytest.raises(TypeError, match="did you mean 'level'"):
        _made(producer)


def test_an_unknown_option_of_the_blocking_client_is_refused() -> None:
    with polywire.connect_sync(URL) as client:
        with pytest.raises(TypeError, match="did you mean 'group'"):
            client.consumer("a", gruop="x")  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="unknown option of a producer option='acks'"):
            client.producer(acks="all")  # type: ignore[call-arg]
        with pytest.raises(Invalid, match="no such level"):
            client.producer(level="all")


@pytest.mark.parametrize("level", ["synced", Level.SYNCED])
def test_a_level_is_a_member_or_its_name(level: Level | str) -> None:
    async def run() -> None:
        async with polywire.connect(URL) as client, client.producer(level=level) as producer:
            place = await producer.send_and_wait("levels", "x", partition=0)
            assert place.partition == 0

    asyncio.run(run())


def test_errors_of_seek_say_what_to_do() -> None:
    async def run() -> None:
        async with polywire.connect(URL) as client:
            await client.create_topic("seeking", 2)
            consumer = client.consumer("seeking")
            with pytest.raises(Missing, match="topics=seeking"):
                consumer.seek("another", 0, 0)
            async with consumer:
                with pytest.raises(Missing, match="assigned=0,1 topics=seeking"):
                    consumer.seek("seeking", 7, 0)

    asyncio.run(run())


def test_an_error_about_a_large_record_identifies_it() -> None:
    async def run(size: int) -> Invalid:
        async with polywire.connect(URL) as client:
            with pytest.raises(Invalid) as refused:
                await client.send("large", b"x" * size, key="customer 7")
            return refused.value

    for size in (20_000_000, 12_000_000):
        error = asyncio.run(run(size))
        assert error.code is ErrorCode.RECORD_TOO_LARGE
        assert "topic='large' key=b'customer 7'" in error.message
        assert f"bytes={size + 10}" in error.message
        assert error.message.endswith("limit=10000000 setting=record_bytes_max")


def test_connecting_ends_after_connect_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the protocol's own response timeout is."""

    async def never(_: str) -> WireClient:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(link, "connect", never)
    monkeypatch.setattr(link, "ATTEMPT_S_MIN", 0.01)
    with pytest.raises(Unavailable, match=r"no response in time.* address=broker:9555"):
        asyncio.run(_connect("polywire://me:secret@broker:9555"))


@pytest.mark.parametrize("scheme", ["polywire://", "kafka://me:secret@", "iggy://me:secret@"])
def test_an_abandoned_connection_is_closed(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The port accepts connections but never responds, like one of another protocol.

    An unclosed socket fails the test.
    """
    monkeypatch.setattr(link, "ATTEMPT_S_MIN", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with pytest.raises(Unavailable, match="no response in time"):
            asyncio.run(_connect(f"{scheme}127.0.0.1:{listener.getsockname()[1]}"))
        gc.collect()


async def _connect(url: str) -> None:
    async with polywire.connect(url, connect_s=0):
        raise AssertionError


def test_the_former_name_of_partitions_is_deprecated() -> None:
    with polywire.connect_sync(URL) as client:
        client.create_topic("renamed", partitions=2)
        with pytest.warns(DeprecationWarning, match="use partitions"):
            client.create_topic("formerly", partition_count=4)
        found = {topic.name: topic.partitions for topic in client.topics()}
        assert (found["renamed"], found["formerly"]) == (2, 4)

    async def run() -> None:
        async with polywire.connect(URL) as asynchronous:
            with pytest.warns(DeprecationWarning, match="use partitions"):
                await asynchronous.create_topic("formerly-async", partition_count=4)

    asyncio.run(run())
