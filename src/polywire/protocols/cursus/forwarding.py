"""Forward Cursus requests to the process that owns the topic or transaction, which executes them (decision 0130).

Most commands are executed by the process that owns their topic. Those that begin or end transactions are executed by
the process that coordinates the transactional id (decision 0129).

The process that forwards a request has authenticated the client. The process that executes it checks permissions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, NamedTuple, Protocol

import msgspec

from polywire.broker.topics import Partition
from polywire.errors import BrokerError
from polywire.log.base import Completion, Handle
from polywire.protocols.cursus.context import WIRE, CursusBroker, CursusParts, CursusState
from polywire.protocols.cursus.groups import TRANSACTION_KEYS
from polywire.protocols.cursus.messages import (
    PREFIX_BYTES,
    Dialect,
    Request,
    bodies_of,
    frame,
)
from polywire.protocols.cursus.produce import close_if_lost
from polywire.protocols.cursus.reply_slots import Answer
from polywire.protocols.cursus.session import BARE, Command, CursusSession, TakeBatch
from polywire.protocols.runtime import forwarded as runtime
from polywire.protocols.runtime.forwarded import ForwardedRequests, Sender
from polywire.protocols.runtime.off_loop import LONG_BYTES
from polywire.protocols.runtime.session import Output

ANYWHERE: Final = frozenset(
    {"AUTH", "HELP", "EXIT", "SETGROUP", "PROTOCOL_INFO", "NEGOTIATE", "FIND_COORDINATOR", "STREAM"}
    | {"LIST_CLUSTER", "CLUSTER_STATUS", "ELECT_LEADER", "LIST_GROUPS", "GROUP_STATUS"}
)
"""Commands that the process of the client's connection executes."""
AT_COORDINATOR: Final = frozenset({"INIT_PRODUCER_ID", "BEGIN_TXN", "TXN_STATUS", "END_TXN"})
"""Commands for the process that coordinates the transactional id."""


class Router(CursusParts, runtime.Forwarding, Protocol):
    """The processes of this broker. See ``RoutedBroker``."""


class Origin(msgspec.Struct, frozen=True, array_like=True):
    """The connection of a client, as far as a forwarded request depends on it.

    Attributes:
        dialect: of the client's latest unambiguous request.
        host: address that the client has used, which responses contain.
        group: set by SETGROUP.
        features: enabled by NEGOTIATE.
    """

    dialect: Dialect | None
    host: str
    port: int
    group: str
    features: frozenset[str]


class Client(NamedTuple):
    """The client of a forwarded request.

    It is determined as soon as the guard has admitted the request, because the guard then admits other requests.
    """

    user: str | None
    peer: str
    origin: Origin


class ForwardedSession(CursusSession):
    """Executes requests that another process forwards."""

    __slots__ = ("_origin",)

    def __init__(
        self,
        state: CursusState,
        commands: Mapping[str, Command],
        take_batch: TakeBatch,
        sender: Sender,
        output: Output,
        resume: Callable[[], None],
    ) -> None:
        super().__init__(state, commands, take_batch, output, resume)
        origin = self._origin = msgspec.msgpack.decode(sender.context, type=Origin)
        self.spoken, self.group, self.features = origin.dialect, origin.group, origin.features

    def _take(self, data: memoryview, at: int, end: int) -> bool:
        """Execute a frame, which the other process has decompressed."""
        body = data[at + PREFIX_BYTES : end]
        return self._begin_long(body, None) if len(body) > LONG_BYTES else self._take_plain(body, body, None)

    def _forwards(self, command: Command, request: Request, body: memoryview) -> bool:
        return False

    @property
    def address(self) -> tuple[str, int]:
        return self._origin.host, self._origin.port


def execute(
    state: CursusState,
    commands: Mapping[str, Command],
    take_batch: TakeBatch,
    sender: Sender,
    requests: memoryview,
    then: Completion[bytes],
) -> ForwardedRequests:
    """Execute forwarded requests. See ``Executor``. Raises Denied if the client's user has been deleted."""
    user = None if sender.user is None else state.broker.access.vouched(sender.user, sender.peer)
    run = ForwardedRequests(state.broker.loop, requests, sender.peer, user, then)
    return run.run(partial(ForwardedSession, state, commands, take_batch, sender))


