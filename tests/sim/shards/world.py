"""The simulation of shards: processes that share the topics of one broker, each with its own disk, and their clients.

Once there are no more faults, every transaction ends the same way in all shards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import ClassVar, Final

from polywire.broker.owners import ITSELF
from polywire.broker.topics import Partition
from polywire.errors import BrokerError
from polywire.log.base import Read
from polywire.server.placement import Board, shard_by_hash
from polywire.types import Level, TopicName
from tests.sim.broker.part import LEVELS
from tests.sim.broker.world import BROKER
from tests.sim.disk import SimulatedDisk
from tests.sim.log.client import records_of
from tests.sim.log.world import SETTINGS, small_compaction
from tests.sim.node import TROUBLES
from tests.sim.process import drive
from tests.sim.promises import require
from tests.sim.shards.ledger import OWNERS, ShardsLedger
from tests.sim.shards.node import ShardNode
from tests.sim.shards.process import ShardProcess
from tests.sim.shards.transactor import DIALECTS, ShardsTransactor
from tests.sim.shards.turns import Together
from tests.sim.story import Aside, Story
from tests.sim.tokens import tokens_by
from tests.sim.wires.flux_speech import FluxSpeech
from tests.sim.wires.group_ledger import GroupLedger
from tests.sim.wires.kafka_speech import Identity, KafkaSpeech
from tests.sim.wires.ledger import PLACES, TOPICS, Place
from tests.sim.wires.network import Caller, Link
from tests.sim.wires.peer import Peer
from tests.sim.wires.polywire_speech import PolywireSpeech
from tests.sim.wires.speech import Speech
from tests.sim.wires.transactor import SOURCE
from tests.sim.world import MOOD_STEPS, STEPS, World

TURNS: Final = 8  # of processes and clients in each step, because there are several
PEERS: Final = 2
ACTING: Final = 0.2  # share of turns for clients
IDS: Final = ("copies", "copies1", "copies2")  # of producers, with coordinators in different shards
TIMEOUTS_MS: Final = (2_000, 60_000)  # of transactions
BACK: Final = 0.05  # share of turns in which a dead process restarts
SLEEPS_S: Final = (0.5, 3.0, 12.0)
HASTES: Final = (0.0, 0.0, 0.03, 0.2)
"""How often a process sleeps right after it has sent a message to another."""
DIES: Final = 0.4  # of sleeps
CUTS_S: Final = (0.0, 2.0, 12.0)
SETTLED_S: Final = 200.0  # an abandoned transaction has ended by then, in all shards
ACTS: Final = {
    "transact": 10.0,
    "leave": 0.1,
    "connect": 1.0,
    "produce": 2.0,
    "fetch": 1.5,
    "commit": 1.0,
    "position": 1.0,
    "push": 2.0,
    "cut": 0.1,
    "finish": 0.1,
}
"""Actions of clients and their frequency."""
COMMITTED_S: Final = 60.0  # until a client that continues has committed
ASKED_S: Final = 60.0  # until every pending request has a response


class ShardsWorld(World):
    """Guards: the ledger has every client since the beginning."""

    NAME = "shards"
    ACTS = tuple(ACTS)
    TROUBLES: ClassVar[Mapping[str, float]] = {**TROUBLES, "rival": 0.02, "sleep": 0.2, "apart": 0.2}

    def __init__(
        self,
        seed: int,
        *,
        steps: int = STEPS,
        without: Collection[str] = (),
        show: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(seed, steps=steps, without=without, show=show)
        chance = self._chance
        self._count = 2 + chance.below(2)
        first = chance.below(self._count)
        self._places: Final = {name: (first + number) % self._count for number, name in enumerate(TOPICS)}
        self._durability = chance.one_of((Level.WRITTEN, Level.WRITTEN, Level.SYNCED))
        least = 2 + chance.below(2)
        self._log_settings = replace(
            SETTINGS,
            slot_count_min=least,
            slot_count_max=least + chance.below(3),
            sync_interval_ms=chance.one_of((1, 20, 100, 60_000)),
            durability=self._durability,
        )
        own = replace(BROKER, durability=self._durability, staged_bytes_max=SETTINGS.staged_bytes_max)
        self._broker_settings = own.within(self._log_settings.batch_bytes_max)
        self._has_driver = chance.happens(0.3)
        self._board = Board(self._count)
        self._together = Together(self._clock, chance)
        self._weights = list(ACTS.values())
        self._haste = 0.0
        self._may_sleep = False
        self._apart: dict[frozenset[int], float] = {}
        """Until when which pairs of processes cannot reach each other."""
        self._ledger = ShardsLedger(self._durability)
        self._nodes = [self._make_node(number) for number in range(self._count)]
        self._transactors = [self._make_transactor(number) for number in range(1 + chance.below(2))]
        self._levels: Sequence[Level] = LEVELS[0]
        self._group = GroupLedger(self._durability, self._clock.monotonic, BROKER.member_timeout_s)
        self._peers = [self._make_peer(number) for number in range(PEERS)]

    def _make_node(self, number: int) -> ShardNode:
        def make(disk: SimulatedDisk, story: Story) -> ShardProcess:
            process = ShardProcess(
                disk,
                self._log_settings,
                self._broker_settings,
                self._clock,
                self._chance,
                story,
                own=number,
                board=self._board,
                places=self._places,
                reach=Between(self, number),
                together=self._together,
            )
            process.has_driver = self._has_driver
            return process

        story = Aside(self.story, f"s{number}")
        return ShardNode(
            number,
            make,
            self,
            self._together,
            chance=self._chance,
            clock=self._clock,
            story=story,
            without=self._without,
        )

    def _make_transactor(self, number: int) -> ShardsTransactor:
        chance = self._chance
        return ShardsTransactor(
            self._ledger,
            chance,
            self.story,
            name=f"t{number}",
            id_=IDS[(self.seed + number) % len(IDS)],
            owner=OWNERS[(self.seed // 3 + number) % len(OWNERS)],
            dialect=chance.below(len(DIALECTS)),
            timeout_ms=chance.one_of(TIMEOUTS_MS),
            home=self._home,
            places=self._places,
            count=self._count,
        )

    def _make_peer(self, number: int) -> Peer:
        """Create a client that connects to the right process, or one that sends any request to any process."""
        chance = self._chance
        speak: Callable[[], Speech] = partial(KafkaSpeech, Identity())
        if number:
            speak = chance.one_of((PolywireSpeech, FluxSpeech))
        made = Peer(number, speak, self._ledger, self._group, chance, self.story)
        made.may_be_refused = True  # some process may be away at any time
        if not number:
            topic = chance.one_of(tuple(TOPICS))
            made.places = [place for place in PLACES if place[0] == topic]
        return made

    def _home(self, name: str) -> int:
        return shard_by_hash(name, self._count)

    def _small(self) -> AbstractContextManager[None]:
        return self._surroundings()

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        with small_compaction(), tokens_by(self._chance):
            yield

    def _description(self) -> str:
        places = " ".join(f"{name}@{shard}" for name, shard in self._places.items())
        return f"seed={self.seed} durability={self._durability.name} shards={self._count} {places}"

    # Faults

    def _start(self) -> None:
        for node in self._nodes:
            node.start()

    def _restart(self) -> None:
        self._bury()

    def _step(self) -> None:
        chance = self._chance
        for node in self._nodes:
            if node.is_up:
                node.step(has_mood=chance.happens(1 / MOOD_STEPS))
            elif chance.happens(BACK):
                node.restart()
        if chance.happens(1 / MOOD_STEPS):
            self._change_mood()
        for _ in range(TURNS):
            if chance.happens(ACTING):
                self._act()
            elif not self._make_turn() or chance.happens(0.03):
                self._pass_time()
            self._bury()

    def _make_turn(self) -> bool:
        self._may_sleep = True  # but not while another process waits for a start
        try:
            return self._together.step()
        finally:
            self._may_sleep = False

    def _bury(self) -> None:
        """Note the end of killed processes."""
        for node in self._nodes:
            if node.is_up and node.process.files.faults.dead:
                node.bury()

    def _pass_time(self) -> None:
        before, self.story.actor = self.story.actor, "time"
        if self._chance.happens(0.7):
            self._together.pass_time(self._chance.below(100_000) / 1_000_000)
        elif self._together.is_idle:
            self._together.pass_to_timer()
        self.story.actor = before
        for node in self._nodes:
            if node.wakes_at and node.wakes_at <= self._clock.monotonic():
                self._wake(node)

    def _wake(self, node: ShardNode) -> None:
        node.wakes_at = 0.0
        if node.is_up and "kill" not in self._without and self._chance.happens(DIES):
            self.story.tell("killed", f"s{node.number} asleep")
            node.bury()
        elif node.is_up:
            self._together.asleep.discard(node.process.loop)

    def _sleep(self, node: ShardNode) -> None:
        if "sleep" not in self._without and not node.wakes_at:
            node.wakes_at = self._clock.monotonic() + self._chance.one_of(SLEEPS_S)
            self._together.asleep.add(node.process.loop)
            self.story.tell("sleep", f"s{node.number} until {node.wakes_at}")

    def _change_mood(self) -> None:
        """Make some processes slow, asleep, or unreachable for each other."""
        chance, now_s = self._chance, self._clock.monotonic()
        self._together.change_mood()
        self._weights = [weight * chance.share() ** 2 for weight in ACTS.values()]
        self._levels = chance.one_of(LEVELS)
        self.story.actor = "world"
        node = chance.one_of(self._nodes)
        if node.is_up and chance.happens(self.TROUBLES["sleep"]):
            self._sleep(node)
        self._haste = chance.one_of(HASTES)
        if chance.happens(self.TROUBLES["apart"]) and "apart" not in self._without:
            other = chance.one_of([one for one in self._nodes if one is not node])
            self._part(node, other, now_s + chance.one_of(CUTS_S))

    def _part(self, one: ShardNode, other: ShardNode, until_s: float) -> None:
        """Cut the network between two processes for a while; messages on their way are lost."""
        self.story.tell("apart", f"s{one.number} s{other.number} until {until_s}")
        self._apart[frozenset((one.number, other.number))] = until_s
        for node, shard in ((one, other.number), (other, one.number)):
            if node.is_up:
                node.process.ends.lose(shard)

    # Between processes

    def is_cut(self, one: int, other: int) -> bool:
        """Return whether these two cannot reach each other."""
        return self._apart.get(frozenset((one, other)), 0.0) > self._clock.monotonic()

    def crossed(self, shard: int) -> None:
        """Note that a process has sent a message to another."""
        if self._may_sleep and self._haste and self._chance.happens(self._haste) and self._nodes[shard].is_up:
            self._sleep(self._nodes[shard])

    def node(self, shard: int) -> ShardNode:
        """Return the node of a shard."""
        return self._nodes[shard]

    # Actions of clients

    def _act(self) -> None:
        before, self.story.actor = self.story.actor, "peer"
        act = self._chance.weighted(list(ACTS), self._weights)
        if act in self._without:
            pass
        elif act in ("transact", "leave"):
            self._transact(self._chance.one_of(self._transactors), is_cut=act == "leave")
        else:
            self._do(act, self._chance.one_of(self._peers))
        self.story.actor = before

    def _do(self, act: str, peer: Peer) -> None:
        if act != "connect":
            peer.do(act, self._levels)
            return
        shard = self._chance.below(self._count)
        if peer.places is not PLACES:
            shard = self._places[peer.places[0][0]]
        if peer.link is None and self._nodes[shard].takes:
            link = self._nodes[shard].process.accept(peer, peer.wire)
            self.story.tell("connect", f"{peer.name} c{link.number} {peer.wire} at s{shard}")
            peer.connected(link)

    def _transact(self, peer: ShardsTransactor, *, is_cut: bool = False) -> None:
        wanted = peer.wants
        if is_cut:
            self._cut(peer)
        elif wanted is None:
            peer.go_on()
        elif self._nodes[wanted].takes:
            mouth = peer.mouths[wanted]
            peer.connected_to(wanted, self._nodes[wanted].process.accept(mouth, self._chance.one_of((None, "kafka"))))
        elif self._chance.happens(0.1):
            peer.forget()

    def _cut(self, peer: ShardsTransactor) -> None:
        for mouth in peer.mouths:
            if mouth.link is not None and self._chance.happens(0.7):
                mouth.link.cut()
                mouth.disconnected()

    # Checks

    def _has(self, node: ShardNode) -> list[Place]:
        return [place for place in PLACES if self._places[place[0]] == node.number]

    def closed(self, node: ShardNode) -> None:
        """See ``Judge``."""
        self._ledger.stopped(self._has(node))

    def check_start(self, node: ShardNode, *, powerless: bool) -> None:
        """See ``Judge``."""
        broker = node.broker
        for name, shard in self._places.items():
            if shard == node.number and broker.find_topic(name) is None:
                require(not node.is_made, "an acknowledged topic is there", topic=name)
                broker.create_topic(TopicName.parse(name), TOPICS[name])
        ends = {place: self._partition(node, place).log.readable_offset for place in self._has(node)}
        reported: list[int | BrokerError] = []
        broker.settle(Level.SYNCED, reported.append)
        node.process.until(lambda: reported)  # participants may end meanwhile
        node.is_made = node.is_made or not isinstance(reported[0], BrokerError)
        for place, end in ends.items():
            self._ledger.settle(place, self._content(node, place, end), powerless=powerless)
        for owner, place in self._ledger.spots:
            if self._places[place[0]] == node.number and owner not in OWNERS:
                self._ledger.settle_position(owner, place, broker.position(*place, *owner), powerless=powerless)

    @staticmethod
    def _partition(node: ShardNode, place: Place) -> Partition:
        return node.broker.topic(place[0]).partitions[place[1]]

    def _content(self, node: ShardNode, place: Place, end: int) -> list[bytes]:
        """Return the content of a partition below this offset."""
        partition = self._partition(node, place)
        found: list[bytes] = []
        while len(found) < end:
            read = node.process.read(partition.incarnation, len(found))
            if isinstance(read, BrokerError):
                require(False, "every record can be read", place=place, offset=len(found), error=str(read))
            assert isinstance(read, Read), "a response is a read or an error"
            for record in records_of(read.chunks):
                if len(found) <= record.offset < end:
                    require(record.offset == len(found), "every offset has its record", place=place, offset=len(found))
                    found.append(record.value or b"")
            read.pin.release()
        return found

    def _settle(self) -> None:
        """Check that all acknowledged data is there, in all shards."""
        self._ledger.calms()
        for node in self._nodes:
            for place in self._has(node):
                end = self._partition(node, place).log.readable_offset
                self._ledger.settle(place, self._content(node, place, end), powerless=False)
        source = self._nodes[self._places[SOURCE[0]]].broker
        positions = {owner: source.position(*SOURCE, *owner) for owner in OWNERS}
        self._ledger.calmed(positions)
        for owner, place in self._ledger.spots:
            found = self._nodes[self._places[place[0]]].broker.position(*place, *owner)
            self._ledger.settle_position(owner, place, found, powerless=False)

    # The end

    def _end(self) -> None:
        self._apart.clear()
        self._together.asleep.clear()
        self._haste = 0.0
        for node in self._nodes:
            node.wakes_at = 0.0
            if node.is_up:
                node.calm()
        for node in self._nodes:
            if not node.is_up or node.has_failed:
                node.restart()
        drive(self._together, self._clock, lambda: self._together.is_idle)
        for node in self._nodes:
            if node.has_failed:  # failures are reported by now
                node.restart()
        for node in self._nodes:
            node.calm()  # a start may have left a disk with little space
        self._go_on()
        self._rest()
        self._settle()
        for node in self._nodes:
            node.close_for_good()
        self._rest()
        self._settle()
        for node in self._nodes:
            node.process.close()
        self.story.tell("end", f"records={sum(len(shelf.known) for shelf in self._ledger.shelves.values())}")

    def _go_on(self) -> None:
        """Check that clients that continue commit in the end."""
        before, begun = self._ledger.commits.copy(), self._clock.monotonic()

        def has_committed(peer: ShardsTransactor) -> bool:
            return self._ledger.commits[peer.owner] > before[peer.owner]

        def reached() -> bool:
            left = [peer for peer in self._transactors if not has_committed(peer)]
            for peer in left:
                self._transact(peer)
            return not left or self._clock.monotonic() - begun > COMMITTED_S

        drive(self._together, self._clock, reached)
        require(all(map(has_committed, self._transactors)), "clients that continue commit in the end")

    def _rest(self) -> None:
        """Answer every client, and wait without further requests until open transactions have ended everywhere."""
        begun = self._clock.monotonic()
        drive(self._together, self._clock, lambda: not any(self._is_busy(peer) for peer in self._peers))
        took = self._clock.monotonic() - begun
        require(took < ASKED_S, "everybody is answered in time", took=took)
        for one in self._peers:
            if one.link is not None:
                one.link.cut()
                one.disconnected()
        for peer in self._transactors:
            peer.forget()
            for mouth in peer.mouths:
                if mouth.link is not None:
                    mouth.link.cut()
                    mouth.disconnected()
        begun = self._clock.monotonic()
        drive(self._together, self._clock, lambda: not self._unsettled() or self._clock.monotonic() - begun > SETTLED_S)
        require(not self._unsettled(), "every transaction ends, and every shard follows", open=self._unsettled())

    @staticmethod
    def _is_busy(peer: Peer) -> bool:
        peer.reads = True
        peer.push()
        return peer.is_sending or peer.is_owed

    def _unsettled(self) -> list[str]:
        """Return the open transactions, and decided ones that some shard has not followed."""
        found = []
        for node in self._nodes:
            broker = node.broker
            known = broker.transactions.visible(by=ITSELF, participants=True)
            found += [f"s{node.number} {one.id!r}" for one in known if one.is_open]
            found += [f"s{node.number} decides {id_}" for id_ in IDS if broker.participants.is_deciding(id_)]
        return found


class Between:
    """Implements ``Reach`` for the process of one shard."""

    def __init__(self, world: ShardsWorld, own: int) -> None:
        self._world: Final = world
        self._own: Final = own

    def is_cut(self, shard: int) -> bool:
        return self._world.is_cut(self._own, shard)

    def is_there(self, shard: int) -> bool:
        return self._world.node(shard).takes and not self.is_cut(shard)

    def crossed(self, shard: int) -> None:
        self._world.crossed(shard)

    def accept(self, shard: int, caller: Caller) -> Link:
        return self._world.node(shard).process.accept_link(caller)
