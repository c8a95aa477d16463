"""Topics of other shards as groups that are at home here know them, and which shard has the topic of an id (decision 0080).

Promises: whoever asks is answered with what is known; what somebody reads is looked at again and again, whatever other shards do; a shard
that is away keeps nobody waiting for long, and its topics stay as they were. Must not know: sockets, groups, who may use which topic.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, Final

from polywire.broker.elsewhere import TopicElsewhere
from polywire.protocols.kafka.between_shards import Look, Seen, ShardLinks
from polywire.protocols.kafka.context import KafkaBroker
from polywire.protocols.runtime.shards import Shards

LOOK_S: Final = 1.0  # from one look at what somebody reads to the next
WAIT_S: Final = 1.0  # that somebody waits for a shard to tell of topics for the first time
UNUSED_LOOKS: Final = 120  # after which nobody reads a topic that nobody has asked for
NAMES_MAX: Final = 100_000  # that are looked for; above it those are forgotten that nobody has found
IDS_MAX: Final = 100_000  # whose shard is remembered; the one that was told of longest ago is forgotten first
LOCATED_MAX: Final = 10_000  # ids of one request whose shard is asked for: as many as a broker has topics
NAMES_AT_ONCE: Final = 500  # asked for in one question, so that its answer takes about 1 ms


class _Wanted:
    """A name that somebody reads. shard: that has the topic, or would; None where nobody has. is_told: a shard has been asked, and has
    answered or not. look: the last one before which it was asked for."""

    __slots__ = ("is_told", "look", "shard", "topic")

    def __init__(self, shard: int | None, look: int, topic: TopicElsewhere | None = None) -> None:
        self.shard = shard
        self.look = look
        self.topic = topic
        self.is_told = shard is None or topic is not None


class _Waiting:
    """Somebody who goes on when all of this has come, or the time is over. Guards: ``then`` is called once, and never after ``cancel``."""

    __slots__ = ("_missing", "_then", "_timer")

    def __init__(self, broker: KafkaBroker, missing: set[object], then: Callable[[], None]) -> None:
        self._missing = missing
        self._then: Callable[[], None] | None = then
        self._timer: Final = broker.loop.call_later(WAIT_S, self._end)

    @property
    def is_over(self) -> bool:
        return self._then is None

    def came(self, what: Iterable[object]) -> None:
        self._missing.difference_update(what)
        if not self._missing:
            self._end()

    def _end(self) -> None:
        then = self._then
        self.cancel()
        if then is not None:
            then()

    def cancel(self) -> None:
        self._then = None
        self._timer.cancel()


class TopicsElsewhere:
    """Implements ``broker.elsewhere.Elsewhere``.

    Invariant: ``_ids`` has the topics of all in ``_wanted`` that are known. ``_asked``: how many questions a shard has not answered yet.
    """

    def __init__(self, broker: KafkaBroker, shards: Shards, links: ShardLinks) -> None:
        self._broker: Final = broker
        self._shards: Final = shards
        self._links: Final = links
        self._wanted: dict[str, _Wanted] = {}
        self._new: list[str] = []
        self._ids: dict[bytes, tuple[int, TopicElsewhere]] = {}
        self._seen: dict[int, tuple[int, int]] = {}
        self._asked: dict[int, int] = {}
        self._waiting: list[_Waiting] = []
        self._version = 0
        self._version_look = -UNUSED_LOOKS
        self._look = 0
        self._timer: Any = None

    # What groups ask

    @property
    def version(self) -> int:
        """See ``Elsewhere``."""
        self._version_look = self._look
        self._go_on()
        return self._version

    def find(self, full_name: str) -> TopicElsewhere | None:
        """See ``Elsewhere``."""
        wanted = self._wanted.get(full_name)
        if wanted is None:
            return None
        wanted.look = self._look
        return wanted.topic

    def find_id(self, topic_id: bytes) -> TopicElsewhere | None:
        """See ``Elsewhere``."""
        found = self._ids.get(topic_id)
        return None if found is None else found[1]

    def want(self, full_name: str) -> TopicElsewhere | None:
        """See ``Elsewhere``."""
        wanted = self._wanted.get(full_name) or self._add(full_name)
        wanted.look = self._look
        return wanted.topic

    def has(self, full_name: str) -> bool:
        """See ``Elsewhere``."""
        return self._place(full_name) is not None

    def _place(self, full_name: str) -> int | None:
        shard = self._shards.shard_of(full_name)
        return None if shard == self._shards.own else shard

    def _add(self, full_name: str) -> _Wanted:
        """Look for a topic from now on."""
        if len(self._wanted) >= NAMES_MAX:
            self._wanted = {name: wanted for name, wanted in self._wanted.items() if wanted.topic is not None}
        added = self._wanted[full_name] = _Wanted(self._place(full_name), self._look)
        if added.shard is not None:
            if not self._new:
                self._broker.loop.call_soon(self._ask_new)
            self._new.append(full_name)
        self._go_on()
        return added

    # What wires ask

    def known(self, names: Iterable[str], then: Callable[[], None]) -> Callable[[], None] | None:
        """Go on once shards have told of the topics of these names, or do not: at once where that was so before; else later, and what is
        returned has nobody wait for it."""
        missing: set[object] = {name for name in names if self._is_new(name)}
        if not missing:
            then()
            return None
        return self._wait(missing, then)

    def _is_new(self, name: str) -> bool:
        return self._broker.find_topic(name) is None and not (self._wanted.get(name) or self._add(name)).is_told

    def _wait(self, missing: set[object], then: Callable[[], None]) -> Callable[[], None]:
        waiting = _Waiting(self._broker, missing, then)
        self._waiting = [one for one in self._waiting if not one.is_over]
        self._waiting.append(waiting)
        return waiting.cancel

    def shard_of_id(self, topic_id: bytes) -> int | None:
        """Which shard has the topic of this id, as far as that is known."""
        if self._broker.topic_of_id(topic_id) is not None:
            return self._shards.own
        found = self._ids.get(topic_id)
        return None if found is None else found[0]

    def located(self, topic_ids: Collection[bytes], then: Callable[[], None]) -> Callable[[], None] | None:
        """The same as ``known`` for which shards have the topics of these ids."""
        unknown = [id_ for id_ in dict.fromkeys(topic_ids) if self.shard_of_id(id_) is None][:LOCATED_MAX]
        others = [shard for shard in range(self._shards.count) if shard != self._shards.own]
        if not unknown or not others:
            then()
            return None
        parts = [tuple(unknown[at : at + NAMES_AT_ONCE]) for at in range(0, len(unknown), NAMES_AT_ONCE)]
        asked = {object(): (shard, part) for shard in others for part in parts}
        cancel = self._wait(set(asked), then)
        for question, (shard, part) in asked.items():
            self._ask(shard, Look(ids=part), partial(self._came, (question,)))
        return cancel

    def learn(self, shard: int, seen: Seen) -> None:
        """A shard has told of topics that somebody reads from now on."""
        for topic in seen.topics:
            known = topic.known()
            was = self._wanted.get(known.name.full)
            if was is not None:
                self._forget(was)
            self._wanted[known.name.full] = _Wanted(shard, self._look, known)
            self._put(shard, known)
        self._go_on()

    # Looking

    def _go_on(self) -> None:
        if self._timer is None:
            self._timer = self._broker.loop.call_later(LOOK_S, self._look_again)

    def _look_again(self) -> None:
        """Ask for all that somebody reads; nothing while there is nothing."""
        self._timer = None
        self._look += 1
        oldest = self._look - UNUSED_LOOKS
        for name in [name for name, wanted in self._wanted.items() if wanted.look < oldest]:
            self._forget(self._wanted.pop(name))
        is_watched = self._version_look >= oldest
        if not self._wanted and not is_watched:
            return
        self._go_on()
        own = self._shards.own
        by_shard: dict[int, list[str]] = {
            shard: [] for shard in range(self._shards.count) if is_watched and shard != own
        }
        for name, wanted in self._wanted.items():
            if wanted.topic is None:
                wanted.shard = self._place(name)  # it may have begun
            if wanted.shard is not None:
                by_shard.setdefault(wanted.shard, []).append(name)
        for shard, names in by_shard.items():
            if not self._asked.get(shard):
                self._ask_for(shard, names)

    def _ask_new(self) -> None:
        names, self._new = self._new, []
        by_shard: dict[int, list[str]] = {}
        for name in names:
            wanted = self._wanted.get(name)
            if wanted is not None and wanted.shard is not None:
                by_shard.setdefault(wanted.shard, []).append(name)
        for shard, some in by_shard.items():
            self._ask_for(shard, some)

    def _ask_for(self, shard: int, names: Sequence[str]) -> None:
        for at in range(0, max(len(names), 1), NAMES_AT_ONCE):
            some = tuple(names[at : at + NAMES_AT_ONCE])
            self._ask(shard, Look(names=some), partial(self._came, some))

    def _ask(self, shard: int, look: Look, then: Callable[[], None]) -> None:
        self._asked[shard] = self._asked.get(shard, 0) + 1
        self._links.look(shard, look, partial(self._told, shard, look, then))

    def _told(self, shard: int, look: Look, then: Callable[[], None], seen: Seen | None) -> None:
        self._asked[shard] -= 1
        if seen is not None:
            self._note(shard, look, seen)
        then()

    def _came(self, what: Collection[object]) -> None:
        for name in what:
            wanted = self._wanted.get(name) if isinstance(name, str) else None
            if wanted is not None:
                wanted.is_told = True
        waiting = self._waiting
        for one in waiting:
            one.came(what)
        self._waiting = [one for one in self._waiting if not one.is_over]

    def _note(self, shard: int, look: Look, seen: Seen) -> None:
        """A shard has told of what it was asked for."""
        if self._seen.get(shard) != (seen.start, seen.version):
            self._seen[shard] = seen.start, seen.version
            self._version += 1
        found = {topic.id: topic.known() for topic in seen.topics}
        by_name = {topic.name.full: topic for topic in found.values()}
        for name in look.names:
            wanted = self._wanted.get(name)
            if wanted is not None and wanted.shard == shard:
                self._forget(wanted)
                wanted.topic = by_name.get(name)
        for known in found.values():
            self._put(shard, known)

    def _put(self, shard: int, topic: TopicElsewhere) -> None:
        self._ids.pop(topic.id, None)
        self._ids[topic.id] = shard, topic
        if len(self._ids) > IDS_MAX:
            del self._ids[next(iter(self._ids))]

    def _forget(self, wanted: _Wanted) -> None:
        if wanted.topic is not None:
            self._ids.pop(wanted.topic.id, None)
            wanted.topic = None
