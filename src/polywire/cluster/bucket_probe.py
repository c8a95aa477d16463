"""Test whether exactly one of several concurrent creates (or replaces) of an object in a bucket succeeds.

The journal relies on this. A store is refused, with a description of the defect, in these cases:

* Two concurrent writes succeed, or none does.
* A read returns other content than was written.

The test leaves objects in the bucket only if it fails. It may miss a rare defect. It finds the usual defect, a store
that checks first and writes later, in nearly every round.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from polywire.errors import BrokerError, ErrorCode, Invalid, Unavailable
from polywire.store.base import BlobExists, BlobMissing
from polywire.store.objects import ObjectChanged, Objects

WRITERS: Final = 32
CREATE_ROUNDS: Final = 4
UNDECIDED_ROUNDS_MAX: Final = 3  # rounds repeated because the store answered none of the writers
DIRECTORY: Final = "probe"


class _Answer(Enum):
    WON = auto()
    LOST = auto()
    UNKNOWN = auto()


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one test of a bucket.

    Attributes:
        what: what was tested.
        defect: description of the defect, empty if the test passed.
    """

    what: str
    defect: str


def probe(objects: Objects) -> list[Finding]:
    """Test whether a bucket has the atomic operations that the journal needs.

    Raises Unavailable if it does not respond.
    """
    token = secrets.token_hex(8)
    with ThreadPoolExecutor(WRITERS, "polywire-probe") as threads:
        race = _Race(objects, threads)
        return [
            *(race.create(f"{DIRECTORY}/{token}-{number}") for number in range(CREATE_ROUNDS)),
            race.replace(f"{DIRECTORY}/{token}-replaced"),
            _read_back(objects, f"{DIRECTORY}/{token}-read"),
        ]


def check(objects: Objects) -> None:
    """Refuse a bucket that fails a test of ``probe``. Raises Invalid or Unavailable."""
    for finding in probe(objects):
        if finding.defect:
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                f"the bucket cannot store a log: its conditional writes are not safe what={finding.what!r} defect={finding.defect!r}",
            )


class _Race:
    def __init__(self, objects: Objects, threads: ThreadPoolExecutor) -> None:
        self._objects = objects
        self._threads = threads

    def create(self, name: str) -> Finding:
        def write(content: bytes) -> None:
            self._objects.create(name, [content])

        return Finding(f"one of {WRITERS} concurrent creates succeeds", self._round(name, write, lambda: None))

    def replace(self, name: str) -> Finding:
        self._objects.create(name, [b"first"])
        tags = [self._objects.read(name).tag]

        def write(content: bytes) -> None:
            self._objects.replace(name, content, tags[0])

        def again() -> None:
            tags[0] = self._objects.read(name).tag

        return Finding(f"one of {WRITERS} concurrent replaces succeeds", self._round(name, write, again))

    def _round(self, name: str, write: Callable[[bytes], None], again: Callable[[], None]) -> str:
        """Let several writers create or replace one object at the same time.

        Return a description of the defect, or an empty string.
        """
        contents = [f"writer {number}".encode() for number in range(WRITERS)]
        for _ in range(UNDECIDED_ROUNDS_MAX):
            answers = list(self._threads.map(lambda content: _answer(write, content), contents))
            defect = self._judge(name, contents, answers)
            if defect is not None:
                self._objects.delete(name)
                return defect
            again()
        raise Unavailable(ErrorCode.STORAGE_FAILED, f"too many requests to the bucket failed name={name!r}")

    def _judge(self, name: str, contents: Sequence[bytes], answers: Sequence[_Answer]) -> str | None:
        """Return a description of the defect, an empty string if there is none, or None if too few requests got a
        response.

        Args:
            contents: content that each writer sent.
            answers: response of the store to each writer.
        """
        winners = answers.count(_Answer.WON)
        if winners > 1:
            return f"{winners} winners"
        try:
            found = self._objects.read(name).content
        except BlobMissing:
            return None if winners == 0 and _Answer.UNKNOWN in answers else "the written object is missing"
        written = [content for content, answer in zip(contents, answers, strict=True) if answer is not _Answer.LOST]
        if winners == 1:
            winner = contents[answers.index(_Answer.WON)]
            return "" if found == winner else "the stored object is not the one of the successful writer"
        if found in written:
            return ""
        return None if written else "no write succeeded"


def _answer(write: Callable[[bytes], None], content: bytes) -> _Answer:
    try:
        write(content)
    except (BlobExists, ObjectChanged):
        return _Answer.LOST
    except Unavailable:
        return _Answer.UNKNOWN
    return _Answer.WON


def _read_back(objects: Objects, name: str) -> Finding:
    """Test that reads return the last write or deletion, and that a range read returns the requested range."""
    what = "reads return the last write"
    try:
        objects.create(name, [b"0123456789"])
        if objects.read(name).content != b"0123456789" or objects.size(name) != 10:
            return Finding(what, "a read after a write returned other content")
        if objects.read_range(name, 3, 7) != b"3456":
            return Finding(what, "a range read returned other bytes")
        objects.put(name, b"other")
        if objects.read(name).content != b"other":
            return Finding(what, "a read after a second write returned the first")
    except BlobMissing:
        return Finding(what, "a read after a write found no object")
    finally:
        with suppress(BrokerError):
            objects.delete(name)
    with suppress(BlobMissing):
        objects.read(name)
        return Finding(what, "a read after a deletion returned the object")
    return Finding(what, "")
