"""Simulation of one shard in a bucket, with several brokers that want to lead it and an unreliable network.

Time is virtual, and the seed determines every choice. A leader that acknowledges must have seen everything acknowledged before, in the same
order. A new reader must find all of it once at the end. A reported snapshot must stay readable for the grace period.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any, Final

from polywire.cluster import fencing, garbage_collection
from polywire.cluster.fencing import (
    Create,
    Delete,
    DeleteBlobs,
    ListBlobs,
    ListJournal,
    MoveFloor,
    Outcome,
    Pause,
    Read,
    ReadFloor,
    ReadHeads,
    Request,
)
from polywire.cluster.journal_chain import NONCE_BYTES, JournalChain, start_object
from polywire.cluster.journal_floor import Floor
from polywire.errors import Corrupt
from polywire.log.journal.group import EntryKind, GroupHead, read_directory, read_group
from polywire.log.journal.steps import sealed_content
from polywire.log.segments.sealer import snapshot_name

SEED: Final = 7
SECONDS: Final = 150.0
BROKERS: Final = 3
OBJECTS_SEALED: Final = 5  # between two seals
LATE_SECONDS_MAX: Final = 60.0
GRACE_SECONDS: Final = 8.0
SWEEP_SECONDS: Final = 10.0  # between two sweeps


class Broken(Exception):
    """A promise was broken."""


class Shard:
    """The simulation of one run.

    ``rules`` and ``swept`` are the protocol and its sweeping, or modified copies of a test.
    """

    def __init__(self, number: int, rules: ModuleType = fencing, swept: ModuleType = garbage_collection) -> None:
        self.chance: Final = random.Random(number)
        self.rules: Final = rules
        self.swept: Final = swept
        self.now = 0.0
        self.objects: dict[int, bytes] = {}
        self.floor: tuple[Floor, str] = (Floor(), "")
        self.snapshots: dict[str, list[int]] = {}
        self.acknowledged: list[int] = []
        """In order: everything that any leader has acknowledged."""
        self.takeovers = 0
        self.voids = 0
        self._next_id = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def run(self) -> None:
        """Run once. Raises Broken."""
        brokers = [self._born(number) for number in range(BROKERS)]
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
        """Schedule an event."""
        self._count += 1
        heapq.heappush(self._events, (self.now + seconds, self._count, event))

    def new_id(self) -> int:
        """Return a new change number."""
        self._next_id += 1
        return self._next_id

    def acknowledge(self, state: Sequence[int]) -> None:
        """Acknowledge the last of these changes for a leader.

        The acknowledgement may be late: there may be later leaders by now, and its view old but true. Raises Broken.
        """
        known = len(self.acknowledged)
        if list(state[:known]) != self.acknowledged[: len(state)]:
            raise Broken(f"an acknowledged change is lost or moved at={self.now:.3f}")
        if len(state) > known:
            self.acknowledged = list(state)

    def plan(self, snapshot: str, number: int) -> None:
        """Report a snapshot to a reader that uses it within the grace period, from the process that has just stored
        this object.

        A leader that was superseded without noticing may report a deleted one.
        """

        def read() -> None:
            if snapshot not in self.snapshots:
                raise Broken(f"a snapshot was deleted within its grace at={self.now:.3f}")

        if snapshot and number == max(self.objects):
            self.after(self.chance.uniform(0, GRACE_SECONDS), read)

    def play(self, chain: JournalChain) -> list[int] | None:
        """Return the changes of a chain, those in its snapshot first; None if the snapshot is gone."""
        naming = chain.naming()
        if naming is not None and naming.snapshot not in self.snapshots:
            return None
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

    def _born(self, number: int) -> _Process:
        broker = Broker(self, f"node-{number}")
        process = _Process(self, broker.live())
        broker.beside = process.beside
        return process

    def _plan_kill(self, brokers: list[_Process]) -> None:
        def kill() -> None:
            index = self.chance.randrange(len(brokers))
            brokers[index].kill()
            brokers[index] = self._born(index)
            self.after(self.chance.uniform(0.1, 10), brokers[index].begin)
            self._plan_kill(brokers)

        self.after(self.chance.expovariate(1 / 15), kill)

    def _check_end(self) -> None:
        reader, answer = fencing.read_journal(SEED), None
        try:
            while True:
                answer = self._at_once(reader.send(answer))
        except StopIteration as end:
            found = self.play(end.value)
        if found is None or found[: len(self.acknowledged)] != self.acknowledged:
            raise Broken("a fresh reader misses what was acknowledged")
        if len(set(found)) != len(found):
            raise Broken("a change is there twice")

    def _at_once(self, request: Request) -> Any:
        if isinstance(request, Read):
            return [self.objects.get(number) for number in request.numbers]
        return self.floor

    # The bucket's reaction to an arriving request

    def arrive(self, request: Request) -> Outcome:
        """Execute a write request."""
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
            case DeleteBlobs(names):
                for name in names:
                    self.snapshots.pop(name, None)
        return Outcome.DONE


class _Process:
    """One broker process: its requests are delayed or lost, and it may sleep between any two."""

    def __init__(self, shard: Shard, steps: Generator[Request, Any, None]) -> None:
        self._shard = shard
        self._steps = steps
        self._killed = False
        self._threads: list[_Process] = []

    def kill(self) -> None:
        """Deliver nothing to it any more; its sent requests still arrive."""
        self._killed = True
        for thread in self._threads:
            thread.kill()

    def beside(self, steps: Generator[Request, Any, None]) -> None:
        """Run other steps concurrently until it is killed."""
        self._threads.append(_Process(self._shard, steps))
        self._threads[-1].begin()

    def begin(self) -> None:
        """Start working."""
        self._go_on(None)

    def _go_on(self, answer: Any) -> None:
        if not self._killed:
            with suppress(StopIteration):
                self._send(self._steps.send(answer))

    def _answer(self, seconds: float, answer: Any) -> None:
        chance = self._shard.chance
        if chance.random() < 0.01:
            seconds += chance.uniform(0.1, 15)  # suspended, or starved
        self._shard.after(seconds, lambda: self._go_on(answer))

    def _send(self, request: Request) -> None:
        match request:
            case Pause(seconds):
                self._answer(seconds, None)
            case Read(numbers):
                self._read(list(numbers))
            case ReadFloor():
                self._shard.after(self._travel(), lambda: self._answer(self._travel(), self._shard.floor))
            case ReadHeads(numbers, size):
                self._read(list(numbers), size)
            case ListJournal():
                self._shard.after(self._travel(), lambda: self._answer(self._travel(), list(self._shard.objects)))
            case ListBlobs(directory):
                self._shard.after(self._travel(), lambda: self._answer(self._travel(), self._listed(directory)))
            case _:
                self._write(request)

    def _travel(self) -> float:
        chance, draw = self._shard.chance, self._shard.chance.random()
        if draw < 0.015:
            return chance.uniform(1, 12)
        return chance.uniform(0.05, 0.5) if draw < 0.1 else chance.uniform(0.001, 0.02)

    def _listed(self, directory: str) -> list[str]:
        return [name for name in self._shard.snapshots if name.startswith(f"{directory}/")]

    def _read(self, numbers: list[int], size: int | None = None) -> None:
        """Return results of concurrent reads, which arrive in any order."""
        shard, found = self._shard, dict[int, bytes | None]()

        def arrive(part: Sequence[int]) -> None:
            found.update((number, shard.objects.get(number)) for number in part)
            if len(found) == len(numbers):
                whole = [found[number] for number in numbers]
                self._answer(self._travel(), [content if content is None else content[:size] for content in whole])

        known = [number for number in numbers if number <= max(shard.objects, default=0) + 2]
        rest = [number for number in numbers if number not in known]
        parts = [*([number] for number in known), *([rest] if rest else [])]
        for part in parts:
            shard.after(self._travel(), lambda part=part: arrive(part))  # type: ignore[misc]

    def _write(self, request: Request) -> None:
        shard, draw = self._shard, self._shard.chance.random()
        deleting = isinstance(request, (Delete, DeleteBlobs))
        if draw < 0.03 and not deleting:
            self._answer(self._travel(), Outcome.EXISTS if draw < 0.015 else Outcome.UNKNOWN)
        elif draw < 0.1:  # it arrives later, perhaps much later
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
    """Execute a request without reporting the result."""
    shard.arrive(request)


class Broker:
    """Leads when it can, makes changes, seals now and then, and returns after it was deposed."""

    def __init__(self, shard: Shard, node: str) -> None:
        self._shard = shard
        self._node = node
        self.beside: Callable[[Generator[Request, Any, None]], None]

    def live(self) -> Generator[Request, Any, None]:
        """Work until it is killed."""
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
            elif chance.random() < 0.5:  # other brokers do not react to urgency
                continue
            yield Pause(chance.expovariate(1 / 8))

    def _lead(self, claim: fencing.Claim) -> Generator[Request, Any, None]:
        shard, named = self._shard, claim.chain.naming()
        state = shard.play(claim.chain)
        if state is None:
            if shard.floor[0].number <= claim.number and claim.number + 1 not in shard.objects:
                raise Broken("a snapshot is gone that the journal names")
            return  # deposed long ago
        shard.acknowledge(state)
        started = read_group(claim.content, 0, SEED)
        assert started is not None, "it was just created"
        sequence, checksum, start = started.sequence, started.checksum, started.start
        starts, number, sealed = (
            {*claim.chain.starts, claim.number},
            claim.number,
            (sequence, claim.number, list(state)),
        )
        head = GroupHead(SEED)
        snapshot = "" if named is None else named.snapshot
        needed = {snapshot}
        self.beside(self._sweep(start, needed))
        for count in range(1, 10_000):
            number, naming, parts = number + 1, count % OBJECTS_SEALED == 0, b""
            name = snapshot_name(start, number)
            if naming:
                shard.snapshots[name] = sealed[2]
                needed.add(name)
            for _ in range(1 if naming else shard.chance.randint(1, 3)):
                head.clear()
                content = self._enter(head, name, sealed, state, naming=naming)
                parts += bytes(head.finish(start, sequence + 1, sequence, checksum, 0)) + content
                sequence, checksum = sequence + 1, head.checksum
            if not (yield from shard.rules.settle(number, parts)):
                self._check_deposed(number, start)
                return
            shard.acknowledge(state)
            if naming:
                needed.discard(snapshot)
                self.beside(_remove(snapshot))
                snapshot = name
                floor = Floor(sealed[1] + 1, number, start, sealed[0])
                yield from shard.rules.raise_floor(floor, starts)
                sealed = (sequence, number, list(state))
            shard.plan(snapshot, number)
            yield Pause(shard.chance.uniform(0, 0.3))

    def _sweep(self, start: int, needed: set[str]) -> Generator[Request, Any, None]:
        while True:
            yield from self._shard.swept.sweep(SEED, start, frozenset(needed), GRACE_SECONDS)
            yield Pause(SWEEP_SECONDS)

    def _check_deposed(self, number: int, start: int) -> None:
        """Check a deposed leader: it has found another broker's object, or the floor has passed its own.

        Below the floor its object may exist again, from a request that arrived after the deletion.
        """
        found = self._shard.objects.get(number) if number >= self._shard.floor[0].number else None
        fields = None if found is None else read_group(found, 0, SEED)
        if fields is not None and fields.start == start:
            raise Broken("a leader is deposed by an object of its own")

    def _enter(
        self,
        head: GroupHead,
        name: str,
        sealed: tuple[int, int, list[int]],
        state: list[int],
        *,
        naming: bool,
    ) -> bytes:
        """Return the content of the next group: a change, or the name of a snapshot."""
        if not naming:
            state.append(self._shard.new_id())
            content = state[-1].to_bytes(8, "little")
            head.entry(EntryKind.CHANGE, 0, 0, content)
            return content
        content = sealed_content((), ())
        head.entry(EntryKind.SEALED, 0, sealed[0], content)
        head.entry(EntryKind.SNAPSHOT, 0, sealed[0], name.encode())
        return content + name.encode() + bytes(-len(name) % 8)


def _remove(snapshot: str) -> Generator[Request, Any, None]:
    """Remove what a stored group replaced, after the grace period."""
    yield Pause(GRACE_SECONDS)
    yield DeleteBlobs((snapshot,))
