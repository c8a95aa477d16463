"""``python -m tools.reference``: generate docs/reference from the code, and the ledgers of statements from the tests.

Guarantees: the same code gives the same pages; tests/test_reference.py fails if a page is out of date.
"""

from __future__ import annotations

import pkgutil
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from enum import Enum
from functools import partial
from importlib import import_module
from inspect import Parameter, cleandoc, getsource
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from cyclopts import App
from cyclopts.argument import Argument

from polywire.broker.permissions import ANYBODY, Action
from polywire.broker.settings import DAY_US, HOUR_US, SECOND_US, TOPIC_SETTINGS, BrokerSettings
from polywire.cli import doctor, main
from polywire.cli.usage import EXIT_CODES, EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE
from polywire.client.base import Ability
from polywire.errors import BrokerError, ErrorCode
from polywire.http import (
    api,
    dead_letters,
    downloads,
    encoding,
    history,
    lag,
    records,
    search,
    session,
    sql,
    topics,
    users,
)
from polywire.log.settings import LogSettings
from polywire.protocols.cursus.context import CursusSettings
from polywire.protocols.flux.context import FluxSettings
from polywire.protocols.flux.errors import WIRE_ERRORS
from polywire.protocols.kafka.configs import TOPIC_CONFIGS
from polywire.protocols.polywire.errors import CODES, KINDS
from polywire.server import lifecycle, queries
from polywire.server.hub import ConnectionLimits
from tests import specs
from tests.behaviour.wires import WIRES
from tests.permissions.cases import cases, commands
from tests.specs.pages import PAGES, STATEMENTS, Page, Statement
from tests.test_house import kinds_raised
from tools.client_reference import client_page
from tools.configuration_reference import configuration_page
from tools.http_reference import http_page, metrics_page
from tools.markdown import MADE, table

DOCS: Final = Path(__file__).parents[1] / "docs"
FOLDER: Final = DOCS / "reference"
LEDGERS: Final = Path(__file__).parents[1] / "tests" / "specs" / "pages"
HTTP_LIMITS: Final = (
    session,
    records,
    search,
    downloads,
    encoding,
    topics,
    api,
    users,
    dead_letters,
    lag,
    history,
    sql,
    queries,
)
_CONSTANT: Final = re.compile(r"^([A-Z]\w*_MAX): Final = [^#\n]+  # (.+)$", re.MULTILINE)

OPTION_COLUMNS: Final = ("option", "default", "environment", "meaning")
COMMON_MIN: Final = 3  # an option of this many commands is described once
SERVE_VARIABLES: Final = "POLYWIRE_SERVE_"  # prefix of the variables for the settings of ``serve``

# Fields in a list of a docstring.
_LISTED: Final = re.compile(r"^\* ((?:``\w+``(?:,\s+)?)+):\s(.*(?:\n  .*)*)", re.MULTILINE)
# Sources of rules, which are for readers of the code.
_SOURCE: Final = re.compile(r"\s*\((?:Q\d+|§[\d.]+|(?:spec|concepts|protocols): [^()]*)\)")


def pages() -> dict[str, str]:
    """Return the text of every page by file name."""
    writers: dict[str, Callable[[], Iterator[str]]] = {
        "cli.md": cli_page,
        "client.md": client_page,
        "compatibility.md": compatibility_page,
        "configuration.md": partial(configuration_page, serve_options),
        "errors.md": errors_page,
        "http.md": lambda: http_page(http_limits()),
        "kafka-settings.md": kafka_settings_page,
        "limits.md": limits_page,
        "metrics.md": metrics_page,
        "permissions.md": permissions_page,
    }
    return {name: "\n".join(write()) + "\n" for name, write in writers.items()}


def ledgers() -> dict[str, str]:
    """Return the text of every ledger of statements by file name."""
    wires = dict.fromkeys(page.wire for page in PAGES)
    return {f"{wire}.md": "\n".join(statements_page(wire)) + "\n" for wire in wires}


