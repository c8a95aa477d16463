"""``polywire record copy``: copy a topic between two protocols or brokers.

* The command reports every part of a record that the target's protocol cannot store.
* Passwords are neither printed nor stored.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from cyclopts.validators import Number

from polywire.cli.connection import ADDRESS_DEFAULT, Address
from polywire.cli.output import note
from polywire.cli.speed import Speed
from polywire.cli.start_position import FromOffset, FromTime, parse_start
from polywire.cli.usage import examples
from polywire.client.consume import Bound
from polywire.client.copying import Copy, CopyState, End, Outcome, Span
from polywire.errors import ErrorCode, Invalid

app = App(
    name="copy",
    help_epilogue=examples(
        "polywire record copy orders orders-copy",
        "polywire record copy kafka://old:9092/orders orders --state orders.copy",
        "polywire record copy cursus://old:9000/orders orders --group billing",
        "polywire record copy orders recent --from 2026-01-31T08:00:00Z",
    ),
)
Endpoint = Annotated[str, Parameter(help="scheme://host:port/topic, or a topic of the broker at --address.")]


@app.default
def copy(
    source: Endpoint,
    target: Endpoint,
    *,
    from_: Annotated[str, Parameter(name="--from")] = "earliest",
    until: str = "latest",
    partition: Annotated[int | None, Parameter(name=("--partition", "-p"))] = None,
    state: Path | None = None,
    group: Annotated[tuple[str, ...], Parameter(name=("--group", "-g"))] = (),
    skip: Annotated[bool, Parameter(negative="")] = False,
    patience: Annotated[float, Parameter(validator=Number(gte=0))] = 60.0,
    address: Address = ADDRESS_DEFAULT,
) -> None:
    """Copy the records of a topic to another topic, between any two protocols or brokers.

    Parameters
    ----------
    from_
        Start position: earliest, an offset (a byte address with Kafka 0.7), or an ISO 8601 time.
    until
        End position: latest (as of the start of the copy), an offset (exclusive), or an ISO 8601 time.
    partition
        Copy only this partition.
    state
        File that stores the progress of the copy. Run the same command again to resume, or to copy records that arrived since.
    group
        Group whose committed offsets are translated to the target once all records are copied; can be repeated.
    skip
        Skip records that the target's protocol cannot store, instead of stopping with an error.
    patience
        Seconds to retry connecting to a broker that went away.
    """
    ends = endpoint_of(source, address), endpoint_of(target, address)
    if str(ends[0]) == str(ends[1]):
        raise Invalid(ErrorCode.INVALID_REQUEST, f"source and target are the same topic topic={ends[0].topic!r}")
    progress = CopyState.load(state, *map(str, ends))
    span = _span(partition, from_, until)
    with Speed("copied") as speed:
        work = Copy(
            *ends,
            progress,
            span=span,
            skip=skip,
            patience_s=patience,
            on_progress=lambda outcome: speed.show(outcome.written),
        )
        is_complete = False
        try:
            commits = asyncio.run(_run(work, group))
            is_complete = True
        finally:
            if not is_complete:
                note(f"stopped {_summary(work.outcome)}")
    for name, number, position, offset in commits:
        note(f"translated group={name} partition={number} position={position} new_position={offset}")
    for remark in work.outcome.remarks:
        note(f"note: {remark}")
    note(f"copied {_summary(work.outcome)}")


def _span(partition: int | None, from_: str, until: str) -> Span:
    """Return the records that the options select. Raises Invalid(INVALID_REQUEST) for an invalid option."""
    begin, end = parse_start(from_), parse_start(until, option="--until")
    if begin is Bound.LATEST or end is Bound.EARLIEST:
        raise Invalid(ErrorCode.INVALID_REQUEST, f"no records to copy from={from_!r} until={until!r}")
    return Span(
        partition,
        begin=begin.offset if isinstance(begin, FromOffset) else None,
        begin_time_us=begin.time_us if isinstance(begin, FromTime) else None,
        until=end.offset if isinstance(end, FromOffset) else None,
        until_time_us=end.time_us if isinstance(end, FromTime) else None,
    )


async def _run(work: Copy, groups: tuple[str, ...]) -> list[tuple[str, int, int, int]]:
    await work.check_groups(groups)
    await work.run()
    return await work.commit_positions(groups) if groups else []


def _summary(outcome: Outcome) -> str:
    facts = {"records": outcome.written, "found": outcome.found, "skipped": outcome.skipped}
    facts |= {f"lost_{name}": count for name, count in sorted(outcome.lost.items())}
    return " ".join(f"{name}={count}" for name, count in facts.items() if count or name == "records")


def endpoint_of(text: str, address: str) -> End:
    """Parse ``scheme://host:port/topic``, or the name of a topic of the broker at ``address``.

    Raises Invalid(INVALID_REQUEST) if the topic is missing.
    """
    scheme, separator, rest = text.partition("://")
    if not separator:
        return End(address, text)
    broker, slash, topic = rest.partition("/")
    if not slash or not topic:
        raise Invalid(ErrorCode.INVALID_REQUEST, f"topic is missing (use scheme://host:port/topic) got={scheme}://…")
    return End(f"{scheme}://{broker}", topic)
