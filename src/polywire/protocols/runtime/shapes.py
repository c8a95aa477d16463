"""Beginnings of requests that later requests of the same connection repeat. This module is compiled."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final

import cython

from polywire.broker.permissions import Action
from polywire.broker.users import ROOT

if TYPE_CHECKING:
    from polywire.broker.access import Access, Principal
    from polywire.broker.topics import Partition, Topic
    from polywire.types import Level

SHAPES_MAX: Final = 8  # shapes that a connection remembers
SHAPE_BYTES_MAX: Final = 512  # longest beginning that is remembered


@cython.cfunc
@cython.exceptval(-1, check=False)
def may_produce(access: Access, principal: Principal | None, topic: Topic) -> cython.bint:
    """Return the result of ``Access.permits``, without a call in the usual case."""
    if (principal is None or principal is ROOT) and topic.settings.access is None and access.is_open:
        return True
    return bool(access.permits(principal, Action.PRODUCE, topic))


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
