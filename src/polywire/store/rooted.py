"""Restrict a bucket to one directory. Callers use names relative to it, and cannot reach objects outside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from polywire.store.objects import Objects, Stored
from polywire.types import Buffer


class Rooted:
    """Implements ``Objects`` below a directory of another bucket.

    Args:
        root: prefix of every name, with a trailing slash.
    """

    def __init__(self, objects: Objects, root: str) -> None:
        self._objects: Final = objects
        self._root: Final = root

    def create(self, name: str, parts: Sequence[Buffer]) -> None:
        self._objects.create(self._root + name, parts)

    def replace(self, name: str, content: Buffer, tag: str) -> None:
        self._objects.replace(self._root + name, content, tag)

    def put(self, name: str, content: Buffer) -> None:
        self._objects.put(self._root + name, content)

    def read(self, name: str) -> Stored:
        return self._objects.read(self._root + name)

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        return self._objects.read_range(self._root + name, start, stop)

    def size(self, name: str) -> int:
        return self._objects.size(self._root + name)

    def list(self, prefix: str) -> list[str]:
        return [name.removeprefix(self._root) for name in self._objects.list(self._root + prefix)]

    def delete(self, name: str) -> None:
        self._objects.delete(self._root + name)
