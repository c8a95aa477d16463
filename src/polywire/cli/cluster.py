"""``polywire cluster``: the log in a bucket, seen from outside.

Promises: nothing is changed that a running broker rests on. Must not know: how the log is stored.
"""

from __future__ import annotations

from typing import Annotated, Final

from cyclopts import App, Parameter

from polywire.cli.output import ListFormat, print_list
from polywire.cli.usage import examples
from polywire.cluster.probe import probe
from polywire.cluster.url import open_bucket

EXIT_UNFIT: Final = 3

app = App(
    name="cluster",
    help="Work with a log in a bucket.",
    help_epilogue=examples("polywire cluster check s3://my-bucket/polywire"),
)

Url = Annotated[str, Parameter(help="Root of the cluster: s3://, gs://, az:// or file:///, a bucket and a prefix.")]


@app.command(
    help_epilogue=examples(
        "polywire cluster check s3://my-bucket/polywire",
        "polywire cluster check file:///srv/polywire",
        exits={EXIT_UNFIT: "the bucket does not have them"},
    )
)
def check(
    url: Url,
    *,
    output: Annotated[ListFormat, Parameter(name=("--output", "-o"), help="Output format.")] = ListFormat.TABLE,
) -> int:
    """Check whether a bucket has the conditional writes that a log needs. Exits with 0 if it has, with 3 if not."""
    findings = probe(open_bucket(url))
    rows = [{"check": finding.what, "result": finding.defect or "ok"} for finding in findings]
    print_list(rows, columns=("check", "result"), form=output)
    return EXIT_UNFIT if any(finding.defect for finding in findings) else 0