# The command line.


def cli_page() -> Iterator[str]:
    """Yield the page of the command line: commands, options and exit codes."""
    yield from ["# Command line", "", MADE, ""]
    yield "Results go to standard output, messages to standard error. Every command has `--help`."
    found = list(_commands(main.app, ("polywire",)))
    common = _common_options(command for _, command in found)
    yield from ["", "## Common options", ""]
    yield "Commands below name these options without describing them."
    yield ""
    yield from table(OPTION_COLUMNS, list(common))
    for words, command in found:
        yield from _command(words, command, common)
    yield from ["", "## Exit codes", ""]
    codes = [
        (EXIT_DONE, "done"),
        (EXIT_FAILED, "rejected or failed; standard error has one line with the reason"),
        (EXIT_USAGE, "wrong usage"),
        (doctor.EXIT_DAMAGED, "`doctor`: something is damaged, but a broker starts"),
        (doctor.EXIT_BROKEN, "`doctor`: no broker would start"),
        (lifecycle.EXIT_STORAGE, "`serve`: storage failed; nothing was acknowledged afterwards"),
        (EXIT_INTERRUPTED, "interrupted; `serve`: a second signal ended it immediately"),
    ]
    yield from table(("code", "meaning"), [(str(code), meaning) for code, meaning in codes])


def _commands(app: App, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], App]]:
    """Yield every command that can be run, in the order of the help."""
    if app.default_command is not None:
        yield words, app
    for name in app:
        if not name.startswith("-"):
            yield from _commands(app[name], (*words, name))


def serve_options() -> Iterator[tuple[str, str, str, str]]:
    """Yield every option of ``polywire serve``."""
    return (_option(argument, SERVE_VARIABLES) for argument in _arguments(main.app["serve"]))


def _common_options(found: Iterable[App]) -> Mapping[tuple[str, str, str, str], str]:
    """Return the options that many commands have with the same meaning, each with its first name."""
    counts = Counter(
        _option(argument, "") for command in found for argument in _arguments(command) if not _is_positional(argument)
    )
    common: dict[str, tuple[str, str, str, str]] = {}
    for row, count in counts.most_common():
        if count >= COMMON_MIN:
            common.setdefault(row[0].partition(",")[0], row)
    return {row: name for name, row in common.items()}


def _arguments(command: App) -> list[Argument]:
    collection = command.assemble_argument_collection(parse_docstring=True)
    return [argument for argument in collection if not argument.children]


def _command(words: Sequence[str], command: App, common: Mapping[tuple[str, str, str, str], str]) -> Iterator[str]:
    arguments = _arguments(command)
    positional = [argument for argument in arguments if _is_positional(argument)]
    given = [argument for argument in arguments if argument not in positional]
    needed = [argument.name.removeprefix("--").upper() for argument in positional]
    needed += [f"{argument.name} {argument.name.removeprefix('--').upper()}" for argument in given if argument.required]
    yield from ["", f"## {' '.join(words)}", ""]
    yield from ["```", " ".join([*words, *needed, "[OPTIONS]"]), "```", ""]
    text = cleandoc(command.help or "").partition("\nParameters\n")[0]
    yield from [text.strip(), ""]
    for argument in positional:
        yield from [f"`{argument.name.removeprefix('--').upper()}`: {argument.parameter.help}", ""]
    if words[-1] == "serve":
        yield from ["Its options are listed by topic in [configuration](configuration.md).", ""]
    elif given:
        rows = [_option(argument, "") for argument in given]
        own = [row for row in rows if row not in common]
        if own:
            yield from [*table(OPTION_COLUMNS, own), ""]
        shared = [common[row] for row in rows if row in common]
        if shared:
            yield from [f"{'Also' if own else 'Options'}: {', '.join(shared)}.", ""]
    title, *lines = str(command.help_epilogue).partition(f"\n{EXIT_CODES}\n")[0].splitlines()
    yield from [title, "", "```sh", *(line.strip() for line in lines), "```"]


