"""``RoutedBroker``: the broker that protocols use if there are several processes.

A call for a topic of this process runs directly. A call for a topic of another process is sent to that process as one
request. The other process neither decodes the client's request nor checks permissions again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, Final, cast

from polywire.broker.access import Access
from polywire.broker.api import Pending
from polywire.broker.broker import Broker
from polywire.broker.groups.commits import PositionVerbs
from polywire.broker.owners import NO_CALLER, Caller
from polywire.broker.participants import Latest
from polywire.broker.record_verbs import ProducerVerbs, RecordVerbs, check_alive
from polywire.broker.settings import BrokerSettings, TopicSettings
from polywire.broker.sliced import SlicedWork
from polywire.broker.topic_verbs import RemovalVerbs, TopicVerbs
from polywire.broker.topics import Partition, Streams, Topic, missing
from polywire.clock import Clock
from polywire.errors import BrokerError, Busy, ErrorCode, Missing, Unavailable
from polywire.log.base import Completion, Handle, Loop
from polywire.protocols.runtime.forwarded import Execution, Executor, Sender
from polywire.protocols.runtime.shards import Shards
from polywire.routing import messages
from polywire.routing.bindings import Bindings
from polywire.routing.calls import Method, by_of, method_of, methods_of, routed
from polywire.routing.groups import RoutedGroups
from polywire.routing.link import CLOGGED_BYTES, ShardLink
from polywire.routing.messages import Verb
from polywire.routing.participants import JOIN_EPOCH, ParticipantCalls
from polywire.routing.participants import METHODS as PARTICIPANT_METHODS
from polywire.routing.requests import execute
from polywire.routing.topics import Refresh, RemoteLog, RemoteTopics
from polywire.routing.users import RoutedUsers
from polywire.routing.values import VALUES_SHARD, Values, Watcher
from polywire.types import Buffer, KeyHash, Level, TopicName

FOUND_S: Final = 0.05  # how long the result of FIND is cached, so that all requests that waited for it can use it
PLACED_S: Final = 0.1  # time after which the shard with the fewest topics is determined again
CALL_S: Final = 30.0  # time limit for a call to another process whose result a request needs
ANSWER_S: Final = 1.0  # time limit for looking up a topic that this process does not know
# keys in ``_CallResults`` of results that are not those of a call
REPORTED: Final = (-1, "topics", b"")  # the error if other processes have not reported their topics in time
CURRENT: Final = (-1, "bounds", b"")  # the set of partitions whose bounds were refreshed, or the error
_CallResults = dict[tuple[int, str, bytes], Any]
"""Results or errors of calls to other processes, by shard, method and encoded arguments."""


class CallPending(Pending):
    """Raised by a call whose result must come from another process.

    The request that made the call is executed again inside ``with pending:``. Its calls then return the results in
    ``results``, or raise Pending for the next result that is missing.
    """

    def __init__(
        self, router: RoutedBroker, subject: str, then: Callable[[Callable[[], None]], Handle], results: _CallResults
    ) -> None:
        super().__init__(subject, then)
        self._router: Final = router
        self._results: Final = results

    def __enter__(self) -> None:
        self._router.call_results = self._results

    def __exit__(self, *_: object) -> None:
        self._router.call_results = None


class RoutedBroker:
    """The methods of ``broker.api``, and of ``Router``, for the topics of all processes."""

    __slots__ = (
        "_found",
        "_links",
        "_listed",
        "_placed",
        "access",
        "bindings",
        "call_results",
        "classic",
        "clock",
        "commit",
        "consumers",
        "elapsed",
        "executors",
        "fetch",
        "groups",
        "local",
        "loop",
        "participants",
        "probe",
        "processes",
        "remote_topics",
        "settings",
        "settle",
        "shards",
        "shares",
        "sliced",
        "streams",
        "transactions",
        "users",
        "values",
    )

    def __init__(self, local: Broker, shards: Shards) -> None:
        """Open links to all other processes."""
        self.local: Final = local
        self.shards: Final = shards
        self.remote_topics: Final = RemoteTopics(shards)
        # results of FIND by full name, for ``FOUND_S``: None if there is no such topic
        self._found: Final[dict[str, BrokerError | None]] = {}
        self._listed: tuple[int, list[Topic]] = (-1, [])
        self._placed: Iterator[int] | None = None
        self.call_results: _CallResults | None = None
        self.groups: Final = RoutedGroups(self, local.groups)
        self.access: Final[Access] = local.access
        self.bindings: Final = Bindings(local, shards.own)
        self.clock: Final[Clock] = local.clock
        self.loop: Final[Loop] = local.loop
        self.settings: Final[BrokerSettings] = local.settings
        self.sliced: Final[SlicedWork] = local.sliced
        self.participants: Final = local.participants
        self.classic: Final = local.classic
        self.streams: Final[Streams] = local.streams
        self.users: Final = cast(Access, RoutedUsers(self, local.access))
        self.values: Final = Values(local, is_first=shards.own == VALUES_SHARD)
        self.commit: Final = local.commit
        self.consumers: Final = local.consumers
        self.shares: Final = local.shares
        self.elapsed: Final = local.elapsed
        self.executors: Final[dict[str, Executor]] = {}
        self.transactions: Final = local.transactions
        self.processes: Final[dict[int, messages.Process]] = {}
        self.fetch: Final = local.fetch  # it calls the log of the partition, wherever that is
        self.probe: Final = local.probe
        self.settle: Final = local.settle
        if shards.own == VALUES_SHARD:
            local.access.salting_secret()  # other processes cannot make it
        self._links: Final = {
            shard: ShardLink(shards, shard, self, local.loop) for shard in range(shards.count) if shard != shards.own
        }
        local.participants.begin(
            ParticipantCalls(self, local.loop), lambda id_: shards.shard_by_hash(id_) == shards.own
        )

    def apply_topics(self, link: ShardLink, topics: messages.Topics) -> None:
        self.bindings.apply(link.shard, topics)
        if link.shard == VALUES_SHARD:
            self.values.apply(topics)
        if topics.values:
            link.confirm()
        self.remote_topics.apply(link, topics)

    def apply_process(self, link: ShardLink, process: messages.Process) -> None:
        if process.ports:
            self.processes[link.shard] = process

    def know_processes(self, shards: Iterable[int]) -> None:
        """Raise Pending until the client addresses of the processes of these shards are known."""
        unknown = {shard for shard in shards if shard != self.shards.own and shard not in self.processes}
        if unknown and self.call_results is None:
            raise CallPending(self, "process", partial(self._request_processes, unknown), {})

    def _request_processes(self, shards: set[int], then: Callable[[], None]) -> Handle:
        missing = set(shards)

        def received(shard: int, _: object) -> None:
            missing.discard(shard)
            if not missing:
                then()

        return Calls(self._links[shard].request_process(partial(received, shard)) for shard in shards)

    def wire_state(self, wire: str) -> Mapping[str, bytes]:
        """Return the values of a protocol's state. The first shard stores them; other processes know the last report."""
        return self.values.of(wire)

    def watch_values(self, changed: Watcher) -> None:
        """Call ``changed`` whenever a value of ``wire_state`` is stored or removed."""
        self.values.watch(changed)

    def require_reported(self) -> None:
        """Make sure that all processes have reported their topics, and the first one the state of protocols.

        Raises Pending until they have, or Unavailable after ``ANSWER_S``.
        """
        if self._links.keys() <= self.remote_topics.known:
            return
        known = {} if self.call_results is None else self.call_results
        if REPORTED in known:
            raise known[REPORTED]
        raise CallPending(self, "topics", partial(self._await_reports, known), known)

    def require_latest(self) -> None:
        """Make sure that topics which other processes have created or deleted until now are known. See ``shards.Parts``."""
        self.require_reported()
        with suppress(BrokerError):  # the topics of a process that does not respond are those that it has reported
            self._results(list(self._links), HAS, NO_IDS, ANSWER_S)

    def _await_reports(self, known: _CallResults, then: Callable[[], None]) -> Handle:
        def timed_out() -> None:
            known[REPORTED] = Unavailable(ErrorCode.STOPPING, "another process has not reported its topics (retry)")
            timer.cancel()
            then()

        def check() -> None:
            if REPORTED in known:
                return
            if self._links.keys() <= self.remote_topics.known:
                timer.cancel()
                then()
            else:
                self.remote_topics.when_known.append(check)

        timer = self.loop.call_later(ANSWER_S, timed_out)
        self.remote_topics.when_known.append(check)
        return timer

    def watch_topics(self, changed: Callable[[bytes], None]) -> None:
        """Call ``changed`` with the id of each topic that changes; before the change if it is a topic of this process."""
        self.local.watch_topics(changed)
        self.remote_topics.watchers.append(changed)

    # Topics

    def find_topic(self, full_name: str) -> Topic | None:
        """See ``api.Topics``."""
        topic = self.local.find_topic(full_name) or self.remote_topics.find(full_name)
        if topic is not None:
            return topic
        shard = self.shards.shard_of(full_name)
        if shard is None or shard == self.shards.own:
            return None
        if full_name in self._found:
            error = self._found[full_name]
            if error is not None:
                raise error
            return None
        raise Pending(full_name, partial(self._request_topic, Verb.FIND, shard, messages.Named(full_name)))

    def _request_topic(self, verb: Verb, shard: int, named: messages.Named, then: Callable[[], None]) -> Handle:
        def on_result(result: messages.Empty | BrokerError) -> None:
            timer.cancel()
            call.cancel()
            # if a third process is creating the topic, the repeated request asks that process, but only once
            if not isinstance(result, Busy) or named.name in self._found:
                self._found[named.name] = result if isinstance(result, BrokerError) else None
            self.loop.call_later(FOUND_S, self._found.pop, named.name, None)
            then()

        call = self._links[shard].call(verb, named, messages.Empty, on_result)
        timed_out = Unavailable(ErrorCode.STOPPING, f"the process of the topic does not respond name={named.name!r}")
        timer = self.loop.call_later(ANSWER_S, on_result, timed_out)
        return Calls((call, timer))

    def topic(self, full_name: str) -> Topic:
        """See ``api.Topics``."""
        topic = self.find_topic(full_name)
        if topic is None:
            raise missing(full_name)
        return topic

    def resource(self, full_name: str) -> Topic | TopicName:
        """See ``api.Topics``."""
        return self.find_topic(full_name) or TopicName.parse(full_name)

    def partition_count(self, full_name: str) -> int:
        """See ``api.Topics``."""
        topic = self.find_topic(full_name)
        return self.settings.partition_count if topic is None else len(topic.partitions)

    def ensure_topic(self, full_name: str, *, by: Caller = NO_CALLER) -> Topic:
        """See ``api.Topics``."""
        topic = self.find_topic(full_name)
        if topic is not None:
            return topic
        if not self.settings.auto_create:
            return self.topic(full_name)
        shard = self.shards.shard_by_hash(full_name)
        if shard == self.shards.own:
            try:
                return self.local.ensure_topic(full_name, by=by)
            except Busy:
                topic = self.find_topic(full_name)  # if another process has created it since
                if topic is None:
                    raise
                return topic
        error = self._found.get(full_name)
        if error is not None:
            raise error
        named = messages.Named(full_name, by_of(by))
        raise Pending(full_name, partial(self._request_topic, Verb.CREATE, shard, named))

    def topic_of_id(self, topic_id: bytes) -> Topic | None:
        """Return the topic with this id, or None."""
        return self.local.topic_of_id(topic_id) or self.remote_topics.find_id(topic_id)

    @property
    def topics_version(self) -> int:
        """See ``TopicLookup``."""
        return self.local.topics_version + self.remote_topics.version

    def topics(self, *, internal: bool = False) -> list[Topic]:
        """See ``TopicLookup``. With ``internal``, only topics of this process are returned, including internal ones."""
        if internal:
            return self.local.topics(internal=True)
        version, topics = self._listed
        if version != self.topics_version:
            topics = sorted([*self.local.topics(), *self.remote_topics.all()], key=_full_name)
            self._listed = self.topics_version, topics
        return list(topics)

    def make_topic(
        self,
        name: TopicName,
        partition_count: int | None = None,
        settings: TopicSettings | None = None,
        *,
        partition_count_min: int = 1,
        by: Caller = NO_CALLER,
        level: Level = Level.SYNCED,
        then: Callable[[Topic], None],
        done: Completion[int],
    ) -> bool:
        """See ``TopicVerbs``. If no process owns the name yet, a process with few topics creates the topic."""
        named = self.shards.shard_of(name.full)
        shard = self.next_shard() if named is None else named
        options: dict[str, Any] = {"partition_count_min": partition_count_min, "by": by, "level": level}

        def completed(result: int | BrokerError) -> None:
            if isinstance(result, Busy) and named is None and self.shards.shard_of(name.full) is not None:
                again()
            else:
                self._with_topic(name.full, then, done, result)

        def again() -> None:
            """Repeat the call, because another process has begun to create the topic, too."""
            try:
                self.make_topic(name, partition_count, settings, then=then, done=done, **options)
            except BrokerError as error:
                done(error)

        if shard != self.shards.own:
            self.call(shard, CREATE, (name, partition_count, settings), {**options, "done": completed})
            return False
        try:
            return self.local.make_topic(name, partition_count, settings, then=then, done=done, **options)
        except Busy:
            if named is not None or self.shards.shard_of(name.full) in (None, shard):
                raise
            again()
            return False

    def next_shard(self) -> int:
        """Return the shard for a new topic: the one with the fewest topics, and then each other shard in turn.

        New topics are counted with a delay, so the shard with the fewest topics is only determined again after
        ``PLACED_S``.
        """
        if self._placed is None:
            self._placed = count(self.shards.least_loaded())
            self.loop.call_later(PLACED_S, self._forget_placed)
        return next(self._placed) % self.shards.count

    def _forget_placed(self) -> None:
        self._placed = None

    def grow_topic(
        self,
        topic: Topic,
        partition_count: int,
        *,
        by: Caller = NO_CALLER,
        level: Level = Level.SYNCED,
        then: Callable[[Topic], None] | None = None,
        done: Completion[int] | None = None,
    ) -> bool:
        """See ``TopicVerbs``."""
        shard = self.shard_of_topic(topic)
        if shard == self.shards.own:
            return self.local.grow_topic(topic, partition_count, by=by, level=level, then=then, done=done)
        completed = partial(self._with_topic, topic.name.full, then, done)
        self.call(shard, GROW, (topic, partition_count), {"by": by, "level": level, "done": completed})
        return False

    def _with_topic(
        self,
        full_name: str,
        then: Callable[[Topic], None] | None,
        done: Completion[int] | None,
        result: int | BrokerError,
    ) -> None:
        """Call ``then`` with a topic that another process has created or changed, and ``done`` with the result."""
        # the other process has reported the topic before the result
        topic = self.find_topic(full_name) if not isinstance(result, BrokerError) else None
        if topic is not None and then is not None:
            then(topic)
        if done is not None:
            done(result)

    def delete_topics(
        self,
        topics: Sequence[Topic],
        *,
        ended: Callable[[Topic], None],
        then: Callable[[], None],
        level: Level = Level.SYNCED,
        done: Completion[int],
    ) -> None:
        """See ``TopicVerbs``. Topics of other processes are deleted at the same time."""

        def delete(topic: Topic, deleted: Completion[int]) -> None:
            def completed(result: int | BrokerError) -> None:
                if isinstance(result, Missing):
                    result = 0  # another request has deleted it
                if not isinstance(result, BrokerError):
                    ended(topic)
                deleted(result)

            self.delete_topic(topic, level=level, done=completed)

        local = [topic for topic in topics if self.shard_of_topic(topic) == self.shards.own]
        remote = [topic for topic in topics if self.shard_of_topic(topic) != self.shards.own]
        if len(local) == len(topics):
            self.local.delete_topics(topics, ended=ended, then=then, level=level, done=done)
            return

        def last(result: int | BrokerError) -> None:
            if not isinstance(result, BrokerError):
                then()
            done(result)

        def delete_local(deleted: Completion[int]) -> None:
            self.local.delete_topics(local, ended=ended, then=_nothing, level=level, done=deleted)

        _when_all([*[partial(delete, topic) for topic in remote], delete_local], last)

    def purge_topics(self, topics: Sequence[Topic], *, level: Level = Level.SYNCED, done: Completion[int]) -> None:
        """See ``RemovalVerbs``. Topics of other processes are purged at the same time."""
        by_shard: dict[int, list[Topic]] = {}
        for topic in topics:
            by_shard.setdefault(self.shard_of_topic(topic), []).append(topic)

        def purge(shard: int, purged: Completion[int]) -> None:
            if shard == self.shards.own:
                self.local.purge_topics(by_shard[shard], level=level, done=purged)
            else:
                self.call(shard, PURGE, (by_shard[shard],), {"level": level, "done": purged})

        _when_all([partial(purge, shard) for shard in by_shard], done)

    # Records

    def produce(
        self, partition: Partition, batch: Buffer, *, by: Caller = NO_CALLER, level: Level, done: Completion[int] | None
    ) -> None:
        """See ``api.Records``. Raises Busy(BUSY) if too many bytes wait for responses of the other process."""
        log = partition.log
        if isinstance(log, RemoteLog):
            check_alive(partition)
            log.append(batch, by_of(by), level, done)
        else:
            self.local.produce(partition, batch, by=by, level=level, done=done)

    def wait(self, partition: Partition, offset: int, wake: Callable[[], None]) -> Handle:
        """See ``api.Records``."""
        log = partition.log
        if isinstance(log, RemoteLog):
            check_alive(partition)
            return log.wait(offset, wake)
        return self.local.wait(partition, offset, wake)

    def epoch_end(self, partition: Partition, epoch: int, then: Completion[int]) -> int | Handle:
        """See ``api.Records``."""
        log = partition.log
        if isinstance(log, RemoteLog):
            return log.find_epoch_end(epoch, then)
        return self.local.epoch_end(partition, epoch, then)

    def owns(self, partition: Partition) -> bool:
        """See ``api.Records``."""
        return not isinstance(partition.log, RemoteLog)

    def when_current(self, partition: Partition, then: Completion[None]) -> Handle | None:
        """See ``api.Records``."""
        log = partition.log
        return log.refresh(then) if isinstance(log, RemoteLog) else None

    def require_current(self, partitions: Iterable[Partition]) -> None:
        """See ``api.Records``."""
        logs = {partition.log for partition in partitions if isinstance(partition.log, RemoteLog)}
        if not logs:
            return
        known = {} if self.call_results is None else self.call_results
        current = known.get(CURRENT, frozenset())
        if isinstance(current, BrokerError):
            raise current
        if not logs <= current:
            raise CallPending(self, "bounds", partial(self._refresh, logs, known), known)

    def _refresh(self, logs: Set[RemoteLog], known: _CallResults, then: Callable[[], None]) -> Handle:
        def finished(error: BrokerError | None) -> None:
            calls.cancel()
            known[CURRENT] = known.get(CURRENT, frozenset()) | logs if error is None else error
            then()

        timed_out = Unavailable(ErrorCode.STOPPING, "another process does not respond method=bounds")
        calls = Calls((Refresh(logs, finished), self.loop.call_later(CALL_S, finished, timed_out)))
        return calls

    # Requests of the `polywire` protocol

    def shard_of_topic(self, topic: Topic) -> int:
        """See ``Router``."""
        shard = self.remote_topics.shard_of(topic)
        return self.shards.own if shard is None else shard

    @property
    def is_clogged(self) -> bool:
        """See ``Router``."""
        return any(link.unanswered_bytes > CLOGGED_BYTES for link in self._links.values())

    def on_relief(self, callback: Callable[[], None]) -> None:
        """See ``Router``."""
        for link in self._links.values():
            if link.unanswered_bytes > CLOGGED_BYTES:
                link.waiting.add(callback)

    def forward(
        self, shard: int, by: Caller, frame: bytes, then: Completion[bytes], *, sees_files: bool = False
    ) -> None:
        """See ``Router``."""
        if shard == self.shards.own:
            view, respond = memoryview(bytearray(frame)), partial(self.loop.call_soon, then)
            execute(self.local, by, view, respond, sees_files=sees_files)
            return

        def received(_: bytes, payload: memoryview) -> None:
            then(bytes(payload))

        self._links[shard].send(Verb.FORWARD, messages.Forward(by_of(by), sees_files), received, then, frame)

    # Requests of other protocols

    def execute(
        self,
        shard: int,
        protocol: str,
        sender: Sender,
        requests: bytes,
        then: Completion[bytes],
        more: Callable[[bytes], None] | None = None,
    ) -> Execution:
        """See ``Forwarding``."""
        if shard == self.shards.own:
            run = self.executors[protocol](sender, memoryview(requests), then)
            run.more = more
            return run

        def received(head: bytes, payload: memoryview) -> None:
            if more is not None and messages.decode(head, messages.Responses).more:
                more(bytes(payload))
            else:
                then(bytes(payload))

        head = messages.Execute(protocol, sender, more is not None)
        return self._links[shard].send(Verb.EXECUTE, head, received, then, requests)

    # Transactions

    def join_epoch(self, id_: str, epoch: int, *, by: Caller) -> Latest | None:
        """Let this shard participate in a transaction that another shard coordinates. Raises Pending.

        See ``Participants.join_epoch``.
        """
        values = id_, epoch, self.shards.own
        found: Latest | None = self.call(self.shards.shard_by_hash(id_), JOIN_EPOCH, values, {"by": by})
        return found

    # Methods executed in the process of a topic

    def call_part(self, shard: int, part: str, function: Callable[..., Any], *values: Any, **options: Any) -> Any:
        """See ``shards.Parts``."""
        return self.call(shard, method_of(part, function), values, options)

    def partition_of_key(self, topic: Topic, key: Buffer, wire_hash: KeyHash) -> Partition:
        """See ``TopicLookup``."""
        return self.local.partition_of_key(topic, key, wire_hash)

    @property
    def router(self) -> RoutedBroker:
        """The broker itself; see ``calls.routed``."""
        return self

    commit_position = routed("commit_position", PositionVerbs.commit_position, "full_name")
    commit_positions = routed("commit_positions", PositionVerbs.commit_positions, "full_name")
    configure_topic = routed("configure_topic", TopicVerbs.configure_topic, "topic")
    delete_positions = routed("delete_positions", PositionVerbs.delete_positions, "full_name")
    delete_topic = routed("delete_topic", TopicVerbs.delete_topic, "topic")
    position = routed("position", PositionVerbs.position, "full_name")
    positions_in = routed("positions_in", PositionVerbs.positions_in, "full_name")
    bounds = routed("bounds", RecordVerbs.bounds, "partition")
    producer_last = routed("producer_last", ProducerVerbs.producer_last, "partition")
    producer_offset = routed("producer_offset", ProducerVerbs.producer_offset, "partition")
    producer_sequence = routed("producer_sequence", ProducerVerbs.producer_sequence, "partition")
    purge_topic = routed("purge_topic", RemovalVerbs.purge_topic, "topic")
    shrink_topic = routed("shrink_topic", TopicVerbs.shrink_topic, "topic")
    trim_partition = routed("trim_partition", RemovalVerbs.trim_partition, "partition")

    def shard_with(self, subject: Topic | Partition | str) -> int:
        """See ``calls.Router``. For the name of a topic that does not exist, the shard is determined by its hash."""
        if isinstance(subject, str):
            if self.local.find_topic(subject) is not None:
                return self.shards.own
            shard = self.shards.shard_of(subject)
            return self.shards.shard_by_hash(subject) if shard is None else shard
        return self.shard_of_topic(subject.topic if isinstance(subject, Partition) else subject)

    def call(self, shard: int, method: Method, values: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """See ``calls.Router``."""
        arguments, callback = method.encode(values, options)
        if not method.returns and (callback is not None or method.completion != "then"):
            self._links[shard].send(
                Verb.CALL,
                messages.Call(method.name),
                partial(_called, method, callback),
                callback or _ignore,
                arguments,
            )
            return None
        [result] = self._results([shard], method, arguments)
        if callback is not None:
            self.loop.call_soon(callback, 0)
        return result

    def call_all(self, method: Method, values: Sequence[Any], options: Mapping[str, Any]) -> list[Any]:
        """See ``calls.Router``."""
        arguments, _ = method.encode(values, options)
        return self._results(list(self._links), method, arguments)

    def _results(self, shards: Sequence[int], method: Method, arguments: bytes, limit_s: float = CALL_S) -> list[Any]:
        """Return the result of each shard. Raises Pending until all are known, then the first error among them.

        A call that takes longer than ``limit_s`` has the result Unavailable(STOPPING).
        """
        known = {} if self.call_results is None else self.call_results
        keys = [(shard, method.name, arguments) for shard in shards]
        missing = [key for key in keys if key not in known]
        if missing:
            raise CallPending(self, method.name, partial(self._send_calls, missing, method, known, limit_s), known)
        results = [known[key] for key in keys]
        for result in results:
            if isinstance(result, BrokerError):
                raise result
        return results

    def _send_calls(
        self,
        keys: Sequence[tuple[int, str, bytes]],
        method: Method,
        known: _CallResults,
        limit_s: float,
        then: Callable[[], None],
    ) -> Handle:
        """Call a method in other processes. Call ``then`` when all results are in ``known``."""
        calls, left = Calls(), set(keys)

        def on_result(key: tuple[int, str, bytes], result: Any) -> None:
            if key not in left:
                return
            known[key] = result
            left.discard(key)
            if not left:
                calls.cancel()
                then()

        def timed_out() -> None:
            error = Unavailable(ErrorCode.STOPPING, f"another process does not respond method={method.name}")
            for key in tuple(left):
                on_result(key, error)

        calls.append(self.loop.call_later(limit_s, timed_out))
        for key in keys:
            shard, name, arguments = key
            completed = partial(on_result, key)
            try:
                call = self._links[shard].send(
                    Verb.CALL, messages.Call(name), partial(_called, method, completed), completed, arguments
                )
                calls.append(call)
            except BrokerError as error:
                self.loop.call_soon(completed, error)
        return calls

    # The log of this process

    @property
    def congested(self) -> bool:
        """See ``api.Settling``."""
        return self.local.congested


class Calls(list[Handle]):
    """Handles that are cancelled together. Implements ``Handle``."""

    def cancel(self) -> None:
        """Cancel all of them."""
        for call in self:
            call.cancel()


def _called(method: Method, then: Completion[Any] | None, _: bytes, payload: memoryview) -> None:
    """Pass the result of a call to ``then``."""
    if then is not None:
        then(method.decode_result(payload))


def _ignore(_: object) -> None:
    """Ignore the result of a call."""


def _nothing() -> None:
    pass


def _full_name(topic: Topic) -> str:
    return topic.name.full


def _when_all(starts: Sequence[Callable[[Completion[int]], None]], done: Completion[int]) -> None:
    """Start several operations. Call ``done`` once all have ended, with the first error if there is one."""
    results: list[int | BrokerError] = []

    def ended(result: int | BrokerError) -> None:
        results.append(result)
        if len(results) == len(starts):
            done(next((result for result in results if isinstance(result, BrokerError)), results[0]))

    for start in starts:
        try:
            start(ended)
        except BrokerError as error:
            ended(error)


def _create(
    broker: Broker,
    name: TopicName,
    partition_count: int | None = None,
    settings: TopicSettings | None = None,
    *,
    partition_count_min: int = 1,
    by: Caller = NO_CALLER,
    level: Level = Level.SYNCED,
    done: Completion[int],
) -> None:
    broker.make_topic(
        name,
        partition_count,
        settings,
        partition_count_min=partition_count_min,
        by=by,
        level=level,
        then=_ignore,
        done=done,
    )


def _grow(
    broker: Broker, topic: Topic, partition_count: int, *, by: Caller, level: Level, done: Completion[int]
) -> None:
    broker.grow_topic(topic, partition_count, by=by, level=level, done=done)


def _has(broker: Broker, ids: tuple[bytes, ...]) -> bool:
    """Return whether this process has one of these topics. The calling process gets the topic before this result."""
    return any(broker.topic_of_id(topic_id) is not None for topic_id in ids)


HAS: Final = Method("has", _has)
NO_IDS: Final = HAS.encode(((),), {})[0]  # a call with these arguments only makes a process report its changes
CREATE: Final = Method("create", _create)
GROW: Final = Method("grow", _grow)
PURGE: Final = Method("purge_topics", RemovalVerbs.purge_topics)
METHODS: Final = methods_of(RoutedBroker, RoutedGroups, RoutedUsers) | {
    method.name: method for method in (CREATE, GROW, HAS, PURGE, *PARTICIPANT_METHODS)
}
"""All methods that other processes may call, by name."""
