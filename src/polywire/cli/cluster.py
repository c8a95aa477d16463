"""``polywire cluster``: the log in a bucket, seen from outside.

Promises: nothing is changed that a running broker rests on. Must not know: how the log is stored.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Annotated, Final

from cyclopts import App, Parameter
from cyclopts.validators import Number

from polywire.choices import unknown
from polywire.cli.output import Failed, ListFormat, note, print_list
from polywire.cli.record_lines import format_time
from polywire.cli.usage import examples
from polywire.clock import SystemClock
from polywire.cluster.nodes import LOOK_S, Candidate, Node, Nodes, NodeState, Watch, Wish, states
from polywire.cluster.probe import probe
from polywire.cluster.shards import FIRST
from polywire.store.identity import Identity, find_identity, make_identity
from polywire.store.objects import Objects
from polywire.store.url import open_bucket
from polywire.types import SHARDS_MAX, shard_name, spell_address

EXIT_UNFIT: Final = 3
POLL_S: Final = 0.25
EXIT_LEADS: Final = 3
NODE_COLUMNS: Final = ("node", "shard", "state", "start", "drained", "addresses")
SHARD_COLUMNS: Final = ("shard", "leader", "start", "standing_by")

app = App(
    name="cluster",
    help_epilogue=examples(
        "polywire cluster check s3://my-bucket/polywire", "polywire cluster status s3://my-bucket/polywire"
    ),
)

Url = Annotated[str, Parameter(help="Root of the cluster: s3://, gs://, az:// or file:///, a bucket and a prefix.")]
app.command(
    "polywire.cli.cluster_import:app",
    name="import",
    help="Bring a data directory into a bucket without a log: topics, records and offsets, groups and their positions, users.\n\n"
    "The directory stays as it is. An import that was broken off is run again, and goes on; no broker leads the bucket before its end.",
)
Output = Annotated[ListFormat, Parameter(name=("--output", "-o"), help="Output format.")]


@app.command(
    help_epilogue=examples(
        "polywire cluster check s3://my-bucket/polywire",
        "polywire cluster check file:///srv/polywire",
        exits={EXIT_UNFIT: "the bucket does not have them"},
    )
)
def check(url: Url, *, output: Output = ListFormat.TABLE) -> int:
    """Check whether a bucket has the conditional writes that a log needs. Exits with 0 if it has, with 3 if not."""
    findings = probe(open_bucket(url))
    rows = [{"check": finding.what, "result": finding.defect or "ok"} for finding in findings]
    print_list(rows, columns=("check", "result"), form=output)
    return EXIT_UNFIT if any(finding.defect for finding in findings) else 0


@app.command(
    help_epilogue=examples(
        "polywire cluster init s3://my-bucket/polywire",
        "polywire cluster init s3://my-bucket/polywire --shards 8",
        exits={EXIT_UNFIT: "the bucket does not have the conditional writes that a log needs"},
    )
)
def init(
    url: Url,
    *,
    shards: Annotated[
        int,
        Parameter(
            help="Number of shards that have the topics between them, each led by one broker at a time; it stays as it is for ever. A "
            "machine serves with a process for each.",
            validator=Number(gte=1, lte=SHARDS_MAX),
        ),
    ] = 1,
) -> int:
    """Check a bucket, and make it one that holds a log, which brokers do at their first start as well.

    A bucket that holds a log already is left as it is; one with another number of shards is an error.
    """
    objects = open_bucket(url)
    defects = [f"{finding.what}: {finding.defect}" for finding in probe(objects) if finding.defect]
    if defects:
        note(f"this bucket cannot hold a log: {defects[0]}", style="red")
        return EXIT_UNFIT
    identity, made = make_identity(objects, secrets.token_bytes, SystemClock().now_us(), shards=shards)
    if identity.shards != shards and shards != 1:
        raise Failed(
            f"there is a log in this bucket with another number of shards id={identity.id} shards={identity.shards}"
        )
    note(f"{'made' if made else 'there is'} a log in this bucket id={identity.id} shards={identity.shards}")
    return 0


@app.command(
    help_epilogue=examples(
        "polywire cluster status s3://my-bucket/polywire", "polywire cluster status s3://my-bucket/polywire -o json"
    )
)
def status(url: Url, *, output: Output = ListFormat.TABLE) -> None:
    """List the brokers of a bucket: who leads, stands by, was deposed, is silent. Looks until all have said something, some seconds at most.

    A broker is silent that has said nothing meanwhile; one that leads is followed when it has been silent for 8 seconds.
    """
    objects = open_bucket(url)
    identity = _identity(objects)
    rows = [
        {
            "node": node.name,
            "shard": shard_name(node.shard),
            "state": state.value,
            "start": node.start if node.start > 0 else None,
            "drained": node.drained,
            "addresses": " ".join(f"{wire}={spell_address(*at)}" for wire, at in sorted(node.addresses.items())),
        }
        for node, state in seen_nodes(objects)
    ]
    print_list(rows, columns=NODE_COLUMNS, form=output)
    if output is ListFormat.TABLE:
        note(f"log id={identity.id} made={format_time(identity.created_at_us)} shards={identity.shards}")


@app.command(
    name="shards",
    help_epilogue=examples(
        "polywire cluster shards s3://my-bucket/polywire", "polywire cluster shards s3://my-bucket/polywire -o json"
    ),
)
def list_shards(url: Url, *, output: Output = ListFormat.TABLE) -> None:
    """List the shards of a bucket: who leads each, under which start, and who stands by for it. Looks as status does."""
    objects = open_bucket(url)
    identity, seen = _identity(objects), seen_nodes(objects)
    rows = []
    for shard in range(identity.shards):
        leader = _leader(seen, shard)
        rows.append(
            {
                "shard": shard_name(shard),
                "leader": None if leader is None else leader.name,
                "start": None if leader is None else leader.start,
                "standing_by": " ".join(_able(seen, shard)),
            }
        )
    print_list(rows, columns=SHARD_COLUMNS, form=output)


@app.command(
    help_epilogue=examples(
        "polywire cluster takeover s3://my-bucket/polywire",
        "polywire cluster takeover s3://my-bucket/polywire --node broker-2",
        "polywire cluster takeover s3://my-bucket/polywire --shard 3 --node broker-2",
    )
)
def takeover(
    url: Url,
    *,
    node: Annotated[str | None, Parameter(help="Who is to lead; without it the first of those that stand by.")] = None,
    shard: Annotated[
        int | None, Parameter(help="Number of the shard; needed where there are several.", validator=Number(gte=0))
    ] = None,
    timeout_s: Annotated[float, Parameter(help="How long to wait for it.", validator=Number(gt=0, lte=3600))] = 60.0,
) -> None:
    """Have a broker that stands by lead instead of the one that does, for instance before its machine is looked after.

    What was acknowledged stays; clients of both connect anew.
    """
    objects = open_bucket(url)
    identity = _identity(objects)
    if not 0 <= (shard or 0) < identity.shards or (shard is None and identity.shards > 1):
        raise Failed(f"name one of the bucket's shards: --shard 0 to {identity.shards - 1}")
    candidate = Candidate(node or "", shard or FIRST, identity.shards)
    node = None if node is None else candidate.name
    nodes, seen = Nodes(objects, candidate), seen_nodes(objects)
    leader, able = _leader(seen, candidate.shard), _able(seen, candidate.shard)
    if leader is None:
        raise Failed("nobody leads: whoever stands by does so by itself")
    if node == leader.name:
        raise Failed(f"it leads already node={node}")
    if not able or (node is not None and node not in able):
        raise Failed(
            "nobody stands by" if node is None else f"this broker does not stand by, or is drained node={node}"
        )
    chosen = node or able[0]
    nodes.wish(Wish(chosen, leader.start))
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        found = max(nodes.read(), key=lambda one: one.start, default=None)
        if found is not None and found.start > leader.start:
            note(f"{found.name} leads now start={found.start}")
            return
        time.sleep(POLL_S)
    raise Failed(f"nobody has taken over node={chosen} timeout_s={timeout_s:g}")


@app.command(
    help_epilogue=examples(
        "polywire cluster drain s3://my-bucket/polywire broker-2",
        "polywire cluster drain s3://my-bucket/polywire broker-2 --no-wait",
        "polywire cluster drain s3://my-bucket/polywire broker-2 --undo",
        exits={EXIT_LEADS: "the broker still leads shards, until others stand by for them"},
    )
)
def drain(
    url: Url,
    node: Annotated[str, Parameter(help="Name of the broker, as it was started with.")],
    *,
    undo: Annotated[bool, Parameter(negative="", help="Let it lead again.")] = False,
    wait: Annotated[bool, Parameter(help="Whether to wait until it leads nothing, and tell who does.")] = True,
    timeout_s: Annotated[float, Parameter(help="How long to wait for it.", validator=Number(gt=0, lte=3600))] = 60.0,
) -> int:
    """Have a broker give all its shards to others that stand by, and be given none, for instance before its machine is looked after.

    It goes on carrying connections. That holds until --undo, or until the broker ends; where nobody else is left it leads nevertheless.
    """
    objects = open_bucket(url)
    identity, nodes = _identity(objects), Nodes(objects)
    known = {one.machine for one in nodes.read()}
    if node not in known:
        raise unknown("node", node, known)
    if undo:
        nodes.undrain(node)
        note(f"{node} may lead again")
        return 0
    nodes.drain(node)
    if not wait:
        note(f"{node} gives away what it leads")
        return 0
    left = _await_drained(nodes, node, identity.shards, timeout_s)
    if left:
        note(f"{node} still leads shards: {', '.join(map(shard_name, sorted(left)))}", style="red")
        return EXIT_LEADS
    note(f"{node} leads nothing, and carries connections")
    return 0


def _await_drained(nodes: Nodes, machine: str, shards: int, timeout_s: float) -> set[int]:
    """Tell who follows a machine in the lead of its shards; returns those that it still leads after all that time."""
    end, given, alone = time.monotonic() + timeout_s, set[int](), False
    while True:
        found = nodes.read()
        leaders = {
            shard: max((node for node in found if node.shard == shard), key=lambda node: node.start, default=None)
            for shard in range(shards)
        }
        led = {shard: leader for shard, leader in leaders.items() if leader is not None and leader.start > 0}
        left = {shard for shard, leader in led.items() if leader.machine == machine}
        for shard in sorted(given & led.keys() - left):
            note(f"{led[shard].name} leads shard {shard_name(shard)} now start={led[shard].start}")
        given = left | (given - led.keys())  # who follows may be recovering
        others = {node.machine for node in found if not node.drained}
        if left and not others and not alone:
            note("nobody else is there to take over", style="yellow")
            alone = True
        if not given or time.monotonic() >= end:
            return left
        time.sleep(POLL_S)


def _leader(seen: Sequence[tuple[Node, NodeState]], shard: int) -> Node | None:
    """Who leads a shard."""
    return next((one for one, state in seen if one.shard == shard and state is NodeState.LEADS), None)


def _able(seen: Sequence[tuple[Node, NodeState]], shard: int) -> list[str]:
    """Names of those who stand by for a shard, on machines that may lead."""
    return [one.name for one, state in seen if one.shard == shard and state is NodeState.STANDS_BY and not one.drained]


def _identity(objects: Objects) -> Identity:
    """What the bucket is. Raises Failed."""
    found = find_identity(objects)
    if found is None:
        raise Failed(
            "there is no log in this bucket: polywire cluster init makes one, and so does a broker's first start"
        )
    return found


def seen_nodes(objects: Objects) -> list[tuple[Node, NodeState]]:
    """Everybody, and what they do: as soon as all have been heard of, at the latest when those who live must have been."""
    nodes, clock, watch = Nodes(objects), SystemClock(), Watch("")
    found, begun = nodes.read(), clock.monotonic()
    watch.see(found, begun)
    now, heard = begun, set[str]()
    while now < begun + LOOK_S and not heard.issuperset(node.name for node in found):
        time.sleep(POLL_S)
        found, now = nodes.read(), clock.monotonic()
        watch.see(found, now)
        heard.update(node.name for node in found if watch.silent_s(node) == 0)
    return states(found, heard)
