"""The documentation's site: every page has its place, links between pages stay links, and links into sources become text."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Final

import pytest

from tools.site import ROOT, configuration, navigation, site_links, sources

INDEX: Final = PurePosixPath("docs/index.md")


@pytest.mark.parametrize(
    ("source", "page", "text", "expected"),
    [
        ("docs/index.md", "index.md", "[a](client/guide.md#records)", "[a](client/guide.md#records)"),
        ("docs/index.md", "index.md", "[a](../CONTRIBUTING.md)", "[a](project/contributing.md)"),
        ("docs/operate/serve.md", "operate/serve.md", "[a](../../SECURITY.md#b)", "[a](../project/security.md#b)"),
        ("CONTRIBUTING.md", "project/contributing.md", "[a](docs/index.md)", "[a](../index.md)"),
        ("docs/index.md", "index.md", "[`a`](../src/polywire/errors.py) [b](#c)", "`a` [b](#c)"),
        ("docs/index.md", "index.md", "[a](https://b.example)", "[a](https://b.example)"),
        ("docs/index.md", "index.md", "```\n[a](../x.py)\n```\n", "```\n[a](../x.py)\n```\n"),
    ],
)
def test_links_on_the_site(source: str, page: str, text: str, expected: str) -> None:
    assert site_links(text, PurePosixPath(source), PurePosixPath(page)) == expected


def test_every_page_is_in_the_navigation() -> None:
    nav = navigation((ROOT / INDEX).read_text("utf-8"))
    named = {page for section in nav for value in section.values() for entry in _pages(value) for page in entry}
    assert {str(page) for _, page in sources()} - named == set()
    assert configuration(nav).startswith("[project]")


def _pages(value: str | list[dict[str, str]]) -> list[list[str]]:
    return [[value]] if isinstance(value, str) else [list(entry.values()) for entry in value]
