"""Fixtures of the clients' tests: a broker behind a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

import polywire
from tests.unit.client.served import Play, Scenario, Served


@pytest.fixture
def served() -> Iterator[Served]:
    with Served() as server:
        yield server


@pytest.fixture
def play(served: Served) -> Play:
    """Return a function that runs a scenario with a client of that broker."""

    def played(scenario: Scenario) -> None:
        async def whole() -> None:
            async with polywire.connect(served.address) as client:
                await asyncio.wait_for(scenario(client), 120)

        asyncio.run(whole())

    return played
