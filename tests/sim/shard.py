"""One shard in a bucket, several brokers that want to lead it, and everything that a network does to requests; one number replays a run.

Promises: time is virtual, every choice comes from the run's number. What is checked: whoever acknowledges has seen all that was acknowledged
before, in the same order; a fresh reader at the end finds all of it once. Must not know: how the protocol keeps that.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Generator, Sequence
from types import ModuleType
from typing import Any, Final

from polywire.cluster import protocol
from polywire.cluster.chain import NONCE_BYTES, ObjectChain, start_object
from polywire.cluster.floor import Floor
from polywire.cluster.protocol import Create, Delete, MoveFloor, Outcome, Pause, Read, ReadFloor, Request
from polywire.errors import Corrupt
from polywire.log.journal.group import EntryKind, GroupHead, read_directory, read_group
from polywire.log.journal.write_batch import sealed_content

SEED: Final = 7
SECONDS: Final = 150.0
BROKERS: Final = 3
OBJECTS_SEALED: Final = 5  # between two seals
LATE_SECONDS_MAX: Final = 60.0


class Broken(Exception):
    """A promise was broken."""


class Shard:
    """The world of one run. ``rules`` is the protocol, or what a test has made of it."""

    def __init__(self, number: int, rules: ModuleType = protocol) -> None:
        self.chance: Final = random.Random(number)
        self.rules: Final = rules
        self.now = 0.0
        self.objects: dict[int, bytes] = {}
        self.floor: tuple[Floor, str] = (Floor(), "")
        self.snapshots: dict[str, list[int]] = {}
        self.acknowledged: list[int] = []
        """In their order; what any leader has told anybody."""
        self.takeovers = 0
        self.voids = 0
        self._next_id = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def run(self) -> None:
        """One run. Raises Broken."""
        brokers = [_Process(self, Broker(self, f"node-{number}").live()) for number in range(BROKERS)]
        for process in brokers:
            self.after(self.chance.uniform(0, 5), process.begin)
        self._plan_kill(brokers)
        try:
            self._pass(SECONDS)
            for process in brokers:
                process.kill()
            self._pass(self.now + 2 * LATE_SECONDS_MAX)  # every request has arrived
            self._check_end()
        except Corrupt as error:
            raise Broken(f"a sound bucket is taken for a broken one: {error.message}") from error

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        """Let something happen later."""
        self._count += 1
        heapq.heappush(self._events, (self.now + seconds, self._count, event))

    def new_id(self) -> int:
        """The number of a change that nobody made before."""
        self._next_id += 1
        return self._next_id

    def acknowledge(self, state: Sequence[int]) -> None:
        """A leader shows these changes and tells somebody of the last of them. Its answer may have been long on its way: then others have led
        since, and what it shows is old, but true. Raises Broken."""
        known = len(self.acknowledged)
        if list(state[:known]) != self.acknowledged[: len(state)]:
            raise Broken(f"an acknowledged change is lost or moved at={self.now:.3f}")
        if len(state) > known:
            self.acknowledged = list(state)

    def play(self, chain: ObjectChain) -> list[int]:
        """The changes of a chain, those in its snapshot first."""
        naming = chain.naming()
        state = [] if naming is None else list(self.snapshots[naming.snapshot])
        for group in chain.behind(0 if naming is None else naming.sealed):
            for entry in read_directory(group.content, group.position):
                if entry.kind == EntryKind.CHANGE:
                    state.append(int.from_bytes(group.content[entry.position : entry.position + 8], "little"))
        return state

    def _pass(self, end: float) -> None:
        while self._events and self._events[0][0] <= end:
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.now = end

    def _plan_kill(self, brokers: list[_Process]) -> None:
        def kill() -> None:
            index = self.chance.randrange(len(brokers))
            brokers[index].kill()
            brokers[index] = _Process(self, Broker(self, f"node-{index}").live())
            self.after(self.chance.uniform(0.1, 10), brokers[index].begin)
            self._plan_kill(brokers)

        self.after(self.chance.expovariate(1 / 15), kill)

    def _check_end(self) -> None:
        reader, answer = protocol.read_journal(SEED), None
        try:
            while True:
                answer = self._at_once(reader.send(answer))
        except StopIteration as end:
            found = self.play(end.value)
        if found[: len(self.acknowledged)] != self.acknowledged:
            raise Broken("a fresh reader misses what was acknowledged")
        if len(set(found)) != len(found):
            raise Broken("a change is there twice")

    def _at_once(self, request: Request) -> Any:
        if isinstance(request, Read):
            return [self.objects.get(number) for number in request.numbers]
        return self.floor

    # What the bucket does when a request arrives

    def arrive(self, request: Request) -> Outcome:
        """Carry out a request that writes."""
        match request:
            case Create(number, content):
                if number in self.objects:
                    return Outcome.EXISTS
                self.objects[number] = content
            case MoveFloor(floor, tag):
                if self.floor[1] != tag:
                    return Outcome.EXISTS
                self.floor = floor, f"{floor.number}-{self.now}"
            case Delete(numbers):
                for number in numbers:
                    self.objects.pop(number, None)
        return Outcome.DONE


class _Process:
    """One broker's life: its requests travel, are lost, repeated by nobody, late; it may sleep between any two."""

    def __init__(self, shard: Shard, steps: Generator[Request, Any, None]) -> None:
        self._shard = shard
        self._steps = steps
        self._killed = False

    def kill(self) -> None:
        """It hears of nothing any more; what it has sent still arrives."""
        self._killed = True

    def begin(self) -> None:
        """Go to work."""
        self._go_on(None)

    def _go_on(self, answer: Any) -> None:
        if not self._killed:
            self._send(self._steps.send(answer))

    def _answer(self, seconds: float, answer: Any) -> None:
        chance = self._shard.chance
        if chance.random() < 0.01:
            seconds += chance.uniform(0.1, 15)  # stopped, or starved
        self._shard.after(seconds, lambda: self._go_on(answer))

    def _send(self, request: Request) -> None:
        match request:
            case Pause(seconds):
                self._answer(seconds, None)
            case Read(numbers):
                self._read(list(numbers))
            case ReadFloor():
                self._shard.after(self._travel(), lambda: self._answer(self._travel(), self._shard.floor))
            case _:
                self._write(request)

    def _travel(self) -> float:
        chance, draw = self._shard.chance, self._shard.chance.random()
        if draw < 0.015:
            return chance.uniform(1, 12)
        return chance.uniform(0.05, 0.5) if draw < 0.1 else chance.uniform(0.001, 0.02)

    def _read(self, numbers: list[int]) -> None:
        """Reads that are sent together arrive in any order."""
        shard, found = self._shard, dict[int, bytes | None]()

        def arrive(part: Sequence[int]) -> None:
            found.update((number, shard.objects.get(number)) for number in part)
            if len(found) == len(numbers):
                self._answer(self._travel(), [found[number] for number in numbers])

        known = [number for number in numbers if number <= max(shard.objects, default=0) + 2]
        rest = [number for number in numbers if number not in known]
        parts = [*([number] for number in known), *([rest] if rest else [])]
        for part in parts:
            shard.after(self._travel(), lambda part=part: arrive(part))  # type: ignore[misc]

    def _write(self, request: Request) -> None:
        shard, draw = self._shard, self._shard.chance.random()
        deleting = isinstance(request, Delete)
        if draw < 0.03 and not deleting:
            self._answer(self._travel(), Outcome.EXISTS if draw < 0.015 else Outcome.UNKNOWN)
        elif draw < 0.1:  # it arrives some time, perhaps long after
            shard.after(
                shard.chance.uniform(0, LATE_SECONDS_MAX if draw < 0.06 else 1), lambda: _unheard(shard, request)
            )
            self._answer(shard.chance.uniform(0.1, 8), Outcome.UNKNOWN)
        elif draw < 0.15:
            shard.after(self._travel(), lambda: _unheard(shard, request))
            self._answer(self._travel() + self._travel(), Outcome.UNKNOWN)
        else:
            shard.after(self._travel(), lambda: self._answer(self._travel(), shard.arrive(request)))


