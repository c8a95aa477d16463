"""``python -m tools.reference``: writes docs/reference, the pages that are made of the code itself.

Promises: the same code gives the same pages, and a page says nothing that the code does not; tests/test_reference.py fails when a page is
older than the code.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
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

from polywire.broker.actions import ANYBODY, Action
from polywire.broker.settings import DAY_US, HOUR_US, SECOND_US, TOPIC_SETTINGS, BrokerSettings
from polywire.cli import doctor, main
from polywire.cli.usage import EXIT_CODES, EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE
from polywire.client.base import Ability
from polywire.errors import BrokerError, ErrorCode
from polywire.http import api, dead_letters, framing, lag, records, spelling, users
from polywire.log.settings import LogSettings
from polywire.protocols.cursus.context import CursusSettings
from polywire.protocols.flux.context import FluxSettings
from polywire.protocols.flux.errors import WIRE_ERRORS
from polywire.protocols.kafka.configs import TOPIC_CONFIGS
from polywire.protocols.polywire.errors import CODES, KINDS
from polywire.server import lifecycle
from polywire.server.config import ServeConfig
from polywire.server.hub import ConnectionLimits
from tests import specs
from tests.behaviour.compatibility import planned_table
from tests.behaviour.wires import WIRES
from tests.permissions.cases import Player, cases, commands, expected
from tests.specs.pages import PAGES, STATEMENTS, Page, Statement
from tests.test_house import kinds_raised
from tools.client_reference import client_page

DOCS: Final = Path(__file__).parents[1] / "docs"
FOLDER: Final = DOCS / "reference"
DIFFERENCES_BEGIN: Final = "<!-- made by `make docs` from tests/specs: what differs -->"
DIFFERENCES_END: Final = "<!-- end -->"
MADE: Final = "*Made by `make docs`; change the code, not this page.*"

HTTP_LIMITS: Final = (framing, records, spelling, api, users, dead_letters, lag)
_CONSTANT: Final = re.compile(r"^([A-Z]\w*_MAX): Final = [^#\n]+  # (.+)$", re.MULTILINE)

# Where a rule comes from: for those who read the code.
_SOURCE: Final = re.compile(r"\s*\((?:Q\d+|§[\d.]+|(?:spec|concepts|protocols): [^()]*)\)")


def pages() -> dict[str, str]:
    """Text of every page by file name."""
    writers: dict[str, Callable[[], Iterator[str]]] = {
        "cli.md": cli_page,
        "client.md": client_page,
        "compatibility.md": compatibility_page,
        "errors.md": errors_page,
        "kafka-settings.md": kafka_settings_page,
        "limits.md": limits_page,
        "permissions.md": permissions_page,
    }
    for wire in dict.fromkeys(page.wire for page in PAGES):
        writers[f"pages-{wire}.md"] = partial(statements_page, wire)
    return {name: "\n".join(write()) + "\n" for name, write in writers.items()}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A Markdown table; bars inside a cell are escaped."""
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"


# The command line.


def cli_page() -> Iterator[str]:
    """Every command with its options, and the exit codes."""
    yield from ["# The command line", "", MADE, ""]
    yield "Results go to standard output, everything said about the work to standard error. Every command takes `--help`."
    for words, command in _commands(main.app, ("polywire",)):
        yield from _command(words, command)
    yield from ["", "## Exit codes", ""]
    codes = [
        (EXIT_DONE, "done"),
        (EXIT_FAILED, "refused or failed; one line on standard error says why"),
        (EXIT_USAGE, "wrong usage"),
        (doctor.EXIT_DAMAGED, "`doctor`: something is damaged, a broker starts"),
        (doctor.EXIT_BROKEN, "`doctor`: no broker would start"),
        (lifecycle.EXIT_STORAGE, "`serve`: storage failed, nothing further was acknowledged"),
        (EXIT_INTERRUPTED, "interrupted; `serve`: ended at once by a second signal"),
    ]
    yield from table(("code", "meaning"), [(str(code), meaning) for code, meaning in codes])


