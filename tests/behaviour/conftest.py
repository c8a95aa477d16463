"""Runs every scenario over every protocol with the abilities it needs, and prints the table of results.

A scenario is an ``async def`` that takes ``client`` (one protocol) or ``writer`` and ``reader`` (every pair), and
declares its needs with ``@needs(...)``. A protocol without an ability does not run the scenario: that is a dash in the
table, not a skip.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from polywire.client import kafka_connection
from polywire.client.base import Ability, Membership, WireClient
from polywire.client.connect import connect
from polywire.client.kafka import OPEN_TIMEOUT_S
from polywire.errors import ErrorCode, Unavailable
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.messages import Api
from tests.behaviour.compatibility import Table, able_pairs, able_wires, is_paired
from tests.behaviour.wires import Wire
from tests.three_brokers import PROCESSES, Brokers, one_or_three, through

SCENARIO_SECONDS_MAX = 120.0  # seconds on an idle machine; a takeover after a kill takes about three
JOINS_MAX = 4  # of each member until partitions have moved, on protocols where that takes several
_topic_numbers = count(1)
_table = Table()


class WireClients:
    """Opens clients of one protocol on the broker under test."""

    def __init__(self, wire: Wire, broker: Brokers) -> None:
        self.wire = wire
        self.broker = broker
        self._opened: list[WireClient] = []

    async def open(self) -> WireClient:
        """Open a connection; it is closed after the scenario."""
        client = await connect(self.broker.url(self.wire.name))
        self._opened.append(client)
        return client

    async def close(self) -> None:
        for client in self._opened:
            await client.close()


async def share(group: str, topic: str, members: dict[str, WireClient], partition_count: int = 3) -> list[Membership]:
    """Rejoin members of a group in this order until each partition has one owner."""
    abilities = frozenset.intersection(*(client.abilities for client in members.values()))
    at_once = Ability.AT_ONCE in abilities
    for _ in range(1 if at_once else JOINS_MAX):
        found = [await client.join(group, topic, name) for name, client in members.items()]
        if sorted(number for place in found for number in place.partitions) == list(range(partition_count)):
            break
    else:
        raise AssertionError(f"partitions are not shared out: {found}")
    if {Ability.AT_ONCE, Ability.GENERATIONS} <= abilities:
        assert len({place.generation for place in found}) == 1
    return found


async def shared_group(writers: WireClients, readers: WireClients, topic: str) -> str:
    """Return an unused name of a group that clients of both protocols can join to read the topic.

    Over several processes, Kafka members share a group with members of other protocols only if the group's coordinator
    owns the topic.
    """
    name = _group_name()
    if through() not in PROCESSES or "kafka" not in {writers.wire.name, readers.wire.name}:
        return name
    connection = await kafka_connection.connect(*writers.broker.addresses["kafka"], OPEN_TIMEOUT_S, None, None, None)
    try:
        metadata = await connection.ask(Api.METADATA, topics=[schema.request(Api.METADATA).Topics(name=topic)])
        owner = metadata.topics[0].partitions[0].leader_id
        while (await connection.ask(Api.FIND_COORDINATOR, key=name)).node_id != owner:
            name = _group_name()
    finally:
        connection.fail(Unavailable(ErrorCode.STOPPING, "the group has a name"))
    return name


def _group_name() -> str:
    """Return an unused group name, also valid on a protocol that numbers its groups."""
    return f"group-{next(_topic_numbers)}"


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Brokers]:
    """Serve one broker for all scenarios that do not stop it."""
    with one_or_three(tmp_path_factory.mktemp("behaviour")) as brokers:
        yield brokers


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[Brokers]:
    """Serve a broker for one scenario, which may stop, kill and restart it."""
    with one_or_three(tmp_path) as brokers:
        yield brokers


@pytest.fixture
def topic() -> str:
    """Return an unused topic name."""
    return f"topic-{next(_topic_numbers)}"


@pytest.fixture
def clients(request: pytest.FixtureRequest) -> WireClients:
    return WireClients(request.param, request.getfixturevalue("broker"))


@pytest.fixture
def restartable(request: pytest.FixtureRequest) -> WireClients:
    return WireClients(request.param, request.getfixturevalue("own_broker"))


@pytest.fixture
def writers(request: pytest.FixtureRequest) -> WireClients:
    return WireClients(request.param, request.getfixturevalue("broker"))


@pytest.fixture
def readers(request: pytest.FixtureRequest) -> WireClients:
    return WireClients(request.param, request.getfixturevalue("broker"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if is_paired(metafunc.function):
        pairs = able_pairs(metafunc.function)
        metafunc.parametrize(("writers", "readers"), list(pairs.values()), indirect=True, ids=list(pairs))
        return
    able = able_wires(metafunc.function)
    for name in {"clients", "restartable"} & set(metafunc.fixturenames):
        metafunc.parametrize(name, able, indirect=True, ids=[wire.name for wire in able])


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an ``async def`` scenario in its own loop with a time limit, and close its clients."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    arguments: dict[str, Any] = {name: pyfuncitem.funcargs[name] for name in names}
    asyncio.run(_run(pyfuncitem.obj, arguments))
    return True


async def _run(scenario: Callable[..., Awaitable[None]], arguments: dict[str, Any]) -> None:
    try:
        async with asyncio.timeout(SCENARIO_SECONDS_MAX):
            await scenario(**arguments)
    finally:
        for argument in arguments.values():
            if isinstance(argument, WireClients):
                await argument.close()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and "tests/behaviour/" in report.nodeid:
        _table.record(report.nodeid, passed=report.passed)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in _table.lines():
        terminalreporter.write_line(line)