def _is_positional(argument: Argument) -> bool:
    """Return whether an argument is required and may be given without its name."""
    return argument.required and argument.field_info.kind is not Parameter.KEYWORD_ONLY


def _option(argument: Argument, environment: str) -> tuple[str, str, str, str]:
    names = ", ".join(f"`{name}`" for name in argument.names)
    default = argument.field_info.default
    choices = argument.get_choices()
    meaning = argument.parameter.help or ""
    if choices:
        meaning += f" One of {', '.join(f'`{choice}`' for choice in choices)}."
    variable = "".join(argument.parameter.env_var or ())
    if not variable and environment:
        variable = environment + argument.name.removeprefix("--").replace("-", "_").upper()
    match default:
        case Parameter.empty:
            shown = "required"
        case None | False:
            shown = ""
        case True:
            shown = f"`{argument.name}`"
        case Enum():
            shown = f"`{default.value}`"
        case _:
            shown = f"`{default}`"
    return names, shown, f"`{variable}`" if variable else "", meaning.strip()


# Errors.


def errors_page() -> Iterator[str]:
    """Yield the page of errors: kinds, codes, and their names in FLUX and polywire."""
    yield from ["# Errors", "", MADE, ""]
    yield "The *kind* of an error says what the caller should do; the *code* identifies the error. Each protocol maps codes to its own"
    yield "errors."
    yield ""
    kinds = [
        (f"`{kind.__name__}`", kind.retry.value, cleandoc(kind.__doc__ or "").replace("``", "`")) for kind in KINDS
    ]
    yield from table(("kind", "retry", "meaning"), kinds)
    yield ""
    rows = []
    for code in ErrorCode:
        kind = kind_of(code)
        word, text = WIRE_ERRORS[code]
        spelled = f"`{word.value.decode()}`" + (f" {text}" if text else "")
        rows.append((f"`{code.value}`", f"`{kind.__name__}`", kind.retry.value, spelled, str(CODES[code])))
    yield from table(("code", "kind", "retry", "FLUX", "polywire"), rows)
    yield from [
        "",
        "FLUX has five error words. Where no text is shown, the text is the broker's message. Unknown FLUX commands return",
    ]
    yield "`UNKNOWN_COMMAND`. After malformed bytes the broker replies if it can find the next request, and closes the connection otherwise."


