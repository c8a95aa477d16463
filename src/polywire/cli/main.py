"""The command ``polywire``: defines the subcommands, and converts errors to messages and exit codes.

* Every error is one line on standard error.
* The exit codes are 0 for success, 1 for failure, 2 for wrong usage and 130 for an interrupt. A command may document
  further codes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Final, Literal

from cyclopts import App, CycloptsError, MissingArgumentError, Parameter, UnknownCommandError, UnusedCliTokensError

from polywire.build_info import VERSION
from polywire.choices import unknown
from polywire.cli.contexts import apply, without_option
from polywire.cli.output import Failed, note
from polywire.cli.usage import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, HELP_FORMAT, examples
from polywire.errors import BrokerError, ErrorCode

Shell = Annotated[Literal["bash", "zsh", "fish"], Parameter(help="Shell to print the script for.")]

_ZSH_ENDING: Final = """
if [[ ${{zsh_eval_context[-1]}} == loadautofunc ]]; then
  _cyclopts_{program} "$@"
else
  compdef _cyclopts_{program} {program}
fi
"""


def completion_of(program_app: App) -> App:
    """Return the command that prints scripts for completion in a shell."""
    app = App(
        name="completion",
        help_epilogue=examples(
            "source <(polywire completion bash)",
            "polywire completion zsh > ~/.zfunc/_polywire",
            "polywire completion fish | source",
        ),
    )

    @app.default
    def completion(shell: Shell) -> None:
        """Print a script that completes commands and options in a shell."""
        program = program_app.name[0]
        script = program_app.generate_completion(prog_name=program, shell=shell).rstrip("\n")
        sys.stdout.write(f"{script}\n{_ending(program_app, program, shell)}")

    return app


def _ending(program_app: App, program: str, shell: str) -> str:
    """Return lines to append to a generated completion script.

    zsh runs a file from its function path as the body of the function, but a script that is sourced must register its
    function. fish suggests file names instead of subcommands unless -f is set.
    """
    if shell == "zsh":
        return _ZSH_ENDING.format(program=program)
    if shell == "fish":
        prefixes = ["", *(f" {name}" for name in _subcommands(program_app) if _subcommands(program_app[name]))]
        return "".join(f"complete -c {program} -n '__fish_{program}_using_command{prefix}' -f\n" for prefix in prefixes)
    return ""


def _subcommands(app: App) -> list[str]:
    return [name for name in app if not name.startswith("-")]


# In the order of the help. The help texts are here because each module is imported only when its command runs: client
# commands must not load the broker.
NOUNS: Final = {
    "serve": "Run a broker until SIGTERM or SIGINT.",
    "stop": "Stop a broker that was started with polywire serve --detach.",
    "dev": """Run a local broker for development until SIGTERM or SIGINT, with all protocols and a sample topic.

    Prints the addresses of all listeners as JSON on standard output once the broker is ready and the topic exists.
    """,
    "topic": "List, create, describe, alter and delete topics.",
    "record": "Produce, consume, tail, copy and compare records.",
    "sql": """Query topics in SQL with DuckDB, including records that were appended a moment ago.

    A topic has the columns partition, offset, timestamp, timestamp_type, key,
    value and headers. Write "offset" in double quotes, because it is a keyword.
    If the topic has a table, its files are read, and from the broker only
    newer records. Requires pip install 'polywire[duckdb]'.
    """,
    "group": """List, describe, reset and delete consumer groups, and export and import their committed offsets.

    Spark queries appear as groups if the option commitGroup is set.
    """,
    "queue": """List, describe, change, purge and delete work queues, look at their next records, and redrive dead letters.

    A queue is a topic whose records workers of a share group acknowledge one by one.
    """,
    "transaction": """List and delete transactional ids, with the state of their latest transaction.

    A transactional id expires seven days after its last use.
    """,
    "writer": """List and delete writers of staged publishes, such as the Spark sink, with their last sequence number.

    A writer expires thirty days after its last publish.
    """,
    "link": """Follow topics of another broker: Kafka, Polywire, and the other protocols.

    The broker copies the records of a link, each once, and continues after a crash. See polywire link create --help.
    """,
    "pipeline": "Run prebuilt Spark jobs between topics and tables.",
    "user": "Manage the users file.",
    "quota": "Limit the bytes and requests per second of users and client ids.",
    "backup": "Create, list, verify and restore backups of a data directory.",
    "segment": "List, inspect and verify the sealed segments of a data directory offline.",
    "log": "Verify and repair the log of a data directory offline, or verify the log of a bucket.",
    "cluster": "Manage a log in a bucket and the brokers that serve it.",
    "top": """Show a broker's activity live: throughput by protocol, the busiest topics, and the groups with the largest lag.

    With a bucket it also shows the leader, data not yet uploaded, and requests to the bucket. Stop it with Ctrl-C.
    """,
    "bench": "Measure produce throughput, consume throughput and latency of a broker, over any protocol.",
    "mcp": """Let an assistant look at a broker: tools of the Model Context Protocol on standard input and output.

    The tools list topics and groups, read records, run SQL, and explain why a
    group is behind. They only read, unless --allow-writes is given. Requires
    pip install 'polywire[mcp]'.
    """,
    "doctor": """Check a data directory offline, or a log in a bucket while brokers use it.

    Exits with 0 if it is healthy, 3 if something is damaged, 4 if a broker would not start.
    """,
    "config": "Show and check the settings of polywire serve.",
    "context": """Name the brokers that commands connect to, with their users.

    polywire --context NAME uses a context for one command. An option overrides it,
    and it overrides POLYWIRE_ADDRESS. Without the option, commands use
    POLYWIRE_ADDRESS, or else the context in POLYWIRE_CONTEXT, or else the one that
    was chosen with polywire context use.
    """,
}
CLIENT_NOUNS: Final = frozenset(
    {
        *("topic", "record", "sql", "group", "queue", "transaction", "writer", "link", "pipeline"),
        *("quota", "top", "bench", "mcp"),
    }
)
"""Commands that connect to a broker, and therefore use contexts."""

REMEDIES: Final = {
    ErrorCode.TOPIC_MISSING: " (list topics with: polywire topic list)",
    ErrorCode.GROUP_MISSING: " (list groups with: polywire group list)",
    ErrorCode.TRANSACTION_MISSING: " (list transactional ids with: polywire transaction list)",
    ErrorCode.WRITER_MISSING: " (list writers with: polywire writer list)",
}
"""Advice for errors of the broker, which does not know this command line."""

# Windows lacks modules that the broker and the offline tools import.
POSIX_MODULES: Final = frozenset({"fcntl", "resource"})

app = App(
    name="polywire",
    help="A durable log broker that speaks six protocols, Kafka included, over one log.",
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
STDERR: Final = 2
MODULES: Final = {"stop": "detached:app", "writer": "transaction:writer_app"}
"""Modules of commands that are not in the module of the same name."""
for position, (noun, purpose) in enumerate(NOUNS.items()):
    app.command(f"polywire.cli.{MODULES.get(noun, f'{noun}:app')}", name=noun, help=purpose, sort_key=position)
app.command(completion_of(app))


def main() -> None:
    """Run the command line and exit the process."""
    _open_standard_descriptors()
    if sys.stdin is None:
        sys.stdin = os.fdopen(0)  # the null device
    sys.exit(run(sys.argv[1:]))


def _open_standard_descriptors() -> None:
    """Open the null device for those of descriptors 0 to 2 that the process was started without.

    Otherwise a file of the log could get such a descriptor, and the system's libraries would write messages into it.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def run(words: Sequence[str]) -> int:
    """Run one command and return its exit code."""
    try:
        code = app(_in_context(words))
        if sys.stdout is not None:
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
        # A pager or head closed the pipe, which is not an error. Without dup2, Python would report it again when it
        # flushes the output at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_DONE
    except OSError as error:
        note(f"error: {_system_error(error)}", style="red")
        return EXIT_FAILED
    except ImportError as error:
        if not {getattr(error, "name", None), getattr(error.__cause__, "name", None)} & POSIX_MODULES:
            raise
        note(
            "error: this command needs Linux or macOS (on Windows, use the client and the commands that connect to a broker)",
            style="red",
        )
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return code if isinstance(code, int) else EXIT_DONE


