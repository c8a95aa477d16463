"""Mechanisms of the readiness driver, with a switch that disables one in the wires simulation.

Half of the runs of that simulation use the driver. It runs uncompiled, because compiled methods cannot be replaced.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pytest

from polywire import records, server
from polywire.records import memory
from tests.sim.mutation import Mutation
from tests.sim.wires import network


def _uncompiled() -> Any:
    """Load the driver's module from its source, with the other compiled modules that it needs."""
    with pytest.MonkeyPatch.context() as meanwhile:
        meanwhile.setitem(sys.modules, memory.__name__, _from_source(records, "memory"))
        return _from_source(server, "readiness")


def _from_source(package: ModuleType, name: str) -> ModuleType:
    loader = SourceFileLoader(f"uncompiled_{name}", str(Path(package.__path__[0]) / f"{name}.py"))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None, "there is a loader"
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def _transport(name: str, instead: Callable[..., Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """Return a switch that replaces a method of the socket transport by a function that gets the old one."""

    def take_out(patch: pytest.MonkeyPatch) -> None:
        module = _uncompiled()
        old = getattr(module.SocketTransport, name)
        patch.setattr(module.SocketTransport, name, lambda *args: instead(old, *args))
        patch.setattr(network, "ReadinessDriver", module.ReadinessDriver)

    return take_out


def _uncommitted(patch: pytest.MonkeyPatch) -> None:
    """End a pass without writing its additions."""
    module = _uncompiled()

    def make_pass(driver: Any, looks: int) -> bool:
        driver._hub.ingest.hold(True)
        for fd, events in driver.epoll.poll(0, module.READY_MAX):
            driver._serve(fd, events)
        return True

    patch.setattr(module.ReadinessDriver, "_make_pass", make_pass)
    patch.setattr(network, "ReadinessDriver", module.ReadinessDriver)


def _read_on(old: Callable[[Any], None], transport: Any) -> None:
    """Read a socket until it is empty."""
    while transport._is_reading and transport._socket.events & 1:
        old(transport)


def _skipped(old: Callable[..., None], *_: Any) -> None:
    """Do nothing."""


def _closed_at_once(old: Callable[[Any], None], transport: Any) -> None:
    """Drop unsent bytes."""
    transport.end(None)


def _overtaken(old: Callable[..., None], transport: Any, data: Any) -> None:
    """Send later bytes before waiting ones."""
    held, transport._waiting_bytes = transport._waiting_bytes, 0
    if held and not transport._is_closing:
        sent = max(transport._send(data), 0)
        data = memoryview(data)[sent:]
    transport._waiting_bytes = held
    if len(data):
        old(transport, data)


def _cut_short(old: Callable[..., int], transport: Any, data: Any) -> int:
    """Count a short send as a complete one."""
    return len(data) if old(transport, data) >= 0 else -1


def _lost_immediately(old: Callable[..., None], transport: Any, error: Exception | None) -> None:
    """Report the loss of a connection inside whatever call it is in."""
    if not transport._is_ended:
        transport._is_closing = transport._is_ended = True
        transport._is_reading = False
        transport._waiting.clear()
        transport._waiting_bytes = 0
        transport._watch()
        transport._lost(error)


def _unread_end(old: Callable[[Any], None], transport: Any) -> None:
    """Take the end of the stream for a lost connection."""
    count = transport._receive(transport.protocol.get_buffer(-1))
    if count > 0:
        transport.protocol.received(count)
    elif count == 0:
        transport.end(None)


_Row: Final = partial(Mutation, world="wires")

READINESS_MUTATIONS: Final[Sequence[Mutation]] = (
    _Row("driver-once", "a pass reads each socket once", _transport("_read", _read_on)),
    _Row("driver-resumes", "a socket is watched again once it is read again", _transport("resume_reading", _skipped)),
    _Row("driver-short", "the rest of a short send is sent", _transport("_send", _cut_short)),
    _Row("driver-order", "what waits is sent first", _transport("write", _overtaken)),
    _Row("driver-clogged", "a connection is notified that its peer does not read", _transport("_clog", _skipped)),
    _Row("driver-closing", "a socket is closed once everything was sent", _transport("close", _closed_at_once)),
    _Row("driver-half-closed", "who sends nothing more is answered", _transport("_read", _unread_end)),
    _Row("driver-lost", "a lost connection is notified in a separate callback", _transport("end", _lost_immediately)),
    _Row("driver-commits", "a pass ends with a commit", _uncommitted, first=14),
)
