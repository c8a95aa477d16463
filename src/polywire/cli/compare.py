"""``polywire record compare`` and ``polywire link compare``: show whether a copy is equal to its source."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final
from urllib.parse import quote, unquote

import msgspec
from cyclopts import App, Parameter

from polywire.cli.admin import AdminApi, GuessedUrl, HttpListener, default_http
from polywire.cli.connection import ADDRESS_DEFAULT, Address
from polywire.cli.output import Failed, ListFormat, note, print_list
from polywire.cli.progress import counted
from polywire.cli.record import Endpoint, endpoint_of
from polywire.cli.usage import EXIT_DONE, EXIT_FAILED, examples
from polywire.client.copying import connected
from polywire.errors import ErrorCode, Invalid
from polywire.matching import is_pattern

if TYPE_CHECKING:
    from polywire.client.comparing import Compared, Rules

COLUMNS: Final = (
    "topic",
    "partition",
    "source_records",
    "copy_records",
    "source_first",
    "source_last",
    "copy_first",
    "copy_last",
    "missing",
    "result",
)
EXITS: Final = {EXIT_FAILED: "a topic differs, or the command failed; standard error gives the reason"}
HANDED_OVER: Final = ("cut-over", "reversed")  # phases of a topic that clients write here
SOURCE_PASSWORD: Final = "POLYWIRE_SOURCE_PASSWORD"

Topics = Annotated[
    tuple[str, ...],
    Parameter(
        name=("--topics", "-t"),
        negative="",
        help="Names and patterns with * and ?, separated by commas; the option can be repeated.",
    ),
]
Ignored = Annotated[
    tuple[str, ...],
    Parameter(
        name="--ignore",
        negative="",
        help="Fields that are not compared, separated by commas: offset, key, value, headers, timestamp, id, event. Without offsets, "
        "records are compared in their order.",
    ),
]
Prefix = Annotated[
    bool,
    Parameter(negative="", help="Accept a copy that ends before the source, and show the number of missing records."),
]
Overlap = Annotated[
    bool,
    Parameter(
        negative="",
        help="Skip the records before the first offset of the copy, if the copy does not begin at the start of the source.",
    ),
]
Compacted = Annotated[
    bool,
    Parameter(
        negative="",
        help="Accept records that only one side has, because compaction may have removed them on the other side.",
    ),
]
Output = Annotated[ListFormat, Parameter(name=("--output", "-o"), help="Output format.")]

app = App(
    name="compare",
    help_epilogue=examples(
        "polywire record compare orders orders-copy",
        "polywire record compare kafka://a:9092 polywire://b:9555 -t 'orders*'",
        "polywire record compare kafka://old:9092/orders orders --prefix --output json",
        exits=EXITS,
    ),
)


@dataclass(frozen=True, slots=True)
class Sides:
    """The URLs of both brokers, and the topics: a pair of names, or patterns for topics with equal names.

    ``continued``: topics whose copy may continue after the end of the source.
    """

    source: str
    copy: str
    pair: tuple[str, str] | None = None
    patterns: tuple[str, ...] = ()
    continued: frozenset[str] = frozenset()


@app.default
def compare(
    source: Endpoint,
    copy: Endpoint,
    *,
    topics: Topics = (),
    prefix: Prefix = False,
    overlap: Overlap = False,
    compacted: Compacted = False,
    ignore: Ignored = (),
    output: Output = ListFormat.TABLE,
    address: Address = ADDRESS_DEFAULT,
) -> int:
    """Compare topics record by record, between any two protocols or brokers, and show the first difference.

    Compares offset, key, value, headers and timestamp, as far as both protocols expose them, up to the ends as of the start of the command.
    With --topics, SOURCE and COPY are brokers (scheme://host:port), and the topics have the same names on both.
    """
    from polywire.client.comparing import Rules

    rules = Rules(
        ignored=frozenset(words_of(ignore)), is_prefix_equal=prefix, is_overlap_only=overlap, is_compacted=compacted
    )
    if topics:
        return compare_topics(Sides(source, copy, patterns=tuple(words_of(topics))), rules, output)
    ends = endpoint_of(source, address), endpoint_of(copy, address)
    if str(ends[0]) == str(ends[1]):
        raise Invalid(ErrorCode.INVALID_REQUEST, f"source and copy are the same topic topic={ends[0].topic!r}")
    return compare_topics(Sides(ends[0].url, ends[1].url, (ends[0].topic, ends[1].topic)), rules, output)


def words_of(values: Sequence[str]) -> list[str]:
    """Return the words of an option that takes several ones, separated by commas."""
    return [word for value in values for word in value.split(",") if word]


def compare_topics(sides: Sides, rules: Rules, form: ListFormat) -> int:
    """Compare, print the result of each partition, and return the exit code."""
    with counted("comparing") as show:
        found, unexposed = asyncio.run(_compare(sides, rules, show))
    is_json = form in (ListFormat.JSON, ListFormat.JSONL)
    rows = [msgspec.to_builtins(row) if is_json else {name: getattr(row, name) for name in COLUMNS} for row in found]
    print_list(rows, columns=COLUMNS, form=form)
    for name in unexposed:
        note(f"note: {name} is not compared: one of the protocols does not expose it")
    _note_results(found)
    return EXIT_FAILED if any(row.difference is not None for row in found) else EXIT_DONE


async def _compare(sides: Sides, rules: Rules, show: Callable[[int], None]) -> tuple[list[Compared], Sequence[str]]:
    from polywire.client.comparing import Comparison, Pair, topics_matching

    async with connected(sides.source) as source, connected(sides.copy) as copy:
        comparison = Comparison(source, copy, rules, show)
        if sides.pair is not None:
            pairs = [Pair(*sides.pair)]
            await topics_matching(source, [pairs[0].source], role="source")
            await topics_matching(copy, [pairs[0].copy], role="copy")
        else:
            pairs = [Pair(name, name) for name in await topics_matching(source, sides.patterns, role="source")]
            await topics_matching(copy, [name for name in sides.patterns if not is_pattern(name)], role="copy")
        rows = [
            row for pair in pairs async for row in comparison.run(pair, may_continue=pair.source in sides.continued)
        ]
        return rows, comparison.comparable.unexposed


def _note_results(found: Sequence[Compared]) -> None:
    for row in found:
        facts = f"topic={row.topic} partition={row.partition}"
        if row.removed:
            note(f"note: the source does not have the first offsets of the copy any more offsets={row.removed} {facts}")
        if row.continued:
            note(
                f"note: the copy continues after the end of the source, which is not compared offsets={row.continued} {facts}"
            )
        if row.difference is not None:
            first = row.difference
            note(
                f"different: {facts} offset={first.offset} field={first.field} source={json.dumps(first.source)} "
                f"copy={json.dumps(first.copy)} only_source={row.only_source} only_copy={row.only_copy} "
                f"different_ranges={row.different_ranges}"
            )
        elif row.only_source or row.only_copy:
            note(f"note: records on one side only only_source={row.only_source} only_copy={row.only_copy} {facts}")
    different = sum(row.difference is not None for row in found)
    records = sum(row.source_records for row in found)
    missing = sum(row.missing for row in found)
    verdict = "different" if different else "equal"
    note(
        f"{verdict} topics={len({row.topic for row in found})} partitions={len(found)} records={records} "
        f"missing={missing} different_partitions={different}"
    )


link_app = App(
    name="compare",
    help_epilogue=examples(
        "polywire link compare old",
        "polywire link compare old --topics 'orders*' --output json",
        "polywire link compare old --from kafka://reader@old:9092",
        exits=EXITS,
    ),
)


@link_app.default
def compare_link(
    name: Annotated[str, Parameter(help="Name of the link.")],
    *,
    topics: Topics = (),
    from_: Annotated[str, Parameter(name="--from")] = "",
    overlap: Overlap = False,
    compacted: Compacted = False,
    ignore: Ignored = (),
    output: Output = ListFormat.TABLE,
    address: Address = ADDRESS_DEFAULT,
    http: HttpListener = None,
) -> int:
    """Compare the topics of a link with those of its source record by record, and show the first difference.

    While the link follows a topic, it is compared up to the end of the copy, and the number of records that are not copied yet is shown.
    After a cut-over, it is compared up to the end of the source, and the number of records that the copy has after it is shown.

    Parameters
    ----------
    from_
        URL of the source, if it differs from the URL of the link. The password of the source is read from POLYWIRE_SOURCE_PASSWORD.
    """
    from polywire.client.comparing import Rules
    from polywire.link_orders import LinkStart

    link = AdminApi(http or GuessedUrl(default_http(address))).request("GET", f"links/{name}")
    rules = Rules(
        ignored=frozenset(words_of(ignore)),
        is_prefix_equal=True,
        is_overlap_only=overlap or link["start"] == LinkStart.LATEST.value,
        is_compacted=compacted,
    )
    source = from_ or _with_user(link["source"], link["user"])
    continued = frozenset(row["topic"] for row in link["topic_reports"] if row.get("phase") in HANDED_OVER)
    followed = [] if link["more"] else [row["topic"] for row in link["topic_reports"]]
    patterns = tuple(words_of(topics) or followed or link["topics"])
    return compare_topics(Sides(with_source_password(source), address, None, patterns, continued), rules, output)


def _with_user(url: str, user: str) -> str:
    scheme, separator, host = url.rpartition("://")
    return f"{scheme}{separator}{quote(user, safe='')}@{host}" if user else url


def with_source_password(url: str) -> str:
    """Return a URL with the password from the environment, if it has a name and no password.

    Raises Failed if the environment has none, because the client would use the password of the broker.
    """
    scheme, separator, rest = url.rpartition("://")
    login, at, host = rest.rpartition("@")
    if not at or ":" in login:
        return url
    password = os.environ.get(SOURCE_PASSWORD)
    if not password:
        raise Failed(f"the source needs a password: set the variable {SOURCE_PASSWORD} user={unquote(login)!r}")
    return f"{scheme}{separator}{login}:{quote(password, safe='')}@{host}"
