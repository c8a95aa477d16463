"""``polywire record copy``: a topic from one wire or broker to another.

Promises: what a record loses on the way is told; passwords are neither shown nor written down. Must not know: any wire.
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
from polywire.client.copy_state import CopyState
from polywire.client.copying import Copy, End, Outcome, Span
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
Place = Annotated[str, Parameter(help="scheme://host:port/topic, or a topic of the broker at --address.")]


@app.default
def copy(
    source: Place,
    target: Place,
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
    """Copy the records of a topic to another, between any two wires or brokers.

    Parameters
    ----------
    from_
        Where to begin: earliest, an offset (a byte address on Kafka 0.7), or an ISO 8601 time.
    until
        Where to end: latest, as it is at the start, an offset (exclusive), or an ISO 8601 time.
    partition
        Copy only this partition.
    state
        File that remembers how far the copy is; run the same command again to go on, also after new records came.
    group
        Group whose committed offsets are carried to the target when everything is copied; can be repeated.
    skip
        Leave out records that the target's wire cannot carry, instead of ending with an error.
    patience
        Seconds to look for a broker that is gone.
    """
    ends = place_of(source, address), place_of(target, address)
    if str(ends[0]) == str(ends[1]):
        raise Invalid(ErrorCode.INVALID_REQUEST, f"a topic cannot be copied to itself topic={ends[0].topic!r}")
    kept = CopyState.load(state, *map(str, ends))
    span = _span(partition, from_, until)
    with Speed("copied") as speed:
        work = Copy(
            *ends, kept, span=span, skip=skip, patience_s=patience, on_progress=lambda done: speed.show(done.written)
        )
        stopped = True
        try:
            moved = asyncio.run(_run(work, group))
            stopped = False
        finally:
            if stopped:
                note(f"stopped {_told(work.outcome)}")
    for name, number, position, offset in moved:
        note(f"carried group={name} partition={number} position={position} new_position={offset}")
    for remark in work.outcome.remarks:
        note(f"note: {remark}")
    note(f"copied {_told(work.outcome)}")


def _span(partition: int | None, from_: str, until: str) -> Span:
    """What the options ask for. Raises Invalid(INVALID_REQUEST)."""
    begin, end = parse_start(from_), parse_start(until, option="--until")
    if begin is Bound.LATEST or end is Bound.EARLIEST:
        raise Invalid(ErrorCode.INVALID_REQUEST, "nothing lies between these places")
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


def _told(outcome: Outcome) -> str:
    facts = {"records": outcome.written, "found": outcome.found, "skipped": outcome.skipped}
    facts |= {f"lost_{name}": count for name, count in sorted(outcome.lost.items())}
    return " ".join(f"{name}={count}" for name, count in facts.items() if count or name == "records")


def place_of(text: str, address: str) -> End:
    """A topic of a broker: ``scheme://host:port/topic``, or one of the broker at ``address``. Raises Invalid(INVALID_REQUEST)."""
    scheme, separator, rest = text.partition("://")
    if not separator:
        return End(address, text)
    place, slash, topic = rest.partition("/")
    if not slash or not topic:
        raise Invalid(ErrorCode.INVALID_REQUEST, f"a topic is missing: scheme://host:port/topic got={scheme}://…")
    return End(f"{scheme}://{place}", topic)