def _unheard(shard: Shard, request: Request) -> None:
    """It arrives, and nobody hears what came of it."""
    shard.arrive(request)


class Broker:
    """Leads when it can, makes changes, seals now and then, and comes back after it was deposed."""

    def __init__(self, shard: Shard, node: str) -> None:
        self._shard = shard
        self._node = node

    def live(self) -> Generator[Request, Any, None]:
        """Everything it does until it is killed."""
        shard, chance = self._shard, self._shard.chance
        while True:
            nonce = chance.randbytes(NONCE_BYTES)
            claim = yield from shard.rules.claim(
                SEED,
                lambda chain, nonce=nonce: start_object(chain.end, chain.seed, nonce=nonce, node=self._node, now_us=0),
            )
            if claim is not None:
                shard.takeovers += 1
                yield from self._lead(claim)
            elif chance.random() < 0.5:  # others do not let themselves be hurried
                continue
            yield Pause(chance.expovariate(1 / 8))

    def _lead(self, claim: protocol.Claim) -> Generator[Request, Any, None]:
        shard = self._shard
        state = shard.play(claim.chain)
        shard.acknowledge(state)
        started = read_group(claim.content, 0, SEED)
        assert started is not None, "it was just made"
        sequence, checksum, start = started.sequence, started.checksum, started.start
        starts, number, sealed = (
            {*claim.chain.starts, claim.number},
            claim.number,
            (sequence, claim.number, list(state)),
        )
        head = GroupHead(SEED)
        for count in range(1, 10_000):
            number, naming, parts = number + 1, count % OBJECTS_SEALED == 0, b""
            for _ in range(1 if naming else shard.chance.randint(1, 3)):
                head.clear()
                content = self._enter(head, start, number, sealed, state, naming=naming)
                parts += bytes(head.finish(start, sequence + 1, sequence, checksum, 0)) + content
                sequence, checksum = sequence + 1, head.checksum
            if not (yield from shard.rules.settle(number, parts)):
                return
            shard.acknowledge(state)
            if naming:
                floor = Floor(sealed[1] + 1, number, start, sealed[0])
                yield from shard.rules.raise_floor(floor, starts)
                sealed = (sequence, number, list(state))
            yield Pause(shard.chance.uniform(0, 0.3))

    def _enter(
        self,
        head: GroupHead,
        start: int,
        number: int,
        sealed: tuple[int, int, list[int]],
        state: list[int],
        *,
        naming: bool,
    ) -> bytes:
        """What the next group holds: a change, or the name of a snapshot."""
        if not naming:
            state.append(self._shard.new_id())
            content = state[-1].to_bytes(8, "little")
            head.entry(EntryKind.CHANGE, 0, 0, content)
            return content
        name = f"{start:08x}-{number:07x}"
        self._shard.snapshots[name] = sealed[2]
        content = sealed_content((), ())
        head.entry(EntryKind.SEALED, 0, sealed[0], content)
        head.entry(EntryKind.SNAPSHOT, 0, sealed[0], name.encode())
        return content + name.encode()
