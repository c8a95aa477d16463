"""The command ``polywire``: puts the nouns together and turns errors into messages and exit codes.

Promises: exit code 0 done, 1 refused or failed, 2 wrong usage, 130 interrupted; errors are one line on standard error.
Must not know: what any command does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Final

from cyclopts import App, CycloptsError

from polywire.build_info import VERSION
from polywire.cli.completion import completion_of
from polywire.cli.output import Failed, note
from polywire.cli.usage import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, HELP_FORMAT, examples
from polywire.errors import BrokerError

# In the order of their help. Each is loaded when it is used: a client needs no broker.
NOUNS: Final = (
    "serve",
    "dev",
    "topic",
    "record",
    "group",
    "transaction",
    "writer",
    "pipeline",
    "user",
    "backup",
    "segment",
    "log",
    "cluster",
    "top",
    "bench",
    "doctor",
    "config",
)

POSIX_MODULES: Final = frozenset(
    {"fcntl", "resource"}
)  # which Windows has not; what serves or opens a log imports them

app = App(
    name="polywire",
    help="One durable streaming log that speaks many wires.",
    help_format=HELP_FORMAT,
    help_epilogue=examples(
        "polywire serve &",
        "echo hello | polywire record produce greetings --format raw",
        "polywire record consume greetings",
    ),
    version=VERSION,
    version_flags=["--version", "-V"],
    result_action="return_value",
    exit_on_error=False,
    print_error=False,
)
for noun in NOUNS:
    app.command(f"polywire.cli.{noun}:app", name=noun)
app.command(completion_of(app))


def main() -> None:
    """Run the command line; never returns."""
    sys.exit(run(sys.argv[1:]))


def run(words: Sequence[str]) -> int:
    """Carry out one command and answer its exit code."""
    try:
        code = app(words)
        sys.stdout.flush()
    except CycloptsError as error:
        note(f"error: {error} (see --help)", style="red")
        return EXIT_USAGE
    except Failed as error:
        note(f"error: {error}", style="red")
        return EXIT_FAILED
    except BrokerError as error:
        note(f"error: {error.message} code={error.code.value}", style="red")
        return EXIT_FAILED
    except BrokenPipeError:
        # The reader went away (a pager, head): not an error. Python would complain once more while flushing at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_DONE
    except OSError as error:
        note(f"error: {error}", style="red")
        return EXIT_FAILED
    except ImportError as error:
        if not {getattr(error, "name", None), getattr(error.__cause__, "name", None)} & POSIX_MODULES:
            raise
        note(
            "error: this command needs Linux or macOS; on Windows there are the client and what talks to a broker",
            style="red",
        )
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return code if isinstance(code, int) else EXIT_DONE
