"""Follow the pages from an installed wheel, and compare the output of their commands."""

from __future__ import annotations

from typing import Final

import pytest

from tests.e2e.conftest import Followed
from tests.e2e.followed_page import ROOT, differences, matches, path_of, read_page
from tests.e2e.test_first_paths import FIRST_PAGES, FIRST_SPARK_PAGES

PAGES: Final = (
    "operate/back-up",
    "develop/testing",
    "develop/tracing",
    "develop/recipes/backfill",
    "develop/recipes/dead-letters",
    "develop/recipes/exactly-once",
    "develop/recipes/replay",
    "develop/recipes/schema-change",
    "develop/queues",
    "migrate/cursus",
    "migrate/flux",
    "migrate/iggy",
    "migrate/kafka07",
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_can_be_followed(name: str, followed: Followed) -> None:
    assert differences(path_of(name), followed[name].result()) == []


def test_every_page_for_newcomers_is_followed() -> None:
    docs = ROOT / "docs"
    with_commands = {
        page.relative_to(docs).with_suffix("").as_posix()
        for folder in ("get-started", "develop", "migrate")
        for page in (docs / folder).rglob("*.md")
        if read_page(page.read_text("utf-8")).steps
    }
    assert with_commands == {*PAGES, *FIRST_PAGES, *FIRST_SPARK_PAGES} - {"operate/back-up"}


def test_files_and_commands_of_a_page_are_parsed() -> None:
    page = read_page(
        '# A\n```sh\nls\n```\n\nsome\n\n```text\nb\n```\n```python title="a.py"\nx = 1\n```\n```text\nno output\n```\n```sh\npwd\n```\n'
    )
    assert page.files == {"a.py": "x = 1\n"}
    assert [(step.commands, step.printed, step.line) for step in page.steps] == [
        ("ls\n", "b\n", 2),
        ("pwd\n", None, 17),
    ]


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("a  b\n", "a b\n", True),
        ("a c b\n", "a … b\n", True),
        ("a\nb\nc\n", "…\nc\n", True),
        ("c\n", "…\nc\n", True),
        ("a\n", "b\n", False),
        ("a\nb\n", "a\n", False),
        ("", "a\n", False),
    ],
)
def test_output_is_compared(printed: str, expected: str, same: bool) -> None:
    assert matches(printed, expected) is same
