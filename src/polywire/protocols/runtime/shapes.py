"""Beginnings of requests that later requests of the same connection repeat. This module is compiled."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import cython

from polywire.broker.permissions import Action
from polywire.broker.users import ROOT

if TYPE_CHECKING:
    from polywire.broker.access import Access, Principal
    from polywire.broker.topics import Partition, Topic
    from polywire.types import Level

PRODUCE: Final = Action.PRODUCE  # read for every request; a module constant is ten times as fast as an attribute
FETCH: Final = Action.FETCH
SHAPES_MAX: Final = 8  # shapes that a connection remembers
SHAPE_BYTES_MAX: Final = 512  # longest beginning that is remembered
REPLACED_EVERY: Final = 17  # a prime number, so that no pattern of requests is always missed


@cython.cfunc
@cython.exceptval(-1, check=False)
def is_open(access: Access, principal: Principal | None, topic: Topic) -> cython.bint:
    """Return whether the user may do everything with the topic, because neither users nor its access list limit it."""
    return (principal is None or principal is ROOT) and topic.settings.access is None and access.is_open


@cython.cfunc
@cython.exceptval(-1, check=False)
def is_permitted(access: Access, principal: Principal | None, action: Action, topic: Topic) -> cython.bint:
    """Return the result of ``Access.permits``, without a call in the usual case."""
    return is_open(access, principal, topic) or bool(access.permits(principal, action, topic))


@cython.cclass
class BareShape:
    """The common properties of requests that store a batch and have the same beginning.

    Attributes:
        before: the beginning.
        partition: where the batch is stored.
        level: durability level of the acknowledgement.
    """

    if not cython.compiled:
        __slots__ = ("before", "level", "partition")

    def __init__(self, before: bytes, partition: Partition, level: Level) -> None:
        self.before = before
        self.partition = partition
        self.level = level


@cython.final
@cython.cclass
class Shapes:
    """The shapes of the latest requests of a connection."""

    if not cython.compiled:
        __slots__ = ("_latest",)

    def __init__(self, count_max: int = SHAPES_MAX) -> None:
        self._latest: Any = deque(maxlen=count_max)

    def __len__(self) -> int:
        return len(self._latest)

    def knows(self, before: bytes) -> bool:
        """Return whether a shape begins like this. A shape whose partition was deleted is forgotten."""
        shape: BareShape
        for shape in self._latest:
            if shape.before == before:
                if not shape.partition.ended:
                    return True
                self._latest.remove(shape)
                break
        return False

    def add(self, shape: BareShape) -> None:
        self._latest.append(shape)

    def forget(self, shape: BareShape) -> None:
        self._latest.remove(shape)

    def clear(self) -> None:
        self._latest.clear()

    @cython.cfunc
    def find(
        self,
        p: cython.p_const_uchar,
        at: cython.Py_ssize_t,
        end: cython.Py_ssize_t,
        any_at: cython.Py_ssize_t,
        any_end: cython.Py_ssize_t,
    ) -> BareShape:
        """Return the shape with which the request ``p[at:end]`` begins, or None.

        Bytes ``any_at`` to ``any_end`` of the request may have any value.
        """
        shape: BareShape
        i: cython.Py_ssize_t
        size: cython.Py_ssize_t
        before: cython.p_const_uchar
        for shape in self._latest:
            before = shape.before
            size = len(shape.before)
            if end - at <= size:
                continue
            i = 0
            while i < size and (before[i] == p[at + i] or any_at <= i < any_end):
                i += 1
            if i == size:
                return shape
        return None  # type: ignore[return-value, unused-ignore]


def is_learned(known: Sequence[Template], requests: int) -> bool:
    """Return whether to remember another template, given those of a connection and its number of requests.

    A connection with more different requests than ``SHAPES_MAX`` would replace a template for each of them. So when that
    many are known, most requests are not remembered.
    """
    return len(known) < SHAPES_MAX or requests % REPLACED_EVERY == 0


@cython.cclass
class Template:
    """A request that later ones repeat, except for some numbers.

    Attributes:
        frame: its bytes.
    """

    if not cython.compiled:
        __slots__ = ("_varies", "frame")

    def __init__(self, frame: bytes, numbers: Iterable[tuple[int, int]]) -> None:
        """``numbers`` are the positions and sizes of the numbers."""
        self.frame = frame
        self._varies = bytearray(len(frame))
        for at, size in numbers:
            self._varies[at : at + size] = b"\1" * size

    @cython.cfunc
    def matches(self, p: cython.p_const_uchar, at: cython.Py_ssize_t, end: cython.Py_ssize_t) -> cython.bint:
        """Return whether ``p[at:end]`` has the same bytes, except for the numbers."""
        frame: cython.p_const_uchar = self.frame
        varies: bytearray = self._varies
        size: cython.Py_ssize_t = len(self.frame)
        i: cython.Py_ssize_t = 0
        if end - at != size:
            return False
        while i < size and (p[at + i] == frame[i] or varies[i]):
            i += 1
        return i == size
