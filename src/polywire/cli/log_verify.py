"""``polywire log verify``: everything a start and every reader would read of a data directory or a bucket, read and checked.

Promises: nothing is changed. Must not know: how the log is stored.
"""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

from polywire.cli.doctor import (
    EXITS,
    Bucket,
    Directory,
    Examined,
    examined,
    exit_code,
    needed,
    print_examined,
    print_findings,
    unsound,
)
from polywire.cli.log import opened
from polywire.cli.output import ListFormat, note
from polywire.cli.usage import examples
from polywire.log.doctor import examine

app = App(
    name="verify",
    help_epilogue=examples(
        "polywire log verify --data-dir polywire-data",
        "polywire log verify --bucket s3://my-bucket/polywire",
        "polywire log verify --data-dir polywire-data --output jsonl | jq .path",
        exits=EXITS,
    ),
)


@app.default
def verify(
    *,
    data_dir: Directory = None,
    bucket: Bucket = None,
    output: Annotated[ListFormat, Parameter(name=("--output", "-o"), help="Output format.")] = ListFormat.TABLE,
) -> int:
    """Read the journal, its snapshots and every stored batch, and list what does not verify: of a data directory offline, or of a bucket."""
    if bucket is not None:
        found = examined(bucket)
        print_examined([Examined(part.state, unsound(part.findings)) for part in found], output)
        findings = [finding for part in found for finding in part.findings]
    else:
        with opened(needed(data_dir)) as offline:
            findings = examine(offline)
            print_findings(offline.state, unsound(findings), output)
    note(f"verified files={len({finding.path for finding in findings})} findings={len(unsound(findings))}")
    return exit_code(findings)
