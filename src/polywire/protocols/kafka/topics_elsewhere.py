"""Topics of other shards, for groups of this shard and for look-ups by topic id (decision 0128).

* Callers get the topics that are known so far. The topics that groups read are refreshed periodically.
* A shard that does not respond delays callers only briefly. Its topics then stay as last reported.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, Final

from polywire.broker.elsewhere import TopicElsewhere
from polywire.protocols.kafka.between_shards import Look, Seen, ShardLinks
from polywire.protocols.kafka.context import KafkaBroker
from polywire.protocols.runtime.shards import Shards

LOOK_S: Final = 1.0  # interval between queries for the topics that groups read
WAIT_S: Final = 1.0  # how long a caller waits for the first response about a topic
UNUSED_LOOKS: Final = 120  # number of queries after which a topic that no caller needs is dropped
NAMES_MAX: Final = 100_000  # topic names to query for; if there are more, names of missing topics are dropped
IDS_MAX: Final = 100_000  # topic ids with a known shard; the oldest is dropped first
LOCATED_MAX: Final = 10_000  # ids of one request that are looked up; a broker has at most this many topics
NAMES_AT_ONCE: Final = 500  # names or ids in one query, whose response then takes about 1 ms


class _Wanted:
    __slots__ = ("is_answered", "look", "shard", "topic")

    def __init__(self, shard: int | None, look: int, topic: TopicElsewhere | None = None) -> None:
        self.shard = shard
        self.look = look
        self.topic = topic
        self.is_answered = shard is None or topic is not None


class _Waiting:
    """A caller that continues when all missing responses have arrived, or after a time limit.

    ``then`` is called exactly once, but never after ``cancel``.
    """

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

    ``_ids`` has the known topics of ``_wanted``, by id. ``_asked`` is the number of unanswered queries to each shard.
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

    # Used by groups

    @property
    def version(self) -> int:
        self._version_look = self._look
        self._go_on()
        return self._version

    def find(self, full_name: str) -> TopicElsewhere | None:
        wanted = self._wanted.get(full_name)
        if wanted is None:
            return None
        wanted.look = self._look
        return wanted.topic

    def find_id(self, topic_id: bytes) -> TopicElsewhere | None:
        found = self._ids.get(topic_id)
        return None if found is None else found[1]

    def want(self, full_name: str) -> TopicElsewhere | None:
        wanted = self._wanted.get(full_name) or self._add(full_name)
        wanted.look = self._look
        return wanted.topic

    def has(self, full_name: str) -> bool:
        return self._place(full_name) is not None

    def _place(self, full_name: str) -> int | None:
        shard = self._shards.shard_of(full_name)
        return None if shard == self._shards.own else shard

    def _add(self, full_name: str) -> _Wanted:
        if len(self._wanted) >= NAMES_MAX:
            self._wanted = {name: wanted for name, wanted in self._wanted.items() if wanted.topic is not None}
        added = self._wanted[full_name] = _Wanted(self._place(full_name), self._look)
        if added.shard is not None:
            if not self._new:
                self._broker.loop.call_soon(self._ask_new)
            self._new.append(full_name)
        self._go_on()
        return added

    # Used by protocols

    def known(self, names: Iterable[str], then: Callable[[], None]) -> Callable[[], None] | None:
        """Call ``then`` when shards have responded about these names, or failed to respond.

        If they already have, ``then`` is called immediately, and the result is None. Otherwise the result is a function
        that cancels the call.
        """
        missing: set[object] = {name for name in names if self._is_new(name)}
        if not missing:
            then()
            return None
        return self._wait(missing, then)

    def _is_new(self, name: str) -> bool:
        return self._broker.find_topic(name) is None and not (self._wanted.get(name) or self._add(name)).is_answered

    def _wait(self, missing: set[object], then: Callable[[], None]) -> Callable[[], None]:
        waiting = _Waiting(self._broker, missing, then)
        self._waiting = [one for one in self._waiting if not one.is_over]
        self._waiting.append(waiting)
        return waiting.cancel

    def shard_of_id(self, topic_id: bytes) -> int | None:
        """Return the shard that has the topic with this id, or None if it is unknown."""
        if self._broker.topic_of_id(topic_id) is not None:
            return self._shards.own
        found = self._ids.get(topic_id)
        return None if found is None else found[0]

    def located(self, topic_ids: Collection[bytes], then: Callable[[], None]) -> Callable[[], None] | None:
        """Call ``then`` when the shards have responded about these topic ids, or failed to respond; see ``known``."""
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
        """Store the topics that a shard reported. Queries about them are sent to it from now on."""
        for topic in seen.topics:
            known = topic.known()
            was = self._wanted.get(known.name.full)
            if was is not None:
                self._forget(was)
            self._wanted[known.name.full] = _Wanted(shard, self._look, known)
            self._put(shard, known)
        self._go_on()

    # Queries

    def _go_on(self) -> None:
        if self._timer is None:
            self._timer = self._broker.loop.call_later(LOOK_S, self._look_again)

    def _look_again(self) -> None:
        """Send queries for all names, if there are any."""
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
                wanted.shard = self._place(name)  # the topic's shard may have been chosen since the last query
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
        self._links.look(shard, look, partial(self._answered, shard, look, then))

    def _answered(self, shard: int, look: Look, then: Callable[[], None], seen: Seen | None) -> None:
        self._asked[shard] -= 1
        if seen is not None:
            self._note(shard, look, seen)
        then()

    def _came(self, what: Collection[object]) -> None:
        for name in what:
            wanted = self._wanted.get(name) if isinstance(name, str) else None
            if wanted is not None:
                wanted.is_answered = True
        waiting = self._waiting
        for one in waiting:
            one.came(what)
        self._waiting = [one for one in self._waiting if not one.is_over]

    def _note(self, shard: int, look: Look, seen: Seen) -> None:
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
