"""Run a broker whose log is in a bucket: as standby, as leader, and as standby again when it loses leadership.

* A standby forwards clients to the current leader, and waits until it can become the leader.
* Timeouts and lost connections only determine when a standby tries to take over. Whether it becomes the leader is decided
  by a conditional write to the bucket. A broker leads until it is deposed, and then becomes a standby
  again.
* If the bucket is unreachable when a process starts, the process exits. A broker that has been a standby waits until
  the bucket responds again.
* The HTTP listener of a standby serves liveness, readiness and two metrics. Requests to this listener are limited in
  size, time and number. A standby does not authenticate clients, so it serves nothing else.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Final

import structlog

from polywire.clock import SystemClock
from polywire.cluster.nodes import Node, Nodes, TakeoverRequest, Watch, interval_s, node_of, states
from polywire.errors import BrokerError, ErrorCode, Invalid, NotOwner, Unavailable
from polywire.http.session import HEAD_BYTES_MAX
from polywire.protocols.flux import exports
from polywire.server import lifecycle
from polywire.server.bucket import in_thread, is_left_opening
from polywire.server.bucket_watch import BucketWatch
from polywire.server.config import HTTP, TLS_SUFFIX, Address, ServeConfig
from polywire.server.lines import LineLimit
from polywire.server.listener import INSIDE, INSIDE_TLS, listening_sockets, withdraw_ready, write_ready
from polywire.server.relay import Relay
from polywire.server.shard import Shard
from polywire.server.signals import Reload, Signals
from polywire.server.tls import server_tls
from polywire.store.bucket import REQUEST_TIMEOUT_S
from polywire.store.file import FileStore
from polywire.store.objects import FIRST
from polywire.types import shard_name

CONNECTIONS_MAX: Final = 64  # concurrent connections; each gets one response
REQUEST_S: Final = 5.0
FORWARDING: Final = "standby: forwarding connections to the leader\n"
ALIVE: Final = "alive\n"
NO_LEADER: Final = "not ready: this broker is a standby, and there is no leader\n"
NOT_LEADER: Final = "this broker is a standby: send the request to the leader\n"
TEXT_TYPE: Final = "text/plain; charset=utf-8"
METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
METRICS: Final = f"""\
# HELP polywire_bucket_leads 1 if the broker is the leader of the shard, 0 if it is a standby.
# TYPE polywire_bucket_leads gauge
polywire_bucket_leads{{shard="{shard_name(FIRST)}"}} 0
# HELP polywire_bucket_carries 1 if a standby forwards connections to the leader.
# TYPE polywire_bucket_carries gauge
polywire_bucket_carries %d
"""
_END: Final = b"\r\n\r\n"

log = structlog.get_logger("polywire.server")
LOOK_S: Final = 0.5  # longest pause between two checks of the leader
RANK_S: Final = 0.5  # delay per better-ranked standby, so that not all standbys try to take over at once
NAMESAKE_CHANGES_MAX: Final = 1  # changes of a node object that a killed process can still have requested
REFUSED_MAX: Final = 2  # checks that find the port closed before the leader counts as dead
HANDING_OVER_S: Final = 10.0  # after a handover was requested, how long the leader checks often whether it has happened
KNOCK_TIMEOUT_S: Final = 2.0
# a leader that could not write a heartbeat for this part of its timeout steps down, before standbys consider it dead
SILENT_PART: Final = 0.75
# a broker that gets no responses while it recovers the log announces itself for ``SILENT_PART`` of each such time, in
# timeouts. Its requests may arrive, and standbys would wait for it. So it is silent for the rest, and they take over.
RETRIED_PART: Final = 3.0
UNHEARD: Final = "no heartbeat could be written to the bucket for too long"
OnDeposed = Callable[[str], object]
"""Called with the reason when this broker must stop leading."""


class StandbyHealth:
    """HTTP server of a standby, which answers health checks.

    It serves at most ``CONNECTIONS_MAX`` connections, until ``stop`` is called.
    """

    def __init__(self, is_forwarding: Callable[[], bool]) -> None:
        """``is_forwarding`` returns whether connections are being forwarded to a leader."""
        self._is_forwarding = is_forwarding
        self._servers: list[asyncio.Server] = []
        self._requests: set[asyncio.Task[None]] = set()

    async def listen(self, address: Address, context: ssl.SSLContext | None) -> Address:
        """Accept connections, and return the address with its actual port. Raises OSError if it is in use."""
        sockets = await listening_sockets(address)
        for listening in sockets:
            self._servers.append(
                await asyncio.start_server(
                    self._connected, sock=listening, ssl=context, limit=HEAD_BYTES_MAX, start_serving=True
                )
            )
        return Address(address.host, sockets[0].getsockname()[1])

    async def stop(self) -> None:
        for server in self._servers:
            server.close()
        for task in list(self._requests):
            task.cancel()
        await asyncio.sleep(0)
        self._servers.clear()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._requests) >= CONNECTIONS_MAX:
            writer.transport.abort()
            return
        task = asyncio.create_task(self._answer(reader, writer))
        self._requests.add(task)
        task.add_done_callback(partial(self._ended, writer))

    def _ended(self, writer: asyncio.StreamWriter, task: asyncio.Task[None]) -> None:
        """Close the connection here, because a task that is cancelled before it starts does not close it."""
        self._requests.discard(task)
        with suppress(OSError, RuntimeError):
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_S):
                head = await reader.readuntil(_END)
                writer.write(self._answer_to(head))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            log.debug("connection ended before a complete request")

    def _answer_to(self, head: bytes) -> bytes:
        words = head.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or words[0] not in (b"GET", b"HEAD"):
            return _answer("405 Method Not Allowed", NOT_LEADER)
        whole = words[0] == b"GET"
        match words[1].partition(b"?")[0]:
            case b"/livez":
                return _answer("200 OK", ALIVE, whole=whole)
            case b"/readyz" if self._is_forwarding():
                return _answer("200 OK", FORWARDING, whole=whole)
            case b"/readyz":
                return _answer("503 Service Unavailable", NO_LEADER, whole=whole)
            case b"/metrics":
                return _answer("200 OK", METRICS % self._is_forwarding(), content_type=METRICS_TYPE, whole=whole)
        return _answer("503 Service Unavailable", NOT_LEADER, whole=whole)


def own_answer(_: str, first_bytes: bytes) -> bytes | None:
    """Return the response to ``/livez``; None for any other request.

    A standby with several processes answers ``/livez`` itself, and forwards all other requests.
    """
    line = first_bytes.partition(b"\r\n")[0].split(b" ")
    if len(line) != 3 or line[0] not in (b"GET", b"HEAD") or line[1].partition(b"?")[0] != b"/livez":
        return None
    return _answer("200 OK", ALIVE, whole=line[0] == b"GET")


def _answer(status: str, text: str, *, content_type: str = TEXT_TYPE, whole: bool = True) -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(text)}\r\n"
        "Cache-Control: no-store\r\nConnection: close\r\n\r\n"
    )
    return (head + (text if whole else "")).encode()


def _ignore(_: str) -> None:
    pass


class Presence:
    """Writes this broker's heartbeats to the bucket, in a thread.

    Each heartbeat increments a counter in an object. The thread also runs during recovery, so standbys wait for a
    leader that is recovering.
    """

    def __init__(self, config: ServeConfig, watch: BucketWatch) -> None:
        self._seen = watch.sees
        self._candidate = watch.candidate
        self._balance = watch.balance
        self._timeout_s = config.node_timeout_s
        self._interval_s = interval_s(self._timeout_s)
        # short timeout: a request that hangs is repeated
        objects = watch.open(timeout_s=self._interval_s)
        self._nodes = Nodes(objects, watch.candidate)
        self._has_log = partial(watch.has_log, objects)
        self._config = config
        self._name = watch.candidate.name
        self._id = watch.process_id
        self._state: tuple[dict[str, tuple[str, int]], int] = {}, 0
        self._counter = 0
        self._watch = Watch(self._name)
        self._deposed: OnDeposed = _ignore
        self._clock = SystemClock()
        self._written_at = 0.0
        self._hands_over_until = 0.0
        self._changed = threading.Event()
        self._over = False
        self._thread: threading.Thread | None = None

    def announce(self, addresses: Mapping[str, Address], start: int, deposed: OnDeposed = _ignore) -> None:
        """Set the addresses and the start number in this broker's heartbeats.

        The start number is 0 for a standby, and -1 while it tries to become the leader. ``deposed`` is called if
        another broker leads with a higher start number, or if heartbeats have failed for ``SILENT_PART`` of the timeout.
        A leader that writes nothing else to the bucket would not notice otherwise. It is called in the thread, and may
        be called several times.
        """
        self._deposed = deposed
        self._written_at = self._clock.monotonic()
        self._state = (
            {name: (self._config.reached_at(address), address.port) for name, address in addresses.items()},
            start,
        )
        self._changed.set()
        if self._thread is None:
            self._put()  # the first heartbeat, before this broker tries anything else
            self._thread = threading.Thread(target=self._repeat, name="polywire-presence", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Stop the heartbeats, and delete the object in the bucket, so that standbys need not wait."""
        self._over = True
        self._changed.set()
        if self._thread is not None:
            self._thread.join()
            with suppress(BrokerError):
                self._nodes.remove(self._name)

    def _repeat(self) -> None:
        while not self._over:
            hands_over = self._clock.monotonic() < self._hands_over_until
            self._changed.wait(min(LOOK_S, self._interval_s) if hands_over else self._interval_s)
            self._changed.clear()
            if not self._over:
                self._put()
                self._check_leadership()

    @property
    def is_alive(self) -> bool:
        """Whether standbys still consider this broker alive.

        A broker that was suspended for too long must not serve reads from memory, because another one may be the
        leader.
        """
        return self._clock.monotonic() - self._written_at < SILENT_PART * self._timeout_s

    def _check_leadership(self) -> None:
        """Do the regular checks of a leader.

        Step down if there is a later leader or the bucket has another log, remove objects of dead brokers, and hand the
        shard over if rebalancing requires it.
        """
        start = self._state[1]
        if start <= 0:
            return
        with suppress(BrokerError):
            nodes = self._nodes.read()
            now = self._clock.monotonic()
            self._watch.see(nodes, now)
            seen = states(nodes, self._watch.alive(nodes))
            self._seen(seen)
            if any(node.start > start for node in nodes):
                self._deposed("another broker leads with a higher start number")
                return
            if not self._has_log():
                self._deposed("the bucket has lost the log that this broker leads, or has another one")
                return
            gone = self._watch.forgotten(nodes)
            for node in nodes:
                if node.name in gone:
                    self._nodes.remove(node.name)
                    self._nodes.undrain(node.machine)
            other = self._balance.target(seen, now)
            if other is not None:
                log.info("handing the shard over to another broker", node=other.name)
                self._balance.moved(now)
                self._hands_over_until = now + HANDING_OVER_S
                self._nodes.request_takeover(TakeoverRequest(other.name, start))

    def _put(self) -> None:
        """Write a heartbeat. If that fails, it is retried; after ``SILENT_PART`` of the timeout, a leader steps down."""
        self._counter += 1
        (addresses, start), begun, candidate = self._state, self._clock.monotonic(), self._candidate
        if start > 0 and not self.is_alive:
            self._deposed(UNHEARD)
            return
        unheard = (begun - self._written_at) / self._timeout_s
        if start < 0 and unheard % RETRIED_PART >= SILENT_PART:
            return
        with suppress(BrokerError):
            self._nodes.put(
                node_of(candidate, self._id, addresses, start=start, counter=self._counter, timeout_s=self._timeout_s)
            )
            self._written_at = begun


