"""The life of the process: failed storage stops it with its own exit code."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from polywire.broker.access import Access
from polywire.broker.broker import Broker
from polywire.clock import SystemClock
from polywire.errors import BrokerError, ErrorCode, Invalid, NotOwner, Unavailable
from polywire.server import lifecycle, startup
from polywire.server.audit import AuditLog
from polywire.server.config import Address, ServeConfig, parse_address
from polywire.server.listener import Listener
from polywire.testing.memory_broker import MemoryBroker
from polywire.types import Level
from tests.unit.server.peers import SILENT


class Opened:
    """The options with which the process opened its broker."""

    failed: Callable[[BrokerError], None]

    def open(self, data_dir: Path, settings: Any, loop: Any, clock: Any, **options: Any) -> Broker:
        self.failed = options["on_failure"]
        return MemoryBroker(settings, loop=asyncio.get_running_loop(), clock=SystemClock()).broker


def test_an_early_sighup_does_not_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    heeded: list[object] = []

    def run_once(*_: object, **__: object) -> int:
        heeded.append(signal.getsignal(signal.SIGHUP))
        return 0

    monkeypatch.setattr(lifecycle, "set_up_log", lambda *_, **__: None)
    monkeypatch.setattr(lifecycle, "make_private", lambda: None)
    monkeypatch.setattr(lifecycle, "run_once", run_once)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert startup.run(SILENT) == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    assert heeded == [signal.SIG_IGN]


def test_regular_work_continues_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    opened, sweeps = Opened(), list[AuditLog]()

    def sweep(audit: AuditLog, *, stopping: bool = False) -> None:
        sweeps.append(audit)
        if len(sweeps) == 1:
            raise OSError("unforeseen")

    monkeypatch.setattr(Broker, "open", opened.open)
    monkeypatch.setattr(lifecycle, "SWEEP_S", 0.001)
    monkeypatch.setattr(AuditLog, "sweep", sweep)

    async def life() -> int:
        serving = asyncio.create_task(lifecycle.serve(replace(SILENT, flux="127.0.0.1:0")))
        while len(sweeps) < 3 and not serving.done():  # noqa: ASYNC110 - a sweep sends no event
            await asyncio.sleep(0.001)
        opened.failed(Unavailable(ErrorCode.STORAGE_FAILED, "the disk is gone"))
        return await serving

    with capture_logs() as lines:
        assert asyncio.run(asyncio.wait_for(life(), 60)) == lifecycle.EXIT_STORAGE
    assert [line["event"] for line in lines].count("regular work failed, and is tried again") == 1


def test_failed_storage_has_its_own_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Opened()
    monkeypatch.setattr(Broker, "open", opened.open)
    ready = tmp_path / "ready"
    config = replace(SILENT, flux="127.0.0.1:0", any_wire="127.0.0.1:0", ready_file=ready)

    async def life() -> int:
        serving = asyncio.create_task(lifecycle.serve(config))
        while not (ready.exists() or serving.done()):  # noqa: ASYNC110 - a file sends no event
            await asyncio.sleep(0.001)
        place = json.loads(ready.read_text())["flux"]
        reader, writer = await asyncio.open_connection(place["host"], place["port"])
        writer.write(b"V1|1|PRODUCE|t a:1\n")
        assert await reader.readline() == b"V1|1|OK|partition=1 offset=0 hw=0\n"
        opened.failed(Unavailable(ErrorCode.STORAGE_FAILED, "the disk is gone"))
        code = await serving
        assert await reader.read() == b""
        writer.close()
        return code

    assert asyncio.run(life()) == lifecycle.EXIT_STORAGE


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("off", None),
        ("127.0.0.1:0", Address("127.0.0.1", 0)),
        ("[::1]:9092", Address("::1", 9092)),
        ("localhost:65535", Address("localhost", 65535)),
    ],
)
def test_addresses(text: str, address: Address | None) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize(
    "text", ["", ":9092", "host", "host:", "host:x", "host:65536", "::1:9092", "host:-1", "host:²"]
)
def test_broken_addresses(text: str) -> None:
    with pytest.raises(Invalid):
        parse_address(text)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.1", "example.org"])
def test_non_loopback_addresses_need_insecure(host: str) -> None:
    text = f"[{host}]:1" if ":" in host else f"{host}:1"
    with pytest.raises(Invalid, match="--insecure"):
        ServeConfig(flux=text).listeners()
    assert ServeConfig(flux=text, insecure=True).listeners()["flux"] == Address(host, 1)


def test_durability_below_written_is_rejected() -> None:
    with pytest.raises(Invalid, match="durability"):
        ServeConfig(durability=Level.MEMORY).listeners()


def test_journal_sizes_reach_the_log() -> None:
    sizes = ServeConfig(slot_bytes=65_536, slot_count_max=3, sync_interval_ms=7).log_settings()
    assert (sizes.slot_bytes, sizes.slot_count_max, sizes.sync_interval_ms) == (65_536, 3, 7)


def test_a_signal_during_a_loss_of_leadership_stops_cleanly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal must not count as the second one, which would exit at once and leave a claim behind."""
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)

    async def life() -> None:
        server = lifecycle.Server(SILENT, None, AuditLog(SystemClock(), None), None)
        server.storage_failed(NotOwner(ErrorCode.NOT_OWNER, "another broker is the leader of this shard"))
        assert server._exit_code == lifecycle.EXIT_DEPOSED
        server._signalled(signal.SIGTERM)
        assert (left, server._exit_code) == ([], lifecycle.EXIT_OK)
        server._signalled(signal.SIGTERM)
        assert left == [lifecycle.EXIT_SECOND_SIGNAL]

    asyncio.run(life())


@pytest.mark.parametrize(
    ("is_open", "listener", "reported"),
    [
        (True, "iggy", "without authentication"),
        (True, "iggy-tls", "without authentication"),
        (False, "iggy", "passwords and records are sent in clear text"),
        (False, "iggy-tls", None),
    ],
)
def test_insecure_settings_are_logged(is_open: bool, listener: str, reported: str | None) -> None:
    access = cast(Access, SimpleNamespace(is_open=is_open))
    listening = cast(Listener, SimpleNamespace(name=listener, address=Address("0.0.0.0", 8090)))
    with capture_logs() as lines:
        lifecycle._announce(replace(SILENT, insecure=True), [listening], access)
    [*warnings] = [line["event"] for line in lines if line["log_level"] == "warning"]
    assert len(warnings) == (reported is not None)
    assert all(reported in warning for warning in warnings if reported)
