"""A broker in its own process, for tests of its external behaviour.

The helper reads the broker's addresses from its ready file, and ends the process with the test at the latest. If a test
fails, it shows the broker's log.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import ClassVar, Final, Self

from polywire.choices import listed
from polywire.errors import ErrorCode, Invalid
from polywire.types import spell_address

READY_SECONDS_MAX: Final = 90.0  # a start takes one second, on a busy machine many
STOP_SECONDS_MAX: Final = 60.0
WIRES: Final = ("flux", "cursus", "iggy", "kafka", "kafka07", "polywire")
LOGIN_WIRES: Final = ("cursus", "iggy", "kafka", "polywire")
PORTS: Final = range(15_000, 32_000)
SOURCE: Final = Path(__file__).resolve().parents[2]


def child_environment() -> dict[str, str]:
    """Return the environment that lets a process import this copy of Polywire."""
    known = os.environ.get("PYTHONPATH")
    paths = [*(known.split(os.pathsep) if known else ()), str(SOURCE)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "PYTHONUNBUFFERED": "1"}


def silenced(*but: str) -> tuple[str, ...]:
    """Return options of ``polywire serve`` that turn off all protocols and HTTP, except those named in ``but``."""
    return tuple(word for wire in (*WIRES, "http") if wire not in but for word in (f"--{wire}", "off"))


def _lasting_ports() -> Iterator[int]:
    """Yield free ports that systems do not use for outgoing connections (Linux from 32768, others from 49152).

    Such a port is still free when a broker is restarted. Each test process begins at a different port.
    """
    begin = random.Random().randrange(len(PORTS))
    return (port for port in cycle([*PORTS[begin:], *PORTS[:begin]]) if _free(port))


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def checked_wires(wires: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return the protocols to serve. Raises Invalid(INVALID_REQUEST) for a string instead of a list."""
    if isinstance(wires, str):
        raise Invalid(
            ErrorCode.INVALID_REQUEST, f"wires must be a list of protocols (use wires=[{wires!r}]) got={wires!r}"
        )
    return None if wires is None else tuple(wires)


def address_of(addresses: Mapping[str, tuple[str, int]], wire: str) -> str:
    """Return the address of a protocol as ``host:port``. Raises Invalid(INVALID_REQUEST) if it is not served."""
    if wire not in addresses:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"the broker does not serve this protocol (add it to wires=) protocol={wire!r} served={listed(addresses)}",
        )
    return spell_address(*addresses[wire])


def already_running() -> Invalid:
    """Return the error of ``start`` on a broker that is running."""
    return Invalid(ErrorCode.INVALID_REQUEST, "the broker is already running (stop or kill it before start)")


_PORT: Final = _lasting_ports()
_PORT_LOCK: Final = Lock()  # held because threads start brokers, too


def lasting_port() -> int:
    """Return a port that is free now, and will still be free when a broker is restarted."""
    with _PORT_LOCK:
        return next(_PORT)


class BrokerProcess:
    """A broker in its own process, which can be stopped, killed and started again with the same data directory."""

    _popen: ClassVar[Callable[..., subprocess.Popen[bytes]]] = subprocess.Popen

    def __init__(
        self,
        data_dir: Path,
        *options: str,
        wires: Sequence[str] | None = None,
        descriptors: int | None = None,
        module: str = "polywire",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Create the object. ``start`` starts the broker.

        Args:
            data_dir: data directory.
            *options: options of ``polywire serve``.
            wires: protocols to serve. The default is all protocols or, if users are configured, those that have a
                login.
            descriptors: limit of open files.
            module: module to run with ``python -m``, with the command line of ``polywire``.
            environment: variables of the process, in addition to those of this one.
        """
        self.data_dir = data_dir
        self._module = module
        self._environment = dict(environment or {})
        self._wires = checked_wires(wires) or (LOGIN_WIRES if "--users" in options else WIRES)
        self._descriptors = descriptors
        self.addresses: dict[str, tuple[str, int]] = {}
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self._log = data_dir.with_name(data_dir.name + ".log")

    @property
    def pid(self) -> int:
        """The process id of the running broker."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> Self:
        """Start the broker and wait until every listener accepts connections.

        Raises Invalid(INVALID_REQUEST) if it is running.
        """
        if not self.stopped:
            raise already_running()
        ready_file = self.data_dir.with_name(self.data_dir.name + ".ready")
        ready_file.unlink(missing_ok=True)
        command = [sys.executable, "-m", self._module, "serve", "--data-dir", str(self.data_dir)]
        command += silenced(*self._wires)
        for wire in self._wires:
            host, port = self.addresses.get(wire) or ("127.0.0.1", lasting_port())
            command += [f"--{wire}", spell_address(host, port)]
        command += ["--ready-file", str(ready_file), *self._options]
        if self._descriptors is not None:
            command = ["sh", "-c", f'ulimit -n {self._descriptors}; exec "$@"', "sh", *command]
        with self._log.open("ab") as log:
            self._process = self._popen(
                command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={**child_environment(), **self._environment},
            )
        deadline = time.monotonic() + READY_SECONDS_MAX
        while not ready_file.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the broker did not get ready\n{self.log_text()}")
            time.sleep(0.01)
        ready = json.loads(ready_file.read_text())
        self.addresses = {wire: (address["host"], address["port"]) for wire, address in ready.items()}
        return self

    def url(self, wire: str = "polywire") -> str:
        """Return the URL of a protocol for ``polywire.connect``. Raises Invalid if it is not served."""
        return f"{wire}://{self.address(wire)}"

    def address(self, wire: str) -> str:
        """Return ``host:port`` of a protocol, for other clients. Raises Invalid if it is not served."""
        return address_of(self.addresses, wire)

    @property
    def memory_bytes(self) -> int:
        """Return the size of the broker's private memory, without mapped files. It is 0 on systems other than Linux."""
        status = Path(f"/proc/{self.pid}/status")
        lines = status.read_text().splitlines() if status.exists() else []
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))

    @property
    def stopped(self) -> bool:
        """Whether the process has ended."""
        return self._process is None or self._process.poll() is not None

    def stop(self) -> int:
        """Send SIGTERM and return the exit code."""
        return self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self._end(signal.SIGKILL)

    def log_text(self) -> str:
        """Return the log of all starts so far."""
        return self._log.read_text(errors="replace")

    def _end(self, number: signal.Signals) -> int:
        process = self._process
        assert process is not None
        if process.poll() is None:
            process.send_signal(number)
        try:
            return process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError(f"the broker did not stop in {STOP_SECONDS_MAX} s\n{self.log_text()}") from None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._process
        if process is not None and process.poll() is None:
            process.kill()
            process.wait()
