"""The life of one broker process: recover, listen, serve, drain, stop.

* No listener opens before recovery is complete and synced.
* The ready file is written when every listener accepts connections.
* After SIGTERM or SIGINT the broker accepts no more requests, sends pending responses, and syncs. A second signal stops
  it immediately.
* If storage fails, the process exits with ``EXIT_STORAGE``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import structlog

from polywire.broker.access import DEFAULT_NAME, Access, ConfiguredUser
from polywire.broker.broker import Broker
from polywire.broker.id_tokens import IdTokens, Provider
from polywire.broker.permissions import Action
from polywire.broker.topics import Topic
from polywire.clock import SystemClock
from polywire.errors import BrokerError, Busy, Denied, ErrorCode, Invalid, NotOwner
from polywire.http.factory import HttpFactory
from polywire.http.history import History
from polywire.log.worker import ThreadWorker
from polywire.protocols.flux import exports
from polywire.protocols.polywire.factory import WIRE as POLYWIRE
from polywire.routing.session import Part
from polywire.routing.values import VALUES_SHARD
from polywire.server.audit import AuditLog
from polywire.server.bucket import open_in_bucket
from polywire.server.config import AUTO, EPOLL, HTTP, OFF, TLS_SUFFIX, Address, ServeConfig
from polywire.server.file_permissions import close_to_others, make_private
from polywire.server.hub import SWEEP_S, ConnectionLimits, Hub
from polywire.server.lines import LineLimit, set_up_log
from polywire.server.link_tls import LinkTls
from polywire.server.links import Links
from polywire.server.listener import (
    INSIDE,
    OWN,
    Listener,
    close_listeners,
    listen_inside,
    open_inside,
    open_listeners,
    withdraw_ready,
    write_ready,
)
from polywire.server.overview import Overview, WorkTimes
from polywire.server.placement import DATA_MARKS
from polywire.server.queries import Queries
from polywire.server.readiness import ReadinessDriver, is_available
from polywire.server.resources import Collector, MemoryShares, raise_limit, share
from polywire.server.scheduling import IdlePoll
from polywire.server.shard import BEGIN_POLL_S, Shard
from polywire.server.signals import Load, Reload, Signals, quotas_loader, users_loader
from polywire.server.tables import Tables
from polywire.server.tls import ServerTls, server_tls
from polywire.server.users import load_users
from polywire.server.wires import factories_of, shard_factories
from polywire.server.zookeeper import Registration
from polywire.store.file import FileStore
from polywire.types import Level

if TYPE_CHECKING:
    from polywire.protocols.runtime.session import SessionFactory
    from polywire.routing.broker import RoutedBroker
    from polywire.routing.session import RouterFactory
    from polywire.server.bucket_watch import BucketWatch

log = structlog.get_logger("polywire.server")


Factories = tuple[Sequence["SessionFactory"], "RouterFactory | None", "RoutedBroker | None"]
"""The factories for connections of clients and of other processes, and the broker of all processes.
"""


class OtherBrokers(Protocol):
    """Connects the leader of a bucket with the part of the process that handles standbys."""

    @property
    def watch(self) -> BucketWatch: ...

    @property
    def signals(self) -> Signals:
        """The process's signals. They outlast this broker's time as leader."""

    @property
    def is_alive(self) -> bool:
        """Whether standbys still consider this broker alive."""

    async def opened(self) -> None:
        """Stop serving as a standby, because the log is recovered."""

    def announce(self, addresses: Mapping[str, Address], start: int, deposed: Callable[[str], object]) -> None:
        """Set the addresses and the start number in this broker's heartbeats.

        ``deposed`` is called when leadership is lost, in any thread.
        """


EXIT_OK: Final = 0
EXIT_START: Final = 1
EXIT_STORAGE: Final = 74  # EX_IOERR of sysexits.h
EXIT_DEPOSED: Final = 75  # internal: the process becomes a standby again instead of exiting
EXIT_SECOND_SIGNAL: Final = 130
# time for a stopping process to release the data directory, after its drain: it seals up to four journal files
HANDOVER_S: Final = 10.0
HANDOVER_POLL_S: Final = 0.05
USERS_S: Final = 1.0  # time for the first process to report the users to a process that knows those of its last start
FIRST_USERS_S: Final = 60.0  # the same, for a process that was never connected to the first one
DRAIN_POLL_S: Final = 0.02
FLUSH_TIMEOUT_S: Final = 1.0  # time to send the last responses


def run_logged(config: ServeConfig, serving: Callable[[LineLimit], int], facts: Mapping[str, str] | None = None) -> int:
    """Set up logging, call ``serving``, and return its exit code. An error that it raises is logged.

    ``facts`` are added to every log line.
    """
    lines = LineLimit(SystemClock())
    set_up_log(lines, form=config.log_format, facts=facts)
    make_private()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there are files to reload
    try:
        return serving(lines)
    except BrokerError as error:
        log.error("startup failed", reason=error.message, code=error.code.value)
        return EXIT_START
    except OSError as error:
        log.error("startup failed", reason=error.strerror, file=error.filename)
        return EXIT_START


def run_once(serving: Callable[[], Coroutine[None, None, int]]) -> int:
    """Serve on a new event loop until a signal stops the process or leadership is lost."""
    with asyncio.Runner(loop_factory=_new_loop()) as runner:
        return runner.run(serving())


async def serve(
    config: ServeConfig, lines: LineLimit | None = None, others: OtherBrokers | None = None, shard: Shard | None = None
) -> int:
    """Recover the broker, listen, and serve until the end. Return the exit code. Raises BrokerError if it cannot start."""
    config.listeners()  # reports invalid settings before anything is opened
    users = None if config.users is None else load_users(config.users)
    close_to_others(config.data_dir, marks=DATA_MARKS)
    audit = AuditLog(SystemClock(), config.audit_log)
    server = Server(config, lines, audit, None if others is None else others.watch)
    broker = await server.open_broker()
    if others is not None:
        await others.opened()
    broker.access.audit = audit.record
    if shard is not None:
        await shard.begin(broker)
    idle = IdlePoll(broker.loop, broker.clock, limit_us=config.idle_poll_us)
    limits = _connection_limits(server.shares.connections, config.memory)
    hub = Hub(broker, limits, idle=idle, identities=broker.access, quotas=broker.access.quotas)
    hub.logins.audit = audit.record
    broker.access.on_end(hub.logins.end)
    try:
        server.drive(hub)
        access = broker.access
        factories = _factories(broker, config, shard)
        router = factories[2]
        await _know_users(access, users, router, config.provider)
        assert users is None or not access.is_open, "authentication is on with users"
        addresses = config.served(has_users=not access.is_open, has_anonymous=access.has_anonymous)
        tls, links = server_tls(config), None if shard is None else shard.link_tls(config)
        overview = Overview(hub, config, server.work.by_name, server.watch)
        server.exports = _exports(broker, config, factories)
        listeners = await _open_wires(
            broker, overview, config, server.driver, addresses, tls, shard, links, factories=factories
        )
        listeners += await _open_http(broker, overview, config, addresses, listeners, tls, shard, router)
        server.registration = _registration(config, listeners, 0 if shard is None else shard.own)
        if server.exports is not None:
            server.exports.start()
        _serve_children(server, overview, broker, factories, config.memory)
    except BrokerError:
        broker.close()
        raise
    users_file = None if _has_copy(router) else config.users
    reload = Reload({"audit log": audit.reopen, **_loaders(config, access, users_file, tls, links)})
    if others is not None:
        reload.load("quotas")  # a standby's settings may have changed since it was started
    server.watch_signals(reload, None if others is None else others.signals)
    _announce(config, listeners, broker.access)
    if shard is not None:
        shard.serving()
    if others is not None:
        server.others = others

        def deposed(reason: str) -> None:
            broker.loop.call_soon_threadsafe(server.storage_failed, NotOwner(ErrorCode.NOT_OWNER, reason))

        others.announce(_advertised(listeners), broker.epoch, deposed)
    return await server.wait(broker, hub, listeners)


def _loaders(
    config: ServeConfig, access: Access, users: Path | None, tls: ServerTls | None, links: LinkTls | None
) -> Mapping[str, Load | None]:
    """Return the functions that read files again: the users, then the quotas, which name users."""
    return {
        "users": users_loader(access, users),
        "certificate": None if tls is None else tls.reload,
        "certificate of links": None if links is None else links.reload,
        "keys of the token issuer": None if access.id_tokens is None else access.id_tokens.load,
        "quotas": quotas_loader(access, config.reread_quotas),
    }


def _factories(broker: Broker, config: ServeConfig, shard: Shard | None) -> Factories:
    if shard is not None:
        return shard_factories(broker, config, shard)
    return factories_of(broker, config), None, None


def _connection_limits(connections: int, memory: MemoryShares) -> ConnectionLimits:
    usual = ConnectionLimits()
    return replace(
        usual,
        connections_max=min(usual.connections_max, connections),
        receive_total_bytes_max=min(usual.receive_total_bytes_max, memory.requests),
        backlog_total_bytes_max=min(usual.backlog_total_bytes_max, memory.responses),
    )


def _serve_children(
    server: Server, overview: Overview, broker: Broker, factories: Factories, memory: MemoryShares
) -> None:
    """Begin to record the activity, and to serve the processes that write tables and run queries.

    These processes are started when they are needed.
    """
    hub = overview.hub
    server.history = overview.sampled = History(broker, overview.traffic)
    server.tables = overview.written = Tables(broker, hub, server.driver)
    # the protocol of the clients, because it reaches the topics of all processes
    factory = next(factory for factory in factories[0] if factory.wire == POLYWIRE)
    server.queries = overview.queries = Queries(hub, factory, server.driver, memory_bytes_max=memory.query)
    server.links = overview.links = Links(broker, hub, factory, server.driver)
    router = factories[2]
    if not _has_copy(router):
        server.links.begin()
        server.links.release((broker if router is None else router).topics)


def _has_copy(router: RoutedBroker | None) -> bool:
    """Return whether another process of the broker has the users, and this process has only a copy."""
    return router is not None and router.shards.own != VALUES_SHARD


async def _know_users(
    access: Access,
    users: Sequence[ConfiguredUser] | None,
    router: RoutedBroker | None,
    provider: Provider | None,
) -> None:
    """Apply the users file, or receive the users from the first process.

    While the first process does not respond, the users of the last start remain. Raises Missing(USER_MISSING) if a
    configured quota is for a user who does not exist.
    """
    if provider is not None:
        access.id_tokens = IdTokens(provider)
        access.id_tokens.load()
    if router is None or not _has_copy(router):
        if users is not None:
            access.configure(users)
        access.check_quota_users()
        return
    if users is not None:
        access.require_login()
    loop = asyncio.get_running_loop()
    end = loop.time() + (USERS_S if router.values.are_stored else FIRST_USERS_S)
    while not router.values.are_known and loop.time() < end:  # noqa: ASYNC110 - the link's peer cannot signal
        await asyncio.sleep(BEGIN_POLL_S)
    if not router.values.are_known:
        log.warning("the first process does not respond: serving with the last known users")


async def _open_wires(
    broker: Broker,
    overview: Overview,
    config: ServeConfig,
    driver: ReadinessDriver | None,
    addresses: Mapping[str, Address],
    tls: ServerTls | None,
    shard: Shard | None,
    links: LinkTls | None,
    factories: Factories,
) -> list[Listener]:
    """Open the listeners of all protocols. Raises Busy(BUSY) if an address is in use.

    A shard also gets listeners for other processes and machines, whose TLS is ``links``.
    """
    outside, inside, router = factories
    opening = partial(
        open_listeners,
        overview.hub,
        factories=outside,
        any_wires=config.any_wires(has_users=not broker.access.is_open),
        any_plain=config.any_plain,
        tls=tls,
        driver=driver,
    )
    wires = {name: address for name, address in addresses.items() if name.removesuffix(TLS_SUFFIX) != HTTP}
    listeners = await opening(addresses=wires, shared=shard is not None)
    if shard is None or router is None or inside is None:
        return listeners
    alone = HttpFactory(broker, overview, names=_http_names(config), router=router, is_linked=True)
    router.executors[HTTP] = alone.execute
    listeners.append(await listen_inside(overview.hub, shard.inside(), [inside], driver))
    is_reserved = INSIDE not in shard.reached  # on a data directory, the parent process has reserved the addresses
    own = await opening(addresses={name: at for name, at in shard.reached.items() if name in wires}, shared=is_reserved)
    shard.opened(listeners, own, host=config.advertise, is_advertised=is_reserved and config.shard_port > 0)
    if not is_reserved:
        own.append(await open_inside(overview.hub, shard.reached[INSIDE], [inside], driver, links))
    return listeners + [replace(listener, name=OWN + listener.name) for listener in own]


async def _open_http(
    broker: Broker,
    overview: Overview,
    config: ServeConfig,
    addresses: Mapping[str, Address],
    wires: Sequence[Listener],
    tls: ServerTls | None,
    shard: Shard | None,
    router: RoutedBroker | None,
) -> list[Listener]:
    """Open the HTTP listeners. Raises Busy(BUSY) if an address is in use.

    If ``--http`` is not set and the default port is in use, HTTP is off.
    """
    own = {name: address for name, address in addresses.items() if name.removesuffix(TLS_SUFFIX) == HTTP}
    factory = HttpFactory(broker, overview, names=_http_names(config), router=router)
    opened: list[Listener] = []
    for name, address in own.items():
        try:
            opened += await open_listeners(overview.hub, {name: address}, [factory], tls=tls, shared=shard is not None)
            if shard is not None and name in shard.reached:
                reached = await open_listeners(overview.hub, {name: shard.reached[name]}, [factory], tls=tls)
                opened += [replace(listener, name=OWN + listener.name) for listener in reached]
        except Busy as error:
            if name != HTTP or config.http is not None:
                close_listeners([*wires, *opened])
                raise
            log.warning(
                "HTTP is off: its default port is in use (choose another with --http HOST:PORT)", reason=error.message
            )
    shown = (listener for listener in (*wires, *opened) if not listener.name.startswith((INSIDE, OWN)))
    overview.addresses = {listener.name: str(listener.address) for listener in shown}
    return opened


def _advertised(listeners: Sequence[Listener]) -> dict[str, Address]:
    own = {listener.name.removeprefix(OWN): listener.address for listener in listeners if listener.name.startswith(OWN)}
    return own or {listener.name: listener.address for listener in listeners}


def _http_names(config: ServeConfig) -> Sequence[str]:
    return [name for name in config.http_names.split(",") if name]


class Server:
    """One run of the broker, from recovery to exit."""

    __slots__ = (
        "_audit",
        "_config",
        "_exit_code",
        "_is_signalled",
        "_lines",
        "_loop",
        "_signals",
        "_stopping",
        "driver",
        "exports",
        "history",
        "links",
        "others",
        "queries",
        "registration",
        "shares",
        "tables",
        "watch",
        "work",
    )

    def __init__(
        self, config: ServeConfig, lines: LineLimit | None, audit: AuditLog, watch: BucketWatch | None
    ) -> None:
        """``watch`` is None without a bucket."""
        self._audit = audit
        self._config = config
        self._lines = lines
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()  # set by the first signal, by a storage failure, or by a loss of leadership
        self._exit_code = EXIT_OK
        self._is_signalled = False
        self._signals: Signals | None = None
        self.driver: ReadinessDriver | None = None
        self.exports: exports.Exports | None = None
        self.history: History | None = None
        self.others: OtherBrokers | None = None
        self.queries: Queries | None = None
        self.links: Links | None = None
        self.registration: Registration | None = None
        self.tables: Tables | None = None
        self.watch: Final = watch
        self.work: Final = WorkTimes()
        self.shares: Final = share(raise_limit(), slots=config.log_settings().slot_count_max)

    async def open_broker(self) -> Broker:
        """Recover the log. If another process is still releasing the data directory, first wait until it has exited.

        Raises BrokerError if the log cannot be recovered.
        """
        limit_s = HANDOVER_S + self._config.drain_timeout_s
        end = self._loop.time() + limit_s
        is_logged = False
        while True:
            try:
                return await self._open_broker()
            except Busy as error:
                if error.code is not ErrorCode.BUSY or self._loop.time() >= end:
                    raise
                if not is_logged:
                    log.info(
                        "waiting for another process to release the data directory",
                        reason=error.message,
                        limit_s=limit_s,
                    )
                is_logged = True
            await asyncio.sleep(HANDOVER_POLL_S)

    async def _open_broker(self) -> Broker:
        """Recover the log in the data directory, or become the leader of the log in the bucket and recover it."""
        config = self._config
        if self.watch is not None:
            return await open_in_bucket(
                config,
                self._loop,
                self.watch,
                on_failure=self.storage_failed,
                blobs_max=self.shares.blobs,
                make_worker=self.work.make_worker,
            )
        return Broker.open(
            config.data_dir,
            config.broker_settings(),
            self._loop,
            SystemClock(),
            log_settings=replace(config.log_settings(), open_blobs_max=self.shares.blobs),
            on_failure=self.storage_failed,
            make_worker=self.work.make_worker,
        )

    def drive(self, hub: Hub) -> None:
        """Create the epoll driver for connections without TLS, if it is configured and available.

        Raises Invalid(INVALID_REQUEST) if it is required but not available.
        """
        if self._config.driver in (AUTO, EPOLL) and is_available():
            self.driver = ReadinessDriver(hub, self._loop)
        elif self._config.driver == EPOLL:
            raise Invalid(ErrorCode.INVALID_REQUEST, "this system has no epoll (remove --driver)")

    def storage_failed(self, error: BrokerError) -> None:
        """Stop the broker, because the log has failed or leadership is lost.

        The broker does not retry (concepts: durability#what-a-crash-may-take).
        """
        if self._config.bucket and self._stopping.is_set():
            return  # the broker is stopping, and no record in the failed uploads was acknowledged
        if error.code in (ErrorCode.NOT_OWNER, ErrorCode.REPLICATION_TIMEOUT):
            log.warning("lost leadership: this broker acknowledges no more requests", reason=error.message)
            self._exit_code = EXIT_DEPOSED
        else:
            log.critical(
                "storage failed: stopping the broker, which acknowledges no more requests", reason=error.message
            )
            self._exit_code = EXIT_STORAGE
        self._stopping.set()

    def watch_signals(self, reload: Callable[[], None], signals: Signals | None) -> None:
        """Stop cleanly on the first signal and immediately on the second, and reload files on SIGHUP.

        ``signals`` is None if the process exits when it stops leading.
        """
        self._signals = signals or Signals()
        self._signals.listen(self._signalled, reload)

    def _signalled(self, number: signal.Signals) -> None:
        if self._is_signalled:
            log.warning("exiting immediately after a second signal", signal=number.name)
            os._exit(EXIT_SECOND_SIGNAL)
        self._is_signalled = True
        log.info("stopping", signal=number.name, limit_s=self._config.drain_timeout_s)
        if self._exit_code == EXIT_DEPOSED:
            self._exit_code = EXIT_OK  # exit instead of becoming a standby
        self._stopping.set()

    async def wait(self, broker: Broker, hub: Hub, listeners: Sequence[Listener]) -> int:
        """Serve until stopped, then drain, and return the exit code."""
        collector = Collector()
        collector.start()
        sweeper = asyncio.create_task(self._sweep(hub, broker, collector))
        await self._stopping.wait()
        if self.registration is not None:
            await asyncio.to_thread(self.registration.stop)
        close_listeners(listeners)
        # Remove the ready file before the data directory is released; later the file may belong to the next process.
        withdraw_ready(self._config.ready_file)
        if self.tables is not None:
            await self.tables.stop()
        if self.links is not None:
            await self.links.stop()
        if self.queries is not None:
            await self.queries.stop()
        if self._exit_code == EXIT_OK:
            await drain(hub, self._config.drain_timeout_s)
        sweeper.cancel()
        collector.stop()
        if self.exports is not None:
            self.exports.stop()
        with contextlib.suppress(BrokerError):  # failed storage was reported already
            broker.close()
        await _close_connections(hub)
        if self.driver is not None:
            self.driver.close()
        self._audit.sweep(stopping=True)
        self._audit.close()
        if self._lines is not None:
            self._lines.sweep(stopping=True)
        if self._signals is not None and self._exit_code == EXIT_DEPOSED:
            self._signals.keep()  # signals that arrive from now on are for the standby
        elif self._signals is not None and self.others is None:
            self._signals.end()
        log.info("stopped", exit_code=self._exit_code)
        return self._exit_code

    async def _sweep(self, hub: Hub, broker: Broker, collector: Collector) -> None:
        if self.registration is not None:
            self.registration.update(_registered(broker))
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                await self._sweep_once(hub, broker, collector)
            except Exception as error:  # otherwise timeouts of all connections would end with it, silently
                log.error("regular work failed, and is tried again", retry_s=SWEEP_S, exc_info=error)

    async def _sweep_once(self, hub: Hub, broker: Broker, collector: Collector) -> None:
        if self.others is not None and not self.others.is_alive:
            self.storage_failed(
                NotOwner(ErrorCode.NOT_OWNER, "this broker was suspended for so long that another one may lead")
            )
        hub.sweep()
        collector.sweep(alone=not hub.connections)
        self._audit.sweep()
        if self._lines is not None:
            self._lines.sweep()
        if self.registration is not None:
            self.registration.update(_registered(broker))
        if self.tables is not None:
            self.tables.sweep()
        if self.history is not None:
            await self.history.sweep()


def _registration(config: ServeConfig, listeners: Sequence[Listener], broker_id: int) -> Registration | None:
    """Start registering Kafka 0.7 in ZooKeeper; return None if that is not configured.

    Raises Invalid if it cannot be started.
    """
    addresses = [listener.address for listener in listeners if listener.name == "kafka07"]
    if config.kafka07_zookeeper == OFF or not addresses:
        return None
    registration = Registration(config.kafka07_zookeeper, addresses[0], broker_id)
    registration.start()
    return registration


def _exports(broker: Broker, config: ServeConfig, factories: Factories) -> exports.Exports | None:
    """Return the export of FLUX groups to files. With several processes, the first one writes the files.

    If that is not configured, delete the files that an earlier start exported.
    """
    _, inside, router = factories
    store = FileStore(config.data_dir)
    is_on = config.flux_exports and config.speaks("flux", has_users=not broker.access.is_open)
    if is_on and not _has_copy(router):
        return exports.Exports(broker, store, ThreadWorker("flux-exports", broker.loop), parts=router)
    exports.remove(store)
    if inside is None:
        return None
    found = exports.Exports(broker, None, None)
    inside.add(Part(exports.PART, found, [exports.Exports.report]))
    return found if is_on else None


def _registered(broker: Broker) -> list[Topic]:
    """Return the topics to register in ZooKeeper: those that a client without a login may see."""
    try:
        client = broker.access.nameless(None)
    except Denied:  # clients need certificates
        return []
    return [topic for topic in broker.topics() if broker.access.permits(client, Action.TOPIC_DESCRIBE, topic)]


async def drain(hub: Hub, timeout_s: float) -> None:
    """Accept no more requests, and wait for pending responses, but no longer than ``timeout_s``."""
    hub.draining = True
    for connection in list(hub.connections):
        connection.stop_reading()
    hub.commit()
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout_s
    while any(connection.is_waiting for connection in hub.connections) and loop.time() < end:  # noqa: ASYNC110 - polling is intended
        await asyncio.sleep(DRAIN_POLL_S)
    waiting = sum(connection.is_waiting for connection in hub.connections)
    if waiting:
        log.warning("drain timed out with responses pending", connections=waiting, limit_s=timeout_s)


async def _close_connections(hub: Hub) -> None:
    """Close every connection once its responses are sent, but wait no longer than ``FLUSH_TIMEOUT_S``."""
    for connection in list(hub.connections):
        connection.close()
    loop = asyncio.get_running_loop()
    end = loop.time() + FLUSH_TIMEOUT_S
    while hub.connections and loop.time() < end:  # noqa: ASYNC110 - polling is intended
        await asyncio.sleep(DRAIN_POLL_S)
    for connection in list(hub.connections):
        connection.abort("the broker is stopping, and the client does not read its responses")


def _announce(config: ServeConfig, listeners: Sequence[Listener], access: Access) -> None:
    """Log the listeners, and all settings that weaken durability or security. Then write the ready file."""
    for listener in listeners:
        log.info("listening", listener=listener.name, address=str(listener.address))
    if config.durability is Level.WRITTEN and not config.bucket:
        log.info(
            "acknowledged records survive a broker crash; a power failure can lose the last 100 ms",
            durability="written",
            stronger="--durability synced",
        )
    if access.is_open:
        log.info(
            "authentication is off: no users are configured, and protocols with a login accept the default user",
            user=DEFAULT_NAME,
        )
    outside = [listener.name for listener in listeners if not listener.address.is_loopback]
    if config.insecure and outside and access.is_open:
        log.warning(
            "listening on other than loopback addresses without authentication: every client can read, write and delete"
        )
    elif config.insecure and any(not name.endswith(TLS_SUFFIX) for name in outside):
        log.warning(
            "listening on other than loopback addresses without TLS: passwords and records are sent in clear text"
        )
    write_ready(config.ready_file, {listener.name: listener.address for listener in listeners})


def _new_loop() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop
