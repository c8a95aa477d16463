"""The broker of several processes, as a protocol of one of them uses it.

Topics of this process are used directly. Each call for a topic of another process is one request over the link to it,
which repeats neither decoding nor permission checks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from polywire.broker.access import Access
from polywire.broker.api import TopicPending
from polywire.broker.broker import Broker
from polywire.broker.owners import NO_CALLER, Caller
from polywire.broker.record_verbs import check_alive
from polywire.broker.settings import BrokerSettings
from polywire.broker.sliced import SlicedWork
from polywire.broker.topics import Partition, Topic, missing
from polywire.clock import Clock
from polywire.errors import BrokerError
from polywire.log.base import Completion, Handle, Loop
from polywire.protocols.runtime.shards import Shards
from polywire.routing import messages
from polywire.routing.link import CLOGGED_BYTES, ShardLink
from polywire.routing.messages import Verb
from polywire.routing.requests import execute
from polywire.routing.topics import RemoteLog, RemoteTopics
from polywire.types import Buffer, Level, TopicName

FOUND_S: Final = 0.05  # how long an answer is remembered for the requests that waited for it


class RoutedBroker:
    """Implements the verbs of ``broker.api``, and ``Router``.

    ``_found`` has the answers to requests for topics that this process did not know, for ``FOUND_S``: the error, or None
    if the topic does not exist.
    """

    __slots__ = (
        "_found",
        "_links",
        "_local",
        "_remote",
        "access",
        "clock",
        "commit",
        "fetch",
        "loop",
        "probe",
        "settings",
        "settle",
        "shards",
        "sliced",
    )

    def __init__(self, local: Broker, shards: Shards) -> None:
        """Open the links to all other shards."""
        self._local: Final = local
        self.shards: Final = shards
        self._remote: Final = RemoteTopics()
        self._found: Final[dict[str, BrokerError | None]] = {}
        self.access: Final[Access] = local.access
        self.clock: Final[Clock] = local.clock
        self.loop: Final[Loop] = local.loop
        self.settings: Final[BrokerSettings] = local.settings
        self.sliced: Final[SlicedWork] = local.sliced
        self.commit: Final = local.commit
        self.fetch: Final = local.fetch  # it calls the log of the partition, wherever that is
        self.probe: Final = local.probe
        self.settle: Final = local.settle
        self._links: Final = {
            shard: ShardLink(shards, shard, self, local.loop) for shard in range(shards.count) if shard != shards.own
        }

    def topics_came(self, link: ShardLink, topics: messages.Topics) -> None:
        """See ``TopicsOwner``."""
        self._remote.apply(link, topics)

    # Topics

    def find_topic(self, full_name: str) -> Topic | None:
        """See ``api.Topics``."""
        topic = self._local.find_topic(full_name) or self._remote.find(full_name)
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
        raise TopicPending(full_name, partial(self._request_topic, Verb.FIND, shard, messages.Named(full_name)))

    def _request_topic(self, verb: Verb, shard: int, named: messages.Named, then: Callable[[], None]) -> Handle:
        def answered(result: messages.Empty | BrokerError) -> None:
            self._found[named.name] = result if isinstance(result, BrokerError) else None
            self.loop.call_later(FOUND_S, self._found.pop, named.name, None)
            then()

        return self._links[shard].call(verb, named, messages.Empty, answered)

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
        shard = self.shards.home(full_name)
        if shard == self.shards.own:
            return self._local.ensure_topic(full_name, by=by)
        error = self._found.get(full_name)
        if error is not None:
            raise error
        named = messages.Named(full_name, by_of(by))
        raise TopicPending(full_name, partial(self._request_topic, Verb.CREATE, shard, named))

    # Records

    def produce(
        self, partition: Partition, batch: Buffer, *, by: Caller = NO_CALLER, level: Level, done: Completion[int] | None
    ) -> None:
        """See ``api.Records``. Raises Busy(BUSY) if too many bytes are on the way to the other process."""
        log = partition.log
        if isinstance(log, RemoteLog):
            check_alive(partition)
            log.append(batch, by_of(by), level, done)
        else:
            self._local.produce(partition, batch, by=by, level=level, done=done)

    def wait(self, partition: Partition, offset: int, wake: Callable[[], None]) -> Handle:
        """See ``api.Records``."""
        log = partition.log
        if isinstance(log, RemoteLog):
            check_alive(partition)
            return log.wait(offset, wake)
        return self._local.wait(partition, offset, wake)

    def epoch_end(self, partition: Partition, epoch: int, then: Completion[int]) -> int | Handle:
        """See ``api.Records``."""
        log = partition.log
        if isinstance(log, RemoteLog):
            return log.find_epoch_end(epoch, then)
        return self._local.epoch_end(partition, epoch, then)

    def when_current(self, partition: Partition, then: Completion[None]) -> Handle | None:
        """See ``api.Records``."""
        log = partition.log
        return log.refresh(then) if isinstance(log, RemoteLog) else None

    # Requests of the `polywire` protocol

    def shard_of_topic(self, topic: Topic) -> int:
        """See ``Router``."""
        shard = self._remote.shard_of(topic)
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
            view, answered = memoryview(bytearray(frame)), partial(self.loop.call_soon, then)
            execute(self._local, by, view, answered, sees_files=sees_files)
            return

        def received(_: bytes, payload: memoryview) -> None:
            then(bytes(payload))

        self._links[shard].send(Verb.FORWARD, messages.Forward(by_of(by), sees_files), received, then, frame)

    # The log of this process

    @property
    def congested(self) -> bool:
        """See ``api.Settling``."""
        return self._local.congested


def by_of(caller: Caller) -> messages.By:
    """Return a caller for another process, which knows users by their names only."""
    if caller is NO_CALLER:
        return messages.NO_USER
    return messages.By("" if caller.principal is None else caller.principal.name, caller.owner)