class Forwarding:
    """Decides where requests are executed. The sessions of clients call it; see ``CursusState.forward``."""

    __slots__ = ("_local", "_router")

    def __init__(self, local: CursusBroker, router: Router) -> None:
        self._local: Final = local
        self._router: Final = router

    def __call__(self, session: CursusSession, command: Command, request: Request, body: memoryview) -> bool:
        """Forward a request, or return False if this process executes it. Raises Refused or Pending."""
        shard = self._shard_of(session, request)
        if shard is None:
            return False
        session.state.guard.prove(session, request)
        waits = request.name == "CONSUME" and request.options.get("wait_ms", "0") != "0"
        answer = session.later(request.dialect, blocking=not (command.pipelined or waits))
        client, then = self.client(session), partial(answer_with, answer)
        if request.name == "CREATE":
            then = partial(self._created, client, answer, request.options["topic"], shard, bytes(body))
        self.send(client, answer, shard, bytes(body), then)
        return True

    def _created(
        self, client: Client, answer: Answer, name: str, shard: int, body: bytes, frames: bytes | BrokerError
    ) -> None:
        """Send the response to CREATE. If a third process has begun to create the topic, execute CREATE there instead."""
        owner = self._router.shards.shard_of(name)
        if isinstance(frames, BrokerError) or owner in (None, shard):
            answer_with(answer, frames)
            return
        try:
            self.send(client, answer, owner, body, partial(answer_with, answer))
        except BrokerError as error:
            answer.fail(error)

    def _shard_of(self, session: CursusSession, request: Request) -> int | None:
        """Return the shard that executes a request; None if it is this one."""
        name, shards = request.options.get("topic", ""), self._router.shards
        if request.name in AT_COORDINATOR:
            coordinator = shards.shard_by_hash(_transaction_of(request))
            return None if coordinator == shards.own else coordinator
        if not name or request.name in ANYWHERE or self._local.find_topic(name) is not None:
            return None
        if request.name == "CONSUME" and (request.pattern or request.dialect is Dialect.LEGACY):
            return None
        if request.name in ("PUBLISH", BARE) and (request.dialect is Dialect.MODERN or session.state.repeats is None):
            return None
        shard = shards.shard_of(name)
        if shard is None and request.name == "CREATE":
            shard = self._router.next_shard()
        return None if shard == shards.own else shard

    def client(self, session: CursusSession) -> Client:
        """Return the client of the request that the guard has admitted last."""
        acting, (host, port) = session.state.guard.acting, session.address
        origin = Origin(session.spoken, host, port, session.group, session.features)
        return Client(None if acting is None else acting.name, session.peer_address, origin)

    def store(self, session: CursusSession, client: Client, answer: Answer, partition: Partition, body: bytes) -> None:
        """Have another process store a batch. Raises Busy(BUSY) if too many bytes are on the way to it."""

        def then(frames: bytes | BrokerError) -> None:
            if isinstance(frames, BrokerError):
                close_if_lost(session, partition, frames)
            answer_with(answer, frames)

        shard = self._router.shard_of_topic(partition.topic)
        self.send(client, answer, shard, body, then)

    def send(self, client: Client, answer: Answer, shard: int, body: bytes, then: Completion[bytes]) -> None:
        """Execute a request in the process of a shard."""
        sender = Sender(client.user, client.peer, msgspec.msgpack.encode(client.origin))
        call = self._router.execute(shard, WIRE, sender, frame(body), then)
        answer.cancel = partial(_cancel, call)


def _cancel(call: Handle) -> None:
    call.cancel()


def answer_with(answer: Answer, frames: bytes | BrokerError) -> None:
    """Send the response of another process."""
    if isinstance(frames, BrokerError):
        answer.fail(frames)
    elif answer.packing is None:
        answer.fill([frames])
    else:
        answer.ok(*bodies_of(frames))


def _transaction_of(request: Request) -> str:
    return next((request.options[key] for key in TRANSACTION_KEYS if request.options.get(key)), "")
