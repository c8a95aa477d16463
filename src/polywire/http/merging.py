"""Merge the responses of several processes: lists, sums and metrics (decision 0127).

The samples of metrics get the label ``shard``.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final

import msgspec

from polywire.http.api import CONNECTIONS_MAX
from polywire.http.encoding import Listing
from polywire.http.history import SAMPLES_MAX
from polywire.http.lag import GROUPS_MAX
from polywire.http.queues import QUEUES_MAX
from polywire.http.topics import TOPICS_MAX

SUMMED: Final = ("topics", "partitions", "records", "stored_bytes", "refused", "connections_max")
UP: Final = "polywire_shard_up"


def _merge_lists(
    name: str, responses: Sequence[Any], *, count_max: int, order: Callable[[Any], Any] | None = None
) -> Any:
    """Merge lists of all processes into one, which has the limits of a single list."""
    found = [row for response in responses for row in response[name]]
    if order is not None:
        found.sort(key=order)
    rows = Listing(count_max)
    for row in found:
        if not rows.add(row):
            break
    return {name: rows.rows, "more": rows.more or any(response["more"] for response in responses)}


def _topics(responses: Sequence[Any]) -> Any:
    merged = _merge_lists("topics", responses, count_max=TOPICS_MAX, order=itemgetter("name"))
    return {**merged, "can_create": any(response["can_create"] for response in responses)}


def _groups(responses: Sequence[Any]) -> Any:
    return _merge_lists("groups", responses, count_max=GROUPS_MAX, order=itemgetter("topic", "group"))


def _queues(responses: Sequence[Any]) -> Any:
    return _merge_lists("queues", responses, count_max=QUEUES_MAX, order=itemgetter("topic", "group"))


def _connections(responses: Sequence[Any]) -> Any:
    return _merge_lists("connections", responses, count_max=CONNECTIONS_MAX)


def _quotas(responses: Sequence[Any]) -> Any:
    """Return the quotas of the first process, with what clients used of them in all processes."""
    found = {(row["user"], row["client_id"]): row for row in responses[0]["quotas"]}
    for row in [row for response in responses[1:] for row in response["quotas"]]:
        same = found.get((row["user"], row["client_id"]))
        if same is not None:
            same["delay_s"] += row["delay_s"]
            for kind in same["used"]:
                same["used"][kind] += row["used"].get(kind, 0.0)
    return responses[0]


def _overview(responses: Sequence[Any]) -> Any:
    """Add up the counters of all processes.

    Other fields come from a process that is not ready, or else from the first process.
    """
    first = min(responses, key=lambda response: response["ready"])
    sums = {name: sum(response[name] for response in responses) for name in SUMMED}
    wires: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for response in responses:
        for wire, traffic in response["wires"].items():
            for name, count in traffic.items():
                wires[wire][name] += count
    congested = any(response["congested"] for response in responses)
    failing = sorted({name for response in responses for name in response["failing_links"]})
    return {**first, **sums, "congested": congested, "failing_links": failing, "wires": dict(sorted(wires.items()))}


def _history(responses: Sequence[Any]) -> Any:
    """Add up the rates of the same intervals."""
    sums: dict[int, dict[str, float]] = {}
    for sample in [sample for response in responses for sample in response["samples"]]:
        found = sums.setdefault(sample["number"], dict.fromkeys(sample, 0.0))
        for name, value in sample.items():
            found[name] = value if name == "number" else found[name] + value
    samples = [sums[number] for number in sorted(sums)][-SAMPLES_MAX:]
    return {"interval_s": responses[0]["interval_s"], "samples": samples}


def merge_namespaces(responses: Sequence[Any]) -> Any:
    """Merge the namespaces of Iceberg catalogs."""
    return {"namespaces": sorted({tuple(found) for response in responses for found in response["namespaces"]})}


def merge_tables(responses: Sequence[Any]) -> Any:
    """Merge the tables of one namespace of Iceberg catalogs."""
    found = [table for response in responses for table in response["identifiers"]]
    return {"identifiers": sorted(found, key=itemgetter("name"))}


def merged_json(merge: Callable[[Sequence[Any]], Any], responses: Sequence[bytes]) -> bytes:
    """Decode JSON responses, merge them, and encode the result."""
    return msgspec.json.encode(merge([msgspec.json.decode(response) for response in responses]))


MERGES: Final[Mapping[str, Callable[[Sequence[Any]], Any]]] = {
    "topics": _topics,
    "groups": _groups,
    "queues": _queues,
    "connections": _connections,
    "quotas": _quotas,
    "overview": _overview,
    "history": _history,
}
"""Functions that merge decoded responses, by endpoint."""


def merged_metrics(texts: Mapping[int, bytes], count: int) -> bytes:
    """Merge metrics in the Prometheus format. The samples of a metric must be adjacent.

    ``texts`` has the metrics of the shards that responded. ``count`` is the number of all shards.
    """
    heads: dict[bytes, list[bytes]] = {}
    samples: dict[bytes, list[bytes]] = defaultdict(list)
    for shard, text in texts.items():
        label = b'shard="%04x"' % shard
        for name, head, lines in _families(text):
            heads.setdefault(name, head)
            samples[name] += [_labelled(line, label) for line in lines]
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
    """Add a label to the line of a sample, unless it has the label."""
    name, brace, labels = line.partition(b"{")
    if labels.startswith(label):
        return line
    if brace and b" " not in name:
        return name + brace + label + b"," + labels
    name, _, value = line.partition(b" ")
    return name + b"{" + label + b"} " + value
