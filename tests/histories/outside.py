"""Verdicts of other projects' checkers: Porcupine (linearizability), and the checker of Jepsen's Kafka workload (Elle).

Both judge the events of a history, not this project's interpretation of them. Their programs are not part of the project:

* Porcupine is a Go module, which ``porcupine/main.go`` uses. It needs ``go``.
* Jepsen is a Clojure library. ``POLYWIRE_JEPSEN`` is a class path with ``jepsen.tests.kafka``. It needs ``java``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from tests.histories.checkers import judge
from tests.histories.history import (
    Commit,
    Event,
    Fetch,
    History,
    Outcome,
    Place,
    Position,
    Produce,
    Shared,
    Transaction,
)

EVER: Final = 2**63 - 1  # the return time of an operation that may take effect at any later time
GO_S: Final = 30.0  # for downloading the module
PORCUPINE: Final = Path(__file__).with_name("porcupine")
JEPSEN: Final = Path(__file__).with_name("jepsen.clj")
CLASS_PATH: Final = "POLYWIRE_JEPSEN"
ALLOWED: Final = frozenset(
    {"int-send-skip", "G0", "G0-process", "G0-realtime", "PL-1-cycle-exists", "strong-PL-1-cycle-exists"}
)
"""Anomalies that Jepsen allows in Apache Kafka: records of other requests may be between those of one."""

Operation = Mapping[str, Any]


@cache
def has_porcupine() -> bool:
    """Whether Porcupine can be built and run here."""
    if shutil.which("go") is None:
        return False
    command = ["go", "list", "-deps", "."]
    try:
        found = subprocess.run(command, cwd=PORCUPINE, capture_output=True, check=False, timeout=GO_S)
    except subprocess.TimeoutExpired:  # no module proxy can be reached
        return False
    return found.returncode == 0


def has_jepsen() -> bool:
    """Whether Jepsen's class path was given."""
    return CLASS_PATH in os.environ and shutil.which("java") is not None


def judges() -> Sequence[str]:
    """Return the names of all checkers that can judge here."""
    return ["checkers", *(["porcupine"] if has_porcupine() else []), *(["jepsen"] if has_jepsen() else [])]


def judge_everything(history: History) -> list[str]:
    """Return everything that this project's checkers and those of others find wrong with a history."""
    wrong = judge(history)
    if has_porcupine():
        wrong += judged_by_porcupine(history)
    if has_jepsen():
        wrong += judged_by_jepsen(history)
    return wrong


# Porcupine


def judged_by_porcupine(history: History) -> list[str]:
    """Return the partitions and committed offsets that are not linearizable, or not known to be."""
    with TemporaryDirectory() as folder:
        program = Path(folder) / "porcupine"
        subprocess.run(["go", "build", "-o", str(program), "."], cwd=PORCUPINE, check=True)
        lines = "\n".join(json.dumps(found) for found in linearizable(history))
        reported = subprocess.run([str(program)], input=lines, capture_output=True, text=True, check=True)
    verdicts = [json.loads(line) for line in reported.stdout.splitlines()]
    return [
        f"porcupine: {verdict['name']} is {verdict['result']} after {verdict['done']} of {verdict['ops']} operations"
        for verdict in verdicts
        if verdict["result"] != "Ok"
    ]


def linearizable(history: History) -> Iterator[Mapping[str, Any]]:
    """Yield each partition and each committed offset with its operations, for Porcupine.

    The offset of a record whose response was lost is taken from the final content.
    """
    clients = _Numbers()
    partitions = _partition_operations(history, clients)
    for (topic, partition), records in history.stored.items():
        ops = partitions.get((topic, partition), [])
        ops.append(_op("read", clients["end"], EVER - 2, EVER - 1, 0, [value for _, value in records]))
        ops.append(_op("end", clients["end"], EVER - 2, EVER - 1, len(records)))
        yield {"name": f"{topic}/{partition}", "kind": "partition", "ops": ops}
    registers = _register_operations(history, clients)
    for shared, offset in history.positions.items():
        registers[shared].append(_op("get", clients["end"], EVER - 2, EVER - 1, offset or 0))
    for shared, ops in registers.items():
        yield {"name": f"{shared.group} of {shared.topic}/{shared.partition}", "kind": "offset", "ops": ops}


