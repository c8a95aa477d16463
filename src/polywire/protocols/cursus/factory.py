"""The entry point of the Cursus protocol: detect Cursus connections and create their sessions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, cast

from polywire.protocols.cursus import (
    auth,
    events,
    fetch,
    groups,
    introduction,
    offsets,
    produce,
    publish,
    streaming,
    topics,
    transactions,
)
from polywire.protocols.cursus.auth import AccessGuard
from polywire.protocols.cursus.compression import begins_compressed
from polywire.protocols.cursus.context import (
    STREAMS,
    TRANSACTIONS,
    WIRE,
    CursusBroker,
    CursusSettings,
    CursusState,
    OpenStreams,
    Places,
)
from polywire.protocols.cursus.forwarding import Forwarding, Router, execute
from polywire.protocols.cursus.idempotence import CheckedAppends
from polywire.protocols.cursus.messages import FRAME_BYTES_MAX, KNOWN_NAMES, TOPIC_BYTES_MAX
from polywire.protocols.cursus.session import Command, CursusSession
from polywire.protocols.runtime.commands import table
from polywire.protocols.runtime.forwarded import Executor
from polywire.protocols.runtime.off_loop import OffLoopQueue
from polywire.protocols.runtime.session import Output
from polywire.protocols.runtime.shards import Called

COMMANDS: Final[Mapping[str, Command]] = table(
    *introduction.COMMANDS,
    *topics.COMMANDS,
    *publish.COMMANDS,
    *fetch.COMMANDS,
    *streaming.COMMANDS,
    *groups.COMMANDS,
    *offsets.COMMANDS,
    *events.COMMANDS,
    *transactions.COMMANDS,
    *auth.COMMANDS,
)

_BLANKS: Final = b" \t\r\n"


class CursusFactory:
    """Opens sessions for Cursus clients. Implements ``protocols.runtime.session.SessionFactory``.

    Args:
        off_loop: queue in which long frames are decompressed in a thread.
        places: addresses of the brokers of a cluster; None without one.
        router: the topics of all processes; None if there is only one.
    """

    __slots__ = ("state",)

    def __init__(
        self,
        broker: CursusBroker,
        settings: CursusSettings | None = None,
        *,
        off_loop: OffLoopQueue | None = None,
        places: Places | None = None,
        router: Router | None = None,
    ) -> None:
        everything = broker if router is None else cast(CursusBroker, router)
        self.state: Final = CursusState(
            everything,
            broker,
            settings or CursusSettings(),
            AccessGuard(everything),
            off_loop or OffLoopQueue(broker.loop),
            places,
            None if router is None else Forwarding(broker, router),
            router,
        )

    @property
    def wire(self) -> str:
        return WIRE

    @property
    def executor(self) -> Executor:
        """Executes requests that other processes of the broker forward."""
        return partial(execute, self.state, COMMANDS, produce.take_batch)

    @property
    def called(self) -> Called:
        """Objects of this process that other processes call."""
        state = self.state
        return (
            (WIRE, state.checked, (CheckedAppends.append,)),
            (STREAMS, state.streams, (OpenStreams.replace,)),
            (TRANSACTIONS, state, (transactions.last_epoch, transactions.staged)),
        )

    def recognise(self, prefix: bytes) -> bool | None:
        """Return whether the bytes are the beginning of a Cursus frame; None if more bytes are needed.

        A frame has at most 64 MiB: a batch, a command, an envelope with a command, or one of these compressed.
        """
        if len(prefix) < 4:
            return None if prefix[:1] in (b"", b"\0", b"\1", b"\2", b"\3", b"\4") else False
        size = int.from_bytes(prefix[:4], "big")
        if not 2 <= size <= FRAME_BYTES_MAX:
            return False
        body = prefix[4 : 4 + size]
        whole = len(body) == size
        if len(body) < 2:
            return None
        if body[:2] == b"\xba\x7c":
            return True
        packed = begins_compressed(body)
        if packed or (packed is None and not whole):
            return packed
        named = _names_command(body, whole=whole)
        if named is not False:
            return named
        topic_size = int.from_bytes(body[:2], "big")
        if topic_size > TOPIC_BYTES_MAX:
            return False
        return _names_command(body[2 + topic_size :], whole=whole)

    def open(self, output: Output, resume: Callable[[], None]) -> CursusSession:
        return CursusSession(self.state, COMMANDS, produce.take_batch, output, resume)


def _names_command(text: bytes, *, whole: bool) -> bool | None:
    text = text.lstrip(_BLANKS).upper()
    for end, byte in enumerate(text):
        if byte in _BLANKS:
            return text[:end].decode("latin-1") in KNOWN_NAMES
    if whole:
        return text.decode("latin-1") in KNOWN_NAMES
    word = text.decode("latin-1")
    return None if any(name.startswith(word) for name in KNOWN_NAMES) else False