class Standby:
    """Waits until this broker should become the leader. Meanwhile, clients are forwarded to the last known leader."""

    def __init__(
        self, config: ServeConfig, watch: BucketWatch, signals: Signals, *, deposed: bool, shard: Shard | None = None
    ) -> None:
        """Create the standby.

        Args:
            config: settings of the process.
            watch: statistics of the bucket.
            signals: signals of the process.
            deposed: whether this broker has just lost leadership. The new leader may not have written a heartbeat yet.
            shard: the shard of this process, if there are several.
        """
        self._config = config
        self._shard = shard
        self._signals = signals
        self._name = watch.candidate.name
        self._id = watch.process_id
        self._namesake: set[tuple[str, int]] = set()
        """Heartbeats of a leader with this broker's name, which is another broker or was this one before a kill."""
        self._nodes = Nodes(watch.open(timeout_s=REQUEST_TIMEOUT_S), watch.candidate)
        self._watch = Watch(self._name, watch.candidate.shard)
        self._bucket = watch
        self._balance = watch.balance
        self._leader: Node | None = None
        self._warned_start = 0
        """Start number of the leader about which a TLS mismatch was logged."""
        self._interval_s = interval_s(config.node_timeout_s)
        self._look_s = min(LOOK_S, self._interval_s)
        self._read_at = -self._interval_s
        self._refused = 0
        self._rank = 0
        self._is_tried = False
        """Whether another standby is already taking over. A second attempt would only depose it."""
        self._waited = 0.0
        self._clock = SystemClock()
        self._patient_until = self._clock.monotonic() + (config.node_timeout_s if deposed else 0)
        self._stopping = asyncio.Event()
        self._addresses: dict[str, Address] = {}
        self._is_listening = False
        self._health: StandbyHealth | None = None
        self._to_stop: asyncio.Task[int] | None = None
        """The task that a signal cancels during a takeover or a test of the bucket."""
        self.has_waited = deposed
        """Whether this broker has already been a standby or leader.

        If so, it does not exit when the bucket is unreachable.
        """

    async def wait(self, presence: Presence) -> bool:
        """Wait until this broker should take over. Return False if a signal stopped it first.

        HTTP is served and signals are handled until ``stop`` is called. Raises BrokerError if the bucket cannot be
        read.
        """
        store = FileStore(self._config.data_dir)
        links = None if self._shard is None else self._shard.link_tls(self._config)
        connects = {} if links is None else {INSIDE: links.connect}
        relay = Relay(self._find, own_answer, answered={HTTP}, connects=connects)
        self._signals.listen(
            self._stop_requested, None if links is None else Reload({"certificate of links": links.reload})
        )
        try:
            while not self._stopping.is_set() and await self._is_led():
                self.has_waited = True
                exports.remove(store)  # files that this broker wrote as the leader are out of date now
                await self._answer_health()
                if self._can_forward():
                    await self._forward(relay, presence)
                    await self._check_bucket()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), self._look_s)
                if self._stopping.is_set():
                    return False
            await self._answer_health()
            self._to_stop = asyncio.current_task()
            return not self._stopping.is_set()
        finally:
            self._is_listening = False
            await relay.stop()
            withdraw_ready(self._config.ready_file)

    @property
    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    def _stop_requested(self, _: object) -> None:
        self._stopping.set()
        if self._to_stop is not None:
            self._to_stop.cancel()

    async def stop(self) -> None:
        """Stop serving HTTP and handling signals, because a leader does both itself."""
        self._to_stop = None
        health, self._health = self._health, None
        if health is not None:
            await health.stop()

    def _can_forward(self) -> bool:
        leader = self._leader
        return leader is not None and self._refused == 0 and bool(leader.addresses) and leader.name != self._name

    async def _forward(self, relay: Relay, presence: Presence) -> None:
        """Open the listeners of the relay. Raises Unavailable if an address is in use."""
        if self._is_listening:
            return
        assert self._leader is not None, "there is a leader to forward to"
        self._is_listening = True
        if self._shard is None:
            self._addresses |= await relay.listen(self._forwarded_listeners())
        else:  # heartbeats then have no addresses, so that no other standby forwards connections to this one
            await relay.listen(self._forwarded_listeners(), shared=True)
            await relay.listen_on(INSIDE, self._shard.inside())
            self._shard.serving()
        presence.announce(self._addresses, 0)
        write_ready(self._config.ready_file, self._addresses)
        log.info("standby: forwarding connections to the leader", leader=self._leader.name)

    async def _check_bucket(self) -> None:
        """Test the bucket once while another broker leads, so that a takeover does not wait for the test.

        Raises Invalid if the bucket fails the test.
        """
        if self._bucket.is_checked:
            return
        self._to_stop = asyncio.current_task()
        try:
            with suppress(Unavailable):  # it is tested again later
                await in_thread(asyncio.get_running_loop(), self._bucket.check)
        except asyncio.CancelledError:
            if not self.is_stopping:
                raise
        self._to_stop = None

    async def _answer_health(self) -> None:
        """Serve HTTP on the addresses that this broker uses as leader. If a port is in use, log a warning."""
        if self._health is not None or self._shard is not None:
            return
        self._health = health = StandbyHealth(lambda: self._is_listening and self._can_forward())
        tls = server_tls(self._config)
        for name, address in self._config.listeners().items():
            if name.removesuffix(TLS_SUFFIX) != HTTP:
                continue
            context = tls.context if tls is not None and name.endswith(TLS_SUFFIX) else None
            try:
                self._addresses[name] = await health.listen(address, context)
            except OSError as error:
                log.warning("HTTP is off while this broker is a standby", address=str(address), reason=error.strerror)

    def _forwarded_listeners(self) -> dict[str, Address]:
        """Return the addresses whose connections are forwarded.

        HTTP is one of them only if there are several processes.
        """
        listeners = self._config.listeners()
        if self._shard is not None:
            return dict(listeners)
        return {name: address for name, address in listeners.items() if name.removesuffix(TLS_SUFFIX) != HTTP}

    def _find(self, listener: str) -> tuple[str, int] | None:
        leader = self._leader
        if leader is None:
            return None
        if listener != INSIDE:
            return leader.addresses.get(listener)
        is_secure = self._config.tls_machine_authority is not None
        listener, other = (INSIDE_TLS, INSIDE) if is_secure else (INSIDE, INSIDE_TLS)
        if other in leader.addresses and self._warned_start != leader.start:
            self._warned_start = leader.start
            log.warning(
                f"cannot forward requests: the leader accepts connections {'without' if is_secure else 'with'} TLS only",
                leader=leader.name,
                remedy="start every machine of the bucket with --tls-machine-authority, or none",
            )
        return leader.addresses.get(listener)

    async def _is_led(self) -> bool:
        """Return whether a leader seems to be alive, and no operator has requested that this broker takes over."""
        now, leader = self._clock.monotonic(), self._leader
        if leader is None or leader.start < 0 or self._refused or now - self._read_at >= self._interval_s:
            self._read_at = now
            try:
                leader, request = await asyncio.to_thread(self._read_leader, now)
            except BrokerError as error:
                log.warning("cannot read the state of the leader from the bucket", reason=error.message)
                return self.has_waited  # do not take over: a leader could not reach the bucket either
            self._leader = leader
            self._balance.note_request(request, now)
            if leader is not None and request == TakeoverRequest(self._name, leader.start):
                log.info("taking over on request", leader=leader.name)
                return False
        if leader is None:
            self._waited += self._look_s
            return now < self._patient_until or self._waited <= RANK_S * self._rank
        self._waited = 0.0
        if await self._answers(leader):
            self._refused = 0
            self._check_name(leader)
            return True
        self._refused += 1
        return self._is_tried or self._refused < REFUSED_MAX + self._rank * RANK_S / self._look_s

    def _read_leader(self, now: float) -> tuple[Node | None, TakeoverRequest | None]:
        """Return the leader, and the latest request for a takeover. Raises BrokerError if the bucket cannot be read."""
        # this process may have been unable to remove its own object when it stopped leading
        nodes = [node for node in self._nodes.read() if node.id != self._id]
        leader = self._watch.leader(nodes, now)
        self._rank = self._watch.rank(nodes)
        alive = self._watch.alive(nodes)
        self._is_tried = any(node.start < 0 and node.name in alive - {self._name} for node in nodes)
        return leader, self._nodes.takeover_request()

    def _check_name(self, leader: Node) -> None:
        """Raise Invalid if the leader is another broker with this name, which continues to write heartbeats."""
        if leader.name != self._name:
            return
        self._namesake.add((leader.id, leader.counter))
        if len(self._namesake) > 1 + NAMESAKE_CHANGES_MAX:
            raise Invalid(
                ErrorCode.INVALID_NAME,
                f"another broker with this name is the leader (give one of them another --node) name={self._name!r}",
            )

    async def _answers(self, leader: Node) -> bool:
        """Return whether the leader's port is open; True if that is unknown.

        A takeover from a leader whose port is open depends on missing heartbeats.
        """
        address = next(iter(leader.addresses.values()), None)
        if address is None:
            return True
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(*address), KNOCK_TIMEOUT_S)
        except ConnectionRefusedError:
            return False
        except (OSError, TimeoutError):
            return True
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        return True


