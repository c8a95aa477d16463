"""``polywire queue``: work queues, which are share groups of a topic, and their dead letters."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Annotated, Final

from cyclopts import App, Parameter

from polywire.choices import listed
from polywire.choices import missing as choices_missing
from polywire.cli.admin import AdminApi, HttpAddress
from polywire.cli.connection import ADDRESS_DEFAULT, Address, polywire_only, run_with_client
from polywire.cli.output import Failed, ListFormat, format_time, note, print_list
from polywire.cli.usage import Topic, examples
from polywire.client.base import WireClient
from polywire.client.polywire import PolywireClient
from polywire.client.queue_calls import QueueCalls
from polywire.clock import SYSTEM_CLOCK
from polywire.delivery_times import DELAY_MS_MAX, DELIVER_AT, parsed_ms
from polywire.errors import ErrorCode
from polywire.protocols.polywire.messages import QueueEntry, QueuePartition
from polywire.records.columns import Record
from polywire.share_settings import AUTO_OFFSET_RESET, DEAD_LETTERS, DELIVERIES, LOCK_DURATION, ORDER

app = App(
    name="queue",
    help_epilogue=examples("polywire queue list", "polywire queue describe workers"),
)
PEEKED_MAX: Final = 1_000  # records of one peek
REDRIVES_MAX: Final = 10_000  # requests of one redrive, each of up to 1,000 letters

Group = Annotated[str, Parameter(help="Name of the share group.")]
Output = Annotated[ListFormat, Parameter(name=("--output", "-o"), help="Output format.")]
DryRun = Annotated[bool, Parameter(name="--dry-run", negative="", help="Show what would be done without doing it.")]


def _waiting(partition: QueuePartition) -> int:
    """Return the number of records that a worker could acquire now."""
    return partition.available + max(partition.next_offset - partition.end, 0)


@app.command(name="list", help_epilogue=examples("polywire queue list", "polywire queue list --output json"))
def list_queues(*, output: Output = ListFormat.TABLE, address: Address = ADDRESS_DEFAULT) -> None:
    """List queues: records that wait, are held by workers, or wait for a delay."""

    async def work(client: WireClient) -> list[dict[str, object]]:
        return [
            {
                "topic": queue.name,
                "group": queue.group,
                "waiting": sum(map(_waiting, queue.partitions)),
                "held": sum(queue.acquired.values()),
                "delayed": sum(partition.delayed for partition in queue.partitions),
                "workers": len(queue.acquired),
                "dead_letters": queue.settings.get(DEAD_LETTERS, ""),
                "owner": queue.owner,
            }
            for queue in await _calls(client).entries()
        ]

    columns = ("topic", "group", "waiting", "held", "delayed", "workers", "dead_letters", "owner")
    print_list(run_with_client(address, work), columns=columns, form=output)


def _calls(client: WireClient) -> QueueCalls:
    return QueueCalls(polywire_only(client, "use queues"))


async def _find(client: WireClient, group: str, topic: str | None = None) -> list[QueueEntry]:
    """Return the queues of a group. Raises Missing(GROUP_MISSING)."""
    calls = _calls(client)
    queues = await calls.entries(group)
    found = [queue for queue in queues if topic in (None, queue.name)]
    if queues and not found:
        known = listed(sorted(queue.name for queue in queues))
        raise Failed(f"the group does not read this topic group={group!r} topic={topic!r} topics={known}")
    if not found:
        known_groups = sorted({queue.group for queue in await calls.entries()})
        why = choices_missing(ErrorCode.GROUP_MISSING, "group", group, known_groups).message
        raise Failed(f"{why} (list queues with: polywire queue list)")
    return found


@app.command(help_epilogue=examples("polywire queue describe workers", "polywire queue describe workers -o json"))
def describe(group: Group, *, output: Output = ListFormat.TABLE, address: Address = ADDRESS_DEFAULT) -> None:
    """Show the progress of a queue in each partition. Workers and settings are printed on standard error."""

    async def work(client: WireClient) -> list[QueueEntry]:
        return await _find(client, group)

    found = run_with_client(address, work)
    rows = [
        {
            "topic": queue.name,
            "partition": partition.partition,
            "finished_below": partition.start,
            "next_offset": partition.next_offset,
            "waiting": _waiting(partition),
            "held": partition.held,
            "delayed": partition.delayed,
            "next_due": format_time(1000 * partition.next_due_ms) if partition.next_due_ms else "",
        }
        for queue in found
        for partition in queue.partitions
    ]
    columns = ("topic", "partition", "finished_below", "next_offset", "waiting", "held", "delayed", "next_due")
    print_list(rows, columns=columns, form=output)
    for queue in found:
        for worker, held in sorted(queue.acquired.items()):
            note(f"worker topic={queue.name!r} worker={worker!r} held={held}")
    for name, value in sorted(found[0].settings.items()):
        note(f"setting {name}={value}")


@app.command(
    name="set",
    help_epilogue=examples(
        "polywire queue set workers jobs --attempts 5 --dead-letters jobs.dead",
        "polywire queue set workers jobs --lock-s 300 --order key",
    ),
)
def set_queue(
    group: Group,
    topic: Topic,
    *,
    attempts: int | None = None,
    dead_letters: str | None = None,
    lock_s: float | None = None,
    start: str | None = None,
    order: str | None = None,
    address: Address = ADDRESS_DEFAULT,
) -> None:
    """Create a queue, or change its settings. Settings that are not named keep their values.

    Parameters
    ----------
    attempts
        After this many deliveries, a record becomes a dead letter.
    dead_letters
        Topic for records that were rejected or delivered too often. It is created if it does not exist.
    lock_s
        How long the broker waits for a worker that has vanished, in seconds.
    start
        Where a new group begins: earliest, latest, or by_duration:P1D for the last day.
    order
        key: records with the same key are given to workers one at a time, in order. none: they are not.
    """
    given = {
        DELIVERIES: None if attempts is None else str(attempts),
        DEAD_LETTERS: dead_letters,
        LOCK_DURATION: None if lock_s is None else str(int(lock_s * 1000)),
        AUTO_OFFSET_RESET: start,
        ORDER: order,
    }
    settings: dict[str, str | None] = {name: value for name, value in given.items() if value is not None}
    run_with_client(address, lambda client: _calls(client).configure(group, topic, settings), topic=topic)
    note(f"set group={group!r} topic={topic!r} " + " ".join(f"{name}={value}" for name, value in settings.items()))


@app.command(help_epilogue=examples("polywire queue peek workers jobs", "polywire queue peek workers jobs --count 3"))
def peek(
    group: Group,
    topic: Topic,
    *,
    count: int = 10,
    output: Output = ListFormat.TABLE,
    address: Address = ADDRESS_DEFAULT,
) -> None:
    """Show the next records of a queue without acquiring them, also those that are held, delayed or finished.

    Workers get a record with a time in the column ``due`` at that time. Delays of retries are not shown.

    Parameters
    ----------
    count
        Maximum number of records in each partition.
    """
    if not 0 < count <= PEEKED_MAX:
        raise Failed(f"--count must be from 1 to {PEEKED_MAX} got={count}")

    async def work(client: WireClient) -> list[dict[str, object]]:
        polywire = polywire_only(client, "use queues")
        [queue] = await _find(client, group, topic)
        return [
            _record_row(partition.partition, record)
            for partition in queue.partitions
            for record in await _next_records(polywire, topic, partition, count)
        ]

    columns = ("partition", "offset", "due", "key", "value")
    print_list(run_with_client(address, work), columns=columns, form=output)


async def _next_records(
    polywire: PolywireClient, topic: str, partition: QueuePartition, count: int
) -> Sequence[Record]:
    if partition.start >= partition.next_offset:
        return ()
    records = await polywire.fetch(topic, partition.partition, partition.start, records_max=count)
    return list(islice(records, count))


def _record_row(partition: int, record: Record) -> dict[str, object]:
    def text(data: bytes | None) -> str | None:
        return None if data is None else data.decode(errors="backslashreplace")

    due_ms = _due_ms(record)
    return {
        "partition": partition,
        "offset": record.offset,
        "due": None if due_ms is None else format_time(1000 * due_ms),
        "key": text(record.key),
        "value": text(record.value),
    }


def _due_ms(record: Record) -> int | None:
    """Return when a record is due that was sent with a delay, in milliseconds since 1970. None if it is due now."""
    values = [header.value or b"" for header in record.headers if header.key == DELIVER_AT.encode()]
    due_ms = parsed_ms(values[-1]) if values else None
    now_ms = SYSTEM_CLOCK.now_us() // 1000
    last_ms = record.append_time_us // 1000 + DELAY_MS_MAX  # the broker ignores a later time
    return due_ms if due_ms is not None and now_ms < due_ms <= last_ms else None


@app.command(help_epilogue=examples("polywire queue purge workers jobs --dry-run", "polywire queue purge workers jobs"))
def purge(group: Group, topic: Topic, *, dry_run: DryRun = False, address: Address = ADDRESS_DEFAULT) -> None:
    """Skip all records that wait in a queue. Stop its workers first. The records remain in the topic."""

    async def work(client: WireClient) -> int:
        [queue] = await _find(client, group, topic)
        if not dry_run:
            await _calls(client).reset(group, topic)
        return sum(_waiting(partition) + partition.delayed for partition in queue.partitions)

    skipped = run_with_client(address, work)
    note(f"{'would skip' if dry_run else 'skipped'} group={group!r} topic={topic!r} records={skipped}")


@app.command(help_epilogue=examples("polywire queue delete workers jobs"))
def delete(group: Group, topic: Topic, *, dry_run: DryRun = False, address: Address = ADDRESS_DEFAULT) -> None:
    """Delete a queue: its progress in a topic, and its settings. The records remain in the topic."""

    async def work(client: WireClient) -> None:
        await _find(client, group, topic)
        if not dry_run:
            await _calls(client).delete(group, topic)

    run_with_client(address, work)
    note(f"{'would delete' if dry_run else 'deleted'} group={group!r} topic={topic!r}")


@app.command(
    help_epilogue=examples("polywire queue redrive jobs.dead --dry-run", "polywire queue redrive jobs.dead --to jobs")
)
def redrive(
    topic: Topic,
    *,
    to: Annotated[tuple[str, ...], Parameter(help="Send only letters of this topic; may be repeated.")] = (),
    dry_run: DryRun = False,
    http: HttpAddress = None,
) -> None:
    """Send dead letters to their original topics again, and remember which were sent. It uses the admin API over HTTP."""
    api = AdminApi(http)
    path = f"topics/{topic}"
    found = api.get([f"{path}/dead-letters"])[f"{path}/dead-letters"]
    counts = {entry["topic"]: entry["letters"] for entry in found["targets"] if not to or entry["topic"] in to}
    targets = ",".join(sorted(counts))
    if not counts:
        note(f"nothing to send topic={topic!r}" + (f" to={','.join(to)}" if to else ""))
        return
    if dry_run:
        note(f"would send letters={sum(counts.values())}{' or more' if found['more'] else ''} topics={targets}")
        return
    sent = 0
    for _ in range(REDRIVES_MAX):
        result = api.request("POST", f"{path}/redrive", {"topics": sorted(counts)})
        sent += result["letters"]
        if not result["letters"] or not result["more"]:
            break
    note(f"sent letters={sent} topics={targets}")
