"""``polywire cluster``: check and create a log in a bucket, list its brokers and shards, and move leadership."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from cyclopts import App, Parameter
from cyclopts.validators import Number

from polywire.choices import unknown
from polywire.cli.output import Failed, ListFormat, format_time, note, print_list
from polywire.cli.progress import reported
from polywire.cli.usage import examples
from polywire.clock import SystemClock
from polywire.cluster.bucket_probe import probe
from polywire.cluster.nodes import Candidate, Node, Nodes, NodeState, TakeoverRequest, observed_nodes
from polywire.store.identity import Identity, find_identity, make_identity
from polywire.store.objects import FIRST, Objects
from polywire.store.url import open_bucket
from polywire.types import SHARDS_MAX, shard_name, spell_address

if TYPE_CHECKING:
    from polywire.cluster.migration import Progress

EXIT_UNFIT: Final = 3
IMPORT_TIMEOUT_S: Final = 120  # seconds for one request, which may transfer a whole segment
REPORT_S: Final = 2.0  # seconds between two progress lines
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

Url = Annotated[str, Parameter(help="Bucket and prefix of the log: s3://, gs://, az:// or file:///.")]
Output = Annotated[ListFormat, Parameter(name=("--output", "-o"), help="Output format.")]


@app.command(
    name="import",
    help_epilogue=examples(
        "polywire cluster import polywire-data s3://my-bucket/polywire",
        "polywire serve --bucket s3://my-bucket/polywire --data-dir polywire-cache",
    ),
)
def import_data(
    data_dir: Annotated[Path, Parameter(help="Data directory of a stopped broker.")],
    url: Url,
) -> None:
    """Import a data directory into a bucket without a log: topics, records with their offsets, groups with committed offsets, users.

    The directory is not changed. Run an interrupted import again to resume it. No broker can lead before the import is complete.
    """
    # The modules of the log are imported only if they are needed.
    from polywire.cli.doctor import opened
    from polywire.cluster.bucket_probe import check as check_bucket
    from polywire.cluster.migration import import_directory
    from polywire.server.placement import count_shards

    shards = count_shards(data_dir)
    if shards > 1:
        raise Failed(
            f"data directory has several shards (only a directory of one process can be imported) shards={shards}"
        )
    objects, blobs = open_bucket(url), open_bucket(url, timeout_s=IMPORT_TIMEOUT_S)
    check_bucket(objects)
    with opened(data_dir) as offline:
        imported = import_directory(offline, objects, blobs, SystemClock(), _ProgressLine())
    outcome = "this directory was already imported" if imported.again else "imported"
    note(f"{outcome} id={imported.identity.id} segments={imported.segments} bytes={imported.bytes}")
    note(f"next: polywire serve --bucket {url} --data-dir (another directory, for the cache)")


@app.command(
    help_epilogue=examples(
        "polywire cluster check s3://my-bucket/polywire",
        "polywire cluster check file:///srv/polywire",
        exits={EXIT_UNFIT: "the bucket does not support the conditional writes that a log needs"},
    )
)
def check(url: Url, *, output: Output = ListFormat.TABLE) -> int:
    """Check that a bucket supports the conditional writes that a log needs. Exits with 0 if it does, with 3 if not."""
    with reported("checking the bucket"):
        findings = probe(open_bucket(url))
    rows = [{"check": finding.what, "result": finding.defect or "ok"} for finding in findings]
    print_list(rows, columns=("check", "result"), form=output)
    return EXIT_UNFIT if any(finding.defect for finding in findings) else 0


@app.command(
    help_epilogue=examples(
        "polywire cluster init s3://my-bucket/polywire",
        "polywire cluster init s3://my-bucket/polywire --shards 8",
        exits={EXIT_UNFIT: "the bucket does not support the conditional writes that a log needs"},
    )
)
def init(
    url: Url,
    *,
    shards: Annotated[
        int,
        Parameter(
            help="Number of shards to divide the topics among. Each shard has one leader, and each machine runs a process for each "
            "shard. The number cannot be changed later.",
            validator=Number(gte=1, lte=SHARDS_MAX),
        ),
    ] = 1,
) -> int:
    """Check a bucket and create an empty log in it. Brokers do the same at their first start.

    If the bucket already has a log, nothing is changed; a different number of shards is an error.
    """
    objects = open_bucket(url)
    with reported("checking the bucket"):
        defects = [f"{finding.what}: {finding.defect}" for finding in probe(objects) if finding.defect]
    if defects:
        note(f"the bucket cannot store a log: {defects[0]}", style="red")
        return EXIT_UNFIT
    identity, is_new = make_identity(objects, secrets.token_bytes, SystemClock().now_us(), shards=shards)
    if identity.shards != shards and shards != 1:
        raise Failed(f"the bucket has a log with another number of shards id={identity.id} shards={identity.shards}")
    outcome = "created a log in the bucket" if is_new else "the bucket already has a log"
    note(f"{outcome} id={identity.id} shards={identity.shards}")
    return 0


@app.command(
    help_epilogue=examples(
        "polywire cluster status s3://my-bucket/polywire", "polywire cluster status s3://my-bucket/polywire -o json"
    )
)
def status(url: Url, *, output: Output = ListFormat.TABLE) -> None:
    """List the brokers of a bucket: whether each is the leader, a standby, deposed or silent.

    Waits a few seconds for a heartbeat of every broker; a broker without one is silent. A standby takes over from a leader that is silent for
    8 seconds.
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
        for node, state in observed_nodes(objects)
    ]
    print_list(rows, columns=NODE_COLUMNS, form=output)
    if output is ListFormat.TABLE:
        note(f"log id={identity.id} created={format_time(identity.created_at_us)} shards={identity.shards}")


