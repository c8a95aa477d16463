"""Answers of several processes made into one: lists, sums, metrics (decision 0076).

Promises: nothing is told twice; a metric keeps its name, and says of which shard it is. Must not know: who was asked, and how.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final

import msgspec

from polywire.http.api import CONNECTIONS_MAX, GROUPS_MAX, TOPICS_MAX
from polywire.http.spelling import Listing

SUMMED: Final = ("topics", "partitions", "records", "stored_bytes", "refused", "connections_max")
UP: Final = "polywire_shard_up"


def _joined(name: str, answers: Sequence[Any], *, count_max: int, order: Callable[[Any], Any] | None = None) -> Any:
    """One list of the lists that all shards have answered, within the limits of one."""
    found = [row for answer in answers for row in answer[name]]
    if order is not None:
        found.sort(key=order)
    rows = Listing(count_max)
    for row in found:
        if not rows.add(row):
            break
    return {name: rows.rows, "more": rows.more or any(answer["more"] for answer in answers)}


def _topics(answers: Sequence[Any]) -> Any:
    return _joined("topics", answers, count_max=TOPICS_MAX, order=itemgetter("name"))


def _groups(answers: Sequence[Any]) -> Any:
    return _joined("groups", answers, count_max=GROUPS_MAX, order=itemgetter("topic", "group"))


def _connections(answers: Sequence[Any]) -> Any:
    return _joined("connections", answers, count_max=CONNECTIONS_MAX)


def _overview(answers: Sequence[Any]) -> Any:
    """The first's words, and everybody's numbers; what is not ready tells why."""
    first = min(answers, key=lambda answer: answer["ready"])
    sums = {name: sum(answer[name] for answer in answers) for name in SUMMED}
    wires: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for answer in answers:
        for wire, traffic in answer["wires"].items():
            for name, count in traffic.items():
                wires[wire][name] += count
    congested = any(answer["congested"] for answer in answers)
    return {**first, **sums, "congested": congested, "wires": dict(sorted(wires.items()))}


def merged_json(merge: Callable[[Sequence[Any]], Any], answers: Sequence[bytes]) -> bytes:
    """The answers of all shards as one, in JSON."""
    return msgspec.json.encode(merge([msgspec.json.decode(answer) for answer in answers]))


MERGES: Final[Mapping[str, Callable[[Sequence[Any]], Any]]] = {
    "topics": _topics,
    "groups": _groups,
    "connections": _connections,
    "overview": _overview,
}
"""By the endpoint that all shards are asked."""


def merged_metrics(texts: Mapping[int, bytes], count: int) -> bytes:
    """What Prometheus is told of so many shards, of whom these have answered: samples of one metric stand together."""
    heads: dict[bytes, list[bytes]] = {}
    samples: dict[bytes, list[bytes]] = defaultdict(list)
    for shard, text in texts.items():
        label = b'shard="%04x"' % shard
        for name, head, own in _families(text):
            heads.setdefault(name, head)
            samples[name] += [_labelled(line, label) for line in own]
    lines = [line for name, head in heads.items() for line in (*head, *samples[name])]
    lines += [b"# HELP %b 1 where the process of a shard answers." % UP.encode(), b"# TYPE %b gauge" % UP.encode()]
    lines += [b'%b{shard="%04x"} %d' % (UP.encode(), shard, shard in texts) for shard in range(count)]
    return b"\n".join(lines) + b"\n"


def _families(text: bytes) -> Iterator[tuple[bytes, list[bytes], list[bytes]]]:
    """Name, comments and samples of each metric. The first of the two comments says what it is, the other of which kind."""
    lines = deque(line for line in text.splitlines() if line)
    while lines:
        head = [lines.popleft(), lines.popleft()]
        samples = []
        while lines and not lines[0].startswith(b"# "):
            samples.append(lines.popleft())
        yield head[0].split(b" ", 3)[2], head, samples


def _labelled(line: bytes, label: bytes) -> bytes:
    """A sample with one label more, unless it has it already. A metric's name has neither blanks nor braces."""
    name, brace, behind = line.partition(b"{")
    if behind.startswith(label):
        return line
    if brace and b" " not in name:
        return name + brace + label + b"," + behind
    name, _, value = line.partition(b" ")
    return name + b"{" + label + b"} " + value
