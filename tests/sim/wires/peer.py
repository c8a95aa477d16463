"""A client that makes any requests over one connection after the other, and may or may not read the responses.

Every response is checked: it belongs to an outstanding request, in order if its protocol has an order, and is correct.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from polywire.errors import PeerError
from polywire.types import Level
from tests.sim.chance import Chance
from tests.sim.promises import require
from tests.sim.story import Story
from tests.sim.wires.group_ledger import GroupLedger
from tests.sim.wires.ledger import PLACES, Ledger, Owner, Place, Sending
from tests.sim.wires.member import Member
from tests.sim.wires.network import Link
from tests.sim.wires.speech import ACTS, GAP, GROUP_ACTS, Answer, Speech, Words

WAITS_MS: Final = (0, 0, 20, 500)
VALUE_SIZES: Final = ((1, 40, 900, 4200), (4200,))
"""Sizes of values by mood: long ones only would fill the log faster than it is sealed."""
FLOOD: Final = 24  # requests: some 200 KB of records or responses
PATIENCE: Final = (3, 40, 200)  # outstanding requests, by mood


@dataclass(slots=True)
class Asked:
    """An outstanding request. judge: called with every part of the answer; refused: called instead if there is none."""

    what: str
    judge: Callable[[Answer], None]
    refused: Callable[[], None]


class Peer:
    """Guards: ``link`` is its current connection; ``asked`` are the outstanding requests on it."""

    def __init__(
        self,
        number: int,
        speak: Callable[[], Speech],
        ledger: Ledger,
        group: GroupLedger,
        chance: Chance,
        story: Story,
    ) -> None:
        self.name: Final = f"p{number}"
        self.reads = True
        self.link: Link | None = None
        self.asked: dict[int, Asked] = {}
        self._speak = speak
        self._ledger = ledger
        self._chance = chance
        self._story = story
        self._speech = speak()
        self._owner: Final[Owner] = self._speech.words.positions, str(1 + number)
        self._member = Member(self.name, group, chance, self._ask)
        self._unsent = bytearray()
        self._numbered: list[Sending] = []
        """Sendings to repeat until they are answered."""
        self._own_ends: dict[Place, int] = {}
        """The end of the last record stored over this connection."""
        self._lives = 0
        self._count = 0
        self.patience = PATIENCE[0]
        self.sizes: Sequence[int] = VALUE_SIZES[0]
        self.may_be_refused = False
        """Whether storage has failed."""
        self.places: Sequence[Place] = PLACES
        """The partitions that it uses."""

    @property
    def wire(self) -> str:
        """Its protocol."""
        return self._speech.words.wire

    def connected(self, link: Link) -> None:
        """Note a connection."""
        self.link, self._speech, self.reads = link, self._speak(), True
        self._lives += 1
        self._own_ends = {}
        self._unsent = bytearray(self._speech.greeting())
        for sending in self._numbered:
            sending.tries += 1
            self._send(sending)
        self.push()

    def push(self) -> None:
        """Send what fits."""
        link = self.link
        if link is not None and self._unsent and link.free > 0:
            count = min(link.free, len(self._unsent))
            link.send(bytes(self._unsent[:count]))
            del self._unsent[:count]

    @property
    def is_sending(self) -> bool:
        """Whether bytes wait to be sent."""
        return bool(self._unsent)

    @property
    def is_owed(self) -> bool:
        """Whether an answer is outstanding."""
        return self.link is not None and bool(self.asked)

    def disconnected(self) -> None:
        """Note the loss of the connection and of all outstanding answers."""
        self.link = None
        self.asked.clear()
        self._unsent.clear()

    def hung_up(self, *, is_aborted: bool) -> None:
        is_done = self.link is not None and self.link.finished and not self.asked
        is_refused = self._speech.words.hangs_up and any(
            asked.what.startswith("produce") for asked in self.asked.values()
        )
        fine = is_aborted or self.may_be_refused or is_done or is_refused
        require(
            fine, "no connection with a pending response is closed", peer=self.name, asked=list(self.asked.values())[:2]
        )
        self.disconnected()

    # Requests

    def do(self, act: str, levels: Sequence[Level]) -> None:
        """Make a request if it may. levels: of produced records."""
        if act == "push":
            self.push()
        elif act in ("deafen", "listen"):
            self.reads = act == "listen"
        elif self.link is None or not self.may_ask(act):
            return
        elif act == "cut":
            self._story.tell("cut", f"{self.name} c{self.link.number} unread={len(self.link.down)}")
            self.link.cut()
            self.disconnected()
        elif act == "finish":
            if not self.is_sending:
                self._story.tell("finish", f"{self.name} c{self.link.number}")
                self.link.finish()
        elif act in GROUP_ACTS:
            self._member.do(act, self._speech)
        elif act in ("produce", "flood"):
            ask = self.produce if act == "produce" else self.flood
            ask(self._chance.one_of(levels))
        else:
            asks = {"fetch": self.fetch, "commit": self.commit, "position": self.position, "ping": self.ping}
            asks[act]()

    def _ask(
        self, what: str, request: Callable[[int], bytes], judge: Callable[[Answer], None], refused: Callable[[], None]
    ) -> None:
        self._count += 1
        self._story.tell("ask", f"{self.name} {self._count} {what}")
        self.asked[self._count] = Asked(what, judge, refused)
        self._unsent += request(self._count)
        self.push()

    def _place(self) -> Place:
        return self._chance.one_of(self.places)

    def _end(self, place: Place) -> int:
        """Return the end of the known records."""
        return max(self._ledger.shelves[place].known, default=-1) + 1

    def produce(self, level: Level) -> None:
        words = self._speech.words
        places = [place for place in words.places if place in self.places]
        place, count = self._chance.one_of(places), 1 + self._chance.below(words.records_max)
        values = [
            b"%s.%d.%d:" % (self.name.encode(), self._count, index) + self._filling(words) for index in range(count)
        ]
        sequence = self._speech.sequence(place, count)
        line = f"{self.name}.{self._lives}" if sequence is None else f"{self.name} {sequence[0]}"
        sending = Sending(place, values, line, self._count, self._speech.level(level), sequence)
        self._ledger.sent(sending)
        if sequence is not None:
            self._numbered.append(sending)
        self._send(sending)

    def _filling(self, words: Words) -> bytes:
        """Return bytes after the unique prefix of a value, as the protocol permits."""
        size, chance = self._chance.one_of(self.sizes), self._chance
        if words.is_text or chance.happens(0.7):
            return b"." * size
        return (chance.token(8) * (size // 8 + 1))[:size]

    def _send(self, sending: Sending) -> None:
        place, level, sequence = sending.place, sending.level, sending.sequence
        again = "" if sequence is None else f" sequence={sequence[1]} tries={sending.tries}"
        self._ask(
            f"produce {place[0]}/{place[1]} {len(sending.values)} {level.name}{again}",
            lambda number: self._speech.produce(number, place, sending.values, level, sequence),
            partial(self._stored, sending, self._ledger.starts(place)),
            partial(self._refused, sending),
        )

    def _stored(self, sending: Sending, starts: int, answer: Answer) -> None:
        if starts != self._ledger.starts(sending.place) and sending.level is not Level.SYNCED:
            return  # it was stored; the fact came later
        words = self._speech.words
        is_reported = answer.offset is not None or sending.tries > 1 or not words.tells_offsets
        require(is_reported, "what is sent once is no repeat", place=sending.place)
        self._ledger.stored(sending, answer.offset if sending.tries == 1 or words.tells_repeats else None)
        self._own_ends[sending.place] = 0 if answer.offset is None else answer.offset + len(sending.values)
        self._numbered = [other for other in self._numbered if other is not sending]

    def _refused(self, sending: Sending) -> None:
        sending.is_refused = sending.tries == 1  # otherwise it may have been stored before
        if sending.sequence is not None:
            self._become_another()

    def _become_another(self) -> None:
        """Become another producer: earlier values are not repeated."""
        self._numbered.clear()
        self._speech.give_up()

    def fetch(self) -> None:
        place = self._place()
        self._fetch(place, self._chance.below(self._end(place) + 1))

    def _fetch_all(self) -> None:
        self._fetch(self._place(), 0)

    def _fetch(self, place: Place, first: int) -> None:
        wait_ms = self._chance.one_of(WAITS_MS)
        at, readable, starts = [first], self._ledger.readable(place), self._ledger.starts(place)

        def judge(answer: Answer) -> None:
            if starts != self._ledger.starts(place):
                return
            next_offset = at[0] if answer.offset is None else answer.offset
            before = answer.records[0][0] if answer.records else at[0]
            require(before <= at[0], "records come from the offset on", place=place, offset=at[0], found=before)
            self._ledger.shown(place, before, answer.records, next_offset, self._speech.spelled)
            at[0] = max(at[0], next_offset)
            if self.may_be_refused:  # failing reads end an answer early
                return
            shown = answer.records or not answer.is_last or at[0] >= readable
            require(shown, "readers are shown what is there", place=place, offset=first, readable=readable)
            end = self._own_ends.get(place, 0) if self._speech.words.reads_all else 0
            require(at[0] >= end, "who reads is shown what this connection has stored", place=place, end=end)

        self._ask(
            f"fetch {place[0]}/{place[1]} from {first} wait={wait_ms}",
            lambda number: self._speech.fetch(number, place, first, wait_ms),
            judge,
            _nothing,
        )

    def commit(self) -> None:
        place, offset, words = self._place(), 1 + self._chance.below(9_999), self._speech.words
        if not words.goes_back:
            offset = self._ledger.furthest(self._owner, place) + 1 + self._chance.below(50)
        if words.positions_within:
            end = self._end(place)
            if end < 2:
                return
            offset = 2 + self._chance.below(end - 1)
        at = self._ledger.asks(self._owner, place, offset)
        self._ask(
            f"commit {place[0]}/{place[1]} {offset}",
            lambda number: self._speech.commit(number, self._owner, place, offset),
            lambda _: self._ledger.was_stored(self._owner, place, at, Level.WRITTEN),
            _nothing,
        )

    def position(self) -> None:
        place = self._place()
        since, starts = self._ledger.last_answered(self._owner, place), self._ledger.starts(place)

        def judge(answer: Answer) -> None:
            if starts == self._ledger.starts(place):
                self._ledger.finds(self._owner, place, answer.offset, since)

        self._ask(
            f"position {place[0]}/{place[1]}",
            lambda number: self._speech.position(number, self._owner, place),
            judge,
            _nothing,
        )

    def flood(self, level: Level) -> None:
        """Make more requests than the broker may buffer, and read nothing meanwhile."""
        self.reads = False
        sizes, self.sizes = self.sizes, VALUE_SIZES[-1]
        ask = self._fetch_all if self._chance.happens(0.5) else partial(self.produce, level)
        for _ in range(FLOOD):
            ask()
        self.sizes = sizes

    def ping(self) -> None:
        self._ask("ping", lambda number: self._speech.ping(number), lambda _: None, _nothing)

    def may_ask(self, act: str) -> bool:
        """Return whether its protocol has this request, and it has a connection with few outstanding requests."""
        link = self.link
        if act in ACTS | GROUP_ACTS and act not in self._speech.words.acts:
            return False
        return link is not None and not link.finished and not link.is_cut and len(self.asked) < self.patience

    # Answers

    def received(self, data: bytes) -> None:
        try:
            for answer in self._speech.take(data):
                self._judge(answer)
        except PeerError as error:
            require(False, "an answer makes sense", peer=self.name, error=str(error))
        self.push()

    def _judge(self, answer: Answer) -> None:
        asked = self.asked.get(answer.number)
        require(asked is not None, "an answer is to a request", peer=self.name, number=answer.number)
        assert asked is not None, "it was looked at"
        if self._speech.words.is_ordered:
            first = next(iter(self.asked))
            require(first == answer.number, "answers are in order", peer=self.name, expected=first, found=answer.number)
        if answer.is_last:
            del self.asked[answer.number]
        if answer.error:
            self._story.tell("refused", f"{self.name} {answer.number} {asked.what}: {answer.error}")
            excused = answer.later or answer.is_fenced or self.may_be_refused or answer.error == GAP
            require(excused, "refused for no reason", peer=self.name, what=asked.what, error=answer.error)
            if answer.is_partial:
                self._become_another()
            elif not self.may_be_refused or answer.error == GAP:
                asked.refused()
            return
        self._story.tell("answered", f"{self.name} {answer.number} {asked.what}")
        asked.judge(answer)


def _nothing() -> None:
    """Do nothing."""
