"""Merge the responses of several processes: lists, sums and metrics (decision 0127).

Metrics keep their names and get the label ``shard``.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final

import msgspec

from polywire.http.api import CONNECTIONS_MAX, GROUPS_MAX, TOPICS_MAX
from polywire.http.encoding import Listing

SUMMED: Final = ("topics", "partitions", "records", "stored_bytes", "refused", "connections_max")
UP: Final = "polywire_shard_up"


def _merge_lists(
    name: str, answers: Sequence[Any], *, count_max: int, order: Callable[[Any], Any] | None = None
) -> Any:
    """Merge the lists of all shards into one, with the limits of one list."""
    found = [row for answer in answers for row in answer[name]]
    if order is not None:
        found.sort(key=order)
    rows = Listing(count_max)
    for row in found:
        if not rows.add(row):
            break
    return {name: rows.rows, "more": rows.more or any(answer["more"] for answer in answers)}


def _topics(answers: Sequence[Any]) -> Any:
    return _merge_lists("topics", answers, count_max=TOPICS_MAX, order=itemgetter("name"))


def _groups(answers: Sequence[Any]) -> Any:
    return _merge_lists("groups", answers, count_max=GROUPS_MAX, order=itemgetter("topic", "group"))


def _connections(answers: Sequence[Any]) -> Any:
    return _merge_lists("connections", answers, count_max=CONNECTIONS_MAX)


def _overview(answers: Sequence[Any]) -> Any:
    """Sum the numbers of all processes. Texts come from a process that is not ready, or else from the first."""
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
    """The responses are decoded, passed to ``merge``, and encoded again."""
    return msgspec.json.encode(merge([msgspec.json.decode(answer) for answer in answers]))


MERGES: Final[Mapping[str, Callable[[Sequence[Any]], Any]]] = {
    "topics": _topics,
    "groups": _groups,
    "connections": _connections,
    "overview": _overview,
}
"""Functions that merge responses, by endpoint."""


def merged_metrics(texts: Mapping[int, bytes], count: int) -> bytes:
    """Merge metrics so that the samples of one metric are adjacent.

    ``texts`` has the metrics of the shards that responded. ``count`` is the number of all shards.
    """
    heads: dict[bytes, list[bytes]] = {}
    samples: dict[bytes, list[bytes]] = defaultdict(list)
    for shard, text in texts.items():
        label = b'shard="%04x"' % shard
        for name, head, own in _families(text):
            heads.setdefault(name, head)
            samples[name] += [_labelled(line, label) for line in own]
    lines = [line for name, head in heads.items() for line in (*head, *samples[name])]
    lines += [b"# HELP %b 1 if the process of the shard responds." % UP.encode(), b"# TYPE %b gauge" % UP.encode()]
    lines += [b'%b{shard="%04x"} %d' % (UP.encode(), shard, shard in texts) for shard in range(count)]
    return b"\n".join(lines) + b"\n"


def _families(text: bytes) -> Iterator[tuple[bytes, list[bytes], list[bytes]]]:
    """Yield name, comments (HELP and TYPE) and samples of each metric."""
    lines = deque(line for line in text.splitlines() if line)
    while lines:
        head = [lines.popleft(), lines.popleft()]
        samples = []
        while lines and not lines[0].startswith(b"# "):
            samples.append(lines.popleft())
        yield head[0].split(b" ", 3)[2], head, samples


def _labelled(line: bytes, label: bytes) -> bytes:
    """Add a label to a sample unless the sample has it.

    The name of a metric contains no spaces or braces.
    """
    name, brace, labels = line.partition(b"{")
    if labels.startswith(label):
        return line
    if brace and b" " not in name:
        return name + brace + label + b"," + labels
    name, _, value = line.partition(b" ")
    return name + b"{" + label + b"} " + value
