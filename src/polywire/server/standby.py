"""A broker that waits for its turn to lead the log in a bucket, and says who it is to those who wait for it.

Promises: clocks and connections decide when it tries, and nothing else: who is right is told by the bucket. While another leads, its clients
are carried there. Must not know: the journal, any wire's bytes.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

import structlog

from polywire.clock import SystemClock
from polywire.cluster.nodes import NODE_INTERVAL_S, NODE_TIMEOUT_S, Node, Nodes, Watch, Wish, node_of, states
from polywire.errors import BrokerError, ErrorCode, Invalid
from polywire.server.bucket_watch import BucketWatch
from polywire.server.config import HTTP, TLS_SUFFIX, Address, ServeConfig
from polywire.server.listener import INSIDE, INSIDE_TLS
from polywire.server.ready import withdraw_ready, write_ready
from polywire.server.relay import Relay
from polywire.server.reload import Reload
from polywire.server.shard import Shard
from polywire.server.signals import Signals
from polywire.server.standby_health import StandbyHealth, own_answer
from polywire.server.tls import server_tls
from polywire.store.bucket import REQUEST_TIMEOUT_S

LOOK_S: Final = 0.5  # between two looks at the leader
RANK_S: Final = 0.5  # that a candidate lets each before it try
REFUSED_MAX: Final = 2  # looks that find the leader's port closed, before its broker is taken for dead
HANDING_OVER_S: Final = (
    10.0  # in which a leader that asked to be followed looks for that often: what it shows meanwhile may be old
)
KNOCK_TIMEOUT_S: Final = 2.0
SILENT_S: Final = (
    0.75 * NODE_TIMEOUT_S
)  # without a word of its own in the bucket a leader gives up, before others take it for dead
UNHEARD: Final = "nothing could be said in the bucket for too long"

log = structlog.get_logger("polywire.server")

Deposed = Callable[[str], object]
"""Told that this broker is not to lead any longer, and why."""


def _nobody(_: str) -> None:
    """Who does not lead need not be told."""


class Presence:
    """This broker's object among the nodes, written by a thread of its own: others wait for a leader that is recovering. Guards: its counter
    grows with every write, so that they see that it lives."""

    def __init__(self, config: ServeConfig, watch: BucketWatch) -> None:
        self._seen = watch.sees
        self._candidate = watch.candidate
        self._balance = watch.balance
        self._nodes = Nodes(watch.open(timeout_s=NODE_INTERVAL_S), watch.candidate)  # one that hangs is asked again
        self._config = config
        self._name = watch.candidate.name
        self._id = secrets.token_hex(16)
        self._said: tuple[dict[str, tuple[str, int]], int] = {}, 0
        self._counter = 0
        self._watch = Watch(self._name)
        self._deposed: Deposed = _nobody
        self._clock = SystemClock()
        self._written_at = 0.0
        self._hands_over_until = 0.0
        self._changed = threading.Event()
        self._over = False
        self._thread: threading.Thread | None = None

    def say(self, addresses: Mapping[str, Address], start: int, deposed: Deposed = _nobody) -> None:
        """Say from now on where this broker listens, and what it leads under; see ``Node``. Calls back in its thread, perhaps several times,
        when another broker says that it leads under a later start, or this one was not heard: who has nothing to write would not notice."""
        self._deposed = deposed
        self._written_at = self._clock.monotonic()
        self._said = (
            {name: (self._config.reached_at(address), address.port) for name, address in addresses.items()},
            start,
        )
        self._changed.set()
        if self._thread is None:
            self._put()  # before anything else is tried
            self._thread = threading.Thread(target=self._repeat, name="polywire-presence", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Say no more: others need not wait. Takes as long as the bucket does."""
        self._over = True
        self._changed.set()
        if self._thread is not None:
            self._thread.join()
            with suppress(BrokerError):
                self._nodes.remove(self._name)

    def _repeat(self) -> None:
        while not self._over:
            hands_over = self._clock.monotonic() < self._hands_over_until
            self._changed.wait(LOOK_S if hands_over else NODE_INTERVAL_S)
            self._changed.clear()
            if not self._over:
                self._put()
                self._look()

    @property
    def is_heard(self) -> bool:
        """Whether others cannot have taken this broker for dead. Who slept longer must not answer from what it remembers."""
        return self._clock.monotonic() - self._written_at < SILENT_S

    def _look(self) -> None:
        """A leader watches for another, and forgets who has long been gone."""
        start = self._said[1]
        if start <= 0:
            return
        with suppress(BrokerError):
            nodes = self._nodes.read()
            now = self._clock.monotonic()
            self._watch.see(nodes, now)
            seen = states(nodes, self._watch.alive(nodes))
            self._seen(seen)
            if any(node.start > start for node in nodes):
                self._deposed("another broker leads under a later start")
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
                self._nodes.wish(Wish(other.name, start))

    def _put(self) -> None:
        """What fails is written the next time: others go by what they see. Who was silent for too long leads no more."""
        self._counter += 1
        (addresses, start), begun, candidate = self._said, self._clock.monotonic(), self._candidate
        if start > 0 and not self.is_heard:
            self._deposed(UNHEARD)
            return
        with suppress(BrokerError):
            self._nodes.put(node_of(candidate, self._id, addresses, start=start, counter=self._counter))
            self._written_at = begun