def _in_context(words: Sequence[str]) -> Sequence[str]:
    """Apply the context of a command. Return its words without the option for it.

    Raises Failed, BrokerError and OSError if the context cannot be read.
    """
    words, name = without_option(words)
    if words and words[0] in CLIENT_NOUNS and not {"--help", "-h"} & set(words):
        apply(name, words)
    elif name is not None and words and words[0] not in CLIENT_NOUNS:
        raise Failed(f"only commands that connect to a broker use a context command={words[0]!r}")
    return words


def _usage_error(error: CycloptsError) -> str:
    """Return the message for a usage error, with positional arguments named as in the help."""
    match error:
        case UnknownCommandError(app=of, unused_tokens=[word, *_]) if of is app:  # its own text loads all commands
            return unknown("command", word, _subcommands(app)).message
        case UnusedCliTokensError(unused_tokens=[unused, *_]):
            return f"unexpected argument {unused!r}."
        case MissingArgumentError(argument=argument) if (
            argument is not None and argument.field_info.is_positional and not argument.tokens
        ):
            return f"{' '.join(error.command_chain or ())} needs {argument.name.removeprefix('--').upper()}."
        case _:
            return str(error)


def _system_error(error: OSError) -> str:
    """Return the system's message and the name of the file, without the errno."""
    if error.strerror is None or error.filename is None:
        return str(error)
    return f"{error.strerror} file={str(error.filename)!r}"
