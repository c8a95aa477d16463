"""The parent process of several broker processes, for a data directory or the shards of a bucket (decision 0126).

* The ready file is written when all processes are ready.
* A process that exits is restarted.
* Signals to the parent reach all processes. If the parent ends in any way, so do the processes.

The parent has no event loop and no threads, because it forks.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from ctypes import c_int, c_ulong
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NoReturn

import structlog

from polywire.errors import Busy, ErrorCode, Invalid
from polywire.log.opening import lock_directory
from polywire.protocols.runtime.shards import KEY_BYTES
from polywire.server import lifecycle, startup
from polywire.server.bucket import check_machine, inspect_bucket
from polywire.server.config import ANY, HTTP, OFF, TLS_SUFFIX, USUAL, WIRES, Address, ServeConfig
from polywire.server.file_permissions import PRIVATE_DIRECTORY, close_to_others
from polywire.server.lines import LineLimit
from polywire.server.link_tls import link_tls
from polywire.server.listener import ACCEPT_BACKLOG, INSIDE, cannot_listen, withdraw_ready, write_ready
from polywire.server.placement import (
    DATA_MARKS,
    NAMES,
    SHARDS,
    Board,
    HashedNames,
    Placement,
    Stage,
    check_count,
    directory_of,
)
from polywire.server.shard import Shard
from polywire.store.native_memory import find_call
from polywire.types import PORT_MAX, SHARDS_MAX, shard_name

if TYPE_CHECKING:
    from polywire.server.bucket_watch import BucketWatch

LED_WIRES: Final = ("kafka", ANY)  # listeners whose clients find the leader of a partition themselves and connect to it
ADVERTISED_WIRES: Final = (
    "cursus",
)  # with --shard-port, clients of these protocols are also sent to the owner of a topic
FORWARDED_SIGNALS: Final = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
STARTING_POLL_S: Final = 0.02
LOOK_S: Final = 1.0
LASTING_S: Final = 10.0  # a process that ran at least this long is restarted without a pause
PAUSE_FIRST_S: Final = 0.5
PAUSE_MAX_S: Final = 30.0
PORTS_EACH: Final = 20  # number of ports reserved for each process with --shard-port
# without --shard-port: distance between the shared port and the port of the first process, and between processes
OWN_PORTS_STEP: Final = 100
KILL_AFTER_S: Final = 10.0  # seconds after the drain timeout until a process is killed
HANDOVER_POLL_S: Final = 0.05
PR_SET_PDEATHSIG: Final = 1

Mask = set[int | signal.Signals]
"""A set of blocked signals."""

log = structlog.get_logger("polywire.server")


def run_processes(config: ServeConfig) -> int:
    """Serve with one or several processes until a signal stops them, and return the exit code."""
    return lifecycle.run_logged(config, lambda lines: _run(config, lines))


def _run(config: ServeConfig, lines: LineLimit) -> int:
    """Serve with one or several processes. Raises BrokerError or OSError if the processes cannot be started."""
    if not 0 <= config.processes <= SHARDS_MAX:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"number of processes is not between 1 and {SHARDS_MAX} processes={config.processes}",
        )
    count, key = inspect_bucket(config) if config.bucket else (max(config.processes, 1), secrets.token_bytes(KEY_BYTES))
    if count == 1:
        return startup.run_alone(config, lines)
    config = replace(config, processes=count)
    _check(config)
    close_to_others(config.data_dir, marks=DATA_MARKS)
    if not config.bucket:
        check_count(config.data_dir, count)
    shards = config.data_dir / SHARDS
    shards.mkdir(mode=PRIVATE_DIRECTORY, exist_ok=True)
    unlock = _lock(config)
    try:
        if config.bucket:
            check_machine(config, count)
            return Parent(config, key).run()
        shutil.rmtree(shards / NAMES, ignore_errors=True)
        (shards / NAMES).mkdir(mode=PRIVATE_DIRECTORY)
        return Parent(config, key).run()
    finally:
        unlock()


def _check(config: ServeConfig) -> None:
    reason = ""
    if sys.platform != "linux":
        reason = "several processes are supported on Linux only (remove --processes)"
    elif config.tls_client_authority is not None:
        reason = "client certificates do not work with several processes (remove --tls-client-authority or --processes)"
    if reason:
        raise Invalid(ErrorCode.INVALID_REQUEST, f"{reason} processes={config.processes}")


def _lock(config: ServeConfig) -> Callable[[], None]:
    """Lock the data directory, and return the function that unlocks it.

    If another parent is stopping, wait until it has exited. Raises Busy(BUSY) if the directory is in use.
    """
    end = time.monotonic() + lifecycle.HANDOVER_S + config.drain_timeout_s
    while True:
        try:
            return lock_directory(config.data_dir / SHARDS)
        except Busy:
            if time.monotonic() >= end:
                raise
        time.sleep(HANDOVER_POLL_S)


@dataclass(slots=True)
class Child:
    """The process of a shard. ``pause_s`` is how long to wait before it is restarted."""

    shard: int
    pid: int = 0
    started_at: float = 0.0
    start_at: float = 0.0
    pause_s: float = 0.0


class Parent:
    """Starts one process for each shard, and restarts those that exit."""

    def __init__(self, config: ServeConfig, key: bytes) -> None:
        """Reserve the addresses of all listeners. ``key`` is the shared secret of the processes.

        Raises Busy(BUSY) with the address that is not available, and Invalid for an invalid setting.
        """
        self._config: Final = config
        # reserve the addresses, and queue connections while a process is being restarted
        self._sockets: Final[list[socket.socket]] = []
        self._addresses: Final = self._reserve()
        self._own: Final = [self._reserve_own(number) for number in range(config.processes)]
        self._inside: Final = [_inside() for _ in range(config.processes)]
        self._board: Final = Board(config.processes)
        self._key: Final = key
        self._children: Final = [Child(number) for number in range(config.processes)]
        self._exit_code = lifecycle.EXIT_OK
        self._is_ready = False
        self._kill_at = 0.0

    def run(self) -> int:
        watched = FORWARDED_SIGNALS | {signal.SIGCHLD}
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
        try:
            for child in self._children:
                self._start(child, mask)
            while any(child.pid for child in self._children) or not self._kill_at:
                found = signal.sigtimedwait(watched, LOOK_S if self._is_ready else STARTING_POLL_S)
                if found is not None and found.si_signo in FORWARDED_SIGNALS:
                    self._signal_all(signal.Signals(found.si_signo))
                self._check_children(mask)
            return self._exit_code
        finally:
            withdraw_ready(self._config.ready_file)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def close(self) -> None:
        for reserved in (*self._sockets, *self._inside):
            reserved.close()

    def _signal_all(self, number: signal.Signals) -> None:
        for child in self._children:
            if child.pid:
                os.kill(child.pid, signal.SIGHUP if number == signal.SIGHUP else signal.SIGTERM)
        if number != signal.SIGHUP:
            self._stop()

    def _stop(self) -> None:
        withdraw_ready(self._config.ready_file)
        if not self._kill_at:
            self._kill_at = time.monotonic() + self._config.drain_timeout_s + KILL_AFTER_S

    def _check_children(self, mask: Mask) -> None:
        """Restart processes that exited, each after its pause. Write the ready file when all processes are ready."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            self._ended(next(child for child in self._children if child.pid == pid), os.waitstatus_to_exitcode(status))
        now = time.monotonic()
        if self._kill_at:
            for child in self._children:
                if child.pid and now >= self._kill_at:
                    os.kill(child.pid, signal.SIGKILL)
            return
        for child in self._children:
            if not child.pid and now >= child.start_at:
                self._start(child, mask)
        if not self._is_ready and self._board.all_have(Stage.SERVING):
            self._is_ready = True
            log.info("all processes are ready", processes=len(self._children))
            write_ready(self._config.ready_file, self._addresses)

    def _ended(self, child: Child, code: int) -> None:
        child.pid = 0
        if self._kill_at:
            self._exit_code = self._exit_code or max(code, 0)
        elif not self._is_ready:
            self._exit_code = code if code > 0 else lifecycle.EXIT_START
            self._signal_all(signal.SIGTERM)
        else:
            now = time.monotonic()
            lasted = now - child.started_at >= LASTING_S
            child.pause_s = 0.0 if lasted else min(max(2 * child.pause_s, PAUSE_FIRST_S), PAUSE_MAX_S)
            child.start_at = now + child.pause_s
            log.error(
                "a process exited: restarting it",
                shard=shard_name(child.shard),
                exit_code=code,
                pause_s=child.pause_s,
            )

    def _start(self, child: Child, mask: Mask) -> None:
        parent, child.started_at = os.getpid(), time.monotonic()
        child.pid = os.fork()
        if child.pid == 0:
            self._become(child.shard, parent, mask)

    def _become(self, number: int, parent: int, mask: Mask) -> NoReturn:
        code = lifecycle.EXIT_START
        try:
            os.setpgid(0, 0)  # Ctrl-C in a terminal then reaches only the parent, which forwards it
            _end_with_parent(parent)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            names = self._config.data_dir / SHARDS / NAMES
            addresses = [Address(*listening.getsockname()[:2]) for listening in self._inside]
            for other in (*self._sockets, *self._inside[:number], *self._inside[number + 1 :]):
                other.close()
            config, board, inside = _config_of(self._config, number, self._addresses), self._board, self._inside[number]
            if config.bucket:
                hashed = HashedNames(number, board.count)
                shard = Shard(number, board, hashed, addresses, inside, self._key, self._own[number])
                code = startup.run_shard(config, shard, lambda: _watch_of(config, number, board))
            else:
                shard = Shard(number, board, Placement(names, number), addresses, inside, self._key, self._own[number])
                code = startup.run_shard(config, shard)
        finally:
            os._exit(code)

    def _reserve(self) -> dict[str, Address]:
        """Reserve the shared addresses of all listeners, and return them with their actual ports.

        Raises Busy(BUSY) if an address is in use.
        """
        served: dict[str, Address] = {}
        for name, address in self._config.listeners().items():
            if name in USUAL and getattr(self._config, name) is None and self._config.users is not None:
                continue  # the protocol has no login, and its address is not set
            if name == HTTP and self._config.http is None:
                self._reserve_http(served, address)
            else:
                served[name] = self._reserved(name, address)
        if not served.keys() - {HTTP}:
            raise Invalid(
                ErrorCode.INVALID_REQUEST, f"all protocol listeners are off (enable one of {', '.join(WIRES)})"
            )
        if self._config.bucket:
            _check_inside(self._config, served)
        return served

    def _reserve_own(self, shard: int) -> dict[str, Address]:
        """Return addresses that lead to the process of this shard only, by listener.

        With a bucket, these listeners are for other machines, and the process opens them itself. On a data directory,
        they are for clients that connect to the owner of a topic, and the parent reserves them. Raises Busy(BUSY) if
        there is no free port.
        """
        if self._config.bucket:
            return _reached(self._config, shard, self._addresses)
        wires = (LED_WIRES, ADVERTISED_WIRES) if self._config.shard_port else (LED_WIRES,)
        led = [
            (name, at)
            for among in wires
            for name, at in self._addresses.items()
            if name.removesuffix(TLS_SUFFIX) in among
        ]
        first, configured = self._config.shard_port + PORTS_EACH * shard, self._config.listeners()
        own = {}
        for number, (name, at) in enumerate(led):
            if self._config.shard_port:
                own[name] = self._reserved(name, Address(at.host, first + number))
            else:
                own[name] = self._reserved_near(name, at, OWN_PORTS_STEP * (shard + 1) if configured[name].port else 0)
        return own

    def _reserved_near(self, name: str, shared: Address, step: int) -> Address:
        """Reserve the port ``step`` above the shared port; any free port if that is in use.

        The port is the same after a restart, because some clients reconnect to the last address they know. Raises
        Busy(BUSY) if there is no free port.
        """
        port = shared.port + step if step and shared.port + step <= PORT_MAX else 0
        try:
            return self._reserved(name, Address(shared.host, port))
        except Busy as error:
            log.warning(
                "a process has a different port than usual (set the ports with --shard-port)", reason=error.message
            )
            return self._reserved(name, Address(shared.host, 0))

    def _reserve_http(self, served: dict[str, Address], address: Address) -> None:
        """Reserve the default port of HTTP. If it is in use, turn HTTP off."""
        try:
            served[HTTP] = self._reserved(HTTP, address)
        except Busy as error:
            log.warning(
                "HTTP is off: its default port is in use (choose another with --http HOST:PORT)", reason=error.message
            )

    def _reserved(self, name: str, address: Address) -> Address:
        """Bind an address without listening, and return it with the actual port. Raises Busy(BUSY) if it is in use."""
        try:
            bound = _bound(address)  # without SO_REUSEPORT, binding fails if another program listens there
        except OSError as error:
            raise cannot_listen(name, address, error) from error
        # allow the child processes to listen on the same address
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._sockets.append(bound)
        return Address(address.host, bound.getsockname()[1])


