"""Every checker passes a good history, and detects a broken promise."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path

import pytest

from tests.histories.checkers import CHECKERS, judge
from tests.histories.history import (
    Assignment,
    Commit,
    Event,
    Fault,
    Fetch,
    History,
    Outcome,
    Place,
    Position,
    Produce,
    Shared,
    Transaction,
    Write,
    load,
    save,
)

SHARED = Shared("g", "t", 0)
DONE, REFUSED, UNKNOWN = Outcome.DONE, Outcome.REFUSED, Outcome.UNKNOWN


def produce(
    begun: int, values: str, outcome: Outcome = DONE, at: int | None = None, *, durable: bool = True
) -> Produce:
    """Return a request of a record per letter, with offsets starting at ``at`` if given."""
    letters = tuple(letter.encode() for letter in values)
    places = () if at is None else tuple(Place("t", 0, at + row) for row in range(len(letters)))
    return Produce("p", begun, begun + 1, "t", letters, outcome, places, durable)


def fetch(begun: int, offset: int, values: str, *, member_of: str = "", first: int | None = None) -> Fetch:
    first = offset if first is None else first
    letters = tuple(letter.encode() for letter in values)
    offsets = tuple(range(first, first + len(letters)))
    return Fetch("r", begun, begun + 1, Place("t", 0, offset), offsets, letters, member_of)


def assigned(begun: int, who: str, generation: int, *partitions: int) -> Assignment:
    return Assignment(who, begun, begun + 1, "g", "t", generation, partitions)


def commit(begun: int, who: str, offset: int, generation: int, outcome: Outcome = DONE) -> Commit:
    return Commit(who, begun, begun + 1, SHARED, offset, generation, outcome)


def position(begun: int, offset: int | None) -> Position:
    return Position("m", begun, begun + 1, SHARED, offset)


def history(events: Iterable[Event], stored: str, at: int | None = None) -> History:
    records = [(offset, letter.encode()) for offset, letter in enumerate(stored)]
    return History(list(events), {("t", 0): records}, {} if at is None else {SHARED: at})


def copied(begun: int, first: int, values: str, outcome: Outcome = DONE) -> Transaction:
    """Return a transaction that copies each record from an offset on."""
    writes = [Write("u", letter.encode(), Place("t", 0, first + row)) for row, letter in enumerate(values)]
    moved = (SHARED, first + len(values))
    return Transaction("g", begun, begun + 1, tuple(writes), (moved,), outcome)


def copies(events: Iterable[Event], stored: str, at: int = 0) -> History:
    made = history(events, "", at)
    made.stored["u", 0] = [(offset, letter.encode()) for offset, letter in enumerate(stored)]
    return made


GOOD = history(
    [
        produce(1, "ab", at=0),
        produce(3, "c", UNKNOWN),
        produce(4, "x", UNKNOWN),
        produce(5, "y", REFUSED),
        produce(6, "de", at=3),
        produce(7, "z", at=5, durable=False),
        fetch(9, 0, "abc"),
        assigned(10, "m", 1, 0),
        position(12, None),
        fetch(13, 0, "ab", member_of="g"),
        commit(15, "m", 2, 1),
        assigned(17, "n", 2, 0),
        commit(19, "m", 5, 1, REFUSED),
        position(21, 2),
        fetch(23, 2, "cd", member_of="g"),
        commit(25, "n", 4, 2, UNKNOWN),
    ],
    "abcde",
    at=4,
)


def test_a_good_history_passes() -> None:
    assert judge(GOOD) == []


def test_good_transactions_pass() -> None:
    events = [copied(1, 0, "ab"), copied(3, 2, "xy", REFUSED), copied(5, 2, "pq", UNKNOWN), copied(7, 2, "c", UNKNOWN)]
    assert judge(copies(events, "abc", at=3)) == []
    assert judge(copies(events, "ab", at=2)) == []


def test_a_doubtful_request_may_take_effect_after_later_ones() -> None:
    events = [produce(1, "a", UNKNOWN), produce(3, "b", at=0)]
    assert judge(history(events, "ba")) == []
    assert judge(history(events, "b")) == []


def test_concurrent_requests_have_any_order() -> None:
    assert judge(history([produce(1, "a", at=1), produce(2, "b", at=0)], "ba")) == []


BAD = {
    "an acknowledged record is lost": ("acknowledged_is_there", history([produce(1, "a", at=0)], "")),
    "it is somewhere else": ("acknowledged_is_there", history([produce(1, "a", at=1), produce(1, "b")], "ab")),
    "it is nowhere": ("acknowledged_is_there", history([produce(1, "a")], "")),
    "a record is doubled": ("nothing_comes_twice", history([produce(1, "a", at=0)], "aa")),
    "a record is invented": ("nothing_is_invented", history([produce(1, "a", at=0)], "ab")),
    "a refused record is stored": (
        "nothing_is_invented",
        history([produce(1, "a", at=0), produce(3, "b", REFUSED)], "ab"),
    ),
    "a later request comes first": ("partitions_are_ordered", history([produce(1, "a"), produce(5, "b")], "ba")),
    "a later request in doubt comes first": (
        "partitions_are_ordered",
        history([produce(1, "a"), produce(5, "b", UNKNOWN)], "ba"),
    ),
    "a request is turned round": ("partitions_are_ordered", history([produce(1, "ab", UNKNOWN)], "ba")),
    "an offset is given twice": (
        "offsets_are_given_once",
        history([produce(1, "a", at=0, durable=False), produce(5, "b", at=0)], "b"),
    ),
    "readers differ": ("offsets_are_given_once", history([fetch(1, 0, "a"), fetch(3, 0, "b")], "b")),
    "an offset is missing": ("offsets_are_given_once", History([], {("t", 0): [(0, b"a"), (2, b"b")]})),
    "what was shown goes": ("what_was_shown_stays", history([produce(1, "a", UNKNOWN), fetch(3, 0, "a")], "")),
    "a reader is led past records": ("what_was_shown_stays", history([fetch(1, 0, "b", first=1)], "ab")),
    "a partition has two owners": (
        "partitions_have_one_owner",
        history([assigned(1, "m", 1, 0), assigned(2, "n", 1, 0)], ""),
    ),
    "a generation is reported again": (
        "generations_go_on",
        history([assigned(1, "m", 2, 0), assigned(5, "m", 1, 0)], ""),
    ),
    "a stale commit is taken": (
        "stale_commits_are_refused",
        history([assigned(1, "m", 1, 0), assigned(3, "n", 2, 0), commit(7, "m", 0, 1)], "", at=0),
    ),
    "a commit of another's partition is taken": (
        "stale_commits_are_refused",
        history([assigned(1, "m", 1, 0), assigned(3, "n", 1), commit(7, "n", 0, 1)], "", at=0),
    ),
    "an acknowledged position is lost": (
        "positions_never_go_back",
        history([assigned(1, "m", 1, 0), commit(3, "m", 2, 1)], "", at=0),
    ),
    "a position goes back": (
        "positions_never_go_back",
        history([commit(3, "m", 2, 1, UNKNOWN), position(5, 2), position(7, None)], "", at=2),
    ),
    "a position is invented": ("positions_never_go_back", history([position(5, 3)], "", at=3)),
    "a refused position is stored": (
        "refused_positions_stay_out",
        history([commit(3, "m", 2, 1, REFUSED)], "", at=2),
    ),
    "a committed record is lost": ("transactions_are_whole", copies([copied(1, 0, "ab")], "a", at=2)),
    "an aborted record is there": ("transactions_are_whole", copies([copied(1, 0, "ab", REFUSED)], "ab", at=0)),
    "an aborted record is shown": (
        "transactions_are_whole",
        copies([copied(1, 0, "a", REFUSED), Fetch("r", 3, 4, Place("u", 0, 0), (0,), (b"a",))], "", at=0),
    ),
    "half a transaction is there": ("transactions_are_whole", copies([copied(1, 0, "ab", UNKNOWN)], "b", at=0)),
    "a record is of no transaction": ("transactions_only_are_there", copies([copied(1, 0, "a")], "ab", at=1)),
    "a source is consumed twice": (
        "sources_are_consumed_once",
        copies([copied(1, 0, "a"), copied(3, 0, "b")], "ab", at=1),
    ),
    "a source is skipped": ("sources_are_consumed_once", copies([copied(1, 1, "b")], "b", at=2)),
    "records go without their position": ("sources_are_consumed_once", copies([copied(1, 0, "a")], "a", at=0)),
    "a position goes without its records": (
        "sources_are_consumed_once",
        copies([copied(1, 0, "a", UNKNOWN)], "", at=1),
    ),
    "sources are out of order": (
        "sources_are_consumed_once",
        copies([copied(1, 0, "a"), copied(3, 1, "b")], "ba", at=2),
    ),
    "a group leaves records out": (
        "groups_read_everything",
        history([fetch(1, 1, "b", member_of="g")], "ab", at=2),
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_a_broken_promise_is_detected(what: str) -> None:
    promise, bad = BAD[what]
    found = {checker.__name__ for checker in CHECKERS if list(checker(bad))}
    assert promise in found


def test_every_checker_has_a_history_that_it_refuses() -> None:
    assert {promise for promise, _ in BAD.values()} == {checker.__name__ for checker in CHECKERS}


def test_a_history_can_be_stored(tmp_path: Path) -> None:
    transactions = copies([copied(1, 0, "ab"), copied(3, 2, "xy", REFUSED), Fault("kill -9", 5, 6)], "ab", at=2)
    for made in (GOOD, transactions):
        save(made, tmp_path / "kept" / "history.jsonl.gz")
        assert load(tmp_path / "kept" / "history.jsonl.gz") == made


def test_checking_changes_nothing() -> None:
    before = deepcopy(GOOD)
    judge(GOOD)
    assert before == GOOD