def _commands(app: App, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], App]]:
    """Commands that do something, in the order of their help."""
    if app.default_command is not None:
        yield words, app
    for name in app:
        if not name.startswith("-"):
            yield from _commands(app[name], (*words, name))


def _command(words: Sequence[str], command: App) -> Iterator[str]:
    collection = command.assemble_argument_collection(parse_docstring=True)
    arguments = [argument for argument in collection if not argument.children]
    positional = [argument for argument in arguments if argument.required and not _is_option(argument)]
    given = [argument for argument in arguments if argument not in positional]
    needed = [argument.name.removeprefix("--").upper() for argument in positional]
    needed += [f"{argument.name} {argument.name.removeprefix('--').upper()}" for argument in given if argument.required]
    environment = "POLYWIRE_SERVE_" if words[-1] == "serve" else ""
    yield from ["", f"## {' '.join(words)}", ""]
    yield from ["```", " ".join([*words, *needed, "[OPTIONS]"]), "```", ""]
    text = cleandoc(command.help or "").partition("\nParameters\n")[0]
    yield from [text.strip(), ""]
    for argument in positional:
        yield from [f"`{argument.name.removeprefix('--').upper()}`: {argument.parameter.help}", ""]
    if given:
        yield from table(
            ("option", "default", "environment", "meaning"), [_option(argument, environment) for argument in given]
        )
        yield ""
    title, *lines = str(command.help_epilogue).partition(f"\n{EXIT_CODES}\n")[0].splitlines()
    yield from [title, "", "```sh", *(line.strip() for line in lines), "```"]


def _is_option(argument: Argument) -> bool:
    """Whether it can be given by its name only."""
    return argument.field_info.kind is Parameter.KEYWORD_ONLY


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
    """Every error code: what to do about it, and what it is called on each wire."""
    yield from ["# Errors", "", MADE, ""]
    yield "The *kind* of an error says what the caller should do, the *code* which error it is. Every wire says it in its own"
    yield "words."
    yield ""
    kinds = [
        (f"`{kind.__name__}`", kind.retry.value, cleandoc(kind.__doc__ or "").replace("``", "`")) for kind in KINDS
    ]
    yield from table(("kind", "ask again", "meaning"), kinds)
    yield ""
    rows = []
    for code in ErrorCode:
        kind = kind_of(code)
        word, text = WIRE_ERRORS[code]
        spelled = f"`{word.value.decode()}`" + (f" {text}" if text else "")
        rows.append((f"`{code.value}`", f"`{kind.__name__}`", kind.retry.value, spelled, str(CODES[code])))
    yield from table(("code", "kind", "ask again", "on FLUX", "on polywire"), rows)
    yield from ["", "FLUX has five words only; where its text is not given here, it is the broker's own message."]
    yield "A command that FLUX does not know is `UNKNOWN_COMMAND`. Bytes that are no request are answered where the next request"
    yield "can still be found; where it cannot, the connection is closed."


