"""``polywire log verify``: read all data of a log in a directory or a bucket, and report damage."""

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
    print_examined,
    print_findings,
    required,
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
    """Read the journal, its snapshots and every stored batch of a data directory (offline) or a bucket, and list damage."""
    if bucket is not None:
        found = examined(bucket)
        print_examined([Examined(part.state, unsound(part.findings)) for part in found], output)
        findings = [finding for part in found for finding in part.findings]
    else:
        with opened(required(data_dir)) as offline:
            findings = examine(offline)
            print_findings(offline.state, unsound(findings), output)
    note(f"verified files={len({finding.path for finding in findings})} findings={len(unsound(findings))}")
    return exit_code(findings)
