"""Brokers for tests: ``broker()`` runs one in a thread or a process. ``polywire.testing.plugin`` has pytest fixtures.

The package also contains a broker in memory with a simulated clock, which Polywire's own tests use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, overload

from polywire.errors import ErrorCode, Invalid

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from polywire.testing.process import BrokerProcess
    from polywire.testing.thread import BrokerThread

SLOT_MIB: Final = 17  # the smallest size of journal files in which the largest request of every protocol fits


class RunningBroker(Protocol):
    """A broker that tests can stop and start again."""

    @property
    def addresses(self) -> dict[str, tuple[str, int]]:
        """Host and port of each protocol."""

    def url(self, wire: str = "polywire") -> str:
        """Return the URL of a protocol for ``polywire.connect``. Raises Invalid if it is not served."""

    def address(self, wire: str) -> str:
        """Return ``host:port`` of a protocol, for other clients. Raises Invalid if it is not served."""

    def start(self) -> Any:
        """Start the broker again after ``stop`` or ``kill``, on the same ports. Raises Invalid if it is running."""

    def kill(self) -> None:
        """End the broker without warning, like ``kill -9``. Acknowledged records survive."""


@overload
def broker(
    *, process: Literal[False] = False, wires: Sequence[str] | None = None
) -> AbstractContextManager[BrokerThread]: ...


@overload
def broker(
    *, process: Literal[True], wires: Sequence[str] | None = None, data_dir: str | Path | None = None
) -> AbstractContextManager[BrokerProcess]: ...


@overload
def broker(
    *, process: bool = False, wires: Sequence[str] | None = None, data_dir: str | Path | None = None
) -> AbstractContextManager[RunningBroker]: ...


@contextmanager
def broker(
    *, process: bool = False, wires: Sequence[str] | None = None, data_dir: str | Path | None = None
) -> Iterator[Any]:
    """Run a broker on free ports inside a ``with`` block.

    Args:
        process: False runs it in memory, in a thread; it starts within milliseconds once its modules are imported. True
            runs ``polywire serve`` with files.
        wires: protocols to serve; None serves all.
        data_dir: data directory, only with ``process=True``; None uses a temporary directory.

    Raises:
        Invalid: INVALID_REQUEST: an argument is invalid; the message says what is expected.

    Example:
        with polywire.testing.broker() as running, polywire.connect_sync(running.url()) as client:
            client.send("orders", "hello")
    """
    if process:
        from polywire.testing.process import BrokerProcess

        with TemporaryDirectory() as made:
            directory = Path(made) / "data" if data_dir is None else Path(data_dir)
            with BrokerProcess(directory, "--slot-mib", str(SLOT_MIB), wires=wires) as started:
                yield started
        return
    if data_dir is not None:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"data_dir needs process=True (the broker is in memory) data_dir={str(data_dir)!r}",
        )
    from polywire.testing.thread import BrokerThread

    with BrokerThread(wires=wires) as running:
        yield running
