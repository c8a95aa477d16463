"""``polywire cluster import``: copy the data directory of a stopped broker into a bucket, without changing the directory."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Final

from cyclopts import App, Parameter

from polywire.cli.log import opened
from polywire.cli.output import Failed, note
from polywire.cli.usage import examples
from polywire.clock import SystemClock
from polywire.cluster.bucket_probe import check
from polywire.cluster.migration import Progress, import_directory
from polywire.server.shard_directories import count_shards
from polywire.store.url import open_bucket

TIMEOUT_S: Final = 120  # seconds for one request, which may transfer a whole segment
REPORT_S: Final = 2.0  # seconds between two progress lines


app = App(
    name="import",
    help_epilogue=examples(
        "polywire cluster import polywire-data s3://my-bucket/polywire",
        "polywire serve --bucket s3://my-bucket/polywire --data-dir polywire-cache",
    ),
)


@app.default
def import_data(
    data_dir: Annotated[Path, Parameter(help="Data directory of a stopped broker.")],
    url: Annotated[str, Parameter(help="Bucket and prefix of the log: s3://, gs://, az:// or file:///.")],
) -> None:
    """Import a data directory into a bucket without a log: topics, records with their offsets, groups with committed offsets, users."""
    shards = count_shards(data_dir)
    if shards > 1:
        raise Failed(
            f"data directory has several shards (only a directory of one process can be imported) shards={shards}"
        )
    objects, blobs = open_bucket(url), open_bucket(url, timeout_s=TIMEOUT_S)
    check(objects)
    with opened(data_dir) as offline:
        imported = import_directory(offline, objects, blobs, SystemClock(), _ProgressLine())
    outcome = "this directory was already imported" if imported.again else "imported"
    note(f"{outcome} id={imported.identity.id} segments={imported.segments} bytes={imported.bytes}")
    note(f"next: polywire serve --bucket {url} --data-dir (another directory, for the cache)")


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
