"""Execute the calls that another process of the broker sends over a link.

* Batches of a partition are appended in the order in which they arrive. If the log is full, a batch waits, and later
  batches of the same partition wait behind it. All other calls continue.
* The state of a topic is sent before the response to a call that creates or finds the topic.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from hmac import compare_digest
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import msgspec

from polywire.broker.access import REPLICATED, Principal, User
from polywire.broker.changes import TopicState, WireStateSet
from polywire.broker.owners import ITSELF, LINKS_CALLER, NO_CALLER, Caller
from polywire.broker.topics import is_internal
from polywire.errors import BrokerError, Busy, ErrorCode, Missing, PeerError, Unavailable
from polywire.log.base import Completion, Handle, Read
from polywire.protocols.polywire import messages as polywire_messages
from polywire.protocols.polywire.codec import ERROR, MORE, NO_PREFIX, PREFIX_BYTES, decode_prefix
from polywire.protocols.polywire.errors import failure_of
from polywire.protocols.runtime.append_queue import AppendQueue, is_full
from polywire.protocols.runtime.forwarded import Executor, ForwardedRequests
from polywire.protocols.runtime.framed import FramedSession
from polywire.protocols.runtime.sequential import CLOSED
from polywire.protocols.runtime.session import Output, begins_with
from polywire.protocols.runtime.shards import KEY_BYTES
from polywire.routing import messages
from polywire.routing.bindings import value_of
from polywire.routing.broker import METHODS
from polywire.routing.calls import Method, method_of
from polywire.routing.link import LARGE_BYTES
from polywire.routing.messages import MAGIC, Key, Verb, encode
from polywire.routing.requests import execute
from polywire.routing.values import Subscribers
from polywire.types import Buffer, Level

if TYPE_CHECKING:
    from polywire.broker.broker import Broker
    from polywire.broker.topics import Partition, Topic

WIRE: Final = "link"
BUSY_WAIT_S: Final = 30.0  # how long batches wait for space in the log; the same as in the protocols
TOPICS_AT_ONCE: Final = 100  # topics in one report, which takes less than a millisecond
# Larger requests are copied. Pinned, they would occupy the link's receive buffer, and the link would pause.
COPIED_BYTES_MIN: Final = 1024 * 1024
REPORTED_STATE: Final = {"iggy": "", "flux": "broker/", **dict.fromkeys(REPLICATED, "")}
"""State that is reported to all processes: of protocols, and the users. The prefix of reported keys by protocol."""
VERB_AT: Final = 4  # position of the verb in a frame of the `polywire` protocol
_PRODUCE: Final = int(polywire_messages.Verb.PRODUCE)
JOIN: Final = "groups.join"
LEAVE: Final = "groups.leave"
OPENING_BYTES: Final = len(MAGIC) + KEY_BYTES


class LinkSession(FramedSession["Broker"]):
    """One link. Each call gets one response, unless its ``Verb`` says otherwise."""

    __slots__ = (
        "_applied",
        "_calls",
        "_changed",
        "_end_watches",
        "_executors",
        "_key",
        "_members",
        "_owed",
        "_parts",
        "_prefix",
        "_process",
        "_responses",
        "_subscribers",
        "_subscription",
        "_value_reports",
        "_values",
        "_waiting",
        "_when_applied",
    )

    def __init__(
        self,
        broker: Broker,
        key: bytes,
        process: Callable[[], messages.Process],
        executors: Mapping[str, Executor],
        parts: Mapping[str, Part],
        subscribers: Subscribers,
        output: Output,
        resume: Callable[[], None],
    ) -> None:
        super().__init__(broker, output, resume)
        self._key = key
        self._process: Final = process
        self._executors: Final = executors
        self._parts: Final = parts
        # protocols of the group members that stay members while they are connected to the other process
        self._members: dict[tuple[str, str, str], str] = {}
        self._responses: list[Buffer] = []
        self._calls: dict[int, Handle] = {}
        self._changed: set[bytes] = set()  # ids of topics to report
        self._owed = 0  # number of responses that are still to be sent
        self._prefix = NO_PREFIX
        self._subscription = 0  # correlation id of SUBSCRIBE
        self._values: dict[tuple[str, str], messages.Value] = {}  # values to report
        self._subscribers: Final = subscribers
        # the number of sent reports with values, and how many of them the other process has applied
        self._value_reports = self._applied = 0
        # callbacks, each with the number of reports that must be applied first
        self._when_applied: deque[tuple[int, Callable[[], None]]] = deque()
        self._waiting: dict[Partition, AppendQueue] = {}  # batches that wait for space in the log
        self._end_watches: tuple[Callable[[], None], ...] = ()

    @property
    def frame_bytes_max(self) -> int:
        """Maximum length of a frame."""
        return PREFIX_BYTES + messages.REQUEST_BYTES_MAX

    def owes(self) -> bool:
        return self._owed > 0

    def _frame_bytes(self, data: memoryview, at: int) -> int:
        if self._key:
            return OPENING_BYTES
        if len(data) - at < PREFIX_BYTES:
            return 0
        limit = messages.REQUEST_BYTES_MAX
        self._prefix = decode_prefix(data, at, length_max=limit, head_bytes_max=limit)
        return PREFIX_BYTES + self._prefix.length

    def _take(self, data: memoryview, at: int, end: int) -> bool:
        if self._key:
            if not compare_digest(bytes(data[at:end]), MAGIC + self._key):
                raise PeerError("only processes of this broker can connect here", fatal=True)
            self._key = b""
            return True
        prefix = self._prefix
        head = at + PREFIX_BYTES
        payload = head + prefix.head_bytes
        kind = messages.REQUESTS.get(prefix.verb)
        if kind is None:
            raise PeerError(f"unknown verb verb={prefix.verb}", fatal=True)
        request = messages.decode(data[head:payload], kind)
        self._owed += 1
        try:
            COMMANDS[prefix.verb](self, prefix.correlation, request, data[payload:end])
        except BrokerError as error:
            self._refuse(prefix.correlation, error)
        return True

    # Responses

    def _respond(self, correlation: int, head: msgspec.Struct) -> None:
        self._owed -= 1
        self._send(encode(0, correlation, head))

    def _refuse(self, correlation: int, error: BrokerError) -> None:
        self._owed -= 1
        self._send(encode(0, correlation, failure_of(error), flags=ERROR))

    def _ended(self, correlation: int, result: Any, kind: Callable[[Any], msgspec.Struct]) -> None:
        """Respond to a call. The head of the response is ``kind(result)``, or the error if ``result`` is one."""
        self._calls.pop(correlation, None)
        if self._phase is CLOSED:
            return
        if isinstance(result, BrokerError):
            self._refuse(correlation, result)
        else:
            self._respond(correlation, kind(result))
        self._end_when_done()

    def _send(self, frame: bytes) -> None:
        self._responses.append(frame)
        if not self._owed and not self._receiving:  # no other response will be ready in this pass
            self._flush()
        elif len(self._responses) == 1:
            self.broker.loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Send all responses that are ready with one write."""
        responses, self._responses = self._responses, []
        if responses and self._phase is not CLOSED:
            self.output.write(responses[0] if len(responses) == 1 else b"".join(responses))

    # Topics

    def _subscribe(self, correlation: int, head: messages.Subscribe, _: memoryview) -> None:
        self._owed -= 1  # reports are sent as long as the link is open
        self._subscription = correlation
        broker = self.broker
        self._end_watches = broker.watch_topics(self._topic_changed), broker.watch_bindings(self._binding_changed)
        values = [value_of(*name, broker.groups.binding(*name)) for name in broker.groups.bindings()]
        if head.values:
            self._end_watches += (broker.watch_wire_state(self._value_changed),)
            values += [
                messages.Value(wire, key, value)
                for wire, begin in REPORTED_STATE.items()
                for key, value in broker.wire_state(wire).items()
                if key.startswith(begin)
            ]
        self._values = {(value.wire, value.key): value for value in values}
        self._subscribers.all.add(self)
        self._report((), (), begins=True)
        topics = [topic.id for topic in self.broker.topics()][::-1]
        self.broker.sliced.put(partial(self._report_some, topics))

    def _report_some(self, topics: list[bytes], end: float) -> bool:
        """Report topics until the end of the time slice. Return whether topics are left."""
        while topics and self._phase is not CLOSED:
            self._changed.update(topics[-TOPICS_AT_ONCE:])
            del topics[-TOPICS_AT_ONCE:]
            self._report_changes()
            if self.broker.clock.monotonic() >= end:
                return True
        if self._phase is not CLOSED:
            self._report((), (), ends=True)
        return False

    def _topic_changed(self, topic_id: bytes) -> None:
        """Report the state of a topic after the current pass of the loop. The change is made after this call."""
        self._changed.add(topic_id)
        if len(self._changed) == 1:
            self.broker.loop.call_soon(self._report_changes)

    def _value_changed(self, change: WireStateSet) -> None:
        if change.wire in REPORTED_STATE and change.key.startswith(REPORTED_STATE[change.wire]):
            self._report_value(messages.Value(change.wire, change.key, change.value))

    def _binding_changed(self, wire: str, name: str) -> None:
        self._report_value(value_of(wire, name, self.broker.groups.binding(wire, name)))

    def _report_value(self, value: messages.Value) -> None:
        """Report a value at the end of this pass."""
        self._values[value.wire, value.key] = value
        self.broker.loop.call_soon(self._report_changes)

    def _report_changes(self) -> None:
        changed, self._changed = list(self._changed), set()
        if (changed or self._values) and self._phase is not CLOSED:
            topics = {topic_id: self.broker.topic_of_id(topic_id) for topic_id in changed}
            states = [topic.state() for topic in topics.values() if topic is not None and not is_internal(topic.name)]
            self._report(states, [topic_id for topic_id, topic in topics.items() if topic is None])

    def _report(
        self, states: Sequence[TopicState], deleted: Sequence[bytes], *, begins: bool = False, ends: bool = False
    ) -> None:
        values, self._values = tuple(self._values.values()), {}
        self._value_reports += bool(values)
        head = messages.Topics(tuple(states), tuple(deleted), begins, ends, values)
        self._send(encode(0, self._subscription, head, flags=MORE))

    @property
    def is_behind(self) -> bool:
        """See ``values.Subscriber``."""
        return bool(self._values) or self._applied < self._value_reports

    def when_applied(self, then: Callable[[], None]) -> None:
        """See ``values.Subscriber``."""
        self._when_applied.append((self._value_reports + bool(self._values), then))

    def _confirmed(self, _: int, __: messages.Empty, ___: memoryview) -> None:
        self._owed -= 1
        self._applied += 1
        while self._when_applied and self._when_applied[0][0] <= self._applied:
            self._when_applied.popleft()[1]()

    def _find(self, correlation: int, named: messages.Named, _: memoryview) -> None:
        topic = self.broker.find_topic(named.name)
        if topic is not None:
            self._changed.add(topic.id)
        self._report_changes()
        self._respond(correlation, messages.Empty())

    def _create(self, correlation: int, named: messages.Named, _: memoryview) -> None:
        self.broker.ensure_topic(named.name, by=self.caller(named.by))
        self._report_changes()
        self._respond(correlation, messages.Empty())

    # Requests of the `polywire` protocol

    def caller(self, by: messages.By) -> Caller:
        """See ``Receiver``."""
        if by.is_broker:
            return ITSELF
        if by == messages.NO_USER:
            return NO_CALLER
        if by.owner == LINKS_CALLER.owner:
            return LINKS_CALLER
        if not by.user:
            return Caller(None, by.owner)
        return Caller(self.broker.access.vouched(by.user), by.owner)

    def principal(self, sent: Principal) -> Principal:
        """See ``Receiver``."""
        return self.broker.access.acting(sent)

    def user(self, user_id: int) -> User:
        """See ``Receiver``."""
        return self.broker.access.user(user_id)

    def _forward(self, correlation: int, head: messages.Forward, frame: memoryview) -> None:
        if self._waiting and frame[VERB_AT] == _PRODUCE:
            raise Busy(ErrorCode.BUSY, "batches of another connection wait for space in the log (retry)")
        respond = partial(self._forwarded, correlation)
        by = self.caller(head.by)
        if len(frame) > COPIED_BYTES_MIN:
            execute(self.broker, by, memoryview(bytearray(frame)), respond, sees_files=head.sees_files)
        else:
            execute(self.broker, by, frame, respond, pin=self.output.pin, sees_files=head.sees_files)

    def _forwarded(self, correlation: int, frame: bytes) -> None:
        self._owed -= 1
        if self._phase is not CLOSED:
            self._report_changes()
            head = encode(0, correlation, messages.Empty(), payload_bytes=len(frame))
            if len(frame) < LARGE_BYTES:
                self._send(head + frame)
            else:
                self._flush()
                self.output.write_many([head, frame])
            self._end_when_done()

    # Requests of other protocols

    def _execute(self, correlation: int, head: messages.Execute, requests: memoryview) -> None:
        executor = self._executors.get(head.protocol)
        if executor is None:
            raise Unavailable(ErrorCode.STOPPING, f"this process does not speak the protocol name={head.protocol!r}")
        run = executor(head.sender, requests, partial(self._executed, correlation))
        self._calls[correlation] = run
        if head.in_pieces:
            run.more = partial(self._send_piece, correlation)

    def _send_piece(self, correlation: int, piece: bytes) -> None:
        head = encode(0, correlation, messages.Responses(more=True), payload_bytes=len(piece), flags=MORE)
        self._flush()
        self.output.write_many([head, piece])

    def _credit(self, _: int, head: messages.Credit, __: memoryview) -> None:
        self._owed -= 1
        run = self._calls.get(head.correlation)
        if isinstance(run, ForwardedRequests):
            run.credit(head.count)

    def _executed(self, correlation: int, responses: bytes | BrokerError) -> None:
        self._calls.pop(correlation, None)
        if isinstance(responses, BrokerError):
            self._ended(correlation, responses, messages.Appended)
        else:
            self._forwarded(correlation, responses)

    # Methods of the broker

    def _report_process(self, correlation: int, _: messages.Empty, __: memoryview) -> None:
        self._respond(correlation, self._process())

    def _call(self, correlation: int, head: messages.Call, arguments: memoryview) -> None:
        target, method = self._method(head.method)
        sent = method.execute(target, arguments, self, partial(self._called, correlation, method))
        if sent.get("connected"):
            self._members[sent["group"], sent["topic"], sent["member"]] = sent["wire"]
        elif head.method == LEAVE:
            self._members.pop((sent["group"], sent["topic"], sent["member"]), None)

    def _method(self, name: str) -> tuple[object, Method]:
        """Return a method, and the object to call it on: the broker, a part of it, or an object of a protocol."""
        method = METHODS.get(name)
        if method is not None:
            return (attrgetter(method.part)(self.broker) if method.part else self.broker), method
        part = self._parts.get(name.partition(".")[0])
        method = None if part is None else part.methods.get(name)
        if part is None or method is None:
            raise PeerError(f"unknown method name={name!r}", fatal=True)
        return part.target, method

    def _called(self, correlation: int, method: Method, result: Any) -> None:
        if self._phase is CLOSED:
            return
        if isinstance(result, BrokerError):
            self._refuse(correlation, result)
        else:
            self._report_changes()
            encoded = method.encode_result(result)
            self._owed -= 1
            self._send(encode(0, correlation, messages.Empty(), payload_bytes=len(encoded)) + encoded)
        self._end_when_done()

    # Records

    def _wait(self, correlation: int, head: messages.Wait, _: memoryview) -> None:
        partition = self.partition(head)
        woken = partial(self._ended, correlation, 0, kind=_empty)
        self._calls[correlation] = self.broker.wait(partition, head.offset, woken)

    def _cancel(self, _: int, head: messages.Cancel, __: memoryview) -> None:
        self._owed -= 1
        call = self._calls.pop(head.correlation, None)
        if call is not None:
            call.cancel()
            self._owed -= 1

    def topic(self, topic_id: bytes) -> Topic:
        """See ``Receiver``."""
        topic = self.broker.topic_of_id(topic_id)
        if topic is None:
            raise Missing(ErrorCode.TOPIC_MISSING, "topic was deleted")
        return topic

    def partition(self, partition_id: messages.PartitionId) -> Partition:
        """See ``Receiver``."""
        topic = self.broker.topic_of_id(partition_id.topic_id)
        if topic is None or partition_id.partition >= len(topic.partitions):
            raise Missing(ErrorCode.PARTITION_MISSING, f"partition was deleted partition={partition_id.partition}")
        found: Partition = topic.partitions[partition_id.partition]
        return found

    def _produce(self, correlation: int, head: messages.Produce, batch: memoryview) -> None:
        partition = self.partition(head)
        done = partial(self._ended, correlation, kind=messages.Appended)
        by, level = self.caller(head.by), Level(head.level)
        queue = self._waiting.get(partition)
        if queue is None:
            try:
                self.broker.produce(partition, batch, by=by, level=level, done=done)
                return
            except BrokerError as error:
                if not is_full(error):
                    raise
            queue = AppendQueue(self.broker, BUSY_WAIT_S, partial(self._stopped_waiting, partition))
            self._waiting[partition] = queue
        queue.produce(partition, bytearray(batch), level, done, by=by)
        if not queue.waiting:
            self._stopped_waiting(partition)

    def _stopped_waiting(self, partition: Partition) -> None:
        self._waiting.pop(partition, None)

    def _fetch(self, correlation: int, head: messages.Fetch, _: memoryview) -> None:
        partition = self.partition(head)
        then = partial(self._fetched, correlation, partition)
        read = self.broker.fetch(
            partition, head.offset, bytes_max=head.bytes_max, then=then, offset_end=head.offset_end
        )
        if isinstance(read, Read):
            then(read)
        else:
            self._calls[correlation] = read

    def _fetched(self, correlation: int, partition: Partition, read: Read | BrokerError) -> None:
        self._calls.pop(correlation, None)
        if isinstance(read, BrokerError):
            self._ended(correlation, read, messages.Appended)
            return
        self._owed -= 1
        size = sum([len(chunk) for chunk in read.chunks])
        fetched = messages.Fetched(read.next_offset, read.readable_offset, _bounds(partition))
        self._flush()
        self.output.write_many([encode(0, correlation, fetched, payload_bytes=size), *read.chunks], read.pin.release)
        self._end_when_done()

    def _report_bounds(self, correlation: int, head: messages.PartitionId, _: memoryview) -> None:
        self._respond(correlation, _bounds(self.partition(head)))

    def _report_all_bounds(self, correlation: int, head: messages.PartitionIds, _: memoryview) -> None:
        bounds: list[messages.Bounds | None] = []
        for partition_id in head.ids:
            with suppress(Missing):
                bounds.append(_bounds(self.partition(partition_id)))
                continue
            bounds.append(None)
        self._respond(correlation, messages.AllBounds(tuple(bounds)))

    def _search(self, correlation: int, head: messages.LookUp, _: memoryview) -> None:
        log = self.partition(head).log
        then: Completion[int] = partial(self._ended, correlation, kind=messages.Appended)
        if head.key == Key.TIME:
            found = log.offset_at(head.value, then)
        elif head.key == Key.OFFSET:
            found = log.address_of_offset(head.value, then)
        elif head.key == Key.EPOCH:
            found = log.epoch_end(head.value)
        else:
            found = log.offset_of_address(head.value, then, covering=head.key == Key.COVERED_ADDRESS)
        if isinstance(found, int):
            then(found)
        else:
            self._calls[correlation] = found

    def close(self) -> None:
        """Cancel all calls, because the link is closed. Batches that wait for space in the log are still appended.

        Members of groups that do not send heartbeats leave, because the other process may have exited. If it has not,
        their next request joins again.
        """
        self._enter(CLOSED)
        for end_watch in self._end_watches:
            end_watch()
        for call in self._calls.values():
            call.cancel()
        self._calls.clear()
        self._responses.clear()
        self._subscribers.all.discard(self)
        while self._when_applied:
            self._when_applied.popleft()[1]()
        for (group, topic, member), wire in self._members.items():
            with suppress(BrokerError):  # another process or the expiry has removed the member
                self.broker.groups.leave(group, topic, member, None, wire=wire, by=ITSELF)


