"""Every ``polywire`` command on a page for users exists, with the options that the page gives it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Final

import pytest

DOCS: Final = Path(__file__).parents[2] / "docs"
SECTIONS: Final = ("get-started", "concepts", "develop", "spark", "operate", "migrate")
PAGES: Final = sorted(page for section in SECTIONS for page in (DOCS / section).rglob("*.md"))
REFERENCE: Final = DOCS / "reference"
BLOCK: Final = re.compile(r"^ *```(?:sh)?\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
SPAN: Final = re.compile(r"`(polywire [a-z][^`\n]*)`")
COMMAND: Final = re.compile(
    r"(?:^|[|&;(] ?|\bdo |exec broker-\d )(?:\w+=\S+ )*(?:exec )?(polywire [a-z].*?)(?= [|&;#<>] ?|$)", re.MULTILINE
)
OPTION: Final = re.compile(r"(?<!\S)(--[a-z][\w-]*)")
EVERYWHERE: Final = frozenset({"--help", "--version"})
MESSAGES: Final = frozenset({"polywire does not support Update mode"})  # of other programs, quoted on a page


@cache
def options() -> Mapping[str, frozenset[str]]:
    """Return the options of each command as the reference pages list them."""
    text = (REFERENCE / "cli.md").read_text("utf-8")
    found = {}
    for section in text.split("\n## ")[1:]:
        title, _, body = section.partition("\n")
        found[title] = frozenset(re.findall(r"(--[a-z][\w-]*)", body))
    settings = (REFERENCE / "configuration.md").read_text("utf-8")
    found["polywire serve"] = frozenset(re.findall(r"^\| `(--[a-z][\w-]*)", settings, re.MULTILINE)) | frozenset(
        re.findall(r", `(--no-[\w-]*)`", settings)
    )
    return found


def commands(page: Path) -> Iterator[str]:
    """Yield the commands of a page's shell blocks and code spans."""
    text = page.read_text("utf-8")
    for block in BLOCK.finditer(text):
        yield from COMMAND.findall(block[1].replace("\\\n", " "))
    yield from SPAN.findall(BLOCK.sub("", text))


def command_of(line: str) -> str | None:
    """Return the command that a line runs, as its title in the reference."""
    words = re.match(r"polywire(?: [a-z][a-z-]*)*", line)
    assert words is not None
    parts = words[0].split()
    return next((" ".join(parts[:end]) for end in range(len(parts), 1, -1) if " ".join(parts[:end]) in options()), None)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_commands_of_a_page_exist(page: Path) -> None:
    wrong = []
    groups = {" ".join(title.split()[:2]) for title in options()}
    for line in frozenset(commands(page)) - MESSAGES:
        command = command_of(line)
        if command is None:
            wrong += [line] if " ".join(line.split()[:2]) not in groups else []
            continue
        wrong += [
            f"{command} {option}" for option in OPTION.findall(line) if option not in options()[command] | EVERYWHERE
        ]
    assert not wrong