def kind_of(code: ErrorCode) -> type[BrokerError]:
    """Return the kind that an error code is raised as; for a code that nothing raises, the kind of its number."""
    kinds = {kind.__name__: kind for kind in KINDS}
    raised = sorted(kinds_raised().get(code.name, ()))
    return kinds[raised[0]] if raised else list(KINDS)[CODES[code] // 16]


# Settings and limits.


def limits_page() -> Iterator[str]:
    """Yield the page of limits: name, value and meaning, and the settings of a topic."""
    yield from ["# Limits", "", MADE, ""]
    yield "A request beyond a limit is rejected with an [error](errors.md) or waits; the broker continues. Limits that have an option are in"
    yield "[configuration](configuration.md), those of HTTP in [HTTP](http.md#limits). The others are fixed."
    for title, settings in (
        ("Connections", ConnectionLimits),
        ("The broker", BrokerSettings),
        ("The log", LogSettings),
        ("FLUX", FluxSettings),
        ("Cursus", CursusSettings),
    ):
        yield from ["", f"## {title}", ""]
        meanings = field_meanings(settings)
        rows = [(f"`{field.name}`", _default(field), meanings.get(field.name, "")) for field in fields(settings)]
        yield from table(("name", "default", "meaning"), rows)
    yield from ["", "## A topic", ""]
    yield "Settings of a topic have these names in every protocol and command. [Kafka's names](kafka-settings.md) map to them."
    yield ""
    of_topics = [
        (
            f"`{name}`",
            "–" if setting.default is None else f"`{setting.plain(setting.default)}`",
            setting.spelled,
            setting.meaning,
        )
        for name, setting in TOPIC_SETTINGS.items()
    ]
    yield from table(("name", "default", "values", "meaning"), of_topics)


def http_limits() -> Iterator[str]:
    """Yield the limits of requests and responses over HTTP."""
    return table(("name", "limit", "meaning"), [row for module in HTTP_LIMITS for row in _constants(module)])


def _constants(module: ModuleType) -> Iterator[tuple[str, str, str]]:
    """Yield the limits that are constants of a module, with the comment behind each."""
    for name, meaning in _CONSTANT.findall(getsource(module)):
        value = getattr(module, name)
        yield f"`{name.lower()}`", _size(value) if "BYTES" in name else f"{value:,}", meaning


def kafka_settings_page() -> Iterator[str]:
    """Yield the page of topic settings under the names of Kafka's tools."""
    yield from ["# Kafka topic settings", "", MADE, ""]
    yield "CreateTopics, AlterConfigs and IncrementalAlterConfigs reject unknown names and invalid values with INVALID_CONFIG. A"
    yield "setting without an effect is stored and returned by DescribeConfigs, and changes nothing."
    yield ""
    rows = [
        (f"`{name}`", f"`{config.default}`" if config.default else "–", config.allowed_text, config.effect or "none")
        for name, config in TOPIC_CONFIGS.items()
    ]
    yield from table(("name", "default", "values", "effect"), rows)


def field_meanings(settings: type[Any]) -> Mapping[str, str]:
    """Return the meaning of each field from the docstring of a dataclass.

    The docstring has a list with an item ``name``, ``name``: text, or a paragraph with name, name: text for each.
    """
    text = cleandoc(settings.__doc__ or "")
    names = "|".join(field.name for field in fields(settings))
    entries = _LISTED.findall(text)
    if not entries:
        parts = re.split(rf"\b((?:{names})(?:,\s+(?:{names}))*):\s", text)
        entries = list(zip(parts[1::2], parts[2::2], strict=True))
    found: dict[str, str] = {}
    for heads, meaning in entries:
        words = _SOURCE.sub("", " ".join(meaning.split())).replace("``", "`")
        found |= dict.fromkeys(re.findall(r"\w+", heads), words.rstrip("."))
    return found


def _default(field: Field[Any]) -> str:
    value = field.default_factory() if field.default_factory is not MISSING else field.default
    match value:
        case None | {} | "":
            return "–"
        case bool():
            return "yes" if value else "no"
        case Enum():
            return f"`{value.name.lower()}`"
        case int() if field.name.endswith("_us") or "_us_" in field.name:
            return _duration(value)
        case int() if "bytes" in field.name:
            return _size(value)
        case int():
            return str(value) if field.name == "port" else f"{value:,}"
        case _:
            return f"`{value}`" if isinstance(value, str | Path) else str(value)


def _duration(value_us: int) -> str:
    for unit, name in ((DAY_US, "d"), (HOUR_US, "h"), (SECOND_US, "s")):
        if value_us and value_us % unit == 0:
            return f"{value_us // unit} {name}"
    return f"{value_us} µs" if value_us else "0"


def _size(value: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value and value % unit == 0:
            return f"{value // unit:,} {name}"
    return f"{value:,}"


# Features by protocol.


def compatibility_page() -> Iterator[str]:
    """Yield the page of features by protocol."""
    yield from ["# Compatibility", "", MADE, ""]
    yield "Records written over one protocol can be read over every other. The table shows what Polywire's"
    yield "[Python client](../develop/python.md) supports over each protocol. Clients of other systems may use more features of their own"
    yield "protocol: [Protocols](protocols/index.md) describes each one."
    yield ""
    rows = [(ability.value, *("yes" if ability in wire.abilities else "–" for wire in WIRES)) for ability in Ability]
    yield from table(("feature", *(wire.name for wire in WIRES)), rows)
    yield ""
    yield "The test suite runs each scenario over every protocol that has the features it needs, and from every writing protocol to every"
    yield "reading one."


# Permissions.


def permissions_page() -> Iterator[str]:
    """Yield the page of permissions: actions, and the commands of each protocol by action."""
    yield from ["# Permissions", "", MADE, ""]
    yield "On a broker with users, every request of every protocol is one of these actions. An action needs one of the listed"
    yield "permissions, granted for everything, for the stream, or for the topic. *Any* means that the permission for any stream or topic"
    yield "is enough, and the response covers only those. A topic's access list can restrict what a permission allows."
    yield "[Secure a broker](../operate/secure.md#choose-permissions) shows how to give permissions."
    yield ""
    rows = [
        (
            f"`{action.word}`",
            "none"
            if action in ANYBODY
            else "a login"
            if action.needs_no_permission
            else f"`{action.permission_words}`",
            "–" if action.needs_no_permission else action.resource.value,
            action.listed.value if action.listed is not None else "–",
        )
        for action in Action
    ]
    yield from table(("action", "permission", "for", "access list"), rows)
    yield from ["", "## Commands by protocol", ""]
    yield "A command in several rows performs one or several of these actions, depending on the request. FLUX and Kafka 0.7 have no login:"
    yield "their clients are the user `anonymous`, or the user that their TLS certificate names. The test suite sends every command without a"
    yield "login, and as three kinds of user."
    known = list(cases())
    for wire in commands():
        yield from ["", f"### {wire}", ""]
        by_action: dict[Action, dict[str, None]] = {}
        for case in known:
            if case.wire == wire:
                by_action.setdefault(case.action, {})[f"`{case.command}`"] = None
        in_order = [action for action in Action if action in by_action]
        yield from table(
            ("action", "commands"), [(f"`{action.word}`", ", ".join(by_action[action])) for action in in_order]
        )


# Statements of the published pages.


def statements(page: Page) -> list[Statement]:
    """Return the statements of a page in the order of its lines."""
    for module in pkgutil.iter_modules(specs.__path__, f"{specs.__name__}."):
        import_module(module.name)
    return sorted((said for said in STATEMENTS if said.page == page), key=lambda said: (said.line, said.text))


def statements_page(wire: str) -> Iterator[str]:
    """Yield the ledger of a protocol: statements of its published pages, their tests, and the differences."""
    yield from [f"# Statements of the {wire} pages", "", MADE, ""]
    yield "Each row is a statement of a published page, in our words, with the test in `tests/specs` that shows it. The tests"
    yield "use the protocol's own port and the port of all protocols."
    yield f"[The protocol's page](../../../docs/reference/protocols/{wire}.md) is for users."
    pages_of_wire = [page for page in PAGES if page.wire == wire]
    for page in pages_of_wire:
        said = statements(page)
        same = sum(statement.differs is None for statement in said)
        yield from ["", f"## {page.title}", "", f"{same} of {len(said)} statements hold as written.", ""]
        rows = [
            (
                str(statement.line),
                statement.text,
                "yes" if statement.differs is None else "differs",
                f"`{statement.test}`",
            )
            for statement in said
        ]
        yield from table(("line", "statement", "holds", "test"), rows)
    yield from ["", "## Differences", ""]
    differing = [
        (page.name, str(statement.line), statement.text, statement.differs)
        for page in pages_of_wire
        for statement in statements(page)
        if statement.differs is not None
    ]
    yield from table(
        ("page", "line", "statement", "original software", "Polywire", "reason"),
        [(*where, differs.real, differs.ours, differs.why) for *where, differs in differing],
    )


def write() -> None:
    """Write every page that is out of date."""
    made = {FOLDER / name: text for name, text in pages().items()}
    made |= {LEDGERS / name: text for name, text in ledgers().items()}
    for page, text in made.items():
        page.parent.mkdir(exist_ok=True)
        if not page.exists() or page.read_text("utf-8") != text:
            page.write_text(text, "utf-8")


if __name__ == "__main__":
    write()
