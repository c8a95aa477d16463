"""The world of protocols: clients that talk to a broker's processes over a network, with checks after every start."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Final

from polywire.broker.topics import Partition
from polywire.errors import BrokerError, Busy, ErrorCode
from polywire.log.base import Read
from polywire.protocols.polywire import session
from polywire.server.memory import CHUNK_BYTES
from polywire.types import Level, TopicName
from tests.sim.broker.part import LEVELS
from tests.sim.broker.world import BROKER
from tests.sim.chance import Chance
from tests.sim.log.client import records_of
from tests.sim.log.world import SETTINGS, small_compaction
from tests.sim.lone_world import LoneWorld
from tests.sim.node import TROUBLES
from tests.sim.promises import require
from tests.sim.story import Story
from tests.sim.tokens import tokens_by
from tests.sim.wires.classic_ledger import STATIC, ClassicLedger
from tests.sim.wires.classic_member import DYNAMIC, ClassicMember, Timeouts
from tests.sim.wires.cursus_speech import CursusApiSpeech, CursusSpeech, Producer
from tests.sim.wires.cursus_transactor import CursusTransactor
from tests.sim.wires.flux_speech import FluxSpeech
from tests.sim.wires.group_ledger import GROUP, TOPIC, GroupLedger
from tests.sim.wires.guests import Guest, LoginSpeech, Rights, cheap_logins
from tests.sim.wires.iggy_speech import IggySpeech
from tests.sim.wires.kafka07_speech import Kafka07Speech
from tests.sim.wires.kafka_member import KafkaMemberSpeech
from tests.sim.wires.kafka_speech import Identity, KafkaSpeech
from tests.sim.wires.ledger import COPIERS, PLACES, TOPICS, Ledger, Place
from tests.sim.wires.login_speech import SPEAKERS
from tests.sim.wires.lone_peer import LonePeer
from tests.sim.wires.peer import PATIENCE, VALUE_SIZES, Peer
from tests.sim.wires.polywire_speech import PolywireSpeech
from tests.sim.wires.process import CONNECTIONS_MAX, WiresProcess
from tests.sim.wires.proofs import PROVING
from tests.sim.wires.publisher import Publisher
from tests.sim.wires.share_ledger import GROUP as SHARE_GROUP
from tests.sim.wires.share_ledger import SETTINGS as SHARE_SETTINGS
from tests.sim.wires.share_ledger import ShareLedger
from tests.sim.wires.share_member import ShareMember
from tests.sim.wires.speech import Speech
from tests.sim.wires.transactor import SOURCE, Transactor

UNSYNCED_BYTES: Final = (4 * 1024, 24 * 1024, SETTINGS.unsynced_bytes_max)
"""Limits above which the log is congested; the last one is never reached."""
SMALL_SLOT_BYTES: Final = 36 * 1024  # a batch of the longest values fits
PEERS: Final = 5  # one more than there are slots
GUESTS: Final[Mapping[str, Sequence[tuple[type[Rights], Callable[[Any], LoginSpeech]]]]] = {
    "guests": [(Rights, speaker) for speaker in SPEAKERS],
    "proofs": PROVING,
}
"""Additional clients that log in, for some seeds."""
HOSTS: Final[Mapping[str, int]] = {"guests": 3, "proofs": 1}
"""Other clients beside them."""
MEMBERS: Final = (f"{DYNAMIC}0", f"{STATIC}1", f"{STATIC}2")  # of a classic group, for some seeds
BESIDE_MEMBERS: Final = 2  # other clients
TIMEOUTS_S: Final = (1.0, 6.0, 30.0)  # of members of classic groups
STAYS_S: Final = 10.0  # in which members only send heartbeats at the end: longer than most timeouts
REBALANCES_S: Final = 600.0  # a classic group settles within that: it waits for members that never return
RULES: Final[Mapping[str, float]] = {"guests": 0.06, "proofs": 0.12}
"""The weight of changes of permissions then."""
REQUESTS_MAX: Final = 8  # outstanding requests of one connection before it is not read any more
REST_SECONDS: Final = 10.0  # every request is answered, and every connection closed, within that
ACTS: Final = {
    "connect": 4.0,
    "produce": 10.0,
    "fetch": 5.0,
    "commit": 3.0,
    "position": 2.0,
    "ping": 1.0,
    "join": 4.0,
    "stay": 3.0,
    "leave": 0.3,
    "move": 9.0,
    "look": 1.5,
    "transact": 14.0,
    "flood": 0.3,
    "push": 6.0,
    "cut": 0.3,
    "finish": 0.3,
    "deafen": 0.5,
    "listen": 2.0,
}
"""The acts of clients and their weights."""
FOCUSES: Final[Mapping[str, Mapping[str, float]]] = {
    "anything": {},
    "members": {"join": 0.7, "move": 4.0, "produce": 0.3, "fetch": 0.3, "commit": 0.3, "transact": 0.1},
    "readers": {"produce": 2.0, "fetch": 4.0, "flood": 5.0, "deafen": 3.0, "transact": 0.3},
    "writers": {"connect": 2.0, "produce": 5.0, "fetch": 2.0, "flood": 3.0, "commit": 0.3, "transact": 0.3},
    "endings": {"connect": 3.0, "finish": 12.0, "cut": 8.0, "fetch": 2.0, "flood": 8.0, "transact": 0.3},
    "losses": {
        "connect": 2.0,
        "produce": 2.0,
        "fetch": 6.0,
        "flood": 10.0,
        "deafen": 8.0,
        "listen": 0.3,
        "transact": 0.2,
    },
    "copies": {"transact": 14.0, "produce": 0.5, "join": 0.3, "move": 0.3, "commit": 0.3},
    "publishes": {"transact": 14.0, "produce": 0.5, "join": 0.3, "move": 0.3, "commit": 0.3},
    "guests": {"produce": 2.0, "fetch": 2.0, "commit": 0.3, "join": 0.3, "move": 0.3, "transact": 0.3},
    "proofs": {
        "connect": 6.0,
        "cut": 6.0,
        "produce": 2.0,
        "fetch": 2.0,
        "commit": 0.3,
        "join": 0.3,
        "move": 0.3,
        "transact": 0.3,
    },
    "cursus copies": {"transact": 14.0, "produce": 0.5, "join": 0.3, "move": 0.3, "commit": 0.3},
    "consumers": {"join": 0.5, "stay": 5.0, "move": 3.0, "produce": 0.3, "fetch": 0.3, "commit": 0.3, "transact": 0.1},
    "share members": {"transact": 4.0, "connect": 2.0, "flood": 0.3, "join": 0.3, "move": 0.3, "commit": 0.3},
    "classic groups": {"transact": 14.0, "produce": 0.5, "fetch": 0.3, "flood": 0.3, "commit": 0.3},
    "own records": {"connect": 2.0, "produce": 3.0, "fetch": 5.0, "commit": 0.3, "transact": 0.2, "join": 0.3},
    "levels": {"connect": 2.0, "produce": 6.0, "commit": 0.0, "transact": 0.0, "flood": 0.5},
}
"""The focus of runs, with factors of weights: makes rare acts frequent in some runs."""
SLOW_SYNCS: Final = ("writers", "levels", "own records")
"""Runs in which the disk is hardly ever synced unless a caller waits for it."""
FOCUSES_CHOSEN: Final = tuple(FOCUSES)[:5]
"""Those that are drawn at random."""
LONE_PEERS: Final[Mapping[str, Callable[[Ledger, Chance, Story], LonePeer]]] = {
    "cursus copies": CursusTransactor,
    "publishes": Publisher,
}
"""Clients with one request at a time in some of them; the others have a Kafka transactor."""
SHARING: Final = 2  # remainder of the seeds with members of a share group,
SHARING_SINCE: Final = 10_700_000  # from this seed on
SHARERS: Final = ("s0", "s1", "s2")
FOCUSES_OF: Final = {
    1: "levels",
    3: "copies",
    4: "losses",
    5: "own records",
    6: "guests",
    7: "consumers",
    8: "consumers",
    9: "levels",
    10: "classic groups",
    11: "cursus copies",
    12: "classic groups",
    13: "publishes",
    14: "proofs",
}
"""Those of some seeds by their remainder."""


def _speaking(chance: Chance, number: int, focus: str) -> Callable[[], Speech]:
    """Return how the client of this number talks over all of its connections."""
    cursus, kafka = partial(CursusSpeech, Producer(f"p{number}")), partial(KafkaSpeech, Identity())
    speakers: Sequence[Callable[[], Speech]] = (
        PolywireSpeech,
        kafka,
        FluxSpeech,
        cursus,
        CursusApiSpeech,
        IggySpeech,
        Kafka07Speech,
    )
    if focus == "members":
        speakers = (PolywireSpeech, FluxSpeech, cursus)
    elif focus in (
        "levels",
        "classic groups",
    ):  # protocols with requests that wait for the disk and without assignments
        speakers = (kafka, kafka, Kafka07Speech)
    elif focus == "consumers":
        member = partial(KafkaMemberSpeech, Identity())
        speakers = (member, member, member, FluxSpeech, PolywireSpeech)
    elif focus == "own records":  # its reads include everything stored before over the same connection
        speakers = (FluxSpeech,)
    elif focus == "writers":  # answers have the level and order in which records were stored
        speakers = (kafka, Kafka07Speech, cursus, FluxSpeech)
    return chance.one_of(speakers)


class WiresWorld(LoneWorld):
    """Guards: the ledger has every client since the beginning; no client is connected to a process that is gone."""

    NAME = "wires"
    ACTS = tuple(ACTS)
    TROUBLES: ClassVar[Mapping[str, float]] = {**TROUBLES, "fault": 0.2}

    _process: WiresProcess
    _weights: list[float]

    def _small(self) -> AbstractContextManager[None]:
        return self._surroundings()

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        before, session.REQUESTS_MAX = session.REQUESTS_MAX, REQUESTS_MAX  # type: ignore[misc]
        try:
            with small_compaction(), tokens_by(self._chance), cheap_logins(lambda: self._process.loop):
                yield
        finally:
            session.REQUESTS_MAX = before  # type: ignore[misc]

    def _choose_settings(self) -> None:
        chance = self._chance
        self._focus = chance.one_of(FOCUSES_CHOSEN)
        self._focus = FOCUSES_OF.get(self.rest, self._focus)
        if self.rest == SHARING and self.seed >= SHARING_SINCE:
            self._focus = "share members"
        durability = chance.one_of((Level.WRITTEN, Level.WRITTEN, Level.SYNCED))
        if self._focus == "own records":
            durability = Level.SYNCED
        least = 2 + chance.below(2)
        self._log_settings = replace(
            SETTINGS,
            slot_count_min=least,
            slot_count_max=least + chance.below(3),
            sync_interval_ms=chance.one_of((60_000,) if self._focus in SLOW_SYNCS else (1, 20, 100, 60_000)),
            unsynced_bytes_max=chance.one_of(UNSYNCED_BYTES),
            slot_bytes=chance.one_of((SMALL_SLOT_BYTES, SETTINGS.slot_bytes)),
            durability=durability,
        )
        patience_s = chance.one_of(
            (BROKER.member_timeout_s, 30.0)
        )  # short: many members expire; long: many are members at once
        own = replace(
            BROKER,
            durability=durability,
            staged_bytes_max=SETTINGS.staged_bytes_max,
            member_timeout_s=patience_s,
            session_timeout_min_s=min(TIMEOUTS_S),
        )
        self._group = GroupLedger(durability, self._clock.monotonic, patience_s)
        self._group.has_holders = self._focus == "consumers"
        self._broker_settings = own.within(self._log_settings.batch_bytes_max)
        self._durability = durability
        self._ledger = Ledger(durability)
        self._peers = [
            Peer(number, _speaking(chance, number, self._focus), self._ledger, self._group, chance, self.story)
            for number in range(PEERS)
        ]
        self._guests = [self._make_guest(number) for number in range(len(GUESTS.get(self._focus, ())))]
        self._peers = [*self._peers[: HOSTS.get(self._focus, PEERS)], *self._guests]
        self._lone_peers = self._make_lone_peers()
        self._has_driver = chance.happens(0.5) or self._focus == "losses"
        self._error: BrokerError | None = None
        self._levels: Sequence[Level] = LEVELS[0]

    def _make_lone_peers(self) -> Sequence[LonePeer]:
        """Return the clients with one request at a time: members of a classic group, or one other."""
        chance, is_classic = self._chance, self._focus == "classic groups"
        timeouts = Timeouts(*[chance.one_of(TIMEOUTS_S) if is_classic else TIMEOUTS_S[0] for _ in range(2)])
        self._classic = ClassicLedger(self._group, self._clock.monotonic, timeouts.session_s)
        self._shares = ShareLedger(self._durability, self._clock.monotonic)
        self._members: Sequence[ClassicMember] = ()
        if self._focus == "share members":
            self._peers = self._peers[:BESIDE_MEMBERS]
            now = self._clock.monotonic
            return [ShareMember(name, self._shares, now, chance, self.story) for name in SHARERS]
        if is_classic:
            self._members = [ClassicMember(name, timeouts, self._classic, chance, self.story) for name in MEMBERS]
            self._peers = self._peers[:BESIDE_MEMBERS]
            return self._members
        found = LONE_PEERS.get(self._focus, Transactor)(self._ledger, chance, self.story)
        found.moves = self._focus == "copies"
        return [found]

    def _make_guest(self, number: int) -> Guest:
        kind, speaker = GUESTS[self._focus][number]
        rights = kind(f"g{number}", self._chance, self.story)
        speak = partial(speaker, rights)
        guest = Guest(PEERS + number, speak, self._ledger, self._group, self._chance, self.story)
        guest.bind(rights)
        return guest

    def _description(self) -> str:
        return f"seed={self.seed} durability={self._durability.name} driver={self._has_driver} focus={self._focus}"

    def _make_process(self) -> WiresProcess:
        process = WiresProcess(
            self._disk, self._log_settings, self._broker_settings, self._clock, self._chance, self.story
        )
        process.has_driver = self._has_driver
        process.connections_max = max(CONNECTIONS_MAX, len(self._lone_peers) + BESIDE_MEMBERS)
        process.on_refused_change = self._classic.is_behind
        return process

    def _meet(self) -> None:
        self._error = None
        self._process.log.on_failure(self._failed)
        self._weights = self._focused()
        self._classic.meets()
        self._shares.restarts()
        for peer in self._everybody:
            peer.may_be_refused = False
            peer.disconnected()

    @property
    def _everybody(self) -> Sequence[Peer | LonePeer]:
        return [*self._lone_peers, *self._peers]

    def _failed(self, error: BrokerError) -> None:
        self._error = error
        self.story.tell("log failed", error.message)
        self._classic.may_lack()
        self._shares.restarts()
        for peer in self._everybody:
            peer.may_be_refused = True

    @property
    def _failure(self) -> BrokerError | None:
        return self._error

    def _change_minds(self) -> None:
        self._weights = [weight * self._chance.share() ** 2 for weight in self._focused()]
        self._levels = self._chance.one_of(LEVELS)
        sizes = self._chance.one_of(VALUE_SIZES)
        for peer in self._peers:
            peer.patience, peer.sizes = self._chance.one_of(PATIENCE), sizes

    def _focused(self) -> list[float]:
        """Return the weights of acts in this run."""
        factors = FOCUSES[self._focus]
        return [weight * factors.get(act, 1.0) for act, weight in ACTS.items()]

    def _expect_failed_reads(self) -> None:
        for peer in self._everybody:
            peer.may_be_refused = True

    # Acts of clients

    def _act(self) -> None:
        if self._guests and self._chance.happens(RULES[self._focus]):
            self._rule(self._chance.one_of(self._guests).rights)
            return
        before, self.story.actor = self.story.actor, "peer"
        peer = self._chance.one_of(self._peers)
        act = self._chance.weighted(list(ACTS), self._weights)
        if act not in self._without:
            self._do(act, peer)
        self.story.actor = before

    def _rule(self, rights: Rights) -> None:
        """Change the permissions of a client."""
        before, self.story.actor = self.story.actor, "ruler"
        try:
            rights.change(self._process.broker.access)
        except BrokerError as error:
            excused = isinstance(error, Busy) or self._failure is not None or error.code is ErrorCode.STORAGE_FAILED
            require(excused, "refused for no reason", error=str(error))
        self._process.broker.commit()
        self.story.actor = before

    def _do(self, act: str, peer: Peer) -> None:
        if act == "transact":
            self._transact()
        elif act == "connect":
            if peer.link is None:
                self._connect(peer)
        else:
            peer.do(act, self._levels)

    def _transact(self) -> None:
        peer = self._lone_peers[0]
        if len(self._lone_peers) > 1:
            peer = self._chance.one_of(self._lone_peers)
        if peer.link is None:
            self._connect_lone(peer)
        elif self._chance.happens(0.02):
            peer.link.cut()
            peer.disconnected()
        else:
            peer.go_on()

    def _connect_lone(self, peer: LonePeer) -> None:
        peer.connected(self._process.accept(peer, self._chance.one_of((None, peer.wire))))

    def _connect(self, peer: Peer) -> None:
        port = self._chance.one_of((None, peer.wire))
        link = self._process.accept(peer, port)
        self.story.tell("connect", f"{peer.name} c{link.number} {peer.wire} at {port or 'any'}")
        peer.connected(link)

    def _let_go(self) -> None:
        """Release everything that clients hold of the process except what they send."""

    def _closed(self) -> None:
        self._ledger.stopped()
        self._group.stopped()

    def _check_closed(self) -> None:
        """Do nothing: the next start checks the disk."""

    # Checks

    def _check_start(self) -> None:
        broker = self._process.broker
        for name, count in TOPICS.items():
            topic = broker.find_topic(name)
            if topic is None:
                require(self._epoch <= 1 or not self._had_topics, "an acknowledged topic is there", topic=name)
                topic = broker.create_topic(TopicName.parse(name), count)
        reported: list[int | BrokerError] = []
        broker.settle(Level.SYNCED, reported.append)
        self._process.until(lambda: reported)
        self._had_topics = not isinstance(reported[0], BrokerError)
        if self._focus == "share members":
            for name in TOPICS:
                with suppress(Busy):  # the disk is full
                    broker.shares.configure(SHARE_GROUP, broker.topic(name), SHARE_SETTINGS, done=_ignore)
        for place in PLACES:
            self._ledger.settle(place, self._content(place), powerless=self._powerless)
        self._ledger.settle_transactions({COPIERS: broker.position(*SOURCE, *COPIERS)})
        for peer in self._lone_peers:
            peer.started()
        for owner, place in self._ledger.spots:
            found = broker.position(*place, *owner)
            self._ledger.settle_position(owner, place, found, powerless=self._powerless)

        for partition in range(TOPICS[TOPIC]):
            found = broker.position(TOPIC, partition, *GROUP)
            self._group.settle(partition, found, powerless=self._powerless)
        self._classic.started(powerless=self._powerless)
        self._group.started(powerless=self._powerless)
        self._shares.started(powerless=self._powerless)
        for guest in self._guests:
            guest.rights.started(broker)

    _had_topics = False

    def _partition(self, place: Place) -> Partition:
        return self._process.broker.topic(place[0]).partitions[place[1]]

    def _content(self, place: Place) -> list[bytes]:
        """Return all records of a partition."""
        partition = self._partition(place)
        found: list[bytes] = []
        while len(found) < partition.log.readable_offset:
            read = self._process.read(partition.incarnation, len(found))
            if isinstance(read, BrokerError):
                require(False, "every record can be read", place=place, offset=len(found), error=str(read))
            assert isinstance(read, Read), "an answer is a read or an error"
            for record in records_of(read.chunks):
                if record.offset >= len(found):
                    require(record.offset == len(found), "every offset has its record", place=place, offset=len(found))
                    found.append(record.value or b"")
            read.pin.release()
        return found

    def _come_to_rest(self) -> None:
        """Let all clients read and get their answers, then disconnect; nothing of them must be left."""
        for peer in self._peers:
            peer.reads = True
        self._settle_members()
        for lone in self._lone_peers:
            if lone.link is not None:
                lone.link.cut()
                lone.disconnected()
        self._process.until(lambda: not any(self._is_sending(peer) for peer in self._peers))
        for peer in self._peers:
            if peer.link is not None and self._chance.happens(0.5):
                peer.link.finish()
        begun = self._clock.monotonic()
        self._process.until(lambda: not any(self._is_busy(peer) for peer in self._peers))
        took = self._clock.monotonic() - begun
        require(took < REST_SECONDS, "everybody is answered, and let go, in time", took=took)
        for peer in self._peers:
            if peer.link is not None:
                peer.link.cut()
                peer.disconnected()
        self._process.until(lambda: not self._process.network.open and self._process.loop.is_idle)
        require(not self._process.hub.connections, "a connection that is lost is gone")
        held = self._process.hub.memory.arena.out_bytes
        require(held <= CHUNK_BYTES, "memory comes back", held=held, shared=CHUNK_BYTES)
        for place in PLACES:
            self._ledger.settle(place, self._content(place), powerless=False)

    def _settle_members(self) -> None:
        """Check that idle members of a classic group reach one generation: none waits for ever while all are there."""
        if not self._members:
            return
        begun = self._clock.monotonic()
        for member in self._members:
            member.is_resting = True
        self._process.until(self._is_settled)
        took = self._clock.monotonic() - begun
        require(took < REBALANCES_S, "a rebalance ends", took=took)
        until_s = self._clock.monotonic() + min(STAYS_S, 1.5 * self._classic.patience_s)
        self._process.until(lambda: self._is_settled() and self._clock.monotonic() > until_s)
        for member in self._members:
            member.is_resting = False

    def _is_settled(self) -> bool:
        for member in self._members:
            if member.is_away:
                self._connect_lone(member)
            member.go_on()
        generations = {member.generation for member in self._members}
        return len(generations) <= 1 and None not in generations

    @staticmethod
    def _is_sending(peer: Peer) -> bool:
        peer.push()
        return peer.is_sending

    @staticmethod
    def _is_busy(peer: Peer) -> bool:
        return peer.is_owed or (peer.link is not None and peer.link.finished)

    def _check_end(self) -> None:
        self._process.close()
        self.story.tell("end", f"records={sum(len(shelf.known) for shelf in self._ledger.shelves.values())}")


def _ignore(_: object) -> None:
    pass
