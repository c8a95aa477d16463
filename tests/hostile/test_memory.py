"""Requests that are never completed, and connections that stay silent: other clients are served."""

from __future__ import annotations

import resource
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from polywire.protocols.polywire import messages
from polywire.protocols.polywire.codec import ERROR, MAGIC
from polywire.protocols.polywire.messages import Verb
from tests.broker_process import BrokerProcess
from tests.crash.test_hostile_peers import RawPeer, record_batch
from tests.crash.test_hostile_together import unfinished
from tests.hostile.peers import PoliteClient, connect, push

HALF_SENT = 1_100
LOCKED_OUT_S_MAX = 60  # it was ten minutes when one connection after the other was closed
MEMORY_GROWN_MAX = 200_000_000  # 64 MiB of incomplete requests, one beyond, and what sockets and the allocator add


@pytest.fixture
def many_files() -> None:
    """Allow as many descriptors as this process may have."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard < 3 * HALF_SENT:
        pytest.skip(f"only {hard} descriptors")


@pytest.mark.usefixtures("many_files")
@pytest.mark.parametrize(("wire", "size"), [("flux", 20), ("kafka07", 20), ("cursus", 60_000)])
def test_incomplete_requests_lock_no_client_out(tmp_path: Path, wire: str, size: int) -> None:
    large = record_batch(200_000)
    with BrokerProcess(tmp_path / "data") as broker, PoliteClient(broker) as polite, ExitStack() as held:
        before = broker.memory_bytes
        for number in range(HALF_SENT):
            push(held.enter_context(connect(broker, wire)), unfinished(wire)[:size])
            if number % 100 == 0:
                polite.produce()
        with RawPeer(broker) as peer:
            assert not peer.ask(Verb.PRODUCE, messages.Produce("large", 0, create=True), large).flags & ERROR
        polite.produce()
        assert broker.memory_bytes - before < MEMORY_GROWN_MAX
        assert broker.stop() == 0, broker.log_text()
        assert "level=error" not in broker.log_text(), broker.log_text()


def test_large_incomplete_requests_lock_no_large_one_out(tmp_path: Path) -> None:
    """They use up all memory, and wait for more: none of them looks stalled."""
    large = record_batch(200_000)
    with BrokerProcess(tmp_path / "data") as broker, ExitStack() as held:
        for wire in [wire for wire in broker.addresses for _ in range(50)]:
            push(held.enter_context(connect(broker, wire)), (MAGIC if wire == "polywire" else b"") + unfinished(wire))
        begun, answered = time.monotonic(), False
        while not answered:
            assert time.monotonic() - begun < LOCKED_OUT_S_MAX
            with suppress(OSError, EOFError, AssertionError), RawPeer(broker) as peer:
                peer.ask(Verb.PRODUCE, messages.Produce("large", 0, create=True), large)
                answered = True
        print(f"{time.monotonic() - begun:.1f} s")
        assert broker.stop() == 0, broker.log_text()


def test_silent_connections_lock_no_client_out(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data", descriptors=256) as broker, ExitStack() as held:
        for _ in range(1_000):
            with suppress(OSError):
                held.enter_context(connect(broker, "flux"))
        with PoliteClient(broker) as polite:
            polite.produce()
        assert broker.stop() == 0, broker.log_text()


def test_idle_connections_cost_next_to_nothing(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data", wires=("flux",)) as broker, ExitStack() as held:
        clients = [held.enter_context(PoliteClient(broker)) for _ in range(100)]
        before = broker.memory_bytes
        clients += [held.enter_context(PoliteClient(broker)) for _ in range(300)]
        time.sleep(0.1)
        assert broker.memory_bytes - before < 300 * 16_384
