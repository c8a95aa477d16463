"""A simulated bucket, and one process's access to it: implements ``Objects`` with faults.

* A write may have its effect without a response, or later, even after its process has ended.
* A dead process requests nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any, Final

import pytest

from polywire.cluster import bucket_store, journal_objects
from polywire.errors import ErrorCode, Unavailable
from polywire.store.base import BlobExists, BlobMissing
from polywire.store.objects import ObjectChanged, Stored, check_object_name
from polywire.types import Buffer
from tests.sim.chance import Chance
from tests.sim.files import SimulatedFiles
from tests.sim.story import Story

LATE_MAX: Final = 20  # requests on their way
ARRIVES: Final = 0.006  # share of requests before which a late one arrives
ARRIVES_OFTEN: Final = 0.05  # in some of the starts

CONFLICTS: Final = 0.5  # share of conditional writes that are refused while another write of the object is pending


class SimulatedBucket:
    """The objects, and the writes that are still on their way."""

    def __init__(self, chance: Chance, story: Story) -> None:
        self.objects: Final[dict[str, Stored]] = {}
        self._chance: Final = chance
        self._story: Final = story
        self._late: list[tuple[str, Callable[[], object]]] = []
        self._tags = 0

    def store(self, name: str, content: bytes) -> None:
        """Store an object."""
        self._tags += 1
        self.objects[name] = Stored(content, f"t{self._tags}")

    def postpone(self, name: str, effect: Callable[[], object]) -> None:
        """Let a write arrive later."""
        if len(self._late) < LATE_MAX:
            self._late.append((name, effect))

    def is_pending(self, name: str) -> bool:
        """Return whether a write of an object is on its way."""
        return any(late == name for late, _ in self._late)

    def arrive(self) -> None:
        """Let one of the late writes arrive."""
        if self._late:
            name, effect = self._late.pop(self._chance.below(len(self._late)))
            self._story.tell("late", f"write {name}")
            with suppress(BlobExists, ObjectChanged):
                effect()


class BucketEnd:
    """The requests of one process. rate: of failures. arrives: share of requests before which a late write arrives.
    is_cut: whether it cannot reach the bucket.
    """

    def __init__(
        self, bucket: SimulatedBucket, files: SimulatedFiles, is_cut: Callable[[], bool], chance: Chance, story: Story
    ) -> None:
        self.rate = 0.0
        self.arrives = ARRIVES
        self.is_cut: Final = is_cut
        self._bucket: Final = bucket
        self._files: Final = files
        self._chance: Final = chance
        self._story: Final = story

    # Writes

    def create(self, name: str, parts: Sequence[Buffer]) -> None:
        content = b"".join(parts)

        def effect() -> None:
            if name in self._bucket.objects:
                raise BlobExists(name)
            self._bucket.store(name, content)

        self._write("create", name, effect, BlobExists)

    def replace(self, name: str, content: Buffer, tag: str) -> None:
        copied = bytes(content)

        def effect() -> None:
            found = self._bucket.objects.get(name)
            if found is None or found.tag != tag:
                raise ObjectChanged(name)
            self._bucket.store(name, copied)

        self._write("replace", name, effect, ObjectChanged)

    def put(self, name: str, content: Buffer) -> None:
        copied = bytes(content)
        self._write("put", name, lambda: self._bucket.store(name, copied))

    def delete(self, name: str) -> None:
        self._write("delete", name, lambda: self._bucket.objects.pop(name, None))

    def _write(
        self, verb: str, name: str, effect: Callable[[], object], refused: type[Exception] | None = None
    ) -> None:
        check_object_name(name)
        chance = self._chance
        if chance.happens(self.arrives):
            self._bucket.arrive()
        is_killed = self._files.enter("bucket", verb, name, may_end_early=True)
        if is_killed or self.is_cut() or chance.happens(self.rate):
            fate = chance.one_of(("none", "done", "late"))
            if fate == "done":
                with suppress(BlobExists, ObjectChanged):
                    effect()
            elif fate == "late":
                self._bucket.postpone(name, effect)
            if is_killed:
                self._files.die()
            self._story.tell("fault", f"{verb} {name} {fate}")
            raise _failure(verb, name)
        if refused is not None and self._bucket.is_pending(name) and chance.happens(CONFLICTS):
            self._story.tell("conflict", f"{verb} {name}")
            raise refused(name)
        effect()

    # Reads

    def read(self, name: str) -> Stored:
        self._begin("get", name)
        found = self._bucket.objects.get(name)
        if found is None:
            raise BlobMissing(name)
        return found

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        return self.read(name).content[start:stop]

    def size(self, name: str) -> int:
        return len(self.read(name).content)

    def list(self, prefix: str) -> list[str]:
        self._begin("names", prefix)
        return sorted(name for name in self._bucket.objects if name.startswith(prefix))

    def _begin(self, verb: str, name: str) -> None:
        if self._chance.happens(self.arrives):
            self._bucket.arrive()
        self._files.enter("bucket", verb, name)
        if self.is_cut() or self._chance.happens(self.rate):
            self._story.tell("fault", f"{verb} {name}")
            raise _failure(verb, name)


def _failure(verb: str, name: str) -> Unavailable:
    return Unavailable(ErrorCode.STORAGE_FAILED, f"bucket failed on request verb={verb} name={name!r}")


class _Inline:
    """Replaces a pool of threads."""

    def __init__(self, *_: object) -> None:
        pass

    def map(self, call: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        return iter([call(item) for item in items])

    def submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        made: Future[Any] = Future()
        try:
            made.set_result(call(*args))
        except Exception as error:
            made.set_exception(error)
        return made

    def shutdown(self, **_: object) -> None:
        pass


class _Flag:
    """Replaces ``threading.Event``: a wait takes no time."""

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, _: float) -> bool:
        return self._is_set


class _NoTimer:
    """Replaces ``threading.Timer``: a process that cannot reach the bucket cancels its requests before it stops."""

    def __init__(self, *_: object) -> None:
        self.daemon = False

    def start(self) -> None:
        pass


@contextmanager
def without_threads() -> Iterator[None]:
    """Make requests to buckets in the caller's thread."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (journal_objects, bucket_store):
            patch.setattr(module, "ThreadPoolExecutor", _Inline)
            patch.setattr(module, "Event", _Flag)
        patch.setattr(journal_objects, "Timer", _NoTimer)
        patch.setattr(journal_objects, "time", SimpleNamespace(sleep=lambda _: None))
        yield