class Turn:
    """The period in which a broker is the leader, from recovery on. Implements ``lifecycle.OtherBrokers``."""

    def __init__(self, presence: Presence, standby: Standby, watch: BucketWatch, signals: Signals) -> None:
        self.watch: Final = watch
        self.signals: Final = signals
        self._presence = presence
        self._standby = standby

    @property
    def is_alive(self) -> bool:
        return self._presence.is_alive

    def announce(self, addresses: Mapping[str, Address], start: int, deposed: OnDeposed = _ignore) -> None:
        self._presence.announce(addresses, start, deposed)

    async def opened(self) -> None:
        self.signals.keep()
        await self._standby.stop()


def serve_in_turns(config: ServeConfig, lines: LineLimit, watch: BucketWatch, shard: Shard | None = None) -> int:
    """Serve as leader and as standby alternately, until a signal stops the process. Return the exit code.

    ``shard`` is the shard of this process if there are several. Raises BrokerError if the process cannot start.
    """
    signals, code, deposed = Signals(), lifecycle.EXIT_DEPOSED, False
    if shard is None:
        watch.undrain()  # if there are several processes, their parent has done this
    while code == lifecycle.EXIT_DEPOSED:
        if deposed:
            watch.deposed()
        serving = partial(serve_in_turn, config, lines, watch, signals, deposed=deposed, shard=shard)
        code, deposed = lifecycle.run_once(serving), True
    if watch.candidate.shard == FIRST:
        watch.undrain()  # a drain ends with the broker that it stopped
    return code


