"""Requests of clients to a broker, and checks of the broker's visible state.

The state before and after every request is compared: the requested change has happened, and nothing else differs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final

from polywire.broker.broker import Broker
from polywire.broker.owners import NO_CALLER
from polywire.broker.topics import Partition
from polywire.errors import BrokerError, Busy, ErrorCode
from polywire.log.base import Completion
from polywire.types import Level, PositionKind
from tests.sim.broker.history import Key, State
from tests.sim.broker.model import Model
from tests.sim.broker.process import BrokerProcess
from tests.sim.broker.queue_model import LETTERS
from tests.sim.promises import require
from tests.sim.story import Story

BY_ITSELF: Final = frozenset(("group", "transaction", "holds", "share", "share group", "letters"))
"""Parts of the state that change without a request: members, transactions and locks of records expire."""

FAILED: Final = (ErrorCode.STORAGE_FAILED, ErrorCode.REPLICATION_TIMEOUT, ErrorCode.NOT_OWNER)
"""Errors of a broker that is about to stop: its disk or its bucket failed, or another broker leads."""

Watcher = Callable[[Key, object, object], None]
"""Checks a changed part of the state: its value before and after, None if it did not exist."""

Verb = Callable[[Completion[Any]], Any]


def look(broker: Broker, bounds: Callable[[Partition], tuple[int, int]], staged: Iterable[bytes]) -> State:
    """Return the visible state of a broker. bounds: the first and next offset of a partition, because retention may
    change them at any time. staged: tokens with staged batches.
    """
    found: dict[Key, object] = {}
    for topic in broker.topics():
        name = topic.name.full
        found["topic", name] = (topic.id.hex(), len(topic.partitions))
        for partition in topic.partitions:
            end = "letters" if name == LETTERS else "end"
            first, found[end, name, partition.incarnation] = bounds(partition)
            if topic.settings.retention_bytes is None:
                found["first", name, partition.incarnation] = first
    for topic_name, group in broker.groups.pairs():
        view = broker.groups.kept(group, topic_name)
        assert view is not None, "it is listed"
        found["group", topic_name, group] = (view.generation, tuple(member.id for member in view.members))
    for topic_name, group in broker.position_owners(PositionKind.GROUP):
        for number, offset in broker.positions_in(topic_name, PositionKind.GROUP, group, latest=True).items():
            found["position", topic_name, group, number] = offset
    for transaction in broker.transactions.visible(by=NO_CALLER):
        found["transaction", "", transaction.id] = (transaction.epoch, transaction.state.name)
        moved = [(scope.topic, scope.group, *held.offsets.items()) for scope, held in transaction.positions.items()]
        found["holds", "", transaction.id] = (transaction.messages, transaction.token, *sorted(moved))
    for token in staged:
        found["staged", "", token.hex()] = True
    for published in broker.staging.writers(by=NO_CALLER):
        found["writer", "", published.writer] = published.number
    _look_at_shares(broker, found)
    return found


def _look_at_shares(broker: Broker, found: dict[Key, object]) -> None:
    """Add the share groups and their progress."""
    table, partitions = broker._state.shares, broker._state.catalog
    for stored in table.groups.values():
        found["share group", "", stored.name] = (tuple(sorted(stored.settings.items())), stored.has_members)
    for (group, incarnation), progress in table._progress.items():
        partition = partitions.find_partition(incarnation)
        assert partition is not None, "progress ends with its partition"
        state = (progress.end, tuple(sorted(progress.counts.items())), tuple(sorted(progress.due_ms.items())))
        found["share", partition.topic.name.full, group, incarnation] = (*state, tuple(progress.cursor))


class Asking:
    """Guards: every request is answered once; ``failure`` is the error of a broker whose storage failed."""

    def __init__(self, process: BrokerProcess, model: Model, story: Story, durability: Level) -> None:
        self.broker: Final = process.broker
        self.model: Final = model
        self.story: Final = story
        self._durability = durability
        self.failure: BrokerError | None = None
        self.unanswered = 0
        self.recovered: int | None = None
        """The moment that the next leader recovered, if this one was replaced while it runs."""
        self._watchers: Final[dict[str, Watcher]] = {}
        self._unasked: Final[dict[str, Watcher]] = {}
        process.log.on_failure(self._failed)

    def _failed(self, error: BrokerError) -> None:
        self.failure = error
        self.story.tell("log failed", error.message)

    def look(self) -> State:
        """Return the state as it must be once the requests are written."""
        staged = [token for token, known in self.model.tokens.items() if not known.is_gone]
        return look(self.broker, self._bounds, staged)

    def notice_last(self) -> None:
        """Account for a killed process: its spontaneous changes since the last request may be stored or not."""
        history, state = self.model.history, self.look()
        kept = {key: value for key, value in history.latest.items() if key[0] not in BY_ITSELF}
        history.note({**kept, **{key: value for key, value in state.items() if key[0] in BY_ITSELF}})

    def _bounds(self, partition: Partition) -> tuple[int, int]:
        kept = self.model.partitions[partition.incarnation]
        return max(kept.first, partition.log.first_offset), len(kept.records)

    def notice(self) -> None:
        """Note the spontaneous changes since the last request, unless another machine leads by now."""
        if self.recovered is not None:
            return
        state, history = self.look(), self.model.history
        if state == history.latest:
            return
        before = history.latest
        changed = history.note(state)
        for key in changed:
            require(key[0] in BY_ITSELF, "nothing changes unasked", key=key, now=state.get(key))
        self._note_shown()
        self._judge(self._unasked, before, changed)
        self._judge(self._watchers, before, changed)

    def watch(self, kind: str, watcher: Watcher) -> None:
        """Register a check of every change in parts of this kind."""
        self._watchers[kind] = watcher

    def watch_unasked(self, kind: str, watcher: Watcher) -> None:
        """Register a check of spontaneous changes in parts of this kind."""
        self._unasked[kind] = watcher

    @staticmethod
    def _judge(watchers: Mapping[str, Watcher], before: State, changed: State) -> None:
        for key, value in changed.items():
            watcher = watchers.get(str(key[0]))
            if watcher is not None:
                watcher(key, before.get(key), value)

    def ask(
        self,
        event: str,
        text: str,
        verb: Verb,
        *,
        level: Level | None,
        applied: Callable[[Any], Mapping[Key, object]] = lambda _: {},
        completed: Callable[[Any], None] = lambda _: None,
        moment: int | None = None,
        free: Collection[str] = (),
    ) -> Any:
        """Make a request; return the call's result or the error that it raised.

        applied: updates the model and returns the expected parts of the state, None for removed parts. free: kinds of
        parts that this does not check. completed: gets the answer. moment: of the history that the answer acknowledges,
        if not that of this request.
        """
        self.notice()
        self.story.tell(event, text)
        answer = _Answer(self, f"{event} {text}", Level.MEMORY if level is None else level, completed)
        try:
            found = verb(answer)
        except BrokerError as error:
            self.story.tell("no", error.code.name)
            answer.withdraw()
            self._changed({}, free)
            return error
        if level is None:
            answer.withdraw()
        self._changed(applied(found), free)
        answer.moment = self.model.history.moment if moment is None else moment
        return found

    def _changed(self, expected: Mapping[Key, object], free: Collection[str]) -> None:
        history = self.model.history
        before = history.latest
        wanted = {key: value for key, value in expected.items() if before.get(key) != value}
        differing = history.note(self.look())
        self._note_shown()
        self._judge(self._watchers, before, differing)
        changed = {key: value for key, value in differing.items() if key[0] not in free}
        require(changed == wanted, "what was asked for is so, and nothing else", changed=changed, wanted=wanted)

    def _note_shown(self) -> None:
        """Note the committed offsets that clients see now, if they may see durable ones only."""
        if self._durability < Level.SYNCED:
            return
        for topic_name, group in self.broker.position_owners(PositionKind.GROUP):
            for number, offset in self.broker.positions_in(topic_name, PositionKind.GROUP, group).items():
                self.model.history.show(("position", topic_name, group, number), offset)

    def acknowledge(self, moment: int, level: Level) -> None:
        """Note that everything up to this moment is acknowledged at this level."""
        is_raised = level is not Level.MEMORY or self._durability is Level.STORED
        self.model.history.acknowledge(moment, max(level, self._durability) if is_raised else level)

    def judge_late(self, what: str, moment: int) -> None:
        """Check a success that a former leader reports: it was stored before the next leader took over."""
        assert self.recovered is not None, "it leads no more"
        self.story.tell("late", what)
        require(moment <= self.recovered, "a former leader acknowledges nothing", what=what, moment=moment)

    def is_excused(self, error: BrokerError) -> bool:
        """Return whether this error may refuse any request."""
        return isinstance(error, Busy) or self.failure is not None or error.code in FAILED


class _Answer:
    """A completion. Guards: it is called once, and not from inside the request."""

    __slots__ = ("_asking", "_completed", "_level", "_what", "is_open", "moment")

    def __init__(self, asking: Asking, what: str, level: Level, completed: Callable[[Any], None]) -> None:
        self._asking = asking
        self._what = what
        self._level = level
        self._completed = completed
        self.moment = -1
        self.is_open = True
        asking.unanswered += 1

    def withdraw(self) -> None:
        """Expect no answer any more."""
        self.is_open = False
        self._asking.unanswered -= 1

    def __call__(self, found: object) -> None:
        asking = self._asking
        require(self.is_open, "every request is answered once", what=self._what)
        require(self.moment >= 0, "no answer comes before the call returns", what=self._what)
        self.is_open = False
        asking.unanswered -= 1
        if isinstance(found, BrokerError):
            asking.story.tell("refused", self._what)
            excused = asking.is_excused(found) or asking.recovered is not None
            require(excused, "refused for no reason", what=self._what, error=str(found))
            return
        if asking.recovered is not None:
            asking.judge_late(self._what, self.moment)
            return
        asking.story.tell("answered", self._what)
        asking.acknowledge(self.moment, self._level)
        self._completed(found)
