"""Callbacks that fail, that use the client or that end the program, and clients in a fork."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import pytest

import polywire
from polywire import Client
from polywire.client import lane
from polywire.client.base import Produced
from polywire.client.blocking import SyncClient, SyncProducer
from polywire.client.lane import Delivery
from polywire.client.record import encode_batch
from polywire.errors import Invalid, Unavailable
from tests.unit.client.served import Play, Served


def ends(_: Delivery) -> NoReturn:
    sys.exit(1)


def fails(_: Delivery) -> NoReturn:
    raise ValueError("a fault of the application")


@pytest.mark.parametrize(("callback", "error"), [(fails, ValueError), (ends, SystemExit)])
def test_a_producer_goes_on_after_a_callback_failed(
    served: Served, caplog: pytest.LogCaptureFixture, callback: Callable[[Delivery], None], error: type[BaseException]
) -> None:
    with polywire.connect_sync(served.address) as client, client.producer(on_delivery=callback) as producer:
        assert [producer.send_and_wait("t", "v", partition=0) for _ in range(3)] == [Produced(0, n) for n in range(3)]
    logged = [record.exc_info[0] for record in caplog.records if record.name == "asyncio" and record.exc_info]
    assert logged == [error] * 3


def test_deliveries_are_reported_before_a_flush_ends(play: Play) -> None:
    async def scenario(client: Client) -> None:
        seen: list[Delivery] = []
        async with client.producer(linger_ms=100_000, on_delivery=seen.append) as producer:
            for count in range(1, 4):
                receipt = await producer.send("t", "v", partition=0)
                await producer.flush()
                assert len(seen) == count
                assert receipt.done
            await producer.send_and_wait("t", "v", partition=0)
            assert len(seen) == 4

    play(scenario)


def test_a_callback_cannot_wait_for_its_own_thread(served: Served) -> None:
    errors: list[BaseException] = []

    def use_the_client(_: Delivery) -> None:
        with pytest.raises(Invalid, match="use another thread") as caught:
            client.topics()
        errors.append(caught.value)

    with polywire.connect_sync(served.address) as client, client.producer(on_delivery=use_the_client) as producer:
        producer.send_and_wait("t", "v")
        producer.send_and_wait("t", "v")
    assert len(errors) == 2


def test_a_batch_that_cannot_be_encoded_does_not_stop_the_producer(
    play: Play, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def encode_unless_bad(values: list[bytes | None], *rest: Any, **options: Any) -> bytearray:
        if b"bad" in values:
            raise OverflowError("unforeseen")
        return encode_batch(values, *rest, **options)

    monkeypatch.setattr(lane, "encode_batch", encode_unless_bad)

    async def scenario(client: Client) -> None:
        async with client.producer() as producer:
            await producer.send_and_wait("t", "a", partition=0)
            with pytest.raises(Unavailable, match="could not be sent reason=OverflowError"):
                await producer.send_and_wait("t", "bad", partition=0)
            await producer.send_and_wait("t", "b", partition=0)
        assert [record.text for record in await client.fetch("t", 0, 0)] == ["a", "b"]

    play(scenario)
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == [
        "a batch could not be sent"
    ]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_fork_cannot_use_a_client_of_its_parent(served: Served) -> None:
    with polywire.connect_sync(served.address) as client, client.producer() as producer:
        producer.send_and_wait("t", "from the parent", partition=0)
        child = os.fork()
        if not child:
            use_in_a_fork(client, producer, served)
        assert os.waitpid(child, 0)[1] == 0
        producer.send_and_wait("t", "from the parent again", partition=0)
        texts = [record.text for record in client.fetch("t", 0, 0)]
    assert texts == ["from the parent", "from a client of the child", "from the parent again"]


def use_in_a_fork(client: SyncClient, producer: SyncProducer, served: Served) -> NoReturn:
    """Use the client and producer of the parent, and a client of this process. End it with status 0 if all went well."""
    status = 1
    try:
        with pytest.raises(Invalid, match="this process is a fork"):
            producer.send_and_wait("t", "from the child", partition=0)
        producer.close()
        client.close()
        with polywire.connect_sync(served.address) as own:
            own.send("t", "from a client of the child", partition=0)
        status = 0
    finally:
        os._exit(status)