def _bound(address: Address) -> socket.socket:
    family, kind, protocol, _, bound_to = socket.getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(bound_to)
    except OSError:
        made.close()
        raise
    return made


def _inside() -> socket.socket:
    """Return a loopback socket on which a process accepts connections of the other processes."""
    made = _bound(Address("127.0.0.1", 0))
    made.setblocking(False)
    made.listen(ACCEPT_BACKLOG)
    return made


def _end_with_parent(parent: int) -> None:
    """Make the kernel send SIGTERM to this process when the parent exits, even if it is killed."""
    control = find_call("prctl", c_int, c_ulong, c_ulong, c_ulong, c_ulong)
    if control is not None:
        control(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(lifecycle.EXIT_START)


def _check_inside(config: ServeConfig, served: Mapping[str, Address]) -> None:
    """Raise Invalid if the connections between machines would not be secure or would not work.

    Without TLS, machines would send passwords to each other in clear text. With unsuitable certificates, they would
    reject each other.
    """
    address = inside_of(config, served)
    if link_tls(config, config.reached_at(address)) is not None or address.is_loopback or config.insecure:
        return
    if config.users is not None:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            "machines would forward requests with passwords to each other in clear text (use --tls-machine-authority, or"
            f" --insecure in a private network) address={address}",
        )