def _partition_operations(history: History, clients: _Numbers) -> Mapping[tuple[str, int], list[Operation]]:
    found: dict[tuple[str, int], list[Operation]] = defaultdict(list)
    stored = _places(history)
    for event in history.events:
        client = clients[event.who]
        if isinstance(event, Fetch):
            offset = event.offsets[0] if event.offsets else event.place.offset
            found[event.place[:2]].append(_op("read", client, event.begun, event.ended, offset, event.values))
        elif isinstance(event, Produce | Transaction) and event.outcome is not Outcome.REFUSED:
            ended = event.ended if event.outcome is Outcome.DONE else EVER
            for value, place in _appended(event, stored):
                # one operation for each record: several protocols do not promise that a request is stored as a whole
                found[place[:2]].append(_op("append", client, event.begun, ended, place.offset, [value]))
    return found


def _register_operations(history: History, clients: _Numbers) -> dict[Shared, list[Operation]]:
    found: dict[Shared, list[Operation]] = defaultdict(list)
    for event in history.events:
        client = clients[event.who]
        if isinstance(event, Position):
            found[event.shared].append(_op("get", client, event.begun, event.ended, event.offset or 0))
        elif isinstance(event, Commit | Transaction) and event.outcome is not Outcome.REFUSED:
            ended = event.ended if event.outcome is Outcome.DONE else EVER
            moved = [(event.shared, event.offset)] if isinstance(event, Commit) else event.positions
            for shared, offset in moved:
                found[shared].append(_op("write", client, event.begun, ended, offset))
    return found


def _op(kind: str, client: int, call: int, returned: int, offset: int, values: Iterable[bytes] = ()) -> Operation:
    texts = [value.decode() for value in values]
    return {"kind": kind, "client": client, "call": call, "return": returned, "offset": offset, "values": texts}


def _appended(event: Produce | Transaction, stored: Mapping[tuple[str, bytes], Place]) -> Iterator[tuple[bytes, Place]]:
    """Yield the records of a request that are known to be stored, with their places."""
    if isinstance(event, Produce) and event.places and event.durable:
        yield from zip(event.values, event.places, strict=True)
        return
    values = _values(event)
    for topic, value in values:
        if (place := stored.get((topic, value))) is not None:
            yield value, place


def _values(event: Produce | Transaction) -> Sequence[tuple[str, bytes]]:
    if isinstance(event, Produce):
        return [(event.topic, value) for value in event.values]
    return [(write.topic, write.value) for write in event.writes]


def _places(history: History) -> Mapping[tuple[str, bytes], Place]:
    return {
        (topic, value): Place(topic, partition, offset)
        for (topic, partition), records in history.stored.items()
        for offset, value in records
    }


class _Numbers(dict[str, int]):
    """A number for each name, in the order in which names are first used."""

    def __missing__(self, name: str) -> int:
        self[name] = number = len(self)
        return number


# Jepsen


def judged_by_jepsen(history: History) -> list[str]:
    """Return the anomalies that Jepsen's Kafka workload finds, except those that are usual in Apache Kafka."""
    [found] = jepsen_anomalies(history)
    return [f"jepsen {name}: {text}" for name, text in found.items() if name not in ALLOWED]


def jepsen_anomalies(*histories: History) -> Sequence[Mapping[str, str]]:
    """Return all anomalies of each history by Jepsen's name, with an example."""
    with TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{number}.jsonl" for number in range(len(histories))]
        for path, history in zip(paths, histories, strict=True):
            path.write_text("\n".join(json.dumps(op) for op in jepsen_operations(history)))
        command = ["java", "-cp", os.environ[CLASS_PATH], "clojure.main", str(JEPSEN), *map(str, paths)]
        reported = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in reported.stdout.splitlines() if line.startswith("{")]
    if reported.returncode or len(lines) != len(histories):
        raise RuntimeError(reported.stderr[-4000:])
    return lines


def jepsen_operations(history: History) -> Sequence[Operation]:
    """Return the history in Jepsen's form: an invocation and a completion for each request, in the order of their times.

    * A process whose request has an unknown outcome ends, and its client continues as another one.
    * A client that reads from another offset than the one after its last record says so first (``assign``): it has read
      the offset that its group committed.
    """
    return _JepsenHistory(history).operations()