def kind_of(code: ErrorCode) -> type[BrokerError]:
    """The one kind an error code is raised as; of a code that nothing raises yet, the kind its number stands among."""
    kinds = {kind.__name__: kind for kind in KINDS}
    raised = sorted(kinds_raised().get(code.name, ()))
    return kinds[raised[0]] if raised else list(KINDS)[CODES[code] // 16]


# Settings and limits.


def limits_page() -> Iterator[str]:
    """Every setting and limit with its default and its reason."""
    yield from ["# Settings and limits", "", MADE, ""]
    yield "Those of the process are set with the options of [`polywire serve`](cli.md#polywire-serve), as far as it has them,"
    yield "those of a topic when it is created. The others are what a broker is built with: what is beyond a limit is refused"
    yield "with an [error](errors.md) or has to wait, and the broker stays as it was."
    for title, settings in (
        ("The process", ServeConfig),
        ("Connections", ConnectionLimits),
        ("The broker", BrokerSettings),
        ("The log", LogSettings),
        ("The FLUX wire", FluxSettings),
        ("The Cursus wire", CursusSettings),
    ):
        yield from ["", f"## {title}", ""]
        meanings = field_meanings(settings)
        rows = [(f"`{field.name}`", _default(field), meanings.get(field.name, "")) for field in fields(settings)]
        yield from table(("name", "default", "meaning"), rows)
    yield from ["", "## A topic", ""]
    yield "The same for every protocol, command and file; [Kafka's names](kafka-settings.md) are mapped to these where they mean the same."
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
    yield from ["", "## HTTP", ""]
    yield "What answers of the admin API, the console and `/metrics` hold at most, whatever records and names they are made from. The"
    yield "answer reports what is missing: `cut`, `header_count`, `more`, `next_offset`."
    yield ""
    yield from table(("name", "limit", "meaning"), [row for module in HTTP_LIMITS for row in _constants(module)])


def _constants(module: ModuleType) -> Iterator[tuple[str, str, str]]:
    """Limits that are constants of a module, with what the comment behind each says."""
    for name, meaning in _CONSTANT.findall(getsource(module)):
        value = getattr(module, name)
        yield f"`{name.lower()}`", _size(value) if "BYTES" in name else f"{value:,}", meaning


def kafka_settings_page() -> Iterator[str]:
    """Every setting of a topic by the name that Kafka's tools know."""
    yield from ["# Kafka's settings of a topic", "", MADE, ""]
    yield "CreateTopics, AlterConfigs and IncrementalAlterConfigs refuse unknown names and values out of range with INVALID_CONFIG. A setting"
    yield "without an effect is stored and returned by DescribeConfigs; it changes nothing here."
    yield ""
    rows = [
        (f"`{name}`", f"`{config.default}`" if config.default else "–", config.spelled, config.effect or "none")
        for name, config in TOPIC_CONFIGS.items()
    ]
    yield from table(("name", "default", "values", "effect"), rows)


def field_meanings(settings: type[Any]) -> Mapping[str, str]:
    """What the docstring of a dataclass says of its fields: ``name, name: text``, one after the other."""
    names = "|".join(field.name for field in fields(settings))
    parts = re.split(rf"\b((?:{names})(?:,\s+(?:{names}))*):\s", cleandoc(settings.__doc__ or ""))
    found: dict[str, str] = {}
    for heads, text in zip(parts[1::2], parts[2::2], strict=True):
        words = _SOURCE.sub("", " ".join(text.split())).replace("``", "`")
        found |= dict.fromkeys(re.split(r",\s+", heads), words.rstrip("."))
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


# What works on which wire.


def compatibility_page() -> Iterator[str]:
    """What each wire can do, and which scenarios of the behaviour suite run through it."""
    yield from ["# What works on which wire", "", MADE, ""]
    yield "One log lies behind all wires: what one writes, every other reads. A wire does what its protocol has words for."
    yield ""
    rows = [(ability.value, *("yes" if ability in wire.abilities else "–" for wire in WIRES)) for ability in Ability]
    yield from table(("ability", *(wire.name for wire in WIRES)), rows)
    yield from ["", "## Scenarios", ""]
    yield "`make test` runs every scenario through every wire that has the abilities it needs, and from every writer to every"
    yield "reader, against a real broker over real sockets. It prints these tables, with FAILED where one did not pass;"
    yield "– means that the wire has no words for it."
    yield ""
    yield from planned_table().lines()


# Who may do what.


def permissions_page() -> Iterator[str]:
    """The table of permissions, and what the suite plays against it."""
    yield from ["# Permissions", "", MADE, ""]
    yield "Whatever is asked of a broker that has users is one of these actions, on every wire. An action takes one permission (where several"
    yield "stand here, one of them) for one thing: everywhere, for the stream, or for the topic. *Any* means that it takes the permission for"
    yield "something, and does and tells only what belongs to that. A topic's access list takes away what the permission gives."
    yield "[How users get permissions](../operate/serve.md)."
    yield ""
    rows = [
        (
            f"`{action.word}`",
            "everybody" if action in ANYBODY else "log in" if action.is_everybodys else f"`{action.permission_words}`",
            "–" if action.is_everybodys else action.resource.value,
            action.listed.value if action.listed is not None else "–",
        )
        for action in Action
    ]
    yield from table(("action", "permission", "for", "access list"), rows)
    yield from ["", "## Every command of every wire", ""]
    yield "Made by the suite: each line is a request for what belongs to the tenant of a stream, played as everybody against real sessions."
    yield "*own*: carried out for what is one's own, and nothing is told of others'. On FLUX and Kafka 0.7, which have no login, the first"
    yield "column is the user `anonymous` without permissions, the others are known by their certificates."
    known = list(cases())
    for wire in commands():
        yield from ["", f"### {wire}", ""]
        yield from table(
            ("command", "action", *(player.value for player in Player)),
            [
                (f"`{case.command}`", f"`{case.action.word}`", *(expected(case, player).value for player in Player))
                for case in known
                if case.wire == wire
            ],
        )


# What the published pages say.


def statements(page: Page) -> list[Statement]:
    """What a page says, in the order of its lines."""
    for module in pkgutil.iter_modules(specs.__path__, f"{specs.__name__}."):
        import_module(module.name)
    return sorted((said for said in STATEMENTS if said.page == page), key=lambda said: (said.line, said.text))


def statements_page(wire: str) -> Iterator[str]:
    """Every statement of a wire's pages, and the test that shows it."""
    yield from [f"# What the pages of the {wire} wire say", "", MADE, ""]
    yield "Each statement in a line of its own, in our words, with the test in `tests/specs` that shows it on the wire's own port and on the"
    yield f"port of all wires. What differs on purpose stands in [the wire's page](../protocols/{wire}.md)."
    for page in PAGES:
        said = statements(page)
        if page.wire != wire:
            continue
        kept = sum(one.differs is None for one in said)
        yield from ["", f"## {page.title}", "", f"{kept} of {len(said)} statements hold as written.", ""]
        rows = [(str(one.line), one.text, "yes" if one.differs is None else "differs", f"`{one.test}`") for one in said]
        yield from table(("line", "says", "holds", "test"), rows)


def with_differences(wire: str, text: str) -> str:
    """A wire's page with its table of differences made anew."""
    before, begin, rest = text.partition(DIFFERENCES_BEGIN)
    _, end, after = rest.partition(DIFFERENCES_END)
    if not (begin and end):
        raise ValueError(f"docs/protocols/{wire}.md has no place for the table of differences")
    rows = [
        (one.page.name, str(one.line), one.text, one.differs.real, one.differs.ours, one.differs.why)
        for page in PAGES
        if page.wire == wire
        for one in statements(page)
        if one.differs is not None
    ]
    lines = "\n".join(table(("page", "line", "says", "real software", "Polywire", "why"), rows))
    return f"{before}{begin}\n\n{lines}\n\n{end}{after}"


def protocol_pages() -> dict[Path, str]:
    """The wires' pages, each with its table of differences, by file."""
    wires = dict.fromkeys(page.wire for page in PAGES)
    files = {wire: DOCS / "protocols" / f"{wire}.md" for wire in wires}
    return {file: with_differences(wire, file.read_text("utf-8")) for wire, file in files.items()}


def write() -> None:
    """Write every page that is not as it should be."""
    FOLDER.mkdir(exist_ok=True)
    made = {FOLDER / name: text for name, text in pages().items()} | protocol_pages()
    for page, text in made.items():
        if not page.exists() or page.read_text("utf-8") != text:
            page.write_text(text, "utf-8")


if __name__ == "__main__":
    write()
