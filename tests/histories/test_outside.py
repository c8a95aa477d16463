"""The checkers of other projects accept good histories, and detect a planted violation of each kind."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.histories.history import Event, Fetch, History, Outcome, Place, Produce, Transaction, Write
from tests.histories.outside import (
    CLASS_PATH,
    has_jepsen,
    has_porcupine,
    jepsen_anomalies,
    jepsen_operations,
    judged_by_jepsen,
    judged_by_porcupine,
)
from tests.histories.test_checkers import GOOD, commit, copied, copies, fetch, history, position, produce

DONE, REFUSED, UNKNOWN = Outcome.DONE, Outcome.REFUSED, Outcome.UNKNOWN

needs_porcupine = pytest.mark.skipif(not has_porcupine(), reason="NO GO: Porcupine did not judge histories")
needs_jepsen = pytest.mark.skipif(
    not has_jepsen(), reason=f"NO JEPSEN ({CLASS_PATH}, and java): its Kafka checker did not judge histories"
)


def polled(begun: int, who: str, *records: tuple[int, str], topic: str = "t", asked: int | None = None) -> Fetch:
    """Return a poll that returned values at these offsets."""
    first = records[0][0] if asked is None else asked
    values = tuple(value.encode() for _, value in records)
    return Fetch(who, begun, begun + 1, Place(topic, 0, first), tuple(offset for offset, _ in records), values)


def sent(begun: int, who: str, *records: tuple[str, int, str], outcome: Outcome = DONE) -> Sequence[Event]:
    """Return requests that appended (topic, offset, value), one after the other."""
    return [
        Produce(who, begun + row, begun + row, topic, (value.encode(),), outcome, (Place(topic, 0, offset),))
        for row, (topic, offset, value) in enumerate(records)
    ]


def transaction(
    begun: int, who: str, writes: Sequence[tuple[str, str]], reads: Sequence[tuple[str, int, str]] = ()
) -> Transaction:
    """Return a transaction that wrote (topic, value) and read (topic, offset, value)."""
    last = Place("none", 0, 0)
    made = [Write(topic, value.encode(), last) for topic, value in writes]
    for row, (topic, offset, value) in enumerate(reads):
        made[row] = made[row]._replace(source=Place(topic, 0, offset), read=value.encode())
    return Transaction(who, begun, begun + 5, tuple(made), (), DONE)


def stored(**topics: str) -> dict[tuple[str, int], list[tuple[int, bytes]]]:
    return {
        (topic, 0): [(offset, letter.encode()) for offset, letter in enumerate(text)] for topic, text in topics.items()
    }


NOT_LINEARIZABLE = {
    "an acknowledged record is lost": history([produce(1, "a", at=0), produce(3, "b", at=1)], "a"),
    "an acknowledged record is replaced": history([produce(1, "a", at=0), produce(3, "b", at=0)], "b"),
    "a refused record is stored": history([produce(1, "a", at=0), produce(3, "b", REFUSED)], "ab"),
    "a record is read before it is sent": history([fetch(1, 0, "a"), produce(5, "a", at=0)], "a"),
    "a later request comes first": history([produce(1, "a", at=1), produce(5, "b", at=0)], "ba"),
    "a later request in doubt comes first": history([produce(1, "a"), produce(5, "b", UNKNOWN)], "ba"),
    "readers differ": history([produce(1, "ab", at=0), fetch(5, 0, "b")], "ab"),
    "an acknowledged offset is lost": history([commit(3, "m", 2, 1)], "", at=0),
    "a stale offset is read": history([commit(1, "m", 2, 1), commit(3, "m", 4, 1), position(5, 2)], "", at=4),
    "an offset is read and lost": history([commit(1, "m", 2, 1, UNKNOWN), position(5, 2), position(7, 0)], "", at=2),
    "a refused offset is stored": history([commit(3, "m", 2, 1, REFUSED)], "", at=2),
    "an offset is set twice": history(
        [commit(1, "m", 2, 1, UNKNOWN), position(3, 2), commit(5, "m", 0, 1), position(7, 0), position(9, 2)], "", at=2
    ),
    "a transaction moves no offset": copies([copied(1, 0, "ab")], "ab", at=0),
}


@needs_porcupine
@pytest.mark.parametrize("name", NOT_LINEARIZABLE)
def test_porcupine_detects_what_is_not_linearizable(name: str) -> None:
    assert "Illegal" in "".join(judged_by_porcupine(NOT_LINEARIZABLE[name]))


@needs_porcupine
def test_porcupine_accepts_good_histories() -> None:
    assert judged_by_porcupine(GOOD) == []
    events = [copied(1, 0, "ab"), copied(3, 2, "xy", REFUSED), copied(5, 2, "pq", UNKNOWN), copied(7, 2, "c", UNKNOWN)]
    assert judged_by_porcupine(copies(events, "abc", at=3)) == []
    assert judged_by_porcupine(history([produce(1, "a", UNKNOWN), produce(3, "b", at=0)], "ba")) == []
    assert judged_by_porcupine(history([commit(1, "m", 2, 1, UNKNOWN), position(5, 0), position(7, 2)], "", at=2)) == []


AB = sent(1, "p", ("t", 0, "a"), ("t", 1, "b"), ("t", 2, "c"))
ANOMALIES = {
    "duplicate": History([*AB, polled(9, "r", (0, "a"), (1, "b"), (2, "a"))], stored(t="aba")),
    "inconsistent-offsets": History([*AB, polled(9, "r", (0, "a"), (1, "c"))], stored(t="abc")),
    "lost-write": History([*AB, polled(9, "r", (0, "a"))], {("t", 0): [(0, b"a"), (2, b"c")]}),
    "unseen": History([*AB], stored(t="ab")),
    "G1a": History([*sent(1, "p", ("t", 0, "a"), outcome=REFUSED), polled(9, "r", (0, "a"))], {}),
    "int-poll-skip": History([*AB, polled(9, "r", (0, "a"), (2, "c"))], stored(t="abc")),
    "int-nonmonotonic-poll": History([*AB, polled(9, "r", (1, "b"), (0, "a"))], stored(t="abc")),
    "poll-skip": History([*AB, polled(9, "r", (0, "a")), polled(11, "r", (2, "c"), asked=1)], stored(t="abc")),
    "nonmonotonic-poll": History(
        [*AB, polled(9, "r", (0, "a"), (1, "b")), polled(11, "r", (0, "a"), asked=2)], stored(t="abc")
    ),
    "nonmonotonic-send": History([*sent(1, "p", ("t", 1, "b"), ("t", 0, "a"))], stored(t="ab")),
    "int-nonmonotonic-send": History([transaction(1, "w", [("t", "b"), ("t", "a")])], stored(t="ab")),
    "int-send-skip": History(
        [transaction(1, "w", [("t", "a"), ("t", "c")]), *sent(2, "p", ("t", 1, "b"))], stored(t="abc")
    ),
    "precommitted-read": History([transaction(1, "w", [("t", "a")], [("t", 0, "a")])], stored(t="a")),
    "G0": History(
        [transaction(1, "w", [("t", "a"), ("u", "y")]), transaction(2, "v", [("t", "b"), ("u", "x")])],
        stored(t="ab", u="xy"),
    ),
    "G1c": History(
        [transaction(1, "w", [("t", "a")], [("u", 0, "x")]), transaction(2, "v", [("u", "x")], [("t", 0, "a")])],
        stored(t="a", u="x"),
    ),
    "G1c-realtime": History(
        [transaction(1, "w", [("t", "a")], [("u", 0, "x")]), transaction(20, "v", [("u", "x")])], stored(t="a", u="x")
    ),
}


@needs_jepsen
def test_jepsen_detects_an_anomaly_of_each_kind() -> None:
    found = dict(zip(ANOMALIES, jepsen_anomalies(*ANOMALIES.values()), strict=True))
    assert [name for name in ANOMALIES if name not in found[name]] == []


@needs_jepsen
def test_jepsen_accepts_good_histories() -> None:
    assert judged_by_jepsen(GOOD) == []
    again = [polled(9, "r", (0, "a"), (1, "b")), polled(11, "r", (0, "a")), polled(13, "r", (1, "b"), (2, "c"))]
    restarted = History([*AB, *again], stored(t="abc"))
    events = [transaction(1, "w", [("u", "x")], [("t", 0, "a")]), transaction(9, "w", [("u", "y")], [("t", 1, "b")])]
    sources = sent(0, "p", ("t", 0, "a")), sent(1, "p", ("t", 1, "b"))
    copied_once = History([*sources[0], *sources[1], *events], stored(t="ab", u="xy"))
    assert jepsen_anomalies(restarted, copied_once) == [{}, {}]


def test_a_poll_may_return_several_partitions() -> None:
    both = [polled(5, "r", (0, "a")), polled(5, "r", (0, "x"), topic="u")]
    made = jepsen_operations(History([*sent(1, "p", ("t", 0, "a"), ("u", 0, "x")), *both], stored(t="a", u="x")))
    [poll] = [op for op in made if op["f"] == "poll" and op["type"] == "ok" and len(op["value"][0][1]) == 2]
    assert poll["value"] == [["poll", {"t/0": [[0, "a"]], "u/0": [[0, "x"]]}]]


def test_operations_of_a_history() -> None:
    events = [*sent(1, "p", ("t", 0, "a")), produce(3, "b", UNKNOWN), produce(5, "c", at=2), polled(7, "r", (1, "b"))]
    made = jepsen_operations(History(list(events), stored(t="abc")))
    written = [(op["process"], op["type"], op["value"]) for op in made if op["f"] == "send"]
    assert written == [
        (0, "invoke", [["send", "t/0", "a"]]),
        (0, "ok", [["send", "t/0", [0, "a"]]]),
        (0, "invoke", [["send", "t/0", "b"]]),
        (0, "info", [["send", "t/0", "b"]]),
        (1, "invoke", [["send", "t/0", "c"]]),
        (1, "ok", [["send", "t/0", [2, "c"]]]),
    ]
    assert made[-1]["value"] == [["poll", {"t/0": [[0, "a"], [1, "b"], [2, "c"]]}]]
