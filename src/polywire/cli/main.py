"""The command ``polywire``: puts the nouns together and turns errors into messages and exit codes.

Promises: exit code 0 done, 1 refused or failed, 2 wrong usage, 130 interrupted; errors are one line on standard error.
Must not know: what any command does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Final

from cyclopts import App, CycloptsError, MissingArgumentError, UnusedCliTokensError

from polywire.build_info import VERSION
from polywire.cli.completion import completion_of
from polywire.cli.output import Failed, note
from polywire.cli.usage import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, HELP_FORMAT, examples
from polywire.errors import BrokerError, ErrorCode

# In the order of their help. Each is loaded when it is used, since a client needs no broker; so what it is for is told here.
NOUNS: Final = {
    "serve": "Run a broker until SIGTERM or SIGINT.",
    "stop": "Stop a broker that was started with polywire serve --detach.",
    "dev": """Run a broker to try things with until SIGTERM or SIGINT: all wires on this machine alone, and a topic with records.

    Addresses are printed as JSON on standard output once everything listens and the topic is there.
    """,
    "topic": "List, create, describe, alter and delete topics.",
    "record": "Produce, consume, tail and copy records.",
    "group": """List, describe, reset and delete consumer groups, and carry their committed offsets.

    Spark queries appear as groups if the option commitGroup is set.
    """,
    "transaction": """List and delete transactional ids and the state of their latest transaction.

    An id expires seven days after its last use.
    """,
    "writer": """List and delete writers of staged publishes (such as Spark's sink) and their last sequence number.

    A writer expires thirty days after its last publish.
    """,
    "pipeline": "Run prebuilt Spark jobs between topics and tables.",
    "user": "Manage the file of users.",
    "backup": "Take, list, verify and restore backups of a data directory.",
    "segment": "List, inspect and verify the sealed segments of a data directory offline.",
    "log": "Verify and repair the log of a data directory offline, verify that of a bucket.",
    "cluster": "Work with a log in a bucket.",
    "top": """Show live what a broker does: throughput by wire, the busiest topics, and groups with their lag, the furthest behind first.

    Ends with Ctrl-C.
    """,
    "bench": "Measure a broker from here, over any wire: produce, consume and latency.",
    "doctor": """Check a data directory offline, or a log in a bucket, which brokers may be using.

    Exits with 0 if it is healthy, 3 if something is damaged, 4 if a broker would not start.
    """,
    "config": "Show and check the settings of polywire serve.",
}

REMEDIES: Final = {
    ErrorCode.TOPIC_MISSING: " (polywire topic list shows which there are)",
    ErrorCode.GROUP_MISSING: " (polywire group list shows which there are)",
    ErrorCode.TRANSACTION_MISSING: " (polywire transaction list shows which there are)",
    ErrorCode.WRITER_MISSING: " (polywire writer list shows which there are)",
}
"""What helps, where a broker's words cannot name the command."""

POSIX_MODULES: Final = frozenset(
    {"fcntl", "resource"}
)  # which Windows has not; what serves or opens a log imports them

app = App(
    name="polywire",
    help="One durable streaming log that speaks many wires.",
    help_format=HELP_FORMAT,
    help_epilogue=examples(
        "polywire serve --detach",
        "echo hello | polywire record produce greetings --format raw",
        "polywire record consume greetings",
    ),
    version=VERSION,
    version_flags=["--version", "-V"],
    result_action="return_value",
    exit_on_error=False,
    print_error=False,
)
MODULES: Final = {"stop": "detached"}
"""Modules of nouns that have not their name."""
for place, (noun, purpose) in enumerate(NOUNS.items()):
    app.command(f"polywire.cli.{MODULES.get(noun, noun)}:app", name=noun, help=purpose, sort_key=place)
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
        note(f"error: {_usage_error(error)} (see --help)", style="red")
        return EXIT_USAGE
    except Failed as error:
        note(f"error: {error}", style="red")
        return EXIT_FAILED
    except BrokerError as error:
        note(f"error: {error.message} code={error.code.value}{REMEDIES.get(error.code, '')}", style="red")
        return EXIT_FAILED
    except BrokenPipeError:
        # The reader went away (a pager, head): not an error. Python would complain once more while flushing at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_DONE
    except OSError as error:
        note(f"error: {_system_error(error)}", style="red")
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


def _usage_error(error: CycloptsError) -> str:
    """What is wrong with the words, in those of the help: what is given by its place has no option's name there."""
    match error:
        case UnusedCliTokensError(unused_tokens=[unused, *_]):
            return f"unexpected argument {unused!r}."
        case MissingArgumentError(argument=argument) if (
            argument is not None and argument.field_info.is_positional and not argument.tokens
        ):
            return f"{' '.join(error.command_chain or ())} needs {argument.name.removeprefix('--').upper()}."
        case _:
            return str(error)


def _system_error(error: OSError) -> str:
    """What the system says of a file, without its number; as it is where there is no file."""
    if error.strerror is None or error.filename is None:
        return str(error)
    return f"{error.strerror} file={str(error.filename)!r}"
