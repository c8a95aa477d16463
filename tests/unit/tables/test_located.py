"""A broker whose LOCATE repeats its response and reports more: planning and reading end with an error."""

from __future__ import annotations

from typing import Any, Final

import pytest

import polywire.spark.sealed as planning
from polywire.errors import Corrupt
from polywire.protocols.polywire import messages
from polywire.tables import sealed
from polywire.tables.sealed import ReadRange

ANSWERS_MAX: Final = 10
RUN: Final = messages.SealedRange("segments/00000001-00000001.pws", 0, 10, 0, 1)
WANTED: Final = ReadRange("orders", 0, 1, 1, 0, 100)


class Repeating:
    """A connection whose broker returns the same run for ever."""

    def __init__(self, address: str) -> None:
        self._answer = messages.Located(address, b"m" * 16, [RUN] * 100, more=True)
        self.answers = 0

    def locate(self, *_: object, **__: object) -> messages.Located:
        self.answers += 1
        assert self.answers <= ANSWERS_MAX, "the loop does not end"
        return self._answer


def test_a_plan() -> None:
    connection: Any = Repeating("s3://bucket/prefix")
    planner = object.__new__(planning._Planner)
    planner._connection, planner._checks_epoch, planner._records_min = connection, False, 1
    with pytest.raises(Corrupt, match="does not advance"):
        planner.located(WANTED)
    assert connection.answers == 2


def test_a_read_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    connection: Any = Repeating("/data")
    connection.arena = None
    monkeypatch.setattr("polywire.tables.sealed.DataDirectory.is_here", lambda _: True)
    access = sealed.SealedAccess(bucket={})
    reading = sealed._RangeRead(lambda: connection, WANTED, -1, sealed.Tally(), access)
    with pytest.raises(Corrupt):
        list(reading.runs())
    assert connection.answers == 2


def test_responses_that_advance_are_followed_to_the_end() -> None:
    class Advancing:
        def locate(self, *arguments: Any, **_: object) -> messages.Located:
            offset = arguments[3]
            run = messages.SealedRange("segments/1.pws", 0, 10, offset, offset + 40)
            return messages.Located("s3://bucket/prefix", b"m" * 16, [run], more=offset < 80)

    connection: Any = Advancing()
    found = [run.first_offset for answer in sealed.located(connection, WANTED, epoch=-1) for run in answer.runs]
    assert found == [0, 40, 80]
