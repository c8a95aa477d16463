"""Brokers for tests: ``broker()`` runs one in a thread or a process. ``polywire.testing.plugin`` has pytest fixtures.

The package also contains a broker in memory and the simulation, which Polywire's own tests use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Protocol

SLOT_MIB: Final = 17  # the smallest size of journal files in which the largest request of every protocol fits


class RunningBroker(Protocol):
    """A broker that tests can stop and start again."""

    @property
    def addresses(self) -> dict[str, tuple[str, int]]:
        """Host and port of each protocol."""

    def url(self, wire: str = "polywire") -> str:
        """Return the URL of a protocol for ``polywire.connect``."""

    def start(self) -> Any:
        """Start the broker again after ``stop`` or ``kill``, on the same ports."""

    def kill(self) -> None:
        """End the broker without warning, like ``kill -9``; acknowledged records exist again after the next start."""


@contextmanager
def broker(
    *, process: bool = False, wires: Sequence[str] | None = None, data_dir: Path | None = None
) -> Iterator[RunningBroker]:
    """Run a broker on free ports inside a ``with`` block.

    Args:
        process: False runs it in memory, in a thread; it starts within milliseconds once its modules are imported. True
            runs ``polywire serve`` with files.
        wires: protocols to serve; None serves all.
        data_dir: data directory of a process; None uses a temporary directory.

    Example:
        with polywire.testing.broker() as running, polywire.connect_sync(running.url()) as client:
            client.send("orders", "hello")
    """
    if process:
        from polywire.testing.process import BrokerProcess

        with TemporaryDirectory() as made:
            directory = data_dir or Path(made) / "data"
            with BrokerProcess(directory, "--slot-mib", str(SLOT_MIB), wires=wires) as started:
                yield started
        return
    from polywire.testing.thread import BrokerThread

    with BrokerThread(wires=wires) as running:
        yield running