class Standby:
    """Waits until nobody leads. Guards: clients that come meanwhile are carried to the leader that was seen last."""

    def __init__(
        self, config: ServeConfig, watch: BucketWatch, signals: Signals, *, deposed: bool, shard: Shard | None = None
    ) -> None:
        """deposed: another broker has just been quicker, and may not have said so yet; or the bucket could not be reached. shard: this
        process's, where it is one of several."""
        self._config = config
        self._shard = shard
        self._signals = signals
        self._name = watch.candidate.name
        self._nodes = Nodes(watch.open(timeout_s=REQUEST_TIMEOUT_S), watch.candidate)
        self._watch = Watch(self._name, watch.candidate.shard)
        self._balance = watch.balance
        self._leader: Node | None = None
        self._told = 0
        """The start of the leader of whom it was told that links do not reach it."""
        self._read_at = -NODE_INTERVAL_S
        self._refused = 0
        self._rank = 0
        self._is_tried = False
        """Whether another takes over already: who claimed next would only depose it."""
        self._waited = 0.0
        self._clock = SystemClock()
        self._patient_until = self._clock.monotonic() + (NODE_TIMEOUT_S if deposed else 0)
        self._stopping = asyncio.Event()
        self._addresses: dict[str, Address] = {}
        self._is_listening = False
        self._health: StandbyHealth | None = None
        self._to_stop: asyncio.Task[int] | None = None
        """What is stopped by a signal once this broker has its turn."""
        self.has_waited = deposed
        """Whether this broker was of use already: then it outlives a bucket that does not answer."""

    async def wait(self, presence: Presence) -> bool:
        """Until it is this broker's turn; False when it was told to stop before. HTTP and signals are answered until ``stop``. Raises
        BrokerError."""
        links = None if self._shard is None else self._shard.link_tls(self._config)
        ways = {} if links is None else {INSIDE: links.connect}
        relay = Relay(self._find, own_answer, asked={HTTP}, ways=ways)
        self._signals.listen(
            self._told_to_stop, None if links is None else Reload({"certificate of links": links.reload})
        )
        try:
            while not self._stopping.is_set() and await self._is_led():
                self.has_waited = True
                await self._answer_health()
                if self._can_carry():
                    await self._carry(relay, presence)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), LOOK_S)
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
        """Whether a signal came."""
        return self._stopping.is_set()

    def _told_to_stop(self, _: object) -> None:
        self._stopping.set()
        if self._to_stop is not None:
            self._to_stop.cancel()

    async def stop(self) -> None:
        """Answer HTTP no longer, and do nothing about signals: the broker does, or nobody."""
        self._to_stop = None
        health, self._health = self._health, None
        if health is not None:
            await health.stop()

    def _can_carry(self) -> bool:
        """Whether a leader was seen that takes connections."""
        return self._leader is not None and self._refused == 0 and bool(self._leader.addresses)

    async def _carry(self, relay: Relay, presence: Presence) -> None:
        """Listen for who is carried. Raises Unavailable."""
        if self._is_listening:
            return
        assert self._leader is not None, "who carries knows where to"
        self._is_listening = True
        if self._shard is None:
            self._addresses |= await relay.listen(self._carried())
        else:  # it has no address of its own: who is carried must not come to one that carries
            await relay.listen(self._carried(), shared=True)
            await relay.listen_on(INSIDE, self._shard.inside())
            self._shard.serving()
        presence.say(self._addresses, 0)
        write_ready(self._config.ready_file, self._addresses)
        log.info("standby: forwarding connections to the leader", leader=self._leader.name)

    async def _answer_health(self) -> None:
        """HTTP, where it is while this broker leads; without it where its port is taken."""
        if self._health is not None or self._shard is not None:
            return
        self._health = health = StandbyHealth(lambda: self._is_listening and self._can_carry())
        tls = server_tls(self._config)
        for name, address in self._config.listeners().items():
            if name.removesuffix(TLS_SUFFIX) != HTTP:
                continue
            context = tls.context if tls is not None and name.endswith(TLS_SUFFIX) else None
            try:
                self._addresses[name] = await health.listen(address, context)
            except OSError as error:
                log.warning("HTTP is off while this broker is a standby", address=str(address), reason=error.strerror)

    def _carried(self) -> dict[str, Address]:
        """Where clients of the leader may come; not HTTP, which tells of this broker itself, unless any process answers for all."""
        given = self._config.listeners()
        if self._shard is not None:
            return dict(given)
        return {name: address for name, address in given.items() if name.removesuffix(TLS_SUFFIX) != HTTP}

    def _find(self, listener: str) -> tuple[str, int] | None:
        leader = self._leader
        if leader is None:
            return None
        if listener != INSIDE:
            return leader.addresses.get(listener)
        is_secure = self._config.tls_machine_authority is not None
        wanted, other = (INSIDE_TLS, INSIDE) if is_secure else (INSIDE, INSIDE_TLS)
        if other in leader.addresses and self._told != leader.start:
            self._told = leader.start
            log.warning(
                f"cannot forward requests: the leader accepts connections {'without' if is_secure else 'with'} TLS only",
                leader=leader.name,
                remedy="start every machine of the bucket with --tls-machine-authority, or none",
            )
        return leader.addresses.get(wanted)

    async def _is_led(self) -> bool:
        """Whether somebody leads and is alive, as far as can be seen, and nobody wants this broker to take over."""
        now, leader = self._clock.monotonic(), self._leader
        if leader is None or leader.start < 0 or self._refused or now - self._read_at >= NODE_INTERVAL_S:
            self._read_at = now
            try:
                leader, wish = await asyncio.to_thread(self._look, now)
            except BrokerError as error:
                log.warning("cannot read the state of the leader from the bucket", reason=error.message)
                return self.has_waited  # whoever leads has the same bucket
            self._leader = leader
            self._balance.wished(wish, now)
            if leader is not None and wish == Wish(self._name, leader.start):
                log.info("taking over on request", leader=leader.name)
                return False
        if leader is None:
            self._waited += LOOK_S
            return now < self._patient_until or self._waited <= RANK_S * self._rank
        self._waited = 0.0
        if await self._answers(leader):
            self._refused = 0
            self._check_name(leader)
            return True
        self._refused += 1
        return self._is_tried or self._refused < REFUSED_MAX + self._rank * RANK_S / LOOK_S

    def _look(self, now: float) -> tuple[Node | None, Wish | None]:
        """Who leads, and what somebody wants. Raises BrokerError."""
        nodes = self._nodes.read()
        leader = self._watch.leader(nodes, now)
        self._rank = self._watch.rank(nodes)
        alive = self._watch.alive(nodes)
        self._is_tried = any(node.start < 0 and node.name in alive - {self._name} for node in nodes)
        return leader, self._nodes.wished()

    def _check_name(self, leader: Node) -> None:
        if leader.name == self._name:
            raise Invalid(
                ErrorCode.INVALID_NAME,
                f"another broker with this name is the leader (give one of them another --node) name={self._name!r}",
            )

    async def _answers(self, leader: Node) -> bool:
        """Whether something listens where the leader says; unknown counts as yes, for then its silence decides."""
        place = next(iter(leader.addresses.values()), None)
        if place is None:
            return True
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(*place), KNOCK_TIMEOUT_S)
        except ConnectionRefusedError:
            return False
        except (OSError, TimeoutError):
            return True
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        return True


class Turn:
    """Implements ``lifecycle.Others``: a broker that leads, or recovers what it is to lead."""

    def __init__(self, presence: Presence, standby: Standby, watch: BucketWatch, signals: Signals) -> None:
        self.watch: Final = watch
        self.signals: Final = signals
        self._presence = presence
        self._standby = standby

    @property
    def is_heard(self) -> bool:
        return self._presence.is_heard

    def say(self, addresses: Mapping[str, Address], start: int, deposed: Deposed = _nobody) -> None:
        self._presence.say(addresses, start, deposed)

    async def opened(self) -> None:
        self.signals.keep()
        await self._standby.stop()