def _empty(_: int) -> messages.Empty:
    return messages.Empty()


def _bounds(partition: Partition) -> messages.Bounds:
    log = partition.log
    return messages.Bounds(log.first_offset, log.next_offset, log.readable_offset, log.next_address, log.stored_bytes)


COMMANDS: Final[dict[int, Callable[[LinkSession, int, Any, memoryview], None]]] = {
    Verb.SUBSCRIBE: LinkSession._subscribe,
    Verb.FIND: LinkSession._find,
    Verb.CREATE: LinkSession._create,
    Verb.PRODUCE: LinkSession._produce,
    Verb.FETCH: LinkSession._fetch,
    Verb.BOUNDS: LinkSession._report_bounds,
    Verb.LOOK_UP: LinkSession._search,
    Verb.WAIT: LinkSession._wait,
    Verb.CANCEL: LinkSession._cancel,
    Verb.FORWARD: LinkSession._forward,
    Verb.CALL: LinkSession._call,
    Verb.PROCESS: LinkSession._report_process,
    Verb.EXECUTE: LinkSession._execute,
    Verb.ALL_BOUNDS: LinkSession._report_all_bounds,
    Verb.CREDIT: LinkSession._credit,
    Verb.APPLIED: LinkSession._confirmed,
}


class Part:
    """An object of a protocol, and the functions that other processes may call on it."""

    def __init__(self, name: str, target: object, functions: Iterable[Callable[..., Any]]) -> None:
        self.name: Final = name
        self.target: Final = target
        self.methods: Final = {method.name: method for method in map(partial(method_of, name), functions)}