async def serve_in_turn(
    config: ServeConfig,
    lines: LineLimit,
    watch: BucketWatch,
    signals: Signals,
    *,
    deposed: bool,
    shard: Shard | None = None,
) -> int:
    """Wait as a standby while another broker leads, then lead until leadership ends. Return the exit code.

    ``deposed`` is whether this process has just lost leadership. Raises BrokerError if it cannot start.
    """
    presence, standby = Presence(config, watch), Standby(config, watch, signals, deposed=deposed, shard=shard)
    try:
        if not await standby.wait(presence):
            return lifecycle.EXIT_OK
        presence.announce({}, -1)
        others = Turn(presence, standby, watch, signals)
        return await _serve(config, lines, others, shard, has_waited=standby.has_waited)
    except NotOwner as error:
        if standby.is_stopping:
            return lifecycle.EXIT_OK
        signals.keep()
        report = log.info if error.__cause__ is None else log.warning  # the cause is an error of the bucket
        report("becoming a standby", reason=error.message)
        return lifecycle.EXIT_DEPOSED
    except asyncio.CancelledError:
        if not standby.is_stopping:
            raise
        log.info("stopped during recovery of the log", exit_code=lifecycle.EXIT_OK)
        return lifecycle.EXIT_OK
    finally:
        await standby.stop()
        await asyncio.to_thread(presence.end)
        if standby.is_stopping and await asyncio.to_thread(is_left_opening):
            # A normal exit would wait for threads that are blocked in requests to the bucket. Their results are not
            # needed any more.
            os._exit(lifecycle.EXIT_OK)


async def _serve(
    config: ServeConfig, lines: LineLimit, others: lifecycle.OtherBrokers, shard: Shard | None, *, has_waited: bool
) -> int:
    """Serve as the leader, and return the exit code. Raises BrokerError if it cannot start.

    If this broker ``has_waited`` as a standby and the bucket is unreachable, raises NotOwner, after which it becomes a
    standby again.
    """
    try:
        return await lifecycle.serve(config, lines, others, shard)
    except Unavailable as error:
        if not has_waited:
            raise
        raise NotOwner(ErrorCode.NOT_OWNER, error.message) from error
