"""The command ``polywire``: puts the nouns together and turns errors into messages and exit codes.

Promises: exit code 0 done, 1 refused or failed, 2 wrong usage, 130 interrupted; errors are one line on standard error.
Must not know: what any command does.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import PackageNotFoundError, version

from cyclopts import App

from polywire.cli import record, serve, topic
from polywire.cli.output import notes
from polywire.errors import BrokerError


def _version() -> str:
    try:
        return version("polywire")
    except PackageNotFoundError:
        return "not installed"


app = App(
    name="polywire",
    help="One durable streaming log that speaks many wires.",
    help_epilogue="Example: polywire serve & echo hello | polywire record produce greetings --format raw",
    version=_version,
)
app.command(serve.app)
app.command(topic.app)
app.command(record.app)


def main() -> None:
    """Run the command line; never returns."""
    try:
        code = app()
    except BrokerError as error:
        notes.print(f"error: {error.message} code={error.code.value}", style="red", markup=False)
        code = 1
    except BrokenPipeError:
        # The reader went away (a pager, head): not an error. Python would complain once more while flushing at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except OSError as error:
        notes.print(f"error: {error}", style="red", markup=False)
        code = 1
    except KeyboardInterrupt:
        code = 130
    sys.exit(code if isinstance(code, int) else 0)
