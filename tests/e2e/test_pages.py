"""Follow the pages for newcomers from an installed wheel, and compare the output of their commands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeGuard

import pytest

from tests.e2e.followed_page import ROOT, Step, follow, matches, read_page

PAGES: Final = (
    "operate/back-up",
    "get-started/quickstart",
    "get-started/application",
    "get-started/tests",
    "get-started/operator",
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
    "migrate/kafka",
    "migrate/kafka07",
)
SPARK_PAGES: Final = ("get-started/spark",)
LONG: Final = (*SPARK_PAGES, "get-started/application", "migrate/kafka")  # followed first
TOGETHER_MAX: Final = 4

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def path_of(name: str) -> Path:
    return ROOT / "docs" / f"{name}.md"


@pytest.fixture(scope="module")
def followed(
    request: pytest.FixtureRequest, python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[str, Future[Sequence[tuple[Step, str]]]]]:
    """Follow several pages at the same time, because most of their commands wait: for records, members and timeouts.

    All tests of this module run in one process (``--dist loadscope``).
    """
    wanted = {str(item.callspec.params["name"]) for item in request.session.items if is_of_page(item)}
    with ThreadPoolExecutor(TOGETHER_MAX) as pool:

        def begin(name: str) -> Future[Sequence[tuple[Step, str]]]:
            folder = tmp_path_factory.mktemp("page") / "folder"
            folder.mkdir()
            return pool.submit(lambda: list(follow(path_of(name), python, folder)))

        yield {name: begin(name) for name in sorted(wanted, key=lambda name: name not in LONG)}
        pool.shutdown(cancel_futures=True)


def is_of_page(item: pytest.Item) -> TypeGuard[pytest.Function]:
    return isinstance(item, pytest.Function) and item.originalname == test_a_page_can_be_followed.__name__


@pytest.mark.parametrize(
    "name", [*PAGES, *(pytest.param(name, marks=pytest.mark.spark) for name in SPARK_PAGES)], ids=lambda name: str(name)
)
def test_a_page_can_be_followed(name: str, followed: Mapping[str, Future[Sequence[tuple[Step, str]]]]) -> None:
    path, steps = path_of(name), followed[name].result()
    assert steps
    wrong = [
        f"{path.name}:{step.line} printed {printed!r}, not {step.printed!r}"
        for step, printed in steps
        if step.printed is not None and not matches(printed, step.printed)
    ]
    assert not wrong


def test_every_page_for_newcomers_is_followed() -> None:
    docs = ROOT / "docs"
    with_commands = {
        page.relative_to(docs).with_suffix("").as_posix()
        for folder in ("get-started", "develop", "migrate")
        for page in (docs / folder).rglob("*.md")
        if read_page(page.read_text("utf-8")).steps
    }
    assert with_commands == {*PAGES, *SPARK_PAGES} - {"operate/back-up"}


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
