"""Exit codes that pages name are those in the help of the command that they are about."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import pytest

from polywire.cli.main import run

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = sorted(path for path in (ROOT / "docs").rglob("*.md") if path.parent.name not in ("decisions", "specs"))
GENERATED: Final = "cli.md"  # generated from the help itself
STATEMENT: Final = re.compile(r"(?:exits? with|exit codes?:?) (?:code )?(\d+[^.\n|]*)", re.IGNORECASE)
NUMBER: Final = re.compile(r"(?:^|[,;] (?:and )?|with )(\d+)\b(?! seconds)")
HELP: Final = re.compile(r"^  (\d+) ", re.MULTILINE)
COMMANDS: Final[Mapping[str, Sequence[Sequence[str]]]] = {
    "operate/cluster.md": (("cluster", "drain"), ("cluster", "check")),
    "operate/copy.md": (("record", "copy"), ("record", "compare")),
    "operate/deploy.md": (("serve",), ("config", "check")),
    "operate/back-up.md": (("backup", "create"),),
    "operate/monitor.md": (("serve",),),
    "operate/repair.md": (("doctor",), ("log", "verify"), ("segment", "verify")),
    "operate/troubleshoot.md": (("serve",),),
    "spark/pipelines.md": (("pipeline", "run"),),
}
"""The commands that each page describes where it names exit codes."""


def statements(page: Path) -> Iterator[list[int]]:
    """Yield the codes of each sentence that names some."""
    text = " ".join(page.read_text("utf-8").split("\n"))
    for found in STATEMENT.finditer(text):
        yield [int(number) for number in NUMBER.findall(found[1])]


def pages() -> dict[str, list[list[int]]]:
    """Return what each page says, of those that name exit codes."""
    found = {
        page.relative_to(ROOT / "docs").as_posix(): list(statements(page)) for page in PAGES if page.name != GENERATED
    }
    return {name: codes for name, codes in found.items() if codes}


def test_every_page_that_names_exit_codes_is_checked() -> None:
    assert set(pages()) == set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_exit_codes_of_a_page_are_those_of_its_commands(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    known = []
    for words in COMMANDS[name]:
        run([*words, "--help"])
        known.append({int(code) for code in HELP.findall(capsys.readouterr().out)})
    for codes in pages()[name]:
        assert codes, "a sentence about exit codes has at least one"
        assert any(set(codes) <= of_command for of_command in known), (codes, known)