class RouterFactory:
    """Creates the sessions of links that other processes open. Implements ``SessionFactory``."""

    __slots__ = ("_broker", "_executors", "_key", "_parts", "_process", "_subscribers")

    wire: Final = WIRE

    def __init__(
        self,
        broker: Broker,
        key: bytes,
        process: Callable[[], messages.Process] | None = None,
        executors: Mapping[str, Executor] = MappingProxyType({}),
        parts: dict[str, Part] | None = None,
    ) -> None:
        """Create the factory.

        Args:
            broker: the broker of this process.
            key: shared secret of the processes.
            process: returns the address of this process.
            executors: functions that execute a client's requests, by protocol.
            parts: objects whose functions can be called, by name.
        """
        self._executors: Final = executors
        self._broker: Final = broker
        self._key: Final = key
        self._process: Final = process or partial(messages.Process, broker.epoch)
        self._parts: Final = {} if parts is None else parts
        self._subscribers: Final = Subscribers(broker.loop)
        broker.when_applied = self._subscribers.when_applied

    def add(self, part: Part) -> None:
        """Let other processes call the functions of an object."""
        self._parts[part.name] = part

    def recognise(self, prefix: bytes) -> bool | None:
        return begins_with(prefix, MAGIC)

    def open(self, output: Output, resume: Callable[[], None]) -> LinkSession:
        shared = self._process, self._executors, self._parts, self._subscribers
        return LinkSession(self._broker, self._key, *shared, output, resume)
