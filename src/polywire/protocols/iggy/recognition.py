"""Detect the dialect of a connection: the framing from its first bytes, the rest from its login and requests.

A login determines the possible dialects, and later requests exclude those that they do not fit. While several are
possible, replies use the most likely one (spec: iggy#recognition).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from polywire.errors import PeerError
from polywire.protocols.iggy import dialect as dialects
from polywire.protocols.iggy.dialect import Dialect
from polywire.protocols.iggy.documented import SPARE
from polywire.protocols.iggy.messages import U32, Code, Refused
from polywire.protocols.iggy.reader import Reader

# A D2 send begins with a number of at most this; an older send begins with at least 1025.
METADATA_BYTES_MAX: Final = 775
FRAME_BYTES_MIN: Final = 4


class Recognition:
    """The protocol versions that one connection may use, as far as its requests have shown."""

    __slots__ = ("_candidates", "_forced", "framed")

    def __init__(self, forced: Dialect | None = None) -> None:
        self._candidates: tuple[Dialect, ...] = (forced,) if forced is not None else (dialects.D0,)
        self._forced = forced is not None
        self.framed: bool | None = None
        if forced is not None and forced.framed:
            self.framed = True

    @property
    def dialect(self) -> Dialect:
        return self._candidates[0]

    def see_framing(self, first: int) -> None:
        """Exclude protocol versions by the first four bytes. Raises PeerError for bytes of other protocols."""
        self.framed = first == 0
        if self.framed:
            self._candidates = (dialects.D3,)
        elif is_text(first):
            raise PeerError("text (HTTP?) was sent to the Iggy port (check the port number)", fatal=True)

    @property
    def protocols(self) -> tuple[int, int]:
        """The lowest and the highest protocol version that a login with a header of 256 bytes may have."""
        spoken = [self.dialect] if self._forced else dialects.FRAMED
        return spoken[0].protocols[0], spoken[-1].protocols[-1]

    def see_protocol(self, version: int) -> bool:
        """Exclude all but the protocol version of a login. Return False if the broker does not support it."""
        known = [dialect for dialect in dialects.FRAMED if version in dialect.protocols]
        if not known or (self._forced and known[0] is not self.dialect):
            return False
        self._candidates = (known[0],)
        return True

    def dialect_for(self, code: int, payload: memoryview, *, logged_in: bool) -> Dialect:
        """Return the protocol version of a request.

        A request without a header of 256 bytes may exclude some versions.
        """
        if self.framed or self._forced:
            return self.dialect
        if code == Code.LOGIN:
            self._see_login(payload)
        elif code == Code.LOGIN_TOKEN:
            self._candidates = (*dialects.NEW, *dialects.OLD)
        elif logged_in and len(self._candidates) > 1:
            self._see_shape(code, payload)
        return self.dialect

    def _see_login(self, payload: memoryview) -> None:
        reader = Reader(payload, self.dialect)
        try:
            reader.name()
            reader.name()
            if reader.left < FRAME_BYTES_MIN:
                self._candidates = dialects.OLD
                return
            version = reader.str32()
        except Refused:
            return
        self._candidates = _as_text_has_it(dialects.VERSIONS.get(".".join(version.split(".")[:2])))

    def _see_shape(self, code: int, payload: memoryview) -> None:
        if code == Code.SEND:
            batched = len(payload) >= FRAME_BYTES_MIN and U32.unpack_from(payload)[0] <= METADATA_BYTES_MAX
            self._narrow([candidate for candidate in self._candidates if candidate.batched == batched])
            return
        shape = SHAPES.get(code)
        if shape is not None:
            self._narrow([candidate for candidate in self._candidates if _fits(shape, payload, candidate)])

    def _narrow(self, fitting: Sequence[Dialect]) -> None:
        """Exclude the protocol versions that are not in ``fitting``.

        If that would exclude all, exclude none: the request is malformed in every version.
        """
        if fitting:
            self._candidates = tuple(fitting)

    def see_message_head(self, head: int) -> None:
        self._narrow([candidate for candidate in self._candidates if candidate.message_head == head])


def is_text(first: int) -> bool:
    """Return whether the first four bytes are letters and spaces, as in ``GET `` and ``POST``.

    No request looks like text: its first four bytes are a length, whose last byte is 0 or 1 because of the size limit.
    """
    return first.to_bytes(4, "little").replace(b" ", b"").isalpha()


def _as_text_has_it(known: Dialect | None) -> tuple[Dialect, ...]:
    """Return protocol versions, the most likely first, for the version text in a login.

    Newer versions come after that version, then older ones, because a Java client calls itself 0.6 and uses layouts of 0.8 (spec:
    iggy#recognising-the-dialect).
    """
    if known is None:
        return dialects.NEW
    ascending = dialects.NEW[::-1]
    at = ascending.index(known)
    return (*ascending[at:], *dialects.NEW[len(ascending) - at :])


def _fits(shape: Callable[[Reader], object], payload: memoryview, candidate: Dialect) -> bool:
    reader = Reader(payload, candidate)
    try:
        shape(reader)
    except Refused:
        return False
    return reader.left == 0 or (
        shape is _create_topic and candidate.topic_settings == 0 and bytes(payload[reader.at : reader.at + 3]) in SPARE
    )


def _poll(reader: Reader) -> None:
    _offset(reader)
    if not 1 <= reader.u8() <= 5:
        raise Refused(3)
    reader.take(12)
    reader.flag()


def _offset(reader: Reader) -> None:
    reader.consumer()
    reader.ident()
    reader.ident()
    reader.partition()


def _store(reader: Reader) -> None:
    _offset(reader)
    reader.u64()


def _create_stream(reader: Reader) -> None:
    if reader.dialect.chosen_ids:
        reader.u32()
    reader.name()


def _create_topic(reader: Reader) -> None:
    reader.ident()
    if reader.dialect.chosen_ids:
        reader.u32()
    reader.u32()
    reader.topic_fields()


def _create_group(reader: Reader) -> None:
    reader.ident()
    reader.ident()
    if reader.dialect.chosen_ids:
        reader.u32()
    if reader.dialect.named_groups:
        reader.name()


SHAPES: Final[Mapping[int, Callable[[Reader], object]]] = {
    Code.POLL: _poll,
    Code.GET_OFFSET: _offset,
    Code.STORE_OFFSET: _store,
    Code.DELETE_OFFSET: _offset,
    Code.CREATE_STREAM: _create_stream,
    Code.CREATE_TOPIC: _create_topic,
    Code.CREATE_GROUP: _create_group,
}