def inside_of(config: ServeConfig, served: Mapping[str, Address]) -> Address:
    """Return the address of a listener whose host other machines can reach.

    If there are listeners with TLS, those without are often only on loopback, so the listeners with TLS are preferred.
    """
    usual = served.get("polywire") or next(iter(served.values()))
    if config.tls_machine_authority is None or not usual.is_loopback:
        return usual
    secure = [served.get("polywire" + TLS_SUFFIX), *served.values()]
    return next((address for address in secure if address is not None and not address.is_loopback), usual)


def _reached(config: ServeConfig, shard: int, served: Mapping[str, Address]) -> dict[str, Address]:
    """Return the addresses at which other machines reach this shard's process, by listener."""
    hosts = {name: address.host for name, address in served.items()} | {INSIDE: inside_of(config, served).host}
    first = config.shard_port + PORTS_EACH * shard if config.shard_port else 0
    return {name: Address(host, first + number if first else 0) for number, (name, host) in enumerate(hosts.items())}


def _watch_of(config: ServeConfig, shard: int, board: Board) -> BucketWatch:
    """Create the statistics of the shard's process. Raises Invalid if the node name is invalid."""
    from polywire.server.bucket_watch import BucketWatch, candidate_of

    candidate = candidate_of(config, shard, board.count)
    return BucketWatch(config, candidate, lambda pause_s: board.may_hand_over(time.monotonic(), pause_s))


def _config_of(config: ServeConfig, shard: int, addresses: Mapping[str, Address]) -> ServeConfig:
    return replace(
        config,
        cache_gib=config.cache_gib / config.processes,
        tables_url=config.tables_at,
        data_dir=directory_of(config.data_dir, shard),
        flux=str(addresses.get("flux", OFF)),
        cursus=str(addresses.get("cursus", OFF)),
        iggy=str(addresses.get("iggy", OFF)),
        kafka=str(addresses.get("kafka", OFF)),
        kafka07=str(addresses.get("kafka07", OFF)),
        polywire=str(addresses.get("polywire", OFF)),
        any_wire=str(addresses.get(ANY, OFF)),
        tls={name.removesuffix(TLS_SUFFIX): str(at) for name, at in addresses.items() if name.endswith(TLS_SUFFIX)},
        http=str(addresses.get(HTTP, OFF)),
        ready_file=None,
    )