@app.command(
    name="shards",
    help_epilogue=examples(
        "polywire cluster shards s3://my-bucket/polywire", "polywire cluster shards s3://my-bucket/polywire -o json"
    ),
)
def list_shards(url: Url, *, output: Output = ListFormat.TABLE) -> None:
    """List the shards of a bucket with their leader, its start number, and the standbys. Waits for heartbeats like
    status.
    """
    objects = open_bucket(url)
    identity, seen = _identity(objects), observed_nodes(objects)
    rows = []
    for shard in range(identity.shards):
        leader = _leader(seen, shard)
        rows.append(
            {
                "shard": shard_name(shard),
                "leader": None if leader is None else leader.name,
                "start": None if leader is None else leader.start,
                "standing_by": " ".join(_standbys(seen, shard)),
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
    node: Annotated[
        str | None, Parameter(help="Name of the standby that becomes the leader. Defaults to the first one.")
    ] = None,
    shard: Annotated[
        int | None, Parameter(help="Number of the shard; required if there are several.", validator=Number(gte=0))
    ] = None,
    timeout_s: Annotated[
        float, Parameter(help="Seconds to wait for the takeover.", validator=Number(gt=0, lte=3600))
    ] = 60.0,
) -> None:
    """Make a standby the leader, for instance before maintenance of the leader's machine.

    Acknowledged records are not lost. Clients of both brokers have to reconnect.
    """
    objects = open_bucket(url)
    identity = _identity(objects)
    if not 0 <= (shard or 0) < identity.shards or (shard is None and identity.shards > 1):
        raise Failed(f"shard number is required (use --shard 0 to --shard {identity.shards - 1})")
    candidate = Candidate(node or "", shard or FIRST, identity.shards)
    node = None if node is None else candidate.name
    nodes, seen = Nodes(objects, candidate), observed_nodes(objects)
    leader, standbys = _leader(seen, candidate.shard), _standbys(seen, candidate.shard)
    if leader is None:
        raise Failed("the shard has no leader (a healthy standby takes over on its own)")
    if node == leader.name:
        raise Failed(f"the broker is already the leader node={node}")
    if not standbys or (node is not None and node not in standbys):
        raise Failed(
            "there is no standby" if node is None else f"the broker is not a standby, or is drained node={node}"
        )
    chosen = node or standbys[0]
    nodes.request_takeover(TakeoverRequest(chosen, leader.start))
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        latest = max(nodes.read(), key=lambda broker: broker.start, default=None)
        if latest is not None and latest.start > leader.start:
            note(f"{latest.name} is now the leader start={latest.start}")
            return
        time.sleep(POLL_S)
    raise Failed(f"no broker has taken over node={chosen} timeout_s={timeout_s:g}")


@app.command(
    help_epilogue=examples(
        "polywire cluster drain s3://my-bucket/polywire broker-2",
        "polywire cluster drain s3://my-bucket/polywire broker-2 --no-wait",
        "polywire cluster drain s3://my-bucket/polywire broker-2 --undo",
        exits={EXIT_LEADS: "the broker still leads shards that have no other standby"},
    )
)
def drain(
    url: Url,
    node: Annotated[str, Parameter(help="Name of the broker: its --node, or its host name.")],
    *,
    undo: Annotated[bool, Parameter(negative="", help="Let the broker lead again.")] = False,
    wait: Annotated[bool, Parameter(help="Wait until the broker leads no shard, and print the new leaders.")] = True,
    timeout_s: Annotated[
        float, Parameter(help="Seconds to wait for the standbys.", validator=Number(gt=0, lte=3600))
    ] = 60.0,
) -> int:
    """Hand all shards of a broker to standbys and give it no new ones, for instance before maintenance of its machine.

    The broker still forwards connections. It stays drained until --undo or until it exits. A drained broker still leads if no other broker is
    left.
    """
    objects = open_bucket(url)
    identity, nodes = _identity(objects), Nodes(objects)
    known = {broker.machine for broker in nodes.read()}
    if node not in known:
        raise unknown("node", node, known)
    if undo:
        nodes.undrain(node)
        note(f"{node} can lead again")
        return 0
    nodes.drain(node)
    if not wait:
        note(f"{node} hands over its shards")
        return 0
    still_led = _await_drained(nodes, node, identity.shards, timeout_s)
    if still_led:
        note(f"{node} still leads shards: {', '.join(map(shard_name, sorted(still_led)))}", style="red")
        return EXIT_LEADS
    note(f"{node} leads no shard and forwards connections")
    return 0


def _await_drained(nodes: Nodes, machine: str, shards: int, timeout_s: float) -> set[int]:
    """Wait until a machine leads no shard, and print each new leader.

    Returns the shards that the machine still leads after ``timeout_s`` seconds.
    """
    end, awaited, has_warned = time.monotonic() + timeout_s, set[int](), False
    while True:
        brokers = nodes.read()
        latest = {
            shard: max((node for node in brokers if node.shard == shard), key=lambda node: node.start, default=None)
            for shard in range(shards)
        }
        leaders = {shard: node for shard, node in latest.items() if node is not None and node.start > 0}
        still_led = {shard for shard, leader in leaders.items() if leader.machine == machine}
        for shard in sorted(awaited & leaders.keys() - still_led):
            note(f"{leaders[shard].name} is now the leader of shard {shard_name(shard)} start={leaders[shard].start}")
        awaited = still_led | (awaited - leaders.keys())  # a new leader that is still recovering is in neither set
        others = {node.machine for node in brokers if not node.drained}
        if still_led and not others and not has_warned:
            note("there is no other broker that could take over", style="yellow")
            has_warned = True
        if not awaited or time.monotonic() >= end:
            return still_led
        time.sleep(POLL_S)


def _leader(seen: Sequence[tuple[Node, NodeState]], shard: int) -> Node | None:
    return next((node for node, state in seen if node.shard == shard and state is NodeState.LEADS), None)


def _standbys(seen: Sequence[tuple[Node, NodeState]], shard: int) -> list[str]:
    """Return the names of the standbys of a shard that are not drained."""
    return [
        node.name for node, state in seen if node.shard == shard and state is NodeState.STANDBY and not node.drained
    ]


def _identity(objects: Objects) -> Identity:
    """Return the identity of the bucket's log. Raises Failed if the bucket has no log."""
    identity = find_identity(objects)
    if identity is None:
        raise Failed("the bucket has no log (create one with polywire cluster init, or start a broker)")
    return identity


class _ProgressLine:
    def __init__(self) -> None:
        self._printed_at = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if now >= self._printed_at + REPORT_S or progress.segments == progress.segments_all:
            self._printed_at = now
            note(
                f"{progress.step.value} segments={progress.segments} of={progress.segments_all} bytes={progress.bytes}"
            )
