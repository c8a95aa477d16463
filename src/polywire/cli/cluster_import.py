"""``polywire cluster import``: a stopped broker's data directory becomes the beginning of a log in a bucket.

Promises: the directory is not changed; how far it is, is told. Must not know: how the log is stored.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Final

from cyclopts import App, Parameter

from polywire.cli.log import opened
from polywire.cli.output import Failed, note
from polywire.cli.usage import examples
from polywire.clock import SystemClock
from polywire.cluster.migration import Progress, import_directory
from polywire.cluster.probe import check
from polywire.server.shard_directories import count_shards
from polywire.store.url import open_bucket

TIMEOUT_S: Final = 120  # of one segment
TOLD_S: Final = 2.0  # between two lines about how far it is

app = App(
    name="import",
    help_epilogue=examples(
        "polywire cluster import polywire-data s3://my-bucket/polywire",
        "polywire serve --bucket s3://my-bucket/polywire --data-dir polywire-cache",
    ),
)


@app.default
def import_data(
    data_dir: Annotated[Path, Parameter(help="Data directory of a broker that was stopped.")],
    url: Annotated[str, Parameter(help="Root of the cluster: s3://, gs://, az:// or file:///, a bucket and a prefix.")],
) -> None:
    """Bring a data directory into a bucket without a log: topics, records and offsets, groups and their positions, users."""
    found = count_shards(data_dir)
    if found > 1:
        raise Failed(
            f"a directory of one process is brought into a bucket, the topics of this one lie in several shards={found}"
        )
    objects, blobs = open_bucket(url), open_bucket(url, timeout_s=TIMEOUT_S)
    check(objects)
    with opened(data_dir) as offline:
        done = import_directory(offline, objects, blobs, SystemClock(), _Told())
    what = "this directory is in the bucket" if done.again else "imported"
    note(f"{what} id={done.identity.id} segments={done.segments} bytes={done.bytes}")
    note(f"next: polywire serve --bucket {url} --data-dir (another directory, for the cache)")


class _Told:
    """Tells people how far it is. Guards: not more often than they can read."""

    def __init__(self) -> None:
        self._told_at = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if now >= self._told_at + TOLD_S or progress.segments == progress.segments_all:
            self._told_at = now
            note(
                f"{progress.step.value} segments={progress.segments} of={progress.segments_all} bytes={progress.bytes}"
            )