class _JepsenHistory:
    """The conversion of a history to operations of Jepsen's Kafka workload."""

    def __init__(self, history: History) -> None:
        self._history: Final = history
        self._stored: Final = _places(history)
        self._timed: list[tuple[int, int, dict[str, Any]]] = []
        self._order: Final = count()
        self._numbers: Final = count()
        self._processes: dict[str, int] = {}
        self._next: dict[int, dict[str, int]] = {}  # offset that a process reads next, by key

    def operations(self) -> Sequence[Operation]:
        events = sorted(self._history.events, key=lambda event: event.begun)
        polls: dict[tuple[str, int], list[Fetch]] = {}  # a poll may return records of several partitions
        for event in events:
            if isinstance(event, Fetch):
                polls.setdefault((event.who, event.begun), []).append(event)
        for event in events:
            if isinstance(event, Fetch):
                self._poll(polls.pop((event.who, event.begun), []))
            elif isinstance(event, Produce | Transaction):
                self._write(event)
        end = max((event.ended for event in self._history.events), default=0)
        for (topic, partition), records in self._history.stored.items():
            offsets, values = [offset for offset, _ in records], [value for _, value in records]
            place = Place(topic, partition, 0)
            self._poll([Fetch("end", end + 1, end + 2, place, tuple(offsets), tuple(values))])
            end += 2
        return [{**op, "time": time} for time, _, op in sorted(self._timed, key=lambda timed: timed[:2])]

    def _poll(self, fetches: Sequence[Fetch]) -> None:
        """Add one poll, with the records of each partition."""
        if not fetches:
            return
        process = self._process(fetches[0].who)
        self._seek(process, {_key(fetch.place): fetch.place.offset for fetch in fetches}, fetches[0])
        found = {
            _key(fetch.place): [[at, value.decode()] for at, value in zip(fetch.offsets, fetch.values, strict=True)]
            for fetch in fetches
        }
        last = max(fetches, key=lambda fetch: fetch.ended)
        self._add(process, last, "poll", [["poll"]], "ok", [["poll", found]])
        self._read(process, {_key(fetch.place): fetch.offsets for fetch in fetches})

    def _write(self, event: Produce | Transaction) -> None:
        process = self._process(event.who)
        is_durable = not isinstance(event, Produce) or event.durable
        kind = {Outcome.DONE: "ok", Outcome.REFUSED: "fail", Outcome.UNKNOWN: "info"}[event.outcome]
        kind = kind if is_durable or kind != "ok" else "info"  # a crash may take it
        places = dict(zip(event.values, event.places, strict=False)) if isinstance(event, Produce) else {}
        asked: list[Any] = []
        answered: list[Any] = []
        for topic, value in _values(event):
            place = places.get(value) if is_durable else None
            key = _key(place or self._stored.get((topic, value)) or Place(topic, 0, 0))
            asked.append(["send", key, value.decode()])
            answered.append(["send", key, [place.offset, value.decode()]] if place else asked[-1])
        polled = self._sources(event, process) if isinstance(event, Transaction) else {}
        if polled:
            asked.insert(0, ["poll"])
            answered.insert(0, ["poll", polled])
        form = "txn" if isinstance(event, Transaction) else "send"
        self._add(process, event, form, asked, kind, answered if kind == "ok" else asked)
        if kind == "info":
            del self._processes[event.who]

    def _sources(self, transaction: Transaction, process: int) -> Mapping[str, Sequence[Any]]:
        """Return the records that a transaction copied, and let its process seek to the first of them."""
        polled: dict[str, list[Any]] = defaultdict(list)
        for write in transaction.writes:
            if write.read:
                polled[_key(write.source)].append([write.source.offset, write.read.decode()])
        self._seek(process, {key: pairs[0][0] for key, pairs in polled.items()}, transaction)
        if transaction.outcome is Outcome.DONE:
            self._read(process, {key: [offset for offset, _ in pairs] for key, pairs in polled.items()})
        return polled

    def _seek(self, process: int, offsets: Mapping[str, int], event: Event) -> None:
        known = self._next.setdefault(process, {})
        moved = {key for key, offset in offsets.items() if known.get(key, offset) != offset}
        if moved:
            for key in moved:
                del known[key]
            rest = list(known)
            self._at(event.begun, process, "assign", rest, "invoke")
            self._at(event.begun, process, "assign", rest, "ok")

    def _read(self, process: int, offsets: Mapping[str, Sequence[int]]) -> None:
        self._next[process] |= {key: read[-1] + 1 for key, read in offsets.items() if read}

    def _process(self, name: str) -> int:
        if name not in self._processes:
            self._processes[name] = next(self._numbers)
        return self._processes[name]

    def _add(self, process: int, event: Event, form: str, asked: Any, kind: str, answered: Any) -> None:
        self._at(event.begun, process, form, asked, "invoke")
        self._at(event.ended, process, form, answered, kind)

    def _at(self, time: int, process: int, form: str, value: Any, kind: str) -> None:
        op = {"process": process, "type": kind, "f": form, "value": value}
        self._timed.append((time, next(self._order), op))


def _key(place: Place) -> str:
    return f"{place.topic}/{place.partition}"
