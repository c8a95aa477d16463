"""Content that a store copies into its own memory, as the sealer provides it."""

from __future__ import annotations

from collections.abc import Callable

from polywire.store.base import CopiedParts


class Copied(CopiedParts):
    """Parts of this content.

    Attributes:
        requested: the sizes that were requested.

    Args:
        before: called before each part.
    """

    def __init__(self, content: bytes, before: Callable[[], None] = lambda: None) -> None:
        super().__init__(1000)
        self._rest = memoryview(content)
        self._before = before
        self.requested: list[int] = []

    def fill(self, out: memoryview) -> int:
        self._before()
        self.requested.append(len(out))
        part, self._rest = self._rest[: len(out)], self._rest[len(out) :]
        out[: len(part)] = part
        return len(part)
